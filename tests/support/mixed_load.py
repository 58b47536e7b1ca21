"""Writers that do everything to a bucket at random, and what a bucket was after each
change by its own log.

Every object that is written has a size of its own, so that a size says which write
made it. A history is the sizes that a key had, None for no object.
"""

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from types import TracebackType
from typing import Self

from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout
from replicator.stores.port import Change, ChangeKind, ObjectProperties, Store
from tests.support.stores import ANYTHING, current

History = list[int | None]
_PART_BYTES = 5 << 20
_KEYS, _FOLDERS = 12, 4
_NOTHING = ObjectProperties()
_LOOK_S = 0.2


class MixedLoad:
    """Writers that put, overwrite, delete, rename, tag and upload in parts, each below
    a folder of its own; where names are paths they rename folders, too. A context
    manager that ends them.
    """

    def __init__(
        self, store: Store, manager: ManagerClient, place: tuple[str, str], *, seed: int
    ) -> None:
        """`place` is volume and bucket of the store."""
        self._store, self._manager, self._place, self._seed = store, manager, place, seed
        self._is_tree = manager.bucket(*place).layout is BucketLayout.FILE_SYSTEM_OPTIMIZED
        self._sizes = count(1)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(thread_name_prefix="load")
        self._running = list[Future[None]]()
        self.held = dict[str, int]()
        self.histories = defaultdict[str, History](list)
        # By size: each writes an object that is there already once more.
        self.tagged = Counter[int]()
        self.done = Counter[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()

    def start(self, writers: int, *, pause_s: float) -> None:
        """Write until `end`."""
        for number in range(writers):
            self._running.append(self._pool.submit(self._write, number, pause_s))

    def end(self) -> None:
        """Write no more; a write that failed is raised."""
        self._stop.set()
        for one in self._running:
            one.result()

    def _write(self, number: int, pause_s: float) -> None:
        chance = random.Random(self._seed * 1_000 + number)
        folders = [f"w{number}/{one}" for one in range(_FOLDERS)]
        while not self._stop.wait(pause_s):
            at = chance.randrange(_FOLDERS)
            key = f"{folders[at]}/{chance.randrange(_KEYS)}"
            draw = chance.random()
            if draw < 0.02:
                self._put_in_parts(key, chance)
            elif draw < 0.55 or key not in self.held:
                self._put(key, chance)
            elif draw < 0.70:
                self._delete(key)
            elif draw < 0.80:
                self._rename(key, f"{folders[at]}/renamed-{chance.randrange(_KEYS)}")
            elif draw < 0.95 or not self._is_tree:
                self._tag(key, chance)
            else:
                folders[at] = self._rename_folder(folders[at], f"w{number}/{next(self._sizes)}")

    def _becomes(self, key: str, size: int | None) -> None:
        """Note what a key is about to be."""
        self.histories[key].append(size)
        if size is None:
            self.held.pop(key, None)
        else:
            self.held[key] = size

    def _put(self, key: str, chance: random.Random) -> None:
        size = next(self._sizes)
        self._becomes(key, size)
        given = ObjectProperties(metadata=(("size", str(size)),))
        self._store.writer.put(key, chance.randbytes(size), given, ANYTHING)
        self.done["put"] += 1

    def _put_in_parts(self, key: str, chance: random.Random) -> None:
        size = _PART_BYTES + next(self._sizes)
        self._becomes(key, size)
        writer, body = self._store.upload_writer, chance.randbytes(size)
        upload = writer.begin(key, _NOTHING)
        pieces = body[:_PART_BYTES], body[_PART_BYTES:]
        parts = [writer.write_part(key, upload, at, one) for at, one in enumerate(pieces, 1)]
        writer.complete(key, upload, parts, _NOTHING, ANYTHING)
        self.done["multipart"] += 1

    def _delete(self, key: str) -> None:
        self._becomes(key, None)
        assert self._store.writer.delete([key]) == []
        self.done["delete"] += 1

    def _tag(self, key: str, chance: random.Random) -> None:
        self.tagged[self.held[key]] += 1
        tags = ObjectProperties(tags=(("tag", str(chance.randrange(1_000))),))
        self._store.writer.put_properties(current(self._store, key), tags, tags_only=True)
        self.done["tag"] += 1

    def _rename(self, key: str, name: str) -> None:
        if name in self.held:
            return
        self._becomes(name, self.held[key])
        self._becomes(key, None)
        assert self._store.renamer is not None
        self._store.renamer.rename(current(self._store, key), name)
        self.done["rename"] += 1

    def _rename_folder(self, old: str, new: str) -> str:
        for key in [key for key in self.held if key.startswith(f"{old}/")]:
            self._becomes(new + key.removeprefix(old), self.held[key])
            self._becomes(key, None)
        self._manager.rename_key(*self._place, old, new)
        self.done["rename of a folder"] += 1
        return new


class BucketWatch:
    """Follows the log of a bucket in a thread, and keeps the history of each key; a
    context manager. The log of an OM is kept for minutes only.
    """

    def __init__(self, store: Store) -> None:
        """Prepare; what is there already is held as it is."""
        assert store.feed is not None
        self._feed = store.feed
        self._at = self._feed.position()
        self.held = {one.key: one.size_bytes for one in store.lister.list_objects("")}
        self.histories = defaultdict[str, History](list)
        # By size: what was put where it was already, and when.
        self.repeated = defaultdict[int, list[int]](list)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "history")
        self._running: Future[None] | None = None

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

    def end(self) -> None:
        """Read the log to its end; an error of the thread is raised."""
        self._stop.set()
        assert self._running is not None
        self._running.result()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_LOOK_S)
            while (batch := self._feed.read(self._at)).position != self._at:
                self._at = batch.position
                for change in batch.changes:
                    self._take(change)

    def _take(self, change: Change) -> None:
        match change.kind:
            case ChangeKind.PUT:
                assert change.facts is not None
                size = change.facts.size_bytes
                if self.held.get(change.key) == size:
                    self.repeated[size].append(change.time_ms)
                self._becomes(change.key, size)
            case ChangeKind.DELETE:
                self._becomes(change.key, None)
            case ChangeKind.RENAME:
                self._move(change.previous_key, change.key)
            case ChangeKind.DELETE_PREFIX:
                for key in [key for key in self.held if key.startswith(change.key)]:
                    self._becomes(key, None)
            case ChangeKind.RENAME_PREFIX:
                for key in [key for key in self.held if key.startswith(change.previous_key)]:
                    self._move(key, change.key + key.removeprefix(change.previous_key))

    def _move(self, key: str, name: str) -> None:
        size = self.held.get(key)
        if size is not None:
            self._becomes(name, size)
            self._becomes(key, None)

    def _becomes(self, key: str, size: int | None) -> None:
        self.histories[key].append(size)
        if size is None:
            self.held.pop(key, None)
        else:
            self.held[key] = size


def check_order(source: Mapping[str, History], target: Mapping[str, History]) -> None:
    """What a key of the target was after each change, the source's key was, in this
    order: nothing old came after what was newer.
    """
    for key, states in target.items():
        known, at = [None, *source.get(key, [])], 0
        for state in states:
            assert state in known[at:], f"{key} went back to {state}: {states} of {known}"
            at += known[at:].index(state)


def written_again(load: MixedLoad, watch: BucketWatch) -> dict[int, list[int]]:
    """Objects that were put where they were already more often than changes of their
    tags explain: by size, the times of these writes in ms since the epoch.
    """
    return {size: times for size, times in watch.repeated.items() if len(times) > load.tagged[size]}
