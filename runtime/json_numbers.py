"""Numbers of 64 bits in JSON.

Many readers keep 53 bits of a number: for `jq` 1.6 block 117883640217600015 is
117883640217600020, which is another block. So IDs of blocks are text wherever we write
JSON. Container IDs count up from 1 and stay numbers.
"""

# The largest integer up to which a 64-bit float has every integer (RFC 8259 §6).
EXACT_MAX = (1 << 53) - 1


def exact(number: int | None) -> str | None:
    """The decimal digits of an ID; None stays None."""
    return None if number is None else str(number)
