"""Listing and reading a local bucket, as it is now or as a snapshot shows it."""

import contextlib
from collections.abc import Generator, Iterator

from merkle.checksum import fold
from replicator.hashing import ContentHasher
from replicator.stores.errors import (
    ObjectMissingError,
    PreconditionFailedError,
    UnsupportedObjectError,
)
from replicator.stores.local_contents import Segment
from replicator.stores.local_database import BucketDatabase, store_error
from replicator.stores.local_files import DataFiles, ObjectDamagedError
from replicator.stores.local_rows import PAGE_ROWS, BucketRows
from replicator.stores.port import ObjectFacts, ObjectProperties, SnapshotFacts, WholeObject
from runtime.errors import DiskError


class LocalView:
    """One bucket (ObjectLister, ObjectReader).

    With a snapshot it stays as the bucket was then. Once the snapshot is deleted its
    methods raise SnapshotLostError.
    """

    def __init__(
        self, database: BucketDatabase, files: DataFiles, snapshot: SnapshotFacts | None = None
    ) -> None:
        self._database = database
        self._files = files
        self._snapshot = snapshot

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister. Pages are read one by one: only a snapshot is consistent
        throughout.
        """
        below, after = key_bytes(prefix), key_bytes(start_after) if start_after else None
        while True:
            with self._rows() as (rows, at):
                page = rows.current(below, after, at)
            yield from page
            if len(page) < PAGE_ROWS:
                return
            after = page[-1].key.encode()

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister: those that the history still has."""
        below, after = key_bytes(prefix), None
        while True:
            with self._rows() as (rows, at):
                page = rows.versions(below, after, at)
            yield from page
            if len(page) < PAGE_ROWS:
                return
            after = (page[-1].key.encode(), int(page[-1].version))

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        with self._rows() as (rows, at):
            found = rows.find(key_bytes(key), version, at)
        return None if found is None or found[0].is_delete_marker else found[0]

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        with self._rows() as (rows, at):
            found = rows.find(key_bytes(key), version, at)
            if found is None or found[0].is_delete_marker:
                raise ObjectMissingError(f"there is no object {key!r}", key=key, version=version)
            return rows.properties(int(found[0].version))

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader; the version says which."""
        return self.properties(facts.key, version=facts.version)

    @contextlib.contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader. The bytes are not checked against their hashes.

        Raises:
            PreconditionFailedError: the version is no longer kept.
            UnsupportedObjectError: the range is not in the object.
            ObjectDamagedError: data was lost.
        """
        segments = self.segments(
            facts.key, facts.version, facts.etag, first, facts.size_bytes if end is None else end
        )
        pieces = self._pieces(segments, first, facts.size_bytes if end is None else end)
        try:
            yield pieces
        finally:
            pieces.close()

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader; the version says which.

        Raises:
            PreconditionFailedError, ObjectDamagedError: as `read`.
        """
        with self.read(facts) as pieces:
            body = b"".join(pieces)
        return WholeObject(self.properties_of(facts), body)

    def segments(self, key: str, version: str, etag: str, first: int, end: int) -> list[Segment]:
        """The segments with a range of an object.

        Raises:
            PreconditionFailedError: there is no such object, or it has another ETag.
            UnsupportedObjectError: the range is not in the object.
            ObjectDamagedError: a segment is missing.
        """
        with self._rows() as (rows, at):
            found = rows.find(key_bytes(key), version, at)
            if found is None or found[0].is_delete_marker:
                raise PreconditionFailedError(
                    f"the object {key!r} is no longer there", key=key, version=version
                )
            facts, content = found
            if etag and facts.etag != etag:
                raise PreconditionFailedError(
                    f"the object {key!r} is another one by now", key=key, version=facts.version
                )
            if not 0 <= first <= end <= facts.size_bytes:
                raise UnsupportedObjectError(
                    f"{key!r} has {facts.size_bytes} bytes, not {first} to {end}", key=key
                )
            segments = rows.segments(content, first, end)
        reached = min(first, segments[0].first) if segments else first
        for segment in segments:
            # In a damaged file they may also overlap: bytes would come twice.
            if segment.first != reached:
                break
            reached += segment.size_bytes
        else:
            if reached >= end:
                return segments
        raise ObjectDamagedError(f"{key!r} has no bytes from {reached}", key=key)

    def verified(self, segment: Segment, first: int, end: int, hasher: ContentHasher) -> Segment:
        """The part of a segment inside a range of its object, as a segment of a new
        content that begins with the range. All of the segment is read, lest damage get
        a checksum that it matches; the part is added to `hasher`.

        Raises:
            ObjectDamagedError: the bytes do not match the segment's checksum.
        """
        start = max(first, segment.first)
        stop = min(end, segment.first + segment.size_bytes)
        whole, part, at = 0, 0, segment.first
        for piece in self._pieces([segment], segment.first, segment.first + segment.size_bytes):
            whole = fold(piece, whole)
            wanted = piece[max(start - at, 0) : max(stop - at, 0)]
            part = fold(wanted, part)
            hasher.update(wanted)
            at += len(piece)
        if whole != segment.crc32c:
            raise ObjectDamagedError(f"data of {segment.size_bytes} bytes do not match their CRC")
        skipped = start - segment.first
        return Segment(
            start - first, stop - start, segment.blob, segment.blob_first + skipped, part
        )

    @contextlib.contextmanager
    def _rows(self) -> Iterator[tuple[BucketRows, int | None]]:
        """The rows, and the position that is shown, None of the present."""
        with self._database.view() as rows:
            snapshot = self._snapshot
            yield rows, None if snapshot is None else rows.snapshot_position(snapshot)

    def _pieces(
        self, segments: list[Segment], first: int, end: int
    ) -> Generator[bytes, None, None]:
        for segment in segments:
            start = segment.blob_first + max(first - segment.first, 0)
            stop = segment.blob_first + min(end - segment.first, segment.size_bytes)
            with self._rows() as (rows, _):
                blob = rows.blob(segment.blob)
            if blob is None:
                raise _removed()
            if not blob.file:
                if len(blob.body) < stop:
                    raise ObjectDamagedError(f"a blob has {len(blob.body)} of {stop} bytes")
                yield blob.body[start:stop]
                continue
            try:
                yield from self._files.read(blob.file, start, stop)
            except DiskError as error:
                with self._rows() as (rows, _):
                    blob = rows.blob(segment.blob)
                if blob is None:
                    raise _removed() from error
                if error.facts.get("missing") or error.facts.get("errno") == "EIO":
                    raise ObjectDamagedError(
                        error.message, hint=error.hint, **error.facts
                    ) from error
                raise store_error(error) from error


def key_bytes(key: str) -> bytes:
    """A key or prefix as UTF-8, by whose order keys are listed.

    Raises:
        UnsupportedObjectError: it is not Unicode text.
    """
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedObjectError(f"{key!a} is not UTF-8 text", key=ascii(key)) from error


def _removed() -> PreconditionFailedError:
    return PreconditionFailedError("the object was removed while it was read")
