"""The log of a real OM under a replication: purged, of an OM that starts again, of an
older database; what an idle follower costs. Run by `make test-ozone`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from ozone.errors import LogTrimmedError
from ozone.manager_values import BucketLayout
from replicator.stores.port import FeedPosition, Store
from tests.support.ozone import LOG_KEPT_S, OzoneCluster
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_follower import OzoneFollower
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import put
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

pytestmark = [pytest.mark.ozone(is_last=2), pytest.mark.timeout(900)]
FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED
BODY = random.Random(1).randbytes(10_000)
KEYS = [f"d/{number}" for number in range(12)]
# Bytes of a follower without changes in a minute, in both directions: 120 readings of
# some 200 bytes take 24,000, and 300 of them would take 54,000.
IDLE_BYTES_MAX = 40_000


@pytest.fixture
def buckets(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> Iterator[OzoneBuckets]:
    with OzoneBuckets(ozone_cluster, ozone_gateway) as opened:
        yield opened


@pytest.fixture
def om(ozone_cluster: OzoneCluster, buckets: OzoneBuckets) -> Iterator[OzoneCluster]:
    """An OM that may be stopped: afterwards it runs and leads as before."""

    def takes_buckets() -> bool:
        with suppress(ReconcileError):
            buckets.fresh(FLAT)
            return True
        return False

    # Other tests stop datanodes, after which the gateway cannot write for a while.
    wait_until(takes_buckets, "the gateway writes", timeout_s=120.0)
    yield ozone_cluster
    if ozone_cluster.log_kept_s != LOG_KEPT_S:
        ozone_cluster.stop_om()
        ozone_cluster.start_om()
    wait_until(takes_buckets, "the OM leads again", timeout_s=120.0)


def follower_of(buckets: OzoneBuckets, layout: BucketLayout, folder: Path) -> OzoneFollower:
    store = buckets.fresh(layout)
    for key in KEYS:
        put(store, key, BODY)
    follower = OzoneFollower.live(store, folder)
    put(store, "d/followed", BODY)
    follower.settle()
    return follower


def change(store: Store) -> None:
    """Put, overwrite, rename and delete."""
    assert store.renamer is not None
    put(store, "d/new", BODY)
    put(store, "d/0", BODY[::-1])
    assert store.writer.delete(["d/1"]) == []
    found = store.reader.facts("d/2")
    assert found is not None
    store.renamer.rename(found, "d/renamed")


def await_writes(store: Store) -> None:
    """Wait until the service takes writes again."""

    def takes_writes() -> bool:
        with suppress(ReconcileError):
            put(store, "d/up", BODY)
            return True
        return False

    wait_until(takes_writes, "the OM leads again", timeout_s=120.0)


def check_goes_on(follower: OzoneFollower) -> None:
    """The log is followed from now on."""
    follower.await_live()
    put(follower.source, "d/after", BODY[::-1])
    assert follower.settle() == len(BODY)


def test_what_an_om_has_purged_is_found_by_the_difference(
    om: OzoneCluster, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-098, OZ-103: RocksDB itself throws away what the followers have not read."""
    followers = [follower_of(buckets, layout, tmp_path / layout.name) for layout in (FLAT, TREE)]
    positions = list[FeedPosition]()
    for follower in followers:
        assert follower.source.feed is not None
        positions.append(follower.source.feed.position())
    om.stop_om()
    om.start_om(log_kept_s=2)
    await_writes(followers[0].source)
    for follower in followers:
        put(follower.source, "d/up", BODY)
        change(follower.source)
    store, manager = followers[0].source, buckets.manager

    def is_purged() -> bool:
        # A snapshot ends a file of the log; the next ones let old files go.
        name = f"ends-{time.monotonic_ns()}"
        manager.create_snapshot(*buckets.place(store), name)
        manager.delete_snapshot(*buckets.place(store), name)
        try:
            manager.updates(max(one.index for one in positions), limit=1)
        except LogTrimmedError:
            return True
        time.sleep(1)
        return False

    wait_until(is_purged, "the log is purged", timeout_s=120.0)
    for follower in followers:
        # With the object that showed that the OM leads.
        assert follower.settle() <= 4 * len(BODY)
        check_goes_on(follower)


def test_a_follower_goes_on_where_it_was_once_an_om_has_started_again(
    om: OzoneCluster, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-075: its history is the same, and nothing is compared."""
    follower = follower_of(buckets, FLAT, tmp_path)
    log = follower.position().log
    om.stop_om()
    # It waits, whatever it is asked meanwhile.
    follower.replication.run(20)
    om.start_om()
    await_writes(follower.source)
    change(follower.source)
    follower.settle()
    check_goes_on(follower)
    assert follower.position().log == log


def test_a_database_that_was_restored_is_a_gap(
    om: OzoneCluster, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-099: what it has lost is deleted, what it has instead is copied."""
    follower = follower_of(buckets, FLAT, tmp_path / "state")
    store = follower.source
    om.stop_om()
    shutil.copytree(om.om_database, tmp_path / "backup", symlinks=True)
    om.start_om()
    await_writes(store)
    for number in range(5):
        put(store, f"d/lost{number}", BODY)
    follower.settle()
    om.stop_om()
    shutil.rmtree(om.om_database)
    shutil.copytree(tmp_path / "backup", om.om_database, symlinks=True)
    om.start_om()
    await_writes(store)
    change(store)
    for number in range(12):
        put(store, f"d/more{number}", b"x")
    assert follower.settle() <= 5 * len(BODY)
    assert not [key for key in follower.target.bodies() if "lost" in key]
    check_goes_on(follower)


@dataclass(frozen=True)
class _Linked:
    om_address: str


def test_an_idle_follower_costs_little(
    ozone_cluster: OzoneCluster,
    ozone_gateway: S3Endpoint,
    tmp_path: Path,
) -> None:
    """OZ-006: by a process of its own, over links that count every byte."""
    with (
        WanLink(ozone_cluster.om_address) as om_link,
        WanLink(ozone_gateway.address) as gateway_link,
    ):
        there = gateway_link.through(ozone_gateway)
        with OzoneBuckets(_Linked(om_link.address), there) as buckets:
            store = buckets.fresh(FLAT)
            put(store, "k", BODY)
            command = [sys.executable, "-m", "admin.cli", "bucket", "sync", "--watch", "--json"]
            command += ["--state", str(tmp_path / "state"), store.address]
            command += [f"local:{tmp_path / 'target'}"]
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **there.environment},
            ) as process:
                try:
                    found = [json.loads(line)["stage"] for line in _lines(process, "LIVE")]
                    assert found[-1] == "LIVE"

                    def is_quiet() -> bool:
                        return _crossed(om_link, gateway_link, 20.0) * 3 <= IDLE_BYTES_MAX

                    # The log is that of the whole OM, which tidies up for others.
                    wait_until(is_quiet, "a minute costs little", timeout_s=240.0)
                finally:
                    process.send_signal(signal.SIGTERM)
                    process.wait(timeout=30)


def _lines(process: "subprocess.Popen[str]", stage: str) -> Iterator[str]:
    """Lines of a report, up to one of this stage."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if json.loads(line).get("stage") == stage:
            return


def _crossed(first: WanLink, second: WanLink, seconds: float) -> int:
    """Bytes over both links in this time."""
    first.reset()
    second.reset()
    time.sleep(seconds)
    return first.traffic().total.length_bytes + second.traffic().total.length_bytes
