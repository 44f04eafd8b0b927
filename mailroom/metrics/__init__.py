"""Metrics of a node and of a process: what they are, where each comes from, and the ways out of a program of yours."""

from mailroom.metrics.endpoint import Endpoint
from mailroom.metrics.library import Collector, instrument, serve

__all__ = ["Collector", "Endpoint", "instrument", "serve"]
