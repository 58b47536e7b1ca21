"""Begin to serve the page, if the settings say so."""

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from runtime.setting_values import split_address
from runtime.tls_files import Tls
from scm.config import DashboardSettings

if TYPE_CHECKING:
    from scm.dashboard.blocks import Fetch
    from scm.dashboard.server import DashboardServer
    from scm.local_controller import LocalController

# A token that nobody guesses; `openssl rand -hex 16` makes twice as many.
_TOKEN_CHARACTERS_MIN = 16
_TOKEN_BYTES_MAX = 4096


def start_dashboard(
    settings: DashboardSettings,
    controller: "LocalController",
    fetch: "Fetch | None" = None,
    *,
    tls: Tls | None,
    insecure: bool,
) -> "DashboardServer | None":
    """The server of the page; None without an address. Trees come by `fetch`; without
    it agents are asked for them, with these files of TLS.

    Raises:
        ConfigError: the extra is not installed, the token cannot be used, or the
            address cannot be bound.
    """
    if settings.listen is None:
        return None
    token = read_token(settings.token_file)
    try:
        # Imported here: they need an extra.
        from scm.dashboard.app import Dashboard
        from scm.dashboard.blocks import BlockPictures, fetch_by
        from scm.dashboard.server import DashboardServer

        sweeps = None
        if settings.sweeps:
            from scm.dashboard.sweeps import SweepFolder

            sweeps = SweepFolder(settings.sweeps)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dashboard.listen: {error.name} is not installed",
            hint="pip install 'treefold[dashboard]', and 'treefold[sweep]' for dashboard.sweeps.",
        ) from error
    host, port = split_address(settings.listen)
    pictures = BlockPictures(fetch or fetch_by(tls, insecure=insecure))
    dashboard = Dashboard(
        controller,
        controller,
        pictures,
        token=token,
        sweeps=sweeps,
        bucket_metrics=settings.bucket_metrics,
    )
    return DashboardServer(dashboard.app, host, port)


def read_token(path: Path | None) -> str:
    """The token in a file, without white space around it; empty without a file.

    Raises:
        ConfigError: it cannot be read, or is too short to be safe.
    """
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            token = file.read(_TOKEN_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dashboard.token_file: {path} cannot be read: {error}") from error
    if len(token) < _TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"dashboard.token_file: the token in {path} has less than"
            f" {_TOKEN_CHARACTERS_MIN} characters",
            hint=f"openssl rand -hex 16 > {path}",
        )
    return token
