"""A key that fails holds up the folder that it lies in as little as other keys do, when
that is renamed or deleted as a whole: all others go on, and it is named by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.replication import Condition
from replicator.stores.errors import StoreError, StoreUnavailableError
from tests.support.memory_store import MemoryStore
from tests.support.replications import Replication, held

REFUSED, SILENT = StoreError("refused"), StoreUnavailableError("503")
ERRORS = pytest.mark.parametrize("error", [REFUSED, SILENT], ids=["refused", "silent"])


def live(folder: Path, *, renames: bool = True) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication that follows a log, with a folder of five objects."""
    source = MemoryStore("memory:a", has_feed=True)
    target = MemoryStore("memory:b", renames=renames)
    for name in "abcde":
        source.write(f"d/{name}", name.encode())
    replication = Replication(source.store(), target.store(), folder)
    replication.run(30)
    assert held(target) == held(source)
    return source, target, replication


def hold_settled(source: MemoryStore, target: MemoryStore, replication: Replication) -> None:
    """All is equal and acknowledged some time after nothing fails any more."""
    replication.run(60, seconds=2.0)
    assert held(target) == held(source)
    assert replication.engine.report().failed == 0
    assert acknowledged(replication) == source.newest_index


def failing(
    store: MemoryStore, fails: set[tuple[str, str]], error: StoreError
) -> Callable[[], None]:
    """Let operations on keys fail until the returned function is called."""

    def before(name: str, key: str) -> None:
        keys = store.deleting if name == "delete" else (key,)
        if not fails.isdisjoint((name, one) for one in keys):
            raise error

    store.faults = replace(store.faults, before=before)

    def mend() -> None:
        store.faults = replace(store.faults, before=lambda _name, _key: None)

    return mend


def acknowledged(replication: Replication) -> int:
    position = replication.engine.report().checkpoint.position
    assert position is not None
    return position.index


@ERRORS
@pytest.mark.parametrize("renames", [True, False])
def test_of_a_renamed_folder_only_the_key_that_fails_is_left(
    error: StoreError, tmp_path: Path, *, renames: bool
) -> None:
    source, target, replication = live(tmp_path, renames=renames)
    mend = failing(target, {("rename", "d/c"), ("put", "e/c")}, error)
    before = acknowledged(replication)
    source.move("d/", "e/")
    source.write("e/new", b"new")
    source.write("e/a", b"changed")
    replication.run(40)
    report = replication.engine.report()
    assert report.condition is Condition.ACTIVE
    assert "e/c" in {one.key for one in report.failed_keys}
    assert {key: one for key, one in held(target).items() if key[2:] != "c"} == {
        key: one for key, one in held(source).items() if key != "e/c"
    }
    assert acknowledged(replication) == before
    mend()
    hold_settled(source, target, replication)


@ERRORS
def test_of_a_deleted_folder_only_the_key_that_fails_is_left(
    error: StoreError, tmp_path: Path
) -> None:
    source, target, replication = live(tmp_path)
    mend = failing(target, {("delete", "d/c")}, error)
    before = acknowledged(replication)
    source.remove_below("d/")
    source.write("d/a", b"again")
    replication.run(60)
    assert {one.key for one in replication.engine.report().failed_keys} == {"d/c"}
    assert target.bodies() == {"d/a": b"again", "d/c": b"c"}
    assert acknowledged(replication) == before
    mend()
    hold_settled(source, target, replication)


@ERRORS
@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_folder_does_not_wait_for_a_key_that_has_failed_in_it(
    error: StoreError, tmp_path: Path, *, is_deleted: bool
) -> None:
    """It does the change of that key itself."""
    source, target, replication = live(tmp_path)
    mend = failing(target, {("put", "d/c")}, error)
    source.write("d/c", b"changed")
    replication.run(60)
    assert {one.key for one in replication.engine.report().failed_keys} == {"d/c"}
    if is_deleted:
        source.remove_below("d/")
    else:
        source.move("d/", "e/")
    source.write("e/a", b"new")
    replication.run(10)
    assert held(target) == held(source)
    report = replication.engine.report()
    assert (report.condition, report.failed, report.failed_keys) == (Condition.ACTIVE, 0, ())
    replication.run(20)
    assert acknowledged(replication) == source.newest_index
    mend()


def test_a_store_that_is_down_is_no_fault_of_the_keys_of_a_folder(tmp_path: Path) -> None:
    source, target, replication = live(tmp_path)
    down = True

    def before(_name: str, _key: str) -> None:
        if down:
            raise SILENT

    target.faults = replace(target.faults, before=before)
    source.move("d/", "e/")
    replication.run(60)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.WAITING, 0)
    assert sorted(target.objects) == [f"d/{name}" for name in "abcde"]
    down = False
    replication.run(60)
    assert held(target) == held(source)


def test_a_key_that_is_left_of_a_folder_is_left_of_the_next_one_too(tmp_path: Path) -> None:
    source, target, replication = live(tmp_path)
    mend = failing(target, {("delete", "d/c")}, REFUSED)
    before = acknowledged(replication)
    for number in range(3):
        source.remove_below("d/")
        source.write(f"d/{number}", b"new")
        replication.run(20)
    assert target.bodies() == {"d/2": b"new", "d/c": b"c"}
    assert {one.key for one in replication.engine.report().failed_keys} == {"d/c"}
    assert acknowledged(replication) == before
    mend()
    replication.run(60, seconds=2.0)
    assert held(target) == held(source)
    assert acknowledged(replication) == source.newest_index
