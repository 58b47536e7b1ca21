"""The S3 client: signs a request, sends it over a pooled connection, reads the answer.

It knows buckets, keys and HTTP, and no operation of S3: whoever calls builds queries
and headers, and parses documents. Only the headers that are needed are sent: a small
object costs a tenth less than through boto3 (docs/decisions). Keys reach the
server byte by byte, because nothing here normalises a path.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from merkle.checksum import Buffer
from runtime.errors import ConfigError
from runtime.http_connections import HttpAnswer, HttpConnection, HttpPool, HttpProtocolError
from runtime.retry import Backoff, Sleep, call_with_retry
from runtime.s3_account import CredentialSource, S3Settings, find_account
from runtime.s3_answers import (
    S3Answer,
    S3OutcomeUnknownError,
    S3ProtocolError,
    S3UnavailableError,
    error_of,
    raise_for,
)
from runtime.s3_signing import UNSIGNED, payload_digest, signed_headers
from runtime.traffic import TrafficCounter

if TYPE_CHECKING:
    from ssl import SSLContext

T = TypeVar("T")
Query = Sequence[tuple[str, str]]

_CONNECT_TIMEOUT_S = 10.0
# Between two bytes of progress. A gateway of Ozone was silent for a minute in the
# middle of a PUT that then succeeded.
_PROGRESS_TIMEOUT_S = 200.0
# Of one answer that is read whole; a page of 1,000 keys of 1,000 bytes has 5 MiB, and
# XML takes thirty times its bytes in memory.
_ANSWER_BYTES_MAX = 16 << 20

_IDEMPOTENT = {"GET", "HEAD", "PUT", "DELETE"}
_BODILESS = {"GET", "HEAD", "DELETE"}


@dataclass(frozen=True, slots=True)
class S3Stream:
    """An answer whose body is still arriving, in pieces of up to 1 MiB.

    Taking a piece raises S3OutcomeUnknownError if fewer bytes arrive than announced.
    """

    status: int
    headers: Mapping[str, str]
    pieces: Iterator[bytes]


class S3Client:
    """One endpoint with one set of credentials. Thread-safe."""

    def __init__(
        self,
        *,
        endpoint_url: str,
        region: str,
        credentials: CredentialSource,
        addressing: str = "path",
        ca_bundle: str | None = None,
        backoff: Backoff | None = None,
        sleep: Sleep = time.sleep,
        progress_timeout_s: float = _PROGRESS_TIMEOUT_S,
    ) -> None:
        parts = _endpoint_parts(endpoint_url)
        assert addressing in ("path", "virtual")
        self.endpoint_url = endpoint_url.rstrip("/")
        self._scheme, self._netloc = parts.scheme, parts.netloc
        self._base_path = parts.path.rstrip("/")
        self._region = region
        self._credentials = credentials
        self._is_virtual = addressing == "virtual"
        self._ca_bundle = ca_bundle
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._pools = dict[str, HttpPool]()
        self.traffic = TrafficCounter()

    @property
    def signs_payloads(self) -> bool:
        """Whether the signature of a request covers a SHA-256 of its body."""
        return bool(self._scheme == "http")

    @property
    def access_key(self) -> str:
        """The ID of the key that signs requests."""
        return self._credentials.get_frozen_credentials().access_key

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    def request(
        self,
        method: str,
        bucket: str,
        key: str = "",
        *,
        query: Query = (),
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
        signed_body: Buffer | None = None,
        signs_body: bool = True,
        idempotent: bool | None = None,
    ) -> S3Answer:
        """Send a request and read its whole answer.

        A name in `query` with an empty value is sent without `=`. What is signed is the
        body, or `signed_body`, which a store that checks payloads refuses; nothing of
        it where `signs_payloads` is false, or `signs_body`: then the caller has given a
        digest in `content-md5`, which is signed, and which the store checks. With
        `idempotent` false the request is repeated only after answers by which the store
        says that it did nothing; by default POST is not idempotent and all others are.

        Raises:
            S3UnavailableError: the store was not reached, or did nothing for now.
            S3OutcomeUnknownError: the request may have been carried out.
            S3ProtocolError: the answer is invalid.
            S3Error: the store refused. An error inside an answer of status 200 is one.
        """
        request = _Request(
            method, bucket, key, tuple(query), dict(headers or {}), body, signed_body, signs_body
        )

        def attempt() -> S3Answer:
            answer = self._read_whole(request, *self._send(request))
            if request.method != "GET" or not request.key or answer.status >= 300:
                raise_for(answer, request.name)
            return answer

        return self._retry(attempt, method in _IDEMPOTENT if idempotent is None else idempotent)

    def send_pieces(
        self,
        bucket: str,
        key: str,
        *,
        query: Query = (),
        headers: Mapping[str, str],
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> S3Answer:
        """PUT what arrives in pieces, once, without a hash of the body: the caller has
        given a digest in `content-md5`, which is signed, and which the store checks, or
        proves afterwards what has arrived. An error of `pieces`, or fewer bytes, end
        the request before its last byte.

        Raises:
            S3UnavailableError: the store was not reached, or did nothing for now.
            S3OutcomeUnknownError: the request may have been carried out.
            S3ProtocolError: the answer is invalid.
            S3Error: the store refused.
        """
        request = _Request(
            "PUT", bucket, key, tuple(query), dict(headers), b"", None, False, pieces, length_bytes
        )
        answer = self._read_whole(request, *self._send(request))
        raise_for(answer, request.name)
        return answer

    @contextmanager
    def stream(
        self,
        bucket: str,
        key: str,
        *,
        query: Query = (),
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[S3Stream]:
        """GET an object piece by piece. The beginning is retried, the pieces are not.

        Raises:
            S3Error: as `request`.
        """
        request = _Request("GET", bucket, key, tuple(query), dict(headers or {}), b"")

        def attempt() -> tuple[HttpPool, HttpAnswer]:
            pool, found = self._send(request)
            if found.status < 300:
                return pool, found
            raise error_of(self._read_whole(request, pool, found), request.name)

        pool, found = self._retry(attempt, True)
        try:
            yield S3Stream(found.status, found.headers, self._pieces(request, found))
        finally:
            found.release(pool)

    def _pieces(self, request: "_Request", found: HttpAnswer) -> Iterator[bytes]:
        try:
            for piece in found.pieces():
                self.traffic.add(len(piece))
                yield piece
        except (HttpProtocolError, OSError) as error:
            raise _interrupted(request, error) from error

    def _read_whole(self, request: "_Request", pool: HttpPool, found: HttpAnswer) -> S3Answer:
        parts, length = [], 0
        try:
            for piece in self._pieces(request, found):
                parts.append(piece)
                length += len(piece)
                if length > _ANSWER_BYTES_MAX:
                    raise S3ProtocolError(
                        f"the answer to {request.name} exceeds {_ANSWER_BYTES_MAX} bytes",
                        request=request.name,
                    )
        finally:
            found.release(pool)
        return S3Answer(found.status, found.headers, b"".join(parts))

    def _retry(self, attempt: Callable[[], T], idempotent: bool) -> T:
        """Call until it succeeds or may not be repeated."""

        def guarded() -> T | S3OutcomeUnknownError:
            try:
                return attempt()
            except S3OutcomeUnknownError as error:
                if idempotent:
                    raise
                return error

        result = call_with_retry(guarded, sleep=self._sleep, backoff=self._backoff)
        if isinstance(result, S3OutcomeUnknownError):
            raise result
        return result

    def _send(self, request: "_Request") -> tuple[HttpPool, HttpAnswer]:
        """Sign and send once; the answer's head has arrived."""
        host, target = place_request(
            self._netloc,
            self._base_path,
            bucket=request.bucket,
            key=request.key,
            query=request.query,
            is_virtual=self._is_virtual,
        )
        head = _head(request.method, target, self._headers(request, host, target))
        pool = self._pool(host)
        connection = self._connected(request, pool)
        self.traffic.add(len(head) + memoryview(request.body).nbytes, requests=1)
        try:
            found = connection.exchange(
                head,
                request.body,
                pieces=self._counted(request),
                is_bodiless=request.method == "HEAD",
            )
        except (HttpProtocolError, OSError) as error:
            connection.close()
            raise _interrupted(request, error) from error
        except BaseException:
            connection.close()
            raise
        self.traffic.add(found.head_bytes)
        return pool, found

    def _counted(self, request: "_Request") -> Iterator[Buffer]:
        """The pieces of a body, which have its length in all."""
        left = request.pieces_bytes
        for piece in request.pieces:
            length_bytes = memoryview(piece).nbytes
            left -= length_bytes
            assert left >= 0
            self.traffic.add(length_bytes)
            yield piece
        assert not left

    def _connected(self, request: "_Request", pool: HttpPool) -> HttpConnection:
        try:
            return pool.connection()
        except OSError as error:
            raise S3UnavailableError(
                f"{self.endpoint_url} was not reached: {error}",
                hint="Check the endpoint's address and that the store runs.",
                request=request.name,
            ) from error

    def _headers(self, request: "_Request", host: str, target: str) -> dict[str, str]:
        """All headers to send, with the signature."""
        has_body = request.method not in _BODILESS
        headers = {"host": host}
        headers |= {name.lower(): value for name, value in request.headers.items()}
        # Where there is no body, or where TLS or the digest in a header guards it, a
        # hash of the payload would only cost time.
        payload = UNSIGNED
        if has_body and self.signs_payloads and request.signs_body:
            signed = request.body if request.signed_body is None else request.signed_body
            payload = payload_digest(signed)
        if has_body or len(request.body):
            length_bytes = memoryview(request.body).nbytes + request.pieces_bytes
            headers["content-length"] = str(length_bytes)
        return signed_headers(
            request.method,
            target,
            headers,
            payload=payload,
            keys=self._credentials.get_frozen_credentials(),
            region=self._region,
            at_s=time.time(),
        )

    def _pool(self, host: str) -> HttpPool:
        with self._lock:
            if host not in self._pools:
                parts = urlsplit(f"{self._scheme}://{host}")
                assert parts.hostname is not None
                is_tls = self._scheme == "https"
                self._pools[host] = HttpPool(
                    parts.hostname,
                    parts.port or (443 if is_tls else 80),
                    tls=_tls(self._ca_bundle) if is_tls else None,
                    connect_timeout_s=_CONNECT_TIMEOUT_S,
                    progress_timeout_s=self._progress_timeout_s,
                )
            return self._pools[host]


def open_client(
    settings: S3Settings,
    *,
    backoff: Backoff | None = None,
    sleep: Sleep = time.sleep,
) -> S3Client:
    """A client for these settings; no request is sent to the store.

    Raises:
        ConfigError: there are no credentials, or no such profile, or the endpoint is
            not an HTTP address.
    """
    if settings.addressing not in ("", "path", "virtual"):
        raise ConfigError(f"addressing is {settings.addressing!r}, not path or virtual")
    account = find_account(settings)
    is_configured = account.endpoint_url is not None
    return S3Client(
        endpoint_url=account.endpoint_url or _public_endpoint(account.region),
        region=account.region,
        credentials=account.credentials,
        addressing=settings.addressing or ("path" if is_configured else "virtual"),
        ca_bundle=account.ca_bundle,
        backoff=backoff,
        sleep=sleep,
    )


def place_request(
    netloc: str, base_path: str, *, bucket: str, key: str, query: Query, is_virtual: bool
) -> tuple[str, str]:
    """Host and target of a request: nothing but unreserved characters and the slashes
    of the key stand unquoted, so that nobody on the way changes the rest.
    """
    path = base_path
    # A certificate covers one level below the endpoint.
    if is_virtual and "." not in bucket:
        netloc = f"{bucket}.{netloc}"
        path += "/"
    else:
        path += f"/{quote(bucket)}" + ("/" if key else "")
    target = path + quote(key, safe="/~")
    if query:
        target += "?" + "&".join(
            quote(name, safe="~") + (f"={quote(value, safe='~')}" if value else "")
            for name, value in sorted(query)
        )
    return netloc, target


@dataclass(frozen=True, slots=True)
class _Request:
    """One request, as often as it is sent."""

    method: str
    bucket: str
    key: str
    query: tuple[tuple[str, str], ...]
    headers: dict[str, str]
    body: Buffer
    signed_body: Buffer | None = None
    signs_body: bool = True
    pieces: Iterable[Buffer] = ()
    pieces_bytes: int = 0

    @property
    def name(self) -> str:
        """For errors: method, bucket, key and query; no credentials."""
        shown = "&".join(name + (f"={value}" if value else "") for name, value in self.query)
        return f"{self.method} {self.bucket}/{self.key}" + (f"?{shown}" if shown else "")


def _head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """A request up to its body. Values are UTF-8, as they are signed."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
    text = "\r\n".join(lines)
    # A value with a line's end in it would be another header.
    assert text.count("\n") == text.count("\r") == len(headers)
    return f"{text}\r\n\r\n".encode()


def _tls(ca_bundle: str | None) -> "SSLContext":
    """Certificates are checked by a file of authorities, or those of this machine.

    Raises:
        ConfigError: the file cannot be used.
    """
    # Imported here: without TLS nobody needs it.
    from ssl import create_default_context

    try:
        context = create_default_context(cafile=ca_bundle)
    except OSError as error:
        raise ConfigError(f"{ca_bundle}: is no file of certificates: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _endpoint_parts(endpoint_url: str) -> SimpleNamespace:
    """Scheme, host with port, and path of an endpoint."""
    try:
        parts = urlsplit(endpoint_url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the endpoint {endpoint_url!r} is invalid: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ConfigError(
            f"the endpoint {endpoint_url!r} is invalid",
            hint="Write it as http://HOST:PORT or https://HOST.",
        )
    is_default = port is None or (parts.scheme, port) in (("http", 80), ("https", 443))
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return SimpleNamespace(
        scheme=parts.scheme, netloc=host if is_default else f"{host}:{port}", path=parts.path
    )


def _public_endpoint(region: str) -> str:
    suffix = ".cn" if region.startswith("cn-") else ""
    return f"https://s3.{region}.amazonaws.com{suffix}"


def _interrupted(request: _Request, error: Exception) -> S3OutcomeUnknownError:
    # The kernel's word for a wait that became too long is of no help.
    reason = "no byte for too long" if isinstance(error, BlockingIOError) else error
    return S3OutcomeUnknownError(
        f"{request.name} was interrupted: {reason}",
        hint="Check the network and the store; the request may have been carried out.",
        request=request.name,
    )
