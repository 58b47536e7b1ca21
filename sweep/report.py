"""The report of a sweep: a single HTML file that needs neither network nor scripts.

`report_of` selects what to show from the tables of a sweep, and `render` fills the
template. Charts are SVG, each with a table of its numbers. No state is shown by colour
alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

import jinja2
import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import DIVERGED_VERDICTS
from runtime.errors import DiskError
from sweep.changes import SweepChanges, compare_sweeps
from sweep.coverage import CHANGES_MAX, ChangeList, Coverage, change_lists, coverage_of
from sweep.damage import (
    DEFAULT_LIMITS,
    ContainerLine,
    Heatmap,
    HeatmapCell,
    ReportLimits,
    SweepDamage,
    damage_of,
)
from sweep.model import NotCompared
from sweep.output import JsonObject, Summary, SweepStore, SweepTable
from sweep.reader import SweepReader, ranges_of

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
    silent_changes_left_out: int
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
    findings: int,
    damage: SweepDamage,
    earlier: Iterable[PastSweep] = (),
    skipped: Sequence[str] = (),
    volumes_created_ms: Mapping[tuple[str, str], int] | None = None,
    previous: str = "",
    changes: tuple[ChangeList, ...] = (),
    coverage: Coverage | None = None,
    limits: ReportLimits = DEFAULT_LIMITS,
) -> SweepReport:
    """Select what the report of a sweep shows.

    `held` counts the replicas by (datanode, volume), and `findings` is the number of
    all. `earlier` are the sweeps before this one. `changes` are those since the sweep
    `previous`, as rows of a page. `volumes_created_ms` is when volumes were created, in
    ms since the epoch, by (datanode, volume).
    """
    shares = _by_datanode(held, damage.by_datanode)
    nights = sorted([*earlier, night], key=lambda one: one.sweep_id)[-limits.nights_max :]
    return SweepReport(
        night.sweep_id,
        night.at,
        engine,
        night.containers,
        sum(held.values()),
        night.verdicts,
        findings,
        tuple(skipped),
        damage.silent_changes,
        damage.silent_changes_left_out,
        tuple(nights),
        tuple(shares[: limits.datanodes_max]),
        max(0, len(shares) - limits.datanodes_max),
        _by_age(held, damage.by_volume, volumes_created_ms or {}, night.at),
        damage.heatmaps,
        damage.lines,
        damage.lines_left_out,
        previous,
        changes,
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


def _by_datanode(
    held: Mapping[tuple[str, str], int], lacking: Mapping[str, int]
) -> list[DamageShare]:
    """All datanodes, those with most replicas to repair first."""
    replicas = Counter[str]()
    for (datanode, _), count in held.items():
        replicas[datanode] += count
    shares = [
        DamageShare(datanode, count, lacking.get(datanode, 0))
        for datanode, count in replicas.items()
    ]
    return sorted(shares, key=lambda share: (-share.lacking, share.label))


def _by_age(
    held: Mapping[tuple[str, str], int],
    damaged: Mapping[tuple[str, str], int],
    created_ms: Mapping[tuple[str, str], int],
    at: datetime,
) -> tuple[DamageShare, ...]:
    at_ms = int(at.timestamp() * 1000)

    def age(place: tuple[str, str]) -> str:
        created = created_ms.get(place)
        return (
            _AGE_UNKNOWN
            if created is None
            else next(label for label, below in _AGES if at_ms - created < below)
        )

    total, lacking = Counter[str](), Counter[str]()
    for place, count in held.items():
        total[age(place)] += count
    for place, count in damaged.items():
        lacking[age(place)] += count
    labels = [*(label for label, _ in _AGES), _AGE_UNKNOWN]
    return tuple(
        DamageShare(label, total[label], lacking[label]) for label in labels if total[label]
    )


def _when(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_report(sweeps: SweepStore, summary: Summary) -> tuple[str, ...]:
    """Write the report of a sweep whose tables are written. Returns notes on earlier
    sweeps that cannot be read.

    Raises:
        DiskError: the report cannot be written, or a table of this sweep cannot be
            read.
    """
    sweep_id = summary.sweep_id
    held, place = Counter[tuple[str, str]](), ["datanode", "volume"]
    for piece in sweeps.pieces(SweepTable.ROOTS, sweep_id, place):
        counted = piece.group_by(place).aggregate([([], "count_all")]).to_pylist()
        held.update({(row["datanode"], row["volume"]): row["count_all"] for row in counted})
    earlier, notes = list[PastSweep](), list[str]()
    for name in (name for name in sweeps.sweeps() if name < sweep_id):
        try:
            earlier.append(_night(sweeps.summary(name)))
        except DiskError as error:
            notes.append(f"sweep {name} is left out of the report: {error.message}")
    previous, changes = _changes(sweeps, sweep_id, notes)
    tables = SweepReader(sweeps, sweep_id)
    ranges = ranges_of([tables], [SweepTable.VERDICTS, SweepTable.FINDINGS])
    report = report_of(
        _night(summary.json()),
        engine=summary.engine,
        held=held,
        findings=sum(summary.findings.values()),
        damage=damage_of(tables, ranges),
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
) -> tuple[str, tuple[ChangeList, ...]]:
    """The newest earlier sweep that can be read, and the changes since."""
    for name in reversed([name for name in sweeps.sweeps() if name < sweep_id]):
        try:
            changes = compare_sweeps(sweeps, name, sweep_id, each_max=CHANGES_MAX)
        except DiskError as error:
            notes.append(f"the changes since sweep {name} are unknown: {error.message}")
        else:
            return name, change_lists(changes, _verdicts(sweeps, sweep_id, changes))
    return "", ()


def _verdicts(sweeps: SweepStore, sweep_id: str, changes: SweepChanges) -> dict[int, str]:
    """The verdicts of the diverged containers among those that changed."""
    places = (*changes.new, *changes.persisting, *changes.healed, *changes.gone, *changes.unseen)
    wanted = pa.array(sorted({container_id for container_id, _ in places}), pa.int64())
    found = dict[int, str]()
    for piece in sweeps.pieces(
        SweepTable.VERDICTS, sweep_id, ["container_id", "verdict", "diverged"]
    ):
        ours = piece.filter(
            pc.and_(piece["diverged"], pc.is_in(piece["container_id"], value_set=wanted))
        )
        columns = (ours[name].to_pylist() for name in ("container_id", "verdict"))
        found |= dict(zip(*columns, strict=True))
    return found


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
