"""What each of our processes does, in short: run as its role, these need all that the matrix gives it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher import Dispatcher, Executor, deliver_all, execute_all
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.leading import KEEPER, Leading
from dispatcher.links.lane import LinksLane
from inbox import Inbox, Message, Park, Parked, Worker, breakers, limits
from inbox.worker import in_flight
from mailroom import atomically, resolve
from mailroom.metrics.catalog import CLOCK, reading_catalog
from mailroom.metrics.leader import INBOX_OLDEST, Added, sampling
from mailroom.node.dead_letter import DeadLetters
from mailroom.node.status import status
from mailroom.node.trace import causes, trace
from mailroom.registry.breakers import Prefix
from mailroom.schema import check
from mailroom.session import settings
from mailroom.sql.runner import run
from outbox import Executable, Outbox, Outgoing, Store
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually, eventually_async
from tests.support.working import working


def asks(dsn: str) -> None:
    """Find out what became of a COMMIT that was never sent."""
    token = UUID(int=(time.time_ns() // 1_000_000 << 80) | (uuid4().int & (1 << 80) - 1))
    assert resolve(partial(psycopg.connect, dsn), token) == "rolled back"


def writes(node: Node, dsn: str) -> None:
    """A writer: it sends, once too, and in plain SQL, and learns what became of a COMMIT."""
    outbox, store = Outbox(), Store()

    def work(connection: psycopg.Connection[Any]) -> None:
        outbox.send(connection, "shipping", 1, key="k", headers={"a": "b"}, once="one", deliver_after=0)
        outbox.send_many(connection, [Outgoing("shipping", 2), Outgoing("shipping", 3, kind="C")])
        store.increment(connection, "n", 2)
        store.send_many(connection, [Executable("account", "a/b", target="accounting", amount=1, bytes=5)])

    with psycopg.connect(dsn) as connection:
        check(connection)
        asks(dsn)
        atomically(partial(psycopg.connect, dsn), work)
        connection.execute(
            "INSERT INTO mailroom.outbox (topic, value_json, source) VALUES ('t', '1', 'me') RETURNING message_id"
        )
        connection.execute(
            "INSERT INTO mailroom.outbox_executable (operation, key, amount, source) VALUES ('increment', 'k', 1, 'me')"
        )
        assert store.get(connection, "nothing") is None
        assert store.books(connection, "a").count == 0
    writes_by_jdbc(node, dsn)


def writes_by_jdbc(node: Node, dsn: str) -> None:
    """Who writes through outbox_jdbc alone."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT * FROM mailroom.outbox_jdbc WHERE 1 = 0")
        connection.execute(
            "INSERT INTO mailroom.outbox_jdbc (message_id, topic, value_json) VALUES (%s, 'shipping', '1')",
            [str(uuid4())],
        )


def reaps(node: Node, dsn: str, monkeypatch: pytest.MonkeyPatch, inbox: str = "shipping") -> None:
    """A worker: it handles, fails, ends what has failed for good, and accounts for one that has died."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    for key in ("k", "fails", "parks"):
        node.send(inbox, key=key)
    node.deliver_all()
    handled: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        if message.key == "fails":
            raise ValueError
        if message.key == "parks":
            raise Park("no")
        handled.append(message.key)

    with working(Worker(dsn, inbox, handle, poll_interval_s=0.05)):
        if inbox == "ledger":  # it stops as a whole
            eventually(
                lambda: node.rows("SELECT FROM mailroom.key_state WHERE inbox = 'ledger' AND parked_at IS NOT NULL")
            )
        else:
            eventually(lambda: node.rows("SELECT FROM mailroom.dead_letter WHERE inbox = %s AND key = 'fails'", inbox))
            eventually(lambda: node.rows("SELECT FROM mailroom.parked WHERE inbox = %s AND key = 'parks'", inbox))
            eventually(lambda: "k" in handled)
    node.send(inbox, key="waits")
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        run(connection, limits.opening(SCHEMA, inbox, "why"))
        run(connection, limits.moving_on(SCHEMA, inbox))
        assert run(connection, limits.closing(SCHEMA, inbox))
        if inbox == "shipping":
            assert run(connection, breakers.opening_prefix(SCHEMA, inbox, Prefix("waits", "/"), "why"))
            seen = run(connection, breakers.deferring(SCHEMA, inbox))
            run(connection, breakers.deferring(SCHEMA, inbox, replace(seen, clock=0)))
            assert run(connection, breakers.granting(SCHEMA, inbox, "waits", datetime(2100, 1, 1, tzinfo=UTC)))
            run(connection, breakers.failing_try(SCHEMA, inbox, "waits", "waits"))
            assert run(connection, breakers.closing_prefix(SCHEMA, inbox, "waits"))
    asks(dsn)


async def lane_runs(lane: Leading, done: Callable[[], object]) -> None:
    """Run a lane until `done`, and raise what it raises."""
    running = asyncio.create_task(lane.run())
    try:
        await eventually_async(lambda: done() or running.done())
    finally:
        lane.stop()
        await running


def executes(node: Node, dsn: str) -> None:
    """An executor: a batch, an answer, one that dies, a range, and an account."""
    with node.connection.transaction():
        store = Store()
        store.increment(node.connection, "n", 2, notify="shipping")
        store.put(node.connection, "v", b"\x01")
        store.send_many(
            node.connection,
            [
                Executable("account", "a/b", target="accounting", amount=1, bytes=5),
                Executable("increment", "v", amount=1),  # of no number: it dies
                Executable("put", "x", target="things", value=b"\x01"),
                Executable("call", target="nothing", arguments={}),
                Executable("delete_range", "o", end_key="z"),
                Executable("delete", "q"),
            ],
        )
    asyncio.run(
        lane_runs(Executor(dsn, poll_interval_s=0.1), lambda: not node.rows("SELECT FROM mailroom.outbox_executable"))
    )
    execute_all(dsn)
    # What an executable may not do ends it and not the executor.
    assert node.rows("SELECT key, number FROM mailroom.store") == [("n", 2)]
    assert node.value("SELECT count(*) FROM mailroom.accounting") == 2
    assert node.rows("SELECT FROM mailroom.dead_letter WHERE strpos(reason, '42501') > 0") == []


def administers(node: Node, dsn: str) -> None:
    """An operator: it looks, replays, discards, and requeues what died at each stage."""
    parked, letters = Parked("shipping"), DeadLetters()
    with psycopg.connect(dsn) as connection:
        check(connection)
        [found] = parked.keys(connection)
        assert parked.messages(connection, found.key, limit=1)
        assert parked.attempts(connection)
        assert parked.discard(connection, found.key, actor="ada", per_key=1, dry_run=True).messages == 1
        connection.commit()
        assert parked.replay(connection, found.key, actor="ada").messages >= 1
        connection.rollback()
        assert parked.discard(connection, found.key, actor="ada", per_key=1).messages == 1
        connection.commit()
        [(first,)] = connection.execute("SELECT min(id) FROM mailroom.dead_letter").fetchall()
        assert letters.get(connection, first)
        assert letters.requeue(connection, None, actor="ada") >= 3
        connection.rollback()
        assert letters.discard(connection, None, actor="ada") >= 3
        shipping = Inbox("shipping")
        assert shipping.pause(connection, actor="ada")
        run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
        run(node.connection, breakers.opening_prefix(SCHEMA, "shipping", Prefix("waits", "/"), "why"))
        assert shipping.resume(connection, actor="ada")
        connection.commit()
        assert status(node.connection).inboxes[-1].breaker_opened_at is None


def audits(node: Node, dsn: str) -> None:
    """An auditor: status, traces, and lists of what is parked and dead, without what messages say."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert status(connection).inboxes
        [(id,)] = node.rows("SELECT message_id FROM mailroom.inbox LIMIT 1")
        assert trace(connection, id)
        assert causes(connection, id) == []
        assert Parked("shipping").keys(connection)
        assert Parked("ledger").keys(connection) == []
        assert Parked("shipping").attempts(connection)
        assert DeadLetters().find(connection)
        connection.execute("TABLE mailroom.audit")


def measures(node: Node, dsn: str) -> None:
    """What watches a node."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert status(connection).inboxes
        assert list(run(connection, reading_catalog(SCHEMA))[CLOCK])


def delivers(node: Node, dsn: str) -> None:
    """A daemon with all its lanes, and a round of its housekeeping."""
    node.send("shipping", key="delivered")
    node.send("nobody", kind="C")
    with node.connection.transaction():
        Outbox().send(node.connection, "shipping", 1, key="later", deliver_after=0.01)

    async def lanes() -> None:
        for lane, done in (
            (Dispatcher(dsn, poll_interval_s=0.1), lambda: not node.waiting()),
            (
                LinksLane(dsn, SCHEMA, poll_interval_s=0.1),
                lambda: node.rows("SELECT FROM mailroom.lease WHERE role = 'links'"),
            ),
        ):
            await lane_runs(lane, done)

    asyncio.run(lanes())
    deliver_all(dsn)
    asyncio.run(keeps_house(dsn))
    with psycopg.connect(dsn, autocommit=True) as connection:  # with --metrics
        assert list(run(connection, reading_catalog(SCHEMA))[CLOCK])
        assert list(run(connection, sampling(SCHEMA, Added(SCHEMA)))[INBOX_OLDEST])


async def keeps_house(dsn: str) -> None:
    """Do a round of the janitor, which passes over what the database refuses: so its own log is the test's."""
    connection = await settings.connect_async(dsn, "dispatcher housekeeping", KEEPER)
    async with connection:
        janitor = Janitor(SCHEMA)
        janitor.watch(["shipping"])
        await janitor.run_once(connection)
        refused = sorted(janitor._faulty)
    assert not refused, refused
