"""The answer to a command: a reply on the topic that its header `reply_to` names, at most one for each command.

It is sent in the transaction that ends the command, so it exists if and only if the command has ended that way. This is
the one place of that rule: 200 and 400 come from a handler (`inbox.handling.handlers`), 500 comes from the code that
ends a command that will not be done (`inbox.by_key.due`, `inbox.parked`, `mailroom.node.dead_letter`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from mailroom.errors import InvalidMessage
from mailroom.message.carry import answering
from mailroom.message.headers import given
from mailroom.message.outgoing import INSERT, Fields, Outgoing, row_of, sending
from mailroom.sql.operation import Operation, Row, filled
from mailroom.values.names import MAX_KEY_BYTES, TOPIC

DONE, REJECTED, FAILED = 200, 400, 500

# The error of a discarded command that never failed, or failed so long ago that its history is gone.
DISCARDED = "Discarded"

# Whether a row is a command that is to be answered. The topic's alphabet is that of
# `mailroom.values.names.TOPIC`: what is no topic counts as none, or such a command could never be ended.
ASKS = """(kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)"""

# Whether this role may send what answers a command. A worker's role need not: it may get commands that ask although it
# never answers any, and a sender must not be able to end it by asking.
MAY_ANSWER = filled(
    """(
    SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('{schema}.outbox'::regclass, name, 'INSERT'::text))
    FROM pg_catalog.unnest(ARRAY[{names}]) AS name)""",
    names=", ".join(f"'{name}'::text" for name in INSERT.values),
)


class Request(Protocol):
    """The part of a message that an answer needs; an `inbox.Message` has it."""

    @property
    def id(self) -> UUID:
        """The message's id, which becomes the answer's correlation."""
        ...

    @property
    def key(self) -> str:
        """The message's key, which is the answer's too unless the header `reply_key` names another."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers; `reply_to` names the topic of the answer."""
        ...


def reply_topic(request: Request) -> str | None:
    """Return the topic for answers to this message, None if it asks for none or names something that is not a topic."""
    topic = request.headers.get("reply_to", "")
    return topic if TOPIC.match(topic) else None


def answer(request: Request, value: object, status: int, fields: Fields | None = None) -> Row:
    """Return the row of the answer to a message, to be sent. Raises `InvalidMessage` if it asks for none."""
    topic = reply_topic(request)
    if topic is None:
        raise InvalidMessage(
            f"Message {request.id} asks for no reply: it has no header reply_to that names a topic.",
            code="MR-no-reply-wanted",
        )
    fields = fields or {}
    headers = given(fields.get("headers")) | {"correlation": str(request.id), "status": str(status)}
    sent: Fields = {"key": _key(request), **fields, "headers": headers}
    with answering(request):
        return row_of(Outgoing(topic, value, kind="R", **sent))


def _key(request: Request) -> str:
    key = request.headers.get("reply_key", "")
    return key if 1 <= len(key.encode()) <= MAX_KEY_BYTES else request.key


# The commands whose handlers answer by what they return: several, where one calls the next. A context and not a thread,
# as for the message in hand.
_answered_by_return: ContextVar[frozenset[UUID]] = ContextVar("mailroom_answered_by_return", default=frozenset())


@contextmanager
def answered_by_return(command: Request) -> Iterator[None]:
    """Call a handler inside this context whose return value is the answer: `refuse_second` refuses any other."""
    token = _answered_by_return.set(_answered_by_return.get() | {command.id})
    try:
        yield
    finally:
        _answered_by_return.reset(token)


def refuse_second(request: Request) -> None:
    """Raise `InvalidMessage` if what a handler in hand returns is the answer to this message."""
    if request.id in _answered_by_return.get():
        raise InvalidMessage(
            f"Command {request.id} is answered by what its handler returns: return the value, or register the handler "
            "with reply=False.",
            code="MR-answered-twice",
        )


@dataclass(frozen=True, slots=True)
class Undone:
    """A command that asks for an answer and will not be done; `error` is the class of its failure, None if unknown."""

    id: UUID
    key: str
    headers: Mapping[str, str]
    error: str | None = None

    @classmethod
    def of(cls, id: UUID, key: str, headers: str, error: str | None = None) -> "Undone":
        """Return the command that has these columns, with its headers as JSON."""
        return cls(id, key, json.loads(headers), error)


def answering_undone(schema: str, commands: Iterable[Undone]) -> Operation[None]:
    """Answer commands that the caller's transaction ends undone: status 500, and never the text of an error."""
    for command in commands:
        # It fits, whatever the command carries: ending it must not fail.
        yield from sending(schema, answer(command, {"error": command.error or DISCARDED}, FAILED))
