"""Far ends that lie: a verifier that a syncer cannot trust, and syncers that a verifier
cannot. Each ends in a named error, and none is believed.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from merkle.errors import ReconcileError
from proof.index import KeyRange
from proof.item import ROOT_DIGEST_BYTES, ItemHasher, ItemId
from proof.messages import (
    AnswerMessage,
    BitmapAnswer,
    QuestionMessage,
    RootAnswer,
    RootQuestion,
    SymbolsAnswer,
)
from proof.root import SetRoot
from proof.wire import decode_answer, encode_answer
from protos import verifier_pb2 as pb
from replicator.hashing import blake3_of
from replicator.proving import prove
from replicator.verifier.client import AnswerLimits, VerifierClient, VerifierUnavailableError
from replicator.verifier.messages import (
    description_from,
    patch_order_to,
    patch_to,
    write_to,
)
from replicator.verifier.server import SERVICE
from replicator.verifier.values import (
    PATCH_BYTES_MAX,
    PATCHED_BYTES_MAX,
    PATCHES_MAX,
    PatchOrder,
    RangePatch,
    Write,
)
from runtime.call_limits import CallLimits
from runtime.errors import BusyError, RemoteProtocolError
from runtime.rpc import open_channel, sent_error, start_server
from tests.support.stores import NOTHING, put
from tests.support.verifiers import VerifiedPair, fill, held, verified_pair
from tests.support.waiting import wait_until

CALL_S = 60.0
Answering = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


@dataclass
class LyingTarget:
    """Answers as the verifier does, but for one lie."""

    pair: VerifiedPair
    lie: Callable[[AnswerMessage, "LyingTarget"], AnswerMessage]
    last: AnswerMessage | None = None

    def prove(self, question: QuestionMessage) -> AnswerMessage:
        """See TargetProver."""
        told = self.lie(self.pair.client.prove(question), self)
        self.last = self.last or told
        return decode_answer(encode_answer(told))


def _root(change: Callable[[RootAnswer], RootAnswer]) -> Callable[..., AnswerMessage]:
    def lie(message: AnswerMessage, _: LyingTarget) -> AnswerMessage:
        answer = message.answer
        return (
            replace(message, answer=change(answer)) if isinstance(answer, RootAnswer) else message
        )

    return lie


def _replayed(message: AnswerMessage, target: LyingTarget) -> AnswerMessage:
    return replace(target.last or message, number=message.number)


def _noise(message: AnswerMessage, _: LyingTarget) -> AnswerMessage:
    match message.answer:
        case SymbolsAnswer(symbols):
            noise = random.Random(1).randbytes(len(symbols))
            return replace(message, answer=SymbolsAnswer(noise))
        case BitmapAnswer() as answer:
            return replace(message, answer=replace(answer, present=bytes(len(answer.present))))
        case _:
            return message


LIES: dict[str, Callable[..., AnswerMessage]] = {
    "equal without our root": _root(lambda answer: replace(answer, symbols=b"")),
    "another root": _root(lambda answer: replace(answer, root=answer.root + SetRoot(0, 1))),
    "more items": _root(lambda answer: replace(answer, root=answer.root + SetRoot(1, 0))),
    "another job": lambda message, _: replace(message, job=b"00000000"),
    "another question": lambda message, _: replace(message, number=message.number + 1),
    "a replay": _replayed,
    "noise": _noise,
    "a future position": _root(lambda answer: replace(answer, position=1 << 40)),
}


@pytest.mark.parametrize("name", LIES)
def test_no_lie_makes_unequal_buckets_equal(tmp_path: Path, name: str) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 100)
        fill(pair.target, 60)
        pair.prover().refresh()
        with pytest.raises(ReconcileError) as caught:
            prove(LyingTarget(pair, LIES[name]), pair.bucket.index, pair.profile)
        assert caught.value.code != "internal"


@dataclass
class FakeService:
    """A verifier that answers some methods with these messages, and nothing else."""

    answers: dict[str, Answering]

    def register(self, server: grpc.Server) -> None:
        """Add it to a server."""
        handlers: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(
                answer, None, lambda message: message.SerializeToString()
            )
            for name, answer in self.answers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@contextmanager
def fake(
    **answers: Callable[[Any, grpc.ServicerContext], Iterator[Any]],
) -> Iterator[VerifierClient]:
    """A client of a verifier that answers so."""
    server = start_server("127.0.0.1:0", [FakeService(answers).register])
    try:
        with closing(VerifierClient(server.address)) as client:
            yield client
    finally:
        server.stop()


def _each(*messages: Any) -> Answering:
    return lambda _requests, _context: iter(messages)


def writes(*keys: str) -> list[Write]:
    return [Write(key, b"x", NOTHING, blake3_of(b"x"), None) for key in keys]


TOTAL = bytes(16)
OK = pb.WriteResult(etag="e")


@pytest.mark.parametrize(
    "told",
    [
        [pb.BatchResult(batch=1, results=[OK], total=TOTAL)],
        [pb.BatchResult(batch=0, results=[], total=TOTAL)],
        [pb.BatchResult(batch=0, results=[OK, OK], total=TOTAL)],
        [pb.BatchResult(batch=0, results=[OK], total=b"short")],
        [pb.BatchResult(batch=0, results=[OK], total=TOTAL)] * 2,
        [pb.BatchResult(batch=number, results=[OK], total=TOTAL) for number in range(3)],
        [],
        [pb.RefreshProgress(objects=1 << 60)],
    ],
    ids=["other", "none", "more", "root", "twice", "unsent", "silence", "nonsense"],
)
def test_an_answer_to_another_batch_is_refused(told: list[Any], profile: Any) -> None:
    def answer(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        list(requests)
        yield from told

    with fake(WriteBatches=answer) as client, pytest.raises(ReconcileError) as caught:
        list(client.write(profile, [writes("a")]))
    assert caught.value.code == "remote_protocol"


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    with verified_pair(tmp_path / "profile") as pair:
        return pair.profile


def test_a_refresh_without_an_end_and_a_patch_of_another_object_are_refused(profile: Any) -> None:
    facts = pb.PatchResult(facts=pb.Facts(key="other", size_bytes=3), total=TOTAL)
    order = PatchOrder("k", ItemId(bytes(16)), 3, b"h" * 32, NOTHING)
    with fake(
        Refresh=_each(pb.RefreshProgress(objects=1)),
        PatchObject=_each(facts),
        GetFacts=_each(pb.GetFactsResponse(facts=[pb.Facts(key="unasked")])),
        Describe=_each(pb.DescribeResponse(profile=pb.Profile(secret=b"short"))),
    ) as client:
        for call in (
            lambda: client.refresh(profile),
            lambda: client.patch(profile, order, [RangePatch(0, 0, b"abc")]),
            lambda: client.facts(profile, ["a"]),
            client.describe,
        ):
            with pytest.raises(ReconcileError) as caught:
                call()
            assert caught.value.code == "remote_protocol"


def test_a_verifier_that_never_answers_is_unreachable(profile: Any) -> None:
    never = threading.Event()

    def stalled(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        never.wait(CALL_S)
        return iter(())

    methods = ("Describe", "Prove", "Refresh", "GetFacts", "WriteBatches", "PatchObject")
    order = PatchOrder("k", ItemId(bytes(16)), 3, b"h" * 32, NOTHING)
    question = QuestionMessage(
        b"job of 8", 0, profile.digest, RootQuestion(KeyRange(), None, bytes(ROOT_DIGEST_BYTES))
    )
    with fake(**dict.fromkeys(methods, stalled)) as other:
        limits = AnswerLimits(answer_s=0.5, batch_s=0.5)
        with closing(VerifierClient(other.address, limits=limits)) as client:
            for call in (
                client.describe,
                lambda: client.prove(question),
                lambda: client.refresh(profile),
                lambda: client.facts(profile, ["a"]),
                lambda: list(client.write(profile, [writes("a"), writes("b")])),
                lambda: client.patch(profile, order, [RangePatch(0, 0, b"abc")]),
            ):
                with pytest.raises(VerifierUnavailableError) as caught:
                    call()
                assert caught.value.exit_status == 7
        never.set()


class Garbage:
    """Bytes that are no message at all."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name of the protobuf library
        """See google.protobuf.message.Message."""
        return b"\xff\xff"


def test_answers_that_do_not_parse_leave_no_call_behind(profile: Any) -> None:
    """A connection has 64 streams at most: calls that do not end would use them up."""
    order = PatchOrder("k", ItemId(bytes(16)), 3, b"h" * 32, NOTHING)
    streams = dict.fromkeys(("Refresh", "WriteBatches", "PatchObject"), _each(Garbage(), Garbage()))
    with fake(**streams) as other:
        limits = AnswerLimits(answer_s=2.0, batch_s=2.0)
        with closing(VerifierClient(other.address, limits=limits)) as client:
            for call in (
                lambda: client.refresh(profile),
                lambda: list(client.write(profile, [writes("a")])),
                lambda: client.patch(profile, order, [RangePatch(0, 0, b"abc")]),
            ):
                for _ in range(65):
                    with pytest.raises(RemoteProtocolError):
                        call()


def test_a_batch_is_waited_for_while_others_are_answered(profile: Any) -> None:
    """Each answer begins the time anew, and nothing is due before a batch is sent."""
    turn = threading.Semaphore(0)

    def answer(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for number, _batch in enumerate(requests):
            turn.acquire(timeout=0.2)
            yield pb.BatchResult(batch=number, results=[OK], total=TOTAL)

    def slowly() -> Iterator[list[Write]]:
        for key in "abcdefgh":
            turn.acquire(timeout=0.2)
            yield writes(key)

    with fake(WriteBatches=answer) as other:
        limits = AnswerLimits(batch_s=1.0)
        with closing(VerifierClient(other.address, limits=limits)) as client:
            assert len(list(client.write(profile, slowly()))) == 8


@pytest.mark.parametrize(
    "sent",
    [
        pb.Profile(secret=b"short", algorithm="blake3"),
        pb.Profile(secret=bytes(32), algorithm="rot13"),
        pb.Profile(secret=bytes(32), properties=["tags", "metadata"]),
        pb.Profile(secret=bytes(32), properties=["tags", "tags"]),
    ],
    ids=["secret", "algorithm", "order", "twice"],
)
def test_a_profile_that_cannot_be_is_refused(sent: pb.Profile) -> None:
    with pytest.raises(RemoteProtocolError):
        description_from(pb.DescribeResponse(profile=sent))


def _serialized(message: Any) -> bytes:
    return message.SerializeToString()


def ended(channel: grpc.Channel, method: str, requests: Iterator[Any]) -> str:
    """How a stream to a verifier ends: the code of the error, or OK."""
    call: Any = channel.stream_stream(f"/{SERVICE}/{method}", _serialized, None)
    try:
        list(call(requests, timeout=CALL_S))
    except grpc.RpcError as error:
        named = sent_error(error)
        return named.code if named else error.code().name
    return "OK"


def refused(channel: grpc.Channel, method: str, request: Any) -> str:
    """The code of the error that answers one request, or OK."""
    call: Any = channel.unary_unary(f"/{SERVICE}/{method}", _serialized, None)
    try:
        call(request, timeout=CALL_S)
    except grpc.RpcError as error:
        named = sent_error(error)
        return named.code if named else error.code().name
    return "OK"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[VerifiedPair, grpc.Channel]]:
    with verified_pair(tmp_path) as pair:
        put(pair.target, "k", bytes(1000))
        pair.client.refresh(pair.profile)
        with open_channel(pair.client.address) as channel:
            yield pair, channel


def batch(pair: VerifiedPair, *sent: Write, profile: bytes = b"") -> pb.WriteBatch:
    return pb.WriteBatch(
        profile_digest=profile or pair.profile.digest, writes=[write_to(one) for one in sent]
    )


def test_batches_beyond_the_limits_are_refused_and_change_nothing(
    served: tuple[VerifiedPair, grpc.Channel],
) -> None:
    pair, channel = served
    before = held(pair.target)
    large = bytes((1 << 20) + 1)
    properties = Write("k", None, NOTHING, b"", None)
    for sent in (
        batch(pair, *writes(*map(str, range(1_001)))),
        batch(pair, *writes("a", "a")),
        batch(pair, *writes("")),
        batch(pair, *writes("k" * 1_025)),
        batch(pair, Write("a", large, NOTHING, blake3_of(large), None)),
        batch(pair, *(replace(one, body=large[1:]) for one in writes(*"abcde"))),
        batch(pair, properties),
        batch(pair, *writes("a"), profile=b"p" * 16),
        pb.WriteBatch(profile_digest=pair.profile.digest, writes=[pb.Write(key="a")]),
    ):
        assert ended(channel, "WriteBatches", iter([sent])) == "usage"
    assert held(pair.target) == before


def test_deletes_beyond_the_limits_are_refused_and_change_nothing(
    served: tuple[VerifiedPair, grpc.Channel],
) -> None:
    pair, channel = served
    put(pair.source, "k", bytes(1000))
    pair.refresh_source()
    row = pair.bucket.index.row("k")
    assert row is not None
    known = ItemHasher(pair.profile).hashes(row.item)
    before = held(pair.target)
    for items, profile in (
        (known, b"p" * 16),
        (known[:-1], pair.profile.digest),
        (known * 2, pair.profile.digest),
        (b"".join(number.to_bytes(12, "big") for number in range(1_001)), pair.profile.digest),
    ):
        request = pb.DeleteRequest(profile_digest=profile, items=items)
        assert refused(channel, "DeleteItems", request) == "usage"
    assert held(pair.target) == before


def test_answers_that_do_not_say_what_was_deleted_are_refused(profile: Any) -> None:
    ids = [ItemId(bytes([number]) * 16) for number in range(3)]
    for answer in (
        pb.DeleteResponse(),
        pb.DeleteResponse(deleted=2),
        pb.DeleteResponse(deleted=4),
        pb.DeleteResponse(deleted=2, refused=[pb.DeleteRefusal(item=3)]),
        pb.DeleteResponse(deleted=1, refused=[pb.DeleteRefusal(), pb.DeleteRefusal()]),
        pb.DeleteResponse(deleted=3, refused=[pb.DeleteRefusal()]),
        pb.DeleteResponse(deleted=3, total=b"short"),
    ):
        with fake(DeleteItems=_each(answer)) as client, pytest.raises(RemoteProtocolError):
            client.delete(profile, ids)
    honest = pb.DeleteResponse(deleted=2, refused=[pb.DeleteRefusal(item=1)], total=TOTAL)
    with fake(DeleteItems=_each(honest)) as client:
        (refusal,) = client.delete(profile, ids).refusals
        assert (refusal.place, bool(refusal.error)) == (1, True)


def test_patches_beyond_the_limits_are_refused_and_change_nothing(
    served: tuple[VerifiedPair, grpc.Channel],
) -> None:
    pair, channel = served
    before = held(pair.target)
    put(pair.source, "k", bytes(1000))
    pair.refresh_source()
    row = pair.bucket.index.row("k")
    assert row is not None
    base = ItemHasher(pair.profile).id(row.item)
    order = PatchOrder("k", base, 1000, blake3_of(bytes(1000)), NOTHING)
    header = pb.PatchPiece(header=patch_order_to(order, pair.profile.digest))
    other = pb.PatchPiece(header=patch_order_to(order, b"p" * 16))
    full = pb.PatchPiece(patch=patch_to(RangePatch(0, 0, bytes(PATCH_BYTES_MAX))))
    small = pb.PatchPiece(patch=patch_to(RangePatch(0, 0, b"")))
    too_long = pb.PatchPiece(patch=patch_to(RangePatch(0, 0, bytes(PATCH_BYTES_MAX + 1))))
    beyond = pb.PatchPiece(patch=patch_to(RangePatch(999, 2, b"x")))
    flood = PATCHED_BYTES_MAX // PATCH_BYTES_MAX + 1
    for pieces in (
        [],
        [small],
        [other],
        [header, header],
        [header, pb.PatchPiece()],
        [header, too_long],
        [header, beyond],
        [header, *[full] * flood],
        [header, *[small] * (PATCHES_MAX + 1)],
    ):
        assert ended(channel, "PatchObject", iter(pieces)) == "usage"
    assert ended(channel, "PatchObject", iter([header, small])) == "OK"
    assert held(pair.target) == before


def test_a_stream_that_never_ends_is_cut_and_blocks_nobody(tmp_path: Path) -> None:
    with verified_pair(tmp_path, limits=CallLimits(idle_s=0.5)) as pair:
        put(pair.source, "k", b"x")
        never = threading.Event()

        def stalled(first: Any) -> Iterator[Any]:
            yield first
            never.wait(CALL_S)

        order = PatchOrder("k", ItemId(bytes(16)), 1, bytes(32), NOTHING)
        header = pb.PatchPiece(header=patch_order_to(order, pair.profile.digest))
        with (
            open_channel(pair.client.address) as channel,
            ThreadPoolExecutor(4) as pool,
        ):
            calls = [
                pool.submit(ended, channel, "WriteBatches", stalled(batch(pair))),
                pool.submit(ended, channel, "WriteBatches", stalled(batch(pair))),
                pool.submit(ended, channel, "PatchObject", stalled(header)),
            ]
            # Meanwhile a sync goes through.
            assert pair.sync().equal
            assert {call.result() for call in calls} == {"CANCELLED"}
            never.set()


def test_clients_of_one_host_that_say_nothing_hold_half_of_the_threads(tmp_path: Path) -> None:
    """Forty silent streams and more: whoever else calls from there is told at once, and
    served when they were cancelled.
    """
    with verified_pair(tmp_path, limits=CallLimits(idle_s=3.0)) as pair, ExitStack() as stack:
        address = pair.client.address
        for _ in range(40):
            channel = stack.enter_context(grpc.insecure_channel(address))
            silence: SimpleQueue[bytes | None] = SimpleQueue()
            call = channel.stream_stream(f"/{SERVICE}/WriteBatches")(iter(silence.get, None))
            stack.callback(call.cancel)
            stack.callback(silence.put, None)
        client = VerifierClient(address)
        stack.callback(client.close)

        def is_busy() -> bool:
            try:
                client.describe()
            except BusyError:
                return True
            return False

        began_s = time.monotonic()
        wait_until(is_busy, "a refusal")
        assert time.monotonic() - began_s < 3.0
        wait_until(lambda: not is_busy(), "the streams to be cancelled")
