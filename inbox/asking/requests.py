"""`Requests` and `AsyncRequests`: send a command and wait for its answer."""

import asyncio
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload
from uuid import UUID, uuid4

from psycopg_pool import PoolTimeout

from inbox.asking.asking import asking, asking_async
from inbox.asking.replies import OUTSIDE, Expected, Replies, ReplyThread, checking_kept
from inbox.handling import arguments
from inbox.sessions.transactions import AsyncSource, AsyncTransactions, Source, Transactions, usable, usable_async
from mailroom.errors import Coded, ConfigurationError
from mailroom.message.answer import DONE
from mailroom.message.headers import given
from mailroom.message.message import Message, plain
from mailroom.message.outgoing import Fields, Outgoing, given_id, row_of, sending
from mailroom.message.topic import Topic
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.sql.operation import Operation
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, driver_of, run, run_async
from mailroom.sql.sqlstate import Meaning, meaning
from mailroom.values.names import DEFAULT_SCHEMA, inbox_name, schema_name
from mailroom.values.numbers import seconds

T = TypeVar("T")
A = TypeVar("A")

POLL_INTERVAL_S = 0.2
GRACE_S = 0.25  # time for the pool to say, at its own time-out, that nothing was sent


class ErrorReply(Coded):
    """The answer to a request has another status than 200: 400 rejected, 500 failed for good.

    `status` is that number, and `value` the plain value of the answer. The text does not repeat the value.
    """

    code = "MR-error-reply"

    def __init__(self, status: int, value: object = None) -> None:
        super().__init__(f"The request was answered with status {status}.")
        self.status = status
        self.value = value


class NoReply(Coded, TimeoutError):
    """There was no answer in time. It is not known what happened to the request, and it may still be done.

    If its text says that the request was not sent, it is not done: its `code` is then MR-request-not-sent.
    """

    code = "MR-no-reply"


def _unsent(timeout_s: float, connections: int) -> NoReply:
    return NoReply(
        f"The request was not sent: no session was free for it within {timeout_s:g} s. Either all are in use "
        f"(`connections` allows {connections}, and a source of yours what it is set up to), or the server gives none: "
        "its log and that of the pool say why.",
        code="MR-request-not-sent",
    )


def _unfinished(timeout_s: float) -> NoReply:
    return NoReply(f"Sending the request took longer than {timeout_s:g} s. It may still be done.")


class _Pending(Generic[A]):
    def __init__(self, request_id: UUID, topic: Topic[Any, A] | str) -> None:
        self.id = request_id
        self._topic = topic
        self._expected = Expected(request_id)  # waited for as long as something refers to this

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id})"

    def _value(self, reply: Message | None) -> A:
        if reply is None:
            raise NoReply("No reply was taken: the requests were closed. The request may still be done.")
        if reply.status != DONE:
            raise ErrorReply(reply.status, plain(reply))
        value: A = self._topic.read_answer(reply) if isinstance(self._topic, Topic) else plain(reply)
        return value

    def _late(self, timeout_s: float) -> NoReply:
        return NoReply(f"No reply to {self.id} within {timeout_s:g} s. The request may still be done.")


class Pending(_Pending[A]):
    """A request that was sent; `id` is its message's."""

    def wait(self, timeout_s: float) -> A:
        """Return the answer's value; call it after the sending transaction has committed. It may be called again.

        Raises `ErrorReply`; `NoReply` after `timeout_s` seconds, after which you may wait again; `DecodeError` if the
        answer does not fit its topic's type.
        """
        seconds(timeout_s, "timeout_s")
        return self._answer(timeout_s, timeout_s)

    def _answer(self, left_s: float, timeout_s: float) -> A:
        """Do what `wait` does within the `left_s` of `timeout_s` seconds."""
        try:
            reply = self._expected.reply.result(left_s)
        except FutureTimeout:
            raise self._late(timeout_s) from None
        return self._value(reply)


class AsyncPending(_Pending[A]):
    """`Pending` for async programs."""

    async def wait(self, timeout_s: float) -> A:
        """See `Pending.wait`."""
        seconds(timeout_s, "timeout_s")
        return await self._answer(timeout_s, timeout_s)

    async def _answer(self, left_s: float, timeout_s: float) -> A:
        # Not wait_for on the future itself: giving up would cancel it for later calls.
        waiting = asyncio.wrap_future(_shielded(self._expected.reply))
        done, _ = await asyncio.wait([waiting], timeout=left_s)
        if not done:
            waiting.cancel()
            raise self._late(timeout_s)
        return self._value(waiting.result())


def _shielded(future: "Future[Message | None]") -> "Future[Message | None]":
    """Return a future that gets the other one's result, and may be cancelled without it."""
    shielded: Future[Message | None] = Future()

    def pass_on(done: "Future[Message | None]") -> None:
        if shielded.set_running_or_notify_cancel():
            shielded.set_result(done.result())

    future.add_done_callback(pass_on)
    return shielded


class _Service:
    """What both classes share: settings, and the request."""

    _process: int | None = None  # the one that is inside of the `with` block

    def __init__(
        self, inbox: str, schema: str, poll_interval_s: float, listen_dsn: str | None, connections: int
    ) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)
        self._listen_dsn = None if listen_dsn is None else settings.dsn(listen_dsn)
        self._poll_interval_s = seconds(poll_interval_s, "poll_interval_s")
        self._connections = arguments.count(connections, "connections")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _starting(self, home: Home, connection: object) -> Operation[None]:
        """Check that the inbox is fit for replies, and that our sessions can reach it."""
        yield from checking_kept(self.schema, self.inbox)
        yield from home.visiting(driver_of(connection))
        home.dsn  # noqa: B018  # raises an error if nobody can tell

    def _check_process(self) -> None:
        """Raise `ConfigurationError` outside of the `with` block, and in a process that was forked inside of it."""
        if self._process is None:
            raise ConfigurationError(OUTSIDE, code="MR-requests-closed")
        if self._process != os.getpid():
            raise ConfigurationError(
                "These requests were made before this process was forked, and their sessions are the other one's: make "
                "Requests in each process, after the fork.",
                code="MR-requests-forked",
            )

    def _end(self) -> bool:
        """Return whether there is anything to close. A forked process must not: it would end the other's sessions."""
        is_own, self._process = self._process == os.getpid(), None
        return is_own

    def _sending(
        self, topic: Topic[Any, Any] | str, value: object, request_id: UUID, fields: Fields
    ) -> Operation[None]:
        headers = given(fields.get("headers")) | {"reply_to": self.inbox, "reply_key": str(request_id)}
        sent: Fields = {**fields, "headers": headers, "id": request_id}
        return sending(self.schema, row_of(Outgoing(topic, value, kind="C", **sent)))


def _id(fields: Fields) -> UUID:
    own = fields.get("id")
    return uuid4() if own is None else given_id(own)


class Requests(_Service):
    """Sends commands and waits for their answers: `with Requests(dsn, "shop_replies") as requests: requests.ask(...)`.

    All processes of a service share one inbox, made with `create_inbox(..., expire_s=600)`, and all threads of a
    process one instance. Replies are taken by one background session, in its own transaction, woken by deliveries;
    through a pooler it looks every `poll_interval_s` seconds while something is waited for. An answer is handed over at
    most once: it is lost if the process dies. If a flow must survive that, use a handler of a topic for replies.

    `source` is what a `Worker` takes: a connection string, a psycopg `ConnectionPool`, a SQLAlchemy `Engine` or a
    `sessionmaker`, or a connection of Django or "django:ALIAS". `ask` sends on its connections, up to `connections` at
    once; with a connection string these are sessions of its own. The session that takes replies, and the one that is
    woken, connect to `listen_dsn`, past any pooler, or by default to where the connections of `source` are.

    Entering it raises `UnknownInbox`, `SchemaError`, `ConnectionFailed` or the source's own error, and
    `ConfigurationError` for an inbox without `expire_s`. Its methods raise `ConfigurationError` outside of the `with`
    block, and in a process that was forked inside of it: that one makes its own.
    """

    _replies: Replies
    _transactions: Transactions

    def __init__(
        self,
        source: Source,
        inbox: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        poll_interval_s: float = POLL_INTERVAL_S,
        listen_dsn: str | None = None,
        connections: int = 4,
    ) -> None:
        super().__init__(inbox, schema, poll_interval_s, listen_dsn, connections)
        self._source = usable(source, "Requests")

    def __enter__(self) -> Self:
        self._transactions = asking(self._source, self.inbox, self._connections, self._listen_dsn)
        home = self._transactions.home
        try:
            with self._transactions.begin() as connection:
                run(connection, self._starting(home, connection))
        except BaseException:
            self._transactions.close()
            raise
        self._replies = Replies(home, self.schema, self.inbox, self._poll_interval_s)
        self._thread = ReplyThread(self._replies, self.inbox)
        self._thread.start()
        self._senders = ThreadPoolExecutor(self._connections, f"mailroom-ask-{self.inbox}")
        self._process = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sessions. Calls that still wait get `NoReply`."""
        if self._end():
            self._thread.stop()
            self._senders.shutdown(wait=False, cancel_futures=True)
            self._transactions.close()

    @overload
    def ask(self, topic: Topic[T, A], value: T, *, timeout_s: float, **fields: Unpack[Fields]) -> A: ...
    @overload
    def ask(self, topic: str, value: object, *, timeout_s: float, **fields: Unpack[Fields]) -> Any: ...

    def ask(self, topic: Topic[Any, Any] | str, value: object, *, timeout_s: float, **fields: Unpack[Fields]) -> object:
        """Send a command in a transaction of its own, wait for its answer, and return the answer's value.

        `fields` are those of `Outbox.send`. Raises `ErrorReply` for another status than 200; `NoReply` after
        `timeout_s` seconds, when the command may still be done; `InvalidMessage`; `DecodeError` if the answer does not
        fit its topic's type. If the connection is lost at the COMMIT, the reply tells that it was done.
        """
        seconds(timeout_s, "timeout_s")
        self._check_process()
        deadline, reached = monotonic() + timeout_s, threading.Event()
        # In another thread, since nothing ends a wait for a pool's check, for a lock or for a server that has vanished.
        # It carries what this one does.
        sending = self._senders.submit(copy_context().run, self._send_alone, topic, value, fields, deadline, reached)
        try:
            pending = sending.result(timeout_s + GRACE_S)
        except FutureTimeout:
            is_unsent = sending.cancel() or not reached.is_set()
            raise (_unsent(timeout_s, self._connections) if is_unsent else _unfinished(timeout_s)) from None
        except PoolTimeout:
            raise _unsent(timeout_s, self._connections) from None
        try:
            return pending._answer(max(deadline - monotonic(), 0.0), timeout_s)
        finally:
            self._replies.forget(pending._expected)

    def _send_alone(
        self, topic: Topic[Any, Any] | str, value: object, fields: Fields, deadline: float, reached: threading.Event
    ) -> Pending[Any]:
        pending: Pending[Any] | None = None
        try:
            with self._transactions.begin(within_s=max(deadline - monotonic(), 0.0)) as connection:
                reached.set()
                if monotonic() > deadline:
                    raise PoolTimeout  # it is no longer waited for
                run(connection, self._transactions.home.visiting(driver_of(connection)))
                pending = self.send(connection, topic, value, **fields)
        except Exception as error:
            if pending is None or meaning(error) is not Meaning.LOST:
                raise
        return pending

    @overload
    def send(self, connection: AnyConnection, topic: Topic[T, A], value: T, **fields: Unpack[Fields]) -> Pending[A]: ...
    @overload
    def send(self, connection: AnyConnection, topic: str, value: object, **fields: Unpack[Fields]) -> Pending[Any]: ...

    def send(
        self, connection: AnyConnection, topic: Topic[Any, Any] | str, value: object, **fields: Unpack[Fields]
    ) -> Pending[Any]:
        """Send a command in the caller's transaction; after its commit, `wait` on what this returns.

        Waiting before the commit times out. `fields` are those of `Outbox.send`.
        """
        self._check_process()
        request_id = _id(fields)
        operation = self._sending(topic, value, request_id, fields)
        pending: Pending[Any] = Pending(request_id, topic)
        self._replies.expect(pending._expected)
        try:
            run(connection, operation)
        except BaseException:
            self._replies.forget(pending._expected)
            raise
        return pending


class AsyncRequests(_Service):
    """`Requests` for async programs: `async with AsyncRequests(dsn, "shop_replies") as requests`.

    `source` is what an `AsyncWorker` takes: `AsyncConnectionPool`, `AsyncEngine`, `async_sessionmaker`, or a connection
    string.
    """

    _replies: Replies
    _transactions: AsyncTransactions

    def __init__(
        self,
        source: AsyncSource,
        inbox: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        poll_interval_s: float = POLL_INTERVAL_S,
        listen_dsn: str | None = None,
        connections: int = 4,
    ) -> None:
        super().__init__(inbox, schema, poll_interval_s, listen_dsn, connections)
        self._source = usable_async(source, "AsyncRequests", "Requests")

    async def __aenter__(self) -> Self:
        """See `Requests`."""
        self._transactions = await asking_async(self._source, self.inbox, self._connections, self._listen_dsn)
        home = self._transactions.home
        try:
            async with self._transactions.begin() as connection:
                await run_async(connection, self._starting(home, connection))
        except BaseException:
            await self._transactions.close()
            raise
        self._replies = Replies(home, self.schema, self.inbox, self._poll_interval_s)
        self._replies.begin(asyncio.get_running_loop())
        self._taking = asyncio.create_task(self._replies.run())
        self._sendings: set[asyncio.Task[AsyncPending[Any]]] = set()
        self._free = asyncio.Semaphore(self._connections)
        self._process = os.getpid()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sessions. Calls that still wait get `NoReply`."""
        if self._end():
            self._taking.cancel()
            for sending in self._sendings:
                sending.cancel()
            await asyncio.gather(self._taking, *self._sendings, return_exceptions=True)
            await self._transactions.close()

    @overload
    async def ask(self, topic: Topic[T, A], value: T, *, timeout_s: float, **fields: Unpack[Fields]) -> A: ...
    @overload
    async def ask(self, topic: str, value: object, *, timeout_s: float, **fields: Unpack[Fields]) -> Any: ...

    async def ask(
        self, topic: Topic[Any, Any] | str, value: object, *, timeout_s: float, **fields: Unpack[Fields]
    ) -> object:
        """See `Requests.ask`."""
        seconds(timeout_s, "timeout_s")
        self._check_process()
        deadline, reached = monotonic() + timeout_s, asyncio.Event()
        sending = asyncio.create_task(self._send_alone(topic, value, fields, deadline, reached))
        self._sendings.add(sending)
        sending.add_done_callback(self._sendings.discard)
        try:
            await asyncio.wait([sending], timeout=timeout_s + GRACE_S)
        finally:
            sending.cancel()  # not awaited: a server that has vanished would not answer that either
        if not sending.done():
            raise _unfinished(timeout_s) if reached.is_set() else _unsent(timeout_s, self._connections)
        try:
            pending = sending.result()
        except PoolTimeout:
            raise _unsent(timeout_s, self._connections) from None
        try:
            return await pending._answer(max(deadline - monotonic(), 0.0), timeout_s)
        finally:
            self._replies.forget(pending._expected)

    async def _send_alone(
        self, topic: Topic[Any, Any] | str, value: object, fields: Fields, deadline: float, reached: asyncio.Event
    ) -> AsyncPending[Any]:
        pending: AsyncPending[Any] | None = None
        try:
            async with self._free, self._transactions.begin(within_s=max(deadline - monotonic(), 0.0)) as connection:
                reached.set()
                await run_async(connection, self._transactions.home.visiting(driver_of(connection)))
                pending = await self.send(connection, topic, value, **fields)
        except Exception as error:
            if pending is None or meaning(error) is not Meaning.LOST:
                raise
        return pending

    @overload
    async def send(
        self, connection: AnyAsyncConnection, topic: Topic[T, A], value: T, **fields: Unpack[Fields]
    ) -> AsyncPending[A]: ...
    @overload
    async def send(
        self, connection: AnyAsyncConnection, topic: str, value: object, **fields: Unpack[Fields]
    ) -> AsyncPending[Any]: ...

    async def send(
        self, connection: AnyAsyncConnection, topic: Topic[Any, Any] | str, value: object, **fields: Unpack[Fields]
    ) -> AsyncPending[Any]:
        """See `Requests.send`."""
        self._check_process()
        request_id = _id(fields)
        operation = self._sending(topic, value, request_id, fields)
        pending: AsyncPending[Any] = AsyncPending(request_id, topic)
        self._replies.expect(pending._expected)
        try:
            await run_async(connection, operation)
        except BaseException:
            self._replies.forget(pending._expected)
            raise
        return pending
