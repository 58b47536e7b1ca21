from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeOperationalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_SERVICE: _ClassVar[NodeOperationalState]
    DECOMMISSIONED: _ClassVar[NodeOperationalState]

class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GetVersion: _ClassVar[Type]
    Register: _ClassVar[Type]
    SendHeartbeat: _ClassVar[Type]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Status]
    ERROR: _ClassVar[Status]
IN_SERVICE: NodeOperationalState
DECOMMISSIONED: NodeOperationalState
GetVersion: Type
Register: Type
SendHeartbeat: Type
OK: Status
ERROR: Status

class Port(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class DatanodeDetailsProto(_message.Message):
    __slots__ = ("uuid", "ipAddress", "hostName", "ports", "persistedOpState", "persistedOpStateExpiry", "currentVersion")
    UUID_FIELD_NUMBER: _ClassVar[int]
    IPADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PERSISTEDOPSTATE_FIELD_NUMBER: _ClassVar[int]
    PERSISTEDOPSTATEEXPIRY_FIELD_NUMBER: _ClassVar[int]
    CURRENTVERSION_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    ipAddress: str
    hostName: str
    ports: _containers.RepeatedCompositeFieldContainer[Port]
    persistedOpState: NodeOperationalState
    persistedOpStateExpiry: int
    currentVersion: int
    def __init__(self, uuid: _Optional[str] = ..., ipAddress: _Optional[str] = ..., hostName: _Optional[str] = ..., ports: _Optional[_Iterable[_Union[Port, _Mapping]]] = ..., persistedOpState: _Optional[_Union[NodeOperationalState, str]] = ..., persistedOpStateExpiry: _Optional[int] = ..., currentVersion: _Optional[int] = ...) -> None: ...

class ExtendedDatanodeDetailsProto(_message.Message):
    __slots__ = ("datanodeDetails",)
    DATANODEDETAILS_FIELD_NUMBER: _ClassVar[int]
    datanodeDetails: DatanodeDetailsProto
    def __init__(self, datanodeDetails: _Optional[_Union[DatanodeDetailsProto, _Mapping]] = ...) -> None: ...

class LayoutVersionProto(_message.Message):
    __slots__ = ("metadataLayoutVersion", "softwareLayoutVersion")
    METADATALAYOUTVERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARELAYOUTVERSION_FIELD_NUMBER: _ClassVar[int]
    metadataLayoutVersion: int
    softwareLayoutVersion: int
    def __init__(self, metadataLayoutVersion: _Optional[int] = ..., softwareLayoutVersion: _Optional[int] = ...) -> None: ...

class StorageReportProto(_message.Message):
    __slots__ = ("storageUuid", "storageLocation", "capacity", "scmUsed", "remaining")
    STORAGEUUID_FIELD_NUMBER: _ClassVar[int]
    STORAGELOCATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    SCMUSED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    storageUuid: str
    storageLocation: str
    capacity: int
    scmUsed: int
    remaining: int
    def __init__(self, storageUuid: _Optional[str] = ..., storageLocation: _Optional[str] = ..., capacity: _Optional[int] = ..., scmUsed: _Optional[int] = ..., remaining: _Optional[int] = ...) -> None: ...

class NodeReportProto(_message.Message):
    __slots__ = ("storageReport",)
    STORAGEREPORT_FIELD_NUMBER: _ClassVar[int]
    storageReport: _containers.RepeatedCompositeFieldContainer[StorageReportProto]
    def __init__(self, storageReport: _Optional[_Iterable[_Union[StorageReportProto, _Mapping]]] = ...) -> None: ...

class ContainerReplicaProto(_message.Message):
    __slots__ = ("containerID", "state", "size", "used", "keyCount", "readCount", "writeCount", "readBytes", "writeBytes", "deleteTransactionId", "blockCommitSequenceId", "originNodeId", "replicaIndex", "isEmpty", "dataChecksum")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OPEN: _ClassVar[ContainerReplicaProto.State]
        CLOSING: _ClassVar[ContainerReplicaProto.State]
        QUASI_CLOSED: _ClassVar[ContainerReplicaProto.State]
        CLOSED: _ClassVar[ContainerReplicaProto.State]
        UNHEALTHY: _ClassVar[ContainerReplicaProto.State]
        INVALID: _ClassVar[ContainerReplicaProto.State]
        DELETED: _ClassVar[ContainerReplicaProto.State]
    OPEN: ContainerReplicaProto.State
    CLOSING: ContainerReplicaProto.State
    QUASI_CLOSED: ContainerReplicaProto.State
    CLOSED: ContainerReplicaProto.State
    UNHEALTHY: ContainerReplicaProto.State
    INVALID: ContainerReplicaProto.State
    DELETED: ContainerReplicaProto.State
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    KEYCOUNT_FIELD_NUMBER: _ClassVar[int]
    READCOUNT_FIELD_NUMBER: _ClassVar[int]
    WRITECOUNT_FIELD_NUMBER: _ClassVar[int]
    READBYTES_FIELD_NUMBER: _ClassVar[int]
    WRITEBYTES_FIELD_NUMBER: _ClassVar[int]
    DELETETRANSACTIONID_FIELD_NUMBER: _ClassVar[int]
    BLOCKCOMMITSEQUENCEID_FIELD_NUMBER: _ClassVar[int]
    ORIGINNODEID_FIELD_NUMBER: _ClassVar[int]
    REPLICAINDEX_FIELD_NUMBER: _ClassVar[int]
    ISEMPTY_FIELD_NUMBER: _ClassVar[int]
    DATACHECKSUM_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    state: ContainerReplicaProto.State
    size: int
    used: int
    keyCount: int
    readCount: int
    writeCount: int
    readBytes: int
    writeBytes: int
    deleteTransactionId: int
    blockCommitSequenceId: int
    originNodeId: str
    replicaIndex: int
    isEmpty: bool
    dataChecksum: int
    def __init__(self, containerID: _Optional[int] = ..., state: _Optional[_Union[ContainerReplicaProto.State, str]] = ..., size: _Optional[int] = ..., used: _Optional[int] = ..., keyCount: _Optional[int] = ..., readCount: _Optional[int] = ..., writeCount: _Optional[int] = ..., readBytes: _Optional[int] = ..., writeBytes: _Optional[int] = ..., deleteTransactionId: _Optional[int] = ..., blockCommitSequenceId: _Optional[int] = ..., originNodeId: _Optional[str] = ..., replicaIndex: _Optional[int] = ..., isEmpty: bool = ..., dataChecksum: _Optional[int] = ...) -> None: ...

class ContainerReportsProto(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ContainerReplicaProto]
    def __init__(self, reports: _Optional[_Iterable[_Union[ContainerReplicaProto, _Mapping]]] = ...) -> None: ...

class PipelineReportsProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommandQueueReportProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SCMRegisterRequestProto(_message.Message):
    __slots__ = ("extendedDatanodeDetails", "nodeReport", "containerReport", "pipelineReports", "dataNodeLayoutVersion")
    EXTENDEDDATANODEDETAILS_FIELD_NUMBER: _ClassVar[int]
    NODEREPORT_FIELD_NUMBER: _ClassVar[int]
    CONTAINERREPORT_FIELD_NUMBER: _ClassVar[int]
    PIPELINEREPORTS_FIELD_NUMBER: _ClassVar[int]
    DATANODELAYOUTVERSION_FIELD_NUMBER: _ClassVar[int]
    extendedDatanodeDetails: ExtendedDatanodeDetailsProto
    nodeReport: NodeReportProto
    containerReport: ContainerReportsProto
    pipelineReports: PipelineReportsProto
    dataNodeLayoutVersion: LayoutVersionProto
    def __init__(self, extendedDatanodeDetails: _Optional[_Union[ExtendedDatanodeDetailsProto, _Mapping]] = ..., nodeReport: _Optional[_Union[NodeReportProto, _Mapping]] = ..., containerReport: _Optional[_Union[ContainerReportsProto, _Mapping]] = ..., pipelineReports: _Optional[_Union[PipelineReportsProto, _Mapping]] = ..., dataNodeLayoutVersion: _Optional[_Union[LayoutVersionProto, _Mapping]] = ...) -> None: ...

class SCMRegisteredResponseProto(_message.Message):
    __slots__ = ("errorCode", "datanodeUUID", "clusterID")
    class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        success: _ClassVar[SCMRegisteredResponseProto.ErrorCode]
        errorNodeNotPermitted: _ClassVar[SCMRegisteredResponseProto.ErrorCode]
    success: SCMRegisteredResponseProto.ErrorCode
    errorNodeNotPermitted: SCMRegisteredResponseProto.ErrorCode
    ERRORCODE_FIELD_NUMBER: _ClassVar[int]
    DATANODEUUID_FIELD_NUMBER: _ClassVar[int]
    CLUSTERID_FIELD_NUMBER: _ClassVar[int]
    errorCode: SCMRegisteredResponseProto.ErrorCode
    datanodeUUID: str
    clusterID: str
    def __init__(self, errorCode: _Optional[_Union[SCMRegisteredResponseProto.ErrorCode, str]] = ..., datanodeUUID: _Optional[str] = ..., clusterID: _Optional[str] = ...) -> None: ...

class SCMHeartbeatRequestProto(_message.Message):
    __slots__ = ("datanodeDetails", "nodeReport", "containerReport", "dataNodeLayoutVersion", "commandQueueReport")
    DATANODEDETAILS_FIELD_NUMBER: _ClassVar[int]
    NODEREPORT_FIELD_NUMBER: _ClassVar[int]
    CONTAINERREPORT_FIELD_NUMBER: _ClassVar[int]
    DATANODELAYOUTVERSION_FIELD_NUMBER: _ClassVar[int]
    COMMANDQUEUEREPORT_FIELD_NUMBER: _ClassVar[int]
    datanodeDetails: DatanodeDetailsProto
    nodeReport: NodeReportProto
    containerReport: ContainerReportsProto
    dataNodeLayoutVersion: LayoutVersionProto
    commandQueueReport: CommandQueueReportProto
    def __init__(self, datanodeDetails: _Optional[_Union[DatanodeDetailsProto, _Mapping]] = ..., nodeReport: _Optional[_Union[NodeReportProto, _Mapping]] = ..., containerReport: _Optional[_Union[ContainerReportsProto, _Mapping]] = ..., dataNodeLayoutVersion: _Optional[_Union[LayoutVersionProto, _Mapping]] = ..., commandQueueReport: _Optional[_Union[CommandQueueReportProto, _Mapping]] = ...) -> None: ...

class SCMCommandProto(_message.Message):
    __slots__ = ("commandType",)
    COMMANDTYPE_FIELD_NUMBER: _ClassVar[int]
    commandType: int
    def __init__(self, commandType: _Optional[int] = ...) -> None: ...

class SCMHeartbeatResponseProto(_message.Message):
    __slots__ = ("datanodeUUID", "commands")
    DATANODEUUID_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    datanodeUUID: str
    commands: _containers.RepeatedCompositeFieldContainer[SCMCommandProto]
    def __init__(self, datanodeUUID: _Optional[str] = ..., commands: _Optional[_Iterable[_Union[SCMCommandProto, _Mapping]]] = ...) -> None: ...

class SCMDatanodeRequest(_message.Message):
    __slots__ = ("cmdType", "registerRequest", "sendHeartbeatRequest")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    REGISTERREQUEST_FIELD_NUMBER: _ClassVar[int]
    SENDHEARTBEATREQUEST_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    registerRequest: SCMRegisterRequestProto
    sendHeartbeatRequest: SCMHeartbeatRequestProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., registerRequest: _Optional[_Union[SCMRegisterRequestProto, _Mapping]] = ..., sendHeartbeatRequest: _Optional[_Union[SCMHeartbeatRequestProto, _Mapping]] = ...) -> None: ...

class SCMDatanodeResponse(_message.Message):
    __slots__ = ("cmdType", "success", "message", "status", "registerResponse", "sendHeartbeatResponse")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REGISTERRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SENDHEARTBEATRESPONSE_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    success: bool
    message: str
    status: Status
    registerResponse: SCMRegisteredResponseProto
    sendHeartbeatResponse: SCMHeartbeatResponseProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., success: bool = ..., message: _Optional[str] = ..., status: _Optional[_Union[Status, str]] = ..., registerResponse: _Optional[_Union[SCMRegisteredResponseProto, _Mapping]] = ..., sendHeartbeatResponse: _Optional[_Union[SCMHeartbeatResponseProto, _Mapping]] = ...) -> None: ...
