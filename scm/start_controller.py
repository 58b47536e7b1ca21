"""Make the controller of the settings: of agents, or of a cluster by its SCMs."""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ozone.scm_client import ScmClient
from runtime.errors import ConfigError
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from scm.cluster_controller import ClusterController
from scm.cluster_feed import ClusterFeed
from scm.config import ControllerConfig
from scm.controller import Controller
from scm.jobs import Job, JobId
from scm.ports import CommandSink, JobAudit, JobStore

# Less than a failover takes; then the next SCM is tried, or the same one again.
_SCM_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a controller lives in; `lock` is held by whoever calls it."""

    store: JobStore
    audit: JobAudit
    lock: threading.Lock
    clock: Callable[[], float]
    metrics: Metrics
    thread_health: ThreadHealth
    pause_after_s: float


class SoleLeader:
    """The leadership of a single controller: it leads from its start, in a new term."""

    def __init__(self, store: JobStore) -> None:
        self._term = store.next_term()

    def term(self) -> int | None:
        """The term that began at the start."""
        return self._term


def make_controller(
    config: ControllerConfig, sink: CommandSink, around: Surroundings
) -> tuple[Controller, ClusterFeed | None]:
    """The controller, whose orders to agents go to `sink`; or one with the feed of its
    cluster, which has not begun.

    Raises:
        ConfigError: the state folder is that of a controller of the other kind.
        DatabaseError: the store cannot be read.
    """

    def count_job(job: Job) -> None:
        around.metrics.count("scm_jobs_finished_total", state=job.state.value)

    make: Callable[..., Controller] = partial(Controller, sink=sink)
    if config.cluster.scms:
        make = partial(
            ClusterController,
            settle_s=config.cluster.settle_s,
            requests_per_hour=config.cluster.requests_per_hour,
        )
    elif any(job.run for job in around.store.jobs() if not job.state.is_terminal):
        raise ConfigError(
            "state_folder: it is that of a controller with [cluster]",
            hint="Give a controller of agents a folder of its own.",
        )
    controller = make(
        rules=config.rules,
        store=around.store,
        leadership=SoleLeader(around.store),
        audit=around.audit,
        new_job_id=lambda: JobId(uuid.uuid4().hex[:12]),
        now_s=around.clock(),
        pause_after_s=around.pause_after_s,
        on_finished=count_job,
    )
    if not isinstance(controller, ClusterController):
        return controller, None
    feed = ClusterFeed(
        ScmClient(config.cluster.scms, deadline_s=_SCM_DEADLINE_S),
        controller,
        around.lock,
        around.clock,
        around.metrics,
        poll_s=config.cluster.poll_s,
        read_every_s=config.cluster.read_every_s,
        thread_health=around.thread_health,
    )
    return controller, feed
