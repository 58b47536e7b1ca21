"""The settings of a controller."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from runtime.config import (
    Address,
    Count,
    Duration,
    FilePath,
    RoleSettings,
    Settings,
    Switch,
    TlsSettings,
)
from runtime.rpc import check_exposure, is_loopback
from runtime.tls_files import Tls
from scm.quiet_hours import check_quiet_hours, parse_quiet_hours
from scm.rules import Rules

# The limits that a controller takes over from its file while it runs.
LIVE_LIMITS = ("orders_per_datanode", "automatic.jobs_max")
Limit = Annotated[Count, Field(ge=1, le=10_000)]
Seconds = Annotated[Duration, Field(gt=0)]
# What SCM says, or what is only for agents.
_NOT_WITH_CLUSTER = (
    "required_replicas",
    "dead_after_s",
    "roots_stale_after_s",
    "command_deadline_s",
)


class AutomaticSettings(Settings):
    """Automatic mode reconciles diverged containers. It also visits matching ones, so
    that tombstones spread.
    """

    enabled: Switch = False
    jobs_max: Limit = 4
    visit_every_s: Seconds = 60.0
    # Nothing is started in these hours of the day, by the clock of this machine.
    quiet_hours: Annotated[str, AfterValidator(check_quiet_hours)] | None = None


class OzoneClusterSettings(Settings):
    """An Ozone cluster without agents: its SCMs report, and Ozone reconciles."""

    # Their client ports, tried in order. Without one, agents report and repair.
    scms: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    # A round has ended when no root has changed for so long: a command and its report
    # each wait for a heartbeat, every 30 s by default.
    settle_s: Seconds = 90.0
    # 0 is no limit.
    requests_per_hour: Count = Field(default=0, ge=0, le=1_000_000)
    # Reports of all containers are read anew so often.
    read_every_s: Seconds = 300.0
    # Reports of containers under way are read so often.
    poll_s: Annotated[Duration, Field(gt=0, le=60)] = 2.0


class DashboardSettings(Settings):
    """The page for browsers, on an address of its own. It has no TLS."""

    listen: Address | None = None
    # Whoever knows what is in it may give orders by the page; without it nobody may.
    token_file: FilePath | None = None
    # Where `treefold sweep run` writes.
    sweeps: FilePath | None = None
    # Where `treefold bucket verify --metrics-file` writes.
    bucket_metrics: FilePath | None = None


class ControllerConfig(Settings):
    """All settings of `treefold scm run`."""

    listen: Address = "127.0.0.1:9896"
    # Holds controller.db; one controller at a time.
    state_folder: FilePath = Path("/var/lib/treefold/controller")
    tls: TlsSettings | None = None
    roles: RoleSettings = RoleSettings()
    # Allow plaintext connections beyond loopback.
    insecure: Switch = False
    metrics: Address | None = None
    dashboard: DashboardSettings = DashboardSettings()
    # Default: audit.jsonl in the state folder.
    audit_file: FilePath | None = None
    # The replicas that a container should have; reports do not contain it.
    required_replicas: Count = Field(default=3, ge=0, le=64)
    stale_after_s: Seconds = 90.0
    dead_after_s: Seconds = 600.0
    # Roots of older scans prove nothing; agents scan every week.
    roots_stale_after_s: Seconds = 30 * 86_400.0
    orders_per_datanode: Limit = 2
    command_deadline_s: Seconds = 3600.0
    automatic: AutomaticSettings = AutomaticSettings()
    cluster: OzoneClusterSettings = OzoneClusterSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dead_after_s < self.stale_after_s:
            raise ValueError("dead_after_s: must not be less than stale_after_s")
        if self.cluster.scms:
            for name in self.model_fields_set.intersection(_NOT_WITH_CLUSTER):
                raise ValueError(f"{name}: has no effect with [cluster]; remove it")
            if "visit_every_s" in self.automatic.model_fields_set:
                raise ValueError("automatic.visit_every_s: has no effect with [cluster]; remove it")
            if self.cluster.poll_s * 2 > self.cluster.settle_s:
                raise ValueError("cluster.settle_s: must be at least twice cluster.poll_s")
        self.roles.check_use(self.tls)
        page = self.dashboard.listen
        if page and not is_loopback(page) and not self.insecure:
            raise ValueError(
                f"dashboard.listen: {page} is not on loopback, and the page has no TLS: put a proxy"
                " with TLS before it, or set insecure = true"
            )
        check_exposure(
            {"listen": self.listen}, metrics=self.metrics, tls=self.tls, insecure=self.insecure
        )
        return self

    @property
    def audit_path(self) -> Path:
        """The path of the audit file."""
        return self.audit_file or self.state_folder / "audit.jsonl"

    @property
    def rules(self) -> Rules:
        """The settings that affect decisions."""
        quiet = self.automatic.quiet_hours
        return Rules(
            required_nodes=self.required_replicas,
            stale_after_s=self.stale_after_s,
            dead_after_s=self.dead_after_s,
            roots_stale_after_s=self.roots_stale_after_s,
            orders_per_datanode=self.orders_per_datanode,
            command_deadline_s=self.command_deadline_s,
            automatic=self.automatic.enabled,
            automatic_jobs=self.automatic.jobs_max,
            visit_every_s=self.automatic.visit_every_s,
            quiet_hours=parse_quiet_hours(quiet) if quiet else None,
        )

    @property
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return self.tls.files(self.roles) if self.tls else None
