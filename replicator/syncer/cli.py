"""The command `treefold syncer run`: the process that replicates buckets."""

import os
from pathlib import Path

import click

from replicator.syncer.config import SyncerConfig
from replicator.syncer.process import SyncerProcess
from runtime.config import load
from runtime.errors import UsageError
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


@click.group()
def syncer() -> None:
    """A syncer replicates buckets, as replication masters tell it."""


@syncer.command("run")
@config_option
@click.option(
    "--master",
    "masters",
    metavar="HOST:PORT",
    multiple=True,
    help="A replication master; may be repeated for those of one database.",
)
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="The folder for UUID and queues; not shared with other syncers.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="The address for Prometheus, whose port is that of --port-file; 0 takes a free one.",
)
@process_options
def run(
    config_path: Path | None,
    masters: tuple[str, ...],
    state_folder: Path | None,
    metrics: str | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a syncer until SIGTERM or SIGINT.

    It works on what a replication master assigns to it, and stops by itself when its
    lease ends. Credentials of the stores come from its environment, as for `treefold
    bucket sync`. docs/formats.md lists every key of the file.

    \b
    Exit status:
      0  stopped by a signal
      1  failed, 2 usage or settings
      8  another syncer uses the state folder
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {"masters": masters or None, "state_folder": state_folder, "metrics": metrics}
    config = load(config_path, SyncerConfig, overrides)
    check_tls(config.rpc_tls, Role.SYNCER, by_peers=check_config)
    if port_file and not config.metrics:
        raise UsageError("--port-file needs --metrics: a syncer listens for nobody else")
    if check_config:
        print_settings(config)
        return
    with StopSignals() as stop:
        process = SyncerProcess(config)
        try:
            if port_file:
                announce(port_file, process.metrics_address)
            status = f"syncer {process.syncer_id} is ready"
            click.echo(status, err=True)
            manager = ServiceManager(os.environ, os.getpid())
            run_until_stopped(stop, manager, process.thread_health, status=status)
            get_logger("syncer").info("process_stopping")
        finally:
            process.stop()
