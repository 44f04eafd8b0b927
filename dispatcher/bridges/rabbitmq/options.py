"""The options of a RabbitMQ client that a bridge is given by its environment."""

import ssl
from collections.abc import Mapping

from mailroom.errors import ConfigurationError

LOGIN = ("user", "password")
TLS = ("tls_ca", "tls_cert", "tls_key")
PREFETCH = "prefetch"
MOST = 65_535  # as AMQP counts them
DEFAULT_PREFETCH = 500
GUEST = "guest"  # whom RabbitMQ knows when it is new, from its own machine alone


def checked(name: str, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options. Raises `ConfigurationError` for one that is not known."""
    known = (*LOGIN, *TLS, PREFETCH)
    if unknown := sorted(given.keys() - set(known)):
        raise ConfigurationError(
            f"Bridge {name}: {', '.join(unknown)} cannot be set. The options for RabbitMQ are {', '.join(known)}.",
            code="MR-bridge-options",
        )
    return given


def prefetch(name: str, given: Mapping[str, str]) -> int:
    """Return how many messages may be on their way to a bridge."""
    text = given.get(PREFETCH, str(DEFAULT_PREFETCH))
    if not text.isdecimal() or not 0 < int(text) <= MOST:
        raise ConfigurationError(f"Bridge {name}: prefetch is a number from 1 to {MOST:,}.", code="MR-bridge-options")
    return int(text)


def tls_context(name: str, given: Mapping[str, str]) -> ssl.SSLContext:
    """Return whom the client trusts, and by what the server trusts it. Raises `ConfigurationError`."""
    try:
        context = ssl.create_default_context(cafile=given.get("tls_ca"))
        if "tls_cert" in given:
            context.load_cert_chain(given["tls_cert"], given.get("tls_key"))
    except OSError as error:  # an SSLError, too
        raise ConfigurationError(
            f"Bridge {name}: the files of TLS (tls_ca, tls_cert, tls_key) cannot be used: {type(error).__name__}.",
            code="MR-bridge-options",
        ) from None
    return context


def hiding(given: Mapping[str, str], text: str) -> str:
    """Return a text of the client without what is secret of its options."""
    if secret := given.get("password"):
        text = text.replace(secret, "***")
    return text
