"""Is all that the clients of a failed-over target wrote back at the source? (OZ-151)

The source may have keys that the target lacks: they were not replicated in time, or
were deleted at the target before the way back began, which no store tells apart. They
stay, and are named. Of a key that both sides changed the newer object counts, and the
other one is a conflict that is named.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from proof.item import EvidenceLevel
from replicator.syncer.conflict import wins
from replicator.verify import KeyDifferenceKind, VerifiedKey

# Keys of each kind that are named; all are counted.
NAMED_MAX = 1_000


@dataclass(slots=True)
class KeyTally:
    """How many keys there are, and the first ones."""

    count: int = 0
    named: tuple[str, ...] = ()

    def add(self, key: str) -> None:
        """Count a key."""
        self.count += 1
        if self.count <= NAMED_MAX:
            self.named = (*self.named, key)


@dataclass(frozen=True, slots=True)
class WayBackReport:
    """What a comparison of target and source has shown. `lacking` keys are not back:
    missing at the source, older there, damaged, or changed meanwhile. `kept` are newer
    at the source, `only_at_source` are not at the target. `unproven` keys are known by
    name and size alone.
    """

    equal: int
    unproven: int
    lacking: KeyTally
    kept: KeyTally
    only_at_source: KeyTally

    @property
    def is_back(self) -> bool:
        """Whether all that the target has is at the source, or something newer is."""
        return not self.lacking.count


def way_back(keys: Iterable[VerifiedKey]) -> WayBackReport:
    """Judge a verification of the old source against the failed-over target, which is
    the source of the verification.
    """
    equal = unproven = 0
    lacking, kept, only = KeyTally(), KeyTally(), KeyTally()
    for one in keys:
        if one.is_unsettled:
            lacking.add(one.key)
            continue
        match one.kind:
            case None:
                equal += 1
                unproven += one.level is EvidenceLevel.LISTED
            case KeyDifferenceKind.EXTRA:
                only.add(one.key)
            case KeyDifferenceKind.CHANGED if _is_newer_at_source(one):
                kept.add(one.key)
            case _:
                lacking.add(one.key)
    return WayBackReport(equal, unproven, lacking, kept, only)


def _is_newer_at_source(one: VerifiedKey) -> bool:
    assert one.source is not None
    assert one.target is not None
    return not wins(one.source, one.target)
