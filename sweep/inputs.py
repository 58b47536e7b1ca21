"""What a sweep reads: volumes and chunk tables, cut into parts that are worth a task
each.

A table is an export of agents (folders with manifests, at any depth: of each datanode
the newest whole manifest counts), a Parquet file, or a folder of Parquet files without
manifests. An input that cannot be read is skipped by name, with its reason: what it
holds is then unknown, and a sweep says so instead of taking it for gone.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    FileKind,
    Manifest,
    check_counts,
    is_file_name,
    manifest_sequence,
)
from chunktable.places import drop_undecodable_names, resolve_location
from chunktable.reader import latest_manifest, read_faults, read_manifest
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from sweep.files import REQUIRED
from sweep.model import FINDING_SCHEMA, Part, PartKind
from sweep.output import Skipped

# Rows of one part: a second or less of one core, so that all cores end at about the
# same time.
_PART_ROWS = 4 << 20

# Reading a footer is waiting, above all where files are far away.
_FOOTERS_AT_ONCE = 16

# Why a table by itself is skipped that could be read.
NO_ROWS = "there are no rows in it"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Parts in the order of what was asked, and what is left out."""

    parts: tuple[Part, ...]
    skipped: tuple[Skipped, ...]
    # Of the exports that are read.
    manifests: tuple[str, ...] = ()
    # Since when their volumes exist, by datanode and volume, as far as they tell.
    volumes_created_ms: Mapping[tuple[str, str], int] = field(default_factory=dict)


def table_parts(names: Iterable[str], part_rows: int = _PART_ROWS) -> Inputs:
    """The parts of some tables, paths or URIs; a file that is named twice is read once.

    Raises:
        UsageError: a URI cannot be understood.
    """
    files, exports, skipped = list[_File](), list[_Export](), list[Skipped]()
    plain = dict[str, set[str]]()
    for name in names:
        found = _found(name)
        if found[0] and not (found[1] or found[2]):
            plain[name] = {file.location for file in found[0]}
        files += found[0]
        exports += found[1]
        skipped += found[2]
    manifests, created_ms = list[str](), dict[tuple[str, str], int]()
    for export in _newest(exports):
        manifests.append(export.place)
        created_ms |= {
            (export.manifest.datanode, v): ms
            for v, ms in export.manifest.volumes_created_ms.items()
        }
        files += export.files
        skipped += export.skipped
    unlike = list({file.location: file for file in files}.values())
    parts = list[Part]()
    bare = [file for file in unlike if file.manifest is None]
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        found_groups = dict(
            zip((file.location for file in bare), pool.map(_groups, bare), strict=True)
        )
        for file in unlike:
            groups = found_groups.get(file.location)
            if groups is None:
                parts += _shares(file, part_rows)
            elif isinstance(groups, Skipped):
                skipped.append(groups)
            else:
                parts += _file_parts(file, groups, part_rows)
    told = {part.location for part in parts} | {one.input for one in skipped}
    skipped += [Skipped(name, NO_ROWS) for name, held in plain.items() if not held & told]
    return Inputs(
        tuple(parts), tuple(dict.fromkeys(skipped)), tuple(dict.fromkeys(manifests)), created_ms
    )


def is_unchanged(part: Part) -> bool:
    """Whether the file of a part is what it was when the part was made."""
    try:
        filesystem, path = resolve_location(part.location)
        info = filesystem.get_file_info(path)
    except OSError:
        return False
    made = _part_id(part.location, info, part.first, part.last, by_rows=part.manifest is not None)
    return info.type is fs.FileType.File and part.part_id == made


def export_findings(manifests: Iterable[str]) -> tuple[pa.Table, tuple[Skipped, ...]]:
    """What the agents met while they made their exports, as FINDING_SCHEMA, and where
    this cannot be read.
    """
    found, skipped = [FINDING_SCHEMA.empty_table()], list[Skipped]()
    for place in manifests:
        try:
            found.append(_fault_findings(read_faults(*open_export(place))))
        except ChunkTableError as error:
            skipped.append(Skipped(place, f"the findings of its agent are lost: {error.message}"))
    return pa.concat_tables(found), tuple(skipped)


def export_datanodes(manifests: Iterable[str]) -> frozenset[str]:
    """The datanodes whose exports these are.

    Raises:
        ChunkTableError: a manifest cannot be read.
    """
    return frozenset(open_export(place)[2].datanode for place in manifests)


def open_export(place: str) -> tuple[fs.FileSystem, str, Manifest]:
    """The file system and folder of a manifest, and the manifest.

    Raises:
        ChunkTableError: it cannot be read.
    """
    filesystem, path = resolve_location(place)
    return filesystem, path.rpartition("/")[0], read_manifest(filesystem, path)


def _fault_findings(faults: pa.Table) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "kind": fault["kind"],
                "container_id": fault["container_id"],
                "block_id": fault["block_id"],
                "chunk_offset": fault["chunk_offset"],
                "lacking": [],
                "sources": [],
                "detail": f"{fault['datanode']}/{fault['volume']}: {fault['detail']}",
            }
            for fault in faults.to_pylist()
        ],
        FINDING_SCHEMA,
    )


def part_id(*facts: object) -> str:
    """An ID made of what a part reads."""
    return fingerprint("\n".join(map(str, facts)).encode()).hex()


@dataclass(frozen=True, slots=True)
class _File:
    """A Parquet file to be read, and the manifest that names it, if any."""

    location: str
    filesystem: fs.FileSystem
    info: fs.FileInfo
    manifest: str | None = None
    # As the manifest says.
    rows: int = 0


@dataclass(frozen=True, slots=True)
class _Export:
    """The newest whole state of one datanode's table."""

    # Of its manifest.
    place: str
    manifest: Manifest
    files: tuple[_File, ...]
    skipped: tuple[Skipped, ...]


def _found(name: str) -> tuple[list[_File], list[_Export], list[Skipped]]:
    """What there is at a path: files by themselves, exports, and what cannot be
    read.
    """
    try:
        filesystem, path = resolve_location(name)
        info = filesystem.get_file_info(path)
        if info.type is fs.FileType.NotFound or not name:
            return [], [], [Skipped(name, "there is no such file or folder")]
        if info.type is fs.FileType.File:
            return [_File(name, filesystem, info)], [], []
        found, unlisted = _below(filesystem, path)
    except OSError as error:
        return [], [], [Skipped(name, str(error))]
    folders: dict[str, list[fs.FileInfo]] = {}
    for one in found:
        if one.type is fs.FileType.File and not _is_hidden(one.path[len(path) :]):
            folders.setdefault(one.path.rpartition("/")[0], []).append(one)
    files, exports = list[_File](), list[_Export]()
    skipped = [Skipped(_joined(name, path, folder), reason) for folder, reason in unlisted.items()]
    # A datanode's folder, most likely: an export that is gone is not one of a datanode
    # without replicas.
    empty = sorted(_empty(path, found) - set(unlisted))
    skipped += [Skipped(_joined(name, path, folder), "it is empty") for folder in empty]
    is_export = any(_is_of_export(one) for held in folders.values() for one in held)
    for folder, held in sorted(folders.items()):
        tables = sorted(
            (one for one in held if one.extension == "parquet"), key=lambda one: str(one.path)
        )
        location = _joined(name, path, folder)
        if any(_is_of_export(one) for one in held):
            try:
                exports.append(
                    _export(location, filesystem, folder, {one.base_name: one for one in held})
                )
            except ChunkTableError as error:
                skipped.append(Skipped(location, f"{error.reason}: {error.message}"))
        elif is_export and tables:
            skipped.append(
                Skipped(
                    location, "it has Parquet files and no manifest, beside tables that have one"
                )
            )
        else:
            files += [_File(_joined(name, path, one.path), filesystem, one) for one in tables]
    if not (files or exports or skipped):
        skipped.append(Skipped(name, "there is no Parquet file"))
    return files, exports, skipped


def _empty(path: str, found: Sequence[fs.FileInfo]) -> set[str]:
    """The folders below `path` with nothing in them, but what is hidden; the one of a
    file system is no table's.
    """
    held = [
        one
        for one in found
        if not _is_hidden(one.path[len(path) :]) and one.base_name != "lost+found"
    ]
    above = {one.path.rpartition("/")[0] for one in held}
    return {one.path for one in held if one.type is fs.FileType.Directory} - above


def _below(filesystem: fs.FileSystem, path: str) -> tuple[list[fs.FileInfo], Mapping[str, str]]:
    """All that is below a folder, and what cannot be listed or named, with why.

    Raises:
        OSError: it is the folder itself.
    """
    with suppress(OSError):
        # In one question, which counts where files are far away.
        whole = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        found = drop_undecodable_names(whole)
        return found, _unnamed(path) if len(found) < len(whole) else {}
    found, unlisted, waiting = (
        drop_undecodable_names(filesystem.get_file_info(fs.FileSelector(path))),
        _unnamed(path),
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


def _unnamed(path: str) -> dict[str, str]:
    """Tables of this machine below `path`, or folders with some, whose names are no
    text: what pyarrow cannot say.
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
    location: str, filesystem: fs.FileSystem, folder: str, held: Mapping[str, fs.FileInfo]
) -> _Export:
    manifest = latest_manifest(filesystem, folder)
    check_counts(manifest)
    place = _joined(location, folder, f"{folder}/{manifest.name}")
    files = [
        _File(
            _joined(location, folder, held[file.name].path),
            filesystem,
            held[file.name],
            place,
            file.rows,
        )
        for file in manifest.of_kind(FileKind.CHUNKS)
    ]
    skipped = [
        Skipped(f"{location}: volume {volume.path}", f"{volume.error_code}: {volume.message}")
        for volume in manifest.skipped
    ]
    return _Export(place, manifest, tuple(files), tuple(skipped))


def _newest(exports: Iterable[_Export]) -> Iterator[_Export]:
    """One export a datanode: of tables in several places the one that was written
    last.
    """
    by_datanode: dict[str, _Export] = {}
    for export in exports:
        other = by_datanode.get(export.manifest.datanode)
        if other is None or _age(other) < _age(export):
            by_datanode[export.manifest.datanode] = export
    yield from by_datanode.values()


def _age(export: _Export) -> tuple[datetime, int]:
    return export.manifest.created_at, export.manifest.sequence


def _is_of_export(info: fs.FileInfo) -> bool:
    return is_file_name(info.base_name) or manifest_sequence(info.base_name) is not None


def _groups(file: _File) -> tuple[int, ...] | Skipped:
    """The rows of each row group."""
    try:
        with file.filesystem.open_input_file(file.info.path) as source:
            metadata = pq.read_metadata(source)
        schema = metadata.schema.to_arrow_schema()
    # pyarrow says what is wrong with a Parquet file by ArrowInvalid, a ValueError.
    except (OSError, ValueError) as error:
        return Skipped(file.location, str(error))
    lacking = [name for name in REQUIRED if name not in schema.names]
    if lacking:
        return Skipped(file.location, f"it is no chunk table: it lacks {', '.join(lacking)}")
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def _file_parts(file: _File, groups: Sequence[int], part_rows: int) -> Iterator[Part]:
    """Row groups that lie together, up to so many rows, one group at least."""
    first, rows = 0, 0
    for i, count in enumerate(groups):
        if rows and rows + count > part_rows:
            yield _part(file, first, i, rows)
            first, rows = i, 0
        rows += count
    if rows:
        yield _part(file, first, len(groups), rows)


def _shares(file: _File, part_rows: int) -> Iterator[Part]:
    """So many rows each: nothing of an export's file is parsed before its content is
    verified, its footer neither.
    """
    for first in range(0, file.rows, part_rows):
        last = min(first + part_rows, file.rows)
        yield _part(file, first, last, last - first)


def _part(file: _File, first: int, last: int, rows: int) -> Part:
    made = _part_id(file.location, file.info, first, last, by_rows=file.manifest is not None)
    return Part(
        made, PartKind.FILE, file.location, first, last, rows, TreeSource.TREE, file.manifest
    )


def _part_id(location: str, info: fs.FileInfo, first: int, last: int, *, by_rows: bool) -> str:
    # Earlier releases cut all files by row groups; parts that they left behind are not
    # to be taken for ours.
    unit = "rows" if by_rows else PartKind.FILE.value
    return part_id(unit, location, info.size, info.mtime_ns, first, last)


def _joined(name: str, path: str, found: str) -> str:
    """The file found below `path`, as `name` was given: a URI keeps its scheme and
    options.
    """
    if "://" not in name:
        return found
    scheme, _, options = name.partition("?")
    below = found[len(path.rstrip("/")) :]
    return f"{scheme.rstrip('/')}{below}{'?' if options else ''}{options}"


def _is_hidden(path: str) -> bool:
    """Whether a file is none of a table's, as Spark has it: in the making, or a note
    beside it.
    """
    return any(part.startswith((".", "_")) for part in path.split("/"))
