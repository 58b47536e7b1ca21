"""The search for windows that differ finds just those, whatever the sizes."""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from merkle.object_checksum import Crc
from merkle.window_tree import FAN_OUT, WindowTree, window_tree
from replicator.window_search import NODES_MAX, search_windows
from replicator.windows import TREE_WINDOW_BYTES, ranges_of

COUNTS = st.one_of(st.integers(1, 200), st.integers(4000, 4400), st.sampled_from([64, 65, 4096]))


def tree_of(windows: Sequence[int], short_bytes: int) -> WindowTree:
    """The tree of an object whose last window lacks some bytes."""
    return window_tree(
        Crc.CRC32C,
        np.array(windows, np.uint64),
        size_bytes=len(windows) * TREE_WINDOW_BYTES - short_bytes,
        window_bytes=TREE_WINDOW_BYTES,
    )


class Other:
    """The other side, which counts what it is asked."""

    def __init__(self, tree: WindowTree) -> None:
        self.tree = tree
        self.asked = 0

    def __call__(self, level: int, nodes: Sequence[int]) -> list[list[int]]:
        self.asked += len(nodes)
        row = self.tree.levels[level]
        return [row[FAN_OUT * node : FAN_OUT * (node + 1)].tolist() for node in nodes]


@given(st.data(), COUNTS, st.integers(0, TREE_WINDOW_BYTES - 1), st.integers(0, 2**32))
def test_what_is_found_is_what_differs(
    data: st.DataObject, count: int, short_bytes: int, seed: int
) -> None:
    chance = random.Random(seed)
    ours = [chance.getrandbits(32) for _ in range(count)]
    theirs = list(ours)
    if data.draw(st.booleans(), label="another size"):
        theirs = theirs[: data.draw(st.integers(1, count))]
        theirs += [chance.getrandbits(32) for _ in range(data.draw(st.integers(0, 100)))]
        theirs_short = data.draw(st.integers(0, TREE_WINDOW_BYTES - 1))
    else:
        theirs_short = short_bytes
    for place in data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=20)):
        theirs[place] ^= 1
    other = Other(tree_of(theirs, theirs_short))
    tree = tree_of(ours, short_bytes)
    found = search_windows(tree, other.tree.size_bytes, other)
    sizes = other.tree.size_bytes, tree.size_bytes
    common = min(sizes) // TREE_WINDOW_BYTES if sizes[0] != sizes[1] else count
    changed = [place for place in range(common) if ours[place] != theirs[place]]
    assert found == ranges_of(changed, *sizes, window_bytes=TREE_WINDOW_BYTES)


def test_one_window_of_5_gib_costs_few_questions() -> None:
    chance = random.Random(1)
    ours = [chance.getrandbits(32) for _ in range((5 << 30) // TREE_WINDOW_BYTES)]
    theirs = list(ours)
    theirs[200_000] ^= 1
    other = Other(tree_of(theirs, 0))
    found = search_windows(tree_of(ours, 0), 5 << 30, other)
    assert found is not None
    assert [one.first for one in found] == [200_000 * TREE_WINDOW_BYTES]
    # One a level below the top.
    assert other.asked == 4


def test_an_object_that_changed_all_over_is_sent_whole() -> None:
    ours, theirs = [0] * (NODES_MAX + 1) * FAN_OUT, [1] * (NODES_MAX + 1) * FAN_OUT
    other = Other(tree_of(theirs, 0))
    assert search_windows(tree_of(ours, 0), other.tree.size_bytes, other) is None
    assert other.asked < NODES_MAX
