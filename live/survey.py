"""Read the trees of a running cluster, and diagnose its containers.

Containers are taken in batches. For each batch SCM is asked for the replicas, then each
datanode for the trees of all its replicas, on one stream, all datanodes at once. A
datanode that does not answer costs one deadline a batch; its replicas are UNKNOWN, and
the others go on. Rates are limited for each datanode.

Where an agent runs on a datanode's host, it is asked first, for trees and for scans of
the data. What it does not give, for whatever reason, is read from the datanode.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event

from live.deep_read import read_replica
from live.diagnosis import (
    Diagnosis,
    ReplicaReading,
    diagnose,
    reason_not_compared,
    reason_not_read,
)
from live.ports import AgentReader, ClusterDirectory, DatanodeReader
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId, ContainerTree
from ozone.scm_client import ClusterContainer, ClusterNode
from repair.peers import checked_tree
from runtime.errors import PeerUnavailableError
from runtime.rate_limit import RateLimiter, SystemClock

# Containers of one batch, and all of their blocks together: trees of a batch are in
# memory at once, at some 500 bytes a block and replica.
_BATCH_CONTAINERS = 500
_BATCH_BLOCKS = 100_000
# Datanodes that are asked at once.
_DATANODES_AT_ONCE = 32


@dataclass(slots=True)
class _Datanode:
    """The connection to one datanode, and its limit of bytes. `agent` is that on its
    host, None without.
    """

    reader: DatanodeReader
    limiter: RateLimiter
    agent: AgentReader | None


class _BatchTrees:
    """The trees of one batch. Replicas whose bytes are equal, as nearly all are, share
    one tree: it is parsed and checked once.
    """

    def __init__(self) -> None:
        self._last: dict[ContainerId, tuple[bytes, ContainerTree]] = {}

    def tree(self, raw: bytes, container_id: ContainerId) -> ContainerTree:
        """The tree in these bytes, checked.

        Raises:
            TreeRefusedError: as checked_tree.
        """
        # No lock: two threads that meet here parse the same bytes, and either tree is
        # right.
        known = self._last.get(container_id)
        if known is not None and known[0] == raw:
            return known[1]
        tree = checked_tree(raw, container_id)
        self._last[container_id] = raw, tree
        return tree


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The replicas of one datanode to read in a batch."""

    node: ClusterNode
    trees: _BatchTrees
    replicas: list[ContainerReplica] = field(default_factory=list)


class ClusterSurvey:
    """Diagnoses containers of one cluster; a context manager that closes its
    connections.
    """

    def __init__(
        self,
        directory: ClusterDirectory,
        connect: Callable[[ClusterNode], DatanodeReader],
        bytes_per_second: int,
        *,
        reads_data: bool = False,
        find_agent: Callable[[ClusterNode], AgentReader | None] = lambda _: None,
    ) -> None:
        """`connect` opens a datanode, of which at most `bytes_per_second` are read; 0
        is no limit. With `reads_data` all data are read and checked, too. `find_agent`
        opens the agent on a datanode's host, if there is one.
        """
        self._directory, self._connect, self._find_agent = directory, connect, find_agent
        self._bytes_per_second = bytes_per_second
        self._stopped = Event()
        self._reads_data = reads_data
        self._datanodes: dict[PeerId, _Datanode] = {}
        self._pool = ThreadPoolExecutor(_DATANODES_AT_ONCE, thread_name_prefix="diagnose")

    def __enter__(self) -> "ClusterSurvey":
        return self

    def __exit__(self, *_: object) -> None:
        # Ends waits and streams of threads that still read, so that they end too.
        self._stopped.set()
        for datanode in self._datanodes.values():
            datanode.reader.close()
            if datanode.agent is not None:
                datanode.agent.close()
        self._pool.shutdown(cancel_futures=True)

    def diagnose(self, containers: Iterable[ClusterContainer]) -> Iterator[list[Diagnosis]]:
        """The diagnoses of the containers, batch by batch, in their order.

        Raises:
            As the methods of the directory; errors of datanodes are in the diagnoses.
        """
        for batch in _batches(containers):
            yield self._diagnose_batch(batch)

    def read_trees(
        self, node: ClusterNode, replicas: Sequence[ContainerReplica]
    ) -> list[ReplicaReading]:
        """The trees of replicas of one datanode, or why not, in their order.

        Different datanodes may be read by several threads at once.
        """
        return self._read(_Wanted(node, _BatchTrees(), list(replicas))) if replicas else []

    def _diagnose_batch(self, batch: Sequence[ClusterContainer]) -> list[Diagnosis]:
        compared = [one.container_id for one in batch if not self._reason_not_compared(one)]
        replicas = self._directory.replicas(compared) if compared else {}
        # Asked for each batch: a datanode may have died since the last one.
        nodes = {node.peer: node for node in self._directory.nodes()}
        readings: dict[tuple[ContainerId, PeerId], ReplicaReading] = {}
        wanted: dict[PeerId, _Wanted] = {}
        trees = _BatchTrees()
        for one in (one for found in replicas.values() for one in found):
            node = nodes.get(one.peer)
            reason = reason_not_read(one, node)
            if reason or node is None:
                is_unreachable = node is not None and node.is_dead
                readings[one.container_id, one.peer] = ReplicaReading(
                    one, reason=reason, is_unreachable=is_unreachable
                )
            else:
                wanted.setdefault(one.peer, _Wanted(node, trees)).replicas.append(one)
        for found in self._pool.map(self._read, wanted.values()):
            for reading in found:
                readings[reading.replica.container_id, reading.replica.peer] = reading
        return [
            diagnose(
                container,
                [
                    readings[one.container_id, one.peer]
                    for one in replicas.get(container.container_id, ())
                ],
                nodes,
                reads_data=self._reads_data,
            )
            for container in batch
        ]

    def _reason_not_compared(self, container: ClusterContainer) -> str:
        return reason_not_compared(container, reads_data=self._reads_data)

    def _read(self, wanted: _Wanted) -> list[ReplicaReading]:
        """What one datanode answers for its replicas of a batch."""
        try:
            datanode = self._datanode(wanted.node)
        except ReconcileError as error:
            return [ReplicaReading.failed(one, error) for one in wanted.replicas]
        found = {
            one.replica.container_id: one
            for one in self._read_agent_trees(datanode, wanted.replicas)
        }
        rest = [one for one in wanted.replicas if one.container_id not in found]
        found |= {
            one.replica.container_id: one for one in self._read_trees(datanode, rest, wanted.trees)
        }
        readings = [found[one.container_id] for one in wanted.replicas]
        return [
            self._read_data(datanode, one) if one.tree is not None and self._reads_data else one
            for one in readings
        ]

    def _datanode(self, node: ClusterNode) -> _Datanode:
        known = self._datanodes.get(node.peer)
        if known is None:
            known = _Datanode(
                self._connect(node),
                RateLimiter(self._bytes_per_second, SystemClock(), self._stopped.wait),
                self._find_agent(node),
            )
            self._datanodes[node.peer] = known
        return known

    def _read_agent_trees(
        self, datanode: _Datanode, replicas: Sequence[ContainerReplica]
    ) -> Iterator[ReplicaReading]:
        """Those replicas whose trees the agent gives."""
        for replica in replicas if datanode.agent is not None else ():
            try:
                assert datanode.agent is not None
                tree = datanode.agent.tree(replica.container_id)
            except PeerUnavailableError:
                # The others would wait for it too.
                return
            except ReconcileError:
                continue
            yield ReplicaReading(replica, tree, by_agent=True)
            datanode.limiter.take(len(encode_tree(tree)))

    def _read_trees(
        self, datanode: _Datanode, replicas: Sequence[ContainerReplica], trees: _BatchTrees
    ) -> Iterator[ReplicaReading]:
        waiting = list(replicas)
        while waiting:
            done = 0
            try:
                ids = [one.container_id for one in waiting]
                for replica, (_, found) in zip(
                    waiting, datanode.reader.each_tree_bytes(ids), strict=False
                ):
                    done += 1
                    yield _tree_reading(replica, found, trees)
                    if isinstance(found, bytes):
                        datanode.limiter.take(len(found))
            except PeerUnavailableError as error:
                # The others would wait for the same datanode.
                for one in waiting[done:]:
                    yield ReplicaReading.failed(one, error)
                return
            except ReconcileError as error:
                # An exception in the datanode killed the stream: it is about the first
                # that got no answer, and the rest gets another stream.
                yield ReplicaReading.failed(waiting[done], error)
                done += 1
            waiting = waiting[done:]

    def _read_data(self, datanode: _Datanode, reading: ReplicaReading) -> ReplicaReading:
        assert reading.tree is not None
        scanned = _scan(datanode.agent, reading.replica) if datanode.agent else None
        try:
            found = read_replica(
                datanode.reader,
                reading.replica.container_id,
                scanned or reading.tree,
                datanode.limiter.take,
                is_erasure_coded=reading.replica.is_erasure_coded,
                is_scanned=scanned is not None,
            )
        except ReconcileError as error:
            return ReplicaReading.failed(reading.replica, error)
        return replace(reading, tree=found.tree, deep=found, by_agent=scanned is not None)


def _scan(agent: AgentReader, replica: ContainerReplica) -> ContainerTree | None:
    """The tree of a scan by the agent; None if it did not scan, or if another tree has
    replaced that of the scan.
    """
    try:
        root = agent.scan(replica.container_id, replica.used_bytes)
        tree = agent.tree(replica.container_id)
    except ReconcileError:
        return None
    return tree if tree.data_checksum is not None and tree.data_checksum == root else None


def _tree_reading(
    replica: ContainerReplica, found: bytes | ReconcileError, trees: _BatchTrees
) -> ReplicaReading:
    if isinstance(found, ReconcileError):
        return ReplicaReading.failed(replica, found)
    try:
        return ReplicaReading(replica, trees.tree(found, replica.container_id))
    except ReconcileError as error:
        return ReplicaReading.failed(replica, error)


def _batches(containers: Iterable[ClusterContainer]) -> Iterator[list[ClusterContainer]]:
    batch, blocks = list[ClusterContainer](), 0
    for one in containers:
        if batch and (len(batch) >= _BATCH_CONTAINERS or blocks + one.block_count > _BATCH_BLOCKS):
            yield batch
            batch, blocks = [], 0
        batch.append(one)
        blocks += one.block_count
    if batch:
        yield batch
