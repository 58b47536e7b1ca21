"""Find silent changes by comparing the rows of a sweep with those of earlier sweeps.

A silent change is a live chunk whose checksum differs from an earlier sweep although no
agent wrote to it. A replica is compared with its own earlier state, if `bcs_id` and
`source` are equal: client writes raise `bcs_id`, and a tree may differ from the records
or the data. Damage found by a scan is both a silent change and corrupt. A chunk that
changed together with its recorded checksum is found only here.

The rows of volumes are kept in `<out>/chunks/<sweep id>/`. The rows of tables are not
copied, because an agent keeps its files until its next export; files that are gone or
replaced by then get a note. Manifests and inventories are copied, because every export
replaces them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import compress
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ChunkTableError
from chunktable.files import AnyPath, Files
from chunktable.manifest import FileKind, Manifest
from chunktable.reader import read_events
from chunktable.schema import EVENT_SCHEMA
from merkle.errors import ReconcileError
from protos.errors import unambiguous
from runtime.documents import parse_json
from runtime.errors import DiskError
from sweep.errors import EarlierRowsError
from sweep.exports import (
    AT_ONCE,
    Exports,
    ForEach,
    KeepExports,
    export_folder,
    open_export,
    read_manifests,
)
from sweep.files import is_readable
from sweep.fragments import Int64s
from sweep.inputs import is_unchanged
from sweep.model import Part
from sweep.night import Night
from sweep.output import SweepStore, SweepTable
from sweep.pieces import StoredTable
from sweep.silent import CHANGED_SCHEMA, COMPARED, ChangedStage, SilentChanges
from sweep.stages import requested_rows, requests
from sweep.work import parts_of, texts_of

# Sweeps whose rows are kept: this one and the one before.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class SilentChangeReport:
    """Notes on what could not be compared. `previous` is the newest sweep compared
    with.
    """

    notes: tuple[str, ...] = ()
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class EarlierExport:
    """What a later sweep needs of an export that a sweep read."""

    datanode: str
    volumes: tuple[str, ...]
    begun_at: datetime

    @classmethod
    def of(cls, manifest: Manifest) -> "EarlierExport":
        """That of a manifest."""
        return cls(manifest.datanode, manifest.volumes, manifest.begun_at)

    @classmethod
    def stored(cls, datanode: str, volumes: object, begun_at: str) -> "EarlierExport":
        """That of an entry of `parts.json`.

        Raises:
            ValueError, TypeError: it is no such entry.
        """
        begun = datetime.fromisoformat(begun_at)
        if begun.tzinfo is None or not isinstance(datanode, str):
            raise ValueError(f"{datanode!r}, {begun_at!r} is not an export")
        return cls(datanode, tuple(texts_of(volumes)), begun)


class History:
    """The rows of earlier sweeps in one output folder."""

    def __init__(self, out: AnyPath, files: Files) -> None:
        self._folder = out / "chunks"
        self._files = files

    def folder(self, sweep_id: str) -> AnyPath:
        """The folder for the rows that a sweep copies from volumes."""
        return self._folder / sweep_id

    def save(
        self, sweep_id: str, parts: Sequence[Part], exports: Exports, for_each: ForEach
    ) -> None:
        """Store which parts and exports a sweep read.

        Raises:
            DiskError: they cannot be written.
        """
        folder, texts, used = self.folder(sweep_id), list[str](), set[str]()
        self._files.make_folder(folder)
        for place, manifest in exports.items():
            copies = f"datanode={quote(manifest.datanode, safe='')[:200]}"
            if copies in used:
                # Another export of this datanode, with other volumes.
                copies = f"{copies}+{len(used)}"
            used.add(copies)
            texts.append(KeepExports.text(place, manifest, copies))
        kept = dict[str, str]()
        for copied in for_each(KeepExports(folder, self._files.of_tasks()), texts):
            places, copies = (column.to_pylist() for column in copied.columns)
            kept |= zip(places, copies, strict=True)
        kept_parts = [
            replace(part, manifest=kept.get(part.manifest or "", part.manifest)) for part in parts
        ]
        raw = {
            "parts": [part.document() for part in kept_parts],
            "manifests": [kept.get(place, place) for place in exports],
            # So that the next sweep does not read all of them for these.
            "exports": [
                [one.datanode, one.volumes, one.begun_at.isoformat()] for one in exports.values()
            ],
        }
        self._files.replace(folder / "parts.json", json.dumps(raw).encode())

    def load(self, sweep_id: str) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """The parts and manifests that a sweep read.

        Raises:
            DiskError: they are missing or damaged.
        """
        with self._content(sweep_id) as content:
            raw = parse_json(content)
            return parts_of(raw["parts"]), tuple(raw["manifests"])

    def exports(
        self, sweep_id: str, for_each: ForEach
    ) -> tuple[tuple[EarlierExport, ...], Mapping[str, str]]:
        """The exports that a sweep read; and why others are not known, by the location
        of their manifests.

        Raises:
            DiskError: the list of them is missing or damaged.
        """
        with self._content(sweep_id) as content:
            raw = parse_json(content)
            places = tuple(map(str, raw["manifests"]))
            if "exports" in raw:
                return tuple(EarlierExport.stored(*one) for one in raw["exports"]), {}
        # A sweep of an earlier release.
        known, unknown = read_manifests(places, for_each), dict[str, str]()
        for place in (place for place in places if place not in known):
            try:
                open_export(place)
            except ChunkTableError as error:
                unknown[place] = error.message
        return tuple(map(EarlierExport.of, known.values())), unknown

    @contextmanager
    def _content(self, sweep_id: str) -> Iterator[bytes]:
        path = self.folder(sweep_id) / "parts.json"
        content = self._files.read(path)
        try:
            yield content
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DiskError(f"{path} is damaged: {error!r}", path=str(path)) from error

    def last_seen(
        self, output: SweepStore, sweep_id: str
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """The last sweep before `sweep_id` that included each datanode, by datanode,
        and notes on sweeps that cannot be read.

        A datanode whose replicas the sweep before missed is known from that, although
        the sweep that included it may no longer be kept.
        """
        seen, notes, earlier = dict[str, str](), list[str](), _earlier_sweeps(output, sweep_id)
        for name in reversed(earlier):
            try:
                seen |= _last_sweeps_of_unseen(output, name)
                break
            except DiskError as error:
                notes.append(f"what sweep {name} did not read is unknown: {error.message}")
        for name in earlier:
            try:
                seen |= dict.fromkeys(output.datanodes(name), name)
            except DiskError as error:
                notes.append(f"the datanodes of sweep {name} are unknown: {error.message}")
        return seen, tuple(notes)

    def silent_changes_since(
        self,
        output: SweepStore,
        sweep_id: str,
        night: Night,
        exports: Exports,
        seen: Mapping[str, str],
    ) -> SilentChangeReport:
        """Find the silent changes up to `sweep_id`, whose table `roots` is written;
        `seen` is the result of `last_seen`.

        Each replica is compared with the last of the kept sweeps that read it, since a
        sweep may have skipped it.

        Raises:
            DiskError: a table of this sweep cannot be read.
            ChunkTableError: a part of this sweep cannot be read any more.
        """
        now, notes = output.stored(SweepTable.ROOTS, sweep_id, COMPARED), list[str]()
        names, before = _earlier_sweeps(output, sweep_id)[-_KEPT:], dict[str, StoredTable]()
        for name in reversed(names):
            try:
                before[name] = output.stored(SweepTable.ROOTS, name, COMPARED)
            except DiskError as error:
                notes.append(_unknown_since(name, error))
        previous, changed = next(iter(before), None), StoredTable([], CHANGED_SCHEMA)
        while before:
            try:
                changed = night.changed(ChangedStage(tuple(before)), {"now": now, **before})
                break
            except DiskError as error:
                # The error names the file; without its sweep the others still compare.
                broken = [name for name in before if f"sweep_id={name}" in error.message]
                if not broken:
                    raise
                notes.append(_unknown_since(broken[0], error))
                del before[broken[0]]
        for name, requested in _requested_since(changed).items():
            notes += self._since(name, requested, changed, night, exports)
        for datanode in sorted(output.datanodes(sweep_id) & seen.keys()):
            if seen[datanode] not in names:
                notes.append(
                    f"silent changes of {datanode} are unknown: it was last in sweep"
                    f" {seen[datanode]}, whose rows are no longer kept"
                )
        return SilentChangeReport(tuple(notes), previous)

    def _since(
        self,
        previous: str,
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
        night: Night,
        exports: Exports,
    ) -> list[str]:
        """Find the silent changes of these containers since `previous`; returns
        notes.
        """
        try:
            their_parts, _ = self.load(previous)
            their_exports, unknown = self.exports(previous, night.for_each)
        except DiskError as error:
            return [_unknown_since(previous, error)]
        events = agent_events(exports, their_exports)
        notes = [
            f"silent changes since {previous} are unknown for {place}: {reason}"
            for place, reason in {**unknown, **events.errors}.items()
        ]
        texts = [json.dumps(part.document()) for part in their_parts]
        readable = set[str]()
        for table in night.for_each(_FindReadable(requested[0]), texts):
            readable.update(table["part_id"].to_pylist())
        kept = [part for part in their_parts if part.part_id in readable]
        if len(kept) < len(their_parts):
            gone = len({part.location for part in their_parts} - {part.location for part in kept})
            notes.append(
                f"{gone} files that {previous} read are missing, changed or damaged: silent changes"
                " of their chunks are unknown"
            )
        work = SilentChanges(previous, events.events, events.datanodes, events.lost)
        try:
            night.revisit(work, kept, requested, changed)
        except EarlierRowsError as error:
            notes.append(_unknown_since(previous, error))
        return notes

    def retain(self, sweeps: Sequence[str]) -> None:
        """Remove the rows of all but the last two of these sweeps.

        Raises:
            DiskError: they cannot be removed.
        """
        kept = set(sweeps[-_KEPT:])
        for name in self._files.names(self._folder):
            if name not in kept:
                self._files.remove_folder(self._folder / name)


# The UUID of a datanode, given whole.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/|$)")


def whole_names(output: SweepStore, names: Sequence[str]) -> tuple[str, ...]:
    """The names with whole UUIDs: of a datanode, or DATANODE/VOLUME, the datanode may
    be given by the beginning of its UUID. A name that no kept sweep knows stays.

    Raises:
        AmbiguousIdError: several datanodes begin so.
    """
    if all(_UUID.match(name) or name.startswith("container=") for name in names):
        return tuple(names)
    known = set[str]()
    for sweep_id in output.sweeps():
        # A run says itself what it cannot read of earlier ones.
        with suppress(DiskError):
            known |= output.datanodes(sweep_id)
            for piece in output.pieces(SweepTable.UNSEEN, sweep_id, ["datanode"]):
                known.update(piece["datanode"].unique().to_pylist())
    return tuple(_whole_name(name, known) for name in names)


def _whole_name(name: str, known: AbstractSet[str]) -> str:
    datanode, slash, volume = name.partition("/")
    found = sorted(one for one in known if one.startswith(datanode))
    if not found or not datanode or datanode in known:
        return name
    return unambiguous(datanode, found, "datanodes") + slash + volume


def _earlier_sweeps(output: SweepStore, sweep_id: str) -> list[str]:
    return [name for name in output.sweeps() if name < sweep_id]


def _last_sweeps_of_unseen(output: SweepStore, sweep_id: str) -> dict[str, str]:
    """The datanodes with replicas that a sweep did not read, each with the last sweep
    that did.

    Raises:
        DiskError: the table cannot be read.
    """
    found = dict[str, str]()
    for piece in output.pieces(SweepTable.UNSEEN, sweep_id, ["datanode", "last_sweep"]):
        # Replicas that only SCM knows have no datanode.
        placed = piece.filter(pc.not_equal(piece["datanode"], ""))
        newest = placed.group_by("datanode").aggregate([("last_sweep", "max")])
        for row in newest.to_pylist():
            found[row["datanode"]] = max(row["last_sweep_max"], found.get(row["datanode"], ""))
    return found


def _unknown_since(sweep_id: str, error: ReconcileError) -> str:
    return f"silent changes since {sweep_id} are unknown: {error.message}"


@dataclass(frozen=True, slots=True)
class _FindReadable:
    """Finds the parts of an earlier sweep that are as it read them
    (sweep.exports.ExportWork); of an export, if they hold one of these containers.
    """

    container_ids: Int64s

    @property
    def schema(self) -> pa.Schema:
        """See ExportWork: the ID of the part."""
        return _PARTS

    @property
    def alone_max(self) -> int:
        """See ExportWork: it may read large files."""
        return 64

    def __call__(self, texts: Sequence[str]) -> pa.Table:
        """See ExportWork: nothing if it is not."""
        parts = parts_of([parse_json(text) for text in texts])
        # Local files, too: checksums of large ones are computed side by side.
        with ThreadPoolExecutor(AT_ONCE, "export") as pool:
            are_same = list(pool.map(self._is_same, parts))
        return pa.table([[one.part_id for one in compress(parts, are_same)]], schema=_PARTS)

    def _is_same(self, part: Part) -> bool:
        if not is_unchanged(part):
            return False
        return part.manifest is None or is_readable(part, self.container_ids)


_PARTS = pa.schema([pa.field("part_id", pa.string(), nullable=False)])


def _requested_since(changed: StoredTable) -> dict[str, tuple[Int64s, Int64s]]:
    """The containers of CHANGED_SCHEMA by earlier sweep, ascending, each with about
    the number of rows of its changed replicas.
    """
    found = dict[str, list[pa.Table]]()
    for piece in changed.tables():
        for name in piece["sweep_id"].unique().to_pylist():
            theirs = piece.filter(pc.equal(piece["sweep_id"], name))
            found.setdefault(name, []).append(requests(theirs["container_id"], theirs["rows"]))
    return {name: requested_rows(pa.concat_tables(held)) for name, held in found.items()}


@dataclass(frozen=True, slots=True)
class AgentEvents:
    """What agents did to their replicas between two sweeps."""

    # EVENT_SCHEMA.
    events: pa.Table
    # Datanodes whose agents report their repairs. An export made without an agent has
    # none.
    datanodes: frozenset[str]
    # Datanodes whose events cannot be read.
    lost: frozenset[str]
    # Why the events of an export cannot be read, by its manifest.
    errors: Mapping[str, str]


def agent_events(exports: Exports, before: Sequence[EarlierExport] = ()) -> AgentEvents:
    """The events in these exports since the exports `before` of their datanodes were
    begun. An unreadable export affects only its own datanode.
    """
    begun, errors = dict[str, datetime](), dict[str, str]()
    for one in before:
        # Not `created_at`: an event during the export may be later than the row read.
        # Of several exports, the oldest: an event too many explains a change, one too
        # few makes a false alarm.
        begun[one.datanode] = min(begun.get(one.datanode, one.begun_at), one.begun_at)
    found, datanodes, lost = [EVENT_SCHEMA.empty_table()], set[str](), set[str]()
    # Most agents wrote to nothing.
    having = [place for place, one in exports.items() if one.of_kind(FileKind.EVENTS)]
    with ThreadPoolExecutor(AT_ONCE, "events") as pool:
        read = partial(_events_of, exports)
        events_of = dict(zip(having, pool.map(read, having), strict=True))
    for place, manifest in exports.items():
        events = events_of.get(place, found[0])
        if isinstance(events, ChunkTableError):
            errors[place] = events.message
            lost.add(manifest.datanode)
            continue
        if manifest.audit is not None:
            datanodes.add(manifest.datanode)
        since = begun.get(manifest.datanode)
        if since is not None:
            events = events.filter(
                pc.greater_equal(events["time"], pa.scalar(since, events["time"].type))
            )
        found.append(events)
    return AgentEvents(pa.concat_tables(found), frozenset(datanodes), frozenset(lost), errors)


def _events_of(exports: Exports, place: str) -> pa.Table | ChunkTableError:
    try:
        return read_events(*export_folder(place), exports[place])
    except ChunkTableError as error:
        return error
