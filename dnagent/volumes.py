"""The replicas of one volume, as its scanner and the repairs see them."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from dnagent.events import AGENT_EVENTS
from dnagent.scanner import CompletedScan, ScanCandidate, ScanDepth
from merkle.columns import state_fingerprint
from merkle.errors import ReconcileError, RecordInvalidError
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import ContainerStore
from ozone.errors import (
    ContainerNotFoundError,
    DescriptorError,
    VolumeError,
)
from ozone.mapped import MappedReader
from ozone.repair_writer import RepairWriter
from ozone.rocks import Counter, OzoneTable, counter_key
from ozone.scan import ScanResult, build_from_metadata, scan, scan_metadata
from ozone.survey import VolumeSurvey
from ozone.treefile import TreeFiles, TreeStatus
from ozone.undo import UndoStore
from ozone.volume import Hold, Volume
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError
from runtime.log import error_fields, get_logger
from runtime.retry import Backoff

_log = get_logger("store", AGENT_EVENTS)

# A scan after a repair is repeated when another writer of the tree was faster; so often
# is enough.
RESCAN_BACKOFF = Backoff(attempts_max=4, first_s=0.1, most_s=2.0)


# Containers that are asked whether a database is lost or a part of it.
_PROBES = 16


class ManagedVolume:
    """The replicas of one volume, for its scanner (dnagent.scanner.ScannedVolume).
    Thread-safe.
    """

    def __init__(
        self,
        volume: Volume,
        disk: Disk,
        *,
        undo_bytes: int,
        mapped: MappedReader | None = None,
        on_deleted: Callable[[ContainerId, Sequence[BlockId] | None], None] = lambda *_: None,
    ) -> None:
        """Look at every replica once, and finish what a deletion cut short has left;
        `mapped` is closed with it.

        `on_deleted` hears of blocks, or of the whole container where it gets None,
        before they are deleted.

        Raises:
            VolumeError, DatabaseError, DiskError: the volume as a whole cannot be used.
        """
        self.volume = volume
        self.name = str(volume.root)
        self.containers = ContainerStore(volume, disk)
        self.trees = TreeFiles(volume, disk, on_deleted=on_deleted)
        self.on_deleted = on_deleted
        self.undo = UndoStore(volume.state_folder / "undo", disk, budget_bytes=undo_bytes)
        owned = volume.hold is Hold.OWNER
        self.writer = RepairWriter(volume, self.trees, self.undo, disk) if owned else None
        self._disk = disk
        self._mapped = mapped
        self._lock = threading.Lock()
        # Taken before the writer's locks. One a volume will do: what is done under it
        # is short beside a scan.
        self._changing = threading.RLock()
        self._held: dict[ContainerId, ContainerReplica] = {}
        self._unreadable: dict[ContainerId, bytes] = {}
        self.refresh()
        if self.writer is not None:
            deleted = [
                replica.container_id
                for replica in self.replicas()
                if replica.state is ReplicaState.DELETED
            ]
            for container_id in self.writer.finish_deletions(deleted, self._skipped):
                self.forget(container_id)

    def refresh(self) -> None:
        """See what is there now.

        Raises:
            VolumeError, DatabaseError, DiskError: the volume as a whole cannot be used.
        """
        self.volume.refresh()
        # A volume whose database is lost is lost: each of its containers would seem
        # damaged, and none is.
        _ = self.volume.database
        unreadable: list[DiskError] = []
        found = set(self.containers.ids(unreadable.append))
        for error in unreadable:
            _log.error("container_skipped", volume=self.name, **_fields(error))
        # What lies in a folder that cannot be listed is not gone: its containers say so
        # one by one.
        for container_id in sorted(found | self._held.keys() if unreadable else found):
            # One at a time: what a scan notes meanwhile must not be overwritten by what
            # was seen before it.
            self.restore(container_id)
        if not unreadable:
            for container_id in self._held.keys() - found:
                self.forget(container_id)

    def replicas(self) -> list[ContainerReplica]:
        """All replicas, as they are known."""
        with self._lock:
            return list(self._held.values())

    def replica(self, container_id: ContainerId) -> ContainerReplica:
        """One replica, as it is known.

        Raises:
            ContainerNotFoundError: it is not here, or not any more.
        """
        with self._lock:
            found = self._held.get(container_id)
        if found is None:
            text = f"there is no container {container_id} in {self.name}"
            raise ContainerNotFoundError(text, container_id=container_id)
        return found

    def candidates(self) -> list[ScanCandidate]:
        """All replicas as the scanner sees them; VolumeError on a suspect volume."""
        if self.volume.suspect:
            raise VolumeError(
                f"{self.name} is suspect: {self.volume.suspect}", reason="suspect", path=self.name
            )
        return [_scan_candidate(replica) for replica in self.replicas()]

    def candidate(self, container_id: ContainerId) -> ScanCandidate:
        """One replica as the scanner sees it; ContainerNotFoundError if it is gone."""
        return _scan_candidate(self.replica(container_id))

    def examine(
        self,
        container_id: ContainerId,
        source: ScanDepth,
        on_bytes: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> CompletedScan:
        """Read a replica to this depth; nothing on disk changes."""
        self.replica(container_id)
        tree_generation = self.trees.generation(container_id)
        container = self.containers.get(container_id)
        match source:
            case ScanDepth.DATA:
                result = scan(
                    container, on_bytes=on_bytes, cancelled=cancelled, mapped=self._mapped
                )
            case ScanDepth.METADATA:
                result = ScanResult(build_from_metadata(container))
            case ScanDepth.CHECK:
                result = scan_metadata(container)
            case _:
                assert_never(source)
        return CompletedScan(container_id, source, result, tree_generation)

    def write_tree(self, examination: CompletedScan) -> None:
        """Store the tree of a scan; StaleTreeError if another was stored meanwhile."""
        self.store_tree(examination.result.tree, examination.generation)

    def settle(self, examination: CompletedScan, at_ms: int) -> bool:
        """Keep what a scan found; True if the replica became UNHEALTHY by it."""
        container_id = examination.container_id
        with self._changing:
            before = self.replica(container_id)
            is_worse = (
                bool(examination.result.findings) and before.state is not ReplicaState.UNHEALTHY
            )
            scanned_ms = (
                at_ms if examination.source is ScanDepth.DATA else before.data_scan_timestamp_ms
            )
            self._keep_findings(examination, scanned_ms)
            if self.writer is None:
                # The state of a replica that a datanode owns is for that datanode to
                # change.
                self._remember(replace(before, data_scan_timestamp_ms=scanned_ms))
                return False
            try:
                if examination.result.findings:
                    # Whatever is remembered of its state: a repair may be returning it
                    # to service at this moment.
                    self.writer.mark_unhealthy(container_id)
                if examination.source is ScanDepth.DATA:
                    self.writer.set_scan_timestamp(container_id, at_ms)
                self.look_again(container_id)
            except (DescriptorError, DiskError, RecordInvalidError) as error:
                # What cannot be written down is reported all the same; the next start
                # finds the damage again.
                _log.error(
                    "scan_failed", container_id=container_id, volume=self.name, **_fields(error)
                )
                state = ReplicaState.UNHEALTHY if is_worse else before.state
                self._remember(replace(before, state=state, data_scan_timestamp_ms=scanned_ms))
            return is_worse

    def store_tree(self, tree: ContainerTree, tree_generation: bytes) -> ContainerTree:
        """Lay a tree over the stored one and report it from now on.

        Raises:
            StaleTreeError: the stored tree has not this generation any more.
        """
        container_id = tree.container_id
        store = self.writer.store_tree if self.writer else self.trees.update
        with self._changing:
            self.replica(container_id)
            stored = store(container_id, tree, expected_generation=tree_generation)
            self._remember(
                replace(
                    self.replica(container_id),
                    data_checksum=stored.data_checksum,
                    fingerprint=state_fingerprint(stored),
                )
            )
        return stored

    def look_again(self, container_id: ContainerId) -> None:
        """See what is on disk of one replica now; of one that was forgotten nothing."""
        with self._changing:
            self._remember(self._look_at(container_id))

    def survey(self) -> VolumeSurvey:
        """A walk over all replicas as they are on disk, with the trees and scan times
        that we keep.
        """

        def scanned_ms(container_id: ContainerId) -> int | None:
            with suppress(ContainerNotFoundError):
                return self.replica(container_id).data_scan_timestamp_ms
            return None

        return VolumeSurvey(self.volume, self._disk, trees=self.trees, scanned_ms=scanned_ms)

    def forget(self, container_id: ContainerId) -> None:
        """Drop a replica that is being deleted, so that nobody begins anything with
        it.
        """
        with self._lock:
            self._held.pop(container_id, None)

    def restore(self, container_id: ContainerId) -> None:
        """Take back a replica whose deletion was given up."""
        with self._changing:
            replica = self._look_at(container_id)
            with self._lock:
                self._held[container_id] = replica

    def tree_bytes(self, container_id: ContainerId) -> bytes | None:
        """The tree file as it is; None where there is none."""
        self.replica(container_id)
        return self.trees.raw(container_id)

    def close(self) -> None:
        """Stop the worker and give the volume back."""
        if self._mapped is not None:
            self._mapped.close()
        self.volume.close()

    def _remember(self, replica: ContainerReplica) -> None:
        with self._lock:
            # What was deleted meanwhile stays so.
            if replica.container_id in self._held:
                self._held[replica.container_id] = replica

    def _look_at(self, container_id: ContainerId) -> ContainerReplica:
        """One replica as its descriptor, its rows and its tree tell; INVALID where one
        of the first two is no use.
        """
        own = PeerId(self.volume.datanode_id)
        read_only = self.volume.hold is Hold.READ_ONLY
        try:
            container = self.containers.open(container_id)
            if not 0 <= container.replica_index <= _INDEX_MAX:
                text = (
                    f"the descriptor of container {container_id} has replicaIndex"
                    f" {container.replica_index}"
                )
                raise DescriptorError(
                    text, reason="field_invalid", field="replicaIndex", container_id=container_id
                )
            counters = container.counters()
        except ReconcileError as error:
            if isinstance(error, DatabaseError):
                # Not a row of this container: the database as a whole.
                if "container_id" not in error.facts:
                    raise
                if self._is_lost(container_id):
                    text = f"{error.message}; nor can the rows of other containers be read"
                    raise DatabaseError(text, path=str(self.volume.database.path)) from error
            before = self._held.get(container_id)
            # Said once, not at every look.
            if before is None or before.state is not ReplicaState.INVALID:
                self._skipped(container_id, error)
            return ContainerReplica(
                own, container_id, ReplicaState.INVALID, None, 0, read_only=read_only
            )
        tree = self._stored_tree(container_id) if container.state.is_closed else None
        scanned_ms = (
            self._own_scan_ms(container_id)
            if read_only
            else container.descriptor.data_scan_timestamp_ms
        )
        return ContainerReplica(
            peer=own,
            container_id=container_id,
            state=container.state,
            data_checksum=tree.data_checksum if tree else None,
            bcs_id=counters.bcs_id or 0,
            replica_index=container.replica_index,
            used_bytes=counters.used_bytes or 0,
            block_count=counters.block_count or 0,
            data_scan_timestamp_ms=scanned_ms,
            read_only=read_only,
            fingerprint=state_fingerprint(tree) if tree else b"",
        )

    def _is_lost(self, container_id: ContainerId) -> bool:
        """Whether of the database whose rows of one container cannot be read no row can
        be.

        Asked are containers far from each other: the rows of neighbours lie in one
        block of a file.
        """
        others = [other for other in self.containers.ids(lambda _: None) if other != container_id]
        for other in others[:: max(1, len(others) // _PROBES)]:
            with suppress(DatabaseError):
                self.volume.database.get(OzoneTable.METADATA, counter_key(other, Counter.BCS_ID))
                return False
        return bool(others)

    def _stored_tree(self, container_id: ContainerId) -> ContainerTree | None:
        try:
            stored = self.trees.read(container_id)
        except (DiskError, ContainerNotFoundError) as error:
            # As good as none: a scan tells what else cannot be read, and other
            # containers are not concerned.
            self._skipped(container_id, error)
            return None
        if (
            stored.status is TreeStatus.UNREADABLE
            and self._unreadable.get(container_id) != stored.generation
        ):
            # Said once, not at every look.
            self._unreadable[container_id] = stored.generation
            _log.warning(
                "tree_unreadable", container_id=container_id, volume=self.name, reason=stored.reason
            )
        try:
            self.trees.remember(stored)
        except (DiskError, ContainerNotFoundError) as error:
            # The tree is as good as before; the next look tries again.
            _log.warning(
                "tree_write_failed", container_id=container_id, volume=self.name, **_fields(error)
            )
        return stored.tree if stored.status is TreeStatus.PRESENT else None

    def _skipped(self, container_id: ContainerId, error: ReconcileError) -> None:
        _log.error(
            "container_skipped", container_id=container_id, volume=self.name, **_fields(error)
        )

    def _keep_findings(self, examination: CompletedScan, at_ms: int | None) -> None:
        findings = [
            {
                "type": finding.type.value,
                "blockID": finding.block_id,
                "offset": finding.offset,
                "detail": finding.detail,
            }
            for finding in examination.result.findings
        ]
        path = _findings_path(self.volume, examination.container_id)
        self._disk.make_folder(path.parent)
        self._disk.replace(path, json.dumps({"at_ms": at_ms, "findings": findings}).encode())

    def _own_scan_ms(self, container_id: ContainerId) -> int | None:
        return own_scan_ms(self.volume, self._disk, container_id)


def own_scan_ms(volume: Volume, disk: Disk, container_id: ContainerId) -> int | None:
    """When an agent that holds the volume read-only last scanned the container; None
    where it never did.
    """
    try:
        at_ms = json.loads(disk.read(_findings_path(volume, container_id)))["at_ms"]
    except (DiskError, ValueError, KeyError, TypeError):
        # Lost or damaged: the container is scanned once more than needed.
        return None
    return at_ms if isinstance(at_ms, int) else None


def _findings_path(volume: Volume, container_id: ContainerId) -> Path:
    return volume.state_folder / "scans" / f"{container_id}.json"


def _scan_candidate(replica: ContainerReplica) -> ScanCandidate:
    return ScanCandidate(
        replica.container_id, replica.state, replica.data_checksum, replica.data_scan_timestamp_ms
    )


# What a report has room for.
_INDEX_MAX = (1 << 31) - 1


def _fields(error: ReconcileError) -> dict[str, object]:
    return {
        key: value
        for key, value in error_fields(error).items()
        if key not in ("container_id", "volume")
    }
