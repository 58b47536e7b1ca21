"""A queue of changes keeps what was appended, in order, and lets go of what was
acknowledged.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from proof.item import ContentHash, HashAlgorithm
from replicator.stores.port import Change, ChangeBatch, ChangeKind, FeedPosition, ObjectFacts
from replicator.syncer.queue import ChangeQueue, QueueDamagedError, clear_folder
from runtime.disk import Disk

LOG = "om1"
MANY = 1_000_000


def put(index: int, key: str = "k") -> Change:
    return Change(index, key, "", ChangeKind.PUT, time_ms=1_700_000_000_000 + index)


def batch(first: int, end: int, *, position: int | None = None) -> ChangeBatch:
    changes = tuple(put(index, f"k{index}") for index in range(first, end))
    return ChangeBatch(changes, FeedPosition(LOG, position or end - 1), end)


def begun(folder: Path, *, at: int = 0) -> ChangeQueue:
    queue = ChangeQueue(folder)
    queue.begin(FeedPosition(LOG, at))
    return queue


def taken(queue: ChangeQueue) -> list[int]:
    return [one.change.index for one in queue.take(1_000_000)]


def test_changes_come_out_as_they_went_in_also_of_a_new_process(tmp_path: Path) -> None:
    """OZ-082, OZ-094."""
    hashes = (ContentHash(HashAlgorithm.MD5, bytes(16)),)
    facts = ObjectFacts("ü/b", 7, '"e"', 5, "v", hashes=hashes)
    changes = (
        Change(3, "ü/b", "v", ChangeKind.PUT, "", facts, 99),
        Change(3, "ü/c", "", ChangeKind.RENAME, "ü/a"),
        Change(4, "d/", "", ChangeKind.DELETE_PREFIX),
    )
    queue = begun(tmp_path)
    queue.append(ChangeBatch(changes, FeedPosition(LOG, 9), 9), entries_max=10)
    assert [one.change for one in queue.take(10)] == list(changes)
    again = ChangeQueue(tmp_path)
    assert [one.change for one in again.take(10)] == list(changes)
    assert again.position == FeedPosition(LOG, 9)
    assert again.count == 3


def test_what_is_queued_or_acknowledged_already_is_ignored_and_counted(tmp_path: Path) -> None:
    """OZ-104, OZ-105, OZ-106: also after a restart."""
    queue = begun(tmp_path, at=10)
    queue.append(batch(11, 16), entries_max=100)
    queue.acknowledge(2)
    again = ChangeQueue(tmp_path)
    again.begin(FeedPosition(LOG, 12))
    result = again.append(batch(9, 18), entries_max=100)
    assert (result.added, result.duplicates) == (2, 7)
    assert taken(again) == [13, 14, 15, 16, 17]


def test_it_takes_the_configured_number_and_no_more(tmp_path: Path) -> None:
    """OZ-081, OZ-144."""
    queue = begun(tmp_path)
    result = queue.append(batch(1, 2_000), entries_max=1_234)
    assert result.is_full
    assert (result.added, queue.count) == (1_234, 1_234)
    assert queue.position == FeedPosition(LOG, 1_234)
    assert queue.append(batch(1_235, 2_000), entries_max=1_234).added == 0
    queue.acknowledge(1_000)
    queue.rewind()
    assert queue.append(batch(1_235, 2_000), entries_max=1_234).added == 765
    assert taken(queue) == list(range(1_001, 2_000))


def test_changes_that_took_effect_together_stay_together(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    changes = (put(1), put(2, "a"), put(2, "b"), put(2, "c"), put(3))
    whole = ChangeBatch(changes, FeedPosition(LOG, 3), 3)
    assert queue.append(whole, entries_max=3).added == 1
    assert queue.position == FeedPosition(LOG, 1)
    assert queue.append(whole, entries_max=5).added == 4


def test_space_returns_once_changes_are_acknowledged(tmp_path: Path) -> None:
    """OZ-089."""
    queue = begun(tmp_path)
    for first in range(1, 200_000, 1_000):
        queue.append(batch(first, first + 1_000), entries_max=MANY)

    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    full = used()
    while found := queue.take(10_000):
        queue.acknowledge(found[-1].number)
    assert full > 8 << 20
    assert used() < 5 << 20
    assert ChangeQueue(tmp_path).position == queue.position


def test_a_rewound_queue_begins_at_the_first_change_not_acknowledged(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    queue.append(batch(1, 3_000), entries_max=MANY)
    assert len(queue.take(1_777)) == 1_777
    queue.acknowledge(700)
    queue.rewind()
    assert taken(queue) == list(range(701, 3_000))


def test_reading_and_appending_go_on_over_many_files(tmp_path: Path) -> None:
    queue, expected, found = begun(tmp_path), 1, list[int]()
    for first in range(1, 120_000, 700):
        queue.append(batch(first, first + 700), entries_max=MANY)
        found = [one.change.index for one in queue.take(613)]
        assert found == list(range(expected, expected + 613))
        expected += 613
        queue.acknowledge(expected - 100)
    assert taken(queue)[0] == expected


def test_a_page_torn_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    """OZ-094: it was acknowledged to nobody."""
    queue = begun(tmp_path)
    queue.append(batch(1, 50), entries_max=MANY)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_size
    queue.append(batch(50, 90), entries_max=MANY)
    whole = path.read_bytes()
    for cut in range(before, len(whole), 37):
        path.write_bytes(whole[:cut])
        again = ChangeQueue(tmp_path)
        assert again.position == FeedPosition(LOG, 49)
        again.append(batch(50, 60), entries_max=MANY)
        assert taken(ChangeQueue(tmp_path)) == list(range(1, 60))


def test_damage_elsewhere_is_named_and_the_folder_can_be_cleared(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    queue.append(batch(1, 50), entries_max=MANY)
    queue.append(batch(50, 90), entries_max=MANY)
    (path,) = tmp_path.iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(QueueDamagedError) as failed:
        ChangeQueue(tmp_path)
    assert failed.value.facts["path"] == str(path)
    clear_folder(tmp_path, Disk())
    assert ChangeQueue(tmp_path).position is None


def test_a_file_that_is_missing_is_found(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    for first in range(1, 300_001, 10_000):
        queue.append(batch(first, first + 10_000), entries_max=MANY)
    middle = sorted(tmp_path.iterdir())[1]
    middle.unlink()
    with pytest.raises(QueueDamagedError):
        ChangeQueue(tmp_path)


def test_a_position_of_another_log_begins_the_queue_anew(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    queue.append(batch(1, 50), entries_max=MANY)
    queue.begin(FeedPosition("om2", 7))
    assert (queue.count, queue.position) == (0, FeedPosition("om2", 7))
    with pytest.raises(QueueDamagedError):
        queue.append(batch(8, 9), entries_max=MANY)


def test_a_position_beyond_the_queue_begins_it_anew(tmp_path: Path) -> None:
    queue = begun(tmp_path)
    queue.append(batch(1, 50), entries_max=MANY)
    queue.begin(FeedPosition(LOG, 80))
    assert (queue.count, queue.position) == (0, FeedPosition(LOG, 80))


def test_a_million_changes_wait_in_little_memory(tmp_path: Path) -> None:
    """The process takes 150 MB at most; the rest is on disk."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.full_queue", str(tmp_path), str(MANY)],
        check=True,
        capture_output=True,
        text=True,
    )
    count, peak_kib = map(int, run.stdout.split())
    assert count == MANY
    assert peak_kib * 1024 <= 150e6
