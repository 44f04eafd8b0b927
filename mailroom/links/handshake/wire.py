"""The wire: what crosses a link, as columns of arrays. Each version is frozen: neither side needs the other's release.

A column that comes later has a later version, and both sides use the highest that both have. All types are
plain ones of every supported PostgreSQL, so a value has the same binary form on both sides, whatever their settings.
"""

from mailroom.message.columns import MOVING, Column

# By name: the type on the wire, and how the source makes it and the target reads it. {c} is the column. A "char" and
# jsonb cross as text: the binary form of both is their text, so it costs nothing, and needs no type of its own.
VERSION = 1
# What the source says about the row that it carried, beside the message.
CARRIAGE = (
    Column("seq", "bigint", by="database"),
    Column("sent_clock", "bigint", by="database"),
    Column("stamped_at", "timestamptz", by="database"),
)
WIRE_COLUMNS = {
    column.name: (column.plain, column.given("{c}"), column.taken("{c}"))
    for column in (*CARRIAGE, *(column for column in MOVING if column.wire <= VERSION))
}
TYPES = tuple(f"{kind}[]" for kind, _, _ in WIRE_COLUMNS.values())

# At the source, of rows that come by seq.
GATHERED = ", ".join(f"pg_catalog.array_agg({sent.format(c=name)})" for name, (_, sent, _) in WIRE_COLUMNS.items())
# At the target: the parameters side by side, and the columns made of them. In a select list: as a table, each array
# would be stored on its own first, which takes twice as long.
SPREAD = ", ".join(f"pg_catalog.unnest(%({name})s::{kind}[]) AS {name}" for name, (kind, _, _) in WIRE_COLUMNS.items())
NAMES = ", ".join(WIRE_COLUMNS)
READ = ", ".join(f"{read.format(c=name)} AS {name}" for name, (_, _, read) in WIRE_COLUMNS.items())

# A row of this kind is a mark: no message, it only shows a clock.
MARK = "H"
# No larger sent_clock is taken than 2^61 + 2^60 and the clocks of the time since 2026, as in `mailroom.links.start`; or
# so much beyond what an operator has let the clock go to. Sends and readers raise a clock to 2^61 at most, so no node
# comes near it unless its rows are changed by hand. A node that takes such a clock can still be read by its own
# readers: by then the limit has grown by more than any node counts. {now} is the time, and `advanced` of node.
# D-links-14: What is received may be higher than what is sent.
FURTHEST = f"""greatest({2**61}, advanced) + {2**60} + (greatest(0, least(
           extract(epoch FROM {{now}} - '2026-01-01 00:00+00'::timestamptz), 15768000000)) * {2**24}.0)::bigint"""
