"""The systemd units are ones that systemd takes, and run a command line that treefold
understands.
"""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from admin.cli import treefold

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted(FOLDER.iterdir())
EXECUTABLE = "/usr/bin/treefold"


@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if unit.suffix == ".service"], ids=lambda unit: unit.name
)
def test_what_a_unit_runs_is_understood_and_writes_where_it_may(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    executable, *words = shlex.split(line)
    assert executable == EXECUTABLE
    command: click.Command = treefold
    context = click.Context(treefold, info_name="treefold")
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command = found
    # All types and requirements are checked; nothing is run.
    options = command.make_context(command.name, words, parent=context).params
    (state,) = re.findall(r"^StateDirectory=(.*)$", unit.read_text(), re.MULTILINE)
    writable = [Path("/var/lib") / name for name in state.split()]
    assert [options["out"], options["metrics_file"].parent] == writable


@pytest.mark.parametrize(
    "timer", [unit for unit in UNITS if unit.suffix == ".timer"], ids=lambda unit: unit.name
)
def test_a_timer_starts_a_unit_that_is_there(timer: Path) -> None:
    assert timer.with_suffix(".service") in UNITS


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    copies = [tmp_path / unit.name for unit in UNITS]
    for unit, copy in zip(UNITS, copies, strict=True):
        # Where it is not installed, it is not the unit that is wrong.
        copy.write_text(unit.read_text().replace(EXECUTABLE, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *copies],
        capture_output=True,
        text=True,
        check=False,
    )
    told = [
        line
        for line in done.stderr.splitlines()
        if str(tmp_path) in line or any(c.name in line for c in copies)
    ]
    assert (done.returncode, told) == (0, [])
