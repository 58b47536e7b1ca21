"""The metrics of a sweep, for the textfile collector of Prometheus' node_exporter."""

import time
from pathlib import Path

from merkle.outcome import Verdict
from runtime.disk import Disk
from runtime.metrics import Kind, Metric, Metrics
from sweep.model import NotCompared
from sweep.output import Summary

SWEEP_METRICS = (
    Metric("sweep_finished_timestamp_seconds", Kind.GAUGE, "When the last sweep was complete."),
    Metric("sweep_duration_seconds", Kind.GAUGE, "How long the last sweep took."),
    Metric("sweep_rows", Kind.GAUGE, "Rows that the last sweep read."),
    Metric("sweep_replicas", Kind.GAUGE, "Replicas that the last sweep read."),
    Metric("sweep_replicas_compared", Kind.GAUGE, "Replicas that the last sweep compared."),
    Metric("sweep_replicas_unseen", Kind.GAUGE, "Expected replicas that it did not read."),
    Metric("sweep_inputs_skipped", Kind.GAUGE, "Inputs that the last sweep could not read."),
    Metric(
        "sweep_containers", Kind.GAUGE, "Containers of the last sweep, by verdict.", ("verdict",)
    ),
    Metric("sweep_findings", Kind.GAUGE, "Findings of the last sweep, by kind.", ("kind",)),
)


def write_metrics(path: Path, summary: Summary) -> None:
    """Write the metrics of a sweep in Prometheus' text format.

    Raises:
        DiskError: the file cannot be written.
    """
    metrics = Metrics(SWEEP_METRICS)
    metrics.set("sweep_finished_timestamp_seconds", time.time())
    metrics.set("sweep_duration_seconds", summary.seconds)
    metrics.set("sweep_rows", summary.rows)
    metrics.set("sweep_replicas", summary.replicas)
    metrics.set("sweep_replicas_compared", summary.compared)
    metrics.set("sweep_replicas_unseen", summary.unseen)
    metrics.set("sweep_inputs_skipped", len(summary.skipped))
    for verdict in (*Verdict, *NotCompared):
        metrics.set(
            "sweep_containers", summary.verdicts.get(verdict.value, 0), verdict=verdict.value
        )
    for kind, count in summary.findings.items():
        metrics.set("sweep_findings", count, kind=kind)
    Disk().replace(path.absolute(), metrics.page())
