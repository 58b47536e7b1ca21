"""A versioned bucket in a folder: SQLite for all that is known, files for large bodies.

A write is durable when it returns: its data first, then its rows in one transaction, so
that a crash leaves each object old or new and whole. Data that a killed writer left
without rows is removed when the bucket is opened. Threads and processes may share one
bucket; none of them waits for a dead one.

Old versions, delete markers and the change log are one history. It is kept for a number
of changes, and so are snapshots: views at a position.
"""

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from merkle.checksum import Buffer
from merkle.object_checksum import Crc, object_crc
from proof.item import ContentHash, HashAlgorithm
from replicator.hashing import ContentHasher, parts_etag
from replicator.stores.local_database import (
    DATABASE_FILE,
    BucketDatabase,
    NotABucketError,
    named_errors,
)
from replicator.stores.local_files import DataFiles
from replicator.stores.local_rows import PAGE_ROWS, BucketRows, Content, NewBlob, Segment
from replicator.stores.local_view import LocalView, key_bytes
from replicator.stores.port import (
    CONTENT_HEADERS,
    Capabilities,
    Change,
    CopySource,
    DeleteFailure,
    DigestMismatchError,
    ObjectFacts,
    ObjectMissingError,
    ObjectProperties,
    PreconditionFailedError,
    Store,
    StoreError,
    UnsupportedObjectError,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from runtime.disk import Disk, owner_of

# S3's limits, so that whatever is here fits there.
_KEY_BYTES_MAX = 1024
_PARTS_MAX = 10_000
# S3 takes 2 KiB, other stores more; each group of properties is held to it.
_PROPERTIES_BYTES_MAX = 64 << 10
# A larger body gets a file of its own: below, a row is faster and needs one sync.
_BODY_BYTES_MAX = 16 << 10
# Changes that the history reaches back. Data overwritten since then takes space.
_HISTORY_CHANGES_MAX = 100_000
# How long one process waits for another's transaction; those are short.
_LOCK_WAIT_S = 60.0
# The history is trimmed whenever it is longer by this share.
_TRIM_SHARE = 100
# Of keys deleted in one transaction: others wait for it.
_DELETE_KEYS_MAX = 1000
_UPLOAD_ID_BYTES = 16

# What S3 can send as the end of a header's name.
_METADATA_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


class LocalBucket:
    """An open bucket (ObjectWriter, UploadWriter, UploadReader, ChangeFeed); `view`
    lists and reads it. Thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        *,
        create: bool = False,
        body_bytes_max: int = _BODY_BYTES_MAX,
        history_changes_max: int = _HISTORY_CHANGES_MAX,
        lock_wait_s: float = _LOCK_WAIT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the bucket in a folder, and remove what killed processes left there.
        With `create` a missing or empty folder becomes a bucket.

        Raises:
            NotABucketError: the folder is not a bucket, and may or can not become one.
            StoreUnavailableError: another process changes it for too long.
            StoreError: it cannot be opened.
        """
        self._folder = folder
        self._body_bytes_max = body_bytes_max
        self._history_changes_max = history_changes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._writer = ""
        # The position at which the history is looked at again.
        self._trim_at = 0
        with named_errors(folder):
            _check_folder(folder, disk, create=create)
        self._database = BucketDatabase(folder, disk, create=create, lock_wait_s=lock_wait_s)
        self._files = DataFiles(folder, disk)
        self.view = LocalView(self._database, self._files)
        try:
            with named_errors(folder):
                self._remove_garbage()
                self._clear_up()
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the bucket; idempotent.

        Raises:
            StoreError: the end of this writer cannot be recorded; whoever opens the
                bucket next looks for what it left.
        """
        try:
            with self._lock, named_errors(self._folder):
                writer, self._writer = self._writer, ""
                if writer and not self._files.has_orphans:
                    with self._database.change() as rows:
                        rows.remove_writer(writer)
                    self._files.remove_empty_folders([writer])
                    self._files.end()
        finally:
            self._files.release()
            self._database.close()

    def store(self) -> Store:
        """The bucket by its ports."""
        return Store(
            f"local:{self._folder}",
            _CAPABILITIES,
            lister=self.view,
            reader=self.view,
            writer=self,
            upload_writer=self,
            upload_reader=self,
            feed=self,
        )

    def snapshot(self, position: int | None = None) -> LocalView:
        """The bucket as it is now, or was at a position; nothing is copied.

        Raises:
            PositionTrimmedError: the history does not reach back to it.
        """
        with self._database.view() as rows:
            at = rows.history()[0] if position is None else position
            rows.check_kept(at)
        return LocalView(self._database, self._files, at)

    def trim(self, through: int) -> None:
        """Drop the history up to a position: the versions that were superseded by then,
        delete markers with nothing before them, and the data of both.

        Raises:
            StoreError: the rows cannot be changed or the files not removed.
        """
        with named_errors(self._folder):
            with self._database.change() as rows:
                rows.trim(min(through, rows.history()[0]))
            self._remove_garbage()

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        name = _checked_key(key)
        _check_properties(properties)
        if memoryview(body).nbytes > self._body_bytes_max:
            # Before so many bytes are written.
            with self._database.view() as rows:
                _check_condition(rows, name, condition)
        with self._new_blob(body) as (hasher, blob), self._database.change() as rows:
            _check_condition(rows, name, condition)
            facts = rows.supersede(
                name, _add_content(rows, hasher, blob), properties, modified_ms=self._now_ms()
            )
        self._changed(facts)
        return facts

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter: a new version with the same content."""
        # BucketRows are replaced as a whole either way.
        del tags_only
        name = _checked_key(facts.key)
        _check_properties(properties)
        with self._database.change() as rows:
            found = rows.find(name)
            is_same = found is not None and found[0].etag == facts.etag
            if found is None or not is_same or facts.version not in ("", found[0].version):
                raise PreconditionFailedError(
                    f"the object {facts.key!r} is another one by now", key=facts.key
                )
            changed = rows.supersede(name, found[1], properties, modified_ms=self._now_ms())
        self._changed(changed)
        return changed

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter: delete markers, none where there is no object."""
        failures, last = list[DeleteFailure](), None
        for at in range(0, len(keys), _DELETE_KEYS_MAX):
            with self._database.change() as rows:
                for key in keys[at : at + _DELETE_KEYS_MAX]:
                    try:
                        name = key_bytes(key)
                    except UnsupportedObjectError as error:
                        failures.append(DeleteFailure(key, error.message))
                        continue
                    found = rows.find(name)
                    if found is not None and not found[0].is_delete_marker:
                        last = rows.supersede(
                            name, None, ObjectProperties(), modified_ms=self._now_ms()
                        )
        if last is not None:
            self._changed(last)
        return failures

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        name = _checked_key(key)
        _check_properties(properties)
        upload = secrets.token_hex(_UPLOAD_ID_BYTES)
        with self._database.change() as rows:
            rows.add_upload(upload, name, properties)
        return UploadId(upload)

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """See UploadWriter. A part of any size is written piece by piece: give a map of
        a file where it does not fit memory. Its ETag is its MD5, digest or not.
        """
        name = _checked_key(key)
        _check_number(number)
        with self._new_blob(body) as (hasher, blob), self._database.change() as rows:
            _upload_properties(rows, upload, name)
            has_garbage = rows.set_part(upload, number, _add_content(rows, hasher, blob))
        if has_garbage:
            self._try_removing_garbage()
        return UploadedPart(number, hasher.size_bytes, hasher.md5.hex())

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter: the range is read to get its hashes, but not written."""
        name = _checked_key(key)
        _check_number(number)
        with self._database.view() as rows:
            _upload_properties(rows, upload, name)
            if rows.find(key_bytes(source.key), source.version) is None:
                raise ObjectMissingError(f"there is no object {source.key!r}", key=source.key)
        segments = self.view.segments(
            source.key, source.version, source.etag, source.first, source.end
        )
        hasher = ContentHasher()
        copied = [self.view.verified(s, source.first, source.end, hasher) for s in segments]
        with self._database.change() as rows:
            _upload_properties(rows, upload, name)
            if any(rows.blob(segment.blob) is None for segment in copied):
                raise PreconditionFailedError(
                    f"the object {source.key!r} was removed while it was read", key=source.key
                )
            content = rows.add_content(_content_of(hasher))
            rows.add_segments(content, copied)
            has_garbage = rows.set_part(upload, number, content)
        if has_garbage:
            self._try_removing_garbage()
        return UploadedPart(number, hasher.size_bytes, hasher.md5.hex())

    def complete(
        self,
        key: str,
        upload: UploadId,
        parts: Sequence[UploadedPart],
        properties: ObjectProperties,
        condition: WriteCondition,
        whole: ContentHash | None = None,
    ) -> ObjectFacts:
        """See UploadWriter: moves rows, no data. CRCs of the parts give that of the
        object; its MD5 and BLAKE3 are unknown unless it has but one part.
        """
        # The upload has them already.
        del properties
        name = _checked_key(key)
        ordered = sorted(parts, key=lambda part: part.number)
        if not ordered or len({part.number for part in ordered}) < len(ordered):
            raise UnsupportedObjectError("an object needs parts, each of another number", key=key)
        with self._database.change() as rows:
            kept = _upload_properties(rows, upload, name)
            _check_condition(rows, name, condition)
            stored = {number: (at, facts) for number, at, facts in _parts(rows, upload)}
            for part in ordered:
                if part.number not in stored or stored[part.number][1].etag != part.etag:
                    raise ObjectMissingError(
                        f"part {part.number} of the upload is not the one given", key=key
                    )
            used = [stored[part.number] for part in ordered]
            joined = _joined([facts for _, facts in used])
            _check_whole(joined, whole, key)
            content = rows.add_content(joined)
            first = 0
            for number, facts in used:
                rows.move_segments(number, content, first)
                first += facts.size_bytes
            rows.remove_upload(upload)
            for number, _ in stored.values():
                rows.drop_content(number)
            made = rows.supersede(name, content, kept, modified_ms=self._now_ms())
        self._try_removing_garbage()
        self._changed(made)
        return made

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        with self._database.change() as rows:
            if rows.upload(upload, key_bytes(key)) is None:
                return
            contents = [number for _, number, _ in _parts(rows, upload)]
            rows.remove_upload(upload)
            for number in contents:
                rows.drop_content(number)
        self._try_removing_garbage()

    def uploads(self, prefix: str) -> Iterator[tuple[str, UploadId]]:
        """See UploadReader: by key."""
        below, after = key_bytes(prefix), None
        while True:
            with self._database.view() as rows:
                page = rows.uploads(below, after)
            yield from ((key.decode(), UploadId(upload)) for key, upload in page)
            if len(page) < PAGE_ROWS:
                return
            after = page[-1]

    def parts(self, key: str, upload: UploadId) -> Iterator[UploadedPart]:
        """See UploadReader."""
        with self._database.view() as rows:
            _upload_properties(rows, upload, key_bytes(key))
            found = list(_parts(rows, upload))
        return (UploadedPart(number, facts.size_bytes, facts.etag) for number, _, facts in found)

    def position(self) -> int:
        """See ChangeFeed."""
        with self._database.view() as rows:
            return rows.history()[0]

    def changes(self, after: int) -> Iterator[Change]:
        """See ChangeFeed."""
        while True:
            with self._database.view() as rows:
                page = rows.changes(after)
            yield from page
            if len(page) < PAGE_ROWS:
                return
            after = page[-1].position

    @contextlib.contextmanager
    def _new_blob(self, body: Buffer) -> Iterator[tuple[ContentHasher, NewBlob]]:
        """Bytes that are durable, but for those that go into the row."""
        hasher = ContentHasher()
        if memoryview(body).nbytes <= self._body_bytes_max:
            hasher.update(body)
            yield hasher, NewBlob(body=bytes(body))
            return
        with named_errors(self._folder):
            self._begin_writing()
            name = self._files.write(body, hasher)
        try:
            yield hasher, NewBlob(file=name)
        except (PreconditionFailedError, ObjectMissingError):
            self._files.abandon(name)
            raise
        except BaseException:
            # Not removed now: a commit that failed may turn out durable after a crash.
            self._files.has_orphans = True
            raise

    def _begin_writing(self) -> None:
        with self._lock:
            if not self._writer:
                token = self._files.begin()
                with self._database.change() as rows:
                    rows.add_writer(token)
                self._writer = token

    def _changed(self, facts: ObjectFacts) -> None:
        position = int(facts.version)
        with self._lock:
            is_due, length = position >= self._trim_at, self._history_changes_max
            if is_due:
                self._trim_at = position + 1 + length // _TRIM_SHARE
        if is_due and position > length:
            # The change is made: what cannot be trimmed now is trimmed later.
            with contextlib.suppress(StoreError):
                self.trim(position - length)

    def _try_removing_garbage(self) -> None:
        # The same: what is left is removed when the bucket is opened.
        with contextlib.suppress(StoreError), named_errors(self._folder):
            self._remove_garbage()

    def _remove_garbage(self) -> None:
        before = list[str]()
        while True:
            with self._database.view() as rows:
                names = rows.garbage()
            if not names or names == before:  # A damaged database may keep what is forgotten.
                return
            before = names
            self._files.remove(names)
            with self._database.change() as rows:
                rows.forget_garbage(names)
                writing = rows.writers()
            self._files.remove_empty_folders({name.partition("/")[0] for name in names} - writing)

    def _clear_up(self) -> None:
        """Remove what writers that were killed left without a row."""
        with self._database.view() as rows:
            tokens = rows.writers()
        for token in sorted(tokens | self._files.writers()):
            with self._files.if_ended(token) as has_ended:
                if not has_ended:
                    continue
                names = list(self._files.names(token))
                with self._database.view() as rows:
                    orphans = [name for name in names if not rows.knows_file(name)]
                self._files.remove(orphans)
                self._files.remove_empty_folders([token])
                with self._database.change() as rows:
                    rows.remove_writer(token)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


_CAPABILITIES = Capabilities(
    kind="local",
    keeps_versions=True,
    keeps_tags=True,
    keeps_acls=True,
    keeps_headers=True,
    creates_conditionally=True,
    replaces_conditionally=True,
    completes_conditionally=True,
    copies_ranges=True,
    lists_all_keys=True,
    part_bytes_min=0,
    metadata_bytes_max=_PROPERTIES_BYTES_MAX,
    whole_hashes=(HashAlgorithm.CRC32C.value,),
    stamps_cover_properties=True,
    part_etags_are_md5=True,
    upload_crc=HashAlgorithm.CRC32C.value,
)


def _check_folder(folder: Path, disk: Disk, *, create: bool) -> None:
    if not disk.is_folder(folder):
        if os.path.lexists(folder):
            raise NotABucketError(f"{folder} is not a directory", path=str(folder))
        if not create:
            raise NotABucketError(
                f"{folder} does not exist",
                hint="Check the path. Only a sync creates a bucket, and only its target.",
                path=str(folder),
            )
        disk.make_folder(folder)
    names = set(disk.names(folder)) - {"lost+found"}
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise StoreError(
            f"{folder} cannot be written to, as locks of readers require",
            hint=f"Run this as {owner_of(folder)}. Copy it from a read-only file system first.",
            path=str(folder),
            denied=True,
        )
    if DATABASE_FILE in names or (create and not names):
        return
    what = "has other files, but no bucket" if names else "is empty"
    hint = "Give an empty folder, or one that does not exist." if create else "Check the path."
    raise NotABucketError(f"{folder} {what}", hint=hint, path=str(folder))


def _checked_key(key: str) -> bytes:
    name = key_bytes(key)
    if not 0 < len(name) <= _KEY_BYTES_MAX:
        raise UnsupportedObjectError(
            f"a key has 1 to {_KEY_BYTES_MAX} bytes, not {len(name)}", key=key
        )
    return name


def _check_number(number: int) -> None:
    if not 1 <= number <= _PARTS_MAX:
        raise UnsupportedObjectError(f"parts have numbers from 1 to {_PARTS_MAX}, not {number}")


def _check_properties(properties: ObjectProperties) -> None:
    for name, _ in properties.metadata:
        if not _METADATA_NAME.fullmatch(name):
            raise UnsupportedObjectError(
                f"{name!a} is not a name of metadata: lower-case letters, digits and some signs"
            )
    for name, _ in properties.headers:
        if name not in CONTENT_HEADERS:
            raise UnsupportedObjectError(f"{name!a} is not a content header")
    for group in (properties.metadata, properties.tags, properties.headers):
        if len({name for name, _ in group}) < len(group):
            raise UnsupportedObjectError("a property is given twice")
    for group in (properties.metadata, properties.tags, properties.headers, properties.acl):
        size = sum(len(key_bytes(text)) for pair in group for text in pair)
        if size > _PROPERTIES_BYTES_MAX:
            raise UnsupportedObjectError(
                f"properties of {size} bytes; up to {_PROPERTIES_BYTES_MAX} of a kind are kept"
            )


def _check_condition(rows: BucketRows, key: bytes, condition: WriteCondition) -> None:
    found = rows.find(key)
    etag = "" if found is None else found[0].etag
    if condition.absent and etag:
        raise PreconditionFailedError(f"the object {key.decode()!r} exists", etag=etag)
    if condition.etag and condition.etag != etag:
        raise PreconditionFailedError(
            f"the object {key.decode()!r} is not the one expected", etag=etag
        )


def _upload_properties(rows: BucketRows, upload: UploadId, key: bytes) -> ObjectProperties:
    found = rows.upload(upload, key)
    if found is None:
        raise ObjectMissingError(f"there is no upload {upload} of {key.decode()!r}", upload=upload)
    return found


def _add_content(rows: BucketRows, hasher: ContentHasher, blob: NewBlob) -> int:
    content = rows.add_content(_content_of(hasher))
    if hasher.size_bytes:
        segment = Segment(0, hasher.size_bytes, rows.add_blob(blob), 0, hasher.crc32c)
        rows.add_segments(content, [segment])
    return content


def _content_of(hasher: ContentHasher) -> Content:
    return Content(
        hasher.size_bytes, hasher.md5.hex(), hasher.crc32c, md5=hasher.md5, blake3=hasher.blake3
    )


def _joined(parts: Sequence[Content]) -> Content:
    """The facts of parts put together."""
    size = sum(part.size_bytes for part in parts)
    etag = parts_etag([bytes.fromhex(part.etag) for part in parts])
    crc32c = object_crc(Crc.CRC32C, ((part.crc32c, part.size_bytes) for part in parts))
    only = parts[0] if len(parts) == 1 else Content(size, etag, crc32c)
    return Content(size, etag, crc32c, md5=only.md5, blake3=only.blake3)


def _check_whole(joined: Content, whole: ContentHash | None, key: str) -> None:
    ours = ContentHash(HashAlgorithm.CRC32C, joined.crc32c.to_bytes(4, "big"))
    if whole is not None and whole != ours:
        raise DigestMismatchError(f"the parts of {key!r} have another CRC32C", key=key)


def _parts(rows: BucketRows, upload: UploadId) -> Iterator[tuple[int, int, Content]]:
    after = 0
    while page := rows.parts(upload, after):
        yield from page
        after = page[-1][0]
