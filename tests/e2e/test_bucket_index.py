"""Indexes from listings as real processes, and on a real local Spark."""

import json
import random
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from admin.cli import treefold
from proof.errors import ListingInvalidError
from proof.index_build import BuiltFiles, IndexEngine, LocalIndexEngine, build_files
from proof.index_parts import IndexJob
from proof.inventory import ListingScope, read_inventory
from proof.item import HashAlgorithm, Profile
from proof.listed_rows import ListedItemRules
from proof.listing import LISTED_SCHEMA
from proof.stored_index import StoredIndex
from replicator.stores.opening import open_store
from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.progress import ProgressStyle, progress_sink
from spark.bucket_index import SparkIndexEngine
from spark.errors import FolderNotSharedError
from spark.jobs import is_remote
from spark.session import spark_session
from tests.support.bucket_command import BucketCommand, write
from tests.support.listings import (
    ListedVersion,
    version_of,
    versions_by_chance,
    write_inventory,
)
from tests.support.processes import TreefoldProcess
from tests.unit.test_index_build import bits_of

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.xdist_group("spark")]

BODIES = {f"data/{number:03}": random.Random(number).randbytes(number * 7) for number in range(60)}
RULES = ListedItemRules(Profile(b"s" * 32, HashAlgorithm.MD5, ()), etags_prove=True)


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.peers)])
def test_a_verifier_proves_by_an_index_that_an_inventory_made(tmp_path: Path, engine: str) -> None:
    command = BucketCommand(tmp_path / "home")
    write(tmp_path / "source", BODIES)
    pair = (f"local:{tmp_path}/source", f"local:{tmp_path}/target")
    assert command.run("sync", *pair).status == 0
    with open_store(pair[1], may_write=False) as store:
        rows = [version_of(facts) for facts in store.lister.list_objects("")]
    manifest = write_inventory(tmp_path / "destination", rows, "CSV")
    words = ("index", pair[1], "--state", f"{tmp_path}/verifier")
    bulk = (*words, "--inventory", str(manifest))
    options = ("--engine", "spark", "--master", "local[2]") if engine == "spark" else ()
    done = command.run(*bulk, *options, "--check", "--json")
    assert (done.status, done.last["objects"], done.last["indexDamage"]) == (0, 60, [])
    assert done.last["levels"] == {"listed": 0, "recorded": 60, "read": 0}
    assert "2026-09-21T14:13:20Z: " in done.stderr
    assert " old. What changed since" in done.stderr
    again = command.run(*bulk)
    assert (again.status, "has 60 objects already" in again.stderr) == (2, True)
    # It is the index of a refresh, which finds nothing else than it has.
    refreshed = command.run(*words, "--check", "--json").last
    counts = [refreshed[name] for name in ("objects", "added", "changed", "removed", "bytesRead")]
    assert (counts, refreshed["root"]) == ([60, 0, 0, 0, 0], done.last["root"])
    assert refreshed["indexDamage"] == []
    run: tuple[str, ...] = (
        "verifier",
        "run",
        "--bucket",
        pair[1],
        "--state-folder",
        f"{tmp_path}/verifier",
    )
    (tmp_path / "verifier.toml").write_text('algorithm = "md5"\n')
    run += ("--config", f"{tmp_path}/verifier.toml", "--listen", "127.0.0.1:0", "--writes")
    with TreefoldProcess(tmp_path / "run", *run) as process:
        verifier = ("--verifier", process.address())
        proof = command.run("verify", *pair, *verifier, "--json")
        assert (proof.status, proof.last["equal"]) == (0, True)
        write(tmp_path / "source", {"data/001": b"other", "new": b"1"})
        found = command.run("verify", *pair, *verifier, "--json")
        kinds = sorted((one["kind"], one["key"]) for one in found.documents[:-1])
        assert kinds == [("changed", "data/001"), ("missing", "new")]
        synced = command.run("sync", *pair, *verifier, "--json")
        assert (synced.status, synced.last["equal"]) == (0, True)
        assert process.stop(signal.SIGTERM) == 0


@pytest.mark.peers
def test_a_server_of_spark_connect_lists_and_indexes_a_bucket(tmp_path: Path, server: str) -> None:
    write(tmp_path / "source", BODIES)
    words = ["bucket", "index", f"local:{tmp_path}/source", "--state", str(tmp_path / "state")]
    options = ["--shards", "2", "--engine", "spark", "--check", "--json"]
    options += ["--conf", f"spark.pyspark.python={sys.executable}"]
    done = CliRunner().invoke(treefold, [*words, *options], env={"SPARK_REMOTE": server})
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    told = [found[name] for name in ("objects", "engine", "indexDamage")]
    assert told == [len(BODIES), "spark", []]
    again = json.loads(CliRunner().invoke(treefold, [*words, "--json"]).stdout)
    assert [again[name] for name in ("added", "changed", "removed")] == [0, 0, 0]
    assert again["root"] == found["root"]


def built(engine: IndexEngine, manifest: Path, folder: Path, *, range_rows: int = 64) -> BuiltFiles:
    parts = read_inventory(str(manifest), ListingScope(has_versions=True)).parts
    with progress_sink(ProgressStyle()) as progress:
        return build_files(
            engine, parts, folder, RULES, disk=Disk(), progress=progress, range_rows=range_rows
        )


def bits(files: BuiltFiles, folder: Path) -> object:
    index = StoredIndex(folder, RULES.profile, disk=Disk())
    index.take_files(files.files, files.sums.derived())
    index.close()
    return bits_of(folder)


@pytest.mark.parametrize(("kind", "is_served"), [("CSV", False), ("Parquet", True)])
def test_both_engines_make_the_same_bits(
    tmp_path: Path, session: SparkSession, server: str, kind: str, is_served: bool
) -> None:
    rows = versions_by_chance(2_000)
    twice = [replace(row, modified_ms=row.modified_ms + 1, size=3) for row in rows[::9]]
    manifest = write_inventory(tmp_path, [*rows, *twice], kind, files=5)
    settings = {"spark.pyspark.python": sys.executable}
    with spark_session(server, settings=settings) if is_served else nullcontext(session) as one:
        assert is_remote(one) == is_served
        ours = built(SparkIndexEngine(one, Disk()), manifest, tmp_path / "spark")
    theirs = built(LocalIndexEngine(Disk()), manifest, tmp_path / "local")
    assert ours.ranges == theirs.ranges > 20
    assert ours.sums.repeated == len(twice)
    assert ours.sums.to_bytes() == theirs.sums.to_bytes()
    assert bits(ours, tmp_path / "a") == bits(theirs, tmp_path / "b")


def test_spark_makes_only_the_ranges_that_are_left(tmp_path: Path, session: SparkSession) -> None:
    manifest = write_inventory(tmp_path, versions_by_chance(2_000), "Parquet")
    engine, work = SparkIndexEngine(session, Disk()), tmp_path / "work"
    first = built(engine, manifest, work)
    for number in range(0, first.ranges, 2):
        (work / f"sums-{number:06}.bin").unlink()
    kept = {path: path.stat().st_ino for path in work.glob("rows-*[13579].sst")}
    second = built(engine, manifest, work)
    assert second.resumed == first.ranges // 2
    assert second.sums.to_bytes() == first.sums.to_bytes()
    assert all(path.stat().st_ino == inode for path, inode in kept.items())


def test_ranges_without_objects_have_files_too(tmp_path: Path, session: SparkSession) -> None:
    engine = SparkIndexEngine(session, Disk())
    empty = write_inventory(tmp_path / "empty", [], "CSV", files=1)
    assert built(engine, empty, tmp_path / "a").sums.count == 0
    # A sample sees keys that do not count later.
    old = [ListedVersion(f"old/{n:04}", "", is_latest=False) for n in range(900)]
    manifest = write_inventory(tmp_path / "old", [*old, ListedVersion("z", "1" * 32)], "Parquet")
    made = built(engine, manifest, tmp_path / "b")
    assert (made.sums.count, made.ranges > 5) == (1, True)
    assert bits(made, tmp_path / "index")


def test_what_is_wrong_with_a_listing_is_named(tmp_path: Path, session: SparkSession) -> None:
    manifest = write_inventory(tmp_path, versions_by_chance(300), "CSV")
    victim = tmp_path / "reports/photos/daily/data/part-1.csv.gz"
    victim.write_bytes(victim.read_bytes() + b"\0")
    engine = SparkIndexEngine(session, Disk())
    with pytest.raises(ListingInvalidError, match=r"part-1\.csv\.gz: its MD5 is") as caught:
        built(engine, manifest, tmp_path / "work")
    assert "Traceback" not in caught.value.message
    job = IndexJob(tmp_path / "unseen", RULES, ())
    advance = partial(print, end="")
    with pytest.raises(FolderNotSharedError, match="do not see"):
        engine.index_hashes(job, advance)
    (tmp_path / "unseen").mkdir()
    (tmp_path / "unseen" / "plan.json").write_text("{}")
    with pytest.raises(DiskError, match="unseen"):
        engine.index_hashes(job, advance)


def test_many_objects_travel_in_one_row_through_one_exchange(
    tmp_path: Path, session: SparkSession
) -> None:
    manifest = write_inventory(tmp_path, versions_by_chance(300), "Parquet")
    parts = read_inventory(str(manifest), ListingScope()).parts
    job = IndexJob(tmp_path, RULES, (b"b",))
    frame = SparkIndexEngine(session, Disk()).ranges_frame(job, parts, [0, 1])
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert plan.count("Exchange") == 1
    assert plan.count("MapInArrow") == 2
    assert "Sort" not in plan
    # A column of each would cost Spark a conversion of each value.
    assert "objects#" in plan
    assert not any(f"{name}#" in plan for name in LISTED_SCHEMA.names)
