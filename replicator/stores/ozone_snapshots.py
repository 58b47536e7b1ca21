"""Snapshots of a bucket of Ozone, by its OM."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ozone.manager_values import DiffEntry, DiffState, OzoneSnapshot
from replicator.stores.errors import (
    ObjectMissingError,
    SnapshotLostError,
    StoreError,
    StoreUnavailableError,
)
from replicator.stores.ozone_bucket import SNAPSHOT_ROOT, OzoneBucket, translated
from replicator.stores.ozone_difference import changes_of
from replicator.stores.ozone_feed import OzoneFeed
from replicator.stores.ozone_lister import OzoneLister
from replicator.stores.ozone_objects import OzoneReader
from replicator.stores.port import Change, FeedPosition, SnapshotFacts, SnapshotView
from replicator.stores.s3_objects import S3Reader
from runtime.retry import Sleep

# The OM advises a minute, and takes a fifth of a second.
_DIFF_POLL_S = 0.05
_DIFF_POLL_MAX_S = 2.0
_DIFF_WAIT_S = 3600.0
_POSITIONS_MAX = 1000


class OzoneSnapshots:
    """See SnapshotStore. `gateway` makes a reader below a prefix of the bucket."""

    def __init__(
        self,
        bucket: OzoneBucket,
        feed: OzoneFeed,
        gateway: Callable[[str], S3Reader],
        *,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._bucket, self._feed, self._gateway, self._sleep = bucket, feed, gateway, sleep
        self._positions = dict[str, FeedPosition | None]()

    def create(self, name: str) -> SnapshotFacts:
        """See SnapshotStore. The position is that of the snapshot's row in the log."""
        before = self._feed.position()
        with translated(f"cannot make the snapshot {name!r}"):
            made = self._bucket.manager.create_snapshot(*self._bucket.place, name)
        if len(self._positions) >= _POSITIONS_MAX:
            self._positions.clear()
        self._positions[made.snapshot_id] = self._feed.snapshot_position(before.index, made)
        return self._facts(made)

    def find(self, name: str) -> SnapshotFacts | None:
        """See SnapshotStore. The position is known of those that this process made."""
        with translated(f"cannot look at the snapshot {name!r}"):
            found = self._bucket.manager.snapshot(*self._bucket.place, name)
        return self._facts(found) if found is not None and found.is_active else None

    def named(self, prefix: str) -> Iterator[SnapshotFacts]:
        """See SnapshotStore."""
        with translated("cannot list snapshots"):
            found = list(self._bucket.manager.snapshots(*self._bucket.place, prefix=prefix))
        yield from (self._facts(one) for one in found if one.is_active)

    def open(self, snapshot: SnapshotFacts) -> SnapshotView:
        """See SnapshotStore."""
        root = f"{SNAPSHOT_ROOT}{snapshot.name}/"
        bucket = replace(self._bucket, root=root, snapshot_id=snapshot.snapshot_id)
        gateway = self._gateway(root + bucket.prefix)
        return SnapshotView(OzoneLister(bucket), OzoneReader(bucket, gateway))

    def difference(self, older: SnapshotFacts, newer: SnapshotFacts) -> Iterator[Change]:
        """See SnapshotStore. Of a bucket without directories the OM trims slashes of
        keys: each key that a path may stand for is looked up in both snapshots.
        """
        if older.snapshot_id == newer.snapshot_id:
            return
        pair = self._reading(older), self._reading(newer)
        for one in pair:
            with one.guarded("cannot compare snapshots"):
                pass
        yield from changes_of(self._entries(older, newer), *pair)
        for one in pair:
            with one.guarded("cannot compare snapshots"):
                pass

    def delete(self, name: str) -> None:
        """See SnapshotStore."""
        with translated(f"cannot delete the snapshot {name!r}"):
            self._bucket.manager.delete_snapshot(*self._bucket.place, name)

    def _reading(self, snapshot: SnapshotFacts) -> OzoneBucket:
        root = f"{SNAPSHOT_ROOT}{snapshot.name}/"
        return replace(self._bucket, root=root, snapshot_id=snapshot.snapshot_id)

    def _entries(self, older: SnapshotFacts, newer: SnapshotFacts) -> Iterator[DiffEntry]:
        """Entries of a difference, as the OM sorts them: renames before what was made
        and changed.
        """
        manager, place = self._bucket.manager, self._bucket.place
        names, token = (older.name, newer.name), ""
        what = f"cannot compare the snapshots {older.name} and {newer.name}"
        wait_s, waited_s = _DIFF_POLL_S, 0.0
        try:
            with translated(what):
                manager.submit_diff(*place, *names)
            while True:
                with translated(what):
                    page = manager.diff_page(*place, *names, token=token)
                if page.state is DiffState.ENDED:
                    raise StoreError(f"{what}: {page.reason}")
                if page.state is DiffState.DONE:
                    yield from page.entries
                    token = page.token
                    if not token:
                        return
                    continue
                if waited_s > _DIFF_WAIT_S:
                    raise StoreUnavailableError(f"{what}: the OM takes too long")
                self._sleep(wait_s)
                waited_s, wait_s = waited_s + wait_s, min(2 * wait_s, _DIFF_POLL_MAX_S)
        except ObjectMissingError as error:
            raise SnapshotLostError(error.message) from error

    def _facts(self, found: OzoneSnapshot) -> SnapshotFacts:
        position = self._positions.get(found.snapshot_id)
        return SnapshotFacts(found.name, found.snapshot_id, position, found.created_ms)
