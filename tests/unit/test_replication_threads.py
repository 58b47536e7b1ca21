"""A replication in its threads follows orders soon, also in the middle of an object."""

import time
from pathlib import Path

from replicator.copier import CopierLimits
from replicator.copy_task import CopyLimits
from replicator.replication import (
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationOptions,
    SyncerId,
)
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.lease import LocalLease
from replicator.syncer.limits import EngineLimits
from replicator.syncer.threads import ReplicationThreads
from runtime.rate_limit import SystemClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_until

SLOW = ReplicationOptions(bytes_per_second=1 << 20)
BIG = bytes(12 << 20)


def test_a_pause_and_a_new_rate_count_at_once(tmp_path: Path) -> None:
    """OZ-130, OZ-152: 12 MiB at 1 MiB/s take 12 s; a pause takes effect within 2 s."""
    source = MemoryStore("memory:a", has_feed=True, has_snapshots=True)
    target = MemoryStore("memory:b")
    source.write("big", BIG)
    policy = Policy(PolicyId("p"), "memory:a", "memory:b", options=SLOW)
    engine = ReplicationEngine(
        policy,
        source.store(),
        target.store(),
        parent=tmp_path,
        syncer=SyncerId("s"),
        lease=LocalLease(),
        checkpoint=None,
        clock=SystemClock(),
        limits=EngineLimits(
            copier=CopierLimits(objects=2, parts=2), copy=CopyLimits(part_bytes=1 << 20)
        ),
    )
    paused = Policy(
        PolicyId("p"), "memory:a", "memory:b", options=SLOW, desired=DesiredState.PAUSED
    )
    with ReplicationThreads(engine, "test") as threads:
        wait_until(lambda: target.payload >= 2 << 20, "some parts")
        began_s = time.monotonic()
        engine.change(paused)
        wait_until(lambda: engine.report().condition is Condition.PAUSED, "a pause")
        assert time.monotonic() - began_s <= 2
        sent = target.payload
        assert sent < len(BIG)
        time.sleep(0.5)
        assert target.payload == sent
        began_s = time.monotonic()
        # As fast as it can: a new rate counts for what is on its way.
        engine.change(Policy(PolicyId("p"), "memory:a", "memory:b"))
        wait_until(lambda: "big" in target.objects, "the object")
        assert time.monotonic() - began_s <= 4
        assert threads.is_alive()
    assert target.payload == len(BIG)
    assert target.objects["big"].body == BIG
