"""How a reader sleeps at its source: it listens on its link's channel, and is rung only while readers sleep.

As for workers (`inbox.sessions.wakeup`): a reader takes the shared session lock "asleep", looks once more, and waits. A
stamp tries to lock "asleep" exclusively. If it cannot, it notifies. If it can, it holds the lock until its transaction
ends, and a reader that falls asleep waits for that before its last look.
"""

from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

TRANSIT = "'{schema}.transit'::regclass"
TRANSIT_KEY = locks.key(TRANSIT)
CHANNEL = Sql("SELECT {channel}", columns=("text",), channel=locks.link_channel(TRANSIT, "%(link)s::bigint"))
FALL_ASLEEP = Sql(
    "SELECT pg_advisory_lock_shared({asleep_lock}, {transit_key}) IS NULL",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    transit_key=TRANSIT_KEY,
)
WAKE_UP = Sql(
    "SELECT pg_advisory_unlock_shared({asleep_lock}, {transit_key})",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    transit_key=TRANSIT_KEY,
)


def naming_channel(schema: str, link: int) -> Operation[str]:
    """Return the name of the link's channel, at the source."""
    [(channel,)] = yield CHANNEL.at(schema=schema)(link=link)
    return str(channel)


def falling_asleep(schema: str) -> Operation[None]:
    """Have whatever is stamped from now on ring this session; look for rows once more before you wait."""
    yield FALL_ASLEEP.at(schema=schema)()


def waking_up(schema: str) -> Operation[None]:
    """Be rung no longer."""
    yield WAKE_UP.at(schema=schema)()
