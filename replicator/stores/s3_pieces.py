"""Objects and parts of one S3 bucket that are sent while they are being read.

Of an object the caller knows the MD5, and the store checks it before there is an
object. Parts are proven together, before there is an object of them. So nobody on the
way computes an MD5, and nothing is in memory as a whole.
"""

import base64
from collections.abc import Iterable, Iterator

from merkle.checksum import Buffer
from replicator.stores.errors import StoreError
from replicator.stores.port import (
    ObjectFacts,
    ObjectProperties,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.stores.s3_bucket import S3Bucket, etag_of, store_error, translated
from replicator.stores.s3_objects import (
    S3Reader,
    check_kept,
    condition_headers,
    put_error,
    put_tags,
)
from replicator.stores.s3_properties import headers_of
from replicator.stores.s3_uploads import part_query
from runtime.s3_answers import S3Error, S3OutcomeUnknownError


class S3PieceWriter:
    """See PieceWriter. Only for a store that was seen to check the MD5 of a PUT and,
    without TLS, of a part whose body is not signed.
    """

    def __init__(self, bucket: S3Bucket, reader: S3Reader) -> None:
        assert bucket.behaviour.checks_put_md5
        self._bucket = bucket
        self._reader = reader

    def put_pieces(
        self,
        facts: ObjectFacts,
        md5: bytes,
        pieces: Iterable[Buffer],
        properties: ObjectProperties,
        condition: WriteCondition,
    ) -> ObjectFacts:
        """See PieceWriter."""
        key, size = facts.key, facts.size_bytes
        self._bucket.check_writable(key)
        check_kept(self._bucket, properties)
        behaviour = self._bucket.behaviour
        given = headers_of(properties, with_tags=behaviour.put_keeps_tags, owner=behaviour.owner)
        headers = given | condition_headers(self._bucket, condition)
        headers["content-md5"] = base64.b64encode(md5).decode()
        place, name = self._bucket.place(key)
        left = size

        def sent() -> Iterator[Buffer]:
            nonlocal left
            for piece in pieces:
                yield piece
                left -= memoryview(piece).nbytes

        try:
            answer = self._bucket.client.send_pieces(
                place, name, headers=headers, pieces=sent(), length_bytes=size
            )
            etag, version = etag_of(answer.headers), self._bucket.version_of(answer.headers)
        except S3OutcomeUnknownError as error:
            # A slow PUT may have succeeded although its answer was lost.
            found = None if left else self._reader.facts(key)
            if found is None or not self._reader.is_arrived(found, md5, size, given):
                raise store_error(error, f"cannot write {key!r}") from error
            etag, version = found.etag, found.version
        except S3Error as error:
            raise put_error(error, key, condition) from error
        if left or (behaviour.etag_is_md5 and etag != md5.hex()):
            raise StoreError(f"the store did not keep {key!r} as it was sent: its ETag is {etag}")
        if properties.tags and not behaviour.put_keeps_tags:
            put_tags(self._bucket, key, version, properties.tags)
        return ObjectFacts(key, size, etag, 0, version, hashes=self._bucket.hashes(etag))

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """See PieceWriter."""
        place, name = self._bucket.place(key)
        with translated(f"cannot write part {number} of {key!r}"):
            answer = self._bucket.client.send_pieces(
                place,
                name,
                query=part_query(upload, number),
                headers={},
                pieces=pieces,
                length_bytes=length_bytes,
            )
            return UploadedPart(number, length_bytes, etag_of(answer.headers))
