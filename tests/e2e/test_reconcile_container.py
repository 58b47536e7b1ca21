"""Ozone's end-to-end tests of reconciliation (rows E1-E3), with real processes: one
cluster for all three.
"""

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.volume import Version
from tests.support.processes import TreefoldProcess, agent, controller
from tests.support.volumes import content, flip, new_volume, owned, write_block
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
NAMES = ("dn1", "dn2", "dn3")
LOSING, CORRUPTED, SCATTERED = ContainerId(1), ContainerId(2), ContainerId(3)
# A key of 20 MiB and smaller ones.
BLOCKS = {LOSING: (20, 1 << 20), CORRUPTED: (8, 64 << 10), SCATTERED: (2, 8 << 10)}

Disk = tuple[dict[int, bytes], dict[int, bytes], list[BlockRecord]]


def on_disk(root: Path, state: Path) -> Disk:
    """What a volume whose agent has ended holds: trees, block files and records."""
    trees, files = dict[int, bytes](), dict[int, bytes]()
    records = list[BlockRecord]()
    with owned(root, state) as volume:
        for container_id in BLOCKS:
            container = volume.store.open(container_id)
            trees[int(container_id)] = container.tree_path.read_bytes()
            records += container.records()
            files |= {int(b): container.block_path(b).read_bytes() for b in container.block_ids()}
    return trees, files, records


def make_volume(folder: Path, number: int) -> Path:
    """The containers, closed: block IDs from 100 in the first, from 200 in the second,
    from 300 in the third.
    """
    version = Version(f"DS-{number}", "CID-1", f"00000000-0000-4000-8000-00000000000{number}")
    root = new_volume(folder / "volume1", version=version)
    with owned(root, folder / "writer") as volume:
        for container_id, (blocks, length) in BLOCKS.items():
            volume.writer.create_container(container_id)
            for block_id in range(100 * container_id, 100 * container_id + blocks):
                write_block(
                    volume.writer, container_id, block_id, length // 2, length // 2, bcs_id=block_id
                )
            volume.writer.close(container_id)
    return root


def remove_every_second_block(folder: Path) -> None:
    with owned(folder / "volume1", folder / "writer") as volume:
        container, batch = volume.store.open(LOSING), Batch()
        for block_id in container.block_ids()[::2]:
            container.block_path(block_id).unlink()
            batch.delete(OzoneTable.BLOCK_DATA, block_key(LOSING, block_id))
        volume.volume.database.write(batch)


def corrupt_every_block(folder: Path) -> None:
    with owned(folder / "volume1", folder / "writer") as volume:
        container = volume.store.open(CORRUPTED)
        for block_id in container.block_ids():
            flip(container.block_path(block_id), 0)


def scatter_a_block(folders: Sequence[Path]) -> None:
    """The first has nothing left of it, the second lost the record and a window, the
    third another window.
    """
    block_id = BlockId(300)
    # A window has 1024 bytes.
    for folder, bad, has_record in zip(folders, (None, 1024, 0), (False, False, True), strict=True):
        with owned(folder / "volume1", folder / "writer") as volume:
            path = volume.store.open(SCATTERED).block_path(block_id)
            if bad is None:
                path.unlink()
            else:
                flip(path, bad)
            if not has_record:
                batch = Batch()
                batch.delete(OzoneTable.BLOCK_DATA, block_key(SCATTERED, block_id))
                volume.volume.database.write(batch)


def ask(address: str, *words: str) -> tuple[int, object]:
    done = CliRunner().invoke(treefold, [*words, "--controller", address, "--json"])
    return done.exit_code, json.loads(done.stdout)["data"]


def replicas(address: str, container_id: int) -> list[tuple[str, str]]:
    """The state and the root of each replica, as the controller knows them."""
    _, found = ask(address, "container", "info", str(container_id))
    assert isinstance(found, list)
    return [(one["state"], one["dataChecksum"]) for one in found[0]["replicas"]] if found else []


def roots(address: str, container_id: int) -> set[str]:
    return {root for _, root in replicas(address, container_id)}


def states(address: str, container_id: int) -> list[str]:
    return [state for state, _ in replicas(address, container_id)]


def test_lost_and_corrupt_blocks_come_back_and_the_root_survives_every_restart(
    tmp_path: Path,
) -> None:
    """E1, E2, E3, CR-017, CR-038, CR-043: one replica of container 1 lost every second
    block, one of 2 has all bad.

    Of a block of container 3 a single replica has the record, and no replica a whole
    copy: one command is enough.
    """
    volumes = {
        name: make_volume(tmp_path / name, number) for number, name in enumerate(NAMES, start=1)
    }
    original = on_disk(volumes["dn1"], tmp_path / "dn1" / "writer")
    remove_every_second_block(tmp_path / "dn2")
    corrupt_every_block(tmp_path / "dn3")
    scatter_a_block([tmp_path / name for name in NAMES])
    with ExitStack() as stack:
        scm = stack.enter_context(controller(tmp_path / "controller"))
        address = scm.address()

        def start(name: str) -> TreefoldProcess:
            made = agent(tmp_path / name / "agent", volumes[name], address, return_to_closed=True)
            return stack.enter_context(made)

        def each(found: Callable[[str, int], object]) -> list[object]:
            return [found(address, container_id) for container_id in BLOCKS]

        agents = {name: start(name) for name in NAMES}
        wait_until(
            lambda: [len(replicas(address, number)) for number in BLOCKS] == [3, 3, 3],
            "all replicas",
        )
        # E3: the roots that were made at close.
        closed = [roots(address, container_id) for container_id in BLOCKS]
        assert all(len(found) == 1 and found.isdisjoint({"0", None}) for found in closed)

        assert ask(address, "scan", "1", "2", "3")[0] == 0
        # Blocks of which nothing is left are no finding; that the replicas differ is
        # seen by their roots.
        damaged = [
            ["CLOSED"] * 3,
            ["CLOSED", "CLOSED", "UNHEALTHY"],
            ["CLOSED", "CLOSED", "UNHEALTHY"],
        ]
        wait_until(
            lambda: [len(roots(address, i)) for i in BLOCKS] == [2, 2, 2],
            "other roots to be reported",
        )
        wait_until(lambda: each(states) == damaged, "the corrupt replicas to be reported")

        code, answer = ask(address, "reconcile", "1", "2", "3", "--yes", "--wait")
        assert code == 0, answer
        healed = [[("CLOSED", root)] * 3 for (root,) in closed]
        assert each(replicas) == healed

        # E3: after a datanode, then the controller, began anew.
        assert agents["dn2"].stop(signal.SIGTERM) == 0
        agents["dn2"] = start("dn2")
        scm.stop(signal.SIGKILL)
        again = stack.enter_context(controller(tmp_path / "controller", address))
        assert again.address() == address
        wait_until(lambda: each(replicas) == healed, "the roots")
        for running in agents.values():
            assert running.stop(signal.SIGTERM) == 0
    for name in NAMES:
        assert on_disk(volumes[name], tmp_path / name / "writer") == original
    assert original[1] == {
        block_id: content(block_id, length)
        for container_id, (blocks, length) in BLOCKS.items()
        for block_id in range(100 * container_id, 100 * container_id + blocks)
    }
