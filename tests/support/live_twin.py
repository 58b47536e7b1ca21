"""A running cluster in memory: twins of its SCMs, and three datanodes that serve
replicas, all on real sockets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from live.diagnosis import Diagnosis
from live.ports import AgentReader
from live.survey import ClusterSurvey
from merkle.replica import ContainerReplica, ContainerState, PeerId
from merkle.tree import BlockId, ContainerId
from ozone.datanode import Request, Response, XceiverService
from ozone.datanode_client import DatanodeClient
from ozone.scm_client import (
    ClusterContainer,
    ClusterNode,
    ErasureCode,
    NodeHealth,
    NodeOperation,
    ScmClient,
)
from protos.convert import tree_from_bytes
from runtime.rpc import Deadlines, RpcServer, open_channel, start_server
from tests.support.peers import (
    CHUNK_BYTES,
    MemoryReplica,
    MemoryScans,
    MemorySource,
    MemoryStatus,
    replica_of,
    xor_replicas,
)
from tests.support.scm_group import ScmGroup, scm_group
from tests.support.scm_twin import ScmTwin

PEERS = [PeerId(f"{number}fffffff-0000-4000-8000-000000000000") for number in (1, 2, 3)]


class CountingSource(MemorySource):
    """Counts the reads of files, since each that fails costs a real datanode a scan."""

    reads = 0
    failed_reads = 0
    trees = 0

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        self.trees += 1
        return super().tree_bytes(container_id, build_missing=build_missing)

    def read(self, container_id: ContainerId, block_id: BlockId, offset: int, length: int) -> bytes:
        self.reads += 1
        self.failed_reads += block_id not in self.replicas[container_id].files
        return super().read(container_id, block_id, offset, length)


class LyingService(XceiverService):
    """A datanode that answers whatever `change` makes of each honest answer."""

    def __init__(self, source: CountingSource) -> None:
        super().__init__(source)
        self.change: Callable[[Response], Response] = lambda reply: reply

    def answer(self, request: Request) -> Response:
        return self.change(super().answer(request))


@dataclass
class LiveTwin:
    """The cluster; its SCMs, `sources` and what `services` answer may be changed at any
    time.
    """

    group: ScmGroup
    sources: list[CountingSource]
    services: list[LyingService]
    servers: list[RpcServer] = field(default_factory=list)

    @property
    def scm(self) -> ScmTwin:
        """The SCM that leads, or led last."""
        return self.group.members[self.group.leader or 0]

    @property
    def address(self) -> str:
        """The SCMs' ports for clients, with commas between."""
        return ",".join(self.group.addresses)

    def add(
        self, container_id: int, blocks: dict[int, int] | None = None, replicas: int = 3
    ) -> list[MemoryReplica]:
        """A closed container with equal replicas."""
        number = ContainerId(container_id)
        made = [replica_of(number, blocks or {20: 50_000, 21: 5_000}) for _ in range(replicas)]
        for source, replica in zip(self.sources, made, strict=False):
            source.replicas[number] = replica
        self.scm.containers[number] = ClusterContainer(
            number, ContainerState.CLOSED, "RATIS/THREE", 3, block_count=len(made[0].records)
        )
        self.report(number)
        return made

    def add_erasure_coded(
        self, container_id: int, blocks: dict[int, int], *, cell_bytes: int = CHUNK_BYTES
    ) -> list[MemoryReplica]:
        """A closed container of code XOR-2-1: two replicas of data, one of parity."""
        number = ContainerId(container_id)
        made = xor_replicas(number, blocks, cell_bytes)
        for source, replica in zip(self.sources, made, strict=True):
            source.replicas[number] = replica
        self.scm.containers[number] = ClusterContainer(
            number, ContainerState.CLOSED, "EC/XOR-2-1", 3, is_erasure_coded=True,
            block_count=len(blocks), erasure_code=ErasureCode(2, 1, cell_bytes),
        )  # fmt: skip
        self.report(number)
        return made

    def report(self, container_id: int) -> None:
        """Tell all SCMs of a container's replicas as they are."""
        number = ContainerId(container_id)
        found = list[ContainerReplica]()
        for peer, source in zip(PEERS, self.sources, strict=True):
            if one := source.replicas.get(number):
                root = (
                    tree_from_bytes(one.tree, number).data_checksum
                    if isinstance(one.tree, bytes)
                    else None
                )
                found.append(
                    ContainerReplica(peer, number, one.state, root, one.bcs_id, one.replica_index)
                )
        for scm in self.group.members:
            known = scm.replicas.get(number, [])
            scm.replicas[number] = [*found, *(one for one in known if one.peer not in PEERS)]

    def set_health(self, datanode: int, health: NodeHealth) -> None:
        for scm in self.group.members:
            scm.nodes[datanode - 1] = replace(scm.nodes[datanode - 1], health=health)

    def stop(self, datanode: int) -> None:
        """The datanode's process ends; SCM has not noticed."""
        self.servers[datanode - 1].stop(0)

    def diagnose(
        self,
        *,
        deep: bool = False,
        find_agent: Callable[[ClusterNode], AgentReader | None] = lambda _: None,
    ) -> dict[int, Diagnosis]:
        """A diagnosis of all containers."""

        def connect(node: ClusterNode) -> DatanodeClient:
            deadlines = Deadlines(tree_s=5, records_s=5, read_s=5)
            channel = open_channel(node.address)
            return DatanodeClient(
                channel, f"datanode {node.peer}", datanode_id=node.peer, deadlines=deadlines
            )

        client = ScmClient(self.group.addresses)
        try:
            with ClusterSurvey(
                client, connect, 0, reads_data=deep, find_agent=find_agent
            ) as survey:
                batches = survey.diagnose(client.containers())
                return {one.container.container_id: one for batch in batches for one in batch}
        finally:
            client.close()


@contextmanager
def live_twin(scms: int = 1) -> Iterator[LiveTwin]:
    """A cluster of three datanodes without containers, with so many SCMs."""
    sources = [CountingSource() for _ in PEERS]
    with ExitStack() as stack:
        services = [LyingService(source) for source in sources]
        servers = [start_server("127.0.0.1:0", [one.register]) for one in services]
        for server in servers:
            stack.callback(server.stop, 0)
        group = stack.enter_context(scm_group(scms))
        for scm in group.members:
            scm.nodes = [
                ClusterNode(
                    peer, f"host{number}", server.address, NodeHealth.HEALTHY,
                    NodeOperation.IN_SERVICE, 3,
                )
                for number, (peer, server) in enumerate(zip(PEERS, servers, strict=True), 1)
            ]  # fmt: skip
        yield LiveTwin(group, sources, services, servers)


@contextmanager
def agents_beside(
    cluster: LiveTwin, sources: Sequence[CountingSource] = ()
) -> Iterator[list[RpcServer]]:
    """An agent beside each of its datanodes, which scans what they hold; `sources`
    count what the agents read apart from what the datanodes do.
    """
    with ExitStack() as stack:
        servers = list[RpcServer]()
        for peer, source in zip(PEERS, sources or cluster.sources, strict=True):
            status = MemoryStatus(AgentStatus(peer, repair_enabled=False))
            service = AgentService(source, MemoryScans(source), status)
            servers.append(start_server("127.0.0.1:0", [service.register]))
            stack.callback(servers[-1].stop, 0)
        yield servers
