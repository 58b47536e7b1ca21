"""Who asks an S3 store, where it is, and by which certificates: found as every S3 tool
finds it, by botocore.

Its session takes a fifth of the start of a sync to import. So static keys in the
environment or in a profile are found without it, where nothing else is said that could
change who asks: a variable or an option that is not known here leaves it to botocore.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

# These two parse the files, and import nothing else.
from botocore.configloader import build_profile_map, raw_config_parse
from botocore.exceptions import BotoCoreError, ConfigNotFound

from runtime.errors import ConfigError
from runtime.s3_signing import AccessKeys

if TYPE_CHECKING:
    from botocore.session import Session

_DEFAULT_REGION = "us-east-1"
_KEY, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
_PLAIN_OPTIONS = frozenset({"region", "output", "endpoint_url", "ca_bundle"})
# Variables of AWS beside which static keys are who asks.
_PLAIN_VARIABLES = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_REGION",
        # botocore ignores this one, which other SDKs have.
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
)


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
        from botocore.exceptions import ClientError

        try:
            return self.credentials.get_frozen_credentials()
        # The last is its word for new credentials that have ended already.
        except (BotoCoreError, ClientError, RuntimeError) as error:
            raise ConfigError(
                f"credentials cannot be renewed: {error}",
                hint="Check the profile, and that what it renews them by is reachable.",
            ) from error


@dataclass(frozen=True, slots=True)
class _StaticKeys:
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


def find_account(settings: S3Settings) -> S3Account:
    """The account for these settings.

    Raises:
        ConfigError: there are no credentials, or no such profile.
    """
    return plain_account(settings, os.environ) or account_of_botocore(settings)


def plain_account(settings: S3Settings, environment: Mapping[str, str]) -> S3Account | None:
    """The account by static keys; None where it takes botocore to find it."""
    given = {name: value for name, value in environment.items() if name.startswith("AWS_")}
    # botocore does not take every empty variable for one that is not set.
    if not _PLAIN_VARIABLES.issuperset(given) or not all(given.values()):
        return None
    profile = _plain_profile(settings.profile or given.get("AWS_PROFILE", ""), given)
    if profile is None:
        return None
    found: Mapping[str, str] = {name.lower(): value for name, value in given.items()}
    # A profile that is asked for by name comes before keys of the environment.
    keys = profile if settings.profile or not {_KEY, _SECRET} & set(found) else found
    if not keys.get(_KEY) or not keys.get(_SECRET):
        return None
    endpoints = (
        settings.endpoint_url,
        given.get("AWS_ENDPOINT_URL_S3"),
        given.get("AWS_ENDPOINT_URL"),
        profile.get("endpoint_url"),
    )
    regions = settings.region, given.get("AWS_DEFAULT_REGION"), profile.get("region")
    return S3Account(
        _StaticKeys(keys[_KEY], keys[_SECRET], keys.get(_TOKEN)),
        next(filter(None, regions), _DEFAULT_REGION),
        next(filter(None, endpoints), None),
        given.get("AWS_CA_BUNDLE") or profile.get("ca_bundle"),
    )


def _plain_profile(name: str, given: Mapping[str, str]) -> Mapping[str, str] | None:
    """What both files say of a profile; None where more than plain options, or where
    there is no such profile.
    """
    try:
        config = _read(given.get("AWS_CONFIG_FILE", "~/.aws/config"))
        shared = _read(given.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    except BotoCoreError:
        return None
    profiles: Mapping[str, Mapping[str, object]] = build_profile_map(config)["profiles"]
    if name and name not in profiles and name not in shared:
        return None
    options, keys = profiles.get(name or "default", {}), shared.get(name or "default", {})
    is_plain = _PLAIN_OPTIONS.issuperset(options) and {_KEY, _SECRET, _TOKEN}.issuperset(keys)
    values = {**options, **keys}
    # An empty value is not for every option as if there were none, and a nested one is
    # read as a mapping.
    texts = {option: text for option, text in values.items() if text and isinstance(text, str)}
    return texts if is_plain and len(texts) == len(values) else None


def _read(path: str) -> Mapping[str, Mapping[str, object]]:
    """The sections of a file as botocore reads them; none if there is no file.

    Raises:
        BotoCoreError: it is damaged.
    """
    try:
        sections: Mapping[str, Mapping[str, object]] = raw_config_parse(path)
    except ConfigNotFound:
        return {}
    return sections


def account_of_botocore(settings: S3Settings) -> S3Account:
    """The account by whatever botocore knows.

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
    plain = plain_account(settings, os.environ)
    if plain is not None:
        return plain.endpoint_url or ""
    with _session(settings) as session:
        return _configured_endpoint(session) or ""


@contextmanager
def _session(settings: S3Settings) -> "Iterator[Session]":
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
