"""The replicas of one volume, for its scanner and for repairs."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from dnagent.events import AGENT_EVENTS
from dnagent.scanner import CompletedScan, ScanCandidate, ScanDepth
from merkle.columns import state_fingerprint
from merkle.errors import ReconcileError, RecordInvalidError
from merkle.limits import TREE_BLOCKS_MAX
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Container, ContainerStore
from ozone.errors import (
    ContainerNotFoundError,
    DescriptorError,
    StaleTreeError,
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
from runtime.documents import parse_json
from runtime.errors import DatabaseError, DiskError
from runtime.json_numbers import exact
from runtime.log import error_fields, get_logger
from runtime.retry import Backoff

_log = get_logger("store", AGENT_EVENTS)

# For scans after a repair: they are repeated if another writer changed the tree.
RESCAN_BACKOFF = Backoff(attempts_max=4, first_s=0.1, most_s=2.0)

# Reads that decide whether a whole database is lost, or only a part.
_DATABASE_PROBES_MAX = 16


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
        on_returned: Callable[[ContainerId, str, str], None] = lambda *_: None,
        tree_blocks_max: int = TREE_BLOCKS_MAX,
    ) -> None:
        """Load every replica, and finish interrupted deletions.

        `on_deleted` is called before blocks are deleted; with None, before the whole
        container is. `on_returned` is called before an UNHEALTHY replica returns to
        service, with its next state and the job. `mapped` is closed with the volume. A
        container of more than `tree_blocks_max` blocks has no tree.

        Raises:
            VolumeError, DatabaseError, DiskError: the volume as a whole cannot be used.
        """
        self.volume = volume
        self.name = str(volume.root)
        self.containers = ContainerStore(volume, disk)
        self.trees = TreeFiles(volume, disk, on_deleted=on_deleted, blocks_max=tree_blocks_max)
        self.on_deleted = on_deleted
        self.on_returned = on_returned
        self.undo = UndoStore(volume.state_folder / "undo", disk, budget_bytes=undo_bytes)
        owned = volume.hold is Hold.OWNER
        self.writer = RepairWriter(volume, self.trees, self.undo, disk) if owned else None
        self._disk = disk
        self._mapped = mapped
        self._lock = threading.Lock()
        # Always taken before the writer's locks. One for each volume is enough: it is
        # held briefly.
        self._change_lock = threading.RLock()
        self._replicas: dict[ContainerId, ContainerReplica] = {}
        self._unreadable: dict[ContainerId, bytes] = {}
        self.refresh()
        if self.writer is not None:
            deleted = [
                replica.container_id
                for replica in self.replicas()
                if replica.state is ReplicaState.DELETED
            ]
            for container_id in self.writer.finish_deletions(deleted, self._log_skipped):
                self.forget(container_id)

    def refresh(self) -> None:
        """Reload all replicas from disk.

        Raises:
            VolumeError, DatabaseError, DiskError: the volume as a whole cannot be used.
        """
        self.volume.refresh()
        # If the database is lost, the volume failed. Otherwise each of its containers
        # would seem damaged.
        _ = self.volume.database
        unreadable: list[DiskError] = []
        found = set(self.containers.ids(unreadable.append))
        for error in unreadable:
            _log.error("container_skipped", volume=self.name, **_error_fields(error))
        # Containers in a folder that cannot be listed are not removed: each of them
        # reports its own error.
        for container_id in sorted(found | self._replicas.keys() if unreadable else found):
            # One at a time, so that an older view does not overwrite the result of a
            # concurrent scan.
            self.load(container_id)
        if not unreadable:
            for container_id in self._replicas.keys() - found:
                self.forget(container_id)

    def replicas(self) -> list[ContainerReplica]:
        """All replicas, from memory."""
        with self._lock:
            return list(self._replicas.values())

    def replica(self, container_id: ContainerId) -> ContainerReplica:
        """One replica, from memory.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
        """
        with self._lock:
            found = self._replicas.get(container_id)
        if found is None:
            text = f"there is no container {container_id} in {self.name}"
            raise ContainerNotFoundError(text, container_id=container_id)
        return found

    def candidates(self) -> list[ScanCandidate]:
        """All replicas (ScannedVolume.candidates).

        Raises:
            VolumeError: the volume is suspect.
        """
        if self.volume.suspect:
            raise VolumeError(
                f"{self.name} is suspect: {self.volume.suspect}", reason="suspect", path=self.name
            )
        return [_scan_candidate(replica) for replica in self.replicas()]

    def candidate(self, container_id: ContainerId) -> ScanCandidate:
        """One replica (ScannedVolume.candidate)."""
        return _scan_candidate(self.replica(container_id))

    def examine(
        self,
        container_id: ContainerId,
        source: ScanDepth,
        on_bytes: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> CompletedScan:
        """Read a replica, without changes on disk (ScannedVolume.examine)."""
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

    def write_tree(self, completed: CompletedScan) -> CompletedScan:
        """Store the tree of a scan (ScannedVolume.write_tree)."""
        if completed.source is ScanDepth.METADATA:
            self._forget_scan(completed.container_id)
        _, generation = self.store_tree(completed.result.tree, completed.generation)
        return replace(completed, generation=generation)

    def record_result(self, completed: CompletedScan, at_ms: int) -> bool:
        """Store the result of a scan (ScannedVolume.record_result)."""
        container_id = completed.container_id
        with self._change_lock:
            self._require_current(completed)
            before = self.replica(container_id)
            is_worse = (
                bool(completed.result.findings) and before.state is not ReplicaState.UNHEALTHY
            )
            scanned_ms = (
                at_ms if completed.source is ScanDepth.DATA else before.data_scan_timestamp_ms
            )
            self._write_findings(completed, scanned_ms)
            if self.writer is None:
                # Only the owner of the volume, its datanode, may change the state.
                self._update(replace(before, data_scan_timestamp_ms=scanned_ms))
                return False
            try:
                # Compared again where no repair can write: it may be returning the
                # replica to service at this moment.
                with self.writer.locked(container_id):
                    self._require_current(completed)
                    if completed.result.findings:
                        self.writer.mark_unhealthy(container_id)
                    if completed.source is ScanDepth.DATA:
                        self.writer.set_scan_timestamp(container_id, at_ms)
                self.reload(container_id)
            except (DescriptorError, DiskError, RecordInvalidError) as error:
                # The findings are reported even if the state cannot be written. A scan
                # after the next start finds the damage again.
                _log.error(
                    "scan_failed",
                    container_id=container_id,
                    volume=self.name,
                    **_error_fields(error),
                )
                state = ReplicaState.UNHEALTHY if is_worse else before.state
                self._update(replace(before, state=state, data_scan_timestamp_ms=scanned_ms))
            return is_worse

    def store_tree(
        self, tree: ContainerTree, tree_generation: bytes, *, blocks_may_change: bool = False
    ) -> tuple[ContainerTree, bytes]:
        """Merge a tree into the stored one and report the result from now on; returns
        it with its generation.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
            StaleTreeError: the tree no longer has this generation. With
                `blocks_may_change`, blocks written since do not count.
        """
        container_id = tree.container_id
        store = self.writer.store_tree if self.writer else self.trees.update
        with self._change_lock, self._locked(container_id):
            self.replica(container_id)
            stored = store(
                container_id,
                tree,
                expected_generation=tree_generation,
                blocks_may_change=blocks_may_change,
            )
            generation = self.trees.generation(container_id)
            self._update(
                replace(
                    self.replica(container_id),
                    data_checksum=stored.data_checksum,
                    fingerprint=state_fingerprint(stored),
                )
            )
        return stored, generation

    def reload(self, container_id: ContainerId) -> None:
        """Reload one replica from disk; one that was forgotten stays so."""
        with self._change_lock:
            self._update(self._load_replica(container_id))

    def survey(self) -> VolumeSurvey:
        """A survey of all replicas on disk, with our trees and scan times."""

        def scanned_ms(container_id: ContainerId) -> int | None:
            with suppress(ContainerNotFoundError):
                return self.replica(container_id).data_scan_timestamp_ms
            return None

        return VolumeSurvey(self.volume, self._disk, trees=self.trees, scanned_ms=scanned_ms)

    def forget(self, container_id: ContainerId) -> None:
        """Drop a replica from memory before its deletion, so that no new work starts
        on it.
        """
        with self._lock:
            self._replicas.pop(container_id, None)

    def load(self, container_id: ContainerId) -> None:
        """Load one replica from disk, also one that is new or was forgotten."""
        with self._change_lock:
            replica = self._load_replica(container_id)
            with self._lock:
                self._replicas[container_id] = replica

    def tree_bytes(self, container_id: ContainerId) -> bytes | None:
        """The bytes of the tree file; None if there is none.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
            DiskError: the file cannot be read.
        """
        self.replica(container_id)
        return self.trees.raw(container_id)

    def close(self) -> None:
        """Stop the worker process and close the volume."""
        if self._mapped is not None:
            self._mapped.close()
        self.volume.close()

    @contextmanager
    def _locked(self, container_id: ContainerId) -> Iterator[None]:
        """Excludes all writers of a volume that we own."""
        if self.writer is None:
            yield
        else:
            with self.writer.locked(container_id):
                yield

    def _require_current(self, completed: CompletedScan) -> None:
        if self.trees.generation(completed.container_id) != completed.generation:
            raise StaleTreeError(
                f"container {completed.container_id} changed since its scan began",
                container_id=completed.container_id,
            )

    def _update(self, replica: ContainerReplica) -> None:
        with self._lock:
            # A replica deleted meanwhile must not return.
            if replica.container_id in self._replicas:
                self._replicas[replica.container_id] = replica

    def _load_replica(self, container_id: ContainerId) -> ContainerReplica:
        """One replica from its descriptor, rows and tree; INVALID if the descriptor or
        the rows cannot be read.
        """
        own = PeerId(self.volume.datanode_id)
        read_only = self.volume.hold is Hold.READ_ONLY
        try:
            container = self.containers.open(container_id)
            if not 0 <= container.replica_index <= _REPLICA_INDEX_MAX:
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
                # Without a container ID the error concerns the whole database.
                if "container_id" not in error.facts:
                    raise
                if self._is_database_lost(container_id):
                    text = f"{error.message}; the rows of other containers cannot be read either"
                    raise DatabaseError(text, path=str(self.volume.database.path)) from error
            before = self._replicas.get(container_id)
            # Logged once, not at every load.
            if before is None or before.state is not ReplicaState.INVALID:
                self._log_skipped(container_id, error)
            return ContainerReplica(
                own, container_id, ReplicaState.INVALID, None, 0, read_only=read_only
            )
        tree = self._read_tree(container_id) if container.state.is_closed else None
        return ContainerReplica(
            peer=own,
            container_id=container_id,
            state=container.state,
            data_checksum=tree.data_checksum if tree else None,
            bcs_id=counters.bcs_id or 0,
            replica_index=container.replica_index,
            used_bytes=counters.used_bytes or 0,
            block_count=counters.block_count or 0,
            data_scan_timestamp_ms=self._scan_ms(container),
            read_only=read_only,
            fingerprint=state_fingerprint(tree) if tree else b"",
        )

    def _is_database_lost(self, container_id: ContainerId) -> bool:
        """Whether no rows of any container can be read, and not just those of one.

        The sampled containers have distant IDs, because rows of neighbours share a
        block of a database file.
        """
        others = [other for other in self.containers.ids(lambda _: None) if other != container_id]
        for other in others[:: max(1, len(others) // _DATABASE_PROBES_MAX)]:
            with suppress(DatabaseError):
                self.volume.database.get(OzoneTable.METADATA, counter_key(other, Counter.BCS_ID))
                return False
        return bool(others)

    def _read_tree(self, container_id: ContainerId) -> ContainerTree | None:
        try:
            stored = self.trees.read(container_id)
        except (DiskError, ContainerNotFoundError) as error:
            # Treated as missing. A scan reports what else cannot be read.
            self._log_skipped(container_id, error)
            return None
        if (
            stored.status is TreeStatus.UNREADABLE
            and self._unreadable.get(container_id) != stored.fingerprint
        ):
            # Logged once, not at every load.
            self._unreadable[container_id] = stored.fingerprint
            _log.warning(
                "tree_unreadable", container_id=container_id, volume=self.name, reason=stored.reason
            )
        try:
            self.trees.remember(stored)
        except (DiskError, ContainerNotFoundError) as error:
            # The tree stays usable; the next load tries again.
            _log.warning(
                "tree_write_failed",
                container_id=container_id,
                volume=self.name,
                **_error_fields(error),
            )
        return stored.tree if stored.status is TreeStatus.PRESENT else None

    def _log_skipped(self, container_id: ContainerId, error: ReconcileError) -> None:
        _log.error(
            "container_skipped", container_id=container_id, volume=self.name, **_error_fields(error)
        )

    def _write_findings(self, completed: CompletedScan, at_ms: int | None) -> None:
        findings = [
            {
                "type": finding.type.value,
                "blockID": exact(finding.block_id),
                "offset": finding.offset,
                "detail": finding.detail,
            }
            for finding in completed.result.findings
        ]
        path = _findings_path(self.volume, completed.container_id)
        self._disk.make_folder(path.parent)
        self._disk.replace(
            path, json.dumps({"at_ms": at_ms, "findings": findings}).encode(), unique=True
        )

    def _forget_scan(self, container_id: ContainerId) -> None:
        """Report the data as never scanned until the next scan: the tree that showed
        what the last one found is lost, and one of block records shows no damage.
        """
        with self._change_lock:
            replica = self.replica(container_id)
            if replica.data_scan_timestamp_ms is None:
                return
            # First, so that no crash leaves such a tree with the time of a scan.
            lost_ms = replica.data_scan_timestamp_ms
            facts: dict[str, object] = {"at_ms": None, "lost_ms": lost_ms, "findings": []}
            path = _findings_path(self.volume, container_id)
            self._disk.make_folder(path.parent)
            self._disk.replace(path, json.dumps(facts).encode(), unique=True)
            self._update(replace(replica, data_scan_timestamp_ms=None))

    def _scan_ms(self, container: Container) -> int | None:
        """The time of the last full scan that the stored tree shows; None without."""
        if self.volume.hold is Hold.READ_ONLY:
            return agent_scan_ms(self.volume, self._disk, container.container_id)
        at_ms = container.descriptor.data_scan_timestamp_ms
        lost_ms = _stored_ms(self.volume, self._disk, container.container_id, "lost_ms")
        return None if at_ms == lost_ms else at_ms


def agent_scan_ms(volume: Volume, disk: Disk, container_id: ContainerId) -> int | None:
    """The time of the last scan by an agent with a read-only hold, in ms since the
    epoch; None if unknown.
    """
    return _stored_ms(volume, disk, container_id, "at_ms")


def _stored_ms(volume: Volume, disk: Disk, container_id: ContainerId, name: str) -> int | None:
    try:
        time_ms = parse_json(disk.read(_findings_path(volume, container_id)))[name]
    except (DiskError, ValueError, KeyError, TypeError):
        # Lost or damaged: the container is scanned again, at worst needlessly.
        return None
    return time_ms if isinstance(time_ms, int) else None


def _findings_path(volume: Volume, container_id: ContainerId) -> Path:
    return volume.state_folder / "scans" / f"{container_id}.json"


def _scan_candidate(replica: ContainerReplica) -> ScanCandidate:
    return ScanCandidate(
        replica.container_id, replica.state, replica.data_checksum, replica.data_scan_timestamp_ms
    )


# The largest value of the report's field.
_REPLICA_INDEX_MAX = (1 << 31) - 1


def _error_fields(error: ReconcileError) -> dict[str, object]:
    return {
        key: value
        for key, value in error_fields(error).items()
        if key not in ("container_id", "volume")
    }
