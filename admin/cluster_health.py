"""`treefold doctor` and `treefold status` with --cluster: a cluster without agents."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from admin.cluster_containers import listed_containers
from admin.cluster_status import Problem, exit_status_of, health_of
from admin.clusters import open_cluster, open_datanode
from admin.command_result import CommandResult
from admin.diagnosis_text import NodeNames, node_json
from live.checkup import ClusterCheckup, NodeCheckup, check_cluster
from ozone.scm_client import ClusterIdentity, ClusterNode, NodeHealth
from runtime.exit_codes import ExitCode
from runtime.output import print_line, print_table
from scm.policy import RootComparison

# Containers named in a problem; the command that it names finds the rest.
_NAMED_MAX = 5


def check(cluster: str, answer: CommandResult) -> None:
    """Check what a diagnosis of the cluster rests on."""
    with open_cluster(cluster) as directory:
        found = check_cluster(directory, open_datanode, directory.faults())
    answer.data = {
        "clusterID": found.identity.cluster_id,
        "scms": list(found.identity.scms),
        "safeMode": found.identity.in_safe_mode,
        "containers": found.identity.container_count,
        # A secured cluster does not answer.
        "secured": False,
        "problems": list(found.problems),
        "datanodes": [
            {
                "datanode": node_json(one.node.peer, one.node),
                "address": one.node.address,
                "health": one.node.health.value,
                "operation": one.node.operation.value,
                "version": one.node.version,
                "treeSeconds": None if one.tree_s is None else round(one.tree_s, 4),
                "note": one.note,
                "problems": list(one.problems),
            }
            for one in found.nodes
        ],
    }
    answer.exit_status = ExitCode.CLEAN if found.is_healthy else ExitCode.FINDINGS
    if not answer.as_json:
        _print_checkup(found)


def _print_checkup(found: ClusterCheckup) -> None:
    identity = found.identity
    print_line(f"cluster     {identity.cluster_id}")
    for line in identity.scms:
        print_line(f"SCM         {line}")
    print_line(f"containers  {identity.container_count}")
    print_line("security    none: SCM answered without Kerberos")
    names = NodeNames({one.node.peer: one.node for one in found.nodes})
    print_table(
        ("DATANODE", "ADDRESS", "HEALTH", "OPERATION", "TREE"),
        [
            (
                names.text(one.node.peer),
                one.node.address or "-",
                one.node.health.value,
                one.node.operation.value,
                _tree_text(one),
            )
            for one in found.nodes
        ],
        folded=("TREE",),
    )
    for problem in found.problems:
        print_line(f"problem: {problem}")
    for one in found.nodes:
        for problem in one.problems:
            print_line(f"problem: {names.text(f'datanode {one.node.peer}: {problem}')}")


def _tree_text(one: NodeCheckup) -> str:
    if one.tree_s is None:
        return one.note or "not read"
    return f"read in {one.tree_s * 1000:.0f} ms"


@dataclass
class _State:
    """What SCM says of a cluster."""

    cluster: str
    identity: ClusterIdentity
    nodes: tuple[ClusterNode, ...]
    comparisons: Counter[RootComparison] = field(default_factory=Counter)
    diverged: list[int] = field(default_factory=list)


def show_status(cluster: str, answer: CommandResult) -> None:
    """What is wrong with the cluster, by what SCM knows; no datanode is asked."""
    with open_cluster(cluster) as directory:
        state = _State(cluster, directory.identity(), directory.nodes())
        for one in listed_containers(directory):
            state.comparisons[one.compared.comparison] += 1
            if one.compared.comparison is RootComparison.DIVERGED:
                state.diverged.append(one.container.container_id)
                del state.diverged[_NAMED_MAX:]
    problems = sorted(_problems(state), key=lambda problem: not problem.is_known)
    health = health_of(problems)
    answer.exit_status = exit_status_of(health)
    counts = {one.value: state.comparisons[one] for one in RootComparison}
    answer.data = {
        "state": health.value,
        "clusterID": state.identity.cluster_id,
        "datanodes": dict(Counter(node.health.value for node in state.nodes)),
        "containers": counts,
        "problems": [
            {"text": one.text, "action": one.action, "known": one.is_known} for one in problems
        ],
    }
    if answer.as_json:
        return
    print_line(f"{health.value}  cluster {state.identity.cluster_id}, by what SCM knows")
    healths = Counter(node.health.value for node in state.nodes)
    print_line("datanodes   " + ", ".join(f"{n} {name}" for name, n in sorted(healths.items())))
    print_line("containers  " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    for problem in problems:
        print_line(f"{'problem' if problem.is_known else 'unknown'}: {problem.text}")
        print_line(f"  {problem.action}")


def _problems(state: _State) -> Iterator[Problem]:
    diagnose = f"treefold diagnose --cluster {state.cluster}"
    doctor = f"treefold doctor --cluster {state.cluster}"
    if state.identity.in_safe_mode:
        yield Problem("SCM is in safe mode: it may not know all replicas yet", doctor, False)
    names = NodeNames({node.peer: node for node in state.nodes})
    for node in state.nodes:
        if node.health is not NodeHealth.HEALTHY:
            text = names.text(f"datanode {node.peer} is {node.health.value}")
            yield Problem(text, doctor, is_known=node.is_dead)
    if count := state.comparisons[RootComparison.DIVERGED]:
        ids = " ".join(map(str, state.diverged))
        more = "" if count <= len(state.diverged) else f", for example {ids}"
        action = f"{diagnose} {ids}" if not more else diagnose
        yield Problem(f"{count} containers have replicas that differ{more}", action)
    if count := state.comparisons[RootComparison.UNKNOWN]:
        text = f"of {count} containers SCM does not know all replicas and roots"
        yield Problem(text, diagnose, is_known=False)
