"""A sweep's verdicts and findings are those of merkle.comparison on the same trees,
whatever the replicas hold.
"""

from collections.abc import Mapping, Sequence
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.outcome import DIVERGED_VERDICTS
from merkle.tree import block_checksum
from sweep.compare import compare_replicas, inspect
from sweep.exact import exact_replicas
from sweep.runs import fold_batches, settle
from tests.support.chunk_rows import Row, compared, trees_in, verdict_of

# A busy machine breaks no law, and the first example may load kernels.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LENGTH = 100
PLACES = [("dn-a", "DS-1"), ("dn-b", "DS-1"), ("dn-c", "DS-1"), ("dn-c", "DS-2"), ("dn-d", "DS-1")]
Chunks = Mapping[int, tuple[int, int, bool]]

# Few places and values, so that replicas often agree and often do not; 0 is what a
# chunk without checksums folds to.
offsets = st.sampled_from([0, LENGTH, 2 * LENGTH])
chunks = st.tuples(st.just(LENGTH), st.sampled_from([5, 6, 7]), st.just(True))
unrecorded = st.just((LENGTH, 0, True))
hostile_offsets = offsets | st.sampled_from([50, 250, (1 << 63) - 1])
hostile_chunks = st.tuples(
    st.sampled_from([LENGTH] * 5 + [0, 60, 160, -1, (1 << 63) - 1]),
    st.sampled_from([5, 6, 0, 1 << 32, -1, -(1 << 63)]),
    st.booleans(),
)
block_ids = st.sampled_from([1, 2, 3, -(1 << 63), (1 << 63) - 1])


@st.composite
def mutated(draw: st.DrawFn, block_id: int, block: Chunks) -> Chunks | int | None:
    """What a replica has instead of a block: other chunks, the checksum of a tombstone,
    or nothing.
    """
    fate = draw(
        st.sampled_from(
            ["gone", "deleted", "emptied", "lost", "corrupt", "corrupt", "unlike", "hostile"]
        )
    )
    if fate == "gone":
        return None
    if fate == "deleted":
        # A tombstone may claim what the block folds to, or what it would without
        # chunks.
        folded = [
            block_checksum(block_id, []),
            block_checksum(block_id, [block[at][1] for at in sorted(block)]),
        ]
        return draw(st.sampled_from([*folded, 0, -1, (1 << 63) - 1]))
    if fate == "emptied" or not block:
        return {}
    at = draw(st.sampled_from(sorted(block)))
    if fate == "lost":
        return {offset: chunk for offset, chunk in block.items() if offset != at}
    if fate == "corrupt":
        length, checksum, _ = block[at]
        damaged = draw(
            st.sampled_from([(length, checksum ^ 8), (length, checksum), (length // 2, 9)])
        )
        return {**block, at: (*damaged, False)}
    if fate == "unlike":
        length, checksum, _ = block[at]
        return {
            **block,
            at: draw(st.sampled_from([(length, checksum + 1, True), (length - 1, checksum, True)])),
        }
    return {**block, draw(hostile_offsets): draw(hostile_chunks)}


@st.composite
def replica_rows(
    draw: st.DrawFn, container_id: int, place: tuple[str, str], base: Mapping[int, Chunks]
) -> list[Row]:
    """One replica that holds the base, or nearly."""
    source = draw(st.sampled_from(["tree"] * 8 + ["metadata", "none"]))
    columns = {
        "datanode": place[0],
        "volume": place[1],
        "container_id": container_id,
        "state": draw(
            st.sampled_from(["CLOSED"] * 10 + ["QUASI_CLOSED", "UNHEALTHY", "OPEN", "DELETED"])
        ),
        "bcs_id": draw(st.integers(1, 2)),
        "replica_index": draw(st.sampled_from([0] * 15 + [1])),
        "source": source,
        "generation": draw(st.integers(0, 3)),
        "scanned_at": None,
    }

    def row(block_id: int, offset: int, length: int = 0, checksum: int = 0, **flags: bool) -> Row:
        values = {
            "block_id": block_id,
            "chunk_offset": offset,
            "length": length,
            "checksum": checksum,
        }
        return columns | values | {"matches": True, "deleted": False} | flags

    # A scan that failed leaves nothing.
    blocks: dict[int, Chunks | int | None] = (
        dict(base) if draw(st.sampled_from([True] * 9 + [False])) else {}
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        block_id = draw(st.sampled_from(sorted(base)) if base else block_ids)
        blocks[block_id] = draw(mutated(block_id, base.get(block_id, {})))
    rows = list[Row]()
    for block_id, block in sorted(blocks.items()) if source != "none" else ():
        if isinstance(block, int):
            rows.append(row(block_id, BLOCK_ROW, 0, block, deleted=True))
        elif block is not None:
            # A tombstone may come with the chunks that it had.
            deleted = draw(st.sampled_from([False] * 9 + [True]))
            rows += [
                row(block_id, at, *chunk[:2], matches=chunk[2], deleted=deleted)
                for at, chunk in block.items()
            ]
            rows += [] if block else [row(block_id, BLOCK_ROW, 0, 77, deleted=deleted)]
    return rows or [row(0, CONTAINER_ROW)]


@st.composite
def cluster_rows(draw: st.DrawFn) -> list[Row]:
    """The rows of some containers, in the order of the table."""
    kinds = [chunks] * 4 + [chunks | unrecorded, hostile_chunks]
    rows = list[Row]()
    for container_id in draw(st.lists(st.integers(-1, 3), min_size=1, max_size=3, unique=True)):
        held = st.dictionaries(
            offsets, draw(st.sampled_from(kinds)), min_size=draw(st.integers(0, 2)), max_size=3
        )
        base = draw(
            st.dictionaries(
                block_ids, held, min_size=draw(st.sampled_from([0, 1, 2, 2])), max_size=3
            )
        )
        for place in draw(st.permutations(PLACES))[: draw(st.sampled_from([1, 2, 3, 3, 3, 4, 5]))]:
            rows += draw(replica_rows(container_id, place, base))
    names = ("datanode", "volume", "container_id", "block_id", "chunk_offset")
    return sorted(rows, key=lambda row: [row[name] for name in names])


def table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows], CHUNK_SCHEMA)


def swept(
    rows: Sequence[Row], replicas: pa.Table
) -> tuple[dict[int, Row], dict[int, list[tuple[object, ...]]], set[int]]:
    """Verdicts and findings by container as a sweep comes to them, and which containers
    it had to inspect.
    """
    quick = compare_replicas(replicas)
    candidates = set(quick.candidates.tolist())
    chosen = [row for row in rows if row["container_id"] in candidates]
    of_candidates = pc.is_in(replicas["container_id"], pa.array(quick.candidates))
    slow = inspect(table(chosen), replicas.filter(of_candidates))
    assert set(slow.verdicts["container_id"].to_pylist()) == candidates
    assert not quick.findings.num_rows
    verdicts = [*quick.verdicts.to_pylist(), *slow.verdicts.to_pylist()]
    findings: dict[int, list[tuple[object, ...]]] = {
        verdict["container_id"]: [] for verdict in verdicts
    }
    for found in slow.findings.to_pylist():
        place = (
            found["kind"],
            found["block_id"],
            found["chunk_offset"],
            tuple(found["lacking"]),
            tuple(found["sources"]),
        )
        findings[found["container_id"]].append(place)
    assert len(findings) == len(verdicts)
    return {verdict["container_id"]: verdict for verdict in verdicts}, findings, candidates


def assert_as_planned(rows: Sequence[Row], replicas: pa.Table) -> None:
    verdicts, findings, _ = swept(rows, replicas)
    expected = trees_in(rows)
    assert verdicts.keys() == expected.keys()
    for container_id, held in expected.items():
        comparison, verdict = compared(held), verdicts[container_id]
        expected_verdict = verdict_of(held)
        differences = comparison.differences if comparison else ()
        assert verdict["verdict"] == expected_verdict
        assert findings[container_id] == [
            (d.kind.value, d.block_id, d.offset, d.lacking, d.sources) for d in differences
        ]
        bad = [one.value for one in DIVERGED_VERDICTS]
        assert verdict["diverged"] == (expected_verdict in bad)
        assert verdict["replicas"] == len(held)
        assert 0 <= verdict["excluded"] <= len(held)


@unhurried
@given(cluster_rows(), st.randoms(use_true_random=False))
def test_replicas_of_rows_in_any_order_are_judged_as_their_trees_are(
    rows: list[Row], random: Random
) -> None:
    random.shuffle(rows)
    replicas, findings = exact_replicas(table(rows))
    assert not findings.num_rows
    assert_as_planned(rows, replicas)


@unhurried
@given(cluster_rows(), st.integers(1, 9))
def test_replicas_that_were_folded_in_pieces_are_judged_as_their_trees_are(
    rows: list[Row], rows_max: int
) -> None:
    runs = pa.concat_tables([fold_batches([batch]) for batch in table(rows).to_batches(rows_max)])
    settled = settle(runs)
    assert not len(settled.exact)
    assert_as_planned(rows, settled.replicas)


@unhurried
@given(cluster_rows())
def test_along_whichever_paths_the_replicas_of_a_container_came_they_are_judged_alike(
    rows: list[Row],
) -> None:
    """Fingerprints of files, of fragments and of sorted rows are the same, so that
    equal replicas need no look.
    """
    datanodes = sorted({row["datanode"] for row in rows})
    exact, _ = exact_replicas(table([row for row in rows if row["datanode"] in datanodes[::2]]))
    folded = settle(
        fold_batches(
            table([row for row in rows if row["datanode"] in datanodes[1::2]]).to_batches()
        )
    )
    replicas = pa.concat_tables([exact, folded.replicas])
    assert_as_planned(rows, replicas)
    assert swept(rows, replicas) == swept(rows, exact_replicas(table(rows))[0])


@unhurried
@given(
    st.dictionaries(block_ids, st.dictionaries(offsets, chunks, min_size=1), max_size=3),
    st.integers(1, 5),
)
def test_equal_and_healthy_replicas_are_never_inspected(
    base: Mapping[int, Chunks], count: int
) -> None:
    rows = [
        {
            **dict.fromkeys(CHUNK_SCHEMA.names),
            "datanode": f"dn-{i}",
            "volume": "DS-1",
            "container_id": 1,
            "state": "CLOSED",
            "bcs_id": i,
            "replica_index": 0,
            "block_id": block_id,
            "chunk_offset": offset,
            "length": chunk[0],
            "checksum": chunk[1],
            "matches": True,
            "deleted": False,
            "source": "data",
            "generation": i,
        }
        for i in range(count)
        for block_id, block in sorted(base.items())
        for offset, chunk in sorted(block.items())
    ]
    verdicts, _, candidates = swept(rows, exact_replicas(table(rows))[0])
    assert not candidates
    assert [verdict["verdict"] for verdict in verdicts.values()] == (
        ["MATCH" if count > 1 else "UNKNOWN"] if base else []
    )
