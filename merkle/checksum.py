"""Checksum algorithms: window checksums as Ozone records them, the CRC32C that folds
them, fingerprints.

The only importer of the CRC and hash libraries. CRCs of much data go to compiled
kernels (merkle.kernels, the extra `fast`), which take a whole chunk in one call without
the GIL; everything else is one library call a window. They are loaded once a process
has had enough work for them to pay; both ways give the same bytes.
"""

import hashlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import fastcrc
import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap

# Loading the kernels takes as long as a library takes for ten GB. A process that has
# checked this much is taken to go on; one that looks at a few trees or a small
# container never waits for them.
KERNEL_BYTES_MIN = 256 << 20


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


class Compiled(Protocol):
    """What merkle.kernels offers; see there."""

    ABOUT_WINDOWS: str
    ABOUT_BLOCKS: str

    def crc32_windows(self, view: memoryview, bytes_per_checksum: int) -> bytes:
        """The CRC32 of each window, joined."""

    def crc32c_windows(self, view: memoryview, bytes_per_checksum: int) -> bytes:
        """The CRC32C of each window, joined."""

    def crc32c_ranges(self, view: memoryview, starts: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """The CRC32C of each range between two starts."""

    def blocks(
        self,
        block_ids: "NDArray[np.int64]",
        chunk_starts: "NDArray[np.int64]",
        chunk_checksums: "NDArray[np.int64]",
    ) -> "NDArray[np.int64]":
        """The checksum of each block from those of its chunks."""

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
        """The blocks of a tree as Ozone's message has them."""


def fold(data: Buffer) -> int:
    """CRC32C of the bytes, 0 for none: how every node of a tree is computed."""
    return fastcrc.crc32.iscsi(data)


def window_checksums(
    data: "Buffer | NDArray[np.uint8]", checksum_type: ChecksumType, bytes_per_checksum: int
) -> bytes:
    """The entries of all windows of `data` joined in order, `WIDTH[checksum_type]`
    bytes each; b"" for NONE.
    """
    # Arrays are buffers, which their type says from Python 3.12 on only.
    view = memoryview(cast(Buffer, data))
    if checksum_type is ChecksumType.NONE or not view.nbytes:
        return b""
    assert bytes_per_checksum > 0
    kernel = compiled(view.nbytes)
    if kernel and checksum_type is ChecksumType.CRC32:
        return kernel.crc32_windows(view.cast("B"), bytes_per_checksum)
    if kernel and checksum_type is ChecksumType.CRC32C:
        return kernel.crc32c_windows(view.cast("B"), bytes_per_checksum)
    return library_windows(view.cast("B"), checksum_type, bytes_per_checksum)


def library_windows(
    view: memoryview, checksum_type: ChecksumType, bytes_per_checksum: int
) -> bytes:
    """The same by one library call a window: for hashes always, for CRCs where there is
    no kernel.
    """
    one = _ONE[checksum_type]
    return b"".join(
        [one(view[i : i + bytes_per_checksum]) for i in range(0, len(view), bytes_per_checksum)]
    )


def fingerprint(data: Buffer) -> bytes:
    """A 128-bit fingerprint (16 bytes), for noticing change, never for proving equality
    to a stranger.
    """
    return xxhash.xxh3_128_digest(data)


class RunningFingerprint:
    """The same fingerprint of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: "Buffer | NDArray[np.generic]") -> None:
        """Take in the next piece; an array must be contiguous."""
        self._state.update(cast(Buffer, data))

    def digest(self) -> bytes:
        """The fingerprint of all pieces so far, 16 bytes."""
        return self._state.digest()


def compiled(length_bytes: int) -> Compiled | None:
    """The kernels for work on so many bytes, if there are any and the process has had
    enough work to load them.
    """
    if not _load.cache_info().currsize:
        _work.seen_bytes += length_bytes
        if _work.seen_bytes < KERNEL_BYTES_MIN:
            return None
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def kernels() -> dict[str, str]:
    """What serves each checksum type and the tree's folds here, and why; loads the
    kernels to find out.
    """
    loaded = _load()
    if isinstance(loaded, str):
        crcs, folds = (
            f"{what} (no kernels: {loaded})" for what in ("fastcrc a window", "fastcrc a block")
        )
    else:
        crcs, folds = loaded.ABOUT_WINDOWS, loaded.ABOUT_BLOCKS
    return {
        "CRC32": crcs,
        "CRC32C": crcs,
        "SHA256": "hashlib a window",
        "MD5": "hashlib a window",
        "fold": folds,
    }


_ONE: Mapping[ChecksumType, Callable[[memoryview], bytes]] = {
    ChecksumType.CRC32: lambda window: fastcrc.crc32.iso_hdlc(window).to_bytes(4, "big"),
    ChecksumType.CRC32C: lambda window: fastcrc.crc32.iscsi(window).to_bytes(4, "big"),
    ChecksumType.SHA256: lambda window: hashlib.sha256(window).digest(),
    ChecksumType.MD5: lambda window: hashlib.md5(window, usedforsecurity=False).digest(),
}


class _Work:
    """How much was done without kernels; threads that count at once may lose some of
    it, which does no harm.
    """

    seen_bytes = 0


_work = _Work()


@cache
def _load() -> Compiled | str:
    """The kernels, or why there are none. Threads that come first together meet at
    Python's import lock.
    """
    try:
        from merkle import kernels as loaded
    except ModuleNotFoundError:
        return "the extra `fast` is not installed"
    except ImportError as refusal:
        return str(refusal)
    return loaded
