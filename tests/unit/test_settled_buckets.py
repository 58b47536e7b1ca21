"""What a bucket held when a refresh began is known if nothing moved until its end."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from proof.item import HashAlgorithm, Profile
from proof.root import SetRoot
from proof.snapshot import StoredSnapshot
from proof.stored_index import StoredIndex
from replicator.refresh import READ_ALL_S, IndexedBucket, groups_of
from replicator.stores.port import ObjectProperties
from runtime.disk import Disk
from runtime.rate_limit import SystemClock
from tests.support.bucket_sync import InlineExecutor
from tests.support.memory_store import MEMORY, MemoryStore, StoreFaults
from tests.support.stored_indexes import openers_of
from tests.support.verifiers import root_of


class Settling:
    """A bucket that is refreshed while others write to it."""

    def __init__(self, folder: Path, stack: ExitStack, kind: type[StoredIndex]) -> None:
        self.store = MemoryStore("memory:a", MEMORY)
        profile = Profile(b"s" * 32, HashAlgorithm.MD5, groups_of(MEMORY))
        index = kind(folder, profile, disk=Disk(), openers=openers_of("memory"))
        stack.callback(index.close)
        store, clock = self.store.store(), SystemClock()
        self.bucket = IndexedBucket(store, index, profile, clock, new_executor=InlineExecutor)

    def refreshed(self, prefix: str = "") -> SetRoot | None:
        """What is known of the moment at which a refresh began."""
        start = self.bucket.start()
        self.bucket.refresher(lambda: False).refresh(prefix=prefix)
        return self.bucket.settled_root(start, prefix)

    def once(self, operation: str, change: object) -> None:
        """Let others do something after the next operation of this name."""
        assert callable(change)

        def after(name: str, _key: str) -> None:
            if name == operation:
                self.store.faults = StoreFaults()
                change()

        self.store.faults = StoreFaults(after=after)


@pytest.fixture
def settling(tmp_path: Path) -> Iterator[Settling]:
    with ExitStack() as stack:
        made = Settling(tmp_path / "index", stack, StoredIndex)
        for key in ("a", "b", "c", "d", "e"):
            made.store.write(key, key.encode())
        yield made


def test_a_bucket_is_settled_once_a_refresh_finds_what_the_index_has(settling: Settling) -> None:
    assert settling.refreshed() is None
    assert settling.refreshed() == root_of(settling.bucket.index)
    assert settling.refreshed("b") is not None
    assert settling.refreshed("x") == SetRoot(0, 0)


def make(change: str, store: MemoryStore) -> None:
    """Change one object."""
    match change:
        case "write":
            store.write("b", b"other")
        case "same bytes":
            store.write("b", b"b")
        case "properties":
            store.touch("b", ObjectProperties(tags=(("team", "red"),)))
        case "delete":
            store.remove("b")
        case "new":
            store.write("f", b"f")
        case "damage":
            store.objects["b"] = replace(store.objects["b"], body=b"B")


@pytest.mark.parametrize("change", ["write", "same bytes", "properties", "delete", "new"])
def test_what_moved_since_the_refresh_before_unsettles(settling: Settling, change: str) -> None:
    settling.refreshed()
    make(change, settling.store)
    assert settling.refreshed() is None
    assert settling.refreshed() == root_of(settling.bucket.index)


def test_what_changes_back_while_it_is_listed_unsettles(settling: Settling) -> None:
    """The first page has `b` as it was; it was another one meanwhile."""
    settling.refreshed()
    settling.store.write("b", b"other")
    settling.once("list", lambda: settling.store.write("b", b"b"))
    assert settling.refreshed() is None


def test_an_object_that_changes_under_every_look_unsettles(settling: Settling) -> None:
    settling.refreshed()
    settling.store.write("b", b"0")
    looks = iter(range(1, 100))

    def before(name: str, key: str) -> None:
        if (name, key) == ("properties", "b"):
            settling.store.write("b", str(next(looks)).encode())

    settling.store.faults = StoreFaults(before=before)
    before = settling.bucket.index.row("b")
    assert settling.refreshed() is None
    # The index has nothing better to say, and nobody calls that settled.
    assert settling.bucket.index.row("b") == before
    settling.store.faults = StoreFaults()
    assert settling.refreshed() is None
    assert settling.refreshed() is not None


def test_what_others_write_to_the_index_meanwhile_unsettles_its_prefix(
    settling: Settling,
) -> None:
    settling.refreshed()
    index = settling.bucket.index
    row = index.row("d")
    settling.once("list", lambda: index.apply([("d", None)]))
    start = settling.bucket.start()
    assert settling.refreshed() is None
    index.apply([("d", row)])
    settling.refreshed()
    start = settling.bucket.start()
    settling.bucket.refresher(lambda: False).refresh(prefix="a")
    index.apply([("d", None)])
    assert settling.bucket.settled_root(start, "a") is not None
    assert settling.bucket.settled_root(start, "") is None


def test_a_move_that_another_refresh_has_noted_unsettles(settling: Settling) -> None:
    """A scrub finds a new stamp and the same item: the journal does not show it."""
    settling.refreshed()
    start = settling.bucket.start()
    settling.store.write("b", b"b")
    settling.bucket.refresher(lambda: False).refresh()
    settling.bucket.refresher(lambda: False).refresh()
    assert settling.bucket.settled_root(start) is None


@pytest.mark.parametrize("change", ["write", "same bytes", "properties", "delete", "new", "damage"])
def test_every_object_that_was_another_one_counts_as_a_move(
    settling: Settling, change: str
) -> None:
    settling.refreshed()
    before = settling.bucket.moves.moves
    make(change, settling.store)
    settling.bucket.refresher(lambda: False).refresh(read_since_s=READ_ALL_S)
    assert settling.bucket.moves.moves == before + 1


@pytest.mark.parametrize("others", [0, 20_000, 20_001])
def test_more_changes_by_others_than_are_looked_through_unsettle(
    settling: Settling, others: int
) -> None:
    settling.refreshed()
    index = settling.bucket.index
    row = index.row("d")
    assert row is not None
    start = settling.bucket.start()
    settling.bucket.refresher(lambda: False).refresh(prefix="a")
    index.apply(
        [
            (key, replace(row, item=replace(row.item, key=key)))
            for key in map("z{}".format, range(others))
        ]
    )
    assert (settling.bucket.settled_root(start, "a") is None) == (others > 20_000)


def test_changes_that_the_journal_does_not_keep_unsettle(settling: Settling) -> None:
    settling.refreshed()
    index = settling.bucket.index
    start = settling.bucket.start()
    settling.bucket.refresher(lambda: False).refresh(prefix="a")
    index.apply([("d", None)])
    with index.snapshot() as snapshot:
        index.trim_journal(through=snapshot.position)
    assert settling.bucket.settled_root(start, "a") is None


class BusyIndex(StoredIndex):
    """Another refresh finds a move whenever somebody looks at it."""

    move: Callable[[], None] = staticmethod(lambda: None)

    def snapshot(self) -> AbstractContextManager[StoredSnapshot]:
        """See StoredIndex."""
        self.move()
        return super().snapshot()


def test_a_move_while_a_start_is_noted_unsettles(tmp_path: Path) -> None:
    with ExitStack() as stack:
        settling = Settling(tmp_path / "index", stack, BusyIndex)
        settling.refreshed()
        index = settling.bucket.index
        assert isinstance(index, BusyIndex)
        index.move = settling.bucket.moves.add
        start = settling.bucket.start()
        index.move = lambda: None
        settling.bucket.refresher(lambda: False).refresh()
        assert settling.bucket.settled_root(start) is None
