"""What a power cut may leave of a folder: a model of what its file system has made
durable.

POSIX promises little. The bytes of a file are durable after a sync of the file. Its
entry in a directory (created, renamed, removed) is durable after a sync of that
directory, and not before, even if the file was synced. Until then each change may be
lost or kept independently of the others. Two orders are kept, as by every file system
with a journal: a rename is lost or kept as a whole, also between two directories, and
changes of one file's entries reach the disk in their order.

A database takes care of its own files, except for one: the log holds what was synced,
and of the rest any beginning.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ozone.rocks import Database, OzoneTable
from runtime.disk import Operation

_SECTOR_BYTES = 512
_SYNCS = re.compile(r"Cumulative WAL: .* (\d+) syncs")


@dataclass(eq=False)
class _File:
    # The durable content, then every later one. Empty if nothing was changed: then the
    # file is what it is on disk.
    contents: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class _Folder:
    entries: dict[str, "_File | _Folder"] = field(default_factory=dict)


_Node = _File | _Folder


@dataclass(eq=False)
class _Change:
    """A change of directory entries, and the directories that must be synced until it
    is durable.
    """

    node: _Node
    sets: Sequence[tuple[_Folder, str, _Node | None]]
    unsynced: set[_Folder]
    # In the image that is being written.
    is_kept: bool = True


class PowerCut:
    """Follows the changes of one folder and writes images of what a power cut at this
    moment may leave. Everything that is there at the beginning is durable.
    """

    def __init__(self, root: Path) -> None:
        self._root_path = root
        self._root = _scanned(root)
        # As it was at the beginning: changes are applied to it to get an image.
        self._begun = {folder: dict(folder.entries) for folder in _folders(self._root)}
        self._changes: list[_Change] = []
        self._databases: dict[Path, Database] = {}
        self._syncs: dict[Path, int] = {}
        # Of each log of a database, the length that is durable.
        self._synced_bytes: dict[Path, int] = {}

    def watch(self, database: Database) -> None:
        """Ask this open database, not the operation, whether a batch was synced."""
        self._databases[database.path] = database
        self._syncs[database.path] = wal_syncs(database)
        self._note_synced(database.path)

    def follow(
        self, operation: Operation, path: Path, act: Callable[[], None], source: Path | None = None
    ) -> None:
        """Carry out an operation; `source` is what a rename renames."""
        is_database = (path / "CURRENT").exists()
        if is_database and operation in (Operation.BATCH, Operation.SYNC):
            act()
            self._follow_database(operation, path)
        elif operation is Operation.BATCH or not path.is_relative_to(self._root_path):
            # SQLite has synced its files when a commit returns.
            act()
        elif operation is Operation.WRITE:
            node = self._known_file(path)
            act()
            node.contents.append(path.read_bytes())
        elif operation is Operation.SYNC:
            node = self._known_file(path)
            act()
            node.contents = [path.read_bytes()]
        elif operation is Operation.SYNC_FOLDER:
            act()
            for change in self._changes:
                change.unsynced.discard(self._folder(path))
        elif operation is Operation.MAKE_FOLDER:
            act()
            if path.name not in self._folder(path.parent).entries:
                self._change(_Folder(), ((path, True),))
        elif operation is Operation.REMOVE:
            if os.path.lexists(path):
                node = self._folder(path) if path.is_dir() else self._known_file(path)
                act()
                self._change(node, ((path, False),))
            else:
                act()
        else:
            assert operation is Operation.RENAME
            assert source is not None
            node = self._folder(source) if source.is_dir() else self._known_file(source)
            if path.is_file():
                self._known_file(path)
            act()
            self._change(node, ((source, False), (path, True)))

    @property
    def is_all_durable(self) -> bool:
        """Whether a power cut now loses nothing that went through the disk."""
        return not (
            any(change.unsynced for change in self._changes)
            or any(isinstance(node, _File) and len(node.contents) > 1 for node, _ in self._places())
            or any(
                path.stat().st_size > self._synced_bytes.get(path, 0)
                for database in self._databases
                for path in database.glob("*.log")
            )
        )

    def image(self, target: Path, loss: random.Random | None = None) -> None:
        """Write what a power cut now may leave: without `loss` nothing that is not
        durable, otherwise some of it.
        """
        lost = set[_Node]()
        for change in self._changes:
            if change.unsynced and (loss is None or loss.random() < 0.5):
                lost.add(change.node)
            change.is_kept = not change.unsynced or change.node not in lost
        self._write_kept(target, loss)

    def image_of_last(self, target: Path) -> None:
        """Write the image of a file system that makes the latest change of an entry
        durable before all others.
        """
        last = self._changes[-1].node if self._changes else None
        for change in self._changes:
            change.is_kept = not change.unsynced or change.node is last
        self._write_kept(target, None)

    def _write_kept(self, target: Path, loss: random.Random | None) -> None:
        entries = {folder: dict(begun) for folder, begun in self._begun.items()}
        for change in self._changes:
            for folder, name, node in change.sets if change.is_kept else ():
                held = entries.setdefault(folder, {})
                if node is None:
                    held.pop(name, None)
                else:
                    held[name] = node
        self._write(self._root, target, entries, dict(self._places()), loss)

    def _write(
        self,
        folder: _Folder,
        target: Path,
        entries: dict[_Folder, dict[str, _Node]],
        places: dict[_Node, Path],
        loss: random.Random | None,
    ) -> None:
        place = places.get(folder)
        if place is not None and (place / "CURRENT").exists():
            self._write_database(place, target, loss)
            return
        target.mkdir()
        for name, node in entries.get(folder, {}).items():
            if isinstance(node, _Folder):
                self._write(node, target / name, entries, places, loss)
                continue
            now = places.get(node)
            if node.contents:
                (target / name).write_bytes(_content(node.contents, loss))
                if now is not None:
                    shutil.copystat(now, target / name)
            elif now is not None and now.exists():
                shutil.copy2(now, target / name)
        if place is None or loss is None:
            return
        for name in os.listdir(place):
            # Written without our knowledge, hence never synced.
            if name not in folder.entries and (place / name).is_file() and loss.random() < 0.5:
                shutil.copy2(place / name, target / name)

    def _write_database(self, place: Path, target: Path, loss: random.Random | None) -> None:
        copy_live(place, target)
        for path in place.iterdir():
            if path.suffix == ".log" and place in self._databases:
                synced, written = self._synced_bytes.get(path, 0), path.stat().st_size
                end = synced if loss is None else loss.randint(synced, written)
                os.truncate(target / path.name, end)

    def _follow_database(self, operation: Operation, path: Path) -> None:
        database = self._databases.get(path)
        if database is None:
            return
        syncs = wal_syncs(database)
        # The statistics count the syncs of batches only.
        if syncs > self._syncs[path] or operation is Operation.SYNC:
            self._note_synced(path)
        self._syncs[path] = syncs

    def _note_synced(self, database: Path) -> None:
        for path in database.glob("*.log"):
            self._synced_bytes[path] = path.stat().st_size

    def _change(self, node: _Node, ends: Sequence[tuple[Path, bool]]) -> None:
        sets = []
        for path, is_there in ends:
            folder = self._folder(path.parent)
            sets.append((folder, path.name, node if is_there else None))
            if is_there:
                folder.entries[path.name] = node
            else:
                folder.entries.pop(path.name, None)
        self._changes.append(_Change(node, sets, {folder for folder, _, _ in sets}))

    def _folder(self, path: Path) -> _Folder:
        node = self._root
        for name in path.relative_to(self._root_path).parts:
            found = node.entries.get(name)
            assert isinstance(found, _Folder), f"{path} was made without the disk"
            node = found
        return node

    def _known_file(self, path: Path) -> _File:
        """The file, with its content up to now; a new one is a change of its folder."""
        node = self._folder(path.parent).entries.get(path.name)
        if node is None:
            # Written by a library, or not there yet.
            node = _File([b"", *([path.read_bytes()] if path.exists() else [])])
            self._change(node, ((path, True),))
        assert isinstance(node, _File), path
        if not node.contents:
            node.contents.append(path.read_bytes())
        return node

    def _places(self) -> Iterator[tuple[_Node, Path]]:
        """Where each file and folder is now."""
        todo: list[tuple[_Folder, Path]] = [(self._root, self._root_path)]
        while todo:
            folder, path = todo.pop()
            yield folder, path
            for name, node in folder.entries.items():
                if isinstance(node, _Folder):
                    todo.append((node, path / name))
                else:
                    yield node, path / name


def copy_live(folder: Path, target: Path) -> None:
    """Copy a folder in which a database may remove old files at any moment."""
    target.mkdir()
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            copy_live(entry, target / entry.name)
        elif entry.is_file():
            with suppress(FileNotFoundError):
                shutil.copy2(entry, target / entry.name)


def wal_syncs(database: Database) -> int:
    """How many batches RocksDB has synced to its log, as it counts them itself."""
    found = _SYNCS.search(database._rdict.property_value("rocksdb.dbstats"))
    assert found is not None
    return int(found[1])


def put_unsynced(database: Database, table: OzoneTable, key: bytes, value: bytes) -> None:
    """Write a row as a datanode does for a client: durable with the next sync of the
    log.
    """
    database._tables[table].put(key, value)


def _content(contents: Sequence[bytes], loss: random.Random | None) -> bytes:
    """The durable content, or each sector of it or of any later one."""
    if loss is None or len(contents) == 1:
        return contents[0]
    length = len(loss.choice(contents))
    sectors = (
        loss.choice(contents)[at : at + _SECTOR_BYTES].ljust(_SECTOR_BYTES, b"\0")
        for at in range(0, length, _SECTOR_BYTES)
    )
    return b"".join(sectors)[:length]


def _scanned(path: Path) -> _Folder:
    folder = _Folder()
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            folder.entries[entry.name] = _scanned(entry)
        elif entry.is_file():
            folder.entries[entry.name] = _File()
    return folder


def _folders(folder: _Folder) -> Iterator[_Folder]:
    yield folder
    for node in folder.entries.values():
        if isinstance(node, _Folder):
            yield from _folders(node)
