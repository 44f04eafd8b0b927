"""Breakers of prefixes, of an inbox that reads a log: keys of an open one leave the log and wait, others go on."""

from collections import Counter
from typing import Any

import pytest

from inbox import Worker, breakers
from inbox.worker import limiting
from mailroom import set_inbox
from mailroom.registry.breakers import Prefix
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.logs.support import Reader, in_order, keys_of, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually
from tests.support.working import working

OPEN: dict[str, Any] = {"prefixes": ["a"], "separator": "/"}


def do(node: Node, operation: Operation[Any]) -> Any:
    with node.connection.transaction():
        return run(node.connection, operation)


def test_the_keys_of_an_open_prefix_leave_the_log_and_wait(node: Node, connect: Connect) -> None:
    make(node, "billing", breaker=50, breaker_by="/")
    write(node, ["a/1", "b/1", "a/1", "ab", "a", "b/1"])
    assert do(node, breakers.opening_prefix(SCHEMA, "billing", Prefix("a", "/"), "why"))
    seen = do(node, breakers.deferring(SCHEMA, "billing"))
    reader = Reader(connect(), "billing")
    claimed = reader.claim(**OPEN)
    assert sorted(keys_of(claimed.messages)) == ["ab", "b/1", "b/1"]
    reader.connection.rollback()
    assert node.rows("SELECT FROM mailroom.key_state") == node.rows("SELECT FROM mailroom.inbox_billing") == []
    assert sorted(keys_of(reader.claim(**OPEN).messages)) == ["ab", "b/1", "b/1"]
    reader.connection.commit()
    assert node.rows("SELECT key, attempts FROM mailroom.key_state ORDER BY key") == [("a", 0), ("a/1", 0)]
    write(node, ["a/1", "c"])
    assert keys_of(reader.claim(**OPEN).messages) == ["c"]
    reader.connection.commit()
    assert reader.take_all() == []
    seen = do(node, breakers.deferring(SCHEMA, "billing", seen))
    late = "retry_at < now() + interval '50 min'"
    assert node.value(f"SELECT count(*) FROM mailroom.key_state WHERE {late}") == 0
    node.connection.execute("UPDATE mailroom.breaker SET try_at = now()")
    assert do(node, breakers.granting(SCHEMA, "billing", "a"))
    [tried] = reader.take(due=True)
    assert tried.key in ("a", "a/1")
    assert do(node, breakers.closing_prefix(SCHEMA, "billing", "a"))
    node.connection.execute("UPDATE mailroom.key_state SET retry_at = now()")
    rest = [tried]
    while taken := reader.take(due=True) or reader.take():
        rest += taken
    assert Counter(keys_of(rest)) == {"a/1": 3, "a": 1}
    assert in_order(rest)
    assert node.rows("SELECT FROM mailroom.key_state") == node.rows("SELECT FROM mailroom.inbox_billing") == []
    write(node, ["a/1"])
    assert keys_of(reader.take()) == ["a/1"]


@pytest.mark.slow
def test_workers_keep_to_breakers_of_prefixes_in_a_log(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiting, "LOOK_S", 0.05)
    make(node, "billing", backoff_s=0, max_attempts=1000)
    with node.connection.transaction():
        set_inbox(node.connection, "billing", breaker=50, breaker_by="/")
    node.connection.execute("CREATE TABLE ledger (n bigserial, key text, clock bigint)")
    is_down = True

    def handle(message: Any, connection: Any) -> None:
        if is_down and message.key.startswith("a/"):
            raise ConnectionError("down")
        connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])

    done = "SELECT count(*) FROM ledger WHERE key ^@ '{}'"
    with working(Worker(node.dsn, "billing", handle, parallel=2, batch=10, poll_interval_s=0.1)):
        write(node, [f"a/{n % 3}" for n in range(30)])
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.breaker") == 1)
        write(node, [f"{prefix}/{n % 3}" for n in range(30) for prefix in "ab"])
        eventually(lambda: node.value(done.format("b/")) == 30)
        assert node.value(done.format("a/")) == 0
        is_down = False
        node.connection.execute("UPDATE mailroom.breaker SET try_at = now()")
        eventually(lambda: node.value(done.format("a/")) == 60)
    rows = node.rows("SELECT key, clock FROM ledger ORDER BY n")
    assert len(set(rows)) == len(rows) == 90
    for key in {key for key, _ in rows}:
        clocks = [clock for of, clock in rows if of == key]
        assert clocks == sorted(clocks)
