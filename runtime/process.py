"""A long-running process: its common options, its signals, its address file."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from merkle.errors import ReconcileError
from runtime.config import Settings
from runtime.errors import DiskError
from runtime.log import LogFormat, LogLevel, error_fields, get_logger
from runtime.roles import Identity, Role
from runtime.service_manager import ServiceManager
from runtime.stop_signals import StopSignals
from runtime.thread_health import STEP_S_MAX, ThreadHealth
from runtime.tls_files import Tls, read_files

# Without a watchdog: how often threads are looked at.
_LOOK_EVERY_S = 60.0
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
            "--check-config",
            is_flag=True,
            help="Check settings and certificates, print the settings as JSON and exit.",
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


def check_tls(tls: Tls | None, own: Role | Identity, *, by_peers: bool) -> None:
    """Check, before anything is opened, that the files of TLS fit together and that the
    certificate is `own`; `by_peers`, as for --check-config, also that others would
    believe it now. None is without TLS.

    Raises:
        ConfigError: the message has the file and what is wrong with it.
    """
    if tls is None:
        return
    # Imported here: without TLS nobody needs it.
    from runtime.certificates import check_own_role, check_pair, check_usable

    found = read_files(tls)
    if by_peers:
        check_usable(found)
    else:
        check_pair(found)
    check_own_role(found, own)


def print_settings(settings: Settings) -> None:
    """Print the settings in effect as one JSON document on stdout."""
    click.echo(json.dumps(settings.model_dump(mode="json"), indent=2))


def run_until_stopped(
    stop: StopSignals,
    manager: ServiceManager,
    thread_health: ThreadHealth,
    *,
    status: str,
    on_reload: Callable[[], None] = lambda: None,
) -> None:
    """Tell the service manager that the process is ready, and how it is until `stop`.

    The watchdog is kept from here, the main thread, and only while every watched thread
    lives and gets on: a timer would keep a process alive that does nothing else. A
    thread that is lost is logged, with and without a watchdog. `on_reload` is called
    for each SIGHUP; the process goes on with what it had if that fails.
    """
    manager.ready(status)
    step_s_max = manager.watchdog_s or STEP_S_MAX
    look_every_s = manager.watchdog_s / 2 if manager.watchdog_s else _LOOK_EVERY_S
    known_fault = ""
    while not stop.wait(look_every_s):
        if stop.take_reload():
            try:
                on_reload()
            except ReconcileError as error:
                get_logger("process").error("reload_refused", **error_fields(error))
        fault = thread_health.fault(time.monotonic(), step_s_max)
        if bool(fault) != bool(known_fault):
            if fault:
                get_logger("process").error("thread_lost", reason=fault)
            manager.status(fault or status)
        if not fault:
            manager.keep_alive()
        known_fault = fault
    manager.stopping()


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
