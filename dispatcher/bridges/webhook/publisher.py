"""Posts each record to a URL, until it is answered with a 2xx: at least once, and each key in order.

What an answer means, so that a receiver needs to know nothing but Standard Webhooks:

- 2xx: it has the message. The body of the answer does not matter.
- 410: it wants no more messages. The bridge stops, and says so.
- 413, 431: this record is too large for it: what `--on-failure` says.
- 429, and 503 with `Retry-After`: posted again, and nothing else meanwhile, for as long as that says, at most for an
  hour.
- All others, such as 400, 401, 404, 422 and 500, no answer within 15 s, and no connection: posted again with a backoff.
  A receiver that is being deployed gives any of them for a while, and a message that is skipped is not there any more.
- 3xx is one of these: a redirect is not followed, since it would take messages, and a signature, to another place.

A key whose message fails waits for itself: others are posted around it, unless nobody is reached at all, as long as it
and what is behind it are few. Nothing is read back from the receiver, so what a crash leaves unacknowledged is posted
again with the same `webhook-id`, which tells the receiver so.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from uuid import UUID

import httpcore

from dispatcher.bridges.webhook.connecting import CheckedBackend, Resolve, resolve
from dispatcher.bridges.webhook.endpoint import endpoint_of
from dispatcher.bridges.webhook.request import LONGEST_AFTER_S, headers_of, retry_after_s
from mailroom.bridges.environment import variables
from mailroom.bridges.publisher import Answered, BrokerRefused, BrokerTrouble, OutBridge, RecordRefused, WaitingRow
from mailroom.bridges.record import Record
from mailroom.session.backoff import pause_s

TIMEOUT_S = 15.0
AT_ONCE = 16  # requests
LONGEST_PAUSE_S = 30.0
AGAIN_AT_ONCE = 4  # of them, of keys that wait apart: those that are answered late are not to take all
MOST_APART = 1_000  # records that wait while others are posted around them
MOST_BYTES_APART = 4 * 1024 * 1024
IDLE_S = 15.0  # servers close connections that idle, many after 20 s or more
MAX_ANSWER = 64 * 1024  # bytes that are read to keep the connection; what is longer costs it


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after: str | None


@dataclass(frozen=True, slots=True)
class _Failed:
    """What became of an attempt. `is_apart`: others may be posted meanwhile; with `error` no further one helps."""

    why: str
    is_apart: bool = True
    error: RecordRefused | None = None


@dataclass(slots=True)
class _Key:
    """The records of a key that are not acknowledged. `failed` is of the first of them; it is left out, if that is set.

    If `is_apart`, nobody waits for it.
    """

    records: deque[Record] = field(default_factory=deque)
    failed: _Failed | None = None
    is_apart: bool = False
    left_out: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._skips = bridge.settings.on_failure == "skip"
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._again = asyncio.Semaphore(AGAIN_AT_ONCE)
        self._quiet_until = 0.0
        self._keys: dict[bytes | UUID, _Key] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.answered_at: float | None = None

    @property
    def trouble(self) -> str | None:
        """What became of the last attempt of the key that has waited longest."""
        return next((each.failed.why for each in self._keys.values() if each.failed is not None), None)

    @property
    def waiting(self) -> dict[int, WaitingRow | None]:
        """The rows that are not acknowledged."""
        found: dict[int, WaitingRow | None] = {}
        for key in self._keys.values():
            found |= dict.fromkeys((record.seq for record in key.records), None)
            if key.failed is not None:
                found[key.records[0].seq] = WaitingRow(key.failed.why, key.failed.error)
        return dict(sorted(found.items()))

    def leave_out(self, row: int) -> None:
        """Give a record up that no attempt helps, and go on behind it."""
        for key in self._keys.values():
            if key.failed is not None and key.records[0].seq == row:
                key.records.popleft()
                key.failed = None
                key.left_out.set()

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
        """Post the records, and return once each was answered with a 2xx, or waits apart with others of its key."""
        if self._error is not None:
            raise self._error  # closed: nothing is begun that nobody would end
        for record in records:
            of = record.id if record.key is None else record.key
            if (key := self._keys.get(of)) is None:
                key = self._keys[of] = _Key()
                task = asyncio.create_task(self._deliver(of, key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            key.records.append(record)
        while self._error is None and not self._is_settled():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _is_settled(self) -> bool:
        if not all(key.is_apart for key in self._keys.values()):
            return False
        apart = [record for key in self._keys.values() for record in key.records]
        return len(apart) <= MOST_APART and sum(len(record.value or b"") for record in apart) <= MOST_BYTES_APART

    async def keep(self) -> None:
        """Do nothing: there is no mark."""

    async def close(self) -> None:
        """Break off the requests that are under way."""
        await self._give_up(BrokerTrouble("given up"))
        if self._pool is not None:
            await self._pool.aclose()

    async def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _deliver(self, of: bytes | UUID, key: _Key) -> None:
        """Post the records of one key, one after another."""
        failures = 0
        try:
            while key.records:
                async with self._again if key.is_apart else nullcontext():
                    failed = await self._attempt(key.records[0])
                if failed is None:
                    self.answered_at = time.monotonic()
                    key.records.popleft()
                    key.failed, key.is_apart, failures = None, False, 0
                    continue
                failures += 1
                key.failed, key.is_apart = failed, key.is_apart or failed.is_apart
                self._changed.set()
                if failed.error is None or not self._skips:
                    await self._pause(pause_s(failures, LONGEST_PAUSE_S))
                else:
                    await key.left_out.wait()
                    key.left_out.clear()
                    failures = 0
            del self._keys[of]
            self._changed.set()
        except Exception as error:
            await self._give_up(error)

    async def _attempt(self, record: Record) -> _Failed | None:
        """Post a record once; return None if the receiver has it, or why not."""
        async with self._slots:
            # In the slot: whoever waited for one may have been overtaken by a 429. The bound is for a clock set back.
            while 0 < (left := self._quiet_until - self._now()) <= LONGEST_AFTER_S:
                await self._pause(left)
            answer = await self._post(record)
        return self._meaning(answer, record) if isinstance(answer, _Answer) else answer

    async def _post(self, record: Record) -> _Answer | _Failed:
        """Send one request; return its answer, or why there is none. No text has a part of the URL, or of a header."""
        endpoint, answer, failed = self._endpoint, None, _Failed("")
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
            failed = _Failed(f"the receiver has not answered within {self._timeout_s:g} s (message {record.id})")
        except httpcore.ConnectError as error:
            failed = _Failed(f"the receiver is not reached: {error} (message {record.id})", is_apart=False)
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            failed = _Failed(f"the receiver broke off: {type(error).__name__} (message {record.id})")
        return failed if answer is None else answer  # once there is a status, nothing behind it matters

    def _meaning(self, answer: _Answer, record: Record) -> _Failed | None:
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
        error, is_apart = None, True
        if status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE):
            text = f"{text} to a value of {len(record.value or b''):,} bytes"
            error = RecordRefused(f"{text} (message {record.id})", code="MR-bridge-record-refused")
        elif status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            after_s = retry_after_s(answer.retry_after, self._now())
            self._quiet_until = max(self._quiet_until, self._now() + after_s)
            is_apart = status == HTTPStatus.SERVICE_UNAVAILABLE and not after_s
        elif 300 <= status < 400:
            text = f"{text}, and redirects are not followed: give the bridge the URL that takes messages"
        return _Failed(Answered(f"{text} (message {record.id})"), is_apart, error)


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
