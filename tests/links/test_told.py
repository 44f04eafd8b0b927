"""A subscription at another node counts from when that one knows of it, and a subscriber may wait for that."""

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

from dispatcher.links import lane, reading, visit
from dispatcher.links.lane import LinksLane as Lane
from mailroom import AsyncLinks, Links, subscribe, unsubscribe
from mailroom.errors import ConfigurationError, NotSubscribed, UnknownInbox, UnknownLink
from tests.links.test_links import do
from tests.support.command import done, json_of, mailroom, process
from tests.support.node import Node, send
from tests.support.waiting import WITHIN_S, eventually, eventually_async, wait_until_blocked

LINKS = Links()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (lane, "FOLLOW_S", 0.05), (reading, "PATIENCE_S", 0.0), (reading, "LONGEST_PAUSE_S", 0.1),
        (reading, "LONGEST_STOP_S", 0.1), (visit, "MATCH_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def reader(source: Node, target: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """`lyon`, which reads `paris`, and has an inbox without subscriptions."""
    monkeypatch.setenv("MAILROOM_DSN_PARIS", source.dsn)
    target.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
    source.allow_clocks()
    do(source, "allow", "lyon")
    do(target, "add", "paris", reader="lyon")
    target.inbox("invoices")
    return target


@contextlib.asynccontextmanager
async def running(reader: Node) -> AsyncIterator[None]:
    links = Lane(reader.dsn, poll_interval_s=0.05)
    task = asyncio.create_task(links.run())
    try:
        yield
    finally:
        links.stop()
        await asyncio.wait_for(task, WITHIN_S)


def follow(node: Node, *topics: str, origin: str = "paris") -> None:
    with node.connection.transaction():
        subscribe(node.connection, "invoices", topics, origin=origin)


def wait(node: Node, **options: Any) -> None:
    LINKS.wait(node.connection, "invoices", **options)


def stamped(source: Node) -> list[str]:
    """Return the topics that the source knows to be wanted."""
    return [topic for (topic,) in source.rows("SELECT topic FROM mailroom.link_topic ORDER BY topic")]


# -- With a dispatcher ------------------------------------------------------------------------------------------------


async def test_command_returns_once_the_source_knows_and_what_is_sent_then_comes(source: Node, reader: Node) -> None:
    async with running(reader):
        await asyncio.to_thread(done, "inbox", "subscribe", "invoices", "first", "--origin", "paris", dsn=reader.dsn)
        assert stamped(source) == ["first"]
        [pid] = source.sessions("mailroom links")
        with ThreadPoolExecutor(1) as thread, psycopg.connect(source.dsn) as holder:
            holder.execute("SELECT FROM mailroom.link FOR UPDATE")
            command = thread.submit(
                done, "inbox", "create", "audit", "--subscribe", "#", "--origin", "*", dsn=reader.dsn
            )
            await asyncio.to_thread(wait_until_blocked, source.connection, pid)
            assert reader.rows("SELECT cardinality(told) FROM mailroom.origin") == [(1,)]
            assert not command.done()
            holder.rollback()
            said = await asyncio.wrap_future(command)
        assert "Inbox audit exists, subscribed to # of every node." in said
        assert stamped(source) == ["#", "first"]
        source.send("second", key="k")
        await asyncio.to_thread(source.deliver_all)
        await eventually_async(lambda: reader.delivered("inbox, key") == [("audit", "k")])


async def test_subscription_that_is_ended_and_made_again_is_waited_for_anew(source: Node, reader: Node) -> None:
    follow(reader, "paid", "sent")
    async with running(reader):
        await asyncio.to_thread(wait, reader)
    with reader.connection.transaction():
        unsubscribe(reader.connection, "invoices", "paid", origin="paris")
    follow(reader, "paid")
    wait(reader, topics="sent")
    with pytest.raises(NotSubscribed, match="subscribes to paid of paris, which does not know it yet"):
        wait(reader, timeout_s=0)


@pytest.mark.slow
async def test_reader_that_is_allowed_anew_is_waited_for_anew(source: Node, reader: Node) -> None:
    follow(reader, "paid")
    async with running(reader):
        await asyncio.to_thread(wait, reader)
        with psycopg.connect(source.dsn) as holder:
            holder.execute("LOCK mailroom.link_topic IN SHARE ROW EXCLUSIVE MODE")  # hello passes, and asks for nothing
            LINKS.remove(holder, "lyon", actor="ada")
            LINKS.allow(holder, "lyon", actor="ada")
            holder.execute("COMMIT AND CHAIN")
            holder.execute("LOCK mailroom.link_topic IN SHARE ROW EXCLUSIVE MODE")
            anew = "SELECT cardinality(told) FROM mailroom.origin WHERE link > 1"
            await eventually_async(lambda: reader.rows(anew) == [(0,)])
            with pytest.raises(NotSubscribed):
                wait(reader, timeout_s=0)
        async with await psycopg.AsyncConnection.connect(reader.dsn, autocommit=True) as connection:
            await AsyncLinks().wait(connection, "invoices")
        assert stamped(source) == ["paid"]


async def test_total_inbox_waits_until_the_source_has_shown_its_clock(source: Node, reader: Node) -> None:
    reader.inbox("ledger", order="total")
    async with running(reader):
        with reader.connection.transaction():
            subscribe(reader.connection, "ledger", "paid", origin="paris")
        with pytest.raises(NotSubscribed):
            LINKS.wait(reader.connection, "ledger", timeout_s=0)
        waiting = asyncio.create_task(asyncio.to_thread(LINKS.wait, reader.connection, "ledger"))
        while not waiting.done():
            await asyncio.to_thread(source.deliver_all)  # its dispatcher gives the mark
            await asyncio.wait([waiting], timeout=0.05)
        await waiting
        assert stamped(source) == ["paid"]


@pytest.mark.slow
def test_subscriptions_under_flow_miss_nothing_that_is_sent_after_the_command(source: Node, reader: Node) -> None:
    """With dispatchers as processes, and a writer that sends to all topics in turns all the time."""
    topics = [f"flow.t{nth}" for nth in range(3)]
    begun, ends = 0, threading.Event()

    def write() -> None:
        nonlocal begun
        with psycopg.connect(source.dsn) as connection:
            while not ends.is_set():
                begun += 1
                send(connection, topics[begun % len(topics)], key=str(begun))
                connection.commit()

    def received(nth: int) -> set[int]:
        return {int(key) for (key,) in reader.rows(f"SELECT key FROM mailroom.inbox_inbox_{nth}")}

    running = [process("dispatcher", "run", dsn=node.dsn, stderr=subprocess.DEVNULL) for node in (source, reader)]
    try:
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(write)
            try:
                behind = {}
                for nth, topic in enumerate(topics):
                    create = ("inbox", "create", f"inbox_{nth}", "--subscribe", topic, "--origin", "paris")
                    done(*create, dsn=reader.dsn)
                    behind[nth] = begun
                    eventually(partial(received, nth))  # so that all is under way at the next one
                last = begun + 200
                eventually(lambda: begun >= last or writing.done())
            finally:
                ends.set()
            writing.result()
        for nth in behind:
            sent = {key for key in range(behind[nth] + 1, begun + 1) if key % len(topics) == nth}
            assert len(sent) >= 40
            eventually(partial(lambda nth, last: last in received(nth), nth, max(sent)))
            assert sent - received(nth) == set()
    finally:
        for each in running:
            each.terminate()
        assert [each.wait(WITHIN_S) for each in running] == [0, 0]


# -- What no waiting brings -------------------------------------------------------------------------------------------


def test_without_a_dispatcher_the_command_says_so_and_the_subscription_stays(reader: Node) -> None:
    said = mailroom(
        *("inbox", "create", "audit", "--subscribe", "paid", "--origin", "paris", "--timeout-s", "0"), dsn=reader.dsn
    )
    note, error = said.stderr.splitlines()
    assert note == "No dispatcher of this node runs, which has to tell the source: mailroom dispatcher run"
    assert error == (
        "mailroom: error: Inbox audit subscribes to paid of paris, which does not know it yet: no dispatcher of this "
        "node runs: mailroom dispatcher run. What is sent there until it knows does not come. "
        "[MR-subscription-not-told]"
    )
    assert (said.exit_code, said.stdout) == (1, "")
    assert reader.rows("SELECT topic, inbox FROM mailroom.subscription") == [("paid", "audit")]
    said = mailroom("inbox", "subscribe", "audit", "sent", "--origin", "paris", "--no-wait", dsn=reader.dsn)
    assert said.stdout == "Inbox audit has subscribed to sent of paris.\n"
    assert (
        said.stderr
        == "What is sent there comes from when the dispatcher of this node has told it: mailroom link status\n"
    )
    assert said.exit_code == 0


async def test_trouble_with_the_source_is_the_reason(reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(reader, "paid")
    monkeypatch.setenv("MAILROOM_DSN_PARIS", "host=127.0.0.1 port=1")
    async with running(reader):
        await eventually_async(lambda: reader.rows("SELECT FROM mailroom.origin WHERE trouble IS NOT NULL"))
        with pytest.raises(NotSubscribed, match=r"it is unreachable: .* port 1 "):
            wait(reader, timeout_s=0)


def test_what_can_never_come_is_told_at_once(reader: Node) -> None:
    with pytest.raises(UnknownInbox):
        LINKS.wait(reader.connection, "nowhere")
    follow(reader, "paid", origin="rome")
    with pytest.raises(UnknownLink, match="mailroom link add rome"):
        wait(reader)
    with psycopg.connect(reader.dsn) as connection:
        subscribe(connection, "invoices", "sent", origin="paris")
        with pytest.raises(NotSubscribed, match="Commit it before you wait"):
            LINKS.wait(connection, "invoices", origin="paris")
        connection.commit()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(ConfigurationError, match="READ COMMITTED"):
            LINKS.wait(connection, "invoices", origin="paris")


def test_nothing_is_waited_for_where_nothing_is_to_be_told(reader: Node) -> None:
    follow(reader, "own", origin="")
    do(reader, "exclude", "paris")
    follow(reader, "paid")
    wait(reader, timeout_s=0)
    do(reader, "remove", "paris", side="source")
    with reader.connection.transaction():
        unsubscribe(reader.connection, "invoices", "paid", origin="paris")
    follow(reader, "all", origin="*")
    wait(reader, timeout_s=0)


# -- What is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_status_names_the_topics_on_both_sides(source: Node, reader: Node) -> None:
    follow(reader, "paid", "order.#")
    [shown] = json_of("link", "status", dsn=reader.dsn)["sources"]
    assert (shown["topics"], shown["pending"], shown["refused"]) == (["order.#", "paid"], ["order.#", "paid"], [])
    assert "paid (not told yet)" in done("link", "status", dsn=reader.dsn)
    async with running(reader):
        await asyncio.to_thread(wait, reader)
    [shown] = json_of("link", "status", dsn=reader.dsn)["sources"]
    assert (shown["topics"], shown["pending"], shown["refused"]) == (["order.#", "paid"], [], [])
    for node in (source, reader):
        lines = done("link", "status", dsn=node.dsn)
        assert "order.#" in lines
        assert "paid" in lines
        assert "not told" not in lines
