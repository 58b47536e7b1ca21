"""Whatever happens on the way, what a sync publishes has the hash that its source
declares, and what is recorded of an object is true of it.
"""

import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.copy_task import CopyLimits
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ObjectProperties, WriteCondition
from tests.support.bucket_sync import SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.memory_store import MemoryStore, StoreFaults

PART = 4
NOTHING = ObjectProperties()
LIMITS = CopyLimits(part_bytes=PART, pieces_bytes_max=4 * PART)


class BadLink(MemoryStore):
    """Changes what arrives in pieces, so often; in parts it arrives well."""

    flips = 0

    def arrived(self, body: bytes) -> bytes:
        """See MemoryStore."""
        self.flips -= 1
        return super().arrived(body[::-1] if self.flips >= 0 else body)


@dataclass(frozen=True)
class Way:
    """What happens to one object on its way."""

    body: bytes
    in_parts: bool
    lies: bool
    declares: bool
    misread: bool
    changes: int
    cuts: frozenset[int]


ways = st.builds(
    Way,
    body=st.binary(min_size=PART + 1, max_size=5 * PART),
    in_parts=st.booleans(),
    lies=st.booleans(),
    declares=st.booleans(),
    misread=st.booleans(),
    changes=st.integers(min_value=0, max_value=2),
    cuts=st.frozensets(st.integers(min_value=0, max_value=12), max_size=3),
)


def written(way: Way) -> MemoryStore:
    """The source."""
    source = MemoryStore("memory:a")
    if way.in_parts:
        upload = source.begin("k", NOTHING)
        bodies = [way.body[at : at + PART] for at in range(0, len(way.body), PART)]
        for number, body in enumerate(bodies, 1):
            source.write_part("k", upload, number, body)
        parts = list(source.parts("k", upload))
        source.complete("k", upload, parts, NOTHING, WriteCondition())
    else:
        source.write("k", way.body, NOTHING)
    stored = source.objects["k"]
    facts = stored.facts
    if way.lies and not way.in_parts:
        wrong = hashlib.md5(b"?" + way.body).digest()
        facts = replace(facts, etag=wrong.hex(), hashes=(replace(facts.hashes[0], digest=wrong),))
    # No S3 store declares an MD5 of the whole of what has parts.
    if way.in_parts or not way.declares:
        facts = replace(facts, hashes=())
    source.objects["k"] = replace(stored, facts=facts)
    return source


def hashes_of(body: bytes) -> set[object]:
    hasher = ContentHasher()
    hasher.update(body)
    return set(hasher.hashes())


def cut(numbers: Iterable[int]) -> StoreFaults:
    """The link is cut in these requests."""
    calls = iter(range(1_000))

    def fail(_called: str, _key: str) -> None:
        if next(calls) in numbers:
            raise StoreUnavailableError("cut")

    return StoreFaults(before=fail)


@settings(max_examples=30, deadline=None)
@given(ways)
def test_only_what_the_source_declares_is_published(way: Way) -> None:
    source, target = written(way), BadLink("memory:b", takes_pieces=True)
    target.flips, target.faults = way.changes, cut(way.cuts)
    read = way.body[:-1] + bytes([way.body[-1] ^ 1]) if way.misread else way.body
    reader = FlawedReader(source.store(), bodies={"k": read} if way.misread else {})
    with tempfile.TemporaryDirectory() as name:
        run = SyncRunner(
            replace(source.store(), reader=reader), target.store(), Path(name), copy_limits=LIMITS
        )
        try:
            run()
        except StoreUnavailableError:
            return
        with PairLedger(Path(name), source="memory:a", target="memory:b") as ledger:
            row = ledger.row("k")
    declared = {one.digest for one in source.objects["k"].facts.hashes}
    if "k" in target.objects:
        published = target.objects["k"].body
        assert published == read
        assert not declared or declared == {hashlib.md5(published).digest()}
        assert row is None or set(row.hashes) <= hashes_of(published)
    if not (way.lies or way.misread or way.cuts):
        assert target.bodies() == {"k": way.body}
