"""Which changes may be applied now: in order for each key, in parallel across keys.

A change waits for every earlier one that touches one of its keys. Renames touch two
keys, and operations on a prefix all keys below it. A change that only says "this key
may have changed" replaces one of the same kind that still waits: applying it reads the
newest state anyway, so that both are done with it.

What was applied is acknowledged as the longest beginning without a hole (OZ-084).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from replicator.stores.port import Change, ChangeKind
from replicator.syncer.queue import QueuedChange

_PREFIX_KINDS = (ChangeKind.DELETE_PREFIX, ChangeKind.RENAME_PREFIX)
_KEY_KINDS = (ChangeKind.PUT, ChangeKind.DELETE)


@dataclass(slots=True, eq=False)
class Work:
    """Changes that are applied at once: the newest of one key, and those that it
    replaces, by their numbers. `is_found` says that a comparison found a difference,
    of unknown age, and `has_effect` that the target was another one.
    """

    change: Change
    numbers: list[int]
    since_ms: int
    order: int
    is_found: bool = False
    is_started: bool = False
    is_done: bool = False
    has_effect: bool = False
    tries: int = 0
    waits_for: int = 0
    blocks: list["Work"] = field(default_factory=list)

    @property
    def is_prefix(self) -> bool:
        """Whether it touches all keys below a prefix."""
        return self.change.kind in _PREFIX_KINDS

    @property
    def names(self) -> tuple[str, ...]:
        """The keys or prefixes that it touches."""
        change = self.change
        return (change.key, change.previous_key) if change.previous_key else (change.key,)

    def touches(self, key: str) -> bool:
        """Whether it touches a key."""
        if self.is_prefix:
            return key.startswith(self.names)
        return key in self.names

    def holds_up(self, other: "Work") -> bool:
        """Whether another one waits for this, or for one that does."""
        seen, left = {id(self)}, [self]
        while left:
            later = [one for one in left.pop().blocks if id(one) not in seen]
            if any(one is other for one in later):
                return True
            seen.update(map(id, later))
            left += later
        return False


class SettledTimes:
    """Up to when all is at the target, as one look after the other shows: each counts
    once what it has found is applied, and what those before it have found.
    """

    def __init__(self) -> None:
        self._open = deque[tuple[int, deque[Work]]]()
        self._as_of_ms: int | None = None

    @property
    def as_of_ms(self) -> int | None:
        """Every change before this time is at the target; None where unknown."""
        while self._open:
            as_of_ms, works = self._open[0]
            while works and works[0].is_done:
                works.popleft()
            if works:
                break
            self._as_of_ms = as_of_ms
            self._open.popleft()
        return self._as_of_ms

    def add(self, as_of_ms: int, works: deque[Work]) -> None:
        """Note what a look that began then has found."""
        if not works and self._open and not self._open[-1][1]:
            # One key that fails for days must not leave one of these for each look.
            self._open.pop()
        self._open.append((as_of_ms, works))


class ChangeSchedule:
    """The changes that were taken from the queue and are not done."""

    def __init__(self) -> None:
        self._ready = list[tuple[int, Work]]()
        # The newest work of each key; of prefixes all that are not done.
        self._last = dict[str, Work]()
        self._prefixes = list[Work]()
        self._pending = dict[int, Work]()
        self._orders = 0
        # Numbers that are not done, ascending, and those that are, out of order.
        self._open = list[int]()
        self._done = set[int]()
        self._done_through = 0
        # Changes whose keys are gone, until a later change says so.
        self._unsettled = dict[str, list[Work]]()
        self.merged = 0
        """How many changes were replaced by later ones of the same key."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_ready(self) -> bool:
        """Whether some of it may be started now."""
        return bool(self._ready)

    @property
    def done_through(self) -> int:
        """Every change up to this number is done."""
        return self._done_through

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest change was made that is not at the target, if known."""
        left = [one.since_ms for one in self._pending.values()]
        left += [one.since_ms for some in self._unsettled.values() for one in some]
        return min(left, default=None)

    @property
    def has_found(self) -> bool:
        """Whether something waits that a comparison found: nobody knows its age."""
        return any(one.is_found for one in self._pending.values())

    def pending(self) -> list[Work]:
        """What is not done."""
        return list(self._pending.values())

    def add(self, queued: QueuedChange, *, now_ms: int) -> None:
        """Take in the next change. `now_ms` counts where nobody knows its time."""
        heapq.heappush(self._open, queued.number)
        self._add(queued.change, [queued.number], queued.change.time_ms or now_ms)

    def pass_over(self, number: int) -> None:
        """Note a change of the queue that concerns no key of the replication."""
        heapq.heappush(self._open, number)
        self._done.add(number)
        self._advance()

    def touch(self, change: Change, *, now_ms: int) -> Work:
        """Take in what a comparison found of a key; returns what will settle it."""
        work = self._add(change, [], change.time_ms or now_ms)
        work.is_found = True
        return work

    def _add(self, change: Change, numbers: list[int], since_ms: int) -> Work:
        merged = self._merge(change, numbers)
        if merged is not None:
            merged.since_ms = min(merged.since_ms, since_ms)
            return merged
        work = Work(change, numbers, since_ms, self._orders)
        self._orders += 1
        for earlier in self._conflicts(work):
            earlier.blocks.append(work)
            work.waits_for += 1
        self._pending[work.order] = work
        if work.is_prefix:
            self._prefixes.append(work)
        else:
            self._last.update(dict.fromkeys(work.names, work))
        if not work.waits_for:
            heapq.heappush(self._ready, (work.order, work))
        return work

    def start(self, limit: int) -> list[Work]:
        """Up to so much work that may be done now, oldest first."""
        found = list[Work]()
        while self._ready and len(found) < limit:
            _, work = heapq.heappop(self._ready)
            work.is_started = True
            found.append(work)
        return found

    def finish(self, work: Work, *, is_settled: bool = True) -> None:
        """Note that work is done. Where that does not settle it, a later change of its
        key will, and it is acknowledged with that one.
        """
        assert work.is_started
        work.is_done = True
        del self._pending[work.order]
        if work.is_prefix:
            self._prefixes.remove(work)
        for name in work.names:
            if self._last.get(name) is work:
                del self._last[name]
        for later in work.blocks:
            later.waits_for -= 1
            if not later.waits_for:
                heapq.heappush(self._ready, (later.order, later))
        if not is_settled and work.numbers:
            self._unsettled.setdefault(work.change.key, []).append(work)
            return
        self._done.update(work.numbers)
        for key in [one for one in self._unsettled if work.touches(one)]:
            for earlier in self._unsettled.pop(key):
                self._done.update(earlier.numbers)
        self._advance()

    def unsettled(self) -> list[Work]:
        """What is done and waits for a later change of its key."""
        return [one for some in self._unsettled.values() for one in some]

    def settle(self, works: Sequence[Work]) -> None:
        """Note that both sides were found equal since these were done."""
        for work in works:
            waiting = self._unsettled.get(work.change.key, [])
            if work in waiting:
                waiting.remove(work)
                self._done.update(work.numbers)
            if not waiting:
                self._unsettled.pop(work.change.key, None)
        self._advance()

    def give_back(self, work: Work) -> None:
        """Let work that was started and not done be started again later."""
        assert work.is_started
        work.is_started = False
        heapq.heappush(self._ready, (work.order, work))

    def _advance(self) -> None:
        while self._open and self._open[0] in self._done:
            self._done_through = heapq.heappop(self._open)
            self._done.remove(self._done_through)

    def _merge(self, change: Change, numbers: list[int]) -> Work | None:
        last = self._last.get(change.key)
        if change.kind not in _KEY_KINDS or last is None or last.change.kind not in _KEY_KINDS:
            return None
        later = (one for one in self._prefixes if one.order > last.order)
        if last.is_started or any(one.touches(change.key) for one in later):
            return None
        # What a comparison found is settled by this alone, also where the key is gone.
        last.change = replace(change, index=0, facts=None) if last.is_found else change
        last.numbers += numbers
        self.merged += len(numbers)
        return last

    def _conflicts(self, work: Work) -> Sequence[Work]:
        if work.is_prefix:
            return [one for one in self._pending.values() if _overlap(one, work)]
        found = {id(one): one for one in self._prefixes if any(map(one.touches, work.names))}
        found |= {id(one): one for one in map(self._last.get, work.names) if one is not None}
        return list(found.values())


def _overlap(one: Work, other: Work) -> bool:
    """Whether they touch a key in common; `other` touches prefixes."""
    if not one.is_prefix:
        return any(map(other.touches, one.names))
    return any(a.startswith(b) or b.startswith(a) for a in one.names for b in other.names)
