"""The replicas of a datanode: what is told of them is what is on disk, and a read-only
volume is never written.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from prometheus_client import generate_latest

from dnagent.local_replica import LocalReplica
from dnagent.metrics import AGENT_METRICS
from dnagent.scanner import CompletedScan, ScanDepth, Scanner, ScanPace
from dnagent.store import ReplicaStore, preferred
from dnagent.volumes import ManagedVolume
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.limits import MESSAGE_BYTES_MAX, TREE_BLOCKS_MAX
from merkle.record import BlockRecord, ChunkRecord, DeleteTransaction
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from merkle.windows import prove
from ozone.descriptor import dump_descriptor, with_checksum
from ozone.errors import (
    BlockNotFoundError,
    ContainerNotFoundError,
    ContainerStateError,
    ReadOnlyError,
    StaleTreeError,
    TreeMissingError,
    UndoBudgetError,
    VolumeError,
)
from ozone.mapped import MappedReader
from ozone.rocks import (
    Batch,
    Counter,
    Database,
    OzoneTable,
    block_key,
    container_prefix,
    counter_key,
)
from ozone.scan import FindingType
from ozone.volume import Hold, open_volume
from protos.convert import tree_from_bytes
from runtime.disk import Disk, Operation, Reader, disk_error
from runtime.errors import BusyError, DatabaseError, DiskError, OperationInterruptedError
from runtime.metrics import Metrics
from tests.support.disk import FailingDisk
from tests.support.handmade import VolumeMaker, some_bytes, whole
from tests.support.volumes import VERSION, content, new_volume, owned, tree_of_files, write_block

ONE, TWO = ContainerId(1), ContainerId(2)
BLOCK, OTHER = BlockId(9), BlockId(10)
NOW_MS = 1_700_000_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Container 1, closed, with blocks 9 and 10; container 2, open."""
    root = new_volume(tmp_path / "volume")
    with owned(root, tmp_path / "writer") as volume:
        for container_id in (ONE, TWO):
            volume.writer.create_container(container_id)
            write_block(volume.writer, container_id, BLOCK, 5000, 2500, bcs_id=1)
        write_block(volume.writer, ONE, OTHER, 1024, bcs_id=2)
        volume.writer.close(ONE)
    return root


@contextmanager
def held(
    root: Path,
    hold: Hold = Hold.OWNER,
    *,
    undo_bytes: int = 1 << 20,
    mapped: MappedReader | None = None,
    disk: Disk | None = None,
    tree_blocks_max: int = TREE_BLOCKS_MAX,
    on_returned: Callable[[ContainerId, str, str], None] = lambda *_: None,
) -> Iterator[ManagedVolume]:
    disk = disk or Disk()
    volume = open_volume(root, hold=hold, state_folder=root.parent / "state", disk=disk)
    try:
        opened = ManagedVolume(
            volume,
            disk,
            undo_bytes=undo_bytes,
            mapped=mapped,
            tree_blocks_max=tree_blocks_max,
            on_returned=on_returned,
        )
    except ReconcileError:
        volume.close()
        raise
    yield opened
    opened.close()


@dataclass
class UnreadableFolder(Disk):
    """Fails whatever is asked about one folder and what is in it."""

    folder: Path | None = None

    def names(self, folder: Path) -> list[str]:
        self._check(folder)
        return super().names(folder)

    def is_folder(self, path: Path) -> bool:
        self._check(path.parent)
        return super().is_folder(path)

    def read(self, path: Path) -> bytes:
        self._check(path)
        return super().read(path)

    def _check(self, path: Path) -> None:
        if self.folder is not None and path.is_relative_to(self.folder):
            raise disk_error("read", path, OSError(errno.EIO, os.strerror(errno.EIO)))


def block_file(volume: ManagedVolume, block_id: BlockId = BLOCK) -> Path:
    return volume.containers.get(ONE).block_path(block_id)


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def scan(volume: ManagedVolume) -> CompletedScan:
    return volume.examine(ONE, ScanDepth.DATA, lambda _: None, lambda: False)


def repairable(volume: ManagedVolume) -> LocalReplica:
    store = ReplicaStore([volume], repair_enabled=True)
    return store.open_replica(ONE, "job-1", cancelled=Event(), on_bytes=lambda _: None)


def test_what_is_reported_is_what_is_on_disk(root: Path) -> None:
    with held(root) as volume:
        closed, still_open = volume.replicas()
        stored = volume.trees.read(ONE).tree
    assert (closed.state, closed.data_checksum, closed.read_only) == (
        ReplicaState.CLOSED,
        stored.data_checksum,
        False,
    )
    assert (closed.bcs_id, closed.block_count, closed.used_bytes) == (2, 2, 8524)
    assert closed.data_scan_timestamp_ms is None
    assert len(closed.fingerprint) == 16
    # Nothing is known of the root of an open container, which is not the same as zero.
    assert (still_open.state, still_open.data_checksum, still_open.fingerprint) == (
        ReplicaState.OPEN,
        None,
        b"",
    )


def test_a_container_whose_descriptor_is_broken_is_named_and_hides_no_other(root: Path) -> None:
    with held(root) as volume:
        path = volume.containers.get(TWO).descriptor_path
    path.write_bytes(b"not a descriptor")
    with held(root) as volume:
        assert [replica.state for replica in volume.replicas()] == [
            ReplicaState.CLOSED,
            ReplicaState.INVALID,
        ]


def test_a_container_whose_counters_are_no_numbers_is_named_and_hides_no_other(
    root: Path, tmp_path: Path
) -> None:
    """A datanode skips it at its start, too."""
    with owned(root, tmp_path / "damage") as volume:
        batch = Batch()
        batch.put(OzoneTable.METADATA, counter_key(TWO, Counter.BLOCK_COUNT), b"abc")
        volume.volume.database.write(batch)
    with held(root) as volume:
        states = {replica.container_id: replica.state for replica in volume.replicas()}
        assert states.pop(TWO) is ReplicaState.INVALID
        assert ReplicaState.INVALID not in states.values()


@pytest.mark.parametrize("hold", Hold)
def test_a_row_that_cannot_be_read_is_named_and_hides_no_other_container(
    tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad sector in one of the database's files; nothing is marked on disk for it."""
    with VolumeMaker(tmp_path / "volume") as made:
        for container_id in (ONE, TWO):
            made.container(container_id)
            made.block(container_id, BLOCK, whole(3000))
        # So long that container 2 has its rows in another part of the file.
        made.put(OzoneTable.METADATA, container_prefix(ONE) + b"#other", some_bytes(64 << 10))
    # Opened once more, the database has its rows in files.
    Database.open_owner(made.database_path, Disk()).close()
    damage(max(made.database_path.glob("*.sst"), key=lambda path: path.stat().st_size), 20)
    before = made.folder(ONE) / "metadata" / "1.container"
    descriptor = before.read_bytes()
    with held(made.root, hold) as volume:
        states = {replica.container_id: replica.state for replica in volume.replicas()}
        assert states == {ONE: ReplicaState.INVALID, TWO: ReplicaState.CLOSED}
        assert "#BCSID of container 1" in capsys.readouterr().err
        store = ReplicaStore([volume], repair_enabled=True)
        assert store.head(TWO).bcs_id == 7
        assert store.record(TWO, BLOCK) is not None
        scanner = Scanner(
            volume,
            ScanPace(bytes_per_second=0),
            metrics=Metrics(AGENT_METRICS),
            on_change=lambda _: None,
        )
        while scanner.step():
            pass
        assert scanner.last_error == ""
        assert volume.replica(TWO).state is ReplicaState.CLOSED
        assert volume.replica(TWO).data_scan_timestamp_ms is not None
    assert before.read_bytes() == descriptor


def test_a_tree_beyond_our_limits_is_named_and_replaced_by_one_that_is_built(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(root) as volume:
        path = volume.trees.path(ONE)
        built = path.read_bytes()
        damage(block_file(volume), 1)
    with path.open("wb") as file:
        file.truncate(MESSAGE_BYTES_MAX + 1)
    with held(root) as volume:
        assert [r.data_checksum for r in volume.replicas()] == [None, None]
        assert volume.replica(ONE).state is ReplicaState.CLOSED
        assert "tree_unreadable" in capsys.readouterr().err
        scanner = Scanner(
            volume,
            ScanPace(bytes_per_second=0),
            metrics=Metrics(AGENT_METRICS),
            on_change=lambda _: None,
        )
        assert scanner.step()
        assert path.read_bytes() == built
        assert volume.replica(ONE).data_checksum is not None
        # What the data lack is found as ever.
        while scanner.step():
            pass
        assert scanner.last_error == ""
        assert volume.replica(ONE).state is ReplicaState.UNHEALTHY


def test_damage_in_a_container_beyond_our_limits_is_reported_though_there_is_no_tree(
    root: Path,
) -> None:
    """S12, S16: the datanode that closed it knows no trees."""
    with owned(root, root.parent / "writer") as volume:
        write_block(volume.writer, TWO, OTHER, 1024, bcs_id=2)
        volume.writer.set_state(TWO, ReplicaState.CLOSED)
    # No record may be beyond a limit by itself, and a million of them would take
    # minutes.
    with held(root, tree_blocks_max=1) as volume:
        damage(volume.containers.get(TWO).block_path(BLOCK), 1)
        scanner = Scanner(
            volume,
            ScanPace(bytes_per_second=0),
            metrics=Metrics(AGENT_METRICS),
            on_change=lambda _: None,
        )
        while scanner.step():
            pass
        replica = volume.replica(TWO)
        assert (replica.state, replica.data_checksum) == (ReplicaState.UNHEALTHY, None)
        assert replica.data_scan_timestamp_ms is not None
        assert volume.containers.get(TWO).state is ReplicaState.UNHEALTHY


def test_a_descriptor_with_an_impossible_place_in_its_group_is_named_and_hides_no_other(
    root: Path,
) -> None:
    """No report has room for it."""
    with held(root) as volume:
        container = volume.containers.open(TWO)
        for index in (-1, 1 << 31):
            raw = dump_descriptor(with_checksum(replace(container.descriptor, replica_index=index)))
            container.descriptor_path.write_bytes(raw)
            volume.refresh()
            states = {replica.container_id: replica.state for replica in volume.replicas()}
            assert states == {ONE: ReplicaState.CLOSED, TWO: ReplicaState.INVALID}


@pytest.mark.parametrize("hold", Hold)
def test_a_folder_that_cannot_be_listed_hides_no_container_outside_it_and_loses_none_inside(
    root: Path, hold: Hold
) -> None:
    """A container that was seen there is not reported as gone, which would have it
    copied anew.
    """
    other = ContainerId(512)
    with owned(root, root.parent / "writer") as volume:
        volume.writer.create_container(other)
    disk = UnreadableFolder()
    volume = open_volume(root, hold=hold, state_folder=root.parent / "state", disk=disk)
    with closing(ManagedVolume(volume, disk, undo_bytes=1 << 20)) as opened:
        assert [replica.container_id for replica in opened.replicas()] == [ONE, TWO, other]
        disk.folder = volume.usual_folder(ONE).parent
        opened.refresh()
        states = {replica.container_id: replica.state for replica in opened.replicas()}
        assert states == {
            ONE: ReplicaState.INVALID,
            TWO: ReplicaState.INVALID,
            other: ReplicaState.OPEN,
        }
    volume = open_volume(root, hold=hold, state_folder=root.parent / "state", disk=disk)
    with closing(ManagedVolume(volume, disk, undo_bytes=1 << 20)) as opened:
        assert [replica.container_id for replica in opened.replicas()] == [other]
        disk.folder = None
        opened.refresh()
        assert {replica.container_id for replica in opened.replicas()} == {ONE, TWO, other}


def test_names_that_are_no_containers_are_passed_over(root: Path) -> None:
    """Ozone counts from 1, and a controller refuses a report of any other."""
    [group] = root.glob("hdds/*/current/containerDir0")
    for name in ("0", "-1", "01", "9223372036854775808", "\udcff", "\u0663"):
        (group / name).mkdir()
    (group / "7").write_bytes(b"")
    with held(root) as volume:
        assert [replica.container_id for replica in volume.replicas()] == [ONE, TWO]


def test_a_refresh_sees_what_the_datanode_changed(root: Path, tmp_path: Path) -> None:
    with held(root, Hold.READ_ONLY) as ours:
        with owned(root, tmp_path / "writer") as theirs:
            theirs.writer.create_container(ContainerId(3))
            theirs.writer.close(TWO)
            theirs.writer.delete_container(ONE)
        ours.refresh()
        assert [(r.container_id, r.state) for r in ours.replicas()] == [
            (TWO, ReplicaState.CLOSED),
            (ContainerId(3), ReplicaState.OPEN),
        ]


def test_a_tree_that_cannot_be_read_is_as_good_as_none(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(root) as volume:
        path = volume.trees.path(ONE)
    path.write_bytes(b"\xff\xff")
    with held(root) as volume:
        assert volume.candidate(ONE).data_checksum is None
        # Said once for each that is found, not at every look.
        volume.refresh()
        path.write_bytes(b"\xff\xff\xff")
        volume.refresh()
    assert capsys.readouterr().err.count("tree_unreadable") == 2
    path.unlink()
    path.mkdir()
    with held(root) as volume:
        assert volume.candidate(ONE).data_checksum is None
        assert len(volume.replicas()) == 2


def test_a_volume_without_its_database_is_no_volume_and_damages_no_container(root: Path) -> None:
    """inv-I4: the containers are not at fault, so none is marked."""
    [database] = root.glob("hdds/*/DS-*/container.db")
    database.rename(database.with_name("gone"))
    with pytest.raises(DatabaseError), held(root):
        pass


@pytest.mark.parametrize("hold", Hold)
def test_a_database_of_which_no_row_can_be_read_is_lost_and_damages_no_container(
    tmp_path: Path, hold: Hold
) -> None:
    """inv-I4"""
    with VolumeMaker(tmp_path / "volume") as made:
        for container_id in (ONE, TWO):
            made.container(container_id)
            made.block(container_id, BLOCK, whole(3000))
    Database.open_owner(made.database_path, Disk()).close()
    for file in made.database_path.glob("*.sst"):
        damage(file, 20)
    descriptors = [
        made.folder(number) / "metadata" / f"{number}.container" for number in (ONE, TWO)
    ]
    before = [path.read_bytes() for path in descriptors]
    with (
        pytest.raises(DatabaseError, match="rows of other containers cannot be read either"),
        held(made.root, hold),
    ):
        pass
    assert [path.read_bytes() for path in descriptors] == before


def test_records_are_listed_in_the_order_of_their_keys(root: Path) -> None:
    with held(root) as volume:
        store = ReplicaStore([volume], repair_enabled=False)

        def listed(start: BlockId | None, count: int) -> list[int]:
            return [record.block_id for record in store.records(ONE, start, count)]

        # Decimal text: 10 before 9.
        assert listed(None, 5) == [OTHER, BLOCK]
        assert listed(None, 1) == [OTHER]
        assert listed(BLOCK, 5) == [BLOCK]
        assert listed(BlockId(11), 5) == []
        assert store.read(ONE, BLOCK, 10, 20) == content(BLOCK, 7500)[10:30]
        with pytest.raises(BlockNotFoundError):
            store.read(ONE, BlockId(11), 0, 1)
        with pytest.raises(ContainerNotFoundError):
            store.head(ContainerId(3))


def test_a_missing_tree_is_said_to_be_missing_or_built_as_asked(root: Path) -> None:
    with held(root) as volume:
        stored = volume.trees.path(ONE).read_bytes()
        volume.trees.path(ONE).unlink()
        store = ReplicaStore([volume], repair_enabled=False)
        with pytest.raises(TreeMissingError):
            store.tree_bytes(ONE, build_missing=False)
        assert store.tree_bytes(ONE, build_missing=True) == stored


def test_a_tree_built_for_a_peer_names_the_deletions_that_are_known(root: Path) -> None:
    """inv-I5: the tree is lost, and the block's record still there, since its deletion
    was not finished.
    """
    with held(root) as volume:
        assert volume.writer is not None
        record = volume.containers.get(ONE).record(OTHER)
        assert record is not None
        volume.trees.add_tombstones(ONE, [record])
        volume.trees.path(ONE).unlink()
        raw = ReplicaStore([volume], repair_enabled=True).tree_bytes(ONE, build_missing=True)
    found = tree_from_bytes(raw, ONE).block(OTHER)
    assert found is not None
    assert found.deleted


def test_deletions_in_a_tree_of_the_datanode_outlive_its_file(root: Path) -> None:
    """inv-I5: the agent has only looked at it, and then the file is lost."""
    with owned(root, root.parent / "datanode") as datanode:
        datanode.writer.receive_delete(DeleteTransaction(1, ONE, (OTHER,), None))
        datanode.writer.delete_blocks(ONE)
    with held(root) as volume:
        volume.trees.path(ONE).write_bytes(b"")
    with held(root) as volume:
        assert volume.trees.deleted_blocks(ONE) == {OTHER}


def test_deletions_that_cannot_be_kept_do_not_make_the_tree_unreadable(root: Path) -> None:
    with owned(root, root.parent / "datanode") as datanode:
        datanode.writer.receive_delete(DeleteTransaction(1, ONE, (OTHER,), None))
        datanode.writer.delete_blocks(ONE)
        state = root.parent / "state" / datanode.volume.storage_id
    state.mkdir(parents=True)
    (state / "tombstones").write_bytes(b"a file where the folder should be")
    with held(root) as volume:
        assert volume.replica(ONE).data_checksum is not None


def test_damage_found_while_a_replica_returns_to_service_is_not_lost(root: Path) -> None:
    """A scan of the background ends between the last scan of a repair and the change of
    state, or right after it.
    """
    with held(root) as volume:
        assert volume.writer is not None
        good = block_file(volume).read_bytes()
        damage(block_file(volume), 100)
        replica = repairable(volume)
        replica.scan()
        block_file(volume).write_bytes(good)
        clean = replica.scan()
        assert (clean.findings, clean.state) == ((), ReplicaState.UNHEALTHY)
        damage(block_file(volume), 100)
        late = scan(volume)
        late = volume.write_tree(late)
        with pytest.raises(StaleTreeError):
            replica.set_state(ReplicaState.CLOSED, clean.generation)
        volume.record_result(late, NOW_MS)
        assert volume.containers.get(ONE).state is ReplicaState.UNHEALTHY
        # The state is changed on disk, and not noted yet, when the scan ends.
        volume.writer.set_state(ONE, ReplicaState.CLOSED)
        volume.record_result(late, NOW_MS)
        assert volume.containers.get(ONE).state is ReplicaState.UNHEALTHY


class AfterTreeRead(Disk):
    """Calls `act` once, after the next read of a tree."""

    act: Callable[[], None] | None = None

    def read(self, path: Path) -> bytes:
        data = super().read(path)
        if path.name == "1.tree" and self.act is not None:
            act, self.act = self.act, None
            act()
        return data


def test_a_return_to_service_is_audited_before_it_happens(root: Path) -> None:
    seen = list[tuple[ContainerId, str, str, ReplicaState]]()

    def note(container_id: ContainerId, state: str, job_id: str) -> None:
        seen.append((container_id, state, job_id, volume.containers.get(container_id).state))
        if len(seen) == 1:
            raise DiskError("the audit file is full")

    with held(root, on_returned=note) as volume:
        assert volume.writer is not None
        volume.writer.mark_unhealthy(ONE)
        replica = repairable(volume)
        clean = replica.scan()
        with pytest.raises(DiskError, match="audit file is full"):
            replica.set_state(ReplicaState.CLOSED, clean.generation)
        # No line, no change.
        assert volume.containers.get(ONE).state is ReplicaState.UNHEALTHY
        replica.set_state(ReplicaState.CLOSED, clean.generation)
        assert volume.containers.get(ONE).state is ReplicaState.CLOSED
        # Nothing that is refused has a line.
        with pytest.raises(ContainerStateError):
            replica.set_state(ReplicaState.CLOSED, clean.generation)
    assert seen == 2 * [(ONE, "CLOSED", "job-1", ReplicaState.UNHEALTHY)]


def test_no_scan_settles_between_the_check_of_a_replica_and_its_return_to_service(
    root: Path,
) -> None:
    """The scan that found damage meanwhile must wait for the return, and then undo
    it.
    """
    disk = AfterTreeRead()
    with held(root, disk=disk) as volume:
        assert volume.writer is not None
        volume.writer.mark_unhealthy(ONE)
        replica = repairable(volume)
        clean = replica.scan()
        assert (clean.findings, clean.state) == ((), ReplicaState.UNHEALTHY)
        damage(block_file(volume), 100)
        late = scan(volume)

        def settle() -> None:
            volume.record_result(volume.write_tree(late), NOW_MS)

        settling = Thread(target=settle)

        def settle_meanwhile() -> None:
            settling.start()
            # It cannot end while the return has the lock.
            settling.join(0.3)

        disk.act = settle_meanwhile
        replica.set_state(ReplicaState.CLOSED, clean.generation)
        settling.join()
        assert volume.containers.get(ONE).state is ReplicaState.UNHEALTHY


def test_a_scan_without_file_handles_marks_no_replica_under_repair(root: Path) -> None:
    """Its findings prove nothing: neither the tree nor the state follows them."""
    disk = OutOfHandles()
    with held(root, disk=disk) as volume:
        replica = repairable(volume)
        before = replica.scan()
        disk.fails = True
        with pytest.raises(BusyError):
            replica.scan()
        disk.fails = False
        own = replica.own()
        assert (own.state, own.tree) == (ReplicaState.CLOSED, before.tree)
        assert volume.containers.get(ONE).state is ReplicaState.CLOSED


class OutOfHandles(Disk):
    """Cannot open block files while it `fails`, as where the limit of open files is
    reached.
    """

    fails = False

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        if self.fails and path.suffix == ".block":
            raise disk_error("read", path, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        with super().reader(path) as reader:
            yield reader


def test_a_peers_tombstone_leaves_bytes_and_records_on_disk(root: Path) -> None:
    """inv-I6: also after the next start, which finishes what deletions left."""
    files = {path: path.read_bytes() for path in root.rglob("*.block")}
    with held(root) as volume:
        replica = repairable(volume)
        records = replica.records([BLOCK, OTHER])
        own = replica.own()
        assert own.tree is not None
        entry = own.tree.block(BLOCK)
        assert entry is not None
        others = [block for block in own.tree.blocks if block.block_id != BLOCK]
        adopted = ContainerTree.of(ONE, [*others, BlockTree.tombstone(BLOCK, entry.data_checksum)])
        replica.store_tree(adopted, own.generation)
        assert replica.records([BLOCK, OTHER]) == records
        replica.scan()
    with held(root) as volume:
        replica = repairable(volume)
        tree = replica.own().tree
        assert tree is not None
        assert [block.deleted for block in tree.blocks] == [True, False]
        assert replica.records([BLOCK, OTHER]) == records
        assert volume.containers.get(ONE).counters().block_count == len(records)
    assert {path: path.read_bytes() for path in root.rglob("*.block")} == files


def test_findings_make_an_owned_replica_unhealthy_on_disk_once(root: Path) -> None:
    """S12, S13"""
    with held(root) as volume:
        damage(block_file(volume), 1500)
        for first in (True, False):
            examination = scan(volume)
            examination = volume.write_tree(examination)
            assert volume.record_result(examination, NOW_MS) is first
        assert [finding.type for finding in examination.result.findings] == [
            FindingType.CORRUPT_CHUNK
        ]
        before = volume.replica(ONE)
    with held(root) as volume:
        assert volume.replica(ONE) == before
    assert (before.state, before.data_scan_timestamp_ms) == (ReplicaState.UNHEALTHY, NOW_MS)


@pytest.mark.parametrize("hold", [Hold.OWNER, Hold.READ_ONLY])
def test_a_record_of_an_open_container_that_cannot_be_read_makes_an_owned_one_unhealthy(
    root: Path, hold: Hold
) -> None:
    """S12, S13: a check reads no data, so that it leaves no time."""
    with owned(root, root.parent / "writer") as volume:
        batch = Batch()
        batch.put(OzoneTable.BLOCK_DATA, block_key(TWO, BLOCK), b"\x0a\xff")
        volume.volume.database.write(batch)
    with held(root, hold) as checked:
        examination = checked.examine(TWO, ScanDepth.CHECK, lambda _: None, lambda: False)
        assert [finding.type for finding in examination.result.findings] == [
            FindingType.INACCESSIBLE_DB
        ]
        assert checked.record_result(examination, NOW_MS) is (hold is Hold.OWNER)
        assert not checked.record_result(examination, NOW_MS)
        checked.refresh()
        replica = checked.replica(TWO)
    expected = ReplicaState.UNHEALTHY if hold is Hold.OWNER else ReplicaState.OPEN
    assert (replica.state, replica.data_scan_timestamp_ms) == (expected, None)


@pytest.mark.parametrize("hold", [Hold.OWNER, Hold.READ_ONLY])
def test_two_scans_of_one_container_may_end_at_the_same_moment(root: Path, hold: Hold) -> None:
    """The one that goes round and one that was asked for; neither sees the other's
    half-written file.
    """
    others: list[Future[bool]] = []
    with ThreadPoolExecutor(1) as pool, held(root, hold) as plain:
        examination = scan(plain)

        def watch(operation: Operation, path: Path) -> bool:
            if operation is Operation.RENAME and path.parent.name == "scans" and not others:
                others.append(pool.submit(volume.record_result, examination, NOW_MS))
                # Long enough for it to end, were it let in.
                wait(others, timeout=0.5)
            return False

        volume = ManagedVolume(plain.volume, FailingDisk(errno.EIO, watch), undo_bytes=1 << 20)
        assert not volume.record_result(examination, NOW_MS)
        assert not others[0].result(timeout=60)
        assert volume.replica(ONE).data_scan_timestamp_ms == NOW_MS


def test_a_read_only_volume_is_scanned_without_a_byte_written_to_it(root: Path) -> None:
    """inv-I8"""
    with held(root, Hold.READ_ONLY) as volume:
        damage(block_file(volume), 1500)
        files, healthy = tree_of_files(root), volume.replica(ONE)
        examination = scan(volume)
        examination = volume.write_tree(examination)
        assert not volume.record_result(examination, NOW_MS)
        found = volume.replica(ONE)
        volume.refresh()
        assert volume.replica(ONE) == found
    assert tree_of_files(root) == files
    assert (found.state, found.read_only) == (ReplicaState.CLOSED, True)
    assert found.data_checksum != healthy.data_checksum
    # Where the round was is known after a restart, and so is the tree.
    with held(root, Hold.READ_ONLY) as volume:
        assert volume.replica(ONE) == found
        assert volume.candidate(ONE).last_scan_ms == NOW_MS


def test_a_volume_scanned_by_a_worker_has_the_same_findings_and_leaves_no_worker_behind(
    root: Path,
) -> None:
    with held(root) as volume:
        damage(block_file(volume), 1500)
        plain = scan(volume)
    with held(root, mapped=MappedReader()) as volume:
        assert scan(volume) == plain
        (worker,) = (
            child
            for child in psutil.Process().children()
            if "ozone.mapped" in " ".join(child.cmdline())
        )
    assert not worker.is_running()


def test_a_scan_changes_the_tree_and_never_what_was_recorded(root: Path) -> None:
    """CR-048, CR-049: the root that is reported is that of the bytes on disk."""
    with held(root) as volume:
        before, healthy = volume.containers.get(ONE).record(BLOCK), volume.replica(ONE)
        damage(block_file(volume), 1500)
        examination = scan(volume)
        examination = volume.write_tree(examination)
        volume.record_result(examination, NOW_MS)
        assert volume.containers.get(ONE).record(BLOCK) == before
        reported = volume.replica(ONE)
        assert before is not None
        [entry] = [block for block in examination.result.tree.blocks if block.block_id == BLOCK]
        assert [chunk.checksum_matches for chunk in entry.chunks] == [False, True]
        assert entry.chunks[0].data_checksum != before.chunks[0].data_checksum
    assert reported.state is ReplicaState.UNHEALTHY
    assert reported.data_checksum == examination.result.tree.data_checksum != healthy.data_checksum


@pytest.mark.parametrize("hold", list(Hold))
def test_a_tree_of_records_does_not_bear_the_time_of_the_scan_whose_tree_was_lost(
    root: Path, hold: Hold
) -> None:
    with held(root, hold) as volume:
        volume.record_result(volume.write_tree(scan(volume)), NOW_MS)
        damage(block_file(volume), 1500)
        for path in root.parent.rglob("1.tree"):
            path.unlink()
        volume.refresh()
        assert volume.replica(ONE).data_checksum is None
        built = volume.examine(ONE, ScanDepth.METADATA, lambda _: None, lambda: False)
        volume.write_tree(built)
        assert volume.replica(ONE).data_checksum is not None
        assert volume.candidate(ONE).last_scan_ms is None
    with held(root, hold) as volume:
        assert volume.candidate(ONE).last_scan_ms is None
        volume.record_result(volume.write_tree(scan(volume)), NOW_MS + 1)
        volume.refresh()
        assert volume.candidate(ONE).last_scan_ms == NOW_MS + 1


def test_a_damaged_note_of_a_scan_means_one_scan_more(root: Path) -> None:
    with held(root, Hold.READ_ONLY) as volume:
        volume.record_result(scan(volume), NOW_MS)
        (volume.volume.state_folder / "scans" / "1.json").write_text("[")
        volume.refresh()
        assert volume.candidate(ONE).last_scan_ms is None


def test_a_tree_that_changed_during_a_scan_is_not_overwritten(root: Path) -> None:
    """inv-I4"""
    with held(root) as volume:
        examination = scan(volume)
        newer = ContainerTree.of(
            ONE, [*examination.result.tree.blocks, BlockTree.tombstone(BlockId(5), 77)]
        )
        volume.store_tree(newer, volume.trees.read(ONE).generation)
        with pytest.raises(StaleTreeError):
            volume.write_tree(examination)
        assert volume.trees.path(ONE).read_bytes() == encode_tree(newer)
        assert volume.replica(ONE).data_checksum == newer.data_checksum


def repaired_between(volume: ManagedVolume, good: bytes) -> None:
    """Repair the first window of the block, as a job does, and return it to service."""
    assert volume.writer is not None
    replica = repairable(volume)
    record = volume.containers.get(ONE).record(BLOCK)
    assert record is not None
    bad, _ = replica.check(BLOCK, record.chunks[0])
    chunk = record.chunks[0]
    runs = [
        run for index in bad for run in prove(chunk, index, good[slice(*_bytes_of(chunk, index))])
    ]
    assert runs
    replica.write_windows(BLOCK, chunk, runs)
    clean = replica.scan()
    assert clean.findings == ()
    if clean.state is ReplicaState.UNHEALTHY:
        replica.set_state(ReplicaState.CLOSED, clean.generation)


def _bytes_of(chunk: ChunkRecord, index: int) -> tuple[int, int]:
    start, length_bytes = chunk.window(index)
    return chunk.offset + start, chunk.offset + start + length_bytes


def test_a_scan_that_began_before_a_repair_does_not_undo_what_the_repair_proved(
    root: Path,
) -> None:
    """No scan had seen the damage, so the tree is the same before and after the
    repair.
    """
    with held(root) as volume:
        good, tree = block_file(volume).read_bytes(), volume.trees.raw(ONE)
        damage(block_file(volume), 100)
        slow = scan(volume)
        assert slow.result.findings
        repaired_between(volume, good)
        assert volume.trees.raw(ONE) == tree
        for settle in (
            lambda: volume.write_tree(slow),
            lambda: volume.record_result(slow, NOW_MS),
        ):
            with pytest.raises(StaleTreeError):
                settle()
        assert volume.trees.raw(ONE) == tree
        assert volume.containers.get(ONE).state is ReplicaState.CLOSED


def test_a_repair_between_the_tree_and_the_findings_of_a_scan_counts(root: Path) -> None:
    with held(root) as volume:
        good = block_file(volume).read_bytes()
        damage(block_file(volume), 100)
        slow = volume.write_tree(scan(volume))
        repaired_between(volume, good)
        with pytest.raises(StaleTreeError):
            volume.record_result(slow, NOW_MS)
        assert volume.containers.get(ONE).state is ReplicaState.CLOSED


def test_a_scan_that_saw_half_of_a_delete_reports_nothing(root: Path) -> None:
    """The tombstone comes first, then the file goes, then the record."""
    with held(root) as volume:
        assert volume.writer is not None
        record = volume.containers.get(ONE).record(BLOCK)
        assert record is not None
        volume.trees.add_tombstones(ONE, [record])
        hidden = block_file(volume).rename(root.parent / "hidden")
        half = scan(volume)
        assert half.result.findings
        hidden.rename(block_file(volume))
        volume.writer.receive_delete(DeleteTransaction(1, ONE, (BLOCK,)))
        assert volume.writer.delete_blocks(ONE) == [BLOCK]
        with pytest.raises(StaleTreeError):
            volume.record_result(half, NOW_MS)
        assert volume.containers.get(ONE).state is ReplicaState.CLOSED


def test_a_container_deleted_during_a_scan_stays_deleted(root: Path) -> None:
    """S12, S15"""
    with held(root) as volume:
        examination = scan(volume)
        ReplicaStore([volume], repair_enabled=True).delete_container(ONE)
        for act in (
            lambda: volume.write_tree(examination),
            lambda: volume.record_result(examination, NOW_MS),
        ):
            with pytest.raises(ContainerNotFoundError):
                act()
        assert [replica.container_id for replica in volume.replicas()] == [TWO]
        assert not list((root / "hdds").rglob("1.tree"))


def test_a_suspect_volume_is_given_up(root: Path) -> None:
    """S17"""
    with held(root) as volume:
        volume.volume.suspect = "a sync failed"
        with pytest.raises(VolumeError, match="a sync failed"):
            volume.candidates()


class _OpeningDisk(Disk):
    """Does something when the first block file is opened: a scan iterates over its
    records then.
    """

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            # As another thread does it, and no later than here.
            thread = Thread(target=act)
            thread.start()
            thread.join()
        with super().reader(path) as reader:
            yield reader


@contextmanager
def _held_by(disk: _OpeningDisk, root: Path, hold: Hold) -> Iterator[ManagedVolume]:
    with open_volume(root, hold=hold, state_folder=root.parent / "state", disk=disk) as volume:
        yield ManagedVolume(volume, disk, undo_bytes=0)


@pytest.mark.parametrize("hold", Hold)
@pytest.mark.parametrize("how", ["closed", "closed and lost"])
def test_a_scan_whose_database_is_closed_under_it_says_nothing_and_marks_nothing(
    root: Path, hold: Hold, how: str
) -> None:
    """S17: the scanner's step ends, the replica is as it was, and the next start scans
    it anew.
    """
    disk, metrics = _OpeningDisk(), Metrics(AGENT_METRICS)
    with _held_by(disk, root, hold) as held_volume:
        volume = held_volume.volume
        descriptor = held_volume.containers.get(ONE).descriptor_path
        before = descriptor.read_bytes()
        scanner = Scanner(
            held_volume, ScanPace(bytes_per_second=0), metrics=metrics, on_change=lambda _: None
        )

        def close() -> None:
            volume.close()
            if how == "closed and lost":
                for file in (descriptor.parents[1] / "chunks").iterdir():
                    file.unlink()

        disk.meanwhile = close
        while not volume.is_closed:
            assert scanner.step()
        assert held_volume.replica(ONE).state is ReplicaState.CLOSED
        assert held_volume.replica(ONE).data_scan_timestamp_ms is None
        assert descriptor.read_bytes() == before
        assert not (volume.state_folder / "scans").exists()
        counted = generate_latest(metrics.registry).decode()
        assert 'dnagent_scans_skipped_total{reason="interrupted"} 1.0' in counted
        assert "dnagent_findings_total{" not in counted
    if how == "closed":
        with held(root) as volume_again:
            assert (scan(volume_again).result.findings, volume_again.replica(ONE).state) == (
                (),
                ReplicaState.CLOSED,
            )


def test_a_mapped_scan_whose_database_is_closed_under_it_says_nothing(root: Path) -> None:
    """S17; more blocks than are asked of the worker ahead."""
    three = ContainerId(3)
    with owned(root, root.parent / "datanode") as datanode:
        datanode.writer.create_container(three)
        for number in range(1, 9):
            write_block(datanode.writer, three, number, 5000)
        datanode.writer.close(three)
    with held(root, mapped=MappedReader()) as volume:

        def close(_: int) -> None:
            volume.volume.close()

        with pytest.raises(OperationInterruptedError, match="was closed"):
            volume.examine(three, ScanDepth.DATA, close, lambda: False)


@pytest.mark.parametrize("hold", Hold)
def test_a_scan_whose_database_is_removed_under_it_ends_as_if_it_were_there(
    root: Path, hold: Hold
) -> None:
    """S17: its files are open, as those of a datanode that is being taken down are."""
    disk = _OpeningDisk()
    with _held_by(disk, root, hold) as volume:
        undisturbed = scan(volume).result
        disk.meanwhile = lambda: shutil.rmtree(volume.volume.database.path)
        result = scan(volume).result
        assert not volume.volume.database.path.exists()
        assert (result.tree, result.findings) == (undisturbed.tree, ())
        assert undisturbed.tree.blocks


@pytest.mark.parametrize("hold", Hold)
def test_a_container_whose_folder_and_rows_go_under_a_scan_is_deleted_and_not_damaged(
    root: Path, hold: Hold
) -> None:
    """S17, S12: another process deletes it, as the datanode under a read-only agent
    does.
    """
    disk = _OpeningDisk()
    with _held_by(disk, root, hold) as volume:
        disk.meanwhile = lambda: shutil.rmtree(volume.containers.get(ONE).folder)
        result = scan(volume).result
        assert (result.deleted, result.findings) == (True, ())


def test_what_may_not_be_written_is_not_opened_for_repair(root: Path) -> None:
    def open_one(volume: ManagedVolume, *, repair_enabled: bool) -> None:
        store = ReplicaStore([volume], repair_enabled=repair_enabled)
        store.open_replica(ONE, "j", cancelled=Event(), on_bytes=lambda _: None)

    with held(root, Hold.READ_ONLY) as volume, pytest.raises(ReadOnlyError, match="held read-only"):
        open_one(volume, repair_enabled=True)
    with held(root) as volume, pytest.raises(ReadOnlyError, match="not enabled"):
        open_one(volume, repair_enabled=False)


def test_a_damaged_window_is_found_written_proven_and_the_replica_returned(root: Path) -> None:
    with held(root) as volume:
        damage(block_file(volume), 1500)
        damaged = block_file(volume).read_bytes()
        replica = repairable(volume)
        first = replica.scan()
        assert (first.findings, first.state) == (((BLOCK, 0),), ReplicaState.UNHEALTHY)
        own = replica.own()
        assert own.state is ReplicaState.UNHEALTHY
        chunk = replica.records([BLOCK, BlockId(99)])[BLOCK].chunks[0]
        assert replica.check(BLOCK, chunk) == ((1,), 7500)
        runs = prove(chunk, 1, content(BLOCK, 7500)[1024:2048])
        replica.write_windows(BLOCK, chunk, runs)
        assert replica.check(BLOCK, chunk) == ((), 7500)
        assert block_file(volume).read_bytes() == content(BLOCK, 7500)
        # What stood there is kept, and by the job's name.
        [copy] = (volume.volume.state_folder / "undo" / "1" / "job-1").iterdir()
        assert copy.read_bytes() == damaged[1024:2048]
        scanned = replica.scan()
        assert (scanned.findings, scanned.state) == ((), ReplicaState.UNHEALTHY)
        assert scanned.generation == volume.trees.read(ONE).generation
        replica.set_state(ReplicaState.CLOSED, scanned.generation)
        assert volume.replica(ONE).state is ReplicaState.CLOSED
        with pytest.raises(ContainerStateError, match="CLOSED, not UNHEALTHY"):
            replica.set_state(ReplicaState.CLOSED, scanned.generation)


def test_a_repair_beyond_the_undo_budget_writes_nothing(root: Path) -> None:
    with held(root, undo_bytes=1023) as volume:
        damage(block_file(volume), 1500)
        before = block_file(volume).read_bytes()
        replica = repairable(volume)
        chunk = replica.records([BLOCK])[BLOCK].chunks[0]
        with pytest.raises(UndoBudgetError):
            replica.write_windows(BLOCK, chunk, prove(chunk, 1, content(BLOCK, 7500)[1024:2048]))
        assert block_file(volume).read_bytes() == before


@pytest.mark.parametrize(
    ("length", "bad"),
    [(None, (0, 1, 2, 3, 4)), (0, (0, 1, 2, 3, 4)), (2000, (1, 2, 3, 4)), (5000, ()), (7500, ())],
)
def test_windows_that_the_file_lacks_are_bad(
    root: Path, length: int | None, bad: tuple[int, ...]
) -> None:
    with held(root) as volume:
        path = block_file(volume)
        if length is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:length])
        replica = repairable(volume)
        chunk = replica.records([BLOCK])[BLOCK].chunks[0]
        assert replica.check(BLOCK, chunk) == (bad, length or 0)


def test_a_commit_is_raised_and_never_lowered(root: Path) -> None:
    with held(root) as volume:
        replica = repairable(volume)
        for bcs_id in (7, 3):
            replica.advance_bcs_id(bcs_id)
            assert volume.replica(ONE).bcs_id == replica.own().bcs_id == 7


def test_a_tree_of_an_older_generation_is_refused(root: Path) -> None:
    with held(root) as volume:
        replica = repairable(volume)
        own = replica.own()
        assert own.tree is not None
        tree = ContainerTree.of(ONE, [*own.tree.blocks, BlockTree.tombstone(BlockId(5), 77)])
        stored = replica.store_tree(tree, own.generation)
        assert (stored.tree, replica.own().generation) == (tree, stored.generation)
        with pytest.raises(StaleTreeError):
            replica.store_tree(own.tree, own.generation)


def test_a_cancelled_repair_ends_its_scan(root: Path) -> None:
    with held(root) as volume:
        store = ReplicaStore([volume], repair_enabled=True)
        cancelled = Event()
        cancelled.set()
        replica = store.open_replica(ONE, "j", cancelled=cancelled, on_bytes=lambda _: None)
        with pytest.raises(OperationInterruptedError):
            replica.scan()
        assert volume.candidate(ONE).last_scan_ms is None


class _CancelledWhileWaited(Event):
    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return super().wait(timeout)


def test_a_repair_that_waits_to_scan_again_hears_that_it_is_cancelled(root: Path) -> None:
    with held(root) as volume:
        other, deleted = repairable(volume), list[BlockTree]()

        def write_the_tree_meanwhile(_: int) -> None:
            deleted.append(BlockTree.tombstone(BlockId(100 + len(deleted)), 77))
            other.store_tree(ContainerTree.of(ONE, deleted), other.own().generation)

        store = ReplicaStore([volume], repair_enabled=True)
        replica = store.open_replica(
            ONE, "j", cancelled=_CancelledWhileWaited(), on_bytes=write_the_tree_meanwhile
        )
        with pytest.raises(OperationInterruptedError):
            replica.scan()


def test_deleting_a_container_ends_its_repair_first(root: Path) -> None:
    """CR-057"""
    interrupted = list[ContainerId]()

    with held(root) as volume:

        def interrupt(container_id: ContainerId) -> bool:
            # Nobody can begin another one behind our back.
            with pytest.raises(ContainerNotFoundError):
                store.open_replica(ONE, "j", cancelled=Event(), on_bytes=lambda _: None)
            assert block_file(volume).exists()
            interrupted.append(container_id)
            return True

        store = ReplicaStore([volume], repair_enabled=True, interrupt=interrupt)
        replica = store.open_replica(ONE, "j", cancelled=Event(), on_bytes=lambda _: None)
        record: BlockRecord = replica.records([BLOCK])[BLOCK]
        store.delete_container(ONE)
        assert interrupted == [ONE]
        assert not block_file(volume).exists()
        # A repair that did not notice is refused whatever it tries.
        with pytest.raises(ContainerNotFoundError):
            replica.put_block(record)
        with pytest.raises(ContainerNotFoundError):
            replica.own()


def test_a_repair_that_ends_during_a_deletion_does_not_bring_its_replica_back(root: Path) -> None:
    """CR-057: its last change reloads the replica from a disk that still has it."""
    with held(root) as volume:
        assert volume.writer is not None
        volume.writer.mark_unhealthy(ONE)
        ended = list[ReplicaState]()

        def interrupt(container_id: ContainerId) -> bool:
            with pytest.raises(ContainerNotFoundError):
                replica.set_state(ReplicaState.CLOSED, clean.generation)
            volume.reload(container_id)
            ended.append(volume.containers.open(container_id).state)
            return True

        store = ReplicaStore([volume], repair_enabled=True, interrupt=interrupt)
        replica = store.open_replica(ONE, "j", cancelled=Event(), on_bytes=lambda _: None)
        clean = replica.scan()
        assert (clean.findings, clean.state) == ((), ReplicaState.UNHEALTHY)
        store.delete_container(ONE)
        assert ended == [ReplicaState.UNHEALTHY]
        assert [found.container_id for found in store.replicas()] == [TWO]
        with pytest.raises(ContainerNotFoundError):
            volume.candidate(ONE)


def test_a_repair_that_does_not_end_keeps_its_container(root: Path) -> None:
    """CR-057"""
    with held(root) as volume:
        store = ReplicaStore([volume], repair_enabled=True, interrupt=lambda _: False)
        before = volume.replica(ONE)
        with pytest.raises(BusyError):
            store.delete_container(ONE)
        assert volume.replica(ONE) == before
        assert block_file(volume).exists()


def test_a_deletion_that_was_cut_short_is_finished_at_the_next_start(root: Path) -> None:
    with held(root) as volume:
        assert volume.writer is not None
        volume.writer.set_state(ONE, ReplicaState.DELETED)
    with held(root) as volume:
        assert [replica.container_id for replica in volume.replicas()] == [TWO]
        assert not block_file(volume).exists()


def test_a_deletion_that_cannot_be_finished_stops_no_other_container(root: Path) -> None:
    with held(root) as volume:
        assert volume.writer is not None
        volume.writer.set_state(ONE, ReplicaState.DELETED)
    [gone] = root.glob("hdds/*/tmp/deleted-containers")
    disk = FailingDisk(
        errno.EIO, lambda operation, path: operation is Operation.RENAME and path.parent == gone
    )
    volume = open_volume(root, hold=Hold.OWNER, state_folder=root.parent / "state", disk=disk)
    with closing(ManagedVolume(volume, disk, undo_bytes=1 << 20)) as opened:
        assert disk.failed
        states = {replica.container_id: replica.state for replica in opened.replicas()}
        assert states == {ONE: ReplicaState.DELETED, TWO: ReplicaState.OPEN}
    with held(root) as volume:
        assert [replica.container_id for replica in volume.replicas()] == [TWO]


def test_a_read_only_volume_deletes_nothing(root: Path) -> None:
    with held(root, Hold.READ_ONLY) as volume, pytest.raises(ReadOnlyError):
        ReplicaStore([volume], repair_enabled=True).delete_container(ONE)


def test_of_a_container_on_two_volumes_ozones_choice_counts(tmp_path: Path) -> None:
    """Ozone takes the CLOSED one, then the higher commit; the first volume has the
    older, damaged copy.
    """
    with ExitStack() as stack:
        volumes = []
        for number, blocks in enumerate((1, 2), start=1):
            root = new_volume(
                tmp_path / f"v{number}", version=replace(VERSION, storage_id=f"DS-{number}")
            )
            with owned(root, tmp_path / "writer") as made:
                made.writer.create_container(ONE)
                for block in range(1, blocks + 1):
                    write_block(made.writer, ONE, BlockId(block), 3000, bcs_id=block)
                made.writer.close(ONE)
                if number == 1:
                    made.writer.mark_unhealthy(ONE)
            volumes.append(stack.enter_context(held(root)))
        store = ReplicaStore(volumes, repair_enabled=True)
        first, second = volumes
        assert store.replicas() == [second.replica(ONE)]
        assert store.volume_of(ONE) is second
        assert store.duplicates() == {ONE: (second.name, first.name)}
        assert store.head(ONE).bcs_id == 2


def duplicate(state: ReplicaState, bcs_id: int = 0, *, replica_index: int = 0) -> ContainerReplica:
    own = PeerId("dn-1")
    return ContainerReplica(own, ONE, state, None, bcs_id, replica_index=replica_index)


@pytest.mark.parametrize(
    ("replicas", "counts"),
    [
        ([duplicate(ReplicaState.CLOSED, 1), duplicate(ReplicaState.CLOSED, 1)], 0),
        ([duplicate(ReplicaState.CLOSED, 1), duplicate(ReplicaState.CLOSED, 2)], 1),
        ([duplicate(ReplicaState.QUASI_CLOSED, 9), duplicate(ReplicaState.CLOSED, 2)], 1),
        ([duplicate(ReplicaState.UNHEALTHY, 3), duplicate(ReplicaState.QUASI_CLOSED, 2)], 0),
        ([duplicate(ReplicaState.INVALID), duplicate(ReplicaState.OPEN)], 1),
        (
            [
                duplicate(ReplicaState.UNHEALTHY, replica_index=2),
                duplicate(ReplicaState.CLOSED, replica_index=1),
            ],
            0,
        ),
    ],
)
def test_which_copy_counts(replicas: list[ContainerReplica], counts: int) -> None:
    assert preferred(replicas) == counts
