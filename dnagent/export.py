"""Export a datanode's chunk table: changed replicas into new files, then a manifest.

Unchanged replicas stay in their files. A file with few live rows is rewritten, so that
the table does not grow without bound. The manifest is written last and commits the
export. The next export removes files that no manifest lists. The last two tables are
kept whole.
"""

import contextlib
import heapq
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError, DestinationError
from chunktable.manifest import (
    AuditMark,
    FileKind,
    Manifest,
    SkippedVolume,
    TableFile,
    TableRefusal,
    check_counts,
    file_name,
    is_file_name,
    manifest_name,
    manifest_sequence,
    sequence_of,
)
from chunktable.places import Destination, drop_undecodable_names
from chunktable.reader import check_content, latest_manifest, read_inventory
from chunktable.schema import (
    CHUNK_SCHEMA,
    CONTAINER_SCHEMA,
    EVENT_SCHEMA,
    FAULT_SCHEMA,
    ReplicaAttributes,
    ReplicaRows,
    replica_stretches,
    rows_of,
)
from chunktable.writer import (
    FILE_ROWS_MAX,
    GROUP_ROWS,
    TEXT_TYPE,
    WRITTEN_SCHEMA,
    ChunkFileWriter,
    OpenChunkFile,
    has_wide_checksums,
    row_count_error,
)
from dnagent.audit_events import AuditReader, event_row
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import ContainerId
from ozone.survey import ReplicaFault, ReplicaSnapshot
from runtime.errors import DiskError, OperationInterruptedError

# With more small files than this, all of them are merged.
_SMALL_FILES_MAX = 16
# All are open at once; the next export continues with the rest.
_REWRITTEN_FILES_MAX = 64
# Longer than the time between two sweeps that are compared.
_EVENTS_KEPT = timedelta(days=35)
# Events and faults are buffered in memory up to this many rows.
_PIECE_ROWS = 200_000

_ReplicaKey = tuple[str, int]


class ReplicaSurvey(Protocol):
    """The replicas of a volume (ozone.survey.VolumeSurvey)."""

    @property
    def datanode(self) -> str:
        """The UUID of the volume's datanode."""

    @property
    def volume(self) -> str:
        """The storage ID of the volume."""

    @property
    def created_ms(self) -> int | None:
        """When the volume was created, in ms since the epoch; None if unknown."""

    @property
    def fault(self) -> ReplicaFault | None:
        """A fault of the volume as a whole; None if there is none."""

    def ids(self) -> list[ContainerId]:
        """The containers of the volume, ascending.

        Raises:
            DiskError: the volume cannot be listed.
        """

    def replicas(
        self,
        source: TreeSource,
        ids: Iterable[ContainerId] | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[ReplicaSnapshot]:
        """Each replica with its tree from `source`; `ids` None means all.

        Raises:
            OperationInterruptedError: `cancelled` returned True.
        """


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Limits in rows, and of the number of small files; tests use low ones."""

    group_rows: int = GROUP_ROWS
    file_rows_max: int = FILE_ROWS_MAX
    small_files_max: int = _SMALL_FILES_MAX
    piece_rows: int = _PIECE_ROWS


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """The progress of an export; `rows` are those of the finished containers."""

    containers: int
    containers_total: int
    rows: int


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export. `lost_volumes` were in the previous table only."""

    manifest: Manifest
    location: str
    containers_written: int
    rows_written: int
    bytes_written: int
    events: int
    faults: int
    lost_volumes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _RowLocation:
    """The file of a replica's rows, their number, and the replica's generation."""

    generation: int
    file: str
    rows: int


def _now() -> datetime:
    # Milliseconds, the resolution of the manifest.
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def files_to_rewrite(
    rows: Mapping[str, int], live: Mapping[str, int], *, small_rows: int, small_files_max: int
) -> frozenset[str]:
    """The files whose live rows are moved to new files.

    These are files with less than half of their rows live, and all small files if they
    are too many. Files without live rows are dropped instead. `rows` and `live` are the
    numbers of all and of live rows by file.
    """
    sparse = sorted(name for name, count in live.items() if count > 0 and 2 * count < rows[name])
    small = sorted(
        name for name, count in live.items() if 0 < count < small_rows and name not in sparse
    )
    chosen = [*sparse, *(small if len(small) > small_files_max else [])]
    return frozenset(chosen[:_REWRITTEN_FILES_MAX])


def export(
    surveys: Sequence[ReplicaSurvey],
    skipped: Sequence[SkippedVolume],
    destination: Destination,
    *,
    source: TreeSource,
    full: bool = False,
    audit_file: Path | None = None,
    limits: ExportLimits = ExportLimits(),
    now: Callable[[], datetime] = _now,
    on_done: Callable[[ExportProgress], None] = lambda _: None,
    on_bytes: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ExportResult:
    """Export all replicas of one or more volumes of one datanode.

    `full` writes every row again. Repairs are read from `audit_file`, which may be
    missing.

    Raises:
        BusyError: another export to the same folder is running.
        ChunkTableError: a newer release wrote the table, or a file to be rewritten is
            damaged.
        DestinationError, DiskError: the destination cannot be written, or a volume
            cannot be listed.
        OperationInterruptedError: `cancelled` returned True.
    """
    datanodes = {survey.datanode for survey in surveys}
    assert len(datanodes) == 1
    with destination.exclusive() as is_alone:
        run = _Export(destination, datanodes.pop(), source, limits, now, cancelled)
        run.load_previous(full=full)
        try:
            run.export_replicas(sorted(surveys, key=lambda s: s.volume), skipped, on_done, on_bytes)
            run.rewrite_files()
            run.add_events(audit_file, {survey.volume for survey in surveys})
            run.add_inventory()
        except BaseException:
            run.discard()
            raise
        exported = run.commit(
            {s.volume: s.created_ms for s in sorted(surveys, key=lambda s: s.volume)}, skipped
        )
        # The export is committed; the next one removes any remaining files.
        with contextlib.suppress(DiskError, DestinationError, ChunkTableError):
            run.remove_unused_files(is_alone=is_alone)
        return exported


class _Export:
    """The state of one export."""

    def __init__(
        self,
        destination: Destination,
        datanode: str,
        source: TreeSource,
        limits: ExportLimits,
        now: Callable[[], datetime],
        cancelled: Callable[[], bool],
    ) -> None:
        self._destination = destination
        self._datanode = datanode
        self._source = source
        self._limits = limits
        self._now = now
        self._cancelled = cancelled
        self._begun_at = now()
        self._token = uuid.uuid4().hex[:8]
        self._sequence = 1
        self._previous: Manifest | None = None
        # The rows of each replica in the previous table and in the new one.
        self._previous_locations: dict[_ReplicaKey, _RowLocation] = {}
        self._locations: dict[_ReplicaKey, _RowLocation] = {}
        self._reusable = True
        # Files of the previous table whose content has changed since the write.
        self._damaged_files: frozenset[str] = frozenset()
        self._files: list[TableFile] = []
        self._numbers = itertools.count(1)
        self._faults: list[dict[str, object]] = []
        self._fault_count = 0
        self._event_count = 0
        self._audit: AuditMark | None = None
        self._containers_written = 0

    def load_previous(self, *, full: bool) -> None:
        """Read the manifest and the inventory of the previous table."""
        names = self._names()
        sequences = [s for s in map(manifest_sequence, names) if s is not None]
        self._sequence = max(sequences, default=0) + 1
        if not sequences:
            return
        try:
            self._previous = latest_manifest(self._destination.filesystem, self._destination.folder)
            check_counts(self._previous)
            inventory = read_inventory(
                self._destination.filesystem, self._destination.folder, self._previous
            )
        except ChunkTableError as error:
            if error.reason == TableRefusal.NEWER_VERSION.value:
                raise
            # A damaged table is written again from the start.
            self._previous = None
            return
        for batch in inventory.to_batches():
            columns = batch.to_pydict()
            keys = zip(columns["volume"], columns["container_id"], strict=True)
            locations = map(_RowLocation, columns["generation"], columns["file"], columns["rows"])
            self._previous_locations.update(zip(keys, locations, strict=True))
        self._reusable = not full
        self._damaged_files = self._find_damaged_files(self._previous)

    def export_replicas(
        self,
        surveys: Sequence[ReplicaSurvey],
        skipped: Sequence[SkippedVolume],
        on_done: Callable[[ExportProgress], None],
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        """Write the rows of all new or changed replicas."""
        for volume in skipped:
            self._add_fault(
                volume.path,
                None,
                ReplicaFault("unreadable", f"{volume.error_code}: {volume.message}"),
            )
        ids = {survey.volume: survey.ids() for survey in surveys}
        total, rows = sum(map(len, ids.values())), 0
        with self._chunk_files() as out:
            for survey in surveys:
                if survey.fault is not None:
                    self._add_fault(survey.volume, None, survey.fault)
                found = survey.replicas(
                    self._source, ids[survey.volume], on_bytes=on_bytes, cancelled=self._cancelled
                )
                for replica in found:
                    rows += self._export_replica(survey, replica, out)
                    on_done(ExportProgress(len(self._locations), total, rows))

    def rewrite_files(self) -> None:
        """Move live rows out of the files that `files_to_rewrite` selects."""
        live: dict[str, int] = {}
        for location in self._locations.values():
            live[location.file] = live.get(location.file, 0) + location.rows
        files = self._previous.of_kind(FileKind.CHUNKS) if self._previous else ()
        old = {file.name: file.rows for file in files}
        chosen = files_to_rewrite(
            old,
            {name: count for name, count in live.items() if name in old},
            small_rows=self._limits.group_rows,
            small_files_max=self._limits.small_files_max,
        )
        self._files += [f for f in files if f.name in live and f.name not in chosen]
        if not chosen:
            return
        pieces = heapq.merge(
            *(self._live_pieces(name) for name in sorted(chosen)), key=lambda piece: piece[0]
        )
        with self._chunk_files() as out:
            for (key, is_wide), group in itertools.groupby(pieces, key=lambda piece: piece[:2]):
                location = self._locations[key]
                batches = (batch for _, _, batch in group)
                file = out.add(batches, location.rows, is_wide=is_wide)
                self._locations[key] = _RowLocation(location.generation, file, location.rows)
        missing = [key for key, location in self._locations.items() if location.file in chosen]
        if missing:
            raise row_count_error(self._locations[missing[0]].file)

    def add_events(self, audit_file: Path | None, volumes: set[str]) -> None:
        """Write the repairs and deletes since the previous table, and keep its event
        files.
        """
        created_at = self._now()
        old = self._previous.of_kind(FileKind.EVENTS) if self._previous else ()
        # If an event file is damaged, the whole audit file is read again.
        is_whole = not any(file.name in self._damaged_files for file in old)
        self._files += [f for f in old if is_whole and created_at - f.created_at < _EVENTS_KEPT]
        gone = self._previous_locations.keys() - self._locations.keys()
        deletes = (
            event_row(self._datanode, created_at, "delete", container_id)
            for volume, container_id in sorted(gone)
            if volume in volumes
        )
        audit = AuditReader(
            audit_file, self._previous.audit if self._previous and is_whole else None
        )
        events = itertools.chain(deletes, audit.events(self._datanode))
        order = [
            (name, "ascending") for name in ("container_id", "block_id", "chunk_offset", "time")
        ]
        while piece := list(itertools.islice(events, self._limits.piece_rows)):
            self._write(FileKind.EVENTS, pa.Table.from_pylist(piece, EVENT_SCHEMA).sort_by(order))
            self._event_count += len(piece)
        self._audit = audit.mark

    def add_inventory(self) -> None:
        """Write the remaining faults and the inventory of replicas and their files."""
        self._flush_faults(0)
        keys = sorted(self._locations)
        inventory = pa.table(
            [
                [volume for volume, _ in keys],
                [container_id for _, container_id in keys],
                *(
                    [getattr(self._locations[key], name) for key in keys]
                    for name in ("generation", "file", "rows")
                ),
            ],
            schema=CONTAINER_SCHEMA,
        )
        self._write(FileKind.CONTAINERS, inventory)

    def discard(self) -> None:
        """Remove the files of a failed export, as far as possible; the next export
        removes the rest.
        """
        for file in self._files:
            if file.sequence == self._sequence:
                with contextlib.suppress(DiskError, DestinationError):
                    self._destination.remove(file.name)

    def commit(
        self, volumes: Mapping[str, int | None], skipped: Sequence[SkippedVolume]
    ) -> ExportResult:
        """Write the manifest; `volumes` maps each volume to its creation time."""
        manifest = Manifest(
            datanode=self._datanode,
            sequence=self._sequence,
            previous=self._previous.sequence if self._previous else None,
            begun_at=self._begun_at,
            created_at=self._now(),
            source=self._source,
            volumes=tuple(volumes),
            skipped=tuple(skipped),
            files=tuple(sorted(self._files, key=lambda file: file.name)),
            containers=len(self._locations),
            rows=sum(location.rows for location in self._locations.values()),
            audit=self._audit,
            volumes_created_ms={volume: ms for volume, ms in volumes.items() if ms is not None},
        )
        with self._destination.create(manifest.name) as sink:
            sink.write(manifest.to_bytes())
        new = [file for file in self._files if file.sequence == self._sequence]
        return ExportResult(
            manifest,
            self._destination.folder,
            self._containers_written,
            sum(file.rows for file in new if file.kind is FileKind.CHUNKS),
            sum(file.length_bytes for file in new),
            self._event_count,
            self._fault_count,
            tuple(sorted({volume for volume, _ in self._previous_locations} - set(volumes))),
        )

    def remove_unused_files(self, *, is_alone: bool) -> None:
        """Remove files that neither this table nor the previous one lists."""
        # If another export may run, files of this sequence may be in use.
        end = self._sequence + is_alone
        kept = {
            file.name for file in (*self._files, *(self._previous.files if self._previous else ()))
        }
        kept |= {manifest_name(self._sequence)} | (
            {self._previous.name} if self._previous else set()
        )
        for name in self._names():
            plain = name.removesuffix(".tmp")
            sequence = sequence_of(plain) if is_file_name(plain) else manifest_sequence(plain)
            if name not in kept and sequence is not None and sequence < end:
                self._destination.remove(name)

    def _export_replica(
        self, survey: ReplicaSurvey, found: ReplicaSnapshot, out: ChunkFileWriter
    ) -> int:
        for fault in found.faults:
            self._add_fault(survey.volume, found.container_id, fault)
        rows = _rows(survey, found, self._now)
        key = (survey.volume, int(found.container_id))
        before = self._previous_locations.get(key)
        unchanged = before and (before.generation, before.rows) == (rows.generation, rows.count)
        is_readable = before and before.file not in self._damaged_files
        if before and self._reusable and unchanged and is_readable:
            self._locations[key] = before
        else:
            file = out.add(rows.batches(), rows.count, is_wide=rows.has_wide_checksums)
            self._locations[key] = _RowLocation(rows.generation, file, rows.count)
            self._containers_written += 1
        return rows.count

    def _find_damaged_files(self, manifest: Manifest) -> frozenset[str]:
        """The files of a table whose content differs from what was written.

        On a local disk bits may flip, which the size does not show. A bucket verifies
        its objects by its own checksums, and no name is written twice. Checking here
        would only download the whole table at each export.
        """
        if not isinstance(self._destination.filesystem, pa_fs.LocalFileSystem):
            return frozenset()
        damaged = set[str]()
        chunks = manifest.of_kind(FileKind.CHUNKS) if self._reusable else ()
        for file in (*chunks, *manifest.of_kind(FileKind.EVENTS)):
            if self._cancelled():
                raise OperationInterruptedError("the export was cancelled")
            try:
                check_content(self._destination.filesystem, self._destination.folder, file)
            except ChunkTableError:
                damaged.add(file.name)
        return frozenset(damaged)

    def _live_pieces(self, name: str) -> Iterator[tuple[_ReplicaKey, bool, pa.RecordBatch]]:
        """The live rows of a file by replica, and whether its checksums may be wide."""
        path = f"{self._destination.folder}/{name}"
        try:
            with self._destination.filesystem.open_input_file(path) as source:
                file = pq.ParquetFile(
                    source,
                    page_checksum_verification=True,
                    read_dictionary=[f.name for f in WRITTEN_SCHEMA if f.type == TEXT_TYPE],
                )
                is_wide = has_wide_checksums(file)
                for batch in file.iter_batches(columns=CHUNK_SCHEMA.names):
                    for volume, container_id, start, end in replica_stretches(batch):
                        location = self._locations.get((volume, container_id))
                        if location is not None and location.file == name:
                            rows = batch.slice(start, end - start)
                            yield (volume, container_id), is_wide, rows
        except (OSError, ValueError) as error:
            hint = "Write the whole table again with --full."
            text = f"{path} cannot be read: {error}"
            raise ChunkTableError(TableRefusal.UNREADABLE.value, text, hint=hint) from error

    def _chunk_files(self) -> ChunkFileWriter:
        return ChunkFileWriter(
            self._new_chunk_file,
            self._limits.group_rows,
            self._limits.file_rows_max,
            self._cancelled,
        )

    def _new_chunk_file(self) -> AbstractContextManager["OpenChunkFile"]:
        name = file_name(FileKind.CHUNKS, self._sequence, self._token, next(self._numbers))
        return self._new_file(name, FileKind.CHUNKS)

    def _write(self, kind: FileKind, table: pa.Table) -> None:
        number = None if kind is FileKind.CONTAINERS else next(self._numbers)
        name = file_name(kind, self._sequence, self._token, number)
        with self._new_file(name, kind) as opened:
            opened.write(table)

    @contextmanager
    def _new_file(self, name: str, kind: FileKind) -> Iterator["OpenChunkFile"]:
        with self._destination.create(name) as sink:
            opened = OpenChunkFile(name, sink, is_sorted=kind is FileKind.CHUNKS)
            try:
                yield opened
            finally:
                opened.close()
        pieces = tuple(sink.pieces) if kind is FileKind.CHUNKS else ()
        facts = opened.rows, sink.length_bytes, sink.checksum, self._now(), pieces
        self._files.append(TableFile(name, kind, *facts))

    def _add_fault(
        self, volume: str, container_id: ContainerId | None, fault: ReplicaFault
    ) -> None:
        self._fault_count += 1
        self._faults.append(
            {
                "datanode": self._datanode,
                "volume": volume,
                "container_id": container_id,
                "kind": fault.kind,
                "block_id": fault.block_id,
                "chunk_offset": fault.offset,
                # File names may be invalid UTF-8.
                "detail": fault.detail.encode("utf-8", "backslashreplace").decode(),
            }
        )
        self._flush_faults(self._limits.piece_rows)

    def _flush_faults(self, more_than: int) -> None:
        if len(self._faults) > more_than:
            self._write(FileKind.FINDINGS, pa.Table.from_pylist(self._faults, FAULT_SCHEMA))
            self._faults = []

    def _names(self) -> list[str]:
        folder = self._destination.folder
        try:
            entries = self._destination.filesystem.get_file_info(
                pa_fs.FileSelector(folder, allow_not_found=True)
            )
        except OSError as error:
            raise DestinationError(
                f"cannot list {folder}: {error}", operation="list", path=folder
            ) from error
        named = drop_undecodable_names(entries)
        return [entry.base_name for entry in named if entry.type is pa_fs.FileType.File]


def _rows(
    survey: ReplicaSurvey, found: ReplicaSnapshot, now: Callable[[], datetime]
) -> ReplicaRows:
    scanned_ms = (
        round(now().timestamp() * 1000) if found.source is TreeSource.DATA else found.scanned_at_ms
    )
    replica = ReplicaAttributes(
        datanode=survey.datanode,
        volume=survey.volume,
        container_id=found.container_id,
        state=found.state or ReplicaState.INVALID,
        bcs_id=found.bcs_id,
        replica_index=found.replica_index,
        source=found.source.value if found.source else "none",
        scanned_at_ms=scanned_ms,
    )
    return rows_of(replica, TreeColumns.of(found.tree) if found.source else None)
