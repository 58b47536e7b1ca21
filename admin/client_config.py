"""Settings of commands that call a controller, a replication master, a verifier or an
Ozone cluster: where they are, and the files of mutual TLS. Options win over them.

They lie in the file that $TREEFOLD_CONFIG names, else in treefold/client.toml below
$XDG_CONFIG_HOME, which is ~/.config unless it is set.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from runtime.config import Address, RoleSettings, Settings, Switch, TlsSettings, load

CONTROLLER_DEFAULT = "127.0.0.1:9896"
MASTER_DEFAULT = "127.0.0.1:9895"


class ClientConfig(Settings):
    """All settings of client.toml."""

    controller: Address = CONTROLLER_DEFAULT
    # Those of one database; one of them has to answer.
    replication_masters: Annotated[tuple[Address, ...], Field(min_length=1, max_length=16)] = (
        MASTER_DEFAULT,
    )
    # Paths in it are relative to the file's folder.
    tls: TlsSettings | None = None
    # Identities of the processes whose certificates name none.
    roles: RoleSettings = RoleSettings()
    # SCMs of Ozone clusters by a name for --cluster; host:port each, tried in order.
    clusters: Mapping[str, tuple[Address, ...]] = {}
    # Allow connections without TLS beyond loopback.
    insecure: Switch = False


def client_config(environment: Mapping[str, str]) -> ClientConfig:
    """The settings for a process with these variables; the defaults if no file is named
    and there is none at the usual place.

    Raises:
        ConfigError: the file is unreadable or not TOML, or has unknown keys or invalid
            values.
    """
    named = environment.get("TREEFOLD_CONFIG")
    path = Path(named).expanduser() if named else _usual_path(environment)
    if path is None or (not named and _is_missing(path)):
        return ClientConfig()
    config = load(path, ClientConfig)
    if config.tls is None:
        return config
    folder = path.absolute().parent
    files = {
        name: folder / file.expanduser()
        for name, file in (
            ("cert", config.tls.cert),
            ("key", config.tls.key),
            ("ca", config.tls.ca),
        )
    }
    return config.model_copy(update={"tls": config.tls.model_copy(update=files)})


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:
        # In a folder of someone else, as under `sudo -u`: it is named when it is read.
        return False


def _usual_path(environment: Mapping[str, str]) -> Path | None:
    """None for a user who has no home."""
    if base := environment.get("XDG_CONFIG_HOME"):
        return Path(base) / "treefold" / "client.toml"
    home = environment.get("HOME")
    return Path(home) / ".config" / "treefold" / "client.toml" if home else None
