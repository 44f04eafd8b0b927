"""The page of one message: where it is, what caused it, what it caused, and, where that is allowed, what it says."""

from typing import Any
from uuid import UUID

import psycopg

from dispatcher.dashboard.reading import reading_content
from dispatcher.dashboard.shown import Asked, ShownNode
from mailroom.cli.commands.trace import described
from mailroom.cli.messages import content_lines
from mailroom.cli.output import printable
from mailroom.node import trace
from mailroom.node.trace import Location
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.runner import run
from mailroom.values.names import key_text

TABLES = ("outbox", "scheduled", "dead_letter", "reaped")
EFFECTS = 100


def message(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return the page, which asks for the path: no table has an index on ids, so finding one reads them all.

    What was put into the field `find` is an id if it looks like one, and else a key, whose spaces are its own.
    """
    text = asked.text("find")
    if not text:
        return {"look": node.look(), "id": asked.id(), "key": asked.text("key")}
    key_text(text)
    try:
        return {"look": node.look(), "id": UUID(text.strip()), "key": text}
    except ValueError:
        return {"look": node.look(), "id": None, "key": text}


def path(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return where a message is, and its causes and effects."""
    id = asked.id()
    if id is None:
        return {
            "id": None,
            "places": [],
            "causes": [],
            "effects": [],
            "contents": [],
            "described": described,
            "is_whole": True,
            "locked": [],
        }
    is_whole = True
    with node.reading() as connection:
        locked = run(connection, reading_locked(node.schema))
        but = locked_inboxes(locked)
        places = trace.trace(connection, id, but=but, schema=node.schema)
        has_cause = any(place.causation is not None for place in places)
        try:
            causes = run(connection, trace.following_causes(node.schema, id, places, but)) if has_cause else []
            effects = trace.effects(connection, id, limit=EFFECTS, but=but, schema=node.schema)
        except psycopg.errors.QueryCanceled:  # where it is was found, and is what most people ask
            causes, effects, is_whole = [], [], False
        contents = [_content(connection, node, id, places[0])] if node.payloads and places else []
    return {"id": id, "places": places, "causes": causes, "effects": effects, "contents": contents,
            "described": described, "is_whole": is_whole, "locked": locked}  # fmt: skip


def _content(connection: psycopg.Connection[Any], node: ShownNode, id: UUID, place: Location) -> str:
    """Return what it says, as the commands print it; the places of a message have the same."""
    if place.where in TABLES:
        found = run(connection, reading_content(node.schema, place.where, id))
    elif place.where in ("inbox", "parked"):
        held = [
            run(connection, reading_content(node.schema, table, id, place.inbox, place.key, place.clock))
            for table in ("inbox", "parked")
        ]
        found = next((each for each in held if each is not None), None)
    else:
        return "What it says is not shown while it is there."
    if found is None:
        return "It has gone on meanwhile. Look again."
    return printable("\n".join(line.removeprefix("    ") for line in content_lines(found)))
