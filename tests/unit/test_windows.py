"""Bytes are proven window by window, and nothing else counts as proven."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.checksum import ChecksumType
from merkle.limits import CHUNK_BYTES_MAX
from merkle.record import ChunkRecord
from merkle.windows import ProvenWindows, bad_windows, is_sound, prove, runs_of
from tests.support.peers import chunk_record

WINDOW = 8
TYPES = [kind for kind in ChecksumType if kind is not ChecksumType.NONE]


def chunk(data: bytes, kind: ChecksumType = ChecksumType.CRC32C) -> ChunkRecord:
    return chunk_record(data, 64, kind, WINDOW)


@given(st.binary(min_size=1, max_size=60), st.sets(st.integers(0, 59)), st.sampled_from(TYPES))
def test_exactly_the_windows_without_damage_are_proven_and_the_others_bad(
    data: bytes, hits: set[int], kind: ChecksumType
) -> None:
    record = chunk(data, kind)
    damaged = bytearray(data)
    for hit in hits:
        if hit < len(data):
            damaged[hit] ^= 1
    bad = tuple(sorted({hit // WINDOW for hit in hits if hit < len(data)}))
    assert bad_windows(record, damaged) == bad
    proven = prove(record, 0, damaged)
    assert [index for run in proven for index in run.windows] == [
        index for index in range(len(record.checksums)) if index not in bad
    ]
    for run in proven:
        start, _ = record.window(run.first)
        assert run.data == data[start : start + len(run.data)]


@given(st.binary(min_size=1, max_size=60), st.integers(0, 60))
def test_of_data_that_ends_early_only_whole_windows_count(data: bytes, length: int) -> None:
    record = chunk(data)
    whole = len(record.checksums) if length >= len(data) else length // WINDOW
    assert sum(run.count for run in prove(record, 0, data[:length])) == whole
    assert bad_windows(record, data[:length]) == tuple(range(whole, len(record.checksums)))


def test_data_from_the_middle_of_a_chunk_are_held_against_their_own_windows() -> None:
    data = bytes(range(40))
    assert prove(chunk(data), 2, data[16:]) == (ProvenWindows(2, 3, data[16:]),)
    assert prove(chunk(data), 2, data[8:]) == ()


def test_bytes_behind_the_end_of_the_chunk_are_not_looked_at() -> None:
    data = bytes(range(20))
    assert bad_windows(chunk(data), data + b"more") == ()
    assert prove(chunk(data), 0, data + b"more") == (ProvenWindows(0, 3, data),)


@pytest.mark.parametrize(
    ("windows", "runs"),
    [
        ([], []),
        ([3], [range(3, 4)]),
        ([0, 1, 2], [range(3)]),
        ([0, 2, 3, 7], [range(1), range(2, 4), range(7, 8)]),
    ],
)
def test_adjacent_windows_become_one_run(windows: list[int], runs: list[range]) -> None:
    assert list(runs_of(windows)) == runs


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: replace(c, checksum_type=ChecksumType.NONE, checksums=()),
        lambda c: replace(c, length_bytes=0, checksums=()),
        lambda c: replace(c, checksums=c.checksums[:-1]),
        lambda c: replace(c, checksums=(*c.checksums[:-1], b"abc")),
        lambda c: replace(c, bytes_per_checksum=0),
        lambda c: replace(c, length_bytes=CHUNK_BYTES_MAX + 1),
    ],
)
def test_a_record_that_cannot_prove_anything_is_not_sound(spoil) -> None:
    record = chunk(bytes(20))
    assert is_sound(record)
    assert not is_sound(spoil(record))
