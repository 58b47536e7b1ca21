"""What is asked of an object store: read, list, write, upload, feed, snapshots, rename.

Each port is narrow, and an adapter says in its capabilities what its store lacks. An
ETag is opaque here: whatever proves content stands in `ObjectFacts.hashes`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

from merkle.checksum import Buffer
from proof.item import ContentHash
from replicator.stores.bucket_facts import BucketDescriber
from replicator.stores.capabilities import Capabilities
from runtime.traffic import Traffic

UploadId = NewType("UploadId", str)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """One version of a key, as the store describes it.

    `etag`, `version` and `modified_ms` form the stamp: while it is the same, so are the
    bytes and properties, though S3 shows no change of tags or ACL. What a store does
    not say is empty: S3 gives no time with the answer to a write, no version in a
    listing of current objects, and whole seconds with an object's headers. So stamps
    are compared by `same_stamp`. `hashes` are those over the whole object that the
    store recorded, by algorithms that its probe trusts.
    """

    key: str
    size_bytes: int
    etag: str
    modified_ms: int
    version: str = ""
    is_delete_marker: bool = False
    hashes: tuple[ContentHash, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectProperties:
    """What crosses beside the bytes; each group is sorted by name.

    `metadata` is the user's, with lower-case names and no prefix. `headers` are content
    headers (content-type, cache-control, content-disposition, content-encoding,
    content-language, expires). `acl` is a sorted list of grantee and permission. An
    empty one is whatever the store gives to new objects, unless `replaces_acl`.
    """

    metadata: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    acl: tuple[tuple[str, str], ...] = ()
    replaces_acl: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for group in (self.metadata, self.tags, self.headers, self.acl):
            assert list(group) == sorted(group)


@dataclass(frozen=True, slots=True)
class WholeObject:
    """All bytes of one version, and its properties: without ACL unless `has_acl`."""

    properties: ObjectProperties
    body: bytes
    has_acl: bool = True


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """What must hold of the key when the write takes effect; all empty for anything.

    An adapter raises PreconditionFailedError where its store can check this, and says
    in its capabilities where it cannot.
    """

    absent: bool = False
    etag: str = ""


@dataclass(frozen=True, slots=True)
class CopySource:
    """A range of an object of the same store, `first` to `end` exclusive, in bytes.

    `etag` pins the object's bytes where the store keeps no versions.
    """

    key: str
    version: str
    etag: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part of a multipart upload, as the store has it."""

    number: int
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that was not deleted, and why."""

    key: str
    reason: str


class ChangeKind(Enum):
    """What happened to a key."""

    PUT = "put"
    """It has other bytes or properties, or is new."""
    DELETE = "delete"
    RENAME = "rename"
    """The object of another key got this one, and that key is free."""
    DELETE_PREFIX = "delete_prefix"
    """Everything below this key, which ends with a slash, was deleted."""
    RENAME_PREFIX = "rename_prefix"


@dataclass(frozen=True, slots=True)
class FeedPosition:
    """A place in the log of a store's changes. Indexes ascend within one log; positions
    of two logs cannot be compared. A restored database, or another server that answers,
    is another log.
    """

    log: str
    index: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change; `index` is its place in the log, and 0 where it was found otherwise.

    `previous_key` is what a renamed object or prefix was called. `facts` describe the
    object after the change where the log tells them. `time_ms` is when the store
    recorded it, in ms since the epoch, and 0 where it does not say.
    """

    index: int
    key: str
    version: str
    kind: ChangeKind
    previous_key: str = ""
    facts: ObjectFacts | None = None
    time_ms: int = 0

    def __post_init__(self) -> None:
        is_rename = self.kind in (ChangeKind.RENAME, ChangeKind.RENAME_PREFIX)
        assert is_rename == bool(self.previous_key)


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes in the order of their indexes, some of which may be equal: such changes
    took effect together. `position` is where to read on; `newest_index` is that of the
    newest change when the store was asked. A change that was answered up to `delay_ms`
    before may be missing still.
    """

    changes: tuple[Change, ...]
    position: FeedPosition
    newest_index: int
    delay_ms: int = 0

    def __post_init__(self) -> None:
        indexes = [change.index for change in self.changes]
        assert indexes == sorted(indexes)
        assert not indexes or indexes[-1] <= self.position.index


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot of a bucket. `position` is that of the newest change in it, None where
    the store cannot tell. A name can be used again; `snapshot_id` cannot.
    """

    name: str
    snapshot_id: str
    position: FeedPosition | None
    created_ms: int


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """What a snapshot holds, by the keys of the bucket."""

    lister: "ObjectLister"
    reader: "ObjectReader"


class ObjectLister(Protocol):
    """Lists a store."""

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """Current objects below a prefix in ascending order of their keys' UTF-8 bytes,
        after `start_after`: every one of them, or an error.

        Raises:
            StoreError: the listing is not complete.
        """

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """All versions and delete markers below a prefix: keys ascend, of one key the
        newest comes first.

        Raises:
            StoreError: the listing is not complete.
        """


class ObjectReader(Protocol):
    """Reads objects and what is known of them."""

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """The object as the store has it now, None where it does not exist or the
        version is a delete marker.

        Raises:
            StoreError: the store did not say.
        """

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """Metadata, tags, headers and ACL.

        Raises:
            ObjectMissingError: the object does not exist.
            StoreError: the store did not say.
        """

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """Metadata, tags, headers and ACL of just this version.

        Raises:
            PreconditionFailedError: the object is another one by now.
            ObjectMissingError: the object does not exist.
            StoreError: the store did not say.
        """

    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes `first` to `end` (exclusive) of just this version, in pieces.

        Raises:
            PreconditionFailedError: the object is another one by now.
            StoreError: fewer bytes came.
        """

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """Bytes and properties of just this version, which fits in memory, in as few
        requests as the store allows: without the ACL, if that takes one, unless it is
        wanted.

        Raises:
            PreconditionFailedError: the object is another one by now.
            ObjectMissingError: the object does not exist.
            StoreError: the store did not say, or fewer bytes came.
        """


class ObjectWriter(Protocol):
    """Changes whole objects."""

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """Write one object in one request, protected by a digest that the store checks.

        Raises:
            UnsupportedObjectError: the store would change or drop a part of this.
            PreconditionFailedError: the condition does not hold; nothing was written.
            DigestMismatchError: the store received other bytes; nothing was written.
            StoreError: the store refused.
        """

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """Replace the properties of this object; no byte of its data crosses.

        With `tags_only` the caller knows that all but the tags are equal already: one
        request does it. An S3 store without versions then cannot tell whether the
        object is still this one.

        Raises:
            PreconditionFailedError: the object is another one by now.
            StoreError: the store refused, or cannot do this.
        """

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """Delete current objects in bulk; a missing one counts as deleted.

        Raises:
            StoreError: it is not known which were deleted.
        """


class UploadWriter(Protocol):
    """Writes one object in parts."""

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """Begin an upload. The object appears when it is completed.

        Raises:
            UnsupportedObjectError: the store would change or drop a part of this.
            StoreError: the store refused.
        """

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """Write part `number` (from 1), protected by a digest that the store checks.
        Without it the caller proves all parts by their ETags before it completes them:
        an MD5 takes most of the CPU of a part.

        Raises:
            ObjectMissingError: the upload does not exist any more.
            StoreError: the store refused.
        """

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """Make a part from a range of an object inside the store.

        Raises:
            PreconditionFailedError: the source is another object by now.
            StoreError: the store refused, or cannot do this.
        """

    def complete(
        self,
        key: str,
        upload: UploadId,
        parts: Sequence[UploadedPart],
        properties: ObjectProperties,
        condition: WriteCondition,
        whole: ContentHash | None = None,
    ) -> ObjectFacts:
        """Make the object from its parts, in the order of their numbers, whatever the
        order of `parts`. `properties` are those given to `begin`: some stores drop the
        tags there, and take them only once the object exists. `whole` is the hash of
        all bytes by `upload_crc`, which the store compares.

        Raises:
            DigestMismatchError: the parts are not the bytes of which `whole` is the
                hash; there is no object.
            ObjectMissingError: the upload does not exist any more, or one of these
                parts is not the one that the store has.
            PreconditionFailedError: the condition does not hold.
            StoreError: the store refused.
        """

    def abort(self, key: str, upload: UploadId) -> None:
        """Give an upload up; one that does not exist is not an error.

        Raises:
            StoreError: the store refused.
        """


class PieceWriter(Protocol):
    """Writes what arrives in pieces: objects whose MD5 is known before their bytes, and
    parts that their sender proves afterwards.
    """

    def put_pieces(
        self,
        facts: ObjectFacts,
        md5: bytes,
        pieces: Iterable[Buffer],
        properties: ObjectProperties,
        condition: WriteCondition,
    ) -> ObjectFacts:
        """Write an object of the key and size of `facts` in one request, tried once, as
        its pieces arrive. The store makes no object of bytes with another MD5. An error
        of `pieces` before the last one ends the request, and there is no object.

        Raises:
            DigestMismatchError: the bytes have another MD5; nothing was written.
            UnsupportedObjectError: the store would change or drop a part of this.
            PreconditionFailedError: the condition does not hold; nothing was written.
            StoreUnavailableError: it may have been written.
            StoreError: the store refused.
        """

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """Write a part of this length in one request, tried once, without a digest. An
        error of `pieces` ends the request, and there is no part.

        Raises:
            ObjectMissingError: the upload does not exist.
            StoreUnavailableError: it may have been written.
            StoreError: the store refused.
        """


class UploadReader(Protocol):
    """Finds what an interrupted upload has left."""

    def uploads(self, prefix: str) -> Iterator[tuple[str, UploadId]]:
        """Key and ID of each upload below a prefix that was neither completed nor
        aborted.

        Raises:
            StoreError: the listing is not complete.
        """

    def parts(self, key: str, upload: UploadId) -> Iterator[UploadedPart]:
        """The parts that the store has, by number.

        Raises:
            ObjectMissingError: the upload does not exist any more.
            StoreError: the listing is not complete.
        """


class ScratchSpace(Protocol):
    """Where parts of a stitched object are made: out of sight of every listing."""

    def new_key(self) -> str:
        """A key that nobody else uses; the upload ports take it as any other."""

    def discard(self, made: Sequence[ObjectFacts]) -> None:
        """Delete scratch objects, each in just this version.

        Raises:
            StoreError: one may be left; `clean` removes it later.
        """

    def clean(self, *, before_ms: int) -> int:
        """Delete what killed processes left before this time, in ms since the epoch;
        returns how many objects and uploads.

        Raises:
            StoreError: some may be left.
        """


class ChangeFeed(Protocol):
    """The changes of a store, in order."""

    def position(self) -> FeedPosition:
        """The position of the newest change in the log. A change may be answered, and
        seen, before it is there.

        Raises:
            StoreError: the store did not say.
        """

    def settled_position(self) -> FeedPosition:
        """A position that no change is after which was answered or seen before.

        Raises:
            FeedGapError: the store has shown changes that its log still lacks.
            StoreError: the store did not say.
        """

    def read(self, after: FeedPosition) -> ChangeBatch:
        """A page of the changes after a position, oldest first; where there is none
        the batch has no changes. Changes with one index are never torn apart.

        Raises:
            PositionTrimmedError: changes since then are no longer kept.
            FeedGapError: the position is of another log, or beyond the newest change.
            StoreError: the store did not say.
        """


class SnapshotStore(Protocol):
    """Snapshots of a bucket: what it held at one moment, whatever is written later."""

    def create(self, name: str) -> SnapshotFacts:
        """Make a snapshot of the bucket as it is now.

        Raises:
            PreconditionFailedError: there is one of this name.
            StoreError: the store refused, or did not answer.
        """

    def find(self, name: str) -> SnapshotFacts | None:
        """The snapshot of this name; None where it does not exist or can no longer be
        read.

        Raises:
            StoreError: the store did not say.
        """

    def named(self, prefix: str) -> Iterator[SnapshotFacts]:
        """All snapshots whose names begin with `prefix` and that can be read.

        Raises:
            StoreError: the list is not complete.
        """

    def open(self, snapshot: SnapshotFacts) -> SnapshotView:
        """What the snapshot holds. Its methods raise SnapshotLostError once it is gone:
        it never looks empty.
        """

    def difference(self, older: SnapshotFacts, newer: SnapshotFacts) -> Iterator[Change]:
        """What leads from the older to the newer one, in no stated order: each key is
        named as often as something happened to it.

        Raises:
            SnapshotLostError: one of them is gone.
            StoreError: the store cannot tell.
        """

    def delete(self, name: str) -> None:
        """Delete a snapshot; one that does not exist is not an error.

        Raises:
            StoreError: the store refused, or did not answer.
        """


class ObjectRenamer(Protocol):
    """Renames objects inside the store: no byte of them crosses."""

    def rename(self, facts: ObjectFacts, key: str) -> ObjectFacts:
        """Give this object another key, which no object has.

        Raises:
            PreconditionFailedError: the object is another one by now, or there is one
                of that key.
            StoreError: the store refused.
        """


@dataclass(frozen=True, slots=True)
class Store:
    """One store by its ports. `feed` is None where the store has none, `scratch` where
    it cannot make a part of a new object from a range of an old one, `piece_writer`
    where it was not seen to refuse a body with another MD5, `snapshots` and `renamer`
    where it has no snapshots and cannot rename, `bucket` where it knows nothing of
    buckets as a whole. `traffic` is what has crossed the connection to it so far; None
    where there is no connection.
    """

    address: str
    capabilities: Capabilities
    lister: ObjectLister
    reader: ObjectReader
    writer: ObjectWriter
    upload_writer: UploadWriter
    upload_reader: UploadReader
    feed: ChangeFeed | None = None
    scratch: ScratchSpace | None = None
    piece_writer: PieceWriter | None = None
    snapshots: SnapshotStore | None = None
    renamer: ObjectRenamer | None = None
    bucket: BucketDescriber | None = None
    traffic: Callable[[], Traffic] | None = None
