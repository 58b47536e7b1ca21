"""Retry a call whose error is retryable; `error.retryable` alone decides.

Attempts are bounded. Waits grow exponentially, with jitter: otherwise all agents would
call a restarted controller at the same time. The caller passes the sleep function, so
that a stopping process can interrupt the wait and a test need not wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from merkle.errors import ReconcileError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")
Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Backoff:
    """How many attempts, and how long to wait between them.

    Waits double from `first_s` to at most `most_s`; a random time of up to `jitter_s`
    is added to each.
    """

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


def call_with_retry(
    call: Callable[[], T],
    *,
    sleep: Sleep,
    backoff: Backoff,
    on_retry: Callable[[BaseException, int], None] | None = None,
) -> T:
    """The result of `call`, after up to `backoff.attempts_max` attempts.

    `on_retry` is called before each wait, with the error and the number of the attempt,
    from 1.

    Raises:
        The last error of `call`, unchanged.
    """

    try:
        return call()
    except ReconcileError as error:
        if backoff.attempts_max == 1 or not _is_retryable(error):
            raise
        first = [error]

    # Imported here, because it brings asyncio, and most calls succeed at once.
    from tenacity import (
        Retrying,
        retry_if_exception,
        stop_after_attempt,
        wait_exponential,
        wait_random,
    )

    def again() -> T:
        # The first attempt is over. Most calls succeed, and cost no more than that.
        if first:
            raise first.pop()
        return call()

    def before_sleep(state: "RetryCallState") -> None:
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
    )(again)
