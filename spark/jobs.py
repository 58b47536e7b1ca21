"""Jobs of a session: followed as they run, and cancelled on Ctrl-C.

A session is this process's own Spark, or one of a server of Spark Connect. The latter
has no SparkContext here: all that needs one is in this module and in spark.session.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Thread
from time import sleep
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql.connect.shell.progress import ProgressHandler, StageInfo

T = TypeVar("T")

# What a failed call of either kind of session raises.
SPARK_ERRORS = (PySparkException, Py4JError)

_PROGRESS_EVERY_S = 0.5
# A server that is gone is asked again for minutes; whoever pressed Ctrl-C is not kept.
_CANCELLING_MAX_S = 5.0
# More rows than a cluster has cores, so that each of its tasks has one.
_COUNTED_ROWS = 1 << 16


def is_remote(session: SparkSession) -> bool:
    """Whether a server of Spark Connect runs the session."""
    # Its class only looks like the other one.
    return not isinstance(session, SparkSession)


def cores(session: SparkSession) -> int:
    """How many tasks the session's Spark runs at once, about.

    Raises:
        PySparkException: the server cannot say.
    """
    if not is_remote(session):
        return session.sparkContext.defaultParallelism
    # As many partitions as Spark would make itself.
    numbers = session.range(_COUNTED_ROWS).selectExpr("spark_partition_id() AS number")
    return numbers.distinct().count()


def watched(
    session: SparkSession,
    description: str,
    work: Callable[[], T],
    report: Callable[[int, int], None],
) -> T:
    """Run `work`, and return its result.

    `report` gets the number of tasks done and of tasks known so far, at most every half
    second. An interrupt cancels the jobs on the cluster.

    `work` and `report` run in threads of their own. If Ctrl-C cut a JVM reply short in
    this thread, the rest of it would be read as the reply to the next call.
    """
    jobs: _Jobs = (
        _ServedJobs(session, description)
        if is_remote(session)
        else _ContextJobs(session.sparkContext, description)
    )
    outcome, cancelled = Future[T](), Event()

    def run() -> None:
        try:
            jobs.begin()
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by outcome.result()
            outcome.set_exception(error)

    def follow() -> None:
        seen = (0, 0)
        while not outcome.done():
            if cancelled.wait(_PROGRESS_EVERY_S):
                if outcome.done():
                    return
                # Repeated until `work` ends: it may be about to start another job.
                jobs.cancel()
                sleep(_PROGRESS_EVERY_S)
                continue
            if (now := jobs.tasks()) != seen:
                seen = now
                report(*now)

    threads = [jobs.thread(target, f"{description} on Spark") for target in (run, follow)]
    try:
        for thread in threads:
            thread.start()
        return outcome.result()
    finally:
        cancelled.set()
        for thread in threads:
            thread.join(jobs.joined_within_s)
        jobs.end()


class _Jobs(Protocol):
    """The jobs that one call of `watched` starts."""

    # How long to wait for its threads once all is over; None is for ever.
    joined_within_s: float | None

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A thread that may call Spark."""

    def begin(self) -> None:
        """Mark the jobs that this thread starts from now on."""

    def tasks(self) -> tuple[int, int]:
        """How many tasks are done, and how many are known."""

    def cancel(self) -> None:
        """Cancel those that run."""

    def end(self) -> None:
        """No more jobs are started."""


class _ContextJobs:
    """Jobs of this process's own Spark: a job group."""

    joined_within_s: float | None = None

    def __init__(self, context: SparkContext, description: str) -> None:
        self._context, self._description = context, description
        self._group = f"{description}-{uuid4()}"
        self._tracker = context.statusTracker()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return InheritableThread(target=target, name=name, daemon=True)

    def begin(self) -> None:
        self._context.setJobGroup(self._group, self._description, interruptOnCancel=True)

    def tasks(self) -> tuple[int, int]:
        of, group = self._tracker, self._group
        jobs = [job for i in of.getJobIdsForGroup(group) if (job := of.getJobInfo(i))]
        stages = [stage for job in jobs for i in job.stageIds if (stage := of.getStageInfo(i))]
        return (
            sum(stage.numCompletedTasks for stage in stages),
            sum(stage.numTasks for stage in stages),
        )

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)

    def end(self) -> None:
        pass


class _ServedJobs:
    """Jobs of a server: operations with a tag, whose progress comes with their
    results.
    """

    joined_within_s: float | None = _CANCELLING_MAX_S

    def __init__(self, session: SparkSession, description: str) -> None:
        self._session = session
        self._tag = f"{description}-{uuid4()}"
        # By operation, the tasks done and known.
        self._tasks = dict[str | None, tuple[int, int]]()
        # Any callable will do, whatever the annotation says.
        self._handler = cast("ProgressHandler", self._note)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return Thread(target=target, name=name, daemon=True)

    def begin(self) -> None:
        # Both are of this thread, or of this session: it runs one `work` at a time.
        self._session.addTag(self._tag)
        self._session.registerProgressHandler(self._handler)

    def tasks(self) -> tuple[int, int]:
        done, known = zip((0, 0), *self._tasks.copy().values(), strict=True)
        return sum(done), sum(known)

    def cancel(self) -> None:
        # A server that is gone runs none.
        with suppress(PySparkException):
            self._session.interruptTag(self._tag)

    def end(self) -> None:
        self._session.removeProgressHandler(self._handler)

    def _note(
        self,
        stages: "Iterable[StageInfo] | None",
        inflight_tasks: int,
        operation_id: str | None,
        done: bool,
    ) -> None:
        held = list(stages or ())
        if held:
            self._tasks[operation_id] = (
                sum(stage.num_completed_tasks for stage in held),
                sum(stage.num_tasks for stage in held),
            )
