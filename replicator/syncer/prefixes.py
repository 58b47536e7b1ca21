"""Which changes concern a replication of some prefixes only (OZ-161).

No prefix is all keys. A rename across the border is a new key, or a deleted one.
"""

from collections.abc import Sequence
from dataclasses import replace

from replicator.stores.port import Change, ChangeKind

ALL = ("",)


def covers(prefixes: Sequence[str], key: str) -> bool:
    """Whether a key is one of the replication's."""
    return not prefixes or key.startswith(tuple(prefixes))


def change_within(change: Change, prefixes: Sequence[str]) -> Change | None:
    """The change as far as it concerns keys below these prefixes; None if it does not.

    Operations on prefixes may reach beyond them: whoever applies one looks at each key.
    """
    match change.kind:
        case ChangeKind.PUT | ChangeKind.DELETE:
            return change if covers(prefixes, change.key) else None
        case ChangeKind.RENAME:
            is_from, is_to = (covers(prefixes, one) for one in (change.previous_key, change.key))
            if is_from and is_to:
                return change
            if is_to:
                return replace(change, kind=ChangeKind.PUT, previous_key="")
            if is_from:
                gone = change.previous_key
                return replace(
                    change, key=gone, kind=ChangeKind.DELETE, previous_key="", facts=None
                )
            return None
        case ChangeKind.DELETE_PREFIX | ChangeKind.RENAME_PREFIX:
            names = (change.key, change.previous_key) if change.previous_key else (change.key,)
            return change if any(_meets(prefixes, one) for one in names) else None


def parts_below(prefixes: Sequence[str], prefix: str) -> tuple[str, ...]:
    """The prefixes to list so that all keys below `prefix` that concern the replication
    are seen, each once.
    """
    if covers(prefixes, prefix):
        return (prefix,)
    return without_nested([one for one in prefixes if one.startswith(prefix)])


def without_nested(prefixes: Sequence[str]) -> tuple[str, ...]:
    """The prefixes, sorted, without those that are below another of them."""
    found = list[str]()
    for one in sorted(prefixes):
        if not found or not one.startswith(found[-1]):
            found.append(one)
    return tuple(found)


def uncovered(prefixes: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The prefixes that a replication wants and that the target does not have yet; the
    empty one is all keys.
    """
    wanted = without_nested(prefixes) or ALL
    return tuple(one for one in wanted if not one.startswith(tuple(known)))


def _meets(prefixes: Sequence[str], prefix: str) -> bool:
    return bool(parts_below(prefixes, prefix))
