"""Which modules know which broker. Its client is imported when a bridge begins."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from mailroom.bridges.environment import reading_options
from mailroom.bridges.into import InRow
from mailroom.bridges.out import OutRow
from mailroom.bridges.publisher import OutBridge, Publisher
from mailroom.bridges.source import InBridge, RecordSource
from mailroom.errors import ConfigurationError

PUBLISHERS = {
    "kafka": "dispatcher.bridges.kafka:KafkaPublisher",
    "nats": "dispatcher.bridges.nats:NatsPublisher",
    "rabbitmq": "dispatcher.bridges.rabbitmq:RabbitPublisher",
    "webhook": "dispatcher.bridges.webhook:WebhookPublisher",
}
SOURCES = {
    "kafka": "dispatcher.bridges.kafka:KafkaSource",
    "nats": "dispatcher.bridges.nats:NatsSource",
    "rabbitmq": "dispatcher.bridges.rabbitmq:RabbitSource",
}


def publisher_of(row: OutRow, names: Collection[str]) -> Callable[[], Publisher]:
    """Return what makes a publisher of the bridge; `names` are all bridges of the node.

    Calling it raises `ConfigurationError` if the broker's client is not installed, or if an option is wrong.
    """

    def make() -> Publisher:
        options = reading_options(row.name, names)
        bridge = OutBridge(row.name, row.link, row.node_id, row.node, row.settings, options)
        publisher: Publisher = _imported(row.settings.broker, PUBLISHERS)(bridge)
        return publisher

    return make


def source_of(row: InRow, names: Collection[str]) -> Callable[[], RecordSource]:
    """Return what makes a source of the bridge, as `publisher_of` does a publisher."""

    def make() -> RecordSource:
        options = reading_options(row.name, names)
        bridge = InBridge(row.name, row.origin, row.node_id, row.settings, options)
        source: RecordSource = _imported(row.settings.broker, SOURCES)(bridge)
        return source

    return make


def _imported(broker: str, homes: Mapping[str, str]) -> Any:
    module, _, name = homes.get(broker, broker).partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        mend = f"Run: pip install 'pg-mailroom[{broker}]'" if broker in homes else "Is it on Python's path?"
        raise ConfigurationError(
            f"The client of {broker} cannot be imported ({type(error).__name__}: {error}). {mend}",
            code="MR-bridge-no-client",
        ) from None
