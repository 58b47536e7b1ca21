"""Prove on disk, with no agent running, that replicas are whole and equal.

Nothing of what an agent said is believed: records, block files and trees are read again. Where undamaged volumes are at
hand for comparison, records, block files and tree files must be theirs, byte for byte.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from merkle.errors import DiskError
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container, ContainerStore
from ozone.disk import Disk
from ozone.rocks import Table, block_key
from ozone.scan import scan
from ozone.volume import Hold, open_volume
from protos.convert import tree_from_bytes

# Block files are compared in pieces of this length.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Flaw:
    """One reason why a container is not proven, on one replica."""

    container_id: ContainerId
    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What was read: containers, blocks and bytes, and every flaw found."""

    containers: int
    windows_matching_bytes: int
    compared_bytes: int
    flaws: tuple[Flaw, ...] = ()
    unverifiable: frozenset[ContainerId] = field(default_factory=frozenset)

    def flawed(self) -> frozenset[ContainerId]:
        return frozenset(flaw.container_id for flaw in self.flaws)


def prove(volumes: Mapping[str, Path], scratch: Path, *, reference: Mapping[str, Path] | None = None) -> Proof:
    """Read all replicas; with `reference`, volumes of the same names, also compare each with its undamaged self.

    A container whose blocks have no recorded checksums is named unverifiable and not looked at further.
    """
    disk = Disk()
    with ExitStack() as stack:

        def opened(paths: Mapping[str, Path], place: str) -> dict[str, ContainerStore]:
            return {
                name: ContainerStore(
                    stack.enter_context(
                        open_volume(path, hold=Hold.READ_ONLY, state_folder=scratch / place / name, disk=disk)
                    ),
                    disk,
                )
                for name, path in paths.items()
            }

        stores, healthy = opened(volumes, "proven"), opened(reference or {}, "reference")
        read_bytes = compared_bytes = 0
        flaws: list[Flaw] = []
        unverifiable = set()
        container_ids = sorted({i for store in [*stores.values(), *healthy.values()] for i in store.ids()})
        for container_id in container_ids:
            replicas = {n: store.open(container_id) for n, store in stores.items() if container_id in store.ids()}
            flaws += [
                Flaw(container_id, name, "the replica is gone")
                for name, store in healthy.items()
                if container_id in store.ids() and name not in replicas
            ]
            if all(_is_unverifiable(replica) for replica in replicas.values()):
                unverifiable.add(container_id)
                continue
            for name, replica in replicas.items():
                result = scan(replica)
                read_bytes += result.bytes_read
                flaws += [Flaw(container_id, name, f"{f.type.value} {f.detail}".strip()) for f in result.findings]
            if not any(replica.replica_index for replica in replicas.values()):
                first_name, first = next(iter(replicas.items()))
                # A block that some replica has deleted stays on the others until the cluster's own delete arrives.
                claimed = {block_id for replica in replicas.values() for block_id in _tombstones(replica)}
                for name, replica in list(replicas.items())[1:]:
                    compared_bytes += _file_bytes(replica)
                    flaws += [
                        Flaw(container_id, name, f"{text} than on {first_name}")
                        for text in _differences(replica, first, claimed)
                    ]
            for name, replica in replicas.items():
                if name in healthy and container_id in healthy[name].ids():
                    whole = healthy[name].open(container_id)
                    compared_bytes += _file_bytes(replica)
                    flaws += [
                        Flaw(container_id, name, f"{text} than undamaged")
                        for text in [*_differences(replica, whole, set()), *_tree_differences(replica, whole)]
                    ]
        return Proof(len(container_ids), read_bytes, compared_bytes, tuple(flaws), frozenset(unverifiable))


def _is_unverifiable(replica: Container) -> bool:
    chunks = [chunk for record in replica.records() for chunk in record.chunks]
    return bool(chunks) and not any(chunk.is_verifiable for chunk in chunks)


def _file_bytes(replica: Container) -> int:
    return sum(replica.block_length(block_id) or 0 for block_id in replica.block_ids())


def _differences(replica: Container, other: Container, passed_over: set[BlockId]) -> Iterator[str]:
    ours, theirs = set(replica.block_ids()) - passed_over, set(other.block_ids()) - passed_over
    if ours != theirs:
        yield f"{len(ours ^ theirs)} block records more or fewer"
    for block_id in sorted(ours & theirs):
        if _record(replica, block_id) != _record(other, block_id):
            yield f"another record of block {block_id}"
        if not _files_equal(replica, other, block_id):
            yield f"another file of block {block_id}"


def _tree_differences(replica: Container, other: Container) -> Iterator[str]:
    if _tree(replica) is None or _tree(replica) != _tree(other):
        yield "another tree file"


def _tombstones(replica: Container) -> Iterator[BlockId]:
    raw = _tree(replica)
    if raw is not None:
        yield from (block.block_id for block in tree_from_bytes(raw, replica.container_id).blocks if block.deleted)


def _record(replica: Container, block_id: BlockId) -> bytes | None:
    return replica.volume.database.get(Table.BLOCK_DATA, block_key(replica.container_id, block_id))


def _tree(replica: Container) -> bytes | None:
    try:
        return replica.disk.read(replica.metadata_folder / f"{replica.container_id}.tree")
    except DiskError:
        return None


def _files_equal(replica: Container, other: Container, block_id: BlockId) -> bool:
    length = replica.block_length(block_id)
    if length != other.block_length(block_id):
        return False
    return all(
        replica.read(block_id, offset, PIECE_BYTES) == other.read(block_id, offset, PIECE_BYTES)
        for offset in range(0, length or 0, PIECE_BYTES)
    )
