"""The S3 client: signs a request, sends it over a pooled connection, reads the answer.

It knows buckets, keys and HTTP, and no operation of S3: whoever calls builds queries
and headers, and parses documents. Credentials, region and endpoint come from botocore,
which finds them where every S3 tool does, and so does the signature. The transport is
urllib3 with only the headers that are needed: a small object costs a tenth less than
through boto3 (docs/decisions). Keys reach the server byte by byte, because nothing here
normalises a path.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

import urllib3
from botocore.auth import S3SigV4Auth
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError
from botocore.session import Session
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError
from urllib3.util import SKIP_HEADER

from merkle.checksum import Buffer
from runtime.errors import ConfigError
from runtime.retry import Backoff, Sleep, call_with_retry
from runtime.s3_answers import (
    S3Answer,
    S3OutcomeUnknownError,
    S3ProtocolError,
    S3UnavailableError,
    error_of,
    raise_for,
)
from runtime.traffic import TrafficCounter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, SupportsRead

T = TypeVar("T")
Query = Sequence[tuple[str, str]]

_CONNECT_TIMEOUT_S = 10.0
# Between two bytes of progress. A gateway of Ozone was silent for a minute in the
# middle of a PUT that then succeeded.
_PROGRESS_TIMEOUT_S = 200.0
# Of one answer that is read whole; a page of 1,000 keys of 1,000 bytes has 5 MiB, and
# XML takes thirty times its bytes in memory.
_ANSWER_BYTES_MAX = 16 << 20
_PIECE_BYTES = 256 << 10
_CONNECTIONS_MAX = 64
_DEFAULT_REGION = "us-east-1"

_IDEMPOTENT = {"GET", "HEAD", "PUT", "DELETE"}
_BODILESS = {"GET", "HEAD", "DELETE"}
_SIGNED_HEADERS = {"host", "content-type"}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where a store is and who asks; what is empty comes from the environment, the
    configuration files or the defaults, as for every S3 tool.

    `addressing` is `path` (endpoint/bucket/key) or `virtual` (bucket.endpoint/key);
    empty chooses `virtual` on AWS for bucket names that a certificate covers.
    """

    endpoint_url: str = ""
    region: str = ""
    profile: str = ""
    addressing: str = ""


@dataclass(frozen=True, slots=True)
class S3Stream:
    """An answer whose body is still arriving, in pieces of up to 256 KiB.

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
        credentials: Credentials,
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
        self._timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=progress_timeout_s)
        self._lock = threading.Lock()
        self._pools: dict[str, urllib3.HTTPConnectionPool] = {}
        self.traffic = TrafficCounter()

    @property
    def signs_payloads(self) -> bool:
        """Whether the signature of a request covers a SHA-256 of its body."""
        return bool(self._scheme == "http")

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
        idempotent: bool | None = None,
    ) -> S3Answer:
        """Send a request and read its whole answer.

        A name in `query` with an empty value is sent without `=`. What is signed is the
        body, or `signed_body`, which a store that checks payloads refuses. With
        `idempotent` false the request is repeated only after answers by which the store
        says that it did nothing; by default POST is not idempotent and all others are.

        Raises:
            S3UnavailableError: the store was not reached, or did nothing for now.
            S3OutcomeUnknownError: the request may have been carried out.
            S3ProtocolError: the answer is invalid.
            S3Error: the store refused. An error inside an answer of status 200 is one.
        """
        request = _Request(
            method, bucket, key, tuple(query), dict(headers or {}), body, signed_body
        )

        def attempt() -> S3Answer:
            response = self._send(request)
            with closing(response):
                answer = _read_whole(response, request)
            self.traffic.add(len(answer.body))
            if request.method != "GET" or not request.key or answer.status >= 300:
                raise_for(answer, request.name)
            return answer

        return self._retry(attempt, method in _IDEMPOTENT if idempotent is None else idempotent)

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

        def attempt() -> urllib3.BaseHTTPResponse:
            response = self._send(request)
            if response.status < 300:
                return response
            with closing(response):
                answer = _read_whole(response, request)
            raise error_of(answer, request.name)

        response = self._retry(attempt, True)
        with closing(response):
            yield S3Stream(response.status, _lower(response), self._counted(response, request))

    def _counted(self, response: urllib3.BaseHTTPResponse, request: "_Request") -> Iterator[bytes]:
        for piece in _pieces(response, request):
            self.traffic.add(len(piece))
            yield piece

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

    def _send(self, request: "_Request") -> urllib3.BaseHTTPResponse:
        """Sign and send once; the answer's head has arrived."""
        host, target = place_request(
            self._netloc,
            self._base_path,
            bucket=request.bucket,
            key=request.key,
            query=request.query,
            is_virtual=self._is_virtual,
        )
        headers = self._sign(request, host, target)
        sent = len(request.method) + len(target) + _lengths(headers)
        self.traffic.add(sent + memoryview(request.body).nbytes, requests=1)
        try:
            response = self._pool(host).urlopen(
                request.method,
                target,
                body=_in_pieces(request.body),
                headers=headers,
                retries=False,
                redirect=False,
                timeout=self._timeout,
                preload_content=False,
                decode_content=False,
            )
            self.traffic.add(_lengths(response.headers))
            return response
        except (ConnectTimeoutError, NewConnectionError) as error:
            raise S3UnavailableError(
                f"{self.endpoint_url} was not reached: {error}",
                hint="Check the endpoint's address and that the store runs.",
                request=request.name,
            ) from error
        except (HTTPError, HTTPException, OSError) as error:
            raise _interrupted(request, error) from error

    def _sign(self, request: "_Request", host: str, target: str) -> dict[str, str]:
        """All headers to send, with the signature over those that S3 wants signed."""
        try:
            credentials = self._credentials.get_frozen_credentials()
        except BotoCoreError as error:
            raise ConfigError(f"credentials cannot be renewed: {error}") from error
        headers = {name.lower(): value for name, value in request.headers.items()}
        # Where there is no body, or where TLS and the digest in a header guard it, a
        # hash of the payload would only cost bytes and time.
        signs_payload = request.method not in _BODILESS and self.signs_payloads
        signed = HTTPMessage()
        for name, value in (("host", host), *headers.items()):
            if name in _SIGNED_HEADERS or name.startswith("x-amz-"):
                signed[name] = value
        signable = SimpleNamespace(
            method=request.method,
            url=f"{self._scheme}://{host}{target}",
            headers=signed,
            params=None,
            body=request.body if request.signed_body is None else request.signed_body,
            context={
                "client_config": SimpleNamespace(s3={"payload_signing_enabled": signs_payload})
            },
        )
        S3SigV4Auth(credentials, "s3", self._region).add_auth(signable)
        headers |= dict(signed.items())
        if request.method not in _BODILESS or len(request.body):
            headers["content-length"] = str(memoryview(request.body).nbytes)
        # The library writes headers as Latin-1, and the signature is over UTF-8.
        headers = {name: value.encode().decode("latin-1") for name, value in headers.items()}
        return headers | {"user-agent": SKIP_HEADER, "accept-encoding": SKIP_HEADER}

    def _pool(self, host: str) -> urllib3.HTTPConnectionPool:
        with self._lock:
            if host not in self._pools:
                self._pools[host] = _new_pool(self._scheme, host, self._ca_bundle)
            return self._pools[host]


def open_client(
    settings: S3Settings, *, backoff: Backoff | None = None, sleep: Sleep = time.sleep
) -> S3Client:
    """A client for these settings; no request is sent to the store.

    Raises:
        ConfigError: there are no credentials, or no such profile, or the endpoint is
            not an HTTP address.
    """
    if settings.addressing not in ("", "path", "virtual"):
        raise ConfigError(f"addressing is {settings.addressing!r}, not path or virtual")
    with _configuration():
        session = Session(profile=settings.profile or None)
        region = settings.region or session.get_config_variable("region") or _DEFAULT_REGION
        credentials = session.get_credentials()
        configured = settings.endpoint_url or _configured_endpoint(session)
        endpoint_url = configured or _public_endpoint(region)
        ca_bundle = session.get_config_variable("ca_bundle")
    if credentials is None:
        raise ConfigError(
            "no S3 credentials were found",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile.",
        )
    return S3Client(
        endpoint_url=endpoint_url,
        region=region,
        credentials=credentials,
        addressing=settings.addressing or ("path" if configured else "virtual"),
        ca_bundle=ca_bundle,
        backoff=backoff,
        sleep=sleep,
    )


def configured_endpoint(settings: S3Settings) -> str:
    """The endpoint of the settings, of the environment or of the profile; empty for
    that of AWS.

    Raises:
        ConfigError: there is no such profile.
    """
    with _configuration():
        session = Session(profile=settings.profile or None)
        return settings.endpoint_url or _configured_endpoint(session) or ""


@contextmanager
def _configuration() -> Iterator[None]:
    try:
        yield
    except BotoCoreError as error:
        raise ConfigError(
            str(error), hint="Check the profile's name and ~/.aws/config and ~/.aws/credentials."
        ) from error


def _lengths(headers: Mapping[str, str]) -> int:
    """Bytes of headers on the wire, with their separators and line ends."""
    return sum(len(name) + len(value) + 4 for name, value in headers.items())


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

    @property
    def name(self) -> str:
        """For errors: method, bucket, key and query; no credentials."""
        shown = "&".join(name + (f"={value}" if value else "") for name, value in self.query)
        return f"{self.method} {self.bucket}/{self.key}" + (f"?{shown}" if shown else "")


class _Connection(HTTPConnection):
    """Sends each piece of a body with a timeout of its own; urllib3 gives all of it the
    time to connect.
    """

    def send(
        self, data: "SupportsRead[bytes] | Iterable[ReadableBuffer] | ReadableBuffer | str"
    ) -> None:
        """Send one piece."""
        _give_time(self)
        super().send(data)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        """The answer."""
        _acknowledge_at_once(self)
        return super().getresponse()


class _TlsConnection(HTTPSConnection):
    """The same over TLS."""

    def send(
        self, data: "SupportsRead[bytes] | Iterable[ReadableBuffer] | ReadableBuffer | str"
    ) -> None:
        """Send one piece."""
        _give_time(self)
        super().send(data)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        """The answer."""
        _acknowledge_at_once(self)
        return super().getresponse()


def _acknowledge_at_once(connection: HTTPConnection) -> None:
    """A server that sends a head and a short body apart waits with the body until the
    head is acknowledged (Ceph does), and a kernel that waits for something to send with
    it takes 40 ms. The option holds for one answer, and only Linux has it.
    """
    if connection.sock is not None and hasattr(socket, "TCP_QUICKACK"):
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _give_time(connection: HTTPConnection) -> None:
    if connection.sock is None:
        connection.connect()
    if connection.sock is not None:
        connection.sock.settimeout(_PROGRESS_TIMEOUT_S)


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _new_pool(scheme: str, netloc: str, ca_bundle: str | None) -> urllib3.HTTPConnectionPool:
    parts = urlsplit(f"{scheme}://{netloc}")
    assert parts.hostname is not None
    if scheme == "https":
        return _TlsPool(parts.hostname, parts.port, maxsize=_CONNECTIONS_MAX, ca_certs=ca_bundle)
    return _Pool(parts.hostname, parts.port, maxsize=_CONNECTIONS_MAX)


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


def _configured_endpoint(session: Session) -> str | None:
    """The endpoint of the environment or of the profile."""
    url = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name="s3",
    ).provide()
    return str(url) if url else None


def _public_endpoint(region: str) -> str:
    suffix = ".cn" if region.startswith("cn-") else ""
    return f"https://s3.{region}.amazonaws.com{suffix}"


def _in_pieces(body: Buffer) -> Iterator[bytes] | None:
    """Each piece gets its own timeout; one timeout for all would cut slow links off."""
    view = memoryview(body).cast("B")
    if not view.nbytes:
        return None
    return (bytes(view[i : i + _PIECE_BYTES]) for i in range(0, view.nbytes, _PIECE_BYTES))


def _lower(response: urllib3.BaseHTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _pieces(response: urllib3.BaseHTTPResponse, request: _Request) -> Iterator[bytes]:
    try:
        yield from response.stream(_PIECE_BYTES)
    except (HTTPError, HTTPException, OSError) as error:
        raise _interrupted(request, error) from error


def _read_whole(response: urllib3.BaseHTTPResponse, request: _Request) -> S3Answer:
    parts, length = [], 0
    for piece in _pieces(response, request):
        parts.append(piece)
        length += len(piece)
        if length > _ANSWER_BYTES_MAX:
            raise S3ProtocolError(
                f"the answer to {request.name} exceeds {_ANSWER_BYTES_MAX} bytes",
                request=request.name,
            )
    return S3Answer(response.status, _lower(response), b"".join(parts))


def _interrupted(request: _Request, error: Exception) -> S3OutcomeUnknownError:
    return S3OutcomeUnknownError(
        f"{request.name} was interrupted: {error}",
        hint="Check the network and the store; the request may have been carried out.",
        request=request.name,
    )
