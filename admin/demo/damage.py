"""Damage copies of replicas in the ways that disks and crashes do, for the demo and
tests.

The damaged block is chosen by a fixed rule, so that runs can be repeated: the first
block with several windows that is undamaged on every replica. So only `ALL_REPLICAS`
destroys the last good copy. A bit is flipped, because setting a byte may not change it.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

from merkle.checksum import window_checksums
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container, ContainerStore
from ozone.errors import BlockNotFoundError
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from runtime.errors import UsageError

# Undamaged blocks examined to find one with several windows.
_BLOCKS_LOOKED_AT_MAX = 20


class DamageMethod(Enum):
    """The kind of damage; ALL_REPLICAS damages every replica, the others one."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    LOST_FILE = "lost-file"
    LOST_RECORD = "lost-record"
    LOST_TREE = "lost-tree"
    ALL_REPLICAS = "all-replicas"


@dataclass(frozen=True, slots=True)
class InflictedDamage:
    """Damage that was inflicted; `offset` is in bytes from the start of the block."""

    damage: DamageMethod
    replica: str
    container_id: ContainerId
    block_id: BlockId | None = None
    offset: int | None = None


def inflict(
    damage: DamageMethod, volumes: Mapping[str, Path], scratch: Path
) -> tuple[InflictedDamage, ...]:
    """Damage a block in the first volume, or with ALL_REPLICAS in every volume. The
    volumes must not be in use.

    Raises:
        UsageError: no block is undamaged on every replica.
    """
    disk = Disk()
    with ExitStack() as stack:
        stores = {
            name: ContainerStore(
                stack.enter_context(
                    open_volume(path, hold=Hold.OWNER, state_folder=scratch / name, disk=disk)
                ),
                disk,
            )
            for name, path in volumes.items()
        }
        whole = list(islice(_whole_blocks(stores), _BLOCKS_LOOKED_AT_MAX))
        found = next((at for at in whole if _windows(at[1]) > 1), whole[0] if whole else None)
        if found is None:
            raise UsageError(
                "no block is undamaged on every replica, so no damage can be added",
                hint="Use volumes in which at least one block is undamaged.",
            )
        container_id, record = found
        names = list(stores) if damage is DamageMethod.ALL_REPLICAS else list(stores)[:1]
        return tuple(
            _inflict_one(damage, name, stores[name].open(container_id), record, disk)
            for name in names
        )


def _windows(record: BlockRecord) -> int:
    return sum(len(chunk.checksums) for chunk in record.chunks)


def _whole_blocks(
    stores: Mapping[str, ContainerStore],
) -> Iterator[tuple[ContainerId, BlockRecord]]:
    first = next(iter(stores.values()))
    for container_id in first.ids():
        if not all(container_id in store.ids() for store in stores.values()):
            continue
        replicas = [store.open(container_id) for store in stores.values()]
        if replicas[0].replica_index > 0 or not all(
            replica.state.is_closed for replica in replicas
        ):
            continue
        for record in replicas[0].records():
            if record.length_bytes and all(_is_whole(replica, record) for replica in replicas):
                yield container_id, record


def _is_whole(replica: Container, record: BlockRecord) -> bool:
    if replica.stored_record(record.block_id) != record:
        return False
    for chunk in record.chunks:
        try:
            data = replica.read(record.block_id, chunk.offset, chunk.length_bytes)
        except BlockNotFoundError:
            return False
        seen = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
        if not chunk.is_verifiable or seen != chunk.entries:
            return False
    return True


def _inflict_one(
    damage: DamageMethod, name: str, replica: Container, record: BlockRecord, disk: Disk
) -> InflictedDamage:
    path, middle = replica.block_path(record.block_id), record.length_bytes // 2
    match damage:
        case DamageMethod.FLIP | DamageMethod.ALL_REPLICAS:
            byte = disk.read_at(path, middle, 1)[0]
            disk.write_at(path, middle, bytes([byte ^ 0x10]))
        case DamageMethod.TRUNCATE:
            with path.open("r+b") as file:
                file.truncate(middle)
        case DamageMethod.LOST_FILE:
            disk.remove(path)
            middle = 0
        case DamageMethod.LOST_RECORD:
            batch = Batch()
            batch.delete(OzoneTable.BLOCK_DATA, block_key(replica.container_id, record.block_id))
            replica.volume.database.write(batch)
        case DamageMethod.LOST_TREE:
            disk.remove(replica.metadata_folder / f"{replica.container_id}.tree")
            return InflictedDamage(damage, name, replica.container_id)
    return InflictedDamage(damage, name, replica.container_id, record.block_id, middle)
