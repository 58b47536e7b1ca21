"""Which table of the Ozone Manager's database a record of its log belongs to.

The log names tables by numbers that differ between clusters, and nothing tells the map.
A row that is written shows its table by its shape: the key repeats what the value says.
A row that is deleted has no value, so the numbers learned from others place it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ozone.manager_messages import (
    bucket_row,
    deleted_row,
    directory_row,
    key_row,
    snapshot_row,
)
from ozone.manager_values import (
    DirectoryFacts,
    KeyFacts,
    ManagerBucket,
    OzoneSnapshot,
    TransactionIndex,
)
from ozone.write_batch import BatchRecord, RowOperation

_TRANSACTION_KEY = "#TRANSACTIONINFO"

RowValue = (
    KeyFacts
    | DirectoryFacts
    | OzoneSnapshot
    | ManagerBucket
    | TransactionIndex
    | tuple[KeyFacts, ...]
    | None
)


class Table(Enum):
    """The tables whose rows are told apart, by Ozone's names."""

    KEY = "keyTable"
    OPEN_KEY = "openKeyTable"
    FILE = "fileTable"
    OPEN_FILE = "openFileTable"
    DIRECTORY = "directoryTable"
    DELETED = "deletedTable"
    DELETED_DIRECTORY = "deletedDirectoryTable"
    SNAPSHOT = "snapshotInfoTable"
    BUCKET = "bucketTable"
    TRANSACTION = "transactionInfoTable"


@dataclass(frozen=True, slots=True)
class LogRow:
    """A row as a batch leaves it; `table` is None where it is of another table, or, if
    it is deleted, of one that is not known yet. `value` is None where it is deleted.
    """

    table: Table | None
    key: str
    value: RowValue
    is_deleted: bool
    raw: bytes = b""


@dataclass(slots=True)
class RowReader:
    """Reads rows, and learns the numbers of tables as they pass. Once the number of a
    table is known, no other one is that table's.
    """

    tables: dict[int, Table] = field(default_factory=dict)

    def read_all(self, records: Iterable[BatchRecord]) -> list[LogRow]:
        """The rows of a batch. Those that are written come first: they may show the
        tables of those that are deleted.
        """
        ordered = sorted(records, key=lambda one: one.operation is RowOperation.DELETE)
        return [row for record in ordered if (row := self.read(record)) is not None]

    def knows(self, table: Table) -> bool:
        """Whether the number of a table is known."""
        return table in self.tables.values()

    def read(self, record: BatchRecord) -> LogRow | None:
        """The row of a record; None of what is no row that we know."""
        try:
            key = record.key.decode()
        except UnicodeDecodeError:
            # multipartPartsTable has binary keys.
            return None
        match record.operation:
            case RowOperation.DELETE:
                return LogRow(self.tables.get(record.family), key, None, True)
            case RowOperation.PUT:
                table, value = _shape(key, record.value)
                if table is not None:
                    self.tables[record.family] = table
                return LogRow(table, key, value, False, record.value)
            case RowOperation.OTHER:
                return None


def signed(object_id: int) -> str:
    """An object ID as the keys of rows have it: messages have it without a sign."""
    return str(object_id - (1 << 64) if object_id >> 63 else object_id)


def _shape(key: str, value: bytes) -> tuple[Table | None, RowValue]:
    """The table of a row that is written, and its value."""
    if key == _TRANSACTION_KEY:
        found = TransactionIndex.parse(value)
        return (Table.TRANSACTION, found) if found is not None else (None, None)
    parts = key.split("/")
    if len(parts) < 3 or parts[0]:
        return None, None
    one = key_row(value)
    if one is not None:
        return _key_shape(key, parts, one), one
    directory = directory_row(value)
    if directory is not None:
        tail = [signed(directory.parent_id), directory.name]
        return (Table.DIRECTORY, directory) if parts[3:] == tail else (None, None)
    bucket = bucket_row(value)
    if bucket is not None and parts == ["", bucket.volume, bucket.bucket]:
        return Table.BUCKET, bucket
    deleted = deleted_row(value)
    if deleted is not None:
        return Table.DELETED, deleted
    snapshot = snapshot_row(value)
    if snapshot is not None and parts == ["", snapshot.volume, snapshot.bucket, snapshot.name]:
        return Table.SNAPSHOT, snapshot
    return None, None


def _key_shape(key: str, parts: list[str], one: KeyFacts) -> Table | None:
    place = f"/{one.volume}/{one.bucket}/{one.name}"
    if key == place:
        return Table.KEY
    if key.startswith(place + "/") and "/" not in key[len(place) + 1 :]:
        return Table.OPEN_KEY
    if len(parts) < 5 or parts[3] != signed(one.parent_id):
        return None
    if parts[4:] == [one.name]:
        return Table.FILE
    if len(parts) == 6 and parts[4] == one.name.rpartition("/")[2]:
        is_directory = parts[5] == signed(one.object_id)
        return Table.DELETED_DIRECTORY if is_directory else Table.OPEN_FILE
    return None
