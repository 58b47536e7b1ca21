"""Which of two objects of one key counts, where both sides are written to (OZ-158).

Each object is judged by the write that it comes from, not by when it was copied. The
order of writes is total and the same for everybody, so that buckets that replicate to
each other come to rest. What a client wrote over an object that the target still has is
newer whatever the clocks say: it had seen it. An absence has no time. It counts as a
deletion where the target is known to have had the object, or some version before it.
"""

from dataclasses import dataclass
from enum import Enum

from replicator.origin import Origin

# A syncer that deletes looks at the source first, and what a client writes meanwhile
# may be older than the deletion. Requests do not take that long.
DELETE_MARGIN_MS = 60_000


class Standing(Enum):
    """How the source's object stands to what the target has."""

    NEWER = "newer"
    OLDER = "older"
    SUPERSEDED = "superseded"
    """Only the target has changed, which the other direction brings here. If none does,
    it is NEWER or OLDER by its rank.
    """


@dataclass(frozen=True, slots=True)
class KeySides:
    """What is known of a key at both sides; `target` is None where it has no object.

    `source_was_seen` and `target_was_seen`: that side has what it had when both were
    found equal. `agreed` is the digest of the properties then, empty if unknown.
    `target_bucket` is what marks call the target.
    """

    source: Origin
    target: Origin | None
    target_bucket: str
    source_was_seen: bool
    target_was_seen: bool
    agreed: bytes = b""

    def standing(self) -> Standing:
        """Whether the source's object counts."""
        source, target = self.source, self.target
        if target is None:
            was_there = self.source_was_seen or source.bucket == self.target_bucket
            return Standing.SUPERSEDED if was_there else Standing.NEWER
        if source.rank == target.rank:
            return self._of_one_write(target)
        if self.target_was_seen:
            is_ours = self.source_was_seen or not source.is_copy
            return Standing.NEWER if is_ours else self.by_rank()
        return Standing.SUPERSEDED if self.source_was_seen else self.by_rank()

    def by_rank(self) -> Standing:
        """The standing where nothing tells who has seen what."""
        if self.target is None or wins(self.source, self.target):
            return Standing.NEWER
        return Standing.OLDER

    def _of_one_write(self, target: Origin) -> Standing:
        """Tags and ACLs change without a time."""
        ours, theirs = self.source.properties, target.properties
        if theirs in (self.agreed, ours):
            return Standing.NEWER
        return Standing.SUPERSEDED if ours == self.agreed else self.by_rank()


def wins(source: Origin, target: Origin) -> bool:
    """Whether the source's object is of the newer write: the later one, of two from one
    time the larger, then the one with the larger ETag. Of one write it is the object
    with the larger digest of its properties. Both directions choose the same one.
    """
    return (source.rank, source.properties) > (target.rank, target.properties)


def delete_wins(time_ms: int, target: Origin, source_bucket: str) -> bool:
    """Whether a deletion that the source's log records at a time takes an object that
    the source was not seen with. It does if the source had it, or some version of it;
    what the target's clients wrote has to be older by a margin. An unknown time is 0.
    """
    if target.is_copy:
        return target.bucket == source_bucket or time_ms > target.written_ms
    return time_ms > target.written_ms + DELETE_MARGIN_MS
