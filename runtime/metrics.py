"""Counters and gauges of a process, all in one table, and the page where Prometheus
reads them.

A name that is not in the table cannot be counted: dashboards and alerts are made from
the table. Each process has its own registry, so that what a stopped part had registered
goes with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server

from runtime.errors import ConfigError


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class _Metric:
    """One row: counters end in `_total`, units are spelled, label sets are small."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.endswith("_total") == (self.kind is Kind.COUNTER)


_TABLE = (
    _Metric("dnagent_scan_bytes_total", Kind.COUNTER, "Bytes read by scans.", ("volume",)),
    _Metric(
        "dnagent_containers_scanned_total",
        Kind.COUNTER,
        "Scans that ended with a result.",
        ("volume",),
    ),
    _Metric(
        "dnagent_scans_skipped_total",
        Kind.COUNTER,
        "Scans not done or not kept, by reason.",
        ("reason",),
    ),
    _Metric("dnagent_findings_total", Kind.COUNTER, "Faults found by scans, by type.", ("type",)),
    _Metric(
        "dnagent_containers_marked_unhealthy_total",
        Kind.COUNTER,
        "Replicas that a scan moved to UNHEALTHY.",
    ),
    _Metric(
        "dnagent_trees_built_total",
        Kind.COUNTER,
        "Trees built from records because there was none.",
    ),
    _Metric(
        "dnagent_scan_last_full_pass_timestamp_seconds",
        Kind.GAUGE,
        "When all were last scanned.",
        ("volume",),
    ),
    _Metric(
        "dnagent_volumes_failed", Kind.GAUGE, "Volumes that could not be opened or were given up."
    ),
    _Metric("dnagent_containers", Kind.GAUGE, "Replicas held.", ("volume",)),
    _Metric(
        "dnagent_chunks_repaired_total", Kind.COUNTER, "Chunks repaired, by outcome.", ("outcome",)
    ),
    _Metric("dnagent_windows_written_total", Kind.COUNTER, "Windows written by repairs."),
    _Metric(
        "dnagent_repair_fetched_bytes_total", Kind.COUNTER, "Bytes fetched from peers by repairs."
    ),
    _Metric(
        "dnagent_reconciliations_total",
        Kind.COUNTER,
        "Reconciliations that ended, by state.",
        ("state",),
    ),
    _Metric("dnagent_reconciliations_queued", Kind.GAUGE, "Reconciliations that wait or run."),
    _Metric(
        "dnagent_peer_refusals_total",
        Kind.COUNTER,
        "Answers of peers set aside, by reason.",
        ("reason",),
    ),
    _Metric("dnagent_undo_bytes", Kind.GAUGE, "Bytes kept to undo repairs.", ("volume",)),
    _Metric("dnagent_heartbeats_total", Kind.COUNTER, "Heartbeats, by outcome.", ("outcome",)),
    _Metric(
        "dnagent_commands_total",
        Kind.COUNTER,
        "Commands from the controller, by outcome.",
        ("outcome",),
    ),
    _Metric(
        "dnagent_exports_total",
        Kind.COUNTER,
        "Scheduled exports of the chunk table, by outcome.",
        ("outcome",),
    ),
    _Metric(
        "dnagent_exported_rows_total",
        Kind.COUNTER,
        "Rows of the chunk table written by scheduled exports.",
    ),
    _Metric("dnagent_export_table_rows", Kind.GAUGE, "Rows of the chunk table as last exported."),
    _Metric(
        "dnagent_export_last_success_timestamp_seconds",
        Kind.GAUGE,
        "When the chunk table was last exported.",
    ),
    _Metric("scm_heartbeats_total", Kind.COUNTER, "Heartbeats received."),
    _Metric("scm_datanodes_live", Kind.GAUGE, "Datanodes heard of recently."),
    _Metric("scm_containers", Kind.GAUGE, "Containers known."),
    _Metric(
        "scm_containers_diverged", Kind.GAUGE, "Containers whose replicas have different roots."
    ),
    _Metric("scm_containers_unknown", Kind.GAUGE, "Containers of which some replica has no root."),
    _Metric("scm_jobs_running", Kind.GAUGE, "Jobs under way."),
    _Metric("scm_jobs_finished_total", Kind.COUNTER, "Jobs that ended, by state.", ("state",)),
    _Metric("sweep_finished_timestamp_seconds", Kind.GAUGE, "When the last sweep was complete."),
    _Metric("sweep_duration_seconds", Kind.GAUGE, "How long the last sweep took."),
    _Metric("sweep_rows", Kind.GAUGE, "Rows that the last sweep read."),
    _Metric("sweep_replicas", Kind.GAUGE, "Replicas that the last sweep saw."),
    _Metric("sweep_inputs_skipped", Kind.GAUGE, "Inputs that the last sweep could not read."),
    _Metric(
        "sweep_containers", Kind.GAUGE, "Containers of the last sweep, by verdict.", ("verdict",)
    ),
    _Metric("sweep_findings", Kind.GAUGE, "Findings of the last sweep, by kind.", ("kind",)),
)

METRICS: Mapping[str, _Metric] = MappingProxyType({metric.name: metric for metric in _TABLE})
assert len(METRICS) == len(_TABLE)


class Metrics:
    """The metrics of one process. Thread-safe."""

    def __init__(self, prefix: str) -> None:
        """`prefix` chooses the rows of this process ("dnagent")."""
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for metric in METRICS.values():
            if not metric.name.startswith(prefix + "_"):
                continue
            if metric.kind is Kind.COUNTER:
                self._counters[metric.name] = Counter(
                    metric.name, metric.help, metric.labels, registry=self.registry
                )
            else:
                self._gauges[metric.name] = Gauge(
                    metric.name, metric.help, metric.labels, registry=self.registry
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def value(self, name: str, **labels: str) -> float:
        """What stands there now; 0 where nothing was counted yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class MetricsServer:
    """Serves the page over HTTP until closed."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        """Start to serve; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            self._server, self._thread = start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics address {host}:{port} cannot be bound: {error.strerror}"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
