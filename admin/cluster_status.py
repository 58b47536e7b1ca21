"""What is wrong with a cluster, how sure that is, and what to do next.

These are pure functions from what its processes answered to problems, lines and an exit
status. What did not answer is UNKNOWN, with the reason: no part is called healthy
because nothing is known of it.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from admin.datanode_names import DatanodeNames
from admin.jobs import job_json, progress_line
from admin.master_status import (
    MasterAnswer,
    lines_of_masters,
    masters_json,
    problems_of_masters,
)
from dnagent.ports import AgentStatus, VolumeStatus
from merkle.outcome import FINAL_VERDICTS, Verdict
from runtime.exit_codes import ExitCode
from runtime.live_limits import LiveLimit
from runtime.output import JsonObject, age_text, printable, size_text, time_text
from scm.jobs import JobState
from scm.policy import RootComparison
from scm.views import ControllerStatus, DatanodeView, JobStatus

_WIDTH = 80
# Rows of datanodes and jobs, those with a problem first, and problems in full.
_ROWS_MAX = 12
_PROBLEMS_MAX = 10
# A sweep runs every night; one that was left out is noticed.
_SWEEP_OLD_S = 2 * 86_400.0
# Verifiers list their bucket every hour.
_LISTING_OLD_S = 86_400.0
# Clocks of two machines may differ by this much.
_CLOCK_SKEW_S = 300.0
_BAD_VERDICTS = tuple(
    verdict.value for verdict in (Verdict.REPAIRABLE, Verdict.UNRECOVERABLE, Verdict.CONFLICT)
)
# Of containers that a sweep did not compare: sweep.model.NotCompared, whose module
# needs an extra.
_UNSEEN = "UNSEEN"
_VERDICTS = {verdict.value for verdict in Verdict} | {_UNSEEN, "EXCLUDED"}


class Health(Enum):
    """How a cluster is. DIVERGED: something is wrong. UNKNOWN: nothing is known to be
    wrong, and not all is known.
    """

    HEALTHY = "HEALTHY"
    DIVERGED = "DIVERGED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to act on; `action` is a command to copy. `is_known` tells what is
    wrong from what is unknown.
    """

    text: str
    action: str
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """A datanode as its controller sees it, and what its agent answered: None if it did
    not, and why.
    """

    view: DatanodeView
    status: AgentStatus | None
    error: str = ""
    # A beginning of the datanode's ID that no other has; empty: the whole.
    short_id: str = ""

    @property
    def name(self) -> str:
        """The host, and the datanode's ID or a beginning of it."""
        datanode = self.view.datanode
        return f"{datanode.hostname or datanode.address} {self.short_id or datanode.peer}"


@dataclass(frozen=True, slots=True)
class SweepAnswer:
    """The last sweep of a folder: when it ended, and its containers by verdict."""

    folder: str
    sweep_id: str = ""
    ended_at_s: float = 0.0
    verdicts: tuple[tuple[str, int], ...] = ()
    unseen: int = 0
    skipped: int = 0
    error: str = ""
    # Containers whose replicas differ, whatever their verdicts are called.
    diverged: int = 0


@dataclass(frozen=True, slots=True)
class VerifierAnswer:
    """A verifier and its bucket; `listed_at_s` is None before the first listing."""

    address: str
    bucket: str = ""
    listed_at_s: float | None = None
    error: str = ""
    roles_enforced: bool = False


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """All that was asked for. `error` says why the controller did not answer; then
    `controller` is None.
    """

    as_of_s: float
    address: str
    controller: ControllerStatus | None
    error: str = ""
    agents: tuple[AgentAnswer, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    # None: not asked for.
    sweep: SweepAnswer | None = None
    verifiers: tuple[VerifierAnswer, ...] = ()
    masters: tuple[MasterAnswer, ...] = ()


def health_of(problems: Sequence[Problem]) -> Health:
    """How a cluster with these problems is."""
    if any(problem.is_known for problem in problems):
        return Health.DIVERGED
    return Health.UNKNOWN if problems else Health.HEALTHY


def exit_status_of(health: Health) -> int:
    """The exit status of `treefold status`."""
    return {
        Health.HEALTHY: ExitCode.CLEAN,
        Health.DIVERGED: ExitCode.FINDINGS,
        Health.UNKNOWN: ExitCode.UNREACHABLE,
    }[health]


def problems_of(answer: ClusterAnswer) -> list[Problem]:
    """All that is wrong or unknown, what is wrong first."""
    found = [
        *_problems_of_controller(answer),
        *(problem for agent in answer.agents for problem in _problems_of_agent(agent)),
        *(problem for job in answer.jobs for problem in _problems_of_job(job)),
        *(_problems_of_sweep(answer.sweep, answer.as_of_s) if answer.sweep else ()),
        *(problem for one in answer.verifiers for problem in _problems_of_verifier(answer, one)),
        *(
            Problem(one.text, one.action, is_known=one.is_known)
            for one in problems_of_masters(answer.masters)
        ),
    ]
    return sorted(found, key=lambda problem: not problem.is_known)


def _problems_of_controller(answer: ClusterAnswer) -> Iterator[Problem]:
    status = answer.controller
    if status is None:
        text = f"controller {answer.address}: {answer.error}"
        yield Problem(text, "systemctl status treefold-controller", is_known=False)
        return
    if status.fault:
        yield Problem(f"controller: {status.fault}", "journalctl -u treefold-controller")
    if status.unserved:
        ids = " ".join(map(str, status.unserved_ids))
        text = f"{_counted(status.unserved, 'container')} that no client can read: every known"
        yield Problem(f"{text} replica is UNHEALTHY", f"treefold reconcile {ids}")
    if status.diverged:
        action = "treefold reconcile --all-diverged"
        if status.automatic:
            action = "treefold job list  # automatic mode works on them"
        yield Problem(f"{_counted(status.diverged, 'container')} diverged", action)
    if status.unknown:
        text = f"{_counted(status.unknown, 'container')}: not known whether the replicas match"
        yield Problem(text, "treefold container list --comparison unknown", is_known=False)
    elif status.unscanned:
        text = f"{_counted(status.unscanned, 'container')} with data that no scan ever read"
        yield Problem(text, "treefold container list", is_known=False)
    if not status.containers:
        text = "no container is known: no agent has reported one"
        yield Problem(text, "systemctl status treefold-agent", is_known=False)


def _problems_of_agent(agent: AgentAnswer) -> Iterator[Problem]:
    host = agent.view.datanode.hostname
    look = f"ssh {host} systemctl status treefold-agent"
    if not agent.view.is_live:
        age = age_text(agent.view.heartbeat_age_s)
        yield Problem(f"datanode {agent.name}: last heartbeat {age}", look, is_known=False)
        return
    if agent.status is None:
        yield Problem(f"datanode {agent.name}: {agent.error}", look, is_known=False)
        return
    if agent.status.fault:
        yield Problem(f"datanode {agent.name}: {agent.status.fault}", look)
    for volume in agent.status.volumes:
        if volume.last_error:
            text = f"datanode {agent.name}, volume {volume.path}: {volume.last_error}"
            yield Problem(text, f"ssh {host} treefold doctor --volume {volume.path}")


def _problems_of_job(job: JobStatus) -> Iterator[Problem]:
    show = f"treefold job show {job.job_id}"
    named = f"job {job.job_id} of container {job.container_id}"
    if job.state is JobState.STALLED:
        yield Problem(f"{named} is stalled: {job.detail}", show)
    if not job.state.is_terminal:
        return
    if job.verdict in FINAL_VERDICTS and job.verdict is not None:
        yield Problem(f"container {job.container_id}: {job.verdict.value} damage remains", show)
    elif job.state is not JobState.CANCELLED and _differs(job):
        yield Problem(f"{named} ended as {job.state.value}, and its replicas differ", show)


def _differs(job: JobStatus) -> bool:
    return job.compared is not None and job.compared.comparison is RootComparison.DIVERGED


def _problems_of_sweep(sweep: SweepAnswer, now_s: float) -> Iterator[Problem]:
    show = f"treefold sweep show latest --out {sweep.folder}"
    if sweep.error:
        yield Problem(f"sweep in {sweep.folder}: {sweep.error}", show, is_known=False)
        return
    verdicts = dict(sweep.verdicts)
    bad = [f"{verdicts[name]} {name}" for name in _BAD_VERDICTS if verdicts.get(name)]
    if bad:
        yield Problem(f"containers of the last sweep: {', '.join(bad)}", show)
    strange = [f"{count} {name}" for name, count in verdicts.items() if name not in _VERDICTS]
    if strange:
        text = f"the last sweep has verdicts that this version does not know: {', '.join(strange)}"
        yield Problem(text, show, is_known=False)
    unnamed = sweep.diverged - sum(verdicts.get(name, 0) for name in _BAD_VERDICTS)
    if unnamed > 0:
        text = (
            f"{_counted(unnamed, 'container')} of the last sweep diverged without a verdict of it"
        )
        yield Problem(text, show)
    if not any(verdicts.get(verdict.value) for verdict in Verdict):
        yield Problem("the last sweep compared no container", show, is_known=False)
    unknown = verdicts.get(Verdict.UNKNOWN.value, 0) + verdicts.get(_UNSEEN, 0)
    if unknown or sweep.unseen or sweep.skipped:
        text = (
            f"the last sweep is incomplete: {_counted(unknown, 'container')} unknown,"
            f" {_counted(sweep.unseen, 'replica')} unseen,"
            f" {_counted(sweep.skipped, 'input')} skipped"
        )
        yield Problem(text, show, is_known=False)
    age_s = now_s - sweep.ended_at_s
    if age_s < -_CLOCK_SKEW_S:
        text = "the last sweep ended in the future, by this machine's clock"
        yield Problem(text, show, is_known=False)
    if age_s > _SWEEP_OLD_S:
        text = f"the last sweep ended {age_text(age_s)}"
        yield Problem(text, "systemctl status treefold-sweep.timer", is_known=False)


def _problems_of_verifier(answer: ClusterAnswer, verifier: VerifierAnswer) -> Iterator[Problem]:
    look = "systemctl status treefold-verifier"
    if verifier.error:
        text = f"verifier {verifier.address}: {verifier.error}"
        yield Problem(text, look, is_known=False)
    elif verifier.listed_at_s is None:
        text = f"verifier {verifier.address}: {verifier.bucket} was never listed as a whole"
        yield Problem(text, look, is_known=False)
    elif (age_s := answer.as_of_s - verifier.listed_at_s) > _LISTING_OLD_S:
        text = f"verifier {verifier.address}: {verifier.bucket} was last listed {age_text(age_s)}"
        yield Problem(text, look, is_known=False)


def lines(answer: ClusterAnswer) -> list[str]:
    """One screen of at most 80 columns; a line is longer only if a single word is."""
    problems = problems_of(answer)
    found = [
        f"state:   {health_of(problems).value}",
        f"as of:   {time_text(answer.as_of_s)}, "
        + ("by" if answer.controller else "without an answer of")
        + f" the controller at {answer.address}",
    ]
    for problem in problems[:_PROBLEMS_MAX]:
        found.append(f"{'wrong:  ' if problem.is_known else 'unknown:'} {problem.text}")
        found.append(f"  action: {problem.action}")
    if len(problems) > _PROBLEMS_MAX:
        more = len(problems) - _PROBLEMS_MAX
        found.append(f"         and {more} more: see `treefold status --json`")
    found += ["", *_controller_lines(answer), "", *_agent_lines(answer)]
    found += ["", *_job_lines(answer), "", *_sweep_lines(answer), "", *_verifier_lines(answer)]
    found += ["", *lines_of_masters(answer.masters)]
    return [part for line in found for part in _wrapped(printable(line))]


def _wrapped(line: str) -> list[str]:
    indent = " " * (9 if line[:1] != " " else len(line) - len(line.lstrip()) + 2)
    # A command to copy stays whole: a shell would see two.
    if len(line) <= _WIDTH or line.lstrip().startswith("action:"):
        return [line]
    return textwrap.wrap(
        line,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _controller_lines(answer: ClusterAnswer) -> Iterator[str]:
    status = answer.controller
    if status is None:
        yield "controller: UNKNOWN"
        return
    up = age_text(status.started_age_s).removesuffix(" ago")
    mode = "automatic" if status.automatic else "on request"
    yield f"controller: up {up}, repairs {mode}"
    known = f"{_counted(status.containers, 'container')}: {status.diverged} diverged"
    oldest = status.oldest_root_age_s
    age = "no root is known" if oldest is None else f"oldest root read at most {age_text(oldest)}"
    yield f"  {known}, {status.unknown} unknown; {age}"
    yield from _limit_lines(status.limits, answer.as_of_s)
    if not status.roles_enforced:
        yield "  no TLS, so no roles: whoever reaches the controller may order repairs"


def _limit_lines(limits: Iterable[LiveLimit], now_s: float) -> Iterator[str]:
    for limit in limits:
        age = age_text(now_s - limit.set_at_s)
        yield f"  limit {limit.name} = {_limit_text(limit)}, set by {limit.set_by} {age}"


def _limit_text(limit: LiveLimit) -> str:
    if not limit.value:
        return "none"
    is_rate = limit.name.endswith("bytes_per_second")
    return f"{size_text(limit.value)}/s" if is_rate else str(limit.value)


def _agent_lines(answer: ClusterAnswer) -> Iterator[str]:
    if answer.controller is None:
        yield "agents: UNKNOWN, the controller did not answer"
        return
    if not answer.agents:
        yield "agents: none has reported to this controller"
        return
    answered = [agent for agent in answer.agents if agent.status is not None]
    yield f"agents: {len(answered)} of {len(answer.agents)} answer"
    with_problem = [agent for agent in answer.agents if any(_problems_of_agent(agent))]
    others = [agent for agent in answer.agents if agent not in with_problem]
    shown = [*with_problem, *others][:_ROWS_MAX]
    for agent in shown:
        yield from _lines_of_agent(agent)
    if len(answer.agents) > len(shown):
        yield f"  and {len(answer.agents) - len(shown)} more: see `treefold status --json`"


def _lines_of_agent(agent: AgentAnswer) -> Iterator[str]:
    age = age_text(agent.view.heartbeat_age_s)
    if agent.status is None:
        yield f"  {agent.name}: UNKNOWN, last heartbeat {age}"
        return
    limits = {limit.name: limit for limit in agent.status.limits}
    repair = "off"
    if agent.status.repair_enabled:
        rate = f"{size_text(agent.status.repair_bytes_per_second)}/s"
        repair = f"{rate}{_of_limit(limits.get('repair.bytes_per_second'))}"
    yield f"  {agent.name}: heartbeat {age}, repairs {repair}"
    if not agent.status.roles_enforced:
        yield "    no TLS, so no roles: whoever reaches the agent may read its data"
    for volume in agent.status.volumes:
        yield f"    {volume.path}: {_volume_text(volume, limits.get('scan.bytes_per_second'))}"


def _volume_text(volume: VolumeStatus, limit: LiveLimit | None) -> str:
    if not volume.storage_id:
        return f"FAILED, {volume.last_error}"
    if volume.full_scan_age_s is not None:
        scanned = f"all data read {age_text(volume.full_scan_age_s)} or later"
    elif volume.never_scanned:
        scanned = f"{volume.never_scanned} of {volume.containers} never scanned"
    else:
        scanned = "no data scan known"
    rate = f"{size_text(volume.scan_bytes_per_second)}/s{_of_limit(limit)}"
    return f"{volume.hold}, {_counted(volume.containers, 'replica')}, {scanned}, scan {rate}"


def _of_limit(limit: LiveLimit | None) -> str:
    return f" (limit {_limit_text(limit)})" if limit and limit.value else ""


def _job_lines(answer: ClusterAnswer) -> Iterator[str]:
    if answer.controller is None:
        yield "jobs: UNKNOWN, the controller did not answer"
        return
    counts = answer.controller.jobs
    names = DatanodeNames(agent.view.datanode for agent in answer.agents)
    named = [f"{counts[state]} {state.value}" for state in JobState if counts.get(state)]
    yield f"jobs: {', '.join(named) or 'none'}"
    active = [job for job in answer.jobs if not job.state.is_terminal]
    for job in active[:_ROWS_MAX]:
        yield f"  {job.job_id}: {progress_line(job, names)}"
    left = sum(count for state, count in counts.items() if not state.is_terminal)
    if left > min(len(active), _ROWS_MAX):
        yield f"  and {left - min(len(active), _ROWS_MAX)} more: see `treefold job list`"


def _sweep_lines(answer: ClusterAnswer) -> Iterator[str]:
    sweep = answer.sweep
    if sweep is None:
        yield "last sweep: not looked at; --sweep OUT names its folder"
    elif sweep.error:
        yield f"last sweep: UNKNOWN, {sweep.error}"
    else:
        counts = ", ".join(f"{count} {name}" for name, count in sweep.verdicts if count)
        age = age_text(answer.as_of_s - sweep.ended_at_s)
        yield f"last sweep: {sweep.sweep_id}, ended {age}: {counts or 'no containers'}"


def _verifier_lines(answer: ClusterAnswer) -> Iterator[str]:
    if not answer.verifiers:
        yield "verifiers: not looked at; --verifier HOST:PORT names one"
    for one in answer.verifiers:
        if one.error:
            yield f"verifier {one.address}: UNKNOWN, {one.error}"
        else:
            listed = "never"
            if one.listed_at_s is not None:
                listed = age_text(answer.as_of_s - one.listed_at_s)
            roles = "" if one.roles_enforced else "; no TLS, so no roles"
            yield f"verifier {one.address}: {one.bucket}, listed as a whole: {listed}{roles}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def answer_json(answer: ClusterAnswer) -> JsonObject:
    """The data of the command's document: null is unknown."""
    problems = problems_of(answer)
    status = answer.controller
    return {
        "state": health_of(problems).value,
        "problems": [
            {"text": one.text, "action": one.action, "known": one.is_known} for one in problems
        ],
        "controller": {
            "address": answer.address,
            "hasRoles": status.roles_enforced if status else None,
            "error": answer.error or None,
            "status": _controller_json(status) if status else None,
        },
        "agents": [_agent_json(agent) for agent in answer.agents] if status else None,
        "jobs": [job_json(job) for job in answer.jobs] if status else None,
        "sweep": _sweep_json(answer.sweep) if answer.sweep else None,
        "verifiers": [
            {
                "address": one.address,
                "bucket": one.bucket or None,
                "listedAt": None if one.listed_at_s is None else time_text(one.listed_at_s),
                "hasRoles": None if one.error else one.roles_enforced,
                "error": one.error or None,
            }
            for one in answer.verifiers
        ],
        "replicationMasters": masters_json(answer.masters),
    }


def _controller_json(status: ControllerStatus) -> JsonObject:
    oldest = status.oldest_root_age_s
    return {
        "startedSecondsAgo": round(status.started_age_s, 1),
        "fault": status.fault or None,
        "containers": status.containers,
        "diverged": status.diverged,
        "unknown": status.unknown,
        "unscanned": status.unscanned,
        "unserved": status.unserved,
        "oldestRootSecondsAgo": None if oldest is None else round(oldest, 1),
        "automatic": status.automatic,
        "jobsByState": {state.value: count for state, count in status.jobs.items()},
        "limits": [_limit_json(limit) for limit in status.limits],
    }


def _agent_json(agent: AgentAnswer) -> JsonObject:
    status = agent.status
    return {
        "datanode": agent.view.datanode.peer,
        "hostname": agent.view.datanode.hostname,
        "address": agent.view.datanode.address,
        "live": agent.view.is_live,
        "heartbeatSecondsAgo": round(agent.view.heartbeat_age_s, 1),
        "error": agent.error or None,
        "fault": (status.fault or None) if status else None,
        "hasRoles": status.roles_enforced if status else None,
        "repairEnabled": status.repair_enabled if status else None,
        "repairBytesPerSecond": round(status.repair_bytes_per_second, 1) if status else None,
        "limits": [_limit_json(limit) for limit in status.limits] if status else None,
        "volumes": [_volume_json(volume) for volume in status.volumes] if status else None,
    }


def _volume_json(volume: VolumeStatus) -> JsonObject:
    age_s = volume.full_scan_age_s
    return {
        "path": volume.path,
        "hold": volume.hold,
        "containers": volume.containers,
        "neverScanned": volume.never_scanned,
        "fullScanSecondsAgo": None if age_s is None else round(age_s, 1),
        "scanBytesPerSecond": round(volume.scan_bytes_per_second, 1),
        "lastError": volume.last_error or None,
    }


def _limit_json(limit: LiveLimit) -> JsonObject:
    return {
        "name": limit.name,
        "value": limit.value,
        "setBy": limit.set_by,
        "setAt": time_text(limit.set_at_s),
    }


def _sweep_json(sweep: SweepAnswer) -> JsonObject:
    return {
        "folder": sweep.folder,
        "sweepID": sweep.sweep_id or None,
        "endedAt": None if sweep.error else time_text(sweep.ended_at_s),
        "verdicts": dict(sweep.verdicts),
        "diverged": sweep.diverged,
        "unseen": sweep.unseen,
        "skipped": sweep.skipped,
        "error": sweep.error or None,
    }
