"""When a lease is valid, and when it has surely ended.

A syncer counts its lease from when it *sent* the request that renewed it, on a clock
that never jumps (replicator.syncer.lease). The database writes down a later moment, so
the syncer stops first.
The database's clock may jump, though, and a jump forward would end all leases at once.
So a master takes nothing over by that clock alone: besides, it must itself have seen
the record unchanged for as long as the lease lasts, on its own clock that never jumps.
A renewal in between would have changed the version of the record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from replicator.master.records import RecordKey, RecordKind, StoredState, SyncerLease


@dataclass(slots=True)
class RecordAges:
    """How long one master has seen each record unchanged. Not thread-safe."""

    # Version and when it was first seen, in s on a clock that never jumps.
    _seen: dict[RecordKey, tuple[int, float]] = field(default_factory=dict)

    def note(self, state: StoredState, read_s: float, now_s: float) -> Mapping[RecordKey, int]:
        """Take in what was read; returns for each record of a syncer or a state for how
        many ms it is unchanged at least. The read began at `read_s` and ended at
        `now_s`: a version is known to be there at some moment between.
        """
        seen = {
            key: stored.version
            for key, stored in state.records.items()
            if key.kind in (RecordKind.SYNCER, RecordKind.STATE)
        }
        before = self._seen
        self._seen = {
            key: before[key] if key in before and before[key][0] == version else (version, now_s)
            for key, version in seen.items()
        }
        return {key: int((read_s - at_s) * 1000) for key, (_, at_s) in self._seen.items()}


def is_valid(lease: SyncerLease, now_ms: int) -> bool:
    """Whether the holder may still be answered. A clock that went back does not end a
    lease.
    """
    return now_ms < lease.expires_ms


def has_ended(lease: SyncerLease, now_ms: int, unchanged_ms: int) -> bool:
    """Whether its holder surely knows that it has none any more. A clock that went back
    before the renewal says nothing, and how long the record is unchanged says all.
    """
    is_over = now_ms >= lease.expires_ms or now_ms < lease.renewed_ms
    return is_over and unchanged_ms >= lease.duration_ms
