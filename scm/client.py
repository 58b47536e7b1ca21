"""A client of the Controller service, for commands.

It returns values instead of messages, joins pages, raises named errors, and sets a
deadline on every call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from merkle.replica import PeerId
from protos import controller_pb2 as pb
from protos.controller_pb2_grpc import ControllerStub
from protos.errors import ControllerUnavailableError
from runtime.roles import Identity, Role
from runtime.rpc import named_errors, open_channel
from runtime.tls_files import Tls
from scm.datanodes import Datanode
from scm.messages import (
    container_from,
    controller_status_from,
    datanode_view_from,
    job_from,
    outcome_from,
)
from scm.planned import PlannedOrder
from scm.views import ContainerStatus, ControllerStatus, DatanodeView, JobStatus, ReconcileResponse

DEADLINE_S = 30.0
# The controller's limits for one call.
PAGE = 1_000
_IDS_PER_CALL = 10_000


class ControllerClient:
    """A client of the controller at an address; it connects on first use.

    Every call may raise ControllerUnavailableError, RemoteProtocolError for an invalid
    response, and the errors that the controller returns.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, insecure: bool = False) -> None:
        self.address = address
        self.tls = tls
        self.insecure = insecure
        self._channel = open_channel(address, tls=tls, insecure=insecure, server=Role.CONTROLLER)
        self._stub = ControllerStub(self._channel)

    def agent_channel(self, peer: PeerId, address: str) -> grpc.Channel:
        """A channel to the agent of a datanode, by our own files; see open_channel.

        Raises:
            ConfigError: the address needs TLS, and we have none.
        """
        server = Identity(Role.DATANODE, peer)
        return open_channel(address, tls=self.tls, insecure=self.insecure, server=server)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def containers(
        self, *, state: str = "", comparison: str = "", after: int = 0
    ) -> Iterator[ContainerStatus]:
        """Yield all containers with IDs above `after`, ascending; pages are fetched as
        needed. An empty `state` or `comparison` selects all.
        """
        while True:
            request = pb.ListContainersRequest(
                state=state, comparison=comparison, after_container_id=after, limit=PAGE
            )
            with self._named_errors():
                page: pb.ListContainersResponse = self._stub.ListContainers(
                    request, timeout=DEADLINE_S
                )
            yield from map(container_from, page.containers)
            if not page.more or not page.containers:
                return
            after = page.containers[-1].container_id

    def get_containers(self, container_ids: Sequence[int]) -> dict[int, ContainerStatus]:
        """The known containers among the requested ones, by ID."""
        found: dict[int, ContainerStatus] = {}
        for chunk in _chunks(container_ids, PAGE):
            with self._named_errors():
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
        plans: Sequence[PlannedOrder] = (),
    ) -> list[ReconcileResponse]:
        """Start jobs; returns one response for each container. With `dry_run` nothing
        starts. With `plans` only these replicas are repaired, each by its plan.
        """
        outcomes: list[ReconcileResponse] = []
        for chunk in _chunks(container_ids, _IDS_PER_CALL):
            request = pb.ReconcileRequest(
                container_ids=chunk,
                dry_run=dry_run,
                reason=reason,
                requested_by=requested_by,
                plans=[
                    pb.PlannedReplica(
                        container_id=one.container_id,
                        datanode_id=one.peer,
                        digest=one.digest,
                        data_checksum=one.data_checksum,
                    )
                    for one in plans
                    if one.container_id in chunk
                ],
            )
            with self._named_errors():
                answer: pb.ReconcileResponse = self._stub.Reconcile(request, timeout=DEADLINE_S)
            outcomes += map(outcome_from, answer.outcomes)
        return outcomes

    def jobs(self, *, state: str = "", limit: int = 0) -> list[JobStatus]:
        """Up to `limit` jobs, newest first; 0 means the controller's limit."""
        with self._named_errors():
            answer: pb.ListJobsResponse = self._stub.ListJobs(
                pb.ListJobsRequest(state=state, limit=limit), timeout=DEADLINE_S
            )
        return [job_from(job) for job in answer.jobs]

    def job(self, job_id: str) -> JobStatus:
        """The current state of a job; `job_id` may be the unique beginning of its ID.

        Raises:
            AmbiguousIdError: several IDs begin so.
            JobNotFoundError: there is no such job.
        """
        with self._named_errors():
            job: pb.Job = self._stub.GetJob(pb.GetJobRequest(job_id=job_id), timeout=DEADLINE_S)
        return job_from(job)

    def cancel(self, job_id: str, *, requested_by: str = "") -> JobStatus:
        """Request the end of a job, given as to `job`; returns its state after the
        request.

        Raises:
            AmbiguousIdError: several IDs begin so.
            JobNotFoundError: there is no such job.
        """
        with self._named_errors():
            job: pb.Job = self._stub.CancelJob(
                pb.CancelJobRequest(job_id=job_id, requested_by=requested_by), timeout=DEADLINE_S
            )
        return job_from(job)

    def pause(self, job_id: str, *, reason: str, requested_by: str) -> JobStatus:
        """Stop a job until it is resumed; returns its state after the request.

        Raises:
            JobNotFoundError: there is no such job.
        """
        request = pb.PauseJobRequest(job_id=job_id, reason=reason, requested_by=requested_by)
        with self._named_errors():
            job: pb.Job = self._stub.PauseJob(request, timeout=DEADLINE_S)
        return job_from(job)

    def resume(self, job_id: str, *, requested_by: str) -> JobStatus:
        """Let a paused job go on; returns its state after the request.

        Raises:
            JobNotFoundError: there is no such job.
        """
        request = pb.ResumeJobRequest(job_id=job_id, requested_by=requested_by)
        with self._named_errors():
            job: pb.Job = self._stub.ResumeJob(request, timeout=DEADLINE_S)
        return job_from(job)

    def throttle(
        self,
        job_id: str,
        *,
        bytes_per_second: int | None,
        containers_max: int | None,
        requested_by: str,
    ) -> JobStatus:
        """Set limits of a job: None leaves one as it is, 0 removes it.

        Raises:
            JobNotFoundError: there is no such job.
        """
        request = pb.ThrottleJobRequest(
            job_id=job_id,
            requested_by=requested_by,
            bytes_per_second=bytes_per_second,
            containers_max=containers_max,
        )
        with self._named_errors():
            job: pb.Job = self._stub.ThrottleJob(request, timeout=DEADLINE_S)
        return job_from(job)

    def status(self) -> ControllerStatus:
        """What the controller says of itself and its containers."""
        with self._named_errors():
            answer: pb.GetStatusResponse = self._stub.GetStatus(
                pb.GetStatusRequest(), timeout=DEADLINE_S
            )
        return controller_status_from(answer)

    def live_datanodes(self) -> list[Datanode]:
        """The datanodes whose agents send heartbeats."""
        return [view.datanode for view in self.datanodes() if view.is_live]

    def datanodes(self) -> list[DatanodeView]:
        """All datanodes that the controller knows, by ID."""
        with self._named_errors():
            answer: pb.ListDatanodesResponse = self._stub.ListDatanodes(
                pb.ListDatanodesRequest(), timeout=DEADLINE_S
            )
        return [datanode_view_from(view) for view in answer.datanodes]

    def scan(
        self, container_ids: Sequence[int], *, requested_by: str = ""
    ) -> tuple[list[int], int]:
        """Order scans; returns the unknown containers, and the number of scans."""
        unknown, ordered = list[int](), 0
        for chunk in _chunks(container_ids, _IDS_PER_CALL):
            with self._named_errors():
                answer: pb.ScanResponse = self._stub.Scan(
                    pb.ScanRequest(container_ids=chunk, requested_by=requested_by),
                    timeout=DEADLINE_S,
                )
            unknown += answer.unknown_container_ids
            ordered += answer.commands
        return unknown, ordered

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            with named_errors(f"controller {self.address}", ControllerUnavailableError):
                yield
        except ControllerUnavailableError as error:
            # Imported here: it is needed only where a connection failed.
            from runtime.tls_faults import named_fault

            named = named_fault(error, self.address, self.tls)
            if named is not error:
                raise named from error
            raise ControllerUnavailableError(
                f"no controller answers at {self.address}",
                hint=error.hint
                or "Start one with `treefold scm run`, or give another address with --controller.",
                **error.facts | {"detail": error.message},
            ) from error


def _chunks(container_ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (container_ids[at : at + size] for at in range(0, len(container_ids), size))
