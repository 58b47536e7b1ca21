"""Ozone's settings, as its processes read them: the volumes of a datanode, and whether
its cluster is secured, which Treefold does not support yet.

In a secured cluster datanodes ask for tokens that only Ozone's own processes get, and
their ports may want certificates of SCM. Encrypted buckets have keys that we do not
have.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from ozone.errors import SecuredClusterError
from runtime.errors import ConfigError

SECURED_HINT = (
    "Treefold does not support Kerberos, tokens and encryption of Ozone yet: docs/operations.md."
)
# A site file of Ozone has some kilobytes; a larger file is something else.
_SITE_BYTES_MAX = 4 << 20
_ENABLED = "ozone.security.enabled"
# Without the first one Ozone does not look at them.
_WITH_SECURITY = (
    ("hdds.block.token.enabled", "block tokens"),
    ("hdds.container.token.enabled", "container tokens"),
    ("hdds.grpc.tls.enabled", "TLS of Ozone's ports"),
)


@dataclass(frozen=True, slots=True)
class Site:
    """The properties of an `ozone-site.xml`, as text."""

    file: Path
    properties: Mapping[str, str]


def read_site(path: Path) -> Site:
    """The properties of an `ozone-site.xml`, or of that of a folder, above those of the
    `core-site.xml` beside it, if there is one.

    Raises:
        ConfigError: the file is missing, or one of them is not a valid site file.
    """
    # Not Path.is_dir, which raises where a folder above may not be entered.
    file = path / "ozone-site.xml" if os.path.isdir(path) else path
    core = _properties(file.with_name("core-site.xml"), may_be_missing=True)
    return Site(file, {**core, **_properties(file)})


def volumes_of(site: Site) -> tuple[list[Path], list[Path]]:
    """The data volumes and the dedicated database volumes of a datanode.

    Raises:
        ConfigError: there are none, or one is not a valid URL.
    """
    try:
        data, databases = (
            _folders(site.properties.get(f"hdds.datanode.{key}", ""))
            for key in ("dir", "container.db.dir")
        )
    except ValueError as error:
        text = f"{site.file} has a folder that is not a valid URL: {error}"
        raise ConfigError(text, path=str(site.file)) from error
    if not data:
        raise ConfigError(f"{site.file} does not set hdds.datanode.dir", path=str(site.file))
    return data, databases


def check_unsecured(site: Site) -> None:
    """Check that the cluster has no security that Treefold does not support.

    Raises:
        SecuredClusterError: it has; the message names each setting.
    """
    if found := secured_settings(site.properties):
        raise SecuredClusterError(
            f"the Ozone cluster of {site.file} is secured: {'; '.join(found)}",
            hint=SECURED_HINT,
            path=str(site.file),
        )


def secured_settings(properties: Mapping[str, str]) -> list[str]:
    """Each setting by which the cluster is secured, with what that means."""
    found = []
    if _is_on(properties.get(_ENABLED, "")):
        found.append(_named(properties, _ENABLED, "Kerberos and delegation tokens"))
        found += [
            _named(properties, *one) for one in _WITH_SECURITY if _is_on(properties.get(one[0], ""))
        ]
    if properties.get("hadoop.security.authentication", "simple").lower() not in ("simple", ""):
        found.append(_named(properties, "hadoop.security.authentication", "Kerberos"))
    if properties.get("hadoop.security.key.provider.path"):
        found.append(_named(properties, "hadoop.security.key.provider.path", "encrypted buckets"))
    return found


def carries_token(encoded: str) -> bool:
    """Whether the token of a request to a datanode is one. An empty token is made of
    zeros, which base64 writes as A.
    """
    return bool(encoded.strip("A="))


def _named(properties: Mapping[str, str], key: str, meaning: str) -> str:
    return f"{key} = {properties[key]} ({meaning})"


def _is_on(value: str) -> bool:
    # A variable of Java may stand for anything.
    return value.lower() == "true" or "${" in value


def _properties(file: Path, *, may_be_missing: bool = False) -> dict[str, str]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_SITE_BYTES_MAX + 1)
    except OSError as error:
        if may_be_missing and isinstance(error, FileNotFoundError):
            return {}
        raise ConfigError(f"cannot read {file}: {error.strerror}", path=str(file)) from error
    # A site file needs no entities, and they could expand without limit.
    if len(raw) > _SITE_BYTES_MAX or b"<!DOCTYPE" in raw or b"<!ENTITY" in raw:
        raise ConfigError(
            f"{file} is not a site file: it is too large or has a document type", path=str(file)
        )
    try:
        # Parse text, not bytes: another encoding could hide a document type.
        root = ElementTree.fromstring(raw.decode())
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not XML in UTF-8: {error}", path=str(file)) from error
    return {
        (item.findtext("name") or "").strip(): (item.findtext("value") or "").strip()
        for item in root.iter("property")
    }


def _folders(value: str) -> list[Path]:
    # Each may have a storage type as prefix, such as `[SSD]`, and may be a file: URL.
    places = (place.strip().rpartition("]")[2] for place in value.split(",") if place.strip())
    return [Path(urlsplit(place).path if place.startswith("file:") else place) for place in places]
