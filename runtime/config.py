"""Settings of a process: a TOML file, then flags, validated once into a frozen value.

An unknown key is an error that names the nearest known key: a misspelt limit must not
be ignored in silence. Sizes ("64MiB"), durations ("15m") and rates ("5MiB/s") may have
a unit; a bare number is in bytes, seconds or bytes per second. A switch is `true` or
`false`, never "yes" or 1: some switches let data be written.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails

from runtime.documents import parse_toml
from runtime.errors import ConfigError
from runtime.roles import RoleTable, parse_identity
from runtime.setting_values import (
    check_address,
    check_count,
    check_switch,
    parse_duration,
    parse_rate,
    parse_size,
)
from runtime.settings_files import read_settings_file
from runtime.tls_files import Tls

# The largest clusters have thousands of datanodes.
_ROLES_MAX = 50_000
_FINGERPRINT = re.compile(r"[0-9a-fA-F]{64}")


def _check_path(value: object) -> object:
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise ValueError(
            f"expected a path, found {value!r}" if value else "expected a path, found an empty text"
        )
    return value


Size: TypeAlias = Annotated[int, BeforeValidator(parse_size)]
Duration: TypeAlias = Annotated[float, BeforeValidator(parse_duration)]
Rate: TypeAlias = Annotated[int, BeforeValidator(parse_rate)]
Count: TypeAlias = Annotated[int, BeforeValidator(check_count)]
Switch: TypeAlias = Annotated[bool, BeforeValidator(check_switch)]
Address: TypeAlias = Annotated[str, AfterValidator(check_address)]
FilePath: TypeAlias = Annotated[Path, BeforeValidator(_check_path)]


class Settings(BaseModel):
    """The base class of every table of a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TlsSettings(Settings):
    """PEM files of mutual TLS: our certificate and key, and the authority that signs
    our peers' certificates.
    """

    cert: FilePath
    key: FilePath
    ca: FilePath

    def files(self, roles: "RoleSettings") -> Tls:
        """The files, with the identities of certificates that bear none."""
        return Tls(self.cert, self.key, self.ca, roles.table)


class RoleSettings(Settings):
    """Identities, as ROLE/NAME, of certificates that bear none: by the SHA-256
    fingerprint of the certificate, or by the common name of its subject.
    """

    fingerprints: Mapping[str, str] = Field(default={}, max_length=_ROLES_MAX)
    common_names: Mapping[str, str] = Field(default={}, max_length=_ROLES_MAX)

    @field_validator("fingerprints")
    @classmethod
    def _are_fingerprints(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        # As openssl prints them, or without colons.
        found = {key.replace(":", "").lower(): identity for key, identity in value.items()}
        for key in value:
            if not _FINGERPRINT.fullmatch(key.replace(":", "")):
                raise ValueError(f"expected the 64 hexadecimal digits of SHA-256, found {key!r}")
        if len(found) != len(value):
            raise ValueError("one certificate is listed twice")
        return found

    @field_validator("fingerprints", "common_names")
    @classmethod
    def _have_identities(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for key, identity in value.items():
            try:
                parse_identity(identity)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            if not key:
                raise ValueError("expected a name, found an empty text")
        return value

    @property
    def table(self) -> RoleTable:
        """The identities, for decisions."""
        return RoleTable(
            {key: parse_identity(text) for key, text in self.fingerprints.items()},
            {key: parse_identity(text) for key, text in self.common_names.items()},
        )

    def check_use(self, tls: TlsSettings | None) -> None:
        """Refuse roles that could not be enforced.

        Raises:
            ValueError: there are roles, and no TLS.
        """
        if tls is None and self != type(self)():
            raise ValueError("roles: without [tls] no caller has a certificate")


SettingsT = TypeVar("SettingsT", bound=Settings)


def load(
    path: Path | None, model: type[SettingsT], overrides: Mapping[str, object] | None = None
) -> SettingsT:
    """The settings in the file `path`, changed by `overrides`.

    The keys of `overrides` are dotted; a value of None stands for a flag that was not
    given.

    Raises:
        ConfigError: the file is unreadable or not TOML, or has unknown keys or invalid
            values; the message has the file and each key.
    """
    values = _read(path) if path else {}
    for key, value in (overrides or {}).items():
        if value is not None:
            _override(values, key.split("."), value, path)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [_describe(detail, model) for detail in _drop_consequences(error.errors())]
        origin = f"{path}: " if path else ""
        raise ConfigError(
            origin + "; ".join(problems), path=str(path or ""), problems=tuple(problems)
        ) from error


def _read(path: Path) -> dict[str, object]:
    raw = read_settings_file(path)
    try:
        return parse_toml(raw)
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}", path=str(path)) from error


def _override(values: dict[str, object], keys: list[str], value: object, path: Path | None) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        table = values.setdefault(key, {})
        if not isinstance(table, dict):
            name = ".".join(keys[:depth])
            raise ConfigError(
                f"{path}: {name}: expected a table, found {table!r}", path=str(path or "")
            )
        values = table
    values[keys[-1]] = value


def _drop_consequences(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """The problems without those that follow from others: a list is "too short" if its
    items are invalid.
    """
    locations = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(
            len(loc) > len(detail["loc"]) and loc[: len(detail["loc"])] == detail["loc"]
            for loc in locations
        )
    ]


def _describe(detail: ErrorDetails, model: type[Settings]) -> str:
    """One sentence about a problem, with the key as written in the file."""
    name = ""
    for part in detail["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(
            str(detail["loc"][-1]), _known_keys(model, detail["loc"][:-1]), n=1
        )
        return f"{name}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    if detail["type"] == "missing":
        return f"{name}: is required"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _known_keys(model: type[Settings], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at `loc`; none if its model is not a Settings."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = _nested_model(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _nested_model(annotation: object) -> type[Settings] | None:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    inner = (_nested_model(argument) for argument in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found), None)
