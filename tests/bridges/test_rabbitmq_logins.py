"""TLS, logins and rights of bridges to RabbitMQ, on a server that asks for them."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aio_pika
import aiormq
import pytest
from aiormq.exceptions import AMQPError
from nats.errors import SlowConsumerError
from pamqp import commands

from dispatcher.bridges import tending
from dispatcher.bridges.kit import tls_context
from dispatcher.bridges.nats.client import NatsClient
from dispatcher.bridges.rabbitmq.client import RabbitClient
from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.embedded.account import server_account
from mailroom.values import codec
from outbox import Outbox, Outgoing
from tests.bridges.tended import in_state, out_state, tended
from tests.support.certificates import Authority
from tests.support.node import Node
from tests.support.port import free_port
from tests.support.rabbitmq import RabbitMQ, rabbitmq_program
from tests.support.waiting import WITHIN_S, eventually_async

pytestmark = pytest.mark.slow

QUEUE, USER, PASSWORD = "secured", "reads-only", "hunter2"


@dataclass
class Secure:
    """A server that takes clients with a certificate of its authority alone."""

    address: str
    tls: dict[str, str]  # the options of a client that it takes
    other_ca: str


@pytest.fixture(scope="module")
def secure(shared_home: Path) -> Iterator[Secure]:
    """A server with TLS, a queue, and a user who may not write."""
    if rabbitmq_program() is None:
        pytest.skip("RabbitMQ is not installed: apt-get install rabbitmq-server, or make brokers")
    home, account = shared_home / f"rabbitmq-logins-{os.getpid()}", server_account()
    home.mkdir()
    authority = Authority(home / "authority", "authority")
    (cert, key), (own_cert, own_key) = authority.certificate("127.0.0.1"), authority.certificate("client.test")
    if account.switched:
        os.chown(key, account.uid, account.gid)
    port = free_port()
    settings = (
        f"listeners.ssl.default = 127.0.0.1:{port}", f"ssl_options.cacertfile = {authority.ca}",
        f"ssl_options.certfile = {cert}", f"ssl_options.keyfile = {key}",
        "ssl_options.verify = verify_peer", "ssl_options.fail_if_no_peer_cert = true",
    )  # fmt: skip
    (home / "server").mkdir()
    with RabbitMQ(home / "server", *settings) as rabbitmq:
        rabbitmq.control(
            "eval",
            f'rabbit_auth_backend_internal:add_user(<<"{USER}">>, <<"{PASSWORD}">>, <<"me">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"{USER}">>, <<"/">>, <<"">>, <<"">>, <<".*">>, <<"me">>).',
        )
        tls = {"tls_ca": str(authority.ca), "tls_cert": str(own_cert), "tls_key": str(own_key)}
        secure = Secure(f"amqps://127.0.0.1:{port}", tls, str(Authority(home / "other", "other").ca))
        asyncio.run(create(secure))
        yield secure


async def create(secure: Secure) -> None:
    """Make the queue."""
    context = tls_context("test", secure.tls)
    async with await aio_pika.connect(secure.address, ssl_context=context, timeout=WITHIN_S) as connection:
        await (await connection.channel()).declare_queue(QUEUE, durable=True)


def become(monkeypatch: pytest.MonkeyPatch, bridge: str, options: dict[str, str]) -> None:
    """Give a bridge these options alone."""
    before = f"MAILROOM_BRIDGE_{bridge.upper()}_"
    for name in [name for name in os.environ if name.startswith(before)]:
        monkeypatch.delenv(name)
    for name, value in options.items():
        monkeypatch.setenv(before + name.upper(), value)


def trouble_of(node: Node, text: str) -> str:
    """Return why the bridge out stands, if this is in it."""
    why = out_state(node).why or ""
    return why if text in why else ""


async def test_errors_of_the_client_name_no_objects() -> None:
    client = RabbitClient("mail", "localhost:5672", {})
    connection = aiormq.Connection("amqp://me@localhost/")
    assert client._text(RuntimeError(f"{connection!r} closed")) == "Connection closed"
    frame = commands.Basic.Ack(1)
    assert client._text(AMQPError(f"Expected Connection.Tune, got {frame!r}")) == "Expected Connection.Tune, got Ack"
    assert client._text(AMQPError(frame)) == "AMQPError: Ack"
    slow = SlowConsumerError("shop.x", "", 1, client)  # type: ignore[arg-type]  # an object, whatever it is
    told = NatsClient("mail", "nats://localhost", {})._text(slow)
    assert told == "slow consumer, messages dropped subject: shop.x, sid: 1, sub: RabbitClient"


async def test_each_wrong_file_login_or_right_is_told_in_a_line_and_then_all_comes_through(
    node: Node, secure: Secure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("PATIENCE_S", 0.05), ("LONGEST_PAUSE_S", 0.1), ("LONGEST_STOP_S", 0.2), ("LEASE_S", 0.1)):
        monkeypatch.setattr(tending, name, seconds)
    become(monkeypatch, "in", secure.tls)
    node.inbox("orders")
    with node.connection.transaction():
        Bridges().out(
            node.connection, "out", OutSettings("rabbitmq", secure.address, Form(QUEUE)), topics="order.#", actor="test"
        )
        Bridges().into(node.connection, "in", InSettings("rabbitmq", secure.address, (QUEUE,)), actor="test")
        subscribe(node.connection, "orders", "#", origin="in")
        Outbox().send_many(node.connection, [Outgoing("order.paid", n, key="k") for n in range(5)])
    node.deliver_all()
    wrong = [
        ({**secure.tls, "tls_ca": secure.other_ca}, "Name by TLS_CA who has signed its certificate"),
        ({"tls_ca": secure.tls["tls_ca"]}, "Give TLS_CERT and TLS_KEY."),
        ({**secure.tls, "tls_key": "/nowhere"}, "the files of TLS (tls_ca, tls_cert, tls_key) cannot be used"),
        ({**secure.tls, "user": USER, "password": "wrong"}, "Check USER and PASSWORD."),
        (
            {**secure.tls, "user": USER, "password": PASSWORD},
            "refused for user 'reads-only'. Grant it: rabbitmqctl set_permissions.",
        ),
    ]
    told = []
    for options, text in wrong:
        become(monkeypatch, "out", options)
        with monkeypatch.context() as impatient:  # only while it must not be opened
            impatient.setattr("dispatcher.bridges.publishing.OPEN_S", 1.0)
            async with tended(node):
                told.append(await eventually_async(partial(trouble_of, node, text)))
        assert out_state(node).acked == 0
    become(monkeypatch, "out", secure.tls)
    async with tended(node):
        await eventually_async(lambda: node.value("SELECT count(*) FROM mailroom.inbox") == 5)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"open"})
    values = [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]
    assert values == list(range(5))
    assert not {PASSWORD, "wrong"} & set(" ".join([*told, caplog.text]).replace("'", " ").split())
