"""Laws of runs: however rows are cut, they come to the trees they were made of; what
cannot be cut so is noticed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW, ReplicaAttributes, rows_of
from merkle.checksum import KERNEL_BYTES_MIN, kernels_for
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from sweep import runs
from sweep.exact import exact_replicas, trees_of
from sweep.rows import Rows
from sweep.runs import (
    RUN_SCHEMA,
    fold_batches,
    join,
    library_fold_stretches,
    library_settle_numbers,
    settle,
)
from tests.support.chunk_rows import Row, trees_in

# The first example may load the kernels, which takes seconds.
unhurried = settings(deadline=None)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, (1 << 32) - 1) | st.integers(-3, 9)
OFFSET = st.integers(0, (1 << 63) - 1) | st.integers(0, 9)
chunk_trees = st.builds(ChunkTree, OFFSET, INT64, INT64, st.booleans())
chunk_lists = st.lists(chunk_trees, max_size=6, unique_by=lambda chunk: chunk.offset)
live_blocks = st.builds(BlockTree.live, INT64.map(BlockId), chunk_lists)
tombstones = st.builds(BlockTree.tombstone, INT64.map(BlockId), INT64)
# Rows of a tombstone whose chunks are known.
deleted_blocks = live_blocks.filter(lambda block: bool(block.chunks)).map(
    lambda block: replace(block, deleted=True)
)
block_lists = st.lists(
    live_blocks | tombstones | deleted_blocks, max_size=5, unique_by=lambda block: block.block_id
)
clusters = st.dictionaries(
    st.tuples(
        st.sampled_from([-5, 1, 2, 1 << 62]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["", "v"]),
    ),
    st.none() | block_lists,
    max_size=6,
)
Blocks = Sequence[BlockTree]
Cluster = Mapping[tuple[int, str, str], Blocks | None]


def rows(cluster: Cluster) -> list[Row]:
    """Rows in order; a deleted block with chunks gives them away."""
    found: list[Row] = []
    for (container_id, datanode, volume), blocks in sorted(
        cluster.items(), key=lambda held: held[0]
    ):
        scanned = 1_700_000_000_000 if container_id > 1 else None
        source = "none" if blocks is None else "tree"
        told = ReplicaAttributes(
            datanode, volume, container_id, ReplicaState.CLOSED, 7, 0, source, scanned
        )
        tree = ContainerTree.of(
            ContainerId(container_id), [replace(block, deleted=False) for block in blocks or ()]
        )
        held = rows_of(told, None if blocks is None else TreeColumns.of(tree))
        gone = {block.block_id for block in blocks or () if block.deleted}
        for batch in held.batches():
            found += [row | {"deleted": row["block_id"] in gone} for row in batch.to_pylist()]
    return found


def table(held: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(held, CHUNK_SCHEMA)


def folded(held: Sequence[Row], batch_rows: int = 1000) -> pa.Table:
    return fold_batches(table(held).combine_chunks().to_batches(max_chunksize=batch_rows))


def summary(held: Sequence[Row]) -> list[dict[str, Any]]:
    """What the replicas come to, the slow way."""
    return [
        {
            "container_id": container_id,
            "datanode": datanode,
            "volume": volume,
            "root": tree.data_checksum if row["source"] != "none" else None,
            "blocks": len(tree.blocks),
            "deleted_blocks": sum(block.deleted for block in tree.blocks),
            "chunks": len(chunks := [chunk for block in tree.blocks for chunk in block.chunks]),
            "bytes": _wrapped(sum(chunk.length_bytes for chunk in chunks)),
            "corrupt": sum(not chunk.checksum_matches for chunk in chunks),
            "unverifiable": (
                sum(chunk.checksum_matches and not chunk.data_checksum for chunk in chunks)
                + sum(not block.deleted and not block.chunks for block in tree.blocks)
            ),
            "scanned_at": row["scanned_at"],
        }
        for container_id, replicas in trees_in(held).items()
        for (datanode, volume), (row, tree) in replicas.items()
    ]


def summaries(replicas: pa.Table) -> list[dict[str, Any]]:
    names = (
        "container_id datanode volume root blocks deleted_blocks chunks bytes corrupt unverifiable"
        " scanned_at"
    )
    found: list[dict[str, Any]] = replicas.select(names.split()).to_pylist()
    return found


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@unhurried
@given(
    clusters,
    st.lists(st.integers(0, 60), max_size=5),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_rows_cut_anywhere_settle_to_the_trees(
    cluster: Cluster, cuts: list[int], batch_rows: int, shuffle: random.Random
) -> None:
    held = rows(cluster)
    places = [0, *sorted(min(cut, len(held)) for cut in cuts), len(held)]
    parts = [folded(held[a:b], batch_rows) for a, b in pairwise(places)]
    shuffle.shuffle(parts)
    settled = settle(pa.concat_tables([RUN_SCHEMA.empty_table(), *parts]))
    assert not len(settled.exact)
    assert summaries(settled.replicas) == summary(held)
    whole = settle(folded(held))
    assert whole.replicas.drop_columns("path") == settled.replicas.drop_columns("path")
    assert set(whole.replicas["path"].to_pylist()) <= {"filewise"}
    torn = {
        (r["container_id"], r["datanode"], r["volume"])
        for cut in places[1:-1]
        for r in held[max(cut - 1, 0) : cut]
    }
    torn &= {
        (r["container_id"], r["datanode"], r["volume"])
        for cut in places[1:-1]
        for r in held[cut : cut + 1]
    }
    fragments = settled.replicas.filter(pc.equal(settled.replicas["path"], "fragments"))
    assert {
        tuple(row.values())
        for row in fragments.select(["container_id", "datanode", "volume"]).to_pylist()
    } <= torn


@unhurried
@given(clusters, st.randoms(use_true_random=False), st.integers(1, 9))
def test_rows_in_any_order_come_to_the_same_along_the_exact_path(
    cluster: Cluster, shuffle: random.Random, batch_rows: int
) -> None:
    held = rows(cluster)
    mixed = [*held, *shuffle.sample(held, len(held) // 3)]
    shuffle.shuffle(mixed)
    replicas, findings = exact_replicas(table(mixed))
    assert not findings.num_rows
    assert replicas.drop_columns("path") == settle(folded(held)).replicas.drop_columns("path")
    expected = {
        (container_id, *key): (
            tree if row["source"] != "none" else ContainerTree(ContainerId(container_id), None)
        )
        for container_id, of_container in trees_in(held).items()
        for key, (row, tree) in of_container.items()
    }
    assert {
        tuple(identity): columns.to_tree() for identity, columns in trees_of(table(mixed))
    } == expected
    check_settled(mixed, batch_rows)


def check_settled(held: Sequence[Row], batch_rows: int = 1000) -> None:
    """What rows fold to is what they come to along the exact path, or is sent there."""
    settled = settle(folded(held, batch_rows))
    replicas, findings = exact_replicas(table(held))
    in_doubt = set(settled.exact.tolist())
    assert set(findings["container_id"].to_pylist()) <= in_doubt
    assert in_doubt | set(settled.replicas["container_id"].to_pylist()) == {
        row["container_id"] for row in held
    }
    decided = replicas.filter(
        pa.array(~np.isin(replicas["container_id"].to_numpy(), settled.exact))
    )
    assert decided.drop_columns("path") == settled.replicas.drop_columns("path")


EXTREMES = st.sampled_from([-(1 << 63), (1 << 63) - 1, -3, CONTAINER_ROW, BLOCK_ROW, 0, 1])
EDITS = st.one_of(
    st.tuples(
        st.sampled_from(["block_id", "chunk_offset", "length", "checksum", "bcs_id", "generation"]),
        EXTREMES,
    ),
    st.tuples(st.sampled_from(["matches", "deleted"]), st.booleans()),
    st.tuples(st.just("state"), st.sampled_from(["OPEN", "NONSENSE", ""])),
    st.tuples(st.just("source"), st.sampled_from(["none", "data"])),
    st.tuples(st.just("replica_index"), st.integers(0, 2)),
    st.tuples(
        st.sampled_from(["length", "matches", "state", "generation", "chunk_offset", "source"]),
        st.none(),
    ),
)


@unhurried
@given(
    clusters,
    st.lists(st.tuples(st.integers(0, 60), st.none() | EDITS, st.integers(0, 60)), max_size=4),
    st.integers(1, 9),
)
def test_hostile_rows_are_folded_rightly_or_sent_to_the_exact_path(
    cluster: Cluster, edits: list[tuple[int, tuple[str, Any] | None, int]], batch_rows: int
) -> None:
    held = rows(cluster)
    for taken, edit, put in edits if held else ():
        row = held[taken % len(held)]
        held.insert(put % (len(held) + 1), row if edit is None else {**row, edit[0]: edit[1]})
    check_settled(held, batch_rows)
    replicas, findings = exact_replicas(table(held))
    faulty = {(f["container_id"], f["detail"].partition(":")[0]) for f in findings.to_pylist()}
    for replica in replicas.to_pylist():
        where = f"{replica['datanode']}/{replica['volume']}".rstrip("/")
        if (replica["container_id"], where) in faulty:
            assert (replica["root"], replica["source"], replica["blocks"]) == (None, "none", 0)
        else:
            assert (replica["root"] is None) == (replica["source"] == "none")
    for identity, columns in trees_of(table(held)):
        (root,) = [
            r["root"]
            for r in replicas.to_pylist()
            if (r["container_id"], r["datanode"], r["volume"]) == tuple(identity)
        ]
        assert columns.data_checksum == root


@unhurried
@given(clusters, st.integers(0, 60), st.integers(0, 60))
def test_joining_is_associative(cluster: Cluster, first: int, second: int) -> None:
    held = rows(cluster)
    a, b = sorted((min(first, len(held)), min(second, len(held))))
    left, middle, right = folded(held[:a]), folded(held[a:b]), folded(held[b:])
    one = join(pa.concat_tables([join(pa.concat_tables([left, middle])), right]))
    other = join(pa.concat_tables([left, join(pa.concat_tables([middle, right]))]))
    assert one == other == folded(held)


@pytest.mark.parametrize(
    "other",
    [
        {"bcs_id": 8},
        {"state": "QUASI_CLOSED"},
        {"replica_index": 1},
        {"source": "data"},
        {"generation": 5},
    ],
    ids=lambda other: next(iter(other)),
)
def test_parts_of_different_states_of_a_replica_are_not_joined(other: Mapping[str, Any]) -> None:
    """Each part is in order, and the one follows the other; but no replica ever was
    both.
    """
    blocks = [BlockTree.live(BlockId(n), [ChunkTree(0, 4, n)]) for n in range(1, 5)]
    held = rows({(1, "a", "v"): blocks, (2, "a", "v"): blocks})
    changed = [{**row, **other} for row in held[2:4]]
    parts = [folded(held[:2]), folded(changed), folded(held[4:])]
    for order in (parts, parts[::-1]):
        settled = settle(pa.concat_tables(order))
        assert settled.exact.tolist() == [1]
        assert settled.replicas["container_id"].to_pylist() == [2]
    # Nor within one batch of rows.
    assert settle(folded([*held[:2], *changed, *held[4:]])).exact.tolist() == [1]
    same = settle(pa.concat_tables([folded(held[:2]), folded(held[2:])]))
    assert same.replicas["container_id"].to_pylist() == [1, 2]


def changes(blocks: Blocks) -> list[list[BlockTree]]:
    """The blocks with one field of one of them changed, in every way."""
    found = []
    for i, block in enumerate(blocks):
        others = [*blocks[:i], *blocks[i + 1 :]]
        found.append(others)
        free = next(
            number for number in range(100) if all(number != other.block_id for other in blocks)
        )
        found.append([*others, replace(block, block_id=BlockId(free))])
        if block.deleted:
            found.append([*others, replace(block, data_checksum=block.data_checksum ^ 1)])
            continue
        found.append([*others, BlockTree.tombstone(block.block_id, block.data_checksum)])
        for j, chunk in enumerate(block.chunks):
            offset = next(
                number
                for number in range(100)
                if all(number != other.offset for other in block.chunks)
            )
            for changed in (
                replace(chunk, offset=offset),
                replace(chunk, length_bytes=chunk.length_bytes ^ 1),
                replace(chunk, data_checksum=chunk.data_checksum ^ 1),
                replace(chunk, checksum_matches=not chunk.checksum_matches),
            ):
                rest = [*block.chunks[:j], *block.chunks[j + 1 :]]
                found.append([*others, BlockTree.live(block.block_id, [*rest, changed])])
    return found


@unhurried
@given(st.lists(live_blocks | tombstones, max_size=3, unique_by=lambda block: block.block_id))
def test_the_fingerprint_changes_with_every_field_of_a_tree(blocks: list[BlockTree]) -> None:
    variants = [blocks, blocks, *changes(blocks)]
    held = rows({(1, f"{i:04}", ""): variant for i, variant in enumerate(variants)})
    first, same, *others = settle(folded(held)).replicas["fingerprint"].to_pylist()
    assert first == same
    assert first not in others


@unhurried
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 3),
            st.sampled_from([-(1 << 63), -3, -2, -1, 0, 1, 2, 3, 4, (1 << 63) - 1]),
            INT64,
            INT64,
            st.booleans(),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
    st.sets(
        st.sampled_from(["block_id", "chunk_offset", "length", "checksum", "matches", "deleted"])
    ),
)
def test_the_kernel_folds_as_numpy_does(
    drawn: list[tuple[int, int, int, int, bool, bool, bool]], in_order: bool, constant: set[str]
) -> None:
    if kernels_for(KERNEL_BYTES_MIN) is None:
        pytest.skip("no kernels here")
    names = ("block_id", "chunk_offset", "length", "checksum")
    if in_order:
        drawn = sorted(drawn, key=lambda row: row[:2])
    integers = {name: np.array([row[i] for row in drawn], np.int64) for i, name in enumerate(names)}
    flags = {
        name: np.array([row[i] for row in drawn]) for i, name in ((4, "matches"), (5, "deleted"))
    }
    starts = np.flatnonzero([i == 0 or row[6] for i, row in enumerate(drawn)])
    alike_integers = {
        name: column[:1] if name in constant else column for name, column in integers.items()
    }
    alike_flags = {
        name: column[:1] if name in constant else column for name, column in flags.items()
    }
    full = [
        np.resize(column, len(drawn))
        for column in (*alike_integers.values(), *alike_flags.values())
    ]
    ordered, numbers = library_fold_stretches(starts, *full)
    ours, ours_numbers = runs.fold_stretches(
        starts, Rows(len(drawn), {}, alike_integers, alike_flags)
    )
    assert ours.tolist() == ordered.tolist()
    assert ours_numbers[:, ordered].tolist() == numbers[:, ordered].tolist()
    settled = runs.settle_numbers(np.ascontiguousarray(numbers[:, ordered]))
    assert settled.tolist() == library_settle_numbers(numbers[:, ordered]).tolist()
