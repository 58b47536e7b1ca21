"""Compare replicas, choose the targets of orders, and decide when a container is due.

All functions are pure; times are passed in. Unknown facts never count as agreement: a
replica without a root, a silent datanode, a single replica. A container that cannot be
repaired rests until one of its replicas changes. After every other failure the wait
doubles.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from merkle.outcome import FINAL_VERDICTS, Verdict
from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.eligibility import INVALID_HINT, container_state, describe_not_closed, is_erasure_coded

_BACKOFF_FIRST_S = 60.0
BACKOFF_MOST_S = 24 * 3600.0
# Up to a tenth is added, by container, so that containers that failed together are not
# retried together.
_BACKOFF_JITTER = 0.1

# The root of a tree without blocks: the result of a scan if no block has recorded
# checksums.
_EMPTY_ROOT = 0

# Datanodes named in the note of an incomplete container.
_MISSING_NAMED_MAX = 3

# Datanode, root and fingerprint of a replica. A container that cannot be repaired is
# tried again when these change. Fingerprints are in hex, because visits are JSON.
Root: TypeAlias = tuple[PeerId, int | None, str]
Roots: TypeAlias = tuple[Root, ...]


class RootComparison(Enum):
    """The result of comparing the reported roots of a container's replicas."""

    MATCH = "match"
    DIVERGED = "diverged"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """A comparison and its explanation for the user; empty for a full match."""

    comparison: RootComparison
    note: str = ""
    # The roots known so far agree, although that does not prove a match.
    roots_agree: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A datanode that gets an order, and the peers that it may read from."""

    peer: PeerId
    peers: tuple[PeerId, ...]

    def __post_init__(self) -> None:
        assert self.peers
        assert self.peer not in self.peers


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of a container's last job, for automatic mode.

    `failures` is the number of failed jobs in a row. `not_before_s` is in seconds since
    the epoch.
    """

    container_id: ContainerId
    job_id: str
    failures: int
    not_before_s: float
    verdict: Verdict | None = None
    # Set if the verdict is final: it holds while these are the roots.
    hopeless_roots: Roots | None = None

    def __post_init__(self) -> None:
        assert self.failures >= 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of a container besides the reports of its replicas.

    `silent` datanodes sent no heartbeat for a while: their reports are too old to prove
    agreement. `missing` datanodes held a replica when they last reported, and have not
    reported since the controller started. `awaited` datanodes are sending a full report
    that has not reached the container: their replicas are known from an earlier one.
    Roots of scans before `scanned_after_ms` are
    too old, and so are roots of data that was never read; None accepts all.
    """

    required: int = 0
    silent: AbstractSet[PeerId] = frozenset()
    missing: AbstractSet[PeerId] = frozenset()
    awaited: AbstractSet[PeerId] = frozenset()
    scanned_after_ms: float | None = None


MATCH = ComparisonResult(RootComparison.MATCH, roots_agree=True)
_COMPLETE = Knowledge()


def expected_replicas(replicas: Sequence[ContainerReplica], known: Knowledge) -> int:
    """How many replicas of a container have to be known before it may be called
    healthy: those that are reported or missing, and never less than required.
    """
    return max(known.required, len(replicas) + len(known.missing))


def compare(replicas: Sequence[ContainerReplica], known: Knowledge = _COMPLETE) -> ComparisonResult:
    """Compare the reported roots.

    Different roots are DIVERGED, whatever else is unknown, as long as one of the
    datanodes reports. So are equal roots with different fingerprints, because a root
    does not show which blocks are deleted. A MATCH needs every expected replica, with
    the root of a recent scan.
    """
    if not replicas:
        return ComparisonResult(RootComparison.UNKNOWN, _incomplete(replicas, known))
    if is_erasure_coded(replicas):
        return ComparisonResult(
            RootComparison.NOT_APPLICABLE, "erasure-coded replicas differ by design"
        )
    if container_state(replicas) not in (ContainerState.CLOSED, ContainerState.QUASI_CLOSED):
        return ComparisonResult(RootComparison.NOT_APPLICABLE, "only closed containers have a tree")
    closed = [replica for replica in replicas if replica.state.is_closed]
    if closed and all(replica.peer in known.silent for replica in closed):
        return ComparisonResult(RootComparison.UNKNOWN, "all replicas are on silent datanodes")
    if len({r.data_checksum for r in closed if r.data_checksum is not None}) > 1:
        return ComparisonResult(RootComparison.DIVERGED, "roots differ")
    if len({r.fingerprint for r in closed if r.fingerprint and r.data_checksum is not None}) > 1:
        return ComparisonResult(
            RootComparison.DIVERGED,
            "roots are equal, but some replicas have tombstones that others lack",
        )
    if doubt := _doubt(replicas, closed, known):
        return ComparisonResult(RootComparison.UNKNOWN, doubt)
    if doubt := _incomplete(replicas, known) or _stale(closed, known.scanned_after_ms):
        return ComparisonResult(RootComparison.UNKNOWN, doubt, roots_agree=len(replicas) > 1)
    if len(replicas) < 2:
        return ComparisonResult(RootComparison.UNKNOWN, "there is no other replica to compare with")
    unhealthy = sum(replica.state is ReplicaState.UNHEALTHY for replica in closed)
    return (
        replace(MATCH, note=f"{unhealthy} of {len(closed)} replicas are UNHEALTHY")
        if unhealthy
        else MATCH
    )


def _doubt(
    replicas: Sequence[ContainerReplica], closed: Sequence[ContainerReplica], known: Knowledge
) -> str:
    """Why the reported replicas cannot be compared; empty if they can."""
    if len(closed) < len(replicas):
        is_invalid = any(replica.state is ReplicaState.INVALID for replica in replicas)
        note = f"not closed: {describe_not_closed(replicas)}"
        return f"{note}; {INVALID_HINT}" if is_invalid else note
    if any(replica.data_checksum is None for replica in closed):
        return "some replicas have no tree yet"
    if any(replica.peer in known.silent for replica in closed):
        return "some replicas are on datanodes that are silent"
    if awaited := sorted(known.awaited):
        return (
            f"the replica on datanode {', '.join(awaited[:_MISSING_NAMED_MAX])} is known from an"
            " earlier report; a full one is under way"
        )
    if any(replica.data_checksum == _EMPTY_ROOT and replica.block_count for replica in closed):
        return "the trees are empty although there are blocks: nothing can be verified"
    return ""


def _incomplete(replicas: Sequence[ContainerReplica], known: Knowledge) -> str:
    expected = expected_replicas(replicas, known)
    if len(replicas) >= max(expected, 1):
        return ""
    if not expected:
        return "no replicas are known"
    note = f"{len(replicas)} of {expected} known"
    named = sorted(known.missing)[:_MISSING_NAMED_MAX]
    more = f" and {len(known.missing) - len(named)} more" if len(known.missing) > len(named) else ""
    return f"{note}: no report yet of datanode {', '.join(named)}{more}" if named else note


def _stale(closed: Sequence[ContainerReplica], scanned_after_ms: float | None) -> str:
    if scanned_after_ms is None:
        return ""
    times = [replica.data_scan_timestamp_ms for replica in closed]
    if never := sum(time is None for time in times):
        return f"the data of {never} of {len(closed)} replicas was never scanned"
    old = sum(time < scanned_after_ms for time in times if time is not None)
    return f"{old} of {len(closed)} replicas were last scanned too long ago" if old else ""


def targets(replicas: Iterable[ContainerReplica], live: AbstractSet[PeerId]) -> tuple[Target, ...]:
    """The targets of a job: each live writable replica, with all other live ones as
    peers; empty if the container cannot be reconciled.
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


def unwritten(
    replicas: Iterable[ContainerReplica], ordered: AbstractSet[PeerId], *, by_plan: bool
) -> dict[PeerId, str]:
    """The replicas that no datanode was ordered to repair and that differ from one that
    was, each with the reason why they have no order. `by_plan` if the orders were to
    carry out a plan.
    """
    no_order = "the plan leaves it out" if by_plan else "it was not live when the job began"
    known = sorted(replicas, key=lambda replica: replica.peer)
    repaired = [replica for replica in known if replica.peer in ordered]
    return {
        replica.peer: "it is held read-only" if replica.read_only else no_order
        for replica in known
        if replica.peer not in ordered and any(_differ(replica, other) for other in repaired)
    }


def _differ(ours: ContainerReplica, theirs: ContainerReplica) -> bool:
    if ours.data_checksum is None or theirs.data_checksum is None:
        return False
    if ours.data_checksum != theirs.data_checksum:
        return True
    return bool(ours.fingerprint and theirs.fingerprint) and ours.fingerprint != theirs.fingerprint


def free_slots(running: int, limit: int) -> int:
    """The number of further orders that a datanode may get."""
    return max(0, limit - running)


def roots(replicas: Iterable[ContainerReplica]) -> Roots:
    """The roots that show whether a container changed since a verdict."""
    return tuple(sorted((r.peer, r.data_checksum, r.fingerprint.hex()) for r in replicas))


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """A replica after a round: its root, whether chunks were repaired, and whether its
    verdict leaves no damage.
    """

    root: Root
    repaired: bool
    is_settled: bool


def peers_to_reorder(before: Roots, ends: Sequence[RoundEnd]) -> frozenset[PeerId]:
    """The datanodes that should reconcile once more, because another replica changed in
    this round.

    A replica that finished early could not read what another repaired later. Then their
    roots differ. If the trees were older than the damage, the roots are equal again,
    but a verdict leaves damage. A repaired replica counts as changed even with an equal
    root, because its damage was unknown before. Without a changed replica a further
    round would have the same result.
    """
    known = [end for end in ends if end.root[1] is not None]
    differ = (
        len({end.root[1] for end in known}) > 1
        or len({end.root[2] for end in known if end.root[2]}) > 1
    )
    changed = {end.root[0] for end in known if end.repaired or end.root not in before}
    return frozenset(
        end.root[0] for end in known if changed - {end.root[0]} and (differ or not end.is_settled)
    )


def backoff_s(container_id: ContainerId, failures: int) -> float:
    """The wait in seconds after a number of failures in a row: a minute, doubled each
    time, up to a day, plus the jitter.
    """
    assert failures >= 1
    wait_s = min(_BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 32), BACKOFF_MOST_S)
    # Knuth's multiplicative hash instead of a random source, so that a replay has the
    # same times.
    spread = ((container_id * 2_654_435_761 + failures * 40_503) & 0xFFFF_FFFF) / 2**32
    return wait_s * (1 + _BACKOFF_JITTER * spread)


def next_visit(
    previous: Visit | None,
    *,
    container_id: ContainerId,
    job_id: str,
    verdict: Verdict | None,
    succeeded: bool,
    verdict_roots: Roots,
    now_s: float,
    is_final: bool = False,
) -> Visit:
    """The visit that records a finished job.

    `succeeded` means that the job is DONE and the replicas agree now. `verdict_roots`
    are the roots for which a final verdict holds; `is_final` is another reason to leave
    the container alone while it has them.
    """
    is_final |= verdict in FINAL_VERDICTS
    if succeeded and not is_final:
        return Visit(container_id, job_id, 0, now_s, verdict)
    failures = (previous.failures if previous else 0) + 1
    final_roots = verdict_roots if is_final else None
    return Visit(
        container_id,
        job_id,
        failures,
        now_s + backoff_s(container_id, failures),
        verdict,
        final_roots,
    )


def resume_visit(visit: Visit, now_s: float) -> Visit:
    """A stored visit after a start of the controller. If the system clock was set back,
    the container waits no longer than after its last failure.
    """
    longest_s = backoff_s(visit.container_id, visit.failures) if visit.failures else 0.0
    return replace(visit, not_before_s=min(visit.not_before_s, now_s + longest_s))


def is_due(visit: Visit | None, now_roots: Roots, now_s: float) -> bool:
    """Whether automatic mode may start a job for the container."""
    if visit is None:
        return True
    return now_s >= visit.not_before_s and (
        visit.hopeless_roots is None or visit.hopeless_roots != now_roots
    )
