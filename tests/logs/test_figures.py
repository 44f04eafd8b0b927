"""What is told of logs and their readers: what is unread, lanes that stand, and which inbox holds disk."""

import re
from datetime import datetime
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from inbox import Inbox
from mailroom import create_inbox
from mailroom.doctor import examine, finding
from mailroom.figures.inboxes import UNREAD
from mailroom.figures.logs import READING, LogReading, LogState, reading_logs, reading_readers
from mailroom.figures.statistics import EXACT
from mailroom.metrics.leader import Added, sampling
from mailroom.metrics.look import Watch
from mailroom.node.status import status
from mailroom.registry.logs import set_log
from mailroom.sql import locks
from mailroom.sql.locked import reading_locked
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from tests.dashboard.conftest import browsing
from tests.logs.support import DAY, NOW, Reader, days, make, write
from tests.support.command import done, json_of
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.roles import rights, role


def readers(node: Node, now: datetime | None = None) -> dict[str, LogReading]:
    found = run(node.connection, reading_readers(SCHEMA, run(node.connection, reading_locked(SCHEMA)), now))
    return {each.inbox: each for each in found}


def logs(node: Node) -> list[LogState]:
    return run(node.connection, reading_logs(SCHEMA, run(node.connection, reading_locked(SCHEMA))))


def test_an_inbox_that_stands_still_holds_what_is_older_than_its_log_keeps(node: Node, connect: Connect) -> None:
    make(node, "billing", "search")
    first, *_ = days(node, 10, keys="ab")
    Reader(connect(), "search").take_all()
    found = readers(node, NOW + 10 * DAY)
    [log] = logs(node)
    assert (log.segments, log.since) == (11, NOW - DAY / 2)
    billing, search = found["billing"], found["search"]
    assert (billing.unread, billing.oldest_s, billing.behind_s) == (20, 10 * DAY.total_seconds(), 0)
    assert (billing.held_segments, billing.held_since) == (3, NOW + DAY / 2 + 7 * DAY)
    assert 0 < billing.held_bytes < log.bytes
    assert (search.unread, search.oldest_s, search.held_segments, search.held_since) == (0, 0, 0, None)
    node.connection.execute("UPDATE mailroom.log_segment SET opened_at = opened_at - interval '30 years'")
    [shown] = status(node.connection).logs
    assert (shown.name, shown.segments, shown.bytes, shown.held_by) == ("orders", 11, log.bytes, ("billing",))
    [told] = json_of("log", "status", "orders", dsn=node.dsn)
    assert [(each["inbox"], each["unread"], each["held_segments"]) for each in told["readers"]] == [
        ("billing", 20, 10), ("search", 0, 0),
    ]  # fmt: skip
    for words in (("log", "status"), ("status",)):
        assert "billing" in done(*words, dsn=node.dsn)
    with node.connection.transaction():
        Inbox("search").rewind(node.connection, first, actor="test")
    assert readers(node)["search"].unread == Inbox("search").backlog(node.connection) == 19
    assert {each.name: each.backlog for each in status(node.connection).inboxes} == {"billing": 20, "search": 19}
    with node.connection.transaction():
        set_log(node.connection, "orders", drop_unread=True)
    assert readers(node)["billing"].held_segments == 0  # it goes with the next round of a janitor


def test_a_lane_that_stands_while_others_go_on_is_told(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    days(node, 1, keys="ad")
    (_, lane_a), (_, lane_d) = node.rows("SELECT key, lane FROM mailroom.log ORDER BY key")
    assert lane_a != lane_d
    reader, holder = Reader(connect(), "billing"), connect()
    holder.execute("SELECT FROM mailroom.lanes_billing WHERE lane = %s FOR UPDATE", [lane_a])
    reader.take_all()
    assert readers(node)["billing"].behind_s == 0  # they came at the same time
    write(node, ["d"])
    node.connection.execute("UPDATE mailroom.log_tick SET at = %s WHERE at > %s", [NOW + DAY, NOW])
    reader.take_all()
    found = readers(node, NOW + 2 * DAY)["billing"]
    assert (found.lane, found.behind_s, found.oldest_s, found.unread) == (
        lane_a, DAY.total_seconds(), 2 * DAY.total_seconds(), 1,
    )  # fmt: skip
    holder.rollback()
    reader.take_all()
    assert readers(node)["billing"].behind_s == 0


def test_the_doctor_and_metrics_tell_of_readers(node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    make(node, "billing", "search", lanes=2)
    days(node, 1, keys="ad")
    holder = connect()
    holder.execute("SELECT FROM mailroom.lanes_billing WHERE lane = (SELECT lane FROM mailroom.log WHERE key = 'a') "
                   "FOR UPDATE")  # fmt: skip
    write(node, ["d"])
    node.connection.execute("UPDATE mailroom.log SET delivered_at = now() - interval '1 day' WHERE key = 'a'; "
                            "UPDATE mailroom.log_tick SET at = now(); "
                            "UPDATE mailroom.log_segment SET opened_at = opened_at - interval '30 days'; "
                            "UPDATE mailroom.inbox_registry SET lost = 7, lost_at = now(), lost_since = now() "
                            "WHERE name = 'search'")  # fmt: skip
    Reader(connect(), "billing").take_all()
    asleep = connect(autocommit=True)
    asleep.execute("SELECT pg_advisory_lock_shared(%s, %s)", [
        locks.ASLEEP, node.value("SELECT ('mailroom.inbox_billing'::regclass::oid::bigint - 2147483648)::int"),
    ])  # fmt: skip
    asked = Mock(wraps=reading_readers)
    monkeypatch.setattr(finding, "reading_readers", asked)
    with node.connection.transaction():
        found = {each.id: each.evidence for each in examine(node.connection)}
    asked.assert_called_once()  # by five checks; with hundreds of readers each time takes seconds
    assert found["M027"][0].startswith("inbox search: the oldest unread message was delivered 1 day, 0:00:0")
    assert found["M053"][0].startswith("inbox billing: the oldest message was delivered 1 day, 0:00:0")
    assert [line.split(",")[0] for line in found["M054"]] == [
        f"inbox {each}: holds 1 segments of log orders" for each in ("billing", "search")
    ]
    [stands] = found["M055"]
    assert stands.startswith("inbox billing: others were read 1 day, 0:00:0")
    assert found["M056"][0].startswith("inbox search: 7 messages of log orders since ")
    sample = run(node.connection, sampling(SCHEMA, Added(SCHEMA)))
    figures: dict[str, Any] = {family.name: dict(samples) for family, samples in sample.items()}
    assert figures["inbox_unread_messages"] == {("billing",): 1, ("search",): 3}
    assert figures["inbox_lost_total"] == {("billing",): 0, ("search",): 7}
    assert figures["log_segments"] == {("orders",): 2}
    assert min(figures["inbox_oldest_seconds"].values()) >= DAY.total_seconds()
    assert figures["inbox_held_bytes"]["billing",] > 0 == figures["inbox_lane_behind_seconds"]["search",]
    look = run(node.connection, Watch().looking())
    assert {each.name: each.waiting for each in look.inboxes} == {"billing": 1, "search": 3}
    assert {"M054", "M055", "M056"} <= {each.id for each in look.troubles}


def test_what_is_unread_is_an_estimate_beyond_some_messages(node: Node) -> None:
    make(node, "billing", "search", lanes=64)
    for name, topic in (("refunds", "order.refunded"), ("nothing", "order.lost")):
        with node.connection.transaction():
            create_inbox(node.connection, name, log="orders", topics=[topic])
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, key, value_json) SELECT "
        "CASE WHEN n %% 4 = 0 THEN 'order.refunded' ELSE 'order.paid' END, 'one', '1' "
        "FROM generate_series(1, %s) AS n", [4 * EXACT],
    )  # fmt: skip
    node.deliver_all()
    node.connection.execute("SELECT pg_stat_force_next_flush()")
    node.connection.execute(
        "INSERT INTO mailroom.receipts_search SELECT inbox, lane, epoch, (SELECT max(clock) - 1500 FROM mailroom.log) "
        "FROM mailroom.receipts_search"
    )
    found = readers(node)
    assert 3.6 * EXACT <= found["billing"].unread <= 4.4 * EXACT  # all are of one lane
    assert 1.3 * EXACT <= found["search"].unread <= 1.7 * EXACT
    assert 0.9 * EXACT <= found["refunds"].unread <= 1.1 * EXACT
    assert found["nothing"].unread == 1  # none of those that were looked at; so there may be one
    node.connection.execute("SELECT pg_stat_reset()")
    assert readers(node)["billing"].unread == EXACT + 1


@pytest.mark.parametrize("statement", [READING, UNREAD])
def test_the_figures_of_readers_probe_and_do_not_scan(node: Node, statement: Sql) -> None:
    """Also by a plan that was made while the log was empty; and no position of another reader is locked for it."""
    make(node, "billing", "search", "other")
    names = {"schema": SCHEMA, "names": "billing', 'search", "log": "orders", "lanes": "4"}
    sql, _ = statement.at(**names).numbered
    node.connection.execute("SET plan_cache_mode = force_generic_plan")
    node.connection.execute(b"PREPARE figures AS " + sql)
    execute = "EXPLAIN EXECUTE figures" + (" (NULL)" if b"$1" in sql else "")
    plan = str(node.rows(execute))
    assert not re.search("Seq Scan on (log_1|log_tick|receipts)", plan)
    assert plan.count(" using log_1_lane") == (3 if statement is READING else 1)
    assert ("receipts_billing" in plan, "receipts_other" in plan) == (True, False)


def test_a_log_that_is_locked_costs_no_other_its_figures_and_roles_see_them(node: Node, connect: Connect) -> None:
    make(node, "billing")
    make(node, "search", log="clicks")
    locker = connect()
    locker.execute("LOCK TABLE mailroom.log_1")
    assert list(readers(node)) == ["search"]
    assert [each.name for each in status(node.connection).inboxes] == ["search"]
    assert [each.bytes > 0 for each in logs(node)] == [True, False]
    locker.rollback()
    for purpose in ("metrics", "auditor", "dispatcher"):
        with role(node.dsn, *rights(purpose)) as (_, dsn), psycopg.connect(dsn, autocommit=True) as session:
            assert len(run(session, reading_readers(SCHEMA, []))) == len(run(session, reading_logs(SCHEMA, []))) == 2
            if purpose != "metrics":
                run(session, sampling(SCHEMA, Added(SCHEMA)))
            if purpose != "dispatcher":
                assert len(json_of("log", "status", dsn=dsn)) == len(json_of("log", "list", dsn=dsn)) == 2
                assert len(status(session).logs) == 2
            if purpose == "auditor":
                with browsing(dsn) as browser:
                    assert "/inboxes/search" in browser.get("/logs/clicks").text
                    assert "/logs/orders" in browser.get("/logs").text
                with session.transaction():
                    unseen = [line for each in examine(session) if each.id == "M000" for line in each.evidence]
                assert [line for line in unseen if re.search("M027|M05[3456]", line)] == []
