"""Decide what is known of one container from what its datanodes answered.

A verdict is that of merkle.comparison on the trees that were read. It is UNKNOWN, with
the reason, where a replica that could change it was not read: nothing is called equal
or lost as long as a datanode is silent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from live.deep_read import DeepReading
from live.stripes import ErasureReplica, StripeReport, compare_stripes
from merkle.comparison import Comparison, compare, unrecorded_copies, with_doubt
from merkle.errors import ReconcileError
from merkle.outcome import Evidence, EvidenceKind, Verdict
from merkle.replica import ContainerReplica, ContainerState, PeerId
from merkle.tree import ContainerTree
from ozone.scm_client import ClusterContainer, ClusterNode, ErasureCode
from runtime.errors import PeerUnavailableError

_COMPARED_STATES = (ContainerState.CLOSED, ContainerState.QUASI_CLOSED)


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica, and what was read of it: its tree, or why not.

    `is_unreachable` is whether its datanode did not answer. With `deep` the tree is
    that of the data. `by_agent` is whether the agent on the datanode's host read it.
    """

    replica: ContainerReplica
    tree: ContainerTree | None = None
    reason: str = ""
    is_unreachable: bool = False
    deep: DeepReading | None = None
    by_agent: bool = False

    @classmethod
    def failed(cls, replica: ContainerReplica, error: ReconcileError) -> "ReplicaReading":
        """A replica that could not be read."""
        return cls(
            replica,
            reason=f"{error.code}: {error.message}",
            is_unreachable=isinstance(error, PeerUnavailableError),
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of one container. `doubt` is what is not known, and why; empty if
    the verdict rests on all replicas.
    """

    container: ClusterContainer
    comparison: Comparison
    readings: tuple[ReplicaReading, ...] = ()
    doubt: str = ""
    nodes: Mapping[PeerId, ClusterNode] = field(default_factory=dict)
    # Of an erasure-coded container.
    stripes: StripeReport | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the replicas."""
        return self.comparison.verdict

    @property
    def is_unreachable(self) -> bool:
        """Whether a datanode that did not answer is a reason for the doubt."""
        return any(reading.is_unreachable for reading in self.readings)


def reason_not_compared(container: ClusterContainer, *, reads_data: bool = False) -> str:
    """Why the replicas of a container are not compared; empty if they are. Those of an
    erasure-coded one differ by design, so that only their data show anything.
    """
    if container.is_erasure_coded and not reads_data:
        return (
            f"{container.replication}: only `treefold diagnose --deep` compares erasure-coded ones"
        )
    if container.is_erasure_coded and container.erasure_code is None:
        return f"{container.replication}: SCM names no valid erasure code"
    if container.state not in _COMPARED_STATES:
        return f"the container is {container.state.value}: only closed ones have trees"
    return ""


def reason_not_read(replica: ContainerReplica, node: ClusterNode | None) -> str:
    """Why a replica is not worth a request; empty if it is. A request that must fail
    would make the datanode scan the container.
    """
    if not replica.state.is_closed:
        return f"the replica is {replica.state.value}"
    if node is None:
        return "SCM does not list its datanode"
    if node.is_dead:
        return "its datanode is DEAD: SCM no longer hears from it"
    if not node.address:
        return "its datanode names no port for reads"
    return ""


def diagnose(
    container: ClusterContainer,
    readings: Sequence[ReplicaReading],
    nodes: Mapping[PeerId, ClusterNode],
    *,
    reads_data: bool = False,
) -> Diagnosis:
    """The diagnosis of a container from all of its replicas."""
    if reason := reason_not_compared(container, reads_data=reads_data):
        return Diagnosis(container, _unknown(container, reason), (), reason, nodes)
    trees = {str(one.replica.peer): one.tree for one in readings if one.tree is not None}
    doubts = [f"datanode {one.replica.peer}: {one.reason}" for one in readings if one.tree is None]
    if len(readings) < container.required_replicas:
        doubts.append(
            f"datanodes reported {len(readings)} of {container.required_replicas} replicas"
        )
    doubts += [
        f"datanode {one.replica.peer}: {one.deep.unverifiable} chunks have no checksums"
        for one in readings
        if one.deep and one.deep.unverifiable
    ]
    if not trees:
        doubt = "; ".join(doubts) or "no datanode reported a replica"
        return Diagnosis(container, _unknown(container, doubt), tuple(readings), doubt, nodes)
    if container.erasure_code is not None:
        return _diagnose_stripes(container, container.erasure_code, readings, nodes, doubts)
    deep = {str(one.replica.peer): one.deep for one in readings if one.deep}
    windows = {peer: found.bad_windows for peer, found in deep.items()}
    lost = {peer: found.lost for peer, found in deep.items()}
    compared = compare(
        trees,
        bad_windows=windows,
        lost={place for places in lost.values() for place in places},
    )
    if deep and any(
        copies.holders for copies in unrecorded_copies(trees, bad_windows=windows, lost=lost)
    ):
        doubts.append("files without a record were not read, and may hold what is damaged")
    doubt = "; ".join(doubts)
    if doubt:
        compared = with_doubt(compared, is_incomplete=True)
    return Diagnosis(container, compared, tuple(readings), doubt, nodes)


def _diagnose_stripes(
    container: ClusterContainer,
    code: ErasureCode,
    readings: Sequence[ReplicaReading],
    nodes: Mapping[PeerId, ClusterNode],
    doubts: list[str],
) -> Diagnosis:
    indexes = range(1, code.data + code.parity + 1)
    replicas = [
        ErasureReplica(one.replica.peer, one.replica.replica_index, one.deep)
        for one in readings
        if one.deep and one.replica.replica_index in indexes
    ]
    unread = [str(index) for index in indexes if index not in {one.index for one in replicas}]
    if unread:
        doubts = [*doubts, f"not read: replica index {', '.join(unread)}"]
    report = compare_stripes(container.container_id, code, replicas)
    compared, doubt = report.comparison, "; ".join(doubts)
    if doubt:
        compared = with_doubt(compared, is_incomplete=bool(unread))
    return Diagnosis(container, compared, tuple(readings), doubt, nodes, report)


def _unknown(container: ClusterContainer, why: str) -> Comparison:
    evidence = Evidence(EvidenceKind.NOTHING_COMPARED, None, None, why)
    return Comparison(container.container_id, Verdict.UNKNOWN, (), (evidence,))
