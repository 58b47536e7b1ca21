"""Rows hold all of a tree, and an export after any changes says what a fresh one
would.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktable.manifest import FileKind
from chunktable.places import LocalDestination
from chunktable.reader import latest_manifest, read_inventory
from chunktable.schema import (
    CHUNK_SCHEMA,
    CONTAINER_ROW,
    REPLICA_COLUMNS,
    ReplicaAttributes,
    rows_of,
)
from dnagent.export import ExportLimits, ExportResult, export, files_to_rewrite
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.survey import ReplicaSnapshot
from runtime.disk import Disk
from tests.support.tables import DATANODE, MemoryWalk, blocks, current_rows, replica, trees_of

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
PLACE = st.integers(0, (1 << 63) - 1)
chunk_trees = st.builds(ChunkTree, PLACE, INT64, INT64, st.booleans())
live_blocks = st.builds(
    BlockTree.live,
    INT64.map(BlockId),
    st.lists(chunk_trees, max_size=4, unique_by=lambda c: c.offset),
)
tombstones = st.builds(BlockTree.tombstone, INT64.map(BlockId), INT64)
trees = st.lists(live_blocks | tombstones, max_size=6, unique_by=lambda block: block.block_id).map(
    lambda blocks: ContainerTree.of(ContainerId(5), blocks)
)
replicas = st.builds(
    ReplicaAttributes,
    st.just(DATANODE),
    st.just("DS-1"),
    st.just(5),
    st.sampled_from(ReplicaState),
    INT64,
    st.integers(0, (1 << 31) - 1),
    st.sampled_from(("tree", "metadata", "data")),
    st.none() | st.integers(0, 4_102_444_800_000),
)
SMALL = ExportLimits(group_rows=4, file_rows_max=12, small_files_max=2, piece_rows=3)


@given(replicas, trees, st.integers(1, 7))
def test_rows_hold_all_of_a_tree_in_order(
    told: ReplicaAttributes, tree: ContainerTree, rows_max: int
) -> None:
    rows = rows_of(told, TreeColumns.of(tree))
    batches = list(rows.batches(rows_max))
    assert all(0 < batch.num_rows <= rows_max for batch in batches)
    table = pa.Table.from_batches(batches, CHUNK_SCHEMA)
    table.validate(full=True)
    assert table.num_rows == rows.count
    assert trees_of(table) == {("DS-1", 5): tree}
    places = [
        (row["block_id"], row["chunk_offset"])
        for row in table.select(["block_id", "chunk_offset"]).to_pylist()
    ]
    assert places == sorted(set(places))
    (alike,) = table.select(REPLICA_COLUMNS).group_by(REPLICA_COLUMNS).aggregate([]).to_pylist()
    assert alike["generation"] == rows.generation
    assert (alike["state"], alike["bcs_id"], alike["source"]) == (
        told.state.name,
        told.bcs_id,
        told.source,
    )


@given(replicas, trees, replicas, trees)
def test_the_generation_changes_exactly_with_the_rows(
    one: ReplicaAttributes, first: ContainerTree, other: ReplicaAttributes, second: ContainerTree
) -> None:
    generations = [
        rows_of(r, TreeColumns.of(t)).generation for r, t in ((one, first), (other, second))
    ]
    is_same = (
        replace(one, scanned_at_ms=None) == replace(other, scanned_at_ms=None) and first == second
    )
    assert (generations[0] == generations[1]) == is_same
    later = replace(one, scanned_at_ms=4711)
    assert rows_of(later, TreeColumns.of(first)).generation == generations[0]


def test_an_unknown_tree_is_not_an_empty_one() -> None:
    told = ReplicaAttributes(DATANODE, "DS-1", 5, ReplicaState.CLOSED, 0, 0, "none")
    none, empty = (
        rows_of(told, None),
        rows_of(replace(told, source="tree"), TreeColumns.of(ContainerTree.of(ContainerId(5), ()))),
    )
    (row,) = next(none.batches()).to_pylist()
    assert (row["chunk_offset"], row["source"]) == (CONTAINER_ROW, "none")
    assert none.generation != empty.generation


changes = st.one_of(
    # Container, number of blocks, seed: new, or changed.
    st.tuples(st.just("put"), st.integers(1, 6), st.integers(0, 5), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.integers(1, 6)),
    st.tuples(st.just("unknown"), st.integers(1, 6)),
    st.tuples(st.just("export")),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(changes, max_size=25))
def test_an_incremental_export_says_what_a_full_one_says(history: list[tuple[object, ...]]) -> None:
    walk = MemoryWalk()
    with tempfile.TemporaryDirectory() as folder:
        for change in [*history, ("export",)]:
            match change:
                case ("put", int(container_id), int(count), int(seed)):
                    walk.put(replica(container_id, *blocks(count, seed=seed)))
                case ("delete", int(container_id)):
                    walk.replicas_held.pop(container_id, None)
                case ("unknown", int(container_id)):
                    walk.put(replica(container_id, source=None))
                case _:
                    before = {path.name for path in Path(folder, "a").glob("chunks-*")}
                    done = run(Path(folder, "a"), walk)
                    check(Path(folder, "a"), done, walk.replicas_held, before)
        fresh = run(Path(folder, "b"), walk)
        ours, theirs = rows(Path(folder, "a")), rows(Path(folder, "b"))
        assert ours.equals(theirs)
        assert ours.num_rows == fresh.manifest.rows


def run(folder: Path, walk: MemoryWalk) -> ExportResult:
    return export(
        [walk], [], LocalDestination(folder, Disk()), source=TreeSource.TREE, limits=SMALL
    )


def rows(folder: Path) -> pa.Table:
    destination = LocalDestination(folder, Disk())
    manifest = latest_manifest(destination.filesystem, destination.folder)
    return current_rows(destination.filesystem, destination.folder, manifest)


def check(
    folder: Path, done: ExportResult, held: dict[int, ReplicaSnapshot], before: set[str]
) -> None:
    """What holds after every export: trees, sizes, what is kept and what is gone."""
    table = rows(folder)
    expected = {("DS-1", i): found.tree if found.source else None for i, found in held.items()}
    assert trees_of(table) == expected
    manifest = done.manifest
    assert (manifest.containers, manifest.rows) == (len(held), table.num_rows)
    names = {path.name for path in folder.iterdir()}
    assert {file.name for file in manifest.files} <= names
    assert len([name for name in names if name.startswith("manifest")]) == min(manifest.sequence, 2)
    old = [file for file in manifest.of_kind(FileKind.CHUNKS) if file.name in before]
    live = {
        name: count
        for name, count in _live(folder, done).items()
        if name in {file.name for file in old}
    }
    assert all(2 * live[file.name] >= file.rows for file in old)
    assert sum(live[file.name] < SMALL.group_rows for file in old) <= SMALL.small_files_max


def _live(folder: Path, done: ExportResult) -> dict[str, int]:
    destination = LocalDestination(folder, Disk())
    inventory = read_inventory(destination.filesystem, destination.folder, done.manifest)
    found: dict[str, int] = {}
    for row in inventory.to_pylist():
        found[row["file"]] = found.get(row["file"], 0) + row["rows"]
    return found


@given(
    st.dictionaries(
        st.text("ab", min_size=1, max_size=3), st.tuples(st.integers(1, 50), st.integers(0, 50))
    )
)
def test_what_is_rewritten_is_sparse_or_small(files: dict[str, tuple[int, int]]) -> None:
    total = {name: rows for name, (rows, _) in files.items()}
    live = {name: min(rows, count) for name, (rows, count) in files.items()}
    chosen = files_to_rewrite(total, live, small_rows=10, small_files_max=3)
    for name in total:
        if 2 * live[name] < total[name] and live[name]:
            assert name in chosen
        elif name in chosen:
            assert 0 < live[name] < 10
    assert len([n for n in total if n not in chosen and 0 < live[n] < 10]) <= 3
