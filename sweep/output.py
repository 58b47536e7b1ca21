"""The tables that a sweep writes: `roots`, `verdicts`, `findings` and `summary`.

The path is `<out>/<table>/sweep_id=<id>/<table>.parquet`, so Spark, DuckDB and pyarrow
read each table, over all sweeps, as one partitioned table. Files are written
atomically, and the summary last: a sweep without a summary is not complete.

A table that tasks wrote has several files, beside a `<table>.parquet` without rows. Its
`_manifest.json` names them: a file that it does not name was never committed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chunktable.files import AnyPath, Files, NewFile, open_parquet, store_error
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import DiskError
from sweep.errors import SweepNotFoundError
from sweep.model import (
    FINAL_VERDICT_SCHEMA,
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    UNSEEN_SCHEMA,
)
from sweep.pieces import Range, StoredFile, StoredTable, TablePlace, may_hold

# The format version of all tables, stored in the metadata of each file. It is raised
# when an old reader would misread them: one that knows no manifests would take a table
# of several files for an empty one.
VERSION = 2
_ONE_FILE_VERSION = 1
_MANIFEST = "_manifest.json"
_VERSION_KEY = b"treefold.sweep"
_SUMMARY = re.compile(r"sweep_id=([^/]+)/summary\.parquet")
_ROW_GROUP = 1 << 17
_TREES_KEPT = 2

JsonObject = dict[str, object]

_SUMMARY_SCHEMA = pa.schema(
    [
        pa.field("started_at", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("containers", pa.int64(), nullable=False),
        pa.field("replicas", pa.int64(), nullable=False),
        pa.field("diverged", pa.list_(pa.int64()), nullable=False),
        pa.field("findings", pa.int64(), nullable=False),
        # The whole summary, as printed by --json.
        pa.field("json", pa.string(), nullable=False),
    ]
)


class SweepTable(Enum):
    """A table of a sweep; the value is the name of its folder."""

    ROOTS = "roots"
    VERDICTS = "verdicts"
    FINDINGS = "findings"
    # Earlier releases wrote none.
    UNSEEN = "unseen"
    # Written last: it completes the sweep.
    SUMMARY = "summary"


_SCHEMAS: Mapping[SweepTable, pa.Schema] = {
    SweepTable.ROOTS: REPLICA_SCHEMA,
    SweepTable.VERDICTS: FINAL_VERDICT_SCHEMA,
    SweepTable.FINDINGS: FINDING_SCHEMA,
    SweepTable.UNSEEN: UNSEEN_SCHEMA,
    SweepTable.SUMMARY: _SUMMARY_SCHEMA,
}


@dataclass(frozen=True, slots=True)
class SkippedInput:
    """An input that was not read, and why. Its content is unknown, not lost."""

    input: str
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one sweep, in numbers."""

    sweep_id: str
    engine: str
    # Of the rows that were read, whatever was asked for: values of TreeSource by comma,
    # and "none" of replicas without a tree.
    source: str
    started_at: datetime
    # Without the earlier attempts of a resumed sweep.
    seconds: float
    rows: int
    containers: int
    replicas: int
    # Replicas that were not compared: open or erasure-coded.
    excluded: int
    # Container IDs, ascending.
    diverged: tuple[int, ...]
    # Numbers of containers by Verdict, of findings by kind, of replicas by RootMethod.
    verdicts: Mapping[str, int]
    findings: Mapping[str, int]
    paths: Mapping[str, int]
    skipped: tuple[SkippedInput, ...]
    # Replicas that were compared, and expected replicas that were not read.
    compared: int = 0
    unseen: int = 0
    # Replicas without a tree that should take part: closed, not erasure-coded.
    without_tree: int = 0
    notes: tuple[str, ...] = ()
    # The newest sweep that was compared for silent changes.
    previous: str | None = None
    # Only for the report: when volumes were created, in ms since the epoch, by datanode
    # and volume, if known.
    volumes_created_ms: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Summary":
        """The summary from its JSON object, which lacks `volumes_created_ms`."""
        return cls(
            sweep_id=raw["sweepID"],
            engine=raw["engine"],
            source=raw["source"],
            started_at=datetime.fromisoformat(raw["startedAt"]),
            seconds=raw["seconds"],
            rows=raw["rows"],
            containers=raw["containers"],
            replicas=raw["replicas"],
            excluded=raw["excluded"],
            diverged=tuple(raw["diverged"]),
            verdicts=raw["verdicts"],
            findings=raw["findingsByKind"],
            paths=raw["paths"],
            skipped=tuple(SkippedInput(**one) for one in raw["skipped"]),
            compared=raw.get("compared", 0),
            unseen=raw.get("unseen", 0),
            without_tree=raw.get("withoutTree", 0),
            notes=tuple(raw["notes"]),
            previous=raw["previous"],
        )

    def json(self) -> JsonObject:
        """The JSON object that --json prints."""
        return {
            "sweepID": self.sweep_id,
            "engine": self.engine,
            "source": self.source,
            "startedAt": self.started_at.isoformat(timespec="milliseconds"),
            "seconds": round(self.seconds, 3),
            "rows": self.rows,
            "rowsPerSecond": round(self.rows / self.seconds) if self.seconds else None,
            "containers": self.containers,
            "replicas": self.replicas,
            "excluded": self.excluded,
            "compared": self.compared,
            "unseen": self.unseen,
            "withoutTree": self.without_tree,
            "diverged": list(self.diverged),
            "verdicts": dict(self.verdicts),
            "findings": sum(self.findings.values()),
            "findingsByKind": dict(self.findings),
            "paths": dict(self.paths),
            "skipped": [asdict(one) for one in self.skipped],
            "notes": list(self.notes),
            "previous": self.previous,
        }


def new_sweep_id(started_at: datetime) -> str:
    """An ID that sorts by time; the suffix is the fraction of a second in 1/65536."""
    fraction = started_at.microsecond * 0x10000 // 1_000_000
    return f"{started_at.astimezone(UTC):%Y%m%dT%H%M%SZ}-{fraction:04x}"


class SweepStore:
    """The sweeps stored in one folder, of this machine or of a bucket."""

    def __init__(
        self, folder: AnyPath, disk: Disk, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called before each change of a bucket (sweep.lease)."""
        self.folder = folder
        self.access = Files(disk, check)

    def path(self, table: SweepTable, sweep_id: str) -> AnyPath:
        """The path of a table of a sweep."""
        return self.folder / table.value / f"sweep_id={sweep_id}" / f"{table.value}.parquet"

    def report(self, sweep_id: str) -> AnyPath:
        """The path of the report of a sweep."""
        return self.folder / "report" / f"sweep_id={sweep_id}" / "report.html"

    def trees(self, sweep_id: str) -> AnyPath:
        """The folder of a sweep's packed trees (sweep.trees), if it wrote them."""
        return self.folder / "trees" / f"sweep_id={sweep_id}"

    def place(self, table: SweepTable, sweep_id: str) -> TablePlace:
        """Where tasks write the files of a table."""
        return TablePlace(self.path(table, sweep_id).parent, _schema(table, _ONE_FILE_VERSION))

    def files(self, table: SweepTable, sweep_id: str) -> list[AnyPath]:
        """The files of a table that was written.

        Raises:
            DiskError: the manifest of the table cannot be read.
        """
        path = self.path(table, sweep_id)
        return [path, *(path.with_name(file.name) for file in self._committed(path))]

    def stored_files(self, table: SweepTable, sweep_id: str) -> dict[AnyPath, StoredFile | None]:
        """The files with the rows of a table that was written, each with what its
        manifest says of it; None for a table in one file.

        Raises:
            DiskError: the manifest of the table cannot be read.
        """
        path = self.path(table, sweep_id)
        committed = {path.with_name(file.name): file for file in self._committed(path)}
        return {**committed} if committed else {path: None}

    def stored(self, table: SweepTable, sweep_id: str, schema: pa.Schema) -> StoredTable:
        """A table that was written, to be read range by range; `schema` has some of its
        columns. A table `unseen` that an earlier release did not write is empty.

        Raises:
            DiskError: the table cannot be read.
        """
        path = self.path(table, sweep_id)
        if table is SweepTable.UNSEEN and not self.access.exists(path):
            return StoredTable([], schema)
        files = {path.with_name(file.name): file for file in self._committed(path)}
        return StoredTable([path], schema, files)

    def _committed(self, path: AnyPath) -> list[StoredFile]:
        """The files that the manifest beside a table's file names; none without one."""
        manifest = path.with_name(_MANIFEST)
        try:
            content = self.access.read(manifest)
        except DiskError as error:
            if error.facts.get("missing"):
                return []
            raise
        try:
            return [StoredFile.of(one) for one in parse_json(content)["files"]]
        except (ValueError, TypeError, KeyError) as error:
            raise DiskError(f"{manifest} is damaged: {error!r}", path=str(manifest)) from error

    @contextmanager
    def write_table(self, table: SweepTable, sweep_id: str) -> Iterator["SweepTableWriter"]:
        """Write a table. It replaces an existing one when the context ends without an
        error.

        Raises:
            DiskError: the table cannot be written.
        """
        path, schema = self.path(table, sweep_id), _schema(table, _ONE_FILE_VERSION)
        with write_atomically(path, schema, self.access) as rows:
            writer = SweepTableWriter(rows)
            yield writer
        manifest, committed = path.with_name(_MANIFEST), {path.name}
        if writer.files:
            assert not rows.rows
            with write_atomically(path, _schema(table, VERSION), self.access):
                pass
            named = [asdict(file) for file in writer.files]
            document = {"version": VERSION, "files": named}
            self.access.replace(manifest, json.dumps(document).encode())
            committed |= {manifest.name, *(file.name for file in writer.files)}
        # What failed attempts left: other programs list the folder.
        for name in self.access.names(path.parent):
            if name not in committed:
                self.access.remove(path.with_name(name))

    def write_summary(self, summary: Summary) -> None:
        """Complete a sweep whose other tables are written.

        Raises:
            DiskError: the summary cannot be written.
        """
        row = {
            "started_at": summary.started_at,
            "engine": summary.engine,
            "seconds": summary.seconds,
            "rows": summary.rows,
            "containers": summary.containers,
            "replicas": summary.replicas,
            "diverged": list(summary.diverged),
            "findings": sum(summary.findings.values()),
            "json": json.dumps(summary.json()),
        }
        with self.write_table(SweepTable.SUMMARY, summary.sweep_id) as writer:
            writer.add(pa.Table.from_pylist([row], _SUMMARY_SCHEMA))

    def sweeps(self) -> list[str]:
        """The IDs of the complete sweeps, oldest first."""
        below = self.access.files_below(self.folder / SweepTable.SUMMARY.value)
        return sorted(match[1] for path in below if (match := _SUMMARY.fullmatch(path)))

    def sweep(self, name: str) -> str:
        """The ID of the sweep named by an ID, by a unique prefix of one, or by
        "latest".

        Raises:
            SweepNotFoundError: no sweep has this name, or more than one.
        """
        sweeps = self.sweeps()
        if name == "latest" and sweeps:
            return sweeps[-1]
        if name in sweeps:
            return name
        found = [sweep for sweep in sweeps if name and sweep.startswith(name)]
        if len(found) != 1:
            what = "more than one sweep begins with" if found else "there is no sweep"
            raise SweepNotFoundError(
                f"{what} {name} in {self.folder}",
                hint=f"The last ones: {', '.join(sweeps[-3:])}." if sweeps else "",
                sweep_id=name,
            )
        return found[0]

    def summary(self, sweep_id: str) -> JsonObject:
        """The JSON object of a complete sweep's summary.

        Raises:
            DiskError: the summary cannot be read.
        """
        try:
            found: JsonObject = parse_json(
                self.read(SweepTable.SUMMARY, sweep_id, ["json"])["json"][0].as_py()
            )
        except (ValueError, IndexError) as error:
            path = self.path(SweepTable.SUMMARY, sweep_id)
            raise DiskError(f"{path} cannot be read: {error}", path=str(path)) from error
        return found

    def datanodes(self, sweep_id: str) -> frozenset[str]:
        """The datanodes in a sweep's table `roots`, which must be written.

        Raises:
            DiskError: the table cannot be read.
        """
        return self._in_roots(sweep_id, "datanode")

    def sources(self, sweep_id: str) -> frozenset[str]:
        """Where the checksums in a sweep's table `roots`, which must be written, come
        from: values of TreeSource, and "none" for replicas without a tree.

        Raises:
            DiskError: the table cannot be read.
        """
        return self._in_roots(sweep_id, "source")

    def _in_roots(self, sweep_id: str, column: str) -> frozenset[str]:
        pieces = self.pieces(SweepTable.ROOTS, sweep_id, [column])
        return frozenset(name for piece in pieces for name in piece[column].unique().to_pylist())

    def read(
        self,
        table: SweepTable,
        sweep_id: str,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
    ) -> pa.Table:
        """A table of a complete sweep, or some of its columns, or only the rows `where`
        an expression over these columns is true.

        Raises:
            DiskError: the table cannot be read, or was written by a later version.
        """
        schema = _SCHEMAS[table]
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        pieces = self.pieces(table, sweep_id, wanted.names)
        found = pieces if where is None else (piece.filter(where) for piece in pieces)
        return pa.concat_tables([wanted.empty_table(), *found])

    def pieces(
        self, table: SweepTable, sweep_id: str, columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """Some columns of a table, one row group at a time.

        Raises:
            DiskError: the table cannot be read, or was written by a later version.
        """
        if table is SweepTable.UNSEEN and not self.access.exists(self.path(table, sweep_id)):
            return
        for path in self.files(table, sweep_id):
            yield from self.pieces_of_file(path, columns)

    def pieces_of_file(
        self, path: AnyPath, columns: Sequence[str], wanted: Range | None = None
    ) -> Iterator[pa.Table]:
        """Some columns of one file of a table, one row group at a time. If a range is
        `wanted`, row groups without containers of it are not read.

        Raises:
            DiskError: the file cannot be read, or was written by a later version.
        """
        try:
            with open_parquet(path) as file:
                version = int((file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"0"))
                if version > VERSION:
                    raise DiskError(
                        f"{path} has version {version}; this release reads up to {VERSION}",
                        path=str(path),
                    )
                for group in range(file.metadata.num_row_groups):
                    if wanted is not None and not may_hold(file, group, wanted):
                        continue
                    found = file.read_row_group(group, list(columns)).replace_schema_metadata()
                    if "unread" in columns and "unread" not in found.column_names:
                        # Earlier releases did not count them.
                        zeros = pa.repeat(pa.scalar(0, pa.int32()), found.num_rows)
                        unread = FINAL_VERDICT_SCHEMA.field("unread")
                        found = found.append_column(unread, zeros).select(list(columns))
                    yield found
        # For most damage pyarrow raises ArrowInvalid, a ValueError.
        except (OSError, ValueError, pa.ArrowException) as error:
            text = f"{path} cannot be read: {error}"
            raise store_error(path, error) or DiskError(text, path=str(path)) from error

    def retain(self, count: int) -> list[str]:
        """Remove all complete sweeps except the last `count` (0 keeps all), and what
        abandoned sweeps left. Returns the removed IDs. Keeps the trees of the last two
        sweeps only.

        Do not call this while a sweep is running.

        Raises:
            DiskError: a sweep cannot be removed.
        """
        doomed = self.sweeps()[:-count] if count else []
        for sweep_id in doomed:
            # The summary first: without it the sweep no longer counts as complete.
            self.access.remove_folder(self.path(SweepTable.SUMMARY, sweep_id).parent)
        kept = self.sweeps()
        self._remove_all_but(kept, *(table.value for table in SweepTable), "report")
        # Trees are as large as everything else together.
        self._remove_all_but(kept[-_TREES_KEPT:], "trees")
        return doomed

    def _remove_all_but(self, kept: Sequence[str], *tables: str) -> None:
        names = {f"sweep_id={sweep_id}" for sweep_id in kept}
        for folder in (self.folder / table for table in tables):
            for name in self.access.names(folder):
                if name.startswith("sweep_id=") and name not in names:
                    self.access.remove_folder(folder / name)


def _schema(table: SweepTable, version: int) -> pa.Schema:
    return _SCHEMAS[table].with_metadata({_VERSION_KEY: str(version).encode()})


class SweepTableWriter:
    """Writes a table of a sweep: rows, or files that tasks wrote to its place."""

    def __init__(self, writer: "TableWriter") -> None:
        self._writer = writer
        self.files: list[StoredFile] = []

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self._writer.add(table)

    def add_file(self, file: StoredFile) -> None:
        """Append a durable file; it counts once the table is written."""
        self.files.append(file)


class TableWriter:
    """Writes one Parquet file."""

    def __init__(
        self, new: NewFile, schema: pa.Schema, compression: str, opaque: str | None, row_group: int
    ) -> None:
        self._schema = schema
        self._row_group = row_group
        described = opaque is None or [name for name in schema.names if name != opaque]
        self._out = pq.ParquetWriter(
            new.target,
            schema,
            compression=compression,
            use_dictionary=described,
            write_statistics=described,
            write_page_checksum=True,
        )
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Append rows, as one or more row groups."""
        if table.num_rows:
            # Fails if the table lacks a column, which would be our own bug.
            self._out.write_table(
                table.select(self._schema.names).cast(self._schema), row_group_size=self._row_group
            )
            self.rows += table.num_rows

    def close(self) -> None:
        """Write the footer."""
        self._out.close()


@contextmanager
def write_atomically(
    path: AnyPath,
    schema: pa.Schema,
    files: Files,
    *,
    compression: str = "zstd",
    opaque: str | None = None,
    row_group: int = _ROW_GROUP,
) -> Iterator[TableWriter]:
    """Write a Parquet file. It appears at `path`, complete and durable, when the
    context ends without an error.

    The column `opaque` holds unique values, so it gets no dictionary and no statistics.

    Raises:
        DiskError: the file cannot be written.
    """
    new = files.create(path)
    try:
        try:
            writer = TableWriter(new, schema, compression, opaque, row_group)
            try:
                yield writer
            finally:
                writer.close()
        except OSError as error:
            text = f"{path} cannot be written: {error}"
            raise store_error(path, error) or DiskError(text, path=str(path)) from error
        new.close()
    except BaseException:
        new.discard()
        raise
