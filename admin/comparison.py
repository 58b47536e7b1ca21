"""A comparison of replicas as JSON."""

from merkle.comparison import Comparison
from runtime.output import JsonObject


def comparison_json(compared: Comparison) -> JsonObject:
    """The verdict and each difference, as every command that compares shows them."""
    differences = []
    for difference in compared.differences:
        one: JsonObject = {"kind": difference.kind.value, "blockID": difference.block_id}
        if difference.offset is not None:
            one["offset"] = difference.offset
        differences.append(
            one | {"lacking": list(difference.lacking), "sources": list(difference.sources)}
        )
    return {
        "containerID": compared.container_id,
        "verdict": compared.verdict.value,
        "differences": differences,
    }
