"""What a store says of a bucket as a whole: layout, quota, who may write.

Only some stores know such things. None is what a store does not have, or did not say.
"""

from dataclasses import dataclass
from typing import Protocol

# Rights that change what a bucket holds, as Ozone names them.
_WRITING = frozenset({"ALL", "WRITE", "CREATE", "DELETE"})


@dataclass(frozen=True, slots=True)
class BucketGrant:
    """Rights of somebody in a bucket. `kind` is USER, GROUP, WORLD or ANONYMOUS, and
    rights are as Ozone names them, sorted.
    """

    kind: str
    name: str
    rights: tuple[str, ...]

    def __post_init__(self) -> None:
        assert list(self.rights) == sorted(set(self.rights))

    @property
    def may_write(self) -> bool:
        """Whether whoever has it can change objects."""
        return not _WRITING.isdisjoint(self.rights)

    def __str__(self) -> str:
        return f"{self.kind.lower()} {self.name}: {', '.join(self.rights)}"


@dataclass(frozen=True, slots=True)
class BucketQuota:
    """How much a bucket may hold, and how much it does; no maximum is no limit."""

    bytes_max: int | None = None
    objects_max: int | None = None
    used_bytes: int = 0
    used_objects: int = 0


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """A bucket. `default_replication` is such as RATIS/THREE. `has_snapshots` is
    whether its service makes snapshots, where there is such a thing.
    """

    layout: str | None = None
    default_replication: str | None = None
    quota: BucketQuota | None = None
    owner: str | None = None
    grants: tuple[BucketGrant, ...] | None = None
    is_versioned: bool | None = None
    has_snapshots: bool | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        assert self.grants is None or list(self.grants) == sorted(
            self.grants, key=lambda one: (one.kind, one.name)
        )
        assert list(self.metadata) == sorted(set(self.metadata))


class BucketDescriber(Protocol):
    """Describes one bucket."""

    def facts(self) -> BucketFacts:
        """The bucket as it is now.

        Raises:
            StoreError: the store did not say.
        """
