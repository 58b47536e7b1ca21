"""The option `--agents`: agents on the hosts of a running cluster's datanodes.

An agent reads a datanode's volumes on its host, at the disk's speed, and costs the
datanode nothing. It counts as the agent of a datanode only if it names that datanode;
with TLS its certificate must prove it.
"""

import threading
from collections.abc import Callable, Sequence

import click
import grpc

from admin.client_config import ClientConfig
from dnagent.client import AgentClient
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId, ContainerTree
from ozone.scm_client import ClusterNode
from repair.peers import AgentPeer
from runtime.errors import UsageError
from runtime.roles import Identity, Role
from runtime.rpc import is_loopback, open_channel
from runtime.setting_values import check_address, split_address
from runtime.tls_files import Tls

# The port of dnagent.config; an agent is looked for there at each datanode's address.
_PORT = "9893"
_NONE = "none"
# Where nobody listens the answer is immediate; where packets are dropped it never is.
_PROBE_S = 2.0
# Of a scan: its wait for others, and the slowest rate worth waiting for.
_SCAN_S, _SCAN_BYTES_PER_S = 120.0, 1 << 20


def agents_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option. The command gets its text as `agents`, for `ClusterAgents`."""
    return click.option(
        "--agents",
        metavar=f"PORT|HOST:PORT,...|{_NONE}",
        default=_PORT,
        show_default=True,
        help=(
            "Use the agents on the hosts of datanodes: those at this port of each host, or those"
            " at these addresses. Beyond loopback they need TLS, or `insecure` in client.toml."
        ),
    )(command)


class ClusterAgent:
    """The agent of one datanode; its methods are those of live.ports.AgentReader."""

    def __init__(self, peer_id: PeerId, channel: grpc.Channel, address: str) -> None:
        """Takes ownership of `channel`."""
        self.peer = AgentPeer(peer_id, channel, f"agent {address}")
        self._client = AgentClient(channel, f"agent {address}")

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """See AgentReader.tree."""
        return self.peer.tree(container_id)

    def scan(self, container_id: ContainerId, length_bytes: int) -> int:
        """See AgentReader.scan."""
        timeout_s = _SCAN_S + length_bytes / _SCAN_BYTES_PER_S
        return self._client.scan(container_id, timeout_s=timeout_s).data_checksum

    def close(self) -> None:
        """Close the connection."""
        self.peer.close()


class ClusterAgents:
    """The agents that `--agents` means. Thread-safe."""

    def __init__(self, text: str, config: ClientConfig) -> None:
        """`config` has the files of TLS.

        Raises:
            UsageError: the text is neither a port nor addresses.
        """
        self._port, self._addresses = 0, list[str]()
        if text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 16:
            self._port = int(text)
        elif text != _NONE:
            self._addresses = [part.strip() for part in text.split(",")]
            try:
                for address in self._addresses:
                    check_address(address)
            except ValueError as error:
                raise UsageError(f"--agents: {error}") from error
        self._tls: Tls | None = config.tls.files(config.roles) if config.tls else None
        self._insecure = config.insecure
        self._lock = threading.Lock()
        self._named: dict[PeerId, str] | None = None
        self._found: set[PeerId] = set()
        self._problems: list[str] = []

    @property
    def found(self) -> Sequence[PeerId]:
        """The datanodes whose agents were found, in ascending order."""
        return sorted(self._found)

    @property
    def problems(self) -> Sequence[str]:
        """What is wrong with agents whose addresses were given."""
        return tuple(self._problems)

    def find(self, node: ClusterNode) -> ClusterAgent | None:
        """The agent of a datanode; None if there is none that proves to be."""
        address = self._address_of(node)
        if address is None:
            return None
        try:
            channel = self._open(address, Identity(Role.DATANODE, node.peer))
            agent = ClusterAgent(node.peer, channel, address)
            try:
                if _datanode_of(channel, address) == node.peer:
                    self._found.add(node.peer)
                    return agent
            except ReconcileError:
                agent.close()
                raise
        except ReconcileError as error:
            self._note(address, error)
            return None
        agent.close()
        return None

    def _address_of(self, node: ClusterNode) -> str | None:
        if self._addresses:
            with self._lock:
                if self._named is None:
                    self._named = self._ask_all()
            return self._named.get(node.peer)
        if not self._port or not node.address:
            return None
        host = split_address(node.address)[0]
        address = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        may_ask = self._tls is not None or self._insecure or is_loopback(address)
        return address if may_ask else None

    def _ask_all(self) -> dict[PeerId, str]:
        """The datanode that the agent at each given address names."""
        found: dict[PeerId, str] = {}
        for address in self._addresses:
            try:
                with self._open(address, Role.DATANODE) as channel:
                    found[_datanode_of(channel, address)] = address
            except ReconcileError as error:
                self._note(address, error)
        return found

    def _open(self, address: str, server: Identity | Role) -> grpc.Channel:
        return open_channel(address, tls=self._tls, insecure=self._insecure, server=server)

    def _note(self, address: str, error: ReconcileError) -> None:
        # Where an agent was only looked for, that there is none is no problem.
        if self._addresses:
            self._problems.append(f"agent {address} is not used: {error.code}: {error.message}")


def _datanode_of(channel: grpc.Channel, address: str) -> PeerId:
    return AgentClient(channel, f"agent {address}").status(timeout_s=_PROBE_S).datanode_id
