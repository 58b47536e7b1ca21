"""The commands of treefold that run until they are stopped, found by their options, and
where what belongs to each lies.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from admin.cli import treefold
from dnagent.config import AgentConfig
from dnagent.metrics import AGENT_METRICS
from replicator.master.config import MasterConfig
from replicator.master.metrics import MASTER_METRICS
from replicator.metrics import VERIFIER_METRICS
from replicator.syncer.config import SyncerConfig
from replicator.syncer.metrics import SYNCER_METRICS
from replicator.verifier.config import VerifierConfig
from runtime.config import Settings
from runtime.metrics import Metric
from runtime.roles import Role
from scm.config import ControllerConfig
from scm.metrics import CONTROLLER_METRICS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
EXECUTABLE = "/usr/bin/treefold"


@dataclass(frozen=True)
class LongRunning:
    """What a long-running command is made of."""

    settings: type[Settings]
    metrics: Sequence[Metric]
    # What its certificate says.
    role: Role
    # How its lines in `treefold status` begin.
    status: str


# By command; a test compares it with the commands that there are.
LONG_RUNNING: Mapping[str, LongRunning] = {
    "agent run": LongRunning(AgentConfig, AGENT_METRICS, Role.DATANODE, "agents:"),
    "syncer run": LongRunning(SyncerConfig, SYNCER_METRICS, Role.SYNCER, "syncers:"),
    "replication-master run": LongRunning(
        MasterConfig, MASTER_METRICS, Role.REPLICATION_MASTER, "replication master"
    ),
    "scm run": LongRunning(ControllerConfig, CONTROLLER_METRICS, Role.CONTROLLER, "controller:"),
    "verifier run": LongRunning(VerifierConfig, VERIFIER_METRICS, Role.VERIFIER, "verifier"),
}


def contexts(
    command: click.Command = treefold, context: click.Context | None = None
) -> Iterator[click.Context]:
    """The context of every command and group, from the top."""
    context = context or click.Context(treefold, info_name="treefold")
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from contexts(below, click.Context(below, info_name=name, parent=context))


def commands_that_run_on() -> set[str]:
    """Every command that says where it listens."""
    return {
        context.command_path.removeprefix("treefold ")
        for context in contexts()
        if any(parameter.name == "port_file" for parameter in context.command.params)
    }


def services() -> list[Path]:
    """All units of services."""
    return sorted((DEPLOY / "systemd").glob("*.service"))


def command_line(unit: Path) -> list[str]:
    """What a unit runs, without the executable."""
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    executable, *words = shlex.split(line)
    assert executable == EXECUTABLE
    return words


def unit_of(command: str) -> Path:
    """The one unit that runs this command."""
    words = command.split()
    (unit,) = [unit for unit in services() if command_line(unit)[: len(words)] == words]
    return unit


def example_of(command: str) -> Path:
    """The example of the configuration that the command's unit names."""
    words = command_line(unit_of(command))
    named = Path(words[words.index("--config") + 1])
    assert named.parent == Path("/etc/treefold")
    return DEPLOY / "examples" / named.name
