"""`treefold scan`: order scans, and wait for them."""

import time
from collections.abc import Iterator, Mapping, Sequence

import click

from admin.answer import check_agents, container_ids, controller_options, json_option
from admin.command_result import CommandResult, command_result
from admin.containers import container_json, roots_age_text
from admin.datanode_names import host_of
from admin.requester import requester
from merkle.replica import PeerId, ReplicaState
from runtime.errors import UsageError
from runtime.eta import duration_text
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject
from runtime.progress import BYTES, ProgressSink, ProgressStyle, progress_sink
from runtime.setting_values import parse_duration
from scm.client import ControllerClient
from scm.policy import RootComparison
from scm.views import ContainerStatus, ReplicaStatus

# Of an order of more scans no ages are printed.
_AGES_MAX = 100
_POLL_S = 0.5
_TIMEOUT = "24h"

# When the data of each replica were last read, in ms since the epoch, by container and
# datanode; None where they never were.
_ScanTimes = Mapping[tuple[int, PeerId], int | None]


@click.command()
@click.argument("arguments", metavar="ID... | -", nargs=-1)
@click.option("--wait", is_flag=True, help="Wait until every replica was scanned.")
@click.option(
    "--timeout",
    metavar="DURATION",
    default=_TIMEOUT,
    show_default=True,
    help="Wait no longer than this: 90, 15m or 2h.",
)
@json_option
@controller_options
@click.pass_obj
def scan(
    output: ProgressStyle | None,
    *,
    controller: ControllerClient,
    arguments: tuple[str, ...],
    wait: bool,
    timeout: str,
    as_json: bool,
) -> None:
    """Order agents to scan replicas for damage.

    Orders a scan of every live replica of these containers. Until it ends, all commands
    show the result of the scan before: its age is printed. `treefold container info`
    shows the state, the root and the time of the last scan. IDs are arguments; with `-`
    they are read from standard input, one per line.

    Exit status: 0 ordered, or with --wait scanned without findings, 1 a container is
    not known, 2 usage, 3 scanned and replicas are damaged or differ, 5 not all were
    scanned in time, 7 controller unreachable, or no agent reports to it.
    """
    with command_result("scan", as_json=as_json) as answer:
        try:
            timeout_s = parse_duration(timeout)
        except ValueError as error:
            raise UsageError(f"--timeout: {error}") from error
        requested = container_ids(arguments)
        if not requested:
            click.echo("Standard input has no container ID: there is nothing to do.", err=True)
        before = controller.get_containers(requested if wait else requested[:_AGES_MAX])
        unknown, ordered = controller.scan(requested, requested_by=requester())
        shown = [before[number] for number in requested[:_AGES_MAX] if number in before]
        answer.data = {
            "scansOrdered": ordered,
            "unknownContainerIDs": unknown,
            "lastScans": [_last_scan_json(one) for one in shown],
        }
        if unknown:
            check_agents(controller)
        answer.print(f"{ordered} scan{'' if ordered == 1 else 's'} ordered")
        if not wait:
            for one in shown:
                answer.print(
                    f"container {one.container_id}: until then its result is the old one, data"
                    f" scanned {roots_age_text(one)}"
                )
        for number in unknown:
            answer.fail("container_not_found", f"Container {number} is not known.")
        if wait:
            with progress_sink(output or ProgressStyle()) as sink:
                after, late = _await_scans(controller, before, timeout_s, sink)
            _report(answer, after, late, timeout_s)


def _last_scan_json(view: ContainerStatus) -> JsonObject:
    whole = container_json(view)
    return {name: whole[name] for name in ("containerID", "rootsScannedAt", "rootsAgeSeconds")}


def _await_scans(
    controller: ControllerClient,
    before: Mapping[int, ContainerStatus],
    timeout_s: float,
    sink: ProgressSink,
) -> tuple[dict[int, ContainerStatus], list[str]]:
    """The containers once all replicas were scanned, and the replicas that were not in
    time.
    """
    times: _ScanTimes = {
        (number, one.datanode.peer): one.replica.data_scan_timestamp_ms
        for number, view in before.items()
        for one in view.replicas
    }
    waiting = {key: one.replica.used_bytes for key, one in _unscanned(before, times)}
    sink.begin("scanning", sum(waiting.values()), BYTES)
    latest, deadline_s = dict(before), time.monotonic() + timeout_s
    while True:
        latest |= controller.get_containers(sorted({number for number, _ in waiting}))
        left = dict(_unscanned(latest, times))
        for key in waiting.keys() - left.keys():
            sink.advance(waiting.pop(key))
        if not left or time.monotonic() >= deadline_s:
            return latest, [
                f"container {number} on {host_of(one.datanode)} ({peer})"
                for (number, peer), one in left.items()
            ]
        # The controller answers and does not call: whoever waits asks again, as
        # `job watch` does.
        time.sleep(_POLL_S)


def _unscanned(
    views: Mapping[int, ContainerStatus], times: _ScanTimes
) -> Iterator[tuple[tuple[int, PeerId], ReplicaStatus]]:
    """The live, closed replicas that were not scanned since `times`."""
    for number, view in views.items():
        for one in view.replicas:
            key = number, one.datanode.peer
            is_scanned = one.is_live and one.replica.state.is_closed
            if is_scanned and key in times and one.replica.data_scan_timestamp_ms == times[key]:
                yield key, one


def _report(
    answer: CommandResult,
    views: Mapping[int, ContainerStatus],
    late: Sequence[str],
    timeout_s: float,
) -> None:
    assert isinstance(answer.data, dict)
    answer.data["containers"] = [container_json(one) for one in views.values()]
    for view in views.values():
        damaged = sum(one.replica.state is ReplicaState.UNHEALTHY for one in view.replicas)
        found = f", {damaged} of {len(view.replicas)} replicas UNHEALTHY" if damaged else ""
        note = f" ({view.compared.note})" if view.compared.note else ""
        answer.print(
            f"container {view.container_id}: {view.compared.comparison.value}{note}{found}"
        )
        if damaged or view.compared.comparison is RootComparison.DIVERGED:
            answer.exit_status = answer.exit_status or ExitCode.FINDINGS
    for name in late:
        answer.warn(f"{name} was not scanned within {duration_text(timeout_s)}")
    if late:
        answer.exit_status = ExitCode.PARTLY
