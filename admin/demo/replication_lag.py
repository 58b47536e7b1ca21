"""How late each change of a source reached its target, by the logs of both stores.

Each log tells which object a key had from which moment on. A change has arrived as soon
as the target's key is what the source's key was made by this change, or by a later one.
So nobody has to watch while changes cross, and one that was overtaken counts too.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replicator.stores.port import Change, ChangeKind


@dataclass(frozen=True, slots=True)
class CrossedChange:
    """One change of the source, with times in ms since the epoch; `arrived_ms` is None
    for one that did not arrive.
    """

    key: str
    made_ms: int
    arrived_ms: int | None

    @property
    def lag_ms(self) -> int | None:
        """How late it arrived; None where it did not."""
        return None if self.arrived_ms is None else self.arrived_ms - self.made_ms

    def was_pending(self, begin_ms: int, end_ms: int) -> bool:
        """Whether it was missing at the target at some moment of this time."""
        return self.made_ms <= end_ms and (self.arrived_ms is None or self.arrived_ms >= begin_ms)


@dataclass(frozen=True, slots=True)
class LagSummary:
    """The lag of some changes, in ms; None where none of them arrived."""

    changes: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None


def crossed_changes(source: Iterable[Change], target: Iterable[Change]) -> list[CrossedChange]:
    """Each change of the source's log with its arrival, in the order in which they were
    made. Both logs have puts and deletes of single keys, and one clock.
    """
    moments: dict[str, list[tuple[int, bool, str]]] = defaultdict(list)
    for is_target, log in ((False, source), (True, target)):
        for change in log:
            assert change.kind in (ChangeKind.PUT, ChangeKind.DELETE)
            state = change.facts.etag if change.kind is ChangeKind.PUT and change.facts else ""
            moments[change.key].append((change.time_ms, is_target, state))
    found = [one for key, states in moments.items() for one in _crossed(key, states)]
    return sorted(found, key=lambda one: (one.made_ms, one.key))


def _crossed(key: str, moments: list[tuple[int, bool, str]]) -> list[CrossedChange]:
    """The changes of one key, whose states on both sides are given with their times."""
    found = list[CrossedChange]()
    pending = list[tuple[int, str]]()
    theirs = ""
    # In one millisecond the source is first; each side keeps its order.
    for time_ms, is_target, state in sorted(moments, key=lambda one: one[:2]):
        if is_target:
            theirs = state
        else:
            pending.append((time_ms, state))
        arrived = max((at for at, one in enumerate(pending, 1) if one[1] == theirs), default=0)
        found += (CrossedChange(key, made_ms, time_ms) for made_ms, _ in pending[:arrived])
        del pending[:arrived]
    return found + [CrossedChange(key, made_ms, None) for made_ms, _ in pending]


def summary(changes: Iterable[CrossedChange]) -> LagSummary:
    """Count, median, 99th percentile and maximum."""
    known = [one.lag_ms for one in changes]
    lags = sorted(lag for lag in known if lag is not None)
    if not lags:
        return LagSummary(len(known), None, None, None)
    p50, p99 = (lags[math.ceil(share * len(lags)) - 1] for share in (0.5, 0.99))
    return LagSummary(len(known), p50, p99, lags[-1])


def oldest_ages_ms(
    changes: Iterable[CrossedChange], begin_ms: int, end_ms: int, step_ms: int
) -> Sequence[int]:
    """For each step from `begin_ms` to `end_ms`: the greatest age that a change had in
    it which had not arrived yet, in ms; 0 where nothing was missing at the target.
    """
    ages = [0] * math.ceil((end_ms - begin_ms) / step_ms)
    for change in changes:
        arrived_ms = end_ms if change.arrived_ms is None else change.arrived_ms
        first = max(0, (change.made_ms - begin_ms) // step_ms)
        last = min(len(ages) - 1, (arrived_ms - begin_ms) // step_ms)
        for at in range(first, last + 1):
            until_ms = min(arrived_ms, begin_ms + (at + 1) * step_ms)
            ages[at] = max(ages[at], until_ms - change.made_ms)
    return ages
