"""What the janitor sends: one message for each time, whichever process sends it, and even if one is refused."""

import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping import periodic
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.housekeeping.periodic import HELD_S, LOOK_INTERVAL_S, PeriodicSends, looking, sending_due
from dispatcher.lanes.leading import KEEPER
from mailroom import Topic, testing
from mailroom.session import settings
from mailroom.sql.runner import run
from mailroom.values import codec
from outbox import Periodic, PeriodicMessage
from outbox.periodic.schedule import MOST, message_id
from tests.sql.test_plans import generic_plan
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.waiting import end

PERIODIC = Periodic()
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)


@pytest.fixture
async def keeper(node: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    """The session of the housekeeping."""
    connection = await settings.connect_async(node.dsn, "keeper", KEEPER | {"lock_timeout": "1s"})
    async with connection:
        yield connection


def add(node: Node, name: str = "hourly", cron: str = "@hourly", **fields: Any) -> None:
    """Add one before noon."""
    with node.connection.transaction():
        message = PeriodicMessage(name, cron, fields.pop("topic", "report.due"), fields.pop("value", None), **fields)
        PERIODIC.add(node.connection, message, actor="test", now=NOON - SECOND)


def send(connection: psycopg.Connection[Any], now: datetime, **options: Any) -> int:
    """Send in the connection's transaction, and leave that open."""
    return run(connection, sending_due(SCHEMA, now=now, **options)).messages


def sent(node: Node) -> list[tuple[str, str]]:
    """Name and time of the messages in the outbox, in the order sent."""
    rows = node.rows("SELECT headers ->> 'periodic', headers ->> 'due' FROM mailroom.outbox ORDER BY position")
    return [(name, datetime.fromisoformat(due).strftime("%H:%M")) for name, due in rows]


# -- One message for each time -----------------------------------------------------------------------------------------


def test_message_has_its_id_its_time_and_all_that_was_given(node: Node) -> None:
    add(node, "nightly", "0 13 * * *", value={"all": True}, key="k", headers={"user": "ada"}, kind="E",
        time_zone="Europe/Paris", missed="skip")  # fmt: skip
    with node.connection.transaction():
        assert send(node.connection, NOON + SECOND) == 1
    [message] = testing.sent(node.connection, "report.due")
    [(own,)] = node.rows("SELECT id FROM mailroom.node")
    assert message.id == message_id(own, "nightly", NOON)
    assert (message.value, message.key, message.kind) == ({"all": True}, "k", "E")
    assert message.headers == {"user": "ada", "periodic": "nightly", "due": "2026-11-26T12:00:00+00:00"}
    [state] = PERIODIC.list(node.connection)
    assert (state.last_at, state.due_at, state.next_at) == (NOON, NOON + 24 * HOUR, NOON + 24 * HOUR)


def test_typed_message_is_of_its_version_and_each_has_a_key_of_its_own(node: Node) -> None:
    topic: Topic[dict[str, int]] = Topic("report.due", dict[str, int], version=3)
    with node.connection.transaction():
        declared = topic.periodic("typed", "@hourly", {"depth": 2}, missed="all")
        PERIODIC.add(node.connection, declared, actor="test", now=NOON - SECOND)
        send(node.connection, NOON + HOUR)
    first, second = testing.sent(node.connection, "report.due")
    assert (first.value, first.headers["schema"]) == ({"depth": 2}, "3")
    assert (first.key, second.key) == (str(first.id), str(second.id))


def test_row_that_one_session_sends_is_passed_over_by_another_one(node: Node, connect: Connect) -> None:
    add(node)
    first, second = connect(), connect()
    assert send(first, NOON) == 1
    assert send(second, NOON) == 0  # without waiting
    first.commit()
    assert send(second, NOON) == 0
    second.commit()
    assert send(first, NOON) == 0
    assert sent(node) == [("hourly", "12:00")]


def test_row_whose_sender_dies_is_sent_by_the_other_one(node: Node, connect: Connect) -> None:
    add(node)
    first, second = connect(), connect()
    assert send(first, NOON) == 1
    assert send(second, NOON) == 0
    first.rollback()
    second.rollback()
    assert send(second, NOON) == 1
    second.commit()
    assert sent(node) == [("hourly", "12:00")]


def test_dead_between_insert_and_update_is_as_if_nothing_had_been_sent(node: Node, connect: Connect) -> None:
    add(node)
    session = connect()
    operation = sending_due(SCHEMA, now=NOON)
    given: Any = None
    for statement in (periodic.TAKE, periodic.SEND):
        step = operation.send(given)
        assert step.statement == statement.at(schema=SCHEMA)  # type: ignore[union-attr]
        cursor = session.execute(*_plain(step))
        given = cursor.fetchall() if cursor.description else []
    assert session.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (1,)
    end(session, node.connection)
    operation.close()
    assert sent(node) == []
    with node.connection.transaction():
        assert send(node.connection, NOON) == 1
    assert sent(node) == [("hourly", "12:00")]


def _plain(step: Any) -> tuple[bytes, Any]:
    return step.statement.sql.encode(), step.values


def test_row_that_an_operator_changes_is_passed_over_until_that_is_done(node: Node, connect: Connect) -> None:
    add(node)
    operator, janitor = connect(), connect(autocommit=True)
    PERIODIC.pause(operator, "hourly", actor="ada")
    with janitor.transaction():
        assert send(janitor, NOON) == 0
    operator.rollback()
    with janitor.transaction():
        assert send(janitor, NOON) == 1


@pytest.mark.parametrize(
    ("missed", "found"),
    [("skip", ["15:00"]), ("once", ["15:00"]), ("all", ["12:00", "13:00", "14:00", "15:00"])],
)
def test_times_that_passed_while_nobody_ran(node: Node, missed: Any, found: list[str]) -> None:
    add(node, missed=missed)
    for _ in range(2):  # also for whoever comes next
        with node.connection.transaction():
            send(node.connection, NOON + 3 * HOUR + SECOND)
    assert [due for _, due in sent(node)] == found
    [state] = PERIODIC.list(node.connection)
    assert state.next_at == NOON + 4 * HOUR


def test_times_missed_long_ago_are_skipped_or_sent_in_portions(node: Node) -> None:
    add(node, "skipped", missed="skip")
    add(node, "sent", missed="all")
    now = NOON + 2 * MOST * HOUR - HOUR / 2
    counts = []
    for _ in range(4):
        with node.connection.transaction():
            done = run(node.connection, sending_due(SCHEMA, now=now))
            counts.append((done.messages, done.more))
    assert counts == [(MOST, True), (MOST, False), (0, False), (0, False)]
    skipped = next(each for each in PERIODIC.list(node.connection) if each.name == "skipped")
    assert (skipped.last_at, skipped.next_at) == (None, NOON + 2 * MOST * HOUR)


def test_delayed_one_is_sent_when_its_delay_has_passed_and_tells_its_time(node: Node) -> None:
    add(node, jitter_s=3_000)
    [state] = PERIODIC.list(node.connection)
    assert NOON < state.next_at < NOON + HOUR
    assert state.due_at == NOON
    with node.connection.transaction():
        assert send(node.connection, state.next_at - SECOND) == 0
        assert send(node.connection, state.next_at) == 1
    assert sent(node) == [("hourly", "12:00")]


def test_time_that_comes_again_has_its_id_again_and_stops_nobody(node: Node) -> None:
    """As after a restore of this row, or beside a message that was requeued from dead letters."""
    add(node)
    again = "UPDATE mailroom.periodic SET due_at = %s, next_at = %s"
    for _ in range(2):
        with node.connection.transaction():
            node.connection.execute(again, [NOON, NOON])
            assert send(node.connection, NOON) == 1
    assert sent(node) == [("hourly", "12:00")] * 2
    assert node.rows("SELECT count(DISTINCT message_id) FROM mailroom.outbox") == [(1,)]
    node.inbox("report", "report.due")
    node.allow_clocks()
    assert node.deliver().delivered == 2
    with node.connection.transaction():
        assert send(node.connection, NOON + HOUR) == 1


# -- The janitor -------------------------------------------------------------------------------------------------------


class Clocked:
    """Sends of a janitor whose own clock the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.sends = PeriodicSends(SCHEMA, lambda: self.now_s)


async def test_round_of_the_janitor_sends_what_is_due_by_the_database_s_clock(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    add(node, missed="once")
    add(node, "paused")
    with node.connection.transaction():
        PERIODIC.pause(node.connection, "paused", actor="ada")
    node.connection.execute("UPDATE mailroom.periodic SET due_at = date_trunc('hour', now()), next_at = now()")
    await Janitor(SCHEMA).run_once(keeper)
    assert [name for name, _ in sent(node)] == ["hourly"]


async def test_node_without_any_is_asked_once_a_second(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    looks: list[list[str]] = []

    def looked_before(schema: str, held: list[str], _: None) -> Any:
        looks.append(held)
        return looking(schema, held, long_ago - SECOND / 2)

    monkeypatch.setattr(periodic, "looking", looked_before)
    clocked = Clocked()
    for _ in range(10):
        assert not await clocked.sends.send_due(keeper)
        clocked.now_s += LOOK_INTERVAL_S / 4
    assert len(looks) == 3
    add(node)
    node.connection.execute("UPDATE mailroom.periodic SET due_at = %s, next_at = %s", [long_ago] * 2)
    clocked.now_s += LOOK_INTERVAL_S
    assert not await clocked.sends.send_due(keeper)
    monkeypatch.setattr(periodic, "looking", looking)
    assert not await clocked.sends.send_due(keeper)  # it knows when the next one is due
    assert sent(node) == []
    clocked.now_s += 0.5
    await clocked.sends.send_due(keeper)
    assert len(sent(node)) == 1


async def test_refused_message_stops_no_other_and_is_tried_again(
    node: Node, keeper: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "bad", "c", "misread"):
        add(node, name, topic="secret.topic" if name == "bad" else "report.due", value="secret")
    node.connection.execute("ALTER TABLE mailroom.outbox ADD CONSTRAINT no_secrets CHECK (topic <> 'secret.topic')")
    node.connection.execute("UPDATE mailroom.periodic SET cron = 'soon' WHERE name = 'misread'")
    clocked = Clocked()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await clocked.sends.send_due(keeper, NOON)
            clocked.now_s += HELD_S / 2
    assert sent(node) == [("a", "12:00"), ("c", "12:00")]
    states = {each.name: each for each in PERIODIC.list(node.connection)}
    assert states["bad"].last_error == "CheckViolation (23514) no_secrets outbox"
    assert "'soon'" in (states["misread"].last_error or "")
    assert (states["bad"].next_at, states["bad"].paused, states["a"].last_error) == (NOON, False, None)
    assert len(caplog.records) == 2  # once each, though it was tried twice
    assert "mailroom periodic list" in caplog.text
    assert "secret" not in caplog.text.replace("no_secrets", "")
    node.connection.execute("ALTER TABLE mailroom.outbox DROP CONSTRAINT no_secrets")
    clocked.now_s += HELD_S
    await clocked.sends.send_due(keeper, NOON)
    assert sent(node)[2:] == [("bad", "12:00")]
    assert {each.name: each.last_error is None for each in PERIODIC.list(node.connection)} == {
        "a": True, "bad": True, "c": True, "misread": False,
    }  # fmt: skip


@pytest.mark.slow
async def test_many_that_are_due_at_once_are_sent_in_one_round(node: Node, keeper: psycopg.AsyncConnection) -> None:
    with node.connection.transaction():
        declared = [PeriodicMessage(f"p{nth}", "@hourly", "report.due") for nth in range(150)]
        PERIODIC.sync(node.connection, declared, actor="test", now=NOON - SECOND)
    assert not await Clocked().sends.send_due(keeper, NOON)
    assert len(sent(node)) == 150


def test_deliver_all_sends_and_delivers_what_is_due(node: Node) -> None:
    node.inbox("report", "report.due")
    add(node)
    assert node.deliver_all(NOON).delivered == 1
    assert node.deliver_all(NOON).delivered == 0


@pytest.mark.parametrize("statement", [periodic.LOOK, periodic.TAKE], ids=["look", "take"])
def test_rows_that_are_not_due_are_not_read(node: Node, statement: Any) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.periodic (name, cron, time_zone, topic, kind, value, missed, jitter_s, due_at, next_at) "
        "SELECT concat('p', n), '@daily', 'UTC', 't', 'M', %s, 'skip', 0, now(), now() + n * interval '1 s' "
        "FROM generate_series(1, 5000) AS n",
        [codec.encode(None)],
    )
    node.connection.execute("ANALYZE mailroom.periodic")
    with node.connection.transaction(force_rollback=True):
        plan = generic_plan(node.connection, statement, {})
    [scan] = [each for each in plan if each.get("Relation Name") == "periodic"]
    assert (scan["Node Type"], scan["Index Name"]) == ("Index Scan", "periodic_next")


def test_headers_survive_as_they_are(node: Node) -> None:
    add(node, headers={"ünï": "çode", "due": "mine"})
    with node.connection.transaction():
        send(node.connection, NOON)
    [(headers,)] = node.rows("SELECT headers::text FROM mailroom.outbox")
    assert json.loads(headers) == {"ünï": "çode", "due": "2026-11-26T12:00:00+00:00", "periodic": "hourly"}
