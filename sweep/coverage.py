"""What a report opens with: what changed since the sweep before, which share of the
replicas was really compared, and why the others were not.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import Verdict
from sweep.changes import SweepChanges
from sweep.faults import Place
from sweep.model import FindingKind
from sweep.output import SweepStore, SweepTable

# Rows of one list; the rest are counted.
CHANGES_MAX = 200
_PLACES_MAX = 200
_REASONS_MAX = 30
_EXAMPLES_MAX = 5


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """One change since the sweep before, and the next command."""

    container_id: int
    kind: str
    reason: str
    command: str


@dataclass(frozen=True, slots=True)
class ChangeList:
    """All changes of one sort: the first of them, and their number."""

    name: str
    count: int
    lines: tuple[ChangeLine, ...]


@dataclass(frozen=True, slots=True)
class UnreadPlace:
    """The expected replicas of a datanode that were not read for one reason."""

    datanode: str
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class UnknownReason:
    """The containers that are UNKNOWN for one reason: their number and the first of
    them, each with the next command.
    """

    reason: str
    containers: int
    examples: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Numbers of replicas: all that were expected or found, and what became of them."""

    expected: int
    compared: int
    excluded: int
    unseen: int
    places: tuple[UnreadPlace, ...] = ()
    unknown: tuple[UnknownReason, ...] = ()

    @property
    def undecided(self) -> int:
        """Replicas that were read, in containers that are UNKNOWN or UNSEEN."""
        return self.expected - self.compared - self.excluded - self.unseen

    @property
    def share(self) -> str:
        """The share of replicas that was compared, rounded down: 100 % means all."""
        permille = 1000 * self.compared // self.expected if self.expected else 0
        return f"{permille // 10}.{permille % 10} %"


def next_command(container_id: int, verdict: str, *, kind: str = "", detail: str = "") -> str:
    """What an operator runs next for a container with this verdict."""
    if kind == FindingKind.SILENT_CHANGE.value:
        return f"treefold scan {container_id}"
    match verdict:
        case Verdict.REPAIRABLE.value | Verdict.UNRECOVERABLE.value:
            # The reconciliation also reads windows and files without a record.
            return f"treefold reconcile {container_id}"
        case Verdict.CONFLICT.value:
            return f"treefold container diff {container_id}"
        # Not for empty trees: without recorded checksums a scan leaves them empty.
        case Verdict.UNKNOWN.value if "no root" in detail:
            return f"treefold scan {container_id}"
        case _:
            return f"treefold container info {container_id}"


def change_lists(changes: SweepChanges, verdicts: Mapping[int, str]) -> tuple[ChangeList, ...]:
    """The changes in the order of the report. `verdicts` are those of diverged
    containers in the later sweep.
    """
    reasons = {"gone": changes.gone, "unseen": changes.unseen}
    named: tuple[tuple[str, tuple[Place, ...]], ...] = (
        ("new", changes.new),
        ("healed", changes.healed),
        ("persisting", changes.persisting),
        *((name, tuple(places)) for name, places in reasons.items()),
    )
    return tuple(
        ChangeList(
            name,
            len(places) + changes.left_out.get(name, 0),
            tuple(
                ChangeLine(
                    container_id,
                    kind.replace("_", " "),
                    reasons.get(name, {}).get((container_id, kind), ""),
                    next_command(container_id, verdicts.get(container_id, ""), kind=kind),
                )
                for container_id, kind in places[:CHANGES_MAX]
            ),
        )
        for name, places in named
    )


def coverage_of(
    sweeps: SweepStore, sweep_id: str, *, replicas: int, compared: int, excluded: int
) -> Coverage:
    """The coverage of a sweep whose tables are written; the numbers are its summary's.

    Raises:
        DiskError: a table cannot be read.
    """
    unread, reasons = Counter[tuple[str, str]](), Counter[str]()
    examples = dict[str, list[tuple[int, str]]]()
    for piece in sweeps.pieces(SweepTable.UNSEEN, sweep_id, ["datanode", "reason"]):
        counted = piece.group_by(["datanode", "reason"]).aggregate([([], "count_all")])
        for row in counted.to_pylist():
            unread[row["datanode"], row["reason"]] += row["count_all"]
    columns = ["container_id", "verdict", "detail"]
    for piece in sweeps.pieces(SweepTable.VERDICTS, sweep_id, columns):
        unknown = piece.filter(pc.equal(piece["verdict"], Verdict.UNKNOWN.value))
        _count_reasons(unknown, reasons, examples)
    return Coverage(
        replicas + unread.total(),
        compared,
        excluded,
        unread.total(),
        tuple(UnreadPlace(place[0], n, place[1]) for place, n in unread.most_common(_PLACES_MAX)),
        tuple(
            UnknownReason(reason, count, tuple(examples[reason]))
            for reason, count in reasons.most_common(_REASONS_MAX)
        ),
    )


def _count_reasons(
    unknown: pa.Table, reasons: Counter[str], examples: dict[str, list[tuple[int, str]]]
) -> None:
    for row in pc.value_counts(unknown["detail"]).to_pylist():
        reason = row["values"]
        reasons[reason] += row["counts"]
        found = examples.setdefault(reason, [])
        if len(found) < _EXAMPLES_MAX:
            ids = unknown.filter(pc.equal(unknown["detail"], reason))["container_id"]
            found += [
                (i, next_command(i, Verdict.UNKNOWN.value, detail=reason))
                for i in ids.slice(0, _EXAMPLES_MAX - len(found)).to_pylist()
            ]
