"""Rounds that read the source alone, and compare it with the ledger.

The ledger says which version of the source each key at the target is. A listing of the
source beside it shows what has changed since, and nothing is asked of the target. Only
what is not equal by the ledger is applied, as a change of a log is: a delete asks the
source for the key first, and a write is conditional where the target allows that.

A new round need not wait for what an earlier one has found: a slow object delays none
but itself. A page of the listing is read while others are copied. Between two rounds of
a large bucket the pages are read that have changed lately, which proves nothing. What a
listing does not show (tags, where a stamp does not cover them) is read beside.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, takewhile

from replicator.listing import JoinedKey, join_keys, list_resumed
from replicator.stores.port import Change, ChangeKind, ObjectFacts
from replicator.stores.stamps import same_stamp
from replicator.syncer.phase import SyncPhase, Tools
from replicator.syncer.property_reads import PropertyReads
from replicator.syncer.schedule import SettledTimes, Work
from replicator.syncer.workers import ChangeWorkers
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock

# At most so much of all time is spent on listing the source: a round that takes longer
# than its interval is followed by a pause of its own length.
_LISTING_SHARE_MAX = 0.5
# Of its pages at most so many are read between two rounds as well.
_BUSY_SHARE_MAX = 0.5
# Where changes come to few pages, which are read between two rounds, a round takes so
# little of all time, if it then comes at least so often.
_CALM_SHARE = 0.1
_CALM_PAUSE_S = 2.0
# A page of which a store, or a machine that slept, was longer in answering than this
# says nothing of what listing costs.
_PAGE_S_MAX = 1.0
# With so many keys that wait to be applied, no more are read: twice as many as are
# copied at once. What is listed sooner crosses no sooner.
_WAITING_MAX = 200
# Keys that stay different with good reason, such as a newer object at the target. Of
# more than these some are looked at in every round.
_SETTLED_MAX = 10_000
# Keys that are noted while both sides are compared.
_NOTED_MAX = 100_000


@dataclass(slots=True, eq=False)
class _Found:
    """What a round has found of a key, and what applies it."""

    facts: ObjectFacts | None
    work: Work


@dataclass(frozen=True, slots=True)
class _Page:
    """What was read of the next keys: changes to apply, and which keys of those that
    had differed are equal by now.
    """

    changes: tuple[Change, ...]
    equal: tuple[str, ...]
    last_key: str
    is_last: bool
    spent_s: float


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys after one, up to another; None is up to the last."""

    after: str
    until: str | None

    def has(self, key: str) -> bool:
        return self.after < key and (self.until is None or key <= self.until)

    def has_joined(self, one: JoinedKey) -> bool:
        return self.has(one.key)

    def from_first(self, keys: Iterable[str]) -> "_Keys | None":
        """From a little before the first of these keys, which are sorted, on: what is
        new often follows what was new before. None where it has none of them.
        """
        first = next(filter(self.has, keys), None)
        return None if first is None else _Keys(max(self.after, first[:-1]), self.until)


class SourceRounds:
    """The rounds of one phase. All methods belong to one thread."""

    def __init__(
        self,
        tools: Tools,
        phase: SyncPhase,
        workers: ChangeWorkers,
        clock: Clock,
        *,
        prefixes: tuple[str, ...],
        interval_s: float,
        page_keys: int,
    ) -> None:
        """The ledger knows each key below `prefixes` that both sides have. So many
        `page_keys` are read before others get their turn.
        """
        self._tools = tools
        self._source = phase.source
        self._workers = workers
        self._clock = clock
        self._interval_s = interval_s
        self._page_keys = page_keys
        kept = (phase.source.capabilities, tools.target.capabilities)
        self._may_delete = all(one.lists_all_keys for one in kept)
        self._properties: PropertyReads | None = None
        if not phase.source.capabilities.stamps_cover_properties:
            self._properties = PropertyReads(
                tools,
                phase,
                clock,
                prefixes=prefixes,
                interval_s=interval_s,
                touch=self._touch,
                waiting=self._waiting_work,
            )
        self._found = dict[str, _Found]()
        self._noted: set[str] | None = None
        self._listed = SettledTimes()
        # Keys that have failed before may not be found by a listing of the source.
        self._works = deque(workers.schedule.pending())
        self._joined: Iterator[JoinedKey] | None = None
        self._page: Future[_Page] | None = None
        self._read_key = ""
        self._began_ms = 0
        self._spent_s = 0.0
        # The pages of this round, and of each page that changed lately the first such
        # key.
        self._pages = list[_Keys]()
        self._changed, self._changed_before = list[str](), list[str]()
        # What is read between two rounds, and what was found there since the last one.
        self._busy = list[_Keys]()
        self._beside: Iterator[JoinedKey] | None = None
        self._beside_works = deque[Work]()
        self._beside_s = clock.monotonic_s()
        self._beside_spent_s = 0.0
        self.prefixes = prefixes
        """The prefixes that are compared."""

    @property
    def pause_s(self) -> float:
        """The least time between the beginnings of the last round and the next one."""
        least_s = max(self._interval_s, self._spent_s / _LISTING_SHARE_MAX)
        if not self._busy:
            return least_s
        return max(least_s, min(self._spent_s / _CALM_SHARE, _CALM_PAUSE_S))

    @property
    def beside_s(self) -> float:
        """Seconds until something is to be read between two rounds."""
        if not self._busy:
            return math.inf
        wait_s = max(self._interval_s, self._beside_spent_s / _LISTING_SHARE_MAX)
        return self._beside_s + wait_s - self._clock.monotonic_s()

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and is not read to its end."""
        return self._joined is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the round that is under way can do nothing now."""
        page = self._page
        return self._is_full if page is None else not page.done()

    @property
    def equal_as_of_ms(self) -> int | None:
        """Every change before this time is at the target; None where unknown."""
        listed_ms = self._listed.as_of_ms
        if self._properties is None or listed_ms is None:
            return listed_ms
        read_ms = self._properties.settled.as_of_ms
        return None if read_ms is None else self.without_assumed(min(listed_ms, read_ms))

    def without_assumed(self, as_of_ms: int) -> int:
        """This time, or an earlier one at which nothing was written whose ACL was not
        read.
        """
        assumed_ms = None if self._properties is None else self._properties.oldest_assumed_ms
        return as_of_ms if assumed_ms is None else min(as_of_ms, assumed_ms)

    def note_keys(self) -> None:
        """From now on note which keys are found, and those that wait to be applied."""
        waiting = self._workers.schedule.pending()
        self._noted = {name for work in waiting for name in work.names}

    def noted(self) -> set[str] | None:
        """The keys since `note_keys`, and no more from now on; None for too many."""
        noted, self._noted = self._noted, None
        return noted

    def await_works(self, works: Iterable[Work]) -> None:
        """Count no round that is not read to its end before these are applied."""
        self._works.extend(works)

    def advance(self) -> bool:
        """Take in what was read of this round, or begin one; whether it is read to its
        end.

        Raises:
            StoreError: the source did not answer; call it again to go on.
            DatabaseError: the ledger cannot be read.
            OperationInterruptedError: it is interrupted.
        """
        if self._joined is None:
            if self._page is not None and not self._page.done():
                return False
            # What was read beside and not taken in, this round finds, too.
            self._page = self._beside = None
            self._begin()
            assert self._joined is not None
        try:
            page = self._next_page(self._joined)
        except BaseException:
            # A generator that has failed looks as if it had come to its end.
            self._joined = self._keys(self._read_key)
            raise
        if page is None:
            return False
        self._spent_s += page.spent_s
        self._take(page, self._works)
        self._pages.append(_Keys(self._read_key, None if page.is_last else page.last_key))
        self._read_key = page.last_key
        if page.is_last:
            self._end()
        return page.is_last

    def advance_beside(self) -> bool:
        """Between two rounds, read some of the pages that changed lately; at any time,
        some of what listings do not show. Whether there was something to do.

        Raises:
            StoreError, DatabaseError, OperationInterruptedError: as `advance`.
        """
        has_read = self._joined is None and self._read_busy()
        if self._properties is None:
            return has_read
        return self._properties.advance(is_beside=self._waiting > 0) or has_read

    def _begin(self) -> None:
        self._began_ms = self._clock.now_ms()
        self._spent_s = 0.0
        # What was found beside is not found again, and has to be applied first.
        self._works += self._beside_works
        self._beside_works = deque()
        self._changed_before, self._changed = self._changed, []
        self._pages, self._read_key = [], ""
        self._joined = self._keys("")

    def _end(self) -> None:
        self._listed.add(self._began_ms, self._works)
        self._works, self._joined = deque(), None
        changed = sorted([*self._changed_before, *self._changed])
        busy = [part for page in self._pages if (part := page.from_first(changed)) is not None]
        is_most = len(busy) > max(1, _BUSY_SHARE_MAX * len(self._pages))
        self._busy = [] if is_most else busy
        self._beside_s, self._beside_spent_s = self._clock.monotonic_s(), 0.0

    def _read_busy(self) -> bool:
        if self._beside is None:
            if self._is_full or self.beside_s > 0:
                return False
            self._beside_s, self._beside_spent_s = self._clock.monotonic_s(), 0.0
            self._beside = self._busy_keys()
        try:
            page = self._next_page(self._beside)
        except BaseException:
            # It is read again with the others.
            self._beside = None
            raise
        if page is None:
            return False
        self._beside_spent_s += page.spent_s
        self._take(page, self._beside_works)
        if page.is_last:
            self._beside = None
        return True

    def _busy_keys(self) -> Iterator[JoinedKey]:
        for page in self._busy:
            yield from takewhile(page.has_joined, self._keys(page.after))

    def _next_page(self, joined: Iterator[JoinedKey]) -> _Page | None:
        """What was read of these keys; None where that is still under way. A thread
        that does nothing else meanwhile reads it.
        """
        if self._page is None and not self._is_full:
            known = frozenset(self._found)
            self._page = self._tools.lister.submit(lambda: self._read(joined, known))
            self._page.add_done_callback(lambda _: self._tools.wake())
        if self._page is None or not self._page.done():
            return None
        taken, self._page = self._page, None
        return taken.result()

    @property
    def _waiting(self) -> int:
        return len(self._workers.schedule) - self._workers.held

    @property
    def _is_full(self) -> bool:
        return self._waiting >= _WAITING_MAX

    def _keys(self, start_after: str) -> Iterator[JoinedKey]:
        """The listing of the source and the ledger, joined by key."""
        tools = self._tools
        for prefix in self.prefixes:
            after = start_after if start_after.startswith(prefix) else ""
            if not after and start_after > prefix:
                continue
            yield from join_keys(
                list_resumed(
                    self._source.lister,
                    prefix,
                    start_after=after,
                    sleep=tools.sleep,
                    backoff=tools.backoff,
                ),
                iter(()),
                tools.ledger.rows(prefix, start_after=after),
            )

    def _read(self, joined: Iterator[JoinedKey], known: frozenset[str]) -> _Page:
        """Read the next keys. `known` are those of which a difference is known."""
        if self._tools.is_stopped():
            raise OperationInterruptedError("the round was interrupted")
        began_s = self._clock.monotonic_s()
        changes, equal, last_key, count = list[Change](), list[str](), "", 0
        for one in islice(joined, self._page_keys):
            last_key, count = one.key, count + 1
            change = self._change(one)
            if change is not None:
                changes.append(change)
            elif last_key in known:
                equal.append(last_key)
        spent_s = min(self._clock.monotonic_s() - began_s, _PAGE_S_MAX)
        is_last = count < self._page_keys
        return _Page(tuple(changes), tuple(equal), last_key, is_last, spent_s)

    def _change(self, joined: JoinedKey) -> Change | None:
        """What to apply of a key; None where it is equal by the ledger, or stays."""
        facts, row = joined.source, joined.row
        if facts is None:
            # Whether the source has it is asked before anything is deleted.
            return Change(0, joined.key, "", ChangeKind.DELETE) if self._may_delete else None
        is_written = row is None or not row.source.agrees(facts)
        if not is_written and row is not None and row.properties:
            return None
        # Of tags and deletes no listing tells when they were made.
        time_ms = facts.modified_ms if is_written else 0
        return Change(0, joined.key, "", ChangeKind.PUT, facts=facts, time_ms=time_ms)

    def _take(self, page: _Page, works: deque[Work]) -> None:
        for key in page.equal:
            self._found.pop(key, None)
        first = len(works)
        for change in page.changes:
            if not self._is_applied(change) and (work := self._touch(change)) is not None:
                works.append(work)
        if len(works) > first:
            self._changed.append(works[first].change.key)

    def _is_applied(self, change: Change) -> bool:
        """Whether a change was applied since the ledger was read."""
        known = self._found.get(change.key)
        if known is None or not known.work.is_done:
            return False
        row, facts = self._tools.ledger.row(change.key), change.facts
        if row is None or facts is None:
            return row is None and facts is None
        return bool(row.properties) and row.source.agrees(facts)

    def _touch(self, change: Change) -> Work | None:
        """Let a change be applied; None where the same was found before."""
        known = self._found.get(change.key)
        # What still waits is among the works of an earlier round, which ends first.
        # What had no effect is different with good reason.
        is_known = known is not None and _is_same(known.facts, change.facts)
        if known is not None and is_known and not (known.work.is_done and known.work.has_effect):
            return None
        if self._noted is not None:
            self._noted.add(change.key)
            if len(self._noted) > _NOTED_MAX:
                self._noted = None
        work = self._workers.schedule.touch(change, now_ms=self._clock.now_ms())
        self._found.pop(change.key, None)
        self._found[change.key] = _Found(change.facts, work)
        if len(self._found) > _SETTLED_MAX:
            del self._found[next(iter(self._found))]
        return work

    def _waiting_work(self, key: str) -> Work | None:
        known = self._found.get(key)
        return None if known is None or known.work.is_done else known.work


def _is_same(ours: ObjectFacts | None, theirs: ObjectFacts | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return same_stamp(ours, theirs)
