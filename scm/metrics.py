"""The counters and gauges of a controller; dashboards and alerts use their names."""

from runtime.metrics import Kind, Metric

CONTROLLER_METRICS = (
    Metric("scm_heartbeats_total", Kind.COUNTER, "Heartbeats received."),
    Metric("scm_datanodes_live", Kind.GAUGE, "Datanodes heard of recently."),
    Metric("scm_containers", Kind.GAUGE, "Containers known."),
    Metric(
        "scm_containers_diverged", Kind.GAUGE, "Containers whose replicas have different roots."
    ),
    Metric("scm_containers_unknown", Kind.GAUGE, "Containers of which some replica has no root."),
    Metric("scm_jobs_running", Kind.GAUGE, "Jobs under way."),
    Metric("scm_jobs_finished_total", Kind.COUNTER, "Jobs that ended, by state.", ("state",)),
)
