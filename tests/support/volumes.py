"""Volumes for tests: copies of those that real datanodes wrote, and small ones made by
our own writer.
"""

import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from merkle.checksum import WIDTH, ChecksumType, fingerprint, window_checksums
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.repair_writer import RepairWriter
from ozone.treefile import TreeFiles
from ozone.undo import UndoStore
from ozone.volume import Hold, Version, Volume, open_volume
from runtime.disk import Disk
from tests.support.volume_format import format_volume

FIXTURES = Path(__file__).resolve().parents[1] / "golden" / "data" / "fixtures"
OZONE = FIXTURES / "ozone-2.2.0"
ERASURE_CODED = FIXTURES / "ozone-2.2.0-ec"
MOMENTS = ("healthy", "damaged", "detected", "reconciled")
UNDO_BYTES_MAX = 64 << 20
VERSION = Version(
    "DS-00000000-0000-4000-8000-000000000001", "CID-0000", "00000000-0000-4000-8000-00000000000a"
)


def unpack(moment: str, folder: Path, *, fixture: Path = OZONE) -> Path:
    """The volumes of one moment, `dn1/volume1` and so on, unpacked into `folder`, which
    is returned.
    """
    with tarfile.open(fixture / f"{moment}.tar.xz") as packed:
        # Not as an argument: Python 3.11.2, Debian 12's, does not know it.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
    return folder


def copy_volume(moments: Path, node: str, target: Path) -> Path:
    """A copy of one datanode's volume out of an unpacked moment, free to be written
    to.
    """
    return Path(shutil.copytree(moments / node / "volume1", target))


def container_folder(volume: Path, container_id: int) -> Path:
    """Where a container lies in an unpacked volume."""
    (folder,) = volume.glob(f"hdds/CID-*/current/containerDir*/{container_id}")
    return folder


@dataclass(frozen=True, slots=True)
class Owned:
    """A volume held as owner, with all that writes to it."""

    volume: Volume
    store: ContainerStore
    trees: TreeFiles
    undo: UndoStore
    writer: RepairWriter
    disk: Disk


@contextmanager
def owned(
    root: Path,
    state_folder: Path,
    *,
    disk: Disk | None = None,
    undo_bytes_max: int = UNDO_BYTES_MAX,
) -> Iterator[Owned]:
    """Hold a volume as owner."""
    disk = disk or Disk()
    with open_volume(root, hold=Hold.OWNER, state_folder=state_folder, disk=disk) as volume:
        trees = TreeFiles(volume, disk)
        undo = UndoStore(volume.state_folder / "undo", disk, budget_bytes=undo_bytes_max)
        writer = RepairWriter(volume, trees, undo, disk)
        yield Owned(volume, ContainerStore(volume, disk), trees, undo, writer, disk)


def new_volume(root: Path, *, version: Version = VERSION) -> Path:
    """A formatted volume without containers."""
    format_volume(root, version, Disk(), created_ms=1_700_000_000_000)
    return root


def chunk_record(
    offset: int,
    data: bytes,
    *,
    checksum_type: ChecksumType = ChecksumType.CRC32C,
    bytes_per_checksum: int = 1024,
    name: str = "",
    metadata: tuple[tuple[str, str | None], ...] = (),
) -> ChunkRecord:
    """What a client records of these bytes."""
    joined = window_checksums(data, checksum_type, bytes_per_checksum)
    width = WIDTH[checksum_type]
    entries = tuple(joined[i : i + width] for i in range(0, len(joined), width)) if width else ()
    return ChunkRecord(
        offset,
        len(data),
        checksum_type,
        bytes_per_checksum,
        entries,
        name or f"chunk_{offset}",
        metadata,
    )


def block_record(
    container_id: int,
    block_id: int,
    chunks: Iterable[ChunkRecord],
    *,
    bcs_id: int = 0,
    metadata: tuple[tuple[str, str | None], ...] = (("TYPE", "KEY"),),
) -> BlockRecord:
    """A block of these chunks."""
    return BlockRecord(
        ContainerId(container_id), BlockId(block_id), bcs_id, tuple(chunks), metadata
    )


def content(block_id: int, length_bytes: int) -> bytes:
    """Bytes that differ from block to block and from window to window."""
    line = b"".join(
        b"%020d block %010d\n" % (position, block_id) for position in range(length_bytes // 37 + 1)
    )
    return line[:length_bytes]


def write_block(
    writer: RepairWriter,
    container_id: int,
    block_id: int,
    *chunk_lengths: int,
    bcs_id: int = 0,
    checksum_type: ChecksumType = ChecksumType.CRC32C,
) -> BlockRecord:
    """Write and commit a block of chunks of these lengths into an open container."""
    data = content(block_id, sum(chunk_lengths))
    chunks, offset = [], 0
    for length in chunk_lengths:
        part = data[offset : offset + length]
        writer.write_chunk(ContainerId(container_id), BlockId(block_id), offset, part)
        chunks.append(chunk_record(offset, part, checksum_type=checksum_type))
        offset += length
    record = block_record(container_id, block_id, chunks, bcs_id=bcs_id)
    assert writer.put_block(record)
    return record


def tree_of_files(folder: Path) -> dict[str, bytes]:
    """All files under a folder by relative path, for comparing before and after."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every entry below a folder with its mode, time of change and content: equal iff
    nothing was touched.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        held = fingerprint(path.read_bytes()) if path.is_file() and not path.is_symlink() else b""
        found[os.fspath(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, held)
    return found


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at an offset."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
