"""Connects to public addresses only: the address that was checked is the one that is connected to.

The URL of a webhook is often given by a customer, and this process stands inside of a network. Checked before, and
resolved again by the client, a name could lead to another address the second time (DNS rebinding).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future

import httpcore

from dispatcher.bridges.webhook.addresses import is_public
from dispatcher.lanes.threads import ThreadEach
from mailroom.bridges.publisher import BrokerRefused

Resolve = Callable[[str, int], Awaitable[list[str]]]


THREADS = ThreadEach()
# Under way: one of each name, whoever asks for it and however often. Its server may answer none for a minute.
_lookups: "dict[tuple[str, int], Future[list[str]]]" = {}


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which the system would try them."""
    place = host, port
    lookup = _lookups.get(place)
    if lookup is None:
        lookup = _lookups[place] = THREADS.submit(_looked_up, host, port)
        lookup.add_done_callback(lambda _: _lookups.pop(place))
    try:
        return await asyncio.wrap_future(lookup)
    except OSError as error:
        raise httpcore.ConnectError(f"its name is not resolved: {error.strerror}") from None
    except UnicodeError:
        raise httpcore.ConnectError("its name is not resolved: no host can have it") from None


def _looked_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


# D-bridges-25: A webhook is connected to by the address that was checked.
class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects for a pool of `httpcore`; with `may_be_private` to any address."""

    def __init__(self, *, may_be_private: bool, private_option: str, resolve: Resolve = resolve) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._may_be_private = may_be_private
        self._private_option = private_option
        self._resolve = resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's protocol
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of the addresses of the host. Raises `BrokerRefused` if none of them is allowed."""
        found = await self._resolve(host, port)
        allowed = found if self._may_be_private else [address for address in found if is_public(address)]
        if not allowed:
            raise BrokerRefused(
                f"the host of the URL has no public address. If it is meant to be within your own network, set "
                f"{self._private_option}=yes.",
                code="MR-bridge-options",
            )
        each_s = None if timeout is None else timeout / len(allowed)  # the first one may be dead
        for address in allowed[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, each_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(allowed[-1], port, each_s, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Sleep between attempts of the pool's own, of which there are none."""
        await self._inner.sleep(seconds)
