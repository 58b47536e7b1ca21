"""Verify on disk, with no agent running, that replicas are undamaged and equal.

The check does not rely on the agents: it reads records, block files and trees again. If
undamaged volumes are given, records, block files and tree files must equal theirs byte
for byte. Otherwise replicas must have equal block files, and records with equal chunks.
Records need not be identical: Ozone's own repair omits their metadata, and the last
chunk may be split on one replica.

A block file is compared up to its last recorded chunk. Bytes after it do not belong to
the block; they are never cut off (docs/safety.md) and are listed as surplus.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container, ContainerStore
from ozone.errors import ContainerUnsupportedError, DescriptorError
from ozone.rocks import OzoneTable, block_key
from ozone.scan import scan
from ozone.volume import Hold, open_volume
from protos.convert import tree_from_bytes
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError

# Block files are compared in pieces of this length.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Flaw:
    """A reason, on one replica, why a container is not proven healed."""

    container_id: ContainerId
    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Surplus:
    """Bytes after the last recorded chunk in a block file of one replica."""

    container_id: ContainerId
    replica: str
    block_id: BlockId
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the check: what was read, and all flaws. Surplus bytes are not
    flaws.
    """

    containers: int
    windows_matching_bytes: int
    compared_bytes: int
    flaws: tuple[Flaw, ...] = ()
    unverifiable: frozenset[ContainerId] = field(default_factory=frozenset)
    surplus: tuple[Surplus, ...] = ()

    def flawed(self) -> frozenset[ContainerId]:
        """The containers that are not proven."""
        return frozenset(flaw.container_id for flaw in self.flaws)


def prove(
    volumes: Mapping[str, Path], scratch: Path, *, reference: Mapping[str, Path] | None = None
) -> Proof:
    """Check all replicas. With `reference`, undamaged volumes of the same names, also
    compare each replica with its undamaged state.

    Blocks without recorded checksums are not compared. A container that has only such
    blocks is `unverifiable`.

    Raises:
        ReconcileError: a volume cannot be opened.
    """
    disk = Disk()
    with ExitStack() as stack:
        stores = _open_stores(stack, volumes, scratch / "proven", disk)
        healthy = _open_stores(stack, reference or {}, scratch / "reference", disk)
        containers = read_bytes = compared_bytes = 0
        flaws: list[Flaw] = []
        surplus: list[Surplus] = []
        unverifiable = set[ContainerId]()
        for container_id in sorted(
            {i for store in [*stores.values(), *healthy.values()] for i in _ids(store)}
        ):
            containers += 1
            replicas = {
                n: store.get(container_id)
                for n, store in stores.items()
                if container_id in _ids(store)
            }
            flaws += [
                Flaw(container_id, name, "the replica is gone")
                for name, store in healthy.items()
                if container_id in store.ids() and name not in replicas
            ]
            records = {name: dict(_records(replica)) for name, replica in replicas.items()}
            unproven = _unverifiable_blocks(records.values())
            if unproven and unproven == set().union(*records.values()):
                unverifiable.add(container_id)
                continue
            for name, replica in replicas.items():
                result = scan(replica)
                read_bytes += result.bytes_read
                flaws += [
                    Flaw(container_id, name, f"{f.type.value} {f.detail}".strip())
                    for f in result.findings
                ]
                surplus += [
                    Surplus(container_id, name, *extra)
                    for extra in _surplus(replica, records[name])
                ]
            if not any(_is_erasure_coded(replica) for replica in replicas.values()):
                found, length = _unequal(container_id, replicas, records, unproven)
                flaws += found
                compared_bytes += length
            for name, replica in replicas.items():
                if name in healthy and container_id in healthy[name].ids():
                    whole = healthy[name].open(container_id)
                    compared_bytes += _file_bytes(replica, records[name])
                    flaws += [
                        Flaw(container_id, name, f"{text} than undamaged")
                        for text in _changed_since(replica, whole, records[name])
                    ]
        return Proof(
            containers,
            read_bytes,
            compared_bytes,
            tuple(flaws),
            frozenset(unverifiable),
            tuple(surplus),
        )


def _unequal(
    container_id: ContainerId,
    replicas: Mapping[str, Container],
    records: Mapping[str, Mapping[BlockId, BlockRecord]],
    unproven: AbstractSet[BlockId],
) -> tuple[list[Flaw], int]:
    """How the replicas differ from the first, and how many bytes were compared."""
    first_name, first = next(iter(replicas.items()))
    # A block deleted on one replica stays on the others until Ozone deletes it there.
    claimed = {block_id for replica in replicas.values() for block_id in _tombstones(replica)}
    flaws, compared_bytes = list[Flaw](), 0
    for name, replica in list(replicas.items())[1:]:
        compared_bytes += _file_bytes(replica, records[name])
        texts = _differences(replica, first, records[name], records[first_name], claimed | unproven)
        flaws += [Flaw(container_id, name, f"{text} than on {first_name}") for text in texts]
    return flaws, compared_bytes


def _open_stores(
    stack: ExitStack, paths: Mapping[str, Path], state_folder: Path, disk: Disk
) -> dict[str, ContainerStore]:
    """The containers of the volumes, opened read-only until the stack is closed."""
    return {
        name: ContainerStore(
            stack.enter_context(
                open_volume(path, hold=Hold.READ_ONLY, state_folder=state_folder / name, disk=disk)
            ),
            disk,
        )
        for name, path in paths.items()
    }


def _changed_since(
    replica: Container, whole: Container, records: Mapping[BlockId, BlockRecord]
) -> Iterator[str]:
    """The differences of a replica from its undamaged state."""
    yield from _differences(replica, whole, records, dict(_records(whole)), set())
    yield from _changed_records(replica, whole)
    yield from _tree_differences(replica, whole)


def _ids(store: ContainerStore) -> set[ContainerId]:
    """The containers of a volume, including those that have block records but no
    folder.
    """
    found = set(store.ids())
    # If the database cannot be read, every container has a flaw already.
    with suppress(DatabaseError):
        found |= set(store.ids_without_folder())
    return found


def _records(replica: Container) -> Iterator[tuple[BlockId, BlockRecord]]:
    """The readable block records; the scan reports the others."""
    with suppress(DatabaseError, RecordInvalidError):
        for block_id in replica.block_ids():
            with suppress(RecordInvalidError):
                record = replica.record(block_id)
                if record is not None:
                    yield block_id, record


def _unverifiable_blocks(replicas: Iterable[Mapping[BlockId, BlockRecord]]) -> set[BlockId]:
    """The blocks that have chunks but on no replica any recorded checksums."""
    proven, unproven = set[BlockId](), set[BlockId]()
    for records in replicas:
        for block_id, record in records.items():
            is_verifiable = not record.chunks or any(chunk.is_verifiable for chunk in record.chunks)
            (proven if is_verifiable else unproven).add(block_id)
    return unproven - proven


def _is_erasure_coded(replica: Container) -> bool:
    # Without a descriptor this is unknown, and the scan reports the damage.
    with suppress(DescriptorError, DiskError, ContainerUnsupportedError):
        return replica.replica_index > 0
    return False


def _file_bytes(replica: Container, records: Mapping[BlockId, BlockRecord]) -> int:
    total = 0
    for block_id, record in records.items():
        # If the file cannot be read, the scan reports it.
        with suppress(DiskError):
            total += (replica.block_length(block_id) or 0) - replica.unrecorded_bytes(record)
    return total


def _surplus(
    replica: Container, records: Mapping[BlockId, BlockRecord]
) -> Iterator[tuple[BlockId, int]]:
    for block_id, record in records.items():
        # If the file cannot be read, the scan reports it.
        with suppress(DiskError):
            if length_bytes := replica.unrecorded_bytes(record):
                yield block_id, length_bytes


def _differences(
    replica: Container,
    other: Container,
    ours: Mapping[BlockId, BlockRecord],
    theirs: Mapping[BlockId, BlockRecord],
    ignored: set[BlockId],
) -> Iterator[str]:
    one_sided = (ours.keys() ^ theirs.keys()) - ignored
    if one_sided:
        yield f"{len(one_sided)} block records more or fewer"
    for block_id in sorted((ours.keys() & theirs.keys()) - ignored):
        if _recorded_chunks(ours[block_id]) != _recorded_chunks(theirs[block_id]):
            yield f"another record of block {block_id}"
        try:
            is_equal = _files_equal(replica, other, ours[block_id])
        except DiskError:
            # A link, a folder or a bad sector is never equal.
            is_equal = False
        if not is_equal:
            yield f"another file of block {block_id}"


def _recorded_chunks(record: BlockRecord) -> list[object]:
    """The chunks of a record, without other metadata."""
    return [
        (c.offset, c.length_bytes, c.checksum_type, c.bytes_per_checksum, c.checksums)
        for c in record.chunks
    ]


def _changed_records(replica: Container, other: Container) -> Iterator[str]:
    for block_id in other.block_ids():
        if _raw_record(replica, block_id) != _raw_record(other, block_id):
            yield f"another text of the record of block {block_id}"


def _tree_differences(replica: Container, other: Container) -> Iterator[str]:
    if _tree(replica) is None or _tree(replica) != _tree(other):
        yield "another tree file"


def _tombstones(replica: Container) -> Iterator[BlockId]:
    raw = _tree(replica)
    # Like Ozone, treat an unreadable tree as missing.
    with suppress(TreeRefusedError):
        blocks = tree_from_bytes(raw, replica.container_id).blocks if raw is not None else ()
        yield from (block.block_id for block in blocks if block.deleted)


def _raw_record(replica: Container, block_id: BlockId) -> bytes | None:
    return replica.volume.database.get(
        OzoneTable.BLOCK_DATA, block_key(replica.container_id, block_id)
    )


def _tree(replica: Container) -> bytes | None:
    try:
        return replica.disk.read(replica.metadata_folder / f"{replica.container_id}.tree")
    except DiskError:
        return None


def _files_equal(replica: Container, other: Container, record: BlockRecord) -> bool:
    block_id, end = record.block_id, record.chunks[-1].end if record.chunks else 0
    lengths = [holder.block_length(block_id) for holder in (replica, other)]
    if None in lengths:
        return lengths == [None, None]
    return all(
        replica.read(block_id, offset, min(_PIECE_BYTES, end - offset))
        == other.read(block_id, offset, min(_PIECE_BYTES, end - offset))
        for offset in range(0, end, _PIECE_BYTES)
    )
