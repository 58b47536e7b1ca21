"""RocksDB as a datanode keeps it: read beside its owner without a trace, written so
that Ozone reads it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from merkle.tree import BlockId, ContainerId
from ozone.errors import VolumeLockedError
from ozone.rocks import (
    Batch,
    Counter,
    Database,
    OzoneTable,
    block_key,
    container_prefix,
    counter_key,
    delete_key,
    long_bytes,
)
from ozone.rocks_lock import lock_holder
from runtime.disk import Disk, Operation
from runtime.errors import DatabaseError, DiskError
from tests.support.disk import CountingDisk
from tests.support.power_cut import put_unsynced, wal_syncs
from tests.support.volumes import tree_of_files, unpack

ONE = ContainerId(1)


@pytest.fixture
def database_path(tmp_path: Path) -> Path:
    """The database of a volume that a real datanode wrote."""
    return next(
        unpack("healthy", tmp_path / "healthy").glob("dn1/volume1/hdds/CID-*/DS-*/container.db")
    )


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    folder = tmp_path / "shadows"
    folder.mkdir()
    return folder


def test_keys_are_those_of_the_reference() -> None:
    container = ContainerId(100)
    assert block_key(container, BlockId(7)).hex() == "00000000000000647c37"
    assert counter_key(container, Counter.BCS_ID).hex() == "00000000000000647c234243534944"
    assert (
        counter_key(container, Counter.BLOCK_COUNT).hex()
        == "00000000000000647c23424c4f434b434f554e54"
    )
    assert (
        counter_key(container, Counter.BYTES_USED).hex() == "00000000000000647c23425954455355534544"
    )
    assert (
        counter_key(container, Counter.DATA_CHECKSUM).hex()
        == "00000000000000647c2344415441434845434b53554d"
    )
    assert delete_key(container, 12).hex() == "00000000000000647c3132"
    assert long_bytes(42).hex() == "000000000000002a"
    assert long_bytes(0xF8062E72).hex() == "00000000f8062e72"


def test_a_shadow_reads_what_the_datanode_wrote_and_leaves_no_trace(
    database_path: Path, shadows: Path
) -> None:
    before = tree_of_files(database_path)
    times = {p.name: p.stat().st_mtime_ns for p in database_path.iterdir()}
    database = Database.open_shadow(database_path, shadows)
    assert len(list(database.items(OzoneTable.BLOCK_DATA, container_prefix(ONE)))) == 6
    assert database.get_long(ONE, Counter.BLOCK_COUNT) == 6
    assert database.get(OzoneTable.BLOCK_DATA, block_key(ONE, BlockId(1))) is None
    database.close()
    assert tree_of_files(database_path) == before
    assert {p.name: p.stat().st_mtime_ns for p in database_path.iterdir()} == times
    assert list(shadows.iterdir()) == []


def test_a_shadow_stays_readable_when_the_datanode_removes_its_files(
    database_path: Path, shadows: Path
) -> None:
    database = Database.open_shadow(database_path, shadows)
    for file in database_path.iterdir():
        file.unlink()
    assert len(list(database.items(OzoneTable.BLOCK_DATA, container_prefix(ONE)))) == 6
    database.close()


def test_a_shadow_opens_while_the_owner_has_the_database(
    database_path: Path, shadows: Path
) -> None:
    owner = Database.open_owner(database_path, Disk())
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(ONE, Counter.DELETE_TX), long_bytes(77))
    owner.write(batch)
    shadow = Database.open_shadow(database_path, shadows)
    assert shadow.get_long(ONE, Counter.DELETE_TX) == 77
    shadow.close()
    owner.close()


def test_rows_of_one_container_only_are_met_in_the_order_of_text(tmp_path: Path) -> None:
    database = Database.create(tmp_path / "container.db", Disk())
    batch = Batch()
    for container, block in [(1, 9), (1, 10), (1, 1), (2, 5), (256, 3)]:
        batch.put(OzoneTable.BLOCK_DATA, block_key(ContainerId(container), BlockId(block)), b"x")
    database.write(batch)
    keys = [key for key, _ in database.items(OzoneTable.BLOCK_DATA, container_prefix(ONE))]
    assert keys == [block_key(ONE, BlockId(block)) for block in (1, 10, 9)]
    database.close()


def test_a_batch_is_one_durable_operation_and_survives_closing(tmp_path: Path) -> None:
    disk = CountingDisk()
    database = Database.create(tmp_path / "container.db", disk)
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(ONE, Counter.BCS_ID), long_bytes(5))
    batch.put(OzoneTable.LAST_CHUNK_INFO, block_key(ONE, BlockId(3)), b"last")
    database.write(batch)
    database.write(Batch())
    assert [operation for operation, _ in disk.operations].count(Operation.BATCH) == 1
    batch = Batch()
    batch.delete(OzoneTable.LAST_CHUNK_INFO, block_key(ONE, BlockId(3)))
    database.write(batch)
    database.close()
    database = Database.open_owner(tmp_path / "container.db", disk)
    assert database.get_long(ONE, Counter.BCS_ID) == 5
    assert database.get(OzoneTable.LAST_CHUNK_INFO, block_key(ONE, BlockId(3))) is None
    database.close()


def test_a_batch_and_a_sync_of_the_log_are_durable_on_return(tmp_path: Path) -> None:
    """The log of the open database becomes a pipe, which takes bytes and cannot be
    synced.
    """
    path = tmp_path / "container.db"
    database = Database.create(path, Disk())
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(ONE, Counter.BCS_ID), long_bytes(5))
    before = wal_syncs(database)
    database.write(batch)
    assert wal_syncs(database) == before + 1
    with _log_that_cannot_be_synced(path):
        put_unsynced(database, OzoneTable.METADATA, counter_key(ONE, Counter.DELETE_TX), b"x")
        with pytest.raises(DatabaseError) as caught:
            database.sync_wal()
        assert caught.value.facts["suspect"]
    with suppress(DatabaseError):
        database.close()
    database = Database.open_owner(path, Disk())
    with _log_that_cannot_be_synced(path), pytest.raises(DatabaseError) as caught:
        database.write(batch)
    assert caught.value.facts["suspect"]
    with suppress(DatabaseError):
        database.close()


@contextmanager
def _log_that_cannot_be_synced(path: Path) -> Iterator[None]:
    """Writes to the database's log go to a pipe; the log itself stays as it is."""
    (log,) = (
        int(fd.name)
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink() and fd.readlink().parent == path and fd.readlink().suffix == ".log"
    )
    kept, (reading, writing) = os.dup(log), os.pipe()
    os.dup2(writing, log)
    try:
        yield
    finally:
        os.dup2(kept, log)
        for descriptor in (kept, reading, writing):
            os.close(descriptor)


def _layout(path: Path) -> dict[str, set[str]]:
    """What the newest OPTIONS file says of each table's files."""
    newest = max(path.glob("OPTIONS-*"))
    found: dict[str, set[str]] = {}
    table = ""
    for line in newest.read_text().splitlines():
        if line.startswith("["):
            table = match[1] if (match := re.search(r'"(.*)"', line)) else ""
        name, _, value = line.strip().partition("=")
        if table and name in (
            "format_version",
            "prefix_extractor",
            "compression",
            "block_size",
            "filter_policy",
        ):
            found.setdefault(table, set()).add(f"{name}={value.split(':')[0]}")
    return found


OZONES = {
    "format_version=5",
    "prefix_extractor=rocksdb.FixedPrefix.9",
    "compression=kSnappyCompression",
    "block_size=16384",
    "filter_policy=bloomfilter",
}


@pytest.mark.parametrize("times", [1, 3])
def test_files_stay_such_as_old_datanodes_can_read(tmp_path: Path, times: int) -> None:
    path = tmp_path / "container.db"
    Database.create(path, Disk()).close()
    for _ in range(times - 1):
        Database.open_owner(path, Disk()).close()
    assert _layout(path) == dict.fromkeys(("default", *OzoneTable), OZONES)


def test_a_database_of_ozone_keeps_its_layout_when_we_write_to_it(database_path: Path) -> None:
    for _ in range(2):
        Database.open_owner(database_path, Disk()).close()
    assert _layout(database_path) == dict.fromkeys(("default", *OzoneTable), OZONES)
    assert not (database_path / "rocksdict-config.json").exists()


def test_tables_that_an_old_release_lacks_are_made_by_the_owner_only(
    tmp_path: Path, shadows: Path
) -> None:
    path = tmp_path / "container.db"
    Database.create(path, Disk()).close()
    script = (
        "import sys; from rocksdict import Rdict, Options\ndb = Rdict(sys.argv[1],"
        " Options(raw_mode=True)); db.drop_column_family('last_chunk_info'); db.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    shadow = Database.open_shadow(path, shadows)
    assert shadow.get(OzoneTable.LAST_CHUNK_INFO, b"any") is None
    assert list(shadow.items(OzoneTable.LAST_CHUNK_INFO, container_prefix(ONE))) == []
    shadow.close()
    owner = Database.open_owner(path, Disk())
    batch = Batch()
    batch.put(OzoneTable.LAST_CHUNK_INFO, block_key(ONE, BlockId(1)), b"x")
    owner.write(batch)
    assert owner.get(OzoneTable.LAST_CHUNK_INFO, block_key(ONE, BlockId(1))) == b"x"
    owner.close()
    assert _layout(path)["last_chunk_info"] == OZONES


_HOLD = """
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from runtime.disk import Disk
from ozone.rocks import Database
database = Database.open_owner(Path(sys.argv[1]), Disk())
print("held", flush=True)
sys.stdin.read()
database.close()
"""


def test_a_database_that_another_process_holds_is_refused_with_its_pid(database_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(database_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        logs = {p.name: p.stat().st_mtime_ns for p in database_path.glob("LOG*")}
        with pytest.raises(VolumeLockedError) as refused:
            Database.open_owner(database_path, Disk())
        assert refused.value.facts["pid"] == holder.pid
        # Asking must not have rotated the live log.
        assert {p.name: p.stat().st_mtime_ns for p in database_path.glob("LOG*")} == logs
        holder.stdin.close()
        holder.wait()
    Database.open_owner(database_path, Disk()).close()


def test_this_process_does_not_lose_its_own_lock_by_asking(database_path: Path) -> None:
    database = Database.open_owner(database_path, Disk())
    with pytest.raises(VolumeLockedError) as refused:
        Database.open_owner(database_path, Disk())
    assert refused.value.facts["pid"] == os.getpid()
    asked = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys; from pathlib import Path; from ozone.rocks_lock import lock_holder\n"
                "print(lock_holder(Path(sys.argv[1])))"
            ),
            str(database_path / "LOCK"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == str(os.getpid())
    database.close()
    assert lock_holder(database_path / "LOCK") is None


def test_a_damaged_table_file_is_an_error_not_the_end_of_the_rows(
    database_path: Path, shadows: Path
) -> None:
    for file in database_path.glob("*.sst"):
        raw = bytearray(file.read_bytes())
        raw[20] ^= 1
        file.write_bytes(raw)
    database = Database.open_shadow(database_path, shadows)
    with pytest.raises(DatabaseError):
        list(database.items(OzoneTable.BLOCK_DATA, container_prefix(ONE)))
    database.close()


def test_a_counter_that_cannot_be_read_is_named_with_its_container(tmp_path: Path) -> None:
    path = tmp_path / "container.db"
    database = Database.create(path, Disk())
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(ONE, Counter.BCS_ID), long_bytes(5))
    database.write(batch)
    database.close()
    Database.open_owner(path, Disk()).close()
    for file in path.glob("*.sst"):
        raw = bytearray(file.read_bytes())
        raw[20] ^= 1
        file.write_bytes(raw)
    database = Database.open_owner(path, Disk())
    with pytest.raises(DatabaseError, match="#BCSID of container 1") as unread:
        database.get_long(ONE, Counter.BCS_ID)
    assert unread.value.facts["container_id"] == ONE
    database.close()
    # Nothing is wrong with the row where the database as a whole is not there.
    with pytest.raises(DatabaseError, match="closed") as closed:
        database.get_long(ONE, Counter.BCS_ID)
    assert "container_id" not in closed.value.facts


@pytest.mark.parametrize(
    "damage", ["no folder", "empty folder", "no manifest", "no table files", "CURRENT garbled"]
)
def test_a_folder_that_is_no_database_is_refused(
    database_path: Path, shadows: Path, damage: str
) -> None:
    for file in database_path.iterdir():
        if (
            damage in ("no folder", "empty folder")
            or (damage == "no manifest" and file.name.startswith("MANIFEST"))
            or (damage == "no table files" and file.suffix == ".sst")
        ):
            file.unlink()
    if damage == "no folder":
        database_path.rmdir()
    if damage == "CURRENT garbled":
        (database_path / "CURRENT").write_bytes(b"nothing\n")
    before = tree_of_files(database_path) if database_path.exists() else None
    with pytest.raises(DatabaseError):
        Database.open_shadow(database_path, shadows)
    assert (tree_of_files(database_path) if database_path.exists() else None) == before
    with pytest.raises(DatabaseError):
        Database.open_owner(database_path, Disk())
    assert list(shadows.iterdir()) == []


def test_a_file_of_the_binding_that_can_neither_be_written_nor_removed_is_a_named_error(
    database_path: Path,
) -> None:
    """As on a read-only file system, where even removing what is not there is
    refused.
    """
    stray = database_path / "rocksdict-config.json"
    stray.mkdir()
    with pytest.raises(DatabaseError, match=r"cannot open the database .*Is a directory"):
        Database.open_owner(database_path, Disk())
    (database_path / "CURRENT").rename(database_path / "CURRENT.away")
    with pytest.raises(DatabaseError, match="cannot create"):
        Database.create(database_path, Disk())
    (database_path / "CURRENT.away").rename(database_path / "CURRENT")
    stray.rmdir()
    database = Database.open_owner(database_path, Disk())
    stray.mkdir()
    database.close()
    stray.rmdir()
    Database.open_owner(database_path, Disk()).close()


def test_a_lock_that_cannot_be_opened_is_held_by_nobody(database_path: Path) -> None:
    (database_path / "LOCK").unlink(missing_ok=True)
    (database_path / "LOCK").mkdir()
    with pytest.raises(DatabaseError, match="open a file for lock"):
        Database.open_owner(database_path, Disk())


def test_a_folder_that_cannot_be_looked_into_is_a_named_error(
    tmp_path: Path, shadows: Path
) -> None:
    unspeakable = tmp_path / ("a" * 300)
    with pytest.raises(DatabaseError, match="cannot look into"):
        Database.open_owner(unspeakable, Disk())
    with pytest.raises(DatabaseError, match="cannot look into"):
        Database.open_shadow(unspeakable, shadows)


def test_a_shadow_that_cannot_be_made_says_nothing_about_the_database(
    database_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "none"):
        with pytest.raises(DiskError, match="cannot make a shadow in"):
            Database.open_shadow(database_path, place)


def test_a_closed_database_says_so(database_path: Path, shadows: Path) -> None:
    database = Database.open_shadow(database_path, shadows)
    database.close()
    database.close()
    with pytest.raises(DatabaseError, match="closed"):
        database.get(OzoneTable.METADATA, b"any")
    with pytest.raises(DatabaseError, match="closed"):
        list(database.items(OzoneTable.METADATA, b"any"))


def test_a_counter_of_a_wrong_length_is_refused(tmp_path: Path) -> None:
    database = Database.create(tmp_path / "container.db", Disk())
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(ONE, Counter.BCS_ID), b"123")
    database.write(batch)
    with pytest.raises(DatabaseError, match="3 bytes"):
        database.get_long(ONE, Counter.BCS_ID)
    database.close()
    with pytest.raises(DatabaseError, match="already"):
        Database.create(tmp_path / "container.db", Disk())
