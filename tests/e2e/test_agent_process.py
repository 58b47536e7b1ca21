"""An agent as a real process on volumes that real datanodes wrote."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from merkle.tree import root_hex
from protos.agent_pb2 import GetContainerHashesRequest, GetStatusRequest, ScanContainerRequest
from protos.agent_pb2_grpc import AgentStub
from runtime.rpc import open_channel
from tests.support.processes import TreefoldProcess
from tests.support.volumes import OZONE, state_of, unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
CALL_S = 30
CONTAINERS = range(1, 7)


def expected(moment: str, node: str) -> dict[int, tuple[str, str]]:
    """State and root of each container at that moment, as the cluster's own datanode
    had them.
    """
    rows = json.loads((OZONE / "expected.json").read_text())[moment]
    return {
        row["containerID"]: (row["state"], row["treeFileRoot"])
        for row in rows
        if row["datanode"] == node
    }


def settings(
    folder: Path, volume: Path, hold: str, *, bytes_per_second: int = 0, mapped: bool = False
) -> Path:
    path = folder / "agent.toml"
    path.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "127.0.0.1:0"\n'
        f'[[volumes]]\npath = "{volume}"\nhold = "{hold}"\n'
        f"[scan]\nenabled = false\nbytes_per_second = {bytes_per_second}\n"
        f"on_demand_bytes_per_second = {bytes_per_second}\n"
        f"mapped = {str(mapped).lower()}\n"
        # Without repair an owner's volume is opened read-only.
        f"[repair]\nenabled = {str(hold == 'owner').lower()}\n"
    )
    return path


@contextmanager
def agent(
    folder: Path, volume: Path, hold: str, *, bytes_per_second: int = 0, mapped: bool = False
) -> Iterator[tuple[TreefoldProcess, AgentStub]]:
    folder.mkdir(exist_ok=True)
    config = settings(folder, volume, hold, bytes_per_second=bytes_per_second, mapped=mapped)
    with TreefoldProcess(
        folder / "run", "agent", "run", "--config", str(config), "--log-format", "json"
    ) as process:
        channel = open_channel(process.address())
        try:
            yield process, AgentStub(channel)
        finally:
            channel.close()


def scan_all(stub: AgentStub) -> dict[int, tuple[str, str]]:
    found = {}
    for container_id in CONTAINERS:
        reply = stub.ScanContainer(ScanContainerRequest(container_id=container_id), timeout=CALL_S)
        found[container_id] = reply.state, root_hex(reply.data_checksum)
    return found


@pytest.mark.parametrize("node", ["dn1", "dn2", "dn3"])
def test_an_owner_finds_what_the_datanode_found(tmp_path: Path, node: str) -> None:
    """The damaged volumes, scanned by us, end in the states and roots that Ozone's own
    scanner gave them.
    """
    volume = unpack("damaged", tmp_path / "copy") / node / "volume1"
    with agent(tmp_path / "agent", volume, "owner") as (process, stub):
        assert scan_all(stub) == expected("detected", node)
        assert process.stop(signal.SIGTERM) == 0
    # What was found lies on disk: a new process knows it without a scan.
    with agent(tmp_path / "agent", volume, "owner") as (process, stub):
        status = stub.GetStatus(GetStatusRequest(), timeout=CALL_S)
        assert (status.volumes[0].containers, status.volumes[0].bytes_scanned) == (6, 0)
        assert process.stop(signal.SIGINT) == 0
    assert process.stdout == ""
    for line in process.stderr.splitlines():
        assert line.startswith("agent of datanode") or json.loads(line)["event"]


def test_an_agent_that_maps_files_finds_the_same_and_survives_its_workers(tmp_path: Path) -> None:
    volume = unpack("damaged", tmp_path / "copy") / "dn1" / "volume1"
    with agent(tmp_path / "agent", volume, "owner", mapped=True) as (process, stub):
        assert scan_all(stub) == expected("detected", "dn1")
        workers = psutil.Process(process.process.pid).children()
        assert ["ozone.mapped" in " ".join(worker.cmdline()) for worker in workers] == [True]
        workers[0].kill()
        assert scan_all(stub) == expected("detected", "dn1")
        workers = psutil.Process(process.process.pid).children()
        assert process.stop(signal.SIGTERM) == 0
        assert not any(worker.is_running() for worker in workers)
    assert "Traceback" not in process.stderr


def test_a_read_only_agent_changes_no_byte_under_the_volume(tmp_path: Path) -> None:
    volume = unpack("damaged", tmp_path / "copy") / "dn1" / "volume1"
    before = state_of(volume)
    with agent(tmp_path / "agent", volume, "read-only") as (process, stub):
        scanned = scan_all(stub)
        status = stub.GetStatus(GetStatusRequest(), timeout=CALL_S)
        assert process.stop(signal.SIGTERM) == 0
    assert state_of(volume) == before
    detected = expected("detected", "dn1")
    assert {i: root for i, (_, root) in scanned.items()} == {
        i: root for i, (_, root) in detected.items()
    }
    # The state is the datanode's to change.
    assert {state for state, _ in scanned.values()} == {"CLOSED"}
    assert status.volumes[0].hold == "read-only"
    assert status.volumes[0].containers_scanned == 6
    assert not status.repair_enabled


def test_a_lost_tree_is_built_without_being_asked_for(tmp_path: Path) -> None:
    """dn2 lost the tree file of container 6; until it has one, nobody can tell whether
    it differs.
    """
    volume = unpack("damaged", tmp_path / "copy") / "dn2" / "volume1"
    [folder] = volume.glob("hdds/CID-*/current/containerDir0/6/metadata")
    assert not (folder / "6.tree").exists()
    with agent(tmp_path / "agent", volume, "owner") as (_, stub):
        wait_until((folder / "6.tree").exists, "the tree to be built")
        reply = stub.GetContainerHashes(GetContainerHashesRequest(container_id=6), timeout=CALL_S)
        assert reply.container_checksum_info == (folder / "6.tree").read_bytes()


def test_a_volume_has_one_owner(tmp_path: Path) -> None:
    volume = unpack("damaged", tmp_path / "copy") / "dn1" / "volume1"
    with agent(tmp_path / "first", volume, "owner") as (first, _):
        (tmp_path / "second").mkdir()
        config = settings(tmp_path / "second", volume, "owner")
        with TreefoldProcess(
            tmp_path / "second", "agent", "run", "--config", str(config)
        ) as second:
            assert second.ended() == 8
            assert "volume_locked" in second.stderr
            assert "Traceback" not in second.stderr
        assert first.process.poll() is None


def test_a_stop_cuts_a_slow_scan_short_and_marks_nothing(tmp_path: Path) -> None:
    """S18"""
    volume = unpack("damaged", tmp_path / "copy") / "dn1" / "volume1"
    with agent(tmp_path / "agent", volume, "owner", bytes_per_second=1024) as (process, stub):
        call = stub.ScanContainer.future(ScanContainerRequest(container_id=1), timeout=CALL_S)

        def has_begun() -> bool:
            return bool(
                stub.GetStatus(GetStatusRequest(), timeout=CALL_S).volumes[0].bytes_scanned > 0
            )

        wait_until(has_begun, "the scan to begin")
        before = state_of(volume)
        assert process.stop(signal.SIGTERM) == 0
        assert call.exception(timeout=CALL_S) is not None
    # RocksDB tidies its own files when it is closed; the containers are as they were.
    kept = {name: found for name, found in state_of(volume).items() if "/current/" in name}
    assert kept == {name: found for name, found in before.items() if "/current/" in name}


def test_a_bad_volume_does_not_stop_the_others(tmp_path: Path) -> None:
    volume = unpack("damaged", tmp_path / "copy") / "dn1" / "volume1"
    (tmp_path / "empty").mkdir()
    arguments = [
        "--volume",
        str(tmp_path / "empty"),
        "--volume",
        str(volume),
        "--state-folder",
        str(tmp_path / "state"),
    ]
    with TreefoldProcess(
        tmp_path / "run", "agent", "run", *arguments, "--listen", "127.0.0.1:0"
    ) as process:
        channel = open_channel(process.address())
        status = AgentStub(channel).GetStatus(GetStatusRequest(), timeout=CALL_S)
        channel.close()
    good, bad = status.volumes
    assert (good.containers, good.last_error) == (6, "")
    assert bad.path == os.fspath(tmp_path / "empty")
    assert bad.last_error.startswith("volume_invalid: ")


def test_a_database_that_cannot_be_written_to_costs_its_own_volume(tmp_path: Path) -> None:
    """A folder in the way refuses what a read-only file system does: the binding's
    first write, and the removal.
    """
    bad, good = (unpack("damaged", tmp_path / name) / "dn1" / "volume1" for name in ("bad", "good"))
    (next(bad.glob("hdds/CID-*/DS-*/container.db")) / "rocksdict-config.json").mkdir()
    config = tmp_path / "agent.toml"
    config.write_text("[repair]\nenabled = true\n")
    arguments = ["--config", str(config), "--volume", str(bad), "--volume", str(good)]
    arguments += ["--hold", "owner", "--state-folder", str(tmp_path / "s")]
    with TreefoldProcess(
        tmp_path / "run", "agent", "run", *arguments, "--listen", "127.0.0.1:0"
    ) as process:
        channel = open_channel(process.address())
        status = AgentStub(channel).GetStatus(GetStatusRequest(), timeout=CALL_S)
        channel.close()
        assert process.stop(signal.SIGTERM) == 0
    assert [(volume.path, volume.containers) for volume in status.volumes] == [
        (str(good), 6),
        (str(bad), 0),
    ]
    assert status.volumes[1].last_error.startswith("database_failed: cannot open the database ")
    assert "volume_failed" in process.stderr
    assert "Traceback" not in process.stderr


def test_settings_that_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text('state_folder = "/s"\nlitsen = "127.0.0.1:0"\n[[volumes]]\npath = "/v"\n')
    with TreefoldProcess(tmp_path / "run", "agent", "run", "--config", str(config)) as process:
        assert process.ended() == 2
        assert "litsen: unknown key; did you mean 'listen'?" in process.stderr
        assert "Traceback" not in process.stderr
