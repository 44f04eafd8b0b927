"""Topics of a reader: an inbox gets those of its log that it wants, and passes over all others."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from inbox import Inbox, Worker
from inbox.by_key.claim import PIN
from inbox.by_log import lanes, log_claim
from inbox.sessions.hold import releasing
from mailroom import create_inbox, rename_inbox, set_inbox
from mailroom.errors import ConfigurationError
from mailroom.figures.logs import reading_readers
from mailroom.node.status import status
from mailroom.registry.listing import listing
from mailroom.registry.logs import listing_logs
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from tests.logs.support import Reader, keys_of, make
from tests.support.databases import Connect
from tests.support.explain import executed, nodes, prepared
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually, wait_until_blocked
from tests.support.working import working

TOPICS = ("order.paid", "order.sent", "order", "order.sent.late", "order.sent.very.late")


def write(node: Node, topics: str, key: str = "k") -> None:
    """Send a message of each of these topics of an order."""
    for topic in topics.split():
        node.send(topic, key=key)
    node.deliver_all()


def topics_of(reader: Reader) -> list[str]:
    """Take all, and return their topics in order of their clocks."""
    return [each.topic for each in sorted(reader.take_all(), key=lambda message: message.clock)]


def test_a_reader_gets_what_it_wants_wherever_it_looks(node: Node, connect: Connect) -> None:
    make(node, "all", lanes=2)
    wanted = {
        "exact": (["order.paid", "nothing"], ["order.paid"]),
        "one_word": (["order.*"], ["order.paid", "order.sent"]),
        "both": (["order.paid", "*.*.late"], ["order.paid", "order.sent.late"]),
        "any": (["order.sent.#"], ["order.sent", "order.sent.late", "order.sent.very.late"]),
    }
    for name, (topics, _) in wanted.items():
        with node.connection.transaction():
            create_inbox(node.connection, name, log="orders", topics=topics)
            create_inbox(node.connection, name, log="orders", topics=topics)
    write(node, " ".join(TOPICS))
    backlogs = {each.name: each.backlog for each in status(node.connection).inboxes}
    unread = {each.inbox: each.unread for each in run(node.connection, reading_readers(SCHEMA, []))}
    for name, (_, gets) in wanted.items():
        inbox = Inbox(name)
        assert inbox.backlog(node.connection) == backlogs[name] == unread[name] == len(gets)
        assert [each.topic for each in inbox.peek(node.connection)] == gets
        assert topics_of(Reader(connect(), name)) == gets
        assert inbox.backlog(node.connection) == 0
        with node.connection.transaction():
            inbox.rewind(node.connection, "start", actor="me")
        assert topics_of(Reader(connect(), name)) == gets
    assert topics_of(Reader(connect(), "all")) == list(TOPICS)
    [log] = run(node.connection, listing_logs(SCHEMA))
    assert log.wanted == {name: sorted(topics) for name, (topics, _) in wanted.items()}


def test_topics_are_changed_for_what_is_unread(node: Node, connect: Connect) -> None:
    node.inbox("shipping")
    make(node, "billing", topics="order.paid")
    reader = Reader(connect(), "billing")
    write(node, "order.paid order.sent")
    assert topics_of(reader) == ["order.paid"]
    with node.connection.transaction():
        assert set_inbox(node.connection, "billing", topics=["order.sent"], actor="me") == (
            "topics order.paid -> order.sent"
        )
        assert set_inbox(node.connection, "billing", topics=["order.sent"], actor="me") == ""
        for refused in (
            lambda: set_inbox(node.connection, "shipping", topics="order.sent"),
            lambda: create_inbox(node.connection, "late", topics="order.sent"),
            lambda: create_inbox(node.connection, "billing", log="orders", topics="order.paid"),
        ):
            with pytest.raises(ConfigurationError):
                refused()
        rename_inbox(node.connection, "billing", "invoices", actor="me")
    write(node, "order.paid order.sent")
    reader = Reader(connect(), "invoices")
    assert topics_of(reader) == ["order.sent"]
    with node.connection.transaction():
        assert set_inbox(node.connection, "invoices", topics="#", actor="me") == "topics order.sent -> none"
    [(log, topics)] = [(each["log"], each["topics"]) for each in run(node.connection, listing(SCHEMA, ["invoices"]))]
    assert (log, topics) == ("orders", [])
    write(node, "order.paid order.sent")
    assert topics_of(reader) == ["order.paid", "order.sent"]


@pytest.mark.parametrize("has_apart", [False, True])
def test_what_nobody_wants_is_passed_over_and_does_not_hold_the_commit(
    node: Node, connect: Connect, has_apart: bool
) -> None:
    make(node, "billing", lanes=1, topics="order.paid", backoff_s=60)
    reader = Reader(connect(), "billing")
    if has_apart:
        write(node, "order.paid", key="failing")
        reader.fail(reader.claim().messages[0], node.connection)
        assert reader.take_all() == []
    write(node, "order.sent " * 40 + "order.paid " + "order.sent " * 40 + "order.paid " * 12 + "order.sent")
    claims = 0
    clocks: list[int] = []
    while not (claimed := reader.claim(5, hold=True)).is_all or claimed.messages:
        if claimed.messages:
            run(reader.connection, releasing())
        reader.connection.commit()
        clocks += [each.clock for each in claimed.messages]
        claims += 1
    reader.connection.commit()
    found = node.rows("SELECT clock FROM mailroom.log WHERE topic = 'order.paid' AND key = 'k' ORDER BY clock")
    assert [(clock,) for clock in clocks] == found
    assert claims < 80 / 5  # it looks through more, the less of it is wanted
    position = "SELECT max(clock) FROM mailroom.receipts_billing"
    assert node.value(position) == node.value("SELECT max(clock) FROM mailroom.log")


def test_a_failing_key_diverts_only_what_is_wanted(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, topics="order.paid", backoff_s=60)
    write(node, "order.sent order.paid order.sent order.paid")
    reader = Reader(connect(), "billing")
    assert reader.fail(reader.claim().messages[0], node.connection).outcome == "retry"
    # It is the first of its key, though another one stands before it in the log.
    assert node.rows("SELECT attempts, retry_at > now() FROM mailroom.key_state") == [(1, True)]
    assert reader.take_all() == []
    assert node.delivered("topic") == [("order.paid",), ("order.paid",)]
    assert Inbox("billing").backlog(node.connection) == 2


def test_topics_that_are_ended_between_lock_and_read_lose_nothing(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(node, "billing", lanes=1, topics="order.paid")
    write(node, "order.sent order.paid")
    reader, operator = Reader(connect(), "billing"), connect()
    text = lanes.LOCK.template.replace(
        "WHERE (SELECT is_open", "WHERE (SELECT pg_advisory_xact_lock_shared(77) IS NOT NULL) AND (SELECT is_open"
    )
    monkeypatch.setattr(log_claim, "LOCK", Sql(text, lanes.LOCK.columns))
    operator.execute("SELECT pg_advisory_xact_lock(77)")
    with ThreadPoolExecutor(1) as thread:
        claiming = thread.submit(reader.claim)
        wait_until_blocked(node.connection, reader.connection.info.backend_pid)
        set_inbox(operator, "billing", topics="#")
        operator.commit()
        assert keys_of(claiming.result(60).messages) == ["k", "k"]


def test_a_worker_goes_on_through_what_it_does_not_want(node: Node) -> None:
    """More than one transaction looks through: each commits its position, and there is a next one."""
    make(node, "billing", lanes=1, topics="order.paid")
    write(node, "order.sent " * 700 + "order.paid " + "order.sent " * 700)
    taken: list[str] = []
    worker = Worker(node.dsn, "billing", lambda message, _: taken.append(message.topic), batch=1, poll_interval_s=60)
    with working(worker):
        last = "SELECT (SELECT max(clock) FROM mailroom.receipts_billing) = (SELECT max(clock) FROM mailroom.log)"
        eventually(lambda: node.value(last))
    assert taken == ["order.paid"]
    assert node.value("SELECT count(DISTINCT xmin::text) > 3 FROM mailroom.receipts_billing")


def test_topics_cost_no_sort_and_no_scan_of_their_own(node: Node) -> None:
    make(node, "billing", lanes=1, topics=["order.paid", "order.*.late"])
    write(node, "order.sent order.paid " * 300)
    values = {"lanes": "'{0}'", "first": "0", "per_lane": "10", "through": "40"}
    names = {"log": "orders", "segments": "1", "lowest": "NULL::bigint", "held": "false"}
    sorts = []
    for statement in (log_claim.READ_PLAIN, log_claim.READ_PLAIN_TOPICS, log_claim.READ, log_claim.READ_TOPICS):
        prepare, parameters = prepared(statement, names, inbox="billing")
        with node.connection.transaction(force_rollback=True):
            node.connection.execute(PIN.template.encode())
            node.connection.execute(prepare.encode())
            execute = executed([values.get(each, "NULL") for each in parameters])
            [row] = node.connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {execute}".encode()).fetchall()
            node.connection.execute("DEALLOCATE hot")
        plan = list(nodes(row[0][0]["Plan"]))
        sorts.append(sum(each["Node Type"] == "Sort" for each in plan))
        scans = [each for each in plan if each.get("Relation Name") == "log_1"]
        assert {each["Node Type"] for each in scans} == {"Index Scan"}
        assert max(each["Actual Rows"] for each in scans) <= 40
    assert sorts[0] == sorts[1]
    assert sorts[2] == sorts[3]
