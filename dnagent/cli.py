"""The commands of `treefold agent`: the agent process, exports and imports."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnagent.agent import Agent
from dnagent.config import EXTRA_HINT, AgentConfig
from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from ozone.site import check_unsecured, read_site
from ozone.volume import Hold, read_version
from runtime.config import load
from runtime.disk import Disk
from runtime.errors import ConfigError, UsageError
from runtime.exit_codes import ExitCode
from runtime.log import LogFormat, LogLevel, configure, get_logger
from runtime.output import print_json
from runtime.process import (
    announce,
    check_tls,
    config_option,
    print_settings,
    process_options,
    run_until_stopped,
)
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.roles import Identity, Role
from runtime.service_manager import ServiceManager
from runtime.setting_values import split_address
from runtime.stop_signals import StopSignals
from runtime.tls_files import read_files

if TYPE_CHECKING:
    from dnagent.export import ExportProgress, ExportResult

# Addresses to listen on that are no host's own.
_ALL_INTERFACES = frozenset({"0.0.0.0", "::"})


@click.group()
def agent() -> None:
    """The agent of one datanode scans, serves, reports and repairs its replicas."""


@agent.command("run")
@config_option
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="PATH",
    help="A volume; replaces those of the file; repeatable.",
)
@click.option(
    "--hold",
    type=click.Choice(["read-only", "owner"]),
    default="read-only",
    show_default=True,
    help="The hold of every --volume: owner repairs, and needs the datanode stopped.",
)
@click.option(
    "--state-folder",
    metavar="PATH",
    help="The folder for trees, scan times and undo copies; outside all volumes.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="The address to listen on; port 0 takes a free port.",
)
@click.option(
    "--controller",
    metavar="HOST:PORT",
    help="The controller that gets the reports and sends commands.",
)
@process_options
def run(
    config_path: Path | None,
    volumes: tuple[str, ...],
    hold: str,
    state_folder: str | None,
    listen: str | None,
    controller: str | None,
    port_file: Path | None,
    check_config: bool,
    log_format: str,
    log_level: str,
) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Volumes and a state folder must be set, in the file or by flags. Repair is off
    unless the file has enabled = true in [repair]; while it is off, every volume is
    opened read-only and nothing in it changes. docs/formats.md lists every key of
    the file. At SIGHUP the limits scan.bytes_per_second,
    scan.on_demand_bytes_per_second, serve.bytes_per_second,
    repair.bytes_per_second and repair.reconciliations_max are read again. One
    agent at a time may use a state folder: a second one ends with exit status 8.
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {
        "volumes": [{"path": path, "hold": hold} for path in volumes] or None,
        "state_folder": state_folder,
        "listen": listen,
        "controller": controller,
    }
    config = _load(config_path, overrides)
    check_tls(config.rpc_tls, _own_identity(config), by_peers=check_config)
    if check_config:
        _check_reach(config)
        print_settings(config)
        return
    with StopSignals(reloads=True) as stop:
        running = Agent(config, config_file=config_path)
        running.start()
        log = get_logger("agent")
        try:
            if port_file:
                announce(port_file, running.address)
            status = f"agent of datanode {running.datanode_id} is ready on {running.address}"
            click.echo(status, err=True)
            manager = ServiceManager(os.environ, os.getpid())
            run_until_stopped(
                stop,
                manager,
                running.thread_health,
                status=status,
                on_reload=lambda: running.reload(load(config_path, AgentConfig, overrides)),
            )
            log.info("process_stopping")
        finally:
            running.stop()
    log.info("process_stopped")


@agent.command("export-checksums")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The agent's settings, a TOML file.",
)
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="PATH",
    help="A volume; replaces the file; repeatable.",
)
@click.option(
    "--to",
    metavar="DEST",
    help="A folder, or a URI such as s3://bucket/prefix; default: that of the file.",
)
@click.option(
    "--source",
    type=click.Choice([source.value for source in TreeSource]),
    help=(
        "The source of checksums: stored trees, with records where a tree is missing (the"
        " default); records only; or all data, read now."
    ),
)
@click.option("--full", is_flag=True, help="Write every row again, not only changes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def export_checksums(
    ctx: click.Context,
    config_path: Path | None,
    volumes: tuple[str, ...],
    to: str | None,
    source: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Export the checksums of all chunks as Parquet.

    The resulting table is the input of `treefold sweep`.

    Volumes are only read, so their datanode or an agent may be running. Each datanode's
    table is a folder in DEST, named by its UUID. The table describes only the given
    volumes, so give all volumes of a datanode. Only changes since the last export are
    written; the manifest is written last and commits them. Credentials for S3 come from
    the environment, as with other tools.

    Exit status: 0 exported, 3 exported with findings, 5 a volume could not be opened
    and is left out.
    """
    if bool(config_path) == bool(volumes):
        raise UsageError("give either --config or --volume")
    config = _load(config_path) if config_path else None
    to = to or (config.export.to if config else None)
    if not to:
        raise UsageError("--to is missing: it sets the destination of the table")
    try:
        from dnagent.export_command import ExportedVolume, export_volumes
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{str(error.name).partition('.')[0]} is not installed", hint=EXTRA_HINT
        ) from error
    default = config.export.source if config else TreeSource.TREE
    chosen = TreeSource(source) if source else default
    if config:
        # Not created here: without the folder no agent ever ran.
        state = config.state_folder if config.state_folder.is_dir() else None
        given = [
            ExportedVolume(v.path, state, owned=config.hold_of(v) is Hold.OWNER)
            for v in config.volumes
        ]
    else:
        given = [ExportedVolume(Path(path)) for path in volumes]
    with progress_sink(_style(ctx)) as sink:
        done, skipped = export_volumes(
            given,
            to,
            source=chosen,
            full=full,
            audit_file=config.audit_path if config else None,
            database_volumes=config.database_volumes if config else (),
            on_done=_export_progress(sink),
        )
    for volume in skipped:
        click.echo(f"error [{volume.error_code}]: {volume.path}: {volume.message}", err=True)
    for name in (name for one in done for name in one.lost_volumes):
        text = f"warning: the volume {name} was not given and is no longer in the table"
        click.echo(text, err=True)
    if as_json:
        tables = [_table_json(one) for one in done]
        print_json({"tables": tables, "skipped": [asdict(volume) for volume in skipped]})
    else:
        for one in done:
            click.echo(_summary(one))
    ctx.exit(
        ExitCode.PARTLY if skipped else ExitCode.FINDINGS if any(one.faults for one in done) else 0
    )


@agent.command("import-trees")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="The agent's settings, a TOML file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def import_trees_command(
    ctx: click.Context, folder: Path, config_path: Path, as_json: bool
) -> None:
    """Store the trees that a sweep wrote for this datanode.

    DIR is the folder OUT/trees/sweep_id=ID, written by `treefold sweep run --out OUT
    --write-trees`. Stop the agent first. A tree is stored if the replica has none, or
    an older one: newer trees stay, and no deletion is lost. A tree must be valid, and
    match the replica's state, commit and recorded checksums. Refusals are counted by
    reason. Trees of read-only volumes are stored in the agent's state folder.

    Exit status: 0 all trees stored, 5 some trees or volumes refused, 8 an agent uses
    the state folder.
    """
    config = _load(config_path)
    try:
        from dnagent.imports import import_trees
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{str(error.name).partition('.')[0]} is not installed", hint=EXTRA_HINT
        ) from error
    with progress_sink(_style(ctx)) as sink:
        sink.begin("importing", None, "trees")
        done = import_trees(config, folder, Disk(), on_tree=lambda _: sink.advance(1))
    for volume in done.skipped:
        click.echo(f"error [{volume.error_code}]: {volume.path}: {volume.message}", err=True)
    refused = dict(sorted(done.refused.items()))
    if as_json:
        refusals = [
            {"containerID": container_id, "reason": reason}
            for container_id, reason in done.refusals
        ]
        print_json(
            {
                "imported": done.imported,
                "unchanged": done.unchanged,
                "refused": refused,
                "refusals": refusals,
                "skipped": [asdict(volume) for volume in done.skipped],
            }
        )
    else:
        click.echo(
            f"{done.imported} trees imported, {done.unchanged} already stored,"
            f" {done.refused.total()} refused"
        )
        for reason, count in refused.items():
            click.echo(f"  {reason}: {count}")
    ctx.exit(ExitCode.PARTLY if done.refused or done.skipped else 0)


def _load(path: Path | None, overrides: Mapping[str, object] | None = None) -> AgentConfig:
    """The settings of an agent.

    Raises:
        ConfigError: see runtime.config.load; or Ozone's settings cannot be read.
        SecuredClusterError: the cluster is secured.
    """
    config = load(path, AgentConfig, overrides)
    if config.ozone_conf:
        check_unsecured(read_site(config.ozone_conf))
    return config


def _own_identity(config: AgentConfig) -> Identity | Role:
    """What our certificate must say: that of the datanode of the first volume that can
    be read; that of any if none can, which is an error when they are opened.
    """
    for volume in config.volumes:
        try:
            return Identity(Role.DATANODE, read_version(volume.path, Disk()).datanode_id)
        except ReconcileError:
            continue
    return Role.DATANODE


def _check_reach(config: AgentConfig) -> None:
    """Check that peers would believe us by our address, and TLS with the controller. An
    agent starts without: either may be put right while it runs.

    Raises:
        ConfigError: they would not, or a connection fails by TLS.
        ServerRoleError: who answers as the controller is none.
    """
    # Imported here: only a check needs them.
    from runtime.certificates import check_name
    from runtime.server_proof import ServerUnprovenError, prove_server
    from runtime.tls_faults import connection_fault

    tls = config.rpc_tls
    host, _ = split_address(config.advertised or config.listen)
    if tls and host not in _ALL_INTERFACES:
        check_name(read_files(tls), host)
    if config.controller and (fault := connection_fault(config.controller, tls)):
        raise ConfigError(
            f"controller: there is no connection with {config.controller}: {fault}",
            hint="Both sides need cert, key and ca of one cluster in [tls].",
        )
    if config.controller and tls:
        # One that is down is no fault of ours.
        with suppress(ServerUnprovenError):
            prove_server(config.controller, Role.CONTROLLER, read_files(tls))


def _style(ctx: click.Context) -> ProgressStyle:
    return ctx.find_object(ProgressStyle) or ProgressStyle()


def _export_progress(sink: ProgressSink) -> "Callable[[ExportProgress], None]":
    """A callback that shows the progress of exports, one after the other."""
    total, done = 0, 0

    def advance(progress: "ExportProgress") -> None:
        nonlocal total, done
        if progress.containers_total != total or progress.containers < done:
            total, done = progress.containers_total, 0
            sink.begin("exporting", total, "containers")
        sink.advance(progress.containers - done)
        done = progress.containers

    return advance


def _table_json(exported: "ExportResult") -> dict[str, object]:
    manifest = exported.manifest
    return {
        "datanode": manifest.datanode,
        "location": exported.location,
        "manifest": manifest.name,
        "sequence": manifest.sequence,
        "source": manifest.source.value,
        "containers": manifest.containers,
        "rows": manifest.rows,
        "containersWritten": exported.containers_written,
        "rowsWritten": exported.rows_written,
        "bytesWritten": exported.bytes_written,
        "events": exported.events,
        "findings": exported.faults,
        "lostVolumes": list(exported.lost_volumes),
    }


def _summary(exported: "ExportResult") -> str:
    manifest = exported.manifest
    return (
        f"{manifest.datanode}: {manifest.containers} containers, {manifest.rows} rows;"
        f" {exported.containers_written} changed, {exported.rows_written} rows and"
        f" {exported.bytes_written} bytes written, {exported.events} events, {exported.faults}"
        f" findings; {exported.location}/{manifest.name}"
    )
