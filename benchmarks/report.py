"""What `mailroom bench` prints: a row per figure for people, or one document with every number."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import mailroom
from benchmarks.measure import Bar, Figure, Spread

COLUMNS = ("measurement", "figure", "median", "spread", "unit", "ratio", "spread of ratio", "to", "bar", "verdict")
NUMBERS = ("median", "spread", "ratio", "spread of ratio")


def rows(figures: Sequence[Figure]) -> Iterator[tuple[object, ...]]:
    """Give the table's rows, in the order of `COLUMNS`."""
    before = ""
    for figure in figures:
        value, ratio = figure.value, figure.ratio
        yield (
            figure.measurement if figure.measurement != before else "",
            figure.line.name,
            _number(value.median),
            f"{_number(value.low)}..{_number(value.high)}",
            figure.line.unit,
            f"{ratio.median:.2f}" if ratio else "",
            f"{ratio.low:.2f}..{ratio.high:.2f}" if ratio else "",
            figure.line.beside or "",
            _limits(figure.line.bar) if figure.line.bar else "",
            {None: "", True: "ok", False: "miss"}[figure.met],
        )
        before = figure.measurement


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
                "to": figure.line.beside,
                "ratio": figure.ratio and _spread(figure.ratio),
                "bar": figure.line.bar and {k: v for k, v in asdict(figure.line.bar).items() if v is not None},
                "met": figure.met,
            }
            for figure in figures
        ],
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.low, "max": spread.high}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _limits(bar: Bar) -> str:
    parts = (
        (">=", bar.ratio_at_least, ".2f"),
        ("<=", bar.ratio_at_most, ".2f"),
        (">=", bar.at_least, ",.0f"),
        ("<=", bar.at_most, ",.0f"),
    )
    return ", ".join(f"{sign} {limit:{form}}" for sign, limit, form in parts if limit is not None)
