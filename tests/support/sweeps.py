"""Run sweeps in tests, and read what they left behind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from chunktable.files import AnyPath, Files, open_parquet
from merkle.replica import TreeSource
from runtime.disk import Disk
from sweep.engine import (
    ContainerResults,
    Engine,
    FoldedWave,
    LocalEngine,
    Places,
    RangeResult,
    Revisit,
    SweepRequest,
)
from sweep.exports import ExportWork
from sweep.gather import Gatherer, Int64s
from sweep.model import Part
from sweep.output import Summary, SweepStore, SweepTable
from sweep.pieces import RANGE_ROWS, Range, StoredTable
from sweep.run import sweep
from sweep.stages import ContainerStage
from sweep.trees import PackedTreeFile, TreeJob

# Few rows at a time, so that small clusters meet every limit.
GROUP_ROWS = 2_000


class Quiet:
    """A progress sink that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self.begun.append(what)

    def advance(self, count: int) -> None:
        pass


class Killed(BaseException):
    """Stands for the end of the process."""


class OnePartWaves:
    """The local engine with a wave for each part, which dies when it has stored some of
    its results.
    """

    name = "local"

    def __init__(
        self,
        scratch: Path,
        *,
        dies_after: int | None = None,
        group_rows: int = GROUP_ROWS,
        range_rows: int = RANGE_ROWS,
    ) -> None:
        self.range_rows = range_rows
        self._engine = LocalEngine(Gatherer(scratch, threads=2, group_rows=group_rows))
        self._left = dies_after
        self.folded: list[str] = []

    def fold(
        self,
        parts: Sequence[Part],
        places: Places,
        store: Callable[[FoldedWave], None],
        tell: Callable[[int], None],
    ) -> None:
        for part in parts:
            self.folded.append(part.part_id)
            self._engine.fold([part], places, store, tell)
            self._live_on()

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        yield from self._engine.by_range(stage, inputs, wanted, places)

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, places: Places
    ) -> Iterator[ContainerResults]:
        for judged in self._engine.exact(parts, container_ids, rows, places):
            yield judged
            self._live_on()

    def inspect(
        self,
        parts: Sequence[Part],
        container_ids: Int64s,
        rows: Int64s,
        replicas: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        for judged in self._engine.inspect(parts, container_ids, rows, replicas, places):
            yield judged
            self._live_on()

    def revisit(
        self,
        work: Revisit,
        parts: Sequence[Part],
        earlier: Sequence[Part],
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        yield from self._engine.revisit(work, parts, earlier, requested, changed, places)

    def for_each(self, work: ExportWork, texts: Sequence[str]) -> Iterator[pa.Table]:
        yield from self._engine.for_each(work, texts)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        for packed in self._engine.trees(job, disk):
            yield packed
            self._live_on()

    def _live_on(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed


def run(
    out: AnyPath,
    *tables: AnyPath,
    volumes: Sequence[Path] = (),
    source: TreeSource = TreeSource.TREE,
    engine: Engine | None = None,
    progress: Quiet | None = None,
    fresh: bool = False,
    keep: int = 30,
    write_trees: bool = False,
    gone: Sequence[str] = (),
    report: Callable[[Summary], Sequence[str]] = lambda _: (),
    disk: Disk | None = None,
) -> Summary:
    """Sweep tables and volumes into a folder."""
    names = tuple(map(str, tables)), tuple(map(str, volumes))
    request = SweepRequest(out, *names, source, fresh, keep, write_trees, tuple(gone))
    with TemporaryDirectory() as scratch:
        return sweep(
            request,
            engine or OnePartWaves(Path(scratch)),
            progress or Quiet(),
            disk=disk,
            report=report,
        )


def table_of(out: AnyPath, table: SweepTable, sweep_id: str) -> list[dict[str, Any]]:
    """The rows of one table of a sweep."""
    rows: list[dict[str, Any]] = SweepStore(out, Disk()).read(table, sweep_id).to_pylist()
    return rows


def findings_of(out: AnyPath, sweep_id: str) -> set[tuple[Any, ...]]:
    """Kind, container, block, offset, lacking, sources of all findings."""
    return {
        (
            row["kind"],
            row["container_id"],
            row["block_id"],
            row["chunk_offset"],
            tuple(row["lacking"]),
            tuple(row["sources"]),
        )
        for row in table_of(out, SweepTable.FINDINGS, sweep_id)
    }


def verdicts_of(out: AnyPath, sweep_id: str) -> dict[int, str]:
    """Verdicts by container."""
    return {
        row["container_id"]: row["verdict"] for row in table_of(out, SweepTable.VERDICTS, sweep_id)
    }


def packed_trees(out: AnyPath, sweep_id: str) -> dict[tuple[int, str, str], bytes]:
    """The bytes of the trees that a sweep wrote, by container, datanode and volume."""
    found = dict[tuple[int, str, str], bytes]()
    folder = SweepStore(out, Disk()).trees(sweep_id)
    for name in Files(Disk()).names(folder):
        for row in open_parquet(folder / name).read().to_pylist():
            key = row["container_id"], row["datanode"], row["volume"]
            assert key not in found
            found[key] = row["tree"]
    return found


def tear(path: Path) -> None:
    """Leave the first two thirds of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
