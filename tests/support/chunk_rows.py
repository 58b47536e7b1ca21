"""The chunk table read the slow way, row by row into trees: what every fast path is
held against.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.comparison import Comparison, Difference
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree, TreeBuilder, block_checksum
from tests.support.reference import judged, of_tree

Row = Mapping[str, Any]
ReplicaKey = tuple[str, str]


def rows_in(folder: Path) -> list[Row]:
    """All rows of a synthetic cluster's tables."""
    paths = sorted([*folder.rglob("chunks-*.parquet"), *folder.rglob("part-*.parquet")])
    tables = [pq.ParquetFile(path).read() for path in paths]
    rows: list[Row] = pa.concat_tables(tables).cast(CHUNK_SCHEMA).to_pylist()
    return rows


def trees_in(rows: Iterable[Row]) -> dict[int, dict[ReplicaKey, tuple[Row, ContainerTree]]]:
    """By container, then by (datanode, volume): a row of the replica, and its tree."""
    by_replica: dict[int, dict[ReplicaKey, list[Row]]] = {}
    for row in rows:
        by_replica.setdefault(row["container_id"], {}).setdefault(
            (row["datanode"], row["volume"]), []
        ).append(row)
    return {
        container_id: {
            key: (found[0], _tree(container_id, found)) for key, found in sorted(replicas.items())
        }
        for container_id, replicas in sorted(by_replica.items())
    }


def compared(replicas: Mapping[ReplicaKey, tuple[Row, ContainerTree]]) -> Comparison | None:
    """What must be said of those that take part, by code of the tests alone; None where
    there is none.
    """
    names = [datanode for datanode, _ in replicas]
    counting = {
        _counting({key: row for key, (row, _) in replicas.items() if key[0] == name})
        for name in names
    }
    trees = {
        f"{datanode}/{volume}" if names.count(datanode) > 1 else datanode: (
            # Nobody could read what it holds.
            ContainerTree(tree.container_id, None) if row["state"] == "INVALID" else tree
        )
        for (datanode, volume), (row, tree) in replicas.items()
        if row["replica_index"] == 0
        if row["state"] == "INVALID" or ReplicaState(row["state"]).is_closed
        if (datanode, volume) in counting
    }
    if not trees:
        return None
    verdict, findings = judged({name: of_tree(tree) for name, tree in trees.items()})
    differences = tuple(Difference(*finding) for finding in findings)
    return Comparison(next(iter(trees.values())).container_id, verdict, differences)


def verdict_text(replicas: Mapping[ReplicaKey, tuple[Row, ContainerTree]]) -> str:
    """The verdict in the table: EXCLUDED where none takes part by design."""
    if comparison := compared(replicas):
        return comparison.verdict.value
    is_by_design = all(row["state"] != "INVALID" for row, _ in replicas.values())
    return "EXCLUDED" if is_by_design else "UNKNOWN"


def _counting(copies: Mapping[ReplicaKey, Row]) -> ReplicaKey:
    """Which of a datanode's replicas of one container Ozone uses."""
    if any(row["replica_index"] for row in copies.values()):
        return min(copies)
    readable = {key: row for key, row in copies.items() if row["state"] != "INVALID"} or copies
    closed = {key: row for key, row in readable.items() if row["state"] == "CLOSED"} or readable
    highest = max(row["bcs_id"] for row in closed.values())
    return min(key for key, row in closed.items() if row["bcs_id"] == highest)


def _tree(container_id: int, rows: Iterable[Row]) -> ContainerTree:
    if any(row["source"] == "none" for row in rows):
        return ContainerTree(ContainerId(container_id), None)
    builder, blocks = TreeBuilder(ContainerId(container_id)), dict[int, list[Row]]()
    for row in rows:
        if row["chunk_offset"] != CONTAINER_ROW:
            blocks.setdefault(row["block_id"], []).append(row)
    for number, held in blocks.items():
        block_id = BlockId(number)
        chunks = sorted(
            (row for row in held if row["chunk_offset"] != BLOCK_ROW),
            key=lambda row: row["chunk_offset"],
        )
        checksums = [row["checksum"] for row in chunks]
        if any(row["deleted"] for row in held):
            own = [row["checksum"] for row in held if row["chunk_offset"] == BLOCK_ROW]
            builder.set_deleted(block_id, own[0] if own else block_checksum(number, checksums))
        else:
            builder.add_block(block_id)
            for row in chunks:
                chunk = ChunkTree(
                    row["chunk_offset"], row["length"], row["checksum"], row["matches"]
                )
                builder.add_chunk(block_id, chunk)
    return builder.build()
