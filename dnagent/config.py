"""The settings of an agent. They are validated before anything is opened."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from merkle.replica import TreeSource
from ozone.volume import Hold
from repair.wire import PIECE_BYTES_MAX
from runtime.config import (
    Address,
    Count,
    Duration,
    FilePath,
    Rate,
    RoleSettings,
    Settings,
    Size,
    Switch,
    TlsSettings,
)
from runtime.roles import RoleTable
from runtime.rpc import check_exposure
from runtime.tls_files import Tls

# For exports, which need an extra of the package.
EXTRA_HINT = "Install the extra for chunk tables: pip install 'treefold[sweep]'."
# The limits that an agent takes over from its file while it runs.
LIVE_LIMITS = (
    "scan.bytes_per_second",
    "scan.on_demand_bytes_per_second",
    "serve.bytes_per_second",
    "repair.bytes_per_second",
    "repair.reconciliations_max",
)
# Above the number of disks in any machine.
_VOLUMES_MAX = 256


class VolumeSettings(Settings):
    """A volume of the datanode. `hold` is what the agent may do there at most: see
    `AgentConfig.hold_of`.
    """

    path: FilePath
    hold: Hold = Hold.READ_ONLY

    @field_validator("hold", mode="before")
    @classmethod
    def _with_underscore(cls, value: object) -> object:
        known = value.replace("-", "_") if isinstance(value, str) else value
        if known not in (*Hold, *(hold.value for hold in Hold)):
            raise ValueError(f'expected "read-only" or "owner", found {value!r}')
        return known


class ScanSettings(Settings):
    """Scans; the defaults of those in the background are Ozone's.

    Both rates are limits for each volume; 0 means no limit. Somebody waits for a scan
    on demand, so it is faster than one in the background. `mapped` maps files into the
    memory of one worker process per volume, which is faster than reading.
    """

    enabled: Switch = True
    interval_s: Duration = 7 * 86_400.0
    min_gap_s: Duration = 15 * 60.0
    bytes_per_second: Rate = 5 << 20
    on_demand_bytes_per_second: Rate = 50 << 20
    mapped: Switch = False


class ServeSettings(Settings):
    """What the agent reads for peers and commands, beside a datanode that needs the
    same disks. A rate of 0 means no limit.
    """

    # Of all callers together.
    bytes_per_second: Rate = 100 << 20
    # Of one host: read for it, and not taken yet.
    client_bytes_max: Size = 32 << 20

    @field_validator("client_bytes_max")
    @classmethod
    def _at_least_a_piece(cls, value: int) -> int:
        if value < PIECE_BYTES_MAX:
            raise ValueError("expected at least 1MiB")
        return value


class RepairSettings(Settings):
    """What repairs may write, how much in parallel, and what is kept to undo it.

    A rate of 0 means no limit.
    """

    enabled: Switch = False
    # Return an UNHEALTHY replica to service if a full scan after its repair finds no
    # fault. Ozone never does, so without it a healed replica stays out of service.
    return_to_closed: Switch = True
    undo_bytes: Size = 1 << 30
    undo_days: Count = Field(default=7, ge=0, le=3650)
    reconciliations_max: Count = Field(default=2, ge=1, le=64)
    fetches_max: Count = Field(default=4, ge=1, le=64)
    bytes_per_second: Rate = 0


class ExportSettings(Settings):
    """Background exports of the chunk table; none if `to` is not set."""

    # A local folder or a URI such as s3://bucket/prefix. Each datanode's table is a
    # folder in it.
    to: str | None = Field(default=None, min_length=1)
    interval_s: Duration = 86_400.0
    source: TreeSource = TreeSource.TREE

    @field_validator("to")
    @classmethod
    def _without_secrets(cls, value: str | None) -> str | None:
        if value and "://" in value and "@" in value.split("/")[2]:
            raise ValueError(
                "credentials belong in the environment (AWS_ACCESS_KEY_ID and so on), not in the"
                " address"
            )
        return value

    @field_validator("interval_s")
    @classmethod
    def _at_least_a_second(cls, value: float) -> float:
        if value < 1:
            raise ValueError("expected at least 1s")
        return value


class AgentRoleSettings(RoleSettings):
    """Identities of callers. The certificates that Ozone's own authority made for the
    services of the cluster `ozone_cluster` may read at Ozone's port.
    """

    ozone_cluster: str | None = Field(default=None, min_length=1)

    @property
    def table(self) -> RoleTable:
        """The identities, for decisions."""
        return replace(super().table, ozone_cluster=self.ozone_cluster or "")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


class AgentConfig(Settings):
    """All settings of `treefold agent run`."""

    volumes: tuple[VolumeSettings, ...] = Field(min_length=1, max_length=_VOLUMES_MAX)
    # Holds trees and scan times of read-only volumes, database copies, undo copies and
    # previous trees. It must not lie inside a volume.
    state_folder: FilePath
    # The datanode's hdds.datanode.container.db.dir, if its databases are on separate
    # disks.
    database_volumes: tuple[FilePath, ...] = Field(default=(), max_length=_VOLUMES_MAX)
    # Ozone's ozone-site.xml or its folder: a secured cluster is refused at the start.
    ozone_conf: FilePath | None = None
    listen: Address = "127.0.0.1:9893"
    # The address that peers and the controller connect to; `listen` by default.
    advertised: Address | None = None
    controller: Address | None = None
    heartbeat_interval_s: Duration = 10.0
    scan: ScanSettings = ScanSettings()
    serve: ServeSettings = ServeSettings()
    repair: RepairSettings = RepairSettings()
    export: ExportSettings = ExportSettings()
    tls: TlsSettings | None = None
    roles: AgentRoleSettings = AgentRoleSettings()
    # Allow plaintext connections beyond loopback.
    insecure: Switch = False
    metrics: Address | None = None
    # Default: audit.jsonl in the state folder.
    audit_file: FilePath | None = None

    @field_validator("heartbeat_interval_s")
    @classmethod
    def _not_too_often(cls, value: float) -> float:
        if not 0.05 <= value <= 3600:
            raise ValueError("expected between 50ms and 1h")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # Real paths: a link or ".." must not lead our writes into a volume.
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
        self.roles.check_use(self.tls)
        for volume in self.volumes:
            if self.repair.enabled and volume.hold is Hold.READ_ONLY:
                raise ValueError(
                    f"repair.enabled: {volume.path} is read-only, so nothing can be repaired there;"
                    ' give it hold = "owner" (the datanode must be stopped), or leave repair off'
                )
        check_exposure(
            {"listen": self.listen, "controller": self.controller},
            metrics=self.metrics,
            tls=self.tls,
            insecure=self.insecure,
        )
        return self

    def hold_of(self, volume: VolumeSettings) -> Hold:
        """The hold that a volume is opened with. Without repair nothing in a volume may
        change, not even the state of a damaged replica, so it is opened read-only.
        """
        return volume.hold if self.repair.enabled else Hold.READ_ONLY

    @property
    def audit_path(self) -> Path:
        """The path of the audit file."""
        return self.audit_file or self.state_folder / "audit.jsonl"

    @property
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return self.tls.files(self.roles) if self.tls else None
