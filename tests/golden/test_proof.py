"""The proof at the end of a demo names every flaw, and nothing that is none, on volumes
that real Ozone wrote.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from admin.demo.offline_check import Proof, Surplus, prove
from merkle.checksum import ChecksumType
from merkle.tree import BlockId, ContainerId
from ozone.rocks import Batch, OzoneTable, block_key
from protos.convert import record_to_bytes
from tests.support.volumes import container_folder, copy_volume, owned, unpack

NAMES = ("dn1", "dn2", "dn3")
UNVERIFIABLE = 5


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        moment: unpack(moment, tmp_path_factory.mktemp(moment))
        for moment in ("healthy", "reconciled")
    }


def _proof(moment: Path, tmp_path: Path, damage: Callable[[Path], None]) -> Proof:
    roots = {name: copy_volume(moment, name, tmp_path / name / "volume1") for name in NAMES}
    damage(roots["dn1"])
    return prove(roots, tmp_path / "proof")


def _nothing(_: Path) -> None:
    pass


def _lose_record(root: Path, container_id: int, block_id: int) -> None:
    with owned(root, root.parents[1] / "state") as held:
        batch = Batch()
        batch.delete(OzoneTable.BLOCK_DATA, block_key(ContainerId(container_id), BlockId(block_id)))
        held.volume.database.write(batch)


def _blocks(root: Path, container_id: int) -> list[Path]:
    return sorted((container_folder(root, container_id) / "chunks").glob("*.block"))


@pytest.mark.parametrize("moment", ["healthy", "reconciled"])
def test_volumes_that_ozone_left_whole_have_no_flaw(
    moments: dict[str, Path], tmp_path: Path, moment: str
) -> None:
    """Records that Ozone itself repaired lack their metadata, which changes no byte;
    container 3 it could not mend.
    """
    proof = _proof(moments[moment], tmp_path, _nothing)
    assert proof.flawed() == ({3} if moment == "reconciled" else set())
    assert proof.unverifiable == {UNVERIFIABLE}


def _change_descriptor(root: Path) -> None:
    path = container_folder(root, 1) / "metadata" / "1.container"
    path.write_bytes(path.read_bytes().replace(b"CLOSED", b"CLOSEX"))


def _flip(root: Path) -> None:
    path = _blocks(root, 1)[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _link(root: Path) -> None:
    path = _blocks(root, 1)[-1]
    path.symlink_to(path.rename(root.parent / "elsewhere"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_change_descriptor, "CORRUPT_CONTAINER_FILE"),
        (
            lambda root: shutil.rmtree(container_folder(root, 1) / "metadata"),
            "MISSING_METADATA_DIR",
        ),
        (lambda root: shutil.rmtree(container_folder(root, 1)), "MISSING_CONTAINER_DIR"),
        (lambda root: shutil.rmtree(container_folder(root, 1) / "chunks"), "MISSING_CHUNKS_DIR"),
        (_flip, "CORRUPT_CHUNK"),
        (lambda root: _blocks(root, 1)[0].unlink(), "MISSING_DATA_FILE"),
        (_link, "CORRUPT_CHUNK"),
        (
            lambda root: _lose_record(root, 1, int(_blocks(root, 1)[0].stem)),
            "1 block records more or fewer",
        ),
    ],
    ids=["descriptor", "metadata", "folder", "chunks", "flip", "file", "link", "record"],
)
def test_a_damaged_replica_is_named_and_costs_the_others_nothing(
    moments: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    proof = _proof(moments["healthy"], tmp_path, damage)
    assert proof.flawed() == {1}
    assert any(named in flaw.text for flaw in proof.flaws)


@pytest.mark.parametrize("compared", [False, True], ids=["alone", "with the undamaged"])
def test_bytes_behind_the_last_recorded_chunk_are_no_flaw_and_are_named(
    moments: dict[str, Path], tmp_path: Path, compared: bool
) -> None:
    roots = {
        name: copy_volume(moments["healthy"], name, tmp_path / name / "volume1") for name in NAMES
    }
    path = _blocks(roots["dn2"], 1)[0]
    path.write_bytes(path.read_bytes() + b"more")
    whole = {name: moments["healthy"] / name / "volume1" for name in NAMES} if compared else None
    proof = prove(roots, tmp_path / "proof", reference=whole)
    assert proof.flaws == ()
    assert proof.surplus == (Surplus(ContainerId(1), "dn2", BlockId(int(path.stem)), 4),)


@pytest.mark.parametrize("compared", [False, True], ids=["alone", "with the undamaged"])
def test_bytes_that_no_checksum_covers_must_be_equal_as_far_as_they_are_recorded(
    moments: dict[str, Path], tmp_path: Path, compared: bool
) -> None:
    """A block of which one chunk has checksums and one has none: a scan cannot see what
    changed in the other.
    """
    whole = {
        name: copy_volume(moments["healthy"], name, tmp_path / "whole" / name / "volume1")
        for name in NAMES
    }
    for root in whole.values():
        _forget_checksums(root, 1, int(_blocks(root, 1)[-1].stem))
    roots = {
        name: copy_volume(tmp_path / "whole", name, tmp_path / name / "volume1") for name in NAMES
    }
    path = _blocks(roots["dn2"], 1)[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    proof = prove(roots, tmp_path / "proof", reference=whole if compared else None)
    # Whose file differs nobody can tell without the undamaged one.
    assert proof.flawed() == {1}
    assert {flaw.text.split(" than ")[0] for flaw in proof.flaws} == {
        f"another file of block {path.stem}"
    }


def _forget_checksums(root: Path, container_id: int, block_id: int) -> None:
    """Make the last chunk of a block one that was written without checksums."""
    with owned(root, root.parents[1] / "state") as held:
        record = held.store.get(ContainerId(container_id)).record(BlockId(block_id))
        assert record is not None
        assert len(record.chunks) > 1
        last = replace(record.chunks[-1], checksum_type=ChecksumType.NONE, checksums=())
        batch = Batch()
        key = block_key(ContainerId(container_id), BlockId(block_id))
        batch.put(
            OzoneTable.BLOCK_DATA,
            key,
            record_to_bytes(replace(record, chunks=(*record.chunks[:-1], last))),
        )
        held.volume.database.write(batch)


def test_a_container_without_recorded_checksums_stays_unverifiable_where_a_replica_lost_its_records(
    moments: dict[str, Path], tmp_path: Path
) -> None:
    def lose_all(root: Path) -> None:
        for path in _blocks(root, UNVERIFIABLE):
            _lose_record(root, UNVERIFIABLE, int(path.stem))

    proof = _proof(moments["healthy"], tmp_path, lose_all)
    assert not proof.flaws
    assert proof.unverifiable == {UNVERIFIABLE}
