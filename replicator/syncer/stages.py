"""The stages of a replication: what to do next, from what happened. Without I/O.

A round brings the target to a state of the source: a snapshot, or a comparison of what
both hold now. Where the source has a log, its position is noted before, and changes are
queued while the round runs, so that nothing is lost at the switch (OZ-101). Then the
log is followed. A gap in it leads to another round, which begins from the snapshot that
the target has as a whole. Snapshots are let go of once that is recorded at the master.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict, Unpack, assert_never

from replicator.replication import Checkpoint, Stage
from replicator.stores.port import FeedPosition, SnapshotFacts
from replicator.syncer.prefixes import ALL, uncovered, without_nested

# The initial batch ends, the log is followed, and a gap ends that (OZ-131).
LEGAL = frozenset(
    {
        (Stage.INITIAL_BATCH, Stage.INCREMENTAL),
        (Stage.INCREMENTAL, Stage.LIVE),
        (Stage.LIVE, Stage.INCREMENTAL),
    }
)


@dataclass(frozen=True, slots=True)
class NotePosition:
    """Ask the log for its newest position."""


@dataclass(frozen=True, slots=True)
class StartCapture:
    """Queue the changes after a position from now on."""

    position: FeedPosition


@dataclass(frozen=True, slots=True)
class StopCapture:
    """Queue nothing any more, and drop what is queued."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Make a snapshot of the source."""


@dataclass(frozen=True, slots=True)
class CompareStores:
    """Compare the target with a snapshot, or with the source as it is now, below these
    prefixes, and bring over what differs.
    """

    snapshot: SnapshotFacts | None
    start_after: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApplyDifference:
    """Apply what leads from one snapshot to another."""

    base: SnapshotFacts
    snapshot: SnapshotFacts


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Record how far the replication is, here and at the master. Numbers ascend: one
    that comes late, after a newer one, is not recorded.
    """

    checkpoint: Checkpoint
    number: int


@dataclass(frozen=True, slots=True)
class DeleteSnapshot:
    """Let go of a snapshot."""

    snapshot: SnapshotFacts


@dataclass(frozen=True, slots=True)
class AwaitInterval:
    """Begin the next round after the interval."""


@dataclass(frozen=True, slots=True)
class PositionNoted:
    """The log's newest position."""

    position: FeedPosition


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A snapshot exists; every change up to `position` of the log is in it, where the
    source has a log.
    """

    snapshot: SnapshotFacts
    position: FeedPosition | None


@dataclass(frozen=True, slots=True)
class WorkProgressed:
    """Every key up to this one is done."""

    last_key: str


@dataclass(frozen=True, slots=True)
class WorkDone:
    """A comparison or a difference was applied to its end."""


@dataclass(frozen=True, slots=True)
class DifferenceFailed:
    """The source cannot tell what leads from one snapshot to the other (OZ-174)."""


@dataclass(frozen=True, slots=True)
class SnapshotGone:
    """The snapshot that is being applied does not exist any more."""


@dataclass(frozen=True, slots=True)
class GapFound:
    """Changes of the log are missing (OZ-098). `knows_applied`: it is known which keys
    the log has changed at the target since the base, so that a difference from it will
    do: it shows none that was made since and deleted in the gap.
    """

    knows_applied: bool


@dataclass(frozen=True, slots=True)
class ChangesApplied:
    """Every change of the log up to this position is at the target."""

    position: FeedPosition


@dataclass(frozen=True, slots=True)
class IntervalPassed:
    """It is time for another round, or in the live stage for a younger snapshot."""


@dataclass(frozen=True, slots=True)
class WishesChanged:
    """The operator wants other prefixes, or another way to follow. `knows_applied` is
    as that of GapFound.
    """

    prefixes: tuple[str, ...]
    is_live: bool
    knows_applied: bool


Request: TypeAlias = (
    NotePosition
    | StartCapture
    | StopCapture
    | TakeSnapshot
    | CompareStores
    | ApplyDifference
    | SaveCheckpoint
    | DeleteSnapshot
    | AwaitInterval
)
Event: TypeAlias = (
    PositionNoted
    | SnapshotTaken
    | WorkProgressed
    | WorkDone
    | DifferenceFailed
    | SnapshotGone
    | GapFound
    | ChangesApplied
    | IntervalPassed
    | WishesChanged
)


class StageMachine:
    """Takes events in and gives requests, to be carried out one after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        prefixes: tuple[str, ...],
        is_live: bool,
        has_feed: bool,
        has_snapshots: bool,
    ) -> None:
        """Go on from a checkpoint; `is_live` is whether the log shall be followed,
        where the source has one.
        """
        self._checkpoint = checkpoint
        self._prefixes = prefixes
        self._wants_live = is_live
        self._has_feed = has_feed
        self._has_snapshots = has_snapshots
        self._saves = 0
        # What the target had as a whole before the log was applied to it.
        self._gap_base: SnapshotFacts | None = None
        # Changes are being queued without a gap since the round began.
        self._captures = False
        # What the comparison that runs will have brought over.
        self._compared: tuple[str, ...] | None = None
        # A snapshot that becomes the base once the log was applied up to here.
        self._next_base: FeedPosition | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """How far the replication is."""
        return self._checkpoint

    @property
    def snapshots(self) -> tuple[SnapshotFacts, ...]:
        """The snapshots that are still needed: the base of a difference is one, also
        when the checkpoint has it no more.
        """
        at = self._checkpoint
        return tuple(one for one in (at.base, at.snapshot, self._gap_base) if one is not None)

    @property
    def is_live(self) -> bool:
        """Whether what is queued may be applied."""
        return self._checkpoint.stage is Stage.LIVE

    def start(self) -> list[Request]:
        """What to do first."""
        at = self._checkpoint
        if at.stage is not Stage.LIVE:
            return [*self._forget_others(), *self._round()]
        if at.position is None or not self._follows:
            return self._leave_live(knows_applied=False)
        self._captures = True
        requests: list[Request] = [StartCapture(at.position), *self._forget_others()]
        if at.snapshot is not None:
            # Nobody knows any more up to where the log has to be applied for it.
            requests.append(DeleteSnapshot(at.snapshot))
            requests += self._save(snapshot=None)
        return requests + self._backfill()

    def step(self, event: Event) -> list[Request]:
        """Take in what happened; return what to do about it."""
        match event:
            case PositionNoted(position):
                self._captures = True
                # What was compared before the position may have changed before it.
                saved = self._save(position=position, last_key="")
                return [*saved, StartCapture(position), *self._continue()]
            case SnapshotTaken(snapshot, position):
                if self.is_live:
                    self._next_base = position
                    return self._save(snapshot=snapshot)
                return [*self._save(snapshot=snapshot, last_key=""), *self._work()]
            case WorkProgressed(last_key):
                if self._compared is None or self.is_live:
                    return []
                return self._save(last_key=last_key, compared=self._compared)
            case WorkDone():
                return self._done()
            case DifferenceFailed():
                return [self._comparison()]
            case SnapshotGone():
                # The target has some of it: the base is no whole state of it any more.
                base, self._gap_base = self._gap_base or self._checkpoint.base, None
                saved = self._save(base=None, snapshot=None, last_key="")
                gone = [DeleteSnapshot(base)] if base is not None else []
                return [*saved, *gone, *self._continue()]
            case GapFound(knows_applied):
                self._captures = False
                if self.is_live:
                    return self._leave_live(knows_applied=knows_applied)
                # The round that runs comes to its end, and another one follows.
                return [StopCapture(), *self._save(position=None)]
            case ChangesApplied(position):
                return self._applied(position)
            case IntervalPassed():
                if not self.is_live:
                    return self._round()
                is_due = self._has_snapshots and self._checkpoint.snapshot is None
                return [TakeSnapshot()] if is_due else []
            case WishesChanged():
                return self._wish(event)
            case _:
                assert_never(event)

    @property
    def _follows(self) -> bool:
        return self._has_feed and self._wants_live

    def _round(self) -> list[Request]:
        """Begin a round, or go on with the one that the checkpoint is in."""
        at = self._checkpoint
        if self._follows and not self._captures:
            is_begun = at.stage is Stage.INITIAL_BATCH or at.snapshot is not None
            if at.position is not None and is_begun:
                self._captures = True
                return [StartCapture(at.position), *self._continue()]
            if at.snapshot is None:
                return [NotePosition()]
            # Changes between this snapshot and a position of now would be lost: it is
            # applied for itself, and another round follows.
        return self._continue()

    def _continue(self) -> list[Request]:
        if self._has_snapshots and self._checkpoint.snapshot is None:
            return [TakeSnapshot()]
        return self._work()

    def _work(self) -> list[Request]:
        at, base = self._checkpoint, self._gap_base or self._checkpoint.base
        if at.stage is Stage.INCREMENTAL and base is not None and at.snapshot is not None:
            missing = uncovered(self._prefixes, at.prefixes)
            if not missing:
                self._compared = None
                return [ApplyDifference(base, at.snapshot)]
        return [self._comparison()]

    def _comparison(self) -> CompareStores:
        at = self._checkpoint
        self._compared = without_nested(self._prefixes) or ALL
        # Below other prefixes nothing was compared up to that key.
        start_after = at.last_key if at.compared == self._compared else ""
        return CompareStores(at.snapshot, start_after, self._compared)

    def _done(self) -> list[Request]:
        at = self._checkpoint
        compared, self._compared = self._compared, None
        if self.is_live:
            # It was a comparison beside the log, of prefixes that were added.
            known = (*at.prefixes, *(compared or ()))
            return [*self._save(prefixes=self._kept(known)), *self._backfill()]
        old, position = self._gap_base or at.base, at.position
        self._gap_base = None
        in_snapshot = at.snapshot.position if at.snapshot is not None else None
        if in_snapshot is not None and _is_behind(position, in_snapshot, follows=self._follows):
            position = in_snapshot
        requests = self._save(
            stage=Stage.INCREMENTAL,
            base=at.snapshot,
            snapshot=None,
            last_key="",
            position=position,
            prefixes=self._kept(compared if compared is not None else at.prefixes),
        )
        if old is not None:
            requests.append(DeleteSnapshot(old))
        if not self._follows:
            stop: list[Request] = [StopCapture()] if self._captures else []
            self._captures = False
            return [*requests, *stop, AwaitInterval()]
        if not self._captures:
            # Changes were lost meanwhile: once more, from what the target has now.
            return requests + self._round()
        return [*requests, *self._save(stage=Stage.LIVE), *self._backfill()]

    def _leave_live(self, *, knows_applied: bool) -> list[Request]:
        """Go back to rounds (OZ-103). The target is ahead of the base by now: another
        syncer, which does not know by what, compares all.
        """
        at = self._checkpoint
        left = [one for one in (at.snapshot, at.base) if one is not None]
        self._gap_base = at.base if knows_applied else None
        if self._gap_base is not None:
            left.remove(self._gap_base)
        self._captures, self._next_base, self._compared = False, None, None
        requests: list[Request] = [StopCapture()]
        requests += self._save(
            stage=Stage.INCREMENTAL, position=None, base=None, snapshot=None, last_key=""
        )
        return [*requests, *map(DeleteSnapshot, left), *self._round()]

    def _applied(self, position: FeedPosition) -> list[Request]:
        assert self.is_live
        at, due = self._checkpoint, self._next_base
        assert at.position is None or at.position.log == position.log
        assert at.position is None or at.position.index <= position.index
        is_due = due is not None and due.log == position.log and due.index <= position.index
        if not is_due or at.snapshot is None:
            return self._save(position=position)
        self._next_base = None
        requests = self._save(position=position, base=at.snapshot, snapshot=None)
        return [*requests, *([DeleteSnapshot(at.base)] if at.base is not None else [])]

    def _wish(self, event: WishesChanged) -> list[Request]:
        was_following = self._follows
        self._prefixes, self._wants_live = event.prefixes, event.is_live
        if self.is_live and not self._follows:
            return self._leave_live(knows_applied=event.knows_applied)
        requests = self._forget_others()
        if self.is_live:
            return requests + self._backfill()
        if self._checkpoint.stage is Stage.INCREMENTAL and self._follows and not was_following:
            return requests + self._round()
        return requests

    def _forget_others(self) -> list[Request]:
        """Note which prefixes nobody wants any more, and nobody follows. They may have
        been withdrawn while no process worked on this.
        """
        kept = self._kept(self._checkpoint.prefixes)
        return self._save(prefixes=kept) if kept != self._checkpoint.prefixes else []

    def _backfill(self) -> list[Request]:
        """Compare prefixes that the target lacks, beside the log (OZ-161)."""
        missing = uncovered(self._prefixes, self._checkpoint.prefixes)
        if not missing or self._compared is not None:
            return []
        self._compared = missing
        return [CompareStores(None, "", missing)]

    def _kept(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """The prefixes that are wanted and known."""
        wanted = without_nested(self._prefixes) or ALL
        return tuple(one for one in wanted if one.startswith(known))

    def _save(self, **changes: Unpack["_Changes"]) -> list[Request]:
        checkpoint = replace(self._checkpoint, **changes)
        before, after = self._checkpoint.stage, checkpoint.stage
        assert before is after or (before, after) in LEGAL
        self._checkpoint = checkpoint
        self._saves += 1
        return [SaveCheckpoint(checkpoint, self._saves)]


def queued(
    pending: Iterable[Request], found: Sequence[Request], *, left_live: bool
) -> list[Request]:
    """What is to be done, in order: a capture that was to begin, then what the machine
    has asked for just now, then what was `pending`. `left_live`: the stage was LIVE
    before.
    """
    if left_live:
        # What was begun beside the log is of no use any more.
        pending = ()
    if any(isinstance(one, StartCapture) for one in found):
        # Another capture was to end, of a wish that was withdrawn meanwhile.
        pending = [one for one in pending if not isinstance(one, StopCapture)]
    # A comparison may take hours, in which nothing would be read of the log. And what
    # had been taken of the queue before it begins would be taken twice.
    begins = [one for one in pending if isinstance(one, StartCapture)]
    rest = [one for one in pending if not isinstance(one, StartCapture)]
    return [*begins, *found, *rest]


class _Changes(TypedDict, total=False):
    """Fields of a checkpoint."""

    stage: Stage
    base: SnapshotFacts | None
    snapshot: SnapshotFacts | None
    last_key: str
    position: FeedPosition | None
    prefixes: tuple[str, ...]
    compared: tuple[str, ...]


def _is_behind(position: FeedPosition | None, other: FeedPosition, *, follows: bool) -> bool:
    """Whether a snapshot's position counts instead of one that was noted before it."""
    if position is None or not follows:
        return not follows
    return position.log == other.log and position.index < other.index
