"""What a sweep needs of each of many exports: their manifests, what their agents
reported, and copies for the next night.

A fleet has thousands of exports. Reading one is mostly waiting, so an engine does it
for many at a time (Engine.for_each), and each manifest is read once.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from chunktable.errors import ChunkTableError
from chunktable.files import AnyPath, Files
from chunktable.manifest import FileKind, Manifest, parse_manifest
from chunktable.packs import PACKED_BYTES_MAX, PackWriter
from chunktable.places import resolve_location
from chunktable.reader import read_faults, read_manifest, read_verified
from runtime.documents import parse_json
from sweep.faults import fault_row
from sweep.model import FINDING_SCHEMA, Part
from sweep.output import SkippedInput
from sweep.pieces import StoredTable

T = TypeVar("T")
R = TypeVar("R")

# Exports that one machine or task reads at a time: reading is waiting for round trips.
AT_ONCE = 32

# The manifests of exports by their locations.
Exports: TypeAlias = Mapping[str, Manifest]


class ExportWork(Protocol):
    """Work for each of many exports. It can be pickled."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the table that it returns."""
        ...

    @property
    def alone_max(self) -> int:
        """The number of texts up to which one machine does the work: to start it on
        others costs more.
        """
        ...

    def __call__(self, texts: Sequence[str]) -> pa.Table:
        """What comes of some exports, each of which a text names or holds."""
        ...


# Rows that a work returned for some texts, in any order.
ForEach: TypeAlias = Callable[[ExportWork, Sequence[str]], Iterator[pa.Table]]


def at_once(
    items: Iterable[T], work: Callable[[T], R], place: str, threads: int = AT_ONCE
) -> Iterator[R]:
    """The results of `work`, which reads something at `place`, for all items in their
    order. What is remote is read some items ahead: most of it is waiting.
    """
    waiting, running = iter(items), deque[Future[R]]()
    if "://" not in place:
        # Threads would only wait for each other.
        yield from map(work, waiting)
        return
    with ThreadPoolExecutor(threads, "export") as pool:
        while True:
            # Ahead by no more than the threads, or results would pile up.
            running.extend(
                pool.submit(work, item) for item in islice(waiting, threads - len(running))
            )
            if not running:
                return
            yield running.popleft().result()


def here(work: ExportWork, texts: Sequence[str]) -> Iterator[pa.Table]:
    """See Engine.for_each; in this process."""
    if texts:
        yield work(texts)


@dataclass(frozen=True, slots=True)
class _ReadManifests:
    """Reads the manifests at some locations, but those that cannot be read: whoever
    needs one reads it again, and learns why.
    """

    @property
    def schema(self) -> pa.Schema:
        """See ExportWork: the location, and the bytes of the manifest."""
        return _MANIFESTS

    @property
    def alone_max(self) -> int:
        """See ExportWork: a tenth of a millisecond each, and little waiting."""
        return 1024

    def __call__(self, texts: Sequence[str]) -> pa.Table:
        """See ExportWork."""
        read = zip(texts, at_once(texts, _manifest, texts[0]), strict=True)
        found = {place: manifest.stored() for place, manifest in read if manifest is not None}
        return pa.table([list(found), list(found.values())], schema=_MANIFESTS)


def _manifest(place: str) -> Manifest | None:
    filesystem, path = resolve_location(place)
    try:
        return read_manifest(filesystem, path)
    except ChunkTableError:
        return None


_MANIFESTS = pa.schema(
    [
        pa.field("place", pa.string(), nullable=False),
        pa.field("manifest", pa.binary(), nullable=False),
    ]
)


def read_manifests(places: Sequence[str], for_each: ForEach) -> Exports:
    """The manifests at these locations, without those that cannot be read."""
    work, found = _ReadManifests(), dict[str, Manifest]()
    if len(places) <= work.alone_max:
        # Each is parsed once.
        read = at_once(places, _manifest, places[0] if places else "")
        held = zip(places, read, strict=True)
        return {place: manifest for place, manifest in held if manifest is not None}
    for table in for_each(work, places):
        for place, raw in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found[place] = parse_manifest(raw, _name(place), is_verified=True)
    return found


def _name(place: str) -> str:
    return place.partition("?")[0].rpartition("/")[2]


def parts_of_holders(parts: Sequence[Part], replicas: StoredTable) -> tuple[Part, ...]:
    """The parts that may have rows of these replicas (column datanode): of an export
    whose datanode has none not even the inventory needs to be read.
    """
    names = set[str]()
    for piece in replicas.tables():
        names.update(piece["datanode"].unique().to_pylist())
    return tuple(one for one in parts if one.export is None or one.export.datanode in names)


def export_folder(place: str) -> tuple[fs.FileSystem, str]:
    """The file system and the folder of the export with its manifest there."""
    filesystem, path = resolve_location(place)
    return filesystem, path.rpartition("/")[0]


def open_export(place: str) -> tuple[fs.FileSystem, str, Manifest]:
    """The file system and the folder of a manifest, and the manifest itself.

    Raises:
        ChunkTableError: the manifest cannot be read.
    """
    filesystem, path = resolve_location(place)
    return filesystem, path.rpartition("/")[0], read_manifest(filesystem, path)


def export_findings(exports: Exports) -> tuple[pa.Table, tuple[SkippedInput, ...]]:
    """The faults that agents found during their exports (FINDING_SCHEMA), and the
    exports whose faults cannot be read.
    """
    found, skipped = [FINDING_SCHEMA.empty_table()], list[SkippedInput]()
    # Few have any.
    having = {place: one for place, one in exports.items() if one.of_kind(FileKind.FINDINGS)}

    def findings(place: str) -> pa.Table | SkippedInput:
        manifest = having[place]
        skipped_volumes = {volume.path for volume in manifest.skipped}
        try:
            faults = read_faults(*export_folder(place), manifest)
        except ChunkTableError as error:
            return SkippedInput(place, f"the findings of its agent are lost: {error.message}")
        # The manifest lists those of skipped volumes.
        rows = [
            fault_row(
                (fault["datanode"], fault["volume"]),
                fault["kind"],
                fault["detail"],
                container_id=fault["container_id"],
                block_id=fault["block_id"],
                offset=fault["chunk_offset"],
            )
            for fault in faults.to_pylist()
            if fault["volume"] not in skipped_volumes
        ]
        return pa.Table.from_pylist(rows, FINDING_SCHEMA)

    with ThreadPoolExecutor(AT_ONCE, "export") as pool:
        for one in pool.map(findings, having):
            if isinstance(one, SkippedInput):
                skipped.append(one)
            else:
                found.append(one)
    return pa.concat_tables(found), tuple(skipped)


@dataclass(frozen=True, slots=True)
class KeepExports:
    """Copies manifests and inventories to `folder` (sweep.history). Agents remove them
    with the export after next.

    Those of small exports are one file for each task: a file takes longer than an
    export.
    """

    folder: AnyPath
    files: Files

    @staticmethod
    def text(place: str, manifest: Manifest, copies: str) -> str:
        """The text for one export; `copies` is the name of a folder for it."""
        return json.dumps([place, manifest.stored().decode(), copies])

    @property
    def schema(self) -> pa.Schema:
        """See ExportWork: the location of a manifest, and that of its copy."""
        return _COPIES

    @property
    def alone_max(self) -> int:
        """See ExportWork: a fifth of a millisecond each."""
        return 1024

    def __call__(self, texts: Sequence[str]) -> pa.Table:
        """See ExportWork; nothing of an export whose agent exported meanwhile. Then the
        next sweep reports that it cannot be read.

        Raises:
            DiskError: the copies cannot be written.
        """
        wanted = [parse_json(text) for text in texts]
        pack, found = PackWriter(self.folder, self.files), dict[str, str]()
        read = at_once(wanted, _inventories, wanted[0][0])
        for (place, manifest, copies), inventories in zip(wanted, read, strict=True):
            if inventories is None:
                continue
            whole, name = manifest.encode(), _name(place)
            length = len(whole) + sum(map(len, inventories.values()))
            if len(inventories) == 1 and length <= PACKED_BYTES_MAX:
                found[place] = pack.add(name, whole, *inventories.values())
                continue
            folder = self.folder / copies
            self.files.make_folder(folder)
            for file, data in {**inventories, name: whole}.items():
                self.files.replace(folder / file, data)
            found[place] = str(folder / name)
        pack.close()
        return pa.table([list(found), list(found.values())], schema=_COPIES)


def _inventories(export: Sequence[str]) -> dict[str, bytes] | None:
    """The inventories of an export by their names; None if its agent removed one."""
    place, raw, _ = export
    filesystem, folder = export_folder(place)
    manifest = parse_manifest(raw.encode(), _name(place), is_verified=True)
    try:
        return {
            file.name: read_verified(filesystem, folder, file)
            for file in manifest.of_kind(FileKind.CONTAINERS)
        }
    except ChunkTableError:
        return None


_COPIES = pa.schema([_MANIFESTS.field("place"), pa.field("copy", pa.string(), nullable=False)])
