"""`WebhookApp`: an ASGI app that turns requests into messages."""

import asyncio
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias
from uuid import UUID

from mailroom.errors import ConfigurationError, ConnectionFailed, InvalidMessage, MailroomError, coded
from mailroom.message.patterns import Patterns
from mailroom.message.topic import Topic, pattern_text
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.sqlstate import BLAMES, meaning, primary_message, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA, MAX_VALUE_BYTES, shown
from mailroom.values.numbers import count, whole
from outbox.webhooks.reading import Bodies
from outbox.webhooks.refusal import RETRY_AFTER_S, RequestRefused, unavailable
from outbox.webhooks.request import (
    Headers,
    check_cloud_event,
    check_length,
    content_type,
    id_of,
    key_of,
    too_large,
    topic_of,
    value_of,
)
from outbox.webhooks.sessions import ANSWER_S, Sessions, Source, usable
from outbox.webhooks.signature import SignatureRefused, check_stamp, secret_bytes, verify

log = logging.getLogger("mailroom.webhooks")

Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
Secrets: TypeAlias = "Sequence[str] | Mapping[str, Sequence[str]]"

MIB = 2**20
READ_S = 30.0  # for a client to send its request
LINGER_S = 2.0  # for one that was refused to read the answer while it is still sending
# Requests at once, of those that are still being read and of those that are verified: each holds up to max_bytes.
MOST_AT_ONCE = 256
LOCKED = "55P03"  # the lock timeout: another request has this id, and has not committed yet


class _Reading:
    """What receives a request; `is_done` once it has been read whole, or the client has gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_done = False

    async def __call__(self) -> Event:
        event = await self._receive()
        self.is_done = event["type"] != "http.request" or not event.get("more_body", False)
        return event

    async def linger(self) -> None:
        """Read on for a moment, and drop it: a connection that is closed with bytes unread takes the answer along."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.is_done:
                    await self()


class WebhookApp:
    """An ASGI app that takes `POST /topics/TOPIC` from outside and sends the body as a message to that topic.

    Mount it in a web application, or run it by itself; `mailroom bridge serve` does that. `source` is a connection
    string, for up to `parallel` sessions of the app's own, or a psycopg `AsyncConnectionPool`. `topics` are the topics
    that may be sent to, as text or `Topic`, also patterns such as `stripe.#`; of those that fit the most specific
    counts. `secrets` are `whsec_<base64>` of Standard Webhooks, several while one is replaced: for all topics, or a
    mapping with those of each of `topics`. A request must be signed by one of them within 5 minutes; without secrets
    say `unsigned=True`, if something before the app authenticates the senders. `max_bytes` limits the body, 1 MiB if
    not given, at most 16 MiB. `now` tells the time, in seconds since 1970.

    The answer is 202 with the message's id once it is committed. The header `webhook-id` (unsigned also
    `Idempotency-Key`) is the `once` of the message: however often and at however many servers the same id arrives
    within seven days, there is one message of it per topic, and each request is answered with its id. So senders repeat
    until they get a 2xx. All else is answered with one JSON line `{"code": ..., "error": ...}`.

    `async with app:` opens and closes the sessions; so does a server's lifespan. An app that is mounted has no lifespan
    of its own: use it in that of the application, or the sessions are opened by the first request, and nobody closes
    them. Raises `ConfigurationError` for a secret or a source that cannot be used, `InvalidMessage` for a pattern.
    """

    def __init__(
        self,
        source: Source,
        secrets: Secrets = (),
        *,
        topics: Iterable[Topic[Any, Any] | str],
        schema: str = DEFAULT_SCHEMA,
        max_bytes: int = MIB,
        unsigned: bool = False,
        parallel: int = 10,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._allowed = _allowed(topics, secrets, unsigned)
        self._sessions = Sessions(usable(source), schema, count(parallel, "parallel"))
        self._max_bytes = whole(max_bytes, "max_bytes", 1, MAX_VALUE_BYTES)
        self._now = now
        self._bodies = Bodies(MOST_AT_ONCE, READ_S)
        self._at_once = 0
        self._refused, self._failed = Repeats(), Repeats()

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._sessions.open()
        except Exception as error:
            if _is_ours(error) or (isinstance(error, MailroomError) and not isinstance(error, ConnectionFailed)):
                raise
            # The database may come up later than we do. Until then requests are answered with 503.
            log.warning("webhooks cannot be taken yet: %s", cause(error))
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._sessions.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow a server's lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.__aenter__()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": cause(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._sessions.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/healthz") and scope["method"] in ("GET", "HEAD"):
            await _respond(scope, send, 200, {"state": "alive"})
            return
        reading = _Reading(receive)
        try:
            message_id = await self._take(scope, reading)
        except RequestRefused as refusal:
            self._tell(refusal)
            body = {"code": refusal.code, "error": str(refusal)}
            await _respond(scope, send, refusal.status, body, refusal.headers, None if reading.is_done else reading)
        else:
            if message_id is not None:
                await _respond(scope, send, 202, {"id": str(message_id)})

    async def _take(self, scope: Scope, receive: Receive) -> UUID | None:
        """Return the id of the message once it is committed; None if the client has gone before it had sent all."""
        topic = topic_of(scope)
        if (secrets := self._allowed.find(topic)) is None:
            raise RequestRefused(
                403, f"Topic {shown(topic)} is not one of those taken here.", code="MR-webhook-topic-not-allowed"
            )
        headers = Headers.of(scope["headers"])
        kind = content_type(headers)
        check_length(headers, self._max_bytes)
        if secrets:  # before a body is waited for
            self._verified(headers, None, secrets)
        body = await self._body(scope, receive)
        if body is None:
            return None
        # Nothing of the body is looked at before this.
        once = self._verified(headers, body, secrets) if secrets else id_of(headers)
        check_cloud_event(headers, topic)
        key = key_of(headers, scope.get("query_string", b""))
        told = {f"ce_{name}": value for name, value in headers.cloud_event.items()}
        if self._at_once >= MOST_AT_ONCE:
            raise unavailable()
        self._at_once += 1
        try:
            return await self._sent(topic, lambda: value_of(body, kind), key, told, once)
        finally:
            self._at_once -= 1

    async def _sent(
        self, topic: str, read: Callable[[], object], key: str | None, headers: Mapping[str, str], once: str
    ) -> UUID:
        try:
            message_id = await self._sessions.send(topic, read, key, headers, once)
        except RequestRefused:
            raise
        except InvalidMessage as error:
            raise RequestRefused(422, str(error), code=error.code) from None
        except Exception as error:
            raise self._explained(error) from None
        self._failed.over()
        return message_id

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        body = bytearray()
        peer, *_ = scope.get("client") or ("",)
        with suppress(TimeoutError):
            async with self._bodies.one(peer):
                while (event := await receive())["type"] == "http.request":
                    body += event.get("body", b"")
                    if len(body) > self._max_bytes:
                        raise too_large(self._max_bytes)
                    if not event.get("more_body", False):
                        return bytes(body)
                return None
        raise RequestRefused(
            408,
            f"The body did not arrive in time, which is {READ_S:g} s, or less if many are sent.",
            code="MR-webhook-request-invalid",
        )

    def _verified(self, headers: Headers, body: bytes | None, secrets: Sequence[str]) -> str:
        try:
            if body is None:
                return check_stamp(headers.named, self._now())[0]
            return verify(headers.named, body, secrets, self._now())
        except SignatureRefused as error:
            raise RequestRefused(401, str(error), code=error.code) from None

    def _explained(self, error: Exception) -> RequestRefused:
        """Log why a message could not be sent; return what its sender is told, which is not that."""
        if sqlstate(error) == LOCKED:
            return RequestRefused(
                409,
                "Another request with this id is under way. Send it again after a while, with the same id.",
                code="MR-webhook-busy",
                retry_after=str(RETRY_AFTER_S),
            )
        is_ours = _is_ours(error)
        why = cause(error)
        if sqlstate(error)[:2] == "42":  # it names a table, or a missing right
            why = f"{why}: {primary_message(error)}"
        elif is_ours and not sqlstate(error):
            why = f"{why}\n{''.join(traceback.format_tb(error.__traceback__))}"  # lines of code, and no values
        if (times := self._failed.struck(why)) is not None:
            log.error("a webhook cannot be sent%s: %s", times, why)
        return unavailable(500 if is_ours else 503)

    def _tell(self, refusal: RequestRefused) -> None:
        if refusal.status < 500 and (times := self._refused.struck(f"{refusal.status} {refusal.code}")) is not None:
            log.warning("a webhook was answered with %d%s: %s", refusal.status, times, coded(str(refusal), refusal))


def _is_ours(error: Exception) -> bool:
    """Return whether an error is a fault of the code, of a right that is missing, or of a user's trigger."""
    return not isinstance(error, MailroomError) and meaning(error) in BLAMES


def _allowed(topics: Iterable[Topic[Any, Any] | str], secrets: Secrets, unsigned: bool) -> Patterns[tuple[str, ...]]:
    names = list(dict.fromkeys(map(pattern_text, [topics] if isinstance(topics, str | Topic) else topics)))
    if not names:
        raise ConfigurationError(
            "topics is empty: say which topics may be sent to, such as ['stripe.#'].", code="MR-invalid-argument"
        )
    of_each = secrets if isinstance(secrets, Mapping) else dict.fromkeys(names, secrets)
    if unknown := [name for name in of_each if name not in names]:
        raise ConfigurationError(
            f"There are secrets of {shown(unknown[0])}, which is not one of topics.", code="MR-invalid-argument"
        )
    allowed = Patterns[tuple[str, ...]]()
    for name in names:
        given = of_each.get(name, ())
        its = (given,) if isinstance(given, str) else tuple(given)
        if unsigned and its:
            raise ConfigurationError(
                "There are secrets, and unsigned=True: give one of the two.", code="MR-arguments-conflict"
            )
        if not unsigned and not its:
            raise ConfigurationError(
                f"There is no secret for {name}, so anyone could send to it. Give secrets; or say unsigned, if "
                "something before this server authenticates the senders.",
                code="MR-webhook-secret-invalid",
            )
        secret_bytes(its)
        allowed.add(name, its)
    return allowed


async def _respond(
    scope: Scope,
    send: Send,
    status: int,
    answer: Mapping[str, str],
    headers: Mapping[str, str] | None = None,
    reading: _Reading | None = None,
) -> None:
    body = json.dumps(answer).encode() + b"\n"
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    all_headers |= headers or {}
    if status >= 400 and str(scope.get("http_version", "1.1")).startswith("1"):
        all_headers["connection"] = "close"  # the rest of the body may still be on its way
    raw = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    whole: Event = {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
    if reading is None:
        await send(whole)
        return
    await send({**whole, "more_body": True})
    await reading.linger()
    await send({"type": "http.response.body"})
