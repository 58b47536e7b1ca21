"""Columns as they are stored: every form that our writers and others give them has the
values that pyarrow reads, or is left to pyarrow; whatever a page claims, nothing else
happens.
"""

import io
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktable.pages import (
    NULL,
    EncodedColumn,
    PageError,
    RowRanges,
    constant_column,
    encoded_columns,
)
from chunktable.schema import REPLICA_COLUMNS
from merkle.checksum import KERNEL_BYTES_MIN, kernels_for

pytestmark = pytest.mark.skipif(
    kernels_for(KERNEL_BYTES_MIN) is None, reason="the extra `fast` is not installed"
)

if kernels_for(0):
    from chunktable import page_kernels

# The first example may load the kernels, which takes seconds.
unhurried = settings(deadline=None)

ROWS = 3_000
INT64 = pa.field("c", pa.int64(), nullable=False)


def stored(column: pa.Array, field: pa.Field, **options: Any) -> bytes:
    sink = io.BytesIO()
    options = {"compression": "zstd", **options}
    pq.write_table(pa.table([column], pa.schema([field])), sink, **options)
    return sink.getvalue()


def encoded(raw: bytes) -> EncodedColumn | None:
    metadata = pq.read_metadata(pa.BufferReader(raw))
    found = encoded_columns(np.frombuffer(raw, np.uint8), 0, metadata, 0, {"c": 0})
    return None if found is None else found["c"]


def values_of(column: EncodedColumn, rows: int) -> list[object]:
    """The values by way of runs; without nulls also those of single rows."""
    found = column.runs()
    assert (np.diff(found.starts) > 0).all()
    numbers = found.at(np.arange(rows)).tolist()
    if column.levels is None:
        for begin, end in ((0, rows), (rows // 3, rows // 2), (rows - 1, rows)):
            out = np.empty(end - begin, np.int64)
            column.fill(begin, out)
            assert out.tolist() == numbers[begin:end]
    if column.texts is not None:
        texts = column.texts.to_pylist()
        return [texts[number] for number in numbers]
    return [None if number == NULL else number for number in numbers]


def column_of(kind: str, seed: int) -> list[int]:
    chosen = random.Random(seed)
    match kind:
        case "runs":
            return [chosen.choice((7, -(1 << 40), 9)) for _ in range(60) for _ in range(50)]
        case "cycle":
            return [i % 61 * 4096 for i in range(ROWS)]
        case "ascending":
            return sorted(chosen.randrange(1 << 50) for _ in range(ROWS))
        case "random":
            return [chosen.randrange(1 << 32) for _ in range(ROWS)]
        case "wide":
            return [chosen.choice((0, chosen.randrange(-(1 << 63), 1 << 63))) for _ in range(ROWS)]
        case _:
            return [5] * ROWS


@pytest.mark.parametrize("kind", ["runs", "cycle", "ascending", "random", "wide", "constant"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_page_size": 200, "write_batch_size": 50},
        {"use_dictionary": False},
        # A dictionary that is full goes on as plain values.
        {"dictionary_pagesize_limit": 300, "write_batch_size": 64},
        {"use_dictionary": False, "column_encoding": {"c": "DELTA_BINARY_PACKED"}},
        {
            "use_dictionary": False,
            "column_encoding": {"c": "DELTA_BINARY_PACKED"},
            "data_page_size": 300,
            "write_batch_size": 100,
        },
        {"use_dictionary": False, "compression": "none"},
        {"compression": "none"},
    ],
)
def test_integers_are_what_was_written(kind: str, options: dict[str, Any]) -> None:
    values = column_of(kind, seed=3)
    column = encoded(stored(pa.array(values, pa.int64()), INT64, **options))
    assert column is not None
    assert values_of(column, ROWS) == values


@pytest.mark.parametrize("kind", ["runs", "cycle", "ascending", "random"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_pages_without_wanted_rows_are_not_read(
    kind: str, is_packed: bool, compression: str
) -> None:
    """All bytes of the other pages are destroyed, and nothing notices."""
    values, chosen = column_of(kind, seed=8), random.Random(9)
    options: dict[str, Any] = {"data_page_size": 200, "write_batch_size": 100}
    if is_packed:
        options |= {"use_dictionary": False, "column_encoding": {"c": "DELTA_BINARY_PACKED"}}
    raw = stored(pa.array(values), INT64, compression=compression, **options)
    bounds = sorted(chosen.sample(range(ROWS), 6))
    wanted = RowRanges(np.array(bounds[::2]), np.array(bounds[1::2]))
    damaged = bytearray(raw)
    for first, last, begin, end in data_pages(raw):
        if not wanted.overlaps(first, last):
            damaged[begin:end] = b"\xff" * (end - begin)
    assert damaged != raw
    metadata = pq.read_metadata(pa.BufferReader(raw))
    read = np.frombuffer(bytes(damaged), np.uint8)
    found = encoded_columns(read, 0, metadata, 0, {"c": 0}, wanted)
    assert found is not None
    for first, last in zip(wanted.starts.tolist(), wanted.ends.tolist(), strict=True):
        out = np.empty(last - first, np.int64)
        found["c"].fill(first, out)
        assert out.tolist() == values[first:last]


def data_pages(raw: bytes) -> list[tuple[int, int, int, int]]:
    """The rows of each data page of the column, and where its bytes are."""
    chunk = pq.read_metadata(pa.BufferReader(raw)).row_group(0).column(0)
    first = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    headers = np.empty((1000, page_kernels.PAGE_FIELDS), np.int64)
    end = first + chunk.total_compressed_size
    count = page_kernels.page_headers(np.frombuffer(raw, np.uint8), first, end, headers)
    pages, row = [], 0
    for kind, _, values, at, length, _ in headers[:count].tolist():
        if kind == 0:
            pages.append((row, row + values, at, at + length))
            row += values
    return pages


@pytest.mark.parametrize("kind", ["cycle", "random", "constant"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_32_bits_without_sign_lie_where_they_were_written(kind: str, compression: str) -> None:
    values = [value | 1 << 31 for value in column_of(kind, seed=4)]
    raw = stored(
        pa.array(values, pa.uint32()),
        pa.field("c", pa.uint32(), nullable=False),
        use_dictionary=False,
        compression=compression,
        data_page_size=1000,
        write_batch_size=100,
    )
    column = encoded(raw)
    assert column is not None
    assert values_of(column, ROWS) == values


@unhurried
@given(st.lists(st.sampled_from([None, 1, 2, 3]), min_size=1, max_size=80), st.integers(1, 40))
def test_nulls_are_between_the_values(values: list[int | None], repeated: int) -> None:
    rows = [value for value in values for _ in range(repeated)]
    kind = pa.timestamp("ms", tz="UTC")
    raw = stored(pa.array(rows, pa.int64()).cast(kind), pa.field("c", kind), data_page_size=64)
    column = encoded(raw)
    # A column of nulls alone has no dictionary.
    if column is None:
        assert set(rows) == {None}
    else:
        assert values_of(column, len(rows)) == rows


@unhurried
@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(1, 20))
def test_booleans_are_bits(values: list[bool], repeated: int) -> None:
    rows = [value for value in values for _ in range(repeated)]
    field = pa.field("c", pa.bool_(), nullable=False)
    column = encoded(stored(pa.array(rows), field, data_page_size=16, write_batch_size=100))
    assert column is not None
    assert values_of(column, len(rows)) == rows


@unhurried
@given(st.lists(st.sampled_from(["", "a", "Ä\0", "z" * 300]), min_size=1, max_size=80))
def test_text_is_a_number_for_each_row(values: list[str]) -> None:
    field = pa.field("c", pa.string(), nullable=False)
    column = encoded(stored(pa.array(values), field))
    assert column is not None
    assert values_of(column, len(values)) == values


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array([1, 2], pa.uint64()), {}),
        (pa.array([1.5, 2]), {}),
        (pa.array([[1], [2]]), {}),
        (pa.array([b"1", b"2"]), {}),
        (pa.array([-1, 2], pa.int32()), {"use_dictionary": False}),
        (pa.array(["a", "b"]), {"use_dictionary": False}),
        (pa.array([1, 2]), {"compression": "snappy"}),
        (pa.array([1, 2]), {"data_page_version": "2.0"}),
        (pa.array([1, 2]), {"use_dictionary": False, "use_byte_stream_split": True}),
    ],
)
def test_what_our_writer_does_not_write_is_left_to_pyarrow(
    column: pa.Array, options: dict[str, Any]
) -> None:
    field = pa.field("c", column.type, nullable=False)
    assert encoded(stored(column, field, **options)) is None


@pytest.mark.parametrize("kind", ["runs", "cycle", "ascending", "random"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_page_that_lies_is_refused_or_read(kind: str, is_packed: bool) -> None:
    """Bits of headers, indexes and differences are flipped. Only values may differ."""
    # Without compression a flipped bit reaches the kernels.
    options: dict[str, Any] = {"compression": "none", "data_page_size": 400}
    if is_packed:
        options |= {"use_dictionary": False, "column_encoding": {"c": "DELTA_BINARY_PACKED"}}
    raw = stored(pa.array(column_of(kind, seed=5)), INT64, **options)
    chunk = pq.read_metadata(pa.BufferReader(raw)).row_group(0).column(0)
    first = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    chosen, outcomes = random.Random(6), set[str]()
    for _ in range(2_000):
        damaged = bytearray(raw)
        for _ in range(chosen.choice((1, 1, 4))):
            at = first + chosen.randrange(min(chunk.total_compressed_size, 600))
            damaged[at] ^= 1 << chosen.randrange(8)
        try:
            column = encoded(bytes(damaged))
            if column is None:
                outcomes.add("left to pyarrow")
            else:
                assert len(values_of(column, ROWS)) == ROWS
                outcomes.add("read")
        except (PageError, OSError, ValueError):
            outcomes.add("refused")
    assert {"read", "left to pyarrow"} <= outcomes


@pytest.mark.parametrize("seed", range(12))
def test_stretches_are_equal_in_all_columns(seed: int) -> None:
    rng = random.Random(seed)
    lists = [
        column_of(rng.choice(("constant", "runs", "cycle", "ascending")), seed=rng.randrange(99))
        for _ in REPLICA_COLUMNS[1:]
    ]
    nulls = [rng.choice((None, 4)) for _ in range(6) for _ in range(500)]
    rows = list(zip(*lists, nulls, strict=True))
    fields = [INT64] * len(lists) + [pa.field("c", pa.int64())]
    arrays = [pa.array(one, pa.int64()) for one in (*lists, nulls)]
    ours = [encoded(stored(*pair)) for pair in zip(arrays, fields, strict=True)]

    starts, values = stretches([one for one in ours if one is not None])

    expected = [i for i in range(ROWS) if not i or rows[i] != rows[i - 1]]
    assert starts == expected
    assert values == [[NULL if one is None else one for one in rows[i]] for i in expected]


@pytest.mark.parametrize("changing", range(len(REPLICA_COLUMNS)), ids=REPLICA_COLUMNS)
def test_a_change_in_one_column_alone_begins_a_stretch(changing: int) -> None:
    kinds = ["runs" if i == changing else "constant" for i in range(len(REPLICA_COLUMNS))]
    lists = [column_of(kind, seed=changing) for kind in kinds]
    ours = [encoded(stored(pa.array(one), INT64)) for one in lists]
    starts, _ = stretches([one for one in ours if one is not None])
    column = lists[changing]
    assert starts == [i for i in range(ROWS) if not i or column[i] != column[i - 1]]
    assert len(starts) > 1


def test_an_index_past_its_dictionary_has_no_stretch() -> None:
    packed = np.array([0x21, 0x3F] + [0] * page_kernels.PADDING_BYTES, np.uint8)
    table = np.array([[0, 4, 0], [4, 0, 0]])
    wrong = EncodedColumn(packed, table, np.zeros(16, np.int64), size=4)
    good = constant_column(7, 4)
    columns = [good] * (len(REPLICA_COLUMNS) - 1)
    assert stretches([*columns, wrong]) == ([], [])
    assert stretches([*columns, replace(wrong, size=16)]) == ([0], [[7] * len(columns) + [0]])


def stretches(columns: Sequence[EncodedColumn]) -> tuple[list[int], list[list[int]]]:
    """The first row of each stretch, and its values."""
    flat = [one.without_levels() for one in columns]
    starts, found = page_kernels.stretches(
        tuple(one.raw for one in flat),
        tuple(one.segments for one in flat),
        tuple(one.values for one in flat),
        tuple(one.size for one in flat),
        flat[0].count,
    )
    return starts.tolist(), found.T.tolist()
