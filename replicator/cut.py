"""Whether what a comparison found was so at one moment at both sides.

A comparison looks at one key after the other while others may write. The moment is the
one at which it began. A side held then what was compared, if its change feed shows no
change until the end, and has all that was seen by then. Where it has no feed, each key
must have been seen in the same state before: between two looks that show one stamp
nothing has changed.
"""

from functools import partial

from replicator.comparison import DecidedKey
from replicator.deletes import Retrying
from replicator.difference import Action
from replicator.stores.errors import FeedGapError
from replicator.stores.port import ChangeFeed, FeedPosition, Store


class CutCheck:
    """Watches two stores during one comparison; make it before the comparison begins.

    `rows_are_fresh` says that what the ledger knows of properties was seen by this run.
    Rows of earlier runs prove what stamps show, and no more.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        prefix: str,
        *,
        rows_are_fresh: bool,
        retried: Retrying,
    ) -> None:
        """Note the positions of the feeds.

        Raises:
            StoreError: a store did not say.
        """
        self._prefix = prefix
        self._retried = retried
        self._feeds = tuple(
            (feed, retried(partial(_begin, feed)))
            for feed in (source.feed, target.feed)
            if feed is not None
        )
        self._source_has_feed = source.feed is not None
        self._target_has_feed = target.feed is not None
        self._trusts_rows = rows_are_fresh or source.capabilities.stamps_cover_properties
        self._unconfirmed = 0

    def add(self, decided: DecidedKey) -> None:
        """Take in a key that the comparison has looked at."""
        if decided.decision.action is not Action.NOTHING:
            return
        source = self._source_has_feed or (self._trusts_rows and decided.source_was_seen)
        target = self._target_has_feed or decided.target_was_seen
        self._unconfirmed += not (source and target)

    def in_flight(self, gone: int) -> int:
        """How many keys may have changed since the comparison began; 0 says that all
        was so at that moment. `gone` keys were known and are at neither side now.

        Raises:
            StoreError: a store did not say.
        """
        counts = [self._retried(partial(self._changed, *one)) for one in self._feeds]
        if not (self._source_has_feed and self._target_has_feed):
            counts.append(self._unconfirmed + gone)
        return max(counts)

    def _changed(self, feed: ChangeFeed, position: FeedPosition) -> int:
        keys = set[str]()
        try:
            if feed.settled_position() == position:
                return 0
            while True:
                batch = feed.read(position)
                if batch.position == position:
                    break
                position = batch.position
                keys.update(change.key for change in batch.changes)
                keys.update(change.previous_key for change in batch.changes)
        except FeedGapError:
            # Something has changed, and the log does not say what.
            return 1
        return sum(self._concerns(key) for key in keys)

    def _concerns(self, key: str) -> bool:
        """Whether a changed key, or one below a changed prefix, was compared."""
        is_above = key.endswith("/") and self._prefix.startswith(key)
        return bool(key) and (key.startswith(self._prefix) or is_above)


def _begin(feed: ChangeFeed) -> FeedPosition:
    """Where a comparison begins: what was changed just before, such as by this process,
    is no change during it. An earlier position is right as well.
    """
    try:
        return feed.settled_position()
    except FeedGapError:
        return feed.position()
