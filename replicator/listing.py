"""Listings of two stores and of the ledger, joined by key in bounded memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from replicator.ledger import LedgerRow
from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectFacts, ObjectLister
from runtime.retry import Backoff, Sleep, call_with_retry


class _HasKey(Protocol):
    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=_HasKey)


class ListingOrderError(StoreError):
    """A store did not list its keys in ascending order, so that nothing can be said of
    keys that it did not list.
    """

    code = "listing_order"


@dataclass(frozen=True, slots=True)
class JoinedKey:
    """What the listings and the ledger have of one key."""

    key: str
    source: ObjectFacts | None
    target: ObjectFacts | None
    row: LedgerRow | None


def join_keys(
    source: Iterator[ObjectFacts], target: Iterator[ObjectFacts], rows: Iterator[LedgerRow]
) -> Iterator[JoinedKey]:
    """Every key that any of the three has, ascending.

    Raises:
        ListingOrderError: a listing is not in ascending order.
    """
    ours, theirs = _ascending(source, "source"), _ascending(target, "target")
    known = _ascending(rows, "ledger")
    a, b, c = next(ours, None), next(theirs, None), next(known, None)
    while a is not None or b is not None or c is not None:
        # Strings compare by code points, which is the order of their UTF-8 bytes.
        key = min(one.key for one in (a, b, c) if one is not None)
        found = JoinedKey(
            key,
            a if a is not None and a.key == key else None,
            b if b is not None and b.key == key else None,
            c if c is not None and c.key == key else None,
        )
        yield found
        a = next(ours, None) if found.source is not None else a
        b = next(theirs, None) if found.target is not None else b
        c = next(known, None) if found.row is not None else c


def lists_key(lister: ObjectLister, key: str) -> bool:
    """Whether a store lists a key now. One that is listed but does not exist was not
    deleted: the store has lost it behind its own index.

    Raises:
        StoreError: the store did not say.
    """
    found = next(lister.list_objects(key), None)
    return found is not None and found.key == key


def list_resumed(
    lister: ObjectLister, prefix: str, *, sleep: Sleep, backoff: Backoff, start_after: str = ""
) -> Iterator[ObjectFacts]:
    """The listing of a store behind `start_after`, continued behind the last key where
    it fails for a while.

    Raises:
        StoreError: the listing is not complete.
    """
    last = start_after
    listing = lister.list_objects(prefix, start_after=start_after)
    failed = False

    def advance() -> ObjectFacts | None:
        nonlocal listing, failed
        if failed:
            listing = lister.list_objects(prefix, start_after=last)
        failed = True
        found = next(listing, None)
        failed = False
        return found

    step: Callable[[], ObjectFacts | None] = advance
    while (facts := call_with_retry(step, sleep=sleep, backoff=backoff)) is not None:
        last = facts.key
        yield facts


def _ascending(listing: Iterator[K], name: str) -> Iterator[K]:
    last = ""
    for one in listing:
        if one.key <= last:
            raise ListingOrderError(
                f"the {name} listed {one.key!r} after {last!r}",
                hint="Its keys are not in UTF-8 order, so that no listing of it can be compared.",
            )
        last = one.key
        yield one
