"""The page of parked keys: by inbox, error and age, with what an act on one, or on all that are shown, would change."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import Connection

from dispatcher.dashboard.chosen import AT_ONCE, TICK, filter_of
from dispatcher.dashboard.keeping import kept
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.shown import Asked, ShownNode, page_of
from mailroom.cli.acting import counted
from mailroom.figures.failing_keys import COUNTED
from mailroom.figures.parked_keys import (
    KEY_MESSAGES,
    MESSAGES,
    ParkedFilter,
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
        found = _longest(connection, node.schema, of) if keys else []
        holds = _held(connection, node.schema, found, but)
        inboxes = {inbox for inbox, _ in found} | {each.inbox for each in keys}
        keeping = {each.inbox: each for each in run(connection, reading_keeping(node.schema, inboxes))}
    total = sum(each.keys for each in groups if each.what == "age")
    given = {"inbox": of.inbox, "error": of.error, "matching": of.matching, "age": of.age}
    return {
        "look": look, "locked": locked, "of": of, "given": given,
        "is_filtered": any(each is not None for each in given.values()),
        "by": "age" if by_age else None, "first": not after[0], "more": more, "at_once": AT_ONCE,
        "rows": [(each, *_number(each, number, but), kept(keeping, [each.inbox]))
                 for each, number in zip(keys, numbers, strict=True)],
        "kept": kept(keeping, inboxes), "kept_here": kept(keeping, {each.inbox for each in keys}),
        "groups": {what: [each for each in groups if each.what == what] for what in ("error", "age", "inbox")},
        "total": f"more than {COUNTED:,}" if total > COUNTED else f"{total:,}", "holds": holds,
        "age_words": AGE_WORDS, "tick": TICK,
    }  # fmt: skip


def _number(each: ParkedLook, number: int | None, but: Collection[str]) -> tuple[str, str]:
    """Return how many messages a key holds, for a cell and for a sentence."""
    if each.inbox in but:
        return "unknown", "An unknown number of messages"
    if number is None:
        return f"over {KEY_MESSAGES:,}", f"Over {KEY_MESSAGES:,} messages"
    return f"{number:,}", counted(number, "message")


def _longest(connection: Connection[Any], schema: str, of: ParkedFilter) -> list[tuple[str, str]]:
    """Return the keys that an act on all that the filter shows would change, and one more if there are more."""
    with suppress(psycopg.errors.QueryCanceled):  # the page is there without it
        return [(each.inbox, each.key) for each in run(connection, reading_oldest(schema, of, limit=AT_ONCE + 1))]
    return []


def _held(connection: Connection[Any], schema: str, found: Sequence[tuple[str, str]], but: Collection[str]) -> str:
    """Return how many keys and messages these are."""
    messages = "An unknown number of messages"
    if found and not any(inbox in but for inbox, _ in found):
        with suppress(psycopg.errors.QueryCanceled):
            number = run(connection, counting_all(schema, found[:AT_ONCE]))
            messages = f"Over {MESSAGES:,} messages" if number > MESSAGES else counted(number, "message")
    if len(found) > AT_ONCE:
        return f"{messages} of the {AT_ONCE:,} keys that are parked longest"
    return f"{messages} of {counted(len(found), 'key')}" if found else messages
