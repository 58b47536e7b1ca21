"""Reads the log of a source and queues its changes, whatever is done with them.

It runs beside the work, so that reading goes on while a large object is sent (OZ-083),
and stops reading when the queue is full: a change is never dropped.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from merkle.errors import ReconcileError
from replicator.stores.errors import FeedGapError
from replicator.stores.port import ChangeBatch, ChangeFeed, FeedPosition
from replicator.syncer.lease import Lease
from replicator.syncer.prefixes import change_within
from replicator.syncer.queue import ChangeQueue, QueuedChange
from runtime.rate_limit import Clock

# How soon a change is seen (OZ-090), and what asking costs the source. Where nothing
# has changed for a while it is asked less often: a change still comes within a second.
_POLL_S = 0.2
_QUIET_POLL_S = 0.5
_QUIET_AFTER_S = 10.0
# A link that is back is used soon.
_FAILED_WAIT_MAX_S = 5.0
# Beyond it "many changed" is all that a proof needs to know.
_NOTED_KEYS_MAX = 100_000


class ChangeCapture:
    """Fills the queue of one replication. `poll` belongs to one thread, the rest to
    another.
    """

    def __init__(self, feed: ChangeFeed, queue: ChangeQueue, lease: Lease, clock: Clock) -> None:
        self._feed = feed
        self._queue = queue
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()
        self._is_on = False
        self._noted: set[str] | None = None
        self._failures = 0
        self.prefixes: tuple[str, ...] = ()
        """Changes elsewhere are not queued."""
        self.entries_max = 1
        self.has_gap = False
        """Changes are missing: nothing is read until `begin`."""
        self.error: ReconcileError | None = None
        """Why the last reading failed."""
        self.duplicates = 0
        self.newest_index = 0
        self.caught_up_ms: int | None = None
        """Every change before this time is queued."""
        # Changes up to here may have been applied before, by another syncer too.
        self._known_through: int | None = None
        self._changed_s = clock.monotonic_s()
        self.polls = 0
        """How many readings have come to an end."""

    def position(self) -> FeedPosition:
        """The log's newest position.

        Raises:
            StoreError: the source did not say.
        """
        return self._feed.position()

    def begin(self, position: FeedPosition) -> None:
        """Queue what follows a position.

        Raises:
            QueueDamagedError: the queue cannot be read.
            DiskError: it cannot be written.
        """
        with self._lock:
            self._queue.begin(position)
            self._is_on, self.has_gap, self.error = True, False, None
            self._changed_s = self._clock.monotonic_s()
            self.caught_up_ms = self._known_through = None

    def end(self) -> None:
        """Queue nothing any more, and drop what is queued.

        Raises:
            DiskError: a file cannot be removed.
        """
        with self._lock:
            self._is_on, self.has_gap = False, False
            self.caught_up_ms = None
            self._queue.clear()

    def settled_facts(self, queued: QueuedChange) -> QueuedChange:
        """The change, without facts if it may be applied for a second time: the target
        may have a later state by now, and what counts is what the source has.
        """
        known, change = self._known_through, queued.change
        if known is not None and change.index > known:
            return queued
        return replace(queued, change=replace(change, facts=None))

    def note_keys(self) -> None:
        """Remember which keys are queued from now on."""
        with self._lock:
            self._noted = set()

    def noted(self) -> set[str] | None:
        """The keys and prefixes since `note_keys`; None where they are too many."""
        with self._lock:
            return set(self._noted) if self._noted is not None else None

    def poll(self, *, wake: Callable[[], None]) -> float:
        """Read the log once; `wake` is called where something was queued. Returns the
        seconds until the next reading.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: the queue cannot be written.
        """
        with self._lock:
            after, is_on = self._queue.position, self._is_on and not self.has_gap
        if not is_on or after is None:
            return _POLL_S
        began_ms = self._clock.now_ms()
        try:
            batch = self._feed.read(after)
        except FeedGapError as error:
            with self._lock:
                self.has_gap, self.error = True, error
            wake()
            return _POLL_S
        except ReconcileError as error:
            if not error.retryable:
                raise
            self.error = error
            self._failures += 1
            return min(_POLL_S * 2.0 ** min(self._failures, 10), _FAILED_WAIT_MAX_S)
        self._lease.check()
        self._failures = 0
        with self._lock:
            if not self._is_on or self._queue.position != after:
                return 0.0
            wait_s = self._take(batch, began_ms)
        wake()
        return wait_s

    def _take(self, batch: ChangeBatch, began_ms: int) -> float:
        known = self._queue.position
        assert known is not None
        ours = (change_within(one, self.prefixes) for one in batch.changes)
        kept = tuple(one for one in ours if one is not None)
        if kept:
            self._changed_s = self._clock.monotonic_s()
        result = self._queue.append(
            ChangeBatch(kept, batch.position, batch.newest_index), entries_max=self.entries_max
        )
        self.duplicates += result.duplicates
        self.newest_index, self.error = batch.newest_index, None
        if self._known_through is None:
            self._known_through = batch.newest_index
        if self._noted is not None:
            names = (name for one in kept for name in (one.key, one.previous_key) if name)
            self._noted.update(names)
            if len(self._noted) > _NOTED_KEYS_MAX:
                self._noted = None
        self.polls += 1
        if result.is_full:
            return _POLL_S
        if batch.position.index >= batch.newest_index or batch.position == known:
            self.caught_up_ms = began_ms - batch.delay_ms
            return _poll_s(self._clock.monotonic_s() - self._changed_s)
        return 0.0


def _poll_s(quiet_s: float) -> float:
    """When to read again a log that has had no change of ours for so long."""
    return _POLL_S if quiet_s < _QUIET_AFTER_S else _QUIET_POLL_S
