"""Is all that the clients of a failed-over target wrote back at the source? (OZ-151)

The source may have keys that the target lacks: they were not replicated in time, or
were deleted at the target before the way back began, which no store tells apart. They
stay, and are named. Of a key that both sides changed the object of the newer write
counts, whenever it was copied, and the other one is a conflict that is named.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proof.item import EvidenceLevel
from replicator.crossing import Crossing
from replicator.origin import OriginMarks
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError
from replicator.stores.port import Store
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


def way_back(
    keys: Iterable[VerifiedKey], is_newer_at_source: Callable[[VerifiedKey], bool]
) -> WayBackReport:
    """Judge a verification of the old source against the failed-over target, which is
    the source of the verification. `is_newer_at_source` is asked of each changed key.
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
            case KeyDifferenceKind.CHANGED if is_newer_at_source(one):
                kept.add(one.key)
            case _:
                lacking.add(one.key)
    return WayBackReport(equal, unproven, lacking, kept, only)


def newer_at_source(failed_over: Store, source: Store) -> Callable[[VerifiedKey], bool]:
    """Tells of a key that both stores have whether the old source's object counts. One
    that is another object by now, or gone, does not.
    """
    digest = Crossing.between(failed_over.capabilities, source.capabilities).digest
    theirs, ours = OriginMarks(failed_over, digest), OriginMarks(source, digest)

    def is_newer(one: VerifiedKey) -> bool:
        assert one.source is not None
        assert one.target is not None
        try:
            return not wins(theirs.read(one.source), ours.read(one.target))
        except (ObjectMissingError, PreconditionFailedError):
            return False

    return is_newer
