"""The page of parked keys: by inbox, error and age, with what an act on one, or on all that are shown, would change."""

from collections.abc import Collection, Sequence
from typing import Any

from psycopg import Connection

from dispatcher.dashboard.chosen import AT_ONCE, TICK, filter_of
from dispatcher.dashboard.counting import at_once, in_all, in_time
from dispatcher.dashboard.keeping import kept
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from mailroom.cli.acting import counted
from mailroom.figures.parked_keys import (
    KEY_MESSAGES,
    MESSAGES,
    ParkedLook,
    counting_all,
    counting_each,
    reading_groups,
    reading_keeping,
    reading_oldest,
    reading_parked,
)
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.runner import run

AGE_WORDS = {"hour": "less than an hour", "day": "hours", "week": "days", "older": "more than a week"}


def parked(node: ShownNode, asked: Asked) -> dict[str, Any]:
    """Return parked keys, of all inboxes or by a filter: by inbox and key, or (`by=age`) the longest parked first."""
    of, by_age = filter_of(asked), asked.text("by") == "age"
    after = asked.fields.get("of", ""), asked.fields.get("after", "")
    at = asked.time("at")
    look = node.look()
    with node.reading() as connection:
        locked = run(connection, reading_locked(node.schema))
        but = locked_inboxes(locked)
        if by_age:
            behind = None if at is None else (at, *after)
            rows = run(connection, reading_oldest(node.schema, of, limit=PAGE_ROWS + 1, after=behind))
        else:
            rows = run(connection, reading_parked(node.schema, of, limit=PAGE_ROWS + 1, after=after))
        keys, more = page_of(rows)
        numbers = run(connection, counting_each(node.schema, [(each.inbox, each.key) for each in keys], but))
        groups = run(connection, reading_groups(node.schema, of))
        total = sum(each.keys for each in groups if each.what == "age")
        oldest = in_time(connection, reading_oldest(node.schema, of, limit=AT_ONCE + 1)) if keys else None
        found = [(each.inbox, each.key) for each in oldest or []]
        holds = _held(connection, node.schema, found, but, total)
        inboxes = {inbox for inbox, _ in found} | {each.inbox for each in keys}
        keeping = {each.inbox: each for each in run(connection, reading_keeping(node.schema, inboxes))}
    given = {"inbox": of.inbox, "error": of.error, "matching": of.matching, "age": of.age}
    return {
        "look": look, "locked": locked, "of": of, "given": given,
        "is_filtered": any(each is not None for each in given.values()),
        "by": "age" if by_age else None, "first": not after[0], "more": more, "at_once": AT_ONCE,
        "rows": [(each, *_number(each, number, but), kept(keeping, [each.inbox]))
                 for each, number in zip(keys, numbers, strict=True)],
        "kept": kept(keeping, inboxes), "kept_here": kept(keeping, {each.inbox for each in keys}),
        "groups": {what: [each for each in groups if each.what == what] for what in ("error", "age", "inbox")},
        "in_all": in_all(total, "keys"), "holds": holds,
        "age_words": AGE_WORDS, "tick": TICK,
    }  # fmt: skip


def _number(each: ParkedLook, number: int | None, but: Collection[str]) -> tuple[str, str]:
    """Return how many messages a key holds, for a cell and for a sentence."""
    if each.inbox in but:
        return "unknown", "An unknown number of messages"
    if number is None:
        return f"over {KEY_MESSAGES:,}", f"Over {KEY_MESSAGES:,} messages"
    return f"{number:,}", counted(number, "message")


def _held(
    connection: Connection[Any], schema: str, found: Sequence[tuple[str, str]], but: Collection[str], total: int
) -> str:
    """Return how many keys these are, of so many in all, and how many messages they hold."""
    messages = "An unknown number of messages"
    if found and not any(inbox in but for inbox, _ in found):
        number = in_time(connection, counting_all(schema, found[:AT_ONCE]))
        if number is not None:
            messages = f"Over {MESSAGES:,} messages" if number > MESSAGES else counted(number, "message")
    keys = max(total, len(found)) if len(found) > AT_ONCE else len(found)
    return f"{messages} of {at_once(keys, 'key', 'the longest parked')}" if found else messages
