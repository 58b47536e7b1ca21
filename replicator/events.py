"""The log events of the replicator's processes. Alerts use their names."""

VERIFIER_EVENTS = frozenset({
    "bucket_refreshed", "bucket_damaged", "refresh_failed",
})  # fmt: skip
MASTER_EVENTS = frozenset({
    "replication_assigned", "replication_removed", "replication_taken_over", "tick_failed",
})  # fmt: skip
SYNCER_EVENTS = frozenset({
    "heartbeat_failed", "lease_lost", "replication_begun", "replication_changed",
    "replication_ended", "replication_failed", "replication_stopped", "replication_waits",
    "syncer_registered",
})  # fmt: skip
