"""A plan on disk: steps come back as they were, in their order."""

from contextlib import closing
from pathlib import Path

import pytest

from proof.index import IndexedItem, ItemEvidence
from proof.item import EvidenceLevel, Item, ItemId
from proof.naming import ItemDifference, ItemDifferenceKind
from replicator.plan_spool import PlanSpool
from replicator.proven_plan import ProvenStep, decide_step
from runtime.errors import DiskError
from tests.support.disk import no_file_grows


def step(number: int) -> ProvenStep:
    """A step of its own for each number, some longer than what is read at a time."""
    item = Item(f"k{number}-é" * (1 + 30_000 * (number % 100 == 7)), number, b"c" * 16)
    ours = IndexedItem(item, ItemId(bytes(16)), ItemEvidence(EvidenceLevel.RECORDED))
    found = ItemDifference(ItemDifferenceKind.CHANGED, item.key, "", ours, theirs_id=ItemId(b"x"))
    return decide_step(found, item if number % 2 else None, may_delete=False)


@pytest.mark.parametrize("count", [0, 1, 3_000])
def test_steps_come_back_as_often_as_they_are_read(tmp_path: Path, count: int) -> None:
    with closing(PlanSpool(tmp_path)) as spool:
        for number in range(count):
            spool.add(step(number))
        for _ in range(2):
            assert list(spool) == [step(number) for number in range(count)]
        assert len(spool) == count
        assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_added_while_others_are_read_is_read_too(tmp_path: Path) -> None:
    with closing(PlanSpool(tmp_path)) as spool:
        spool.add(step(1))
        seen = []
        for one in spool:
            seen.append(one)
            if len(seen) < 5:
                spool.add(step(len(seen) + 1))
        assert seen == [step(number) for number in range(1, 6)]


def test_a_plan_that_begins_anew_has_nothing_of_the_old_one(tmp_path: Path) -> None:
    with closing(PlanSpool(tmp_path)) as spool:
        for number in range(10):
            spool.add(step(number))
        spool.clear()
        assert (list(spool), len(spool)) == ([], 0)
        spool.add(step(3))
        assert list(spool) == [step(3)]


def test_a_disk_that_takes_no_more_is_named_once(tmp_path: Path) -> None:
    with no_file_grows(), closing(PlanSpool(tmp_path)) as spool:
        spool.add(step(1))
        with pytest.raises(DiskError, match="plan"):
            list(spool)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="gone"):
        PlanSpool(tmp_path / "gone")
