"""Rate and ETA (rules R1 and R2): by the last minute of work, none too early, never of
more than there is.
"""

from hypothesis import assume, given
from hypothesis import strategies as st

from runtime.eta import RateWindow, duration_text

STEPS = st.lists(st.tuples(st.floats(0.01, 20), st.integers(0, 1000)), min_size=1, max_size=40)


def window(steps: list[tuple[float, int]]) -> tuple[RateWindow, float]:
    made, now_s = RateWindow(0.0), 0.0
    for wait_s, count in steps:
        now_s += wait_s
        made.add(count, now_s)
    return made, now_s


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 30)), min_size=1, max_size=9),
    st.integers(1, 50_000),
)
def test_no_eta_is_given_before_thirty_seconds_or_a_hundredth(
    steps: list[tuple[float, int]], total: int
) -> None:
    made, now_s = window(steps)
    if now_s < 30 and made.done < total / 100:
        assert made.eta_s(total) is None


@given(STEPS, st.integers(0, 50_000))
def test_work_beyond_its_total_is_finishing(steps: list[tuple[float, int]], total: int) -> None:
    made, _ = window(steps)
    eta_s = made.eta_s(total)
    assert (eta_s == 0) == (made.done >= total)
    assert eta_s is None or eta_s >= 0


@given(st.floats(10, 10_000), st.integers(1, 10_000), st.integers(60, 300), st.integers(1, 1 << 40))
def test_only_the_last_minute_counts(slow_s: float, before: int, seconds: int, rest: int) -> None:
    """However slow the beginning was, or however long the pause."""
    made = RateWindow(0.0)
    made.add(before, slow_s)
    for second in range(1, seconds + 1):
        made.add(100, slow_s + second)
    eta_s = made.eta_s(made.done + rest)
    assert eta_s is not None
    assert abs(eta_s - rest / 100) <= 0.02 * rest / 100


@given(STEPS, st.integers(0, 10_000), st.integers(1, 50_000))
def test_what_is_skipped_is_done_but_not_fast(
    steps: list[tuple[float, int]], skipped: int, rest: int
) -> None:
    made, _ = window(steps)
    rate = made.rate()
    made.skip(skipped)
    assert made.rate() == rate
    assert made.done == sum(count for _, count in steps) + skipped


@given(st.floats(0, 10**8), st.floats(0, 10**8))
def test_a_longer_duration_reads_as_no_shorter(one: float, other: float) -> None:
    sizes = {"d": 86_400, "h": 3600, "m": 60, "s": 1}

    def seconds(text: str) -> int:
        return sum(int(part[:-1]) * sizes[part[-1]] for part in text.split())

    assume(one <= other)
    shown = seconds(duration_text(one))
    assert shown <= seconds(duration_text(other))
    assert shown <= one + 0.5
    # Two units: off by less than one of the smaller.
    assert one - shown <= max(0.5, one / 24)
