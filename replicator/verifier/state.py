"""The state folder of a verifier: a lock, the profile, and the index of its bucket.

The profile has a secret, made once: whoever knows it could make items whose IDs cancel
each other.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from proof.item import SECRET_BYTES, HashAlgorithm, Profile
from proof.stored_index import StoredIndex
from replicator.refresh import IndexedBucket, groups_of
from replicator.stores.address import canonical_address, check_outside
from replicator.stores.port import Store
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import ConfigError, UsageError
from runtime.folder_lock import FolderLock
from runtime.rate_limit import Clock

# The newest epoch of each pair of buckets that a syncer has written by.
EPOCHS_FILE = "epochs.json"
_PROFILE_FILE = "profile.json"


@contextmanager
def locked_state(folder: Path, bucket: str) -> Iterator[Path]:
    """The state folder at a path, made if there is none; this process alone has it
    until the end. `bucket` is the address of what it is the state of.

    Raises:
        UsageError: it is inside that bucket.
        BusyError: another process uses it.
        DiskError: it cannot be made.
    """
    folder = folder.absolute()
    check_outside(folder, bucket)
    Disk().make_folder(folder)
    with ExitStack() as opened:
        opened.callback(FolderLock(folder, "treefold verifier").release)
        yield folder


@contextmanager
def open_index(
    folder: Path,
    store: Store,
    clock: Clock,
    *,
    bucket: str,
    algorithm: HashAlgorithm | None,
    has_properties: bool = True,
) -> Iterator[IndexedBucket]:
    """The index of a store in a locked state folder. `bucket` is the store's address,
    `algorithm` None for that of the folder, or BLAKE3 in a new one. Without
    `has_properties` the items of a new folder cover no properties.

    Raises:
        ConfigError: the state belongs to another bucket or algorithm.
        IndexRefusedError, IndexDamagedError, DatabaseError, DiskError: it cannot be
            used.
    """
    disk = Disk()
    properties = groups_of(store.capabilities) if has_properties else ()
    profile = _profile(folder, disk, canonical_address(bucket), algorithm, properties)
    index = StoredIndex(folder / "index", profile, disk=disk)
    try:
        yield IndexedBucket(store, index, profile, clock)
    finally:
        index.close()


def _profile(
    folder: Path,
    disk: Disk,
    bucket: str,
    algorithm: HashAlgorithm | None,
    properties: tuple[str, ...],
) -> Profile:
    path = folder / _PROFILE_FILE
    if disk.length(path) is None:
        secret = secrets.token_bytes(SECRET_BYTES)
        profile = Profile(secret, algorithm or HashAlgorithm.BLAKE3, properties)
        disk.replace(path, _encoded(profile, bucket), private=True)
        return profile
    data = disk.read(path)
    try:
        held = parse_json(data)
        known, kept_bucket = HashAlgorithm(held["algorithm"]), canonical_address(held["bucket"])
        names = tuple(held["properties"])
        if not all(isinstance(name, str) and name.isascii() for name in names):
            raise TypeError("a group of properties has no name")
        profile = Profile(bytes.fromhex(held["secret"]), known, names)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        UsageError,
    ) as error:
        raise ConfigError(
            f"{path}: is damaged",
            hint="Restore it, or begin with an empty state folder: the index is built anew.",
            path=str(path),
        ) from error
    if kept_bucket != bucket or algorithm not in (None, known):
        raise ConfigError(
            f"{folder} is the state of {kept_bucket} by {known.value}",
            hint="Choose another state folder.",
            path=str(folder),
        )
    return profile


def _encoded(profile: Profile, bucket: str) -> bytes:
    assert profile.algorithm is not None
    document = {
        "bucket": bucket,
        "secret": profile.secret.hex(),
        "algorithm": profile.algorithm.value,
        "properties": list(profile.properties),
    }
    return json.dumps(document).encode()
