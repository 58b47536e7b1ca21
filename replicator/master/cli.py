"""The command `treefold replication-master run`: it tells syncers what to replicate."""

import os
from pathlib import Path

import click

from replicator.master.config import MasterConfig
from replicator.master.process import MasterProcess
from runtime.config import load
from runtime.log import LogFormat, LogLevel, configure, get_logger
from runtime.process import (
    announce,
    check_tls,
    config_option,
    print_settings,
    process_options,
    run_until_stopped,
)
from runtime.roles import Role
from runtime.service_manager import ServiceManager
from runtime.stop_signals import StopSignals


@click.group("replication-master")
def replication_master() -> None:
    """The replication master gives each replication to one syncer, by a lease."""


@replication_master.command("run")
@config_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="The address to listen on; port 0 takes a free port.",
)
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="The folder for records and audit file; not shared with other masters.",
)
@click.option(
    "--database",
    metavar="URL",
    help="postgresql://USER@HOST/NAME, which several masters share. Default: a file.",
)
@process_options
def run(
    config_path: Path | None,
    listen: str | None,
    state_folder: Path | None,
    database: str | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a replication master until SIGTERM or SIGINT.

    All settings have defaults. docs/formats.md lists every key of the file.
    `treefold bucket add` gives it replications, and syncers ask it for work.

    \b
    Exit status:
      0  stopped by a signal
      1  failed, 2 usage or settings
      8  another master uses the state folder
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {"listen": listen, "state_folder": state_folder, "database": database}
    config = load(config_path, MasterConfig, overrides)
    check_tls(config.rpc_tls, Role.REPLICATION_MASTER, by_peers=check_config)
    if check_config:
        print_settings(config)
        return
    with StopSignals() as stop:
        process = MasterProcess(config)
        try:
            if port_file:
                announce(port_file, process.address)
            status = f"replication master is ready on {process.address}"
            click.echo(status, err=True)
            manager = ServiceManager(os.environ, os.getpid())
            run_until_stopped(stop, manager, process.thread_health, status=status)
            get_logger("replication-master").info("process_stopping")
        finally:
            process.stop()
