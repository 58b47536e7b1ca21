from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Position(_message.Message):
    __slots__ = ("log", "index")
    LOG_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    log: str
    index: int
    def __init__(self, log: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("name", "snapshot_id", "position", "created_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    snapshot_id: str
    position: Position
    created_ms: int
    def __init__(self, name: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., created_ms: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("stage", "base", "snapshot", "last_key", "position", "prefixes", "compared", "has_failed")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    HAS_FAILED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    base: Snapshot
    snapshot: Snapshot
    last_key: str
    position: Position
    prefixes: _containers.RepeatedScalarFieldContainer[str]
    compared: _containers.RepeatedScalarFieldContainer[str]
    has_failed: bool
    def __init__(self, stage: _Optional[str] = ..., base: _Optional[_Union[Snapshot, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., last_key: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., prefixes: _Optional[_Iterable[str]] = ..., compared: _Optional[_Iterable[str]] = ..., has_failed: bool = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("condition", "checkpoint", "fault", "message", "queued", "applied", "duplicates", "failed", "sent_bytes", "proven_position", "proven_ms", "proof_level", "differences", "oldest_unproven_ms", "last_applied_ms", "lag_p50_ms", "lag_p99_ms", "target_probe", "failed_keys")
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROVEN_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROVEN_MS_FIELD_NUMBER: _ClassVar[int]
    PROOF_LEVEL_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UNPROVEN_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_MS_FIELD_NUMBER: _ClassVar[int]
    LAG_P50_MS_FIELD_NUMBER: _ClassVar[int]
    LAG_P99_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBE_FIELD_NUMBER: _ClassVar[int]
    FAILED_KEYS_FIELD_NUMBER: _ClassVar[int]
    condition: str
    checkpoint: Checkpoint
    fault: str
    message: str
    queued: int
    applied: int
    duplicates: int
    failed: int
    sent_bytes: int
    proven_position: Position
    proven_ms: int
    proof_level: str
    differences: int
    oldest_unproven_ms: int
    last_applied_ms: int
    lag_p50_ms: int
    lag_p99_ms: int
    target_probe: str
    failed_keys: _containers.RepeatedCompositeFieldContainer[FailedKey]
    def __init__(self, condition: _Optional[str] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., fault: _Optional[str] = ..., message: _Optional[str] = ..., queued: _Optional[int] = ..., applied: _Optional[int] = ..., duplicates: _Optional[int] = ..., failed: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., proven_position: _Optional[_Union[Position, _Mapping]] = ..., proven_ms: _Optional[int] = ..., proof_level: _Optional[str] = ..., differences: _Optional[int] = ..., oldest_unproven_ms: _Optional[int] = ..., last_applied_ms: _Optional[int] = ..., lag_p50_ms: _Optional[int] = ..., lag_p99_ms: _Optional[int] = ..., target_probe: _Optional[str] = ..., failed_keys: _Optional[_Iterable[_Union[FailedKey, _Mapping]]] = ...) -> None: ...

class FailedKey(_message.Message):
    __slots__ = ("key", "fault", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: str
    fault: str
    message: str
    def __init__(self, key: _Optional[str] = ..., fault: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("bytes_per_second", "queue_entries_max", "interval_s", "is_live", "newest_wins", "keeps_acls", "verifier")
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ENTRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_WINS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_ACLS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: int
    queue_entries_max: int
    interval_s: float
    is_live: bool
    newest_wins: bool
    keeps_acls: bool
    verifier: str
    def __init__(self, bytes_per_second: _Optional[int] = ..., queue_entries_max: _Optional[int] = ..., interval_s: _Optional[float] = ..., is_live: bool = ..., newest_wins: bool = ..., keeps_acls: bool = ..., verifier: _Optional[str] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("policy_id", "source", "target", "prefixes", "options", "desired", "revision")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    source: str
    target: str
    prefixes: _containers.RepeatedScalarFieldContainer[str]
    options: Options
    desired: str
    revision: int
    def __init__(self, policy_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., prefixes: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., desired: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("syncer_id", "session")
    SYNCER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    syncer_id: str
    session: str
    def __init__(self, syncer_id: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("replications_max", "free_bytes_per_second", "free_disk_bytes")
    REPLICATIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FREE_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    replications_max: int
    free_bytes_per_second: int
    free_disk_bytes: int
    def __init__(self, replications_max: _Optional[int] = ..., free_bytes_per_second: _Optional[int] = ..., free_disk_bytes: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("caller", "host", "started_ms", "capacity")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    host: str
    started_ms: int
    capacity: Capacity
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., host: _Optional[str] = ..., started_ms: _Optional[int] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_ms", "heartbeat_ms")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    heartbeat_ms: int
    def __init__(self, lease_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ...) -> None: ...

class HeldReport(_message.Message):
    __slots__ = ("policy_id", "epoch", "sequence", "report")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    epoch: int
    sequence: int
    report: Report
    def __init__(self, policy_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class KnownAssignment(_message.Message):
    __slots__ = ("policy_id", "digest")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    digest: int
    def __init__(self, policy_id: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("caller", "capacity", "reports", "known")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    capacity: Capacity
    reports: _containers.RepeatedCompositeFieldContainer[HeldReport]
    known: _containers.RepeatedCompositeFieldContainer[KnownAssignment]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[HeldReport, _Mapping]]] = ..., known: _Optional[_Iterable[_Union[KnownAssignment, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("policy_id", "digest", "epoch", "policy", "checkpoint", "target_probe")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBE_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    digest: int
    epoch: int
    policy: Policy
    checkpoint: Checkpoint
    target_probe: str
    def __init__(self, policy_id: _Optional[str] = ..., digest: _Optional[int] = ..., epoch: _Optional[int] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., target_probe: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_ms", "heartbeat_ms", "assignments", "refused_policy_ids")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_POLICY_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    heartbeat_ms: int
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    refused_policy_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., refused_policy_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveReportRequest(_message.Message):
    __slots__ = ("caller", "held")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    held: HeldReport
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., held: _Optional[_Union[HeldReport, _Mapping]] = ...) -> None: ...

class SaveReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Released(_message.Message):
    __slots__ = ("policy_id", "epoch")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    epoch: int
    def __init__(self, policy_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("caller", "released", "ends")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    released: _containers.RepeatedCompositeFieldContainer[Released]
    ends: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., released: _Optional[_Iterable[_Union[Released, _Mapping]]] = ..., ends: bool = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddPolicyRequest(_message.Message):
    __slots__ = ("policy", "requested_by", "reason", "returns_policy_id")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETURNS_POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    requested_by: str
    reason: str
    returns_policy_id: str
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ..., returns_policy_id: _Optional[str] = ...) -> None: ...

class DeletePolicyRequest(_message.Message):
    __slots__ = ("policy_id", "requested_by", "reason", "force")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    requested_by: str
    reason: str
    force: bool
    def __init__(self, policy_id: _Optional[str] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ..., force: bool = ...) -> None: ...

class DeletePolicyResponse(_message.Message):
    __slots__ = ("is_gone",)
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    is_gone: bool
    def __init__(self, is_gone: bool = ...) -> None: ...

class SetDesiredStateRequest(_message.Message):
    __slots__ = ("policy_id", "desired", "requested_by", "reason")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    desired: str
    requested_by: str
    reason: str
    def __init__(self, policy_id: _Optional[str] = ..., desired: _Optional[str] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetOptionsRequest(_message.Message):
    __slots__ = ("policy_id", "options", "requested_by", "reason", "revision")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    options: Options
    requested_by: str
    reason: str
    revision: int
    def __init__(self, policy_id: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class SetPrefixesRequest(_message.Message):
    __slots__ = ("policy_id", "prefixes", "requested_by", "reason")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    prefixes: _containers.RepeatedScalarFieldContainer[str]
    requested_by: str
    reason: str
    def __init__(self, policy_id: _Optional[str] = ..., prefixes: _Optional[_Iterable[str]] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetEnabledRequest(_message.Message):
    __slots__ = ("enabled", "requested_by", "reason")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    requested_by: str
    reason: str
    def __init__(self, enabled: bool = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetEnabledResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicationsRequest(_message.Message):
    __slots__ = ("after_policy_id",)
    AFTER_POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    after_policy_id: str
    def __init__(self, after_policy_id: _Optional[str] = ...) -> None: ...

class ListReplicationsResponse(_message.Message):
    __slots__ = ("replications", "more")
    REPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    replications: _containers.RepeatedCompositeFieldContainer[Replication]
    more: bool
    def __init__(self, replications: _Optional[_Iterable[_Union[Replication, _Mapping]]] = ..., more: bool = ...) -> None: ...

class GetReplicationRequest(_message.Message):
    __slots__ = ("policy_id",)
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    def __init__(self, policy_id: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("syncer", "host", "since_ms", "lease_expires_ms")
    SYNCER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    syncer: Caller
    host: str
    since_ms: int
    lease_expires_ms: int
    def __init__(self, syncer: _Optional[_Union[Caller, _Mapping]] = ..., host: _Optional[str] = ..., since_ms: _Optional[int] = ..., lease_expires_ms: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("holder", "epoch", "taken_ms", "until_ms")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    epoch: int
    taken_ms: int
    until_ms: int
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., epoch: _Optional[int] = ..., taken_ms: _Optional[int] = ..., until_ms: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("fault", "message", "at_ms")
    FAULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    fault: str
    message: str
    at_ms: int
    def __init__(self, fault: _Optional[str] = ..., message: _Optional[str] = ..., at_ms: _Optional[int] = ...) -> None: ...

class Replication(_message.Message):
    __slots__ = ("policy", "created_ms", "changed_by", "changed_ms", "reason", "is_deleted", "skips_cleanup", "returns_policy_id", "failed_over_ms", "condition", "condition_reason", "epoch", "holder", "leaving", "waiting_since_ms", "sequence", "report", "reported_ms", "seen_ms", "error", "now_ms", "is_enabled", "was_given")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_BY_FIELD_NUMBER: _ClassVar[int]
    CHANGED_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_DELETED_FIELD_NUMBER: _ClassVar[int]
    SKIPS_CLEANUP_FIELD_NUMBER: _ClassVar[int]
    RETURNS_POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_OVER_MS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    CONDITION_REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    WAITING_SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    REPORTED_MS_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    IS_ENABLED_FIELD_NUMBER: _ClassVar[int]
    WAS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    created_ms: int
    changed_by: str
    changed_ms: int
    reason: str
    is_deleted: bool
    skips_cleanup: bool
    returns_policy_id: str
    failed_over_ms: int
    condition: str
    condition_reason: str
    epoch: int
    holder: Holder
    leaving: Leaving
    waiting_since_ms: int
    sequence: int
    report: Report
    reported_ms: int
    seen_ms: int
    error: Error
    now_ms: int
    is_enabled: bool
    was_given: bool
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., created_ms: _Optional[int] = ..., changed_by: _Optional[str] = ..., changed_ms: _Optional[int] = ..., reason: _Optional[str] = ..., is_deleted: bool = ..., skips_cleanup: bool = ..., returns_policy_id: _Optional[str] = ..., failed_over_ms: _Optional[int] = ..., condition: _Optional[str] = ..., condition_reason: _Optional[str] = ..., epoch: _Optional[int] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., waiting_since_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., reported_ms: _Optional[int] = ..., seen_ms: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., now_ms: _Optional[int] = ..., is_enabled: bool = ..., was_given: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Syncer(_message.Message):
    __slots__ = ("syncer", "owner", "host", "started_ms", "capacity", "renewed_ms", "lease_expires_ms", "replications")
    SYNCER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RENEWED_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    REPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    syncer: Caller
    owner: str
    host: str
    started_ms: int
    capacity: Capacity
    renewed_ms: int
    lease_expires_ms: int
    replications: int
    def __init__(self, syncer: _Optional[_Union[Caller, _Mapping]] = ..., owner: _Optional[str] = ..., host: _Optional[str] = ..., started_ms: _Optional[int] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., renewed_ms: _Optional[int] = ..., lease_expires_ms: _Optional[int] = ..., replications: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("is_enabled", "syncers", "policies", "unassigned", "now_ms", "store", "assignment_mode", "assignment_strategy", "tokens", "pending_entries_max", "fault", "roles_enforced")
    IS_ENABLED_FIELD_NUMBER: _ClassVar[int]
    SYNCERS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    UNASSIGNED_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_MODE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_ENTRIES_MAX_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ROLES_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    is_enabled: bool
    syncers: _containers.RepeatedCompositeFieldContainer[Syncer]
    policies: int
    unassigned: int
    now_ms: int
    store: str
    assignment_mode: str
    assignment_strategy: str
    tokens: int
    pending_entries_max: int
    fault: str
    roles_enforced: bool
    def __init__(self, is_enabled: bool = ..., syncers: _Optional[_Iterable[_Union[Syncer, _Mapping]]] = ..., policies: _Optional[int] = ..., unassigned: _Optional[int] = ..., now_ms: _Optional[int] = ..., store: _Optional[str] = ..., assignment_mode: _Optional[str] = ..., assignment_strategy: _Optional[str] = ..., tokens: _Optional[int] = ..., pending_entries_max: _Optional[int] = ..., fault: _Optional[str] = ..., roles_enforced: bool = ...) -> None: ...

class FailoverRequest(_message.Message):
    __slots__ = ("policy_id", "requested_by", "reason")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    requested_by: str
    reason: str
    def __init__(self, policy_id: _Optional[str] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndFailoverRequest(_message.Message):
    __slots__ = ("policy_id", "requested_by", "reason")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    requested_by: str
    reason: str
    def __init__(self, policy_id: _Optional[str] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
