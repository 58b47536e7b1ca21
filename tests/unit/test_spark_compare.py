"""What the sums of replicas decide without a look at their rows, and what is left for inspection."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from spark.compare import compare_replicas
from spark.model import REPLICA_SCHEMA, FindingKind, Path

ROOT = 0x1234


def replica(datanode: str = "dn-a", container_id: int = 7, **fields: object) -> dict[str, object]:
    """A closed replica of two blocks with three healthy chunks, unless told otherwise."""
    return {
        "datanode": datanode,
        "volume": "DS-1",
        "container_id": container_id,
        "state": "CLOSED",
        "bcs_id": 1,
        "replica_index": 0,
        "source": "tree",
        "generation": 1,
        "scanned_at": None,
        "root": ROOT,
        "fingerprint": 99,
        "blocks": 2,
        "deleted_blocks": 0,
        "chunks": 3,
        "bytes": 300,
        "corrupt": 0,
        "unverifiable": 0,
        "path": Path.FILE_WISE.value,
    } | fields


def table(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), REPLICA_SCHEMA)


EMPTY = {"root": 0, "fingerprint": 0, "blocks": 0, "chunks": 0, "bytes": 0}
UNTOLD = {**EMPTY, "root": None, "source": "none"}


def decided(*rows: dict[str, object]) -> str | None:
    """The verdict on the only container, None where its rows have to be looked at."""
    compared = compare_replicas(table(*rows))
    assert compared.verdicts.num_rows + len(compared.candidates) == 1
    return compared.verdicts["verdict"][0].as_py() if compared.verdicts.num_rows else None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, "MATCH"),
        ({"state": "UNHEALTHY"}, "MATCH"),
        ({"state": "QUASI_CLOSED", "bcs_id": 2, "source": "metadata"}, "MATCH"),
        ({"path": Path.FRAGMENTS.value}, "MATCH"),
        ({"path": Path.EXACT.value}, "MATCH"),
        ({"path": Path.SQL.value}, None),
        ({"root": ROOT + 1}, None),
        ({"fingerprint": 98}, None),
        ({"corrupt": 1}, None),
        ({"unverifiable": 1}, None),
        (EMPTY, None),
        (UNTOLD, "UNKNOWN"),
        ({"state": "OPEN", "root": ROOT + 1}, "UNKNOWN"),
        ({"state": "DELETED", "root": ROOT + 1}, "UNKNOWN"),
        ({"replica_index": 2, "root": ROOT + 1}, "UNKNOWN"),
    ],
)
def test_a_replica_is_held_against_another(theirs: dict[str, object], expected: str | None) -> None:
    assert decided(replica(), replica("dn-b", **theirs)) == expected
    assert decided(replica("dn-b", **theirs), replica()) == expected


@pytest.mark.parametrize(
    ("both", "expected"),
    [
        (EMPTY, "UNKNOWN"),
        (UNTOLD, "UNKNOWN"),
        ({"chunks": 0, "unverifiable": 2}, "UNKNOWN"),
        ({"chunks": 0, "deleted_blocks": 2}, "MATCH"),
        ({"chunks": 0, "deleted_blocks": 1, "unverifiable": 1}, "MATCH"),
        ({"corrupt": 1}, None),
        ({"replica_index": 1}, "UNKNOWN"),
    ],
)
def test_equal_replicas_match_where_there_is_something_to_verify(both: dict[str, object], expected: str | None) -> None:
    assert decided(replica("dn-a", **both), replica("dn-b", **both)) == expected


def test_a_sole_replica_is_unknown_but_its_corrupt_chunks_are_looked_at() -> None:
    assert decided(replica()) == "UNKNOWN"
    assert decided(replica(corrupt=1)) is None


def test_verdicts_ascend_by_container_and_count_who_took_part() -> None:
    compared = compare_replicas(
        table(
            replica("dn-a", 9),
            replica("dn-c", 9, state="OPEN"),
            replica("dn-b", 9),
            replica("dn-a", -8, replica_index=1),
            replica("dn-b", 5),
            replica("dn-a", 5, root=1),
        )
    )
    told = [(v["container_id"], v["verdict"], v["replicas"], v["excluded"]) for v in compared.verdicts.to_pylist()]
    assert told == [(-8, "UNKNOWN", 1, 1), (9, "MATCH", 3, 1)]
    assert compared.candidates.tolist() == [5]
    assert not any(compared.verdicts["diverged"].to_pylist())
    assert [v["detail"] for v in compared.verdicts.to_pylist()] == ["no replica takes part", ""]


def contradictions(found: pa.Table) -> Sequence[tuple[str, int, str]]:
    return [(row["kind"], row["container_id"], row["detail"].split(":")[0]) for row in found.to_pylist()]


@pytest.mark.parametrize("again", [{}, {"root": 1}, {"corrupt": 1}, {"state": "OPEN"}])
def test_a_replica_given_twice_contradicts_itself_even_where_its_rows_are_alike(again: dict[str, object]) -> None:
    compared = compare_replicas(
        table(replica(), replica("dn-b"), replica(**again), replica("dn-a", 8), replica("dn-a", 8, volume="DS-2"))
    )
    assert compared.verdicts["verdict"].to_pylist() == ["UNKNOWN", "MATCH"]
    assert not len(compared.candidates)
    assert contradictions(compared.findings) == [(FindingKind.ROWS_CONTRADICT.value, 7, "dn-a/DS-1")]


def test_tables_in_pieces_and_without_rows_are_compared_too() -> None:
    pieces = pa.concat_tables([table(replica()), REPLICA_SCHEMA.empty_table(), table(replica("dn-b"))])
    assert compare_replicas(pieces).verdicts["verdict"].to_pylist() == ["MATCH"]
    assert compare_replicas(REPLICA_SCHEMA.empty_table()).verdicts.num_rows == 0
