"""The log events of a controller. Alerts use their names."""

CONTROLLER_EVENTS = frozenset({
    "datanode_registered", "datanode_stale", "job_created", "job_changed", "job_finished",
    "job_resumed", "job_throttled",
    "controller_paused", "heartbeat_refused", "cluster_unavailable", "cluster_available",
    "container_not_converging", "dashboard_started", "page_failed",
})  # fmt: skip
