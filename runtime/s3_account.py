"""Who asks an S3 store, where it is, and by which certificates: found as every S3 tool
finds it, by botocore.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from runtime.errors import ConfigError
from runtime.s3_signing import AccessKeys

_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where a store is and who asks; what is empty comes from the environment, the
    configuration files or the defaults, as for every S3 tool.

    `addressing` is `path` (endpoint/bucket/key) or `virtual` (bucket.endpoint/key);
    empty chooses `virtual` on AWS for bucket names that a certificate covers.
    """

    endpoint_url: str = ""
    region: str = ""
    profile: str = ""
    addressing: str = ""


class CredentialSource(Protocol):
    """Gives the keys of this moment; keys that end are renewed before."""

    def get_frozen_credentials(self) -> AccessKeys:
        """The keys; botocore gave this method its name.

        Raises:
            ConfigError: they cannot be renewed.
        """


@dataclass(frozen=True, slots=True)
class RenewedKeys:
    """The credentials that botocore has found; those that end are renewed before."""

    credentials: CredentialSource

    def get_frozen_credentials(self) -> AccessKeys:
        """See CredentialSource.

        Raises:
            ConfigError: they ended and cannot be renewed.
        """
        try:
            return self.credentials.get_frozen_credentials()
        # The last is its word for new credentials that have ended already.
        except (BotoCoreError, ClientError, RuntimeError) as error:
            raise ConfigError(
                f"credentials cannot be renewed: {error}",
                hint="Check the profile, and that what it renews them by is reachable.",
            ) from error


@dataclass(frozen=True, slots=True)
class S3Account:
    """Who asks which store. `endpoint_url` is None where nobody has configured one."""

    credentials: CredentialSource
    region: str
    endpoint_url: str | None
    ca_bundle: str | None


def find_account(settings: S3Settings) -> S3Account:
    """The account for these settings.

    Raises:
        ConfigError: there are no credentials, or no such profile.
    """
    with _session(settings) as session:
        region = settings.region or session.get_config_variable("region") or _DEFAULT_REGION
        credentials = session.get_credentials()
        endpoint_url = settings.endpoint_url or _configured_endpoint(session)
        ca_bundle = session.get_config_variable("ca_bundle")
    if credentials is None:
        raise ConfigError(
            "no S3 credentials were found",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile.",
        )
    return S3Account(RenewedKeys(credentials), region, endpoint_url, ca_bundle)


def configured_endpoint(settings: S3Settings) -> str:
    """The endpoint of the settings, else of the environment or of the profile; empty
    for that of AWS.

    Raises:
        ConfigError: the profile was asked, and there is none.
    """
    if settings.endpoint_url:
        return settings.endpoint_url
    with _session(settings) as session:
        return _configured_endpoint(session) or ""


@contextmanager
def _session(settings: S3Settings) -> Iterator[Session]:
    try:
        yield Session(profile=settings.profile or None)
    except BotoCoreError as error:
        raise ConfigError(
            str(error), hint="Check the profile's name and ~/.aws/config and ~/.aws/credentials."
        ) from error


def _configured_endpoint(session: Session) -> str | None:
    """The endpoint of the environment or of the profile."""
    url = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name="s3",
    ).provide()
    return str(url) if url else None
