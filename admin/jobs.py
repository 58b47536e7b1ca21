"""`treefold job`: show, follow, pause, limit and cancel the controller's jobs;
admin.job_undo has `job undo`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.live import Live
from rich.table import Table

from admin.answer import controller_options, json_option
from admin.command_result import CommandResult, command_result
from admin.datanode_names import DatanodeNames
from admin.job_undo import undo
from admin.option_types import Reason, WholeNumber
from admin.requester import requester
from merkle.outcome import FINAL_VERDICTS, Evidence, EvidenceKind, Verdict
from protos.errors import ControllerUnavailableError
from runtime.errors import UsageError
from runtime.eta import duration_text
from runtime.exit_codes import ExitCode
from runtime.json_numbers import exact
from runtime.output import (
    JsonObject,
    age_text,
    console,
    print_line,
    print_table,
    size_text,
    time_text,
)
from runtime.progress import LINE_EVERY_S, ProgressStyle
from runtime.setting_values import parse_rate
from scm.client import ControllerClient
from scm.jobs import JobLimit, JobState
from scm.views import JobStatus, OrderStatus

# Interval of requests for the state of watched jobs.
_POLL_S = 0.25
# Jobs requested per interval: the oldest ones, which end first.
_POLL_JOBS_MAX = 100
# Longer than a restart of the controller takes.
_AWAY_S = 60.0
# Rows of the live table; more do not fit a terminal.
_LIVE_ROWS_MAX = 20

# Evidence for the verdict UNKNOWN; what an operator can act on comes first.
_UNKNOWN_EVIDENCE = (
    EvidenceKind.FILE_UNREADABLE,
    EvidenceKind.SOURCE_UNREACHABLE,
    EvidenceKind.DAMAGED_AGAIN,
    EvidenceKind.NO_ROOT,
    EvidenceKind.NOTHING_COMPARED,
)
# Reasons shown in one line; `treefold job show` has them all.
_REASONS_SHOWN = 2


@click.group()
def job() -> None:
    """Show, follow, pause, limit, cancel and undo the controller's jobs.

    JOB is a job's ID, or a beginning of it that no other job has.
    """


@job.command("list")
@click.option(
    "--state",
    type=click.Choice([state.value for state in JobState]),
    help="List only jobs in this state.",
)
@click.option(
    "--limit",
    type=WholeNumber(1, 1000),
    default=50,
    show_default=True,
    help="List at most this many.",
)
@json_option
@controller_options
def list_command(
    *, controller: ControllerClient, state: str | None, limit: int, as_json: bool
) -> None:
    """List jobs, newest first."""
    with command_result("job list", as_json=as_json) as answer:
        jobs = controller.jobs(state=state or "", limit=limit)
        names = DatanodeNames.of_controller(controller)
        answer.data = names.json({"jobs": [job_json(one) for one in jobs]})
        if not as_json:
            print_jobs(map(names.job, jobs))


@job.command("show")
@click.argument("job_id", metavar="JOB")
@json_option
@controller_options
def show(*, controller: ControllerClient, job_id: str, as_json: bool) -> None:
    """Show a job and what each datanode did for it."""
    with command_result("job show", as_json=as_json) as answer:
        one = controller.job(job_id)
        names = DatanodeNames.of_controller(controller)
        answer.data = names.json(job_json(one))
        if not as_json:
            _print_job(one, names)


@job.command("watch")
@click.argument("job_id", metavar="JOB")
@json_option
@controller_options
@click.pass_obj
def watch(
    output: ProgressStyle | None, *, controller: ControllerClient, job_id: str, as_json: bool
) -> None:
    """Follow a job until it ends.

    Interrupting this command does not stop the job.

    Exit status: 0 done, 1 failed, 4 damage beyond repair, 5 partly done.
    """
    with command_result("job watch", as_json=as_json) as answer:
        [one] = await_jobs(controller, [controller.job(job_id)], output or ProgressStyle())
        names = DatanodeNames.of_controller(controller)
        answer.data = names.json(job_json(one))
        answer.exit_status = exit_status_of([one])
        if not as_json:
            _print_job(one, names)


@job.command("cancel")
@click.argument("job_id", metavar="JOB")
@json_option
@controller_options
def cancel(*, controller: ControllerClient, job_id: str, as_json: bool) -> None:
    """Cancel a job.

    Agents stop after the window that they are writing.

    Exit status: 0 requested, or cancelled before, 6 the job has ended otherwise.
    """
    with command_result("job cancel", as_json=as_json) as answer:
        one = controller.cancel(job_id, requested_by=requester())
        answer.data = job_json(one)
        if one.state.is_terminal and one.state is not JobState.CANCELLED:
            _refuse_ended(answer, one)
            return
        text = f"job {one.job_id} of container {one.container_id}: {one.state.value}"
        answer.print(f"{text} {one.detail}".rstrip())


job.add_command(undo)


@job.command("pause")
@click.argument("job_id", metavar="JOB")
@click.option(
    "--reason", default="", metavar="TEXT", type=Reason(), help="Why; shown with the job."
)
@json_option
@controller_options
def pause(*, controller: ControllerClient, job_id: str, reason: str, as_json: bool) -> None:
    """Pause a job until `treefold job resume`.

    Agents stop after the window or chunk that they are at; what they wrote stays, and
    no deadline runs out meanwhile. The pause outlives a restart of the controller. A
    job that is paused already keeps its reason.

    Exit status: 0 paused, or paused before, 6 the job has ended.
    """
    with command_result("job pause", as_json=as_json) as answer:
        if earlier := controller.job(job_id).pause:
            why = f": {earlier.reason}" if earlier.reason else ""
            answer.warn(f"the job is paused already, by {earlier.by or 'nobody'}{why}")
        one = controller.pause(job_id, reason=reason, requested_by=requester())
        _print_change(answer, one)


@job.command("resume")
@click.argument("job_id", metavar="JOB")
@json_option
@controller_options
def resume(*, controller: ControllerClient, job_id: str, as_json: bool) -> None:
    """Let a paused job go on.

    Exit status: 0 it goes on, 6 the job is not paused, or has ended.
    """
    with command_result("job resume", as_json=as_json) as answer:
        before = controller.job(job_id)
        if before.pause is None and not before.state.is_terminal:
            answer.data = job_json(before)
            text = f"job {before.job_id} is not paused: {before.state.value}; nothing was changed"
            answer.fail("job_not_paused", text)
            answer.exit_status = ExitCode.REFUSED
            return
        one = controller.resume(job_id, requested_by=requester())
        _print_change(answer, one)


@job.command("throttle")
@click.argument("job_id", metavar="JOB")
@click.option(
    "--bytes-per-second",
    metavar="RATE",
    help="All its datanodes together fetch at most this: 20MiB, or 0 for no limit.",
)
@click.option(
    "--max-containers",
    type=WholeNumber(0, 64),
    help="Repair at most this many replicas of its container at once; 0 for no limit.",
)
@json_option
@controller_options
def throttle(
    *,
    controller: ControllerClient,
    job_id: str,
    bytes_per_second: str | None,
    max_containers: int | None,
    as_json: bool,
) -> None:
    """Limit a job, also while it runs.

    The limits are kept with the job, and apply besides those of each agent. A lower
    --max-containers interrupts nothing that runs. `treefold job show` has the limits
    in effect, and who set them.

    Exit status: 0 limited, 2 usage, 6 the job has ended.
    """
    with command_result("job throttle", as_json=as_json) as answer:
        if bytes_per_second is None and max_containers is None:
            raise UsageError("give --bytes-per-second, --max-containers or both")
        try:
            rate = None if bytes_per_second is None else parse_rate(bytes_per_second)
        except ValueError as error:
            raise UsageError(f"--bytes-per-second: {error}") from error
        one = controller.throttle(
            job_id, bytes_per_second=rate, containers_max=max_containers, requested_by=requester()
        )
        _print_change(answer, one)


def _print_change(answer: CommandResult, one: JobStatus) -> None:
    """The job after a request to change how it goes on."""
    answer.data = job_json(one)
    if one.state.is_terminal:
        _refuse_ended(answer, one)
        return
    parts = [f"job {one.job_id} of container {one.container_id}: {one.state.value}", one.detail]
    answer.print(" ".join(part for part in parts if part))
    for line in _limit_lines(one):
        answer.print(line)


def _refuse_ended(answer: CommandResult, one: JobStatus) -> None:
    text = f"job {one.job_id} had already ended: {one.state.value}; nothing was changed"
    hint = f"A new one begins with `treefold reconcile {one.container_id}`."
    answer.fail("job_ended", text, hint=hint)
    answer.exit_status = ExitCode.REFUSED


def await_jobs(
    controller: ControllerClient, jobs: Sequence[JobStatus], output: ProgressStyle
) -> list[JobStatus]:
    """Wait until all jobs have ended, with progress on stderr, and return them.

    Raises:
        ControllerUnavailableError: the controller was unreachable for longer than a
            restart takes. The jobs continue.
    """
    latest = {one.job_id: one for one in jobs}
    answered_s = time.monotonic()
    names = DatanodeNames.of_controller(controller)
    with _progress_reporter(output, names) as report:
        while True:
            waiting = [one for one in latest.values() if not one.state.is_terminal]
            report(list(latest.values()))
            if not waiting:
                return list(latest.values())
            time.sleep(_POLL_S)
            try:
                for one in waiting[:_POLL_JOBS_MAX]:
                    latest[one.job_id] = controller.job(one.job_id)
                answered_s = time.monotonic()
            except ControllerUnavailableError:
                if time.monotonic() - answered_s >= _AWAY_S:
                    raise


@contextmanager
def _progress_reporter(
    output: ProgressStyle, names: DatanodeNames
) -> Iterator[Callable[[Sequence[JobStatus]], None]]:
    """A function that shows the jobs: a live table on a terminal, otherwise lines every
    LINE_EVERY_S.
    """
    if output.bars:
        with Live(console=console(stderr=True), transient=True, refresh_per_second=4) as live:
            yield lambda jobs: live.update(_live_table(jobs, names))
        return
    reported_s = time.monotonic()

    def report(jobs: Sequence[JobStatus]) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s < LINE_EVERY_S:
            return
        reported_s = time.monotonic()
        ended = sum(one.state.is_terminal for one in jobs)
        if len(jobs) > 1:
            click.echo(f"{ended} of {len(jobs)} jobs ended", err=True)
        for one in [one for one in jobs if not one.state.is_terminal][:_LIVE_ROWS_MAX]:
            click.echo(progress_line(one, names), err=True)

    yield report


def _live_table(jobs: Sequence[JobStatus], names: DatanodeNames) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    waiting = [one for one in jobs if not one.state.is_terminal]
    for one in waiting[:_LIVE_ROWS_MAX]:
        table.add_row(progress_line(one, names))
    table.add_row(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs ended")
    return table


def progress_line(one: JobStatus, names: DatanodeNames) -> str:
    """`repairing container 12  3/5 blocks  48.0 MiB/80.0 MiB  38.0 MiB/s  ETA 1s  dn-1
    done, dn-2 running`.
    """
    parts = [order.progress for order in one.orders]
    text = f"container {one.container_id}  {one.state.value}"
    if one.state is JobState.RUNNING:
        done, planned = sum(p.blocks_done for p in parts), sum(p.blocks_planned for p in parts)
        text += (
            f"  {done}/{planned} blocks  {size_text(one.bytes_done)}/{size_text(one.bytes_planned)}"
        )
        text += f"  {size_text(one.rate_bytes_per_s)}/s"
        if one.bytes_per_second.value:
            text += f" (limit {size_text(one.bytes_per_second.value)}/s)"
        if one.eta_s is not None:
            text += "  finishing" if one.eta_s == 0 else f"  ETA {duration_text(one.eta_s)}"
    if one.detail:
        text += f"  {one.detail}"
    return text + "  " + ", ".join(f"{names.short(d.peer)} {_state_text(d)}" for d in one.orders)


def _state_text(part: OrderStatus) -> str:
    """The state, with the round if there was more than one: a peer's repair may have
    made another round worthwhile.
    """
    return part.state.value + (f" in round {part.round}" if part.round > 1 else "")


def exit_status_of(jobs: Iterable[JobStatus]) -> int:
    """One exit status for all jobs: UNRECOVERABLE if damage remains, otherwise FAILED,
    PARTLY or 0. A job that failed after it had changed something is partly done.
    """
    ended = list(jobs)
    if any(one.verdict in FINAL_VERDICTS for one in ended):
        return ExitCode.UNRECOVERABLE
    clean = [one for one in ended if one.state is JobState.DONE]
    if len(clean) == len(ended):
        return 0
    partial = any(one.state is JobState.PARTIAL or _has_written(one) for one in ended)
    return ExitCode.PARTLY if clean or partial else ExitCode.FAILED


def _has_written(one: JobStatus) -> bool:
    return any(
        part.progress.bytes_written or part.progress.tombstones_adopted for part in one.orders
    )


def unknown_reason(one: JobStatus, *, has_blocks: bool) -> str:
    """Why the verdict of a job is UNKNOWN, in one line: first the peers that did not
    answer, then other evidence.

    `has_blocks` distinguishes an empty container from one whose blocks have no recorded
    checksums.
    """
    reported_by: dict[str, list[str]] = {}
    unsure = [part for part in one.orders if part.progress.verdict is Verdict.UNKNOWN]
    for part in unsure:
        for peer in part.progress.peers:
            if peer.outcome != "ok":
                reported_by.setdefault(f"{peer.outcome}: datanode {peer.peer}", []).append(
                    part.peer
                )
    for kind in _UNKNOWN_EVIDENCE:
        for part in unsure:
            for evidence in part.progress.evidence:
                if evidence.kind == kind.value:
                    reported_by.setdefault(_evidence_text(evidence), []).append(part.peer)
    reasons = [
        f"{text} (reported by {', '.join(dict.fromkeys(who))})" for text, who in reported_by.items()
    ]
    if any(
        e.kind == EvidenceKind.UNVERIFIABLE.value for part in unsure for e in part.progress.evidence
    ):
        held = (
            "it holds data without recorded checksums"
            if has_blocks
            else "no replica reports any blocks"
        )
        reasons.append(f"{EvidenceKind.UNVERIFIABLE.value}: {held}")
    more = f" and {len(reasons) - _REASONS_SHOWN} more" if len(reasons) > _REASONS_SHOWN else ""
    named = "; ".join(reasons[:_REASONS_SHOWN]) or "its datanodes reported no reason"
    # Texts from agents may contain line breaks or terminal control codes.
    named = "".join(c if c.isprintable() else " " for c in named)
    return f"{named}{more}: see `treefold job show {one.job_id}`"


def job_json(one: JobStatus) -> JsonObject:
    return {
        "jobID": one.job_id,
        "containerID": one.container_id,
        "state": one.state.value,
        "detail": one.detail,
        "verdict": _verdict_text(one.verdict),
        "comparison": one.compared.comparison.value if one.compared else None,
        "comparisonNote": one.compared.note if one.compared else "",
        "reason": one.reason,
        "requestedBy": one.requested_by,
        "createdAt": time_text(one.created_at_s),
        "startedAt": time_text(one.started_at_s) if one.started_at_s else None,
        "finishedAt": time_text(one.finished_at_s) if one.finished_at_s else None,
        "lastProgressAt": time_text(one.last_progress_at_s) if one.last_progress_at_s else None,
        "bytesDone": one.bytes_done,
        "bytesPlanned": one.bytes_planned,
        "rateBytesPerSecond": round(one.rate_bytes_per_s, 1),
        "meanRateBytesPerSecond": round(one.mean_rate_bytes_per_s, 1),
        "limits": {
            "bytesPerSecond": _limit_json(one.bytes_per_second),
            "maxContainers": _limit_json(one.containers_max),
        },
        "pause": {"by": one.pause.by, "reason": one.pause.reason, "at": time_text(one.pause.at_s)}
        if one.pause
        else None,
        "etaSeconds": None if one.eta_s is None else round(one.eta_s, 1),
        "datanodes": [_datanode_json(part) for part in one.orders],
    }


def _limit_json(limit: JobLimit) -> JsonObject | None:
    if not limit.set_at_s:
        return None
    return {"value": limit.value, "setBy": limit.set_by, "setAt": time_text(limit.set_at_s)}


def _datanode_json(part: OrderStatus) -> JsonObject:
    progress = part.progress
    return {
        "id": part.peer,
        "state": part.state.value,
        "round": part.round,
        "verdict": _verdict_text(progress.verdict),
        "bytesFetched": progress.bytes_fetched,
        "bytesScanned": progress.bytes_scanned,
        "limitBytesPerSecond": progress.limit_bytes_per_second or None,
        "bytesWritten": progress.bytes_written,
        "windowsWritten": progress.windows_written,
        "chunksRepaired": progress.chunks_repaired,
        "tombstonesAdopted": progress.tombstones_adopted,
        "blocksDone": progress.blocks_done,
        "blocksPlanned": progress.blocks_planned,
        "errorCode": progress.error_code or None,
        "message": progress.message,
        "claimedDeletedBlockIDs": list(progress.claimed_deleted),
        "evidence": [_evidence_json(evidence) for evidence in progress.evidence],
        "peers": [
            {"id": peer.peer, "outcome": peer.outcome, "bytesFetched": peer.bytes_fetched}
            for peer in progress.peers
        ],
    }


def _evidence_json(evidence: Evidence) -> JsonObject:
    place: JsonObject = {}
    if evidence.block_id is not None:
        place["blockID"] = exact(evidence.block_id)
    if evidence.offset is not None:
        place["offset"] = evidence.offset
    return {"kind": evidence.kind} | place | {"detail": evidence.detail}


def print_jobs(jobs: Iterable[JobStatus]) -> None:
    """A row a job: what it found, and how the replicas compare now."""
    rows = [
        (
            one.job_id,
            one.container_id,
            one.state.value,
            _verdict_text(one.verdict) or "-",
            one.compared.comparison.value if one.compared else "-",
            size_text(one.bytes_done),
            sum(d.progress.chunks_repaired for d in one.orders),
            age_text(time.time() - one.created_at_s),
            one.detail,
        )
        for one in jobs
    ]
    columns = (
        "JOB", "CONTAINER", "STATE", "FOUND", "NOW", "FETCHED", "CHUNKS", "CREATED", "DETAIL",
    )  # fmt: skip
    print_table(columns, rows, numbers=("CONTAINER", "FETCHED", "CHUNKS"), folded=("DETAIL",))


def _print_job(job: JobStatus, names: DatanodeNames) -> None:
    one = names.job(job)
    print_line(
        f"Job {one.job_id}: container {one.container_id},"
        f" {one.state.value}{': ' if one.detail else ''}{one.detail}"
    )
    print_line(f"  found:     {_verdict_text(one.verdict) or 'nothing yet'}")
    if one.compared:
        note = f" ({one.compared.note})" if one.compared.note else ""
        print_line(f"  now:       {one.compared.comparison.value}{note}")
    created = time_text(one.created_at_s)
    print_line(f"  created:   {created} by {one.requested_by or 'nobody'} {one.reason}".rstrip())
    for line in _limit_lines(one):
        print_line(line)
    if one.finished_at_s:
        print_line(
            f"  finished:  {time_text(one.finished_at_s)}, fetched {size_text(one.bytes_done)} at"
            f" {size_text(one.mean_rate_bytes_per_s)}/s"
        )
    else:
        print_line(f"  progress:  {progress_line(job, names)}")
        age = age_text(time.time() - one.last_progress_at_s)
        print_line(f"  last progress {age}" if one.last_progress_at_s else "  no progress yet")
    for part in one.orders:
        _print_datanode(part)


def _limit_lines(one: JobStatus) -> Iterator[str]:
    """The limits that were ever set, and who set them."""
    rate, most = one.bytes_per_second, one.containers_max
    for limit, what, value in (
        (rate, "bytes per second", f"{size_text(rate.value)}/s for all datanodes together"),
        (most, "replicas at once", f"{most.value} replicas at once"),
    ):
        if limit.set_at_s:
            shown = value if limit.value else f"none on {what}"
            when = age_text(time.time() - limit.set_at_s)
            yield f"  limit:     {shown}, set by {limit.set_by or 'nobody'} {when}"


def _print_datanode(part: OrderStatus) -> None:
    progress = part.progress
    message = ": ".join(text for text in (progress.error_code, progress.message) if text)
    print_line(
        f"  datanode {part.peer}: {_state_text(part)}, verdict"
        f" {_verdict_text(progress.verdict) or 'none yet'}"
    )
    print_line(
        f"    fetched {size_text(progress.bytes_fetched)}, wrote"
        f" {size_text(progress.bytes_written)} in {progress.windows_written} windows:"
        f" {progress.chunks_repaired} chunks repaired, {progress.tombstones_adopted} deletes"
        " learned"
    )
    if progress.limit_bytes_per_second and not part.state.is_terminal:
        print_line(f"    limit in effect {size_text(progress.limit_bytes_per_second)}/s")
    if message:
        print_line(f"    {message}")
    if progress.claimed_deleted:
        claimed = ", ".join(str(number) for number in progress.claimed_deleted)
        print_line(f"    live here, deleted at a peer: blocks {claimed}")
    for evidence in progress.evidence:
        print_line(f"    {_evidence_text(evidence)}")


def _verdict_text(verdict: Verdict | None) -> str | None:
    return verdict.value if verdict else None


def _evidence_text(evidence: Evidence) -> str:
    where = f" block {evidence.block_id}" if evidence.block_id is not None else ""
    where += f" at {evidence.offset}" if evidence.offset is not None else ""
    return f"{evidence.kind}{where}: {evidence.detail}"
