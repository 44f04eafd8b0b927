"""Which module publishes to which broker. Its client is imported when a bridge begins."""

from collections.abc import Callable, Collection
from importlib import import_module

from mailroom.bridges.environment import reading_options
from mailroom.bridges.out import OutRow
from mailroom.bridges.publisher import OutBridge, Publisher
from mailroom.errors import ConfigurationError

PUBLISHERS = {"kafka": "dispatcher.bridges.kafka:KafkaPublisher"}


def publisher_of(row: OutRow, names: Collection[str]) -> Callable[[], Publisher]:
    """Return what makes a publisher of the bridge; `names` are all bridges of the node.

    Calling it raises `ConfigurationError` if the broker's client is not installed, or if an option is wrong.
    """

    def make() -> Publisher:
        options = reading_options(row.name, names)
        broker = row.settings.broker
        module, _, name = PUBLISHERS.get(broker, broker).partition(":")
        try:
            made = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"The client of {broker} cannot be imported ({type(error).__name__}: {error}). "
                + (f"Run: pip install 'pg-mailroom[{broker}]'" if broker in PUBLISHERS else "Is it on Python's path?"),
                code="MR-bridge-no-client",
            ) from None
        publisher: Publisher = made(OutBridge(row.name, row.link, row.node_id, row.node, row.settings, options))
        return publisher

    return make
