"""CRC32C as sums: ranks, ends and joins give what folding in order gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from merkle.tree import block_checksum
from sweep.fragments import (
    append_zero_words,
    end_tables,
    image,
    rank_tables,
    step_tables,
    word_tables,
)

RANKS = 12
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
checksums = st.lists(st.integers(0, (1 << 32) - 1), max_size=RANKS)


@given(INT64, checksums, st.randoms(use_true_random=False))
def test_a_block_is_the_sum_of_its_chunks_in_any_order(
    block_id: int, chunks: list[int], shuffle
) -> None:
    ranked = list(enumerate(chunks))
    shuffle.shuffle(ranked)
    total = image(word_tables(), np.array([block_id]))
    for rank, checksum in ranked:
        total = total ^ image(rank_tables(RANKS)[rank], np.array([checksum]))
    steps, constants = end_tables(RANKS)
    count = len(chunks)
    assert int(
        (image(steps[count], total.astype(np.int64)) ^ constants[count])[0]
    ) == block_checksum(block_id, chunks)


@given(INT64, st.lists(INT64, max_size=9), st.lists(INT64, max_size=9))
def test_checksums_of_pieces_join(first: int, left: list[int], right: list[int]) -> None:
    without_first = block_checksum(first, left) ^ block_checksum(first, [])
    (moved,) = append_zero_words(np.array([without_first]), np.array([len(right)])).tolist()
    assert moved ^ block_checksum(first, right) == block_checksum(first, left + right)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 40))
def test_many_words_are_appended_as_one_by_one(checksum: int, words: int) -> None:
    one_by_one = np.array([checksum])
    for _ in range(words):
        one_by_one = image(step_tables(), one_by_one).astype(np.int64)
    assert (
        append_zero_words(np.array([checksum]), np.array([words])).tolist() == one_by_one.tolist()
    )


def test_words_appended_in_two_lots_are_as_many_appended_at_once() -> None:
    start, lot = np.array([0x1234_5678]), np.array([1 << 40])
    assert (
        append_zero_words(append_zero_words(start, lot), lot).tolist()
        == append_zero_words(start, 2 * lot).tolist()
    )
