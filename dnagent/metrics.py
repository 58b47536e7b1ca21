"""The counters and gauges of an agent; dashboards and alerts use their names."""

from runtime.metrics import Kind, Metric, ProcessMetrics

PROCESS = ProcessMetrics("dnagent")

AGENT_METRICS = (
    Metric("dnagent_scan_bytes_total", Kind.COUNTER, "Bytes read by scans.", ("volume",)),
    Metric(
        "dnagent_containers_scanned_total",
        Kind.COUNTER,
        "Scans that ended with a result.",
        ("volume",),
    ),
    Metric(
        "dnagent_scans_skipped_total",
        Kind.COUNTER,
        "Scans not done or not kept, by reason.",
        ("reason",),
    ),
    Metric("dnagent_findings_total", Kind.COUNTER, "Faults found by scans, by type.", ("type",)),
    Metric(
        "dnagent_containers_marked_unhealthy_total",
        Kind.COUNTER,
        "Replicas that a scan moved to UNHEALTHY.",
    ),
    Metric(
        "dnagent_trees_built_total",
        Kind.COUNTER,
        "Trees built from records because none was stored.",
    ),
    Metric(
        "dnagent_scan_last_full_pass_timestamp_seconds",
        Kind.GAUGE,
        "When every replica had been scanned.",
        ("volume",),
    ),
    Metric(
        "dnagent_scan_limit_bytes_per_second",
        Kind.GAUGE,
        "Limit of a volume's scanner in the background; 0 is none.",
    ),
    Metric(
        "dnagent_scan_on_demand_limit_bytes_per_second",
        Kind.GAUGE,
        "Limit of a volume's scanner for requests; 0 is none.",
    ),
    Metric(
        "dnagent_serve_limit_bytes_per_second",
        Kind.GAUGE,
        "Limit on data read for callers; 0 is none.",
    ),
    Metric(
        "dnagent_repair_limit_bytes_per_second",
        Kind.GAUGE,
        "Limit on what all repairs fetch; 0 is none.",
    ),
    Metric("dnagent_reconciliations_limit", Kind.GAUGE, "Limit on reconciliations at once."),
    Metric("dnagent_volumes_failed", Kind.GAUGE, "Volumes that could not be opened."),
    Metric("dnagent_containers", Kind.GAUGE, "Replicas held.", ("volume",)),
    Metric("dnagent_containers_duplicated", Kind.GAUGE, "Containers on several volumes."),
    Metric(
        "dnagent_chunks_repaired_total", Kind.COUNTER, "Chunks repaired, by outcome.", ("outcome",)
    ),
    Metric("dnagent_windows_written_total", Kind.COUNTER, "Windows written by repairs."),
    Metric(
        "dnagent_repair_fetched_bytes_total", Kind.COUNTER, "Bytes fetched from peers by repairs."
    ),
    Metric(
        "dnagent_reconciliations_total",
        Kind.COUNTER,
        "Reconciliations that ended, by state.",
        ("state",),
    ),
    Metric("dnagent_reconciliations_queued", Kind.GAUGE, "Reconciliations waiting or running."),
    Metric(
        "dnagent_peer_refusals_total",
        Kind.COUNTER,
        "Peers that failed or sent invalid data, by reason.",
        ("reason",),
    ),
    *PROCESS.table,
    Metric("dnagent_undo_bytes", Kind.GAUGE, "Bytes kept to undo repairs.", ("volume",)),
    Metric("dnagent_heartbeats_total", Kind.COUNTER, "Heartbeats, by outcome.", ("outcome",)),
    Metric(
        "dnagent_commands_total",
        Kind.COUNTER,
        "Commands from the controller, by outcome.",
        ("outcome",),
    ),
    Metric(
        "dnagent_exports_total",
        Kind.COUNTER,
        "Scheduled exports of the chunk table, by outcome.",
        ("outcome",),
    ),
    Metric(
        "dnagent_exported_rows_total",
        Kind.COUNTER,
        "Rows of the chunk table written by scheduled exports.",
    ),
    Metric("dnagent_export_table_rows", Kind.GAUGE, "Rows of the chunk table as last exported."),
    Metric(
        "dnagent_export_last_success_timestamp_seconds",
        Kind.GAUGE,
        "When the chunk table was last exported.",
    ),
)
