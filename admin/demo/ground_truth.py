"""The damage in a synthetic cluster, and what a sweep of it has to find."""

from dataclasses import dataclass
from enum import Enum

from merkle.comparison import DifferenceKind
from merkle.outcome import Verdict


class DamageKind(Enum):
    """The kind of damage to one container."""

    CORRUPT_CHUNK = "corrupt_chunk"
    MISSING_CHUNK = "missing_chunk"
    MISSING_BLOCK = "missing_block"
    # Deleted on one replica only.
    DELETED_BLOCK = "deleted_block"
    # Different data on one replica that match their own recorded checksum.
    CONFLICTING_CHUNK = "conflicting_chunk"
    # Corrupt on all replicas.
    LOST_CHUNK = "lost_chunk"


@dataclass(frozen=True, slots=True)
class InjectedDamage:
    """One injected damage: `datanodes` have the damaged replicas, `others` the rest.
    `offset` is None for a whole block.
    """

    kind: DamageKind
    container_id: int
    block_id: int
    offset: int | None
    datanodes: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict that a sweep must give to the container."""
        if self.kind is DamageKind.CONFLICTING_CHUNK:
            return Verdict.CONFLICT
        return Verdict.UNRECOVERABLE if self.kind is DamageKind.LOST_CHUNK else Verdict.REPAIRABLE

    @property
    def finding(self) -> tuple[str, int, int, int | None, tuple[str, ...], tuple[str, ...]]:
        """The finding that a sweep must report: kind, container, block, offset,
        lacking, sources.
        """
        kind, lacking, sources = self.kind.value, self.datanodes, self.others
        if self.kind is DamageKind.DELETED_BLOCK:
            lacking, sources = sources, lacking
        elif self.kind is DamageKind.CONFLICTING_CHUNK:
            lacking, sources = (), tuple(sorted((*lacking, *sources)))
        elif self.kind is DamageKind.LOST_CHUNK:
            kind = DifferenceKind.CORRUPT_CHUNK.value
        return kind, self.container_id, self.block_id, self.offset, lacking, sources


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """The damages, and the containers with a treeless replica, both ascending."""

    damages: tuple[InjectedDamage, ...]
    without_tree: tuple[int, ...]
    rows: int
    containers: int
    replicas: int
