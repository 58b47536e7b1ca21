"""Compare the replicas of every container: the equal ones by their sums alone, the
others block by block.

`compare_replicas` decides at once what `merkle.comparison` would say of replicas that
are equal in root and fingerprint, hold no corrupt chunk and nothing that might be
judged otherwise by its place. All that is left is a candidate, to be decided by
`merkle.comparison.compare` itself on the trees of its rows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import REPLICA_COLUMNS
from merkle.columns import TreeColumns
from merkle.comparison import Comparison, Difference, DifferenceKind, compare
from merkle.outcome import DIVERGED_VERDICTS, Evidence, Verdict, worst_verdict
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from sweep.exact import (
    EMPTY_ROW,
    NULLABLE_ROWS,
    SUMS,
    Row,
    exact_replicas,
    joined_root,
    replica_dicts,
    replica_key,
    trees_of,
)
from sweep.fragments import Bools, Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, VERDICT_SCHEMA, FindingKind, RootMethod
from sweep.runs import ranks

_CLOSED = pa.array([state.value for state in ReplicaState if state.is_closed])

_CONTRADICTED = "one replica is in the input more than once"

_CHANGED = "the rows are not those that the root was computed of"


@dataclass(frozen=True, slots=True)
class ContainerVerdicts:
    """What sums alone decide: VERDICT_SCHEMA, the ascending IDs of the containers to
    inspect, and FINDING_SCHEMA.
    """

    verdicts: pa.Table
    candidates: Int64s
    findings: pa.Table


def compare_replicas(replicas: pa.Table) -> ContainerVerdicts:
    """Decide the containers whose replicas are equal or cannot be compared; the others
    are candidates.

    `replicas` is of REPLICA_SCHEMA, in any order, and holds all replicas of the
    containers in it. A replica with several rows is a finding, and its container
    UNKNOWN: nothing says which row is the true one.
    """
    grouped = _ReplicaGroups.of(replicas)
    root, is_known = (
        _int64s(pc.fill_null(replicas["root"], 0)),
        _bools(pc.is_valid(replicas["root"])),
    )
    has_root, lacks_root = grouped.takes_part & is_known, grouped.takes_part & ~is_known
    blocks, chunks = _int64s(replicas["blocks"]), _int64s(replicas["chunks"])

    # Every replica is held against one of its container that has a root, whichever.
    reference = np.zeros(len(grouped.containers), np.int64)
    reference[grouped.container_of[has_root]] = np.flatnonzero(has_root)
    theirs = reference[grouped.container_of]
    is_sql = _bools(pc.equal(replicas["path"], RootMethod.SQL.value))
    sums = (root, _int64s(replicas["fingerprint"]), is_sql)
    differs = np.logical_or.reduce([column != column[theirs] for column in sums])
    # Chunks without checksums leave the others of their block to be judged place by
    # place, equal as they may be; and where anything else is verified, the verdict
    # names what is not, whichever way the sums were made.
    has_both = (_int64s(replicas["unverifiable"]) > 0) & (
        (chunks > 0) | (_int64s(replicas["deleted_blocks"]) > 0)
    )
    undecided = has_root & (differs | has_both | (_int64s(replicas["corrupt"]) > 0))

    is_candidate = grouped.any(undecided) & ~grouped.is_contradicted
    is_verified = grouped.any(has_root & ((chunks > 0) | (_int64s(replicas["deleted_blocks"]) > 0)))
    taking_part, unknown = grouped.number(grouped.takes_part), grouped.number(lacks_root)
    is_match = is_verified & (taking_part >= 2) & (unknown == 0) & ~grouped.is_contradicted
    # The last detail that applies counts. An array of objects holds each text once.
    detail = np.full(len(grouped.containers), "", object)
    detail[~is_verified] = "no block has recorded checksums"
    detail[~grouped.any(grouped.takes_part & (blocks > 0))] = (
        "there are no blocks, as after a failed scan"
    )
    for missing, of_all in set(
        zip(unknown[unknown > 0].tolist(), taking_part[unknown > 0].tolist(), strict=True)
    ):
        detail[(unknown == missing) & (taking_part == of_all)] = (
            f"{missing} of {of_all} replicas have no root"
        )
    detail[taking_part == 1] = "only one replica takes part"
    detail[taking_part == 0] = "no replica takes part"
    detail[grouped.is_contradicted] = _CONTRADICTED

    decided = ~is_candidate
    verdicts = pa.table(
        {
            "container_id": grouped.containers[decided],
            "verdict": np.where(is_match[decided], Verdict.MATCH.value, Verdict.UNKNOWN.value),
            "replicas": grouped.number(np.ones_like(has_root))[decided],
            "excluded": grouped.number(~grouped.takes_part)[decided],
            "diverged": np.zeros(np.count_nonzero(decided), np.bool_),
            "detail": detail[decided],
        },
        VERDICT_SCHEMA,
    )
    return ContainerVerdicts(
        verdicts, grouped.containers[is_candidate], grouped.contradictions(replicas)
    )


@dataclass(frozen=True, slots=True)
class InspectionResult:
    """What rows decide: VERDICT_SCHEMA and FINDING_SCHEMA, ascending by container."""

    verdicts: pa.Table
    findings: pa.Table


def inspect(rows: pa.Table, replicas: pa.Table) -> InspectionResult:
    """Decide the containers that `compare_replicas` left open, by their rows
    (CHUNK_SCHEMA).

    `replicas` (REPLICA_SCHEMA) has all replicas of these containers, and no others;
    rows of other containers are passed over. A replica without rows, or with others
    than its root was computed of, is a finding, and its container UNKNOWN: what was
    read at two times is not one state.
    """
    by_container: dict[int, list[Row]] = {}
    names = ["container_id", "datanode", "volume", "root"]
    chosen = replicas.select(names).append_column("takes_part", pa.array(_takes_part(replicas)))
    for replica in chosen.to_pylist():
        by_container.setdefault(replica["container_id"], []).append(replica)
    decided = list[_ContainerResult]()
    for container_id, found in groupby(trees_of(rows), lambda one: one[0].container_id):
        if container_id in by_container:
            trees = {(identity.datanode, identity.volume): tree for identity, tree in found}
            decided.append(_decide(container_id, by_container.pop(container_id), trees))
    decided += [
        _decide(ContainerId(container_id), group, {})
        for container_id, group in by_container.items()
    ]
    decided.sort(key=lambda one: int(one.verdict["container_id"]))
    return InspectionResult(
        pa.Table.from_pylist([one.verdict for one in decided], VERDICT_SCHEMA),
        pa.Table.from_pylist(
            [finding for one in decided for finding in one.findings], FINDING_SCHEMA
        ),
    )


def inspect_large(ranges: Iterable[pa.Table], replicas: pa.Table) -> InspectionResult:
    """The same as `inspect` of one container, whose rows come in ranges of blocks.

    All that is said of a container is said of its blocks one by one, but for its sums,
    and these add up: the root over two ranges follows from the roots of each
    (sweep.fragments). So each range is compared as if it were a container.
    """
    whole = replica_dicts(replicas)
    verdicts, findings, pieces = (
        list[Row](),
        list[pa.Table](),
        dict[tuple[object, ...], list[Row]](),
    )
    for rows in ranges:
        here = {replica_key(piece): piece for piece in replica_dicts(exact_replicas(rows)[0])}
        for key, piece in here.items():
            pieces.setdefault(key, []).append(piece)
        ours = pa.Table.from_pylist([_within(replica, here) for replica in whole], REPLICA_SCHEMA)
        compared = compare_replicas(ours)
        if not len(compared.candidates):
            verdicts += compared.verdicts.to_pylist()
            findings.append(compared.findings)
            continue
        # A replica without a block in this range is empty here, not missing.
        empty = [
            EMPTY_ROW | {name: replica[name] for name in REPLICA_COLUMNS}
            for replica in whole
            if replica_key(replica) not in here
        ]
        all_rows = [rows.cast(NULLABLE_ROWS), pa.Table.from_pylist(empty, NULLABLE_ROWS)]
        inspected = inspect(pa.concat_tables(all_rows), ours)
        verdicts += inspected.verdicts.to_pylist()
        findings.append(inspected.findings)
    changed = [
        f"{replica['datanode']}/{replica['volume']}"
        for replica in whole
        if replica["root"] is not None
        and joined_root(pieces.get(replica_key(replica), ())) != replica["root"]
    ]
    if changed:
        verdict, detail = Verdict.UNKNOWN, _CHANGED
        container_id = int(str(whole[0]["container_id"]))
        contradictions = [_contradiction(container_id, name, _CHANGED) for name in changed]
        findings = [pa.Table.from_pylist(contradictions, FINDING_SCHEMA)]
    else:
        verdict = _worst_of_ranges([Verdict(one["verdict"]) for one in verdicts], findings)
        detail = "; ".join(dict.fromkeys(str(one["detail"]) for one in verdicts if one["detail"]))
    row = verdicts[0] | {
        "verdict": verdict.value,
        "diverged": verdict in DIVERGED_VERDICTS,
        "detail": detail,
    }
    return InspectionResult(pa.Table.from_pylist([row], VERDICT_SCHEMA), pa.concat_tables(findings))


def _within(replica: Row, here: dict[tuple[object, ...], Row]) -> Row:
    """What a replica is in one range of blocks."""
    piece = here.get(replica_key(replica))
    if piece is None or replica["root"] is None:
        piece = (
            replica
            | {"root": None if replica["root"] is None else 0, "fingerprint": 0}
            | dict.fromkeys(SUMS, 0)
        )
    return (
        replica
        | {name: piece[name] for name in ("root", "fingerprint", *SUMS)}
        | {"path": RootMethod.EXACT.value}
    )


def _worst_of_ranges(verdicts: Sequence[Verdict], findings: Sequence[pa.Table]) -> Verdict:
    """The worst of all ranges."""
    known = (verdict for verdict in verdicts if verdict is not Verdict.UNKNOWN)
    worst = worst_verdict(known) or Verdict.UNKNOWN
    lost = any(
        pc.any(pc.equal(pc.list_value_length(found["sources"]), 0)).as_py()
        for verdict, found in zip(verdicts, findings, strict=True)
        if verdict is Verdict.UNKNOWN
    )
    # What one range calls lost, a replica without a tree may hold; so it stays unknown
    # of the container.
    return Verdict.UNKNOWN if lost else worst


@dataclass(frozen=True, slots=True)
class _ContainerResult:
    """One container: its row of VERDICT_SCHEMA and those of FINDING_SCHEMA."""

    verdict: Row
    findings: Sequence[Row]


def _decide(
    container_id: ContainerId,
    replicas: Sequence[Row],
    trees: Mapping[tuple[str, str], TreeColumns],
) -> _ContainerResult:
    held = Counter(replica["datanode"] for replica in replicas)
    named = list[tuple[str, TreeColumns]]()
    changed = list[str]()
    for replica in replicas:
        if not replica["takes_part"]:
            continue
        place = (replica["datanode"], replica["volume"])
        name = "/".join(place) if held[replica["datanode"]] > 1 else replica["datanode"]
        tree = (
            TreeColumns.of(ContainerTree(container_id, None))
            if replica["root"] is None
            else trees.get(place)
        )
        if tree is None or tree.data_checksum != replica["root"]:
            changed.append(name)
        else:
            named.append((name, tree))
    if changed:
        verdict, detail = Verdict.UNKNOWN, _CHANGED
        findings = [_contradiction(container_id, name, _CHANGED) for name in sorted(changed)]
    else:
        named.sort(key=lambda one: one[0])
        comparison = _compare([tree for _, tree in named])
        verdict, detail = comparison.verdict, _detail(comparison.evidence)
        findings = _findings(comparison, [name for name, _ in named])
    row = {
        "container_id": container_id,
        "verdict": verdict.value,
        "replicas": len(replicas),
        "excluded": sum(not replica["takes_part"] for replica in replicas),
        "diverged": verdict in DIVERGED_VERDICTS,
        "detail": detail,
    }
    return _ContainerResult(row, findings)


def _compare(trees: Sequence[TreeColumns]) -> Comparison:
    """The comparison by `merkle.comparison`; replicas are named by their places in
    `trees`, in digits that sort alike.

    It sees only one of the blocks that are equal and healthy everywhere, and one of
    those that are so wherever they are: comparing nothing is no MATCH, and one lost
    block makes as much REPAIRABLE as thousands, which take no more than their IDs here.
    """
    names = [f"{i:0{len(str(len(trees)))}}" for i in range(len(trees))]
    built = [i for i, tree in enumerate(trees) if tree.data_checksum is not None]
    aligned = _align([trees[i] for i in built])
    everywhere = aligned.held.all(axis=0)
    passed_over = aligned.block_ids[aligned.is_uniform & everywhere][1:]
    lost = np.flatnonzero(aligned.is_uniform & ~everywhere & ~aligned.is_deleted)[1:]
    left_out = np.concatenate((passed_over, aligned.block_ids[lost]))
    kept = [
        _with_blocks(tree, np.flatnonzero(~np.isin(tree.block_ids, left_out))) for tree in trees
    ]
    comparison = compare({name: tree.to_tree() for name, tree in zip(names, kept, strict=True)})
    patterns, pattern_of = np.unique(aligned.held[:, lost], axis=1, return_inverse=True)
    sides = [
        tuple(
            tuple(names[built[i]] for i in np.flatnonzero(pattern == side))
            for side in (False, True)
        )
        for pattern in patterns.T
    ]
    missing = [
        Difference(DifferenceKind.MISSING_BLOCK, BlockId(block_id), None, *sides[pattern])
        for block_id, pattern in zip(
            aligned.block_ids[lost].tolist(), pattern_of.ravel().tolist(), strict=True
        )
    ]
    differences = sorted(
        (*comparison.differences, *missing), key=lambda difference: difference.block_id
    )
    return replace(comparison, differences=tuple(differences))


@dataclass(frozen=True, eq=False, slots=True)
class _BlockAlignment:
    """The blocks of all trees, ascending: which tree (row of `held`) has them, and
    which are the same in all of those.

    Uniform blocks are equal in every field, and are healthy or deleted.
    """

    block_ids: Int64s
    held: Bools
    is_uniform: Bools
    is_deleted: Bools


def _align(trees: Sequence[TreeColumns]) -> _BlockAlignment:
    block_ids = np.unique(np.concatenate([tree.block_ids for tree in trees]))
    held = np.array([np.isin(block_ids, tree.block_ids, assume_unique=True) for tree in trees])
    # Where in a tree a block stands that it has.
    at = np.cumsum(held, axis=1) - 1
    first = held.argmax(axis=0)
    is_uniform, is_deleted = np.zeros((2, len(block_ids)), np.bool_)
    for i, tree in enumerate(trees):
        ours = np.flatnonzero(first == i)
        alike = _settled(tree)[at[i, ours]]
        for j in range(i + 1, len(trees)):
            both = held[j, ours]
            alike[both] &= _equal(tree, at[i, ours[both]], trees[j], at[j, ours[both]])
        is_uniform[ours] = alike
        is_deleted[ours] = tree.block_deleted[at[i, ours]]
    return _BlockAlignment(block_ids, held, is_uniform, is_deleted)


def _settled(tree: TreeColumns) -> Bools:
    """Blocks that, equal everywhere, leave nothing to verify or mend."""
    counts = np.diff(tree.chunk_starts)
    is_open = ~tree.chunk_matches | (tree.chunk_checksums == 0)
    settled: Bools = tree.block_deleted | (counts > 0)
    settled[np.repeat(np.arange(len(counts)), counts)[is_open]] = False
    return settled


def _equal(a: TreeColumns, at_a: Int64s, b: TreeColumns, at_b: Int64s) -> Bools:
    """Which of these blocks of a are, in every field, the blocks of b at the same place
    in `at_b`.
    """
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
    """The tree with no more than these of its blocks; the root stays what it was."""
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
    """The numbers from each start on, as many as its count, one range behind the
    other.
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _findings(comparison: Comparison, names: Sequence[str]) -> list[Row]:
    details = {
        (evidence.block_id, evidence.offset): evidence.detail for evidence in comparison.evidence
    }
    return [
        {
            "kind": difference.kind.value,
            "container_id": comparison.container_id,
            "block_id": difference.block_id,
            "chunk_offset": difference.offset,
            "lacking": [names[int(i)] for i in difference.lacking],
            "sources": [names[int(i)] for i in difference.sources],
            "detail": details.get((difference.block_id, difference.offset), ""),
        }
        for difference in comparison.differences
    ]


def _contradiction(container_id: int, name: str, detail: str) -> Row:
    return {
        "kind": FindingKind.ROWS_CONTRADICT.value,
        "container_id": container_id,
        "lacking": [],
        "sources": [],
        "detail": f"{name}: {detail}",
    }


def _detail(found: Iterable[Evidence]) -> str:
    """What speaks of the container as a whole, and how often the rest was found; each
    place is in its finding.
    """
    counts = Counter((evidence.block_id is None, evidence.detail) for evidence in found)
    return "; ".join(
        text if is_general else f"{text} ({count}x)" for (is_general, text), count in counts.items()
    )


@dataclass(frozen=True, eq=False, slots=True)
class _ReplicaGroups:
    """Replicas by container: `container_of[i]` is the place of row i's container in
    `containers`, which ascend.
    """

    containers: Int64s
    container_of: Int64s
    takes_part: Bools
    # Rows of replicas that have several, and containers with such replicas.
    repeated: Int64s
    is_contradicted: Bools

    @classmethod
    def of(cls, replicas: pa.Table) -> Self:
        """Group rows of REPLICA_SCHEMA in any order."""
        container = _int64s(replicas["container_id"])
        keys = (ranks(replicas["volume"]), ranks(replicas["datanode"]), container)
        order = np.lexsort(keys)
        # Which rows, in this order, are as the one before.
        as_before = [np.diff(key[order], prepend=key[order[:1]] - 1) == 0 for key in keys]
        container_of = np.empty(len(order), np.int64)
        container_of[order] = np.cumsum(~as_before[-1]) - 1
        containers = container[order][~as_before[-1]]
        again = np.flatnonzero(np.logical_and.reduce(as_before))
        repeated = order[np.union1d(again, again - 1)]
        is_contradicted = np.zeros(len(containers), np.bool_)
        is_contradicted[container_of[repeated]] = True
        return cls(containers, container_of, _takes_part(replicas), repeated, is_contradicted)

    def number(self, rows: Bools) -> Int64s:
        """How many of these rows each container has."""
        return np.bincount(self.container_of[rows], minlength=len(self.containers))

    def any(self, rows: Bools) -> Bools:
        """Which containers have any of these rows."""
        return self.number(rows) > 0

    def contradictions(self, replicas: pa.Table) -> pa.Table:
        """A finding for each replica that has several rows."""
        rows = (
            replicas.select(["container_id", "datanode", "volume"]).take(self.repeated).to_pylist()
        )
        found = sorted(
            {(row["container_id"], f"{row['datanode']}/{row['volume']}") for row in rows}
        )
        return pa.Table.from_pylist(
            [_contradiction(*one, _CONTRADICTED) for one in found], FINDING_SCHEMA
        )


def _takes_part(replicas: pa.Table) -> Bools:
    """Which replicas are compared: closed ones that are not erasure-coded."""
    is_closed = _bools(pc.is_in(replicas["state"], value_set=_CLOSED))
    takes_part: Bools = is_closed & (_int64s(replicas["replica_index"]) == 0)
    return takes_part


def _int64s(column: pa.ChunkedArray) -> Int64s:
    return np.asarray(column.to_numpy(), np.int64)


def _bools(column: pa.ChunkedArray) -> Bools:
    return np.asarray(column.to_numpy(), np.bool_)
