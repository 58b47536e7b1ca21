"""What a replication master keeps: what operators want, and how replications are.

Operators write policies, syncers write states, and neither waits for the other. All
times are in ms since the epoch by the clock of the database, which all masters share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from replicator.replication import (
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationReport,
    SyncerId,
)


class RecordKind(Enum):
    """The kinds of records."""

    SETTINGS = "settings"
    ROUND = "round"
    POLICY = "policy"
    STATE = "state"
    SYNCER = "syncer"


class RecordKey(NamedTuple):
    """What a record is stored by; `name` is empty where a kind has one record."""

    kind: RecordKind
    name: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What operators want of all replications (OZ-124), and who said so last."""

    is_enabled: bool = True
    changed_ms: int | None = None
    changed_by: str = ""
    reason: str = ""

    @property
    def key(self) -> RecordKey:
        """Where it is stored."""
        return RecordKey(RecordKind.SETTINGS)


@dataclass(frozen=True, slots=True)
class AssignmentRound:
    """Every assignment takes the next number for its epoch. So two masters never make
    one each from the same state, which would overdraw the pool of tokens, and no epoch
    of a replication comes again, also after it was deleted and added anew.
    """

    number: int = 0

    @property
    def key(self) -> RecordKey:
        """Where it is stored."""
        return RecordKey(RecordKind.ROUND)


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and what operators did to it.

    `returns_policy` is the replication whose target this one copies back to its source
    (OZ-151). A deleted policy stays until a syncer has removed its snapshots (OZ-126).
    With `skips_cleanup` it goes as soon as nobody works on it. While `failed_over_ms`
    is set no syncer gets it.
    """

    policy: Policy
    created_ms: int
    changed_ms: int
    changed_by: str = ""
    reason: str = ""
    is_deleted: bool = False
    skips_cleanup: bool = False
    returns_policy: PolicyId | None = None
    failed_over_ms: int | None = None

    @property
    def key(self) -> RecordKey:
        """Where it is stored."""
        return RecordKey(RecordKind.POLICY, self.policy.policy_id)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process of a syncer that has a replication. In `Leaving` it may only still
    have it.
    """

    syncer_id: SyncerId
    session: str
    host: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A process from which a replication was taken, which it had by `epoch`: until
    `until_ms`, or until it says that it has stopped, it may still write.
    """

    holder: Holder
    epoch: int
    taken_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class ReplicationError:
    """The last fault that a syncer reported, kept after it is mended (OZ-136)."""

    fault: ReplicationFault
    message: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class ReplicationState:
    """How a replication is, and who has it.

    `epoch` is the fencing token: it grows with every assignment and every failover, and
    what carries an older one is refused. `sequence` is that of the newest report of
    this epoch, and `reported_ms` when it came: one that has nothing new to say sends
    none. `waiting_since_ms` is since when nobody has it, and `was_given` whether
    anybody ever had.
    """

    policy_id: PolicyId
    waiting_since_ms: int
    epoch: int = 0
    holder: Holder | None = None
    leaving: Leaving | None = None
    sequence: int = 0
    report: ReplicationReport | None = None
    reported_ms: int | None = None
    error: ReplicationError | None = None
    was_given: bool = False

    def __post_init__(self) -> None:
        assert self.holder is None or self.leaving is None

    @property
    def key(self) -> RecordKey:
        """Where it is stored."""
        return RecordKey(RecordKind.STATE, self.policy_id)

    @property
    def is_free(self) -> bool:
        """Whether no process has it or may still work on it."""
        return self.holder is None and self.leaving is None

    @property
    def has_ended(self) -> bool:
        """Whether a syncer has ended it, and removed what it kept at the stores. One
        that nobody ever had kept nothing.
        """
        ended = self.report is not None and self.report.condition is Condition.CANCELLED
        return self.is_free and (ended or not self.was_given)


@dataclass(frozen=True, slots=True)
class SyncerCapacity:
    """What a syncer can take; None is not known. `replications_max` counts those that
    it has.
    """

    replications_max: int
    free_bytes_per_second: int | None = None
    free_disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SyncerLease:
    """From the last renewal to its end, by the clock of the database."""

    renewed_ms: int
    expires_ms: int

    def __post_init__(self) -> None:
        assert self.renewed_ms < self.expires_ms

    @property
    def duration_ms(self) -> int:
        """How long it lasts unless it is renewed."""
        return self.expires_ms - self.renewed_ms


@dataclass(frozen=True, slots=True)
class SyncerRecord:
    """A syncer that has registered. `owner` is the identity of the certificate by which
    it did, and empty without TLS. `session` is that of its process.
    """

    syncer_id: SyncerId
    session: str
    owner: str
    host: str
    started_ms: int
    capacity: SyncerCapacity
    lease: SyncerLease

    @property
    def key(self) -> RecordKey:
        """Where it is stored."""
        return RecordKey(RecordKind.SYNCER, self.syncer_id)


Record: TypeAlias = (
    ClusterSettings | AssignmentRound | PolicyRecord | ReplicationState | SyncerRecord
)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record, and its version: a number that no record had before, also after it was
    removed and stored again.
    """

    version: int
    record: Record


@dataclass(frozen=True, slots=True)
class StoredState:
    """All records as of one moment, which was `now_ms`."""

    now_ms: int
    records: Mapping[RecordKey, StoredRecord] = field(default_factory=dict)

    def version(self, key: RecordKey) -> int:
        """The version of a record; 0 if there is none."""
        found = self.records.get(key)
        return found.version if found else 0

    @property
    def settings(self) -> ClusterSettings:
        """The cluster's settings; the defaults if none were ever set."""
        found = self.records.get(RecordKey(RecordKind.SETTINGS))
        if found is None:
            return ClusterSettings()
        assert isinstance(found.record, ClusterSettings)
        return found.record

    @property
    def next_round(self) -> AssignmentRound:
        """What an assignment has to write, and takes its epoch from."""
        found = self.records.get(RecordKey(RecordKind.ROUND))
        if found is None:
            return AssignmentRound(1)
        assert isinstance(found.record, AssignmentRound)
        return replace(found.record, number=found.record.number + 1)

    def policy(self, policy_id: PolicyId) -> PolicyRecord | None:
        """The policy of this ID."""
        found = self.records.get(RecordKey(RecordKind.POLICY, policy_id))
        return found.record if found and isinstance(found.record, PolicyRecord) else None

    def state(self, policy_id: PolicyId) -> ReplicationState | None:
        """The state of the replication of this ID."""
        found = self.records.get(RecordKey(RecordKind.STATE, policy_id))
        return found.record if found and isinstance(found.record, ReplicationState) else None

    def syncer(self, syncer_id: SyncerId) -> SyncerRecord | None:
        """The syncer of this ID."""
        found = self.records.get(RecordKey(RecordKind.SYNCER, syncer_id))
        return found.record if found and isinstance(found.record, SyncerRecord) else None

    @property
    def policies(self) -> tuple[PolicyRecord, ...]:
        """All policies, by ID."""
        found = [one.record for one in self.records.values()]
        policies = [record for record in found if isinstance(record, PolicyRecord)]
        return tuple(sorted(policies, key=lambda one: one.policy.policy_id))

    @property
    def states(self) -> tuple[ReplicationState, ...]:
        """All states, by ID."""
        found = [one.record for one in self.records.values()]
        states = [record for record in found if isinstance(record, ReplicationState)]
        return tuple(sorted(states, key=lambda one: one.policy_id))

    @property
    def syncers(self) -> tuple[SyncerRecord, ...]:
        """All syncers, by ID."""
        found = [one.record for one in self.records.values()]
        syncers = [record for record in found if isinstance(record, SyncerRecord)]
        return tuple(sorted(syncers, key=lambda one: one.syncer_id))


def can_go(record: PolicyRecord, state: ReplicationState) -> bool:
    """Whether nothing keeps a deleted policy any more."""
    return record.is_deleted and state.is_free and (record.skips_cleanup or state.has_ended)


def wanted(record: PolicyRecord, settings: ClusterSettings) -> DesiredState:
    """What a syncer has to do about a policy, all that operators want considered."""
    if record.is_deleted:
        return DesiredState.CANCELLED
    if not settings.is_enabled and record.policy.desired is DesiredState.ENABLED:
        return DesiredState.PAUSED
    return record.policy.desired
