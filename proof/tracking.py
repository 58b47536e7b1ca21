"""Which differences are repaired: those that two comparisons in a row show.

One comparison may see an item while an index is behind its bucket. A delete loses data
if it is wrong, so whoever deletes asks the source itself besides.
"""

from proof.comparison import BucketComparison
from proof.naming import ItemDifference


class DifferenceTracker:
    """Follows the comparisons of one pair of buckets."""

    def __init__(self) -> None:
        self._last_job = b""
        self._seen = frozenset[ItemDifference]()
        self._confirmed = frozenset[ItemDifference]()

    def observe(self, comparison: BucketComparison) -> tuple[ItemDifference, ...]:
        """The differences that this comparison and the one before it both show, item by
        item the same; by key and version. Items in flight or unknown are not among
        them.
        """
        if comparison.job == self._last_job:
            return _ordered(self._confirmed)
        differences = frozenset(comparison.differences)
        self._confirmed = differences & self._seen
        self._seen, self._last_job = differences, comparison.job
        return _ordered(self._confirmed)


def _ordered(differences: frozenset[ItemDifference]) -> tuple[ItemDifference, ...]:
    return tuple(sorted(differences, key=lambda one: (one.key, one.version)))
