"""Numbers that a caller gives: checks of their bounds, and one text for all that are outside.

A bool is not a number here. A value that is not a number is named only by its type, since it may be a user's data.
"""

import math

from mailroom.errors import ConfigurationError, InvalidMessage, MailroomError
from mailroom.values.names import MAX_COUNT, shown

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
TEN_YEARS_S = 3_650 * 86_400


def whole(number: int, what: str, least: int, most: int, error: type[Exception] = InvalidMessage) -> int:
    """Return `number` if it is an int from `least` to `most`, else raise `error`; `what` names it."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise _refused(error, f"{what} must be an int from {least:,} to {most:,}, not {_named(number)}.")
    return int(number)


def count(number: int, what: str) -> int:
    """Return `number` if it is an int from 1 to 1,000,000, else raise `InvalidMessage`; `what` names it."""
    return whole(number, what, 1, MAX_COUNT)


def count_or_all(number: int | None, what: str) -> int | None:
    """`count`, or None for no limit."""
    return None if number is None else count(number, what)


def seconds(
    number: float,
    what: str,
    most: float = math.inf,
    *,
    zero: bool = False,
    of: str = "seconds",
    error: type[Exception] = ConfigurationError,
) -> float:
    """Return a number of seconds, or of what `of` says, if it is above 0 (with `zero` also 0) and at most `most`.

    Else raise `error`.
    """
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number <= most or (number == 0 and not zero):
        bounds = f"{'0 or more' if zero else 'above 0'}{'' if most == math.inf else f', at most {most:,.0f}'}"
        raise _refused(error, f"{what} must be a number of {of}, {bounds}, not {_named(number)}.")
    return number


def _refused(error: type[Exception], text: str) -> Exception:
    return error(text, code="MR-invalid-argument") if issubclass(error, MailroomError) else error(text)


def _named(given: object) -> str:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return shown(given) if is_number else type(given).__name__
