"""The audit file: one JSON line for each write into replica data, each deletion, each
replica that returns to service, and calls that were refused.

A line is synced to disk before its write is reported, and before its deletion or return
begins. Every change of replica data or state therefore has a line.
"""

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.json_numbers import exact


class AuditLog:
    """Appends lines to the audit file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file for append. A new file is readable only by its owner and group.

        Raises:
            DiskError: the file cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640
            )
        except OSError as error:
            raise DiskError(
                f"audit file {path} cannot be opened: {error.strerror}", path=str(path)
            ) from error
        try:
            # A new file, too, must be there after a power cut.
            Disk().sync_folder(path.absolute().parent)
        except DiskError:
            self.close()
            raise

    def write(
        self,
        *,
        container: int,
        block: int,
        offset: int,
        length: int,
        source: str,
        job: str,
        unread: int = 0,
    ) -> None:
        """Record one write of `length` bytes at byte `offset` of the block's file,
        copied from the peer `source`.

        `unread` of the overwritten bytes could not be read and are in no undo copy; the
        line has this field only if it is not 0.

        Raises:
            DiskError: the line is not on disk; its write must not be reported as done.
        """
        place = {"container": container, "block": exact(block), "offset": offset}
        copied = {"length": length, "source": source, "job": job}
        self._append([{**place, **copied, **({"unread": unread} if unread else {})}])

    def delete(self, container: int, blocks: Sequence[int] | None) -> None:
        """Record that blocks are about to be deleted, or marked as deleted in the tree;
        with None, the whole container.

        Raises:
            DiskError: the lines are not on disk; the delete must not be done.
        """
        unused = {"offset": None, "length": 0, "source": "", "job": ""}
        self._append(
            {"kind": "delete", "container": container, "block": exact(block), **unused}
            for block in ([None] if blocks is None else blocks)
        )

    def return_to_service(self, container: int, state: str, job: str) -> None:
        """Record that an UNHEALTHY replica is about to return to service in `state`.

        Raises:
            DiskError: the line is not on disk; the replica must stay as it is.
        """
        place = {"container": container, "block": None, "offset": None, "length": 0}
        self._append([{"kind": "return", **place, "source": "", "job": job, "state": state}])

    def refused_call(
        self, *, method: str, caller: str, certificate: str, peer: str, reason: str, count: int
    ) -> None:
        """Record that a call was refused, because its certificate has no role for it.

        `caller` is the certificate's identity, empty without one, and `certificate` its
        SHA-256. `count` is how many such calls came within a minute.

        Raises:
            DiskError: the line is not on disk.
        """
        who = {"method": method, "caller": caller, "certificate": certificate, "peer": peer}
        self._append([{"kind": "refused", **who, "reason": reason, "count": count}])

    def _append(self, lines: Iterable[Mapping[str, object]]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = "".join(json.dumps({"time": time, **line}) + "\n" for line in lines)
        try:
            with self._lock:
                written = os.write(self._descriptor, text.encode())
                os.fsync(self._descriptor)
        except OSError as error:
            raise DiskError(
                f"audit file {self._path} cannot be written: {error.strerror}"
            ) from error
        if written != len(text):
            raise DiskError(f"audit file {self._path}: a line was written only in part")

    def close(self) -> None:
        """Close the file; nothing can be recorded afterwards."""
        os.close(self._descriptor)
