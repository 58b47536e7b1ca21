"""The picture of a replication: how old the oldest change was that the target lacked.

The axis of the age is logarithmic: a change crosses in milliseconds, and an outage
lasts seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from repair.svg_picture import WIDTH, document

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 28, 128, 52
_HEIGHT = 430
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
# The axis of the age, in ms; what is below the least counts as that.
_LEAST_MS, _MOST_MS = 10, 20_000
_TICKS = ((10, "10 ms"), (100, "0.1 s"), (1_000, "1 s"), (10_000, "10 s"))
_SECONDS_PER_TICK = 5


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened at a moment, in ms from the beginning of the picture. Where it has
    an end, the time between both is shaded.
    """

    at_ms: int
    text: str
    end_ms: int | None = None


def draw_lag(
    title: str, subtitle: str, ages_ms: Sequence[int], step_ms: int, marks: Sequence[Mark]
) -> str:
    """The picture as the text of an SVG file; `ages_ms` has an age for each step."""
    length_ms = len(ages_ms) * step_ms
    drawn = [
        *_axes(length_ms),
        *_shades(marks, length_ms),
        *_curve(ages_ms),
        *_labels(marks, length_ms),
    ]
    rules = (
        ".end{text-anchor:end}.middle{text-anchor:middle}"
        ".grid{stroke:var(--quiet);stroke-opacity:.25}"
        ".outage{fill:var(--corrupt);fill-opacity:.12}.mark{stroke:var(--corrupt);stroke-width:1.5}"
        ".event{fill:var(--corrupt);font-weight:600}"
        ".area{fill:var(--healthy);fill-opacity:.25}"
        ".line{fill:none;stroke:var(--healthy);stroke-width:2;stroke-linejoin:round}"
    )
    return document(title, subtitle, _HEIGHT, drawn, rules)


def _x(at_ms: float, length_ms: int) -> float:
    return _LEFT + _PLOT_WIDTH * at_ms / length_ms


def _y(age_ms: float) -> float:
    age_ms = min(max(age_ms, _LEAST_MS), _MOST_MS)
    share = math.log(age_ms / _LEAST_MS) / math.log(_MOST_MS / _LEAST_MS)
    return _TOP + _PLOT_HEIGHT * (1 - share)


def _axes(length_ms: int) -> list[str]:
    drawn = list[str]()
    for age_ms, text in _TICKS:
        y = _y(age_ms)
        drawn.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_PLOT_WIDTH}"/>')
        drawn.append(f'<text class="quiet end" x="{_LEFT - 10}" y="{y + 5:.1f}">{text}</text>')
    foot = _TOP + _PLOT_HEIGHT + 22
    for second in range(0, length_ms // 1_000 + 1, _SECONDS_PER_TICK):
        x = _x(second * 1_000, length_ms)
        drawn.append(f'<text class="quiet middle" x="{x:.1f}" y="{foot}">{second} s</text>')
    drawn.append(
        f'<text class="quiet end" x="{WIDTH - _RIGHT}" y="{foot + 22}">seconds since the writers'
        " began</text>"
    )
    return drawn


def _shades(marks: Sequence[Mark], length_ms: int) -> list[str]:
    drawn = list[str]()
    for mark in marks:
        x = _x(mark.at_ms, length_ms)
        drawn.append(f'<path class="mark" d="M{x:.1f} {_TOP - 8}v{_PLOT_HEIGHT + 8}"/>')
        if mark.end_ms is not None:
            width = _x(mark.end_ms, length_ms) - x
            drawn.append(
                f'<rect class="outage" x="{x:.1f}" y="{_TOP}" width="{width:.1f}"'
                f' height="{_PLOT_HEIGHT}"/>'
            )
    return drawn


def _curve(ages_ms: Sequence[int]) -> list[str]:
    """The age as steps, filled."""
    width = _PLOT_WIDTH / len(ages_ms)
    path = "".join(
        f"{'L' if at else 'M'}{_LEFT + width * at:.1f} {_y(age_ms):.1f}h{width:.1f}"
        for at, age_ms in enumerate(ages_ms)
    )
    foot = _TOP + _PLOT_HEIGHT
    return [
        f'<path class="area" d="{path}V{foot}H{_LEFT}Z"/>',
        f'<path class="line" d="{path}"/>',
    ]


def _labels(marks: Sequence[Mark], length_ms: int) -> list[str]:
    """What happened, in two lines by turns, so that neighbours do not overlap."""
    drawn = list[str]()
    for number, mark in enumerate(marks):
        x, y = _x(mark.at_ms, length_ms), _TOP - 34 + 20 * (number % 2)
        side = " end" if x > _LEFT + _PLOT_WIDTH * 0.75 else ""
        drawn.append(f'<text class="event{side}" x="{x:.1f}" y="{y}">{escape(mark.text)}</text>')
    return drawn
