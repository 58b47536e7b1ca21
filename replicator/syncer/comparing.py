"""Compare the target with the source key by key, and see to what differs.

The comparison only finds keys. Whatever differs is applied as a change is, in order
with other changes of the key, so that it may run beside them. It stops and goes on at
the key up to which all is done. A thread that does nothing else reads the keys, a page
at a time: however slowly a store lists them, nobody waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from replicator.comparison import DecidedKey, EqualityTally, KeyComparison
from replicator.cut import CutCheck
from replicator.difference import Action
from replicator.ledger import PairLedger
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.differences_found import DifferenceSink
from replicator.syncer.schedule import Work
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock

# Keys that are read at a time.
_PAGE_KEYS = 200
# Differences that may wait to be applied.
WAITING_MAX = 500
NAMED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class ComparisonFindings:
    """What a comparison found. Keys that differed are named up to a limit; `level` is
    that of what was equal. `in_flight` is None where nobody watched. Unless it
    `is_certain`, some keys could not be compared: they changed under each look.
    """

    began_ms: int
    differences: int
    keys: tuple[str, ...]
    level: str
    in_flight: int | None
    is_certain: bool = True


class Comparing(Protocol):
    """One comparison under way."""

    @property
    def last_key(self) -> str:
        """Every key up to this one is done."""

    @property
    def is_done(self) -> bool:
        """Whether all was compared, and what differed is done or held back."""

    @property
    def is_waiting(self) -> bool:
        """Whether the last `advance` has found nothing to do."""

    def cancel(self) -> None:
        """End what runs: nobody wants it any more."""

    def advance(self) -> None:
        """Compare a little more.

        Raises:
            ReconcileError: a side did not answer; call it again.
        """

    def result(self) -> ComparisonFindings:
        """What was found; once it is done."""


class StoreComparing:
    """One comparison under way. All methods belong to one thread."""

    def __init__(
        self,
        comparison: KeyComparison,
        sink: DifferenceSink,
        ledger: PairLedger,
        clock: Clock,
        *,
        reader: Executor,
        wake: Callable[[], None],
        prefixes: Sequence[str],
        start_after: str,
        spares_foreign: bool,
        new_cut: Callable[[str], CutCheck] | None = None,
    ) -> None:
        """What differs goes to `sink`. `reader` reads the keys, and calls `wake` when
        some are there. With `spares_foreign` only keys that were copied before are
        deleted. `new_cut` watches for what changes meanwhile.
        """
        self._comparison = comparison
        self._sink = sink
        self._ledger = ledger
        self._clock = clock
        self._reader = reader
        self._wake = wake
        self._prefixes = prefixes
        self._spares_foreign = spares_foreign
        self._new_cut = new_cut
        self._began_ms = clock.now_ms()
        self._tally = EqualityTally(ledger.secret)
        self._in_flight = 0
        self._named = list[str]()
        self._found = 0
        # Keys in order, with what settles those that differ.
        self._waiting = deque[tuple[str, Work | None]]()
        self._differing = 0
        self._read_key = start_after
        self._was_watched = new_cut is not None
        self._decided = self._decisions(start_after)
        self._page: Future[list[DecidedKey]] | None = None
        self._is_read = self._is_waiting = self._is_cancelled = False
        self.last_key = start_after
        """Every key up to this one is done."""

    @property
    def is_done(self) -> bool:
        """Whether every key was compared, and what differed is done or held back."""
        return self._is_read and not self._waiting

    @property
    def is_waiting(self) -> bool:
        """See Comparing."""
        return self._is_waiting

    @property
    def _is_full(self) -> bool:
        """Whether what differs has to be applied before more keys are compared."""
        return self._is_read or self._differing >= WAITING_MAX

    def cancel(self) -> None:
        """See Comparing. The request that is under way ends by itself."""
        self._is_cancelled = True

    def advance(self) -> None:
        """Take in what was read, and note what has been applied since.

        Raises:
            SnapshotLostError: the snapshot is gone.
            StoreError: a listing is not complete, or a side did not answer.
            OperationInterruptedError: it is interrupted.
        """
        page = self._next_page()
        for decided in page or ():
            self._take(decided)
        if page is not None:
            self._read_key = page[-1].state.key if page else self._read_key
            self._is_read = len(page) < _PAGE_KEYS
        self._is_waiting = not self._settle() and page is None

    def result(self) -> ComparisonFindings:
        """What was found; once it is done."""
        return ComparisonFindings(
            self._began_ms,
            self._found,
            tuple(self._named),
            self._tally.level_text,
            self._in_flight if self._was_watched else None,
        )

    def _next_page(self) -> list[DecidedKey] | None:
        """What was read of the next keys; None where that is still under way."""
        if self._page is None and not self._is_full:
            decided = self._decided
            self._page = self._reader.submit(lambda: self._read(decided))
            self._page.add_done_callback(lambda _: self._wake())
        if self._page is None or not self._page.done():
            return None
        taken, self._page = self._page, None
        try:
            return taken.result()
        except BaseException:
            # A generator that has failed looks as if it had come to its end.
            self._decided = self._decisions(self._read_key)
            self._was_watched = False
            raise

    def _read(self, decided: Iterator[DecidedKey]) -> list[DecidedKey]:
        """Read the next keys, in the thread of the reader."""
        found = list[DecidedKey]()
        for one in islice(decided, _PAGE_KEYS):
            if self._is_cancelled:
                raise OperationInterruptedError("the comparison is not wanted any more")
            found.append(one)
        return found

    def _decisions(self, start_after: str) -> Iterator[DecidedKey]:
        for prefix in self._prefixes:
            after = start_after
            if not start_after.startswith(prefix):
                if start_after > prefix:
                    # An earlier run has compared all of it.
                    continue
                after = ""
            cut = self._new_cut(prefix) if self._new_cut is not None else None
            for decided in self._comparison.decisions(prefix, start_after=after):
                if cut is not None:
                    cut.add(decided)
                yield decided
            if cut is not None:
                self._in_flight += cut.in_flight(self._comparison.gone)

    def _take(self, decided: DecidedKey) -> None:
        self._tally.add(decided)
        key, action = decided.state.key, decided.decision.action
        work = None
        if action is not Action.NOTHING:
            change = self._change(decided)
            if change is not None:
                work = self._sink.take(change)
                self._differing += work is not None
            self._found += 1
            if len(self._named) < NAMED_MAX:
                self._named.append(key)
        self._waiting.append((key, work))

    def _change(self, decided: DecidedKey) -> Change | None:
        """What to apply; None for a key that stays at the target."""
        state = decided.state
        match decided.decision.action:
            case Action.LEAVE:
                return None
            case Action.DELETE:
                if self._spares_foreign and not decided.target_was_seen:
                    return None
                return Change(0, state.key, "", ChangeKind.DELETE)
            case _:
                # What the target never had is copied as it was listed. Of anything else
                # both sides are looked at.
                is_new = state.target is None and state.row is None
                facts = state.source if is_new else None
                return Change(0, state.key, "", ChangeKind.PUT, facts=facts)

    def _settle(self) -> bool:
        """Note what is done or held back, in order; whether there was something."""
        before = len(self._waiting)
        while self._waiting:
            key, work = self._waiting[0]
            if work is not None:
                if not work.is_done and not self._sink.is_held(work):
                    break
                self._differing -= 1
            self._waiting.popleft()
            self.last_key = key
        return len(self._waiting) < before
