"""Types of options: numbers, and texts that other processes store."""

import re

import click

from merkle.limits import TEXT_CHARACTERS_MAX

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,100}")
_FRACTION = re.compile(r"[+-]?[0-9]{1,100}(?:\.[0-9]{1,100})?")


class WholeNumber(click.IntRange):
    """An integer within limits. Python's own conversion also takes digits of other
    scripts and underscores, which are typing errors here.
    """

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The number; anything but digits from 0 to 9 and a sign is an error."""
        if isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value):
            self.fail(f"{value[:100]!r} is not a whole number.", param, ctx)
        return super().convert(int(value), param, ctx)


class Fraction(click.FloatRange):
    """A number within limits, with or without a decimal point."""

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; anything but digits from 0 to 9, a point and a sign is an
        error.
        """
        if isinstance(value, str) and not _FRACTION.fullmatch(value):
            self.fail(f"{value[:100]!r} is not a number.", param, ctx)
        return super().convert(float(value), param, ctx)


class Reason(click.ParamType[str]):
    """A reason that is stored with a job and in audit files. Controllers and agents
    refuse others, but only after they were asked for the rest.
    """

    name = "text"

    def __init__(self, *, is_required: bool = False) -> None:
        self._is_required = is_required

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, if it is a line of a length that is stored."""
        if self._is_required and not value.strip():
            self.fail("it is empty", param, ctx)
        if len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
            self.fail(f"expected at most {TEXT_CHARACTERS_MAX} printable characters", param, ctx)
        return value
