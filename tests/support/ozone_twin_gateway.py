"""The S3 gateway of a twin of Ozone: real HTTP, what a gateway of 2.2 does and what it
does not. Signatures are not checked, as without security.
"""

import base64
import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from protos import ozone_manager_pb2 as pb
from tests.support.ozone_twin import (
    SNAPSHOT_ROOT,
    VOLUME,
    OzoneTwin,
    RefusedError,
    TwinBucket,
    TwinKey,
)
from tests.support.s3_servers import S3Endpoint

_META = "x-amz-meta-"
_METADATA_BYTES_MAX = 2048
_TAGS_MAX = 10
_PART_BYTES_MIN = 5 << 20
_CREDENTIAL = re.compile("Credential=([^/]+)/")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_STATUSES = {
    pb.BUCKET_NOT_FOUND: (404, "NoSuchBucket"),
    pb.KEY_NOT_FOUND: (404, "NoSuchKey"),
    # Of a snapshot that is gone.
    pb.FILE_NOT_FOUND: (500, "InternalError"),
    pb.FILE_ALREADY_EXISTS: (400, "InvalidRequest"),
    pb.NOT_A_FILE: (400, "InvalidRequest"),
}


@dataclass
class _Upload:
    """What an upload has so far: each part's ETag and bytes."""

    bucket: TwinBucket
    key: str
    given: "_Given"
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Given:
    """What a request gives an object beside its bytes."""

    metadata: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, str], ...]
    owner: str


class _S3Error(Exception):
    """What S3 refuses, by status and code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass(frozen=True)
class _Answer:
    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class TwinGateway:
    """A gateway on a free loopback port; a context manager."""

    def __init__(self, twin: OzoneTwin) -> None:
        self._twin = twin
        self._uploads = dict[str, _Upload]()
        self._numbers = itertools.count(1)
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            protocol_version = "HTTP/1.1"
            server_version, sys_version = "Ozone", ""

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                answer = gateway._answer(self, body)
                self.send_response(answer.status)
                length = len(answer.body)
                for name, value in answer.headers:
                    if name == "content-length":
                        length = int(value)
                    else:
                        self.send_header(name, value)
                self.send_header("content-length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Tests need no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.endpoint = S3Endpoint(url, "any", "thing")

    def __enter__(self) -> "TwinGateway":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, asked: BaseHTTPRequestHandler, body: bytes) -> _Answer:
        path, _, query_text = asked.path.partition("?")
        _, _, rest = path.partition("/")
        place, _, name = rest.partition("/")
        query = dict(parse_qsl(query_text, keep_blank_values=True))
        request = _Request(asked.command, unquote(name), query, asked.headers, body)
        try:
            with self._twin.lock:
                request.check_body()
                bucket = self._twin.bucket(VOLUME, unquote(place))
                return self._of(request)(request, bucket)
        except RefusedError as error:
            status, code = _STATUSES[error.status]
        except _S3Error as error:
            status, code = error.status, error.code
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        return _Answer(status, text.encode())

    def _of(self, request: "_Request") -> Callable[["_Request", TwinBucket], _Answer]:
        """Who answers this request."""
        found = {
            ("GET", False, ""): self._list,
            ("GET", False, "uploads"): self._list_uploads,
            ("POST", False, "delete"): self._delete_keys,
            ("GET", True, ""): self._get,
            ("HEAD", True, ""): self._head,
            ("PUT", True, ""): self._put,
            ("DELETE", True, ""): self._delete,
            ("GET", True, "tagging"): self._get_tags,
            ("PUT", True, "tagging"): self._put_tags,
            ("POST", True, "uploads"): self._begin,
            ("PUT", True, "uploadId"): self._write_part,
            ("GET", True, "uploadId"): self._list_parts,
            ("POST", True, "uploadId"): self._complete,
            ("DELETE", True, "uploadId"): self._abort,
        }
        names = {"uploads", "delete", "tagging", "uploadId"} & set(request.query)
        way = found.get((request.method, bool(request.key), next(iter(names), "")))
        if way is None:
            raise _S3Error(501, "NotImplemented")
        return way

    def _existing(self, bucket: TwinBucket, name: str) -> TwinKey:
        found = self._twin.find(bucket, name)
        if found is None:
            raise _S3Error(404, "NoSuchKey")
        return found

    def _list(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        """One page, of which nothing may be concluded: a snapshot that is gone looks
        empty.
        """
        prefix = request.query.get("prefix", "")
        try:
            keys, _, rest = self._twin.view(bucket, prefix)
        except RefusedError:
            keys, rest = {}, ""
        begin = prefix[: len(prefix) - len(rest)]
        names = sorted(name for name in keys if name.startswith(rest))
        rows = "".join(
            f"<Contents><Key>{quote(begin + name)}</Key><Size>{len(keys[name].body)}</Size>"
            f"<ETag>&quot;{etag_of(keys[name])}&quot;</ETag>"
            f"<LastModified>{_iso(keys[name].info.modificationTime)}</LastModified></Contents>"
            for name in names[: int(request.query.get("max-keys", 1000))]
        )
        return _xml(
            "ListBucketResult",
            f"<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>{rows}",
        )

    def _get(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        found = self._existing(bucket, request.key)
        request.check_match(found)
        headers, ranged = _headers_of(found), _RANGE.fullmatch(request.headers.get("range", ""))
        if ranged is None:
            return _Answer(200, found.body, headers)
        first, last = map(int, ranged.groups())
        if first >= len(found.body):
            raise _S3Error(416, "InvalidRange")
        body = found.body[first : last + 1]
        place = f"bytes {first}-{first + len(body) - 1}/{len(found.body)}"
        return _Answer(206, body, (*headers, ("content-range", place)))

    def _head(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        """The metadata, too, which GET does not tell."""
        found = self._existing(bucket, request.key)
        request.check_match(found)
        metadata = [
            (_META + one.key, one.value) for one in found.info.metadata if one.key != "ETag"
        ]
        length = ("content-length", str(len(found.body)))
        return _Answer(200, b"", (*_headers_of(found), *metadata, length))

    def _put(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        given = request.given()
        old = self._twin.find(bucket, request.key)
        request.check_condition(old)
        if request.key.startswith(SNAPSHOT_ROOT):
            raise _S3Error(500, "InternalError")
        if "x-amz-copy-source" not in request.headers:
            made = self._keep(
                bucket, request.key, request.body, hashlib.md5(request.body).hexdigest(), given
            )
            return _Answer(200, b"", (("etag", f'"{made}"'),))
        source, name = self._source(request)
        if name == request.key:
            raise _S3Error(400, "InvalidRequest")
        if request.headers.get("x-amz-metadata-directive") != "REPLACE":
            metadata = tuple((one.key, one.value) for one in source.info.metadata)
            given = _Given(metadata, given.tags, given.owner)
        if request.headers.get("x-amz-tagging-directive") != "REPLACE":
            tags = tuple((one.key, one.value) for one in source.info.tags)
            given = _Given(given.metadata, tags, given.owner)
        made = self._keep(bucket, request.key, source.body, etag_of(source), given)
        return _copied("CopyObjectResult", made)

    def _keep(
        self,
        bucket: TwinBucket,
        key: str,
        body: bytes,
        etag: str,
        given: _Given,
        *,
        in_parts: bool = False,
    ) -> str:
        metadata = [(name, value) for name, value in given.metadata if name != "ETag"]
        self._twin.put(
            bucket,
            key,
            body,
            etag=etag,
            metadata=metadata,
            tags=given.tags,
            owner=given.owner,
            in_parts=in_parts,
        )
        return etag

    def _source(self, request: "_Request") -> tuple[TwinKey, str]:
        """What a copy is of, and its name."""
        place, _, name = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        found = self._existing(self._twin.bucket(VOLUME, place), name)
        wanted = request.headers.get("x-amz-copy-source-if-match", "").strip('"')
        if wanted and wanted != etag_of(found):
            raise _S3Error(412, "PreconditionFailed")
        return found, name

    def _delete(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        """Whatever If-Match says, and of a directory nothing."""
        self._twin.delete(bucket, [request.key])
        return _Answer(204)

    def _delete_keys(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        root = ElementTree.fromstring(request.body)
        self._twin.delete(bucket, [one.text or "" for one in root.iterfind("Object/Key")])
        return _xml("DeleteResult", "")

    def _get_tags(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        tags = "".join(
            f"<Tag><Key>{escape(one.key)}</Key><Value>{escape(one.value)}</Value></Tag>"
            for one in self._existing(bucket, request.key).info.tags
        )
        return _xml("Tagging", f"<TagSet>{tags}</TagSet>")

    def _put_tags(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        root = ElementTree.fromstring(request.body)
        tags = [
            pb.KeyValue(key=one.findtext("Key") or "", value=one.findtext("Value") or "")
            for one in root.iterfind("TagSet/Tag")
        ]
        self._twin.change(bucket, request.key, tags=tags)
        return _Answer()

    def _begin(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        upload = f"upload-{next(self._numbers)}"
        self._uploads[upload] = _Upload(bucket, request.key, request.given())
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")

    def _upload(self, request: "_Request") -> _Upload:
        found = self._uploads.get(request.query["uploadId"])
        if found is None or found.key != request.key:
            raise _S3Error(404, "NoSuchUpload")
        return found

    def _write_part(self, request: "_Request", _: TwinBucket) -> _Answer:
        upload, number = self._upload(request), int(request.query["partNumber"])
        if "x-amz-copy-source" not in request.headers:
            etag = hashlib.md5(request.body).hexdigest()
            upload.parts[number] = etag, request.body
            return _Answer(200, b"", (("etag", f'"{etag}"'),))
        source, _name = self._source(request)
        ranged = _RANGE.fullmatch(request.headers.get("x-amz-copy-source-range", ""))
        body = source.body
        if ranged is not None:
            first, last = map(int, ranged.groups())
            if last >= len(body):
                raise _S3Error(416, "InvalidRange")
            body = body[first : last + 1]
        # Not that of the range.
        etag = etag_of(source)
        upload.parts[number] = etag, body
        return _copied("CopyPartResult", etag)

    def _list_parts(self, request: "_Request", _: TwinBucket) -> _Answer:
        parts = sorted(self._upload(request).parts.items())
        after = int(request.query.get("part-number-marker", 0))
        left = [(number, part) for number, part in parts if number > after]
        page = left[: int(request.query.get("max-parts", 1000))]
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(body)}</Size>"
            f"<ETag>&quot;{etag}&quot;</ETag></Part>"
            for number, (etag, body) in page
        )
        is_cut = len(page) < len(left)
        marker = f"<NextPartNumberMarker>{page[-1][0]}</NextPartNumberMarker>" if is_cut else ""
        return _xml(
            "ListPartsResult", f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{marker}{rows}"
        )

    def _list_uploads(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        rows = "".join(
            f"<Upload><Key>{quote(one.key)}</Key><UploadId>{upload}</UploadId>"
            f"<Initiated>{_iso(self._twin.now_ms())}</Initiated></Upload>"
            for upload, one in sorted(self._uploads.items(), key=lambda each: each[1].key)
            if one.bucket is bucket and one.key.startswith(request.query.get("prefix", ""))
        )
        return _xml(
            "ListMultipartUploadsResult",
            f"<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>{rows}",
        )

    def _complete(self, request: "_Request", bucket: TwinBucket) -> _Answer:
        """The ETag is made of all parts that there are, named or not."""
        upload = self._upload(request)
        request.check_condition(self._twin.find(bucket, request.key))
        named = [
            (int(one.findtext("PartNumber") or 0), (one.findtext("ETag") or "").strip('"'))
            for one in ElementTree.fromstring(request.body).iterfind("Part")
        ]
        for number, etag in named:
            if upload.parts.get(number, ("",))[0] != etag:
                raise _S3Error(400, "InvalidPart")
        bodies = [upload.parts[number][1] for number, _ in named]
        if any(len(body) < _PART_BYTES_MIN for body in bodies[:-1]):
            raise _S3Error(400, "EntityTooSmall")
        text = "".join(etag for _, (etag, _body) in sorted(upload.parts.items()))
        etag = f"{hashlib.md5(text.encode()).hexdigest()}-{len(upload.parts)}"
        self._keep(bucket, request.key, b"".join(bodies), etag, upload.given, in_parts=True)
        del self._uploads[request.query["uploadId"]]
        return _xml("CompleteMultipartUploadResult", f"<ETag>&quot;{etag}&quot;</ETag>")

    def _abort(self, request: "_Request", _: TwinBucket) -> _Answer:
        self._upload(request)
        del self._uploads[request.query["uploadId"]]
        return _Answer(204)


class _Request:
    """A request of S3."""

    def __init__(
        self,
        method: str,
        key: str,
        query: dict[str, str],
        headers: Iterable[tuple[str, str]] | object,
        body: bytes,
    ) -> None:
        self.method, self.key, self.query, self.body = method, key, query, body
        items = headers.items()  # type: ignore[attr-defined, union-attr]
        self.headers = {name.lower(): value for name, value in items}

    def check_body(self) -> None:
        """Compare the body with what is said of it; a CRC is never compared."""
        payload = self.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if payload not in ("UNSIGNED-PAYLOAD", hashlib.sha256(self.body).hexdigest()):
            raise _S3Error(400, "XAmzContentSHA256Mismatch")
        md5 = base64.b64encode(hashlib.md5(self.body).digest()).decode()
        if self.headers.get("content-md5", md5) != md5:
            raise _S3Error(400, "BadDigest")

    def given(self) -> _Given:
        """Metadata, tags and owner; content headers are dropped."""
        metadata = tuple(
            (name.removeprefix(_META), value)
            for name, value in self.headers.items()
            if name.startswith(_META)
        )
        if sum(len(name) + len(value) for name, value in metadata) > _METADATA_BYTES_MAX:
            raise _S3Error(400, "MetadataTooLarge")
        tags = tuple(parse_qsl(self.headers.get("x-amz-tagging", ""), keep_blank_values=True))
        if len(tags) > _TAGS_MAX:
            raise _S3Error(400, "InvalidTag")
        found = _CREDENTIAL.search(self.headers.get("authorization", ""))
        return _Given(metadata, tags, found[1] if found else "")

    def check_match(self, found: TwinKey) -> None:
        """Obey a condition of a read."""
        wanted = self.headers.get("if-match", "").strip('"')
        if wanted and wanted != etag_of(found):
            raise _S3Error(412, "PreconditionFailed")

    def check_condition(self, old: TwinKey | None) -> None:
        """Obey the condition of a write."""
        wanted = self.headers.get("if-match", "").strip('"')
        is_other = bool(wanted) and (old is None or wanted != etag_of(old))
        if is_other or (self.headers.get("if-none-match") == "*" and old is not None):
            raise _S3Error(412, "PreconditionFailed")


def etag_of(key: TwinKey) -> str:
    """The ETag that a gateway has filed."""
    return next((one.value for one in key.info.metadata if one.key == "ETag"), "")


def _headers_of(key: TwinKey) -> tuple[tuple[str, str], ...]:
    headers = [
        ("etag", f'"{etag_of(key)}"'),
        ("last-modified", formatdate(key.info.modificationTime // 1000, usegmt=True)),
        ("content-type", "binary/octet-stream"),
    ]
    if key.info.tags:
        headers.append(("x-amz-tagging-count", str(len(key.info.tags))))
    return tuple(headers)


def _copied(tag: str, etag: str) -> _Answer:
    return _xml(tag, f"<ETag>&quot;{etag}&quot;</ETag><LastModified>{_iso(0)}</LastModified>")


def _xml(tag: str, content: str) -> _Answer:
    return _Answer(200, f'<?xml version="1.0"?><{tag}>{content}</{tag}>'.encode())


def _iso(time_ms: int) -> str:
    seconds = formatdate(time_ms // 1000, usegmt=True)
    # In the form of S3's documents.
    _, day, month, year, clock, _ = seconds.split()
    months = "JanFebMarAprMayJunJulAugSepOctNovDec"
    return f"{year}-{months.index(month) // 3 + 1:02}-{day}T{clock}.{time_ms % 1000:03}Z"
