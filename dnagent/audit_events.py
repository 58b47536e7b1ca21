"""Read the repairs and deletes in an agent's audit file as rows of the chunk table.

A mark says how far the last export has read, and in which file: it may have become full
since (runtime.audit_chain).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from chunktable.manifest import AuditMark
from merkle.checksum import fingerprint
from runtime.audit_chain import chain_files
from runtime.disk import Disk, disk_error
from runtime.documents import parse_json
from runtime.errors import DiskError

# The head identifies an audit file: it shows whether the file was replaced.
_AUDIT_HEAD_BYTES = 4096
_KINDS = {"write": "repair", "delete": "delete"}


class AuditReader:
    """Reads an audit file from a mark on; from the start of its oldest file if the mark
    belongs to none of them.
    """

    def __init__(self, path: Path | None, before: AuditMark | None) -> None:
        # The position after the last complete line; set when all lines were read.
        self.mark = before
        self._path = path

    def events(self, datanode: str) -> Iterator[dict[str, object]]:
        """Rows of EVENT_SCHEMA in the order of the file; invalid lines are skipped.

        Raises:
            DiskError: the file cannot be read.
        """
        for line in self._lines():
            # The table knows repairs and deletes; a write without a kind is of an
            # earlier version.
            kind = _KINDS.get(str(line.get("kind", "write")))
            if kind is None:
                continue
            try:
                yield event_row(
                    datanode,
                    datetime.fromisoformat(_text(line["time"])),
                    kind,
                    _integer(line["container"]),
                    block_id=None if line["block"] is None else _integer(line["block"]),
                    offset=None if line["offset"] is None else _integer(line["offset"]),
                    length_bytes=_integer(line["length"]),
                    job=str(line["job"]),
                )
            except (KeyError, TypeError, ValueError):
                continue

    def _lines(self) -> Iterator[Mapping[str, object]]:
        if self._path is None:
            return
        try:
            files = chain_files(self._path, Disk())
        except DiskError as error:
            if not error.facts.get("missing"):
                raise
            files = []
        if not files:
            # Nothing was repaired so far. The mark states that repairs are recorded.
            self.mark = self.mark or AuditMark(0, 0, fingerprint(b"").hex())
        marked = next((number for number, path in enumerate(files) if self._is_marked(path)), None)
        before = self.mark
        for number, path in enumerate(files):
            if marked is None or number >= marked:
                is_read = before is not None and number == marked
                yield from self._lines_of(path, before.length_bytes if before and is_read else 0)

    def _is_marked(self, path: Path) -> bool:
        """Whether the mark belongs to this file."""
        # That of an empty file fits every file, and none was read.
        if self.mark is None or not self.mark.head_bytes:
            return False
        try:
            with path.open("rb") as file:
                head, size = file.read(_AUDIT_HEAD_BYTES), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise disk_error("read", path, error) from error
        known = fingerprint(head[: self.mark.head_bytes]).hex() == self.mark.head
        return known and self.mark.length_bytes <= size

    def _lines_of(self, path: Path, at: int) -> Iterator[Mapping[str, object]]:
        try:
            with path.open("rb") as file:
                head = file.read(_AUDIT_HEAD_BYTES)
                file.seek(at)
                for raw in file:
                    # The last line is still being written: leave it to the next export.
                    if not raw.endswith(b"\n"):
                        break
                    at += len(raw)
                    with contextlib.suppress(ValueError):
                        line = parse_json(raw)
                        if isinstance(line, dict):
                            yield line
                width = min(at, len(head))
                self.mark = AuditMark(at, width, fingerprint(head[:width]).hex())
        except OSError as error:
            raise disk_error("read", path, error) from error


def event_row(
    datanode: str,
    at: datetime,
    kind: str,
    container_id: int,
    *,
    block_id: int | None = None,
    offset: int | None = None,
    length_bytes: int = 0,
    job: str = "",
) -> dict[str, object]:
    """One row of EVENT_SCHEMA; `kind` is "repair" or "delete"."""
    return {
        "datanode": datanode,
        "time": at,
        "kind": kind,
        "container_id": container_id,
        "block_id": block_id,
        "chunk_offset": offset,
        "length": length_bytes,
        "job": job,
    }


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int | float | str):
        raise TypeError
    return int(value)
