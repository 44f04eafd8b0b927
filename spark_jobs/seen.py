"""What a driver saw of its node, so that its tasks elsewhere notice if they see another node, or an older state."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

import psycopg

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run

CAUGHT_UP_WITHIN_S = 60.0
POLL_INTERVAL_S = 0.1

# A copy has the node's id too; a standby or an older state of the server's files has the server's identity too, but not
# the log as far as the driver has seen it. A crash of the server may take back what was visible and not yet durable.
# D-spark-1: A driver sends what it saw along.
SEE = Sql(
    """
SELECT n.id::text, c.system_identifier, d.oid::bigint, w.visible - '0/0'::pg_lsn, w.durable - '0/0'::pg_lsn, w.standby
FROM {schema}.node AS n, pg_catalog.pg_control_system() AS c, pg_catalog.pg_database AS d,
     (SELECT coalesce(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END,
                      '0/0'::pg_lsn),
             coalesce(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END,
                      '0/0'::pg_lsn),
             pg_is_in_recovery()) AS w (visible, durable, standby)
WHERE d.datname = current_database()
""",
    columns={
        "node": "text",
        "server": "bigint",
        "database": "bigint",
        "visible": "numeric",
        "durable": "numeric",
        "is_standby": "boolean",
    },
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's id, its server, the database in it, and up to where the server's log was visible, and durable.

    Both are bytes of that log (an LSN as a number).
    """

    node: str
    server: int
    database: int
    visible: int
    durable: int


def seeing(schema: str) -> Operation[tuple[Seen, bool]]:
    """Return what this session sees, and whether that is a standby."""
    [found] = SEE.named((yield SEE.at(schema=schema)()))
    seen = Seen(found.node, *map(int, (found.server, found.database, found.visible, found.durable)))
    return seen, bool(found.is_standby)


def demand_the_same(
    connection: psycopg.Connection,
    schema: str,
    seen: Seen,
    *,
    clock: Callable[[], float] = monotonic,
    pause: Callable[[float], None] = sleep,
) -> None:
    """Raise `ConfigurationError` unless this session sees all that the driver has seen; a standby may catch up first.

    The session commits by itself. A standby is waited for up to `CAUGHT_UP_WITHIN_S` seconds; `clock` and `pause` are
    its time.
    """
    end = clock() + CAUGHT_UP_WITHIN_S
    while True:
        found, is_standby = run(connection, seeing(schema))
        differ = [name for name in ("node", "server", "database") if getattr(found, name) != getattr(seen, name)]
        if differ:
            raise ConfigurationError(
                f"This process reaches another {differ[0]} than the driver: {_named(found)}, and the driver "
                f"{_named(seen)}. Let the same variable or service name the same database on all machines, and run the "
                "job again.",
                code="MR-spark-other-database",
            )
        if found.visible >= (seen.visible if is_standby else seen.durable):
            return
        if not is_standby or clock() >= end:
            raise ConfigurationError(
                f"This process reaches {'a standby that lags behind' if is_standby else 'an older state of the server'}"
                " and does not see what the driver saw. Name the primary on all machines, with several hosts by "
                "target_session_attrs=read-write, and run the job again.",
                code="MR-spark-older-state",
            )
        pause(POLL_INTERVAL_S)


def _named(seen: Seen) -> str:
    return f"node {seen.node} in database {seen.database} of server {seen.server}"
