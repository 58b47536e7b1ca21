"""A copy carries the write that it comes from, and counts as that write."""

from dataclasses import replace
from pathlib import Path

import pytest

from proof.item import EvidenceLevel
from replicator.origin import ORIGIN_NAME, OriginMarks, bucket_digest
from replicator.replication import ReplicationOptions
from replicator.stores.port import ObjectProperties
from replicator.verify import KeyDifferenceKind, VerifiedKey
from replicator.way_back import newer_at_source
from tests.support.memory_store import MEMORY, MemoryStore
from tests.support.replications import Replication

TIME_MS = 1_700_000_000_123


def no_digest(_properties: ObjectProperties) -> bytes:
    return b""


def marks_of(store: MemoryStore) -> OriginMarks:
    return OriginMarks(store.store(), no_digest)


def copied(folder: Path) -> tuple[MemoryStore, MemoryStore]:
    """An object and its copy, which is 5 s younger."""
    source = MemoryStore("memory:a", has_feed=True, now_ms=lambda: TIME_MS)
    target = MemoryStore("memory:b", has_feed=True, now_ms=lambda: TIME_MS + 5_000)
    source.write("k", b"body", ObjectProperties(metadata=(("a", "b"),)))
    options = ReplicationOptions(newest_wins=True)
    replication = Replication(source.store(), target.store(), folder, options=options)
    replication.run(30)
    replication.engine.close()
    return source, target


def test_a_copy_counts_as_the_write_that_it_comes_from(tmp_path: Path) -> None:
    """OZ-158: however often it is copied on."""
    source, target = copied(tmp_path / "one")
    ours = marks_of(source).read(source.objects["k"].facts)
    theirs = marks_of(target).read(target.objects["k"].facts)
    assert (ours.bucket, ours.written_ms) == (bucket_digest("memory:a"), TIME_MS)
    assert theirs == replace(ours, is_copy=True)
    third = MemoryStore("memory:c", now_ms=lambda: TIME_MS + 9_000)
    Replication(target.store(), third.store(), tmp_path / "two").run(30)
    assert marks_of(third).read(third.objects["k"].facts) == theirs


def test_what_a_client_makes_of_a_copy_is_a_write_of_its_own(tmp_path: Path) -> None:
    """It took the copy's metadata with it: another key, or another size."""
    _, target = copied(tmp_path)
    taken = target.objects["k"].properties
    for key, body in (("other", b"body"), ("k", b"longer body")):
        target.write(key, body, taken)
        found = marks_of(target).read(target.objects[key].facts)
        assert not found.is_copy
        assert (found.bucket, found.written_ms) == (bucket_digest("memory:b"), TIME_MS + 5_000)


@pytest.mark.parametrize("mark", ["", "x", "1.2.3.4.5", "9" * 40, "1700000000000.a.b.4.c"])
def test_a_mark_that_is_none_is_passed_over(mark: str) -> None:
    store = MemoryStore(now_ms=lambda: TIME_MS)
    store.write("k", b"body", ObjectProperties(metadata=((ORIGIN_NAME, mark),)))
    assert not marks_of(store).read(store.objects["k"].facts).is_copy


def test_a_store_of_whole_seconds_never_tells_more() -> None:
    """Its listing may, and its answers about one object do not."""
    whole = replace(MEMORY, tells_whole_seconds=True)
    store = MemoryStore(capabilities=whole, now_ms=lambda: TIME_MS)
    facts = store.write("k", b"body")
    for modified_ms in (TIME_MS, TIME_MS // 1000 * 1000):
        found = marks_of(store).of(replace(facts, modified_ms=modified_ms), ObjectProperties())
        assert found.written_ms == TIME_MS // 1000 * 1000


@pytest.mark.parametrize("newest_wins", [False, True])
def test_a_mark_without_room_is_left_out_only_one_way(newest_wins: bool, tmp_path: Path) -> None:
    """Two ways it could lose a newer write: then the key is not copied, and named."""
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    room = MEMORY.metadata_bytes_max - len("full")
    source.write("k", b"body", ObjectProperties(metadata=(("full", "x" * room),)))
    options = ReplicationOptions(newest_wins=newest_wins)
    replication = Replication(source.store(), target.store(), tmp_path, options=options)
    replication.run(30)
    assert ("k" in target.objects) is not newest_wins
    assert (replication.engine.report().failed == 1) is newest_wins


def test_a_way_back_keeps_what_was_written_before_an_older_copy_came(tmp_path: Path) -> None:
    """OZ-151: the copy at the target is younger than the object of the source."""
    source, target = copied(tmp_path)
    source._now_ms = lambda: TIME_MS + 2_000
    newer = source.write("k", b"newer")
    level, kind = EvidenceLevel.RECORDED, KeyDifferenceKind.CHANGED
    is_kept = newer_at_source(target.store(), source.store())
    assert is_kept(VerifiedKey("k", target.objects["k"].facts, newer, level, kind))
    theirs = target.write("k", b"of the target")
    assert not is_kept(VerifiedKey("k", theirs, newer, level, kind))


def test_an_old_state_that_comes_late_does_not_return(tmp_path: Path) -> None:
    """OZ-155, OZ-158: nor does what was deleted meanwhile at its origin."""
    source, target = copied(tmp_path / "there")
    source._now_ms = lambda: TIME_MS + 2_000
    source.write("k", b"newer")
    options = ReplicationOptions(newest_wins=True)
    back = Replication(target.store(), source.store(), tmp_path / "back", options=options)
    back.run(100)
    assert source.bodies() == {"k": b"newer"}
    target.write("late", b"late")
    back.run(30)
    assert source.bodies() == {"k": b"newer", "late": b"late"}
    source.remove("late")
    back.run(3_000, seconds=1.0)
    assert source.bodies() == {"k": b"newer"}
