"""Rounds that read the source alone, and compare it with the ledger.

The ledger says which version of the source each key at the target is. A listing of the
source beside it shows what has changed since, and nothing is asked of the target. Only
what is not equal by the ledger is applied, as a change of a log is: a delete asks the
source for the key first, and a write is conditional where the target allows that.

A new round need not wait for what an earlier one has found: a slow object delays none
but itself. What a listing does not show (tags, where a stamp does not cover them) is
read of one share of the keys after the other, as much as time allows.
"""

import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from replicator.ledger import LedgerRow
from replicator.listing import JoinedKey, join_keys, list_resumed
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError
from replicator.stores.port import Change, ChangeKind, ObjectFacts
from replicator.stores.stamps import same_stamp
from replicator.syncer.phase import SyncPhase, Tools
from replicator.syncer.schedule import Work
from replicator.syncer.workers import ChangeWorkers
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock

# At most so much of all time is spent on reading the source: a round that takes longer
# than its interval is followed by a pause of its own length.
_READING_SHARE_MAX = 0.5
# Keys read before others get their turn: one page of a listing.
_KEYS_AT_ONCE = 1_000
# Keys that wait to be applied, and reads of properties under way.
_WAITING_MAX = 500
_READS_MAX = 256
# Keys that stay different with good reason, such as a newer object at the target. Of
# more than these some are looked at in every round.
_SETTLED_MAX = 10_000
# Properties are read in up to so many rounds, of a part of the keys in each.
_SLICES_MAX = 64


@dataclass(slots=True, eq=False)
class _Found:
    """What a round has found of a key, and what applies it."""

    facts: ObjectFacts | None
    work: Work


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
    ) -> None:
        """The ledger knows each key below `prefixes` that both sides have."""
        self._tools = tools
        self._source = phase.source
        self._crossing = phase.crossing
        self._workers = workers
        self._clock = clock
        self._interval_s = interval_s
        kept = (phase.source.capabilities, tools.target.capabilities)
        self._may_delete = all(one.lists_all_keys for one in kept)
        self._reads_properties = not phase.source.capabilities.stamps_cover_properties
        self._slices = 1
        self._round = 0
        # When each round began that has read another share of the properties.
        self._cycle = deque[int](maxlen=1)
        self._found = dict[str, _Found]()
        # Rounds whose findings are not all applied: what they prove, and what waits.
        self._open = deque[tuple[int | None, list[Work]]]()
        self._works = list[Work]()
        self._reads = deque[tuple[ObjectFacts, LedgerRow, Future[bytes | None]]]()
        self._joined: Iterator[JoinedKey] | None = None
        self._read_key = ""
        self._began_ms = 0
        self._spent_s = 0.0
        self.prefixes = prefixes
        """The prefixes that are compared."""
        self.equal_as_of_ms: int | None = None
        """Every change before this time is at the target; None where unknown."""

    @property
    def pause_s(self) -> float:
        """The least time between the beginnings of the last round and the next one."""
        return max(self._interval_s, self._spent_s / _READING_SHARE_MAX)

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and is not read to its end."""
        return self._joined is not None

    def advance(self) -> bool:
        """Read some keys of this round, or begin one; whether it is read to its end.

        Raises:
            StoreError: the source did not answer; call it again to go on.
            DatabaseError: the ledger cannot be read.
            OperationInterruptedError: it is interrupted.
        """
        if self._joined is None:
            self._begin()
        began_s = self._clock.monotonic_s()
        try:
            is_read = self._advance()
        except BaseException:
            # A generator that has failed looks as if it had come to its end.
            self._joined = self._keys(self._read_key)
            raise
        finally:
            self._spent_s += self._clock.monotonic_s() - began_s
        if is_read:
            self._end()
        return is_read

    def settle(self) -> None:
        """Note what has been applied since."""
        while self._open and all(work.is_done for work in self._open[0][1]):
            as_of_ms, _ = self._open.popleft()
            if as_of_ms is not None:
                self.equal_as_of_ms = as_of_ms

    def _begin(self) -> None:
        self._began_ms = self._clock.now_ms()
        self._spent_s = 0.0
        self._works, self._read_key = [], ""
        self._joined = self._keys("")

    def _end(self) -> None:
        """Note what this round proves, once all that it found is applied."""
        as_of_ms: int | None = self._began_ms
        if self._reads_properties:
            self._cycle.append(self._began_ms)
            is_whole = len(self._cycle) == self._slices
            # A tag may have been set just after its key was read in this cycle.
            as_of_ms = self._cycle[0] if is_whole else None
            self._adapt()
        self._open.append((as_of_ms, self._works))
        self._joined = None
        self._round += 1
        self.settle()

    def _adapt(self) -> None:
        """Read the properties of fewer keys a round where that takes too long, or of
        more where there is time.
        """
        share, before = self._spent_s / self._interval_s, self._slices
        if share > _READING_SHARE_MAX:
            self._slices = min(2 * self._slices, _SLICES_MAX)
        elif share < _READING_SHARE_MAX / 4:
            self._slices = max(self._slices // 2, 1)
        if self._slices != before:
            self._cycle = deque(maxlen=self._slices)

    def _advance(self) -> bool:
        assert self._joined is not None
        for _ in range(_KEYS_AT_ONCE):
            while len(self._reads) >= _READS_MAX:
                self._compare_properties()
            if self._waiting >= _WAITING_MAX:
                return False
            joined = next(self._joined, None)
            if joined is None:
                while self._reads:
                    self._compare_properties()
                return True
            self._take(joined)
            self._read_key = joined.key
        return False

    @property
    def _waiting(self) -> int:
        return len(self._workers.schedule) - self._workers.held

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

    def _take(self, joined: JoinedKey) -> None:
        key, facts, row = joined.key, joined.source, joined.row
        if facts is None:
            # Whether the source has it is asked before anything is deleted.
            if self._may_delete:
                self._touch(Change(0, key, "", ChangeKind.DELETE))
            return
        if row is None or not row.properties or not row.source.agrees(facts):
            is_written = row is None or not row.source.agrees(facts)
            # Of tags and deletes no listing tells when they were made.
            time_ms = facts.modified_ms if is_written else 0
            self._touch(Change(0, key, "", ChangeKind.PUT, facts=facts, time_ms=time_ms))
            return
        self._found.pop(key, None)
        if self._reads_properties and self._is_in_slice(key):
            self._reads.append((facts, row, self._tools.readers.submit(self._digest, facts)))

    def _is_in_slice(self, key: str) -> bool:
        return zlib.crc32(key.encode()) % self._slices == self._round % self._slices

    def _digest(self, facts: ObjectFacts) -> bytes | None:
        """Of the properties; None where it is another object by now, or none: the next
        round finds that.
        """
        if self._tools.is_stopped():
            raise OperationInterruptedError("the round was interrupted")
        try:
            return self._tools.retried(
                lambda: self._crossing.digest(self._source.reader.properties_of(facts))
            )
        except (ObjectMissingError, PreconditionFailedError):
            return None

    def _compare_properties(self) -> None:
        facts, row, read = self._reads[0]
        try:
            digest = read.result()
        except BaseException:
            # The keys whose reads are under way are looked at again.
            self._reads.clear()
            self._read_key = _before(self._read_key, row.key)
            raise
        self._reads.popleft()
        if digest is not None and digest != row.properties:
            self._touch(Change(0, facts.key, "", ChangeKind.PUT, facts=facts))

    def _touch(self, change: Change) -> None:
        """Let a change be applied, unless the same was found before."""
        known = self._found.get(change.key)
        # What still waits is among the works of an earlier round, which ends first.
        # What had no effect is different with good reason.
        is_known = known is not None and _is_same(known.facts, change.facts)
        if known is not None and is_known and not (known.work.is_done and known.work.has_effect):
            return
        work = self._workers.schedule.touch(change, now_ms=self._clock.now_ms())
        self._works.append(work)
        self._found.pop(change.key, None)
        self._found[change.key] = _Found(change.facts, work)
        if len(self._found) > _SETTLED_MAX:
            del self._found[next(iter(self._found))]


def _is_same(ours: ObjectFacts | None, theirs: ObjectFacts | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return same_stamp(ours, theirs)


def _before(last: str, key: str) -> str:
    """A place in the listing at or before `last`, from which `key` is listed again."""
    return min(last, key[:-1])
