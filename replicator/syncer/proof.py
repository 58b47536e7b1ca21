"""What is known of a target that is being followed: equal, and up to where.

A proof begins when all that was queued is being applied or done, at the position up to
which everything is acknowledged. A comparison runs beside the log. A key that differs
and was changed since is in flight: it says nothing. Any other is a difference. Without
one the target had every change up to the position: it is equal up to there.
"""

from dataclasses import dataclass

from replicator.stores.port import FeedPosition
from replicator.syncer.comparing import ComparisonFindings


@dataclass(frozen=True, slots=True)
class ProofState:
    """What the last comparison has shown; None where nothing is known. `proven_ms` is
    when the comparison that proved it began.
    """

    position: FeedPosition | None = None
    proven_ms: int | None = None
    level: str = ""
    differences: int | None = None

    def after(
        self,
        result: ComparisonFindings,
        *,
        position: FeedPosition | None,
        moved: set[str] | None,
        failed: int,
    ) -> "ProofState":
        """What is known after another comparison, which began at this position. `moved`
        are keys and prefixes that were changed since, None for more than can be told.
        What was proven earlier stays, with its age.
        """
        if moved is None:
            return ProofState(self.position, self.proven_ms, self.level, None)
        if len(result.keys) < result.differences:
            # Too many to tell which of them are in flight.
            return ProofState(self.position, self.proven_ms, self.level, result.differences)
        real = [key for key in result.keys if not _is_among(key, moved)]
        if not (result.is_certain or real or failed):
            return ProofState(self.position, self.proven_ms, self.level, None)
        if real or failed or (position is None and result.in_flight != 0):
            return ProofState(self.position, self.proven_ms, self.level, len(real) + failed)
        return ProofState(position, result.began_ms, result.level, 0)


def _is_among(key: str, moved: set[str]) -> bool:
    if key in moved:
        return True
    parts = key.split("/")[:-1]
    return any("/".join(parts[:end]) + "/" in moved for end in range(1, len(parts) + 1))
