"""The audit trail: who changed what by hand and why, written in the transaction that changes it."""

import getpass
import os
import platform
from collections.abc import Mapping, Sequence

from mailroom.errors import InvalidMessage
from mailroom.schema.acts import Act
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import utf8

MAX_ACTOR_LENGTH = 200  # characters
MAX_WHY_LENGTH = 1_000  # characters
EMPTY: tuple[object, ...] = (None, "", {}, [], ())

AUDIT = Sql(
    """
INSERT INTO {schema}.audit (actor, action, inbox, key, messages, change, reason)
SELECT %(actor)s::text, %(action)s::text, inbox, key, messages, %(change)s::text, %(why)s::text
FROM unnest(%(inboxes)s::text[], %(keys)s::text[], %(messages)s::bigint[]) AS u (inbox, key, messages)
"""
)


def auditing(
    schema: str,
    act: Act,
    about: Sequence[tuple[str | None, str | None, int]],
    actor: str,
    why: str | None,
    change: str | None = None,
) -> Operation[None]:
    """Write one row for each that the act was about: the inbox, the key or name, and the number of messages.

    `change` says what is different now, such as `rate 5 -> 10`.
    """
    if about:
        inboxes, keys, messages = map(list, zip(*about, strict=True))
        yield AUDIT.at(schema=schema)(
            actor=actor, action=act.words, change=change, why=why, inboxes=inboxes, keys=keys, messages=messages
        )


def differences(before: Mapping[str, object] | None, after: Mapping[str, object]) -> str:
    """Return which settings are different, such as `rate 5 -> 10, burst none -> 20`; of a new thing those it has."""
    if before is None:
        return ", ".join(f"{name} {shown_value(value)}" for name, value in after.items() if value not in EMPTY)
    return ", ".join(
        f"{name} {shown_value(before.get(name))} -> {shown_value(value)}"
        for name, value in after.items() if before.get(name) != value
    )  # fmt: skip


def shown_value(value: object) -> str:
    """Return the value of a setting as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text}" for name, text in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value in EMPTY else f"{value:g}" if isinstance(value, float) else str(value)


def changed(before: Sequence[object], after: Sequence[object]) -> str:
    """Return what is different, where there is one or none of it: `before -> after`."""
    return " -> ".join(str(each[0]) if each else "none" for each in (before, after))


def person() -> str:
    """Return who runs this process, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have a number and no name
        user = f"uid {os.getuid()}"
    return f"{user}@{platform.node()}"


def checked_actor(actor: str | None, why: str | None) -> str:
    """Return who acts, which is who runs this process if nobody is named. Raises as `check_actor`."""
    named = person()[:MAX_ACTOR_LENGTH] if actor is None else actor
    check_actor(named, why)
    return named


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
