"""The page of failing keys: those that are tried again, and with which errors."""

from typing import Any

from dispatcher.dashboard.chosen import AT_ONCE
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from mailroom.figures.failing_keys import FailingKey, reading_errors, reading_failing
from mailroom.sql.runner import run

ERRORS_SHOWN = 20


def failing(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return failing keys of an inbox or of all, the next to be tried first, and how many fail with which error."""
    name, matching, error = asked.text("inbox"), asked.text("matching"), asked.text("error")
    if name is not None:
        name = asked.inbox()
    at = asked.time("at")
    after = None if at is None else FailingKey(asked.fields.get("of", ""), asked.fields.get("after", ""), 0, at, "")
    look = node.look()
    with node.reading() as connection:
        rows = run(
            connection,
            reading_failing(node.schema, name, matching=matching, error=error, limit=PAGE_ROWS + 1, after=after),
        )
        errors = run(connection, reading_errors(node.schema, name, matching=matching, limit=ERRORS_SHOWN))
    keys, more = page_of(rows)
    return {"look": look, "name": name, "matching": matching, "error": error, "keys": keys, "more": more,
            "errors": errors, "first": at is None, "at_once": AT_ONCE}  # fmt: skip
