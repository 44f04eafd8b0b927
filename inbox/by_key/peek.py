"""Read what is in an inbox without taking anything, and check that the inbox exists."""

from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.expressions import BY_CLOCK, BY_SENT
from mailroom.schema import finding as finding
from mailroom.sql.operation import Operation, Sql

PEEK_KEY = Sql(
    "SELECT {selected} FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text ORDER BY clock LIMIT %(limit)s::bigint",
    columns=COLUMNS,
    selected=SELECTED,
)
PEEK_ANY = Sql(
    "SELECT {selected} FROM {schema}.inbox_{inbox} ORDER BY {by_clock} LIMIT %(limit)s::bigint",
    columns=COLUMNS,
    selected=SELECTED,
    by_clock=BY_CLOCK,
)


PEEK_TOTAL = Sql(
    """
SELECT {selected} FROM {schema}.inbox_{inbox} WHERE %(key)s::text IS NULL OR key = %(key)s::text
ORDER BY {by_sent}, origin LIMIT %(limit)s::bigint
""",
    columns=COLUMNS,
    selected=SELECTED,
    by_sent=BY_SENT,
)


def peeking(schema: str, inbox: str, key: str | None, limit: int) -> Operation[list[Message]]:
    """Return the oldest messages of one key or of all, without taking or locking them."""
    names = {"schema": schema, "inbox": inbox}
    if key is None:
        return messages((yield PEEK_ANY.at(**names)(limit=limit)))
    return messages((yield PEEK_KEY.at(**names)(key=key, limit=limit)))


def peeking_total(schema: str, inbox: str, key: str | None, limit: int) -> Operation[list[Message]]:
    """Do the same in a total inbox."""
    return messages((yield PEEK_TOTAL.at(schema=schema, inbox=inbox)(key=key, limit=limit)))


BACKLOG = Sql("SELECT count(*) FROM {schema}.inbox_{inbox}", columns=("bigint",))
BACKLOG_KEY = Sql("SELECT count(*) FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text", columns=("bigint",))


def counting(schema: str, inbox: str, key: str | None) -> Operation[int]:
    """Count the waiting messages of one key or of all."""
    names = {"schema": schema, "inbox": inbox}
    [(count,)] = yield BACKLOG.at(**names)() if key is None else BACKLOG_KEY.at(**names)(key=key)
    return int(count)
