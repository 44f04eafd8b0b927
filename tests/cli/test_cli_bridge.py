"""`mailroom bridge`: what an operator does with bridges, and what it prints."""

import json

import click
import pytest

from dispatcher.cli.bridge import into, out, set_
from mailroom import subscribe
from mailroom.bridges import Bridges
from mailroom.bridges.out import FIXED
from mailroom.bridges.settings import BridgeSettings, InSettings, OutSettings
from mailroom.errors import ConfigurationError
from mailroom.links.readers import LINK
from tests.bridges.webhooks import SECRET
from tests.support.command import done, error_of, json_of, mailroom, untold
from tests.support.node import Node


@pytest.mark.slow
def test_bridge_out_is_made_shown_changed_cut_and_removed(node: Node) -> None:
    out = ("bridge", "out", "orders", "--kafka", "localhost:9092", "--topic", "shop.orders")
    made = done(*out, "--subscribe", "order.#", "--max-rows", "1000", dsn=node.dsn)
    assert "The bridge orders publishes to kafka at localhost:9092." in made
    assert "MAILROOM_BRIDGE_ORDERS_..." in made
    node.send("order.paid", {"n": 1}, key="k")
    node.send("stock", {"n": 2})
    node.deliver_all()
    status = done("bridge", "status", dsn=node.dsn)
    assert "kafka localhost:9092" in status
    assert "This node takes in from no broker" in status
    [state] = json_of("bridge", "status", dsn=node.dsn)["out"]
    assert (state["backlog"], state["topics"], state["max_rows"], state["keep_s"]) == (1, ["order.#"], 1000, 0)
    shown = done("bridge", "show", "orders", dsn=node.dsn)
    assert "shop.orders" in shown
    assert '"n"' not in shown
    whole = done("bridge", "show", "orders", "--values", dsn=node.dsn)
    assert '{"n":1}' in whole
    assert "ce_type" in whole
    [record] = json_of("bridge", "show", "orders", "--values", dsn=node.dsn)
    assert (record["key"], record["headers"]["ce_type"]) == ("k", "order.paid")
    assert "encode json -> cbor." in done("bridge", "set", "orders", "--encode", "cbor", dsn=node.dsn)
    assert json_of("bridge", "status", dsn=node.dsn)["out"][0]["topics"] == ["order.#"]
    assert "Nothing was wrong" in done("bridge", "resume", "orders", dsn=node.dsn)
    assert "would be cut; 1 message" in done("bridge", "cut", "orders", "--dry-run", dsn=node.dsn)
    assert json_of("bridge", "cut", "orders", dsn=node.dsn)["given_up"] == 1
    assert json.loads(done("bridge", "status", "--json", dsn=node.dsn, exit_code=1))["out"][0]["state"] == "cut"
    done("bridge", "remove", "orders", "--why", "moved", dsn=node.dsn)
    assert "There is no bridge orders" in error_of(mailroom("bridge", "show", "orders", dsn=node.dsn))
    assert json_of("bridge", "status", dsn=node.dsn) == {"into": [], "out": []}


def test_stopped_bridge_says_why_and_exits_with_1(node: Node) -> None:
    done("bridge", "out", "orders", "--kafka", "localhost:9092", "--topic", "t", "--exactly-once", dsn=node.dsn)
    node.connection.execute("UPDATE mailroom.bridge_out SET state = 'stopped', why = 'too large.', since = now()")
    status = done("bridge", "status", dsn=node.dsn, exit_code=1)
    assert "exactly once" in status
    assert ": too large." in status
    assert "is tried again" in done("bridge", "resume", "orders", dsn=node.dsn)
    done("bridge", "status", dsn=node.dsn)


def test_bridge_in_is_made_shown_and_told_where_to_go_on(node: Node) -> None:
    made = done(
        "bridge", "in", "stock", "--kafka", "k1:9092,k2:9092", "--from", "a, b", "--key", "path:id", dsn=node.dsn
    )
    assert "mailroom inbox subscribe INBOX TOPIC --origin stock" in made
    node.inbox("reorder")
    with node.connection.transaction():
        subscribe(node.connection, "reorder", "b", origin="stock")
    node.connection.execute(
        "INSERT INTO mailroom.bridge_position (origin, topic, part, next) "
        "SELECT number, 'b', 3, 17 FROM mailroom.origin"
    )
    [state] = json_of("bridge", "status", dsn=node.dsn)["into"]
    assert (state["settings"]["topics"], state["topics"], state["state"]) == (["a", "b"], ["b"], "open")
    assert "b/3=17" in done("bridge", "status", dsn=node.dsn)
    done("bridge", "resume", "stock", "--at", "b/3=99", dsn=node.dsn)
    assert "b/3=99" in done("bridge", "status", dsn=node.dsn)
    assert "is not a place" in mailroom("bridge", "resume", "stock", "--at", "b3", dsn=node.dsn).output
    done("bridge", "remove", "stock", dsn=node.dsn)


def test_bridge_that_exists_stays_as_it_is_until_it_is_set(node: Node) -> None:
    made = {
        "hooks": ("bridge", "out", "hooks", "--webhook", "https://h.example/"),
        "mail": ("bridge", "out", "mail", "--rabbitmq", "h:1"),
        "stock": ("bridge", "in", "stock", "--kafka", "h:1", "--from", "a,b"),
    }
    with_more = {
        "hooks": ("--topic", "t", "--max-rows", "9"),
        "mail": ("--exchange", "shop"),
        "stock": ("--as-topic", "x", "--decode", "text"),
    }
    for name, command in made.items():
        assert json_of(*command, *with_more[name], dsn=node.dsn)["is_new"]
    for table in ("bridge_out", "origin"):
        node.connection.execute(f"UPDATE mailroom.{table} SET state = 'stopped', why = 'too large.', since = now()")
    for name, given, change in (
        ("hooks", ("--topic", "u"), "topic t -> u"),
        ("hooks", ("--subscribe", "b", "--subscribe", "a"), "topics # -> a b"),
        ("hooks", ("--on-failure", "skip", "--max-rows", "0"), "on_failure stop -> skip, max_rows 9 -> none"),
        ("hooks", ("--tombstones",), "tombstones no -> yes"),
        ("mail", ("--exchange", "x"), "own exchange=shop -> exchange=x"),
        ("stock", ("--key", "path:id", "--max-origins", "1"), "key record -> path:id, max_origins 1000 -> 1"),
    ):
        refused = error_of(mailroom(*made[name], *given, dsn=node.dsn))
        assert f"stays as it is: {change}. To change them: mailroom bridge set {name}" in refused
        set_ = ("bridge", "set", name, *given, "--actor", "ada")
        assert done(*set_, dsn=node.dsn) == f"Bridge {name}: {change}.\n"
        assert json_of(*set_, dsn=node.dsn)["change"] is None
        for again in ((), given):
            assert not json_of(*made[name], *again, dsn=node.dsn)["is_new"]
        audited = node.rows("SELECT action, key, change FROM mailroom.audit ORDER BY id DESC LIMIT 1")
        assert audited == [("bridge set", name, change)]
    ended = done("bridge", "set", "stock", "--as-topic", "", "--from", "b", dsn=node.dsn)
    assert ended == "Bridge stock: topics a b -> b, as_topic x -> none.\n"
    assert "own exchange=x -> none" in done("bridge", "set", "mail", "--exchange", "", dsn=node.dsn)
    assert node.rows("SELECT topic FROM mailroom.link_topic WHERE link = 1 ORDER BY topic") == [("a",), ("b",)]
    states = json_of("bridge", "status", dsn=node.dsn, exit_code=1)
    assert [each["state"] for each in (*states["out"], *states["into"])] == ["stopped"] * 3
    with node.connection.transaction(), pytest.raises(TypeError, match="'broker'"):
        Bridges().set(node.connection, "mail", actor="ada", broker="nats")  # type: ignore[call-arg]  # wrong on purpose
    wrong = [
        (("set", "stock", "--keep-s", "1"), "stock is a bridge into this node, which has no keep_s"),
        (("set", "mail", "--decode", "text"), "mail is a bridge out of this node, which has no decode"),
        (("set", "stock", "--subscribe", "a"), "its topics are those of --from"),
        (("set", "mail", "--from", "a"), "its topics are those of --subscribe"),
        (("set", "mail"), "Give a setting to change"),
        (("set", "hooks", "--address", "h:1"), "https"),
        (("out", "mail", "--nats", "h:1"), "the broker (rabbitmq), exactly_once"),
        (("in", "stock", "--nats", "h:1", "--from", "b"), "is at another broker"),
    ]
    assert untold([(["bridge", *words], 2, told) for words, told in wrong], node.dsn) == []


WRONG = [
    (("out", "x"), "Name one broker"),
    (("out", "x", "--kafka", "h:1", "--broker", "m:C", "a"), "Name one broker"),
    (("out", "x", "--kafka", "h:1", "--nats", "h:2"), "Name one broker"),
    (("out", "x", "--nats", "nats://u:p@h:1"), "holds no user and no password"),
    (("out", "x", "--nats", "h:1", "--topic", "t", "--exactly-once"), "NATS needs no exactly_once"),
    (("out", "x", "--rabbitmq", "h:1", "--topic", "t", "--exactly-once"), "RabbitMQ is at least once"),
    (("out", "x", "--rabbitmq", "amqp://u:p@h:1"), "holds no user and no password"),
    (("out", "x", "--rabbitmq", "h:1/v?password=hunter2"), "RabbitMQ's address is HOST:PORT, HOST:PORT/VHOST"),
    (("out", "x", "--kafka", "h:1", "--exchange", "e"), "Kafka has no setting 'exchange'"),
    (("in", "x", "--rabbitmq", "h:1", "--from", "q", "--start", "latest"), "leave out --start"),
    (
        ("out", "x", "--kafka", "h:1", "--webhook", "https://h.example/"),
        "Name one broker: --kafka, --nats, --rabbitmq, --webhook",
    ),
    (("out", "x", "--webhook", "https://h.example/?t=1"), "MAILROOM_BRIDGE_<NAME>_URL"),
    (("out", "x", "--kafka", "u:p@h:1"), "holds no user and no password"),
    (("out", "x", "--kafka", "h:1", "--topic", "{key}"), "no other braces"),
    (("out", "x", "--kafka", "h:1", "--exactly-once"), "--mark-topic"),
    (("out", "x", "--broker", "kafkaesque", "a"), "is not a broker"),
    (("in", "x", "--kafka", "h:1", "--from", " , "), "Name the topics"),
    (("in", "x", "--kafka", "h:1", "--from", "t", "--key", "value"), "give record, header:NAME"),
    (("cut", "nobody"), "no bridge nobody"),
    (("test", "nobody"), "no bridge nobody"),
]


def test_wrong_words_are_told_in_one_line(node: Node) -> None:
    results = [(arguments, told, mailroom("bridge", *arguments, dsn=node.dsn)) for arguments, told in WRONG]
    assert [(arguments, result.output) for arguments, told, result in results if told not in error_of(result)] == []


def test_own_broker_that_cannot_be_imported_is_told(node: Node) -> None:
    done("bridge", "out", "own", "--broker", "nowhere.to.be:Found", "somewhere", dsn=node.dsn)
    assert "cannot be imported (ModuleNotFoundError" in error_of(mailroom("bridge", "test", "own", dsn=node.dsn))


def test_bridge_to_a_webhook_is_tested_without_posting(node: Node) -> None:
    out = ("bridge", "out", "hooks", "--webhook", "https://hooks.invalid/{topic}")
    assert "publishes to webhook at https://hooks.invalid/{topic}." in done(*out, dsn=node.dsn)
    test = ("bridge", "test", "hooks")
    assert "MAILROOM_BRIDGE_HOOKS_UNSIGNED=yes" in error_of(mailroom(*test, dsn=node.dsn))
    assert "Nothing was sent" in done(*test, dsn=node.dsn, MAILROOM_BRIDGE_HOOKS_SECRETS=SECRET)
    found = done(*test, "--json", dsn=node.dsn, MAILROOM_BRIDGE_HOOKS_SECRETS=SECRET)
    assert json.loads(found) == {"bridge": "hooks", "reached": False}


def test_settings_are_kept_as_they_were() -> None:
    out = OutSettings("kafka", "h:1", exactly_once=True, mark_topic="t", on_failure="skip")
    assert OutSettings.of(out.text()) == out
    into = InSettings("kafka", "h:1", ("a", "b"), start="latest", on_failure="stop")
    assert InSettings.of(into.text()) == into
    for wrong in ({"on_failure": "x"}, {"address": ""}, {"address": "a b"}):
        with pytest.raises(ConfigurationError):
            OutSettings(**{"broker": "kafka", "address": "h:1"} | wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError):
        InSettings("kafka", "h:1", ("a",), start="x")  # type: ignore[arg-type]  # wrong on purpose


def test_each_setting_can_be_set_and_the_help_of_its_option_tells_its_default() -> None:
    settings = {*InSettings.names(), *OutSettings.names(), *LINK} - {*FIXED}
    assert settings == BridgeSettings.__annotations__.keys()
    assert settings - {"own"} <= {each.name for each in set_.params}
    for command, made in (
        (out, OutSettings("kafka", "h:1").flat()), (into, InSettings("kafka", "h:1", ("a",)).flat()),
    ):  # fmt: skip
        told = {each.name: str(each.help) for each in command.params if isinstance(each, click.Option)}
        plain = {name: made[name] for name in told if type(made.get(name)) in (str, int) and name != "topic"}
        assert len(plain) >= 3
        assert {name: text for name, text in plain.items() if f"[{text}]" not in told[name]} == {}
