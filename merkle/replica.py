"""A replica as a datanode reports it: its peer, its state and its root.

The tree itself stays on the datanode. An unknown root is None, never 0, which is the
root of an empty tree. Ozone's reports use 0 for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from merkle.tree import ContainerId

# A datanode's UUID.
PeerId = NewType("PeerId", str)


class ReplicaState(Enum):
    """Ozone's states of a replica; the values are the names in descriptors and
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
        """Whether clients no longer write to it. Only then it has a tree and may be
        repaired.
        """
        return self in _CLOSED


class ContainerState(Enum):
    """The life cycle of a container, by the names of Ozone's SCM."""

    OPEN = "OPEN"
    CLOSING = "CLOSING"
    QUASI_CLOSED = "QUASI_CLOSED"
    CLOSED = "CLOSED"
    DELETING = "DELETING"
    DELETED = "DELETED"
    RECOVERING = "RECOVERING"


class TreeSource(Enum):
    """What a replica's tree is built from."""

    # The stored tree file, or the block records if there is none.
    TREE = "tree"
    # The block records.
    METADATA = "metadata"
    # The chunks' bytes.
    DATA = "data"


_CLOSED = frozenset({ReplicaState.QUASI_CLOSED, ReplicaState.CLOSED, ReplicaState.UNHEALTHY})


@dataclass(frozen=True, slots=True)
class ContainerReplica:
    """One datanode's replica of a container, as last reported; a `replica_index` above
    0 means erasure-coded.
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
    # The agent opened the volume read-only and refuses to repair it.
    read_only: bool = False
    # merkle.columns.state_fingerprint of the tree: unlike roots, fingerprints of
    # different trees are not equal by accident.
    fingerprint: bytes = b""

    @property
    def is_erasure_coded(self) -> bool:
        """Whether this replica is one part of an erasure-coded container."""
        return self.replica_index > 0


def preferred_copy(copies: Sequence[tuple[ReplicaState, int, int]]) -> int:
    """Which of the replicas of one container on several volumes of a datanode counts,
    as an index. Of each are given its state, its commit and its replica index.

    Ozone's rule: a CLOSED one, then the one with the highest commit, then the first. A
    replica that cannot be read comes last. Among erasure-coded ones, which have no
    commit, the first counts.
    """
    if any(replica_index > 0 for _, _, replica_index in copies):
        return 0

    def rank(index: int) -> tuple[bool, bool, int, int]:
        state, bcs_id, _ = copies[index]
        return state is not ReplicaState.INVALID, state is ReplicaState.CLOSED, bcs_id, -index

    return max(range(len(copies)), key=rank)
