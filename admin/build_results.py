"""What `treefold tree build` has found, a container at a time, kept so that an
interrupted build can be continued.

A result is used again only while the container's files and rows are as they were when
it was read. The file is of one build: it is removed when the build ends.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from merkle.checksum import fingerprint
from ozone.containers import Container
from runtime.disk import disk_error
from runtime.errors import BusyError, DatabaseError, DiskError
from runtime.output import JsonObject


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What was found in one container, as it is printed: `shown` is its JSON object,
    `remarks` are lines on its findings, then on its notes.
    """

    name: str
    shown: JsonObject
    findings: tuple[str, ...]
    notes: tuple[str, ...]


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
        self._known = self._read() if resume else {}
        if not resume:
            self._file.truncate(0)

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
        for line in self._file:
            # Of a build that was killed the last line may be torn.
            try:
                root, container_id, version, fields = json.loads(line)
                result = BuildResult(
                    fields["name"],
                    fields["shown"],
                    tuple(fields["findings"]),
                    tuple(fields["notes"]),
                )
            except (ValueError, TypeError, KeyError):
                break
            if not line.endswith(b"\n"):
                break
            known[root, container_id] = (version, result)
            end += len(line)
        # What follows would be a part of the torn line.
        self._file.truncate(end)
        return known
