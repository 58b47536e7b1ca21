"""Compare the replicas of every container: equal ones by root and fingerprint, the
others block by block.

`compare_replicas` decides containers whose replicas are equal in root and fingerprint
and hold no corrupt or unverifiable chunk. Its verdicts are those of
`merkle.comparison`. All other containers are candidates: `inspect` builds their trees
from their rows and compares them with `merkle.comparison.compare`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import REPLICA_COLUMNS
from merkle.columns import TreeColumns
from merkle.outcome import DIVERGED_VERDICTS, Verdict, worst_verdict
from merkle.replica import ReplicaState
from merkle.tree import ContainerId, ContainerTree
from sweep.block_comparison import FindingBuffer, compare_blocks, in_order
from sweep.duplicates import counting_replicas
from sweep.exact import (
    EMPTY_ROW,
    NULLABLE_ROWS,
    SUMS,
    Row,
    exact_replicas,
    join_roots,
    replica_dicts,
    replica_key,
    trees_of,
)
from sweep.fragments import Bools, Int64s
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    VERDICT_SCHEMA,
    FindingKind,
    NotCompared,
    RootMethod,
)
from sweep.order import ReplicaOrder

_CLOSED = pa.array([state.value for state in ReplicaState if state.is_closed])

# States of replicas that can be excluded by design. The state of an INVALID one is not
# known.
_BY_DESIGN = pa.array([state.value for state in ReplicaState if state is not ReplicaState.INVALID])

_CONTRADICTED = "one replica is in the input more than once"

_CHANGED = "the rows are not those that the root was computed from"


@dataclass(frozen=True, slots=True)
class ContainerVerdicts:
    """The containers decided by their replicas' sums (VERDICT_SCHEMA), findings
    (FINDING_SCHEMA), and the ascending IDs of the containers to inspect.
    """

    verdicts: pa.Table
    candidates: Int64s
    findings: pa.Table


def compare_replicas(replicas: pa.Table, order: ReplicaOrder | None = None) -> ContainerVerdicts:
    """Decide the containers whose replicas are equal or cannot be compared; the others
    are candidates.

    `replicas` is of REPLICA_SCHEMA, in any order, and holds all replicas of its
    containers; `order` is its order, if it is known. A replica with several rows is a
    finding, and its container is UNKNOWN: nothing shows which row is correct.
    """
    replicas = _without_invalid_roots(replicas)
    grouped = _ReplicaGroups.of(replicas, order or ReplicaOrder.of(replicas))
    root = _int64s(pc.fill_null(replicas["root"], 0))
    is_known = _bools(pc.is_valid(replicas["root"]))
    has_root, lacks_root = grouped.takes_part & is_known, grouped.takes_part & ~is_known
    blocks, chunks = _int64s(replicas["blocks"]), _int64s(replicas["chunks"])

    # Every replica is compared with one reference replica: any with a root will do.
    reference = np.zeros(len(grouped.containers), np.int64)
    reference[grouped.container_of[has_root]] = np.flatnonzero(has_root)
    theirs = reference[grouped.container_of]
    is_sql = _bools(pc.equal(replicas["path"], RootMethod.SQL.value))
    sums = (root, _int64s(replicas["fingerprint"]), is_sql)
    differs = np.logical_or.reduce([column != column[theirs] for column in sums])
    # With both verifiable and unverifiable chunks, equal sums do not decide: blocks are
    # judged chunk by chunk, and the verdict lists what could not be verified.
    has_both = (_int64s(replicas["unverifiable"]) > 0) & (
        (chunks > 0) | (_int64s(replicas["deleted_blocks"]) > 0)
    )
    undecided = has_root & (differs | has_both | (_int64s(replicas["corrupt"]) > 0))

    is_candidate = grouped.any(undecided) & ~grouped.is_contradicted
    is_verified = grouped.any(has_root & ((chunks > 0) | (_int64s(replicas["deleted_blocks"]) > 0)))
    taking_part, unknown = grouped.count(grouped.takes_part), grouped.count(lacks_root)
    is_match = is_verified & (taking_part >= 2) & (unknown == 0) & ~grouped.is_contradicted
    # The last detail that applies wins. An array of objects stores each text once.
    detail = np.full(len(grouped.containers), "", object)
    detail[~is_verified] = "no block has recorded checksums"
    detail[~grouped.any(grouped.takes_part & (blocks > 0))] = (
        "the trees are empty: no checksums are recorded, or a scan failed"
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

    verdict = np.where(is_match, Verdict.MATCH.value, Verdict.UNKNOWN.value).astype(object)
    is_by_design = (taking_part == 0) & ~grouped.is_contradicted
    is_by_design &= ~grouped.any(~_bools(pc.is_in(replicas["state"], value_set=_BY_DESIGN)))
    verdict[is_by_design] = NotCompared.EXCLUDED.value
    detail[is_by_design] = "open, erasure-coded or deleted: excluded by design"
    verdicts = pa.table(
        {
            "container_id": grouped.containers[decided := ~is_candidate],
            "verdict": verdict[decided],
            "replicas": grouped.count(np.ones_like(has_root))[decided],
            "excluded": grouped.count(~grouped.takes_part)[decided],
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
    """Verdicts (VERDICT_SCHEMA) and findings (FINDING_SCHEMA), ascending by
    container.
    """

    verdicts: pa.Table
    findings: pa.Table


def inspect(rows: pa.Table, replicas: pa.Table) -> InspectionResult:
    """Decide the candidates of `compare_replicas` by their rows (CHUNK_SCHEMA).

    `replicas` (REPLICA_SCHEMA) holds all replicas of these containers and no others;
    rows of other containers are ignored. A replica whose rows are missing, or do not
    fold to its root, is a finding, and its container is UNKNOWN: the two were read from
    different states of the replica.
    """
    by_container: dict[int, list[Row]] = {}
    replicas = _without_invalid_roots(replicas)
    names = ["container_id", "datanode", "volume", "root"]
    takes_part = _takes_part(replicas, ReplicaOrder.of(replicas))
    chosen = replicas.select(names).append_column("takes_part", pa.array(takes_part))
    for replica in chosen.to_pylist():
        by_container.setdefault(replica["container_id"], []).append(replica)
    decided, findings = list[Row](), FindingBuffer()
    for container_id, group in groupby(trees_of(rows), lambda pair: pair[0].container_id):
        if container_id in by_container:
            trees = {(identity.datanode, identity.volume): tree for identity, tree in group}
            decided.append(_decide(container_id, by_container.pop(container_id), trees, findings))
    found = findings.table()
    if by_container:
        decided += [
            _decide(ContainerId(container_id), without_rows, {}, findings)
            for container_id, without_rows in by_container.items()
        ]
        decided.sort(key=lambda verdict: int(verdict["container_id"]))
        found = in_order(findings.table(), "container_id")
    return InspectionResult(pa.Table.from_pylist(decided, VERDICT_SCHEMA), found)


def inspect_large(ranges: Iterable[pa.Table], replicas: pa.Table) -> InspectionResult:
    """Like `inspect`, for one container whose rows come in ranges of blocks.

    Each range is compared as if it were a container. This is exact: findings concern
    single blocks, and the sums of the ranges add up to the container's, including the
    root (sweep.fragments).
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
        ours = pa.Table.from_pylist(
            [_replica_in_range(replica, here) for replica in whole], REPLICA_SCHEMA
        )
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
        and join_roots(pieces.get(replica_key(replica), ())) != replica["root"]
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


def _replica_in_range(replica: Row, here: dict[tuple[object, ...], Row]) -> Row:
    """The row of a replica for one range of blocks; empty if it has none there."""
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
    """The verdict of a container, from those of its ranges."""
    known = (verdict for verdict in verdicts if verdict is not Verdict.UNKNOWN)
    worst = worst_verdict(known) or Verdict.UNKNOWN
    lost = any(
        pc.any(pc.equal(pc.list_value_length(found["sources"]), 0)).as_py()
        for verdict, found in zip(verdicts, findings, strict=True)
        if verdict is Verdict.UNKNOWN
    )
    # A replica without a tree may hold what a range reports as lost, so the container
    # stays UNKNOWN.
    return Verdict.UNKNOWN if lost else worst


def _decide(
    container_id: ContainerId,
    replicas: Sequence[Row],
    trees: Mapping[tuple[str, str], TreeColumns],
    findings: FindingBuffer,
) -> Row:
    """The row of VERDICT_SCHEMA for one container; its findings are added."""
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
        findings.add([_contradiction(container_id, name, _CHANGED) for name in sorted(changed)])
    else:
        named.sort(key=lambda pair: pair[0])
        verdict, detail = compare_blocks(container_id, named, findings)
    return {
        "container_id": container_id,
        "verdict": verdict.value,
        "replicas": len(replicas),
        "excluded": sum(not replica["takes_part"] for replica in replicas),
        "diverged": verdict in DIVERGED_VERDICTS,
        "detail": detail,
    }


def _contradiction(container_id: int, name: str, detail: str) -> Row:
    return {
        "kind": FindingKind.ROWS_CONTRADICT.value,
        "container_id": container_id,
        "lacking": [],
        "sources": [],
        "detail": f"{name}: {detail}",
    }


@dataclass(frozen=True, eq=False, slots=True)
class _ReplicaGroups:
    """Replicas grouped by container: `container_of[i]` is the index of row i's
    container in `containers`, which ascend.
    """

    containers: Int64s
    container_of: Int64s
    takes_part: Bools
    # Rows of replicas that have several, and containers with such replicas.
    repeated: Int64s
    is_contradicted: Bools

    @classmethod
    def of(cls, replicas: pa.Table, order: ReplicaOrder) -> Self:
        """Group rows of REPLICA_SCHEMA in any order."""
        container_of = np.empty(len(order.rows), np.int64)
        container_of[order.rows] = np.cumsum(order.begins_container) - 1
        containers = _int64s(replicas["container_id"])[order.rows[order.begins_container]]
        again = np.flatnonzero(~order.begins_volume)
        repeated = order.rows[np.union1d(again, again - 1)]
        is_contradicted = np.zeros(len(containers), np.bool_)
        is_contradicted[container_of[repeated]] = True
        takes_part = _takes_part(replicas, order)
        return cls(containers, container_of, takes_part, repeated, is_contradicted)

    def count(self, rows: Bools) -> Int64s:
        """The count of these rows that each container has."""
        return np.bincount(self.container_of[rows], minlength=len(self.containers))

    def any(self, rows: Bools) -> Bools:
        """Which containers have any of these rows."""
        return self.count(rows) > 0

    def contradictions(self, replicas: pa.Table) -> pa.Table:
        """A finding for each replica that has several rows."""
        rows = (
            replicas.select(["container_id", "datanode", "volume"]).take(self.repeated).to_pylist()
        )
        found = sorted(
            {(row["container_id"], f"{row['datanode']}/{row['volume']}") for row in rows}
        )
        return pa.Table.from_pylist(
            [_contradiction(*replica, _CONTRADICTED) for replica in found], FINDING_SCHEMA
        )


def _takes_part(replicas: pa.Table, order: ReplicaOrder) -> Bools:
    """Which replicas are compared: closed ones that are not erasure-coded, and INVALID
    ones as replicas without a root. Of several on one datanode, only the one that
    counts can be.
    """
    is_closed = _bools(pc.is_in(replicas["state"], value_set=_CLOSED))
    # It may be closed, and hold damage or the only good data.
    is_invalid = ~_bools(pc.is_in(replicas["state"], value_set=_BY_DESIGN))
    takes_part: Bools = (is_closed | is_invalid) & (_int64s(replicas["replica_index"]) == 0)
    takes_part &= counting_replicas(replicas, order)
    return takes_part


def _without_invalid_roots(replicas: pa.Table) -> pa.Table:
    """The replicas (REPLICA_SCHEMA), INVALID ones without a root: what was read of one
    is not what it holds.
    """
    at = replicas.schema.get_field_index("root")
    is_readable = pc.is_in(replicas["state"], value_set=_BY_DESIGN)
    root = pc.if_else(is_readable, replicas["root"], pa.scalar(None, pa.int64()))
    return replicas.set_column(at, replicas.schema.field(at), root)


def _int64s(column: pa.ChunkedArray) -> Int64s:
    return np.asarray(column.to_numpy(), np.int64)


def _bools(column: pa.ChunkedArray) -> Bools:
    return np.asarray(column.to_numpy(), np.bool_)
