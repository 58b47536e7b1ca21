"""What is recorded of how far a replication is says whether keys have failed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.replication import Checkpoint, Stage, SyncerId
from replicator.stores.port import FeedPosition
from replicator.syncer.checkpoint_record import CheckpointRecord
from replicator.syncer.folder import SyncerFolder

FIRST = Checkpoint(Stage.LIVE, position=FeedPosition("log", 5))
LATER = replace(FIRST, position=FeedPosition("log", 6))


class MasterLease:
    """A lease that lasts, of a master that keeps what it is told."""

    epoch = 1

    def __init__(self) -> None:
        self.saved = list[Checkpoint]()

    def check(self) -> None:
        """See Lease."""

    def save(self, checkpoint: Checkpoint) -> None:
        """See Lease."""
        self.saved.append(checkpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SyncerFolder]:
    with SyncerFolder(tmp_path, syncer=SyncerId("s"), source="a", target="b") as folder:
        yield folder


def test_a_key_that_fails_is_recorded_at_once_and_once(folder: SyncerFolder) -> None:
    lease, failed = MasterLease(), 0
    record = CheckpointRecord(Checkpoint(), lease=lease, folder=folder, failed=lambda: failed)
    failed = 1
    # Nothing is recorded yet: the next process compares all anyway.
    record.note_failures()
    assert (lease.saved, folder.checkpoint()) == ([], None)
    failed = 0
    record.save(FIRST)
    record.save(FIRST)
    record.note_failures()
    assert lease.saved == [FIRST]
    failed = 2
    record.note_failures()
    record.note_failures()
    assert lease.saved == [FIRST, replace(FIRST, has_failed=True)]
    assert folder.checkpoint() == lease.saved[-1]
    assert record.stage is Stage.LIVE
    failed = 0
    record.save(LATER)
    assert lease.saved[-1] == LATER


def test_what_failed_before_counts_until_all_was_compared(folder: SyncerFolder) -> None:
    lease = MasterLease()
    begun_at = replace(FIRST, has_failed=True)
    record = CheckpointRecord(begun_at, lease=lease, folder=folder, failed=lambda: 0)
    assert record.has_unknown_failures
    record.save(LATER)
    assert record.with_failures(FIRST) == begun_at
    record.note_compared()
    assert not record.has_unknown_failures
    record.save(LATER)
    assert lease.saved == [replace(LATER, has_failed=True), LATER]
