"""A replica seen from outside: who holds it, in which state, with which root.

This is what a report says of a replica; the tree itself stays on its datanode. An
unknown root is None, never 0: zero is the root of an empty tree, and Ozone's reports
use it for both.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from merkle.tree import ContainerId

# A datanode's UUID.
PeerId = NewType("PeerId", str)


class ReplicaState(Enum):
    """States of a replica on its datanode; the values are the names in descriptors and
    reports.
    """

    OPEN = "OPEN"
    CLOSING = "CLOSING"
    QUASI_CLOSED = "QUASI_CLOSED"
    CLOSED = "CLOSED"
    UNHEALTHY = "UNHEALTHY"
    INVALID = "INVALID"
    DELETED = "DELETED"
    RECOVERING = "RECOVERING"

    @property
    def is_closed(self) -> bool:
        """Whether no client writes to it any more, so that it has a tree and its chunks
        may be repaired.
        """
        return self in _CLOSED


class TreeSource(Enum):
    """Which truth of a replica its tree is taken from."""

    # The stored tree file; the block records where there is none.
    TREE = "tree"
    METADATA = "metadata"
    DATA = "data"


_CLOSED = frozenset({ReplicaState.QUASI_CLOSED, ReplicaState.CLOSED, ReplicaState.UNHEALTHY})


@dataclass(frozen=True, slots=True)
class ContainerReplica:
    """One datanode's replica of a container, as last reported; `replica_index` above 0
    means erasure-coded.
    """

    peer: PeerId
    container_id: ContainerId
    state: ReplicaState
    data_checksum: int | None
    bcs_id: int
    replica_index: int = 0
    used_bytes: int = 0
    block_count: int = 0
    data_scan_timestamp_ms: int | None = None
    # Whether its agent holds the volume read-only and so refuses to repair it.
    read_only: bool = False
    # Of the tree's full state: equal exactly when the states are, where roots may be
    # equal by accident.
    fingerprint: bytes = b""

    @property
    def is_erasure_coded(self) -> bool:
        """Whether this replica is one part of an erasure-coded container."""
        return self.replica_index > 0
