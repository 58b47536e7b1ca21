"""What passes between a syncer and a verifier, as values."""

from dataclasses import dataclass

from merkle.errors import ReconcileError
from proof.index import EvidenceCounts
from proof.item import ItemId, Profile
from proof.root import SetRoot
from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition


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
_NO_PROPERTIES = ObjectProperties()
_ANYTHING = WriteCondition()


@dataclass(frozen=True, slots=True)
class IndexState:
    """What a verifier's index knows of its bucket. `listed_at_s` is when its last
    whole listing began, None before the first. `settled` is the root of what the bucket
    held when the refresh began that this answers, None where that is not known.
    `damaged` are hashes of keys (KEY_HASH_BYTES): those of which that refresh says that
    their bytes are not those that were recorded. `unsettled` is how many keys that
    refresh could not describe, since they changed under each look; None if it does not
    say.
    """

    position: int
    evidence: EvidenceCounts
    listed_at_s: int | None
    settled: SetRoot | None = None
    damaged: frozenset[bytes] = frozenset()
    unsettled: int | None = None


@dataclass(frozen=True, slots=True)
class RunName:
    """One run of the syncs of a pair of buckets, by RUN_BYTES each. `epoch` is that of
    the lease by which it writes, 0 without one.
    """

    pair: bytes
    run: bytes
    epoch: int = 0


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
class KeyWrite:
    """What becomes of one key of the store: an object of at most BODY_BYTES_MAX, with
    `replaced` new properties of that object, or else nothing: it is deleted.

    `blake3` is of the body, empty without one. `condition` must hold for a body; where
    the store cannot check it, the verifier looks just before. `tags_only` is as for
    ObjectWriter.put_properties.
    """

    key: str
    body: bytes | None = None
    properties: ObjectProperties = _NO_PROPERTIES
    blake3: bytes = b""
    condition: WriteCondition = _ANYTHING
    replaced: ObjectFacts | None = None
    tags_only: bool = False

    @property
    def deletes(self) -> bool:
        """Whether the key is deleted."""
        return self.body is None and self.replaced is None


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What became of one write: an error's code and message, or the new stamp, of which
    a delete has none.
    """

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
    """Replace ranges of one object: its key, what it must be, by the ID of its item or
    by the facts of its store, and what must come out.
    """

    key: str
    base: ItemId | ObjectFacts
    result_size_bytes: int
    result_blake3: bytes
    properties: ObjectProperties
