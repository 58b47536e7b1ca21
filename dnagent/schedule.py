"""Exports of the chunk table in the background of an agent, one an interval."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from dnagent.destination import Destination
from dnagent.export import Exported
from merkle.errors import ChunkTableError, ReconcileError
from protos.chunk_table import TableRefusal, latest_manifest
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# One that failed is tried again so soon.
_RETRY_S = 300.0


class ScheduledExport:
    """Exports again and again in a thread of its own; after a restart it goes on where the table says it was."""

    def __init__(
        self,
        run: Callable[[bool, Callable[[], bool]], Exported],
        last_at: Callable[[], datetime | None],
        *,
        interval_s: float,
        metrics: Metrics,
    ) -> None:
        """`run(full, cancelled)` exports once; `last_at` is when the table was last written, None if never."""
        self._run = run
        self._last_at = last_at
        self._interval_s = interval_s
        self._metrics = metrics
        self._log = get_logger("export")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_round, name="export")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Give up what is under way, and wait for it."""
        self._stop.set()
        self._thread.join()

    def _go_round(self) -> None:
        wait_s, full = self._first_wait_s(), False
        while not self._stop.wait(wait_s):
            started_s = time.monotonic()
            try:
                exported = self._run(full, self._stop.is_set)
            except ReconcileError as error:
                if self._stop.is_set():
                    return
                # A table that is damaged is made anew.
                full = isinstance(error, ChunkTableError)
                wait_s = min(self._interval_s, _RETRY_S)
                self._metrics.count("dnagent_exports_total", outcome="failed")
                self._log.error("export_failed", **error_fields(error))
            else:
                full, wait_s = False, max(self._interval_s - (time.monotonic() - started_s), 0.0)
                self._note(exported)

    def _first_wait_s(self) -> float:
        try:
            last = self._last_at()
        except ReconcileError:
            # The export itself says what is wrong.
            return 0.0
        since_s = (datetime.now(UTC) - last).total_seconds() if last else self._interval_s
        # A table of the future is one of a clock that was set back.
        return min(max(self._interval_s - since_s, 0.0), self._interval_s)

    def _note(self, exported: Exported) -> None:
        manifest = exported.manifest
        self._metrics.count("dnagent_exports_total", outcome="done")
        self._metrics.count("dnagent_exported_rows_total", exported.rows_written)
        self._metrics.set("dnagent_export_last_success_timestamp_seconds", manifest.created_at.timestamp())
        self._metrics.set("dnagent_export_table_rows", manifest.rows)
        self._log.info(
            "export_finished",
            location=exported.location,
            sequence=manifest.sequence,
            containers=manifest.containers,
            rows=manifest.rows,
            rows_written=exported.rows_written,
            events=exported.events,
            findings=exported.faults,
        )


def last_export_at(destination: Destination) -> datetime | None:
    """When the table was last written; None if never.

    Raises:
        ChunkTableError: what is there cannot be read.
    """
    try:
        return latest_manifest(destination.filesystem, destination.folder).created_at
    except ChunkTableError as error:
        if error.reason in (TableRefusal.NO_MANIFEST.value, TableRefusal.UNREADABLE.value):
            return None
        raise
