"""Logs: how they are made, what gets into them, and what goes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.delivery.deliverer import Deliverer
from dispatcher.housekeeping.janitor import Janitor
from inbox import Inbox
from mailroom import create_inbox, create_log, drop_inbox, drop_log, events, rename_inbox, set_inbox, set_log, subscribe
from mailroom.cli.commands.trace import described
from mailroom.errors import ConfigurationError, ConnectionFailed, MailroomError, SchemaError
from mailroom.logs.segments import (
    dropping_segment,
    emptying,
    listing_old_logs,
    listing_over,
    making_segment,
    sweeping_receipts,
    sweeping_ticks,
)
from mailroom.node.status import status
from mailroom.node.trace import trace
from mailroom.registry.logs import listing_logs
from mailroom.sql.operation import Execute, Operation
from mailroom.sql.runner import run
from mailroom.testing.emptying import empty
from mailroom.testing.mail import Mail
from outbox import Outbox
from tests.logs.support import DAY, NOW, Reader, days, keys_of, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.roles import rights, role
from tests.support.waiting import wait_until_blocked


def test_create_set_and_drop_are_audited_and_harmless_when_repeated(node: Node) -> None:
    with node.connection.transaction():
        for _ in range(2):
            create_log(node.connection, "orders", ["order.#"], keep_days=3, lanes=8, actor="me")
            create_inbox(node.connection, "billing", log="orders", actor="me")
        create_log(node.connection, "orders", ["refund"], actor="me")
        assert set_log(node.connection, "orders", keep_days=4, unsubscribe=["refund"], actor="me") == (
            "keep_days 3 -> 4, no longer to refund"
        )
        assert set_log(node.connection, "orders", keep_days=4, actor="me") == ""
    [log] = run(node.connection, listing_logs(SCHEMA))
    assert (log.name, log.lanes, log.keep_days, log.topics, log.readers) == ("orders", 8, 4, ("order.#",), ("billing",))
    with node.connection.transaction():
        drop_inbox(node.connection, "billing", actor="me")
        drop_log(node.connection, "orders", actor="me")
    assert node.rows("SELECT action, change FROM mailroom.audit ORDER BY id") == [
        ("log create", "keeps 3 days, 8 lanes, subscribed to order.#"),
        ("inbox create", "order log, reads log orders since now"),
        ("log set", "subscribed to refund"),
        ("log set", "keep_days 3 -> 4, no longer to refund"),
        ("inbox drop", None),
        ("log drop", None),
    ]
    left = "SELECT relname::text FROM pg_class WHERE relname ~ '^(log|lanes|receipts)_' AND relkind IN ('r', 'p')"
    assert {name for (name,) in node.rows(left)} == {
        *("log_registry", "log_segment", "log_tick", "log_topic", "log_lane", "log_receipt"),
    }


def test_what_no_log_or_reader_can_be_is_refused(node: Node) -> None:
    node.inbox("shipping")
    make(node, "billing")
    refusals: dict[str, Callable[[], object]] = {
        "MR-log-name-taken": lambda: create_log(node.connection, "shipping"),
        "MR-log-set-otherwise": lambda: create_log(node.connection, "orders", lanes=5),
        "MR-inbox-name-is-a-log": lambda: create_inbox(node.connection, "orders"),
        "MR-unknown-log": lambda: create_inbox(node.connection, "search", log="nowhere"),
        "MR-log-inbox-setting": lambda: set_inbox(node.connection, "billing", expire_s=60),
        "MR-log-inbox-subscribes": lambda: subscribe(node.connection, "billing", "order.paid"),
        "MR-inbox-order-fixed": lambda: create_inbox(node.connection, "shipping", log="orders"),
        "MR-log-in-use": lambda: drop_log(node.connection, "orders", actor="me"),
        "MR-inbox-reads-no-log": lambda: Inbox("shipping").rewind(node.connection, "start", actor="me"),
        "MR-invalid-argument": lambda: Inbox("billing").rewind(node.connection, "yesterday", actor="me"),
    }
    for code, refused in refusals.items():
        with pytest.raises((ConfigurationError, SchemaError)) as raised, node.connection.transaction():
            refused()
        assert raised.value.code == code
        if code == "MR-log-set-otherwise":
            assert "never change" in str(raised.value)
    settings: tuple[dict[str, Any], ...] = (
        {"order": "key"},
        {"since": "yesterday"},
        {"subscribe": ["order.paid"]},
        {"keep_reaped_days": 1},
    )
    for given in settings:
        with pytest.raises(ConfigurationError), node.connection.transaction():
            create_inbox(node.connection, "late", log="orders", **given)


def test_messages_and_events_enter_and_commands_do_not(node: Node) -> None:
    node.inbox("shipping", "order.paid")
    make(node, "billing")
    for kind in ("M", "E", "C"):
        node.send("order.paid", key=kind, kind=kind)
        node.send("order.failed", key=kind, kind=kind)
    node.send("billing", key="to its name")
    totals = node.deliver_all()
    assert (totals.taken, totals.delivered) == (7, 7)
    assert node.rows("SELECT key, topic, clock = sent_clock FROM mailroom.log ORDER BY clock") == [
        ("M", "order.paid", True), ("M", "order.failed", True), ("E", "order.paid", True), ("E", "order.failed", True),
    ]  # fmt: skip
    assert node.delivered("inbox, key") == [("shipping", key) for key in "MEC"]
    assert [key for key, _, _ in node.dead()] == ["C", "to its name"]
    sent = node.value("SELECT message_id FROM mailroom.log ORDER BY clock LIMIT 1")
    places = trace(node.connection, sent)
    assert sorted((place.where, place.inbox, place.clock) for place in places) == [
        ("inbox", "shipping", 1), ("log", "orders", 1),
    ]  # fmt: skip
    assert described(places[-1]).startswith("is in log orders with clock 1 since ")


@pytest.mark.parametrize("rows", [1, 50])
def test_each_delivery_leaves_a_tick_and_tells_readers(node: Node, connect: Connect, rows: int) -> None:
    make(node, "billing", "search", lanes=3)
    for n in range(rows):
        node.send("order.paid", key=str(n))
    node.deliver_all()
    reader = connect(autocommit=True)
    reader.execute(
        "SELECT pg_advisory_lock_shared(1835100527, ('mailroom.log_orders'::regclass::oid::bigint - 2147483648)::int)"
    )
    for n in range(rows):
        node.send("order.paid", key=str(n))
    with node.connection.transaction():
        node.connection.execute("SELECT")

    async def delivering() -> tuple[int, int]:
        connection = await psycopg.AsyncConnection.connect(node.dsn, autocommit=True)
        async with connection:
            deliverer = Deliverer(connection, SCHEMA)
            first = await deliverer.deliver()
            for n in range(rows):
                await asyncio.to_thread(node.send, "order.paid", key=str(n))
            return first.woken, (await deliverer.deliver()).woken

    assert asyncio.run(delivering()) == (1, 1)  # by the full text, and then by the plain one for logs
    ticks = node.rows("SELECT clock, lanes, rows FROM mailroom.log_tick ORDER BY clock")
    assert sum(count for _, _, count in ticks) == 3 * rows
    for clock, lanes, count in ticks:
        found = (
            "SELECT array_agg(DISTINCT lane ORDER BY lane), count(*) FROM mailroom.log WHERE clock <= %s AND clock > %s"
        )
        assert node.rows(found, clock, clock - count) == [(lanes, count)]


def test_lanes_are_the_same_for_ever(node: Node) -> None:
    """Of each key, whatever the server's version: what stands in a log is found by it."""
    found = node.rows("SELECT k, mailroom.lane_of(k, 64) FROM unnest(%s::text[]) AS k", ["", "a", "käse", "order-42"])
    assert found == [("", 48), ("a", 23), ("käse", 51), ("order-42", 56)]


# -- Where an inbox begins, and goes back to --------------------------------------------------------------------------


def test_an_inbox_begins_now_at_the_start_or_at_a_time(node: Node, connect: Connect) -> None:
    make(node)
    clocks = days(node, 12)  # more segments than one claim reads
    for name, since, left in (
        ("now", "now", []),
        ("start", "start", clocks),
        ("exact", NOW + 4 * DAY, clocks[4:]),
        ("between", NOW + 3.5 * DAY, clocks[4:]),
        ("future", NOW + 50 * DAY, []),
        ("past", NOW - 50 * DAY, clocks),
    ):
        with node.connection.transaction():
            create_inbox(node.connection, name, log="orders", since=since)
        reader = Reader(connect(), name)
        taken = []
        for _ in range(9):
            taken += [each.clock for each in reader.take()]
        assert taken == left, name
    write(node, ["a"])
    assert keys_of(reader.take_all()) == ["a"]


def test_an_inbox_is_set_back_and_reads_again(node: Node, connect: Connect) -> None:
    make(node, "billing", backoff_s=60, max_attempts=1)
    clocks = days(node, 4)
    reader = Reader(connect(), "billing")
    assert [each.clock for each in reader.take_all()] == clocks
    write(node, ["x", "b"])
    claimed = reader.claim().messages
    reader.fail(next(each for each in claimed if each.key == "x"), node.connection)
    assert keys_of(reader.take_all()) == ["b"]
    assert reader.claim(due=True).ended
    reader.connection.commit()
    node.deliver_all()
    assert node.rows("SELECT key FROM mailroom.parked") == [("x",)]
    with node.connection.transaction():
        found = Inbox("billing").rewind(node.connection, NOW + 2 * DAY, actor="me", why="anew")
    assert (found.clock, found.is_short) == (clocks[1], False)
    again = reader.take_all()
    assert [each.clock for each in again if each.key == "a"] == clocks[2:]
    assert sorted(keys_of(again)) == ["a", "a", "b"]  # x stays parked
    node.deliver_all()
    assert node.rows("SELECT key FROM mailroom.parked") == [("x",)]
    with node.connection.transaction():
        assert Inbox("billing").rewind(node.connection, clocks[3], actor="me").clock == clocks[3] - 1
    assert sorted(keys_of(reader.take_all())) == ["a", "b"]
    write(node, ["z"])
    with node.connection.transaction():  # never forward
        assert Inbox("billing").rewind(node.connection, NOW + 50 * DAY, actor="me").clock > clocks[3]
    assert keys_of(reader.take_all()) == ["z"]
    assert node.rows("SELECT change, reason FROM mailroom.audit WHERE action = 'inbox rewind' ORDER BY id")[0] == (
        f"in log orders after clock {clocks[1]}", "anew",
    )  # fmt: skip


def test_a_rewind_waits_for_batches_in_hand(node: Node, connect: Connect) -> None:
    make(node, "billing")
    write(node, ["a", "b"])
    reader, operator = Reader(connect(), "billing"), connect()
    reader.claim()
    operator.execute("SET lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        Inbox("billing").rewind(operator, "start", actor="me")
    operator.rollback()
    reader.connection.commit()
    Inbox("billing").rewind(operator, "start", actor="me")
    assert reader.take() == []
    operator.commit()
    assert sorted(keys_of(reader.take_all())) == ["a", "b"]


# -- Segments ---------------------------------------------------------------------------------------------------------


def turned(node: Node, now: datetime) -> dict[int, list[str]]:
    """Empty and drop segments as the janitor does; return which inboxes held those that are over, or lost them."""
    held = {}
    for over in run(node.connection, listing_over(SCHEMA, now)):
        with node.connection.transaction():
            if over.is_empty:
                run(node.connection, dropping_segment(SCHEMA, over, now))
            else:
                found = run(node.connection, emptying(SCHEMA, over, now))
                held[over.segment] = [*found.holders, *(inbox for inbox, _ in found.lost)]
                assert found.is_emptied == (not found.holders)
    return held


def segments(node: Node) -> list[int]:
    return [number for (number,) in node.rows("SELECT segment FROM mailroom.log_segment ORDER BY segment")]


def test_segments_go_when_their_days_are_over_and_every_inbox_has_passed_them(node: Node, connect: Connect) -> None:
    make(node, "billing", "search", lanes=2)
    clocks = days(node, 10)
    now = NOW + 10 * DAY
    assert turned(node, now) == {number: ["billing", "search"] for number in (1, 2, 3)}
    with node.connection.transaction():
        set_log(node.connection, "orders", keep_days=5)
    assert turned(node, now) == {number: ["billing", "search"] for number in range(1, 6)}
    for name in ("billing", "search"):
        assert len(Reader(connect(), name).take_all()) == len(clocks)
    assert turned(node, now) == {number: [] for number in range(1, 6)}
    assert turned(node, now) == {}
    assert len(segments(node)) == 11
    assert turned(node, now + timedelta(minutes=2)) == {}
    assert segments(node) == list(range(6, 12))
    assert run(node.connection, sweeping_ticks(SCHEMA)) == 5
    assert run(node.connection, sweeping_receipts(SCHEMA, "billing")) > 0
    with node.connection.transaction():
        found = Inbox("billing").rewind(node.connection, NOW, actor="me")
    assert found.is_short
    assert [each.clock for each in Reader(connect(), "billing").take_all()] == clocks[5:]


def test_segments_go_in_their_order(node: Node, connect: Connect) -> None:
    """What is set back, or read by Spark, since the oldest message finds all that came after it."""
    make(node, "billing", lanes=1)
    days(node, 4)
    node.connection.execute("DELETE FROM mailroom.log WHERE segment = 2")  # as if its lane had nothing there
    [over, later] = run(node.connection, listing_over(SCHEMA, NOW + 9 * DAY))
    empty = "SELECT count(*) FROM mailroom.log_segment WHERE emptied_at IS NOT NULL"
    for each, count in ((later, 0), (over, 1), (later, 2)):
        with node.connection.transaction():
            run(node.connection, emptying(SCHEMA, each, NOW))
        assert node.value(empty) == count
        Reader(connect(), "billing").take_all()


LOST = "SELECT name, lost, lost_to, lost_since, lost_at FROM mailroom.inbox_registry ORDER BY name"


def test_a_log_that_drops_what_is_unread_waits_for_nobody_and_what_is_lost_is_told(
    node: Node, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    make(node, "billing", "search")
    clocks = days(node, 10, keys="aba")
    assert len(Reader(connect(), "search").take_all()) == 30
    late = Reader(connect(), "billing")
    assert len(late.take(1)) == 1
    with node.connection.transaction():
        set_log(node.connection, "orders", drop_unread=True)
    now = NOW + 30 * DAY
    assert turned(node, NOW + 9 * DAY) == {1: ["billing"], 2: ["billing"]}
    assert turned(node, now)[3] == ["billing"]
    [billing, search] = node.rows(LOST)
    assert billing == ("billing", 29, clocks[9], NOW + 9 * DAY, now)
    assert search == ("search", 0, 0, None, None)
    write(node, ["a"])
    again = Reader(connect(), "billing")
    for reader in (late, again):
        write(node, ["a"])
        reader.take_all()
    [told, _] = [each for each in caplog.messages if "inbox billing" in each]
    assert told.startswith("inbox billing: log orders has dropped 29 messages that were not read, since 2026-12-08")
    write(node, ["a"])
    assert keys_of(late.take_all()) == ["a"]
    assert len([each for each in caplog.messages if "inbox billing" in each]) == 2  # each program once


def beside(operation: Operation[Any], at: str, does: Callable[[], object]) -> Operation[Any]:
    """The operation; something else happens before its statement in whose text `at` is."""
    answer: Any = None
    while True:
        try:
            step = operation.send(answer)
        except StopIteration as ended:
            return ended.value
        if isinstance(step, Execute) and at in step.statement.sql:
            does()
        answer = yield step


def test_what_is_read_while_it_is_counted_is_not_lost(node: Node, connect: Connect) -> None:
    make(node, "billing")
    days(node, 1, keys="abc")
    with node.connection.transaction():
        set_log(node.connection, "orders", drop_unread=True)
    [over], reader = run(node.connection, listing_over(SCHEMA, NOW + 10 * DAY)), Reader(connect(), "billing")
    reads = beside(emptying(SCHEMA, over, NOW + 10 * DAY), "lock_log_segment", lambda: reader.take(2))
    with role(node.dsn, *rights("dispatcher", "billing")) as (_, dsn), psycopg.connect(dsn) as janitor:
        read = 3 - run(janitor, reads).lost[0][1]
    assert (read, node.rows(LOST)[0][1]) == (2, 1)


def test_a_full_disk_loses_nothing_and_room_can_be_made(node: Node, connect: Connect) -> None:
    node.inbox("shipping", "order.paid")
    make(node, "billing")
    clocks = days(node, 2)
    node.connection.execute(
        "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'no space left on device' USING ERRCODE = 'disk_full'; END $$; "
        "CREATE TRIGGER no_room BEFORE INSERT ON mailroom.log_3 FOR EACH STATEMENT EXECUTE FUNCTION no_room(); "
        "CREATE TRIGGER no_room_row BEFORE INSERT ON mailroom.log_3 FOR EACH ROW EXECUTE FUNCTION no_room()"
    )
    with pytest.raises(ConnectionFailed, match="no space left"):
        write(node, "bc")
    assert node.rows("SELECT count(*) FROM mailroom.outbox") == [(2,)]
    reader = Reader(connect(), "billing")
    assert [each.clock for each in reader.take_all()] == clocks
    assert turned(node, NOW + 20 * DAY) == {1: [], 2: []}
    node.connection.execute("DROP FUNCTION no_room CASCADE")
    node.deliver_all()
    assert sorted(keys_of(reader.take_all())) == ["b", "c"]
    assert node.rows("SELECT key FROM mailroom.inbox_shipping ORDER BY clock") == [("a",), ("a",), ("b",), ("c",)]


async def test_the_janitor_says_what_inboxes_hold_back_and_what_is_dropped(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    make(node, "billing")
    write(node, ["a"])
    node.connection.execute("UPDATE mailroom.log_segment SET opened_at = now() - interval '20 days'")
    with node.connection.transaction():
        run(node.connection, making_segment(SCHEMA, "orders", datetime.now(UTC) - 10 * DAY))
    janitor, heard = Janitor(SCHEMA), list[Any]()
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        for _ in range(2):
            janitor._swept = float("-inf")
            await janitor.run_once(connection)
        [told] = [each for each in caplog.messages if "log orders" in each]
        assert told.startswith("log orders: what billing had not read of segment 1 is kept, and takes up disk")
        assert segments(node) == [1, 2, 3]  # the newest one was older than a day
        with node.connection.transaction():
            set_log(node.connection, "orders", drop_unread=True)
        janitor._swept = float("-inf")
        end = events.subscribe(heard.append, events.MessagesLost)
        await janitor.run_once(connection)
        end()
    assert caplog.messages[-1] == (
        "log orders: 1 messages of segment 1 were dropped that inbox billing had not read, since the log drops what is "
        "unread"
    )
    assert heard == [events.MessagesLost(SCHEMA, "billing", "orders", 1)]
    assert node.value("SELECT count(*) FROM mailroom.log") == 0


def test_a_new_segment_is_made_each_day_and_no_delivery_needs_it(node: Node) -> None:
    make(node)
    assert run(node.connection, listing_old_logs(SCHEMA)) == []
    later = datetime.now(UTC) + 2 * DAY
    assert run(node.connection, listing_old_logs(SCHEMA, later)) == ["orders"]
    write(node, ["a"])
    with node.connection.transaction():
        assert run(node.connection, making_segment(SCHEMA, "orders", later)) == 2
    write(node, ["a"])
    assert node.rows("SELECT segment, clock FROM mailroom.log ORDER BY clock")[0][0] == 1
    assert [segment for (segment,) in node.rows("SELECT segment FROM mailroom.log ORDER BY clock")] == [1, 2]


def test_a_reader_is_renamed_with_its_positions(node: Node, connect: Connect) -> None:
    make(node, "billing")
    write(node, ["a"])
    assert keys_of(Reader(connect(), "billing").take_all()) == ["a"]
    with node.connection.transaction():
        rename_inbox(node.connection, "billing", "invoices", actor="me")
    write(node, ["b"])
    assert keys_of(Reader(connect(), "invoices").take_all()) == ["b"]
    with pytest.raises(MailroomError), node.connection.transaction():
        create_log(node.connection, "invoices")


def test_the_test_kit_handles_what_an_inbox_reads_of_a_log(node: Node) -> None:
    make(node, "billing", lanes=2)
    seen: list[str] = []
    with node.connection.transaction():
        mail = Mail(node.connection, schema=SCHEMA)
        Outbox().send(node.connection, "order.paid", 1, key="a")
        mail.handle_all(billing=lambda message, connection: seen.append(message.key))
    assert seen == ["a"]
    assert Inbox("billing").backlog(node.connection) == 0


def test_an_emptied_node_has_an_empty_log(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a", "b"])
    with node.connection.transaction():
        empty(node.connection)
    reader = Reader(connect(), "billing")
    assert reader.take_all() == []
    write(node, ["a"])
    assert keys_of(reader.take_all()) == ["a"]


def test_status_shows_what_is_unread(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a", "b", "a"])
    Reader(connect(), "billing").take(1)
    [billing] = status(node.connection).inboxes
    assert billing.backlog in (1, 2)
    assert billing.backlog == Inbox("billing").backlog(node.connection)
    assert billing.consumer_lag_s > 0


def test_a_rewind_waits_for_a_failing_key_in_hand(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=0)
    write(node, ["a", "b"])
    reader, operator = Reader(connect(), "billing"), connect()
    reader.fail(reader.claim().messages[0], node.connection)
    assert keys_of(reader.take()) == ["b"]
    [message] = reader.claim(due=True).messages
    with ThreadPoolExecutor(1) as thread:
        rewinding = thread.submit(Inbox("billing").rewind, operator, "start", actor="me")
        wait_until_blocked(node.connection, operator.info.backend_pid)
        run(reader.connection, reader.order.healing(message))
        reader.connection.commit()
        rewinding.result(60)
    operator.commit()
    assert sorted(keys_of(reader.take_all())) == ["a", "b"]


def test_a_rewind_by_an_old_snapshot_is_refused(node: Node, connect: Connect) -> None:
    make(node, "billing")
    operator = connect()
    operator.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(ConfigurationError, match="repeatable read"):
        Inbox("billing").rewind(operator, "start", actor="me")
