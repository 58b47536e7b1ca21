"""`treefold scm run`: the controller as a process."""

import json
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
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings, a TOML file; flags win.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where agents and commands find it; port 0 takes a free one.",
)
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="Where jobs are kept: one folder a controller.",
)
@click.option(
    "--automatic/--no-automatic",
    default=None,
    help="Reconcile diverged containers without being asked.",
)
@click.option(
    "--port-file",
    type=click.Path(path_type=Path),
    help="Write the address into this file once it listens.",
)
@click.option("--check-config", is_flag=True, help="Print the settings in effect as JSON, and end.")
@click.option(
    "--log-format",
    type=click.Choice([f.value for f in LogFormat]),
    default=LogFormat.CONSOLE.value,
    show_default=True,
    help="How log lines on stderr look.",
)
@click.option(
    "--log-level",
    type=click.Choice([level.value for level in LogLevel]),
    default=LogLevel.INFO.value,
    show_default=True,
    help="The least that is logged.",
)
def run(
    config_path: Path | None,
    listen: str | None,
    state_folder: Path | None,
    automatic: bool | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a controller until SIGTERM or SIGINT.

    All settings have defaults; every key of the file is listed in docs/formats.md.
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {"listen": listen, "state_folder": state_folder, "automatic.enabled": automatic}
    config = load(config_path, ControllerConfig, overrides)
    if check_config:
        click.echo(json.dumps(config.model_dump(mode="json"), indent=2))
        return
    stop = stop_on_signals()
    server = ControllerServer(config)
    try:
        if port_file:
            announce(port_file, server.address)
        stop.wait()
        get_logger("scm").info("process_stopping")
    finally:
        server.stop()
