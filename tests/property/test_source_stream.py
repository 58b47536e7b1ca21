"""What a copy reads of its source: the right bytes, in few requests, with one answer
open at a time, whatever ends the answers.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.source_stream import SourceStream
from replicator.stores.errors import PreconditionFailedError, StoreUnavailableError
from replicator.stores.port import ObjectFacts

SIZE_BYTES = 4_000
FACTS = ObjectFacts("key", SIZE_BYTES, "etag", 1)
BODY = random.Random(5).randbytes(SIZE_BYTES)


@dataclass
class PiecewiseReader:
    """Reads one object, in pieces by chance. So many reads end early, by
    an error or without, and the first one at `ends_at`; `ranges` are what was asked
    for, `open` how many answers are.
    """

    rng: random.Random
    failures: int = 0
    ends_at: int = SIZE_BYTES
    is_replaced: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)
    open: int = 0

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader."""
        assert facts == FACTS
        assert end is not None
        if self.is_replaced:
            raise PreconditionFailedError("another one by now")
        self.ranges.append((first, end))
        self.open += 1
        assert self.open == 1
        try:
            yield self._pieces(first, end)
        finally:
            self.open -= 1

    def _pieces(self, first: int, end: int) -> Iterator[bytes]:
        while first < end:
            if self.failures and self.rng.random() < 0.3:
                self.failures -= 1
                if self.rng.random() < 0.5:
                    return
                raise StoreUnavailableError("no byte for too long")
            after = self.rng.randint(first + 1, end)
            if after > self.ends_at:
                last, self.ends_at = self.ends_at, SIZE_BYTES
                yield BODY[first:last]
                return
            yield BODY[first:after]
            first = after


def read(
    stream: SourceStream, first: int, end: int, until: int, *, in_pieces: bool = False
) -> bytes:
    """Bytes of the object, as often as it takes."""
    body = memoryview(bytearray(end - first))
    while True:
        try:
            if in_pieces:
                return b"".join(stream.pieces(FACTS, first, end, until=until))
            stream.read(FACTS, first, body, until=until)
        except StoreUnavailableError:
            continue
        return bytes(body)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), failures=st.integers(0, 4))
def test_each_read_has_its_bytes_whatever_was_read_before(seed: int, failures: int) -> None:
    rng = random.Random(seed)
    reader = PiecewiseReader(rng, failures)
    stream = SourceStream(reader)
    first = 0
    for _ in range(12):
        if rng.random() < 0.3 or first >= SIZE_BYTES:
            first = rng.randrange(SIZE_BYTES)
        end = rng.randint(first + 1, min(SIZE_BYTES, first + 900))
        until = rng.choice([end, rng.randint(end, SIZE_BYTES), SIZE_BYTES])
        if rng.random() < 0.2:
            # Of a part that the target refuses, not all pieces are taken.
            given_up = stream.pieces(FACTS, first, end, until=until)
            with suppress(StoreUnavailableError):
                next(given_up)
            given_up.close()
        in_pieces = rng.random() < 0.5
        assert read(stream, first, end, until, in_pieces=in_pieces) == BODY[first:end]
        first = end
    stream.close()
    stream.close()
    assert not reader.open


@settings(max_examples=100, deadline=None)
@given(step=st.integers(1, SIZE_BYTES), seed=st.integers(0, 2**32), in_pieces=st.booleans())
def test_parts_in_order_take_a_request_for_eight(step: int, seed: int, in_pieces: bool) -> None:
    """So it shows within eight parts that the object is another one by now."""
    reader = PiecewiseReader(random.Random(seed))
    stream = SourceStream(reader)
    for first in range(0, SIZE_BYTES, step):
        end = min(first + step, SIZE_BYTES)
        assert read(stream, first, end, SIZE_BYTES, in_pieces=in_pieces) == BODY[first:end]
    # An answer that was read to its end leaves its connection to others.
    assert not reader.open
    assert reader.ranges == [
        (first, min(first + 8 * step, SIZE_BYTES)) for first in range(0, SIZE_BYTES, 8 * step)
    ]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_after_an_answer_has_ended_early_nothing_is_asked_for_ahead(in_pieces: bool) -> None:
    """What a store had sent of it is lost: that must not happen again and again."""
    reader = PiecewiseReader(random.Random(1), ends_at=150)
    stream = SourceStream(reader)
    for first in (0, 100, 200, 300):
        found = read(stream, first, first + 100, 800, in_pieces=in_pieces)
        assert found == BODY[first : first + 100]
    assert reader.ranges == [(0, 800), (100, 200), (200, 300), (300, 400)]


def test_an_object_that_is_another_one_by_now_is_not_read_on() -> None:
    reader = PiecewiseReader(random.Random(1))
    stream = SourceStream(reader)
    read(stream, 0, 100, 200)
    reader.is_replaced = True
    read(stream, 100, 200, 200)
    with pytest.raises(PreconditionFailedError):
        read(stream, 200, 300, 300)
    assert not reader.open
