"""Objects in parts in one S3 bucket, and the scratch objects that stitching makes."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace

from merkle.checksum import Buffer
from merkle.object_checksum import Crc
from proof.item import ContentHash, HashAlgorithm
from replicator.hashing import crc_hash, md5_of, parts_etag
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.port import (
    CopySource,
    ObjectFacts,
    ObjectProperties,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.stores.s3_bucket import (
    SCRATCH_PREFIX,
    S3Bucket,
    crc_headers,
    digest_header,
    etag_of,
    is_md5,
    store_error,
    translated,
)
from replicator.stores.s3_documents import (
    UploadsPage,
    complete_document,
    parse_completed_etag,
    parse_copied_etag,
    parse_listing,
    parse_parts,
    parse_upload_id,
    parse_uploads,
    parse_versions,
)
from replicator.stores.s3_objects import S3Reader, check_kept, delete_versions, put_tags
from replicator.stores.s3_properties import headers_of
from replicator.stores.stamps import same_stamp
from runtime.s3_answers import S3Error, S3OutcomeUnknownError

_PART_NUMBER_MAX = 10_000


class S3UploadWriter:
    """See UploadWriter."""

    def __init__(self, bucket: S3Bucket, reader: S3Reader) -> None:
        self._bucket = bucket
        self._reader = reader

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        self._bucket.check_writable(key)
        check_kept(self._bucket, properties)
        behaviour = self._bucket.behaviour
        headers = headers_of(
            properties, with_tags=behaviour.upload_keeps_tags, owner=behaviour.owner
        )
        crc = self._crc(key)
        if crc is not None:
            headers |= crc_headers(crc)
        with translated(f"cannot begin an upload of {key!r}"):
            answer = self._bucket.request("POST", key, query=(("uploads", ""),), headers=headers)
            return parse_upload_id(answer.body)

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
        query, behaviour = part_query(upload, number), self._bucket.behaviour
        # Without TLS only a store that was seen to take it gets a body without a hash.
        is_signed = self._bucket.client.signs_payloads and not behaviour.checks_part_md5
        with_digest = with_digest or is_signed
        md5 = md5_of(body) if with_digest else None
        headers = {} if md5 is None else {"content-md5": base64.b64encode(md5).decode()}
        crc = self._crc(key)
        if crc is not None:
            # Some stores want one of every part before they declare that of the whole.
            headers |= digest_header(crc_hash(Crc[crc.name], body))
        with translated(f"cannot write part {number} of {key!r}"):
            # The MD5 is signed, and so guards the body where the store compares both:
            # a SHA-256 beside it would cost either side a second pass over the part.
            answer = self._bucket.request(
                "PUT",
                key,
                query=query,
                headers=headers,
                body=body,
                signs_body=not behaviour.checks_part_md5,
            )
            etag = etag_of(answer.headers)
        if behaviour.etag_is_md5 and md5 is not None and etag != md5.hex():
            raise DigestMismatchError(
                f"the store received other bytes of part {number} of {key!r}: its ETag is {etag}"
            )
        return UploadedPart(number, memoryview(body).nbytes, etag)

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter. Most stores ignore the source's ETag, so it is looked at
        before where it matters.
        """
        if not 0 <= source.first < source.end:
            raise UnsupportedObjectError(f"a part of {source.end - source.first} bytes")
        if not self._bucket.behaviour.copies_ranges:
            raise UnsupportedObjectError(f"{self._bucket.bucket} copies no ranges of objects")
        if source.etag and not self._bucket.behaviour.copy_checks_source:
            now = self._reader.facts(source.key, version=source.version)
            if now is None:
                raise ObjectMissingError(f"{source.key!r} does not exist", key=source.key)
            if now.etag != source.etag:
                raise PreconditionFailedError(f"{source.key!r} changed", key=source.key)
            if source.end > now.size_bytes:
                raise UnsupportedObjectError(f"{source.key!r} has {now.size_bytes} bytes only")
        headers = {
            "x-amz-copy-source": self._bucket.source_header(source.key, source.version),
            "x-amz-copy-source-range": f"bytes={source.first}-{source.end - 1}",
        }
        if source.etag:
            headers["x-amz-copy-source-if-match"] = f'"{source.etag}"'
        with translated(f"cannot copy part {number} of {key!r} from {source.key!r}"):
            answer = self._bucket.request(
                "PUT", key, query=part_query(upload, number), headers=headers
            )
            etag = parse_copied_etag(answer.body)
        return UploadedPart(number, source.end - source.first, etag)

    def complete(
        self,
        key: str,
        upload: UploadId,
        parts: Sequence[UploadedPart],
        properties: ObjectProperties,
        condition: WriteCondition,
        whole: ContentHash | None = None,
    ) -> ObjectFacts:
        """See UploadWriter. The store is asked for what it declares of the whole."""
        ordered = sorted(parts, key=lambda part: part.number)
        if not ordered or len({part.number for part in ordered}) < len(ordered):
            raise UnsupportedObjectError(f"{key!r} needs parts, each of another number", key=key)
        crc = self._crc(key)
        sent = whole if whole is not None and whole.algorithm is crc else None
        etag, version = self._complete(key, upload, ordered, condition, sent)
        if properties.tags and not self._bucket.behaviour.upload_keeps_tags:
            put_tags(self._bucket, key, version, properties.tags)
        size = sum(part.size_bytes for part in ordered)
        facts = ObjectFacts(key, size, etag, 0, version, hashes=self._bucket.hashes(etag))
        if crc is None:
            return facts
        found = self._reader.facts(key, version=version)
        if found is None or not same_stamp(found, facts):
            # Somebody else has replaced it by now.
            return facts
        return replace(facts, hashes=found.hashes)

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        try:
            self._bucket.request("DELETE", key, query=(("uploadId", upload),))
        except S3Error as error:
            if error.status != 404:
                raise store_error(error, f"cannot abort an upload of {key!r}") from error

    def _crc(self, key: str) -> HashAlgorithm | None:
        """The CRC that is sent of an upload; of a scratch object nobody asks for it."""
        return None if key.startswith(SCRATCH_PREFIX) else self._bucket.behaviour.upload_crc

    def _check_exists(self, key: str, upload: UploadId) -> None:
        with translated(f"cannot complete {key!r}"):
            self._bucket.request("GET", key, query=(("max-parts", "1"), ("uploadId", upload)))

    def _complete(
        self,
        key: str,
        upload: UploadId,
        parts: Sequence[UploadedPart],
        condition: WriteCondition,
        whole: ContentHash | None,
    ) -> tuple[str, str]:
        """ETag and version of the new object."""
        headers = dict[str, str]()
        if whole is not None:
            headers |= digest_header(whole) | {"x-amz-checksum-type": "FULL_OBJECT"}
        if self._bucket.behaviour.completes_conditionally:
            if condition.absent:
                headers["if-none-match"] = "*"
            if condition.etag:
                headers["if-match"] = f'"{condition.etag}"'
        # By the rule of AWS; Ceph 16 keeps it, and answers an empty ETag.
        expected = (
            parts_etag([bytes.fromhex(part.etag) for part in parts])
            if all(is_md5(part.etag) for part in parts)
            else ""
        )
        query, body = (("uploadId", upload),), complete_document(parts)
        try:
            answer = self._bucket.request("POST", key, query=query, headers=headers, body=body)
            etag = parse_completed_etag(answer.body) or expected
            version = self._bucket.version_of(answer.headers)
        except S3OutcomeUnknownError as error:
            found = self._reader.facts(key)
            if found is None or not expected or found.etag != expected:
                # Ceph 16 says so of an upload that does not exist.
                self._check_exists(key, upload)
                raise store_error(error, f"cannot complete {key!r}") from error
            etag, version = found.etag, found.version
        except S3Error as error:
            raise store_error(error, f"cannot complete {key!r}") from error
        if not etag or (self._bucket.behaviour.keeps_versions and not version):
            found = self._reader.facts(key, version=version)
            if found is None:
                raise StoreError(f"{key!r} is gone after its upload was completed", key=key)
            etag, version = found.etag, found.version
        return etag, version


class S3UploadReader:
    """See UploadReader."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def uploads(self, prefix: str) -> Iterator[tuple[str, UploadId]]:
        """See UploadReader."""
        for name, upload, _ in unfinished(
            self._bucket, self._bucket.bucket, self._bucket.prefix + prefix
        ):
            key = self._bucket.relative(name)
            if key is not None:
                yield key, upload

    def parts(self, key: str, upload: UploadId) -> Iterator[UploadedPart]:
        """See UploadReader."""
        marker = ""
        while True:
            after = (("part-number-marker", marker),) if marker else ()
            with translated(f"cannot list the parts of {key!r}"):
                answer = self._bucket.request(
                    "GET", key, query=(("uploadId", upload), ("max-parts", "1000"), *after)
                )
                page = parse_parts(answer.body)
            yield from page.parts
            if not page.marker:
                return
            if page.marker == marker:
                raise StoreError(f"the list of the parts of {key!r} does not advance")
            marker = page.marker


class S3Scratch:
    """See ScratchSpace."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def new_key(self) -> str:
        """See ScratchSpace."""
        return self._bucket.new_scratch_key()

    def discard(self, made: Sequence[ObjectFacts]) -> None:
        """See ScratchSpace."""
        self._delete(sorted({(facts.key, facts.version) for facts in made}))

    def clean(self, *, before_ms: int) -> int:
        """See ScratchSpace."""
        bucket = self._bucket.scratch_bucket
        prefix = self._bucket.prefix + SCRATCH_PREFIX
        old = [
            (facts.key.removeprefix(self._bucket.prefix), facts.version)
            for facts in self._left(bucket, prefix)
            if facts.modified_ms < before_ms
        ]
        self._delete(old)
        uploads = [
            (name, upload)
            for name, upload, begun_ms in unfinished(self._bucket, bucket, prefix)
            if begun_ms < before_ms
        ]
        for name, upload in uploads:
            with translated(f"cannot abort an upload of {name!r}"):
                self._bucket.client.request("DELETE", bucket, name, query=(("uploadId", upload),))
        return len(old) + len(uploads)

    def _left(self, bucket: str, prefix: str) -> list[ObjectFacts]:
        """One page: scratch objects are few, and the next call takes the rest."""
        keeps_versions = self._bucket.behaviour.keeps_versions
        kind = ("versions", "") if keeps_versions else ("list-type", "2")
        query = (kind, ("encoding-type", "url"), ("prefix", prefix))
        with translated(f"cannot list the scratch objects in {bucket}"):
            body = self._bucket.client.request("GET", bucket, query=query).body
            if keeps_versions:
                return list(parse_versions(body).versions)
            # A directory of Ozone is no object that was left.
            objects = parse_listing(body, needs_etags=False).objects
        return [facts for facts in objects if facts.etag]

    def _delete(self, objects: Sequence[tuple[str, str]]) -> None:
        failures = delete_versions(self._bucket, objects)
        if failures:
            raise StoreError(f"a scratch object was not deleted: {failures[0].reason}")


def part_query(upload: UploadId, number: int) -> tuple[tuple[str, str], ...]:
    """The query of a request about one part.

    Raises:
        UnsupportedObjectError: no part has this number.
    """
    if not 1 <= number <= _PART_NUMBER_MAX:
        raise UnsupportedObjectError(f"a part has number {number}, not 1 to {_PART_NUMBER_MAX}")
    return ("partNumber", str(number)), ("uploadId", upload)


def unfinished(bucket: S3Bucket, place: str, prefix: str) -> Iterator[tuple[str, UploadId, int]]:
    """Full name, ID and beginning in ms of the uploads below a prefix that were neither
    completed nor aborted.

    Raises:
        StoreError: the listing is not complete.
    """
    query = [("uploads", ""), ("encoding-type", "url"), ("prefix", prefix)]
    page = UploadsPage((), "", "")
    while True:
        markers = [("key-marker", page.key_marker), ("upload-id-marker", page.upload_marker)]
        before = (page.key_marker, page.upload_marker)
        with translated(f"cannot list the uploads of {place}"):
            answer = bucket.client.request(
                "GET", place, query=[*query, *(marker for marker in markers if marker[1])]
            )
            page = parse_uploads(answer.body)
        for name, upload, begun_ms in page.uploads:
            # moto lists all of them, whatever the prefix.
            if name.startswith(prefix):
                yield name, upload, begun_ms
        if not page.key_marker:
            return
        if (page.key_marker, page.upload_marker) == before:
            raise StoreError(f"the list of the uploads of {place} does not advance")
