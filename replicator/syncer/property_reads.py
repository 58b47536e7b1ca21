"""Reads the properties of all keys of the ledger, one after the other, for ever.

A listing of S3 shows no change of tags. So each object is asked for its properties, as
far as time allows, beside the rounds that list: neither waits for the other. What is
another object by now, or gone, is looked at: the last round may have been before that.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from replicator.ledger import LedgerRow
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.phase import SyncPhase, Tools
from replicator.syncer.schedule import SettledTimes, Work
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock

# The share of all time in which reads are under way, and what of it may be saved up.
_SHARE = 0.25
_SAVED_S_MAX = 0.5
# Reads at a time, and while changes wait: those come first, but do not stop the reads.
READS_MAX = 16
_READS_BESIDE = 1
# What was copied without its ACL is read once nothing has waited for so long: between
# two objects of a burst it would take from the next one what it had spared the last.
_CALM_S = 1.0
# Reads begun before others get their turn.
_READS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _Read:
    """A read that is under way of a row; `is_assumed`: it comes before its turn."""

    row: LedgerRow
    digest: Future[bytes | None]
    is_assumed: bool


class PropertyReads:
    """The reads of one phase. All methods belong to one thread."""

    def __init__(
        self,
        tools: Tools,
        phase: SyncPhase,
        clock: Clock,
        *,
        prefixes: tuple[str, ...],
        interval_s: float,
        touch: Callable[[Change], Work | None],
        waiting: Callable[[str], Work | None],
    ) -> None:
        """Nothing is read yet. `touch` lets a change be applied, and returns what does
        it, and `waiting` what is about to be applied of a key. A key is read once in
        `interval_s`, or less often.
        """
        self._tools = tools
        self._phase = phase
        self._clock = clock
        self._prefixes = prefixes
        self._interval_s = interval_s
        self._touch, self._waiting = touch, waiting
        self._rows: Iterator[LedgerRow] | None = None
        self._reads = deque[_Read]()
        self._acls = phase.acls
        if self._acls is not None:
            self._acls.is_watched = True
        self._compared_key = ""
        self._began_s: float | None = None
        self._began_ms = 0
        self._works = deque[Work]()
        self._is_reading = False
        self._noted_s = self._beside_s = clock.monotonic_s()
        self._left_s = 0.0
        self.settled = SettledTimes()
        """Of the properties: what each cycle proves."""

    def advance(self, *, is_beside: bool) -> bool:
        """Compare what was read, and read on as time allows; whether there was
        something to do. `is_beside` says that changes wait to be applied.

        Raises:
            StoreError: the source did not answer; call it again to go on.
            DatabaseError: the ledger cannot be read.
            OperationInterruptedError: it is interrupted.
        """
        compared = self._compare()
        if not self._is_reading:
            now_s = self._clock.monotonic_s()
            if self._began_s is not None and now_s - self._began_s < self._interval_s:
                return compared > 0
            self._begin(now_s)
        if is_beside:
            self._beside_s = self._clock.monotonic_s()
        is_calm = self._clock.monotonic_s() - self._beside_s >= _CALM_S
        most = _READS_BESIDE if is_beside else READS_MAX
        for _ in range(_READS_AT_ONCE):
            self._note_time()
            if len(self._reads) >= most:
                break
            if is_calm and (assumed := self._next_assumed()) is not None:
                self._read(assumed, is_assumed=True)
                continue
            if self._rows is None or self._left_s < 0:
                break
            row = next(self._rows, None)
            if row is None:
                self._rows = None
                break
            if row.properties:
                self._read(row)
                compared += self._compare()
        if self._rows is None and not self._reads:
            self._is_reading = False
            # A tag may have been set just after its key was read in this cycle.
            self.settled.add(self._began_ms, self._works)
        return compared > 0

    @property
    def oldest_assumed_ms(self) -> int | None:
        """When the oldest object was written whose ACL is still to be read."""
        return None if self._acls is None else self._acls.oldest_ms

    def _read(self, row: LedgerRow, *, is_assumed: bool = False) -> None:
        read = self._tools.property_readers.submit(self._digest, row)
        read.add_done_callback(lambda _: self._tools.wake())
        self._reads.append(_Read(row, read, is_assumed))

    def _next_assumed(self) -> LedgerRow | None:
        """An object that was copied without its ACL."""
        while self._acls is not None and (key := self._acls.next()) is not None:
            row = self._tools.ledger.row(key)
            # A row without a digest is applied in any case.
            is_other = self._acls.forget(key, row if row is None or row.properties else None)
            if row is not None and not is_other:
                return row
        return None

    def _begin(self, now_s: float) -> None:
        self._began_s, self._began_ms = now_s, self._clock.now_ms()
        self._is_reading, self._works = True, deque()
        self._compared_key, self._rows = "", self._rows_after("")

    def _rows_after(self, key: str) -> Iterator[LedgerRow]:
        for prefix in self._prefixes:
            after = key if key.startswith(prefix) else ""
            if after or key <= prefix:
                yield from self._tools.ledger.rows(prefix, start_after=after)

    def _note_time(self) -> None:
        """Time in which reads are under way is paid for by all time."""
        now_s = self._clock.monotonic_s()
        spent = now_s - self._noted_s
        self._noted_s = now_s
        self._left_s += _SHARE * spent - (spent if self._reads else 0.0)
        # What was copied without its ACL is read at any time, and soon.
        self._left_s = max(-_SAVED_S_MAX, min(self._left_s, _SAVED_S_MAX))

    def _digest(self, row: LedgerRow) -> bytes | None:
        """Of the properties of just this object, empty where it alone cannot be read;
        None where it is another one by now, or none.
        """
        tools, phase, facts = self._tools, self._phase, row.source.facts(row.key)
        if tools.is_stopped():
            raise OperationInterruptedError("the reading was interrupted")
        try:
            return tools.retried(
                lambda: phase.crossing.digest(phase.source.reader.properties_of(facts))
            )
        except (ObjectMissingError, PreconditionFailedError):
            return None
        except StoreError as error:
            if not tools.fails_alone(error):
                raise
            # Whoever applies it meets the same, and tries it again while others go on.
            return b""

    def _compare(self) -> int:
        """Compare what has come; how many keys that were."""
        count = 0
        while self._reads and self._reads[0].digest.done():
            self._note_time()
            row, read = self._reads[0].row, self._reads[0].digest
            try:
                digest = read.result()
            except BaseException:
                # The keys whose reads are under way are read again.
                self._reads.clear()
                self._rows = self._rows_after(self._compared_key)
                if self._acls is not None:
                    self._acls.give_back()
                raise
            if not self._reads.popleft().is_assumed:
                self._compared_key = row.key
            count += 1
            is_same, work = digest == row.properties, None
            if not is_same:
                change = Change(0, row.key, "", ChangeKind.PUT, facts=row.source.facts(row.key))
                if (work := self._touch(change)) is not None:
                    self._works.append(work)
            if self._acls is not None:
                settling = None if is_same else work or self._waiting(row.key)
                self._acls.settle(row, settling, is_default=is_same or digest is None)
        return count
