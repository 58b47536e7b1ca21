"""Bytes pass at a rate, which may change while they wait, and a meter says how fast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.rate_limit import RateLimiter, RateMeter


class Clock:
    """A clock that goes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.waits: list[float] = []

    def now_ms(self) -> int:
        return round(self.now * 1000)

    def monotonic_s(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


def test_bytes_pass_at_the_rate_and_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock, clock.wait)
    for _ in range(4):
        limiter.take(500)
    assert clock.now == pytest.approx(1_002)
    assert max(clock.waits) <= 0.2
    clock.now += 3_600
    before = clock.now
    limiter.take(1000)
    assert clock.now - before == pytest.approx(1)


def test_a_stop_ends_the_wait_for_bandwidth() -> None:
    clock = Clock()
    RateLimiter(1, clock, lambda _: True).take(1 << 40)
    assert clock.now == 1_000


def test_rate_zero_sets_no_limit() -> None:
    def never(_: float) -> bool:
        raise AssertionError("nothing to wait for")

    RateLimiter(0, Clock(), never).take(1 << 40)


@pytest.mark.parametrize(("rate", "ends_s"), [(4000, 1_001.75), (500, 1_007), (0, 1_001)])
def test_a_rate_that_changes_counts_for_those_who_wait(rate: int, ends_s: float) -> None:
    """Operator rule R9: 4,000 bytes, the first second at 1,000 a second, then at
    another rate.
    """
    clock = Clock()

    def wait(seconds: float) -> bool:
        clock.now += seconds
        if limiter.bytes_per_second == 1000 and clock.now >= 1_001:
            limiter.change(rate)
        return False

    limiter = RateLimiter(1000, clock, wait)
    limiter.take(4000)
    assert clock.now == pytest.approx(ends_s, abs=0.001)


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.floats(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_no_bytes_pass_faster_than_the_rates_allow(steps: list[tuple[int, int, float]]) -> None:
    """A law: bytes through so far are at most what the rates in effect allow."""
    clock = Clock()
    limiter = RateLimiter(steps[0][0], clock, clock.wait)
    for rate, length, idle_s in steps:
        clock.now += idle_s
        limiter.change(rate)
        began_s = clock.now
        limiter.take(length)
        assert (clock.now - began_s) * rate == pytest.approx(length, rel=0.01, abs=1)


def test_a_meter_measures_the_last_minute() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    assert meter.bytes_per_second() == 0
    for _ in range(10):
        meter.count(600)
        clock.now += 1
    assert meter.bytes_per_second() == 600
    clock.now += 50
    assert meter.bytes_per_second() == pytest.approx(100, rel=0.11)
    clock.now += 60
    assert meter.bytes_per_second() == 0
