"""What the publisher and the source share: a connection, which is given up when it is lost; what its errors mean."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar, cast

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from yarl import URL

from dispatcher.bridges.kit import GivenUp, hiding, known_options, tls_context, unless_ended
from dispatcher.bridges.rabbitmq.address import AmqpServer, amqp_servers
from dispatcher.bridges.rabbitmq.broker import RABBITMQ
from dispatcher.bridges.rabbitmq.options import GUEST
from dispatcher.bridges.texts import plain
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble

T = TypeVar("T")

CONNECT_S = 5.0
HEARTBEAT_S = 10  # the server ends a connection that was silent for two of them, the client after a little more
CLOSE_S = 1.0
# What the client raises when a connection or a channel is gone; the last one if it knew that already.
LOST = (AMQPError, OSError, TimeoutError, RuntimeError)
# How the client says that the server has not opened the virtual host; the server's own words are lost in it.
NOT_OPENED = "Connection.OpenOk"
# By what is in the text of an error: what to do.
ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "Name by TLS_CA who has signed its certificate, and the server as that does",
    "CERTIFICATE_REQUIRED": "Give TLS_CERT and TLS_KEY",
    "Login was refused": "Check USER and PASSWORD",
    "refused for user": "Grant it: rabbitmqctl set_permissions",
}

# Their own log would tell each reconnect, with a traceback; what is wrong is told by `trouble`, in one line.
for _name in ("aiormq", "aio_pika"):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class RabbitClient:
    """A client of RabbitMQ for the bridge `name`, at `address`; see `amqp_servers`."""

    def __init__(self, name: str, address: str, options: Mapping[str, str]) -> None:
        self._name = name
        self._servers = amqp_servers(address)
        self._options = known_options(name, RABBITMQ, options)
        is_tls = any(server.scheme == "amqps" for server in self._servers)
        self._tls = tls_context(name, options) if is_tls else None
        self._server = self._servers[0]
        self._connection: AbstractConnection | None = None
        self._ended = asyncio.Event()
        self._lost: str | None = None  # why, if the connection is
        self._error: str | None = None

    @property
    def trouble(self) -> str | None:
        """What is known to hold it up."""
        return self._lost or self._error

    async def close(self) -> None:
        """Give up what is under way, and the connection."""
        self._ended.set()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        await _closed(connection)

    async def _connect(self) -> None:
        """Connect to the first server that answers. Raises `BrokerTrouble` and `BrokerRefused`."""
        for server in self._servers:
            try:
                await self._unless_ended(self._connect_to(server))
            except (AuthenticationError, ProbableAuthenticationError) as error:
                raise self._refused(self._text(error)) from None
            except LOST as error:
                text = self._text(error)
                if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                    raise self._refused(text) from None
                if isinstance(error, InvalidFrameError) and NOT_OPENED in text:
                    why = f"it has no virtual host {server.vhost}, or this user may not use that"
                    raise self._refused(why) from None
                self._error = text
                continue
            self._server, self._error = server, None
            return
        raise BrokerTrouble(self._error or "no server answers")

    async def _connect_to(self, server: AmqpServer) -> None:
        url = URL.build(
            scheme=server.scheme, host=server.host, port=server.port, path="/",
            user=self._options.get("user", GUEST), password=self._options.get("password", GUEST),
            query={"heartbeat": HEARTBEAT_S},
        ).with_path(f"/{server.vhost}" if server.vhost != "/" else "/")  # fmt: skip
        properties: dict[str, Any] = {"connection_name": f"mailroom {self._name}"}
        connection = aio_pika.Connection(url, ssl_context=self._tls, client_properties=properties)
        connecting = asyncio.create_task(connection.connect(CONNECT_S))
        try:
            await asyncio.shield(connecting)
            if self._ended.is_set():
                raise BrokerTrouble("given up")
        except BaseException:
            try:
                # Cancelled in the moment in which it is made, it would stay open, and nobody could close it.
                await asyncio.wait([connecting], timeout=CLOSE_S)
            finally:
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                await _closed(connection)
            raise
        # In the same step, so that `close` finds it.
        self._connection = connection
        connection.close_callbacks.add(self._note_loss)

    def _refused(self, why: str) -> BrokerRefused:
        return BrokerRefused(f"the broker refuses this client: {why}", code="MR-bridge-broker-refused")

    def _note_loss(self, _connection: object, error: BaseException | None) -> None:
        if not self._ended.is_set():
            self._lost = "the connection is lost" if error is None else self._text(error)
            self._ended.set()

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which is given up once this client is closed, or has lost its connection."""
        try:
            return await unless_ended(self._ended, work)
        except GivenUp:
            raise BrokerTrouble(self._lost or "given up") from None

    async def _asked(self, work: Awaitable[T], about: str) -> T:
        """Return the broker's answer to `work`. Raises `BrokerRefused`, whose text says it is `about` that."""
        try:
            return await self._unless_ended(work)
        except ChannelNotFoundEntity:
            raise BrokerRefused(
                f"there is no {about}. Make it, or name another one.", code="MR-bridge-no-topic"
            ) from None
        except ChannelAccessRefused as error:
            raise self._refused(self._text(error)) from None
        except LOST as error:
            raise BrokerTrouble(self._text(error)) from None

    async def _new_channel(self) -> tuple[AbstractChannel, Channel]:
        """Return a channel, and the one of aiormq beneath it, which has what is asked of a broker in its own words."""
        if self._connection is None:
            raise BrokerTrouble("given up")
        # A message that no queue has got is an error, and not a success that has to be looked at.
        channel = self._connection.channel(publisher_confirms=True, on_return_raises=True)
        await channel.initialize()
        return channel, cast(Channel, await channel.get_underlay_channel())

    def _text(self, error: BaseException) -> str:
        text = " ".join(str(each) for each in error.args if isinstance(each, str)) or str(error)
        text = plain(error, text)
        what_to_do = next((f". {advice}." for mark, advice in ADVICE.items() if mark in text), "")
        return hiding(self._options, text.rstrip(".") + what_to_do if what_to_do else text)


async def _closed(connection: AbstractConnection) -> None:
    """Close a connection in time, whatever its server does."""
    try:
        await asyncio.wait_for(connection.close(), CLOSE_S)
    except LOST:
        await connection.close()  # it has nothing left to close by then, and is marked as closed
