"""Compare two buckets through their stores alone, and say how each key is known.

Objects of the target are read at level READ only: then every object is read at both
sides. Without that, damage behind a store's own index stays unseen, and an object of
which the sides have no hash in common is known by its listing and properties.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from enum import Enum

from proof.item import ContentHash, EvidenceLevel
from proof.receipts import Receipt
from replicator.compared_sets import ComparedSets
from replicator.comparison import DecidedKey, KeyComparison
from replicator.copy_requests import ObjectStamp
from replicator.crossing import Crossing
from replicator.difference import Action, DecisionRules
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.listing import join_keys, list_resumed
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError
from replicator.stores.port import ObjectFacts, Store
from replicator.stores.stamps import same_stamp
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock
from runtime.retry import Backoff, Sleep, call_with_retry

# Threads that read objects of one verification.
READERS_MAX = 8
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


class Damage(Enum):
    """Which side's bytes are not those that were recorded."""

    SOURCE = "source"
    TARGET = "target"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """What is known of one key. `kind` is None where both sides are equal at `level`,
    by `hashes` and the digest `properties`. A key that changed meanwhile is unsettled,
    and neither. `read_at_s` is in seconds since 1970, at level READ.
    """

    key: str
    source: ObjectFacts | None
    target: ObjectFacts | None
    level: EvidenceLevel
    kind: KeyDifferenceKind | None = None
    is_unsettled: bool = False
    hashes: tuple[ContentHash, ...] = ()
    properties: bytes = b""
    read_at_s: int | None = None
    damage: Damage | None = None


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
        clock: Clock,
        sleep: Sleep,
        backoff: Backoff,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """`ledger` has what earlier syncs recorded of this pair."""
        self._source, self._target, self._level = source, target, level
        self._ledger = ledger
        self._clock = clock
        self._is_cancelled = is_cancelled
        between = Crossing.between(source.capabilities, target.capabilities)
        self._crossing = ledger.crossing() or between
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
                copies_unproven=False,
            ),
            readers=readers,
            sleep=sleep,
            backoff=backoff,
            is_cancelled=is_cancelled,
            crossing=self._crossing,
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of properties that are compared."""
        return () if self._level is EvidenceLevel.LISTED else self._crossing.groups

    @property
    def lists_all(self) -> bool:
        """Whether both sides list all keys; otherwise equality cannot be shown."""
        return self._source.capabilities.lists_all_keys and self._target.capabilities.lists_all_keys

    def receipt(self, tally: "VerificationTally", prefix: str) -> Receipt | None:
        """What was found below a prefix, to be signed; None where a side does not list
        all keys, or keys changed meanwhile, so that nobody knows what it holds.
        """
        if not self.lists_all or tally.unsettled:
            return None
        return tally.sets.receipt(
            source=self._source.address,
            target=self._target.address,
            prefix=prefix,
            groups=self.groups,
            time_ms=self._clock.now_ms(),
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
        ours, theirs = (
            list_resumed(store.lister, prefix, sleep=self._sleep, backoff=self._backoff)
            for store in (self._source, self._target)
        )
        for one in join_keys(ours, theirs, iter(())):
            kind = None
            if one.source is None or one.target is None:
                kind = KeyDifferenceKind.EXTRA if one.source is None else KeyDifferenceKind.MISSING
            elif one.source.size_bytes != one.target.size_bytes:
                kind = KeyDifferenceKind.CHANGED
            yield VerifiedKey(one.key, one.source, one.target, EvidenceLevel.LISTED, kind)

    def _read(self, decided: DecidedKey) -> VerifiedKey:
        """The key with the bytes of both sides read and compared."""
        state, found = decided.state, _recorded(decided)
        source, target = state.source, state.target
        if source is None or target is None or found.is_unsettled:
            return found
        read_at_s = self._clock.now_ms() // 1000
        hashers = []
        for store, facts in ((self._source, source), (self._target, target)):
            try:
                hashers.append(self._hashed(store, facts))
            except (ObjectMissingError, PreconditionFailedError):
                return self._unread(found, store, facts)
        ours, theirs = hashers
        found = replace(found, level=EvidenceLevel.READ, read_at_s=read_at_s, damage=None)
        row = self._ledger.row(state.key)
        damaged = [
            side
            for side, facts, hasher, stamp in (
                (Damage.SOURCE, source, ours, row.source if row else None),
                (Damage.TARGET, target, theirs, row.target if row else None),
            )
            if _contradicts(
                hasher, facts, row.hashes if row and stamp and stamp.agrees(facts) else ()
            )
        ]
        if damaged:
            damage = damaged[0] if len(damaged) == 1 else Damage.BOTH
            if damage is not Damage.SOURCE:
                self._ledger.save_damaged(state.key, ObjectStamp.of(target))
            return replace(found, kind=KeyDifferenceKind.DAMAGED, damage=damage)
        if state.target_is_damaged:
            self._ledger.save_damaged(state.key, None)
        if ours.blake3 != theirs.blake3:
            return replace(found, kind=KeyDifferenceKind.CHANGED)
        is_changed = decided.decision.action is Action.PROPERTIES
        kind = KeyDifferenceKind.CHANGED if is_changed else None
        return replace(found, kind=kind, hashes=_sorted(ours.hashes()))

    def _unread(self, found: VerifiedKey, store: Store, facts: ObjectFacts) -> VerifiedKey:
        """A key that could not be read: lost if its store goes on listing it as it was,
        else changed while it was compared.
        """

        def listed() -> ObjectFacts | None:
            return next(store.lister.list_objects(facts.key), None)

        now = call_with_retry(listed, sleep=self._sleep, backoff=self._backoff)
        if now is not None and same_stamp(now, facts):
            damage = Damage.SOURCE if store is self._source else Damage.TARGET
            level, kind = EvidenceLevel.READ, KeyDifferenceKind.DAMAGED
            return replace(found, level=level, kind=kind, damage=damage)
        return replace(found, level=EvidenceLevel.LISTED, kind=None, is_unsettled=True)

    def _hashed(self, store: Store, facts: ObjectFacts) -> ContentHasher:
        def read() -> ContentHasher:
            hasher = ContentHasher()
            with store.reader.read(facts) as pieces:
                for piece in pieces:
                    if self._is_cancelled():
                        raise OperationInterruptedError("the verification was interrupted")
                    hasher.update(piece)
            return hasher

        return call_with_retry(read, sleep=self._sleep, backoff=self._backoff)


@dataclass(slots=True)
class VerificationTally:
    """Counts the keys of a verification, and sums up the items of both sides."""

    secret: bytes
    objects: int = 0
    differences: int = 0
    unsettled: int = 0
    kinds: Counter[KeyDifferenceKind] = field(default_factory=Counter)
    levels: Counter[EvidenceLevel] = field(default_factory=Counter)
    sets: ComparedSets = field(init=False)

    def __post_init__(self) -> None:
        self.sets = ComparedSets(self.secret)

    def add(self, key: VerifiedKey) -> None:
        """Count one key."""
        if key.source is None and key.target is None:
            # It was deleted at both sides meanwhile.
            return
        self.objects += 1
        self.levels[key.level] += 1
        self.unsettled += key.is_unsettled
        if key.kind is not None:
            self.differences += 1
            self.kinds[key.kind] += 1
        if key.kind is not None or key.is_unsettled or key.source is None:
            self.sets.add_different(key.source, key.target)
        else:
            self.sets.add_equal(
                key.source, key.hashes, key.properties, key.level, read_at_s=key.read_at_s
            )

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
    if state.target_is_damaged and kind is KeyDifferenceKind.CHANGED:
        kind = KeyDifferenceKind.DAMAGED
    is_unsettled = kind is not None and state.source_is_fresh
    # Of a read by an earlier run nothing is claimed now.
    level = min(decision.level, EvidenceLevel.RECORDED)
    return VerifiedKey(
        key=state.key,
        source=state.source,
        target=state.target,
        level=level,
        kind=None if is_unsettled else kind,
        is_unsettled=is_unsettled,
        damage=Damage.TARGET if kind is KeyDifferenceKind.DAMAGED else None,
        hashes=decision.hashes,
        properties=decision.properties,
    )


def _sorted(hashes: Iterable[ContentHash]) -> tuple[ContentHash, ...]:
    return tuple(sorted(hashes, key=lambda one: one.algorithm.value))


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
