"""`WebhookApp`: a request becomes one message, or is refused; who repeats it loses nothing and doubles nothing."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
import pytest
from cbor2 import dumps
from fastapi import FastAPI
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.routing import Mount

from mailroom import testing
from mailroom.errors import MailroomError
from mailroom.testing import SentMessage
from outbox import Outbox, WebhookApp
from outbox.webhooks import app as app_module
from outbox.webhooks import sessions
from outbox.webhooks.request import value_of
from tests.bridges.webhooks import NOW, OTHER, SECRET, client_of, post, refused, signed
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.proxy import CommitFault, Proxy, proxied
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S, eventually_async, wait_until_blocked

TOPICS = ["order.paid", "stripe.#"]
ORDER = b'{"order": 1}'


def app_of(source: Any, **options: Any) -> WebhookApp:
    given: dict[str, Any] = {"secrets": [SECRET], "topics": TOPICS, "now": lambda: NOW} | options
    return WebhookApp(source, **given)


@pytest.fixture
async def app(node: Node) -> AsyncIterator[WebhookApp]:
    async with app_of(node.dsn) as app:
        yield app


@pytest.fixture
async def client(app: WebhookApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
def through(node: Node) -> Iterator[tuple[Proxy, str]]:
    """A proxy before the server, and the way through it."""
    with proxied(node.dsn) as found:
        yield found


@asynccontextmanager
async def serving(source: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with app_of(source, **options) as app, client_of(app) as client:
        yield client


def sent(node: Node, topic: str = "order.paid") -> list[SentMessage]:
    return testing.sent(node.connection, topic)


# -- What is taken -----------------------------------------------------------------------------------------------------


async def test_request_becomes_a_message_and_is_answered_with_its_id(node: Node, client: httpx.AsyncClient) -> None:
    response = await post(client)
    [message] = sent(node)
    assert (response.status_code, response.json()) == (202, {"id": str(message.id)})
    assert (message.value, message.kind, message.headers) == ({"order": 1}, "M", {})
    assert message.key == str(message.id)


async def test_same_id_is_answered_the_same_and_sends_nothing_more(node: Node, client: httpx.AsyncClient) -> None:
    first = await post(client)
    again = [await post(client, b"[2]"), await post(client, b"[3]", at=NOW - 200, mailroom_key="k")]
    assert [(each.status_code, each.json()) for each in again] == [(202, first.json())] * 2
    assert [message.value for message in sent(node)] == [{"order": 1}]
    other_topic = await post(client, path="/topics/stripe.invoice.paid")
    assert other_topic.json() != first.json()
    assert len(sent(node, "stripe.invoice.paid")) == 1


async def test_id_is_that_of_once_for_everybody_who_sends(node: Node, client: httpx.AsyncClient) -> None:
    with node.connection.transaction():
        by_hand = Outbox().send(node.connection, "order.paid", 1, once="msg_1")
    assert (await post(client)).json() == {"id": str(by_hand)}
    assert [message.value for message in sent(node)] == [1]


async def test_cbor_is_taken_with_all_that_it_can_say(node: Node, client: httpx.AsyncClient) -> None:
    id = UUID("0b3c2a4e-5d5f-4c55-8f4c-6a1c1d0f2a11")
    response = await post(client, dumps({"id": id, "raw": b"\x00"}), content_type="application/cbor")
    assert response.status_code == 202
    assert sent(node)[0].value == {"id": id, "raw": b"\x00"}


async def test_key_is_that_of_query_header_or_subject(node: Node, client: httpx.AsyncClient) -> None:
    given: list[tuple[str, dict[str, Any], str]] = [
        ("?key=order%2D%C3%A9", {}, "order-\N{LATIN SMALL LETTER E WITH ACUTE}"),
        ("", {"mailroom-key": "order-1"}, "order-1"),
        ("?key=order-1", {"mailroom-key": "order-1", "ce-subject": "order-2"}, "order-1"),
        ("", {"ce-subject": "order%201"}, "order 1"),
    ]
    for nth, (query, headers, _) in enumerate(given):
        assert (await post(client, id=f"msg_{nth}", path=f"/topics/order.paid{query}", **headers)).status_code == 202
    assert [message.key for message in sent(node)] == [key for *_, key in given]


async def test_event_of_cloudevents_keeps_its_attributes(node: Node, client: httpx.AsyncClient) -> None:
    event: dict[str, Any] = {"ce_specversion": "1.0", "ce_id": "7", "ce_source": "/shop%20one", "ce_type": "order.paid"}
    assert (await post(client, **event)).status_code == 202
    assert sent(node)[0].headers == event | {"ce_source": "/shop one"}


async def test_without_signatures_an_id_of_any_standard_is_enough(node: Node) -> None:
    async with serving(node.dsn, secrets=(), unsigned=True) as client:
        ids = [{"webhook-id": "a.b"}, {"Idempotency-Key": "a"}, {"ce-id": "a", "ce-source": "/shop"}]
        for headers in ids * 2:
            assert (await client.post("/topics/order.paid", json=1, headers=headers)).status_code == 202
        assert refused(await client.post("/topics/order.paid", json=1)) == (400, "request-invalid")
        assert refused(await client.post("/topics/order.paid", json=1, headers={"ce-id": "a"}))[0] == 400
    assert len(sent(node)) == 3


async def test_each_topic_may_have_secrets_of_its_own(node: Node) -> None:
    secrets = {"order.paid": [SECRET], "stripe.#": [OTHER]}
    async with serving(node.dsn, secrets=secrets) as client:
        for path, its, status in (
            ("order.paid", SECRET, 202), ("order.paid", OTHER, 401), ("stripe.a", OTHER, 202), ("stripe.a", SECRET, 401)
        ):  # fmt: skip
            response = await client.post(f"/topics/{path}", content=ORDER, headers=signed(ORDER, secrets=(its,)))
            assert response.status_code == status


async def test_either_secret_is_good_while_one_is_rotated(node: Node) -> None:
    async with serving(node.dsn, secrets=[SECRET, OTHER]) as client:
        for nth, secrets in enumerate(((SECRET,), (OTHER,), (OTHER, SECRET))):
            headers = signed(ORDER, f"msg_{nth}", secrets=secrets)
            assert (await client.post("/topics/order.paid", content=ORDER, headers=headers)).status_code == 202
    assert len(sent(node)) == 3


async def test_process_is_alive_whatever_the_database_does() -> None:
    async with client_of(app_of("postgresql://127.0.0.1:1/none")) as client:
        response = await client.get("/healthz")
        assert (response.status_code, response.json()) == (200, {"state": "alive"})


# -- What is refused ---------------------------------------------------------------------------------------------------


async def test_what_is_not_signed_is_refused_before_its_body_is_looked_at(
    node: Node, client: httpx.AsyncClient
) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"webhook_signature": "v1,AAAA"}, "wrong"),
        ({"webhook_id": "msg_2"}, "wrong"),
        ({"webhook_signature": ""}, "missing"),
        ({"at": NOW - 301}, "stale"),
        ({"at": NOW + 301}, "stale"),
        ({"secrets": (OTHER,)}, "wrong"),
    ]
    answers = [(change, refused(await post(client, b"not json", **change))) for change, _ in changes]
    assert answers == [(change, (401, f"signature-{code}")) for change, code in changes]
    assert sent(node) == []


async def test_only_the_topics_that_are_named_are_there(client: httpx.AsyncClient) -> None:
    for method, path, status, code in [
        ("POST", "/", 404, "path"),
        ("POST", "/topics/", 404, "path"),
        ("POST", "/topics/order.paid/", 404, "path"),
        ("POST", "/topics", 404, "path"),
        ("GET", "/topics/order.paid", 405, "path"),
        ("POST", "/topics/order", 403, "topic-not-allowed"),
        ("POST", "/topics/order.paid.twice", 403, "topic-not-allowed"),
        ("POST", "/topics/stripe.%23", 422, "invalid-topic"),  # the pattern fits, and a topic is no pattern
        ("POST", "/topics/%00", 403, "topic-not-allowed"),
    ]:
        response = await client.request(method, path, content=ORDER, headers=signed(ORDER))
        assert refused(response) == (status, code), path
        assert response.headers.get("allow") == ("POST" if status == 405 else None)


async def test_other_content_is_refused(client: httpx.AsyncClient) -> None:
    kinds = [
        "",
        "text/plain",
        "application/cloudevents+json",
        "application/json; charset=utf-16",
        "multipart/form-data",
    ]
    changes: list[dict[str, Any]] = [*({"content_type": kind} for kind in kinds), {"content_encoding": "gzip"}]
    for given in changes:
        assert refused(await post(client, **given)) == (415, "content-type"), given


JSON, CBOR = "application/json", "application/cbor"


async def test_hostile_bodies_are_refused(node: Node, client: httpx.AsyncClient) -> None:
    bodies = [
        (JSON, b"", 400, "request-invalid"),
        (JSON, b"{", 400, "request-invalid"),
        (JSON, b"1 2", 400, "request-invalid"),
        (JSON, b"\xff", 400, "request-invalid"),
        (JSON, '"a"'.encode("utf-16"), 400, "request-invalid"),
        (JSON, b"\xef\xbb\xbf1", 400, "request-invalid"),
        (JSON, b'{"a": 1, "a": 2}', 400, "request-invalid"),
        (JSON, b"[NaN]", 400, "request-invalid"),
        (JSON, b"-Infinity", 400, "request-invalid"),
        (JSON, b"[" * 100_000, 400, "request-invalid"),
        (JSON, b"9" * 5_000, 400, "request-invalid"),
        (JSON, b"1e999", 400, "request-invalid"),
        (JSON, b"9" * 30, 422, "value-unsupported"),
        (JSON, b'"\\ud800"', 422, "value-unsupported"),
        (JSON, b"[" * 40 + b"]" * 40, 422, "value-unsupported"),
        (JSON, b"[" + b"1," * 250_000 + b"1]", 422, "value-too-large"),
        (JSON, b"[" + b"[]," * 349_000 + b"1]", 422, "value-too-large"),
        (CBOR, b"", 400, "request-invalid"),
        (CBOR, b"\x82\x01", 400, "request-invalid"),
        (CBOR, b"\x01\x01", 400, "request-invalid"),
        (CBOR, b"\xbf\xff", 400, "request-invalid"),
        (CBOR, b"\xa2\x01\x01\x01\x02", 400, "request-invalid"),
        (CBOR, b"\x81" * 100_000, 400, "request-invalid"),
        (CBOR, b"\xf9\x7e\x00", 422, "value-unsupported"),
    ]
    answers = [(body[:40], *refused(await post(client, body, content_type=kind))) for kind, body, *_ in bodies]
    assert answers == [(body[:40], status, code) for _, body, status, code in bodies]
    assert sent(node) == []


async def test_refusal_shows_nothing_of_the_body(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for body in (b'{"card zq42": 1, "card zq42": 2}', b'"card zq42', b'{"card zq42": 1e999}', b'["card zq42", NaN]'):
        response = await post(client, body)
        assert response.status_code in (400, 422)
        assert "zq42" not in response.text
    assert "zq42" not in caplog.text
    assert SECRET not in caplog.text


async def test_hostile_keys_and_headers_are_refused(node: Node, client: httpx.AsyncClient) -> None:
    requests: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
        ("?key=a&key=b", {}, (400, "request-invalid")),
        ("?key=a", {"mailroom-key": "b"}, (400, "request-invalid")),
        ("?key=%ff", {}, (400, "request-invalid")),
        ("?" + "a=1&" * 30, {}, (400, "request-invalid")),
        ("?key=", {}, (422, "invalid-key")),
        ("?key=%00", {}, (422, "invalid-text")),
        ("?key=" + "k" * 1_025, {}, (422, "invalid-key")),
        ("", {"ce-specversion": "0.3"}, (400, "request-invalid")),
        ("", {"ce-type": "order.lost"}, (422, "request-invalid")),
        ("", {"ce-subject": "%ff"}, (400, "request-invalid")),
        ("", {"ce-note": "n" * 9_000}, (422, "headers-too-large")),
    ]
    for path, headers, answer in requests:
        assert refused(await post(client, path=f"/topics/order.paid{path}", **headers)) == answer, path or headers
    assert sent(node) == []


async def test_header_that_is_given_twice_or_is_not_text_is_refused(client: httpx.AsyncClient) -> None:
    for more in ((b"webhook-id", b"msg_2"), (b"mailroom-key", b"\xff")):
        headers = [*((name.encode(), value.encode()) for name, value in signed(ORDER).items()), more]
        response = await client.post("/topics/order.paid", content=ORDER, headers=headers)
        assert refused(response) == (400, "request-invalid")


# -- Bodies that come slowly, or not whole, or are too large -----------------------------------------------------------


async def called(
    app: WebhookApp, *events: dict[str, Any], headers: dict[str, str] | None = None, steps: list[str] | None = None,
    peer: str = "stranger"
) -> list[Any]:  # fmt: skip
    """Hand the events to the app, and return what it sends; where they end, the client says nothing more."""
    waiting, answers = list(events), []
    steps = [] if steps is None else steps

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        steps.append("read")
        return waiting.pop(0)

    async def send(event: Any) -> None:
        steps.append("sent")
        answers.append(event)

    given = signed(ORDER) if headers is None else headers
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/topics/order.paid",
        "query_string": b"",
        "headers": raw,
    }
    scope["client"] = (peer, 1)
    await app(scope, receive, send)
    if answers:
        start, *parts = answers
        assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
        return [start["status"], json.loads(b"".join(part.get("body", b"") for part in parts))["code"]]
    return []


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.slow
async def test_body_that_is_too_large_is_refused_before_all_of_it_was_read(node: Node) -> None:
    app = app_of(node.dsn, max_bytes=10)
    too_large = [413, "MR-webhook-too-large"]
    assert await called(app, headers=signed(b"12345678901", content_length="11")) == too_large
    assert await called(app, headers=signed(b"1", content_length="9" * 5_000)) == too_large
    assert await called(app, part(b"123456"), part(b"12345"), headers=signed(b"12345612345")) == too_large
    async with app, client_of(app) as client:
        assert (await post(client, b"1234567890", content_length="10")).status_code == 202
    assert [message.value for message in sent(node)] == [1_234_567_890]


async def test_client_that_is_refused_at_once_has_the_answer_while_it_sends_the_rest(app: WebhookApp) -> None:
    """A connection that is closed with bytes unread is reset, and the client loses the answer."""
    headers = {"content-type": "text/html"}
    for last in (part(b"}", more=False), {"type": "http.disconnect"}):
        steps: list[str] = []
        assert (await called(app, part(b"{"), last, headers=headers, steps=steps))[0] == 415
        assert steps == ["sent", "sent", "read", "read", "sent"]


async def test_client_that_is_refused_after_it_has_sent_all_is_not_waited_for(app: WebhookApp) -> None:
    steps: list[str] = []
    assert (await called(app, part(b"{}", more=False), headers=signed(b"other"), steps=steps))[0] == 401
    assert steps == ["read", "sent", "sent"]


async def test_client_that_goes_away_leaves_nothing(node: Node, app: WebhookApp) -> None:
    assert await called(app, part(ORDER), {"type": "http.disconnect"}) == []
    assert await called(app, {"type": "http.disconnect"}) == []
    assert sent(node) == []


@pytest.mark.slow
async def test_client_that_sends_nothing_more_is_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "READ_S", 0.01)
    assert await called(app_of(node.dsn), part(b"{")) == [408, "MR-webhook-request-invalid"]
    assert sent(node) == []


async def test_of_bodies_that_do_not_come_the_oldest_of_who_sends_most_make_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "MOST_AT_ONCE", 3)
    async with app_of(node.dsn) as app, client_of(app) as client:
        first, one, *others = (
            asyncio.ensure_future(called(app, part(b"{"), peer=peer)) for peer in ("one", "other", "one")
        )
        await asyncio.sleep(0)
        assert (await post(client)).status_code == 202
        assert await first == [408, "MR-webhook-request-invalid"]
        for reading in (one, *others):
            assert not reading.done()
            reading.cancel()


async def test_what_says_of_itself_that_it_is_not_signed_is_refused_before_its_body_is_waited_for(
    app: WebhookApp,
) -> None:
    given = signed(ORDER)
    for headers in (
        *({name: text for name, text in given.items() if name != left} for left in given if left != "content-type"),
        signed(ORDER, at=NOW - 400),
        given | {"webhook-signature": f"v1,{'A' * 43} v1a,{'A' * 44}"},
    ):
        steps: list[str] = []
        assert (await called(app, part(b"", more=False), headers=headers, steps=steps))[0] == 401
        assert steps[0] == "sent"


async def test_body_is_read_into_a_value_only_when_there_is_a_session_for_it(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value takes many times the memory of its body."""
    read: list[bytes] = []

    def reading(body: bytes, kind: str) -> object:
        read.append(body)
        return value_of(body, kind)

    monkeypatch.setattr(app_module, "value_of", reading)
    monkeypatch.setattr(sessions, "ANSWER_S", WITHIN_S)
    monkeypatch.setattr(sessions, "PATIENCE", "SET LOCAL lock_timeout = '60s'")
    async with serving(node.dsn, parallel=1) as client:
        with connect() as other:
            Outbox().send(other, "order.paid", 0, once="msg_1")
            held = asyncio.ensure_future(post(client, b"1", id="msg_1"))
            await eventually_async(lambda: read == [b"1"])
            second = asyncio.ensure_future(post(client, b"2", id="msg_2"))
            for _ in range(50):
                await asyncio.sleep(0)
            assert read == [b"1"]
            other.rollback()
        assert [(await each).status_code for each in (held, second)] == [202, 202]
    assert read == [b"1", b"2"]


# -- The database ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first", ["commits", "rolls back"])
async def test_the_same_id_many_times_at_once_is_one_message(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(sessions, "ANSWER_S", 60.0)
    monkeypatch.setattr(sessions, "PATIENCE", "SET LOCAL lock_timeout = '60s'")
    holder = connect()
    held = Outbox().send(holder, "order.paid", 0, once="msg_1")
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND application_name = 'mailroom bridge serve'"
    )
    async with serving(node.dsn, parallel=10) as one, serving(node.dsn, parallel=10) as other:
        requests = [asyncio.ensure_future(post(client, b"%d" % n)) for n in range(1, 11) for client in (one, other)]
        await eventually_async(lambda: node.rows(waiting) == [(20,)])
        assert not any(request.done() for request in requests)
        holder.commit() if first == "commits" else holder.rollback()
        responses = await asyncio.gather(*requests)
    assert {(each.status_code, each.json()["id"]) for each in responses} == {(202, str(held))}
    [message] = sent(node)
    assert (message.value == 0) == (first == "commits")


async def test_id_that_another_session_holds_for_long_is_answered_and_can_be_sent_later(
    node: Node, client: httpx.AsyncClient, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PATIENCE", "SET LOCAL lock_timeout = '20ms'")
    holder = connect()
    Outbox().send(holder, "order.paid", 0, once="msg_1")
    response = await post(client)
    assert refused(response) == (409, "busy")
    assert response.headers["retry-after"] == "5"
    holder.rollback()
    assert (await post(client)).status_code == 202


async def test_request_is_answered_after_its_commit_and_not_before(node: Node, client: httpx.AsyncClient) -> None:
    node.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'card zq42'; END$$;"
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON mailroom.outbox DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    response = await post(client)
    assert refused(response) == (500, "unavailable")
    assert "zq42" not in response.text
    assert sent(node) == []
    node.connection.execute("DROP TRIGGER refuse ON mailroom.outbox")
    assert (await post(client)).status_code == 202


async def test_database_that_is_gone_is_answered_with_503_and_nothing_is_lost_or_doubled(
    node: Node, through: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, dsn = through
    async with serving(dsn) as client:
        assert (await post(client, id="msg_0")).status_code == 202
        monkeypatch.setattr(sessions, "ANSWER_S", 0.5)
        proxy.cut()
        for _ in range(2):
            response = await post(client)
            assert refused(response) == (503, "unavailable")
            assert response.headers["retry-after"] == "5"
        assert [message.levelname for message in caplog.records if message.name == "mailroom.webhooks"] == ["ERROR"]
        monkeypatch.setattr(sessions, "ANSWER_S", 60.0)
        proxy.restore()
        assert (await post(client)).status_code == 202
    assert len(sent(node)) == 2


async def test_commit_whose_answer_is_lost_is_repeated_without_doubling(node: Node, through: tuple[Proxy, str]) -> None:
    proxy, dsn = through
    async with serving(dsn) as client:
        proxy.at_next_commits(CommitFault.SWALLOW)
        assert refused(await post(client)) == (503, "unavailable")
        await eventually_async(lambda: len(sent(node)) == 1)
        assert (await post(client)).json() == {"id": str(sent(node)[0].id)}
    assert len(sent(node)) == 1


async def test_server_that_says_nothing_more_is_given_up(
    node: Node, through: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, dsn = through
    async with serving(dsn) as client:
        assert (await post(client, id="msg_0")).status_code == 202
        monkeypatch.setattr(sessions, "ANSWER_S", 0.5)
        proxy.black_hole()
        assert refused(await post(client)) == (503, "unavailable")
        proxy.forward()
        monkeypatch.setattr(sessions, "ANSWER_S", 60.0)
        assert (await post(client)).status_code == 202
        proxy.cut()  # else the pool may still open a session that it began through the hole, and waits at its end
    assert len(sent(node)) == 2


async def test_request_that_is_cancelled_in_the_middle_leaves_nothing(
    node: Node, client: httpx.AsyncClient, connect: Connect
) -> None:
    holder = connect()
    Outbox().send(holder, "order.paid", 0, once="msg_1")
    request = asyncio.ensure_future(post(client))
    [backend] = await eventually_async(lambda: node.sessions("mailroom bridge serve", "wait_event_type = 'Lock'"))
    assert wait_until_blocked(node.connection, backend) == [holder.info.backend_pid]
    request.cancel()
    await asyncio.wait([request])
    holder.rollback()
    assert sent(node) == []
    assert (await post(client)).status_code == 202


async def test_schema_that_is_missing_is_told_at_the_start_and_to_no_sender(
    empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(empty_dsn)
    async with client_of(app) as client:
        response = await post(client)
        assert refused(response) == (503, "unavailable")
        assert "migrate" not in response.text
    assert "mailroom migrate" in caplog.text
    assert (await lived(app))[0]["type"] == "lifespan.startup.failed"


async def test_database_that_comes_up_later_than_the_app_is_used_then(node: Node, through: tuple[Proxy, str]) -> None:
    proxy, dsn = through
    proxy.cut()
    async with serving(dsn) as client:
        assert refused(await post(client)) == (503, "unavailable")
        proxy.restore()
        assert (await post(client)).status_code == 202


async def test_right_that_is_missing_is_named_in_the_log(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with role(node.dsn, *rights("writer")) as (name, dsn):
        async with serving(dsn) as client:
            assert (await post(client)).status_code == 202  # a writer's role is enough
            node.connection.execute(f"REVOKE INSERT (id) ON mailroom.outbox_jdbc_id FROM {name}")
            response = await post(client, id="msg_2")
            assert refused(response) == (500, "unavailable")
            assert "outbox_jdbc_id" not in response.text
    assert "permission denied for table outbox_jdbc_id" in caplog.text


# -- Where it runs -----------------------------------------------------------------------------------------------------


async def lived(app: WebhookApp) -> list[Any]:
    events, answers = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        answers.append(event)

    await app({"type": "lifespan"}, receive, send)
    return answers


async def test_lifespan_of_a_server_opens_and_closes_the_sessions(node: Node) -> None:
    assert [event["type"] for event in await lived(app_of(node.dsn))] == [
        "lifespan.startup.complete", "lifespan.shutdown.complete"
    ]  # fmt: skip
    await eventually_async(lambda: node.sessions("mailroom bridge serve") == [])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mounted",
    [lambda app: Starlette(routes=[Mount("/hooks", app)]), lambda app: _fastapi(app)],
    ids=["starlette", "fastapi"],
)
async def test_app_is_mounted_with_a_prefix(node: Node, app: WebhookApp, mounted: Callable[[WebhookApp], Any]) -> None:
    async with client_of(mounted(app)) as client:
        assert (await post(client, path="/hooks/topics/order.paid?key=a")).status_code == 202
        assert refused(await post(client, path="/hooks/topics/order.lost"))[0] == 403
        assert refused(await post(client, path="/hooks/order.paid"))[0] == 404
        assert (await client.get("/hooks/healthz")).status_code == 200
    assert [message.key for message in sent(node)] == ["a"]


def _fastapi(app: WebhookApp) -> FastAPI:
    api = FastAPI()
    api.mount("/hooks", app)
    return api


@pytest.mark.parametrize("autocommit", [False, True])
async def test_pool_of_the_users_is_used_and_left_open(node: Node, autocommit: bool) -> None:
    async with AsyncExitStack() as stack:
        pool = AsyncConnectionPool(node.dsn, min_size=1, kwargs={"autocommit": autocommit}, open=False)
        await stack.enter_async_context(pool)
        async with serving(pool) as client:
            assert (await post(client)).status_code == 202
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")
    assert len(sent(node)) == 1


async def test_websocket_is_closed(app: WebhookApp) -> None:
    answers = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(event: Any) -> None:
        answers.append(event)

    await app({"type": "websocket", "path": "/topics/order.paid"}, receive, send)
    assert answers == [{"type": "websocket.close", "code": 1000}]


def test_app_that_cannot_be_right_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"secrets": ()}, "MR-webhook-secret-invalid"),
        ({"secrets": ["hunter2"]}, "MR-webhook-secret-invalid"),
        ({"secrets": {"order.paid": [SECRET]}}, "MR-webhook-secret-invalid"),
        ({"secrets": {"order.paid": [SECRET], "stripe.#": []}}, "MR-webhook-secret-invalid"),
        ({"secrets": {"order.lost": [SECRET]}}, "MR-invalid-argument"),
        ({"unsigned": True}, "MR-arguments-conflict"),
        ({"topics": []}, "MR-invalid-argument"),
        ({"topics": ["order.*.#"]}, "MR-invalid-topic"),
        ({"max_bytes": 0}, "MR-invalid-argument"),
        ({"max_bytes": 2**24 + 1}, "MR-invalid-argument"),
        ({"parallel": 0}, "MR-invalid-argument"),
        ({"schema": "No"}, "MR-invalid-name"),
        ({"source": 5}, "MR-unsupported-source"),
    ]
    for options, code in wrong:
        with pytest.raises(MailroomError) as raised:
            app_of(**{"source": "postgresql://localhost/shop", **options})
        assert raised.value.code == code, options
        assert "hunter2" not in str(raised.value)
