"""Merkle trees of replicas, their comparison and repair plans: no I/O."""
