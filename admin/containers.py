"""`treefold container`: show the containers that the controller knows, and compare
their replicas.
"""

import time
from itertools import islice

import click

from admin.answer import (
    check_agents,
    container_ids,
    controller_options,
    json_option,
)
from admin.clusters import cluster_option
from admin.command_result import command_result
from admin.comparison import comparison_json, print_differences
from admin.datanode_names import DatanodeNames, host_of
from admin.option_types import WholeNumber
from merkle.comparison import Comparison
from merkle.limits import CONTAINER_ID_MAX
from merkle.replica import ContainerReplica, ContainerState, ReplicaState
from merkle.tree import ContainerTree, root_hex
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, age_text, print_line, print_table, size_text, time_text
from runtime.setting_values import split_address
from scm.ages import oldest_scan_ms
from scm.client import ControllerClient
from scm.datanodes import Datanode
from scm.eligibility import INVALID_HINT
from scm.policy import RootComparison
from scm.replica_trees import compare_live, fetch_trees
from scm.views import ContainerStatus, ReplicaStatus

_LIST_DEFAULT = 100


@click.group()
def container() -> None:
    """Show containers, their replicas and how they differ."""


@container.command("list")
@click.option(
    "--state",
    type=click.Choice([state.value for state in ContainerState]),
    help="List only containers in this state.",
)
@click.option("--diverged", is_flag=True, help="Same as --comparison diverged.")
@click.option(
    "--comparison",
    type=click.Choice([c.value for c in RootComparison]),
    help="List only containers with this result of comparing their roots.",
)
@click.option(
    "--limit",
    type=WholeNumber(1),
    default=_LIST_DEFAULT,
    show_default=True,
    help="List at most this many.",
)
@click.option(
    "--after",
    type=WholeNumber(0, CONTAINER_ID_MAX),
    default=0,
    help="Start after this container ID.",
)
@click.option(
    "--ids",
    is_flag=True,
    help="Print only IDs, one per line: the input of `treefold reconcile -`.",
)
@cluster_option()
@json_option
@controller_options
def list_command(
    *,
    controller: ControllerClient,
    cluster: str | None,
    state: str | None,
    diverged: bool,
    comparison: str | None,
    limit: int,
    after: int,
    ids: bool,
    as_json: bool,
) -> None:
    """List containers in ascending order of their IDs.

    KNOWN is how many of the expected replicas were reported. SCANNED is the age of the
    roots: when the data of the replicas was last read, by the oldest of these scans.
    With --cluster the answer is SCM's, which does not know when data were read.

    Exit status: 0 listed, 2 usage, 7 controller or SCM unreachable, or no agent reports
    to the controller.
    """
    with command_result("container list", as_json=as_json) as answer:
        wanted = RootComparison.DIVERGED.value if diverged else comparison or ""
        if cluster is not None:
            # Imported here: it needs gRPC's client of datanodes.
            from admin.cluster_containers import list_containers

            list_containers(
                cluster,
                answer,
                state=state or "",
                comparison=wanted,
                limit=limit,
                after=after,
                ids_only=ids,
            )
            return
        views = list(
            islice(
                controller.containers(state=state or "", comparison=wanted, after=after), limit + 1
            )
        )
        more, views = len(views) > limit, views[:limit]
        answer.data = {"containers": [container_json(view) for view in views], "more": more}
        if more:
            answer.warn(
                f"there are more: continue with --after {views[-1].container_id}, or raise --limit"
            )
        if ids and not as_json:
            for view in views:
                click.echo(view.container_id)
        elif views and not as_json:
            _print_list(views)
        check_agents(controller)


@container.command("info")
@click.argument("arguments", metavar="ID... | -", nargs=-1)
@cluster_option()
@json_option
@controller_options
def info(
    *,
    controller: ControllerClient,
    cluster: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show containers with all their replicas.

    IDs are arguments; with `-` they are read from standard input, one per line. With
    --cluster the answer is SCM's.
    """
    with command_result("container info", as_json=as_json) as answer:
        requested = container_ids(arguments)
        if cluster is not None:
            from admin.cluster_containers import show_containers

            show_containers(cluster, answer, requested)
            return
        found = controller.get_containers(requested)
        answer.data = [container_json(found[number]) for number in requested if number in found]
        if not as_json:
            for number in requested:
                if number in found:
                    _print_container(found[number])
        check_agents(controller)
        for number in requested:
            if number not in found:
                answer.fail("container_not_found", f"Container {number} is not known.")


@container.command("diff")
@click.argument("argument", metavar="ID")
@cluster_option()
@json_option
@controller_options
def diff(
    *, controller: ControllerClient, cluster: str | None, argument: str, as_json: bool
) -> None:
    """Compare the trees of a container's live replicas.

    Fetches the trees from the agents, and lists for each difference the datanodes that
    lack the data and those that have it. Trees are as of the last scans; the data are
    not read. The verdict UNRECOVERABLE is preliminary: a file whose block record is
    lost is in no tree, and a reconciliation may find good data in it. With --cluster,
    or if the controller drives a cluster without agents, the trees are read from the
    datanodes themselves, and one that does not answer is named with the reason.

    Exit status: 0 no differences, 1 a tree could not be fetched, 3 differences, 5 no
    differences, but not all expected replicas have a tree of a recent scan, 7 no agent
    reports to the controller; or, without agents, SCM or a datanode is unreachable.
    """
    with command_result("container diff", as_json=as_json) as answer:
        [number] = container_ids((argument,))
        if cluster is None and (scms := controller.status().scms):
            # It has no agents: the trees are those of the datanodes themselves.
            cluster = ",".join(scms)
        if cluster is not None:
            from admin.cluster_containers import diff_container

            diff_container(cluster, answer, number)
            return
        view = controller.get_containers([number]).get(number)
        if view is None:
            check_agents(controller)
            answer.fail("container_not_found", f"Container {number} is not known.")
            return
        if view.compared.comparison is RootComparison.NOT_APPLICABLE:
            answer.fail(
                "not_applicable", f"Container {number} cannot be compared: {view.compared.note}."
            )
            return
        names = DatanodeNames.of_containers([view])
        for replica in view.replicas:
            if not replica.is_live:
                answer.warn(
                    f"datanode {names.text(replica.datanode.peer)} no longer reports and was not"
                    " compared"
                )
        trees, errors = fetch_trees(view, tls=controller.tls, insecure=controller.insecure)
        for name, error in errors.items():
            text = f"datanode {names.text(name)}: {error.message}"
            answer.fail(error.code, text, hint=error.hint)
        if errors:
            # Without all replicas, the verdict could report data as lost that only the
            # missing one holds.
            return
        if not trees:
            check_agents(controller)
            answer.fail(
                "no_replicas_found", f"No live datanode reports a replica of container {number}."
            )
            return
        compared, doubt = compare_live(view, trees)
        answer.data = comparison_json(compared) | {
            "datanodes": [datanode_json(replica.datanode) for replica in view.replicas]
        }
        if doubt:
            answer.warn(f"container {number}: {doubt}")
        if compared.differences:
            answer.exit_status = ExitCode.FINDINGS
        elif doubt:
            answer.exit_status = ExitCode.PARTLY
        if not as_json:
            age = f"data scanned {roots_age_text(view)}"
            _print_comparison(compared, trees, age, names)


def _print_list(views: list[ContainerStatus]) -> None:
    rows = [
        (
            view.container_id,
            _state_text(view),
            view.compared.comparison.value,
            f"{len(view.replicas)}/{view.expected_replicas}",
            roots_age_text(view),
            view.ruling.eligibility.value,
            view.last_verdict.value if view.last_verdict else "-",
            view.compared.note,
        )
        for view in views
    ]
    columns = (
        "CONTAINER", "STATE", "REPLICAS", "KNOWN", "SCANNED", "RECONCILE", "LAST VERDICT", "NOTE",
    )  # fmt: skip
    print_table(columns, rows, numbers=("CONTAINER", "KNOWN"), folded=("RECONCILE", "NOTE"))


def container_json(view: ContainerStatus) -> JsonObject:
    """The JSON object for a container. An unknown root is null; "0" is the root of an
    empty tree.
    """
    scanned_s = _roots_scanned_s(view)
    return {
        "containerID": view.container_id,
        "state": _state_text(view),
        "comparison": view.compared.comparison.value,
        "comparisonNote": view.compared.note,
        "eligibility": view.ruling.eligibility.value,
        "eligibilityMessage": view.ruling.message,
        "requiredNodes": view.required_nodes,
        "knownReplicas": len(view.replicas),
        "expectedReplicas": view.expected_replicas,
        "rootsScannedAt": time_text(scanned_s) if scanned_s is not None else None,
        "rootsAgeSeconds": (
            round(max(0.0, time.time() - scanned_s), 3) if scanned_s is not None else None
        ),
        "lastVerdict": view.last_verdict.value if view.last_verdict else None,
        "lastJobID": view.last_job_id or None,
        "replicas": [_replica_json(replica) for replica in view.replicas],
    }


def _replica_json(view: ReplicaStatus) -> JsonObject:
    replica = view.replica
    return {
        "datanode": datanode_json(view.datanode) | {"address": view.datanode.address},
        "live": view.is_live,
        "reportAgeSeconds": round(view.report_age_s, 3),
        "state": replica.state.value,
        "dataChecksum": root_of(replica),
        "sequenceId": replica.bcs_id,
        "usedBytes": replica.used_bytes,
        "blockCount": replica.block_count,
        "replicaIndex": replica.replica_index,
        "lastScan": (
            time_text(replica.data_scan_timestamp_ms / 1000)
            if replica.data_scan_timestamp_ms is not None
            else None
        ),
        "readOnly": replica.read_only,
    }


def _roots_scanned_s(view: ContainerStatus) -> float | None:
    """When the oldest of the last full scans of the closed replicas was; None if the
    data of one was never read, or without closed replicas.
    """
    closed = (one.replica for one in view.replicas if one.replica.state.is_closed)
    oldest_ms = oldest_scan_ms(closed)
    return None if oldest_ms is None else oldest_ms / 1000


def roots_age_text(view: ContainerStatus) -> str:
    """How long ago the data behind the roots were last read, by the oldest scan."""
    if not any(one.replica.state.is_closed for one in view.replicas):
        return "-"
    scanned_s = _roots_scanned_s(view)
    return "never" if scanned_s is None else age_text(time.time() - scanned_s)


def has_invalid_replica(view: ContainerStatus) -> bool:
    """Whether a replica's descriptor or records cannot be read."""
    return any(one.replica.state is ReplicaState.INVALID for one in view.replicas)


def datanode_json(datanode: Datanode) -> JsonObject:
    """The JSON object for a datanode, with the keys that Ozone uses."""
    host, _ = split_address(datanode.address)
    return {"id": datanode.peer, "hostname": host_of(datanode), "ipAddress": host}


def root_of(replica: ContainerReplica) -> str | None:
    """The root in hexadecimal; None if it is unknown."""
    return None if replica.data_checksum is None else root_hex(replica.data_checksum)


def _state_text(view: ContainerStatus) -> str:
    return view.state.value if view.state else ""


def _print_container(view: ContainerStatus) -> None:
    note = f" ({view.compared.note})" if view.compared.note else ""
    print_line(f"Container {view.container_id}")
    print_line(f"  state:       {_state_text(view) or 'unknown'}")
    print_line(f"  replicas:    {view.compared.comparison.value}{note}")
    why = f": {view.ruling.message}" if view.ruling.message else ""
    print_line(
        f"  known:       {len(view.replicas)} of {view.expected_replicas} replicas, data scanned"
        f" {roots_age_text(view)}"
    )
    print_line(f"  reconcile:   {view.ruling.eligibility.value}{why}")
    if view.last_job_id:
        verdict = view.last_verdict.value if view.last_verdict else "none"
        print_line(f"  last job:    {view.last_job_id}, verdict {verdict}")
    for replica in view.replicas:
        _print_replica(replica)
    if has_invalid_replica(view) and INVALID_HINT not in note:
        print_line(f"  {INVALID_HINT}")


def _print_replica(view: ReplicaStatus) -> None:
    replica = view.replica
    scanned = "never scanned"
    if replica.data_scan_timestamp_ms is not None:
        seconds = replica.data_scan_timestamp_ms / 1000
        scanned = f"scanned {time_text(seconds)} ({age_text(time.time() - seconds)})"
    index = f", replica index {replica.replica_index}" if replica.replica_index else ""
    held = ", read-only" if replica.read_only else ""
    heard = "reported" if view.is_live else "silent: last reported"
    print_line(f"  datanode {view.datanode.peer} ({host_of(view.datanode)})")
    print_line(
        f"    {replica.state.value}{held}{index}, root {root_of(replica) or 'unknown'}, BCSID"
        f" {replica.bcs_id}"
    )
    print_line(f"    {replica.block_count} blocks, {size_text(replica.used_bytes)}, {scanned}")
    print_line(f"    {heard} {age_text(view.report_age_s)}")


def _print_comparison(
    compared: Comparison, trees: dict[str, ContainerTree], age: str, names: DatanodeNames
) -> None:
    print_line(f"Container {compared.container_id}: {compared.verdict.value} ({age})")
    print_table(
        ("DATANODE", "HOST", "ROOT", "BLOCKS", "DELETED"),
        [
            (
                name,
                names.host(name),
                root_hex(tree.data_checksum),
                len(tree.blocks),
                sum(block.deleted for block in tree.blocks),
            )
            for name, tree in trees.items()
        ],
        numbers=("ROOT", "BLOCKS", "DELETED"),
        folded=("HOST",),
    )
    print_differences(compared, names.text)
