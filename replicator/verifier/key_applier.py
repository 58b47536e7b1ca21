"""Apply what a syncer that follows a source wants of single keys.

The syncer knows what the target's store has by its stamps, not by items. So a write is
carried out as the syncer would do it: under the condition of the store, or after a look
just before where the store has no such condition. The index follows. What it does not
know, such as an object that the syncer has uploaded itself, the next refresh finds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from merkle.errors import ReconcileError
from proof.index import ItemEvidence, StampedItem
from proof.item import EvidenceLevel, Profile
from proof.stored_index import StoredIndex
from replicator.hashing import ContentHasher, blake3_of
from replicator.refresh import digest_of, is_unchanged, stamp_of
from replicator.stores.errors import DigestMismatchError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, Store, WriteCondition
from replicator.verifier.applier import Applier, CheckRun
from replicator.verifier.values import KeyWrite, WriteOutcome

# What became of a write, and the changes of the index that follow.
_Applied: TypeAlias = tuple[WriteOutcome, list[tuple[str, StampedItem | None]]]


class KeyApplier:
    """Applies changes of keys to one bucket. Thread-safe."""

    def __init__(
        self, store: Store, index: StoredIndex, profile: Profile, applier: Applier
    ) -> None:
        """`applier` is that of the bucket, whose lock and threads are used."""
        self._store = store
        self._index = index
        self._profile = profile
        self._applier = applier

    def apply(self, writes: Sequence[KeyWrite], check_run: CheckRun) -> list[WriteOutcome]:
        """Apply changes of different keys, each for itself; what became of each.

        Raises:
            ReconcileError: the index cannot be written; the store may hold the writes,
                which the next refresh finds. `check_run` refuses the run: nothing was
                written.
        """
        with self._applier.admitted(check_run):
            kept = [write for write in writes if not write.deletes]
            found = dict(
                zip((one.key for one in kept), self._applier.each(self._change, kept), strict=True)
            )
            found |= self._delete([write.key for write in writes if write.deletes])
            self._applier.note([change for _, changes in found.values() for change in changes])
        return [found[write.key][0] for write in writes]

    def _change(self, write: KeyWrite) -> _Applied:
        try:
            if write.body is not None:
                facts, items = self._put(write, write.body)
            else:
                assert write.replaced is not None
                facts, items = self._put_properties(write, write.replaced)
        except ReconcileError as error:
            return WriteOutcome(error.code, error.message), []
        stamp = WriteOutcome(etag=facts.etag, modified_ms=facts.modified_ms, version=facts.version)
        return stamp, [(write.key, item) for item in items]

    def _put(self, write: KeyWrite, body: bytes) -> tuple[ObjectFacts, list[StampedItem]]:
        if blake3_of(body) != write.blake3:
            raise DigestMismatchError(f"{write.key}: other bytes arrived", key=write.key)
        condition = checked_condition(self._store, write.key, write.condition)
        facts = self._store.writer.put(write.key, body, write.properties, condition)
        hasher = ContentHasher()
        hasher.update(body)
        return facts, [self._applier.stamped(facts, write.properties, hasher)]

    def _put_properties(
        self, write: KeyWrite, replaced: ObjectFacts
    ) -> tuple[ObjectFacts, list[StampedItem]]:
        row = self._index.row(write.key)
        facts = self._store.writer.put_properties(
            replaced, write.properties, tags_only=write.tags_only
        )
        if row is None or not is_unchanged(row, replaced):
            # Nobody here knows the content that it goes on to have.
            return facts, []
        item = replace(row.item, properties=digest_of(write.properties, self._profile))
        # Some stores copy the bytes for that, and nobody has read the copy.
        level = min(row.evidence.level, EvidenceLevel.RECORDED)
        known = StampedItem(item, ItemEvidence(level), stamp_of(facts), is_damaged=row.is_damaged)
        return facts, [known]

    def _delete(self, keys: Sequence[str]) -> dict[str, _Applied]:
        if not keys:
            return {}
        try:
            failures = self._store.writer.delete(list(keys))
        except ReconcileError as error:
            return {key: (WriteOutcome(error.code, error.message), []) for key in keys}
        refused = {one.key: WriteOutcome(StoreError.code, one.reason) for one in failures}
        gone = WriteOutcome()
        return {
            key: (refused[key], []) if key in refused else (gone, [(key, None)]) for key in keys
        }


def checked_condition(store: Store, key: str, condition: WriteCondition) -> WriteCondition:
    """What to ask the store to check: the condition, or nothing where the store cannot,
    once a look has shown that it holds.

    Raises:
        PreconditionFailedError: it does not hold.
        StoreError: the store did not say.
    """
    can = store.capabilities
    is_guarded = can.creates_conditionally if condition.absent else can.replaces_conditionally
    if is_guarded or condition == WriteCondition():
        return condition
    facts = store.reader.facts(key)
    if (facts is None) != condition.absent or (facts and facts.etag != condition.etag):
        raise PreconditionFailedError(f"{key}: the target changed meanwhile", key=key)
    return WriteCondition()
