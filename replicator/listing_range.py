"""Ranges of keys, and what a store lists of one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from replicator.stores.port import ObjectFacts, ObjectLister, Store


@dataclass(frozen=True, slots=True)
class ListingRange:
    """The keys after one and up to another; None is no end. Strings compare by code
    points, which is the order of their UTF-8 bytes.
    """

    after: str = ""
    last: str | None = None

    def is_before(self, key: str) -> bool:
        """Whether the range ends before a key."""
        return self.last is not None and key > self.last

    def view(self, store: Store) -> Store:
        """The store as if it listed no other keys."""
        return replace(store, lister=RangeLister(store.lister, self))


class RangeLister:
    """Lists the keys of a store that are in a range (ObjectLister)."""

    def __init__(self, lister: ObjectLister, keys: ListingRange) -> None:
        self._lister, self._keys = lister, keys

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        start = max(start_after, self._keys.after)
        for facts in self._lister.list_objects(prefix, start_after=start):
            if self._keys.is_before(facts.key):
                return
            yield facts

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        for facts in self._lister.list_versions(prefix):
            if self._keys.is_before(facts.key):
                return
            if facts.key > self._keys.after:
                yield facts
