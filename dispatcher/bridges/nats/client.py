"""What the publisher and the source share: a connection that gives up nothing, and the meaning of its errors."""

import asyncio
import re
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.errors import (
    AuthorizationError,
    ConnectionClosedError,
    Error,
    OutboundBufferLimitError,
    SecureConnWantedError,
    StaleConnectionError,
)
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NotFoundError, ServerError, ServiceUnavailableError

from dispatcher.bridges.kit import GivenUp, hiding, unless_ended
from dispatcher.bridges.nats.options import client_options, wants_tls
from dispatcher.bridges.texts import plain
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble
from mailroom.errors import ConfigurationError

T = TypeVar("T")

ANSWER_S = 3.0  # for one answer; then it is asked again
POLL_S = 0.1
RECONNECT_S = 0.5
CLOSE_S = 1.0
# What passes by itself.
PASSING = (TimeoutError, OutboundBufferLimitError, StaleConnectionError, ServiceUnavailableError, ServerError)
# What the server says of this client: nothing helps before somebody acts.
REFUSALS = ("authorization violation", "permissions violation", "authentication", "account ")
DENIED = re.compile(r'permissions violation for publish to "(.*)"')


class _Client(Client):
    """A client that says nothing to a server without TLS if it wants TLS. nats-py would send it the password."""

    def __init__(self, *, wants_tls: bool) -> None:
        super().__init__()
        self._wants_tls = wants_tls

    def _connect_command(self) -> bytes:
        by_tls = self._server_info.get("tls_required") or (
            self._current_server is not None and self._current_server.uri.scheme == "wss"
        )
        if self._wants_tls and not by_tls:
            raise SecureConnWantedError
        return super()._connect_command()

    @property
    def server_id(self) -> str | None:
        """The id of the server, which is a new one at each of its starts."""
        return self._server_info.get("server_id")


class NatsClient:
    """A client of NATS for the bridge `name`, at `address`: one or several servers with commas between them."""

    def __init__(self, name: str, address: str, options: Mapping[str, str]) -> None:
        self._name = name
        self._servers = address.split(",")
        self._given = options
        self._options = client_options(name, options)
        self._nats = _Client(wants_tls=wants_tls(address, options))
        self._js = self._nats.jetstream(timeout=ANSWER_S)
        self._ended = asyncio.Event()
        self._refused: str | None = None
        self._error: str | None = None
        self._losses = 0
        # Subjects that are published to, as the server quotes them, and those of them that it has denied.
        self._asked_for: frozenset[str] = frozenset()
        self._denied: set[str] = set()

    @property
    def trouble(self) -> str | None:
        """What the client has reported last."""
        return self._error

    async def close(self) -> None:
        """Give up what is under way, and the connection."""
        self._ended.set()
        try:
            await asyncio.wait_for(self._nats.close(), CLOSE_S)
        except (TimeoutError, Error, OSError, AssertionError) as error:
            # It never was connected, or the server does not answer: nothing is left that anybody waits for.
            self._error = self._text(error)
        await self._end_reconnection()

    async def _end_reconnection(self) -> None:
        """End what a reconnection has begun that was under way at the close.

        The library cancels it, and does not wait: if it just gets through, a connection and its tasks would stay.
        """
        client = self._nats
        await _ended(client._reconnection_task)
        await _ended(client._reading_task, client._ping_interval_task, client._flusher_task)
        if client._transport is not None:
            client._transport.close()  # type: ignore[no-untyped-call]  # nats-py has no type for it

    async def _connect(self) -> None:
        try:
            await self._unless_ended(
                self._nats.connect(
                    self._servers, name=f"mailroom {self._name}", error_cb=self._note, disconnected_cb=self._lost,
                    reconnected_cb=self._regained, max_reconnect_attempts=-1, reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]  # it sleeps for so long
                    ping_interval=5, pending_size=-1,  # nothing is buffered for a server that is away
                    **self._options,  # type: ignore[arg-type]  # checked by client_options
                )
            )  # fmt: skip
        except (Error, ValueError, OSError, ImportError) as error:
            text = self._text(error)
            raise ConfigurationError(f"Bridge {self._name}: {text}", code="MR-bridge-options") from None
        self._error = None

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which is given up once this client is closed or refused."""
        try:
            return await unless_ended(self._ended, work)
        except ConnectionClosedError as error:
            raise BrokerTrouble(self._error or self._text(error)) from None
        except GivenUp:
            if self._refused is not None:
                raise BrokerRefused(self._refused, code="MR-bridge-broker-refused") from None
            raise BrokerTrouble("given up") from None

    async def _asked(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask until the server has answered; what no asking again mends is raised."""
        while True:
            try:
                done = await self._unless_ended(call())
            except ServiceUnavailableError as error:
                self._error = error.description or "JetStream does not answer: is it enabled on this server?"
                await self._unless_ended(asyncio.sleep(POLL_S))
            except PASSING as error:
                self._error = self._error or self._text(error)
                await self._unless_ended(asyncio.sleep(POLL_S))
            except NotFoundError:
                raise
            except APIError as error:
                raise BrokerRefused(
                    f"the broker refuses it: {self._text(error)}", code="MR-bridge-broker-refused"
                ) from None
            else:
                self._error = None
                return done

    async def _info(self, stream: str) -> StreamInfo:
        try:
            return await self._asked(lambda: self._js.stream_info(stream))
        except NotFoundError:
            raise BrokerRefused(
                f"there is no stream {stream}. Make it, or name another one.", code="MR-bridge-no-topic"
            ) from None

    async def _note(self, error: Exception) -> None:
        text = self._text(error)
        # Not in `text`: a password that is hidden there may be a part of a subject.
        if (denied := DENIED.search(str(error).lower())) and denied[1] in self._asked_for:
            self._denied.add(denied[1])  # that concerns a record, and not this client
            return
        self._error = text
        if (refusal := _refusal(error, text)) is not None:
            self._refused = refusal
            self._ended.set()

    async def _lost(self) -> None:
        self._losses += 1
        self._error = "the connection is lost"

    async def _regained(self) -> None:
        self._error = None

    def _text(self, error: BaseException) -> str:
        text = error.description if isinstance(error, APIError) else str(error).removeprefix("nats: ").strip("'")
        return hiding(self._given, plain(error, text or ""))


def made(info: StreamInfo) -> str | None:
    """Return when a stream was made, in microseconds: one that was made anew is another one."""
    return None if info.created is None else str(int(info.created.timestamp() * 1_000_000))


def quoted(subject: str) -> str:
    """Return a subject as it stands in an error: the server escapes it, and nats-py makes it lower case."""
    return subject.replace("\\", "\\\\").replace('"', '\\"').lower()


def _refusal(error: Exception, text: str) -> str | None:
    """Return what is wrong if only a person can mend it, else None."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message.rstrip(".")
        return (
            f"the certificate of the server is not accepted: {why}. Give the file of the authority that has signed it "
            "(TLS_CA), or the name that stands in it (TLS_HOSTNAME)."
        )
    if isinstance(error, ssl.SSLError) and "CERTIFICATE" in (error.reason or ""):
        return (
            f"the server does not accept the client's certificate: {error.reason}. Give it another one (TLS_CERT, "
            "TLS_KEY)."
        )
    if isinstance(error, SecureConnWantedError):
        return (
            "the server does not ask for TLS, which the bridge wants (tls://, TLS_...). No login was sent there. Set "
            "TLS up at the server, or leave it out here."
        )
    if isinstance(error, AuthorizationError) or any(words in text.lower() for words in REFUSALS):
        return f"the broker refuses this client: {text}"
    return None


async def _ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended."""
    left = [task for task in tasks if task is not None and not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CLOSE_S)
