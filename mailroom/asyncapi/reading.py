"""What a node's document is made of, as its database has it."""

from mailroom.bridges.states import BridgeStates, reading_bridges
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

NAME = Sql("SELECT name FROM {schema}.node", columns=("text",))


def reading_node(schema: str) -> Operation[tuple[str, BridgeStates]]:
    """Return the node's name, and its bridges. Raises `SchemaError`."""
    bridges = yield from reading_bridges(schema)
    (name,) = the_one((yield NAME.at(schema=schema)()), NODE_ROW, schema)
    return str(name), bridges
