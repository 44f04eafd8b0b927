"""The audit trail: who changed what by hand and why, written in the transaction that changes it."""

from collections.abc import Sequence

from mailroom.errors import InvalidMessage
from mailroom.names import utf8
from mailroom.sql.operation import Operation, Sql

MAX_ACTOR_LENGTH = 200  # characters
MAX_WHY_LENGTH = 1_000  # characters

AUDIT = Sql(
    """
INSERT INTO {schema}.audit (actor, action, inbox, key, messages, reason)
SELECT %(actor)s::text, %(action)s::text, inbox, key, messages, %(why)s::text
FROM unnest(%(inboxes)s::text[], %(keys)s::text[], %(messages)s::bigint[]) AS u (inbox, key, messages)
"""
)


def auditing(
    schema: str, action: str, changes: Sequence[tuple[str | None, str | None, int]], actor: str, why: str | None
) -> Operation[None]:
    """Write one row per change: the inbox, the key and the number of messages."""
    if changes:
        inboxes, keys, messages = map(list, zip(*changes, strict=True))
        yield AUDIT.at(schema=schema)(
            actor=actor, action=action, why=why, inboxes=inboxes, keys=keys, messages=messages
        )


def because(why: str | None) -> str:
    """Return the end of a reason that tells what was changed: the reason that was given, if one was."""
    return "" if why is None else f": {why}"


def check_actor(actor: str, why: str | None) -> None:
    """Raise `InvalidMessage` unless `actor` names who acts and `why`, if given, is storable text."""
    if not isinstance(actor, str) or not actor.strip():
        raise InvalidMessage(
            f"actor is {actor!r}; say who acts, such as 'ada@example.org'. It goes into the audit.",
            code="MR-invalid-argument",
        )
    for text, what, longest in ((actor, "actor", MAX_ACTOR_LENGTH), (why or "", "reason given", MAX_WHY_LENGTH)):
        utf8(text, what)
        if len(text) > longest:
            raise InvalidMessage(
                f"The {what} has {len(text)} characters; {longest} are allowed.", code="MR-invalid-argument"
            )
