"""Merges a fresh tree into the stored one without losing a deletion (rows W18-W22).

Live blocks come from the fresh tree only. Tombstones come from both trees; the fresh
tree's checksum takes precedence.
"""

from merkle.tree import ContainerTree


def merge(fresh: ContainerTree, stored: ContainerTree | None) -> ContainerTree:
    """The tree to store: `fresh`, plus every tombstone of `stored` whose block `fresh`
    does not have as deleted.
    """
    if stored is None:
        return fresh
    blocks = {block.block_id: block for block in fresh.blocks}
    for block in stored.blocks:
        ours = blocks.get(block.block_id)
        if block.deleted and not (ours and ours.deleted):
            blocks[block.block_id] = block
    return ContainerTree.of(fresh.container_id, blocks.values())
