"""The two buckets of a demo's replication: local ones, or two of Apache Ozone."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from admin.bucket_pair import check_addresses
from admin.demo.replicated_writers import flip_bit
from merkle.errors import ReconcileError
from replicator.stores.address import OzoneAddress, canonical_address, parse_address
from replicator.stores.opening import open_store
from replicator.stores.port import Change, FeedPosition, ObjectProperties, Store, WriteCondition
from runtime.errors import UsageError

# Between two looks at a log.
_LOOK_S = 0.05
_DELETE_KEYS = 500
_ANYTHING = WriteCondition()


class ReplicatedPair(Protocol):
    """A source and a target, both empty at first."""

    source: Store
    target: Store
    damage_text: str
    """What `damage` does, in words."""
    pauses_for_damage: bool
    """Whether the replication's own comparisons would see it, and mend it at once."""

    def begin(self) -> None:
        """Changes count from now on."""
        ...

    def changes(self) -> tuple[Sequence[Change], Sequence[Change]]:
        """All that has happened to source and target since `begin`, with times of one
        clock.
        """
        ...

    def target_changes(self) -> int:
        """A number that grows with every change of the target."""
        ...

    def damage(self, key: str, body: bytes) -> str:
        """Damage an object of the target, whose bytes are `body`, behind the
        replication's back; the kind of difference that a verification has to find.
        """
        ...


class LocalPair:
    """See ReplicatedPair: buckets below a folder, whose logs tell times. A context
    manager that closes them.
    """

    damage_text = "a bit flipped at the target"
    pauses_for_damage = False

    def __init__(self, folder: Path) -> None:
        """Make both buckets."""
        self._folder, self._stack = folder, ExitStack()
        self.source, self.target = (
            self._stack.enter_context(
                open_store(f"local:{folder / side}", may_write=True, create=True)
            )
            for side in ("source", "target")
        )
        self._begun = tuple(_position(one) for one in (self.source, self.target))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def begin(self) -> None:
        """See ReplicatedPair."""
        self._begun = tuple(_position(one) for one in (self.source, self.target))

    def changes(self) -> tuple[Sequence[Change], Sequence[Change]]:
        """See ReplicatedPair."""
        ours, theirs = self._begun
        return _changes_after(self.source, ours), _changes_after(self.target, theirs)

    def target_changes(self) -> int:
        """See ReplicatedPair."""
        return _position(self.target).index

    def damage(self, key: str, body: bytes) -> str:
        """See ReplicatedPair. A bit flips on the disk, of which the store knows
        nothing.
        """
        del key
        flip_bit(self._folder / "target", body)
        return "damaged"


class OzonePair:
    """See ReplicatedPair: two buckets that exist and are empty. A context manager that
    empties them again.

    An OM's log tells no time of a delete. So threads follow both logs, and a change
    happened when this process saw it.
    """

    damage_text = "an object overwritten at the target by somebody else, while paused"
    pauses_for_damage = True

    def __init__(self, source: str, target: str) -> None:
        """Open both buckets.

        Raises:
            UsageError: an address is not one of Ozone, or its bucket is not empty.
            PairRefusedError: both are one bucket.
            ConfigError: there are no credentials.
            StoreError: there is no such bucket, or it did not answer.
        """
        addresses = [canonical_address(one) for one in (source, target)]
        for address in addresses:
            if not isinstance(parse_address(address), OzoneAddress):
                raise UsageError(
                    f"{address!r} is not the address of a bucket of Ozone",
                    hint="Write it as ozone://OM:8981/VOLUME/BUCKET?s3=http://GATEWAY:9878.",
                )
        check_addresses(*addresses)
        with ExitStack() as opened:
            self.source, self.target = (
                opened.enter_context(open_store(one, may_write=True)) for one in addresses
            )
            for store in (self.source, self.target):
                if next(iter(store.lister.list_objects("")), None) is not None:
                    raise UsageError(
                        f"{store.address} is not empty",
                        hint="Make two buckets for the demo, which empties them at its end.",
                    )
            self._logs = tuple(
                opened.enter_context(_FollowedLog(one)) for one in (self.source, self.target)
            )
            self._stack = opened.pop_all()
        self._begun = 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            for store in (self.source, self.target):
                _empty(store)

    def begin(self) -> None:
        """See ReplicatedPair."""
        for log in self._logs:
            log.catch_up()
        ours, theirs = self._logs
        self._begun = len(ours.changes), len(theirs.changes)

    def changes(self) -> tuple[Sequence[Change], Sequence[Change]]:
        """See ReplicatedPair."""
        for log in self._logs:
            log.catch_up()
        ours, theirs = self._logs
        return ours.changes[self._begun[0] :], theirs.changes[self._begun[1] :]

    def target_changes(self) -> int:
        """See ReplicatedPair."""
        return len(self._logs[1].changes)

    def damage(self, key: str, body: bytes) -> str:
        """See ReplicatedPair. Somebody else writes other bytes there, as many."""
        other = bytes([body[0] ^ 1]) + body[1:]
        self.target.writer.put(key, other, ObjectProperties(), _ANYTHING)
        return "changed"


class _FollowedLog:
    """The changes of a store from now on, each with the time at which it was seen; a
    context manager that follows its log in a thread.
    """

    def __init__(self, store: Store) -> None:
        assert store.feed is not None
        self._feed = store.feed
        self._at = self._feed.position()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "log")
        self._running: Future[None] | None = None
        self.changes = list[Change]()

    def __enter__(self) -> Self:
        self._running = self._pool.submit(self._follow)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()

    def catch_up(self) -> None:
        """Read all that the log has now.

        Raises:
            StoreError: it cannot be read, or its thread has failed.
        """
        if self._running is not None and self._running.done():
            self._running.result()
        with self._lock:
            while (batch := self._feed.read(self._at)).position != self._at:
                seen_ms = time.time_ns() // 1_000_000
                self.changes += (replace(one, time_ms=seen_ms) for one in batch.changes)
                self._at = batch.position

    def _follow(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.catch_up()


def _position(store: Store) -> FeedPosition:
    assert store.feed is not None
    return store.feed.position()


def _changes_after(store: Store, position: FeedPosition) -> list[Change]:
    assert store.feed is not None
    found = list[Change]()
    while (batch := store.feed.read(position)).changes:
        found += batch.changes
        position = batch.position
    return found


def _empty(store: Store) -> None:
    """Delete all that a bucket has, as far as it answers."""
    with suppress(ReconcileError):
        keys = [one.key for one in store.lister.list_objects("")]
        for first in range(0, len(keys), _DELETE_KEYS):
            store.writer.delete(keys[first : first + _DELETE_KEYS])
