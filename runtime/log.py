"""Log lines are events with fields, and the names of the events are listed here, since
alerts are made from them.

Error: someone must act. Warning: it recovered by itself. Info: a state changed. Debug:
the rest. Lines go to stderr, as JSON or for a console, never to stdout, which belongs
to results. The audit file is apart: one line a write into replica data, forced to disk
before the write is reported.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from merkle.errors import ReconcileError
from runtime.errors import DiskError

EVENTS = frozenset({
    # processes
    "process_started", "process_stopping", "process_stopped", "server_started", "request_failed",
    # volumes and scans
    "volume_opened", "volume_failed", "container_skipped", "scan_started", "scan_finished",
    "scan_failed",
    "scan_interrupted", "replica_marked_unhealthy", "replica_returned_to_closed",
    "container_deleted", "tree_built",
    "tree_unreadable", "tree_write_failed", "tree_stale", "undo_pruned",
    # reconciliation
    "reconcile_started", "reconcile_finished", "reconcile_failed", "reconcile_interrupted",
    "reconcile_refused",
    "peer_set_aside",
    # chunk tables
    "export_finished", "export_failed",
    # controller and heartbeats
    "heartbeat_failed", "heartbeat_recovered", "command_received", "command_dropped",
    "datanode_registered",
    "datanode_stale", "job_created", "job_changed", "job_finished",
})  # fmt: skip


class LogFormat(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(
    log_format: LogFormat = LogFormat.CONSOLE, level: LogLevel = LogLevel.WARNING
) -> None:
    """Choose form and level of this process's lines; called once, by a cli.py."""
    renderer: Processor
    if log_format is LogFormat.JSON:
        renderer = structlog.processors.JSONRenderer(default=str)
    else:
        # No colours: what is printed must not depend on where stderr happens to go.
        renderer = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    structlog.configure(
        processors=[
            check_event,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level.value),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )


def get_logger(component: str) -> FilteringBoundLogger:
    """A logger whose lines bear the part of the program that they come from."""
    return cast(FilteringBoundLogger, structlog.get_logger(component=component))


def error_fields(error: ReconcileError) -> dict[str, object]:
    """The fields that tell of an error: its stable code, its sentence and its facts."""
    return {**error.facts, "error_code": error.code, "error": error.message}


def check_event(
    _logger: object, _method: str, line: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """Let pass only events of the list."""
    assert line["event"] in EVENTS, f"event {line['event']!r} is not listed in runtime/log.py"
    return line


class _Stderr:
    """Writes lines to whatever stderr is at that time; one write a line, so that
    threads do not mix theirs.
    """

    def __init__(self, *_args: object) -> None:
        pass

    def msg(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = msg


class AuditLog:
    """Appends one JSON line for each write into replica data, and for each delete.
    Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        """Open for append, creating the file readable by its owner and group alone.

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
        """Put down one write: `length` bytes at `offset` of the block's file, which
        came from `source`.

        `unread` of those before could not be read, so that no undo copy has them; the
        line says so where there are any.

        Raises:
            DiskError: the line is not on disk; the write it tells of must not be
                reported as done.
        """
        fields = {"container": container, "block": block, "offset": offset, "length": length}
        self._append(
            [{**fields, "source": source, "job": job, **({"unread": unread} if unread else {})}]
        )

    def delete(self, container: int, blocks: Sequence[int] | None) -> None:
        """Put down that blocks, or None for the whole container, are about to be
        deleted or marked so in the tree.

        Raises:
            DiskError: the lines are not on disk; the delete must not be done.
        """
        same = {"offset": None, "length": 0, "source": "", "job": ""}
        self._append(
            {"kind": "delete", "container": container, "block": block, **same}
            for block in ([None] if blocks is None else blocks)
        )

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
            raise DiskError(f"audit file {self._path} took only a part of a line")

    def close(self) -> None:
        os.close(self._descriptor)


# Until a cli.py decides: structlog's own default would print to stdout.
configure()
