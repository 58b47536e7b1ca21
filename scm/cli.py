"""The command `treefold scm run`: the controller process."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import click

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
from scm.config import ControllerConfig
from scm.dashboard.start import read_token
from scm.server import ControllerServer


def controller_commands(cluster_option: Callable[[Callable[..., None]], object]) -> click.Group:
    """The commands of a controller. `cluster_option` adds an option whose value,
    `cluster`, returns the addresses of SCMs.
    """
    text = "The controller receives reports, compares replicas and runs jobs."
    group = click.Group("scm", help=text)
    cluster_option(_run)
    group.add_command(click.command("run")(_run))
    return group


@config_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="The address to listen on; port 0 takes a free port.",
)
@click.option(
    "--dashboard",
    metavar="HOST:PORT",
    help="The address of the page for browsers; port 0 takes a free port.",
)
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="The folder for the jobs; not shared with other controllers.",
)
@click.option(
    "--automatic/--no-automatic",
    default=None,
    help="Reconcile diverged containers without a request.",
)
@process_options
def _run(
    cluster: Callable[[], Sequence[str]] | None,
    config_path: Path | None,
    listen: str | None,
    dashboard: str | None,
    state_folder: Path | None,
    automatic: bool | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run a controller until SIGTERM or SIGINT.

    Agents report to it and repair. With --cluster, or [cluster] in the file, SCM
    reports, and Ozone's own reconciliation does the work: each container in rounds,
    within limits, until the roots of its replicas are equal. Nothing is installed on
    the cluster.

    All settings have defaults. docs/formats.md lists every key of the file. At SIGHUP
    the limits orders_per_datanode and automatic.jobs_max are read again.
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {
        "cluster.scms": cluster() if cluster else None,
        "listen": listen,
        "dashboard.listen": dashboard,
        "state_folder": state_folder,
        "automatic.enabled": automatic,
    }
    config = load(config_path, ControllerConfig, overrides)
    check_tls(config.rpc_tls, Role.CONTROLLER, by_peers=check_config)
    read_token(config.dashboard.token_file)
    if check_config:
        print_settings(config)
        return
    with StopSignals(reloads=True) as stop:
        server = ControllerServer(config, config_path)
        try:
            if port_file:
                announce(port_file, server.address)
            manager = ServiceManager(os.environ, os.getpid())
            status = f"controller is ready on {server.address}"
            run_until_stopped(
                stop,
                manager,
                server.thread_health,
                status=status,
                on_reload=lambda: server.reload(load(config_path, ControllerConfig, overrides)),
            )
            get_logger("scm").info("process_stopping")
        finally:
            server.stop()
