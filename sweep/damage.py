"""The damage that a report shows: the worst containers, and the replicas to repair.

The tables are read range by range and piece by piece. What is kept are counts by
datanode and volume, the worst containers so far, and the distinct values of one range.
So memory depends neither on the number of findings nor on that of containers.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merkle.comparison import DifferenceKind
from merkle.outcome import DIVERGED_VERDICTS
from sweep.coverage import next_command
from sweep.exact import Row
from sweep.fragments import Int64s
from sweep.model import FINAL_VERDICT_SCHEMA, FindingKind
from sweep.output import SweepTable
from sweep.pieces import Range
from sweep.reader import RangeReader


class HeatmapCell(Enum):
    """The state of a block in one replica: the letter in its cell and its meaning, the
    worst state last.
    """

    RIGHT = ("", "as it should be")
    UNDELETED = ("D", "deleted elsewhere, not here")
    MISSING = ("M", "missing, wholly or in part")
    CORRUPT = ("C", "corrupt")
    CONFLICT = ("?", "conflicting")

    @property
    def letter(self) -> str:
        """The letter in the cell."""
        return self.value[0]

    @property
    def meaning(self) -> str:
        """The meaning of the letter, for the legend."""
        return self.value[1]


_SEVERITY = list(HeatmapCell)
_CELLS = {
    DifferenceKind.DELETED_BLOCK.value: HeatmapCell.UNDELETED,
    DifferenceKind.MISSING_BLOCK.value: HeatmapCell.MISSING,
    DifferenceKind.MISSING_CHUNK.value: HeatmapCell.MISSING,
    DifferenceKind.CORRUPT_CHUNK.value: HeatmapCell.CORRUPT,
    DifferenceKind.CONFLICTING_CHUNK.value: HeatmapCell.CONFLICT,
}
_DIFFERENCES = pa.array(_CELLS, pa.string())
_SEVERITIES = pa.array([_SEVERITY.index(cell) for cell in _CELLS.values()], pa.int64())
_LINE_SCHEMA = pa.schema(
    [FINAL_VERDICT_SCHEMA.field(name) for name in ("container_id", "verdict", "replicas", "detail")]
)
_CELL_SCHEMA = pa.schema(
    [("block_id", pa.int64()), ("severity", pa.int64()), ("name", pa.string())]
)
_DIVERGED = pa.array([verdict.value for verdict in DIVERGED_VERDICTS], pa.string())


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits keep the page small enough for a browser, and the memory to make it. The
    worst entries are shown; the rest are counted.
    """

    nights_max: int = 60
    datanodes_max: int = 30
    heatmaps_max: int = 12
    heatmap_blocks_max: int = 48
    containers_max: int = 5000
    silent_changes_max: int = 1000
    # Findings of one container that are held at once.
    findings_max: int = 1 << 17


DEFAULT_LIMITS = ReportLimits()


@dataclass(frozen=True, slots=True)
class Heatmap:
    """The blocks of one container that differ: per block ID a cell for each replica.
    `left_out` counts the blocks beyond the limit.
    """

    container_id: int
    verdict: str
    replicas: tuple[str, ...]
    rows: tuple[tuple[int, tuple[HeatmapCell, ...]], ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class ContainerLine:
    """One diverged container in the table."""

    container_id: int
    verdict: str
    replicas: int
    differences: int
    kinds: str
    lacking: str
    detail: str
    # What to run next.
    command: str


@dataclass(frozen=True, slots=True)
class SweepDamage:
    """What a report shows of the findings. The replicas to be repaired are counted by
    datanode, and those of diverged containers also by datanode and volume.
    """

    lines: tuple[ContainerLine, ...]
    lines_left_out: int
    heatmaps: tuple[Heatmap, ...]
    silent_changes: tuple[str, ...]
    silent_changes_left_out: int
    by_datanode: Mapping[str, int]
    by_volume: Mapping[tuple[str, str], int]


def damage_of(
    tables: RangeReader, ranges: Sequence[Range], limits: ReportLimits = DEFAULT_LIMITS
) -> SweepDamage:
    """The damage in all containers: `ranges` has every container ID once.

    Raises:
        DiskError: a table cannot be read.
    """
    found = _Found(limits)
    for wanted in ranges:
        found.add_range(tables, wanted)
    details = _details(tables, ranges, {one.container_id for one in found.worst})
    lines = [_line(one, details[one.container_id]) for one in found.worst]
    maps = [
        _heatmap(tables, line, details[line.container_id], limits)
        for line in lines[: limits.heatmaps_max]
    ]
    shown = tuple(lines[: limits.containers_max])
    return SweepDamage(
        shown,
        found.diverged - len(shown),
        tuple(heatmap for heatmap in maps if heatmap.rows),
        tuple(found.silent),
        found.silent_changes - len(found.silent),
        found.by_datanode,
        found.by_volume,
    )


@dataclass(frozen=True, order=True, slots=True)
class _Diverged:
    """A diverged container; the worst is the least."""

    severity: int
    differences_negated: int
    container_id: int
    replicas: int
    detail: str


class _Found:
    """What was found in the ranges so far."""

    def __init__(self, limits: ReportLimits) -> None:
        self._limits = limits
        self._worst_max = max(limits.containers_max, limits.heatmaps_max)
        self.worst: list[_Diverged] = []
        self.diverged = 0
        self.silent: list[str] = []
        self.silent_changes = 0
        self.by_datanode = Counter[str]()
        self.by_volume = Counter[tuple[str, str]]()

    def add_range(self, tables: RangeReader, wanted: Range) -> None:
        """Count the containers of a range."""
        verdicts = tables.pieces(SweepTable.VERDICTS, _LINE_SCHEMA.names, wanted)
        found = [one.filter(pc.is_in(one["verdict"], value_set=_DIVERGED)) for one in verdicts]
        diverged = pa.concat_tables([_LINE_SCHEMA.empty_table(), *found]).sort_by("container_id")
        ids = np.asarray(diverged["container_id"].to_numpy(), np.int64)
        differences, damaged = np.zeros(len(ids), np.int64), list[pa.Table]()
        columns = ["container_id", "kind", "block_id", "chunk_offset", "lacking", "detail"]
        for piece in tables.pieces(SweepTable.FINDINGS, columns, wanted):
            named = piece.filter(pc.is_valid(piece["container_id"]))
            self._add_silent(named)
            shown = named.filter(pc.is_in(named["kind"], value_set=_DIFFERENCES))
            differences += _count_by(ids, shown)
            names = _exploded(shown, "lacking", ["container_id"])
            # A datanode with two replicas is named with its volume.
            datanodes = pc.list_element(pc.split_pattern(names["name"], "/", max_splits=1), 0)
            named_here = pa.table({"container_id": names["container_id"], "datanode": datanodes})
            both = pa.concat_tables([*damaged, named_here])
            damaged = [both.group_by(both.column_names).aggregate([])]
        if damaged and damaged[0].num_rows:
            self._count_damaged(tables, wanted, damaged[0], ids)
        self._choose(diverged, ids, differences)

    def _add_silent(self, findings: pa.Table) -> None:
        silent = findings.filter(pc.equal(findings["kind"], FindingKind.SILENT_CHANGE.value))
        self.silent_changes += silent.num_rows
        room = self._limits.silent_changes_max - len(self.silent)
        self.silent += [_silent(finding) for finding in silent.slice(0, room).to_pylist()]

    def _count_damaged(
        self, tables: RangeReader, wanted: Range, damaged: pa.Table, diverged: Int64s
    ) -> None:
        for row in _counted(damaged, ["datanode"]):
            self.by_datanode[row["datanode"]] += row["count_all"]
        ours = damaged.filter(pc.is_in(damaged["container_id"], value_set=pa.array(diverged)))
        if not ours.num_rows:
            return
        columns, key = ["container_id", "datanode", "volume"], ["container_id", "datanode"]
        for piece in tables.pieces(SweepTable.ROOTS, columns, wanted):
            held = piece.join(ours, key, join_type="left semi")
            for row in _counted(held, ["datanode", "volume"]):
                self.by_volume[row["datanode"], row["volume"]] += row["count_all"]

    def _choose(self, diverged: pa.Table, ids: Int64s, differences: Int64s) -> None:
        self.diverged += len(ids)
        severity = pc.index_in(diverged["verdict"], value_set=_DIVERGED).to_numpy()
        order = np.lexsort((ids, np.negative(differences), severity))
        chosen = order[: self._worst_max]
        rows = diverged.take(pa.array(chosen)).to_pylist()
        self.worst += [
            _Diverged(
                int(severity[i]),
                -int(differences[i]),
                row["container_id"],
                row["replicas"],
                row["detail"],
            )
            for i, row in zip(chosen, rows, strict=True)
        ]
        self.worst.sort()
        del self.worst[self._worst_max :]


@dataclass(slots=True)
class _Details:
    """Findings of one container: their numbers by kind, and the replicas that they
    name.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    lacking: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)


def _details(
    tables: RangeReader, ranges: Iterable[Range], containers: Collection[int]
) -> Mapping[int, _Details]:
    ids = np.array(sorted(containers), np.int64)
    found = {int(i): _Details() for i in ids}
    columns = ["container_id", "kind", "lacking", "sources"]
    for wanted in ranges:
        here = ids[ids <= wanted.last]
        here = here if wanted.first is None else here[here >= wanted.first]
        for piece in tables.pieces(SweepTable.FINDINGS, columns, wanted) if len(here) else ():
            ours = piece.filter(pc.is_in(piece["container_id"], value_set=pa.array(here)))
            for row in _counted(ours, ["container_id", "kind"]):
                found[row["container_id"]].kinds[row["kind"]] += row["count_all"]
            for row in _pairs(ours, "lacking"):
                found[row["container_id"]].lacking.add(row["name"])
            for row in _pairs(ours, "sources"):
                found[row["container_id"]].sources.add(row["name"])
    return found


def _line(one: _Diverged, details: _Details) -> ContainerLine:
    kinds, verdict = sorted(details.kinds.items()), _DIVERGED[one.severity].as_py()
    return ContainerLine(
        one.container_id,
        verdict,
        one.replicas,
        -one.differences_negated,
        ", ".join(f"{kind.replace('_', ' ')} ({count})" for kind, count in kinds),
        ", ".join(sorted(details.lacking)),
        one.detail,
        next_command(one.container_id, verdict),
    )


def _heatmap(
    tables: RangeReader, line: ContainerLine, details: _Details, limits: ReportLimits
) -> Heatmap:
    """The worst blocks of a container. They are read in turns, each with some of the
    blocks, if there are too many findings to be held at once.
    """
    wanted = Range(line.container_id, line.container_id)
    roots = list(tables.pieces(SweepTable.ROOTS, ["container_id", "datanode"], wanted))
    datanodes = {name for piece in roots for name in piece["datanode"].to_pylist()}
    involved = details.lacking | details.sources
    # A datanode with two replicas is named with its volume in findings.
    whole = {
        name for name in datanodes if not any(other.startswith(f"{name}/") for other in involved)
    }
    names = tuple(sorted(whole | involved))
    worst, blocks, turns = list[tuple[int, int]](), 0, 1 + line.differences // limits.findings_max
    cells = dict[int, dict[str, HeatmapCell]]()
    for turn in range(turns):
        by_replica = _cells(tables, wanted, turn, turns)
        by_block = by_replica.group_by("block_id").aggregate([("severity", "sum")])
        blocks += by_block.num_rows
        keys = [("severity_sum", "descending"), ("block_id", "ascending")]
        first = by_block.sort_by(keys).slice(0, limits.heatmap_blocks_max)
        worst += zip(
            pc.negate(first["severity_sum"]).to_pylist(),
            first["block_id"].to_pylist(),
            strict=True,
        )
        worst = sorted(worst)[: limits.heatmap_blocks_max]
        for row in by_replica.filter(
            pc.is_in(by_replica["block_id"], value_set=first["block_id"])
        ).to_pylist():
            cells.setdefault(row["block_id"], {})[row["name"]] = _SEVERITY[row["severity"]]
        cells = {block: cells[block] for _, block in worst}
    rows = tuple(
        (block, tuple(cells[block].get(name, HeatmapCell.RIGHT) for name in names))
        for block in sorted(cells)
    )
    return Heatmap(line.container_id, line.verdict, names, rows, blocks - len(rows))


def _cells(tables: RangeReader, wanted: Range, turn: int, turns: int) -> pa.Table:
    """The worst severity by block and replica, of the blocks of this turn. Each block
    also has a row without a name.
    """
    columns, found = ["container_id", "kind", "block_id", "lacking", "sources"], list[pa.Table]()
    key = ["block_id", "severity"]
    for piece in tables.pieces(SweepTable.FINDINGS, columns, wanted):
        at = pc.index_in(piece["kind"], value_set=_DIFFERENCES)
        rows = piece.append_column("severity", pc.take(_SEVERITIES, at))
        rows = rows.filter(pc.and_(pc.is_valid(rows["severity"]), pc.is_valid(rows["block_id"])))
        rows = rows.filter(pa.array(rows["block_id"].to_numpy() % turns == turn))
        conflicts = rows.filter(pc.equal(rows["severity"], _SEVERITY.index(HeatmapCell.CONFLICT)))
        count = rows.num_rows
        nameless = [rows["block_id"], np.zeros(count, np.int64), pa.repeat("", count)]
        found += [
            _exploded(rows, "lacking", key),
            _exploded(conflicts, "sources", key),
            pa.table(nameless, _CELL_SCHEMA.names),
        ]
    whole = pa.concat_tables([_CELL_SCHEMA.empty_table(), *found])
    grouped = whole.group_by(["block_id", "name"]).aggregate([("severity", "max")])
    return grouped.rename_columns({"severity_max": "severity"})


def _count_by(ids: Int64s, rows: pa.Table) -> Int64s:
    """The number of rows of each of these containers, which ascend."""
    of = np.asarray(rows["container_id"].to_numpy(), np.int64)
    at = np.searchsorted(ids, of)
    is_one = at < len(ids)
    is_one[is_one] = ids[at[is_one]] == of[is_one]
    return np.bincount(at[is_one], minlength=len(ids))


def _exploded(rows: pa.Table, lists: str, key: Sequence[str]) -> pa.Table:
    """The columns `key` and, as `name`, each text of a column of lists."""
    column = rows[lists].combine_chunks()
    parents = pc.list_parent_indices(column)
    return rows.select(key).take(parents).append_column("name", pc.list_flatten(column))


def _pairs(rows: pa.Table, lists: str) -> list[Row]:
    """The distinct container IDs and names in a column of lists."""
    names = _exploded(rows, lists, ["container_id"])
    found: list[Row] = names.group_by(["container_id", "name"]).aggregate([]).to_pylist()
    return found


def _counted(rows: pa.Table, key: Sequence[str]) -> list[Row]:
    """The distinct values of these columns, each with `count_all`."""
    found: list[Row] = rows.group_by(key).aggregate([([], "count_all")]).to_pylist()
    return found


def _silent(finding: Row) -> str:
    place = (
        f"container {finding['container_id']} block {finding['block_id']} offset"
        f" {finding['chunk_offset']}"
    )
    return f"{place} on {', '.join(finding['lacking'])}: {finding['detail']}"
