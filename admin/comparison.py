"""The JSON object for a comparison of replicas."""

from merkle.comparison import Comparison
from runtime.json_numbers import exact
from runtime.output import JsonObject


def comparison_json(compared: Comparison) -> JsonObject:
    """The verdict and the differences, in the form that all commands use."""
    differences = []
    for difference in compared.differences:
        one: JsonObject = {"kind": difference.kind.value, "blockID": exact(difference.block_id)}
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
