"""The replicas of one datanode: all its volumes together, as servers, scanner, repairs
and reports see them.

What a report says of a replica is kept in memory and follows every change made here;
what a datanode changes under a read-only volume is seen at the next `refresh`. Both
threads of a scanner and a repair may meet in one container: trees are guarded by their
generation, everything else by the container's lock inside the writer; and what is
changed on disk and remembered of it is one step, so that nobody's older view is what is
reported in the end.
"""

import threading
from collections.abc import Callable, Sequence

from dnagent.events import AGENT_EVENTS
from dnagent.local_replica import LocalReplica
from dnagent.volumes import ManagedVolume
from merkle.columns import encode_tree
from merkle.merge import merge
from merkle.record import BlockRecord
from merkle.replica import ContainerReplica
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container
from ozone.errors import (
    ContainerNotFoundError,
    ReadOnlyError,
    TreeMissingError,
)
from ozone.ports import ReplicaHead
from ozone.scan import build_from_metadata
from runtime.errors import BusyError
from runtime.log import get_logger

_log = get_logger("store", AGENT_EVENTS)


class ReplicaStore:
    """All replicas of one datanode (ozone.ports.ReplicaSource). Thread-safe."""

    def __init__(
        self,
        volumes: Sequence[ManagedVolume],
        *,
        repair_enabled: bool,
        interrupt: Callable[[ContainerId], bool] = lambda _: True,
    ) -> None:
        """`interrupt` ends whatever repairs a container; True once nothing works in it
        any more.
        """
        self.volumes = tuple(volumes)
        self._repair_enabled = repair_enabled
        self._interrupt = interrupt

    def replicas(self) -> list[ContainerReplica]:
        """All replicas; of one found on two volumes, the first volume's."""
        found: dict[ContainerId, ContainerReplica] = {}
        for volume in self.volumes:
            for replica in volume.replicas():
                found.setdefault(replica.container_id, replica)
        return list(found.values())

    def volume_of(self, container_id: ContainerId) -> ManagedVolume:
        """The volume that holds the container.

        Raises:
            ContainerNotFoundError: none does.
        """
        for volume in self.volumes:
            try:
                volume.replica(container_id)
            except ContainerNotFoundError:
                continue
            return volume
        raise ContainerNotFoundError(
            f"there is no container {container_id} here", container_id=container_id
        )

    def head(self, container_id: ContainerId) -> ReplicaHead:
        """State, commit and index of a replica (ReplicaSource.head)."""
        replica = self.volume_of(container_id).replica(container_id)
        return ReplicaHead(replica.state, replica.bcs_id, replica.replica_index)

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        """The stored tree as Ozone's message; built from records if asked for."""
        volume = self.volume_of(container_id)
        raw = volume.tree_bytes(container_id)
        if raw is not None:
            return raw
        if build_missing:
            built = build_from_metadata(volume.containers.get(container_id))
            # The records of a block may outlive its tombstone in the file that is lost.
            return encode_tree(merge(built, volume.trees.read(container_id).known))
        raise TreeMissingError(
            f"container {container_id} has no tree yet", container_id=container_id
        )

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        """A block's record; None if there is none."""
        return self._container(container_id).record(block_id)

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        """Up to `count` records from `start` on, in the database's order."""
        container = self._container(container_id)
        # The database's own order: keys are decimal text.
        block_ids = sorted(container.block_ids(), key=str)
        if start is not None:
            if start not in block_ids:
                return []
            block_ids = block_ids[block_ids.index(start) :]
        found = (container.record(block_id) for block_id in block_ids[:count])
        return [record for record in found if record is not None]

    def read(
        self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int
    ) -> bytes:
        """Bytes of a block file; fewer where it ends."""
        return self._container(container_id).read(block_id, offset, length_bytes)

    def open_replica(
        self,
        container_id: ContainerId,
        job_id: str,
        *,
        cancelled: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> "LocalReplica":
        """The replica, to repair it; `on_bytes` hears of each byte that its scans read,
        `cancelled` ends them.

        Raises:
            ContainerNotFoundError: it is not here.
            ReadOnlyError: it may not be written.
        """
        volume = self.volume_of(container_id)
        if volume.writer is None:
            text = f"{volume.name} is held read-only"
            raise ReadOnlyError(
                text, hint='Set hold = "owner" for the volume, with its datanode stopped.'
            )
        if not self._repair_enabled:
            raise ReadOnlyError("repair is not enabled", hint="Set enabled = true in [repair].")
        return LocalReplica(
            volume, volume.writer, container_id, job_id, cancelled=cancelled, on_bytes=on_bytes
        )

    def delete_container(self, container_id: ContainerId) -> None:
        """Delete a replica; its reconciliation, if there is one, is ended first
        (CR-057).

        Raises:
            ContainerNotFoundError: it is not here.
            ReadOnlyError: its volume is held read-only.
            BusyError: its reconciliation did not end in time; nothing is deleted.
        """
        volume = self.volume_of(container_id)
        if volume.writer is None:
            raise ReadOnlyError(f"{volume.name} is held read-only")
        # First of all, so that no other reconciliation can begin behind the one that
        # ends.
        volume.forget(container_id)
        if not self._interrupt(container_id):
            volume.restore(container_id)
            raise BusyError(
                f"container {container_id} is still being repaired", container_id=container_id
            )
        volume.on_deleted(container_id, None)
        volume.writer.delete_container(container_id)
        _log.info("container_deleted", container_id=container_id, volume=volume.name)

    def close(self) -> None:
        """Give all volumes back."""
        for volume in self.volumes:
            volume.close()

    def _container(self, container_id: ContainerId) -> Container:
        return self.volume_of(container_id).containers.get(container_id)
