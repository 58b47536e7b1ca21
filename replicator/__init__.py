"""Buckets across regions: stores, copies, the verifier, the one-shot sync."""
