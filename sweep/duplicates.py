"""Replicas of one container on several volumes of a datanode.

Ozone uses one of them and ignores the others; so do agents. A sweep compares the one
that counts. Each other is a finding, because its bytes are no replica: Ozone may remove
it at the next start.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merkle.replica import ReplicaState, preferred_copy
from sweep.exact import Row
from sweep.model import FINDING_SCHEMA, FindingKind
from sweep.runs import ranks

_COLUMNS = ("container_id", "datanode", "volume", "state", "bcs_id", "replica_index")


def counting_replicas(replicas: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows of REPLICA_SCHEMA are of the volume that counts on their datanode.

    `replicas` holds all replicas of its containers, in any order.
    """
    counts = np.ones(replicas.num_rows, np.bool_)
    for copies in _copies(replicas):
        counting = _counting_volume(copies)
        counts[[place for place, row in copies if row["volume"] != counting]] = False
    return counts


def duplicate_findings(replicas: pa.Table) -> pa.Table:
    """A finding (FINDING_SCHEMA) for each replica that does not count."""
    found = list[Row]()
    for copies in _copies(replicas):
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


def _copies(replicas: pa.Table) -> list[list[tuple[int, Row]]]:
    """The rows of each container that several volumes of a datanode hold, by volume,
    each with its place in the table.
    """
    container = replicas["container_id"].to_numpy()
    keys = (ranks(replicas["volume"]), ranks(replicas["datanode"]), container)
    order = np.lexsort(keys)
    is_new = [np.diff(key[order], prepend=key[order[:1]] - 1) != 0 for key in keys]
    groups = np.cumsum(is_new[1] | is_new[2]) - 1
    volumes = np.zeros(len(order), np.int64)
    np.add.at(volumes, groups, is_new[0] | is_new[1] | is_new[2])
    places = order[volumes[groups] > 1]
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
