"""`treefold agent run`: a datanode's agent as a process."""

import json
from pathlib import Path

import click

from dnagent.agent import Agent
from dnagent.config import AgentConfig
from runtime.config import load
from runtime.lifecycle import announce, stop_on_signals
from runtime.log import LogFormat, LogLevel, configure, get_logger


@click.group()
def agent() -> None:
    """The agent of one datanode: scans, serves, reports and repairs its replicas."""


@agent.command("run")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings, a TOML file; flags win.")
@click.option(
    "--volume", "volumes", multiple=True, metavar="PATH", help="A volume, instead of those of the file; repeatable."
)
@click.option(
    "--hold",
    type=click.Choice(["read-only", "owner"]),
    default="read-only",
    show_default=True,
    help="How every --volume is held: owner writes to it, and wants its datanode stopped.",
)
@click.option("--state-folder", metavar="PATH", help="Where trees, scan times and undo copies are kept; in no volume.")
@click.option("--listen", metavar="HOST:PORT", help="Where peers and the controller find it; port 0 takes a free one.")
@click.option("--controller", metavar="HOST:PORT", help="Who gets the reports and gives the commands.")
@click.option("--port-file", type=click.Path(path_type=Path), help="Write the address into this file once it listens.")
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

    It needs volumes and a state folder, from the file or from flags, and repairs nothing unless the file says
    enabled = true in [repair]. Every key of the file is listed in docs/formats.md.
    """
    configure(LogFormat(log_format), LogLevel(log_level))
    overrides = {
        "volumes": [{"path": path, "hold": hold} for path in volumes] or None,
        "state_folder": state_folder,
        "listen": listen,
        "controller": controller,
    }
    config = load(config_path, AgentConfig, overrides)
    if check_config:
        click.echo(json.dumps(config.model_dump(mode="json"), indent=2))
        return
    stop = stop_on_signals()
    running = Agent(config)
    running.start()
    log = get_logger("agent")
    try:
        if port_file:
            announce(port_file, running.address)
        click.echo(f"agent of datanode {running.datanode_id} is ready on {running.address}", err=True)
        stop.wait()
        log.info("process_stopping")
    finally:
        running.stop()
    log.info("process_stopped")
