"""The replicas of one datanode of a running cluster, as an export reads a volume's.

The wire does not name volumes, so that all replicas of a datanode count as of one. Each
replica that SCM knows of gets its row: with its tree, or without one and with the
reason. So a silent datanode leaves its containers unknown, and never equal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from live.diagnosis import ReplicaReading, reason_not_read
from live.survey import ClusterSurvey
from merkle.replica import ContainerReplica, TreeSource
from merkle.tree import ContainerId, ContainerTree
from ozone.scm_client import ClusterNode
from ozone.survey import UNREADABLE, ReplicaFault, ReplicaSnapshot
from runtime.errors import OperationInterruptedError

# The storage ID in the rows of such a table.
_WIRE_VOLUME = "wire"
# Replicas of one stream; their trees are in memory at once.
_BATCH = 200


class WireSurvey:
    """A ReplicaSurvey (dnagent.export) of one datanode, over the wire."""

    def __init__(
        self, survey: ClusterSurvey, node: ClusterNode, replicas: Sequence[ContainerReplica]
    ) -> None:
        """`replicas` are those of this datanode that SCM knows of."""
        self.datanode = str(node.peer)
        self.volume = _WIRE_VOLUME
        self.created_ms: int | None = None
        self.fault: ReplicaFault | None = None
        self._survey, self._node = survey, node
        self._replicas: Mapping[ContainerId, ContainerReplica] = {
            one.container_id: one for one in replicas
        }

    def ids(self) -> list[ContainerId]:
        """The containers, ascending."""
        return sorted(self._replicas)

    def replicas(
        self,
        source: TreeSource,
        ids: Iterable[ContainerId] | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[ReplicaSnapshot]:
        """Each replica with its stored tree, in the order of the IDs.

        Raises:
            OperationInterruptedError: `cancelled` returned True.
        """
        assert source is TreeSource.TREE
        assert on_bytes is None
        wanted = self.ids() if ids is None else list(ids)
        for start in range(0, len(wanted), _BATCH):
            if cancelled and cancelled():
                raise OperationInterruptedError(f"the reading of {self.datanode} was stopped")
            batch = wanted[start : start + _BATCH]
            yield from self._read([self._replicas[number] for number in batch])

    def _read(self, replicas: Sequence[ContainerReplica]) -> Iterator[ReplicaSnapshot]:
        wanted = [one for one in replicas if self._is_read(one)]
        readings = {
            one.replica.container_id: one for one in self._survey.read_trees(self._node, wanted)
        }
        for one in replicas:
            yield _snapshot(one, readings.get(one.container_id), self._reason(one))

    def _is_read(self, replica: ContainerReplica) -> bool:
        return not replica.is_erasure_coded and not reason_not_read(replica, self._node)

    def _reason(self, replica: ContainerReplica) -> str:
        """Why a replica that is to be compared is not asked for; empty if it is not to
        be compared, or is asked for.
        """
        is_compared = replica.state.is_closed and not replica.is_erasure_coded
        return reason_not_read(replica, self._node) if is_compared else ""


def _snapshot(
    replica: ContainerReplica, reading: ReplicaReading | None, reason: str
) -> ReplicaSnapshot:
    tree = reading.tree if reading else None
    why = reading.reason if reading else reason
    return ReplicaSnapshot(
        replica.container_id,
        replica.state,
        TreeSource.TREE if tree is not None else None,
        tree or ContainerTree(replica.container_id, None),
        replica.bcs_id,
        replica.replica_index,
        faults=(ReplicaFault(UNREADABLE, why),) if why else (),
    )
