"""Listings of a bucket as columns, and how a build of an index cuts them by keys.

An index of a huge bucket is built from a listing that exists already. It comes in
parts, say files, which tasks read. A sample of their keys cuts the bucket into ranges
of nearly equal counts; both engines cut alike, so that both make the same files.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from proof.columns import ByteColumn, words_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Current objects of a bucket. `etag_is_md5`: if the ETag has the form of an MD5, it is
# that of the object's bytes, as far as the listing tells.
LISTED_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("modified_ms", pa.int64(), nullable=False),
        pa.field("etag", pa.binary(), nullable=False),
        pa.field("version", pa.binary(), nullable=False),
        pa.field("etag_is_md5", pa.bool_(), nullable=False),
    ]
)
# The sampled keys of one part; `rows` are all that it has, each key stands for `weight`
# of them. `part` is its number.
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("weight", pa.int64(), nullable=False),
        pa.field("keys", pa.list_(pa.binary()), nullable=False),
    ]
)
# Keys that are sampled of all parts, at most, and of one in any case: the driver holds
# them.
_SAMPLED_MAX, _SAMPLED_LEAST = 1 << 18, 64
# Rows for one sampled key, in a part that has few.
_SAMPLED_EVERY = 64


class ListingPart(Protocol):
    """A part of a listing, in no order. It can be pickled."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The current objects in it, in columns of LISTED_SCHEMA.

        Raises:
            ListingInvalidError: it cannot be read, or is not what its manifest says.
        """

    def listed_keys(self) -> Iterator[pa.Array]:
        """The keys of about the same rows, as arrays of bytes, for less.

        Raises:
            ListingInvalidError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class KeySample:
    """Some keys of all parts, each with the number of rows that it stands for."""

    keys: tuple[tuple[bytes, int], ...]
    rows: int

    @classmethod
    def of(cls, samples: Iterable[pa.Table]) -> "KeySample":
        """The sample in tables of SAMPLE_SCHEMA, in any order."""
        found, rows = list[tuple[bytes, int]](), 0
        for one in samples:
            for row in one.to_pylist():
                found += ((key, row["weight"]) for key in row["keys"])
                rows += row["rows"]
        return cls(tuple(sorted(found)), rows)

    def bounds(self, range_rows: int) -> tuple[bytes, ...]:
        """Texts that cut all keys into ranges of about so many rows, ascending. None
        ends with a zero.
        """
        bounds, rows, before = list[bytes](), 0, b""
        for key, weight in self.keys:
            if rows >= range_rows:
                bound = _shortest_between(before, key)
                if bound > (bounds[-1] if bounds else b""):
                    bounds.append(bound)
                    rows = 0
            rows += weight
            before = key
        assert all(a < b for a, b in pairwise(bounds))
        return tuple(bounds)


def sample_part(number: int, part: ListingPart, *, parts: int) -> pa.Table:
    """A row of SAMPLE_SCHEMA about one of so many parts.

    Raises:
        ListingInvalidError: it cannot be read.
    """
    every, rows, kept = _SAMPLED_EVERY, 0, list[bytes]()
    most = max(_SAMPLED_MAX // parts, _SAMPLED_LEAST)
    for keys in part.listed_keys():
        # The first row whose place in the part is a multiple of `every`.
        places = np.arange(-rows % every, len(keys), every)
        kept += keys.take(pa.array(places)).to_pylist()
        rows += len(keys)
        while len(kept) > most:
            kept, every = kept[::2], 2 * every
    row = {"part": number, "rows": rows, "weight": every, "keys": kept}
    return pa.Table.from_pylist([row], SAMPLE_SCHEMA)


def range_numbers(keys: pa.Array, bounds: Sequence[bytes]) -> "NDArray[np.int32]":
    """The number of the range of each key (an array of bytes); bounds are those of
    `KeySample.bounds`.
    """
    if not bounds:
        return np.zeros(len(keys), np.int32)
    # Most keys differ from all bounds in the eight bytes behind what bounds have in
    # common. Like numbers, texts are compared as if zeros followed: bounds do not end
    # with zeros, so that a key is not before one that it equals then.
    prefix = bounds[0][: _common_bytes(bounds[0], bounds[-1])]
    column, cuts = byte_column(keys), ByteColumn.of(bounds)
    words, bound_words = (_words_behind(len(prefix), one) for one in (column, cuts))
    found = np.searchsorted(bound_words, words, "right")
    is_unsure = (found > 0) & (bound_words[found - 1] == words)
    is_unsure |= ~pc.starts_with(keys, prefix).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(is_unsure)
    if len(places):
        found[places] = _compared_whole(column.taken(places), bounds)
    return found.astype(np.int32)


def _words_behind(length: int, column: ByteColumn) -> "NDArray[np.uint64]":
    """The eight bytes of each text behind the first so many, as numbers."""
    starts = np.minimum(column.ends - column.lengths + length, column.ends)
    return words_at(np.concatenate((column.data, np.zeros(8, np.uint8))), starts, column.ends)


def _compared_whole(column: ByteColumn, bounds: Sequence[bytes]) -> "NDArray[np.intp]":
    width = max(map(len, bounds))
    lengths = np.minimum(column.lengths, width)
    padded = np.zeros((len(column), width), np.uint8)
    places = (column.ends - column.lengths)[:, np.newaxis] + np.arange(width)
    is_inside = np.arange(width) < lengths[:, np.newaxis]
    padded[is_inside] = column.data[places[is_inside]]
    texts = padded.view(f"S{width}")[:, 0]
    return np.searchsorted(np.array(bounds, f"S{width}"), texts, "right")


def byte_column(texts: pa.Array | pa.ChunkedArray) -> ByteColumn:
    """An array of bytes without nulls as a column."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    assert texts.null_count == 0
    _, offsets, data = texts.buffers()
    if not len(texts):
        return ByteColumn.of([])
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(ends[0]), int(ends[-1])
    held = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return ByteColumn(held[first:last], ends[1:].astype(np.int64) - first)


def byte_array(column: ByteColumn) -> pa.Array:
    """The reverse of `byte_column`; it has less than 2 GiB."""
    ends = np.concatenate((np.zeros(1, np.int64), column.ends)).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(column.data))]
    return pa.Array.from_buffers(pa.binary(), len(column), buffers)


def _shortest_between(before: bytes, key: bytes) -> bytes:
    """The shortest beginning of a key that is after another; without zeros at its end,
    so that it may be equal to that one.
    """
    return key[: _common_bytes(before, key) + 1].rstrip(b"\0")


def _common_bytes(a: bytes, b: bytes) -> int:
    """How many bytes two texts begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
