"""A verification in ranges of keys: what a whole one says, wherever it is cut."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof.item import EvidenceLevel, HashAlgorithm
from replicator.ledger import PairLedger
from replicator.ledger_view import LedgerView
from replicator.listing_range import ListingRange
from replicator.stores.capabilities import Capabilities
from replicator.stores.port import ObjectProperties
from replicator.verified_ranges import (
    TALLY_SCHEMA,
    RangedVerification,
    add_tallies,
    read_differences,
    tally_row,
    verify_range,
)
from replicator.verify import VerificationTally
from runtime.errors import DiskError, UsageError
from runtime.progress import ProgressStyle, progress_sink
from tests.support.bucket_command import flip_a_bit, opened, write
from tests.support.bucket_sync import Known, SyncRunner, bucket_verification, known, stated
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryStore

# Long enough for a file of its own.
BODY = b"two" * 10_000
KEYS = ("", "a", "a/", "a/b", "ab", "b", "\uff21", "😀", "z")
sides = st.tuples(st.sampled_from([b"", b"a", b"b", b"cc"]), st.sampled_from(["p", "q"]))
buckets = st.dictionaries(st.sampled_from(KEYS[1:]), sides)


@settings(max_examples=40, deadline=None)
@given(
    buckets,
    buckets,
    buckets,
    st.lists(st.sampled_from(KEYS[1:]), unique=True),
    st.sampled_from(EvidenceLevel),
    st.sampled_from(["", "a", "zz"]),
    st.sampled_from([MEMORY, UNPROVEN]),
    st.randoms(use_true_random=False),
)
def test_ranges_say_together_what_a_whole_verification_says(
    synced: dict[str, tuple[bytes, str]],
    ours: dict[str, tuple[bytes, str]],
    theirs: dict[str, tuple[bytes, str]],
    bounds: list[str],
    level: EvidenceLevel,
    prefix: str,
    capabilities: Capabilities,
    chance: random.Random,
) -> None:
    source, target = MemoryStore("memory:a", capabilities), MemoryStore("memory:b", capabilities)
    with TemporaryDirectory() as place:
        state = Path(place, "state")

        def put(store: MemoryStore, objects: dict[str, tuple[bytes, str]]) -> None:
            for key, (body, value) in objects.items():
                store.write(key, body, ObjectProperties(metadata=(("m", value),)))

        put(source, synced)
        assert SyncRunner(source.store(), target.store(), state)().equal
        put(source, ours)
        put(target, theirs)
        for key, held in sorted(target.objects.items()):
            if held.body and chance.random() < 0.3:
                flipped = bytes([held.body[0] ^ 1]) + held.body[1:]
                target.objects[key] = replace(held, body=flipped)
        with PairLedger(state, source="memory:a", target="memory:b") as ledger:
            if level is EvidenceLevel.LISTED and target.objects:
                # Of one that is not damaged any more nothing is claimed at this level.
                ledger.save_damaged("a", None)
            ledger.settle()
            parts = VerificationTally(ledger.secret)
            files = list[Path]()
            edges: list[str | None] = [None, *sorted(bounds), None]
            for number, (after, last) in enumerate(pairwise(edges)):
                keys = ListingRange(after or "", last)
                files.append(Path(place, str(number)))
                with LedgerView(state, keys) as view:
                    stores = keys.view(source.store()), keys.view(target.store())
                    tally = verify_range(*stores, view, prefix, level, files[-1])
                add_tallies(parts, pa.Table.from_pylist([tally_row(tally)], TALLY_SCHEMA))
            with ThreadPoolExecutor(2) as readers:
                run = bucket_verification(source.store(), target.store(), ledger, level, readers)
                whole, expected = VerificationTally(ledger.secret), list[Known]()
                for one in run.keys(prefix):
                    whole.add(one)
                    if one.kind is not None or one.is_unsettled:
                        expected.append(known(one))
            damaged = ledger.damaged()
            for key in damaged:
                ledger.save_damaged(key, None)
            found = [known(key) for path in files for key in read_differences(path, ledger)]
            assert found == expected
            assert stated(parts, run) == stated(whole, run)
            # What was damaged before this, and is still, has been noted once more.
            assert ledger.damaged() == damaged


def test_a_view_of_a_ledger_has_the_rows_of_its_range(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for key in ("a", "b", "c", "d"):
        source.write(key, b"1", ObjectProperties())
    assert SyncRunner(source.store(), target.store(), tmp_path)().equal
    with PairLedger(tmp_path, source="memory:a", target="memory:b") as ledger:
        ledger.save_rows([replace(row, hashes=()) for row in ledger.rows("c")])
        ledger.settle()
        with LedgerView(tmp_path, ListingRange("a", "c")) as view:
            rows = list(view.rows(""))
            assert [(row.key, bool(row.hashes)) for row in rows] == [("b", True), ("c", False)]
            assert list(view.rows("", start_after="b")) == rows[1:]
            assert list(view.rows("d")) == []
            view.save_rows(rows[:1])
            view.revise([(rows[0], None)])
            assert view.row("b") == rows[0]


def test_a_root_has_only_what_is_known_of_all_ranges(tmp_path: Path) -> None:
    # All empty objects are equal, by any hash; of others this store knows none.
    stores = [MemoryStore(f"memory:{name}", UNPROVEN) for name in "ab"]
    for one in stores:
        one.write("a", b"", ObjectProperties())
        one.write("b", b"1", ObjectProperties())
    with PairLedger(tmp_path, source="memory:a", target="memory:b") as ledger:
        ledger.settle()
        whole, algorithms = VerificationTally(ledger.secret), list[object]()
        for number, keys in enumerate((ListingRange("", "a"), ListingRange("a"))):
            with LedgerView(tmp_path, keys) as view:
                views = [keys.view(one.store()) for one in stores]
                path = tmp_path / str(number)
                tally = verify_range(views[0], views[1], view, "", EvidenceLevel.RECORDED, path)
            algorithms.append(tally.sets.algorithm)
            add_tallies(whole, pa.Table.from_pylist([tally_row(tally)], TALLY_SCHEMA))
    assert algorithms == [HashAlgorithm.BLAKE3, None]
    assert (whole.sets.algorithm, whole.sets.root.count) == (None, 2)


class InProcess:
    """Runs tasks one after the other, the last range first (RangeEngine)."""

    def __init__(self, lost: int = 0) -> None:
        """The results of the last `lost` ranges are lost."""
        self.ranges, self._lost = 0, lost

    def tasks_at_once(self) -> int:
        """See RangeEngine."""
        return 2

    def rows(
        self,
        ranges: pa.Table,
        work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: pa.Schema,
        marker: Path,
        advance: Callable[[int], None],
    ) -> pa.Table:
        """See RangeEngine."""
        assert marker.is_file()
        self.ranges = ranges.num_rows
        found = list[pa.RecordBatch]()
        for number in reversed(range(ranges.num_rows - self._lost)):
            found += work(ranges.slice(number, 1).to_batches())
            advance(1)
        return pa.Table.from_batches(found, schema)


def verified(
    place: Path, level: EvidenceLevel, ranges: int | None = None, lost: int = 0
) -> tuple[list[str], VerificationTally, int]:
    """Differences of two buckets in folders, and how many ranges they were cut into."""
    engine = InProcess(lost)
    addresses = {name: f"local:{place / name}" for name in ("source", "target")}
    with (
        opened(place / "source") as source,
        opened(place / "target") as target,
        PairLedger(place / "state", **addresses) as ledger,
        progress_sink(ProgressStyle()) as progress,
    ):
        tally = VerificationTally(ledger.secret)
        run = RangedVerification(source, target, ledger, level=level)
        found = run.differences(engine, "", tally, progress, ranges=ranges)
        lines = [f"{key.kind and key.kind.value} {key.key}" for key in found]
    assert not (place / "state" / "verify-ranges").exists()
    return lines, tally, engine.ranges


def test_damage_that_tasks_find_and_miss_is_noted_for_the_next_sync(tmp_path: Path) -> None:
    write(tmp_path / "source", {"a": b"one", "b": BODY, "c": b"three"})
    with opened(tmp_path / "source") as source, opened(tmp_path / "target") as target:
        assert SyncRunner(source, target, tmp_path / "state")().equal
    flip_a_bit(tmp_path / "target", BODY)
    lines, tally, _ = verified(tmp_path, EvidenceLevel.READ)
    assert (lines, tally.objects) == (["damaged b"], 3)
    assert tally.sets.oldest_read_at_s is not None
    # The mark alone tells it now.
    assert verified(tmp_path, EvidenceLevel.RECORDED)[0] == ["damaged b"]
    flip_a_bit(tmp_path / "target", bytes([BODY[0] ^ 1]) + BODY[1:])
    assert verified(tmp_path, EvidenceLevel.READ)[0] == []
    assert verified(tmp_path, EvidenceLevel.RECORDED)[0] == []


def test_a_bucket_is_cut_by_what_either_side_has(tmp_path: Path) -> None:
    many = {f"{number:04}": b"" for number in range(1_200)}
    write(tmp_path / "source", {"0500": b"", "zzz": b""})
    write(tmp_path / "target", many)
    lines, tally, ranges = verified(tmp_path, EvidenceLevel.LISTED, 3)
    assert ranges > 1
    assert lines == [*(f"extra {key}" for key in sorted(many) if key != "0500"), "missing zzz"]
    assert (tally.objects, tally.differences, tally.sets.objects) == (1_201, 1_200, 1)


def test_a_range_without_a_result_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "source", {f"{number:04}": b"" for number in range(1_200)})
    with opened(tmp_path / "target"), pytest.raises(AssertionError, match="results of ranges"):
        verified(tmp_path, EvidenceLevel.LISTED, 3, lost=1)


def test_a_store_that_hides_keys_is_not_cut(tmp_path: Path) -> None:
    hiding = MemoryStore("memory:b", replace(MEMORY, lists_all_keys=False)).store()
    with (
        PairLedger(tmp_path, source="memory:a", target="memory:b") as ledger,
        pytest.raises(UsageError, match="memory:b does not list all its keys in order"),
    ):
        RangedVerification(
            MemoryStore("memory:a").store(), hiding, ledger, level=EvidenceLevel.LISTED
        )


@pytest.mark.parametrize("content", [None, b"PAR1 and no more"])
def test_a_file_of_a_task_that_is_not_whole_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with (
        PairLedger(tmp_path / "state", source="a", target="b") as ledger,
        pytest.raises(DiskError, match="file"),
    ):
        list(read_differences(tmp_path / "file", ledger))


@given(st.sets(st.sampled_from(KEYS[1:])), st.sets(st.sampled_from(KEYS[1:])))
def test_each_version_is_in_one_range(keys: set[str], bounds: Sequence[str]) -> None:
    store = MemoryStore("memory:a")
    for key in keys:
        store.write(key, b"", ObjectProperties())
    edges: list[str | None] = [None, *sorted(bounds), None]
    views = [ListingRange(after or "", last).view(store.store()) for after, last in pairwise(edges)]
    found = [facts for view in views for facts in view.lister.list_versions("")]
    assert found == list(store.store().lister.list_versions(""))
