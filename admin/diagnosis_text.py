"""What commands print of a diagnosis of a running cluster."""

from collections.abc import Mapping

from admin.comparison import comparison_json, print_differences
from admin.datanode_names import unique_prefixes
from live.diagnosis import Diagnosis, ReplicaReading
from live.stripes import StripeReport, stripe_text
from merkle.replica import PeerId
from merkle.tree import root_hex
from ozone.scm_client import ClusterNode
from runtime.json_numbers import exact
from runtime.output import JsonObject, print_line, print_table
from runtime.setting_values import split_address


class NodeNames:
    """Short names of a cluster's datanodes."""

    def __init__(self, nodes: Mapping[PeerId, ClusterNode]) -> None:
        self._nodes, self._short = nodes, unique_prefixes(nodes)

    def text(self, text: str) -> str:
        """A text with each known UUID replaced by its beginning and its host."""
        for peer, node in self._nodes.items():
            text = text.replace(peer, f"{self._short[peer]} ({node.host})")
        return text


def node_json(peer: PeerId, node: ClusterNode | None) -> JsonObject:
    """The JSON object for a datanode, with the keys that Ozone uses; what SCM does not
    say is null.
    """
    host = split_address(node.address)[0] if node and node.address else None
    return {"id": peer, "hostname": node.host if node else None, "ipAddress": host}


def diagnosis_json(diagnosis: Diagnosis) -> JsonObject:
    """The JSON object for a diagnosis. An unknown root is null."""
    container = diagnosis.container
    return comparison_json(diagnosis.comparison) | {
        "state": container.state.value,
        "replication": container.replication,
        "doubt": diagnosis.doubt,
        "unreachable": diagnosis.is_unreachable,
        "stripes": _stripes_json(diagnosis.stripes) if diagnosis.stripes else None,
        "evidence": [
            {
                "kind": str(one.kind),
                "blockID": None if one.block_id is None else str(one.block_id),
                "offset": one.offset,
                "detail": one.detail,
            }
            for one in diagnosis.comparison.evidence
        ],
        "replicas": [
            {
                "datanode": node_json(one.replica.peer, diagnosis.nodes.get(one.replica.peer)),
                "state": one.replica.state.value,
                "replicaIndex": one.replica.replica_index,
                "dataChecksum": (
                    None
                    if one.tree is None or one.tree.data_checksum is None
                    else root_hex(one.tree.data_checksum)
                ),
                "reportedDataChecksum": (
                    None
                    if one.replica.data_checksum is None
                    else root_hex(one.replica.data_checksum)
                ),
                "dataRead": one.deep is not None,
                "readBy": "agent" if one.by_agent else "datanode",
                "reason": one.reason or None,
            }
            for one in diagnosis.readings
        ],
    }


def _stripes_json(report: StripeReport) -> JsonObject:
    return {
        "count": report.stripe_count,
        "readable": report.readable_count,
        "damaged": [
            {
                "blockID": exact(one.block_id),
                "stripe": one.stripe,
                "lackingIndexes": list(one.lacking),
                "conflictingIndexes": list(one.conflicting),
                "readable": one.is_readable,
            }
            for one in report.damages
        ],
    }


def _read_text(one: ReplicaReading) -> str:
    """What was read of a replica and by whom, or why nothing was."""
    if one.tree is None:
        return one.reason
    return ("data" if one.deep else "tree") + (" by its agent" if one.by_agent else "")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print one container: its verdict, its replicas, and each difference."""
    compared, names = diagnosis.comparison, NodeNames(diagnosis.nodes)
    doubt = f" ({names.text(diagnosis.doubt)})" if diagnosis.doubt else ""
    print_line(f"Container {compared.container_id}: {compared.verdict.value}{doubt}")
    if report := diagnosis.stripes:
        print_line(f"{report.readable_count} of {report.stripe_count} stripes are readable")
        for one in report.damages:
            print_line(
                f"block {one.block_id} stripe {one.stripe}: {stripe_text(one)};"
                f" {'readable' if one.is_readable else 'not readable'}"
            )
    if diagnosis.readings:
        print_table(
            ("DATANODE", "INDEX", "STATE", "ROOT", "BLOCKS", "DELETED", "READ"),
            [
                (
                    names.text(one.replica.peer),
                    one.replica.replica_index or "-",
                    one.replica.state.value,
                    root_hex(one.tree.data_checksum) if one.tree else "-",
                    len(one.tree.blocks) if one.tree else "-",
                    sum(block.deleted for block in one.tree.blocks) if one.tree else "-",
                    _read_text(one),
                )
                for one in diagnosis.readings
            ],
            numbers=("INDEX", "ROOT", "BLOCKS", "DELETED"),
            folded=("READ",),
        )
    print_differences(compared, names.text)
