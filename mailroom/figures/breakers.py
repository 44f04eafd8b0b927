"""Breakers that are open: that of an inbox, and those of prefixes of its keys."""

from typing import NamedTuple

from mailroom.sql.operation import Operation, Sql

# A part of larger statements: each open breaker, with why it opened. It closes once a message is handled.
OPEN = """(SELECT inbox, opened_at, opened_why, tries, try_at FROM {schema}.limits WHERE opened_at IS NOT NULL
      UNION ALL
      SELECT inbox, opened_at, pg_catalog.format('prefix %%s: %%s', prefix, opened_why), tries, try_at
      FROM {schema}.breaker)"""


class OpenBreakers(NamedTuple):
    """How many breakers of an inbox are open."""

    inbox: str
    number: int


BREAKERS = Sql(
    """
SELECT inbox, CASE WHEN opened_at IS NULL THEN 0 ELSE 1 END
              + (SELECT count(*) FROM {schema}.breaker AS b WHERE b.inbox = l.inbox)
FROM {schema}.limits AS l WHERE breaker_percent IS NOT NULL
""",
    into=OpenBreakers,
)


def counting_open(schema: str) -> Operation[list[OpenBreakers]]:
    """Return how many breakers are open of each inbox that has one."""
    return BREAKERS.named((yield BREAKERS.at(schema=schema)()))
