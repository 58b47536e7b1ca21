"""Laws of a sync's pure parts: decisions, windows, the parts of a patch."""

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from proof.item import ContentHash, EvidenceLevel, HashAlgorithm
from replicator.copy import PARTS_MAX, part_bytes_of
from replicator.copy_requests import ObjectStamp
from replicator.difference import Action, Decision, DecisionRules, KeyState, Need, decide
from replicator.hashing import ContentHasher
from replicator.ledger import LedgerRow
from replicator.listing import join_keys
from replicator.patch import patch_parts
from replicator.stores.port import ObjectFacts
from replicator.windows import (
    KEY_BYTES,
    WINDOW_BYTES,
    WindowHasher,
    WindowTable,
    changed_ranges,
    pack_hashes,
    unpack_table,
    window_bytes_of,
)

CONTENTS = (b"", b"a", b"b", b"cc")
PROPERTIES = (b"p", b"q")


def hashes_of(body: bytes) -> tuple[ContentHash, ...]:
    hasher = ContentHasher()
    hasher.update(body)
    return tuple(sorted(hasher.hashes(), key=lambda one: one.algorithm.value))


# What is really at one side: content, properties, the time it was written.
Truth = tuple[bytes, bytes, int]
truths = st.tuples(
    st.sampled_from(CONTENTS), st.sampled_from(PROPERTIES), st.integers(min_value=1, max_value=3)
)


def facts_of(truth: Truth, *, declares: bool, etag: str) -> ObjectFacts:
    """Facts of a side whose ETags say nothing; a hash only where it declares one."""
    body, _, time = truth
    hashes = tuple(one for one in hashes_of(body) if one.algorithm is HashAlgorithm.MD5)
    return ObjectFacts("k", len(body), etag, time, hashes=hashes if declares else ())


def resolve(
    state: KeyState, rules: DecisionRules, ours: Truth | None, theirs: Truth | None
) -> tuple[KeyState, Decision]:
    """Read what the decision lacks until it is one."""
    for _ in range(len(Need) + 1):
        decision = decide(state, rules)
        match decision.needs:
            case None:
                return state, decision
            case Need.SOURCE_FACTS:
                assert not state.source_is_fresh
                state = replace(state, source_is_fresh=True)
            case Need.SOURCE_CONTENT:
                assert ours is not None
                assert state.source_content is None
                state = replace(state, source_content=hashes_of(ours[0]))
            case Need.SOURCE_PROPERTIES:
                assert ours is not None
                state = replace(state, source_properties=ours[1])
            case Need.TARGET_PROPERTIES:
                assert theirs is not None
                state = replace(state, target_properties=theirs[1])
    raise AssertionError("it asks for ever")


@settings(max_examples=2_000, deadline=None)
@given(
    ours=st.none() | truths,
    theirs=st.none() | truths,
    recorded=st.none() | st.tuples(st.sampled_from(CONTENTS), st.sampled_from(PROPERTIES)),
    declares=st.tuples(st.booleans(), st.booleans()),
    rules=st.builds(DecisionRules, st.booleans(), st.booleans(), st.booleans()),
    has_windows=st.booleans(),
    foreign=st.tuples(st.booleans(), st.booleans()),
)
def test_a_decision_says_no_more_than_is_known(
    ours: Truth | None,
    theirs: Truth | None,
    recorded: tuple[bytes, bytes] | None,
    declares: tuple[bool, bool],
    rules: DecisionRules,
    has_windows: bool,
    foreign: tuple[bool, bool],
) -> None:
    source = facts_of(ours, declares=declares[0], etag="s") if ours else None
    target = facts_of(theirs, declares=declares[1], etag="t") if theirs else None
    row = None
    if recorded is not None:
        # A true row: a side that still has its stamp has what was recorded.
        body, properties = recorded
        kept = [
            truth is not None and truth[:2] == recorded and not is_foreign
            for truth, is_foreign in zip((ours, theirs), foreign, strict=True)
        ]
        stamps = [
            ObjectStamp.of(facts) if facts and is_kept else ObjectStamp("", "old", 9, len(body))
            for facts, is_kept in zip((source, target), kept, strict=True)
        ]
        row = LedgerRow(
            "k",
            stamps[0],
            stamps[1],
            hashes_of(body),
            properties,
            EvidenceLevel.RECORDED,
            has_windows,
        )
    state, decision = resolve(KeyState("k", source, target, row), rules, ours, theirs)
    match decision.action:
        case Action.NOTHING if ours and theirs:
            assert ours[1] == theirs[1]
            assert decision.properties == ours[1]
            assert len(ours[0]) == len(theirs[0])
            if decision.level > EvidenceLevel.LISTED:
                assert ours[0] == theirs[0]
                assert set(decision.hashes) <= set(hashes_of(ours[0]))
        case Action.NOTHING:
            assert ours is theirs is None
        case Action.PROPERTIES:
            assert ours
            assert theirs
            assert ours[1] != theirs[1]
            assert len(ours[0]) == len(theirs[0])
        case Action.COPY | Action.PATCH:
            assert ours is not None
            is_proven = (
                theirs is not None
                and ours[0] == theirs[0]
                and (declares[1] or not ours[0] or (recorded == theirs[:2] and not foreign[1]))
            )
            assert decision.action is Action.PATCH or not is_proven
        case Action.DELETE:
            assert ours is None
            assert rules.may_delete
            assert state.source_is_fresh
        case Action.LEAVE:
            assert ours is None
            assert not rules.may_delete
    if decision.action is Action.PATCH:
        assert rules.patches
        assert row is not None
        assert row.has_windows
        assert target is not None
        assert row.target.agrees(target)


def table_of(body: bytes, cuts: list[int] | None = None) -> WindowTable:
    hasher = WindowHasher(bytes(KEY_BYTES), len(body))
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts or [])})
    for first, end in pairwise(places):
        hasher.update(body[first:end])
    return hasher.table()


SIZES = st.integers(min_value=0, max_value=5 * WINDOW_BYTES + 7) | st.sampled_from(
    [number * WINDOW_BYTES for number in range(6)]
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 99),
    sizes=st.tuples(SIZES, SIZES),
    flips=st.lists(st.integers(0, 5 * WINDOW_BYTES), max_size=3),
    cuts=st.lists(st.integers(0, 5 * WINDOW_BYTES), max_size=5),
    part_bytes_min=st.sampled_from([0, 1, WINDOW_BYTES, 2 * WINDOW_BYTES + 3]),
    part_bytes=st.sampled_from([WINDOW_BYTES, 3 * WINDOW_BYTES]),
)
def test_the_old_object_with_the_changed_ranges_is_the_new_one(
    seed: int,
    sizes: tuple[int, int],
    flips: list[int],
    cuts: list[int],
    part_bytes_min: int,
    part_bytes: int,
) -> None:
    common = random.Random(seed).randbytes(max(sizes))
    old, new = common[: sizes[0]], bytearray(common[: sizes[1]])
    for at in flips:
        if at < len(new):
            new[at] ^= 1
    table = table_of(bytes(new), cuts)
    assert table == table_of(bytes(new))
    assert unpack_table(len(new), pack_hashes(table)) == table
    changes = changed_ranges(table_of(old), table)
    assert changes is not None
    made = bytearray()
    at = 0
    for change in changes:
        assert at <= change.first <= min(change.new_end, change.old_end)
        made += old[at : change.first] + new[change.first : change.new_end]
        at = change.old_end
    assert made + old[at:] == new
    parts = patch_parts(len(new), changes, part_bytes_min, part_bytes)
    joined = b"".join((old if one.is_kept else bytes(new))[one.first : one.end] for one in parts)
    assert joined == new
    assert all(one.end - one.first >= max(part_bytes_min, 1) for one in parts[:-1])
    assert all(one.end > one.first for one in parts)
    if not part_bytes_min:
        sent = sum(one.end - one.first for one in parts if not one.is_kept)
        assert sent == sum(change.new_end - change.first for change in changes)


@given(size=st.integers(0, 1 << 50))
def test_a_table_of_windows_has_a_limit(size: int) -> None:
    assert -(-size // window_bytes_of(size)) <= 1 << 20


@given(data=st.binary(max_size=200), size=st.integers(0, 20 * WINDOW_BYTES))
def test_damaged_tables_are_none(data: bytes, size: int) -> None:
    table = unpack_table(size, data)
    assert table is None or table.size_bytes == size


@given(
    size=st.integers(1, 5 << 40),
    count=st.integers(1, PARTS_MAX),
    has_parts=st.booleans(),
)
def test_parts_are_as_large_as_10_000_of_them_require(
    size: int, count: int, has_parts: bool
) -> None:
    facts = ObjectFacts("k", size, f'"{"0" * 32}-{count}"' if has_parts else "0" * 32, 0)
    part_bytes = part_bytes_of(facts, 8 << 20)
    assert part_bytes >= 8 << 20
    assert -(-size // part_bytes) <= PARTS_MAX
    if not has_parts:
        assert part_bytes == 8 << 20 or -(-size // (part_bytes - (1 << 20))) > PARTS_MAX


def test_parts_are_those_of_the_source_where_its_etag_tells() -> None:
    facts = ObjectFacts("k", 100 << 20, f"{'0' * 32}-7", 0)
    assert part_bytes_of(facts, 8 << 20) == 16 << 20
    assert part_bytes_of(replace(facts, etag=f"{'0' * 32}-99"), 8 << 20) == 8 << 20


@given(
    st.sets(st.text(min_size=1, max_size=3)),
    st.sets(st.text(min_size=1, max_size=3)),
)
def test_listings_are_joined_as_sets(ours: set[str], theirs: set[str]) -> None:
    def listing(keys: set[str]) -> list[ObjectFacts]:
        return [ObjectFacts(key, 0, "", 0) for key in sorted(keys)]

    joined = list(join_keys(iter(listing(ours)), iter(listing(theirs)), iter(())))
    assert [one.key for one in joined] == sorted(ours | theirs)
    assert {one.key for one in joined if one.source} == ours
    assert {one.key for one in joined if one.target} == theirs
