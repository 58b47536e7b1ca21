"""What a store says of a bucket as a whole: layout, quota, who may write.

Only some stores know such things. None is what a store does not have, or did not say.
"""

from dataclasses import dataclass
from typing import Protocol

# Rights that change what a bucket holds, as Ozone names them.
_WRITING = frozenset({"ALL", "WRITE", "CREATE", "DELETE"})


@dataclass(frozen=True, slots=True)
class BucketGrant:
    """Rights of somebody in a bucket. `kind` is USER, GROUP, WORLD, ANONYMOUS or
    CLIENT_IP, and rights are as Ozone names them, sorted. One that `is_default` counts
    for what is made in the bucket from then on, not for the bucket.
    """

    kind: str
    name: str
    rights: tuple[str, ...]
    is_default: bool = False

    def __post_init__(self) -> None:
        assert list(self.rights) == sorted(set(self.rights))

    @property
    def may_write(self) -> bool:
        """Whether whoever has it can change objects."""
        return not self.is_default and not _WRITING.isdisjoint(self.rights)

    @property
    def grantee(self) -> tuple[str, str, bool]:
        """Who has the rights, and for what; grants of a bucket are sorted by it."""
        return self.kind, self.name, self.is_default

    def __str__(self) -> str:
        scope = "default " if self.is_default else ""
        return f"{scope}{self.kind.lower()} {self.name}: {', '.join(self.rights)}"


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
    `encryption_key` is the name of a key, empty where nothing is encrypted.
    """

    layout: str | None = None
    default_replication: str | None = None
    quota: BucketQuota | None = None
    owner: str | None = None
    grants: tuple[BucketGrant, ...] | None = None
    is_versioned: bool | None = None
    has_snapshots: bool | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    encryption_key: str | None = None

    def __post_init__(self) -> None:
        assert self.grants is None or list(self.grants) == sorted(
            self.grants, key=lambda one: one.grantee
        )
        assert list(self.metadata) == sorted(set(self.metadata))


class BucketDescriber(Protocol):
    """Describes one bucket."""

    def facts(self) -> BucketFacts:
        """The bucket as it is now.

        Raises:
            StoreError: the store did not say.
        """
