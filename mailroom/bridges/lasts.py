"""The last record of each partition that a broker has acknowledged to a bridge out, and that it has it no longer.

A log gives a number to each record, and never a lower one. So a new record whose number is not above the last one, or
a log that ends before it, tells that records are gone which the broker had acknowledged: it was put back, or its log
was cut back.
"""

from collections.abc import Mapping
from typing import TypeAlias
from uuid import UUID

from mailroom.order.clock import DURABLE
from mailroom.sql.operation import Operation, Sql

# A topic at the broker, or its stream, and a partition of it.
Place: TypeAlias = tuple[str, int]

LOST = Sql("SELECT lost FROM {schema}.bridge_out WHERE link = %(link)s::bigint", columns=("text",))
LASTS = Sql(
    "SELECT topic, part, last FROM {schema}.bridge_last WHERE link = %(link)s::bigint",
    columns=("text", "bigint", "bigint"),
)
SET = Sql(
    """
INSERT INTO {schema}.bridge_last AS e (link, topic, part, last)
SELECT l.number, t.topic, t.part, t.last
FROM {schema}.link AS l
    CROSS JOIN ROWS FROM (pg_catalog.unnest(%(topics)s::text[]), pg_catalog.unnest(%(parts)s::bigint[]),
                          pg_catalog.unnest(%(lasts)s::bigint[])) AS t (topic, part, last)
WHERE l.number = %(link)s::bigint AND l.run = %(run)s::uuid
ON CONFLICT (link, topic, part) DO UPDATE SET last = excluded.last
"""
)
LOSE = Sql(
    """
UPDATE {schema}.bridge_out AS b SET lost = %(why)s::text FROM {schema}.link AS l
WHERE b.link = %(link)s::bigint AND l.number = b.link AND l.run = %(run)s::uuid
"""
)


def reading_loss(schema: str, link: int) -> Operation[str | None]:
    """Return why nothing may be published before somebody says so: the broker has lost records. None if it has not."""
    rows = yield LOST.at(schema=schema)(link=link)
    return rows[0][0] if rows else None


def reading_lasts(schema: str, link: int) -> Operation[dict[Place, int]]:
    """Return the number of the last record of each partition that the broker has acknowledged."""
    return {(topic, part): last for topic, part, last in (yield LASTS.at(schema=schema)(link=link))}


def noting_lasts(schema: str, link: int, run: UUID, lasts: Mapping[Place, int]) -> Operation[None]:
    """Record the last records of these partitions, if the link is this run's."""
    yield SET.at(schema=schema)(
        link=link, run=run, topics=[topic for topic, _ in lasts], parts=[part for _, part in lasts],
        lasts=list(lasts.values()),
    )  # fmt: skip


def noting_loss(schema: str, link: int, run: UUID, why: str, lasts: Mapping[Place, int]) -> Operation[None]:
    """Let nothing be published before somebody has said resume; the logs are counted from these numbers on."""
    yield DURABLE.at()()
    yield from noting_lasts(schema, link, run, lasts)
    yield LOSE.at(schema=schema)(link=link, run=run, why=why)
