"""Break a node in each way, see that it is named, mend it, and see that nothing is left."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.doctor.soak.prometheus import Prometheus
from tests.doctor.soak.scene import Scene
from tests.doctor.soak.ways import LIMITS, Way
from tests.support.waiting import WITHIN_S

POLL_S = 0.2


@dataclass
class Named:
    """What became of a way: after how many seconds it was named, and what was wrong."""

    way: Way
    named: dict[str, float]
    also: set[str]
    missing: set[str]
    left: set[str]  # what was wrong still, long after it was mended
    mended_s: float

    @property
    def is_well(self) -> bool:
        """Whether all named it, and nothing was left."""
        return not self.missing and not self.left


def broken(scene: Scene, way: Way, prometheus: Prometheus | None) -> Named:
    """Break a node in this way, and mend it."""
    wanted = {*way.findings, *(way.alerts if prometheus else ())}
    named: dict[str, float] = {}
    seen: dict[str, dict[str, Any]] = {}
    with way.breaking(scene) as dsn:
        since = time.monotonic()

        def look() -> bool:
            seen.update(found := scene.doctor(*LIMITS, dsn=dsn))
            for each in (*found, *_firing(prometheus)):
                named.setdefault(each, time.monotonic() - since)
            return wanted <= set(named)

        _within(look)
        if way.by_command:
            for each in way.findings:
                if each in seen:
                    _follow(scene, seen[each]["command"])
    since = time.monotonic()
    left = lasting(scene, prometheus)
    return Named(way, named, set(named) - wanted, wanted - set(named), left, time.monotonic() - since)


def lasting(scene: Scene, prometheus: Prometheus | None, within_s: float = WITHIN_S) -> set[str]:
    """Wait until nothing is wrong, and return what still is, if it lasts."""
    left: set[str] = set()

    def is_well() -> bool:
        nonlocal left
        alerts = prometheus.alerts() if prometheus else {}
        left = {*scene.doctor(*LIMITS), *(f"{name} ({state})" for name, state in alerts.items())}
        return not left

    _within(is_well, within_s)
    return left


def _firing(prometheus: Prometheus | None) -> set[str]:
    alerts = prometheus.alerts() if prometheus else {}
    return {name.removeprefix("Mailroom") for name, state in alerts.items() if state == "firing"}


def _follow(scene: Scene, command: str) -> None:
    """Run the command of a finding: SQL ends in a semicolon."""
    if command.endswith(";"):
        for statement in filter(None, map(str.strip, command.split(";"))):
            scene.execute(statement)
    else:
        program, *arguments = shlex.split(command)
        assert program == "mailroom", command
        scene.mailroom(*arguments)


def _within(condition: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    """Look until it is so, and tell whether it came to be in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
