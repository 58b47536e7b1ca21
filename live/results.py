"""The file of a diagnosis, so that an interrupted one goes on where it was.

It has one JSON document a line: first what was asked of which cluster, then one line a
container. Lines are synced batch by batch. What a crash left after the last valid line
is dropped, and those containers are diagnosed again. Only the same questions to the
same cluster continue a file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from merkle.errors import ReconcileError
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import UsageError

JsonObject = dict[str, object]
_VERSION = 1
# A line has the differences of one container.
_LINE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 20


class ResultsError(ReconcileError):
    """The file is not that of a diagnosis."""

    code = "results_invalid"


class ResultsFile:
    """The results so far, and where the next ones go."""

    def __init__(self, path: Path, disk: Disk, asked: Mapping[str, object]) -> None:
        """Create the file, or continue it. `asked` names the cluster and what was asked
        of it.

        Raises:
            ResultsError: the file is not of this diagnosis.
            DiskError: it cannot be read or written.
        """
        self._path, self._disk = path, disk
        self._end = 0
        header = {"schema_version": _VERSION, **asked}
        if disk.length(path) is None:
            disk.replace(path, _line(header))
            self._end = len(_line(header))
            return
        lines = self._lines()
        first = next(lines, None)
        if first is None or "schema_version" not in first:
            raise ResultsError(f"{path} is not the file of a diagnosis", hint="Give another --out.")
        if first != header:
            raise UsageError(
                f"{path} has the results of another diagnosis: {json.dumps(first)[:300]}",
                hint="Give another --out, or the same options.",
            )
        for number, line in enumerate(lines, 2):
            if not (isinstance(line.get("verdict"), str) and type(line.get("containerID")) is int):
                raise ResultsError(
                    f"line {number} of {path} is not the result of a container",
                    hint="Give another --out: somebody changed this file.",
                )
        if disk.length(path) != self._end:
            disk.replace(path, disk.read_at(path, 0, self._end))

    def results(self) -> Iterator[JsonObject]:
        """The results so far, in the order they were added."""
        lines = self._lines()
        next(lines, None)
        yield from lines

    def add(self, results: Sequence[JsonObject]) -> None:
        """Append results, durably."""
        raw = b"".join(map(_line, results))
        self._disk.write_at(self._path, self._end, raw)
        self._disk.sync(self._path)
        self._end += len(raw)

    def _lines(self) -> Iterator[JsonObject]:
        """The lines up to the first that is not valid; `_end` is then their end."""
        at, rest = 0, b""
        self._end = 0
        while (part := self._disk.read_at(self._path, at, _READ_BYTES)) and (
            len(rest) <= _LINE_BYTES_MAX
        ):
            at += len(part)
            *whole, rest = (rest + part).split(b"\n")
            for raw in whole:
                try:
                    found = parse_json(raw)
                except ValueError:
                    return
                if not isinstance(found, dict):
                    return
                yield found
                self._end += len(raw) + 1


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
