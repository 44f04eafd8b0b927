"""Transactions that commit exactly once, even if the answer to COMMIT is lost.

The first statement of the transaction writes a token, which commits with it or not at all. If COMMIT was sent and no
answer came, somebody else's INSERT of the same token tells: it waits for the original while that is still under way,
and then either finds it committed or takes its place, after which it can commit no more. A mere SELECT would not do:
what it does not find may be about to commit. COMMIT itself is never sent twice: on another session it would report
success and have lost everything.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from enum import Enum
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from mailroom.errors import CommitUnknown, ConnectionFailed, MailroomError, NotAtomic, TokenExpired
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.session.backoff import pause_s
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, T
from mailroom.sql.runner import run, run_async
from mailroom.sql.sqlstate import ABORTED, BLAMES, Meaning, is_lost, meaning_of_code, sqlstate

log = logging.getLogger("mailroom.commit")

C = TypeVar("C")
Outcome: TypeAlias = Literal["committed", "rolled back"]
AsyncOpened: TypeAlias = AbstractAsyncContextManager[C] | Awaitable[AbstractAsyncContextManager[C]]

ATTEMPTS = 10
LONGEST_PAUSE_S = 5.0
RESOLVE_WITHIN_S = 30.0
# How long one question waits for the original; then it is asked anew, so that no session of ours hangs on it for long.
PATIENCE_S = 2.0
RETENTION_DAYS = 7
SWEPT_AT_ONCE = 10_000


class Phase(Enum):
    """How far an attempt has come."""

    CONNECTING = "connecting"
    WORKING = "working"
    CHECKING = "checking"  # the last statement before COMMIT
    COMMITTING = "committing"  # COMMIT is sent, or about to be
    COMMITTED = "leaving"  # it was answered


class Next(Enum):
    """What follows from an error."""

    RAISE = "raising it"
    RETRY = "running it again"
    ASK = "asking how it ended"
    RETURN = "it has committed"


def following(phase: Phase, code: str, *, lost: bool) -> Next:
    """Decide what follows from an error with that SQLSTATE ("" for none); `lost`: the session did not outlive it."""
    if phase is Phase.COMMITTED:
        return Next.RETURN if lost else Next.RAISE
    if phase is Phase.COMMITTING and (lost or not code):
        return Next.ASK  # only an error that the server sent on a session that lives says that it rolled back
    return Next.RETRY if lost or meaning_of_code(code) is Meaning.AGAIN else Next.RAISE


# The token begins with the time in milliseconds, as a UUID of version 7 does: age shows, and the old lie together.
NEW = """
(lpad(to_hex(floor(extract(epoch FROM clock_timestamp()) * 1000::numeric)::bigint), 12, '0')
    || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid
"""
BEGUN = Sql(
    """
INSERT INTO {schema}.commit_token (token, committed) VALUES ({new}, true)
RETURNING token, pg_current_xact_id()::text
""",
    columns=("uuid", "text"),
    new=NEW.strip(),
)
# Fails with 25P02 if a statement had failed: the COMMIT of such a transaction rolls back and reports success.
STILL = Sql("SELECT coalesce(pg_current_xact_id_if_assigned()::text = %(xact)s::text, false)", columns=("boolean",))


class Attempt:
    """One attempt of `atomically`: how far it came, and what follows from its error."""

    def __init__(self, schema: str, *, reconnecting: bool) -> None:
        self._schema = schema
        self._lost = reconnecting  # a first connection that fails is the caller's to know of, a later one is not
        self._code: str | None = None
        self._xact = ""
        self._phase = Phase.CONNECTING
        self.token = UUID(int=0)

    @contextmanager
    def watching(self, connection: object) -> Iterator[None]:
        """Run the transaction within, its COMMIT too."""
        self._lost = False
        self._phase = Phase.WORKING
        _refuse_to_join(connection)
        try:
            yield
        except BaseException as error:
            # Kept: leaving `connect` may fail in its turn, and closes the connection as a matter of course.
            self._lost, self._code = is_lost(error, connection) or _is_given_up(error), sqlstate(error)
            if self._phase is Phase.COMMITTING:
                self._name_token(error)
            raise
        if self._phase is not Phase.COMMITTING:
            raise NotAtomic(
                "The work raised psycopg.Rollback: nothing was committed, and there is no result to return."
            )
        self._phase = Phase.COMMITTED

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask within how the attempt ended."""
        try:
            yield
        except BaseException as error:
            self._name_token(error)
            raise

    def _name_token(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # a cancellation must pass as what it is
            error.add_note(f"Its COMMIT was under way: mailroom.resolve(connect, '{self.token}') tells how it ended.")

    def beginning(self) -> Operation[None]:
        """Write the token: the first statement of the transaction."""
        yield IN_TRANSACTION
        [(self.token, self._xact)] = yield BEGUN.at(schema=self._schema)()

    def ending(self) -> Operation[None]:
        """See that the transaction is still the one that wrote the token and can be committed: the last statement."""
        self._phase = Phase.CHECKING
        [(still,)] = yield STILL.at()(xact=self._xact)
        if not still:
            raise NotAtomic(
                "The work ended its transaction itself, so what it did is not one whole. It must neither commit nor "
                "roll back; `atomically` does. Look at what it committed."
            )
        self._phase = Phase.COMMITTING

    def after(self, error: Exception) -> Next:
        """Decide what follows from the attempt's error; raises `NotAtomic` where it says too little by itself."""
        if self._phase is Phase.CHECKING and sqlstate(error) == ABORTED:
            raise NotAtomic(
                "The work returned, but a statement had failed in its transaction, which can only be rolled back. "
                "Let such an error pass, or run the statement within a savepoint. Nothing was committed."
            ) from error
        code = sqlstate(error) if self._code is None else self._code
        found = following(self._phase, code, lost=self._lost or is_lost(error))
        if found is not Next.RAISE:
            log.info("%s while %s: %s", type(error).__name__, self._phase.value, found.value)
        return found


def _is_given_up(error: BaseException) -> bool:
    """Tell whether psycopg lost an established session without a message of the server.

    "connection socket closed" is such an error; the connection is not `broken` after it, but unusable. Errors of
    connecting, which the work may do elsewhere, have a `pgconn` or a class of their own.
    """
    cause = getattr(error, "orig", None) or error
    return type(cause) is psycopg.OperationalError and not cause.sqlstate and cause.pgconn is None


def _refuse_to_join(connection: object) -> None:
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection) and (
        connection.info.transaction_status
        in (TransactionStatus.ACTIVE, TransactionStatus.INTRANS, TransactionStatus.INERROR)
    ):
        raise NotAtomic(
            "`connect` returned a connection that is already inside a transaction, which we must not end. "
            "Return a connection on which nothing has run yet."
        )


RULE_OUT = Sql("INSERT INTO {schema}.commit_token VALUES (%(token)s::uuid, false) ON CONFLICT DO NOTHING")
PATIENCE = Sql("SELECT set_config('lock_timeout', %(wait)s::text, true)", columns=("text",))
# At a higher isolation level the SELECT would not see the final state of the row that the INSERT ran into.
READ_COMMITTED = Sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
# Age alone is not enough: a clock that had jumped ahead has deleted tokens that look young now.
LOOK = Sql(
    """
SELECT committed, clock_timestamp() - interval '{retention_days} days' > to_timestamp(%(born_s)s::float8)
    OR coalesce(token <= (SELECT tokens_swept FROM {schema}.node), false)
FROM {schema}.commit_token WHERE token = %(token)s::uuid
""",
    columns=("boolean", "boolean"),
    retention_days=RETENTION_DAYS,
)


class Inquiry:
    """Asks how a transaction ended, until there is an answer or the time is up."""

    def __init__(self, schema: str, token: UUID | str, within_s: float) -> None:
        self._schema = schema_name(schema)
        self._token = UUID(str(token))
        self._deadline = time.monotonic() + within_s
        self._failures = 0

    def asking(self) -> Operation[Outcome]:
        """Ask in a transaction of its own; the answer is final once that has committed."""
        yield IN_TRANSACTION
        yield READ_COMMITTED.at()()
        wait_s = min(PATIENCE_S, max(0.1, self._deadline - time.monotonic()))
        yield PATIENCE.at()(wait=f"{wait_s * 1000:.0f}ms")
        yield RULE_OUT.at(schema=self._schema)(token=self._token)
        rows = yield LOOK.at(schema=self._schema)(token=self._token, born_s=(self._token.int >> 80) / 1000)
        if not rows or rows[0][1]:  # raised, so that the row just inserted is rolled back
            raise TokenExpired(self._token, RETENTION_DAYS)
        return "committed" if rows[0][0] else "rolled back"

    def pause_after(self, error: Exception) -> float:
        """Return how many seconds to wait before asking again, or raise if asking again is useless."""
        # Our own sessions raise ConnectionFailed, all others an error of their driver.
        if isinstance(error, MailroomError) and not isinstance(error, ConnectionFailed):
            raise error
        code = sqlstate(error)
        passing = not code or meaning_of_code(code) not in BLAMES
        pause = pause_s(self._failures, 1.0)
        self._failures += 1
        if not passing or time.monotonic() + pause >= self._deadline:
            raise CommitUnknown(self._token, f"{type(error).__name__} {code}".rstrip()) from error
        return pause


def resolve(
    connect: Callable[[], AbstractContextManager[Any]],
    token: UUID | str,
    *,
    schema: str = DEFAULT_SCHEMA,
    within_s: float = RESOLVE_WITHIN_S,
) -> Outcome:
    """Tell how the transaction of a `CommitUnknown.token` ended: "committed" or "rolled back".

    The answer never changes; after "rolled back" the transaction can commit no more. Waits while it is still under
    way. `connect` is as for `atomically`. Raises `CommitUnknown` without an answer in `within_s` seconds (if the
    network drops the question, the timeouts of your connection end it), and `TokenExpired` for a token older than
    7 days.
    """
    inquiry = Inquiry(schema, token, within_s)
    while True:
        try:
            with connect() as connection, _transaction(connection):
                return run(connection, inquiry.asking())
        except Exception as error:
            pause = inquiry.pause_after(error)
        time.sleep(pause)


async def resolve_async(
    connect: Callable[[], AsyncOpened[Any]],
    token: UUID | str,
    *,
    schema: str = DEFAULT_SCHEMA,
    within_s: float = RESOLVE_WITHIN_S,
) -> Outcome:
    """`resolve` for async connections."""
    inquiry = Inquiry(schema, token, within_s)
    while True:
        try:
            async with _opened(connect) as connection, _async_transaction(connection):
                return await run_async(connection, inquiry.asking())
        except Exception as error:
            pause = inquiry.pause_after(error)
        await asyncio.sleep(pause)


def atomically(
    connect: Callable[[], AbstractContextManager[C]],
    work: Callable[[C], T],
    *,
    schema: str = DEFAULT_SCHEMA,
    attempts: int = ATTEMPTS,
) -> T:
    """Run `work(connection)` in one transaction, commit it exactly once, and return what `work` returned.

    `connect`, called without arguments, gives a psycopg connection, a SQLAlchemy `Connection` or `Session`, or a
    context manager that gives one: `partial(psycopg.connect, dsn)`, `pool.connection`, `engine.connect`, a
    `sessionmaker`. It is called for each attempt, and what it gave is closed after it. `work` must not commit or roll
    back, and may run more than once: only what it does in the transaction happens once.

    Serialization failures, deadlocks, lock timeouts (40001, 40P01, 55P03) and a connection that is lost before COMMIT
    make it run again after a pause, `attempts` times in all; then the error itself is raised, as any other is at once.
    In all these cases nothing was committed. If the answer to COMMIT is lost, the outcome is looked up, for 30 s at
    most; then `CommitUnknown` is raised, the one error after which it may have committed. `NotAtomic` says that `work`
    ended the transaction itself or swallowed an error of it.
    """
    schema = schema_name(schema)
    nth = 0
    while True:
        nth += 1
        attempt = Attempt(schema, reconnecting=nth > 1)
        try:
            with connect() as connection, attempt.watching(connection), _transaction(connection) as session:
                run(session, attempt.beginning())
                result = work(connection)
                run(session, attempt.ending())
            return result
        except Exception as error:
            found = attempt.after(error)
            if found is Next.ASK:
                with attempt.asking():
                    outcome = resolve(connect, attempt.token, schema=schema, within_s=RESOLVE_WITHIN_S)
                found = Next.RETURN if outcome == "committed" else Next.RETRY
            if found is Next.RETURN:
                return result
            if found is Next.RAISE or nth >= attempts:
                raise
        time.sleep(pause_s(nth, LONGEST_PAUSE_S))


async def atomically_async(
    connect: Callable[[], AsyncOpened[C]],
    work: Callable[[C], Awaitable[T]],
    *,
    schema: str = DEFAULT_SCHEMA,
    attempts: int = ATTEMPTS,
) -> T:
    """`atomically` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection`, `AsyncSession`.

    `connect` may be a coroutine function: `partial(psycopg.AsyncConnection.connect, dsn)`. A cancellation passes; if
    COMMIT was under way, a note on it names the token to resolve.
    """
    schema = schema_name(schema)
    nth = 0
    while True:
        nth += 1
        attempt = Attempt(schema, reconnecting=nth > 1)
        try:
            async with _opened(connect) as connection:
                with attempt.watching(connection):
                    async with _async_transaction(connection) as session:
                        await run_async(session, attempt.beginning())
                        result = await work(connection)
                        await run_async(session, attempt.ending())
            return result
        except Exception as error:
            found = attempt.after(error)
            if found is Next.ASK:
                with attempt.asking():
                    outcome = await resolve_async(connect, attempt.token, schema=schema, within_s=RESOLVE_WITHIN_S)
                found = Next.RETURN if outcome == "committed" else Next.RETRY
            if found is Next.RETURN:
                return result
            if found is Next.RAISE or nth >= attempts:
                raise
        await asyncio.sleep(pause_s(nth, LONGEST_PAUSE_S))


@contextmanager
def _transaction(connection: Any) -> Iterator[Any]:
    """Commit on leaving; after an exception, leaving `connect` rolls SQLAlchemy's kinds back. Gives the connection."""
    if isinstance(connection, psycopg.Connection):
        with connection.transaction():  # in autocommit mode too
            yield connection
    else:
        yield connection
        connection.commit()


@asynccontextmanager
async def _async_transaction(connection: Any) -> AsyncIterator[Any]:
    if isinstance(connection, psycopg.AsyncConnection):
        async with connection.transaction():
            yield connection
    else:
        yield connection
        await connection.commit()


@asynccontextmanager
async def _opened(connect: Callable[[], AsyncOpened[C]]) -> AsyncIterator[C]:
    opened = connect()
    if not isinstance(opened, AbstractAsyncContextManager):
        opened = await opened
    async with opened as connection:
        yield connection


# Oldest first, so that `node.tokens_swept` covers every deleted token.
SWEEP = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT token FROM {schema}.commit_token
    WHERE token < (lpad(to_hex(floor(extract(
        epoch FROM clock_timestamp() - interval '{longest_days} days') * 1000::numeric)::bigint), 12, '0')
        || repeat('0', 20))::uuid
    ORDER BY token LIMIT %(rows)s::bigint),
gone AS (DELETE FROM {schema}.commit_token AS t USING old WHERE t.token = old.token RETURNING t.token),
swept AS (
    UPDATE {schema}.node SET tokens_swept = greatest(tokens_swept, last.token)
    FROM (SELECT token FROM gone ORDER BY token DESC LIMIT 1) AS last)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
    longest_days=RETENTION_DAYS + 1,
)


def sweeping_tokens(schema: str) -> Operation[int]:
    """Delete the oldest tokens that nobody can ask about any more, 10,000 at most, and return how many."""
    [(deleted,)] = yield SWEEP.at(schema=schema)(rows=SWEPT_AT_ONCE)
    return int(deleted)
