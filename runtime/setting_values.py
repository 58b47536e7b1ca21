"""Values of settings and options as people write them: sizes, durations, rates,
addresses.

Sizes ("64MiB"), durations ("15m") and rates ("5MiB/s") may have a unit; a bare number
is in bytes, seconds or bytes per second.
"""

import math
import re
from collections.abc import Mapping

from runtime.errors import ConfigError

# Sizes, durations and rates are below it: larger ones are typing errors.
_QUANTITY_END = 1 << 63

_SIZE_UNITS: Mapping[str, int] = {
    "": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATION_UNITS: Mapping[str, float] = {
    "": 1,
    "ms": 0.001,
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86400,
    "w": 604800,
}
_PORT = re.compile(r"[0-9]{1,5}")
_QUANTITY = re.compile(r" *([0-9]+(?:\.[0-9]+)?) *([a-zA-Z]*) *")


def parse_size(value: object) -> int:
    """Bytes, from a number or from text such as "64MiB".

    Raises:
        ValueError: it is not a size.
    """
    return math.floor(_parse_quantity(value, _SIZE_UNITS, 'a size such as 4096 or "64MiB"'))


def parse_duration(value: object) -> float:
    """Seconds, from a number or from text such as "15m".

    Raises:
        ValueError: it is not a duration.
    """
    expected = 'a duration such as 30 or "15m" (ms, s, m, h, d, w)'
    return _parse_quantity(value, _DURATION_UNITS, expected)


def parse_rate(value: object) -> int:
    """Bytes per second, from a number or from text such as "5MiB/s".

    Raises:
        ValueError: it is not a rate.
    """
    size = value.rstrip(" ").removesuffix("/s") if isinstance(value, str) else value
    try:
        rate = _parse_quantity(size, _SIZE_UNITS, "")
    except ValueError as error:
        # The value as it was given, and not what is left of it.
        raise ValueError(_expected('a rate such as 5242880 or "5MiB/s"', value)) from error
    # Not 0, which is no limit: who asks for almost nothing must not get everything.
    return max(math.floor(rate), 1) if rate else 0


def check_count(value: object) -> object:
    """The value itself, if it is a whole number, which True is not.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int:
        raise ValueError(_expected("a whole number", value))
    return value


def check_switch(value: object) -> object:
    """The value itself, if it is True or False.

    Raises:
        ValueError: it is neither.
    """
    if type(value) is not bool:
        raise ValueError(_expected("true or false", value))
    return value


def check_address(value: str) -> str:
    """The address itself, if it is host:port.

    Raises:
        ValueError: it is not.
    """
    host, _, port = value.rpartition(":")
    if (
        not host
        or not host.isprintable()
        or " " in host
        or not _PORT.fullmatch(port)
        or int(port) > 0xFFFF
        or (":" in host and not host.startswith("["))
    ):
        raise ValueError(
            f'expected an address such as "127.0.0.1:9893" or "[::1]:9893", found {value!r}'
        )
    return value


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address; an IPv6 host has no brackets.

    Raises:
        ConfigError: it is not host:port.
    """
    try:
        host, _, port = check_address(address).rpartition(":")
    except ValueError as error:
        raise ConfigError(str(error), address=address) from error
    return host.strip("[]"), int(port)


def _parse_quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # False for NaN too.
        if not 0 <= value < _QUANTITY_END:
            raise ValueError(_expected(expected, value))
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower() if match else "?"
    if match is None or unit not in units or float(match[1]) * units[unit] >= _QUANTITY_END:
        raise ValueError(_expected(expected, value))
    return float(match[1]) * units[unit]


def _expected(what: str, found: object) -> str:
    text = repr(found)
    return f"expected {what}, found {text[:100]}{'...' if len(text) > 100 else ''}"
