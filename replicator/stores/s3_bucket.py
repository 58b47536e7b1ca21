"""One bucket below one prefix: where keys lie, and what an S3 error means for a store.

Keys of the ports are relative to the prefix. Those below SCRATCH_PREFIX are ours: they
lie in the scratch bucket if there is one, listings leave them out, and nobody else
writes them.
"""

import base64
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from merkle.checksum import Buffer
from proof.item import ContentHash, HashAlgorithm
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    UnsupportedObjectError,
)
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_documents import (
    checked_name,
    parse_etag,
    parse_number,
    parse_time_ms,
)
from replicator.stores.s3_properties import check_key
from runtime.errors import UsageError
from runtime.s3 import Query, S3Client
from runtime.s3_account import S3Settings
from runtime.s3_answers import (
    S3Answer,
    S3Error,
    S3OutcomeUnknownError,
    S3ProtocolError,
    S3UnavailableError,
)

SCRATCH_PREFIX = ".treefold-scratch/"
_TOKEN_BYTES = 12
_MD5 = re.compile("[0-9a-f]{32}")
_PARAMETERS = ("endpoint_url", "region", "profile", "addressing", "scratch_bucket")
_ERRORS: tuple[tuple[type[StoreError], frozenset[str]], ...] = (
    (
        ObjectMissingError,
        frozenset(
            {"NoSuchKey", "NoSuchVersion", "NoSuchUpload", "NotFound", "InvalidPart"}
            | {"InvalidPartOrder", "MethodNotAllowed"}
        ),
    ),
    (
        PreconditionFailedError,
        frozenset({"PreconditionFailed", "ConditionalRequestConflict", "OperationAborted"}),
    ),
    (
        DigestMismatchError,
        frozenset({"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch"}),
    ),
    (
        UnsupportedObjectError,
        frozenset(
            {"EntityTooLarge", "EntityTooSmall", "InvalidTag", "KeyTooLong", "KeyTooLongError"}
            | {"MetadataTooLarge", "RequestHeaderSectionTooLarge"}
        ),
    ),
)
# A declared hash over the whole object, and its bytes, by the name of its header.
_CHECKSUMS = {
    "x-amz-checksum-crc32": (HashAlgorithm.CRC32, 4),
    "x-amz-checksum-crc32c": (HashAlgorithm.CRC32C, 4),
    "x-amz-checksum-crc64nvme": (HashAlgorithm.CRC64NVME, 8),
    "x-amz-checksum-sha256": (HashAlgorithm.SHA256, 32),
}


@dataclass(frozen=True, slots=True)
class S3Location:
    """The parts of `s3://BUCKET/PREFIX?endpoint_url=…&region=…&profile=…`; `prefix` is
    empty or ends with a slash.
    """

    bucket: str
    prefix: str
    settings: S3Settings
    scratch_bucket: str

    @classmethod
    def parse(cls, address: str) -> "S3Location":
        """The parts of an address; its prefix is percent-encoded where it must be.

        Raises:
            UsageError: it is no such address.
        """
        hint = "Write it as s3://BUCKET/PREFIX?endpoint_url=https://HOST&profile=NAME."
        try:
            parts = urlsplit(address)
            given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
        except ValueError as error:
            if urlsplit(address).query:
                raise UsageError(f"{address!r} is not an address: {error}", hint=hint) from error
            given = {}
        if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.fragment:
            raise UsageError(f"{address!r} is not the address of an S3 bucket", hint=hint)
        unknown = sorted(set(given) - set(_PARAMETERS))
        if unknown:
            raise UsageError(
                f"{address!r} has unknown parameters: {', '.join(unknown)}",
                hint=f"Known are {', '.join(_PARAMETERS)}.",
            )
        prefix = unquote(parts.path.removeprefix("/"))
        return cls(
            bucket=parts.netloc,
            prefix=prefix if not prefix or prefix.endswith("/") else prefix + "/",
            settings=S3Settings(
                **{name: value for name, value in given.items() if name != "scratch_bucket"}
            ),
            scratch_bucket=given.get("scratch_bucket", ""),
        )


@dataclass(slots=True)
class S3Bucket:
    """A bucket's client and what is known of the store. Thread-safe after the probe."""

    client: S3Client
    bucket: str
    prefix: str
    scratch_bucket: str
    behaviour: S3Behaviour = field(default_factory=S3Behaviour)
    _scratch_keys: set[str] = field(default_factory=set)

    def new_scratch_key(self) -> str:
        """A scratch key that nobody else uses."""
        key = SCRATCH_PREFIX + secrets.token_hex(_TOKEN_BYTES)
        self._scratch_keys.add(key)
        return key

    def place(self, key: str) -> tuple[str, str]:
        """Bucket and full name of a key."""
        is_scratch = key.startswith(SCRATCH_PREFIX)
        return (self.scratch_bucket if is_scratch else self.bucket), self.prefix + key

    def check_writable(self, key: str) -> None:
        """Refuse a key that cannot be written.

        Raises:
            UnsupportedObjectError: no store takes it, or it is one of our own.
        """
        check_key(key)
        check_key(self.prefix + key)
        if key.startswith(SCRATCH_PREFIX) and key not in self._scratch_keys:
            raise UnsupportedObjectError(
                f"keys below {SCRATCH_PREFIX} are used for scratch objects", key=key
            )

    def source_header(self, key: str, version: str) -> str:
        """The value of x-amz-copy-source."""
        bucket, name = self.place(key)
        text = f"/{quote(bucket)}/{quote(name, safe='/~')}"
        return f"{text}?versionId={quote(version, safe='')}" if version else text

    def relative(self, name: str) -> str | None:
        """A key as the ports see it; None for one of ours and for the prefix itself,
        which is a folder's marker and no object in it.

        Raises:
            StoreError: the store listed a key that is not below the prefix.
        """
        if not name.startswith(self.prefix):
            raise StoreError(f"the store listed {name!r}, which is not below {self.prefix!r}")
        key = name[len(self.prefix) :]
        return None if not key or key.startswith(SCRATCH_PREFIX) else key

    def request(
        self,
        method: str,
        key: str,
        *,
        query: Query = (),
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
        signs_body: bool = True,
        idempotent: bool | None = None,
    ) -> S3Answer:
        """A request about one object; see S3Client.request.

        Raises:
            S3Error: before it is translated.
        """
        bucket, name = self.place(key)
        return self.client.request(
            method,
            bucket,
            name,
            query=query,
            headers=headers,
            body=body,
            signs_body=signs_body,
            idempotent=idempotent,
        )

    def version_of(self, headers: Mapping[str, str]) -> str:
        """The version that an answer names, empty where the bucket keeps none.

        Raises:
            S3ProtocolError: it is too long for one.
        """
        version = headers.get("x-amz-version-id", "") if self.behaviour.keeps_versions else ""
        return version and checked_name(version, "version")

    def hashes(
        self, etag: str, headers: Mapping[str, str] | None = None
    ) -> tuple[ContentHash, ...]:
        """What the store recorded of the whole object's bytes."""
        found = []
        if self.behaviour.etag_is_md5 and is_md5(etag):
            found.append(ContentHash(HashAlgorithm.MD5, bytes.fromhex(etag)))
        # A composite checksum is a hash of hashes, and one without a type may be.
        if headers and headers.get("x-amz-checksum-type", "") == "FULL_OBJECT":
            for name, (algorithm, size_bytes) in _CHECKSUMS.items():
                digest = _decoded_digest(headers.get(name, ""))
                # moto sends a CRC of 32 bits where one of 64 is due: it proves nothing.
                if len(digest) == size_bytes:
                    found.append(ContentHash(algorithm, digest))
        return tuple(found)


def crc_headers(crc: HashAlgorithm) -> dict[str, str]:
    """The headers by which an upload in parts asks for a CRC of the whole object."""
    return {
        "x-amz-checksum-algorithm": crc.value.upper(),
        "x-amz-checksum-type": "FULL_OBJECT",
    }


def digest_header(one: ContentHash) -> dict[str, str]:
    """The header that states a hash of a body, or of a whole object."""
    text = base64.b64encode(one.digest).decode()
    return {f"x-amz-checksum-{one.algorithm.value}": text}


def is_md5(etag: str) -> bool:
    """Whether an ETag has the form of an MD5, as those of one PUT have."""
    return _MD5.fullmatch(etag) is not None


def etag_of(headers: Mapping[str, str]) -> str:
    """The ETag of an answer without its quotes.

    Raises:
        S3ProtocolError: there is none.
    """
    return parse_etag(headers.get("etag", ""))


def modified_ms_of(headers: Mapping[str, str]) -> int:
    """When an object was written, in ms since the epoch; S3 says whole seconds here.

    Raises:
        S3ProtocolError: the answer does not say.
    """
    return _time_ms(headers.get("last-modified", ""))


def length_of(headers: Mapping[str, str]) -> int:
    """The length of an answer's body in bytes.

    Raises:
        S3ProtocolError: the answer does not say.
    """
    return parse_number(headers.get("content-length", ""), "Content-Length")


def check_range(headers: Mapping[str, str], first: int, end: int) -> None:
    """Check that an answer has the bytes `first` to `end`, if it says what it has.

    Raises:
        S3ProtocolError: it has another part of the object.
    """
    found = headers.get("content-range", "")
    if found and not found.startswith(f"bytes {first}-{end - 1}/"):
        raise S3ProtocolError(f"the store sent {found[:40]!r}, not bytes {first} to {end}")


# Objects are often written together.
@lru_cache(maxsize=1024)
def _time_ms(text: str) -> int:
    return parse_time_ms(text, "Last-Modified", parsedate_to_datetime)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn errors of S3 into those of the ports.

    Raises:
        StoreError: whose message begins with `what`.
    """
    try:
        yield
    except S3Error as error:
        raise store_error(error, what) from error


def store_error(error: S3Error, what: str) -> StoreError:
    """The error of the ports for an error of S3."""
    kind: type[StoreError] = StoreError
    if isinstance(error, S3UnavailableError | S3OutcomeUnknownError):
        kind = StoreUnavailableError
    else:
        for candidate, codes in _ERRORS:
            if error.s3_code in codes:
                kind = candidate
    facts = {name: value for name, value in error.facts.items() if value}
    return kind(f"{what}: {error.message}", hint=error.hint, **facts)


def _decoded_digest(text: str) -> bytes:
    """A checksum header's bytes.

    Raises:
        S3ProtocolError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise S3ProtocolError(f"the store sent {text[:40]!r} as a checksum") from error
