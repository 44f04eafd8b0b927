"""A Kafka of somebody else's: with TLS, logins and rights, of which a bridge has too few, or wrong ones."""

import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping

import pytest

from dispatcher.bridges import tending
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OnFailure, OutSettings
from outbox import Outbox
from tests.bridges.tended import in_state, out_state, tended, why_stopped
from tests.support.kafka_secure import PASSWORD, SecureKafka
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async

pytestmark = pytest.mark.slow

PLAIN: dict[str, str] = {}
WRONG = "hunter2"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, kafka: SecureKafka) -> Iterator[None]:
    """Note trouble soon, and try again soon; leave no rights."""
    for name, seconds in (("PATIENCE_S", 4.0), ("LONGEST_PAUSE_S", 0.1), ("LONGEST_STOP_S", 0.3)):
        monkeypatch.setattr(tending, name, seconds)
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.ABSENT_S", 0.2)
    for module in ("publishing", "taking"):
        monkeypatch.setattr(f"dispatcher.bridges.{module}.OPEN_S", 8.0)
    yield
    kafka.revoke_all()


def give(monkeypatch: pytest.MonkeyPatch, name: str, options: Mapping[str, str]) -> None:
    """Put the options of a bridge into the environment."""
    for option, value in options.items():
        monkeypatch.setenv(f"MAILROOM_BRIDGE_{name.upper()}_{option.upper().replace('.', '_')}", value)


def out(
    node: Node, address: str, topic: str, *, name: str = "out", mark: str | None = None, on_failure: OnFailure = "stop"
) -> None:
    settings = OutSettings("kafka", address, Form(topic), mark is not None, mark, on_failure)
    with node.connection.transaction():
        Bridges().out(node.connection, name, settings, actor="test")


def into(node: Node, address: str, topic: str, *, name: str = "in") -> None:
    with node.connection.transaction():
        Bridges().into(node.connection, name, InSettings("kafka", address, (topic,)), actor="test")


def send(node: Node, *topics: str) -> None:
    with node.connection.transaction():
        for topic in topics:
            Outbox().send(node.connection, topic, 1, key="k")
    node.deliver_all()


def resume(node: Node, name: str) -> None:
    with node.connection.transaction():
        Bridges().resume(node.connection, name, actor="me")


def offsets(kafka: SecureKafka, topic: str) -> int:
    """Return the end of a topic of one partition."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({**kafka.client, "group.id": "nobody"})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1])
    finally:
        consumer.close()


AT_LEAST_ONCE = [
    (
        "topic log1 cannot be published to (Broker: Topic auth",
        "Write and Describe on topic log1",
        "Describe Topic log1",
    ),
    ("(CLUSTER_AUTHORIZATION_FAILED)", "Write and Describe on topic log1", "Write Topic other"),
    ("ProduceRequest for log1 [0]", "Write and Describe on topic log1", "Write Topic log1"),
]
EXACTLY_ONCE = [
    ("the mark has no place: topic mark2", "Read on topic mark2", "Describe Topic mark2"),
    ("(TRANSACTIONAL_ID_AUTH", "Write and Describe on transactional id mailroom.", "Write TransactionalId mailroom.*"),
    ("(GROUP_AUTHORIZATION_FAILED)", "Read on group mailroom.", "Read Group mailroom.*"),
    (
        "topic log2 cannot be published to (Broker: Topic auth",
        "Write and Describe on topic log2",
        "Describe Topic log2",
    ),
    ("Failed to add partition(s) to transaction", "Write and Describe on topic log2", "Write Topic log2"),
    ("Failed to commit offsets to transaction", "Read on topic mark2", "Read Topic mark2"),
]
INTO = {
    "Grant the principal Read and Describe on topic log3": "Describe Topic log3",
    "Grant the principal Read on topic log3": "Read Topic log3",
    "Grant the principal Read on group mailroom.": "Read Group mailroom.*",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [EXACTLY_ONCE, AT_LEAST_ONCE], ids=["exactly once", "at least once"])
async def test_each_right_that_a_bridge_out_lacks_is_named_and_no_other_is_needed(
    node: Node, kafka: SecureKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    steps: list[tuple[str, str, str]],
) -> None:  # fmt: skip
    topic = steps[-1][2].split()[2].replace("mark", "log")
    mark = "mark2" if steps is EXACTLY_ONCE else None
    for each in filter(None, (topic, mark)):
        kafka.create(each, 1)
    give(monkeypatch, "out", kafka.login)
    out(node, kafka.secured, topic, mark=mark)
    send(node, "a", "b", "c")
    async with tended(node):
        for why, right, grant in steps:
            await eventually_async(lambda why=why: why in (out_state(node).why or ""))  # type: ignore[misc]  # bound at once
            assert f"Grant the principal {right}" in (out_state(node).why or "")
            assert (out_state(node).state, out_state(node).backlog, node.dead()) == ("stopped", 3, [])
            kafka.grant(grant)
            resume(node, "out")
        await eventually_async(lambda: (out_state(node).state, out_state(node).acked) == ("open", 3))
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) == len(steps), told
    assert offsets(kafka, topic) >= 3


async def test_each_right_that_a_bridge_in_lacks_is_named_and_no_other_is_needed(
    node: Node, kafka: SecureKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from confluent_kafka import Producer

    kafka.create("log3", 1)
    producer = Producer(dict(kafka.client))
    for nth in range(3):
        producer.produce("log3", str(nth).encode(), b"k")
    producer.flush(30)
    give(monkeypatch, "in", kafka.login)
    into(node, kafka.secured, "log3")
    node.inbox("orders", "log3", origin="in")
    async with tended(node):
        missing = dict(INTO)
        while missing:  # the topic and the group are asked at the same time
            why = await eventually_async(
                lambda: next((why for right in missing if right in (why := why_stopped(node))), "")
            )
            assert node.dead() == []
            kafka.grant(*[missing.pop(right) for right in INTO if right in missing and right in why])
            resume(node, "in")
        await eventually_async(lambda: in_state(node).state == "open" and in_state(node).received == 3)
    assert not [each for each in caplog.records if each.exc_info]
    assert node.value("SELECT count(*) FROM mailroom.inbox") == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("mark", ["mark4", None], ids=["exactly once", "at least once"])
async def test_right_that_one_topic_of_several_lacks_costs_its_records_and_that_of_the_mark_none(
    node: Node, kafka: SecureKafka, monkeypatch: pytest.MonkeyPatch, mark: str | None
) -> None:
    topics = [f"shop-{mark}.{letter}" for letter in "ab"]
    for each in filter(None, (*topics, mark)):
        kafka.create(each, 1)
    kafka.grant(f"Write Topic {topics[0]}", f"Describe Topic {topics[1]}")
    if mark:
        kafka.grant("Write TransactionalId mailroom.*", "Read Group mailroom.*", f"Describe Topic {mark}")
    give(monkeypatch, "out", kafka.login)
    out(node, kafka.secured, f"shop-{mark}.{{topic}}", mark=mark, on_failure="skip")
    async with tended(node):
        if mark:
            send(node, "a")
            await eventually_async(lambda: "Read on topic mark4" in (out_state(node).why or ""))
            assert (out_state(node).state, out_state(node).backlog, node.dead()) == ("stopped", 1, [])
            kafka.grant(f"Read Topic {mark}")
        send(node, "a", "b", "a", "b", "a")
        await eventually_async(lambda: out_state(node).backlog == 0)
        assert len(node.dead()) == 2
        for _, stage, reason in node.dead():
            assert stage == "publish"
            assert f"Grant the principal Write and Describe on topic {topics[1]}." in reason


@pytest.fixture
def web() -> Iterator[str]:
    """The address of a server that speaks another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


async def test_wrong_address_login_or_certificate_is_told_in_a_line_and_no_secret_anywhere(
    node: Node, kafka: SecureKafka, web: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each case has a bridge of its own, out and in; those at the right address go on once their options are right."""
    kafka.create("right", 1)
    kafka.grant("Write Topic right", "Read Topic right", "Read Group mailroom.*")
    login = kafka.login
    untrusted = "or is for another host than the address names"
    tls_only = {"security.protocol": "SSL", "ssl.ca.location": login["ssl.ca.location"]}
    cases = {
        "host": ("nowhere.invalid:9092", PLAIN, "unreachable", "Failed to resolve 'nowhere.invalid:9092'"),
        "web": (web, PLAIN, "unreachable", "What answers there is no Kafka, or wants TLS"),
        "webtls": (web, login, "stopped", "What answers there speaks no TLS"),
        "tlstoplain": (kafka.bootstrap, tls_only, "unreachable", "connecting to a PLAINTEXT broker listener?"),
        "misnamed": (kafka.misnamed, login, "stopped", untrusted),
        "login": (kafka.secured, login | {"sasl.password": WRONG}, "stopped", "invalid credentials"),
        "mechanism": (kafka.secured, login | {"sasl.mechanism": "PLAIN"}, "stopped", "mechanisms: SCRAM-SHA-512"),
        "authority": (kafka.secured, login | {"ssl.ca.location": str(kafka.other_authority)}, "stopped", untrusted),
        "plaintotls": (kafka.secured, {"security.protocol": "PLAINTEXT"}, "unreachable", "see security.protocol"),
        "codec": (kafka.secured, login | {"compression.type": "brotli"}, "stopped", 'Invalid value "brotli"'),
        "pem": (kafka.secured, login | {"ssl.key.pem": WRONG}, "stopped", "ssl.key.pem failed: not in PEM format"),
    }  # fmt: skip
    for name, (address, options, _, _) in cases.items():
        for way in ("out", "in"):
            give(monkeypatch, f"{way}_{name}", {"sasl.password": WRONG} | options)
        out(node, address, "right", name=f"out-{name}")
        into(node, address, "right", name=f"in-{name}")
    send(node, "order.paid")

    def states() -> dict[str, tuple[str, str]]:
        with node.connection.transaction():
            found = Bridges().status(node.connection)
        rows = [(each.name, each.state, each.why) for each in found.out]
        rows += [(each.name, each.state, each.why) for each in found.into]
        return {name: (state, why or "") for name, state, why in rows}

    untold = {f"{way}-{name}": told for name, (_, _, *told) in cases.items() for way in ("out", "in")}

    def all_told() -> bool:
        for name, (state, why) in states().items():
            if name in untold and untold[name][0] == state and untold[name][1] in why:
                del untold[name]
        return not untold

    async with tended(node):
        await eventually_async(all_told)
        assert not [each for each in caplog.records if each.exc_info]
        tables = node.rows("SELECT table_name FROM information_schema.tables WHERE table_schema = 'mailroom'")
        rows = [node.rows(f"SELECT t::text FROM mailroom.{table} AS t") for (table,) in tables]
        assert not re.search(f"{WRONG}|{PASSWORD}", f"{caplog.text}{states()}{rows}")
        right = [name for name, (address, _, _, _) in cases.items() if address == kafka.secured]
        monkeypatch.delenv("MAILROOM_BRIDGE_OUT_PEM_SSL_KEY_PEM")
        monkeypatch.delenv("MAILROOM_BRIDGE_IN_PEM_SSL_KEY_PEM")
        for name in right:
            give(monkeypatch, f"out_{name}", {"compression.type": "zstd", **login})
            give(monkeypatch, f"in_{name}", login)
            give(monkeypatch, f"in_{name}", {"compression.type": "zstd"})
        mended = {f"{way}-{name}" for name in right for way in ("out", "in")}

        def all_mended() -> bool:
            mended.difference_update(name for name, (state, _) in states().items() if state == "open")
            return not mended

        await eventually_async(all_mended, 2 * WITHIN_S)  # several begin anew only once they have reached nobody
        await eventually_async(lambda: offsets(kafka, "right") >= len(right))
