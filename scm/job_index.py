"""The jobs that the controller knows, and the ways to find them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.jobs import Job, JobId, JobState, Order, OrderState

# Ended jobs that can still be asked for by their ID; the store drops older ones too.
_JOBS_ENDED_MAX = 10_000


class JobIndex:
    """Jobs by ID, by container and by datanode. Not thread-safe: its owner holds a
    lock.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        # Jobs that have not ended, by container; in the order they were made.
        self._active: dict[ContainerId, JobId] = {}
        self._ended: dict[JobId, None] = {}
        self._in_flight: dict[JobId, None] = {}
        self._queued: dict[PeerId, dict[JobId, None]] = {}
        self._running: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def get(self, job_id: JobId) -> Job | None:
        """The job as it is now; None where it is not known, or no longer."""
        return self._jobs.get(job_id)

    def newest(self, state: JobState | None, limit: int) -> list[Job]:
        """Up to `limit` jobs, newest first; only those in `state`, if one is given."""
        newest = reversed(self._jobs.values())
        return list(islice((job for job in newest if state in (None, job.state)), limit))

    def active(self) -> Iterator[Job]:
        """The jobs that have not ended, oldest first."""
        return (self._jobs[job_id] for job_id in self._active.values())

    @property
    def active_count(self) -> int:
        """How many jobs have not ended."""
        return len(self._active)

    def active_job_of(self, container_id: ContainerId) -> JobId | None:
        """The job of a container that has not ended."""
        return self._active.get(container_id)

    @property
    def in_flight(self) -> list[JobId]:
        """Jobs with an order at a datanode."""
        return list(self._in_flight)

    def in_flight_at(self, peer: PeerId) -> list[JobId]:
        """Jobs with an order at this datanode."""
        found = []
        for job_id in self._in_flight:
            order = self._jobs[job_id].order(peer)
            if order is not None and order.state.is_in_flight:
                found.append(job_id)
        return found

    def queued_at(self, peer: PeerId) -> Iterable[JobId]:
        """Jobs with an order that waits for this datanode, oldest first."""
        return self._queued.get(peer, {}).keys()

    @property
    def peers_with_queue(self) -> list[PeerId]:
        """Datanodes that an order waits for."""
        return list(self._queued)

    @property
    def peers_with_orders(self) -> set[PeerId]:
        """Datanodes that an order waits for, or is at."""
        return {*self._queued, *(peer for peer, running in self._running.items() if running)}

    def running_at(self, peer: PeerId) -> int:
        """How many orders are at this datanode."""
        return self._running[peer]

    def keep(self, job: Job) -> list[tuple[Order, Order]]:
        """Take the job as it is now into every index.

        Returns the orders that are at a datanode no longer: as they were, and as they
        are now.
        """
        earlier = self._jobs.get(job.job_id)
        self._jobs[job.job_id] = job
        landed = []
        for before in earlier.orders if earlier else ():
            self._running[before.peer] -= before.state.is_in_flight
            after = job.order(before.peer)
            if after and before.state.is_in_flight and not after.state.is_in_flight:
                landed.append((before, after))
        for order in job.orders:
            self._running[order.peer] += order.state.is_in_flight
            if order.state is OrderState.QUEUED:
                self._queued.setdefault(order.peer, {}).setdefault(job.job_id)
            elif order.peer in self._queued:
                self._queued[order.peer].pop(job.job_id, None)
                if not self._queued[order.peer]:
                    del self._queued[order.peer]
        if any(order.state.is_in_flight for order in job.orders):
            self._in_flight.setdefault(job.job_id)
        else:
            self._in_flight.pop(job.job_id, None)
        if job.state.is_terminal:
            self._end(job)
        else:
            self._active[job.container_id] = job.job_id
        return landed

    def _end(self, job: Job) -> None:
        if self._active.get(job.container_id) == job.job_id:
            del self._active[job.container_id]
        self._ended[job.job_id] = None
        if len(self._ended) > _JOBS_ENDED_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._jobs[oldest]
