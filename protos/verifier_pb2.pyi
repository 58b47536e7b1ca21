from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("address", "writes", "index", "profile", "lists_all_keys", "roles_enforced")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LISTS_ALL_KEYS_FIELD_NUMBER: _ClassVar[int]
    ROLES_ENFORCED_FIELD_NUMBER: _ClassVar[int]
    address: str
    writes: bool
    index: IndexState
    profile: Profile
    lists_all_keys: bool
    roles_enforced: bool
    def __init__(self, address: _Optional[str] = ..., writes: bool = ..., index: _Optional[_Union[IndexState, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., lists_all_keys: bool = ..., roles_enforced: bool = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("secret", "algorithm", "properties")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    algorithm: str
    properties: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, secret: _Optional[bytes] = ..., algorithm: _Optional[str] = ..., properties: _Optional[_Iterable[str]] = ...) -> None: ...

class IndexState(_message.Message):
    __slots__ = ("position", "listed", "recorded", "read", "listed_at_ms", "oldest_read_ms", "settled_items", "settled_total", "damaged", "unsettled")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    LISTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READ_MS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    position: int
    listed: int
    recorded: int
    read: int
    listed_at_ms: int
    oldest_read_ms: int
    settled_items: int
    settled_total: bytes
    damaged: bytes
    unsettled: int
    def __init__(self, position: _Optional[int] = ..., listed: _Optional[int] = ..., recorded: _Optional[int] = ..., read: _Optional[int] = ..., listed_at_ms: _Optional[int] = ..., oldest_read_ms: _Optional[int] = ..., settled_items: _Optional[int] = ..., settled_total: _Optional[bytes] = ..., damaged: _Optional[bytes] = ..., unsettled: _Optional[int] = ...) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ("question",)
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    question: bytes
    def __init__(self, question: _Optional[bytes] = ...) -> None: ...

class ProveResponse(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: bytes
    def __init__(self, answer: _Optional[bytes] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("pair", "run", "epoch")
    PAIR_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pair: bytes
    run: bytes
    epoch: int
    def __init__(self, pair: _Optional[bytes] = ..., run: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class BeginRunRequest(_message.Message):
    __slots__ = ("profile_digest", "run")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    run: Run
    def __init__(self, profile_digest: _Optional[bytes] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class BeginRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RefreshRequest(_message.Message):
    __slots__ = ("profile_digest", "read_since_ms", "prefix", "begins")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    READ_SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    read_since_ms: int
    prefix: str
    begins: Run
    def __init__(self, profile_digest: _Optional[bytes] = ..., read_since_ms: _Optional[int] = ..., prefix: _Optional[str] = ..., begins: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class RefreshProgress(_message.Message):
    __slots__ = ("objects", "bytes_read", "index")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    objects: int
    bytes_read: int
    index: IndexState
    def __init__(self, objects: _Optional[int] = ..., bytes_read: _Optional[int] = ..., index: _Optional[_Union[IndexState, _Mapping]] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Properties(_message.Message):
    __slots__ = ("metadata", "tags", "headers", "acl")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ACL_FIELD_NUMBER: _ClassVar[int]
    metadata: _containers.RepeatedCompositeFieldContainer[Pair]
    tags: _containers.RepeatedCompositeFieldContainer[Pair]
    headers: _containers.RepeatedCompositeFieldContainer[Pair]
    acl: _containers.RepeatedCompositeFieldContainer[Pair]
    def __init__(self, metadata: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., tags: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., headers: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., acl: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ...) -> None: ...

class ContentHash(_message.Message):
    __slots__ = ("algorithm", "digest")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    digest: bytes
    def __init__(self, algorithm: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("key", "size_bytes", "etag", "modified_ms", "version", "is_delete_marker", "hashes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_DELETE_MARKER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    etag: str
    modified_ms: int
    version: str
    is_delete_marker: bool
    hashes: _containers.RepeatedCompositeFieldContainer[ContentHash]
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., etag: _Optional[str] = ..., modified_ms: _Optional[int] = ..., version: _Optional[str] = ..., is_delete_marker: bool = ..., hashes: _Optional[_Iterable[_Union[ContentHash, _Mapping]]] = ...) -> None: ...

class GetFactsRequest(_message.Message):
    __slots__ = ("profile_digest", "keys")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, profile_digest: _Optional[bytes] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class GetFactsResponse(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[Facts]
    def __init__(self, facts: _Optional[_Iterable[_Union[Facts, _Mapping]]] = ...) -> None: ...

class Write(_message.Message):
    __slots__ = ("key", "body", "properties_only", "properties", "blake3", "replaced_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_ONLY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    REPLACED_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    body: bytes
    properties_only: bool
    properties: Properties
    blake3: bytes
    replaced_id: bytes
    def __init__(self, key: _Optional[str] = ..., body: _Optional[bytes] = ..., properties_only: bool = ..., properties: _Optional[_Union[Properties, _Mapping]] = ..., blake3: _Optional[bytes] = ..., replaced_id: _Optional[bytes] = ...) -> None: ...

class WriteBatch(_message.Message):
    __slots__ = ("profile_digest", "batch", "writes", "run")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    batch: int
    writes: _containers.RepeatedCompositeFieldContainer[Write]
    run: Run
    def __init__(self, profile_digest: _Optional[bytes] = ..., batch: _Optional[int] = ..., writes: _Optional[_Iterable[_Union[Write, _Mapping]]] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class WriteResult(_message.Message):
    __slots__ = ("error", "reason", "etag", "modified_ms", "version")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    error: str
    reason: str
    etag: str
    modified_ms: int
    version: str
    def __init__(self, error: _Optional[str] = ..., reason: _Optional[str] = ..., etag: _Optional[str] = ..., modified_ms: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("batch", "results", "items", "total")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    batch: int
    results: _containers.RepeatedCompositeFieldContainer[WriteResult]
    items: int
    total: bytes
    def __init__(self, batch: _Optional[int] = ..., results: _Optional[_Iterable[_Union[WriteResult, _Mapping]]] = ..., items: _Optional[int] = ..., total: _Optional[bytes] = ...) -> None: ...

class KeyWrite(_message.Message):
    __slots__ = ("key", "body", "properties_only", "delete", "properties", "blake3", "absent", "etag", "replaced", "tags_only")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_ONLY_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    TAGS_ONLY_FIELD_NUMBER: _ClassVar[int]
    key: str
    body: bytes
    properties_only: bool
    delete: bool
    properties: Properties
    blake3: bytes
    absent: bool
    etag: str
    replaced: Facts
    tags_only: bool
    def __init__(self, key: _Optional[str] = ..., body: _Optional[bytes] = ..., properties_only: bool = ..., delete: bool = ..., properties: _Optional[_Union[Properties, _Mapping]] = ..., blake3: _Optional[bytes] = ..., absent: bool = ..., etag: _Optional[str] = ..., replaced: _Optional[_Union[Facts, _Mapping]] = ..., tags_only: bool = ...) -> None: ...

class WriteKeysRequest(_message.Message):
    __slots__ = ("profile_digest", "run", "writes")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    run: Run
    writes: _containers.RepeatedCompositeFieldContainer[KeyWrite]
    def __init__(self, profile_digest: _Optional[bytes] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., writes: _Optional[_Iterable[_Union[KeyWrite, _Mapping]]] = ...) -> None: ...

class WriteKeysResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[WriteResult]
    def __init__(self, results: _Optional[_Iterable[_Union[WriteResult, _Mapping]]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("profile_digest", "items", "run")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    items: bytes
    run: Run
    def __init__(self, profile_digest: _Optional[bytes] = ..., items: _Optional[bytes] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class DeleteRefusal(_message.Message):
    __slots__ = ("item", "error", "reason")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    item: int
    error: str
    reason: str
    def __init__(self, item: _Optional[int] = ..., error: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("deleted", "refused", "items", "total")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    refused: _containers.RepeatedCompositeFieldContainer[DeleteRefusal]
    items: int
    total: bytes
    def __init__(self, deleted: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[DeleteRefusal, _Mapping]]] = ..., items: _Optional[int] = ..., total: _Optional[bytes] = ...) -> None: ...

class PatchHeader(_message.Message):
    __slots__ = ("profile_digest", "key", "base_id", "result_size_bytes", "result_blake3", "properties", "run", "base")
    PROFILE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_BLAKE3_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    profile_digest: bytes
    key: str
    base_id: bytes
    result_size_bytes: int
    result_blake3: bytes
    properties: Properties
    run: Run
    base: Facts
    def __init__(self, profile_digest: _Optional[bytes] = ..., key: _Optional[str] = ..., base_id: _Optional[bytes] = ..., result_size_bytes: _Optional[int] = ..., result_blake3: _Optional[bytes] = ..., properties: _Optional[_Union[Properties, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., base: _Optional[_Union[Facts, _Mapping]] = ...) -> None: ...

class PatchPiece(_message.Message):
    __slots__ = ("header", "patch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PATCH_FIELD_NUMBER: _ClassVar[int]
    header: PatchHeader
    patch: Patch
    def __init__(self, header: _Optional[_Union[PatchHeader, _Mapping]] = ..., patch: _Optional[_Union[Patch, _Mapping]] = ...) -> None: ...

class Patch(_message.Message):
    __slots__ = ("offset", "old_bytes", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    OLD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    old_bytes: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., old_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PatchResult(_message.Message):
    __slots__ = ("facts", "items", "total")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    items: int
    total: bytes
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ..., items: _Optional[int] = ..., total: _Optional[bytes] = ...) -> None: ...
