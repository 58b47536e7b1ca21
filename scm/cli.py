"""`treefold scm run`: the controller as a process."""

from pathlib import Path

import click

from runtime.config import load
from runtime.lifecycle import announce, stop_on_signals
from runtime.log import LogFormat, LogLevel, configure, get_logger
from scm.config import ControllerConfig
from scm.server import ControllerServer


@click.group()
def scm() -> None:
    """The controller: takes reports, compares replicas, runs jobs."""


@scm.command("run")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings, TOML.")
@click.option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
@click.option("--state-folder", type=click.Path(path_type=Path), help="Where jobs are kept.")
@click.option("--automatic/--no-automatic", default=None, help="Reconcile diverged containers without being asked.")
@click.option("--port-file", type=click.Path(path_type=Path), help="Write the address there once it listens.")
@click.option("--log-format", type=click.Choice([f.value for f in LogFormat]), default=LogFormat.CONSOLE.value)
@click.option("--log-level", type=click.Choice([level.value for level in LogLevel]), default=LogLevel.INFO.value)
def run(
    config_path: Path | None,
    listen: str | None,
    state_folder: Path | None,
    automatic: bool | None,
    port_file: Path | None,
    log_format: str,
    log_level: str,
) -> None:
    """Run a controller until SIGTERM or SIGINT."""
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {"listen": listen, "state_folder": state_folder, "automatic.enabled": automatic}
    config = load(config_path, ControllerConfig, overrides)
    stop = stop_on_signals()
    server = ControllerServer(config)
    try:
        if port_file:
            announce(port_file, server.address)
        stop.wait()
        get_logger("scm").info("process_stopping")
    finally:
        server.stop()
