"""Types of options that several commands share or that click has none for."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from mailroom.errors import MailroomError, coded
from mailroom.values.names import (
    MAX_COUNT,
    inbox_name,
    key_text,
    meant,
    node_name,
    origin_name,
    topic_name,
    topic_pattern,
    utf8,
)


class WholeNumber(click.IntRange):
    """A whole number within bounds. click's own type calls text that is none "not a valid integer range"."""

    name = "whole number"


class Number(click.FloatRange):
    """A number within bounds."""

    name = "number"


class OneOf(click.Choice[str]):
    """One of some words; of a word that is nearly one of them it says which was meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(f"{error.message}{meant(str(value), self.choices)}", ctx, param) from None


LIMIT = WholeNumber(1, MAX_COUNT)


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parameter type that runs one of the library's checks and turns its error into wrong usage."""

    def text(given: str) -> str:
        try:
            check(given)
        except MailroomError as error:
            raise click.BadParameter(coded(str(error), error)) from None
        return given

    return text


INBOX, KEY, TOPIC, PATTERN = map(checked, (inbox_name, key_text, topic_name, topic_pattern))
NODE, ORIGIN = map(checked, (node_name, origin_name))
TEXT = checked(lambda text: utf8(text, "text"))


def seconds(text: str) -> float:
    """Return a finite number of seconds >= 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise click.BadParameter(f"{text!r} is not a number of seconds >= 0.")
    return number


def moment(text: str) -> datetime:
    """Parse a time: ISO 8601 with a zone, or +SECONDS from now."""
    try:
        if text.startswith("+"):
            return datetime.now(UTC) + timedelta(seconds=seconds(text[1:]))
        given = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        given = None
    if given is None or given.tzinfo is None:
        raise click.BadParameter(
            f"{text!r} is not a time: give one with its zone, such as 2030-01-31T09:00:00+01:00, or +SECONDS from now."
        )
    return given


def seconds_above_0(text: str) -> float:
    """Return a finite number of seconds > 0."""
    number = seconds(text)
    if number == 0:
        raise click.BadParameter("0 seconds is too short.")
    return number
