"""Which differences are repaired: those that two comparisons in a row show.

One comparison may see an item while an index is behind its bucket. A delete loses data
if it is wrong, so it wants a fresh fact from the source besides.
"""

from dataclasses import dataclass

from proof.comparison import BucketComparison
from proof.naming import ItemDifference, ItemDifferenceKind


@dataclass(frozen=True, slots=True)
class SourceFact:
    """What the source's store itself said of a key and version, when it was asked after
    `after_job` had ended.
    """

    key: str
    version: str
    exists: bool
    after_job: bytes


class DifferenceTracker:
    """Follows the comparisons of one pair of buckets."""

    def __init__(self) -> None:
        self._last_job = b""
        self._seen = frozenset[ItemDifference]()
        self._confirmed = frozenset[ItemDifference]()

    def observe(self, comparison: BucketComparison) -> tuple[ItemDifference, ...]:
        """The differences that this comparison and the one before it both show, item by
        item the same; by key and version. Items in flight or unknown are not among
        them. Extra ones may be deleted only if `may_delete` agrees.
        """
        if comparison.job == self._last_job:
            return _ordered(self._confirmed)
        differences = frozenset(comparison.differences)
        self._confirmed = differences & self._seen
        self._seen, self._last_job = differences, comparison.job
        return _ordered(self._confirmed)

    def may_delete(self, difference: ItemDifference, fact: SourceFact) -> bool:
        """Whether to delete an extra item: two comparisons showed it, and after the
        second one the source's store said that it does not have it.
        """
        return (
            difference.kind is ItemDifferenceKind.EXTRA
            and difference in self._confirmed
            and (fact.key, fact.version) == (difference.key, difference.version)
            and not fact.exists
            and fact.after_job == self._last_job
        )


def _ordered(differences: frozenset[ItemDifference]) -> tuple[ItemDifference, ...]:
    return tuple(sorted(differences, key=lambda one: (one.key, one.version)))
