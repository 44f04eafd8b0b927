"""The page of failing keys: those that are tried again, with which errors, and how many an act would change."""

from typing import Any

from dispatcher.dashboard.chosen import AT_ONCE, failing_filter
from dispatcher.dashboard.counting import at_once, in_all, in_time
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from mailroom.figures.failing_keys import (
    FailingError,
    FailingKey,
    counting_failing,
    reading_errors,
    reading_failing,
)
from mailroom.sql.runner import run

ERRORS_SHOWN = 20


def failing(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return failing keys of an inbox or of all, the next to be tried first, and how many fail with which error."""
    given, at = failing_filter(asked), asked.time("at")
    after = (
        None if at is None else FailingKey(asked.fields.get("of", ""), asked.fields.get("after", ""), 0, at, "", None)
    )
    look, errors = node.look(), list[FailingError]()
    with node.reading() as connection:
        keys, more = page_of(run(connection, reading_failing(node.schema, **given, limit=PAGE_ROWS + 1, after=after)))
        if given["error"] is None:
            of = given["inbox"]
            errors = run(connection, reading_errors(node.schema, of, matching=given["matching"], limit=ERRORS_SHOWN))
        number, waiting = in_time(connection, counting_failing(node.schema, **given)) or (None, None)
    return {
        "look": look, "given": given, "is_filtered": any(each is not None for each in given.values()),
        "keys": keys, "more": more, "errors": [(each, _meant(each.waiting)) for each in errors],
        "first": at is None, "at_once": AT_ONCE, "in_all": in_all(number, "keys"),
        "waiting": waiting, "holds": _meant(waiting),
    }  # fmt: skip


def _meant(waiting: int | None) -> str:
    """Return how many of so many keys would be tried at once."""
    return at_once(waiting, "key", "the next to be tried")
