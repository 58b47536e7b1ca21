"""A long-running process: its common options, how it ends, where it says it listens."""

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
    """Add --config, which arrives as `config_path`."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help="Settings, a TOML file; flags win.",
    )(command)


def process_options(command: CommandT) -> CommandT:
    """Add --port-file, --check-config, --log-format and --log-level."""
    options = (
        click.option(
            "--port-file",
            type=click.Path(path_type=Path),
            help="Write the address into this file once it listens.",
        ),
        click.option(
            "--check-config", is_flag=True, help="Print the settings in effect as JSON, and end."
        ),
        click.option(
            "--log-format",
            type=click.Choice([f.value for f in LogFormat]),
            default=LogFormat.CONSOLE.value,
            show_default=True,
            help="How log lines on stderr look.",
        ),
        click.option(
            "--log-level",
            type=click.Choice([level.value for level in LogLevel]),
            default=LogLevel.INFO.value,
            show_default=True,
            help="The least that is logged.",
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
    """Write the address that a process listens on into a file.

    The file appears whole or not at all: another process waits for it.

    Raises:
        DiskError: it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(address + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}", path=str(path)) from error
