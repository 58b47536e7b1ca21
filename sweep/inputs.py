"""Find the chunk tables that a sweep reads, and split them into parts.

A table is a Parquet file, a folder of Parquet files, or a folder that contains exports
of agents at any depth. An export has a manifest; the newest complete manifest of each
volume counts. An input that cannot be read is skipped and listed with the reason,
because its content is unknown rather than lost.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

import pyarrow.fs as fs
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    FileKind,
    Manifest,
    check_counts,
    is_file_name,
    manifest_name,
    manifest_sequence,
)
from chunktable.places import drop_undecodable_names, resolve_location
from chunktable.reader import latest_manifest
from chunktable.writer import GROUP_ROWS
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from sweep.exports import Exports, ForEach, here, read_manifests
from sweep.files import REQUIRED
from sweep.model import Part, PartKind
from sweep.output import SkippedInput

# Rows of one part. One core reads them in a second or less, so that all cores finish at
# about the same time.
_PART_ROWS = 4 << 20
# Replicas of one part, for the same reason: one costs as much as 60 rows. They bound
# memory too, at about 400 bytes each.
_PART_REPLICAS = 1 << 18

# Reading a footer or a manifest is mostly waiting, above all for remote files.
_FOOTERS_AT_ONCE = 16

# Why a readable table without a manifest is skipped.
NO_ROWS = "there are no rows in it"

# A file with none of these columns belongs to no table, and costs the others nothing.
_NAMING = frozenset({"datanode", "container_id", "block_id"})
_FOREIGN = "it is not a chunk table"

# A replica may be spread over the files of a folder.
ALL_OR_NONE = "; the folder is one table, so none of its files is compared"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The parts of some tables in the order requested, and the inputs left out."""

    parts: tuple[Part, ...]
    skipped: tuple[SkippedInput, ...]
    # The exports by the locations of their manifests.
    exports: Exports = field(default_factory=dict)
    # When the exports' volumes were created, in ms since the epoch, by datanode and
    # volume, if known.
    volumes_created_ms: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Exports that were joined or superseded.
    notes: tuple[str, ...] = ()

    @property
    def manifests(self) -> tuple[str, ...]:
        """The locations of the manifests of the exports."""
        return tuple(self.exports)


def table_parts(
    names: Iterable[str], part_rows: int = _PART_ROWS, for_each: ForEach = here
) -> Inputs:
    """The parts of some tables, given as paths or URIs. A file found twice is read
    once. Manifests are read by `for_each`.

    Raises:
        UsageError: a URI is invalid.
    """
    files, exports, skipped = list[_File](), list[_Export](), list[SkippedInput]()
    plain = dict[str, set[str]]()
    for name in names:
        found = _find_tables(name, for_each)
        if found[0] and not (found[1] or found[2]):
            plain[name] = {file.location for file in found[0]}
        files += found[0]
        exports += found[1]
        skipped += found[2]
    manifests, created_ms = dict[str, Manifest](), dict[tuple[str, str], int]()
    chosen, notes = _join_exports(exports)
    for export, volumes in chosen:
        manifests[export.place] = export.manifest
        created_ms |= {
            (export.manifest.datanode, v): export.manifest.volumes_created_ms[v]
            for v in volumes
            if v in export.manifest.volumes_created_ms
        }
        is_whole = set(volumes) == set(export.manifest.volumes)
        files += [replace(one, volumes=None if is_whole else volumes) for one in export.files]
        skipped += export.skipped
    # A file that is given by its own name too belongs to the table of its folder.
    tables = {file.location: file.table for file in files if file.table}
    by_location = {file.location: file for file in files}
    distinct = [replace(one, table=tables.get(place)) for place, one in by_location.items()]
    parts = list[Part]()
    without_manifest = [file for file in distinct if file.manifest is None]
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        found_groups = dict(
            zip(
                (file.location for file in without_manifest),
                pool.map(_groups, without_manifest),
                strict=True,
            )
        )
        for file in distinct:
            groups = found_groups.get(file.location)
            if groups is None:
                parts += _export_file_parts(file, part_rows)
            elif isinstance(groups, SkippedInput):
                skipped.append(groups)
            else:
                parts += _file_parts(file, groups, part_rows)
    torn = _torn_tables(distinct, skipped)
    parts = [part for part in parts if part.table not in torn]
    # The entry of the folder names its file; one fault is listed once.
    named = {one.input for faults in torn.values() for one in faults}
    skipped = [one for one in skipped if one.input not in named]
    skipped += [_whole_table(table, faults) for table, faults in torn.items()]
    listed = {part.location for part in parts} | {one.input for one in skipped} | named
    skipped += [SkippedInput(name, NO_ROWS) for name, held in plain.items() if not held & listed]
    return Inputs(
        tuple(parts),
        tuple(dict.fromkeys(skipped)),
        manifests,
        created_ms,
        notes,
    )


def is_unchanged(part: Part) -> bool:
    """Whether the file of a part still has the size and modification time that it had
    when the part was created.
    """
    try:
        filesystem, path = resolve_location(part.location)
        info = filesystem.get_file_info(path)
    except OSError:
        return False
    now = _part_id(part.location, info, part.first, part.last, by_rows=part.manifest is not None)
    return info.type is fs.FileType.File and part.part_id == now


def part_id(*facts: object) -> str:
    """A hash of these facts, which describe what a part reads."""
    return fingerprint("\n".join(map(str, facts)).encode()).hex()


@dataclass(frozen=True, slots=True)
class _File:
    """A Parquet file to be read, and the location of the manifest that lists it, if
    any.
    """

    location: str
    filesystem: fs.FileSystem
    info: fs.FileInfo
    manifest: str | None = None
    export: Manifest | None = None
    # From the manifest, of replicas about; 0 without one.
    rows: int = 0
    replicas: int = 0
    # See Part.
    volumes: tuple[str, ...] | None = None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class _Export:
    """The newest complete export of one datanode."""

    # The location of the manifest.
    place: str
    manifest: Manifest
    files: tuple[_File, ...]
    skipped: tuple[SkippedInput, ...]


def _find_tables(
    name: str, for_each: ForEach
) -> tuple[list[_File], list[_Export], list[SkippedInput]]:
    """The files without manifest, the exports and the unreadable inputs at a path."""
    try:
        filesystem, path = resolve_location(name)
        info = filesystem.get_file_info(path)
        if info.type is fs.FileType.NotFound or not name:
            return [], [], [SkippedInput(name, "there is no such file or folder")]
        if info.type is fs.FileType.File:
            return [_File(name, filesystem, info)], [], []
        found, unlisted = _list_below(filesystem, path)
    except OSError as error:
        return [], [], [SkippedInput(name, str(error))]
    folders: dict[str, list[fs.FileInfo]] = {}
    for one in found:
        if one.type is fs.FileType.File and not _is_hidden(one.path[len(path) :]):
            folders.setdefault(one.path.rpartition("/")[0], []).append(one)
    files, exports = list[_File](), list[_Export]()
    unknown = [
        SkippedInput(_location_below(name, path, folder), reason)
        for folder, reason in unlisted.items()
    ]
    skipped = list(unknown)
    # An empty folder most likely belongs to a datanode whose export is missing; do not
    # report it as a datanode without replicas.
    empty = sorted(_empty_folders(path, found) - set(unlisted))
    skipped += [
        SkippedInput(_location_below(name, path, folder), "it is empty") for folder in empty
    ]
    opened = _open_exports(name, path, filesystem, folders, for_each)
    for folder, held in sorted(folders.items()):
        tables = sorted(
            (one for one in held if one.extension == "parquet"), key=lambda one: str(one.path)
        )
        location = _location_below(name, path, folder)
        if folder in opened:
            export = opened[folder]
            if isinstance(export, SkippedInput):
                skipped.append(export)
            else:
                exports.append(export)
        elif opened and tables:
            skipped.append(
                SkippedInput(
                    location, "it has Parquet files and no manifest, beside tables that have one"
                )
            )
        else:
            files += [
                _File(_location_below(name, path, one.path), filesystem, one, table=name)
                for one in tables
            ]
    if files and unknown:
        skipped = [one for one in skipped if one not in unknown]
        skipped.append(_whole_table(name, unknown))
        files = []
    if not (files or exports or skipped):
        skipped.append(SkippedInput(name, "there is no Parquet file"))
    return files, exports, skipped


def _torn_tables(
    files: Iterable[_File], skipped: Iterable[SkippedInput]
) -> Mapping[str, Sequence[SkippedInput]]:
    """The folders of plain Parquet with files that cannot be read, and these files."""
    broken = {one.input: one for one in skipped if not one.reason.startswith(_FOREIGN)}
    torn = dict[str, list[SkippedInput]]()
    for file in files:
        if file.table and file.location in broken:
            torn.setdefault(file.table, []).append(broken[file.location])
    return torn


def _whole_table(name: str, faults: Sequence[SkippedInput]) -> SkippedInput:
    """The entry of a folder of plain Parquet that is left out for faults in it."""
    first, more = faults[0], len(faults) - 1
    rest = f", and {more} more cannot be read" if more else ""
    return SkippedInput(name, f"{first.input}: {first.reason}{rest}{ALL_OR_NONE}")


def _open_exports(
    name: str,
    path: str,
    filesystem: fs.FileSystem,
    folders: Mapping[str, Sequence[fs.FileInfo]],
    for_each: ForEach,
) -> Mapping[str, _Export | SkippedInput]:
    """The exports among the folders below `path`, or why they cannot be read."""
    newest, found = dict[str, str](), dict[str, _Export | SkippedInput]()
    for folder, held in folders.items():
        if any(map(_is_of_export, held)):
            sequences = (manifest_sequence(one.base_name) for one in held)
            last = max((one for one in sequences if one is not None), default=None)
            below = folder if last is None else f"{folder}/{manifest_name(last)}"
            newest[folder] = _location_below(name, path, below)
    read = read_manifests(list(newest.values()), for_each)
    for folder, place in newest.items():
        location = _location_below(name, path, folder)
        known = {one.name: one for one in (read.get(place),) if one is not None}
        try:
            by_name = {one.base_name: one for one in folders[folder]}
            found[folder] = _export(location, filesystem, folder, by_name, known)
        except ChunkTableError as error:
            found[folder] = SkippedInput(location, f"{error.reason}: {error.message}")
    return found


def _empty_folders(path: str, found: Sequence[fs.FileInfo]) -> set[str]:
    """The folders below `path` that have only hidden entries. `lost+found` belongs to
    the file system and is ignored.
    """
    held = [
        one
        for one in found
        if not _is_hidden(one.path[len(path) :]) and one.base_name != "lost+found"
    ]
    above = {one.path.rpartition("/")[0] for one in held}
    return {one.path for one in held if one.type is fs.FileType.Directory} - above


def _list_below(
    filesystem: fs.FileSystem, path: str
) -> tuple[list[fs.FileInfo], Mapping[str, str]]:
    """All entries below a folder, and the folders and files that cannot be listed, with
    the reason.

    Raises:
        OSError: the folder itself cannot be listed.
    """
    with suppress(OSError):
        # One request, which saves time on remote file systems.
        whole = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        found = drop_undecodable_names(whole)
        return found, _undecodable(path) if len(found) < len(whole) else {}
    found, unlisted, waiting = (
        drop_undecodable_names(filesystem.get_file_info(fs.FileSelector(path))),
        _undecodable(path),
        list[str](),
    )
    waiting += [one.path for one in found if one.type is fs.FileType.Directory]
    while waiting:
        folder = waiting.pop()
        try:
            here = drop_undecodable_names(filesystem.get_file_info(fs.FileSelector(folder)))
        except OSError as error:
            unlisted[folder] = str(error)
            continue
        found += here
        waiting += [one.path for one in here if one.type is fs.FileType.Directory]
    return found, unlisted


def _undecodable(path: str) -> dict[str, str]:
    """Local Parquet files below `path`, or their folders, whose names are not UTF-8.
    pyarrow cannot list these.
    """
    found = dict[str, str]()
    for folder, _, names in os.walk(os.fsencode(path)):
        for name in (name for name in names if name.endswith(b".parquet")):
            for place in (folder, os.path.join(folder, name)):
                shown = place.decode(errors="backslashreplace")
                if shown.encode() != place and not _is_hidden(shown[len(path) :]):
                    found[shown] = "its name is not UTF-8 text"
                    break
    return found


def _export(
    location: str,
    filesystem: fs.FileSystem,
    folder: str,
    held: Mapping[str, fs.FileInfo],
    known: Mapping[str, Manifest],
) -> _Export:
    manifest = latest_manifest(filesystem, folder, entries=held, known=known)
    check_counts(manifest)
    place = _location_below(location, folder, f"{folder}/{manifest.name}")
    # Of the whole export: which file has how many, only the inventory says.
    replicas, rows = (
        sum(file.rows for file in manifest.of_kind(kind))
        for kind in (FileKind.CONTAINERS, FileKind.CHUNKS)
    )
    files = [
        _File(
            _location_below(location, folder, held[file.name].path),
            filesystem,
            held[file.name],
            place,
            manifest,
            file.rows,
            file.rows * replicas // max(rows, 1),
        )
        for file in manifest.of_kind(FileKind.CHUNKS)
    ]
    skipped = [
        SkippedInput(f"{location}: volume {volume.path}", f"{volume.error_code}: {volume.message}")
        for volume in manifest.skipped
    ]
    return _Export(place, manifest, tuple(files), tuple(skipped))


def _join_exports(
    exports: Iterable[_Export],
) -> tuple[list[tuple[_Export, tuple[str, ...]]], tuple[str, ...]]:
    """The exports to read, each with the volumes to read of it, and notes on those that
    were joined or superseded.

    Exports of one datanode are joined by volume; of a volume, the export that was
    written last counts. If it could not read some volume, the older exports of its
    datanode are superseded whole: their volumes may be those, in an old state.
    """
    by_datanode = dict[str, dict[str, _Export]]()
    for export in exports:
        by_datanode.setdefault(export.manifest.datanode, {})[export.place] = export
    chosen, notes = list[tuple[_Export, tuple[str, ...]]](), list[str]()
    for datanode, by_place in by_datanode.items():
        newest, *older = sorted(by_place.values(), key=_age, reverse=True)
        held = dict.fromkeys(newest.manifest.volumes, newest)
        chosen.append((newest, newest.manifest.volumes))
        for export in older:
            superseded = [v for v in export.manifest.volumes if v in held]
            more = tuple(v for v in export.manifest.volumes if v not in held)
            if superseded or not more:
                by = ", ".join(sorted({held[v].place for v in superseded})) or newest.place
                notes.append(
                    f"{export.place} is superseded by {by}: of datanode {datanode}, volumes"
                    f" {', '.join(superseded) or 'none'}"
                )
            if more and newest.manifest.skipped:
                notes.append(
                    f"{export.place} is superseded by {newest.place}, which could not read all"
                    f" volumes of datanode {datanode}"
                )
            elif more:
                chosen.append((export, more))
                held |= dict.fromkeys(more, export)
                notes.append(
                    f"{export.place}, created {export.manifest.created_at:%Y-%m-%d %H:%M:%S} UTC,"
                    f" is joined to {newest.place}: of datanode {datanode}, volumes"
                    f" {', '.join(more)}"
                )
    return chosen, tuple(notes)


def _age(export: _Export) -> tuple[datetime, int, str]:
    # The place last: the order of arguments must not decide.
    return export.manifest.created_at, export.manifest.sequence, export.place


def _is_of_export(info: fs.FileInfo) -> bool:
    return is_file_name(info.base_name) or manifest_sequence(info.base_name) is not None


def _groups(file: _File) -> tuple[int, ...] | SkippedInput:
    """The number of rows of each row group."""
    try:
        with file.filesystem.open_input_file(file.info.path) as source:
            metadata = pq.read_metadata(source)
        schema = metadata.schema.to_arrow_schema()
    # For a damaged Parquet file pyarrow raises ArrowInvalid, a ValueError.
    except (OSError, ValueError) as error:
        return SkippedInput(file.location, str(error))
    lacking = [name for name in REQUIRED if name not in schema.names]
    if lacking:
        # Otherwise it may hold rows of the replicas in the files beside it.
        is_foreign = _NAMING.isdisjoint(schema.names)
        reason = f"it lacks {', '.join(lacking)}"
        return SkippedInput(file.location, f"{_FOREIGN}: {reason}" if is_foreign else reason)
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def _file_parts(file: _File, groups: Sequence[int], part_rows: int) -> Iterator[Part]:
    """Parts of consecutive row groups, with up to `part_rows` rows or one group."""
    first, rows = 0, 0
    for i, count in enumerate(groups):
        if rows and rows + count > part_rows:
            yield _part(file, first, i, rows)
            first, rows = i, 0
        rows += count
    if rows:
        yield _part(file, first, len(groups), rows)


def _export_file_parts(file: _File, part_rows: int) -> Iterator[Part]:
    """Parts of `part_rows` rows each, or fewer if replicas are small. The row groups
    are not known yet: no part of an export's file, not even its footer, is parsed
    before the file is verified.
    """
    part_rows = rows_of_part(file.rows, file.replicas, part_rows)
    for first in range(0, file.rows, part_rows):
        last = min(first + part_rows, file.rows)
        yield _part(file, first, last, last - first)


def rows_of_part(rows: int, replicas: int, rows_max: int = _PART_ROWS) -> int:
    """The number of rows of each part of an export's file with so many rows and about
    so many replicas.

    A row group is not divided: a part within one would only find that it begins
    elsewhere.
    """
    if replicas <= _PART_REPLICAS:
        return rows_max
    return min(rows_max, max(GROUP_ROWS, rows * _PART_REPLICAS // replicas))


def _part(file: _File, first: int, last: int, rows: int) -> Part:
    own_id = _part_id(file.location, file.info, first, last, by_rows=file.manifest is not None)
    return Part(
        own_id,
        PartKind.FILE,
        file.location,
        first,
        last,
        rows,
        TreeSource.TREE,
        file.manifest,
        file.volumes,
        file.table,
        -(-file.replicas * rows // max(file.rows, 1)),
        file.export,
    )


def _part_id(location: str, info: fs.FileInfo, first: int, last: int, *, by_rows: bool) -> str:
    # Earlier releases split every file by row groups; their stored parts must not match
    # ours.
    unit = "rows" if by_rows else PartKind.FILE.value
    return part_id(unit, location, info.size, info.mtime_ns, first, last)


def _location_below(name: str, path: str, found: str) -> str:
    """The location of a file found below `path`, in the form of `name`: a URI keeps its
    scheme and options.
    """
    if "://" not in name:
        return found
    scheme, _, options = name.partition("?")
    below = found[len(path.rstrip("/")) :]
    return f"{scheme.rstrip('/')}{below}{'?' if options else ''}{options}"


def _is_hidden(path: str) -> bool:
    """Whether a file is hidden, by the rule of Spark: temporary files and metadata
    start with "." or "_".
    """
    return any(part.startswith((".", "_")) for part in path.split("/"))
