"""A healthy node under load: the doctor finds nothing, and no alert's condition is ever true."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.doctor.soak.prometheus import Prometheus
from tests.doctor.soak.scene import Scene

EACH_S = 3.0
SHOWN = 3


@dataclass
class Calm:
    """What was seen: how often it was looked, and each false alarm."""

    looks: int = 0
    slowest_s: float = 0
    done: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Any] = field(default_factory=dict)


def watched(scene: Scene, prometheus: Prometheus | None, minutes: float, say: Callable[[str], None]) -> Calm:
    """Watch a node for so long. The limits of the doctor are its own, and so are the alert rules.

    A condition that is true for less than its alert's `for` is an alarm here, too: no healthy node comes so near.
    """
    calm = Calm()
    until = time.monotonic() + minutes * 60
    while (begun := time.monotonic()) < until:
        for schema in scene.schemas:
            for found in scene.doctor("--schema", schema).values():
                _note(calm, f"{found['id']} of {schema}", found["evidence"], say)
        calm.looks += 1
        calm.slowest_s = max(calm.slowest_s, time.monotonic() - begun)
        if prometheus:
            for alert, state in prometheus.alerts().items():
                _note(calm, alert, state, say)
            for rule, error in prometheus.broken_rules().items():
                _note(calm, f"{rule} cannot be evaluated", error, say)
        time.sleep(max(0.0, EACH_S - (time.monotonic() - begun)))
    calm.done = scene.done()
    return calm


def _note(calm: Calm, alarm: str, evidence: Any, say: Callable[[str], None]) -> None:
    calm.alarms[alarm] += 1
    if calm.alarms[alarm] <= SHOWN:
        calm.examples.setdefault(alarm, evidence)
        say(f"false alarm: {alarm}: {evidence}")
