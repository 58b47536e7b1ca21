"""Who asks an S3 store, where it is, and by which certificates: found as every S3 tool
finds it.

botocore knows all the ways, and takes longer to import than all of ours. So the plain
way is gone without it: static keys in the environment or in a profile, beside a region,
an endpoint and certificates. Whatever else a profile or the environment says, botocore
is asked.
"""

import configparser
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runtime.errors import ConfigError
from runtime.s3_signing import AccessKeys

if TYPE_CHECKING:
    from botocore.session import Session

_DEFAULT_REGION = "us-east-1"

_KEY, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
_CONFIGURED = {"region", "output", "endpoint_url", "ca_bundle"}
# What of the environment the plain way understands. Another variable of AWS may change
# who asks; those that begin otherwise are of other programs.
_PLAIN_VARIABLES = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_PAGER",
    "AWS_RETRY_MODE",
    "AWS_MAX_ATTEMPTS",
}


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
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self.credentials.get_frozen_credentials()
        # The last is its word for new credentials that have ended already.
        except (BotoCoreError, ClientError, RuntimeError) as error:
            raise ConfigError(
                f"credentials cannot be renewed: {error}",
                hint="Check the profile, and that what it renews them by is reachable.",
            ) from error


@dataclass(frozen=True, slots=True)
class StaticKeys:
    """Keys that do not end."""

    access_key: str
    secret_key: str
    token: str | None = None

    def get_frozen_credentials(self) -> AccessKeys:
        """See CredentialSource."""
        return self


@dataclass(frozen=True, slots=True)
class S3Account:
    """Who asks which store. `endpoint_url` is None where nobody has configured one."""

    credentials: CredentialSource
    region: str
    endpoint_url: str | None
    ca_bundle: str | None


def find_account(settings: S3Settings, environment: Mapping[str, str] | None) -> S3Account:
    """The account for these settings. `environment` is that of this process; with None
    botocore is asked, which reads it itself.

    Raises:
        ConfigError: there are no credentials, or no such profile.
    """
    plain = None if environment is None else plain_account(settings, environment)
    return plain or _account_of_botocore(settings)


def plain_account(settings: S3Settings, environment: Mapping[str, str]) -> S3Account | None:
    """The account by static keys; None where it takes more to find it."""
    given = {name: value for name, value in environment.items() if name.startswith("AWS_")}
    if set(given) - _PLAIN_VARIABLES or not all(given.values()) or not environment.get("HOME"):
        # botocore stops at an empty variable, and a home has other sources.
        return None
    profile = settings.profile or given.get("AWS_PROFILE", "")
    kept = _profile(profile, given, environment["HOME"])
    if kept is None:
        return None
    keys = None
    if not settings.profile and given.get("AWS_ACCESS_KEY_ID"):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        keys = tuple(given.get(name, "") for name in names)
    elif _KEY in kept:
        keys = tuple(kept.get(name, "") for name in (_KEY, _SECRET, _TOKEN))
    if keys is None or not keys[0] or not keys[1]:
        return None
    endpoints = (
        settings.endpoint_url,
        given.get("AWS_ENDPOINT_URL_S3", ""),
        given.get("AWS_ENDPOINT_URL", ""),
        kept.get("endpoint_url", ""),
    )
    return S3Account(
        StaticKeys(keys[0], keys[1], keys[2] or None),
        settings.region
        or given.get("AWS_DEFAULT_REGION", "")
        or kept.get("region", "")
        or _DEFAULT_REGION,
        next(filter(None, endpoints), None),
        given.get("AWS_CA_BUNDLE", "") or kept.get("ca_bundle") or None,
    )


def _profile(name: str, given: Mapping[str, str], home: str) -> dict[str, str] | None:
    """What both files say of a profile; None where it is not plain, or not there."""
    config = _sections(given.get("AWS_CONFIG_FILE", f"{home}/.aws/config"))
    shared = _sections(given.get("AWS_SHARED_CREDENTIALS_FILE", f"{home}/.aws/credentials"))
    if config is None or shared is None:
        return None
    found = [section for section in config if _profile_in(section) == (name or "default")]
    is_known = bool(found) or (name or "default") in shared
    if len(found) > 1 or (name and not is_known):
        return None
    said = config[found[0]] if found else {}
    keys = shared.get(name or "default", {})
    # Keys in the other file come later in the order of botocore.
    if set(said) - _CONFIGURED or set(keys) - {_KEY, _SECRET, _TOKEN}:
        return None
    values = said | keys
    return None if any(value.startswith("\n") for value in values.values()) else values


def _profile_in(section: str) -> str | None:
    """The profile that a section of the configuration is of."""
    if section == "default":
        return section
    try:
        words = shlex.split(section)
    except ValueError:
        return None
    return words[1] if len(words) == 2 and words[0] == "profile" else None


def _sections(path: str) -> dict[str, dict[str, str]] | None:
    """The sections of a file, none where there is no file; None where it cannot be
    read, or botocore would look for it elsewhere.
    """
    if "~" in path or "$" in path:
        return None
    if not Path(path).is_file():
        return {}
    parser = configparser.RawConfigParser()
    try:
        parser.read([path])
    except (configparser.Error, OSError, UnicodeDecodeError):
        return None
    if parser.defaults():
        return None
    return {section: dict(parser.items(section)) for section in parser.sections()}


def configured_endpoint(settings: S3Settings, environment: Mapping[str, str] | None) -> str:
    """The endpoint of the settings, of the environment or of the profile; empty for
    that of AWS. `environment` is that of this process; with None botocore is asked.

    Raises:
        ConfigError: there is no such profile.
    """
    plain = None if environment is None else plain_account(settings, environment)
    if plain is not None:
        return plain.endpoint_url or ""
    with _session_of_botocore(settings) as session:
        return settings.endpoint_url or _configured_endpoint(session) or ""


def _account_of_botocore(settings: S3Settings) -> S3Account:
    with _session_of_botocore(settings) as session:
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


@contextmanager
def _session_of_botocore(settings: S3Settings) -> "Iterator[Session]":
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        yield Session(profile=settings.profile or None)
    except BotoCoreError as error:
        raise ConfigError(
            str(error), hint="Check the profile's name and ~/.aws/config and ~/.aws/credentials."
        ) from error


def _configured_endpoint(session: "Session") -> str | None:
    """The endpoint of the environment or of the profile."""
    from botocore.configprovider import ConfiguredEndpointProvider

    url = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name="s3",
    ).provide()
    return str(url) if url else None
