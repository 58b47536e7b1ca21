"""The jobs of the controller, indexed by ID, container and datanode."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos.errors import JobNotFoundError, unambiguous
from scm.jobs import Job, JobId, JobState, Order, OrderState
from scm.limits import LIMITS, ControllerLimits


class JobIndex:
    """Jobs by ID, container and datanode. Not thread-safe: the caller holds a lock."""

    def __init__(self, limits: ControllerLimits = LIMITS) -> None:
        self._limits = limits
        self._jobs: dict[JobId, Job] = {}
        # Active jobs by container, oldest first.
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
        """The job; None if it is unknown or was dropped."""
        return self._jobs.get(job_id)

    def find(self, text: str) -> JobId:
        """The ID of a job, given whole or as a beginning that no other ID has.

        Raises:
            AmbiguousIdError: several begin so.
            JobNotFoundError: none does.
        """
        if (job_id := JobId(text)) in self._jobs:
            return job_id
        found = [job_id for job_id in reversed(self._jobs) if job_id.startswith(text)]
        if not found or not text:
            raise JobNotFoundError(f"There is no job {text}.")
        return unambiguous(text, found, "jobs")

    def newest(self, state: JobState | None, limit: int) -> list[Job]:
        """Up to `limit` jobs in `state`, newest first; None selects all states."""
        newest = reversed(self._jobs.values())
        return list(islice((job for job in newest if state in (None, job.state)), limit))

    def active(self) -> Iterator[Job]:
        """The jobs that have not ended, oldest first."""
        return (self._jobs[job_id] for job_id in self._active.values())

    @property
    def active_count(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._active)

    def active_job_of(self, container_id: ContainerId) -> JobId | None:
        """The active job of a container; None if there is none."""
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
        """Unpaused jobs with an order queued for this datanode, oldest first."""
        return self._queued.get(peer, {}).keys()

    @property
    def peers_with_queue(self) -> list[PeerId]:
        """Datanodes with queued orders of jobs that are not paused."""
        return list(self._queued)

    @property
    def peers_with_orders(self) -> set[PeerId]:
        """Datanodes with orders queued or in flight."""
        return {*self._queued, *(peer for peer, running in self._running.items() if running)}

    def running_at(self, peer: PeerId) -> int:
        """The number of orders in flight at this datanode."""
        return self._running[peer]

    def put(self, job: Job) -> list[tuple[Order, Order]]:
        """Add or replace a job in every index.

        Returns the orders that are no longer in flight, each before and after the
        change.
        """
        earlier = self._jobs.get(job.job_id)
        self._jobs[job.job_id] = job
        left = []
        for before in earlier.orders if earlier else ():
            self._running[before.peer] -= before.state.is_in_flight
            after = job.order(before.peer)
            if after and before.state.is_in_flight and not after.state.is_in_flight:
                left.append((before, after))
        for order in job.orders:
            self._running[order.peer] += order.state.is_in_flight
            # An order of a paused job must not take a place in the dispatch search.
            if order.state is OrderState.QUEUED and not job.pause:
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
            self._record_end(job)
        else:
            self._active[job.container_id] = job.job_id
        return left

    def _record_end(self, job: Job) -> None:
        if self._active.get(job.container_id) == job.job_id:
            del self._active[job.container_id]
        self._ended[job.job_id] = None
        if len(self._ended) > self._limits.jobs_ended_max:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._jobs[oldest]
