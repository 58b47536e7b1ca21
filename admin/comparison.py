"""A comparison of replicas as JSON and as text."""

from collections.abc import Callable

from merkle.comparison import Comparison
from runtime.json_numbers import exact
from runtime.output import JsonObject, print_line


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


def print_differences(compared: Comparison, named: Callable[[str], str]) -> None:
    """Print a line for each difference and each piece of evidence. `named` replaces the
    datanodes' IDs in a text.
    """
    for difference in compared.differences:
        where = f" at {difference.offset}" if difference.offset is not None else ""
        sources = ", ".join(map(named, difference.sources)) or "nowhere"
        lacking = ", ".join(map(named, difference.lacking))
        print_line(
            f"{difference.kind.value}: block {difference.block_id}{where}: {lacking} <- {sources}"
        )
    for evidence in compared.evidence:
        where = f" block {evidence.block_id}" if evidence.block_id is not None else ""
        where += f" at {evidence.offset}" if evidence.offset is not None else ""
        print_line(f"{evidence.kind}:{where} {named(evidence.detail)}")
