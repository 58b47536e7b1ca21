"""Indexes built from listings: the same bits as a refresh makes, and resumed."""

import os
import resource
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from proof.errors import ListingInvalidError
from proof.generations import OPENERS, newest_generation
from proof.index import WHOLE, ItemEvidence, Stamp, StampedItem
from proof.index_build import BuiltFiles, LocalIndexEngine, build_files
from proof.index_parts import read_slices, write_slices
from proof.inventory import ListingScope, read_folder
from proof.item import EvidenceLevel, HashAlgorithm, Item, Profile
from proof.listed_rows import ListedItemRules
from proof.listing import LISTED_SCHEMA, KeySample, ListingPart, sample_part
from proof.stored_index import StoredIndex
from proof.symbols import KEPT_SYMBOLS
from replicator.refresh import IndexedBucket
from replicator.stores.opening import open_store
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError
from runtime.progress import ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock
from tests.support.bucket_command import write
from tests.support.listings import ListedVersion, version_of, versions_by_chance, write_listing

PROFILE = Profile(b"s" * 32, HashAlgorithm.MD5, ())
RULES = ListedItemRules(PROFILE, etags_prove=True)
SCOPE = ListingScope(has_versions=True)


@dataclass(frozen=True)
class MemoryPart:
    """A part of a listing that counts how often it is read."""

    listed: pa.Table
    name: str
    fails: bool = False

    def rows(self) -> Iterator[pa.RecordBatch]:
        """See ListingPart."""
        if self.fails:
            raise ListingInvalidError("no more")
        yield from self.listed.to_batches(max_chunksize=700)

    def listed_keys(self) -> Iterator[pa.Array]:
        """See ListingPart."""
        for batch in self.listed.to_batches(max_chunksize=700):
            yield batch.column(0)

    def __repr__(self) -> str:
        return self.name


def parts_of(rows: Sequence[ListedVersion], folder: Path, count: int = 3) -> list[MemoryPart]:
    (file,) = read_folder(str(write_listing(folder, rows)), SCOPE)
    whole = pa.Table.from_batches(list(file.rows()), LISTED_SCHEMA)
    step = -(-len(rows) // count) or 1
    return [
        MemoryPart(whole.slice(at, step), f"part {at}") for at in range(0, len(rows) or 1, step)
    ]


def built(parts: Sequence[ListingPart], folder: Path, *, range_rows: int) -> BuiltFiles:
    with progress_sink(ProgressStyle()) as progress:
        return build_files(
            LocalIndexEngine(Disk(), threads=2),
            parts,
            folder,
            RULES,
            disk=Disk(),
            progress=progress,
            range_rows=range_rows,
        )


def stamped_of(row: ListedVersion) -> StampedItem:
    is_md5 = len(row.etag) == 32 and row.encryption != "SSE-KMS" and row.etag != "0" * 64
    content = bytes.fromhex(row.etag) if is_md5 else None
    level = EvidenceLevel.RECORDED if is_md5 else EvidenceLevel.LISTED
    stamp = Stamp(row.version, row.etag, row.modified_ms)
    return StampedItem(Item(row.key, row.size or 0, content), ItemEvidence(level), stamp)


def bits_of(folder: Path) -> tuple[list[object], dict[str, bytes], list[object]]:
    """All rows, values and entries by hash of the newest generation."""
    newest = newest_generation(folder, Disk())
    assert newest is not None
    tables = OPENERS[newest.kind](newest.path(folder), False)
    try:
        with tables.view() as view:
            rows = list(view.rows(b"", None))
            hashes = np.array(
                sorted({int.from_bytes(row.row[:6], "big") for row in rows}), np.uint64
            )
            found = view.by_hash(hashes)
            by_hash = sorted(zip(*(c.texts() for c in (found.names.keys, found.rows)), strict=True))
            assert view.damage() == []
            return list(rows), view.values(""), list(by_hash)
    finally:
        tables.close()


@pytest.mark.parametrize("range_rows", [64, 1_000_000])
def test_a_build_makes_the_bits_of_a_rebuild(tmp_path: Path, range_rows: int) -> None:
    rows = versions_by_chance(3_000)
    made = built(parts_of(rows, tmp_path / "l"), tmp_path / "work", range_rows=range_rows)
    assert (made.ranges > 5) == (range_rows == 64)
    index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
    root = index.take_files(made.files, made.sums.derived())
    check = index.self_check()
    assert (check.items, check.damage) == (3_000, ())
    index.close()
    other = StoredIndex(tmp_path / "rebuilt", PROFILE, disk=Disk())
    with other.rebuild(items=len(rows)) as building:
        building.add([stamped_of(row) for row in rows])
        assert building.finish() == root
    other.close()
    ours, theirs = bits_of(tmp_path / "built"), bits_of(tmp_path / "rebuilt")
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    # Where spans are cut depends on the ranges, and on nothing else.
    names = [name for name in theirs[1] if name != "state" or made.ranges == 1]
    assert [ours[1][name] for name in names] == [theirs[1][name] for name in names]


def test_a_build_makes_the_rows_of_a_refresh(tmp_path: Path) -> None:
    bodies = {f"{number % 7}/{number}": b"x" * number for number in range(200)}
    write(tmp_path / "bucket", bodies)
    with open_store(f"local:{tmp_path}/bucket", may_write=False) as store:
        refreshed = StoredIndex(tmp_path / "refreshed", PROFILE, disk=Disk())
        IndexedBucket(store, refreshed, PROFILE, SystemClock()).refresher(lambda: False).refresh()
        listing = [version_of(facts) for facts in store.lister.list_objects("")]
        made = built(parts_of(listing, tmp_path / "l"), tmp_path / "work", range_rows=64)
        index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
        index.take_files(made.files, made.sums.derived())
        with index.snapshot() as ours, refreshed.snapshot() as theirs:
            assert ours.roots([WHOLE]) == theirs.roots([WHOLE])
            assert ours.evidence == theirs.evidence
            size = KEPT_SYMBOLS
            assert ours.symbols(size).to_bytes() == theirs.symbols(size).to_bytes()
        # And it goes on as one that was refreshed.
        again = IndexedBucket(store, index, PROFILE, SystemClock()).refresher(lambda: False)
        done = again.refresh()
        assert (done.objects, done.added, done.changed, done.removed) == (200, 0, 0, 0)
    for one in (index, refreshed):
        one.close()
    ours_bits, theirs_bits = bits_of(tmp_path / "built"), bits_of(tmp_path / "refreshed")
    assert ours_bits[0] == theirs_bits[0]
    assert ours_bits[2] == theirs_bits[2]


def test_a_build_goes_on_with_the_ranges_that_are_done(tmp_path: Path) -> None:
    rows = versions_by_chance(3_000)
    parts, work = parts_of(rows, tmp_path / "l"), tmp_path / "work"
    whole = built(parts, tmp_path / "whole", range_rows=64)
    broken = [*parts[:2], MemoryPart(parts[2].listed, parts[2].name, fails=True)]
    with pytest.raises(ListingInvalidError, match="no more"):
        built(broken, work, range_rows=64)
    assert not list(work.glob("rows-*"))
    first = built(parts, work, range_rows=64)
    assert (first.resumed, first.sums.to_bytes()) == (0, whole.sums.to_bytes())
    for number in range(0, first.ranges, 2):
        (work / f"sums-{number:06}.bin").unlink()
    (work / f"rows-000000.sst.{'0' * 16}.tmp").write_bytes(b"half")
    changed = {path: path.stat().st_mtime_ns for path in work.glob("rows-*1.sst")}
    second = built(parts, work, range_rows=64)
    assert second.resumed == first.ranges // 2
    assert second.sums.to_bytes() == whole.sums.to_bytes()
    odd = [path for path in changed if int(path.stem[-6:]) % 2]
    assert all(path.stat().st_mtime_ns == changed[path] for path in odd)
    assert not list(work.glob("*.tmp"))


def test_another_listing_begins_anew(tmp_path: Path) -> None:
    work = tmp_path / "work"
    built(parts_of(versions_by_chance(500), tmp_path / "a"), work, range_rows=64)
    other = parts_of(versions_by_chance(300, seed=2), tmp_path / "b", count=4)
    found = built(other, work, range_rows=64)
    assert (found.resumed, found.sums.count) == (0, 300)
    (work / "plan.json").write_text("[]")
    assert built(other, work, range_rows=64).resumed == 0


def test_a_listing_without_objects_is_an_empty_index(tmp_path: Path) -> None:
    made = built(parts_of([], tmp_path / "l"), tmp_path / "work", range_rows=64)
    assert (made.files, made.sums.count, made.ranges) == ((), 0, 1)
    index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
    assert index.take_files(made.files, made.sums.derived()).count == 0
    assert index.self_check().damage == ()
    index.close()


def test_an_index_of_many_files_needs_few_of_them_open(tmp_path: Path) -> None:
    made = built(
        parts_of(versions_by_chance(16_000), tmp_path / "l"), tmp_path / "w", range_rows=64
    )
    assert len(made.files) > 300
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 290
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
        index.take_files(made.files, made.sums.derived())
        assert index.self_check().damage == ()
        index.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_key_that_is_listed_twice_counts_once(tmp_path: Path) -> None:
    rows = versions_by_chance(200)
    newer = [ListedVersion(row.key, "f" * 32, 9, row.modified_ms + 1) for row in rows[::3]]
    made = built(parts_of([*rows, *newer], tmp_path / "l"), tmp_path / "w", range_rows=64)
    assert (made.sums.count, made.sums.repeated) == (200, len(newer))
    index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
    index.take_files(made.files, made.sums.derived())
    found = index.rows(start_after="", limit=1_000)
    assert Counter(row.item.size_bytes == 9 for row in found)[True] == len(newer)
    index.close()


def test_slices_are_read_one_by_one_and_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    rows = pa.table([pa.array(range(10))], schema=schema)
    path = tmp_path / "slices"
    write_slices(path, rows, np.array([n % 3 for n in range(10)], np.int32), 4)
    found = [read_slices([path, path], n, 4, schema)["a"].to_pylist() for n in range(4)]
    assert found == [[0, 3, 6, 9] * 2, [1, 4, 7] * 2, [2, 5, 8] * 2, []]
    shutil.copy(path, tmp_path / "cut")
    with (tmp_path / "cut").open("rb+") as file:
        file.truncate(20)
    with pytest.raises(DiskError, match="cut"):
        read_slices([tmp_path / "cut"], 1, 4, schema)


def test_a_sample_has_few_keys_and_stands_for_all_rows(tmp_path: Path) -> None:
    (part,) = parts_of(versions_by_chance(12_000), tmp_path / "l", count=1)
    for parts in (1, 1 << 20):
        table = sample_part(0, part, parts=parts)
        (row,) = table.to_pylist()
        assert (row["rows"], len(row["keys"]) <= max((1 << 18) // parts, 64)) == (12_000, True)
        assert abs(len(row["keys"]) * row["weight"] - 12_000) <= row["weight"]
        ranges = len(KeySample.of([table]).bounds(1_000)) + 1
        assert 6 <= ranges <= 12


def test_files_that_are_damaged_or_lost_are_no_index(tmp_path: Path) -> None:
    made = built(parts_of(versions_by_chance(900), tmp_path / "l"), tmp_path / "w", range_rows=64)
    index = StoredIndex(tmp_path / "built", PROFILE, disk=Disk())
    damaged = tmp_path / "damaged.sst"
    damaged.write_bytes(made.files[0].read_bytes()[:-100])
    for wrong in ([damaged, *made.files[1:]], [*made.files, tmp_path / "none"]):
        with pytest.raises(DatabaseError):
            index.take_files(wrong, made.sums.derived())
    # The index is as it was, and takes the whole once what was lost is made again.
    assert index.rows(start_after="", limit=9) == []
    for lost in (made.files[3], made.files[-1]):
        lost.unlink()
    again = built(parts_of(versions_by_chance(900), tmp_path / "l"), tmp_path / "w", range_rows=64)
    assert (again.files, again.resumed) == (made.files, made.ranges - 1)
    index.take_files(again.files, again.sums.derived())
    assert index.self_check().damage == ()
    index.close()
