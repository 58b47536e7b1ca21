"""Which changes may be applied now: in order for each key, in parallel across keys.

A change waits for every earlier one that touches one of its keys. Renames touch two
keys, and operations on a prefix all keys below it. A change that only says "this key
may have changed" replaces one of the same kind that still waits: applying it reads the
newest state anyway, so that both are done with it.

What was applied is acknowledged as the longest beginning without a hole (OZ-084).

Of an operation on a prefix single keys may be left that fail. They take its place, so
that changes of other keys wait no more; it is done with the last of them. And it does
not wait for a key that fails: that is looked at once more after it.
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
    of unknown age, `is_held` that it has failed and waits to be tried again, and
    `has_effect` that the target was another one. `whole` is the operation on a prefix
    of which this key was left, and `left` how many keys that one waits for; `joined`
    are later ones of the same key that are done with it.
    """

    change: Change
    numbers: list[int]
    since_ms: int
    order: tuple[int, int]
    is_found: bool = False
    is_started: bool = False
    is_held: bool = False
    is_done: bool = False
    has_effect: bool = False
    tries: int = 0
    waits_for: int = 0
    blocks: list["Work"] = field(default_factory=list)
    whole: "Work | None" = None
    left: int = 0
    joined: list["Work"] = field(default_factory=list)

    @property
    def is_prefix(self) -> bool:
        """Whether it touches all keys below a prefix."""
        return self.change.kind in _PREFIX_KINDS

    @property
    def names(self) -> tuple[str, ...]:
        """The keys or prefixes that it touches."""
        change = self.change
        return (change.key, change.previous_key) if change.previous_key else (change.key,)

    @property
    def waiting(self) -> list["Work"]:
        """What waits for this one."""
        whole = [] if self.whole is None else [self.whole]
        return [*self.blocks, *self.joined, *whole]

    def touches(self, key: str) -> bool:
        """Whether it touches a key."""
        if self.is_prefix:
            return key.startswith(self.names)
        return key in self.names

    def holds_up(self, other: "Work") -> bool:
        """Whether another one waits for this, or for one that does."""
        seen, left = {id(self)}, [self]
        while left:
            later = [one for one in left.pop().waiting if id(one) not in seen]
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
        self._ready = list[tuple[tuple[int, int], Work]]()
        # The newest work of each key; of prefixes all that are not done.
        self._last = dict[str, Work]()
        self._prefixes = list[Work]()
        self._pending = dict[tuple[int, int], Work]()
        self._orders = 0
        # Numbers that are not done, ascending, and those that are, out of order.
        self._open = deque[int]()
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
        self._note_number(queued.number)
        self._add(queued.change, [queued.number], queued.change.time_ms or now_ms)

    def pass_over(self, number: int) -> None:
        """Note a change of the queue that concerns no key of the replication."""
        self._note_number(number)
        self._done.add(number)
        self._advance()

    def touch(self, change: Change, *, now_ms: int) -> Work:
        """Take in what a comparison found of a key; returns what will settle it."""
        work = self._add(change, [], change.time_ms or now_ms)
        work.is_found = True
        return work

    def _note_number(self, number: int) -> None:
        # One that is taken twice is never done: all behind it waits for ever.
        assert number > (self._open[-1] if self._open else self._done_through)
        self._open.append(number)

    def _add(self, change: Change, numbers: list[int], since_ms: int) -> Work:
        merged = self._merge(change, numbers)
        if merged is not None:
            merged.since_ms = min(merged.since_ms, since_ms)
            return merged
        work = Work(change, numbers, since_ms, (self._orders, 0))
        self._orders += 1
        conflicts = self._conflicts(work)
        for earlier in conflicts:
            earlier.blocks.append(work)
            work.waits_for += 1
        self._pending[work.order] = work
        if work.is_prefix:
            self._prefixes.append(work)
        else:
            self._last.update(dict.fromkeys(work.names, work))
        if not work.waits_for:
            heapq.heappush(self._ready, (work.order, work))
        for earlier in conflicts:
            if earlier.is_held:
                self._put_behind(earlier)
        return work

    def start(self, limit: int) -> list[Work]:
        """Up to so much work that may be done now, oldest first."""
        found = list[Work]()
        while self._ready and len(found) < limit:
            _, work = heapq.heappop(self._ready)
            work.is_started = True
            found.append(work)
        return found

    def finish(self, work: Work, *, is_settled: bool = True) -> int:
        """Note that work is done; how many changes are done with it. Where that does
        not settle it, a later change of its key will, and it is acknowledged with that
        one.
        """
        assert work.is_started
        count = len(work.numbers) + self._end(work)
        self._remove(work)
        self._unblock(work.blocks)
        if not is_settled and work.numbers:
            self._unsettled.setdefault(work.change.key, []).append(work)
        else:
            self._done.update(work.numbers)
            self._settle_earlier(work)
        self._advance()
        return count

    def _end(self, work: Work) -> int:
        """Note that it is done, and what has joined it; how many changes are those of
        operations of which it was the last key that was left.
        """
        work.is_done, count = True, sum(map(self._end, work.joined))
        if (whole := work.whole) is not None:
            whole.left -= 1
            if not whole.left:
                whole.is_done = True
                self._done.update(whole.numbers)
                count += len(whole.numbers)
        return count

    def split(self, work: Work, left: Sequence[Change]) -> list[Work]:
        """Put single keys in the place of an operation on a prefix, which is done with
        all others. They are started, in the order of `left`, and touch no key in
        common. Later changes of other keys wait no more.
        """
        assert work.is_started
        assert work.is_prefix
        self._remove(work)
        work.left = len(left)
        parts = list[Work]()
        for number, change in enumerate(left, 1):
            part = Work(change, [], work.since_ms, (work.order[0], number), whole=work)
            part.is_started, part.is_found = True, work.is_found
            parts.append(part)
            self._pending[part.order] = part
            for name in part.names:
                # What was added later waits for the operation, and waits for this now.
                self._last.setdefault(name, part)
        for part in parts:
            part.blocks = [one for one in work.blocks if _meet(part, one)]
            for later in part.blocks:
                later.waits_for += 1
        self._unblock(work.blocks)
        work.blocks = []
        self._settle_earlier(work, but=parts)
        self._advance()
        return parts

    def hold(self, work: Work) -> None:
        """Note that work has failed and waits to be tried again: later, or after an
        operation on a prefix that waits for it.
        """
        assert work.is_started
        work.is_held = True
        self._put_behind(work)

    def _put_behind(self, work: Work) -> None:
        """Let what is held, and only looks at one key, wait for the next operation on a
        prefix instead of the other way round. A rename that has failed does not: what
        it keeps at the target under the old name may be all that can be read.
        """
        if work.change.kind not in _KEY_KINDS:
            return
        for later in [*work.blocks]:
            is_next = later.names == work.names and later.waits_for == 1
            if is_next and later.change.kind in _KEY_KINDS:
                self._join(work, later)
        following = [one for one in work.blocks if one.is_prefix and one.change.index]
        if not following:
            return
        prefix = min(following, key=lambda one: one.order)
        others = [one for one in work.blocks if one is not prefix]
        if any(prefix in one.blocks for one in others):
            return
        work.change = replace(work.change, index=0, facts=None)
        work.is_started = work.is_held = False
        work.blocks, work.waits_for = others, work.waits_for + 1
        prefix.blocks.append(work)
        self._unblock([prefix])

    def _join(self, work: Work, later: Work) -> None:
        """Let what is held do a later change of its key, which waits for it alone."""
        work.is_found = work.is_found or later.is_found
        self._replace_change(work, later.change)
        work.numbers, later.numbers = [*work.numbers, *later.numbers], []
        work.since_ms = min(work.since_ms, later.since_ms)
        work.joined.append(later)
        self._remove(later)
        self._last.setdefault(work.change.key, work)
        both = [one for one in later.blocks if one in work.blocks]
        rest = [one for one in later.blocks if one not in both]
        work.blocks = [one for one in work.blocks if one is not later] + rest
        self._unblock(both)

    def _remove(self, work: Work) -> None:
        del self._pending[work.order]
        if work.is_prefix:
            self._prefixes.remove(work)
        for name in work.names:
            if self._last.get(name) is work:
                del self._last[name]

    def _unblock(self, blocked: Sequence[Work]) -> None:
        for later in blocked:
            later.waits_for -= 1
            if not later.waits_for and not later.is_started:
                heapq.heappush(self._ready, (later.order, later))

    def _settle_earlier(self, work: Work, *, but: Sequence[Work] = ()) -> None:
        """Count changes as done that waited for a change of their keys, which this is;
        `but` touch keys of which it is none.
        """
        found = [key for key in self._unsettled if work.touches(key)]
        for key in found:
            if not any(one.touches(key) for one in but):
                for earlier in self._unsettled.pop(key):
                    self._done.update(earlier.numbers)

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
        work.is_started = work.is_held = False
        heapq.heappush(self._ready, (work.order, work))

    def _advance(self) -> None:
        while self._open and self._open[0] in self._done:
            self._done_through = self._open.popleft()
            self._done.remove(self._done_through)

    def _merge(self, change: Change, numbers: list[int]) -> Work | None:
        last = self._last.get(change.key)
        if change.kind not in _KEY_KINDS or last is None or last.change.kind not in _KEY_KINDS:
            return None
        later = (one for one in self._prefixes if one.order > last.order)
        is_running = last.is_started and not last.is_held
        if is_running or any(one.touches(change.key) for one in later):
            return None
        self._replace_change(last, change)
        last.numbers += numbers
        self.merged += len(numbers)
        return last

    def _replace_change(self, work: Work, change: Change) -> None:
        """Let work do a later change of its key, too."""
        if not work.is_found and work.change.index:
            work.change = change
            return
        # What a comparison found is settled by this alone, also where the key is gone;
        # so is what is done once more after an operation on a prefix. A look that is
        # wanted stays one, and what the log tells of may be later than it.
        is_listed = work.change.facts is not None and not change.index
        work.change = replace(change, index=0, facts=change.facts if is_listed else None)

    def _conflicts(self, work: Work) -> Sequence[Work]:
        if work.is_prefix:
            return [one for one in self._pending.values() if _meet(one, work)]
        found = {id(one): one for one in self._prefixes if any(map(one.touches, work.names))}
        found |= {id(one): one for one in map(self._last.get, work.names) if one is not None}
        return list(found.values())


def _meet(one: Work, other: Work) -> bool:
    """Whether they touch a key in common."""
    if not one.is_prefix:
        return any(map(other.touches, one.names))
    if not other.is_prefix:
        return any(map(one.touches, other.names))
    return any(a.startswith(b) or b.startswith(a) for a in one.names for b in other.names)
