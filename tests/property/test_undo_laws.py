"""The laws of an undo: it never gives up the last good copy, never writes over bytes
that nobody knows but by good ones, and what it puts back is what was there.
"""

from hypothesis import given
from hypothesis import strategies as st

from merkle.tree import BlockId
from repair.undo_plan import (
    OldBytes,
    UndoDecision,
    WindowPlace,
    decide,
    windows_of,
    with_holders,
)
from tests.support.volumes import block_record, chunk_record, content

BLOCK = BlockId(3)
LENGTH = 4500
GOOD = content(BLOCK, LENGTH)
RECORD = block_record(
    1, BLOCK, [chunk_record(0, GOOD[:3000]), chunk_record(3000, GOOD[3000:])], bcs_id=1
)

copies = st.lists(
    st.builds(
        lambda offset, data: OldBytes(BLOCK, offset, data[: LENGTH - offset]),
        st.integers(0, LENGTH - 1),
        st.binary(min_size=1, max_size=1500),
    ),
    max_size=4,
)
damages = st.lists(st.integers(0, LENGTH - 1), max_size=4)


@given(st.booleans(), st.booleans(), st.booleans())
def test_good_bytes_need_a_holder_and_unknown_ones_stay(
    is_same: bool, present_matches: bool, after_matches: bool
) -> None:
    decision = decide(is_same=is_same, present_matches=present_matches, after_matches=after_matches)
    if decision.writes and not after_matches:
        assert present_matches
        assert decision is UndoDecision.RESTORE
    assert not (is_same and decision.writes)


@given(copies, damages, st.integers(0, LENGTH), st.sets(st.integers(0, 10)))
def test_what_is_put_back_is_what_was_there_and_nothing_else(
    old: list[OldBytes], damaged: list[int], length: int, held: set[int]
) -> None:
    file = bytearray(GOOD[:length])
    for at in damaged:
        if at < length:
            file[at] ^= 0x55
    whole = [(chunk, index) for chunk in RECORD.chunks for index in range(len(chunk.checksums))]
    holders = dict[WindowPlace, bytes]()
    for number, (chunk, index) in enumerate(whole):
        start, size = chunk.window(index)
        if number in held:
            holders[BLOCK, chunk.offset, index] = GOOD[chunk.offset + start :][:size]
    windows = with_holders(windows_of(RECORD, BLOCK, bytes(file), old), holders)
    image, expected = bytearray(file), bytearray(file)
    for copy in old:
        end = min(copy.end, length)
        expected[copy.offset : max(end, copy.offset)] = copy.data[: max(end - copy.offset, 0)]
    for one in windows:
        # Never longer or shorter than the file.
        assert len(one.after) == len(one.present) or not one.decision.writes
        place = one.offset, one.offset + len(one.present)
        good = GOOD[one.offset : one.offset + len(one.present)]
        if one.decision.writes:
            image[place[0] : place[1]] = one.after
            assert bytes(expected[place[0] : place[1]]) == one.after
        if one.decision is UndoDecision.RESTORE:
            assert one.place in holders
            both = zip(one.present, good, one.after, strict=True)
            assert all(now in (new, old) for now, new, old in both)
        if one.decision is UndoDecision.REPAIR:
            assert one.after == good
    touched = {
        at for one in windows if one.decision.writes for at in range(one.offset, one.offset + 1024)
    }
    assert all(image[at] == file[at] for at in range(length) if at not in touched)
    assert len(image) == length
