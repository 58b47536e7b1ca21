"""`treefold reconcile --status`: what the datanodes last reported, and which containers
a command names.

The JSON has the shape of `ozone admin container reconcile --status`, with one
deliberate difference: if a root is unknown or there is nothing to compare with,
`replicasMatch` is null, where Ozone has true.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import click

from admin.answer import check_agents, container_ids
from admin.command_result import command_result
from admin.containers import datanode_json, root_of
from admin.datanode_names import host_of
from merkle.errors import ReconcileError
from merkle.replica import ContainerState
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line, print_table
from scm.client import ControllerClient
from scm.policy import RootComparison
from scm.views import ContainerStatus

# Unknown containers counted in one line; a thousand are one page.
_UNKNOWN_COUNTED_MAX = 1_000

_MATCH = {RootComparison.MATCH: True, RootComparison.DIVERGED: False}
# Ozone's names for replication factors.
_FACTORS = {1: "ONE", 3: "THREE"}


def requested_ids(
    controller: ControllerClient, arguments: tuple[str, ...], all_diverged: bool, *, as_json: bool
) -> list[int]:
    """The containers that the arguments name, or all that are known to be diverged.

    Raises:
        UsageError: the arguments are invalid.
        ReconcileError: none is known to be diverged, and no agent reports.
    """
    if not all_diverged:
        requested = container_ids(arguments)
        if not requested:
            click.echo("Standard input has no container ID: there is nothing to do.", err=True)
        return requested
    if arguments:
        raise UsageError("give either container IDs or --all-diverged, not both")
    found: list[int] = [
        view.container_id
        for view in controller.containers(comparison=RootComparison.DIVERGED.value)
    ]
    if found:
        return found
    check_agents(controller)
    unknown = islice(
        controller.containers(comparison=RootComparison.UNKNOWN.value), _UNKNOWN_COUNTED_MAX
    )
    count = sum(1 for _ in unknown)
    if not as_json:
        click.echo("No container is known to be diverged.")
    if count:
        click.echo(
            f"{'At least ' if count == _UNKNOWN_COUNTED_MAX else ''}{count}"
            f" container{'' if count == 1 else 's'} not compared: see `treefold container list"
            " --comparison unknown`",
            err=True,
        )
    return found


@contextmanager
def _reason_in_json(*, as_json: bool) -> Iterator[None]:
    """Print the document of an error in place of Ozone's array. The array has no place
    for a reason, and an empty one would say that all is well.
    """
    try:
        yield
    except ReconcileError:
        with command_result("reconcile", as_json=as_json):
            raise


def print_status(
    controller: ControllerClient, arguments: tuple[str, ...], all_diverged: bool, *, as_json: bool
) -> None:
    """Print the status as a table, or with --json as Ozone's array. Failures of single
    containers go to stderr in both cases.

    Raises:
        ReconcileError: the controller gave no answer, or no agent reports to it;
            without `as_json`.
    """
    with _reason_in_json(as_json=as_json):
        requested = requested_ids(controller, arguments, all_diverged, as_json=as_json)
        views = controller.get_containers(requested)
        is_unknown = any(v.compared.comparison is RootComparison.UNKNOWN for v in views.values())
        if is_unknown or len(views) < len(requested):
            check_agents(controller)
    shown, failures = list[ContainerStatus](), list[str]()
    for number in requested:
        view = views.get(number)
        if view is None:
            failures.append(
                f"Failed to get reconciliation status of container {number}: Container #{number}"
                " not found."
            )
        elif view.state is ContainerState.OPEN:
            failures.append(
                f"Cannot get status of container {number}. Reconciliation is not supported for open"
                " containers"
            )
        elif any(replica.replica.replica_index > 0 for replica in view.replicas):
            failures.append(
                f"Cannot get status of container {number}. "
                "Reconciliation is only supported for Ratis replicated containers"
            )
        else:
            shown.append(view)
    if as_json:
        click.echo(ozone_json([_status_json(view) for view in shown]))
    elif shown:
        _print_rows(shown)
    for failure in failures:
        click.echo(failure, err=True)
    if failures:
        many = "s" if len(failures) > 1 else ""
        click.echo(
            f"Failed to process reconciliation status for {len(failures)} container{many}", err=True
        )
        raise click.exceptions.Exit(ExitCode.PARTLY if shown else ExitCode.FAILED)
    if any(view.compared.comparison is RootComparison.DIVERGED for view in shown):
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _status_json(view: ContainerStatus) -> JsonObject:
    return {
        "containerID": view.container_id,
        "state": view.state.value if view.state else "",
        "replicationConfig": {
            "replicationFactor": _FACTORS.get(view.required_nodes, str(view.required_nodes)),
            "requiredNodes": view.required_nodes,
            "minimumNodes": 1,
            "replicationType": "RATIS",
        },
        "replicasMatch": _MATCH.get(view.compared.comparison),
        "replicas": [
            {
                "datanode": datanode_json(replica.datanode),
                "state": replica.replica.state.value,
                "dataChecksum": root_of(replica.replica) or "0",
            }
            for replica in view.replicas
        ],
    }


def _print_rows(shown: Sequence[ContainerStatus]) -> None:
    for view in shown:
        note = f" ({view.compared.note})" if view.compared.note else ""
        print_line(
            f"Container {view.container_id}: {view.state.value if view.state else ''}, replicas:"
            f" {view.compared.comparison.value}{note}"
        )
        rows = [
            (
                replica.datanode.peer,
                host_of(replica.datanode),
                replica.replica.state.value,
                root_of(replica.replica) or "unknown",
            )
            for replica in view.replicas
        ]
        print_table(
            ("DATANODE", "HOST", "STATE", "ROOT"), rows, numbers=("ROOT",), folded=("HOST",)
        )


def ozone_json(value: object, indent: int = 0) -> str:
    """JSON in the layout of Ozone's library: `"key" : value`, brackets open on the same
    line, and `[ ]` if empty.
    """
    if isinstance(value, dict):
        if not value:
            return "{ }"
        inner = "  " * (indent + 1)
        lines = [
            f"{inner}{json.dumps(key)} : {ozone_json(item, indent + 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * indent + "}"
    if isinstance(value, list):
        return (
            "[ " + ", ".join(ozone_json(item, indent) for item in value) + " ]" if value else "[ ]"
        )
    return json.dumps(value, ensure_ascii=False)
