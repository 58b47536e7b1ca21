"""`treefold tree build`: the tree of a replica, from data, block records or tree
file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from admin.tree_sources import STATE_UNKNOWN, place_text
from merkle.errors import ReconcileError, RecordInvalidError, TreeRefusedError
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId, ContainerTree, root_hex
from ozone.containers import Container
from ozone.errors import DescriptorError
from ozone.mapped import MappedReader
from ozone.scan import Finding
from ozone.survey import UNREADABLE, ReplicaSnapshot, survey_container
from runtime.errors import DatabaseError, DiskError
from runtime.json_numbers import exact
from runtime.output import JsonObject, print_line, print_table


@dataclass(frozen=True)
class ReplicaTree:
    """The tree of a replica from one source, with findings and notes."""

    container_id: ContainerId
    state: str
    replica_index: int
    source: TreeSource
    tree: ContainerTree
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    deleted: bool = False
    # Why the content of the replica is unknown; None if it is known.
    unread: ReconcileError | None = None


def replica_tree(
    container: Container,
    source: TreeSource,
    on_bytes: Callable[[int], None] | None,
    mapped: MappedReader | None = None,
) -> ReplicaTree:
    found = survey_container(container, source, fall_back=False, on_bytes=on_bytes, mapped=mapped)
    surplus = () if source is TreeSource.TREE else _surplus_bytes(container)
    return ReplicaTree(
        container.container_id,
        found.state.name if found.state else STATE_UNKNOWN,
        found.replica_index,
        source,
        found.tree,
        found.findings,
        (*found.notes, *surplus),
        found.bad_windows,
        found.deleted,
        _unread_blocks(container, source, found),
    )


def _unread_blocks(
    container: Container, source: TreeSource, found: ReplicaSnapshot
) -> ReconcileError | None:
    """Why the content of a replica is unknown, which is not the same as empty; None if
    it is known.
    """
    if found.source is not None and found.state is not None:
        return None
    # A container without a folder is known to be empty.
    if source is not TreeSource.TREE and not container.disk.is_folder(container.folder):
        return None
    # With the source TREE the replica is not scanned, so it has faults, not findings.
    why = "; ".join(one.detail for one in found.findings or found.faults if one.block_id is None)
    if found.state is None:
        return DescriptorError(why or "the descriptor cannot be read")
    if source is not TreeSource.TREE:
        return DatabaseError(why)
    # A tree that was never built is not a fault, and its blocks do not count as
    # missing.
    return TreeRefusedError(UNREADABLE, why) if why else None


def _surplus_bytes(container: Container) -> Iterator[str]:
    """Notes on blocks with bytes after their last recorded chunk. These are not a
    fault and are never cut off.
    """
    # Unreadable blocks are findings already.
    with suppress(DatabaseError, RecordInvalidError):
        for block_id in container.block_ids():
            with suppress(DiskError, RecordInvalidError):
                record = container.record(block_id)
                if record is not None and (length_bytes := container.unrecorded_bytes(record)):
                    yield (
                        f"block {block_id} has {length_bytes} bytes after its last recorded chunk"
                    )


def build_json(built: ReplicaTree) -> JsonObject:
    deleted = sum(block.deleted for block in built.tree.blocks)
    return {
        "containerID": built.container_id,
        "state": built.state,
        "dataChecksum": root_hex(built.tree.data_checksum),
        "source": built.source.value,
        "blocks": len(built.tree.blocks) - deleted,
        "deletedBlocks": deleted,
        "findings": [_finding_json(finding) for finding in built.findings],
        "notes": list(built.notes),
    }


def _finding_json(finding: Finding) -> JsonObject:
    block_id = exact(finding.block_id)
    parts = {"type": finding.type.value, "blockID": block_id, "offset": finding.offset}
    return {key: value for key, value in parts.items() if value is not None}


def print_replica_trees(built: Sequence[tuple[str, ReplicaTree]]) -> None:
    rows = []
    for name, one in built:
        shown = build_json(one)
        keys = ("containerID", "state", "dataChecksum", "blocks", "deletedBlocks")
        rows.append([*(shown[key] for key in keys), len(one.findings), name])
    columns = ("CONTAINER", "STATE", "ROOT", "BLOCKS", "DELETED", "FINDINGS", "PATH")
    print_table(
        columns,
        rows,
        numbers=("CONTAINER", "ROOT", "BLOCKS", "DELETED", "FINDINGS"),
        folded=("PATH",),
    )
    for name, one in built:
        for finding in one.findings:
            where = place_text(finding.block_id, finding.offset)
            print_line(
                f"{name}: container {one.container_id}: {finding.type.value}{where}:"
                f" {finding.detail}"
            )
        for note in one.notes:
            print_line(f"{name}: container {one.container_id}: note: {note}", style="dim")
