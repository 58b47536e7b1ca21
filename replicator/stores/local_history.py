"""The history of a local bucket by its ports: the feed of changes, and snapshots.

Both are questions to the versions of `local_rows`. A snapshot is a row: it shows the
bucket as it was at one position, and what it shows is not removed before it is deleted.
"""

import secrets
from collections.abc import Callable, Iterator

from replicator.stores.errors import PreconditionFailedError, StoreError
from replicator.stores.local_database import BucketDatabase
from replicator.stores.local_files import DataFiles
from replicator.stores.local_rows import PAGE_ROWS, BucketRows
from replicator.stores.local_view import LocalView
from replicator.stores.port import Change, ChangeBatch, FeedPosition, SnapshotFacts, SnapshotView

_SNAPSHOT_ID_BYTES = 16


class LocalFeed:
    """The changes of one bucket (ChangeFeed)."""

    def __init__(self, database: BucketDatabase) -> None:
        self._database = database

    def position(self) -> FeedPosition:
        """See ChangeFeed."""
        with self._database.view() as rows:
            return rows.position()

    def settled_position(self) -> FeedPosition:
        """See ChangeFeed. A change and its entry are one transaction."""
        return self.position()

    def read(self, after: FeedPosition) -> ChangeBatch:
        """See ChangeFeed."""
        with self._database.view() as rows:
            page, newest = rows.changes(after), rows.position()
        if len(page) < PAGE_ROWS:
            return ChangeBatch(tuple(page), newest, newest.index)
        return ChangeBatch(tuple(page), FeedPosition(newest.log, page[-1].index), newest.index)


class LocalSnapshots:
    """The snapshots of one bucket (SnapshotStore). `sweep` takes what is to be done
    with the rows, and removes what nothing shows any more then.
    """

    def __init__(
        self,
        database: BucketDatabase,
        files: DataFiles,
        now_ms: Callable[[], int],
        sweep: Callable[[Callable[[BucketRows], None]], None],
    ) -> None:
        self._database = database
        self._files = files
        self._now_ms = now_ms
        self._sweep = sweep

    def create(self, name: str) -> SnapshotFacts:
        """See SnapshotStore: nothing is copied."""
        with self._database.change() as rows:
            if rows.snapshot(name) is not None:
                raise PreconditionFailedError(f"there is a snapshot {name!r}", name=name)
            rows.add_snapshot(secrets.token_hex(_SNAPSHOT_ID_BYTES), name, self._now_ms())
            made = rows.snapshot(name)
        assert made is not None
        return made

    def find(self, name: str) -> SnapshotFacts | None:
        """See SnapshotStore."""
        with self._database.view() as rows:
            return rows.snapshot(name)

    def named(self, prefix: str) -> Iterator[SnapshotFacts]:
        """See SnapshotStore."""
        with self._database.view() as rows:
            found = rows.snapshots(prefix)
        yield from found

    def open(self, snapshot: SnapshotFacts) -> SnapshotView:
        """See SnapshotStore."""
        view = LocalView(self._database, self._files, snapshot)
        return SnapshotView(view, view)

    def difference(self, older: SnapshotFacts, newer: SnapshotFacts) -> Iterator[Change]:
        """See SnapshotStore: what the versions between them say, page by page."""
        for changes in (BucketRows.written, BucketRows.removed):
            after = 0
            while True:
                with self._database.view() as rows:
                    first, end = rows.snapshot_position(older), rows.snapshot_position(newer)
                    if first > end:
                        raise StoreError(f"the snapshot {older.name!r} is the newer one")
                    page = changes(rows, first, end, after)
                yield from (change for _, change in page)
                if len(page) < PAGE_ROWS:
                    break
                after = page[-1][0]

    def delete(self, name: str) -> None:
        """See SnapshotStore; the data that it alone has shown are removed."""
        found = self.find(name)
        if found is not None:
            self._sweep(lambda rows: rows.remove_snapshot(found.snapshot_id))
