"""The picture of `treefold demo`: the replicas of each container before and after."""

from collections.abc import Mapping
from pathlib import Path

from admin.demo.result import DemoResult
from merkle.comparison import compare
from merkle.outcome import Verdict
from merkle.tree import BlockId, ContainerId, ContainerTree
from repair.picture import BlockCell, cells
from repair.svg_picture import DrawnContainer, draw
from runtime.disk import Disk

# The trees of the replicas of each container, by replica.
Trees = Mapping[ContainerId, Mapping[str, ContainerTree]]


def write_healed_picture(path: Path, result: DemoResult, before: Trees, after: Trees) -> None:
    """Draw what a demo did, as an SVG file.

    Raises:
        DiskError: the file cannot be written.
    """
    replicas = len(result.replicas)
    drawn = [
        _container(container_id, result, before.get(container_id, {}), after.get(container_id, {}))
        for container_id in sorted(before.keys() | after.keys())
    ]
    title = f"{len(drawn)} containers on {replicas} datanodes, before and after treefold reconcile"
    subtitle = "Only bytes that match the checksums that the client recorded are written."
    Disk().replace(path, draw(title, subtitle, drawn).encode())


def _container(
    container_id: ContainerId,
    result: DemoResult,
    before: Mapping[str, ContainerTree],
    after: Mapping[str, ContainerTree],
) -> DrawnContainer:
    blocks = {b.block_id for trees in (before, after) for t in trees.values() for b in t.blocks}
    rows = [_rows(trees, blocks) for trees in (before, after)]
    found = compare(before).verdict.value.lower() if before else "not scanned"
    if container_id in result.unverifiable:
        # Its trees are empty: there is nothing to draw.
        found = "no checksums"
    return DrawnContainer(
        f"container {container_id}", rows[0], rows[1], found, _said(container_id, result, found)
    )


def _rows(trees: Mapping[str, ContainerTree], blocks: set[BlockId]) -> dict[str, list[BlockCell]]:
    return cells(trees, compare(trees), blocks) if trees else {}


def _said(container_id: ContainerId, result: DemoResult, found: str) -> str:
    """What became of a container."""
    if container_id in result.unverifiable:
        return "not changed"
    if container_id in result.lost:
        return "data lost on all"
    if container_id in result.conflicts:
        return "in conflict"
    if container_id in result.not_reconciled:
        return "not reconciled"
    if container_id in result.unhealed:
        return "not healed"
    return "as it was" if found == Verdict.MATCH.value.lower() else "healed, equal"
