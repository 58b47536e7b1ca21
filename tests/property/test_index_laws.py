"""The laws of a stored index: it is a dictionary, whatever happens; each row holds all
that was put into it, and no flipped bit of it passes.
"""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof.errors import IndexDamagedError
from proof.index import IndexChange, KeyRange, Position
from proof.index_state import decode_change, encode_change
from proof.item import ItemId
from proof.root import SetRoot
from proof.rows import decode_row, encode_row
from proof.tables import JournalRow
from tests.support.stored_indexes import (
    HASHER,
    Model,
    assert_is,
    changed,
    ids_of,
    open_index,
    openers_of,
    rewound,
    stamped,
)

keys = st.sampled_from(["a", "a/b", "a\0", "b", "é", "\U0001f600"]) | st.text(
    min_size=1, max_size=3
)
versions = st.sampled_from(["", "", "v1", "v2"])
batches = st.lists(
    st.tuples(keys, versions, st.none() | st.integers(0, 3)), max_size=6
)  # fmt: skip
steps = st.one_of(
    batches, batches, st.sampled_from(["reopen", "crash", "rebuild", "trim", "rewind"])
)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@settings(max_examples=25)
@given(st.lists(steps, max_size=12))
def test_an_index_is_a_dictionary(kind: str, todo: list[object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        openers, model = openers_of(kind), Model()
        index = open_index(Path(folder), openers)
        known = [(0, SetRoot(0, 0))]
        for step in todo:
            if isinstance(step, list):
                changes = [
                    (key, None if number is None else stamped(key, number, version=version))
                    for key, version, number in step
                ]
                index.apply(changes)
                changed(model, changes)
                with index.snapshot() as now:
                    known.append((now.position, SetRoot.of(ids_of(list(model.values())))))
            elif step == "reopen":
                index.close()
                index = open_index(Path(folder), openers)
            elif step == "crash":
                # Another process opens what was committed; this one never closes.
                index = open_index(Path(folder), openers)
            elif step == "rebuild":
                with index.rebuild(items=1) as building:
                    building.add([model[place] for place in sorted(model)])
                    building.finish()
                known.clear()
            elif step == "trim":
                with index.snapshot() as now:
                    index.trim_journal(through=now.position)
                known = known[-1:] if known and known[-1][0] == now.position else []
            else:
                for position, root in known:
                    assert rewound(index, Position(position)) == root
        assert_is(index, model, [KeyRange("a", "b"), KeyRange("a/"), KeyRange()])
        index.close()


@given(keys, versions, st.integers(0, 1000))
def test_a_row_holds_what_was_put_into_it(key: str, version: str, number: int) -> None:
    one = stamped(key, number, version=version)
    row = encode_row(HASHER.hashes(one.item), one)
    assert decode_row(key.encode(), version.encode(), row) == one


@given(keys, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_no_flip_of_a_row_passes(key: str, number: int, chance: random.Random) -> None:
    one = stamped(key, number)
    row = bytearray(encode_row(HASHER.hashes(one.item), one))
    row[chance.randrange(len(row))] ^= 1 << chance.randrange(8)
    with pytest.raises(IndexDamagedError):
        decode_row(key.encode(), b"", bytes(row))
    with pytest.raises(IndexDamagedError):
        decode_row(key.encode() + b"x", b"", encode_row(HASHER.hashes(one.item), one))


ids = st.none() | st.binary(min_size=16, max_size=16).filter(any).map(ItemId)


@given(keys, versions, ids, ids, st.integers(1, 1 << 60), st.randoms(use_true_random=False))
def test_a_row_of_the_journal_holds_its_change(
    key: str,
    version: str,
    old: ItemId | None,
    new: ItemId | None,
    position: int,
    chance: random.Random,
) -> None:
    change = IndexChange(Position(position), key, version, old, new)
    row = encode_change(change)
    assert decode_change(row) == change
    flipped = bytearray(row.change)
    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    for other in (JournalRow(position, bytes(flipped)), JournalRow(position + 1, row.change)):
        with pytest.raises(IndexDamagedError):
            decode_change(other)
