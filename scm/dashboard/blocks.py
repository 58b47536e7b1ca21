"""A container, block by replica, by the trees that its agents have now.

Each look costs a call to every agent, so that all who look within some seconds see the
same, and few containers are asked for at a time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock

from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.tree import ContainerTree, root_hex
from repair.picture import BlockCell, binned, cells
from runtime.rpc import Deadlines
from runtime.tls_files import Tls
from scm.replica_trees import compare_live, fetch_trees
from scm.views import ContainerStatus

# More blocks share a cell, which shows the worst of them.
_CELLS_MAX = 60
# An agent that takes longer is left out, and named.
_DEADLINES = Deadlines(tree_s=5.0)
_FRESH_S = 4.0
_CONTAINERS_MAX = 32
_AT_ONCE_MAX = 2


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica: its root in hexadecimal digits and its cells, or why it has none."""

    name: str
    root: str = ""
    cells: Sequence[BlockCell] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """The rows of all replicas, and what a comparison says; `doubt` is why the verdict
    may be another one, and empty where nothing was left out.
    """

    rows: Sequence[ReplicaRow]
    blocks: int
    verdict: Verdict
    doubt: str

    @property
    def columns(self) -> int:
        """The number of cells of a row."""
        return max((len(row.cells) for row in self.rows), default=0)


Fetch = Callable[
    [ContainerStatus], tuple[Mapping[str, ContainerTree], Mapping[str, ReconcileError]]
]


def fetch_by(tls: Tls | None, *, insecure: bool) -> Fetch:
    """Fetches trees from agents with these files."""
    return lambda container: fetch_trees(
        container, tls=tls, insecure=insecure, deadlines=_DEADLINES
    )


class BlockPictures:
    """Pictures of containers, each as fresh as some seconds. Thread-safe."""

    def __init__(self, fetch: Fetch, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = monotonic_s
        self._lock = Lock()
        self._turns = BoundedSemaphore(_AT_ONCE_MAX)
        self._known = dict[int, tuple[float, BlockPicture]]()

    def picture(self, container: ContainerStatus) -> BlockPicture | None:
        """The picture of a container; None while agents are asked about others."""
        with self._lock:
            known = self._known.get(container.container_id)
        if known and self._clock() - known[0] < _FRESH_S:
            return known[1]
        if not self._turns.acquire(blocking=False):
            return known[1] if known else None
        try:
            picture = _picture(container, *self._fetch(container))
        finally:
            self._turns.release()
        with self._lock:
            self._known.pop(container.container_id, None)
            self._known[container.container_id] = self._clock(), picture
            while len(self._known) > _CONTAINERS_MAX:
                self._known.pop(next(iter(self._known)))
        return picture


def _picture(
    container: ContainerStatus,
    trees: Mapping[str, ContainerTree],
    errors: Mapping[str, ReconcileError],
) -> BlockPicture:
    """The picture of what was fetched."""
    verdict, doubt = Verdict.UNKNOWN, "no replica's tree could be read"
    found = dict[str, list[BlockCell]]()
    if trees:
        compared, doubt = compare_live(container, trees)
        verdict, found = compared.verdict, cells(trees, compared)
    rows = []
    for one in container.replicas:
        name = one.datanode.peer
        if name in found:
            shown = binned(found[name], _CELLS_MAX)
            rows.append(ReplicaRow(name, root_hex(trees[name].data_checksum), shown))
        else:
            error = errors.get(name)
            rows.append(ReplicaRow(name, fault=error.message if error else "not live"))
    blocks = max(map(len, found.values()), default=0)
    return BlockPicture(rows, blocks, verdict, doubt)
