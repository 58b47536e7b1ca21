"""What a verification says of two buckets, against brute force, and what it signs."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof.item import EvidenceLevel, Item, ItemHasher, Profile
from proof.lthash import LtHash
from proof.root import SetRoot
from replicator.compared_sets import ComparedSets
from replicator.ledger import PairLedger
from replicator.stores.capabilities import Capabilities
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.verify import (
    BucketVerification,
    Damage,
    KeyDifferenceKind,
    VerificationTally,
    VerifiedKey,
)
from tests.support.bucket_sync import SyncRunner, bucket_verification
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryStore

SECRET = b"\1" * 32
# None is no object; else content and metadata.
Side = tuple[bytes, str] | None
sides = st.one_of(
    st.none(),
    st.tuples(st.sampled_from([b"", b"a", b"b", b"cc"]), st.sampled_from(["p", "q"])),
)


@dataclass
class Pair:
    """Two stores in memory and what was recorded of them."""

    folder: Path
    capabilities: tuple[Capabilities, Capabilities] = (MEMORY, MEMORY)
    source: MemoryStore = field(init=False)
    target: MemoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.source = MemoryStore("memory:a", self.capabilities[0])
        self.target = MemoryStore("memory:b", self.capabilities[1])

    def verify(
        self, level: EvidenceLevel, prefix: str = ""
    ) -> tuple[dict[str, VerifiedKey], VerificationTally, BucketVerification]:
        """Each key, their sums, and the run."""
        with (
            PairLedger(self.folder, source="memory:a", target="memory:b") as ledger,
            ThreadPoolExecutor(2) as readers,
        ):
            run = bucket_verification(
                self.source.store(), self.target.store(), ledger, level, readers
            )
            keys = {one.key: one for one in run.keys(prefix)}
            tally = VerificationTally(ledger.secret)
            for key in keys.values():
                tally.add(key)
            return keys, tally, run

    def sync(self) -> None:
        """Copy the source."""
        assert SyncRunner(self.source.store(), self.target.store(), self.folder)().equal

    def damage(self, store: MemoryStore, key: str, body: bytes) -> None:
        """Change the bytes of an object behind everything its store says of it."""
        store.objects[key] = replace(store.objects[key], body=body)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "state")


def put(store: MemoryStore, key: str, side: Side) -> None:
    if side is not None:
        store.write(key, side[0], ObjectProperties(metadata=(("m", side[1]),)))


def kind_of(ours: Side, theirs: Side, level: EvidenceLevel) -> KeyDifferenceKind | None:
    """By brute force, what a verification at a level must find."""
    if ours is None or theirs is None:
        return KeyDifferenceKind.EXTRA if ours is None else KeyDifferenceKind.MISSING
    same = len(ours[0]) == len(theirs[0]) if level is EvidenceLevel.LISTED else ours == theirs
    return None if same else KeyDifferenceKind.CHANGED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sides, sides), max_size=12), st.sampled_from(EvidenceLevel))
def test_it_finds_what_brute_force_finds(
    wanted: list[tuple[Side, Side]], level: EvidenceLevel
) -> None:
    with TemporaryDirectory() as folder:
        pair = Pair(Path(folder) / "state")
        expected = {}
        for number, (ours, theirs) in enumerate(wanted):
            put(pair.source, f"k{number}", ours)
            put(pair.target, f"k{number}", theirs)
            if ours or theirs:
                expected[f"k{number}"] = kind_of(ours, theirs, level)
        keys, tally, run = pair.verify(level)
        assert {key: one.kind for key, one in keys.items()} == expected
        different = [kind for kind in expected.values() if kind is not None]
        assert tally.is_equal == (not different)
        receipt = run.receipt(tally, "")
        assert receipt is not None
        assert receipt.is_equal == tally.is_equal
        both = [one for one in keys.values() if one.kind is None]
        assert all(one.level is level for one in both)


def test_a_difference_has_the_level_by_which_it_is_known(pair: Pair) -> None:
    for key, ours, theirs in (
        ("size", (b"a", "p"), (b"aa", "p")),
        ("content", (b"a", "p"), (b"b", "p")),
        ("properties", (b"a", "p"), (b"a", "q")),
        ("missing", (b"a", "p"), None),
        ("extra", None, (b"a", "p")),
    ):
        put(pair.source, key, ours)
        put(pair.target, key, theirs)
    keys, _, _ = pair.verify(EvidenceLevel.RECORDED)
    assert {key: one.level.name.lower() for key, one in keys.items()} == {
        "size": "listed",
        "content": "recorded",
        "properties": "recorded",
        "missing": "listed",
        "extra": "listed",
    }


def test_where_no_hash_is_common_a_newer_source_is_no_difference(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "state", (MEMORY, UNPROVEN))
    put(pair.target, "k", (b"b", "p"))
    for body in (b"c", b"a"):
        put(pair.source, "k", (body, "p"))
    times = [store.objects["k"].facts.modified_ms for store in (pair.source, pair.target)]
    assert times[0] > times[1]
    keys, tally, _ = pair.verify(EvidenceLevel.RECORDED)
    # Nobody knows: it is equal as far as listings show, and no further.
    assert (keys["k"].kind, keys["k"].level) == (None, EvidenceLevel.LISTED)
    assert tally.sets.levels[EvidenceLevel.LISTED] == 1
    keys, _, _ = pair.verify(EvidenceLevel.READ)
    assert keys["k"].kind is KeyDifferenceKind.CHANGED


def test_a_verification_of_unknown_content_takes_nothing_from_the_next_sync(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path / "state", (MEMORY, UNPROVEN))
    put(pair.source, "k", (b"a", "p"))
    pair.sync()
    # Somebody else writes an object of the same size to the target.
    put(pair.target, "k", (b"b", "p"))
    pair.verify(EvidenceLevel.RECORDED)
    pair.sync()
    assert pair.target.objects["k"].body == b"a"


@pytest.mark.parametrize("side", [Damage.SOURCE, Damage.TARGET])
def test_damage_is_told_from_change_with_its_side(pair: Pair, side: Damage) -> None:
    for number in range(5):
        put(pair.source, f"k{number}", (b"body", "p"))
    pair.sync()
    pair.damage(pair.source if side is Damage.SOURCE else pair.target, "k3", b"bodi")
    keys, _, _ = pair.verify(EvidenceLevel.RECORDED)
    assert not any(one.kind for one in keys.values())
    keys, _, _ = pair.verify(EvidenceLevel.READ)
    found = {key: one.damage for key, one in keys.items() if one.kind is not None}
    assert found == {"k3": side}
    assert keys["k3"].kind is KeyDifferenceKind.DAMAGED


def test_damage_at_the_target_is_copied_over_and_a_false_alarm_forgotten(pair: Pair) -> None:
    put(pair.source, "k", (b"body", "p"))
    pair.sync()
    pair.damage(pair.target, "k", b"bodi")
    pair.verify(EvidenceLevel.READ)
    keys, _, _ = pair.verify(EvidenceLevel.RECORDED)
    assert keys["k"].kind is KeyDifferenceKind.DAMAGED
    pair.sync()
    assert pair.target.objects["k"].body == b"body"
    pair.damage(pair.target, "k", b"bodi")
    pair.verify(EvidenceLevel.READ)
    pair.damage(pair.target, "k", b"body")
    keys, _, _ = pair.verify(EvidenceLevel.READ)
    assert keys["k"].kind is None
    keys, _, _ = pair.verify(EvidenceLevel.RECORDED)
    assert keys["k"].kind is None


def test_a_key_that_changes_while_it_is_read_is_unsettled(pair: Pair) -> None:
    put(pair.source, "k", (b"body", "p"))
    pair.sync()

    def before(operation: str, key: str) -> None:
        if operation == "read" and key == "k":
            pair.target.faults.before = lambda _operation, _key: None
            put(pair.target, "k", (b"other", "p"))

    pair.target.faults.before = before
    keys, tally, run = pair.verify(EvidenceLevel.READ)
    assert (keys["k"].kind, keys["k"].is_unsettled) == (None, True)
    assert not tally.is_equal
    assert tally.differences == 0
    # What the target holds is not known: neither "equal" nor "unequal" is signed.
    assert run.receipt(tally, "") is None


def test_a_side_that_lists_not_all_keys_gets_no_receipt(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "state", (MEMORY, replace(MEMORY, lists_all_keys=False)))
    put(pair.source, "k", (b"body", "p"))
    put(pair.target, "k", (b"body", "p"))
    _, tally, run = pair.verify(EvidenceLevel.RECORDED)
    assert not run.lists_all
    assert run.receipt(tally, "") is None


def test_a_receipt_of_a_part_says_so(pair: Pair) -> None:
    for key in ("a/1", "b/1"):
        put(pair.source, key, (b"body", "p"))
    _, tally, run = pair.verify(EvidenceLevel.LISTED, "b/")
    receipt = run.receipt(tally, "b/")
    assert receipt is not None
    assert receipt.source.address == "memory:a#prefix=b/"
    assert (receipt.source.listed, receipt.target.listed) == (1, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3).filter(lambda text: text.isprintable()),
        st.sampled_from(["equal", "ours", "theirs", "changed"]),
    )
)
def test_sets_are_sums_over_the_items_and_equal_exactly_if_all_are(kinds: dict[str, str]) -> None:
    sums = ComparedSets(SECRET)
    ours, theirs = list[Item](), list[Item]()
    for key, kind in kinds.items():
        facts = ObjectFacts(key, len(key), "", 0)
        item = Item(key, len(key))
        if kind == "equal":
            sums.add_equal(facts, (), b"p", EvidenceLevel.LISTED)
            item = replace(item, properties=b"p")
        elif kind == "changed":
            sums.add_different(facts, facts)
        else:
            sums.add_different(
                facts if kind == "ours" else None, facts if kind == "theirs" else None
            )
        ours += [item] if kind != "theirs" else []
        theirs += [item] if kind in ("equal", "theirs") else []
    receipt = sums.receipt(source="a", target="b", prefix="", groups=(), time_ms=1)
    assert receipt.is_equal == all(kind == "equal" for kind in kinds.values())
    hasher = ItemHasher(Profile(SECRET))
    for side, items in ((receipt.source, ours), (receipt.target, theirs)):
        expected = LtHash()
        expected.add(items)
        assert side.set_digest == expected.digest
        total = sum((SetRoot.of_item(hasher.id(item)).total for item in items), start=0)
        assert side.root == (total % (1 << 128)).to_bytes(16, "big")
        assert side.listed == len(items)


def test_the_strongest_algorithm_that_all_share_is_that_of_the_root(pair: Pair) -> None:
    rng = random.Random(1)
    for number in range(600):
        put(pair.source, f"k{number:03}", (rng.randbytes(5), "p"))
    pair.sync()
    _, tally, _ = pair.verify(EvidenceLevel.READ)
    assert tally.sets.algorithm is not None
    assert tally.sets.algorithm.value == "blake3"
    facts = ObjectFacts("z", 1, "", 0)
    tally.sets.add_equal(facts, (), b"", EvidenceLevel.LISTED)
    assert tally.sets.algorithm is None
    assert tally.sets.level is EvidenceLevel.LISTED
