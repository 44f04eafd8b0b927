"""Read what is in an inbox without taking anything, and check that the inbox exists."""

from mailroom.errors import ConfigurationError
from mailroom.message import COLUMNS, SELECTED, Message, messages
from mailroom.schema import BY_CLOCK, BY_SENT
from mailroom.schema import finding as finding
from mailroom.sql.operation import Operation, Sql
from mailroom.total import is_total

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


def peeking(
    schema: str, inbox: str, key: str | None, limit: int, *, is_total: bool = False
) -> Operation[list[Message]]:
    """Return the oldest messages of one key or of all, without taking or locking them."""
    names = {"schema": schema, "inbox": inbox}
    if is_total:
        return messages((yield PEEK_TOTAL.at(**names)(key=key, limit=limit)))
    if key is None:
        return messages((yield PEEK_ANY.at(**names)(limit=limit)))
    return messages((yield PEEK_KEY.at(**names)(key=key, limit=limit)))


def finding_by_key(schema: str, inbox: str) -> Operation[None]:
    """Raise `UnknownInbox` unless there is such an inbox, and `ConfigurationError` if it has total order."""
    yield from finding(schema, inbox)
    if (yield from is_total(schema, inbox)):
        raise ConfigurationError(
            f"Inbox {inbox!r} has total order. Spark reads and drains inboxes in parts, and their order would be lost: "
            "use a Worker, or subscribe another inbox to the same topics for Spark.",
            code="MR-total-order-not-in-parts",
        )


BACKLOG = Sql("SELECT count(*) FROM {schema}.inbox_{inbox}", columns=("bigint",))
BACKLOG_KEY = Sql("SELECT count(*) FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text", columns=("bigint",))


def counting(schema: str, inbox: str, key: str | None) -> Operation[int]:
    """Count the waiting messages of one key or of all."""
    names = {"schema": schema, "inbox": inbox}
    [(count,)] = yield BACKLOG.at(**names)() if key is None else BACKLOG_KEY.at(**names)(key=key)
    return int(count)
