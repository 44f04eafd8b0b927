"""Types of options that click has none for."""

import math
from typing import Any

import click


class Seconds(click.ParamType[float]):
    """A number of seconds, finite and not negative; `positive` excludes 0."""

    name = "seconds"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds as a float."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and (seconds > 0 if self._positive else seconds >= 0)):
            self.fail(f"{value!r} is no number of seconds {'above' if self._positive else 'from'} 0.", param, ctx)
        return seconds
