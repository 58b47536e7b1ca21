"""An agent as a whole, in this process: what it refuses, and what it outlives."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from chunktable.packed_trees import TREE_SCHEMA
from dnagent.agent import Agent
from dnagent.config import AgentConfig
from dnagent.imports import import_trees
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.datanode import SERVICE, Request, Response
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from ozone.volume import Hold
from protos.ozone_datanode_pb2 import GetContainerChecksumInfoRequestProto, Result, Type
from repair.peers import AgentPeer, DatanodePeer
from runtime.disk import Disk
from runtime.errors import BusyError
from runtime.rate_limit import SystemClock
from runtime.rpc import StreamCall, open_channel
from tests.support.handmade import STORAGE, VolumeMaker, whole
from tests.support.volumes import (
    VERSION,
    container_folder,
    flip,
    new_volume,
    owned,
    state_of,
    write_block,
)
from tests.support.waiting import wait_until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with VolumeMaker(tmp_path / "volume") as volume:
        volume.container(1)
        volume.block(1, 1, whole(5000))
    return tmp_path / "volume"


def config_of(root: Path, state: Path, hold: Hold = Hold.READ_ONLY, **more: object) -> AgentConfig:
    volumes = [{"path": str(root), "hold": hold.value}]
    settings = {"volumes": volumes, "state_folder": str(state), "listen": "127.0.0.1:0", **more}
    return AgentConfig.model_validate(settings)


def _wait_for_upkeep(running: Agent, root: Path) -> None:
    """Wait for a whole look at the volume that began after this was called."""

    def has(count: int) -> bool:
        return running.metrics.value("dnagent_containers", volume=str(root)) == count

    wait_until(lambda: has(1), "the first upkeep")
    shutil.rmtree(container_folder(root, 1))
    wait_until(lambda: has(0), "upkeep to miss the container")


def test_upkeep_outlives_files_that_do_not_belong_there(root: Path, tmp_path: Path) -> None:
    running = Agent(config_of(root, tmp_path / "state"), refresh_s=0.05)
    running.start()
    try:
        stray = tmp_path / "state" / STORAGE / "undo" / "100" / "NOTES.txt"
        stray.parent.mkdir(parents=True)
        stray.write_text("kept for the ticket")
        _wait_for_upkeep(running, root)
        assert stray.exists()
    finally:
        running.stop()


class SetClock(SystemClock):
    """A clock that somebody sets."""

    set_by_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.set_by_ms


def test_undo_copies_outlive_a_clock_that_is_set(root: Path, tmp_path: Path) -> None:
    clock = SetClock()
    running = Agent(config_of(root, tmp_path / "state"), refresh_s=0.05, clock=clock)
    running.start()
    try:
        (managed,) = running._store.volumes
        managed.undo.keep(ContainerId(1), "job", BlockId(1), 0, b"before")
        clock.set_by_ms = 3650 * 86_400_000
        _wait_for_upkeep(running, root)
        assert managed.undo.jobs(ContainerId(1)) == ["job"]
    finally:
        running.stop()


def test_an_agent_does_not_know_that_a_cluster_is_secured_until_a_token_shows_it(
    root: Path, tmp_path: Path
) -> None:
    """Nothing in a volume does. A token is refused, and from then on it is a fault."""
    running = Agent(config_of(root, tmp_path / "state"))
    with capture_logs() as lines:
        running.start()
    assert "cluster_security_unknown" in [line["event"] for line in lines]
    try:
        assert running.status().fault == ""
        with capture_logs() as lines, open_channel(running.address) as channel:
            call: StreamCall = channel.stream_stream(f"/{SERVICE}/send", None, Response.FromString)
            info = GetContainerChecksumInfoRequestProto(containerID=1)
            request = Request(
                cmdType=Type.GetContainerChecksumInfo,
                containerID=1,
                datanodeUuid="",
                encodedToken="CgNvem9uZRIDaW5k",
                getContainerChecksumInfo=info,
            )
            raws = [request.SerializeToString()] * 2
            replies = list(call(iter(raws), timeout=20))
        assert [reply.result for reply in replies] == [Result.BLOCK_TOKEN_VERIFICATION_FAILED] * 2
        assert [line["event"] for line in lines] == ["cluster_secured"]
        assert running.status().fault == "the Ozone cluster is secured: a datanode sent a token"
    finally:
        running.stop()


@pytest.mark.parametrize("kind", ["agent", "datanode"])
def test_greedy_callers_get_the_rate_of_an_agent_together(kind: str, tmp_path: Path) -> None:
    with VolumeMaker(tmp_path / "volume") as volume:
        volume.container(1)
        volume.block(1, 1, whole(500_000))
    serve = {"bytes_per_second": "1MB/s"}
    running = Agent(config_of(tmp_path / "volume", tmp_path / "state", serve=serve))
    running.start()

    def read(_: int) -> int:
        channel, name = open_channel(running.address), running.datanode_id
        found = (
            AgentPeer(name, channel, running.address)
            if kind == "agent"
            else DatanodePeer(name, DatanodeClient(channel, running.address))
        )
        with closing(found):
            chunk = found.records(ContainerId(1), [BlockId(1)])[BlockId(1)].chunks[0]
            wanted = [ByteRange(chunk.offset, chunk.length_bytes)]
            pieces = found.read(ContainerId(1), BlockId(1), chunk, wanted)
            return sum(len(piece.data) for piece in pieces)

    try:
        started_s = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(read, range(4))) == [500_000] * 4
        # At a megabyte a second, of which nothing is lent.
        assert time.monotonic() - started_s >= 1.9
    finally:
        running.stop()


def test_upkeep_outlives_an_error_that_nobody_foresaw(root: Path, tmp_path: Path) -> None:
    running = Agent(config_of(root, tmp_path / "state"), refresh_s=0.05)
    running.start()
    try:
        (held,) = running._store.volumes
        undo, held.undo = held.undo, None
        wait_until(
            lambda: running.metrics.value("dnagent_thread_failures_total", thread="upkeep") > 1,
            "two failures",
        )
        assert "internal" in running.status().volumes[0].last_error
        held.undo = undo
        wait_until(lambda: not running.status().volumes[0].last_error, "upkeep to recover")
    finally:
        running.stop()


@pytest.mark.parametrize("hold", list(Hold))
def test_a_second_agent_on_one_state_folder_is_refused_by_name(
    root: Path, tmp_path: Path, hold: Hold
) -> None:
    config = config_of(root, tmp_path / "state", hold)
    first = Agent(config)
    first.start()
    try:
        with pytest.raises(BusyError, match=rf"treefold agent run \(process {os.getpid()}\)"):
            Agent(config).start()
        with pytest.raises(BusyError, match="treefold agent run") as refusal:
            import_trees(config, _no_trees(tmp_path), Disk())
        assert refusal.value.exit_status == 8
    finally:
        first.stop()
    # Released with the agent, and by an agent that does not start.
    import_trees(config, _no_trees(tmp_path), Disk())
    again = Agent(config)
    again.start()
    again.stop()


def _no_trees(folder: Path) -> Path:
    trees = folder / "trees"
    trees.mkdir(exist_ok=True)
    pq.write_table(TREE_SCHEMA.empty_table(), trees / "part-0.parquet")
    return trees


def test_what_a_killed_process_left_half_written_is_removed(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state" / STORAGE / "tombstones"
    folder.mkdir(parents=True)
    left, kept = folder / f"1.tree.{'0f' * 8}.tmp", folder / "notes.tmp"
    for path in (left, kept):
        path.write_text("half")
    running = Agent(config_of(root, tmp_path / "state"))
    running.start()
    running.stop()
    assert not left.exists()
    assert kept.exists()


@pytest.mark.parametrize("is_enabled", [False, True])
def test_without_repair_an_owner_changes_nothing_in_its_volume(
    root: Path, tmp_path: Path, *, is_enabled: bool
) -> None:
    flip(container_folder(root, 1) / "chunks" / "1.block", 100)
    before = state_of(root)
    repair = {"enabled": is_enabled}
    running = Agent(config_of(root, tmp_path / "state", Hold.OWNER, repair=repair))
    running.start()
    try:
        report = running.scan(ContainerId(1), lambda: False)
        assert [finding.type for finding in report.findings] == ["CORRUPT_CHUNK"]
        assert (report.state is ReplicaState.UNHEALTHY) == is_enabled
        (volume,) = running.status().volumes
        assert volume.hold == ("owner" if is_enabled else "read-only")
    finally:
        running.stop()
    assert (state_of(root) == before) == (not is_enabled)


def test_a_container_on_two_volumes_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = []
    for number in (1, 2):
        version = replace(VERSION, storage_id=f"DS-{number}")
        roots.append(new_volume(tmp_path / f"v{number}", version=version))
        with owned(roots[-1], tmp_path / "writer") as made:
            made.writer.create_container(ContainerId(1))
            write_block(made.writer, ContainerId(1), BlockId(1), 3000, bcs_id=number)
            made.writer.close(ContainerId(1))
    volumes = [{"path": str(root)} for root in roots]
    config = config_of(roots[0], tmp_path / "state", volumes=volumes)
    running = Agent(config, refresh_s=0.05)
    running.start()
    try:
        wait_until(lambda: running.metrics.value("dnagent_containers_duplicated") == 1, "the look")
    finally:
        running.stop()
    lines = [line for line in capsys.readouterr().err.splitlines() if "duplicated" in line]
    assert len(lines) == 1
    assert f"volume={roots[1]}" in lines[0]
