"""Containers on disk: records and block files, found by the volume's place and read as
Ozone reads them.

A container is a folder (descriptor, tree file, block files) and rows of the volume's
RocksDB (records, counters). Either half may be missing or damaged; opening demands a
readable descriptor, while a scan works on what there is and says what is not. A record
is met in two forms: as stored, which is what trees and scans go by, and merged with the
pending last chunk of an incremental writer, which is what readers get.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

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

# The metadata key of a block whose chunk list is still being appended to.
INCREMENTAL = "incremental"
_DECIMAL = re.compile(rb"-?(0|[1-9][0-9]{0,18})")
_INT64_MAX = (1 << 63) - 1
_BLOCK_FILE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.block")


@dataclass(frozen=True, slots=True)
class Counters:
    """A container's rows in the `metadata` table; None where a row is absent."""

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
        """The containers that have a folder, ascending; see `Volume.container_ids`."""
        return self.volume.container_ids(on_unreadable)

    def ids_without_folder(self) -> list[ContainerId]:
        """The containers that have block records but no folder, ascending: their folder
        was lost, not deleted.
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
            # Deleting moves the folder first and removes the rows then; a counter may
            # be written again after that, a record never is.
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
        """The container by its ID, looked at only when asked something: any part of it
        may be missing.
        """
        return Container(container_id, self.volume, self._disk)

    def open(self, container_id: ContainerId) -> "Container":
        """The container, its descriptor read.

        Raises:
            ContainerNotFoundError: it has no folder or no descriptor.
            DescriptorError: the descriptor is not a valid one, or that of another
                container.
            ContainerUnsupportedError: see `Container.descriptor`.
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
    """One container: a folder and its rows."""

    def __init__(self, container_id: ContainerId, volume: Volume, disk: Disk) -> None:
        self.container_id = container_id
        self.volume = volume
        self.disk = disk
        try:
            self.folder = volume.container_folder(container_id)
        except ContainerNotFoundError:
            # A scan says so; until then it is where a datanode would have put it.
            self.folder = volume.usual_folder(container_id)
        self.metadata_folder = self.folder / "metadata"
        self.chunks_folder = self.folder / "chunks"
        self.descriptor_path = self.metadata_folder / f"{container_id}.container"
        self.tree_path = self.metadata_folder / f"{container_id}.tree"

    @cached_property
    def descriptor(self) -> Descriptor:
        """The descriptor, read once.

        Raises:
            DiskError: it cannot be read; the fact `missing` where it is not there.
            DescriptorError: it is not a valid one, or not this container's.
            ContainerUnsupportedError: it is of a schema before V3 or of layout
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
                f"{found.layout_version}; only schema V3 with one file a block is read",
                container_id=self.container_id,
            )
        return found

    @property
    def state(self) -> ReplicaState:
        """The replica's state by its descriptor."""
        return self.descriptor.state

    @property
    def replica_index(self) -> int:
        """The place in an erasure-coded group, 0 where there is none."""
        return self.descriptor.replica_index

    def block_ids(self) -> list[BlockId]:
        """The blocks that have a record, ascending.

        Raises:
            DatabaseError: the table cannot be iterated.
            RecordInvalidError: a key is no block ID.
        """
        prefix = container_prefix(self.container_id)
        ids = []
        for key, _ in self.volume.database.items(OzoneTable.BLOCK_DATA, prefix):
            suffix = key[len(prefix) :]
            # Other rows, from the days of one table for all, begin with this mark.
            if suffix.startswith(b"#"):
                continue
            if not _DECIMAL.fullmatch(suffix) or abs(int(suffix)) > _INT64_MAX:
                raise self._invalid(
                    f"container {self.container_id} has a record under {suffix!r}", "key", None
                )
            ids.append(BlockId(int(suffix)))
        # Rows come in the order of decimal text: 10 before 9.
        return sorted(ids)

    def records(self) -> Iterator[BlockRecord]:
        """All records as stored, by ascending block ID; a block deleted meanwhile is
        passed over.

        Raises:
            DatabaseError: the table cannot be read.
            RecordInvalidError: a record cannot be parsed or is another block's; the
                fact `block_id` names it.
        """
        for block_id in self.block_ids():
            record = self.stored_record(block_id)
            if record is not None:
                yield record

    def stored_record(self, block_id: BlockId) -> BlockRecord | None:
        """One record as stored: what trees and scans see; raises as `records` does."""
        return self._row(OzoneTable.BLOCK_DATA, block_id)

    def record(self, block_id: BlockId) -> BlockRecord | None:
        """One record as readers see it: merged with the pending last chunk of an
        incremental writer.

        Raises:
            RecordInvalidError: also where the pending chunk does not continue the
                stored ones.
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
        """What the volume's database counts for this container.

        Raises:
            DatabaseError: a row cannot be read or is no number.
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
        """The highest commit in the records that can be read, 0 without any.

        It may be beyond the container's: a repair that was not clean gives a whole
        block its commit, and that alone.

        Raises:
            DatabaseError: the table cannot be read.
            RecordInvalidError: a key is no block ID.
        """
        highest = 0
        for block_id in self.block_ids():
            # What cannot be read says nothing; the scan has named it.
            with suppress(RecordInvalidError):
                record = self.record(block_id)
                highest = max(highest, record.bcs_id if record else 0)
        return highest

    def block_path(self, block_id: BlockId) -> Path:
        """The file of a block, which need not be there."""
        return self.chunks_folder / f"{block_id}.block"

    def open_block(self, block_id: BlockId) -> AbstractContextManager[Reader]:
        """The block's file, open for reading.

        Raises:
            DiskError: the fact `missing` where there is no such file.
        """
        return self.disk.reader(self.block_path(block_id))

    def read(self, block_id: BlockId, offset: int, length: int) -> bytes:
        """Bytes of a block from its file, as they are; fewer only where the file ends.

        Raises:
            BlockNotFoundError: the block has no file.
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
        """Bytes of the block's file; None where there is none."""
        return self.disk.length(self.block_path(block_id))

    def unrecorded_bytes(self, record: BlockRecord) -> int:
        """How many bytes of a block's file lie behind its last recorded chunk: no
        reader gets them, no scan minds.
        """
        end = record.chunks[-1].end if record.chunks else 0
        return max((self.block_length(record.block_id) or 0) - end, 0)

    def orphan_files(self) -> list[str]:
        """The names in the chunks folder that belong to no record, sorted."""
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
                f"the record of block {block_id} is that of block {record.block_id} of"
                f" {record.container_id}"
            )
            raise self._invalid(text, "wrong_block", block_id)
        return record

    def _invalid(self, message: str, reason: str, block_id: BlockId | None) -> RecordInvalidError:
        return RecordInvalidError(
            message, reason=reason, container_id=self.container_id, block_id=block_id
        )
