"""Acknowledge: what was received is made durable at the target, and only then the source is told that it may go."""

from uuid import UUID

from mailroom.order.clock import DURABLE
from mailroom.sql.operation import Operation, Sql

# A record of its own, since a commit without one would not wait. Its commit is durable only after all before it.
# D-links-6: The acknowledging commit writes a WAL record of its own.
FLUSH = Sql("SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL", columns=("boolean",))


def making_durable() -> Operation[None]:
    """Make everything durable that was committed here before; run it in a transaction, and commit that."""
    yield DURABLE.at()()
    yield FLUSH.at()()


ACKNOWLEDGE = Sql(
    "SELECT {schema}.link_acknowledge(%(link)s::bigint, %(run)s::uuid, %(seq)s::bigint)", columns=("boolean",)
)


def acknowledging(schema: str, link: int, run: UUID, seq: int) -> Operation[bool]:
    """Tell the source up to where its rows are durable at the target; return whether the link is still this run's."""
    [(ours,)] = yield ACKNOWLEDGE.at(schema=schema)(link=link, run=run, seq=seq)
    return bool(ours)
