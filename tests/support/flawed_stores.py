"""Stores with one flaw each, around a real one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from merkle.checksum import Buffer
from replicator.stores.errors import StoreError
from replicator.stores.port import (
    DeleteFailure,
    ObjectFacts,
    ObjectProperties,
    Store,
    WholeObject,
    WriteCondition,
)


def nothing_happens(_key: str) -> None:
    """Between a question and its answer."""


@dataclass
class FlawedReader:
    """An ObjectReader. `before_facts` runs before each question about a key; keys of
    `broken` cannot be read, and raise this error; `bodies` are read instead of what is
    stored.
    """

    store: Store
    before_facts: Callable[[str], None] = nothing_happens
    before_read: Callable[[str], None] = nothing_happens
    broken: dict[str, StoreError] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        self.before_facts(key)
        self.asked.append(key)
        return self.store.reader.facts(key, version=version)

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        return self.store.reader.properties(key, version=version)

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader."""
        return self.store.reader.properties_of(facts)

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader."""
        self.before_read(facts.key)
        self.reads.append(facts.key)
        if facts.key in self.broken:
            raise self.broken[facts.key]
        if facts.key in self.bodies:
            yield iter([self.bodies[facts.key][first:end]])
            return
        with self.store.reader.read(facts, first=first, end=end) as pieces:
            yield pieces

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader."""
        properties = self.properties_of(facts)
        with self.read(facts) as pieces:
            return WholeObject(properties, b"".join(pieces))


@dataclass
class FlawedLister:
    """An ObjectLister that fails after some keys, or lists what was before."""

    store: Store
    fails_after: int | None = None
    listed: Sequence[ObjectFacts] | None = None

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        found = self.listed or self.store.lister.list_objects(prefix, start_after=start_after)
        for number, facts in enumerate(found):
            if number == self.fails_after:
                raise StoreError("the listing ended early")
            yield facts

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        return self.store.lister.list_versions(prefix)


@dataclass
class CarelessWriter:
    """An ObjectWriter that obeys no condition."""

    store: Store

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        assert condition == WriteCondition()
        return self.store.writer.put(key, body, properties, condition)

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        """See ObjectWriter."""
        return self.store.writer.put_properties(facts, properties, tags_only=tags_only)

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        return self.store.writer.delete(keys)


def without_conditions(store: Store) -> Store:
    """The store as one that guards no write."""
    capabilities = replace(
        store.capabilities,
        creates_conditionally=False,
        replaces_conditionally=False,
        completes_conditionally=False,
    )
    return replace(store, capabilities=capabilities, writer=CarelessWriter(store))
