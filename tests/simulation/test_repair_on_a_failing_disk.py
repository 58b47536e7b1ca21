"""Whatever operation of a repair the disk refuses, the reason is named and the next run
does the rest.

Real volumes: the last two blocks of a small container are damaged in every way that a
repair mends.
"""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from merkle.outcome import OutcomeState, RepairOutcome, Verdict
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.rocks import Batch, OzoneTable, block_key
from repair.requests import ReconcileOptions
from runtime.disk import Disk, Operation
from tests.support.disk import PAGE_BYTES, BadSectorDisk, CountingDisk, FailingDisk
from tests.support.in_process import datanodes, reconcile
from tests.support.volumes import container_folder, new_volume, owned, tree_of_files, write_block

CONTAINER = ContainerId(9)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`healthy` and `damaged`: a flipped window, a truncated file, and a block of which
    nothing is left.
    """
    folder = tmp_path_factory.mktemp("volumes")
    new_volume(folder / "healthy")
    with owned(folder / "healthy", folder / "state") as made:
        made.writer.create_container(CONTAINER)
        for block_id in (1, 2, 3):
            write_block(made.writer, CONTAINER, block_id, 4096, 3000, bcs_id=block_id)
        made.writer.close(CONTAINER)
    shutil.copytree(folder / "healthy", folder / "damaged")
    with datanodes({"dn1": folder / "damaged"}, folder / "state") as nodes:
        held = nodes["dn1"].held
        paths = {
            block_id: held.containers.get(CONTAINER).block_path(BlockId(block_id))
            for block_id in (1, 2, 3)
        }
        flipped = bytearray(paths[1].read_bytes())
        flipped[100] ^= 4
        paths[1].write_bytes(flipped)
        paths[2].write_bytes(paths[2].read_bytes()[:5000])
        paths[3].unlink()
        batch = Batch()
        batch.delete(OzoneTable.BLOCK_DATA, block_key(CONTAINER, BlockId(3)))
        held.volume.database.write(batch)
        nodes["dn1"].store.open_replica(
            CONTAINER, "scan", cancelled=Event(), on_bytes=lambda _: None
        ).scan()
    return folder


def _run(
    volumes: Path, root: Path, state: Path, disk: Disk, arm: Callable[[], None] = lambda: None
) -> RepairOutcome:
    with datanodes({"dn1": root, "dn2": volumes / "healthy"}, state, disks={"dn1": disk}) as nodes:
        arm()
        return reconcile(nodes, "dn1", CONTAINER)


def _data(volume: Path) -> dict[str, bytes]:
    folder = container_folder(volume, CONTAINER)
    return {
        name: data
        for name, data in tree_of_files(folder).items()
        if name.endswith((".block", ".tree"))
    }


def _operations(volumes: Path, tmp_path: Path) -> int:
    """How many durable operations an undisturbed repair takes."""
    disk = CountingDisk()
    root = Path(shutil.copytree(volumes / "damaged", tmp_path / "counted"))
    outcome = _run(volumes, root, tmp_path / "counted-state", disk, disk.operations.clear)
    assert outcome.verdict is Verdict.REPAIRABLE
    assert _data(root) == _data(volumes / "healthy")
    return len(disk.operations)


def test_a_failure_of_any_durable_operation_is_named_and_the_next_run_mends_the_rest(
    volumes: Path, tmp_path: Path
) -> None:
    """inv-I7, inv-I8."""
    total = _operations(volumes, tmp_path)
    assert total > 20
    for number in range(total):
        folder = tmp_path / str(number)
        root = Path(shutil.copytree(volumes / "damaged", folder / "volume1"))
        countdown = [10**9]

        def fails(_operation: Operation, _path: Path, countdown: list[int] = countdown) -> bool:
            countdown[0] -= 1
            return countdown[0] == -1

        def arm(countdown: list[int] = countdown, number: int = number) -> None:
            countdown[0] = number

        disk = FailingDisk(errno.EIO, fails)
        outcome = _run(volumes, root, folder / "state", disk, arm)
        (failed,) = disk.failed
        if outcome.state is not OutcomeState.DONE:
            assert outcome.error_code in ("disk_failed", "database_failed"), (failed, outcome)
        calm = _run(volumes, root, folder / "state", Disk())
        assert (calm.state, calm.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)) == (
            OutcomeState.DONE,
            True,
        ), failed
        assert _data(root) == _data(volumes / "healthy"), failed
        shutil.rmtree(folder)


def test_a_window_on_a_bad_sector_is_mended_and_its_audit_line_says_what_no_undo_copy_has(
    volumes: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(volumes / "healthy", tmp_path / "volume1"))
    disk = BadSectorDisk()
    roots = {"dn1": root, "dn2": volumes / "healthy"}
    with datanodes(roots, tmp_path / "state", disks={"dn1": disk}) as nodes:
        path = nodes["dn1"].held.containers.get(CONTAINER).block_path(BlockId(1))
        disk.bad.add((path, 0))
        scanned = (
            nodes["dn1"]
            .store.open_replica(CONTAINER, "scan", cancelled=Event(), on_bytes=lambda _: None)
            .scan()
        )
        assert scanned.state is ReplicaState.UNHEALTHY
        outcome = reconcile(
            nodes, "dn1", CONTAINER, options=ReconcileOptions(return_to=ReplicaState.CLOSED)
        )
        assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.REPAIRABLE)
        assert outcome.replica_state is ReplicaState.CLOSED
        assert sum(nodes["dn1"].unread) == PAGE_BYTES
    assert _data(root) == _data(volumes / "healthy")
