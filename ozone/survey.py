"""One volume's replicas, each with its tree from the asked truth: what exports and
sweeps are made of.

A walk never ends at a container that cannot be read: it becomes a replica without a
tree, and its faults say why. Nothing is written, so that a live datanode or an agent
may own the volume at the same time.
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
from ozone.volume import Volume
from protos.convert import tree_from_bytes
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError, OperationInterruptedError

# Kinds of faults beside those of scans (ozone.scan.FindingType).
UNREADABLE = "unreadable"
ROOT_DIFFERS = "root_differs"

# Far above any scheme's, and what a table has room for.
_INDEX_MAX = (1 << 31) - 1
_SUMS = {TreeRefusal.BLOCK_CHECKSUM.value, TreeRefusal.ROOT_CHECKSUM.value}


@dataclass(frozen=True, slots=True)
class ReplicaFault:
    """Something wrong with a replica or with what is stored of it: a FindingType's
    value, or one of the kinds above.
    """

    kind: str
    detail: str
    block_id: BlockId | None = None
    offset: int | None = None


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica as it was found.

    `state` is None where the descriptor cannot be read. `source` is where the tree
    comes from, and None where there is none: `tree` then has nothing, or the little
    that could be read, and its root is unknown. `findings` are those of the scan alone,
    `faults` are those too and all others.
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
        """`trees` and `scanned_ms` are what an agent knows beside the volume: its own
        trees, tombstones, scan times.
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
        """What is wrong with the volume as a whole: a database that cannot be read."""
        try:
            _ = self._volume.database
        except DatabaseError as error:
            return ReplicaFault(UNREADABLE, error.message)
        return None

    def ids(self) -> list[ContainerId]:
        """All containers, ascending; also those whose folder was lost.

        Raises:
            DiskError: the volume's folders cannot be listed.
        """
        lost: list[ContainerId] = []
        # A database that cannot be read is told of by `fault`.
        with suppress(DatabaseError):
            lost = self._store.ids_without_folder()
        return sorted([*self._store.ids(), *lost])

    def replicas(
        self,
        source: TreeSource,
        ids: Iterable[ContainerId] | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        mapped: MappedReader | None = None,
    ) -> Iterator[ReplicaSnapshot]:
        """All replicas, or those of `ids`, that are not deleted; `on_bytes` hears of
        data read and may wait.

        Raises:
            DiskError: the volume's folders cannot be listed.
            OperationInterruptedError: `cancelled` turned true.
        """
        for container_id in self.ids() if ids is None else ids:
            if cancelled and cancelled():
                raise OperationInterruptedError("the walk over the volume was cancelled")
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
        return None if found.state is None and self._is_gone(container_id) else found

    def _is_gone(self, container_id: ContainerId) -> bool:
        """Whether the container was deleted since the walk began: folder and
        records.
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
    """One replica. Without `fall_back` a stored tree is taken as it is, or an empty one
    where there is none.

    `scanned_ms` counts where it is given; else the descriptor's.

    Raises:
        ContainerUnsupportedError: it is of an older schema or layout.
        DescriptorError: with `fall_back`, a place in an erasure-coded group that cannot
            be.
        DiskError: file handles ran out, which says nothing about the container.
        OperationInterruptedError: `cancelled` turned true.
    """
    container_id = container.container_id
    state, replica_index, notes = None, 0, list[str]()
    # A scan names what is wrong with the descriptor.
    with suppress(DescriptorError, DiskError):
        state, replica_index = container.state, container.replica_index
        scanned_ms = scanned_ms or container.descriptor.data_scan_timestamp_ms
        if not state.is_closed and state is not ReplicaState.DELETED:
            notes.append(f"the container is {state.name}: what it holds may still change")
    if fall_back and state is ReplicaState.DELETED:
        return ReplicaSnapshot(
            container_id, state, None, ContainerTree(container_id, None), deleted=True
        )
    if fall_back and not 0 <= replica_index <= _INDEX_MAX:
        raise DescriptorError(
            f"the descriptor of container {container_id} has replicaIndex {replica_index}"
        )
    stored = _stored(container, trees)
    if stored.note:
        notes.append(stored.note)
    bcs_id = _bcs_id(container)
    if source is TreeSource.TREE and (not fall_back or stored.is_usable):
        return ReplicaSnapshot(
            container_id,
            state,
            TreeSource.TREE if stored.is_usable else None,
            stored.tree or ContainerTree(container_id, None),
            bcs_id,
            replica_index,
            scanned_ms,
            faults=(*stored.faults, *_descriptor_faults(container)),
            notes=tuple(notes),
        )
    by_data = source is TreeSource.DATA
    result = _scanned(container, on_bytes, cancelled, mapped) if by_data else _checked(container)
    unknown = any(
        finding.type is FindingType.INACCESSIBLE_DB and finding.block_id is None
        for finding in result.findings
    )
    unknown = unknown or (by_data and state is None)
    return ReplicaSnapshot(
        container_id,
        state,
        None if unknown else TreeSource.DATA if by_data else TreeSource.METADATA,
        merge(result.tree, stored.known),
        bcs_id,
        replica_index,
        scanned_ms,
        result.findings,
        (
            *stored.faults,
            *(ReplicaFault(f.type.value, f.detail, f.block_id, f.offset) for f in result.findings),
        ),
        (*notes, *result.notes),
        result.bad_windows,
        result.deleted,
    )


def _bcs_id(container: Container) -> int:
    # A row that cannot be read leaves the commit unknown, which is 0 in reports too.
    with suppress(DatabaseError):
        return container.counters().bcs_id or 0
    return 0


def _descriptor_faults(container: Container) -> tuple[ReplicaFault, ...]:
    try:
        _ = container.descriptor
    except (DescriptorError, DiskError) as error:
        return (ReplicaFault(UNREADABLE, error.message),)
    return ()


def _scanned(
    container: Container,
    on_bytes: Callable[[int], None] | None,
    cancelled: Callable[[], bool] | None,
    mapped: MappedReader | None,
) -> ScanResult:
    return _settled(scan(container, on_bytes=on_bytes, cancelled=cancelled, mapped=mapped))


def _checked(container: Container) -> ScanResult:
    return _settled(scan_metadata(container))


def _settled(result: ScanResult) -> ScanResult:
    if result.transient:
        raise DiskError(
            "too many files are open, which says nothing about the container",
            hint="Raise the limit of open files (ulimit -n) and try again.",
        )
    return result


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored tree as far as Ozone would take it; None and a note where it counts as
    absent.

    `known` has beside it the tombstones that an agent remembers.
    """

    tree: ContainerTree | None
    note: str = ""
    faults: tuple[ReplicaFault, ...] = ()
    known: ContainerTree | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is the tree of all that the replica holds: with a root, and no
        place that cannot be.
        """
        return (
            self.tree is not None
            and self.tree.data_checksum is not None
            and all(block.chunks[0].offset >= 0 for block in self.tree.blocks if block.chunks)
        )


def _stored(container: Container, trees: TreeFiles | None) -> _Stored:
    if trees is None:
        return _parsed(container, None)
    known = None
    # Whatever is wrong with the file is said below.
    with suppress(ContainerNotFoundError, DiskError):
        kept = trees.read(container.container_id)
        known = kept.known
        whole = _Stored(kept.tree, known=known)
        if kept.status is TreeStatus.PRESENT and whole.is_usable:
            return whole
    stored = _parsed(container, trees)
    return replace(stored, known=known or stored.known)


def _parsed(container: Container, trees: TreeFiles | None) -> _Stored:
    def absent(why: str) -> _Stored:
        note = f"the stored tree is {why}"
        return _Stored(None, note, (ReplicaFault(UNREADABLE, note),))

    try:
        raw = (
            trees.raw(container.container_id) if trees else container.disk.read(container.tree_path)
        )
    except ContainerNotFoundError:
        raw = None
    except DiskError as error:
        if not error.facts.get("missing"):
            return absent(f"unreadable and counts as absent: {error.message}")
        raw = None
    if raw is None:
        return _Stored(None, "there is no stored tree")
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
        kind = ROOT_DIFFERS if error.reason in _SUMS else UNREADABLE
        return _Stored(stored, note, (ReplicaFault(kind, f"{note}: {error.message}"),), stored)
    return _Stored(stored, known=stored)
