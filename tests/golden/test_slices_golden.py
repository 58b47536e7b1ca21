"""Replays window checksums that the JDK's primitives made, as Ozone uses them.

`TREEFOLD_GOLDEN_DIR` names a further folder whose `slices*.json` are replayed too; that
it holds vectors at all is checked along with the trees.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from merkle.checksum import (
    KERNEL_BYTES_MIN,
    ChecksumType,
    kernels_for,
    library_windows,
    window_checksums,
)

OWN = Path(__file__).parent / "data"
FURTHER = os.environ.get("TREEFOLD_GOLDEN_DIR")
FOLDERS = [OWN, Path(FURTHER)] if FURTHER else [OWN]


@cache
def pseudo_random(seed: int, length_bytes: int) -> bytes:
    """The bytes that a case's seed stands for."""
    x, out = seed, bytearray()
    for _ in range(length_bytes):
        x = (x * 6364136223846793005 + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
        out.append(x >> 56)
    return bytes(out)


def _all_cases() -> Iterator[Any]:
    for folder in FOLDERS:
        for path in sorted(folder.glob("slices*.json")):
            for case in json.loads(path.read_text())["cases"]:
                for name, checksums in case["checksums"].items():
                    shape = (case["seed"], case["len"], case["bytes_per_checksum"])
                    label = f"{folder.name}-{path.stem}-{case['name']}-{name}"
                    yield pytest.param(*shape, ChecksumType[name], "".join(checksums), id=label)


@pytest.mark.parametrize(
    ("seed", "length_bytes", "bytes_per_checksum", "checksum_type", "expected"), list(_all_cases())
)
def test_windows_equal_the_reference(
    seed: int,
    length_bytes: int,
    bytes_per_checksum: int,
    checksum_type: ChecksumType,
    expected: str,
) -> None:
    """Every type, through the way in, the kernels and the library alike."""
    data = pseudo_random(seed, length_bytes)
    assert window_checksums(data, checksum_type, bytes_per_checksum).hex() == expected
    assert library_windows(memoryview(data), checksum_type, bytes_per_checksum).hex() == expected
    kernel = kernels_for(KERNEL_BYTES_MIN)
    if kernel and data and checksum_type is ChecksumType.CRC32:
        assert kernel.crc32_windows(memoryview(data), bytes_per_checksum).hex() == expected
    if kernel and data and checksum_type is ChecksumType.CRC32C:
        assert kernel.crc32c_windows(memoryview(data), bytes_per_checksum).hex() == expected


def test_the_own_vectors_are_all_replayed() -> None:
    """Nine cases of four types; fewer means that they were not read."""
    assert len([case for case in _all_cases() if case.id.startswith("data-slices-")]) == 36
