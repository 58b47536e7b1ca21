"""Replicas of one container on several volumes of a datanode.

Ozone uses one of them and ignores the others; so do agents. A sweep compares the one
that counts. Each other is a finding, because its bytes are no replica: Ozone may remove
it at the next start.
"""

import numpy as np
import pyarrow as pa

from merkle.replica import ReplicaState, preferred_copy
from sweep.exact import Row
from sweep.fragments import Bools
from sweep.model import FINDING_SCHEMA, FindingKind
from sweep.order import ReplicaOrder

_COLUMNS = ("container_id", "datanode", "volume", "state", "bcs_id", "replica_index")


def counting_replicas(replicas: pa.Table, order: ReplicaOrder | None = None) -> Bools:
    """Which rows of REPLICA_SCHEMA are of the volume that counts on their datanode.

    `replicas` holds all replicas of its containers; `order` is its order, if known.
    """
    counts = np.ones(replicas.num_rows, np.bool_)
    for copies in _copies(replicas, order):
        counting = _counting_volume(copies)
        counts[[place for place, row in copies if row["volume"] != counting]] = False
    return counts


def duplicate_findings(replicas: pa.Table, order: ReplicaOrder | None = None) -> pa.Table:
    """A finding (FINDING_SCHEMA) for each replica that does not count."""
    found = list[Row]()
    for copies in _copies(replicas, order):
        counting = _counting_volume(copies)
        for volume in sorted({row["volume"] for _, row in copies} - {counting}):
            row = next(row for _, row in copies if row["volume"] == volume)
            found.append(
                {
                    "kind": FindingKind.DUPLICATE_REPLICA.value,
                    "container_id": row["container_id"],
                    "lacking": [],
                    "sources": [],
                    "detail": f"{row['datanode']}/{volume}: {row['state']} with bcs_id"
                    f" {row['bcs_id']}; the replica on {counting} counts, by Ozone's rule",
                }
            )
    return pa.Table.from_pylist(found, FINDING_SCHEMA)


def _copies(replicas: pa.Table, order: ReplicaOrder | None) -> list[list[tuple[int, Row]]]:
    """The rows of each container that several volumes of a datanode hold, by volume,
    each with its place in the table.
    """
    order = order or ReplicaOrder.of(replicas)
    if np.array_equal(order.begins_volume, order.begins_datanode):
        return []
    groups = np.cumsum(order.begins_datanode) - 1
    volumes = np.bincount(groups[order.begins_volume])
    places = order.rows[volumes[groups] > 1]
    rows = replicas.select(_COLUMNS).take(places).to_pylist()
    found: dict[tuple[int, str], list[tuple[int, Row]]] = {}
    for place, row in zip(places.tolist(), rows, strict=True):
        found.setdefault((row["container_id"], row["datanode"]), []).append((place, row))
    return list(found.values())


def _counting_volume(copies: list[tuple[int, Row]]) -> str:
    best = preferred_copy(
        [(ReplicaState(row["state"]), row["bcs_id"], row["replica_index"]) for _, row in copies]
    )
    volume: str = copies[best][1]["volume"]
    return volume
