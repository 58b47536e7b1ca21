"""gRPC servers and channels as every process here uses them, and errors that keep their
names across the wire.

Everything is bounded: threads, calls, message and metadata sizes, idle and old
connections. A port off loopback wants mutual TLS or an explicit `insecure`. A
`ReconcileError` raised by a service becomes a status code with the error's stable code
in the trailing metadata, from which the caller rebuilds it; what a stranger sends
without one becomes one of three: it did not answer, it refused, it spoke nonsense.
Bytes that are no message of the method are refused by name and never reach the service.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc

from merkle.errors import ReconcileError
from merkle.limits import MESSAGE_BYTES_MAX
from runtime.errors import ConfigError, PeerRefusedError, RemoteProtocolError, UsageError

# Names, a trace and our own trailers fit many times over; grpc's default is the same,
# but only a default.
_METADATA_BYTES_MAX = 8 << 10
# Of an error's message and of its hint: both travel as metadata, where a character can
# take 12 bytes and 4.
ERROR_TEXT_MAX = 400
_KEEPALIVE_MS = 5 * 60_000
_SIZES: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
    # Identity alone: data do not compress, and what is never inflated cannot be a bomb.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Ozone's own interval. A server drops clients that ping more often than it allows,
    # by default every 5 minutes.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 30_000),
)
_SERVER_OPTIONS = (
    *_SIZES,
    # Two processes on one port would share its calls at random; the second must fail to
    # start.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
    ("grpc.max_connection_idle_ms", 15 * 60_000),
    # An old connection is asked to go, so that renewed certificates come into use;
    # calls may end in peace.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
)
_CHANNEL_OPTIONS = (
    *_SIZES,
    # Who may retry is decided by `ReconcileError.retryable`, in one place.
    ("grpc.enable_retries", 0),
    # The default waits up to two minutes for a server that has long been back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name: how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Peers are reached where they say they are; a proxy of the environment is none of
    # our settings.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_REASON_MAX = 50
_CODE, _HINT, _REASON = "treefold-code", "treefold-hint-bin", "treefold-reason-bin"
_STATUS: Mapping[str, grpc.StatusCode] = {
    "usage": grpc.StatusCode.INVALID_ARGUMENT,
    "container_not_found": grpc.StatusCode.NOT_FOUND,
    "block_not_found": grpc.StatusCode.NOT_FOUND,
    "job_not_found": grpc.StatusCode.NOT_FOUND,
    "tree_missing": grpc.StatusCode.NOT_FOUND,
    "container_state": grpc.StatusCode.FAILED_PRECONDITION,
    "read_only": grpc.StatusCode.FAILED_PRECONDITION,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "peer_unavailable": grpc.StatusCode.UNAVAILABLE,
    "controller_unavailable": grpc.StatusCode.UNAVAILABLE,
    "interrupted": grpc.StatusCode.CANCELLED,
}
_GONE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
}
_NONSENSE = {grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE}

Register = Callable[[grpc.Server], None]
# Generic in the stubs alone.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
UnaryCall: TypeAlias = "grpc.UnaryUnaryMultiCallable[Any, Any]"
UnaryStreamCall: TypeAlias = "grpc.UnaryStreamMultiCallable[Any, Any]"
StreamCall: TypeAlias = "grpc.StreamStreamMultiCallable[Any, Any]"
_MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS: our certificate and key, and the authority that must
    have signed the other side's.
    """

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a peer may take for one call; a read gets time for its bytes at the
    slowest rate worth waiting for.
    """

    tree_s: float = 60.0
    records_s: float = 60.0
    read_s: float = 30.0
    read_bytes_per_s: float = 100 << 10

    def read(self, length_bytes: int) -> float:
        """Seconds for a read of so many bytes."""
        return self.read_s + length_bytes / self.read_bytes_per_s


def check_exposure(
    addresses: Mapping[str, str | None], *, metrics: str | None, tls: object, insecure: bool
) -> None:
    """Refuse settings that would speak in the clear beyond this machine.

    `addresses` are by the key of the setting; `metrics` is that of the page for
    Prometheus, which has no TLS of its own.

    Raises:
        ValueError: an address is not on loopback, without TLS or `insecure`.
    """
    for key, address in addresses.items():
        if address and not is_loopback(address) and not (tls or insecure):
            raise ValueError(
                f"{key}: {address} is not on loopback: set [tls] cert, key and ca, or insecure"
                " = true"
            )
    if metrics and not is_loopback(metrics) and not insecure:
        raise ValueError(
            f"metrics: {metrics} is not on loopback and the page is in the clear: insecure = true"
        )


def is_loopback(address: str) -> bool:
    """Whether `host:port` can be reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RpcServer:
    """A server that listens; `port` is the one it got where 0 was asked for."""

    def __init__(
        self,
        server: grpc.Server,
        pool: ThreadPoolExecutor,
        checks: health.HealthServicer,
        host: str,
        port: int,
    ) -> None:
        self._server, self._pool, self._checks = server, pool, checks
        self.port = port
        self.address = f"{host}:{port}"

    def stop(self, grace_s: float = 1.0) -> None:
        """Tell health checks, take no new calls, let running ones end within `grace_s`,
        then cut them.
        """
        self._checks.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)


def start_server(
    address: str,
    services: Iterable[Register],
    *,
    tls: Tls | None = None,
    insecure: bool = False,
    threads: int = 16,
    calls_max: int = 64,
) -> RpcServer:
    """Listen on `host:port` with these services and grpc's health service.

    A call beyond `threads` waits, one beyond `calls_max` is refused at once.

    Raises:
        ConfigError: neither TLS nor `insecure` off loopback, unusable PEM files, or the
            port cannot be had.
    """
    assert 0 < threads <= calls_max
    _require_security(address, tls, insecure)
    host, separator, port_text = address.rpartition(":")
    if not separator or not port_text.isdecimal() or int(port_text) > 0xFFFF:
        raise ConfigError(f"{address!r} is not host:port", address=address)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
    options = (*_SERVER_OPTIONS, ("grpc.max_concurrent_streams", calls_max))
    server = grpc.server(
        pool, interceptors=[_NamedErrors()], options=options, maximum_concurrent_rpcs=calls_max
    )
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for register in services:
        register(server)
    try:
        if tls:
            cert, key, ca = _read_pem(tls)
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        pool.shutdown()
        hint = "is the port taken, or a PEM file no certificate or key?"
        raise ConfigError(f"cannot listen on {address}", hint=hint, address=address) from error
    server.start()
    return RpcServer(server, pool, checks, host, port)


def refuse(context: grpc.ServicerContext, error: ReconcileError) -> NoReturn:
    """End the call with this error, under its own name."""
    trailers: list[tuple[str, str | bytes]] = [(_CODE, error.code)]
    if error.hint:
        trailers.append((_HINT, error.hint[:ERROR_TEXT_MAX].encode()))
    if reason := str(error.facts.get("reason", "")):
        trailers.append((_REASON, reason[:_REASON_MAX].encode()))
    context.set_trailing_metadata(tuple(trailers))
    context.abort(_STATUS.get(error.code, _default_status(error)), printable(error.message))


def printable(text: str) -> str:
    """Foreign text made fit for a log or a terminal: bounded, and without control
    characters.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:ERROR_TEXT_MAX])


def _default_status(error: ReconcileError) -> grpc.StatusCode:
    return grpc.StatusCode.ABORTED if error.retryable else grpc.StatusCode.INTERNAL


class _NamedErrors(grpc.ServerInterceptor):
    """Parses requests where a failure can be named, and names the errors that services
    raise.
    """

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MaybeHandler:
        """The handler with requests parsed and errors named."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer or _as_it_is
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        def arrived(raw: Any) -> Any:
            return (
                (_parsed(parse, one) for one in raw)
                if handler.request_streaming
                else _parsed(parse, raw)
            )

        def one_answer(raw: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(arrived(raw), context)
            except ReconcileError as error:
                refuse(context, error)

        def many_answers(raw: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from behaviour(arrived(raw), context)
            except ReconcileError as error:
                refuse(context, error)

        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(
            many_answers if handler.response_streaming else one_answer,
            None,
            handler.response_serializer,
        )


_MAKERS: Mapping[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _as_it_is(raw: bytes) -> bytes:
    return raw


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise UsageError("the request is no message of this method") from error


def open_channel(address: str, *, tls: Tls | None = None, insecure: bool = False) -> grpc.Channel:
    """A channel to `host:port`; it connects on first use, and again whenever the
    connection is lost.

    Raises:
        ConfigError: neither TLS nor `insecure` off loopback, or unusable PEM files.
    """
    _require_security(address, tls, insecure)
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    cert, key, ca = _read_pem(tls)
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(ca, key, cert), options=_CHANNEL_OPTIONS
    )


@contextmanager
def named_errors(target: str, unavailable: type[ReconcileError]) -> Iterator[None]:
    """Turn gRPC's errors of the calls inside into ours: see `error_from`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error, target=target, unavailable=unavailable) from error


def error_from(
    error: grpc.RpcError, *, target: str, unavailable: type[ReconcileError]
) -> ReconcileError:
    """The error that the service named; else `unavailable`, PeerRefusedError or
    RemoteProtocolError by the status.
    """
    if sent := sent_error(error):
        return sent
    status, details = error.code(), printable(error.details() or "")
    text = f"{target}: {status.name}: {details}" if details else f"{target}: {status.name}"
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # The one status with two authors: our side, about a message beyond the limit,
        # or a server that is full.
        beyond = "larger than max" in details
        return (RemoteProtocolError if beyond else unavailable)(text, status=status.name)
    if status in _GONE:
        return unavailable(text, status=status.name)
    if status in _NONSENSE:
        return RemoteProtocolError(text, status=status.name)
    return PeerRefusedError(text, result=status.name)


def sent_error(error: grpc.RpcError) -> ReconcileError | None:
    """The named error that a service of ours sent; None where the status comes from
    elsewhere.
    """
    # The stubs know the attributes only; it is a named tuple, and None where the call
    # never reached a server.
    trailers = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
    kind = ReconcileError.by_code().get(_text(trailers.get(_CODE)))
    if kind is None:
        return None
    return kind.received(
        printable(error.details() or ""),
        hint=printable(_text(trailers.get(_HINT))),
        reason=printable(_text(trailers.get(_REASON))),
    )


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _require_security(address: str, tls: Tls | None, insecure: bool) -> None:
    if tls is None and not insecure and not is_loopback(address):
        raise ConfigError(
            f"{address} is not on loopback and would be open to anyone",
            hint="set cert, key and ca, or insecure = true if the network is trusted",
            address=address,
        )


def _read_pem(tls: Tls) -> tuple[bytes, bytes, bytes]:
    parts = []
    for path in (tls.cert, tls.key, tls.ca):
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}", path=str(path)
            ) from error
        # grpc takes anything here and fails at the first call, as if the peer were
        # away.
        if b"-----BEGIN " not in pem:
            raise ConfigError(f"{path}: is no PEM file", path=str(path))
        parts.append(pem)
    cert, key, ca = parts
    return cert, key, ca
