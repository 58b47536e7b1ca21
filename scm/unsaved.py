"""The changes of a controller that are not stored yet, and when they are stored.

Changes of a state are stored at once, progress at most every ten seconds. A change
keeps its value here until it is stored: by then the controller may have dropped the job
from its memory.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.jobs import Job, JobId
from scm.limits import LIMITS, ControllerLimits
from scm.policy import Visit
from scm.ports import JobStore

# Changes that are not urgent are saved at most this often.
_SAVE_EVERY_S = 10.0


class UnsavedChanges:
    """What the next save stores. Not thread-safe: the caller holds a lock."""

    def __init__(self, store: JobStore, now_s: float, limits: ControllerLimits = LIMITS) -> None:
        self._limits = limits
        self.is_urgent = False
        self._store = store
        self._jobs: dict[JobId, Job] = {}
        self._visits: dict[ContainerId, Visit] = {}
        # Log lines of decisions that are not on disk yet.
        self._lines: list[Callable[[], None]] = []
        self._holders: dict[ContainerId, AbstractSet[PeerId]] = {}
        self._saved_at_s = self._holders_saved_at_s = now_s

    def add_job(self, job: Job) -> None:
        """Store this state of a job with the next save."""
        self._jobs[job.job_id] = job

    def add_visit(self, visit: Visit) -> None:
        """Store this visit with the next save."""
        self._visits[visit.container_id] = visit

    def add_holders(self, container_id: ContainerId, peers: AbstractSet[PeerId]) -> None:
        """Store the holders of a container with one of the next saves of holders."""
        self._holders[container_id] = peers

    def add_line(self, line: Callable[[], None]) -> None:
        """Write this log line after the next save."""
        self._lines.append(line)

    def save_if_due(self, now_s: float) -> None:
        """Save the changes if some are urgent, or if the last save is long ago.

        Raises:
            DatabaseError: they cannot be saved; the next call tries again.
        """
        if self._jobs and (self.is_urgent or now_s - self._saved_at_s >= _SAVE_EVERY_S):
            self.save([], now_s)

    def save_holders_if_due(self, now_s: float) -> None:
        """Save some of the changed holders if the last such save is long ago.

        Raises:
            DatabaseError: they cannot be saved; the next call tries again.
        """
        if not self._holders or now_s - self._holders_saved_at_s < _SAVE_EVERY_S:
            return
        saved = dict(islice(self._holders.items(), self._limits.holders_saved_max))
        self._store.save(holders=saved)
        for container_id in saved:
            del self._holders[container_id]
        self._holders_saved_at_s = now_s

    def save(self, ahead: Sequence[Job], now_s: float) -> None:
        """Save all changes, and `ahead`, the next state of some jobs; all or none.

        Raises:
            DatabaseError: they cannot be saved; the next call tries again.
        """
        jobs = self._jobs | {job.job_id: job for job in ahead}
        self._store.save(jobs.values(), self._visits.values())
        self._jobs.clear()
        self._visits.clear()
        self._saved_at_s, self.is_urgent = now_s, False
        lines, self._lines = self._lines, []
        for line in lines:
            line()
