"""Dead letters: tried again where they failed and nowhere else, or thrown away; always audited."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy

from dispatcher import Registrations
from dispatcher.housekeeping.janitor import raising_floor
from inbox import Inbox, Skip
from mailroom.errors import DecodeError, InvalidMessage, InvalidName, NotInTransaction, UnknownInbox
from mailroom.message.columns import PARTS, listed
from mailroom.message.executable import unwired
from mailroom.node.dead_letter import AsyncDeadLetters, DeadLetters
from mailroom.order.clock import CEILING_STEP, DISPATCH_LOCK, MAX_CLOCK, ClockOverflow
from mailroom.sql import locks
from mailroom.sql.runner import run
from mailroom.testing import execute
from mailroom.values import codec
from outbox import Executable, Store
from tests.support.command import done, json_of
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = [
    pytest.mark.inbox("shipping", "orders"),
    pytest.mark.inbox("audit", "orders"),
    pytest.mark.node_sql(CLOCKS_ALLOWED),
]

LETTERS = DeadLetters()
CLOCK = "SELECT last_value FROM mailroom.clock"


def skip(node: Node, inbox: str, value: object, key: str = "k", reason: str = "no such street") -> UUID:
    """Send a message to all inboxes and have one of them skip it."""
    id = node.send("orders", value, key=key)
    node.deliver_all()
    with node.connection.transaction():
        [message] = [each for each in Inbox(inbox).peek(node.connection, limit=1_000) if each.id == id]
        while (first := Inbox(inbox).peek(node.connection, key, limit=1)[0]).id != id:
            Inbox(inbox).reap(node.connection, first.key, limit=1)
        assert run(node.connection, failing(inbox, message, Skip(reason))).outcome == "skip"
    return id


def undelivered(node: Node, value: object = None, **fields: Any) -> UUID:
    """Send a message that nobody gets."""
    id = node.send("nobody", value, **fields)
    node.deliver_all()
    return id


def requeue(connection: psycopg.Connection[Any], ids: Any = None, **options: Any) -> int:
    return LETTERS.requeue(connection, ids, actor="ada", **options)


def discard(connection: psycopg.Connection[Any], ids: Any = None, **options: Any) -> int:
    return LETTERS.discard(connection, ids, actor="ada", **options)


def values(node: Node, inbox: str) -> list[object]:
    return [message.value for message in Inbox(inbox).peek(node.connection, limit=1_000)]


# -- Looking ----------------------------------------------------------------------------------------------------------


def test_letters_tell_where_and_why_they_failed(node: Node) -> None:
    ids = [undelivered(node, key="k"), skip(node, "shipping", 1)]
    first, second = LETTERS.find(node.connection)
    assert (first.stage, first.reason, first.inbox, first.clock, first.attempts) == (
        "deliver", "no inbox gets this topic", None, None, None,
    )  # fmt: skip
    assert (second.stage, second.reason, second.inbox, second.attempts) == ("reap", "no such street", "shipping", 1)
    assert second.clock == node.value(CLOCK)
    assert [first.message_id, second.message_id] == ids
    assert first.failed_at.tzinfo is not None


def test_letters_are_found_by_what_they_are(node: Node) -> None:
    ids = [undelivered(node), skip(node, "shipping", 1), skip(node, "audit", 2, "other", reason="tax")]
    expected: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [0, 1, 2]),
        ({"stage": "deliver"}, [0]),
        ({"stage": "reap"}, [1, 2]),
        ({"inbox": "audit"}, [2]),
        ({"matching": "street"}, [1]),
        ({"matching": "%"}, []),
        ({"limit": 2}, [0, 1]),
        ({"stage": "reap", "limit": 1}, [1]),
    ]
    for narrowed, found in expected:
        assert [ids.index(each.message_id) for each in LETTERS.find(node.connection, **narrowed)] == found, narrowed


def test_letter_is_shown_with_what_it_carries(node: Node) -> None:
    undelivered(node, {"state": "paid"}, headers={"user": "ada"})
    node.connection.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('nobody', '[1, null]')")
    node.connection.execute("INSERT INTO mailroom.outbox (topic, value) VALUES ('nobody', '\\xff')")
    node.deliver_all()
    first, second, third = (LETTERS.get(node.connection, each.id) for each in LETTERS.find(node.connection))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first[0].topic, first[1].value, first[1].headers) == ("nobody", {"state": "paid"}, {"user": "ada"})
    assert (second[1].value, second[1].headers) == ([1, None], {})
    assert third[1].raw == b"\xff"
    with pytest.raises(DecodeError):
        _ = third[1].value
    assert LETTERS.get(node.connection, 99) is None


# -- Requeue to the outbox --------------------------------------------------------------------------------------------


async def test_async_class_does_the_same(node: Node) -> None:
    letters, id = AsyncDeadLetters(), undelivered(node, 1)
    undelivered(node, 2)
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        first, second = await letters.find(connection)
        found = await letters.get(connection, first.id)
        assert found is not None
        assert (found[0].message_id, found[1].value) == (id, 1)
        assert await letters.discard(connection, first.id, actor="ada", dry_run=True) == 1
        assert await letters.discard(connection, first.id, actor="ada") == 1
        assert await letters.requeue(connection, second.id, actor="ada") == 1
        assert await letters.find(connection) == []
        with pytest.raises(InvalidMessage, match="who acts"):
            await letters.discard(connection, None, actor="")
    assert node.rows("SELECT actor, action FROM mailroom.audit ORDER BY id") == [
        ("ada", "dead-letter discard"), ("ada", "dead-letter requeue")
    ]  # fmt: skip


def test_help_shows_where_the_connection_goes() -> None:
    for method in (DeadLetters.requeue, AsyncDeadLetters.requeue):
        assert list(inspect.signature(method).parameters)[:3] == ["self", "connection", "ids"]
        assert "dispatch lock" in str(method.__doc__)


def test_undelivered_message_is_routed_anew_under_its_own_id(node: Node) -> None:
    id = undelivered(node, {"order": 1}, key="k", headers={"user": "ada"})
    node.inbox("late", "nobody")
    with node.connection.transaction():
        assert requeue(node.connection) == 1
    assert node.dead() == []
    node.deliver_all()
    [message] = Inbox("late").peek(node.connection)
    assert (message.id, message.key, message.value, dict(message.headers)) == (id, "k", {"order": 1}, {"user": "ada"})


def test_undelivered_messages_come_back_in_the_order_they_died_in(node: Node) -> None:
    for value in range(5):
        undelivered(node, value, key="k")
    node.inbox("late", "nobody")
    with node.connection.transaction():
        requeue(node.connection)
    node.deliver_all()
    assert values(node, "late") == [0, 1, 2, 3, 4]


def test_message_that_still_nobody_gets_dies_again(node: Node) -> None:
    undelivered(node)
    with node.connection.transaction():
        requeue(node.connection)
    node.deliver_all()
    assert [reason for *_, reason in node.dead()] == ["no inbox gets this topic"]


def test_message_that_has_expired_meanwhile_is_dropped(node: Node) -> None:
    undelivered(node, expires_at=datetime.now(UTC) + timedelta(hours=1))
    node.inbox("late", "nobody")
    with node.connection.transaction():
        requeue(node.connection)
    assert node.deliver_all(now=datetime.now(UTC) + timedelta(hours=2)).expired == 1
    assert (node.dead(), values(node, "late")) == ([], [])


def test_requeue_to_the_outbox_rings_for_the_dispatcher(node: Node, connect: Connect) -> None:
    listener = connect(autocommit=True)
    bell = node.value("SELECT " + locks.channel("'mailroom.outbox'::regclass"))
    undelivered(node)
    listener.execute(f'LISTEN "{bell}"')
    with node.connection.transaction():
        requeue(node.connection)
    assert [each.channel for each in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [bell]


# -- Requeue into the inbox that skipped it ---------------------------------------------------------------------------


def test_skipped_message_comes_back_into_its_inbox_only_behind_what_its_key_has_there(node: Node) -> None:
    id = skip(node, "shipping", 1)
    node.send("orders", 2, key="k")
    node.deliver_all()
    before = node.value(CLOCK)
    with node.connection.transaction():
        assert requeue(node.connection) == 1
    assert node.dead() == []
    assert values(node, "shipping") == [2, 1]
    assert values(node, "audit") == [1, 2]
    last = Inbox("shipping").peek(node.connection)[-1]
    assert (last.id, last.clock > before, last.sent_clock) == (id, True, last.clock)
    assert last.origin == node.value("SELECT id FROM mailroom.node")


def test_what_is_delivered_after_a_requeue_is_stamped_later(node: Node) -> None:
    skip(node, "shipping", 1)
    with node.connection.transaction():
        requeue(node.connection)
    node.send("orders", 2, key="k")
    assert node.deliver().delivered == 2
    assert values(node, "shipping") == [1, 2]
    clocks = node.rows("SELECT clock FROM mailroom.inbox_shipping ORDER BY clock")
    assert clocks[-1] == (node.value(CLOCK),)


def test_skipped_messages_come_back_in_the_order_they_died_in(node: Node) -> None:
    for value in range(4):
        skip(node, "shipping", value)
    with node.connection.transaction():
        assert requeue(node.connection) == 4
    assert values(node, "shipping") == [0, 1, 2, 3]


def test_message_skipped_by_two_inboxes_comes_back_into_the_one_that_is_chosen(node: Node) -> None:
    id = skip(node, "shipping", 1)
    with node.connection.transaction():
        [message] = Inbox("audit").peek(node.connection)
        run(node.connection, failing("audit", message, Skip("no")))
    with node.connection.transaction():
        assert requeue(node.connection, inbox="audit") == 1
    assert [message.id for message in Inbox("audit").peek(node.connection)] == [id]
    assert values(node, "shipping") == []
    assert [each.inbox for each in LETTERS.find(node.connection)] == ["shipping"]


def test_clock_of_a_requeue_is_above_all_that_a_crash_may_have_taken_back(node: Node) -> None:
    skip(node, "shipping", 1)
    node.connection.execute("SELECT setval('mailroom.clock', 1)")
    ceiling = node.value("SELECT clock_ceiling FROM mailroom.node")
    with node.connection.transaction():
        requeue(node.connection)
    [message] = Inbox("shipping").peek(node.connection)
    assert message.clock == node.value(CLOCK) == ceiling + 1
    assert node.value("SELECT clock_ceiling FROM mailroom.node") == ceiling + 1 + CEILING_STEP


def test_requeue_is_durable_whatever_the_session_has(node: Node, connect: Connect) -> None:
    skip(node, "shipping", 1)
    with connect() as connection:
        connection.execute("SET synchronous_commit = off")
        requeue(connection)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
        connection.commit()
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)


def test_requeue_rolled_back_leaves_the_letter_and_the_dispatcher_goes_on(node: Node) -> None:
    skip(node, "shipping", 1)
    with node.connection.transaction(force_rollback=True):
        requeue(node.connection)
    assert len(node.dead()) == 1
    assert values(node, "shipping") == []
    node.send("orders", 2, key="k")
    assert node.deliver_all().delivered == 2
    assert values(node, "shipping") == [2]


def test_requeue_waits_for_a_delivery_and_is_stamped_later(node: Node, connect: Connect) -> None:
    skip(node, "shipping", 1)
    node.send("orders", 2, key="k")
    other = connect()
    with ThreadPoolExecutor(1) as thread:
        with node.connection.transaction():
            assert node.deliver().delivered == 2
            requeued = thread.submit(requeue, other)
            with connect(autocommit=True) as observer:
                assert wait_until_blocked(observer, other.info.backend_pid) == [node.connection.info.backend_pid]
        assert requeued.result() == 1
    other.commit()
    assert values(node, "shipping") == [2, 1]


def test_requeue_beside_another_gets_clocks_of_its_own(node: Node, connect: Connect) -> None:
    skip(node, "shipping", 1)
    skip(node, "audit", 2)
    first, second = connect(), connect()
    first.execute(DISPATCH_LOCK.at(schema=SCHEMA).sql)
    with ThreadPoolExecutor(1) as thread:
        requeued = thread.submit(requeue, second, inbox="shipping")
        assert wait_until_blocked(node.connection, second.info.backend_pid) == [first.info.backend_pid]
        requeue(first, inbox="audit")
        first.commit()
        requeued.result()
    second.commit()
    [last_of_audit] = node.rows("SELECT max(clock) FROM mailroom.inbox_audit")
    [last_of_shipping] = node.rows("SELECT max(clock) FROM mailroom.inbox_shipping")
    assert last_of_shipping > last_of_audit


def test_delivery_and_floor_wait_for_a_requeue(node: Node, connect: Connect) -> None:
    skip(node, "shipping", 1)
    requeueing, janitor = connect(), connect()
    requeue(requeueing)
    with ThreadPoolExecutor(1) as thread:
        raised = thread.submit(run, janitor, raising_floor(SCHEMA, "shipping"))
        wait_until_blocked(node.connection, janitor.info.backend_pid)
        requeueing.commit()
        raised.result()
    janitor.commit()
    reaper = connect()
    assert [message.value for message in Inbox("shipping").reap(reaper, "k")] == [1]


def test_requeue_wakes_whoever_listens_for_the_inbox(node: Node, connect: Connect) -> None:
    listener = connect(autocommit=True)
    bell = node.value("SELECT " + locks.channel("'mailroom.inbox_shipping'::regclass"))
    skip(node, "shipping", 1)
    listener.execute(f'LISTEN "{bell}"')
    with node.connection.transaction():
        requeue(node.connection)
    assert [each.channel for each in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [bell]


def test_letter_of_an_inbox_that_is_gone_is_refused_and_the_others_may_go(node: Node) -> None:
    for inbox in ("shipping", "audit"):
        skip(node, inbox, 1, key=inbox)
    node.connection.execute("DROP TABLE mailroom.inbox_audit")
    with node.connection.transaction(), pytest.raises(UnknownInbox, match=r"'audit'.* is gone"):
        requeue(node.connection)
    assert len(node.dead()) == 2
    with node.connection.transaction():
        assert requeue(node.connection, inbox="shipping") == 1


def test_requeue_where_no_clocks_are_left_is_refused(node: Node) -> None:
    skip(node, "shipping", 1)
    node.allow_clocks(MAX_CLOCK - 10)
    before = node.value(CLOCK)
    with pytest.raises(ClockOverflow), node.connection.transaction():
        requeue(node.connection)
    assert (node.value(CLOCK), len(node.dead())) == (before, 1)


def test_both_kinds_are_requeued_at_once(node: Node) -> None:
    undelivered(node, 1)
    skip(node, "shipping", 2)
    with node.connection.transaction():
        assert requeue(node.connection) == 2
    assert len(node.waiting()) == 1
    assert values(node, "shipping") == [2]


def test_second_of_two_requeues_waits_and_finds_nothing(node: Node, connect: Connect) -> None:
    undelivered(node)
    first, second = connect(), connect()
    assert requeue(first) == 1
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(requeue, second)
        wait_until_blocked(node.connection, second.info.backend_pid)
        first.commit()
        assert again.result() == 0
    second.commit()
    assert len(node.waiting()) == 1


# -- Requeue of executables -------------------------------------------------------------------------------------------


EXECUTABLE = listed(PARTS) + ", message_id, headers, after_clock, source, sent_at"


def unapplied(node: Node, *executables: Executable) -> list[tuple[Any, ...]]:
    """Send executables that cannot be applied, execute them, and return them as they stood in their outbox."""
    with node.connection.transaction():
        Store().send_many(node.connection, executables)
        found = node.rows(f"SELECT {EXECUTABLE} FROM mailroom.outbox_executable ORDER BY position")
        assert execute(node.connection) == len(executables)
    assert [stage for _, stage, _ in node.dead()] == ["execute"] * len(executables)
    return found


AT = datetime(2026, 11, 21, 17, 45, 1, 234567, tzinfo=UTC)
EACH = (
    Executable(
        "put", "a", "gone", value=b"\0\xff", expected=b"", notify="told", headers={"user": "ada"}, after_clock=7
    ),
    Executable("increment", "a", "gone", amount=-(2**63)),
    Executable("delete", "\U0001f600 {}%", "gone"),
    Executable("delete_range", None, "gone", end_key="z", row_limit=5),
    Executable("delete_range", "a", "gone"),
    Executable("call", None, "gone", arguments={"a": [1, None, "\u20ac"]}),
    Executable("call", "k", "gone"),
)


def test_executables_come_back_as_they_were_sent_and_in_order(node: Node) -> None:
    sent, told = unapplied(node, *EACH), node.waiting()
    with node.connection.transaction():
        assert requeue(node.connection) == len(EACH)
    assert node.dead() == []
    assert node.rows(f"SELECT {EXECUTABLE} FROM mailroom.outbox_executable ORDER BY position") == sent
    assert node.waiting() == told


def test_accounting_that_failed_is_entered_for_the_time_it_was_sent_for(node: Node) -> None:
    full = Executable("account", "a/b", "accounting", amount=2**63 - 1, bytes=1, at=AT)
    with node.connection.transaction():
        Store().send_many(node.connection, [full])
        execute(node.connection)
    unapplied(node, Executable("account", "a/b", "accounting", amount=2, bytes=3, at=AT))
    node.connection.execute("UPDATE mailroom.accounting SET count = 5")
    with node.connection.transaction():
        requeue(node.connection)
        assert execute(node.connection) == 1
    minute = AT.replace(second=0, microsecond=0)
    assert node.rows("SELECT key, minute, count, bytes FROM mailroom.accounting ORDER BY key") == [
        ("a", minute, 7, 4), ("a/b", minute, 7, 4),
    ]  # fmt: skip


def test_executable_is_applied_once_its_cause_is_mended(node: Node) -> None:
    unapplied(node, Executable("increment", "a", "later", amount=2))
    node.connection.execute("CREATE TABLE later (name text PRIMARY KEY, hits bigint)")
    with node.connection.transaction():
        Registrations().register_target(
            node.connection, "later", "public.later", key="name", number="hits", actor="ada"
        )
        Store(target="later").increment(node.connection, "a", 1)
        assert requeue(node.connection, stage="execute") == 1
        positions = node.rows("SELECT amount FROM mailroom.outbox_executable ORDER BY position")
        assert execute(node.connection) == 2
    assert positions == [(1,), (2,)]
    assert node.rows("SELECT * FROM later") == [("a", 3)]


def test_requeue_of_an_executable_rings_for_the_executor(node: Node, connect: Connect) -> None:
    listener = connect(autocommit=True)
    bell = node.value("SELECT " + locks.channel("'mailroom.outbox_executable'::regclass"))
    unapplied(node, Executable("increment", "a", "gone", amount=1))
    listener.execute(f'LISTEN "{bell}"')
    with node.connection.transaction():
        requeue(node.connection)
    assert [each.channel for each in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [bell]


def test_executable_that_cannot_be_read_is_told_by_its_number_and_nothing_is_requeued(node: Node) -> None:
    unapplied(node, *EACH[1:3])
    undelivered(node)
    skip(node, "shipping", 1)
    [_, bad, *_] = LETTERS.find(node.connection)
    increment, put = ({"version": 1, "operation": operation, "key": "a"} for operation in ("increment", "put"))
    for value in (
        *("put", [1], {}, {"version": 1}, {"operation": "increment", "key": "a", "amount": 1}),
        *(increment | {"amount": 1, "ttl": 5}, increment | {"amount": "1"}, increment | {"amount": 1.0}),
        *(increment | {"amount": 1, "version": None}, increment | {"amount": True}, put | {"value": "text"}),
        *(put | {"value": b"v", "key": 1}, put | {"value": b"v", "at": "2026-11-21"}),
        None,
    ):
        raw = b"\xff" if value is None else codec.encode(value)
        node.connection.execute("UPDATE mailroom.dead_letter SET value = %s WHERE id = %s", [raw, bad.id])
        with node.connection.transaction(), pytest.raises(DecodeError, match=rf"\ADead letter {bad.id} cannot be"):
            requeue(node.connection)
        assert len(node.dead()) == 4
        assert (node.waiting(), node.value("SELECT count(*) FROM mailroom.outbox_executable")) == ([], 0)
        assert (values(node, "shipping"), node.value("SELECT count(*) FROM mailroom.audit")) == ([], 0)
    with node.connection.transaction():
        assert requeue(node.connection, [each.id for each in LETTERS.find(node.connection) if each.id != bad.id]) == 3
    assert [each.id for each in LETTERS.find(node.connection)] == [bad.id]


def test_executable_of_a_version_not_known_here_comes_back_and_is_parked_again(node: Node) -> None:
    for _ in range(2):
        with node.connection.transaction():
            if not node.dead():
                insert = "INSERT INTO mailroom.outbox_executable (version, operation, key) VALUES (2, 'merge', 'a')"
                node.connection.execute(insert)
            else:
                assert requeue(node.connection) == 1
            assert execute(node.connection) == 1
        [(_, stage, reason)] = node.dead()
        assert (stage, "version 2" in reason) == ("execute", True)


def test_dead_executable_is_shown_with_its_parts(node: Node) -> None:
    unapplied(node, EACH[0])
    [letter] = LETTERS.find(node.connection, stage="execute")
    assert (letter.topic, letter.key, letter.inbox) == ("gone.put", "a", None)
    found = LETTERS.get(node.connection, letter.id)
    assert found is not None
    assert found[1].headers == {"user": "ada"}
    parts = {"version": 1, "operation": "put", "target": "gone", "key": "a", "value": b"\0\xff", "expected": b""}
    assert found[1].value == parts | {"notify": "told"}
    assert {name: part for name, part in unwired(found[1].raw).items() if part is not None} == found[1].value
    text = done("dead-letter", "show", str(letter.id), dsn=node.dsn)
    assert "could not be executed" in text
    assert '"operation": "put"' in text
    assert json_of("dead-letter", "show", str(letter.id), dsn=node.dsn)["value"]["value"] == "AP8="
    assert len(json_of("dead-letter", "list", "--stage", "execute", dsn=node.dsn)) == 1


def test_all_kinds_are_requeued_at_once_each_to_its_place(node: Node) -> None:
    undelivered(node, 1)
    skip(node, "shipping", 2)
    with node.connection.transaction():
        Store(target="gone").increment(node.connection, "a")
        execute(node.connection)
    with node.connection.transaction():
        assert requeue(node.connection) == 3
    assert len(node.waiting()) == 1
    assert values(node, "shipping") == [2]
    assert node.rows("SELECT target FROM mailroom.outbox_executable") == [("gone",)]


# -- Discard, audit, dry runs, bad input ------------------------------------------------------------------------------


def test_discard_takes_what_is_chosen_and_nothing_else(node: Node) -> None:
    for value in range(3):
        undelivered(node, value)
    [first, second, _] = LETTERS.find(node.connection)
    with node.connection.transaction():
        assert discard(node.connection, [first.id, 99]) == 1
        assert discard(node.connection, limit=1) == 1
    assert [each.id for each in LETTERS.find(node.connection)] == [second.id + 1]
    assert node.waiting() == []


def test_every_batch_is_in_the_audit_by_inbox(node: Node) -> None:
    undelivered(node)
    undelivered(node)
    skip(node, "shipping", 1)
    with node.connection.transaction():
        requeue(node.connection, why="mended")
        discard(node.connection)
    columns = "actor, action, inbox, key, messages, reason"
    assert node.rows(f"SELECT {columns} FROM mailroom.audit ORDER BY inbox") == [
        ("ada", "dead-letter requeue", "shipping", None, 1, "mended"),
        ("ada", "dead-letter requeue", None, None, 2, "mended"),
    ]


@pytest.mark.parametrize("call", [requeue, discard])
@pytest.mark.parametrize("limit", [None, 1])
def test_dry_run_tells_how_many_and_changes_nothing(node: Node, call: Callable[..., int], limit: int | None) -> None:
    undelivered(node)
    skip(node, "shipping", 1)
    before = node.value(CLOCK)
    with node.connection.transaction():
        told = call(node.connection, limit=limit, dry_run=True)
        assert node.value("SELECT pg_current_xact_id_if_assigned() IS NULL")
    assert (len(node.dead()), node.value(CLOCK), node.value("SELECT count(*) FROM mailroom.audit")) == (2, before, 0)
    with node.connection.transaction():
        assert call(node.connection, limit=limit) == told


def test_choice_of_nothing_is_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    choices: list[tuple[dict[str, Any], bool]] = [
        ({}, False), ({"ids": 7}, True), ({"matching": "cleanup"}, True), ({"stage": "reap"}, True),
    ]  # fmt: skip
    for (choice, is_told), call, dry_run in product(choices, (requeue, discard), (False, True)):
        caplog.clear()
        with node.connection.transaction():
            assert call(node.connection, dry_run=dry_run, **choice) == 0
        assert bool(caplog.records) == is_told, choice
        assert "cleanup" not in caplog.text


def test_autocommit_outside_a_transaction_is_refused(node: Node) -> None:
    for call, dry_run in product((requeue, discard), (False, True)):
        with pytest.raises(NotInTransaction):
            call(node.connection, dry_run=dry_run)


def test_bad_input_is_refused_before_anything_is_changed(node: Node) -> None:
    undelivered(node)
    refused: list[dict[str, Any]] = [
        {"actor": ""}, {"actor": None}, {"ids": 0}, {"ids": -1}, {"ids": True}, {"ids": "17"}, {"ids": [2**63]},
        {"ids": 1.5}, {"matching": "\0"}, {"stage": "transit"}, {"limit": 0}, {"limit": True}, {"why": 17 * "\0"},
    ]  # fmt: skip
    for bad, call in product(refused, (LETTERS.requeue, LETTERS.discard)):
        with node.connection.transaction(), pytest.raises(InvalidMessage):
            call(node.connection, **({"ids": None, "actor": "ada"} | bad))
    assert len(node.dead()) == 1


def test_name_that_is_no_inbox_s_is_refused(node: Node) -> None:
    with pytest.raises(InvalidName):
        LETTERS.find(node.connection, inbox="No Where")


@pytest.fixture
def engine(node: Node) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(
        node.dsn.replace("postgresql:", "postgresql+psycopg2:", 1), poolclass=sqlalchemy.NullPool
    )
    yield engine
    engine.dispose()


def test_everything_runs_on_sqlalchemy_with_another_driver(node: Node, engine: sqlalchemy.Engine) -> None:
    undelivered(node, 1)
    undelivered(node, 2)
    skip(node, "shipping", 3)
    with engine.begin() as connection:
        found = LETTERS.find(connection)
        shown = LETTERS.get(connection, found[0].id)
        assert shown is not None
        assert shown[1].value == 1
        assert LETTERS.discard(connection, found[0].id, actor="ada") == 1
        assert LETTERS.requeue(connection, None, actor="ada") == 2
    assert len(node.waiting()) == 1
    assert values(node, "shipping") == [3]
