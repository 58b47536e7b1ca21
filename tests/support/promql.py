"""As much of PromQL as our alerts and panels use: tokens, brackets, and which metrics
and labels an expression names.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<duration>\d+[smhdwy])|(?P<name>[a-z_]\w*)
    |(?P<string>"[^"\\]*")|(?P<operator>=~|!~|!=|==|>=|<=|[-+*/<>=])|(?P<bracket>[][(){},]))""",
    re.VERBOSE,
)
_FUNCTIONS = {"absent", "increase", "max_over_time", "rate", "time"}
_AGGREGATIONS = {"max", "sum"}
_WORDS = {"and", "by", "offset", "on", "or", "unless"}
_PAIRS = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Named:
    """What an expression names: metrics, and labels with the metric that they select;
    those of `by` and `on` have none.
    """

    metrics: frozenset[str]
    labels: frozenset[tuple[str, str]]


def tokens(expression: str) -> list[tuple[str, str]]:
    """Kind and text of each token.

    Raises:
        ValueError: something is no token, or brackets do not match.
    """
    found, at, opened = list[tuple[str, str]](), 0, list[str]()
    expression = expression.rstrip()
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"no token at {expression[at:]!r}")
        kind = str(match.lastgroup)
        text = match[kind]
        if text in _PAIRS.values():
            opened.append(text)
        elif text in _PAIRS and (not opened or opened.pop() != _PAIRS[text]):
            raise ValueError(f"{text} closes nothing in {expression!r}")
        found.append((kind, text))
        at = match.end()
    if opened:
        raise ValueError(f"{opened} is not closed in {expression!r}")
    return found


def named(expression: str) -> Named:
    """The metrics and labels in an expression.

    Raises:
        ValueError: it is not written in the part of PromQL that is known here.
    """
    metrics, labels = set[str](), set[tuple[str, str]]()
    found = [*tokens(expression), ("end", "")]
    selected, grouped, depth = "", False, ""
    for (kind, text), (_, following) in pairwise(found):
        if text == "{":
            depth = "{"
        elif text == "}":
            depth = ""
        elif text == ")" and grouped:
            grouped = False
        elif kind == "name" and depth == "{":
            labels.add((text, selected))
        elif kind == "name" and grouped:
            labels.add((text, ""))
        elif text in ("by", "on"):
            grouped = True
        elif kind == "name" and text not in _WORDS:
            if text in _FUNCTIONS | _AGGREGATIONS:
                if following not in ("(", "by"):
                    raise ValueError(f"{text} is not called in {expression!r}")
            else:
                selected = text
                metrics.add(text)
    if not metrics:
        raise ValueError(f"{expression!r} names no metric")
    return Named(frozenset(metrics), frozenset(labels))
