"""What a probe has found out of a store, kept for the process that opens it next.

A probe asks some forty questions. Across a long link they take seconds, which a syncer
that takes over from a dead one does not have. It takes the word of that syncer instead,
who relied on it until it died.

The word counts for the same bucket at the same endpoint, by the same account, and for a
day: a store may become another one behind its address. The first answers of the store,
which tell its kind and whether it keeps versions, are asked for in any case.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from replicator.hashing import blake3_of
from replicator.stores.s3_behaviour import S3Behaviour
from runtime.rate_limit import Clock

if TYPE_CHECKING:
    from replicator.stores.s3_bucket import S3Bucket

# A syncer asks anew twice as often, so that its word is never too old.
PROBE_AGE_MAX_S = 86_400.0
# What a master keeps of one store at most.
PROBE_CHARACTERS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class _Record:
    store: str
    probed_ms: int
    behaviour: S3Behaviour


_RECORDS = TypeAdapter(_Record)


class ProbeMemory:
    """What is known of one store by earlier probes. `text` is printable ASCII of at
    most PROBE_CHARACTERS_MAX characters. It is empty where nothing is known, and for a
    kind of store that is not probed. It holds no secret.
    """

    def __init__(self, clock: Clock, text: str = "") -> None:
        """`text` is what an earlier memory had; what is no such text counts for
        nothing.
        """
        self._clock = clock
        self.text = text

    def behaviour_of(
        self, bucket: "S3Bucket", seen: S3Behaviour, ask: Callable[[], S3Behaviour]
    ) -> S3Behaviour:
        """What the store does: as it is known, else by asking. `seen` is what its first
        answers have shown.

        Raises:
            StoreError: raised by `ask`.
        """
        store, now_ms = _identity(bucket, seen), self._clock.now_ms()
        known, age_max_ms = self._record, PROBE_AGE_MAX_S * 1000
        is_same = known is not None and known.store == store
        # The clock of the one who asked may be ahead of ours.
        if known is not None and is_same and abs(now_ms - known.probed_ms) < age_max_ms:
            return known.behaviour
        found = ask()
        document = _RECORDS.dump_python(_Record(store, now_ms, found), mode="json")
        text = json.dumps(document, separators=(",", ":"))
        self.text = text if len(text) <= PROBE_CHARACTERS_MAX else ""
        return found

    def agrees(self, other: "ProbeMemory") -> bool:
        """Whether both know the same of the same store, whenever it was asked."""
        ours, theirs = self._record, other._record
        if ours is None or theirs is None:
            return ours is theirs
        return (ours.store, ours.behaviour) == (theirs.store, theirs.behaviour)

    @property
    def _record(self) -> _Record | None:
        try:
            return _RECORDS.validate_json(self.text)
        except ValidationError:
            return None


def _identity(bucket: "S3Bucket", seen: S3Behaviour) -> str:
    """Whom the questions were asked, and which questions."""
    client = bucket.client
    parts = [client.endpoint_url, client.access_key, bucket.bucket, bucket.scratch_bucket]
    parts += [seen.kind, str(seen.keeps_versions), *(one.name for one in fields(S3Behaviour))]
    return blake3_of(json.dumps(parts).encode()).hex()[:32]
