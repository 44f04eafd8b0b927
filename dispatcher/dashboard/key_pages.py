"""The page of a key that was searched for: in which inboxes it is in trouble, and where its messages are."""

from typing import Any

from dispatcher.dashboard.shown import Asked, ShownNode
from mailroom.cli.commands.trace import described, lines_of_key
from mailroom.node.key_trace import tracing_key
from mailroom.sql.runner import run
from mailroom.values.names import key_text


def found(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return what there is of a key. What the role may not read, or a bound left out, is said."""
    key = asked.text("key")
    if key is None:
        return {"key": None, "found": None, "lines": [], "described": described}
    key_text(key)
    with node.reading() as connection:
        of_key = run(connection, tracing_key(key, schema=node.schema))
    return {"key": key, "found": of_key, "lines": list(lines_of_key(of_key)), "described": described}
