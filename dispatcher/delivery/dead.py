"""What the log says of messages that have just become dead letters: each by itself, with the command that shows it."""

import logging
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import psycopg

from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async
from mailroom.values import shell

log = logging.getLogger("mailroom.dispatcher")

TOLD = 20  # of one transaction; the others are counted


class _Dead(NamedTuple):
    id: int
    inbox: str | None
    message_id: UUID
    topic: str
    key: str
    reason: str


# In a statement of its own after the commit, since a delivery returns counts only and mostly has none of these. With
# others who make dead letters of the same stage at the same time, it may tell of theirs.
NEWEST = Sql(
    """
SELECT id, inbox, message_id, topic, key,
       CASE WHEN reason LIKE 'RaiseException (P0001)%%' THEN 'RaiseException (P0001)' ELSE reason END
FROM {schema}.dead_letter WHERE stage = ANY (%(stages)s::text[]) ORDER BY id DESC LIMIT %(limit)s::bigint
""",
    into=_Dead,
)


def _newest(schema: str, stages: Sequence[str], limit: int) -> Operation[list[_Dead]]:
    # A list, for sessions that share connections: the rows are read before the next statement.
    return NEWEST.named((yield NEWEST.at(schema=schema)(stages=list(stages), limit=limit)))


async def tell_of_dead(connection: psycopg.AsyncConnection, schema: str, stages: Sequence[str], count: int) -> None:
    """Log the last `count` dead letters of these stages; the connection is an autocommit one."""
    if not count:
        return
    try:
        rows = await run_async(connection, _newest(schema, stages, min(count, TOLD)))
    except psycopg.errors.InsufficientPrivilege:
        rows = []  # a role that may make dead letters and not read them: the count says enough
    for each in reversed(rows):
        command = shell.command("dead-letter", "show", each.id, schema=schema)
        log.error(
            "message %s (topic %s, key %r) is a dead letter now: %s. See: %s",
            each.message_id, each.topic, each.key, each.reason.removesuffix("."), command,
            extra={
                "inbox": each.inbox, "message_id": each.message_id, "topic": each.topic, "key": each.key,
                "error": each.reason, "outcome": "dead", "command": command,
            },
        )  # fmt: skip
    if count > len(rows):
        command = shell.command("dead-letter", "list", "--stage", stages[0], schema=schema)
        others = f"{count - len(rows):,} {'more ' if rows else ''}message{'s' if count - len(rows) > 1 else ''}"
        log.error("%s moved to dead_letter. See: %s", others, command, extra={"outcome": "dead", "command": command})
