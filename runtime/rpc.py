"""gRPC servers and channels of all processes, and the transport of errors by name.

Threads, calls, message sizes, metadata sizes and the age of connections are bounded. A
port off loopback requires mutual TLS or an explicit `insecure`.

A `ReconcileError` raised by a service becomes a gRPC status, with the error's stable
code in the trailing metadata; the client rebuilds the error from it. A status without
such a code becomes one of three errors: unavailable, refused, or protocol error. Bytes
that do not parse as the method's request are refused before they reach the service.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc

from merkle.errors import ReconcileError
from merkle.limits import MESSAGE_BYTES_MAX
from runtime.access import Access
from runtime.call_limits import WATCH_THREAD, CallLimits, CallWatch, WatchedCall
from runtime.errors import ConfigError, PeerRefusedError, RemoteProtocolError, UsageError
from runtime.renewable_channel import RenewableChannel
from runtime.roles import Identity, Role, RoleTable
from runtime.setting_values import split_address
from runtime.tls_files import Tls, TlsBytes
from runtime.tls_renewal import RenewableTls

# Many times what names, a trace and our trailers need. It equals grpc's default, which
# may change.
_METADATA_BYTES_MAX = 8 << 10
# Characters of an error's message, and of its hint. Both travel as metadata, where a
# character takes up to 12 bytes in the message and 4 in the hint.
ERROR_TEXT_MAX = 400
_KEEPALIVE_MS = 5 * 60_000
_SIZES: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
    # Identity only: data do not compress, and decompression bombs are ruled out.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Ozone's own interval. A server drops clients that ping more often than it allows:
    # by default every 5 minutes.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 30_000),
)
_SERVER_OPTIONS = (
    *_SIZES,
    # Two processes on one port would share its calls at random: the second must fail
    # to start.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
    ("grpc.max_connection_idle_ms", 15 * 60_000),
    # Old connections are closed, so that renewed certificates take effect; running
    # calls get the grace time.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
)
_CHANNEL_OPTIONS = (
    *_SIZES,
    # `ReconcileError.retryable` decides about retries, in one place.
    ("grpc.enable_retries", 0),
    # By default grpc waits up to two minutes, however early the server is back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Peers are called directly: a proxy from the environment is not in our settings.
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
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "peer_unavailable": grpc.StatusCode.UNAVAILABLE,
    "controller_unavailable": grpc.StatusCode.UNAVAILABLE,
    "interrupted": grpc.StatusCode.CANCELLED,
}
_UNAVAILABLE_STATUSES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
}
_PROTOCOL_STATUSES = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
}

_T = TypeVar("_T")
Register = Callable[[grpc.Server], None]
# Text, since these classes are generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
UnaryCall: TypeAlias = "grpc.UnaryUnaryMultiCallable[Any, Any]"
UnaryStreamCall: TypeAlias = "grpc.UnaryStreamMultiCallable[Any, Any]"
StreamCall: TypeAlias = "grpc.StreamStreamMultiCallable[Any, Any]"
_MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a peer may take for one call.

    A read gets `read_s` and the time of its bytes at `read_bytes_per_s`, the slowest
    rate worth waiting for.
    """

    tree_s: float = 60.0
    records_s: float = 60.0
    read_s: float = 30.0
    read_bytes_per_s: float = 100 << 10

    def read(self, length_bytes: int) -> float:
        """The deadline in seconds of a read of `length_bytes`."""
        return self.read_s + length_bytes / self.read_bytes_per_s


def check_exposure(
    addresses: Mapping[str, str | None], *, metrics: str | None, tls: object, insecure: bool
) -> None:
    """Refuse settings that would send plain text beyond this machine.

    `addresses` are by key of the setting; `metrics` is the address of the page for
    Prometheus, which has no TLS.

    Raises:
        ValueError: an address is off loopback, without TLS or `insecure`.
    """
    for key, address in addresses.items():
        if address and not is_loopback(address) and not (tls or insecure):
            raise ValueError(
                f"{key}: {address} is not on loopback: set [tls] cert, key and ca, or insecure"
                " = true"
            )
    if metrics and not is_loopback(metrics) and not insecure:
        raise ValueError(
            f"metrics: {metrics} is not on loopback, and the page has no TLS: set insecure = true"
        )


def is_loopback(address: str) -> bool:
    """Whether `host:port` can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RpcServer:
    """A running server; `port` is the bound port, also if port 0 was requested."""

    def __init__(
        self,
        server: grpc.Server,
        pools: Sequence[ThreadPoolExecutor],
        watch: CallWatch,
        checks: health.HealthServicer,
        host: str,
        port: int,
    ) -> None:
        self._server, self._pools, self._watch, self._checks = server, pools, watch, checks
        self.port = port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def stop(self, grace_s: float = 1.0) -> None:
        """Fail health checks, refuse new calls, and cancel running calls after
        `grace_s`.
        """
        self._checks.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._watch.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def start_server(
    address: str,
    services: Iterable[Register],
    *,
    tls: Tls | RenewableTls | None = None,
    insecure: bool = False,
    access: Access | None = None,
    threads: int = 16,
    calls_max: int = 64,
    own_threads: Mapping[str, int] | None = None,
    limits: CallLimits | None = None,
    share_threads: bool = False,
) -> RpcServer:
    """Listen on `host:port` with these services and grpc's health service.

    `access` says who may call; by default whoever reaches a server without TLS, and
    with TLS who bears a role in the certificate itself.
    Calls beyond `threads` wait; calls beyond `calls_max` are refused at once. With
    `share_threads`, so are calls of one client beyond half of a service's threads.
    Services in `own_threads`, by full name, get that many threads of their own.
    `limits` cancel calls that stand still.

    Raises:
        ConfigError: the address is off loopback without TLS or `insecure`, the PEM
            files are unusable, or the port is taken.
    """
    assert 0 < threads <= calls_max
    access = access or Access(RoleTable(), is_enforced=tls is not None)
    assert access.is_enforced == (tls is not None)
    _require_security(address, tls, insecure)
    host, _ = split_address(address)
    pool = _CallPool(threads, share=share_threads)
    pools = {
        service: _CallPool(count, share=share_threads)
        for service, count in (own_threads or {}).items()
    }
    watch = CallWatch(limits or CallLimits(), access.guard(WATCH_THREAD))
    options = (*_SERVER_OPTIONS, ("grpc.max_concurrent_streams", calls_max))
    server = grpc.server(
        pool,
        interceptors=[_CallInterceptor(access, watch, pool, pools)],
        options=options,
        maximum_concurrent_rpcs=calls_max,
    )
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for register in services:
        register(server)
    try:
        if tls:
            port = server.add_secure_port(address, _server_credentials(_renewable(tls)))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        watch.close()
        pool.shutdown()
        hint = "Check that the port is free and that the PEM files hold a certificate and a key."
        raise ConfigError(f"cannot listen on {address}", hint=hint, address=address) from error
    server.start()
    return RpcServer(server, [pool, *pools.values()], watch, checks, host, port)


def _server_credentials(tls: RenewableTls) -> grpc.ServerCredentials:
    """Credentials that take renewed files for each new connection."""
    served = tls.current()

    def configuration(found: TlsBytes) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    # None if nothing changed, which the type stubs do not know.
    def renewed() -> Any:
        nonlocal served
        found = tls.current()
        if found is served:
            return None
        served = found
        return configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        configuration(served), renewed, require_client_authentication=True
    )


def refuse(context: grpc.ServicerContext, error: ReconcileError) -> NoReturn:
    """Abort the call with this error; its code travels in the trailing metadata."""
    trailers: list[tuple[str, str | bytes]] = [(_CODE, error.code)]
    if error.hint:
        trailers.append((_HINT, error.hint[:ERROR_TEXT_MAX].encode()))
    if reason := str(error.facts.get("reason", "")):
        trailers.append((_REASON, reason[:_REASON_MAX].encode()))
    context.set_trailing_metadata(tuple(trailers))
    context.abort(_STATUS.get(error.code, _default_status(error)), printable(error.message))


def printable(text: str) -> str:
    """Text of a peer, safe for logs and terminals: bounded, without control
    characters.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:ERROR_TEXT_MAX])


def _default_status(error: ReconcileError) -> grpc.StatusCode:
    return grpc.StatusCode.ABORTED if error.retryable else grpc.StatusCode.INTERNAL


class _CallPool(ThreadPoolExecutor):
    """Threads for calls, of which one client gets half at most if they are shared."""

    def __init__(self, threads: int, *, share: bool) -> None:
        super().__init__(threads, thread_name_prefix="rpc")
        self.calls_per_client_max = max(2, threads // 2) if share else None


class _CallInterceptor(grpc.ServerInterceptor):
    """Refuses callers without the role that a method needs; sends the errors of
    services, and of parsing requests, under their own codes; watches calls; gives
    services the threads that are their own.
    """

    def __init__(
        self,
        access: Access,
        watch: CallWatch,
        pool: _CallPool,
        own_pools: Mapping[str, _CallPool],
    ) -> None:
        self._access = access
        self._watch = watch
        self._pool = pool
        self._own_pools = own_pools

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MaybeHandler:
        """The handler, wrapped."""
        handler = continuation(handler_call_details)
        method = str(handler_call_details.method)
        service = method.rpartition("/")[0].lstrip("/")
        # Whoever connects may ask for health. Its service holds no thread for a call,
        # and waits by design.
        if handler is None or service == health.SERVICE_NAME:
            return handler
        deserialize = handler.request_deserializer or _identity
        admitted = partial(self._access.admitted, method)
        pool = self._own_pools.get(service, self._pool)
        watch = partial(
            self._watch.watch,
            service=service,
            calls_per_client_max=pool.calls_per_client_max,
            is_stream=handler.request_streaming or handler.response_streaming,
        )
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        def parse(raw: Any, call: WatchedCall) -> Any:
            if not handler.request_streaming:
                return _parse_request(deserialize, raw)
            return _each(call, (_parse_request(deserialize, one) for one in raw))

        def respond(raw: Any, context: grpc.ServicerContext) -> Any:
            try:
                with watch(context) as call, admitted(context):
                    return behaviour(parse(raw, call), context)
            except ReconcileError as error:
                refuse(context, error)

        def stream(raw: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with watch(context) as call, admitted(context):
                    yield from _each(call, behaviour(parse(raw, call), context))
            except ReconcileError as error:
                refuse(context, error)

        wrapped: Any = stream if handler.response_streaming else respond
        # gRPC's way to give a method threads of its own.
        wrapped.experimental_thread_pool = pool
        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        return make(wrapped, None, handler.response_serializer)


def _each(call: WatchedCall, messages: Iterable[_T]) -> Iterator[_T]:
    """The messages, each noted as it comes, and when the next one is wanted."""
    for message in messages:
        call.note_message()
        yield message
        call.note_message()


_HANDLERS: Mapping[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _identity(raw: bytes) -> bytes:
    return raw


def _parse_request(deserialize: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return deserialize(raw)
    except DecodeError as error:
        raise UsageError("the request is not a message of this method") from error


def open_channel(
    address: str,
    *,
    tls: Tls | RenewableTls | None = None,
    insecure: bool = False,
    server: Role | Identity | None = None,
    receive_bytes_max: int = MESSAGE_BYTES_MAX,
) -> grpc.Channel:
    """A channel to `host:port`, which connects on first use and reconnects by itself.
    Its next call after the PEM files were renewed is made with them.

    With TLS no call reaches a server that is not `server`, which the first call checks
    (runtime.server_proof): it may raise ServerRoleError. None is any server of the
    authority. `receive_bytes_max` bounds an answer without TLS.

    Raises:
        ConfigError: the address is off loopback without TLS or `insecure`, or the PEM
            files are unusable.
    """
    _require_security(address, tls, insecure)
    if tls is None:
        size = ("grpc.max_receive_message_length", receive_bytes_max)
        return grpc.insecure_channel(address, options=(*_CHANNEL_OPTIONS, size))
    connect = partial(_secure_channel, address)
    if server is None:
        return RenewableChannel(_renewable(tls), connect)
    # Imported here: cryptography takes time, and without TLS nobody needs it.
    from runtime.server_proof import prove_server

    return RenewableChannel(_renewable(tls), connect, partial(prove_server, address, server))


def _renewable(tls: Tls | RenewableTls) -> RenewableTls:
    return tls if isinstance(tls, RenewableTls) else RenewableTls(tls)


def _secure_channel(address: str, found: TlsBytes) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
    return grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


@contextmanager
def named_errors(target: str, unavailable: type[ReconcileError]) -> Iterator[None]:
    """Translate the gRPC errors raised inside, as `error_from` does."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error, target=target, unavailable=unavailable) from error


def error_from(
    error: grpc.RpcError, *, target: str, unavailable: type[ReconcileError]
) -> ReconcileError:
    """The error that the service sent; else `unavailable`, PeerRefusedError or
    RemoteProtocolError, by status.
    """
    if sent := sent_error(error):
        return sent
    status, details = error.code(), printable(error.details() or "")
    text = f"{target}: {status.name}: {details}" if details else f"{target}: {status.name}"
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Two causes share this status: our own limit on message sizes, and a server
        # that is full.
        is_too_large = "larger than max" in details
        return (RemoteProtocolError if is_too_large else unavailable)(text, status=status.name)
    if status in _UNAVAILABLE_STATUSES:
        return unavailable(text, status=status.name)
    if status in _PROTOCOL_STATUSES:
        return RemoteProtocolError(text, status=status.name)
    return PeerRefusedError(text, result=status.name)


def sent_error(error: grpc.RpcError) -> ReconcileError | None:
    """The error that one of our services sent; None if the status comes from
    elsewhere.
    """
    # Entries are named tuples, though the stubs have their attributes only. The
    # metadata is None if the call never reached a server.
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


def _require_security(address: str, tls: object, insecure: bool) -> None:
    if tls is None and not insecure and not is_loopback(address):
        raise ConfigError(
            f"{address} is not on loopback and has no TLS",
            hint="Set cert, key and ca, or insecure = true if the network is trusted.",
            address=address,
        )
