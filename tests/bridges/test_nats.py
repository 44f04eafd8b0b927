"""Through NATS JetStream, on a real server."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import nats as nats_client
import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, PubAck, RawStreamMsg, RetentionPolicy
from nats.js.errors import APIError

from dispatcher.bridges.kit import hiding
from dispatcher.bridges.nats import publisher as nats_publisher
from dispatcher.bridges.nats import reader as nats_reader
from dispatcher.bridges.nats.options import client_options
from dispatcher.bridges.nats.publisher import NatsPublisher
from dispatcher.bridges.nats.reader import ConsumerLost, StreamReader
from dispatcher.bridges.nats.source import NatsSource
from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.publisher import PublishAgain, RecordRefused
from mailroom.bridges.record import Form, Record
from mailroom.bridges.settings import InSettings, OnFailure, OutSettings
from mailroom.bridges.source import BrokerPosition, BrokerWasAway, InBridge
from mailroom.errors import ConfigurationError
from mailroom.values import codec
from outbox import Outbox, Outgoing
from tests.bridges.nats_records import a_bridge, quicken, record
from tests.bridges.tended import beside, in_state, out_state, set_bridge, tended, why_stopped
from tests.support.command import error_of, mailroom
from tests.support.nats import Nats
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async

WORK_QUEUE = RetentionPolicy.WORK_QUEUE
KEYS, MESSAGES = 5, 100
ODD_KEY = "köy %41\r\nNats-Rollup: all "


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note trouble at once, and try again soon."""
    quicken(monkeypatch)


@asynccontextmanager
async def jetstream(nats: Nats) -> AsyncIterator[JetStreamContext]:
    """A client of the test's own."""
    client = await nats_client.connect(nats.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def published(publisher: NatsPublisher, records: list[Record]) -> str:
    """Publish as the node does, again and again; return what was noted last."""
    while True:
        noted = publisher.plan(records)
        try:
            await publisher.publish(records)
        except PublishAgain:
            continue
        return noted


async def create(nats: Nats, stream: str) -> None:
    """Make a stream, whose subjects begin with its name."""
    async with jetstream(nats) as js:
        await js.add_stream(name=stream, subjects=[f"{stream}.>"])


def bridged(
    node: Node, nats: Nats, stream: str, *, into: bool = True, on_failure: OnFailure = "stop", topic: str = ""
) -> None:
    """Make a bridge out to the stream, and one that takes in from it, for the inbox "orders" of the same node."""
    out = OutSettings("nats", nats.url, Form(topic or f"{stream}.{{topic}}"), on_failure=on_failure)
    with node.connection.transaction():
        Bridges().out(node.connection, "out", out, topics="order.#", actor="test")
    if into:
        node.inbox("orders")
        with node.connection.transaction():
            Bridges().into(node.connection, "in", InSettings("nats", nats.url, (stream,)), actor="test")
            subscribe(node.connection, "orders", "#", origin="in")


def send(node: Node, first: int, count: int) -> None:
    """Send messages of some keys, numbered, and stamp them for the bridge."""
    with node.connection.transaction():
        Outbox().send_many(
            node.connection, [Outgoing("order.paid", n, key=f"k{n % KEYS}") for n in range(first, first + count)]
        )
    node.deliver_all()


def came(node: Node) -> list[object]:
    """Return the values that came in, in order."""
    return [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]


async def log(nats: Nats, stream: str) -> list[RawStreamMsg]:
    """Return what is in the stream."""
    async with jetstream(nats) as js:
        state = (await js.stream_info(stream)).state
        return [await js.get_msg(stream, seq) for seq in range(max(1, state.first_seq), state.last_seq + 1)]


@pytest.mark.slow
async def test_messages_come_through_once_and_in_order_also_while_the_server_dies(node: Node, nats: Nats) -> None:
    await create(nats, "through")
    bridged(node, nats, "through")
    with node.connection.transaction():
        Outbox().send(
            node.connection, "order.paid", "odd", key=ODD_KEY, headers={"Nats-Rollup": "all", "Status": "503"}
        )
    send(node, 0, MESSAGES)
    async with tended(node):
        await eventually_async(lambda: len(came(node)) == MESSAGES + 1)
        send(node, MESSAGES, 20)
        nats.kill()
        send(node, MESSAGES + 20, 80)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"unreachable"})
        nats.start()
        await eventually_async(lambda: len(came(node)) == 2 * MESSAGES + 1)
        await eventually_async(lambda: out_state(node).backlog == 0)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"open"})
    assert came(node) == ["odd", *range(2 * MESSAGES)]
    [(key, headers)] = node.rows("SELECT key, headers FROM mailroom.inbox ORDER BY clock LIMIT 1")
    assert (key, headers) == (ODD_KEY, {"Nats-Rollup": "all", "Status": "503"})
    assert len(await log(nats, "through")) == 2 * MESSAGES + 1


@pytest.mark.slow
async def test_what_was_published_before_a_crash_is_not_repeated_in_the_stream(node: Node, nats: Nats) -> None:
    """The stream has it, and the database does not know; others have written there since."""
    await create(nats, "crash")
    bridged(node, nats, "crash")
    send(node, 0, MESSAGES)
    node.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == MESSAGES)
    async with jetstream(nats) as js:
        for _ in range(nats_publisher.LOOK_AT_ONCE + 2):
            await js.publish("crash.foreign", b'"foreign"')
    node.connection.execute("UPDATE mailroom.link SET acked = 50")
    send(node, MESSAGES, 10)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == MESSAGES + 10)
        await eventually_async(lambda: in_state(node).positions[0].next == MESSAGES + 10 + 22 + 1)
    assert [value for value in came(node) if value != "foreign"] == list(range(MESSAGES + 10))
    topics = node.rows("SELECT DISTINCT topic FROM mailroom.inbox ORDER BY topic")
    assert topics == [("crash.foreign",), ("order.paid",)]
    ours = [each.headers["ce_id"] for each in await log(nats, "crash") if each.headers]
    assert len(ours) == len(set(ours)) == MESSAGES + 10


async def test_zombie_is_fenced_and_others_who_write_there_are_not_taken_for_one(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(nats, "fenced")
    bridge = a_bridge(nats.url, "fenced")
    zombie, next_one, last_one = (NatsPublisher(bridge) for _ in range(3))
    try:
        assert await zombie.open() == 0
        await zombie.publish([record(1, "fenced.x", bridge), record(2, "fenced.x", bridge)])
        async with jetstream(nats) as js:
            await js.publish("fenced.x", b"foreign")
        await published(zombie, [record(3, "fenced.x", bridge)])
        assert await next_one.open() == 3
        await next_one.publish([record(4, "fenced.x", bridge), record(5, "fenced.x", bridge)])
        with pytest.raises(PublishAgain):  # and the node says that another one has the link
            await zombie.publish([record(6, "fenced.x", bridge)])
        since = datetime.now(UTC) - timedelta(minutes=1)
        assert await next_one.published(3, since) == [(4, UUID(int=4)), (5, UUID(int=5))]
        assert await next_one.published(5, since) == []
        monkeypatch.setattr(nats_publisher, "LOOK_BACK", 1)
        async with jetstream(nats) as js:
            await js.publish("fenced.x", b"foreign")
        assert await last_one.open() == 0
        await published(last_one, [record(5, "fenced.x", bridge), record(6, "fenced.x", bridge)])
    finally:
        await zombie.close()
        await next_one.close()
        await last_one.close()
    written = [each.data for each in await log(nats, "fenced")]
    assert written == [b"1", b"2", b"foreign", b"3", b"4", b"5", b"foreign", b"6"]


async def test_record_of_somebody_else_in_between_is_overtaken_by_none_behind_it(nats: Nats) -> None:
    """The next one was expected just where the stream ended by then: it was added, and the one before was lost."""
    await create(nats, "between")
    bridge = a_bridge(nats.url, "between")
    publisher = NatsPublisher(bridge)
    foreign = [b"foreign"]
    publish = publisher._js.publish

    async def publish_late(subject: str, payload: bytes, *others: Any, **more: Any) -> PubAck:
        if payload == b"3" and foreign:
            await publisher._nats.publish(subject, foreign.pop())
        return await publish(subject, payload, *others, **more)

    publisher._js.publish = publish_late  # type: ignore[method-assign, assignment]
    try:
        await publisher.open()
        await published(publisher, [record(n, "between.x", bridge) for n in range(1, 6)])
    finally:
        await publisher.close()
    assert [each.data for each in await log(nats, "between")] == [b"1", b"2", b"foreign", b"3", b"4", b"5"]


async def lose_answers(nats: Nats, monkeypatch: pytest.MonkeyPatch, stream: str, *, first: int) -> None:
    """Make a work queue whose consumer acknowledges at once; the first answers to what is published there are lost."""
    async with jetstream(nats) as js:
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], duplicate_window=0.1, retention=WORK_QUEUE)
    publish = JetStreamContext.publish

    async def eaten(self: JetStreamContext, *given: Any, **more: Any) -> PubAck:
        nonlocal first
        ack = await publish(self, *given, **more)
        await self.delete_msg(stream, ack.seq)
        if (first := first - 1) >= 0:
            raise TimeoutError
        return ack

    monkeypatch.setattr(JetStreamContext, "publish", eaten)


async def test_what_a_queue_has_had_and_deleted_is_not_published_again_though_its_answer_was_lost(
    node: Node, nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lose_answers(nats, monkeypatch, "eager", first=10)
    bridged(node, nats, "eager", into=False)
    send(node, 0, 10)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 10)
        send(node, 10, 3)
        await eventually_async(lambda: out_state(node).acked == 13)
    node.connection.execute("UPDATE mailroom.link SET acked = 10")  # as if the dispatcher had died
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 13)
    async with jetstream(nats) as js:
        assert (await js.stream_info("eager")).state.last_seq == 13


async def test_work_queue_is_asked_what_it_has_of_a_history_that_may_be_lost(nats: Nats) -> None:
    """After each crash of the node's server; and such a queue refuses a reader that acknowledges nothing."""
    async with jetstream(nats) as js:
        await js.add_stream(name="asked", subjects=["asked.>"], retention=WORK_QUEUE)
    bridge = a_bridge(nats.url, "asked")
    publisher = NatsPublisher(bridge)
    try:
        await publisher.open()
        await published(publisher, [record(n, "asked.x", bridge) for n in range(1, 31)])
        await publisher._js.delete_msg("asked", 29)
        await publisher._js.publish("asked.x", b"foreign")
        found = await publisher.published(3, datetime.now(UTC))
    finally:
        await publisher.close()
    assert found == [(n, UUID(int=n)) for n in range(30, 3, -1) if n != 29]


async def test_what_is_deleted_counts_as_published_until_others_write_there(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lose_answers(nats, monkeypatch, "deleted", first=4)
    bridge = a_bridge(nats.url, "deleted")
    first, second, third = (NatsPublisher(bridge) for _ in range(3))
    four, eight = ([record(n, "deleted.x", bridge) for n in range(end - 3, end + 1)] for end in (4, 8))
    try:
        await first.open()
        noted = first.plan(four)
        with pytest.raises(PublishAgain):
            await first.publish(four)
        second.remember(noted)
        assert await second.open() == 4
        await first._js.publish("deleted.x", b"foreign")
        noted = await published(second, eight)
        third.remember(noted)
        assert await third.open() == 4
    finally:
        for each in (first, second, third):
            await each.close()


async def test_foreign_records_that_are_deleted_by_now_are_not_taken_for_those_whose_answers_were_lost(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four are added and deleted, and then two of somebody else; no answer comes."""
    async with jetstream(nats) as js:
        await js.add_stream(name="doubt", subjects=["doubt.>"], duplicate_window=60.0, retention=WORK_QUEUE)
    bridge = a_bridge(nats.url, "doubt")
    publisher = NatsPublisher(bridge)
    publish, unanswered = publisher._js.publish, [b"1", b"2", b"3", b"4"]

    async def eaten(subject: str, payload: bytes, *others: Any, **more: Any) -> PubAck:
        if payload not in unanswered:
            return await publish(subject, payload, *others, **more)
        unanswered.remove(payload)
        if payload == b"3":
            for _ in range(2):
                await publisher._nats.publish(subject, b"foreign")
        with suppress(APIError):
            await publish(subject, payload, *others, **more)
        raise TimeoutError

    look = publisher._look

    async def deleted(*given: Any, **more: Any) -> None:
        async with jetstream(nats) as js:
            await js.purge_stream("doubt")
        await look(*given, **more)

    try:
        await publisher.open()
        monkeypatch.setattr(publisher._js, "publish", eaten)
        monkeypatch.setattr(publisher, "_look", deleted)
        await published(publisher, [record(n, "doubt.x", bridge) for n in range(1, 5)])
    finally:
        await publisher.close()
    assert [each.data for each in await log(nats, "doubt")] == [b"3", b"4"]
    assert unanswered == []


async def test_record_that_the_server_drops_for_the_id_of_another_one_is_told(nats: Nats) -> None:
    await create(nats, "twice")
    bridge = a_bridge(nats.url, "twice")
    publisher = NatsPublisher(bridge)
    try:
        async with jetstream(nats) as js:
            await js.publish("twice.x", b"foreign", headers={"Nats-Msg-Id": str(UUID(int=7))})
        await publisher.open()
        with pytest.raises(RecordRefused, match="at 1, which this bridge has not written"):
            await publisher.publish([record(7, "twice.x", bridge)])
        for subject in ("twice..x", "twice.*", "twice.a b"):
            with pytest.raises(RecordRefused, match="takes none with empty parts"):
                await publisher.publish([record(8, subject, bridge)])
        with pytest.raises(RecordRefused, match="subject elsewhere does not belong to the stream twice"):
            await publisher.publish([record(8, "elsewhere", bridge)])
        # A stream that has this subject, and ends where the bridge's own does.
        await create(nats, "another")
        async with jetstream(nats) as js:
            await js.publish("another.x", b"foreign")
        with pytest.raises(RecordRefused, match=r"subject another\.x does not belong to the stream twice"):
            await publisher.publish([record(8, "another.x", bridge)])
        await publisher.publish([record(8, "twice.x", bridge)])
    finally:
        await publisher.close()
    assert [each.data for each in await log(nats, "twice")] == [b"foreign", b"8"]


async def test_stream_that_is_not_there_is_told_and_a_record_too_large_can_be_left_out(node: Node, nats: Nats) -> None:
    bridged(node, nats, "later", into=False, on_failure="skip")
    with node.connection.transaction():
        Outbox().send(node.connection, "order.paid", "x" * 1_100_000, key="k0")
    send(node, 0, 3)
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert "there is no stream with the subjects later.>. Make one" in (out_state(node).why or "")
        await create(nats, "later")
        await eventually_async(lambda: out_state(node).acked == 4)
    [(_, stage, reason)] = node.dead()
    assert stage == "publish"
    assert "the server's max_payload is 1,048,576. Raise it there." in reason
    async with jetstream(nats) as js:
        await js.add_stream(name="second", subjects=["other.*"])
        await js.add_stream(name="third", subjects=["other.a.*"])
    set_bridge(node, "out", topic="other.{topic}")
    told = error_of(await asyncio.to_thread(mailroom, "bridge", "test", "out", dsn=node.dsn))
    assert "the subjects other.> belong to several streams (second, third)" in told


@pytest.mark.slow
async def test_several_streams_are_read_each_from_its_own_position(node: Node, nats: Nats) -> None:
    streams = ("left", "right")
    for stream in streams:
        await create(nats, stream)
    node.inbox("orders")

    async def write(first: int, count: int) -> None:
        async with jetstream(nats) as js:
            for n in range(first, first + count):
                for stream in streams:
                    await js.publish(f"{stream}.x", str(n).encode())

    def got(stream: str) -> list[object]:
        rows = node.rows("SELECT value FROM mailroom.inbox WHERE topic = %s ORDER BY clock", f"{stream}.x")
        return [codec.decode(value) for (value,) in rows]

    with node.connection.transaction():
        Bridges().into(node.connection, "in", InSettings("nats", nats.url, ("left",)), actor="test")
        subscribe(node.connection, "orders", "#", origin="in")
    await write(0, 3)
    async with tended(node) as lane:
        await lane.follow_until(lambda: len(got("left")) == 3)
        assert got("right") == []
        set_bridge(node, "in", topics=streams)
        await lane.follow_until(lambda: len(got("right")) == 3)
        nats.kill()
        nats.start()
        await write(3, 100)
        await eventually_async(lambda: [len(got(stream)) for stream in streams] == [103, 103])
        # What is read again has the ids that it had when the bridge read that stream alone.
        await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("left", 0, 1), actor="me"))
        await lane.follow_until(lambda: len(got("left")) == 206)
        async with jetstream(nats) as js:
            await js.purge_stream("left")
            await js.publish("left.x", b"0")
        with node.connection.transaction():  # not `beside` it: the bridge must not read the new record before that
            Bridges().resume(node.connection, "in", at=BrokerPosition("left", 0, 50), actor="me")
        await lane.follow_until(lambda: "resume in --at left/0=104" in why_stopped(node))
    assert got("left") == [*range(103)] * 2
    assert got("right") == [*range(103)]
    ids = [count for (count,) in node.rows("SELECT count(*) FROM mailroom.inbox GROUP BY message_id")]
    assert sorted(ids) == [1] * 103 + [2] * 103
    assert {(each.topic, each.next) for each in in_state(node).positions} == {("left", 50), ("right", 104)}


@pytest.mark.slow
async def test_position_that_was_purged_or_whose_stream_is_a_new_one_stops_the_bridge(node: Node, nats: Nats) -> None:
    await create(nats, "purged")
    bridged(node, nats, "purged")
    send(node, 0, 10)
    async with tended(node):
        await eventually_async(lambda: len(came(node)) == 10)
    async with jetstream(nats) as js:
        for n in range(20):
            await js.publish("purged.foreign", str(n).encode())
        await js.delete_msg("purged", 28)  # that one is no loss of ours
        await js.purge_stream("purged", seq=25)
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert "partition 0 of purged: records 11 to 24 (14) are deleted there." in why
        assert "mailroom bridge resume in --at purged/0=25" in why
        await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("purged", 0, 25), actor="me"))
        await lane.follow_until(lambda: len(came(node)) == 15)
        assert came(node)[10:] == [14, 15, 16, 18, 19]
        async with jetstream(nats) as js:
            await js.delete_stream("purged")
        await create(nats, "purged")
        async with jetstream(nats) as js:
            for n in range(40):
                await js.publish("purged.foreign", str(n).encode())
        why = await eventually_async(lambda: why_stopped(node))
        assert "was made anew" in why
        assert "mailroom bridge resume in --at purged/0=1" in why


async def test_stream_that_was_put_back_and_written_on_is_not_read_on(node: Node, nats: Nats, tmp_path: Path) -> None:
    """The server has the files of a day before, and the stream reaches further again by then."""
    await create(nats, "back")
    bridged(node, nats, "back")

    async def write(count: int, text: str) -> None:
        async with jetstream(nats) as js:
            for n in range(count):
                await js.publish("back.foreign", f'"{text} {n}"'.encode())

    await write(3, "first")
    store = nats.log.parent / "streams"
    nats.stop()
    shutil.copytree(store, tmp_path / "copy")
    nats.start()
    await write(3, "lost")
    async with tended(node):
        await eventually_async(lambda: len(came(node)) == 6)
    nats.kill()
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "copy", store)
    nats.start()
    await write(9, "other")
    async with tended(node):
        assert "the record at 6 is not the one" in await eventually_async(lambda: why_stopped(node))
    assert len(came(node)) == 6


async def test_stream_that_lacks_what_it_had_acknowledged_stops_who_publishes_there(node: Node, nats: Nats) -> None:
    await create(nats, "lacking")
    bridged(node, nats, "lacking", into=False)
    send(node, 0, 5)

    async def made_anew() -> None:
        async with jetstream(nats) as js:
            await js.delete_stream("lacking")
        await create(nats, "lacking")

    async def stopped(last: int) -> None:
        why = await eventually_async(lambda: why_stopped(node, out_state))
        assert (
            f"of lacking: the broker had acknowledged record {last}, and its log ends before record 1: the log" in why
        )

    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).acked == 5)
        await made_anew()
        send(node, 5, 3)
        await stopped(5)
        await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
        await lane.follow_until(lambda: out_state(node).acked == 8)
    await made_anew()
    async with tended(node):
        await stopped(3)
    assert await log(nats, "lacking") == []


async def test_stream_is_looked_at_before_it_is_read_on_by_who_had_lost_the_server(nats: Nats) -> None:
    await create(nats, "away")
    source = NatsSource(InBridge("in", 1, UUID(int=7), InSettings("nats", nats.url, ("away",))))
    try:
        await source.open()
        assert await source.begin(await source.begin([])) == []
        assert not await source.read(0.1)
        nats.kill()
        nats.start()

        async def until_read() -> None:
            while not await source.read(0.1):
                pass

        with pytest.raises(BrokerWasAway):
            await asyncio.wait_for(until_read(), WITHIN_S)
    finally:
        await source.close()


GUARDED = """
authorization: {users: [
    {user: me, password: "right"},
    {user: narrow, password: "right", permissions: {publish: ["_INBOX.>", "$JS.API.STREAM.NAMES"]}}]}
"""


async def test_wrong_password_and_missing_rights_stop_the_bridge_and_are_shown_nowhere(
    node: Node, nats: Nats, shared_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Nats(shared_home / f"guarded-{os.getpid()}", GUARDED) as guarded:
        client = await nats_client.connect(guarded.url, user="me", password="right")
        await client.jetstream().add_stream(name="login", subjects=["login.>"])
        await client.close()
        monkeypatch.setenv("MAILROOM_BRIDGE_OUT_USER", "me")
        monkeypatch.setenv("MAILROOM_BRIDGE_OUT_PASSWORD", "hunter2")
        bridged(node, guarded, "login", into=False)
        send(node, 0, 3)
        async with tended(node):
            await eventually_async(lambda: out_state(node).state == "stopped")
            assert "the broker refuses this client: Authorization Violation" in (out_state(node).why or "")
            result = await asyncio.to_thread(mailroom, "bridge", "test", "out", dsn=node.dsn)
            assert "the broker refuses this client" in error_of(result)
            assert "hunter2" not in caplog.text + result.output + str(out_state(node))
            monkeypatch.setenv("MAILROOM_BRIDGE_OUT_PASSWORD", "right")
            monkeypatch.setenv("MAILROOM_BRIDGE_OUT_USER", "narrow")
            await eventually_async(lambda: "permissions violation for publish to" in (out_state(node).why or ""))
            monkeypatch.setenv("MAILROOM_BRIDGE_OUT_USER", "me")
            await eventually_async(lambda: out_state(node).acked == 3)


def test_command_tells_in_one_line_what_is_wrong(node: Node, nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.cli.bridge.TEST_S", 0.5)
    bridged(node, nats, "any", into=False)
    told = error_of(mailroom("bridge", "test", "out", dsn=node.dsn, MAILROOM_BRIDGE_OUT_PASWORD="hunter2"))
    assert told.startswith("Bridge out: pasword cannot be set. The options for NATS are user, password,")
    nobody = OutSettings("nats", "nats://127.0.0.1:9", Form("any"))
    with node.connection.transaction():
        Bridges().out(node.connection, "nobody", nobody, topics="order.#", actor="test")
    told = error_of(mailroom("bridge", "test", "nobody", dsn=node.dsn))
    assert "nats://127.0.0.1:9 is not reached: " in told
    with pytest.raises(ConfigurationError, match="NATS needs no exactly_once"):
        OutSettings("nats", "nats://127.0.0.1:9", Form("any"), exactly_once=True, mark_topic="any")


def test_options_are_those_of_the_client_and_what_is_secret_is_hidden() -> None:
    given = {"user": "me", "password": "hunter2", "tls_hostname": "nats.test"}
    assert client_options("x", given) == given
    assert hiding(given, "login hunter2 of me") == "login *** of me"
    with pytest.raises(ConfigurationError, match="files of TLS"):
        client_options("x", {"tls_ca": "/nowhere/ca.pem"})


async def test_consumer_that_the_server_has_forgotten_is_noticed_though_the_server_says_nothing(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(nats, "forgotten")
    client = await nats_client.connect(nats.url)
    try:
        js = client.jetstream()
        reader = StreamReader(client, js, "forgotten")
        await reader.open(ConsumerConfig(deliver_policy=DeliverPolicy.ALL))
        while not await reader.read(0.05):
            if reader._left <= 0:  # nothing is asked for just now: so nobody is told of the end
                break
        [consumer] = await js.consumers_info("forgotten")
        await js.delete_consumer("forgotten", consumer.name)
        await js.publish("forgotten.one", b"1")
        monkeypatch.setattr(nats_reader, "SLACK_S", 0.1)

        async def until_lost() -> None:
            while True:
                assert not await reader.read(0.05)

        with pytest.raises(ConsumerLost):
            await asyncio.wait_for(until_lost(), WITHIN_S)
    finally:
        await client.close()
