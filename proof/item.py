"""Items: one version of a key each, as canonical bytes and as 16 bytes of ID.

Two buckets are equal when their sets of items are. What belongs to an item is fixed by
a profile, which both sides must share: its digest travels in each message. IDs are
keyed hashes. The key is the policy's secret, so that nobody who writes to a bucket can
search for items whose IDs cancel each other.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NewType

ItemId = NewType("ItemId", bytes)

# 48 bits of the key's hash, 48 bits of the item's, 32 bits of check.
ID_BYTES = 16
KEY_HASH_BYTES = 6
HASHES_BYTES = 12
# Of the secret key; BLAKE2b takes up to 64.
SECRET_BYTES = 32
PROPERTIES_DIGEST_BYTES = 16
ROOT_DIGEST_BYTES = 16

# Of the mixer of 64-bit words (Stafford's variant 13), by which an ID checks itself and
# chooses its symbols.
MIX_FIRST, MIX_SECOND = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
MIX_STEP = 0xDA94_2042_E4DD_58B5
WORD_MASK, CHECK_MASK = 0xFFFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF


class HashAlgorithm(Enum):
    """Hashes of whole objects, by the names used on the wire and in reports."""

    MD5 = "md5"
    SHA256 = "sha256"
    CRC32 = "crc32"
    CRC32C = "crc32c"
    CRC64NVME = "crc64nvme"
    BLAKE3 = "blake3"


class EvidenceLevel(IntEnum):
    """How the content of an item is known, weakest first."""

    LISTED = 1
    """The store's index has the key with this size; nothing is known of its bytes."""
    RECORDED = 2
    """A store recorded a hash of the whole object when it was written."""
    READ = 3
    """The bytes were read back and hashed."""


@dataclass(frozen=True, slots=True)
class ContentHash:
    """A hash over all bytes of one object."""

    algorithm: HashAlgorithm
    digest: bytes


@dataclass(frozen=True, slots=True)
class Item:
    """One version of a key.

    `version` is the source's, empty where only current versions are items. `content`
    is None where no hash is known by the profile's algorithm. `properties` is the
    digest of metadata, tags and headers, empty where the profile leaves them out.
    """

    key: str
    size_bytes: int
    content: bytes | None = None
    properties: bytes = b""
    version: str = ""
    is_delete_marker: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """What counts as equal, and the secret that keys the IDs.

    `algorithm` is None where only keys and sizes are compared. `properties` names the
    groups of properties that items cover, sorted.
    """

    secret: bytes
    algorithm: HashAlgorithm | None = None
    properties: tuple[str, ...] = ("headers", "metadata", "tags")

    def __post_init__(self) -> None:
        assert len(self.secret) == SECRET_BYTES

    @property
    def digest(self) -> bytes:
        """16 bytes that differ between profiles that would give different IDs."""
        name = self.algorithm.value if self.algorithm else ""
        text = f"treefold-profile-1 {name} {','.join(self.properties)}"
        return hashlib.blake2b(text.encode(), key=self.secret, digest_size=ID_BYTES).digest()


class ItemHasher:
    """Gives items their IDs. Threads may share one.

    An ID is 6 bytes of BLAKE2b over key and version with the person `key`, 6 bytes over
    the canonical bytes with the person `item`, both keyed by the secret, and 4 bytes of
    `check_bits`. Each hashed field follows its length in 4 bytes, big-endian.
    """

    def __init__(self, profile: Profile) -> None:
        self._key = _keyed(profile.secret, b"key", KEY_HASH_BYTES)
        self._item = _keyed(profile.secret, b"item", HASHES_BYTES - KEY_HASH_BYTES)
        self._root = _keyed(profile.secret, b"root", ROOT_DIGEST_BYTES)

    def hashes(self, item: Item) -> bytes:
        """The ID without its check, HASHES_BYTES; `ids_from_hashes` adds the check to
        many at once.
        """
        key, whole = self._key.copy(), self._item.copy()
        key.update(_joined(item.key.encode(), item.version.encode()))
        whole.update(canonical_bytes(item))
        return key.digest() + whole.digest()

    def key_hash(self, key: bytes, version: bytes) -> int:
        """The 48 bits that depend on key and version only."""
        digest = self._key.copy()
        digest.update(_joined(key, version))
        return int.from_bytes(digest.digest(), "big")

    def id(self, item: Item) -> ItemId:
        """The 16 bytes that stand for this item."""
        hashes = self.hashes(item)
        high, low = int.from_bytes(hashes[:8], "big"), int.from_bytes(hashes[8:], "big") << 32
        return ItemId(hashes + check_bits(high, low).to_bytes(4, "big"))

    def root_digest(self, job: bytes, count: int, total: int) -> bytes:
        """16 bytes that tell nothing of a root to those who do not hold the same."""
        digest = self._root.copy()
        digest.update(_joined(job, count.to_bytes(8, "big"), total.to_bytes(ID_BYTES, "big")))
        return digest.digest()


def mix(word: int) -> int:
    """A permutation of 64-bit words in which each bit depends on all bits."""
    word = (word ^ (word >> 30)) * MIX_FIRST & WORD_MASK
    word = (word ^ (word >> 27)) * MIX_SECOND & WORD_MASK
    return word ^ (word >> 31)


def check_bits(high: int, low: int) -> int:
    """The last 32 bits of the ID that begins with `high` and the upper half of `low`.
    They are not linear in the others, so that the xor of some IDs is none.
    """
    return mix(high ^ mix(((low >> 32) + MIX_STEP) & WORD_MASK)) & CHECK_MASK


def canonical_bytes(item: Item) -> bytes:
    """The item as bytes, equal for equal items only: each field after its length."""
    content = b"\0" if item.content is None else b"\1" + item.content
    fields = (
        item.key.encode(),
        item.version.encode(),
        bytes([item.is_delete_marker]),
        item.size_bytes.to_bytes(8, "big"),
        content,
        item.properties,
    )
    return _joined(*fields)


def properties_digest(*groups: tuple[tuple[str, str], ...]) -> bytes:
    """16 bytes over groups of names and values, each sorted by name."""
    hasher = hashlib.blake2b(digest_size=PROPERTIES_DIGEST_BYTES)
    for group in groups:
        assert list(group) == sorted(group)
        hasher.update(len(group).to_bytes(4, "big"))
        for text in (text.encode() for pair in group for text in pair):
            hasher.update(len(text).to_bytes(4, "big") + text)
    return hasher.digest()


def _joined(*fields: bytes) -> bytes:
    return b"".join([len(field).to_bytes(4, "big") + field for field in fields])


def _keyed(secret: bytes, person: bytes, size_bytes: int) -> "hashlib.blake2b":
    return hashlib.blake2b(key=secret, person=person, digest_size=size_bytes)
