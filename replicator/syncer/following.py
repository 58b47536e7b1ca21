"""Applies what is queued of the log, acknowledges it, and proves the target."""

from collections import deque
from dataclasses import replace

from replicator.replication import Checkpoint, Stage
from replicator.stores.port import Change, ChangeKind, FeedPosition
from replicator.syncer.capture import ChangeCapture
from replicator.syncer.comparing import Comparing
from replicator.syncer.lease import Lease
from replicator.syncer.limits import EngineLimits
from replicator.syncer.prefixes import ALL, change_within, without_nested
from replicator.syncer.queue import ChangeQueue
from replicator.syncer.round_proofs import FIRST_PROOF_S
from replicator.syncer.rounds import RoundRunner
from replicator.syncer.schedule import Work
from replicator.syncer.stages import ChangesApplied, IntervalPassed, StageMachine
from replicator.syncer.workers import ChangeWorkers
from runtime.rate_limit import Clock

# Between two records of how far the log was applied: a killed syncer repeats no more.
_SAVE_S = 1.0
# Keys that are remembered since the base; beyond it all is compared after a gap.
_APPLIED_MAX = 100_000
# The base of a difference after a gap: a younger one makes it shorter.
_BASE_AGE_S = 900.0


class LogFollower:
    """The live stage of one replication. Owned by the thread that works."""

    def __init__(
        self,
        rounds: RoundRunner,
        machine: StageMachine,
        workers: ChangeWorkers,
        *,
        queue: ChangeQueue,
        capture: ChangeCapture,
        lease: Lease,
        clock: Clock,
        limits: EngineLimits,
    ) -> None:
        """Follow what the capture queues, once the stages allow it."""
        self._rounds = rounds
        self._machine = machine
        self._workers = workers
        self._queue = queue
        self._capture = capture
        self._lease = lease
        self._clock = clock
        self._prove_every_s = limits.prove_every_s
        now_s = clock.monotonic_s()
        self._saved_s = self._base_s = now_s
        self._prove_s = now_s + min(FIRST_PROOF_S, limits.prove_every_s)
        self._taken = _TakenChanges()
        self._applied = _AppliedSinceBase(machine.checkpoint)
        # Up to here the queue can let go, once the position is recorded.
        self._release = 0
        self._proving: Comparing | None = None
        # Where the proof began, what moved then, and readings of the log until its end.
        self._proof_at: FeedPosition | None = None
        self._proof_moved = set[str]()
        self._proof_polls: int | None = None
        # Their keys were gone at the source by then.
        self._proof_settles = list[Work]()
        rounds.on_phase_end, rounds.applied_changes = self.reset, self.applied_changes

    def reset(self) -> None:
        """Begin again with what is not acknowledged."""
        self._taken.clear()
        self._queue.rewind()
        if self._proving is not None:
            self._proving.cancel()
        self._release, self._proving = 0, None

    def prove_soon(self) -> None:
        """Compare both sides as soon as nothing else is to be done."""
        soon_s = self._clock.monotonic_s() + min(FIRST_PROOF_S, self._prove_every_s)
        self._prove_s = min(self._prove_s, soon_s)

    def follow(self) -> bool:
        """Take some changes, acknowledge what is done; whether something was done.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: a side did not answer, or the queue cannot be read.
        """
        phase = self._rounds.begin_phase(None)
        schedule, now_ms = self._workers.schedule, self._clock.now_ms()
        taken = self._queue.take(self._workers.room)
        self._applied.follow(self._machine.checkpoint)
        for one in taken:
            self._applied.add(one.change)
            self._taken.add(one.number, one.change.index)
            # It may have been queued for prefixes that are wanted no more.
            change = change_within(one.change, self._rounds.policy.prefixes)
            if change is None:
                schedule.pass_over(one.number)
                continue
            queued = self._capture.settled_facts(replace(one, change=change))
            schedule.add(queued, now_ms=now_ms)
        now_s = self._clock.monotonic_s()
        if now_s - self._saved_s >= _SAVE_S and self._acknowledge():
            self._saved_s = now_s
            return True
        if now_s - self._base_s >= _BASE_AGE_S:
            self._base_s = now_s
            self._rounds.tell(IntervalPassed())
        has_compared = False
        if self._proving is not None:
            has_compared = self._prove(self._proving)
        elif now_s >= self._prove_s and not self._rounds.is_busy and self._is_all_taken:
            self._prove_s = now_s + self._prove_every_s
            self._proof_at = self._machine.checkpoint.position
            self._capture.note_keys()
            names = (name for work in schedule.pending() for name in work.names)
            self._proof_moved, self._proof_polls = set(names), None
            self._proof_settles = schedule.unsettled()
            prefixes = without_nested(self._rounds.policy.prefixes) or ALL
            self._proving = self._rounds.compare(phase, prefixes, watched=False)
        return bool(taken) or has_compared

    def finish(self) -> None:
        """Record what is done, and begin nothing: the process ends.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: the master does not answer, or a file cannot be written.
        """
        self._workers.settle()
        if self._acknowledge():
            self._rounds.record()
        self._queue.acknowledge(self._release)

    @property
    def knows_applied(self) -> bool:
        """Whether it is known what the log has changed since the base."""
        return self._applied.is_known

    def applied_changes(self) -> list[Change]:
        """What to look at again besides a difference from the base."""
        return self._applied.changes()

    @property
    def equal_as_of_ms(self) -> int | None:
        """Every change made before this time is at the target; None where unknown."""
        # Read first: what was queued before it is seen below.
        caught_up_ms, schedule = self._capture.caught_up_ms, self._workers.schedule
        known_ms = self._rounds.equal_as_of_ms
        if schedule.has_found or self._rounds.checkpoints.has_unknown_failures:
            return known_ms
        # Whatever is not taken, or not read, came later than what is being applied.
        found_ms = schedule.oldest_ms
        if found_ms is None and self._queue.taken_all:
            found_ms = caught_up_ms
        if found_ms is not None:
            known_ms = self._rounds.equal_as_of_ms = max(found_ms, known_ms or 0)
        return known_ms

    @property
    def awaits_answer(self) -> bool:
        """Whether keys are being read that are compared beside the log."""
        return self._proving is not None and self._proving.is_waiting

    @property
    def _is_all_taken(self) -> bool:
        """Whether the queue has nothing that was not taken."""
        return self._queue.taken_all

    def _acknowledge(self) -> bool:
        """Record up to where the log is at the target; whether that is news."""
        known, log = self._machine.checkpoint.position, self._queue.position
        if known is None or log is None or self._rounds.is_busy:
            return False
        # Recorded by now: what the queue has of it is needed no more.
        self._queue.acknowledge(self._release)
        done = self._workers.schedule.done_through
        settled = self._taken.settled(done, is_all=self._is_all_taken)
        # What is queued and was never taken is not at the target.
        is_all_done = self._taken.is_empty and self._is_all_taken
        index = log.index if settled is None and is_all_done else known.index
        if settled is not None:
            self._release, index = settled
            if self._taken.is_empty and self._is_all_taken:
                index = log.index
        if index <= known.index:
            return False
        self._lease.check()
        self._rounds.tell(ChangesApplied(FeedPosition(log.log, index)))
        return True

    def _prove(self, proving: Comparing) -> bool:
        """Compare a little more; once all was compared, wait until the log was read up
        to then, which tells what had moved. Whether there was something to do.
        """
        capture = self._capture
        if not proving.is_done:
            proving.advance()
            return not proving.is_waiting
        if self._proof_polls is None:
            self._proof_polls = capture.polls
        # The reading after next has begun after the last key was looked at.
        if capture.polls < self._proof_polls + 2:
            return False
        self._proving, noted = None, capture.noted()
        moved = noted | self._proof_moved if noted is not None else None
        result = proving.result()
        self._rounds.proof = self._rounds.proof.after(
            result,
            position=self._proof_at,
            moved=moved,
            failed=self._workers.failed,
        )
        self._rounds.checkpoints.note_compared()
        if self._rounds.proof.proven_ms == result.began_ms:
            # The log may never tell that they are gone: while it was read, others may
            # have been wanted.
            self._workers.schedule.settle(self._proof_settles)
        return True


class _AppliedSinceBase:
    """Which keys the log has changed since the base, as far as this process knows: a
    difference of snapshots shows none that appeared and vanished between them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        is_at_base = checkpoint.stage is not Stage.LIVE
        self._base = checkpoint.base
        self._next = checkpoint.snapshot
        # Since the base, and since the snapshot that will replace it; None is unknown.
        self._since: dict[str, None] | None = {} if is_at_base else None
        self._since_next = dict[str, None]()

    @property
    def is_known(self) -> bool:
        """Whether all keys are known."""
        return self._since is not None

    def changes(self) -> list[Change]:
        """A change for each of them: look at it."""
        found = list[Change]()
        for name in self._since or ():
            kind = ChangeKind.DELETE_PREFIX if name.endswith("/") else ChangeKind.DELETE
            found.append(Change(0, name, "", kind))
        return found

    def follow(self, checkpoint: Checkpoint) -> None:
        """Note another base, or another snapshot that will be it."""
        if checkpoint.base != self._base:
            is_next = checkpoint.base == self._next
            self._since = self._since_next if is_next else {}
            self._base = checkpoint.base
        if checkpoint.snapshot != self._next:
            self._next, self._since_next = checkpoint.snapshot, {}

    def add(self, change: Change) -> None:
        """Note a change that will be applied."""
        names = [name for name in (change.key, change.previous_key) if name]
        for since in (self._since, self._since_next):
            if since is not None:
                since.update(dict.fromkeys(names))
        if self._since is not None and len(self._since) > _APPLIED_MAX:
            self._since = None


class _TakenChanges:
    """What was taken of a queue and is not acknowledged: numbers and indexes."""

    def __init__(self) -> None:
        self._open = deque[tuple[int, int]]()
        self._last: tuple[int, int] | None = None
        self._whole: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_empty(self) -> bool:
        return not self._open

    def clear(self) -> None:
        """Forget everything."""
        self._open.clear()
        self._last = self._whole = None

    def add(self, number: int, index: int) -> None:
        """Note the next change."""
        self._open.append((number, index))

    def settled(self, done: int, *, is_all: bool) -> tuple[int, int] | None:
        """Number and index up to which all is done, and of no index only a part; None
        if that is nothing. `is_all` says that the queue has no more.
        """
        while self._open and self._open[0][0] <= done:
            number, index = self._open.popleft()
            if self._last is not None and index > self._last[1]:
                self._whole = self._last
            self._last = number, index
        last = self._last
        if last is not None and (self._open[0][1] > last[1] if self._open else is_all):
            self._whole = last
        return self._whole
