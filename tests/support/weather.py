"""Let simulated storms blow over, and see whether they show that something is wrong."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from tests.support.replication_history import HistoryViolationError


class Storm(Protocol):
    """Everything that goes on around replications, drawn from one seed."""

    def run(self, steps: int) -> None:
        """Let it blow."""

    def heal(self) -> None:
        """Let nothing fail any more, and check what is left."""

    def close(self) -> None:
        """End what runs."""

    def trace_of(self, key: str | None) -> Iterable[str]:
        """What happened, of one key or of all."""


StormT = TypeVar("StormT", bound=Storm)


def weather(storm: StormT, steps: int) -> StormT:
    """One storm to its end; an error shows what happened to the key that it names."""
    try:
        storm.run(steps)
        storm.heal()
    except BaseException as error:
        key = getattr(error, "key", None)
        error.add_note("\n".join([str(storm), *storm.trace_of(key)]))
        raise
    finally:
        storm.close()
    return storm


def shows_a_bug(storms: Callable[[int], Storm], steps: int, seeds: Iterable[int]) -> bool:
    """Whether one of these storms shows that something is wrong."""
    for seed in seeds:
        try:
            weather(storms(seed), steps)
        except (HistoryViolationError, AssertionError):
            return True
    return False


def all_in_flight(_key: str, _moved: set[str]) -> bool:
    """Whatever a comparison finds was changed meanwhile."""
    return True
