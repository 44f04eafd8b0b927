"""A parked total inbox: no message of it is given out until an operator replays or discards.

Its messages stay where they are. Its row in `key_state`, under the key '', says that it is parked. To change that,
or to delete messages, takes a lock on the row first.
"""

from typing import Any

from inbox.by_key.parked_keys import CHOSEN, DISCARDED, NOTIFY, Changed
from inbox.keeping import DISCARDED as ARCHIVED_DISCARDS
from mailroom.figures.keys import HELD
from mailroom.message.answer import ASKS
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.expressions import BY_SENT
from mailroom.schema import acts
from mailroom.schema.audit import auditing
from mailroom.sql.operation import Operation, Sql

IN_ORDER = f"{BY_SENT}, origin"

KEYS = Sql(
    """
SELECT key, (SELECT count(*) FROM {schema}.inbox WHERE inbox = '{inbox}'),
       (SELECT clock FROM {schema}.inbox WHERE inbox = '{inbox}' ORDER BY {in_order} LIMIT 1), attempts::bigint,
       parked_at, last_error
FROM ({chosen}) AS c
""",
    columns=("text", "bigint", "bigint", "bigint", "timestamptz", "text"),
    chosen=CHOSEN,
    in_order=IN_ORDER,
)

MESSAGES = Sql(
    """
SELECT {selected} FROM {schema}.inbox_{inbox}
WHERE EXISTS (SELECT FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = '' AND {held})
ORDER BY {in_order} LIMIT %(limit)s::bigint
""",
    columns=COLUMNS,
    selected=SELECTED,
    held=HELD,
    in_order=IN_ORDER,
)


def reading(schema: str, inbox: str, limit: int) -> Operation[list[Message]]:
    """Return the first messages of a parked inbox; none if it is not parked."""
    return messages((yield MESSAGES.at(schema=schema, inbox=inbox)(limit=limit)))


# As in `inbox.by_key.parked_keys`: the attempts at the first message count from 1 again.
REPLAY = Sql(
    """
WITH restarted AS (
    INSERT INTO {schema}.attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT '{inbox}', '', f.clock, f.message_id, 0, 'replay', coalesce(%(why)s::text, 'replayed')
    FROM (SELECT clock, message_id FROM {schema}.inbox_{inbox} ORDER BY {in_order} LIMIT 1) AS f
    WHERE EXISTS (SELECT FROM {schema}.attempt AS a WHERE a.inbox = '{inbox}' AND a.key = '' AND a.clock = f.clock)),
freed AS (
    DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = '')
SELECT count(*) FROM {schema}.inbox_{inbox}
""",
    columns=("bigint",),
    in_order=IN_ORDER,
)

# The columns are those of `inbox.by_key.parked_keys.DISCARD`.
DISCARD = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT ctid AS place FROM {schema}.inbox_{inbox} ORDER BY {in_order} LIMIT %(limit)s::bigint),
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING doomed WHERE i.ctid = doomed.place
    RETURNING i.*){archived},
freed AS (
    DELETE FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND key = '' AND (SELECT count(*) FROM doomed) = (
        SELECT count(*) FROM {schema}.inbox_{inbox})
    RETURNING key)
SELECT '' AS key, count(*), EXISTS (SELECT FROM freed), NULL::bigint AS clock, NULL::uuid, NULL::text, NULL::text
FROM doomed
UNION ALL
SELECT key, NULL, NULL, clock, message_id, headers::text, (
    SELECT error_class FROM {schema}.attempt AS a
    WHERE a.inbox = '{inbox}' AND a.key = '' AND a.clock = gone.clock ORDER BY id DESC LIMIT 1)
FROM gone WHERE {asks}
ORDER BY key, clock
""",
    columns=DISCARDED,
    in_order=IN_ORDER,
    archived=ARCHIVED_DISCARDS,
    asks=ASKS,
)


def replaying(schema: str, inbox: str, actor: str, why: str | None) -> Operation[Changed]:
    """Free a total inbox, whose key_state row is locked; its messages are in their places."""
    names = {"schema": schema, "inbox": inbox}
    [(number,)] = yield REPLAY.at(**names)(why=why)
    yield from auditing(schema, acts.PARKED_REPLAY, [(inbox, "", number)], actor, why)
    yield NOTIFY.at(**names)()
    return Changed(1, number, 1)


def discarding(schema: str, inbox: str, limit: int | None) -> Operation[list[Any]]:
    """Delete the first messages of a total inbox, whose key_state row is locked; return the rows of `DISCARD`."""
    return DISCARD.named((yield DISCARD.at(schema=schema, inbox=inbox)(limit=limit)))
