"""The error that there is no link to a node of a name: it says which node may have been meant."""

from collections.abc import Collection

from mailroom.errors import UnknownLink
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import meant

SIDES = ("reader", "source")
# Nodes of each side. A bridge is none.
NODES = Sql(
    """
SELECT l.name, 'reader' FROM {schema}.link AS l WHERE NOT EXISTS (
    SELECT FROM {schema}.bridge_out AS b WHERE b.link = l.number)
UNION ALL SELECT o.name, 'source' FROM {schema}.origin AS o WHERE NOT EXISTS (
    SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number)
""",
    columns=("text", "text"),
)


def unknown_link(schema: str, name: str, told: str, sides: Collection[str] = SIDES) -> Operation[UnknownLink]:
    """Return the error that there is no such node, and which of those on these sides may have been meant."""
    nodes = yield NODES.at(schema=schema)()
    near = meant(name, [node for node, side in nodes if side in sides])
    return UnknownLink(f"{told}{near} See: mailroom link status")


ORIGINS = Sql("SELECT name FROM {schema}.origin", columns=("text",))


def not_read(schema: str, origin: str) -> Operation[str]:
    """Return what to say of an origin that is none of this node's yet."""
    near = meant(origin, [name for (name,) in (yield ORIGINS.at(schema=schema)())])
    return (
        f"This node does not read {origin} yet.{near} To read it: mailroom link add {origin}, or mailroom bridge in "
        f"{origin} if it is to be a bridge"
    )
