"""Compare the replicas of every container: the equal ones by their sums alone, the others block by block.

`compare_replicas` decides at once what `merkle.plan` would say of replicas that are equal in root and fingerprint,
hold no corrupt chunk and nothing that might be judged otherwise by its place. All that is left is a candidate, to be
decided by `merkle.plan.compare` itself on the trees of its rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merkle.plan import Verdict
from merkle.replica import ReplicaState
from spark.model import FINDING_SCHEMA, VERDICT_SCHEMA, FindingKind, Path

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"
Bools: TypeAlias = "NDArray[np.bool_]"

_CLOSED = pa.array([state.value for state in ReplicaState if state.is_closed])
_CONTRADICTED = "one replica is in the input more than once"


@dataclass(frozen=True, slots=True)
class Compared:
    """What sums alone decide: VERDICT_SCHEMA, the ascending IDs of the containers to inspect, and FINDING_SCHEMA."""

    verdicts: pa.Table
    candidates: Int64s
    findings: pa.Table


def compare_replicas(replicas: pa.Table) -> Compared:
    """Decide the containers whose replicas are equal, or of which nothing can be told; the others are candidates.

    `replicas` is of REPLICA_SCHEMA, in any order, and holds all replicas of the containers in it. A replica with
    several rows is a finding, and its container UNKNOWN: nothing says which row is the true one.
    """
    grouped = _Grouped.of(replicas)
    root, is_known = _int64s(pc.fill_null(replicas["root"], 0)), _bools(pc.is_valid(replicas["root"]))
    told, untold = grouped.takes_part & is_known, grouped.takes_part & ~is_known
    blocks, chunks = _int64s(replicas["blocks"]), _int64s(replicas["chunks"])

    # Every replica is held against one of its container that has a root, whichever.
    reference = np.zeros(len(grouped.containers), np.int64)
    reference[grouped.container_of[told]] = np.flatnonzero(told)
    theirs = reference[grouped.container_of]
    is_sql = _bools(pc.equal(replicas["path"], Path.SQL.value))
    sums = (root, _int64s(replicas["fingerprint"]), is_sql)
    differs = np.logical_or.reduce([column != column[theirs] for column in sums])
    # Chunks without checksums leave the others of their block to be judged place by place, equal as they may be.
    has_both = (_int64s(replicas["unverifiable"]) > 0) & (chunks > 0)
    undecided = told & (differs | has_both | (_int64s(replicas["corrupt"]) > 0))
    # Where there is no root, there may be tombstones all the same.
    undecided |= untold & (blocks > 0)

    is_candidate = grouped.any(undecided) & ~grouped.is_contradicted
    is_verified = grouped.any(told & ((chunks > 0) | (_int64s(replicas["deleted_blocks"]) > 0)))
    taking_part, unknown = grouped.number(grouped.takes_part), grouped.number(untold)
    is_match = is_verified & (taking_part >= 2) & (unknown == 0) & ~grouped.is_contradicted
    # The last that applies is told. An array of objects holds each text once.
    detail = np.full(len(grouped.containers), "", object)
    detail[~is_verified] = "no block has recorded checksums"
    detail[~grouped.any(grouped.takes_part & (blocks > 0))] = "there are no blocks, as after a failed scan"
    for missing, of_all in set(zip(unknown[unknown > 0].tolist(), taking_part[unknown > 0].tolist(), strict=True)):
        detail[(unknown == missing) & (taking_part == of_all)] = f"{missing} of {of_all} replicas have no root"
    detail[taking_part == 1] = "only one replica takes part"
    detail[taking_part == 0] = "no replica takes part"
    detail[grouped.is_contradicted] = _CONTRADICTED

    decided = ~is_candidate
    verdicts = pa.table(
        {
            "container_id": grouped.containers[decided],
            "verdict": np.where(is_match[decided], Verdict.MATCH.value, Verdict.UNKNOWN.value),
            "replicas": grouped.number(np.ones_like(told))[decided],
            "excluded": grouped.number(~grouped.takes_part)[decided],
            "diverged": np.zeros(np.count_nonzero(decided), np.bool_),
            "detail": detail[decided],
        },
        VERDICT_SCHEMA,
    )
    return Compared(verdicts, grouped.containers[is_candidate], grouped.contradictions(replicas))


@dataclass(frozen=True, eq=False, slots=True)
class _Grouped:
    """Replicas by container: `container_of[i]` is the place of row i's container in `containers`, which ascend."""

    containers: Int64s
    container_of: Int64s
    takes_part: Bools
    # Rows of replicas that have several, and containers with such replicas.
    repeated: Int64s
    is_contradicted: Bools

    @classmethod
    def of(cls, replicas: pa.Table) -> Self:
        container = _int64s(replicas["container_id"])
        keys = (_codes(replicas["volume"]), _codes(replicas["datanode"]), container)
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
        is_closed = _bools(pc.is_in(replicas["state"], value_set=_CLOSED))
        takes_part = is_closed & (_int64s(replicas["replica_index"]) == 0)
        return cls(containers, container_of, takes_part, repeated, is_contradicted)

    def number(self, rows: Bools) -> Int64s:
        """How many of these rows each container has."""
        return np.bincount(self.container_of[rows], minlength=len(self.containers))

    def any(self, rows: Bools) -> Bools:
        """Which containers have any of these rows."""
        return self.number(rows) > 0

    def contradictions(self, replicas: pa.Table) -> pa.Table:
        """A finding for each replica that has several rows."""
        rows = replicas.select(["container_id", "datanode", "volume"]).take(self.repeated).to_pylist()
        found = sorted({(row["container_id"], f"{row['datanode']}/{row['volume']}") for row in rows})
        return pa.Table.from_pylist(
            [
                {
                    "kind": FindingKind.ROWS_CONTRADICT.value,
                    "container_id": container_id,
                    "lacking": [name],
                    "sources": [],
                    "detail": _CONTRADICTED,
                }
                for container_id, name in found
            ],
            FINDING_SCHEMA,
        )


def _int64s(column: pa.ChunkedArray) -> Int64s:
    return np.asarray(column.to_numpy(), np.int64)


def _bools(column: pa.ChunkedArray) -> Bools:
    return np.asarray(column.to_numpy(), np.bool_)


def _codes(column: pa.ChunkedArray) -> Int64s:
    """Numbers that are equal where the strings are."""
    coded = column.dictionary_encode().unify_dictionaries()
    codes = [chunk.indices.to_numpy() for chunk in coded.chunks]
    return np.concatenate(codes).astype(np.int64, copy=False) if codes else np.zeros(0, np.int64)
