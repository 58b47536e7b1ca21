"""A bucket's listing in shards: each key once, in ranges of about equal counts."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.listing_shards import ListingShard, plan_shards, shard_bounds
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectFacts
from runtime.disk import Disk
from tests.support.bucket_command import write

COUNT, SHARDS = 30_000, 16


class Lister:
    """A listing of these keys that counts how often it is begun."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = sorted(set(keys), key=str.encode)
        self.looks = 0

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        assert not prefix
        self.looks += 1
        first = bisect_right(self.keys, start_after.encode(), key=str.encode)
        for at in range(first if start_after else 0, len(self.keys)):
            yield ObjectFacts(self.keys[at], 1, "", 0)

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        return self.list_objects(prefix)

    def sizes(self, bounds: Sequence[str]) -> list[int]:
        """How many keys each shard has."""
        cuts = [bisect_right(self.keys, one.encode(), key=str.encode) for one in bounds]
        return [b - a for a, b in zip([0, *cuts], [*cuts, len(self.keys)], strict=True)]


def keys_like(kind: str) -> list[str]:
    chance = random.Random(kind)
    match kind:
        case "hexadecimal":
            return [f"{chance.getrandbits(64):016x}" for _ in range(COUNT)]
        case "deep":
            begins = "warehouse/a-long-name/events/2026/11/"
            return [f"{begins}{chance.getrandbits(64):016x}" for _ in range(COUNT)]
        case "numbers":
            return [f"{number:012}" for number in range(COUNT)]
        case "dates":
            return [
                f"logs/2026/{chance.randrange(1, 13):02}/{chance.randrange(1, 29):02}/"
                f"host-{chance.randrange(20)}/{chance.getrandbits(40):x}.gz"
                for _ in range(COUNT)
            ]
        case _:
            return [f"名/{chance.getrandbits(40):x}" for _ in range(COUNT)]


@pytest.mark.parametrize("kind", ["hexadecimal", "deep", "numbers", "dates"])
def test_shards_have_about_equal_counts_after_few_looks(kind: str) -> None:
    lister = Lister(keys_like(kind))
    bounds = shard_bounds(lister, SHARDS)
    sizes = lister.sizes(bounds)
    assert (len(sizes), min(sizes) > 0) == (SHARDS, True)
    assert max(sizes) < 6 * COUNT / SHARDS
    assert lister.looks < 400


def test_keys_that_cannot_be_told_apart_stay_together() -> None:
    beyond = Lister(keys_like("beyond ASCII"))
    assert sum(beyond.sizes(shard_bounds(beyond, SHARDS))) == len(beyond.keys)
    assert shard_bounds(Lister(["a"]), SHARDS) == []
    assert shard_bounds(Lister([]), SHARDS) == []


@settings(max_examples=25)
@given(
    keys=st.lists(st.text("ab/~ \u00e9", min_size=1, max_size=5), max_size=9, unique=True),
    shards=st.integers(1, 9),
)
def test_bounds_ascend_and_are_keys(keys: list[str], shards: int) -> None:
    # Many of each, since a page shows a thousand.
    lister = Lister([f"{key}{number:04}" for key in keys for number in range(300)])
    bounds = shard_bounds(lister, shards)
    assert len(bounds) < shards
    assert bounds == sorted(set(bounds), key=str.encode)
    assert set(bounds) <= set(lister.keys)


def test_each_key_is_in_one_file_and_what_is_listed_is_not_listed_again(tmp_path: Path) -> None:
    names = [f"{number:05}" for number in range(1_500)] + ["é", "\uff21", "😀"]
    write(tmp_path / "bucket", dict.fromkeys(names, b"x"))
    address, folder = f"local:{tmp_path}/bucket", tmp_path / "listed"
    with open_store(address, may_write=False) as store:
        tasks = plan_shards(address, store.lister, folder, 4, Disk())
    assert len(tasks) > 1
    for task in tasks:
        task()
    held = [pq.read_table(task.path)["key"].to_pylist() for task in tasks]
    assert [key for some in held for key in some] == sorted(names, key=str.encode)
    inodes = [task.path.stat().st_ino for task in tasks]
    # Another run goes on with the same shards, whatever is in the bucket by then.
    write(tmp_path / "bucket", {"00000-new": b"x"})
    tasks[1].path.unlink()
    with open_store(address, may_write=False) as store:
        again = plan_shards(address, store.lister, folder, 99, Disk())
    assert again == tasks
    for task in again:
        task()
    assert tasks[1].path.is_file()
    del tasks[1], inodes[1]
    assert [task.path.stat().st_ino for task in tasks] == inodes
    (folder / "shards.json").write_text("[]")
    with open_store(address, may_write=False) as store:
        assert plan_shards(address, store.lister, folder, 1, Disk()) == [
            ListingShard(address, folder / "shard-000000.parquet", "", None)
        ]
    assert not tasks[0].path.exists()
