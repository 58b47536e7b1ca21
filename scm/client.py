"""The Controller service as commands use it: values for messages, pages put together,
errors under their own names, a deadline on every call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protos import controller_pb2 as pb
from protos.controller_pb2_grpc import ControllerStub
from protos.errors import ControllerUnavailableError
from runtime.rpc import Tls, named_errors, open_channel
from scm.controller import ReconcileResponse
from scm.messages import container_from, datanode_from, job_from, outcome_from
from scm.registry import Datanode
from scm.views import ContainerStatus, JobStatus

DEADLINE_S = 30.0
# The controller's own limits on one call.
PAGE = 1_000
_IDS_PER_CALL = 10_000


class ControllerClient:
    """A controller at an address; connects on first use.

    Every call may raise ControllerUnavailableError, RemoteProtocolError where an answer
    is invalid, and the errors that the controller names.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, insecure: bool = False) -> None:
        self.address = address
        self.tls = tls
        self.insecure = insecure
        self._channel = open_channel(address, tls=tls, insecure=insecure)
        self._stub = ControllerStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def containers(
        self, *, state: str = "", comparison: str = "", after: int = 0
    ) -> Iterator[ContainerStatus]:
        """All containers beyond `after`, ascending, page by page as they are taken."""
        while True:
            request = pb.ListContainersRequest(
                state=state, comparison=comparison, after_container_id=after, limit=PAGE
            )
            with self._named():
                page: pb.ListContainersResponse = self._stub.ListContainers(
                    request, timeout=DEADLINE_S
                )
            yield from map(container_from, page.containers)
            if not page.more or not page.containers:
                return
            after = page.containers[-1].container_id

    def get_containers(self, container_ids: Sequence[int]) -> dict[int, ContainerStatus]:
        """Those that are known, by ID."""
        found: dict[int, ContainerStatus] = {}
        for chunk in _chunks(container_ids, PAGE):
            with self._named():
                answer: pb.GetContainersResponse = self._stub.GetContainers(
                    pb.GetContainersRequest(container_ids=chunk), timeout=DEADLINE_S
                )
            found |= {view.container_id: container_from(view) for view in answer.containers}
        return found

    def reconcile(
        self,
        container_ids: Sequence[int],
        *,
        dry_run: bool,
        reason: str = "",
        requested_by: str = "",
    ) -> list[ReconcileResponse]:
        """What came of the request, one answer for each container."""
        outcomes: list[ReconcileResponse] = []
        for chunk in _chunks(container_ids, _IDS_PER_CALL):
            request = pb.ReconcileRequest(
                container_ids=chunk, dry_run=dry_run, reason=reason, requested_by=requested_by
            )
            with self._named():
                answer: pb.ReconcileResponse = self._stub.Reconcile(request, timeout=DEADLINE_S)
            outcomes += map(outcome_from, answer.outcomes)
        return outcomes

    def jobs(self, *, state: str = "", limit: int = 0) -> list[JobStatus]:
        """Newest first; 0 for as many as the controller gives at once."""
        with self._named():
            answer: pb.ListJobsResponse = self._stub.ListJobs(
                pb.ListJobsRequest(state=state, limit=limit), timeout=DEADLINE_S
            )
        return [job_from(job) for job in answer.jobs]

    def job(self, job_id: str) -> JobStatus:
        """The job as it is now; JobNotFoundError if there is none."""
        with self._named():
            job: pb.Job = self._stub.GetJob(pb.GetJobRequest(job_id=job_id), timeout=DEADLINE_S)
        return job_from(job)

    def cancel(self, job_id: str) -> JobStatus:
        """Request that a job ends; returns the job as it is then."""
        with self._named():
            job: pb.Job = self._stub.CancelJob(
                pb.CancelJobRequest(job_id=job_id), timeout=DEADLINE_S
            )
        return job_from(job)

    def live_datanodes(self) -> list[Datanode]:
        """The datanodes whose agents are heard from."""
        with self._named():
            answer: pb.ListDatanodesResponse = self._stub.ListDatanodes(
                pb.ListDatanodesRequest(), timeout=DEADLINE_S
            )
        return [datanode_from(view.datanode) for view in answer.datanodes if view.live]

    def scan(self, container_ids: Sequence[int]) -> tuple[list[int], int]:
        """Containers that are unknown, and how many scans were ordered."""
        unknown, ordered = list[int](), 0
        for chunk in _chunks(container_ids, _IDS_PER_CALL):
            with self._named():
                answer: pb.ScanResponse = self._stub.Scan(
                    pb.ScanRequest(container_ids=chunk), timeout=DEADLINE_S
                )
            unknown += answer.unknown_container_ids
            ordered += answer.commands
        return unknown, ordered

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            with named_errors(f"controller {self.address}", ControllerUnavailableError):
                yield
        except ControllerUnavailableError as error:
            raise ControllerUnavailableError(
                f"no controller answers at {self.address}",
                hint=error.hint
                or "Start one with `treefold scm run`, or name another with --controller.",
                **error.facts | {"detail": error.message},
            ) from error


def _chunks(container_ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (container_ids[at : at + size] for at in range(0, len(container_ids), size))
