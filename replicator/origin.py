"""Which write of a client an object is: where it was made, and when.

A copy has the time of its writing, and often another ETag. So each copy of a
replication carries the place, time, size and ETag of the write that it comes from, in
user metadata: its target may take writes too, at once or after a failover. Every copy
of one write then has one rank, in whichever bucket it is compared. The mark holds for
one key and size: an object that a client makes of a copy, with the copy's metadata, is
a write of its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from replicator.hashing import blake3_of
from replicator.pair import bucket_identity
from replicator.stores.port import ObjectFacts, ObjectProperties, Store

# No client may use this name of user metadata; it never counts as a property.
ORIGIN_NAME = "treefold-origin"
_MARK = re.compile(r"(\d{1,15})\.([0-9a-f]{16})\.([0-9a-f]{8})\.(\d{1,16})\.([0-9A-Za-z-]{0,80})")
_PLAIN_ETAG = re.compile(r"[0-9A-Za-z-]{0,80}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The write that an object comes from. `bucket` is the digest of an address,
    `written_ms` what the store of that bucket has recorded. `properties` is the digest
    of what the object has now.
    """

    bucket: str
    written_ms: int
    size_bytes: int
    etag: str
    is_copy: bool
    properties: bytes = b""

    @property
    def rank(self) -> tuple[int, int, str]:
        """Orders all writes of a key: by time, then size, then ETag (OZ-158)."""
        return self.written_ms, self.size_bytes, self.etag


def bucket_digest(address: str) -> str:
    """What marks call a bucket."""
    return blake3_of(bucket_identity(address).encode()).hex()[:16]


def unmarked(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """User metadata without a mark."""
    return tuple(one for one in metadata if one[0] != ORIGIN_NAME)


class OriginMarks:
    """Reads the origins of objects of one store, and marks copies of them."""

    def __init__(
        self,
        store: Store,
        digest: Callable[[ObjectProperties], bytes],
        *,
        may_leave_out: bool = False,
    ) -> None:
        """`digest` is that of the properties that cross. With `may_leave_out` a copy
        has no mark where the target has no room for it.
        """
        self.may_leave_out = may_leave_out
        self.bucket = bucket_digest(store.address)
        self._reader = store.reader
        self._digest = digest
        # Some of its answers have no ms, so that those of others must not count.
        self._step_ms = 1000 if store.capabilities.tells_whole_seconds else 1

    def read(self, facts: ObjectFacts) -> Origin:
        """The origin of just this object.

        Raises:
            PreconditionFailedError: the object is another one by now.
            ObjectMissingError: the object does not exist.
            StoreError: the store did not say.
        """
        if not facts.modified_ms:
            facts = self._reader.facts(facts.key) or facts
        properties = self._reader.properties_of(facts)
        return replace(self.of(facts, properties), properties=self._digest(properties))

    def of(self, facts: ObjectFacts, properties: ObjectProperties) -> Origin:
        """The origin of an object with all of its properties."""
        found = _MARK.fullmatch(dict(properties.metadata).get(ORIGIN_NAME, ""))
        if found is not None:
            written, bucket, key, size, etag = found.groups()
            if (key, int(size)) == (_key_digest(facts.key), facts.size_bytes):
                return Origin(bucket, int(written), int(size), etag, is_copy=True)
        written_ms = facts.modified_ms // self._step_ms * self._step_ms
        etag = _plain(facts.etag)
        return Origin(self.bucket, written_ms, facts.size_bytes, etag, is_copy=False)

    def marked(
        self, facts: ObjectFacts, found: ObjectProperties, crossing: ObjectProperties
    ) -> ObjectProperties:
        """What a copy of an object gets: the part of its properties that crosses, and
        the mark of its origin.
        """
        one = self.of(facts, found)
        key = _key_digest(facts.key)
        mark = f"{one.written_ms}.{one.bucket}.{key}.{one.size_bytes}.{one.etag}"
        metadata = (*unmarked(crossing.metadata), (ORIGIN_NAME, mark))
        return replace(crossing, metadata=tuple(sorted(metadata)))


def _key_digest(key: str) -> str:
    return blake3_of(key.encode()).hex()[:8]


def _plain(etag: str) -> str:
    """An ETag as metadata can carry it."""
    bare = etag.strip('"')
    return bare if _PLAIN_ETAG.fullmatch(bare) else blake3_of(bare.encode()).hex()
