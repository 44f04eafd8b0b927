"""The janitor: keeps each inbox's floor, where claims start their scans, and sends due scheduled messages on."""

from dispatcher.deliver import LOCK
from mailroom.operation import Operation, Sql
from mailroom.schema import BY_CLOCK

STEP = 1_000  # clocks a floor may lag behind before it is worth a transaction

INBOXES = Sql("SELECT name FROM {schema}.inbox_registry ORDER BY name", columns=("text",))


def listing_inboxes(schema: str) -> Operation[list[str]]:
    """Return the names of the node's inboxes."""
    rows = yield INBOXES.at(schema=schema)()
    return [row[0] for row in rows]


PROBE = Sql(
    f"""
SELECT floor, coalesce((SELECT clock - 1 FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} > r.floor
                        ORDER BY {BY_CLOCK} LIMIT 1), last_value)
FROM {{schema}}.inbox_registry r, {{schema}}.clock WHERE name = '{{inbox}}'
""",
    columns=("bigint", "bigint"),
)


def lagging(schema: str, inbox: str) -> Operation[bool]:
    """Tell whether the inbox's floor could be raised by enough to be worth it; a look, nothing more."""
    rows = yield PROBE.at(schema=schema, inbox=inbox)()
    return bool(rows) and rows[0][1] - rows[0][0] >= STEP


HOLD = Sql("SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE", columns=("bigint",))
OLDEST = Sql(
    f"SELECT clock FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} > %(floor)s::bigint ORDER BY {BY_CLOCK} LIMIT 1",
    columns=("bigint",),
)
CLOCK = Sql("SELECT last_value FROM {schema}.clock", columns=("bigint",))
RAISE = Sql(
    "UPDATE {schema}.inbox_registry SET floor = %(floor)s::bigint WHERE name = '{inbox}' AND floor < %(floor)s::bigint"
)


def raising_floor(schema: str, inbox: str) -> Operation[None]:
    """Raise the inbox's floor to just below its oldest message, in a READ COMMITTED transaction of its own.

    The row is locked first and the oldest read in a later statement: a row that somebody is reaping still counts,
    since its delete may be rolled back, and one that is being delivered has a higher clock than any that was.
    """
    names = {"schema": schema, "inbox": inbox}
    rows = yield HOLD.at(**names)()
    if not rows:
        return
    floor = rows[0][0]
    oldest = yield OLDEST.at(**names)(floor=floor)
    if not oldest:
        # With none alive only the clock bounds what may come, and only while no delivery is under way.
        yield LOCK.at(schema=schema)()
        oldest = yield OLDEST.at(**names)(floor=floor)
    if oldest:
        raised = oldest[0][0] - 1
    else:
        [(raised,)] = yield CLOCK.at(schema=schema)()
    yield RAISE.at(**names)(floor=raised)
