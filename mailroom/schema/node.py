"""What works on the node of a schema: its name, and how each act of an operator begins."""

from mailroom.schema.audit import check_actor
from mailroom.schema.checks import checking
from mailroom.sql.operation import IN_TRANSACTION, Operation
from mailroom.values.names import DEFAULT_SCHEMA, schema_name


class OfNode:
    """What works on the node in `schema`."""

    def __init__(self, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r})"


def beginning_act(schema: str, actor: str, why: str | None) -> Operation[None]:
    """Check who acts, that a transaction is open, and that there is such a node, in this order."""
    check_actor(actor, why)
    yield IN_TRANSACTION
    yield from checking(schema)
