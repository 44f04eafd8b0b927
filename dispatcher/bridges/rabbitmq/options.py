"""The options of a RabbitMQ client that a bridge is given by its environment."""

from collections.abc import Mapping

from mailroom.errors import ConfigurationError

PREFETCH = "prefetch"
MOST = 65_535  # as AMQP counts them
DEFAULT_PREFETCH = 500
GUEST = "guest"  # whom RabbitMQ knows when it is new, from its own machine alone


def prefetch(name: str, given: Mapping[str, str]) -> int:
    """Return how many messages may be on their way to a bridge."""
    text = given.get(PREFETCH, str(DEFAULT_PREFETCH))
    if not text.isdecimal() or not 0 < int(text) <= MOST:
        raise ConfigurationError(f"Bridge {name}: prefetch is a number from 1 to {MOST:,}.", code="MR-bridge-options")
    return int(text)
