"""Replications between two real Ozone clusters, and between one of them and S3: every
kind of change crosses in both directions, whoever is killed. Run by `make test-ozone`
and, what takes long, by `make test-long`.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from ozone.manager_values import BucketLayout
from replicator.origin import unmarked
from replicator.replication import Condition, PolicyId, Stage
from replicator.stores.errors import FeedGapError
from replicator.stores.port import ObjectProperties, Store
from tests.support.bucket_commands import BucketPair, opened, s3_address, write_all, write_large
from tests.support.mixed_load import check_order, written_again
from tests.support.ozone import OzoneCluster
from tests.support.ozone_replication import FLAT, TREE, LoadedPair, Replications, Side, two_sides
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import ANYTHING, content, current, keys, put
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ozone, pytest.mark.timeout(900)]
MIB = 1 << 20
GIVEN = ObjectProperties(metadata=(("a", "b"),), tags=(("c", "d"),))
BLUE = ObjectProperties(GIVEN.metadata, (("c", "blue"),))
# What a bucket of paths keeps, too.
ODD_PATHS = ["a b", "a%b", "%2F", "a?b=c", "\u00fc", "u\u0308", "\uff01x", "😀1", "n" * 200]
# Source and target: the cluster, and how its bucket keeps names.
DIRECTIONS = {
    "ab-flat": (0, FLAT, 1, FLAT),
    "ba-tree": (1, TREE, 0, TREE),
    "ab-tree": (0, TREE, 1, FLAT),
    "ba-flat": (1, FLAT, 0, TREE),
}


@pytest.fixture
def sides(
    ozone_cluster: OzoneCluster,
    second_ozone_cluster: OzoneCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Side, ...]]:
    with two_sides(ozone_cluster, second_ozone_cluster) as both:
        both[0].endpoint.set_environment(monkeypatch)
        yield both


def check_equal(source: str, target: str, state: Path, endpoint: S3Endpoint) -> None:
    """A proof of its own, which reads every byte on both sides; its receipt has both
    roots.
    """
    report = BucketPair(source, target, state, endpoint).verify("read")
    assert (report.exit_status, report.last["equal"]) == (0, True), report.documents
    shown = CliRunner().invoke(
        treefold, ["bucket", "receipts", "show", "--json", str(state / "receipts.jsonl")]
    )
    last = json.loads(shown.stdout.splitlines()[-1])
    assert last["source"]["root"] == last["target"]["root"]


def crossed(properties: ObjectProperties) -> ObjectProperties:
    """Properties without the mark of a copy, and without the ACL: each gateway gives
    what it writes one of its own.
    """
    return replace(properties, metadata=unmarked(properties.metadata), acl=())


def await_same_keys(source: Store, target: Store) -> None:
    wait_until(lambda: keys(source) == keys(target), "the same keys", timeout_s=60)


def await_sizes(store: Store, expected: Mapping[str, int]) -> None:
    """Wait until the store holds these objects and no others."""

    def found() -> dict[str, int]:
        return {one.key: one.size_bytes for one in store.lister.list_objects("")}

    with suppress(AssertionError):
        wait_until(lambda: found() == expected, "the same objects", timeout_s=60)
    assert found() == expected


def fill(store: Store) -> None:
    """What is there before a replication begins."""
    for key in ("d/a", "d/b", "d/e/f", "top", *ODD_PATHS):
        store.writer.put(key, key.encode() * 9, GIVEN, ANYTHING)


def change(store: Store) -> None:
    """Every kind of change that a store takes."""
    put(store, "d/a", b"again")
    store.writer.put_properties(current(store, "d/b"), BLUE, tags_only=True)
    store.writer.put("top", b"other metadata", ObjectProperties(metadata=(("x", "y"),)), ANYTHING)
    write_large(store, "parts", random.Random(4).randbytes(9 * MIB), GIVEN)
    assert store.writer.delete(["a b", "\uff01x"]) == []
    if store.renamer is not None:
        store.renamer.rename(current(store, "😀1"), "\uff01😀")
    put(store, "empty", b"")


def test_all_changes_cross_between_two_clusters_in_both_directions(
    sides: tuple[Side, ...], tmp_path: Path
) -> None:
    """OZ-001, OZ-113 to OZ-118: four replications of one syncer at once."""
    with Replications(tmp_path) as running:
        pairs = dict[str, tuple[Store, Store]]()
        for name, (ours, ours_layout, theirs, theirs_layout) in DIRECTIONS.items():
            source = sides[ours].buckets.fresh(ours_layout)
            target = sides[theirs].buckets.fresh(theirs_layout)
            fill(source)
            pairs[name] = source, target
            running.add(name, source.address, target.address)
        for name in pairs:
            running.await_stage(name, Stage.LIVE)
        for name, (source, _) in pairs.items():
            side = sides[DIRECTIONS[name][0]]
            change(source)
            if DIRECTIONS[name][1] is TREE:
                place = side.buckets.place(source)
                side.buckets.manager.rename_key(*place, "d", "other")
                put(source, "other/new")
                side.buckets.manager.rename_key(*place, "other/e", "e")
        for name, (source, target) in pairs.items():
            running.await_settled(name, source)
            assert keys(target) == keys(source)
            state = tmp_path / f"state-{name}"
            check_equal(source.address, target.address, state, sides[0].endpoint)
            for key in keys(source):
                ours_then = source.reader.properties(key)
                assert crossed(target.reader.properties(key)) == crossed(ours_then)
            assert crossed(target.reader.properties("parts")) == GIVEN


@pytest.mark.parametrize(
    "layout",
    [pytest.param(FLAT, id="names"), pytest.param(TREE, id="paths", marks=pytest.mark.long)],
)
def test_what_s3_has_comes_to_ozone_and_back(
    ozone_cluster: OzoneCluster,
    ministack_server: S3Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: BucketLayout,
) -> None:
    """From a store without a log by listings, from one with a log live. One cluster
    does: the other side is another store.
    """
    ministack_server.set_environment(monkeypatch)
    first, last = (s3_address(ministack_server.fresh_bucket()) for _ in range(2))
    with (
        two_sides(ozone_cluster) as (side,),
        Replications(tmp_path) as running,
        opened(first, ministack_server) as source,
        opened(last, ministack_server) as target,
    ):
        middle = side.buckets.fresh(layout)
        if layout is FLAT:
            write_all(source, keeps_headers=False)
        fill(source)
        running.add("there", first, middle.address, interval_s=1.0)
        running.add("back", middle.address, last)
        running.await_stage("back", Stage.LIVE)
        await_same_keys(source, middle)
        change(source)
        await_same_keys(source, middle)
        wait_until(
            lambda: (
                content(middle, current(middle, "d/a")) == b"again"
                and middle.reader.properties("d/b").tags == BLUE.tags
            ),
            "the changes of objects",
            timeout_s=60,
        )
        running.await_settled("back", middle)
        for pair in ((first, middle.address), (middle.address, last), (first, last)):
            check_equal(*pair, tmp_path / f"state-{hash(pair)}", side.endpoint)
        for key in keys(source):
            given = source.reader.properties(key)
            for there in (middle, target):
                found = there.reader.properties(key)
                assert (unmarked(found.metadata), found.tags) == (given.metadata, given.tags), key


def test_a_place_in_the_log_of_one_cluster_is_none_in_that_of_another(
    sides: tuple[Side, ...],
) -> None:
    """OZ-098: names and numbers of both may be alike."""
    source, target = (side.buckets.fresh(FLAT) for side in sides)
    assert source.feed is not None
    assert target.feed is not None
    with pytest.raises(FeedGapError):
        target.feed.read(source.feed.position())


def run(address: str, *words: str) -> tuple[int, dict[str, Any]]:
    """A command of an operator: its exit status and data."""
    done = CliRunner().invoke(treefold, ["bucket", *words, "--json", "--master", address])
    document = json.loads(done.stdout)
    return done.exit_code, document["data"] or {"errors": document["errors"]}


def test_a_cluster_is_lost_and_all_comes_back(sides: tuple[Side, ...], tmp_path: Path) -> None:
    """OZ-148 to OZ-151: what is missing is named, clients write at the other cluster,
    and what they wrote comes back.
    """
    source, target = sides[0].buckets.fresh(FLAT), sides[1].buckets.fresh(TREE)
    with Replications(tmp_path) as running:
        at = running.address
        fill(source)
        running.add("p1", source.address, target.address)
        running.await_stage("p1", Stage.LIVE)
        running.await_settled("p1", source)
        assert run(at, "pause", "p1")[0] == 0
        client = running.client
        wait_until(
            lambda: client.replication(PolicyId("p1")).condition is Condition.PAUSED, "the pause"
        )
        put(source, "missing", b"not replicated")
        put(source, "top", b"older, not replicated")
        status, planned = run(at, "failover", "p1", "--dry-run")
        assert status == 0
        assert [one["key"] for one in planned["missing"]["changes"]] == ["missing", "top"]
        status, done = run(at, "failover", "p1", "--yes")
        assert (status, done["isFenced"]) == (3, True)
        # Newer by the second.
        time.sleep(1.1)
        put(target, "top", b"newer, of the target")
        put(target, "new/one", b"of the target")
        put(source, "late", b"of a client that has not moved")
        status, begun = run(at, "failback", "p1", "--yes")
        assert status == 0, begun

        def is_back() -> bool:
            return run(at, "failback", "p1", "--finish", "--dry-run")[0] == 0

        wait_until(is_back, "all to be back, and proven", timeout_s=120)
        assert run(at, "failback", "p1", "--finish", "--yes")[0] == 0
        found = {key: content(source, current(source, key)) for key in keys(source)}
        assert found["top"] == b"newer, of the target"
        assert found["new/one"] == b"of the target"
        assert found["missing"] == b"not replicated"
        assert found["late"] == b"of a client that has not moved"
        assert run(at, "resume", "p1")[0] == 0
        put(source, "after", b"the failback")
        wait_until(lambda: keys(source) == keys(target), "what came after", timeout_s=120)
        check_equal(source.address, target.address, tmp_path / "state", sides[0].endpoint)


@pytest.mark.long
def test_the_demo_runs_between_two_clusters_and_leaves_nothing(sides: tuple[Side, ...]) -> None:
    stores = [side.buckets.fresh(layout) for side, layout in zip(sides, (FLAT, TREE), strict=True)]
    addresses = [store.address for store in stores]
    command = [sys.executable, "-m", "admin.cli", "bucket", "demo", "--objects", "20", "--check"]
    done = subprocess.run(
        [*command, "--json", "--ozone", *addresses], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)["replication"]
    assert found["changes"] > 100
    assert (found["damaged"], found["repaired"]) == (["archive/00007.jpg"], True)
    assert found["stoppedItself"]
    assert found["equal"]
    assert found["bytesEqual"]
    for side, store in zip(sides, stores, strict=True):
        assert keys(store) == []
        names = [
            one.name
            for one in side.buckets.manager.snapshots(*side.buckets.place(store))
            if one.is_active
        ]
        assert names == []
    put(stores[1], "somebody's")
    refused = subprocess.run(
        [*command, "--ozone", *addresses], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    assert keys(stores[1]) == ["somebody's"]


# Of `make test-long`. Whoever looks for more chooses others.
KILLS = int(os.environ.get("OZONE_KILLS", "200"))
SEED = int(os.environ.get("OZONE_KILLS_SEED", "1"))


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(4, 0, id="some"),
        pytest.param(KILLS, SEED, id="many", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_a_syncer_killed_at_any_time_loses_nothing_and_repeats_no_state(
    sides: tuple[Side, ...], tmp_path: Path, kills: int, seed: int
) -> None:
    """OZ-040, OZ-048: two replications in opposite directions under a mixed load. Every
    change of every key is read from the target's own log.
    """
    chance = random.Random(seed)
    with Replications(tmp_path, syncers=2) as running, ExitStack() as stack:
        # By paths, where folders are renamed, and by names.
        pairs = {
            name: stack.enter_context(LoadedPair(ours, theirs, layout, seed))
            for name, ours, theirs, layout in (
                ("there", sides[0], sides[1], TREE),
                ("back", sides[1], sides[0], FLAT),
            )
        }
        for name, pair in pairs.items():
            running.add(name, pair.source.address, pair.target.address)
            pair.load.start(2, pause_s=0.05)
        for _ in range(kills):
            name = chance.choice(list(pairs))
            wait_until(lambda one=name: bool(running.holder(one)), "a syncer has it")
            time.sleep(chance.uniform(0.0, 1.5))
            running.kill(running.holder(name) or "syncer-0")
        for pair in pairs.values():
            pair.load.end()
        for name, pair in pairs.items():
            running.await_settled(name, pair.source)
            # Nothing lost, nothing twice, no key in a state that it had left. An OM
            # answers before its log has what it did.
            await_sizes(pair.target, pair.load.held)
            what = f"{name}: what the log says"
            wait_until(lambda pair=pair: pair.watch.held == pair.load.held, what, timeout_s=60)
            pair.watch.end()
            # What was on its way at a kill may be written again, as it is already.
            assert len(written_again(pair.load, pair.watch)) <= kills
            check_order(pair.load.histories, pair.watch.histories)
            addresses = pair.source.address, pair.target.address
            check_equal(*addresses, tmp_path / f"state-{name}", sides[0].endpoint)
            assert all(pair.load.done[kind] for kind in ("put", "delete", "rename", "tag"))
