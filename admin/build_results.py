"""What `treefold tree build` has found, a container at a time, kept so that an
interrupted build can be continued.

A result is used again only while the container's files and rows are as they were when
it was read. The file is of one build: it is removed when the build ends.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from merkle.checksum import fingerprint
from merkle.errors import ReconcileError
from ozone.containers import Container
from runtime.disk import disk_error
from runtime.documents import parse_json
from runtime.errors import BusyError, DatabaseError, DiskError
from runtime.output import JsonObject

# What a kept line has, and the kinds of its values.
_PARTS: Mapping[str, type] = {"volume": str, "container": int, "version": str, "result": dict}
_RESULT: Mapping[str, type] = {"name": str, "shown": dict, "findings": list, "notes": list}
_SHOWN: Mapping[str, type] = {
    "containerID": int,
    "state": str,
    "dataChecksum": str,
    "source": str,
    "blocks": int,
    "deletedBlocks": int,
    "findings": list,
    "notes": list,
}
_NUMBER_END = 1 << 63


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What was found in one container, as it is printed: `shown` is its JSON object,
    `remarks` are lines on its findings, then on its notes.
    """

    name: str
    shown: JsonObject
    findings: tuple[str, ...]
    notes: tuple[str, ...]


class _ResultsDamagedError(ReconcileError):
    """A kept result of an interrupted build is none."""

    code = "results_damaged"


class BuildResults:
    """The results of one build on disk, and those of the interrupted build that it
    continues.
    """

    def __init__(self, folder: Path, paths: Sequence[Path], source: str, *, resume: bool) -> None:
        """Open the results of a build of these volumes and containers, in whichever
        order. Without `resume` those of an earlier build are dropped.

        Raises:
            BusyError: another build of the same paths runs.
            DiskError: the folder cannot be written.
            _ResultsDamagedError: a kept result is none; the file stays as it is.
        """
        key = json.dumps([source, *sorted(str(path) for path in paths)]).encode()
        self._path = folder / f"{fingerprint(key).hex()}.jsonl"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b")
        except OSError as error:
            raise disk_error("open", self._path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise BusyError("another build of the same paths is running") from error
        try:
            self._known = self._read() if resume else {}
            if not resume:
                self._file.truncate(0)
        except OSError as error:
            self._file.close()
            raise disk_error("read", self._path, error) from error
        except _ResultsDamagedError:
            self._file.close()
            raise

    @property
    def count(self) -> int:
        """How many results of the interrupted build there are."""
        return len(self._known)

    def earlier(self, container: Container) -> BuildResult | None:
        """The result of the interrupted build; None if there is none, or the container
        has changed since.
        """
        found = self._known.get((str(container.volume.root), container.container_id))
        if found is None:
            return None
        version, result = found
        with contextlib.suppress(DatabaseError, DiskError):
            return result if container.version() == version else None
        return None

    def add(self, container: Container, version: str, result: BuildResult) -> None:
        """Keep a result, found after the container had this version. Not synced: what a
        power failure takes is read again.

        Raises:
            DiskError: it cannot be written.
        """
        place = [str(container.volume.root), container.container_id]
        line = json.dumps([*place, version, asdict(result)]).encode() + b"\n"
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise disk_error("write", self._path, error) from error

    def finish(self) -> None:
        """Remove the results of a build that has ended."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Close the file; the results stay unless they were removed."""
        # The end of a line that could not be written is not tried again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> dict[tuple[str, int], tuple[str, BuildResult]]:
        known: dict[tuple[str, int], tuple[str, BuildResult]] = {}
        end = 0
        for number, line in enumerate(self._file, start=1):
            # Of a build that was killed the last line may be torn.
            if not line.endswith(b"\n"):
                break
            try:
                root, container_id, version, result = _parsed(line)
            except ValueError as error:
                raise _ResultsDamagedError(
                    f"{self._path}: line {number} is not a result of an interrupted build: {error}",
                    hint="Build without --resume: it reads all containers, and drops this file.",
                ) from error
            known[root, container_id] = (version, result)
            end += len(line)
        # What follows would be a part of the torn line.
        self._file.truncate(end)
        return known


def _parsed(line: bytes) -> tuple[str, int, str, BuildResult]:
    """Volume, container ID, version and result of a kept line.

    Raises:
        ValueError: it is not what `add` writes; the message says where.
    """
    values = parse_json(line)
    if not isinstance(values, list) or len(values) != len(_PARTS):
        raise ValueError(f"expected a list of {len(_PARTS)} values")
    for value, (name, kind) in zip(values, _PARTS.items(), strict=True):
        _check(name, value, kind)
    root, container_id, version, fields = values
    _check_fields("result", fields, _RESULT)
    shown = fields["shown"]
    _check_fields("shown", shown, _SHOWN)
    if shown["containerID"] != container_id:
        raise ValueError("it is of two containers")
    for name in ("findings", "notes"):
        for text in fields[name]:
            _check(name, text, str)
    texts = tuple(fields["findings"]), tuple(fields["notes"])
    return root, container_id, version, BuildResult(fields["name"], shown, *texts)


def _check_fields(what: str, value: Mapping[str, object], kinds: Mapping[str, type]) -> None:
    if value.keys() != kinds.keys():
        raise ValueError(f"{what}: expected the keys {', '.join(kinds)}")
    for name, kind in kinds.items():
        _check(name, value[name], kind)


def _check(name: str, value: object, kind: type) -> None:
    # True is an int for isinstance.
    if type(value) is not kind:
        raise ValueError(f"{name}: expected a value of type {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < _NUMBER_END:
        raise ValueError(f"{name}: the number is out of range")
