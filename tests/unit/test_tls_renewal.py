"""Renewed certificates take effect without a restart, and half a renewal does not."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from uuid import UUID

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError, PeerUnavailableError
from runtime.renewable_channel import RenewableChannel
from runtime.rpc import named_errors, open_channel
from runtime.tls_files import Tls, TlsBytes
from runtime.tls_renewal import FileStamp, RenewableTls
from tests.support.certificates import OLD, issue, serving
from tests.support.logged_events import events, logged


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def check(channel: grpc.Channel) -> None:
    with named_errors("server", PeerUnavailableError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


def reaches(address: str, tls: Tls) -> bool:
    """Whether a new client is served, by what it trusts and what it is."""
    with open_channel(address, tls=tls) as channel:
        try:
            check(channel)
        except PeerUnavailableError:
            return False
        return True


def test_a_server_takes_renewed_files_for_its_next_connection(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """A new authority lets in other clients, and no longer the old ones."""
    server, client = (issue(authority, tmp_path / name) for name in ("server", "client"))
    next_authority = trustme.CA()
    next_client = issue(next_authority, tmp_path / "next")
    with serving(server) as address:
        assert reaches(address, client)
        assert not reaches(address, next_client)
        issue(next_authority, tmp_path / "server")
        assert reaches(address, next_client)
        assert not reaches(address, client)


def test_an_expired_server_serves_again_once_it_is_renewed(
    authority: trustme.CA, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = issue(authority, tmp_path / "server", not_after=OLD)
    client = issue(authority, tmp_path / "client")
    with logged(), serving(server) as address:
        assert not reaches(address, client)
        issue(authority, tmp_path / "server")
        assert reaches(address, client)
    (invalid, renewed) = events(capsys)
    assert (invalid["event"], invalid["level"]) == ("tls_not_valid", "error")
    assert invalid["error"] == f"{server.cert}: has expired on 2020-01-01 00:00 UTC"
    assert (renewed["event"], renewed["cert"]) == ("tls_renewed", str(server.cert))


def test_a_channel_takes_renewed_files_for_its_next_call(
    authority: trustme.CA, tmp_path: Path
) -> None:
    server = issue(authority, tmp_path / "server")
    expired = issue(authority, tmp_path / "client", not_after=OLD)
    with serving(server) as address, open_channel(address, tls=expired) as channel:
        with pytest.raises(PeerUnavailableError):
            check(channel)
        issue(authority, tmp_path / "client")
        check(channel)


def test_a_call_under_way_ends_on_the_connection_where_it_began(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """The connection by the old files is closed by a call after its last one ended."""
    server, client = (issue(authority, tmp_path / name) for name in ("server", "client"))
    opened: list[grpc.Channel] = []
    with serving(server) as address:

        def connect(found: TlsBytes) -> grpc.Channel:
            credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
            opened.append(grpc.secure_channel(address, credentials))
            return opened[-1]

        with RenewableChannel(RenewableTls(client), connect) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            issue(authority, tmp_path / "client")
            check(channel)
            assert [is_closed(one) for one in opened] == [False, False]
            assert watch.is_active()
            ended: SimpleQueue[None] = SimpleQueue()
            watch.add_callback(lambda: ended.put(None))
            watch.cancel()
            ended.get(timeout=20)
            check(channel)
            assert [is_closed(one) for one in opened] == [True, False]
        assert [is_closed(one) for one in opened] == [True, True]


def is_closed(channel: grpc.Channel) -> bool:
    try:
        check(channel)
    except ValueError:
        return True
    return False


def test_half_a_renewal_keeps_what_was_read_and_is_logged_once(
    authority: trustme.CA, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, client = (issue(authority, tmp_path / name) for name in ("server", "client"))
    new = issue(authority, tmp_path / "new")
    with logged(), serving(server) as address:
        server.cert.write_bytes(new.cert.read_bytes())
        assert reaches(address, client)
        assert reaches(address, client)
        server.key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nhalf of it")
        assert reaches(address, client)
        server.key.unlink()
        assert reaches(address, client)
        server.key.write_bytes(new.key.read_bytes())
        assert reaches(address, client)
        assert reaches(address, client)
    found = events(capsys)
    assert [event["event"] for event in found] == [*["tls_renewal_refused"] * 3, "tls_renewed"]
    assert [event["error"].removeprefix(f"{server.key}: ") for event in found[:3]] == [
        f"is not the key of {server.cert}",
        "is not a private key without a password",
        "cannot be read: No such file or directory",
    ]
    assert {event["error_code"] for event in found[:3]} == {"config_invalid"}


@pytest.mark.parametrize(
    ("before", "after", "is_taken"),
    [
        ("controller/main", "controller/other", True),
        ("controller/main", "operator/alice", False),
        ("controller/main", "", False),
        (f"datanode/{UUID(int=1)}", f"datanode/{UUID(int=1)}", True),
        (f"datanode/{UUID(int=1)}", f"datanode/{UUID(int=2)}", False),
        ("", "controller/main", True),
    ],
)
def test_a_renewal_does_not_make_a_process_another(
    before: str, after: str, is_taken: bool, authority: trustme.CA, tmp_path: Path
) -> None:
    tls = RenewableTls(issue(authority, tmp_path / "own", identity=before))
    known = tls.current()
    issue(authority, tmp_path / "own", identity=after)
    assert (tls.current() is not known) is is_taken
    # What was refused does not stand in the way of the right one.
    issue(authority, tmp_path / "own", identity=before or after)
    assert tls.current() is not known


# Long after the files were written, so that their times tell whether they changed.
LATER_S = 1000.0


def test_a_renewal_that_is_not_valid_yet_is_taken_when_it_is(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """No file changes then."""
    tls = issue(authority, tmp_path / "process")
    now_s = tls.cert.stat().st_mtime + LATER_S
    files = RenewableTls(tls, lambda: now_s)
    first = files.current()
    begins = datetime.fromtimestamp(now_s + 60, UTC)
    issue(authority, tmp_path / "process", not_before=begins)
    assert files.current() is first
    now_s += 61
    assert files.current().cert == tls.cert.read_bytes() != first.cert


def test_files_are_read_again_when_their_stamps_change(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """A change in the moment of the last look may leave the stamps as they were."""
    tls = issue(authority, tmp_path / "process")
    changed_s = now_s = tls.cert.stat().st_mtime + LATER_S
    stamps = (FileStamp(inode=1, length_bytes=1, changed_ns=round(changed_s * 1e9)),)
    files = RenewableTls(tls, lambda: now_s, lambda _: stamps)
    first = files.current()
    issue(authority, tmp_path / "process")
    now_s += LATER_S
    second = files.current()
    assert second.cert == tls.cert.read_bytes() != first.cert
    # From now on each change must show: not every call reads three files.
    issue(authority, tmp_path / "process")
    assert files.current() is second
    stamps = (replace(stamps[0], inode=2),)
    assert files.current().cert == tls.cert.read_bytes() != second.cert


def test_files_that_do_not_fit_are_refused_at_the_start(
    authority: trustme.CA, tmp_path: Path
) -> None:
    tls, other = (issue(authority, tmp_path / name) for name in ("process", "other"))
    mixed = replace(tls, key=other.key)
    for use in (RenewableTls, lambda files: open_channel("127.0.0.1:1", tls=files)):
        with pytest.raises(ConfigError, match=r"key\.pem: is not the key of "):
            use(mixed)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Tls]:
    authorities = trustme.CA(), trustme.CA()
    folder = tmp_path_factory.mktemp("identities")
    return [
        issue(authorities[number % 2], folder / str(number), not_after=OLD if number == 3 else None)
        for number in range(4)
    ]


NAMES = ("cert", "key", "ca")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=8))
def test_what_is_in_use_always_fits_and_is_the_latest_that_did(
    identities: list[Tls],
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[str, int]],
) -> None:
    """One file after the other is replaced by that of any identity, of which the last
    has expired.
    """
    folder = tmp_path_factory.mktemp("renewed")
    tls = Tls(*(folder / name for name in NAMES))
    held = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        getattr(tls, name).write_bytes(getattr(identities[0], name).read_bytes())
    files = RenewableTls(tls)
    expected = dict(held)
    for name, identity in writes:
        getattr(tls, name).write_bytes(getattr(identities[identity], name).read_bytes())
        held[name] = identity
        if held["cert"] == held["key"] != 3:
            expected = dict(held)
        current = files.current()
        for part in NAMES:
            assert getattr(current, part) == getattr(identities[expected[part]], part).read_bytes()
    assert files.current() is files.current()
