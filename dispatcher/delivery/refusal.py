"""Refusal: find all messages of a batch that the database refuses, and move them to `dead_letter`.

A constraint, trigger or index that a user has put on an inbox may refuse a message.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import errors

from dispatcher.delivery.deliver import OLDEST_FITTING
from dispatcher.delivery.floor import START, ScanStart
from mailroom.message.columns import MESSAGE, MOVING, listed
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.registry.routing import GETS, ROUTE
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sqlstate import OF_THE_DATA


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The position of a message that the database refused, and the reason."""

    position: int
    reason: str


def reason_of(sqlstate: str, *names: str | None) -> str:
    """Return a reason from the names of constraint, table and column. Not the error's detail, which repeats the row."""
    try:
        kind = errors.lookup(sqlstate).__name__
    except KeyError:
        kind = "DatabaseError"
    return " ".join([f"{kind} ({sqlstate})", *(name for name in names if name)])


# Without expired and scheduled messages: a delivery inserts those into no inbox.
ASK = Sql(
    """
WITH {start}
SELECT count(*), set_config('mailroom.asked', coalesce(pg_catalog.array_agg(position ORDER BY position) FILTER (
    WHERE (deliver_at <= now) IS NOT FALSE AND (expires_at > now) IS NOT FALSE), '{}')::text, true)
FROM ({oldest_fitting}) AS o, (SELECT coalesce(%(now)s::timestamptz, clock_timestamp())) AS m (now)
WHERE fits
""",
    columns=("bigint", "text"),
    start=START,
    oldest_fitting=OLDEST_FITTING,
)
# A DO block has no parameters and no result, so both are passed as settings of the transaction. It inserts the copies
# one by one. A refusal undoes the inserts since the one before, but not the cursor's position, so each copy is tried
# once however many are refused. With savepoints from the client, or by halving, one refused message cost 2 s. In the
# end everything is undone.
# D-deliver-8: A batch that fails on data is sifted in the server.
TRY = Sql(
    """
DO $sift$
DECLARE
    copies CURSOR FOR
        WITH asked AS MATERIALIZED (
            SELECT * FROM {schema}.outbox WHERE position = ANY (current_setting('mailroom.asked')::bigint[])),
        {route}
        SELECT r.inbox, o.*, n.id AS origin
        FROM asked AS o JOIN route AS r ON r.topic = o.topic AND {gets}, {schema}.node AS n
        ORDER BY o.position;
    copy record;
    stamp bigint := (SELECT last_value FROM {schema}.clock);
    skipped bigint;
    refused text[] := '{}';
    of_state text; of_constraint text; of_table text; of_column text;
BEGIN
    BEGIN
        OPEN copies;
        LOOP
            BEGIN
                LOOP
                    FETCH copies INTO copy;
                    EXIT WHEN NOT FOUND;
                    CONTINUE WHEN copy.position = skipped;
                    stamp := stamp + 1;
                    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
                    VALUES (copy.inbox, stamp, stamp, copy.origin, {copied});
                END LOOP;
                EXIT;
            EXCEPTION WHEN {conditions} THEN
                GET STACKED DIAGNOSTICS of_state = RETURNED_SQLSTATE, of_constraint = CONSTRAINT_NAME,
                                        of_table = TABLE_NAME, of_column = COLUMN_NAME;
                skipped := copy.position;
                refused := array_append(
                    refused, json_build_array(skipped, of_state, of_constraint, of_table, of_column)::text);
            END;
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'MR000';
    EXCEPTION WHEN SQLSTATE 'MR000' THEN NULL;
    END;
    PERFORM set_config('mailroom.refused', '[' || array_to_string(refused, ',') || ']', true);
END $sift$
""",
    route=ROUTE,
    sent="asked",
    gets=GETS,
    message=MESSAGE,
    copied=listed(MOVING, of="copy"),
    conditions=" OR ".join(OF_THE_DATA.values()),
)
ANSWER = Sql("SELECT current_setting('mailroom.refused')", columns=("text",))


def finding_refused(
    schema: str, *, start: ScanStart, rows: int, max_bytes: int, now: datetime | None = None
) -> Operation[tuple[int, list[Undeliverable]]]:
    """Return how many messages the next delivery would take, and which of them the database refuses by themselves."""
    yield DISPATCH_LOCK.at(schema=schema)()
    [(messages, _)] = yield ASK.at(schema=schema)(**start.values(), rows=rows, bytes=max_bytes, now=now)
    yield TRY.at(schema=schema)()
    [(answer,)] = yield ANSWER.at()()
    return messages, [Undeliverable(position, reason_of(*error)) for position, *error in json.loads(answer)]


# By position, not by range: others with lower positions may have committed meanwhile.
DEAD_LETTER = Sql(
    """
WITH refused AS (
    SELECT * FROM unnest(%(positions)s::bigint[], %(reasons)s::text[]) AS r (position, reason)),
gone AS (
    DELETE FROM {schema}.outbox WHERE position = ANY (%(positions)s::bigint[]) RETURNING position, {message}),
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, {message})
    SELECT 'deliver', reason, {message} FROM gone JOIN refused USING (position) ORDER BY position)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
    message=MESSAGE,
)


def dead_lettering(schema: str, refused: Sequence[Undeliverable]) -> Operation[int]:
    """Move messages to `dead_letter`, so that they do not block the others; return how many were still there."""
    yield DISPATCH_LOCK.at(schema=schema)()
    [(count,)] = yield DEAD_LETTER.at(schema=schema)(
        positions=[each.position for each in refused], reasons=[each.reason for each in refused]
    )
    return int(count)
