"""The settings of a verifier."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from proof.item import HashAlgorithm
from replicator.verifier.applier import APPLIED_ALGORITHMS
from runtime.config import (
    Address,
    Duration,
    FilePath,
    Rate,
    RoleSettings,
    Settings,
    Switch,
    TlsSettings,
)
from runtime.rpc import check_exposure
from runtime.tls_files import Tls

Seconds = Annotated[Duration, Field(gt=0)]


class ScrubSettings(Settings):
    """The rolling scrub reads every object again, so that damage behind the store's
    own index is found.
    """

    enabled: Switch = True
    # An object is read again when its bytes were last read this long ago.
    read_again_after_s: Seconds = 30 * 86_400.0
    bytes_per_second: Rate = 20 << 20


class VerifierConfig(Settings):
    """All settings of `treefold verifier run`."""

    # As in `treefold bucket sync`: local:PATH or s3://BUCKET/PREFIX?endpoint_url=...
    bucket: str
    # Holds the index and the secret of the profile; one verifier at a time.
    state_folder: FilePath = Path("/var/lib/treefold/verifier")
    listen: Address = "127.0.0.1:9897"
    tls: TlsSettings | None = None
    roles: RoleSettings = RoleSettings()
    # Allow plaintext connections beyond loopback.
    insecure: Switch = False
    metrics: Address | None = None
    # Default: audit.jsonl in the state folder.
    audit_file: FilePath | None = None
    # Take batches and patches of operators; without TLS of whoever reaches the port.
    writes: Switch = False
    # The hash by which contents are compared; both sides use the verifier's.
    algorithm: HashAlgorithm = HashAlgorithm.BLAKE3
    # How often the bucket is listed again by itself.
    refresh_every_s: Seconds = 3600.0
    scrub: ScrubSettings = ScrubSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.algorithm not in APPLIED_ALGORITHMS:
            names = ", ".join(sorted(known.value for known in APPLIED_ALGORITHMS))
            raise ValueError(f"algorithm: expected one of {names}")
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
    def rpc_tls(self) -> Tls | None:
        """The PEM files of mutual TLS; None without TLS."""
        return self.tls.files(self.roles) if self.tls else None
