"""Prove on disk, with no agent running, that replicas are whole and equal.

Nothing of what an agent said is believed: records, block files and trees are read
again. Where undamaged volumes are at hand for comparison, records, block files and tree
files must be theirs, byte for byte. Without them, replicas must have equal block files,
and records that demand the same bytes: Ozone's own repair leaves out a record's
metadata, and a last chunk may still stand apart on one replica.

A block file is compared as far as chunks are recorded. What lies behind them is no part
of the block, is never cut off (docs/safety.md) and is named.
"""

from collections.abc import Iterable, Iterator, Mapping
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
    """One reason why a container is not proven, on one replica."""

    container_id: ContainerId
    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Surplus:
    """Bytes behind the last recorded chunk of a block's file on one replica."""

    container_id: ContainerId
    replica: str
    block_id: BlockId
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """What was read: containers, blocks and bytes, and every flaw found; surplus bytes
    are none.
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
    """Read all replicas; with `reference`, volumes of the same names, also compare each
    with its undamaged self.

    A block without recorded checksums is not compared; a container of nothing else is
    named unverifiable.
    """
    disk = Disk()
    with ExitStack() as stack:
        stores = _opened(stack, volumes, scratch / "proven", disk)
        healthy = _opened(stack, reference or {}, scratch / "reference", disk)
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
                first_name, first = next(iter(replicas.items()))
                # A block that some replica has deleted stays on the others until the
                # cluster's own delete arrives.
                claimed = {
                    block_id for replica in replicas.values() for block_id in _tombstones(replica)
                }
                for name, replica in list(replicas.items())[1:]:
                    compared_bytes += _file_bytes(replica, records[name])
                    texts = _differences(
                        replica, first, records[name], records[first_name], claimed | unproven
                    )
                    flaws += [
                        Flaw(container_id, name, f"{text} than on {first_name}") for text in texts
                    ]
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


def _opened(
    stack: ExitStack, paths: Mapping[str, Path], state_folder: Path, disk: Disk
) -> dict[str, ContainerStore]:
    """The volumes' containers, read-only and open until the stack is closed."""
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
    """How a replica differs from its undamaged self."""
    yield from _differences(replica, whole, records, dict(_records(whole)), set())
    yield from _changed_records(replica, whole)
    yield from _tree_differences(replica, whole)


def _ids(store: ContainerStore) -> set[ContainerId]:
    """The containers that a volume has a part of: a folder, or records of blocks whose
    folder is lost.
    """
    found = set(store.ids())
    # Without its database, a volume has flaws enough in the containers that it has.
    with suppress(DatabaseError):
        found |= set(store.ids_without_folder())
    return found


def _records(replica: Container) -> Iterator[tuple[BlockId, BlockRecord]]:
    """The records that can be read, as readers see them; the others are findings of the
    scan.
    """
    with suppress(DatabaseError, RecordInvalidError):
        for block_id in replica.block_ids():
            with suppress(RecordInvalidError):
                record = replica.record(block_id)
                if record is not None:
                    yield block_id, record


def _unverifiable_blocks(replicas: Iterable[Mapping[BlockId, BlockRecord]]) -> set[BlockId]:
    """The blocks of which no replica has recorded any checksums, though there are
    bytes.
    """
    proven, unproven = set[BlockId](), set[BlockId]()
    for records in replicas:
        for block_id, record in records.items():
            is_verifiable = not record.chunks or any(chunk.is_verifiable for chunk in record.chunks)
            (proven if is_verifiable else unproven).add(block_id)
    return unproven - proven


def _is_erasure_coded(replica: Container) -> bool:
    # Without a descriptor nobody knows; the scan has said that it is damaged.
    with suppress(DescriptorError, DiskError, ContainerUnsupportedError):
        return replica.replica_index > 0
    return False


def _file_bytes(replica: Container, records: Mapping[BlockId, BlockRecord]) -> int:
    total = 0
    for block_id, record in records.items():
        # Where the file cannot be looked at, the scan has said so.
        with suppress(DiskError):
            total += (replica.block_length(block_id) or 0) - replica.unrecorded_bytes(record)
    return total


def _surplus(
    replica: Container, records: Mapping[BlockId, BlockRecord]
) -> Iterator[tuple[BlockId, int]]:
    for block_id, record in records.items():
        # Where the file cannot be looked at, the scan has said so.
        with suppress(DiskError):
            if length_bytes := replica.unrecorded_bytes(record):
                yield block_id, length_bytes


def _differences(
    replica: Container,
    other: Container,
    ours: Mapping[BlockId, BlockRecord],
    theirs: Mapping[BlockId, BlockRecord],
    passed_over: set[BlockId],
) -> Iterator[str]:
    one_sided = (ours.keys() ^ theirs.keys()) - passed_over
    if one_sided:
        yield f"{len(one_sided)} block records more or fewer"
    for block_id in sorted((ours.keys() & theirs.keys()) - passed_over):
        if _demanded(ours[block_id]) != _demanded(theirs[block_id]):
            yield f"another record of block {block_id}"
        try:
            is_equal = _files_equal(replica, other, ours[block_id])
        except DiskError:
            # A link, a folder, a bad sector: it holds nothing that could be equal.
            is_equal = False
        if not is_equal:
            yield f"another file of block {block_id}"


def _demanded(record: BlockRecord) -> list[object]:
    """What the record says of the bytes."""
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
    # One that cannot be read counts as absent, as it does for Ozone.
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
