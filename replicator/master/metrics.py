"""The counters and gauges of a replication master; dashboards and alerts use their
names. All masters of a database show the same replications: take the largest.
"""

from runtime.metrics import Kind, Metric, ProcessMetrics

PROCESS = ProcessMetrics("replication_master")
_ONE = ("replication",)
# Of each replication; a value that is not known is not there.
NEXT_INDEX = "replication_master_next_index"
LAG = "replication_master_lag_seconds"
PENDING = "replication_master_pending_entries"
RPO = "replication_master_rpo_seconds"
RPO_UNKNOWN = "replication_master_rpo_unknown"
MASTER_METRICS = (
    Metric(
        "replication_master_replications",
        Kind.GAUGE,
        "Replications by condition; of those that failed over none counts as UNASSIGNED.",
        ("condition",),
    ),
    Metric("replication_master_syncers", Kind.GAUGE, "Syncers with a valid lease."),
    Metric("replication_master_enabled", Kind.GAUGE, "Whether replications may run."),
    Metric(NEXT_INDEX, Kind.GAUGE, "Index of the source's log to replicate next.", _ONE),
    Metric(
        LAG,
        Kind.GAUGE,
        "From a change at the source to its effect at the target, the 99th percentile.",
        _ONE,
    ),
    Metric(PENDING, Kind.GAUGE, "Changes in the syncer's queue, not yet at the target.", _ONE),
    Metric(RPO, Kind.GAUGE, "Age of the oldest change not yet proven at the target.", _ONE),
    Metric(RPO_UNKNOWN, Kind.GAUGE, "Replications that should run, and whose RPO is not known."),
    Metric("replication_master_heartbeats_total", Kind.COUNTER, "Heartbeats of syncers."),
    Metric(
        "replication_master_reports_refused_total",
        Kind.COUNTER,
        "Reports of syncers that had lost the replication, or that were late.",
    ),
    Metric("replication_master_assignments_total", Kind.COUNTER, "Replications given to a syncer."),
    Metric(
        "replication_master_takeovers_total",
        Kind.COUNTER,
        "Replications taken from a syncer whose lease had ended.",
    ),
    Metric(
        "replication_master_store_failures_total",
        Kind.COUNTER,
        "Looks at the records that the database did not answer.",
    ),
    *PROCESS.table,
)
