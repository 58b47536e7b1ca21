"""Reading and writing whole objects of one S3 bucket."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from merkle.checksum import Buffer
from replicator.hashing import md5_of
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    UnsupportedObjectError,
)
from replicator.stores.port import (
    CopySource,
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    UploadWriter,
    WholeObject,
    WriteCondition,
)
from replicator.stores.s3_behaviour import CopyWay, EtagForm
from replicator.stores.s3_bucket import (
    S3Bucket,
    check_range,
    etag_of,
    length_of,
    modified_ms_of,
    store_error,
    translated,
)
from replicator.stores.s3_documents import (
    delete_document,
    fits_xml,
    parse_copied_etag,
    parse_delete_failures,
    parse_grants,
    parse_tags,
    tags_document,
)
from replicator.stores.s3_properties import (
    check_properties,
    content_headers_of,
    headers_of,
    metadata_of,
)
from replicator.stores.stamps import same_stamp
from runtime.s3 import Query, S3Stream
from runtime.s3_answers import S3Answer, S3Error, S3OutcomeUnknownError, S3ProtocolError

Pairs: TypeAlias = tuple[tuple[str, str], ...]
# S3 takes as many in one request.
_DELETE_KEYS_MAX = 1000
# Above this, an object is copied in parts.
_COPY_OBJECT_BYTES_MAX = 5 << 30
_COPY_PART_BYTES = 1 << 30
# A body this small is sent again without a look whether it has arrived.
_RESENT_BYTES_MAX = 1 << 20
_SEND_ATTEMPTS = 3
_MARKER = ("x-amz-delete-marker", "true")


class S3Reader:
    """See ObjectReader."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        try:
            return self._facts(key, self.head(key, version=version))
        except ObjectMissingError:
            return None

    def head(self, key: str, *, version: str = "") -> Mapping[str, str]:
        """The headers of an object.

        Raises:
            ObjectMissingError: it does not exist, or is a delete marker.
            StoreError: the store did not say.
        """
        behaviour = self._bucket.behaviour
        is_asked = behaviour.declares_checksums or behaviour.upload_crc is not None
        mode = {"x-amz-checksum-mode": "ENABLED"} if is_asked else {}
        query = (("versionId", version),) if version else ()
        with translated(f"cannot look at {key!r}"):
            return self._bucket.request("HEAD", key, query=query, headers=mode).headers

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader; HEAD, and one request more each for tags and ACL where the
        store keeps them.
        """
        headers = self.head(key, version=version)
        has_tags = _tags_counted(headers) or not self._bucket.behaviour.counts_tags
        tags = self._tags(key, version) if has_tags else ()
        return self._with_headers(headers, tags, self._acl(key, version))

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader. HEAD comes last: what it says of the object holds for the
        requests before it, too. Where it counts no tags, there are none to read.
        """
        acl = self._acl(facts.key, facts.version)
        if self._bucket.behaviour.counts_tags:
            headers = self._headers_of(facts)
            if not _tags_counted(headers):
                return self._with_headers(headers, (), acl)
        tags = self._tags(facts.key, facts.version)
        return self._with_headers(self._headers_of(facts), tags, acl)

    def _headers_of(self, facts: ObjectFacts) -> Mapping[str, str]:
        """HEAD of just this version."""
        headers = self.head(facts.key, version=facts.version)
        self._check_same(facts, headers)
        return headers

    def _check_same(self, facts: ObjectFacts, headers: Mapping[str, str]) -> None:
        now = self._facts(facts.key, headers)
        if now is None or not same_stamp(now, facts):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)

    def _tags(self, key: str, version: str) -> Pairs:
        """As far as the store keeps them."""
        if not self._bucket.behaviour.tags_apart:
            return ()
        with translated(f"cannot read the tags of {key!r}"):
            return parse_tags(self._sub_resource("tagging", key, version).body)

    def _acl(self, key: str, version: str) -> Pairs:
        """As far as the store keeps it."""
        if not self._bucket.behaviour.keeps_acls:
            return ()
        with translated(f"cannot read the ACL of {key!r}"):
            return parse_grants(self._sub_resource("acl", key, version).body)

    def _sub_resource(self, name: str, key: str, version: str) -> S3Answer:
        query = ((name, ""), *((("versionId", version),) if version else ()))
        return self._bucket.request("GET", key, query=query)

    def _with_headers(
        self, headers: Mapping[str, str], tags: Pairs, acl: Pairs
    ) -> ObjectProperties:
        # Ozone's gateway adds headers of its own to each answer.
        kept = content_headers_of(headers) if self._bucket.behaviour.keeps_headers else ()
        return ObjectProperties(metadata=metadata_of(headers), tags=tags, headers=kept, acl=acl)

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader. The ETag is a condition, and is compared besides."""
        last = facts.size_bytes if end is None else end
        if not 0 <= first <= last <= facts.size_bytes:
            raise StoreError(
                f"{facts.key!r} has {facts.size_bytes} bytes, not {first} to {last}",
                key=facts.key,
            )
        if first == last and facts.size_bytes:
            yield iter(())
            return
        is_whole = (first, last) == (0, facts.size_bytes)
        ranged = {} if is_whole else {"range": f"bytes={first}-{last - 1}"}
        with translated(f"cannot read {facts.key!r}"), self._answer(facts, ranged) as answer:
            if length_of(answer.headers) == facts.size_bytes and answer.status == 200:
                # ministack ignores the range where a version is named.
                pieces = _sliced(answer.pieces, first, last)
            elif answer.status == 206 and length_of(answer.headers) == last - first:
                check_range(answer.headers, first, last)
                pieces = answer.pieces
            else:
                raise S3ProtocolError(f"status {answer.status} is no answer to this read")
            yield _counted(pieces, last - first, facts.key)

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader. The answer with the bytes says what HEAD would, and comes
        last: it holds for the requests before it, too. Where it counts tags, they are
        read after it, and HEAD pins them. Of an upload that was begun with tags, Ceph
        16 drops them, counts none, and has an empty document.
        """
        behaviour = self._bucket.behaviour
        if behaviour.is_ozone:
            # Its gateway says other things of an object with GET than with HEAD.
            with self.read(facts) as pieces:
                body = b"".join(pieces)
            return WholeObject(self.properties_of(facts), body)
        acl = self._acl(facts.key, facts.version) if with_acl else ()
        tags = () if behaviour.counts_tags else self._tags(facts.key, facts.version)
        with translated(f"cannot read {facts.key!r}"), self._answer(facts, {}) as answer:
            self._check_same(facts, answer.headers)
            body = b"".join(_counted(answer.pieces, facts.size_bytes, facts.key))
        headers = answer.headers
        if behaviour.counts_tags and _tags_counted(headers):
            tags = self._tags(facts.key, facts.version)
            headers = self._headers_of(facts)
        has_acl = with_acl or not behaviour.keeps_acls
        return WholeObject(self._with_headers(headers, tags, acl), body, has_acl)

    def is_arrived(
        self, found: ObjectFacts, md5: bytes, size: int, given: Mapping[str, str]
    ) -> bool:
        """Whether an object is one that was sent with this MD5 and these headers.

        Raises:
            StoreError: the store did not say.
        """
        if not self._bucket.behaviour.etag_is_md5:
            return False
        if (found.etag, found.size_bytes) != (md5.hex(), size):
            return False
        headers = self.head(found.key, version=found.version)
        return metadata_of(headers) == metadata_of(given)

    @contextmanager
    def _answer(self, facts: ObjectFacts, headers: Mapping[str, str]) -> Iterator[S3Stream]:
        """The bytes of just this version, as the store answers."""
        query: Query = ()
        if facts.version:
            query = (("versionId", facts.version),)
        elif facts.etag:
            headers = {**headers, "if-match": f'"{facts.etag}"'}
        bucket, name = self._bucket.place(facts.key)
        with self._bucket.client.stream(bucket, name, query=query, headers=headers) as answer:
            # What has none is pinned by whoever gave these facts.
            if facts.etag and etag_of(answer.headers) != facts.etag:
                raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)
            yield answer

    def _facts(self, key: str, headers: Mapping[str, str]) -> ObjectFacts | None:
        if headers.get(_MARKER[0]) == _MARKER[1]:
            return None
        with translated(f"cannot look at {key!r}"):
            etag = etag_of(headers)
            return ObjectFacts(
                key=key,
                size_bytes=length_of(headers),
                etag=etag,
                modified_ms=modified_ms_of(headers),
                version=self._bucket.version_of(headers),
                hashes=self._bucket.hashes(etag, headers),
            )


class S3Writer:
    """See ObjectWriter."""

    def __init__(self, bucket: S3Bucket, reader: S3Reader, uploads: UploadWriter) -> None:
        self._bucket = bucket
        self._reader = reader
        self._uploads = uploads

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        self._bucket.check_writable(key)
        check_kept(self._bucket, properties)
        behaviour, md5 = self._bucket.behaviour, md5_of(body)
        given = headers_of(properties, with_tags=behaviour.put_keeps_tags, owner=behaviour.owner)
        headers = given | condition_headers(self._bucket, condition)
        if not behaviour.checks_payloads:
            # Else the hash that is signed guards the body, and another one costs bytes.
            headers["content-md5"] = base64.b64encode(md5).decode()
        size = memoryview(body).nbytes
        is_resent = size <= _RESENT_BYTES_MAX and condition == WriteCondition()
        for left in reversed(range(_SEND_ATTEMPTS)):
            try:
                answer = self._bucket.request(
                    "PUT", key, headers=headers, body=body, idempotent=is_resent
                )
                etag, version = etag_of(answer.headers), self._bucket.version_of(answer.headers)
                break
            except S3OutcomeUnknownError as error:
                # A slow PUT may have succeeded although its answer was lost.
                found = self._reader.facts(key)
                if found is not None and self._reader.is_arrived(found, md5, size, given):
                    etag, version = found.etag, found.version
                    break
                if not _may_hold(condition, found):
                    raise PreconditionFailedError(
                        f"{key!r} was written by somebody else", key=key
                    ) from error
                if not left or condition != WriteCondition():
                    raise store_error(error, f"cannot write {key!r}") from error
            except S3Error as error:
                raise put_error(error, key, condition) from error
        if behaviour.etag_is_md5 and etag != md5.hex():
            raise DigestMismatchError(
                f"the store received other bytes of {key!r}: its ETag is {etag}", key=key
            )
        if properties.tags and not behaviour.put_keeps_tags:
            put_tags(self._bucket, key, version, properties.tags)
        return ObjectFacts(key, size, etag, 0, version, hashes=self._bucket.hashes(etag))

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter. The store copies the object onto itself with new headers;
        where it refuses that, to a scratch object and back.
        """
        check_kept(self._bucket, properties)
        behaviour = self._bucket.behaviour
        if tags_only and behaviour.tags_apart:
            put_tags(self._bucket, facts.key, facts.version, properties.tags)
            # Ceph gives the object a new time, which the answer does not tell.
            return replace(facts, modified_ms=0)
        now = self._reader.facts(facts.key)
        if now is None or not same_stamp(now, facts):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)
        headers = headers_of(properties, with_tags=behaviour.copy_takes_tags, owner=behaviour.owner)
        headers |= {"x-amz-metadata-directive": "REPLACE"}
        if behaviour.copy_takes_tags:
            headers |= {"x-amz-tagging-directive": "REPLACE"}
        if not now.size_bytes and behaviour.copy_way is CopyWay.PARTS:
            return self.put(facts.key, b"", properties, WriteCondition(etag=now.etag))
        if facts.size_bytes > _COPY_OBJECT_BYTES_MAX or behaviour.copy_way is CopyWay.PARTS:
            made = self._copy_in_parts(now, properties)
        elif behaviour.copy_way is CopyWay.ITSELF:
            made = self._copy(now, facts.key, headers)
        else:
            made = self._copy_by_scratch(now, headers)
        if not behaviour.copy_takes_tags and behaviour.tags_apart:
            # An empty set too: some stores let the old tags stay.
            put_tags(self._bucket, facts.key, made.version, properties.tags)
        return made

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        unique = sorted(set(keys), key=str.encode)
        return delete_versions(self._bucket, [(key, "") for key in unique])

    def _copy(self, source: ObjectFacts, key: str, headers: Mapping[str, str]) -> ObjectFacts:
        pinned = {
            "x-amz-copy-source": self._bucket.source_header(source.key, source.version),
            "x-amz-copy-source-if-match": f'"{source.etag}"',
        }
        with translated(f"cannot copy {source.key!r} to {key!r}"):
            answer = self._bucket.request(
                "PUT", key, headers={**headers, **pinned}, idempotent=False
            )
            etag = parse_copied_etag(answer.body)
            version = self._bucket.version_of(answer.headers)
        if self._bucket.behaviour.keeps_versions and not version:
            # Ceph 16 does not name the version that a copy has made.
            found = self._reader.facts(key)
            version = found.version if found is not None and found.etag == etag else ""
        return ObjectFacts(
            key, source.size_bytes, etag, 0, version, hashes=self._bucket.hashes(etag)
        )

    def _copy_by_scratch(self, facts: ObjectFacts, headers: Mapping[str, str]) -> ObjectFacts:
        aside = self._copy(facts, self._bucket.new_scratch_key(), {})
        try:
            return self._copy(aside, facts.key, headers)
        finally:
            delete_versions(self._bucket, [(aside.key, aside.version)])

    def _copy_in_parts(self, facts: ObjectFacts, properties: ObjectProperties) -> ObjectFacts:
        upload = self._uploads.begin(facts.key, properties)
        try:
            parts = [
                self._uploads.copy_part(
                    facts.key,
                    upload,
                    number,
                    CopySource(facts.key, facts.version, "", first, end),
                )
                for number, first in enumerate(
                    range(0, facts.size_bytes, _COPY_PART_BYTES), start=1
                )
                for end in [min(first + _COPY_PART_BYTES, facts.size_bytes)]
            ]
            condition = WriteCondition(etag=facts.etag)
            return self._uploads.complete(facts.key, upload, parts, properties, condition)
        except StoreError:
            self._uploads.abort(facts.key, upload)
            raise


def condition_headers(bucket: S3Bucket, condition: WriteCondition) -> dict[str, str]:
    """The headers of a PUT that takes effect only where this holds, as far as the store
    obeys them.
    """
    behaviour = bucket.behaviour
    if condition.absent and behaviour.creates_conditionally:
        return {"if-none-match": "*"}
    if condition.etag and behaviour.put_if_match is EtagForm.QUOTED:
        return {"if-match": f'"{condition.etag}"'}
    if condition.etag and behaviour.put_if_match is EtagForm.BARE:
        return {"if-match": condition.etag}
    return {}


def put_error(error: S3Error, key: str, condition: WriteCondition) -> StoreError:
    """The error of the ports for a PUT that was refused."""
    if condition.etag and error.status == 404:
        return PreconditionFailedError(f"{key!r} does not exist", key=key)
    return store_error(error, f"cannot write {key!r}")


def check_kept(bucket: S3Bucket, properties: ObjectProperties) -> None:
    """Refuse properties that this store would change or drop.

    Raises:
        UnsupportedObjectError: naming what it does not keep.
    """
    check_properties(properties)
    behaviour = bucket.behaviour
    keeps_tags = behaviour.put_keeps_tags or behaviour.tags_apart
    for is_kept, given, what in (
        (keeps_tags, properties.tags, "tags"),
        (behaviour.keeps_headers, properties.headers, "content headers"),
        (behaviour.keeps_acls, properties.acl, "ACLs"),
    ):
        if given and not is_kept:
            raise UnsupportedObjectError(f"the store {bucket.bucket} does not keep {what}")
    if not behaviour.keeps_underscores and any("_" in name for name, _ in properties.metadata):
        raise UnsupportedObjectError(
            f"the store {bucket.bucket} changes metadata names that have an underscore"
        )


def put_tags(bucket: S3Bucket, key: str, version: str, tags: Sequence[tuple[str, str]]) -> None:
    """Replace the tags of an object.

    An empty set is put, not deleted: Ceph 16 answers a deletion in a versioned bucket
    and removes nothing. Ozone takes no empty set.

    Raises:
        StoreError: the store refused.
    """
    body = tags_document(tags)
    digest = base64.b64encode(md5_of(body)).decode()
    query = (("tagging", ""), *((("versionId", version),) if version else ()))
    with translated(f"cannot set the tags of {key!r}"):
        if not tags and bucket.behaviour.is_ozone:
            bucket.request("DELETE", key, query=query)
            return
        bucket.request("PUT", key, query=query, headers={"content-md5": digest}, body=body)


def delete_versions(bucket: S3Bucket, objects: Sequence[tuple[str, str]]) -> list[DeleteFailure]:
    """Delete keys in just these versions; an empty version is the current object.

    Raises:
        StoreError: it is not known which were deleted.
    """
    failures = []
    bulk = dict[str, list[tuple[str, str]]]()
    for key, version in objects:
        place, name = bucket.place(key)
        # Parsers of some stores trim text, and XML cannot carry every character.
        if fits_xml(name) and name == name.strip():
            bulk.setdefault(place, []).append((name, version))
            continue
        query = (("versionId", version),) if version else ()
        try:
            # A second one, after a lost answer, would delete what others wrote since.
            bucket.client.request("DELETE", place, name, query=query, idempotent=bool(version))
        except S3OutcomeUnknownError as error:
            raise store_error(error, f"cannot delete {key!r}") from error
        except S3Error as error:
            if error.status != 404:
                failures.append(DeleteFailure(key, error.message))
    for place, names in bulk.items():
        for first in range(0, len(names), _DELETE_KEYS_MAX):
            failures += _delete_in_bulk(bucket, place, names[first : first + _DELETE_KEYS_MAX])
    return failures


def _delete_in_bulk(
    bucket: S3Bucket, place: str, names: Sequence[tuple[str, str]]
) -> list[DeleteFailure]:
    body = delete_document(names)
    headers = {"content-md5": base64.b64encode(md5_of(body)).decode()}
    with translated(f"cannot delete {len(names)} objects of {place}"):
        # As above.
        is_named = all(version for _, version in names)
        query = (("delete", ""),)
        answer = bucket.client.request(
            "POST", place, query=query, headers=headers, body=body, idempotent=is_named
        )
        failures = parse_delete_failures(answer.body)
    if not {failure.key for failure in failures} <= {name for name, _ in names}:
        # By another name it could be any of them, and none may pass for deleted.
        raise StoreError(f"{place} says of keys that were not named that they stay")
    return [
        DeleteFailure(failure.key.removeprefix(bucket.prefix), failure.reason)
        for failure in failures
    ]


def _tags_counted(headers: Mapping[str, str]) -> bool:
    """Whether HEAD says that there are tags."""
    return headers.get("x-amz-tagging-count", "0") != "0"


def _sliced(pieces: Iterator[bytes], first: int, end: int) -> Iterator[bytes]:
    """The bytes `first` to `end` of a whole object."""
    at = 0
    for piece in pieces:
        part = piece[max(0, first - at) : end - at]
        at += len(piece)
        if part:
            yield part
        if at >= end:
            return


def _counted(pieces: Iterator[bytes], length_bytes: int, key: str) -> Iterator[bytes]:
    left = length_bytes
    with translated(f"cannot read {key!r}"):
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                break
            yield piece
    if left:
        raise StoreUnavailableError(
            f"{length_bytes - left} bytes of {key!r} came, not {length_bytes}", key=key
        )


def _may_hold(condition: WriteCondition, found: ObjectFacts | None) -> bool:
    if condition.absent:
        return found is None
    return not condition.etag or (found is not None and found.etag == condition.etag)
