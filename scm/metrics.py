"""The counters and gauges of a controller; dashboards and alerts use their names."""

from runtime.metrics import Kind, Metric, ProcessMetrics

PROCESS = ProcessMetrics("scm")
CONTROLLER_METRICS = (
    Metric("scm_heartbeats_total", Kind.COUNTER, "Heartbeats received."),
    Metric("scm_datanodes_live", Kind.GAUGE, "Datanodes with a recent heartbeat."),
    Metric("scm_containers", Kind.GAUGE, "Containers known."),
    Metric(
        "scm_containers_diverged", Kind.GAUGE, "Containers whose replicas have different roots."
    ),
    Metric("scm_diverged_bytes", Kind.GAUGE, "Bytes of the containers whose replicas differ."),
    Metric(
        "scm_diverged_oldest_age_seconds",
        Kind.GAUGE,
        "How long this process has known of the oldest container whose replicas differ.",
    ),
    Metric("scm_containers_unknown", Kind.GAUGE, "Containers whose comparison is unknown."),
    Metric(
        "scm_containers_unscanned",
        Kind.GAUGE,
        "Containers with a replica whose data was never scanned.",
    ),
    Metric(
        "scm_containers_unserved",
        Kind.GAUGE,
        "Containers of which every reported replica is UNHEALTHY or INVALID.",
    ),
    Metric(
        "scm_roots_oldest_age_seconds",
        Kind.GAUGE,
        "Age of the oldest root: time since the last full scan of its data, by the hour.",
    ),
    Metric("scm_jobs_running", Kind.GAUGE, "Jobs with an order at a datanode."),
    Metric("scm_jobs_paused", Kind.GAUGE, "Jobs that someone paused."),
    Metric("scm_jobs_stalled", Kind.GAUGE, "Jobs whose datanodes report no progress."),
    Metric("scm_orders_limit", Kind.GAUGE, "Limit on orders at one datanode at once."),
    Metric("scm_automatic_jobs_limit", Kind.GAUGE, "Limit on jobs of automatic mode at once."),
    Metric(
        "scm_cluster_report_age_seconds",
        Kind.GAUGE,
        "With [cluster]: seconds since SCM last answered.",
    ),
    Metric(
        "scm_containers_not_converging",
        Kind.GAUGE,
        "With [cluster]: containers that Ozone's reconciliation leaves different.",
    ),
    Metric("scm_jobs_finished_total", Kind.COUNTER, "Jobs that ended, by state.", ("state",)),
    *PROCESS.table,
)
