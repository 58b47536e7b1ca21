"""A store in memory, with switches for what real ones lack, and faults.

Faults are decided by `StoreFaults.before` and `after`, called with the name of each
operation: what they raise reaches the caller instead of the answer, without or with the
effect. Times come from a clock that a test may set back.
"""

import hashlib
import string
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from merkle.checksum import Buffer
from merkle.object_checksum import Crc
from proof.item import ContentHash, HashAlgorithm
from replicator.hashing import ContentHasher, crc_hash
from replicator.stores.capabilities import CONTENT_HEADERS, Capabilities
from replicator.stores.errors import (
    DigestMismatchError,
    FeedGapError,
    ObjectMissingError,
    PositionTrimmedError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.port import (
    Change,
    ChangeBatch,
    ChangeKind,
    CopySource,
    DeleteFailure,
    FeedPosition,
    ObjectFacts,
    ObjectProperties,
    SnapshotFacts,
    SnapshotView,
    Store,
    UploadedPart,
    UploadId,
    WholeObject,
    WriteCondition,
)
from replicator.stores.stamps import same_stamp
from replicator.syncer.store_health import HEALTH_PREFIX

MEMORY = Capabilities(
    kind="memory",
    keeps_versions=False,
    keeps_tags=True,
    keeps_acls=True,
    keeps_headers=True,
    creates_conditionally=True,
    replaces_conditionally=True,
    completes_conditionally=True,
    copies_ranges=True,
    lists_all_keys=True,
    part_bytes_min=0,
    metadata_bytes_max=2048,
    whole_hashes=(HashAlgorithm.MD5.value,),
    stamps_cover_properties=False,
    part_etags_are_md5=True,
)
# As Ozone's gateway: an ETag says nothing, and nothing else says more.
UNPROVEN = replace(MEMORY, whole_hashes=(), part_etags_are_md5=False, keeps_acls=False)
# As old Ceph: a write asks for no condition.
UNGUARDED = replace(
    MEMORY,
    creates_conditionally=False,
    replaces_conditionally=False,
    completes_conditionally=False,
)
# Parts as S3 wants them, but smaller.
STITCHING = replace(MEMORY, part_bytes_min=60 << 10)
# As stores that keep a CRC of the whole of what is uploaded in parts.
DECLARING = replace(MEMORY, upload_crc=HashAlgorithm.CRC64NVME.value)
SCRATCH = ".treefold-scratch/"
PLAIN = replace(
    UNGUARDED,
    whole_hashes=(),
    part_etags_are_md5=False,
    keeps_tags=False,
    copies_ranges=False,
)
# Few, so that a log has many pages.
_PAGE_CHANGES = 20
_PROPERTIES_BYTES_MAX = 64 << 10
_NAME_CHARACTERS = set(string.ascii_lowercase + string.digits + "!#$%&'*+.^_`|~-")


@dataclass
class StoreFaults:
    """Called before and after each operation with its name and key."""

    before: Callable[[str, str], None] = lambda _operation, _key: None
    after: Callable[[str, str], None] = lambda _operation, _key: None


@dataclass(frozen=True)
class MemoryObject:
    """What the store has of one key."""

    facts: ObjectFacts
    body: bytes
    properties: ObjectProperties


@dataclass
class MemoryUpload:
    """An upload that is not complete."""

    key: str
    properties: ObjectProperties
    parts: dict[int, tuple[UploadedPart, bytes]] = field(default_factory=dict)


class MemoryStore:
    """All ports of one store. Thread-safe.

    With `says_little`, answers to writes have no time, as those of S3 do. With
    `has_feed` its changes can be read. With `takes_pieces` it is a PieceWriter, too.
    `payload` are the object bytes that were written
    from outside, `undigested` the parts of them that came without a digest, `calls` the
    operations by name, `deleted` the keys of bulk deletes. Keys in `lost` are listed,
    and do not exist.
    """

    def __init__(
        self,
        address: str = "memory:a",
        capabilities: Capabilities = MEMORY,
        *,
        now_ms: Callable[[], int] | None = None,
        says_little: bool = False,
        has_feed: bool = False,
        takes_pieces: bool = False,
        page_keys: int = 3,
        has_snapshots: bool = False,
        renames: bool = False,
    ) -> None:
        self.address = address
        self.capabilities = capabilities
        self.objects: dict[str, MemoryObject] = {}
        self.uploading: dict[UploadId, MemoryUpload] = {}
        self.faults = StoreFaults()
        self.lost = set[str]()
        self.payload = 0
        self.undigested = 0
        self.deleted: list[str] = []
        self.deleting: tuple[str, ...] = ()
        self.calls: list[str] = []
        self._says_little = says_little
        self._has_feed = has_feed
        self._takes_pieces = takes_pieces
        self._page_keys = page_keys
        self._has_snapshots = has_snapshots
        self._renames = renames
        self._changes: list[Change] = []
        self.snapshots: dict[str, tuple[SnapshotFacts, dict[str, MemoryObject]]] = {}
        self.snapshots_made = 0
        self.describes_changes = False
        # A test trims the log, or puts another in its place.
        self.log = "memory"
        self.trimmed = 0
        self._now_ms = now_ms or self._tick
        self._ticks = 1_700_000_000_000
        self._begun = 0
        self._lock = threading.RLock()

    def store(self) -> Store:
        """The store by its ports."""
        return Store(
            self.address,
            self.capabilities,
            self,
            self,
            self,
            self,
            self,
            feed=MemoryFeed(self) if self._has_feed else None,
            scratch=self if self.capabilities.part_bytes_min else None,
            piece_writer=self if self._takes_pieces else None,
            snapshots=MemorySnapshots(self) if self._has_snapshots else None,
            renamer=self if self._renames else None,
        )

    @property
    def newest_index(self) -> int:
        """How many changes there were."""
        return len(self._changes)

    @property
    def changes(self) -> list[Change]:
        """What its log has had so far."""
        return self._changes

    def write(
        self,
        key: str,
        body: bytes,
        properties: ObjectProperties | None = None,
        *,
        parts: int = 1,
    ) -> ObjectFacts:
        """Write an object as somebody else does: without faults, not counted; with the
        ETag of so many parts.
        """
        with self._lock:
            etag = hashlib.md5(body).hexdigest() + (f"-{parts}" if parts > 1 else "")
            return self._keep(key, body, properties or ObjectProperties(), etag)

    def remove(self, key: str) -> None:
        """Delete an object as somebody else does."""
        with self._lock:
            self._drop(key)

    def touch(self, key: str, properties: ObjectProperties) -> None:
        """Replace properties as somebody else does, so that no stamp shows it."""
        with self._lock:
            self.objects[key] = replace(self.objects[key], properties=properties)
            self._note(key)

    def bodies(self) -> dict[str, bytes]:
        """The bytes of each key."""
        with self._lock:
            return {key: one.body for key, one in sorted(self.objects.items())}

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister; pages of few keys, so that writers come between."""
        after = start_after
        while True:
            with self._operation("list", prefix), self._lock:
                below = (key for key in self.objects if key.startswith(prefix))
                keys = sorted(key for key in below if key > after and SCRATCH not in key)
                page = [self.objects[key].facts for key in keys[: self._page_keys]]
            yield from page
            if len(page) < self._page_keys:
                return
            after = page[-1].key

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister: there are current objects only."""
        return self.list_objects(prefix)

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        del version
        with self._operation("facts", key), self._lock:
            found = self.objects.get(key)
            return found.facts if found and key not in self.lost else None

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        del version
        with self._operation("properties", key), self._lock:
            if key not in self.objects or key in self.lost:
                raise ObjectMissingError(f"no {key}")
            return self.objects[key].properties

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader; as S3 does it, other requests may come between the two."""
        properties = self.properties(facts.key)
        now = self.facts(facts.key)
        if now is None:
            raise ObjectMissingError(f"no {facts.key}")
        if not same_stamp(now, facts):
            raise PreconditionFailedError(f"{facts.key} changed")
        return properties

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader; pinned by the ETag, as S3 does it."""
        with self._operation("read", facts.key), self._lock:
            found = self.objects.get(facts.key)
            if found is None or facts.key in self.lost:
                raise ObjectMissingError(f"no {facts.key}")
            if found.facts.etag != facts.etag:
                raise PreconditionFailedError(f"{facts.key} changed")
            last = len(found.body) if end is None else end
            if not 0 <= first <= last <= len(found.body):
                raise StoreError(f"{first} to {last} are no range of it")
            body = found.body[first:last]
        middle = len(body) // 2
        yield iter([body[:middle], body[middle:]])

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader; as S3 does it, other requests may come between."""
        properties = self.properties_of(facts)
        if not with_acl:
            properties = replace(properties, acl=())
        with self.read(facts) as pieces:
            return WholeObject(properties, b"".join(pieces), with_acl)

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        _check_given(key, properties)
        with self._operation("put", key), self._lock:
            is_new = key not in self.objects
            self._check(
                key,
                condition,
                obeys=self.capabilities.creates_conditionally
                if is_new or condition.absent
                else self.capabilities.replaces_conditionally,
            )
            self.payload += len(body)
            etag = hashlib.md5(body).hexdigest()
            return self._answer(self._keep(key, bytes(body), properties, etag))

    def put_pieces(
        self,
        facts: ObjectFacts,
        md5: bytes,
        pieces: Iterable[Buffer],
        properties: ObjectProperties,
        condition: WriteCondition,
    ) -> ObjectFacts:
        """See PieceWriter."""
        _check_given(facts.key, properties)
        with self._operation("put_pieces", facts.key):
            body = b""
            for piece in pieces:
                self.payload += len(piece)
                body += piece
            with self._lock:
                self._check(facts.key, condition, obeys=self.capabilities.creates_conditionally)
                assert len(body) == facts.size_bytes
                if self.arrived(body) != md5:
                    raise DigestMismatchError(f"{facts.key} has another MD5")
                made = self._keep(facts.key, body, properties, md5.hex())
                return self._answer(made)

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """See PieceWriter."""
        _check_number(number)
        with self._operation("write_part_pieces", key):
            body = b""
            for piece in pieces:
                self.payload += len(piece)
                body += piece
            with self._lock:
                assert len(body) == length_bytes
                self.undigested += 1
                part = UploadedPart(number, length_bytes, self.arrived(body).hex())
                return self._add(upload, part, body)

    def arrived(self, body: bytes) -> bytes:
        """The MD5 of what has arrived."""
        return hashlib.md5(body).digest()

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter; tags alone change no stamp, as in S3."""
        _check_given(facts.key, properties)
        with self._operation("put_properties", facts.key), self._lock:
            found = self.objects.get(facts.key)
            if found is None or found.facts.etag != facts.etag:
                raise PreconditionFailedError(f"{facts.key} changed")
            if tags_only:
                kept = replace(found.properties, tags=properties.tags)
                self.objects[facts.key] = replace(found, properties=kept)
                self._note(facts.key)
                return self._answer(found.facts)
            return self._answer(self._keep(facts.key, found.body, properties, facts.etag))

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        self.deleting = tuple(keys)
        with self._operation("delete", ""), self._lock:
            for key in keys:
                self._drop(key)
            self.deleted += keys
            return []

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        _check_given(key, properties)
        with self._operation("begin", key), self._lock:
            self._begun += 1
            upload = UploadId(f"upload-{self._begun}")
            self.uploading[upload] = MemoryUpload(key, properties)
            return upload

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """See UploadWriter."""
        _check_number(number)
        with self._operation("write_part", key), self._lock:
            self.undigested += not with_digest
            # A question whether the store answers is of no object.
            self.payload += 0 if key.startswith(HEALTH_PREFIX) else len(body)
            etag = hashlib.md5(body).hexdigest()
            return self._add(upload, UploadedPart(number, len(body), etag), bytes(body))

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter; without declared hashes the ETag is that of the whole
        source, as Ozone's gateway answers.
        """
        with self._operation("copy_part", key), self._lock:
            if not self.capabilities.copies_ranges:
                raise StoreError("not implemented")
            _check_number(number)
            found = self.objects.get(source.key)
            if found is None:
                raise ObjectMissingError(f"no {source.key}")
            if source.etag not in ("", found.facts.etag):
                raise PreconditionFailedError(f"{source.key} is another object")
            if not 0 <= source.first < source.end <= len(found.body):
                raise UnsupportedObjectError(f"{source.first} to {source.end} are no range of it")
            body = found.body[source.first : source.end]
            etag = hashlib.md5(body).hexdigest()
            if not self.capabilities.whole_hashes:
                etag = found.facts.etag
            return self._add(upload, UploadedPart(number, len(body), etag), body)

    def complete(
        self,
        key: str,
        upload: UploadId,
        parts: Sequence[UploadedPart],
        properties: ObjectProperties,
        condition: WriteCondition,
        whole: ContentHash | None = None,
    ) -> ObjectFacts:
        """See UploadWriter."""
        with self._operation("complete", key), self._lock:
            known = self._upload(upload)
            self._check(key, condition, obeys=self.capabilities.completes_conditionally)
            ordered = sorted(parts, key=lambda part: part.number)
            if len({part.number for part in parts}) < max(len(parts), 1):
                raise StoreError("no parts, or one of them twice")
            if any(known.parts.get(part.number, (None,))[0] != part for part in ordered):
                raise ObjectMissingError("no such part")
            small = [part for part in ordered[:-1] if part.size_bytes < self._part_bytes_min]
            if small:
                raise StoreError(f"EntityTooSmall: part {small[0].number}")
            body = b"".join(known.parts[part.number][1] for part in ordered)
            crc = self.capabilities.upload_crc
            declared = (crc_hash(Crc[crc.upper()], body),) if crc else ()
            if whole is not None and whole not in declared:
                raise DigestMismatchError(f"{key}: the parts are other bytes")
            if self.capabilities.whole_hashes:
                joined = b"".join(bytes.fromhex(part.etag) for part in ordered)
            else:
                joined = "".join(part.etag for part in ordered).encode()
            del self.uploading[upload]
            etag = f"{hashlib.md5(joined).hexdigest()}-{len(ordered)}"
            return self._answer(self._keep(key, body, properties, etag, declared))

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        with self._operation("abort", key), self._lock:
            self.uploading.pop(upload, None)

    def uploads(self, prefix: str) -> Iterator[tuple[str, UploadId]]:
        """See UploadReader."""
        with self._operation("uploads", prefix), self._lock:
            found = [(one.key, name) for name, one in self.uploading.items()]
        yield from sorted(one for one in found if one[0].startswith(prefix))

    def parts(self, key: str, upload: UploadId) -> Iterator[UploadedPart]:
        """See UploadReader."""
        with self._operation("parts", key), self._lock:
            found = [part for _, (part, _) in sorted(self._upload(upload).parts.items())]
        yield from found

    def new_key(self) -> str:
        """See ScratchSpace."""
        return f"{SCRATCH}{len(self.calls)}"

    def discard(self, made: Sequence[ObjectFacts]) -> None:
        """See ScratchSpace."""
        self.delete([facts.key for facts in made])

    def clean(self, *, before_ms: int) -> int:
        """See ScratchSpace; a test has no other users of it."""
        del before_ms
        left = [key for key in self.objects if SCRATCH in key]
        self.delete(left)
        for upload in [name for name, one in self.uploading.items() if SCRATCH in one.key]:
            self.abort("", upload)
        return len(left)

    def rename(self, facts: ObjectFacts, key: str) -> ObjectFacts:
        """See ObjectRenamer."""
        with self._operation("rename", facts.key), self._lock:
            found = self.objects.get(facts.key)
            if found is None or found.facts.etag != facts.etag or key in self.objects:
                raise PreconditionFailedError(f"{facts.key} or {key} changed")
            self.move(facts.key, key)
            return self.objects[key].facts

    def move(self, key: str, other: str) -> None:
        """Rename an object, or all below a prefix, as somebody else does; what had the
        new name must be gone.
        """
        with self._lock:
            names = {one: other + one[len(key) :] for one in self.objects if one.startswith(key)}
            for old, new in names.items() if key.endswith("/") else [(key, other)]:
                found = self.objects.pop(old)
                moved = replace(found.facts, key=new, modified_ms=self._now_ms())
                self.objects[new] = replace(found, facts=moved)
            kind = ChangeKind.RENAME_PREFIX if key.endswith("/") else ChangeKind.RENAME
            self._changes.append(self._change(other, kind, key))

    def remove_below(self, prefix: str) -> None:
        """Delete all below a prefix in one change, as somebody else does."""
        with self._lock:
            for key in [one for one in self.objects if one.startswith(prefix)]:
                del self.objects[key]
            self._changes.append(self._change(prefix, ChangeKind.DELETE_PREFIX))

    @property
    def _part_bytes_min(self) -> int:
        return self.capabilities.part_bytes_min

    @contextmanager
    def _operation(self, name: str, key: str) -> Iterator[None]:
        with self._lock:
            self.calls.append(name)
        self.faults.before(name, key)
        yield
        self.faults.after(name, key)

    def _check(self, key: str, condition: WriteCondition, *, obeys: bool) -> None:
        found = self.objects.get(key)
        if not obeys:
            return
        if condition.absent and found is not None:
            raise PreconditionFailedError(f"{key} exists")
        if condition.etag and (found is None or found.facts.etag != condition.etag):
            raise PreconditionFailedError(f"{key} is another object")

    def _keep(
        self,
        key: str,
        body: bytes,
        properties: ObjectProperties,
        etag: str,
        hashes: tuple[ContentHash, ...] = (),
    ) -> ObjectFacts:
        hasher = ContentHasher()
        hasher.update(body)
        if self.capabilities.whole_hashes:
            hashes += tuple(one for one in hasher.hashes() if one.algorithm is HashAlgorithm.MD5)
        facts = ObjectFacts(key, len(body), etag, self._now_ms(), hashes=hashes)
        kept = replace(
            properties,
            tags=properties.tags if self.capabilities.keeps_tags else (),
            headers=properties.headers if self.capabilities.keeps_headers else (),
            acl=properties.acl if self.capabilities.keeps_acls else (),
        )
        self.objects[key] = MemoryObject(facts, body, kept)
        self._note(key)
        return facts

    def _drop(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._note(key)

    def _note(self, key: str) -> None:
        is_delete = key not in self.objects
        kind = ChangeKind.DELETE if is_delete else ChangeKind.PUT
        self._changes.append(self._change(key, kind))

    def _change(self, key: str, kind: ChangeKind, previous: str = "") -> Change:
        found = self.objects.get(key) if self.describes_changes else None
        facts, index = found.facts if found else None, len(self._changes) + 1
        return Change(index, key, "", kind, previous, facts, self._now_ms())

    def _answer(self, facts: ObjectFacts) -> ObjectFacts:
        return replace(facts, modified_ms=0) if self._says_little else facts

    def _upload(self, upload: UploadId) -> MemoryUpload:
        if upload not in self.uploading:
            raise ObjectMissingError("no such upload")
        return self.uploading[upload]

    def _add(self, upload: UploadId, part: UploadedPart, body: bytes) -> UploadedPart:
        self._upload(upload).parts[part.number] = (part, body)
        return part

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks


class MemoryFeed:
    """The changes of a store in memory, some at a time."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def position(self) -> FeedPosition:
        """See ChangeFeed."""
        store = self._store
        with store._operation("position", ""), store._lock:
            return FeedPosition(store.log, len(store._changes))

    def settled_position(self) -> FeedPosition:
        """See ChangeFeed."""
        return self.position()

    def read(self, after: FeedPosition) -> ChangeBatch:
        """See ChangeFeed."""
        store = self._store
        with store._operation("changes", ""), store._lock:
            newest = len(store._changes)
            if after.log != store.log or after.index > newest:
                raise FeedGapError("a position of another log")
            if after.index < store.trimmed:
                raise PositionTrimmedError("before the first change")
            end = min(after.index + _PAGE_CHANGES, newest)
            changes = tuple(store._changes[after.index : end])
            return ChangeBatch(changes, FeedPosition(store.log, end), newest)


class MemorySnapshots:
    """Snapshots of a store in memory."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def create(self, name: str) -> SnapshotFacts:
        """See SnapshotStore."""
        store = self._store
        with store._operation("create_snapshot", name), store._lock:
            if name in store.snapshots:
                raise PreconditionFailedError(f"{name} exists")
            store.snapshots_made += 1
            position = FeedPosition(store.log, len(store._changes)) if store._has_feed else None
            facts = SnapshotFacts(name, str(store.snapshots_made), position, store._now_ms())
            store.snapshots[name] = facts, dict(store.objects)
            return facts

    def find(self, name: str) -> SnapshotFacts | None:
        """See SnapshotStore."""
        store = self._store
        with store._operation("find_snapshot", name), store._lock:
            found = store.snapshots.get(name)
            return found[0] if found else None

    def named(self, prefix: str) -> Iterator[SnapshotFacts]:
        """See SnapshotStore."""
        store = self._store
        with store._operation("find_snapshots", prefix), store._lock:
            found = [
                facts for name, (facts, _) in store.snapshots.items() if name.startswith(prefix)
            ]
        yield from found

    def open(self, snapshot: SnapshotFacts) -> SnapshotView:
        """See SnapshotStore."""
        view = _MemoryView(self._store, snapshot)
        return SnapshotView(view, view)

    def difference(self, older: SnapshotFacts, newer: SnapshotFacts) -> Iterator[Change]:
        """See SnapshotStore."""
        store = self._store
        with store._operation("difference", older.name), store._lock:
            ours, theirs = (held_by(store, one) for one in (older, newer))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) is not theirs.get(key):
                kind = ChangeKind.PUT if key in theirs else ChangeKind.DELETE
                yield Change(0, key, "", kind)

    def delete(self, name: str) -> None:
        """See SnapshotStore."""
        store = self._store
        with store._operation("delete_snapshot", name), store._lock:
            store.snapshots.pop(name, None)


def held_by(store: MemoryStore, snapshot: SnapshotFacts) -> dict[str, MemoryObject]:
    """What a snapshot holds."""
    found = store.snapshots.get(snapshot.name)
    if found is None or found[0].snapshot_id != snapshot.snapshot_id:
        raise SnapshotLostError(f"{snapshot.name} is gone")
    return found[1]


class _MemoryView(MemoryStore):
    """Reads what a snapshot holds, with the faults and the requests of its store."""

    def __init__(self, store: MemoryStore, snapshot: SnapshotFacts) -> None:
        super().__init__(store.address, store.capabilities)
        self._of, self._snapshot = store, snapshot

    @contextmanager
    def _operation(self, name: str, key: str) -> Iterator[None]:
        with self._of._operation(name, key):
            self.objects = held_by(self._of, self._snapshot)
            yield


def _check_given(key: str, properties: ObjectProperties) -> None:
    """Refuse what no store takes."""
    given = (properties.metadata, properties.tags, properties.headers)
    texts = [key, *(text for group in given for pair in group for text in pair)]
    try:
        length = sum(len(text.encode()) for text in texts[1:])
        is_key = 0 < len(key.encode()) <= 1024
    except UnicodeEncodeError as error:
        raise UnsupportedObjectError("no store takes a surrogate") from error
    names = [name for name, _ in properties.metadata]
    is_named = all(name and not set(name) - _NAME_CHARACTERS for name in names)
    is_header = {name for name, _ in properties.headers} <= CONTENT_HEADERS
    is_single = all(len({name for name, _ in group}) == len(group) for group in given)
    if not (is_key and is_named and is_header and is_single and length <= _PROPERTIES_BYTES_MAX):
        raise UnsupportedObjectError("no store takes this")


def _check_number(number: int) -> None:
    if not 1 <= number <= 10_000:
        raise UnsupportedObjectError(f"part {number}")
