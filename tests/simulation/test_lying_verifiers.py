"""Verifiers that lie to a whole sync: it ends in a named error, or it says that the
sides are not equal. Only a lie about its own store is believed (docs/proof.md).
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merkle.errors import ReconcileError
from proof.messages import AnswerMessage, RootAnswer
from proof.root import SetRoot
from proof.wire import decode_answer, encode_answer
from protos import verifier_pb2 as pb
from replicator.verifier.server import VerifierService
from tests.support.memory_store import MEMORY
from tests.support.proven_storm import Parts, ProvenStorm

OK = pb.WriteResult(etag="e")


class _Lying(VerifierService):
    """Honest during the first run, so that there is something to replay."""

    lies = False


class _MakesUpRoots(_Lying):
    """Names a root of its own making, and the same one as its settled root."""

    root = SetRoot(5, 12345)

    def prove(self, request: pb.ProveRequest, context: Any) -> pb.ProveResponse:
        answer = super().prove(request, context)
        return _changed(answer, self._told) if self.lies else answer

    def _told(self, answer: RootAnswer) -> RootAnswer:
        return replace(answer, root=self.root)

    def refresh(self, request: pb.RefreshRequest, context: Any) -> Iterator[pb.RefreshProgress]:
        for one in super().refresh(request, context):
            if self.lies and one.HasField("index"):
                one.index.settled_items = self.root.count
                one.index.settled_total = self.root.total.to_bytes(16, "big")
            yield one


class _ClaimsEquality(_MakesUpRoots):
    """The same, and says that nothing differs."""

    def _told(self, answer: RootAnswer) -> RootAnswer:
        return replace(answer, root=self.root, symbols=b"")


class _ReplaysRoots(_Lying):
    """Answers with the first root that it ever said, under the job of each question."""

    first: pb.ProveResponse | None = None

    def prove(self, request: pb.ProveRequest, context: Any) -> pb.ProveResponse:
        answer = super().prove(request, context)
        message = decode_answer(answer.answer)
        if isinstance(message.answer, RootAnswer):
            if self.lies and self.first is not None:
                earlier = decode_answer(self.first.answer)
                told = AnswerMessage(message.job, message.number, earlier.answer)
                return pb.ProveResponse(answer=encode_answer(told))
            type(self).first = answer
        return answer


class _AcknowledgesOnly(_Lying):
    """Says that it wrote, and writes nothing."""

    def write(self, requests: Iterator[pb.WriteBatch], context: Any) -> Iterator[pb.BatchResult]:
        if not self.lies:
            yield from super().write(requests, context)
            return
        for request in requests:
            results = [OK] * len(request.writes)
            yield pb.BatchResult(batch=request.batch, results=results, total=bytes(16))


class _ReplaysAcknowledgements(_Lying):
    """Answers each batch as it answered the first one, and writes nothing."""

    first: pb.BatchResult | None = None

    def write(self, requests: Iterator[pb.WriteBatch], context: Any) -> Iterator[pb.BatchResult]:
        if not self.lies:
            for answer in super().write(requests, context):
                type(self).first = answer
                yield answer
            return
        for _ in requests:
            assert self.first is not None
            yield self.first


class _SaysItHeldStill(_Lying):
    """Says that it held all the time what it held when its first refresh ended."""

    first: pb.IndexState | None = None

    def refresh(self, request: pb.RefreshRequest, context: Any) -> Iterator[pb.RefreshProgress]:
        for one in super().refresh(request, context):
            if one.HasField("index"):
                if self.lies and self.first is not None:
                    one.index.settled_items = self.first.settled_items
                    one.index.settled_total = self.first.settled_total
                elif one.index.settled_total:
                    type(self).first = one.index
            yield one


def _changed(answer: pb.ProveResponse, change: Any) -> pb.ProveResponse:
    message = decode_answer(answer.answer)
    if not isinstance(message.answer, RootAnswer):
        return answer
    return pb.ProveResponse(answer=encode_answer(replace(message, answer=change(message.answer))))


LIARS = (
    _MakesUpRoots,
    _ClaimsEquality,
    _ReplaysRoots,
    _AcknowledgesOnly,
    _ReplaysAcknowledgements,
    _SaysItHeldStill,
)


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("count", [1, 30])
def test_no_liar_makes_unequal_sides_equal(
    memory_folder: Path, liar: type[_Lying], count: int
) -> None:
    rng, lying = random.Random(count), type("Lying", (liar,), {})
    storm = ProvenStorm(1, memory_folder, Parts(service=lying))
    storm.target.capabilities = MEMORY
    for number in range(40):
        storm.source.write(f"k{number:02}", rng.randbytes(20))
    assert storm.sync().equal
    lying.lies = True
    for number in range(count):
        storm.source.write(f"k{number:02}", rng.randbytes(20))
    # A named error, or a report that the observer checks, too.
    with suppress(ReconcileError):
        report = storm.sync()
        assert not report.equal or storm.target.bodies() == storm.source.bodies()
        assert report.equal is not bool(report.differences)
    lying.lies = False
    assert storm.sync().equal
    assert storm.target.bodies() == storm.source.bodies()
