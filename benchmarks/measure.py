"""Measure variants of one job in turn, and report them as a table or as JSON.

Machines are shared and their speed varies, so each round runs all variants in turn. A
row compares one of ours with a peer by the medians of the rounds. The ratio is computed
within each round, where other load affects both, and its median is reported. The noise
is the range over all rounds.
"""

import json
import os
import platform
import random
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
    """The rates of one variant, one for each round."""

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
    """A comparison of ours with a peer. `bar` is the least required ratio, `most` the
    greatest; None requires nothing.
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
    def bar_text(self) -> str:
        """The limits, and whether they are met, as text."""
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
        """Print the report to stdout."""
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
                row.bar_text,
            )
        # A pipe has no width, and Rich would cut the table to 80 columns.
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
    """The rates of each variant in each of `rounds` rounds, in units per second; a call
    processes `amount` units.

    Use `time.process_time` as the clock for work on one core: other load disturbs it
    less. Each variant is first called once without measuring, to warm up. The order
    changes from round to round: what a call leaves behind, such as freed memory, does
    not always meet the same one.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for number in range(rounds):
        order = list(variants)
        random.Random(number).shuffle(order)
        for name in order:
            start = clock()
            for _ in range(repeat):
                variants[name]()
            rates[name].append(amount * repeat / (clock() - start))
    return {name: Samples(name, tuple(values)) for name, values in rates.items()}


def in_series(name: str, *stages: Samples) -> Samples:
    """The greatest possible rate of these stages in sequence, for each round."""
    rounds = zip(*(stage.rates for stage in stages), strict=True)
    return Samples(name, tuple(1 / sum(1 / rate for rate in rates) for rates in rounds))


def _short(number: float) -> str:
    """A number with three significant digits and without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, load at the end {os.getloadavg()[0]:.1f}"
