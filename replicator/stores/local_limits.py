"""What a local bucket refuses: folders that are none, keys and properties that S3 would
not take.
"""

import os
import re
from pathlib import Path

from replicator.stores.capabilities import CONTENT_HEADERS
from replicator.stores.errors import StoreError, UnsupportedObjectError
from replicator.stores.local_database import DATABASE_FILE, NotABucketError
from replicator.stores.local_view import key_bytes
from replicator.stores.port import ObjectProperties
from runtime.disk import Disk, owner_of

# S3's limits, so that whatever is here fits there.
_KEY_BYTES_MAX = 1024
_PARTS_MAX = 10_000
# S3 takes 2 KiB, other stores more; each group of properties is held to it.
PROPERTIES_BYTES_MAX = 64 << 10

# What S3 can send as the end of a header's name.
_METADATA_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


def check_folder(folder: Path, disk: Disk, *, create: bool) -> None:
    """Check that a folder is a bucket, or may become one; with `create` it is made.

    Raises:
        NotABucketError: it is not.
        StoreError: this user may not write to it.
        DiskError: it cannot be looked at or made.
    """
    if not disk.is_folder(folder):
        if os.path.lexists(folder):
            raise NotABucketError(f"{folder} is not a directory", path=str(folder))
        if not create:
            raise NotABucketError(
                f"{folder} does not exist",
                hint="Check the path. Only a sync creates a bucket, and only its target.",
                path=str(folder),
            )
        disk.make_folder(folder)
    names = set(disk.names(folder)) - {"lost+found"}
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise StoreError(
            f"{folder} cannot be written to, as locks of readers require",
            hint=f"Run this as {owner_of(folder)}. Copy it from a read-only file system first.",
            path=str(folder),
            denied=True,
        )
    if DATABASE_FILE in names or (create and not names):
        return
    what = "has other files, but no bucket" if names else "is empty"
    hint = (
        "Give an empty folder, or one that does not exist."
        if create
        else "A bucket in a folder has a format of its own, which only a sync to it makes: plain"
        " files are none. Check the path."
    )
    raise NotABucketError(f"{folder} {what}", hint=hint, path=str(folder))


def checked_key(key: str) -> bytes:
    """A key as UTF-8.

    Raises:
        UnsupportedObjectError: it is empty, too long, or not Unicode text.
    """
    name = key_bytes(key)
    if not 0 < len(name) <= _KEY_BYTES_MAX:
        raise UnsupportedObjectError(
            f"a key has 1 to {_KEY_BYTES_MAX} bytes, not {len(name)}", key=key
        )
    return name


def check_number(number: int) -> None:
    """Check the number of a part.

    Raises:
        UnsupportedObjectError: no part has it.
    """
    if not 1 <= number <= _PARTS_MAX:
        raise UnsupportedObjectError(f"parts have numbers from 1 to {_PARTS_MAX}, not {number}")


def check_properties(properties: ObjectProperties) -> None:
    """Check that properties can be kept unchanged.

    Raises:
        UnsupportedObjectError: they cannot.
    """
    for name, _ in properties.metadata:
        if not _METADATA_NAME.fullmatch(name):
            raise UnsupportedObjectError(
                f"{name!a} is not a name of metadata: lower-case letters, digits and some signs"
            )
    for name, _ in properties.headers:
        if name not in CONTENT_HEADERS:
            raise UnsupportedObjectError(f"{name!a} is not a content header")
    for group in (properties.metadata, properties.tags, properties.headers):
        if len({name for name, _ in group}) < len(group):
            raise UnsupportedObjectError("a property is given twice")
    for group in (properties.metadata, properties.tags, properties.headers, properties.acl):
        size = sum(len(key_bytes(text)) for pair in group for text in pair)
        if size > PROPERTIES_BYTES_MAX:
            raise UnsupportedObjectError(
                f"properties of {size} bytes; up to {PROPERTIES_BYTES_MAX} of a kind are kept"
            )
