"""The changes of one bucket, from the write batches of its Ozone Manager's log.

A batch is a set of final states, not a list of events: of several changes of a row only
the last is in it, and rows are in no order. So the changes of a batch took effect
together. In an FSO bucket rows of files name their directory by its ID, and a directory
that is renamed or deleted is one row: whatever is below it goes with it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ozone.directory_map import DirectoryMap
from ozone.errors import LogGapError
from ozone.log_rows import LogRow, RowReader, Table, signed
from ozone.manager_values import (
    BucketLayout,
    DirectoryFacts,
    KeyFacts,
    ManagerBucket,
    OzoneSnapshot,
    TransactionIndex,
)
from ozone.write_batch import WriteBatch

# Keys by object ID, so that a rename is known for one also if its row does not say so.
_RECENT_MAX = 50_000
# In the key of a row of a file or directory: volume, bucket, parent and name.
_FILE_SLASHES = 4


class KeyEvent(Enum):
    """What a batch did to a key, or to all keys below a prefix."""

    DELETE_PREFIX = "delete_prefix"
    RENAME_PREFIX = "rename_prefix"
    RENAME = "rename"
    DELETE = "delete"
    PUT = "put"


# Renames free a key or take it before others do.
_ORDER = {kind: number for number, kind in enumerate(KeyEvent)}


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One change; prefixes end with a slash. `previous` is what was renamed, `facts`
    what the row says of a key that was written or renamed.
    """

    kind: KeyEvent
    key: str
    previous: str = ""
    facts: KeyFacts | None = None


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """What one batch did to the bucket. `unplaced` are keys of which a row was deleted
    whose table is not known: if such a key is missing now, it was deleted. `snapshots`
    are those of which the batch has the row, `transaction` is None of a batch that is
    not one of Raft's.
    """

    transaction: TransactionIndex | None
    changes: tuple[KeyChange, ...]
    unplaced: tuple[str, ...] = ()
    snapshots: tuple[OzoneSnapshot, ...] = ()


class BucketLog:
    """Follows one bucket through the log, batch by batch."""

    def __init__(
        self,
        bucket: ManagerBucket,
        volume_id: int,
        directories: DirectoryMap | None = None,
        *,
        known_from: int = 0,
        rows: RowReader | None = None,
    ) -> None:
        """`directories` of an FSO bucket are as they were after the batch that ends
        with `known_from`; earlier ones can be read as long as none renames one.
        `rows` may have learned from batches before.
        """
        assert (bucket.layout is BucketLayout.FILE_SYSTEM_OPTIMIZED) == (directories is not None)
        self._directories, self._known_from = directories, known_from
        self._row = f"/{bucket.volume}/{bucket.bucket}"
        self._named = f"{self._row}/"
        self._numbered = f"/{signed(volume_id)}/{signed(bucket.object_id)}/"
        self._rows = rows or RowReader()
        self._recent = OrderedDict[int, str]()

    def take(self, batch: WriteBatch) -> BatchChanges:
        """What a batch did.

        Raises:
            LogGapError: the bucket was deleted, or what happened to its directories
                cannot be told.
        """
        rows = self._rows.read_all(batch.records)
        transaction, snapshots = None, list[OzoneSnapshot]()
        for row in rows:
            if row.table is Table.TRANSACTION and isinstance(row.value, TransactionIndex):
                transaction = row.value
            elif isinstance(row.value, OzoneSnapshot) and row.key.startswith(self._named):
                snapshots.append(row.value)
            elif row.table is Table.BUCKET and row.is_deleted and row.key == self._row:
                raise LogGapError(f"the bucket {self._row} was deleted")
        if self._directories is None:
            changes, unplaced = self._of_keys(rows)
        else:
            changes, unplaced = self._of_files(rows, self._directories, batch.last)
        changes.sort(key=lambda one: (_ORDER[one.kind], one.key))
        return BatchChanges(transaction, tuple(changes), tuple(unplaced), tuple(snapshots))

    def _of_keys(self, rows: Iterable[LogRow]) -> tuple[list[KeyChange], list[str]]:
        """Changes of a bucket whose rows have whole keys."""
        puts, deleted, unplaced = dict[str, KeyFacts](), set[str](), list[str]()
        renamed = dict[int, str]()
        for row in rows:
            if not row.key.startswith(self._named):
                continue
            name = row.key[len(self._named) :]
            if row.table is Table.KEY and isinstance(row.value, KeyFacts):
                puts[name] = row.value
            elif row.is_deleted and row.table is Table.KEY:
                deleted.add(name)
            elif row.is_deleted and row.table is None:
                if not self._rows.knows(Table.KEY):
                    unplaced.append(name)
            elif row.table is None:
                self._note_renamed(row, renamed, self._named)
        # The table of renamed keys may be met before that of keys.
        left = deleted | set(unplaced)
        changes = self._changes(puts, deleted, renamed, left)
        gone = {one.previous for one in changes}
        return changes, [name for name in unplaced if name not in puts and name not in gone]

    def _of_files(
        self, rows: Iterable[LogRow], directories: DirectoryMap, last: int
    ) -> tuple[list[KeyChange], list[str]]:
        """Changes of an FSO bucket: first those of directories, then of files by the
        paths that they have now.
        """
        ours = [row for row in rows if row.key.startswith((self._numbered, self._named))]
        changes = self._of_directories(ours, directories, last)
        puts, deleted, unplaced = dict[str, KeyFacts](), set[str](), list[str]()
        renamed = dict[int, str]()
        for row in ours:
            if row.key.startswith(self._named):
                if row.table is None and not row.is_deleted:
                    self._note_renamed(row, renamed, self._numbered)
                continue
            parent, _, name = row.key[len(self._numbered) :].partition("/")
            if not name or "/" in name:
                continue
            prefix = _prefix(directories, parent)
            if prefix is None:
                # It is below a directory that was deleted, and went with it.
                continue
            if row.table is Table.FILE and isinstance(row.value, KeyFacts):
                puts[prefix + name] = row.value
            elif row.is_deleted and row.table is Table.FILE:
                deleted.add(prefix + name)
            elif row.is_deleted and row.table is None and not self._rows.knows(Table.FILE):
                unplaced.append(prefix + name)
        paths = {
            object_id: prefix + name
            for object_id, place in renamed.items()
            for parent, _, name in [place.partition("/")]
            if (prefix := _prefix(directories, parent)) is not None
        }
        changes += self._changes(puts, deleted, paths, deleted | set(unplaced))
        gone = {one.previous for one in changes}
        return changes, [name for name in unplaced if name not in puts and name not in gone]

    def _of_directories(
        self, rows: Iterable[LogRow], directories: DirectoryMap, last: int
    ) -> list[KeyChange]:
        """Directories that were deleted or renamed; the map is as the batch left it
        afterwards.
        """
        puts, places, thrown = dict[int, DirectoryFacts](), set[tuple[int, str]](), set[int]()
        is_early = last <= self._known_from
        unknown: set[Table | None] = {Table.DIRECTORY}
        if not self._rows.knows(Table.DIRECTORY):
            unknown.add(None)
        for row in rows:
            if isinstance(row.value, DirectoryFacts):
                puts[row.value.object_id] = row.value
            elif row.table is Table.DELETED_DIRECTORY and isinstance(row.value, KeyFacts):
                thrown.add(row.value.object_id)
            elif row.is_deleted and row.table in unknown:
                if row.table is None and is_early and row.key.count("/") == _FILE_SLASHES:
                    raise LogGapError("a row was deleted of which nobody knows what it was")
                parent, _, name = row.key[len(self._numbered) :].partition("/")
                parent_id = _object_id(parent)
                is_one = row.table is Table.DIRECTORY or (
                    parent_id is not None and directories.child(parent_id, name) is not None
                )
                if parent_id is not None and name and "/" not in name and is_one:
                    places.add((parent_id, name))
        if is_early and len(places) > len(thrown):
            raise LogGapError("a directory was renamed before its log was followed")
        return [
            *self._directories_deleted(directories, puts, places, is_early=is_early),
            *_directories_renamed(directories, puts),
        ]

    def _directories_deleted(
        self,
        directories: DirectoryMap,
        puts: dict[int, DirectoryFacts],
        places: set[tuple[int, str]],
        *,
        is_early: bool,
    ) -> Iterable[KeyChange]:
        replaced = {
            (one.parent_id, one.name)
            for one in puts.values()
            if directories.child(one.parent_id, one.name) not in (None, one.object_id)
        }
        found = []
        for parent_id, name in sorted(places | replaced):
            object_id = directories.child(parent_id, name)
            if object_id in puts:
                # It is somewhere else now.
                continue
            prefix = directories.prefix(parent_id)
            if object_id is None and not is_early:
                continue
            if prefix is not None:
                found.append((object_id, f"{prefix}{name}/"))
        for object_id, _ in found:
            if object_id is not None:
                directories.remove(object_id)
        return [KeyChange(KeyEvent.DELETE_PREFIX, prefix) for _, prefix in found]

    def _changes(
        self,
        puts: dict[str, KeyFacts],
        deleted: set[str],
        renamed: dict[int, str],
        left: set[str],
    ) -> list[KeyChange]:
        """Changes of keys. `renamed` are old keys by object ID where rows say so,
        `left` all keys of which a row was deleted.
        """
        changes, sources = list[KeyChange](), set[str]()
        for name, facts in sorted(puts.items()):
            old = renamed.get(facts.object_id) or self._recent.get(facts.object_id, "")
            if old and old != name and old in left and old not in sources:
                sources.add(old)
                changes.append(KeyChange(KeyEvent.RENAME, name, old, facts))
            elif facts.is_finished:
                changes.append(KeyChange(KeyEvent.PUT, name, "", facts))
            self._recent[facts.object_id] = name
            self._recent.move_to_end(facts.object_id)
        while len(self._recent) > _RECENT_MAX:
            self._recent.popitem(last=False)
        changes += [KeyChange(KeyEvent.DELETE, name) for name in deleted - sources - set(puts)]
        return changes

    def _note_renamed(self, row: LogRow, renamed: dict[int, str], prefix: str) -> None:
        """A row of snapshotRenamedTable has an object ID, and the row's key before."""
        object_id = _object_id(row.key[len(self._named) :])
        try:
            before = row.raw.decode()
        except UnicodeDecodeError:
            return
        if object_id is not None and before.startswith(prefix):
            renamed[object_id] = before[len(prefix) :]


def _directories_renamed(
    directories: DirectoryMap, puts: dict[int, DirectoryFacts]
) -> list[KeyChange]:
    """Put directories where the rows have them; those that were elsewhere are renamed,
    one after the other. New ones come first: others may be moved into them.

    Raises:
        LogGapError: none of them can be the next.
    """
    changes = []
    for object_id, one in sorted(puts.items(), key=lambda item: (item[0] in directories, item[0])):
        old = directories.place(object_id)
        if old == (one.parent_id, one.name):
            continue
        before = directories.prefix(object_id)
        if directories.child(one.parent_id, one.name) is not None:
            raise LogGapError(f"a directory named {one.name} took the place of one that moved")
        directories.put(object_id, one.parent_id, one.name)
        if before is None:
            continue
        after = directories.prefix(object_id)
        if after is None or after.startswith(before):
            raise LogGapError(f"the directory {before} was moved in a way that cannot be followed")
        changes.append(KeyChange(KeyEvent.RENAME_PREFIX, after, before))
    return changes


def _prefix(directories: DirectoryMap, parent: str) -> str | None:
    object_id = _object_id(parent)
    return None if object_id is None else directories.prefix(object_id)


def _object_id(text: str) -> int | None:
    """An object ID as messages have it, from one of a row's key."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        return None
    return int(text) & (1 << 64) - 1
