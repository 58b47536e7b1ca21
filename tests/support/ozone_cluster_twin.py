"""A cluster of Ozone in memory, on virtual time, with the quirks of its reconciliation:
the twin behind `OzoneDriver` in simulations.

SCM accepts requests and says nothing more. Datanodes get their command with a later
heartbeat, drop it while a task for the container runs, and report when a task ends.
Requests are lost in a failover, and roots in a restart of SCM.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from ozone.scm_client import ClusterContainer, ClusterNode, NodeHealth, NodeOperation
from runtime.errors import PeerRefusedError, PeerUnavailableError
from scm.eligibility import evaluate

HEARTBEAT_S = 30.0
TASK_S = 20.0
# Two heartbeats, the task between them, and a second.
SETTLE_S = 2 * HEARTBEAT_S + TASK_S + 1
GOOD_ROOT = 0xC0FFEE


@dataclass
class TwinContainer:
    """Replicas by their datanodes. Each task brings a replica closer to GOOD_ROOT by
    one of its `rounds_left`, and does nothing to a `hopeless` container.
    """

    roots: dict[PeerId, int]
    rounds_left: dict[PeerId, int]
    hopeless: bool = False
    # What SCM knows; None after its restart, until the next full report.
    reported: dict[PeerId, int | None] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        return len(set(self.roots.values())) == 1


class OzoneClusterTwin:
    """SCM, its datanodes and a clock that tests move."""

    def __init__(self, seed: int, datanodes: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.peers = [PeerId(f"dn-{number}") for number in range(datanodes)]
        self.containers: dict[ContainerId, TwinContainer] = {}
        self.requests = Counter[ContainerId]()
        # What happens at which time: a task begins, a task ends, a report arrives.
        self._due = list[tuple[float, str, ContainerId, PeerId]]()
        self._tasks = set[tuple[ContainerId, PeerId]]()
        self.drop_requests = False
        self.is_down = False
        self.concurrent_max = 0

    def add(self, number: int, *, rounds: int, hopeless: bool = False) -> None:
        """A container with three different replicas, which `rounds` rounds heal."""
        held = self.random.sample(self.peers, 3)
        roots = {peer: 100 + number * 10 + at for at, peer in enumerate(held)}
        left = dict.fromkeys(held, rounds)
        if rounds == 0:
            roots = dict.fromkeys(held, GOOD_ROOT)
        made = TwinContainer(roots, left, hopeless)
        made.reported.update(roots)
        self.containers[ContainerId(number)] = made

    def restart_scm(self) -> None:
        """SCM loses all roots until the next full reports, and commands not fetched."""
        for number, one in self.containers.items():
            for peer in one.roots:
                one.reported[peer] = None
                self._at(self.random.uniform(1, HEARTBEAT_S), "report", number, peer)
        self._due = [entry for entry in self._due if entry[1] != "begin"]

    def advance(self, seconds: float) -> None:
        """Let time go by, and do what is due meanwhile."""
        end_s = self.now_s + seconds
        while due := sorted(entry for entry in self._due if entry[0] <= end_s)[:1]:
            self._due.remove(due[0])
            self.now_s, what, number, peer = due[0]
            one = self.containers[number]
            if what == "begin" and (number, peer) not in self._tasks:
                self._tasks.add((number, peer))
                self._at(self.random.uniform(0.1, TASK_S), "end", number, peer)
            elif what == "end":
                self._tasks.discard((number, peer))
                self._repair(one, peer)
                self._at(0.1, "report", number, peer)
            elif what == "report":
                one.reported[peer] = one.roots[peer]
            busy = Counter(peer for _, peer in self._tasks)
            self.concurrent_max = max(self.concurrent_max, *busy.values(), 0)
        self.now_s = end_s

    def nodes(self) -> tuple[ClusterNode, ...]:
        self._check()
        service = NodeOperation.IN_SERVICE
        return tuple(
            ClusterNode(peer, peer, "127.0.0.1:1", NodeHealth.HEALTHY, service)
            for peer in self.peers
        )

    def get_containers(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, ClusterContainer]:
        self._check()
        return {
            number: ClusterContainer(number, ContainerState.CLOSED, "RATIS/THREE", 3)
            for number in container_ids
            if number in self.containers
        }

    def replicas(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, tuple[ContainerReplica, ...]]:
        self._check()
        return {
            number: tuple(
                ContainerReplica(peer, number, ReplicaState.CLOSED, root, 5)
                for peer, root in sorted(self.containers[number].reported.items())
            )
            for number in container_ids
            if number in self.containers
        }

    def reconcile(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None]:
        self._check()
        found: dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None] = {}
        for number, replicas in self.replicas(container_ids).items():
            ruling = evaluate(number, ContainerState.CLOSED, replicas, required_nodes=3)
            found[number] = None if ruling.is_ok else PeerRefusedError(ruling.message)
            self.requests[number] += 1
            for peer in () if self.drop_requests else self.containers[number].roots:
                self._at(self.random.uniform(0.3, HEARTBEAT_S), "begin", number, peer)
        return found

    def lose_replica(self, number: int) -> None:
        """A replica goes away, as after the death of its datanode."""
        one = self.containers[ContainerId(number)]
        peer = min(one.roots)
        for held in (one.roots, one.rounds_left, one.reported):
            held.pop(peer)
        self._due = [entry for entry in self._due if entry[2:] != (number, peer)]

    def _repair(self, one: TwinContainer, peer: PeerId) -> None:
        if one.hopeless or one.rounds_left[peer] == 0:
            return
        one.rounds_left[peer] -= 1
        is_good = one.rounds_left[peer] == 0
        one.roots[peer] = GOOD_ROOT if is_good else one.roots[peer] + 1_000

    def _at(self, after_s: float, what: str, number: ContainerId, peer: PeerId) -> None:
        self._due.append((self.now_s + after_s, what, number, peer))

    def _check(self) -> None:
        if self.is_down:
            raise PeerUnavailableError("SCM does not answer")


def replica(peer: str, root: int | None) -> ContainerReplica:
    """A closed replica of container 1."""
    made = ContainerReplica(PeerId(peer), ContainerId(1), ReplicaState.CLOSED, root, 5)
    return replace(made, data_checksum=root)
