"""XML documents of S3: pure functions from bytes to values, and from values to bytes.

What a document must have and has not, or has in another form, is an error: a listing
that is half understood would look like missing objects.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from replicator.stores.port import DeleteFailure, ObjectFacts, UploadedPart, UploadId
from runtime.s3_answers import S3ProtocolError, parse_document

_XSI_TYPE = "{http://www.w3.org/2001/XMLSchema-instance}type"
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_KEY_ESCAPES = _ESCAPES | str.maketrans({"\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})
# A missing object counts as deleted.
_MISSING = {"NoSuchKey", "NoSuchVersion"}
# Up to a petabyte: more is no size, and an index keeps no more.
_DIGITS_MAX = 15
# Of an ETag or a version; those of stores have less than a hundred characters.
_NAME_MAX = 1024
# Most objects of a bucket have one of a few ACLs and sets of tags. Their documents are
# parsed once; larger ones than this are rare, and not kept.
_KEPT_BYTES_MAX = 4 << 10
_KEPT_MAX = 512


@dataclass(frozen=True, slots=True)
class ListingPage:
    """One page of current objects; `token` continues, empty on the last page."""

    objects: tuple[ObjectFacts, ...]
    token: str


@dataclass(frozen=True, slots=True)
class VersionsPage:
    """One page of versions and delete markers, in the order of the document; the
    markers continue, empty on the last page.
    """

    versions: tuple[ObjectFacts, ...]
    key_marker: str
    version_marker: str


@dataclass(frozen=True, slots=True)
class UploadsPage:
    """One page of unfinished uploads with the time of their beginning in ms."""

    uploads: tuple[tuple[str, UploadId, int], ...]
    key_marker: str
    upload_marker: str


@dataclass(frozen=True, slots=True)
class PartsPage:
    """One page of an upload's parts; `marker` continues, empty on the last page."""

    parts: tuple[UploadedPart, ...]
    marker: str


def parse_listing(body: bytes, *, needs_etags: bool = True) -> ListingPage:
    """A page of ListObjectsV2. Without `needs_etags` an entry may lack its ETag, as
    those of directories at Ozone do, and has an empty one.

    Raises:
        S3ProtocolError: it is none.
    """
    root = parse_document(body, "ListBucketResult")
    objects = tuple(
        ObjectFacts(
            key=_key(root, entry),
            size_bytes=_number(entry, "Size"),
            etag=_etag(entry) if needs_etags or entry.findtext("ETag") else "",
            modified_ms=_time_ms(entry, "LastModified"),
        )
        for entry in root.findall("Contents")
    )
    token = _text(root, "NextContinuationToken") if _is_truncated(root) else ""
    return ListingPage(objects, token)


def parse_versions(body: bytes) -> VersionsPage:
    """A page of ListObjectVersions; of one key the newest comes first.

    Raises:
        S3ProtocolError: it is none.
    """
    root = parse_document(body, "ListVersionsResult")
    versions, latest = [], set[ObjectFacts]()
    for entry in root:
        if entry.tag not in ("Version", "DeleteMarker"):
            continue
        is_marker = entry.tag == "DeleteMarker"
        versions.append(
            ObjectFacts(
                key=_key(root, entry),
                size_bytes=0 if is_marker else _number(entry, "Size"),
                etag="" if is_marker else _etag(entry),
                modified_ms=_time_ms(entry, "LastModified"),
                version=checked_name(_text(entry, "VersionId"), "VersionId"),
                is_delete_marker=is_marker,
            )
        )
        if (entry.findtext("IsLatest") or "").strip() == "true":
            latest.add(versions[-1])
    names = [facts.key.encode() for facts in versions]
    if names != sorted(names):
        # moto lists the markers behind the versions.
        versions.sort(
            key=lambda facts: (facts.key.encode(), facts not in latest, -facts.modified_ms)
        )
    if not _is_truncated(root):
        return VersionsPage(tuple(versions), "", "")
    marker = _decoded(root, _text(root, "NextKeyMarker"))
    return VersionsPage(tuple(versions), marker, root.findtext("NextVersionIdMarker") or "")


def parse_uploads(body: bytes) -> UploadsPage:
    """A page of ListMultipartUploads.

    Raises:
        S3ProtocolError: it is none.
    """
    root = parse_document(body, "ListMultipartUploadsResult")
    uploads = tuple(
        (_key(root, entry), UploadId(_text(entry, "UploadId")), _time_ms(entry, "Initiated"))
        for entry in root.findall("Upload")
    )
    if not _is_truncated(root):
        return UploadsPage(uploads, "", "")
    marker = _decoded(root, _text(root, "NextKeyMarker"))
    return UploadsPage(uploads, marker, root.findtext("NextUploadIdMarker") or "")


def parse_parts(body: bytes) -> PartsPage:
    """A page of ListParts.

    Raises:
        S3ProtocolError: it is none.
    """
    # The second is moto's name for it.
    root = parse_document(body, "ListPartsResult", "ListPartsResponse")
    parts = tuple(
        UploadedPart(_number(entry, "PartNumber"), _number(entry, "Size"), _etag(entry))
        for entry in root.findall("Part")
    )
    return PartsPage(parts, _text(root, "NextPartNumberMarker") if _is_truncated(root) else "")


def parse_tags(body: bytes) -> tuple[tuple[str, str], ...]:
    """Names and values of GetObjectTagging, sorted.

    Raises:
        S3ProtocolError: it is no such document.
    """
    return _tags(body) if len(body) <= _KEPT_BYTES_MAX else _tags.__wrapped__(body)


@lru_cache(maxsize=_KEPT_MAX)
def _tags(body: bytes) -> tuple[tuple[str, str], ...]:
    root = parse_document(body, "Tagging")
    tags = (
        (entry.findtext("Key") or "", entry.findtext("Value") or "")
        for entry in root.iterfind("TagSet/Tag")
    )
    return tuple(sorted(tags))


def tags_document(tags: Iterable[tuple[str, str]]) -> bytes:
    """The body of PutObjectTagging."""
    entries = "".join(
        f"<Tag><Key>{_escaped(name)}</Key><Value>{_escaped(value)}</Value></Tag>"
        for name, value in tags
    )
    return f"<Tagging><TagSet>{entries}</TagSet></Tagging>".encode()


def parse_grants(body: bytes) -> tuple[tuple[str, str], ...]:
    """Grantees and permissions of an ACL, sorted, without the owner's own full control;
    a grantee is written as in grant headers: `id="…"`, `uri="…"`.

    Raises:
        S3ProtocolError: it is no ACL.
    """
    return _grants(body) if len(body) <= _KEPT_BYTES_MAX else _grants.__wrapped__(body)


@lru_cache(maxsize=_KEPT_MAX)
def _grants(body: bytes) -> tuple[tuple[str, str], ...]:
    root = parse_document(body, "AccessControlPolicy")
    owner = root.findtext("Owner/ID") or ""
    grants = set()
    for grant in root.iterfind("AccessControlList/Grant"):
        grantee = grant.find("Grantee")
        permission = _text(grant, "Permission")
        if grantee is None:
            raise S3ProtocolError("the store sent a grant without a grantee")
        names = {"ID": "id", "URI": "uri", "EmailAddress": "emailAddress"}
        found = [
            (name, value) for tag, name in names.items() if (value := grantee.findtext(tag) or "")
        ]
        if not found:
            raise S3ProtocolError(f"the store sent an unknown grantee {grantee.get(_XSI_TYPE)}")
        name, value = found[0]
        if (name, value, permission) != ("id", owner, "FULL_CONTROL"):
            grants.add((f'{name}="{value}"', permission))
    return tuple(sorted(grants))


def parse_owner(body: bytes) -> str:
    """The ID of the owner in an ACL.

    Raises:
        S3ProtocolError: it is no ACL, or names no owner.
    """
    return _text(parse_document(body, "AccessControlPolicy"), "Owner/ID")


def parse_versioning(body: bytes) -> bool:
    """Whether a bucket has kept versions at any time.

    Raises:
        S3ProtocolError: it is no such document.
    """
    # The second is moto's name for it.
    root = parse_document(body, "VersioningConfiguration", "GetBucketVersioningResponse")
    status = root.findtext("Status") or ""
    return status.strip() in ("Enabled", "Suspended")


def parse_upload_id(body: bytes) -> UploadId:
    """The ID in the answer of CreateMultipartUpload.

    Raises:
        S3ProtocolError: there is none.
    """
    return UploadId(_text(parse_document(body, "InitiateMultipartUploadResult"), "UploadId"))


def parse_copied_etag(body: bytes) -> str:
    """The ETag in the answer of UploadPartCopy or CopyObject.

    Raises:
        S3ProtocolError: there is none.
    """
    return _etag(parse_document(body, "CopyPartResult", "CopyObjectResult"))


def parse_completed_etag(body: bytes) -> str:
    """The ETag in the answer of CompleteMultipartUpload; Ceph 16 sends an empty one.

    Raises:
        S3ProtocolError: it is no such answer.
    """
    root = parse_document(body, "CompleteMultipartUploadResult")
    text = (root.findtext("ETag") or "").strip()
    return parse_etag(text) if text.strip('"') else ""


def complete_document(parts: Sequence[UploadedPart]) -> bytes:
    """The body of CompleteMultipartUpload; parts ascend."""
    assert [part.number for part in parts] == sorted({part.number for part in parts})
    entries = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{_escaped(part.etag)}</ETag></Part>"
        for part in parts
    )
    return f"<CompleteMultipartUpload>{entries}</CompleteMultipartUpload>".encode()


def delete_document(objects: Iterable[tuple[str, str]]) -> bytes:
    """The body of DeleteObjects, quiet, for keys with versions; an empty version is the
    current object.
    """
    entries = "".join(
        f"<Object><Key>{_escaped_key(key)}</Key>"
        + (f"<VersionId>{_escaped(version)}</VersionId>" if version else "")
        + "</Object>"
        for key, version in objects
    )
    return f"<Delete><Quiet>true</Quiet>{entries}</Delete>".encode()


def parse_delete_failures(body: bytes) -> list[DeleteFailure]:
    """What DeleteObjects did not delete.

    Raises:
        S3ProtocolError: it is no such answer.
    """
    root = parse_document(body, "DeleteResult")
    return [
        DeleteFailure(_text(entry, "Key"), ": ".join(filter(None, (code, text))))
        for entry in root.findall("Error")
        if (code := (entry.findtext("Code") or "").strip()) not in _MISSING
        for text in [(entry.findtext("Message") or "").strip()]
    ]


def parse_number(text: str, name: str) -> int:
    """A number in an answer, where it stands as `name`.

    Raises:
        S3ProtocolError: it is none, or larger than any object.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise _invalid(text, name)
    return int(text)


def parse_etag(text: str) -> str:
    """An ETag without its quotes.

    Raises:
        S3ProtocolError: it is empty, or too long for one.
    """
    return checked_name(text.removeprefix("W/").strip('"'), "ETag")


def checked_name(text: str, name: str) -> str:
    """An ETag, or a version, that an index can keep.

    Raises:
        S3ProtocolError: it is empty, or too long for one.
    """
    if not 0 < len(text) <= _NAME_MAX:
        raise _invalid(text, name)
    return text


def parse_time_ms(text: str, name: str, parse: Callable[[str], datetime]) -> int:
    """A time in an answer, in ms since 1970, as `parse` reads it.

    Raises:
        S3ProtocolError: it is none, or before 1970.
    """
    try:
        when = parse(text)
        whole = when.replace(tzinfo=when.tzinfo or UTC)
        # Not timestamp() * 1000: floats lose the last digit.
        time_ms = int(whole.replace(microsecond=0).timestamp()) * 1000 + whole.microsecond // 1000
    except (ValueError, OverflowError) as error:
        raise _invalid(text, name) from error
    if time_ms < 0:
        raise _invalid(text, name)
    return time_ms


def fits_xml(text: str) -> bool:
    """Whether XML 1.0 can carry this text at all."""
    return all(
        character in "\t\n\r" or (character >= " " and character not in "\ufffe\uffff")
        for character in text
    )


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _escaped_key(key: str) -> str:
    # A parser turns a raw carriage return, and in places a tab, into something else.
    return key.translate(_KEY_ESCAPES)


def _invalid(text: str, name: str) -> S3ProtocolError:
    return S3ProtocolError(f"the store sent {text[:40]!r} as {name}")


def _text(parent: Element, tag: str) -> str:
    text = parent.findtext(tag)
    if not text:
        raise S3ProtocolError(f"the store sent {parent.tag} without {tag}")
    return text


def _number(parent: Element, tag: str) -> int:
    return parse_number(_text(parent, tag).strip(), tag)


def _etag(parent: Element) -> str:
    return parse_etag(_text(parent, "ETag").strip())


def _time_ms(parent: Element, tag: str) -> int:
    return parse_time_ms(_text(parent, tag).strip(), tag, datetime.fromisoformat)


def _is_truncated(root: Element) -> bool:
    if root.find("IsTruncated") is None and not root.findtext("NextKeyMarker"):
        # moto leaves it out of the last page.
        return False
    text = _text(root, "IsTruncated").strip()
    if text not in ("true", "false"):
        raise _invalid(text, "IsTruncated")
    return text == "true"


def _key(root: Element, entry: Element) -> str:
    return _decoded(root, _text(entry, "Key"))


def _decoded(root: Element, text: str) -> str:
    """A key, decoded if the document says that it is encoded."""
    encoding = root.findtext("EncodingType") or ""
    if encoding not in ("", "url"):
        raise S3ProtocolError(f"the store encodes keys as {encoding[:40]!r}")
    try:
        return unquote_plus(text, errors="strict") if encoding else text
    except UnicodeDecodeError as error:
        raise S3ProtocolError(f"the store sent a key that is not UTF-8: {error}") from error
