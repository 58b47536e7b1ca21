from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CreateVolume: _ClassVar[Type]
    InfoVolume: _ClassVar[Type]
    CreateBucket: _ClassVar[Type]
    InfoBucket: _ClassVar[Type]
    RenameKey: _ClassVar[Type]
    ListKeys: _ClassVar[Type]
    DeleteKeys: _ClassVar[Type]
    ServiceList: _ClassVar[Type]
    DBUpdates: _ClassVar[Type]
    ListStatus: _ClassVar[Type]
    SetAcl: _ClassVar[Type]
    GetS3VolumeContext: _ClassVar[Type]
    GetKeyInfo: _ClassVar[Type]
    CreateSnapshot: _ClassVar[Type]
    ListSnapshot: _ClassVar[Type]
    SnapshotDiff: _ClassVar[Type]
    DeleteSnapshot: _ClassVar[Type]
    GetSnapshotInfo: _ClassVar[Type]
    PutObjectTagging: _ClassVar[Type]
    SubmitSnapshotDiff: _ClassVar[Type]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Status]
    VOLUME_NOT_UNIQUE: _ClassVar[Status]
    VOLUME_NOT_FOUND: _ClassVar[Status]
    VOLUME_NOT_EMPTY: _ClassVar[Status]
    VOLUME_ALREADY_EXISTS: _ClassVar[Status]
    USER_NOT_FOUND: _ClassVar[Status]
    USER_TOO_MANY_VOLUMES: _ClassVar[Status]
    BUCKET_NOT_FOUND: _ClassVar[Status]
    BUCKET_NOT_EMPTY: _ClassVar[Status]
    BUCKET_ALREADY_EXISTS: _ClassVar[Status]
    KEY_ALREADY_EXISTS: _ClassVar[Status]
    KEY_NOT_FOUND: _ClassVar[Status]
    INVALID_KEY_NAME: _ClassVar[Status]
    ACCESS_DENIED: _ClassVar[Status]
    INTERNAL_ERROR: _ClassVar[Status]
    KEY_ALLOCATION_ERROR: _ClassVar[Status]
    KEY_DELETION_ERROR: _ClassVar[Status]
    KEY_RENAME_ERROR: _ClassVar[Status]
    METADATA_ERROR: _ClassVar[Status]
    OM_NOT_INITIALIZED: _ClassVar[Status]
    SCM_VERSION_MISMATCH_ERROR: _ClassVar[Status]
    INITIATE_MULTIPART_UPLOAD_ERROR: _ClassVar[Status]
    MULTIPART_UPLOAD_PARTFILE_ERROR: _ClassVar[Status]
    NO_SUCH_MULTIPART_UPLOAD_ERROR: _ClassVar[Status]
    MISMATCH_MULTIPART_LIST: _ClassVar[Status]
    MISSING_UPLOAD_PARTS: _ClassVar[Status]
    COMPLETE_MULTIPART_UPLOAD_ERROR: _ClassVar[Status]
    ENTITY_TOO_SMALL: _ClassVar[Status]
    ABORT_MULTIPART_UPLOAD_FAILED: _ClassVar[Status]
    S3_SECRET_NOT_FOUND: _ClassVar[Status]
    INVALID_AUTH_METHOD: _ClassVar[Status]
    INVALID_TOKEN: _ClassVar[Status]
    TOKEN_EXPIRED: _ClassVar[Status]
    TOKEN_ERROR_OTHER: _ClassVar[Status]
    LIST_MULTIPART_UPLOAD_PARTS_FAILED: _ClassVar[Status]
    SCM_IN_SAFE_MODE: _ClassVar[Status]
    INVALID_REQUEST: _ClassVar[Status]
    BUCKET_ENCRYPTION_KEY_NOT_FOUND: _ClassVar[Status]
    UNKNOWN_CIPHER_SUITE: _ClassVar[Status]
    INVALID_KMS_PROVIDER: _ClassVar[Status]
    TOKEN_CREATION_ERROR: _ClassVar[Status]
    FILE_NOT_FOUND: _ClassVar[Status]
    DIRECTORY_NOT_FOUND: _ClassVar[Status]
    FILE_ALREADY_EXISTS: _ClassVar[Status]
    NOT_A_FILE: _ClassVar[Status]
    PERMISSION_DENIED: _ClassVar[Status]
    TIMEOUT: _ClassVar[Status]
    PREFIX_NOT_FOUND: _ClassVar[Status]
    RATIS_ERROR: _ClassVar[Status]
    INVALID_PATH_IN_ACL_REQUEST: _ClassVar[Status]
    USER_MISMATCH: _ClassVar[Status]
    INVALID_PART: _ClassVar[Status]
    INVALID_PART_ORDER: _ClassVar[Status]
    SCM_GET_PIPELINE_EXCEPTION: _ClassVar[Status]
    INVALID_BUCKET_NAME: _ClassVar[Status]
    CANNOT_CREATE_DIRECTORY_AT_ROOT: _ClassVar[Status]
    DIRECTORY_ALREADY_EXISTS: _ClassVar[Status]
    INVALID_VOLUME_NAME: _ClassVar[Status]
    PARTIAL_DELETE: _ClassVar[Status]
    DETECTED_LOOP_IN_BUCKET_LINKS: _ClassVar[Status]
    NOT_SUPPORTED_OPERATION: _ClassVar[Status]
    PARTIAL_RENAME: _ClassVar[Status]
    QUOTA_EXCEEDED: _ClassVar[Status]
    QUOTA_ERROR: _ClassVar[Status]
    DIRECTORY_NOT_EMPTY: _ClassVar[Status]
    PERSIST_UPGRADE_TO_LAYOUT_VERSION_FAILED: _ClassVar[Status]
    REMOVE_UPGRADE_TO_LAYOUT_VERSION_FAILED: _ClassVar[Status]
    UPDATE_LAYOUT_VERSION_FAILED: _ClassVar[Status]
    LAYOUT_FEATURE_FINALIZATION_FAILED: _ClassVar[Status]
    PREPARE_FAILED: _ClassVar[Status]
    NOT_SUPPORTED_OPERATION_WHEN_PREPARED: _ClassVar[Status]
    NOT_SUPPORTED_OPERATION_PRIOR_FINALIZATION: _ClassVar[Status]
    TENANT_NOT_FOUND: _ClassVar[Status]
    TENANT_ALREADY_EXISTS: _ClassVar[Status]
    INVALID_TENANT_ID: _ClassVar[Status]
    ACCESS_ID_NOT_FOUND: _ClassVar[Status]
    TENANT_USER_ACCESS_ID_ALREADY_EXISTS: _ClassVar[Status]
    INVALID_TENANT_USERNAME: _ClassVar[Status]
    INVALID_ACCESS_ID: _ClassVar[Status]
    TENANT_AUTHORIZER_ERROR: _ClassVar[Status]
    VOLUME_IS_REFERENCED: _ClassVar[Status]
    TENANT_NOT_EMPTY: _ClassVar[Status]
    FEATURE_NOT_ENABLED: _ClassVar[Status]
    INVALID_SNAPSHOT_ERROR: _ClassVar[Status]
    CONTAINS_SNAPSHOT: _ClassVar[Status]
    SSL_CONNECTION_FAILURE: _ClassVar[Status]
    RENAME_OPEN_FILE: _ClassVar[Status]
    UNAUTHORIZED: _ClassVar[Status]
    S3_SECRET_ALREADY_EXISTS: _ClassVar[Status]
    INVALID_PATH: _ClassVar[Status]
    TOO_MANY_BUCKETS: _ClassVar[Status]
    KEY_UNDER_LEASE_RECOVERY: _ClassVar[Status]
    KEY_ALREADY_CLOSED: _ClassVar[Status]
    KEY_UNDER_LEASE_SOFT_LIMIT_PERIOD: _ClassVar[Status]
    TOO_MANY_SNAPSHOTS: _ClassVar[Status]
    ETAG_MISMATCH: _ClassVar[Status]
    ETAG_NOT_AVAILABLE: _ClassVar[Status]
    ATOMIC_WRITE_CONFLICT: _ClassVar[Status]
CreateVolume: Type
InfoVolume: Type
CreateBucket: Type
InfoBucket: Type
RenameKey: Type
ListKeys: Type
DeleteKeys: Type
ServiceList: Type
DBUpdates: Type
ListStatus: Type
SetAcl: Type
GetS3VolumeContext: Type
GetKeyInfo: Type
CreateSnapshot: Type
ListSnapshot: Type
SnapshotDiff: Type
DeleteSnapshot: Type
GetSnapshotInfo: Type
PutObjectTagging: Type
SubmitSnapshotDiff: Type
OK: Status
VOLUME_NOT_UNIQUE: Status
VOLUME_NOT_FOUND: Status
VOLUME_NOT_EMPTY: Status
VOLUME_ALREADY_EXISTS: Status
USER_NOT_FOUND: Status
USER_TOO_MANY_VOLUMES: Status
BUCKET_NOT_FOUND: Status
BUCKET_NOT_EMPTY: Status
BUCKET_ALREADY_EXISTS: Status
KEY_ALREADY_EXISTS: Status
KEY_NOT_FOUND: Status
INVALID_KEY_NAME: Status
ACCESS_DENIED: Status
INTERNAL_ERROR: Status
KEY_ALLOCATION_ERROR: Status
KEY_DELETION_ERROR: Status
KEY_RENAME_ERROR: Status
METADATA_ERROR: Status
OM_NOT_INITIALIZED: Status
SCM_VERSION_MISMATCH_ERROR: Status
INITIATE_MULTIPART_UPLOAD_ERROR: Status
MULTIPART_UPLOAD_PARTFILE_ERROR: Status
NO_SUCH_MULTIPART_UPLOAD_ERROR: Status
MISMATCH_MULTIPART_LIST: Status
MISSING_UPLOAD_PARTS: Status
COMPLETE_MULTIPART_UPLOAD_ERROR: Status
ENTITY_TOO_SMALL: Status
ABORT_MULTIPART_UPLOAD_FAILED: Status
S3_SECRET_NOT_FOUND: Status
INVALID_AUTH_METHOD: Status
INVALID_TOKEN: Status
TOKEN_EXPIRED: Status
TOKEN_ERROR_OTHER: Status
LIST_MULTIPART_UPLOAD_PARTS_FAILED: Status
SCM_IN_SAFE_MODE: Status
INVALID_REQUEST: Status
BUCKET_ENCRYPTION_KEY_NOT_FOUND: Status
UNKNOWN_CIPHER_SUITE: Status
INVALID_KMS_PROVIDER: Status
TOKEN_CREATION_ERROR: Status
FILE_NOT_FOUND: Status
DIRECTORY_NOT_FOUND: Status
FILE_ALREADY_EXISTS: Status
NOT_A_FILE: Status
PERMISSION_DENIED: Status
TIMEOUT: Status
PREFIX_NOT_FOUND: Status
RATIS_ERROR: Status
INVALID_PATH_IN_ACL_REQUEST: Status
USER_MISMATCH: Status
INVALID_PART: Status
INVALID_PART_ORDER: Status
SCM_GET_PIPELINE_EXCEPTION: Status
INVALID_BUCKET_NAME: Status
CANNOT_CREATE_DIRECTORY_AT_ROOT: Status
DIRECTORY_ALREADY_EXISTS: Status
INVALID_VOLUME_NAME: Status
PARTIAL_DELETE: Status
DETECTED_LOOP_IN_BUCKET_LINKS: Status
NOT_SUPPORTED_OPERATION: Status
PARTIAL_RENAME: Status
QUOTA_EXCEEDED: Status
QUOTA_ERROR: Status
DIRECTORY_NOT_EMPTY: Status
PERSIST_UPGRADE_TO_LAYOUT_VERSION_FAILED: Status
REMOVE_UPGRADE_TO_LAYOUT_VERSION_FAILED: Status
UPDATE_LAYOUT_VERSION_FAILED: Status
LAYOUT_FEATURE_FINALIZATION_FAILED: Status
PREPARE_FAILED: Status
NOT_SUPPORTED_OPERATION_WHEN_PREPARED: Status
NOT_SUPPORTED_OPERATION_PRIOR_FINALIZATION: Status
TENANT_NOT_FOUND: Status
TENANT_ALREADY_EXISTS: Status
INVALID_TENANT_ID: Status
ACCESS_ID_NOT_FOUND: Status
TENANT_USER_ACCESS_ID_ALREADY_EXISTS: Status
INVALID_TENANT_USERNAME: Status
INVALID_ACCESS_ID: Status
TENANT_AUTHORIZER_ERROR: Status
VOLUME_IS_REFERENCED: Status
TENANT_NOT_EMPTY: Status
FEATURE_NOT_ENABLED: Status
INVALID_SNAPSHOT_ERROR: Status
CONTAINS_SNAPSHOT: Status
SSL_CONNECTION_FAILURE: Status
RENAME_OPEN_FILE: Status
UNAUTHORIZED: Status
S3_SECRET_ALREADY_EXISTS: Status
INVALID_PATH: Status
TOO_MANY_BUCKETS: Status
KEY_UNDER_LEASE_RECOVERY: Status
KEY_ALREADY_CLOSED: Status
KEY_UNDER_LEASE_SOFT_LIMIT_PERIOD: Status
TOO_MANY_SNAPSHOTS: Status
ETAG_MISMATCH: Status
ETAG_NOT_AVAILABLE: Status
ATOMIC_WRITE_CONFLICT: Status

class UUID(_message.Message):
    __slots__ = ("mostSigBits", "leastSigBits")
    MOSTSIGBITS_FIELD_NUMBER: _ClassVar[int]
    LEASTSIGBITS_FIELD_NUMBER: _ClassVar[int]
    mostSigBits: int
    leastSigBits: int
    def __init__(self, mostSigBits: _Optional[int] = ..., leastSigBits: _Optional[int] = ...) -> None: ...

class KeyValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class OzoneAclInfo(_message.Message):
    __slots__ = ("type", "name", "rights", "aclScope")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    ACLSCOPE_FIELD_NUMBER: _ClassVar[int]
    type: int
    name: str
    rights: bytes
    aclScope: int
    def __init__(self, type: _Optional[int] = ..., name: _Optional[str] = ..., rights: _Optional[bytes] = ..., aclScope: _Optional[int] = ...) -> None: ...

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

class DefaultReplicationConfig(_message.Message):
    __slots__ = ("type", "factor", "ecReplicationConfig")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    ECREPLICATIONCONFIG_FIELD_NUMBER: _ClassVar[int]
    type: int
    factor: int
    ecReplicationConfig: ECReplicationConfig
    def __init__(self, type: _Optional[int] = ..., factor: _Optional[int] = ..., ecReplicationConfig: _Optional[_Union[ECReplicationConfig, _Mapping]] = ...) -> None: ...

class VolumeInfo(_message.Message):
    __slots__ = ("adminName", "ownerName", "volume", "quotaInBytes", "volumeAcls", "creationTime", "objectID", "quotaInNamespace")
    ADMINNAME_FIELD_NUMBER: _ClassVar[int]
    OWNERNAME_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    QUOTAINBYTES_FIELD_NUMBER: _ClassVar[int]
    VOLUMEACLS_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIME_FIELD_NUMBER: _ClassVar[int]
    OBJECTID_FIELD_NUMBER: _ClassVar[int]
    QUOTAINNAMESPACE_FIELD_NUMBER: _ClassVar[int]
    adminName: str
    ownerName: str
    volume: str
    quotaInBytes: int
    volumeAcls: _containers.RepeatedCompositeFieldContainer[OzoneAclInfo]
    creationTime: int
    objectID: int
    quotaInNamespace: int
    def __init__(self, adminName: _Optional[str] = ..., ownerName: _Optional[str] = ..., volume: _Optional[str] = ..., quotaInBytes: _Optional[int] = ..., volumeAcls: _Optional[_Iterable[_Union[OzoneAclInfo, _Mapping]]] = ..., creationTime: _Optional[int] = ..., objectID: _Optional[int] = ..., quotaInNamespace: _Optional[int] = ...) -> None: ...

class BucketEncryptionInfo(_message.Message):
    __slots__ = ("keyName",)
    KEYNAME_FIELD_NUMBER: _ClassVar[int]
    keyName: str
    def __init__(self, keyName: _Optional[str] = ...) -> None: ...

class BucketInfo(_message.Message):
    __slots__ = ("volumeName", "bucketName", "acls", "isVersionEnabled", "storageType", "creationTime", "metadata", "beinfo", "objectID", "updateID", "sourceVolume", "sourceBucket", "usedBytes", "quotaInBytes", "quotaInNamespace", "usedNamespace", "bucketLayout", "owner", "defaultReplicationConfig")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    ACLS_FIELD_NUMBER: _ClassVar[int]
    ISVERSIONENABLED_FIELD_NUMBER: _ClassVar[int]
    STORAGETYPE_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BEINFO_FIELD_NUMBER: _ClassVar[int]
    OBJECTID_FIELD_NUMBER: _ClassVar[int]
    UPDATEID_FIELD_NUMBER: _ClassVar[int]
    SOURCEVOLUME_FIELD_NUMBER: _ClassVar[int]
    SOURCEBUCKET_FIELD_NUMBER: _ClassVar[int]
    USEDBYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTAINBYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTAINNAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USEDNAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUCKETLAYOUT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DEFAULTREPLICATIONCONFIG_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    acls: _containers.RepeatedCompositeFieldContainer[OzoneAclInfo]
    isVersionEnabled: bool
    storageType: int
    creationTime: int
    metadata: _containers.RepeatedCompositeFieldContainer[KeyValue]
    beinfo: BucketEncryptionInfo
    objectID: int
    updateID: int
    sourceVolume: str
    sourceBucket: str
    usedBytes: int
    quotaInBytes: int
    quotaInNamespace: int
    usedNamespace: int
    bucketLayout: int
    owner: str
    defaultReplicationConfig: DefaultReplicationConfig
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., acls: _Optional[_Iterable[_Union[OzoneAclInfo, _Mapping]]] = ..., isVersionEnabled: bool = ..., storageType: _Optional[int] = ..., creationTime: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ..., beinfo: _Optional[_Union[BucketEncryptionInfo, _Mapping]] = ..., objectID: _Optional[int] = ..., updateID: _Optional[int] = ..., sourceVolume: _Optional[str] = ..., sourceBucket: _Optional[str] = ..., usedBytes: _Optional[int] = ..., quotaInBytes: _Optional[int] = ..., quotaInNamespace: _Optional[int] = ..., usedNamespace: _Optional[int] = ..., bucketLayout: _Optional[int] = ..., owner: _Optional[str] = ..., defaultReplicationConfig: _Optional[_Union[DefaultReplicationConfig, _Mapping]] = ...) -> None: ...

class ContainerBlockID(_message.Message):
    __slots__ = ("containerID", "localID")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    LOCALID_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    localID: int
    def __init__(self, containerID: _Optional[int] = ..., localID: _Optional[int] = ...) -> None: ...

class BlockID(_message.Message):
    __slots__ = ("containerBlockID", "blockCommitSequenceId")
    CONTAINERBLOCKID_FIELD_NUMBER: _ClassVar[int]
    BLOCKCOMMITSEQUENCEID_FIELD_NUMBER: _ClassVar[int]
    containerBlockID: ContainerBlockID
    blockCommitSequenceId: int
    def __init__(self, containerBlockID: _Optional[_Union[ContainerBlockID, _Mapping]] = ..., blockCommitSequenceId: _Optional[int] = ...) -> None: ...

class Port(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class DatanodeDetails(_message.Message):
    __slots__ = ("uuid", "ipAddress", "hostName", "ports")
    UUID_FIELD_NUMBER: _ClassVar[int]
    IPADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    ipAddress: str
    hostName: str
    ports: _containers.RepeatedCompositeFieldContainer[Port]
    def __init__(self, uuid: _Optional[str] = ..., ipAddress: _Optional[str] = ..., hostName: _Optional[str] = ..., ports: _Optional[_Iterable[_Union[Port, _Mapping]]] = ...) -> None: ...

class Pipeline(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[DatanodeDetails]
    def __init__(self, members: _Optional[_Iterable[_Union[DatanodeDetails, _Mapping]]] = ...) -> None: ...

class KeyLocation(_message.Message):
    __slots__ = ("blockID", "offset", "length", "pipeline", "partNumber")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PARTNUMBER_FIELD_NUMBER: _ClassVar[int]
    blockID: BlockID
    offset: int
    length: int
    pipeline: Pipeline
    partNumber: int
    def __init__(self, blockID: _Optional[_Union[BlockID, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., pipeline: _Optional[_Union[Pipeline, _Mapping]] = ..., partNumber: _Optional[int] = ...) -> None: ...

class FileEncryptionInfo(_message.Message):
    __slots__ = ("keyName",)
    KEYNAME_FIELD_NUMBER: _ClassVar[int]
    keyName: str
    def __init__(self, keyName: _Optional[str] = ...) -> None: ...

class KeyLocationList(_message.Message):
    __slots__ = ("version", "keyLocations")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    keyLocations: _containers.RepeatedCompositeFieldContainer[KeyLocation]
    def __init__(self, version: _Optional[int] = ..., keyLocations: _Optional[_Iterable[_Union[KeyLocation, _Mapping]]] = ...) -> None: ...

class KeyArgs(_message.Message):
    __slots__ = ("volumeName", "bucketName", "keyName", "headOp", "tags")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    KEYNAME_FIELD_NUMBER: _ClassVar[int]
    HEADOP_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    keyName: str
    headOp: bool
    tags: _containers.RepeatedCompositeFieldContainer[KeyValue]
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., keyName: _Optional[str] = ..., headOp: bool = ..., tags: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("volumeName", "bucketName", "keyName", "dataSize", "type", "factor", "keyLocationList", "creationTime", "modificationTime", "metadata", "fileEncryptionInfo", "acls", "objectID", "updateID", "parentID", "ecReplicationConfig", "isFile", "ownerName", "tags")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    KEYNAME_FIELD_NUMBER: _ClassVar[int]
    DATASIZE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    KEYLOCATIONLIST_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIME_FIELD_NUMBER: _ClassVar[int]
    MODIFICATIONTIME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    FILEENCRYPTIONINFO_FIELD_NUMBER: _ClassVar[int]
    ACLS_FIELD_NUMBER: _ClassVar[int]
    OBJECTID_FIELD_NUMBER: _ClassVar[int]
    UPDATEID_FIELD_NUMBER: _ClassVar[int]
    PARENTID_FIELD_NUMBER: _ClassVar[int]
    ECREPLICATIONCONFIG_FIELD_NUMBER: _ClassVar[int]
    ISFILE_FIELD_NUMBER: _ClassVar[int]
    OWNERNAME_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    keyName: str
    dataSize: int
    type: int
    factor: int
    keyLocationList: _containers.RepeatedCompositeFieldContainer[KeyLocationList]
    creationTime: int
    modificationTime: int
    metadata: _containers.RepeatedCompositeFieldContainer[KeyValue]
    fileEncryptionInfo: FileEncryptionInfo
    acls: _containers.RepeatedCompositeFieldContainer[OzoneAclInfo]
    objectID: int
    updateID: int
    parentID: int
    ecReplicationConfig: ECReplicationConfig
    isFile: bool
    ownerName: str
    tags: _containers.RepeatedCompositeFieldContainer[KeyValue]
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., keyName: _Optional[str] = ..., dataSize: _Optional[int] = ..., type: _Optional[int] = ..., factor: _Optional[int] = ..., keyLocationList: _Optional[_Iterable[_Union[KeyLocationList, _Mapping]]] = ..., creationTime: _Optional[int] = ..., modificationTime: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ..., fileEncryptionInfo: _Optional[_Union[FileEncryptionInfo, _Mapping]] = ..., acls: _Optional[_Iterable[_Union[OzoneAclInfo, _Mapping]]] = ..., objectID: _Optional[int] = ..., updateID: _Optional[int] = ..., parentID: _Optional[int] = ..., ecReplicationConfig: _Optional[_Union[ECReplicationConfig, _Mapping]] = ..., isFile: bool = ..., ownerName: _Optional[str] = ..., tags: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ...) -> None: ...

class DirectoryInfo(_message.Message):
    __slots__ = ("name", "creationTime", "modificationTime", "objectID", "updateID", "parentID")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIME_FIELD_NUMBER: _ClassVar[int]
    MODIFICATIONTIME_FIELD_NUMBER: _ClassVar[int]
    OBJECTID_FIELD_NUMBER: _ClassVar[int]
    UPDATEID_FIELD_NUMBER: _ClassVar[int]
    PARENTID_FIELD_NUMBER: _ClassVar[int]
    name: str
    creationTime: int
    modificationTime: int
    objectID: int
    updateID: int
    parentID: int
    def __init__(self, name: _Optional[str] = ..., creationTime: _Optional[int] = ..., modificationTime: _Optional[int] = ..., objectID: _Optional[int] = ..., updateID: _Optional[int] = ..., parentID: _Optional[int] = ...) -> None: ...

class RepeatedKeyInfo(_message.Message):
    __slots__ = ("keyInfo", "bucketId")
    KEYINFO_FIELD_NUMBER: _ClassVar[int]
    BUCKETID_FIELD_NUMBER: _ClassVar[int]
    keyInfo: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    bucketId: int
    def __init__(self, keyInfo: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ..., bucketId: _Optional[int] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("snapshotID", "name", "volumeName", "bucketName", "snapshotStatus", "creationTime", "createTransactionInfo")
    SNAPSHOTID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTSTATUS_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIME_FIELD_NUMBER: _ClassVar[int]
    CREATETRANSACTIONINFO_FIELD_NUMBER: _ClassVar[int]
    snapshotID: UUID
    name: str
    volumeName: str
    bucketName: str
    snapshotStatus: int
    creationTime: int
    createTransactionInfo: bytes
    def __init__(self, snapshotID: _Optional[_Union[UUID, _Mapping]] = ..., name: _Optional[str] = ..., volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., snapshotStatus: _Optional[int] = ..., creationTime: _Optional[int] = ..., createTransactionInfo: _Optional[bytes] = ...) -> None: ...

class S3Authentication(_message.Message):
    __slots__ = ("stringToSign", "signature", "accessId")
    STRINGTOSIGN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ACCESSID_FIELD_NUMBER: _ClassVar[int]
    stringToSign: str
    signature: str
    accessId: str
    def __init__(self, stringToSign: _Optional[str] = ..., signature: _Optional[str] = ..., accessId: _Optional[str] = ...) -> None: ...

class CreateVolumeRequest(_message.Message):
    __slots__ = ("volumeInfo",)
    VOLUMEINFO_FIELD_NUMBER: _ClassVar[int]
    volumeInfo: VolumeInfo
    def __init__(self, volumeInfo: _Optional[_Union[VolumeInfo, _Mapping]] = ...) -> None: ...

class CreateVolumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoVolumeRequest(_message.Message):
    __slots__ = ("volumeName",)
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    def __init__(self, volumeName: _Optional[str] = ...) -> None: ...

class InfoVolumeResponse(_message.Message):
    __slots__ = ("volumeInfo",)
    VOLUMEINFO_FIELD_NUMBER: _ClassVar[int]
    volumeInfo: VolumeInfo
    def __init__(self, volumeInfo: _Optional[_Union[VolumeInfo, _Mapping]] = ...) -> None: ...

class CreateBucketRequest(_message.Message):
    __slots__ = ("bucketInfo",)
    BUCKETINFO_FIELD_NUMBER: _ClassVar[int]
    bucketInfo: BucketInfo
    def __init__(self, bucketInfo: _Optional[_Union[BucketInfo, _Mapping]] = ...) -> None: ...

class CreateBucketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoBucketRequest(_message.Message):
    __slots__ = ("volumeName", "bucketName")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ...) -> None: ...

class InfoBucketResponse(_message.Message):
    __slots__ = ("bucketInfo",)
    BUCKETINFO_FIELD_NUMBER: _ClassVar[int]
    bucketInfo: BucketInfo
    def __init__(self, bucketInfo: _Optional[_Union[BucketInfo, _Mapping]] = ...) -> None: ...

class GetS3VolumeContextRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetS3VolumeContextResponse(_message.Message):
    __slots__ = ("volumeInfo",)
    VOLUMEINFO_FIELD_NUMBER: _ClassVar[int]
    volumeInfo: VolumeInfo
    def __init__(self, volumeInfo: _Optional[_Union[VolumeInfo, _Mapping]] = ...) -> None: ...

class GetKeyInfoRequest(_message.Message):
    __slots__ = ("keyArgs",)
    KEYARGS_FIELD_NUMBER: _ClassVar[int]
    keyArgs: KeyArgs
    def __init__(self, keyArgs: _Optional[_Union[KeyArgs, _Mapping]] = ...) -> None: ...

class GetKeyInfoResponse(_message.Message):
    __slots__ = ("keyInfo",)
    KEYINFO_FIELD_NUMBER: _ClassVar[int]
    keyInfo: KeyInfo
    def __init__(self, keyInfo: _Optional[_Union[KeyInfo, _Mapping]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("volumeName", "bucketName", "startKey", "prefix", "count")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    STARTKEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    startKey: str
    prefix: str
    count: int
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., startKey: _Optional[str] = ..., prefix: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keyInfo", "isTruncated")
    KEYINFO_FIELD_NUMBER: _ClassVar[int]
    ISTRUNCATED_FIELD_NUMBER: _ClassVar[int]
    keyInfo: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    isTruncated: bool
    def __init__(self, keyInfo: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ..., isTruncated: bool = ...) -> None: ...

class FileStatus(_message.Message):
    __slots__ = ("keyInfo", "isDirectory")
    KEYINFO_FIELD_NUMBER: _ClassVar[int]
    ISDIRECTORY_FIELD_NUMBER: _ClassVar[int]
    keyInfo: KeyInfo
    isDirectory: bool
    def __init__(self, keyInfo: _Optional[_Union[KeyInfo, _Mapping]] = ..., isDirectory: bool = ...) -> None: ...

class ListStatusRequest(_message.Message):
    __slots__ = ("keyArgs", "recursive", "startKey", "numEntries")
    KEYARGS_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    STARTKEY_FIELD_NUMBER: _ClassVar[int]
    NUMENTRIES_FIELD_NUMBER: _ClassVar[int]
    keyArgs: KeyArgs
    recursive: bool
    startKey: str
    numEntries: int
    def __init__(self, keyArgs: _Optional[_Union[KeyArgs, _Mapping]] = ..., recursive: bool = ..., startKey: _Optional[str] = ..., numEntries: _Optional[int] = ...) -> None: ...

class ListStatusResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[FileStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[FileStatus, _Mapping]]] = ...) -> None: ...

class RenameKeyRequest(_message.Message):
    __slots__ = ("keyArgs", "toKeyName")
    KEYARGS_FIELD_NUMBER: _ClassVar[int]
    TOKEYNAME_FIELD_NUMBER: _ClassVar[int]
    keyArgs: KeyArgs
    toKeyName: str
    def __init__(self, keyArgs: _Optional[_Union[KeyArgs, _Mapping]] = ..., toKeyName: _Optional[str] = ...) -> None: ...

class RenameKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteKeyArgs(_message.Message):
    __slots__ = ("volumeName", "bucketName", "keys")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteKeysRequest(_message.Message):
    __slots__ = ("deleteKeys",)
    DELETEKEYS_FIELD_NUMBER: _ClassVar[int]
    deleteKeys: DeleteKeyArgs
    def __init__(self, deleteKeys: _Optional[_Union[DeleteKeyArgs, _Mapping]] = ...) -> None: ...

class DeleteKeyError(_message.Message):
    __slots__ = ("key", "errorCode", "errorMsg")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERRORCODE_FIELD_NUMBER: _ClassVar[int]
    ERRORMSG_FIELD_NUMBER: _ClassVar[int]
    key: str
    errorCode: str
    errorMsg: str
    def __init__(self, key: _Optional[str] = ..., errorCode: _Optional[str] = ..., errorMsg: _Optional[str] = ...) -> None: ...

class DeleteKeysResponse(_message.Message):
    __slots__ = ("unDeletedKeys", "status", "errors")
    UNDELETEDKEYS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    unDeletedKeys: DeleteKeyArgs
    status: bool
    errors: _containers.RepeatedCompositeFieldContainer[DeleteKeyError]
    def __init__(self, unDeletedKeys: _Optional[_Union[DeleteKeyArgs, _Mapping]] = ..., status: bool = ..., errors: _Optional[_Iterable[_Union[DeleteKeyError, _Mapping]]] = ...) -> None: ...

class PutObjectTaggingRequest(_message.Message):
    __slots__ = ("keyArgs",)
    KEYARGS_FIELD_NUMBER: _ClassVar[int]
    keyArgs: KeyArgs
    def __init__(self, keyArgs: _Optional[_Union[KeyArgs, _Mapping]] = ...) -> None: ...

class PutObjectTaggingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OzoneObj(_message.Message):
    __slots__ = ("resType", "storeType", "path")
    RESTYPE_FIELD_NUMBER: _ClassVar[int]
    STORETYPE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    resType: int
    storeType: int
    path: str
    def __init__(self, resType: _Optional[int] = ..., storeType: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class SetAclRequest(_message.Message):
    __slots__ = ("obj", "acl")
    OBJ_FIELD_NUMBER: _ClassVar[int]
    ACL_FIELD_NUMBER: _ClassVar[int]
    obj: OzoneObj
    acl: _containers.RepeatedCompositeFieldContainer[OzoneAclInfo]
    def __init__(self, obj: _Optional[_Union[OzoneObj, _Mapping]] = ..., acl: _Optional[_Iterable[_Union[OzoneAclInfo, _Mapping]]] = ...) -> None: ...

class SetAclResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: bool
    def __init__(self, response: bool = ...) -> None: ...

class OMRoleInfo(_message.Message):
    __slots__ = ("nodeId", "serverRole")
    NODEID_FIELD_NUMBER: _ClassVar[int]
    SERVERROLE_FIELD_NUMBER: _ClassVar[int]
    nodeId: str
    serverRole: str
    def __init__(self, nodeId: _Optional[str] = ..., serverRole: _Optional[str] = ...) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("nodeType", "hostname", "omRole", "OMVersion")
    NODETYPE_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    OMROLE_FIELD_NUMBER: _ClassVar[int]
    OMVERSION_FIELD_NUMBER: _ClassVar[int]
    nodeType: int
    hostname: str
    omRole: OMRoleInfo
    OMVersion: int
    def __init__(self, nodeType: _Optional[int] = ..., hostname: _Optional[str] = ..., omRole: _Optional[_Union[OMRoleInfo, _Mapping]] = ..., OMVersion: _Optional[int] = ...) -> None: ...

class ServiceListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceListResponse(_message.Message):
    __slots__ = ("serviceInfo",)
    SERVICEINFO_FIELD_NUMBER: _ClassVar[int]
    serviceInfo: _containers.RepeatedCompositeFieldContainer[ServiceInfo]
    def __init__(self, serviceInfo: _Optional[_Iterable[_Union[ServiceInfo, _Mapping]]] = ...) -> None: ...

class DBUpdatesRequest(_message.Message):
    __slots__ = ("sequenceNumber", "limitCount")
    SEQUENCENUMBER_FIELD_NUMBER: _ClassVar[int]
    LIMITCOUNT_FIELD_NUMBER: _ClassVar[int]
    sequenceNumber: int
    limitCount: int
    def __init__(self, sequenceNumber: _Optional[int] = ..., limitCount: _Optional[int] = ...) -> None: ...

class DBUpdatesResponse(_message.Message):
    __slots__ = ("sequenceNumber", "data", "latestSequenceNumber", "dbUpdateSuccess")
    SEQUENCENUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LATESTSEQUENCENUMBER_FIELD_NUMBER: _ClassVar[int]
    DBUPDATESUCCESS_FIELD_NUMBER: _ClassVar[int]
    sequenceNumber: int
    data: _containers.RepeatedScalarFieldContainer[bytes]
    latestSequenceNumber: int
    dbUpdateSuccess: bool
    def __init__(self, sequenceNumber: _Optional[int] = ..., data: _Optional[_Iterable[bytes]] = ..., latestSequenceNumber: _Optional[int] = ..., dbUpdateSuccess: bool = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("volumeName", "bucketName", "snapshotName")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTNAME_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    snapshotName: str
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., snapshotName: _Optional[str] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("snapshotInfo",)
    SNAPSHOTINFO_FIELD_NUMBER: _ClassVar[int]
    snapshotInfo: SnapshotInfo
    def __init__(self, snapshotInfo: _Optional[_Union[SnapshotInfo, _Mapping]] = ...) -> None: ...

class DeleteSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSnapshotRequest(_message.Message):
    __slots__ = ("volumeName", "bucketName", "prefix", "prevSnapshot", "maxListResult")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREVSNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MAXLISTRESULT_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    prefix: str
    prevSnapshot: str
    maxListResult: int
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., prefix: _Optional[str] = ..., prevSnapshot: _Optional[str] = ..., maxListResult: _Optional[int] = ...) -> None: ...

class ListSnapshotResponse(_message.Message):
    __slots__ = ("snapshotInfo", "lastSnapshot")
    SNAPSHOTINFO_FIELD_NUMBER: _ClassVar[int]
    LASTSNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshotInfo: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    lastSnapshot: str
    def __init__(self, snapshotInfo: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ..., lastSnapshot: _Optional[str] = ...) -> None: ...

class SnapshotDiffRequest(_message.Message):
    __slots__ = ("volumeName", "bucketName", "fromSnapshot", "toSnapshot", "token", "pageSize", "forceFullDiff", "disableNativeDiff")
    VOLUMENAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETNAME_FIELD_NUMBER: _ClassVar[int]
    FROMSNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOSNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGESIZE_FIELD_NUMBER: _ClassVar[int]
    FORCEFULLDIFF_FIELD_NUMBER: _ClassVar[int]
    DISABLENATIVEDIFF_FIELD_NUMBER: _ClassVar[int]
    volumeName: str
    bucketName: str
    fromSnapshot: str
    toSnapshot: str
    token: str
    pageSize: int
    forceFullDiff: bool
    disableNativeDiff: bool
    def __init__(self, volumeName: _Optional[str] = ..., bucketName: _Optional[str] = ..., fromSnapshot: _Optional[str] = ..., toSnapshot: _Optional[str] = ..., token: _Optional[str] = ..., pageSize: _Optional[int] = ..., forceFullDiff: bool = ..., disableNativeDiff: bool = ...) -> None: ...

class DiffReportEntry(_message.Message):
    __slots__ = ("diffType", "sourcePath", "targetPath")
    DIFFTYPE_FIELD_NUMBER: _ClassVar[int]
    SOURCEPATH_FIELD_NUMBER: _ClassVar[int]
    TARGETPATH_FIELD_NUMBER: _ClassVar[int]
    diffType: int
    sourcePath: str
    targetPath: str
    def __init__(self, diffType: _Optional[int] = ..., sourcePath: _Optional[str] = ..., targetPath: _Optional[str] = ...) -> None: ...

class SnapshotDiffReport(_message.Message):
    __slots__ = ("diffList", "token")
    DIFFLIST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    diffList: _containers.RepeatedCompositeFieldContainer[DiffReportEntry]
    token: str
    def __init__(self, diffList: _Optional[_Iterable[_Union[DiffReportEntry, _Mapping]]] = ..., token: _Optional[str] = ...) -> None: ...

class SnapshotDiffResponse(_message.Message):
    __slots__ = ("snapshotDiffReport", "jobStatus", "reason")
    SNAPSHOTDIFFREPORT_FIELD_NUMBER: _ClassVar[int]
    JOBSTATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    snapshotDiffReport: SnapshotDiffReport
    jobStatus: int
    reason: str
    def __init__(self, snapshotDiffReport: _Optional[_Union[SnapshotDiffReport, _Mapping]] = ..., jobStatus: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SubmitSnapshotDiffResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: str
    def __init__(self, response: _Optional[str] = ...) -> None: ...

class OMRequest(_message.Message):
    __slots__ = ("cmdType", "clientId", "version", "createVolumeRequest", "infoVolumeRequest", "createBucketRequest", "infoBucketRequest", "renameKeyRequest", "listKeysRequest", "deleteKeysRequest", "serviceListRequest", "dbUpdatesRequest", "listStatusRequest", "setAclRequest", "s3Authentication", "getS3VolumeContextRequest", "getKeyInfoRequest", "createSnapshotRequest", "listSnapshotRequest", "snapshotDiffRequest", "deleteSnapshotRequest", "snapshotInfoRequest", "putObjectTaggingRequest", "submitSnapshotDiffRequest")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    CLIENTID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATEVOLUMEREQUEST_FIELD_NUMBER: _ClassVar[int]
    INFOVOLUMEREQUEST_FIELD_NUMBER: _ClassVar[int]
    CREATEBUCKETREQUEST_FIELD_NUMBER: _ClassVar[int]
    INFOBUCKETREQUEST_FIELD_NUMBER: _ClassVar[int]
    RENAMEKEYREQUEST_FIELD_NUMBER: _ClassVar[int]
    LISTKEYSREQUEST_FIELD_NUMBER: _ClassVar[int]
    DELETEKEYSREQUEST_FIELD_NUMBER: _ClassVar[int]
    SERVICELISTREQUEST_FIELD_NUMBER: _ClassVar[int]
    DBUPDATESREQUEST_FIELD_NUMBER: _ClassVar[int]
    LISTSTATUSREQUEST_FIELD_NUMBER: _ClassVar[int]
    SETACLREQUEST_FIELD_NUMBER: _ClassVar[int]
    S3AUTHENTICATION_FIELD_NUMBER: _ClassVar[int]
    GETS3VOLUMECONTEXTREQUEST_FIELD_NUMBER: _ClassVar[int]
    GETKEYINFOREQUEST_FIELD_NUMBER: _ClassVar[int]
    CREATESNAPSHOTREQUEST_FIELD_NUMBER: _ClassVar[int]
    LISTSNAPSHOTREQUEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTDIFFREQUEST_FIELD_NUMBER: _ClassVar[int]
    DELETESNAPSHOTREQUEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTINFOREQUEST_FIELD_NUMBER: _ClassVar[int]
    PUTOBJECTTAGGINGREQUEST_FIELD_NUMBER: _ClassVar[int]
    SUBMITSNAPSHOTDIFFREQUEST_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    clientId: str
    version: int
    createVolumeRequest: CreateVolumeRequest
    infoVolumeRequest: InfoVolumeRequest
    createBucketRequest: CreateBucketRequest
    infoBucketRequest: InfoBucketRequest
    renameKeyRequest: RenameKeyRequest
    listKeysRequest: ListKeysRequest
    deleteKeysRequest: DeleteKeysRequest
    serviceListRequest: ServiceListRequest
    dbUpdatesRequest: DBUpdatesRequest
    listStatusRequest: ListStatusRequest
    setAclRequest: SetAclRequest
    s3Authentication: S3Authentication
    getS3VolumeContextRequest: GetS3VolumeContextRequest
    getKeyInfoRequest: GetKeyInfoRequest
    createSnapshotRequest: SnapshotRequest
    listSnapshotRequest: ListSnapshotRequest
    snapshotDiffRequest: SnapshotDiffRequest
    deleteSnapshotRequest: SnapshotRequest
    snapshotInfoRequest: SnapshotRequest
    putObjectTaggingRequest: PutObjectTaggingRequest
    submitSnapshotDiffRequest: SnapshotDiffRequest
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., clientId: _Optional[str] = ..., version: _Optional[int] = ..., createVolumeRequest: _Optional[_Union[CreateVolumeRequest, _Mapping]] = ..., infoVolumeRequest: _Optional[_Union[InfoVolumeRequest, _Mapping]] = ..., createBucketRequest: _Optional[_Union[CreateBucketRequest, _Mapping]] = ..., infoBucketRequest: _Optional[_Union[InfoBucketRequest, _Mapping]] = ..., renameKeyRequest: _Optional[_Union[RenameKeyRequest, _Mapping]] = ..., listKeysRequest: _Optional[_Union[ListKeysRequest, _Mapping]] = ..., deleteKeysRequest: _Optional[_Union[DeleteKeysRequest, _Mapping]] = ..., serviceListRequest: _Optional[_Union[ServiceListRequest, _Mapping]] = ..., dbUpdatesRequest: _Optional[_Union[DBUpdatesRequest, _Mapping]] = ..., listStatusRequest: _Optional[_Union[ListStatusRequest, _Mapping]] = ..., setAclRequest: _Optional[_Union[SetAclRequest, _Mapping]] = ..., s3Authentication: _Optional[_Union[S3Authentication, _Mapping]] = ..., getS3VolumeContextRequest: _Optional[_Union[GetS3VolumeContextRequest, _Mapping]] = ..., getKeyInfoRequest: _Optional[_Union[GetKeyInfoRequest, _Mapping]] = ..., createSnapshotRequest: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., listSnapshotRequest: _Optional[_Union[ListSnapshotRequest, _Mapping]] = ..., snapshotDiffRequest: _Optional[_Union[SnapshotDiffRequest, _Mapping]] = ..., deleteSnapshotRequest: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., snapshotInfoRequest: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., putObjectTaggingRequest: _Optional[_Union[PutObjectTaggingRequest, _Mapping]] = ..., submitSnapshotDiffRequest: _Optional[_Union[SnapshotDiffRequest, _Mapping]] = ...) -> None: ...

class OMResponse(_message.Message):
    __slots__ = ("cmdType", "success", "message", "status", "leaderOMNodeId", "createVolumeResponse", "infoVolumeResponse", "createBucketResponse", "infoBucketResponse", "renameKeyResponse", "listKeysResponse", "deleteKeysResponse", "serviceListResponse", "dbUpdatesResponse", "listStatusResponse", "setAclResponse", "getS3VolumeContextResponse", "getKeyInfoResponse", "createSnapshotResponse", "listSnapshotResponse", "snapshotDiffResponse", "deleteSnapshotResponse", "snapshotInfoResponse", "putObjectTaggingResponse", "submitSnapshotDiffResponse")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LEADEROMNODEID_FIELD_NUMBER: _ClassVar[int]
    CREATEVOLUMERESPONSE_FIELD_NUMBER: _ClassVar[int]
    INFOVOLUMERESPONSE_FIELD_NUMBER: _ClassVar[int]
    CREATEBUCKETRESPONSE_FIELD_NUMBER: _ClassVar[int]
    INFOBUCKETRESPONSE_FIELD_NUMBER: _ClassVar[int]
    RENAMEKEYRESPONSE_FIELD_NUMBER: _ClassVar[int]
    LISTKEYSRESPONSE_FIELD_NUMBER: _ClassVar[int]
    DELETEKEYSRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SERVICELISTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    DBUPDATESRESPONSE_FIELD_NUMBER: _ClassVar[int]
    LISTSTATUSRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SETACLRESPONSE_FIELD_NUMBER: _ClassVar[int]
    GETS3VOLUMECONTEXTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    GETKEYINFORESPONSE_FIELD_NUMBER: _ClassVar[int]
    CREATESNAPSHOTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    LISTSNAPSHOTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTDIFFRESPONSE_FIELD_NUMBER: _ClassVar[int]
    DELETESNAPSHOTRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTINFORESPONSE_FIELD_NUMBER: _ClassVar[int]
    PUTOBJECTTAGGINGRESPONSE_FIELD_NUMBER: _ClassVar[int]
    SUBMITSNAPSHOTDIFFRESPONSE_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    success: bool
    message: str
    status: int
    leaderOMNodeId: str
    createVolumeResponse: CreateVolumeResponse
    infoVolumeResponse: InfoVolumeResponse
    createBucketResponse: CreateBucketResponse
    infoBucketResponse: InfoBucketResponse
    renameKeyResponse: RenameKeyResponse
    listKeysResponse: ListKeysResponse
    deleteKeysResponse: DeleteKeysResponse
    serviceListResponse: ServiceListResponse
    dbUpdatesResponse: DBUpdatesResponse
    listStatusResponse: ListStatusResponse
    setAclResponse: SetAclResponse
    getS3VolumeContextResponse: GetS3VolumeContextResponse
    getKeyInfoResponse: GetKeyInfoResponse
    createSnapshotResponse: SnapshotResponse
    listSnapshotResponse: ListSnapshotResponse
    snapshotDiffResponse: SnapshotDiffResponse
    deleteSnapshotResponse: DeleteSnapshotResponse
    snapshotInfoResponse: SnapshotResponse
    putObjectTaggingResponse: PutObjectTaggingResponse
    submitSnapshotDiffResponse: SubmitSnapshotDiffResponse
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., success: bool = ..., message: _Optional[str] = ..., status: _Optional[int] = ..., leaderOMNodeId: _Optional[str] = ..., createVolumeResponse: _Optional[_Union[CreateVolumeResponse, _Mapping]] = ..., infoVolumeResponse: _Optional[_Union[InfoVolumeResponse, _Mapping]] = ..., createBucketResponse: _Optional[_Union[CreateBucketResponse, _Mapping]] = ..., infoBucketResponse: _Optional[_Union[InfoBucketResponse, _Mapping]] = ..., renameKeyResponse: _Optional[_Union[RenameKeyResponse, _Mapping]] = ..., listKeysResponse: _Optional[_Union[ListKeysResponse, _Mapping]] = ..., deleteKeysResponse: _Optional[_Union[DeleteKeysResponse, _Mapping]] = ..., serviceListResponse: _Optional[_Union[ServiceListResponse, _Mapping]] = ..., dbUpdatesResponse: _Optional[_Union[DBUpdatesResponse, _Mapping]] = ..., listStatusResponse: _Optional[_Union[ListStatusResponse, _Mapping]] = ..., setAclResponse: _Optional[_Union[SetAclResponse, _Mapping]] = ..., getS3VolumeContextResponse: _Optional[_Union[GetS3VolumeContextResponse, _Mapping]] = ..., getKeyInfoResponse: _Optional[_Union[GetKeyInfoResponse, _Mapping]] = ..., createSnapshotResponse: _Optional[_Union[SnapshotResponse, _Mapping]] = ..., listSnapshotResponse: _Optional[_Union[ListSnapshotResponse, _Mapping]] = ..., snapshotDiffResponse: _Optional[_Union[SnapshotDiffResponse, _Mapping]] = ..., deleteSnapshotResponse: _Optional[_Union[DeleteSnapshotResponse, _Mapping]] = ..., snapshotInfoResponse: _Optional[_Union[SnapshotResponse, _Mapping]] = ..., putObjectTaggingResponse: _Optional[_Union[PutObjectTaggingResponse, _Mapping]] = ..., submitSnapshotDiffResponse: _Optional[_Union[SubmitSnapshotDiffResponse, _Mapping]] = ...) -> None: ...
