"""What Prometheus is shown of all replications."""

from collections import Counter

from replicator.master.leases import is_valid
from replicator.master.metrics import LAG, NEXT_INDEX, PENDING, RPO, RPO_UNKNOWN
from replicator.master.records import StoredState, wanted
from replicator.master.views import ReplicationView, replication_view, rpo_ms
from replicator.replication import Condition, DesiredState, PolicyId
from runtime.metrics import Metrics


class Gauges:
    """Sets the gauges from records. What is not known has no value. Not thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown: set[tuple[str, PolicyId]] = set()

    def show(self, state: StoredState) -> None:
        """Set all gauges to what the records say now."""
        views = [replication_view(state, record) for record in state.policies]
        conditions = Counter(view.condition for view in views if not _rests(view))
        for condition in Condition:
            count = conditions[condition]
            self._metrics.set("replication_master_replications", count, condition=condition.value)
        self._metrics.set(RPO_UNKNOWN, sum(_lacks_rpo(view, state) for view in views))
        living = sum(is_valid(one.lease, state.now_ms) for one in state.syncers)
        self._metrics.set("replication_master_syncers", living)
        self._metrics.set("replication_master_enabled", state.settings.is_enabled)
        values = {
            (name, view.policy_id): value for view in views for name, value in _values(view).items()
        }
        for name, policy_id in self._shown - values.keys():
            self._metrics.forget(name, policy_id)
        for (name, policy_id), value in values.items():
            self._metrics.set(name, value, replication=policy_id)
        self._shown = set(values)


def _rests(view: ReplicationView) -> bool:
    """Whether no syncer has it because it failed over."""
    return view.record.failed_over_ms is not None and view.condition is Condition.UNASSIGNED


def _lacks_rpo(view: ReplicationView, state: StoredState) -> bool:
    if view.record.failed_over_ms is not None or view.record.is_deleted:
        return False
    is_wanted = wanted(view.record, state.settings) is DesiredState.ENABLED
    return is_wanted and rpo_ms(view) is None


def _values(view: ReplicationView) -> dict[str, float]:
    """The gauges of one replication, by name, in seconds and entries."""
    report = view.state.report
    if report is None or view.condition is Condition.UNKNOWN:
        return {}
    position, rpo = report.checkpoint.position, rpo_ms(view)
    if view.record.failed_over_ms is not None:
        # Its clients write to the target: what the source has is not to come there.
        rpo = None
    # Without a holder nobody has a queue, and nothing arrives.
    has_queue, lag_ms = view.state.holder is not None, report.lag_p99_ms
    found = {
        NEXT_INDEX: position.index + 1 if position else None,
        LAG: lag_ms / 1000 if lag_ms is not None and has_queue else None,
        PENDING: report.queued if has_queue else None,
        RPO: None if rpo is None else rpo / 1000,
    }
    return {name: value for name, value in found.items() if value is not None}
