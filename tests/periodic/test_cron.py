"""Cron: the times of an expression in a time zone, also where its clocks are set forward or back."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mailroom.errors import InvalidMessage
from mailroom.values.cron import NAMED, Cron

MINUTE = timedelta(minutes=1)


def times(expression: str, zone: str, start: str) -> Iterator[str]:
    """Yield the times of an expression after `start`, a wall time in the zone, as they are written there."""
    cron = Cron(expression, zone)
    moment = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone))
    while True:
        later = cron.after(moment)
        assert later > moment.astimezone(UTC)
        moment = later
        yield moment.astimezone(cron.zone).isoformat(" ", "minutes")


TIMES = [
        # A fixed time in the hour that is shown twice comes once, the first time.
        ("30 2 * * *", "Europe/Paris", "2026-10-24 12:00", ["2026-10-25 02:30+02:00", "2026-10-26 02:30+01:00"]),
        ("15,45 1 * * *", "America/New_York", "2026-11-01 00:00", ["2026-11-01 01:15-04:00", "2026-11-01 01:45-04:00",
                                                                  "2026-11-02 01:15-05:00"]),
        # An interval goes by the time that passes: the hour comes twice.
        ("*/30 * * * *", "Europe/Paris", "2026-10-25 01:59", ["2026-10-25 02:00+02:00", "2026-10-25 02:30+02:00",
                                                              "2026-10-25 02:00+01:00", "2026-10-25 02:30+01:00",
                                                              "2026-10-25 03:00+01:00"]),
        ("@hourly", "Europe/Paris", "2026-10-25 01:59", ["2026-10-25 02:00+02:00", "2026-10-25 02:00+01:00"]),
        # What falls into the gap runs at its end, once.
        ("30 2 * * *", "Europe/Paris", "2026-03-28 12:00", ["2026-03-29 03:00+02:00", "2026-03-30 02:30+02:00"]),
        ("0,30 2 * * *", "Europe/Paris", "2026-03-29 00:00", ["2026-03-29 03:00+02:00", "2026-03-30 02:00+02:00"]),
        ("0 3 * * *", "Europe/Paris", "2026-03-29 00:00", ["2026-03-29 03:00+02:00", "2026-03-30 03:00+02:00"]),
        ("*/30 * * * *", "Europe/Paris", "2026-03-29 01:29", ["2026-03-29 01:30+01:00", "2026-03-29 03:00+02:00"]),
        # The gap begins at midnight.
        ("@daily", "America/Santiago", "2026-09-05 12:00", ["2026-09-06 01:00-03:00", "2026-09-07 00:00-03:00"]),
        # Half-hours, south of the equator; a summer time of half an hour.
        ("30 2 * * *", "Australia/Adelaide", "2026-04-04 12:00", ["2026-04-05 02:30+10:30", "2026-04-06 02:30+09:30"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00", ["2026-10-04 02:30+11:00", "2026-10-05 02:15+11:00"]),
        ("45 5 * * *", "Asia/Kathmandu", "2026-01-01 05:45", ["2026-01-02 05:45+05:45"]),
        # A day that was left out.
        ("0 9 30 12 *", "Pacific/Apia", "2011-12-29 12:00", ["2011-12-31 00:00+14:00", "2012-12-30 09:00+14:00"]),
        # Leap days, ends of months, names.
        ("0 0 29 2 *", "UTC", "2096-03-01 00:00", ["2104-02-29 00:00+00:00"]),
        ("0 0 31 * *", "UTC", "2026-03-31 00:00", ["2026-05-31 00:00+00:00", "2026-07-31 00:00+00:00"]),
        ("0 0 L * *", "UTC", "2028-01-31 00:00", ["2028-02-29 00:00+00:00", "2028-03-31 00:00+00:00"]),
        ("30 7 * * mon-fri", "UTC", "2026-11-27 08:00", ["2026-11-30 07:30+00:00"]),
        ("0 12 13 * fri", "UTC", "2026-11-10 00:00", ["2026-11-13 12:00+00:00", "2026-11-20 12:00+00:00"]),
        ("@weekly", "UTC", "2026-11-27 00:00", ["2026-11-29 00:00+00:00"]),
        ("@monthly", "UTC", "2026-12-01 00:00", ["2027-01-01 00:00+00:00"]),
        ("@yearly", "UTC", "2026-01-01 00:00", ["2027-01-01 00:00+00:00"]),
]  # fmt: skip


def test_times_are_those_of_the_zone() -> None:
    for expression, zone, start, found in TIMES:
        assert list(islice(times(expression, zone, start), len(found))) == found, expression


FIELD = {
    "minute": st.sampled_from(["*", "*/7", "0", "30", "15,45", "0-59/20"]),
    "hour": st.sampled_from(["*", "*/2", "1", "2", "0,2,3", "1-3"]),
    "day": st.sampled_from(["*", "*", "4,5,29,30,31"]),
}
# A day before the clocks of a zone change, in UTC.
CHANGES = [
    ("Europe/Paris", "2026-03-28"), ("Europe/Paris", "2026-10-24"), ("America/New_York", "2026-03-07"),
    ("America/New_York", "2026-10-31"), ("Australia/Lord_Howe", "2026-04-03"), ("Australia/Lord_Howe", "2026-10-02"),
    ("Australia/Adelaide", "2026-10-02"), ("America/Santiago", "2026-04-04"), ("America/Santiago", "2026-09-05"),
    ("Pacific/Apia", "2011-12-29"), ("Asia/Kathmandu", "2026-01-01"), ("UTC", "2026-06-30"),
]  # fmt: skip


def model(expression: str, zone: str, start: datetime, minutes: int) -> list[datetime]:
    """The times in this many minutes after `start`, by looking at the clock each minute."""
    minute, hour, *_ = expression.split()
    is_fixed = not minute.startswith("*") and not hour.startswith("*")
    found = []
    shown = start.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    last = shown + minutes * MINUTE + timedelta(days=2)
    matching = set(takewhile(lambda wall: wall <= last, CronSim(expression, shown - timedelta(days=2))))
    for nth in range(1, minutes + 1):
        local = (start + nth * MINUTE).astimezone(ZoneInfo(zone))
        before, shown = shown, local.replace(tzinfo=None, fold=0)
        if is_fixed:
            passed = int((shown - before) / MINUTE)
            comes = not local.fold and any(shown - each * MINUTE in matching for each in range(passed))
        else:
            comes = shown in matching
        if comes:
            found.append(start + nth * MINUTE)
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(("Europe/Paris", "2026-10-24"), "30", "2", "*", 0)
@given(st.sampled_from(CHANGES), *FIELD.values(), st.integers(0, 600))
def test_times_are_those_at_which_somebody_at_the_clock_would_act(
    change: tuple[str, str], minute: str, hour: str, day: str, begin: int
) -> None:
    zone, date = change
    expression = f"{minute} {hour} {day} * *"
    cron = Cron(expression, zone)
    start = datetime.fromisoformat(date).replace(hour=8, tzinfo=UTC) + begin * MINUTE
    end = start + 1_800 * MINUTE
    found, moment = [], start
    while (moment := cron.after(moment)) <= end:
        found.append(moment)
    assert found == model(expression, zone, start, 1_800)
    if found:  # and the last of them is found without all the others
        assert cron.latest(found[0], end) == found[-1]
        assert cron.latest(found[0], found[0]) == found[0]


def test_last_of_millions_is_found_at_once() -> None:
    asked = []

    class Counted(Cron):
        def after(self, moment: datetime) -> datetime:
            asked.append(moment)
            return super().after(moment)

    first = datetime(2000, 1, 1, tzinfo=UTC)
    assert Counted("* * * * *", "UTC").latest(first, first + 10_000_000 * MINUTE) == first + 10_000_000 * MINUTE
    assert len(asked) < 50


NO_TIMES: list[tuple[Any, str]] = [
    ("* * * *", "4 fields"),
    ("0 * * * * *", "6 fields"),
    ("", "0 fields"),
    ("@reboot", "1 fields"),
    ("60 * * * *", "Bad minute"),
    ("0 24 * * *", "Bad hour"),
    ("0 0 30 2 *", "Bad day-of-month"),
    ("0 0 * * funday", "Bad day-of-week"),
    ("0 0 */20 * mon#2", "no year"),
    ("9" * 201, "200 characters"),
    (5, "200 characters"),
]


def test_expression_that_names_no_time_is_refused_with_an_example() -> None:
    for expression, why in NO_TIMES:
        with pytest.raises(InvalidMessage, match=r"'30 7 \* \* mon-fri'") as caught:
            Cron(expression, "UTC")
        assert why in str(caught.value)
        assert caught.value.code == "MR-invalid-cron"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("0123456789*,-/#LW@ monfri", max_size=20))
def test_expression_is_read_or_refused(expression: str) -> None:
    with suppress(InvalidMessage):  # and nothing else
        cron = Cron(expression, "UTC")
        assert cron.after(datetime(2026, 1, 1, tzinfo=UTC)) > datetime(2026, 1, 1, tzinfo=UTC)


def test_unknown_zone_is_refused() -> None:
    zones: list[Any] = ["", "Europe", "Europe/Pariss", "../UTC", "/etc/localtime", "UTC\0", "x" * 200, None]
    for zone in zones:
        with pytest.raises(InvalidMessage, match="such as Europe/Paris") as caught:
            Cron("@daily", zone)
        assert caught.value.code == "MR-invalid-time-zone"


def test_names_are_expressions() -> None:
    start = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    for name, expression in NAMED.items():
        assert Cron(name, "UTC").after(start) == Cron(expression, "UTC").after(start)
