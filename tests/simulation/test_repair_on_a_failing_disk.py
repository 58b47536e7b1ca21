"""Whatever operation of a repair the disk refuses or a crash cuts short, the next run
does the rest; a refusal is named.

Real volumes: the last two blocks of a small container are damaged in every way that a
repair mends.
"""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from dnagent.volumes import ManagedVolume
from merkle.outcome import OutcomeState, RepairOutcome, Verdict
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.rocks import Batch, OzoneTable, block_key
from repair.requests import ReconcileOptions
from runtime.disk import Disk, Operation
from tests.support.disk import PAGE_BYTES, BadSectorDisk, CountingDisk, FailingDisk, ImagingDisk
from tests.support.in_process import datanodes, reconcile
from tests.support.volumes import container_folder, new_volume, owned, tree_of_files, write_block

pytestmark = pytest.mark.crashes

CONTAINER = ContainerId(9)


@pytest.fixture(scope="module")
def volumes(module_memory_folder: Path) -> Path:
    """`healthy` and `damaged`: a flipped window, a truncated file, and a block of which
    nothing is left.
    """
    folder = module_memory_folder / "volumes"
    folder.mkdir()
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
    volumes: Path, memory_folder: Path
) -> None:
    """inv-I7, inv-I8."""
    total = _operations(volumes, memory_folder)
    assert total > 20
    for number in range(total):
        folder = memory_folder / str(number)
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


def _blocks(volume: Path) -> dict[str, bytes]:
    return {name: data for name, data in _data(volume).items() if name.endswith(".block")}


def _good_bytes(found: bytes, whole: bytes) -> set[int]:
    return {at for at, (one, other) in enumerate(zip(found, whole, strict=False)) if one == other}


def test_a_crash_at_any_point_of_a_reconciliation_loses_nothing_and_the_next_does_the_rest(
    volumes: Path, memory_folder: Path
) -> None:
    """inv-I3, inv-I7, inv-I8: from the first write to the return to service."""
    start = memory_folder / "start"
    shutil.copytree(volumes, start)
    before, whole = _blocks(start / "damaged"), _blocks(start / "healthy")
    shutil.move(start / "healthy", memory_folder / "healthy")
    disk = ImagingDisk(start, memory_folder / "images")
    disk.is_armed = False

    def run(folder: Path, disk: Disk, arm: Callable[[ManagedVolume], None]) -> RepairOutcome:
        roots = {"dn1": folder / "damaged", "dn2": memory_folder / "healthy"}
        with datanodes(roots, folder / "state", disks={"dn1": disk}) as nodes:
            arm(nodes["dn1"].held)
            return reconcile(
                nodes, "dn1", CONTAINER, options=ReconcileOptions(return_to=ReplicaState.CLOSED)
            )

    def arm(held: ManagedVolume) -> None:
        disk.watch(held.volume.database)
        disk.is_armed = True

    def check(held: ManagedVolume) -> None:
        container = held.containers.open(CONTAINER)
        found = _blocks(root)
        for name, good in before.items():
            assert _good_bytes(found[name], whole[name]) >= _good_bytes(good, whole[name])
        if container.record(BlockId(3)) is not None:
            assert found["chunks/3.block"] == whole["chunks/3.block"]
        if container.state is ReplicaState.CLOSED:
            assert found == whole
            assert container.record(BlockId(3)) is not None
        assert container.state is ReplicaState.CLOSED or not image.is_final

    outcome = run(start, disk, arm)
    assert (outcome.verdict, outcome.replica_state) == (Verdict.REPAIRABLE, ReplicaState.CLOSED)
    for image in disk.finish():
        root = image.folder / "damaged"
        try:
            outcome = run(image.folder, Disk(), check)
            assert outcome.state is OutcomeState.DONE
            assert outcome.replica_state in (None, ReplicaState.CLOSED), outcome
            assert _data(root) == _data(memory_folder / "healthy")
        except AssertionError as error:
            raise AssertionError(f"{image}: {error}") from error
        shutil.rmtree(image.folder)


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
