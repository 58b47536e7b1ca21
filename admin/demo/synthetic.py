"""Generate the chunk tables of a synthetic cluster from a seed, with damage of every
kind, and return the damage as ground truth.

The three replicas of a container are equal except for its damage; a container has one
damage at most. Some containers differ by design, and a sweep must not report them:
erasure-coded ones, open ones, and those with a replica without a tree. Rows are
generated slab by slab, each some of the blocks, so memory is bounded.
"""

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from admin.demo.ground_truth import DamageKind, GroundTruth, InjectedDamage
from chunktable.manifest import FileKind, Manifest, TableFile, file_name
from chunktable.places import Sink
from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW, CONTAINER_SCHEMA
from chunktable.writer import WRITTEN_SCHEMA, OpenChunkFile
from merkle.replica import TreeSource
from merkle.tree import block_checksum

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHUNK_BYTES = 4 << 20

REPLICAS = 3

# Chunks of one slab, counted once for all replicas.
_SLAB_ROWS = 1 << 19

# Rows of a row group, and the rows buffered by all writers together.
_GROUP_ROWS = 1 << 20
_PENDING_ROWS = 24 << 20

_SCANNED_AT_MS = 1_790_000_000_000
_CREATED_AT = datetime.fromtimestamp(_SCANNED_AT_MS / 1000, UTC)

# The ages of the volumes, in turn.
_AGES_DAYS = (10, 100, 250, 700, 1500, 2200)
_DAY_MS = 86_400_000

# Sequence and token of the one export that each datanode made.
_SEQUENCE, _TOKEN = 1, "00000000"
_HELD_NAMES = ["container_id", "generation", "rows"]
_FIRST_BLOCK = 113_750_153_625_600_000
_FIRST_CONTAINER = 1
_BLOCKS_DELETED = 0.01
_CONTAINERS_OPEN = 0.01
_CONTAINERS_CODED = 0.01
_CONTAINERS_WITHOUT_TREE = 0.002

_STATES = ("CLOSED", "QUASI_CLOSED", "UNHEALTHY", "OPEN")

_SOURCES = ("tree", "none")


class RowOrder(Enum):
    """The order of the rows in the files."""

    # An export with a manifest for each datanode, as agents write them.
    CLUSTERED = "clustered"
    # Rows in random order over all files: no replica is contiguous, and the statistics
    # of a row group exclude no container.
    SHUFFLED = "shuffled"


# The share of containers with each kind of damage; a share above 0 damages at least one
# container.
_DEFAULT_DAMAGE: Mapping[DamageKind, float] = MappingProxyType(dict.fromkeys(DamageKind, 0.0005))


@dataclass(frozen=True, slots=True)
class SyntheticCluster:
    """The size of the cluster to generate.

    `blocks` is the mean number of blocks per container, `largest_blocks` the least
    number in the first container. `chunks` is the number of chunks in a full block,
    and `full` the share of full blocks.
    """

    seed: int = 1
    datanodes: int = 6
    containers: int = 300
    blocks: int = 20
    chunks: int = 64
    largest_blocks: int = 0
    order: RowOrder = RowOrder.CLUSTERED
    damage: Mapping[DamageKind, float] = field(default_factory=lambda: _DEFAULT_DAMAGE)
    full: float = 0.8

    def __post_init__(self) -> None:
        assert self.datanodes >= REPLICAS
        assert self.containers >= 1
        assert self.blocks >= 2
        assert self.chunks >= 1
        assert 0 <= self.full <= 1


def synthetic(folder: Path, cluster: SyntheticCluster, *, healthy: bool = False) -> GroundTruth:
    """Write the cluster's chunk tables to `folder`, in `cluster.order`.

    With `healthy`, writes the same cluster before it was damaged, and returns no
    damages.
    """
    layout = _Layout.of(cluster)
    found: list[InjectedDamage] = []
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_Writer(path, cluster))
            for path in _paths(folder, layout, cluster.order)
        ]
        slabs = -(-layout.blocks_all * cluster.chunks // _SLAB_ROWS)
        for number, ordinals in enumerate(_slabs(layout.blocks_all, slabs, cluster.order)):
            slab = _Slab.of(layout, ordinals, np.random.default_rng((cluster.seed, 1, number)))
            found += () if healthy else slab.damages(layout)
            rows = [
                slab.held_by(layout, node).rows(layout, node, healthy=healthy)
                for node in range(cluster.datanodes)
            ]
            if cluster.order is RowOrder.SHUFFLED:
                shuffle = np.random.default_rng((cluster.seed, 2, number))
                all_rows = {name: np.concatenate([one[name] for one in rows]) for name in rows[0]}
                order = shuffle.permutation(len(all_rows["node"]))
                ways = len(writers)
                rows = [
                    {n: column[order[i::ways]] for n, column in all_rows.items()}
                    for i in range(ways)
                ]
            for writer, one in zip(writers, rows, strict=True):
                writer.add(layout, one)
        rows_all = sum(writer.close() for writer in writers)
    if cluster.order is RowOrder.CLUSTERED:
        for number, (name, writer) in enumerate(zip(layout.names, writers, strict=True)):
            _commit(
                folder / name,
                name,
                writer,
                _SCANNED_AT_MS - _AGES_DAYS[number % len(_AGES_DAYS)] * _DAY_MS,
            )
    without_tree = tuple((np.flatnonzero(layout.is_without_tree) + _FIRST_CONTAINER).tolist())
    damages = tuple(sorted(found, key=lambda damage: damage.container_id))
    return GroundTruth(
        damages, without_tree, rows_all, cluster.containers, cluster.containers * REPLICAS
    )


def _commit(folder: Path, datanode: str, writer: "_Writer", volume_created_ms: int) -> None:
    """Complete an export: write its inventory, and the manifest that lists both
    files.
    """
    inventory = folder / file_name(FileKind.CONTAINERS, _SEQUENCE, _TOKEN)
    held = writer.inventory(_volume(datanode))
    with inventory.open("wb") as file:
        sink = Sink(lambda data, _: file.write(data))
        out = OpenChunkFile(inventory.name, sink)
        out.write(held)
        out.close()
    files = tuple(
        TableFile(path.name, kind, rows, one.length_bytes, one.checksum, _CREATED_AT, pieces)
        for path, kind, rows, one, pieces in (
            (writer.path, FileKind.CHUNKS, writer.rows, writer.sink, tuple(writer.sink.pieces)),
            (inventory, FileKind.CONTAINERS, held.num_rows, sink, ()),
        )
    )
    manifest = Manifest(
        datanode=datanode,
        sequence=_SEQUENCE,
        previous=None,
        begun_at=_CREATED_AT,
        created_at=_CREATED_AT,
        source=TreeSource.TREE,
        volumes=(_volume(datanode),),
        skipped=(),
        files=files,
        containers=held.num_rows,
        rows=writer.rows,
        volumes_created_ms={_volume(datanode): volume_created_ms},
    )
    (folder / manifest.name).write_bytes(manifest.to_bytes())


def _volume(datanode: str) -> str:
    return f"DS-{datanode}"


_KINDS = tuple(DamageKind)

_NO_DAMAGE = -1


@dataclass(frozen=True, slots=True)
class _Layout:
    """The random choices for the whole cluster, as arrays by container."""

    cluster: SyntheticCluster
    names: tuple[str, ...]
    # The ordinal of each container's first block, and the number of all blocks.
    starts: Int64s
    # Datanodes by container and replica, and the states of their replicas.
    nodes: Int64s
    states: Int64s
    is_coded: Bools
    is_without_tree: Bools
    # The damage (an index into _KINDS), its block, its replica, and its relative
    # position in the block, from 0 to 1.
    damage: Int64s
    damaged_block: Int64s
    damaged_replica: Int64s
    damaged_at: npt.NDArray[np.float64]

    @classmethod
    def of(cls, cluster: SyntheticCluster) -> Self:
        """Draw the cluster from its seed."""
        rng = np.random.default_rng((cluster.seed, 0))
        count, nodes = cluster.containers, cluster.datanodes
        names = tuple(
            str(uuid.UUID(int=random.Random(f"{cluster.seed}.{i}").getrandbits(128)))
            for i in range(nodes)
        )
        blocks = rng.integers(max(2, cluster.blocks * 3 // 4), cluster.blocks * 5 // 4 + 1, count)
        blocks[0] = max(blocks[0], cluster.largest_blocks)
        starts = np.concatenate([[0], np.cumsum(blocks)])
        # Three different datanodes: a random one, and two different steps from it.
        steps = (
            rng.integers(1, [[nodes, nodes - 1]], (count, 2))
            if nodes > 2
            else np.ones((count, 2), np.int64)
        )
        steps[:, 1] += steps[:, 1] >= steps[:, 0]
        first = rng.integers(0, nodes, count)
        placed = np.stack(
            [first, (first + steps[:, 0]) % nodes, (first + steps[:, 1]) % nodes], axis=1
        )
        draw = rng.random(count)
        coded = draw < _CONTAINERS_CODED
        is_open = (draw >= _CONTAINERS_CODED) & (draw < _CONTAINERS_CODED + _CONTAINERS_OPEN)
        without = draw > 1 - _CONTAINERS_WITHOUT_TREE
        states = (rng.random((count, REPLICAS)) > 0.98).astype(np.int64)
        states[rng.random((count, REPLICAS)) > 0.99] = _STATES.index("UNHEALTHY")
        states[is_open] = _STATES.index("OPEN")
        damage = np.full(count, _NO_DAMAGE, np.int64)
        free = rng.permutation(np.flatnonzero(~(coded | is_open | without)))
        for kind, share in cluster.damage.items():
            hit, free = np.split(
                free, [min(len(free), max(1, round(share * count)) if share > 0 else 0)]
            )
            damage[hit] = _KINDS.index(kind)
        return cls(
            cluster,
            names,
            starts,
            placed,
            states,
            coded,
            without,
            damage,
            starts[:-1] + (rng.random(count) * blocks).astype(np.int64),
            rng.integers(0, REPLICAS, count),
            rng.random(count),
        )

    @property
    def blocks_all(self) -> int:
        """The number of all blocks."""
        return int(self.starts[-1])


def _paths(folder: Path, layout: _Layout, order: RowOrder) -> list[Path]:
    if order is RowOrder.CLUSTERED:
        return [
            folder / name / file_name(FileKind.CHUNKS, _SEQUENCE, _TOKEN, 0)
            for name in layout.names
        ]
    return [folder / f"part-{i:03}.parquet" for i in range(len(layout.names))]


def _slabs(blocks: int, count: int, order: RowOrder) -> Sequence[Int64s]:
    if order is RowOrder.CLUSTERED:
        return np.array_split(np.arange(blocks), count)
    # Spread each container over all slabs.
    return [np.arange(i, blocks, count) for i in range(count)]


class _RowColumns(NamedTuple):
    """The columns of rows that damage changes, and which rows are kept."""

    offsets: Int64s
    lengths: Int64s
    checksums: Int64s
    matches: Bools
    deleted: Bools
    keep: Bools


@dataclass(frozen=True, slots=True)
class _Slab:
    """Blocks with all of their chunks, before any damage."""

    ordinals: Int64s
    containers: Int64s
    block_ids: Int64s
    is_deleted: Bools
    starts: Int64s
    offsets: Int64s
    lengths: Int64s
    checksums: Int64s

    @classmethod
    def of(cls, layout: _Layout, ordinals: Int64s, rng: np.random.Generator) -> Self:
        """Draw the chunks of some blocks."""
        count, chunks = len(ordinals), layout.cluster.chunks
        containers = np.searchsorted(layout.starts, ordinals, "right") - 1
        damaged = (layout.damage[containers] != _NO_DAMAGE) & (
            layout.damaged_block[containers] == ordinals
        )
        counts = np.where(
            rng.random(count) < layout.cluster.full, chunks, rng.integers(1, chunks + 1, count)
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = int(starts[-1])
        ranks = np.arange(rows) - np.repeat(starts[:-1], counts)
        lengths = np.full(rows, CHUNK_BYTES, np.int64)
        lengths[starts[1:] - 1] = rng.integers(1, CHUNK_BYTES + 1, count)
        return cls(
            ordinals,
            containers,
            _FIRST_BLOCK + ordinals * 4 + rng.integers(0, 4, count),
            (rng.random(count) < _BLOCKS_DELETED) & ~damaged,
            starts,
            ranks * CHUNK_BYTES,
            lengths,
            # Not 0, which stands for no recorded checksum.
            rng.integers(1, 1 << 32, rows),
        )

    def damages(self, layout: _Layout) -> list[InjectedDamage]:
        """The damages in these blocks."""
        found = []
        for block, row in zip(*self._damaged(layout), strict=True):
            container = self.containers[block]
            kind = _KINDS[layout.damage[container]]
            holders = [layout.names[node] for node in layout.nodes[container]]
            hit = (
                {holders[layout.damaged_replica[container]]}
                if kind is not DamageKind.LOST_CHUNK
                else set(holders)
            )
            found.append(
                InjectedDamage(
                    kind,
                    int(container) + _FIRST_CONTAINER,
                    int(self.block_ids[block]),
                    None
                    if kind in (DamageKind.MISSING_BLOCK, DamageKind.DELETED_BLOCK)
                    else int(self.offsets[row]),
                    tuple(sorted(hit)),
                    tuple(sorted(set(holders) - hit)),
                )
            )
        return found

    def held_by(self, layout: _Layout, node: int) -> Self:
        """The blocks of which a datanode has a replica."""
        held = np.flatnonzero((layout.nodes[self.containers] == node).any(axis=1))
        counts = np.diff(self.starts)[held]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(starts[-1]) + np.repeat(self.starts[held] - starts[:-1], counts)
        return replace(
            self,
            ordinals=self.ordinals[held],
            containers=self.containers[held],
            block_ids=self.block_ids[held],
            is_deleted=self.is_deleted[held],
            starts=starts,
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            checksums=self.checksums[rows],
        )

    def rows(
        self, layout: _Layout, node: int, *, healthy: bool
    ) -> dict[str, npt.NDArray[np.generic]]:
        """The rows of these blocks, which a datanode has, in order. Text columns are
        indexes into their lists of values.
        """
        replica = np.argmax(layout.nodes[self.containers] == node, axis=1)
        counts = np.diff(self.starts)
        offsets, lengths, checksums = (
            self.offsets.copy(),
            self.lengths.copy(),
            self.checksums.copy(),
        )
        matches, keep = np.ones(len(offsets), np.bool_), np.ones(len(offsets), np.bool_)
        deleted = np.repeat(self.is_deleted, counts)
        of_block = np.repeat(np.arange(len(counts)), counts)
        # The replicas of an erasure-coded container hold different data, and open
        # replicas may differ.
        differs = layout.is_coded[self.containers] | (
            layout.states[self.containers, 0] == _STATES.index("OPEN")
        )
        checksums[np.repeat(differs, counts)] ^= node + 1
        rows = _RowColumns(offsets, lengths, checksums, matches, deleted, keep)
        for block, row in zip(*self._damaged(layout), strict=True) if not healthy else ():
            container = self.containers[block]
            kind = _KINDS[layout.damage[container]]
            if (
                kind is not DamageKind.LOST_CHUNK
                and replica[block] != layout.damaged_replica[container]
            ):
                continue
            self._damage(rows, kind, block, row)
        # A replica without a tree has one row, made from that of its first block.
        lost = layout.is_without_tree[self.containers] & (replica == 0)
        keep &= ~np.repeat(lost, counts)
        is_first = self.ordinals == layout.starts[self.containers]
        kept = self.starts[:-1][lost & is_first]
        keep[kept] = True
        offsets[kept], lengths[kept], checksums[kept], deleted[kept] = CONTAINER_ROW, 0, 0, False
        chosen = np.flatnonzero(keep)
        own = of_block[chosen]
        container = self.containers[own]
        is_container_row = offsets[chosen] == CONTAINER_ROW
        coded = layout.is_coded[container]
        return {
            "node": np.full(len(chosen), node, np.int32),
            "container_id": container + _FIRST_CONTAINER,
            "state": layout.states[container, replica[own]].astype(np.int32),
            "bcs_id": container * 7,
            "replica_index": np.where(coded, replica[own] + 1, 0).astype(np.int32),
            "block_id": np.where(is_container_row, 0, self.block_ids[own]),
            "chunk_offset": offsets[chosen],
            "length": lengths[chosen],
            "checksum": checksums[chosen],
            "matches": matches[chosen],
            "deleted": deleted[chosen],
            "source": is_container_row.astype(np.int32),
            "generation": np.where(layout.damage[container] == _NO_DAMAGE, 1, 1 if healthy else 2),
        }

    def _damage(self, rows: "_RowColumns", kind: DamageKind, block: int, row: int) -> None:
        """Damage the rows of a block; `row` is that of the damaged chunk."""
        block_rows = slice(self.starts[block], self.starts[block + 1])
        match kind:
            case DamageKind.CORRUPT_CHUNK | DamageKind.LOST_CHUNK:
                rows.checksums[row] ^= 1 << 31
                rows.matches[row] = False
            case DamageKind.CONFLICTING_CHUNK:
                rows.checksums[row] ^= 1 << 31
            case DamageKind.MISSING_CHUNK if self.starts[block + 1] - self.starts[block] > 1:
                rows.keep[row] = False
            case DamageKind.MISSING_CHUNK:
                # The block stays, without chunks.
                rows.offsets[row], rows.lengths[row] = BLOCK_ROW, 0
                rows.checksums[row] = block_checksum(int(self.block_ids[block]), [])
            case DamageKind.MISSING_BLOCK:
                rows.keep[block_rows] = False
            case DamageKind.DELETED_BLOCK:
                rows.deleted[block_rows] = True

    def _damaged(self, layout: _Layout) -> tuple[list[int], list[int]]:
        """The damaged blocks of this slab, and the damaged row of each."""
        is_hit = (layout.damage[self.containers] != _NO_DAMAGE) & (
            layout.damaged_block[self.containers] == self.ordinals
        )
        blocks = np.flatnonzero(is_hit)
        counts = np.diff(self.starts)[blocks]
        rows = self.starts[blocks] + (layout.damaged_at[self.containers[blocks]] * counts).astype(
            np.int64
        )
        return blocks.tolist(), rows.tolist()


class _Writer:
    """Writes one file; rows are buffered until they fill a row group."""

    def __init__(self, path: Path, cluster: SyntheticCluster) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._is_sorted = cluster.order is RowOrder.CLUSTERED
        self._open()
        self._inventory: list[Int64s] = []
        self._group_rows = min(_GROUP_ROWS, _PENDING_ROWS // cluster.datanodes)
        self._pending: list[dict[str, npt.NDArray[np.generic]]] = []
        self._waiting = 0
        self._layout: _Layout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, layout: _Layout, rows: dict[str, npt.NDArray[np.generic]]) -> None:
        """Add rows; a full row group is written."""
        self._layout = layout
        if not len(rows["node"]):
            return
        self._pending.append(rows)
        self._waiting += len(rows["node"])
        if self._waiting >= self._group_rows:
            self._flush()

    def close(self) -> int:
        """Write the remaining rows, and return the number of all rows."""
        self._flush()
        if not self.rows:
            self._out.write(WRITTEN_SCHEMA.empty_table())
        self._out.close()
        self._file.close()
        if len(self._inventory) > 1 and self.rows <= _GROUP_ROWS:
            # Many writers share the memory. An agent has it for itself, and makes one
            # row group.
            whole = pq.read_table(self.path, partitioning=None)
            self._open()
            self._out.write(whole)
            self._out.close()
            self._file.close()
        return self.rows

    def _open(self) -> None:
        self._file = self.path.open("wb")
        self.sink = Sink(lambda data, _: self._file.write(data))
        self._out = OpenChunkFile(self.path.name, self.sink, is_sorted=self._is_sorted)

    @property
    def rows(self) -> int:
        """The number of rows written."""
        return self._out.rows

    def inventory(self, volume: str) -> pa.Table:
        """The replicas in the file (CONTAINER_SCHEMA)."""
        found = pa.table(
            list(np.concatenate([np.empty((3, 0), np.int64), *self._inventory], axis=1)),
            _HELD_NAMES,
        )
        held = found.group_by(_HELD_NAMES[:2]).aggregate([("rows", "sum")]).sort_by("container_id")
        count = held.num_rows
        columns = {
            "volume": [volume] * count,
            "container_id": held["container_id"],
            "generation": held["generation"],
            "file": [self.path.name] * count,
            "rows": held["rows_sum"],
        }
        return pa.table(columns, CONTAINER_SCHEMA)

    def _flush(self) -> None:
        if not self._waiting or self._layout is None:
            return
        columns = {
            name: np.concatenate([one[name] for one in self._pending]) for name in self._pending[0]
        }
        names = self._layout.names
        node = columns["node"]
        arrays = {
            "datanode": _texts(node, names),
            "volume": _texts(node, names, _volume),
            "state": _texts(columns["state"], _STATES),
            "source": _texts(columns["source"], _SOURCES),
            "scanned_at": pa.array(np.full(len(node), _SCANNED_AT_MS)).cast(
                CHUNK_SCHEMA.field("scanned_at").type
            ),
        }
        table = pa.table(
            [
                arrays[field.name]
                if field.name in arrays
                else pa.array(columns[field.name], field.type)
                for field in WRITTEN_SCHEMA
            ],
            WRITTEN_SCHEMA,
        )
        self._out.write(table)
        ids, first, counts = np.unique(
            columns["container_id"], return_index=True, return_counts=True
        )
        self._inventory.append(np.array([ids, columns["generation"][first], counts], np.int64))
        self._pending, self._waiting = [], 0


def _texts(
    codes: npt.NDArray[np.generic], values: Sequence[str], form: Callable[[str], str] = str
) -> pa.Array:
    """The texts, with a dictionary of those alone that occur, as agents write them."""
    used, places = np.unique(codes, return_inverse=True)
    names = pa.array([form(values[code]) for code in used.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names)
