"""`treefold job undo`: put back the bytes that a job overwrote, from the undo copies of
the agents.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click
from pydantic import BaseModel, ConfigDict, ValidationError

from admin.answer import check_agents, controller_options, json_option
from admin.command_result import CommandResult, command_result
from admin.option_types import Reason
from admin.requester import requester
from dnagent.client import AgentClient
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from repair.replica_plan import plan_digest
from runtime.errors import RemoteProtocolError, UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_table, size_text
from scm.client import ControllerClient
from scm.views import ContainerStatus, JobStatus

# An undo of an undo is named as the undo printed it.
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
# The agent proves from peers and scans the container at the end.
_TIMEOUT_S = 3600.0
_REASONS = {
    "changed_since": "its bytes are not those that the job wrote",
    "last_good_copy": "no other replica holds the good bytes now",
    "no_record": "the record of the chunk is gone",
}


# Exit statuses of errors after which nothing was written.
_REFUSALS = frozenset({ExitCode.USAGE, ExitCode.REFUSED, ExitCode.BUSY})


class _JobRunningError(ReconcileError):
    """The job has not ended: it may still write what is to be put back."""

    code = "job_running"
    exit_status = ExitCode.BUSY


class _Window(BaseModel):
    model_config = ConfigDict(frozen=True)

    block: str
    offset: int
    length: int
    decision: str


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True)

    bytes: int
    refused: int
    rows: int
    windows: tuple[_Window, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One datanode's part of an undo."""

    peer: PeerId
    document: bytes
    plan: _Plan

    @property
    def digest(self) -> str:
        return plan_digest(self.document)


@click.command(short_help="Put back what a job overwrote.")
@click.argument("job_id", metavar="JOB")
@click.option(
    "--reason",
    required=True,
    metavar="TEXT",
    type=Reason(is_required=True),
    help="Why. Mandatory; stored in the audit files.",
)
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@controller_options
def undo(
    *,
    controller: ControllerClient,
    job_id: str,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Put back the bytes that a job overwrote, as far as that does no harm.

    The plan is printed first. Good bytes are replaced only where another replica holds
    them now, and never where they have changed since the job. What the job added to a
    file stays. The replica is UNHEALTHY afterwards; reconcile the container to heal it
    again. Agents keep the overwritten bytes for `undo_days`. The undo keeps copies too:
    JOB may be the ID that an undo has printed.

    Exit status: 0 done, 1 failed, 2 usage, 5 partly done, also where a datanode failed
    after it had begun, 6 refused, or nothing to undo, 7 unreachable, 8 the job has not
    ended, or its container is busy.
    """
    with command_result("job undo", as_json=as_json) as answer:
        job, job_id = _job_to_undo(controller, job_id)
        view = controller.get_containers([job.container_id]).get(job.container_id)
        if view is None:
            check_agents(controller)
            answer.fail("container_not_found", f"Container {job.container_id} is not known.")
            return
        parts, failures = _plan(controller, answer, view, job_id)
        failures += _note_unknown_holders(answer, job, view)
        is_whole = not failures
        answer.data = {
            "containerID": view.container_id,
            "jobID": job_id,
            "replicas": [_part_json(part) for part in parts],
            "undone": [],
        }
        if not as_json:
            _print(view.container_id, parts)
        todo = [part for part in parts if part.plan.bytes]
        refused = sum(part.plan.refused for part in parts)
        if not todo and not is_whole:
            text = (
                "Not all datanodes answered: whether there is something to put back is not known."
            )
            answer.fail("undo_unknown", text, hint="Try again once they answer.")
            answer.exit_status = exit_status_of_refusals(failures)
            return
        if not todo:
            text = "Nothing can be put back." if refused else "There is nothing to put back."
            answer.fail("nothing_to_undo", text, hint="Undo copies expire with undo_days.")
            answer.exit_status = ExitCode.REFUSED
            return
        if dry_run:
            return
        if not _is_confirmed(yes=yes):
            answer.fail("refused", "Nothing was changed: not confirmed.", hint="Add --yes.")
            answer.exit_status = ExitCode.REFUSED
            return
        failed = _carry_out(controller, answer, view, job_id, todo, reason)
        if failed or refused or not is_whole:
            answer.exit_status = exit_status_of_undo(len(todo) - len(failed), failed)


def _job_to_undo(controller: ControllerClient, text: str) -> tuple[JobStatus, str]:
    """The job that is named, and the name by which agents know it or its undo.

    Raises:
        UsageError: the text is no name of either.
        _JobRunningError: the job has not ended.
    """
    beginning, undone, number = text.partition(".undo")
    if undone and not _NUMBER.fullmatch(number):
        raise UsageError(f"{text[:100]!r} is neither a job nor an undo such as JOB.undo1")
    job = controller.job(beginning)
    if not job.state.is_terminal:
        raise _JobRunningError(
            f"job {job.job_id} is {job.state.value}: only a job that has ended can be undone",
            hint=(
                f"Let it go on with `treefold job resume {job.job_id}`"
                if job.pause
                else f"Wait for its end with `treefold job watch {job.job_id}`"
            )
            + f", or end it with `treefold job cancel {job.job_id}`.",
        )
    return job, f"{job.job_id}{undone}{number}"


def exit_status_of_undo(done: int, failed: Sequence[int]) -> int:
    """The exit status of an undo that is not whole: `done` datanodes carried it out,
    and `failed` are the exit statuses of the errors of others.
    """
    # Of an error that is no refusal nobody knows how much was written before it.
    if done or not failed or not _REFUSALS.issuperset(failed):
        return ExitCode.PARTLY
    return exit_status_of_refusals(failed)


def exit_status_of_refusals(statuses: Sequence[int]) -> int:
    """One exit status for the errors of datanodes none of which has written."""
    if ExitCode.USAGE in statuses:
        return ExitCode.USAGE
    kinds = set(statuses)
    return kinds.pop() if len(kinds) == 1 and kinds <= _REFUSALS else ExitCode.UNREACHABLE


def _plan(
    controller: ControllerClient, answer: CommandResult, view: ContainerStatus, job_id: str
) -> tuple[list[_Part], list[int]]:
    """The plans of the datanodes, and the exit statuses of those that may have copies
    and have no plan.
    """
    parts, failures = [], list[int]()
    for one in view.replicas:
        peer = one.datanode.peer
        if not one.is_live or one.replica.read_only:
            why = "held read-only" if one.is_live else "silent"
            failures += [] if one.is_live else [ExitCode.UNREACHABLE]
            answer.warn(f"datanode {peer} is {why}: what it has of the job is not known")
            continue
        try:
            with _agent(controller, one.datanode.peer, one.datanode.address) as agent:
                document = agent.undo_job(
                    ContainerId(view.container_id),
                    job_id,
                    _others(view, peer),
                    timeout_s=_TIMEOUT_S,
                ).plan
            parts.append(_Part(peer, document, _parsed(document)))
        except ReconcileError as error:
            answer.fail(error.code, f"datanode {peer}: {error.message}", hint=error.hint)
            failures.append(error.exit_status)
    return parts, failures


def _note_unknown_holders(
    answer: CommandResult, job: JobStatus, view: ContainerStatus
) -> list[int]:
    """Exit statuses for the datanodes of the job that report no replica any more."""
    known = {one.datanode.peer for one in view.replicas}
    gone = [order.peer for order in job.orders if order.peer not in known]
    for peer in gone:
        text = f"datanode {peer} reports no replica: what it has of the job is not known"
        answer.warn(text)
    return [ExitCode.UNREACHABLE] * len(gone)


def _carry_out(
    controller: ControllerClient,
    answer: CommandResult,
    view: ContainerStatus,
    job_id: str,
    todo: Sequence[_Part],
    reason: str,
) -> list[int]:
    """Undo at one datanode after the other; returns the exit statuses of those that
    failed.
    """
    failed = list[int]()
    addresses = {one.datanode.peer: one.datanode.address for one in view.replicas}
    undone: list[JsonObject] = []
    assert isinstance(answer.data, dict)
    answer.data["undone"] = undone
    for part in todo:
        try:
            with _agent(controller, PeerId(part.peer), addresses[part.peer]) as agent:
                done = agent.undo_job(
                    ContainerId(view.container_id),
                    job_id,
                    _others(view, part.peer),
                    digest=part.digest,
                    requested_by=requester(),
                    reason=reason,
                    timeout_s=_TIMEOUT_S,
                )
        except ReconcileError as error:
            answer.fail(error.code, f"datanode {part.peer}: {error.message}", hint=error.hint)
            failed.append(error.exit_status)
            continue
        undone.append({"datanode": part.peer, "undoID": done.undo_id, "state": done.state})
        answer.print(
            f"datanode {part.peer}: {size_text(part.plan.bytes)} put back, now {done.state}. To"
            f" take that back: treefold job undo {done.undo_id} --reason TEXT"
        )
    return failed


@contextmanager
def _agent(controller: ControllerClient, peer: PeerId, address: str) -> Iterator[AgentClient]:
    channel = controller.agent_channel(peer, address)
    try:
        yield AgentClient(channel, address)
    finally:
        channel.close()


def _others(view: ContainerStatus, peer: PeerId) -> Mapping[PeerId, str]:
    return {
        one.datanode.peer: one.datanode.address
        for one in view.replicas
        if one.is_live and one.datanode.peer != peer
    }


def _parsed(document: bytes) -> _Plan:
    try:
        return _Plan.model_validate_json(document)
    except ValidationError as error:
        raise RemoteProtocolError("the agent sent an invalid plan of an undo") from error


def _part_json(part: _Part) -> JsonObject:
    return {
        "datanode": part.peer,
        "digest": part.digest,
        "bytes": part.plan.bytes,
        "refused": part.plan.refused,
        "rowsNotPutBack": part.plan.rows,
        "windows": [window.model_dump() for window in part.plan.windows],
    }


def _print(container_id: int, parts: Sequence[_Part]) -> None:
    rows = []
    for part in parts:
        back = sum(one.decision in ("restore", "repair") for one in part.plan.windows)
        notes = [
            f"{count} kept: {text}"
            for name, text in _REASONS.items()
            if (count := sum(one.decision == name for one in part.plan.windows))
        ]
        if part.plan.rows:
            notes.append(f"{part.plan.rows} unparsable rows stay replaced")
        rows.append((container_id, part.peer, size_text(part.plan.bytes), back, "; ".join(notes)))
    columns = ("CONTAINER", "DATANODE", "PUT BACK", "WINDOWS", "AND")
    print_table(columns, rows, numbers=("CONTAINER", "PUT BACK", "WINDOWS"), folded=("AND",))


def _is_confirmed(*, yes: bool) -> bool:
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm("Put these bytes back?", default=False, err=True)
