"""A plan of a stitched object makes the bytes it should, of parts that every store
takes.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.stitching import (
    PATCHES_MAX,
    AddPart,
    BytePatch,
    MakeScratch,
    NewBytes,
    Piece,
    StitchPlan,
    StitchRefusal,
    StoredRange,
    plan_stitch,
)

MIN, COPY_MAX = 5, 24


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, list[BytePatch]]:
    """An old object and patches of it, at any distance from each other."""
    old = bytes(i % 251 for i in range(draw(st.integers(2 * MIN, 150))))
    patches, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        offset = min(len(old), at + draw(st.integers(0, 30)))
        length = draw(st.integers(0, min(len(old) - offset, 30)))
        data = bytes([255 - len(patches)]) * draw(st.integers(0, 16))
        patches.append(BytePatch(offset, length, data))
        at = offset + length
    return old, patches


def expected(old: bytes, patches: list[BytePatch]) -> bytes:
    for patch in reversed(patches):
        end = patch.offset + patch.old_length_bytes
        old = old[: patch.offset] + patch.data + old[end:]
    return old


def applied(old: bytes, plan: StitchPlan) -> bytes:
    """What a store would make of the steps; fails where a store would refuse."""
    scratch: tuple[int, bytes] | None = None
    parts: list[bytes] = []

    def of(piece: Piece) -> bytes:
        if isinstance(piece, NewBytes):
            return piece.data
        assert isinstance(piece, StoredRange)
        if piece.scratch is None:
            source = old
        else:
            # One key serves all: an earlier scratch object exists no more.
            assert scratch is not None
            assert scratch[0] == piece.scratch
            source = scratch[1]
        assert 0 <= piece.first < piece.end <= len(source)
        assert piece.length_bytes <= 5 * COPY_MAX
        return source[piece.first : piece.end]

    for step in plan.steps:
        match step:
            case MakeScratch(number, first, last):
                assert first.length_bytes >= MIN
                assert last.length_bytes > 0
                scratch = number, of(first) + of(last)
            case AddPart(piece):
                parts.append(of(piece))
    assert all(len(part) >= MIN for part in parts[:-1])
    assert parts[-1]
    return b"".join(parts)


@settings(max_examples=2000)
@given(edits())
def test_a_plan_makes_the_patched_bytes_and_sends_only_new_ones(
    edit: tuple[bytes, list[BytePatch]],
) -> None:
    old, patches = edit
    plan = plan_stitch(len(old), patches, part_bytes_min=MIN, copy_bytes_max=COPY_MAX)
    want = expected(old, patches)
    if not want:
        assert plan is StitchRefusal.EMPTY_RESULT
        return
    assert isinstance(plan, StitchPlan)
    assert applied(old, plan) == want
    assert plan.size_bytes == len(want)
    assert plan.sent_bytes == sum(len(patch.data) for patch in patches)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-5, 40)), max_size=4))
def test_patches_out_of_order_or_range_are_refused(ranges: list[tuple[int, int]]) -> None:
    at, is_valid = 0, True
    for offset, length in ranges:
        is_valid &= offset >= at and length >= 0
        at = offset + length
    is_valid &= at <= 20
    patches = [BytePatch(offset, length, b"x") for offset, length in ranges]
    plan = plan_stitch(20, patches, part_bytes_min=MIN, copy_bytes_max=COPY_MAX)
    assert (plan is not StitchRefusal.INVALID_PATCHES) == is_valid


def test_small_objects_and_many_patches_are_sent_instead() -> None:
    assert plan_stitch((10 << 20) - 1, []) is StitchRefusal.SMALL_BASE
    assert isinstance(plan_stitch(10 << 20, []), StitchPlan)
    many = [BytePatch(i * 100, 1, b"x") for i in range(PATCHES_MAX + 1)]
    assert plan_stitch(64 << 20, many) is StitchRefusal.MANY_PATCHES
    assert isinstance(plan_stitch(64 << 20, many[:-1]), StitchPlan)


def test_a_patch_in_the_middle_costs_one_scratch_object_and_three_parts() -> None:
    plan = plan_stitch(64 << 20, [BytePatch(32 << 20, 1, b"x")])
    assert isinstance(plan, StitchPlan)
    assert [type(step) for step in plan.steps] == [AddPart, MakeScratch, AddPart, AddPart]


def test_a_long_copy_leaves_no_small_rest() -> None:
    """51 bytes in copies of at most 24 would end in one of 3, which needs scratch."""
    patch = BytePatch(51, 0, b"x" * MIN)
    plan = plan_stitch(100, [patch], part_bytes_min=MIN, copy_bytes_max=COPY_MAX)
    assert isinstance(plan, StitchPlan)
    assert {type(step) for step in plan.steps} == {AddPart}
