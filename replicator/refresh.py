"""Bring a bucket's index up to date with its store, and deepen what it knows.

A listing is merged with the rows of the index. A row whose stamp (version, ETag, time)
is unchanged keeps its item. Every other key is asked for by itself, because a listing
may be older than a write that the index has already: that the key is gone, its
properties, and the hash by the profile's algorithm, as the store recorded it, else by
reading the object once. A scrub reads again whatever was not read for a while; what was
read replaces what was recorded, so that damage behind the store's own index changes the
root.

Others may write to the index meanwhile. A row that changed since it was looked at is
left alone: whoever wrote it knows better.

No store lists a bucket as it is at one moment. But what a refresh finds as the index
had it was so all the time between: so a refresh that finds nothing else shows what the
bucket was when it began (IndexedBucket.settled_root).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeGuard

from proof.errors import JournalTrimmedError
from proof.index import IndexWriter, ItemEvidence, KeyRange, Position, Stamp, StampedItem
from proof.item import (
    KEY_HASH_BYTES,
    EvidenceLevel,
    Item,
    ItemHasher,
    Profile,
    properties_digest,
)
from proof.root import SetRoot
from proof.stored_index import StoredIndex
from replicator.copier import NewExecutor
from replicator.crossing import Crossing
from replicator.hashing import ContentHasher
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.stores.stamps import same_stamp
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock, RateLimiter

# Rows of the index in one page of the merge, and changes in one transaction.
_PAGE = 1_000
# What was found is noted at least this often: reading an object may take minutes.
_SAVE_EVERY_S = 5.0
# Objects that are described at a time: each takes a request or two, near the store.
_THREADS = 8
_DESCRIBED_MAX = 64
# An object that changes under every attempt is noted by the next refresh.
_ATTEMPTS = 3
# Changes by others during a refresh that are looked through, lest they fill memory.
_OTHERS_MAX = 20_000
# A time after all, in seconds since 1970: every object is read, whatever clocks say.
READ_ALL_S = 1 << 40
# Keys that a refresh names as damaged: 60 kB of a message.
DAMAGED_MAX = 10_000
_SURROGATES = range(0xD800, 0xE000)
_CODE_POINTS = 0x110000
# What stores answer for an object without a content type. Both mean just that.
_NO_CONTENT_TYPES = frozenset(
    ("content-type", f"{name}/octet-stream") for name in ("binary", "application")
)


@dataclass(frozen=True, slots=True)
class RefreshProgress:
    """What one refresh did so far.

    `damaged` counts objects whose bytes changed, or cannot be read any more, under an
    unchanged stamp; `unreadable` all that cannot be read; `unsettled` those that
    changed while they were described: the index leaves these as they were. Of a refresh
    that has ended, `damaged_keys` are the first keys of which the index says so, also
    by what earlier ones found.
    """

    objects: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    damaged: int = 0
    unreadable: int = 0
    unsettled: int = 0
    bytes_read: int = 0
    damaged_keys: tuple[str, ...] = ()


def _ignore(_progress: RefreshProgress) -> None:
    """Nobody wants to know."""


class MoveCount:
    """Counts objects that refreshes of one bucket found to be others than the index
    had, or could not describe. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves = 0

    @property
    def moves(self) -> int:
        """How many so far."""
        with self._lock:
            return self._moves

    def add(self) -> None:
        """Count one more."""
        with self._lock:
            self._moves += 1


@dataclass(frozen=True, slots=True)
class RefreshStart:
    """What was known of a bucket just before a refresh: the position of its index, and
    the count of moves.
    """

    position: Position
    moves: int


# A key, the facts that a listing has of it, and its row.
_Listed: TypeAlias = tuple[str, ObjectFacts | None, StampedItem | None]


class Refresher:
    """Refreshes the index of one bucket. Make one for each run."""

    def __init__(
        self,
        store: Store,
        index: IndexWriter,
        profile: Profile,
        *,
        clock: Clock,
        limiter: RateLimiter,
        stopped: Callable[[], bool],
        writing: AbstractContextManager[object],
        moves: MoveCount,
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        """`limiter` bounds the bytes read; `stopped` says whether to give up. `writing`
        is held by one writer of the index at a time. `moves` counts what turned out to
        be another object than the index had.
        """
        self._store = store
        self._index = index
        self._profile = profile
        self._clock = clock
        self._limiter = limiter
        self._stopped = stopped
        self._writing = writing
        self._moves = moves
        self._new_executor = new_executor
        # The run has ended, with or without an error.
        self._ended = threading.Event()

    def refresh(
        self,
        *,
        read_since_s: int = 0,
        prefix: str = "",
        note: Callable[[RefreshProgress], None] = _ignore,
    ) -> RefreshProgress:
        """List the store below a prefix, and bring the index up to date; `note` gets
        the progress after each key.

        Objects whose bytes were not read since `read_since_s` (seconds since 1970) are
        read again; 0 reads only those of which the store has no hash.

        Raises:
            StoreError: the listing is not complete, or the store did not answer; what
                was found until then is kept.
            OperationInterruptedError: `stopped`; what was found is kept as well.
            DatabaseError: the index cannot be written.
        """
        began_at_s = self._clock.now_ms() // 1000
        progress = self._run(self._merged(prefix), read_since_s, note)
        with self._writing:
            complete = not progress.unsettled
            self._index.note_listing(prefix, began_at_s=began_at_s, complete=complete)
        return progress

    def scrub(
        self, *, read_since_s: int, note: Callable[[RefreshProgress], None] = _ignore
    ) -> RefreshProgress:
        """Read every object of the index whose bytes were not read since then. Nothing
        is listed; each key is asked for.

        Raises:
            StoreError: the store did not answer; what was found is kept.
            OperationInterruptedError: `stopped`; what was found is kept.
            DatabaseError: the index cannot be written.
        """
        due = (
            (row.item.key, None, row)
            for row in self._rows("")
            if not self._knows(row, read_since_s)
        )
        return self._run(due, read_since_s, note)

    def _run(
        self, keys: Iterable[_Listed], read_since_s: int, note: Callable[[RefreshProgress], None]
    ) -> RefreshProgress:
        progress, found = RefreshProgress(), list[tuple[StampedItem | None, _Described]]()
        damaged = list[str]()
        saved_at_s = self._clock.monotonic_s()
        try:
            for row, described in self._described(keys, read_since_s):
                progress = _plus(progress, row, described)
                if described.is_unsettled or _is_moved(row, described.item):
                    self._moves.add()
                is_damaged = described.item is not None and described.item.is_damaged
                if is_damaged and len(damaged) < DAMAGED_MAX:
                    damaged.append(described.key)
                if not described.is_unsettled and described.item != row:
                    found.append((row, described))
                is_late = self._clock.monotonic_s() - saved_at_s >= _SAVE_EVERY_S
                if len(found) >= _PAGE or is_late:
                    saved_at_s = self._clock.monotonic_s()
                    self._save(found)
                note(progress)
        finally:
            self._save(found)
        return replace(progress, damaged_keys=tuple(damaged))

    def _save(self, found: list[tuple[StampedItem | None, "_Described"]]) -> None:
        pending, found[:] = found[:], []
        if not pending:
            return
        with self._writing:
            self._index.apply(
                [
                    (described.key, described.item)
                    for row, described in pending
                    if self._index.row(described.key) == row
                ]
            )

    def _described(
        self, keys: Iterable[_Listed], read_since_s: int
    ) -> Iterator[tuple[StampedItem | None, "_Described"]]:
        """Each row and what its object turns out to be, some ahead of the reader."""
        waiting = deque[tuple[StampedItem | None, Future[_Described]]]()
        pool = self._new_executor(_THREADS, "describe")
        try:
            for key, facts, row in keys:
                if self._stopped():
                    raise OperationInterruptedError("the refresh was stopped")
                waiting.append((row, pool.submit(self._describe, key, facts, row, read_since_s)))
                if len(waiting) >= _DESCRIBED_MAX:
                    row, first = waiting.popleft()
                    yield row, first.result()
            while waiting:
                row, first = waiting.popleft()
                yield row, first.result()
        finally:
            self._ended.set()
            pool.shutdown(cancel_futures=True)

    def _merged(self, prefix: str) -> Iterator[_Listed]:
        """The listing and the rows of the index, joined by key."""
        rows = self._rows(prefix)
        row = next(rows, None)
        for facts in self._store.lister.list_objects(prefix):
            while row is not None and row.item.key < facts.key:
                yield row.item.key, None, row
                row = next(rows, None)
            if row is not None and row.item.key == facts.key:
                yield facts.key, facts, row
                row = next(rows, None)
            else:
                yield facts.key, facts, None
        while row is not None:
            yield row.item.key, None, row
            row = next(rows, None)

    def _rows(self, prefix: str) -> Iterator[StampedItem]:
        after = ""
        while page := self._index.rows(start_after=after, limit=_PAGE, prefix=prefix):
            yield from page
            after = page[-1].item.key

    def _describe(
        self, key: str, facts: ObjectFacts | None, row: StampedItem | None, read_since_s: int
    ) -> "_Described":
        for _ in range(_ATTEMPTS):
            if self._stopped():
                raise OperationInterruptedError("the refresh was stopped")
            try:
                if facts is not None and self._settles(row, facts, read_since_s):
                    return self._kept(facts, row)
                # The listing may be older than the row: ask for the key itself.
                facts = self._store.reader.facts(key)
                if facts is None:
                    return _Described(key, None)
                if not self._settles(row, facts, read_since_s):
                    return self._look(facts, row, read_since_s)
            except (ObjectMissingError, PreconditionFailedError):
                facts = None
        return _Described(key, row, is_unsettled=True)

    def _settles(
        self, row: StampedItem | None, facts: ObjectFacts, read_since_s: int
    ) -> TypeGuard[StampedItem]:
        """Whether the row has all that is wanted of the object with these facts."""
        return row is not None and is_unchanged(row, facts) and self._knows(row, read_since_s)

    def _knows(self, row: StampedItem, read_since_s: int) -> bool:
        """Whether an unchanged row needs no other look at its object."""
        if read_since_s:
            return row.evidence.read_at_s is not None and row.evidence.read_at_s >= read_since_s
        return self._profile.algorithm is None or row.item.content is not None

    def _kept(self, facts: ObjectFacts, row: StampedItem) -> "_Described":
        """The row of an object that its stamp shows unchanged."""
        # Stores differ in which parts of a stamp a listing has, and a write's answer.
        stamp = Stamp(
            facts.version or row.stamp.version,
            facts.etag,
            max(facts.modified_ms, row.stamp.modified_ms),
        )
        item = row.item
        if not self._store.capabilities.stamps_cover_properties:
            item = replace(item, properties=self._properties(facts))
        return _Described(facts.key, replace(row, item=item, stamp=stamp))

    def _look(self, facts: ObjectFacts, row: StampedItem | None, read_since_s: int) -> "_Described":
        algorithm = self._profile.algorithm
        item = Item(facts.key, facts.size_bytes, None, self._properties(facts))
        listed = StampedItem(item, ItemEvidence(EvidenceLevel.LISTED), stamp_of(facts))
        if algorithm is None:
            return _Described(facts.key, listed)
        is_same = row is not None and is_unchanged(row, facts)
        listed = replace(listed, is_damaged=is_same and row is not None and row.is_damaged)
        before = row.item.content if row is not None and is_same else None
        # Without content it was unreadable, and what the store recorded proves nothing.
        must_read = read_since_s or (is_same and before is None)
        recorded = {known.algorithm: known.digest for known in facts.hashes}.get(algorithm)
        if recorded is not None and not must_read:
            evidence = ItemEvidence(EvidenceLevel.RECORDED)
            item = replace(item, content=recorded)
            return _Described(facts.key, replace(listed, item=item, evidence=evidence))
        try:
            content = self._read(facts)
        except (ObjectMissingError, PreconditionFailedError):
            raise
        except StoreError as error:
            if error.retryable:
                raise
            if is_found := before is not None:
                listed = replace(listed, is_damaged=True)
            return _Described(facts.key, listed, is_damaged=is_found, is_unreadable=True)
        # The store calls it the same object: other bytes than before are damage.
        is_found = before not in (None, content)
        evidence = ItemEvidence(EvidenceLevel.READ, read_at_s=self._clock.now_ms() // 1000)
        return _Described(
            facts.key,
            replace(
                listed,
                item=replace(item, content=content),
                evidence=evidence,
                is_damaged=listed.is_damaged or is_found,
            ),
            bytes_read=facts.size_bytes,
            is_damaged=is_found,
        )

    def _properties(self, facts: ObjectFacts) -> bytes:
        if not self._profile.properties:
            return b""
        return digest_of(self._store.reader.properties_of(facts), self._profile)

    def _read(self, facts: ObjectFacts) -> bytes:
        assert self._profile.algorithm is not None
        hasher = ContentHasher()
        with self._store.reader.read(facts) as pieces:
            for piece in pieces:
                if self._stopped() or self._ended.is_set():
                    raise OperationInterruptedError("the refresh was stopped")
                hasher.update(piece)
                self._limiter.take(len(piece))
        return next(
            known.digest for known in hasher.hashes() if known.algorithm is self._profile.algorithm
        )


@dataclass(frozen=True, slots=True)
class IndexedBucket:
    """A bucket with its index. `writing` is held by one writer of the index at a
    time, `moves` counts for all refreshes, and `new_executor` makes their threads.
    """

    store: Store
    index: StoredIndex
    profile: Profile
    clock: Clock
    writing: AbstractContextManager[object] = field(default_factory=threading.Lock)
    moves: MoveCount = field(default_factory=MoveCount)
    new_executor: NewExecutor = ThreadPoolExecutor

    def start(self) -> RefreshStart:
        """Note what is known before a refresh; for `settled_root` after it.

        Raises:
            DatabaseError: the index cannot be read.
        """
        # Moves first: what comes between the two counts as one.
        moves = self.moves.moves
        with self.index.snapshot() as snapshot:
            return RefreshStart(snapshot.position, moves)

    def settled_root(self, start: RefreshStart, prefix: str = "") -> SetRoot | None:
        """The root of what the bucket held below a prefix when `start` was taken, after
        a refresh that ended since; None if anything may have changed meanwhile.

        An object that appeared and vanished between two refreshes was seen by neither.

        Raises:
            DatabaseError, IndexDamagedError: the index cannot be read.
        """
        with self.index.snapshot() as snapshot:
            root, now = snapshot.roots([prefix_range(prefix)])[0], snapshot.position
        if self.moves.moves != start.moves or now - start.position > _OTHERS_MAX:
            return None
        try:
            changes = self.index.changes(after=start.position, through=now)
        except JournalTrimmedError:
            return None
        return None if any(change.key.startswith(prefix) for change in changes) else root

    def key_hashes(self, keys: Iterable[str]) -> frozenset[bytes]:
        """The hashes (KEY_HASH_BYTES) by which a proof knows keys."""
        hasher = ItemHasher(self.profile)
        return frozenset(
            hasher.key_hash(key.encode(), b"").to_bytes(KEY_HASH_BYTES, "big") for key in keys
        )

    def refresher(
        self, stopped: Callable[[], bool], limiter: RateLimiter | None = None
    ) -> Refresher:
        """What brings the index up to date until `stopped`; without a limiter as fast
        as the store answers.
        """
        return Refresher(
            self.store,
            self.index,
            self.profile,
            clock=self.clock,
            limiter=limiter or RateLimiter(0, self.clock, lambda _s: stopped()),
            stopped=stopped,
            writing=self.writing,
            moves=self.moves,
            new_executor=self.new_executor,
        )


def prefix_range(prefix: str) -> KeyRange:
    """The keys that begin with a prefix."""
    for at in range(len(prefix) - 1, -1, -1):
        after = ord(prefix[at]) + 1
        if after in _SURROGATES:
            after = _SURROGATES.stop
        if after < _CODE_POINTS:
            return KeyRange(prefix, prefix[:at] + chr(after))
    return KeyRange(prefix)


def is_unchanged(row: StampedItem, facts: ObjectFacts) -> bool:
    """Whether the store still has the object that the row describes, as far as its
    stamp shows.
    """
    return same_stamp(_noted(row), facts)


def _noted(row: StampedItem) -> ObjectFacts:
    item, stamp = row.item, row.stamp
    return ObjectFacts(item.key, item.size_bytes, stamp.etag, stamp.modified_ms, stamp.version)


def _is_moved(row: StampedItem | None, now: StampedItem | None) -> bool:
    """Whether the object that the row describes may have been another one since."""
    if row is None or now is None:
        return row is not now
    return row.item != now.item or not is_unchanged(row, _noted(now))


def stamp_of(facts: ObjectFacts) -> Stamp:
    """The stamp in an object's facts."""
    return Stamp(facts.version, facts.etag, facts.modified_ms)


def digest_of(properties: ObjectProperties, profile: Profile) -> bytes:
    """The digest that stands for an object's properties in its item.

    ACLs are left out: grantees are accounts of one region's store.
    """
    if not profile.properties:
        return b""
    groups = frozenset(profile.properties)
    kept = Crossing("tags" in groups, "headers" in groups, acl=False).of(properties)
    headers = tuple(one for one in kept.headers if one not in _NO_CONTENT_TYPES)
    return properties_digest(kept.metadata, kept.tags, headers)


def groups_of(store: Capabilities) -> tuple[str, ...]:
    """The groups of properties that items of this store cover, for its profile."""
    headers, tags = ["headers"] * store.keeps_headers, ["tags"] * store.keeps_tags
    return (*headers, "metadata", *tags)


@dataclass(frozen=True, slots=True)
class _Described:
    """What a key turned out to be; None is gone."""

    key: str
    item: StampedItem | None
    bytes_read: int = 0
    is_damaged: bool = False
    is_unreadable: bool = False
    is_unsettled: bool = False


def _plus(
    progress: RefreshProgress, row: StampedItem | None, described: _Described
) -> RefreshProgress:
    item = described.item
    return replace(
        progress,
        objects=progress.objects + (item is not None),
        added=progress.added + (row is None and item is not None),
        removed=progress.removed + (row is not None and item is None),
        changed=progress.changed + (row is not None and item is not None and row.item != item.item),
        damaged=progress.damaged + described.is_damaged,
        unreadable=progress.unreadable + described.is_unreadable,
        unsettled=progress.unsettled + described.is_unsettled,
        bytes_read=progress.bytes_read + described.bytes_read,
    )
