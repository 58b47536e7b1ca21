"""A long-running process: its common options, its signals, its address file."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import click

from runtime.config import Settings
from runtime.errors import DiskError
from runtime.log import LogFormat, LogLevel

CommandT = TypeVar("CommandT", bound=Callable[..., object])


def config_option(command: CommandT) -> CommandT:
    """Add the option --config, passed to the command as `config_path`."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help="TOML file with settings; flags override it.",
    )(command)


def process_options(command: CommandT) -> CommandT:
    """Add the options --port-file, --check-config, --log-format and --log-level."""
    options = (
        click.option(
            "--port-file",
            type=click.Path(path_type=Path),
            help="Write the address to this file once the process listens.",
        ),
        click.option(
            "--check-config", is_flag=True, help="Print the settings in effect as JSON and exit."
        ),
        click.option(
            "--log-format",
            type=click.Choice([f.value for f in LogFormat]),
            default=LogFormat.CONSOLE.value,
            show_default=True,
            help="Format of the log on stderr.",
        ),
        click.option(
            "--log-level",
            type=click.Choice([level.value for level in LogLevel]),
            default=LogLevel.INFO.value,
            show_default=True,
            help="Least severe level that is logged.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def print_settings(settings: Settings) -> None:
    """Print the settings in effect as one JSON document on stdout."""
    click.echo(json.dumps(settings.model_dump(mode="json"), indent=2))


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets. Call it from the main thread."""
    stop = threading.Event()

    def stop_soon(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_soon)
    return stop


def announce(path: Path, address: str) -> None:
    """Write the address that this process listens on to a file.

    The file appears complete or not at all, since another process waits for it.

    Raises:
        DiskError: the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(address + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}", path=str(path)) from error
