"""Plans of repairs, made on request and kept for the orders that name them."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from dnagent.heartbeat import PeerAddress
from dnagent.store import ReplicaStore
from merkle.replica import PeerId
from merkle.tree import ContainerId
from repair.planning import make_plan
from repair.ports import Peer
from repair.replica_plan import PlanShelf, ReplicaPlan
from runtime.errors import BusyError

# A plan reads damaged chunks here, and fetches them from the peers.
_PLANS_AT_ONCE_MAX = 2


class RepairPlans:
    """Makes plans and keeps them in memory. Thread-safe."""

    def __init__(
        self,
        own: PeerId,
        store: ReplicaStore,
        *,
        connect: Callable[[PeerAddress], Peer],
        return_to_service: bool,
        reserve: Callable[[int], None],
    ) -> None:
        """`connect` opens a connection to a peer. `reserve` limits the rate of fetches
        (repair.runner.execute_remote).
        """
        self._own = own
        self._store = store
        self._connect = connect
        self._return_to_service = return_to_service
        self._reserve = reserve
        self._slots = threading.Semaphore(_PLANS_AT_ONCE_MAX)
        self._lock = threading.Lock()
        self._shelf = PlanShelf(time.time())

    def make(
        self,
        container_id: ContainerId,
        peers: Sequence[PeerAddress],
        cancelled: Callable[[], bool],
    ) -> ReplicaPlan:
        """Plan the repair of our replica from these peers, and keep the plan.

        Raises:
            BusyError: other plans are being made.
            ReadOnlyError: our replica may not be repaired.
            ContainerNotFoundError: the container is not on this datanode.
            ReconcileError: as in repair.planning.make_plan.
        """
        if not self._slots.acquire(blocking=False):
            raise BusyError(
                f"{_PLANS_AT_ONCE_MAX} plans are already being made", limit=_PLANS_AT_ONCE_MAX
            )
        try:
            with ExitStack() as stack:
                connected: dict[PeerId, Peer] = {}
                for address in peers:
                    connected[address.peer] = peer = self._connect(address)
                    stack.callback(peer.close)
                replica = self._store.open_replica(
                    container_id, "plan", cancelled=threading.Event(), on_bytes=lambda _: None
                )
                plan = make_plan(
                    container_id,
                    self._own,
                    replica,
                    connected,
                    may_return=self._return_to_service,
                    reserve=self._reserve,
                    cancelled=cancelled,
                )
        finally:
            self._slots.release()
        with self._lock:
            self._shelf.add(plan)
        return plan

    def get(self, digest: str) -> ReplicaPlan:
        """The plan of this digest.

        Raises:
            PlanUnknownError: it is not there.
        """
        with self._lock:
            return self._shelf.get(digest)
