"""Automatic mode: it chooses the containers that get a job without a request."""

from collections.abc import Callable, Mapping
from itertools import islice

from merkle.tree import ContainerId
from scm.policy import Visit, is_due, roots
from scm.registry import Registry
from scm.rules import Rules

# The most containers examined in one tick.
_SEARCH_MAX = 1_000


class AutomaticMode:
    """Chooses diverged containers, and at an interval one whose roots agree.

    A visit to a matching container spreads tombstones. Not thread-safe: the caller
    holds a lock.
    """

    def __init__(
        self,
        *,
        rules: Rules,
        registry: Registry,
        visits: Mapping[ContainerId, Visit],
        is_eligible: Callable[[ContainerId], bool],
        now_s: float,
    ) -> None:
        """`visits` is the controller's mapping; its changes are seen here."""
        self._rules = rules
        self._registry = registry
        self._visits = visits
        self._is_eligible = is_eligible
        self._visited_at_s = now_s
        self._visit_cursor = ContainerId(0)

    def choose(self, slots: int, now_s: float) -> list[tuple[ContainerId, str]]:
        """Up to `slots` containers that get a job, each with the reason."""
        chosen = list[tuple[ContainerId, str]]()
        for container_id in list(islice(self._registry.diverged(), _SEARCH_MAX)):
            if len(chosen) >= slots:
                break
            # Even if it gets no job, the next search starts with others.
            self._registry.postpone(container_id)
            if self.may_visit(container_id, now_s):
                chosen.append((container_id, "diverged"))
        is_time = now_s - self._visited_at_s >= self._rules.visit_every_s
        if len(chosen) < slots and is_time:
            self._visited_at_s = now_s
            found = self._next_matching(now_s)
            if found is not None:
                chosen.append((found, "visit"))
        return chosen

    def may_visit(self, container_id: ContainerId, now_s: float) -> bool:
        """Whether the container is eligible, and due after its last job."""
        now_roots = roots(self._registry.replicas(container_id))
        is_due_now = is_due(self._visits.get(container_id), now_roots, now_s)
        return is_due_now and self._is_eligible(container_id)

    def _next_matching(self, now_s: float) -> ContainerId | None:
        searched = list(islice(self._registry.container_ids(self._visit_cursor), _SEARCH_MAX))
        for container_id in searched:
            self._visit_cursor = container_id
            # Also if the match is not proven: the visit makes it known.
            agrees = self._registry.compared(container_id).roots_agree
            if agrees and self.may_visit(container_id, now_s):
                return container_id
        if len(searched) < _SEARCH_MAX:
            self._visit_cursor = ContainerId(0)
        return None
