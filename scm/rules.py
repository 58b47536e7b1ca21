"""The settings that affect the controller's decisions."""

from dataclasses import dataclass

from scm.quiet_hours import QuietHours


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings for decisions; scm.config describes them."""

    required_nodes: int = 3
    stale_after_s: float = 90.0
    dead_after_s: float = 600.0
    roots_stale_after_s: float = 30 * 86_400.0
    orders_per_datanode: int = 2
    command_deadline_s: float = 3600.0
    # Automatic mode: its number of concurrent jobs, and its interval between visits to
    # matching containers.
    automatic: bool = False
    automatic_jobs: int = 4
    visit_every_s: float = 60.0
    # It starts nothing in these.
    quiet_hours: QuietHours | None = None

    def is_quiet(self, now_s: float) -> bool:
        """Whether automatic mode rests now."""
        return self.quiet_hours is not None and self.quiet_hours.has(now_s)

    def starts_jobs(self, now_s: float) -> bool:
        """Whether automatic mode may start something now."""
        return self.automatic and not self.is_quiet(now_s)
