"""The log events of a controller. Alerts use their names."""

CONTROLLER_EVENTS = frozenset({
    "datanode_registered", "datanode_stale", "job_created", "job_changed", "job_finished",
    "job_resumed", "job_throttled",
    "controller_paused", "heartbeat_refused", "dashboard_started", "page_failed",
})  # fmt: skip
