"""What happened in a simulated cluster, and the few lines of it that explain a failure.

A run notes thousands of events. A report keeps those about the container and the block
that the violation names, puts the damage at the start first, and has a bounded length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from merkle.tree import BlockId, ContainerId

# Bounds of one report: it is read in a terminal, above the traceback.
SETUP_LINES_MAX = 4
DAMAGE_LINES_MAX = 5
EVENT_LINES_MAX = 10
# All of these, the violation, a title, two headings and a count of what is left out.
REPORT_LINES_MAX = SETUP_LINES_MAX + DAMAGE_LINES_MAX + EVENT_LINES_MAX + 5
# The last events before a violation are shown whatever they are.
LAST_EVENTS = 4


class EventKind(Enum):
    """What an event is. `REPLICA` is one that comes or goes; `DETAIL` never explains a
    failure by itself.
    """

    DAMAGE = "damage"
    DELETION = "deletion"
    REPLICA = "replica"
    CRASH = "crash"
    LIE = "lie"
    READ = "read"
    WRITE = "write"
    ORDER = "order"
    OUTCOME = "outcome"
    NETWORK = "network"
    PHASE = "phase"
    DETAIL = "detail"


# They change a block; those of the block that a violation names explain it best.
_CHANGES = {EventKind.DAMAGE, EventKind.DELETION, EventKind.WRITE, EventKind.LIE}
# They explain what replicas hold.
_CAUSES_ON_DISK = {
    EventKind.DAMAGE, EventKind.DELETION, EventKind.REPLICA, EventKind.CRASH, EventKind.LIE,
}  # fmt: skip
# They explain what the controller does not know.
_CAUSES_IN_CONTROL = {EventKind.CRASH, EventKind.NETWORK, EventKind.REPLICA}
# They say how far the repairs had come.
_MILESTONES = {EventKind.OUTCOME, EventKind.PHASE}


@dataclass(frozen=True, slots=True)
class Subject:
    """The container and the block that an event or a violation is about, if any."""

    container_id: ContainerId | None = None
    block_id: BlockId | None = None

    def concerns(self, other: "Subject") -> bool:
        """Whether both may be about the same thing: what is not known may be equal."""
        return all(
            ours is None or theirs is None or ours == theirs
            for ours, theirs in (
                (self.container_id, other.container_id),
                (self.block_id, other.block_id),
            )
        )


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that happened, in a line of plain text."""

    at_s: float
    kind: EventKind
    text: str
    subject: Subject = field(default_factory=Subject)

    @property
    def is_initial_damage(self) -> bool:
        """Whether the damage was there before the clock started."""
        return self.kind is EventKind.DAMAGE and not self.at_s

    def __str__(self) -> str:
        return f"t={self.at_s:.1f} {self.text}"


class Trace:
    """The events of one run in order, and how the cluster was set up."""

    def __init__(self, setup: Sequence[str]) -> None:
        self.setup = tuple(setup)
        self.events: list[TraceEvent] = []

    def lines(self, subject: Subject) -> list[str]:
        """The scenario as far as it concerns the subject: the setup, the initial
        damage, then the events that mattered, with a bound on each.
        """
        concerned = [
            event
            for event in self.events
            if event.kind is not EventKind.DETAIL and subject.concerns(event.subject)
        ]
        damage = [event for event in concerned if event.is_initial_damage]
        later = [event for event in concerned if not event.is_initial_damage]
        return [
            *_bounded(self.setup, SETUP_LINES_MAX),
            "initial damage:" if damage else "no initial damage",
            *_indented(
                _bounded(
                    [_counted(event.text, count) for event, count in _folded(damage)],
                    DAMAGE_LINES_MAX,
                )
            ),
            "events:" if later else "no events",
            *_indented(_selected(later, subject)),
        ]


def _selected(events: Sequence[TraceEvent], subject: Subject) -> list[str]:
    """The events that explain most, in order; a last line counts those left out."""
    folded = _folded(events)

    def rank(number: int) -> tuple[int, int]:
        is_last = number >= len(folded) - LAST_EVENTS
        return 0 if is_last else _weight(folded[number][0], subject), -number

    kept = sorted(sorted(range(len(folded)), key=rank)[:EVENT_LINES_MAX])
    lines = [_counted(str(folded[number][0]), folded[number][1]) for number in kept]
    left_out = len(folded) - len(kept)
    return [*lines, f"({left_out} events of less weight are left out)"] if left_out else lines


def _weight(event: TraceEvent, subject: Subject) -> int:
    """How little an event explains of a violation: 1 is shown first."""
    is_exact = subject.block_id is not None and event.subject.block_id == subject.block_id
    if is_exact and event.kind in _CHANGES:
        return 1
    # A violation about no container is the controller's.
    causes = _CAUSES_IN_CONTROL if subject == Subject() else _CAUSES_ON_DISK
    if event.kind in causes:
        return 2
    return 3 if is_exact or event.kind in _MILESTONES else 4


def _folded(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, int]]:
    """Equal events in a row become the first of them and their count."""
    runs = [list(run) for _, run in groupby(events, key=lambda event: event.text)]
    return [(run[0], len(run)) for run in runs]


def _counted(line: str, count: int) -> str:
    return line if count == 1 else f"{line} ({count} times)"


def _bounded(lines: Sequence[str], lines_max: int) -> list[str]:
    if len(lines) <= lines_max:
        return list(lines)
    return [*lines[: lines_max - 1], f"({len(lines) - lines_max + 1} more)"]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
