"""The fixture `mail`: a test's messages from the send to the handler, and nothing left of them afterwards."""

import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from inbox import AsyncHandlers, Handlers, Inbox, Message, Parked, Unavailable
from mailroom import Topic, create_inbox, set_inbox
from mailroom.errors import ConfigurationError, InvalidMessage, SchemaError, UnknownInbox
from mailroom.testing.mail import AsyncMail, Mail, mailing
from outbox import AsyncOutbox, Outbox, Store
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import Node

pytestmark = [pytest.mark.inbox("warehouse", "stock.reserve", "order.#"), pytest.mark.inbox("billing")]

ROOT = Path(__file__).parents[2]
OUTBOX = Outbox()


@dataclass
class Reserve:
    item: str
    amount: int


@dataclass
class Reserved:
    shelf: int


reserve = Topic("stock.reserve", Reserve, replies=Reserved)
stock = Handlers()


@stock.on(reserve)
def take(message: Message[Reserve], connection: Any) -> Reserved:
    return Reserved(shelf=message.value.amount)


class Broken(Exception):
    """What a handler raises."""


def broken(message: Message, connection: Any) -> None:
    raise Broken("no shelf")


def ignore(message: Message, connection: Any) -> None:
    """Handle a message by doing nothing."""


@contextmanager
def mailed(connection: Any) -> Iterator[Mail]:
    with mailing(connection, "mailroom") as mail:
        assert isinstance(mail, Mail)
        yield mail


@pytest.fixture
def mail(node: Node, connect: Connect) -> Iterator[Mail]:
    with connect() as connection, mailed(connection) as mail:
        yield mail


EXAMPLE = """\
def test_a_reservation_is_answered(mail):
    outbox.command(mail.connection, reserve, Reserve("teapot", 1), reply_to="shop")
    mail.handle_all(warehouse=stock)
    assert mail.sent("shop")[0].headers["status"] == "200"
"""
SERVICE = """\
import pytest
from dataclasses import dataclass
from inbox import Handlers
from mailroom import Topic
from outbox import Outbox

@dataclass
class Reserve:
    item: str
    amount: int

reserve = Topic("stock.reserve", Reserve, replies=dict)
outbox, stock = Outbox(), Handlers()

@stock.on(reserve)
def take(message, connection):
    return {"shelf": 7}

"""


def run_pytest(directory: Path, dsn: str | None, source: str) -> subprocess.CompletedProcess[str]:
    """Run a test file as if this checkout were what is installed: with its entry point, whichever are there."""
    (directory / "test_service.py").write_text(source)
    info = directory / "entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry_points\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    lines = "".join(f"{name} = {module}\n" for name, module in points.items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAILROOM_", "PG", "PYTEST_"))
    }
    environment |= {"PYTHONPATH": f"{ROOT}:{directory}"} | ({} if dsn is None else {"MAILROOM_DSN": dsn})
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-q", str(directory)]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_example_of_the_plugin_runs_as_it_stands_twice_on_one_connection_and_leaves_nothing(
    node: Node, tmp_path: Path
) -> None:
    again = EXAMPLE.replace("answered", "answered_again")
    shared = "def test_nothing_is_left(mail):\n    assert mail.handle_all().handled == mail.sent('shop') == []\n"
    ran = run_pytest(tmp_path, node.dsn, f"{SERVICE}\n{EXAMPLE}\n{again}\n{shared}")
    assert (ran.returncode, ran.stdout.splitlines()[-1].split(" in ")[0]) == (0, "3 passed"), ran.stdout
    assert node.waiting() == []
    assert node.value("SELECT count(*) FROM mailroom.dead_letter") == 0  # where answers to nobody's inbox go


@pytest.mark.slow
def test_failure_of_a_handler_is_shown_below_the_test_that_fails_for_it(node: Node, tmp_path: Path) -> None:
    failing = SERVICE.replace('return {"shelf": 7}', 'raise RuntimeError("the shelf is gone")')
    ran = run_pytest(tmp_path, node.dsn, failing + EXAMPLE)
    assert ran.returncode == 1
    assert "RuntimeError: the shelf is gone" in ran.stdout
    assert "failed: retry after attempt 1" in ran.stdout


@pytest.mark.slow
def test_fixtures_are_overridden_by_the_user_s_own(node: Node, tmp_path: Path) -> None:
    own = """
@pytest.fixture
def mail_connection():
    from sqlalchemy import NullPool, create_engine
    import os
    engine = create_engine(os.environ["MAILROOM_DSN"].replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
    with engine.connect() as connection:
        yield connection

def test_own_connection(mail):
    assert type(mail.connection).__module__.startswith("sqlalchemy")

"""
    ran = run_pytest(tmp_path, node.dsn, SERVICE + own + EXAMPLE)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_test_that_takes_the_connection_alone_leaves_nothing_to_the_next(node: Node, tmp_path: Path) -> None:
    alone = "def test_alone(mail_connection):\n    outbox.send(mail_connection, 'warehouse', 1)\n"
    after = (
        "def test_after(mail):\n    assert mail.handle_all(warehouse=stock).failures == mail.sent('warehouse') == []\n"
    )
    ran = run_pytest(tmp_path, node.dsn, f"{SERVICE}\n{alone}\n{after}")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_async_fixture_gives_an_async_mail(node: Node, tmp_path: Path) -> None:
    own = """
import os, psycopg, pytest_asyncio
from inbox import AsyncHandlers
from outbox import AsyncOutbox

handlers = AsyncHandlers()

@handlers.on(reserve)
async def take(message, connection):
    return {"shelf": 7}

@pytest_asyncio.fixture
async def mail_connection():
    async with await psycopg.AsyncConnection.connect(os.environ["MAILROOM_DSN"]) as connection:
        yield connection
        await connection.rollback()

@pytest.mark.asyncio
async def test_a_reservation_is_answered(mail):
    await AsyncOutbox().command(mail.connection, reserve, Reserve("teapot", 1), reply_to="shop")
    await mail.handle_all(warehouse=handlers)
    assert (await mail.sent("shop"))[0].headers["status"] == "200"
"""
    ran = run_pytest(tmp_path, node.dsn, SERVICE + own)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_plugin_without_a_database_says_what_to_do(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, None, SERVICE + EXAMPLE)
    assert ran.returncode == 1
    assert "set MAILROOM_DSN" in ran.stdout
    assert "override the fixture mail_connection in conftest.py" in ran.stdout


def test_plugin_costs_nobody_an_import_who_does_not_ask_for_mail() -> None:
    heavy = "sorted({'psycopg', 'sqlalchemy', 'dispatcher', 'inbox', 'outbox'} & set(sys.modules))"
    code = f"import sys, mailroom.testing.plugin; print({heavy})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_command_is_handled_and_answered_on_any_connection_and_nothing_is_left(node: Node, kind: str) -> None:
    with opened(node.dsn, kind) as connection:
        with mailed(connection) as mail:
            OUTBOX.command(mail.connection, reserve, Reserve("teapot", 3), reply_to="shop")
            [handled] = mail.handle_all(warehouse=stock).handled
            assert handled.topic == "stock.reserve"
            [answer] = mail.sent("shop")
            assert (answer.kind, answer.value, answer.headers["status"]) == ("R", {"shelf": 3}, "200")
        with mailed(connection) as mail:
            assert mail.sent("shop") == mail.sent("warehouse") == []
    assert node.waiting() == []
    assert node.value("SELECT count(*) FROM mailroom.dead_letter") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_async_mail_does_the_same(node: Node, kind: str) -> None:
    handlers = AsyncHandlers()

    @handlers.on(reserve)
    async def take(message: Message[Reserve], connection: Any) -> Reserved:
        await AsyncOutbox().publish(connection, "stock.taken", None)
        return Reserved(shelf=message.value.amount)

    async with opened_async(node.dsn, kind) as connection:
        with mailing(connection, "mailroom") as mail:
            assert isinstance(mail, AsyncMail)
            await AsyncOutbox().command(mail.connection, reserve, Reserve("teapot", 3), reply_to="shop")
            assert len((await mail.handle_all(warehouse=handlers)).handled) == 1
            assert [sent.value for sent in await mail.sent("shop")] == [{"shelf": 3}]
            assert [sent.kind for sent in await mail.sent("stock.taken")] == ["E"]
            later = datetime.now(UTC) + timedelta(hours=1)
            await AsyncOutbox().send(mail.connection, "warehouse", 1, deliver_at=later)
            assert (await mail.handle_all(warehouse=handlers)).failures == []
            mail.travel(3_700)
            [failure] = (await mail.handle_all(warehouse=handlers)).failures
            assert failure.outcome == "park"
            await AsyncOutbox().send(mail.connection, "warehouse", 1)
            with pytest.raises(ConfigurationError, match=r"is not async: use `mail\.handle_all"):
                await mail.handle_all(warehouse=ignore)  # type: ignore[arg-type]
        await connection.rollback()


def test_sent_has_what_was_delivered_handled_dropped_or_waits_in_the_order_sent(mail: Mail) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    OUTBOX.send(mail.connection, "warehouse", 1)
    OUTBOX.send(mail.connection, "order.paid", 2, deliver_at=later)
    OUTBOX.publish(mail.connection, "nobody.cares", 3)
    OUTBOX.send(mail.connection, "no.inbox", 4)
    OUTBOX.publish(mail.connection, "warehouse", 5)  # nobody subscribes to it
    mail.handle_all(warehouse=ignore)
    OUTBOX.command(mail.connection, reserve, Reserve("cup", 6))
    OUTBOX.reply(mail.connection, _request(mail), 7)

    def values(name: Topic[Any, Any] | str) -> list[object]:
        return [sent.value for sent in mail.sent(name)]

    for _ in range(2):
        assert values("warehouse") == [1, 2, 5, {"item": "cup", "amount": 6}]
        assert (values("nobody.cares"), values("no.inbox"), values("order.paid")) == ([3], [4], [2])
        assert values(reserve) == [{"item": "cup", "amount": 6}]
        assert values("order.reply") == [7]  # replies go past patterns, so this is none of the warehouse's
        mail.travel(timedelta(hours=2))
        mail.handle_all(warehouse=ignore)


def _request(mail: Mail) -> Message:
    OUTBOX.command(mail.connection, "billing", None, reply_to="order.reply")
    found: list[Message] = []
    mail.handle_all(billing=lambda message, _: found.append(message))
    return found[0]


def test_sent_has_nothing_that_a_failed_handler_sent(mail: Mail) -> None:
    def fails(message: Message, connection: Any) -> None:
        OUTBOX.send(connection, "billing", 1)
        raise Broken

    OUTBOX.send(mail.connection, "warehouse", 1)
    assert len(mail.handle_all(warehouse=fails).failures) == 1
    assert mail.sent("billing") == []


def test_sent_refuses_what_no_topic_can_be(mail: Mail) -> None:
    with pytest.raises(InvalidMessage):
        mail.sent("no such topic")


def test_handle_all_goes_on_between_inboxes_until_nothing_is_left(mail: Mail) -> None:
    def ping(message: Message, connection: Any) -> None:
        if message.value:
            OUTBOX.send(connection, "billing", message.value - 1)

    def pong(message: Message, connection: Any) -> None:
        OUTBOX.send(connection, "warehouse", message.value)

    OUTBOX.send(mail.connection, "warehouse", 3)
    worked = mail.handle_all(billing=pong, warehouse=ping)
    assert [(message.topic, message.value) for message in worked.handled] == [
        ("warehouse", 3), ("billing", 2), ("warehouse", 2), ("billing", 1), ("warehouse", 1), ("billing", 0),
        ("warehouse", 0),
    ]  # fmt: skip


def test_handle_all_applies_executables_and_delivers_their_outcome(mail: Mail) -> None:
    Store().increment(mail.connection, "teapots", 7, notify="billing")
    [told] = mail.handle_all(billing=ignore).handled
    assert told.value["number"] == 7
    assert Store().get(mail.connection, "teapots") == 7
    assert len(mail.sent("billing")) == 1


def test_failed_message_waits_is_tried_when_its_time_has_come_and_is_parked(
    mail: Mail, caplog: pytest.LogCaptureFixture
) -> None:
    set_inbox(mail.connection, "warehouse", max_attempts=3, backoff_s=7_200, backoff_max_s=7_200)
    OUTBOX.send(mail.connection, "warehouse", 1, key="k")
    seen = []
    for seconds in (0, 1, 10_000, 1, 10_000, 10_000):
        mail.travel(seconds)
        with caplog.at_level(logging.WARNING, "mailroom.mail"):
            seen.append([(failure.outcome, failure.attempt) for failure in mail.handle_all(warehouse=broken).failures])
    assert seen == [[("retry", 1)], [], [("retry", 2)], [], [("park", 3)], []]
    assert [parked.key for parked in Parked("warehouse").keys(mail.connection)] == ["k"]
    assert "Broken: no shelf" in caplog.text


def test_travel_lets_messages_expire(mail: Mail) -> None:
    now = datetime.now(UTC)
    OUTBOX.send(mail.connection, "warehouse", 1, expires_at=now + timedelta(hours=1))
    OUTBOX.send(mail.connection, "warehouse", 2, expires_at=now + timedelta(hours=3))
    mail.travel(7_200)
    assert [message.value for message in mail.handle_all(warehouse=ignore).handled] == [2]
    assert len(mail.sent("warehouse")) == 2


def test_time_does_not_go_back(mail: Mail) -> None:
    for by in (-1, timedelta(seconds=-1)):
        with pytest.raises(ConfigurationError, match="not negative"):
            mail.travel(by)


def test_unavailable_pauses_its_own_inbox_only(mail: Mail) -> None:
    def unavailable(message: Message, connection: Any) -> None:
        raise Unavailable("no answer", after_s=30)

    for _ in range(3):
        OUTBOX.send(mail.connection, "warehouse", 1)
        OUTBOX.send(mail.connection, "billing", 1)
    worked = mail.handle_all(warehouse=unavailable, billing=ignore)
    assert [(failure.outcome, failure.attempt) for failure in worked.failures] == [("retry", 0)]
    assert len(worked.handled) == 3
    assert Inbox("warehouse").backlog(mail.connection) == 3


def test_unknown_inbox_is_one_error_that_says_what_to_do(mail: Mail) -> None:
    with pytest.raises(UnknownInbox) as raised:
        mail.handle_all(warehuose=stock)
    assert "mailroom inbox create warehuose --subscribe TOPIC; or for this test" in str(raised.value)
    create_inbox(mail.connection, "warehuose")
    mail.handle_all(warehuose=stock)


def test_unmigrated_database_is_one_error_that_says_what_to_do(empty_dsn: str) -> None:
    with (
        psycopg.connect(empty_dsn) as connection,
        mailed(connection) as mail,
        pytest.raises(SchemaError, match="Run: mailroom migrate"),
    ):
        mail.handle_all(warehouse=stock)


def test_wrong_handlers_are_refused(mail: Mail) -> None:
    async def handle(message: Message, connection: Any) -> None:
        raise AssertionError

    with pytest.raises(
        ConfigurationError, match=r"async: use `await mail\.handle_all\(\.\.\.\)`, with an async connection"
    ):
        mail.handle_all(warehouse=handle)
    with pytest.raises(ConfigurationError, match="inbox warehouse cannot be called"):
        mail.handle_all(warehouse="stock")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="answer in schema tenant"):
        mail.handle_all(warehouse=Handlers(schema="tenant"))


def test_commit_in_a_test_is_refused_on_psycopg(mail: Mail) -> None:
    OUTBOX.send(mail.connection, "warehouse", 1)
    with pytest.raises(psycopg.ProgrammingError, match="commit"):
        mail.connection.commit()  # type: ignore[union-attr]


def test_autocommit_connection_is_rolled_back_too(node: Node, connect: Connect) -> None:
    with connect(autocommit=True) as connection:
        with mailed(connection) as mail:
            OUTBOX.send(mail.connection, "warehouse", 1)
            assert len(mail.handle_all(warehouse=ignore).handled) == 1
            OUTBOX.send(mail.connection, "warehouse", 2)
        assert node.waiting() == []
