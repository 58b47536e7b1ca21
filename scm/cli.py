"""`treefold scm run`: the controller as a process."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType

import click

from merkle.errors import DiskError
from runtime.config import load
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
    stop = threading.Event()

    def stop_soon(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_soon)
    server = ControllerServer(config)
    try:
        if port_file:
            _announce(port_file, server.address)
        stop.wait()
        get_logger("scm").info("process_stopping")
    finally:
        server.stop()


def _announce(path: Path, address: str) -> None:
    """Whole or not at all: whoever waits for the file must not read half an address."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(address + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}", path=str(path)) from error
