"""A real controller and real agents: a repair is paused in the middle, goes on without
its limits, and heals.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from dnagent.agent import Agent
from dnagent.config import AgentConfig
from merkle.tree import BlockId, ContainerId
from ozone.volume import Hold, Version
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.volumes import content, new_volume, owned, write_block
from tests.support.waiting import wait_until

ONE, BLOCKS, LENGTH = ContainerId(1), range(1, 9), 64 << 10


@dataclass
class Cluster:
    """Two agents, of which the first has lost what is in its blocks."""

    address: str
    damaged: list[Path]
    agents: list[tuple[Agent, AgentConfig]]

    def ask(self, *words: str) -> dict[str, object]:
        done = CliRunner().invoke(treefold, [*words, "--json", "--controller", self.address])
        data = json.loads(done.stdout)["data"]
        assert isinstance(data, dict)
        return data

    def lift_limits(self) -> None:
        """As SIGHUP does."""
        for running, slow in self.agents:
            repair = slow.repair.model_copy(update={"bytes_per_second": 0})
            running.reload(slow.model_copy(update={"repair": repair}))

    def healed(self) -> int:
        """How many blocks are as they were written."""
        return sum(
            path.read_bytes() == content(number, LENGTH)
            for number, path in zip(BLOCKS, self.damaged, strict=True)
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        config = ControllerConfig(
            listen="127.0.0.1:0", state_folder=tmp_path / "scm", required_replicas=2
        )
        server = ControllerServer(config)
        stack.callback(server.stop)
        damaged, agents = list[Path](), list[tuple[Agent, AgentConfig]]()
        for number in (1, 2):
            folder = tmp_path / f"dn{number}"
            uuid = f"00000000-0000-4000-8000-00000000000{number}"
            root = new_volume(folder / "volume", version=Version(f"DS-{number}", "CID-1", uuid))
            with owned(root, folder / "writer") as volume:
                volume.writer.create_container(ONE)
                for block in BLOCKS:
                    write_block(volume.writer, ONE, block, LENGTH, bcs_id=block)
                volume.writer.close(ONE)
                paths = [volume.store.open(ONE).block_path(BlockId(block)) for block in BLOCKS]
            if number == 1:
                damaged = paths
                for path in damaged:
                    path.write_bytes(bytes(LENGTH))
            slow = AgentConfig(
                volumes=[{"path": root, "hold": Hold.OWNER}],
                state_folder=folder / "state",
                listen="127.0.0.1:0",
                controller=server.address,
                heartbeat_interval_s="50ms",
                scan={"bytes_per_second": 0},
                repair={"enabled": True, "bytes_per_second": "64KiB"},
            )
            running = Agent(slow)
            running.start()
            stack.callback(running.stop)
            agents.append((running, slow))
        yield Cluster(server.address, damaged, agents)


def test_a_repair_is_limited_paused_and_goes_on_to_heal(cluster: Cluster) -> None:
    """Operator rules R3, R9."""

    def until(check: Callable[[], bool], what: str) -> None:
        wait_until(check, what)

    def state() -> object:
        return cluster.ask("job", "show", job_id)["state"]

    def is_diverged() -> bool:
        # Both were scanned, and one of them has lost its data.
        shown = cluster.ask("container", "list", "--diverged")["containers"]
        return bool(shown)

    until(is_diverged, "the controller to see the damage")
    started = cluster.ask("reconcile", "1", "--yes")["jobs"]
    assert isinstance(started, list)
    job_id = started[0]["jobID"]
    cluster.ask("job", "throttle", job_id, "--bytes-per-second", "32KiB")
    # Whole, it takes eight seconds and more.
    until(lambda: cluster.healed() > 0, "a block to heal")
    cluster.ask("job", "pause", job_id, "--reason", "peak hours")
    until(lambda: state() == "PAUSED", "the agents to stop")
    before = cluster.healed()
    assert 0 < before < len(BLOCKS)
    cluster.lift_limits()
    cluster.ask("job", "throttle", job_id, "--bytes-per-second", "0")
    cluster.ask("job", "resume", job_id)
    until(lambda: state() == "DONE", "the job to end")
    assert cluster.healed() == len(BLOCKS)
    datanodes = cluster.ask("job", "show", job_id)["datanodes"]
    assert isinstance(datanodes, list)
    # What was written before the pause was not written once more.
    assert sum(one["chunksRepaired"] for one in datanodes) == len(BLOCKS)
