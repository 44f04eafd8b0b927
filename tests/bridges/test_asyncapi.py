"""The document is AsyncAPI by its official schema, and true: our records and values fit what it says of them."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from jsonschema import Draft7Validator
from pydantic import BaseModel, Field

from mailroom import Topic
from mailroom.asyncapi import document
from mailroom.bridges.arrival import Intake
from mailroom.bridges.json_form import as_json
from mailroom.bridges.record import Carried, Form, Unencodable, record_of
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.states import BridgeStates, InState, OutState
from mailroom.errors import ConfigurationError
from mailroom.values import codec
from tests.bridges.messages import FORMS, ID, SENDER, SENT, message
from tests.support.listed import listed

SCHEMA = Path(__file__).parents[1] / "data" / "asyncapi-3.0.0.json.gz"
OFFICIAL = Draft7Validator(json.loads(gzip.decompress(SCHEMA.read_bytes())))


class State(Enum):
    NEW = "new"
    PAID = "paid"


@dataclass
class Item:
    name: str
    price: Decimal
    place: tuple[int, str] = (0, "")


@dataclass
class Order:
    number: int
    items: list[Item]
    state: State = State.NEW
    scan: bytes = b""
    at: datetime | None = None
    took: timedelta | None = None
    before: "Order | None" = None
    rebate: Decimal = Decimal("0.5")


class Card(msgspec.Struct, tag=True):
    discriminator: int


class Cash(msgspec.Struct, tag=True):
    items: dict[int, str]


class Level(BaseModel):
    id: UUID
    amount: Decimal = Field(default=Decimal("1.5"), alias="prefixItems")
    raw: bytes = b""
    where: tuple[int, str] = (1, "a")
    below: list["Level"] = []


ORDERS = Topic("order.paid", Order)
TOPICS: list[tuple[Topic[Any], Any, Any]] = [
    (
        ORDERS,
        Order(1, [Item("a", Decimal("9.50"))], State.PAID, b"\xff", SENT, timedelta(1), Order(2, []), Decimal(2)),
        {"number": "one", "items": []},
    ),
    (Topic("order.settled", Card | Cash), Cash({1: "a"}), {"type": "Cash", "items": {"1": 2}}),
    (
        Topic("stock.level", Level, version=3),
        Level(id=ID, prefixItems=Decimal(2), below=[Level(id=ID)]),
        {"id": str(ID), "prefixItems": "2"},
    ),
    (Topic("counts", dict[str, int]), {"a": 1}, {"a": "b"}),
    (Topic("place", Item), Item("a", Decimal(1), (1, "b")), {"name": "a", "price": 1, "place": [1, "b", "c"]}),
]
OUT = OutState(
    "orders", "open", None, None, 0, 0.0, 0, ("order.#",), (), None, OutSettings("kafka", "k1:9092,k2:9092"), 0.0, None
)
IN = InState(
    "stock", "open", None, None, 0, None, (), ("stock.*",), InSettings("kafka", "k1:9092", ("levels", "stock.level"))
)


def out(name: str = "orders", *topics: str, state: str = "open", exactly_once: bool = False, **form: Any) -> OutState:
    mark = "marks" if exactly_once else None
    settings = OutSettings("kafka", "k1:9092,k2:9092", Form(**form), exactly_once, mark)
    return replace(OUT, name=name, state=state, topics=topics or OUT.topics, settings=settings)


def states(*out: OutState, into: tuple[InState, ...] = ()) -> BridgeStates:
    return BridgeStates(out, into)


def made(*bridges: OutState, into: tuple[InState, ...] = (), **given: Any) -> dict[str, Any]:
    """A document of all topics and of bridges, after the schema has found it right, and all its references lead on."""
    topics = [topic for topic, _, _ in TOPICS]
    found: dict[str, Any] = json.loads(json.dumps(document(topics, states(*bridges, into=into), node="paris", **given)))
    assert [f"{error.json_path}: {error.message}" for error in OFFICIAL.iter_errors(found)] == []
    for reference in references(found):
        assert pointed(found, reference) is not None
    for operation in found["operations"].values():
        channel = operation["channel"]["$ref"]
        assert operation["messages"]
        assert all(each["$ref"].startswith(f"{channel}/messages/") for each in operation["messages"])
    return found


def references(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for each in part:
            yield from references(each)
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for each in part.values():
            yield from references(each)


def pointed(found: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found


def is_valid(found: dict[str, Any], schema: dict[str, Any], value: object) -> bool:
    return bool(Draft7Validator({**schema, "components": found["components"]}).is_valid(value))


def fitting(found: dict[str, Any], record_headers: dict[str, str]) -> list[str]:
    """The messages of a document whose headers these are."""
    return [
        name
        for channel in found["channels"].values()
        for name, each in channel["messages"].items()
        if name.startswith("out.") and is_valid(found, each["headers"], record_headers)
    ]


@listed(("topic", "value", "wrong"), TOPICS)
def test_values_fit_the_schema_of_their_topic(topic: Topic[Any], value: Any, wrong: Any) -> None:
    found = made()
    schema = {"$ref": f"#/components/schemas/{topic.name}-v{topic.version}"}
    sent = json.loads(as_json(codec.decode(codec.encode(topic.write(value)))))
    assert is_valid(found, schema, sent)
    assert not is_valid(found, schema, wrong)
    assert not is_valid(found, schema, None)


@pytest.mark.slow
@listed("form", [*FORMS, Form(tombstones=True)])
def test_records_have_the_headers_of_their_message_and_of_no_other(form: Form) -> None:
    found = made(
        out(
            "orders",
            "order.#",
            "refunds",
            topic="shop.{topic}",
            **{name: getattr(form, name) for name in ("format", "encode", "tombstones")},
        )
    )
    plain = message(topic="order.paid", key=str(ID))
    full = message(
        topic="order.paid", expires_at=SENT, headers={"traceparent": "00-1", "user": "ada", "id": "7", "schema": "1"}
    )
    for each in (plain, full, replace(full, event_type="D")):
        assert fitting(found, headers_of(each, form)) == ["out.orders.order.paid-v1"]
    other, refund = (headers_of(replace(plain, topic=name), form) for name in ("order.other", "refunds"))
    assert (fitting(found, other), fitting(found, refund)) == (["out.orders"], ["out.orders"] * 2)
    assert is_valid(found, found["channels"]["shop.refunds"]["messages"]["out.orders"]["headers"], refund)
    assert not is_valid(found, found["channels"]["shop.refunds"]["messages"]["out.orders"]["headers"], other)
    assert fitting(found, headers_of(replace(plain, headers={"schema": "2"}), form)) == []
    for name in {*headers_of(plain, form)} - {"content-type"}:
        assert fitting(found, {k: v for k, v in headers_of(plain, form).items() if k != name}) == [], name


def headers_of(given: Carried, form: Form) -> dict[str, str]:
    try:
        return {name: value.decode() for name, value in record_of(given, form, SENDER).headers}
    except Unencodable as error:  # pragma: no cover
        raise AssertionError from error


def test_bridges_are_servers_channels_and_operations() -> None:
    gone = out("gone", "place", state="cut")
    found = made(out(encode="cbor"), out("cdc", "order.paid", format="debezium", exactly_once=True), gone, into=(IN,))
    assert found["servers"] == {
        "kafka-k1-9092": {"host": "k1:9092", "protocol": "kafka"},
        "kafka-k2-9092": {"host": "k2:9092", "protocol": "kafka"},
        "node": {
            "host": "paris", "protocol": "mailroom",
            "description": "The node's database: messages that are sent and reaped there.",
        },
    }  # fmt: skip
    both, first, node = (
        [{"$ref": f"#/servers/{name}"} for name in names]
        for names in (("kafka-k1-9092", "kafka-k2-9092"), ("kafka-k1-9092",), ("node",))
    )
    assert {(name, each["address"], str(each["servers"])) for name, each in found["channels"].items()} == {
        ("order.paid", "order.paid", str(both)),
        ("order.settled", "order.settled", str(both)),
        ("topic", "{topic}", str(both)),
        ("outbox.event.order.paid", "outbox.event.order.paid", str(both)),
        ("levels", "levels", str(first)),
        ("stock.level", "stock.level", str(first)),
        ("counts", "counts", str(node)),
        ("place", "place", str(node)),
    }
    assert found["channels"]["topic"]["parameters"]["topic"]["description"].endswith(": order.#")
    assert {(name, each["action"]) for name, each in found["operations"].items()} == {
        ("send.orders.order.paid", "send"), ("send.orders.order.settled", "send"), ("send.orders.topic", "send"),
        ("send.cdc.outbox.event.order.paid", "send"),
        ("receive.stock.levels", "receive"), ("receive.stock.stock.level", "receive"),
    }  # fmt: skip
    assert found["operations"]["send.cdc.outbox.event.order.paid"]["summary"].endswith("exactly once.")
    assert found["operations"]["send.orders.order.paid"]["summary"].endswith("at least once.")
    sent = found["channels"]["order.paid"]["messages"]["out.orders.order.paid-v1"]
    assert sent["contentType"] == "application/cbor"
    assert sent["payload"] == {"$ref": "#/components/schemas/order.paid-v1"}
    assert sent["bindings"]["kafka"]["key"] == {"type": "string"}
    assert "contentType" not in found["channels"]["levels"]["messages"]["in.stock.stock.level-v3"]


def test_bridges_to_one_topic_share_its_channel_if_it_is_at_the_same_servers() -> None:
    elsewhere = replace(OUT, name="b", settings=OutSettings("kafka", "other:1", Form("shop")))
    into = replace(IN, name="a", settings=replace(IN.settings, address="k1:9092,k2:9092", topics=("shop",)))
    found = made(out("a", "order.#", "refunds", topic="shop"), elsewhere, into=(into,))
    assert [name for name, each in found["channels"].items() if each["address"] == "shop"] == ["shop", "shop-2"]
    assert [*found["channels"]["shop"]["messages"]] == [
        "out.a.order.paid-v1", "out.a.order.settled-v1", "out.a", "in.a.stock.level-v3",
    ]  # fmt: skip
    assert len(found["operations"]["send.a.shop"]["messages"]) == 3
    assert found["operations"]["receive.a.shop"]["messages"] == [
        {"$ref": "#/channels/shop/messages/in.a.stock.level-v3"}
    ]


def test_a_bridge_in_takes_the_topic_that_it_is_told_and_says_where_the_key_is() -> None:
    intake = Intake("stock.{topic}", "header:sku", "text")
    into = replace(IN, settings=InSettings("kafka", "k1:9092", ("level", "other"), intake))
    found = made(into=(into,))
    [typed], [other] = (found["channels"][name]["messages"].items() for name in ("level", "other"))
    assert typed[0] == "in.stock.stock.level-v3"
    assert other[0] == "in.stock"
    assert "payload" not in other[1]
    assert typed[1]["contentType"] == other[1]["contentType"] == "text/plain"
    assert is_valid(found, typed[1]["headers"], {"sku": "7", "schema": "3"})
    assert not is_valid(found, typed[1]["headers"], {"schema": "3"})
    assert not is_valid(found, typed[1]["headers"], {"sku": "7"})  # without it, its value is of version 1
    assert "key" not in typed[1].get("bindings", {}).get("kafka", {})


def test_a_server_is_named_by_an_address_of_any_form_and_shows_no_query() -> None:
    mine = replace(OUT, settings=OutSettings("mine.broker:Out", "amqp://mq:5672/shop?password=hunter2"))
    found = made(mine)
    assert found["servers"]["mine.broker-Out-mq-5672-shop"] == {
        "host": "mq:5672", "protocol": "mine.broker:Out", "pathname": "/shop",
    }  # fmt: skip
    assert "hunter2" not in json.dumps(found)


def test_rabbitmq_has_routing_keys_of_an_exchange_and_queues() -> None:
    settings = OutSettings("rabbitmq", "mq:5672/shop,amqps://mq2/shop", Form("stock"), own={"exchange": "shop"})
    into = replace(IN, settings=InSettings("rabbitmq", "mq:5672/shop,amqps://mq2/shop", ("stock",)))
    found = made(replace(OUT, settings=settings), into=(into,))
    assert list(found["servers"].values())[:2] == [
        {"host": "mq:5672", "protocol": "amqp", "pathname": "/shop"},
        {"host": "mq2", "protocol": "amqps", "pathname": "/shop"},
    ]
    bound = [each["bindings"]["amqp"] for each in found["channels"].values() if each["address"] == "stock"]
    assert bound == [
        {"is": "routingKey", "exchange": {"name": "shop"}, "bindingVersion": "0.3.0"},
        {"is": "queue", "queue": {"name": "stock"}, "bindingVersion": "0.3.0"},
    ]
    told = [each["summary"] for each in found["operations"].values() if each["action"] == "receive"]
    assert told == ["Taken in by bridge stock, once per id."]


def test_topics_alone_have_channels_and_no_servers() -> None:
    found = document([ORDERS, ORDERS], title="Shop", version="1.2")
    assert OFFICIAL.is_valid(found)
    assert found["info"] == {"title": "Shop", "version": "1.2"}
    assert found["servers"] == found["operations"] == {}
    assert [*found["channels"]] == ["order.paid"]
    assert "servers" not in found["channels"]["order.paid"]
    assert document([])["channels"] == {}


def test_two_versions_of_a_topic_are_two_messages_and_two_meanings_of_one_are_refused() -> None:
    found = document([ORDERS, Topic("order.paid", dict[str, int], version=2)])
    messages = found["channels"]["order.paid"]["messages"]
    assert [*messages] == ["order.paid-v1", "order.paid-v2"]
    with pytest.raises(ConfigurationError, match=r"two topics order\.paid of version 1") as failed:
        document([ORDERS, Topic("order.paid", dict[str, int])])
    assert failed.value.code == "MR-registered-twice"
    assert len(document([ORDERS, Topic("order.paid", Order)])["channels"]) == 1


def test_what_a_topic_writes_by_itself_has_no_schema() -> None:
    by_itself = Topic("a", complex, read=complex, write=str)
    written = Topic("b", Order, write=lambda order: order.number)
    read = Topic("c", Order, read=lambda plain: Order(plain["number"], []))
    schemas = document([by_itself, written, read])["components"]["schemas"]
    assert schemas["a-v1"] == schemas["b-v1"] == {}
    assert schemas["c-v1"] == {"$ref": "#/components/schemas/c-v1.Order"}
