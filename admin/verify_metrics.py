"""The metrics of `bucket verify`, for the textfile collector of Prometheus'
node_exporter: one file for each pair of buckets.
"""

import time
from enum import Enum
from pathlib import Path

from runtime.disk import Disk
from runtime.metrics import Kind, Metric, Metrics

_PAIR = ("source", "target")
VERIFY_METRICS = (
    Metric(
        "bucket_verify_finished_timestamp_seconds",
        Kind.GAUGE,
        "When the last verification of a pair of buckets was complete.",
        _PAIR,
    ),
    Metric("bucket_verify_differences", Kind.GAUGE, "Keys that it found to differ.", _PAIR),
    Metric(
        "bucket_verify_outcome",
        Kind.GAUGE,
        "1 for what it found: equal, different or unknown.",
        (*_PAIR, "outcome"),
    ),
)


class VerifyOutcome(Enum):
    """What a verification found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """No difference, and yet it is not known what both sides hold."""

    @classmethod
    def of(cls, differences: int, *, is_equal: bool) -> "VerifyOutcome":
        """The outcome of so many differences; with none the sides may yet differ."""
        if differences:
            return cls.DIFFERENT
        return cls.EQUAL if is_equal else cls.UNKNOWN


def write_verify_metrics(
    path: Path, source: str, target: str, differences: int, *, is_equal: bool
) -> None:
    """Write what a verification of two addresses found, in Prometheus' text format.

    Raises:
        DiskError: the file cannot be written.
    """
    metrics, pair = Metrics(VERIFY_METRICS), {"source": source, "target": target}
    found = VerifyOutcome.of(differences, is_equal=is_equal)
    metrics.set("bucket_verify_finished_timestamp_seconds", time.time(), **pair)
    metrics.set("bucket_verify_differences", differences, **pair)
    for outcome in VerifyOutcome:
        metrics.set("bucket_verify_outcome", outcome is found, **pair, outcome=outcome.value)
    Disk().replace(path.absolute(), metrics.page())
