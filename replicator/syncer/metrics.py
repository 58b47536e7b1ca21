"""The counters and gauges of a syncer (OZ-171); dashboards and alerts use them."""

from runtime.metrics import Kind, Metric, ProcessMetrics

PROCESS = ProcessMetrics("syncer")
_ONE = ("replication",)
# Of each replication; a value that is not known is not there.
QUEUE = "syncer_queue_entries"
FAILED = "syncer_failed_keys"
LAG = "syncer_lag_seconds"
RPO = "syncer_rpo_seconds"
CONDITION = "syncer_replications"
SYNCER_METRICS = (
    Metric(
        "syncer_start_time_seconds", Kind.GAUGE, "When the process began, in seconds since 1970."
    ),
    Metric("syncer_lease_seconds", Kind.GAUGE, "Until work has to stop; 0 without a lease."),
    Metric(CONDITION, Kind.GAUGE, "Replications of this syncer by condition.", ("condition",)),
    Metric(QUEUE, Kind.GAUGE, "Changes that wait on disk to be applied.", _ONE),
    Metric(FAILED, Kind.GAUGE, "Keys that failed, and are tried again later.", _ONE),
    Metric(
        LAG,
        Kind.GAUGE,
        "From a change at the source to its effect at the target, by quantile.",
        ("replication", "quantile"),
    ),
    Metric(RPO, Kind.GAUGE, "Age of the oldest change not yet proven at the target.", _ONE),
    Metric("syncer_entries_taken_total", Kind.COUNTER, "Changes taken from the queue.", _ONE),
    Metric("syncer_entries_replicated_total", Kind.COUNTER, "Changes that took effect.", _ONE),
    Metric(
        "syncer_entries_duplicate_total", Kind.COUNTER, "Changes ignored as known already.", _ONE
    ),
    Metric("syncer_sent_bytes_total", Kind.COUNTER, "Bytes of objects sent to targets.", _ONE),
    Metric("syncer_heartbeat_failures_total", Kind.COUNTER, "Heartbeats without an answer."),
    Metric("syncer_leases_lost_total", Kind.COUNTER, "Leases that ended before their renewal."),
    PROCESS.failures,
)
