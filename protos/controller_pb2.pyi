from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Datanode(_message.Message):
    __slots__ = ("datanode_id", "hostname", "address", "returns_to_service")
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_TO_SERVICE_FIELD_NUMBER: _ClassVar[int]
    datanode_id: str
    hostname: str
    address: str
    returns_to_service: bool
    def __init__(self, datanode_id: _Optional[str] = ..., hostname: _Optional[str] = ..., address: _Optional[str] = ..., returns_to_service: bool = ...) -> None: ...

class ReplicaReport(_message.Message):
    __slots__ = ("container_id", "state", "data_checksum", "bcs_id", "used_bytes", "block_count", "replica_index", "data_scan_timestamp", "read_only", "fingerprint")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BCS_ID_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_SCAN_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    state: str
    data_checksum: int
    bcs_id: int
    used_bytes: int
    block_count: int
    replica_index: int
    data_scan_timestamp: int
    read_only: bool
    fingerprint: bytes
    def __init__(self, container_id: _Optional[int] = ..., state: _Optional[str] = ..., data_checksum: _Optional[int] = ..., bcs_id: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., replica_index: _Optional[int] = ..., data_scan_timestamp: _Optional[int] = ..., read_only: bool = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class ContainerReport(_message.Message):
    __slots__ = ("full", "replicas", "removed_container_ids", "after_container_id", "through_container_id")
    FULL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    AFTER_CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    THROUGH_CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    full: bool
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaReport]
    removed_container_ids: _containers.RepeatedScalarFieldContainer[int]
    after_container_id: int
    through_container_id: int
    def __init__(self, full: bool = ..., replicas: _Optional[_Iterable[_Union[ReplicaReport, _Mapping]]] = ..., removed_container_ids: _Optional[_Iterable[int]] = ..., after_container_id: _Optional[int] = ..., through_container_id: _Optional[int] = ...) -> None: ...

class ReconcileProgress(_message.Message):
    __slots__ = ("job_id", "container_id", "state", "verdict", "bytes_fetched", "bytes_written", "windows_written", "bytes_planned", "blocks_done", "blocks_planned", "error_code", "message", "evidence", "chunks_repaired", "tombstones_adopted", "claimed_deleted_block_ids", "peers", "bytes_scanned", "limit_bytes_per_second")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PLANNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_DELETED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SCANNED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    container_id: int
    state: str
    verdict: str
    bytes_fetched: int
    bytes_written: int
    windows_written: int
    bytes_planned: int
    blocks_done: int
    blocks_planned: int
    error_code: str
    message: str
    evidence: _containers.RepeatedCompositeFieldContainer[Evidence]
    chunks_repaired: int
    tombstones_adopted: int
    claimed_deleted_block_ids: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerOutcome]
    bytes_scanned: int
    limit_bytes_per_second: int
    def __init__(self, job_id: _Optional[str] = ..., container_id: _Optional[int] = ..., state: _Optional[str] = ..., verdict: _Optional[str] = ..., bytes_fetched: _Optional[int] = ..., bytes_written: _Optional[int] = ..., windows_written: _Optional[int] = ..., bytes_planned: _Optional[int] = ..., blocks_done: _Optional[int] = ..., blocks_planned: _Optional[int] = ..., error_code: _Optional[str] = ..., message: _Optional[str] = ..., evidence: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ..., chunks_repaired: _Optional[int] = ..., tombstones_adopted: _Optional[int] = ..., claimed_deleted_block_ids: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[_Union[PeerOutcome, _Mapping]]] = ..., bytes_scanned: _Optional[int] = ..., limit_bytes_per_second: _Optional[int] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("kind", "block_id", "offset", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    block_id: int
    offset: int
    detail: str
    def __init__(self, kind: _Optional[str] = ..., block_id: _Optional[int] = ..., offset: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class PeerOutcome(_message.Message):
    __slots__ = ("datanode_id", "outcome", "bytes_fetched")
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    datanode_id: str
    outcome: str
    bytes_fetched: int
    def __init__(self, datanode_id: _Optional[str] = ..., outcome: _Optional[str] = ..., bytes_fetched: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("datanode", "incarnation", "sequence", "report", "progress", "acknowledged_command_ids")
    DATANODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_COMMAND_IDS_FIELD_NUMBER: _ClassVar[int]
    datanode: Datanode
    incarnation: str
    sequence: int
    report: ContainerReport
    progress: _containers.RepeatedCompositeFieldContainer[ReconcileProgress]
    acknowledged_command_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, datanode: _Optional[_Union[Datanode, _Mapping]] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., report: _Optional[_Union[ContainerReport, _Mapping]] = ..., progress: _Optional[_Iterable[_Union[ReconcileProgress, _Mapping]]] = ..., acknowledged_command_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReconcileCommand(_message.Message):
    __slots__ = ("container_id", "job_id", "peers", "container_state", "skip_final_scan", "bytes_per_second", "requested_by", "reason", "plan")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_STATE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FINAL_SCAN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    job_id: str
    peers: _containers.RepeatedCompositeFieldContainer[Datanode]
    container_state: str
    skip_final_scan: bool
    bytes_per_second: int
    requested_by: str
    reason: str
    plan: str
    def __init__(self, container_id: _Optional[int] = ..., job_id: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[Datanode, _Mapping]]] = ..., container_state: _Optional[str] = ..., skip_final_scan: bool = ..., bytes_per_second: _Optional[int] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ..., plan: _Optional[str] = ...) -> None: ...

class ThrottleCommand(_message.Message):
    __slots__ = ("job_id", "bytes_per_second")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    bytes_per_second: int
    def __init__(self, job_id: _Optional[str] = ..., bytes_per_second: _Optional[int] = ...) -> None: ...

class CancelCommand(_message.Message):
    __slots__ = ("job_id", "container_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    container_id: int
    def __init__(self, job_id: _Optional[str] = ..., container_id: _Optional[int] = ...) -> None: ...

class ScanCommand(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    def __init__(self, container_id: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("command_id", "term", "reconcile", "cancel", "scan", "throttle")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RECONCILE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SCAN_FIELD_NUMBER: _ClassVar[int]
    THROTTLE_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    term: int
    reconcile: ReconcileCommand
    cancel: CancelCommand
    scan: ScanCommand
    throttle: ThrottleCommand
    def __init__(self, command_id: _Optional[str] = ..., term: _Optional[int] = ..., reconcile: _Optional[_Union[ReconcileCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelCommand, _Mapping]] = ..., scan: _Optional[_Union[ScanCommand, _Mapping]] = ..., throttle: _Optional[_Union[ThrottleCommand, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("commands", "full_report_wanted", "term")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    FULL_REPORT_WANTED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    full_report_wanted: bool
    term: int
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., full_report_wanted: bool = ..., term: _Optional[int] = ...) -> None: ...

class ReplicaView(_message.Message):
    __slots__ = ("datanode", "replica", "live", "report_age_s")
    DATANODE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    datanode: Datanode
    replica: ReplicaReport
    live: bool
    report_age_s: float
    def __init__(self, datanode: _Optional[_Union[Datanode, _Mapping]] = ..., replica: _Optional[_Union[ReplicaReport, _Mapping]] = ..., live: bool = ..., report_age_s: _Optional[float] = ...) -> None: ...

class ContainerView(_message.Message):
    __slots__ = ("container_id", "state", "comparison", "replicas", "eligibility", "eligibility_message", "last_verdict", "last_job_id", "comparison_note", "required_nodes", "expected_replicas")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ELIGIBILITY_FIELD_NUMBER: _ClassVar[int]
    ELIGIBILITY_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_VERDICT_FIELD_NUMBER: _ClassVar[int]
    LAST_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_NOTE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_NODES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    state: str
    comparison: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaView]
    eligibility: str
    eligibility_message: str
    last_verdict: str
    last_job_id: str
    comparison_note: str
    required_nodes: int
    expected_replicas: int
    def __init__(self, container_id: _Optional[int] = ..., state: _Optional[str] = ..., comparison: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaView, _Mapping]]] = ..., eligibility: _Optional[str] = ..., eligibility_message: _Optional[str] = ..., last_verdict: _Optional[str] = ..., last_job_id: _Optional[str] = ..., comparison_note: _Optional[str] = ..., required_nodes: _Optional[int] = ..., expected_replicas: _Optional[int] = ...) -> None: ...

class ListContainersRequest(_message.Message):
    __slots__ = ("state", "comparison", "after_container_id", "limit")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    AFTER_CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    state: str
    comparison: str
    after_container_id: int
    limit: int
    def __init__(self, state: _Optional[str] = ..., comparison: _Optional[str] = ..., after_container_id: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListContainersResponse(_message.Message):
    __slots__ = ("containers", "more")
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[ContainerView]
    more: bool
    def __init__(self, containers: _Optional[_Iterable[_Union[ContainerView, _Mapping]]] = ..., more: bool = ...) -> None: ...

class GetContainersRequest(_message.Message):
    __slots__ = ("container_ids",)
    CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    container_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, container_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetContainersResponse(_message.Message):
    __slots__ = ("containers", "unknown_container_ids")
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[ContainerView]
    unknown_container_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, containers: _Optional[_Iterable[_Union[ContainerView, _Mapping]]] = ..., unknown_container_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReconcileRequest(_message.Message):
    __slots__ = ("container_ids", "all_diverged", "dry_run", "reason", "requested_by", "plans")
    CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_DIVERGED_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    container_ids: _containers.RepeatedScalarFieldContainer[int]
    all_diverged: bool
    dry_run: bool
    reason: str
    requested_by: str
    plans: _containers.RepeatedCompositeFieldContainer[PlannedReplica]
    def __init__(self, container_ids: _Optional[_Iterable[int]] = ..., all_diverged: bool = ..., dry_run: bool = ..., reason: _Optional[str] = ..., requested_by: _Optional[str] = ..., plans: _Optional[_Iterable[_Union[PlannedReplica, _Mapping]]] = ...) -> None: ...

class PlannedReplica(_message.Message):
    __slots__ = ("container_id", "datanode_id", "digest", "data_checksum")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    datanode_id: str
    digest: str
    data_checksum: int
    def __init__(self, container_id: _Optional[int] = ..., datanode_id: _Optional[str] = ..., digest: _Optional[str] = ..., data_checksum: _Optional[int] = ...) -> None: ...

class ReconcileOutcome(_message.Message):
    __slots__ = ("container_id", "eligibility", "message", "job_id")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBILITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    eligibility: str
    message: str
    job_id: str
    def __init__(self, container_id: _Optional[int] = ..., eligibility: _Optional[str] = ..., message: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class ReconcileResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[ReconcileOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[ReconcileOutcome, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "container_id", "state", "detail", "created_at_s", "started_at_s", "finished_at_s", "last_progress_at_s", "bytes_done", "bytes_planned", "rate_bytes_per_s", "eta_s", "verdict", "reason", "requested_by", "datanodes", "comparison", "comparison_note", "mean_rate_bytes_per_s", "bytes_per_second", "containers_max", "pause")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_S_FIELD_NUMBER: _ClassVar[int]
    LAST_PROGRESS_AT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PLANNED_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    DATANODES_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_NOTE_FIELD_NUMBER: _ClassVar[int]
    MEAN_RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_MAX_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    container_id: int
    state: str
    detail: str
    created_at_s: float
    started_at_s: float
    finished_at_s: float
    last_progress_at_s: float
    bytes_done: int
    bytes_planned: int
    rate_bytes_per_s: float
    eta_s: float
    verdict: str
    reason: str
    requested_by: str
    datanodes: _containers.RepeatedCompositeFieldContainer[DatanodeProgress]
    comparison: str
    comparison_note: str
    mean_rate_bytes_per_s: float
    bytes_per_second: JobLimit
    containers_max: JobLimit
    pause: JobPause
    def __init__(self, job_id: _Optional[str] = ..., container_id: _Optional[int] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., created_at_s: _Optional[float] = ..., started_at_s: _Optional[float] = ..., finished_at_s: _Optional[float] = ..., last_progress_at_s: _Optional[float] = ..., bytes_done: _Optional[int] = ..., bytes_planned: _Optional[int] = ..., rate_bytes_per_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., requested_by: _Optional[str] = ..., datanodes: _Optional[_Iterable[_Union[DatanodeProgress, _Mapping]]] = ..., comparison: _Optional[str] = ..., comparison_note: _Optional[str] = ..., mean_rate_bytes_per_s: _Optional[float] = ..., bytes_per_second: _Optional[_Union[JobLimit, _Mapping]] = ..., containers_max: _Optional[_Union[JobLimit, _Mapping]] = ..., pause: _Optional[_Union[JobPause, _Mapping]] = ...) -> None: ...

class JobLimit(_message.Message):
    __slots__ = ("value", "set_by", "set_at_s")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    SET_AT_S_FIELD_NUMBER: _ClassVar[int]
    value: int
    set_by: str
    set_at_s: float
    def __init__(self, value: _Optional[int] = ..., set_by: _Optional[str] = ..., set_at_s: _Optional[float] = ...) -> None: ...

class JobPause(_message.Message):
    __slots__ = ("by", "reason", "at_s")
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    by: str
    reason: str
    at_s: float
    def __init__(self, by: _Optional[str] = ..., reason: _Optional[str] = ..., at_s: _Optional[float] = ...) -> None: ...

class DatanodeProgress(_message.Message):
    __slots__ = ("datanode_id", "progress", "round")
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    datanode_id: str
    progress: ReconcileProgress
    round: int
    def __init__(self, datanode_id: _Optional[str] = ..., progress: _Optional[_Union[ReconcileProgress, _Mapping]] = ..., round: _Optional[int] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("state", "limit")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    state: str
    limit: int
    def __init__(self, state: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id", "requested_by")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    requested_by: str
    def __init__(self, job_id: _Optional[str] = ..., requested_by: _Optional[str] = ...) -> None: ...

class PauseJobRequest(_message.Message):
    __slots__ = ("job_id", "reason", "requested_by")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    requested_by: str
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ..., requested_by: _Optional[str] = ...) -> None: ...

class ResumeJobRequest(_message.Message):
    __slots__ = ("job_id", "requested_by")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    requested_by: str
    def __init__(self, job_id: _Optional[str] = ..., requested_by: _Optional[str] = ...) -> None: ...

class ThrottleJobRequest(_message.Message):
    __slots__ = ("job_id", "requested_by", "bytes_per_second", "containers_max")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_MAX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    requested_by: str
    bytes_per_second: int
    containers_max: int
    def __init__(self, job_id: _Optional[str] = ..., requested_by: _Optional[str] = ..., bytes_per_second: _Optional[int] = ..., containers_max: _Optional[int] = ...) -> None: ...

class ListDatanodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatanodeView(_message.Message):
    __slots__ = ("datanode", "live", "heartbeat_age_s", "replicas")
    DATANODE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    datanode: Datanode
    live: bool
    heartbeat_age_s: float
    replicas: int
    def __init__(self, datanode: _Optional[_Union[Datanode, _Mapping]] = ..., live: bool = ..., heartbeat_age_s: _Optional[float] = ..., replicas: _Optional[int] = ...) -> None: ...

class ListDatanodesResponse(_message.Message):
    __slots__ = ("datanodes",)
    DATANODES_FIELD_NUMBER: _ClassVar[int]
    datanodes: _containers.RepeatedCompositeFieldContainer[DatanodeView]
    def __init__(self, datanodes: _Optional[_Iterable[_Union[DatanodeView, _Mapping]]] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("container_ids", "requested_by")
    CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    container_ids: _containers.RepeatedScalarFieldContainer[int]
    requested_by: str
    def __init__(self, container_ids: _Optional[_Iterable[int]] = ..., requested_by: _Optional[str] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("unknown_container_ids", "commands")
    UNKNOWN_CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    unknown_container_ids: _containers.RepeatedScalarFieldContainer[int]
    commands: int
    def __init__(self, unknown_container_ids: _Optional[_Iterable[int]] = ..., commands: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Limit(_message.Message):
    __slots__ = ("name", "value", "set_by", "set_at_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    SET_AT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    set_by: str
    set_at_s: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ..., set_by: _Optional[str] = ..., set_at_s: _Optional[float] = ...) -> None: ...

class JobCount(_message.Message):
    __slots__ = ("state", "count")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    state: str
    count: int
    def __init__(self, state: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("started_age_s", "fault", "containers", "containers_diverged", "containers_unknown", "containers_unscanned", "oldest_root_age_s", "jobs", "limits", "automatic", "roles_enforced", "containers_unserved", "unserved_ids", "scms")
    STARTED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_DIVERGED_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_UNSCANNED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_ROOT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    ROLES_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_UNSERVED_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_IDS_FIELD_NUMBER: _ClassVar[int]
    SCMS_FIELD_NUMBER: _ClassVar[int]
    started_age_s: float
    fault: str
    containers: int
    containers_diverged: int
    containers_unknown: int
    containers_unscanned: int
    oldest_root_age_s: float
    jobs: _containers.RepeatedCompositeFieldContainer[JobCount]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    automatic: bool
    roles_enforced: bool
    containers_unserved: int
    unserved_ids: _containers.RepeatedScalarFieldContainer[int]
    scms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, started_age_s: _Optional[float] = ..., fault: _Optional[str] = ..., containers: _Optional[int] = ..., containers_diverged: _Optional[int] = ..., containers_unknown: _Optional[int] = ..., containers_unscanned: _Optional[int] = ..., oldest_root_age_s: _Optional[float] = ..., jobs: _Optional[_Iterable[_Union[JobCount, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., automatic: bool = ..., roles_enforced: bool = ..., containers_unserved: _Optional[int] = ..., unserved_ids: _Optional[_Iterable[int]] = ..., scms: _Optional[_Iterable[str]] = ...) -> None: ...
