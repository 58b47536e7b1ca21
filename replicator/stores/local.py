"""A versioned bucket in a folder: SQLite for all that is known, files for large bodies.

A write is durable when it returns: its data first, then its rows in one transaction, so
that a crash leaves each object old or new and whole. Data that a killed writer left
without rows is removed when the bucket is opened. Threads and processes may share one
bucket; none of them waits for a dead one.

Old versions, delete markers and the change log are one history. It is kept for a number
of changes; what a snapshot shows is kept until the snapshot is deleted.
"""

import contextlib
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
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.local_contents import Content, NewBlob, Segment
from replicator.stores.local_database import (
    BucketDatabase,
    named_errors,
)
from replicator.stores.local_files import DataFiles
from replicator.stores.local_history import LocalFeed, LocalSnapshots
from replicator.stores.local_limits import (
    PROPERTIES_BYTES_MAX,
    check_folder,
    check_number,
    check_properties,
    checked_key,
)
from replicator.stores.local_rows import PAGE_ROWS, BucketRows
from replicator.stores.local_view import LocalView, key_bytes
from replicator.stores.port import (
    CopySource,
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from runtime.disk import Disk

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


class LocalBucket:
    """An open bucket (ObjectWriter, ObjectRenamer, UploadWriter, UploadReader); `view`
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
            check_folder(folder, disk, create=create)
        self._database = BucketDatabase(folder, disk, create=create, lock_wait_s=lock_wait_s)
        self._files = DataFiles(folder, disk)
        self.view = LocalView(self._database, self._files)
        self.feed = LocalFeed(self._database)
        self.snapshots = LocalSnapshots(self._database, self._files, self._now_ms, self._sweep)
        try:
            with named_errors(folder):
                self._finish_sweep()
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
            feed=self.feed,
            snapshots=self.snapshots,
            renamer=self,
        )

    def trim(self, through: int) -> None:
        """Drop the history up to a position: the versions that were superseded by then,
        delete markers with nothing before them, and the data of both; what a snapshot
        shows stays.

        Raises:
            StoreError: the rows cannot be changed or the files not removed.
        """
        self._sweep(lambda rows: rows.forget_history(through))

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        name = checked_key(key)
        check_properties(properties)
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
        name = checked_key(facts.key)
        check_properties(properties)
        with self._database.change() as rows:
            _, content = _found_as_described(rows, name, facts)
            changed = rows.supersede(name, content, properties, modified_ms=self._now_ms())
        self._changed(changed)
        return changed

    def rename(self, facts: ObjectFacts, key: str) -> ObjectFacts:
        """See ObjectRenamer: one transaction, which moves no data."""
        name, other = checked_key(facts.key), checked_key(key)
        with self._database.change() as rows:
            version, content = _found_as_described(rows, name, facts)
            properties = rows.properties(version)
            _check_condition(rows, other, WriteCondition(absent=True))
            now_ms = self._now_ms()
            rows.supersede(name, None, ObjectProperties(), modified_ms=now_ms)
            made = rows.supersede(other, content, properties, modified_ms=now_ms, previous_key=name)
        self._changed(made)
        return made

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
        name = checked_key(key)
        check_properties(properties)
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
        name = checked_key(key)
        check_number(number)
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
        name = checked_key(key)
        check_number(number)
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
        name = checked_key(key)
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

    def _sweep(self, begin: Callable[[BucketRows], None]) -> None:
        """Remove what is needed no more once `begin`, which may run often, has run."""
        with named_errors(self._folder):
            has_more = True
            while has_more:
                with self._database.change() as rows:
                    begin(rows)
                    has_more = rows.sweep()
                self._remove_garbage()

    def _finish_sweep(self) -> None:
        with self._database.view() as rows:
            is_swept = rows.is_swept()
        if not is_swept:
            self._sweep(lambda _: None)

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
    metadata_bytes_max=PROPERTIES_BYTES_MAX,
    whole_hashes=(HashAlgorithm.CRC32C.value,),
    stamps_cover_properties=True,
    part_etags_are_md5=True,
    upload_crc=HashAlgorithm.CRC32C.value,
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


def _found_as_described(rows: BucketRows, key: bytes, facts: ObjectFacts) -> tuple[int, int]:
    """Version and content of the object, if it still is this one."""
    found = rows.find(key)
    is_same = found is not None and not found[0].is_delete_marker and found[0].etag == facts.etag
    if found is None or not is_same or facts.version not in ("", found[0].version):
        raise PreconditionFailedError(
            f"the object {facts.key!r} is another one by now", key=facts.key
        )
    return int(found[0].version), found[1]


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
