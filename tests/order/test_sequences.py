"""A node whose rows were copied without their sequences: by replication, by a dump of some tables, row by row."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import ObjectNotInPrerequisiteState

from dispatcher.daemon import deliver_all, execute_all
from inbox import Inbox
from mailroom import create_inbox, schema
from mailroom.embedded import Binaries, Server
from mailroom.links.handshake.identity import JUMP
from mailroom.links.start import starting
from mailroom.order.sequences import finding_behind, raising_sequences
from mailroom.sql.runner import run
from mailroom.values.codec import encode
from outbox import Store
from tests.support.command import json_of, mailroom
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.pages import page_named
from tests.support.waiting import eventually, wait_until_blocked

pytestmark = pytest.mark.both_versions

BEYOND = 1_000_000
EXECUTABLE = "INSERT INTO mailroom.outbox_executable (operation, key, value) VALUES ('put', 'k', %s)"
RECEIVED = "SELECT mailroom.cbor_to_jsonb(value)::int FROM mailroom.inbox_shipping ORDER BY clock"


def send(node: Node, *numbers: int) -> None:
    for number in numbers:
        node.send("order.paid", number, key="k")


def restart(node: Node, *sequences: str) -> None:
    """Let sequences begin anew, as where only rows were copied to."""
    for sequence in sequences:
        node.connection.execute(sql.SQL("ALTER SEQUENCE mailroom.{} RESTART").format(sql.Identifier(sequence)))


def copy(node: Node, table: str, **values: Any) -> None:
    """Insert a row as a copy does, with its number and its transaction."""
    node.connection.execute(
        sql.SQL("INSERT INTO mailroom.{} ({}) OVERRIDING SYSTEM VALUE VALUES ({})").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, values)),
            sql.SQL(", ").join([sql.Placeholder()] * len(values)),
        ),
        list(values.values()),
    )


LETTER: dict[str, Any] = {"stage": "s", "reason": "r", "topic": "t", "key": "k", "kind": "M", "message_type": "U",
          "message_id": "0" * 32, "sent_at": "2026-01-01"}  # fmt: skip


def test_every_number_that_the_database_gives_out_is_of_a_known_sequence(node: Node) -> None:
    """A new one is raised by a leader and by `migrate`; for replication it also needs its trigger."""
    for (table,) in node.rows(
        "SELECT DISTINCT table_name::text FROM information_schema.columns WHERE table_schema = 'mailroom' "
        "AND (is_identity = 'YES' OR column_default ~ 'nextval')"
    ):
        fires = node.rows(
            "SELECT tgname, tgenabled::text FROM pg_trigger WHERE tgrelid = ('mailroom.' || %s)::regclass "
            "AND tgname IN ('copied', 'zz_checked')", table,
        )  # fmt: skip
        assert fires in ([("copied", "R")], [("zz_checked", "A")]), table


def test_sequences_that_are_behind_are_raised_and_never_lowered(node: Node) -> None:
    rows: dict[str, dict[str, Any]] = {
        "audit": {"id": 12, "actor": "a", "action": "b", "messages": 0},
        "dead_letter": LETTER | {"id": 70},
        "link": {"number": 3, "name": "south"},
        "origin": {"number": 5, "name": "north"},
    }
    for table, values in rows.items():
        copy(node, table, **values)
    highest = {"audit": 12, "dead_letter": 70, "link": 3, "origin": 5}
    behind = run(node.connection, finding_behind(SCHEMA))
    assert {each.table: each.value for each in behind} == highest
    raised = run(node.connection, raising_sequences(SCHEMA))
    assert {each.table: each.value for each in raised} == {table: n + BEYOND for table, n in highest.items()}
    assert run(node.connection, raising_sequences(SCHEMA)) == run(node.connection, finding_behind(SCHEMA)) == []
    assert node.value("SELECT nextval('mailroom.audit_id_seq')") == 13 + BEYOND


def test_two_that_raise_a_sequence_at_once_raise_it_once(node: Node, connect: Connect) -> None:
    """Or the second one would lower it again to below what was drawn since."""
    raising = "SELECT mailroom.raise_sequence('mailroom.outbox_position_seq', 39)"
    with connect() as one, connect(autocommit=True) as other, ThreadPoolExecutor(1) as thread:
        one.execute("SELECT FROM mailroom.node FOR NO KEY UPDATE")
        second = thread.submit(other.execute, raising)
        wait_until_blocked(node.connection, other.info.backend_pid)
        assert one.execute(raising).fetchall() == [(39 + BEYOND,)]
        send(node, 1)
        one.commit()
        assert second.result().fetchall() == [(None,)]
    send(node, 2)
    assert node.rows("SELECT position FROM mailroom.outbox ORDER BY 1") == [(40 + BEYOND,), (41 + BEYOND,)]


def test_scheduled_messages_count_for_the_outbox(node: Node) -> None:
    node.send("order.paid", deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
    node.deliver_all()
    restart(node, "outbox_position_seq")
    [raised] = run(node.connection, raising_sequences(SCHEMA))
    assert (raised.table, raised.column, raised.value) == ("outbox", "position", 1 + BEYOND)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["migrate", "dispatcher"])
def test_messages_sent_after_the_move_come_behind_those_that_waited(node: Node, way: str) -> None:
    node.inbox("shipping", "order.paid")
    send(node, *range(40))
    restart(node, "outbox_position_seq")
    if way == "migrate":
        done = json_of("migrate", dsn=node.dsn)
        assert done["raised"] == [{"table": "outbox", "column": "position", "value": 40 + BEYOND}]
        assert json_of("migrate", dsn=node.dsn)["raised"] == []
    else:
        with node.connection.transaction():
            [raised] = run(node.connection, starting(SCHEMA)).raised
        assert raised.value == 40 + BEYOND
    send(node, *range(40, 80))
    deliver_all(node.dsn)
    assert node.rows(RECEIVED) == [(number,) for number in range(80)]


def test_status_says_what_is_behind_and_migrate_what_it_raised(node: Node) -> None:
    copy(node, "audit", id=12, actor="a", action="b", messages=0)
    assert json_of("status", dsn=node.dsn)["behind"] == [{"table": "audit", "column": "id", "value": 12}]
    assert "audit.id: its sequence is behind its rows: mailroom migrate" in mailroom("status", dsn=node.dsn).output
    told = mailroom("migrate", dsn=node.dsn).output
    assert "audit.id was behind its rows, as after a move, and goes on after 1,000,012." in told
    assert json_of("status", dsn=node.dsn)["behind"] == []


def test_executor_that_is_first_raises_too(node: Node) -> None:
    node.connection.execute(EXECUTABLE, [b"old"])
    restart(node, "outbox_executable_position_seq")
    execute_all(node.dsn)
    assert node.value("SELECT nextval('mailroom.outbox_executable_position_seq')") > 1


@pytest.mark.parametrize("role", ["origin", "replica"])
def test_copied_rows_raise_before_the_first_send(node: Node, role: str) -> None:
    """No leader has started and nobody has migrated: the rows that come say how far the sequence must be."""
    node.inbox("shipping", "order.paid")
    node.connection.execute(f"SET session_replication_role = {role}".encode())
    for number in range(38, 70):
        copy(node, "outbox", xact="7", position=number, topic="order.paid", key="k", value=encode(number))
        copy(node, "outbox_executable", xact="7", position=number, operation="put", key="k", value=b"old")
    node.connection.execute("SET session_replication_role = origin")
    send(node, 70)
    node.connection.execute(EXECUTABLE, [b"new"])
    assert node.value("SELECT count(*) FROM mailroom.outbox WHERE position > %s", BEYOND) == 1
    deliver_all(node.dsn)
    execute_all(node.dsn)
    assert node.rows(RECEIVED) == [(number,) for number in range(38, 71)]
    assert node.value("SELECT value FROM mailroom.store WHERE key = 'k'") == b"new"


def test_replicated_rows_of_other_tables_raise_too(node: Node) -> None:
    node.connection.execute("SET session_replication_role = replica")
    copy(node, "dead_letter", **LETTER, id=70)
    copy(node, "scheduled", **{n: LETTER[n] for n in LETTER if n not in ("stage", "reason")},
         deliver_at="2100-01-01", position=8, value_json="1")  # fmt: skip
    node.connection.execute("SET session_replication_role = origin")
    assert node.value("SELECT last_value FROM mailroom.dead_letter_id_seq") == 70 + BEYOND
    send(node, 1)
    assert node.value("SELECT position FROM mailroom.outbox") == 9 + BEYOND


@pytest.mark.parametrize("table", ["inbox", "transit", "parked"])
def test_clock_goes_on_beyond_rows_that_came_without_the_row_of_the_node(node: Node, table: str) -> None:
    """A new node knows nothing of them, and would give their clocks out again."""
    node.inbox("shipping", "order.paid")
    node.connection.execute("UPDATE mailroom.node SET system_id = NULL")
    message = {name: LETTER[name] for name in LETTER if name not in ("stage", "reason")} | {"value_json": "1"}
    clocks: dict[str, dict[str, Any]] = {
        "inbox": {"inbox": "shipping", "clock": 2**40, "sent_clock": 2**40, "origin": "0" * 32},
        "parked": {"inbox": "shipping", "clock": 2**40, "sent_clock": 2**40, "origin": "0" * 32},
        "transit": {"link": 1, "seq": 1, "sent_clock": 2**40, "stamped_at": "2026-01-01"},
    }
    copy(node, table, **message, **clocks[table])
    send(node, 1)
    node.deliver_all()
    assert node.value("SELECT max(clock) FROM mailroom.inbox WHERE value_json IS NULL") > 2**40 + JUMP


def test_send_draws_one_position_and_no_more(node: Node) -> None:
    for position in range(1, 4):
        with node.connection.transaction(), node.connection.transaction():
            send(node, position)
        assert node.value("SELECT max(position) FROM mailroom.outbox") == position


# -- Real copies ------------------------------------------------------------------------------------------------------


@contextmanager
def database(server: Server, name: str, *, made: bool = True) -> Iterator[Node]:
    """A database of a server, with a node that was just made, or without."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'".encode())
    dsn = server.dsn().replace("/mailroom", f"/{name}")
    if made:
        schema.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Node(dsn, connection)


def dump(binaries: Binaries, source: Node, target: Node, *options: str, sequences: bool = True) -> None:
    """Restore into `target` what `pg_dump` writes of `source` with these options."""
    if not (binaries.path / "pg_dump").exists():
        pytest.skip("this PostgreSQL has no pg_dump")
    dumped = subprocess.run([binaries.path / "pg_dump", *options, source.dsn], check=True, capture_output=True).stdout
    if not sequences:
        dumped = b"\n".join(line for line in dumped.split(b"\n") if b"setval(" not in line)
    psql = [str(binaries.path / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", target.dsn]
    subprocess.run(psql, input=dumped, check=True, capture_output=True)


def used(node: Node) -> None:
    """Let a node have delivered messages and letters of its own, and others that wait."""
    node.inbox("shipping", "order.paid")
    send(node, *range(38))
    node.send("nobody.asked", kind="C")
    node.deliver_all()
    send(node, *range(38, 70))
    with node.connection.transaction():
        for value in (b"1", b"2"):
            Store().put(node.connection, "k", value)


def check_moved(node: Node, next: int) -> None:
    """Send before any leader has started, and find all of it after what waited."""
    send(node, *range(next, 75))
    node.send("nobody.asked", kind="C")
    with node.connection.transaction():
        Store().put(node.connection, "k", b"3")
    deliver_all(node.dsn)
    execute_all(node.dsn)
    with node.connection.transaction():
        numbers = [message.value for message in Inbox("shipping").reap(node.connection, "k", 100)]
    assert numbers == list(range(75))
    assert node.value("SELECT value FROM mailroom.store WHERE key = 'k'") == b"3"
    assert node.value("SELECT count(*) FROM mailroom.dead_letter") == 2


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [True, False])
def test_dump_of_the_rows_into_a_schema_that_was_just_made(
    private_server: Server, binaries: Binaries, sequences: bool
) -> None:
    with database(private_server, "blue") as blue, database(private_server, "green") as green:
        used(blue)
        green.inbox("shipping")  # a partition is not a row
        for table in ("node", "inbox_registry", "alembic_version", "audit"):
            green.connection.execute(f"DELETE FROM mailroom.{table}".encode())
        dump(binaries, blue, green, "--data-only", "--schema=mailroom", sequences=sequences)
        check_moved(green, 70)


@pytest.mark.slow
def test_schema_that_was_copied_without_its_rows_takes_no_messages(private_server: Server, binaries: Binaries) -> None:
    """However often somebody tries; once the rows are there it goes on as the node that it is."""
    with database(private_server, "blue") as blue, database(private_server, "green", made=False) as green:
        used(blue)
        dump(binaries, blue, green, "--schema-only", "--schema=mailroom")
        for _ in range(2):
            with green.connection.transaction(), pytest.raises(ObjectNotInPrerequisiteState, match="has the tables of"):
                green.send("shipping")
            with green.connection.transaction(), pytest.raises(ObjectNotInPrerequisiteState, match="and no node"):
                Store().put(green.connection, "k", b"1")
        for sequence in ("outbox_position_seq", "outbox_executable_position_seq"):
            assert green.rows(f"SELECT last_value, is_called FROM mailroom.{sequence}") == [(1, False)]
        dump(binaries, blue, green, "--data-only", "--schema=mailroom")
        check_moved(green, 70)


@pytest.mark.slow
def test_logical_replication_to_another_database(private_server: Server, binaries: Binaries) -> None:
    """Step by step as in docs/operate/moving.md: copied rows, and what happens to them and others meanwhile."""
    with psycopg.connect(private_server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_level = logical")
    private_server.stop()
    private_server.start()
    with database(private_server, "blue") as blue, database(private_server, "green", made=False) as green:
        used(blue)
        dump(binaries, blue, green, "--schema-only", "--schema=mailroom")
        told = re.search(r"SELECT 'CREATE PUBLICATION.*?(?= *\\gexec)", page_named("moving.md").read_text(), re.DOTALL)
        assert told
        [[publish]] = blue.connection.execute(told[0].encode()).fetchall()
        blue.connection.execute(publish.encode())
        # Both databases are of one server, where a subscription cannot make its slot itself.
        blue.connection.execute("SELECT pg_create_logical_replication_slot('moving', 'pgoutput')")
        green.connection.execute(
            sql.SQL("CREATE SUBSCRIPTION moving CONNECTION {} PUBLICATION moving WITH (create_slot = false)").format(
                blue.dsn
            )
        )
        eventually(lambda: not green.value("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"))
        blue.connection.execute(f"CREATE TABLE mailroom.staging_{'0' * 32} AS SELECT 1 AS row".encode())  # by Spark
        blue.deliver_all()
        send(blue, 70, 71)
        blue.connection.execute(EXECUTABLE, [b"by hand"])
        caught_up = "SELECT replay_lsn >= %s::pg_lsn FROM pg_stat_replication WHERE application_name = 'moving'"
        end = blue.value("SELECT pg_current_wal_lsn()::text")
        eventually(lambda: blue.value(caught_up, end))
        green.connection.execute("ALTER SUBSCRIPTION moving DISABLE")
        green.connection.execute("ALTER SUBSCRIPTION moving SET (slot_name = NONE)")
        green.connection.execute("DROP SUBSCRIPTION moving")
        assert green.value("SELECT count(*) FROM mailroom.outbox") == 2
        last = blue.value("SELECT max(clock) FROM mailroom.inbox")
        check_moved(green, 72)
        assert blue.value("SELECT id FROM mailroom.node") == green.value("SELECT id FROM mailroom.node")
        assert green.value("SELECT last_value FROM mailroom.clock") > last + JUMP


@pytest.mark.slow
def test_a_crash_gives_no_number_out_again_where_little_is_logged(private_server: Server) -> None:
    with psycopg.connect(private_server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_level = minimal")
        connection.execute("ALTER SYSTEM SET max_wal_senders = 0")
    private_server.stop()
    private_server.start()
    with psycopg.connect(private_server.dsn()) as connection:
        schema.migrate(connection)
        create_inbox(connection, "shipping")
    with psycopg.connect(private_server.dsn()) as connection:
        create_inbox(connection, "billing")
    postmaster = int((private_server.directory / "data" / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGQUIT)  # no checkpoint
    eventually(lambda: not (private_server.directory / "data" / "postmaster.pid").exists())
    private_server.start()
    with psycopg.connect(private_server.dsn()) as connection:
        assert run(connection, finding_behind("mailroom")) == []
