"""What Prometheus is shown of the replications of a syncer (OZ-171)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from replicator.replication import Condition, PolicyId, ReplicationReport
from replicator.syncer.metrics import CONDITION, FAILED, LAG, QUEUE, RPO
from runtime.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Observation:
    """A replication at one moment: its report, and changes taken from its queue."""

    report: ReplicationReport
    entries_taken: int


class SyncerGauges:
    """Sets gauges and counters. What is not known has no value. Not thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown = set[tuple[str, ...]]()
        self._counted = dict[tuple[str, PolicyId], int]()

    def show(self, found: Mapping[PolicyId, Observation], now_ms: int) -> None:
        """Show what is there now; `now_ms` is a time since the epoch."""
        conditions = Counter(one.report.condition for one in found.values())
        for condition in Condition:
            self._metrics.set(CONDITION, conditions[condition], condition=condition.value)
        values = {
            key: value
            for policy_id, one in found.items()
            for key, value in _values(policy_id, one.report, now_ms).items()
        }
        for name, *labels in self._shown - values.keys():
            self._metrics.forget(name, *labels)
        for (name, policy_id, *quantile), value in values.items():
            of_quantile = {"quantile": quantile[0]} if quantile else {}
            self._metrics.set(name, value, replication=policy_id, **of_quantile)
        self._shown = set(values)
        for policy_id, one in found.items():
            self._count(policy_id, one)
        self._counted = {key: value for key, value in self._counted.items() if key[1] in found}

    def _count(self, policy_id: PolicyId, one: Observation) -> None:
        for name, value in (
            ("syncer_entries_taken_total", one.entries_taken),
            ("syncer_entries_replicated_total", one.report.applied),
            ("syncer_entries_duplicate_total", one.report.duplicates),
            ("syncer_sent_bytes_total", one.report.sent_bytes),
        ):
            before = self._counted.get((name, policy_id), 0)
            # A replication that began anew counts from 0.
            self._metrics.count(
                name, value - before if value >= before else value, replication=policy_id
            )
            self._counted[name, policy_id] = value


def _values(
    policy_id: PolicyId, report: ReplicationReport, now_ms: int
) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float | None] = {
        (QUEUE, policy_id): report.queued,
        (FAILED, policy_id): report.failed,
        (LAG, policy_id, "0.5"): _seconds(report.lag_p50_ms),
        (LAG, policy_id, "0.99"): _seconds(report.lag_p99_ms),
        (RPO, policy_id): None
        if report.oldest_unproven_ms is None
        else max(0, now_ms - report.oldest_unproven_ms) / 1000,
    }
    return {key: value for key, value in found.items() if value is not None}


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
