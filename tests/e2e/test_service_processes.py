"""The long-running processes as systemd starts them: by their example configurations,
ready when they serve, watched while they work.
"""

import json
import re
import signal
import socket
import threading
from pathlib import Path

import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ozone.volume import read_version
from replicator.stores.local import LocalBucket
from runtime.disk import Disk
from runtime.rpc import open_channel
from tests.support.identities import certificate, tls_in
from tests.support.long_running import LONG_RUNNING, example_of, unit_of
from tests.support.notify_socket import NotifySocket
from tests.support.processes import TreefoldProcess
from tests.support.volumes import unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
CALL_S = 30
# It asks masters for work, and serves nothing.
NOBODY_CALLS = "syncer run"
# Kept at half of it, which is as long as a test waits for it.
WATCHDOG_S = 1.0


def settings(command: str, folder: Path, pems: Path) -> Path:
    """The example with our paths, on loopback."""
    text = example_of(command).read_text()
    identity = f"{LONG_RUNNING[command].role}/main"
    if "/data/hdds" in text:
        volume = unpack("healthy", folder / "volumes") / "dn1" / "volume1"
        identity = f"datanode/{read_version(volume, Disk()).datanode_id}"
        text = text.replace("/data/hdds", str(volume))
    with LocalBucket(folder / "bucket", Disk(), create=True):
        pass
    bucket = f'bucket = "local:{folder / "bucket"}"'
    text = re.sub(r'^bucket = "s3:.*"$', bucket, text, flags=re.MULTILINE)
    text = text.replace("/var/lib/treefold", str(folder / "lib"))
    for name, ending in (("cert", "pem"), ("key", "key"), ("ca", "pem")):
        text = re.sub(
            rf'^{name} = "/etc/treefold/[\w-]+\.{ending}"$',
            f'{name} = "{pems / name}.pem"',
            text,
            flags=re.MULTILINE,
        )
    text = text.replace("#common_names = {}", f'common_names = {{ both = "{identity}" }}')
    # Whatever is not ours to listen on; the controller is nobody.
    text = re.sub(r'"[\d.]+:\d+"', '"127.0.0.1:0"', text)
    text = text.replace('controller = "127.0.0.1:0"', 'controller = "127.0.0.1:1"')
    assert "/etc/treefold" not in "".join(
        line for line in text.splitlines() if not line.startswith("#")
    )
    path = folder / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_process_runs_by_its_example_as_a_service(command: str, tmp_path: Path) -> None:
    """It says that it is ready when it answers, keeps the watchdog, and says that it
    stops.
    """
    pems = certificate(trustme.CA(), tmp_path / "pems", "both")
    config = settings(command, tmp_path, pems)
    words = [*command.split(), "--config", str(config), "--log-format", "json"]
    with (
        NotifySocket() as systemd,
        TreefoldProcess(
            tmp_path / "run", *words, environment=systemd.environment(watchdog_s=WATCHDOG_S)
        ) as process,
    ):
        ready, status = systemd.receive().split("\n")
        assert ready == "READY=1"
        if command != NOBODY_CALLS:
            address = status.rsplit(" ", 1)[1]
            # At once, and once: who is told so does not ask twice.
            with open_channel(address, tls=tls_in(pems)) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert systemd.receive() == "WATCHDOG=1"
        if "ExecReload" in unit_of(command).read_text():
            _change_a_limit(config)
            process.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "limits_changed" in process.stderr, "the limits to change")
        assert process.stop(signal.SIGTERM) == 0
        rest = systemd.drop_waiting()
        assert rest[-1] == "STOPPING=1\nSTATUS=stopping"
        assert set(rest[:-1]) <= {"WATCHDOG=1"}
    assert "Traceback" not in process.stderr
    lines = [json.loads(line) for line in process.stderr.splitlines() if line.startswith("{")]
    started = [line for line in lines if line["event"] == "server_started"]
    assert [line.get("roles_enforced") for line in started] == [
        None if command == NOBODY_CALLS else True
    ]


def _change_a_limit(config: Path) -> None:
    """Operator rule R9: as an operator does before `systemctl reload`."""
    text = config.read_text()
    limit = re.compile(r"^#(reconciliations_max|orders_per_datanode) = 2$", re.MULTILINE)
    changed = limit.sub(r"\1 = 3", text)
    assert changed != text
    config.write_text(changed)


class SilentController:
    """A port that takes connections and never answers, until it is closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._taken.append(self._listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        """Refuse connections, and end those that there are; once more is nothing."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._taken:
            connection.close()


def test_a_loop_that_stands_still_costs_the_watchdog_and_regains_it(tmp_path: Path) -> None:
    """The agent's heartbeat waits for a controller that hangs, here for longer than the
    watchdog allows. The main thread and all others run on.
    """
    volume = unpack("healthy", tmp_path / "copy") / "dn1" / "volume1"
    controller = SilentController()
    words = ["agent", "run", "--volume", str(volume), "--state-folder", str(tmp_path / "state")]
    words += ["--listen", "127.0.0.1:0", "--controller", controller.address]
    try:
        with (
            NotifySocket() as systemd,
            TreefoldProcess(
                tmp_path / "run",
                *words,
                "--log-format",
                "json",
                environment=systemd.environment(watchdog_s=0.5),
            ) as process,
        ):
            assert systemd.receive().startswith("READY=1")
            lost = systemd.receive_until("STATUS=")
            assert lost.startswith("STATUS=thread heartbeat has made no progress for ")
            assert "thread_lost" in process.stderr
            controller.close()
            # Nothing in between: a watchdog kept meanwhile would have come first.
            assert systemd.receive().startswith("STATUS=agent of datanode ")
            assert systemd.receive() == "WATCHDOG=1"
            assert process.stop(signal.SIGTERM) == 0
    finally:
        controller.close()


def test_the_watchdogs_signal_shows_where_every_thread_is(tmp_path: Path) -> None:
    with TreefoldProcess(
        tmp_path / "run", "scm", "run", "--listen", "127.0.0.1:0", "--state-folder", str(tmp_path)
    ) as process:
        process.address()
        assert process.stop(signal.SIGABRT) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in process.stderr
        assert "run_until_stopped" in process.stderr
        assert "ticker.py" in process.stderr


def test_a_process_that_fails_to_start_is_never_ready(tmp_path: Path) -> None:
    with (
        NotifySocket() as systemd,
        TreefoldProcess(
            tmp_path / "run",
            "scm",
            "run",
            "--listen",
            "127.0.0.1:0",
            "--state-folder",
            "/proc/nowhere",
            environment=systemd.environment(watchdog_s=WATCHDOG_S),
        ) as process,
    ):
        assert process.ended() == 1
        assert systemd.drop_waiting() == []
        assert "Traceback" not in process.stderr
