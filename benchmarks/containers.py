"""Create volumes with containers for benchmarks, and serve them with an agent."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from dnagent.agent import Agent
from dnagent.config import (
    AgentConfig,
    RepairSettings,
    ScanSettings,
    ServeSettings,
    VolumeSettings,
)
from dnagent.volumes import ManagedVolume
from merkle.checksum import WIDTH, ChecksumType, window_checksums
from merkle.record import BlockRecord, ChunkRecord, WindowChecksums
from merkle.tree import BlockId, ContainerId
from ozone.repair_writer import RepairWriter
from ozone.volume import Hold, Version, open_volume
from runtime.disk import Disk
from tests.support.volume_format import format_volume

# The defaults of Ozone's clients.
CHUNK_BYTES = 4 << 20
WINDOW_BYTES = 16 << 10


def new_volume(root: Path, number: int) -> Path:
    """Create an empty volume of the datanode with this number."""
    version = Version(
        f"DS-00000000-0000-4000-8000-{number:012d}",
        "CID-bench",
        f"00000000-0000-4000-8000-{number:012d}",
    )
    format_volume(root, version, Disk(), created_ms=0)
    return root


@contextmanager
def held(root: Path, state_folder: Path) -> Iterator[tuple[ManagedVolume, RepairWriter]]:
    """Open a volume as its owner, with its writer."""
    disk = Disk()
    volume = open_volume(root, hold=Hold.OWNER, state_folder=state_folder, disk=disk)
    opened = ManagedVolume(volume, disk, undo_bytes=1 << 30)
    try:
        assert opened.writer is not None
        yield opened, opened.writer
    finally:
        opened.close()


def serve_agent(volume: Path, state_folder: Path, control: Connection) -> None:
    """Run the agent of a volume. Sends its datanode ID and address to `control`, and
    stops when it receives any message.
    """
    agent = Agent(
        AgentConfig(
            volumes=(VolumeSettings(path=volume, hold=Hold.OWNER),),
            state_folder=state_folder,
            listen="127.0.0.1:0",
            scan=ScanSettings(enabled=False),
            serve=ServeSettings(bytes_per_second=0),
            repair=RepairSettings(enabled=True),
        )
    )
    agent.start()
    control.send((agent.datanode_id, agent.address))
    control.recv()
    agent.stop()


def write_container(
    writer: RepairWriter,
    container_id: ContainerId,
    *,
    blocks: int,
    chunks: int,
    checksum_type: ChecksumType,
) -> list[BlockRecord]:
    """Write a closed container of full chunks; its data depend only on its ID."""
    writer.create_container(container_id)
    rng, records = random.Random(container_id), []
    for number in range(1, blocks + 1):
        block_id = BlockId(number)
        written = []
        for offset in range(0, chunks * CHUNK_BYTES, CHUNK_BYTES):
            data = rng.randbytes(CHUNK_BYTES)
            written.append(_chunk_record(offset, data, checksum_type))
            writer.write_chunk(container_id, block_id, offset, data)
        record = BlockRecord(container_id, block_id, number, tuple(written))
        assert writer.put_block(record)
        records.append(record)
    writer.close(container_id)
    return records


def _chunk_record(offset: int, data: bytes, checksum_type: ChecksumType) -> ChunkRecord:
    checksums = WindowChecksums(
        window_checksums(data, checksum_type, WINDOW_BYTES), WIDTH[checksum_type]
    )
    return ChunkRecord(offset, len(data), checksum_type, WINDOW_BYTES, checksums, f"chunk_{offset}")
