"""Rules of the delivery path that no other test would miss: `tests/mutants` breaks them one by one."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dispatcher.delivery.deliverer import Deliverer
from dispatcher.housekeeping.janitor import raising_floor
from dispatcher.lanes.doorbell import Doorbell
from inbox import AsyncWorker, Inbox, Message
from inbox.by_key import claim
from inbox.by_key.claim import HAS_MORE, PINNED, REAP_KEY
from inbox.handling.batch import Batch
from inbox.keeping import keeping
from inbox.sessions import wakeup
from inbox.worker import loop
from inbox.worker.in_flight import Entry
from mailroom.session.listener import Listener
from mailroom.sql.operation import Execute, Operation, Row, Sql
from mailroom.sql.runner import run
from tests.sql.test_plans import generic_plan
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually_async, wait_until_blocked
from tests.support.working import NEVER_S, is_asleep, working_async

pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]


def deliver(node: Node, *keys: str) -> None:
    """Send messages to `shipping`, their values counting from 0, and deliver them."""
    for nth, key in enumerate(keys):
        node.send("shipping", nth, key=key)
    assert node.deliver().taken == len(keys)


def reaped(connection: psycopg.Connection, key: str) -> list[object]:
    return [message.value for message in Inbox("shipping").reap(connection, key)]


# -- Claims -----------------------------------------------------------------------------------------------------------


def test_message_put_back_while_a_reaper_waits_is_not_overtaken(node: Node, connect: Connect) -> None:
    """A head that moved away and came back is another row, which the statement that waited for it cannot see."""
    deliver(node, "k", "k", "k")
    other = connect()
    with ThreadPoolExecutor(1) as thread:
        with node.connection.transaction():
            node.connection.execute(
                "CREATE TEMPORARY TABLE away ON COMMIT DROP AS SELECT * FROM mailroom.inbox ORDER BY clock LIMIT 1"
            )
            node.connection.execute("DELETE FROM mailroom.inbox WHERE clock = (SELECT clock FROM away)")
            waiting = thread.submit(reaped, other, "k")
            with connect(autocommit=True) as observer:
                wait_until_blocked(observer, other.info.backend_pid)
            node.connection.execute("INSERT INTO mailroom.inbox SELECT * FROM away")
        assert waiting.result() == [0, 1, 2]


# What a claim brings back at its end: here, what there is.
AS_IT_IS = Sql(f"SELECT set_config('mailroom.pinned', concat_ws(',', {claim.CURRENT}), true)", columns=("text",))


def as_planned(step: Execute) -> Operation[tuple[list[Row], Row]]:
    yield AS_IT_IS.at()()
    *rows, last = yield step
    return rows, last


JOINS = {"enable_nestloop", "enable_hashjoin", "enable_mergejoin"}


def test_messages_come_in_clock_order_however_a_heap_in_disorder_is_joined(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans that claims are pinned to happen to keep the order; the statements promise it by themselves."""
    monkeypatch.setattr(claim, "_pinned", as_planned)
    deliver(node, *["k"] * 200)
    node.connection.execute("CREATE TABLE scrambled AS SELECT * FROM mailroom.inbox ORDER BY md5(clock::text)")
    node.connection.execute("TRUNCATE mailroom.inbox_shipping")
    node.connection.execute("INSERT INTO mailroom.inbox SELECT * FROM scrambled")
    connection, inbox = connect(), Inbox("shipping")
    for join in JOINS:
        for other in JOINS - {join}:
            connection.execute("SELECT set_config(%s, 'off', true)", [other])
        for messages in (inbox.reap(connection, "k", limit=100), inbox.reap_any(connection, per_key=100)):
            clocks = [message.clock for message in messages]
            assert len(clocks) == 100, join
            assert clocks == sorted(clocks), join
        connection.rollback()


def test_reap_any_waits_for_no_key_that_another_works_on(node: Node, connect: Connect) -> None:
    deliver(node, "held", "held", "free")
    holder, other, inbox = connect(), connect(), Inbox("shipping")
    inbox.reap(holder, "held", limit=1)
    other.execute("SET LOCAL lock_timeout = '1s'")
    assert [message.key for message in inbox.reap_any(other)] == ["free"]


@pytest.mark.parametrize("statement", [REAP_KEY, HAS_MORE], ids=["reap(key)", "reap(key) looks again"])
def test_key_is_found_by_the_index_of_keys_even_in_a_plan_of_an_empty_inbox(
    node: Node, connect: Connect, statement: Sql
) -> None:
    connection = connect()
    for name, value in PINNED.items():
        connection.execute("SELECT set_config(%s, %s, true)", [name, value])
    plan = generic_plan(connection, statement, keeping(False) if statement is REAP_KEY else {})
    used = {node["Index Name"] for node in plan if str(node.get("Index Name")).endswith("_of_shipping")}
    assert used == {"key_of_shipping"}


# -- The inbox's floor ------------------------------------------------------------------------------------------------


def raise_floor(connection: psycopg.Connection) -> None:
    with connection.transaction():
        run(connection, raising_floor(SCHEMA, "shipping"))


def test_floor_of_an_empty_inbox_is_not_raised_past_a_delivery_that_is_under_way(node: Node, connect: Connect) -> None:
    """The clock moves at once, and the messages stamped by it come later."""
    delivering = Node(node.dsn, connect(autocommit=True))
    janitor = connect(autocommit=True)
    janitor.execute("SET lock_timeout = '10ms'")
    node.send("shipping", 0, key="k")
    with delivering.connection.transaction():
        assert delivering.deliver().taken == 1
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            raise_floor(janitor)
    assert reaped(connect(), "k") == [0]


def test_floor_that_waited_for_a_delivery_looks_again(node: Node, connect: Connect) -> None:
    delivering = Node(node.dsn, connect(autocommit=True))
    janitor = connect(autocommit=True)
    node.send("shipping", 0, key="k")
    with ThreadPoolExecutor(1) as thread:
        with delivering.connection.transaction():
            assert delivering.deliver().taken == 1
            waiting = thread.submit(raise_floor, janitor)
            wait_until_blocked(node.connection, janitor.info.backend_pid)
        waiting.result()
    assert reaped(connect(), "k") == [0]


def test_floor_is_not_raised_past_a_message_whose_reap_may_be_rolled_back(node: Node, connect: Connect) -> None:
    deliver(node, "k", "k")
    holder = connect()
    Inbox("shipping").reap(holder, "k", limit=1)
    raise_floor(node.connection)
    holder.rollback()
    assert reaped(connect(), "k") == [0, 1]


def test_floor_rises_to_just_below_the_oldest_message(node: Node, connect: Connect) -> None:
    deliver(node, "k", "k", "k")
    with connect() as connection:
        Inbox("shipping").reap(connection, "k", limit=2)
    raise_floor(node.connection)
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == 2
    assert reaped(connect(), "k") == [2]


# -- The doorbell -----------------------------------------------------------------------------------------------------


async def test_bell_that_rings_during_the_last_drain_is_heard(node: Node) -> None:
    """The drain's last statement did not see the message, and nobody will ring for it again."""
    listener = Listener(node.dsn, SCHEMA, "outbox", "bell")
    listening = asyncio.create_task(listener.run())
    try:
        await asyncio.wait_for(listener.next_ring().wait(), WITHIN_S)
        async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
            deliverer = Deliverer(connection, SCHEMA)
            doorbell = Doorbell(connection, SCHEMA, "outbox", listener, NEVER_S)
            drains = 0

            async def drain() -> int:
                nonlocal drains
                taken = await deliverer.drain()
                drains += 1
                if drains == 2:
                    rings = listener.next_ring()
                    node.send("shipping")
                    await eventually_async(rings.is_set)
                return taken

            await asyncio.wait_for(doorbell.serve(drain, lambda: True), WITHIN_S)
            await drain()
            assert node.waiting() == []
    finally:
        listening.cancel()
        await asyncio.wait([listening])


@pytest.mark.slow
async def test_worker_that_lies_down_again_misses_no_delivery(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, after full batches: the first time the bell is new, and rings by itself."""
    waits, awake_again, second_sent = asyncio.Event(), False, False
    handled: list[str] = []

    async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
        if not ring.is_set():
            waits.set()
            await ring.wait()
        return True

    async def handle(message: Message, connection: Any) -> None:
        handled.append(message.key)

    class Watched(AsyncWorker):
        async def _work(self, batch: Batch, entry: Entry) -> None:
            nonlocal awake_again, second_sent
            await super()._work(batch, entry)
            if handled == ["first", "next"] and not awake_again:
                await eventually_async(lambda: not is_asleep(node))
                awake_again = True
            elif awake_again and not second_sent:
                # The last scan before the wait is over: if the worker is not asleep by now, nobody rings.
                second_sent = True
                deliver(node, "second")

    monkeypatch.setattr(loop, "heard", heard)
    monkeypatch.setattr(wakeup, "HEARTBEAT_S", 0.01)
    async with working_async(Watched(node.dsn, "shipping", handle, batch=1, poll_interval_s=NEVER_S)):
        await asyncio.wait_for(waits.wait(), WITHIN_S)
        deliver(node, "first", "next")
        await eventually_async(lambda: handled == ["first", "next", "second"])
