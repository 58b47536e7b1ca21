from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTHY: _ClassVar[NodeState]
    STALE: _ClassVar[NodeState]
    DEAD: _ClassVar[NodeState]
    HEALTHY_READONLY: _ClassVar[NodeState]

class NodeOperationalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_SERVICE: _ClassVar[NodeOperationalState]
    ENTERING_MAINTENANCE: _ClassVar[NodeOperationalState]
    IN_MAINTENANCE: _ClassVar[NodeOperationalState]
    DECOMMISSIONING: _ClassVar[NodeOperationalState]
    DECOMMISSIONED: _ClassVar[NodeOperationalState]

class QueryScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLUSTER: _ClassVar[QueryScope]
    POOL: _ClassVar[QueryScope]

class LifeCycleState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN: _ClassVar[LifeCycleState]
    CLOSING: _ClassVar[LifeCycleState]
    QUASI_CLOSED: _ClassVar[LifeCycleState]
    CLOSED: _ClassVar[LifeCycleState]
    DELETING: _ClassVar[LifeCycleState]
    DELETED: _ClassVar[LifeCycleState]
    RECOVERING: _ClassVar[LifeCycleState]

class ReplicationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RATIS: _ClassVar[ReplicationType]
    STAND_ALONE: _ClassVar[ReplicationType]
    CHAINED: _ClassVar[ReplicationType]
    EC: _ClassVar[ReplicationType]
    NONE: _ClassVar[ReplicationType]

class ReplicationFactor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ZERO: _ClassVar[ReplicationFactor]
    ONE: _ClassVar[ReplicationFactor]
    THREE: _ClassVar[ReplicationFactor]

class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GetContainer: _ClassVar[Type]
    ListContainer: _ClassVar[Type]
    QueryNode: _ClassVar[Type]
    GetScmInfo: _ClassVar[Type]
    InSafeMode: _ClassVar[Type]
    GetContainerCount: _ClassVar[Type]
    GetContainerReplicas: _ClassVar[Type]
    ReconcileContainer: _ClassVar[Type]
HEALTHY: NodeState
STALE: NodeState
DEAD: NodeState
HEALTHY_READONLY: NodeState
IN_SERVICE: NodeOperationalState
ENTERING_MAINTENANCE: NodeOperationalState
IN_MAINTENANCE: NodeOperationalState
DECOMMISSIONING: NodeOperationalState
DECOMMISSIONED: NodeOperationalState
CLUSTER: QueryScope
POOL: QueryScope
OPEN: LifeCycleState
CLOSING: LifeCycleState
QUASI_CLOSED: LifeCycleState
CLOSED: LifeCycleState
DELETING: LifeCycleState
DELETED: LifeCycleState
RECOVERING: LifeCycleState
RATIS: ReplicationType
STAND_ALONE: ReplicationType
CHAINED: ReplicationType
EC: ReplicationType
NONE: ReplicationType
ZERO: ReplicationFactor
ONE: ReplicationFactor
THREE: ReplicationFactor
GetContainer: Type
ListContainer: Type
QueryNode: Type
GetScmInfo: Type
InSafeMode: Type
GetContainerCount: Type
GetContainerReplicas: Type
ReconcileContainer: Type

class Port(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class DatanodeDetailsProto(_message.Message):
    __slots__ = ("uuid", "ipAddress", "hostName", "ports", "currentVersion")
    UUID_FIELD_NUMBER: _ClassVar[int]
    IPADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    CURRENTVERSION_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    ipAddress: str
    hostName: str
    ports: _containers.RepeatedCompositeFieldContainer[Port]
    currentVersion: int
    def __init__(self, uuid: _Optional[str] = ..., ipAddress: _Optional[str] = ..., hostName: _Optional[str] = ..., ports: _Optional[_Iterable[_Union[Port, _Mapping]]] = ..., currentVersion: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("nodeID", "nodeStates", "nodeOperationalStates")
    NODEID_FIELD_NUMBER: _ClassVar[int]
    NODESTATES_FIELD_NUMBER: _ClassVar[int]
    NODEOPERATIONALSTATES_FIELD_NUMBER: _ClassVar[int]
    nodeID: DatanodeDetailsProto
    nodeStates: _containers.RepeatedScalarFieldContainer[NodeState]
    nodeOperationalStates: _containers.RepeatedScalarFieldContainer[NodeOperationalState]
    def __init__(self, nodeID: _Optional[_Union[DatanodeDetailsProto, _Mapping]] = ..., nodeStates: _Optional[_Iterable[_Union[NodeState, str]]] = ..., nodeOperationalStates: _Optional[_Iterable[_Union[NodeOperationalState, str]]] = ...) -> None: ...

class ECReplicationConfig(_message.Message):
    __slots__ = ("data", "parity", "codec", "ecChunkSize")
    DATA_FIELD_NUMBER: _ClassVar[int]
    PARITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ECCHUNKSIZE_FIELD_NUMBER: _ClassVar[int]
    data: int
    parity: int
    codec: str
    ecChunkSize: int
    def __init__(self, data: _Optional[int] = ..., parity: _Optional[int] = ..., codec: _Optional[str] = ..., ecChunkSize: _Optional[int] = ...) -> None: ...

class ContainerInfoProto(_message.Message):
    __slots__ = ("containerID", "state", "usedBytes", "numberOfKeys", "owner", "sequenceId", "replicationFactor", "replicationType", "ecReplicationConfig")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USEDBYTES_FIELD_NUMBER: _ClassVar[int]
    NUMBEROFKEYS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCEID_FIELD_NUMBER: _ClassVar[int]
    REPLICATIONFACTOR_FIELD_NUMBER: _ClassVar[int]
    REPLICATIONTYPE_FIELD_NUMBER: _ClassVar[int]
    ECREPLICATIONCONFIG_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    state: LifeCycleState
    usedBytes: int
    numberOfKeys: int
    owner: str
    sequenceId: int
    replicationFactor: ReplicationFactor
    replicationType: ReplicationType
    ecReplicationConfig: ECReplicationConfig
    def __init__(self, containerID: _Optional[int] = ..., state: _Optional[_Union[LifeCycleState, str]] = ..., usedBytes: _Optional[int] = ..., numberOfKeys: _Optional[int] = ..., owner: _Optional[str] = ..., sequenceId: _Optional[int] = ..., replicationFactor: _Optional[_Union[ReplicationFactor, str]] = ..., replicationType: _Optional[_Union[ReplicationType, str]] = ..., ecReplicationConfig: _Optional[_Union[ECReplicationConfig, _Mapping]] = ...) -> None: ...

class SCMContainerReplicaProto(_message.Message):
    __slots__ = ("containerID", "state", "datanodeDetails", "placeOfBirth", "sequenceID", "keyCount", "bytesUsed", "replicaIndex", "dataChecksum")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATANODEDETAILS_FIELD_NUMBER: _ClassVar[int]
    PLACEOFBIRTH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCEID_FIELD_NUMBER: _ClassVar[int]
    KEYCOUNT_FIELD_NUMBER: _ClassVar[int]
    BYTESUSED_FIELD_NUMBER: _ClassVar[int]
    REPLICAINDEX_FIELD_NUMBER: _ClassVar[int]
    DATACHECKSUM_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    state: str
    datanodeDetails: DatanodeDetailsProto
    placeOfBirth: str
    sequenceID: int
    keyCount: int
    bytesUsed: int
    replicaIndex: int
    dataChecksum: int
    def __init__(self, containerID: _Optional[int] = ..., state: _Optional[str] = ..., datanodeDetails: _Optional[_Union[DatanodeDetailsProto, _Mapping]] = ..., placeOfBirth: _Optional[str] = ..., sequenceID: _Optional[int] = ..., keyCount: _Optional[int] = ..., bytesUsed: _Optional[int] = ..., replicaIndex: _Optional[int] = ..., dataChecksum: _Optional[int] = ...) -> None: ...

class GetContainerRequestProto(_message.Message):
    __slots__ = ("containerID",)
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    def __init__(self, containerID: _Optional[int] = ...) -> None: ...

class GetContainerResponseProto(_message.Message):
    __slots__ = ("containerInfo",)
    CONTAINERINFO_FIELD_NUMBER: _ClassVar[int]
    containerInfo: ContainerInfoProto
    def __init__(self, containerInfo: _Optional[_Union[ContainerInfoProto, _Mapping]] = ...) -> None: ...

class SCMListContainerRequestProto(_message.Message):
    __slots__ = ("count", "startContainerID")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STARTCONTAINERID_FIELD_NUMBER: _ClassVar[int]
    count: int
    startContainerID: int
    def __init__(self, count: _Optional[int] = ..., startContainerID: _Optional[int] = ...) -> None: ...

class SCMListContainerResponseProto(_message.Message):
    __slots__ = ("containers",)
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[ContainerInfoProto]
    def __init__(self, containers: _Optional[_Iterable[_Union[ContainerInfoProto, _Mapping]]] = ...) -> None: ...

class NodeQueryRequestProto(_message.Message):
    __slots__ = ("scope",)
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: QueryScope
    def __init__(self, scope: _Optional[_Union[QueryScope, str]] = ...) -> None: ...

class NodeQueryResponseProto(_message.Message):
    __slots__ = ("datanodes",)
    DATANODES_FIELD_NUMBER: _ClassVar[int]
    datanodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, datanodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class GetScmInfoRequestProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScmInfoResponseProto(_message.Message):
    __slots__ = ("clusterId", "scmId", "peerRoles")
    CLUSTERID_FIELD_NUMBER: _ClassVar[int]
    SCMID_FIELD_NUMBER: _ClassVar[int]
    PEERROLES_FIELD_NUMBER: _ClassVar[int]
    clusterId: str
    scmId: str
    peerRoles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, clusterId: _Optional[str] = ..., scmId: _Optional[str] = ..., peerRoles: _Optional[_Iterable[str]] = ...) -> None: ...

class InSafeModeRequestProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InSafeModeResponseProto(_message.Message):
    __slots__ = ("inSafeMode",)
    INSAFEMODE_FIELD_NUMBER: _ClassVar[int]
    inSafeMode: bool
    def __init__(self, inSafeMode: bool = ...) -> None: ...

class GetContainerCountRequestProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetContainerCountResponseProto(_message.Message):
    __slots__ = ("containerCount",)
    CONTAINERCOUNT_FIELD_NUMBER: _ClassVar[int]
    containerCount: int
    def __init__(self, containerCount: _Optional[int] = ...) -> None: ...

class GetContainerReplicasRequestProto(_message.Message):
    __slots__ = ("containerID",)
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    def __init__(self, containerID: _Optional[int] = ...) -> None: ...

class GetContainerReplicasResponseProto(_message.Message):
    __slots__ = ("containerReplica",)
    CONTAINERREPLICA_FIELD_NUMBER: _ClassVar[int]
    containerReplica: _containers.RepeatedCompositeFieldContainer[SCMContainerReplicaProto]
    def __init__(self, containerReplica: _Optional[_Iterable[_Union[SCMContainerReplicaProto, _Mapping]]] = ...) -> None: ...

class ReconcileContainerRequestProto(_message.Message):
    __slots__ = ("containerID",)
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    def __init__(self, containerID: _Optional[int] = ...) -> None: ...

class ReconcileContainerResponseProto(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScmContainerLocationRequest(_message.Message):
    __slots__ = ("cmdType", "traceID", "version", "getContainerRequest", "scmListContainerRequest", "nodeQueryRequest", "getScmInfoRequest", "inSafeModeRequest", "getContainerCountRequest", "getContainerReplicasRequest", "reconcileContainerRequest")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    TRACEID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERREQUEST_FIELD_NUMBER: _ClassVar[int]
    SCMLISTCONTAINERREQUEST_FIELD_NUMBER: _ClassVar[int]
    NODEQUERYREQUEST_FIELD_NUMBER: _ClassVar[int]
    GETSCMINFOREQUEST_FIELD_NUMBER: _ClassVar[int]
    INSAFEMODEREQUEST_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERCOUNTREQUEST_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERREPLICASREQUEST_FIELD_NUMBER: _ClassVar[int]
    RECONCILECONTAINERREQUEST_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    traceID: str
    version: int
    getContainerRequest: GetContainerRequestProto
    scmListContainerRequest: SCMListContainerRequestProto
    nodeQueryRequest: NodeQueryRequestProto
    getScmInfoRequest: GetScmInfoRequestProto
    inSafeModeRequest: InSafeModeRequestProto
    getContainerCountRequest: GetContainerCountRequestProto
    getContainerReplicasRequest: GetContainerReplicasRequestProto
    reconcileContainerRequest: ReconcileContainerRequestProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., traceID: _Optional[str] = ..., version: _Optional[int] = ..., getContainerRequest: _Optional[_Union[GetContainerRequestProto, _Mapping]] = ..., scmListContainerRequest: _Optional[_Union[SCMListContainerRequestProto, _Mapping]] = ..., nodeQueryRequest: _Optional[_Union[NodeQueryRequestProto, _Mapping]] = ..., getScmInfoRequest: _Optional[_Union[GetScmInfoRequestProto, _Mapping]] = ..., inSafeModeRequest: _Optional[_Union[InSafeModeRequestProto, _Mapping]] = ..., getContainerCountRequest: _Optional[_Union[GetContainerCountRequestProto, _Mapping]] = ..., getContainerReplicasRequest: _Optional[_Union[GetContainerReplicasRequestProto, _Mapping]] = ..., reconcileContainerRequest: _Optional[_Union[ReconcileContainerRequestProto, _Mapping]] = ...) -> None: ...

class ScmContainerLocationResponse(_message.Message):
    __slots__ = ("cmdType", "traceID", "success", "message", "status", "getContainerResponse", "scmListContainerResponse", "nodeQueryResponse", "getScmInfoResponse", "inSafeModeResponse", "getContainerCountResponse", "getContainerReplicasResponse", "reconcileContainerResponse")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OK: _ClassVar[ScmContainerLocationResponse.Status]
        CONTAINER_ALREADY_EXISTS: _ClassVar[ScmContainerLocationResponse.Status]
        CONTAINER_IS_MISSING: _ClassVar[ScmContainerLocationResponse.Status]
    OK: ScmContainerLocationResponse.Status
    CONTAINER_ALREADY_EXISTS: ScmContainerLocationResponse.Status
    CONTAINER_IS_MISSING: ScmContainerLocationResponse.Status
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    TRACEID_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SCMLISTCONTAINERRESPONSE_FIELD_NUMBER: _ClassVar[int]
    NODEQUERYRESPONSE_FIELD_NUMBER: _ClassVar[int]
    GETSCMINFORESPONSE_FIELD_NUMBER: _ClassVar[int]
    INSAFEMODERESPONSE_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERCOUNTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERREPLICASRESPONSE_FIELD_NUMBER: _ClassVar[int]
    RECONCILECONTAINERRESPONSE_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    traceID: str
    success: bool
    message: str
    status: ScmContainerLocationResponse.Status
    getContainerResponse: GetContainerResponseProto
    scmListContainerResponse: SCMListContainerResponseProto
    nodeQueryResponse: NodeQueryResponseProto
    getScmInfoResponse: GetScmInfoResponseProto
    inSafeModeResponse: InSafeModeResponseProto
    getContainerCountResponse: GetContainerCountResponseProto
    getContainerReplicasResponse: GetContainerReplicasResponseProto
    reconcileContainerResponse: ReconcileContainerResponseProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., traceID: _Optional[str] = ..., success: bool = ..., message: _Optional[str] = ..., status: _Optional[_Union[ScmContainerLocationResponse.Status, str]] = ..., getContainerResponse: _Optional[_Union[GetContainerResponseProto, _Mapping]] = ..., scmListContainerResponse: _Optional[_Union[SCMListContainerResponseProto, _Mapping]] = ..., nodeQueryResponse: _Optional[_Union[NodeQueryResponseProto, _Mapping]] = ..., getScmInfoResponse: _Optional[_Union[GetScmInfoResponseProto, _Mapping]] = ..., inSafeModeResponse: _Optional[_Union[InSafeModeResponseProto, _Mapping]] = ..., getContainerCountResponse: _Optional[_Union[GetContainerCountResponseProto, _Mapping]] = ..., getContainerReplicasResponse: _Optional[_Union[GetContainerReplicasResponseProto, _Mapping]] = ..., reconcileContainerResponse: _Optional[_Union[ReconcileContainerResponseProto, _Mapping]] = ...) -> None: ...
