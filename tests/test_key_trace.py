"""Finding a key: all places that have messages of it, within bounds, and what was not looked at."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from inbox import Inbox, Park
from mailroom import Links, subscribe
from mailroom.node import key_trace
from mailroom.node.key_trace import PLACES, STATES, UNREAD, trace_key
from mailroom.sql.runner import run
from outbox import Store
from tests.logs.support import Reader, make, write
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.explain import executed, nodes, prepared
from tests.support.node import Node, failing
from tests.support.roles import rights, role

KEY = "order-42"


def stand(node: Node) -> None:
    """Have messages of the key everywhere."""
    make(node, "search", lanes=4)
    write(node, [KEY, KEY])
    node.inbox("shipping", "order.#", max_attempts=1, keep_reaped_days=3)
    node.inbox("billing", "order.#", backoff_s=3600)
    node.inbox("ledger", "order.#", order="total")
    for topic in ("order.paid", "order.sent", "nobody.wants"):
        node.send(topic, key=KEY)
    node.deliver_all()
    with node.connection.transaction():
        assert len(Inbox("shipping").reap(node.connection, KEY, 1)) == 1
        for inbox, error in (("shipping", Park("carrier")), ("billing", ValueError("street"))):
            [first] = Inbox(inbox).peek(node.connection, KEY, limit=1)
            run(node.connection, failing(inbox, first, error))
        Inbox("ledger").pause(node.connection, actor="ada")
        Store().put(node.connection, KEY, b"12")
    node.send("order.paid", key=KEY, deliver_at=datetime.now(UTC) + timedelta(hours=5))
    node.deliver_all()
    node.send("order.paid", key=KEY)
    node.send("order.paid", key="order-43")


def test_key_is_found_wherever_it_is(node: Node, connect: Connect) -> None:
    stand(node)
    with connect() as session:
        assert [each.key for each in Reader(session, "search").take(1)] == [KEY]
    found = trace_key(node.connection, KEY)
    assert Counter((each.where, each.inbox) for each in found.places) == {
        ("outbox", None): 1, ("scheduled", None): 1, ("outbox_executable", None): 1, ("parked", "shipping"): 1,
        ("reaped", "shipping"): 1, ("inbox", "billing"): 2, ("inbox", "ledger"): 2, ("dead_letter", None): 1,
        ("log", "orders"): 4,
    }  # fmt: skip
    assert {(each.key, each.topic == "order-43") for each in found.places} == {(KEY, False)}
    assert [(each.inbox, each.state, each.attempts, each.error) for each in found.states] == [
        ("billing", "failing", 1, "ValueError: street"), ("shipping", "parked", 1, "carrier"),
    ]  # fmt: skip
    assert [(each.inbox, each.log, each.unread) for each in found.unread] == [("search", "orders", 3)]
    assert found.unseen == ()
    text = done("trace", "--key", KEY, dsn=node.dsn)
    assert "The key in inbox billing is failing, 1 times so far" in text
    assert "Inbox search has yet to read 3 of its messages in log orders, from clock" in text
    assert text.count(" is in log orders") == 4
    told = json_of("trace", "--key", KEY, "--limit", "1", dsn=node.dsn)
    assert [each["where"] for each in told["places"]].count("log") == 1
    assert {each["place"] for each in told["unseen"]} == {"log orders", "inbox billing", "inbox ledger"}
    assert json_of("trace", "--key", "nobody", dsn=node.dsn, exit_code=1)["places"] == []
    assert "Nothing of key 'nobody' was found" in error_of(mailroom("trace", "--key", "nobody", dsn=node.dsn))
    for wrong in ([], [str(found.places[0].id), "--key", KEY], [str(found.places[0].id), "--limit", "3"]):
        assert mailroom("trace", *wrong, dsn=node.dsn).exit_code == 2


def test_what_is_not_looked_at_is_told(node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    stand(node)
    for name in ("LOOKED", "LOOKED_OF_ALL", "LOOKED_OF_EACH"):
        monkeypatch.setattr(key_trace, name, 2)
    node.send("order.paid", key=KEY)
    end = "it has no index by key, and only its 2"
    assert {(each.place, each.why) for each in trace_key(node.connection, KEY).unseen} == {
        ("the outbox", f"{end} oldest rows were looked at"), ("log orders", f"{end} newest rows were looked at"),
        ("log orders", "inbox search has more than 2 messages of lane 0 to read"),
    }  # fmt: skip
    monkeypatch.undo()
    with connect() as holder:
        holder.execute("LOCK TABLE mailroom.inbox_billing, mailroom.scheduled")
        found = trace_key(node.connection, KEY)
        assert not {each.where for each in found.places} & {"scheduled"}
        assert {each.inbox for each in found.places if each.where == "inbox"} == {"ledger"}
        assert {each.place for each in found.unseen} == {"inbox_billing", "scheduled"}
        holder.rollback()
    with role(node.dsn, *rights("metrics")) as (_, given):
        told = mailroom("trace", "--key", KEY, "--json", dsn=given)
        assert told.exit_code == 1
        assert len(json.loads(told.stdout)["unseen"]) == len(PLACES) + 2
    with role(node.dsn, *rights("auditor")) as (_, given), psycopg.connect(given) as session:
        assert trace_key(session, KEY).places == trace_key(node.connection, KEY).places


def test_no_place_is_read_from_end_to_end(node: Node, connect: Connect) -> None:
    stand(node)
    with node.connection.transaction():
        Links().allow(node.connection, "lyon", actor="ada")
        subscribe(node.connection, "billing", "order.#")
    with connect() as session:
        session.execute("SET LOCAL enable_seqscan = off")  # what is left has no index for it
        for statement in (*(place.find for place in PLACES), STATES, UNREAD):
            prepare, parameters = prepared(statement, {"rows": "21", "most": "101", "but": ""})
            session.execute(prepare.encode())
            [(plan,)] = session.execute(
                f"EXPLAIN (FORMAT json) {executed(['NULL'] * len(parameters))}".encode()
            ).fetchall()
            session.execute("DEALLOCATE hot")
            scans = {each["Relation Name"] for each in nodes(plan[0]["Plan"]) if each["Node Type"] == "Seq Scan"}
            assert scans <= {"link", "inbox_registry", "log_registry"}, statement.template
