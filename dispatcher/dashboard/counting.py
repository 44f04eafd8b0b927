"""How many there are of what a page lists, and how many an act on all of them would change."""

from typing import Any, TypeVar

import psycopg
from psycopg import Connection

from dispatcher.dashboard.chosen import AT_ONCE
from dispatcher.dashboard.rendering import unit
from mailroom.cli.acting import counted
from mailroom.figures.failing_keys import COUNTED
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run

T = TypeVar("T")


def in_time(connection: Connection[Any], operation: Operation[T]) -> T | None:
    """Return what an operation reads, None if it takes longer than a statement may: the page is there without it."""
    try:
        with connection.transaction():
            return run(connection, operation)
    except psycopg.errors.QueryCanceled:
        return None


def in_all(number: int | None, what: str) -> str | None:
    """Return how many rows a list has on all its pages, None if that is not known. `what` they are is in the plural."""
    if number is None:
        return None
    return f"{_most(number)} {unit(what, str(number))}"


def at_once(number: int | None, one: str, first: str) -> str:
    """Return how many an act on all would change: each of them, or, of more than 1,000, those that are the `first`."""
    if number is None:
        return f"An unknown number of {one}s"
    if number > AT_ONCE:
        return f"{AT_ONCE:,} {one}s, {first} of {_most(number)}"
    return counted(number, one)


def _most(number: int) -> str:
    return f"more than {COUNTED:,}" if number > COUNTED else f"{number:,}"
