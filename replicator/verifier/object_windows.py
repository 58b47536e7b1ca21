"""Window trees of objects, for the question where two versions of an object differ."""

import threading
from collections import OrderedDict

import numpy as np

from merkle.checksum import ChecksumType, window_checksums
from merkle.object_checksum import Crc
from merkle.window_tree import FAN_OUT, WindowTree, window_tree
from proof.messages import WindowsAnswer, WindowsQuestion
from replicator.hashing import ContentHasher
from replicator.stores.errors import ObjectMissingError
from replicator.stores.port import ObjectFacts, Store
from replicator.windows import TREE_WINDOW_BYTES
from runtime.errors import UsageError

# A tree of 5 GiB takes 3 MB; a comparison descends in one object at a time.
_TREES_MAX = 8
# Reading a larger object within one call would outlast its deadline.
_OBJECT_BYTES_MAX = 64 << 30


class ObjectWindows:
    """Answers questions about the windows of a store's objects, which it reads once.
    Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._trees: OrderedDict[ObjectFacts, WindowTree] = OrderedDict()

    def answer(self, question: WindowsQuestion) -> WindowsAnswer:
        """The checksums below one node, of the object as it is now.

        Raises:
            ObjectMissingError: there is no such object.
            UsageError: it has no windows, too many, or no such node.
            StoreError: the object cannot be read.
        """
        facts = self._store.reader.facts(question.key)
        if facts is None:
            raise ObjectMissingError(f"{question.key} does not exist", key=question.key)
        if not 0 < facts.size_bytes <= _OBJECT_BYTES_MAX:
            raise UsageError(f"{question.key} has no window tree", size_bytes=facts.size_bytes)
        tree = self._tree(facts)
        if question.level >= len(tree.levels):
            raise UsageError(f"{question.key} has {len(tree.levels)} levels of windows")
        nodes = tree.levels[question.level]
        first = FAN_OUT * question.index
        if first >= len(nodes):
            raise UsageError(f"{question.key} has {len(nodes)} windows at this level")
        return WindowsAnswer(tuple(nodes[first : first + FAN_OUT].tolist()))

    def _tree(self, facts: ObjectFacts) -> WindowTree:
        # One object at a time is read: a client that asks again waits for the answer.
        with self._lock:
            tree = self._trees.pop(facts, None) or read_window_tree(self._store, facts)
            self._trees[facts] = tree
            if len(self._trees) > _TREES_MAX:
                self._trees.popitem(last=False)
            return tree


def read_window_tree(
    store: Store, facts: ObjectFacts, hasher: ContentHasher | None = None
) -> WindowTree:
    """Read an object that is not empty, and compute the tree of its windows; `hasher`
    gets all bytes.

    Raises:
        PreconditionFailedError: the object is another one by now.
        StoreError: it cannot be read.
    """
    found, rest = bytearray(), b""
    with store.reader.read(facts) as pieces:
        for piece in pieces:
            if hasher is not None:
                hasher.update(piece)
            data = rest + piece
            whole = len(data) - len(data) % TREE_WINDOW_BYTES
            found += window_checksums(data[:whole], ChecksumType.CRC32C, TREE_WINDOW_BYTES)
            rest = data[whole:]
    found += window_checksums(rest, ChecksumType.CRC32C, TREE_WINDOW_BYTES)
    windows = np.frombuffer(bytes(found), ">u4").astype(np.uint64)
    return window_tree(
        Crc.CRC32C, windows, size_bytes=facts.size_bytes, window_bytes=TREE_WINDOW_BYTES
    )
