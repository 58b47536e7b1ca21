"""The changes of a bucket of Ozone, from the log of its OM's database.

An OM numbers its log by itself and keeps it for about twenty minutes; another OM of the
service has other numbers. A position is a number, and its log names all that must be
the same for the number to mean the same: the OM, the bucket, and Raft's term at which
the log was first read. What follows a position is told only where this is shown:

* by a process that has read on without a break of its connection, or
* by the batch that ends there: its index and term of Raft are those known to this
  process, or its term is the log's. A database that was restored, and has grown past
  the position since, has another term there.

An OM answers a change once it is in memory, and shows it from then on. A thread of its
own writes such changes to the log, in order: one round is being written, the next one
has all that was answered. So how late a change comes has no bound that is proven; we
have measured 55 ms. A position is settled after `_SETTLE_S`, and only if the log has
the newest change that was seen here: each key bears its place in the log of Raft.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ozone.bucket_log import BatchChanges, BucketLog, KeyChange, KeyEvent
from ozone.directory_map import DirectoryMap
from ozone.errors import LogGapError, LogTrimmedError
from ozone.key_pages import walk_tree
from ozone.log_rows import RowReader, RowValue
from ozone.manager_values import OzoneSnapshot, TransactionIndex
from ozone.write_batch import WriteBatch, parse_batch
from replicator.stores.errors import FeedGapError, PositionTrimmedError
from replicator.stores.ozone_bucket import OzoneBucket, facts_of, translated
from replicator.stores.ozone_lister import OzoneLister
from replicator.stores.port import Change, ChangeBatch, ChangeKind, FeedPosition
from runtime.retry import Sleep

# Numbers of one page; a commit of a key takes about three.
_PAGE_NUMBERS = 2000
# Before a position, so that the batch that ends there is found. A request that deletes
# 1,000 keys makes one of 2,000 records.
_LOOK_BACK = (200, 4_000, 100_000)
_KINDS = {kind: ChangeKind(kind.value) for kind in KeyEvent}
_UNKNOWN_TERM = 0
_ROW_TRIES = 500
_ROW_WAIT_S = 0.01
# More than four times what was measured on two busy cores.
_SETTLE_S = 0.25
_SETTLE_TRIES = 20


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A place of the log: the batch that ends at `number`, if the OM still has one, was
    of this transaction.
    """

    number: int
    transaction: TransactionIndex | None


class OzoneFeed:
    """See ChangeFeed."""

    def __init__(self, bucket: OzoneBucket, *, sleep: Sleep = time.sleep) -> None:
        self._bucket, self._sleep = bucket, sleep
        self._lock = threading.Lock()
        self._rows = RowReader()
        self._log: BucketLog | None = None
        self._anchor: _Anchor | None = None
        self._name = ""
        self._generation = -1
        self._logged_index = 0

    def position(self) -> FeedPosition:
        """See ChangeFeed. The first call looks at all directories of the bucket, where
        it has some.
        """
        with self._lock, translated("cannot look at the log of the OM"):
            generation = self._bucket.manager.generation
            newest = self._newest()
            if self._log is None or self._generation != generation:
                self._confirm(generation)
            if self._log is None:
                anchor = self._anchor_at(newest)
                term = anchor.transaction.term if anchor.transaction else _UNKNOWN_TERM
                self._begin(f"{self._identity()}/{term}", anchor)
                self._generation = generation
            return FeedPosition(self._name, newest)

    def settled_position(self) -> FeedPosition:
        """See ChangeFeed. Where the OM has purged the whole log, the time that has
        passed must do.
        """
        seen = self._bucket.seen.newest
        for _ in range(_SETTLE_TRIES):
            self._sleep(_SETTLE_S)
            position = self.position()
            if self._has_logged(seen, position.index):
                return position
        raise FeedGapError(
            "the log of the OM lacks a change that the OM has shown", hint="Compare once more."
        )

    def read(self, after: FeedPosition) -> ChangeBatch:
        """See ChangeFeed. Changes of one batch have one index."""
        with self._lock, translated("cannot read the log of the OM"), self._forgets_at_gap():
            self._go_to(after)
            found = self._bucket.manager.updates(after.index, limit=_PAGE_NUMBERS)
            changes = tuple(self._taken(found.batches))
            assert self._anchor is not None
            last = self._anchor.number
            if last > found.newest:
                raise LogGapError(f"the log has {last}, beyond its newest number {found.newest}")
            return ChangeBatch(
                changes, FeedPosition(after.log, last), found.newest, int(_SETTLE_S * 1000)
            )

    def snapshot_position(self, after: int, snapshot: OzoneSnapshot) -> FeedPosition | None:
        """The position of a snapshot that was made after a number: its row is alone in
        its batch, which the OM may write a moment after it has answered. None where the
        log does not show it in time.

        Raises:
            StoreError: the OM did not say.
        """
        with self._lock, translated("cannot read the log of the OM"):
            rows = RowReader()
            for _ in range(_ROW_TRIES):
                found = self._bucket.manager.updates(after, limit=_PAGE_NUMBERS).batches
                for batch in map(parse_batch, found):
                    for row in filter(None, map(rows.read, batch.records)):
                        if _is_row_of(snapshot, row.value):
                            return FeedPosition(self._name, batch.last) if self._name else None
                    after = batch.last
                if not found:
                    self._sleep(_ROW_WAIT_S)
            return None

    def _has_logged(self, seen: int, number: int) -> bool:
        """Whether the log has a change by its place in Raft's log, up to a number."""
        with self._lock, translated("cannot look at the log of the OM"):
            if seen > self._logged_index:
                found = self._anchor_at(number).transaction
                if found is None:
                    return True
                self._logged_index = max(found.index, self._logged_index)
            return seen <= self._logged_index

    def _go_to(self, after: FeedPosition) -> None:
        """Make sure that the log goes on after a position, and follow it from there.

        Raises:
            FeedGapError: it is of another log.
            LogGapError: the OM does not have it, or has another history there.
        """
        if after.index < 0:
            raise PositionTrimmedError("the position is before every log")
        generation = self._bucket.manager.generation
        if self._generation != generation:
            self._confirm(generation)
        if self._anchor is not None and self._name == after.log:
            if self._anchor.number == after.index:
                return
            if self._anchor.number < after.index:
                self._skim(after.index)
                return
        identity, _, term = after.log.rpartition("/")
        if identity != self._identity():
            raise FeedGapError("the position is of the log of another OM, or of another bucket")
        anchor = self._anchor_at(after.index)
        transaction = anchor.transaction
        # What this process has read in one piece is one history.
        is_proven = self._anchor is not None and self._name == after.log
        if transaction is not None:
            is_proven = is_proven or str(transaction.term) == term
        elif not is_proven:
            is_proven = self._newest() == after.index
        if not is_proven:
            raise LogGapError("the log has another history there than the position")
        self._begin(after.log, anchor)
        self._generation = generation

    def _confirm(self, generation: int) -> None:
        """Whoever answers now must have the history that was read so far."""
        if self._anchor is not None and not self._is_same(self._anchor):
            self._forget()
        self._generation = generation

    @contextmanager
    def _forgets_at_gap(self) -> Iterator[None]:
        """Begin anew after a gap: no later position can be reached from before it."""
        try:
            yield
        except (LogTrimmedError, LogGapError):
            self._forget()
            raise

    def _forget(self) -> None:
        self._log, self._anchor, self._name = None, None, ""
        self._rows = RowReader()

    def _skim(self, number: int) -> None:
        """Follow the log up to a number, whatever happened on the way.

        Raises:
            LogGapError: no batch ends there.
        """
        assert self._anchor is not None
        for batch in self._batches(self._anchor.number, number):
            for _ in self._taken([batch]):
                pass
        if self._anchor.number != number:
            raise LogGapError(f"no batch of the log ends with {number}")

    def _taken(self, batches: Iterable[WriteBatch | bytes]) -> Iterator[Change]:
        """The changes of batches, which must be the next ones.

        Raises:
            LogGapError: they are not.
            WriteBatchError: one cannot be decoded.
        """
        assert self._log is not None
        assert self._anchor is not None
        # Where something fails the log must not go on as if it were read.
        log, anchor = self._log, self._anchor
        self._log, self._anchor, name, self._name = None, None, self._name, ""
        for one in batches:
            batch = parse_batch(one) if isinstance(one, bytes) else one
            if batch.first != anchor.number + 1:
                raise LogGapError(f"the log goes on with {batch.first} after {anchor.number}")
            taken = log.take(batch)
            anchor = _next(anchor, batch, taken.transaction)
            yield from self._changes(batch, taken)
        self._log, self._anchor, self._name = log, anchor, name

    def _newest(self) -> int:
        """The newest number of the OM's database."""
        try:
            return self._bucket.manager.updates(0, limit=1).newest
        except LogTrimmedError as error:
            first = error.facts["first"]
            if not isinstance(first, int):
                raise
            return self._bucket.manager.updates(first - 1, limit=1).newest

    def _anchor_at(self, number: int) -> _Anchor:
        """What is known of the place with this number.

        Raises:
            LogTrimmedError: the log after it is no longer kept.
            LogGapError: no batch ends there.
        """
        transaction: TransactionIndex | None = None
        for back in _LOOK_BACK:
            try:
                batches = [*self._batches(max(0, number - back), number)]
            except LogTrimmedError as error:
                first = error.facts["first"]
                if not isinstance(first, int) or first > number + 1:
                    raise
                batches = [*self._batches(first - 1, number)] if first <= number else []
            for batch in batches:
                transaction = _transaction(batch, self._rows) or transaction
            if batches and batches[-1].last == number:
                return _Anchor(number, transaction)
            if batches and batches[-1].last > number:
                raise LogGapError(f"no batch of the log ends with {number}")
            if number - back <= 0:
                break
        return _Anchor(number, transaction)

    def _batches(self, after: int, last: int) -> Iterator[WriteBatch]:
        """Batches after a number, up to the one that has `last`."""
        while after < last:
            found = self._bucket.manager.updates(after, limit=_PAGE_NUMBERS).batches
            if not found:
                return
            for batch in map(parse_batch, found):
                if batch.first > last:
                    return
                yield batch
                after = batch.last

    def _is_same(self, anchor: _Anchor) -> bool:
        """Whether the OM still has the history that this process has read."""
        try:
            return self._anchor_at(anchor.number).transaction == anchor.transaction
        except LogGapError:
            return False

    def _identity(self) -> str:
        """What must stay the same for numbers to mean the same."""
        node = next((one.node_id for one in self._bucket.manager.nodes() if one.is_leader), "")
        facts = self._bucket.facts
        return f"{node}/{facts.object_id:x}-{facts.created_ms:x}"

    def _begin(self, name: str, anchor: _Anchor) -> None:
        """Follow the bucket from a place on."""
        manager, facts = self._bucket.manager, self._bucket.facts
        directories, known_from = None, 0
        if self._bucket.is_tree:
            directories = DirectoryMap(facts.object_id)
            page = OzoneLister(self._bucket).directory_page
            ids = {"": facts.object_id}
            for one in walk_tree(page, "", "", with_directories=True):
                if one.is_directory:
                    parent, _, name_here = one.key.removesuffix("/").rpartition("/")
                    above = ids[f"{parent}/" if parent else ""]
                    directories.put(one.facts.object_id, above, name_here)
                    ids[one.key] = one.facts.object_id
            known_from = self._newest()
        volume_id = manager.volume_id(facts.volume)
        self._log = BucketLog(facts, volume_id, directories, known_from=known_from, rows=self._rows)
        self._anchor, self._name = anchor, name

    def _changes(self, batch: WriteBatch, taken: BatchChanges) -> Iterator[Change]:
        for one in taken.changes:
            yield from self._change(batch.last, one)
        for name in taken.unplaced:
            key = self._bucket.relative(name)
            # A row of a table that is not known: what is there now says what it was.
            if key is not None and self._bucket.key(key) is None:
                yield Change(batch.last, key, "", ChangeKind.DELETE)

    def _change(self, index: int, one: KeyChange) -> Iterator[Change]:
        """A change by the keys of the ports; a rename across the border of the prefix
        is a new object, or one less.
        """
        key, previous = self._bucket.relative(one.key), self._bucket.relative(one.previous)
        is_prefix = one.kind in (KeyEvent.DELETE_PREFIX, KeyEvent.RENAME_PREFIX)
        if is_prefix and self._bucket.prefix.startswith((one.key, one.previous or one.key)):
            raise LogGapError(f"the directory {one.key} above the prefix was renamed or deleted")
        if key is None and previous is not None:
            kind = ChangeKind.DELETE_PREFIX if is_prefix else ChangeKind.DELETE
            yield Change(index, previous, "", kind)
            return
        if key is None:
            return
        kind = _KINDS[one.kind]
        if one.previous and previous is None:
            if is_prefix:
                raise LogGapError(f"the directory {one.previous} was moved below the prefix")
            kind = ChangeKind.PUT
        facts = None if one.facts is None else facts_of(key, one.facts)
        yield Change(
            index,
            key,
            facts.version if facts else "",
            kind,
            previous or "",
            facts,
            facts.modified_ms if facts else 0,
        )


def _is_row_of(snapshot: OzoneSnapshot, value: RowValue) -> bool:
    return isinstance(value, OzoneSnapshot) and value.snapshot_id == snapshot.snapshot_id


def _transaction(batch: WriteBatch, rows: RowReader) -> TransactionIndex | None:
    """Raft's index of a batch."""
    for row in rows.read_all(batch.records):
        if isinstance(row.value, TransactionIndex):
            return row.value
    return None


def _next(anchor: _Anchor, batch: WriteBatch, transaction: TransactionIndex | None) -> _Anchor:
    """The place after a batch.

    Raises:
        LogGapError: Raft's index goes back.
    """
    before = anchor.transaction
    if transaction is None:
        return _Anchor(batch.last, before)
    if before is not None and (transaction.index < before.index or transaction.term < before.term):
        raise LogGapError("the index of Raft goes back: the database was restored")
    return _Anchor(batch.last, transaction)
