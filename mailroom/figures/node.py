"""What waits in the tables of a whole node, and its clock."""

from typing import NamedTuple

from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one


class NodeBacklog(NamedTuple):
    """A node: its clock, how many rows wait in each of its tables, and for how many seconds the oldest has waited.

    `bulk` counts the messages of large batches that were not moved yet. An age is None if nothing waits.
    """

    clock: int
    clock_ceiling: int
    outbox: int
    outbox_s: float | None
    executables: int
    executables_s: float | None
    scheduled: int
    dead_letters: int
    bulk: int


BACKLOG = Sql(
    """
SELECT c.last_value, n.clock_ceiling, o.messages, o.lag_s, e.executables, e.lag_s,
       (SELECT count(*) FROM {schema}.scheduled), (SELECT count(*) FROM {schema}.dead_letter),
       (SELECT coalesce(pg_catalog.sum(messages - moved), 0::numeric)::bigint FROM {schema}.spark_bulk)
FROM {schema}.node AS n, {schema}.clock AS c,
     (SELECT count(*) AS messages, extract(epoch FROM clock_timestamp() - min(sent_at))::float8 AS lag_s
      FROM {schema}.outbox) AS o,
     (SELECT count(*) AS executables, extract(epoch FROM clock_timestamp() - min(sent_at))::float8 AS lag_s
      FROM {schema}.outbox_executable) AS e
""",
    into=NodeBacklog,
)


def reading_backlog(schema: str) -> Operation[NodeBacklog]:
    """Return what waits in the node. This counts all rows."""
    row = the_one((yield BACKLOG.at(schema=schema)()), NODE_ROW, schema)
    backlog: NodeBacklog = BACKLOG.named([row])[0]
    return backlog


class WhichNode(NamedTuple):
    """Which node this is, for people: its name, its schema, its database, and the address of the server."""

    name: str
    schema: str
    database: str
    server: str

    def __str__(self) -> str:
        return f"{self.name}, schema {self.schema} of database {self.database} on {self.server}"


# The address by which the server itself knows this session: what a client calls it may mean two servers.
PLACE = Sql(
    """
SELECT n.name, '{schema_name}', current_database()::text,
       coalesce(pg_catalog.host(pg_catalog.inet_server_addr()), 'a local socket'::text)
       || ' port '::text || current_setting('port')
FROM {schema}.node AS n
""",
    into=WhichNode,
)


def reading_place(schema: str) -> Operation[WhichNode]:
    """Return which node this is."""
    row = the_one((yield PLACE.at(schema=schema, schema_name=schema)()), NODE_ROW, schema)
    place: WhichNode = PLACE.named([row])[0]
    return place


WAITING = Sql("SELECT count(*) FROM {schema}.{outbox}", columns=("bigint",))


def counting_waiting(schema: str, outbox: str) -> Operation[int]:
    """Count the committed rows of `outbox` or `outbox_executable`."""
    [(count,)] = yield WAITING.at(schema=schema, outbox=outbox)()
    return int(count)
