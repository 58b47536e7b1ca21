"""The databases of an index in its folder, of which the newest one counts.

A generation is built under another name and renamed when it is whole and durable. So
what a crash leaves is either the one before or the new one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from proof.rocks_index import RocksTables
from proof.sqlite_index import SqliteTables
from proof.tables import ItemTables
from runtime.disk import Disk
from runtime.errors import DatabaseError

_NAME = re.compile(r"generation-(\d{8})\.([a-z]+)")
_OURS = re.compile(r"(generation|building)-\d{8}\.[a-z]+(-wal|-shm|-journal)?")
# SQLite needs 170 bytes an object, RocksDB half, and less for each change once memory
# no longer holds the database.
_SQLITE_ITEMS_MAX = 100_000_000


class StorageKind(StrEnum):
    """Databases that can hold an index; also the suffix of their names."""

    SQLITE = "sqlite"
    ROCKSDB = "rocksdb"


_KINDS = frozenset(kind.value for kind in StorageKind)
# Opens the database at a path; true to create it.
TablesOpener = Callable[[Path, bool], ItemTables]
OPENERS: Mapping[StorageKind, TablesOpener] = {
    StorageKind.SQLITE: lambda path, building: SqliteTables(path, building=building),
    StorageKind.ROCKSDB: lambda path, building: RocksTables(path, building=building),
}


@dataclass(frozen=True, slots=True)
class Generation:
    """One database of an index."""

    number: int
    kind: StorageKind

    def path(self, folder: Path) -> Path:
        """Where it is once it counts."""
        return folder / f"generation-{self.number:08}.{self.kind.value}"

    def building_path(self, folder: Path) -> Path:
        """Where it is until then."""
        return folder / f"building-{self.number:08}.{self.kind.value}"

    def next(self, kind: StorageKind) -> "Generation":
        """The one that replaces it."""
        return Generation(self.number + 1, kind)


def storage_for(items: int) -> StorageKind:
    """The database for so many items."""
    return StorageKind.SQLITE if items <= _SQLITE_ITEMS_MAX else StorageKind.ROCKSDB


def newest_generation(folder: Path, disk: Disk) -> Generation | None:
    """The generation that counts.

    Raises:
        DiskError: the folder cannot be read.
    """
    found = [
        Generation(int(match[1]), StorageKind(match[2]))
        for name in disk.names(folder)
        if (match := _NAME.fullmatch(name)) and match[2] in _KINDS
    ]
    return max(found, key=lambda one: one.number, default=None)


def publish(folder: Path, generation: Generation, disk: Disk) -> None:
    """Make a generation that is built and closed the newest one; durable on return.

    Raises:
        DatabaseError: closing it left a part of it in another file.
        DiskError: the folder cannot be written.
    """
    name = generation.building_path(folder).name
    if any(other.startswith(f"{name}-") for other in disk.names(folder)):
        raise DatabaseError(f"the database {name} in {folder} is not whole", path=str(folder))
    disk.rename(generation.building_path(folder), generation.path(folder))
    disk.sync_folder(folder)


def remove_generation(
    folder: Path, generation: Generation, disk: Disk, *, building: bool = False
) -> None:
    """Remove all files of a generation, as far as there are any.

    Raises:
        DiskError: the folder cannot be written.
    """
    path = generation.building_path(folder) if building else generation.path(folder)
    for name in disk.names(folder):
        if name.startswith(path.name):
            _remove(folder / name, disk)


def remove_others(folder: Path, kept: Generation | None, disk: Disk) -> None:
    """Remove what older and unfinished generations left, and nothing else.

    Raises:
        DiskError: the folder cannot be written.
    """
    for name in disk.names(folder):
        is_kept = kept is not None and name.startswith(kept.path(folder).name)
        if _OURS.fullmatch(name) and not is_kept:
            _remove(folder / name, disk)


def _remove(path: Path, disk: Disk) -> None:
    if path.is_dir():
        disk.remove_folder(path)
    else:
        disk.remove(path)
