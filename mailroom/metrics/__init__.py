"""Metrics of a node and of a process: what they are, where each comes from, and the ways out of your program."""

from mailroom.metrics.by_minute import (
    InboxStatistics,
    MinuteStatistics,
    minute_statistics,
    minute_statistics_async,
    statistics,
    statistics_async,
)
from mailroom.metrics.endpoint import Endpoint
from mailroom.metrics.library import Collector, instrument, record, serve

__all__ = [
    "Collector",
    "Endpoint",
    "InboxStatistics",
    "MinuteStatistics",
    "instrument",
    "minute_statistics",
    "minute_statistics_async",
    "record",
    "serve",
    "statistics",
    "statistics_async",
]
