"""Failing keys: listed, counted by their errors, and tried at once when an operator says so."""

import asyncio
from datetime import UTC, datetime

import psycopg
import pytest

from inbox import AsyncFailingKeys, FailingKeys, Inbox, Park
from inbox.by_key.due import healing, reaping_due
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing
from tests.support.roles import rights, role

pytestmark = [
    pytest.mark.inbox("shipping", backoff_s=3600), pytest.mark.node_sql(CLOCKS_ALLOWED),
]  # fmt: skip
FAILING = FailingKeys("shipping")
LATER = datetime(2200, 1, 1, tzinfo=UTC)


def fail(node: Node, **errors: Exception) -> None:
    """Send a message of each of these keys, whose first attempt fails."""
    for key in errors:
        node.send("shipping", key=key)
        node.send("shipping", key=key)
    node.deliver()
    for key, error in errors.items():
        with node.connection.transaction():
            [first] = Inbox("shipping").peek(node.connection, key, limit=1)
            run(node.connection, failing("shipping", first, error))


def due(node: Node) -> list[str]:
    """Take what is due, a message at a time, as workers do; return the keys."""
    keys = []
    with node.connection.transaction():
        while messages := run(node.connection, reaping_due(SCHEMA, "shipping")).messages:
            run(node.connection, healing(SCHEMA, "shipping", messages[-1]))
            keys += [each.key for each in messages]
    return keys


def test_failing_keys_are_listed_and_counted_by_error(node: Node) -> None:
    fail(node, a=OSError("host 1"), b=OSError("host 2"), c=ValueError("no street"), d=Park("a person looks"))
    assert {(each.key, each.attempts, each.reason) for each in FAILING.keys(node.connection)} == {
        ("a", 1, "OSError: host 1"), ("b", 1, "OSError: host 2"), ("c", 1, "ValueError: no street"),
    }  # fmt: skip
    assert [(each.error, each.keys) for each in FAILING.errors(node.connection)] == [("OSError", 2), ("ValueError", 1)]
    assert [each["key"] for each in json_of("inbox", "failing", "--error", "ValueError", dsn=node.dsn)] == ["c"]
    assert [each["keys"] for each in json_of("inbox", "failing", "shipping", "--by-error", dsn=node.dsn)] == [2, 1]
    assert len(json_of("inbox", "failing", "--matching", "host", "--limit", "1", dsn=node.dsn)) == 1
    head, _, row, *_ = done("inbox", "failing", "--by-error", dsn=node.dsn, COLUMNS="160").splitlines()
    assert (head.split()[2:4], row.split()[1:4]) == (["keys", "waiting"], ["OSError", "2", "2"])
    assert "There is no inbox 'nobody'" in error_of(mailroom("inbox", "failing", "nobody", dsn=node.dsn))
    with role(node.dsn, *rights("auditor")) as (_, given):
        assert len(json_of("inbox", "failing", dsn=given)) == 3


def test_retry_has_what_it_chooses_tried_at_once_and_leaves_the_rest(node: Node) -> None:
    fail(node, a=OSError("1"), b=OSError("2"), c=ValueError("3"), d=Park("4"), e=OSError("5"), tenant=OSError("6"))
    with node.connection.transaction():
        Inbox("shipping").pause(node.connection, "e", actor="ada")
        node.connection.execute(
            "INSERT INTO mailroom.breaker (inbox, prefix, separator, opened_at, opened_why, try_at) "
            "VALUES ('shipping', 'tenant', '/', now(), 'all', %s)", [LATER],
        )  # fmt: skip
    assert due(node) == []
    errors = [(each.error, each.keys, each.waiting) for each in FAILING.errors(node.connection)]
    assert errors == [("OSError", 3, 2), ("ValueError", 1, 1)]  # one waits for the breaker of its prefix
    would = json_of("inbox", "retry", "shipping", "--error", "OSError", "--dry-run", dsn=node.dsn)
    assert would == {"inbox": "shipping", "keys": ["a", "b"], "dry_run": True}
    assert due(node) == []
    # A role that has what operators have, and no more.
    with role(node.dsn, *rights("operator", "shipping")) as (_, given), psycopg.connect(given) as session:
        assert FAILING.retry(session, None, error="OSError", actor="ada", why="it is back") == ["a", "b"]
    assert node.rows("SELECT actor, action, inbox, key, messages, reason FROM mailroom.audit WHERE key < 'c'") == [
        ("ada", "inbox retry", "shipping", key, 0, "it is back") for key in "ab"
    ]
    assert due(node) == ["a", "b"]
    assert done("inbox", "retry", "shipping", "--key", "c", dsn=node.dsn) == "1 key will be tried at once.\n"
    assert due(node) == ["c"]
    for nothing in ("a", "d", "e", "tenant"):
        told = error_of(mailroom("inbox", "retry", "shipping", "--key", nothing, dsn=node.dsn))
        assert "no failing key among these" in told
    assert done("inbox", "retry", "shipping", "--all", dsn=node.dsn) == "0 keys will be tried at once.\n"
    assert due(node) == []
    for wrong in ([], ["--all", "--key", "a"]):
        assert mailroom("inbox", "retry", "shipping", *wrong, dsn=node.dsn).exit_code == 2


def test_total_inbox_is_retried_as_a_whole(node: Node) -> None:
    node.inbox("ledger", order="total")
    with node.connection.transaction(), pytest.raises(ConfigurationError, match="fails as a whole"):
        FailingKeys("ledger").retry(node.connection, "k", actor="ada")

    async def retried() -> list[str]:
        async with await psycopg.AsyncConnection.connect(node.dsn) as session:
            return await AsyncFailingKeys("ledger").retry(session, None, actor="ada")

    assert asyncio.run(retried()) == []
