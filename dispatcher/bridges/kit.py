"""What the clients of several brokers share: their options, TLS, what is secret, and work that ends with the client."""

import asyncio
import ssl
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from mailroom.bridges.broker import Broker
from mailroom.errors import ConfigurationError

T = TypeVar("T")

SECRET = ("password", "token")


class GivenUp(Exception):
    """The client was closed, or has lost its connection, before the work was done."""


async def unless_ended(ended: asyncio.Event, work: Awaitable[T]) -> T:
    """Return the result of `work`; once the client has `ended` it is given up, and `GivenUp` is raised."""
    task, ending = asyncio.ensure_future(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            return task.result()
    finally:
        ending.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    raise GivenUp


def known_options(name: str, broker: Broker, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of the bridge `name`. Raises `ConfigurationError` for one that the broker does not have."""
    known = given.keys() if broker.options is None else broker.options
    if unknown := sorted(given.keys() - {*known}):
        raise ConfigurationError(
            f"Bridge {name}: {', '.join(unknown)} cannot be set. The options for {broker.title} are "
            f"{', '.join(known)}.",
            code="MR-bridge-options",
        )
    return given


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
    """Return a text of a client without what is secret of its options."""
    for option in SECRET:
        if secret := given.get(option):
            text = text.replace(secret, "***")
    return text
