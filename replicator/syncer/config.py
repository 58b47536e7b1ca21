"""The settings of a syncer."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from runtime.config import Address, Count, FilePath, RoleSettings, Settings, Switch, TlsSettings
from runtime.rpc import check_exposure
from runtime.tls_files import Tls

# As many masters as a client takes.
_MASTERS_MAX = 16


class SyncerConfig(Settings):
    """All settings of `treefold syncer run`."""

    # The replication masters of one database; they are tried in this order.
    masters: tuple[Address, ...] = Field(
        default=("127.0.0.1:9895",), min_length=1, max_length=_MASTERS_MAX
    )
    # Holds the syncer's UUID and the queues; one syncer at a time.
    state_folder: FilePath = Path("/var/lib/treefold/syncer")
    tls: TlsSettings | None = None
    roles: RoleSettings = RoleSettings()
    # Allow plaintext connections beyond loopback.
    insecure: Switch = False
    metrics: Address | None = None
    # Replications that this syncer takes; a master gives no more than 256 to one.
    replications_max: Count = Field(default=16, ge=1, le=256)
    # Objects that each replication copies at once.
    copies: Count = Field(default=16, ge=1, le=256)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.roles.check_use(self.tls)
        check_exposure({}, metrics=self.metrics, tls=self.tls, insecure=self.insecure)
        return self

    @property
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return self.tls.files(self.roles) if self.tls else None
