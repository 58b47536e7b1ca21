"""Each process that runs until it is stopped has all that its operator needs: a unit,
an example configuration, alerts with something to do, a dashboard, a manual page.
"""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from admin.cluster_status import ClusterAnswer, VerifierAnswer, lines
from admin.master_status import MasterAnswer
from admin.sweep_metrics import SWEEP_METRICS
from admin.verify_metrics import VERIFY_METRICS
from runtime.config import Settings, load
from runtime.metrics import Metric
from tests.support.long_running import (
    DEPLOY,
    LONG_RUNNING,
    ROOT,
    commands_that_run_on,
    contexts,
    example_of,
    unit_of,
)
from tests.support.promql import named, tokens
from tests.tidy.test_config_tables import CLIENT, MODELS, fields
from tests.tidy.test_units import parsed
from tools.dashboard import DASHBOARD_PATH, ROWS, dashboard
from tools.man_pages import PAGES_FOLDER, pages

RULES = DEPLOY / "prometheus" / "treefold.rules.yml"
SCRAPES = DEPLOY / "prometheus" / "treefold.scrape.yml"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
RUNBOOK = OPERATIONS.split("\n## What each alert wants\n")[1]
# Labels that Prometheus adds itself, and its own metric of a page.
ADDED_LABELS = {"instance", "job"}
OWN_METRICS = {"up"}
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for table in (
        SWEEP_METRICS,
        VERIFY_METRICS,
        *(process.metrics for process in LONG_RUNNING.values()),
    )
    for metric in table
}
# A setting that an example names and does not make.
UNMADE = re.compile(r"^#(?=[\w.]+ = )", re.MULTILINE)


def alerts() -> list[dict[str, object]]:
    document = yaml.load(RULES.read_text(), Loader=yaml.CSafeLoader)
    return [rule for group in document["groups"] for rule in group["rules"]]


def text_of(alert: dict[str, object], *path: str) -> str:
    found: object = alert
    for key in path:
        assert isinstance(found, dict)
        found = found[key]
    assert isinstance(found, str)
    return found


ALERTS = {text_of(alert, "alert"): alert for alert in alerts()}


def test_every_process_that_runs_on_is_known_here() -> None:
    """A new one is added to tests/support/long_running.py; the tests below then ask for
    the rest.
    """
    assert set(LONG_RUNNING) == commands_that_run_on()
    assert {f"treefold {command}" for command in LONG_RUNNING} == set(MODELS) - {CLIENT}
    assert {MODELS[f"treefold {command}"] for command in LONG_RUNNING} == {
        process.settings for process in LONG_RUNNING.values()
    }


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_process_is_scraped_and_has_alerts(command: str) -> None:
    """An alert for its death, one for threads that fail, and one for what it is there
    for.
    """
    job = unit_of(command).stem
    jobs = [scrape["job_name"] for scrape in yaml.safe_load(SCRAPES.read_text())["scrape_configs"]]
    assert job in jobs
    own = {metric.name for metric in LONG_RUNNING[command].metrics}
    expressions = [text_of(alert, "expr") for alert in ALERTS.values()]
    assert any(f'up{{job="{job}"}} == 0' in expression for expression in expressions)
    used = {name for expression in expressions for name in named(expression).metrics} & own
    (failures,) = (name for name in own if name.endswith("_thread_failures_total"))
    assert failures in used
    assert used - {failures}


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_process_has_its_rows_in_the_documents(command: str) -> None:
    unit, example = unit_of(command), example_of(command)
    assert f"| `treefold {command}` | " in OPERATIONS
    assert f"| `{unit.name}` | `{example.name}` |" in OPERATIONS


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_process_has_a_place_in_the_status(command: str) -> None:
    """Operator rule R11: where it did not answer, that is said."""
    begins = LONG_RUNNING[command].status
    silent = ClusterAnswer(
        0.0,
        "a:1",
        None,
        "silent",
        verifiers=(VerifierAnswer("b:2", error="silent"),),
        masters=(MasterAnswer("c:3", error="silent"),),
    )
    [line] = [line for line in lines(silent) if line.startswith(begins)]
    assert "UNKNOWN" in line


EXAMPLES: Mapping[str, tuple[Path, type[Settings]]] = {
    **{name: (example_of(name), process.settings) for name, process in LONG_RUNNING.items()},
    CLIENT: (DEPLOY / "examples" / CLIENT, MODELS[CLIENT]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_names_every_key_and_no_other(name: str, tmp_path: Path) -> None:
    """Settings that it does not make are shown with their default."""
    example, model = EXAMPLES[name]
    whole = tmp_path / "whole.toml"
    whole.write_text(UNMADE.sub("", example.read_text()))
    known = {key.replace("[]", "") for key in fields(model)}
    assert set(_keys(tomllib.loads(whole.read_text()))) == known
    made, named_too = load(example, model).model_dump(), load(whole, model).model_dump()
    without_default = {
        key.replace("[]", "") for key, field in fields(model).items() if field.default is None
    }
    other = {key for key, value in _values(named_too).items() if _values(made)[key] != value}
    assert other <= without_default
    for key in other:
        assert re.search(rf"No default\.\n#?{key.split('.')[-1]} = ", example.read_text()), key


def _keys(table: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        tables = value if isinstance(value, list) else [value]
        # An empty table that has keys of its own is a value.
        if tables and all(inner and isinstance(inner, dict) for inner in tables):
            for inner in tables:
                yield from _keys(inner, f"{prefix}{key}.")
        else:
            yield prefix + key


def _values(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in table.items():
        inner = value[0] if isinstance(value, tuple) and value else value
        if isinstance(inner, dict):
            found |= _values(inner, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_metrics_and_labels_that_exist(name: str) -> None:
    found = named(text_of(ALERTS[name], "expr"))
    assert found.metrics <= METRICS.keys() | OWN_METRICS
    of_any = {
        label for metric in found.metrics & METRICS.keys() for label in METRICS[metric].labels
    }
    for label, metric in found.labels:
        allowed = METRICS[metric].labels if metric in METRICS else of_any
        assert label in {*allowed, *ADDED_LABELS}
    # In its summary too: a label that is not there is printed as nothing.
    summary = text_of(ALERTS[name], "annotations", "summary")
    assert set(re.findall(r"\$labels\.(\w+)", summary)) <= of_any | ADDED_LABELS


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_urgent_it_is_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert text_of(alert, "labels", "severity") in ("page", "ticket")
    assert text_of(alert, "annotations", "summary")
    assert text_of(alert, "annotations", "runbook") == f"docs/operations.md#{name.lower()}"
    assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[mhd]", str(alert.get("for", "0m")))


def test_the_runbook_has_a_paragraph_for_each_alert_and_no_other() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert headings == list(ALERTS)
    paragraphs = re.split(r"^### \w+$", RUNBOOK, flags=re.MULTILINE)[1:]
    assert [text for text in paragraphs if len(text.split()) < 15] == []


def test_anchors_in_the_page_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", OPERATIONS, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", OPERATIONS)) <= anchors


def inline_commands() -> list[str]:
    """Commands within a sentence, placeholders and all."""
    return sorted(set(re.findall(r"`(treefold [a-z][^`]*)`", OPERATIONS)))


@pytest.mark.parametrize("line", inline_commands())
def test_a_command_in_a_sentence_is_understood(line: str) -> None:
    # A bare name is one.
    if line in {context.command_path for context in contexts()}:
        return
    assert parsed(["12" if word == "ID" else word for word in shlex.split(line)[1:]])


def test_the_dashboard_is_fresh_and_shows_every_metric() -> None:
    assert DASHBOARD_PATH.read_text() == dashboard(), "run `make dashboard`"
    shown = {
        name
        for panel in json.loads(dashboard())["panels"]
        for target in panel.get("targets", [])
        for name in named(target["expr"].replace("$instance", "any")).metrics
    }
    assert shown == set(METRICS)
    # Beside processes: the nightly sweep and verifications.
    assert len(ROWS) == len(LONG_RUNNING) + 2


def test_no_two_panels_lie_on_each_other() -> None:
    places = set[tuple[int, int]]()
    for panel in json.loads(dashboard())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places
        assert max(x for x, _ in cells) < 24
        places |= cells


def test_every_command_has_a_fresh_manual_page() -> None:
    written = {path.name: path.read_text() for path in PAGES_FOLDER.iterdir()}
    assert written == pages(), "run `make man`"
    assert set(written) == {f"{context.command_path.replace(' ', '-')}.1" for context in contexts()}


def test_a_manual_page_names_every_option() -> None:
    for context in contexts():
        text = pages_text(f"{context.command_path.replace(' ', '-')}.1")
        for parameter in context.command.params:
            if isinstance(parameter, click.Option):
                assert all(option.replace("-", r"\-") in text for option in parameter.opts)


def pages_text(name: str) -> str:
    return (PAGES_FOLDER / name).read_text()


def test_the_manual_pages_are_set_without_a_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", *sorted(PAGES_FOLDER.iterdir())],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("treefold-agent-run.1", "--state-folder PATH\n"),
        ("treefold-agent-run.1", "[default: read-only]"),
        ("treefold-agent-run.1", "treefold-agent(1),"),
        # Lines that are kept as they are.
        ("treefold-verifier-run.1", "Exit status:\n         0  stopped by a signal\n"),
    ],
)
def test_a_manual_page_reads_as_it_is_meant(page: str, expected: str) -> None:
    """With its dashes, brackets and lines, as a terminal shows it."""
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-c", PAGES_FOLDER / page],
        capture_output=True,
        text=True,
        check=True,
    )
    # A terminal strikes twice what is bold.
    assert expected in re.sub(r".\x08", "", done.stdout)


@pytest.mark.parametrize(
    "expression",
    ["up{", "up)", "up{job='a'}", "rate up", "sum(", "1 +", "up ? 1", "rate(up[5m)]", "12"],
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        named(expression)


@given(st.lists(st.sampled_from(['up{job="a"}', "5m", "(", ")", "or", "12", ">", "rate"])))
def test_tokens_keep_every_character_but_spaces(parts: list[str]) -> None:
    text = " ".join(parts)
    balance = [part for part in parts if part in "()"]
    try:
        found = tokens(text)
    except ValueError:
        assert balance
        return
    assert "".join(token for _, token in found) == text.replace(" ", "")
