"""Jobs by a plan: which replicas get an order, and whether the plan still fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId, root_hex
from scm.eligibility import OK, Eligibility, Ruling
from scm.policy import Target


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The order for one replica of a plan: the digest by which its agent knows it, and
    the root that it was made from.
    """

    container_id: ContainerId
    peer: PeerId
    digest: str
    data_checksum: int


def ruling_of_plan(
    container_id: ContainerId,
    planned: Sequence[PlannedOrder],
    replicas: Sequence[ContainerReplica],
    targets: Sequence[Target],
) -> Ruling:
    """Whether a plan of a container can be carried out: each of its replicas is live
    and writable, and has the root that the plan was made from.
    """
    held = {replica.peer: replica for replica in replicas}
    ordered = {target.peer for target in targets}
    for one in planned:
        replica = held.get(one.peer)
        start = f"The plan of container {container_id} no longer fits: the replica of {one.peer}"
        if replica is None or one.peer not in ordered:
            return Ruling(Eligibility.PLAN_CHANGED, f"{start} is gone, silent or read-only.")
        if replica.data_checksum != one.data_checksum:
            root = replica.data_checksum
            now = "unknown" if root is None else root_hex(root)
            then = root_hex(one.data_checksum)
            return Ruling(Eligibility.PLAN_CHANGED, f"{start} had root {then} and has {now}.")
    return OK
