"""Workers under test: run in a thread or task and stopped, with a ledger that their handler writes."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from inbox import AsyncWorker, Message, Worker
from mailroom.sql import locks
from tests.support.node import Node
from tests.support.waiting import WITHIN_S

NEVER_S = 3_600.0  # a poll that no test lives to see

Handler = Callable[[Message, Any], None]
LEDGER = "CREATE TABLE ledger (nth bigserial, key text, clock bigint, xact xid8 DEFAULT pg_current_xact_id())"
# Marks: the node of a worker's tests.
SHIPPING_WITH_LEDGER = [pytest.mark.inbox("shipping", backoff_s=0), pytest.mark.node_sql(LEDGER)]

# For the mark `node_sql`: an open breaker has nothing tried before a test says so by `try_at`, however long that takes.
NO_TRY_BY_ITSELF = """
CREATE FUNCTION much_later() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN NEW.try_at = NEW.try_at + interval '200 s'; RETURN NEW; END $$;
CREATE TRIGGER later BEFORE INSERT OR UPDATE OF tries ON mailroom.breaker FOR EACH ROW EXECUTE FUNCTION much_later();
CREATE TRIGGER later BEFORE UPDATE OF tries ON mailroom.limits FOR EACH ROW EXECUTE FUNCTION much_later()
"""

INSERT = "INSERT INTO ledger (key, clock) VALUES ({}, {})"


def write_ledger(message: Message, connection: Any) -> None:
    """Handle a message: write it to the ledger in the batch's transaction, whatever kind of connection that has."""
    if isinstance(connection, psycopg.Connection):
        connection.execute(INSERT.format("%s", "%s"), [message.key, message.clock])
    else:
        connection.execute(text(INSERT.format(":key", ":clock")), {"key": message.key, "clock": message.clock})


async def write_ledger_async(message: Message, connection: Any) -> None:
    if isinstance(connection, psycopg.AsyncConnection):
        await connection.execute(INSERT.format("%s", "%s"), [message.key, message.clock])
    else:
        await connection.execute(text(INSERT.format(":key", ":clock")), {"key": message.key, "clock": message.clock})


def ledger_keys(node: Node) -> list[str]:
    return [key for (key,) in node.rows("SELECT key FROM ledger ORDER BY nth")]


def deliver(node: Node, *keys: str) -> None:
    """Send messages to `shipping` and deliver them."""
    for key in keys:
        node.send("shipping", key=key)
    node.deliver_all()


def failing_keys(node: Node) -> list[tuple[Any, ...]]:
    return node.rows("SELECT key, attempts FROM mailroom.key_state ORDER BY key")


def is_asleep(node: Node) -> bool:
    """Tell whether a worker sleeps and listens."""
    return bool(
        node.value(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted "
            "AND classid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            locks.ASLEEP,
        )
    )


@contextlib.contextmanager
def working(worker: Worker, *, raises: type[Exception] | None = None) -> Iterator[threading.Thread]:
    """Run the worker in a thread; afterwards stop it, and raise what it raised, unless it had to (`raises`)."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)
            logging.getLogger("mailroom.worker").exception("the worker ended")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(WITHIN_S)
        alive = thread.is_alive()
    if errors and not (raises and isinstance(errors[0], raises)):
        raise errors[0]
    assert not alive
    assert bool(errors) == (raises is not None)


@contextlib.asynccontextmanager
async def working_async(worker: AsyncWorker) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await asyncio.wait_for(task, WITHIN_S)
