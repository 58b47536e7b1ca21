from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChecksumType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[ChecksumType]
    CRC32: _ClassVar[ChecksumType]
    CRC32C: _ClassVar[ChecksumType]
    SHA256: _ClassVar[ChecksumType]
    MD5: _ClassVar[ChecksumType]

class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CreateContainer: _ClassVar[Type]
    ReadContainer: _ClassVar[Type]
    UpdateContainer: _ClassVar[Type]
    DeleteContainer: _ClassVar[Type]
    ListContainer: _ClassVar[Type]
    PutBlock: _ClassVar[Type]
    GetBlock: _ClassVar[Type]
    DeleteBlock: _ClassVar[Type]
    ListBlock: _ClassVar[Type]
    ReadChunk: _ClassVar[Type]
    DeleteChunk: _ClassVar[Type]
    WriteChunk: _ClassVar[Type]
    ListChunk: _ClassVar[Type]
    CompactChunk: _ClassVar[Type]
    PutSmallFile: _ClassVar[Type]
    GetSmallFile: _ClassVar[Type]
    CloseContainer: _ClassVar[Type]
    GetCommittedBlockLength: _ClassVar[Type]
    StreamInit: _ClassVar[Type]
    StreamWrite: _ClassVar[Type]
    FinalizeBlock: _ClassVar[Type]
    Echo: _ClassVar[Type]
    GetContainerChecksumInfo: _ClassVar[Type]
    ReadBlock: _ClassVar[Type]
    StreamInitWithPutBlock: _ClassVar[Type]

class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUCCESS: _ClassVar[Result]
    UNSUPPORTED_REQUEST: _ClassVar[Result]
    MALFORMED_REQUEST: _ClassVar[Result]
    CONTAINER_INTERNAL_ERROR: _ClassVar[Result]
    INVALID_CONFIG: _ClassVar[Result]
    INVALID_FILE_HASH_FOUND: _ClassVar[Result]
    CONTAINER_EXISTS: _ClassVar[Result]
    NO_SUCH_ALGORITHM: _ClassVar[Result]
    CONTAINER_NOT_FOUND: _ClassVar[Result]
    IO_EXCEPTION: _ClassVar[Result]
    UNABLE_TO_READ_METADATA_DB: _ClassVar[Result]
    NO_SUCH_BLOCK: _ClassVar[Result]
    OVERWRITE_FLAG_REQUIRED: _ClassVar[Result]
    UNABLE_TO_FIND_DATA_DIR: _ClassVar[Result]
    INVALID_WRITE_SIZE: _ClassVar[Result]
    CHECKSUM_MISMATCH: _ClassVar[Result]
    UNABLE_TO_FIND_CHUNK: _ClassVar[Result]
    PROTOC_DECODING_ERROR: _ClassVar[Result]
    INVALID_ARGUMENT: _ClassVar[Result]
    PUT_SMALL_FILE_ERROR: _ClassVar[Result]
    GET_SMALL_FILE_ERROR: _ClassVar[Result]
    CLOSED_CONTAINER_IO: _ClassVar[Result]
    ERROR_IN_COMPACT_DB: _ClassVar[Result]
    UNCLOSED_CONTAINER_IO: _ClassVar[Result]
    DELETE_ON_OPEN_CONTAINER: _ClassVar[Result]
    CLOSED_CONTAINER_RETRY: _ClassVar[Result]
    INVALID_CONTAINER_STATE: _ClassVar[Result]
    DISK_OUT_OF_SPACE: _ClassVar[Result]
    CONTAINER_ALREADY_EXISTS: _ClassVar[Result]
    CONTAINER_METADATA_ERROR: _ClassVar[Result]
    CONTAINER_FILES_CREATE_ERROR: _ClassVar[Result]
    CONTAINER_CHECKSUM_ERROR: _ClassVar[Result]
    UNKNOWN_CONTAINER_TYPE: _ClassVar[Result]
    BLOCK_NOT_COMMITTED: _ClassVar[Result]
    CONTAINER_UNHEALTHY: _ClassVar[Result]
    UNKNOWN_BCSID: _ClassVar[Result]
    BCSID_MISMATCH: _ClassVar[Result]
    CONTAINER_NOT_OPEN: _ClassVar[Result]
    CONTAINER_MISSING: _ClassVar[Result]
    BLOCK_TOKEN_VERIFICATION_FAILED: _ClassVar[Result]
    ERROR_IN_DB_SYNC: _ClassVar[Result]
    CHUNK_FILE_INCONSISTENCY: _ClassVar[Result]
    DELETE_ON_NON_EMPTY_CONTAINER: _ClassVar[Result]
    EXPORT_CONTAINER_METADATA_FAILED: _ClassVar[Result]
    IMPORT_CONTAINER_METADATA_FAILED: _ClassVar[Result]
    BLOCK_ALREADY_FINALIZED: _ClassVar[Result]
    CONTAINER_ID_MISMATCH: _ClassVar[Result]
    GET_SHORT_CIRCUIT_FD_FAILED: _ClassVar[Result]

class ReadChunkVersion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    V0: _ClassVar[ReadChunkVersion]
    V1: _ClassVar[ReadChunkVersion]
NONE: ChecksumType
CRC32: ChecksumType
CRC32C: ChecksumType
SHA256: ChecksumType
MD5: ChecksumType
CreateContainer: Type
ReadContainer: Type
UpdateContainer: Type
DeleteContainer: Type
ListContainer: Type
PutBlock: Type
GetBlock: Type
DeleteBlock: Type
ListBlock: Type
ReadChunk: Type
DeleteChunk: Type
WriteChunk: Type
ListChunk: Type
CompactChunk: Type
PutSmallFile: Type
GetSmallFile: Type
CloseContainer: Type
GetCommittedBlockLength: Type
StreamInit: Type
StreamWrite: Type
FinalizeBlock: Type
Echo: Type
GetContainerChecksumInfo: Type
ReadBlock: Type
StreamInitWithPutBlock: Type
SUCCESS: Result
UNSUPPORTED_REQUEST: Result
MALFORMED_REQUEST: Result
CONTAINER_INTERNAL_ERROR: Result
INVALID_CONFIG: Result
INVALID_FILE_HASH_FOUND: Result
CONTAINER_EXISTS: Result
NO_SUCH_ALGORITHM: Result
CONTAINER_NOT_FOUND: Result
IO_EXCEPTION: Result
UNABLE_TO_READ_METADATA_DB: Result
NO_SUCH_BLOCK: Result
OVERWRITE_FLAG_REQUIRED: Result
UNABLE_TO_FIND_DATA_DIR: Result
INVALID_WRITE_SIZE: Result
CHECKSUM_MISMATCH: Result
UNABLE_TO_FIND_CHUNK: Result
PROTOC_DECODING_ERROR: Result
INVALID_ARGUMENT: Result
PUT_SMALL_FILE_ERROR: Result
GET_SMALL_FILE_ERROR: Result
CLOSED_CONTAINER_IO: Result
ERROR_IN_COMPACT_DB: Result
UNCLOSED_CONTAINER_IO: Result
DELETE_ON_OPEN_CONTAINER: Result
CLOSED_CONTAINER_RETRY: Result
INVALID_CONTAINER_STATE: Result
DISK_OUT_OF_SPACE: Result
CONTAINER_ALREADY_EXISTS: Result
CONTAINER_METADATA_ERROR: Result
CONTAINER_FILES_CREATE_ERROR: Result
CONTAINER_CHECKSUM_ERROR: Result
UNKNOWN_CONTAINER_TYPE: Result
BLOCK_NOT_COMMITTED: Result
CONTAINER_UNHEALTHY: Result
UNKNOWN_BCSID: Result
BCSID_MISMATCH: Result
CONTAINER_NOT_OPEN: Result
CONTAINER_MISSING: Result
BLOCK_TOKEN_VERIFICATION_FAILED: Result
ERROR_IN_DB_SYNC: Result
CHUNK_FILE_INCONSISTENCY: Result
DELETE_ON_NON_EMPTY_CONTAINER: Result
EXPORT_CONTAINER_METADATA_FAILED: Result
IMPORT_CONTAINER_METADATA_FAILED: Result
BLOCK_ALREADY_FINALIZED: Result
CONTAINER_ID_MISMATCH: Result
GET_SHORT_CIRCUIT_FD_FAILED: Result
V0: ReadChunkVersion
V1: ReadChunkVersion

class DatanodeBlockID(_message.Message):
    __slots__ = ("containerID", "localID", "blockCommitSequenceId", "replicaIndex")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    LOCALID_FIELD_NUMBER: _ClassVar[int]
    BLOCKCOMMITSEQUENCEID_FIELD_NUMBER: _ClassVar[int]
    REPLICAINDEX_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    localID: int
    blockCommitSequenceId: int
    replicaIndex: int
    def __init__(self, containerID: _Optional[int] = ..., localID: _Optional[int] = ..., blockCommitSequenceId: _Optional[int] = ..., replicaIndex: _Optional[int] = ...) -> None: ...

class KeyValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ChecksumData(_message.Message):
    __slots__ = ("type", "bytesPerChecksum", "checksums")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BYTESPERCHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    type: ChecksumType
    bytesPerChecksum: int
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, type: _Optional[_Union[ChecksumType, str]] = ..., bytesPerChecksum: _Optional[int] = ..., checksums: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChunkInfo(_message.Message):
    __slots__ = ("chunkName", "offset", "len", "metadata", "checksumData", "stripeChecksum")
    CHUNKNAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMDATA_FIELD_NUMBER: _ClassVar[int]
    STRIPECHECKSUM_FIELD_NUMBER: _ClassVar[int]
    chunkName: str
    offset: int
    len: int
    metadata: _containers.RepeatedCompositeFieldContainer[KeyValue]
    checksumData: ChecksumData
    stripeChecksum: bytes
    def __init__(self, chunkName: _Optional[str] = ..., offset: _Optional[int] = ..., len: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ..., checksumData: _Optional[_Union[ChecksumData, _Mapping]] = ..., stripeChecksum: _Optional[bytes] = ...) -> None: ...

class BlockData(_message.Message):
    __slots__ = ("blockID", "flags", "metadata", "chunks", "size")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    blockID: DatanodeBlockID
    flags: int
    metadata: _containers.RepeatedCompositeFieldContainer[KeyValue]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkInfo]
    size: int
    def __init__(self, blockID: _Optional[_Union[DatanodeBlockID, _Mapping]] = ..., flags: _Optional[int] = ..., metadata: _Optional[_Iterable[_Union[KeyValue, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[ChunkInfo, _Mapping]]] = ..., size: _Optional[int] = ...) -> None: ...

class DeletedBlocksTransaction(_message.Message):
    __slots__ = ("txID", "containerID", "localID", "count", "totalBlockSize", "totalBlockReplicatedSize", "totalSizePerReplica")
    TXID_FIELD_NUMBER: _ClassVar[int]
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    LOCALID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTALBLOCKSIZE_FIELD_NUMBER: _ClassVar[int]
    TOTALBLOCKREPLICATEDSIZE_FIELD_NUMBER: _ClassVar[int]
    TOTALSIZEPERREPLICA_FIELD_NUMBER: _ClassVar[int]
    txID: int
    containerID: int
    localID: _containers.RepeatedScalarFieldContainer[int]
    count: int
    totalBlockSize: int
    totalBlockReplicatedSize: int
    totalSizePerReplica: int
    def __init__(self, txID: _Optional[int] = ..., containerID: _Optional[int] = ..., localID: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ..., totalBlockSize: _Optional[int] = ..., totalBlockReplicatedSize: _Optional[int] = ..., totalSizePerReplica: _Optional[int] = ...) -> None: ...

class ChunkMerkleTree(_message.Message):
    __slots__ = ("offset", "length", "dataChecksum", "checksumMatches")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATACHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMMATCHES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    dataChecksum: int
    checksumMatches: bool
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., dataChecksum: _Optional[int] = ..., checksumMatches: bool = ...) -> None: ...

class BlockMerkleTree(_message.Message):
    __slots__ = ("blockID", "dataChecksum", "chunkMerkleTree", "deleted")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    DATACHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNKMERKLETREE_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    blockID: int
    dataChecksum: int
    chunkMerkleTree: _containers.RepeatedCompositeFieldContainer[ChunkMerkleTree]
    deleted: bool
    def __init__(self, blockID: _Optional[int] = ..., dataChecksum: _Optional[int] = ..., chunkMerkleTree: _Optional[_Iterable[_Union[ChunkMerkleTree, _Mapping]]] = ..., deleted: bool = ...) -> None: ...

class ContainerMerkleTree(_message.Message):
    __slots__ = ("dataChecksum", "blockMerkleTree")
    DATACHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BLOCKMERKLETREE_FIELD_NUMBER: _ClassVar[int]
    dataChecksum: int
    blockMerkleTree: _containers.RepeatedCompositeFieldContainer[BlockMerkleTree]
    def __init__(self, dataChecksum: _Optional[int] = ..., blockMerkleTree: _Optional[_Iterable[_Union[BlockMerkleTree, _Mapping]]] = ...) -> None: ...

class ContainerChecksumInfo(_message.Message):
    __slots__ = ("containerID", "containerMerkleTree")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    CONTAINERMERKLETREE_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    containerMerkleTree: ContainerMerkleTree
    def __init__(self, containerID: _Optional[int] = ..., containerMerkleTree: _Optional[_Union[ContainerMerkleTree, _Mapping]] = ...) -> None: ...

class DataBuffers(_message.Message):
    __slots__ = ("buffers",)
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetContainerChecksumInfoRequestProto(_message.Message):
    __slots__ = ("containerID",)
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    def __init__(self, containerID: _Optional[int] = ...) -> None: ...

class GetContainerChecksumInfoResponseProto(_message.Message):
    __slots__ = ("containerID", "containerChecksumInfo")
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    CONTAINERCHECKSUMINFO_FIELD_NUMBER: _ClassVar[int]
    containerID: int
    containerChecksumInfo: bytes
    def __init__(self, containerID: _Optional[int] = ..., containerChecksumInfo: _Optional[bytes] = ...) -> None: ...

class GetBlockRequestProto(_message.Message):
    __slots__ = ("blockID",)
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    blockID: DatanodeBlockID
    def __init__(self, blockID: _Optional[_Union[DatanodeBlockID, _Mapping]] = ...) -> None: ...

class GetBlockResponseProto(_message.Message):
    __slots__ = ("blockData",)
    BLOCKDATA_FIELD_NUMBER: _ClassVar[int]
    blockData: BlockData
    def __init__(self, blockData: _Optional[_Union[BlockData, _Mapping]] = ...) -> None: ...

class ListBlockRequestProto(_message.Message):
    __slots__ = ("startLocalID", "count")
    STARTLOCALID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    startLocalID: int
    count: int
    def __init__(self, startLocalID: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ListBlockResponseProto(_message.Message):
    __slots__ = ("blockData",)
    BLOCKDATA_FIELD_NUMBER: _ClassVar[int]
    blockData: _containers.RepeatedCompositeFieldContainer[BlockData]
    def __init__(self, blockData: _Optional[_Iterable[_Union[BlockData, _Mapping]]] = ...) -> None: ...

class ReadChunkRequestProto(_message.Message):
    __slots__ = ("blockID", "chunkData", "readChunkVersion")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    CHUNKDATA_FIELD_NUMBER: _ClassVar[int]
    READCHUNKVERSION_FIELD_NUMBER: _ClassVar[int]
    blockID: DatanodeBlockID
    chunkData: ChunkInfo
    readChunkVersion: ReadChunkVersion
    def __init__(self, blockID: _Optional[_Union[DatanodeBlockID, _Mapping]] = ..., chunkData: _Optional[_Union[ChunkInfo, _Mapping]] = ..., readChunkVersion: _Optional[_Union[ReadChunkVersion, str]] = ...) -> None: ...

class ReadChunkResponseProto(_message.Message):
    __slots__ = ("blockID", "chunkData", "data", "dataBuffers")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    CHUNKDATA_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATABUFFERS_FIELD_NUMBER: _ClassVar[int]
    blockID: DatanodeBlockID
    chunkData: ChunkInfo
    data: bytes
    dataBuffers: DataBuffers
    def __init__(self, blockID: _Optional[_Union[DatanodeBlockID, _Mapping]] = ..., chunkData: _Optional[_Union[ChunkInfo, _Mapping]] = ..., data: _Optional[bytes] = ..., dataBuffers: _Optional[_Union[DataBuffers, _Mapping]] = ...) -> None: ...

class EchoRequestProto(_message.Message):
    __slots__ = ("payload", "payloadSizeResp", "sleepTimeMs", "readOnly")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOADSIZERESP_FIELD_NUMBER: _ClassVar[int]
    SLEEPTIMEMS_FIELD_NUMBER: _ClassVar[int]
    READONLY_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    payloadSizeResp: int
    sleepTimeMs: int
    readOnly: bool
    def __init__(self, payload: _Optional[bytes] = ..., payloadSizeResp: _Optional[int] = ..., sleepTimeMs: _Optional[int] = ..., readOnly: bool = ...) -> None: ...

class EchoResponseProto(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class ContainerCommandRequestProto(_message.Message):
    __slots__ = ("cmdType", "traceID", "containerID", "datanodeUuid", "pipelineID", "getBlock", "listBlock", "readChunk", "encodedToken", "version", "echo", "getContainerChecksumInfo")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    TRACEID_FIELD_NUMBER: _ClassVar[int]
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    DATANODEUUID_FIELD_NUMBER: _ClassVar[int]
    PIPELINEID_FIELD_NUMBER: _ClassVar[int]
    GETBLOCK_FIELD_NUMBER: _ClassVar[int]
    LISTBLOCK_FIELD_NUMBER: _ClassVar[int]
    READCHUNK_FIELD_NUMBER: _ClassVar[int]
    ENCODEDTOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERCHECKSUMINFO_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    traceID: str
    containerID: int
    datanodeUuid: str
    pipelineID: str
    getBlock: GetBlockRequestProto
    listBlock: ListBlockRequestProto
    readChunk: ReadChunkRequestProto
    encodedToken: str
    version: int
    echo: EchoRequestProto
    getContainerChecksumInfo: GetContainerChecksumInfoRequestProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., traceID: _Optional[str] = ..., containerID: _Optional[int] = ..., datanodeUuid: _Optional[str] = ..., pipelineID: _Optional[str] = ..., getBlock: _Optional[_Union[GetBlockRequestProto, _Mapping]] = ..., listBlock: _Optional[_Union[ListBlockRequestProto, _Mapping]] = ..., readChunk: _Optional[_Union[ReadChunkRequestProto, _Mapping]] = ..., encodedToken: _Optional[str] = ..., version: _Optional[int] = ..., echo: _Optional[_Union[EchoRequestProto, _Mapping]] = ..., getContainerChecksumInfo: _Optional[_Union[GetContainerChecksumInfoRequestProto, _Mapping]] = ...) -> None: ...

class ContainerCommandResponseProto(_message.Message):
    __slots__ = ("cmdType", "traceID", "result", "message", "getBlock", "listBlock", "readChunk", "echo", "getContainerChecksumInfo")
    CMDTYPE_FIELD_NUMBER: _ClassVar[int]
    TRACEID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GETBLOCK_FIELD_NUMBER: _ClassVar[int]
    LISTBLOCK_FIELD_NUMBER: _ClassVar[int]
    READCHUNK_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    GETCONTAINERCHECKSUMINFO_FIELD_NUMBER: _ClassVar[int]
    cmdType: Type
    traceID: str
    result: Result
    message: str
    getBlock: GetBlockResponseProto
    listBlock: ListBlockResponseProto
    readChunk: ReadChunkResponseProto
    echo: EchoResponseProto
    getContainerChecksumInfo: GetContainerChecksumInfoResponseProto
    def __init__(self, cmdType: _Optional[_Union[Type, str]] = ..., traceID: _Optional[str] = ..., result: _Optional[_Union[Result, str]] = ..., message: _Optional[str] = ..., getBlock: _Optional[_Union[GetBlockResponseProto, _Mapping]] = ..., listBlock: _Optional[_Union[ListBlockResponseProto, _Mapping]] = ..., readChunk: _Optional[_Union[ReadChunkResponseProto, _Mapping]] = ..., echo: _Optional[_Union[EchoResponseProto, _Mapping]] = ..., getContainerChecksumInfo: _Optional[_Union[GetContainerChecksumInfoResponseProto, _Mapping]] = ...) -> None: ...
