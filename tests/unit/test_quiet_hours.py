"""Quiet hours of automatic mode: how they are written, and when they are."""

import time

import pytest

from scm.quiet_hours import QuietHours, check_quiet_hours, parse_quiet_hours


def at(hour: int, minute: int) -> float:
    """That local time of some day."""
    return time.mktime((2026, 3, 2, hour, minute, 0, 0, 0, -1))


def test_hours_of_a_day_begin_with_their_first_minute_and_end_before_their_last() -> None:
    quiet = parse_quiet_hours("08:00-18:30")
    assert quiet == QuietHours(480, 1110)
    assert not quiet.has(at(7, 59))
    assert quiet.has(at(8, 0))
    assert quiet.has(at(18, 29))
    assert not quiet.has(at(18, 30))


def test_midnight_may_lie_in_them() -> None:
    quiet = parse_quiet_hours("22:00-06:00")
    assert [quiet.has(at(hour, 0)) for hour in (21, 22, 23, 0, 5, 6)] == [
        False, True, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "8:00-18:00", "08:00", "24:00-06:00", "08:00-08:00"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|begins when"):
        check_quiet_hours(text)
