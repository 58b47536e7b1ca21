"""Checksum algorithms: window checksums as Ozone records them, the CRC32C that folds them, fingerprints.

The only importer of the CRC and hash libraries.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TypeAlias

import fastcrc
import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview


class ChecksumType(IntEnum):
    """Names and numbers of Ozone's ChecksumType."""

    NONE = 1
    CRC32 = 2
    CRC32C = 3
    SHA256 = 4
    MD5 = 5


# Bytes of one entry.
WIDTH: Mapping[ChecksumType, int] = {
    ChecksumType.NONE: 0,
    ChecksumType.CRC32: 4,
    ChecksumType.CRC32C: 4,
    ChecksumType.SHA256: 32,
    ChecksumType.MD5: 16,
}

_ONE: Mapping[ChecksumType, Callable[[Buffer], bytes]] = {
    ChecksumType.CRC32: lambda window: zlib.crc32(window).to_bytes(4, "big"),
    ChecksumType.CRC32C: lambda window: fastcrc.crc32.iscsi(window).to_bytes(4, "big"),
    ChecksumType.SHA256: lambda window: hashlib.sha256(window).digest(),
    ChecksumType.MD5: lambda window: hashlib.md5(window, usedforsecurity=False).digest(),
}


def fold(data: Buffer) -> int:
    """CRC32C of the bytes, 0 for none: how every node of a tree is computed."""
    return fastcrc.crc32.iscsi(data)


def window_checksums(data: Buffer, checksum_type: ChecksumType, bytes_per_checksum: int) -> bytes:
    """The entries of all windows of `data` joined in order, `WIDTH[checksum_type]` bytes each; b"" for NONE."""
    if checksum_type is ChecksumType.NONE:
        return b""
    one, view = _ONE[checksum_type], memoryview(data)
    return b"".join(one(view[i : i + bytes_per_checksum]) for i in range(0, len(view), bytes_per_checksum))


def fingerprint(data: Buffer) -> bytes:
    """A 128-bit fingerprint (16 bytes), for noticing change, never for proving equality to a stranger."""
    return xxhash.xxh3_128_digest(data)
