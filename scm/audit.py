"""The controller's audit file: who ordered, changed and scanned what and why, how each
job ended, and what was refused.

A line is on disk before what it records is done; that of a job's end may be there
twice, if the controller ends between the line and its own record of the end.
"""

from collections.abc import Iterable, Sequence

from merkle.tree import ContainerId, root_hex
from runtime.audit_chain import AuditFile
from runtime.errors import DiskError
from runtime.log import error_fields, get_logger
from scm.events import CONTROLLER_EVENTS
from scm.jobs import Job
from scm.policy import Root

_log = get_logger("scm", CONTROLLER_EVENTS)


class ControllerAudit(AuditFile):
    """Records what a controller does (scm.ports.JobAudit). Thread-safe."""

    def ordered(self, jobs: Sequence[Job]) -> None:
        """Record jobs that are about to start, each with the roots of all replicas.

        Raises:
            DiskError: the lines are not on disk; the jobs must not start.
        """
        self.append(
            [
                {
                    "kind": "order",
                    "container": job.container_id,
                    "job": job.job_id,
                    "who": job.requested_by,
                    "why": job.reason,
                    "automatic": job.automatic,
                    "datanodes": [order.peer for order in job.orders],
                    "roots": _roots_json(job.roots),
                }
                for job in jobs
            ]
        )

    def requested(self, kind: str, job: Job, who: str, why: str = "") -> None:
        """Record what somebody requests of a job: "cancel", "pause", "resume",
        "throttle", or "takeover" of one that automatic mode began.

        Raises:
            DiskError: the line is not on disk; the job must go on as it is.
        """
        named = {"container": job.container_id, "job": job.job_id, "who": who}
        self.append([{"kind": kind, **named, "why": why}])

    def scans_ordered(self, container_ids: Sequence[ContainerId], who: str) -> None:
        """Record that scans of all replicas of these containers are about to be sent.

        Raises:
            DiskError: the lines are not on disk; no scan may be sent.
        """
        self.append(
            [{"kind": "scan", "container": one, "who": who, "why": ""} for one in container_ids]
        )

    def ended(self, job: Job) -> None:
        """Record how a job ended, and the roots of the replicas then. The end is not
        held up: a line that cannot be written is an error in the log.
        """
        progress = [order.progress for order in job.orders]
        verdict = job.verdict
        try:
            self.append(
                [
                    {
                        "kind": "end",
                        "container": job.container_id,
                        "job": job.job_id,
                        "who": job.requested_by,
                        "why": job.detail,
                        "state": job.state.value,
                        "verdict": verdict.value if verdict else None,
                        "bytes_written": sum(one.bytes_written for one in progress),
                        "chunks_repaired": sum(one.chunks_repaired for one in progress),
                        "datanodes": {order.peer: order.state.value for order in job.orders},
                        "roots": _roots_json(o.root for o in job.orders if o.root is not None),
                    }
                ]
            )
        except DiskError as error:
            _log.error("audit_failed", job=job.job_id, **error_fields(error))


def _roots_json(roots: Iterable[Root]) -> dict[str, str | None]:
    return {peer: None if checksum is None else root_hex(checksum) for peer, checksum, _ in roots}
