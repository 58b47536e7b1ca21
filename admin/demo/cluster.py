"""Run a controller and agents as processes on loopback, for the demo and tests."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from admin.demo.process import DemoProcess
from dnagent.client import AgentClient
from merkle.errors import ReconcileError
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId, ContainerTree
from ozone.volume import parse_version
from protos.errors import ControllerUnavailableError
from repair.peers import AgentPeer
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import PeerUnavailableError, ProcessFailedError, UsageError
from runtime.rpc import open_channel
from scm.client import ControllerClient
from scm.views import ContainerStatus

# The folder of a datanode's volume, in packaged states of clusters.
VOLUME = "volume1"
# Time for all agents to report.
_START_S = 30.0
_SCAN_S = 300.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ScannedReplica:
    """The result of an agent's scan of one replica; `refusal` is why it was not
    scanned.
    """

    replica: str
    container_id: ContainerId
    state: str
    data_checksum: int
    findings: tuple[str, ...] = ()
    replica_index: int = 0
    refusal: str = ""


class LocalCluster:
    """A controller, and for each volume an agent that owns it and may repair it.

    The processes run while the context is open.
    """

    def __init__(
        self, volumes: Mapping[str, Path], scratch: Path, *, dashboard: str | None = None
    ) -> None:
        """Prepare the processes. They write only to the volumes and to `scratch`. The
        controller serves its page at `dashboard`, an address of loopback.
        """
        self._volumes, self._dashboard = volumes, dashboard
        self._scratch = scratch
        self._controller = self._process("controller", ["scm", "run"])
        self._agents = {name: self._process(name, ["agent", "run"]) for name in volumes}

    def __enter__(self) -> Self:
        """Start all processes.

        Raises:
            UsageError: two of the volumes belong to one datanode.
            ReconcileError: a volume cannot be read, or a process does not start.
        """
        if len(self.names_by_datanode()) < len(self._volumes):
            raise UsageError(
                "two of the volumes belong to the same datanode",
                hint="Use one volume of each datanode.",
            )
        try:
            self._configure_controller()
            self._controller.start()
            with ThreadPoolExecutor(len(self._agents)) as pool:
                list(pool.map(self.start_agent, self._agents))
            self._await_reports()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def controller_address(self) -> str:
        """The address that the controller listens on."""
        return self._controller.address

    def start_agent(self, name: str, *, bytes_per_second: int = 0) -> None:
        """Start or restart an agent. A rate of 0 does not limit its fetches.

        Raises:
            ProcessFailedError: the agent does not start.
        """
        agent = self._agents[name]
        settings = f"""
            state_folder = {_toml(agent.folder / "state")}
            listen = "{agent.address or "127.0.0.1:0"}"
            controller = "{self.controller_address}"
            heartbeat_interval_s = "100ms"
            audit_file = {_toml(self.audit_file(name))}
            volumes = [{{ path = {_toml(self._volumes[name])}, hold = "owner" }}]

            [scan]
            enabled = false
            bytes_per_second = 0

            [repair]
            enabled = true
            return_to_closed = true
            bytes_per_second = {bytes_per_second}
        """
        (agent.folder / "config.toml").write_text(
            "\n".join(line.strip() for line in settings.splitlines())
        )
        agent.start()

    def kill_agent(self, name: str) -> None:
        """Kill an agent with SIGKILL, so that it cannot clean up."""
        self._agents[name].signal(signal.SIGKILL)
        self._agents[name].wait()

    def stop_agent(self, name: str) -> None:
        """Stop an agent with SIGTERM."""
        self._agents[name].signal(signal.SIGTERM)
        self._agents[name].wait()

    def names_by_datanode(self) -> dict[str, str]:
        """The names of the volumes by datanode ID."""
        disk = Disk()
        return {
            parse_version(disk.read(path / "hdds" / "VERSION")).datanode_id: name
            for name, path in self._volumes.items()
        }

    def audit_file(self, name: str) -> Path:
        """The file in which the agent records its writes."""
        return self._agents[name].folder / "audit.jsonl"

    def containers(self) -> list[ContainerStatus]:
        """The controller's view of all containers, ascending."""
        with closing(ControllerClient(self.controller_address)) as controller:
            return list(controller.containers())

    def scan(
        self, replicas: Mapping[str, Mapping[ContainerId, ContainerReplica]]
    ) -> list[ScannedReplica]:
        """Scan these reported replicas, given by agent and container ID. The results
        are sorted by container and replica.

        If an agent refuses or fails to scan a container, the result has a `refusal`.

        Raises:
            PeerUnavailableError: an agent does not answer.
        """

        def scan_on(name: str) -> list[ScannedReplica]:
            with open_channel(self._agents[name].address) as channel:
                agent = AgentClient(channel, name)
                return [scan_one(name, agent, reported) for reported in replicas[name].values()]

        def scan_one(name: str, agent: AgentClient, reported: ContainerReplica) -> ScannedReplica:
            container_id, index = reported.container_id, reported.replica_index
            try:
                found = agent.scan(container_id, timeout_s=_SCAN_S)
            except PeerUnavailableError:
                raise
            except ReconcileError as error:
                return ScannedReplica(
                    name, container_id, reported.state.value, 0, (), index, error.message
                )
            return ScannedReplica(
                name, container_id, found.state, found.data_checksum, found.findings, index
            )

        with ThreadPoolExecutor(len(self._agents)) as pool:
            scanned = [replica for part in pool.map(scan_on, replicas) for replica in part]
        return sorted(scanned, key=lambda replica: (replica.container_id, replica.replica))

    def tree(self, name: str, container_id: ContainerId) -> ContainerTree:
        """The tree of a container that an agent serves to its peers.

        Raises:
            ReconcileError: the agent cannot be reached or refuses.
        """
        peer = AgentPeer(PeerId(name), open_channel(self._agents[name].address), target=name)
        try:
            return peer.tree(container_id)
        finally:
            peer.close()

    def command(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run `treefold ARGUMENTS --json` against the controller. Returns the exit
        status and the JSON document.

        Raises:
            ProcessFailedError: the command did not print a JSON document.
        """
        command = [
            sys.executable,
            "-m",
            "admin.cli",
            *arguments,
            "--controller",
            self.controller_address,
            "--json",
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        try:
            answer = parse_json(done.stdout)
        except ValueError:
            text = (
                f"treefold {arguments[0]} ended with {done.returncode}:"
                f" {done.stderr.strip()[-500:]}"
            )
            raise ProcessFailedError(text, process=arguments[0]) from None
        return done.returncode, answer

    def stop(self) -> None:
        """Stop all processes, agents first. Kill those that still run after 10 s."""
        for process in [*self._agents.values(), self._controller]:
            process.signal(signal.SIGTERM)
        for process in [*self._agents.values(), self._controller]:
            process.wait()

    def _process(self, name: str, words: list[str]) -> DemoProcess:
        folder = self._scratch / name
        folder.mkdir(parents=True)
        command = [
            sys.executable,
            "-m",
            "admin.cli",
            *words,
            "--config",
            str(folder / "config.toml"),
        ]
        return DemoProcess(name, command, folder)

    def _configure_controller(self) -> None:
        folder = self._controller.folder
        settings = {"state_folder": str(folder / "state"), "listen": "127.0.0.1:0"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines.append(f"required_replicas = {len(self._agents)}")
        if self._dashboard:
            lines += ["[dashboard]", f"listen = {json.dumps(self._dashboard)}"]
        (folder / "config.toml").write_text("\n".join(lines))

    def _await_reports(self) -> None:
        """Wait until every agent has reported. Its first heartbeat has all replicas."""
        deadline = time.monotonic() + _START_S
        with closing(ControllerClient(self.controller_address)) as controller:
            while time.monotonic() < deadline:
                with suppress(ControllerUnavailableError):
                    if len(controller.live_datanodes()) == len(self._agents):
                        return
                time.sleep(_POLL_S)
        raise ProcessFailedError(
            "not every agent reported to the controller in time", process="controller"
        )


def unpack_volumes(moment: str, folder: Path) -> dict[str, Path]:
    """Unpack a packaged state of a real cluster (`healthy`, `damaged`); returns its
    volumes by datanode.
    """
    with (
        as_file(files("admin") / "data" / f"{moment}.tar.xz") as archive,
        tarfile.open(archive) as packed,
    ):
        # An attribute, not an argument: Python 3.11 before 3.11.4, as in Debian 12, has
        # no extraction filters and would reject the argument.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder, [member for member in packed if member.name.startswith("dn")])
    return {path.name: path / VOLUME for path in sorted(folder.glob("dn*"))}


def reported_replicas(cluster: LocalCluster) -> dict[str, dict[ContainerId, ContainerReplica]]:
    """The reported replicas by agent and container ID."""
    names = cluster.names_by_datanode()
    held: dict[str, dict[ContainerId, ContainerReplica]] = {name: {} for name in names.values()}
    for view in cluster.containers():
        for replica in view.replicas:
            held[names[replica.datanode.peer]][view.container_id] = replica.replica
    return held


def _toml(path: Path) -> str:
    return json.dumps(str(path))
