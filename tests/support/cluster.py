"""A cluster in one thread: real reconciliations over replicas in memory, driven by a seed, watched by an observer.

Each step one thing happens, chosen by the seed: a request is carried out, an answer arrives (late, or never), a
replica is damaged, an agent dies half-way through a write, a block or the container is deleted, a client reads, a scan
ends that began long ago. The observer knows what was written to the cluster and holds every change against it. A storm
of faults is followed by peace, in which one round must make the replicas equal or name what cannot be.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from dnagent.reconcile import Reconciliation
from dnagent.requests import (
    BcsIdAdvanced,
    Cancelled,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    Outcome,
    OutcomeState,
    PeerRequest,
    ReconcileOptions,
    Report,
    Request,
    RequestFailed,
    Rescan,
)
from dnagent.runner import Prove, carry_out_here, carry_out_there
from merkle.checksum import WIDTH, ChecksumType, window_checksums
from merkle.columns import state_fingerprint
from merkle.errors import StaleTreeError
from merkle.plan import EvidenceKind, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import prove
from tests.support.memory import CrashError, RepairableReplica
from tests.support.peers import Evil, EvilPeer, MemoryPeer, MemoryReplica, MemorySource

CONTAINER = ContainerId(7)
NAMED = frozenset({Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.UNKNOWN})

# What must happen in some seed, lest the simulation prove nothing about it.
MARKS = frozenset({
    "agent crashed", "write torn", "answer lost", "answer late", "request to a dead agent", "cancelled", "no peer",
    "container deleted in repair", "block deleted in repair", "repair met a deleted block", "tombstone adopted",
    "client read good", "client read bad", "bit flipped", "file truncated", "file lost", "record lost", "tree lost",
    "tree unreadable", "peer lied", "disk failed", "slow scan refused as stale", "slow scan stored", "first scan",
    "repair met a stale tree", "two sources for one chunk", "record taken in without fetching", "block added",
    "record without data taken in", "hole named", "several rounds", "returned to service", "commit advanced",
    "unrecoverable named", "conflict named", "unverifiable named", "unreachable named", "file shrank under repair",
    "healed in one round", "healed in a second round", "put together from pieces", "nothing to be had named",
})  # fmt: skip


class ViolationError(AssertionError):
    """An invariant does not hold."""


class Promise(Enum):
    """What one round must bring: every chunk is whole somewhere; only its pieces are; or something is lost."""

    WHOLE = "whole"
    PIECES = "pieces"
    LOST = "lost"


def write_once(seed: int, rng: random.Random) -> dict[BlockId, tuple[BlockRecord, bytes]]:
    """What clients wrote: blocks of a few chunks of a few windows, of every checksum type."""
    written = {}
    for number in range(1, rng.randint(2, 5)):
        block_id = BlockId(number * 10)
        checksum_type = rng.choice(
            (ChecksumType.CRC32, ChecksumType.CRC32C, ChecksumType.MD5, ChecksumType.SHA256, ChecksumType.NONE)
            if rng.random() < 0.2
            else (ChecksumType.CRC32, ChecksumType.CRC32C, ChecksumType.MD5)
        )
        window_bytes = rng.choice((8, 16))
        chunk_bytes = window_bytes * rng.randint(2, 4)
        length = rng.randint(1, 3 * chunk_bytes)
        data = random.Random(f"{seed}/{number}").randbytes(length)
        chunks = tuple(
            chunk_record(data[offset : offset + chunk_bytes], offset, checksum_type, window_bytes)
            for offset in range(0, length, chunk_bytes)
        )
        written[block_id] = (BlockRecord(CONTAINER, block_id, number, chunks, (("TYPE", "KEY"),)), data)
    return written


def chunk_record(data: bytes, offset: int, checksum_type: ChecksumType, window_bytes: int) -> ChunkRecord:
    """The record of a chunk, as its writer made it."""
    joined, width = window_checksums(data, checksum_type, window_bytes), WIDTH[checksum_type]
    entries = tuple(joined[i : i + width] for i in range(0, len(joined), width or 1))
    return ChunkRecord(offset, len(data), checksum_type, window_bytes, entries, f"chunk_{offset}")


class Watch:
    """Knows what was written and deleted, and judges every change that a replica is about to make."""

    def __init__(self, written: Mapping[BlockId, tuple[BlockRecord, bytes]]) -> None:
        self.written = written
        self.deleted: set[BlockId] = set()
        # Blocks hit by a fault since they were last written: what a repair proved of them may be gone.
        self.faulted: set[tuple[str, BlockId]] = set()

    def writes(self, replica: RepairableReplica, block_id: BlockId, offset: int, new: bytes) -> None:
        """inv-I4, I5, I7: only good bytes, only where bytes are bad, never past a gap or into a deleted block."""
        record, data = self.written[block_id]
        file = replica.stored.files.get(block_id, bytearray())
        faulted = (replica.name, block_id) in self.faulted
        self._hold(replica.exists, "a write into a deleted container")
        self._hold(block_id not in replica.remembered, f"block {block_id} is deleted and written again")
        self._hold(offset <= len(file), f"a write at {offset} behind the end {len(file)} of block {block_id}")
        self._hold(new == data[offset : offset + len(new)], f"bytes written to block {block_id} that nobody wrote")
        for chunk in record.chunks:
            for index in range(len(chunk.checksums)):
                start, size = chunk.window(index)
                start += chunk.offset
                if offset < start + size and start < offset + len(new):
                    good = bytes(file[start : start + size]) == data[start : start + size]
                    # A second flip of one bit mends it while we are about to.
                    self._hold(faulted or not good, f"good window at {start} of block {block_id} overwritten")

    def puts(self, replica: RepairableReplica, record: BlockRecord) -> None:
        """inv-I5, inv-I7: no deleted block, no recorded chunk lost or changed, no chunk without its bytes."""
        block_id = record.block_id
        before = replica.stored.records.get(block_id)
        true, data = self.written[block_id]
        file = replica.stored.files.get(block_id, bytearray())
        self._hold(block_id not in replica.remembered, f"block {block_id} is deleted and recorded again")
        self._hold(record.bcs_id <= true.bcs_id, f"commit {record.bcs_id} of block {block_id} was never made")
        for chunk in before.chunks if before else ():
            self._hold(record.by_offset.get(chunk.offset) == chunk, f"a recorded chunk of block {block_id} changed")
        end = 0
        for chunk in record.chunks:
            self._hold(chunk == true.by_offset.get(chunk.offset), f"block {block_id} gets a chunk that nobody wrote")
            if before is None or chunk.offset not in before.by_offset:
                whole = bytes(file[chunk.offset : chunk.end]) == data[chunk.offset : chunk.end]
                faulted = (replica.name, block_id) in self.faulted
                self._hold(whole or faulted, f"block {block_id} gets a record of bytes that are not there")
                self._hold(chunk.checksum_type is not ChecksumType.NONE, "a record without checksums was taken in")
                self._hold(chunk.offset == end, f"block {block_id} gets a hole")
            end = chunk.end
        if record.bcs_id > (before.bcs_id if before else 0):
            whole = [c.offset for c in record.chunks] == [c.offset for c in true.chunks]
            self._hold(whole or before is not None, f"commit of block {block_id} advanced past what is there")

    def stores(self, replica: RepairableReplica, tree: ContainerTree) -> None:
        """inv-I5: a deletion, once in the tree, stays."""
        kept = {block.block_id for block in tree.blocks if block.deleted}
        self._hold(kept >= replica.remembered.keys(), "a tombstone was forgotten")

    @staticmethod
    def _hold(holds: bool, text: str) -> None:
        if not holds:
            raise ViolationError(text)


class Forger(EvilPeer):
    """Sends bad bytes, and records that fit them; its tree is as it should be."""

    def records(self, container_id: ContainerId, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        honest = super().records(container_id, block_ids)
        return {block_id: replace(record, chunks=self._forged(record)) for block_id, record in honest.items()}

    def _forged(self, record: BlockRecord) -> tuple[ChunkRecord, ...]:
        file = self.source.replicas[CONTAINER].files.get(record.block_id, bytearray())
        bad = bytes(byte ^ 0x55 for byte in file)
        return tuple(
            chunk_record(bad[c.offset : c.end], c.offset, c.checksum_type, c.bytes_per_checksum)
            for c in record.chunks
            if c.offset < len(bad)
        )


@dataclass(slots=True, eq=False)
class Node:
    """One datanode: its disk, and the agent on it while that is alive."""

    name: PeerId
    replica: RepairableReplica
    source: MemorySource
    evil: Evil | None = None
    forges: bool = False
    machine: Reconciliation | None = None
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outcome: Outcome | None = None
    slow_scan: tuple[ContainerTree, bytes] | None = None
    fetched_from: dict[tuple[BlockId, int], set[PeerId]] = field(default_factory=dict)


# How likely a fault is at a step, or at a request.
_CHANCES = {
    "loss": 0.10,
    "crash": 0.03,
    "tear": 0.05,
    "damage": 0.10,
    "delete": 0.02,
    "delete container": 0.004,
    "disk": 0.02,
    "cancel": 0.01,
}


class Cluster:
    """The world of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        machine: type[Reconciliation] = Reconciliation,
        prove_with: Prove = prove,
        marks: Counter[str] | None = None,
        refuse_gaps: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.marks = marks if marks is not None else Counter()
        self.trace: list[str] = []
        self._machine = machine
        self._prove = prove_with
        self._refuse_gaps = refuse_gaps
        self.written = write_once(seed, self.rng)
        self.watch = Watch(self.written)
        names = [PeerId(f"dn{i}") for i in range(self.rng.choice((3, 3, 3, 4, 5, 7)))]
        self.nodes = {name: self._node(name) for name in names}
        # Many seeds have most faults off, so that the rare ones are not drowned by the common.
        self._chances = {name: often * self.rng.choice((0, 0, 0.5, 1, 2)) for name, often in _CHANCES.items()}
        if self.rng.random() < 0.4:
            for name in self.rng.sample(names, self.rng.randint(1, len(names) - 2)):
                self.nodes[name].evil = self.rng.choice(tuple(Evil))
                self.nodes[name].forges = self.rng.random() < 0.2
        self._options = ReconcileOptions(
            fetches_max=self.rng.randint(1, 4),
            return_to=self.rng.choice((None, ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)),
            # Without the last scan a bug that it would hide shows.
            spare_scan=bool(seed % 2),
        )

    def _node(self, name: PeerId) -> Node:
        stored = MemoryReplica(CONTAINER, bcs_id=max(record.bcs_id for record, _ in self.written.values()))
        for block_id, (record, data) in self.written.items():
            stored.records[block_id] = record
            stored.files[block_id] = bytearray(data)
        if self.rng.random() < 0.2:
            self._shorten(stored)
        replica = RepairableReplica(name, stored, self.watch)
        replica.refuses_gaps = self._refuse_gaps
        replica.scan()
        return Node(name, replica, MemorySource(stored))

    def _shorten(self, stored: MemoryReplica) -> None:
        """Make it a replica that was closed before the last chunk of a block came (a quasi-closed one)."""
        block_id = self.rng.choice(sorted(stored.records))
        record = stored.records[block_id]
        if len(record.chunks) > 1:
            stored.records[block_id] = replace(record, chunks=record.chunks[:-1], bcs_id=0)
            del stored.files[block_id][record.chunks[-1].offset :]
            stored.bcs_id = min(other.bcs_id for other in stored.records.values())

    def storm(self, steps: int) -> None:
        """Faults of all kinds between and during repairs."""
        for _ in range(self.rng.randint(1, 5)):
            self._damage(self.rng.choice(list(self.nodes.values())))
        for node in self.nodes.values():
            if node.replica.exists and self.rng.random() < 0.8:
                node.replica.scan()
        for _ in range(steps):
            self._storm_step()
            self._check()

    def _storm_step(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        for chance, act in (
            ("damage", self._damage),
            ("crash", self._crash),
            ("delete", self._delete_somewhere),
            ("delete container", self._delete_container),
            ("cancel", self._cancel),
        ):
            if self.rng.random() < self._chances[chance]:
                act(node)
        match self.rng.randrange(10):
            case 0:
                self._client_reads(node)
            case 1:
                self._slow_scan(node)
            case _ if node.machine is None:
                self._start(node)
            case _:
                self._work(node, faults=True)

    def _start(self, node: Node) -> None:
        if not node.replica.exists:
            return
        others = [name for name in self.nodes if name != node.name]
        peers = self.rng.sample(others, self.rng.randint(1, len(others))) if self.rng.random() < 0.3 else others
        node.machine = self._machine(CONTAINER, node.name, peers, self._options)
        node.fetched_from.clear()
        self._note(node, f"starts with {len(peers)} peers")
        self.watch.faulted -= {place for place in self.watch.faulted if place[0] == node.name}
        node.requests = self._unreported(node, node.machine.start())

    def _unreported(self, node: Node, requests: list[Request]) -> list[Request]:
        return [request for request in requests if not isinstance(request, Report)]

    def _work(self, node: Node, *, faults: bool) -> None:
        """Carry out one request or deliver one answer, whichever the seed says."""
        if node.machine is None:
            return
        if node.events and (not node.requests or self.rng.random() < 0.5):
            at = self.rng.randrange(len(node.events))
            if at:
                self.marks["answer late"] += 1
            self._deliver(node, node.events.pop(at))
        elif node.requests:
            request = node.requests.pop(self.rng.randrange(len(node.requests)))
            try:
                node.events.append(self._carry_out(node, request, faults))
            except CrashError:
                self.marks["write torn"] += 1
                self._crash(node)

    def _carry_out(self, node: Node, request: Request, faults: bool) -> Event:
        match request:
            case FetchTree() | FetchRecords() | FetchWindows():
                return self._ask(node, request, faults)
            case Report():
                raise AssertionError
            case _:
                if isinstance(request, Rescan):
                    self.marks["first scan"] += node.machine is not None and not node.fetched_from
                node.replica.failing_disk = faults and self.rng.random() < self._chances["disk"]
                if faults and self.rng.random() < self._chances["tear"]:
                    node.replica.tear = lambda length: self.rng.randrange(length + 1)
                before = _held(node.replica)
                event = carry_out_here(request, node.replica)
                node.replica.tear = None
                _hold_kept(before, _held(node.replica))
                self.marks["disk failed"] += node.replica.failing_disk and isinstance(event, RequestFailed)
                if isinstance(event, RequestFailed):
                    self.marks["repair met a deleted block"] += event.code == "block_not_found"
                    self.marks["repair met a stale tree"] += event.code == "tree_stale"
                    self.marks["file shrank under repair"] += event.code == "chunk_gap"
                elif isinstance(event, BcsIdAdvanced):
                    self.marks["commit advanced"] += 1
                return event

    def _ask(self, node: Node, request: PeerRequest, faults: bool) -> Event:
        target = self.nodes[request.peer]
        unavailable = RequestFailed(request, "peer_unavailable", "", True)
        if faults and self.rng.random() < self._chances["loss"]:
            self.marks["answer lost"] += 1
            return unavailable
        if isinstance(request, FetchWindows):
            node.fetched_from.setdefault((request.block_id, request.chunk.offset), set()).add(request.peer)
        if faults and target.evil is not None:
            self.marks["peer lied"] += 1
            kind, evil = (Forger, Evil.BAD_BYTES) if target.forges else (EvilPeer, target.evil)
            peer: MemoryPeer = kind(target.name, target.source, evil, self.rng.randrange(1 << 30))
        else:
            peer = MemoryPeer(target.name, target.source)
        if not target.replica.exists:
            self.marks["request to a dead agent"] += 1
            return RequestFailed(request, "peer_refused", "container_not_found", False)
        return carry_out_there(request, CONTAINER, peer, prove=self._prove)

    def _deliver(self, node: Node, event: Event) -> None:
        assert node.machine is not None
        self._note(node, f"hears {type(event).__name__}")
        node.requests += self._unreported(node, node.machine.step(event))
        if node.machine.outcome is not None:
            self._ended(node, node.machine.outcome)

    def _ended(self, node: Node, outcome: Outcome) -> None:
        self._note(node, f"ends {outcome.state.value} {outcome.verdict} {outcome.error_code}")
        node.outcome, node.machine = outcome, None
        node.requests, node.events = [], []
        progress = outcome.progress
        kinds = {evidence.kind.value for evidence in outcome.evidence}
        for mark, fired in (
            ("tombstone adopted", progress.tombstones_adopted),
            ("block added", progress.blocks_added),
            ("record taken in without fetching", progress.blocks_added and not progress.bytes_fetched),
            ("record without data taken in", progress.blocks_added and progress.bytes_fetched),
            ("several rounds", progress.rounds > 1),
            ("unrecoverable named", outcome.verdict is Verdict.UNRECOVERABLE),
            ("conflict named", outcome.verdict is Verdict.CONFLICT),
            ("hole named", "hole" in kinds),
            ("unverifiable named", "unverifiable" in kinds),
            ("unreachable named", "source_unreachable" in kinds),
            ("no peer", outcome.error_code == "no_peer"),
            ("cancelled", outcome.state is OutcomeState.INTERRUPTED),
            ("two sources for one chunk", any(len(sources) > 1 for sources in node.fetched_from.values())),
        ):
            self.marks[mark] += bool(fired)
        if outcome.replica_state is self._options.return_to and progress.scans:
            self.marks["returned to service"] += 1

    def _crash(self, node: Node) -> None:
        if node.machine is None:
            return
        self._note(node, "crashes")
        self.marks["agent crashed"] += 1
        node.machine = None
        node.requests, node.events, node.slow_scan = [], [], None

    def _cancel(self, node: Node) -> None:
        if node.machine is not None:
            self._deliver(node, Cancelled("someone asked"))

    def _delete_container(self, node: Node) -> None:
        holders = [other for other in self.nodes.values() if other.replica.exists]
        if len(holders) <= 2 or not node.replica.exists:
            return
        self._note(node, "loses the container")
        self.marks["container deleted in repair"] += node.machine is not None
        if node.machine is not None:
            self._deliver(node, Cancelled("the container is being deleted"))
            _hold(node.machine is None, "the deletion of a container did not end its repair (CR-057)")
        node.replica.delete_container()
        node.source.replicas.clear()

    def _delete_somewhere(self, node: Node) -> None:
        """The cluster deletes a block; the replicas hear of it at different times (CR-052)."""
        if not self.watch.deleted or self.rng.random() < 0.3:
            self.watch.deleted.add(self.rng.choice(list(self.written)))
        self._delete(node, crash=self.rng.random() < 0.3)

    def _delete(self, node: Node, *, crash: bool) -> None:
        if not node.replica.exists:
            return
        for block_id in sorted(self.watch.deleted):
            if block_id not in node.replica.stored.records:
                continue
            self._note(node, f"deletes block {block_id}")
            self.marks["block deleted in repair"] += node.machine is not None
            node.replica.pending_deletes.add(block_id)
            try:
                node.replica.delete_block(block_id, crash_after=self.rng.randrange(4) if crash else None)
            except CrashError:
                self._crash(node)
                return

    def _damage(self, node: Node) -> None:
        stored, rng = node.replica.stored, self.rng
        if not stored.files or not node.replica.exists:
            return
        block_id = rng.choice(sorted(stored.files))
        file = stored.files[block_id]
        kind = rng.choice(("flip",) * 6 + ("truncate", "lose file", "lose record", "lose tree", "break tree", "scan"))
        self._note(node, f"suffers {kind} in block {block_id}")
        if node.machine is not None:
            self.watch.faulted.add((node.name, block_id))
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
            node.replica.scan()

    def _slow_scan(self, node: Node) -> None:
        """A background scan that began before other things happened, and ends after them."""
        if not node.replica.exists:
            return
        if node.slow_scan is None:
            tree, _ = node.replica.examine()
            node.slow_scan = tree, node.replica.known_tree()[1]
            return
        (tree, generation), node.slow_scan = node.slow_scan, None
        try:
            node.replica.store_tree(tree, generation)
        except StaleTreeError:
            self.marks["slow scan refused as stale"] += 1
        else:
            self.marks["slow scan stored"] += 1

    def _client_reads(self, node: Node) -> None:
        """CR-053: good data or a checksum failure, never bad data that pass for good."""
        records = node.replica.stored.records
        if not records:
            return
        block_id = self.rng.choice(sorted(records))
        if records[block_id].chunks[0].checksum_type is ChecksumType.NONE:
            return
        file, data = node.replica.stored.files.get(block_id, bytearray()), self.written[block_id][1]
        for chunk in records[block_id].chunks:
            got = bytes(file[chunk.offset : chunk.end])
            observed = window_checksums(got, chunk.checksum_type, chunk.bytes_per_checksum)
            passes = len(got) == chunk.length_bytes and observed == b"".join(chunk.checksums)
            self.marks["client read good" if passes else "client read bad"] += 1
            _hold(not passes or got == data[chunk.offset : chunk.end], "a client was given bad data")

    def _check(self) -> None:
        """inv-I3, I5, I6 by looking at the disks; I4 was held at each write."""
        for node in self.nodes.values():
            for block_id in node.replica.remembered:
                tree, _ = node.replica.known_tree() if self.rng.random() < 0.1 else (None, b"")
                entry = tree.block(block_id) if tree else None
                _hold(entry is None or entry.deleted, f"{node.name} brought block {block_id} back")

    def heal(self) -> None:
        """Faults end; everybody scans, finishes the cluster's deletes, and reconciles once with all others.

        Raises:
            ViolationError: the replicas differ and nobody said why, or a further round would write again.
        """
        for node in self.nodes.values():
            self._crash(node)
            node.evil = None
            node.slow_scan = None
        nodes = [node for node in self.nodes.values() if node.replica.exists]
        for node in nodes:
            if self.rng.random() < 0.7:
                self._delete(node, crash=False)
            node.replica.pending_deletes.clear()
            node.replica.scan()
        promise = self._promise(nodes)
        rounds_needed = 0
        named: list[Outcome] = []
        for number in range(1, 4):
            outcomes = self._round(nodes, concurrent=self.rng.random() < 0.5)
            named = [outcome for outcome in outcomes if outcome.verdict in NAMED and not _only_unverifiable(outcome)]
            if self._is_equal(nodes) and not named:
                rounds_needed = number
                break
            if named and number > 1:
                break
        if rounds_needed:
            self.marks["healed in one round" if rounds_needed == 1 else "healed in a second round"] += 1
            self.marks["put together from pieces"] += promise is Promise.PIECES
            self._check_healed(nodes)
        else:
            self.marks["nothing to be had named"] += promise is Promise.LOST
            _hold(bool(named), "the replicas differ and no outcome says why (inv-I1)")
        _hold(rounds_needed == 1 or promise is not Promise.WHOLE, "one round was not enough (inv-I1)")
        _hold(rounds_needed in (1, 2) or promise is Promise.LOST, "what could be put together was not (inv-I1)")
        before = [(node.replica.bytes_written, node.replica.puts) for node in nodes]
        for outcome in self._round(nodes, concurrent=False):
            _hold(outcome.progress.bytes_written == 0, "a finished job wrote again (inv-I8)")
        after = [(node.replica.bytes_written, node.replica.puts) for node in nodes]
        _hold(before == after, "a finished job wrote again (inv-I8)")

    def _round(self, nodes: list[Node], *, concurrent: bool) -> list[Outcome]:
        """Every ordered pair exchanges once."""
        order = self.rng.sample(nodes, len(nodes))
        for node in nodes:
            node.outcome = None
        batches = [order] if concurrent else [[node] for node in order]
        for batch in batches:
            for node in batch:
                peers = [other.name for other in nodes if other is not node]
                node.machine = self._machine(CONTAINER, node.name, peers, self._options)
                node.fetched_from.clear()
                node.requests = self._unreported(node, node.machine.start())
            for _ in range(100_000):
                busy = [node for node in batch if node.machine is not None]
                if not busy:
                    break
                node = self.rng.choice(busy)
                _hold(bool(node.requests or node.events), f"{node.name} waits for nothing")
                self._work(node, faults=False)
        _hold(all(node.outcome is not None for node in nodes), "a reconciliation did not end")
        return [node.outcome for node in nodes if node.outcome is not None]

    def _promise(self, nodes: list[Node]) -> Promise:
        """What peace must bring, by looking at all disks at once."""
        promise = Promise.WHOLE
        deleted = {block_id for node in nodes for block_id in node.replica.remembered}
        for block_id in self.written.keys() - deleted:
            holders = [node.replica.stored for node in nodes if block_id in node.replica.stored.records]
            recorded = {chunk.offset: chunk for stored in holders for chunk in stored.records[block_id].chunks}
            data = self.written[block_id][1]
            for offset, chunk in recorded.items():
                if chunk.checksum_type is ChecksumType.NONE:
                    continue
                copies = [
                    bytes(stored.files.get(block_id, b"")[offset : chunk.end])
                    for stored in holders
                    if offset in stored.records[block_id].by_offset
                ]
                if any(copy == data[offset : chunk.end] for copy in copies):
                    continue
                promise = Promise.PIECES
                for index in range(len(chunk.checksums)):
                    start, size = chunk.window(index)
                    good = data[offset + start : offset + start + size]
                    if all(copy[start : start + size] != good for copy in copies):
                        return Promise.LOST
        return promise

    def _is_equal(self, nodes: list[Node]) -> bool:
        """Ozone keeps an entry for a live block without a byte left, and only on replicas that have its record."""
        states = set()
        for node in nodes:
            tree, _ = node.replica.known_tree()
            assert tree is not None
            blocks = [block for block in tree.blocks if block.deleted or block.chunks]
            states.add(state_fingerprint(ContainerTree.of(CONTAINER, blocks)))
        return len(states) == 1

    def _check_healed(self, nodes: list[Node]) -> None:
        """Equal, and nothing lost: what any replica's tree calls live is whole on all of them."""
        for node in nodes:
            tree, _ = node.replica.known_tree()
            assert tree is not None
            for block in tree.blocks:
                if block.deleted:
                    continue
                file, data = node.replica.stored.files[block.block_id], self.written[block.block_id][1]
                for chunk in block.chunks:
                    end = chunk.offset + chunk.length_bytes
                    _hold(bytes(file[chunk.offset : end]) == data[chunk.offset : end], "healed, but not whole")

    def _note(self, node: Node, text: str) -> None:
        self.trace.append(f"{node.name} {text}")


def _held(replica: RepairableReplica) -> dict[BlockId, tuple[bool, int]]:
    """Which blocks have a record, and how long their files are."""
    stored = replica.stored
    ids = stored.records.keys() | stored.files.keys()
    return {block_id: (block_id in stored.records, len(stored.files.get(block_id, b""))) for block_id in ids}


def _hold_kept(before: dict[BlockId, tuple[bool, int]], after: dict[BlockId, tuple[bool, int]]) -> None:
    """inv-I6: only a delete transaction of the cluster takes anything away."""
    for block_id, (had_record, length) in before.items():
        has_record, length_now = after.get(block_id, (False, 0))
        _hold(has_record >= had_record and length_now >= length, f"a repair took something of block {block_id} away")


def _only_unverifiable(outcome: Outcome) -> bool:
    """Whether nothing is wrong but that some data have no checksums."""
    return outcome.verdict is Verdict.UNKNOWN and {e.kind for e in outcome.evidence} == {EvidenceKind.UNVERIFIABLE}


def _hold(holds: bool, text: str) -> None:
    if not holds:
        raise ViolationError(text)


def simulate(
    seed: int,
    *,
    machine: type[Reconciliation] = Reconciliation,
    prove_with: Prove = prove,
    marks: Counter[str] | None = None,
    refuse_gaps: bool = True,
    steps: int = 150,
) -> Cluster:
    """One seed from beginning to end."""
    cluster = Cluster(seed, machine=machine, prove_with=prove_with, marks=marks, refuse_gaps=refuse_gaps)
    try:
        cluster.storm(steps)
        cluster.heal()
    except Exception as error:
        error.add_note(f"seed {seed}; the last steps:\n  " + "\n  ".join(cluster.trace[-25:]))
        raise
    return cluster
