"""Unawaited: a statement that is sent without waiting arrives, and its error is raised at the next use."""

import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from inbox.sessions import unawaited
from inbox.sessions.unawaited import Unanswered, Unawaited
from mailroom.session.home import Home
from mailroom.sql.operation import Execute, Sql
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.proxy import proxied
from tests.support.waiting import eventually

pytestmark = pytest.mark.node_sql("CREATE TABLE posted (n bigint PRIMARY KEY, text text)")

POSTED = Sql("INSERT INTO {schema}.posted VALUES (%(n)s::bigint, %(text)s::text)")
ONCE = Sql("INSERT INTO {schema}.posted VALUES (%(n)s::bigint, '') ON CONFLICT DO NOTHING")


def step(n: int, text: str = "100 %", table: str = "public") -> Execute:
    return POSTED.at(schema=table)(n=n, text=text)


def posted(node: Node) -> list[int]:
    return [n for (n,) in node.rows("SELECT n FROM posted ORDER BY n")]


@pytest.fixture
def sender(node: Node) -> Iterator[Unawaited]:
    sender = Unawaited(node.dsn, "sender", {"plan_cache_mode": "force_generic_plan"})
    yield sender
    sender.close()


def test_what_is_sent_arrives_in_order_on_one_session(node: Node, sender: Unawaited) -> None:
    for n in range(20):
        sender.send(step(n))
    with sender.session() as connection:
        assert connection.execute("SELECT count(*), min(text) FROM posted").fetchone() == (20, "100 %")
    sender.send(step(20))
    sender.close()
    assert posted(node) == list(range(21))
    eventually(lambda: node.sessions("mailroom sender") == [])


def test_statement_is_planned_once_in_a_session(node: Node, sender: Unawaited) -> None:
    planned = "SELECT generic_plans, custom_plans FROM pg_prepared_statements"
    for n in range(12):
        sender.send(step(n))
    with sender.session() as connection:
        [(generic, custom)] = connection.execute(planned).fetchall()
    assert (generic, custom) == (12, 0)


def test_nobody_waits_for_what_is_sent(node: Node, sender: Unawaited, connect: Connect) -> None:
    holder = connect()
    holder.execute("INSERT INTO posted VALUES (1)")
    sender.send(step(1))  # the server waits for the holder
    holder.rollback()
    eventually(lambda: posted(node) == [1])


def test_statement_larger_than_any_buffer_is_sent_too(node: Node, sender: Unawaited) -> None:
    sender.send(step(1, "x" * 20_000_000))
    sender.close()
    assert node.value("SELECT length(text) FROM posted") == 20_000_000


def test_refused_statement_raises_at_the_next_use_and_not_again(node: Node, sender: Unawaited) -> None:
    sender.send(step(1))
    sender.send(step(1))
    with pytest.raises(psycopg.errors.UniqueViolation):
        sender.send(step(2))
    sender.send(step(3))
    sender.close()
    assert posted(node) == [1, 3]


def test_session_that_was_lost_is_opened_again(node: Node, sender: Unawaited) -> None:
    sender.send(step(1))
    eventually(lambda: posted(node) == [1])
    node.end_sessions("mailroom sender")
    sender.send(step(2))
    eventually(lambda: posted(node) == [1, 2])


def test_statement_outlives_the_rollback_of_a_transaction_on_its_session(node: Node, sender: Unawaited) -> None:
    sender.send(step(1))
    with sender.session() as connection:
        for _ in range(10):  # as often as psycopg takes to prepare it
            connection.execute("SELECT 1")
        with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
            connection.execute("SELECT 1 / 0")
    sender.send(step(2))
    sender.close()
    assert posted(node) == [1, 2]


def test_server_that_does_not_answer_is_reported_and_left(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxied(node.dsn) as (network, dsn):
        sender = Unawaited(dsn, "sender", {})
        sender.send(step(1))
        eventually(lambda: posted(node) == [1])
        with sender.session():
            network.black_hole()
        sender.send(step(2))
        with monkeypatch.context() as impatient:
            impatient.setattr(unawaited, "WITHIN_S", 0.2)
            with pytest.raises(Unanswered):
                sender.send(step(3))
        network.forward()
        sender.send(step(4))
        sender.close()
    assert posted(node) == [1, 2, 4]  # the one that raised was not sent; the one that was lost was sent again


def test_statement_that_waited_too_long_for_a_lock_is_sent_again(node: Node, connect: Connect) -> None:
    sender, holder = Unawaited(node.dsn, "sender", {"lock_timeout": "50ms"}), connect()
    holder.execute("INSERT INTO posted VALUES (1)")
    with sender.session() as session:
        pass
    sender.send(ONCE.at(schema="public")(n=1))
    eventually(lambda: select.select([session], [], [], 0)[0] == [session])  # its answer has come
    holder.rollback()
    sender.settle()
    assert posted(node) == [1]
    sender.close()


DIES = """
import os, sys
from inbox.sessions.unawaited import Unawaited
from tests.worker.test_unawaited import step
sender = Unawaited(sys.argv[1], "sender", {})
sender.send(step(1))
sender.send(step(2))
os._exit(1)
"""


@pytest.mark.slow
def test_what_was_sent_arrives_though_the_process_dies_the_next_moment(node: Node) -> None:
    for nth in range(1, 4):
        node.connection.execute("TRUNCATE posted")
        assert subprocess.run([sys.executable, "-c", DIES, node.dsn]).returncode == 1, nth
        eventually(lambda: posted(node) == [1, 2])


def test_session_that_is_opened_anew_after_the_close_is_open_for_one_use_only(node: Node) -> None:
    """A handler's thread may still remove its entry when the worker has closed its sessions."""
    sender = Unawaited(node.dsn, "sender", {})
    sender.settle()
    sender.close()
    sender.send(Sql("SELECT 1", columns=("integer",)).at()())
    eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE application_name = 'mailroom sender'"))


def test_close_opens_no_session_for_what_a_use_has_settled_that_it_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's own thread and that of a handler may both be at their last use."""
    opened: list[str] = []
    connect = Home.connect

    def counting(home: Home, role: str, session: Mapping[str, str]) -> psycopg.Connection:
        opened.append(role)
        return connect(home, role, session)

    monkeypatch.setattr(Home, "connect", counting)
    sender = Unawaited(node.dsn, "sender", {})
    sender.send(step(1))
    with ThreadPoolExecutor() as threads:
        with sender.session():
            sender._unanswered = step(1)  # as between sending it and its answer
            closing = threads.submit(sender.close)
            eventually(lambda: sender._is_closed)
            sender._unanswered = None
        closing.result()
    assert opened == ["sender"]
    eventually(lambda: node.sessions("mailroom sender") == [])


def test_close_cuts_off_a_use_that_does_not_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unawaited, "WITHIN_S", 0.01)
    sender = Unawaited(node.dsn, "sender", {})

    def use() -> None:
        with sender.session() as connection:
            with ThreadPoolExecutor() as threads:
                threads.submit(sender.close).result()
            connection.execute("SELECT 1")

    with pytest.raises(psycopg.OperationalError):
        use()
    eventually(lambda: node.sessions("mailroom sender") == [])
