"""What Mailroom knows of RabbitMQ; no client is imported for it."""

import re
from collections.abc import Mapping

from dispatcher.bridges.rabbitmq.address import amqp_servers
from mailroom.bridges.broker import ApiBinding, Broker, OwnSetting, Part, PublishesTo, TakesFrom, address_text
from mailroom.errors import ConfigurationError

NAME = re.compile(r"[A-Za-z0-9_.:/-]{0,255}\Z")
EXCHANGE = "exchange"


def exchange_of(own: Mapping[str, str]) -> str:
    """Return the exchange of a bridge; empty for the default one, at which a topic names a queue."""
    return own.get(EXCHANGE, "")


def _check_address(address: str) -> None:
    address_text(address)
    amqp_servers(address)


def _check_exchange(exchange: str) -> None:
    if not NAME.match(exchange):
        raise ConfigurationError(
            "The name of an exchange has at most 255 letters, digits and - _ . : / characters. Without a name it "
            "is the default one.",
            code="MR-bridge-settings",
        )


def _channel(kind: str, part: str, name: str) -> Part:
    return {"amqp": {"is": kind, part: {"name": name}, "bindingVersion": "0.3.0"}}


RABBITMQ = Broker(
    "rabbitmq",
    "RabbitMQ",
    "HOST:PORT[/VHOST]",
    about="with TLS as amqps://HOST",
    publishes=PublishesTo(
        "dispatcher.bridges.rabbitmq.publisher:RabbitPublisher",
        "key",
        settings=(
            OwnSetting(
                EXCHANGE,
                "The exchange of RabbitMQ, at which --topic is the routing key. [none: --topic names a queue]",
                "NAME",
                _check_exchange,
            ),
        ),
    ),
    takes_from=TakesFrom(
        "dispatcher.bridges.rabbitmq.source:RabbitSource", "queue", topics="queues", starts=("earliest",)
    ),
    check_address=_check_address,
    options=("user", "password", "tls_ca", "tls_cert", "tls_key", "prefetch"),
    library="aio_pika",
    install="pip install 'pg-mailroom[rabbitmq]'",
    tested="RabbitMQ 3.10, aio-pika from 9.5",
    reserved=("cc", "bcc", "x-delay", "x-death"),
    asyncapi=ApiBinding(
        protocol="amqp",
        of_schemes=True,
        channel_out=lambda _address, own: _channel("routingKey", "exchange", exchange_of(own)),
        channel_in=lambda address: _channel("queue", "queue", address),
    ),
)
