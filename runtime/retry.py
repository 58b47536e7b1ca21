"""Do it again when the error says that this may help: `error.retryable` decides,
nothing else does.

Bounded in attempts; waits grow exponentially with jitter, lest all agents knock at once
on a controller that comes back. The sleep is passed in, so that a stopping process
interrupts the wait and a test waits for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from merkle.errors import ReconcileError

T = TypeVar("T")
Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how far apart; `jitter_s` is added at random, up to that much."""

    attempts_max: int = 4
    first_s: float = 0.2
    most_s: float = 10.0
    jitter_s: float = 0.2

    def __post_init__(self) -> None:
        assert self.attempts_max >= 1
        assert 0 <= self.first_s <= self.most_s


def _is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, ReconcileError) and error.retryable


def retrying(
    call: Callable[[], T],
    *,
    sleep: Sleep,
    backoff: Backoff,
    on_retry: Callable[[BaseException, int], None] | None = None,
) -> T:
    """What `call` returns, after as many attempts as allowed; the last error as it was
    raised.

    `on_retry` hears of each error that is about to be waited out, with the number of
    the attempt, from 1.
    """

    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if on_retry and error:
            on_retry(error, state.attempt_number)

    return Retrying(
        sleep=sleep,
        stop=stop_after_attempt(backoff.attempts_max),
        wait=wait_exponential(multiplier=backoff.first_s, max=backoff.most_s)
        + wait_random(0, backoff.jitter_s),
        retry=retry_if_exception(_is_retryable),
        before_sleep=before_sleep,
        reraise=True,
    )(call)
