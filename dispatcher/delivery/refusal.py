"""Refusal: find all messages of a batch that the database refuses, and move them to `dead_letter`.

A constraint, trigger or index that a user has put on an inbox may refuse a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dispatcher.delivery.deliver import OLDEST_FITTING
from dispatcher.delivery.floor import START, ScanStart
from dispatcher.delivery.sift import sift_of_messages, sifting
from mailroom.message.columns import MESSAGE
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.registry.routing import GETS, LOG_ROUTE
from mailroom.sql.operation import Operation, Sql


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The position of a message that the database refused, and the reason."""

    position: int
    reason: str


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
TRY = sift_of_messages(
    """WITH asked AS MATERIALIZED (
            SELECT * FROM {schema}.outbox WHERE position = ANY (current_setting('mailroom.asked')::bigint[])),
        {route}
        SELECT r.inbox, r.lanes, r.segment, o.*, n.id AS origin
        FROM asked AS o JOIN route AS r ON r.topic = o.topic AND {gets}, {schema}.node AS n
        ORDER BY o.position""",
    number="position",
    sent_clock="stamp",
    route=LOG_ROUTE,
    sent="asked",
    gets=GETS,
)


def finding_refused(
    schema: str, *, start: ScanStart, rows: int, max_bytes: int, now: datetime | None = None
) -> Operation[tuple[int, list[Undeliverable]]]:
    """Return how many messages the next delivery would take, and which of them the database refuses by themselves."""
    yield DISPATCH_LOCK.at(schema=schema)()
    [(messages, _)] = yield ASK.at(schema=schema)(**start.values(), rows=rows, bytes=max_bytes, now=now)
    refused = yield from sifting(TRY.at(schema=schema)())
    return messages, [Undeliverable(position, reason) for [position], reason in refused]


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
