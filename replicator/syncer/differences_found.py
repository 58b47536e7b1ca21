"""Where a comparison leaves what differs: it is applied at once, or kept for later."""

from dataclasses import dataclass, field, replace
from typing import Protocol

from replicator.stores.port import Change
from replicator.syncer.applier import ChangeApplier
from replicator.syncer.schedule import Work
from replicator.syncer.workers import ChangeWorkers
from runtime.rate_limit import Clock


class DifferenceSink(Protocol):
    """Takes what a comparison finds. Owned by one thread."""

    def take(self, change: Change, *, is_doubted: bool = False) -> Work | None:
        """Take a change that a comparison has found; returns what settles it, None
        where nobody need wait for that. `is_doubted`: the ledger takes both sides for
        equal, and the object has to be sent all the same.
        """

    def is_held(self, work: Work) -> bool:
        """Whether it has failed by itself, or waits behind what has."""


class AppliedDifferences:
    """See DifferenceSink: applies them, beside other changes."""

    def __init__(self, workers: ChangeWorkers, applier: ChangeApplier, clock: Clock) -> None:
        self._workers = workers
        self._applier = applier
        self._clock = clock
        self.is_held = workers.is_held

    def take(self, change: Change, *, is_doubted: bool = False) -> Work:
        """See DifferenceSink."""
        if is_doubted:
            self._applier.doubt(change.key)
        return self._workers.schedule.touch(change, now_ms=self._clock.now_ms())


@dataclass
class KeptDifferences:
    """See DifferenceSink: keeps them, with whether they are doubted."""

    found: list[tuple[Change, bool]] = field(default_factory=list)

    def take(self, change: Change, *, is_doubted: bool = False) -> None:
        """See DifferenceSink. By then the source may be another one than was listed."""
        self.found.append((replace(change, facts=None), is_doubted))

    def is_held(self, work: Work) -> bool:
        """See DifferenceSink."""
        raise AssertionError(f"{work} is nobody's")

    def apply(self, sink: DifferenceSink) -> None:
        """Let another one take all of them."""
        for change, is_doubted in self.found:
            sink.take(change, is_doubted=is_doubted)
