"""What must hold in a simulated cluster at every moment, and what a run must reach.

Each judge here sees what a replica, an agent or the controller did, and knows what
clients wrote and what was reported. A broken invariant is a `ViolationError`, which
names the invariant, the container and the block, and carries the scenario that led to
it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum

from dnagent.heartbeat import JobReport
from merkle.checksum import ChecksumType, window_checksums
from merkle.errors import TreeRefusedError
from merkle.outcome import EvidenceKind, Verdict
from merkle.record import BlockRecord
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from protos.convert import tree_from_bytes
from scm.controller import Controller
from scm.jobs import Job, JobId, Order, OrderState, task_id
from scm.policy import RootComparison
from scm.rules import Rules
from tests.support.memory import RepairableReplica
from tests.support.peers import MemoryReplica
from tests.support.trace import Subject

# What clients wrote: the record and the bytes of each block.
Written = Mapping[BlockId, tuple[BlockRecord, bytes]]
# For each chunk of a block the commit that first recorded it.
Commits = Mapping[BlockId, Sequence[int]]
# Whether each block has a record, and how long its file is.
BlockSizes = Mapping[BlockId, tuple[bool, int]]

# What must happen in some seed, lest the simulation prove nothing about it.
MARKS = frozenset({
    # repairs
    "agent crashed", "write torn", "answer lost", "answer late", "request to a dead agent",
    "cancelled", "no peer",
    "container deleted in repair", "block deleted in repair", "block deleted before the tree",
    "repair met a deleted block",
    "tombstone adopted",
    "client read good", "client read bad", "bit flipped", "file truncated", "file lost",
    "record lost", "chunk shifted", "tree lost",
    "tree unreadable", "peer lied", "disk failed", "slow scan refused as stale", "slow scan stored",
    "first scan",
    "repair met a stale tree", "two sources for one chunk", "record taken in without fetching",
    "block added",
    "record without data taken in", "hole named", "overlap named", "several rounds",
    "returned to service",
    "damage found at the return to service", "commit advanced",
    "unrecoverable named", "conflict named", "unverifiable named", "unreachable named",
    "file shrank under repair",
    "healed", "put together from pieces", "nothing to be had named",
    "request for a deleted container", "replica imported", "replica imported in repair",
    "two containers",
    # heartbeats and commands
    "heartbeat lost", "heartbeat doubled", "heartbeat overtaken", "answer to a heartbeat lost",
    "given up waiting", "heard and hears nothing",
    "answer nobody waits for", "heartbeat of an earlier life", "full report", "incremental report",
    "removal told",
    "report in parts", "command sent again", "command for a container that is gone",
    "late command", "cancel before the beginning", "cancel of nothing", "end told twice",
    # the controller
    "controller crashed", "controller crashed before a save", "controller crashed after a save",
    "jobs outlived it",
    "clock set forwards", "clock set back", "controller started by another clock",
    "lead lost", "lead lost with jobs under way", "datanode stale", "datanode dead",
    "agent restarted in an order",
    "order expired", "order given up", "order refused", "attempts used up", "job asked for",
    "job refused",
    "job of automatic mode", "visit", "job done", "job partial", "job failed", "job cancelled",
    "backed off",
    "hopeless and resting", "healed by automatic mode", "further round",
})  # fmt: skip


# Sums of times are not exact.
CLOCK_ERROR_S = 1e-3

# How an order's end reads in an agent's message.
_ENDS = {
    OrderState.DONE: "done",
    OrderState.FAILED: "failed",
    OrderState.REFUSED: "refused",
    OrderState.INTERRUPTED: "interrupted",
}


class ViolationError(AssertionError):
    """An invariant does not hold; printed with the scenario that broke it."""

    def __init__(self, text: str, invariant: str = "", subject: Subject | None = None) -> None:
        super().__init__(f"{invariant}: {text}" if invariant else text)
        self.invariant = invariant
        self.subject = subject or Subject()
        self.scenario: list[str] = []

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.scenario])


def hold(holds: bool, text: str, invariant: str = "", subject: Subject | None = None) -> None:
    """Raise a violation of the invariant unless the claim holds."""
    if not holds:
        raise ViolationError(text, invariant, subject)


# A datanode's replica of a container.
ReplicaName = tuple[str, ContainerId]


class WriteObserver:
    """Knows what was written and deleted, and judges every change that a replica is
    about to make.
    """

    def __init__(self, written: Written, commits: Commits) -> None:
        self.written = written
        self.commits = commits
        self.deleted: set[BlockId] = set()
        # By replica: the blocks that its tree ever had as deleted, and those that it
        # deleted itself. Nothing that a replica forgets is forgotten here.
        self.tombstones: dict[ReplicaName, set[BlockId]] = {}
        self.gone: dict[ReplicaName, set[BlockId]] = {}
        # What each replica held when it was last looked at, for I6.
        self._held: dict[ReplicaName, BlockSizes] = {}
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
        subject = Subject(record.container_id, block_id)
        file = replica.stored.files.get(block_id, bytearray())
        faulted = (replica.name, block_id) in self.faulted
        hold(replica.exists, "a write into a deleted container", "inv-I5", subject)
        deleted = block_id in replica.remembered
        hold(not deleted, f"block {block_id} is deleted and written again", "inv-I5", subject)
        hold(
            offset <= len(file),
            f"a write at {offset} behind the end {len(file)} of block {block_id}",
            "inv-I7",
            subject,
        )
        true = data[offset : offset + len(new)]
        text = f"bytes written to block {block_id} that nobody wrote"
        hold(new == true, text, "inv-I4", subject)
        for chunk in record.chunks:
            for index in range(len(chunk.checksums)):
                start, size = chunk.window(index)
                start += chunk.offset
                if offset < start + size and start < offset + len(new):
                    good = bytes(file[start : start + size]) == data[start : start + size]
                    # A second flip of one bit restores it while we are about to.
                    text = f"good window at {start} of block {block_id} overwritten"
                    hold(faulted or not good, text, "inv-I4", subject)

    def puts(self, replica: RepairableReplica, record: BlockRecord) -> None:
        """inv-I5, inv-I7: no deleted block, no recorded chunk lost or changed, no chunk
        without its bytes.
        """
        block_id = record.block_id
        subject = Subject(record.container_id, block_id)
        before = replica.stored.records.get(block_id)
        true, data = self.written[block_id]
        file = replica.stored.files.get(block_id, bytearray())
        deleted = block_id in replica.remembered
        hold(not deleted, f"block {block_id} is deleted and recorded again", "inv-I5", subject)
        text = f"commit {record.bcs_id} of block {block_id} was never made"
        hold(record.bcs_id <= true.bcs_id, text, "inv-I7", subject)
        listed = before.by_offset if before else {}
        for chunk in before.chunks if before else ():
            same = record.by_offset.get(chunk.offset) == chunk
            hold(same, f"a recorded chunk of block {block_id} changed", "inv-I7", subject)
        end = 0
        for chunk in record.chunks:
            # A fault may have changed what we had on record.
            known = chunk in (true.by_offset.get(chunk.offset), listed.get(chunk.offset))
            hold(known, f"block {block_id} gets a chunk that nobody wrote", "inv-I7", subject)
            text = f"block {block_id} gets a chunk over another"
            hold(chunk.offset >= end, text, "inv-I7", subject)
            if chunk.offset not in listed:
                whole = bytes(file[chunk.offset : chunk.end]) == data[chunk.offset : chunk.end]
                faulted = (replica.name, block_id) in self.faulted
                text = f"block {block_id} gets a record of bytes that are not there"
                hold(whole or faulted, text, "inv-I7", subject)
                sums = chunk.checksum_type is not ChecksumType.NONE
                hold(sums, "a record without checksums was taken in", "inv-I7", subject)
                hold(chunk.offset == end, f"block {block_id} gets a hole", "inv-I7", subject)
            end = chunk.end
        if record.bcs_id > (before.bcs_id if before else 0):
            needed = sum(commit <= record.bcs_id for commit in self.commits[block_id])
            text = f"commit of block {block_id} advanced past what is there"
            hold(len(record.chunks) >= needed, text, "inv-I7", subject)

    def stores(self, replica: RepairableReplica, tree: ContainerTree) -> None:
        """inv-I5: a deletion, once in the tree, stays."""
        kept = {block.block_id for block in tree.blocks if block.deleted}
        subject = Subject(replica.stored.container_id)
        known = self.tombstones.setdefault(name_of(replica), set())
        hold(kept >= known, "a tombstone was forgotten", "inv-I5", subject)
        known |= kept

    def returns(self, replica: RepairableReplica, generation: bytes) -> None:
        """CR-001: no replica returns to service that its tree calls damaged, or whose
        tree is another than the one that was found whole.
        """
        tree, now = replica.known_tree()
        text = f"{replica.name} returns to service by a tree that is replaced"
        hold(now == generation, text, "CR-001", Subject(replica.stored.container_id))
        for block in tree.blocks if tree else ():
            healthy = block.deleted or all(chunk.checksum_matches for chunk in block.chunks)
            subject = Subject(replica.stored.container_id, block.block_id)
            text = f"{replica.name} returns to service with block {block.block_id} corrupt"
            hold(healthy, text, "CR-001", subject)

    def marks(self, replica: RepairableReplica) -> None:
        """S12: a replica is marked for damage that is there."""
        _, findings = replica.examine()
        text = f"{replica.name} is marked UNHEALTHY, and nothing is damaged"
        hold(bool(findings), text, "S12", Subject(replica.stored.container_id))

    def appears(self, replica: RepairableReplica) -> None:
        """A replica is there from now on, with the deletes that its tree names."""
        tree, _ = replica.known_tree()
        blocks = tree.blocks if tree else ()
        self.tombstones[name_of(replica)] = {b.block_id for b in blocks if b.deleted}
        self.gone[name_of(replica)] = set()
        self.changes(replica)

    def deletes(self, replica: RepairableReplica, block_id: BlockId) -> None:
        """A replica has carried out a delete transaction."""
        self.gone[name_of(replica)].add(block_id)
        self.changes(replica)

    def changes(self, replica: RepairableReplica) -> None:
        """The disk or the cluster has just changed a replica; it may hold less now."""
        self._held[name_of(replica)] = block_sizes(replica)

    def looks(self, replica: RepairableReplica) -> None:
        """inv-I5, I6 by looking at the whole replica: no deleted block is back in the
        tree that peers see, on record or on disk, and nothing is gone that nobody took.
        """
        stored, name = replica.stored, name_of(replica)
        now = block_sizes(replica)
        hold_kept(stored.container_id, before=self._held[name], after=now)
        self._held[name] = now
        for block_id in self.gone[name] & now.keys():
            text = f"{replica.name} has block {block_id} again"
            hold(False, text, "inv-I5", Subject(stored.container_id, block_id))
        if not (deleted := self.tombstones[name]) or not isinstance(stored.tree, bytes):
            return
        with suppress(TreeRefusedError):
            for block in tree_from_bytes(stored.tree, stored.container_id).blocks:
                back = block.block_id in deleted and not block.deleted
                text = f"{replica.name} brought block {block.block_id} back"
                hold(not back, text, "inv-I5", Subject(stored.container_id, block.block_id))


class Ledger:
    """Knows what agents reported and how their work ended, and compares it with what
    the controller says.
    """

    def __init__(self, rules: Rules, now_s: Callable[[], float]) -> None:
        """`now_s` is the time that passes, whatever the clocks of machines say."""
        self._rules = rules
        self._now_s = now_s
        self._started_at_s = now_s()
        self._heard_at_s: dict[PeerId, float] = {}
        self._created_at_s: dict[JobId, float] = {}
        # Orders that were given up, and judged at that moment.
        self._given_up: set[tuple[JobId, PeerId, int]] = set()
        self.reported: dict[tuple[PeerId, ContainerId], set[ContainerReplica]] = {}
        self.ends: dict[tuple[str, PeerId], list[JobReport]] = {}
        # Jobs that ended, and those whose end is not stored by the controller yet.
        self.finished: dict[JobId, Job] = {}
        self._finishing: list[Job] = []

    def starts(self, controller: Controller) -> None:
        """The controller has started: deadlines count from here."""
        self._started_at_s = self._now_s()
        self._given_up |= {key for key, _ in _given_up(controller.jobs(None, 1_000))}

    def creates(self, job_id: JobId) -> None:
        """The controller makes a job."""
        self._created_at_s[job_id] = self._now_s()

    def hears(self, peer: PeerId) -> None:
        """The controller has taken in a heartbeat."""
        self._heard_at_s[peer] = self._now_s()

    def reports(self, replicas: Iterable[ContainerReplica]) -> None:
        """A datanode is about to report these replicas."""
        for replica in replicas:
            self.reported.setdefault((replica.peer, replica.container_id), set()).add(replica)

    def ended(self, peer: PeerId, progress: JobReport) -> None:
        """An agent is about to report the end of its part of a job."""
        self.ends.setdefault((progress.job_id, peer), []).append(progress)

    def finishes(self, job: Job) -> None:
        """The controller says that a job ended: every order's end is one that its agent
        reported.
        """
        self._finishing.append(job)
        subject = Subject(job.container_id)
        for order in job.orders:
            task = task_id(job.job_id, order.round, order.resumes)
            reported = self.ends.get((task, order.peer), [])
            if order.progress.verdict is not None:
                given = order.progress.verdict in {job.report.verdict for job in reported}
                text = f"job {job.job_id} has a verdict that nobody gave"
                hold(given, text, subject=subject)
            if order.state in _ENDS and not order.detail.startswith("agent restarted"):
                known = _ENDS[order.state] in {
                    report.state.value for report in reported if report.state
                }
                text = f"job {job.job_id}: {order.peer} never told {order.state.value}"
                hold(known, text, subject=subject)

    def dies(self) -> None:
        """The controller died: an end that it had not stored never was."""
        self._finishing.clear()

    def check(self, controller: Controller, container_ids: Iterable[ContainerId]) -> list[Job]:
        """Judge what the controller says at this moment; return the jobs whose end it
        stored since the last check.
        """
        stored, self._finishing = self._finishing, []
        self.finished.update((job.job_id, job) for job in stored)
        jobs = controller.jobs(None, 1_000)
        for key, order in _given_up(jobs):
            if key not in self._given_up:
                self._given_up.add(key)
                self._hold_late(key[0], order)
        active = Counter(job.container_id for job in jobs if not job.state.is_terminal)
        hold(all(count == 1 for count in active.values()), "two jobs at once for one container")
        for job in jobs:
            before = self.finished.get(job.job_id)
            text = f"job {job.job_id} changed after its end"
            hold(before is None or before == job, text, subject=Subject(job.container_id))
        for container_id in container_ids:
            self._check_view(controller, container_id)
        return stored

    def _hold_late(self, job_id: JobId, order: Order) -> None:
        """No deadline runs out before its time, whatever clock was set meanwhile."""
        is_dead = "dead" in order.detail
        since_s = self._heard_at_s if is_dead else self._created_at_s
        began_s = since_s.get(order.peer if is_dead else job_id, self._started_at_s)
        waited_s = self._now_s() - max(began_s, self._started_at_s)
        rules = self._rules
        limit_s = rules.dead_after_s if is_dead else rules.command_deadline_s
        text = f"{job_id}: {order.peer} is given up after {waited_s:.0f} of {limit_s:.0f} s"
        hold(waited_s >= limit_s - CLOCK_ERROR_S, text, "CR-052")

    def _check_view(self, controller: Controller, container_id: ContainerId) -> None:
        """The controller knows only replicas that were reported, and calls only equal
        roots a match (inv-I12).
        """
        view = controller.queries.container(container_id)
        subject = Subject(container_id)
        for replica in view.replicas if view else ():
            known = self.reported.get((replica.peer, container_id), set())
            text = f"the controller knows a replica on {replica.peer} that nobody reported"
            hold(replica in known, text, subject=subject)
        if view and view.compared.comparison is RootComparison.MATCH:
            found = {replica.data_checksum for replica in view.replicas}
            hold(len(found - {None}) == 1, "a match of different roots", "inv-I12", subject)
            hold(None not in found, "a match of an unknown root", "inv-I12", subject)


def _given_up(jobs: Iterable[Job]) -> Iterator[tuple[tuple[JobId, PeerId, int], Order]]:
    for job in jobs:
        for order in job.orders:
            if order.state is OrderState.EXPIRED:
                yield (job.job_id, order.peer, order.round), order


class Promise(Enum):
    """What one job must bring: every chunk is whole somewhere; only its pieces are; or
    something is lost.
    """

    WHOLE = "whole"
    PIECES = "pieces"
    LOST = "lost"


def promise_of(replicas: Sequence[RepairableReplica], written: Written) -> Promise:
    """What peace must bring to these replicas, by looking at all disks at once."""
    promise = Promise.WHOLE
    deleted = {block_id for replica in replicas for block_id in replica.remembered}
    container_id = replicas[0].stored.container_id
    for block_id, (true, data) in written.items():
        if true.container_id != container_id or block_id in deleted:
            continue
        records = [replica.stored.records.get(block_id) for replica in replicas]
        recorded = {chunk.offset: chunk for record in records if record for chunk in record.chunks}
        # Also those that outlived their record.
        files = [replica.stored.files.get(block_id, b"") for replica in replicas]
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


def different_blocks(replicas: Sequence[RepairableReplica]) -> list[BlockId]:
    """The blocks whose entries differ between the replicas' trees.

    Ozone keeps an entry for a live block without a byte left, and only on replicas that
    have its record: such an entry is no difference.
    """
    states = []
    for replica in replicas:
        tree, _ = replica.known_tree()
        assert tree is not None
        states.append({b.block_id: b for b in tree.blocks if b.deleted or b.chunks})
    ids = sorted({block_id for state in states for block_id in state})
    return [block_id for block_id in ids if len({state.get(block_id) for state in states}) > 1]


def hold_healed(replicas: Iterable[RepairableReplica], written: Written) -> None:
    """inv-I1: what any replica's tree calls live is whole on all of them."""
    for replica in replicas:
        tree, _ = replica.known_tree()
        assert tree is not None
        for block in tree.blocks:
            if block.deleted:
                continue
            file, data = replica.stored.files[block.block_id], written[block.block_id][1]
            subject = Subject(tree.container_id, block.block_id)
            for chunk in block.chunks:
                end = chunk.offset + chunk.length_bytes
                whole = bytes(file[chunk.offset : end]) == data[chunk.offset : end]
                hold(whole, "healed, but not whole", "inv-I1", subject)


def name_of(replica: RepairableReplica) -> ReplicaName:
    """The datanode and the container of a replica."""
    return replica.name, replica.stored.container_id


def is_whole(stored: MemoryReplica, written: Written, block_id: BlockId, offset: int) -> bool:
    """Whether a chunk is on record here and its bytes are those written."""
    record = stored.records.get(block_id)
    listed = record is not None and offset in record.by_offset
    return listed and has_bytes(stored, written, block_id, offset)


def has_bytes(stored: MemoryReplica, written: Written, block_id: BlockId, offset: int) -> bool:
    """Whether the file has a chunk's bytes as written, on record or not."""
    true, data = written[block_id]
    if offset not in true.by_offset:
        return False
    end = true.by_offset[offset].end
    return bytes(stored.files.get(block_id, b"")[offset:end]) == data[offset:end]


def whole_chunks(stored: MemoryReplica, written: Written) -> set[tuple[BlockId, int]]:
    """The live chunks that a replica holds whole."""
    return {
        (block_id, offset)
        for block_id, record in stored.records.items()
        for offset in record.by_offset
        if is_whole(stored, written, block_id, offset)
    }


def block_sizes(replica: RepairableReplica) -> BlockSizes:
    """What a repair must not take away: records, and the lengths of files."""
    stored = replica.stored
    return {
        block_id: (block_id in stored.records, len(stored.files.get(block_id, b"")))
        for block_id in stored.records.keys() | stored.files.keys()
    }


def hold_kept(container_id: ContainerId, *, before: BlockSizes, after: BlockSizes) -> None:
    """inv-I6: only a delete transaction of the cluster takes anything away."""
    for block_id, (had_record, length) in before.items():
        has_record, length_now = after.get(block_id, (False, 0))
        kept = has_record >= had_record and length_now >= length
        text = f"a repair took something of block {block_id} away"
        hold(kept, text, "inv-I6", Subject(container_id, block_id))


def client_reads(replica: RepairableReplica, block_id: BlockId, written: Written) -> list[bool]:
    """CR-053: a client that reads a block gets good data or a checksum failure, never
    bad data that pass for good. Return which chunks passed.
    """
    file, data = replica.stored.files.get(block_id, bytearray()), written[block_id][1]
    passed = []
    for chunk in replica.stored.records[block_id].chunks:
        got = bytes(file[chunk.offset : chunk.end])
        observed = window_checksums(got, chunk.checksum_type, chunk.bytes_per_checksum)
        passes = len(got) == chunk.length_bytes and observed == b"".join(chunk.checksums)
        good = got == data[chunk.offset : chunk.end]
        subject = Subject(replica.stored.container_id, block_id)
        hold(not passes or good, "a client was given bad data", "CR-053", subject)
        passed.append(passes)
    return passed


def is_only_unverifiable(job: Job, written: Written) -> bool:
    """Whether nothing is wrong but that some data have no checksums, or lack a file
    that nothing could prove.
    """
    facts = [fact for order in job.orders for fact in order.progress.evidence]
    unprovable = {
        block_id
        for block_id, (record, _) in written.items()
        if not any(chunk.is_verifiable for chunk in record.chunks)
    }
    return job.verdict is Verdict.UNKNOWN and all(
        fact.kind == EvidenceKind.UNVERIFIABLE
        or (fact.kind == EvidenceKind.FINDINGS_REMAIN and fact.block_id in unprovable)
        for fact in facts
    )
