"""The report of a sweep: a single HTML file that needs neither network nor scripts.

`report_of` selects what to show from the tables of a sweep, and `render` fills the
template. Charts are SVG, each with a table of its numbers. No state is shown by colour
alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache

import jinja2
import pyarrow as pa
import pyarrow.compute as pc

from merkle.comparison import DifferenceKind
from merkle.outcome import DIVERGED_VERDICTS
from runtime.errors import DiskError
from sweep.changes import SweepChanges, compare_sweeps
from sweep.coverage import ChangeList, Coverage, change_lists, coverage_of, next_command
from sweep.model import REPLICA_SCHEMA, NotCompared
from sweep.output import JsonObject, Summary, SweepStore, SweepTable

_DAY_MS = 86_400_000

# Age classes of volumes, with exclusive upper bounds. Disks fail mostly when very young
# or old.
_AGES = (
    ("under 1 month", 30 * _DAY_MS),
    ("1 to 6 months", 182 * _DAY_MS),
    ("6 to 12 months", 365 * _DAY_MS),
    ("1 to 3 years", 3 * 365 * _DAY_MS),
    ("3 to 5 years", 5 * 365 * _DAY_MS),
    ("over 5 years", 1 << 62),
)

_AGE_UNKNOWN = "unknown"


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


_CELLS = {
    DifferenceKind.DELETED_BLOCK.value: HeatmapCell.UNDELETED,
    DifferenceKind.MISSING_BLOCK.value: HeatmapCell.MISSING,
    DifferenceKind.MISSING_CHUNK.value: HeatmapCell.MISSING,
    DifferenceKind.CORRUPT_CHUNK.value: HeatmapCell.CORRUPT,
    DifferenceKind.CONFLICTING_CHUNK.value: HeatmapCell.CONFLICT,
}

_SEVERITY = list(HeatmapCell)


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits keep the page small enough for a browser. The worst entries are shown; the
    rest are counted.
    """

    nights_max: int = 60
    datanodes_max: int = 30
    heatmaps_max: int = 12
    heatmap_blocks_max: int = 48
    containers_max: int = 5000


@dataclass(frozen=True, slots=True)
class PastSweep:
    """One sweep of the history, with numbers of containers by verdict."""

    sweep_id: str
    at: datetime
    containers: int
    verdicts: Mapping[str, int]

    @property
    def diverged(self) -> int:
        """The number of containers that had diverged."""
        return sum(self.verdicts.get(verdict.value, 0) for verdict in DIVERGED_VERDICTS)


@dataclass(frozen=True, slots=True)
class DamageShare:
    """The numbers of all replicas and of those to be repaired, of a datanode or an age
    class (`label`).
    """

    label: str
    replicas: int
    lacking: int

    @property
    def permille(self) -> float:
        """Replicas to be repaired, per thousand."""
        return 1000 * self.lacking / self.replicas if self.replicas else 0.0


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
class SweepReport:
    """All that the page shows. `skipped` lists inputs that could not be read, with the
    reason.
    """

    sweep_id: str
    at: datetime
    engine: str
    containers: int
    replicas: int
    verdicts: Mapping[str, int]
    findings: int
    skipped: tuple[str, ...]
    silent_changes: tuple[str, ...]
    nights: tuple[PastSweep, ...]
    datanodes: tuple[DamageShare, ...]
    datanodes_left_out: int
    ages: tuple[DamageShare, ...]
    heatmaps: tuple[Heatmap, ...]
    lines: tuple[ContainerLine, ...]
    lines_left_out: int
    # The sweep that `changes` is since; "" if there is none.
    previous: str
    changes: tuple[ChangeList, ...]
    # None if unknown.
    coverage: Coverage | None

    @property
    def unseen(self) -> int:
        """The number of containers of which an expected replica was not read."""
        return self.verdicts.get(NotCompared.UNSEEN.value, 0)

    @property
    def diverged(self) -> int:
        """The number of containers that have diverged."""
        return sum(self.verdicts.get(verdict.value, 0) for verdict in DIVERGED_VERDICTS)


def report_of(
    night: PastSweep,
    *,
    engine: str,
    held: Mapping[tuple[str, str], int],
    replicas: pa.Table,
    verdicts: pa.Table,
    findings: pa.Table,
    earlier: Iterable[PastSweep] = (),
    skipped: Sequence[str] = (),
    volumes_created_ms: Mapping[tuple[str, str], int] | None = None,
    previous: str = "",
    changes: SweepChanges | None = None,
    coverage: Coverage | None = None,
    limits: ReportLimits = ReportLimits(),
) -> SweepReport:
    """Select what the report of a sweep shows.

    `held` counts the replicas by (datanode, volume). `replicas` and `verdicts`
    (sweep.model) need only have the diverged containers. `earlier` are the sweeps
    before this one. `changes` are those since the sweep `previous`.
    `volumes_created_ms` is when volumes were created, in ms since the
    epoch, by (datanode, volume).
    """
    bad = [verdict.value for verdict in DIVERGED_VERDICTS]
    diverged = verdicts.filter(pc.is_in(verdicts["verdict"], pa.array(bad))).to_pylist()
    named = [finding for finding in findings.to_pylist() if finding["container_id"] is not None]
    by_container: dict[int, list[Mapping[str, object]]] = {}
    for finding in named:
        by_container.setdefault(finding["container_id"], []).append(finding)
    lines = [_line(row, by_container.get(row["container_id"], ())) for row in diverged]
    lines.sort(key=lambda line: (bad.index(line.verdict), -line.differences, line.container_id))
    damaged = _damaged(named)
    shares = _by_datanode(held, damaged)
    nights = sorted([*earlier, night], key=lambda one: one.sweep_id)[-limits.nights_max :]
    maps = (
        _heatmap(line, by_container.get(line.container_id, ()), replicas, limits.heatmap_blocks_max)
        for line in lines[: limits.heatmaps_max]
    )
    return SweepReport(
        night.sweep_id,
        night.at,
        engine,
        night.containers,
        sum(held.values()),
        night.verdicts,
        findings.num_rows,
        tuple(skipped),
        tuple(_silent(finding) for finding in named if finding["kind"] == "silent_change"),
        tuple(nights),
        tuple(shares[: limits.datanodes_max]),
        max(0, len(shares) - limits.datanodes_max),
        _by_age(held, replicas, damaged, volumes_created_ms or {}, night.at),
        tuple(heatmap for heatmap in maps if heatmap.rows),
        tuple(lines[: limits.containers_max]),
        max(0, len(lines) - limits.containers_max),
        previous,
        change_lists(changes, {line.container_id: line.verdict for line in lines})
        if changes
        else (),
        coverage,
    )


def render(report: SweepReport) -> str:
    """The HTML page."""
    return _template().render(report=report)


@cache
def _template() -> jinja2.Template:
    """Compiled once: that takes longer than to render it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sweep", "data"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["when"] = _when
    environment.globals.update(
        cells=list(HeatmapCell), bad=[verdict.value for verdict in DIVERGED_VERDICTS]
    )
    return environment.get_template("report.html.j2")


def _line(row: Mapping[str, object], findings: Sequence[Mapping[str, object]]) -> ContainerLine:
    kinds = Counter(str(finding["kind"]) for finding in findings)
    lacking = sorted({name for finding in findings for name in _names(finding["lacking"])})
    return ContainerLine(
        _int(row["container_id"]),
        str(row["verdict"]),
        _int(row["replicas"]),
        sum(count for kind, count in kinds.items() if kind in _CELLS),
        ", ".join(f"{kind.replace('_', ' ')} ({count})" for kind, count in sorted(kinds.items())),
        ", ".join(lacking),
        str(row["detail"]),
        next_command(_int(row["container_id"]), str(row["verdict"])),
    )


def _heatmap(
    line: ContainerLine,
    findings: Sequence[Mapping[str, object]],
    replicas: pa.Table,
    blocks_max: int,
) -> Heatmap:
    held = replicas.filter(pc.equal(replicas["container_id"], line.container_id))
    involved = {
        name
        for finding in findings
        for key in ("lacking", "sources")
        for name in _names(finding[key])
    }
    # A datanode with two replicas is named with its volume in findings.
    whole = {
        name
        for name in held["datanode"].to_pylist()
        if not any(n.startswith(f"{name}/") for n in involved)
    }
    names = tuple(sorted(whole | involved))
    blocks: dict[int, dict[str, HeatmapCell]] = {}
    for finding in findings:
        cell = _CELLS.get(str(finding["kind"]))
        if cell is None or finding["block_id"] is None:
            continue
        row = blocks.setdefault(_int(finding["block_id"]), {})
        where = _names(finding["lacking"])
        if cell is HeatmapCell.CONFLICT:
            where = [*where, *_names(finding["sources"])]
        for name in where:
            row[name] = max(row.get(name, HeatmapCell.RIGHT), cell, key=_SEVERITY.index)
    worst = sorted(
        blocks, key=lambda block: (-sum(_SEVERITY.index(c) for c in blocks[block].values()), block)
    )
    shown = sorted(worst[:blocks_max])
    rows = tuple(
        (block, tuple(blocks[block].get(name, HeatmapCell.RIGHT) for name in names))
        for block in shown
    )
    return Heatmap(line.container_id, line.verdict, names, rows, len(worst) - len(shown))


def _damaged(findings: Iterable[Mapping[str, object]]) -> set[tuple[str, int]]:
    """The replicas to be repaired, as (datanode, container ID)."""
    return {
        (name.partition("/")[0], _int(finding["container_id"]))
        for finding in findings
        if finding["kind"] in _CELLS
        for name in _names(finding["lacking"])
    }


def _by_datanode(
    held: Mapping[tuple[str, str], int], damaged: Iterable[tuple[str, int]]
) -> list[DamageShare]:
    """All datanodes, those with most replicas to repair first."""
    replicas = Counter[str]()
    for (datanode, _), count in held.items():
        replicas[datanode] += count
    lacking = Counter(datanode for datanode, _ in damaged)
    shares = [
        DamageShare(datanode, count, lacking[datanode]) for datanode, count in replicas.items()
    ]
    return sorted(shares, key=lambda share: (-share.lacking, share.label))


def _by_age(
    held: Mapping[tuple[str, str], int],
    replicas: pa.Table,
    damaged: set[tuple[str, int]],
    created_ms: Mapping[tuple[str, str], int],
    at: datetime,
) -> tuple[DamageShare, ...]:
    at_ms = int(at.timestamp() * 1000)

    def age(datanode: str, volume: str) -> str:
        created = created_ms.get((datanode, volume))
        return (
            _AGE_UNKNOWN
            if created is None
            else next(label for label, below in _AGES if at_ms - created < below)
        )

    total, lacking = Counter[str](), Counter[str]()
    for (datanode, volume), count in held.items():
        total[age(datanode, volume)] += count
    columns = (replicas[name].to_pylist() for name in ("datanode", "volume", "container_id"))
    for datanode, volume, container_id in zip(*columns, strict=True):
        lacking[age(datanode, volume)] += (datanode, container_id) in damaged
    labels = [*(label for label, _ in _AGES), _AGE_UNKNOWN]
    return tuple(
        DamageShare(label, total[label], lacking[label]) for label in labels if total[label]
    )


def _silent(finding: Mapping[str, object]) -> str:
    place = (
        f"container {finding['container_id']} block {finding['block_id']} offset"
        f" {finding['chunk_offset']}"
    )
    return f"{place} on {', '.join(_names(finding['lacking']))}: {finding['detail']}"


def _names(value: object) -> list[str]:
    assert isinstance(value, list)
    return value


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _when(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


# Findings in a report.
_REPORTED_MAX = 100_000


def write_report(sweeps: SweepStore, summary: Summary) -> tuple[str, ...]:
    """Write the report of a sweep whose tables are written. Returns notes on earlier
    sweeps that cannot be read.

    Raises:
        DiskError: the report cannot be written, or a table of this sweep cannot be
            read.
    """
    sweep_id = summary.sweep_id
    diverged = sweeps.read(SweepTable.VERDICTS, sweep_id, where=pc.field("diverged"))
    held, replicas = Counter[tuple[str, str]](), [REPLICA_SCHEMA.empty_table()]
    for piece in sweeps.pieces(SweepTable.ROOTS, sweep_id, REPLICA_SCHEMA.names):
        counted = piece.group_by(["datanode", "volume"]).aggregate([([], "count_all")]).to_pylist()
        held.update({(row["datanode"], row["volume"]): row["count_all"] for row in counted})
        replicas.append(
            piece.filter(pc.is_in(piece["container_id"], value_set=diverged["container_id"]))
        )
    earlier, notes = list[PastSweep](), list[str]()
    for name in (name for name in sweeps.sweeps() if name < sweep_id):
        try:
            earlier.append(_night(sweeps.summary(name)))
        except DiskError as error:
            notes.append(f"sweep {name} is left out of the report: {error.message}")
    previous, changes = _changes(sweeps, sweep_id, notes)
    report = report_of(
        _night(summary.json()),
        engine=summary.engine,
        held=held,
        replicas=pa.concat_tables(replicas),
        verdicts=diverged,
        findings=sweeps.read(SweepTable.FINDINGS, sweep_id).slice(0, _REPORTED_MAX),
        earlier=earlier,
        skipped=[f"{one.input}: {one.reason}" for one in summary.skipped],
        volumes_created_ms=summary.volumes_created_ms,
        previous=previous,
        changes=changes,
        coverage=coverage_of(
            sweeps,
            sweep_id,
            replicas=summary.replicas,
            compared=summary.compared,
            excluded=summary.excluded,
        ),
    )
    path = sweeps.report(sweep_id)
    sweeps.access.make_folder(path.parent)
    sweeps.access.replace(path, render(report).encode())
    return tuple(notes)


def _changes(
    sweeps: SweepStore, sweep_id: str, notes: list[str]
) -> tuple[str, SweepChanges | None]:
    """The newest earlier sweep that can be read, and the changes since."""
    for name in reversed([name for name in sweeps.sweeps() if name < sweep_id]):
        try:
            return name, compare_sweeps(sweeps, name, sweep_id)
        except DiskError as error:
            notes.append(f"the changes since sweep {name} are unknown: {error.message}")
    return "", None


def _night(summary: JsonObject) -> PastSweep:
    verdicts, containers = summary["verdicts"], summary["containers"]
    assert isinstance(verdicts, dict)
    assert isinstance(containers, int)
    return PastSweep(
        str(summary["sweepID"]),
        datetime.fromisoformat(str(summary["startedAt"])),
        containers,
        verdicts,
    )
