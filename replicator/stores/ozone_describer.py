"""A bucket of Ozone as a whole: what its OM says of it, and another made like it."""

from contextlib import closing

from ozone.manager import ManagerClient
from ozone.manager_messages import bucket_to
from ozone.manager_values import BucketLayout, ManagerBucket
from replicator.stores.bucket_facts import BucketFacts, BucketGrant, BucketQuota
from replicator.stores.errors import UnsupportedObjectError
from replicator.stores.ozone_bucket import OzoneBucket, OzoneLocation, translated
from runtime.errors import UsageError
from runtime.s3_account import find_account

# Of Ozone's rights, by the letters in which the OM's values have them.
_RIGHTS = {
    "r": "READ",
    "w": "WRITE",
    "c": "CREATE",
    "l": "LIST",
    "d": "DELETE",
    "x": "READ_ACL",
    "y": "WRITE_ACL",
    "a": "ALL",
    "n": "NONE",
}
_LETTERS = {name: letter for letter, name in _RIGHTS.items()}
_DEFAULT_SCOPE = "default:"


class OzoneDescriber:
    """See BucketDescriber."""

    def __init__(self, bucket: OzoneBucket) -> None:
        self._bucket = bucket

    def facts(self) -> BucketFacts:
        """See BucketDescriber. Without a replication of its own a bucket has that of
        its service, which the OM does not tell.
        """
        manager, place = self._bucket.manager, self._bucket.place
        with translated(f"cannot look at the bucket {'/'.join(place)}"):
            found = manager.bucket(*place)
            has_snapshots = manager.has_snapshots(*place)
        return BucketFacts(
            layout=found.layout.name,
            default_replication=found.replication or None,
            quota=BucketQuota(
                found.quota_bytes, found.quota_names, found.used_bytes, found.used_names
            ),
            owner=found.owner or None,
            grants=_grants(found.acl),
            is_versioned=found.is_versioned,
            has_snapshots=has_snapshots,
            metadata=found.metadata,
            encryption_key=found.encryption_key,
        )


def create_ozone_bucket(address: str, facts: BucketFacts) -> None:
    """Make the bucket of an address with these properties; its volume must exist.

    Raises:
        UsageError: the address is invalid, or has a prefix.
        ConfigError: there are no credentials, or an OM is off loopback and the address
            has no `insecure=true`.
        UnsupportedObjectError: Ozone has no such properties.
        StoreError: the OM refused, or did not answer.
    """
    location = OzoneLocation.parse(address)
    if location.prefix:
        raise UsageError(f"{address!r} has a prefix: only a whole bucket can be made")
    wanted = _manager_bucket(location, facts)
    try:
        bucket_to(wanted, owner="")
    except ValueError as error:
        raise UnsupportedObjectError(f"{location.address}: {error}") from error
    user = find_account(location.settings).credentials.get_frozen_credentials().access_key
    with (
        closing(ManagerClient(location.managers, user=user, insecure=location.insecure)) as manager,
        translated(f"cannot make the bucket {location.volume}/{location.bucket}"),
    ):
        manager.create_bucket(wanted)
        # The OM grants all to whoever makes a bucket.
        if facts.grants is not None:
            manager.set_acl(location.volume, location.bucket, "", wanted.acl)


def _manager_bucket(location: OzoneLocation, facts: BucketFacts) -> ManagerBucket:
    layout = facts.layout or "none"
    if layout not in BucketLayout.__members__:
        raise UnsupportedObjectError(
            f"{location.address}: the layout {layout} is not one of Ozone's",
            hint="The properties are of another kind of store.",
        )
    quota = facts.quota or BucketQuota()
    return ManagerBucket(
        volume=location.volume,
        bucket=location.bucket,
        layout=BucketLayout[layout],
        object_id=0,
        created_ms=0,
        owner=facts.owner or "",
        acl=tuple(map(_acl_entry, facts.grants or ())),
        replication=facts.default_replication or "",
        quota_bytes=quota.bytes_max,
        quota_names=quota.objects_max,
        is_versioned=facts.is_versioned or False,
        encryption_key=facts.encryption_key or "",
        metadata=facts.metadata,
    )


def _grants(acl: tuple[tuple[str, str], ...]) -> tuple[BucketGrant, ...]:
    found = []
    for grantee, letters in acl:
        kind, _, name = grantee.removeprefix(_DEFAULT_SCOPE).partition(":")
        rights = tuple(sorted(_RIGHTS[letter] for letter in letters))
        is_default = grantee.startswith(_DEFAULT_SCOPE)
        found.append(BucketGrant(kind.upper().replace("-", "_"), name, rights, is_default))
    return tuple(sorted(found, key=lambda one: one.grantee))


def _acl_entry(grant: BucketGrant) -> tuple[str, str]:
    scope = _DEFAULT_SCOPE if grant.is_default else ""
    letters = "".join(_LETTERS.get(right, "?") for right in grant.rights)
    return f"{scope}{grant.kind.lower().replace('_', '-')}:{grant.name}", letters
