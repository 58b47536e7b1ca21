"""A client of a verifier, for syncers and commands: values in, values out."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from proof.item import ItemId, Profile
from proof.messages import AnswerMessage, QuestionMessage
from proof.root import SetRoot
from proof.wire import decode_answer, encode_question
from protos import verifier_pb2 as pb
from protos.verifier_pb2_grpc import VerifierStub
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ObjectFacts
from replicator.verifier.messages import (
    KEYS_MAX,
    batch_result_from,
    delete_answer_from,
    delete_request_to,
    description_from,
    facts_from,
    index_state_from,
    key_results_from,
    key_writes_to,
    patch_order_to,
    patch_to,
    root_from,
    run_to,
    write_to,
)
from replicator.verifier.values import (
    RUN_BYTES,
    BatchResult,
    DeleteAnswer,
    Description,
    IndexState,
    KeyWrite,
    PatchOrder,
    RangePatch,
    RunName,
    Write,
    WriteOutcome,
)
from runtime.errors import OperationInterruptedError, RemoteProtocolError
from runtime.roles import Role
from runtime.rpc import StreamCall, UnaryStreamCall, named_errors, open_channel
from runtime.tls_files import Tls

_Answer = TypeVar("_Answer", bound=Message)
# A refresh reads a bucket, and a patch an object of 5 TiB at most.
_LONG_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How long a verifier may take for its next answer. One message of a comparison
    reads at most the IDs of some ranges, and long work answers every few seconds. A
    batch has 1,000 writes at most, some at a time.
    """

    answer_s: float = 120.0
    batch_s: float = 900.0


_LIMITS = AnswerLimits()
_SERVICE = pb.DESCRIPTOR.services_by_name["Verifier"].full_name


class VerifierUnavailableError(StoreUnavailableError):
    """The verifier does not answer; the sync goes on later, from where it stopped."""

    code = "verifier_unavailable"


class VerifierClient:
    """A client of the verifier at an address; it connects on first use.

    Every call may raise VerifierUnavailableError, RemoteProtocolError for an invalid
    answer, and the errors that the verifier returns. `bytes_sent` and `bytes_received`
    count messages of all calls without headers, `calls` the calls. Thread-safe.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        channel: grpc.Channel | None = None,
        limits: AnswerLimits = _LIMITS,
    ) -> None:
        """`channel` is used instead of one to the address."""
        self.address = address
        self.limits = limits
        """How long it may take for an answer."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.calls = 0
        self._counting = threading.Lock()
        self._run: RunName | None = None
        self._begins = False
        self._tls = tls
        self._channel = channel or open_channel(
            address, tls=tls, insecure=insecure, server=Role.VERIFIER
        )
        self._stub = VerifierStub(self._channel)
        # Answers of streams stay bytes here. One that gRPC itself could not parse would
        # end its call for us alone: nothing could cancel it, and the connection would
        # have a stream less.
        self._refresh: UnaryStreamCall = self._channel.unary_stream(
            f"/{_SERVICE}/Refresh", pb.RefreshRequest.SerializeToString, None
        )
        self._write: StreamCall = self._channel.stream_stream(
            f"/{_SERVICE}/WriteBatches", pb.WriteBatch.SerializeToString, None
        )
        self._patch: StreamCall = self._channel.stream_stream(
            f"/{_SERVICE}/PatchObject", pb.PatchPiece.SerializeToString, None
        )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def begin_run(self, pair: bytes) -> None:
        """Begin a run of this pair (RUN_BYTES). The next refresh tells the verifier,
        which then takes no writes of earlier ones any more.
        """
        self._run, self._begins = RunName(pair, secrets.token_bytes(RUN_BYTES)), True

    def begin(self, profile: Profile, run: RunName) -> None:
        """Begin a run now: the verifier takes no writes of earlier ones of its pair any
        more, and what this client sends names it.
        """
        request = pb.BeginRunRequest(profile_digest=profile.digest, run=run_to(run))
        with self._named_errors():
            answer: pb.BeginRunResponse = _received(
                self._stub.BeginRun(request, timeout=self.limits.answer_s)
            )
        self._count(calls=1, sent=request, received=answer)
        self._run, self._begins = run, False

    def describe(self) -> Description:
        """What the verifier says of itself."""
        with self._named_errors():
            answer: pb.DescribeResponse = _received(
                self._stub.Describe(pb.DescribeRequest(), timeout=self.limits.answer_s)
            )
        self._count(calls=1, received=answer)
        return description_from(answer)

    def prove(self, question: QuestionMessage) -> AnswerMessage:
        """Ask one question of a comparison."""
        request = pb.ProveRequest(question=encode_question(question))
        with self._named_errors():
            answer: pb.ProveResponse = _received(
                self._stub.Prove(request, timeout=self.limits.answer_s)
            )
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
        seen and the bytes read so far, first when the refresh begins.

        Raises:
            OperationInterruptedError: `stopped`, which is asked every few seconds.
        """
        request = pb.RefreshRequest(
            profile_digest=profile.digest, read_since_ms=1000 * read_since_s, prefix=prefix
        )
        if self._run is not None and self._begins:
            request.begins.CopyFrom(run_to(self._run))
        last = None
        self._count(calls=1, sent=request)
        with self._named_errors():
            call = self._refresh(request, timeout=_LONG_S)
            for last in self._answers(pb.RefreshProgress, call, self.limits.answer_s):
                # Told once: a copy of it that comes late must not end a later run.
                self._begins = False
                if stopped():
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
                    self._stub.GetFacts(request, timeout=self.limits.answer_s)
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
                    self._name_run(request)
                    self._count(sent=request)
                    yield request
            except Exception as error:  # noqa: BLE001 - any error is raised again below
                failed.append(error)

        number = 0
        self._count(calls=1)
        with self._named_errors():
            call = self._write(requests(), timeout=_LONG_S)
            answers = self._answers(
                pb.BatchResult, call, self.limits.batch_s, lambda: len(sizes) > number
            )
            # An error's traceback would keep the answers, and their call, alive.
            with closing(answers):
                for answer in answers:
                    number += 1
                    if number > len(sizes):
                        raise RemoteProtocolError("the verifier answered a batch that was not sent")
                    yield batch_result_from(answer, number=number - 1, writes=sizes[number - 1])
        if failed:
            raise failed[0]
        if number != len(sizes):
            raise RemoteProtocolError("the verifier did not answer every batch")

    def write_keys(self, profile: Profile, writes: Sequence[KeyWrite]) -> list[WriteOutcome]:
        """Change at most WRITES_MAX different keys, each for itself; what became of
        each.
        """
        request = key_writes_to(writes, profile.digest)
        self._name_run(request)
        with self._named_errors():
            answer: pb.WriteKeysResponse = _received(
                self._stub.WriteKeys(request, timeout=self.limits.batch_s)
            )
        self._count(calls=1, sent=request, received=answer)
        return key_results_from(answer, writes=len(writes))

    def delete(self, profile: Profile, ids: Sequence[ItemId]) -> DeleteAnswer:
        """Delete at most DELETES_MAX items."""
        request = delete_request_to(ids, profile.digest)
        self._name_run(request)
        with self._named_errors():
            answer: pb.DeleteResponse = _received(
                self._stub.DeleteItems(request, timeout=self.limits.batch_s)
            )
        self._count(calls=1, sent=request, received=answer)
        return delete_answer_from(answer, deletes=len(ids))

    def patch(
        self, profile: Profile, order: PatchOrder, patches: Iterable[RangePatch]
    ) -> tuple[ObjectFacts, SetRoot]:
        """Replace ranges of one object; returns its new facts and the new root."""

        def pieces() -> Iterator[pb.PatchPiece]:
            header = patch_order_to(order, profile.digest)
            self._name_run(header)
            yield counted(pb.PatchPiece(header=header))
            for patch in patches:
                yield counted(pb.PatchPiece(patch=patch_to(patch)))

        def counted(piece: pb.PatchPiece) -> pb.PatchPiece:
            self._count(sent=piece)
            return piece

        self._count(calls=1)
        with self._named_errors():
            call = self._patch(pieces(), timeout=_LONG_S)
            last = deque(self._answers(pb.PatchResult, call, self.limits.answer_s), maxlen=1)
        if not last or not last[0].HasField("facts"):
            raise RemoteProtocolError("the verifier did not say how its patch ended")
        answer = last[0]
        facts = facts_from(answer.facts)
        if facts.key != order.key or facts.size_bytes != order.result_size_bytes:
            raise RemoteProtocolError("the verifier patched another object")
        return facts, root_from(answer.items, answer.total)

    def _name_run(
        self, request: pb.WriteBatch | pb.DeleteRequest | pb.PatchHeader | pb.WriteKeysRequest
    ) -> None:
        if self._run is not None:
            request.run.CopyFrom(run_to(self._run))

    def _answers(
        self,
        kind: type[_Answer],
        call: "_Call",
        limit_s: float,
        is_due: Callable[[], bool] = lambda: True,
    ) -> Generator[_Answer, None, None]:
        """The answers of a call; one that is due for too long ends it. The call is over
        once nobody asks for its next answer.
        """
        watch = _AnswerWatch(call.cancel, limit_s, is_due)
        try:
            for raw in call:
                answer = kind.FromString(raw)
                self._count(received=answer)
                watch.note_answer()
                yield answer
                watch.note_taken()
        except DecodeError as error:
            raise RemoteProtocolError(
                f"verifier {self.address}: an answer is no {kind.DESCRIPTOR.name}"
            ) from error
        except grpc.RpcError as error:
            if not watch.is_expired:
                raise
            raise VerifierUnavailableError(
                f"verifier {self.address}: no answer for {limit_s:g} s",
                hint="Look at its log, and run this again.",
            ) from error
        finally:
            call.cancel()
            watch.close()

    def _count(
        self, *, calls: int = 0, sent: Message | None = None, received: Message | None = None
    ) -> None:
        with self._counting:
            self.calls += calls
            self.bytes_sent += sent.ByteSize() if sent is not None else 0
            self.bytes_received += received.ByteSize() if received is not None else 0

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            with named_errors(f"verifier {self.address}", VerifierUnavailableError):
                yield
        except VerifierUnavailableError as error:
            # Imported here: it is needed only where a connection failed.
            from runtime.tls_faults import named_fault

            named = named_fault(error, self.address, self._tls)
            if named is error:
                raise
            raise named from error


class _Call(Protocol):
    """A call under way, whose answers come as bytes."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> object:
        """End it."""


class _AnswerWatch:
    """Cancels a call when an answer is due for too long. No keepalive sees that: the
    process at the other end may be stopped, and its machine still answer.
    """

    def __init__(
        self, cancel: Callable[[], object], limit_s: float, is_due: Callable[[], bool]
    ) -> None:
        self.is_expired = False
        self._is_waiting = True
        self._answered = 0
        self._cancel, self._limit_s, self._is_due = cancel, limit_s, is_due
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answer-watch", daemon=True)
        self._thread.start()

    def note_answer(self) -> None:
        """An answer has come, and nobody waits for the next one yet."""
        self._answered += 1
        self._is_waiting = False

    def note_taken(self) -> None:
        """The next answer is waited for."""
        self._is_waiting = True

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        due_since_s, answered = time.monotonic(), 0
        while not self._closed.wait(min(1.0, self._limit_s / 10)):
            now_s = time.monotonic()
            if answered != self._answered or not (self._is_waiting and self._is_due()):
                due_since_s, answered = now_s, self._answered
            elif now_s - due_since_s > self._limit_s:
                self.is_expired = True
                self._cancel()
                return


def _received(answer: _Answer | None) -> _Answer:
    """The answer of a call; gRPC gives None where a server ended it well without one.

    Raises:
        RemoteProtocolError: there is none.
    """
    if answer is None:
        raise RemoteProtocolError("the verifier ended a call without an answer")
    return answer
