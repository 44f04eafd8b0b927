"""The schedule of a periodic message: what is sent by now, what was missed, and that its next time always rises."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailroom.message.periodic import Missed
from outbox.periodic.schedule import MOST, Schedule, due_text, message_id

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


def hourly(missed: Missed, jitter_s: float = 0) -> Schedule:
    return Schedule("hourly", "@hourly", "UTC", missed, jitter_s)


def test_nothing_is_sent_before_its_time() -> None:
    assert hourly("all").by(NOON, NOON - SECOND) == ([], NOON)


def test_what_is_due_is_sent_whatever_is_done_about_missed_ones() -> None:
    for missed in ("skip", "once", "all"):
        for late in (0, 1, 60):
            assert hourly(missed).by(NOON, NOON + late * SECOND) == ([NOON], NOON + HOUR)


def test_missed_ones_are_skipped() -> None:
    assert hourly("skip").by(NOON, NOON + 61 * SECOND) == ([], NOON + HOUR)
    assert hourly("skip").by(NOON, NOON + 5.5 * HOUR) == ([], NOON + 6 * HOUR)
    # One that is due now is none of them.
    assert hourly("skip").by(NOON, NOON + 5 * HOUR + SECOND) == ([NOON + 5 * HOUR], NOON + 6 * HOUR)


def test_missed_ones_are_sent_as_one() -> None:
    assert hourly("once").by(NOON, NOON + 5.5 * HOUR) == ([NOON + 5 * HOUR], NOON + 6 * HOUR)


def test_missed_ones_are_all_sent_in_order_and_so_many_at_a_time() -> None:
    assert hourly("all").by(NOON, NOON + 2.5 * HOUR) == ([NOON, NOON + HOUR, NOON + 2 * HOUR], NOON + 3 * HOUR)
    sent, following = hourly("all").by(NOON, NOON + 1_000 * HOUR)
    assert sent == [NOON + nth * HOUR for nth in range(MOST)]
    assert following == NOON + MOST * HOUR


def test_delay_depends_on_name_and_time_alone_and_is_spread() -> None:
    schedule = hourly("once", jitter_s=600)
    delays = [(schedule.sent_at(NOON + nth * HOUR) - NOON - nth * HOUR) / SECOND for nth in range(200)]
    assert delays == [
        (hourly("once", 600).sent_at(NOON + nth * HOUR) - NOON - nth * HOUR) / SECOND for nth in range(200)
    ]
    assert 0 <= min(delays) < 60
    assert 540 < max(delays) <= 600
    other = Schedule("other", "@hourly", "UTC", "once", 600)
    assert other.sent_at(NOON) != schedule.sent_at(NOON)
    assert schedule.by(NOON, schedule.sent_at(NOON) - SECOND) == ([], NOON)
    assert schedule.by(NOON, schedule.sent_at(NOON)) == ([NOON], NOON + HOUR)


def test_id_is_for_ever() -> None:
    node = UUID("8f6f4c0e-0000-4000-8000-000000000001")
    assert message_id(node, "nightly", NOON) == UUID("fc6cbe26-f7b5-5130-a092-c771f88282db")
    assert message_id(node, "nightly", NOON + HOUR) != message_id(node, "nightly", NOON)
    assert due_text(NOON) == "2026-11-26T12:00:00+00:00"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["* * * * *", "*/5 * * * *", "30 2 * * *", "@hourly", "0,1 2,3 * * *"]),
    st.sampled_from(["UTC", "Europe/Paris", "Australia/Lord_Howe"]),
    st.sampled_from(["skip", "once", "all"]),
    st.sampled_from([0.0, 20.0, 3_600.0]),
    st.lists(st.one_of(st.integers(1, 90), st.integers(1, 200_000)), max_size=12),
)
def test_next_time_rises_and_no_time_is_sent_twice(
    cron: str, zone: str, missed: Missed, jitter_s: float, steps: list[int]
) -> None:
    schedule = Schedule("s", cron, zone, missed, jitter_s)
    now = datetime(2026, 10, 24, 20, tzinfo=UTC)
    due = schedule.after(now)
    sent: list[datetime] = []
    for step in steps:
        now += step * SECOND
        found, following = schedule.by(due, now)
        assert following > due or not found
        assert len(found) == MOST or schedule.sent_at(following) > now
        assert all(schedule.sent_at(each) <= now for each in found)
        sent += found
        due = following
    assert sent == sorted(set(sent))
    if missed == "all":  # of all up to the last none is left out
        expected: list[datetime] = []
        moment = datetime(2026, 10, 24, 20, tzinfo=UTC)
        while len(expected) < len(sent):
            expected.append(moment := schedule.after(moment))
        assert sent == expected
