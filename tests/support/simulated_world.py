"""The world of a simulated cluster: replicas on datanodes, their agents, the
controller, the messages between them, and the clock.

A `Setup` says what a world starts with. The world itself decides nothing: `storm` and
`peace` choose what happens next, `SimulatedRepairs` and `SimulatedNetwork` do it. All
of them draw from the one random generator here, so that a seed is a run.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from dnagent.scanner import CompletedScan
from merkle.columns import state_fingerprint
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import BlockId, ContainerId
from ozone.errors import ContainerStateError
from scm.jobs import JobId
from scm.rules import Rules
from tests.support.cluster_control import (
    AgentProcess,
    ControllerProcess,
    Message,
    OpenStore,
    Parts,
    Run,
)
from tests.support.cluster_reports import MemoryJobStore
from tests.support.faults import Fault, Lie
from tests.support.memory import CrashError, RepairableReplica
from tests.support.observer import Commits, Ledger, ViolationError, WriteObserver, Written
from tests.support.peers import MemoryReplica, MemorySource
from tests.support.trace import EventKind, Subject, Trace, TraceEvent

# The clock's first reading; traces count from here.
EPOCH_S = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world starts with, before anything happens."""

    containers: tuple[ContainerId, ...]
    written: Written
    commits: Commits
    # The disk of each datanode.
    disks: Mapping[PeerId, Mapping[ContainerId, MemoryReplica]]
    rules: Rules
    chances: Mapping[Fault, float] = field(default_factory=dict)
    lies: Mapping[PeerId, Lie] = field(default_factory=dict)
    fetches_max: int = 4
    return_to_service: bool = True
    runs_max: int = 1
    replicas_per_report: int = 50_000
    # How likely somebody asks for a job at a step of the storm.
    ask_chance: float = 0.0
    # How likely peace begins with every replica of a container damaged.
    pieces_chance: float = 0.0

    def lines(self) -> list[str]:
        """The setup as a scenario prints it."""
        held = ", ".join(
            f"container {container_id}"
            f" (blocks {', '.join(map(str, _blocks_of(self.written, container_id)))})"
            for container_id in self.containers
        )
        starter = "automatic mode starts jobs" if self.rules.automatic else "jobs are asked for"
        lies = [f"{name} lies: {lie}" for name, lie in sorted(self.lies.items())]
        short = [
            f"{name} has block {block_id} without its last chunks"
            for name, disk in self.disks.items()
            for stored in disk.values()
            for block_id, record in sorted(stored.records.items())
            if record.chunks != self.written[block_id][0].chunks
        ]
        newest = {
            container_id: max(
                r.bcs_id for r, _ in self.written.values() if r.container_id == container_id
            )
            for container_id in self.containers
        }
        behind = [
            f"{name} is at commit {stored.bcs_id} of {newest[container_id]}"
            for name, disk in self.disks.items()
            for container_id, stored in disk.items()
            if stored.bcs_id < newest[container_id]
        ]
        lines = [
            f"{', '.join(self.disks)} hold {held}; {starter}",
            "; ".join(lies),
            *behind,
            *short,
        ]
        return [line for line in lines if line]


@dataclass(slots=True, eq=False)
class Place:
    """One datanode's replica of one container."""

    node: "Node"
    container_id: ContainerId
    replica: RepairableReplica
    # A scan that began some time ago.
    slow_scan: CompletedScan | None = None
    # The last report, and the state of the replica that it was made of.
    last_report: tuple[object, ContainerReplica] | None = None

    @property
    def run(self) -> Run | None:
        """The repair under way here, if any."""
        return self.node.agent.runs.get(self.container_id) if self.node.agent else None

    def report(self) -> ContainerReplica:
        """What dnagent.store says of a replica."""
        stored = self.replica.stored
        used_bytes = sum(map(len, stored.files.values()))
        key = (
            stored.tree, len(self.replica.remembered), stored.state, stored.bcs_id,
            len(stored.records), used_bytes,
        )  # fmt: skip
        if self.last_report is None or self.last_report[0] != key:
            tree, _ = self.replica.known_tree()
            assert tree is not None
            known = tree.data_checksum is not None
            replica = ContainerReplica(
                self.node.name,
                self.container_id,
                stored.state,
                tree.data_checksum if known else None,
                stored.bcs_id,
                used_bytes=used_bytes,
                block_count=len(stored.records),
                data_scan_timestamp_ms=int((EPOCH_S + self.node.wall_error_s) * 1000)
                if known
                else None,
                fingerprint=state_fingerprint(tree) if known else b"",
            )
            self.last_report = key, replica
        return self.last_report[1]


@dataclass(slots=True, eq=False)
class Node:
    """One datanode: its disk, and the agent on it while that is alive."""

    name: PeerId
    address: str
    lie: Lie | None = None
    source: MemorySource = field(default_factory=MemorySource)
    places: dict[ContainerId, Place] = field(default_factory=dict)
    agent: AgentProcess | None = None
    lives: int = 0
    back_at_s: float = 0.0
    # Until then it hears nothing.
    deaf_until_s: float = 0.0
    # How far its wall clock is off.
    wall_error_s: float = 0.0

    @property
    def is_working(self) -> bool:
        """Whether its agent has a job, begun or not."""
        return self.agent is not None and not self.agent.is_idle

    def replicas(self) -> list[ContainerReplica]:
        """Reports of all replicas that exist."""
        return [place.report() for place in self.places.values() if place.replica.exists]


class World:
    """All that a run changes, and the processes that start and die in it."""

    def __init__(
        self,
        setup: Setup,
        rng: random.Random,
        *,
        parts: Parts | None = None,
        marks: Counter[str] | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        self.setup = setup
        self.rng = rng
        self.parts = parts or Parts()
        self.marks = marks if marks is not None else Counter()
        self.trace = Trace(setup.lines())
        self.now_s = EPOCH_S
        memory = MemoryJobStore()
        self.open_store = open_store or (lambda: nullcontext(memory))
        self.containers = setup.containers
        self.written = setup.written
        self.observer = WriteObserver(setup.written, setup.commits)
        self.ledger = Ledger(setup.rules, lambda: self.now_s)
        # How far the wall clock of the controller's machine is off.
        self.wall_error_s = 0.0
        self.nodes = {
            name: Node(name, f"{name}.cluster:9{number}00", setup.lies.get(name))
            for number, name in enumerate(setup.disks)
        }
        self.by_address = {node.address: node for node in self.nodes.values()}
        for name, disk in setup.disks.items():
            for container_id, stored in disk.items():
                self.add_replica(self.nodes[name], container_id, stored).replica.scan()
        # Heartbeats and their answers under way.
        self.requests: list[Message] = []
        self.answers: list[Message] = []
        self.jobs_made = 0
        self.host: ControllerProcess | None = None
        self.host_back_at_s = self.leads_again_at_s = self.now_s
        self.start_what_is_due()

    def add_replica(self, node: Node, container_id: ContainerId, stored: MemoryReplica) -> Place:
        """The datanode holds the container from now on."""
        replica = self.parts.replica(node.name, stored, self.observer)
        replica.refuses_gaps = self.parts.refuse_gaps
        self.observer.appears(replica)
        node.source.replicas[container_id] = stored
        node.places[container_id] = Place(node, container_id, replica)
        return node.places[container_id]

    def places(self) -> list[Place]:
        """Every replica, also those that are deleted."""
        return [place for node in self.nodes.values() for place in node.places.values()]

    def holders(self, container_id: ContainerId) -> list[Place]:
        """The replicas of a container that exist, by the datanode's name."""
        places = [
            place
            for place in self.places()
            if place.container_id == container_id and place.replica.exists
        ]
        return sorted(places, key=lambda place: place.node.name)

    def blocks_of(self, container_id: ContainerId) -> list[BlockId]:
        """The blocks that clients wrote to a container."""
        return _blocks_of(self.written, container_id)

    def stored_jobs(self) -> set[str]:
        """IDs of the jobs in the store, whether the controller runs or not."""
        if self.host is not None:
            return {job.job_id for job in self.host.store.jobs()}
        with self.open_store() as store:
            return {job.job_id for job in store.jobs()}

    def happens(self, fault: Fault) -> bool:
        """Draw whether a fault happens now."""
        return self.rng.random() < self.setup.chances.get(fault, 0.0)

    def start_what_is_due(self) -> None:
        """Processes that died come back after a while."""
        if self.host is None and self.now_s >= self.host_back_at_s:
            self.host = ControllerProcess(
                self.parts,
                self.open_store,
                self.setup.rules,
                self.ledger,
                self._new_job_id,
                wall_s=lambda: self.now_s + self.wall_error_s,
                monotonic_s=lambda: self.now_s,
            )
            self.ledger.starts(self.host.controller)
            term = self.host.leadership.value
            self.note(EventKind.NETWORK, f"the controller starts in term {term}")
            self.marks["jobs outlived it"] += bool(self.host.active())
            self.marks["controller started by another clock"] += self.wall_error_s != 0
        host = self.host
        if host and host.leadership.value is None and self.now_s >= self.leads_again_at_s:
            host.leadership.value = host.store.next_term()
        for node in self.nodes.values():
            if node.agent is None and self.now_s >= node.back_at_s:
                node.lives += 1
                node.agent = AgentProcess(
                    node.name,
                    node.lives,
                    self.parts,
                    replicas_per_report=self.setup.replicas_per_report,
                    born_at_s=self.now_s,
                )

    def _new_job_id(self) -> JobId:
        self.jobs_made += 1
        job_id = JobId(f"job{self.jobs_made}")
        self.ledger.creates(job_id)
        return job_id

    def delete_blocks(self, place: Place, crash_after: Sequence[int] = ()) -> None:
        """One replica carries out the cluster's deletions, or dies after one of so many
        steps of one.
        """
        replica = place.replica
        if not replica.exists or place.node.agent is None:
            return
        for block_id in sorted(self.observer.deleted):
            if block_id not in replica.stored.records:
                continue
            text = f"{place.node.name} deletes block {block_id}"
            self.note(EventKind.DELETION, text, place.container_id, block_id)
            self.marks["block deleted in repair"] += place.run is not None
            replica.pending_deletes.add(block_id)
            steps = self.rng.choice(crash_after) if crash_after else None
            self.observer.looks(replica)
            try:
                replica.delete_block(block_id, crash_after=steps)
            except ContainerStateError:
                # A real one deletes no blocks while it is UNHEALTHY.
                replica.pending_deletes.discard(block_id)
                continue
            except CrashError:
                self.crash_agent(place.node)
                self.observer.changes(replica)
                return
            self.observer.deletes(replica, block_id)

    def crash_agent(self, node: Node) -> None:
        """The agent dies with all its runs, and starts again after a while."""
        if node.agent is None:
            return
        self.note(EventKind.CRASH, f"{node.name} crashes")
        self.marks["agent crashed"] += not node.agent.is_idle
        node.agent = None
        node.back_at_s = self.now_s + self.rng.choice((0.0, 0.0, 3.0, 20.0))
        for place in node.places.values():
            place.slow_scan = None
            place.replica.restart()

    def crash_controller(self) -> None:
        """The controller dies; what it stored outlives it."""
        if self.host is None:
            return
        self.note(EventKind.CRASH, "the controller crashes")
        self.marks["controller crashed"] += 1
        self.ledger.dies()
        self.host.close()
        self.host = None
        self.host_back_at_s = self.now_s + self.rng.choice((0.0, 5.0, 20.0))

    def note(
        self,
        kind: EventKind,
        text: str,
        container_id: ContainerId | None = None,
        block_id: BlockId | None = None,
    ) -> None:
        """Put an event into the trace, at the clock's time."""
        subject = Subject(container_id, block_id)
        self.trace.events.append(TraceEvent(self.now_s - EPOCH_S, kind, text, subject))

    @contextmanager
    def explained(self, title: str) -> Iterator[None]:
        """A failure within prints the scenario that led to it."""
        try:
            yield
        except ViolationError as violation:
            violation.scenario = [f"{title}:", *self.trace.lines(violation.subject)]
            raise
        except Exception as error:
            error.add_note("\n".join([f"{title}:", *self.trace.lines(Subject())]))
            raise


def _blocks_of(written: Written, container_id: ContainerId) -> list[BlockId]:
    return [b for b, (record, _) in written.items() if record.container_id == container_id]
