"""The speed of folding chunk rows to replicas on one core: `python -m
benchmarks.bench_rows [--json]`.

Blocks: chunk checksums in memory to block checksums. Rows: columns in memory to runs.
Files: one datanode's export, and the same file without its manifest, to runs, compared
with only reading the columns. Stages: what folding an export consists of, in ns a row.
Absolute rates are compared with fixed bars, which are shown as peers.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from admin.demo.synthetic import SyntheticCluster, synthetic
from benchmarks.measure import Report, Samples
from benchmarks.measure import interleaved as by_clock
from chunktable.schema import CHUNK_SCHEMA
from merkle.checksum import fingerprint, implementations
from merkle.columns import fold_blocks, library_fold_blocks
from merkle.tree import BlockId, ChunkTree, ContainerId, TreeBuilder
from sweep.encoded import stored_group
from sweep.files import fold_part
from sweep.inputs import table_parts
from sweep.model import Part, PartKind
from sweep.rows import EncodedRows, Rows
from sweep.runs import fold_stretches, library_fold_stretches, run_pieces, settle

CHUNKS = 4_000_000
BUILDER_CHUNKS = 64_000
CHUNKS_A_BLOCK = (64, 8, 1)
CHUNK_BYTES = 4 << 20
BLOCKS_A_CONTAINER = 20
# About 2.8 M rows per datanode; the table of one datanode is read.
CLUSTER = SyntheticCluster(datanodes=3, containers=2400)

# CPU time of this process, which other work on the machine disturbs less.
interleaved = partial(by_clock, clock=time.process_time)
# Millions of chunks or rows per second; BUILDER_BAR is a ratio.
BLOCKS_BAR = 400.0
ROWS_BAR = 100.0
FILES_BAR = 12.0
BUILDER_BAR = 20.0


def main(as_json: bool) -> None:
    pa.set_cpu_count(1)
    report = Report(
        "rows", [f"fold: {implementations()['fold']}", "rates are by CPU time of the process"]
    )
    for chunks in CHUNKS_A_BLOCK:
        _blocks(report, chunks)
    for chunks in CHUNKS_A_BLOCK:
        _rows(report, chunks)
    with tempfile.TemporaryDirectory() as folder:
        _files(report, Path(folder))
    report.show(as_json=as_json)


def _blocks(report: Report, chunks: int) -> None:
    count = CHUNKS // chunks
    rng = np.random.default_rng(1)
    ids, starts = np.arange(count), np.arange(count + 1) * chunks
    checksums = rng.integers(0, 1 << 32, count * chunks)
    few = BUILDER_CHUNKS // chunks
    trees = [
        (
            BlockId(block),
            [
                ChunkTree(rank * CHUNK_BYTES, CHUNK_BYTES, int(checksum))
                for rank, checksum in enumerate(row)
            ],
        )
        for block, row in zip(
            range(few), checksums[: few * chunks].reshape(few, chunks), strict=True
        )
    ]

    def by_builder() -> list[int]:
        builder = TreeBuilder(ContainerId(1))
        for block_id, held in trees:
            for chunk in held:
                builder.add_chunk(block_id, chunk)
        return [block.data_checksum for block in builder.build().blocks]

    assert by_builder() == fold_blocks(ids[:few], starts[: few + 1], checksums).tolist()
    job = f"chunks to blocks, {chunks} a block"
    rates = interleaved(
        count * chunks / 1e6,
        {
            "ours": lambda: fold_blocks(ids, starts, checksums),
            "a library call a block": lambda: library_fold_blocks(ids, starts, checksums),
        },
    )
    # Its rate does not depend on the number of chunks.
    builder = interleaved(few * chunks / 1e6, {"TreeBuilder": by_builder})["TreeBuilder"]
    report.add(
        job,
        "M chunks/s",
        rates["ours"],
        _bar(BLOCKS_BAR),
        1 if chunks == CHUNKS_A_BLOCK[0] else None,
    )
    report.add(job, "M chunks/s", rates["ours"], builder, BUILDER_BAR)
    report.add(job, "M chunks/s", rates["ours"], rates["a library call a block"])


def _rows(report: Report, chunks: int) -> None:
    blocks = CHUNKS // chunks
    count = blocks * chunks
    integers = {
        "block_id": np.repeat(np.arange(blocks), chunks),
        "chunk_offset": np.tile(np.arange(chunks) * CHUNK_BYTES, blocks),
        "length": np.full(count, CHUNK_BYTES),
        "checksum": np.random.default_rng(2).integers(0, 1 << 32, count),
    }
    flags = {"matches": np.ones(count, np.bool_), "deleted": np.zeros(count, np.bool_)}
    starts = np.arange(0, count, BLOCKS_A_CONTAINER * chunks)
    rows = Rows(count, {}, integers, flags)
    arguments = (*integers.values(), *flags.values())
    assert (
        fold_stretches(starts, rows)[1].tolist()
        == library_fold_stretches(starts, *arguments)[1].tolist()
    )
    rates = interleaved(
        count / 1e6,
        {
            "ours": lambda: fold_stretches(starts, rows),
            "numpy": lambda: library_fold_stretches(starts, *arguments),
        },
    )
    job = f"rows to runs, {chunks} a block"
    report.add(
        job, "M rows/s", rates["ours"], _bar(ROWS_BAR), 1 if chunks == CHUNKS_A_BLOCK[0] else None
    )
    report.add(job, "M rows/s", rates["ours"], rates["numpy"])


def _files(report: Report, folder: Path) -> None:
    truth = synthetic(folder, CLUSTER)
    path = min(folder.rglob("*.parquet"))
    groups = pq.read_metadata(path).num_row_groups
    part = Part("part", PartKind.FILE, str(path), 0, groups, 0)
    (export,) = (p for p in table_parts([str(folder)]).parts if p.location == str(path))
    folded = fold_part(part)
    assert not folded.skipped
    assert truth.rows > folded.rows
    assert not len(settle(folded.runs).exact)
    assert fold_part(export).replicas.num_rows == settle(folded.runs).replicas.num_rows
    needed = ["container_id", "block_id", "chunk_offset", "length", "checksum"]
    variants: dict[str, Callable[[], object]] = {
        "ours": lambda: fold_part(part),
        "export": lambda: fold_part(export),
        "five columns read, no more": lambda: _read(path, needed),
        "all columns read, no more": lambda: _read(path, CHUNK_SCHEMA.names),
    }
    rates = interleaved(folded.rows / 1e6, variants)
    job = "Parquet, 15 columns, to runs"
    report.add(job, "M rows/s", rates["ours"], _bar(FILES_BAR), 1)
    for peer in ("five columns read, no more", "all columns read, no more"):
        report.add(job, "M rows/s", rates["ours"], rates[peer])
        report.add("the same as an export", "M rows/s", rates["export"], rates[peer])
    _stages(report, path, rates["export"])


def _stages(report: Report, path: Path, whole: Samples) -> None:
    """The stages of folding an export. The rest finds, lists and joins replicas."""
    metadata, content = pq.read_metadata(path), path.read_bytes()
    source = pa.BufferReader(content)
    places = {name: place for place, name in enumerate(CHUNK_SCHEMA.names)}
    groups = range(metadata.num_row_groups)
    constants = [_constants(metadata, group) for group in groups]

    def opened() -> list[EncodedRows]:
        stored = [
            stored_group(source, metadata, group, places, of_group)
            for group, of_group in zip(groups, constants, strict=True)
        ]
        found = [one.rows() for one in stored if one is not None]
        return [rows for rows in found if rows is not None]

    rows = opened()
    assert sum(one.count for one in rows) == metadata.num_rows
    stages: dict[str, Callable[[], object]] = {
        "bytes read": path.read_bytes,
        "bytes verified": lambda: fingerprint(content),
        "pages opened": opened,
        "rows decoded and folded": lambda: list(run_pieces(rows)),
    }
    for name, rate in interleaved(metadata.num_rows / 1e9, stages).items():
        cost = Samples(name, tuple(1 / one for one in rate.rates))
        all_of_it = Samples("all", tuple(1e3 / one for one in whole.rates))
        report.add(f"an export: {name}", "ns a row", cost, all_of_it)


def _constants(metadata: pq.FileMetaData, group: int) -> dict[str, pa.Array]:
    """The columns that have one value in a row group by its statistics."""
    found = dict[str, pa.Array]()
    for place, field in enumerate(CHUNK_SCHEMA):
        statistics = metadata.row_group(group).column(place).statistics
        if statistics.min == statistics.max and not statistics.null_count:
            found[field.name] = pa.array([statistics.min], field.type)
    return found


def _read(path: Path, columns: Sequence[str]) -> None:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=columns, use_threads=False)


def _bar(figure: float) -> Samples:
    return Samples(f"bar of {figure:g}", (figure,))


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
