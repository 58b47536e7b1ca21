"""A crash at any operation of a queue: what was appended is there, in its order, and no
more than was let go of is missing.
"""

import errno
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from replicator.stores.port import Change, ChangeBatch, ChangeKind, FeedPosition
from replicator.syncer.queue import ChangeQueue
from runtime.disk import Operation
from tests.support.disk import FailingDisk, ImagingDisk

pytestmark = pytest.mark.crashes

SEGMENT_BYTES = 400


def batch(first: int, count: int) -> ChangeBatch:
    changes = tuple(Change(at, f"k{at}", "", ChangeKind.PUT) for at in range(first, first + count))
    return ChangeBatch(changes, FeedPosition("log", first + count - 1), first + count - 1)


def indexes(queue: ChangeQueue) -> list[int]:
    return [one.change.index for one in queue.take(1_000)]


def test_a_crash_at_any_operation_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    """OZ-082, OZ-094."""
    root = tmp_path / "queue"
    root.mkdir()
    disk = ImagingDisk(root, tmp_path / "images")
    queue = ChangeQueue(root, disk, segment_bytes=SEGMENT_BYTES)
    queue.begin(FeedPosition("log", 0))
    appended, released = {0: 0}, {0: 0}
    for first in range(1, 80, 8):
        queue.append(batch(first, 8), entries_max=1_000)
        appended[len(disk.operations)] = first + 7
        if first > 20:
            queue.take(8)
            released[len(disk.operations)] = first - 16
            queue.acknowledge(first - 16)
    images = disk.finish()
    assert len(images) > 60
    for image in images:
        durable = max(index for at, index in appended.items() if at <= image.number)
        gone = max(number for at, number in released.items() if at <= image.number)
        again = ChangeQueue(image.folder, segment_bytes=SEGMENT_BYTES)
        found = indexes(again)
        end = found[-1] if found else 0
        assert end >= durable, image
        assert found == list(range(found[0] if found else 1, end + 1)), image
        assert not found or found[0] <= gone + 1, image
        if again.position is None:
            again.begin(FeedPosition("log", 0))
        again.append(batch(end + 1, 3), entries_max=1_000)
        assert indexes(again) == [end + 1, end + 2, end + 3]


def test_a_disk_that_fails_once_loses_nothing(tmp_path: Path) -> None:
    for number in range(12):
        seen = list[Operation]()

        def fails(operation: Operation, _path: Path, seen: list[Operation] = seen) -> bool:
            seen.append(operation)
            return len(seen) == number + 1  # noqa: B023 - used before the next

        folder = tmp_path / str(number)
        folder.mkdir()
        disk = FailingDisk(errno.ENOSPC, fails)
        queue = ChangeQueue(folder, disk, segment_bytes=SEGMENT_BYTES)
        first = 1
        while first < 40:
            try:
                if queue.position is None:
                    queue.begin(FeedPosition("log", 0))
                queue.append(batch(first, 4), entries_max=1_000)
                first += 4
            except ReconcileError:
                continue
        assert indexes(queue) == list(range(1, first))
        assert indexes(ChangeQueue(folder, segment_bytes=SEGMENT_BYTES)) == list(range(1, first))
