"""A target that is written to only while the lease lasts.

Each write asks the lease just before it is sent. A request that is on its way when the
process is stopped cannot be called back: puts are conditional where the store allows
it, and the comparison that follows a change of holders finds what a late delete did.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from merkle.checksum import Buffer
from proof.item import ContentHash
from replicator.stores.port import (
    CopySource,
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    ObjectRenamer,
    ObjectWriter,
    PieceWriter,
    Store,
    UploadedPart,
    UploadId,
    UploadWriter,
    WriteCondition,
)
from replicator.syncer.lease import Lease


def fenced_store(store: Store, lease: Lease) -> Store:
    """The store, whose writers raise LeaseLostError once the lease has ended."""
    pieces, renamer = store.piece_writer, store.renamer
    return replace(
        store,
        writer=_FencedWriter(store.writer, lease),
        upload_writer=_FencedUploads(store.upload_writer, lease),
        piece_writer=_FencedPieces(pieces, lease) if pieces is not None else None,
        renamer=_FencedRenamer(renamer, lease) if renamer is not None else None,
    )


class _FencedWriter:
    def __init__(self, writer: ObjectWriter, lease: Lease) -> None:
        self._writer = writer
        self._lease = lease

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        self._lease.check()
        return self._writer.put(key, body, properties, condition)

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter."""
        self._lease.check()
        return self._writer.put_properties(facts, properties, tags_only=tags_only)

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        self._lease.check()
        return self._writer.delete(keys)


class _FencedUploads:
    def __init__(self, uploads: UploadWriter, lease: Lease) -> None:
        self._uploads = uploads
        self._lease = lease

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        self._lease.check()
        return self._uploads.begin(key, properties)

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
        self._lease.check()
        return self._uploads.write_part(key, upload, number, body, with_digest=with_digest)

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter."""
        self._lease.check()
        return self._uploads.copy_part(key, upload, number, source)

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
        self._lease.check()
        return self._uploads.complete(key, upload, parts, properties, condition, whole)

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        self._lease.check()
        self._uploads.abort(key, upload)


class _FencedPieces:
    def __init__(self, pieces: PieceWriter, lease: Lease) -> None:
        self._pieces = pieces
        self._lease = lease

    def put_pieces(
        self,
        facts: ObjectFacts,
        md5: bytes,
        pieces: Iterable[Buffer],
        properties: ObjectProperties,
        condition: WriteCondition,
    ) -> ObjectFacts:
        """See PieceWriter."""
        return self._pieces.put_pieces(facts, md5, self._held(pieces), properties, condition)

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """See PieceWriter."""
        held = self._held(pieces)
        return self._pieces.write_part_pieces(key, upload, number, held, length_bytes)

    def _held(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """The pieces while the lease lasts: an error before the last one ends the
        request, and nothing is written.
        """
        self._lease.check()
        for piece in pieces:
            self._lease.check()
            yield piece


class _FencedRenamer:
    def __init__(self, renamer: ObjectRenamer, lease: Lease) -> None:
        self._renamer = renamer
        self._lease = lease

    def rename(self, facts: ObjectFacts, key: str) -> ObjectFacts:
        """See ObjectRenamer."""
        self._lease.check()
        return self._renamer.rename(facts, key)
