"""Workers of inboxes that read one log: exactly once and in order by key, whatever fails or is ended."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import pytest

from dispatcher.delivery.deliver import delivering
from inbox import Inbox, Park, Skip, Worker
from inbox.by_key.claim import Share
from inbox.claims import Claims
from inbox.worker.in_flight import Entry, InFlight
from mailroom.message.message import Message
from mailroom.sql.runner import run
from tests.logs.support import Reader, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually
from tests.support.working import working

KEYS = [f"k{n}" for n in range(9)]
LEDGER = "CREATE TABLE ledger (n bigserial, inbox text, key text, clock bigint)"


def handler(inbox: str, failures: Counter[tuple[str, str]], lock: Lock) -> Callable[[Message, Any], None]:
    """Fail twice at every fifth message, skip one of k3, and park k4 at its eleventh."""

    def handle(message: Message, connection: Any) -> None:
        nth = message.value
        with lock:
            failures[inbox, message.key] += 1
            tries = failures[inbox, f"{message.key} {nth}"] = failures[inbox, f"{message.key} {nth}"] + 1
        if message.key == "k3" and nth == 5:
            raise Skip("not this one")
        if message.key == "k4" and nth == 10:
            raise Park("somebody has to look")
        if nth % 5 == 2 and tries < 3:
            raise ValueError("not yet")
        row = [inbox, message.key, message.clock]
        connection.execute("INSERT INTO ledger (inbox, key, clock) VALUES (%s, %s, %s)", row)

    return handle


@pytest.mark.parametrize("ends_sessions", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_reader_handles_each_message_once_and_in_order(node: Node, ends_sessions: bool) -> None:
    readers = ("billing", "search")
    make(node, *readers, lanes=5, backoff_s=0.02, backoff_max_s=0.05)
    node.connection.execute(LEDGER)
    failures, lock, draw = Counter[tuple[str, str]](), Lock(), random.Random(7)
    sent = Counter[str]()

    def settled() -> bool:
        left = "SELECT count(*) FROM mailroom.inbox WHERE key <> 'k4'"
        done = [node.value("SELECT count(*) FROM ledger WHERE inbox = %s", reader) for reader in readers]
        expected = sum(sent.values()) - 1 - (sent["k4"] - 10)
        return node.value(left) == 0 and done == [expected] * 2

    with contextlib.ExitStack() as workers:
        for reader in readers:
            for _ in range(2):
                handle = handler(reader, failures, lock)
                worker = Worker(node.dsn, reader, handle, parallel=2, batch=20, poll_interval_s=0.2)
                workers.enter_context(working(worker))
        for _ in range(25):
            with node.connection.transaction():
                pass
            for _ in range(20):
                key = draw.choice(KEYS)
                node.send("order.paid", sent[key], key=key)
                sent[key] += 1
            node.deliver_all()
            if ends_sessions and (backends := node.sessions("mailroom worker billing")):
                node.connection.execute("SELECT pg_terminate_backend(%s)", [draw.choice(backends)])
        eventually(settled)
    node.deliver_all()
    for reader in readers:
        rows = node.rows("SELECT key, clock FROM ledger WHERE inbox = %s ORDER BY n", reader)
        assert len(set(rows)) == len(rows)
        for key in KEYS:
            clocks = [clock for of, clock in rows if of == key]
            assert clocks == sorted(clocks)
        assert node.value("SELECT count(*) FROM mailroom.parked WHERE inbox = %s", reader) == sent["k4"] - 10
        assert node.value("SELECT count(*) FROM mailroom.dead_letter WHERE inbox = %s", reader) == 1


def test_a_death_is_counted_and_blames_the_message(node: Node, connect: Connect) -> None:
    """As `tests/worker/test_deaths.py` has it: an entry, and a batch that is rolled back without a word."""
    make(node, "billing", lanes=2, backoff_s=60)
    write(node, ["killer"])
    dead = connect()
    worker, entry, claims = InFlight(node.dsn, SCHEMA, "billing"), Entry(), Claims(SCHEMA, "billing")
    worker._processes.hold_lock(dead)
    claimed = run(dead, claims.claiming(Share(9, 9, 9, due_too=False)))
    order = run(dead, claims.looking_up())
    worker.add(entry, claimed.messages, entries=order.entries)
    worker._sender.settle()
    another = InFlight(node.dsn, SCHEMA, "billing")
    another.take_over()
    assert node.rows("SELECT FROM mailroom.worker") == [()]  # it is alive
    dead.rollback()
    dead.close()
    eventually(another.take_over)
    worker.close()
    another.close()
    assert node.rows("SELECT key, attempts FROM mailroom.key_state") == [("killer", 1)]
    reader = Reader(connect(), "billing")
    assert reader.take_all() == []
    assert node.delivered("key") == [("killer",)]


def test_a_death_after_the_commit_blames_nothing(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a", "b"])
    dead = connect()
    worker, claims = InFlight(node.dsn, SCHEMA, "billing"), Claims(SCHEMA, "billing")
    worker._processes.hold_lock(dead)
    claimed = run(dead, claims.claiming(Share(9, 9, 9, due_too=False)))
    order = run(dead, claims.looking_up())
    worker.add(Entry(), claimed.messages, entries=order.entries)
    worker._sender.settle()
    dead.commit()
    dead.close()
    another = InFlight(node.dsn, SCHEMA, "billing")
    eventually(another.take_over)
    worker.close()
    another.close()
    assert node.rows("SELECT FROM mailroom.key_state") == node.rows("SELECT FROM mailroom.worker") == []
    assert Inbox("billing").backlog(node.connection) == 0


def test_a_delivery_wakes_the_workers_of_all_readers_by_one_bell(node: Node, connect: Connect) -> None:
    """Also one that was about to sleep when the delivery began: it falls asleep after that has committed."""
    readers = ("billing", "search", "audit_log")
    make(node, *readers, lanes=2)
    taken = Counter[str]()
    asleep = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1835100527 AND granted"
    late = connect(autocommit=True)
    with contextlib.ExitStack() as workers:
        for reader in readers:
            handle = partial(lambda of, message, _: taken.update([f"{of} {message.key}"]), reader)
            worker = Worker(node.dsn, reader, handle, poll_interval_s=300)
            workers.enter_context(working(worker))
        eventually(lambda: node.value(asleep) == 2 * len(readers))
        write(node, ["a"])
        eventually(lambda: taken == {f"{reader} a": 1 for reader in readers})
        eventually(lambda: node.value(asleep) == 2 * len(readers))
        node.send("order.paid", key="b")
        totals = node.deliver_all()
        assert totals.delivered == 1
        eventually(lambda: taken == {f"{reader} {key}": 1 for reader in readers for key in "ab"})
    node.send("order.paid", key="c")
    late.execute("BEGIN")
    run(late, delivering(SCHEMA, rows=10, max_bytes=2**20, has_logs=True))
    with working(Worker(node.dsn, "billing", lambda message, _: taken.update([message.key]), poll_interval_s=300)):
        eventually(lambda: node.value(asleep.replace("granted", "NOT granted")) == 1)
        assert taken["c"] == 0
        late.execute("COMMIT")
        eventually(lambda: taken["c"] == 1)
