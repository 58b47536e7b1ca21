"""Do replicas agree, who gets an order, and what does automatic mode take up next? All
pure; clocks are passed in.

What is not known is never taken for agreement: a replica without a root, a datanode
that is silent, a container with one replica. And what cannot be mended is not tried for
ever: a container whose verdict says so rests until one of its replicas changes; every
other failure waits twice as long as the one before.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from merkle.outcome import FINAL_VERDICTS, Verdict
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.eligibility import (
    INVALID_HINT,
    ContainerState,
    container_state,
    is_erasure_coded,
    not_closed,
)

_BACKOFF_FIRST_S = 60.0
BACKOFF_MOST_S = 24 * 3600.0
# A tenth on top, different for each container: what failed together is not tried again
# together.
_BACKOFF_JITTER = 0.1

# Of a tree without blocks: what a scan leaves of blocks that have no recorded
# checksums.
_EMPTY_ROOT = 0

# The roots of a container's replicas: what must change before a hopeless container is
# tried again. Fingerprints stand in hex, since a visit is stored as JSON.
Root: TypeAlias = tuple[PeerId, int | None, str]
Roots: TypeAlias = tuple[Root, ...]


class RootComparison(Enum):
    """What the reported roots say about a container's replicas."""

    MATCH = "match"
    DIVERGED = "diverged"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """A comparison, and the sentence that says why; empty for a plain match."""

    comparison: RootComparison
    note: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A datanode to be ordered to reconcile, and the peers that it may read from."""

    peer: PeerId
    peers: tuple[PeerId, ...]

    def __post_init__(self) -> None:
        assert self.peers
        assert self.peer not in self.peers


@dataclass(frozen=True, slots=True)
class Visit:
    """What is remembered of a container's last job, so that automatic mode neither
    hurries nor gives up for ever.
    """

    container_id: ContainerId
    job_id: str
    failures: int
    not_before_s: float
    verdict: Verdict | None = None
    # Set where the verdict is hopeless: it holds as long as these are the roots.
    hopeless_roots: Roots | None = None


MATCH = ComparisonResult(RootComparison.MATCH)


def compare(
    replicas: Sequence[ContainerReplica], *, silent: AbstractSet[PeerId] = frozenset()
) -> ComparisonResult:
    """Compare what the replicas reported; `silent` are datanodes whose last report is
    too old to prove agreement.

    Two different roots are a difference whatever else is unknown. Equal roots with
    different fingerprints are one too: the root does not say whether a block is live or
    deleted, so that replicas with equal roots may still disagree on that, and blocks
    are compared as (deleted, checksum) here as everywhere.
    """
    if is_erasure_coded(replicas):
        return ComparisonResult(
            RootComparison.NOT_APPLICABLE, "erasure-coded replicas differ by design"
        )
    if container_state(replicas) not in (ContainerState.CLOSED, ContainerState.QUASI_CLOSED):
        return ComparisonResult(RootComparison.NOT_APPLICABLE, "only closed containers have a tree")
    closed = [replica for replica in replicas if replica.state.is_closed]
    if len({r.data_checksum for r in closed if r.data_checksum is not None}) > 1:
        return ComparisonResult(RootComparison.DIVERGED, "roots differ")
    if len({r.fingerprint for r in closed if r.fingerprint and r.data_checksum is not None}) > 1:
        return ComparisonResult(
            RootComparison.DIVERGED,
            "roots are equal, but some replicas know of deletes that others do not",
        )
    if len(replicas) < 2:
        return ComparisonResult(
            RootComparison.UNKNOWN, "a single replica has nothing to be compared with"
        )
    if len(closed) < len(replicas):
        is_invalid = any(replica.state is ReplicaState.INVALID for replica in replicas)
        note = f"not closed: {not_closed(replicas)}"
        return ComparisonResult(
            RootComparison.UNKNOWN, f"{note}; {INVALID_HINT}" if is_invalid else note
        )
    if any(replica.data_checksum is None for replica in closed):
        return ComparisonResult(RootComparison.UNKNOWN, "some replicas have no tree yet")
    if any(replica.peer in silent for replica in closed):
        return ComparisonResult(
            RootComparison.UNKNOWN, "some replicas are on datanodes that are silent"
        )
    if any(replica.data_checksum == _EMPTY_ROOT and replica.block_count for replica in closed):
        return ComparisonResult(
            RootComparison.UNKNOWN,
            "there are blocks, but none in the trees: nothing can be verified",
        )
    unhealthy = sum(replica.state is ReplicaState.UNHEALTHY for replica in closed)
    return (
        ComparisonResult(
            RootComparison.MATCH, f"{unhealthy} of {len(closed)} replicas are UNHEALTHY"
        )
        if unhealthy
        else MATCH
    )


def targets(replicas: Iterable[ContainerReplica], live: AbstractSet[PeerId]) -> tuple[Target, ...]:
    """Who is ordered to reconcile: each live replica that may be written, with all
    other live ones as peers.
    """
    ordered = sorted((r for r in replicas if r.peer in live), key=lambda replica: replica.peer)
    if (
        len(ordered) < 2
        or is_erasure_coded(ordered)
        or not all(replica.state.is_closed for replica in ordered)
    ):
        return ()
    peers = [replica.peer for replica in ordered]
    return tuple(
        Target(replica.peer, tuple(peer for peer in peers if peer != replica.peer))
        for replica in ordered
        if not replica.read_only
    )


def free_slots(running: int, limit: int) -> int:
    """How many more orders a datanode may get."""
    return max(0, limit - running)


def roots(replicas: Iterable[ContainerReplica]) -> Roots:
    """What is compared to see whether a container changed since a verdict."""
    return tuple(sorted((r.peer, r.data_checksum, r.fingerprint.hex()) for r in replicas))


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How one replica came out of a round: its root, whether anything was mended in it,
    whether all is settled.
    """

    root: Root
    mended: bool
    is_settled: bool


def peers_to_reorder(before: Roots, ends: Sequence[RoundEnd]) -> frozenset[PeerId]:
    """Who is to reconcile once more after a round: those that another one's change in
    it may help.

    What one put together in the round, those that were done by then could not have from
    it. That shows in roots that differ, or, where trees were older than the damage and
    are made equal again, in a verdict that left something open. A mended replica counts
    as changed though its root is what it was: it had not seen its damage before. Where
    none has changed, a further round would find what this one found.
    """
    known = [end for end in ends if end.root[1] is not None]
    differ = (
        len({end.root[1] for end in known}) > 1
        or len({end.root[2] for end in known if end.root[2]}) > 1
    )
    changed = {end.root[0] for end in known if end.mended or end.root not in before}
    return frozenset(
        end.root[0] for end in known if changed - {end.root[0]} and (differ or not end.is_settled)
    )


def backoff_s(container_id: ContainerId, failures: int) -> float:
    """How long to wait after so many failures in a row: a minute, doubled each time, a
    day at most.
    """
    assert failures >= 1
    wait_s = min(_BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 32), BACKOFF_MOST_S)
    # Knuth's multiplicative hash: spread without a random source, so that a replay
    # gives the same times.
    spread = ((container_id * 2_654_435_761 + failures * 40_503) & 0xFFFF_FFFF) / 2**32
    return wait_s * (1 + _BACKOFF_JITTER * spread)


def after_job(
    previous: Visit | None,
    *,
    container_id: ContainerId,
    job_id: str,
    verdict: Verdict | None,
    succeeded: bool,
    spoken_of: Roots,
    now_s: float,
) -> Visit:
    """What to remember once a job ended.

    `succeeded` means that it ended clean and the replicas agree now; `spoken_of` are
    the roots that a hopeless verdict holds for.
    """
    if succeeded and verdict not in FINAL_VERDICTS:
        return Visit(container_id, job_id, 0, now_s, verdict)
    failures = (previous.failures if previous else 0) + 1
    held = spoken_of if verdict in FINAL_VERDICTS else None
    return Visit(
        container_id, job_id, failures, now_s + backoff_s(container_id, failures), verdict, held
    )


def is_due(visit: Visit | None, now_roots: Roots, now_s: float) -> bool:
    """Whether automatic mode may take the container up (again)."""
    if visit is None:
        return True
    return now_s >= visit.not_before_s and (
        visit.hopeless_roots is None or visit.hopeless_roots != now_roots
    )
