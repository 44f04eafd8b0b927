"""Inboxes that read logs: disk that one holds, a lane that stands while others go on, and what was dropped unread."""

from collections.abc import Callable
from datetime import timedelta

from mailroom.doctor.finding import Asking, DoctorCheck, Examination, Found, Limits
from mailroom.figures.logs import LogReading
from mailroom.sql.operation import Operation, Sql

NOW = Sql("SELECT clock_timestamp()", columns=("timestamptz",))


def _holds(each: LogReading, age_s: Callable[..., float], limits: Limits) -> str | None:
    if each.held_since is None or age_s(each.held_since) < limits.held_s:
        return None
    return (
        f"inbox {each.inbox}: holds {each.held_segments} segments of log {each.log}, {each.held_bytes:,} bytes, since "
        f"{_shown(age_s(each.held_since))}"
    )


def _stands(each: LogReading, age_s: Callable[..., float], limits: Limits) -> str | None:
    if each.behind_s < limits.lane_s or each.is_paused:
        return None
    return (
        f"inbox {each.inbox}: others were read {_shown(each.behind_s)} further than lane {each.lane} of log "
        f"{each.log}, whose oldest message has waited for {_shown(each.oldest_s)}"
    )


def _lost(each: LogReading, age_s: Callable[..., float], limits: Limits) -> str | None:
    if each.lost_at is None or each.lost_since is None or age_s(each.lost_at) > limits.lost_s:
        return None
    return (
        f"inbox {each.inbox}: {each.lost:,} messages of log {each.log} since {each.lost_since:%Y-%m-%d %H:%M:%S%z}, "
        f"the last {_shown(age_s(each.lost_at))} ago"
    )


def _shown(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def _asking(
    tells: Callable[[LogReading, Callable[..., float], Limits], str | None],
) -> Asking:
    """Return how a check looks that asks the same of each inbox; not of those that cannot be read now."""

    def ask(look: Examination) -> Operation[Found]:
        [(now,)] = yield NOW.at()()
        readers = yield from look.readers()
        lines = [(each.inbox, tells(each, lambda at: (now - at).total_seconds(), look.limits)) for each in readers]
        return [(inbox, line) for inbox, line in lines if line is not None]

    return ask


CHECKS = (
    DoctorCheck("M054", _asking(_holds), "mailroom worker run MODULE:WORKER", of_tables=True),
    DoctorCheck("M055", _asking(_stands), "mailroom log status --schema {schema}", of_tables=True),
    DoctorCheck("M056", _asking(_lost), "mailroom log status --schema {schema}", of_tables=True),
)
