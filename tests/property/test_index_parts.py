"""An index that is made in parts is the index of the whole, however it is cut."""

import random
from bisect import bisect_right
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proof.index import ItemEvidence, Stamp, StampedItem
from proof.index_parts import IndexSums, current_objects
from proof.item import EvidenceLevel, HashAlgorithm, Item, ItemHasher, Profile
from proof.listed_rows import ListedItemRules, encode_listed
from proof.listing import LISTED_SCHEMA, KeySample, range_numbers
from proof.rocks_index import RocksTables, write_hashes_file, write_rows_file
from proof.root import SetRoot
from proof.rows import encode_row
from proof.symbols import KERNEL_IDS_MIN, each_id, kernels_for, key_hashes
from proof.tables import ItemRow

RULES = ListedItemRules(Profile(b"s" * 32, HashAlgorithm.MD5, ()), etags_prove=True)
HASHER = ItemHasher(RULES.profile)
ETAGS = st.one_of(
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=16, max_size=16).map(lambda one: f"{one.hex()}-7"),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
    st.text("0123456789abcdefABCDEF-", max_size=70),
    st.integers(0, 520).map(lambda length: "0f" * (length // 2) + "a" * (length % 2)),
    st.sampled_from(['"' * 254, "-" * 255, "é" * 200]),
)
ROWS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
        | st.text("\0\1a", min_size=1, max_size=4),
        st.integers(0, (1 << 56) - 1),
        st.integers(0, (1 << 48) - 1),
        ETAGS,
        st.sampled_from(["", "v", "null", "w" * 65, "x" * 254, "y" * 255, "z" * 300]),
        st.booleans(),
    ),
    max_size=60,
    unique_by=lambda row: row[0],
)
Row = tuple[str, int, int, str, str, bool]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """They are used where there are any."""
    kernels_for(KERNEL_IDS_MIN)


def table_of(rows: list[Row]) -> pa.Table:
    packed = [
        (key.encode(), *rest[:2], rest[2].encode(), rest[3].encode(), rest[4])
        for key, *rest in rows
    ]
    return pa.Table.from_pylist(
        [dict(zip(LISTED_SCHEMA.names, row, strict=True)) for row in packed], LISTED_SCHEMA
    )


def item_of(row: Row) -> StampedItem:
    """What a refresh makes of the same object."""
    key, size, modified, etag, version, is_md5 = row
    known = is_md5 and len(etag) == 32 and set(etag) <= set("0123456789abcdef")
    item = Item(key, size, bytes.fromhex(etag) if known else None)
    level = EvidenceLevel.RECORDED if known else EvidenceLevel.LISTED
    return StampedItem(item, ItemEvidence(level), Stamp(version, etag, modified))


@given(rows=ROWS)
def test_listed_objects_are_the_rows_that_a_refresh_writes(rows: list[Row]) -> None:
    rows.sort(key=lambda row: row[0].encode())
    found = encode_listed(table_of(rows), RULES)
    items = [item_of(row) for row in rows]
    assert found.rows.texts() == [encode_row(HASHER.hashes(one.item), one) for one in items]
    assert each_id(found.ids) == [HASHER.id(one.item) for one in items]
    levels = [one.evidence.level for one in items]
    assert found.levels == tuple(levels.count(level) for level in EvidenceLevel)


@given(rows=ROWS)
def test_files_of_rows_are_the_tables_that_a_refresh_writes(rows: list[Row]) -> None:
    """Also of keys with zeros, whose names are escaped."""
    rows.sort(key=lambda row: row[0].encode())
    found = encode_listed(table_of(rows), RULES)
    hashes = key_hashes(found.ids)
    order = np.argsort(hashes)
    with TemporaryDirectory() as name:
        folder = Path(name)
        tables = RocksTables(folder / "tables", building=True)
        if rows:
            write_rows_file(folder / "rows", found.keys, found.rows)
            write_hashes_file(folder / "hashes", hashes[order], found.keys.taken(order))
            tables.take_files([folder / "rows", folder / "hashes"])
        with tables.view() as view:
            assert not view.damage()
            held = list(view.rows(b"", None))
            by_hash = view.by_hash(hashes)
        tables.close()
    expected = zip(found.keys.texts(), found.rows.texts(), strict=True)
    assert held == [ItemRow(key, b"", row) for key, row in expected]
    assert by_hash.names.keys.texts() == found.keys.texts()


@given(rows=ROWS, seed=st.integers(0, 1 << 20))
def test_sums_of_ranges_are_those_of_the_whole_in_any_order(rows: list[Row], seed: int) -> None:
    chance = random.Random(seed)
    objects = current_objects(table_of(rows))
    cuts = sorted(chance.choices(range(objects.num_rows + 1), k=3))
    parts = [
        IndexSums.of(encode_listed(objects.slice(start, end - start), RULES), repeated=start)
        for start, end in zip([0, *cuts], [*cuts, objects.num_rows], strict=True)
    ]
    whole = IndexSums.of(encode_listed(objects, RULES))
    shuffled = chance.sample(parts, len(parts))
    a, b, c, d = (IndexSums.from_bytes(one.to_bytes()) for one in shuffled)
    merged = [a + b + c + d, a + (b + (c + d)), d + c + (b + a), IndexSums.of_all((a, b, c, d))]
    merged.append(merged[0] + IndexSums.empty())
    assert len({one.to_bytes() for one in merged}) == 1
    assert merged[0].symbols.to_bytes() == whole.symbols.to_bytes()
    assert (merged[0].levels, merged[0].repeated) == (whole.levels, sum(cuts))
    roots = [SetRoot.of_all([root for _, root in one.spans]) for one in (merged[0], whole)]
    assert roots[0] == roots[1] == merged[0].derived()[0].root


@pytest.mark.parametrize("every", [1, 3])
@given(
    keys=st.lists(st.binary(min_size=1, max_size=6) | st.text("a\0b", min_size=1).map(str.encode))
)
def test_keys_go_to_the_range_that_they_are_in(keys: list[bytes], every: int) -> None:
    sample = KeySample(tuple(sorted((key, 1) for key in keys[::2])), len(keys))
    bounds = sample.bounds(every)
    numbers = range_numbers(pa.array(keys, pa.binary()), bounds)
    assert numbers.tolist() == [bisect_right(bounds, key) for key in keys]


@given(rows=ROWS, seed=st.integers(0, 1 << 20))
def test_the_latest_of_several_rows_of_a_key_counts_in_any_order(
    rows: list[Row], seed: int
) -> None:
    chance = random.Random(seed)
    older = [(key, 7, modified - 1, *rest) for key, _, modified, *rest in rows if modified]
    both = [*rows, *chance.sample(older, len(older) // 2)]
    chance.shuffle(both)
    found = current_objects(table_of(both))
    assert found == table_of(sorted(rows, key=lambda row: row[0].encode()))
