"""Makes the client of a bridge, which its broker's descriptor names. No library is imported sooner."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from mailroom.bridges.broker import Broker, PublishesTo, TakesFrom, broker_of
from mailroom.bridges.environment import reading_options
from mailroom.bridges.into import InRow
from mailroom.bridges.out import OutRow
from mailroom.bridges.publisher import OutBridge, Publisher
from mailroom.bridges.source import InBridge, RecordSource
from mailroom.errors import ConfigurationError


def publisher_of(row: OutRow, names: Collection[str]) -> Callable[[], Publisher]:
    """Return what makes a publisher of the bridge; `names` are all bridges of the node.

    Calling it raises `ConfigurationError` if the broker or its client is not installed, or if an option is wrong.
    """

    def make() -> Publisher:
        broker = broker_of(row.settings.broker)
        bridge = OutBridge(row.name, row.link, row.node_id, row.node, row.settings, reading_options(row.name, names))
        publisher: Publisher = client_class(broker, broker.publishes)(bridge)
        return publisher

    return make


def source_of(row: InRow, names: Collection[str]) -> Callable[[], RecordSource]:
    """Return what makes a source of the bridge, as `publisher_of` does a publisher."""

    def make() -> RecordSource:
        broker = broker_of(row.settings.broker)
        bridge = InBridge(row.name, row.origin, row.node_id, row.settings, reading_options(row.name, names))
        source: RecordSource = client_class(broker, broker.takes_from)(bridge)
        return source

    return make


def client_class(broker: Broker, way: PublishesTo | TakesFrom | None) -> Any:
    """Return the class of a broker's client, which is called with a bridge. Raises `ConfigurationError`."""
    if way is None:
        raise ConfigurationError(f"The package of {broker.name} has no client for this.", code="MR-bridge-no-client")
    module, _, name = way.client.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        mend = f"Run: {broker.install}" if broker.install else "Is it on Python's path?"
        raise ConfigurationError(
            f"The client of {broker.name} cannot be imported ({type(error).__name__}: {error}). {mend}",
            code="MR-bridge-no-client",
        ) from None
