"""Small files opened at once: a file as our writers write it has the values that were
written, any other is left to pyarrow, and whatever a file claims, nothing else happens.
"""

import io
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.pages import NULL, PageError
from chunktable.places import Sink
from chunktable.schema import CHUNK_SCHEMA, CONTAINER_SCHEMA
from chunktable.whole_files import WholeFile, whole_inventory
from chunktable.writer import WRITTEN_SCHEMA, OpenChunkFile
from merkle.checksum import KERNEL_BYTES_MIN, kernels_for

pytestmark = pytest.mark.skipif(
    kernels_for(KERNEL_BYTES_MIN) is None, reason="the extra `fast` is not installed"
)


def chunk_rows(seed: int) -> pa.Table:
    """Rows of a few replicas; each column has one value, a few or many."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 4_000))
    replica = np.sort(draw.integers(0, draw.integers(1, 30), count))
    names = np.array(["CLOSED", "UNHEALTHY", "QUASI_CLOSED"])[: draw.integers(1, 4)]
    columns: dict[str, Any] = {
        "datanode": ["dn-1"] * count,
        "volume": [f"DS-{i % draw.integers(1, 3)}" for i in np.sort(replica)],
        "container_id": replica * 7,
        "state": names[replica % len(names)],
        "bcs_id": replica * draw.integers(0, 1 << 40),
        "replica_index": draw.integers(-3, 3) * (replica % 2),
        "block_id": np.sort(draw.integers(0, 1 << draw.integers(1, 50), count)),
        "chunk_offset": np.tile(np.arange(16) * 4096, count)[:count],
        "length": np.where(draw.random(count) < 0.1, draw.integers(1, 4096, count), 4096),
        "checksum": draw.integers(0, 1 << 32, count),
        "matches": draw.random(count) < draw.choice([0, 0.99, 1]),
        "deleted": draw.random(count) < draw.choice([0, 0.01]),
        "source": ["tree"] * count,
        "generation": replica % draw.integers(1, 4),
        "scanned_at": pa.array(
            replica * 1000 - 5,
            pa.timestamp("ms", tz="UTC"),
            mask=draw.random(count) < draw.choice([0, 0.01, 1]),
        ),
    }
    return pa.table(columns).cast(CHUNK_SCHEMA)


def written(rows: pa.Table) -> bytes:
    """A file as an agent writes it."""
    found = io.BytesIO()
    sink = Sink(lambda data, _: found.write(data))
    file = OpenChunkFile("chunks", sink, is_sorted=True)
    file.write(rows.cast(WRITTEN_SCHEMA) if rows.schema == CHUNK_SCHEMA else rows)
    file.close()
    return found.getvalue()


def plain(rows: pa.Table, **options: Any) -> bytes:
    found = io.BytesIO()
    pq.write_table(rows, found, **{"compression": "zstd", **options})
    return found.getvalue()


def read(raw: bytes, rows: int) -> dict[str, list[object]] | None:
    """The values of all columns; times and booleans are integers."""
    file = WholeFile.of(raw, rows)
    if file is None:
        return None
    found = dict[str, list[object]]()
    for group, count in enumerate(file.groups):
        columns = file.columns(group)
        if columns is None:
            return None
        for name, column in columns.items():
            out = column.runs().at(np.arange(count))
            if column.levels is None:
                filled = np.empty(count, np.int64)
                column.fill(0, filled)
                assert filled.tolist() == out.tolist()
            is_text = column.texts is not None
            held = column.texts.take(out).to_pylist() if is_text else out.tolist()
            found.setdefault(name, []).extend(None if one == NULL else one for one in held)
    return found


def values(rows: pa.Table) -> dict[str, list[object]]:
    return {
        name: (column if pa.types.is_string(column.type) else column.cast(pa.int64())).to_pylist()
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_file_of_chunks_has_the_values_that_were_written(seed: int) -> None:
    rows = chunk_rows(seed)
    # Of this release, of the first one, and in several row groups.
    for raw in (written(rows), plain(rows), plain(rows, row_group_size=500)):
        assert read(raw, rows.num_rows) == values(rows)
    # Of a column with many pages nothing is known.
    small = plain(rows, data_page_size=500, write_batch_size=300)
    assert read(small, rows.num_rows) in (values(rows), None)


def test_an_inventory_has_the_values_that_were_written() -> None:
    count = 300
    rows = pa.table(
        [["DS-1"] * count, range(count), [1, 2, 1] * 100, ["a.parquet", "b.parquet"] * 150,
         [7] * count],
        CONTAINER_SCHEMA,
    )  # fmt: skip
    for raw in (written(rows), plain(rows, compression="snappy"), plain(rows, compression="none")):
        assert read(raw, count) == values(rows)
        table = whole_inventory(raw, count)
        assert table is not None
        assert table.cast(CONTAINER_SCHEMA) == rows
    assert whole_inventory(written(chunk_rows(1)), chunk_rows(1).num_rows) is None


def test_what_our_writers_do_not_write_is_left_to_pyarrow() -> None:
    rows = chunk_rows(1)
    count, names = rows.num_rows, CHUNK_SCHEMA.names
    others = [
        plain(rows, compression="gzip"),
        plain(rows, data_page_version="2.0"),
        plain(rows.select(names[::-1])),
        plain(rows.append_column("more", pa.array([1] * count))),
        plain(rows.cast(pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA]))),
        plain(rows, column_encoding={"block_id": "BYTE_STREAM_SPLIT"}, use_dictionary=False),
        b"",
        b"PAR1PAR1",
        plain(rows)[:-1],
    ]
    assert read(plain(rows), count) == values(rows)
    assert [read(raw, count) for raw in others] == [None] * len(others)
    assert read(plain(rows), count + 1) is None


@pytest.mark.parametrize("seed", range(30))
def test_a_file_that_lies_is_refused_or_read(seed: int) -> None:
    """A page may lie even if the file is as its writer left it."""
    chosen, rows = random.Random(seed), chunk_rows(seed)
    raw = written(rows) if seed % 2 else plain(rows, compression=("none", "zstd")[seed // 2 % 2])
    footer = int.from_bytes(raw[-8:-4], "little") + 8
    for _ in range(60):
        damaged = bytearray(raw)
        for _ in range(chosen.choice((1, 1, 5))):
            at = chosen.choice(
                (chosen.randrange(len(raw)), len(raw) - 1 - chosen.randrange(footer))
            )
            damaged[at] = chosen.choice((damaged[at] ^ 1 << chosen.randrange(8), 0, 255))
        try:
            found = read(bytes(damaged), rows.num_rows)
        except PageError:
            continue
        assert found is None or set(map(len, found.values())) == {rows.num_rows}
