"""Objects of a bucket of Ozone: facts from its OM, bytes through an S3 gateway."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from merkle.checksum import Buffer
from ozone.key_checksum import UnrecordedChecksumError, key_crc
from proof.item import ContentHash, HashAlgorithm
from replicator.stores.errors import (
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.ozone_bucket import (
    OzoneBucket,
    facts_of,
    md5_hashes,
    properties_of,
    translated,
    without_acl,
)
from replicator.stores.port import (
    CopySource,
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    PieceWriter,
    UploadedPart,
    UploadId,
    UploadWriter,
    WholeObject,
    WriteCondition,
)
from replicator.stores.s3_objects import S3Reader, S3Writer
from replicator.stores.stamps import same_stamp

_DELETE_KEYS_MAX = 1000
# Of both CRCs that Ozone's clients record.
_CRC_BYTES = 4
# What a gateway says of a file where a directory is, and the other way round.
_PATH_CONFLICT = "InvalidRequest"


class OzoneReader:
    """See ObjectReader."""

    def __init__(self, bucket: OzoneBucket, gateway: S3Reader) -> None:
        self._bucket, self._gateway = bucket, gateway

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader. Of another version than the current one nothing is kept.
        An object that came in parts, or through no gateway, has the CRC that its client
        has recorded.
        """
        found = self._bucket.key(key)
        if found is None or (version and version != str(found.update_id)):
            return None
        facts = facts_of(key, found)
        return facts if facts.hashes or not found.size_bytes else self._recorded(facts)

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        found = self._bucket.key(key)
        if found is None or (version and version != str(found.update_id)):
            raise ObjectMissingError(f"{key!r} does not exist", key=key)
        return properties_of(found)

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader."""
        found = self._bucket.key(facts.key)
        if found is None:
            raise ObjectMissingError(f"{facts.key!r} does not exist", key=facts.key)
        if not same_stamp(facts_of(facts.key, found), facts):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)
        return properties_of(found)

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader. The ETag is a condition. Where that is no hash of the bytes
        the OM is asked afterwards whether it was this object.
        """
        what = f"cannot read {facts.key!r}"
        # The gateway knows no versions.
        pinned = replace(facts, version="")
        with (
            self._bucket.guarded(what),
            self._gateway.read(pinned, first=first, end=end) as pieces,
        ):
            yield pieces if facts.hashes else self._confirmed(facts, pieces)

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader."""
        with self.read(facts) as pieces:
            body = b"".join(pieces)
        return WholeObject(self.properties_of(facts), body)

    def _recorded(self, facts: ObjectFacts) -> ObjectFacts:
        """The facts with the CRC that datanodes have recorded, where they have one."""
        found = self._bucket.key(facts.key, with_datanodes=True)
        if found is None or facts_of(facts.key, found) != facts:
            return facts
        try:
            crc, value = key_crc(found, self._bucket.records)
        except UnrecordedChecksumError:
            return facts
        digest = value.to_bytes(_CRC_BYTES, "big")
        return replace(facts, hashes=(ContentHash(HashAlgorithm[crc.name], digest),))

    def _confirmed(self, facts: ObjectFacts, pieces: Iterator[bytes]) -> Iterator[bytes]:
        yield from pieces
        found = self._bucket.key(facts.key)
        now = None if found is None else facts_of(facts.key, found)
        if now is None or not same_stamp(replace(now, version=""), replace(facts, version="")):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)


class OzoneWriter:
    """See ObjectWriter."""

    def __init__(self, bucket: OzoneBucket, gateway: S3Writer) -> None:
        self._bucket, self._gateway = bucket, gateway

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        self._bucket.check_writable(key)
        given = without_acl(properties)
        with _named_conflicts(key):
            made = self._gateway.put(key, body, given, condition)
        self._bucket.keep_acl(made, properties, is_new=condition.absent)
        return _with_md5(made)

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter. The OM replaces tags or the ACL; else the gateway copies
        the object to a scratch object and back. What it has already is not written: a
        syncer that was killed has written it, and could not record that.
        """
        given = without_acl(properties)
        found = self._bucket.key(facts.key)
        if found is None or not same_stamp(facts_of(facts.key, found), facts):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)
        pinned, known = replace(facts, version=""), properties_of(found)
        has_acl = properties.acl or properties.replaces_acl
        if known == properties or (not has_acl and without_acl(known) == given):
            return replace(pinned, modified_ms=0)
        if tags_only and properties.tags:
            name = self._bucket.name(facts.key)
            with translated(f"cannot set the tags of {facts.key!r}"):
                self._bucket.manager.put_tags(*self._bucket.place, name, properties.tags)
            return replace(pinned, modified_ms=0)
        if has_acl and without_acl(known) == given:
            self._bucket.keep_acl(facts, properties)
            return replace(pinned, modified_ms=0)
        made = self._gateway.put_properties(pinned, given, tags_only=tags_only)
        self._bucket.keep_acl(made, properties)
        return replace(_with_md5(made), version="")

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter. Of a bucket with directories each key is looked at first:
        a directory is no object, and stays.
        """
        unique, failures = sorted(set(keys), key=str.encode), list[DeleteFailure]()
        if self._bucket.is_tree:
            unique = [key for key in unique if self._bucket.key(key) is not None]
        for first in range(0, len(unique), _DELETE_KEYS_MAX):
            names = {self._bucket.name(key): key for key in unique[first:][:_DELETE_KEYS_MAX]}
            with translated(f"cannot delete {len(names)} objects"):
                left = self._bucket.manager.delete_keys(*self._bucket.place, list(names))
            failures += [DeleteFailure(names[name], reason) for name, reason in left.items()]
        return failures


class OzoneRenamer:
    """See ObjectRenamer."""

    def __init__(self, bucket: OzoneBucket) -> None:
        self._bucket = bucket

    def rename(self, facts: ObjectFacts, key: str) -> ObjectFacts:
        """See ObjectRenamer. The OM takes no condition: the object is looked at before,
        and by its ID afterwards.
        """
        bucket = self._bucket
        bucket.check_writable(key)
        found = bucket.key(facts.key)
        if found is None or not same_stamp(facts_of(facts.key, found), facts):
            raise PreconditionFailedError(f"{facts.key!r} changed", key=facts.key)
        if bucket.key(key) is not None:
            raise PreconditionFailedError(f"there is an object {key!r}", key=key)
        what = f"cannot rename {facts.key!r} to {key!r}"
        try:
            with translated(what):
                bucket.manager.rename_key(*bucket.place, found.name, bucket.name(key))
        except ObjectMissingError as error:
            raise PreconditionFailedError(f"{facts.key!r} is gone", key=facts.key) from error
        made = bucket.key(key)
        if made is None or made.object_id != found.object_id:
            raise PreconditionFailedError(f"{key!r} changed while it was renamed", key=key)
        return replace(facts_of(key, made), version="")


class OzoneUploadWriter:
    """See UploadWriter: the gateway's, for names that the bucket keeps."""

    def __init__(self, bucket: OzoneBucket, gateway: UploadWriter) -> None:
        self._bucket, self._gateway = bucket, gateway

    def begin(self, key: str, properties: ObjectProperties) -> UploadId:
        """See UploadWriter."""
        self._bucket.check_writable(key)
        with _named_conflicts(key):
            return self._gateway.begin(key, without_acl(properties))

    def write_part(
        self, key: str, upload: UploadId, number: int, body: Buffer, *, with_digest: bool = True
    ) -> UploadedPart:
        """See UploadWriter."""
        return self._gateway.write_part(key, upload, number, body, with_digest=with_digest)

    def copy_part(
        self, key: str, upload: UploadId, number: int, source: CopySource
    ) -> UploadedPart:
        """See UploadWriter."""
        return self._gateway.copy_part(key, upload, number, replace(source, version=""))

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
        given = without_acl(properties)
        with _named_conflicts(key):
            made = self._gateway.complete(key, upload, parts, given, condition, whole)
        self._bucket.keep_acl(made, properties, is_new=condition.absent)
        return made

    def abort(self, key: str, upload: UploadId) -> None:
        """See UploadWriter."""
        self._gateway.abort(key, upload)


class OzonePieceWriter:
    """See PieceWriter: the gateway's, for names that the bucket keeps."""

    def __init__(self, bucket: OzoneBucket, gateway: PieceWriter) -> None:
        self._bucket, self._gateway = bucket, gateway

    def put_pieces(
        self,
        facts: ObjectFacts,
        md5: bytes,
        pieces: Iterable[Buffer],
        properties: ObjectProperties,
        condition: WriteCondition,
    ) -> ObjectFacts:
        """See PieceWriter."""
        self._bucket.check_writable(facts.key)
        given = without_acl(properties)
        with _named_conflicts(facts.key):
            made = self._gateway.put_pieces(facts, md5, pieces, given, condition)
        self._bucket.keep_acl(made, properties, is_new=condition.absent)
        return _with_md5(made)

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """See PieceWriter."""
        return self._gateway.write_part_pieces(key, upload, number, pieces, length_bytes)


@contextmanager
def _named_conflicts(key: str) -> Iterator[None]:
    """Name a key that cannot be written beside those of the bucket.

    Raises:
        UnsupportedObjectError: a part of its path is a file, or it is a directory.
    """
    try:
        yield
    except StoreError as error:
        if error.facts.get("s3_code") != _PATH_CONFLICT:
            raise
        raise UnsupportedObjectError(
            f"{key!r} is a directory of the bucket, or is below one of its files",
            hint="Copy to a bucket with the layout OBJECT_STORE.",
            key=key,
        ) from error


def _with_md5(facts: ObjectFacts) -> ObjectFacts:
    """What a gateway answered to a write, with the MD5 that it computed."""
    return replace(facts, hashes=md5_hashes(facts.etag))
