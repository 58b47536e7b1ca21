"""What came of a comparison or a repair: verdicts and their order, evidence, counters.

Everyone who compares or repairs speaks this vocabulary: plans, repairs, agents, the
controller, the sweep and the commands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Self

from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId


class Verdict(Enum):
    """What is known of a set of replicas."""

    MATCH = "MATCH"
    REPAIRABLE = "REPAIRABLE"
    UNRECOVERABLE = "UNRECOVERABLE"
    CONFLICT = "CONFLICT"
    UNKNOWN = "UNKNOWN"


# The one order of severity. UNKNOWN is worse than REPAIRABLE: what nobody could read
# may hide anything.
_VERDICTS_WORST_FIRST = (
    Verdict.UNRECOVERABLE,
    Verdict.CONFLICT,
    Verdict.UNKNOWN,
    Verdict.REPAIRABLE,
    Verdict.MATCH,
)
# Replicas that are known to differ, or to be damaged.
DIVERGED_VERDICTS = (Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.REPAIRABLE)
# No further reconciliation changes these while the replicas stay as they are.
FINAL_VERDICTS = frozenset({Verdict.UNRECOVERABLE, Verdict.CONFLICT})


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The worst of some verdicts; None of none."""
    return min(verdicts, key=_VERDICTS_WORST_FIRST.index, default=None)


class EvidenceKind(StrEnum):
    """What a verdict rests on."""

    HEALTHY_COPIES_DIFFER = "healthy_copies_differ"
    LENGTHS_DIFFER = "lengths_differ"
    CHUNKINGS_OVERLAP = "chunkings_overlap"
    SOLE_COPY_CORRUPT = "sole_copy_corrupt"
    COPIES_CORRUPT_ALIKE = "copies_corrupt_alike"
    BAD_WINDOWS_SHARED = "bad_windows_shared"
    WINDOWS_UNPROVEN = "windows_unproven"
    BYTES_LOST = "bytes_lost"
    BYTES_UNRECORDED = "bytes_unrecorded"
    # Found while repairing: what the records say, and who did not answer.
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
    """One fact behind a verdict, with the place it is about.

    `kind` is an EvidenceKind. An agent of a later version may report another word.
    """

    kind: str
    block_id: BlockId | None = None
    offset: int | None = None
    detail: str = ""


class OutcomeState(Enum):
    """How the run ended, whatever it found; the values go over the wire."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """What a repair got from one peer.

    `outcome` is "ok", or the code of the last error that set the peer aside.
    """

    peer: PeerId
    outcome: str
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class RepairCounters:
    """What a repair planned and did so far; `bytes_planned` grows while chunks are
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

    def at_least(self, earlier: "RepairCounters") -> Self:
        """Each counter, or the earlier one where that is higher.

        An agent that was restarted counts from 0 again; a job does not.
        """
        return replace(
            self,
            **{name: max(getattr(self, name), getattr(earlier, name)) for name in COUNTERS},
        )

    def plus(self, earlier: "RepairCounters") -> Self:
        """The sums of these counters and those of earlier rounds."""
        return replace(
            self, **{name: getattr(self, name) + getattr(earlier, name) for name in COUNTERS}
        )


COUNTERS = tuple(field.name for field in fields(RepairCounters))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairProgress(RepairCounters):
    """How far a repair is; `phase` is what it does now."""

    phase: str


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """What came of it.

    `verdict` speaks of all replicas that answered, as far as the run came: MATCH, they
    were equal and all peers answered; REPAIRABLE, whatever this replica lacked it holds
    now (a peer may still have to take its part); UNRECOVERABLE, CONFLICT or UNKNOWN,
    with the evidence; None where no comparison was made. `error_code` is set where
    `state` is not DONE.
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
