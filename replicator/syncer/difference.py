"""What leads from one snapshot to the next, kept on disk while it is applied.

A source may need long to tell it, and forgets it. So it is written down whole before
the first change is applied, and a restart goes on in it (OZ-065).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from replicator.stores.port import Change, ChangeBatch, FeedPosition, SnapshotFacts, SnapshotStore
from replicator.syncer.prefixes import change_within
from replicator.syncer.queue import ChangeQueue, QueueDamagedError, QueuedChange, clear_folder
from runtime.disk import Disk

# The position behind the last change of a difference that is written down whole.
_END = (1 << 63) - 1
_AT_ONCE = 1_000


class SnapshotDifference:
    """The difference that is being applied. Owned by one thread."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Open what is there.

        Raises:
            DiskError: the folder cannot be read or written.
        """
        try:
            self._queue = ChangeQueue(folder, disk)
        except QueueDamagedError:
            clear_folder(folder, disk)
            self._queue = ChangeQueue(folder, disk)

    @property
    def count(self) -> int:
        """Changes that are not acknowledged."""
        return self._queue.count

    def open(
        self,
        snapshots: SnapshotStore,
        base: SnapshotFacts,
        snapshot: SnapshotFacts,
        prefixes: tuple[str, ...],
    ) -> None:
        """Get the difference, where it is not here already.

        Raises:
            SnapshotLostError: one of the snapshots is gone.
            StoreError: the source cannot tell.
            DiskError: it cannot be written.
        """
        log = "\n".join((base.snapshot_id, snapshot.snapshot_id, *prefixes))
        if self._queue.position == FeedPosition(log, _END):
            self._queue.rewind()
            return
        self._queue.clear()
        self._queue.begin(FeedPosition(log, 0))
        found = snapshots.difference(base, snapshot)
        changes = (one for each in found if (one := change_within(each, prefixes)) is not None)
        numbered = _numbered(changes)
        while some := tuple(islice(numbered, _AT_ONCE)):
            position = FeedPosition(log, some[-1].index)
            self._queue.append(ChangeBatch(some, position, some[-1].index), entries_max=_END)
        self._queue.end(FeedPosition(log, _END))

    def take(self, limit: int) -> list[QueuedChange]:
        """The next changes.

        Raises:
            QueueDamagedError: they cannot be read.
        """
        return self._queue.take(limit)

    def acknowledge(self, number: int) -> None:
        """Let go of all changes up to a number."""
        self._queue.acknowledge(number)

    def close(self) -> None:
        """Drop it: it is applied, or needed no more."""
        self._queue.clear()


def _numbered(changes: Iterator[Change]) -> Iterator[Change]:
    for index, change in enumerate(changes, 1):
        yield replace(change, index=index)
