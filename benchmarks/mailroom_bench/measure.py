"""Measurements, and how their runs become a median, a spread and a result."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from statistics import median
from typing import TypeAlias

Values: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a measurement runs: the database, in which it makes schemas of its own, and how many messages to use."""

    dsn: str
    messages: int


@dataclass(frozen=True, slots=True)
class Bar:
    """Limits that the product promises to keep, of the ratio and of the value. None is no limit."""

    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float, ratio: float | None) -> bool:
        """Return whether the medians keep every limit."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.ratio_at_least is None or (ratio is not None and ratio >= self.ratio_at_least))
            and (self.ratio_at_most is None or (ratio is not None and ratio <= self.ratio_at_most))
        )


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a measurement; `baseline` names the figure of the same run that it is divided by.

    `peer` names the other program whose figure it is, or beside which ours stands, if there is one.
    """

    name: str
    unit: str = "messages/s"
    baseline: str | None = None
    bar: Bar | None = None
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A named measurement. `run` does it once, on fresh tables, and returns a value for every line."""

    name: str
    about: str
    lines: tuple[Line, ...]
    run: Callable[[Setup], Values]
    missing: Callable[[], str | None] = lambda: None  # says what this machine lacks for it, and how to get that
    absent: Callable[[str], Mapping[str, str]] = lambda _dsn: {}  # peers that are not installed, and how to get them

    def without(self, peers: Collection[str]) -> "Measurement":
        """Return it without the lines of these peers."""
        return replace(self, lines=tuple(line for line in self.lines if line.peer not in peers))


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several runs, and the smallest and largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Summarise one or more values; NaN if any of them is NaN."""
        if any(map(isnan, values)):
            return cls(nan, nan, nan)
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures of one line. `met` is None if it has no bar, or too few messages to judge."""

    measurement: str
    line: Line
    value: Spread
    ratio: Spread | None
    met: bool | None


def measure(
    measurement: Measurement, setup: Setup, runs: int, progress: Callable[[], None] = lambda: None
) -> Iterator[Figure]:
    """Run a measurement `runs` times and yield a figure for each of its lines.

    Ratios are taken within each run, under the same conditions; the figure has the median of the ratios.
    """
    values: list[Values] = []
    for _ in range(runs):
        values.append(measurement.run(setup))
        progress()
    for line in measurement.lines:
        value = Spread.of([run[line.name] for run in values])
        baseline = line.baseline
        ratio = None if baseline is None else Spread.of([run[line.name] / run[baseline] for run in values])
        is_judged = line.bar is not None and not isnan((ratio or value).median)
        met = line.bar.is_met(value.median, ratio.median if ratio else None) if line.bar and is_judged else None
        yield Figure(measurement.name, line, value, ratio, met)
