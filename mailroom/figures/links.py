"""What waits for the nodes that read this one, and for the brokers of its bridges."""

from typing import NamedTuple

from mailroom.registry.routing import CARRIES, LINK_ROUTE, ROUTE
from mailroom.sql.operation import Operation, Sql

# Of a bridge: what is published though it stands above `acked`.
DONE = "(SELECT count(*) FROM {schema}.bridge_done AS d WHERE d.link = l.number AND d.seq > l.acked)"


class LinkBacklog(NamedTuple):
    """A link: its state, what is on the way to it and what is stamped for it, and how old the oldest of both is."""

    name: str
    state: str
    on_the_way: int
    backlog: int
    lag_s: float | None


# Sequences have no gaps, so what is not acknowledged is counted by its ends, which an index finds.
LINKS = Sql(
    """
WITH outgoing AS MATERIALIZED (
    SELECT topic, kind, count(*) AS messages, min(sent_at) AS since FROM {schema}.outbox
    WHERE EXISTS (SELECT FROM {schema}.link) GROUP BY topic, kind),
{route},
{link_route},
coming AS MATERIALIZED (
    SELECT link, sum(messages)::bigint AS messages, min(since) AS since
    FROM outgoing JOIN link_route USING (topic) WHERE {carries} GROUP BY link)
SELECT l.name, CASE l.state WHEN 'open' THEN coalesce(b.trouble, b.state, l.state) ELSE l.state END,
       coalesce(c.messages, 0), greatest(coalesce(newest.seq, 0::bigint) - l.acked - {done}, 0::bigint),
       extract(epoch FROM clock_timestamp() - least(c.since, oldest.sent_at))::float8
FROM {schema}.link AS l
LEFT JOIN {schema}.bridge_out AS b ON b.link = l.number
LEFT JOIN coming AS c ON c.link = l.number
LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY seq DESC LIMIT 1) AS newest ON true
LEFT JOIN LATERAL (
    SELECT sent_at FROM {schema}.transit AS t WHERE t.link = l.number AND t.seq > l.acked
    ORDER BY seq LIMIT 1) AS oldest ON true
ORDER BY l.name
""",
    into=LinkBacklog,
    route=ROUTE,
    link_route=LINK_ROUTE,
    sent="outgoing",
    carries=CARRIES,
    done=DONE,
)


def reading_link_backlogs(schema: str) -> Operation[list[LinkBacklog]]:
    """Return what waits for each link and bridge, by name."""
    return LINKS.named((yield LINKS.at(schema=schema)()))
