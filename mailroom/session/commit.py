"""Transactions that commit exactly once, even if the answer to COMMIT is lost.

The first statement of the transaction writes a token, which commits with it or not at all. If COMMIT was sent and no
answer came, another session inserts the same token. That INSERT waits while the original transaction is still open.
Then it either finds the original's row (committed) or takes its place, after which the original can no longer commit. A
SELECT alone is not enough: a row that it does not find may be about to commit. COMMIT is never sent twice: on another
session it would report success although everything is lost.
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
from mailroom.session.backoff import pause_s
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, T
from mailroom.sql.runner import run, run_async
from mailroom.sql.sight import seeing
from mailroom.sql.sqlstate import ABORTED, BLAMES, Meaning, is_lost, meaning_of_code, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

log = logging.getLogger("mailroom.commit")

C = TypeVar("C")
Outcome: TypeAlias = Literal["committed", "rolled back"]
AsyncOpened: TypeAlias = AbstractAsyncContextManager[C] | Awaitable[AbstractAsyncContextManager[C]]

ATTEMPTS = 10
LONGEST_PAUSE_S = 5.0
RESOLVE_WITHIN_S = 30.0
# How long one inquiry waits for the original transaction. Then another one begins, so that no session hangs for long.
PATIENCE_S = 2.0
RETENTION_DAYS = 7
SWEPT_AT_ONCE = 10_000


class Phase(Enum):
    """The progress of an attempt."""

    CONNECTING = "connecting"
    WORKING = "working"
    CHECKING = "checking"  # the last statement before COMMIT
    COMMITTING = "committing"  # COMMIT was sent, or is about to be
    COMMITTED = "leaving"  # COMMIT was answered


class Next(Enum):
    """What to do after an error."""

    RAISE = "raising it"
    RETRY = "running it again"
    ASK = "asking how it ended"
    RETURN = "it has committed"


def following(phase: Phase, code: str, *, lost: bool) -> Next:
    """Return what to do after an error with this SQLSTATE ("" for none); `lost`: the session is gone."""
    if phase is Phase.COMMITTED:
        return Next.RETURN if lost else Next.RAISE
    if phase is Phase.COMMITTING and (lost or not code):
        return Next.ASK  # only an error from the server on a live session proves that it was rolled back
    return Next.RETRY if lost or meaning_of_code(code) is Meaning.AGAIN else Next.RAISE


# The token begins with the time in milliseconds, like a UUID of version 7: its age is known, and old ones are adjacent.
# D-statements-12: A token tells how a transaction ended.
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
# Fails with 25P02 if a statement has failed: the COMMIT of such a transaction would roll back and report success.
STILL = Sql("SELECT coalesce(pg_current_xact_id_if_assigned()::text = %(xact)s::text, false)", columns=("boolean",))


class CommitAttempt:
    """One attempt of `atomically`: its progress, and what to do after its error."""

    def __init__(self, schema: str, *, reconnecting: bool) -> None:
        self._schema = schema
        self._lost = reconnecting  # if the first connection fails, the caller gets the error; a later one is retried
        self._code: str | None = None
        self._xact = ""
        self._phase = Phase.CONNECTING
        self.token = UUID(int=0)

    @contextmanager
    def watching(self, connection: object) -> Iterator[None]:
        """Run the transaction in this context, including its COMMIT."""
        self._lost = False
        self._phase = Phase.WORKING
        _refuse_to_join(connection)
        try:
            yield
        except BaseException as error:
            # Decided here, since leaving `connect` closes the connection, and may fail too.
            self._lost, self._code = is_lost(error, connection) or _is_given_up(error), sqlstate(error)
            if self._phase is Phase.COMMITTING:
                self._name_token(error)
            raise
        if self._phase is not Phase.COMMITTING:
            raise NotAtomic(
                "The work raised psycopg.Rollback: nothing was committed, and there is no result to return.",
                code="MR-rollback-raised",
            )
        self._phase = Phase.COMMITTED

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Find out in this context how the attempt ended."""
        try:
            yield
        except BaseException as error:
            self._name_token(error)
            raise

    def _name_token(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # a cancellation must not become another exception
            error.add_note(f"Its COMMIT was under way: mailroom.resolve(connect, '{self.token}') tells how it ended.")

    def beginning(self) -> Operation[None]:
        """Write the token: the first statement of the transaction."""
        yield IN_TRANSACTION
        [(self.token, self._xact)] = yield BEGUN.at(schema=self._schema)()

    def ending(self) -> Operation[None]:
        """Check that this is still the transaction that wrote the token, and that it can commit: the last statement."""
        self._phase = Phase.CHECKING
        [(still,)] = yield STILL.at()(xact=self._xact)
        if not still:
            raise NotAtomic(
                "The work ended its transaction itself, so its changes are not one transaction. It must neither commit "
                "nor roll back; `atomically` does that. Check what it has committed.",
                code="MR-transaction-ended",
            )
        self._phase = Phase.COMMITTING

    def after(self, error: Exception) -> Next:
        """Return what to do after the attempt's error; raises `NotAtomic` if the work swallowed an error."""
        if self._phase is Phase.CHECKING and sqlstate(error) == ABORTED:
            raise NotAtomic(
                "The work returned, but a statement had failed in its transaction, so that can only be rolled back. "
                "Let such an error pass, or run the statement in a savepoint. Nothing was committed.",
                code="MR-transaction-aborted",
            ) from error
        code = sqlstate(error) if self._code is None else self._code
        found = following(self._phase, code, lost=self._lost or is_lost(error))
        if found is not Next.RAISE:
            log.info("%s while %s: %s", type(error).__name__, self._phase.value, found.value)
        return found


def _is_given_up(error: BaseException) -> bool:
    """Return whether psycopg lost an established session without a message from the server.

    An example is "connection socket closed": the connection is not `broken` afterwards, but unusable. Errors of
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
            "`connect` returned a connection that is already in a transaction, which `atomically` must not end. "
            "Return a connection without a transaction.",
            code="MR-connection-in-transaction",
        )


RULE_OUT = Sql("INSERT INTO {schema}.commit_token VALUES (%(token)s::uuid, false) ON CONFLICT DO NOTHING")
PATIENCE = Sql("SELECT set_config('lock_timeout', %(wait)s::text, true)", columns=("text",))
# At a higher isolation level the SELECT would not see the final state of the row that the INSERT conflicted with.
READ_COMMITTED = Sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
# The age alone does not decide: if the clock was ahead for a while, tokens were deleted that seem young now.
READ = Sql(
    """
SELECT committed, clock_timestamp() - interval '{retention_days} days' > to_timestamp(%(born_s)s::float8)
    OR coalesce(token <= (SELECT tokens_swept FROM {schema}.node), false)
FROM {schema}.commit_token WHERE token = %(token)s::uuid
""",
    columns=("boolean", "boolean"),
    retention_days=RETENTION_DAYS,
)


class Inquiry:
    """Finds out how a transaction ended: asks until there is an answer or the time is over."""

    def __init__(self, schema: str, token: UUID | str, within_s: float) -> None:
        self._schema = schema_name(schema)
        self._token = UUID(str(token))
        self._deadline = time.monotonic() + within_s
        self._failures = 0

    def asking(self) -> Operation[Outcome]:
        """Ask in a transaction of its own; the answer is final once that transaction has committed."""
        yield IN_TRANSACTION
        yield READ_COMMITTED.at()()
        wait_s = min(PATIENCE_S, max(0.1, self._deadline - time.monotonic()))
        yield PATIENCE.at()(wait=f"{wait_s * 1000:.0f}ms")
        yield RULE_OUT.at(schema=self._schema)(token=self._token)
        rows = yield READ.at(schema=self._schema)(token=self._token, born_s=(self._token.int >> 80) / 1000)
        if not rows or not rows[0][0]:  # "committed" is seen, but neither that there is no such row, nor what was swept
            yield from seeing(self._schema, "commit_token", "node")
        if not rows or rows[0][1]:  # raised, so that the row just inserted is rolled back
            raise TokenExpired(self._token, RETENTION_DAYS)
        return "committed" if rows[0][0] else "rolled back"

    def pause_after(self, error: Exception) -> float:
        """Return how many seconds to wait before asking again; raises if asking again is useless."""
        # Our own sessions raise ConnectionFailed, other ones an error of their driver.
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
    """Return how the transaction of a `CommitUnknown.token` ended: "committed" or "rolled back".

    The answer never changes: after "rolled back" the transaction can no longer commit. This waits while the transaction
    is still open. `connect` is as for `atomically`. Raises `CommitUnknown` if there is no answer within `within_s`
    seconds, and `TokenExpired` for a token older than 7 days. If the network drops packets, only the timeouts of your
    connection end the wait.
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

    `connect`, called without arguments, returns a psycopg connection, a SQLAlchemy `Connection` or `Session`, or a
    context manager that gives one: `partial(psycopg.connect, dsn)`, `pool.connection`, `engine.connect`, a
    `sessionmaker`. It is called for each attempt, and the connection is closed afterwards. `work` must not commit or
    roll back. It may run more than once: only what it does in the transaction happens once.

    After a serialization failure, a deadlock, a lock timeout (40001, 40P01, 55P03) or a connection lost before COMMIT,
    the work is run again after a pause, `attempts` times in all; then that error is raised. Any other error is raised
    at once. In all these cases nothing was committed. If the answer to COMMIT is lost, the outcome is looked up, for at
    most 30 s; then `CommitUnknown` is raised, the one error after which the transaction may have committed. `NotAtomic`
    means that `work` ended the transaction itself or swallowed an error in it.
    """
    schema = schema_name(schema)
    nth = 0
    while True:
        nth += 1
        attempt = CommitAttempt(schema, reconnecting=nth > 1)
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

    `connect` may be a coroutine function: `partial(psycopg.AsyncConnection.connect, dsn)`. A cancellation passes
    through; if COMMIT was under way, its `__notes__` name the token to resolve.
    """
    schema = schema_name(schema)
    nth = 0
    while True:
        nth += 1
        attempt = CommitAttempt(schema, reconnecting=nth > 1)
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
    """Give the connection, and commit on leaving. After an exception, SQLAlchemy rolls back when `connect` is left."""
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
    """Delete the oldest expired tokens, at most 10,000, and return how many."""
    [(deleted,)] = yield SWEEP.at(schema=schema)(rows=SWEPT_AT_ONCE)
    return int(deleted)
