"""Write the dashboard for Grafana from the tables of metrics (`make dashboard`).

Each metric of each process has a panel, so that none is forgotten and none is drawn
that no process has.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from admin.sweep_metrics import SWEEP_METRICS
from admin.verify_metrics import VERIFY_METRICS
from dnagent.metrics import AGENT_METRICS
from replicator.master.metrics import MASTER_METRICS
from replicator.metrics import VERIFIER_METRICS
from replicator.syncer.metrics import SYNCER_METRICS
from runtime.metrics import Kind, Metric
from scm.metrics import CONTROLLER_METRICS

DASHBOARD_PATH = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "treefold.json"
_COLUMNS, _HEIGHT = 24, 7
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class _Panel:
    """A panel, without its place."""

    kind: str
    title: str
    expression: str
    legend: str
    unit: str = "short"
    is_bad_above_0: bool = False


# What whoever looks first wants to know.
_OVERVIEW = (
    _Panel("stat", "Datanodes that report", "sum(scm_datanodes_live)", ""),
    _Panel("stat", "Containers diverged", "sum(scm_containers_diverged)", "", is_bad_above_0=True),
    _Panel("stat", "Containers unknown", "sum(scm_containers_unknown)", "", is_bad_above_0=True),
    _Panel("stat", "Jobs running", "sum(scm_jobs_running)", ""),
    _Panel("stat", "Volumes failed", "sum(dnagent_volumes_failed)", "", is_bad_above_0=True),
    _Panel(
        "stat",
        "Unrecoverable, last sweep",
        'sum(sweep_containers{verdict="UNRECOVERABLE"})',
        "",
        is_bad_above_0=True,
    ),
    _Panel("stat", "Objects damaged", "sum(verifier_damaged_total)", "", is_bad_above_0=True),
    _Panel(
        "stat",
        "Audit files at fault",
        "sum(dnagent_audit_fault) + sum(scm_audit_fault) + sum(verifier_audit_fault)"
        " + sum(replication_master_audit_fault)",
        "",
        is_bad_above_0=True,
    ),
    _Panel(
        "stat",
        "Replications in error",
        'max(replication_master_replications{condition="ERROR"})',
        "",
        is_bad_above_0=True,
    ),
    _Panel("stat", "Longest RPO", "max(replication_master_rpo_seconds)", "", unit="s"),
    _Panel("stat", "Oldest root", "max(scm_roots_oldest_age_seconds)", "", unit="s"),
)
# Title of a row, and its metrics.
ROWS: Mapping[str, Iterable[Metric]] = {
    "Controller": CONTROLLER_METRICS,
    "Agents": AGENT_METRICS,
    "Verifiers": VERIFIER_METRICS,
    "Replication masters": MASTER_METRICS,
    "Syncers": SYNCER_METRICS,
    "Nightly sweep": SWEEP_METRICS,
    "Verified buckets": VERIFY_METRICS,
}


def dashboard() -> str:
    """The dashboard, as Grafana imports it."""
    placed: list[dict[str, object]] = []
    top = _place(placed, "Overview", _OVERVIEW, columns=8, top=0)
    for title, metrics in ROWS.items():
        panels = [_panel_of(metric) for metric in metrics]
        top = _place(placed, title, panels, columns=3, top=top)
    document = {
        "title": "Treefold",
        "uid": "treefold",
        "tags": ["treefold"],
        "schemaVersion": 39,
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "templating": {"list": [_variable_of_sources(), _variable_of_instances()]},
        "panels": placed,
    }
    return json.dumps(document, indent=1) + "\n"


def main() -> None:
    """Write the dashboard."""
    DASHBOARD_PATH.write_text(dashboard())
    sys.stderr.write(f"{DASHBOARD_PATH}\n")


def _panel_of(metric: Metric) -> _Panel:
    """How a metric is drawn: bytes as a rate, other counts by the hour, times by their
    age.
    """
    name = metric.name
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    selected = f'{name}{{instance=~"$instance"}}'
    title = metric.help.rstrip(".")
    if metric.kind is Kind.COUNTER and "bytes" in name:
        return _Panel("timeseries", title, f"rate({selected}[5m])", legend, "Bps")
    if metric.kind is Kind.COUNTER:
        return _Panel("timeseries", f"{title} By the hour.", f"increase({selected}[1h])", legend)
    if name.endswith(("timestamp_seconds", "_at_seconds")):
        # 0 is never, and no age.
        age = f"time() - ({selected} > 0)"
        return _Panel("timeseries", f"{title} Its age.", age, legend, "s")
    unit = "s" if name.endswith("_seconds") else "bytes" if "bytes" in name else "short"
    return _Panel("timeseries", title, selected, legend, unit)


def _place(
    placed: list[dict[str, object]],
    title: str,
    panels: Iterable[_Panel],
    *,
    columns: int,
    top: int,
) -> int:
    """Add a row with its panels, so many beside each other; returns where the next one
    begins.
    """
    width = _COLUMNS // columns
    bar = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
    placed.append({"id": len(placed) + 1, "type": "row", "title": title, "gridPos": bar})
    rows = 0
    for number, panel in enumerate(panels):
        rows = number // columns + 1
        place = {
            "h": _HEIGHT,
            "w": width,
            "x": number % columns * width,
            "y": top + 1 + number // columns * _HEIGHT,
        }
        placed.append({"id": len(placed) + 1, "gridPos": place, **_described(panel)})
    return top + 1 + rows * _HEIGHT


def _described(panel: _Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.is_bad_above_0:
        steps.append({"color": "red", "value": 1})
    defaults = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": "A",
                "datasource": _DATASOURCE,
                "expr": panel.expression,
                "legendFormat": panel.legend,
            }
        ],
    }


def _variable_of_sources() -> dict[str, object]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _variable_of_instances() -> dict[str, object]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": 'label_values({job=~"treefold-.*|node"}, instance)',
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    main()
