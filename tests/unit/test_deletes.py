"""Deletes at a target without a verifier: what is deleted, when, at which cost, and
what is said afterwards. Rows OZ-010 and OZ-116: deletes cross in bulk, and a key that
the store refuses fails by its name; OZ-115: a key that is gone already is no error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replicator.stores.port import DeleteFailure, ObjectProperties
from tests.support.bucket_sync import SyncRunner
from tests.support.memory_store import MemoryStore

ANN = ObjectProperties(metadata=(("owner", "ann"),))
BOB = ObjectProperties(metadata=(("owner", "bob"),))
Pair = tuple[MemoryStore, MemoryStore]


def memory_pair(extras: int = 3, *, feeds: bool = False) -> Pair:
    """A key at both sides, one that has to be copied, and extras."""
    pair = (
        MemoryStore("memory:a", has_feed=feeds, page_keys=10_000),
        MemoryStore("memory:b", has_feed=feeds, page_keys=10_000),
    )
    for store in pair:
        store.write("both", b"1", ANN)
    pair[0].write("new", b"2", ANN)
    for number in range(extras):
        pair[1].write(f"x{number:05}", b"3", ANN)
    return pair


def runner(pair: Pair, folder: Path) -> SyncRunner:
    return SyncRunner(pair[0].store(), pair[1].store(), folder / "state", delete=True)


def before(store: MemoryStore, run: SyncRunner, stage: str, act: Callable[[], object]) -> None:
    """Act once, just before the first call of a store in a stage."""
    acts = iter([act])

    def strike(_name: str, _key: str) -> None:
        stages = run.progress.stages
        if stages and stages[-1][0] == stage:
            next(acts, lambda: None)()

    store.faults.before = strike


@pytest.mark.parametrize("feeds", [False, True])
def test_a_delete_costs_a_share_of_one_request(feeds: bool, tmp_path: Path) -> None:
    """No look at the target for each key, and no listing after the second cut."""
    pair = memory_pair(1_500, feeds=feeds)
    run = runner(pair, tmp_path)
    report = run()
    assert (report.copied, report.deleted, report.equal) == (1, 1_500, True)
    assert pair[0].bodies() == pair[1].bodies()
    calls = [name for name in pair[1].calls if name not in ("position", "changes")]
    assert calls.count("list") == 2
    assert calls[-3:] == ["list", "delete", "delete"]
    # The copy asks for facts; the deletes do not.
    assert "facts" not in calls[calls.index("put") :]
    assert [stage for stage, _, _ in run.progress.stages] == ["compare", "copy", "verify", "delete"]


@pytest.mark.parametrize(
    "change",
    [
        lambda target: target.write("x00001", b"other", ANN),
        lambda target: target.write("x00001", b"3", BOB),
    ],
    ids=["content", "time"],
)
def test_an_extra_that_changed_between_the_cuts_stays(
    change: Callable[[MemoryStore], object], tmp_path: Path
) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)
    before(pair[1], run, "verify", lambda: change(pair[1]))
    report = run()
    assert (report.deleted, report.equal, report.differences) == (2, False, 1)
    assert [(one.key, one.reason) for one in report.failed] == [("x00001", "in_flight")]
    assert "x00001" in pair[1].objects
    # The next run sees it twice.
    report = run()
    assert (report.deleted, report.equal) == (1, True)


def test_an_extra_that_the_plan_did_not_show_stays(tmp_path: Path) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)
    keys = ("a", "x00000+", "z")

    def appear() -> None:
        for key in keys:
            pair[1].write(key, b"4")

    before(pair[1], run, "verify", appear)
    report = run()
    assert (report.deleted, report.equal, report.differences) == (3, False, 3)
    assert [(one.key, one.reason) for one in report.failed] == [(key, "in_flight") for key in keys]
    assert set(pair[1].objects) == {"both", "new", *keys}


def test_an_extra_that_vanished_between_the_cuts_is_no_difference(tmp_path: Path) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)
    before(pair[1], run, "verify", lambda: pair[1].remove("x00001"))
    report = run()
    assert (report.deleted, report.failed, report.equal) == (2, (), True)


def test_a_key_that_is_back_at_the_source_after_the_second_cut_stays(tmp_path: Path) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)
    before(pair[0], run, "delete", lambda: pair[0].write("x00001", b"back", ANN))
    report = run()
    assert (report.deleted, report.equal, report.differences) == (2, False, 1)
    assert [(one.key, one.reason) for one in report.failed] == [("x00001", "in_flight")]
    assert run().equal
    assert pair[1].bodies()["x00001"] == b"back"


def test_a_failed_listing_of_the_second_cut_deletes_nothing(tmp_path: Path) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)

    def fail() -> None:
        raise ConnectionError

    before(pair[0], run, "verify", fail)
    with pytest.raises(ConnectionError):
        run()
    assert pair[1].deleted == []


class Refusing(MemoryStore):
    """Refuses to delete one key."""

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        super().delete([key for key in keys if key != "x00001"])
        return [DeleteFailure("x00001", "AccessDenied")]


def test_what_the_store_refuses_to_delete_is_a_difference(tmp_path: Path) -> None:
    """Rows OZ-116: the others of the request are deleted."""
    source, kept = memory_pair()
    target = Refusing("memory:b", page_keys=10_000)
    target.objects.update(kept.objects)
    report = runner((source, target), tmp_path)()
    assert (report.deleted, report.equal, report.differences) == (2, False, 1)
    assert [(one.key, one.reason) for one in report.failed] == [("x00001", "delete_refused")]


def test_what_moves_besides_the_deletes_is_compared_again_before_them(tmp_path: Path) -> None:
    pair = memory_pair()
    run = runner(pair, tmp_path)
    before(pair[0], run, "verify", lambda: pair[0].write("both", b"1", ANN))
    report = run()
    assert (report.deleted, report.equal, report.in_flight) == (3, True, 0)
    stages = [stage for stage, _, _ in run.progress.stages]
    assert stages == ["compare", "copy", "verify", "verify", "delete"]


def test_the_receipt_of_a_run_that_deleted_says_that_both_sides_hold_one_set(
    tmp_path: Path,
) -> None:
    run = runner(memory_pair(), tmp_path)
    with run._ledger() as ledger, run.open(ledger) as sync:
        report = sync.execute(sync.plan())
        receipt = sync.receipt()
    assert (report.deleted, report.equal) == (3, True)
    assert receipt is not None
    assert receipt.is_equal
    assert receipt.source.root == receipt.target.root
    assert receipt.target.listed + receipt.target.recorded == 2
