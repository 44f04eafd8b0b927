"""Over how many partitions of a broker's topic the rows of a link are spread, in which part of the link.

A repeat has to go to the partition of the first try: only there does a mark tell it. So the number is that from before
the row was first handed over, no matter which run hands it over again, and how many partitions were added since.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias
from uuid import UUID

from mailroom.order.clock import DURABLE
from mailroom.sql.operation import Operation, Sql

# Of a topic: after which row of the link its records go to how many partitions, in ascending order.
Spread: TypeAlias = Sequence[tuple[int, int]]

SPREADS = Sql(
    "SELECT topic, after, parts FROM {schema}.bridge_parts WHERE link = %(link)s::bigint ORDER BY topic, after",
    columns=("text", "bigint", "bigint"),
)
HELD = Sql(
    "SELECT acked FROM {schema}.link WHERE number = %(link)s::bigint AND run = %(run)s::uuid FOR NO KEY UPDATE",
    columns=("bigint",),
)
LAST = Sql(
    """
SELECT greatest(%(acked)s::bigint, (SELECT seq FROM {schema}.transit WHERE link = %(link)s::bigint
                                    ORDER BY seq DESC LIMIT 1))
""",
    columns=("bigint",),
)
# What held for rows that are acknowledged is of no interest any more.
FORGET = Sql(
    """
DELETE FROM {schema}.bridge_parts AS p WHERE p.link = %(link)s::bigint AND p.topic = %(topic)s::text
  AND EXISTS (SELECT FROM {schema}.bridge_parts AS q
              WHERE (q.link, q.topic) = (p.link, p.topic) AND q.after > p.after AND q.after <= %(acked)s::bigint)
"""
)
CLEAR = Sql("DELETE FROM {schema}.bridge_parts WHERE link = %(link)s::bigint AND topic = %(topic)s::text")
SET = Sql(
    """
INSERT INTO {schema}.bridge_parts (link, topic, after, parts)
VALUES (%(link)s::bigint, %(topic)s::text, %(after)s::bigint, %(parts)s::bigint)
ON CONFLICT (link, topic, after) DO UPDATE SET parts = excluded.parts
"""
)


def reading_spreads(schema: str, link: int) -> Operation[Mapping[str, Spread]]:
    """Return how the rows of a link are spread, by topic at the broker."""
    found: dict[str, list[tuple[int, int]]] = {}
    for topic, after, parts in (yield SPREADS.at(schema=schema)(link=link)):
        found.setdefault(topic, []).append((after, parts))
    return found


def spreading(schema: str, link: int, run: UUID, topic: str, parts: int, *, is_anew: bool) -> Operation[bool]:
    """Spread over this many partitions what nobody can have handed over yet; return whether the link is this run's.

    `is_anew`: all rows, since none was handed over to this topic. A run reads rows before it looks whether it has the
    link, so what is not in transit once this run has it, no run before it has read.
    """
    yield DURABLE.at()()
    rows = yield HELD.at(schema=schema)(link=link, run=run)
    if not rows:
        return False
    [(acked,)] = rows
    if is_anew:
        yield CLEAR.at(schema=schema)(link=link, topic=topic)
        yield SET.at(schema=schema)(link=link, topic=topic, after=0, parts=parts)
        return True
    [(last,)] = yield LAST.at(schema=schema)(link=link, acked=acked)
    yield SET.at(schema=schema)(link=link, topic=topic, after=last, parts=parts)
    yield FORGET.at(schema=schema)(link=link, topic=topic, acked=acked)
    return True
