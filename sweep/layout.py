"""A run's numbers, and the mixes of its fingerprint: what the plain fold and the
compiled one have in common.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"
Bools: TypeAlias = "NDArray[np.bool_]"


class Fragment(IntEnum):
    """What is known of a block's rows in one run."""

    BLOCK_ID = 0
    # Least and greatest chunk offset; BLOCK_ROW where the block's own row is all there
    # is.
    LOW = 1
    HIGH = 2
    CHECKSUM = 3
    # From here on sums.
    CHUNKS = 4
    DELETED_ROWS = 5
    BYTES = 6
    CORRUPT = 7
    UNVERIFIABLE = 8
    MIX = 9


class Inner(IntEnum):
    """What is known of the whole blocks of a run."""

    CHECKSUM = 0
    # XOR of the blocks' mixes.
    FINGERPRINT = 1
    # From here on sums.
    BLOCKS = 2
    DELETED_BLOCKS = 3
    CHUNKS = 4
    BYTES = 5
    CORRUPT = 6
    UNVERIFIABLE = 7


# The numbers of a run, in this order: how many fragments there are (none: a replica
# without blocks; the first alone; the first and the last), the fragments, and what lies
# between them.
ENDS = 0
FIRST = slice(1, 1 + len(Fragment))
LAST = slice(FIRST.stop, FIRST.stop + len(Fragment))
INNER = slice(LAST.stop, LAST.stop + len(Inner))
NUMBERS = (
    "ends",
    *(f"first_{field.name.lower()}" for field in Fragment),
    *(f"last_{field.name.lower()}" for field in Fragment),
    *(f"inner_{field.name.lower()}" for field in Inner),
)

# Odd, so that to multiply is a bijection.
PRIME_1, PRIME_2, PRIME_3 = (
    np.uint64(odd) for odd in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
)
SEED = np.uint64(0xD6E8_FEB8_6659_FD93)
HALF = np.uint64(32)


def chunk_mixes(offsets: Int64s, lengths: Int64s, checksums: Int64s, matches: Bools) -> Int64s:
    """64 bits a chunk, unlike wherever one field alone is unlike; their sum over a
    block says which chunks it holds.
    """
    words = _stirred(offsets.view(np.uint64) ^ SEED, PRIME_1)
    words = _stirred(words + lengths.view(np.uint64), PRIME_2)
    words = _stirred(words ^ checksums.view(np.uint64), PRIME_3)
    return _stirred(words + matches.astype(np.uint64), PRIME_1).view(np.int64)


def block_mixes(block_ids: Int64s, checksums: Int64s, deleted: Bools, mixes: Int64s) -> Int64s:
    """64 bits a block, of which `mixes` has the sum over its chunks; their XOR is the
    replica's fingerprint.
    """
    words = _stirred(block_ids.view(np.uint64) ^ SEED, PRIME_2)
    words = _stirred(words + checksums.view(np.uint64), PRIME_3)
    words = _stirred(words ^ mixes.view(np.uint64), PRIME_1)
    return _stirred(words + deleted.astype(np.uint64), PRIME_2).view(np.int64)


def _stirred(words: "NDArray[np.uint64]", prime: np.uint64) -> "NDArray[np.uint64]":
    words = words * prime
    return words ^ (words >> HALF)
