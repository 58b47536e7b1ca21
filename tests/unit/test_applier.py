"""Writes of a syncer at the target: what is refused, and what the index then says."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from proof.generations import OPENERS, StorageKind
from proof.item import HASHES_BYTES, HashAlgorithm, ItemHasher, ItemId, Profile
from proof.stored_index import StoredIndex
from proof.tables import ItemTables, TableBatch
from replicator.hashing import blake3_of
from replicator.refresh import IndexedBucket, groups_of
from replicator.stores.errors import (
    DigestMismatchError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from replicator.stores.local import LocalBucket
from replicator.stores.port import DeleteFailure, ObjectProperties, Store
from replicator.verifier.applier import Applier
from replicator.verifier.values import DeleteAnswer, PatchOrder, RangePatch, Write
from runtime.disk import Disk
from runtime.errors import DatabaseError, OperationInterruptedError, UsageError
from runtime.rate_limit import SystemClock
from tests.support.flawed_stores import CarelessWriter, without_conditions
from tests.support.stores import NOTHING, content, current, keys, put
from tests.support.verifiers import root_of

NEW = b"new"
LARGE = bytes(range(256)) * (40 << 10)


@dataclass
class Target:
    """A bucket, its index, and what writes both."""

    bucket: IndexedBucket
    applier: Applier

    @property
    def store(self) -> Store:
        """The store without flaws."""
        return self.bucket.store

    @property
    def index(self) -> StoredIndex:
        """The index of all."""
        return self.bucket.index

    def id(self, key: str) -> ItemId | None:
        """The ID of a key's item."""
        row = self.index.row(key)
        return ItemHasher(self.bucket.profile).id(row.item) if row else None

    def delete_id(self, key: str) -> bytes:
        """What a delete of a key's item names it by."""
        item_id = self.id(key)
        assert item_id is not None
        return item_id[:HASHES_BYTES]

    def write(self, *writes: Write) -> list[str]:
        """Apply a batch; the errors."""
        return [one.error for one in self.applier.apply(7, writes).results]

    def check(self) -> None:
        """The index is what a refresh would make of it."""
        root = root_of(self.index)
        self.bucket.refresher(lambda: False).refresh()
        assert root_of(self.index) == root


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        yield opened(stack, tmp_path)


def opened(stack: ExitStack, folder: Path, *, guards: bool = True) -> Target:
    """A target with three objects."""
    bucket = stack.enter_context(LocalBucket(folder / "bucket", Disk(), create=True))
    store = bucket.store()
    profile = Profile(b"s" * 32, HashAlgorithm.BLAKE3, groups_of(store.capabilities))
    index = StoredIndex(folder / "index", profile, disk=Disk())
    stack.callback(index.close)
    indexed = IndexedBucket(store, index, profile, SystemClock())
    for key in ("a", "b", "c"):
        put(store, key, key.encode())
    indexed.refresher(lambda: False).refresh()
    view = store if guards else without_conditions(store)
    applier = Applier(view, index, profile, writing=indexed.writing)
    stack.callback(applier.close)
    return Target(indexed, applier)


def body(key: str, replaced: ItemId | None, data: bytes = NEW) -> Write:
    return Write(key, data, NOTHING, blake3_of(data), replaced)


def test_a_batch_puts_and_changes_properties(target: Target) -> None:
    tags = ObjectProperties(tags=(("t", "1"),))
    result = target.applier.apply(
        3,
        [
            body("a", target.id("a")),
            Write("c", None, tags, b"", target.id("c")),
            body("d", None),
        ],
    )
    assert (result.number, [one.error for one in result.results]) == (3, [""] * 3)
    assert result.root == root_of(target.index)
    assert keys(target.store) == ["a", "b", "c", "d"]
    assert target.store.reader.properties("c") == tags
    assert content(target.store, current(target.store, "c")) == b"c"
    target.check()


def test_a_body_that_is_not_what_was_sent_is_not_written(target: Target) -> None:
    wrong = Write("a", NEW, NOTHING, blake3_of(b"other"), target.id("a"))
    assert target.write(wrong, body("d", None)) == [DigestMismatchError.code, ""]
    assert content(target.store, current(target.store, "a")) == b"a"
    target.check()


@pytest.mark.parametrize("change", ["put", "properties"])
def test_another_item_than_the_syncer_knows_is_left_alone(target: Target, change: str) -> None:
    for replaced in (target.id("b"), None):
        write = body("a", replaced)
        if change != "put":
            if replaced is None:
                continue
            write = Write("a", None, NOTHING, b"", replaced)
        assert target.write(write) == [PreconditionFailedError.code]
    assert target.write(body("new", target.id("b"))) == [PreconditionFailedError.code]
    assert content(target.store, current(target.store, "a")) == b"a"
    target.check()


@pytest.mark.parametrize("change", ["put", "properties"])
def test_an_object_that_changed_behind_the_index_is_left_alone(target: Target, change: str) -> None:
    known = target.id("a")
    put(target.store, "a", b"foreign")
    put(target.store, "d", b"foreign")
    write = body("a", known)
    if change != "put":
        write = Write("a", None, NOTHING, b"", known)
    assert target.write(write, body("d", None)) == [PreconditionFailedError.code] * 2
    assert content(target.store, current(target.store, "a")) == b"foreign"
    assert content(target.store, current(target.store, "d")) == b"foreign"


def test_deletes_name_items_and_leave_what_is_another_item_by_now(target: Target) -> None:
    """Row OZ-116: what is refused is told by its place, and the others are deleted."""
    a, b, c = (target.delete_id(key) for key in ("a", "b", "c"))
    # The index knows of one change, and of the other it does not.
    assert target.write(body("a", target.id("a"))) == [""]
    put(target.store, "b", b"foreign")
    result = target.applier.delete([a, b, c, b"no such item"])
    assert [(one.place, one.error) for one in result.refusals] == [
        (0, PreconditionFailedError.code),
        (1, PreconditionFailedError.code),
        (3, PreconditionFailedError.code),
    ]
    assert keys(target.store) == ["a", "b"]
    assert target.id("c") is None
    assert result.root == root_of(target.index)
    # Row OZ-115: it is gone already.
    assert [one.place for one in target.applier.delete([c]).refusals] == [0]
    assert target.applier.delete([]) == DeleteAnswer((), result.root)
    target.bucket.refresher(lambda: False).refresh()
    assert target.applier.delete([target.delete_id("a")]).refusals == ()
    target.check()


class Refusing(CarelessWriter):
    """Refuses to delete one key, or does not answer."""

    is_down = False

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        if self.is_down:
            raise StoreUnavailableError("503")
        super().delete([key for key in keys if key != "b"])
        return [DeleteFailure("b", "AccessDenied")]


def test_what_the_store_does_not_delete_stays_in_the_index(tmp_path: Path) -> None:
    with ExitStack() as stack:
        target = opened(stack, tmp_path)
        writer = Refusing(target.store)
        view = replace(target.store, writer=writer)
        applier = Applier(view, target.index, target.bucket.profile, writing=target.bucket.writing)
        stack.callback(applier.close)
        items = [target.delete_id(key) for key in ("a", "b", "c")]
        writer.is_down = True
        assert [one.error for one in applier.delete(items).refusals] == [
            StoreUnavailableError.code
        ] * 3
        target.check()
        writer.is_down = False
        (refusal,) = applier.delete(items).refusals
        assert (refusal.place, refusal.reason) == (1, "AccessDenied")
        assert keys(target.store) == ["b"]
        target.check()


def test_a_store_without_conditions_is_looked_at_before_each_write(tmp_path: Path) -> None:
    with ExitStack() as stack:
        target = opened(stack, tmp_path, guards=False)
        known = target.id("a")
        assert target.write(body("b", target.id("b")), body("e", None)) == ["", ""]
        put(target.store, "a", b"foreign")
        put(target.store, "d", b"foreign")
        found = target.write(body("a", known), body("d", None))
        assert found == [PreconditionFailedError.code] * 2
        order = PatchOrder("c", target.id("c") or ItemId(b""), 3, blake3_of(b"c++"), NOTHING)
        put(target.store, "c", b"x")
        with pytest.raises(PreconditionFailedError):
            target.applier.patch(order, [RangePatch(1, 0, b"++")], stopped=lambda: False)
        assert [content(target.store, one) for one in target.store.lister.list_objects("")] == [
            b"foreign",
            NEW,
            b"x",
            b"foreign",
            NEW,
        ]


def order(target: Target, key: str, result: bytes) -> PatchOrder:
    base = target.id(key)
    assert base is not None
    return PatchOrder(key, base, len(result), blake3_of(result), NOTHING)


@pytest.fixture
def patched(target: Target) -> Target:
    """The target with a large object."""
    put(target.store, "large", LARGE)
    target.bucket.refresher(lambda: False).refresh()
    return target


@pytest.mark.parametrize("key", ["a", "large"])
def test_patches_that_do_not_give_what_was_ordered_change_nothing(
    patched: Target, key: str
) -> None:
    before = current(patched.store, key)
    old = content(patched.store, before)
    for patches, result in (
        ([RangePatch(0, 1, b"X")], old),
        ([RangePatch(0, 1, b"X")], b"Y" + old[1:]),
        ([RangePatch(0, 1, b"")], b"X" + old[1:]),
    ):
        with pytest.raises(DigestMismatchError):
            patched.applier.patch(order(patched, key, result), patches, stopped=lambda: False)
    for patches in (
        [RangePatch(len(old), 1, b"X")],
        [RangePatch(len(old) + 1, 0, b"X")],
        [RangePatch(1, 0, b"X"), RangePatch(0, 1, b"X")],
        [RangePatch(0, 1 << 50, b"")],
        [RangePatch(0, 0, b"more than ordered")],
    ):
        with pytest.raises(UsageError):
            patched.applier.patch(order(patched, key, old), patches, stopped=lambda: False)
    assert current(patched.store, key) == before
    assert list(patched.store.upload_reader.uploads("")) == []
    patched.check()


@pytest.mark.parametrize("key", ["a", "large"])
def test_a_patch_of_another_item_changes_nothing(patched: Target, key: str) -> None:
    old = content(patched.store, current(patched.store, key))
    known = order(patched, key, b"X" + old)
    wrong = replace(known, base=patched.id("b") or ItemId(b""))
    patches = [RangePatch(0, 0, b"X")]
    with pytest.raises(PreconditionFailedError):
        patched.applier.patch(wrong, patches, stopped=lambda: False)
    put(patched.store, key, b"foreign")
    with pytest.raises(PreconditionFailedError):
        patched.applier.patch(known, patches, stopped=lambda: False)
    assert content(patched.store, current(patched.store, key)) == b"foreign"


def test_a_write_during_a_patch_wins(patched: Target) -> None:
    """Another syncer's batch arrives while the parts of the result are written."""
    known = order(patched, "large", b"X" + LARGE)
    is_written = False

    def stopped() -> bool:
        nonlocal is_written
        if not is_written:
            is_written = True
            assert patched.write(body("large", patched.id("large"))) == [""]
        return False

    with pytest.raises(PreconditionFailedError):
        patched.applier.patch(known, [RangePatch(0, 0, b"X")], stopped=stopped)
    assert content(patched.store, current(patched.store, "large")) == NEW
    assert list(patched.store.upload_reader.uploads("")) == []
    patched.check()


def test_a_patch_that_is_stopped_changes_nothing(patched: Target) -> None:
    with pytest.raises(OperationInterruptedError):
        patched.applier.patch(
            order(patched, "large", b"X" + LARGE), [RangePatch(0, 0, b"X")], stopped=lambda: True
        )
    assert current(patched.store, "large").size_bytes == len(LARGE)
    patched.check()


class FailingTables:
    """ItemTables that fail to write."""

    def __init__(self, tables: ItemTables) -> None:
        self._tables = tables
        self.fails = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._tables, name)

    def write(self, batch: TableBatch) -> None:
        """See ItemTables."""
        if self.fails:
            raise DatabaseError("the disk is full")
        self._tables.write(batch)


def test_writes_that_the_index_could_not_note_are_found_by_the_next_refresh(
    tmp_path: Path,
) -> None:
    made = list[FailingTables]()

    def opener(path: Path, building: bool) -> FailingTables:
        made.append(FailingTables(OPENERS[StorageKind.SQLITE](path, building)))
        return made[-1]

    with ExitStack() as stack:
        target = opened(stack, tmp_path)
        target.index.close()
        profile = target.bucket.profile
        failing = StoredIndex(
            tmp_path / "index",
            profile,
            disk=Disk(),
            openers={StorageKind.SQLITE: opener},
        )
        stack.callback(failing.close)
        applier = Applier(target.store, failing, profile, writing=target.bucket.writing)
        stack.callback(applier.close)
        made[-1].fails = True
        known = target_id(failing, profile, "a")
        with pytest.raises(DatabaseError):
            applier.apply(0, [body("a", known), body("d", None)])
        # What it holds is unknown until it is opened again: no other write is taken.
        made[-1].fails = False
        with pytest.raises(DatabaseError):
            applier.apply(0, [body("e", None)])
        assert content(target.store, current(target.store, "a")) == NEW
        failing.close()
        again = StoredIndex(tmp_path / "index", profile, disk=Disk())
        stack.callback(again.close)
        bucket = IndexedBucket(target.store, again, profile, SystemClock())
        progress = bucket.refresher(lambda: False).refresh()
        assert (progress.added, progress.changed) == (1, 1)
        assert [row.item.key for row in again.rows(start_after="", limit=9)] == keys(target.store)


def target_id(index: StoredIndex, profile: Profile, key: str) -> ItemId:
    row = index.row(key)
    assert row is not None
    return ItemHasher(profile).id(row.item)
