"""Addresses of stores: `local:PATH`, `s3://BUCKET/PREFIX?endpoint_url=URL`, or
`ozone://OM:PORT/VOLUME/BUCKET/PREFIX?s3=URL`.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """A local bucket; the path is absolute."""

    folder: Path


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket of an S3 store, as it was given; its adapter reads the rest."""

    text: str


@dataclass(frozen=True, slots=True)
class OzoneAddress:
    """A bucket of Ozone by its OM and its gateway, as it was given; its adapter reads
    the rest.
    """

    text: str


StoreAddress: TypeAlias = LocalAddress | S3Address | OzoneAddress


def same_bucket(ours: str, theirs: str) -> bool:
    """Whether two addresses name one bucket, whatever the endpoints that it is reached
    by.
    """
    return ours == theirs or _bucket_of(ours) == _bucket_of(theirs)


def _bucket_of(address: str) -> tuple[str, ...]:
    address = canonical_address(address)
    if address.startswith("local:"):
        return (address,)
    parts = urlsplit(address)
    return (parts.scheme, parts.netloc, parts.path.strip("/"))


def parse_address(text: str) -> StoreAddress:
    """The store that an argument names. Nothing is opened or looked up.

    Raises:
        UsageError: it names none, or contains a secret.
    """
    if not text:
        raise UsageError("the address of a store is empty", hint="Write local:PATH or s3://BUCKET.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise UsageError(
            f"{shown}: not UTF-8 text",
            hint="Names with letters beyond ASCII require a UTF-8 locale, such as C.UTF-8.",
        ) from error
    if not text.isprintable():
        raise UsageError(f"{text!a}: has control characters")
    scheme, colon, rest = text.partition(":")
    if scheme.lower() == "local" and colon:
        return LocalAddress(_folder(text, rest))
    if scheme.lower() == "s3" and rest.startswith("//"):
        return _s3(text, rest[2:])
    if scheme.lower() == "ozone" and rest.startswith("//"):
        return _ozone(rest[2:])
    hint = _HINTS.get(scheme.lower()) if colon else None
    if hint is None:
        # A bare path, or a file that has a colon in its name.
        hint = f"Write local:{text}" if not rest.startswith("//") else _BOTH
    raise UsageError(f"{text}: not the address of a store", hint=hint)


_BOTH = (
    "Use local:PATH, s3://BUCKET/PREFIX?endpoint_url=URL, or ozone://OM:PORT/VOLUME/BUCKET?s3=URL."
)
_OZONE = "Name its OM and its gateway: ozone://OM:8981/VOLUME/BUCKET?s3=http://GATEWAY:9878."
_CREDENTIALS = "Give them by the environment (AWS_ACCESS_KEY_ID and so on) or ?profile=NAME."
_NO_S3 = "Use the S3 interface of that store, if it has one: s3://BUCKET?endpoint_url=URL."
_HINTS = {
    "s3": "Write s3://BUCKET or s3://BUCKET/PREFIX.",
    "file": "Write local:PATH. A plain directory is not a bucket: sync makes one.",
    **dict.fromkeys(("ofs", "o3fs", "o3", "ozone"), _OZONE),
    **dict.fromkeys(("gs", "gcs", "abfs", "abfss", "az", "hdfs", "webhdfs", "swift"), _NO_S3),
    **dict.fromkeys(("s3a", "s3n", "minio"), "Write s3://BUCKET/PREFIX?endpoint_url=URL."),
    **dict.fromkeys(("http", "https"), "Write s3://BUCKET?endpoint_url=URL with this URL."),
}


def canonical_address(text: str) -> str:
    """The address in the one form by which its store names itself.

    Raises:
        UsageError: as `parse_address`.
    """
    match parse_address(text):
        case LocalAddress(folder):
            return f"local:{folder}"
        case S3Address(whole) | OzoneAddress(whole):
            return whole


def check_outside(folder: Path, address: str) -> None:
    """Check that a state folder is not in the folder of a local bucket.

    Raises:
        UsageError: it is; or the address is invalid.
    """
    match parse_address(address):
        case LocalAddress(bucket) if Path(os.path.realpath(folder)).is_relative_to(
            os.path.realpath(bucket)
        ):
            raise UsageError(
                f"the state folder {folder} is inside the bucket {address}",
                hint="Choose one beside it: a bucket has only files of its own.",
            )
        case _:
            pass


def _folder(text: str, path: str) -> Path:
    if not path:
        raise UsageError(f"{text}: names no directory", hint="Write local:PATH.")
    if path.startswith("//"):
        raise UsageError(f"{text}: has no host", hint=f"Write local:/{path.lstrip('/')}.")
    if path.startswith("~"):
        # Shells expand it only where a word begins.
        raise UsageError(f"{text}: ~ is not expanded", hint="Write the whole path, or $HOME.")
    return Path(os.path.abspath(path))


def _ozone(rest: str) -> OzoneAddress:
    if "@" in rest.partition("/")[0]:
        raise UsageError("an address has no credentials", hint=_CREDENTIALS)
    return OzoneAddress("ozone://" + rest)


def _s3(text: str, rest: str) -> S3Address:
    bucket = rest.partition("?")[0].partition("/")[0]
    if "@" in bucket:
        # A secret in the address would appear in every log and process list. This
        # message goes there too.
        raise UsageError(
            "an address has no credentials",
            hint=_CREDENTIALS,
        )
    if not bucket:
        raise UsageError(f"{text}: names no bucket", hint=_HINTS["s3"])
    return S3Address("s3://" + rest)
