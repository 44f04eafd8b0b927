"""tests/sql: each hot statement is the one in its file, as the server gets it."""

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from inbox import Inbox
from mailroom import create_inbox
from outbox import Outbox
from tests.golden import FILES, golden, statements
from tests.support.databases import Connect
from tests.support.hot import HOT, MODULES

ANEW = "tests/sql is out of date; this writes it anew: python -m tests.golden"
SHOWN = 1_000  # bytes of a statement that pg_stat_activity shows, at least


@pytest.mark.slow
def test_each_hot_statement_is_the_one_in_its_file() -> None:
    files = {file.stem: file.read_text() for file in FILES.glob("*.sql")}
    made = {name: golden(hot) for name, hot in HOT.items()}
    assert [name for name in made.keys() | files.keys() if files.get(name) != made.get(name)] == [], ANEW


def test_every_statement_of_a_hot_module_is_hot() -> None:
    named = {id(hot.sql) for hot in HOT.values()}
    found = [(module.__name__, *each) for module in MODULES for each in statements(vars(module)).items()]
    missing = [(module, name) for module, name, sql in found if id(sql) not in named]
    assert missing == [], "give it a name in tests/support/hot.py"


def test_files_have_what_reaches_the_server(connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping")
    connection, other = connect(), connect(autocommit=True)
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    Outbox().send(
        connection, "t", 1, key="k", headers={"a": "b"}, event_type="C", deliver_at=moment, expires_at=moment,
        after_clock=1,
    )  # fmt: skip
    assert shown(other, connection) == text("insert")
    Inbox("shipping").reap_any(connection)
    assert shown(other, connection) == text("reap-plain")


def shown(other: psycopg.Connection[Any], connection: psycopg.Connection[Any]) -> str:
    row = other.execute("SELECT query FROM pg_stat_activity WHERE pid = %s", [connection.info.backend_pid]).fetchone()
    assert row is not None
    return str(row[0])[:SHOWN]


def text(name: str) -> str:
    lines = (FILES / f"{name}.sql").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("-- "))[:SHOWN]
