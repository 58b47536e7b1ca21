"""What the page says, from what a controller knows. Nothing here reads a clock.

A headline is good only where nothing is unknown: what was not reported is never what is
not there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from merkle.outcome import Evidence
from merkle.tree import BlockId
from runtime.eta import duration_text
from scm.jobs import JobState
from scm.views import ContainerStatus, ControllerStatus, DatanodeView, JobStatus, OrderStatus

# A page is for people: more rows belong to `treefold container list` and `job list`.
CONTAINERS_MAX = 100
JOBS_MAX = 50
_DATANODES_MAX = 200
_BLOCKS_MAX = 64
_DAY_S = 86_400.0


class Tone(Enum):
    """How a statement is coloured; its words say the same."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Headline:
    """The sentence at the top."""

    tone: Tone
    text: str


@dataclass(frozen=True, slots=True)
class ClusterPage:
    """All of the first page. `ended` counts the jobs that ended in the last 24 hours
    among those that were read, by state.
    """

    headline: Headline
    status: ControllerStatus
    diverged: Sequence[ContainerStatus]
    datanodes: Sequence[DatanodeView]
    datanodes_left_out: int
    running: Sequence[JobStatus]
    history: Sequence[JobStatus]
    ended: Mapping[JobState, int]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A block, and for each datanode of a job what it says of it; empty for nothing."""

    block_id: BlockId
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks that the datanodes of a job say something of, by datanode.
    `left_out` counts those beyond the limit.
    """

    peers: tuple[str, ...]
    rows: tuple[BlockRow, ...]
    left_out: int


def cluster_page(
    status: ControllerStatus,
    diverged: Sequence[ContainerStatus],
    datanodes: Sequence[DatanodeView],
    jobs: Sequence[JobStatus],
    now_s: float,
) -> ClusterPage:
    """The first page; `jobs` are the newest first, and `now_s` is since the epoch."""
    # Silent ones come first: they are why something is unknown.
    shown = sorted(datanodes, key=lambda one: (one.is_live, one.datanode.peer))[:_DATANODES_MAX]
    ended = dict.fromkeys((state for state in JobState if state.is_terminal), 0)
    for job in jobs:
        if job.state.is_terminal and now_s - job.finished_at_s <= _DAY_S:
            ended[job.state] += 1
    return ClusterPage(
        headline(status),
        status,
        diverged,
        shown,
        len(datanodes) - len(shown),
        [job for job in jobs if not job.state.is_terminal],
        [job for job in jobs if job.state.is_terminal][:JOBS_MAX],
        ended,
    )


def headline(status: ControllerStatus) -> Headline:
    """What is to be said first."""
    count = status.containers
    if status.fault:
        return Headline(Tone.BAD, f"The controller does not get on: {status.fault}.")
    if not count:
        since = duration_text(status.started_age_s)
        return Headline(
            Tone.UNKNOWN,
            f"No datanode has reported a container since the controller started {since} ago.",
        )
    unknown = f"{status.unknown:,} of {count:,} are unknown" if status.unknown else ""
    if status.diverged:
        text = f"{status.diverged:,} of {count:,} containers diverged"
        return Headline(Tone.BAD, f"{text}, and {unknown}." if unknown else f"{text}.")
    if unknown:
        return Headline(Tone.UNKNOWN, f"No container is known to have diverged, but {unknown}.")
    age = status.oldest_root_age_s
    seen = f", by roots of which the oldest is {duration_text(age)} old" if age is not None else ""
    return Headline(Tone.GOOD, f"None of {count:,} containers diverged or is unknown{seen}.")


def progress_share(done: int, planned: int) -> float:
    """How much of a plan is done, from 0 to 1; 0 while nothing is planned."""
    return min(1.0, done / planned) if planned else 0.0


def block_grid(orders: Sequence[OrderStatus]) -> BlockGrid:
    """The evidence of a job, block by replica."""
    peers = tuple(order.peer for order in orders)
    found = dict[BlockId, list[list[str]]]()
    for column, order in enumerate(orders):
        for one in _of_blocks(order.progress.evidence):
            assert one.block_id is not None
            found.setdefault(one.block_id, [[] for _ in peers])[column].append(_words(one.kind))
        for block_id in order.progress.claimed_deleted:
            found.setdefault(block_id, [[] for _ in peers])[column].append("deleted")
    rows = [
        BlockRow(block_id, tuple(", ".join(dict.fromkeys(words)) for words in found[block_id]))
        for block_id in sorted(found)
    ]
    return BlockGrid(peers, tuple(rows[:_BLOCKS_MAX]), max(0, len(rows) - _BLOCKS_MAX))


def next_command(container: ContainerStatus) -> str:
    """What to run for a container whose replicas differ."""
    if container.ruling.is_ok:
        return f"treefold reconcile {container.container_id}"
    return f"treefold container info {container.container_id}"


def _of_blocks(evidence: Iterable[Evidence]) -> Iterable[Evidence]:
    return (one for one in evidence if one.block_id is not None)


def _words(kind: str) -> str:
    return kind.replace("_", " ")
