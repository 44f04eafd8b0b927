"""Status and trace: where messages wait and for how long, on any connection, and as the command shows it."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
import sqlalchemy

from inbox import Inbox, Park, Skip
from inbox.by_key.parked_keys import moving_parked
from mailroom.cli import call
from mailroom.errors import SchemaError
from mailroom.metrics.look import Watch
from mailroom.node.status import (
    InboxStatus,
    LinkStatus,
    dispatcher_status,
    executable_backlog,
    executor_status,
    outbox_backlog,
    status,
)
from mailroom.node.trace import trace
from mailroom.sql.runner import run
from mailroom.testing import execute
from outbox import Store
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.node import Node, failing

LEASE = """
INSERT INTO mailroom.lease (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts)
VALUES (%s, gen_random_uuid(), 3, clock_timestamp() + %s::interval, 'mill', 17, 18, now(), 'asleep',
        '{"taken": 5}')
"""


def inbox(node: Node, name: str) -> InboxStatus:
    [found] = [each for each in status(node.connection).inboxes if each.name == name]
    return found


def age(node: Node, table: str, column: str, seconds: int) -> None:
    node.connection.execute(f"UPDATE mailroom.{table} SET {column} = clock_timestamp() - interval '{seconds} s'")


def fail(node: Node, error: Exception) -> None:
    """Record a failure of the first message in `shipping`."""
    with node.connection.transaction():
        [message] = Inbox("shipping").peek(node.connection, limit=1)
        run(node.connection, failing("shipping", message, error))


def park(node: Node, messages: int) -> list[UUID]:
    """Leave the key k parked in `shipping`, and only its first message moved to `parked`."""
    ids = [node.send("orders", key="k") for _ in range(messages)]
    node.deliver_all()
    fail(node, Park("no such street"))
    return ids


def test_locked_inbox_holds_up_no_look_and_the_holder_is_told_first(node: Node, connect: Connect) -> None:
    node.inbox("shipping")
    node.inbox("ledger", order="total")
    node.inbox("billing")
    id = node.send("billing")
    node.deliver_all()
    holder = connect(application_name="nightly")
    holder.execute("LOCK TABLE mailroom.inbox_shipping, mailroom.inbox_ledger")
    text = done("status", dsn=node.dsn)
    assert text.startswith("Locked")
    assert "inbox_ledger cannot be read: pid" in text.splitlines()[0]
    assert "(nightly, role" in " ".join(text.split())
    node.connection.execute("SET lock_timeout = '60s'")
    found = status(node.connection)
    assert [each.name for each in found.inboxes] == ["billing"]
    assert {each.by.pid for each in found.locked} == {holder.info.backend_pid}
    look = run(node.connection, Watch().looking())
    assert [(each.id, each.what.split(": ")[1]) for each in look.troubles[:2]] == [
        ("M006", "inbox_ledger cannot be read"), ("M006", "inbox_shipping cannot be read")
    ]  # fmt: skip
    told = mailroom("trace", str(id), dsn=node.dsn)
    assert told.stdout.startswith(f"{id} is in inbox billing")
    assert f"inbox_shipping cannot be read: pid {holder.info.backend_pid}" in " ".join(told.stderr.split())
    holder.execute("LOCK TABLE mailroom.outbox")
    for command in (["status"], ["trace", str(id)]):
        assert f"outbox cannot be read: pid {holder.info.backend_pid}" in error_of(mailroom(*command, dsn=node.dsn))
    holder.rollback()
    assert len(status(node.connection).inboxes) == 3


# What only looks, each with the arguments that it cannot do without.
READERS = [
    "archive list shipping", "asyncapi", "bridge show b", "bridge status", "bridge test b", "dead-letter list",
    "dead-letter show 1", "dispatcher status", "executor function list", "executor status", "executor target list",
    "inbox list", "inbox paused shipping", "inbox peek shipping", "link report b", "link status", "parked list",
    "parked show shipping --key k", "periodic list", "periodic next p", "statistics", "status",
]  # fmt: skip


@pytest.mark.slow
def test_whatever_only_looks_waits_for_no_lock_for_long_and_says_who_has_it(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.inbox("shipping")
    node.inbox("billing")
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at) "
        "SELECT name, 'k', 1, 16, 'infinity', now() FROM mailroom.inbox_registry"
    )
    # One that would wait for longer ends by this, and tells of nobody.
    node.connection.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = ''10s''', current_database()); END $$"
    )
    holder = connect(application_name="nightly")
    holder.execute("LOCK TABLE mailroom.inbox_shipping")
    listed = mailroom("parked", "list", dsn=node.dsn)
    assert (listed.exit_code, "shipping" in listed.stdout, "billing" in listed.stdout) == (0, False, True)
    assert "inbox_shipping cannot be read: pid" in " ".join(listed.stderr.split())
    monkeypatch.setitem(call.LOOKING, "lock_timeout", "20ms")
    tables = node.rows(
        "SELECT c.oid::regclass::text FROM pg_class AS c WHERE relnamespace = 'mailroom'::regnamespace "
        "AND relkind IN ('r', 'p') AND relname <> 'alembic_version'"
    )
    holder.execute(f"LOCK TABLE {', '.join(name for (name,) in tables)}".encode())
    told = f"cannot be read: pid {holder.info.backend_pid} (nightly"
    results = {reader: mailroom(*reader.split(), dsn=node.dsn) for reader in READERS}
    assert {reader: each.output for reader, each in results.items() if told not in " ".join(each.output.split())} == {}


def test_new_node_has_nothing_waiting(node: Node) -> None:
    found = status(node.connection)
    assert (found.outbox_backlog, found.outbox_lag_s, found.scheduled, found.dead_letters) == (0, 0, 0, 0)
    assert (found.clock, found.dispatcher, found.inboxes) == (0, None, ())


def test_message_in_the_outbox_is_on_the_way_to_the_inboxes_that_get_its_topic(node: Node) -> None:
    node.inbox("shipping", "orders", "returns")
    node.inbox("billing", "invoices")
    node.inbox("orders")
    node.send("orders")
    node.send("returns")
    on_the_way = {each.name: each.on_the_way for each in status(node.connection).inboxes}
    assert on_the_way == {"shipping": 2, "billing": 0, "orders": 1}
    assert outbox_backlog(node.connection) == status(node.connection).outbox_backlog == 2


def test_event_is_on_the_way_to_subscribers_only(node: Node) -> None:
    node.inbox("orders")
    node.inbox("audit", "orders")
    node.send("orders", kind="E")
    assert (inbox(node, "orders").on_the_way, inbox(node, "audit").on_the_way) == (0, 1)


def test_lag_is_split_into_the_dispatchers_and_the_consumers_part(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.inbox("idle")
    node.send("orders")
    node.deliver_all()
    age(node, "inbox", "sent_at", 500)
    age(node, "inbox", "delivered_at", 300)
    node.send("orders")
    age(node, "outbox", "sent_at", 100)
    found = inbox(node, "shipping")
    assert (found.backlog, found.on_the_way) == (1, 1)
    assert found.lag_s == pytest.approx(500, abs=90)
    assert found.consumer_lag_s == pytest.approx(300, abs=90)
    assert found.dispatcher_lag_s == pytest.approx(100, abs=90)
    assert status(node.connection).outbox_lag_s == pytest.approx(100, abs=90)
    idle = inbox(node, "idle")
    assert (idle.lag_s, idle.consumer_lag_s, idle.dispatcher_lag_s) == (0, 0, 0)


def test_lag_of_a_message_from_the_future_is_none(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.send("orders")
    age(node, "outbox", "sent_at", -3_600)
    assert (status(node.connection).outbox_lag_s, inbox(node, "shipping").lag_s) == (0, 0)


def test_clock_scheduled_and_dead_letters_are_told(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.send("orders", deliver_at=datetime.now(UTC) + timedelta(days=1))
    node.send("nobody")
    node.send("orders")
    node.deliver_all()
    found = status(node.connection)
    assert (found.clock, found.scheduled, found.dead_letters) == (3, 1, 1)
    assert found.clock_ceiling >= found.clock


def test_keys_that_wait_after_a_failure_are_counted(node: Node) -> None:
    node.inbox("shipping")
    rows = "VALUES ('shipping', 'a', 1, 1, now() + interval '1 h'), ('shipping', 'b', 2, 1, now() - interval '1 h')"
    node.connection.execute(f"INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at) {rows}")
    assert inbox(node, "shipping").waiting_keys == 1


def test_parked_keys_and_what_they_hold_are_counted_and_do_not_wait(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.inbox("billing")
    park(node, messages=3)
    assert (inbox(node, "shipping").parked_keys, inbox(node, "shipping").parked_messages) == (1, 1)
    with node.connection.transaction():
        run(node.connection, moving_parked("mailroom", "shipping", ""))
    found = inbox(node, "shipping")
    assert (found.parked_keys, found.parked_messages, found.backlog, found.waiting_keys) == (1, 3, 0, 0)
    assert (inbox(node, "billing").parked_keys, inbox(node, "billing").parked_messages) == (0, 0)
    assert "parked keys" in done("status", dsn=node.dsn)


@pytest.mark.parametrize(("left", "leads"), [("1 hour", True), ("-1 hour", False)])
def test_dispatcher_leads_as_long_as_its_lease_holds(left: str, leads: bool, node: Node) -> None:
    node.connection.execute(LEASE, ["dispatcher", left])
    found = dispatcher_status(node.connection)
    assert found is not None
    assert found == status(node.connection).dispatcher or found.lease_left_s != 0
    assert (executor_status(node.connection), status(node.connection).executor) == (None, None)
    assert (found.leads, found.state, found.host, found.pid, found.epoch) == (leads, "asleep", "mill", 17, 3)
    assert (found.lease_left_s > 0, found.counts) == (leads, {"taken": 5})
    assert ("mill pid 17 leads, asleep" in done("status", dsn=node.dsn)) is leads


def test_executor_leads_by_a_lease_of_its_own(node: Node) -> None:
    node.connection.execute(LEASE, ["executor", "1 minute"])
    found = executor_status(node.connection)
    assert found is not None
    assert (found.leads, found.host, found.pid, found.epoch, found.counts) == (True, "mill", 17, 3, {"taken": 5})
    told = status(node.connection)
    assert told.executor is not None
    assert (told.executor.leads, told.dispatcher, dispatcher_status(node.connection)) == (True, None, None)
    text = done("status", dsn=node.dsn)
    assert "Executor     mill pid 17 leads, asleep" in text
    assert "Dispatcher   none has run yet" in text


def test_executables_that_wait_are_counted_beside_the_messages(node: Node) -> None:
    node.send("orders")
    found = status(node.connection)
    assert (found.executable_backlog, found.executable_lag_s) == (0, 0)
    assert "Executables  0 waiting\n" in done("status", dsn=node.dsn)
    with node.connection.transaction():
        for _ in range(2):
            Store().increment(node.connection, "a")
    age(node, "outbox_executable", "sent_at", 500)
    found = status(node.connection)
    assert (found.outbox_backlog, found.executable_backlog, executable_backlog(node.connection)) == (1, 2, 2)
    assert found.executable_lag_s == pytest.approx(500, abs=90)
    assert found.outbox_lag_s < 400
    assert "Executables  2 waiting, the oldest sent" in done("status", dsn=node.dsn)
    assert json_of("status", dsn=node.dsn)["executable_backlog"] == 2


def test_status_and_trace_run_on_sqlalchemy_connections(node: Node) -> None:
    node.inbox("shipping", "orders")
    message_id = node.send("orders", key="k")
    engine = sqlalchemy.create_engine(
        node.dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
    )
    with engine.connect() as connection:
        assert status(connection).outbox_backlog == 1
        [place] = trace(connection, message_id)
        assert (place.where, place.key, place.sent_at.tzinfo is not None) == ("outbox", "k", True)


def test_another_schema_has_no_status(node: Node) -> None:
    with pytest.raises(SchemaError, match="migrate --schema shop"):
        status(node.connection, schema="shop")


def test_status_for_people_shows_every_inbox(node: Node) -> None:
    assert "inbox create" in done("status", dsn=node.dsn)
    node.inbox("shipping", "orders")
    node.send("orders")
    text = done("status", dsn=node.dsn)
    assert "shipping" in text
    assert "1 waiting, the oldest sent" in text
    told = json_of("status", dsn=node.dsn)
    assert told["inboxes"][0]["on_the_way"] == 1
    [place] = node.rows("SELECT current_database()::text, 'port ' || current_setting('port')")
    assert told["node"] == node.value("SELECT name FROM mailroom.node")
    assert (told["database"], " ".join(told["server"].split()[-2:])) == place
    assert f"{told['node']}, schema mailroom of database {told['database']} on {told['server']}" in " ".join(
        text.split()
    )


def test_trace_follows_a_message_from_the_outbox_to_its_end(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.inbox("audit", "orders")
    for _ in range(2):
        message_id = node.send("orders", key="k")
    [place] = trace(node.connection, message_id)
    assert (place.where, place.ahead, place.inbox) == ("outbox", 1, None)
    node.deliver_all()
    places = trace(node.connection, message_id)
    assert {(each.where, each.inbox, each.clock, each.ahead) for each in places} == {
        ("inbox", "shipping", 2, 1),
        ("inbox", "audit", 2, 1),
    }
    node.connection.execute("DELETE FROM mailroom.inbox")
    assert trace(node.connection, message_id) == []
    assert "nowhere in schema mailroom" in error_of(mailroom("trace", str(message_id), dsn=node.dsn))


def test_trace_finds_a_scheduled_message(node: Node) -> None:
    due = datetime(2100, 1, 1, tzinfo=UTC)
    node.inbox("shipping", "orders")
    message_id = node.send("orders", deliver_at=due)
    node.deliver_all()
    [place] = trace(node.connection, message_id)
    assert (place.where, place.since) == ("scheduled", due)
    assert "is scheduled for" in done("trace", str(message_id), dsn=node.dsn)


def test_trace_finds_a_dead_letter_with_its_reason(node: Node) -> None:
    message_id = node.send("nobody")
    node.deliver_all()
    [place] = trace(node.connection, message_id)
    assert (place.where, place.reason) == ("dead_letter", "no inbox gets this topic")
    assert "no inbox gets this topic" in done("trace", str(message_id), dsn=node.dsn)


def test_trace_follows_an_executable_from_its_outbox_to_its_end(node: Node) -> None:
    with node.connection.transaction():
        ids = [Store().increment(node.connection, "a"), Store(target="gone").delete_range(node.connection)]
        [place] = trace(node.connection, ids[0])
        assert (place.where, place.topic, place.key, place.ahead) == ("outbox_executable", "store.increment", "a", 0)
        assert place.since == place.sent_at
        [place] = trace(node.connection, ids[1])
        assert (place.topic, place.key, place.ahead) == ("gone.delete_range", str(ids[1]), 1)
    assert "waits to be executed, 1 before it" in done("trace", str(ids[1]), dsn=node.dsn)
    with node.connection.transaction():
        assert execute(node.connection) == 2
    assert trace(node.connection, ids[0]) == []
    [place] = trace(node.connection, ids[1])
    assert (place.where, place.topic, place.key) == ("dead_letter", "gone.delete_range", str(ids[1]))


def test_trace_tells_of_the_failure_a_key_waits_after(node: Node) -> None:
    node.inbox("shipping", "orders")
    message_id = node.send("orders", key="k")
    node.deliver_all()
    state = "VALUES ('shipping', 'k', 1, 2, now() + interval '1 h', 'ValueError: no such street')"
    node.connection.execute(
        f"INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, last_error) {state}"
    )
    [place] = trace(node.connection, message_id)
    assert (place.attempts, place.reason) == (2, "ValueError: no such street")
    assert "no such street" in done("trace", str(message_id), dsn=node.dsn)


def test_trace_finds_what_a_parked_key_holds_whether_it_was_moved_aside_or_not(node: Node) -> None:
    node.inbox("shipping", "orders")
    ids = park(node, messages=3)
    for moved in (1, 2, 1):
        places = [trace(node.connection, id) for id in ids]
        assert [(each.where, each.inbox, each.clock, each.ahead, each.retry_at) for [each] in places] == [
            ("parked", "shipping", clock, clock - 1, None) for clock in (1, 2, 3)
        ]
        assert {(each.attempts, each.reason) for [each] in places} == {(1, "no such street")}
        with node.connection.transaction():
            run(node.connection, moving_parked("mailroom", "shipping", "", rows=moved))
    text = done("trace", str(ids[1]), dsn=node.dsn)
    assert "is held in inbox shipping" in text
    assert "no such street" in text


def test_trace_tells_which_inbox_skipped_a_message(node: Node) -> None:
    node.inbox("shipping", "orders")
    node.inbox("audit", "orders")
    message_id = node.send("orders", key="k")
    node.deliver_all()
    fail(node, Skip("no such street"))
    places = {each.where: each for each in trace(node.connection, message_id)}
    assert places["inbox"].inbox == "audit"
    letter = places["dead_letter"]
    assert (letter.inbox, letter.clock, letter.attempts, letter.reason) == ("shipping", 1, 1, "no such street")
    assert "skipped by inbox shipping" in done("trace", str(message_id), dsn=node.dsn)


def test_trace_of_an_unknown_id_is_nowhere(node: Node) -> None:
    message_id = uuid4()
    assert json_of("trace", str(message_id), dsn=node.dsn, exit_code=1) == {
        "id": str(message_id), "places": [], "causes": [], "effects": []
    }  # fmt: skip
    result = mailroom("trace", str(message_id), dsn=node.dsn)
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.inbox("shipping")
def test_console_of_python_shows_a_line_for_each_thing_and_leaves_the_usual_out(node: Node) -> None:
    for _ in range(2):
        node.send("shipping", 1, key="k")
    node.deliver_all()
    lines = repr(status(node.connection)).splitlines()
    assert (lines[0], lines[-1]) == ("Status(", ")")
    assert max(map(len, lines)) <= 110
    assert "    scheduled=0," in lines  # it has no usual value
    [inbox] = [each for each in lines if "name='shipping'" in each]
    assert inbox.startswith("            name=")
    assert lines[lines.index(inbox) + 2] == "            backlog=2,"
    assert not [each for each in lines if "breaker_opened_at" in each or "order=" in each]
    assert repr(LinkStatus("lyon", "open", 0, 1, 2.5)) == (
        "LinkStatus(name='lyon', state='open', on_the_way=0, backlog=1, lag_s=2.5)"
    )
