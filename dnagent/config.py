"""The settings of an agent, checked as a whole before anything is opened."""

import os
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from merkle.replica import TreeSource
from ozone.volume import Hold
from runtime.config import Address, Duration, FilePath, Rate, Settings, Size, Switch, TlsSettings
from runtime.rpc import Tls, check_exposure

# What exports need beside the package itself.
EXTRA_HINT = "Install what chunk tables need: pip install 'treefold[sweep]'."
# More disks than a machine has.
_VOLUMES_MAX = 256


class VolumeSettings(Settings):
    """One volume of the datanode; what is not said to be owned is never written to."""

    path: FilePath
    hold: Hold = Hold.READ_ONLY

    @field_validator("hold", mode="before")
    @classmethod
    def _as_people_write_it(cls, value: object) -> object:
        known = value.replace("-", "_") if isinstance(value, str) else value
        if known not in (*Hold, *(hold.value for hold in Hold)):
            raise ValueError(f'expected "read-only" or "owner", found {value!r}')
        return known


class ScanSettings(Settings):
    """Background scans, at Ozone's defaults; `bytes_per_second` is for each volume, 0
    sets no limit.

    `mapped` reads files by mapping them in a worker process a volume, which is faster.
    """

    enabled: Switch = True
    interval_s: Duration = 7 * 86_400.0
    min_gap_s: Duration = 15 * 60.0
    bytes_per_second: Rate = 5 << 20
    mapped: Switch = False


class RepairSettings(Settings):
    """What may be written, how much at once, and what is kept to undo it; rate 0 sets
    no limit.
    """

    enabled: Switch = False
    # Move a replica that was UNHEALTHY, and that a full scan after its repair proves
    # clean, back to CLOSED.
    return_to_closed: Switch = False
    undo_bytes: Size = 1 << 30
    undo_days: int = Field(default=7, ge=0, le=3650)
    reconciliations_max: int = Field(default=2, ge=1, le=64)
    fetches_max: int = Field(default=4, ge=1, le=64)
    bytes_per_second: Rate = 0


class ExportSettings(Settings):
    """Exports of the chunk table in the background; none without a place for it."""

    # A local folder or a URI such as s3://bucket/prefix; each datanode's table is a
    # folder in it.
    to: str | None = Field(default=None, min_length=1)
    interval_s: Duration = 86_400.0
    source: TreeSource = TreeSource.TREE

    @field_validator("to")
    @classmethod
    def _without_secrets(cls, value: str | None) -> str | None:
        if value and "://" in value and "@" in value.split("/")[2]:
            raise ValueError(
                "give credentials by the environment (AWS_ACCESS_KEY_ID and so on), not in the"
                " address"
            )
        return value

    @field_validator("interval_s")
    @classmethod
    def _not_without_end(cls, value: float) -> float:
        if value < 1:
            raise ValueError("expected at least 1s")
        return value


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


class AgentConfig(Settings):
    """All settings of `treefold agent run`."""

    volumes: tuple[VolumeSettings, ...] = Field(min_length=1, max_length=_VOLUMES_MAX)
    # Trees and scan times of read-only volumes, shadows, undo copies, previous trees:
    # nothing of it inside a volume.
    state_folder: FilePath
    # The datanode's hdds.datanode.container.db.dir, where its databases lie on disks of
    # their own.
    database_volumes: tuple[FilePath, ...] = Field(default=(), max_length=_VOLUMES_MAX)
    listen: Address = "127.0.0.1:9893"
    # Where peers and the controller reach us; what is listened on, unless given.
    advertised: Address | None = None
    controller: Address | None = None
    heartbeat_interval_s: Duration = 10.0
    scan: ScanSettings = ScanSettings()
    repair: RepairSettings = RepairSettings()
    export: ExportSettings = ExportSettings()
    tls: TlsSettings | None = None
    # Serve and call in the clear off loopback too.
    insecure: Switch = False
    metrics: Address | None = None
    # By default audit.jsonl in the state folder.
    audit_file: FilePath | None = None

    @field_validator("heartbeat_interval_s")
    @classmethod
    def _not_too_often(cls, value: float) -> float:
        if not 0.05 <= value <= 3600:
            raise ValueError("expected between 50ms and 1h")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # As the system will find them: links and dots must not lead what we write into
        # a volume.
        paths = [_real(volume.path) for volume in self.volumes]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"volumes: {path} is listed twice")
            exported = (
                Path(self.export.to) if self.export.to and "://" not in self.export.to else None
            )
            kept = (
                ("state_folder", self.state_folder),
                ("audit_file", self.audit_file),
                ("export.to", exported),
            )
            for key, ours in kept:
                if ours and _real(ours).is_relative_to(
                    path.parent if path.name == "hdds" else path
                ):
                    raise ValueError(f"{key}: must not lie inside the volume {path}")
        check_exposure(
            {"listen": self.listen, "controller": self.controller},
            metrics=self.metrics,
            tls=self.tls,
            insecure=self.insecure,
        )
        return self

    @property
    def audit_path(self) -> Path:
        """Where writes are audited."""
        return self.audit_file or self.state_folder / "audit.jsonl"

    @property
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return Tls(self.tls.cert, self.tls.key, self.tls.ca) if self.tls else None
