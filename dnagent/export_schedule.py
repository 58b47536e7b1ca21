"""The exports of an agent: one after the other, in a background thread."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from chunktable.errors import ChunkTableError
from chunktable.manifest import SkippedVolume, TableRefusal
from chunktable.places import Destination, destination_of
from chunktable.reader import latest_manifest
from dnagent.events import AGENT_EVENTS
from dnagent.export import ExportResult, ReplicaSurvey, export
from dnagent.metrics import PROCESS
from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# The wait after a failed export.
_RETRY_S = 300.0


class ScheduledExport:
    """Exports at an interval, in its own `thread`. The time of the last export comes
    from the table, so a restart does not change the interval.
    """

    def __init__(
        self,
        run: Callable[[bool, Callable[[], bool]], ExportResult],
        last_at: Callable[[], datetime | None],
        *,
        interval_s: float,
        metrics: Metrics,
    ) -> None:
        """`run(full, cancelled)` does one export. `last_at` returns the time of the
        last one; None if there was none.
        """
        self._run = run
        self._last_at = last_at
        self._interval_s = interval_s
        self._metrics = metrics
        self._log = get_logger("export", AGENT_EVENTS)
        self._guard = ThreadGuard("export", metrics, PROCESS.thread_failures)
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run_loop, name="export")

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """Interrupt a running export and wait for the thread."""
        self._stop.set()
        self.thread.join()

    def _run_loop(self) -> None:
        wait_s, full = self._first_wait_s(), False
        while not self._stop.wait(wait_s):
            started_s = time.monotonic()
            try:
                with self._guard.named_errors():
                    exported = self._run(full, self._stop.is_set)
                    self._record_success(exported)
            except ReconcileError as error:
                # Interrupted by `stop`.
                if self._stop.is_set():
                    return
                # A damaged table is written again from the start.
                full = isinstance(error, ChunkTableError)
                wait_s = min(self._interval_s, _RETRY_S)
                self._metrics.count("dnagent_exports_total", outcome="failed")
                self._log.error("export_failed", **error_fields(error))
            else:
                full, wait_s = False, max(self._interval_s - (time.monotonic() - started_s), 0.0)

    def _first_wait_s(self) -> float:
        try:
            with self._guard.named_errors():
                last = self._last_at()
        except ReconcileError:
            # The export reports the error.
            return 0.0
        since_s = (datetime.now(UTC) - last).total_seconds() if last else self._interval_s
        # If the clock was set back, the last export is in the future.
        return min(max(self._interval_s - since_s, 0.0), self._interval_s)

    def _record_success(self, exported: ExportResult) -> None:
        manifest = exported.manifest
        self._metrics.count("dnagent_exports_total", outcome="done")
        self._metrics.count("dnagent_exported_rows_total", exported.rows_written)
        self._metrics.set(
            "dnagent_export_last_success_timestamp_seconds", manifest.created_at.timestamp()
        )
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


def scheduled_export(
    to: str,
    surveys: Sequence[ReplicaSurvey],
    failed: Sequence[tuple[str, ReconcileError]],
    *,
    source: TreeSource,
    interval_s: float,
    audit_file: Path,
    disk: Disk,
    metrics: Metrics,
    on_bytes: Callable[[int], None],
) -> ScheduledExport:
    """The background exports of an agent's volumes, not yet started.

    `failed` are the volumes that the agent could not open, each with its error.
    """

    def destination() -> Destination:
        # Opened for each export: an unreachable bucket must not stop the agent's other
        # work.
        return destination_of(to, surveys[0].datanode, disk)

    skipped = [SkippedVolume(path, error.code, error.message) for path, error in failed]

    def run(full: bool, cancelled: Callable[[], bool]) -> ExportResult:
        return export(
            surveys,
            skipped,
            destination(),
            source=source,
            full=full,
            audit_file=audit_file,
            on_bytes=on_bytes,
            cancelled=cancelled,
        )

    return ScheduledExport(
        run, lambda: _last_at(destination()), interval_s=interval_s, metrics=metrics
    )


def _last_at(destination: Destination) -> datetime | None:
    """The time of the last export; None if there was none or the manifest is damaged.

    Raises:
        ChunkTableError: the table cannot be used, say because a newer release wrote it.
    """
    try:
        return latest_manifest(destination.filesystem, destination.folder).created_at
    except ChunkTableError as error:
        if error.reason in (TableRefusal.NO_MANIFEST.value, TableRefusal.UNREADABLE.value):
            return None
        raise
