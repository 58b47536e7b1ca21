"""Which windows of an object differ from those of its copy behind a verifier?

Both sides have a tree of CRCs over windows of 16 KiB, 64 children a node. The search
descends where nodes differ, a step a level. It decides what to send and proves nothing:
32 bits call a changed window unchanged once in 2^32, so the BLAKE3 of the whole result
is checked where it is made.
"""

from collections.abc import Callable, Sequence

from merkle.window_tree import FAN_OUT, WindowTree
from replicator.windows import TREE_WINDOW_BYTES, ChangedRange, ranges_of

# Nodes below which windows are asked for; beyond it the object is sent whole.
NODES_MAX = 1_024


def search_windows(
    ours: WindowTree,
    theirs_bytes: int,
    ask: Callable[[int, Sequence[int]], Sequence[Sequence[int]]],
) -> tuple[ChangedRange, ...] | None:
    """What must be replaced in an object of `theirs_bytes` (over 0) to make it ours;
    None if too many nodes differ.

    `ask(level, nodes)` gives the checksums at `level` of the children of each of these
    nodes of the level above, as the other side has them.

    Raises:
        ValueError: an answer has not as many checksums as that object has there.
    """
    ours_bytes = ours.size_bytes
    # Windows that exist in both with one length; of other lengths, only whole ones.
    common = len(ours.levels[0])
    if ours_bytes != theirs_bytes:
        common = min(ours_bytes, theirs_bytes) // TREE_WINDOW_BYTES
    theirs_windows = -(-theirs_bytes // TREE_WINDOW_BYTES)
    level = max(0, min(_depth(len(ours.levels[0])), _depth(theirs_windows)) - 1)
    parents = list(range(-(-common // FAN_OUT ** (level + 1))))
    while True:
        if len(parents) > NODES_MAX:
            return None
        answers = ask(level, parents) if parents else []
        different = list[int]()
        for parent, theirs in zip(parents, answers, strict=True):
            nodes = range(FAN_OUT * parent, min(FAN_OUT * (parent + 1), _count(common, level)))
            last = min(FAN_OUT * (parent + 1), _count(theirs_windows, level))
            if len(theirs) != last - FAN_OUT * parent:
                raise ValueError(f"{len(theirs)} checksums instead of {last - FAN_OUT * parent}")
            for node, checksum in zip(nodes, theirs, strict=False):
                # A node that reaches beyond what both have says nothing.
                is_common = (node + 1) * FAN_OUT**level <= common or ours_bytes == theirs_bytes
                if not is_common or int(ours.levels[level][node]) != checksum:
                    different.append(node)
        if level == 0:
            return ranges_of(different, theirs_bytes, ours_bytes, window_bytes=TREE_WINDOW_BYTES)
        parents, level = different, level - 1


def _count(windows: int, level: int) -> int:
    """How many nodes a level has over this many windows."""
    node_windows: int = FAN_OUT**level
    return -(-windows // node_windows)


def _depth(windows: int) -> int:
    """How many levels are above the windows."""
    depth = 0
    while _count(windows, depth) > 1:
        depth += 1
    return depth
