"""Apply a syncer's writes through the target's port, and note them in the index.

Nothing is believed: a body must have the BLAKE3 that was sent with it, and the object
that it replaces must be the item that the syncer named. The store's own condition,
where it has one, guards the moment in between.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

from blake3 import blake3

from merkle.errors import ReconcileError
from proof.index import IndexWriter, ItemEvidence, StampedItem
from proof.item import EvidenceLevel, HashAlgorithm, Item, ItemHasher, ItemId, Profile
from proof.root import SetRoot
from replicator.hashing import ContentHasher
from replicator.refresh import digest_of, is_unchanged, stamp_of
from replicator.stores.port import (
    DigestMismatchError,
    ObjectFacts,
    ObjectProperties,
    PreconditionFailedError,
    Store,
    StoreError,
    UploadedPart,
    WriteCondition,
)
from replicator.verifier.values import (
    PATCHES_MAX,
    BatchResult,
    Patch,
    PatchOrder,
    Write,
    WriteResult,
)
from runtime.errors import UsageError

# Requests to the store at a time; a batch waits for its slowest.
_THREADS = 8
# A patched object is written in parts of this size, and at once below it.
PART_BYTES = 8 << 20


# What became of a write, and the item that it left.
_Outcome: TypeAlias = tuple[WriteResult, StampedItem | None]


class Applier:
    """Applies writes to one bucket. One call at a time: its caller holds a lock."""

    def __init__(self, store: Store, index: IndexWriter, profile: Profile) -> None:
        self._store = store
        self._index = index
        self._profile = profile
        self._ids = ItemHasher(profile)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="apply")

    def close(self) -> None:
        """Wait for requests under way."""
        self._pool.shutdown()

    def apply(self, number: int, writes: Sequence[Write]) -> BatchResult:
        """Apply the writes of one batch, each for itself.

        Raises:
            ReconcileError: the index cannot be written; the store may hold the writes,
                which the next refresh finds.
        """
        deletes = [write for write in writes if write.body is None]
        failed = self._delete(deletes)
        outcomes = dict[str, _Outcome](zip((w.key for w in deletes), failed, strict=True))
        puts = [write for write in writes if write.body is not None]
        outcomes |= zip((w.key for w in puts), self._pool.map(self._put, puts), strict=True)
        changes = [(key, outcome[1]) for key, outcome in outcomes.items() if not outcome[0].error]
        root = self._index.apply(changes)
        return BatchResult(number, tuple(outcomes[write.key][0] for write in writes), root)

    def patch(self, order: PatchOrder, patches: Iterable[Patch]) -> tuple[ObjectFacts, SetRoot]:
        """Replace ranges of an object, which is read and written near its store.

        Raises:
            PreconditionFailedError: the target holds another object than the base.
            DigestMismatchError: the result is not what was ordered; the base stays.
            StoreError: the store failed.
            UsageError: the patches are not ascending, or beyond the base.
        """
        base = self._current(order.key, order.base_id)
        assert base is not None
        facts, hasher = self._fresh(base), ContentHasher()
        pieces = _patched(self._store, facts, patches, order.result_size_bytes)
        if order.result_size_bytes <= PART_BYTES:
            body = b"".join(pieces)
            hasher.update(body)
            self._check(order, hasher)
            condition = self._condition(base, can=self._store.capabilities.replaces_conditionally)
            written = self._store.writer.put(order.key, body, order.properties, condition)
        else:
            written = self._upload(order, base, pieces, hasher)
        stamped = self._stamped(written, order.properties, hasher)
        return written, self._index.apply([(order.key, stamped)])

    def _put(self, write: Write) -> _Outcome:
        assert write.body is not None
        try:
            if blake3(write.body).digest() != write.blake3:
                raise DigestMismatchError(f"{write.key}: other bytes arrived", key=write.key)
            base = self._current(write.key, write.replaced_id)
            condition = self._condition(
                base,
                can=self._store.capabilities.replaces_conditionally
                if base
                else self._store.capabilities.creates_conditionally,
            )
            facts = self._store.writer.put(write.key, write.body, write.properties, condition)
        except ReconcileError as error:
            return WriteResult(error.code, error.message), None
        hasher = ContentHasher()
        hasher.update(write.body)
        result = WriteResult(etag=facts.etag, modified_ms=facts.modified_ms, version=facts.version)
        return result, self._stamped(facts, write.properties, hasher)

    def _delete(self, deletes: Sequence[Write]) -> list[_Outcome]:
        results = dict[str, WriteResult]()
        for write in deletes:
            try:
                base = self._current(write.key, write.replaced_id)
                assert base is not None
                self._fresh(base)
            except ReconcileError as error:
                results[write.key] = WriteResult(error.code, error.message)
        allowed = [write.key for write in deletes if write.key not in results]
        if allowed:
            try:
                failures = self._store.writer.delete(allowed)
                results |= {
                    failure.key: WriteResult(StoreError.code, failure.reason)
                    for failure in failures
                }
            except ReconcileError as error:
                results |= {key: WriteResult(error.code, error.message) for key in allowed}
        return [(results.get(write.key, WriteResult()), None) for write in deletes]

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

    def _condition(self, base: StampedItem | None, *, can: bool) -> WriteCondition:
        if not can:
            # The store cannot guard the write itself: look just before it.
            if base:
                self._fresh(base)
            return WriteCondition()
        return WriteCondition(etag=base.stamp.etag) if base else WriteCondition(absent=True)

    def _upload(
        self, order: PatchOrder, base: StampedItem, pieces: Iterator[bytes], hasher: ContentHasher
    ) -> ObjectFacts:
        writer, key = self._store.upload_writer, order.key
        upload = writer.begin(key, order.properties)
        try:
            parts = list[UploadedPart]()
            for body in _regrouped(pieces, PART_BYTES):
                hasher.update(body)
                parts.append(writer.write_part(key, upload, len(parts) + 1, body))
            self._check(order, hasher)
            can = self._store.capabilities.completes_conditionally
            condition = self._condition(base, can=can)
            return writer.complete(key, upload, parts, order.properties, condition)
        except BaseException:
            with suppress(ReconcileError):
                writer.abort(key, upload)
            raise

    def _check(self, order: PatchOrder, hasher: ContentHasher) -> None:
        if hasher.size_bytes != order.result_size_bytes or hasher.blake3 != order.result_blake3:
            raise DigestMismatchError(
                f"{order.key}: base and patches do not give what was ordered", key=order.key
            )

    def _stamped(
        self, facts: ObjectFacts, properties: ObjectProperties, hasher: ContentHasher
    ) -> StampedItem:
        profile = self._profile
        by_algorithm = {known.algorithm: known.digest for known in hasher.hashes()}
        content = by_algorithm[profile.algorithm] if profile.algorithm else None
        level = EvidenceLevel.RECORDED if profile.algorithm else EvidenceLevel.LISTED
        item = Item(facts.key, hasher.size_bytes, content, digest_of(properties, profile))
        return StampedItem(item, ItemEvidence(level), stamp_of(facts))


# The algorithms of profiles whose hashes a writer computes on the way.
APPLIED_ALGORITHMS = frozenset({HashAlgorithm.MD5, HashAlgorithm.CRC32C, HashAlgorithm.BLAKE3})


def _patched(
    store: Store, base: ObjectFacts, patches: Iterable[Patch], result_bytes: int
) -> Iterator[bytes]:
    """The pieces of the result, in order; bounded by its size as ordered."""
    at = made = 0

    def counted(piece: bytes) -> bytes:
        nonlocal made
        made += len(piece)
        if made > result_bytes:
            raise UsageError("the patches make more bytes than was ordered")
        return piece

    for number, patch in enumerate(patches):
        if number >= PATCHES_MAX:
            raise UsageError(f"a change has over {PATCHES_MAX} patches")
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
