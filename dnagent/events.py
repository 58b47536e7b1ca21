"""The log events of an agent. Alerts use their names."""

AGENT_EVENTS = frozenset({
    # volumes and scans
    "volume_opened", "owner_hold_unused", "volume_failed", "container_skipped",
    "container_duplicated",
    "cluster_secured", "cluster_security_unknown", "scan_started", "scan_finished",
    "scan_failed", "scan_interrupted", "replica_marked_unhealthy", "replica_returned_to_closed",
    "container_deleted", "tree_built", "tree_unreadable", "tree_write_failed", "undo_pruned",
    # reconciliation
    "reconcile_started", "reconcile_finished", "reconcile_failed", "reconcile_interrupted",
    "reconcile_refused", "peer_set_aside", "peer_unreachable",
    # chunk tables
    "export_finished", "export_failed",
    # heartbeats
    "heartbeat_failed", "heartbeat_recovered", "command_received", "command_dropped",
    "command_failed",
})  # fmt: skip
