"""Through Kafka's protocol: the main ways on librdkafka's mock cluster, what that cannot do on a real one."""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.cimpl import NewPartitions

from dispatcher.bridges.kafka import source as kafka_source
from dispatcher.bridges.kafka.options import client_options, hiding
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.settings import OutSettings
from mailroom.bridges.source import BrokerPosition
from mailroom.errors import ConfigurationError
from mailroom.links.start import jumping
from mailroom.sql.runner import run
from mailroom.values import codec
from outbox import Outbox
from tests.bridges.tended import beside, in_state, out_state, set_bridge, tended, why_stopped
from tests.bridges.through_kafka import MESSAGES, bridged, clocks, count, expected, numbers, read_log, send
from tests.faults.bridges.segments import Partition
from tests.support.command import error_of, mailroom
from tests.support.kafka import Kafka
from tests.support.kafka_mock import MockKafka
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually, eventually_async

PRODUCE, END_TXN = 0, 26
PASSING = (6, 7, 13, -195)  # not the leader, timed out, disconnected, cut off


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often whether a topic is the same."""
    monkeypatch.setattr(kafka_source, "LOOK_S", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
async def test_messages_come_through_once_and_in_order_while_the_broker_fails(
    node: Node, mock_kafka: MockKafka, exactly_once: bool
) -> None:
    topic = f"through-{exactly_once}"
    mock_kafka.create(topic, 3)
    bridged(node, mock_kafka.bootstrap, topic, exactly_once=exactly_once)
    mock_kafka.errors(PRODUCE, *PASSING)
    mock_kafka.errors(END_TXN, *((14, 16) if exactly_once else ()))  # the coordinator loads, or is another one
    send(node)
    async with tended(node):
        await eventually_async(lambda: count(node) == MESSAGES)
        mock_kafka.errors(PRODUCE, *PASSING)
        send(node, MESSAGES)
        await eventually_async(lambda: count(node) == 2 * MESSAGES)
        await eventually_async(lambda: out_state(node).acked == 2 * MESSAGES)
    assert numbers(node) == expected(2 * MESSAGES)
    log = clocks(read_log({"bootstrap.servers": mock_kafka.bootstrap}, topic))
    assert len({part for part, _ in log}) == 3
    if exactly_once:
        assert len(log) == len(set(log)) == 2 * MESSAGES


@pytest.mark.slow
async def test_what_was_published_before_a_crash_comes_in_once(node: Node, mock_kafka: MockKafka) -> None:
    """The broker has it, and the database does not know: as if the dispatcher had died before it committed that."""
    mock_kafka.create("crash", 3)
    log = await crashed(node, {"bootstrap.servers": mock_kafka.bootstrap}, exactly_once=False)
    assert len(log) == 4 * MESSAGES - 50


async def crashed(
    node: Node, client: dict[str, object], *, exactly_once: bool, topic: str = "crash",
    meanwhile: Callable[[], None] = lambda: None,
) -> list[tuple[int, int]]:  # fmt: skip
    """Publish to the topic, forget a part of what was acknowledged, and go on; return what is in the log."""
    bridged(node, str(client["bootstrap.servers"]), topic, exactly_once=exactly_once, encode="cbor")
    send(node)
    node.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == MESSAGES)
    node.connection.execute("UPDATE mailroom.link SET acked = 50")
    meanwhile()
    send(node, MESSAGES)
    async with tended(node):
        await eventually_async(lambda: count(node) == 2 * MESSAGES)
        await eventually_async(lambda: out_state(node).acked == 2 * MESSAGES)
    send(node, 2 * MESSAGES)
    async with tended(node):
        await eventually_async(lambda: count(node) == 3 * MESSAGES)
        await eventually_async(lambda: out_state(node).acked == 3 * MESSAGES)
    assert {key: sorted(each, key=str) for key, each in numbers(node).items()} == {
        key: sorted(each, key=str) for key, each in expected(3 * MESSAGES).items()
    }
    log = clocks(read_log(client, topic))
    assert len(set(log)) == 3 * MESSAGES
    return log


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_broker_that_is_away_holds_up_nothing_but_its_bridge(node: Node, mock_kafka: MockKafka) -> None:
    mock_kafka.create("away", 1)
    bridged(node, mock_kafka.bootstrap, "away")
    node.inbox("local", "order.paid")
    async with tended(node):
        send(node, 0, 7)
        await eventually_async(lambda: (count(node), out_state(node).acked) == (14, 7))
        mock_kafka.down()
        try:
            send(node, 7, 7)
            assert node.value("SELECT count(*) FROM mailroom.inbox WHERE inbox = 'local'") == 14
            await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"unreachable"})
            assert out_state(node).backlog == 7
            idle = "state ^@ 'idle in transaction'"
            await eventually_async(lambda: not node.sessions("mailroom", idle))  # but while trouble is noted
        finally:
            mock_kafka.up()
        await eventually_async(lambda: count(node) == 28)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"open"})
    ordered = node.rows("SELECT value FROM mailroom.inbox WHERE inbox = 'orders' AND key = 'k3' ORDER BY clock")
    assert [codec.decode(value) for (value,) in ordered] == [3, 10]


@pytest.mark.slow
async def test_record_too_large_for_the_client_is_told_before_it_is_sent(node: Node, mock_kafka: MockKafka) -> None:
    mock_kafka.create("large", 1)
    bridged(node, mock_kafka.bootstrap, "large", on_failure="skip")
    with node.connection.transaction():
        Outbox().send(node.connection, "order.paid", "x" * 1_100_000, key="k0")
    send(node, 0, 3)
    async with tended(node):
        await eventually_async(lambda: count(node) == 3)
        await eventually_async(lambda: out_state(node).acked == 4)
    [(_, stage, reason)] = node.dead()
    assert stage == "publish"
    assert "message.max.bytes is 1,000,000. Raise it for this bridge and for its topic." in reason


def test_command_tells_in_one_line_what_is_wrong_and_shows_no_secret(node: Node, mock_kafka: MockKafka) -> None:
    bridged(node, mock_kafka.bootstrap, "any", into=False)
    assert mailroom("bridge", "test", "out", dsn=node.dsn).output.endswith("is reached.\n")
    wrong = mailroom("bridge", "test", "out", dsn=node.dsn, MAILROOM_BRIDGE_OUT_SASL_PASWORD="hunter2")
    assert error_of(wrong) == 'Bridge out: No such configuration property: "sasl.pasword"'
    ours = mailroom("bridge", "test", "out", dsn=node.dsn, MAILROOM_BRIDGE_OUT_ACKS="1")
    assert "acks cannot be set, since the guarantees of a bridge rest on it" in error_of(ours)
    file = mailroom("bridge", "test", "out", dsn=node.dsn, MAILROOM_BRIDGE_OUT_FILE="/nowhere/options")
    assert "MAILROOM_BRIDGE_OUT_FILE names a file that cannot be read: FileNotFoundError" in error_of(file)
    with node.connection.transaction(), pytest.raises(ConfigurationError, match="holds no user and no password"):
        Bridges().out(node.connection, "x", OutSettings("kafka", "me:hunter2@host:9092"), actor="me")


@pytest.mark.slow
def test_command_tells_that_nobody_is_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.cli.bridge.TEST_S", 1.0)
    bridged(node, "127.0.0.1:9", "any", into=False)
    assert "127.0.0.1:9 is not reached: " in error_of(mailroom("bridge", "test", "out", dsn=node.dsn))


def test_options_come_from_the_environment_and_what_is_secret_is_never_shown(tmp_path: Path) -> None:
    from mailroom.bridges.environment import reading_options

    file = tmp_path / "options"
    file.write_text("# of the cluster\nsasl.username = me\nsasl.password=from=file\n")
    environment = {
        "MAILROOM_BRIDGE_EU_FILE": str(file), "MAILROOM_BRIDGE_EU_SASL_PASSWORD": "hunter2",
        "MAILROOM_BRIDGE_EU_2_SASL_PASSWORD": "other", "MAILROOM_BRIDGE_OTHER_ACKS": "1",
    }  # fmt: skip
    found = reading_options("eu", ["eu", "eu-2"], environment)
    assert found == {"sasl_username": "me", "sasl_password": "hunter2"}
    options = client_options("eu", found)
    assert options == {"sasl.username": "me", "sasl.password": "hunter2"}
    file.write_text("log__level = 6\n")
    environment = {"MAILROOM_BRIDGE_EU_FILE": str(file), "MAILROOM_BRIDGE_EU_LOG__LEVEL": "7"}
    assert reading_options("eu", ["eu"], environment | {"MAILROOM_BRIDGE_EU_LOG_QUEUE": "1"}) == {
        "log__level": "7", "log_queue": "1",
    }  # fmt: skip
    assert client_options("eu", {"log__level": "7", "log_queue": "1"}) == {"log_level": "7", "log.queue": "1"}
    assert hiding(options, "login hunter2 of me") == "login *** of me"


# -- On a real one ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the mock cluster does not keep what a transaction commits as an offset
async def test_what_was_published_exactly_once_before_a_crash_is_not_repeated_in_the_log(
    node: Node, kafka: Kafka
) -> None:
    kafka.create("crash", 3)
    log = await crashed(node, dict(kafka.client), exactly_once=True)
    assert len(log) == 3 * MESSAGES


@pytest.mark.slow
async def test_what_is_published_again_comes_in_once_though_partitions_were_added(node: Node, kafka: Kafka) -> None:
    kafka.create("added", 2)

    def add() -> None:
        [done] = kafka.admin.create_partitions([NewPartitions("added", 5)]).values()
        done.result()

    log = await crashed(node, dict(kafka.client), exactly_once=False, topic="added", meanwhile=add)
    assert len({part for part, _ in log}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
async def test_what_a_lost_history_has_published_comes_in_once(node: Node, kafka: Kafka, exactly_once: bool) -> None:
    """The sender is put back to where half of what was published was not delivered yet, and delivers it again."""
    topic = f"put-back-{exactly_once}"
    kafka.create(topic, 3)
    bridged(node, kafka.bootstrap, topic, exactly_once=exactly_once)
    send(node)
    async with tended(node):
        await eventually_async(lambda: count(node) == out_state(node).acked == MESSAGES)
    half = MESSAGES // 2
    again = node.rows("SELECT message_id, topic, key, value FROM mailroom.inbox ORDER BY sent_clock OFFSET %s", half)
    node.connection.execute("UPDATE mailroom.link SET acked = %s", [half])
    node.connection.execute("DELETE FROM mailroom.transit WHERE seq > %s", [half])
    with node.connection.transaction():
        last = node.value("SELECT last_value FROM mailroom.clock")
        node.connection.execute(
            "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, value, sent_at) "
            "SELECT number, %s, 1, now(), gen_random_uuid(), 'x', 'x', '\\x00', now() FROM mailroom.link "
            "WHERE NOT EXISTS (SELECT FROM mailroom.transit)",
            [half],
        )
        for row in again:
            node.connection.execute(
                "INSERT INTO mailroom.outbox (message_id, topic, key, value) VALUES (%s, %s, %s, %s)", row
            )
        run(node.connection, jumping(SCHEMA, is_here=True))
    assert node.value("SELECT last_value FROM mailroom.clock") > last
    send(node, MESSAGES)
    async with tended(node):
        await eventually_async(lambda: count(node) == 2 * MESSAGES)
        await eventually_async(lambda: out_state(node).backlog == 0)
    assert numbers(node) == expected(2 * MESSAGES)
    log = read_log(dict(kafka.client), topic)
    ids = [dict(message.headers() or [])["ce_id"] for message in log]
    assert len(ids) == len(set(ids)) == 2 * MESSAGES


@pytest.mark.slow
async def test_another_producer_fences_ours_which_begins_anew_without_repeats(node: Node, kafka: Kafka) -> None:
    kafka.create("fenced", 3)
    bridged(node, kafka.bootstrap, "fenced", exactly_once=True)
    [(node_id, link)] = node.rows("SELECT n.id, l.number FROM mailroom.node AS n, mailroom.link AS l")
    send(node)
    async with tended(node):
        await eventually_async(lambda: count(node) == MESSAGES)
        rival = Producer({**kafka.client, "transactional.id": f"mailroom.{node_id}.{link}"})
        rival.init_transactions(30)
        send(node, MESSAGES)
        await eventually_async(lambda: count(node) == 2 * MESSAGES)
        await eventually_async(lambda: out_state(node).acked == 2 * MESSAGES)
    assert numbers(node) == expected(2 * MESSAGES)
    log = clocks(read_log(dict(kafka.client), "fenced"))
    assert len(log) == len(set(log)) == 2 * MESSAGES


@pytest.mark.slow
async def test_mark_that_the_broker_has_forgotten_is_told_and_comes_twice_at_most_from_acked_on(
    node: Node, kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    kafka.create("forgotten", 1)
    bridged(node, kafka.bootstrap, "forgotten", exactly_once=True)
    [(node_id, link)] = node.rows("SELECT n.id, l.number FROM mailroom.node AS n, mailroom.link AS l")
    send(node)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == MESSAGES)
    [done] = kafka.admin.delete_consumer_groups([f"mailroom.{node_id}.{link}"]).values()
    done.result()
    send(node, MESSAGES)
    with caplog.at_level(logging.WARNING, "mailroom.dispatcher"):
        async with tended(node):
            await eventually_async(lambda: count(node) == 2 * MESSAGES)
    assert f"the mark of out is gone at the broker: going on behind row {MESSAGES}" in caplog.text
    log = clocks(read_log(dict(kafka.client), "forgotten"))
    assert len(log) == len(set(log)) == 2 * MESSAGES


@pytest.mark.slow
async def test_log_that_was_cut_back_stops_the_bridge_which_says_how_many_are_missing(node: Node, kafka: Kafka) -> None:
    kafka.create("retention", 1)
    bridged(node, kafka.bootstrap, "retention")
    send(node, 0, 10)
    async with tended(node):
        await eventually_async(lambda: count(node) == 10)
    producer = Producer(dict(kafka.client))
    for n in range(20):
        producer.produce("retention", str(n).encode(), b"x")
    producer.flush(30)
    [gone] = kafka.admin.delete_records([TopicPartition("retention", 0, 25)]).values()
    gone.result()
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert "partition 0 of retention: records 10 to 24 (15) are deleted there." in why
        assert "mailroom bridge resume in --at retention/0=25" in why
        await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("retention", 0, 25), actor="me"))
        await lane.follow_until(lambda: count(node) == 15)


def make_anew(kafka: Kafka, topic: str, records: int) -> None:
    """Delete a topic, make one of the same name, and write this many records into it."""
    [gone] = kafka.admin.delete_topics([topic]).values()
    gone.result()

    def made() -> bool:
        with suppress(KafkaException):  # while it is not gone everywhere
            kafka.create(topic, 1)
            return True
        return False

    eventually(made)
    write(kafka, topic, records)


def write(kafka: Kafka, topic: str, records: int) -> None:
    """Write this many records that no bridge has made."""
    producer = Producer(dict(kafka.client))
    for _ in range(records):
        producer.produce(topic, str(uuid4()).encode(), b"k")
    assert producer.flush(30) == 0


@pytest.mark.slow
@pytest.mark.sample(1)  # the other two cases are those of a topic that was made anew
@pytest.mark.parametrize("runs", [False, True], ids=["while the dispatcher is stopped", "while it runs"])
async def test_log_that_a_crash_cut_back_is_not_read_on_however_far_it_was_written_anew(
    node: Node, kafka: Kafka, runs: bool
) -> None:
    topic = f"crashed-{runs}"
    kafka.create(topic, 1)
    bridged(node, kafka.bootstrap, topic)
    write(kafka, topic, 4)
    [segment] = kafka.log.parent.glob(f"data/{topic}-0/*.log")
    kept = segment.stat().st_size
    write(kafka, topic, 6)

    def cut_back() -> None:
        kafka.kill()
        os.truncate(segment, kept)
        kafka.start()
        write(kafka, topic, 20)

    async with tended(node):
        await eventually_async(lambda: count(node) == 10)
        if runs:
            await asyncio.to_thread(cut_back)
            await eventually_async(lambda: why_stopped(node))
    if not runs:
        cut_back()
    async with tended(node) as lane:
        assert "cut back" in await eventually_async(lambda: why_stopped(node))
        assert count(node) == 10
        await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition(topic, 0, 4), actor="me"))
        await lane.follow_until(lambda: count(node) == 30)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [False, True], ids=["while the dispatcher is stopped", "while it runs"])
async def test_topic_that_was_made_anew_stops_the_bridge_however_far_it_reaches(
    node: Node, kafka: Kafka, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    monkeypatch.setattr(kafka_source, "LOOK_S", 3_600.0)  # what was read is looked at nevertheless
    topic = f"anew-{runs}"
    kafka.create(topic, 1)
    bridged(node, kafka.bootstrap, topic)
    send(node, 0, 5)
    async with tended(node):
        await eventually_async(lambda: count(node) == 5)
        if runs:
            await asyncio.to_thread(make_anew, kafka, topic, 12)
            await eventually_async(lambda: "made anew" in why_stopped(node))
    if not runs:
        make_anew(kafka, topic, 12)
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert f"partition 0 of {topic}: the topic was made anew" in why
        assert f"mailroom bridge resume in --at {topic}/0=0" in why
        await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition(topic, 0, 0), actor="me"))
        assert count(node) == 5
        await lane.follow_until(lambda: count(node) == 5 + 12)
        assert not why_stopped(node)


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
async def test_log_that_lacks_what_it_had_acknowledged_stops_who_publishes_there(
    node: Node, kafka: Kafka, exactly_once: bool
) -> None:
    topic = f"lacking-{exactly_once}"
    kafka.create(topic, 1)
    bridged(node, kafka.bootstrap, topic, exactly_once=exactly_once, into=False)
    send(node, 0, 5)

    async def stopped(told: str) -> None:
        why = await eventually_async(lambda: why_stopped(node, out_state))
        assert re.match(f"partition 0 of {topic}: the broker had acknowledged record {told}: the log was cut", why)

    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 5)
        await asyncio.to_thread(make_anew, kafka, topic, 2)
        send(node, 5, 2)
        await stopped("4, and (has given number 2 to a later one|its log ends before record .)")
    write(kafka, topic, 9)
    async with tended(node) as lane:
        await stopped("4, and .*")
        await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
        await lane.follow_until(lambda: out_state(node).acked == 7 and out_state(node).state == "open")
    make_anew(kafka, topic, 0)
    async with tended(node) as lane:
        await stopped(".*, and its log ends before record 0")
        await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
        send(node, 7, 1)
        await lane.follow_until(lambda: out_state(node).acked == 8)


@pytest.mark.slow
async def test_end_of_a_transaction_that_retention_took_away_is_no_lost_record(node: Node, kafka: Kafka) -> None:
    kafka.create("ended", 1)
    bridged(node, kafka.bootstrap, "ended", exactly_once=True)
    send(node, 0, 3)
    async with tended(node):
        await eventually_async(lambda: count(node) == 3)
        # After the third record lies the end of its transaction.
        await eventually_async(lambda: [each.next for each in in_state(node).positions] == [4])
    [gone] = kafka.admin.delete_records([TopicPartition("ended", 0, 4)]).values()
    gone.result()
    send(node, 3, 3)
    async with tended(node):
        await eventually_async(lambda: count(node) == 6 and in_state(node).state == "open")


@pytest.mark.slow
async def test_unknown_topic_and_a_limit_of_the_topic_are_told_and_nothing_is_lost(node: Node, kafka: Kafka) -> None:
    bridged(node, kafka.bootstrap, "later", into=False)
    send(node, 0, 3)
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert "topic later cannot be published to" in (out_state(node).why or "")
        kafka.create("later", 1, max_message_bytes=20_000)
        await eventually_async(lambda: out_state(node).acked == 3)
    set_bridge(node, "out", on_failure="skip")
    with node.connection.transaction():
        Outbox().send(node.connection, "order.paid", "x" * 50_000, key="k0")
    send(node, 3, 200)  # together larger than the limit, too
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 204)
    [(_, stage, reason)] = node.dead()
    assert stage == "publish"
    assert "the broker refuses it: " in reason
    assert "Raise max.message.bytes of the topic." in reason
    log = clocks(read_log(dict(kafka.client), "later"))
    assert len(set(log)) == 203


@pytest.mark.slow
def test_log_on_the_disk_is_the_one_that_a_consumer_reads(kafka: Kafka) -> None:
    """The campaign of bridges looks there for what it takes away."""
    kafka.create("disk", 1)
    producer = Producer({**kafka.client, "transactional.id": "disk"})
    producer.init_transactions(30)
    for records, is_kept in ((3, True), (2, False), (1, True)):
        producer.begin_transaction()
        for _ in range(records):
            producer.produce("disk", b"x", headers={"ce_id": str(uuid4()), "mailroom-clock": "7"})
        producer.flush(30)
        producer.commit_transaction(30) if is_kept else producer.abort_transaction(30)
    read = {each.offset(): dict(each.headers() or [])["ce_id"] for each in read_log({**kafka.client}, "disk")}
    found = Partition(kafka.log.parent / "data" / "disk-0")
    assert {at: str(id).encode() for at, id in found.records(0).items()} == read
    assert [*found.records(4)] == [7]
    assert ([each.first for each in found.closed()], found.end, found.clock) == ([0, 4, 7], 9, 7)
    assert found.given_up() is None
    del found.batches[-2:]
    assert found.given_up() is found.batches[-1]
