"""A client of a verifier, for syncers and commands: values in, values out."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from proof.item import Profile
from proof.messages import AnswerMessage, QuestionMessage
from proof.root import SetRoot
from proof.wire import decode_answer, encode_question
from protos import verifier_pb2 as pb
from protos.verifier_pb2_grpc import VerifierStub
from replicator.stores.port import ObjectFacts, StoreUnavailableError
from replicator.verifier.messages import (
    KEYS_MAX,
    batch_result_from,
    description_from,
    facts_from,
    index_state_from,
    patch_order_to,
    patch_to,
    root_from,
    write_to,
)
from replicator.verifier.values import (
    BatchResult,
    Description,
    IndexState,
    PatchOrder,
    RangePatch,
    Write,
)
from runtime.errors import OperationInterruptedError, RemoteProtocolError
from runtime.rpc import Tls, named_errors, open_channel

_M = TypeVar("_M", bound=Message)
# One message of a comparison reads at most the IDs of some ranges.
DEADLINE_S = 120.0
# A refresh reads a bucket, and a patch an object of 5 TiB at most.
_LONG_S = 7 * 86_400.0


class VerifierUnavailableError(StoreUnavailableError):
    """The verifier does not answer; the sync goes on later, from where it stopped."""

    code = "verifier_unavailable"


class VerifierClient:
    """A client of the verifier at an address; it connects on first use.

    Every call may raise VerifierUnavailableError, RemoteProtocolError for an invalid
    answer, and the errors that the verifier returns. `bytes_sent` and `bytes_received`
    count messages of all calls without headers, `calls` the calls. Thread-safe.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, insecure: bool = False) -> None:
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self.calls = 0
        self._counting = threading.Lock()
        self._channel = open_channel(address, tls=tls, insecure=insecure)
        self._stub = VerifierStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def describe(self) -> Description:
        """What the verifier says of itself."""
        with self._named_errors():
            answer: pb.DescribeResponse = _received(
                self._stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)
            )
        self._count(calls=1, received=answer)
        return description_from(answer)

    def prove(self, question: QuestionMessage) -> AnswerMessage:
        """Ask one question of a comparison."""
        request = pb.ProveRequest(question=encode_question(question))
        with self._named_errors():
            answer: pb.ProveResponse = _received(self._stub.Prove(request, timeout=DEADLINE_S))
        self._count(calls=1, sent=request, received=answer)
        return decode_answer(answer.answer)

    def refresh(
        self,
        profile: Profile,
        *,
        read_since_s: int = 0,
        prefix: str = "",
        progress: Callable[[int, int], None] = lambda _objects, _bytes_read: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> IndexState:
        """Have the verifier bring its index up to date; `progress` gets the objects
        seen and the bytes read so far.

        Raises:
            OperationInterruptedError: `stopped`, which is asked every few seconds.
        """
        request = pb.RefreshRequest(
            profile_digest=profile.digest, read_since_ms=1000 * read_since_s, prefix=prefix
        )
        last = None
        self._count(calls=1, sent=request)
        with self._named_errors():
            call = self._stub.Refresh(request, timeout=_LONG_S)
            for last in call:
                self._count(received=last)
                if stopped():
                    call.cancel()
                    raise OperationInterruptedError("the refresh was stopped")
                progress(last.objects, last.bytes_read)
        if last is None or not last.HasField("index"):
            raise RemoteProtocolError("the verifier did not say how its refresh ended")
        return index_state_from(last.index)

    def facts(self, profile: Profile, keys: Sequence[str]) -> dict[str, ObjectFacts]:
        """Fresh facts of the objects that exist among the keys."""
        found = dict[str, ObjectFacts]()
        for first in range(0, len(keys), KEYS_MAX):
            page = keys[first : first + KEYS_MAX]
            request = pb.GetFactsRequest(profile_digest=profile.digest, keys=page)
            with self._named_errors():
                answer: pb.GetFactsResponse = _received(
                    self._stub.GetFacts(request, timeout=DEADLINE_S)
                )
            self._count(calls=1, sent=request, received=answer)
            found |= {facts.key: facts for facts in map(facts_from, answer.facts)}
            if not found.keys() <= set(keys):
                raise RemoteProtocolError("the verifier sent facts that nobody asked for")
        return found

    def write(self, profile: Profile, batches: Iterable[Sequence[Write]]) -> Iterator[BatchResult]:
        """Send batches of writes as they come; yields one result for each, in order. An
        error of `batches` is raised once those before it are answered.
        """
        sizes, failed = list[int](), list[Exception]()

        def requests() -> Iterator[pb.WriteBatch]:
            # A thread of gRPC runs this, and would only log an error.
            try:
                for number, writes in enumerate(batches):
                    sizes.append(len(writes))
                    request = pb.WriteBatch(
                        profile_digest=profile.digest,
                        batch=number,
                        writes=[write_to(write) for write in writes],
                    )
                    self._count(sent=request)
                    yield request
            except Exception as error:  # noqa: BLE001 - any error is raised again below
                failed.append(error)

        number = 0
        self._count(calls=1)
        with self._named_errors():
            for number, answer in enumerate(
                self._stub.WriteBatches(requests(), timeout=_LONG_S), start=1
            ):
                self._count(received=answer)
                if number > len(sizes):
                    raise RemoteProtocolError("the verifier answered a batch that was not sent")
                yield batch_result_from(answer, number=number - 1, writes=sizes[number - 1])
        if failed:
            raise failed[0]
        if number != len(sizes):
            raise RemoteProtocolError("the verifier did not answer every batch")

    def patch(
        self, profile: Profile, order: PatchOrder, patches: Iterable[RangePatch]
    ) -> tuple[ObjectFacts, SetRoot]:
        """Replace ranges of one object; returns its new facts and the new root."""

        def pieces() -> Iterator[pb.PatchPiece]:
            yield counted(pb.PatchPiece(header=patch_order_to(order, profile.digest)))
            for patch in patches:
                yield counted(pb.PatchPiece(patch=patch_to(patch)))

        def counted(piece: pb.PatchPiece) -> pb.PatchPiece:
            self._count(sent=piece)
            return piece

        answer = None
        self._count(calls=1)
        with self._named_errors():
            for answer in self._stub.PatchObject(pieces(), timeout=_LONG_S):
                self._count(received=answer)
        if answer is None or not answer.HasField("facts"):
            raise RemoteProtocolError("the verifier did not say how its patch ended")
        facts = facts_from(answer.facts)
        if facts.key != order.key or facts.size_bytes != order.result_size_bytes:
            raise RemoteProtocolError("the verifier patched another object")
        return facts, root_from(answer.items, answer.total)

    def _count(
        self, *, calls: int = 0, sent: Message | None = None, received: Message | None = None
    ) -> None:
        with self._counting:
            self.calls += calls
            self.bytes_sent += sent.ByteSize() if sent is not None else 0
            self.bytes_received += received.ByteSize() if received is not None else 0

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        with named_errors(f"verifier {self.address}", VerifierUnavailableError):
            yield


def _received(answer: _M | None) -> _M:
    """The answer of a call; gRPC gives None where a server ended it well without one.

    Raises:
        RemoteProtocolError: there is none.
    """
    if answer is None:
        raise RemoteProtocolError("the verifier ended a call without an answer")
    return answer
