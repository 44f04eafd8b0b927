"""Cancel a message that is not yet delivered: it is deleted from the outbox, or from what is scheduled.

Under the dispatch lock, as everything that may not happen beside a delivery. A row lock would not do: a delivery may
copy the rows of its snapshot (`dispatcher.delivery.plain`), also one that another session has deleted meanwhile. Nor
may a delivery pass over the message: if the caller then rolls back, later ones of its key would have overtaken it. So
nothing is delivered until the caller's transaction ends, and a session that idles in it is ended by the server.
"""

from uuid import UUID

from mailroom.order.clock import DISPATCH_LOCK
from mailroom.schema import acts, checking
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.operation import IN_TRANSACTION, Operation, Row, Sql
from mailroom.sql.sight import seeing

IDLE_S = 5

# The tables have no index on ids, which would cost every message. So they are searched before the lock is taken.
FIND = Sql(
    """
SELECT position, NULL::timestamptz FROM {schema}.outbox WHERE message_id = %(id)s::uuid
UNION ALL
SELECT position, deliver_at FROM {schema}.scheduled WHERE message_id = %(id)s::uuid
""",
    columns=("bigint", "timestamptz"),
)
# A shorter limit of the caller's own stays.
LIMIT_IDLING = Sql(
    """
SELECT set_config('idle_in_transaction_session_timeout', '{idle_s}s', true)
WHERE current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN '1 ms' AND '{idle_s} s'
""",
    columns=("text",),
    idle_s=IDLE_S,
)
# By its place and its id: a message of another origin may have been given its position, after a restore.
CANCEL = Sql(
    """
WITH place AS MATERIALIZED (
    SELECT position, deliver_at
    FROM unnest(%(positions)s::bigint[], %(times)s::timestamptz[]) AS p (position, deliver_at)),
sent AS (
    DELETE FROM {schema}.outbox AS o USING place AS p
    WHERE p.deliver_at IS NULL AND o.position = p.position AND o.message_id = %(id)s::uuid RETURNING o.key),
scheduled AS (
    DELETE FROM {schema}.scheduled AS s USING place AS p
    WHERE s.deliver_at = p.deliver_at AND s.position = p.position AND s.message_id = %(id)s::uuid RETURNING s.key)
SELECT key FROM sent UNION ALL SELECT key FROM scheduled
""",
    columns=("text",),
)
# A send of the same text meanwhile waits for this transaction, as for any that has the id.
FREE_ONCE = Sql("DELETE FROM {schema}.outbox_jdbc_id WHERE id = %(id)s::uuid")


def cancelling(schema: str, id: UUID, *, free_once: bool = False) -> Operation[list[str]]:
    """Delete the message where it still waits, and return its key; nothing if it is too late.

    A message that was sent under one id several times is deleted each time that it is there.
    """
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from seeing(schema, "outbox", "scheduled")
    if not (found := (yield FIND.at(schema=schema)(id=id))):
        return []
    yield LIMIT_IDLING.at()()
    yield DISPATCH_LOCK.at(schema=schema)()
    keys = yield from _deleting(schema, id, found)
    if not keys:  # Delivered by now, or moved between the two tables. From here on it does not move.
        keys = yield from _deleting(schema, id, (yield FIND.at(schema=schema)(id=id)))
    if keys and free_once:
        yield FREE_ONCE.at(schema=schema)(id=id)
    return keys


def cancelling_by_hand(
    schema: str, id: UUID, actor: str, why: str | None, *, free_once: bool = False
) -> Operation[list[str]]:
    """Do the same for an operator, who is noted in the audit."""
    check_actor(actor, why)
    keys = yield from cancelling(schema, id, free_once=free_once)
    of_it = f"{id}{', its once is free' if free_once else ''}"
    yield from auditing(schema, acts.OUTBOX_CANCEL, [(None, key, 1) for key in keys], actor, why, of_it)
    return keys


def _deleting(schema: str, id: UUID, places: list[Row]) -> Operation[list[str]]:
    rows = yield CANCEL.at(schema=schema)(
        id=id, positions=[position for position, _ in places], times=[time for _, time in places]
    )
    return [key for (key,) in rows]
