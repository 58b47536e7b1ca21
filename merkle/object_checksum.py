"""The CRC of a whole object from those of its windows or parts.

The CRC of A followed by B is x^(8|B|) crc(A) + crc(B) over GF(2) modulo the polynomial
(zlib's crc32_combine). A store that records CRCs of windows or parts can so state the
CRC of the object without reading it. `merkle.window_tree` finds where two differ.
"""

import zlib
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache

from merkle.checksum import Buffer, crc64nvme, fold


class Crc(Enum):
    """CRCs that S3 stores and Ozone record; all start from and end with inverted bits.

    The value is the width in bits and the polynomial with its bits reflected.
    """

    CRC32 = (32, 0xEDB88320)
    CRC32C = (32, 0x82F63B78)
    CRC64NVME = (64, 0x9A6C9329AC4BC9B5)


def crc_of(crc: Crc, data: Buffer) -> int:
    """The CRC of some bytes."""
    match crc:
        case Crc.CRC32:
            return zlib.crc32(data)
        case Crc.CRC32C:
            return fold(data)
        case Crc.CRC64NVME:
            return crc64nvme(data)


def append_crc(crc: Crc, first: int, second: int, *, second_bytes: int) -> int:
    """The CRC of A followed by B, from `first` of A, `second` of B and B's length."""
    return multiply(crc, zeros_factor(crc, second_bytes), first) ^ second


def object_crc(crc: Crc, parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of an object from the CRC and length in bytes of each of its parts in
    order; 0 of none.
    """
    whole = 0
    for part, length_bytes in parts:
        whole = append_crc(crc, whole, part, second_bytes=length_bytes)
    return whole


@lru_cache(maxsize=4096)
def zeros_factor(crc: Crc, zero_bytes: int) -> int:
    """What a CRC is multiplied by when so many zero bytes follow: x to the power of 8
    `zero_bytes`, modulo the polynomial.
    """
    width, _ = crc.value
    # Bits are reflected: the highest is x^0.
    power, square, exponent = 1 << (width - 1), 1 << (width - 2), 8 * zero_bytes
    while exponent:
        if exponent & 1:
            power = multiply(crc, power, square)
        square, exponent = multiply(crc, square, square), exponent >> 1
    return power


def multiply(crc: Crc, a: int, b: int) -> int:
    """The product of two polynomials with reflected bits, modulo the CRC's."""
    width, polynomial = crc.value
    product, bit = 0, 1 << (width - 1)
    while a:
        if a & bit:
            product, a = product ^ b, a ^ bit
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
        bit >>= 1
    return product
