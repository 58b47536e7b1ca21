"""The DAG of a nightly sweep, without Airflow: its imports are replaced."""

import ast
import shlex
import subprocess
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spark.addresses import check_master
from tests.support.long_running import DEPLOY
from tests.tidy.test_units import parsed

DAG_FILE = DEPLOY / "airflow" / "treefold_sweep.py"


@dataclass
class Operator:
    """What is given to an operator, and what comes after it."""

    given: dict[str, Any]
    downstream: "list[Operator]" = field(default_factory=list)

    def set_downstream(self, other: "Operator") -> None:
        self.downstream.append(other)


@dataclass
class Dag:
    """What is given to a DAG."""

    name: str
    given: dict[str, Any]

    def __enter__(self) -> "Dag":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def module() -> dict[str, Any]:
    """The names of the module, whose operators are ours."""
    tree = ast.parse(DAG_FILE.read_text())
    imported = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("airflow.")
    ]
    assert {name.name for node in imported for name in node.names} == {"DAG", "BashOperator"}
    tree.body = [node for node in tree.body if node not in imported]
    dags = list[Dag]()

    def dag(name: str, **given: object) -> Dag:
        dags.append(Dag(name, given))
        return dags[-1]

    names: dict[str, Any] = {"DAG": dag, "BashOperator": lambda **given: Operator(given)}
    exec(compile(tree, DAG_FILE, "exec"), names)
    (names["dag"],) = dags
    return names


def ended(tmp_path: Path, status: int) -> subprocess.CompletedProcess[str]:
    """The task's script, with a sweep that ends with this status."""
    command = tmp_path / "treefold"
    command.write_text(f"#!/bin/sh\necho found\nexit {status}\n")
    command.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", module()["sweep"].given["bash_command"]],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_what_the_dag_runs_is_understood(engine: str) -> None:
    names = module()
    assert names["SWEEP"] in names["sweep"].given["bash_command"]
    command = names["SWEEP"] if engine == "spark" else names["SWEEP"].removesuffix(names["SPARK"])
    executable, *words = shlex.split(command)
    assert executable == "treefold"
    options = parsed(words)
    assert options["engine"] == engine
    # Each try may be on another worker.
    assert not isinstance(options["out"], Path)
    if engine == "spark":
        check_master(str(options["master"]))


@pytest.mark.parametrize("status", [0, 3, 5])
def test_a_complete_sweep_is_not_tried_again(tmp_path: Path, status: int) -> None:
    done = ended(tmp_path, status)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["found", str(status)])


@pytest.mark.parametrize("status", [1, 2, 7, 8, 130])
def test_any_other_fails_its_try(tmp_path: Path, status: int) -> None:
    assert ended(tmp_path, status).returncode == status


@pytest.mark.parametrize(("status", "returned"), [(0, 0), (3, 0), (5, 1)])
def test_only_input_that_was_not_read_fails_the_second_task(status: int, returned: int) -> None:
    sweep, check = module()["sweep"], module()["all_was_read"]
    assert sweep.downstream == [check]
    template = '{{ ti.xcom_pull(task_ids="sweep") }}'
    assert template in check.given["bash_command"]
    line = check.given["bash_command"].replace(template, str(status))
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False)
    assert done.returncode == returned
    assert check.given["retries"] == 0


def test_tries_continue_a_sweep_and_two_never_run_at_once() -> None:
    names = module()
    assert names["dag"].name == DAG_FILE.stem
    assert names["dag"].given["max_active_runs"] == 1
    assert not names["dag"].given["catchup"]
    given = names["sweep"].given
    assert given["retries"] > 0
    # Longer than a killed sweep holds its bucket.
    assert given["retry_delay"] > timedelta(seconds=30)
