"""A cluster in one thread: the real controller and real reconciliations over replicas
in memory, driven by a seed.

Each step one thing happens, chosen by the seed: a heartbeat or its answer arrives
(late, twice, or never), time goes by at the controller, a request of a repair is
carried out, its answer arrives, a replica is damaged, an agent or the controller dies
half-way through a write, a block or a container is deleted, a replica is imported, a
client reads, a scan ends that began long ago. An observer knows what was written to the
cluster and what was told to the controller, and holds every change against it. A storm
of faults is followed by peace, in which the controller alone must bring every job to
its end, and one job must make the replicas of a container equal or name what cannot be.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from dnagent.heartbeat import (
    DEADLINE_S,
    CancelCommand,
    Command,
    JobReport,
    ReconcileCommand,
    ScanCommand,
    answer_of,
)
from dnagent.jobs import options_of, outcome_message, progress_message, refusal_of
from merkle.checksum import WIDTH, ChecksumType, window_checksums
from merkle.columns import state_fingerprint
from merkle.errors import ReconcileError
from merkle.outcome import FINAL_VERDICTS, EvidenceKind, OutcomeState, RepairOutcome, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.errors import ContainerNotFoundError, StaleTreeError
from protos import controller_pb2 as pb
from repair.requests import (
    BcsIdAdvanced,
    Cancelled,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    PeerRequest,
    ReportOutcome,
    Request,
    RequestFailed,
    Rescan,
)
from repair.runner import execute_local, execute_remote
from runtime.errors import BusyError, OperationInterruptedError
from scm.jobs import Job, JobId, JobState, OrderState, task_of
from scm.policy import RootComparison, roots
from scm.registry import Liveness
from tests.support.cluster_control import (
    AgentProcess,
    ControllerProcess,
    Ledger,
    Message,
    OpenStore,
    Parts,
    Run,
    ViolationError,
    chosen_rules,
    hold,
)
from tests.support.cluster_reports import MemoryJobStore
from tests.support.memory import CrashError, RepairableReplica
from tests.support.peers import Evil, EvilPeer, MemoryPeer, MemoryReplica, MemorySource

T = TypeVar("T")

CONTAINERS = (ContainerId(7), ContainerId(8))
NAMED = frozenset({Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.UNKNOWN})

# What must happen in some seed, lest the simulation prove nothing about it.
MARKS = frozenset({
    # repairs
    "agent crashed", "write torn", "answer lost", "answer late", "request to a dead agent",
    "cancelled", "no peer",
    "container deleted in repair", "block deleted in repair", "repair met a deleted block",
    "tombstone adopted",
    "client read good", "client read bad", "bit flipped", "file truncated", "file lost",
    "record lost", "tree lost",
    "tree unreadable", "peer lied", "disk failed", "slow scan refused as stale", "slow scan stored",
    "first scan",
    "repair met a stale tree", "two sources for one chunk", "record taken in without fetching",
    "block added",
    "record without data taken in", "hole named", "several rounds", "returned to service",
    "commit advanced",
    "unrecoverable named", "conflict named", "unverifiable named", "unreachable named",
    "file shrank under repair",
    "healed", "put together from pieces", "nothing to be had named",
    "request for a deleted container", "replica imported", "replica imported in repair",
    "two containers",
    # heartbeats and commands
    "heartbeat lost", "heartbeat doubled", "heartbeat overtaken", "answer to a heartbeat lost",
    "given up waiting",
    "answer nobody waits for", "heartbeat of an earlier life", "full report", "incremental report",
    "removal told",
    "report in parts", "command sent again", "command for a container that is gone",
    "late command", "cancel before the beginning", "cancel of nothing", "end told twice",
    # the controller
    "controller crashed", "controller crashed before a save", "controller crashed after a save",
    "jobs outlived it",
    "lead lost", "lead lost with jobs under way", "datanode stale", "datanode dead",
    "agent restarted in an order",
    "order expired", "order given up", "order refused", "attempts used up", "job asked for",
    "job refused",
    "job of automatic mode", "visit", "job done", "job partial", "job failed", "job cancelled",
    "backed off",
    "hopeless and resting", "healed by automatic mode", "further round",
})  # fmt: skip


class Promise(Enum):
    """What one job must bring: every chunk is whole somewhere; only its pieces are; or
    something is lost.
    """

    WHOLE = "whole"
    PIECES = "pieces"
    LOST = "lost"


def write_once(
    seed: int, container_id: ContainerId, rng: random.Random
) -> dict[BlockId, tuple[BlockRecord, bytes]]:
    """What clients wrote: blocks of a few chunks of a few windows, of every checksum
    type; no two of one ID.
    """
    written = {}
    for number in range(1, rng.randint(2, 5)):
        block_id = BlockId(container_id * 100 + number * 10)
        checksum_type = rng.choice(
            (
                ChecksumType.CRC32,
                ChecksumType.CRC32C,
                ChecksumType.MD5,
                ChecksumType.SHA256,
                ChecksumType.NONE,
            )
            if rng.random() < 0.2
            else (ChecksumType.CRC32, ChecksumType.CRC32C, ChecksumType.MD5)
        )
        window_bytes = rng.choice((8, 16))
        chunk_bytes = window_bytes * rng.randint(2, 4)
        length = rng.randint(1, 3 * chunk_bytes)
        data = random.Random(f"{seed}/{block_id}").randbytes(length)
        chunks = tuple(
            chunk_record(data[offset : offset + chunk_bytes], offset, checksum_type, window_bytes)
            for offset in range(0, length, chunk_bytes)
        )
        written[block_id] = (
            BlockRecord(container_id, block_id, number, chunks, (("TYPE", "KEY"),)),
            data,
        )
    return written


def chunk_record(
    data: bytes, offset: int, checksum_type: ChecksumType, window_bytes: int
) -> ChunkRecord:
    """The record of a chunk, as its writer made it."""
    joined, width = window_checksums(data, checksum_type, window_bytes), WIDTH[checksum_type]
    entries = tuple(joined[i : i + width] for i in range(0, len(joined), width or 1))
    return ChunkRecord(offset, len(data), checksum_type, window_bytes, entries, f"chunk_{offset}")


class Watch:
    """Knows what was written and deleted, and judges every change that a replica is
    about to make.
    """

    def __init__(self, written: Mapping[BlockId, tuple[BlockRecord, bytes]]) -> None:
        self.written = written
        self.deleted: set[BlockId] = set()
        # Blocks hit by a fault since they were last written: what a repair proved of
        # them may be gone.
        self.faulted: set[tuple[str, BlockId]] = set()

    def writes(
        self, replica: RepairableReplica, block_id: BlockId, offset: int, new: bytes
    ) -> None:
        """inv-I4, I5, I7: only good bytes, only where bytes are bad, never past a gap
        or into a deleted block.
        """
        record, data = self.written[block_id]
        file = replica.stored.files.get(block_id, bytearray())
        faulted = (replica.name, block_id) in self.faulted
        hold(replica.exists, "a write into a deleted container")
        hold(block_id not in replica.remembered, f"block {block_id} is deleted and written again")
        hold(
            offset <= len(file),
            f"a write at {offset} behind the end {len(file)} of block {block_id}",
        )
        hold(
            new == data[offset : offset + len(new)],
            f"bytes written to block {block_id} that nobody wrote",
        )
        for chunk in record.chunks:
            for index in range(len(chunk.checksums)):
                start, size = chunk.window(index)
                start += chunk.offset
                if offset < start + size and start < offset + len(new):
                    good = bytes(file[start : start + size]) == data[start : start + size]
                    # A second flip of one bit mends it while we are about to.
                    hold(
                        faulted or not good,
                        f"good window at {start} of block {block_id} overwritten",
                    )

    def puts(self, replica: RepairableReplica, record: BlockRecord) -> None:
        """inv-I5, inv-I7: no deleted block, no recorded chunk lost or changed, no chunk
        without its bytes.
        """
        block_id = record.block_id
        before = replica.stored.records.get(block_id)
        true, data = self.written[block_id]
        file = replica.stored.files.get(block_id, bytearray())
        hold(block_id not in replica.remembered, f"block {block_id} is deleted and recorded again")
        hold(
            record.bcs_id <= true.bcs_id,
            f"commit {record.bcs_id} of block {block_id} was never made",
        )
        for chunk in before.chunks if before else ():
            hold(
                record.by_offset.get(chunk.offset) == chunk,
                f"a recorded chunk of block {block_id} changed",
            )
        end = 0
        for chunk in record.chunks:
            hold(
                chunk == true.by_offset.get(chunk.offset),
                f"block {block_id} gets a chunk that nobody wrote",
            )
            if before is None or chunk.offset not in before.by_offset:
                whole = bytes(file[chunk.offset : chunk.end]) == data[chunk.offset : chunk.end]
                faulted = (replica.name, block_id) in self.faulted
                hold(
                    whole or faulted, f"block {block_id} gets a record of bytes that are not there"
                )
                hold(
                    chunk.checksum_type is not ChecksumType.NONE,
                    "a record without checksums was taken in",
                )
                hold(chunk.offset == end, f"block {block_id} gets a hole")
            end = chunk.end
        if record.bcs_id > (before.bcs_id if before else 0):
            whole = [c.offset for c in record.chunks] == [c.offset for c in true.chunks]
            hold(
                whole or before is not None,
                f"commit of block {block_id} advanced past what is there",
            )

    def stores(self, replica: RepairableReplica, tree: ContainerTree) -> None:
        """inv-I5: a deletion, once in the tree, stays."""
        kept = {block.block_id for block in tree.blocks if block.deleted}
        hold(kept >= replica.remembered.keys(), "a tombstone was forgotten")


class Forger(EvilPeer):
    """Sends bad bytes, and records that fit them; its tree is as it should be."""

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        honest = super().records(container_id, block_ids)
        return {
            block_id: replace(record, chunks=self._forged(container_id, record))
            for block_id, record in honest.items()
        }

    def _forged(self, container_id: ContainerId, record: BlockRecord) -> tuple[ChunkRecord, ...]:
        file = self.source.replicas[container_id].files.get(record.block_id, bytearray())
        bad = bytes(byte ^ 0x55 for byte in file)
        return tuple(
            chunk_record(bad[c.offset : c.end], c.offset, c.checksum_type, c.bytes_per_checksum)
            for c in record.chunks
            if c.offset < len(bad)
        )


@dataclass(slots=True, eq=False)
class Place:
    """One datanode's replica of one container."""

    node: "Node"
    container_id: ContainerId
    replica: RepairableReplica
    slow_scan: tuple[ContainerTree, bytes] | None = None
    # What was reported last, and what it was made of.
    looked_at: tuple[object, ContainerReplica] | None = None

    @property
    def run(self) -> Run | None:
        return self.node.agent.runs.get(self.container_id) if self.node.agent else None

    def report(self) -> ContainerReplica:
        """What dnagent.store says of a replica."""
        stored = self.replica.stored
        key = (
            stored.tree, len(self.replica.remembered), stored.state, stored.bcs_id,
            len(stored.records),
            sum(map(len, stored.files.values())),
        )  # fmt: skip
        if self.looked_at is None or self.looked_at[0] != key:
            tree, generation = self.replica.known_tree()
            assert tree is not None
            known = generation and tree.data_checksum is not None
            replica = ContainerReplica(
                self.node.name,
                self.container_id,
                stored.state,
                tree.data_checksum if known else None,
                stored.bcs_id,
                used_bytes=sum(map(len, stored.files.values())),
                block_count=len(stored.records),
                fingerprint=state_fingerprint(tree) if known else b"",
            )
            self.looked_at = key, replica
        return self.looked_at[1]


@dataclass(slots=True, eq=False)
class Node:
    """One datanode: its disk, and the agent on it while that is alive."""

    name: PeerId
    address: str
    source: MemorySource = field(default_factory=MemorySource)
    places: dict[ContainerId, Place] = field(default_factory=dict)
    evil: Evil | None = None
    forges: bool = False
    agent: AgentProcess | None = None
    lives: int = 0
    back_at_s: float = 0.0

    def replicas(self) -> list[ContainerReplica]:
        return [place.report() for place in self.places.values() if place.replica.exists]


# How likely a fault is at a step, or at a request.
_CHANCES = {
    "loss": 0.10,
    "crash": 0.04,
    "tear": 0.05,
    "damage": 0.08,
    "delete": 0.012,
    "delete container": 0.004,
    "replicate": 0.05,
    "disk": 0.02,
    "cancel": 0.015,
    "heartbeat loss": 0.10,
    "heartbeat double": 0.15,
    "controller crash": 0.012,
    "save": 0.02,
    "lead": 0.006,
    "pause": 0.003,
}
STEP_S = 1.0
INTERVAL_S = 5.0
ATTEMPTS_TO_SETTLE = 20_000
# Within so long a time of peace every job that was under way ends; the deadline of
# commands is not needed for it.
SETTLED_AFTER_S = 900.0
# Longer rests are cut short by somebody who asks.
PATIENCE_S = 3_000.0


class Cluster:
    """The world of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        parts: Parts | None = None,
        marks: Counter[str] | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.marks = marks if marks is not None else Counter()
        self.trace: list[str] = []
        self.now_s = 1_000_000.0
        self._parts = parts or Parts()
        memory = MemoryJobStore()
        self._open_store = open_store or (lambda: nullcontext(memory))
        self.containers = CONTAINERS[: 1 + (self.rng.random() < 0.2)]
        self.marks["two containers"] += len(self.containers) > 1
        self.written = {
            block_id: block
            for container_id in self.containers
            for block_id, block in write_once(seed, container_id, self.rng).items()
        }
        self.watch = Watch(self.written)
        self.ledger = Ledger()
        names = [PeerId(f"dn{i}") for i in range(self.rng.choice((3, 3, 3, 4, 5, 7)))]
        self.nodes = {
            name: Node(name, f"{name}.cluster:9{number}00") for number, name in enumerate(names)
        }
        self._by_address = {node.address: node for node in self.nodes.values()}
        for node in self.nodes.values():
            for container_id in self.containers:
                node.places[container_id] = self._place(
                    node, container_id, self._whole(container_id)
                )
                node.places[container_id].replica.scan()
        # Many seeds have most faults off, so that the rare ones are not drowned by the
        # common.
        self._chances = {
            name: often * self.rng.choice((0, 0, 0.5, 1, 2)) for name, often in _CHANCES.items()
        }
        if self.rng.random() < 0.4:
            for name in self.rng.sample(names, self.rng.randint(1, len(names) - 2)):
                self.nodes[name].evil = self.rng.choice(tuple(Evil))
                self.nodes[name].forges = self.rng.random() < 0.2
        self._liars = any(node.evil for node in self.nodes.values())
        self._fetches_max = self.rng.randint(1, 4)
        self._return_to_service = self.rng.random() < 0.6
        self._runs_max = self.rng.choice((1, 2))
        self._replicas_per_report = self.rng.choice((1, 50_000))
        # Who starts jobs: the controller, somebody who asks, or both.
        self._automatic, self._asked_often = self.rng.choice(
            ((True, 0.0), (True, 0.05), (False, 0.15))
        )
        self._rules = chosen_rules(self.rng, automatic=self._automatic)
        self._jobs_made = 0
        self._ticks_next = False
        self._all_is_told_at_s = 0.0
        self._requests: list[Message] = []
        self._answers: list[Message] = []
        self.host: ControllerProcess | None = None
        self._host_back_at_s = self._leads_again_at_s = self.now_s
        self._start_what_is_due()

    def _whole(self, container_id: ContainerId) -> MemoryReplica:
        written = {
            b: block for b, block in self.written.items() if block[0].container_id == container_id
        }
        stored = MemoryReplica(
            container_id, bcs_id=max(record.bcs_id for record, _ in written.values())
        )
        for block_id, (record, data) in written.items():
            stored.records[block_id] = record
            stored.files[block_id] = bytearray(data)
        if self.rng.random() < 0.2:
            self._shorten(stored)
        return stored

    def _place(self, node: Node, container_id: ContainerId, stored: MemoryReplica) -> Place:
        replica = RepairableReplica(node.name, stored, self.watch)
        replica.refuses_gaps = self._parts.refuse_gaps
        node.source.replicas[container_id] = stored
        return Place(node, container_id, replica)

    def _shorten(self, stored: MemoryReplica) -> None:
        """Make it a replica that was closed before the last chunk of a block came (a
        quasi-closed one).
        """
        block_id = self.rng.choice(sorted(stored.records))
        record = stored.records[block_id]
        if len(record.chunks) > 1:
            stored.records[block_id] = replace(record, chunks=record.chunks[:-1], bcs_id=0)
            del stored.files[block_id][record.chunks[-1].offset :]
            stored.bcs_id = min(other.bcs_id for other in stored.records.values())

    def _places(self) -> list[Place]:
        return [place for node in self.nodes.values() for place in node.places.values()]

    # ---- storm

    def storm(self, steps: int) -> None:
        """Faults of all kinds between and during repairs."""
        for _ in range(self.rng.randint(1, 5)):
            self._damage(self.rng.choice(self._places()))
        for place in self._places():
            if place.replica.exists and self.rng.random() < 0.8:
                place.replica.scan()
        for _ in range(steps):
            self._storm_step()
            self._check()

    def _storm_step(self) -> None:
        self.now_s += self.rng.expovariate(1 / STEP_S)
        self._start_what_is_due()
        place = self.rng.choice(self._places())
        for chance, act in (
            ("damage", self._damage),
            ("crash", self._crash_agent_of),
            ("delete", self._delete_somewhere),
            ("delete container", self._delete_container),
            ("replicate", self._replicate),
            ("cancel", self._cancel_some_job),
            ("controller crash", self._crash_controller_of),
            ("lead", self._lose_lead),
            ("pause", self._pause),
        ):
            if self.rng.random() < self._chances[chance]:
                act(place)
        if self.rng.random() < self._asked_often:
            self._ask_for_job(place.container_id)
        match self.rng.randrange(20):
            case 0:
                self._client_reads(place)
            case 1:
                self._slow_scan(place)
            case 2 | 3:
                self._tick()
            case 4 | 5 | 6:
                for _ in range(self.rng.randint(1, 3)):
                    self._beat_somewhere()
            case 7 | 8 | 9 | 10 | 11:
                for _ in range(self.rng.randint(1, 5)):
                    self._carry_message(faults=True)
            case _:
                for _ in range(self.rng.randint(1, 6)):
                    self._work_somewhere(faults=True)

    def _start_what_is_due(self) -> None:
        """Processes that died come back after a while."""
        if self.host is None and self.now_s >= self._host_back_at_s:
            self.host = ControllerProcess(
                self._parts,
                self._open_store,
                self._rules,
                self.ledger,
                self._new_job_id,
                lambda: self.now_s,
            )
            self._say(f"controller starts in term {self.host.leadership.value}")
            self.marks["jobs outlived it"] += bool(self.host.active())
        if (
            self.host
            and self.host.leadership.value is None
            and self.now_s >= self._leads_again_at_s
        ):
            self.host.leadership.value = self.host.store.next_term()
        for node in self.nodes.values():
            if node.agent is None and self.now_s >= node.back_at_s:
                node.lives += 1
                node.agent = AgentProcess(
                    node.name,
                    node.lives,
                    self._parts,
                    replicas_per_report=self._replicas_per_report,
                    born_at_s=self.now_s,
                )

    def _new_job_id(self) -> JobId:
        self._jobs_made += 1
        return JobId(f"job{self._jobs_made}")

    def _pause(self, _: Place) -> None:
        """Nobody is heard of for a while, as when a switch is restarted."""
        self.now_s += self.rng.choice((15.0, 60.0, 100.0, 250.0))
        self._tick()

    # ---- heartbeats and commands

    def _beat_somewhere(self) -> None:
        ready = [node for node in self.nodes.values() if self._may_beat(node)]
        if ready:
            self._beat(self.rng.choice(ready))

    def _may_beat(self, node: Node) -> bool:
        """Not while a heartbeat is under way, unless it was waited for for too long."""
        agent = node.agent
        return agent is not None and (
            agent.sent is None or self.now_s - agent.sent_at_s >= DEADLINE_S
        )

    def _beat(self, node: Node) -> None:
        agent = node.agent
        assert agent is not None
        self.marks["given up waiting"] += agent.sent is not None
        replicas = node.replicas()
        self.ledger.reports(replicas)
        running = [
            JobReport(
                run.command.job_id,
                False,
                progress_message(run.command.job_id, place, run.machine.progress),
            )
            for place, run in agent.runs.items()
        ]
        heartbeat = agent.heartbeats.next(replicas, running)
        agent.sent, agent.sent_at_s = heartbeat, self.now_s
        self.marks["full report" if heartbeat.full else "incremental report"] += bool(
            heartbeat.replicas
        )
        self.marks["removal told"] += bool(heartbeat.removed)
        self.marks["report in parts"] += heartbeat.full and len(heartbeat.replicas) < len(replicas)
        datanode = pb.Datanode(datanode_id=node.name, hostname=node.name, address=node.address)
        raw = self._parts.request_of(
            heartbeat, datanode=datanode, incarnation=agent.incarnation
        ).SerializeToString()
        self._requests.append(
            Message(node.name, agent.incarnation, heartbeat.sequence, raw, self.now_s)
        )

    def _carry_message(self, *, faults: bool) -> None:
        """One of the messages under way arrives, or is lost, or arrives and stays under
        way.
        """
        ready = [
            m for m in (*self._requests, *self._answers) if m.due_s <= self.now_s or not faults
        ]
        if not ready:
            return
        message = self.rng.choice(ready)
        box = self._requests if message in self._requests else self._answers
        box.remove(message)
        if (
            faults
            and box is self._requests
            and self.rng.random() < self._chances["heartbeat double"]
        ):
            self.marks["heartbeat doubled"] += 1
            box.append(replace(message, due_s=self.now_s + self.rng.choice((0.0, 10.0, 40.0))))
        lost = faults and self.rng.random() < self._chances["heartbeat loss"]
        if box is self._answers:
            self.marks["answer to a heartbeat lost"] += lost
            if not lost:
                self._hear_answer(message)
        elif lost or self.host is None:
            self.marks["heartbeat lost"] += 1
        else:
            self._hear_heartbeat(message, faults=faults)

    def _hear_heartbeat(self, message: Message, *, faults: bool) -> None:
        assert self.host is not None
        node = self.nodes[message.peer]
        self.marks["heartbeat of an earlier life"] += (
            bool(node.agent) and node.agent.incarnation != message.incarnation
        )
        self.marks["heartbeat overtaken"] += any(
            (other.peer, other.incarnation) == (message.peer, message.incarnation)
            and other.sequence < message.sequence
            for other in self._requests
        )
        if faults and self.rng.random() < self._chances["save"]:
            self.host.store.dies_before_save = self.rng.random() < 0.5
            self.host.store.dies_after_save = not self.host.store.dies_before_save
        answer = self._of_controller(lambda host: host.heartbeat(message.raw))
        if answer is not None:
            self._answers.append(replace(message, raw=answer, sent_at_s=self.now_s))

    def _of_controller(self, act: Callable[[ControllerProcess], T]) -> T | None:
        """What the controller answers; None where it is not there, or dies of it."""
        host = self.host
        if host is None:
            return None
        try:
            answer = act(host)
        except CrashError:
            self.marks["controller crashed before a save"] += host.store.dies_before_save
            self.marks["controller crashed after a save"] += host.store.dies_after_save
            self._crash_controller()
            return None
        host.store.dies_before_save = host.store.dies_after_save = False
        self.ledger.check(host.controller, self.containers)
        return answer

    def _hear_answer(self, message: Message) -> None:
        node = self.nodes[message.peer]
        agent = node.agent
        if agent is None or agent.sent is None or (agent.incarnation, agent.sent.sequence) != (
            message.incarnation, message.sequence
        ):  # fmt: skip
            self.marks["answer nobody waits for"] += 1
            return
        answer = answer_of(pb.HeartbeatResponse.FromString(message.raw))
        for envelope in answer.envelopes:
            if isinstance(envelope.command, ReconcileCommand):
                told = agent.told.setdefault(envelope.command.job_id, set())
                self.marks["command sent again"] += envelope.command_id in told
                told.add(envelope.command_id)
        ended = agent.sent.progress if agent.sent else ()
        commands = agent.heartbeats.answered(agent.sent, answer)
        agent.sent = None
        self.marks["end told twice"] += any(p.is_final for p in ended) and answer.full_report_wanted
        self.marks["late command"] += (
            bool(commands) and self.now_s - message.sent_at_s > DEADLINE_S / 2
        )
        for command in commands:
            self._obey(node, agent, command)

    def _obey(self, node: Node, agent: AgentProcess, command: Command) -> None:
        match command:
            case ReconcileCommand():
                self._say(f"{node.name} is told of {command.job_id}")
                try:
                    if agent.jobs.admit(command):
                        agent.waiting.append(command)
                except BusyError as error:
                    self._refuse(node, agent, command, error, "refused")
            case CancelCommand(job_id):
                self._cancel_job(node, agent, job_id)
            case ScanCommand(container_id):
                if node.places[container_id].replica.exists:
                    node.places[container_id].replica.scan()

    def _cancel_job(self, node: Node, agent: AgentProcess, job_id: str) -> None:
        command = agent.jobs.find(job_id)
        if command is None:
            self.marks["cancel of nothing"] += 1
        elif command in agent.waiting:
            self.marks["cancel before the beginning"] += 1
            agent.waiting.remove(command)
            agent.jobs.forget(command)
            self._refuse(
                node,
                agent,
                command,
                OperationInterruptedError("cancelled before it began"),
                "interrupted",
            )
        else:
            self._deliver(node.places[command.container_id], Cancelled("the job was cancelled"))

    def _refuse(
        self,
        node: Node,
        agent: AgentProcess,
        command: ReconcileCommand,
        error: ReconcileError,
        state: str,
    ) -> None:
        self._say(f"{node.name} refuses {command.job_id}: {error.message}")
        self._told_end(node, agent, refusal_of(command, error, state))

    def _told_end(self, node: Node, agent: AgentProcess, progress: JobReport) -> None:
        self.ledger.ended(node.name, progress)
        agent.heartbeats.ended(progress)

    def _tick(self) -> None:
        host = self.host
        if host is None:
            return
        self._of_controller(lambda host: host.tick())
        if self.host is not None:
            statuses = self.host.controller.datanodes(self.now_s)
            self.marks["datanode stale"] += any(
                status.liveness is Liveness.STALE for status in statuses
            )
            self.marks["datanode dead"] += any(
                status.liveness is Liveness.DEAD for status in statuses
            )

    def _ask_for_job(self, container_id: ContainerId) -> JobId | None:
        outcome = self._of_controller(lambda host: host.reconcile(container_id))
        if outcome is None:
            return None
        self.marks["job asked for" if outcome.job_id else "job refused"] += 1
        return JobId(outcome.job_id) if outcome.job_id else None

    def _cancel_some_job(self, _: Place) -> None:
        active = self.host.active() if self.host else []
        if active:
            job_id = self.rng.choice(active).job_id
            self._of_controller(lambda host: host.cancel(job_id))

    def _lose_lead(self, _: Place) -> None:
        """Another controller leads for a while."""
        if self.host is not None and self.host.leadership.value is not None:
            self.host.leadership.value = None
            self._leads_again_at_s = self.now_s + self.rng.choice((1.0, 10.0, 50.0))
            self.marks["lead lost"] += 1
            self.marks["lead lost with jobs under way"] += bool(self.host.active())

    def _crash_controller_of(self, _: Place) -> None:
        self._crash_controller()

    def _crash_controller(self) -> None:
        if self.host is None:
            return
        self._say("controller crashes")
        self.marks["controller crashed"] += 1
        self.ledger.dies()
        self.host.close()
        self.host = None
        self._host_back_at_s = self.now_s + self.rng.choice((0.0, 5.0, 20.0))

    # ---- repairs

    def _work_somewhere(self, *, faults: bool) -> None:
        """Begin a job that waits, or carry out one request or deliver one answer,
        whichever the seed says.
        """
        agents = [node for node in self.nodes.values() if node.agent and not node.agent.is_idle]
        if not agents:
            self._carry_message(faults=faults)
            return
        node = self.rng.choice(agents)
        agent = node.agent
        assert agent is not None
        if agent.waiting and len(agent.runs) < self._runs_max:
            self._begin(node, agent, agent.waiting.popleft())
        else:
            place = node.places[self.rng.choice(sorted(agent.runs))]
            run = place.run
            assert run is not None
            self._work(place, run, faults=faults)

    def _begin(self, node: Node, agent: AgentProcess, command: ReconcileCommand) -> None:
        place = node.places[command.container_id]
        agent.begun[command.job_id] += 1
        again = agent.begun[command.job_id] > len(agent.told[command.job_id])
        hold(not again, f"{node.name} begins {command.job_id} twice for one command (CR-052)")
        job_id, _ = task_of(command.job_id)
        hold(job_id in self._stored(), f"{node.name} works for {job_id}, which nobody remembers")
        if not place.replica.exists:
            self.marks["command for a container that is gone"] += 1
            agent.jobs.forget(command)
            self._refuse(
                node,
                agent,
                command,
                ContainerNotFoundError("there is no such container"),
                "refused",
            )
            return
        peers = [self._by_address[peer.address].name for peer in command.peers]
        assert peers == [peer.peer for peer in command.peers]
        options = options_of(command, self._fetches_max, self._return_to_service)
        run = Run(
            command,
            options,
            self._parts.machine(command.container_id, node.name, sorted(peers), options),
        )
        hold(
            place.run is None, f"{node.name} repairs container {command.container_id} twice at once"
        )
        agent.runs[command.container_id] = run
        self._note(place, f"begins {command.job_id} with {len(peers)} peers")
        own = {(node.name, block_id) for block_id in self._blocks_of(command.container_id)}
        self.watch.faulted -= own
        run.requests = _unreported(run.machine.start())

    def _stored(self) -> set[str]:
        """Jobs in the store, whoever runs."""
        if self.host is not None:
            return {job.job_id for job in self.host.store.jobs()}
        with self._open_store() as store:
            return {job.job_id for job in store.jobs()}

    def _blocks_of(self, container_id: ContainerId) -> list[BlockId]:
        return [b for b, (record, _) in self.written.items() if record.container_id == container_id]

    def _work(self, place: Place, run: Run, *, faults: bool) -> None:
        hold(bool(run.requests or run.events), f"{place.node.name} waits for nothing")
        if run.events and (not run.requests or self.rng.random() < 0.5):
            at = self.rng.randrange(len(run.events))
            if at:
                self.marks["answer late"] += 1
            self._deliver(place, run.events.pop(at))
        else:
            request = run.requests.pop(self.rng.randrange(len(run.requests)))
            try:
                run.events.append(self._carry_out(place, run, request, faults))
            except CrashError:
                self.marks["write torn"] += 1
                self._crash_agent_of(place)

    def _carry_out(self, place: Place, run: Run, request: Request, faults: bool) -> Event:
        replica = place.replica
        match request:
            case FetchTree() | FetchRecords() | FetchWindows():
                return self._ask(place, run, request, faults)
            case ReportOutcome():
                raise AssertionError
            case _:
                if isinstance(request, Rescan):
                    self.marks["first scan"] += not run.fetched_from
                replica.failing_disk = faults and self.rng.random() < self._chances["disk"]
                if faults and self.rng.random() < self._chances["tear"]:
                    replica.tear = lambda length: self.rng.randrange(length + 1)
                before = _held(replica)
                event = execute_local(request, replica)
                replica.tear = None
                _hold_kept(before, _held(replica))
                self.marks["disk failed"] += replica.failing_disk and isinstance(
                    event, RequestFailed
                )
                if isinstance(event, RequestFailed):
                    self.marks["repair met a deleted block"] += event.code == "block_not_found"
                    self.marks["repair met a stale tree"] += event.code == "tree_stale"
                    self.marks["file shrank under repair"] += event.code == "chunk_gap"
                elif isinstance(event, BcsIdAdvanced):
                    self.marks["commit advanced"] += 1
                return event

    def _ask(self, place: Place, run: Run, request: PeerRequest, faults: bool) -> Event:
        target = self.nodes[request.peer]
        unavailable = RequestFailed(request, "peer_unavailable", "", True)
        if faults and self.rng.random() < self._chances["loss"]:
            self.marks["answer lost"] += 1
            return unavailable
        if target.agent is None:
            self.marks["request to a dead agent"] += 1
            return unavailable
        if isinstance(request, FetchWindows):
            run.fetched_from.setdefault((request.block_id, request.chunk.offset), set()).add(
                request.peer
            )
        if faults and target.evil is not None:
            self.marks["peer lied"] += 1
            kind, evil = (Forger, Evil.BAD_BYTES) if target.forges else (EvilPeer, target.evil)
            peer: MemoryPeer = kind(target.name, target.source, evil, self.rng.randrange(1 << 30))
        else:
            peer = MemoryPeer(target.name, target.source)
        if not target.places[place.container_id].replica.exists:
            self.marks["request for a deleted container"] += 1
            return RequestFailed(request, "peer_refused", "container_not_found", False)
        return execute_remote(request, place.container_id, peer, prove=self._parts.prove)

    def _deliver(self, place: Place, event: Event) -> None:
        run = place.run
        assert run is not None
        self._note(place, f"hears {type(event).__name__}")
        run.requests += _unreported(run.machine.step(event))
        if run.machine.outcome is not None:
            self._ended(place, run, run.machine.outcome)

    def _ended(self, place: Place, run: Run, outcome: RepairOutcome) -> None:
        self._note(
            place,
            f"ends {run.command.job_id} {outcome.state.value} {outcome.verdict}"
            f" {outcome.error_code}",
        )
        agent = place.node.agent
        assert agent is not None
        del agent.runs[place.container_id]
        agent.jobs.forget(run.command)
        message = outcome_message(run.command.job_id, outcome)
        self._told_end(place.node, agent, JobReport(run.command.job_id, True, message))
        progress = outcome.progress
        kinds = {evidence.kind for evidence in outcome.evidence}
        for mark, fired in (
            ("tombstone adopted", progress.tombstones_adopted),
            ("block added", progress.blocks_added),
            (
                "record taken in without fetching",
                progress.blocks_added and not progress.bytes_fetched,
            ),
            ("record without data taken in", progress.blocks_added and progress.bytes_fetched),
            ("several rounds", progress.rounds > 1),
            ("unrecoverable named", outcome.verdict is Verdict.UNRECOVERABLE),
            ("conflict named", outcome.verdict is Verdict.CONFLICT),
            ("hole named", "hole" in kinds),
            ("unverifiable named", "unverifiable" in kinds),
            ("unreachable named", "source_unreachable" in kinds),
            ("no peer", outcome.error_code == "no_peer"),
            ("cancelled", outcome.state is OutcomeState.INTERRUPTED),
            (
                "two sources for one chunk",
                any(len(sources) > 1 for sources in run.fetched_from.values()),
            ),
        ):
            self.marks[mark] += bool(fired)
        if (
            run.options.return_to
            and outcome.replica_state is run.options.return_to
            and progress.scans
        ):
            self.marks["returned to service"] += 1

    # ---- faults, and what else happens in a cluster

    def _crash_agent_of(self, place: Place) -> None:
        node = place.node
        if node.agent is None:
            return
        self._say(f"{node.name} crashes")
        self.marks["agent crashed"] += not node.agent.is_idle
        node.agent = None
        node.back_at_s = self.now_s + self.rng.choice((0.0, 0.0, 3.0, 20.0))
        for other in node.places.values():
            other.slow_scan = None

    def _delete_container(self, place: Place) -> None:
        holders = [other for other in self._places() if other.container_id == place.container_id]
        if (
            sum(other.replica.exists for other in holders) <= 2
            or not place.replica.exists
            or not place.node.agent
        ):
            return
        self._note(place, "loses the container")
        self.marks["container deleted in repair"] += place.run is not None
        if place.run is not None:
            self._deliver(place, Cancelled("the container is being deleted"))
            hold(place.run is None, "the deletion of a container did not end its repair (CR-057)")
        place.replica.delete_container()
        del place.node.source.replicas[place.container_id]

    def _replicate(self, place: Place) -> None:
        """The cluster has a replica copied to where there is none, as it is just now
        (CR-052).
        """
        sources = [
            other
            for other in self._places()
            if other.container_id == place.container_id
            and other.replica.exists
            and other.node.agent
        ]
        if place.replica.exists or not place.node.agent or not sources:
            return
        source = self.rng.choice(sources)
        self._note(place, f"imports the container from {source.node.name}")
        self.marks["replica imported"] += 1
        self.marks["replica imported in repair"] += any(other.run is not None for other in sources)
        stored = replace(
            source.replica.stored,
            records=dict(source.replica.stored.records),
            files={
                block_id: bytearray(file) for block_id, file in source.replica.stored.files.items()
            },
            # An archive of an older datanode has no tree: a scan makes one later.
            tree=source.replica.stored.tree if self.rng.random() < 0.7 else None,
        )
        imported = self._place(place.node, place.container_id, stored)
        tree, _ = imported.replica.known_tree()
        assert tree is not None
        imported.replica.remembered = {
            block.block_id: block for block in tree.blocks if block.deleted
        }
        place.node.places[place.container_id] = imported
        self.watch.faulted |= {
            (place.node.name, block_id) for block_id in self._blocks_of(place.container_id)
        }

    def _delete_somewhere(self, place: Place) -> None:
        """The cluster deletes a block; the replicas hear of it at different times
        (CR-052).
        """
        if not self.watch.deleted or self.rng.random() < 0.3:
            self.watch.deleted.add(self.rng.choice(list(self.written)))
        self._delete(place, crash=self.rng.random() < 0.3)

    def _delete(self, place: Place, *, crash: bool) -> None:
        replica = place.replica
        if not replica.exists or place.node.agent is None:
            return
        for block_id in sorted(self.watch.deleted):
            if block_id not in replica.stored.records:
                continue
            self._note(place, f"deletes block {block_id}")
            self.marks["block deleted in repair"] += place.run is not None
            replica.pending_deletes.add(block_id)
            try:
                replica.delete_block(block_id, crash_after=self.rng.randrange(4) if crash else None)
            except CrashError:
                self._crash_agent_of(place)
                return

    def _damage(self, place: Place) -> None:
        stored, rng = place.replica.stored, self.rng
        if not stored.files or not place.replica.exists:
            return
        block_id = rng.choice(sorted(stored.files))
        file = stored.files[block_id]
        kind = rng.choice(
            ("flip",) * 6
            + ("truncate", "lose file", "lose record", "lose tree", "break tree", "scan")
        )
        self._note(place, f"suffers {kind} in block {block_id}")
        if place.run is not None:
            self.watch.faulted.add((place.node.name, block_id))
        match kind:
            case "flip" if file:
                file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
                self.marks["bit flipped"] += 1
            case "truncate" if file:
                del file[rng.randrange(len(file)) :]
                self.marks["file truncated"] += 1
            case "lose file":
                del stored.files[block_id]
                self.marks["file lost"] += 1
            case "lose record" if block_id in stored.records:
                del stored.records[block_id]
                self.marks["record lost"] += 1
                if rng.random() < 0.5:
                    del stored.files[block_id]
            case "lose tree":
                stored.tree = None
                self.marks["tree lost"] += 1
            case "break tree":
                stored.tree = b"\x01\x02\x03"
                self.marks["tree unreadable"] += 1
            case _:
                pass
        if rng.random() < 0.5:
            place.replica.scan()

    def _damage_everywhere(self, container_id: ContainerId) -> None:
        """One chunk suffers on each replica, in another window if it has as many: then
        only pieces of it are left.

        One replica may have lost the block: it can have it back once another has put it
        together. And all but one may have lost the record, so that this one must be
        whole before any other can be.
        """
        block_id = self.rng.choice(self._blocks_of(container_id))
        chunk = max(self.written[block_id][0].chunks, key=lambda chunk: len(chunk.checksums))
        places = self._of(container_id)
        bereft = self.rng.choice((None, 0))
        sole = self.rng.choice((None, len(places) - 1))
        for number, place in enumerate(places):
            if number == bereft or sole not in (None, number):
                place.replica.stored.records.pop(block_id, None)
            if number == bereft:
                place.replica.stored.files.pop(block_id, None)
                continue
            offset, _ = chunk.window(number % max(1, len(chunk.checksums)))
            file = place.replica.stored.files.get(block_id, bytearray())
            if chunk.offset + offset < len(file):
                file[chunk.offset + offset] ^= 1
            self.watch.faulted.add((place.node.name, block_id))

    def _slow_scan(self, place: Place) -> None:
        """A background scan that began before other things happened, and ends after
        them.
        """
        if not place.replica.exists or place.node.agent is None:
            return
        if place.slow_scan is None:
            tree, _ = place.replica.examine()
            place.slow_scan = tree, place.replica.known_tree()[1]
            return
        (tree, generation), place.slow_scan = place.slow_scan, None
        try:
            place.replica.store_tree(tree, generation)
        except StaleTreeError:
            self.marks["slow scan refused as stale"] += 1
        else:
            self.marks["slow scan stored"] += 1

    def _client_reads(self, place: Place) -> None:
        """CR-053: good data or a checksum failure, never bad data that pass for
        good.
        """
        records = place.replica.stored.records
        if not records:
            return
        block_id = self.rng.choice(sorted(records))
        if records[block_id].chunks[0].checksum_type is ChecksumType.NONE:
            return
        file, data = (
            place.replica.stored.files.get(block_id, bytearray()),
            self.written[block_id][1],
        )
        for chunk in records[block_id].chunks:
            got = bytes(file[chunk.offset : chunk.end])
            observed = window_checksums(got, chunk.checksum_type, chunk.bytes_per_checksum)
            passes = len(got) == chunk.length_bytes and observed == b"".join(chunk.checksums)
            self.marks["client read good" if passes else "client read bad"] += 1
            hold(not passes or got == data[chunk.offset : chunk.end], "a client was given bad data")

    def _check(self) -> None:
        """inv-I3, I5, I6 by looking at the disks; I4 was held at each write."""
        for place in self._places():
            if not place.replica.remembered or self.rng.random() > 0.1:
                continue
            tree, _ = place.replica.known_tree()
            for block_id in place.replica.remembered:
                entry = tree.block(block_id) if tree else None
                hold(
                    entry is None or entry.deleted,
                    f"{place.node.name} brought block {block_id} back",
                )

    # ---- peace

    def heal(self) -> None:
        """Faults end; deletes are finished, everybody scans. The rest is the
        controller's.

        Raises:
            ViolationError: a job does not end; the controller does not know how the
                replicas are; they differ and nobody said why; or a further job would
                write again.
        """
        self._make_peace()
        self._settle()
        for container_id in self.containers:
            self._heal_container(container_id)
        self._hold_truth()
        self._tally()

    def _make_peace(self) -> None:
        self._say("peace begins")
        back_at_s = [
            self._host_back_at_s,
            self._leads_again_at_s,
            *(node.back_at_s for node in self.nodes.values()),
        ]
        self.now_s = max(self.now_s, *back_at_s)
        self._start_what_is_due()
        for node in self.nodes.values():
            node.evil = None
        if self.rng.random() < 0.15:
            self._damage_everywhere(self.rng.choice(self.containers))
        for place in self._places():
            place.slow_scan = None
            if not place.replica.exists:
                continue
            if self.rng.random() < 0.7:
                self._delete(place, crash=False)
            place.replica.pending_deletes.clear()
            place.replica.scan()

    def _peace_step(self) -> None:
        """Whatever can be done at once; else time goes by, everybody says what is new,
        and the controller ticks.
        """
        working = any(node.agent and not node.agent.is_idle for node in self.nodes.values())
        if self._requests or self._answers or working:
            self.now_s += 0.02
            if working and self.rng.random() < 0.7:
                self._work_somewhere(faults=False)
            else:
                self._carry_message(faults=False)
        elif self._ticks_next:
            self._ticks_next = False
            self._tick()
        else:
            self._ticks_next = True
            self.now_s += INTERVAL_S if self.host and self.host.active() else 50.0
            for node in self.nodes.values():
                if self._may_beat(node):
                    self._beat(node)
        self._check()

    def _until(self, done: Callable[[], bool], why: str, limit_s: float) -> None:
        until_s = self.now_s + limit_s
        for _ in range(ATTEMPTS_TO_SETTLE):
            if done():
                return
            hold(self.now_s < until_s, why)
            self._peace_step()
        raise ViolationError(why)

    def _settle(self) -> None:
        """Every job that is under way ends, and the controller hears of all that there
        is.
        """
        assert self.host is not None
        for node in self.nodes.values():
            # Whoever waits for an answer that was lost gives up.
            if node.agent and node.agent.sent:
                node.agent.sent_at_s -= DEADLINE_S
        self._until(
            lambda: not self._requests and not self._answers,
            "messages stay under way",
            SETTLED_AFTER_S,
        )
        # A dead agent's heartbeat that came late may have shut the living one out, for
        # as long as a silence counts.
        self._all_is_told_at_s = self.now_s
        for job in self.host.active():
            job_id = job.job_id
            ended = lambda: self._job(job_id).state.is_terminal  # noqa: B023, E731
            self._until(
                ended, f"{job_id} does not end, though nothing fails any more", SETTLED_AFTER_S
            )
        self._until(
            self._is_quiet, "the controller does not hear how the replicas are", SETTLED_AFTER_S
        )

    def _is_quiet(self) -> bool:
        assert self.host is not None
        return (
            not self._requests
            and not self._answers
            and not self.host.active()
            and all(self._is_heard(node.name) for node in self.nodes.values())
            and all(node.agent and node.agent.is_idle for node in self.nodes.values())
            and all(self._is_told(container_id) for container_id in self.containers)
        )

    def _is_heard(self, peer: PeerId) -> bool:
        assert self.host is not None
        if not self.host.controller.is_live(peer):
            return False
        age_s = self.host.controller.heartbeat_age_s(peer, self.now_s)
        return age_s < self.now_s - self._all_is_told_at_s

    def _is_told(self, container_id: ContainerId) -> bool:
        assert self.host is not None
        view = self.host.controller.container(container_id)
        truth = [place.report() for place in self._of(container_id)]
        return view is not None and list(view.replicas) == truth

    def _of(self, container_id: ContainerId) -> list[Place]:
        places = [
            place
            for place in self._places()
            if place.container_id == container_id and place.replica.exists
        ]
        return sorted(places, key=lambda place: place.node.name)

    def _job(self, job_id: JobId) -> Job:
        assert self.host is not None
        return self.host.controller.job(job_id)

    def _heal_container(self, container_id: ContainerId) -> None:
        """One job after another, until one has made the replicas equal or has named,
        twice, what cannot be.
        """
        places = self._of(container_id)
        promise = self._promise(places)
        needed = 0
        named = False
        for number in range(1, 4):
            job = self._next_job(container_id, promise)
            states = {order.peer: order.state for order in job.orders}
            everybody = {place.node.name: OrderState.DONE for place in places}
            hold(
                states == everybody,
                f"{job.job_id} is not done by all, though nothing fails: {job.detail}",
            )
            named = job.verdict in NAMED and not _only_unverifiable(job)
            if self._is_equal(places) and not named:
                needed = number
                break
            if named and number > 1:
                break
        if needed:
            self.marks["healed"] += 1
            self.marks["put together from pieces"] += promise is Promise.PIECES
            self._check_healed(places)
        else:
            self.marks["nothing to be had named"] += promise is Promise.LOST
            hold(named, "the replicas differ and no verdict says why (inv-I1)")
        hold(needed == 1 or promise is Promise.LOST, "one job was not enough (inv-I1)")
        self._hold_rest(container_id)
        before = [(place.replica.bytes_written, place.replica.puts) for place in places]
        self._end_of(self._asked(container_id))
        after = [(place.replica.bytes_written, place.replica.puts) for place in places]
        hold(before == after, "a finished job wrote again (inv-I8)")

    def _next_job(self, container_id: ContainerId, promise: Promise) -> Job:
        """The container's next job, at its end: the controller's own where it is to
        start one, else one asked for.
        """
        assert self.host is not None
        controller = self.host.controller
        view = controller.container(container_id)
        assert view is not None
        if not self._automatic or view.compared.comparison is not RootComparison.DIVERGED:
            return self._end_of(self._asked(container_id))
        visit = view.visit
        resting = visit is not None and visit.hopeless_roots == roots(view.replicas)
        far = visit is not None and visit.not_before_s > self.now_s + PATIENCE_S
        if resting or far:
            self.marks["hopeless and resting"] += resting
            # Only who was lied to may rest on a verdict that is not so.
            stands = promise is Promise.LOST or self._liars
            hold(far or stands, "the controller rests though what is lacking can be had")
            return self._end_of(self._asked(container_id))
        self.marks["backed off"] += (
            visit is not None and visit.not_before_s > self.now_s + INTERVAL_S
        )
        begun = lambda: self._active_job(container_id) is not None  # noqa: E731
        self._until(begun, "the controller does not take up a diverged container", 2 * PATIENCE_S)
        job_id = self._active_job(container_id)
        assert job_id is not None
        job = self._end_of(job_id)
        self.marks["healed by automatic mode"] += controller.container(
            container_id
        ).compared.comparison is (RootComparison.MATCH)
        return job

    def _active_job(self, container_id: ContainerId) -> JobId | None:
        assert self.host is not None
        return next(
            (job.job_id for job in self.host.active() if job.container_id == container_id), None
        )

    def _asked(self, container_id: ContainerId) -> JobId:
        job_id = self._ask_for_job(container_id)
        hold(
            job_id is not None,
            f"container {container_id} may not be reconciled, though nothing fails",
        )
        assert job_id is not None
        return job_id

    def _end_of(self, job_id: JobId) -> Job:
        """The job once it has ended and all is said; what it says of the replicas is
        so.
        """
        self._until(
            lambda: self._job(job_id).state.is_terminal, f"{job_id} does not end", SETTLED_AFTER_S
        )
        job = self._job(job_id)
        told = lambda: self._is_told(job.container_id)  # noqa: E731
        self._until(told, "the controller does not hear what was repaired", SETTLED_AFTER_S)
        hold(
            job.state in (JobState.DONE, JobState.PARTIAL),
            f"{job_id} is {job.state.value}: {job.detail}",
        )
        hold(
            (job.state is JobState.DONE) == (job.verdict not in FINAL_VERDICTS),
            f"{job_id} hides its verdict",
        )
        return job

    def _hold_rest(self, container_id: ContainerId) -> None:
        """A container that cannot be mended is not tried again and again."""
        assert self.host is not None
        view = self.host.controller.container(container_id)
        if not self._automatic or view is None or view.visit is None:
            return
        if view.visit.hopeless_roots != roots(view.replicas):
            return
        made = self._jobs_made
        until_s = min(view.visit.not_before_s, self.now_s + PATIENCE_S) + 150.0
        while self.now_s < until_s:
            self._peace_step()
        tried = [
            self._job(JobId(f"job{number}")) for number in range(made + 1, self._jobs_made + 1)
        ]
        hold(
            all(job.container_id != container_id for job in tried),
            "a hopeless container is tried again",
        )

    def _hold_truth(self) -> None:
        """inv-I12: what the controller says of the containers is what their replicas
        are.
        """
        assert self.host is not None
        for container_id in self.containers:
            self._until(
                lambda at=container_id: self._is_told(at), "reports do not arrive", SETTLED_AFTER_S
            )
            view = self.host.controller.container(container_id)
            assert view is not None
            states = {(replica.data_checksum, replica.fingerprint) for replica in view.replicas}
            if len(states) > 1:
                hold(
                    view.compared.comparison is RootComparison.DIVERGED,
                    "replicas that differ are not called diverged",
                )
            else:
                hold(
                    view.compared.comparison is not RootComparison.DIVERGED,
                    "replicas that agree are called diverged",
                )

    def _tally(self) -> None:
        """Note what became of the jobs of this seed."""
        for job in self.ledger.finished.values():
            self.marks[f"job {job.state.value.lower()}"] += 1
            self.marks["job of automatic mode"] += job.automatic
            self.marks["visit"] += job.reason == "visit"
            self.marks["further round"] += any(order.round > 1 for order in job.orders)
            for order in job.orders:
                self.marks["agent restarted in an order"] += order.attempts > 1
                self.marks["attempts used up"] += order.detail.startswith("agent restarted")
                self.marks["order refused"] += order.state is OrderState.REFUSED
                expired = order.state is OrderState.EXPIRED
                self.marks["order expired"] += expired and order.detail.startswith("no progress")
                self.marks["order given up"] += expired and "dead" in order.detail

    def _promise(self, places: list[Place]) -> Promise:
        """What peace must bring, by looking at all disks at once."""
        promise = Promise.WHOLE
        deleted = {block_id for place in places for block_id in place.replica.remembered}
        for block_id in self._blocks_of(places[0].container_id):
            if block_id in deleted:
                continue
            records = [place.replica.stored.records.get(block_id) for place in places]
            recorded = {
                chunk.offset: chunk for record in records if record for chunk in record.chunks
            }
            # Also those that outlived their record.
            files = [place.replica.stored.files.get(block_id, b"") for place in places]
            data = self.written[block_id][1]
            for offset, chunk in recorded.items():
                if chunk.checksum_type is ChecksumType.NONE:
                    continue
                copies = [bytes(file[offset : chunk.end]) for file in files]
                if any(copy == data[offset : chunk.end] for copy in copies):
                    continue
                promise = Promise.PIECES
                for index in range(len(chunk.checksums)):
                    start, size = chunk.window(index)
                    good = data[offset + start : offset + start + size]
                    if all(copy[start : start + size] != good for copy in copies):
                        return Promise.LOST
        return promise

    def _is_equal(self, places: list[Place]) -> bool:
        """Ozone keeps an entry for a live block without a byte left, and only on
        replicas that have its record.
        """
        states = set()
        for place in places:
            tree, _ = place.replica.known_tree()
            assert tree is not None
            blocks = [block for block in tree.blocks if block.deleted or block.chunks]
            states.add(state_fingerprint(ContainerTree.of(place.container_id, blocks)))
        return len(states) == 1

    def _check_healed(self, places: list[Place]) -> None:
        """Equal, and nothing lost: what any replica's tree calls live is whole on all
        of them.
        """
        for place in places:
            tree, _ = place.replica.known_tree()
            assert tree is not None
            for block in tree.blocks:
                if block.deleted:
                    continue
                file, data = (
                    place.replica.stored.files[block.block_id],
                    self.written[block.block_id][1],
                )
                for chunk in block.chunks:
                    end = chunk.offset + chunk.length_bytes
                    hold(
                        bytes(file[chunk.offset : end]) == data[chunk.offset : end],
                        "healed, but not whole",
                    )

    def _note(self, place: Place, text: str) -> None:
        self._say(f"{place.node.name} {text}, container {place.container_id}")

    def _say(self, text: str) -> None:
        self.trace.append(f"{self.now_s - 1_000_000:8.1f} {text}")


def _unreported(requests: list[Request]) -> list[Request]:
    return [request for request in requests if not isinstance(request, ReportOutcome)]


def _held(replica: RepairableReplica) -> dict[BlockId, tuple[bool, int]]:
    """Which blocks have a record, and how long their files are."""
    stored = replica.stored
    ids = stored.records.keys() | stored.files.keys()
    return {
        block_id: (block_id in stored.records, len(stored.files.get(block_id, b"")))
        for block_id in ids
    }


def _hold_kept(
    before: dict[BlockId, tuple[bool, int]], after: dict[BlockId, tuple[bool, int]]
) -> None:
    """inv-I6: only a delete transaction of the cluster takes anything away."""
    for block_id, (had_record, length) in before.items():
        has_record, length_now = after.get(block_id, (False, 0))
        hold(
            has_record >= had_record and length_now >= length,
            f"a repair took something of block {block_id} away",
        )


def _only_unverifiable(job: Job) -> bool:
    """Whether nothing is wrong but that some data have no checksums."""
    kinds = {evidence.kind for order in job.orders for evidence in order.progress.evidence}
    return job.verdict is Verdict.UNKNOWN and kinds == {EvidenceKind.UNVERIFIABLE.value}


def simulate(
    seed: int,
    *,
    parts: Parts | None = None,
    marks: Counter[str] | None = None,
    open_store: OpenStore | None = None,
    steps: int = 250,
) -> Cluster:
    """One seed from beginning to end."""
    cluster = Cluster(seed, parts=parts, marks=marks, open_store=open_store)
    try:
        cluster.storm(steps)
        cluster.heal()
    except Exception as error:
        error.add_note(f"seed {seed}; the last steps:\n  " + "\n  ".join(cluster.trace[-40:]))
        raise
    return cluster
