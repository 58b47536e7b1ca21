"""Read the repairs and deletes in an agent's audit file as rows of the chunk table."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from chunktable.manifest import AuditMark
from merkle.checksum import fingerprint
from runtime.disk import disk_error

# The head identifies an audit file: it shows whether the file was replaced.
_AUDIT_HEAD_BYTES = 4096


class AuditReader:
    """Reads an audit file from a mark on, or from its start if the mark belongs to
    another file.
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
            # The table knows repairs and deletes.
            if line.get("kind") == "return":
                continue
            try:
                yield event_row(
                    datanode,
                    datetime.fromisoformat(_text(line["time"])),
                    "delete" if line.get("kind") == "delete" else "repair",
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
            with self._path.open("rb") as file:
                head, size, at = file.read(_AUDIT_HEAD_BYTES), os.fstat(file.fileno()).st_size, 0
                if self.mark and self.mark.length_bytes <= size:
                    known = fingerprint(head[: self.mark.head_bytes]).hex() == self.mark.head
                    at = self.mark.length_bytes if known else 0
                file.seek(at)
                for raw in file:
                    # The last line is still being written: leave it to the next export.
                    if not raw.endswith(b"\n"):
                        break
                    at += len(raw)
                    with contextlib.suppress(ValueError, RecursionError):
                        line = json.loads(raw)
                        if isinstance(line, dict):
                            yield line
                width = min(at, len(head))
                self.mark = AuditMark(at, width, fingerprint(head[:width]).hex())
        except FileNotFoundError:
            # Nothing was repaired so far. The mark states that repairs are recorded.
            self.mark = self.mark or AuditMark(0, 0, fingerprint(b"").hex())
        except OSError as error:
            raise disk_error("read", self._path, error) from error


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
