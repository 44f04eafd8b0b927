"""Types of options that several commands share or that click has none for."""

import math

import click

from mailroom.limits import MAX_COUNT

LIMIT = click.IntRange(1, MAX_COUNT)


def seconds(text: str) -> float:
    """Return a finite number of seconds from 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise click.BadParameter(f"{text!r} is no number of seconds from 0.")
    return number


def seconds_above_0(text: str) -> float:
    """Return a finite number of seconds above 0."""
    number = seconds(text)
    if number == 0:
        raise click.BadParameter("0 seconds is too short.")
    return number
