"""Acknowledge: what was received is made durable at the target, and only then the source is told that it may go."""

from uuid import UUID

from mailroom.order.clock import DURABLE
from mailroom.sql.operation import Operation, Sql

# A record of its own, since a commit without one would not wait. Its commit is durable only behind all before it.
FLUSH = Sql("SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL", columns=("boolean",))


def making_durable() -> Operation[None]:
    """Make everything durable that was committed here before; run it in a transaction, and commit that."""
    yield DURABLE.at()()
    yield FLUSH.at()()


# It may fall: a target that was put back in time is where its receipts are. Nothing is written if it is there already.
ACKNOWLEDGE = Sql(
    """
WITH told AS (
    UPDATE {schema}.link SET acked = %(seq)s::bigint, seen_at = clock_timestamp()
    WHERE number = %(link)s::bigint AND run = %(run)s::uuid AND acked <> %(seq)s::bigint)
SELECT EXISTS (SELECT FROM {schema}.link WHERE number = %(link)s::bigint AND run = %(run)s::uuid)
""",
    columns=("boolean",),
)


def acknowledging(schema: str, link: int, run: UUID, seq: int) -> Operation[bool]:
    """Tell the source up to where its rows are durable at the target; return whether the link is still this run's."""
    [(ours,)] = yield ACKNOWLEDGE.at(schema=schema)(link=link, run=run, seq=seq)
    return bool(ours)
