"""`treefold container --cluster`: containers as SCM knows them, and their replicas
compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from admin.clusters import UNKNOWN_CONTAINER_HINT, open_cluster, open_datanode
from admin.command_result import CommandResult
from admin.diagnosis_text import NodeNames, diagnosis_json, node_json, print_diagnosis
from live.diagnosis import reason_not_compared
from live.survey import ClusterSurvey
from merkle.outcome import Verdict
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId, root_hex
from ozone.scm_client import ClusterContainer, ClusterNode, ScmClient
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line, print_table, size_text
from scm.eligibility import Ruling, evaluate
from scm.policy import ComparisonResult, Knowledge, RootComparison, compare

# Containers whose replicas are asked for at once.
_PAGE = 500


@dataclass(frozen=True, slots=True)
class ListedContainer:
    """A container with what SCM reports of its replicas."""

    container: ClusterContainer
    replicas: tuple[ContainerReplica, ...]
    compared: ComparisonResult
    ruling: Ruling


def list_containers(
    cluster: str,
    answer: CommandResult,
    *,
    state: str,
    comparison: str,
    limit: int,
    after: int,
    ids_only: bool,
) -> None:
    """List containers; empty texts are no filters."""
    with open_cluster(cluster) as directory:
        found = list[ListedContainer]()
        for one in listed_containers(directory, after):
            if (not state or one.container.state.value == state) and (
                not comparison or one.compared.comparison.value == comparison
            ):
                found.append(one)
            if len(found) > limit:
                break
        nodes = {node.peer: node for node in directory.nodes()}
    more, found = len(found) > limit, found[:limit]
    answer.data = {"containers": [_json(one, nodes) for one in found], "more": more}
    if more:
        last = found[-1].container.container_id
        answer.warn(f"there are more: continue with --after {last}, or raise --limit")
    if answer.as_json:
        return
    if ids_only:
        for one in found:
            click.echo(one.container.container_id)
        return
    rows = [
        (
            one.container.container_id,
            one.container.state.value,
            one.container.replication,
            one.compared.comparison.value,
            f"{len(one.replicas)}/{one.container.required_replicas}",
            one.ruling.eligibility.value,
            one.compared.note,
        )
        for one in found
    ]
    columns = ("CONTAINER", "STATE", "REPLICATION", "REPLICAS", "KNOWN", "RECONCILE", "NOTE")
    print_table(columns, rows, numbers=("CONTAINER", "KNOWN"), folded=("RECONCILE", "NOTE"))


def show_containers(cluster: str, answer: CommandResult, container_ids: Sequence[int]) -> None:
    """Show containers with their replicas as SCM knows them."""
    requested = [ContainerId(number) for number in container_ids]
    with open_cluster(cluster) as directory:
        containers = directory.get_containers(requested)
        nodes = {node.peer: node for node in directory.nodes()}
        known = [containers[number] for number in requested if number in containers]
        found = [*_with_replicas(directory, known, nodes)]
    answer.data = [_json(one, nodes) for one in found]
    if not answer.as_json:
        for one in found:
            _print(one, nodes)
    _fail_unknown(answer, requested, containers)


def diff_container(cluster: str, answer: CommandResult, container_id: int) -> None:
    """Compare the trees of a container's replicas, read from the datanodes."""
    number = ContainerId(container_id)
    with open_cluster(cluster) as directory:
        containers = directory.get_containers([number])
        _fail_unknown(answer, [number], containers)
        if not containers:
            return
        with ClusterSurvey(directory, open_datanode, 0) as survey:
            [[diagnosis]] = survey.diagnose(containers.values())
    if reason := reason_not_compared(diagnosis.container):
        answer.fail("not_applicable", f"Container {number} cannot be compared: {reason}.")
        return
    answer.data = diagnosis_json(diagnosis)
    names = NodeNames(diagnosis.nodes)
    if diagnosis.doubt:
        answer.warn(f"container {number}: {names.text(diagnosis.doubt)}")
    if diagnosis.comparison.differs:
        answer.exit_status = ExitCode.FINDINGS
    elif diagnosis.is_unreachable:
        answer.exit_status = ExitCode.UNREACHABLE
    elif diagnosis.verdict is Verdict.UNKNOWN:
        answer.exit_status = ExitCode.PARTLY
    if not answer.as_json:
        print_diagnosis(diagnosis)


def listed_containers(directory: ScmClient, after: int = 0) -> Iterator[ListedContainer]:
    """All containers above an ID in ascending order, with their replicas as SCM knows
    them and what follows from these.
    """
    nodes = {node.peer: node for node in directory.nodes()}
    page = list[ClusterContainer]()
    for container in directory.containers(after):
        page.append(container)
        if len(page) == _PAGE:
            yield from _with_replicas(directory, page, nodes)
            page.clear()
    yield from _with_replicas(directory, page, nodes)


def _with_replicas(
    directory: ScmClient,
    containers: Sequence[ClusterContainer],
    nodes: dict[PeerId, ClusterNode],
) -> Iterator[ListedContainer]:
    dead = frozenset(peer for peer, node in nodes.items() if node.is_dead)
    reported = directory.replicas([one.container_id for one in containers])
    for one in containers:
        replicas = reported.get(one.container_id, ())
        required = one.required_replicas
        known = Knowledge(required, silent=dead & {replica.peer for replica in replicas})
        compared = compare(replicas, known)
        if reason := reason_not_compared(one):
            compared = ComparisonResult(RootComparison.NOT_APPLICABLE, reason)
        ruling = evaluate(one.container_id, one.state, replicas, required_nodes=required)
        yield ListedContainer(one, replicas, compared, ruling)


def _fail_unknown(
    answer: CommandResult,
    requested: Sequence[ContainerId],
    containers: dict[ContainerId, ClusterContainer],
) -> None:
    for number in requested:
        if number not in containers:
            answer.fail(
                "container_not_found",
                f"Container {number} is not known to SCM.",
                hint=UNKNOWN_CONTAINER_HINT,
            )


def _json(one: ListedContainer, nodes: dict[PeerId, ClusterNode]) -> JsonObject:
    """The JSON object for a container. An unknown root is null."""
    container = one.container
    return {
        "containerID": container.container_id,
        "state": container.state.value,
        "replication": container.replication,
        "comparison": one.compared.comparison.value,
        "comparisonNote": one.compared.note,
        "eligibility": one.ruling.eligibility.value,
        "eligibilityMessage": one.ruling.message,
        "requiredNodes": container.required_replicas,
        "knownReplicas": len(one.replicas),
        "usedBytes": container.used_bytes,
        "blockCount": container.block_count,
        "sequenceId": container.bcs_id,
        "replicas": [
            {
                "datanode": node_json(replica.peer, nodes.get(replica.peer)),
                "health": nodes[replica.peer].health.value if replica.peer in nodes else None,
                "state": replica.state.value,
                "dataChecksum": _root(replica),
                "sequenceId": replica.bcs_id,
                "usedBytes": replica.used_bytes,
                "blockCount": replica.block_count,
                "replicaIndex": replica.replica_index,
            }
            for replica in one.replicas
        ],
    }


def _root(replica: ContainerReplica) -> str | None:
    return None if replica.data_checksum is None else root_hex(replica.data_checksum)


def _print(one: ListedContainer, nodes: dict[PeerId, ClusterNode]) -> None:
    container, names = one.container, NodeNames(nodes)
    note = f" ({names.text(one.compared.note)})" if one.compared.note else ""
    why = f": {names.text(one.ruling.message)}" if one.ruling.message else ""
    print_line(f"Container {container.container_id}")
    print_line(f"  state:       {container.state.value}, {container.replication}")
    print_line(f"  replicas:    {one.compared.comparison.value}{note}")
    print_line(f"  known:       {len(one.replicas)} of {container.required_replicas} replicas")
    print_line(f"  reconcile:   {one.ruling.eligibility.value}{why}")
    for replica in one.replicas:
        node = nodes.get(replica.peer)
        health = f"{node.health.value}, {node.operation.value}" if node else "not listed by SCM"
        index = f", replica index {replica.replica_index}" if replica.replica_index else ""
        print_line(f"  datanode {names.text(replica.peer)}: {health}")
        print_line(
            f"    {replica.state.value}{index}, root {_root(replica) or 'unknown'}, BCSID"
            f" {replica.bcs_id}"
        )
        print_line(f"    {replica.block_count} blocks, {size_text(replica.used_bytes)}")
