"""Metrics in your program: over our own endpoint, in prometheus-client's registry, or as OpenTelemetry's.

Neither library is needed for the rest, so each is imported where it is asked for.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from mailroom.health import Probed
from mailroom.metrics.endpoint import Endpoint
from mailroom.metrics.family import PREFIX, Family, Histogram, Samples
from mailroom.metrics.process import FAMILIES, ProcessMetrics
from mailroom.metrics.recorder import Recorder
from mailroom.metrics.scrape import UP, Scrape
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.values.names import DEFAULT_SCHEMA

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

FRESH_S = 1.0  # OpenTelemetry asks for each metric by itself, all of them at once


@contextmanager
def serve(address: str, *probed: Probed, dsn: str | None = None, schema: str = DEFAULT_SCHEMA) -> Iterator[Endpoint]:
    """Answer `/metrics`, `/livez`, `/readyz` and `/startupz` at HOST:PORT inside this block, as `--metrics` does.

    `probed` are the workers and lanes of the program that the probes are about. `dsn` leads to the node, None as for
    `mailroom.dsn`. Yields the endpoint, whose `port` is the one taken for port 0. Raises `ConfigurationError` if the
    address cannot be had, or if nothing names a database.
    """
    home, process = Home(settings.dsn(dsn)), ProcessMetrics(schema)
    end = process.listen()
    try:
        with Endpoint(address, probed, [Scrape(lambda: home, process, schema=schema)]) as endpoint:
            yield endpoint
    finally:
        end()


@contextmanager
def record(dsn: str | None = None, *, schema: str = DEFAULT_SCHEMA) -> Iterator[None]:
    """Keep statistics of what this process does inside this block, as `--statistics` does.

    Once a minute a thread writes what happened, over a session that it opens for that, and once more at the end of the
    block. It also serves async programs. `dsn` leads to the node, None as for `mailroom.dsn`; its role is one that
    reaps or delivers. What cannot be written waits until the database answers again; what may have been written is not
    written twice. Raises `ConfigurationError` if nothing names a database.
    """
    home, process = Home(settings.dsn(dsn)), ProcessMetrics(schema)
    end = process.listen()
    try:
        with recording(lambda: home, process, schema):
            yield
    finally:
        end()


@contextmanager
def recording(home: Callable[[], Home], process: ProcessMetrics, schema: str) -> Iterator[None]:
    """Write meanwhile what a process counts of a node."""
    recorder = Recorder(home, process, schema=schema)
    recorder.start()
    try:
        yield
    finally:
        recorder.close()


class Collector:
    """The metrics of a node and of this process for prometheus-client: `REGISTRY.register(Collector())`.

    It counts from when it is made. `dsn` leads to the node, None as for `mailroom.dsn`. Raises `ConfigurationError` if
    nothing names a database.
    """

    def __init__(self, dsn: str | None = None, *, schema: str = DEFAULT_SCHEMA) -> None:
        self._scrape, self._end = _counting(dsn, schema)

    def collect(self) -> Iterable[Any]:
        """Return the metrics as they are now; none before the database has answered once."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        node, metrics = self._scrape.read() or ("", {})
        for family, samples in metrics.items():
            name, labels = PREFIX + family.name, ("node", *family.labels)
            if family.kind == "histogram":
                histograms = HistogramMetricFamily(name, family.help, labels=labels)
                for values, value in samples:
                    if isinstance(value, Histogram):
                        buckets = [(le, float(count)) for le, count in _buckets(value)]
                        histograms.add_metric([node, *values], buckets, value.sum)
                yield histograms
                continue
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(name.removesuffix("_total"), family.help, labels=labels)
            for values, value in samples:
                if not isinstance(value, Histogram):
                    metric.add_metric([node, *values], value)
            yield metric

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering it asks no database."""
        return ()

    def close(self) -> None:
        """Count no more, and close the session."""
        self._end()
        self._scrape.close()


def instrument(meter: "Meter", dsn: str | None = None, *, schema: str = DEFAULT_SCHEMA) -> Callable[[], None]:
    """Give the metrics of a node and of this process to OpenTelemetry's `meter`; return what ends that.

    It counts from now on. Names are as on the page of the metrics, with a dot after `mailroom`. OpenTelemetry takes no
    histogram that other code has counted, so each is three counters, as Prometheus has it: `_bucket` (with `le`),
    `_sum` and `_count`. `dsn` leads to the node, None as for `mailroom.dsn`. Raises `ConfigurationError` if nothing
    names a database.
    """
    from opentelemetry.metrics import Observation

    scrape, end = _counting(dsn, schema)
    latest = _Latest(scrape.read)

    def observing(family: Family, part: str) -> "Callable[[CallbackOptions], Iterable[Observation]]":
        def observe(_: "CallbackOptions") -> "Iterable[Observation]":
            node, metrics = latest.get() or ("", {})
            for values, value in metrics.get(family, ()):
                labels = {"node": node, **dict(zip(family.labels, values, strict=True))}
                if not isinstance(value, Histogram):
                    yield Observation(value, labels)
                elif part == "_bucket":
                    for le, count in _buckets(value):
                        yield Observation(count, labels | {"le": le})
                else:
                    yield Observation(value.sum if part == "_sum" else sum(value.counts), labels)

        return observe

    for family in (*FAMILIES, UP):
        for part in ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",):
            name = f"mailroom.{family.name}{part}"
            make = meter.create_observable_gauge if family.kind == "gauge" else meter.create_observable_counter
            unit = family.unit if part in ("", "_sum") else ""
            make(name, [observing(family, part)], unit, family.help)

    def ending() -> None:
        end()
        latest.end()
        scrape.close()

    return ending


def _counting(dsn: str | None, schema: str) -> tuple[Scrape, Callable[[], None]]:
    home, process = Home(settings.dsn(dsn)), ProcessMetrics(schema)
    return Scrape(lambda: home, process, schema=schema), process.listen()


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Return the bounds, as text, and how many values are at or below each."""
    bounds = ["+Inf" if bound == inf else repr(bound) for bound in (*histogram.bounds, inf)]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


class _Latest:
    """One look for all metrics that are asked for at about the same time."""

    def __init__(self, read: Callable[[], tuple[str, dict[Family, Samples]] | None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._at = -inf
        self._found: tuple[str, dict[Family, Samples]] | None = None
        self._has_ended = False

    def get(self) -> tuple[str, dict[Family, Samples]] | None:
        with self._lock:
            if not self._has_ended and time.monotonic() - self._at > FRESH_S:
                self._found = self._read()
                self._at = time.monotonic()
            return self._found

    def end(self) -> None:
        with self._lock:
            self._has_ended, self._found = True, None
