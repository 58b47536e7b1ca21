"""A replication: what was asked for, how far it is, and what a syncer reports of it.

These values cross between operator, master and syncer, and lie in the master's database
and in the syncer's folder. Nothing here decides.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from replicator.stores.port import FeedPosition, SnapshotFacts

# A report crosses with each heartbeat.
FAILED_KEYS_MAX = 20
# Of a key that a report or a checkpoint names; stores of S3 have no longer ones.
KEY_BYTES_MAX = 1_024

PolicyId = NewType("PolicyId", str)
SyncerId = NewType("SyncerId", str)


class Stage(Enum):
    """How a replication learns what to do (OZ-131)."""

    INITIAL_BATCH = "INITIAL_BATCH"
    """It copies a snapshot of the source."""
    INCREMENTAL = "INCREMENTAL"
    """It applies the differences of snapshots."""
    LIVE = "LIVE"
    """It follows the log of changes."""


class DesiredState(Enum):
    """What the operator wants of a replication."""

    ENABLED = "ENABLED"
    PAUSED = "PAUSED"
    CANCELLED = "CANCELLED"
    """It ends, and cannot be resumed from where it was."""


class Condition(Enum):
    """How a replication is (OZ-132)."""

    UNASSIGNED = "UNASSIGNED"
    """No syncer has it."""
    ACTIVE = "ACTIVE"
    WAITING = "WAITING"
    """A store or the link does not answer. It retries for ever."""
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    """It stopped, and goes on once the cause is mended and it is resumed."""
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    """Its syncer has not been heard of in time."""


class ReplicationFault(Enum):
    """Why a replication waits or stopped: the closed list of reasons."""

    SOURCE_UNAVAILABLE = "source_unavailable"
    TARGET_UNAVAILABLE = "target_unavailable"
    VERIFIER_UNAVAILABLE = "verifier_unavailable"
    """The verifier beside the target is passed by; all goes on without it."""
    SOURCE_FORBIDDEN = "source_forbidden"
    TARGET_FORBIDDEN = "target_forbidden"
    TARGET_FULL = "target_full"
    SOURCE_MISSING = "source_missing"
    TARGET_MISSING = "target_missing"
    OBJECT_UNSUPPORTED = "object_unsupported"
    OBJECT_FAILED = "object_failed"
    LEASE_LOST = "lease_lost"
    STATE_DAMAGED = "state_damaged"
    LOCAL_DISK = "local_disk"
    """The syncer's own disk is full, or fails."""
    DEFECT = "defect"


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """What an operator may choose, and change while it runs.

    `bytes_per_second` 0 is no limit (OZ-152). `queue_entries_max` is how many changes
    may wait to be applied (OZ-144). `interval_s` is the time between two incremental
    cycles. With `newest_wins` a change is applied only where it is newer than what the
    target has (OZ-158). `is_live` False stays with incremental cycles. `verifier` is
    host and port of the one beside the target, empty without one.
    """

    bytes_per_second: int = 0
    queue_entries_max: int = 1_000_000
    interval_s: float = 60.0
    is_live: bool = True
    newest_wins: bool = False
    keeps_acls: bool = True
    verifier: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """One replication as it was asked for: two addresses and the keys that cross.

    No prefix is all keys (OZ-161). `revision` grows with every change by an operator.
    """

    policy_id: PolicyId
    source: str
    target: str
    prefixes: tuple[str, ...] = ()
    options: ReplicationOptions = field(default_factory=ReplicationOptions)
    desired: DesiredState = DesiredState.ENABLED
    revision: int = 1

    def __post_init__(self) -> None:
        assert list(self.prefixes) == sorted(set(self.prefixes))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a replication is: all that another syncer needs to go on (OZ-039).

    `snapshot` is the one being applied, `base` the one that the target has as a whole,
    `last_key` the key up to which `snapshot` was applied (OZ-056), `position` that of
    the log up to which every change is at the target (OZ-135); in the initial batch it
    is where the log is followed from. `prefixes` are those that the target has: a
    policy that wants others copies these first. The empty prefix is all keys.
    `compared` are those that `last_key` is about: others are compared from their start.
    `has_failed` says that keys failed by themselves and lack changes before `position`:
    which ones shows once all is compared.
    """

    stage: Stage = Stage.INITIAL_BATCH
    base: SnapshotFacts | None = None
    snapshot: SnapshotFacts | None = None
    last_key: str = ""
    position: FeedPosition | None = None
    prefixes: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class FailedKey:
    """A key that fails by itself, and is tried again while others go on."""

    key: str
    fault: ReplicationFault
    message: str


@dataclass(frozen=True, slots=True)
class ReplicationReport:
    """What a syncer says of one replication with each heartbeat (OZ-047).

    Times are ms since the epoch, and None where nothing is known. `proven_position` is
    the place up to which a comparison has shown the target equal. `oldest_unproven_ms`
    is when the oldest change was made that is not proven at the target yet: the RPO
    counts from it. `lag_p50_ms` and `lag_p99_ms` are of changes applied lately, from
    the store's record of a change to the target's answer. `target_probe` is what the
    target was found to do, as text of a ProbeMemory: the next syncer need not ask.
    `failed_keys` names the first FAILED_KEYS_MAX of those that `failed` counts.
    """

    condition: Condition
    checkpoint: Checkpoint
    fault: ReplicationFault | None = None
    message: str = ""
    queued: int = 0
    applied: int = 0
    duplicates: int = 0
    failed: int = 0
    sent_bytes: int = 0
    proven_position: FeedPosition | None = None
    proven_ms: int | None = None
    proof_level: str = ""
    differences: int | None = None
    oldest_unproven_ms: int | None = None
    last_applied_ms: int | None = None
    lag_p50_ms: int | None = None
    lag_p99_ms: int | None = None
    target_probe: str = ""
    failed_keys: tuple[FailedKey, ...] = ()
