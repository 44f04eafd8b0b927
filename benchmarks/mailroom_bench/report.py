"""The output of `mailroom bench`: a table with a row per figure, or one JSON document with every number."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from math import isnan
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mailroom

from .measure import Bar, Figure, Spread

WIDTH = 125  # without a terminal: wide enough that nothing is folded
RESULTS = {None: "", True: "ok", False: "miss"}


def show(figures: Sequence[Figure]) -> None:
    """Print the table: a section per measurement, with a row per figure."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("figure", "median", "spread", "ratio", "spread", "to", "bar", "result"):
        grid.add_column(column, justify="right" if column in ("median", "ratio") else "left", overflow="fold")
    for name, section in groupby(figures, key=lambda figure: figure.measurement):
        grid.add_section()
        grid.add_row(name.upper())
        for figure in section:
            grid.add_row(*_row(figure))
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(grid)


def _row(figure: Figure) -> tuple[str, ...]:
    line, value, ratio = figure.line, figure.value, figure.ratio
    unit = {"messages/s": "/s", "": ""}.get(line.unit, f" {line.unit}")
    return (
        f"  {line.name}",
        "too few" if isnan(value.median) else _number(value.median) + unit,
        "" if isnan(value.median) else f"{_number(value.low)}..{_number(value.high)}",
        "" if ratio is None or isnan(ratio.median) else f"{ratio.median:.2f}",
        "" if ratio is None or isnan(ratio.median) else f"{ratio.low:.2f}..{ratio.high:.2f}",
        line.baseline or "",
        _limits(line.bar) if line.bar else "",
        RESULTS[figure.met],
    )


def document(figures: Sequence[Figure], *, postgres: str, runs: int, messages: int) -> dict[str, Any]:
    """Return everything as one JSON document."""
    return {
        "mailroom": mailroom.__version__,
        "postgres": postgres,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "runs": runs,
        "messages": messages,
        "figures": [
            {
                "measurement": figure.measurement,
                "name": figure.line.name,
                "unit": figure.line.unit,
                "value": _spread(figure.value),
                "to": figure.line.baseline,
                "ratio": figure.ratio and _spread(figure.ratio),
                "bar": figure.line.bar and {k: v for k, v in asdict(figure.line.bar).items() if v is not None},
                "met": figure.met,
            }
            for figure in figures
        ],
    }


def _spread(spread: Spread) -> dict[str, float] | None:
    if isnan(spread.median):
        return None  # JSON has no NaN
    return {"median": spread.median, "min": spread.low, "max": spread.high}


def _number(value: float) -> str:
    """Format three significant digits, with k for thousands."""
    if value >= 999.5:
        return f"{value / 1_000:.3g}k" if value < 999_500 else f"{value / 1_000:,.0f}k"
    return f"{value:.3g}"


def _limits(bar: Bar) -> str:
    parts = (
        (">=", bar.ratio_at_least, ".2f"),
        ("<=", bar.ratio_at_most, ".2f"),
        (">=", bar.at_least, ",g"),
        ("<=", bar.at_most, ",g"),
    )
    return ", ".join(f"{sign} {limit:{form}}" for sign, limit, form in parts if limit is not None)
