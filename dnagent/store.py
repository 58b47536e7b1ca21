"""The replicas on all volumes of one datanode, for the server, repairs and reports.

Reports come from memory, which is updated with every change made here. Changes by a
datanode that owns the volume are found by the next `refresh`. A repair and both threads
of a scanner may work on the same container. The generation guards its tree; the
container's lock in the writer guards the rest. A change on disk and its update in
memory are one step, so that a stale view never overwrites a newer one.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dnagent.events import AGENT_EVENTS
from dnagent.local_replica import LocalReplica
from dnagent.volumes import ManagedVolume
from merkle.columns import encode_tree
from merkle.merge import merge
from merkle.record import BlockRecord
from merkle.replica import ContainerReplica, preferred_copy
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


def preferred(replicas: Sequence[ContainerReplica]) -> int:
    """Which of the replicas of one container on several volumes counts, as an index
    (merkle.replica.preferred_copy).
    """
    return preferred_copy([(one.state, one.bcs_id, one.replica_index) for one in replicas])


class ReplicaStore:
    """All replicas of one datanode (ozone.ports.ReplicaSource). Thread-safe."""

    def __init__(
        self,
        volumes: Sequence[ManagedVolume],
        *,
        repair_enabled: bool,
        interrupt: Callable[[ContainerId], bool] = lambda _: True,
    ) -> None:
        """`interrupt` ends the repair of a container. It returns True once no repair
        runs.
        """
        self.volumes = tuple(volumes)
        self._repair_enabled = repair_enabled
        self._interrupt = interrupt
        # Containers whose bytes are not served: an undo may be about to spoil them.
        self._withheld: set[ContainerId] = set()

    def replicas(self) -> list[ContainerReplica]:
        """All replicas; for a container on several volumes, the one that counts."""
        return [found[preferred(found)] for found in self._by_container().values()]

    def duplicates(self) -> dict[ContainerId, tuple[str, ...]]:
        """The containers on several volumes, each with the names of these: that of the
        replica that counts first.
        """
        return {
            container_id: self._names(container_id)
            for container_id, found in self._by_container().items()
            if len(found) > 1
        }

    def volume_of(self, container_id: ContainerId) -> ManagedVolume:
        """The volume that holds the container; of several, that of the replica that
        counts.

        Raises:
            ContainerNotFoundError: no volume holds it.
        """
        volumes, replicas = self._holders(container_id)
        if not volumes:
            raise ContainerNotFoundError(
                f"there is no container {container_id} here", container_id=container_id
            )
        return volumes[preferred(replicas)]

    def head(self, container_id: ContainerId) -> ReplicaHead:
        """State, commit and replica index (ReplicaSource.head)."""
        replica = self.volume_of(container_id).replica(container_id)
        return ReplicaHead(replica.state, replica.bcs_id, replica.replica_index)

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        """The stored tree as Ozone's message (ReplicaSource.tree_bytes)."""
        volume = self.volume_of(container_id)
        raw = volume.tree_bytes(container_id)
        if raw is not None:
            return raw
        if build_missing:
            built = build_from_metadata(volume.containers.get(container_id))
            # Merged, because a deleted block may still have a record.
            return encode_tree(merge(built, volume.trees.read(container_id).known))
        raise TreeMissingError(
            f"container {container_id} has no tree yet", container_id=container_id
        )

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        """A block's record; None if there is none (ReplicaSource.record)."""
        return self._container(container_id).record(block_id)

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        """Up to `count` records from `start` on, in the database's order
        (ReplicaSource.records).
        """
        container = self._container(container_id)
        # In the database keys are decimal text, ordered as text.
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
        """Bytes of a block file; fewer if it ends (ReplicaSource.read).

        Raises:
            BusyError: the container's bytes are withheld.
        """
        if container_id in self._withheld:
            text = f"a job of container {container_id} is being undone here"
            raise BusyError(text, container_id=container_id)
        return self._container(container_id).read(block_id, offset, length_bytes)

    @contextmanager
    def withheld(self, container_id: ContainerId) -> Iterator[None]:
        """Serve no bytes of a container meanwhile, so that nobody counts on them."""
        self._withheld.add(container_id)
        try:
            yield
        finally:
            self._withheld.discard(container_id)

    def open_replica(
        self,
        container_id: ContainerId,
        job_id: str,
        *,
        cancelled: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> "LocalReplica":
        """Open a replica for repair. Its scans report the bytes they read to `on_bytes`
        and end when `cancelled` is set.

        Raises:
            ContainerNotFoundError: the container is not on this datanode.
            ReadOnlyError: repair is disabled, or the volume is held read-only.
        """
        volume = self.volume_of(container_id)
        # First: without repair an owner's volume is held read-only too.
        if not self._repair_enabled:
            raise ReadOnlyError("repair is not enabled", hint="Set enabled = true in [repair].")
        if volume.writer is None:
            text = f"{volume.name} is held read-only"
            raise ReadOnlyError(
                text, hint='Set hold = "owner" for the volume, with its datanode stopped.'
            )
        return LocalReplica(
            volume, volume.writer, container_id, job_id, cancelled=cancelled, on_bytes=on_bytes
        )

    def delete_container(self, container_id: ContainerId) -> None:
        """Delete a replica, after ending its reconciliation if one runs (CR-057).

        Raises:
            ContainerNotFoundError: the container is not on this datanode.
            ReadOnlyError: its volume is held read-only.
            BusyError: its reconciliation did not end in time; nothing is deleted.
        """
        volume = self.volume_of(container_id)
        if volume.writer is None:
            raise ReadOnlyError(f"{volume.name} is held read-only")
        # Before the interrupt, so that no other reconciliation starts after it.
        volume.forget(container_id)
        if not self._interrupt(container_id):
            volume.load(container_id)
            raise BusyError(
                f"container {container_id} is still being repaired", container_id=container_id
            )
        volume.on_deleted(container_id, None)
        volume.writer.delete_container(container_id)
        _log.info("container_deleted", container_id=container_id, volume=volume.name)

    def close(self) -> None:
        """Close all volumes."""
        for volume in self.volumes:
            volume.close()

    def _by_container(self) -> dict[ContainerId, list[ContainerReplica]]:
        found: dict[ContainerId, list[ContainerReplica]] = {}
        for volume in self.volumes:
            for replica in volume.replicas():
                found.setdefault(replica.container_id, []).append(replica)
        return found

    def _holders(
        self, container_id: ContainerId
    ) -> tuple[list[ManagedVolume], list[ContainerReplica]]:
        volumes, replicas = [], []
        for volume in self.volumes:
            with suppress(ContainerNotFoundError):
                replicas.append(volume.replica(container_id))
                volumes.append(volume)
        return volumes, replicas

    def _names(self, container_id: ContainerId) -> tuple[str, ...]:
        volumes, replicas = self._holders(container_id)
        if not volumes:
            # Deleted meanwhile.
            return ()
        counts = volumes[preferred(replicas)]
        return counts.name, *(volume.name for volume in volumes if volume is not counts)

    def _container(self, container_id: ContainerId) -> Container:
        return self.volume_of(container_id).containers.get(container_id)
