"""Conversion of the Controller service's messages to values, with checks, and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from merkle.outcome import Verdict
from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from protos.values import (
    NAME_CHARACTERS_MAX,
    rate_from,
    replica_to,
    report_from,
    seconds_from,
    set_report,
)
from runtime.errors import RemoteProtocolError, UsageError
from runtime.live_limits import LiveLimit
from runtime.setting_values import check_address
from scm.datanodes import Datanode, DatanodeStatus, Liveness
from scm.eligibility import Eligibility, Ruling
from scm.heartbeats import Heartbeat, ProgressReport
from scm.jobs import Job, JobId, JobLimit, JobState, OrderState, Pause, task_id, task_of
from scm.planned import PlannedOrder
from scm.policy import ComparisonResult, RootComparison
from scm.ports import AnyOrder, CancelOrder, ReconcileOrder, ScanOrder, ThrottleOrder
from scm.queries import ClusterQueries
from scm.registry import ReplicaReport
from scm.views import (
    ContainerStatus,
    ContainerView,
    ControllerStatus,
    DatanodeView,
    JobStatus,
    OrderStatus,
    ReconcileResponse,
    ReplicaStatus,
)

# Our fingerprints have 16 bytes. They are stored for each replica and in each job.
_FINGERPRINT_BYTES_MAX = 64
# Entries in one heartbeat; an agent runs only a few reconciliations at a time.
PROGRESS_MAX = 10_000
# Agents number their starts by the time in ms.
_INCARNATION_DIGITS_MAX = 19
_PROGRESS_STATES = {
    state.value: state
    for state in (
        OrderState.RUNNING,
        OrderState.DONE,
        OrderState.FAILED,
        OrderState.INTERRUPTED,
        OrderState.REFUSED,
    )
}


def heartbeat_from(request: pb.HeartbeatRequest) -> Heartbeat:
    """The heartbeat in a message.

    Raises:
        UsageError: the datanode ID is missing, or a value is invalid.
    """
    if len(request.progress) > PROGRESS_MAX or len(request.acknowledged_command_ids) > PROGRESS_MAX:
        raise UsageError(f"a heartbeat may have at most {PROGRESS_MAX} entries of progress")
    datanode = _datanode_from(request.datanode)
    report = None
    if request.HasField("report"):
        report = _report_from(datanode.peer, request.report)
    return Heartbeat(
        datanode,
        _incarnation_from(request.incarnation),
        request.sequence,
        report,
        tuple(_progress_from(progress) for progress in request.progress),
        tuple(request.acknowledged_command_ids),
    )


def _report_from(peer: PeerId, message: pb.ContainerReport) -> ReplicaReport:
    after = message.after_container_id
    through = message.through_container_id if message.HasField("through_container_id") else None
    if after < 0 or (through is not None and through < max(after, 1)):
        raise UsageError(f"the containers after {after} through {through} are no part of a report")
    return ReplicaReport(
        message.full,
        tuple(_replica_from(peer, replica) for replica in message.replicas),
        tuple(container_id_from(number) for number in message.removed_container_ids),
        after,
        through,
    )


def _incarnation_from(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _INCARNATION_DIGITS_MAX):
        raise UsageError(
            f"{text[:NAME_CHARACTERS_MAX]!r} is not a valid incarnation: it is a decimal number"
        )
    return int(text)


def container_id_from(number: int) -> ContainerId:
    """A container ID from a message.

    Raises:
        UsageError: the number is not positive.
    """
    if number <= 0:
        raise UsageError(
            f"Container IDs must be positive integers. Invalid container IDs: {number}"
        )
    return ContainerId(number)


def _check_name(text: str, what: str) -> str:
    if not text or len(text) > NAME_CHARACTERS_MAX or not text.isprintable():
        raise UsageError(f"{text[:NAME_CHARACTERS_MAX]!r} is not a valid {what}")
    return text


def _datanode_from(message: pb.Datanode) -> Datanode:
    """The datanode in a message.

    Raises:
        UsageError: a name or the address is invalid.
    """
    peer = PeerId(_check_name(message.datanode_id, "datanode ID"))
    hostname = _check_name(message.hostname, "host name") if message.hostname else ""
    address = _check_name(message.address, "address")
    try:
        check_address(address)
    except ValueError as error:
        # Peers would connect to whatever listens at a misread address.
        raise UsageError(f"datanode {peer}: address: {error}") from error
    return Datanode(peer, hostname, address, message.returns_to_service)


def _replica_from(peer: PeerId, message: pb.ReplicaReport) -> ContainerReplica:
    container_id = container_id_from(message.container_id)
    try:
        state = ReplicaState(message.state)
    except ValueError as error:
        raise UsageError(
            f"container {container_id}: {message.state[:NAME_CHARACTERS_MAX]!r} is not a state"
        ) from error
    if message.replica_index < 0:
        raise UsageError(
            f"container {container_id}: replica index {message.replica_index} is negative"
        )
    if len(message.fingerprint) > _FINGERPRINT_BYTES_MAX:
        raise UsageError(
            f"container {container_id}: fingerprint of {len(message.fingerprint)} bytes is too long"
        )
    return ContainerReplica(
        peer,
        container_id,
        state,
        message.data_checksum if message.HasField("data_checksum") else None,
        message.bcs_id,
        message.replica_index,
        message.used_bytes,
        message.block_count,
        message.data_scan_timestamp if message.HasField("data_scan_timestamp") else None,
        message.read_only,
        message.fingerprint,
    )


def _progress_from(message: pb.ReconcileProgress) -> ProgressReport:
    state = _PROGRESS_STATES.get(message.state)
    if state is None:
        raise UsageError(f"job {message.job_id}: {message.state!r} is not a state of progress")
    job_id, round_, resumes = task_of(_check_name(message.job_id, "job ID"))
    try:
        return ProgressReport(job_id, state, report_from(message), round_, resumes)
    except ValueError as error:
        raise UsageError(f"job {message.job_id}: {error}") from error


def command_to(order: AnyOrder) -> pb.Command:
    """The message of an order."""
    command = pb.Command(command_id=order.command_id, term=order.term)
    match order:
        case ReconcileOrder():
            command.reconcile.container_id = order.container_id
            command.reconcile.job_id = task_id(order.job_id, order.round, order.resumes)
            command.reconcile.peers.extend(_datanode_to(peer) for peer in order.peers)
            command.reconcile.container_state = order.returns_to.value
            command.reconcile.skip_final_scan = order.skip_final_scan
            command.reconcile.bytes_per_second = order.bytes_per_second
            command.reconcile.requested_by = order.requested_by
            command.reconcile.reason = order.reason
            command.reconcile.plan = order.plan
        case CancelOrder():
            command.cancel.job_id = task_id(order.job_id, order.round, order.resumes)
            command.cancel.container_id = order.container_id
        case ThrottleOrder():
            command.throttle.job_id = task_id(order.job_id, order.round, order.resumes)
            command.throttle.bytes_per_second = order.bytes_per_second
        case ScanOrder():
            command.scan.container_id = order.container_id
    return command


def _datanode_to(datanode: Datanode) -> pb.Datanode:
    return pb.Datanode(
        datanode_id=datanode.peer,
        hostname=datanode.hostname,
        address=datanode.address,
        returns_to_service=datanode.returns_to_service,
    )


def planned_from(message: pb.PlannedReplica) -> PlannedOrder:
    """The replica of a plan in a request.

    Raises:
        UsageError: a value is invalid.
    """
    return PlannedOrder(
        container_id_from(message.container_id),
        PeerId(_check_name(message.datanode_id, "datanode ID")),
        _check_name(message.digest, "digest of a plan"),
        message.data_checksum,
    )


def status_to(status: DatanodeStatus) -> pb.DatanodeView:
    """The message of a datanode's status."""
    return pb.DatanodeView(
        datanode=_datanode_to(status.datanode),
        live=status.liveness is Liveness.LIVE,
        heartbeat_age_s=status.heartbeat_age_s,
        replicas=status.replicas,
    )


def container_to(view: ContainerView, queries: ClusterQueries, now_s: float) -> pb.ContainerView:
    """The message of a container and its replicas."""
    return pb.ContainerView(
        container_id=view.container_id,
        state=view.state.value if view.state else "",
        comparison=view.compared.comparison.value,
        replicas=[_replica_to(replica, queries, now_s) for replica in view.replicas],
        eligibility=view.ruling.eligibility.value,
        eligibility_message=view.ruling.message,
        last_verdict=view.visit.verdict.value if view.visit and view.visit.verdict else "",
        last_job_id=view.visit.job_id if view.visit else "",
        comparison_note=view.compared.note,
        required_nodes=queries.required_nodes(view.container_id),
        expected_replicas=view.expected_replicas,
    )


def _replica_to(replica: ContainerReplica, queries: ClusterQueries, now_s: float) -> pb.ReplicaView:
    datanode = queries.datanode(replica.peer)
    assert datanode is not None
    return pb.ReplicaView(
        datanode=_datanode_to(datanode),
        replica=replica_to(replica),
        live=queries.is_live(replica.peer),
        report_age_s=queries.report_age_s(replica.container_id, replica.peer, now_s),
    )


def outcome_to(outcome: ReconcileResponse) -> pb.ReconcileOutcome:
    """The message of a response for one container."""
    return pb.ReconcileOutcome(
        container_id=outcome.container_id,
        eligibility=outcome.ruling.eligibility.value,
        message=outcome.ruling.message,
        job_id=outcome.job_id or "",
    )


def job_to(job: Job, compared: ComparisonResult, *, brief: bool = False) -> pb.Job:
    """The message of a job, and of how its container compares now. `brief` omits long
    fields, so that a page of jobs fits one message.
    """
    message = pb.Job(
        job_id=job.job_id,
        container_id=job.container_id,
        state=job.state.value,
        detail=job.detail,
        created_at_s=job.created_at_s,
        started_at_s=job.started_at_s,
        finished_at_s=job.finished_at_s,
        last_progress_at_s=job.last_progress_at_s,
        bytes_done=job.bytes_done,
        bytes_planned=job.bytes_planned,
        rate_bytes_per_s=job.rate_bytes_per_s,
        verdict=job.verdict.value if job.verdict else "",
        reason=job.reason,
        requested_by=job.requested_by,
        datanodes=_orders_to(job, brief=brief),
        comparison=compared.comparison.value,
        comparison_note=compared.note,
        mean_rate_bytes_per_s=job.mean_rate_bytes_per_s,
        bytes_per_second=_limit_to(job.bytes_per_second),
        containers_max=_limit_to(job.containers_max),
    )
    if job.pause:
        message.pause.CopyFrom(
            pb.JobPause(by=job.pause.by, reason=job.pause.reason, at_s=job.pause.at_s)
        )
    if (eta_s := job.eta_s) is not None:
        message.eta_s = eta_s
    return message


def _limit_to(limit: JobLimit) -> pb.JobLimit | None:
    if not limit.set_at_s:
        return None
    return pb.JobLimit(value=limit.value, set_by=limit.set_by, set_at_s=limit.set_at_s)


def _orders_to(job: Job, *, brief: bool) -> Iterable[pb.DatanodeProgress]:
    for order in job.orders:
        report = order.progress
        progress = pb.ReconcileProgress(
            job_id=job.job_id, container_id=job.container_id, state=order.state.value
        )
        set_report(progress, replace(report, message=report.message or order.detail), brief=brief)
        yield pb.DatanodeProgress(datanode_id=order.peer, progress=progress, round=order.round)


def status_response_to(
    gauges: Mapping[str, float],
    jobs: Mapping[JobState, int],
    limits: Iterable[LiveLimit],
    *,
    unserved: Sequence[ContainerId],
    started_age_s: float,
    fault: str,
    automatic: bool,
    roles_enforced: bool,
    scms: Sequence[str] = (),
) -> pb.GetStatusResponse:
    """The message of a controller's status, from its gauges (scm.metrics)."""
    message = pb.GetStatusResponse(
        started_age_s=started_age_s,
        fault=fault,
        containers=int(gauges["scm_containers"]),
        containers_diverged=int(gauges["scm_containers_diverged"]),
        containers_unknown=int(gauges["scm_containers_unknown"]),
        containers_unscanned=int(gauges["scm_containers_unscanned"]),
        containers_unserved=int(gauges["scm_containers_unserved"]),
        unserved_ids=unserved,
        jobs=[pb.JobCount(state=state.value, count=count) for state, count in jobs.items()],
        limits=[
            pb.Limit(name=one.name, value=one.value, set_by=one.set_by, set_at_s=one.set_at_s)
            for one in limits
        ],
        automatic=automatic,
        roles_enforced=roles_enforced,
        scms=scms,
    )
    if oldest_s := gauges["scm_roots_oldest_age_seconds"]:
        message.oldest_root_age_s = oldest_s
    return message


def controller_status_from(message: pb.GetStatusResponse) -> ControllerStatus:
    """A controller's status.

    Raises:
        RemoteProtocolError: the response is invalid.
    """
    with _response_errors("its status"):
        return ControllerStatus(
            seconds_from(message.started_age_s),
            message.fault,
            containers=message.containers,
            diverged=message.containers_diverged,
            unknown=message.containers_unknown,
            unscanned=message.containers_unscanned,
            unserved=message.containers_unserved,
            unserved_ids=tuple(map(ContainerId, message.unserved_ids)),
            oldest_root_age_s=seconds_from(message.oldest_root_age_s)
            if message.HasField("oldest_root_age_s")
            else None,
            jobs={JobState(one.state): one.count for one in message.jobs},
            limits=tuple(
                LiveLimit(one.name, one.value, one.set_by, seconds_from(one.set_at_s))
                for one in message.limits
            ),
            automatic=message.automatic,
            roles_enforced=message.roles_enforced,
            scms=tuple(map(check_address, message.scms)),
        )


def datanode_view_from(message: pb.DatanodeView) -> DatanodeView:
    """A datanode as a controller sees it.

    Raises:
        RemoteProtocolError: the response is invalid.
    """
    with _response_errors("a datanode"):
        return DatanodeView(
            _datanode_from(message.datanode),
            message.live,
            seconds_from(message.heartbeat_age_s),
            message.replicas,
        )


def container_from(message: pb.ContainerView) -> ContainerStatus:
    """The container in a controller's response.

    Raises:
        RemoteProtocolError: the response is invalid.
    """
    with _response_errors(f"container {message.container_id}"):
        return ContainerStatus(
            container_id_from(message.container_id),
            ContainerState(message.state) if message.state else None,
            ComparisonResult(RootComparison(message.comparison), message.comparison_note),
            Ruling(Eligibility(message.eligibility), message.eligibility_message),
            _verdict_from(message.last_verdict),
            message.last_job_id,
            message.required_nodes,
            message.expected_replicas,
            tuple(_replica_status_from(replica) for replica in message.replicas),
        )


def outcome_from(message: pb.ReconcileOutcome) -> ReconcileResponse:
    """The result of a request for one container.

    Raises:
        RemoteProtocolError: the response is invalid.
    """
    with _response_errors(f"the response for container {message.container_id}"):
        ruling = Ruling(Eligibility(message.eligibility), message.message)
        return ReconcileResponse(
            ContainerId(message.container_id),
            ruling,
            JobId(message.job_id) if message.job_id else None,
        )


def job_from(message: pb.Job) -> JobStatus:
    """The job in a controller's response.

    Raises:
        RemoteProtocolError: the response is invalid.
    """
    with _response_errors(f"job {message.job_id}"):
        return JobStatus(
            message.job_id,
            container_id_from(message.container_id),
            JobState(message.state),
            message.detail,
            _verdict_from(message.verdict),
            message.reason,
            message.requested_by,
            created_at_s=seconds_from(message.created_at_s),
            started_at_s=seconds_from(message.started_at_s),
            finished_at_s=seconds_from(message.finished_at_s),
            last_progress_at_s=seconds_from(message.last_progress_at_s),
            bytes_done=message.bytes_done,
            bytes_planned=message.bytes_planned,
            rate_bytes_per_s=rate_from(message.rate_bytes_per_s),
            eta_s=seconds_from(message.eta_s) if message.HasField("eta_s") else None,
            orders=tuple(
                OrderStatus(
                    PeerId(part.datanode_id),
                    OrderState(part.progress.state),
                    report_from(part.progress),
                    part.round,
                )
                for part in message.datanodes
            ),
            compared=ComparisonResult(RootComparison(message.comparison), message.comparison_note)
            if message.comparison
            else None,
            mean_rate_bytes_per_s=rate_from(message.mean_rate_bytes_per_s),
            bytes_per_second=_limit_from(message.bytes_per_second),
            containers_max=_limit_from(message.containers_max),
            pause=Pause(message.pause.by, message.pause.reason, seconds_from(message.pause.at_s))
            if message.HasField("pause")
            else None,
        )


def _limit_from(message: pb.JobLimit) -> JobLimit:
    return JobLimit(message.value, message.set_by, seconds_from(message.set_at_s))


def _replica_status_from(message: pb.ReplicaView) -> ReplicaStatus:
    datanode = _datanode_from(message.datanode)
    replica = _replica_from(datanode.peer, message.replica)
    return ReplicaStatus(datanode, replica, message.live, seconds_from(message.report_age_s))


def _verdict_from(text: str) -> Verdict | None:
    return Verdict(text) if text else None


@contextmanager
def _response_errors(what: str) -> Iterator[None]:
    """Raise RemoteProtocolError for an invalid value in a response."""
    try:
        yield
    except (ValueError, UsageError) as error:
        raise RemoteProtocolError(
            f"the controller sent an invalid response: {what}: {error}"
        ) from error
