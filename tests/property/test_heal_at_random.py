"""Replicas damaged at random heal as far as bytes that match their records are left
anywhere; nothing else changes.
"""

import os
import random
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from merkle.checksum import ChecksumType
from merkle.outcome import Verdict
from merkle.record import DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.rocks import Batch, Counter, OzoneTable, block_key, counter_key
from ozone.volume import Hold, Version, open_volume
from runtime.disk import Disk
from tests.support.in_process import datanodes, heal, scan_replica
from tests.support.oracle import Seen, faults, good_windows, look, lost_windows
from tests.support.volumes import (
    block_record,
    chunk_record,
    container_folder,
    content,
    new_volume,
    owned,
)

NAMES = ("dn1", "dn2", "dn3")
SEEDS, SEEDS_LONG = 6, 12
DELETED = BlockId(90)
# Window sizes of no round number among them, and one larger than a whole chunk.
CONTAINERS = {
    1: (ChecksumType.CRC32, 1000, 7000),
    2: (ChecksumType.CRC32C, 8 << 10, 64 << 10),
    3: (ChecksumType.SHA256, 16 << 10, 40_000),
    4: (ChecksumType.MD5, 1 << 20, 100_000),
}
LENGTHS = (1, 999, 1000, 7001, 70_000, 200_001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three equal volumes, each container with blocks of one and several chunks and a
    deleted one.
    """
    folder = tmp_path_factory.mktemp("whole")
    roots = {}
    for number, name in enumerate(NAMES, start=1):
        version = Version(
            f"DS-{number}", "CID-random", f"00000000-0000-4000-8000-00000000000{number}"
        )
        roots[name] = new_volume(folder / name / "volume1", version=version)
        with owned(roots[name], folder / "state" / name) as volume:
            for container_id, (checksum_type, window, chunk_bytes) in CONTAINERS.items():
                volume.writer.create_container(ContainerId(container_id))
                for block_id, length in enumerate((*LENGTHS, 5000), start=DELETED - len(LENGTHS)):
                    data, chunks = content(block_id, length), []
                    for offset in range(0, length, chunk_bytes):
                        part = data[offset : offset + chunk_bytes]
                        volume.writer.write_chunk(
                            ContainerId(container_id), BlockId(block_id), offset, part
                        )
                        chunks.append(
                            chunk_record(
                                offset, part, checksum_type=checksum_type, bytes_per_checksum=window
                            )
                        )
                    assert volume.writer.put_block(
                        block_record(container_id, block_id, chunks, bcs_id=block_id)
                    )
                volume.writer.close(ContainerId(container_id))
                volume.writer.receive_delete(
                    DeleteTransaction(1, ContainerId(container_id), (DELETED,))
                )
                assert volume.writer.delete_blocks(ContainerId(container_id)) == [DELETED]
    return roots


def _copies(whole: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    return {
        name: Path(shutil.copytree(root, folder / name / "volume1")) for name, root in whole.items()
    }


def _damage(rng: random.Random, root: Path, state: Path, container_id: int) -> str:
    """Do one of the things that disks, crashes and people do."""
    kinds = (
        "flip",
        "flip",
        "flip",
        "truncate",
        "file",
        "record",
        "commit",
        "chunks",
        "tree",
        "garbage",
        "orphan",
    )
    kind = rng.choice(kinds)
    folder = container_folder(root, container_id)
    files = sorted((folder / "chunks").glob("*.block"))
    if kind == "chunks":
        shutil.rmtree(folder / "chunks", ignore_errors=True)
    elif kind == "tree":
        (folder / "metadata" / f"{container_id}.tree").unlink(missing_ok=True)
    elif kind == "garbage":
        (folder / "metadata" / f"{container_id}.tree").write_bytes(
            rng.randbytes(rng.choice((0, 50)))
        )
    elif kind == "commit":
        with owned(root, state) as volume:
            batch = Batch()
            batch.delete(
                OzoneTable.METADATA, counter_key(ContainerId(container_id), Counter.BCS_ID)
            )
            volume.volume.database.write(batch)
    elif not files:
        return "nothing"
    elif kind == "orphan":
        (folder / "chunks" / "777.block").write_bytes(b"nobody's")
    elif kind == "record":
        with owned(root, state) as volume:
            batch = Batch()
            key = block_key(ContainerId(container_id), BlockId(int(rng.choice(files).stem)))
            batch.delete(OzoneTable.BLOCK_DATA, key)
            volume.volume.database.write(batch)
    else:
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        if kind == "file":
            path.unlink()
        elif kind == "truncate":
            _, window, chunk_bytes = CONTAINERS[container_id]
            os.truncate(
                path,
                min(len(data), rng.choice((0, window, chunk_bytes, rng.randrange(len(data) + 1)))),
            )
        elif data:
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    return kind


def _look(roots: Mapping[str, Path], scratch: Path) -> dict[int, dict[str, Seen]]:
    found: dict[int, dict[str, Seen]] = {container_id: {} for container_id in CONTAINERS}
    with ExitStack() as stack:
        for name, root in roots.items():
            volume = open_volume(
                root, hold=Hold.READ_ONLY, state_folder=scratch / name, disk=Disk()
            )
            store = ContainerStore(stack.enter_context(volume), Disk())
            for container_id in CONTAINERS:
                found[container_id][name] = look(store, container_id)
    return found


@pytest.mark.parametrize(
    "seed",
    [*range(SEEDS), *(pytest.param(n, marks=pytest.mark.long) for n in range(SEEDS, SEEDS_LONG))],
)
def test_whatever_is_left_anywhere_comes_back_everywhere(
    whole: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    """inv-I1, I3, I4, I5, I6: one job is enough, and what is gone for good is named."""
    rng = random.Random(seed)
    roots = _copies(whole, tmp_path)
    done = {}
    for container_id in CONTAINERS:
        for _ in range(rng.choice((1, 2, 4, 8))):
            name = rng.choice(NAMES)
            done[name, container_id] = _damage(
                rng, roots[name], tmp_path / "damage" / name, container_id
            )
    before = _look(roots, tmp_path / "before")
    jobs, states = {}, {}
    with datanodes(roots, tmp_path / "state") as nodes:
        for container_id in CONTAINERS:
            for node in nodes.values():
                scan_replica(node, container_id)
            jobs[container_id] = heal(nodes, container_id, rng)
            states[container_id] = {scan_replica(node, container_id) for node in nodes.values()}
    after = _look(roots, tmp_path / "after")
    for container_id in CONTAINERS:
        about = f"seed {seed}, container {container_id}: {done}"
        assert faults(before[container_id], after[container_id]) == [], about
        verdicts = {order.progress.verdict for order in jobs[container_id].orders}
        if lost_windows(before[container_id]):
            assert Verdict.UNRECOVERABLE in verdicts, about
        else:
            assert verdicts <= {Verdict.MATCH, Verdict.REPAIRABLE}, about
            assert states[container_id] == {ReplicaState.CLOSED}, about
            for seen in after[container_id].values():
                assert seen.bcs_id >= max(record.bcs_id for record in seen.records.values()), about


def test_the_oracle_knows_a_good_window_from_a_bad_one() -> None:
    data = content(1, 2500)
    chunk = chunk_record(0, data, bytes_per_checksum=1000)
    assert good_windows(chunk, data) == {0, 1, 2}
    assert good_windows(chunk, data[:-1]) == {0, 1}
    assert good_windows(chunk, b"\0" + data[1:]) == {1, 2}
