"""Numbers that a caller gives: what is taken, and the one text for what is not."""

import math
from typing import Any

import pytest

from mailroom.errors import ConfigurationError, InvalidMessage
from mailroom.values.numbers import count, count_or_all, seconds, whole
from tests.support.listed import listed


def test_int_within_its_bounds_is_taken() -> None:
    assert [whole(number, "n", -2, 3) for number in (-2, 0, 3)] == [-2, 0, 3]
    assert count(1_000_000, "limit") == 1_000_000
    assert count_or_all(None, "limit") is None


@listed(
    ("given", "told"),
    [(-3, "-3"), (4, "4"), (1.0, "1.0"), (True, "bool"), ("secret", "str"), (None, "NoneType"), (10**90, "10000")],
)  # fmt: skip
def test_what_is_no_int_within_its_bounds_is_refused_and_only_a_number_is_shown(given: Any, told: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"^n must be an int from -2 to 3, not {told}"):
        whole(given, "n", -2, 3)
    with pytest.raises(ValueError, match=r"from 1,000 to 2,000"):
        whole(given, "n", 1_000, 2_000, ValueError)


def test_seconds_are_above_0_unless_0_is_taken_too() -> None:
    assert (seconds(0.5, "s"), seconds(math.inf, "s"), seconds(0, "s", 10, zero=True), seconds(10, "s", 10)) == (
        0.5, math.inf, 0, 10,
    )  # fmt: skip


@listed("given", [-1, 10.5, math.nan, True, "secret", None])
@listed("zero", [True, False])
def test_what_is_no_number_of_seconds_is_refused(given: Any, zero: bool) -> None:
    bounds = "0 or more, at most 10" if zero else "above 0, at most 10"
    with pytest.raises(ConfigurationError, match=rf"^s must be a number of seconds, {bounds}, not (?!secret)"):
        seconds(given, "s", 10, zero=zero)
    with pytest.raises(InvalidMessage, match=r"^s must be a number of seconds, above 0, not 0\."):
        seconds(0, "s", error=InvalidMessage)
