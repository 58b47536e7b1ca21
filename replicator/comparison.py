"""Compare two stores key by key: decide, read what the decision lacks, decide again."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from proof.item import EvidenceLevel
from proof.root import SetRoot
from replicator.compared_sets import ComparedSets
from replicator.copy_requests import ObjectStamp
from replicator.crossing import Crossing
from replicator.difference import Action, Decision, DecisionRules, KeyState, Need, decide
from replicator.hashing import ContentHasher, WholeCrc, declared_crc, with_whole
from replicator.ledger import LedgerRow, PairLedger
from replicator.listing import JoinedKey, join_keys, list_resumed, lists_key
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, Store
from replicator.stores.stamps import same_stamp
from runtime.errors import OperationInterruptedError
from runtime.retry import Backoff, Sleep, call_with_retry

T = TypeVar("T")

# Keys that are decided ahead of the one that is reported, so that reads overlap.
_KEYS_AHEAD = 256
# A key that changes again and again is reported as it is, and is a difference.
_READS_MAX = 8
# Rows found by a comparison are saved this many at a time.
_ROWS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class DecidedKey:
    """A key with all that was read of it, and what must happen."""

    state: KeyState
    decision: Decision

    @property
    def source_was_seen(self) -> bool:
        """Whether an earlier look has found the source in this very state."""
        row, source = self.state.row, self.state.source
        is_known = row is not None and source is not None and row.source.agrees(source)
        return is_known and row is not None and row.properties == self.decision.properties

    @property
    def target_was_seen(self) -> bool:
        """Whether an earlier look has found the target in this very state."""
        row, target = self.state.row, self.state.target
        return row is not None and target is not None and row.target.agrees(target)


_Decided: TypeAlias = "DecidedKey | Future[DecidedKey]"
_Revision: TypeAlias = tuple[LedgerRow | None, LedgerRow | None]


class KeyComparison:
    """Compares a source and a target. Reads at the source, and at the target only
    listings and properties that are not known.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: PairLedger,
        *,
        rules: DecisionRules,
        readers: Executor,
        sleep: Sleep,
        backoff: Backoff,
        is_cancelled: Callable[[], bool],
        fails_alone: Callable[[StoreError], bool] = lambda _: False,
        crossing: Crossing | None = None,
    ) -> None:
        """`fails_alone` says of an error that it is of one object: that counts as
        different, and the others are compared. `crossing` is that of the ledger's rows;
        None for all that both can keep.
        """
        self._source = source
        self._target = target
        self._ledger = ledger
        self._rules = rules
        self._readers = readers
        self._sleep = sleep
        self._backoff = backoff
        self._is_cancelled = is_cancelled
        self._fails_alone = fails_alone
        between = Crossing.between(source.capabilities, target.capabilities)
        self._crossing = crossing or between
        self._gone = 0

    @property
    def gone(self) -> int:
        """How many keys of the ledger the last comparison has found at neither side."""
        return self._gone

    def decide_key(self, state: KeyState) -> DecidedKey:
        """One key that nobody has listed now, with what must happen.

        Raises:
            StoreError: a side did not answer.
            OperationInterruptedError: the sync is being interrupted.
        """
        decided = self._decide(state, is_listed=False)
        row = self._learned(decided)
        self._ledger.save_rows([row] if row is not None else [])
        return decided

    def decisions(self, prefix: str, *, start_after: str = "") -> Iterator[DecidedKey]:
        """Every key after `start_after` that exists at a side, ascending, with what
        must happen. Afterwards the ledger has what was found equal, and no row of a key
        that is gone, but for keys that others have changed there meanwhile.

        Raises:
            StoreError: a listing is not complete, or a side did not answer.
            OperationInterruptedError: the sync is being interrupted.
        """
        joined = join_keys(
            self._listing(self._source, prefix, start_after),
            self._listing(self._target, prefix, start_after),
            self._ledger.rows(prefix, start_after=start_after),
        )
        damaged = self._ledger.damaged()
        waiting = deque[_Decided]()
        learned, gone = list[_Revision](), list[_Revision]()
        self._gone = 0
        for one in joined:
            if one.source is None and one.target is None:
                gone.append((one.row, None))
                continue
            stamp = damaged.get(one.key)
            is_damaged = stamp is not None and one.target is not None and stamp.agrees(one.target)
            waiting.append(self._start(one, is_damaged=is_damaged))
            if len(waiting) >= _KEYS_AHEAD:
                yield self._settled(waiting.popleft(), learned)
        while waiting:
            yield self._settled(waiting.popleft(), learned)
        self._ledger.revise(learned)
        self._ledger.revise(gone)
        self._gone = len(gone)

    def _listing(self, store: Store, prefix: str, start_after: str) -> Iterator[ObjectFacts]:
        return list_resumed(
            store.lister,
            prefix,
            start_after=start_after,
            sleep=self._sleep,
            backoff=self._backoff,
        )

    def _start(self, one: JoinedKey, *, is_damaged: bool) -> _Decided:
        if self._is_cancelled():
            raise OperationInterruptedError("the sync was interrupted")
        state = KeyState(one.key, one.source, one.target, one.row, target_is_damaged=is_damaged)
        decision = decide(state, self._rules)
        if decision.needs is None:
            return DecidedKey(state, decision)
        return self._readers.submit(self._decide_listed, state)

    def _settled(self, one: _Decided, learned: list[_Revision]) -> DecidedKey:
        decided = one.result() if isinstance(one, Future) else one
        row = self._learned(decided)
        if row is not None:
            learned.append((decided.state.row, row))
            if len(learned) >= _ROWS_AT_ONCE:
                self._ledger.revise(learned)
                learned.clear()
        return decided

    def _learned(self, decided: DecidedKey) -> LedgerRow | None:
        """What is to be recorded of a key that was compared."""
        row = _learned_row(decided)
        is_known = self._rules.copies_unproven or decided.decision.level > EvidenceLevel.LISTED
        # A verification of unknown content must not replace what an earlier sync knew.
        return row if is_known else None

    def _decide_listed(self, state: KeyState) -> DecidedKey:
        try:
            return self._decide(state, is_listed=True)
        except StoreError as error:
            if not self._fails_alone(error):
                raise
            return DecidedKey(state, Decision(Action.COPY, f"not comparable: {error.message}"))

    def _decide(self, state: KeyState, *, is_listed: bool) -> DecidedKey:
        for _ in range(_READS_MAX):
            decision = decide(state, self._rules)
            if decision.needs is None:
                return DecidedKey(state, decision)
            if self._is_cancelled():
                raise OperationInterruptedError("the sync was interrupted")
            seen = self._read(state, decision.needs)
            is_gone = state.source is not None and seen.source is None
            if is_gone and is_listed and self._is_lost(state.key):
                return DecidedKey(state, Decision(Action.COPY, "listed at the source, but lost"))
            state = seen
        return DecidedKey(state, Decision(Action.COPY, "keeps changing"))

    def _read(self, state: KeyState, need: Need) -> KeyState:
        """The state with what the decision needs; with fresh facts where the object is
        another one by now.
        """
        source, target = state.source, state.target
        try:
            match need:
                case Need.SOURCE_CONTENT if source is not None:
                    return self._retried(lambda: self._with_content(state, source))
                case Need.SOURCE_PROPERTIES if source is not None:
                    digest = self._retried(lambda: self._digest(self._source, source))
                    return replace(state, source_properties=digest)
                case Need.TARGET_PROPERTIES if target is not None:
                    digest = self._retried(lambda: self._digest(self._target, target))
                    return replace(state, target_properties=digest)
                case _:
                    pass
        except (ObjectMissingError, PreconditionFailedError):
            # It is another object by now, or none.
            pass
        if need is Need.TARGET_PROPERTIES:
            now = self._retried(lambda: self._target.reader.facts(state.key))
            if target is not None and now is not None and same_stamp(target, now):
                now = target
            damaged = state.target_is_damaged
            return KeyState(state.key, source, now, state.row, target_is_damaged=damaged)
        now = self._retried(lambda: self._source.reader.facts(state.key))
        if source is not None and now is not None and same_stamp(source, now):
            # It says that it is the same, and could not be read as such: once more.
            now = source
        damaged = state.target_is_damaged
        return KeyState(
            state.key, now, target, state.row, source_is_fresh=True, target_is_damaged=damaged
        )

    def _is_lost(self, key: str) -> bool:
        """Whether the source lists a key that it does not have: nobody deleted it."""
        return self._retried(lambda: lists_key(self._source.lister, key))

    def _with_content(self, state: KeyState, source: ObjectFacts) -> KeyState:
        """With the hash that is recorded of the source, which its log did not tell, or
        with those of its bytes: among them the CRC that the target declares.
        """
        if self._source.capabilities.records_hashes and not source.hashes:
            now = self._source.reader.facts(state.key)
            if now is not None and now.hashes and same_stamp(now, source):
                return replace(state, source=now)
        declared = declared_crc(state.target.hashes) if state.target is not None else ""
        hasher, crc = ContentHasher(), WholeCrc(declared)
        with self._source.reader.read(source) as pieces:
            for piece in pieces:
                hasher.update(piece)
                crc.update(piece)
        return replace(state, source_content=with_whole(hasher.hashes(), crc.hash()))

    def _digest(self, store: Store, facts: ObjectFacts) -> bytes:
        """Of just this object: a newer one has bytes that nobody compared."""
        return self._crossing.digest(store.reader.properties_of(facts))

    def _retried(self, call: Callable[[], T]) -> T:
        return call_with_retry(call, sleep=self._sleep, backoff=self._backoff)


def _learned_row(decided: DecidedKey) -> LedgerRow | None:
    """What a comparison found out of a key that is equal, where the ledger lacks it."""
    state, decision = decided.state, decided.decision
    source, target, row = state.source, state.target, state.row
    if decision.action is not Action.NOTHING or source is None or target is None:
        return None
    ours, theirs, has_windows = ObjectStamp.of(source), ObjectStamp.of(target), False
    if row is not None and row.target.agrees(target):
        theirs, has_windows = row.target.completed(target), row.has_windows
    if row is not None and row.source.agrees(source):
        ours = row.source.completed(source)
    found = LedgerRow(
        key=state.key,
        source=ours,
        target=theirs,
        hashes=decision.hashes,
        properties=decision.properties,
        level=decision.level,
        has_windows=has_windows,
    )
    return found if found != row else None


@dataclass(slots=True)
class EqualityTally:
    """Counts what a comparison found, and sums up the items of both sides."""

    secret: bytes
    differences: int = 0
    sets: ComparedSets = field(init=False)

    def __post_init__(self) -> None:
        self.sets = ComparedSets(self.secret)

    def add(self, decided: DecidedKey) -> None:
        """Count one key."""
        state, decision = decided.state, decided.decision
        if decision.action is not Action.NOTHING:
            self.differences += 1
            self.sets.add_different(state.source, state.target)
        elif state.source is not None:
            self.sets.add_equal(state.source, decision.hashes, decision.properties, decision.level)

    def remove_extra(self, key: str, size_bytes: int) -> None:
        """Take out a difference that ended: only the target had this key, and the store
        says that it is deleted.
        """
        self.differences -= 1
        self.sets.remove_extra(key, size_bytes)

    @property
    def level_text(self) -> str:
        """The level at which all counted objects are equal, as reports write it."""
        sets = self.sets
        if not sets.objects or sets.level is EvidenceLevel.LISTED:
            return "listed"
        word = sets.level.name.lower()
        return f"{word}:{sets.algorithm.value}" if sets.algorithm is not None else word

    @property
    def root(self) -> SetRoot:
        """The root of the objects that are equal, by their strongest algorithm."""
        return self.sets.root
