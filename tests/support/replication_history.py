"""What a source held after each of its changes, and whether a target agrees with it."""

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from replicator.crossing import Crossing
from replicator.stores.port import ObjectProperties
from tests.support.memory_store import MemoryObject, MemoryStore

# Content and properties of an object; None for no object.
State: TypeAlias = tuple[bytes, bytes] | None


class HistoryViolationError(BaseException):
    """The target does not hold what it must; names the key. No code of the product
    catches it.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}")
        self.key = key


@dataclass
class History:
    """Every state of every key of the source, by the index of its change."""

    crossing: Crossing
    states: dict[str, list[tuple[int, State]]] = field(default_factory=dict)
    # The oldest version that the target's object may be.
    reached: dict[str, int] = field(default_factory=dict)
    tainted: dict[str, int] = field(default_factory=dict)
    """Keys that others may have deleted at the target, a deposed syncer too, and when;
    a comparison mends them.
    """
    harmed: tuple[str, int] | None = None
    """A key that others have deleted at the target while nothing was under way, and
    when.
    """
    # From when to when the target lacked it.
    lacked: list[tuple[str, int, int]] = field(default_factory=list)
    # Of each change its time, and its index.
    times: list[tuple[int, int]] = field(default_factory=list)

    def state(self, found: MemoryObject | None) -> State:
        """An object as far as it crosses."""
        if found is None:
            return None
        return found.body, self.crossing.digest(found.properties)

    def note(self, source: MemoryStore, index: int) -> None:
        """The source has changed; this is the index of its newest change."""
        for change in source.changes[len(self.times) :]:
            self.times.append((change.time_ms, change.index))
        for key in sorted(source.objects.keys() | self.states.keys()):
            states = self.states.setdefault(key, [(0, None)])
            now = self.state(source.objects.get(key))
            if states[-1][1] != now:
                states.append((index, now))

    def written(self, key: str, found: MemoryObject | None) -> None:
        """The target's object is another one now: never one older than it was (R1)."""
        state, least = self.state(found), self.reached.get(key, 0)
        states = self.states.get(key, [(0, None)])
        later = [index for index, one in states if one == state and self._lasts(key, index, least)]
        if not later:
            raise HistoryViolationError(key, f"is older than change {least}, or never was")
        self.reached[key] = max(least, later[0])

    def proven(self, since_ms: int) -> None:
        """A comparison that began then found no difference."""
        left = {key: at_ms for key, at_ms in self.tainted.items() if at_ms >= since_ms}
        self.tainted = left

    def look(self, held: Container[str], now_ms: int) -> None:
        """The target has these keys."""
        if self.harmed is not None and self.harmed[0] in held:
            self.lacked.append((*self.harmed, now_ms))
            self.harmed = None

    def equal(self, since_ms: int) -> None:
        """A comparison that began then says that it found both sides equal: nothing was
        lacked (no false "equal").
        """
        for key, from_ms, to_ms in self.lacked:
            if from_ms < since_ms < to_ms:
                raise HistoryViolationError(key, f"was called equal, and lacked since {from_ms}")
        if self.harmed is not None and self.harmed[1] < since_ms:
            raise HistoryViolationError(self.harmed[0], "is called equal, and lacked")

    def index_before(self, time_ms: int) -> int:
        """The index of the last change before a time."""
        at = bisect_left(self.times, (time_ms, 0))
        return self.times[at - 1][1] if at else 0

    def acknowledged(
        self,
        target: MemoryStore,
        through: int,
        failed: Container[str],
        is_known: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        """Every change up to this index is at the target (R1), of keys that are known
        to be there, but for those that are said to have failed.
        """
        for key, states in self.states.items():
            if key in self.tainted or key in failed or not is_known(key):
                continue
            state = self.state(target.objects.get(key))
            if not any(one == state and self._lasts(key, index, through) for index, one in states):
                raise HistoryViolationError(key, f"lacks a change that is acknowledged: {through}")
        for key in sorted(target.objects.keys() - self.states.keys()):
            raise HistoryViolationError(key, "never was at the source")

    def _lasts(self, key: str, index: int, least: int) -> bool:
        """Whether the version made at an index was there at `least`, or came later."""
        following = [at for at, _ in self.states[key] if at > index]
        return not following or following[0] > least


def properties(owner: str, tag: str) -> ObjectProperties:
    """Properties of a test's object."""
    return ObjectProperties(metadata=(("owner", owner),), tags=(("team", tag),))


def keys_below(keys: Iterable[str], prefix: str) -> list[str]:
    """Sorted keys below a prefix."""
    return sorted(key for key in keys if key.startswith(prefix))
