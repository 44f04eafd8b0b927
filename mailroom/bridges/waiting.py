"""What waits for a bridge, as the records that it would publish."""

from mailroom.bridges.broker import broker_of
from mailroom.bridges.out import OutRow
from mailroom.bridges.record import Record, Sender, carried, record_of
from mailroom.links.handshake.wire import GATHERED, NAMES, TYPES, WIRE_COLUMNS
from mailroom.sql.operation import Operation, Sql
from mailroom.values.numbers import count_or_all

LIMIT = 100

# As `dispatcher.links.at_source.fetch`, and no further than this many rows.
NEXT = Sql(
    """
SELECT count(*), {gathered}
FROM (SELECT {names} FROM {schema}.transit AS w
      WHERE link = %(link)s::bigint AND seq > %(after)s::bigint
        AND NOT EXISTS (SELECT FROM {schema}.bridge_done AS d WHERE d.link = w.link AND d.seq = w.seq)
      ORDER BY seq LIMIT %(limit)s::bigint) AS t
""",
    columns=("bigint", *TYPES),
    gathered=GATHERED,
    names=NAMES,
)


def waiting_records(schema: str, row: OutRow, limit: int | None) -> Operation[list[Record]]:
    """Return the next records of a bridge. Raises `Unencodable`, and `ConfigurationError` without its broker here."""
    limit = count_or_all(limit, "limit")
    [(count, *columns)] = yield NEXT.at(schema=schema)(link=row.link, after=row.acked, limit=limit)
    if not count:
        return []
    sender = Sender(row.node_id, row.node, row.link)
    messages = carried(dict(zip(WIRE_COLUMNS, columns, strict=True)))
    form, is_reserved = row.settings.form, broker_of(row.settings.broker).is_reserved
    return [record_of(message, form, sender, is_reserved) for message in messages if not message.is_mark]
