"""The example services on FastAPI and Django: what they send commits with their data, before the response goes out."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psycopg
import pytest
from django.test import Client, override_settings
from fastapi import FastAPI
from sqlalchemy.orm import Session

from examples import django_shop, fastapi_shop
from inbox import Handlers, Inbox, Message, Reject
from mailroom import drop_inbox, testing
from mailroom.errors import UnknownInbox
from mailroom.testing.mail import Mail, mailing
from tests.support.django import connected
from tests.support.node import Node
from tests.support.waiting import eventually_async

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


pytestmark = [
    pytest.mark.inbox("shop"),
    pytest.mark.inbox("warehouse", "stock.reserve"),
    pytest.mark.inbox("shipping", "order.paid"),
]


@pytest.fixture
def app(node: Node) -> Iterator[FastAPI]:
    app = fastapi_shop.create_app(node.dsn)
    fastapi_shop.Base.metadata.create_all(app.state.engine)
    yield app
    app.state.engine.dispose()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


async def ask(client: httpx.AsyncClient, amount: object = 2, **headers: str) -> httpx.Response:
    return await client.post("/orders", json={"item": "teapot", "amount": amount}, headers=headers)


async def test_order_commits_with_its_command_and_goes_on_when_answered(node: Node, client: httpx.AsyncClient) -> None:
    stock = Handlers()

    @stock.on(fastapi_shop.reserve)
    def take(message: Message[fastapi_shop.Reserve], connection: Any) -> dict[str, int]:
        if message.value.amount > 10:
            raise Reject("out of stock")
        return {"shelf": 7}

    assert (await ask(client)).json() == {"id": 1, "state": "new"}
    assert (await ask(client, 11)).status_code == 202
    assert (await ask(client, "many")).status_code == 422
    with psycopg.connect(node.dsn) as connection:
        testing.handle_all(connection, "warehouse", stock)
        testing.handle_all(connection, "shop", fastapi_shop.shop)
    found = [await client.get(f"/orders/{id}") for id in (1, 2, 3)]
    assert [response.json().get("state") for response in found] == ["reserved", "refused", None]
    assert found[2].status_code == 404


async def test_worker_runs_with_the_service_and_probe_and_log_tell_of_its_failure(
    node: Node, app: FastAPI, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    stock = Handlers()
    stock.on(fastapi_shop.reserve)(lambda message, connection: {"shelf": 7})

    async def told() -> tuple[int, object]:
        response = await client.get("/health")
        return response.status_code, response.json()["worker"]

    async def serve() -> None:
        async with fastapi_shop.lifespan(app):
            await eventually_async(lambda: app.state.worker.healthy)
            assert await told() == (200, "ok")
            await ask(client)
            with psycopg.connect(node.dsn) as connection:
                testing.handle_all(connection, "warehouse", stock)
                testing.deliver(connection)
            await eventually_async(lambda: node.rows("SELECT state FROM shop_order") == [("reserved",)])
            with node.connection.transaction():
                drop_inbox(node.connection, "shop", actor="ada")
            await eventually_async(lambda: not app.state.worker.healthy)
            assert await told() == (503, "UnknownInbox")

    assert await told() == (503, "not started")
    with pytest.raises(UnknownInbox):
        await serve()
    [ended] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (ended.name, ended.getMessage()[:44]) == ("mailroom.worker", "shop: the worker has ended: There is no inbo")


async def test_response_of_an_order_whose_commit_fails_is_no_success(node: Node, client: httpx.AsyncClient) -> None:
    node.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$;"
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON shop_order DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    assert (await ask(client)).status_code == 500
    assert node.waiting() == []


async def test_trace_of_a_caller_goes_onto_what_its_request_sends(node: Node, client: httpx.AsyncClient) -> None:
    for headers in ({"traceparent": TRACE}, {}, {"traceparent": "x" * 9_000}):
        assert (await ask(client, **headers)).status_code == 202
    with psycopg.connect(node.dsn) as connection:
        sent = testing.sent(connection, "stock.reserve")
    assert [message.headers.get("traceparent") for message in sent] == [TRACE, None, None]


async def test_service_is_tested_on_the_connection_of_mail(node: Node, app: FastAPI, client: httpx.AsyncClient) -> None:
    with Session(app.state.engine) as session, mailing(session, "mailroom") as mail:
        assert isinstance(mail, Mail)
        app.dependency_overrides[fastapi_shop.session] = lambda: session
        assert (await ask(client)).status_code == 202
        [command] = mail.sent(fastapi_shop.reserve)
        assert (command.value, command.headers) == ({"item": "teapot", "amount": 2}, {"reply_to": "shop"})
    assert node.value("SELECT count(*) FROM shop_order") == 0


@pytest.fixture
def django_database(node: Node) -> Iterator[None]:
    with connected(node.dsn) as connection:
        with connection.schema_editor() as editor:
            editor.create_model(django_shop.Order)
        yield


def pay(order: int) -> int:
    with override_settings(ROOT_URLCONF="examples.django_shop", ALLOWED_HOSTS=["*"]):
        status: int = Client(raise_request_exception=False).post(f"/orders/{order}/pay").status_code
    return status


@pytest.mark.usefixtures("django_database")
def test_django_s_order_commits_with_its_message_and_is_shipped_by_the_orm(node: Node) -> None:
    assert [pay(order) for order in (1, 2, 1)] == [201, 201, 500]
    assert len(node.waiting()) == 2
    node.deliver_all()
    assert django_shop.ship_waiting() == 2
    assert set(django_shop.Order.objects.values_list("state", flat=True)) == {"shipped"}
    assert django_shop.ship_waiting() == 0


@pytest.mark.usefixtures("django_database")
def test_django_s_messages_stay_if_the_batch_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pay(1) == 201
    node.deliver_all()
    with monkeypatch.context() as patch:
        patch.setattr(django_shop, "ship", lambda message: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            django_shop.ship_waiting()
    assert Inbox("shipping").backlog(node.connection) == 1
    assert django_shop.ship_waiting() == 1
