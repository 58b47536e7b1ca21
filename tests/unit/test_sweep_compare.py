"""What the sums of replicas decide without a look at their rows, what rows decide, and
what changed in silence.
"""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktable.schema import CHUNK_SCHEMA, EVENT_SCHEMA, ReplicaAttributes, rows_of
from merkle.columns import TreeColumns
from merkle.comparison import DifferenceKind
from merkle.outcome import Verdict
from merkle.replica import ReplicaState
from merkle.tree import BlockTree, ContainerId, ContainerTree
from sweep.compare import InspectionResult, compare_replicas, inspect, inspect_large
from sweep.coverage import next_command
from sweep.duplicates import counting_replicas, duplicate_findings
from sweep.exact import block_ranges, exact_replicas
from sweep.model import REPLICA_SCHEMA, FindingKind, RootMethod
from sweep.silent import silent_changes, silent_findings
from tests.support.trees import (
    CHUNK_BYTES,
    CONTAINER,
    block,
    chunk,
    chunks,
    container,
    corrupt,
    deleted,
    unverifiable,
)

ROOT = 0x1234


def replica(datanode: str = "dn-a", container_id: int = 7, **fields: object) -> dict[str, object]:
    """A closed replica of two blocks with three healthy chunks, unless told
    otherwise.
    """
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
        "path": RootMethod.FILE_WISE.value,
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
        ({"path": RootMethod.FRAGMENTS.value}, "MATCH"),
        ({"path": RootMethod.EXACT.value}, "MATCH"),
        ({"path": RootMethod.SQL.value}, None),
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
        ({"chunks": 0, "deleted_blocks": 1, "unverifiable": 1}, None),
        ({"corrupt": 1}, None),
        ({"replica_index": 1}, "EXCLUDED"),
        ({"state": "OPEN"}, "EXCLUDED"),
        # Nobody could read its descriptor.
        ({"state": "INVALID"}, "UNKNOWN"),
    ],
)
def test_equal_replicas_match_where_there_is_something_to_verify(
    both: dict[str, object], expected: str | None
) -> None:
    assert decided(replica("dn-a", **both), replica("dn-b", **both)) == expected


@pytest.mark.parametrize(
    ("both", "detail", "command"),
    [
        (
            EMPTY,
            "the trees are empty: no checksums are recorded, or a scan failed",
            "treefold container info 5",
        ),
        (
            {"chunks": 0, "unverifiable": 2},
            "no block has recorded checksums",
            "treefold container info 5",
        ),
        (UNTOLD, "2 of 2 replicas have no root", "treefold scan 5"),
    ],
)
def test_nothing_to_verify_is_unknown_with_the_reason_and_what_to_run(
    both: dict[str, object], detail: str, command: str
) -> None:
    """A scan of a container without checksums would leave an empty tree again."""
    compared = compare_replicas(table(replica("dn-a", 5, **both), replica("dn-b", 5, **both)))
    [verdict] = compared.verdicts.to_pylist()
    assert (verdict["verdict"], verdict["detail"]) == ("UNKNOWN", detail)
    assert next_command(5, verdict["verdict"], detail=detail) == command


@pytest.mark.parametrize("root", [None, ROOT])
def test_equal_replicas_are_no_match_beside_one_that_nobody_could_read(root: int | None) -> None:
    compared = compare_replicas(
        table(replica("dn-a"), replica("dn-b"), replica("dn-c", state="INVALID", root=root))
    )
    [verdict] = compared.verdicts.to_pylist()
    assert (verdict["verdict"], verdict["excluded"]) == ("UNKNOWN", 0)
    assert verdict["detail"] == "1 of 3 replicas have no root"


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
    told = [
        (v["container_id"], v["verdict"], v["replicas"], v["excluded"])
        for v in compared.verdicts.to_pylist()
    ]
    assert told == [(-8, "EXCLUDED", 1, 1), (9, "MATCH", 3, 1)]
    assert compared.candidates.tolist() == [5]
    assert not any(compared.verdicts["diverged"].to_pylist())
    excluded = "open, erasure-coded or deleted: excluded by design"
    assert [v["detail"] for v in compared.verdicts.to_pylist()] == [excluded, ""]


def contradictions(found: pa.Table) -> Sequence[tuple[str, int, str]]:
    return [
        (row["kind"], row["container_id"], row["detail"].split(":")[0]) for row in found.to_pylist()
    ]


@pytest.mark.parametrize("again", [{}, {"root": 1}, {"corrupt": 1}, {"state": "OPEN"}])
def test_a_replica_given_twice_contradicts_itself_even_where_its_rows_are_alike(
    again: dict[str, object],
) -> None:
    compared = compare_replicas(
        table(
            replica(),
            replica("dn-b"),
            replica(**again),
            replica("dn-a", 8),
            replica("dn-b", 8, volume="DS-2"),
        )
    )
    assert compared.verdicts["verdict"].to_pylist() == ["UNKNOWN", "MATCH"]
    assert not len(compared.candidates)
    assert contradictions(compared.findings) == [
        (FindingKind.ROWS_CONTRADICT.value, 7, "dn-a/DS-1")
    ]


STATES = ("CLOSED", "QUASI_CLOSED", "UNHEALTHY", "OPEN", "INVALID")


@pytest.mark.parametrize(
    ("one", "other", "counts"),
    [
        ({"state": "CLOSED"}, {"state": "QUASI_CLOSED", "bcs_id": 9}, "DS-1"),
        ({"state": "QUASI_CLOSED"}, {"state": "CLOSED"}, "DS-2"),
        ({"bcs_id": 4}, {"bcs_id": 5}, "DS-2"),
        ({"state": "INVALID", "bcs_id": 5}, {"state": "UNHEALTHY"}, "DS-2"),
        ({}, {}, "DS-1"),
        ({"replica_index": 2}, {"replica_index": 1, "bcs_id": 9}, "DS-1"),
    ],
)
def test_of_two_replicas_of_a_datanode_ozones_rule_decides(
    one: dict[str, object], other: dict[str, object], counts: str
) -> None:
    held = table(replica("dn-b"), replica(volume="DS-2", **other), replica("dn-c"), replica(**one))
    mask = counting_replicas(held).tolist()
    assert mask == [True, counts == "DS-2", True, counts == "DS-1"]
    (finding,) = duplicate_findings(held).to_pylist()
    lost = "DS-1" if counts == "DS-2" else "DS-2"
    assert (finding["kind"], finding["container_id"]) == ("duplicate_replica", 7)
    assert finding["detail"].startswith(f"dn-a/{lost}: ")
    assert f"the replica on {counts} counts" in finding["detail"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(7, 8),
            st.integers(1, 3),
            st.sampled_from(STATES),
            st.integers(1, 3),
        ),
        unique_by=lambda copy: copy[:3],
    ),
    st.randoms(use_true_random=False),
)
def test_of_each_container_and_datanode_one_volume_counts_in_any_order(
    copies: list[tuple[str, int, int, str, int]], random: Random
) -> None:
    def counting(rows: list[dict[str, object]]) -> set[tuple[object, ...]]:
        mask = counting_replicas(table(*rows))
        return {
            (row["datanode"], row["container_id"], row["volume"])
            for row, counts in zip(rows, mask, strict=True)
            if counts
        }

    rows = [
        replica(node, number, volume=f"DS-{volume}", state=state, bcs_id=commit)
        for node, number, volume, state, commit in copies
    ]
    chosen = counting(rows)
    assert len(chosen) == len({(row["datanode"], row["container_id"]) for row in rows})
    assert duplicate_findings(table(*rows)).num_rows == len(rows) - len(chosen)
    random.shuffle(rows)
    assert counting(rows) == chosen


def test_tables_in_pieces_and_without_rows_are_compared_too() -> None:
    pieces = pa.concat_tables(
        [table(replica()), REPLICA_SCHEMA.empty_table(), table(replica("dn-b"))]
    )
    assert compare_replicas(pieces).verdicts["verdict"].to_pylist() == ["MATCH"]
    assert compare_replicas(REPLICA_SCHEMA.empty_table()).verdicts.num_rows == 0


WHOLE = container(block(20, *chunks(3)), block(21, *chunks(2)))
DAMAGED = container(
    block(20, chunk(0), corrupt(chunk(CHUNK_BYTES)), chunk(2 * CHUNK_BYTES)), block(21, *chunks(2))
)


def held(
    datanode: str, tree: ContainerTree | None, volume: str = "DS-1", **said: object
) -> pa.Table:
    """The rows of a closed replica of container 12, unless told otherwise."""
    known = {
        "state": ReplicaState.CLOSED,
        "bcs_id": 1,
        "replica_index": 0,
        "source": "data" if tree else "none",
    }
    told = ReplicaAttributes(
        datanode, volume, tree.container_id if tree else CONTAINER, **(known | said)
    )
    return pa.Table.from_batches(rows_of(told, TreeColumns.of(tree) if tree else None).batches())


def inspected(*replicas: pa.Table) -> InspectionResult:
    rows = pa.concat_tables(replicas)
    return inspect(rows, exact_replicas(rows)[0])


def told(found: pa.Table) -> list[tuple[object, ...]]:
    return [
        tuple(row[name] for name in ("kind", "block_id", "chunk_offset", "lacking", "sources"))
        for row in found.to_pylist()
    ]


def test_a_corrupt_chunk_is_found_with_those_that_lack_it_and_those_that_have_it() -> None:
    result = inspected(
        held("dn-a", WHOLE),
        held("dn-b", DAMAGED),
        held("dn-c", WHOLE),
        held("dn-d", DAMAGED, state=ReplicaState.OPEN),
    )
    (verdict,) = result.verdicts.to_pylist()
    assert (verdict["container_id"], verdict["verdict"], verdict["diverged"]) == (
        CONTAINER,
        "REPAIRABLE",
        True,
    )
    assert (verdict["replicas"], verdict["excluded"]) == (4, 1)
    assert told(result.findings) == [
        (DifferenceKind.CORRUPT_CHUNK.value, 20, CHUNK_BYTES, ["dn-b"], ["dn-a", "dn-c"])
    ]


def test_evidence_is_told_with_the_container_and_at_its_place() -> None:
    result = inspected(held("dn-a", DAMAGED), held("dn-b", DAMAGED), held("dn-c", None))
    assert result.verdicts["verdict"].to_pylist() == [Verdict.UNKNOWN.value]
    assert result.verdicts["detail"].to_pylist() == [
        "all copies are corrupt in the same way (1x); 1 of 3 trees were never built, or have no"
        " root"
    ]
    assert result.findings["detail"].to_pylist() == ["all copies are corrupt in the same way"]


def test_two_replicas_of_one_datanode_are_told_apart_by_their_volumes() -> None:
    result = inspected(
        held("dn-a", WHOLE), held("dn-a", DAMAGED, "DS-2", bcs_id=2), held("dn-b", WHOLE)
    )
    # That with the higher commit counts, and no other takes part.
    assert [row[3:] for row in told(result.findings)] == [(["dn-a/DS-2"], ["dn-b"])]
    (verdict,) = result.verdicts.to_pylist()
    assert (verdict["replicas"], verdict["excluded"]) == (3, 1)


def test_two_replicas_that_bear_one_name_are_both_compared() -> None:
    result = inspected(
        held("dn/a", WHOLE, "b"),
        held("dn/a", WHOLE, "c"),
        held("dn", DAMAGED, "a/b", bcs_id=2),
        held("dn", WHOLE),
    )
    assert [row[3:] for row in told(result.findings)] == [(["dn/a/b"], ["dn/a/b"])]


def test_what_cannot_be_verified_does_not_stand_for_all_that_is_passed_over() -> None:
    tree = container(block(19, unverifiable(0)), block(20, *chunks(2)))
    result = inspected(held("dn-a", tree), held("dn-b", tree))
    assert result.verdicts["verdict"].to_pylist() == [Verdict.MATCH.value]
    assert result.verdicts["detail"].to_pylist() == [
        "without recorded checksums, wholly or in part: block 19"
    ]


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        (block(20, replace(chunk(0), length_bytes=1)), DifferenceKind.CONFLICTING_CHUNK),
        (block(20, replace(chunk(0), checksum_matches=False)), DifferenceKind.CORRUPT_CHUNK),
        (block(20, replace(chunk(0), offset=CHUNK_BYTES)), DifferenceKind.MISSING_CHUNK),
        (deleted(20, block(20, chunk(0)).data_checksum), DifferenceKind.DELETED_BLOCK),
    ],
    ids=["length", "flag", "offset", "deleted"],
)
def test_blocks_of_equal_checksums_are_told_apart_by_every_field(
    theirs: BlockTree, kind: DifferenceKind
) -> None:
    """Behind one that is equal, which is kept in any case."""
    same = block(19, chunk(0))
    result = inspected(
        held("dn-a", container(same, block(20, chunk(0)))), held("dn-b", container(same, theirs))
    )
    assert kind.value in result.findings["kind"].to_pylist()


def test_a_tombstone_that_claims_what_an_empty_block_folds_to_is_not_equal_to_it() -> None:
    empty, same = block(20), block(19, chunk(0))
    gone = deleted(20, empty.data_checksum)
    result = inspected(held("dn-a", container(same, gone)), held("dn-b", container(same, empty)))
    assert told(result.findings) == [
        (DifferenceKind.DELETED_BLOCK.value, 20, None, ["dn-b"], ["dn-a"])
    ]


def test_a_replica_that_lost_everything_lacks_each_block() -> None:
    result = inspected(held("dn-a", WHOLE), held("dn-b", container()))
    assert told(result.findings) == [
        (DifferenceKind.MISSING_BLOCK.value, block_id, None, ["dn-b"], ["dn-a"])
        for block_id in (20, 21)
    ]


@pytest.mark.parametrize(
    "now", [[], [held("dn-b", WHOLE)], [held("dn-b", None)]], ids=["none", "others", "no tree"]
)
def test_rows_that_are_not_those_that_were_folded_decide_nothing(now: list[pa.Table]) -> None:
    replicas, _ = exact_replicas(pa.concat_tables([held("dn-a", WHOLE), held("dn-b", DAMAGED)]))
    result = inspect(
        pa.concat_tables([CHUNK_SCHEMA.empty_table(), held("dn-a", WHOLE), *now]), replicas
    )
    assert result.verdicts["verdict"].to_pylist() == [Verdict.UNKNOWN.value]
    assert result.verdicts["diverged"].to_pylist() == [False]
    assert contradictions(result.findings) == [
        (FindingKind.ROWS_CONTRADICT.value, CONTAINER, "dn-b")
    ]


@pytest.mark.parametrize("has_tree", [True, False], ids=["three trees", "two trees"])
@pytest.mark.parametrize(
    ("damage", "with_all", "without"),
    [
        ("lost", Verdict.UNRECOVERABLE, Verdict.UNKNOWN),
        ("one", Verdict.REPAIRABLE, Verdict.REPAIRABLE),
    ],
)
def test_what_one_range_of_blocks_calls_lost_a_replica_without_a_tree_may_hold(
    damage: str, with_all: Verdict, without: Verdict, *, has_tree: bool
) -> None:
    """Blocks 20 and 23 are equal wherever a tree has them, 21 is damaged, 22 is missing
    on dn-b: each is a range of its own.
    """
    bad = block(21, corrupt(chunk(0)))
    good, ends = block(21, chunk(0)), (block(20, *chunks(2)), block(23, *chunks(2)))
    tables = [
        held("dn-a", container(*ends, bad, block(22, *chunks(2)))),
        held("dn-b", container(*ends, bad if damage == "lost" else good)),
        held(
            "dn-c",
            container(*ends, bad if damage == "lost" else good, block(22, *chunks(2)))
            if has_tree
            else None,
        ),
    ]
    rows = pa.concat_tables(tables)
    replicas, _ = exact_replicas(rows)
    ranges = list(block_ranges(rows, 3))
    assert len(ranges) >= 4
    whole, in_ranges = inspect(rows, replicas), inspect_large(ranges, replicas)
    for result in (whole, in_ranges):
        [verdict] = result.verdicts["verdict"].to_pylist()
        assert verdict == (with_all if has_tree else without).value
    assert told(in_ranges.findings) == told(whole.findings)


def test_candidates_without_any_rows_are_not_forgotten() -> None:
    replicas, _ = exact_replicas(pa.concat_tables([held("dn-a", WHOLE), held("dn-b", DAMAGED)]))
    result = inspect(CHUNK_SCHEMA.empty_table(), replicas)
    assert result.verdicts["verdict"].to_pylist() == [Verdict.UNKNOWN.value]
    assert result.findings.num_rows == 2


def event(
    kind: str,
    block_id: int | None = None,
    offset: int | None = None,
    length: int = 0,
    **other: object,
) -> dict[str, object]:
    place = {
        "container_id": CONTAINER,
        "block_id": block_id,
        "chunk_offset": offset,
        "length": length,
    }
    return {
        "datanode": "dn-a",
        "time": datetime(2024, 1, 1, tzinfo=UTC),
        "kind": kind,
        **place,
        "job": "",
        **other,
    }


def silent(before: pa.Table, now: pa.Table, *events: dict[str, object]) -> list[tuple[object, ...]]:
    """Block, offset and datanode of each silent change, by the candidates' rows
    alone.
    """
    candidates = silent_changes(exact_replicas(before)[0], exact_replicas(now)[0])[
        "container_id"
    ].to_pylist()
    assert candidates in ([], [CONTAINER])
    found = silent_findings(
        before, now, pa.Table.from_pylist(list(events), EVENT_SCHEMA)
    ).to_pylist()
    # Rows of containers that are no candidates bear no findings.
    assert candidates or not found
    assert {row["kind"] for row in found} <= {FindingKind.SILENT_CHANGE.value}
    return [(row["block_id"], row["chunk_offset"], row["lacking"]) for row in found]


CHANGED = container(
    block(20, chunk(0), chunk(CHUNK_BYTES, 77), chunk(2 * CHUNK_BYTES)), block(21, *chunks(2))
)
CHANGE = (20, CHUNK_BYTES, ["dn-a"])


def test_a_checksum_changed_in_silence_is_found_whether_it_matches_its_record_or_not() -> None:
    assert silent(held("dn-a", WHOLE), held("dn-a", CHANGED)) == [CHANGE]
    assert silent(held("dn-a", WHOLE), held("dn-a", DAMAGED)) == [CHANGE]
    details = [
        silent_findings(held("dn-a", WHOLE), held("dn-a", tree), EVENT_SCHEMA.empty_table())[
            "detail"
        ][0].as_py()
        for tree in (CHANGED, DAMAGED)
    ]
    assert "is 4d, which matches" in details[0]
    assert "which does not match" in details[1]


@pytest.mark.parametrize(
    "now",
    [
        held("dn-a", WHOLE),
        held("dn-a", CHANGED, bcs_id=2),
        held("dn-a", CHANGED, source="metadata"),
        held("dn-a", CHANGED, "DS-2"),
        held("dn-b", CHANGED),
        held("dn-a", None),
        held("dn-a", replace(CHANGED, container_id=ContainerId(13))),
        held("dn-a", container(deleted(20, 5), block(21, *chunks(2)))),
        held("dn-a", container(block(21, *chunks(3)))),
    ],
    ids=[
        "same",
        "written",
        "source",
        "volume",
        "datanode",
        "no tree",
        "container",
        "deleted",
        "gone and new",
    ],
)
def test_what_may_change_is_no_silent_change(now: pa.Table) -> None:
    assert silent(held("dn-a", WHOLE), now) == []


@pytest.mark.parametrize(
    ("done", "is_explained"),
    [
        (event("repair"), True),
        (event("repair", 20), True),
        (event("delete", 20), True),
        (event("repair", 21), False),
        (event("repair", 20, CHUNK_BYTES, CHUNK_BYTES), True),
        (event("repair", 20, 0, CHUNK_BYTES), False),
        (event("repair", 20, 0, CHUNK_BYTES + 1), True),
        (event("repair", 20, 2 * CHUNK_BYTES - 1, 1), True),
        (event("repair", 20, 2 * CHUNK_BYTES, CHUNK_BYTES), False),
        (event("repair", 20, datanode="dn-b"), False),
        (event("repair", 20, container_id=13), False),
    ],
)
def test_a_change_is_explained_by_what_the_agent_wrote_there(
    done: dict[str, object], is_explained: bool
) -> None:
    found = silent(held("dn-a", WHOLE), held("dn-a", CHANGED), event("repair", 20, 0, 1), done)
    assert found == ([] if is_explained else [CHANGE])


def test_where_no_agent_tells_its_repairs_a_chunk_that_matches_again_was_repaired() -> None:
    def changes(before: ContainerTree, now: ContainerTree, **without_events: frozenset[str]) -> int:
        tables = held("dn-a", before), held("dn-a", now), EVENT_SCHEMA.empty_table()
        found: int = silent_findings(*tables, **without_events).num_rows
        return found

    for others in (frozenset[str](), frozenset(["dn-b"])):
        assert changes(DAMAGED, WHOLE, without_events=others) == 1
    nobody = frozenset(["dn-a"])
    assert changes(DAMAGED, WHOLE, without_events=nobody) == 0
    assert (
        changes(WHOLE, DAMAGED, without_events=nobody)
        == changes(WHOLE, CHANGED, without_events=nobody)
        == 1
    )


def test_a_short_repair_behind_a_long_one_does_not_hide_it() -> None:
    done = [event("repair", 20, 0, 3 * CHUNK_BYTES), event("repair", 20, 1, 1)]
    assert silent(held("dn-a", WHOLE), held("dn-a", CHANGED), *done) == []


def test_replicas_summed_by_sql_in_only_one_sweep_are_compared_by_their_roots() -> None:
    by_sql = table(
        replica(path=RootMethod.SQL.value, fingerprint=5),
        replica("dn-b", 8, path=RootMethod.SQL.value, root=1),
    )
    by_file = table(replica(), replica("dn-b", 8))
    assert silent_changes(by_sql, by_file)["container_id"].to_pylist() == [8]
    assert silent_changes(by_file, by_sql)["container_id"].to_pylist() == [8]
    assert silent_changes(by_file, table(replica(fingerprint=5)))["container_id"].to_pylist() == [7]


def test_two_replicas_of_one_datanode_that_changed_are_told_apart() -> None:
    before = pa.concat_tables([held("dn-a", WHOLE), held("dn-a", WHOLE, "DS-2")])
    now = pa.concat_tables([held("dn-a", WHOLE), held("dn-a", CHANGED, "DS-2")])
    assert silent(before, now) == [(20, CHUNK_BYTES, ["dn-a/DS-2"])]


def test_a_container_whose_blocks_all_differ_is_compared_range_by_range() -> None:
    """The verdict, its detail and the findings are those of one comparison of all
    blocks, and Python's objects are held for few blocks at a time.
    """
    peaks = list[int]()
    for count in (8_000, 32_000):
        ids = range(1, count + 1)
        trees = [container(*(block(i, chunk(0, i + other)) for i in ids)) for other in (7, 8)]
        some = container(*(block(i, chunk(0, i + 7)) for i in (1, count)))
        rows = pa.concat_tables(
            held(name, tree)
            for name, tree in zip(("dn-a", "dn-b", "dn-c"), (*trees, some), strict=True)
        )
        replicas, _ = exact_replicas(rows)
        del trees, some
        tracemalloc.start()
        result = inspect(rows, replicas)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.verdicts["verdict"].to_pylist() == [Verdict.CONFLICT.value]
        assert result.verdicts["detail"].to_pylist() == [
            f"copies that match their own records have different checksums ({count}x)"
        ]
        places = zip(
            result.findings["block_id"].to_pylist(),
            result.findings["kind"].to_pylist(),
            strict=True,
        )
        kinds = ("missing_block", "conflicting_chunk")
        assert list(places) == [(i, kind) for i in ids for kind in kinds[i in (1, count) :]]
    assert peaks[1] < 2 * peaks[0]
