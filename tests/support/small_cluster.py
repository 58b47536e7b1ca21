"""Three agents with real volumes and a controller, in one process, for commands."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from click.testing import CliRunner, Result

from admin.cli import treefold
from dnagent.agent import Agent
from dnagent.config import AgentConfig
from merkle.tree import BlockId, ContainerId
from scm.client import ControllerClient
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.audit_files import audit_lines
from tests.support.volumes import (
    VERSION,
    container_folder,
    content,
    flip,
    new_volume,
    owned,
    write_block,
)
from tests.support.waiting import wait_until

NAMES = ("dn1", "dn2", "dn3")
UUIDS = {name: f"{n}0000000-0000-4000-8000-0000000000aa" for n, name in enumerate(NAMES, 1)}
BLOCK_BYTES = 5000


@dataclass
class SmallCluster:
    """Running agents and their controller; `folder` has a volume and a state folder of
    each agent.
    """

    folder: Path
    server: ControllerServer
    client: ControllerClient
    agents: dict[str, Agent]

    def run(self, *arguments: str) -> Result:
        """A command in this process."""
        words = [*arguments, "--controller", self.server.address]
        return CliRunner().invoke(treefold, words)

    def json(self, *arguments: str) -> dict[str, object]:
        """The data of a command's document."""
        result = self.run(*arguments, "--json")
        document: dict[str, object] = json.loads(result.stdout)
        data = document["data"] or {}
        assert isinstance(data, dict), result.output
        more = {name: document[name] for name in ("errors", "warnings")}
        return data | {"exit": result.exit_code} | more

    def block_file(self, name: str, container_id: int, block_id: int) -> Path:
        """The file of a block in an agent's volume."""
        folder = container_folder(self.folder / name, container_id)
        return folder / "chunks" / f"{block_id}.block"

    def damage(self, name: str, container_id: int, block_id: int, *places: int) -> None:
        """Flip bytes, and have the agent find it and the controller know it."""
        for at in places:
            flip(self.block_file(name, container_id, block_id), at)
        self.agents[name].scan(ContainerId(container_id), lambda: False)
        self.settle(container_id)

    def settle(self, container_id: int) -> None:
        """Wait until the controller knows every replica as it is."""

        def knows() -> bool:
            view = self.client.get_containers([container_id]).get(container_id)
            told = {
                one.datanode.peer: one.replica.data_checksum
                for one in (view.replicas if view else ())
            }
            return told == {UUIDS[name]: self.root(name, container_id) for name in NAMES}

        wait_until(knows, "the controller to know all roots")

    def root(self, name: str, container_id: int) -> int | None:
        """The root that an agent reports."""
        volume = self.agents[name]._store.volumes[0]
        return volume.replica(ContainerId(container_id)).data_checksum

    def audit(self, name: str) -> list[dict[str, object]]:
        """The lines of an agent's audit file."""
        return audit_lines(self.folder / f"{name}-state" / "audit.jsonl")


@contextmanager
def small_cluster(folder: Path, container_ids: range) -> Iterator[SmallCluster]:
    """Three equal replicas of each container, with the blocks of its ID and of 100
    more.
    """
    first = new_volume(folder / NAMES[0], version=replace(VERSION, datanode_id=UUIDS[NAMES[0]]))
    with owned(first, folder / "writer") as owner:
        for container_id in container_ids:
            owner.writer.create_container(ContainerId(container_id))
            for bcs_id, block in enumerate((container_id, container_id + 100), start=1):
                write_block(owner.writer, container_id, block, BLOCK_BYTES, bcs_id=bcs_id)
            owner.writer.close(ContainerId(container_id))
    for name in NAMES[1:]:
        version = shutil.copytree(first, folder / name) / "hdds" / "VERSION"
        version.write_text(version.read_text().replace(UUIDS[NAMES[0]], UUIDS[name]))
    with ExitStack() as stack:
        server = ControllerServer(
            ControllerConfig(listen="127.0.0.1:0", state_folder=folder / "controller")
        )
        stack.callback(server.stop)
        client = ControllerClient(server.address)
        stack.callback(client.close)
        agents = {}
        for name in NAMES:
            config = AgentConfig.model_validate(
                {
                    "volumes": [{"path": str(folder / name), "hold": "owner"}],
                    "state_folder": str(folder / f"{name}-state"),
                    "listen": "127.0.0.1:0",
                    "controller": server.address,
                    "heartbeat_interval_s": "50ms",
                    "scan": {"enabled": False, "min_gap_s": 0},
                    "repair": {"enabled": True},
                }
            )
            agents[name] = agent = Agent(config)
            agent.start()
            stack.callback(agent.stop)
        cluster = SmallCluster(folder, server, client, agents)
        for container_id in container_ids:
            for agent in agents.values():
                agent.scan(ContainerId(container_id), lambda: False)
            cluster.settle(container_id)
        yield cluster


def whole_block(block_id: int) -> bytes:
    """The bytes of a block that was never damaged."""
    return content(BlockId(block_id), BLOCK_BYTES)


def listed(value: object) -> list[dict[str, str]]:
    """A list of objects in a command's document."""
    assert isinstance(value, list)
    return value
