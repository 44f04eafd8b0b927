"""The pages about logs: their size, and how far each inbox has read."""

from typing import Any

from dispatcher.dashboard.guard import Refused
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from mailroom.figures.logs import reading_logs, reading_readers
from mailroom.registry.logs import listing_logs
from mailroom.sql.locked import LockedTable, reading_locked
from mailroom.sql.runner import run
from mailroom.values.names import inbox_name


def logs(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return the logs by name; a page of them begins after a name."""
    after, look = asked.text("after") or "", node.look()
    with node.reading() as connection:
        locked = run(connection, reading_locked(node.schema))
        found = [each for each in run(connection, reading_logs(node.schema, locked)) if each.log > after]
    shown, more = page_of(found[: PAGE_ROWS + 1])
    return {"look": look, "found": shown, "more": more, "first": not after, "locked": _of_logs(locked)}


def log(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return a log: its size, its settings, and a page of the inboxes that read it."""
    name, after, look = inbox_name(asked.fields.get("log", "")), asked.text("after") or "", node.look()
    with node.reading() as connection:
        if not (logs := run(connection, listing_logs(node.schema, name))):
            raise Refused(404, f"There is no log {name!r}. See: mailroom log list")
        [found] = logs
        locked = run(connection, reading_locked(node.schema))
        names, more = page_of([each for each in found.readers if each > after][: PAGE_ROWS + 1])
        states = run(connection, reading_logs(node.schema, locked))
        readers = run(connection, reading_readers(node.schema, locked, only=names))
    state = next((each for each in states if each.log == name), None)
    return {"look": look, "log": found, "state": state, "readers": readers, "more": more, "first": not after,
            "locked": _of_logs(locked)}  # fmt: skip


def _of_logs(locked: list[LockedTable]) -> list[LockedTable]:
    return [each for each in locked if each.table.startswith(("log", "receipts_"))]
