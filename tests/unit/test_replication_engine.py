"""A replication brings a target to its source, follows it, and survives what happens."""

from pathlib import Path

from replicator.replication import Condition, Stage
from replicator.stores.port import ObjectProperties
from tests.support.memory_store import MemoryStore
from tests.support.replications import Replication


def pair(**choices: bool) -> tuple[MemoryStore, MemoryStore]:
    return MemoryStore("memory:a", has_feed=True, **choices), MemoryStore("memory:b", renames=True)


def held(store: MemoryStore) -> dict[str, tuple[bytes, ObjectProperties]]:
    return {key: (one.body, one.properties) for key, one in store.objects.items()}


def test_what_was_there_arrives_and_then_what_changes(tmp_path: Path) -> None:
    """OZ-026, OZ-101."""
    source, target = pair(has_snapshots=True)
    for number in range(40):
        source.write(f"k{number}", b"old")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.step()
    source.write("k1", b"new")
    source.remove("k2")
    source.write("late", b"late")
    replication.run(40)
    assert held(target) == held(source)
    report = replication.engine.report()
    assert report.checkpoint.stage is Stage.LIVE
    assert report.condition is Condition.ACTIVE
    source.remove("k3")
    source.write("later", b"later")
    replication.run(20)
    assert held(target) == held(source)
    assert replication.engine.report().checkpoint.position is not None
