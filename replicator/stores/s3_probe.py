"""Find out on scratch objects what an S3 store really does.

Each question is a request whose right answer is known, and each answer is read back.
Ozone's gateway is recognised by the first answer, before any sub-resource is named: old
releases take `PUT key?tagging` for a new content of the object.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

from merkle.checksum import fold
from merkle.object_checksum import Crc
from proof.item import ContentHash, HashAlgorithm
from replicator.hashing import crc_hash, md5_of
from replicator.stores.capabilities import CONTENT_HEADERS
from replicator.stores.errors import StoreError
from replicator.stores.port import UploadedPart
from replicator.stores.s3_behaviour import CEPH, OZONE, CopyWay, EtagForm, S3Behaviour
from replicator.stores.s3_bucket import (
    S3Bucket,
    crc_headers,
    digest_header,
    etag_of,
    is_md5,
    store_error,
    translated,
)
from replicator.stores.s3_documents import (
    complete_document,
    parse_copied_etag,
    parse_grants,
    parse_listing,
    parse_owner,
    parse_tags,
    parse_upload_id,
    parse_versioning,
    parse_versions,
)
from replicator.stores.s3_objects import delete_versions, put_tags
from replicator.stores.s3_properties import content_headers_of, metadata_of
from runtime.s3 import Query
from runtime.s3_answers import (
    S3Answer,
    S3Error,
    S3OutcomeUnknownError,
    S3ProtocolError,
    S3UnavailableError,
)

if TYPE_CHECKING:
    from replicator.stores.probe_memory import ProbeMemory

_BODY = b"Treefold asks what this store does with an object."
_WRONG_ETAG = "0" * 32
_TAGS = (("treefold", "a+b c"),)
_TAGS_HEADER = {"x-amz-tagging": "treefold=a%2Bb%20c"}
_NAME = "treefold-pro_be"
_HEADERS = {
    "cache-control": "max-age=61",
    "content-encoding": "gzip",
    "content-type": "text/x-treefold",
    f"x-amz-meta-{_NAME}": "1",
}
_REPLACEMENT = {
    "x-amz-metadata-directive": "REPLACE",
    "x-amz-tagging-directive": "REPLACE",
    "x-amz-tagging": "other=2",
    "x-amz-meta-other": "2",
}
# Ours first, then the stronger of the others.
_UPLOAD_CRCS = (HashAlgorithm.CRC32C, HashAlgorithm.CRC64NVME, HashAlgorithm.CRC32)
# Large enough to prove something, small enough to be read.
_PROOF_BYTES_MAX = 64 << 10
# An ETag of one PUT is proven as MD5 by so many objects of a store that is only read.
_PROOFS = 3
_UNASKED = "the store was only read"


def probe(bucket: S3Bucket, *, may_write: bool, memory: "ProbeMemory | None" = None) -> S3Behaviour:
    """What the store does with this bucket. Without `may_write` only what reading
    shows: no conditional write, and MD5 by objects that are there. With it, what
    `memory` knows is not asked again.

    Raises:
        StoreError: the bucket does not exist, or the store refused what every store
            does.
    """
    query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", "100")]
    query.append(("prefix", bucket.prefix))
    with translated(f"cannot list {bucket.bucket}"):
        answer = bucket.client.request("GET", bucket.bucket, query=query)
        listed = parse_listing(answer.body, needs_etags=False).objects
    kind = _kind(answer.headers)
    found = S3Behaviour(kind=kind, counts_tags=kind == OZONE)
    if not found.is_ozone:
        query = [("versioning", "")]
        with translated(f"cannot ask whether {bucket.bucket} keeps versions"):
            try:
                body = bucket.client.request("GET", bucket.bucket, query=query).body
                found = replace(found, keeps_versions=parse_versioning(body))
            except S3Error as error:
                if error.status not in (403, 405, 501):
                    raise
                found.reasons["keeps_versions"] = f"the store does not say: {error.s3_code}"
    bucket.behaviour = found
    if not may_write:
        sizes = [(entry.size_bytes, entry.key, entry.etag) for entry in listed]
        small = [one for one in sizes if 0 < one[0] <= _PROOF_BYTES_MAX and is_md5(one[2])]
        return _read_only(bucket, found, [name for _, name, _ in small[:_PROOFS]])
    # In the bucket itself: one without versions beside it obeys other conditions.
    ask = _Probe(replace(bucket, scratch_bucket=bucket.bucket), found).run
    return ask() if memory is None else memory.behaviour_of(bucket, found, ask)


class _Probe:
    """Questions about one scratch object, in order; `_found` grows with each. Questions
    that do not depend on each other are asked at a time, each of its own object: most
    of a probe is waiting, over a long link and for a store that writes to disk.
    """

    def __init__(self, bucket: S3Bucket, found: S3Behaviour) -> None:
        self._bucket = bucket
        self._found = found
        self._key = bucket.new_scratch_key()

    def run(self) -> S3Behaviour:
        """Ask everything; scratch objects are removed on every way out."""
        with self._cleaned(), translated(f"cannot probe {self._bucket.scratch_bucket}"):
            # A store that refuses to be written is asked no more.
            etag = self._put(_BODY, {**_HEADERS, **_TAGS_HEADER})
            before = self._found
            questions = [_Probe._ask_conditions, _Probe._ask_upload, _Probe._ask_copy]
            if not before.is_ozone:
                questions += [_Probe._ask_of_upload, _Probe._ask_checksum]
            with ThreadPoolExecutor(len(questions), "probe") as threads:
                others = threads.map(partial(self._beside, before), questions)
                self._ask_put(etag)
                self._ask_tags()
                found = _joined(before, [self._found, *others])
            keeps_tags = found.put_keeps_tags and found.upload_keeps_tags
            self._learn(replace(found, upload_keeps_tags=keeps_tags))
        return self._found

    def _beside(self, before: S3Behaviour, ask: Callable[["_Probe"], None]) -> S3Behaviour:
        """What one question finds out on an object of its own."""
        # Of the bucket too, which learns meanwhile.
        before = replace(before, reasons={})
        other = _Probe(replace(self._bucket, behaviour=before), before)
        with other._cleaned():
            ask(other)
        return other._found

    @contextmanager
    def _cleaned(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # What was refused first says more than that this is refused, too.
            with suppress(StoreError):
                self._remove(self._key)
            raise
        self._remove(self._key)

    def _remove(self, key: str) -> None:
        """Delete a scratch object, all its versions where there are any."""
        place, name = self._bucket.place(key)
        versions = [""]
        with translated(f"cannot remove the scratch object {name!r} of {place}"):
            if self._found.keeps_versions:
                query = (("versions", ""), ("prefix", name))
                answer = self._bucket.client.request("GET", place, query=query)
                versions = [facts.version for facts in parse_versions(answer.body).versions]
        delete_versions(self._bucket, [(key, version) for version in versions])

    def _learn(self, found: S3Behaviour) -> None:
        self._found = self._bucket.behaviour = found

    def _ask_put(self, etag: str) -> None:
        """Of an object that was put with headers and tags, and got this ETag."""
        seen = self._head()
        is_md5_etag = etag == md5_of(_BODY).hex() and not self._found.is_ozone
        reasons = {}
        if not is_md5_etag:
            reasons["hashes"] = (
                "ETags of this gateway prove nothing: copied parts bear those of their source"
                if self._found.is_ozone
                else "the ETag of a small object is not its MD5"
            )
        names = [name for name, _ in metadata_of(seen)]
        if _NAME not in names:
            if _NAME.replace("_", "-") not in names:
                raise StoreError(f"{self._bucket.bucket} does not keep user metadata")
            reasons["keeps_underscores"] = "an underscore in a metadata name becomes a hyphen"
        given = {name: value for name, value in _HEADERS.items() if name in CONTENT_HEADERS}
        kept = {name: value for name, value in content_headers_of(seen) if name in given}
        if kept != given:
            lost = sorted(name for name in given if kept.get(name) != given[name])
            reasons["keeps_headers"] = f"the store drops {' and '.join(lost)}"
        if self._accepts({"content-md5": base64.b64encode(md5_of(b"other")).decode()}):
            reasons["checks_md5"] = "the store does not check Content-MD5; ETags are compared"
        self._found.reasons.update(reasons)
        self._learn(
            replace(
                self._found,
                etag_is_md5=is_md5_etag,
                checks_payloads=self._checks_payloads(),
                checks_put_md5=self._checks_md5(()),
                keeps_underscores=_NAME in names,
                keeps_headers=kept == given,
            )
        )

    def _checks_payloads(self) -> bool:
        """Whether a body that is not the signed one is refused."""
        if not self._bucket.client.signs_payloads:
            return False
        place, name = self._bucket.place(self._key)
        try:
            self._bucket.client.request("PUT", place, name, body=_BODY, signed_body=b"other")
        except S3Error as error:
            self._raise_if_down(error)
            return True
        return False

    def _ask_tags(self) -> None:
        self._put(_BODY, _TAGS_HEADER)
        in_put = self._tags()
        counts = self._head().get("x-amz-tagging-count") == "1"
        is_apart = False
        if in_put is not None:
            try:
                put_tags(self._bucket, self._key, "", (("other", "1"),))
                is_apart = self._tags() == (("other", "1"),) and self._content() == _BODY
            except StoreError:
                is_apart = False
        keeps = in_put == _TAGS
        lacks = {} if keeps or is_apart else {"keeps_tags": "the store keeps no tags"}
        self._found.reasons.update(lacks)
        self._learn(
            replace(
                self._found, put_keeps_tags=keeps, tags_apart=is_apart, counts_tags=counts and keeps
            )
        )

    def _ask_conditions(self) -> None:
        reasons = {}
        self._put(_BODY, {})
        creates = not self._accepts({"if-none-match": "*"})
        if not creates:
            reasons["creates_conditionally"] = "the store ignores If-None-Match of a PUT"
        form = EtagForm.IGNORED
        if not self._accepts({"if-match": f'"{_WRONG_ETAG}"'}) and not self._accepts(
            {"if-match": _WRONG_ETAG}
        ):
            etag = self._put(_BODY, {})
            if self._accepts({"if-match": f'"{etag}"'}):
                form = EtagForm.QUOTED
            elif self._accepts({"if-match": etag}):
                form = EtagForm.BARE
        if form is EtagForm.IGNORED:
            reasons["replaces_conditionally"] = "the store does not obey If-Match of a PUT"
        if self._found.kind == CEPH and self._found.keeps_versions:
            # The scratch bucket may be one without versions, where it does obey.
            creates, form = False, EtagForm.IGNORED
            reason = "Ceph obeys no condition of a PUT where a bucket keeps versions"
            reasons = dict.fromkeys(("creates_conditionally", "replaces_conditionally"), reason)
        self._found.reasons.update(reasons)
        self._learn(replace(self._found, creates_conditionally=creates, put_if_match=form))

    def _ask_upload(self) -> None:
        """Copy a range as the one part of an upload of the same key, and complete it
        under conditions that do not hold.
        """
        self._put(_BODY, {})
        with self._begun_upload({**_HEADERS, **_TAGS_HEADER}) as upload:
            part = (("partNumber", "1"), ("uploadId", upload))
            checks_md5 = self._bucket.client.signs_payloads and self._checks_md5(part)
            source = {"x-amz-copy-source": self._bucket.source_header(self._key, "")}
            wrong = {"x-amz-copy-source-if-match": f'"{_WRONG_ETAG}"'}
            wide = {"x-amz-copy-source-range": f"bytes=3-{len(_BODY)}"}
            right = {"x-amz-copy-source-range": "bytes=3-11"}
            checks = not self._is_done("PUT", part, source | right | wrong)
            checks = not self._is_done("PUT", part, source | wide) and checks
            try:
                etag = parse_copied_etag(self._request("PUT", part, source | right).body)
                copies = True
            except S3Error as error:
                self._raise_if_down(error)
                body = self._request("PUT", part, {}, _BODY[3:12])
                etag, copies = etag_of(body.headers), False
            document = complete_document((UploadedPart(1, 9, etag),))
            finish = (("uploadId", upload),)
            obeys = False
            if not self._is_done("POST", finish, {"if-none-match": "*"}, document):
                obeys = not self._is_done(
                    "POST", finish, {"if-match": f'"{_WRONG_ETAG}"'}, document
                )
                if obeys:
                    now = etag_of(self._head())
                    obeys = self._is_done("POST", finish, {"if-match": f'"{now}"'}, document)
                    if not obeys:
                        self._request("POST", finish, {}, document)
        reasons = {}
        if not obeys:
            reasons["completes_conditionally"] = (
                "the store ignores conditions on completing an upload"
            )
        copies = copies and self._content() == _BODY[3:12]
        if not copies:
            reasons["copies_ranges"] = "a copied range did not become a part"
        self._found.reasons.update(reasons)
        self._learn(
            replace(
                self._found,
                completes_conditionally=obeys,
                copies_ranges=copies,
                copy_checks_source=checks,
                checks_part_md5=checks_md5,
                upload_keeps_tags=self._tags() == _TAGS,
            )
        )

    def _checks_md5(self, query: Query) -> bool:
        """Whether an object, or a part of one, of which no body is signed needs its
        MD5, and is taken so.
        """

        def is_taken(content: bytes) -> bool:
            digest = {"content-md5": base64.b64encode(md5_of(content)).decode()}
            return self._is_done("PUT", query, digest, _BODY, signs_body=False)

        return not is_taken(b"other") and is_taken(_BODY)

    def _ask_copy(self) -> None:
        """Replace metadata and headers by a copy onto itself, or by scratch."""
        other = self._bucket.new_scratch_key()
        source = {"x-amz-copy-source": self._bucket.source_header(self._key, "")}
        way = CopyWay.PARTS
        self._put(_BODY, {**_HEADERS, **_TAGS_HEADER})
        if self._is_done("PUT", (), source | _REPLACEMENT) and self._is_replaced():
            way = CopyWay.ITSELF
        else:
            self._put(_BODY, {**_HEADERS, **_TAGS_HEADER})
            back = {"x-amz-copy-source": self._bucket.source_header(other, "")}
            try:
                self._bucket.request("PUT", other, headers=source)
                if self._is_done("PUT", (), back | _REPLACEMENT) and self._is_replaced():
                    way = CopyWay.SCRATCH
            except S3Error as error:
                self._raise_if_down(error)
            finally:
                self._remove(other)
        takes_tags = way is not CopyWay.PARTS and self._tags() == (("other", "2"),)
        self._learn(replace(self._found, copy_way=way, copy_takes_tags=takes_tags))

    def _is_replaced(self) -> bool:
        seen = self._head()
        left = {name for name, _ in content_headers_of(seen)} & set(_HEADERS)
        return (
            metadata_of(seen) == (("other", "2"),)
            and left <= {"content-type"}
            and seen.get("content-type") != _HEADERS["content-type"]
            and self._content() == _BODY
        )

    def _ask_of_upload(self) -> None:
        """What is asked of an object that was uploaded in parts."""
        self._ask_upload_crc()
        self._ask_acl()

    def _ask_acl(self) -> None:
        group = 'uri="http://acs.amazonaws.com/groups/global/AuthenticatedUsers"'
        try:
            # Of what was uploaded in parts: moto then fails to answer.
            owner = parse_owner(self._request("GET", (("acl", ""),)).body)
            own = {"x-amz-grant-full-control": f'id="{owner}"', "x-amz-grant-read": group}
            self._put(_BODY, own)
            kept = parse_grants(self._request("GET", (("acl", ""),)).body) == ((group, "READ"),)
        except (S3Error, S3ProtocolError) as error:
            self._raise_if_down(error)
            owner, kept = "", False
        reasons = {} if kept else {"keeps_acls": "the store does not keep grants of a PUT"}
        self._found.reasons.update(reasons)
        self._learn(replace(self._found, keeps_acls=kept, owner=owner if kept else ""))

    def _ask_checksum(self) -> None:
        crc32c = base64.b64encode(fold(_BODY).to_bytes(4, "big")).decode()
        declared = False
        if self._accepts({"x-amz-checksum-crc32c": crc32c}):
            seen = self._head({"x-amz-checksum-mode": "ENABLED"})
            declared = any(name.startswith("x-amz-checksum-") for name in seen)
        self._learn(replace(self._found, declares_checksums=declared))

    def _ask_upload_crc(self) -> None:
        """Which CRC the store declares of the whole of what was uploaded in parts."""
        found, reason = None, "the store declares no CRC of the whole of an upload"
        for crc in _UPLOAD_CRCS:
            compares = self._upload(crc_headers(crc), crc_hash(Crc[crc.name], _BODY))
            seen = self._head({"x-amz-checksum-mode": "ENABLED"})
            if seen.get("x-amz-checksum-type") != "FULL_OBJECT":
                break
            # moto declares CRC32s as if they were others.
            if crc_hash(Crc[crc.name], _BODY) in self._bucket.hashes("", seen):
                found, reason = crc, "" if compares else "it is compared after the object appears"
                break
        if reason:
            self._found.reasons["upload_crc"] = reason
        self._learn(replace(self._found, upload_crc=found))

    def _upload(self, headers: Mapping[str, str], whole: ContentHash) -> bool:
        """Make the object of one part; whether the store refused another CRC before."""
        with self._begun_upload(headers) as upload:
            query, finish = (("partNumber", "1"), ("uploadId", upload)), (("uploadId", upload),)
            etag = etag_of(self._request("PUT", query, digest_header(whole), _BODY).headers)
            document = complete_document((UploadedPart(1, len(_BODY), etag),))
            is_full = {"x-amz-checksum-type": "FULL_OBJECT"}
            wrong = replace(whole, digest=bytes(len(whole.digest)))
            if self._is_done("POST", finish, digest_header(wrong) | is_full, document):
                return False
            if not self._is_done("POST", finish, digest_header(whole) | is_full, document):
                # ministack takes it for that of a CRC of CRCs.
                self._request("POST", finish, {}, document)
            return True

    @contextmanager
    def _begun_upload(self, headers: Mapping[str, str]) -> Iterator[str]:
        """The ID of an upload to the scratch key, which a failure does not leave."""
        upload = parse_upload_id(self._request("POST", (("uploads", ""),), headers).body)
        try:
            yield upload
        except BaseException:
            # What failed first says more than that this fails, too.
            with suppress(S3Error, S3ProtocolError):
                self._request("DELETE", (("uploadId", upload),))
            raise

    def _request(
        self,
        method: str,
        query: Query = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        signs_body: bool = True,
    ) -> S3Answer:
        return self._bucket.request(
            method,
            self._key,
            query=query,
            headers=headers,
            body=body,
            signs_body=signs_body,
            idempotent=True,
        )

    def _put(self, body: bytes, headers: Mapping[str, str]) -> str:
        """The ETag."""
        return etag_of(self._request("PUT", (), headers, body).headers)

    def _accepts(self, headers: Mapping[str, str]) -> bool:
        """Whether the store takes a PUT with these headers."""
        return self._is_done("PUT", (), headers, _BODY)

    def _is_done(
        self,
        method: str,
        query: Query,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        signs_body: bool = True,
    ) -> bool:
        try:
            self._request(method, query, headers, body, signs_body=signs_body)
        except S3Error as error:
            self._raise_if_down(error)
            return False
        return True

    def _raise_if_down(self, error: S3Error | S3ProtocolError) -> None:
        """A store that does not answer says nothing about what it does."""
        if isinstance(error, S3UnavailableError | S3OutcomeUnknownError) and not error.status:
            raise error

    def _head(self, headers: Mapping[str, str] | None = None) -> Mapping[str, str]:
        return self._request("HEAD", (), headers).headers

    def _content(self) -> bytes:
        return _read(self._bucket, *self._bucket.place(self._key))

    def _tags(self) -> tuple[tuple[str, str], ...] | None:
        """None where the store answers with anything but tags."""
        try:
            return parse_tags(self._request("GET", (("tagging", ""),)).body)
        except (S3Error, S3ProtocolError) as error:
            self._raise_if_down(error)
            return None


def _joined(before: S3Behaviour, found: Sequence[S3Behaviour]) -> S3Behaviour:
    """What several questions, of which each began with `before`, have found out."""
    names = [one.name for one in fields(before) if one.name != "reasons"]
    changes = {
        name: getattr(one, name)
        for one in found
        for name in names
        if getattr(one, name) != getattr(before, name)
    }
    reasons = before.reasons | {name: text for one in found for name, text in one.reasons.items()}
    return replace(before, **changes, reasons=reasons)


def _kind(headers: Mapping[str, str]) -> str:
    """Who answers, by the headers of any answer."""
    server = headers.get("server", "").lower()
    if "ozone" in server:
        return OZONE
    if "ceph" in server or headers.get("x-amz-request-id", "").startswith("tx0000"):
        return CEPH
    return "aws" if server == "amazons3" else "s3"


def _read_only(bucket: S3Bucket, found: S3Behaviour, names: list[str]) -> S3Behaviour:
    """What can be learned by reading. Tags and ACLs are asked of one object, if any."""
    is_proven = bool(names) and not found.is_ozone
    for name in names if is_proven else ():
        with translated(f"cannot read {name!r}"):
            answer = bucket.client.request("HEAD", bucket.bucket, name)
            is_proven &= md5_of(_read(bucket, bucket.bucket, name)).hex() == etag_of(answer.headers)
    unasked = ("creates", "replaces", "completes")
    reasons = {f"{verb}_conditionally": _UNASKED for verb in unasked} | {"copies_ranges": _UNASKED}
    if not is_proven:
        reasons["hashes"] = (
            "ETags of this gateway prove nothing"
            if found.is_ozone
            else "no object proves that ETags are MD5"
        )
    return replace(
        found,
        etag_is_md5=is_proven if names or found.is_ozone else None,
        declares_checksums=not found.is_ozone,
        put_keeps_tags=False,
        tags_apart=found.is_ozone or not names or _answers(bucket, names[0], "tagging", parse_tags),
        keeps_headers=not found.is_ozone,
        keeps_underscores=True,
        keeps_acls=_has_acls(bucket, found, names),
        counts_tags=found.counts_tags or found.kind == CEPH,
        reasons={**found.reasons, **reasons},
    )


def _has_acls(bucket: S3Bucket, found: S3Behaviour, names: list[str]) -> bool:
    """Whether ACLs of objects can be read. An empty bucket of Ceph is asked for its own
    ACL: what crosses must not change with the first object.
    """
    if found.is_ozone or not (names or found.kind == CEPH):
        return False
    return _answers(bucket, names[0] if names else "", "acl", parse_grants)


def _answers(
    bucket: S3Bucket, name: str, sub_resource: str, parse: Callable[[bytes], object]
) -> bool:
    try:
        parse(bucket.client.request("GET", bucket.bucket, name, query=((sub_resource, ""),)).body)
    except (S3Error, S3ProtocolError) as error:
        if isinstance(error, S3UnavailableError):
            raise store_error(error, f"cannot ask for {sub_resource}") from error
        return False
    return True


def _read(bucket: S3Bucket, place: str, name: str) -> bytes:
    """The bytes of a small object; no more than a few pieces, whatever is sent."""
    found = b""
    with bucket.client.stream(place, name) as answer:
        for piece in answer.pieces:
            found += piece
            if len(found) > _PROOF_BYTES_MAX:
                break
    return found
