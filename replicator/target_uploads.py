"""Uploads at the target that are certainly ours.

Nothing in a store's list of uploads says who began one. So an upload is aborted only if
the ledger has its ID, or if it came into the list during our own request, whose answer
was lost.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from merkle.checksum import Buffer
from proof.item import ContentHash
from replicator.copy_requests import SentPart
from replicator.ledger import PairLedger
from replicator.stores.errors import ObjectMissingError, StoreError
from replicator.stores.port import (
    CopySource,
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    UploadId,
    WriteCondition,
)


class OwnUploads:
    """An UploadWriter that leaves no upload behind whose ID it never learned. It is of
    one key and one thread.
    """

    def __init__(self, target: Store, key: str) -> None:
        self._target = target
        self._key = key

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        if key != self._key:
            return self._target.upload_writer.begin(key, properties)
        before = self._uploads()
        try:
            return self._target.upload_writer.begin(key, properties)
        except StoreError as error:
            if error.retryable:
                # It is named by the error that ends the request; this is besides.
                with suppress(StoreError):
                    self._abort_new(before)
            raise

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
        return self._target.upload_writer.write_part(
            key, upload, number, body, with_digest=with_digest
        )

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter."""
        return self._target.upload_writer.copy_part(key, upload, number, source)

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
        return self._target.upload_writer.complete(key, upload, parts, properties, condition, whole)

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        self._target.upload_writer.abort(key, upload)

    def _uploads(self) -> set[UploadId]:
        found = self._target.upload_reader.uploads(self._key)
        return {upload for key, upload in found if key == self._key}

    def _abort_new(self, before: set[UploadId]) -> None:
        """Abort the upload that our request began: the only new one, without parts."""
        new = self._uploads() - before
        if len(new) != 1:
            # Somebody else began one at the same moment: which is ours, nobody knows.
            return
        (upload,) = new
        with suppress(ObjectMissingError):
            if not any(self._target.upload_reader.parts(self._key, upload)):
                self.abort(self._key, upload)


class RecordedUploads(OwnUploads):
    """Besides, it adds to the record of the key what a later run must know of the
    upload: its ID before there are parts, and the parts before they become the object.
    """

    def __init__(self, target: Store, key: str, ledger: PairLedger) -> None:
        super().__init__(target, key)
        self._ledger = ledger

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        upload = super().begin(key, properties)
        self._record(key, upload)
        return upload

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
        self._record(key, upload, tuple(SentPart(part, b"") for part in parts))
        return super().complete(key, upload, parts, properties, condition, whole)

    def _record(self, key: str, upload: UploadId, sent: tuple[SentPart, ...] = ()) -> None:
        record = self._ledger.upload(key) if key == self._key else None
        if record is not None:
            # An attempt before this one may have made the object: its parts tell.
            kept = replace(record, upload=upload, sent=sent or record.sent)
            self._ledger.save_upload(key, kept)
