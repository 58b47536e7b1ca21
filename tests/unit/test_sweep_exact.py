"""Rows that contradict each other are named and leave their replica without a tree; all
others stay.
"""

from typing import Any

import pyarrow as pa
import pytest

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.tree import block_checksum, container_checksum
from sweep.compare import compare_replicas, inspect, inspect_large
from sweep.exact import block_ranges, exact_replicas, large_replicas, trees_of


def row(block_id: int, offset: int, checksum: int = 5, **fields: Any) -> dict[str, Any]:
    return {
        "datanode": "dn-a",
        "volume": "DS-1",
        "container_id": 7,
        "state": "CLOSED",
        "bcs_id": 3,
        "replica_index": 0,
        "block_id": block_id,
        "chunk_offset": offset,
        "length": 4096,
        "checksum": checksum,
        "matches": True,
        "deleted": False,
        "source": "tree",
        "generation": 9,
    } | fields


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), CHUNK_SCHEMA)


OTHER = row(1, 0, datanode="dn-b")


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [
        (
            (row(1, 0), row(1, 0, 6)),
            "rows_contradict",
            "two rows of the same block and offset differ (rows: 1)",
        ),
        (
            (row(1, 0), row(1, 0, length=5), row(1, 0, matches=False)),
            "rows_contradict",
            "(rows: 2)",
        ),
        (
            (row(1, BLOCK_ROW), row(1, 0)),
            "rows_contradict",
            "a block without chunks has chunks (rows: 1)",
        ),
        (
            (row(0, CONTAINER_ROW), row(1, 0)),
            "rows_contradict",
            "a replica without blocks has blocks",
        ),
        ((row(1, 0, source="none"),), "rows_contradict", "a replica without a tree has blocks"),
        (
            (row(1, 0), row(2, 0, state="OPEN")),
            "rows_contradict",
            "rows of one replica differ in state",
        ),
        (
            (row(1, 0), row(2, 0, bcs_id=4)),
            "rows_contradict",
            "rows of one replica differ in bcs_id",
        ),
        (
            (row(1, 0), row(2, 0, replica_index=1)),
            "rows_contradict",
            "rows of one replica differ in replica_index",
        ),
        (
            (row(1, 0), row(2, 0, source="data")),
            "rows_contradict",
            "rows of one replica differ in source",
        ),
        (
            (row(1, 0), row(2, 0, generation=8)),
            "rows_contradict",
            "rows of one replica differ in generation",
        ),
        ((row(1, -3),), "unreadable", "a chunk's offset is negative"),
        ((row(1, 0, length=None),), "unreadable", "a row lacks a value"),
        ((row(1, 0, state=None),), "unreadable", "a row lacks a value"),
    ],
)
def test_what_contradicts_itself_has_no_tree_and_a_finding(
    rows: tuple[dict[str, Any], ...], kind: str, said: str
) -> None:
    replicas, findings = exact_replicas(table(*rows, OTHER))
    (finding,) = findings.to_pylist()
    assert (finding["kind"], finding["container_id"]) == (kind, 7)
    assert finding["detail"].startswith("dn-a/DS-1: ")
    assert said in finding["detail"]
    spoiled, other = replicas.to_pylist()
    assert (spoiled["root"], spoiled["source"], spoiled["blocks"], spoiled["chunks"]) == (
        None,
        "none",
        0,
        0,
    )
    assert other["root"] == container_checksum([block_checksum(1, [5])])
    trees = {
        identity.datanode: columns.to_tree() for identity, columns in trees_of(table(*rows, OTHER))
    }
    assert trees["dn-a"].data_checksum is None
    assert not trees["dn-a"].blocks
    assert trees["dn-b"].data_checksum == other["root"]


def test_a_replica_whose_volume_is_lacking_has_a_finding() -> None:
    replicas, findings = exact_replicas(table(row(1, 0, volume=None), OTHER))
    assert [finding["detail"] for finding in findings.to_pylist()] == [
        "dn-a: a row lacks a value (rows: 1)"
    ]
    assert [replica["root"] is None for replica in replicas.to_pylist()] == [True, False]


def test_rows_that_say_the_same_are_one_row_and_the_last_reading_counts() -> None:
    early, late = 1_000, 2_000
    replicas, findings = exact_replicas(
        table(row(1, 0, scanned_at=late), row(1, 0, scanned_at=early), row(1, 0))
    )
    assert not findings.num_rows
    (replica,) = replicas.to_pylist()
    assert (replica["chunks"], replica["bytes"], replica["path"]) == (1, 4096, "exact")
    assert replica["scanned_at"].timestamp() == late / 1000


def test_a_block_is_deleted_if_any_of_its_rows_is_and_counts_no_chunks() -> None:
    rows = table(row(1, 0), row(1, 8, 6, deleted=True), row(2, BLOCK_ROW, -4, deleted=True))
    (replica,) = exact_replicas(rows)[0].to_pylist()
    assert replica["root"] == container_checksum([block_checksum(1, [5, 6]), -4])
    assert (replica["blocks"], replica["deleted_blocks"], replica["chunks"], replica["bytes"]) == (
        2,
        2,
        0,
        0,
    )
    ((_, columns),) = trees_of(rows)
    assert [block.deleted for block in columns.to_tree().blocks] == [True, True]


def test_no_rows_are_no_replicas() -> None:
    replicas, findings = exact_replicas(table())
    assert (replicas.num_rows, findings.num_rows) == (0, 0)
    assert list(trees_of(table())) == []


@pytest.mark.parametrize(
    "name", ["volume", "state", "block_id", "chunk_offset", "length", "checksum", "matches"]
)
def test_a_value_that_a_large_container_lacks_is_a_finding(name: str) -> None:
    """The same as where its rows fit into memory."""
    told = {
        "replica_index": 0,
        "matches": True,
        "deleted": False,
        "source": "tree",
        "generation": 0,
        "bcs_id": 1,
    }
    held = [
        {
            "datanode": node,
            "volume": "v",
            "container_id": 1,
            "state": "CLOSED",
            "block_id": block,
            "length": 4,
            **told,
        }
        | {"chunk_offset": 4 * i, "checksum": 1 + block + i}
        for node in "abc"
        for block in range(1, 9)
        for i in range(4)
    ]
    held[50][name] = None
    rows = pa.Table.from_pylist(
        held, pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
    )
    replicas, findings = exact_replicas(rows)
    in_ranges, found = large_replicas(block_ranges(rows, 20))
    columns = ["datanode", "volume", "root", "blocks", "source"]
    assert in_ranges.select(columns).sort_by("datanode") == replicas.select(columns).sort_by(
        "datanode"
    )
    assert "unreadable" in found["kind"].to_pylist()
    assert set(found["kind"].to_pylist()) == set(findings["kind"].to_pylist())
    compared = compare_replicas(replicas)
    whole = inspect(rows, replicas) if len(compared.candidates) else compared
    by_ranges = inspect_large(block_ranges(rows, 20), in_ranges)
    assert by_ranges.verdicts["verdict"] == whole.verdicts["verdict"]
