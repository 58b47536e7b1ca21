"""Apply a syncer's writes through the target's port, and note them in the index.

Nothing is believed: a body must have the BLAKE3 that was sent with it, and the object
that it replaces must be the item that the syncer named. The store's own condition,
where it has one, guards the moment in between.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias, TypeVar

from merkle.errors import ReconcileError
from proof.index import ItemEvidence, StampedItem
from proof.item import (
    HASHES_BYTES,
    KEY_HASH_BYTES,
    EvidenceLevel,
    HashAlgorithm,
    Item,
    ItemHasher,
    ItemId,
    Profile,
)
from proof.root import SetRoot
from proof.stored_index import StoredIndex
from proof.symbols import key_hashes_from_bytes
from replicator.copier import NewExecutor
from replicator.hashing import ContentHasher, blake3_of
from replicator.refresh import digest_of, is_unchanged, stamp_of
from replicator.stores.errors import DigestMismatchError, PreconditionFailedError, StoreError
from replicator.stores.port import (
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    WriteCondition,
)
from replicator.stores.stamps import same_stamp
from replicator.verifier.values import (
    BatchResult,
    DeleteAnswer,
    DeleteRefusal,
    PatchOrder,
    RangePatch,
    Write,
    WriteOutcome,
)
from runtime.errors import DatabaseError, OperationInterruptedError, UsageError

T = TypeVar("T")
Q = TypeVar("Q")

# Requests to the store at a time; a batch waits for its slowest.
_THREADS = 8
# A patched object is written in parts of this size, and at once below it.
PART_BYTES = 8 << 20


# What became of a write, and the item that it left; None where it failed.
_Outcome: TypeAlias = tuple[WriteOutcome, StampedItem | None]


# Called before anything is changed, with the lock of the writers held; it raises where
# the caller's run may not write any more.
CheckRun: TypeAlias = Callable[[], None]


def _any_run() -> None:
    """Nobody is refused."""


class Applier:
    """Applies writes to one bucket. Thread-safe: a batch, or the end of a patch, holds
    the lock of the index's writers.
    """

    def __init__(
        self,
        store: Store,
        index: StoredIndex,
        profile: Profile,
        *,
        writing: AbstractContextManager[object],
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        """`writing` is held by one writer of the index at a time."""
        self._store = store
        self._index = index
        self._profile = profile
        self._writing = writing
        self._ids = ItemHasher(profile)
        # What an index holds after a failed write is unknown: nothing more is written.
        self._index_failed = False
        self._pool = new_executor(_THREADS, "apply")

    def close(self) -> None:
        """Wait for requests under way."""
        self._pool.shutdown()

    def apply(
        self, number: int, writes: Sequence[Write], check_run: CheckRun = _any_run
    ) -> BatchResult:
        """Apply the writes of one batch, each for itself.

        Raises:
            ReconcileError: the index cannot be written; the store may hold the writes,
                which the next refresh finds. `check_run` refuses the run: nothing was
                written.
        """
        with self.admitted(check_run):
            outcomes = list(self._pool.map(self._change, writes))
            root = self.note(
                [
                    (write.key, item)
                    for write, (result, item) in zip(writes, outcomes, strict=True)
                    if not result.error
                ]
            )
        return BatchResult(number, tuple(result for result, _ in outcomes), root)

    def delete(
        self,
        items: Sequence[bytes],
        note: Callable[[Sequence[str]], None] = lambda _keys: None,
        check_run: CheckRun = _any_run,
    ) -> DeleteAnswer:
        """Delete the objects that are still these items, each of HASHES_BYTES of an ID.
        `note` gets the keys before anything is deleted.

        Raises:
            ReconcileError: the index cannot be read, or not be written; the store may
                have deleted the objects, which the next refresh finds. `check_run`
                refuses the run: nothing was deleted.
        """
        with self.admitted(check_run):
            looks = self._pool.map(self._deletable, self._keys(items))
            keys, refusals = dict[str, int](), list[DeleteRefusal]()
            for place, look in enumerate(looks):
                if isinstance(look, str):
                    keys[look] = place
                else:
                    refusals.append(DeleteRefusal(place, look.code, look.message))
            if keys:
                note(list(keys))
                refusals += self._delete(keys)
            refused = {refusal.place for refusal in refusals}
            root = self.note([(key, None) for key, place in keys.items() if place not in refused])
        return DeleteAnswer(tuple(refusals), root)

    def patch(
        self,
        order: PatchOrder,
        patches: Sequence[RangePatch],
        *,
        stopped: Callable[[], bool],
        check_run: CheckRun = _any_run,
    ) -> tuple[ObjectFacts, SetRoot]:
        """Replace ranges of an object, which is read and written near its store, unless
        `stopped` says to give up.

        Raises:
            PreconditionFailedError: the target holds another object than the base.
            DigestMismatchError: the result is not what was ordered; the base stays.
            StoreError: the store failed.
            UsageError: the patches are not ascending, or beyond the base.
            OperationInterruptedError: `stopped`; the base stays.
            DatabaseError: the index cannot be written; the store has the result.
            ReconcileError: `check_run` refuses the run; the base stays.
        """
        facts, hasher = self._base(order), ContentHasher()
        pieces = _patched(self._store, facts, patches, order.result_size_bytes)
        pieces = _unless(stopped, pieces)
        if order.result_size_bytes > PART_BYTES:
            return self._upload(order, pieces, hasher, check_run)
        body = b"".join(pieces)
        hasher.update(body)
        self._check(order, hasher)
        can = self._store.capabilities.replaces_conditionally
        with self.admitted(check_run):
            condition = self._patch_condition(order, can=can)
            written = self._store.writer.put(order.key, body, order.properties, condition)
            return written, self._note(written, order, hasher)

    @contextmanager
    def admitted(self, check_run: CheckRun) -> Iterator[None]:
        """Hold the lock of the writers.

        Raises:
            DatabaseError: the index has failed before.
            ReconcileError: `check_run` refuses the run.
        """
        with self._writing:
            self._check_index()
            check_run()
            yield

    def each(self, call: Callable[[Q], T], items: Iterable[Q]) -> Iterator[T]:
        """What `call` returns of each, in their order, some at a time."""
        return self._pool.map(call, items)

    def _base(self, order: PatchOrder) -> ObjectFacts:
        """The object that is patched, as the store has it now."""
        if isinstance(order.base, ObjectFacts):
            facts = self._store.reader.facts(order.key)
            if facts is None or not same_stamp(facts, order.base):
                raise PreconditionFailedError(
                    f"{order.key}: the target changed meanwhile", key=order.key
                )
            return facts
        base = self._current(order.key, order.base)
        assert base is not None
        return self._fresh(base)

    def _patch_condition(self, order: PatchOrder, *, can: bool) -> WriteCondition:
        if isinstance(order.base, ObjectFacts):
            if can:
                return WriteCondition(etag=order.base.etag)
            # The store cannot guard the write itself: look just before it.
            self._base(order)
            return WriteCondition()
        base = self._current(order.key, order.base)
        assert base is not None
        return self._condition(order.key, base, can=can)

    def _note(self, written: ObjectFacts, order: PatchOrder, hasher: ContentHasher) -> SetRoot:
        return self.note([(order.key, self.stamped(written, order.properties, hasher))])

    def note(self, changes: Sequence[tuple[str, StampedItem | None]]) -> SetRoot:
        """Note what keys have by now; the lock of the writers is held.

        Raises:
            ReconcileError: the index cannot be written; nothing is, from now on.
        """
        try:
            return self._index.apply(changes)
        except BaseException:
            self._index_failed = True
            raise

    def _check_index(self) -> None:
        if self._index_failed:
            raise DatabaseError(
                "the verifier could not write its index", hint="Restart the verifier."
            )

    def _change(self, write: Write) -> _Outcome:
        try:
            base = self._current(write.key, write.replaced_id)
            facts, item = (
                self._put(write, write.body, base)
                if write.body is not None
                else self._put_properties(write, base)
            )
        except ReconcileError as error:
            return WriteOutcome(error.code, error.message), None
        result = WriteOutcome(etag=facts.etag, modified_ms=facts.modified_ms, version=facts.version)
        return result, item

    def _put(
        self, write: Write, body: bytes, base: StampedItem | None
    ) -> tuple[ObjectFacts, StampedItem]:
        if blake3_of(body) != write.blake3:
            raise DigestMismatchError(f"{write.key}: other bytes arrived", key=write.key)
        can = self._store.capabilities
        guarded = can.replaces_conditionally if base else can.creates_conditionally
        condition = self._condition(write.key, base, can=guarded)
        facts = self._store.writer.put(write.key, body, write.properties, condition)
        hasher = ContentHasher()
        hasher.update(body)
        return facts, self.stamped(facts, write.properties, hasher)

    def _put_properties(
        self, write: Write, base: StampedItem | None
    ) -> tuple[ObjectFacts, StampedItem]:
        assert base is not None
        facts = self._store.writer.put_properties(self._fresh(base), write.properties)
        item = replace(base.item, properties=digest_of(write.properties, self._profile))
        # Some stores copy the bytes for that, and nobody has read the copy.
        level = min(base.evidence.level, EvidenceLevel.RECORDED)
        return facts, StampedItem(
            item, ItemEvidence(level), stamp_of(facts), is_damaged=base.is_damaged
        )

    def _keys(self, items: Sequence[bytes]) -> list[str | None]:
        """The key of each item; None where the index has no such item."""
        found = dict[bytes, str]()
        if items:
            hashes = key_hashes_from_bytes(b"".join(item[:KEY_HASH_BYTES] for item in items))
            with self._index.snapshot() as snapshot:
                rows = snapshot.find(hashes)
            # Of a bucket without versions, as all are that a verifier writes to.
            found = {row.id[:HASHES_BYTES]: row.item.key for row in rows if not row.item.version}
        return [found.get(item) for item in items]

    def _deletable(self, key: str | None) -> str | ReconcileError:
        """The key of an item that its store still has, or why it is not deleted."""
        try:
            row = self._index.row(key) if key is not None else None
            if row is None:
                raise PreconditionFailedError("the target holds another object, or none, by now")
            self._fresh(row)
        except ReconcileError as error:
            return error
        return row.item.key

    def _delete(self, keys: Mapping[str, int]) -> list[DeleteRefusal]:
        """Delete keys, each with its place."""
        try:
            failures = self._store.writer.delete(list(keys))
        except ReconcileError as error:
            return [DeleteRefusal(place, error.code, error.message) for place in keys.values()]
        return [DeleteRefusal(keys[one.key], StoreError.code, one.reason) for one in failures]

    def _current(self, key: str, expected: ItemId | None) -> StampedItem | None:
        row = self._index.row(key)
        if (self._ids.id(row.item) if row else None) != expected:
            raise PreconditionFailedError(f"{key}: the target holds another object", key=key)
        return row

    def _fresh(self, base: StampedItem) -> ObjectFacts:
        facts = self._store.reader.facts(base.item.key)
        if facts is None or not is_unchanged(base, facts):
            key = base.item.key
            raise PreconditionFailedError(f"{key}: the target changed meanwhile", key=key)
        return facts

    def _condition(self, key: str, base: StampedItem | None, *, can: bool) -> WriteCondition:
        if not can:
            # The store cannot guard the write itself: look just before it.
            if base:
                self._fresh(base)
            elif self._store.reader.facts(key) is not None:
                raise PreconditionFailedError(f"{key}: the target has it meanwhile", key=key)
            return WriteCondition()
        return WriteCondition(etag=base.stamp.etag) if base else WriteCondition(absent=True)

    def _upload(
        self,
        order: PatchOrder,
        pieces: Iterator[bytes],
        hasher: ContentHasher,
        check_run: CheckRun,
    ) -> tuple[ObjectFacts, SetRoot]:
        writer, key = self._store.upload_writer, order.key
        upload = writer.begin(key, order.properties)
        try:
            parts = list[UploadedPart]()
            for body in _regrouped(pieces, PART_BYTES):
                hasher.update(body)
                parts.append(writer.write_part(key, upload, len(parts) + 1, body))
            self._check(order, hasher)
            can = self._store.capabilities.completes_conditionally
            with self.admitted(check_run):
                condition = self._patch_condition(order, can=can)
                written = writer.complete(key, upload, parts, order.properties, condition)
                return written, self._note(written, order, hasher)
        except BaseException:
            with suppress(ReconcileError):
                writer.abort(key, upload)
            raise

    def _check(self, order: PatchOrder, hasher: ContentHasher) -> None:
        if hasher.size_bytes != order.result_size_bytes or hasher.blake3 != order.result_blake3:
            raise DigestMismatchError(
                f"{order.key}: base and patches do not give what was ordered", key=order.key
            )

    def stamped(
        self, facts: ObjectFacts, properties: ObjectProperties, hasher: ContentHasher
    ) -> StampedItem:
        """The item of an object that was just written from bytes that came here."""
        profile = self._profile
        by_algorithm = {known.algorithm: known.digest for known in hasher.hashes()}
        content = by_algorithm[profile.algorithm] if profile.algorithm else None
        level = EvidenceLevel.RECORDED if profile.algorithm else EvidenceLevel.LISTED
        item = Item(facts.key, hasher.size_bytes, content, digest_of(properties, profile))
        return StampedItem(item, ItemEvidence(level), stamp_of(facts))


# The algorithms of profiles whose hashes a writer computes on the way.
APPLIED_ALGORITHMS = frozenset({HashAlgorithm.MD5, HashAlgorithm.CRC32C, HashAlgorithm.BLAKE3})


def _patched(
    store: Store, base: ObjectFacts, patches: Sequence[RangePatch], result_bytes: int
) -> Iterator[bytes]:
    """The pieces of the result, in order; bounded by its size as ordered."""
    at = made = 0

    def counted(piece: bytes) -> bytes:
        nonlocal made
        made += len(piece)
        if made > result_bytes:
            raise UsageError("the patches make more bytes than was ordered")
        return piece

    for patch in patches:
        if patch.offset < at or patch.offset + patch.old_bytes > base.size_bytes:
            raise UsageError("the patches are not ascending, or beyond the base")
        yield from map(counted, _range(store, base, at, patch.offset))
        yield counted(patch.data)
        at = patch.offset + patch.old_bytes
    yield from map(counted, _range(store, base, at, base.size_bytes))


def _range(store: Store, base: ObjectFacts, first: int, end: int) -> Iterator[bytes]:
    if first < end:
        with store.reader.read(base, first=first, end=end) as pieces:
            yield from pieces


def _unless(stopped: Callable[[], bool], pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if stopped():
            raise OperationInterruptedError("the patch was stopped")
        yield piece


def _regrouped(pieces: Iterable[bytes], part_bytes: int) -> Iterator[bytes]:
    """The same bytes in parts of one size, the last one maybe shorter."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= part_bytes:
            yield bytes(held[:part_bytes])
            del held[:part_bytes]
    if held:
        yield bytes(held)
