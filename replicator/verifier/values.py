"""What passes between a syncer and a verifier, as values."""

from dataclasses import dataclass

from merkle.errors import ReconcileError
from proof.index import EvidenceCounts
from proof.item import ItemId, Profile
from proof.root import SetRoot
from replicator.stores.port import ObjectProperties


class WritesRefusedError(ReconcileError):
    """The verifier was not told to take writes."""

    code = "writes_refused"
    exit_status = 6


# Of the name of a pair, and of a run.
RUN_BYTES = 8
# An object beyond this is uploaded in parts, not in a batch.
BODY_BYTES_MAX = 1 << 20
# One batch stays below the limit of a message.
BATCH_BYTES_MAX = 4 << 20
WRITES_MAX = 1_000
# Of one call; a verifier looks at each object in its store.
DELETES_MAX = 1_000
PATCH_BYTES_MAX = 1 << 20
PATCHES_MAX = 8_192
# All patches of one object are held in memory; a larger change is copied instead.
PATCHED_BYTES_MAX = 64 << 20
BLAKE3_BYTES = 32


@dataclass(frozen=True, slots=True)
class IndexState:
    """What a verifier's index knows of its bucket. `listed_at_s` is when its last
    whole listing began, None before the first. `settled` is the root of what the bucket
    held when the refresh began that this answers, None where that is not known.
    `damaged` are hashes of keys (KEY_HASH_BYTES): those of which that refresh says that
    their bytes are not those that were recorded.
    """

    position: int
    evidence: EvidenceCounts
    listed_at_s: int | None
    settled: SetRoot | None = None
    damaged: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class RunName:
    """One run of the syncs of a pair of buckets, by RUN_BYTES each."""

    pair: bytes
    run: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What a verifier says of itself. Unless its store lists all keys, equality cannot
    be shown. Unless it enforces roles, whoever reaches its port may call it.
    """

    address: str
    takes_writes: bool
    profile: Profile
    index: IndexState
    lists_all_keys: bool
    roles_enforced: bool


@dataclass(frozen=True, slots=True)
class Write:
    """One change of a key: an object of at most BODY_BYTES_MAX, or with None its new
    properties only.

    `blake3` is of the body, empty without one. `replaced_id` is the ID of the item that
    this change replaces, None where there must be none.
    """

    key: str
    body: bytes | None
    properties: ObjectProperties
    blake3: bytes
    replaced_id: ItemId | None


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What became of one write: an error's code and message, or the new stamp."""

    error: str = ""
    reason: str = ""
    etag: str = ""
    modified_ms: int = 0
    version: str = ""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch, and the root of the target after it."""

    number: int
    results: tuple[WriteOutcome, ...]
    root: SetRoot


@dataclass(frozen=True, slots=True)
class DeleteRefusal:
    """Why the item at a place of a request was not deleted."""

    place: int
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteAnswer:
    """Items that were not deleted, and the root of the target after the request."""

    refusals: tuple[DeleteRefusal, ...]
    root: SetRoot


@dataclass(frozen=True, slots=True)
class RangePatch:
    """`old_bytes` of the base from `offset` on are replaced by `data`."""

    offset: int
    old_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PatchOrder:
    """Replace ranges of one object: its key, the item that it must be, and what must
    come out.
    """

    key: str
    base_id: ItemId
    result_size_bytes: int
    result_blake3: bytes
    properties: ObjectProperties
