"""The export of `treefold agent export-checksums`: volumes opened for one export."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from chunktable.manifest import SkippedVolume
from chunktable.places import destination_of
from dnagent.export import ExportProgress, ExportResult, export
from dnagent.volumes import agent_scan_ms
from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from ozone.survey import VolumeSurvey
from ozone.treefile import TreeFiles
from ozone.volume import Hold, Volume, open_volume
from runtime.disk import Disk
from runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExportedVolume:
    """A volume to export. `state_folder` is that of its agent, None without an agent.
    `owned` states whether the agent owns the volume.
    """

    path: Path
    state_folder: Path | None = None
    owned: bool = False


def export_volumes(
    volumes: Sequence[ExportedVolume],
    to: str,
    *,
    source: TreeSource,
    full: bool = False,
    audit_file: Path | None = None,
    database_volumes: Sequence[Path] = (),
    on_done: Callable[[ExportProgress], None] = lambda _: None,
) -> tuple[list[ExportResult], list[SkippedVolume]]:
    """Export volumes once, to one table for each datanode. Returns the results by
    datanode, and the volumes that could not be opened.

    Volumes are opened read-only, so that a datanode or an agent may own them.

    Raises:
        UsageError: a volume is given twice, or the destination is invalid or lies in a
            volume.
        VolumeError: no volume can be opened.
        ReconcileError: an export failed (dnagent.export.export).
    """
    disk = Disk()
    _check_paths([volume.path for volume in volumes], to)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="treefold-")))
        opened: dict[str, list[VolumeSurvey]] = {}
        failed: list[tuple[str, ReconcileError]] = []
        for number, settings in enumerate(volumes):
            # Separate temporary folders, because copies of a volume have the same ID.
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
                    f"{settings.path} and another path have the same volume {volume.storage_id}"
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
    # An owner stores trees and scan times in the volume itself.
    scanned_ms = None if settings.owned else partial(agent_scan_ms, volume, disk)
    return VolumeSurvey(volume, disk, trees=TreeFiles(volume, disk), scanned_ms=scanned_ms)


def _check_paths(paths: Sequence[Path], to: str) -> None:
    real = [Path(os.path.realpath(path)) for path in paths]
    for path in real:
        if real.count(path) > 1:
            raise UsageError(f"the volume {path} is given twice")
        if "://" not in to and Path(os.path.realpath(to)).is_relative_to(
            path.parent if path.name == "hdds" else path
        ):
            raise UsageError(f"{to} lies in the volume {path}")
