"""Exports of a datanode's chunk table: once, from volumes held by nobody or by anybody,
or in an agent's background.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from chunktable.errors import ChunkTableError
from chunktable.manifest import SkippedVolume, TableRefusal
from chunktable.places import Destination, destination_of
from chunktable.reader import latest_manifest
from dnagent.events import AGENT_EVENTS
from dnagent.export import ExportProgress, ExportResult, ReplicaSurvey, export
from dnagent.volumes import own_scan_ms
from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from ozone.survey import VolumeSurvey
from ozone.treefile import TreeFiles
from ozone.volume import Hold, Volume, open_volume
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# One that failed is tried again so soon.
_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class ExportedVolume:
    """A volume to export, and what an agent keeps beside it, if one does: its state
    folder, and whether it owns it.
    """

    path: Path
    state_folder: Path | None = None
    owned: bool = False


class ScheduledExport:
    """Exports again and again in a thread of its own; after a restart it goes on where
    the table says it was.
    """

    def __init__(
        self,
        run: Callable[[bool, Callable[[], bool]], ExportResult],
        last_at: Callable[[], datetime | None],
        *,
        interval_s: float,
        metrics: Metrics,
    ) -> None:
        """`run(full, cancelled)` exports once; `last_at` is when the table was last
        written, None if never.
        """
        self._run = run
        self._last_at = last_at
        self._interval_s = interval_s
        self._metrics = metrics
        self._log = get_logger("export", AGENT_EVENTS)
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
                # Cut short by the end of the agent.
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

    def _note(self, exported: ExportResult) -> None:
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
    """Exports of an agent's volumes; `failed` are those that it could not open."""

    def destination() -> Destination:
        # Each time anew: a bucket that cannot be reached now does not keep the agent
        # from its other work.
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


def export_now(
    volumes: Sequence[ExportedVolume],
    to: str,
    *,
    source: TreeSource,
    full: bool = False,
    audit_file: Path | None = None,
    database_volumes: Sequence[Path] = (),
    on_done: Callable[[ExportProgress], None] = lambda _: None,
) -> tuple[list[ExportResult], list[SkippedVolume]]:
    """Export volumes once, read-only: a datanode or an agent may own them. A table for
    each datanode among them.

    Raises:
        UsageError: a volume is named twice, or the destination lies in one or cannot be
            understood.
        VolumeError: no volume can be opened.
        ReconcileError: whatever `dnagent.export.export` raises.
    """
    disk = Disk()
    _check_places([volume.path for volume in volumes], to)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="treefold-")))
        opened: dict[str, list[VolumeSurvey]] = {}
        failed: list[tuple[str, ReconcileError]] = []
        for number, settings in enumerate(volumes):
            # A folder each where no agent keeps any: copies of one volume have the same
            # ID.
            state = settings.state_folder or scratch / str(number)
            try:
                volume = open_volume(
                    settings.path,
                    hold=Hold.READ_ONLY,
                    state_folder=state,
                    disk=disk,
                    database_volumes=database_volumes,
                )
            except ReconcileError as error:
                failed.append((str(settings.path), error))
                continue
            stack.enter_context(volume)
            surveys = opened.setdefault(volume.datanode_id, [])
            if any(survey.volume == volume.storage_id for survey in surveys):
                raise UsageError(
                    f"{settings.path} is the volume {volume.storage_id} again, or a copy of it"
                )
            surveys.append(_survey(volume, disk, settings))
        if not opened:
            raise failed[0][1]
        skipped = [SkippedVolume(path, error.code, error.message) for path, error in failed]
        done = [
            export(
                surveys,
                skipped,
                destination_of(to, datanode, disk),
                source=source,
                full=full,
                audit_file=audit_file,
                on_done=on_done,
            )
            for datanode, surveys in sorted(opened.items())
        ]
    return done, skipped


def _survey(volume: Volume, disk: Disk, settings: ExportedVolume) -> VolumeSurvey:
    if settings.state_folder is None:
        return VolumeSurvey(volume, disk)
    # An agent that owns its volumes keeps trees and times in them.
    scanned_ms = None if settings.owned else partial(own_scan_ms, volume, disk)
    return VolumeSurvey(volume, disk, trees=TreeFiles(volume, disk), scanned_ms=scanned_ms)


def _check_places(paths: Sequence[Path], to: str) -> None:
    real = [Path(os.path.realpath(path)) for path in paths]
    for path in real:
        if real.count(path) > 1:
            raise UsageError(f"the volume {path} is given twice")
        if "://" not in to and Path(os.path.realpath(to)).is_relative_to(
            path.parent if path.name == "hdds" else path
        ):
            raise UsageError(f"{to} lies in the volume {path}")
