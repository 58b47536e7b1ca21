"""Servers and channels: limits, security, ports, and errors that keep their names."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from merkle.errors import ReconcileError, TreeRefusedError
from merkle.limits import MESSAGE_BYTES_MAX
from ozone.errors import ContainerNotFoundError, ContainerStateError, StaleTreeError
from protos.errors import ControllerUnavailableError
from runtime.call_limits import CallLimits
from runtime.errors import (
    BusyError,
    ConfigError,
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from runtime.rpc import (
    ERROR_TEXT_MAX,
    Deadlines,
    Handler,
    RpcServer,
    StreamCall,
    UnaryCall,
    UnaryStreamCall,
    is_loopback,
    named_errors,
    open_channel,
    printable,
    start_server,
)
from runtime.tls_files import Tls
from tests.support.waiting import wait_until

SERVICE = "test.Service"
OWN_SERVICE = "test.OwnService"
# Any address that is neither loopback nor ours to bind.
ELSEWHERE = "192.0.2.1:9000"


Stream = tuple["SimpleQueue[bytes | None]", Any]


class Echo:
    """Sends back what it gets, or raises what it is given."""

    def __init__(self, service: str = SERVICE) -> None:
        self.service = service
        self.error: ReconcileError | None = None

    def register(self, server: grpc.Server) -> None:
        handlers: dict[str, Handler] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self._one),
            "Many": grpc.unary_stream_rpc_method_handler(self._many),
            "Endless": grpc.unary_stream_rpc_method_handler(lambda raw, _: repeat(raw)),
            "Both": grpc.stream_stream_rpc_method_handler(self._both),
            "Parsed": grpc.unary_unary_rpc_method_handler(
                lambda message, _: message,
                health_pb2.HealthCheckRequest.FromString,
                health_pb2.HealthCheckRequest.SerializeToString,
            ),
        }
        handler = grpc.method_handlers_generic_handler(self.service, handlers)
        server.add_generic_rpc_handlers((handler,))

    def _one(self, raw: bytes, _: grpc.ServicerContext) -> bytes:
        if self.error:
            raise self.error
        return raw

    def _many(self, raw: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        yield raw
        if self.error:
            raise self.error

    def _both(self, raws: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        yield from raws
        if self.error:
            raise self.error


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[RpcServer]:
    running = start_server("127.0.0.1:0", [echo.register])
    yield running
    running.stop(0)


@pytest.fixture
def channel(server: RpcServer) -> Iterator[grpc.Channel]:
    with open_channel(server.address) as opened:
        yield opened


def unary(
    channel: grpc.Channel, raw: bytes = b"x", method: str = "Unary", service: str = SERVICE
) -> bytes:
    call: UnaryCall = channel.unary_unary(f"/{service}/{method}")
    with named_errors("peer", PeerUnavailableError):
        answer: bytes = call(raw, timeout=20)
    return answer


@pytest.mark.parametrize(
    "error",
    [
        ContainerNotFoundError("there is no container 12"),
        ContainerStateError("container 12 is OPEN", hint="close it"),
        BusyError("the queue is full"),
        TreeRefusedError("root_checksum", "the root is not the fold of its blocks"),
        PeerUnavailableError("its peer is away"),
        StaleTreeError("größer als zuvor", hint="nochmals: ü"),
        ReconcileError("something else"),
    ],
    ids=lambda error: error.code,
)
def test_a_raised_error_arrives_under_its_name(
    channel: grpc.Channel, echo: Echo, error: ReconcileError
) -> None:
    echo.error = error
    many: UnaryStreamCall = channel.unary_stream(f"/{SERVICE}/Many")
    both: StreamCall = channel.stream_stream(f"/{SERVICE}/Both")

    def drain(stream: Iterator[bytes]) -> None:
        with named_errors("peer", PeerUnavailableError):
            list(stream)

    for call in (
        lambda: unary(channel),
        lambda: drain(many(b"x", timeout=20)),
        lambda: drain(both(iter([b"x"]), timeout=20)),
    ):
        with pytest.raises(type(error)) as caught:
            call()
        assert type(caught.value) is type(error)
        assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
        assert caught.value.facts == {
            key: error.facts[key] for key in ("reason",) if key in error.facts
        }


def test_long_texts_are_cut_so_that_the_name_still_arrives(
    channel: grpc.Channel, echo: Echo
) -> None:
    echo.error = BusyError("🐘" * 100_000, hint="🐘" * 100_000, reason="🐘" * 100_000)
    with pytest.raises(BusyError) as caught:
        unary(channel)
    assert len(caught.value.message) == ERROR_TEXT_MAX
    assert len(caught.value.hint) == ERROR_TEXT_MAX


@pytest.mark.parametrize("unavailable", [PeerUnavailableError, ControllerUnavailableError])
def test_nobody_there_is_the_error_that_the_caller_chose(
    unavailable: type[ReconcileError], server: RpcServer
) -> None:
    server.stop(0)
    call: UnaryCall = open_channel(server.address).unary_unary("/any/Method")
    with pytest.raises(unavailable) as caught, named_errors("controller", unavailable):
        call(b"", timeout=5)
    assert caught.value.message.startswith("controller: UNAVAILABLE")


def test_an_unknown_method_is_a_refusal(channel: grpc.Channel) -> None:
    with pytest.raises(PeerRefusedError) as caught:
        unary(channel, method="Other")
    assert caught.value.facts["result"] == "UNIMPLEMENTED"


def test_bytes_that_are_no_message_are_refused_by_name(channel: grpc.Channel) -> None:
    with pytest.raises(ReconcileError) as caught:
        unary(channel, b"\xff\xff", method="Parsed")
    assert caught.value.code == "usage"
    assert unary(channel, b"", method="Parsed") == b""


def test_foreign_text_is_made_fit_for_a_terminal() -> None:
    assert printable("a\x1b[31m\nü") == "a?[31m?ü"
    assert len(printable("x" * 10**6)) == ERROR_TEXT_MAX


def test_a_message_at_the_limit_passes_and_one_above_is_refused(channel: grpc.Channel) -> None:
    """CR-025 rests on it: Ozone's own cap is 32 MiB."""
    assert len(unary(channel, bytes(MESSAGE_BYTES_MAX))) == MESSAGE_BYTES_MAX
    with pytest.raises(RemoteProtocolError):
        unary(channel, bytes(MESSAGE_BYTES_MAX + 1))


def test_a_server_refuses_a_message_above_the_limit(server: RpcServer) -> None:
    with grpc.insecure_channel(
        server.address, options=(("grpc.max_send_message_length", -1),)
    ) as unlimited:
        call: UnaryCall = unlimited.unary_unary(f"/{SERVICE}/Unary")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(MESSAGE_BYTES_MAX + 1), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(b"still there", timeout=20) == b"still there"


def test_a_call_beyond_the_limit_of_calls_is_refused_at_once(echo: Echo) -> None:
    running = start_server("127.0.0.1:0", [echo.register], threads=2, calls_max=2)
    waiting: list[SimpleQueue[bytes | None]] = [SimpleQueue(), SimpleQueue()]
    with open_channel(running.address) as channel, open_channel(running.address) as other:
        hanging: StreamCall = channel.stream_stream(f"/{SERVICE}/Both")
        calls = [hanging(iter(requests.get, None), timeout=20) for requests in waiting]
        for requests, call in zip(waiting, calls, strict=True):
            requests.put(b"x")
            assert next(call) == b"x"
        with pytest.raises(PeerUnavailableError) as caught:
            unary(other)
        assert caught.value.facts["status"] == "RESOURCE_EXHAUSTED"
        for requests, call in zip(waiting, calls, strict=True):
            requests.put(None)
            call.cancel()
    running.stop(0)


IMPATIENT = CallLimits(idle_s=1.0)


def _idle_streams(channel: grpc.Channel, count: int, service: str = SERVICE) -> list[Stream]:
    """Streams of one client that were begun, and on which nothing is sent any more."""
    both: StreamCall = channel.stream_stream(f"/{service}/Both")
    streams = []
    for _ in range(count):
        queue: SimpleQueue[bytes | None] = SimpleQueue()
        queue.put(b"x")
        call = both(iter(queue.get, None))
        assert next(call) == b"x"
        streams.append((queue, call))
    return streams


def _end(streams: list[Stream]) -> None:
    for queue, call in streams:
        queue.put(None)
        call.cancel()


def test_streams_that_stand_still_are_cancelled_and_give_their_threads_back(echo: Echo) -> None:
    running = start_server(
        "127.0.0.1:0", [echo.register], threads=4, limits=IMPATIENT, share_threads=True
    )
    with open_channel(running.address) as channel, open_channel(running.address) as other:
        streams = _idle_streams(channel, 2)
        # Half of the threads are one client's at most, whatever its channels.
        with pytest.raises(BusyError, match="2 calls under way"):
            unary(other)
        for _, call in streams:
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED
        wait_until(lambda: _answers(other), "the threads to be free")
        _end(streams)
    running.stop(0)


def test_a_stream_that_moves_lasts_longer_than_the_limit_of_idle_time(echo: Echo) -> None:
    running = start_server("127.0.0.1:0", [echo.register], limits=IMPATIENT)
    with open_channel(running.address) as channel:
        [(queue, call)] = streams = _idle_streams(channel, 1)
        started_s = time.monotonic()
        while time.monotonic() < started_s + 2 * IMPATIENT.idle_s:
            time.sleep(IMPATIENT.idle_s / 10)
            queue.put(b"y")
            assert next(call) == b"y"
        _end(streams)
    running.stop(0)


def test_a_client_that_reads_nothing_is_cancelled(echo: Echo) -> None:
    running = start_server(
        "127.0.0.1:0", [echo.register], threads=4, limits=IMPATIENT, share_threads=True
    )
    with open_channel(running.address) as channel, open_channel(running.address) as other:
        endless: UnaryStreamCall = channel.unary_stream(f"/{SERVICE}/Endless")
        calls = [endless(bytes(1 << 20)) for _ in range(2)]
        for call in calls:
            next(call)
        wait_until(lambda: not _answers(other), "both calls to hold their threads")
        wait_until(lambda: _answers(other), "the threads to be free")
        for call in calls:
            call.cancel()
    running.stop(0)


def test_a_service_with_threads_of_its_own_takes_none_of_the_others(echo: Echo) -> None:
    own = Echo(OWN_SERVICE)
    running = start_server(
        "127.0.0.1:0",
        [echo.register, own.register],
        threads=2,
        own_threads={OWN_SERVICE: 4},
        share_threads=True,
    )
    with open_channel(running.address) as channel:
        streams = _idle_streams(channel, 2, OWN_SERVICE)
        with pytest.raises(BusyError):
            unary(channel, service=OWN_SERVICE)
        assert unary(channel, b"y") == b"y"
        _end(streams)
    running.stop(0)


def _answers(channel: grpc.Channel) -> bool:
    try:
        return unary(channel) == b"x"
    except BusyError:
        return False


def test_a_read_gets_time_for_its_bytes() -> None:
    limits = Deadlines(read_s=30, read_bytes_per_s=100 << 10)
    assert limits.read(0) == 30
    assert limits.read(100 << 20) == 30 + 1024


def test_port_0_gives_a_port_that_answers(server: RpcServer, channel: grpc.Channel) -> None:
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"
    assert unary(channel, b"hello") == b"hello"


def test_a_taken_port_is_a_config_error(server: RpcServer, echo: Echo) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        start_server(server.address, [echo.register])


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", "127.0.0.1:-1"]
)
def test_what_is_no_address_is_a_config_error(address: str, echo: Echo) -> None:
    with pytest.raises(ConfigError):
        start_server(address, [echo.register], insecure=True)


def test_health_is_served(channel: grpc.Channel) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_running_calls_end_in_peace_when_a_server_stops(
    server: RpcServer, channel: grpc.Channel
) -> None:
    many: UnaryStreamCall = channel.unary_stream(f"/{SERVICE}/Many")
    stream = many(b"last", timeout=20)
    assert next(stream) == b"last"
    server.stop(10)
    assert list(stream) == []
    with pytest.raises(PeerUnavailableError):
        unary(channel)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.255.0.9:1", "[::1]:1", "localhost:1", "unix:/run/treefold"]
)
def test_loopback_needs_no_tls(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", [ELSEWHERE, "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1", "localhost.example:1", ":1"]
)
def test_off_loopback_wants_tls_or_a_word_that_says_insecure(address: str, echo: Echo) -> None:
    assert not is_loopback(address)
    with pytest.raises(ConfigError) as caught:
        start_server(address, [echo.register])
    assert "insecure" in caught.value.hint
    with pytest.raises(ConfigError):
        open_channel(address)
    open_channel(address, insecure=True).close()


def test_all_interfaces_may_be_had_insecurely(echo: Echo) -> None:
    running = start_server("0.0.0.0:0", [echo.register], insecure=True)
    with open_channel(f"127.0.0.1:{running.port}") as channel:
        assert unary(channel) == b"x"
    running.stop(0)


def issue(
    authority: trustme.CA, folder: Path, name: str, *, not_after: datetime | None = None
) -> Tls:
    """PEM files for 127.0.0.1 signed by this authority."""
    certificate = authority.issue_cert("127.0.0.1", not_after=not_after)
    paths = [folder / f"{name}.{kind}.pem" for kind in ("cert", "key", "ca")]
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return Tls(*paths)


def test_mutual_tls_lets_in_who_is_signed_and_nobody_else(tmp_path: Path, echo: Echo) -> None:
    """No certificate, another authority's, and plain text are all kept out."""
    authority, stranger = trustme.CA(), trustme.CA()
    ours = issue(authority, tmp_path, "ours")
    theirs = issue(stranger, tmp_path, "theirs")
    half = Tls(theirs.cert, theirs.key, ours.ca)
    running = start_server("127.0.0.1:0", [echo.register], tls=ours)
    with open_channel(running.address, tls=issue(authority, tmp_path, "client")) as channel:
        assert unary(channel) == b"x"
    for tls in (theirs, half, None):
        with open_channel(running.address, tls=tls) as channel, pytest.raises(PeerUnavailableError):
            unary(channel)
    only_trusting = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    with (
        grpc.secure_channel(running.address, only_trusting) as channel,
        pytest.raises(PeerUnavailableError),
    ):
        unary(channel)
    running.stop(0)


def test_a_certificate_for_another_name_is_not_believed(tmp_path: Path, echo: Echo) -> None:
    authority = trustme.CA()
    ours = issue(authority, tmp_path, "ours")
    certificate = authority.issue_cert("elsewhere.example")
    certificate.cert_chain_pems[0].write_to_path(ours.cert)
    certificate.private_key_pem.write_to_path(ours.key)
    running = start_server("127.0.0.1:0", [echo.register], tls=ours)
    with (
        open_channel(running.address, tls=issue(authority, tmp_path, "client")) as channel,
        pytest.raises(PeerUnavailableError),
    ):
        unary(channel)
    running.stop(0)


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_expired_certificate_is_not_believed(tmp_path: Path, echo: Echo, side: str) -> None:
    authority, yesterday = trustme.CA(), datetime.now(UTC) - timedelta(days=1)
    of = {
        name: issue(authority, tmp_path, name, not_after=yesterday if name == side else None)
        for name in ("server", "client")
    }
    running = start_server("127.0.0.1:0", [echo.register], tls=of["server"])
    with (
        open_channel(running.address, tls=of["client"]) as channel,
        pytest.raises(PeerUnavailableError),
    ):
        unary(channel)
    running.stop(0)


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
@pytest.mark.parametrize(
    "content", [None, b"", b"no certificate\n"], ids=["missing", "empty", "other text"]
)
def test_unusable_pem_files_are_config_errors(
    tmp_path: Path, echo: Echo, broken: str, content: bytes | None
) -> None:
    tls = issue(trustme.CA(), tmp_path, "ours")
    path: Path = getattr(tls, broken)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=path.name):
        start_server("127.0.0.1:0", [echo.register], tls=tls)
    with pytest.raises(ConfigError, match=path.name):
        open_channel("127.0.0.1:1", tls=tls)
