"""Rounds of Ozone's own reconciliation: what the roots say, and what follows.

SCM accepts a request, and reports neither progress nor an end. A round is therefore
judged by the roots that datanodes report. They report when their task ends, and take
their command from a heartbeat, so that a round has ended when no root has changed for
longer than a few heartbeats take. All functions are pure; times are passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from merkle.replica import ContainerReplica
from merkle.tree import ContainerId
from scm.policy import Knowledge, RootComparison, Roots, compare, roots

# Ozone's rules make a live block and two tombstones of it equal in two rounds. A chunk
# that only a source in the second round has needs a third.
OZONE_ROUNDS_MAX = 4
# SCM loses a request if its leader changes, and the scan that ends a round can show
# damage that no tree had. One round without a change proves nothing; two do.
_UNCHANGED_ROUNDS_MAX = 2


class OzoneOutcome(Enum):
    """How the reconciliation of a container by Ozone ended."""

    EQUAL = "equal"
    # Ozone leaves the replicas different, however often it is asked.
    NOT_CONVERGING = "not_converging"
    # Roots are not known, so that nothing can be said.
    UNKNOWN = "unknown"
    REFUSED = "refused"


class RoundStep(Enum):
    """What to do next for a container."""

    WAIT = "wait"
    REQUEST = "request"
    END = "end"


@dataclass(frozen=True, slots=True)
class OzoneRun:
    """One container from its first request to its end. `round` counts the requests; 0
    is before the first. `unchanged_rounds` are those in a row, before the current one,
    that changed no root. Times are in seconds of the caller's clock.
    """

    container_id: ContainerId
    round: int = 0
    unchanged_rounds: int = 0
    # The roots at the request of the current round, and the latest ones.
    before: Roots = ()
    seen: Roots = ()
    # When the round was requested, or later a root last changed.
    quiet_since_s: float = 0.0
    # When the latest round was requested.
    requested_s: float = 0.0
    outcome: OzoneOutcome | None = None
    # Why it ended so, for the user.
    detail: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.round <= OZONE_ROUNDS_MAX
        assert self.unchanged_rounds <= self.round

    @property
    def has_changed(self) -> bool:
        """Whether a root changed in this round."""
        return self.seen != self.before


def request_sent(run: OzoneRun, replicas: Sequence[ContainerReplica], now_s: float) -> OzoneRun:
    """The run after SCM accepted a request, with the replicas as known before it."""
    assert run.outcome is None
    known = roots(replicas)
    return replace(
        run,
        round=run.round + 1,
        unchanged_rounds=_unchanged_rounds(run) if run.round else 0,
        before=known,
        seen=known,
        quiet_since_s=now_s,
        requested_s=now_s,
    )


def refused(run: OzoneRun, message: str) -> OzoneRun:
    """The run after SCM or a rule refused it."""
    return replace(run, outcome=OzoneOutcome.REFUSED, detail=message)


def observe(
    run: OzoneRun,
    replicas: Sequence[ContainerReplica],
    known: Knowledge,
    *,
    now_s: float,
    settle_s: float,
) -> tuple[OzoneRun, RoundStep]:
    """Take in the replicas as SCM reports them now, and decide.

    Equal roots end a run at once if they became equal; if they were equal before, only
    after `settle_s`, since the scan that ends a round may still find damage. Roots that
    differ end a round when none has changed for `settle_s`.
    """
    if run.outcome is not None:
        return run, RoundStep.END
    if run.round == 0:
        return run, RoundStep.REQUEST
    latest = roots(replicas)
    if latest != run.seen:
        run = replace(run, seen=latest, quiet_since_s=now_s)
    compared = compare(replicas, known)
    is_quiet = now_s - run.quiet_since_s >= settle_s
    if compared.roots_agree and (is_quiet or run.has_changed):
        return replace(run, outcome=OzoneOutcome.EQUAL, detail=compared.note), RoundStep.END
    if not is_quiet:
        return run, RoundStep.WAIT
    if compared.comparison is not RootComparison.DIVERGED:
        ended = replace(run, outcome=OzoneOutcome.UNKNOWN, detail=compared.note)
        return ended, RoundStep.END
    return _end_round(run)


def _end_round(run: OzoneRun) -> tuple[OzoneRun, RoundStep]:
    unchanged = _unchanged_rounds(run)
    if unchanged >= _UNCHANGED_ROUNDS_MAX:
        why = f"{unchanged} rounds in a row changed no root"
    elif run.round >= OZONE_ROUNDS_MAX:
        why = f"the roots still differ after {run.round} rounds"
    else:
        return run, RoundStep.REQUEST
    return replace(run, outcome=OzoneOutcome.NOT_CONVERGING, detail=why), RoundStep.END


def _unchanged_rounds(run: OzoneRun) -> int:
    return 0 if run.has_changed else run.unchanged_rounds + 1
