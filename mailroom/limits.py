"""Bounds that callers give: how many of something at most."""

from mailroom.errors import InvalidMessage

MAX_COUNT = 1_000_000


def count(number: int, what: str) -> int:
    """Return `number` if it is an int from 1 to a million, else raise `InvalidMessage`; `what` names it."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_COUNT:
        raise InvalidMessage(f"{what} is {number!r}; give an int from 1 to 1,000,000.")
    return number


def count_or_all(number: int | None, what: str) -> int | None:
    """`count`, with None for as many as there are."""
    return None if number is None else count(number, what)
