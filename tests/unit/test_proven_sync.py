"""A sync whose target has a verifier beside it: what crosses, and what is proven."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from replicator.proving import PairProver
from replicator.stores.errors import ObjectMissingError
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.sync import SyncOptions, SyncReport
from replicator.verifier.values import WritesRefusedError
from tests.support.bucket_sync import Remarks
from tests.support.flawed_stores import FlawedReader
from tests.support.stores import ANYTHING, NOTHING, put
from tests.support.verifiers import VerifiedPair, fill, held, verified_pair

MIB = 1 << 20
RANGE = random.Random(2).randbytes(3 * MIB // 2)


def bodies(pair: VerifiedPair) -> tuple[dict[str, object], dict[str, object]]:
    """All that both sides have."""
    return {**held(pair.source)}, {**held(pair.target)}


def test_a_sync_makes_the_sides_equal_and_proves_it(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 200)
        fill(pair.target, 100)
        put(pair.source, "large", random.Random(1).randbytes(3 * MIB))
        put(pair.target, "00003-é", b"changed")
        put(pair.target, "extra")
        report = pair.sync()
        assert (report.copied, report.deleted, report.failed) == (102, 0, ())
        # Nobody asked to delete.
        assert (report.equal, report.differences) == (False, 1)
        report = pair.sync(delete=True)
        assert (report.copied, report.deleted, report.bytes) == (0, 1, 0), report
        assert (report.equal, report.level, report.differences) == (True, "recorded:blake3", 0)
        ours, theirs = bodies(pair)
        assert ours == theirs
        again = pair.sync(delete=True)
        assert (again.copied, again.bytes, again.root) == (0, 0, report.root)


def test_a_refresh_shows_the_keys_of_both_sides(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 20)
        pair.sync()
        progress = Remarks()
        prover = PairProver(pair.bucket, pair.client, stopped=lambda: False, progress=progress)
        assert prover.settle().is_equal
        assert progress.stages == [("refresh both indexes", 40, "keys")]
        assert progress.done == 40


def test_new_metadata_move_no_data(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        put(pair.source, "a", b"x" * 5000)
        put(pair.source, "large", b"x" * 3 * MIB)
        pair.sync()
        for key in ("a", "large"):
            facts = pair.source.reader.facts(key)
            assert facts is not None
            properties = ObjectProperties(metadata=(("m", "1"),), tags=(("t", "2"),))
            pair.source.writer.put_properties(facts, properties)
        before = pair.client.bytes_sent
        report = pair.sync()
        assert (report.copied, report.metadata_only, report.bytes) == (0, 2, 0)
        assert report.equal
        assert pair.client.bytes_sent - before < 1000
        ours, theirs = bodies(pair)
        assert ours == theirs


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old[:100_000] + b"\0" + old[100_001:],
        lambda old: old + b"tail",
        lambda old: old[:-70_000],
        lambda old: b"!" + old[1:-1] + b"!",
        lambda old: (
            old[: 5 * MIB] + random.Random(2).randbytes(3 * MIB // 2) + old[13 * MIB // 2 :]
        ),
        lambda old: old + random.Random(3).randbytes(3 * MIB),
    ],
    ids=["byte", "append", "truncate", "ends", "range", "long-tail"],
)
def test_of_a_large_object_only_what_changed_crosses(tmp_path: Path, change: object) -> None:
    assert callable(change)
    with verified_pair(tmp_path) as pair:
        old = random.Random(1).randbytes(9 * MIB + 100)
        put(pair.source, "k", old)
        assert pair.sync().bytes == len(old)
        new = change(old)
        put(pair.source, "k", new)
        report = pair.sync()
        assert (report.copied, report.equal) == (1, True)
        longest = max(len(new) - len(old), 0) + 2 * (16 << 10)
        is_range = new[5 * MIB : 6 * MIB] != old[5 * MIB : 6 * MIB]
        assert report.bytes <= longest + is_range * 3 * MIB // 2 + (16 << 10)
        assert held(pair.target)["k"] == (new, NOTHING)


def test_it_says_that_acls_are_not_compared(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair, pair.opened_sync(SyncOptions()) as run:
        assert any("ACLs are not compared" in text for text in run.limitations)


def test_a_prefix_leaves_the_rest_alone(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 20, prefix="a/")
        fill(pair.source, 20, prefix="b/")
        put(pair.target, "a0-extra")
        put(pair.target, "c-extra")
        report = pair.sync(delete=True, prefix="a/")
        assert (report.copied, report.deleted, report.equal) == (20, 0, True)
        assert sorted(held(pair.target)) == sorted(
            [key for key in held(pair.source) if key.startswith("a/")] + ["a0-extra", "c-extra"]
        )


def test_a_verifier_that_takes_no_writes_is_not_synced_to(tmp_path: Path) -> None:
    with verified_pair(tmp_path, writes=False) as pair:
        put(pair.source, "a")
        with pytest.raises(WritesRefusedError) as caught:
            pair.sync()
        assert caught.value.exit_status == 6
        assert held(pair.target) == {}


def test_an_object_that_exists_at_the_source_again_is_not_deleted(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        put(pair.target, "k")
        pair.target.writer.put("other", b"x", NOTHING, ANYTHING)
        with pair.opened_sync(SyncOptions(delete=True)) as run:
            plan = run.plan()
            put(pair.source, "k", b"newer")
            report = run.execute(plan)
        assert report.deleted == 1
        # It is not the source's object yet either, and the report says so.
        assert (report.equal, report.differences, report.failed) == (False, 1, ())
        assert held(pair.target)["k"] == (b"x", NOTHING)
        assert pair.sync().equal


def moving_sync(
    pair: VerifiedPair, *, between: Callable[[], object], stage: str = ""
) -> SyncReport:
    """A sync with deletes, during which something happens after the plan, or when a
    stage begins.
    """

    class Acting(Remarks):
        def begin(self, what: str, total: int | None, unit: str) -> None:
            super().begin(what, total, unit)
            if what == stage:
                between()

    with pair.opened_sync(SyncOptions(delete=True), progress=Acting()) as run:
        plan = run.plan()
        if not stage:
            between()
        return run.execute(plan)


def reasons(report: SyncReport) -> list[tuple[str, str]]:
    return [(one.key, one.reason) for one in report.failed]


@pytest.mark.parametrize("others", [0, 30])
def test_an_extra_that_changed_between_two_cuts_is_not_deleted(tmp_path: Path, others: int) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 5)
        for number in range(others):
            put(pair.target, f"extra/{number:02}")
        for key in ("changed", "gone", "stays"):
            put(pair.target, key)

        def move() -> None:
            put(pair.target, "changed", b"newer")
            put(pair.target, "new")
            pair.target.writer.delete(["gone"])

        report = moving_sync(pair, between=move)
        assert (report.copied, report.deleted, report.equal) == (5, others + 1, False)
        assert reasons(report) == [("changed", "in_flight"), ("new", "in_flight")]
        assert report.differences == 2
        assert held(pair.target)["changed"] == (b"newer", NOTHING)
        report = pair.sync(delete=True)
        assert (report.deleted, report.equal) == (2, True)


def test_deletes_need_no_third_refresh(tmp_path: Path) -> None:
    """What both sides held when the second one began counts without the deleted."""
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 3)
        for number in range(5):
            put(pair.target, f"extra/{number}")
        progress = Remarks()
        with pair.opened_sync(SyncOptions(delete=True), progress=progress) as run:
            report = run.execute(run.plan())
            receipt = run.receipt()
        assert (report.copied, report.deleted, report.equal) == (3, 5, True)
        assert receipt is not None
        assert receipt.is_equal
        stages = [stage for stage, _, _ in progress.stages]
        assert stages == ["refresh both indexes", "copy", "refresh both indexes", "delete"]


def test_a_key_that_is_back_at_the_source_after_the_second_cut_is_not_deleted(
    tmp_path: Path,
) -> None:
    with verified_pair(tmp_path) as pair:
        for key in ("back", "gone"):
            put(pair.target, key)
        report = moving_sync(pair, between=lambda: put(pair.source, "back", b"2"), stage="delete")
        assert (report.deleted, report.equal, report.differences) == (1, False, 1)
        assert reasons(report) == [("back", "in_flight")]
        assert pair.sync(delete=True).equal
        assert held(pair.target) == {"back": (b"2", NOTHING)}


def test_an_extra_that_changed_after_the_second_cut_is_not_deleted(tmp_path: Path) -> None:
    """The verifier sees it, because it looks at each object near its store."""
    with verified_pair(tmp_path) as pair:
        for key in ("changed", "gone"):
            put(pair.target, key)
        report = moving_sync(
            pair, between=lambda: put(pair.target, "changed", b"newer"), stage="delete"
        )
        assert (report.deleted, report.equal) == (1, False)
        assert reasons(report) == [("changed", "target_changed")]
        assert held(pair.target) == {"changed": (b"newer", NOTHING)}


def test_what_the_source_lists_and_lost_is_not_deleted(tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        fill(pair.source, 2)
        pair.sync()
        lost = next(iter(pair.source.lister.list_objects("")))
        with without(pair, lost.key) as flawed:
            report = flawed.sync(delete=True)
        assert (report.deleted, report.equal) == (0, False)
        assert reasons(report) == [(lost.key, "source_unreadable")]
        assert lost.key in held(pair.target)


@dataclass
class LosingReader(FlawedReader):
    """Does not have one key, whatever is listed."""

    lost: str = ""

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        return None if key == self.lost else super().facts(key, version=version)

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader."""
        if facts.key == self.lost:
            raise ObjectMissingError(f"no {facts.key}")
        return super().properties_of(facts)


@contextmanager
def without(pair: VerifiedPair, key: str) -> Iterator[VerifiedPair]:
    """The pair with a source that lists a key and has lost it."""
    capabilities = replace(pair.source.capabilities, stamps_cover_properties=False)
    reader = LosingReader(pair.source, lost=key)
    source = replace(pair.source, reader=reader, capabilities=capabilities)
    yield replace(pair, source=source, bucket=replace(pair.bucket, store=source))
