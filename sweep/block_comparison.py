"""Compare the blocks of one container's replicas, and collect the findings.

Nearly all blocks of a container may differ, for example if one replica is empty. So
blocks become Python's objects range by range, and findings become columns before there
are many: a finding takes a kilobyte as objects, and a tenth as columns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from merkle.columns import TreeColumns
from merkle.comparison import Difference, DifferenceKind, RangedComparison
from merkle.outcome import Evidence, Verdict
from merkle.tree import ContainerId, ContainerTree
from sweep.exact import Row
from sweep.fragments import Bools, Int64s
from sweep.model import FINDING_SCHEMA

# Blocks of all replicas of a container; so few are compared faster than aligned.
_FEW_BLOCKS = 8

# Entries of one range of blocks, compared as Python's objects.
_RANGE_ENTRIES = 1 << 14

# Findings that are rows at a time, and as many as are not worth columns of their own.
_ROWS_MAX = 1 << 13
_FEW_ROWS = 1 << 10

_NOTHING = FINDING_SCHEMA.empty_table()


class FindingBuffer:
    """Findings of many containers: a limited number of rows, the others as columns."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._tables = [_NOTHING]

    def add(self, rows: Sequence[Row], columns: pa.Table = _NOTHING) -> None:
        """Add findings as rows, as columns (FINDING_SCHEMA), or both, which must be
        ascending by block and become one ascending list.
        """
        if not columns.num_rows:
            self._rows += rows
        elif columns.num_rows <= _FEW_ROWS:
            both = [*rows, *columns.to_pylist()]
            self._rows += sorted(both, key=lambda row: int(row["block_id"]))
        else:
            self._flush()
            table = pa.concat_tables([pa.Table.from_pylist(rows, FINDING_SCHEMA), columns])
            self._tables.append(in_order(table, "block_id") if rows else columns)
        if len(self._rows) > _ROWS_MAX:
            self._flush()

    def table(self) -> pa.Table:
        """All findings (FINDING_SCHEMA), as they were added."""
        self._flush()
        return pa.concat_tables(self._tables)

    def _flush(self) -> None:
        if self._rows:
            self._tables.append(pa.Table.from_pylist(self._rows, FINDING_SCHEMA))
            self._rows = []


def in_order(findings: pa.Table, column: str) -> pa.Table:
    """The findings ascending by a column of integers; equal ones keep their order."""
    return findings.take(pa.array(np.argsort(findings[column].to_numpy(), kind="stable")))


def compare_blocks(
    container_id: ContainerId,
    named: Sequence[tuple[str, TreeColumns]],
    findings: FindingBuffer,
) -> tuple[Verdict, str]:
    """The verdict by `merkle.comparison` and its detail; findings are added, ascending
    by block. `named` are the trees by the names of their replicas, ascending.

    To save time, `merkle.comparison` gets only one of the blocks that are equal and
    healthy in all replicas. Likewise it gets one of the blocks that some replicas lack
    and that are equal and healthy in the others; the rest become findings here. One of
    each must stay: without any block there is no MATCH, and one missing block decides
    the verdict as well as thousands do. The other blocks go to it range by range: as
    Python's objects, those of a container may take a gigabyte.
    """
    starts: list[int | None]
    names, trees = [name for name, _ in named], [tree for _, tree in named]
    if sum(len(tree.block_ids) for tree in trees) <= _FEW_BLOCKS:
        kept, lost, starts = trees, _NOTHING, [None]
    else:
        kept, lost = _kept_and_lost(container_id, names, trees)
        starts = _range_starts(kept, lost["block_id"].to_numpy())
    # The names of merkle.comparison must ascend as the indexes do.
    keys = [f"{i:0{len(str(len(trees)))}}" for i in range(len(trees))]
    compared = RangedComparison(
        {
            key: ContainerTree(container_id, tree.data_checksum)
            for key, tree in zip(keys, trees, strict=True)
        }
    )
    details = Counter[tuple[bool, str]]()
    for first, end in pairwise([*starts, None]):
        here = kept if len(starts) == 1 else [_between(tree, first, end) for tree in kept]
        differences, evidence = compared.add(
            {key: tree.to_tree() for key, tree in zip(keys, here, strict=True)}
        )
        details.update((False, one.detail) for one in evidence)
        rows = _findings(container_id, differences, evidence, names)
        findings.add(rows, lost.slice(*_span(lost["block_id"].to_numpy(), first, end)))
    details.update((True, one.detail) for one in compared.evidence)
    return compared.verdict, _detail(details)


def _kept_and_lost(
    container_id: ContainerId, names: Sequence[str], trees: Sequence[TreeColumns]
) -> tuple[list[TreeColumns], pa.Table]:
    """The trees with the blocks that `merkle.comparison` gets, and the findings of the
    other blocks that some replicas lack (FINDING_SCHEMA), ascending by block.
    """
    built = [i for i, tree in enumerate(trees) if tree.data_checksum is not None]
    aligned = _align([trees[i] for i in built])
    everywhere = aligned.held.all(axis=0)
    matching = aligned.block_ids[aligned.is_uniform & everywhere][1:]
    lost = np.flatnonzero(aligned.is_uniform & ~everywhere & ~aligned.is_deleted)[1:]
    left_out = np.concatenate((matching, aligned.block_ids[lost]))
    kept = [
        _with_blocks(tree, np.flatnonzero(~np.isin(tree.block_ids, left_out))) for tree in trees
    ]
    if not len(lost):
        return kept, _NOTHING
    patterns, pattern_of = np.unique(aligned.held[:, lost], axis=1, return_inverse=True)
    lacking, sources = (
        pa.array(
            [[names[built[i]] for i in np.flatnonzero(one == side)] for one in patterns.T],
            pa.list_(pa.string()),
        ).take(pa.array(pattern_of.ravel()))
        for side in (False, True)
    )
    count = len(lost)
    columns = {
        "kind": pa.repeat(DifferenceKind.MISSING_BLOCK.value, count),
        "container_id": np.full(count, container_id, np.int64),
        "block_id": aligned.block_ids[lost],
        "chunk_offset": pa.nulls(count, pa.int64()),
        "lacking": lacking,
        "sources": sources,
        "detail": pa.repeat("", count),
    }
    return kept, pa.table(columns, FINDING_SCHEMA)


def _range_starts(trees: Sequence[TreeColumns], lost: Int64s) -> list[int | None]:
    """Where ranges of blocks begin that have about _RANGE_ENTRIES entries each; the
    first has no limit below.
    """
    ids = np.concatenate(
        [lost, *(np.repeat(t.block_ids, 1 + np.diff(t.chunk_starts)) for t in trees)]
    )
    ids.sort()
    return [None, *np.unique(ids[_RANGE_ENTRIES::_RANGE_ENTRIES]).tolist()]


def _between(tree: TreeColumns, first: int | None, end: int | None) -> TreeColumns:
    """The tree with its blocks from `first` to before `end`, and its old root."""
    start, count = _span(tree.block_ids, first, end)
    return _with_blocks(tree, np.arange(start, start + count))


def _span(ids: Int64s, first: int | None, end: int | None) -> tuple[int, int]:
    """The start and the number of ascending IDs from `first` to before `end`."""
    start = 0 if first is None else int(np.searchsorted(ids, first))
    return start, (len(ids) if end is None else int(np.searchsorted(ids, end))) - start


@dataclass(frozen=True, eq=False, slots=True)
class _BlockAlignment:
    """The blocks of all trees, ascending by ID. `held[i]` marks the blocks of tree i.

    A uniform block is equal in every field in all trees that have it, and is either
    healthy or deleted.
    """

    block_ids: Int64s
    held: Bools
    is_uniform: Bools
    is_deleted: Bools


def _align(trees: Sequence[TreeColumns]) -> _BlockAlignment:
    block_ids = np.unique(np.concatenate([tree.block_ids for tree in trees]))
    held = np.array([np.isin(block_ids, tree.block_ids, assume_unique=True) for tree in trees])
    # The index of a block in a tree that has it.
    at = np.cumsum(held, axis=1) - 1
    first = held.argmax(axis=0)
    is_uniform, is_deleted = np.zeros((2, len(block_ids)), np.bool_)
    for i, tree in enumerate(trees):
        ours = np.flatnonzero(first == i)
        is_equal = _is_verified(tree)[at[i, ours]]
        for j in range(i + 1, len(trees)):
            both = held[j, ours]
            is_equal[both] &= _equal(tree, at[i, ours[both]], trees[j], at[j, ours[both]])
        is_uniform[ours] = is_equal
        is_deleted[ours] = tree.block_deleted[at[i, ours]]
    return _BlockAlignment(block_ids, held, is_uniform, is_deleted)


def _is_verified(tree: TreeColumns) -> Bools:
    """Which blocks are deleted, or have only chunks that match a recorded checksum."""
    counts = np.diff(tree.chunk_starts)
    is_open = ~tree.chunk_matches | (tree.chunk_checksums == 0)
    verified: Bools = tree.block_deleted | (counts > 0)
    verified[np.repeat(np.arange(len(counts)), counts)[is_open]] = False
    return verified


def _equal(a: TreeColumns, at_a: Int64s, b: TreeColumns, at_b: Int64s) -> Bools:
    """Whether block `at_a[i]` of a equals block `at_b[i]` of b in every field."""
    counts = np.diff(a.chunk_starts)[at_a]
    equal: Bools = a.block_checksums[at_a] == b.block_checksums[at_b]
    equal &= a.block_deleted[at_a] == b.block_deleted[at_b]
    equal &= counts == np.diff(b.chunk_starts)[at_b]
    at_a, at_b, counts = at_a[equal], at_b[equal], counts[equal]
    ours, theirs = _ranges(a.chunk_starts[at_a], counts), _ranges(b.chunk_starts[at_b], counts)
    differs = a.chunk_offsets[ours] != b.chunk_offsets[theirs]
    differs |= a.chunk_lengths[ours] != b.chunk_lengths[theirs]
    differs |= a.chunk_checksums[ours] != b.chunk_checksums[theirs]
    differs |= a.chunk_matches[ours] != b.chunk_matches[theirs]
    equal[np.repeat(np.flatnonzero(equal), counts)[differs]] = False
    return equal


def _with_blocks(tree: TreeColumns, blocks: Int64s) -> TreeColumns:
    """The tree with only these of its blocks, given by index, and its old root."""
    counts = np.diff(tree.chunk_starts)[blocks]
    chunks = _ranges(tree.chunk_starts[blocks], counts)
    return TreeColumns(
        tree.container_id,
        tree.data_checksum,
        tree.block_ids[blocks],
        tree.block_checksums[blocks],
        tree.block_deleted[blocks],
        np.concatenate(([0], np.cumsum(counts))),
        tree.chunk_offsets[chunks],
        tree.chunk_lengths[chunks],
        tree.chunk_checksums[chunks],
        tree.chunk_matches[chunks],
    )


def _ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """The concatenation of the ranges `starts[i]` to `starts[i] + counts[i]`."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _findings(
    container_id: ContainerId,
    differences: Iterable[Difference],
    evidence: Iterable[Evidence],
    names: Sequence[str],
) -> list[Row]:
    details = {(one.block_id, one.offset): one.detail for one in evidence}
    return [
        {
            "kind": difference.kind.value,
            "container_id": container_id,
            "block_id": difference.block_id,
            "chunk_offset": difference.offset,
            "lacking": [names[int(i)] for i in difference.lacking],
            "sources": [names[int(i)] for i in difference.sources],
            "detail": details.get((difference.block_id, difference.offset), ""),
        }
        for difference in differences
    ]


def _detail(counts: Mapping[tuple[bool, str], int]) -> str:
    """Evidence about the container as a whole (True), and the count of each other
    detail; its findings hold the places.
    """
    return "; ".join(
        text if is_general else f"{text} ({count}x)" for (is_general, text), count in counts.items()
    )
