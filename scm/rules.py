"""The settings that the controller's decisions depend on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Numbers of replicas, slots and seconds; scm.config reads them from a file."""

    required_nodes: int = 3
    stale_after_s: float = 90.0
    dead_after_s: float = 600.0
    orders_per_datanode: int = 2
    command_deadline_s: float = 3600.0
    # Automatic mode: how many of its jobs at once, and how often a matching container
    # is visited.
    automatic: bool = False
    automatic_jobs: int = 4
    visit_every_s: float = 60.0
