"""One bucket of Ozone below one prefix: its names, and what errors of its OM mean.

Facts come from the Ozone Manager, bytes cross through an S3 gateway. Both know the
bucket, by its own name or by that of a link in the volume that gateways show.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from merkle.errors import ReconcileError
from ozone.errors import (
    LogGapError,
    LogTrimmedError,
    ManagerBusyError,
    ManagerError,
    ManagerExistsError,
    ManagerMissingError,
    ManagerUnavailableError,
    WriteBatchError,
)
from ozone.key_checksum import DatanodeRecords
from ozone.manager import ManagerClient
from ozone.manager_messages import acl_to
from ozone.manager_values import BucketLayout, KeyFacts, ManagerBucket
from proof.item import ContentHash, HashAlgorithm
from replicator.stores.errors import (
    FeedGapError,
    ObjectMissingError,
    PositionTrimmedError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
    StoreUnavailableError,
    UnsupportedObjectError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.stores.s3_bucket import SCRATCH_PREFIX, is_md5
from runtime.errors import ConfigError, RemoteProtocolError, UsageError
from runtime.s3_account import S3Settings
from runtime.setting_values import split_address

SNAPSHOT_ROOT = ".snapshot/"
_HINT = "Write it as ozone://OM:8981/VOLUME/BUCKET?s3=http://GATEWAY:9878."
_S3_PARAMETERS = ("region", "profile")
_PARAMETERS = ("s3", "s3_bucket", "insecure", *_S3_PARAMETERS)
# Each look at a new object's ACL costs a sixth of what a copy of 4 KiB does.
NEW_ACL_S = 10.0
_FOLDERS_MAX = 1000
# A link to a link and so on; the OM itself refuses circles.
_LINKS_MAX = 10
# The first match counts.
_KINDS: tuple[tuple[type[ReconcileError], type[StoreError]], ...] = (
    (ManagerUnavailableError, StoreUnavailableError),
    (ManagerBusyError, StoreUnavailableError),
    (ManagerMissingError, ObjectMissingError),
    (ManagerExistsError, PreconditionFailedError),
    (ManagerError, StoreError),
    (LogTrimmedError, PositionTrimmedError),
    (LogGapError, FeedGapError),
    (WriteBatchError, FeedGapError),
    (RemoteProtocolError, StoreError),
)


@dataclass(frozen=True, slots=True)
class OzoneLocation:
    """The parts of `ozone://OM:PORT,…/VOLUME/BUCKET/PREFIX?s3=URL&…`; `prefix` is empty
    or ends with a slash. `s3_bucket` is the name at the gateway.
    """

    managers: tuple[str, ...]
    volume: str
    bucket: str
    prefix: str
    s3_bucket: str
    settings: S3Settings
    insecure: bool = False

    @classmethod
    def parse(cls, address: str) -> "OzoneLocation":
        """The parts of an address; its prefix is percent-encoded where it must be.

        Raises:
            UsageError: it is no such address.
        """
        try:
            parts = urlsplit(address)
            given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
        except ValueError as error:
            raise UsageError(f"{address!r} is not an address: {error}", hint=_HINT) from error
        volume, _, rest = parts.path.removeprefix("/").partition("/")
        bucket, _, prefix = rest.partition("/")
        managers = tuple(parts.netloc.split(","))
        is_whole = bool(parts.netloc and volume and bucket and given.get("s3"))
        if parts.scheme != "ozone" or not is_whole or "@" in parts.netloc or parts.fragment:
            raise UsageError(f"{address!r} is not the address of a bucket of Ozone", hint=_HINT)
        unknown = sorted(set(given) - set(_PARAMETERS))
        if unknown:
            raise UsageError(
                f"{address!r} has unknown parameters: {', '.join(unknown)}",
                hint=f"Known are {', '.join(_PARAMETERS)}.",
            )
        if given.get("insecure", "true") != "true":
            raise UsageError(f"{address!r}: insecure is true, or left out")
        try:
            for one in managers:
                split_address(one)
        except ConfigError as error:
            raise UsageError(f"{address!r}: {error.message}", hint=_HINT) from error
        prefix = unquote(prefix)
        settings = {name: given[name] for name in _S3_PARAMETERS if name in given}
        return cls(
            managers=managers,
            volume=unquote(volume),
            bucket=unquote(bucket),
            prefix=prefix if not prefix or prefix.endswith("/") else prefix + "/",
            s3_bucket=given.get("s3_bucket") or unquote(bucket),
            settings=S3Settings(endpoint_url=given["s3"], **settings),
            insecure="insecure" in given,
        )

    @property
    def address(self) -> str:
        """The address without what only says how to ask."""
        place = f"{quote(self.volume)}/{quote(self.bucket)}/{quote(self.prefix)}".rstrip("/")
        gateway = quote(self.settings.endpoint_url, safe="")
        return f"ozone://{','.join(self.managers)}/{place}?s3={gateway}"


class SeenChanges:
    """The newest change that anything shown by the OM bears, as its place in Raft's
    log. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest = 0

    def note(self, index: int) -> None:
        """Take in the place of a change."""
        if index > self.newest:
            with self._lock:
                self.newest = max(index, self.newest)


class NewObjectAcls:
    """The ACLs that the OM gives to objects that are new, as they were seen lately: a
    bucket, a prefix or a directory has one for what is made in it, which may change at
    any time. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        # By the key without its last part; dicts take and give whole values at once.
        self._seen = dict[str, tuple[tuple[tuple[str, str], ...], float]]()

    def note(self, key: str, acl: tuple[tuple[str, str], ...]) -> None:
        """Take in what an object has that was just made."""
        if len(self._seen) >= _FOLDERS_MAX:
            self._seen = {}
        self._seen[key.rpartition("/")[0]] = acl, self._clock()

    def has(self, key: str, acl: tuple[tuple[str, str], ...]) -> bool:
        """Whether an object that is made under this key has just this ACL."""
        seen = self._seen.get(key.rpartition("/")[0])
        return seen is not None and seen[0] == acl and self._clock() - seen[1] < NEW_ACL_S


@dataclass(frozen=True, slots=True)
class OzoneBucket:
    """A bucket as it is now, or in a snapshot: then names begin with `root`. `records`
    are those of its datanodes. `seen` and `new_acls` are one for all its views.
    """

    manager: ManagerClient
    facts: ManagerBucket
    prefix: str
    root: str = ""
    snapshot_id: str = ""
    records: DatanodeRecords = field(default_factory=partial(DatanodeRecords, insecure=False))
    seen: SeenChanges = field(default_factory=SeenChanges)
    new_acls: NewObjectAcls = field(default_factory=NewObjectAcls)

    @property
    def place(self) -> tuple[str, str]:
        """Volume and bucket, for the OM."""
        return self.facts.volume, self.facts.bucket

    @property
    def is_tree(self) -> bool:
        """Whether names are paths in a tree of directories."""
        return self.facts.layout is BucketLayout.FILE_SYSTEM_OPTIMIZED

    def name(self, key: str) -> str:
        """The full name of a key, for the OM."""
        return f"{self.root}{self.prefix}{key}"

    def relative(self, name: str) -> str | None:
        """A key as the ports see it; None for one of ours, and for one elsewhere."""
        begin = self.root + self.prefix
        if not name.startswith(begin):
            return None
        key = name[len(begin) :]
        return None if not key or key.startswith(SCRATCH_PREFIX) else key

    def key(self, key: str, *, with_datanodes: bool = False) -> KeyFacts | None:
        """A key as the OM has it; None where there is none, or a directory.

        Raises:
            StoreError: the OM did not say.
        """
        name = self.name(key)
        with self.guarded(f"cannot look at {key!r}"):
            found = self.manager.key(*self.place, name, with_datanodes=with_datanodes)
        if found is not None:
            self.seen.note(found.update_id)
        # Of a directory the OM adds a slash; in a snapshot it trims some.
        return found if found is not None and found.name == name else None

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn errors of the OM into those of the ports. What was read of a snapshot
        counts only if it is there, before and after.

        Raises:
            StoreError: whose message begins with `what`.
            SnapshotLostError: the snapshot is gone.
        """
        with translated(what):
            self.check_snapshot()
        try:
            with translated(what):
                yield
        except ReconcileError:
            with translated(what):
                self.check_snapshot()
            raise
        with translated(what):
            self.check_snapshot()

    def check_snapshot(self) -> None:
        """Check that the snapshot is still this one.

        Raises:
            SnapshotLostError: it is deleted, or another one has its name.
            ManagerError: the OM did not say.
        """
        if not self.root:
            return
        name = self.root.removeprefix(SNAPSHOT_ROOT).removesuffix("/")
        found = self.manager.snapshot(*self.place, name)
        if found is None or not found.is_active or found.snapshot_id != self.snapshot_id:
            raise SnapshotLostError(f"the snapshot {name} of {'/'.join(self.place)} is gone")

    def keep_acl(
        self, made: ObjectFacts, properties: ObjectProperties, *, is_new: bool = False
    ) -> None:
        """Give an object that was just written its ACL, unless it has it, or somebody
        else has written the key since. One that `is_new`, where no object was, is not
        looked at if others were lately.

        Raises:
            StoreError: the OM refused, or did not answer.
        """
        acl = properties.acl
        if not (acl or properties.replaces_acl) or (is_new and self.new_acls.has(made.key, acl)):
            return
        found = self.key(made.key)
        if found is None or found.etag != made.etag:
            return
        if is_new:
            self.new_acls.note(made.key, found.acl)
        if found.acl == acl:
            return
        with translated(f"cannot set the ACL of {made.key!r}"):
            self.manager.set_acl(*self.place, self.name(made.key), acl)

    def check_writable(self, key: str) -> None:
        """Refuse a key that the bucket would keep under another name.

        Raises:
            UnsupportedObjectError: naming what it would change.
        """
        if self.facts.layout is BucketLayout.OBJECT_STORE:
            return
        parts = key.split("/")
        # What stands before a colon in the first part is taken for a scheme.
        if any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
            raise UnsupportedObjectError(
                f"the bucket keeps names as paths, and would change {key!r}",
                hint="Copy to a bucket with the layout OBJECT_STORE.",
                key=key,
            )


def facts_of(key: str, found: KeyFacts) -> ObjectFacts:
    """The facts of a key. Its version is the place in Raft's log of its last change,
    which an object has after a change of its tags, too.
    """
    return ObjectFacts(
        key=key,
        size_bytes=found.size_bytes,
        etag=found.etag,
        modified_ms=found.modified_ms,
        version=str(found.update_id),
        hashes=md5_hashes(found.etag),
    )


def properties_of(found: KeyFacts) -> ObjectProperties:
    """Metadata, tags and ACL of a key; names of metadata in lower case, as S3 shows
    them.
    """
    metadata = {name.lower(): value for name, value in found.metadata}
    return ObjectProperties(
        metadata=tuple(sorted(metadata.items())), tags=found.tags, acl=found.acl
    )


def without_acl(properties: ObjectProperties) -> ObjectProperties:
    """What a gateway is given: the OM keeps the ACL.

    Raises:
        UnsupportedObjectError: the ACL is not one of Ozone's.
    """
    try:
        acl_to(properties.acl)
    except ValueError as error:
        raise UnsupportedObjectError(str(error)) from error
    return replace(properties, acl=())


def resolved(manager: ManagerClient, volume: str, bucket: str) -> ManagerBucket:
    """The bucket of a name, whatever links lead to it.

    Raises:
        ManagerError: there is none.
    """
    for _ in range(_LINKS_MAX):
        facts = manager.bucket(volume, bucket)
        if facts.source is None:
            return facts
        volume, bucket = facts.source
    raise ManagerMissingError(f"{volume}/{bucket} is a link to links without end")


def md5_hashes(etag: str) -> tuple[ContentHash, ...]:
    """The gateway's MD5 of an object that came in one request: it computes it itself,
    and files a client's word under another name.
    """
    return (ContentHash(HashAlgorithm.MD5, bytes.fromhex(etag)),) if is_md5(etag) else ()


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn errors of the OM into those of the ports.

    Raises:
        StoreError: whose message begins with `what`.
    """
    try:
        yield
    except tuple(kind for kind, _ in _KINDS) as error:
        kind = next(ours for theirs, ours in _KINDS if isinstance(error, theirs))
        raise kind(f"{what}: {error.message}", hint=error.hint, **error.facts) from error
