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
# Of the secret key; BLAKE2b takes up to 64.
SECRET_BYTES = 32
PROPERTIES_DIGEST_BYTES = 16


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

    `algorithm` is None where only keys and sizes are compared.
    """

    secret: bytes
    algorithm: HashAlgorithm | None = None
    compares_properties: bool = True

    def __post_init__(self) -> None:
        assert len(self.secret) == SECRET_BYTES

    @property
    def digest(self) -> bytes:
        """16 bytes that differ between profiles that would give different IDs."""
        name = self.algorithm.value if self.algorithm else ""
        text = f"treefold-profile-1 {name} {int(self.compares_properties)}"
        return hashlib.blake2b(text.encode(), key=self.secret, digest_size=ID_BYTES).digest()


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
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def properties_digest(*groups: tuple[tuple[str, str], ...]) -> bytes:
    """16 bytes over groups of names and values, each sorted by name."""
    hasher = hashlib.blake2b(digest_size=PROPERTIES_DIGEST_BYTES)
    for group in groups:
        assert list(group) == sorted(group)
        hasher.update(len(group).to_bytes(4, "big"))
        for text in (text.encode() for pair in group for text in pair):
            hasher.update(len(text).to_bytes(4, "big") + text)
    return hasher.digest()
