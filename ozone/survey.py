"""Survey of a volume: all replicas with their trees, for exports and sweeps.

The caller chooses the source of the trees: stored trees, records, or data. An
unreadable container does not end the survey: it becomes a replica without a tree, with
faults. Nothing is written, so a datanode or an agent may own the volume meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from merkle.check import TreeRefusal, check_tree
from merkle.errors import ReconcileError, TreeRefusedError
from merkle.merge import merge
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Container, ContainerStore
from ozone.errors import ContainerNotFoundError, DescriptorError
from ozone.mapped import MappedReader
from ozone.scan import Finding, FindingType, ScanResult, scan, scan_metadata
from ozone.treefile import TreeFiles, TreeStatus
from ozone.volume import Volume, permission_hint
from protos.convert import tree_from_bytes
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError, OperationInterruptedError

# Kinds of faults besides those of scans (ozone.scan.FindingType).
UNREADABLE = "unreadable"
ROOT_DIFFERS = "root_differs"

# The largest value of a table's column, far above any erasure-coding scheme.
_INDEX_MAX = (1 << 31) - 1
_CHECKSUM_REFUSALS = {TreeRefusal.BLOCK_CHECKSUM.value, TreeRefusal.ROOT_CHECKSUM.value}


@dataclass(frozen=True, slots=True)
class ReplicaFault:
    """A fault of a replica or of its stored tree.

    `kind` is the value of a FindingType, or one of the kinds above.
    """

    kind: str
    detail: str
    block_id: BlockId | None = None
    offset: int | None = None


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica at the time of the survey.

    `state` is None if the descriptor cannot be read. `source` is the origin of the
    tree. It is None if no complete tree exists: `tree` then has only what is readable,
    and its root is unknown. `findings` are those of the scan; `faults` include them.
    `scanned_at_ms` is in ms since the epoch. `bad_windows` is as in `ScanResult`.
    """

    container_id: ContainerId
    state: ReplicaState | None
    source: TreeSource | None
    tree: ContainerTree
    bcs_id: int = 0
    replica_index: int = 0
    scanned_at_ms: int | None = None
    findings: tuple[Finding, ...] = ()
    faults: tuple[ReplicaFault, ...] = ()
    notes: tuple[str, ...] = ()
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    deleted: bool = False


class VolumeSurvey:
    """The replicas of one open volume."""

    def __init__(
        self,
        volume: Volume,
        disk: Disk,
        *,
        trees: TreeFiles | None = None,
        scanned_ms: Callable[[ContainerId], int | None] | None = None,
    ) -> None:
        """A survey of `volume`.

        An agent passes its own knowledge: `trees` with its trees and tombstones, and
        `scanned_ms` with scan times in ms since the epoch, None where unknown.
        """
        self.datanode = volume.datanode_id
        self.volume = volume.storage_id
        self.created_ms = volume.created_ms
        self._store = ContainerStore(volume, disk)
        self._volume = volume
        self._disk = disk
        self._trees = trees
        self._scanned_ms = scanned_ms

    @property
    def fault(self) -> ReplicaFault | None:
        """The fault of the volume as a whole: an unreadable database; else None."""
        try:
            _ = self._volume.database
        except DatabaseError as error:
            return ReplicaFault(UNREADABLE, error.message)
        return None

    def ids(self) -> list[ContainerId]:
        """All containers, ascending, including those whose folder was lost.

        Raises:
            DiskError: the volume's folders cannot be listed.
        """
        lost: list[ContainerId] = []
        # `fault` reports an unreadable database.
        with suppress(DatabaseError):
            lost = self._store.ids_without_folder()
        return sorted([*self._store.ids(), *lost])

    def state(self, container_id: ContainerId) -> ReplicaState | None:
        """The state in a replica's descriptor, which is all that is read; None if it
        cannot be.
        """
        with suppress(ReconcileError):
            return self._store.get(container_id).state
        return None

    def replicas(
        self,
        source: TreeSource,
        ids: Iterable[ContainerId] | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        mapped: MappedReader | None = None,
    ) -> Iterator[ReplicaSnapshot]:
        """All replicas, or those of `ids`, without deleted ones.

        `on_bytes` gets the size of every piece of data read and may block to limit the
        rate.

        Raises:
            DiskError: the volume's folders cannot be listed.
            OperationInterruptedError: `cancelled` returned True.
        """
        for container_id in self.ids() if ids is None else ids:
            if cancelled and cancelled():
                raise OperationInterruptedError("the survey of the volume was cancelled")
            found = self._replica(container_id, source, on_bytes, cancelled, mapped)
            if found is not None:
                yield found

    def _replica(
        self,
        container_id: ContainerId,
        source: TreeSource,
        on_bytes: Callable[[int], None] | None,
        cancelled: Callable[[], bool] | None,
        mapped: MappedReader | None,
    ) -> ReplicaSnapshot | None:
        scanned_ms = self._scanned_ms(container_id) if self._scanned_ms else None
        try:
            found = survey_container(
                self._store.get(container_id),
                source,
                trees=self._trees,
                scanned_ms=scanned_ms,
                on_bytes=on_bytes,
                cancelled=cancelled,
                mapped=mapped,
            )
        except OperationInterruptedError:
            raise
        except ReconcileError as error:
            found = ReplicaSnapshot(
                container_id,
                None,
                None,
                ContainerTree(container_id, None),
                faults=(ReplicaFault(UNREADABLE, f"{error.code}: {error.message}"),),
            )
        if found.deleted or found.state is ReplicaState.DELETED:
            return None
        return None if found.state is None and self._was_deleted(container_id) else found

    def _was_deleted(self, container_id: ContainerId) -> bool:
        """Whether the container was deleted, folder and records, since the survey
        began.
        """
        with suppress(ReconcileError):
            if container_id in self._store.ids():
                return False
            self._volume.refresh()
            return container_id not in self._store.ids_without_folder()
        return False


def survey_container(
    container: Container,
    source: TreeSource,
    *,
    trees: TreeFiles | None = None,
    scanned_ms: int | None = None,
    fall_back: bool = True,
    on_bytes: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    mapped: MappedReader | None = None,
) -> ReplicaSnapshot:
    """Survey one replica.

    If the source is the stored tree and that is unusable, the tree is built from the
    records. Without `fall_back` the stored tree is returned anyway, or an empty one.
    `scanned_ms` takes precedence over the descriptor's time of the last scan.

    Raises:
        ContainerUnsupportedError: the container has an older schema or layout.
        DescriptorError: with `fall_back`, the replica index is impossible.
        DiskError: file handles ran out or permission was denied, which proves nothing.
        OperationInterruptedError: `cancelled` returned True.
    """
    container_id, unbuilt = container.container_id, ContainerTree(container.container_id, None)
    state, replica_index, notes = None, 0, list[str]()
    # A scan reports the faults of the descriptor.
    with suppress(DescriptorError, DiskError):
        state, replica_index = container.state, container.replica_index
        scanned_ms = scanned_ms or container.descriptor.data_scan_timestamp_ms
        if not state.is_closed and state is not ReplicaState.DELETED:
            notes.append(f"the container is {state.name}: its content may still change")
    if fall_back and state is ReplicaState.DELETED:
        return ReplicaSnapshot(container_id, state, None, unbuilt, deleted=True)
    if fall_back and not 0 <= replica_index <= _INDEX_MAX:
        why = f"the descriptor of container {container_id} has replicaIndex {replica_index}"
        raise DescriptorError(why)
    stored = _read_stored_tree(container, trees)
    if stored.note:
        notes.append(stored.note)
    if source is TreeSource.TREE and (not fall_back or stored.is_usable):
        return ReplicaSnapshot(
            container_id,
            state,
            TreeSource.TREE if stored.is_usable else None,
            stored.tree or unbuilt,
            _bcs_id(container),
            replica_index,
            scanned_ms,
            faults=(*stored.faults, *_descriptor_faults(container)),
            notes=tuple(notes),
        )
    if source is TreeSource.DATA:
        result = scan(container, on_bytes=on_bytes, cancelled=cancelled, mapped=mapped)
    else:
        result = scan_metadata(container)
    _check_decided(container, result)
    return ReplicaSnapshot(
        container_id,
        state,
        _scanned_source(result, state, by_data=source is TreeSource.DATA),
        merge(result.tree, stored.known),
        _bcs_id(container),
        replica_index,
        scanned_ms,
        result.findings,
        (*stored.faults, *map(_fault_of, result.findings)),
        (*notes, *result.notes),
        result.bad_windows,
        result.deleted,
    )


def _fault_of(finding: Finding) -> ReplicaFault:
    return ReplicaFault(finding.type.value, finding.detail, finding.block_id, finding.offset)


def _scanned_source(
    result: ScanResult, state: ReplicaState | None, *, by_data: bool
) -> TreeSource | None:
    """What a scan's tree rests on; None if it does not show what the replica holds."""
    has_no_database = any(
        finding.type is FindingType.INACCESSIBLE_DB and finding.block_id is None
        for finding in result.findings
    )
    if has_no_database or (by_data and state is None):
        return None
    return TreeSource.DATA if by_data else TreeSource.METADATA


def _bcs_id(container: Container) -> int:
    # Reports too use 0 for an unknown commit.
    with suppress(DatabaseError):
        return container.counters().bcs_id or 0
    return 0


def _descriptor_faults(container: Container) -> tuple[ReplicaFault, ...]:
    try:
        _ = container.descriptor
    except (DescriptorError, DiskError) as error:
        return (ReplicaFault(UNREADABLE, error.message),)
    return ()


def _check_decided(container: Container, result: ScanResult) -> None:
    if result.transient:
        raise DiskError(
            result.inconclusive_text,
            hint=f"{permission_hint(container.folder)} If too many files are open, raise the limit"
            " (ulimit -n).",
        )


@dataclass(frozen=True, slots=True)
class _StoredTreeReading:
    """The stored tree if Ozone would accept it; else None, and a note with the reason.

    `known` is the tree with the tombstones that an agent remembers.
    """

    tree: ContainerTree | None
    note: str = ""
    faults: tuple[ReplicaFault, ...] = ()
    known: ContainerTree | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is a complete tree: it has a root and no impossible offsets."""
        return (
            self.tree is not None
            and self.tree.data_checksum is not None
            and all(block.chunks[0].offset >= 0 for block in self.tree.blocks if block.chunks)
        )


def _read_stored_tree(container: Container, trees: TreeFiles | None) -> _StoredTreeReading:
    if trees is None:
        return _parse_stored_tree(container, None)
    known = None
    # Faults of the file are reported below.
    with suppress(ContainerNotFoundError, DiskError):
        stored = trees.read(container.container_id)
        known = stored.known
        reading = _StoredTreeReading(stored.tree, known=known)
        if stored.status is TreeStatus.PRESENT and reading.is_usable:
            return reading
    reading = _parse_stored_tree(container, trees)
    return replace(reading, known=known or reading.known)


def _parse_stored_tree(container: Container, trees: TreeFiles | None) -> _StoredTreeReading:
    def absent(reason: str) -> _StoredTreeReading:
        note = f"the stored tree is {reason}"
        return _StoredTreeReading(None, note, (ReplicaFault(UNREADABLE, note),))

    try:
        raw = (
            trees.raw(container.container_id) if trees else container.disk.read(container.tree_path)
        )
    except ContainerNotFoundError:
        raw = None
    except DiskError as error:
        if error.facts.get("denied"):
            raise
        if not error.facts.get("missing"):
            return absent(f"unreadable and counts as absent: {error.message}")
        raw = None
    if raw is None:
        return _StoredTreeReading(None, "there is no stored tree")
    if not raw:
        return absent("empty and counts as absent")
    try:
        stored = tree_from_bytes(raw, container.container_id)
    except TreeRefusedError as error:
        return absent(f"unreadable and counts as absent: {error.reason}")
    try:
        check_tree(stored)
    except TreeRefusedError as error:
        note = f"the stored tree contradicts itself: {error.reason}"
        kind = ROOT_DIFFERS if error.reason in _CHECKSUM_REFUSALS else UNREADABLE
        faults = (ReplicaFault(kind, f"{note}: {error.message}"),)
        return _StoredTreeReading(stored, note, faults, stored)
    return _StoredTreeReading(stored, known=stored)
