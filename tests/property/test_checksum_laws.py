"""Laws of window checksums, against libraries that the product's kernels know nothing
of.
"""

import hashlib
import zlib
from collections.abc import Callable

import crcmod
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.checksum import (
    KERNEL_BYTES_MIN,
    WIDTH,
    ChecksumType,
    kernels_for,
    library_windows,
    window_checksums,
)

_crc32c = crcmod.mkCrcFun(0x1_1EDC_6F41, initCrc=0, xorOut=0xFFFF_FFFF)
ORACLES: dict[ChecksumType, Callable[[bytes], bytes]] = {
    ChecksumType.CRC32: lambda window: zlib.crc32(window).to_bytes(4, "big"),
    ChecksumType.CRC32C: lambda window: _crc32c(window).to_bytes(4, "big"),
    ChecksumType.SHA256: lambda window: hashlib.sha256(window).digest(),
    ChecksumType.MD5: lambda window: hashlib.md5(window).digest(),
}
CRCS = [ChecksumType.CRC32, ChecksumType.CRC32C]
POOL = np.random.default_rng(11).integers(0, 256, 40_000, np.uint8).tobytes()

# The first example may load the kernels, which takes seconds.
unhurried = settings(deadline=None)

# Around the sizes at which a kernel turns from one way of eating bytes to the next, and
# any others.
edges = st.builds(
    lambda power, near: max(1, (1 << power) + near), st.integers(3, 14), st.integers(-9, 9)
)
lengths = st.integers(0, 1200) | edges
windows = st.integers(1, 600) | edges
starts = st.integers(0, 70)


def by_kernel(view: memoryview, checksum_type: ChecksumType, bytes_per_checksum: int) -> bytes:
    kernel = kernels_for(KERNEL_BYTES_MIN)
    if kernel is None or not view.nbytes:
        return library_windows(view, checksum_type, bytes_per_checksum)
    serve = kernel.crc32_windows if checksum_type is ChecksumType.CRC32 else kernel.crc32c_windows
    return serve(view, bytes_per_checksum)


@pytest.mark.parametrize("checksum_type", list(ORACLES))
@unhurried
@given(start=starts, length_bytes=lengths, bytes_per_checksum=windows)
def test_all_ways_agree_with_an_independent_library(
    checksum_type: ChecksumType, start: int, length_bytes: int, bytes_per_checksum: int
) -> None:
    data = POOL[start : start + length_bytes]
    expected = b"".join(
        ORACLES[checksum_type](data[i : i + bytes_per_checksum])
        for i in range(0, len(data), bytes_per_checksum)
    )
    # Sliced from a view, so that the data begin at any address.
    view = memoryview(POOL)[start : start + length_bytes]
    assert window_checksums(view, checksum_type, bytes_per_checksum) == expected
    assert library_windows(view, checksum_type, bytes_per_checksum) == expected
    if checksum_type in CRCS:
        assert by_kernel(view, checksum_type, bytes_per_checksum) == expected


@pytest.mark.parametrize("checksum_type", list(ORACLES))
@unhurried
@given(
    whole=st.integers(1, 6), rest=st.binary(max_size=300), bytes_per_checksum=st.integers(1, 500)
)
def test_a_chunk_may_be_checked_in_pieces_of_whole_windows(
    checksum_type: ChecksumType, whole: int, rest: bytes, bytes_per_checksum: int
) -> None:
    first = POOL[: whole * bytes_per_checksum]
    together = window_checksums(first + rest, checksum_type, bytes_per_checksum)
    apart = [window_checksums(piece, checksum_type, bytes_per_checksum) for piece in (first, rest)]
    assert together == b"".join(apart)


@pytest.mark.parametrize("checksum_type", CRCS)
@unhurried
@given(
    bit=st.integers(0, 8 * 20_000 - 1),
    bytes_per_checksum=st.sampled_from([7, 512, 1000, 4096, 16384]),
)
def test_a_flipped_bit_changes_the_entry_of_its_window_alone(
    checksum_type: ChecksumType, bit: int, bytes_per_checksum: int
) -> None:
    data = bytearray(POOL[:20_000])
    before = by_kernel(memoryview(data), checksum_type, bytes_per_checksum)
    data[bit // 8] ^= 1 << bit % 8
    after = by_kernel(memoryview(data), checksum_type, bytes_per_checksum)
    width = WIDTH[checksum_type]
    changed = {i // width for i in range(len(before)) if before[i] != after[i]}
    assert changed == {bit // 8 // bytes_per_checksum}
