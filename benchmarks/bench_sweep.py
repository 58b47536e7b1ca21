"""The sweep on one machine: `python -m benchmarks.bench_sweep [--rows N] [--json]`.

Measures the step from chunk tables in Parquet to the list of diverged containers. It is
compared with DuckDB on the same files: with the obvious statement (`list(checksum order
by chunk_offset)`, and blocks folded by our kernel), and with the XOR aggregate of
sweep.fragments in SQL. Each must find exactly the damaged containers.

The whole sweep also reads the diverged containers again, reports each chunk, and writes
its tables; the peers do not.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from admin.demo.synthetic import CHUNK_BYTES
from benchmarks.measure import Report, Samples, interleaved
from benchmarks.tables import make_table
from merkle.columns import fold_blocks, fold_root
from sweep.compare import compare_replicas
from sweep.engine import FoldedWave, LocalEngine, SweepRequest
from sweep.fragments import end_tables, image, rank_tables, word_tables
from sweep.gather import Gatherer
from sweep.inputs import table_parts
from sweep.run import sweep
from sweep.runs import settle

ROUNDS = 5
ROWS = 20_000_000
THREADS = 2
# Calls in a row: one takes an eighth of a second.
_REPEAT = 5
# Of a process, and how often all processes together read as much.
_MEMORY_BYTES, _MEMORY_READS = 256 << 20, 32
# The greatest number of chunks in a block of these tables.
_CHUNKS = 64

Int64s = npt.NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="Approximate number of chunk rows.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        truth = make_table(place / "table", arguments.rows)
        damaged = sorted(damage.container_id for damage in truth.damages)
        files = str(place / "table" / "*" / "chunks-*.parquet")
        peers: Mapping[str, Callable[[], list[int]]] = {
            "ours": lambda: ours(place),
            "whole sweep": lambda: whole(place),
            "DuckDB, XOR aggregate": lambda: by_xor(files),
            "DuckDB, list(... order by)": lambda: by_list(files),
        }
        for name, peer in peers.items():
            assert peer() == damaged, f"{name} does not find the damaged containers"
        scaled: Mapping[str, Callable[[], object]] = {
            "two threads": lambda: ours(place),
            "one thread": lambda: ours(place, threads=1),
            "fold, one process": lambda: in_processes(place, 1),
            "fold, two processes": lambda: in_processes(place, 2),
            "read of memory, one process": lambda: read_memory(1),
            "read of memory, two processes": lambda: read_memory(2),
        }
        rates = interleaved(truth.rows / 1e6, peers, rounds=ROUNDS)
        rates |= interleaved(truth.rows / 1e6, scaled, rounds=ROUNDS, repeat=_REPEAT)
    report = Report(f"sweep of {truth.rows:,} rows, {THREADS} threads")
    for job, rate, bars in (
        ("Parquet to the diverged list", rates["ours"], (5, 2)),
        ("whole sweep", rates["whole sweep"], (None, 1.2)),
    ):
        report.add(job, "M rows/s", rate, rates["DuckDB, list(... order by)"], bars[0])
        report.add(job, "M rows/s", rate, rates["DuckDB, XOR aggregate"], bars[1])
    job = "Parquet to the diverged list"
    report.add(f"{job}, two threads", "M rows/s", rates["two threads"], rates["one thread"], 1.8)
    report.add(job, "M rows/s", rates["ours"], Samples("as it has to be", (20.0,)), 1)
    # What the machine gives for a second core, if nothing is shared.
    gigabytes = _MEMORY_BYTES * _MEMORY_READS / 1e9 / (truth.rows / 1e6)
    for job, unit, scale in (("fold", "M rows/s", 1.0), ("read of memory", "GB/s", gigabytes)):
        alone, both = (
            Samples(name, tuple(scale * rate for rate in rates[f"{job}, {name}"].rates))
            for name in ("one process", "two processes")
        )
        report.add(f"{job}, two processes", unit, both, alone)
    report.show(as_json=arguments.json)


def ours(place: Path, threads: int = THREADS) -> list[int]:
    """Fold, settle and compare replicas, which is what the peers do."""
    waves = list[FoldedWave]()
    LocalEngine(Gatherer(place / "spill", threads=threads)).fold(
        table_parts([str(place / "table")]).parts, {}, waves.append, lambda rows: None
    )
    settled = settle(pa.concat_tables([wave.runs for wave in waves]))
    assert not len(settled.exact)
    replicas = pa.concat_tables([settled.replicas, *(wave.replicas for wave in waves)])
    found: list[int] = compare_replicas(replicas).candidates.tolist()
    return found


def in_processes(place: Path, count: int) -> None:
    """Fold the whole table in processes of one thread, each its share of the parts."""
    parts = table_parts([str(place / "table")]).parts

    def fold(number: int) -> None:
        engine = LocalEngine(Gatherer(place / f"spill-{number}", threads=1))
        engine.fold(parts[number::count], {}, lambda wave: None, lambda rows: None)

    _forked(fold, count)


def read_memory(count: int) -> None:
    """Read memory that no cache holds, in processes that each read their share."""

    def read(number: int) -> None:
        words = np.ones(_MEMORY_BYTES // 8, np.int64)
        for _ in range(_MEMORY_READS // count):
            np.bitwise_xor.reduce(words)

    _forked(read, count)


def _forked(work: Callable[[int], None], count: int) -> None:
    """Run it in `count` processes."""
    children = list[int]()
    for number in range(count):
        if (child := os.fork()) == 0:
            work(number)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)


def whole(place: Path) -> list[int]:
    """Run a whole sweep, as `treefold sweep run --fresh`."""
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    summary = sweep(
        SweepRequest(out, tables=(str(place / "table"),)),
        LocalEngine(Gatherer(place / "spill", threads=THREADS)),
        NullProgress(),
    )
    return list(summary.diverged)


class NullProgress:
    """A progress sink that discards everything."""

    def note(self, text: str) -> None: ...

    def begin(self, what: str, total: int | None, unit: str) -> None: ...

    def advance(self, count: int) -> None: ...

    def skip(self, count: int) -> None: ...

    def results(self) -> AbstractContextManager[object]:
        return nullcontext()


_REPLICAS = """SELECT * FROM read_parquet('{files}')
    WHERE replica_index = 0 AND state IN ('CLOSED', 'QUASI_CLOSED', 'UNHEALTHY')
        AND chunk_offset >= -1"""
_BLOCK = "container_id, datanode, block_id"


def by_list(files: str) -> list[int]:
    """The obvious statement: lists of ordered checksums."""
    blocks = _duckdb().sql(
        f"""SELECT {_BLOCK}, list(checksum ORDER BY chunk_offset) AS checksums,
            bool_or(deleted) AS deleted,
            bool_or(NOT matches) AS corrupt, bool_or(chunk_offset = -1) AS empty
            FROM ({_REPLICAS.format(files=files)}) GROUP BY ALL ORDER BY {_BLOCK}"""
    )
    table = blocks.to_arrow_table().combine_chunks()
    lists = table["checksums"].combine_chunks()
    values = lists.flatten().to_numpy().astype(np.int64)
    folded = fold_blocks(
        table["block_id"].to_numpy(), lists.offsets.to_numpy().astype(np.int64), values
    )
    return _diverged(
        table, np.where(table["empty"].to_numpy(), values[lists.offsets.to_numpy()[:-1]], folded)
    )


def by_xor(files: str) -> list[int]:
    """Block checksums by an XOR aggregate that needs no order, completed in numpy for
    each block.
    """
    con = _duckdb()
    con.register("ranks", pa.table({"g": [rank_tables(_CHUNKS).reshape(-1)]}))
    byte = "g[k + {skip} + ((checksum >> {bits}) & 255)]"
    mapped = [byte.format(skip=256 * i, bits=8 * i) for i in range(4)]
    blocks = con.sql(f"""WITH t AS MATERIALIZED (SELECT g FROM ranks)
            SELECT {_BLOCK},
            bit_xor(xor(xor({mapped[0]}, {mapped[1]}), xor({mapped[2]}, {mapped[3]}))) AS x,
            count(*) AS n, bool_or(deleted) AS deleted, bool_or(NOT matches) AS corrupt,
            bool_or(chunk_offset = -1) AS empty, any_value(checksum) AS own
            FROM (SELECT *, (greatest(chunk_offset, 0) // {CHUNK_BYTES}) * 1024 + 1 AS k
                  FROM ({_REPLICAS.format(files=files)})), t
            GROUP BY ALL ORDER BY {_BLOCK}""")
    table = blocks.to_arrow_table().combine_chunks()
    counts = table["n"].to_numpy()
    ends, constants = end_tables(_CHUNKS)
    start = table["x"].to_numpy().astype(np.uint32) ^ image(
        word_tables(), table["block_id"].to_numpy()
    )
    folded = constants[counts]
    for i in range(4):
        folded = folded ^ ends[counts, i, (start >> np.uint32(8 * i)) & np.uint32(255)]
    return _diverged(
        table,
        np.where(table["empty"].to_numpy(), table["own"].to_numpy(), folded).astype(np.int64),
    )


def _duckdb() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    con.execute(f"SET threads = {THREADS}")
    con.execute("SET enable_progress_bar = false")
    return con


def _diverged(blocks: pa.Table, checksums: Int64s) -> list[int]:
    """The containers whose replicas have different roots or numbers of deleted blocks,
    or a corrupt chunk. Rows are sorted.
    """
    containers, deleted = blocks["container_id"].to_numpy(), blocks["deleted"].to_numpy()
    datanodes = blocks["datanode"].combine_chunks().dictionary_encode().indices.to_numpy()
    starts = np.flatnonzero(
        np.r_[True, (containers[1:] != containers[:-1]) | (datanodes[1:] != datanodes[:-1])]
    )
    ends = np.r_[starts[1:], len(containers)]
    roots = np.array([fold_root(checksums[a:b]) for a, b in zip(starts, ends, strict=True)])
    tombstones = np.add.reduceat(deleted.astype(np.int64), starts)
    corrupt = np.add.reduceat(blocks["corrupt"].to_numpy().astype(np.int64), starts)
    ids = containers[starts]
    first = np.searchsorted(ids, ids)
    differs = (roots != roots[first]) | (tombstones != tombstones[first]) | (corrupt > 0)
    found: list[int] = np.unique(ids[differs]).tolist()
    return found


if __name__ == "__main__":
    main()
