"""A second implementation of IDs, digests, coded symbols, peeling and certificate, by
the definition alone: plain integers, one item at a time, nothing shared with proof.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence

_WORD = 2**64
_STEP = 0xDA942042E4DD58B5


def scrambled(word: int) -> int:
    """A 64-bit word through Stafford's mixer 13."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor % _WORD
    return word ^ word >> 31


def check_of(first_12: bytes) -> bytes:
    """The last 4 bytes of the ID that begins with these."""
    high, low = struct.unpack(">QI", first_12)
    return struct.pack(">I", scrambled(high ^ scrambled((low + _STEP) % _WORD)) % 2**32)


def framed(*fields: bytes) -> bytes:
    """Fields, each after its length."""
    return b"".join(struct.pack(">I", len(field)) + field for field in fields)


def root_digest_of(secret: bytes, job: bytes, count: int, total: int) -> bytes:
    """By which a target shows that it holds a root."""
    text = framed(job, struct.pack(">Q", count), total.to_bytes(16, "big"))
    return hashlib.blake2b(text, digest_size=16, key=secret, person=b"root").digest()


def profile_digest_of(secret: bytes, algorithm: str, groups: list[str]) -> bytes:
    """What both sides of a comparison have in common."""
    text = f"treefold-profile-1 {algorithm} {','.join(groups)}".encode()
    return hashlib.blake2b(text, digest_size=16, key=secret).digest()


def properties_digest_of(groups: Sequence[Sequence[tuple[str, str]]]) -> bytes:
    """16 bytes of metadata, tags and headers."""
    text = b""
    for group in groups:
        text += struct.pack(">I", len(group))
        text += framed(*(part.encode("utf-8") for pair in group for part in pair))
    return hashlib.blake2b(text, digest_size=16).digest()


def id_of(
    secret: bytes,
    key: str,
    version: str,
    is_delete_marker: bool,
    size_bytes: int,
    content: bytes | None,
    properties: bytes,
) -> bytes:
    """The 16 bytes of an item."""

    name = (key.encode("utf-8"), version.encode("utf-8"))
    rest = (
        b"\x01" if is_delete_marker else b"\x00",
        struct.pack(">Q", size_bytes),
        b"\x00" if content is None else b"\x01" + content,
        properties,
    )
    first = hashlib.blake2b(framed(*name), digest_size=6, key=secret, person=b"key").digest()
    first += hashlib.blake2b(
        framed(*name, *rest), digest_size=6, key=secret, person=b"item"
    ).digest()
    return first + check_of(first)


def places_of(item_id: bytes, size: int, salt: int = 0) -> list[int]:
    """The symbols that an ID goes into."""
    high, low = struct.unpack(">QQ", item_id)
    random, found, i = scrambled(high ^ low ^ salt), [], 0
    while i < size:
        found.append(i)
        random = random * _STEP % _WORD
        i = i + math.ceil((i + 1.5) * (2**32 / math.sqrt(random + 1.0) - 1.0))
    return found


def symbols_of(ids: Iterable[bytes], size: int, salt: int = 0) -> list[tuple[int, int]]:
    """Xor and count of each symbol."""
    symbols = [(0, 0)] * size
    for item_id in ids:
        for i in places_of(item_id, size, salt):
            xor, count = symbols[i]
            symbols[i] = (xor ^ int.from_bytes(item_id, "big"), count + 1)
    return symbols


def peeled(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], salt: int = 0
) -> tuple[set[bytes], set[bytes]] | None:
    """What only one side has; looks at all symbols again after each ID."""
    left = [(a ^ c, b - d) for (a, b), (c, d) in zip(ours, theirs, strict=True)]
    found: tuple[set[bytes], set[bytes]] = (set(), set())
    progress = True
    while progress:
        progress = False
        for i, (xor, count) in enumerate(left):
            item_id = xor.to_bytes(16, "big")
            if abs(count) != 1 or check_of(item_id[:12]) != item_id[12:]:
                continue
            places = places_of(item_id, len(left), salt)
            if i not in places:
                continue
            found[count < 0].add(item_id)
            for j in places:
                left[j] = (left[j][0] ^ xor, left[j][1] - count)
            progress = True
    return found if all(symbol == (0, 0) for symbol in left) else None


def is_certified(
    ours: Iterable[bytes], theirs: Iterable[bytes], only_ours: set[bytes], only_theirs: set[bytes]
) -> bool:
    """Whether sums and counts of the sets differ by those of what was found."""

    def sums(ids: Iterable[bytes]) -> tuple[int, int]:
        numbers = [int.from_bytes(item_id, "big") for item_id in ids]
        return sum(numbers), len(numbers)

    (a, b), (c, d), (e, f), (g, h) = map(sums, (ours, theirs, only_ours, only_theirs))
    return (a - c) % 2**128 == (e - g) % 2**128 and b - d == f - h
