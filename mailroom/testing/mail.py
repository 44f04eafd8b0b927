"""`Mail` and `AsyncMail`, what the pytest fixture `mail` is: messages followed within the transaction of one test."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, Generic, TypeVar
from uuid import UUID

import psycopg

from dispatcher.delivery.deliver import releasing
from inbox.claims import Claims
from inbox.handling.handlers import check_schema
from mailroom.errors import ConfigurationError, UnknownInbox
from mailroom.message.message import Message
from mailroom.message.topic import Topic
from mailroom.registry.log_topics import IS_WANTED_BY
from mailroom.registry.routing import GETS, LOG_ROUTE
from mailroom.schema import checking, finding
from mailroom.schema.checks import nearest_inbox
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, is_django, run, run_async, unwrapped
from mailroom.testing.functions import SentMessage, delivering_once, executing_all, reading_sent
from mailroom.testing.stepping import Failure, Worked, refuse_async, shifting, step, step_async
from mailroom.values.names import DEFAULT_SCHEMA, schema_name, topic_name

log = logging.getLogger("mailroom.mail")

C = TypeVar("C")

NOW = Sql(
    "SELECT pg_catalog.clock_timestamp() + %(ahead_s)s::float8 * interval '1 second'",
    columns=("timestamptz",),
)
WAIT = Sql(
    "SELECT EXISTS (SELECT FROM {schema}.outbox_executable), EXISTS (SELECT FROM {schema}.scheduled)",
    columns=("boolean", "boolean"),
)
# PostgreSQL compiles a delivery for longer than it takes to run it. Our own sessions have this setting, users' do not.
# D-schema-9: `mail` keeps what was sent before each delivery.
NO_JIT = Sql("SELECT pg_catalog.set_config('jit', 'off', true)", columns=("text",))
ROUTED = Sql(
    """
WITH given AS (
    SELECT * FROM ROWS FROM (pg_catalog.unnest(%(topics)s::text[]), pg_catalog.unnest(%(kinds)s::text[]))
             AS g (topic, kind)),
{route}
SELECT topic, kind FROM given AS o JOIN route USING (topic)
WHERE inbox = coalesce((SELECT r.log FROM {schema}.inbox_registry AS r WHERE r.name = %(inbox)s::text), %(inbox)s::text)
  AND {gets} AND {is_wanted}
""",
    columns=("text", "text"),
    route=LOG_ROUTE,
    sent="given",
    gets=GETS,
    is_wanted=IS_WANTED_BY,
)


class _Mail(Generic[C]):
    """What both classes share: what was sent, and the time."""

    def __init__(self, connection: C, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.connection = connection
        self.schema = schema_name(schema)
        self._sent: dict[UUID, SentMessage] = {}
        self._ahead = timedelta()

    def travel(self, by: float | timedelta) -> None:
        """Let `by` pass, in seconds or as a `timedelta`, for all further calls of `handle_all`.

        Scheduled messages and keys that wait for their next attempt become due, and messages expire. The clocks of
        PostgreSQL and Python are not changed: your own code reads the same time from them.
        """
        passed = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if passed < timedelta():
            raise ConfigurationError(
                "Time only goes on: give `travel` a time that is not negative.", code="MR-invalid-argument"
            )
        self._ahead += passed

    def _inboxes(self, handlers: Mapping[str, Any]) -> dict[str, Claims]:
        for name, handler in handlers.items():
            if not callable(handler):
                raise ConfigurationError(
                    f"The handler of inbox {name} cannot be called: give a function or Handlers.",
                    code="MR-invalid-handler",
                )
            check_schema(handler, self.schema)
        return {name: Claims(self.schema, name) for name in handlers}

    def _arriving(self, inboxes: Mapping[str, Claims]) -> Operation[None]:
        """Check that the inboxes exist, and let their keys be tried at the time that was travelled to."""
        yield IN_TRANSACTION
        yield NO_JIT.at()()
        for name in inboxes:
            try:
                yield from finding(self.schema, name)
            except UnknownInbox:
                yield from checking(self.schema)
                option = "" if self.schema == DEFAULT_SCHEMA else f" --schema {self.schema}"
                argument = "" if self.schema == DEFAULT_SCHEMA else f", schema={self.schema!r}"
                raise UnknownInbox(
                    f"There is no inbox {name!r} in schema {self.schema!r} of the test database."
                    f"{(yield from nearest_inbox(self.schema, name))} Create it there once, as in production: "
                    f"mailroom inbox create {name} --subscribe TOPIC{option}; or for this test: "
                    f"mailroom.create_inbox(mail.connection, {name!r}, subscribe=[...]{argument})"
                ) from None
        yield from self._shifting(inboxes, -1)

    def _leaving(self, inboxes: Mapping[str, Claims]) -> Operation[None]:
        yield from self._shifting(inboxes, 1)

    def _shifting(self, inboxes: Mapping[str, Claims], sign: int) -> Operation[None]:
        for inbox in inboxes.values():
            yield from shifting(inbox, sign * self._ahead.total_seconds())

    def _delivering(self) -> Operation[None]:
        """Execute and deliver what waits. What is in the outbox is kept before, since it is gone afterwards."""
        now: datetime | None = None
        if self._ahead:
            [(now,)] = yield NOW.at()(ahead_s=self._ahead.total_seconds())
        [(executables, scheduled)] = yield WAIT.at(schema=self.schema)()
        if executables:
            yield from executing_all(self.schema)
        if scheduled:
            yield from releasing(self.schema, now=now)
        while (yield from self._keeping()):
            delivery = yield from delivering_once(self.schema, now)
            if not delivery.taken and delivery.ceiling is None:
                return

    def _keeping(self) -> Operation[bool]:
        """Keep what is in the outbox, and return whether there is anything."""
        found = yield from reading_sent(self.schema)
        for sent in found:
            self._sent.setdefault(sent.id, sent)  # one that was scheduled comes through the outbox again
        return bool(found)

    def _finding_sent(self, name: Topic[Any, Any] | str) -> Operation[list[SentMessage]]:
        wanted = topic_name(name.name if isinstance(name, Topic) else name)
        yield from self._keeping()
        kinds = sorted({(sent.topic, sent.kind) for sent in self._sent.values()})
        topics = [topic for topic, _ in kinds]
        rows = yield ROUTED.at(schema=self.schema)(topics=topics, kinds=[kind for _, kind in kinds], inbox=wanted)
        routed = set(rows)
        return [sent for sent in self._sent.values() if sent.topic == wanted or (sent.topic, sent.kind) in routed]


class Mail(_Mail[AnyConnection]):
    """The fixture `mail`: sends, deliveries and handlers of a test, all in the transaction of `connection`.

    `connection` is what the fixture `mail_connection` gives. What the test does on it is rolled back at its end.
    """

    def sent(self, name: Topic[Any, Any] | str) -> list[SentMessage]:
        """Return the messages sent to a topic, or to an inbox of that name, delivered or not, in the order sent.

        For an inbox these are the messages of all topics that it gets. Only deliveries by `handle_all` are seen.
        """
        return run(self.connection, self._finding_sent(name))

    def handle_all(self, /, **handlers: Callable[[Message, Any], object]) -> Worked:
        """Execute, deliver and handle all there is, until nothing is left that is due; return what was handled.

        `handlers` has, by the name of an inbox, a worker's handler, such as `Handlers`. Failures are what they are in a
        worker: what the handler did is undone, its key waits or is parked, or the message is skipped. They are in the
        result, and logged. Raises `UnknownInbox`, and `ConfigurationError` for an async handler.
        """
        inboxes, worked = self._inboxes(handlers), Worked([], [])
        for handler in handlers.values():
            refuse_async(handler, INSTEAD)
        run(self.connection, self._arriving(inboxes))
        at_work = dict(inboxes)
        while True:
            run(self.connection, self._delivering())
            before = len(worked.failures)
            steps = {
                name: step(self.connection, inbox, handlers[name], (), worked, instead=INSTEAD)
                for name, inbox in at_work.items()
            }
            _tell(worked.failures[before:])
            if "worked" not in steps.values():
                break
            at_work = {name: inbox for name, inbox in at_work.items() if steps[name] != "paused"}
        run(self.connection, self._leaving(inboxes))
        return worked


class AsyncMail(_Mail[AnyAsyncConnection]):
    """`Mail` on an async connection, for async handlers. Who opens the connection rolls it back."""

    async def sent(self, name: Topic[Any, Any] | str) -> list[SentMessage]:
        """See `Mail.sent`."""
        return await run_async(self.connection, self._finding_sent(name))

    async def handle_all(self, /, **handlers: Callable[[Message, Any], Awaitable[object]]) -> Worked:
        """See `Mail.handle_all`."""
        inboxes, worked = self._inboxes(handlers), Worked([], [])
        await run_async(self.connection, self._arriving(inboxes))
        at_work = dict(inboxes)
        while True:
            await run_async(self.connection, self._delivering())
            before = len(worked.failures)
            steps = {
                name: await step_async(self.connection, inbox, handlers[name], (), worked, instead=INSTEAD_OF_ASYNC)
                for name, inbox in at_work.items()
            }
            _tell(worked.failures[before:])
            if "worked" not in steps.values():
                break
            at_work = {name: inbox for name, inbox in at_work.items() if steps[name] != "paused"}
        await run_async(self.connection, self._leaving(inboxes))
        return worked


INSTEAD = "`await mail.handle_all(...)`"
INSTEAD_OF_ASYNC = "`mail.handle_all(...)`, with a mail_connection that is not async"


def _tell(failures: list[Failure]) -> None:
    """Log failures, so that pytest shows them below a test that fails for that reason."""
    for failure in failures:
        log.warning(
            "The handler of message %s failed: %s after attempt %d",
            failure.message.id, failure.outcome, failure.attempt, exc_info=failure.error,
        )  # fmt: skip


@contextmanager
def mailing(connection: Any, schema: str) -> Iterator[Mail | AsyncMail]:
    """Give a `Mail` on a connection that is rolled back afterwards, or an `AsyncMail` on an async one."""
    if inspect.iscoroutinefunction(getattr(type(connection), "rollback", None)):
        yield AsyncMail(connection, schema=schema)
        return
    with _rolled_back(connection):
        yield Mail(connection, schema=schema)


@contextmanager
def _rolled_back(connection: AnyConnection) -> Iterator[None]:
    if is_django(connection):
        with import_module("django.db.transaction").atomic(connection.alias):
            yield
            connection.set_rollback(True)
        return
    plain = unwrapped(connection)
    if isinstance(plain, psycopg.Connection):
        with plain.transaction(force_rollback=True):  # a commit inside of it is refused
            yield
        return
    try:
        yield
    finally:
        plain.rollback()
