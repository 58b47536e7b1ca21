"""A real process that syncs buckets is killed, again and again, or its link is cut."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replicator.copy_task import CopyLimits
from replicator.ledger import PairLedger
from replicator.stores.local import LocalBucket
from replicator.stores.port import ObjectProperties, Store
from runtime.disk import Disk
from tests.support.bucket_commands import (
    BucketPair,
    digest,
    held,
    opened,
    s3_address,
    write_large,
)
from tests.support.bucket_sync import LIMITS
from tests.support.processes import ROOT
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import ANYTHING, content
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

pytestmark = [pytest.mark.e2e, pytest.mark.crashes]

PROPERTIES = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))
# The longest that one run may work before it is killed, and how often it is.
LIFE_S = 0.6
KILLS = 8
RUN_S = 120
# Of the one large object that is cut. Heads of its parts cross besides, and the probe.
PART = CopyLimits().part_bytes
CUT_PARTS = 5
HEADS_BYTES = 60_000


def fill(store: Store, rng: random.Random) -> dict[str, bytes]:
    """Small and large objects, some of them changed in a byte."""
    bodies = {f"dir/k{number}": rng.randbytes(rng.randrange(3_000)) for number in range(150)}
    bodies |= {f"large{number}": rng.randbytes(20 * LIMITS.part_bytes) for number in range(3)}
    for key, body in bodies.items():
        store.writer.put(key, body, PROPERTIES, ANYTHING)
    return bodies


def child(tmp_path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.support.sync_process", str(tmp_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_many_times_it_leaves_the_target_equal_and_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(7)
    with LocalBucket(tmp_path / "source", Disk(), create=True) as bucket:
        wanted = fill(bucket.store(), rng)
    killed, partly = 0, False
    for _ in range(KILLS):
        with child(tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            try:
                process.wait(rng.uniform(0, LIFE_S))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                killed += 1
        with LocalBucket(tmp_path / "target", Disk()) as bucket:
            partly |= 0 < len(list(bucket.store().lister.list_objects(""))) < len(wanted)
    with child(tmp_path) as process:
        said, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 0
    assert "'equal': True" in said
    assert "'failed': []" in said
    assert killed
    assert partly
    with LocalBucket(tmp_path / "target", Disk()) as bucket:
        store = bucket.store()
        held = {one.key: content(store, one) for one in store.lister.list_objects("")}
        assert held == wanted
        assert {store.reader.properties(key) for key in held} == {PROPERTIES}
        # One that was being begun when the process ended has no parts.
        for key, upload in store.upload_reader.uploads(""):
            assert list(store.upload_reader.parts(key, upload)) == []
    with PairLedger(
        tmp_path / "state", source=f"local:{tmp_path}/source", target=f"local:{tmp_path}/target"
    ) as ledger:
        assert ledger.upload_keys() == []


def body_bytes(link: WanLink) -> int:
    """What has crossed of objects and parts, with their heads."""
    kinds = link.traffic().kinds
    bodies = ("PUT object", "PUT object?uploadId")
    return sum(kinds[kind].bytes_to for kind in kinds if kind in bodies)


@pytest.mark.parametrize(
    ("in_parts", "share"), [(True, 0.15), (True, 0.5), (True, 0.85), (False, 0.5)]
)
@pytest.mark.parametrize("what", ["process", "link"])
def test_of_a_large_object_that_is_cut_no_more_than_one_part_crosses_twice(
    what: str, in_parts: bool, share: float, ministack_server: S3Endpoint, tmp_path: Path
) -> None:
    """Unless its source has it of one PUT. Then it goes in parts after the cut."""
    body = random.Random(5).randbytes(CUT_PARTS * PART)
    source, target = f"local:{tmp_path}/source", ministack_server.fresh_bucket()
    with opened(source, ministack_server) as store:
        if in_parts:
            write_large(store, "large", body, PROPERTIES)
        else:
            store.writer.put("large", body, PROPERTIES, ANYTHING)
    with WanLink(ministack_server.address, delay_ms=10, mbit=400) as link:
        address = s3_address(target, link.through(ministack_server))
        commands = BucketPair(source, address, tmp_path / "state", ministack_server)
        with subprocess.Popen(
            commands.sync_process(),
            cwd=ROOT,
            env={**os.environ, **ministack_server.environment},
            stdout=subprocess.DEVNULL,
        ) as process:
            wait_until(lambda: body_bytes(link) >= share * len(body), "a part of it to cross")
            assert process.poll() is None, "it ended before it was cut"
            if what == "process":
                process.send_signal(signal.SIGKILL)
            else:
                link.cut()
                link.mend()
            process.wait(RUN_S)
        assert commands.sync().last["equal"]
        twice = PART if in_parts else len(body)
        assert body_bytes(link) <= len(body) + twice + HEADS_BYTES
        parts = link.traffic().kinds["PUT object?uploadId"].bytes_to
        assert parts >= len(body)
    found = held(target)
    assert {key: one.body for key, one in found.items()} == {"large": digest(body)}
