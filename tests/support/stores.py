"""The stores that the contract suite runs on, each opened empty."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicator.stores.local import LocalBucket
from replicator.stores.port import ObjectFacts, ObjectProperties, Store, WriteCondition
from runtime.disk import Disk

NOTHING = ObjectProperties()
ANYTHING = WriteCondition()


@dataclass(frozen=True)
class ContractStore:
    """A store to test, and what its server lacks beside the capabilities."""

    store: Store
    # Fast enough for 10,000 parts, and room for 5 GiB.
    takes_large: bool = False
    # A small part that is not the last is refused.
    refuses_small_parts: bool = True
    # Why keys do not cross this server unchanged although the adapter is right.
    broken_keys: frozenset[str] = frozenset()


@contextmanager
def local_store(folder: Path) -> Iterator[ContractStore]:
    """A bucket in a new folder."""
    with LocalBucket(folder / "bucket", Disk(), create=True) as bucket:
        yield ContractStore(bucket.store(), takes_large=True)


Opener = Callable[[Path], AbstractContextManager[ContractStore]]
# By name; each yields an empty store.
OPENERS: dict[str, Opener] = {"local": local_store}


def put(store: Store, key: str, body: bytes = b"x") -> ObjectFacts:
    """Write an object without properties, whatever was there."""
    return store.writer.put(key, body, NOTHING, ANYTHING)


def content(store: Store, facts: ObjectFacts, first: int = 0, end: int | None = None) -> bytes:
    """The bytes of an object."""
    with store.reader.read(facts, first=first, end=end) as pieces:
        return b"".join(pieces)


def current(store: Store, key: str) -> ObjectFacts:
    """The object that exists now."""
    facts = store.reader.facts(key)
    assert facts is not None, key
    return facts


def keys(store: Store, prefix: str = "", start_after: str = "") -> list[str]:
    """All keys in the order of the listing."""
    return [facts.key for facts in store.lister.list_objects(prefix, start_after=start_after)]
