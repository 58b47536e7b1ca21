"""Containers on disk: their descriptors, records, counters and block files.

A container is a folder (descriptor, tree file, block files) and rows in the volume's
RocksDB (records, counters). Either part may be missing or damaged. `open` requires a
valid descriptor; a scan reads whatever exists and reports the rest.

A record has two forms. Trees and scans use the stored one. Readers get the merged one,
which includes the pending last chunk of an incremental writer.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from merkle.checksum import RunningFingerprint
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.descriptor import Descriptor, parse_descriptor
from ozone.errors import (
    BlockNotFoundError,
    ContainerNotFoundError,
    ContainerUnsupportedError,
    DescriptorError,
)
from ozone.rocks import Counter, OzoneTable, block_key, container_prefix
from ozone.volume import Volume
from protos.convert import record_from_bytes
from runtime.disk import Disk, Reader
from runtime.errors import DiskError

# The metadata key of a block whose chunk list is still growing.
INCREMENTAL = "incremental"
_DECIMAL = re.compile(rb"-?(0|[1-9][0-9]{0,18})")
_INT64_MAX = (1 << 63) - 1
_BLOCK_FILE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.block")


@dataclass(frozen=True, slots=True)
class Counters:
    """A container's counters from the `metadata` table; None if a row is missing."""

    bcs_id: int | None
    block_count: int | None
    used_bytes: int | None
    data_checksum: int | None
    delete_transaction: int | None


class ContainerStore:
    """The containers of one volume."""

    def __init__(self, volume: Volume, disk: Disk) -> None:
        self.volume = volume
        self._disk = disk

    def ids(self, on_unreadable: Callable[[DiskError], None] | None = None) -> list[ContainerId]:
        """The containers that have a folder, ascending (see `Volume.container_ids`)."""
        return self.volume.container_ids(on_unreadable)

    def ids_without_folder(self) -> list[ContainerId]:
        """The containers that have records but no folder, ascending: their folder was
        lost, not deleted.

        Raises:
            DatabaseError: the database cannot be read.
        """
        found = set(self.volume.container_ids())
        candidates = {
            ContainerId(int.from_bytes(key[:8], "big", signed=True))
            for key, _ in self.volume.database.items(OzoneTable.METADATA, b"\0")
            if len(key) > 8
        }
        return sorted(
            container_id
            for container_id in candidates - found
            # A deletion moves the folder first and then removes the rows. A counter may
            # be written again later, a record may not.
            if not (
                self.volume.working_folder / "tmp" / "deleted-containers" / str(container_id)
            ).exists()
            and next(
                iter(
                    self.volume.database.items(
                        OzoneTable.BLOCK_DATA, container_prefix(container_id)
                    )
                ),
                None,
            )
        )

    def get(self, container_id: ContainerId) -> "Container":
        """The container with this ID, unread: any part of it may be missing."""
        return Container(container_id, self.volume, self._disk)

    def open(self, container_id: ContainerId) -> "Container":
        """The container with this ID and a valid descriptor.

        Raises:
            ContainerNotFoundError: it has no folder or no descriptor.
            DescriptorError: the descriptor is invalid or belongs to another container.
            ContainerUnsupportedError: as in `Container.descriptor`.
            DiskError: the descriptor cannot be read.
        """
        container = self.get(container_id)
        try:
            found = container.descriptor
        except DiskError as error:
            if error.facts.get("missing"):
                text = f"there is no container {container_id} in {self.volume.root}"
                raise ContainerNotFoundError(text, container_id=container_id) from error
            raise
        assert found.container_id == container_id
        return container


class Container:
    """One container: its folder and its rows in the volume's database."""

    def __init__(self, container_id: ContainerId, volume: Volume, disk: Disk) -> None:
        self.container_id = container_id
        self.volume = volume
        self.disk = disk
        try:
            self.folder = volume.container_folder(container_id)
        except ContainerNotFoundError:
            # A scan reports the missing folder. The paths are those that a datanode
            # would use.
            self.folder = volume.usual_folder(container_id)
        self.metadata_folder = self.folder / "metadata"
        self.chunks_folder = self.folder / "chunks"
        self.descriptor_path = self.metadata_folder / f"{container_id}.container"
        self.tree_path = self.metadata_folder / f"{container_id}.tree"

    @cached_property
    def descriptor(self) -> Descriptor:
        """The descriptor, read once.

        Raises:
            DiskError: it cannot be read; with the fact `missing` if it does not exist.
            DescriptorError: it is invalid or belongs to another container.
            ContainerUnsupportedError: its schema is older than V3, or its layout is
                FILE_PER_CHUNK.
        """
        found = parse_descriptor(self.disk.read(self.descriptor_path))
        for name, value, expected in (
            ("containerID", found.container_id, self.container_id),
            ("containerType", found.container_type, "KeyValueContainer"),
            ("containerDBType", found.db_type, "RocksDB"),
        ):
            if value != expected:
                text = f"the descriptor of container {self.container_id} has {name} {value}"
                raise DescriptorError(
                    text, reason="field_invalid", field=name, container_id=self.container_id
                )
        if (found.schema_version, found.layout_version) != ("3", 2):
            raise ContainerUnsupportedError(
                f"container {self.container_id} has schema V{found.schema_version or 1} and layout "
                f"{found.layout_version}; only schema V3 with one file per block is supported",
                container_id=self.container_id,
            )
        return found

    @property
    def state(self) -> ReplicaState:
        """The replica's state; raises as `descriptor` does."""
        return self.descriptor.state

    @property
    def replica_index(self) -> int:
        """The position in an erasure-coded group, 0 if there is none; raises as
        `descriptor` does.
        """
        return self.descriptor.replica_index

    def block_ids(self) -> list[BlockId]:
        """The blocks that have a record, ascending.

        Raises:
            DatabaseError: the table cannot be iterated.
            RecordInvalidError: a key is not a block ID.
        """
        prefix = container_prefix(self.container_id)
        ids = []
        for key, _ in self.volume.database.items(OzoneTable.BLOCK_DATA, prefix):
            suffix = key[len(prefix) :]
            # Rows of other kinds, from schemas with a single table, begin with "#".
            if suffix.startswith(b"#"):
                continue
            if not _DECIMAL.fullmatch(suffix) or abs(int(suffix)) > _INT64_MAX:
                raise self._invalid(
                    f"container {self.container_id} has a record under {suffix!r}", "key", None
                )
            ids.append(BlockId(int(suffix)))
        # Rows are in the order of decimal text: 10 before 9.
        return sorted(ids)

    def records(self) -> Iterator[BlockRecord]:
        """All stored records by ascending block ID, without blocks deleted meanwhile.

        Raises:
            DatabaseError: the table cannot be read.
            RecordInvalidError: a record cannot be parsed or belongs to another block;
                the fact `block_id` is the block of the key.
        """
        for block_id in self.block_ids():
            record = self.stored_record(block_id)
            if record is not None:
                yield record

    def stored_record(self, block_id: BlockId) -> BlockRecord | None:
        """One stored record, None if there is none; raises as `records` does."""
        return self._row(OzoneTable.BLOCK_DATA, block_id)

    def record(self, block_id: BlockId) -> BlockRecord | None:
        """One record, merged with the pending last chunk of an incremental writer; None
        if there is none.

        Raises:
            DatabaseError: the table cannot be read.
            RecordInvalidError: as in `records`, or the pending chunk does not continue
                the stored ones.
        """
        stored = self.stored_record(block_id)
        if stored is not None and all(key != INCREMENTAL for key, _ in stored.metadata):
            return stored
        last = self._row(OzoneTable.LAST_CHUNK_INFO, block_id)
        if last is None:
            return stored
        if len(last.chunks) != 1 or last.chunks[0].offset != (stored.length_bytes if stored else 0):
            text = f"the last chunk of block {block_id} does not continue the block"
            raise self._invalid(text, "last_chunk", block_id)
        if stored is None:
            return last
        return replace(stored, bcs_id=last.bcs_id, chunks=stored.chunks + last.chunks)

    def counters(self) -> Counters:
        """The container's counters in the volume's database.

        Raises:
            DatabaseError: a row cannot be read or is not a number.
        """
        number = partial(self.volume.database.get_long, self.container_id)
        return Counters(
            bcs_id=number(Counter.BCS_ID),
            block_count=number(Counter.BLOCK_COUNT),
            used_bytes=number(Counter.BYTES_USED),
            data_checksum=number(Counter.DATA_CHECKSUM),
            delete_transaction=number(Counter.DELETE_TX),
        )

    def recorded_bcs_id(self) -> int:
        """The highest commit ID in the readable records, 0 if there are none.

        It may be above the container's: an incomplete repair raises the commit of the
        blocks that it completed, but not that of the container.

        Raises:
            DatabaseError: the table cannot be read.
            RecordInvalidError: a key is not a block ID.
        """
        highest = 0
        for block_id in self.block_ids():
            # The scan reports records that cannot be parsed.
            with suppress(RecordInvalidError):
                record = self.record(block_id)
                highest = max(highest, record.bcs_id if record else 0)
        return highest

    def block_path(self, block_id: BlockId) -> Path:
        """The path of a block's file, which need not exist."""
        return self.chunks_folder / f"{block_id}.block"

    def open_block(self, block_id: BlockId) -> AbstractContextManager[Reader]:
        """The block's file, opened for reading.

        Raises:
            DiskError: it cannot be opened; with the fact `missing` if there is none.
        """
        return self.disk.reader(self.block_path(block_id))

    def read(self, block_id: BlockId, offset: int, length: int) -> bytes:
        """`length` bytes of a block's file, unverified; fewer only if the file ends.

        Raises:
            BlockNotFoundError: the block has no file.
            DiskError: the file cannot be read.
        """
        try:
            return self.disk.read_at(self.block_path(block_id), offset, length)
        except DiskError as error:
            if error.facts.get("missing"):
                text = f"block {block_id} of container {self.container_id} has no file"
                raise BlockNotFoundError(
                    text, container_id=self.container_id, block_id=block_id
                ) from error
            raise

    def block_length(self, block_id: BlockId) -> int | None:
        """The length of a block's file in bytes; None if it does not exist."""
        return self.disk.length(self.block_path(block_id))

    def unrecorded_bytes(self, record: BlockRecord) -> int:
        """The bytes of a block's file after its last recorded chunk; readers and scans
        ignore them.
        """
        end = record.chunks[-1].end if record.chunks else 0
        return max((self.block_length(record.block_id) or 0) - end, 0)

    def version(self) -> str:
        """A text that changes with every write to the files or rows of the container.
        Data are not read: bytes that rot on the disk leave it as it is.

        Raises:
            DatabaseError: a row cannot be read.
            DiskError: a folder cannot be listed.
        """
        seen = RunningFingerprint()
        for folder in (self.metadata_folder, self.chunks_folder):
            if self.disk.is_folder(folder):
                for name in self.disk.names(folder):
                    seen.update(repr((name, self.disk.stamp(folder / name))).encode())
        prefix = container_prefix(self.container_id)
        for table in (OzoneTable.METADATA, OzoneTable.BLOCK_DATA, OzoneTable.LAST_CHUNK_INFO):
            for key, value in self.volume.database.items(table, prefix):
                seen.update(repr((table.value, key, value)).encode())
        return seen.digest().hex()

    def orphan_files(self) -> list[str]:
        """The names in the chunks folder that no record accounts for, sorted."""
        recorded = set(self.block_ids())
        orphans = []
        for name in self.disk.names(self.chunks_folder):
            match = _BLOCK_FILE.fullmatch(name)
            if not (match and int(match[1]) in recorded):
                orphans.append(name)
        return orphans

    def _row(self, table: OzoneTable, block_id: BlockId) -> BlockRecord | None:
        raw = self.volume.database.get(table, block_key(self.container_id, block_id))
        if raw is None:
            return None
        try:
            record = record_from_bytes(raw)
        except RecordInvalidError as error:
            text = f"the record of block {block_id} is not valid: {error.message}"
            raise self._invalid(text, str(error.facts["reason"]), block_id) from error
        if (record.container_id, record.block_id) != (self.container_id, block_id):
            text = (
                f"the record of block {block_id} belongs to block {record.block_id} of container"
                f" {record.container_id}"
            )
            raise self._invalid(text, "wrong_block", block_id)
        return record

    def _invalid(self, message: str, reason: str, block_id: BlockId | None) -> RecordInvalidError:
        return RecordInvalidError(
            message, reason=reason, container_id=self.container_id, block_id=block_id
        )
