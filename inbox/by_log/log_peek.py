"""Look at what an inbox that reads a log has not taken yet: in its own table, and in the log after its positions.

Of the log only what it wants.
"""

from mailroom.message.columns import MESSAGE
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.registry.log_topics import IS_WANTED
from mailroom.sql.operation import Operation, Sql, filled

UNREAD = """(
    SELECT clock, sent_clock, origin, delivered_at, {message} FROM {schema}.inbox_{inbox}
    WHERE {of_key}
    UNION ALL
    SELECT o.* FROM (
        SELECT DISTINCT ON (lane) lane, clock FROM {schema}.receipts_{inbox}
        ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
        SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, {message} FROM {schema}.log_{log} AS o
        WHERE o.lane = at.lane AND o.clock > at.clock AND {is_wanted} AND {of_key}{first}) AS o) AS unread"""
OF_ANY = "(%(key)s::text IS NULL OR key = %(key)s::text)"
PEEK = Sql(
    "SELECT {selected} FROM {unread} ORDER BY clock LIMIT %(limit)s::bigint",
    columns=COLUMNS,
    selected=SELECTED,
    unread=filled(
        UNREAD, message=MESSAGE, of_key=OF_ANY, is_wanted=IS_WANTED, first=" ORDER BY o.clock LIMIT %(limit)s::bigint"
    ),
)
COUNT = Sql(
    "SELECT count(*) FROM {unread}",
    columns=("bigint",),
    unread=filled(UNREAD, message=MESSAGE, of_key=OF_ANY, is_wanted=IS_WANTED, first=""),
)


def peeking(schema: str, inbox: str, log: str, key: str | None, limit: int) -> Operation[list[Message]]:
    """Return the oldest messages of one key or of all, without taking or locking them."""
    return messages((yield PEEK.at(schema=schema, inbox=inbox, log=log)(key=key, limit=limit)))


def counting(schema: str, inbox: str, log: str, key: str | None) -> Operation[int]:
    """Count the messages of one key or of all that wait to be taken."""
    [(count,)] = yield COUNT.at(schema=schema, inbox=inbox, log=log)(key=key)
    return int(count)
