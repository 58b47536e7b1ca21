"""Bring one key of the source to the target, whatever happened to it.

A change says that a key may be another one now. What is done depends on what the source
has when it is applied, so that a change may be applied twice, and after later ones of
the same key. Nothing is written where contents and properties are equal already: that
also ends loops of buckets that replicate to each other (OZ-155).

What the target has is taken from the ledger, and the write is conditional: where the
target has another object by now, it is looked at and decided again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import TypeAlias, TypeVar

from proof.item import EvidenceLevel
from replicator.comparison import KeyComparison
from replicator.copy_requests import CopyFailedError, FailureReason, ObjectStamp
from replicator.deletes import DELETES_AT_ONCE, Retrying
from replicator.difference import Action, KeyState
from replicator.key_copy import KeyCopier
from replicator.ledger import LedgerRow, PairLedger
from replicator.stores.errors import (
    ObjectMissingError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
)
from replicator.stores.port import Change, ChangeKind, ObjectFacts, ObjectReader, Store
from replicator.syncer.prefixes import covers, parts_below
from replicator.syncer.two_way import TwoWayRules

T = TypeVar("T")
# What was done of an operation on a prefix, and what has come of it.
_Done: TypeAlias = "tuple[Change, Outcome | StoreError]"

# A key that others write at the target again and again fails, and is tried later.
_LOOKS_MAX = 4
# Keys found absent by a look until they are expected to be absent without one.
_ABSENT_IN_A_ROW = 64
# Of keys that the source was seen without; with more, the source is asked of each.
_SEEN_GONE_MAX = 100_000
# Keys of one operation on a prefix that are done at once.
_KEYS_AT_ONCE = 64
# So many keys of it may fail by themselves; of more it fails as a whole.
_LEFT_MAX = 100
# Deletes of single keys that fail before the store is to blame.
_FAILURES_IN_A_ROW = 3


class Effect(Enum):
    """What applying a change did."""

    COPIED = "copied"
    PROPERTIES = "properties"
    DELETED = "deleted"
    RENAMED = "renamed"
    NOTHING = "nothing"
    """Both sides were equal already."""
    GONE = "gone"
    """The source does not have the key any more; a later change settles it (OZ-087)."""
    CONFLICT = "conflict"
    """The target has a newer object, or has deleted this one: it stays so."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one change; the bytes are those of objects that were sent."""

    effect: Effect
    sent_bytes: int = 0


class KeysLeftError(StoreError):
    """Some keys of an operation on a prefix failed, and all others are done. `left` has
    a change for each of them that does the rest, and why it failed.
    """

    code = "keys_left"

    def __init__(self, left: Sequence[tuple[Change, StoreError]]) -> None:
        super().__init__(left[0][1].message)
        self.left = tuple(left)


class ChangeApplier:
    """Applies changes of a source to a target. Thread-safe, if no two changes that
    touch one key are applied at once.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: PairLedger,
        *,
        comparison: KeyComparison,
        keys: KeyCopier,
        readers: Executor,
        retried: Retrying,
        prefixes: Sequence[str] = (),
        two_way: TwoWayRules | None = None,
        check_snapshot: Callable[[], None] = lambda: None,
        latest: ObjectReader | None = None,
    ) -> None:
        """`two_way` decides where the target is written to as well; None where it is
        not. Where `source` is a snapshot, `check_snapshot` raises SnapshotLostError if
        it is gone, which deletes ask first, and `latest` reads the source as it is now.
        """
        self._source = source
        self._target = target
        self._ledger = ledger
        self._comparison = comparison
        self._keys = keys
        self._readers = readers
        self._retried = retried
        self._prefixes = prefixes
        self._two_way = two_way
        self._check_snapshot = check_snapshot
        self._latest = latest
        # The first changes may be those that a syncer before this one has applied.
        self._absent = 0
        # Keys that a comparison of contents has found different, against the ledger.
        self._doubted = set[str]()
        # Keys that the source was seen without: a change from before must not bring an
        # old state back for a moment.
        self._seen_gone = set[str]()

    def apply(self, change: Change) -> Outcome:
        """Apply one change.

        Raises:
            KeysLeftError: of an operation on a prefix, some keys failed.
            StoreError: a side refused or did not answer; apply it again.
            LeaseLostError: another syncer works on this.
            OperationInterruptedError: it was interrupted.
        """
        match change.kind:
            case ChangeKind.PUT:
                # A comparison of both sides, which tells no facts, has found another
                # object at the target than the ledger knows.
                looks = not change.index and change.facts is None
                is_found = not change.index
                outcome = self._put(change.key, change.facts, looks=looks, is_found=is_found)
                return self._settled(change, outcome)
            case ChangeKind.DELETE:
                return self._delete_one(change)
            case ChangeKind.RENAME:
                return self._settled(change, self._rename(change))
            case ChangeKind.DELETE_PREFIX:
                return self._sum(self._delete_below(change))
            case ChangeKind.RENAME_PREFIX:
                return self._sum(self._rename_below(change))

    def _settled(self, change: Change, outcome: Outcome) -> Outcome:
        """The outcome of what is none of the log, so that no later change settles it
        where its key is gone.
        """
        if outcome.effect is not Effect.GONE or change.index:
            return outcome
        return self._delete_one(replace(change, kind=ChangeKind.DELETE, previous_key=""))

    def wants(self, key: str) -> bool:
        """Whether a key is replicated."""
        return covers(self._prefixes, key)

    def doubt(self, key: str) -> None:
        """Note that a comparison of contents has shown a key to differ that the ledger
        takes for equal: once it is applied, the object is sent in any case.
        """
        self._doubted.add(key)

    def delete(self, changes: Sequence[Change]) -> list[Outcome | StoreError]:
        """Apply deletes in one request (OZ-010), each only if the source does not have
        its key now; the outcome of each.

        Raises:
            LeaseLostError: another syncer works on this.
            OperationInterruptedError: it was interrupted.
        """
        return self._delete(changes, readers=self._readers)

    def _put(
        self, key: str, facts: ObjectFacts | None, *, looks: bool = False, is_found: bool = False
    ) -> Outcome:
        """Bring over what the source has; with `looks` the ledger is not believed: a
        comparison has found another object at the target than it knows.
        `is_found` says that no change of the log tells of it.
        """
        row = self._ledger.row(key)
        is_old = facts and row is not None and facts.modified_ms <= row.source.modified_ms
        if is_old or key in self._seen_gone or len(self._seen_gone) >= _SEEN_GONE_MAX:
            # A later state may have been copied before, and this be applied again.
            facts = None
        source, is_fresh = facts, facts is None
        if source is None:
            source = self._retried(lambda: self._source.reader.facts(key))
            if source is None:
                self._seen_gone.add(key)
                return Outcome(Effect.GONE)
            self._seen_gone.discard(key)
        # An upload that is recorded may have ended after the row was written: to find
        # that at the end of another one would send the object twice.
        looks = looks or self._ledger.upload(key) is not None
        if row is not None and not looks:
            target: ObjectFacts | None = row.target.facts(key)
        elif row is None and self._expects_absent(source):
            target = None
        else:
            target = self._look(key)
        for _ in range(_LOOKS_MAX):
            state = KeyState(key, source, target, row, source_is_fresh=is_fresh)
            try:
                return self._settle(state, is_found=is_found)
            except PreconditionFailedError:
                pass
            except CopyFailedError as error:
                if error.reason is not FailureReason.TARGET_CHANGED:
                    raise
            target, row = self._look(key), self._ledger.row(key)
            if self._two_way is not None:
                # Either side may have been read, and be another object by now.
                source = self._retried(lambda: self._source.reader.facts(key))
                if source is None:
                    self._seen_gone.add(key)
                    return Outcome(Effect.GONE)
        raise CopyFailedError(
            FailureReason.TARGET_CHANGED, f"{key} is written at the target again and again"
        )

    def _expects_absent(self, source: ObjectFacts) -> bool:
        """Whether a key that is new may be written without a look: the store checks. A
        large object that a killed syncer has sent would cross in vain.
        """
        checks = self._target.capabilities.creates_conditionally
        is_small = source.size_bytes <= self._keys.part_bytes
        return checks and is_small and self._absent >= _ABSENT_IN_A_ROW

    def _settle(self, state: KeyState, *, is_found: bool) -> Outcome:
        decided, two_way = self._comparison.decide_key(state), self._two_way
        if state.key in self._doubted and decided.decision.action is Action.NOTHING:
            decided = self._comparison.decide_key(replace(state, target_is_damaged=True))
        self._doubted.discard(state.key)
        action, now = decided.decision.action, decided.state
        if now.source is None:
            return Outcome(Effect.GONE)
        if action is Action.NOTHING:
            if two_way is None or not two_way.mark_is_older(now):
                return Outcome(Effect.NOTHING)
            # It was found equal just now.
            action, now = Action.PROPERTIES, replace(now, row=self._ledger.row(now.key))
        elif two_way is not None and not two_way.may_put(now, action, is_found=is_found):
            return Outcome(Effect.CONFLICT)
        assert now.source is not None
        result = self._keys.carry_out(action, now.source, now.target, now.row)
        if result is None:
            return Outcome(Effect.GONE)
        effect = Effect.PROPERTIES if result.properties_only else Effect.COPIED
        return Outcome(effect, result.sent_bytes)

    def _look(self, key: str) -> ObjectFacts | None:
        found = self._retried(lambda: self._target.reader.facts(key))
        if self._two_way is None:
            self._absent = self._absent + 1 if found is None else 0
        return found

    def _delete_one(self, change: Change) -> Outcome:
        (outcome,) = self._delete([change])
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def _delete(
        self, changes: Sequence[Change], *, readers: Executor | None = None
    ) -> list[Outcome | StoreError]:
        each = readers.map if readers is not None else map
        found = list(each(self._may_delete, changes))
        due = [one for one, outcome in zip(changes, found, strict=True) if outcome is None]
        done = self._delete_at_target(due)
        return [
            outcome if outcome is not None else done[change.key]
            for change, outcome in zip(changes, found, strict=True)
        ]

    def _delete_at_target(self, changes: Sequence[Change]) -> Mapping[str, Outcome | StoreError]:
        """Delete keys that the source does not have; the outcome of each."""
        if not changes:
            return {}
        keys = [one.key for one in changes]
        try:
            self._check_snapshot()
            failures = self._retried(lambda: self._target.writer.delete(keys))
        except SnapshotLostError as error:
            return dict.fromkeys(keys, error)
        except StoreError as error:
            return self._delete_alone(changes, error)
        done: dict[str, Outcome | StoreError] = {}
        done.update(dict.fromkeys(keys, Outcome(Effect.DELETED)))
        for failure in failures:
            text = f"{failure.key} is not deleted: {failure.reason}"
            done[failure.key] = CopyFailedError(FailureReason.DELETE_REFUSED, text)
        self._ledger.forget([key for key, one in done.items() if isinstance(one, Outcome)])
        return done

    def _delete_alone(
        self, changes: Sequence[Change], error: StoreError
    ) -> Mapping[str, Outcome | StoreError]:
        """Delete what has failed in one request key by key: one of them may have failed
        all. Where many fail in a row, the others need no attempt.
        """
        done, failures = dict[str, Outcome | StoreError](), 0
        done.update(dict.fromkeys((one.key for one in changes), error))
        for change in changes if len(changes) > 1 else ():
            (done[change.key],) = self._delete([change])
            failures = failures + 1 if isinstance(done[change.key], StoreError) else 0
            if failures >= _FAILURES_IN_A_ROW:
                break
        return done

    def _may_delete(self, change: Change) -> Outcome | StoreError | None:
        """None if the key is to be deleted, by a fresh fact from the source."""
        key = change.key
        try:
            facts = self._retried(lambda: self._source.reader.facts(key))
            if facts is not None:
                # It was written again since: what counts is what it is now.
                is_found = not change.index
                return self._put(key, facts, looks=is_found, is_found=is_found)
            self._seen_gone.add(key)
            if self._two_way is None:
                return None
            target, row = self._look(key), self._ledger.row(key)
            if target is None:
                # A row would say that the target has deleted what may come again.
                self._ledger.forget([key])
                return Outcome(Effect.NOTHING)
            latest = self._latest
            if latest is not None and self._retried(lambda: latest.facts(key)) is not None:
                # It came after the snapshot, maybe from the target, and so did the row.
                # The next difference has it.
                return Outcome(Effect.NOTHING)
            is_ours = row is not None and row.target.agrees(target)
            if is_ours or self._two_way.may_delete(change, target):
                return None
        except StoreError as error:
            return error
        return Outcome(Effect.CONFLICT)

    def _rename(self, change: Change) -> Outcome:
        old, new = change.previous_key, change.key
        moved = self._move(old, new)
        # Equal by now, or sent; also where properties changed with the name.
        outcome = self._put(new, None)
        if moved:
            effect = Effect.GONE if outcome.effect is Effect.GONE else Effect.RENAMED
            return Outcome(effect, outcome.sent_bytes)
        (left,) = self._delete([replace(change, key=old, kind=ChangeKind.DELETE, previous_key="")])
        if isinstance(left, StoreError):
            raise left
        return Outcome(outcome.effect, outcome.sent_bytes + left.sent_bytes)

    def _move(self, old: str, new: str) -> bool:
        """Rename the target's object if it is the source's, which has the new key by
        now; no byte of it crosses (OZ-118).
        """
        row, renamer = self._ledger.row(old), self._target.renamer
        if renamer is None or row is None or not row.source.etag:
            return False
        if self._two_way is not None:
            # For a moment it would count as written now, and by the target's clients.
            return False
        source = self._retried(lambda: self._source.reader.facts(new))
        if source is None or self._retried(lambda: self._source.reader.facts(old)) is not None:
            return False
        if (source.etag, source.size_bytes) != (row.source.etag, row.source.size_bytes):
            return False
        try:
            facts = self._retried(lambda: renamer.rename(row.target.facts(old), new))
        except (PreconditionFailedError, ObjectMissingError):
            return False
        known = EvidenceLevel.RECORDED if row.hashes else EvidenceLevel.LISTED
        stamps = ObjectStamp.of(source), ObjectStamp.of(facts)
        # Properties may have changed with the name: they are read again.
        self._ledger.save_rows([LedgerRow(new, *stamps, row.hashes, b"", known)])
        self._ledger.forget([old])
        self._seen_gone.add(old)
        return True

    def _delete_below(self, change: Change) -> Iterator[_Done]:
        """Delete what the target has below a prefix, key by key: some may be there
        again.
        """
        for some in _batches(self._below(self._target, change.key), DELETES_AT_ONCE):
            keys = [Change(change.index, one.key, "", ChangeKind.DELETE) for one in some]
            times = [replace(one, time_ms=change.time_ms) for one in keys]
            yield from zip(times, self._delete(times, readers=self._readers), strict=True)

    def _rename_below(self, change: Change) -> Iterator[_Done]:
        """Rename what the target has below the old prefix, and then see to all that the
        source has below the new one.
        """
        old, new = change.previous_key, change.key

        def settled(one: Change) -> _Done:
            outcome = self._applied(one)
            if isinstance(outcome, Outcome) and outcome.effect is Effect.GONE:
                outcome = self._applied(Change(one.index, one.key, "", ChangeKind.DELETE))
            return one, outcome

        def move(facts: ObjectFacts) -> _Done:
            key = new + facts.key[len(old) :]
            kind, previous = ChangeKind.RENAME, facts.key
            if not covers(self._prefixes, key):
                key, kind, previous = facts.key, ChangeKind.DELETE, ""
            return settled(Change(change.index, key, "", kind, previous))

        def see(facts: ObjectFacts) -> _Done:
            one = Change(change.index, facts.key, "", ChangeKind.PUT, facts=facts)
            row = self._ledger.row(facts.key)
            if row is not None and row.properties and row.source.agrees(facts):
                return one, Outcome(Effect.NOTHING)
            return settled(one)

        for store, prefix, act in ((self._target, old, move), (self._source, new, see)):
            for some in _batches(self._below(store, prefix), _KEYS_AT_ONCE):
                yield from self._readers.map(act, some)

    def _applied(self, change: Change) -> Outcome | StoreError:
        try:
            return self.apply(change)
        except StoreError as error:
            return error

    def _below(self, store: Store, prefix: str) -> Iterator[ObjectFacts]:
        """What a store lists below a prefix, as far as it is replicated."""
        for part in parts_below(self._prefixes, prefix):
            yield from store.lister.list_objects(part)

    def _sum(self, done: Iterable[_Done]) -> Outcome:
        """One outcome of all keys of an operation on a prefix.

        Raises:
            KeysLeftError: some failed, once the others are done.
            StoreError: so many failed that it is no matter of keys, or a snapshot is
                gone.
        """
        effect, sent, left = Effect.NOTHING, 0, dict[str, tuple[Change, StoreError]]()
        for change, one in done:
            if isinstance(one, SnapshotLostError):
                raise one
            if isinstance(one, StoreError):
                # What does the rest of a rename sees to its new key, too.
                again = replace(change, index=0, facts=None)
                left.setdefault(change.key, (again, one))
                if len(left) > _LEFT_MAX:
                    raise one
                continue
            sent += one.sent_bytes
            if one.effect is not Effect.NOTHING:
                effect = one.effect
        if left:
            raise KeysLeftError([*left.values()])
        return Outcome(effect, sent)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, size)):
        yield some
