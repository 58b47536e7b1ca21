"""The ports of a sweep: the engine that works, and the sink of its progress."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from sweep.model import Part
from sweep.trees import PackedTreeFile, TreeJob

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoldedWave:
    """All that came of some parts, which are never folded again.

    An engine that computes whole replicas gives these instead of runs, and names in
    `exact` the containers that it cannot decide; where a container has both runs and
    replicas, the sweep decides it along the exact path.
    """

    part_ids: tuple[str, ...]
    # Rows of the chunk table that were read.
    rows: int
    # sweep.runs.RUN_SCHEMA; any order.
    runs: pa.Table
    # REPLICA_SCHEMA and FINDING_SCHEMA.
    replicas: pa.Table
    findings: pa.Table
    # Containers, and about how many rows each has.
    exact: Int64s
    exact_rows: Int64s
    # Parts (of `part_ids`) that could not be read, with why: their tables are left out
    # of the sweep.
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerResults:
    """What came of the rows of some containers, each of them whole: REPLICA_SCHEMA,
    VERDICT_SCHEMA, FINDING_SCHEMA.
    """

    replicas: pa.Table
    verdicts: pa.Table
    findings: pa.Table


class Engine(Protocol):
    """Where the work is done. Whatever an engine reads or keeps is bounded, however
    large a container is.
    """

    @property
    def name(self) -> str:
        """What the summary calls it."""
        ...

    def fold(
        self,
        parts: Sequence[Part],
        store: Callable[[FoldedWave], None],
        tell: Callable[[int], None],
    ) -> None:
        """Fold all parts, in waves of a few minutes at most, each given to `store`;
        `tell` of rows as they are read.

        All parts are of files: the volumes of this machine are made into some first. A
        part that cannot be read is no error: its wave names it.
        """
        ...

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """Replicas and findings of these containers from their sorted rows
        (sweep.exact), without verdicts.

        `rows` says about how many rows each of them has.
        """
        ...

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[ContainerResults]:
        """Verdicts and findings of these containers from their rows (sweep.compare),
        without replicas.

        `replicas` are those of these containers, whether they take part or not.
        """
        ...

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """Write the trees of all replicas that have one, file by file (sweep.trees).

        Raises:
            DiskError: one cannot be written.
            ChunkTableError: a part cannot be read any more.
        """
        ...


class ProgressSink(Protocol):
    """Who is told how a sweep goes on."""

    def note(self, text: str) -> None:
        """Something that a person should know."""
        ...

    def begin(self, what: str, total: int, unit: str) -> None:
        """A stage begins, of so many units."""
        ...

    def advance(self, count: int) -> None:
        """So many more are done."""
        ...


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What is asked of a sweep."""

    out: Path
    tables: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    source: TreeSource = TreeSource.TREE
    # Begin anew where a sweep of the same inputs was not finished.
    fresh: bool = False
    keep: int = 30
    # Beside the tables, all trees.
    write_trees: bool = False
    # Datanodes that were taken out of the cluster on purpose.
    gone: tuple[str, ...] = ()


def absolute(request: SweepRequest) -> SweepRequest:
    """The same with places that the next sweep finds from wherever it is started.

    Raises:
        UsageError: the folder of sweeps lies in a table.
    """

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if name and "://" not in name else name

    for name in request.tables:
        if (
            name
            and "://" not in name
            and request.out.resolve().is_relative_to(Path(name).resolve())
        ):
            raise UsageError(
                f"--out {request.out} lies in --table {name}: the next sweep would take its tables"
                " for the cluster's",
                hint="Give an --out beside it.",
            )
    return replace(request, out=request.out.absolute(), tables=tuple(map(absolute, request.tables)))
