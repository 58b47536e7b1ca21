"""What the Ozone Manager tells of buckets, keys, snapshots and its log, as values."""

from dataclasses import dataclass
from enum import Enum, IntEnum

# Entries of a key's metadata by which Ozone keeps what is no metadata of its user.
ETAG, UNFINISHED = "ETag", "hsyncClientId"
OWN_METADATA = frozenset({ETAG, UNFINISHED, "leaseRecovery", "gdprEnabled", "algorithm", "secret"})


class BucketLayout(IntEnum):
    """How a bucket keeps names; a number as on the wire."""

    LEGACY = 1
    FILE_SYSTEM_OPTIMIZED = 2
    """A tree of directories, which are renamed and deleted as one."""
    OBJECT_STORE = 3


@dataclass(frozen=True, slots=True)
class ManagerBucket:
    """A bucket as its OM describes it. Quotas are None where there is none; `acl` and
    `metadata` are sorted; `replication` is empty where the service's default counts,
    `encryption_key` where nothing is encrypted; `source` is the volume and bucket of
    which this one is a link.
    """

    volume: str
    bucket: str
    layout: BucketLayout
    object_id: int
    created_ms: int
    owner: str = ""
    acl: tuple[tuple[str, str], ...] = ()
    replication: str = ""
    quota_bytes: int | None = None
    quota_names: int | None = None
    used_bytes: int = 0
    used_names: int = 0
    is_versioned: bool = False
    encryption_key: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    source: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """One block of a key; `datanodes` are the addresses at which clients read it."""

    container_id: int
    local_id: int
    length_bytes: int
    datanodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """One key, as the OM describes it or has it in a row of its database.

    `name` is the whole key, in a row of an FSO bucket its last component. `etag` is
    empty where the writer was no S3 gateway. `update_id` is the Raft index of the last
    change of anything here. Metadata, tags and ACL are sorted. `is_finished` is False
    while a writer holds the key open after a flush.
    """

    volume: str
    bucket: str
    name: str
    size_bytes: int
    modified_ms: int
    object_id: int
    update_id: int
    parent_id: int = 0
    etag: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    acl: tuple[tuple[str, str], ...] = ()
    owner: str = ""
    replication: str = ""
    is_encrypted: bool = False
    is_finished: bool = True
    blocks: tuple[KeyBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class FileStatus:
    """An entry of a directory; of a directory only name and object ID count."""

    key: KeyFacts
    is_directory: bool


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A row of the table of directories of FSO buckets."""

    name: str
    object_id: int
    parent_id: int


@dataclass(frozen=True, slots=True)
class TransactionIndex:
    """A place in the log of Raft, which is one for all OMs of a service."""

    term: int
    index: int

    @classmethod
    def parse(cls, text: bytes) -> "TransactionIndex | None":
        """The place that `<term>#<index>` names; None where this is no such text."""
        term, mark, index = text.partition(b"#")
        is_number = term.isdigit() and index.isdigit() and max(len(term), len(index)) <= 20
        return cls(int(term), int(index)) if mark and is_number else None


@dataclass(frozen=True, slots=True)
class OzoneSnapshot:
    """A snapshot of a bucket; only an active one can be read."""

    volume: str
    bucket: str
    name: str
    snapshot_id: str
    created_ms: int
    is_active: bool
    transaction: TransactionIndex | None


class DiffKind(IntEnum):
    """What a difference of snapshots says of a path; a number as on the wire."""

    CREATE = 1
    MODIFY = 2
    DELETE = 3
    RENAME = 4


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One entry; `target` is the new path where the kind is RENAME. In a bucket that is
    no FSO bucket paths lack slashes which the keys have.
    """

    kind: DiffKind
    path: str
    target: str = ""


class DiffState(Enum):
    """How far the OM is with a difference of snapshots."""

    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"
    """It was refused, cancelled or failed: it must be submitted again."""


@dataclass(frozen=True, slots=True)
class DiffPage:
    """A part of a difference; `token` is where the next begins, empty at the end."""

    state: DiffState
    entries: tuple[DiffEntry, ...] = ()
    token: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ManagerNode:
    """An OM of a service, and the version of its protocol."""

    node_id: str
    is_leader: bool
    version: int


@dataclass(frozen=True, slots=True)
class Updates:
    """Write batches of the OM's database, oldest first, and its newest sequence
    number.
    """

    batches: tuple[bytes, ...]
    newest: int
