"""The settings of a replication master."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from replicator.master.assignment import AssignmentMode, AssignmentRules, Strategy
from replicator.master.syncer_rules import SyncerRules
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
from runtime.rpc import check_exposure
from runtime.tls_files import Tls

# Below it, a syncer whose disk is slow for a moment would lose its lease.
LeaseSeconds = Annotated[Duration, Field(ge=1.0, le=3_600.0)]


class AssignmentSettings(Settings):
    """Who gets a replication: `push` gives it to the syncer that suits best by the
    strategy, `pull` to the next one that asks.
    """

    mode: AssignmentMode = AssignmentMode.PUSH
    strategy: Strategy = Strategy.FEWEST_ACTIVE
    # Replications that are assigned at once over all syncers; 0 is no limit.
    tokens: Count = Field(default=0, ge=0, le=1_000_000)


class MasterConfig(Settings):
    """All settings of `treefold replication-master run`."""

    listen: Address = "127.0.0.1:9895"
    # Holds audit file and, without a database, the records; one master at a time.
    state_folder: FilePath = Path("/var/lib/treefold/replication-master")
    # postgresql://USER@HOST/NAME for several masters; the password is in ~/.pgpass.
    database: str | None = None
    tls: TlsSettings | None = None
    roles: RoleSettings = RoleSettings()
    # Allow plaintext connections beyond loopback.
    insecure: Switch = False
    metrics: Address | None = None
    # Default: audit.jsonl in the state folder.
    audit_file: FilePath | None = None
    # A dead syncer's work goes to another one after this time; heartbeats come four
    # times as often, and every second at least.
    lease_s: LeaseSeconds = 6.0
    # Changes that may wait in a syncer's queue, whatever a policy says.
    pending_entries_max: Count = Field(default=1_000_000, ge=1, le=1_000_000_000)
    assignment: AssignmentSettings = AssignmentSettings()

    @field_validator("database")
    @classmethod
    def _has_no_password(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("postgresql://", "postgres://")):
            raise ValueError("expected postgresql://USER@HOST/NAME")
        user = value.split("://", 1)[1].rpartition("@")[0]
        if ":" in user or "password=" in value:
            raise ValueError("has a password, which logs would show: put it into ~/.pgpass")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.roles.check_use(self.tls)
        check_exposure(
            {"listen": self.listen}, metrics=self.metrics, tls=self.tls, insecure=self.insecure
        )
        return self

    @property
    def audit_path(self) -> Path:
        """The path of the audit file."""
        return self.audit_file or self.state_folder / "audit.jsonl"

    @property
    def rules(self) -> SyncerRules:
        """The settings that affect decisions."""
        found = self.assignment
        assignment = AssignmentRules(found.mode, found.strategy, found.tokens)
        return SyncerRules(int(self.lease_s * 1000), self.pending_entries_max, assignment)

    @property
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return self.tls.files(self.roles) if self.tls else None
