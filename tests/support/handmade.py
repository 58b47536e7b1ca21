"""Small volumes made by hand, row by row and byte by byte: also such as no datanode
would write.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from merkle.checksum import WIDTH, ChecksumType, window_checksums
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.descriptor import Descriptor, dump_descriptor, with_checksum
from ozone.rocks import Batch, Counter, Database, OzoneTable, block_key, counter_key, long_bytes
from protos.convert import record_to_bytes
from runtime.disk import Disk

CLUSTER = "CID-11111111-2222-3333-4444-555555555555"
STORAGE = "DS-66666666-7777-8888-9999-000000000000"
NODE = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


def some_bytes(length: int, seed: int = 0) -> bytes:
    """Bytes that look like nothing, the same each time."""
    return random.Random(seed).randbytes(length)


def chunk_record(
    data: bytes,
    offset: int = 0,
    *,
    checksum_type: ChecksumType = ChecksumType.CRC32,
    window: int = 1024,
    name: str = "chunk",
) -> ChunkRecord:
    """The record that a client makes when it writes these bytes."""
    joined, width = window_checksums(data, checksum_type, window), WIDTH[checksum_type]
    checksums = tuple(joined[i : i + width] for i in range(0, len(joined), width)) if width else ()
    return ChunkRecord(offset, len(data), checksum_type, window, checksums, name)


def whole(
    length: int,
    offset: int = 0,
    *,
    checksum_type: ChecksumType = ChecksumType.CRC32,
    window: int = 1024,
) -> tuple[ChunkRecord, bytes]:
    """A chunk of so many bytes: its record, and the bytes."""
    data = some_bytes(length, offset)
    return chunk_record(data, offset, checksum_type=checksum_type, window=window), data


def block_record(
    container_id: int, block_id: int, chunks: Iterable[ChunkRecord] = ()
) -> BlockRecord:
    return BlockRecord(ContainerId(container_id), BlockId(block_id), 7, tuple(chunks))


class VolumeMaker:
    """A volume under construction; closing it gives its database free, as a stopped
    datanode does.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.working = root / "hdds" / CLUSTER
        self.working.mkdir(parents=True)
        (root / "hdds" / "VERSION").write_text(
            "#Sun Nov 22 00:00:00 UTC"
            f" 2026\nclusterID={CLUSTER}\nlayOutVersion=1\nstorageID={STORAGE}\n"
            f"datanodeUuid={NODE}\nctime=1755856800000\n"
        )
        self.database_path = self.working / STORAGE / "container.db"
        self.database = Database.create(self.database_path, Disk())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.database.close()

    def folder(self, container_id: int) -> Path:
        return (
            self.working / "current" / f"containerDir{container_id >> 9 & 0xFF}" / str(container_id)
        )

    def block_file(self, container_id: int, block_id: int) -> Path:
        return self.folder(container_id) / "chunks" / f"{block_id}.block"

    def container(
        self,
        container_id: int = 1,
        *,
        state: ReplicaState = ReplicaState.CLOSED,
        replica_index: int = 0,
        layout_version: int = 2,
        schema_version: str | None = "3",
    ) -> Path:
        """A container's folder with its descriptor, which names a place that it never
        was at.
        """
        folder = self.folder(container_id)
        (folder / "metadata").mkdir(parents=True)
        (folder / "chunks").mkdir()
        descriptor = Descriptor(
            container_id=ContainerId(container_id),
            state=state,
            chunks_path=f"/elsewhere/{container_id}/chunks",
            metadata_path=f"/elsewhere/{container_id}/metadata",
            max_size_bytes=5 << 30,
            origin_node_id=NODE,
            origin_pipeline_id=None,
            replica_index=replica_index,
            layout_version=layout_version,
            schema_version=schema_version,
        )
        (folder / "metadata" / f"{container_id}.container").write_bytes(
            dump_descriptor(with_checksum(descriptor))
        )
        self.put(
            OzoneTable.METADATA,
            counter_key(ContainerId(container_id), Counter.BCS_ID),
            long_bytes(7),
        )
        return folder

    def block(
        self, container_id: int, block_id: int, *chunks: tuple[ChunkRecord, bytes] | ChunkRecord
    ) -> BlockRecord:
        """A block: its record, and a file with the bytes that are given for its chunks,
        if any are.
        """
        records = [chunk if isinstance(chunk, ChunkRecord) else chunk[0] for chunk in chunks]
        record = block_record(container_id, block_id, records)
        self.put_record(OzoneTable.BLOCK_DATA, record)
        for chunk in chunks:
            if not isinstance(chunk, ChunkRecord):
                path = self.block_file(container_id, block_id)
                path.touch()
                with path.open("r+b") as file:
                    file.seek(chunk[0].offset)
                    file.write(chunk[1])
        return record

    def put_record(self, table: OzoneTable, record: BlockRecord) -> None:
        self.put(table, block_key(record.container_id, record.block_id), record_to_bytes(record))

    def put(self, table: OzoneTable, key: bytes, value: bytes) -> None:
        batch = Batch()
        batch.put(table, key, value)
        self.database.write(batch)
