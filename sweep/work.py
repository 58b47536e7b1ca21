"""The work folder of a sweep: its plan and its finished work, so that an interrupted
sweep can be resumed.

    <out>/work/<sweep id>/plan.json
    <out>/work/<sweep id>/<stage>/<number>.json
    <out>/work/<sweep id>/<stage>/<number>/<table>.parquet
    <out>/work/<sweep id>/<stage>/.tasks/<table>/<table>-<unique>.parquet

An entry of a stage is complete once its note, `<number>.json`, exists: it is written
last, and names the tables and the files that tasks wrote. A bucket refuses a note whose
number is taken, so only a process that knows all entries can add one. Tables ascend by
container ID. So many entries can be read together range by range, in bounded memory.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ObjectStoreError
from chunktable.files import AnyPath, Files
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.documents import parse_json
from runtime.errors import DiskError
from sweep.model import (
    Part,
    PartKind,
)
from sweep.output import JsonObject, SkippedInput, write_atomically
from sweep.pieces import StoredFile, StoredTable, TablePlace, unreadable_error

# Raised when the layout changes: an unfinished sweep of another one starts over.
_VERSION = 2
# Volumes change, so rows read from one a day ago do not belong to this sweep.
_RESUMED_WITHIN = timedelta(days=1)
_ROW_GROUP = 1 << 15
_ID_MIN = -(1 << 63)
# The folder of a stage for the files that tasks write: hidden from the list of entries.
_TASKS = ".tasks"
_NOTE = re.compile(r"(\d{6,})\.json")
# In a bucket each is a round trip.
_NOTES_AT_ONCE = 16
# What parsing damaged or foreign JSON raises.
_INVALID_JSON = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    AssertionError,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep reads, fixed when it begins."""

    sweep_id: str
    started_at: datetime
    engine: str
    source: TreeSource
    # Those of volumes come first, then those of files.
    parts: tuple[Part, ...]
    skipped: tuple[SkippedInput, ...]
    # The locations of the exports' manifests.
    manifests: tuple[str, ...]
    # Identifies the requested inputs (plan_key). It stays the same if unreadable parts
    # are removed from the plan later.
    key: str


def plan_key(
    engine: str,
    source: TreeSource,
    parts: Sequence[Part],
    skipped: Sequence[SkippedInput],
    manifests: Sequence[str],
) -> str:
    """A key that is equal for two sweeps exactly if they read the same inputs in the
    same way.

    It includes the manifests: an agent may export again without changing any file with
    rows.
    """
    ids, left_out = sorted(part.part_id for part in parts), sorted(one.input for one in skipped)
    return fingerprint(
        json.dumps([engine, source.value, ids, left_out, sorted(manifests)]).encode()
    ).hex()


class WorkFolders:
    """The work folders of all sweeps in one output folder."""

    def __init__(self, folder: AnyPath, files: Files) -> None:
        self._folder = folder / "work"
        self._files = files

    def plans(self) -> tuple[list[Plan], dict[str, str]]:
        """The plans of unfinished sweeps, oldest first, and the reasons why other plans
        cannot be read, by sweep ID.

        Plans of a later version are ignored.
        """
        plans, broken = list[Plan](), dict[str, str]()
        for name in self._files.names(self._folder):
            path = self._folder / name / "plan.json"
            if not self._files.exists(path):
                continue
            try:
                raw = parse_json(self._files.read(path))
                if (version := raw.pop("version")) == _VERSION:
                    plans.append(_plan(raw))
                elif version < _VERSION:
                    broken[name] = f"{path} is of an earlier release"
            # The plan may be whole.
            except ObjectStoreError:
                raise
            except DiskError as error:
                broken[path.parent.name] = error.message
            except _INVALID_JSON as error:
                broken[path.parent.name] = f"{path} is damaged: {error!r}"
        return plans, broken

    def resume_or_begin(self, plan: Plan, *, fresh: bool, note: Callable[[str], None]) -> Plan:
        """The plan of an unfinished sweep over the same inputs, otherwise `plan`, which
        is stored. All other unfinished sweeps are removed.

        If `fresh`, no sweep is resumed. `note` is called with remarks on sweeps that
        are resumed or cannot be.

        Raises:
            DiskError: the plan cannot be written, or an old one cannot be removed.
        """
        has_volumes = any(part.kind is PartKind.VOLUME for part in plan.parts)
        found: Plan | None = None
        plans, broken = self.plans()
        for sweep_id, reason in broken.items():
            note(f"sweep {sweep_id} cannot be resumed: {reason}")
            self.remove(sweep_id)
        for other in plans:
            is_recent = not has_volumes or plan.started_at - other.started_at < _RESUMED_WITHIN
            if other.key == plan.key and is_recent and not fresh:
                found = other
            else:
                self.remove(other.sweep_id)
        if found is None:
            self.begin(plan)
            return plan
        note(f"resuming sweep {found.sweep_id}, begun {found.started_at:%Y-%m-%d %H:%M:%S} UTC")
        return found

    def begin(self, plan: Plan) -> None:
        """Store the plan of a sweep, or replace it.

        Raises:
            DiskError: the plan cannot be written.
        """
        path = self._folder / plan.sweep_id / "plan.json"
        self._files.make_folder(path.parent)
        raw = asdict(plan) | {"version": _VERSION, "started_at": plan.started_at.isoformat()}
        self._files.replace(path, json.dumps(raw, default=lambda value: value.value).encode())

    def path(self, plan: Plan, name: str) -> AnyPath:
        """The path of a file of a sweep's unfinished work."""
        return self._folder / plan.sweep_id / name

    def stage(self, plan: Plan, name: str) -> "SweepStage":
        """The finished work of one stage."""
        return SweepStage(self._folder / plan.sweep_id / name, self._files)

    def remove(self, sweep_id: str) -> None:
        """Remove the work folder of a sweep that is complete or abandoned.

        Raises:
            DiskError: the folder cannot be removed.
        """
        # The plan first: a partly removed folder must not look like an unfinished
        # sweep.
        self._files.remove(self._folder / sweep_id / "plan.json")
        self._files.remove_folder(self._folder / sweep_id)


class SweepStage:
    """The finished entries of one stage, oldest first. One process adds to it."""

    def __init__(self, folder: AnyPath, files: Files) -> None:
        self._folder = folder
        self._files = files
        # Once they were read; then this process is the only one that adds to them.
        self._notes: list[JsonObject] | None = None

    def place(self, name: str, schema: pa.Schema) -> TablePlace:
        """Where tasks write the files of a table."""
        return TablePlace(self._folder / _TASKS / name, schema)

    def add(
        self,
        note: JsonObject,
        tables: Mapping[str, pa.Table],
        files: Mapping[str, Sequence[StoredFile]] = MappingProxyType({}),
    ) -> None:
        """Store one entry, which is durable when this returns. Each table needs a
        column `container_id`. `files` are those that tasks wrote, by table.

        Raises:
            DiskError: the entry cannot be written.
            BusyError: another process adds to this stage.
        """
        number = len(self.notes())
        for name, table in tables.items():
            # Rows without a container come first.
            ordered = table.take(pc.sort_indices(pc.fill_null(table["container_id"], _ID_MIN)))
            with write_atomically(
                self._entry(number) / f"{name}.parquet",
                table.schema,
                self._files,
                row_group=_ROW_GROUP,
            ) as writer:
                writer.add(ordered)
        named = {name: [asdict(file) for file in of_table] for name, of_table in files.items()}
        whole = {**note, "tables": list(tables), "files": named}
        self._files.make_folder(self._folder)
        content = json.dumps(whole).encode()
        self._files.append(self._folder / f"{number:06}.json", content)
        self.notes().append(parse_json(content))

    def clear(self) -> None:
        """Remove all entries.

        Raises:
            DiskError: they cannot be removed.
        """
        for note in reversed(self._numbers()):
            # The notes first: what they name must not be lacking.
            self._files.remove(self._folder / f"{note:06}.json")
        self._files.remove_folder(self._folder)
        self._notes = []

    def notes(self) -> list[JsonObject]:
        """The notes of all entries, oldest first.

        Raises:
            SweepWorkError: a note cannot be read.
        """
        if self._notes is None:
            with ThreadPoolExecutor(_NOTES_AT_ONCE, "notes") as pool:
                self._notes = list(pool.map(self._note, self._numbers()))
        return self._notes

    def _note(self, number: int) -> JsonObject:
        path = self._folder / f"{number:06}.json"
        try:
            note: JsonObject = parse_json(self._files.read(path))
        except (DiskError, ValueError) as error:
            raise unreadable_error(path, error) from error
        return note

    def table(self, name: str, schema: pa.Schema) -> "StoredTable":
        """The table of this name, over all entries.

        Raises:
            SweepWorkError: a file of the table cannot be read.
        """
        paths, files = list[AnyPath](), dict[AnyPath, StoredFile]()
        for number, note in enumerate(self.notes()):
            try:
                if name in texts_of(note["tables"]):
                    paths.append(self._entry(number) / f"{name}.parquet")
                for file in self.files(note).get(name, ()):
                    files[self.place(name, schema).folder / file.name] = file
            except (KeyError, TypeError, ValueError) as error:
                raise unreadable_error(self._entry(number), repr(error)) from error
        return StoredTable(paths, schema, files)

    def files(self, note: JsonObject) -> dict[str, list[StoredFile]]:
        """The files that tasks wrote for an entry, by table.

        Raises:
            ValueError, TypeError, KeyError: the note is damaged.
        """
        named = note["files"]
        if not isinstance(named, dict):
            raise TypeError(f"{named!r} is not an object")
        return {name: [StoredFile.of(one) for one in of_table] for name, of_table in named.items()}

    def _entry(self, number: int) -> AnyPath:
        return self._folder / f"{number:06}"

    def _numbers(self) -> list[int]:
        """The numbers of all entries, from 0 on."""
        names = self._files.names(self._folder)
        numbers = [int(match[1]) for name in names if (match := _NOTE.fullmatch(name))]
        if numbers != list(range(len(numbers))):
            raise unreadable_error(self._folder, "it lacks some of its entries")
        return numbers


def _plan(raw: dict[str, object]) -> Plan:
    parts, skipped = raw["parts"], raw["skipped"]
    assert isinstance(parts, list)
    assert isinstance(skipped, list)
    return Plan(
        str(raw["sweep_id"]),
        datetime.fromisoformat(str(raw["started_at"])),
        str(raw["engine"]),
        TreeSource(raw["source"]),
        parts_of(parts),
        tuple(SkippedInput(**one) for one in skipped),
        tuple(raw["manifests"]) if isinstance(raw["manifests"], list) else (),
        str(raw["key"]),
    )


def parts_of(raw: Sequence[Mapping[str, object]]) -> tuple[Part, ...]:
    """Parts from their JSON objects."""
    return tuple(
        Part(
            **{  # type: ignore[arg-type]
                **one,
                "kind": PartKind(one["kind"]),
                "source": TreeSource(one["source"]),
                # JSON has only lists. Earlier releases stored none.
                "volumes": tuple(texts_of(one["volumes"])) if one.get("volumes") else None,
            }
        )
        for one in raw
    )


def texts_of(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def pairs_of(value: object) -> list[tuple[str, str]]:
    assert isinstance(value, dict)
    return list(value.items())


def counts_of(value: object) -> dict[str, int]:
    assert isinstance(value, dict)
    return value


def numbers_of(value: object) -> list[int]:
    assert isinstance(value, list)
    return value


def number_of(value: object) -> int:
    assert isinstance(value, int)
    return value
