"""Lay a fresh tree over the stored one: a deletion, once seen, stays (rows W18-W22).

Live entries are only what the fresh tree saw; tombstones of either side survive, the
fresh side's checksum first.
"""

from merkle.tree import ContainerTree


def merge(fresh: ContainerTree, stored: ContainerTree | None) -> ContainerTree:
    """The tree to keep: `fresh`, with every tombstone of `stored` that `fresh` does not
    itself hold as deleted.
    """
    if stored is None:
        return fresh
    blocks = {block.block_id: block for block in fresh.blocks}
    for block in stored.blocks:
        ours = blocks.get(block.block_id)
        if block.deleted and not (ours and ours.deleted):
            blocks[block.block_id] = block
    return ContainerTree.of(fresh.container_id, blocks.values())
