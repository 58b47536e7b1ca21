"""What tasks return to the driver: a row each, with counts and the files they wrote.

Tables with a row per replica or container never pass through the driver. A task writes
them to files of unique names (sweep.pieces), and the driver commits the names of the
files of those tasks that succeeded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import pyarrow as pa

from chunktable.errors import ObjectStoreError
from chunktable.files import AnyPath, Files
from runtime.disk import Disk
from spark.errors import FolderNotSharedError
from sweep.pieces import StoredFile, TablePlace
from sweep.totals import SweepTotals

_START = pa.struct([pa.field("container_id", pa.int64()), pa.field("rows", pa.int64())])
_FILE = pa.struct(
    [
        pa.field("table", pa.string()),
        pa.field("name", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("starts", pa.list_(_START)),
        pa.field("last", pa.int64()),
    ]
)
COMMIT_SCHEMA = pa.schema(
    [
        # Of the part, the range or the group that the task worked on.
        pa.field("number", pa.int32(), nullable=False),
        # Rows of the chunk table that were read, or containers that were decided.
        pa.field("count", pa.int64(), nullable=False),
        # Why the part could not be read; "" if it could.
        pa.field("skipped", pa.string(), nullable=False),
        pa.field("totals", pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field("diverged", pa.list_(pa.int64()), nullable=False),
        pa.field("files", pa.list_(_FILE), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A row of COMMIT_SCHEMA; `files` are by table."""

    number: int
    count: int = 0
    skipped: str = ""
    totals: SweepTotals = field(default_factory=SweepTotals)
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    def batch(self) -> pa.RecordBatch:
        """The row."""
        return commit_batch([self])

    def row(self) -> dict[str, object]:
        """The values of its columns."""
        files = [
            {
                "table": table,
                "name": file.name,
                "rows": file.rows,
                "starts": [{"container_id": at, "rows": rows} for at, rows in file.starts],
                "last": file.last,
            }
            for table, file in self.files.items()
        ]
        return {
            "number": self.number,
            "count": self.count,
            "skipped": self.skipped,
            "totals": list(self.totals.counts().items()),
            "diverged": self.totals.diverged,
            "files": files,
        }


def commit_batch(commits: Sequence[Commit]) -> pa.RecordBatch:
    """The rows of these commits."""
    return pa.RecordBatch.from_pylist([one.row() for one in commits], COMMIT_SCHEMA)


def commits_of(rows: pa.Table) -> Iterator[Commit]:
    """The commits of a table with the columns of COMMIT_SCHEMA."""
    for row in rows.to_pylist():
        totals = SweepTotals()
        totals.add_counts(dict(row["totals"]), row["diverged"])
        files = {
            file["table"]: StoredFile(
                file["name"],
                file["rows"],
                tuple((start["container_id"], start["rows"]) for start in file["starts"]),
                file["last"],
            )
            for file in row["files"]
        }
        yield Commit(row["number"], row["count"], row["skipped"], totals, files)


def by_table(commits: Iterable[Commit]) -> dict[str, Sequence[StoredFile]]:
    """The files of several tasks, by table."""
    found = dict[str, list[StoredFile]]()
    for commit in commits:
        for name, file in commit.files.items():
            found.setdefault(name, []).append(file)
    return {name: tuple(files) for name, files in found.items()}


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """Places for the files of tasks, with a marker in each that shows a task whether
    its machine sees the same folder as the driver.
    """

    places: Mapping[str, TablePlace]
    marker: str

    @classmethod
    def of(cls, places: Mapping[str, TablePlace], disk: Disk) -> "SharedFolders":
        """Make the folders and their markers.

        Raises:
            DiskError: they cannot be written.
        """
        shared = cls(places, f".shared-{uuid4().hex}")
        files = Files(disk)
        for marker in shared._markers():
            files.make_folder(marker.parent)
            files.replace(marker, b"")
        return shared

    def check(self) -> None:
        """Check, in a task, that the folders are shared: files that a task wrote
        elsewhere would be lost.

        Raises:
            FolderNotSharedError: one is not, or the bucket refuses this machine.
        """
        files = Files(Disk())
        for marker in self._markers():
            why = ""
            try:
                is_seen = files.exists(marker)
            except ObjectStoreError as error:
                is_seen, why = False, f": {error.message}"
            if not is_seen:
                raise FolderNotSharedError(f"executors do not see {marker.parent}{why}")

    def remove(self, disk: Disk) -> None:
        """Remove the markers."""
        files = Files(disk)
        for marker in self._markers():
            files.remove(marker)

    def _markers(self) -> list[AnyPath]:
        folders = dict.fromkeys(place.folder for place in self.places.values())
        return [folder / self.marker for folder in folders]
