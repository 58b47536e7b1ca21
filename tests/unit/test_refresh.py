"""Bringing an index up to date: what is kept, read, removed, and left alone."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from proof.index import EvidenceCounts
from proof.item import EvidenceLevel, HashAlgorithm, Profile
from proof.stored_index import StoredIndex
from replicator.hashing import blake3_of
from replicator.refresh import IndexedBucket, RefreshProgress, groups_of
from replicator.stores.errors import PreconditionFailedError, StoreError, StoreUnavailableError
from replicator.stores.local import LocalBucket
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.stores.stamps import same_stamp
from replicator.verifier.state import open_index
from runtime.disk import Disk
from runtime.errors import ConfigError, OperationInterruptedError
from runtime.rate_limit import SystemClock
from tests.support.flawed_stores import FlawedLister, FlawedReader
from tests.support.stores import current, put
from tests.support.verifiers import root_of


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now_s: int = 1_700_000_000
    real: SystemClock = field(default_factory=SystemClock)

    def now_ms(self) -> int:
        """See Clock."""
        return 1000 * self.now_s

    def monotonic_s(self) -> float:
        """See Clock."""
        return float(self.now_s)


@dataclass
class Indexed:
    """A bucket with its index."""

    store: Store
    index: StoredIndex
    clock: Clock
    profile: Profile

    def refresh(
        self,
        store: Store | None = None,
        *,
        read_since_s: int = 0,
        prefix: str = "",
        stopped: Callable[[], bool] = lambda: False,
    ) -> RefreshProgress:
        """A refresh, by another view of the store if one is given."""
        bucket = IndexedBucket(store or self.store, self.index, self.profile, self.clock)
        return bucket.refresher(stopped).refresh(read_since_s=read_since_s, prefix=prefix)

    def scrub(self, store: Store, *, read_since_s: int) -> RefreshProgress:
        """A scrub by a view of the store."""
        bucket = IndexedBucket(store, self.index, self.profile, self.clock)
        return bucket.refresher(lambda: False).scrub(read_since_s=read_since_s)

    def reader(self) -> FlawedReader:
        """A reader without a flaw yet."""
        return FlawedReader(self.store)

    @property
    def keys(self) -> list[str]:
        """The keys of the index."""
        return [row.item.key for row in self.index.rows(start_after="", limit=10_000)]

    @property
    def evidence(self) -> EvidenceCounts:
        """Of all items."""
        with self.index.snapshot() as snapshot:
            return snapshot.evidence


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[Indexed]:
    with ExitStack() as stack:
        bucket = stack.enter_context(LocalBucket(tmp_path / "bucket", Disk(), create=True))
        store = bucket.store()
        profile = Profile(b"s" * 32, HashAlgorithm.BLAKE3, groups_of(store.capabilities))
        index = StoredIndex(tmp_path / "index", profile, disk=Disk())
        stack.callback(index.close)
        yield Indexed(store, index, Clock(), profile)


def test_a_listing_and_the_index_are_merged(indexed: Indexed) -> None:
    for key in ("a", "c", "e", "g"):
        put(indexed.store, key)
    assert indexed.refresh() == RefreshProgress(objects=4, added=4)
    indexed.store.writer.delete(["a", "g"])
    put(indexed.store, "b")
    put(indexed.store, "e", b"other")
    assert indexed.refresh() == RefreshProgress(objects=3, added=1, changed=1, removed=2)
    assert indexed.keys == ["b", "c", "e"]
    root = root_of(indexed.index)
    assert indexed.refresh() == RefreshProgress(objects=3)
    assert root_of(indexed.index) == root
    row = indexed.index.row("e")
    assert row is not None
    assert row.item.content == blake3_of(b"other")
    assert row.evidence.level is EvidenceLevel.RECORDED


def test_an_unchanged_stamp_needs_no_question(indexed: Indexed) -> None:
    for key in ("a", "b"):
        put(indexed.store, key)
    indexed.refresh()
    reader = indexed.reader()
    put(indexed.store, "b", b"new")
    indexed.refresh(replace(indexed.store, reader=reader))
    assert reader.asked == ["b"]


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        ({}, True),
        ({"version": ""}, True),
        ({"modified_ms": 0}, True),
        ({"modified_ms": 17_000}, True),
        ({"modified_ms": 17_124}, False),
        ({"modified_ms": 18_000}, True),
        ({"modified_ms": 16_000}, False),
        ({"modified_ms": 19_000}, False),
        ({"modified_ms": 18_001}, False),
        ({"version": "w"}, False),
        ({"etag": "f"}, False),
        ({"size_bytes": 6}, False),
        ({"key": "l"}, False),
    ],
)
def test_stamps_agree_as_far_as_both_say(change: dict[str, Any], agrees: bool) -> None:
    facts = ObjectFacts("k", 5, "e", 17_123, "v")
    other = replace(facts, **change)
    assert same_stamp(facts, other) == same_stamp(other, facts) == agrees


def test_two_whole_seconds_are_two_times() -> None:
    facts = ObjectFacts("k", 5, "e", 17_000)
    assert not same_stamp(facts, replace(facts, modified_ms=18_000))


def test_a_stamp_is_completed_by_what_a_listing_has(indexed: Indexed) -> None:
    put(indexed.store, "a")
    indexed.refresh()
    row = indexed.index.row("a")
    assert row is not None
    for stamp in (replace(row.stamp, version=""), replace(row.stamp, modified_ms=0)):
        indexed.index.apply([("a", replace(row, stamp=stamp))])
        indexed.refresh()
        assert indexed.index.row("a") == row


def test_new_properties_are_another_item(indexed: Indexed) -> None:
    facts = put(indexed.store, "a")
    indexed.refresh()
    before = root_of(indexed.index)
    indexed.store.writer.put_properties(facts, ObjectProperties(tags=(("t", "1"),)))
    assert indexed.refresh() == RefreshProgress(objects=1, changed=1)
    assert root_of(indexed.index) != before


def test_an_object_without_a_recorded_hash_is_read_once(indexed: Indexed) -> None:
    put(indexed.store, "a", b"body")

    class NoHashes(FlawedReader):
        def facts(self, key: str, *, version: str = ""):
            found = super().facts(key, version=version)
            return found and replace(found, hashes=())

    reader = NoHashes(indexed.store)
    view = replace(indexed.store, reader=reader)
    assert indexed.refresh(view) == RefreshProgress(objects=1, added=1, bytes_read=4)
    assert indexed.refresh(view) == RefreshProgress(objects=1)
    assert reader.reads == ["a"]
    row = indexed.index.row("a")
    assert row is not None
    assert (row.item.content, row.evidence.level) == (blake3_of(b"body"), EvidenceLevel.READ)
    assert row.evidence.read_at_s == indexed.clock.now_s


def test_damage_under_an_unchanged_stamp_is_found_when_it_is_read(indexed: Indexed) -> None:
    for key in ("a", "b", "c"):
        put(indexed.store, key, key.encode())
    indexed.refresh()
    before = root_of(indexed.index)
    reader = FlawedReader(indexed.store, bodies={"b": b"X"})
    view = replace(indexed.store, reader=reader)
    # Nothing is read, and nothing seen.
    assert indexed.refresh(view) == RefreshProgress(objects=3)
    assert root_of(indexed.index) == before
    now_s = indexed.clock.now_s
    assert indexed.refresh(view, read_since_s=now_s) == RefreshProgress(
        objects=3, changed=1, damaged=1, bytes_read=3, damaged_keys=("b",)
    )
    assert root_of(indexed.index) != before
    row = indexed.index.row("b")
    assert row is not None
    assert row.item.content == blake3_of(b"X")
    assert indexed.evidence == EvidenceCounts(read=3, oldest_read_at_s=now_s // 3600 * 3600)
    # What was read lately is not read again, nor forgotten.
    again = indexed.refresh(view, read_since_s=now_s)
    assert again == RefreshProgress(objects=3, damaged_keys=("b",))
    assert len(reader.reads) == 3
    # Only another object under the key is not a damaged one any more.
    put(indexed.store, "b", b"other")
    assert indexed.refresh().damaged_keys == ()


def test_an_object_that_cannot_be_read_is_a_difference_and_no_end(indexed: Indexed) -> None:
    for key in ("a", "b", "c"):
        put(indexed.store, key)
    indexed.refresh()
    before = root_of(indexed.index)
    view = replace(
        indexed.store, reader=FlawedReader(indexed.store, broken={"b": StoreError("lost")})
    )
    progress = indexed.refresh(view, read_since_s=indexed.clock.now_s)
    assert (progress.damaged, progress.unreadable, progress.changed) == (1, 1, 1)
    assert root_of(indexed.index) != before
    assert indexed.evidence.listed == 1
    # What the store recorded does not make it whole again.
    again = indexed.refresh(view)
    assert again == RefreshProgress(objects=3, unreadable=1, damaged_keys=("b",))
    assert root_of(indexed.index) != before
    # It is looked at again, and found.
    assert indexed.refresh().changed == 1
    assert root_of(indexed.index) == before


def test_a_store_that_does_not_answer_is_no_damage(indexed: Indexed) -> None:
    put(indexed.store, "a")
    indexed.refresh()
    before = root_of(indexed.index)
    error = StoreUnavailableError("later")
    view = replace(indexed.store, reader=FlawedReader(indexed.store, broken={"a": error}))
    with pytest.raises(StoreUnavailableError):
        indexed.refresh(view, read_since_s=indexed.clock.now_s)
    assert root_of(indexed.index) == before


def test_what_a_listing_lacks_is_removed_by_a_fresh_fact_only(indexed: Indexed) -> None:
    for key in ("a", "b", "c"):
        put(indexed.store, key)
    indexed.refresh()
    indexed.store.writer.delete(["b"])
    lister = FlawedLister(indexed.store, listed=[current(indexed.store, "a")])
    view = replace(indexed.store, lister=lister)
    # "c" is not in the listing either, but it exists.
    assert indexed.refresh(view) == RefreshProgress(objects=2, removed=1)
    assert indexed.keys == ["a", "c"]


def test_a_listing_older_than_a_write_changes_nothing_back(indexed: Indexed) -> None:
    for key in ("a", "b"):
        put(indexed.store, key, b"old")
    old = list(indexed.store.lister.list_objects(""))
    put(indexed.store, "a", b"new")
    indexed.store.writer.delete(["b"])
    indexed.refresh()
    root = root_of(indexed.index)
    view = replace(indexed.store, lister=FlawedLister(indexed.store, listed=old))
    indexed.refresh(view)
    assert root_of(indexed.index) == root


def test_a_row_that_another_writes_meanwhile_is_left_alone(indexed: Indexed) -> None:
    put(indexed.store, "a", b"first")
    indexed.refresh()
    put(indexed.store, "a", b"second")

    class Late(FlawedReader):
        def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
            """Another writes the object and its row, once we know what we will note."""
            found = super().properties_of(facts)
            put(self.store, "a", b"third")
            indexed.refresh()
            return found

    indexed.refresh(replace(indexed.store, reader=Late(indexed.store)))
    row = indexed.index.row("a")
    assert row is not None
    assert row.item.content == blake3_of(b"third")


def test_an_incomplete_listing_removes_nothing_and_keeps_what_it_found(indexed: Indexed) -> None:
    for key in ("a", "b", "c"):
        put(indexed.store, key)
    indexed.refresh()
    put(indexed.store, "a", b"new")
    view = replace(indexed.store, lister=FlawedLister(indexed.store, fails_after=2))
    with pytest.raises(StoreError):
        indexed.refresh(view)
    assert indexed.keys == ["a", "b", "c"]
    note = indexed.index.listing("")
    assert note is not None
    indexed.clock.now_s += 10
    with pytest.raises(StoreError):
        indexed.refresh(view)
    # No listing is noted that did not reach its end.
    assert indexed.index.listing("") == note


def test_an_interrupted_refresh_keeps_what_it_found(indexed: Indexed) -> None:
    for number in range(300):
        put(indexed.store, f"{number:03}")
    left = [200]

    def stopped() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(OperationInterruptedError):
        indexed.refresh(stopped=stopped)
    assert 0 < len(indexed.keys) < 300
    assert indexed.index.listing("") is None
    found = len(indexed.keys)
    assert indexed.refresh() == RefreshProgress(objects=300, added=300 - found)


def test_an_object_that_keeps_changing_is_left_for_the_next_refresh(indexed: Indexed) -> None:
    put(indexed.store, "a")
    indexed.refresh()
    error = PreconditionFailedError("it is another one by now")
    reader = FlawedReader(indexed.store, broken={"a": error})
    view = replace(indexed.store, reader=reader)
    progress = indexed.refresh(view, read_since_s=indexed.clock.now_s)
    assert progress.unsettled == 1
    note = indexed.index.listing("")
    assert note is not None
    assert not note.is_complete
    assert indexed.refresh().unsettled == 0


def test_a_scrub_reads_what_was_not_read_for_long_and_lists_nothing(indexed: Indexed) -> None:
    for key in ("a", "b", "c"):
        put(indexed.store, key, b"xx")
    indexed.refresh()
    reader = FlawedReader(indexed.store, bodies={"c": b"XX"})
    broken = FlawedLister(indexed.store, fails_after=0)
    view = replace(indexed.store, reader=reader, lister=broken)
    now_s = indexed.clock.now_s
    indexed.store.writer.delete(["a"])
    assert indexed.scrub(view, read_since_s=now_s) == RefreshProgress(
        objects=2, removed=1, changed=1, damaged=1, bytes_read=4, damaged_keys=("c",)
    )
    assert indexed.scrub(view, read_since_s=now_s) == RefreshProgress()
    indexed.clock.now_s += 100
    assert indexed.scrub(view, read_since_s=now_s + 50).bytes_read == 4


def test_a_state_folder_keeps_its_bucket_and_its_algorithm(
    indexed: Indexed, tmp_path: Path
) -> None:
    def opened(algorithm: HashAlgorithm | None, bucket: str = "bucket") -> Profile:
        address = f"local:{tmp_path / bucket}"
        state = open_index(
            tmp_path, indexed.store, indexed.clock, bucket=address, algorithm=algorithm
        )
        with state as found:
            return found.profile

    indexed.index.close()
    shutil.rmtree(tmp_path / "index")
    made = opened(HashAlgorithm.MD5)
    assert made.algorithm is HashAlgorithm.MD5
    assert opened(None) == opened(HashAlgorithm.MD5) == made
    for algorithm, bucket in ((HashAlgorithm.BLAKE3, "bucket"), (None, "other")):
        with pytest.raises(ConfigError, match="is the state of"):
            opened(algorithm, bucket)
