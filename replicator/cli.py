"""The command `treefold verifier run`: the process beside a bucket."""

import os
from pathlib import Path

import click

from replicator.verifier.config import VerifierConfig
from replicator.verifier.process import VerifierProcess
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


@click.group()
def verifier() -> None:
    """The verifier stands beside a bucket: it proves what the bucket holds, and writes
    for the syncers of another region.
    """


@verifier.command("run")
@config_option
@click.option(
    "--bucket",
    metavar="ADDRESS",
    help="The bucket: local:PATH or s3://BUCKET/PREFIX?endpoint_url=URL.",
)
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="The folder for index and secret; not shared with other verifiers.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="The address to listen on; port 0 takes a free port.",
)
@click.option(
    "--writes/--no-writes", default=None, help="Take writes of syncers; off unless it is set."
)
@process_options
def run(
    config_path: Path | None,
    bucket: str | None,
    state_folder: Path | None,
    listen: str | None,
    writes: bool | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a verifier until SIGTERM or SIGINT.

    It lists the bucket every hour, and reads every object again within 30 days at a
    limited rate, near the store. docs/formats.md lists every key of the file, also
    those of TLS. `treefold bucket sync` and `verify` reach it by --verifier.

    \b
    Exit status:
      0  stopped by a signal
      1  failed, 2 usage or settings
      7  the store does not answer, 8 another verifier uses the state folder
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {
        "bucket": bucket,
        "state_folder": state_folder,
        "listen": listen,
        "writes": writes,
    }
    config = load(config_path, VerifierConfig, overrides)
    check_tls(config.rpc_tls, Role.VERIFIER, by_peers=check_config)
    if check_config:
        print_settings(config)
        return
    with StopSignals() as stop:
        process = VerifierProcess(config)
        try:
            if port_file:
                announce(port_file, process.address)
            status = f"verifier of {config.bucket} is ready on {process.address}"
            click.echo(status, err=True)
            manager = ServiceManager(os.environ, os.getpid())
            run_until_stopped(stop, manager, process.thread_health, status=status)
            get_logger("verifier").info("process_stopping")
        finally:
            process.stop()
