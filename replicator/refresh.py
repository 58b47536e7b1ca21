"""Bring a bucket's index up to date with its store, and deepen what it knows.

A listing is merged with the rows of the index. A row whose stamp (version, ETag, time)
is unchanged keeps its item. Of every other object the properties are fetched and the
hash by the profile's algorithm: as the store recorded it, else by reading the object
once. A scrub reads again whatever was not read for a while; what was read replaces what
was recorded, so that damage behind the store's own index changes the root.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from proof.index import IndexWriter, ItemEvidence, Stamp, StampedItem
from proof.item import EvidenceLevel, Item, Profile
from replicator.crossing import Crossing
from replicator.hashing import ContentHasher
from replicator.stores.port import (
    Capabilities,
    ObjectFacts,
    ObjectMissingError,
    ObjectProperties,
    PreconditionFailedError,
    Store,
    same_stamp,
)
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock, RateLimiter

# Rows of the index in one page of the merge, and changes in one transaction.
_PAGE = 1_000
# Objects that are described at a time: each takes a request or two, near the store.
_THREADS = 8
_DESCRIBED_MAX = 64
# An object that changes under every attempt is noted by the next refresh.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class RefreshProgress:
    """What one refresh did so far.

    `damaged` counts objects whose bytes changed under an unchanged stamp, `unsettled`
    those that changed while they were described: the index leaves them as they were.
    """

    objects: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    damaged: int = 0
    unsettled: int = 0
    bytes_read: int = 0


class Refresher:
    """Refreshes the index of one bucket."""

    def __init__(
        self,
        store: Store,
        index: IndexWriter,
        profile: Profile,
        *,
        clock: Clock,
        limiter: RateLimiter,
        stopped: Callable[[], bool],
    ) -> None:
        """`limiter` bounds the bytes read; `stopped` says whether to give up."""
        self._store = store
        self._index = index
        self._profile = profile
        self._clock = clock
        self._limiter = limiter
        self._stopped = stopped

    def run(self, *, read_since_s: int = 0, prefix: str = "") -> Iterator[RefreshProgress]:
        """Refresh the index below a prefix; yields the progress, complete at the end.

        Objects whose bytes were not read since `read_since_s` (seconds since 1970) are
        read again; 0 reads only those of which the store has no hash.

        Raises:
            StoreError: the listing is not complete, or an object cannot be described;
                what was found until then is kept.
            OperationInterruptedError: `stopped`.
        """
        began_at_s = self._clock.now_ms() // 1000
        progress, changes = RefreshProgress(), list[tuple[str, StampedItem | None]]()
        for key, row, future in self._described(read_since_s, prefix):
            if self._stopped():
                raise OperationInterruptedError("the refresh was stopped")
            described = future.result() if future else _Described(None)
            progress = _plus(progress, row, described)
            if not described.is_unsettled and described.item != row:
                changes.append((key, described.item))
            if len(changes) >= _PAGE:
                self._index.apply(changes)
                changes.clear()
            if progress.objects % _PAGE == 0:
                yield progress
        self._index.apply(changes)
        self._index.note_listing(prefix, began_at_s=began_at_s, complete=not progress.unsettled)
        yield progress

    def _described(
        self, read_since_s: int, prefix: str
    ) -> Iterator[tuple[str, StampedItem | None, "Future[_Described] | None"]]:
        """Each key, its row and what it turns out to be, some ahead of the reader."""
        waiting = deque[tuple[str, StampedItem | None, "Future[_Described] | None"]]()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="describe") as pool:
            for key, facts, row in self._merged(prefix):
                work = (
                    pool.submit(self._describe, facts, row, read_since_s)
                    if facts or not self._store.capabilities.lists_all_keys
                    else None
                )
                waiting.append((key, row, work))
                if len(waiting) >= _DESCRIBED_MAX:
                    yield waiting.popleft()
            yield from waiting

    def _merged(self, prefix: str) -> Iterator[tuple[str, ObjectFacts | None, StampedItem | None]]:
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
        self, facts: ObjectFacts | None, row: StampedItem | None, read_since_s: int
    ) -> "_Described":
        if facts is None:
            # The listing of this store can leave keys out: absence is asked for.
            assert row is not None
            facts = self._store.reader.facts(row.item.key)
            if facts is None:
                return _Described(None)
        for _ in range(_ATTEMPTS):
            try:
                if row is not None and is_unchanged(row, facts) and _is_known(row, read_since_s):
                    return self._kept(facts, row)
                return self._look(facts, row, read_since_s)
            except (ObjectMissingError, PreconditionFailedError):
                fresh = self._store.reader.facts(facts.key)
                if fresh is None:
                    return _Described(None)
                facts = fresh
        return _Described(row, is_unsettled=True)

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
        return _Described(replace(row, item=item, stamp=stamp))

    def _look(self, facts: ObjectFacts, row: StampedItem | None, read_since_s: int) -> "_Described":
        profile = self._profile
        item = Item(facts.key, facts.size_bytes, None, self._properties(facts))
        stamp, evidence = stamp_of(facts), ItemEvidence(EvidenceLevel.LISTED)
        if profile.algorithm is None:
            return _Described(StampedItem(item, evidence, stamp))
        recorded = None if read_since_s else self._recorded(facts)
        if recorded is not None:
            evidence = ItemEvidence(EvidenceLevel.RECORDED)
            return _Described(StampedItem(replace(item, content=recorded), evidence, stamp))
        content = self._read(facts)
        evidence = ItemEvidence(EvidenceLevel.READ, read_at_s=self._clock.now_ms() // 1000)
        stamped = StampedItem(replace(item, content=content), evidence, stamp)
        # The store calls it the same object, and its bytes are others.
        is_damaged = (
            row is not None
            and is_unchanged(row, facts)
            and row.item.content is not None
            and row.item.content != content
        )
        return _Described(stamped, bytes_read=facts.size_bytes, is_damaged=is_damaged)

    def _properties(self, facts: ObjectFacts) -> bytes:
        if not self._profile.properties:
            return b""
        found = self._store.reader.properties(facts.key, version=facts.version)
        return digest_of(found, self._profile)

    def _recorded(self, facts: ObjectFacts) -> bytes | None:
        """The hash that the store recorded. A listing has fewer of them than a HEAD."""
        for known in (facts, None):
            described = known or self._store.reader.facts(facts.key, version=facts.version)
            if described is None or not same_stamp(described, facts):
                raise PreconditionFailedError(f"{facts.key} changed", key=facts.key)
            for content in described.hashes:
                if content.algorithm is self._profile.algorithm:
                    return content.digest
        return None

    def _read(self, facts: ObjectFacts) -> bytes:
        assert self._profile.algorithm is not None
        hasher = ContentHasher()
        with self._store.reader.read(facts) as pieces:
            for piece in pieces:
                if self._stopped():
                    raise OperationInterruptedError("the refresh was stopped")
                hasher.update(piece)
                self._limiter.take(len(piece))
        return next(
            known.digest for known in hasher.hashes() if known.algorithm is self._profile.algorithm
        )


def is_unchanged(row: StampedItem, facts: ObjectFacts) -> bool:
    """Whether the store still has the object that the row describes, as far as its
    stamp shows.
    """
    item, stamp = row.item, row.stamp
    noted = ObjectFacts(item.key, item.size_bytes, stamp.etag, stamp.modified_ms, stamp.version)
    return same_stamp(noted, facts)


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
    return Crossing("tags" in groups, "headers" in groups, acl=False).digest(properties)


def groups_of(store: Capabilities) -> tuple[str, ...]:
    """The groups of properties that items of this store cover, for its profile."""
    headers, tags = ["headers"] * store.keeps_headers, ["tags"] * store.keeps_tags
    return (*headers, "metadata", *tags)


@dataclass(frozen=True, slots=True)
class _Described:
    item: StampedItem | None
    bytes_read: int = 0
    is_damaged: bool = False
    is_unsettled: bool = False


def _is_known(row: StampedItem, read_since_s: int) -> bool:
    if not read_since_s:
        return True
    return row.evidence.read_at_s is not None and row.evidence.read_at_s >= read_since_s


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
        unsettled=progress.unsettled + described.is_unsettled,
        bytes_read=progress.bytes_read + described.bytes_read,
    )
