from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetContainerHashesRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    def __init__(self, container_id: _Optional[int] = ...) -> None: ...

class GetContainerHashesResponse(_message.Message):
    __slots__ = ("container_checksum_info",)
    CONTAINER_CHECKSUM_INFO_FIELD_NUMBER: _ClassVar[int]
    container_checksum_info: bytes
    def __init__(self, container_checksum_info: _Optional[bytes] = ...) -> None: ...

class GetContainerHashPagesRequest(_message.Message):
    __slots__ = ("container_id", "first_block_id", "last_block_id", "page_blocks_max")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    first_block_id: int
    last_block_id: int
    page_blocks_max: int
    def __init__(self, container_id: _Optional[int] = ..., first_block_id: _Optional[int] = ..., last_block_id: _Optional[int] = ..., page_blocks_max: _Optional[int] = ...) -> None: ...

class ContainerHashPage(_message.Message):
    __slots__ = ("container_id", "data_checksum", "blocks", "fingerprint")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    data_checksum: int
    blocks: bytes
    fingerprint: bytes
    def __init__(self, container_id: _Optional[int] = ..., data_checksum: _Optional[int] = ..., blocks: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class GetBlockRecordsRequest(_message.Message):
    __slots__ = ("container_id", "block_ids")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, container_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetBlockRecordsResponse(_message.Message):
    __slots__ = ("block_data",)
    BLOCK_DATA_FIELD_NUMBER: _ClassVar[int]
    block_data: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_data: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("offset", "length_bytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length_bytes: int
    def __init__(self, offset: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class ReadWindowsRequest(_message.Message):
    __slots__ = ("container_id", "block_id", "ranges")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    block_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    def __init__(self, container_id: _Optional[int] = ..., block_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ...) -> None: ...

class WindowPiece(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ScanContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    def __init__(self, container_id: _Optional[int] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("type", "block_id", "offset")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    type: str
    block_id: int
    offset: int
    def __init__(self, type: _Optional[str] = ..., block_id: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ScanContainerResponse(_message.Message):
    __slots__ = ("container_id", "state", "data_checksum", "bytes_read", "findings")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    state: str
    data_checksum: int
    bytes_read: int
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, container_id: _Optional[int] = ..., state: _Optional[str] = ..., data_checksum: _Optional[int] = ..., bytes_read: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VolumeStatus(_message.Message):
    __slots__ = ("path", "storage_id", "hold", "containers", "bytes_scanned", "containers_scanned", "last_error", "scan_bytes_per_second", "full_scan_age_s", "never_scanned")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SCANNED_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_SCANNED_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    SCAN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FULL_SCAN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NEVER_SCANNED_FIELD_NUMBER: _ClassVar[int]
    path: str
    storage_id: str
    hold: str
    containers: int
    bytes_scanned: int
    containers_scanned: int
    last_error: str
    scan_bytes_per_second: float
    full_scan_age_s: float
    never_scanned: int
    def __init__(self, path: _Optional[str] = ..., storage_id: _Optional[str] = ..., hold: _Optional[str] = ..., containers: _Optional[int] = ..., bytes_scanned: _Optional[int] = ..., containers_scanned: _Optional[int] = ..., last_error: _Optional[str] = ..., scan_bytes_per_second: _Optional[float] = ..., full_scan_age_s: _Optional[float] = ..., never_scanned: _Optional[int] = ...) -> None: ...

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

class ReconciliationStatus(_message.Message):
    __slots__ = ("job_id", "container_id", "phase", "windows_written", "bytes_fetched")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    container_id: int
    phase: str
    windows_written: int
    bytes_fetched: int
    def __init__(self, job_id: _Optional[str] = ..., container_id: _Optional[int] = ..., phase: _Optional[str] = ..., windows_written: _Optional[int] = ..., bytes_fetched: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("datanode_id", "repair_enabled", "volumes", "reconciliations", "limits", "repair_bytes_per_second", "fault", "roles_enforced")
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    REPAIR_ENABLED_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    RECONCILIATIONS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ROLES_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    datanode_id: str
    repair_enabled: bool
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeStatus]
    reconciliations: _containers.RepeatedCompositeFieldContainer[ReconciliationStatus]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    repair_bytes_per_second: float
    fault: str
    roles_enforced: bool
    def __init__(self, datanode_id: _Optional[str] = ..., repair_enabled: bool = ..., volumes: _Optional[_Iterable[_Union[VolumeStatus, _Mapping]]] = ..., reconciliations: _Optional[_Iterable[_Union[ReconciliationStatus, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., repair_bytes_per_second: _Optional[float] = ..., fault: _Optional[str] = ..., roles_enforced: bool = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("datanode_id", "address")
    DATANODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    datanode_id: str
    address: str
    def __init__(self, datanode_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PlanRepairRequest(_message.Message):
    __slots__ = ("container_id", "peers")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    peers: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, container_id: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class PlanRepairResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    def __init__(self, plan: _Optional[bytes] = ...) -> None: ...

class UndoJobRequest(_message.Message):
    __slots__ = ("container_id", "job_id", "peers", "digest", "requested_by", "reason")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    container_id: int
    job_id: str
    peers: _containers.RepeatedCompositeFieldContainer[Holder]
    digest: str
    requested_by: str
    reason: str
    def __init__(self, container_id: _Optional[int] = ..., job_id: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., digest: _Optional[str] = ..., requested_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UndoJobResponse(_message.Message):
    __slots__ = ("plan", "undo_id", "state", "data_checksum")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    UNDO_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    undo_id: str
    state: str
    data_checksum: int
    def __init__(self, plan: _Optional[bytes] = ..., undo_id: _Optional[str] = ..., state: _Optional[str] = ..., data_checksum: _Optional[int] = ...) -> None: ...
