"""The counters and gauges of a verifier; dashboards and alerts use their names."""

from runtime.metrics import Kind, Metric, ProcessMetrics

PROCESS = ProcessMetrics("verifier")
VERIFIER_METRICS = (
    Metric("verifier_items", Kind.GAUGE, "Items of the index, by how they are known.", ("level",)),
    Metric(
        "verifier_listed_at_seconds",
        Kind.GAUGE,
        "When the last whole listing of the bucket began, in seconds since 1970; 0 is never.",
    ),
    Metric(
        "verifier_oldest_read_at_seconds",
        Kind.GAUGE,
        "When the bytes of the object longest unread were read, in seconds since 1970.",
    ),
    Metric("verifier_bytes_read_total", Kind.COUNTER, "Bytes of objects read to hash them."),
    Metric("verifier_damaged_total", Kind.COUNTER, "Objects whose bytes changed in place."),
    Metric("verifier_refresh_failures_total", Kind.COUNTER, "Refreshes that did not end."),
    *PROCESS.table,
)
