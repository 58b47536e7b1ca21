"""Documents that may be damaged, or somebody else's: JSON and TOML within limits.

Python's parsers recurse, and so does whatever writes or compares their values. A text
of brackets would end a process with a RecursionError somewhere later. So the depth is
limited here, far below where that begins, and numbers that no JSON has are refused.
"""

import json
import math
import tomllib
from typing import Any

# No document of ours is nested deeper than ten.
_NESTING_MAX = 100


def parse_json(raw: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested too deep, or has a number that is none.
    """
    try:
        value = json.loads(raw, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    if len(raw) > _NESTING_MAX:
        _check_nesting(value)
    return value


def parse_toml(raw: bytes) -> dict[str, object]:
    """The table of a TOML text.

    Raises:
        ValueError: it is not TOML, or is nested too deep.
    """
    try:
        table = tomllib.loads(raw.decode())
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    _check_nesting(table)
    return table


def _check_nesting(value: object) -> None:
    level = [value]
    for _ in range(_NESTING_MAX):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
            # Leaves have nothing below them.
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"it is nested deeper than {_NESTING_MAX} levels"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:30]} is not a number of JSON")
    return number
