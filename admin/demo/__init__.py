"""Demos: a local cluster whose damaged replicas are healed, and a synthetic cluster
that is swept.
"""
