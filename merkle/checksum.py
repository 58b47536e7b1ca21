"""Checksum algorithms: Ozone's window checksums, CRC32C of tree nodes, fingerprints.

Only this module imports the CRC and hash libraries. Compiled kernels (merkle.kernels,
the extra `fast`) compute CRCs of a whole chunk in one call without the GIL; everything
else is one library call per window. The kernels are loaded once a process has done
enough work for it to pay. Both produce the same bytes.
"""

import hashlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import crcmod
import fastcrc
import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap

# Loading the kernels takes as long as the libraries take for ten GB. A process that has
# checked this much will probably go on; one that reads a few trees or a small container
# never loads them.
KERNEL_BYTES_MIN = 256 << 20


class ChecksumType(IntEnum):
    """Names and numbers of Ozone's ChecksumType."""

    NONE = 1
    CRC32 = 2
    CRC32C = 3
    SHA256 = 4
    MD5 = 5


# Bytes of one window's entry.
WIDTH: Mapping[ChecksumType, int] = {
    ChecksumType.NONE: 0,
    ChecksumType.CRC32: 4,
    ChecksumType.CRC32C: 4,
    ChecksumType.SHA256: 32,
    ChecksumType.MD5: 16,
}


class Kernels(Protocol):
    """The interface of the module merkle.kernels, which documents it."""

    ABOUT_WINDOWS: str
    ABOUT_BLOCKS: str

    def crc32_windows(self, view: memoryview, bytes_per_checksum: int) -> bytes:
        """The CRC32 of each window, four big-endian bytes each, joined."""

    def crc32c_windows(self, view: memoryview, bytes_per_checksum: int) -> bytes:
        """The CRC32C of each window, four big-endian bytes each, joined."""

    def crc32c_ranges(self, view: memoryview, starts: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """The CRC32C of each `view[starts[i]:starts[i + 1]]`."""

    def blocks(
        self,
        block_ids: "NDArray[np.int64]",
        chunk_starts: "NDArray[np.int64]",
        chunk_checksums: "NDArray[np.int64]",
    ) -> "NDArray[np.int64]":
        """The checksum of each block from its ID and its chunks' checksums."""

    def encode_blocks(
        self,
        block_ids: "NDArray[np.int64]",
        block_checksums: "NDArray[np.int64]",
        block_deleted: "NDArray[np.bool_]",
        chunk_starts: "NDArray[np.int64]",
        chunk_offsets: "NDArray[np.int64]",
        chunk_lengths: "NDArray[np.int64]",
        chunk_checksums: "NDArray[np.int64]",
        chunk_matches: "NDArray[np.bool_]",
    ) -> bytes:
        """The serialised `blockMerkleTree` fields of a tree."""


def fold(data: Buffer, before: int = 0) -> int:
    """CRC32C of the bytes, 0 without any; every node of a tree is computed with it.
    `before` is that of the bytes before them, to continue it.
    """
    return fastcrc.crc32.iscsi(data, before)


def crc64nvme(data: Buffer) -> int:
    """CRC-64/NVME of the bytes, which S3 declares of whole objects."""
    return _crc64nvme()(data)


def window_checksums(
    data: "Buffer | NDArray[np.uint8]", checksum_type: ChecksumType, bytes_per_checksum: int
) -> bytes:
    """The entries of all windows of `data` joined in order, `WIDTH[checksum_type]`
    bytes each; b"" for NONE.
    """
    # An array is a buffer, but its type declares it only from Python 3.12 on.
    view = memoryview(cast(Buffer, data))
    if checksum_type is ChecksumType.NONE or not view.nbytes:
        return b""
    assert bytes_per_checksum > 0
    kernel = kernels_for(view.nbytes)
    if kernel and checksum_type is ChecksumType.CRC32:
        return kernel.crc32_windows(view.cast("B"), bytes_per_checksum)
    if kernel and checksum_type is ChecksumType.CRC32C:
        return kernel.crc32c_windows(view.cast("B"), bytes_per_checksum)
    return library_windows(view.cast("B"), checksum_type, bytes_per_checksum)


def library_windows(
    view: memoryview, checksum_type: ChecksumType, bytes_per_checksum: int
) -> bytes:
    """Like `window_checksums`, but by one library call per window: for hashes, and for
    CRCs without kernels.
    """
    checksum = _LIBRARY_CHECKSUMS[checksum_type]
    return b"".join(
        [
            checksum(view[i : i + bytes_per_checksum])
            for i in range(0, len(view), bytes_per_checksum)
        ]
    )


def fingerprint(data: Buffer) -> bytes:
    """A 128-bit fingerprint (16 bytes). It detects change, but proves nothing against
    deliberate collisions.
    """
    return xxhash.xxh3_128_digest(data)


class RunningFingerprint:
    """Computes `fingerprint` of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: "Buffer | NDArray[np.generic]") -> None:
        """Add the next piece; an array must be contiguous."""
        self._state.update(cast(Buffer, data))

    def digest(self) -> bytes:
        """The fingerprint of all pieces so far, 16 bytes."""
        return self._state.digest()


@cache
def _crc64nvme() -> Callable[[Buffer], int]:
    made: Callable[[Buffer], int] = crcmod.mkCrcFun(
        0x1_AD93_D235_94C9_3659, initCrc=0, rev=True, xorOut=(1 << 64) - 1
    )
    return made


def kernels_for(length_bytes: int) -> Kernels | None:
    """The kernels for work on this many bytes. None if they are not available, or if
    the process has not done enough work to load them.
    """
    if not _load.cache_info().currsize:
        _work.seen_bytes += length_bytes
        if _work.seen_bytes < KERNEL_BYTES_MIN:
            return None
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def implementations() -> dict[str, str]:
    """What computes each checksum type and the tree's folds in this process, as text
    for people. Loads the kernels.
    """
    loaded = _load()
    if isinstance(loaded, str):
        crcs, folds = (f"fastcrc per {unit} (no kernels: {loaded})" for unit in ("window", "block"))
    else:
        crcs, folds = loaded.ABOUT_WINDOWS, loaded.ABOUT_BLOCKS
    return {
        "CRC32": crcs,
        "CRC32C": crcs,
        "SHA256": "hashlib per window",
        "MD5": "hashlib per window",
        "fold": folds,
    }


_LIBRARY_CHECKSUMS: Mapping[ChecksumType, Callable[[memoryview], bytes]] = {
    ChecksumType.CRC32: lambda window: fastcrc.crc32.iso_hdlc(window).to_bytes(4, "big"),
    ChecksumType.CRC32C: lambda window: fastcrc.crc32.iscsi(window).to_bytes(4, "big"),
    ChecksumType.SHA256: lambda window: hashlib.sha256(window).digest(),
    ChecksumType.MD5: lambda window: hashlib.md5(window, usedforsecurity=False).digest(),
}


class _WorkCounter:
    """Bytes processed without kernels. Threads may lose counts of each other, which
    does no harm.
    """

    seen_bytes = 0


_work = _WorkCounter()


@cache
def _load() -> Kernels | str:
    """The kernels, or why there are none. Concurrent first calls wait for each other at
    Python's import lock.
    """
    try:
        from merkle import kernels as loaded
    except ModuleNotFoundError:
        return "the extra `fast` is not installed"
    except ImportError as error:
        return str(error)
    return loaded
