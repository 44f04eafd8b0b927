"""The writer's side: messages that exist if and only if the caller's transaction commits."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar, Unpack
from uuid import UUID

from mailroom import events
from mailroom.errors import InvalidMessage
from mailroom.message.answer import Request, answer, refuse_second
from mailroom.message.headers import given
from mailroom.message.outgoing import EventType, Fields, MessageType, Outgoing, fresh_ids, row_of, sending, sending_many
from mailroom.message.topic import Topic, topic_text
from mailroom.schema.node import OfNode
from mailroom.sql.operation import Operation, Row
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.values.names import Key
from outbox.cancel import cancelling
from outbox.once import identified, sending_once

# With a `Topic`, a type checker finds a value of another type, and a topic for replies whose values have another type.
T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")


class _Node(OfNode):
    """What the sync and the async class share; `schema` is the node they write to."""

    def _send(self, message: Outgoing, once: str | None = None) -> tuple[Operation[None], UUID]:
        row = row_of(message if once is None else identified(message, once))
        operation = (sending if once is None else sending_once)(self.schema, row)
        return self._told(operation, [row]), row[0]

    def _send_many(self, messages: Iterable[Outgoing]) -> Operation[int]:
        # All messages are encoded before the first is sent, so a bad one leaves the transaction unchanged.
        rows = []
        for nth, (message, fresh) in enumerate(zip(messages, fresh_ids(), strict=False), start=1):
            try:
                rows.append(row_of(message, fresh))
            except InvalidMessage as error:
                raise type(error)(f"Message {nth}: {error} None of this call was sent.", code=error.code) from None
        return self._told(sending_many(self.schema, rows), rows)

    def _reply(self, request: Request, value: object, status: int, fields: Fields) -> tuple[Operation[None], UUID]:
        refuse_second(request)
        row = answer(request, value, status, fields)
        return self._told(sending(self.schema, row), [row]), row[0]

    def _told(self, operation: Operation[R], rows: list[Row]) -> Operation[R]:
        """Send, and tell who listens."""
        return self._telling(operation, rows) if events.heard(events.MessagesSent) else operation

    def _telling(self, operation: Operation[R], rows: list[Row]) -> Operation[R]:
        done = yield from operation
        events.emit(events.MessagesSent(self.schema, [row[1] for row in rows], len(rows)))
        return done


def _command(topic: Topic[T, A] | str, value: T, reply_to: Topic[A, Any] | str | None, fields: Fields) -> Outgoing:
    message = Outgoing(topic, value, kind="C", **fields)
    if reply_to is None:
        return message
    return replace(message, headers=given(message.headers) | {"reply_to": topic_text(reply_to)})


class Outbox(_Node):
    """Sends messages in the caller's transaction. One instance per node (`schema`) is enough; threads may share it.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`, inserts rows in its current
    transaction and never commits. Raises `InvalidMessage` for a message over a limit, and `NotInTransaction` on an
    autocommit connection outside a transaction. Errors of the driver pass through unchanged.
    """

    def send(
        self,
        connection: AnyConnection,
        topic: Topic[T, Any] | str,
        value: T,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        message_type: MessageType = "U",
        event_type: EventType | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | float | None = None,
        expires_at: datetime | None = None,
        after_clock: int | None = None,
        id: UUID | None = None,  # shadows the builtin, but it is the field's name and keyword-only
        once: str | None = None,
    ) -> UUID:
        """Send one message and return its id. It exists if and only if the transaction commits.

        `value` is anything that CBOR gives back equal: text, bytes, int (64 bits), float, bool, None, list, dict with
        text or bytes as keys, aware datetime, date, Decimal, UUID; at most 16 MiB encoded. Messages of one `key` (text
        of 1 to 1,024 bytes, an int or a UUID) are reaped in the order sent; None means no order. `headers` map text to
        text, at most 8 KiB. The message is not delivered before `deliver_at`, or until `deliver_after` (a timedelta or
        seconds, up to ten years) has passed since the call by this machine's clock, and dropped if it is not delivered
        by `expires_at`. `after_clock` is the clock of a message on another node that caused this one: the stamp of this
        one is later.

        With `once`, a text, the message is sent once to its topic however often this is called with that text within
        seven days: the id is computed from the two, and if it is known, nothing is sent and the id returned, whatever
        the value. Waits for an open transaction that sends the same, and sends if that rolls back. At REPEATABLE READ
        40001 if that commits: retry the whole transaction. Not together with `id`.
        """
        operation, message_id = self._send(
            Outgoing(
                topic,
                value,
                key,
                headers,
                "M",
                message_type,
                event_type,
                deliver_at,
                expires_at,
                after_clock,
                id,
                deliver_after,
            ),
            once,
        )
        run(connection, operation)
        return message_id

    def send_many(self, connection: AnyConnection, messages: Iterable[Outgoing]) -> int:
        """Send many messages in order, by COPY if the driver can, and return how many.

        All messages are checked before the first is sent: a bad one raises `InvalidMessage` with its number. They are
        held in memory meanwhile, so send millions in calls of about 10,000.
        """
        return run(connection, self._send_many(messages))

    def publish(
        self,
        connection: AnyConnection,
        topic: Topic[T, Any] | str,
        value: T,
        *,
        once: str | None = None,
        **fields: Unpack[Fields],
    ) -> UUID:
        """Send an event: every subscriber gets it, if there are any. `once` and `fields` are as for `send`."""
        operation, message_id = self._send(Outgoing(topic, value, kind="E", **fields), once)
        run(connection, operation)
        return message_id

    def command(
        self,
        connection: AnyConnection,
        topic: Topic[T, A] | str,
        value: T,
        *,
        reply_to: Topic[A, Any] | str | None = None,
        once: str | None = None,
        **fields: Unpack[Fields],
    ) -> UUID:
        """Send a command: exactly one inbox, or other node, must get it, else it goes to `dead_letter`.

        `reply_to` is the topic for the reply. `once` and `fields` are as for `send`.
        """
        operation, message_id = self._send(_command(topic, value, reply_to, fields), once)
        run(connection, operation)
        return message_id

    def reply(
        self, connection: AnyConnection, request: Request, value: object, *, status: int = 200, **fields: Unpack[Fields]
    ) -> UUID:
        """Reply to a command: on its `reply_to` topic, under its key, with its id as header `correlation`.

        `status` is 200 done, 400 refused, 500 failed. If the command has a header `reply_key`, that is the reply's key.
        Raises `InvalidMessage` if the command has no `reply_to`, or if what its handler returns is its reply.
        """
        operation, message_id = self._reply(request, value, status, fields)
        run(connection, operation)
        return message_id

    def cancel(self, connection: AnyConnection, id: UUID, *, free_once: bool = False) -> bool:
        """Delete a message that is not yet delivered, or is scheduled; return whether it was, or False: too late.

        True means that no inbox gets it once the transaction commits; after a rollback it is delivered as if nothing
        had happened, and no later message of its key has overtaken it. False means that it was delivered, or expired,
        or that there is no message of this id that is committed: `mailroom.node.trace` tells where it is.

        With `free_once` the text that was given as `once` is free again: the same message can be sent anew. It is not
        freed where it is too late.

        Nothing of this node is delivered until the transaction ends: commit soon. The server ends a session that idles
        in it for 5 seconds (SQLSTATE 25P03). At REPEATABLE READ 40001 if the message is delivered meanwhile: retry the
        whole transaction. Takes the rights SELECT and DELETE on `outbox` and `scheduled`, and UPDATE on
        `dispatch_turn`; with `free_once` also SELECT and DELETE on `outbox_jdbc_id`.
        """
        return bool(run(connection, cancelling(self.schema, id, free_once=free_once)))


class AsyncOutbox(_Node):
    """`Outbox` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    async def send(
        self,
        connection: AnyAsyncConnection,
        topic: Topic[T, Any] | str,
        value: T,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        message_type: MessageType = "U",
        event_type: EventType | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | float | None = None,
        expires_at: datetime | None = None,
        after_clock: int | None = None,
        id: UUID | None = None,
        once: str | None = None,
    ) -> UUID:
        """See `Outbox.send`."""
        operation, message_id = self._send(
            Outgoing(
                topic,
                value,
                key,
                headers,
                "M",
                message_type,
                event_type,
                deliver_at,
                expires_at,
                after_clock,
                id,
                deliver_after,
            ),
            once,
        )
        await run_async(connection, operation)
        return message_id

    async def send_many(self, connection: AnyAsyncConnection, messages: Iterable[Outgoing]) -> int:
        """See `Outbox.send_many`."""
        return await run_async(connection, self._send_many(messages))

    async def publish(
        self,
        connection: AnyAsyncConnection,
        topic: Topic[T, Any] | str,
        value: T,
        *,
        once: str | None = None,
        **fields: Unpack[Fields],
    ) -> UUID:
        """See `Outbox.publish`."""
        operation, message_id = self._send(Outgoing(topic, value, kind="E", **fields), once)
        await run_async(connection, operation)
        return message_id

    async def command(
        self,
        connection: AnyAsyncConnection,
        topic: Topic[T, A] | str,
        value: T,
        *,
        reply_to: Topic[A, Any] | str | None = None,
        once: str | None = None,
        **fields: Unpack[Fields],
    ) -> UUID:
        """See `Outbox.command`."""
        operation, message_id = self._send(_command(topic, value, reply_to, fields), once)
        await run_async(connection, operation)
        return message_id

    async def reply(
        self,
        connection: AnyAsyncConnection,
        request: Request,
        value: object,
        *,
        status: int = 200,
        **fields: Unpack[Fields],
    ) -> UUID:
        """See `Outbox.reply`."""
        operation, message_id = self._reply(request, value, status, fields)
        await run_async(connection, operation)
        return message_id

    async def cancel(self, connection: AnyAsyncConnection, id: UUID, *, free_once: bool = False) -> bool:
        """See `Outbox.cancel`."""
        return bool(await run_async(connection, cancelling(self.schema, id, free_once=free_once)))
