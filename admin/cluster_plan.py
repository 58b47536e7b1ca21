"""The plan of a reconciliation by Ozone itself, by SCM's reports or by what a
controller knows of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from admin.containers import datanode_json, root_of
from admin.diagnosis_text import node_json
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId
from ozone.scm_client import ClusterNode
from runtime.output import JsonObject, print_line, print_table
from scm.container_reports import ContainerReport
from scm.eligibility import Ruling
from scm.policy import compare
from scm.views import ContainerStatus

_ROWS_MAX = 100


@dataclass(frozen=True, slots=True)
class PlannedContainer:
    """One container of a plan; `state` and `comparison` are empty if it is not known.
    Each replica has the JSON object of its datanode.
    """

    container_id: int
    ruling: Ruling
    state: str = ""
    comparison: str = ""
    replicas: tuple[tuple[JsonObject, ContainerReplica], ...] = ()

    @classmethod
    def of_report(
        cls,
        container_id: ContainerId,
        ruling: Ruling,
        report: ContainerReport | None,
        nodes: Mapping[PeerId, ClusterNode],
    ) -> "PlannedContainer":
        """By what SCM reports."""
        if report is None:
            return cls(container_id, ruling)
        return cls(
            container_id,
            ruling,
            report.container.state.value,
            compare(report.replicas, report.known).comparison.value,
            tuple((node_json(one.peer, nodes.get(one.peer)), one) for one in report.replicas),
        )

    @classmethod
    def of_view(
        cls, container_id: int, ruling: Ruling, view: ContainerStatus | None
    ) -> "PlannedContainer":
        """By what a controller knows."""
        if view is None:
            return cls(container_id, ruling)
        return cls(
            container_id,
            ruling,
            view.state.value if view.state else "",
            view.compared.comparison.value,
            tuple((datanode_json(one.datanode), one.replica) for one in view.replicas),
        )

    def json(self) -> JsonObject:
        """The JSON object; what is not known is null."""
        return {
            "containerID": self.container_id,
            "eligibility": self.ruling.eligibility.value,
            "message": self.ruling.message,
            "comparison": self.comparison or None,
            "replicas": [
                {"datanode": datanode, "state": one.state.value, "dataChecksum": root_of(one)}
                for datanode, one in self.replicas
            ],
        }


def print_cluster_plan(wanted: Sequence[PlannedContainer]) -> None:
    """Print those that may be reconciled."""
    if not wanted:
        return
    print_line("Plan: SCM orders all replicas of each container to reconcile, in rounds.")
    rows = [
        (
            one.container_id,
            one.state,
            one.comparison,
            ", ".join(root_of(replica) or "unknown" for _, replica in one.replicas),
        )
        for one in wanted[:_ROWS_MAX]
    ]
    print_table(("CONTAINER", "STATE", "REPLICAS", "ROOTS"), rows, numbers=("CONTAINER",))
    if len(wanted) > _ROWS_MAX:
        print_line(f"... and {len(wanted) - _ROWS_MAX} more")
