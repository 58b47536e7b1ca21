"""Ozone's own tests of three reconciling replicas (rows R), and how little a repair
fetches, on containers we wrote.
"""

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from merkle.checksum import ChecksumType
from merkle.errors import ReconcileError
from merkle.outcome import OutcomeState, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange
from ozone.rocks import Batch, Counter, OzoneTable, block_key
from repair.ports import Piece
from runtime.disk import Disk, disk_error
from runtime.errors import PeerRefusedError, PeerUnavailableError
from scm.policy import Roots, roots
from tests.support.in_process import Datanode, datanodes, reconcile
from tests.support.peers import MemoryPeer
from tests.support.volumes import block_record, chunk_record, content, new_volume, owned
from tests.support.whole_job import whole_job

CONTAINER = ContainerId(100)
BLOCKS = 15
CHUNKS = 4
CHUNK_BYTES = 3072
WINDOW_BYTES = 2048
NAMES = ("dn1", "dn2", "dn3")
MIB = 1 << 20


def _write(
    root: Path, state: Path, blocks: int, chunks: int, chunk_bytes: int, window_bytes: int
) -> None:
    """A closed container; the commit of a block is its ID."""
    new_volume(root)
    with owned(root, state) as made:
        made.writer.create_container(CONTAINER)
        for block_id in range(blocks):
            data = content(block_id, chunks * chunk_bytes)
            records = []
            for offset in range(0, len(data), chunk_bytes):
                part = data[offset : offset + chunk_bytes]
                made.writer.write_chunk(CONTAINER, BlockId(block_id), offset, part)
                record = chunk_record(
                    offset, part, checksum_type=ChecksumType.CRC32, bytes_per_checksum=window_bytes
                )
                records.append(record)
            assert made.writer.put_block(
                block_record(CONTAINER, block_id, records, bcs_id=block_id)
            )
        made.writer.close(CONTAINER)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    _write(folder / "volume1", folder / "state", BLOCKS, CHUNKS, CHUNK_BYTES, WINDOW_BYTES)
    return folder / "volume1"


def _copies(written: Path, target: Path, names: Sequence[str] = NAMES) -> dict[str, Path]:
    return {name: Path(shutil.copytree(written, target / name / "volume1")) for name in names}


def _remove_block(node: Datanode, block_id: int) -> None:
    """The file and the record, as in Ozone's test."""
    node.held.containers.get(CONTAINER).block_path(BlockId(block_id)).unlink()
    _remove_record(node, block_id)


def _remove_record(node: Datanode, block_id: int) -> None:
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(CONTAINER, BlockId(block_id)))
    node.held.volume.database.write(batch)


def _flip(node: Datanode, block_id: int, offset: int) -> None:
    path = node.held.containers.get(CONTAINER).block_path(BlockId(block_id))
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x80
    path.write_bytes(data)


def _corrupt_chunk(node: Datanode, block_id: int, chunk: int) -> None:
    """The last byte of the chunk and one nearer the start of the file."""
    path = node.held.containers.get(CONTAINER).block_path(BlockId(block_id))
    data = bytearray(path.read_bytes())
    data[(chunk + 1) * CHUNK_BYTES - 1] ^= 0x10
    data[((chunk + 1) * CHUNK_BYTES - 1) // 2] ^= 0x01
    path.write_bytes(data)


def _scan(node: Datanode) -> None:
    node.store.open_replica(CONTAINER, "scan", cancelled=Event(), on_bytes=lambda _: None).scan()


def _root(node: Datanode) -> int:
    """The root, the same in the file, in the database and in memory."""
    in_file = node.held.trees.read(CONTAINER).tree.data_checksum
    in_memory = node.held.replica(CONTAINER).data_checksum
    in_database = node.held.volume.database.get_long(CONTAINER, Counter.DATA_CHECKSUM)
    assert in_file is not None
    assert in_file == in_memory == in_database
    return in_file


def _files(node: Datanode) -> dict[str, bytes]:
    folder = node.held.containers.get(CONTAINER).chunks_folder
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_closed_replicas_have_one_root_and_a_scan_leaves_it(written: Path, tmp_path: Path) -> None:
    """R1, R2."""
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        roots = {_root(node) for node in nodes.values()}
        assert len(roots) == 1
        assert roots != {0}
        for node in nodes.values():
            _scan(node)
        assert {_root(node) for node in nodes.values()} == roots


@pytest.mark.parametrize(
    ("removed", "corrupted"),
    [
        (5, 0),
        (0, 5),
        (0, 10),
        (10, 0),
        (5, 10),
        (10, 5),
        (2, 3),
        (3, 2),
        (4, 6),
        (6, 4),
        (6, 9),
        (9, 6),
    ],
)
def test_three_replicas_damaged_in_different_places_end_equal_in_one_round(
    written: Path, tmp_path: Path, removed: int, corrupted: int
) -> None:
    """CR-003, CR-042, R3, R4.

    Damage counted from the first block on one replica, from the last on another; at
    most one scan each.
    """
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        healthy, files = _root(nodes["dn3"]), _files(nodes["dn3"])
        for name, order in (("dn1", range(BLOCKS)), ("dn2", range(BLOCKS - 1, -1, -1))):
            for block_id in order[:removed]:
                _remove_block(nodes[name], block_id)
            chunks = [(block_id, chunk) for block_id in order[removed:] for chunk in range(CHUNKS)]
            for block_id, chunk in chunks[:corrupted]:
                _corrupt_chunk(nodes[name], block_id, chunk)
        for node in nodes.values():
            _scan(node)
        assert len({_root(node) for node in nodes.values()}) == 3
        outcomes = [reconcile(nodes, name, CONTAINER) for name in NAMES]
        assert {_root(node) for node in nodes.values()} == {healthy}
        assert [_files(node) for node in nodes.values()] == [files] * 3
        assert {outcome.verdict for outcome in outcomes} <= {Verdict.MATCH, Verdict.REPAIRABLE}
        assert all(
            outcome.progress.scans <= 1 and outcome.progress.rounds == 1 for outcome in outcomes
        )
        for node in nodes.values():
            counters = node.held.containers.get(CONTAINER).counters()
            assert counters.block_count == BLOCKS
            assert counters.used_bytes == BLOCKS * CHUNKS * CHUNK_BYTES
            assert counters.bcs_id == BLOCKS - 1


def test_replicas_of_ten_eleven_and_twelve_blocks_end_with_twelve(
    written: Path, tmp_path: Path
) -> None:
    """CR-041, with three blocks more on each: what one misses the others have, and
    nobody has all.
    """
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        healthy = _root(nodes["dn3"])
        for name, missing in (("dn1", (0, 1)), ("dn2", (2,)), ("dn3", (3, 4, 5))):
            for block_id in missing:
                _remove_block(nodes[name], block_id)
        for node in nodes.values():
            _scan(node)
        for name in NAMES:
            reconcile(nodes, name, CONTAINER)
        assert {_root(node) for node in nodes.values()} == {healthy}
        assert {len(_files(node)) for node in nodes.values()} == {BLOCKS}


def test_one_job_is_enough_where_a_single_record_is_left(written: Path, tmp_path: Path) -> None:
    """The first two have nothing to go by until the third, with what the second has
    left, put the chunk together.
    """
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        healthy, files = _root(nodes["dn3"]), _files(nodes["dn3"])
        _remove_block(nodes["dn1"], 5)
        _remove_record(nodes["dn2"], 5)
        _flip(nodes["dn2"], 5, WINDOW_BYTES)
        _flip(nodes["dn3"], 5, 0)
        for node in nodes.values():
            _scan(node)

        def now() -> Roots:
            return roots(
                replace(node.held.replica(CONTAINER), peer=node.name) for node in nodes.values()
            )

        job = whole_job(
            CONTAINER,
            [PeerId(name) for name in NAMES],
            now,
            lambda names: {name: reconcile(nodes, name, CONTAINER) for name in names},
        )
        assert [order.round for order in job.orders] == [2, 2, 1]
        assert {order.progress.verdict for order in job.orders} == {Verdict.REPAIRABLE}
        assert {_root(node) for node in nodes.values()} == {healthy}
        assert [_files(node) for node in nodes.values()] == [files] * 3


class _FailingPeer(MemoryPeer):
    """Fails in one kind of call and counts all."""

    def __init__(self, node: Datanode, fails: str, error: Callable[[], ReconcileError]) -> None:
        super().__init__(node.name, node.peer().source)
        self._fails = fails
        self._error = error
        self.calls: list[str] = []

    def _call(self, kind: str) -> None:
        self.calls.append(kind)
        if kind == self._fails:
            raise self._error()

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self._call("tree")
        return super().tree(container_id)

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        self._call("records")
        return super().records(container_id, block_ids)

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        self._call("read")
        yield from super().read(container_id, block_id, record_chunk, ranges)


@pytest.mark.parametrize("call", ["tree", "records", "read"])
@pytest.mark.parametrize(
    "error", [lambda: PeerUnavailableError("no answer"), lambda: PeerRefusedError("no", result="x")]
)
def test_one_failing_peer_does_not_keep_the_other_from_helping(
    written: Path, tmp_path: Path, call: str, error: Callable[[], ReconcileError]
) -> None:
    """CR-039, R5."""
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        healthy = _root(nodes["dn3"])
        _remove_block(nodes["dn1"], 3)
        _corrupt_chunk(nodes["dn1"], 7, 1)
        _scan(nodes["dn1"])
        failing = _FailingPeer(nodes["dn2"], call, error)
        outcome = reconcile(
            nodes,
            "dn1",
            CONTAINER,
            peers={failing.peer_id: failing, PeerId("dn3"): nodes["dn3"].peer()},
        )
        assert outcome.state is OutcomeState.DONE
        assert outcome.verdict is Verdict.REPAIRABLE
        assert _root(nodes["dn1"]) == healthy
        assert failing.calls


class _UnreadableTree(Disk):
    """The tree file cannot be read the first time."""

    def __init__(self) -> None:
        self.is_armed = False

    def read(self, path: Path) -> bytes:
        if self.is_armed and path.suffix == ".tree":
            self.is_armed = False
            raise disk_error("read", path, OSError(errno.EIO, "Input/output error"))
        return super().read(path)


def test_an_own_tree_that_cannot_be_read_ends_the_job_but_not_the_scan(
    written: Path, tmp_path: Path
) -> None:
    """R6."""
    disk = _UnreadableTree()
    with datanodes(_copies(written, tmp_path), tmp_path / "state", disks={"dn1": disk}) as nodes:
        healthy = _root(nodes["dn1"])
        disk.is_armed = True
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "disk_failed")
        assert outcome.progress.scans == 1
        assert _root(nodes["dn1"]) == healthy


def test_peers_without_a_tree_are_asked_once_and_change_nothing(
    written: Path, tmp_path: Path
) -> None:
    """R7."""
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        files = _files(nodes["dn1"])
        peers = [
            _FailingPeer(nodes[name], "tree", lambda: PeerRefusedError("no", result="x"))
            for name in NAMES[1:]
        ]
        outcome = reconcile(nodes, "dn1", CONTAINER, peers={peer.peer_id: peer for peer in peers})
        assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "no_peer")
        assert [peer.calls for peer in peers] == [["tree"], ["tree"]]
        assert _files(nodes["dn1"]) == files


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MiB as clients write them by default: chunks of 4 MiB, windows of 16 KiB."""
    folder = tmp_path_factory.mktemp("large")
    _write(folder / "volume1", folder / "state", 4, 4, 4 * MIB, 16 << 10)
    return folder / "volume1"


def test_one_flipped_byte_of_64_mib_costs_one_window(large: Path, tmp_path: Path) -> None:
    """CR-017"""
    with datanodes(_copies(large, tmp_path, NAMES[:2]), tmp_path / "state") as nodes:
        _flip(nodes["dn1"], 2, 9_000_001)
        _scan(nodes["dn1"])
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert outcome.verdict is Verdict.REPAIRABLE
        assert outcome.progress.bytes_fetched == outcome.progress.bytes_written == 16 << 10
        assert _root(nodes["dn1"]) == _root(nodes["dn2"])


def test_one_lost_chunk_costs_no_more_than_the_chunk(large: Path, tmp_path: Path) -> None:
    with datanodes(_copies(large, tmp_path, NAMES[:2]), tmp_path / "state") as nodes:
        path = nodes["dn1"].held.containers.get(CONTAINER).block_path(BlockId(1))
        with path.open("r+b") as file:
            file.truncate(12 * MIB)
        _scan(nodes["dn1"])
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert outcome.progress.bytes_fetched == 4 * MIB
        assert _root(nodes["dn1"]) == _root(nodes["dn2"])


def test_a_lost_record_of_whole_data_costs_nothing(large: Path, tmp_path: Path) -> None:
    """CR-003"""
    with datanodes(_copies(large, tmp_path, NAMES[:2]), tmp_path / "state") as nodes:
        _remove_record(nodes["dn1"], 1)
        _scan(nodes["dn1"])
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert (outcome.progress.blocks_added, outcome.progress.bytes_fetched) == (1, 0)
        assert nodes["dn1"].store.record(CONTAINER, BlockId(1)) == nodes["dn2"].store.record(
            CONTAINER, BlockId(1)
        )


def test_an_undo_budget_that_is_used_up_ends_the_repair_with_its_name(
    written: Path, tmp_path: Path
) -> None:
    with datanodes(
        _copies(written, tmp_path), tmp_path / "state", undo_bytes=3 * WINDOW_BYTES
    ) as nodes:
        for block_id in range(BLOCKS):
            _corrupt_chunk(nodes["dn1"], block_id, 1)
        _scan(nodes["dn1"])
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "undo_budget")
        assert 0 < outcome.progress.bytes_written <= 3 * WINDOW_BYTES


def test_an_open_replica_is_refused_and_nobody_is_asked(written: Path, tmp_path: Path) -> None:
    """inv-I13."""
    with datanodes(_copies(written, tmp_path), tmp_path / "state") as nodes:
        held = nodes["dn1"].held
        assert held.writer is not None
        held.writer.set_state(CONTAINER, ReplicaState.CLOSING)
        held.reload(CONTAINER)
        outcome = reconcile(nodes, "dn1", CONTAINER)
        assert (outcome.state, outcome.error_code) == (OutcomeState.REFUSED, "container_state")
