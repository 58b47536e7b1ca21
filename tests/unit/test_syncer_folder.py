"""The folder of one replication is told apart from others, and refused to others."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.replication import (
    Checkpoint,
    Condition,
    ReplicationFault,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition, SnapshotFacts
from replicator.stores.probe_memory import PROBE_CHARACTERS_MAX
from replicator.syncer.folder import LOCK_FILE, SyncerFolder, folder_name, syncer_id
from replicator.syncer.target_probe import ProbeRecord
from runtime.disk import Disk, Operation
from runtime.errors import BusyError, ConfigError
from tests.support.disk import FailingDisk
from tests.support.replications import StepClock

A, B = "ozone://om:9862/vol-1/b", "ozone://far:9862/vol/1-b"
names = st.text("ab-/%", min_size=1, max_size=6).filter(lambda text: text.strip("/"))


def opened(parent: Path, *, syncer: str = "s1", source: str = A, target: str = B) -> SyncerFolder:
    return SyncerFolder(parent, syncer=SyncerId(syncer), source=source, target=target)


def test_the_name_has_the_parts_of_both_addresses() -> None:
    """OZ-137."""
    name = folder_name(A, B)
    assert name == "ozone%3A-om%3A9862-vol%2D1-b--ozone%3A-far%3A9862-vol-1%2Db"


@given(names, names, names, names)
def test_no_two_pairs_share_a_name(one: str, two: str, three: str, four: str) -> None:
    """OZ-137: dashes in a part are no dashes between parts."""

    def parts(source: str, target: str) -> tuple[list[str], list[str]]:
        return [p for p in source.split("/") if p], [p for p in target.split("/") if p]

    is_same = parts(one, two) == parts(three, four)
    assert (folder_name(one, two) == folder_name(three, four)) == is_same


def test_a_long_name_is_cut_and_stays_the_pairs_own() -> None:
    long = [folder_name(f"s3://{'x' * 300}{end}", B) for end in "ab"]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 255


def test_a_folder_of_another_syncer_or_pair_is_refused(tmp_path: Path) -> None:
    """OZ-138."""
    opened(tmp_path).close()
    opened(tmp_path).close()
    with pytest.raises(ConfigError, match="another syncer"):
        opened(tmp_path, syncer="s2")


def test_it_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    """OZ-143."""
    folder = opened(tmp_path)
    assert (folder.path / LOCK_FILE).exists()
    with pytest.raises(BusyError):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    """OZ-139 to OZ-142."""
    position = FeedPosition("om1", 1 << 60)
    checkpoint = Checkpoint(
        Stage.INCREMENTAL,
        SnapshotFacts("a", "1", position, 5),
        SnapshotFacts("b", "2", None, 6),
        "ü/key",
        position,
        ("a/", "b/"),
        has_failed=True,
    )
    with opened(tmp_path) as folder:
        assert folder.checkpoint() is None
        folder.save(checkpoint)
    with opened(tmp_path) as folder:
        assert folder.checkpoint() == checkpoint
        folder.save(Checkpoint())
        assert folder.checkpoint() == Checkpoint()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"stage": "NOW"}', "null", '{"a": 1e999}'])
def test_a_damaged_checkpoint_is_named(text: str, tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.save(Checkpoint())
        (folder.path / "checkpoint").write_text(text)
        with pytest.raises(ConfigError, match="is damaged"):
            folder.checkpoint()


def test_its_end_leaves_the_others(tmp_path: Path) -> None:
    """OZ-050."""
    other = opened(tmp_path, target="s3://b")
    opened(tmp_path).remove()
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()


def test_a_syncer_keeps_its_identity(tmp_path: Path) -> None:
    """OZ-035."""
    first = syncer_id(tmp_path / "one", Disk())
    assert syncer_id(tmp_path / "one", Disk()) == first
    assert syncer_id(tmp_path / "two", Disk()) != first
    (tmp_path / "one" / "syncer_uuid").write_text("no")
    with pytest.raises(ConfigError):
        syncer_id(tmp_path / "one", Disk())


def test_a_record_of_the_target_that_cannot_be_written_is_said_and_no_old_one_is_left(
    tmp_path: Path,
) -> None:
    """The next process must not take an old word for the newest one."""
    path, clock, fails = tmp_path / "target-probe", StepClock(), [False]
    disk = FailingDisk(
        errno.ENOSPC, lambda operation, _: fails[0] and operation is not Operation.REMOVE
    )
    record = ProbeRecord(path, disk, clock)
    fine = ReplicationReport(Condition.ACTIVE, Checkpoint())
    record.keep("old")
    assert (path.read_text(), record.told(fine)) == ("old", fine)
    fails[0] = True
    record.keep("new")
    assert not path.exists()
    told = record.told(fine)
    assert (told.condition, told.fault) == (Condition.ACTIVE, ReplicationFault.LOCAL_DISK)
    assert "target-probe" in told.message
    worse = replace(fine, fault=ReplicationFault.TARGET_FULL)
    assert record.told(worse) == worse
    # It is tried again, and not at each look.
    tries = len(disk.failed)
    record.keep("new")
    assert len(disk.failed) == tries
    fails[0] = False
    clock.pass_s(61)
    record.keep("new")
    assert ProbeRecord(path, disk, clock).text == "new"
    assert record.told(fine) == fine


def test_a_record_of_the_target_that_is_too_long_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "target-probe"
    path.write_bytes(bytes(PROBE_CHARACTERS_MAX + 1))
    assert ProbeRecord(path, Disk(), StepClock()).text == ""
