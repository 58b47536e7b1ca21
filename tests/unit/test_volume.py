"""Volumes: found by their own VERSION, held as reader or as owner, junk passed over."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError, VolumeError, VolumeLockedError
from ozone.rocks import Counter, OzoneTable, container_prefix
from ozone.volume import Hold, Version, Volume, container_of_folder, open_volume, parse_version
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError
from tests.support.volumes import VERSION, new_volume, owned, tree_of_files, unpack, write_block

ONE = ContainerId(1)
CLUSTER = "CID-056d567a-6a15-4ecb-8e1d-7c1ff190646a"


def opened(path: Path, hold: Hold = Hold.READ_ONLY, *, databases: tuple[Path, ...] = ()) -> Volume:
    state = path.parent / "state"
    return open_volume(path, hold=hold, state_folder=state, disk=Disk(), database_volumes=databases)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A volume that a real datanode wrote, free to be written to."""
    return unpack("healthy", tmp_path / "healthy") / "dn1" / "volume1"


def test_version_is_read_as_java_properties() -> None:
    raw = (
        b"#Fri Aug 22\n! note\n clusterID ="
        b" CID-1\nlayOutVersion=1\r\nstorageID=DS-1\ndatanodeUuid=a-b\nctime=5\n\n"
    )
    assert parse_version(raw) == Version("DS-1", "CID-1", "a-b", created_ms=5)


@pytest.mark.parametrize(
    "ctime", ["", "ctime=", "ctime=0", "ctime=-5", "ctime=soon", "ctime=1e9", "ctime=" + 15 * "9"]
)
def test_a_volume_that_does_not_say_since_when_it_exists_is_one_all_the_same(ctime: str) -> None:
    raw = f"clusterID=CID-1\nlayOutVersion=1\nstorageID=DS-1\ndatanodeUuid=a-b\n{ctime}\n"
    assert parse_version(raw.encode()).created_ms is None


@pytest.mark.parametrize(
    "change",
    [
        (b"layOutVersion=1", b"layOutVersion=2"),
        (b"layOutVersion=1\n", b""),
        (b"storageID=DS-1", b"storageID="),
        (b"storageID=DS-1", b"storageID=../../etc"),
        (b"clusterID=CID-1", b"clusterID=a/b"),
        (b"clusterID=CID-1", b"other=CID-1"),
        (b"datanodeUuid=a-b\n", b""),
    ],
)
def test_a_version_that_says_too_little_is_refused(change: tuple[bytes, bytes]) -> None:
    raw = b"clusterID=CID-1\nlayOutVersion=1\nstorageID=DS-1\ndatanodeUuid=a-b\n"
    assert change[0] in raw
    with pytest.raises(VolumeError):
        parse_version(raw.replace(*change))


@pytest.mark.parametrize("below", ["", "hdds"])
def test_a_volume_is_found_by_its_root_or_by_hdds_below_it(root: Path, below: str) -> None:
    before = tree_of_files(root)
    with open_volume(
        root / below, hold=Hold.READ_ONLY, state_folder=root.parent / "state", disk=Disk()
    ) as volume:
        assert volume.root == root
        assert volume.cluster_id == CLUSTER
        assert volume.datanode_id == "aabf944d-9c67-4a21-85c6-bd496e7ea31c"
        assert volume.storage_id == "DS-bcf6981d-a58f-4570-aecd-6de2aa4fbdef"
        assert volume.container_ids() == [1, 2, 3, 4, 5, 6]
        assert volume.database.get_long(ONE, Counter.BLOCK_COUNT) == 6
    assert tree_of_files(root) == before


def test_a_volume_named_by_its_scm_is_found_if_it_is_the_only_one(root: Path) -> None:
    (root / "hdds" / CLUSTER).rename(root / "hdds" / "0c5fdb7a-scm")
    (root / "hdds" / "tmp").mkdir()
    with opened(root) as volume:
        assert volume.container_ids() == [1, 2, 3, 4, 5, 6]
        assert volume.database.get_long(ONE, Counter.BLOCK_COUNT) == 6
    (root / "hdds" / "another").mkdir()
    with pytest.raises(VolumeError) as refused:
        opened(root)
    assert refused.value.facts["reason"] == "no_working_folder"


def test_the_database_may_lie_on_a_volume_of_its_own(root: Path, tmp_path: Path) -> None:
    storage = next((root / "hdds" / CLUSTER).glob("DS-*"))
    elsewhere = tmp_path / "fast" / "db" / CLUSTER / storage.name
    elsewhere.parent.mkdir(parents=True)
    storage.rename(elsewhere)
    with opened(root) as volume, pytest.raises(DatabaseError):
        volume.database.get_long(ONE, Counter.BLOCK_COUNT)
    with opened(root, databases=(tmp_path / "slow", tmp_path / "fast")) as volume:
        assert volume.database.get_long(ONE, Counter.BLOCK_COUNT) == 6


def test_entries_that_are_no_container_are_passed_over(root: Path) -> None:
    current = root / "hdds" / CLUSTER / "current"
    (current / "a file").write_bytes(b"junk")
    (current / "containerDir0" / "12").write_bytes(b"a file, not a folder")
    (current / "containerDir0" / "007").mkdir()
    (current / "containerDir0" / "seven").mkdir()
    (current / "containerDir0" / "-7").mkdir()
    (current / "containerDir0" / "99999999999999999999").mkdir()
    (current / "containerDir0" / "13").symlink_to(current / "containerDir0" / "1")
    (current / "containerDir0" / "\u0662").mkdir()
    with opened(root) as volume:
        assert volume.container_ids() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("container_id", "group"), [(100, 0), (511, 0), (512, 1), (131_071, 255), (131_072, 0)]
)
def test_containers_lie_in_groups_by_their_id(root: Path, container_id: int, group: int) -> None:
    with opened(root) as volume:
        assert volume.usual_folder(ContainerId(container_id)).parent.name == f"containerDir{group}"


def test_a_container_in_an_unusual_place_is_found_and_the_usual_place_counts(root: Path) -> None:
    current = root / "hdds" / CLUSTER / "current"
    (current / "containerDir9").mkdir()
    shutil.copytree(current / "containerDir0" / "1", current / "containerDir9" / "1")
    (current / "containerDir0" / "2").rename(current / "containerDir9" / "2")
    with opened(root) as volume:
        assert volume.container_ids() == [1, 2, 3, 4, 5, 6]
        assert volume.container_folder(ONE) == current / "containerDir0" / "1"
        assert volume.container_folder(ContainerId(2)) == current / "containerDir9" / "2"
        with pytest.raises(ContainerNotFoundError):
            volume.container_folder(ContainerId(7))


def test_a_folder_is_known_as_a_container_by_where_it_lies(root: Path) -> None:
    folder = root / "hdds" / CLUSTER / "current" / "containerDir0" / "3"
    assert container_of_folder(folder) == (root, 3)
    assert container_of_folder(folder / "chunks") is None
    assert container_of_folder(root) is None
    assert container_of_folder(Path("/3")) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("no hdds", "no_hdds"),
        ("hdds is a file", "no_hdds"),
        ("unthinkable path", "no_hdds"),
        ("no VERSION", "no_version"),
        ("VERSION is a folder", "no_version"),
        ("empty VERSION", "layout_version"),
        ("state in volume", "state_in_volume"),
    ],
)
def test_what_is_no_volume_is_refused_by_name(root: Path, damage: str, reason: str) -> None:
    version = root / "hdds" / "VERSION"
    state = root.parent / "state"
    match damage:
        case "no hdds":
            shutil.rmtree(root / "hdds")
        case "hdds is a file":
            shutil.rmtree(root / "hdds")
            (root / "hdds").write_bytes(b"")
        case "unthinkable path":
            # As if it were forbidden, which nothing is to root.
            root /= "x" * 300
        case "no VERSION":
            version.unlink()
        case "VERSION is a folder":
            version.unlink()
            version.mkdir()
        case "empty VERSION":
            version.write_bytes(b"")
        case _:
            state = root / "hdds" / "state"
    with pytest.raises(VolumeError) as refused:
        open_volume(root, hold=Hold.READ_ONLY, state_folder=state, disk=Disk())
    assert refused.value.facts["reason"] == reason


def test_a_volume_without_a_database_still_has_its_containers(root: Path) -> None:
    shutil.rmtree(next((root / "hdds" / CLUSTER).glob("DS-*")))
    for hold in Hold:
        with opened(root, hold) as volume:
            assert volume.container_ids() == [1, 2, 3, 4, 5, 6]
            with pytest.raises(DatabaseError):
                volume.database.get(OzoneTable.METADATA, b"any")


_HOLD = """
import sys
from pathlib import Path
from runtime.disk import Disk
from ozone.volume import Hold, open_volume
root, state = Path(sys.argv[1]), Path(sys.argv[2])
volume = open_volume(root, hold=Hold.OWNER, state_folder=state, disk=Disk())
print("held", flush=True)
sys.stdin.read()
"""


def test_an_owner_keeps_other_owners_out_and_lets_readers_in(root: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(root), str(tmp_path / "theirs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(VolumeLockedError) as refused:
            opened(root, Hold.OWNER)
        assert refused.value.facts["pid"] == holder.pid
        with opened(root) as volume:
            assert volume.container_ids() == [1, 2, 3, 4, 5, 6]
        # Killed, not closed: its locks go with it.
        holder.kill()
        holder.wait()
    with opened(root, Hold.OWNER) as volume:
        assert volume.database.get_long(ONE, Counter.BLOCK_COUNT) == 6
    with opened(root, Hold.OWNER), pytest.raises(VolumeLockedError):
        opened(root, Hold.OWNER)


def test_a_reader_sees_later_writes_after_a_refresh(tmp_path: Path) -> None:
    root = new_volume(tmp_path / "volume1")
    with owned(root, tmp_path / "state") as owner, opened(root) as reader:
        owner.writer.create_container(ONE)
        write_block(owner.writer, 1, 1, 100)
        old = reader.database
        assert list(old.items(OzoneTable.BLOCK_DATA, container_prefix(ONE))) == []
        reader.refresh()
        assert len(list(reader.database.items(OzoneTable.BLOCK_DATA, container_prefix(ONE)))) == 1
        assert list(old.items(OzoneTable.BLOCK_DATA, container_prefix(ONE))) == []


def test_a_closed_volume_has_no_database(tmp_path: Path) -> None:
    volume = opened(new_volume(tmp_path / "volume1"))
    volume.close()
    volume.close()
    with pytest.raises(DatabaseError, match="closed"):
        volume.database.get(OzoneTable.METADATA, b"any")
    volume.refresh()
    with pytest.raises(DatabaseError, match="closed"):
        volume.database.get(OzoneTable.METADATA, b"any")
    assert volume.storage_id == VERSION.storage_id


def test_what_a_device_fails_to_answer_is_an_error_and_not_a_missing_folder(tmp_path: Path) -> None:
    # The one failure of a look-up that needs no broken device.
    with pytest.raises(DiskError) as caught:
        Disk().is_folder(tmp_path / ("x" * 300))
    assert caught.value.facts["errno"] == "ENAMETOOLONG"
    assert not Disk().is_folder(tmp_path / "absent")
