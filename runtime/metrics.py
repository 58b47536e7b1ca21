"""Counters and gauges of a process, and the page that Prometheus reads.

Each package lists its metrics in a table and passes it to `Metrics`; other names raise
KeyError, since dashboards and alerts rely on the table. Each `Metrics` has its own
registry, so that no value outlives its component.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server

from runtime.errors import ConfigError


class Kind(Enum):
    """A counter only grows; a gauge is set."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Counters end in `_total`, units are spelled, label sets are small."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.endswith("_total") == (self.kind is Kind.COUNTER)


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """The metrics that each long-running process has, under names of its own."""

    prefix: str

    @property
    def thread_failures(self) -> str:
        """Counted by runtime.guard."""
        return f"{self.prefix}_thread_failures_total"

    @property
    def calls_refused(self) -> str:
        """Counted by runtime.access."""
        return f"{self.prefix}_calls_refused_total"

    @property
    def audit_fault(self) -> str:
        """Set by runtime.audit_upkeep."""
        return f"{self.prefix}_audit_fault"

    @property
    def failures(self) -> Metric:
        """What also a process has that nobody calls."""
        return Metric(
            self.thread_failures,
            Kind.COUNTER,
            "Unforeseen errors that ended a step of a thread; the thread goes on.",
            ("thread",),
        )

    @property
    def table(self) -> tuple[Metric, ...]:
        """All of them."""
        return (
            Metric(
                self.calls_refused,
                Kind.COUNTER,
                "Calls refused for their role, by the role of the caller.",
                ("role",),
            ),
            Metric(
                self.audit_fault,
                Kind.GAUGE,
                "Whether the chain of the audit file is broken, or a line could not be written.",
                ("fault",),
            ),
            self.failures,
        )


class Metrics:
    """The metrics of one process. Thread-safe."""

    def __init__(self, table: Iterable[Metric]) -> None:
        """`table` lists all metrics that can be counted or set."""
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for metric in table:
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

    def forget(self, name: str, *values: str) -> None:
        """Drop a gauge of what exists no longer, by the values of its labels in the
        order of the table; it may never have been set.
        """
        # Some versions of the library refuse one that is not there.
        with suppress(KeyError):
            self._gauges[name].remove(*values)

    def value(self, name: str, **labels: str) -> float:
        """The current value; 0 if nothing was counted yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class MetricsServer:
    """Serves the page over HTTP until closed; `port` is the bound port."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        """Start to serve; port 0 means any free port.

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
