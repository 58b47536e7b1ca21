"""The log events of a verifier. Alerts use their names."""

VERIFIER_EVENTS = frozenset({
    "bucket_refreshed", "bucket_damaged", "refresh_failed",
})  # fmt: skip
