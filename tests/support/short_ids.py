"""IDs as people type them: their beginning."""

from collections.abc import Collection


def shortest(one: str, known: Collection[str]) -> str:
    """The shortest beginning that no other of the known IDs has."""
    beginnings = (one[:length] for length in range(1, len(one) + 1))
    return next(text for text in beginnings if sum(k.startswith(text) for k in known) == 1)
