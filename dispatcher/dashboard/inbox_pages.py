"""The pages about inboxes and keys: what waits, what is in trouble, and dead letters."""

from typing import Any, get_args

from dispatcher.dashboard import charts
from dispatcher.dashboard.chosen import AT_ONCE
from dispatcher.dashboard.counting import at_once, in_all, in_time
from dispatcher.dashboard.guard import Refused
from dispatcher.dashboard.keeping import kept
from dispatcher.dashboard.reading import (
    PAGE_ROWS,
    LetterFilter,
    counting_letters,
    reading_key,
    reading_keys,
    reading_of_key,
    reading_oldest,
)
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from inbox.parked import Parked
from mailroom.errors import UnknownInbox
from mailroom.figures.parked_keys import reading_keeping
from mailroom.metrics import minute_statistics
from mailroom.metrics.look import InboxLook
from mailroom.node.dead_letter import DeadLetters, Stage
from mailroom.order.traits import traits_of
from mailroom.registry.listing import listing
from mailroom.schema.checks import nearest_inbox
from mailroom.sql.locked import reading_lock_of
from mailroom.sql.runner import run
from mailroom.values.names import key_text

MINUTES = 60
ATTEMPTS_SHOWN = 20
SHOWN_INBOXES = 50


def inboxes(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return the inboxes, those in trouble first; a page of them begins after the rank of the last one."""
    look = node.look()
    named = asked.text("named")
    found = [each for each in look.inboxes if named is None or named in each.name]
    first = asked.number("from") or 0
    return {
        "look": look,
        "named": named,
        "found": found[first : first + SHOWN_INBOXES],
        "first": first,
        "number": len(found),
        "next": first + SHOWN_INBOXES if len(found) > first + SHOWN_INBOXES else None,
    }


def inbox(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return an inbox: its settings, rates, keys that wait, and what waits first."""
    name, look = asked.inbox(), node.look()
    with node.reading() as connection:
        locked = run(connection, reading_lock_of(node.schema, name))
        if not (settings := run(connection, listing(node.schema, [name]))):
            near = run(connection, nearest_inbox(node.schema, name))
            raise UnknownInbox(f"There is no inbox {name!r}.{near} See: mailroom inbox list")
        keys, more = page_of(run(connection, reading_keys(node.schema, name, asked.text("after") or "")))
        oldest = [] if locked else run(connection, reading_oldest(node.schema, name))
        minutes = minute_statistics(connection, name, since_m=MINUTES, schema=node.schema)
    reaped = [(each.minute, float(each.reaped)) for each in minutes]
    failed = [(each.minute, float(each.failed)) for each in minutes]
    return {
        "look": look,
        "locked": locked,
        "name": name,
        "settings": settings[0],
        "order": traits_of(settings[0]["order"]),
        "inbox": next((each for each in look.inboxes if each.name == name), None) or _quiet(name),
        "keys": keys,
        "more": more,
        "oldest": oldest,
        "minutes": minutes,
        "reaped": charts.bars(reaped, look.at, MINUTES, "messages reaped"),
        "failed": charts.bars(failed, look.at, MINUTES, "attempts failed"),
    }


def _quiet(name: str) -> InboxLook:
    """Return what is known of an inbox that was made after the look."""
    return InboxLook(name, None, None, 0, 0.0, 0, 0, False)


def key(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return a key: its state, its messages, and its failed attempts."""
    name, after = asked.inbox(), asked.number("after")
    if "key" not in asked.fields:
        raise Refused(400, "Say which key.")
    # A total inbox is parked as a whole, which is noted under the key ''.
    of = asked.fields["key"]
    text = key_text(of) if of else of
    with node.reading() as connection:
        locked = run(connection, reading_lock_of(node.schema, name))
        state = run(connection, reading_key(node.schema, name, text))
        held, more = page_of([] if locked else run(connection, reading_of_key(node.schema, name, text, after or 0)))
        attempts = Parked(name, schema=node.schema).attempts(connection, text or None, ATTEMPTS_SHOWN)
        keeping = run(connection, reading_keeping(node.schema, [name]))
    return {"look": node.look(), "name": name, "key": text, "state": state, "held": held, "more": more,
            "attempts": attempts, "first": after is None, "locked": locked,
            "kept": kept({each.inbox: each for each in keeping}, [name])}  # fmt: skip


def dead_letters(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return dead letters, the oldest first."""
    stages: tuple[Stage, ...] = get_args(Stage)
    wanted, name = asked.text("stage"), asked.inbox() if asked.text("inbox") else None
    stage = next((each for each in stages if each == wanted), None)
    if wanted is not None and stage is None:
        raise Refused(400, "There is no such stage.")
    after = asked.number("after") or 0
    given: LetterFilter = {"stage": stage, "inbox": name, "matching": asked.text("matching")}
    look = node.look()
    with node.reading() as connection:
        rows = DeadLetters(schema=node.schema).find(connection, **given, limit=PAGE_ROWS + 1, after=after)
        number = in_time(connection, counting_letters(node.schema, **given))
    letters, more = page_of(rows)
    return {"look": look, "given": given, "is_filtered": any(given.values()), "letters": letters, "more": more,
            "stages": stages, "first": not after, "at_once": AT_ONCE, "in_all": in_all(number, "dead letters"),
            "holds": at_once(number, "dead letter", "the oldest")}  # fmt: skip
