"""Stages follow each other as they may, whatever happens, and leave no snapshots."""

from collections.abc import Sequence
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from replicator.replication import Checkpoint, Stage
from replicator.stores.port import FeedPosition, SnapshotFacts
from replicator.syncer.stages import (
    LEGAL,
    ApplyDifference,
    AwaitInterval,
    ChangesApplied,
    CompareStores,
    DeleteSnapshot,
    DifferenceFailed,
    Event,
    GapFound,
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
    WishesChanged,
    WorkDone,
    WorkProgressed,
    queued,
)

PREFIXES = ((), ("a/",), ("a/", "b/"))


class World:
    """Carries out requests as a chance decides, and watches what must hold."""

    def __init__(self, data: st.DataObject, *, has_feed: bool, has_snapshots: bool) -> None:
        self.data = data
        self.has_feed, self.has_snapshots = has_feed, has_snapshots
        self.numbers = count(1)
        self.index = 0
        self.alive = set[str]()
        self.captured_from: int | None = None
        self.saved = Checkpoint()
        self.start()

    def start(self) -> None:
        """Begin from what was saved last, as another process."""
        self.captured_from = None
        self.machine = StageMachine(
            self.saved,
            prefixes=(),
            is_live=True,
            has_feed=self.has_feed,
            has_snapshots=self.has_snapshots,
        )
        self.delete_left()
        self.saved_number, self.stage = 0, self.saved.stage
        self.ask(self.machine.start(), pending=())

    def step(self) -> None:
        """One request is done, or something happens."""
        self.index += 1
        kinds = ["do", "do", "do", "do", "wish"]
        kinds += ["restart"] * (not self.data.draw(st.integers(0, 9)))
        kinds += ["gap"] * (self.captured_from is not None)
        kind = self.data.draw(st.sampled_from(kinds))
        if kind == "restart":
            self.start()
        elif kind == "wish":
            prefixes = self.data.draw(st.sampled_from(PREFIXES))
            self.tell(WishesChanged(prefixes, self.data.draw(st.booleans()), knows_applied=True))
        elif kind == "gap":
            self.captured_from = None
            self.tell(GapFound(self.data.draw(st.booleans())))
        elif self.todo:
            self.do(self.todo.pop(0))
            if self.machine.is_live and self.saved.stage is Stage.LIVE:
                # What is queued is applied between any two requests.
                self.check_captured()
        elif self.machine.is_live:
            self.check_captured()
            events = (ChangesApplied(FeedPosition("log", self.index)), IntervalPassed())
            self.tell(self.data.draw(st.sampled_from(events)))
        assert len(self.alive) <= 3

    def check_captured(self) -> None:
        """Every change after what is applied is queued."""
        at = self.machine.checkpoint.position
        assert at is not None
        assert self.captured_from is not None
        assert self.captured_from <= at.index

    def tell(self, event: Event) -> None:
        """Tell the machine."""
        was_live = self.machine.is_live
        found = self.machine.step(event)
        left_live = was_live and not self.machine.is_live
        self.ask(found, pending=self.todo, left_live=left_live)

    def ask(
        self, found: list[Request], *, pending: Sequence[Request], left_live: bool = False
    ) -> None:
        """Have these requests done first."""
        for stage in [one.checkpoint.stage for one in found if isinstance(one, SaveCheckpoint)]:
            assert stage is self.stage or (self.stage, stage) in LEGAL
            assert stage is not Stage.LIVE or self.has_feed
            self.stage = stage
        self.todo = queued(pending, found, left_live=left_live)

    def do(self, request: Request) -> None:
        """Carry out one request, or let it fail."""
        match request:
            case NotePosition():
                self.tell(PositionNoted(FeedPosition("log", self.index)))
            case StartCapture(position):
                self.captured_from = position.index
            case StopCapture():
                self.captured_from = None
            case TakeSnapshot():
                self.delete_left()
                name = f"s{next(self.numbers)}"
                self.alive.add(name)
                position = FeedPosition("log", self.index) if self.has_feed else None
                self.tell(SnapshotTaken(SnapshotFacts(name, name, position, 0), position))
            case SaveCheckpoint(checkpoint, number):
                # A later one may come first: what it says counts.
                if number > self.saved_number:
                    self.saved, self.saved_number = checkpoint, number
            case DeleteSnapshot(snapshot):
                self.alive.discard(snapshot.name)
            case CompareStores(snapshot):
                events: tuple[Event, ...] = (WorkDone(), WorkDone(), WorkProgressed("k"))
                if snapshot is not None:
                    events += (SnapshotGone(),)
                self.work(request, self.data.draw(st.sampled_from(events)), snapshot)
            case ApplyDifference(_, snapshot):
                outcomes = (WorkDone(), WorkDone(), DifferenceFailed())
                self.work(request, self.data.draw(st.sampled_from(outcomes)), snapshot)
            case AwaitInterval():
                self.tell(IntervalPassed())

    def delete_left(self) -> None:
        """What nobody knows is let go of (RoundRunner.delete_left)."""
        self.alive &= {one.name for one in self.machine.snapshots}

    def work(self, request: Request, event: Event, snapshot: SnapshotFacts | None) -> None:
        """End a piece of work in this way."""
        if isinstance(event, WorkProgressed):
            self.todo.insert(0, request)
        if isinstance(event, SnapshotGone) and snapshot is not None:
            self.alive.discard(snapshot.name)
        self.tell(event)


@given(st.data(), st.booleans(), st.booleans())
def test_stages_follow_each_other_as_they_may(
    data: st.DataObject,
    has_feed: bool,
    has_snapshots: bool,
) -> None:
    """OZ-068, OZ-131."""
    world = World(data, has_feed=has_feed, has_snapshots=has_snapshots)
    for _ in range(data.draw(st.integers(1, 60))):
        world.step()


def test_prefixes_that_were_withdrawn_while_no_process_ran_are_compared_again() -> None:
    """OZ-161: a process that begins with few follows no others meanwhile."""
    at = Checkpoint(Stage.LIVE, position=FeedPosition("log", 1), prefixes=("",))
    machine = StageMachine(at, prefixes=("a/",), is_live=True, has_feed=True, has_snapshots=False)
    begin, *_ = machine.start()
    assert begin == StartCapture(FeedPosition("log", 1))
    assert machine.checkpoint.prefixes == ("a/",)
    found = machine.step(WishesChanged((), is_live=True, knows_applied=True))
    assert CompareStores(None, "", ("",)) in found


def test_a_capture_that_begins_anew_is_not_ended_by_what_was_asked_before() -> None:
    begin = StartCapture(FeedPosition("log", 1))
    left = queued([StopCapture(), AwaitInterval()], [begin], left_live=False)
    assert left == [begin, AwaitInterval()]
    assert queued(left, [StopCapture()], left_live=True) == [StopCapture()]


def test_a_capture_begins_before_what_is_compared_beside_the_log() -> None:
    """OZ-161: prefixes that are wanted before it has begun do not come first."""
    begin = StartCapture(FeedPosition("log", 1))
    compare = CompareStores(None, "", ("a/",))
    assert queued([begin], [compare], left_live=False) == [begin, compare]
