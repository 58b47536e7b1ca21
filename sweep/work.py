"""The work folder of a sweep: its plan and its finished work, so that an interrupted
sweep can be resumed.

    <out>/work/<sweep id>/plan.json
    <out>/work/<sweep id>/<stage>/<number>/{note.json, <table>.parquet...}
    <out>/work/<sweep id>/<stage>/.tasks/<table>/<table>-<unique>.parquet

An entry of a stage is written to a temporary folder and then renamed, so it is complete
or absent. Its note names the files that tasks wrote for it. Tables ascend by container
ID. So many entries can be read together range by range, in bounded memory.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.disk import Disk, disk_error
from runtime.documents import parse_json
from runtime.errors import BusyError, DiskError
from sweep.model import (
    Part,
    PartKind,
)
from sweep.output import (
    JsonObject,
    SkippedInput,
)
from sweep.pieces import StoredFile, StoredTable, TablePlace, unreadable_error

_VERSION = 1
# Volumes change, so rows read from one a day ago do not belong to this sweep.
_RESUMED_WITHIN = timedelta(days=1)
_ROW_GROUP = 1 << 15
_ID_MIN = -(1 << 63)
# The folder of a stage for the files that tasks write: hidden from the list of entries.
_TASKS = ".tasks"
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

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder / "work"
        self._disk = disk

    def plans(self) -> tuple[list[Plan], dict[str, str]]:
        """The plans of unfinished sweeps, oldest first, and the reasons why other plans
        cannot be read, by sweep ID.

        Plans of another version are ignored.
        """
        plans, broken = list[Plan](), dict[str, str]()
        for path in sorted(self._folder.glob("*/plan.json")):
            try:
                raw = parse_json(self._disk.read(path))
                if raw.pop("version") == _VERSION:
                    plans.append(_plan(raw))
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
        self._disk.make_folder(path.parent)
        raw = asdict(replace(plan, parts=())) | {
            "parts": [part.document() for part in plan.parts],
            "version": _VERSION,
            "started_at": plan.started_at.isoformat(),
        }
        self._disk.replace(path, json.dumps(raw, default=lambda value: value.value).encode())

    def path(self, plan: Plan, name: str) -> Path:
        """The path of a file of a sweep's unfinished work."""
        return self._folder / plan.sweep_id / name

    def stage(self, plan: Plan, name: str) -> "SweepStage":
        """The finished work of one stage."""
        return SweepStage(self._folder / plan.sweep_id / name, self._disk)

    def remove(self, sweep_id: str) -> None:
        """Remove the work folder of a sweep that is complete or abandoned.

        Raises:
            DiskError: the folder cannot be removed.
        """
        # The plan first: a partly removed folder must not look like an unfinished
        # sweep.
        self._disk.remove(self._folder / sweep_id / "plan.json")
        self._disk.remove_folder(self._folder / sweep_id)


class SweepStage:
    """The finished entries of one stage, oldest first."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

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
        """
        number = len(self._entries())
        temporary = self._folder / f".{number:06}"
        self._disk.remove_folder(temporary)
        self._disk.make_folder(temporary)
        for name, table in tables.items():
            path = temporary / f"{name}.parquet"
            # Rows without a container come first.
            ordered = table.take(pc.sort_indices(pc.fill_null(table["container_id"], _ID_MIN)))
            try:
                pq.write_table(
                    ordered,
                    path,
                    row_group_size=_ROW_GROUP,
                    compression="zstd",
                    write_page_checksum=True,
                )
            except OSError as error:
                raise DiskError(f"{path} cannot be written: {error}", path=str(path)) from error
            self._disk.sync(path)
        named = {name: [asdict(file) for file in of_table] for name, of_table in files.items()}
        whole = {**note, "tables": list(tables), "files": named}
        self._disk.replace(temporary / "note.json", json.dumps(whole).encode())
        self._disk.rename(temporary, self._folder / f"{number:06}")
        self._disk.sync_folder(self._folder)

    def clear(self) -> None:
        """Remove all entries.

        Raises:
            DiskError: they cannot be removed.
        """
        self._disk.remove_folder(self._folder)

    def notes(self) -> list[JsonObject]:
        """The notes of all entries, oldest first.

        Raises:
            SweepWorkError: a note cannot be read.
        """
        found = list[JsonObject]()
        for path in (entry / "note.json" for entry in self._entries()):
            try:
                found.append(parse_json(self._disk.read(path)))
            except (DiskError, ValueError) as error:
                raise unreadable_error(path, error) from error
        return found

    def table(self, name: str, schema: pa.Schema) -> "StoredTable":
        """The table of this name, over all entries.

        Raises:
            SweepWorkError: a file of the table cannot be read.
        """
        paths, files = list[Path](), dict[Path, StoredFile]()
        for entry, note in zip(self._entries(), self.notes(), strict=True):
            try:
                if name in texts_of(note["tables"]):
                    paths.append(entry / f"{name}.parquet")
                for file in self.files(note).get(name, ()):
                    files[self.place(name, schema).folder / file.name] = file
            # Work of an earlier release has neither.
            except (KeyError, TypeError, ValueError) as error:
                raise unreadable_error(entry / "note.json", repr(error)) from error
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

    def _entries(self) -> list[Path]:
        if not self._disk.is_folder(self._folder):
            return []
        return [
            self._folder / name
            for name in self._disk.names(self._folder)
            if not name.startswith(".")
        ]


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
                "export": None,
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


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a folder of sweeps against other processes.

    Raises:
        BusyError: another process holds the lock.
        DiskError: the lock file cannot be opened.
    """
    path = folder / ".lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error("lock", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BusyError(
            f"another sweep is running in {folder}", hint="Wait for it, or give another --out."
        ) from error
    finally:
        os.close(fd)
