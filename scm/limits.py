"""What a controller holds at most; tests use lower limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerLimits:
    """Limits in numbers of jobs and containers."""

    # Further requests are refused.
    jobs_active_max: int = 200_000
    # Kept in memory; the store drops older ones too.
    jobs_ended_max: int = 10_000
    # A petabyte of half-full containers of 5 GB has 400,000 of them. The limit bounds
    # the memory that one agent can take, about 0.5 GB.
    containers_per_datanode_max: int = 500_000
    # In one save. A first start knows none of the holders, and no heartbeat should wait
    # until millions are stored.
    holders_saved_max: int = 20_000


LIMITS = ControllerLimits()
