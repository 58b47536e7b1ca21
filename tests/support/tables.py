"""Chunk tables for tests: volumes in memory to export, and what a reader makes of the
files.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from chunktable.manifest import FileKind, Manifest
from chunktable.reader import find_live_replicas, mark_superseded, read_inventory
from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.survey import ReplicaFault, ReplicaSnapshot
from tests.support.trees import chunk

DATANODE = "00000000-0000-4000-8000-00000000000a"


@dataclass
class MemoryWalk:
    """A volume whose replicas are values (dnagent.export.ReplicaSurvey)."""

    volume: str = "DS-1"
    replicas_held: dict[int, ReplicaSnapshot] = field(default_factory=dict)
    datanode: str = DATANODE
    fault: ReplicaFault | None = None
    created_ms: int | None = None

    def ids(self) -> list[ContainerId]:
        return sorted(map(ContainerId, self.replicas_held))

    def replicas(
        self,
        source: TreeSource,
        ids: Iterable[ContainerId] | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[ReplicaSnapshot]:
        del source, on_bytes, cancelled
        for container_id in self.ids() if ids is None else ids:
            yield self.replicas_held[container_id]

    def put(self, *replicas: ReplicaSnapshot) -> None:
        self.replicas_held |= {int(replica.container_id): replica for replica in replicas}


def replica(
    container_id: int,
    *blocks: BlockTree,
    state: ReplicaState = ReplicaState.CLOSED,
    source: TreeSource | None = TreeSource.TREE,
    bcs_id: int = 7,
    scanned_at_ms: int | None = None,
    faults: tuple[ReplicaFault, ...] = (),
) -> ReplicaSnapshot:
    """A replica with these blocks."""
    tree = ContainerTree.of(ContainerId(container_id), blocks)
    return ReplicaSnapshot(
        ContainerId(container_id),
        state,
        source,
        tree,
        bcs_id,
        scanned_at_ms=scanned_at_ms,
        faults=faults,
    )


def blocks(count: int, chunks_each: int = 2, *, seed: int = 0) -> tuple[BlockTree, ...]:
    """Live blocks 1 to `count`; another seed gives other checksums."""
    return tuple(
        BlockTree.live(
            BlockId(i + 1),
            (chunk(j * 4096, 1 + j + 64 * i + (seed << 20)) for j in range(chunks_each)),
        )
        for i in range(count)
    )


def current_rows(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """All rows that count, in order: what a reader who goes by the manifest sees."""
    inventory = read_inventory(filesystem, folder, manifest)
    batches = [CHUNK_SCHEMA.empty_table()]
    for file in manifest.of_kind(FileKind.CHUNKS):
        held = find_live_replicas(inventory, file.name)
        table = pq.read_table(f"{folder}/{file.name}", filesystem=filesystem)
        checksum = CHUNK_SCHEMA.field("checksum")
        narrow = CHUNK_SCHEMA.set(
            CHUNK_SCHEMA.get_field_index("checksum"), checksum.with_type(pa.uint32())
        )
        assert table.schema.equals(CHUNK_SCHEMA) or table.schema.equals(narrow)
        table = table.cast(CHUNK_SCHEMA)
        for batch in table.to_batches():
            batches.append(
                pa.Table.from_batches([batch.filter(pa.array(~mark_superseded(batch, held)))])
            )
    order = [(name, "ascending") for name in ("volume", "container_id", "block_id", "chunk_offset")]
    return pa.concat_tables(batches).sort_by(order)


def trees_of(rows: pa.Table) -> dict[tuple[str, int], ContainerTree | None]:
    """The trees that rows tell of, one value at a time: the oracle of faster readers.
    None: no tree is known.
    """
    trees: dict[tuple[str, int], ContainerTree | None] = {}
    found: dict[tuple[str, int], dict[int, list[dict[str, object]]]] = {}
    for row in rows.to_pylist():
        place = row["volume"], row["container_id"]
        if row["chunk_offset"] == CONTAINER_ROW:
            trees[place] = (
                None if row["source"] == "none" else ContainerTree.of(ContainerId(place[1]), ())
            )
        else:
            found.setdefault(place, {}).setdefault(row["block_id"], []).append(row)
    for place, by_block in found.items():
        trees[place] = ContainerTree.of(
            ContainerId(place[1]), (_block(b, rows) for b, rows in by_block.items())
        )
    return trees


def _block(block_id: int, rows: list[dict[str, object]]) -> BlockTree:
    first = rows[0]
    if first["deleted"]:
        (only,) = rows
        assert only["chunk_offset"] == BLOCK_ROW
        return BlockTree.tombstone(BlockId(block_id), int(str(only["checksum"])))
    return BlockTree.live(
        BlockId(block_id),
        (
            chunk(
                int(str(row["chunk_offset"])),
                int(str(row["checksum"])),
                length_bytes=int(str(row["length"])),
                matches=bool(row["matches"]),
            )
            for row in rows
            if row["chunk_offset"] != BLOCK_ROW
        ),
    )
