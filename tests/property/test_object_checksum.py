"""Laws of whole-object CRCs and window trees, against CRCs of the bytes themselves."""

import random
from collections.abc import Callable

import crcmod
import fastcrc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.object_checksum import Crc, append_crc, object_crc
from merkle.window_tree import FAN_OUT, unequal_children, window_tree

OF_BYTES: dict[Crc, Callable[[bytes], int]] = {
    Crc.CRC32: fastcrc.crc32.iso_hdlc,
    Crc.CRC32C: fastcrc.crc32.iscsi,
    Crc.CRC64NVME: crcmod.mkCrcFun(0x1_AD93_D235_94C9_3659, initCrc=0, xorOut=2**64 - 1),
}
crcs = pytest.mark.parametrize("crc", Crc)


@crcs
@given(first=st.binary(), second=st.binary(), third=st.binary())
def test_the_crc_of_a_sequence_is_made_of_its_parts(
    crc: Crc, first: bytes, second: bytes, third: bytes
) -> None:
    of, parts = OF_BYTES[crc], (first, second, third)
    assert append_crc(crc, of(first), of(second), second_bytes=len(second)) == of(first + second)
    assert object_crc(crc, [(of(part), len(part)) for part in parts]) == of(b"".join(parts))


@crcs
@pytest.mark.parametrize(
    "size_bytes", [1, 7, 8, 63 * 8, 64 * 8, 64 * 8 - 1, 65 * 8, 64 * 64 * 8 + 5]
)
def test_each_level_of_a_tree_has_the_crcs_of_the_bytes_below(crc: Crc, size_bytes: int) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    tree = window_tree(crc, windows(crc, data, 8), size_bytes=size_bytes, window_bytes=8)
    node_bytes = 8
    for level in tree.levels:
        assert level.tolist() == windows(crc, data, node_bytes).tolist()
        node_bytes *= FAN_OUT
    assert tree.whole == OF_BYTES[crc](data)


@given(
    size_bytes=st.integers(1, 3000),
    places=st.sets(st.integers(0, 2999), max_size=5),
    data=st.data(),
)
def test_the_windows_that_differ_are_found_from_the_top(
    size_bytes: int, places: set[int], data: st.DataObject
) -> None:
    ours = random.Random(size_bytes).randbytes(size_bytes)
    theirs = bytearray(ours)
    for place in places:
        theirs[place % size_bytes] ^= data.draw(st.integers(1, 255))
    one, two = (
        window_tree(Crc.CRC32C, windows(Crc.CRC32C, side, 8), size_bytes=size_bytes, window_bytes=8)
        for side in (ours, bytes(theirs))
    )
    nodes = [0] if one.whole != two.whole else []
    for level in range(len(one.levels) - 1, 0, -1):
        nodes = unequal_children(one, level, nodes, two.children(level, nodes))
    # CRC32C finds each change of up to 32 bits in a row; more can cancel with 2^-32.
    expected = [
        n
        for n in range(-(-size_bytes // 8))
        if ours[8 * n : 8 * n + 8] != theirs[8 * n : 8 * n + 8]
    ]
    assert nodes == expected


def test_an_answer_of_another_length_and_a_node_that_is_not_there_are_refused() -> None:
    data = bytes(range(200))
    tree = window_tree(Crc.CRC32, windows(Crc.CRC32, data, 2), size_bytes=200, window_bytes=2)
    with pytest.raises(ValueError, match="63 checksums instead of 64"):
        unequal_children(tree, 1, [0], tree.children(1, [0])[:-1])
    for level, node in ((0, 0), (3, 0), (1, 2), (1, -1)):
        with pytest.raises(IndexError):
            tree.children(level, [node])


def windows(
    crc: Crc, data: bytes, window_bytes: int
) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    of = OF_BYTES[crc]
    parts = [of(data[n : n + window_bytes]) for n in range(0, len(data), window_bytes)]
    return np.array(parts, np.uint64)
