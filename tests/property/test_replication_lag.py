"""When a change has arrived, by the logs of both stores."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from admin.demo.replication_lag import (
    CrossedChange,
    crossed_changes,
    oldest_ages_ms,
    summary,
)
from replicator.stores.port import Change, ChangeKind, ObjectFacts

# The states of a key: ETags, empty for none.
STATES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=8)
CHANGES = st.lists(
    st.builds(
        CrossedChange,
        st.just("k"),
        st.integers(1_000, 2_000),
        st.none() | st.integers(2_000, 3_000),
    ),
    max_size=20,
)


def log(states: Sequence[tuple[int, str]], key: str = "k") -> list[Change]:
    """A log of one key: when it got which ETag."""
    return [
        Change(at, key, "", ChangeKind.PUT, facts=ObjectFacts(key, 1, etag, ms), time_ms=ms)
        if etag
        else Change(at, key, "", ChangeKind.DELETE, time_ms=ms)
        for at, (ms, etag) in enumerate(states, 1)
    ]


@given(STATES, st.integers(0, 9))
def test_what_is_applied_one_by_one_has_the_delay_of_each(states: list[str], late: int) -> None:
    made = [(10 * at, state) for at, state in enumerate(states, 1)]
    found = crossed_changes(log(made), log([(ms + late, state) for ms, state in made]))
    assert [one.made_ms for one in found] == [ms for ms, _ in made]
    assert all(one.lag_ms is not None and one.lag_ms <= late for one in found)
    if len(set(states)) == len(states) and "" not in states:
        assert {one.lag_ms for one in found} == {late}


@given(STATES)
def test_the_last_state_brings_over_all_that_it_overtook(states: list[str]) -> None:
    made = [(10 * at, state) for at, state in enumerate(states, 1)]
    found = crossed_changes(log(made), log([(1_000, states[-1])]))
    assert all(one.arrived_ms is not None for one in found)


def test_a_change_that_did_not_arrive_has_no_lag() -> None:
    first, second = crossed_changes(log([(1, "a"), (5, "b")]), log([(3, "a")]))
    assert (first.lag_ms, second.lag_ms) == (2, None)
    assert summary([first, second]).max_ms == 2
    assert summary([second]).p99_ms is None
    assert second.was_pending(9, 10)
    assert not first.was_pending(4, 10)


def test_what_was_put_and_deleted_before_it_crossed_is_not_missing() -> None:
    found = crossed_changes(log([(1, "a"), (8, "")]), [])
    assert [one.arrived_ms for one in found] == [8, 8]


@given(CHANGES, st.integers(1, 500))
def test_no_step_is_older_than_the_oldest_that_was_missing(
    changes: list[CrossedChange], step_ms: int
) -> None:
    ages = oldest_ages_ms(changes, 1_000, 3_000, step_ms)
    assert len(ages) == -(-2_000 // step_ms)
    for at, age_ms in enumerate(ages):
        begin, end = 1_000 + at * step_ms, 1_000 + (at + 1) * step_ms
        expected = (
            min(end, 3_000 if one.arrived_ms is None else one.arrived_ms) - one.made_ms
            for one in changes
            if one.made_ms < end and (one.arrived_ms is None or one.arrived_ms >= begin)
        )
        assert age_ms == max(expected, default=0)
