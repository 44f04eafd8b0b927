"""A metric, its samples, and the text in which Prometheus takes them.

The text is our own and not a client library's: that took 64 ms for the eight gauges of 1,000 inboxes, this 3.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf, isinf
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

PREFIX = "mailroom_"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name without the prefix, its kind, what it says, and the names of its labels beside `node`.

    `column` is the field of a figure that has its value, if it is one of `mailroom.figures`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    column: str = ""

    @property
    def unit(self) -> str:
        """Its unit as OpenTelemetry writes it: s, 1 for a share, nothing for a number of things."""
        return {"seconds": "s", "ratio": "1"}.get(self.name.rpartition("_")[2], "")


@dataclass(slots=True)
class Histogram:
    """How often values fell below each bound. `bounds` rise; the last bucket has no bound."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def copy(self) -> "Histogram":
        """Return one that does not change any more."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of these values. Those of one batch are mostly in one bucket."""
        if not values:
            return
        lowest = bisect_left(self.bounds, min(values))
        if lowest == bisect_left(self.bounds, max(values)):
            self.counts[lowest] += len(values)
        else:
            for bucket in map(bisect_left, repeat(self.bounds), values):
                self.counts[bucket] += 1
        self.sum += sum(values)


# The values of a metric's labels in their order, and its value.
Samples: TypeAlias = Iterable[tuple[tuple[str, ...], "float | Histogram"]]


def of_rows(rows: Iterable[Any], *families: Family) -> dict[Family, Samples]:
    """Return the samples of metrics whose figures are these rows. The first fields of a row are the labels."""
    found = list(rows)
    # A boolean is a number.
    return {each: [(row[: len(each.labels)], getattr(row, each.column) + 0) for row in found] for each in families}


def text(nodes: Mapping[str, Mapping[Family, Samples]]) -> str:
    """Return the metrics of nodes, by their names, in Prometheus' text format, version 0.0.4."""
    lines = []
    for family in dict.fromkeys(family for metrics in nodes.values() for family in metrics):
        name = PREFIX + family.name
        lines.append(f"# HELP {name} {_escaped(family.help)}\n# TYPE {name} {family.kind}\n")
        names = ("node", *family.labels)
        for node, metrics in nodes.items():
            for labels, value in metrics.get(family, ()):
                label = ",".join(f'{each}="{_quoted(of)}"' for each, of in zip(names, (node, *labels), strict=True))
                if isinstance(value, Histogram):
                    lines.extend(_histogram(name, label, value))
                else:
                    lines.append(f"{name}{{{label}}} {_number(value)}\n")
    return "".join(lines)


def _histogram(name: str, label: str, value: Histogram) -> Iterable[str]:
    total = 0
    for bound, count in zip((*value.bounds, inf), value.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{label},le="{_number(bound)}"}} {total}\n'
    yield f"{name}_sum{{{label}}} {_number(value.sum)}\n{name}_count{{{label}}} {total}\n"


def _number(value: float) -> str:
    return repr(value) if not isinf(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
