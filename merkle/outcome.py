"""Results of comparisons and repairs: verdicts and their order, evidence, counters.

Plans, repairs, agents, the controller, the sweep and the commands share these types.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Self

from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId


class Verdict(Enum):
    """The result of comparing a set of replicas."""

    MATCH = "MATCH"
    REPAIRABLE = "REPAIRABLE"
    UNRECOVERABLE = "UNRECOVERABLE"
    CONFLICT = "CONFLICT"
    UNKNOWN = "UNKNOWN"


# The order of severity, used everywhere. UNKNOWN is worse than REPAIRABLE, because a
# replica that nobody could read may have any damage.
_VERDICTS_WORST_FIRST = (
    Verdict.UNRECOVERABLE,
    Verdict.CONFLICT,
    Verdict.UNKNOWN,
    Verdict.REPAIRABLE,
    Verdict.MATCH,
)
# Verdicts of replicas that differ or are damaged.
DIVERGED_VERDICTS = (Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.REPAIRABLE)
# Another reconciliation does not change these while the replicas stay as they are.
FINAL_VERDICTS = frozenset({Verdict.UNRECOVERABLE, Verdict.CONFLICT})


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The worst of these verdicts; None without any."""
    return min(verdicts, key=_VERDICTS_WORST_FIRST.index, default=None)


class EvidenceKind(StrEnum):
    """The kinds of facts that a verdict rests on."""

    HEALTHY_COPIES_DIFFER = "healthy_copies_differ"
    LENGTHS_DIFFER = "lengths_differ"
    CHUNKINGS_OVERLAP = "chunkings_overlap"
    SOLE_COPY_CORRUPT = "sole_copy_corrupt"
    COPIES_CORRUPT_ALIKE = "copies_corrupt_alike"
    BAD_WINDOWS_SHARED = "bad_windows_shared"
    WINDOWS_UNPROVEN = "windows_unproven"
    BYTES_LOST = "bytes_lost"
    BYTES_UNRECORDED = "bytes_unrecorded"
    # Found while repairing: from records, chunk files and unreachable peers.
    RECORDS_DIFFER = "records_differ"
    RECORD_UNPROVEN = "record_unproven"
    SOURCE_UNREACHABLE = "source_unreachable"
    HOLE = "hole"
    DAMAGED_AGAIN = "damaged_again"
    FILE_UNREADABLE = "file_unreadable"
    FINDINGS_REMAIN = "findings_remain"
    UNVERIFIABLE = "unverifiable"
    NO_ROOT = "no_root"
    NOTHING_COMPARED = "nothing_compared"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a verdict, with its block and its offset in bytes.

    `kind` is a value of EvidenceKind; an agent of a later version may report others.
    """

    kind: str
    block_id: BlockId | None = None
    offset: int | None = None
    detail: str = ""


class OutcomeState(Enum):
    """How a run ended, whatever its verdict; the values go over the wire."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """What a repair got from one peer.

    `outcome` is "ok", or the code of the last error for which the repair stopped using
    the peer.
    """

    peer: PeerId
    outcome: str
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class RepairCounters:
    """What a repair has planned and done so far; `bytes_planned` grows while chunks are
    checked.
    """

    blocks_planned: int = 0
    blocks_done: int = 0
    bytes_planned: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    windows_written: int = 0
    chunks_repaired: int = 0
    blocks_added: int = 0
    tombstones_adopted: int = 0
    rounds: int = 0
    scans: int = 0
    bytes_scanned: int = 0

    def at_least(self, earlier: "RepairCounters") -> Self:
        """The maximum of each counter and its `earlier` value.

        A restarted agent counts from 0 again, while the counters of its job must not
        decrease.
        """
        return replace(
            self,
            **{name: max(getattr(self, name), getattr(earlier, name)) for name in COUNTERS},
        )

    def plus(self, earlier: "RepairCounters") -> Self:
        """The sums of these counters and the `earlier` ones."""
        return replace(
            self, **{name: getattr(self, name) + getattr(earlier, name) for name in COUNTERS}
        )


COUNTERS = tuple(field.name for field in fields(RepairCounters))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport(RepairCounters):
    """What a datanode reports of its part of a repair: counters, and at the end the
    verdict and what it rests on.
    """

    verdict: Verdict | None = None
    error_code: str = ""
    message: str = ""
    evidence: tuple[Evidence, ...] = ()
    claimed_deleted: tuple[BlockId, ...] = ()
    peers: tuple[PeerOutcome, ...] = ()
    # What the datanode lets this repair fetch in a second; 0 means no limit.
    limit_bytes_per_second: int = 0

    @classmethod
    def of(cls, counters: RepairCounters) -> Self:
        """A report of these counters alone."""
        return replace(cls(), **{name: getattr(counters, name) for name in COUNTERS})

    def after_rounds(self, earlier: "RepairReport") -> "RepairReport":
        """The whole job's progress: these figures and those of earlier rounds."""
        fetched = {peer.peer: peer.bytes_fetched for peer in earlier.peers}
        return replace(
            self.plus(earlier),
            # An earlier round adopted the tombstones that it claimed: later rounds do
            # not list them again.
            claimed_deleted=tuple(sorted({*self.claimed_deleted, *earlier.claimed_deleted})),
            peers=tuple(
                replace(p, bytes_fetched=p.bytes_fetched + fetched.get(p.peer, 0))
                for p in self.peers
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairProgress(RepairCounters):
    """The counters of a repair and its current phase."""

    phase: str


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """The result of one repair.

    `verdict` is about all replicas that answered before the run ended:

    - MATCH: all peers answered, and the replicas were equal.
    - REPAIRABLE: this replica now holds everything that it lacked; a peer may still
      lack something.
    - UNRECOVERABLE, CONFLICT, UNKNOWN: see `evidence`.
    - None: nothing was compared.

    `error_code` is set unless `state` is DONE.
    """

    container_id: ContainerId
    state: OutcomeState
    verdict: Verdict | None
    progress: RepairProgress
    error_code: str = ""
    message: str = ""
    evidence: tuple[Evidence, ...] = ()
    claimed_deleted: tuple[BlockId, ...] = ()
    peers: tuple[PeerOutcome, ...] = ()
    replica_state: ReplicaState | None = None
    data_checksum: int | None = None
