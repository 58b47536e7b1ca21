"""Hours of the day in which automatic mode starts nothing."""

import re
import time
from dataclasses import dataclass

_TEXT = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A time of each day, in minutes after local midnight; midnight may lie in it."""

    begin_minute: int
    end_minute: int

    def __post_init__(self) -> None:
        assert 0 <= self.begin_minute < 24 * 60
        assert 0 <= self.end_minute < 24 * 60
        assert self.begin_minute != self.end_minute

    def has(self, now_s: float) -> bool:
        """Whether a time, in seconds since the epoch, is in them."""
        local = time.localtime(now_s)
        minute = local.tm_hour * 60 + local.tm_min
        if self.begin_minute < self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute


def parse_quiet_hours(text: str) -> QuietHours:
    """The hours in text such as "08:00-18:30".

    Raises:
        ValueError: it is something else, or begins when it ends.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f'expected hours such as "08:00-18:30", found {text!r}')
    begin, end = (60 * int(found[at]) + int(found[at + 1]) for at in (1, 3))
    if begin == end:
        raise ValueError(f"{text!r} begins when it ends")
    return QuietHours(begin, end)


def check_quiet_hours(text: str) -> str:
    """The text, if it is that of quiet hours.

    Raises:
        ValueError: it is not.
    """
    parse_quiet_hours(text)
    return text
