"""Compare two buckets through their stores alone, and say how each key is known.

Nothing is read across regions unless the level is READ: then every object is read at
both sides. Without that, damage behind a store's own index stays unseen.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum

from proof.item import ContentHash, EvidenceLevel
from replicator.comparison import DecidedKey, KeyComparison
from replicator.difference import Action, DecisionRules
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.listing import join_keys
from replicator.stores.port import (
    ObjectFacts,
    ObjectMissingError,
    PreconditionFailedError,
    Store,
    same_stamp,
)
from runtime.retry import Backoff, Sleep, call_with_retry

# Objects that are read ahead of the one that is reported.
_KEYS_AHEAD = 16


class KeyDifferenceKind(Enum):
    """How a key differs, by the name in reports."""

    MISSING = "missing"
    EXTRA = "extra"
    CHANGED = "changed"
    DAMAGED = "damaged"
    """A side's bytes are not those that its own store or the last copy recorded, or it
    lists what it does not have.
    """


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """What is known of one key. `kind` is None where both sides are equal at `level`.
    A key that changed while it was read is `unsettled`, and neither.
    """

    key: str
    level: EvidenceLevel
    kind: KeyDifferenceKind | None = None
    version: str = ""
    is_unsettled: bool = False


class BucketVerification:
    """Verifies a target against a source; changes nothing."""

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: PairLedger,
        *,
        level: EvidenceLevel,
        readers: Executor,
        sleep: Sleep,
        backoff: Backoff,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """`ledger` has what earlier syncs recorded of this pair."""
        self._source, self._target, self._level = source, target, level
        self._ledger = ledger
        self._readers = readers
        self._sleep, self._backoff = sleep, backoff
        self._comparison = KeyComparison(
            source,
            target,
            ledger,
            rules=DecisionRules(
                may_delete=False,
                stamps_cover_properties=source.capabilities.stamps_cover_properties,
                patches=False,
            ),
            readers=readers,
            sleep=sleep,
            backoff=backoff,
            is_cancelled=is_cancelled,
        )

    def keys(self, prefix: str) -> Iterator[VerifiedKey]:
        """Every key that exists at a side, ascending.

        Raises:
            StoreError: a listing is not complete, or a side did not answer.
            OperationInterruptedError: the caller interrupted it.
        """
        if self._level is EvidenceLevel.LISTED:
            yield from self._listed(prefix)
            return
        if self._level is EvidenceLevel.RECORDED:
            yield from map(_recorded, self._comparison.decisions(prefix))
            return
        waiting = deque[Future[VerifiedKey]]()
        for decided in self._comparison.decisions(prefix):
            waiting.append(self._readers.submit(self._read, decided))
            if len(waiting) >= _KEYS_AHEAD:
                yield waiting.popleft().result()
        for one in waiting:
            yield one.result()

    def _listed(self, prefix: str) -> Iterator[VerifiedKey]:
        ours = self._source.lister.list_objects(prefix)
        theirs = self._target.lister.list_objects(prefix)
        for one in join_keys(ours, theirs, iter(())):
            kind = None
            if one.source is None or one.target is None:
                kind = KeyDifferenceKind.EXTRA if one.source is None else KeyDifferenceKind.MISSING
            elif one.source.size_bytes != one.target.size_bytes:
                kind = KeyDifferenceKind.CHANGED
            yield VerifiedKey(one.key, EvidenceLevel.LISTED, kind)

    def _read(self, decided: DecidedKey) -> VerifiedKey:
        """The key with the bytes of both sides read and compared."""
        state, found = decided.state, _recorded(decided)
        source, target = state.source, state.target
        if source is None or target is None:
            return found
        hashers = []
        for store, facts in ((self._source, source), (self._target, target)):
            try:
                hashers.append(self._hashed(store, facts))
            except (ObjectMissingError, PreconditionFailedError):
                return self._unread(store, facts)
        ours, theirs = hashers
        row = self._ledger.row(state.key)
        for facts, hasher, stamp in (
            (source, ours, row.source if row else None),
            (target, theirs, row.target if row else None),
        ):
            recorded = row.hashes if row and stamp and stamp.agrees(facts) else ()
            if _contradicts(hasher, facts, recorded):
                return VerifiedKey(state.key, EvidenceLevel.READ, KeyDifferenceKind.DAMAGED)
        if ours.blake3 != theirs.blake3:
            return VerifiedKey(state.key, EvidenceLevel.READ, KeyDifferenceKind.CHANGED)
        is_changed = decided.decision.action is Action.PROPERTIES
        kind = KeyDifferenceKind.CHANGED if is_changed else None
        return VerifiedKey(state.key, EvidenceLevel.READ, kind)

    def _unread(self, store: Store, facts: ObjectFacts) -> VerifiedKey:
        """A key that could not be read: lost if its store goes on listing it as it was,
        else changed while it was compared.
        """

        def listed() -> ObjectFacts | None:
            return next(store.lister.list_objects(facts.key), None)

        now = call_with_retry(listed, sleep=self._sleep, backoff=self._backoff)
        if now is not None and same_stamp(now, facts):
            return VerifiedKey(facts.key, EvidenceLevel.READ, KeyDifferenceKind.DAMAGED)
        return VerifiedKey(facts.key, EvidenceLevel.LISTED, is_unsettled=True)

    def _hashed(self, store: Store, facts: ObjectFacts) -> ContentHasher:
        def read() -> ContentHasher:
            hasher = ContentHasher()
            with store.reader.read(facts) as pieces:
                for piece in pieces:
                    hasher.update(piece)
            return hasher

        return call_with_retry(read, sleep=self._sleep, backoff=self._backoff)


@dataclass(slots=True)
class VerificationTally:
    """Counts the keys of a verification."""

    objects: int = 0
    differences: int = 0
    unsettled: int = 0
    levels: Counter[EvidenceLevel] = field(default_factory=Counter)

    def add(self, key: VerifiedKey) -> None:
        """Count one key."""
        self.objects += 1
        self.levels[key.level] += 1
        self.differences += key.kind is not None
        self.unsettled += key.is_unsettled

    @property
    def is_equal(self) -> bool:
        """Whether every key was found equal, each at its level."""
        return not self.differences and not self.unsettled


def _recorded(decided: DecidedKey) -> VerifiedKey:
    state, decision = decided.state, decided.decision
    kind = None
    if decision.action is not Action.NOTHING:
        kind = KeyDifferenceKind.CHANGED
        if state.source is None or state.target is None:
            gone = state.source is None
            kind = KeyDifferenceKind.EXTRA if gone else KeyDifferenceKind.MISSING
    # Of a read by an earlier run nothing is claimed now.
    level = min(decision.level, EvidenceLevel.RECORDED)
    return VerifiedKey(state.key, level, kind)


def _contradicts(
    hasher: ContentHasher, facts: ObjectFacts, recorded: Iterable[ContentHash]
) -> bool:
    """Whether bytes that were read are others than their store, or the last copy, has
    recorded.
    """
    read = {one.algorithm: one.digest for one in hasher.hashes()}
    return any(
        read.get(one.algorithm, one.digest) != one.digest for one in (*facts.hashes, *recorded)
    )
