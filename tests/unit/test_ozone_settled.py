"""An OM answers and shows a change before its log has it; what is compared counts as it
was only once the log has all that was seen (against an OM over real gRPC).
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout
from protos import ozone_manager_pb2 as pb
from replicator.cut import CutCheck
from replicator.stores.errors import FeedGapError
from replicator.stores.ozone_bucket import OzoneBucket
from replicator.stores.ozone_feed import OzoneFeed
from replicator.stores.ozone_lister import OzoneLister
from tests.support.memory_store import MemoryStore
from tests.support.ozone_rows import BUCKET_ID, VOLUME_ID, RowWriter, bucket_facts, key_message
from tests.support.scripted_om import ScriptedOm, refusal, success

FLAT = BucketLayout.OBJECT_STORE
TERM = 2


@dataclass
class BufferedOm:
    """Shows changes at once, and has them in its log `flush` later."""

    keys: dict[str, int] = field(default_factory=dict)
    buffer: list[bytes] = field(default_factory=list)
    log: list[tuple[int, bytes]] = field(default_factory=list)
    number: int = 0
    index: int = 40
    is_purged: bool = False

    def change(self, name: str, *, is_deleted: bool = False) -> None:
        """Put a key, or delete it."""
        self.index += 1
        rows = RowWriter()
        if is_deleted:
            del self.keys[name]
            rows.delete("keyTable", f"/v/b/{name}")
        else:
            self.keys[name] = self.index
            rows.put_key(name, self.index << 8, self.index)
        self.buffer.append(rows.encoded(self.number + 1, term=TERM, index=self.index))
        self.number += len(rows.rows)

    def flush(self) -> None:
        """Write the buffer to the log."""
        for raw in self.buffer:
            last = int.from_bytes(raw[:8], "little") + int.from_bytes(raw[8:12], "little") - 1
            self.log.append((last, raw))
        self.buffer.clear()

    def answer(self, request: pb.OMRequest) -> pb.OMResponse:
        def body(**parts: object) -> pb.OMResponse:
            found = pb.OMResponse(cmdType=request.cmdType, status=pb.OK, **parts)  # type: ignore[arg-type]
            return success(request, found)

        match request.cmdType:
            case pb.ServiceList:
                return body(serviceListResponse=pb.ServiceListResponse())
            case pb.InfoVolume:
                volume = pb.VolumeInfo(adminName="a", ownerName="a", volume="v", objectID=VOLUME_ID)
                return body(infoVolumeResponse=pb.InfoVolumeResponse(volumeInfo=volume))
            case pb.GetKeyInfo:
                name = request.getKeyInfoRequest.keyArgs.keyName
                if name not in self.keys:
                    return refusal(request, pb.KEY_NOT_FOUND)
                found = key_message(name, BUCKET_ID, self.keys[name])
                return body(getKeyInfoResponse=pb.GetKeyInfoResponse(keyInfo=found))
            case pb.ListKeys:
                after = request.listKeysRequest.startKey
                names = sorted(name for name in self.keys if name > after)
                page = [key_message(name, BUCKET_ID, self.keys[name]) for name in names]
                return body(listKeysResponse=pb.ListKeysResponse(keyInfo=page))
            case pb.DBUpdates:
                return self._updates(request)
        raise AssertionError(request.cmdType)

    def _updates(self, request: pb.OMRequest) -> pb.OMResponse:
        after = request.dbUpdatesRequest.sequenceNumber
        newest = self.log[-1][0] if self.log else 0
        if self.is_purged and after < newest:
            text = f"the first available sequence number is {newest + 1} now"
            return refusal(request, pb.INTERNAL_ERROR, text)
        found = [] if self.is_purged else [raw for last, raw in self.log if last > after]
        updates = pb.DBUpdatesResponse(
            sequenceNumber=newest, latestSequenceNumber=newest, data=found, dbUpdateSuccess=True
        )
        answer = pb.OMResponse(cmdType=request.cmdType, status=pb.OK, dbUpdatesResponse=updates)
        return success(request, answer)


@dataclass
class World:
    """A bucket at such an OM. `on_sleep` are what happens while it is waited."""

    om: BufferedOm
    bucket: OzoneBucket
    feed: OzoneFeed
    on_sleep: list[Callable[[], None]]

    def list(self) -> list[str]:
        """All keys, as a comparison sees them."""
        return [one.key for one in OzoneLister(self.bucket).list_objects("")]


@contextmanager
def world() -> Iterator[World]:
    om, on_sleep = BufferedOm(), list[Callable[[], None]]()

    def sleep(_seconds: float) -> None:
        if on_sleep:
            on_sleep.pop(0)()

    with (
        ScriptedOm(om.answer) as server,
        closing(ManagerClient([server.address], user="zoe")) as manager,
    ):
        om.change("first")
        om.flush()
        bucket = OzoneBucket(manager, bucket_facts(FLAT), "")
        yield World(om, bucket, OzoneFeed(bucket, sleep=sleep), on_sleep)


def nothing() -> None:
    """Time passes, and no more."""


def test_a_position_is_settled_once_the_log_has_what_was_seen() -> None:
    with world() as at:
        at.om.change("late")
        assert at.list() == ["first", "late"]
        early = at.feed.position()
        at.on_sleep += [nothing, nothing, at.om.flush]
        settled = at.feed.settled_position()
        assert settled.index > early.index
        batch = at.feed.read(early)
        assert [one.key for one in batch.changes] == ["late"]
        assert batch.position == settled
        assert batch.delay_ms > 0


def test_one_key_that_was_looked_at_is_waited_for_too() -> None:
    with world() as at:
        at.om.change("late")
        assert at.bucket.key("late") is not None
        at.on_sleep += [nothing, nothing, nothing, at.om.flush]
        assert at.feed.settled_position() == at.feed.position()
        assert at.on_sleep == []


def test_a_log_that_does_not_come_after_is_a_gap_and_no_position() -> None:
    with world() as at:
        at.om.change("late")
        at.list()
        with pytest.raises(FeedGapError, match="has shown"):
            at.feed.settled_position()


def test_a_log_that_is_all_purged_is_trusted_after_a_while() -> None:
    with world() as at:
        at.list()
        at.om.is_purged = True
        assert at.feed.settled_position() == at.feed.position()


def test_an_idle_log_is_looked_up_once() -> None:
    """An OM logs a stack trace for each question about what it has purged."""
    with world() as at:
        at.list()
        begun = at.feed.settled_position()
        at.om.is_purged = True
        assert at.feed.settled_position() == begun


# A delete leaves nothing to be seen: there the time counts alone.
@pytest.mark.parametrize(("is_deleted", "waits"), [(False, 0), (False, 3), (True, 0)])
def test_a_change_during_a_comparison_is_in_flight_though_the_log_is_late(
    is_deleted: bool, waits: int
) -> None:
    other = MemoryStore("memory:b", has_feed=True)
    with world() as at:
        source = replace(MemoryStore("memory:a").store(), feed=at.feed)
        at.on_sleep.append(nothing)
        cut = CutCheck(
            source, other.store(), "", rows_are_fresh=True, retried=lambda action: action()
        )
        assert cut.in_flight(0) == 0
        at.om.change("first", is_deleted=is_deleted)
        at.list()
        at.on_sleep[:] = [*[nothing] * waits, at.om.flush]
        assert cut.in_flight(0) == 1


def test_what_the_log_never_shows_is_in_flight() -> None:
    other = MemoryStore("memory:b", has_feed=True)
    with world() as at:
        source = replace(MemoryStore("memory:a").store(), feed=at.feed)
        cut = CutCheck(
            source, other.store(), "", rows_are_fresh=True, retried=lambda action: action()
        )
        at.om.change("late")
        at.list()
        assert cut.in_flight(0) == 1


def test_what_was_written_just_before_is_no_change_during_a_comparison() -> None:
    other = MemoryStore("memory:b", has_feed=True)
    with world() as at:
        source = replace(MemoryStore("memory:a").store(), feed=at.feed)
        at.om.change("late")
        at.on_sleep.append(at.om.flush)
        cut = CutCheck(
            source, other.store(), "", rows_are_fresh=True, retried=lambda action: action()
        )
        at.list()
        assert cut.in_flight(0) == 0
