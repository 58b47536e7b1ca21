"""What rows of a local bucket say of contents and data files. A damaged page of SQLite
may say anything, so that each value is checked before it is used.
"""

import re
import sqlite3
from dataclasses import dataclass

from runtime.row_order import of_types

# What a row may say, as far as an index has room for it (proof.rows).
TIME_MS_END, _BYTES_END, _CRC_END = 1 << 48, 1 << 56, 1 << 32
# An MD5, or one of those of parts and how many they are.
_ETAG = re.compile("[0-9a-f]{32}(-[0-9]+)?")
# A writer's token, or a file of one (replicator.stores.local_files).
_FILE_NAME = re.compile("[0-9a-f]+(/[0-9]+/[0-9]+)?")

_ContentRow = tuple[int, str, int, bytes | None, bytes | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a content: `size_bytes` of a blob from `blob_first`. `first` is their
    place in the content, `crc32c` theirs alone.
    """

    first: int
    size_bytes: int
    blob: int
    blob_first: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Content:
    """Size, ETag and hashes of a content; `md5` and `blake3` are unknown of parts put
    together.
    """

    size_bytes: int
    etag: str
    crc32c: int
    md5: bytes | None = None
    blake3: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewBlob:
    """Bytes that have no row yet: in a data file, or few."""

    file: str = ""
    body: bytes = b""


def content_of(row: _ContentRow) -> Content:
    """Size, ETag, CRC, MD5 and BLAKE3 of a row.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
    """
    found = Content(*of_types(row, int, str, int, bytes | None, bytes | None))
    if not 0 <= found.size_bytes < _BYTES_END or not 0 <= found.crc32c < _CRC_END:
        raise damaged("a number")
    if not _ETAG.fullmatch(found.etag):
        raise damaged("an ETag")
    if len(found.md5 or bytes(16)) != 16 or len(found.blake3 or bytes(32)) != 32:
        raise damaged("a hash")
    return found


def segment_of(row: tuple[int, int, int, int, int]) -> Segment:
    """The fields of a row, in their order.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
    """
    found = Segment(*of_types(row, int, int, int, int, int))
    if min(found.first, found.size_bytes, found.blob_first) < 0:
        raise damaged("a segment")
    return found


def key_of(raw: bytes) -> str:
    """The key of a row.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
    """
    try:
        return of_types((raw,), bytes)[0].decode()
    except UnicodeDecodeError as error:
        raise damaged("a key") from error


def file_name_of(name: str) -> str:
    """The name of a file below the bucket's folder, and of no other: it is read, or
    removed.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
    """
    if not _FILE_NAME.fullmatch(name):
        raise damaged("the name of a file")
    return name


def damaged(what: str) -> sqlite3.DatabaseError:
    """The error for a row that says what no row was given."""
    return sqlite3.DatabaseError(f"{what} is none that was written: the file is damaged")
