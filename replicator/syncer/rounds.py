"""Carries out what the stages ask: snapshots, comparisons, differences, checkpoints.

Requests are done one after the other, in small units. Where a store does not answer,
the request is tried again later. What runs beside the log shares its workers, so that
changes of one key never overtake each other.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

from replicator.hashing import blake3_of
from replicator.replication import KEY_BYTES_MAX, Policy, Stage
from replicator.stores.errors import PreconditionFailedError, SnapshotLostError, StoreError
from replicator.stores.port import Change, SnapshotFacts
from replicator.syncer.capture import ChangeCapture
from replicator.syncer.checkpoint_record import CheckpointRecord
from replicator.syncer.comparing import Comparing
from replicator.syncer.difference import SnapshotDifference
from replicator.syncer.differences_found import AppliedDifferences, DifferenceSink
from replicator.syncer.folder import SyncerFolder
from replicator.syncer.lease import Lease
from replicator.syncer.limits import EngineLimits
from replicator.syncer.phase import SyncPhase, Tools
from replicator.syncer.prefixes import ALL, uncovered, without_nested
from replicator.syncer.proof import ProofState
from replicator.syncer.round_proofs import RoundProofs, begin_comparison
from replicator.syncer.snapshot_proofs import SnapshotProofs
from replicator.syncer.source_rounds import SourceRounds
from replicator.syncer.stages import (
    ApplyDifference,
    AwaitInterval,
    CompareStores,
    DeleteSnapshot,
    DifferenceFailed,
    Event,
    IntervalPassed,
    NotePosition,
    PositionNoted,
    Request,
    SaveCheckpoint,
    SnapshotGone,
    SnapshotTaken,
    StageMachine,
    StartCapture,
    StopCapture,
    TakeSnapshot,
    WorkDone,
    WorkProgressed,
    queued,
)
from replicator.syncer.two_way import SupersededKeys
from replicator.syncer.workers import ChangeWorkers
from runtime.rate_limit import Clock

# Between two records of the key up to which a comparison is done (OZ-056).
_PROGRESS_S = 5.0
# Names of snapshots that a store may still reserve after they were deleted.
_NAME_TRIES = 100


class RoundRunner:
    """The requests of one replication. Owned by the thread that works."""

    def __init__(
        self,
        tools: Tools,
        machine: StageMachine,
        workers: ChangeWorkers,
        *,
        policy: Policy,
        capture: ChangeCapture | None,
        folder: SyncerFolder,
        lease: Lease,
        clock: Clock,
        limits: EngineLimits,
    ) -> None:
        """Nothing is asked of a store yet.

        Raises:
            DiskError: the folder cannot be read.
        """
        self._tools = tools
        self._machine = machine
        self._workers = workers
        self._capture = capture
        self._folder = folder
        self._lease = lease
        self._clock = clock
        self._limits = limits
        self._difference = SnapshotDifference(folder.path / "difference", folder.disk)
        self._is_difference_open = self._has_cleaned = self._is_waiting = False
        self._todo = deque[Request](machine.start())
        self._saved_number = 0
        self._compared: tuple[str, ...] | None = None
        self._source_rounds: SourceRounds | None = None
        self._phase: SyncPhase | None = None
        self._comparing: Comparing | None = None
        self._superseded = SupersededKeys(clock, limits.superseded_wait_s)
        self._began_s = self._progress_s = clock.monotonic_s()
        self._proofs = RoundProofs(clock, limits.prove_every_s)
        self._snapshot_proofs = SnapshotProofs(
            self._proofs, lambda: self._new_phase(None), self._compare_all
        )
        self.checkpoints = CheckpointRecord(
            machine.checkpoint, lease=lease, folder=folder, failed=lambda: workers.failed
        )
        """What is recorded."""
        self.policy = policy
        """What the operator wants now."""
        self._is_ahead = self._may_go_ahead()
        self.equal_as_of_ms: int | None = None
        """Every change before this time is at the target."""
        self.applied_changes: Callable[[], list[Change]] = list
        """What to look at besides a difference: the target is ahead of its base."""
        self.on_phase_end: Callable[[], None] = lambda: None
        """Called when what was taken from the queue has to be taken again."""

    @property
    def proof(self) -> ProofState:
        """What the last comparison has shown."""
        return self._proofs.state

    @proof.setter
    def proof(self, state: ProofState) -> None:
        self._proofs.state = state

    def forget_proof(self) -> None:
        """Note that keys are wanted of which no comparison has said anything."""
        self._proofs.forget()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do but wait."""
        return bool(self._todo) and not isinstance(self._todo[0], AwaitInterval)

    @property
    def awaits_answer(self) -> bool:
        """Whether a store was asked for keys, and has not answered."""
        parts = (self._comparing, self._source_rounds if self._is_round_under_way else None)
        is_reading = any(one is not None and one.is_waiting for one in parts)
        return is_reading or self._proofs.awaits_answer or self._snapshot_proofs.awaits_answer

    @property
    def idle_s(self) -> float:
        """Seconds until the next round is due, if that is all there is to do."""
        if not self._todo or self.is_busy:
            return 0.0
        beside_s = self._source_rounds.beside_s if self._source_rounds is not None else math.inf
        left_s = self._began_s + self._pause_s - self._clock.monotonic_s()
        return max(0.0, min(left_s, beside_s))

    @property
    def may_follow(self) -> bool:
        """Whether the log may be applied: only once that is recorded, for another
        syncer would apply the snapshot again, which is older.
        """
        return self._machine.is_live and self.checkpoints.stage is Stage.LIVE

    def tell(self, event: Event) -> None:
        """Tell the stages what happened; what follows is done first."""
        was_live = self._machine.is_live
        requests = self._machine.step(event)
        left_live = was_live and not self._machine.is_live
        self._todo = deque(queued(self._todo, requests, left_live=left_live))
        if left_live:
            self.end_phase()

    def advance(self) -> bool:
        """Do a unit of the first request; whether something was done.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: it could not be done; the next call tries it again.
        """
        if not self._has_cleaned:
            self.delete_left()
            self._has_cleaned = True
        if not self._todo:
            return False
        self._settle_source_rounds()
        request, self._is_waiting = self._todo[0], False
        try:
            is_done, event = self._carry_out(request)
        except SnapshotLostError:
            if not self.lose_snapshot():
                raise
            return True
        if is_done:
            self._todo.popleft()
        if event is not None:
            self.tell(event)
        rounds, waits = self._source_rounds, self._is_waiting or isinstance(request, AwaitInterval)
        has_read = rounds is not None and rounds.advance_beside()
        has_compared = self._compare_beside()
        return has_read or has_compared or is_done or event is not None or not waits

    def lose_snapshot(self) -> bool:
        """Note that the snapshot that is being applied is gone; whether one was."""
        kinds = CompareStores | ApplyDifference
        request = next((one for one in self._todo if isinstance(one, kinds)), None)
        if request is None:
            return False
        self._todo.remove(request)
        self.end_phase()
        self.tell(DifferenceFailed() if isinstance(request, ApplyDifference) else SnapshotGone())
        return True

    def delete_snapshot(self, snapshot: SnapshotFacts) -> None:
        """Let go of a snapshot, if it is still the one that was made.

        Raises:
            LeaseLostError: another syncer works on this.
            StoreError: the source did not answer.
        """
        snapshots = self._tools.source.snapshots
        if snapshots is None:
            return
        self._lease.check()
        found = snapshots.find(snapshot.name)
        if found is not None and found.snapshot_id == snapshot.snapshot_id:
            snapshots.delete(snapshot.name)

    def delete_left(self) -> list[SnapshotFacts]:
        """Let go of what syncers have left that were killed: snapshots of which no
        checkpoint says anything. Returns what they were.

        Raises:
            LeaseLostError: another syncer works on this.
            StoreError: the source did not answer.
        """
        snapshots = self._tools.source.snapshots
        if snapshots is None:
            return []
        needed = {one.snapshot_id for one in self._machine.snapshots}
        found = self._tools.retried(lambda: list(snapshots.named(self._snapshot_prefix)))
        left = [one for one in found if one.snapshot_id not in needed and _number(one.name)]
        for one in left:
            self.delete_snapshot(one)
        return left

    def record(self) -> None:
        """Save what is to be saved next.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: the master does not answer.
        """
        while self._todo and isinstance(self._todo[0], SaveCheckpoint):
            self.advance()

    def begin_phase(self, snapshot: SnapshotFacts | None) -> SyncPhase:
        """The tools for this source; those of another one are put away first.

        Raises:
            StoreError: the snapshot cannot be opened.
        """
        phase = self._phase
        if phase is not None and phase.snapshot == snapshot:
            return phase
        self.end_phase(keeps_proof=True)
        self._phase = phase = self._new_phase(snapshot)
        self._workers.begin(phase.applier)
        return phase

    def _new_phase(self, snapshot: SnapshotFacts | None) -> SyncPhase:
        return SyncPhase(
            self._tools,
            self.policy.options,
            self.policy.prefixes,
            snapshot,
            self._superseded,
            is_first=self._machine.checkpoint.stage is Stage.INITIAL_BATCH,
        )

    def end_phase(self, *, keeps_proof: bool = False) -> None:
        """Put away what runs; what was taken from a queue is taken again. A comparison
        beside rounds by snapshots may go on.
        """
        if not keeps_proof:
            self._snapshot_proofs.cancel()
        if self._tools.proofs is not None and not self._snapshot_proofs.is_under_way:
            self._tools.proofs.cancel()
        self._workers.end()
        self._settle_source_rounds()
        if self._comparing is not None:
            self._comparing.cancel()
        self._proofs.cancel()
        phase, self._phase, self._comparing = self._phase, None, None
        self._is_difference_open = False
        self._source_rounds, self._compared = None, None
        if phase is not None:
            phase.close()
        self.on_phase_end()

    def compare(
        self,
        phase: SyncPhase,
        prefixes: tuple[str, ...],
        *,
        start_after: str = "",
        watched: bool,
        sink: DifferenceSink | None = None,
    ) -> Comparing:
        """Begin to compare; see `begin_comparison`."""
        spares_foreign = self.policy.options.newest_wins or not self._limits.deletes_extras
        return begin_comparison(
            self._tools,
            phase,
            self._workers,
            self._clock,
            prefixes=prefixes,
            start_after=start_after,
            spares_foreign=spares_foreign,
            watched=watched,
            sink=sink,
        )

    def _compare_all(self, phase: SyncPhase, sink: DifferenceSink) -> Comparing:
        prefixes = without_nested(self.policy.prefixes) or ALL
        return self.compare(phase, prefixes, watched=False, sink=sink)

    def _carry_out(self, request: Request) -> tuple[bool, Event | None]:
        """A unit of a request: whether it is done, and what happened."""
        match request:
            case NotePosition():
                assert self._capture is not None
                return True, PositionNoted(self._capture.position())
            case StartCapture(position):
                assert self._capture is not None
                self._lease.check()
                self._capture.begin(position)
            case StopCapture():
                assert self._capture is not None
                self._lease.check()
                self._capture.end()
            case TakeSnapshot():
                return True, self._take_snapshot()
            case SaveCheckpoint(checkpoint, number):
                if number > self._saved_number:
                    self.checkpoints.save(checkpoint)
                    self._saved_number = number
            case DeleteSnapshot(snapshot):
                self.delete_snapshot(snapshot)
            case AwaitInterval():
                is_due = self._interval_passed()
                return is_due, IntervalPassed() if is_due else None
            case CompareStores():
                return self._compare(request)
            case ApplyDifference():
                return self._apply_difference(request)
            case _:
                assert_never(request)
        return True, None

    def _take_snapshot(self) -> SnapshotTaken:
        snapshots = self._tools.source.snapshots
        assert snapshots is not None
        known = (*self._machine.snapshots, *self.delete_left())
        last = max((_number(one.name) for one in known), default=0)
        for number in range(last + 1, last + _NAME_TRIES):
            name = f"{self._snapshot_prefix}{number}"
            self._lease.check()
            try:
                made = self._tools.retried(partial(snapshots.create, name))
            except PreconditionFailedError:
                # An answer was lost, or a store still reserves a name that was deleted.
                snapshots.delete(name)
                continue
            position = made.position
            if position is None and self._capture is not None:
                position = self._capture.position()
            self._snapshot_proofs.note_snapshot(made)
            return SnapshotTaken(made, position)
        raise StoreError(f"the snapshots {self._snapshot_prefix}... cannot be deleted")

    @property
    def _snapshot_prefix(self) -> str:
        """How the names of all snapshots of this replication begin."""
        return f"treefold-{blake3_of(self.policy.policy_id.encode()).hex()[:12]}-"

    def _interval_passed(self) -> bool:
        return self._clock.monotonic_s() >= self._began_s + self._pause_s

    @property
    def _pause_s(self) -> float:
        rounds = self._source_rounds
        return rounds.pause_s if rounds is not None else self.policy.options.interval_s

    def _reads_source_alone(self, request: CompareStores) -> bool:
        """Whether this round needs no look at the target: a comparison of this process
        has shown what both sides hold.
        """
        is_known = self._compared == request.prefixes and not request.start_after
        # Before the log is followed, all that a round has found must be applied.
        return is_known and request.snapshot is None and not self._follows

    def _read_source(self, request: CompareStores) -> tuple[bool, Event | None]:
        rounds, compared = self._source_rounds, self._compared
        if rounds is None:
            phase = self.begin_phase(None)
            rounds = self._source_rounds = SourceRounds(
                self._tools,
                phase,
                self._workers,
                self._clock,
                prefixes=request.prefixes,
                interval_s=self.policy.options.interval_s,
                page_keys=self._limits.page_keys,
            )
            self._compared = compared
        if not rounds.is_under_way:
            self._note_begin()
        if not rounds.advance():
            self._is_waiting = rounds.is_waiting
            return False, None
        return True, WorkDone()

    @property
    def _is_round_under_way(self) -> bool:
        return self._source_rounds is not None and self._source_rounds.is_under_way

    def _may_go_ahead(self) -> bool:
        """Whether rounds of the source alone come before the first comparison: the
        ledger of an earlier process says what the target has. They prove nothing: what
        that process did at its end only the comparison finds.
        """
        at = self._machine.checkpoint
        if self._follows or self._tools.source.snapshots or at.stage is not Stage.INCREMENTAL:
            return False
        is_new = uncovered(self.policy.prefixes, at.prefixes)
        return not is_new and next(self._tools.ledger.rows(""), None) is not None

    def _go_ahead(self, request: CompareStores) -> None:
        has_begun = self._source_rounds is not None and not self._is_round_under_way
        self._is_waiting = has_begun and not self._interval_passed()
        if not self._is_waiting:
            self._read_source(request)

    def _settle_source_rounds(self) -> None:
        rounds = self._source_rounds
        if rounds is not None and self._compared is not None:
            self.equal_as_of_ms = max(rounds.equal_as_of_ms or 0, self.equal_as_of_ms or 0) or None

    def _compare(self, request: CompareStores) -> tuple[bool, Event | None]:
        is_live = self._machine.is_live
        comparing = self._comparing
        if comparing is None:
            if self._reads_source_alone(request):
                return self._read_source(request)
            if self._is_ahead:
                self._go_ahead(request)
                return False, None
            if not is_live:
                # What rounds have found and is not applied would count as a difference.
                self.end_phase()
                self._snapshot_proofs.must_compare = False
            phase = self.begin_phase(request.snapshot)
            self._note_begin()
            comparing = self._comparing = self.compare(
                phase, request.prefixes, start_after=request.start_after, watched=not self._follows
            )
        comparing.advance()
        if not comparing.is_done or not (is_live or self._workers.has_only_held):
            self._is_waiting = comparing.is_waiting
            return False, self._progressed(comparing)
        self._comparing, result = None, comparing.result()
        if is_live:
            return True, WorkDone()
        is_first = self._machine.checkpoint.stage is Stage.INITIAL_BATCH
        if self._is_all(request.prefixes):
            self._proofs.note(
                result,
                moved=set(),
                failed=self._workers.failed,
                is_whole=not request.start_after and not is_first,
            )
        if not request.start_after:
            self.checkpoints.note_compared()
        as_of = request.snapshot.created_ms if request.snapshot else result.began_ms
        event = self._round_done(as_of, is_resumed=bool(request.start_after))
        if not is_first and not request.start_after and request.snapshot is None:
            self._compared = request.prefixes
        return True, event

    def _compare_beside(self) -> bool:
        """Beside rounds, compare a little of both sides when that is due; whether there
        was something to do.
        """
        if self._goes_by_snapshots:
            pending = (one.change for one in self._workers.schedule.pending())
            return self._comparing is None and self._snapshot_proofs.advance(pending)
        proofs, rounds, phase = self._proofs, self._source_rounds, self._phase
        if rounds is None or phase is None or not (self._is_ahead or self._compared is not None):
            return False
        comparing = proofs.beside
        if comparing is None:
            if not proofs.is_due:
                return False
            rounds.note_keys()
            comparing = proofs.beside = self.compare(phase, rounds.prefixes, watched=True)
        comparing.advance()
        if not comparing.is_done:
            return not comparing.is_waiting
        proofs.beside, result, failed = None, comparing.result(), self._workers.failed
        if self._is_all(rounds.prefixes):
            proofs.note(result, moved=rounds.noted(), failed=failed)
        self.checkpoints.note_compared()
        # What has failed is not at the target, whatever the ledger says.
        rounds.await_works(self._workers.schedule.pending())
        if not failed:
            as_of_ms = rounds.without_assumed(result.began_ms)
            self.equal_as_of_ms = max(as_of_ms, self.equal_as_of_ms or 0)
        self._is_ahead, self._compared = False, rounds.prefixes
        return True

    def _is_all(self, prefixes: tuple[str, ...]) -> bool:
        """Whether these are all that are wanted now: a comparison may be older."""
        return not uncovered(self.policy.prefixes, prefixes)

    def _progressed(self, comparing: Comparing) -> Event | None:
        now_s = self._clock.monotonic_s()
        if self._machine.is_live or now_s - self._progress_s < _PROGRESS_S:
            return None
        self._progress_s = now_s
        key = comparing.last_key
        # No record holds a longer key: an earlier one will do.
        if self._workers.failed or not 0 < len(key.encode()) <= KEY_BYTES_MAX:
            return None
        return WorkProgressed(key)

    def _apply_difference(self, request: ApplyDifference) -> tuple[bool, Event | None]:
        snapshots = self._tools.source.snapshots
        assert snapshots is not None
        if not self._is_difference_open:
            if self._snapshot_proofs.must_compare:
                return True, DifferenceFailed()
            phase = self.begin_phase(request.snapshot)
            self._note_begin()
            try:
                self._difference.open(
                    snapshots, request.base, request.snapshot, self.policy.prefixes
                )
            except StoreError as error:
                if error.retryable:
                    raise
                self._difference.close()
                return True, DifferenceFailed()
            now_ms = self._clock.now_ms()
            for change in self.applied_changes():
                self._workers.schedule.touch(change, now_ms=now_ms)
            sink = AppliedDifferences(self._workers, phase.applier, self._clock)
            self._snapshot_proofs.apply(request.snapshot, sink)
            self._is_difference_open = True
        schedule = self._workers.schedule
        taken = self._difference.take(self._workers.room)
        for one in taken:
            # No snapshot tells when; it was after its base: the lag is no longer.
            schedule.add(one, now_ms=request.base.created_ms)
        self._snapshot_proofs.note_changes(one.change for one in taken)
        self._difference.acknowledge(schedule.done_through)
        if taken or not self._workers.has_only_held:
            return False, None
        self._is_difference_open = False
        self._difference.close()
        self._snapshot_proofs.end_round(request.snapshot, failed=self._workers.failed)
        if self.proof.proven_ms is not None:
            self.checkpoints.note_compared()
        return True, self._round_done(request.snapshot.created_ms, is_resumed=False)

    @property
    def _follows(self) -> bool:
        return self._capture is not None and self.policy.options.is_live

    @property
    def _goes_by_snapshots(self) -> bool:
        """Whether each round applies what leads from one snapshot to the next."""
        at = self._machine.checkpoint
        is_known = at.base is not None and not uncovered(self.policy.prefixes, at.prefixes)
        return is_known and at.stage is Stage.INCREMENTAL and not self._follows

    def _note_begin(self) -> None:
        if self._machine.checkpoint.stage is not Stage.LIVE:
            self._began_s = self._clock.monotonic_s()

    def _round_done(self, as_of_ms: int, *, is_resumed: bool) -> Event:
        # What fails by itself is not at the target.
        if not (is_resumed or self._workers.failed or self.checkpoints.has_unknown_failures):
            self.equal_as_of_ms = max(as_of_ms, self.equal_as_of_ms or 0)
        self.end_phase(keeps_proof=True)
        return WorkDone()


def _number(name: str) -> int:
    """In a snapshot's name; 0 for one of other people."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
