"""What a replica is from outside."""

from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId


def test_only_what_no_client_writes_to_is_closed() -> None:
    """wire-I1, T8: the other states have no tree to serve and nothing that may be
    repaired.
    """
    assert {state.name for state in ReplicaState if state.is_closed} == {
        "QUASI_CLOSED",
        "CLOSED",
        "UNHEALTHY",
    }


def test_a_replica_index_tells_erasure_coding() -> None:
    """T3"""

    def replica(index: int) -> ContainerReplica:
        return ContainerReplica(
            PeerId("dn-a"),
            ContainerId(12),
            ReplicaState.CLOSED,
            data_checksum=None,
            bcs_id=7,
            replica_index=index,
        )

    assert [replica(index).is_erasure_coded for index in (0, 1, 5)] == [False, True, True]
