"""The laws of columns: they hold what was put into them, cross as they are, and hash as
items do one by one.
"""

import random
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proof.columns import ByteColumn, NameColumns, gathered
from proof.errors import IndexDamagedError
from proof.index import IndexedItem, ItemEvidence, ItemFacts
from proof.item import EvidenceLevel, Item, ItemId
from proof.item_columns import ColumnHasher, FoundItems, ItemColumns
from proof.names_wire import decode_items, encode_items
from proof.rows import decode_rows, encode_row
from proof.symbols import KERNEL_IDS_MIN, ids_from_bytes, kernels_for, key_hashes
from proof.tables import RowColumns
from runtime.errors import RemoteProtocolError
from tests.support.mutation import mutated_bytes
from tests.support.stored_indexes import HASHER, PROFILE, stamped

# A busy machine breaks no law, and the first example may load kernels.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

UNFOLDED_MAX = 1 << 20
texts = st.text(st.characters(codec="utf-8"), max_size=200)
evidence = st.builds(
    ItemEvidence, st.sampled_from([EvidenceLevel.LISTED, EvidenceLevel.RECORDED])
) | st.builds(ItemEvidence, st.just(EvidenceLevel.READ), st.integers(0, 2**60))
items = st.builds(
    Item,
    key=texts,
    size_bytes=st.integers(0, 2**64 - 1),
    content=st.none() | st.binary(max_size=64),
    properties=st.binary(max_size=64),
    version=st.just("") | texts,
    is_delete_marker=st.booleans(),
)
many_facts = st.lists(st.builds(ItemFacts, items, evidence), max_size=8)


@pytest.fixture(scope="module")
def hasher() -> ColumnHasher:
    """It has its kernels where there are any."""
    kernels_for(KERNEL_IDS_MIN)
    return ColumnHasher(PROFILE)


@unhurried
@given(many_facts, st.randoms(use_true_random=False))
def test_columns_hold_what_was_put_into_them(facts: list[ItemFacts], chance: random.Random) -> None:
    columns = ItemColumns.of(facts)
    assert list(columns) == facts
    assert [columns[at] for at in range(-len(facts), len(facts))] == facts * 2
    places = [chance.randrange(len(facts)) for _ in facts] if facts else []
    assert columns.taken(np.array(places, np.intp)) == [facts[at] for at in places]
    assert columns[1:3] == facts[1:3]
    with pytest.raises(IndexError):
        columns[len(facts)]


@unhurried
@given(many_facts)
def test_items_cross_as_they_are(facts: list[ItemFacts]) -> None:
    columns = ItemColumns.of(facts)
    raw = encode_items(columns)
    assert decode_items(raw, len(facts), unfolded_max=UNFOLDED_MAX) == facts
    assert len(raw) <= 100 + int(columns.bytes_max.sum())
    for count in (len(facts) + 1, len(facts) - 1):
        if count >= 0:
            with pytest.raises(RemoteProtocolError):
                decode_items(raw, count, unfolded_max=UNFOLDED_MAX)


@unhurried
@given(many_facts.filter(len), st.randoms(use_true_random=False))
def test_other_bytes_are_refused_or_are_other_items(
    facts: list[ItemFacts], chance: random.Random
) -> None:
    raw = encode_items(ItemColumns.of(facts))
    changed = mutated_bytes(chance, raw, [raw])
    try:
        found = decode_items(changed, len(facts), unfolded_max=UNFOLDED_MAX)
    except RemoteProtocolError:
        return
    again = decode_items(encode_items(found), len(found), unfolded_max=UNFOLDED_MAX)
    assert list(again) == list(found)


@unhurried
@given(many_facts)
def test_columns_hash_as_items_do_one_by_one(hasher: ColumnHasher, facts: list[ItemFacts]) -> None:
    columns = ItemColumns.of(facts)
    expected = ids_from_bytes(b"".join(HASHER.id(one.item) for one in facts))
    assert (hasher.ids(columns) == expected).all()
    assert (hasher.key_hashes(columns.names) == key_hashes(expected)).all()


@pytest.mark.parametrize("length", [0, 1, 119, 120, 121, 247, 248, 249, 1024, 4096])
def test_names_of_any_length_hash_alike(hasher: ColumnHasher, length: int) -> None:
    """Around the ends of the blocks in which they are hashed."""
    keys = [b"k" * length, b"", b"x" * (length // 2)]
    expected = [HASHER.key_hash(key, b"v") for key in keys]
    names = NameColumns.of(keys, [b"v"] * len(keys))
    assert hasher.key_hashes(names).tolist() == expected


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 33])
def test_any_number_of_names_hashes_alike(hasher: ColumnHasher, count: int) -> None:
    """Whether they fill the vectors in which they are hashed together, or long ones
    stand among them.
    """
    keys = [b"%d" % number * (1 + number % 90) for number in range(count)]
    expected = [HASHER.key_hash(key, b"") for key in keys]
    assert hasher.key_hashes(NameColumns.of(keys, [b""] * count)).tolist() == expected


@unhurried
@given(st.lists(st.binary(max_size=40), max_size=9), st.randoms(use_true_random=False))
def test_parts_are_gathered_from_inside_only(
    hasher: ColumnHasher, parts: list[bytes], chance: random.Random
) -> None:
    column = ByteColumn.of(parts)
    places = [chance.randrange(len(parts)) for _ in parts]
    assert column.taken(np.array(places, np.intp)).texts() == [parts[at] for at in places]
    beyond = np.array([len(column.data)])
    with pytest.raises(IndexError):
        gathered(column.data, beyond, np.array([1]))


@unhurried
@given(st.lists(st.tuples(texts, st.integers(0, 1000), texts), max_size=8))
def test_rows_are_read_together_as_one_by_one(names: list[tuple[str, int, str]]) -> None:
    held = [stamped(key, number, version=version) for key, number, version in names]
    rows = [
        (one.item.key.encode(), one.item.version.encode(), encode_row(HASHER.hashes(one.item), one))
        for one in held
    ]
    found = decode_rows(RowColumns.of(rows))
    expected = [IndexedItem(one.item, HASHER.id(one.item), one.evidence) for one in held]
    assert found == expected
    assert [found[at] for at in range(len(held))] == expected
    assert found[1:] == expected[1:]
    assert FoundItems.of(expected) == found


@unhurried
@given(st.integers(0, 4), st.sampled_from(["flip", "cut", "key"]), st.randoms())
def test_one_damaged_row_among_many_is_found(at: int, how: str, chance: random.Random) -> None:
    held = [stamped(f"k{number}", number) for number in range(5)]
    rows = [(one.item.key.encode(), b"", encode_row(HASHER.hashes(one.item), one)) for one in held]
    key, version, row = rows[at]
    flipped = bytearray(row)
    flipped[chance.randrange(len(row))] ^= 1 << chance.randrange(8)
    rows[at] = {
        "flip": (key, version, bytes(flipped)),
        "cut": (key, version, row[: chance.randrange(len(row))]),
        "key": (key + b"x", version, row),
    }[how]
    with pytest.raises(IndexDamagedError, match=f"'k{at}"):
        decode_rows(RowColumns.of(rows))


@unhurried
@given(st.lists(st.binary(max_size=3) | texts.map(str.encode), max_size=5))
def test_a_column_is_utf8_if_each_text_is(parts: list[bytes]) -> None:
    joined = ["é".encode()[:1], "é".encode()[1:]]
    for column in (parts, [*parts, *joined]):
        expected = True
        for text in column:
            try:
                text.decode()
            except UnicodeDecodeError:
                expected = False
        assert ByteColumn.of(column).is_utf8 == expected


def test_a_column_of_numbers_has_the_least_width() -> None:
    """By hand: flags, size 5, length 1 of the key, none of the rest, the key."""
    for size, reason in ((b"\x01\x05", ""), (b"\x02\x05\0", "wider"), (b"\x03\x05", "no such")):
        columns = b"\x02" + size + b"\x01\x01" + b"\0" * 4 + b"k"
        folded = zlib.compress(columns, wbits=-zlib.MAX_WBITS)
        raw = len(folded).to_bytes(3, "big") + folded
        if reason:
            with pytest.raises(RemoteProtocolError, match=reason):
                decode_items(raw, 1, unfolded_max=UNFOLDED_MAX)
        else:
            [found] = decode_items(raw, 1, unfolded_max=UNFOLDED_MAX)
            assert found == ItemFacts(Item("k", 5), ItemEvidence(EvidenceLevel.RECORDED))


def test_columns_of_nothing_are_empty() -> None:
    assert list(ItemColumns.of([])) == []
    assert ByteColumn.of([]).texts() == []
    assert list(decode_rows(RowColumns.of([]))) == []
    assert ItemId(b"") not in [one.id for one in FoundItems.of([])]
