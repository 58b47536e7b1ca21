"""Measure variants of one job side by side, and report them as a table or as JSON.

Machines are shared and their speed drifts, so no variant is measured alone: each round
runs all of them in turn. A row sets one of ours beside its peer, both by the median of
the rounds; their ratio is taken within each round, where whatever else the machine does
concerns both, and its median counts. The noise is the span of all rounds.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

ROUNDS = 7


@dataclass(frozen=True)
class Samples:
    """What was measured of one variant in every round."""

    name: str
    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def noise(self) -> str:
        return (
            f"{_short(min(self.rates))}-{_short(max(self.rates))}"
            if len(set(self.rates)) > 1
            else ""
        )


@dataclass(frozen=True)
class Row:
    """One of ours beside its peer; `bar` is the least ratio that is asked for, if one
    is, `most` the greatest.
    """

    job: str
    unit: str
    ours: Samples
    peer: Samples
    bar: float | None = None
    most: float | None = None

    @property
    def ratio(self) -> float:
        if len(self.ours.rates) == len(self.peer.rates):
            return statistics.median(
                a / b for a, b in zip(self.ours.rates, self.peer.rates, strict=True)
            )
        return self.ours.median / self.peer.median

    @property
    def verdict(self) -> str:
        if self.bar is None and self.most is None:
            return ""
        holds = (self.bar is None or self.ratio >= self.bar) and (
            self.most is None or self.ratio <= self.most
        )
        return "met" if holds else "missed"

    @property
    def asked(self) -> str:
        """The bar and whether it is met, for people."""
        least = "" if self.bar is None else f">= {self.bar:g} "
        return f"{least}{'' if self.most is None else f'<= {self.most:g} '}{self.verdict}"


@dataclass
class Report:
    """The rows of one benchmark."""

    title: str
    notes: Sequence[str] = ()
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        job: str,
        unit: str,
        ours: Samples,
        peer: Samples,
        bar: float | None = None,
        *,
        most: float | None = None,
    ) -> None:
        self.rows.append(Row(job, unit, ours, peer, bar, most))

    def show(self, *, as_json: bool) -> None:
        """Print to stdout."""
        if as_json:
            print(json.dumps(self._as_json(), indent=1))
            return
        caption = "\n".join((*self.notes, _machine()))
        table = Table(title=self.title, caption=caption, caption_justify="left")
        for heading in (
            "job",
            "ours",
            "noise",
            "peer",
            "its figure",
            "noise",
            "unit",
            "ratio",
            "bar",
        ):
            table.add_column(
                heading, justify="left" if heading in ("job", "peer", "unit") else "right"
            )
        for row in self.rows:
            table.add_row(
                row.job,
                _short(row.ours.median),
                row.ours.noise,
                row.peer.name,
                _short(row.peer.median),
                row.peer.noise,
                row.unit,
                f"{_short(row.ratio)}x",
                row.asked,
            )
        # A pipe has no width of its own; a table that is cut says nothing.
        Console(width=None if sys.stdout.isatty() else 170).print(table)

    def _as_json(self) -> dict[str, object]:
        def of(samples: Samples) -> dict[str, object]:
            return {"name": samples.name, "median": samples.median, "rates": samples.rates}

        return {
            "benchmark": self.title,
            "notes": list(self.notes),
            "machine": {
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "load": os.getloadavg(),
            },
            "python": platform.python_version(),
            "rows": [
                {
                    "job": row.job,
                    "unit": row.unit,
                    "ours": of(row.ours),
                    "peer": of(row.peer),
                    "ratio": row.ratio,
                    "bar": row.bar,
                    "most": row.most,
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
        }


def interleaved(
    amount: float,
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = ROUNDS,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """The rate of every variant in each of `rounds` rounds; each call does `amount` of
    the unit.

    What is said of one core is measured by `time.process_time`, which other work on the
    machine disturbs less.

    A variant is called once more at first, so that nothing is measured that happens
    only once.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            start = clock()
            for _ in range(repeat):
                run()
            rates[name].append(amount * repeat / (clock() - start))
    return {name: Samples(name, tuple(values)) for name, values in rates.items()}


def in_series(name: str, *stages: Samples) -> Samples:
    """The best that stages one after the other can do, round by round."""
    rounds = zip(*(stage.rates for stage in stages), strict=True)
    return Samples(name, tuple(1 / sum(1 / rate for rate in rates) for rates in rounds))


def _short(number: float) -> str:
    """Three digits that count, and never an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, load at the end {os.getloadavg()[0]:.1f}"
