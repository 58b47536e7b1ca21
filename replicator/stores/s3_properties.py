"""Properties of an object as HTTP headers and back, and which of them S3 keeps.

What S3 would trim, fold or drop is refused before a byte is sent: a property that
arrives changed would differ for ever.
"""

import re
from collections.abc import Mapping
from urllib.parse import quote

from replicator.stores.capabilities import CONTENT_HEADERS
from replicator.stores.errors import UnsupportedObjectError
from replicator.stores.port import ObjectProperties

KEY_BYTES_MAX = 1024
METADATA_BYTES_MAX = 2048
_TAGS_MAX = 10
_TAG_NAME_MAX = 128
_TAG_VALUE_MAX = 256

_META = "x-amz-meta-"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
# Printable ASCII without blanks around: stores change other text, each in its way.
_VALUE = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_GRANT_HEADERS = {
    "FULL_CONTROL": "x-amz-grant-full-control",
    "READ": "x-amz-grant-read",
    "READ_ACP": "x-amz-grant-read-acp",
    "WRITE": "x-amz-grant-write",
    "WRITE_ACP": "x-amz-grant-write-acp",
}


def check_key(key: str) -> None:
    """Refuse a key that no S3 store takes.

    Raises:
        UnsupportedObjectError: it is empty, too long or not text.
    """
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise UnsupportedObjectError("a key is not UTF-8", key=repr(key)) from error
    if not 1 <= length <= KEY_BYTES_MAX:
        raise UnsupportedObjectError(
            f"a key has {length} bytes, S3 takes 1 to {KEY_BYTES_MAX}", key=key
        )


def check_properties(properties: ObjectProperties) -> None:
    """Refuse what S3 stores do not keep as given.

    Raises:
        UnsupportedObjectError: a name or value would be changed, or there are too many.
    """
    for kind, group in (
        ("metadata", properties.metadata),
        ("tag", properties.tags),
        ("header", properties.headers),
    ):
        names = [name for name, _ in group]
        if len(set(names)) < len(names):
            raise UnsupportedObjectError(f"two values of one {kind} name")
    for name, value in properties.metadata:
        if not _NAME.fullmatch(name):
            raise UnsupportedObjectError(f"{name!r} is no name that S3 keeps for metadata")
        _check_value(name, value)
    size = sum(len(name) + len(value) for name, value in properties.metadata)
    if size > METADATA_BYTES_MAX:
        raise UnsupportedObjectError(
            f"metadata has {size} bytes, S3 takes {METADATA_BYTES_MAX}", size_bytes=size
        )
    for name, value in properties.headers:
        if name not in CONTENT_HEADERS:
            raise UnsupportedObjectError(f"S3 does not keep the header {name!r}")
        _check_value(name, value)
    if len(properties.tags) > _TAGS_MAX:
        raise UnsupportedObjectError(f"{len(properties.tags)} tags; S3 takes {_TAGS_MAX}")
    for name, value in properties.tags:
        _check_tag(name, value)
    for grantee, permission in properties.acl:
        if permission not in _GRANT_HEADERS:
            raise UnsupportedObjectError(f"S3 has no permission {permission!r} for {grantee}")


def headers_of(properties: ObjectProperties, *, with_tags: bool, owner: str = "") -> dict[str, str]:
    """The headers by which a write sets these properties; `owner` is the ID of the
    bucket's owner at this store.
    """
    headers = {_META + name: value for name, value in properties.metadata}
    headers |= dict(properties.headers)
    if with_tags and properties.tags:
        headers["x-amz-tagging"] = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in properties.tags
        )
    # Grants in headers replace the default one, which is the owner's.
    own = ((f'id="{owner}"', "FULL_CONTROL"),) if properties.acl else ()
    for grantee, permission in (*own, *properties.acl):
        name = _GRANT_HEADERS[permission]
        headers[name] = ", ".join(filter(None, (headers.get(name, ""), grantee)))
    return headers


def metadata_of(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """User metadata in the headers of an object, sorted by name."""
    return tuple(
        sorted(
            (name.removeprefix(_META), _text(value))
            for name, value in headers.items()
            if name.startswith(_META)
        )
    )


def content_headers_of(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Content headers of an object, sorted by name; without the encoding that only
    described how it was once sent.
    """
    found = {name: value for name, value in headers.items() if name in CONTENT_HEADERS}
    if "content-encoding" in found:
        codings = [coding.strip() for coding in found["content-encoding"].split(",")]
        kept = ",".join(coding for coding in codings if coding not in ("", "aws-chunked"))
        found["content-encoding"] = kept
    return tuple(sorted((name, value) for name, value in found.items() if value))


def _check_value(name: str, value: str) -> None:
    if not _VALUE.fullmatch(value):
        raise UnsupportedObjectError(
            f"the value of {name} is not printable ASCII without blanks around it",
            hint="S3 keeps other text in no form that all stores agree on; encode it.",
        )


def _check_tag(name: str, value: str) -> None:
    if not 1 <= len(name) <= _TAG_NAME_MAX or len(value) > _TAG_VALUE_MAX:
        raise UnsupportedObjectError(
            f"a tag has {len(name)} and {len(value)} characters;"
            f" S3 takes {_TAG_NAME_MAX} and {_TAG_VALUE_MAX}"
        )
    if any(character < " " for character in name + value) or not (name + value).isprintable():
        raise UnsupportedObjectError(f"the tag {name!r} has characters that S3 does not keep")


def _text(value: str) -> str:
    """A header as its writer meant it: HTTP libraries read bytes as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value
