"""Posts each record to a URL, until it is answered with a 2xx: at least once, and each key in order.

What an answer means, so that a receiver needs to know nothing but Standard Webhooks:

- 2xx: it has the message. The body of the answer does not matter.
- 410: it wants no more messages. The bridge stops, and says so.
- 413, 431: this record is too large for it: what `--on-failure` says.
- 429, 503: posted again, and nothing else meanwhile, for as long as `Retry-After` says, at most for an hour.
- All others, such as 400, 401, 404, 422 and 500, no answer within 15 s, and no connection: posted again with a backoff.
  A receiver that is being deployed gives any of them for a while, and a message that is skipped is not there any more.
- 3xx is one of these: a redirect is not followed, since it would take messages, and a signature, to another place.

While one key waits, others go on, up to the end of the batch. Nothing is read back from the receiver, so what a crash
leaves unacknowledged is posted again with the same `webhook-id`, which tells the receiver so.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from uuid import UUID

import httpcore

from dispatcher.bridges.webhook.connecting import CheckedBackend, Resolve, resolve
from dispatcher.bridges.webhook.endpoint import endpoint_of
from dispatcher.bridges.webhook.request import LONGEST_AFTER_S, headers_of, retry_after_s
from mailroom.bridges.environment import variables
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, OutBridge, RecordRefused
from mailroom.bridges.record import Record
from mailroom.session.backoff import pause_s

TIMEOUT_S = 15.0
AT_ONCE = 16  # requests
LONGEST_PAUSE_S = 30.0
IDLE_S = 15.0  # servers close connections that idle, many after 20 s or more
MAX_ANSWER = 64 * 1024  # bytes that are read to keep the connection; what is longer costs it


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after: str | None


class WebhookPublisher:
    """A publisher to a URL; see `mailroom.bridges.publisher`.

    `now` is in seconds since 1970, and `pause` sleeps.
    """

    def __init__(
        self, bridge: OutBridge, *, timeout_s: float = TIMEOUT_S, now: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep, resolve: Resolve = resolve,
    ) -> None:  # fmt: skip
        self._name = bridge.name
        self._endpoint = endpoint_of(bridge)
        self._timeout_s = timeout_s
        self._now = now
        self._pause = pause
        self._resolve = resolve
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._quiet_until = 0.0
        self._troubles: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def trouble(self) -> str | None:
        """What became of the last attempt of the key that has waited longest."""
        return next(iter(self._troubles.values()), None)

    async def open(self) -> int:
        """Make the pool of connections. Nothing is asked: an endpoint has no request that is no message."""
        backend = CheckedBackend(
            may_be_private=self._endpoint.may_be_private,
            private_option=f"{variables(self._name)}PRIVATE",
            resolve=self._resolve,
        )
        # The system's authorities, and SSL_CERT_FILE; it takes long to read them.
        context = ssl.create_default_context() if self._endpoint.scheme == "https" else None
        # Not through httpx: what connects can be chosen here, and neither proxies nor redirects exist.
        self._pool = httpcore.AsyncConnectionPool(
            context, max_connections=None, keepalive_expiry=IDLE_S, network_backend=backend
        )
        return 0

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Return nothing: a receiver cannot be read."""
        return ()

    async def publish(self, records: Sequence[Record]) -> None:
        """Post the records, and return once each was answered with a 2xx."""
        if self._is_closed:
            raise BrokerTrouble("given up")
        by_key: dict[bytes | UUID, list[Record]] = {}
        for record in records:
            by_key.setdefault(record.id if record.key is None else record.key, []).append(record)
        tasks = {asyncio.create_task(self._deliver(n, each)) for n, each in enumerate(by_key.values())}
        self._tasks |= tasks
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        finally:
            await self._end(tasks)
            self._tasks -= tasks
            self._troubles.clear()
        if self._is_closed:
            raise BrokerTrouble("given up")
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            # Who wants nothing more says more than who finds one record too large.
            raise next((error for error in errors if isinstance(error, BrokerRefused)), errors[0])

    async def keep(self) -> None:
        """Do nothing: there is no mark."""

    async def close(self) -> None:
        """Break off the requests that are under way."""
        self._is_closed = True
        await self._end(set(self._tasks))
        if self._pool is not None:
            await self._pool.aclose()

    async def _end(self, tasks: Collection[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, number: int, records: Sequence[Record]) -> None:
        """Post the records of one key, one after another."""
        for record in records:
            failures = 0
            while (trouble := await self._attempt(record)) is not None:
                self._troubles[number] = f"{trouble} (message {record.id})"
                failures += 1
                await self._pause(pause_s(failures, LONGEST_PAUSE_S))
            self._troubles.pop(number, None)

    async def _attempt(self, record: Record) -> str | None:
        """Post a record once; return None if the receiver has it, or why not."""
        async with self._slots:
            # In the slot: whoever waited for one may have been overtaken by a 429. The bound is for a clock set back.
            while 0 < (left := self._quiet_until - self._now()) <= LONGEST_AFTER_S:
                await self._pause(left)
            answer = await self._post(record)
        return answer if isinstance(answer, str) else self._meaning(answer, record)

    async def _post(self, record: Record) -> _Answer | str:
        """Send one request; return its answer, or why there is none. No text has a part of the URL, or of a header."""
        endpoint, answer, why = self._endpoint, None, ""
        body = record.value or b""
        headers = [(b"host", endpoint.authority.encode())]
        headers += headers_of(record, int(self._now()), endpoint.secrets)
        url = httpcore.URL(
            scheme=endpoint.scheme.encode(), host=endpoint.host.encode(), port=endpoint.port,
            target=endpoint.target(record.topic).encode(),
        )  # fmt: skip
        limits = {"timeout": {"connect": self._timeout_s}}
        if self._pool is None:
            raise BrokerTrouble("it is not open")
        try:
            # All of it, since a receiver that answers a byte now and then would hold up its key for ever.
            async with (
                asyncio.timeout(self._timeout_s),
                self._pool.stream("POST", url, headers=headers, content=body, extensions=limits) as response,
            ):
                named = {name.lower(): value.decode("latin-1") for name, value in response.headers}
                answer = _Answer(response.status, named.get(b"retry-after"))
                size = 0
                async for chunk in response.aiter_stream():
                    size += len(chunk)
                    if size > MAX_ANSWER:
                        break
        except (TimeoutError, httpcore.TimeoutException):
            why = f"the receiver has not answered within {self._timeout_s:g} s"
        except httpcore.ConnectError as error:
            why = f"the receiver is not reached: {error}"
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            why = f"the receiver broke off ({type(error).__name__})"
        return why if answer is None else answer  # once there is a status, nothing behind it matters

    def _meaning(self, answer: _Answer, record: Record) -> str | None:
        status = answer.status
        if 200 <= status < 300:
            return None
        text = f"the receiver answers {_named(status)}"
        if status == HTTPStatus.GONE:
            raise BrokerRefused(
                f"{text}: it wants no more messages. If that was not meant, mend it and: mailroom bridge resume "
                f"{self._name}. Else: mailroom bridge remove {self._name}",
                code="MR-bridge-broker-refused",
            )
        if status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE):
            raise RecordRefused(
                f"{text} to message {record.id}, whose value has {len(record.value or b''):,} bytes.",
                code="MR-bridge-record-refused",
            )
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            after_s = retry_after_s(answer.retry_after, self._now())
            self._quiet_until = max(self._quiet_until, self._now() + after_s)
        if 300 <= status < 400:
            return f"{text}, and redirects are not followed: give the bridge the URL that takes messages"
        return text


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
