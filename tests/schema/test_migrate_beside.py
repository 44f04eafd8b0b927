"""Migrations beside programs that run: who waits for whom, and for how long."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy.exc import DatabaseError

from dispatcher import Dispatcher
from dispatcher.daemon import Executor
from inbox import AsyncWorker, Inbox, Message, Worker
from inbox.by_key.due import reaping_due
from mailroom import create_inbox, drop_inbox, rename_inbox, roles, schema
from mailroom.cli.root import root
from mailroom.embedded import Server
from mailroom.errors import ConfigurationError, SchemaError
from mailroom.schema import migration
from mailroom.schema.lock_phase import VIEWS, locked_by
from mailroom.sql.runner import run
from outbox import Outbox, Store
from tests.support.command import alembic
from tests.support.databases import Connect
from tests.support.next_release import HEAD, NEXT, known_to_migrate
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async, wait_until_blocked
from tests.support.working import deliver, working

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def next_release() -> Iterator[None]:
    with known_to_migrate():
        yield


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_handler_that_holds_its_batch_and_then_sends_is_not_cut(
    node: Node, connect: Connect, other: ThreadPoolExecutor, next_release: None
) -> None:
    node.send("shipping", key="k")
    node.deliver_all()
    batch, migrating = connect(), connect(application_name="mailroom migrate")
    assert len(Inbox("shipping").reap(batch, "k")) == 1
    migrated = other.submit(schema.migrate, migrating, revision=NEXT)
    blockers = wait_until_blocked(node.connection, migrating.info.backend_pid)
    assert blockers == [batch.info.backend_pid]
    Outbox().send(batch, "shipping", None, key="answer")
    batch.commit()
    migrated.result(WITHIN_S)
    migrating.commit()
    assert schema.current_revision(node.connection) == NEXT
    assert node.waiting() == ["answer"]


# What those who change the schema may call: all take the lock that migrations take.
CHANGES: list[Callable[[psycopg.Connection[Any]], object]] = [
    lambda connection: create_inbox(connection, "billing"),
    lambda connection: roles.grant(connection, "writer", "pg_monitor", actor="test"),
    lambda connection: roles.revoke(connection, "writer", "pg_monitor", actor="test"),
    lambda connection: drop_inbox(connection, "idle", actor="test"),
    lambda connection: rename_inbox(connection, "idle", "busy", actor="test"),
]
WAITS_LONG = "SELECT FROM pg_locks WHERE pid = %s AND clock_timestamp() - waitstart > '700 ms'"


@pytest.mark.slow
@pytest.mark.parametrize("holding", ["a message that was sent", "a batch"])
def test_transaction_that_changes_the_schema_meanwhile_is_not_cut(
    node: Node, connect: Connect, other: ThreadPoolExecutor, next_release: None, holding: str
) -> None:
    """Whatever it has locked before: it gets the lock that migrations take as well, at the latest between two tries."""
    node.inbox("idle")
    node.send("shipping", key="k")
    node.deliver_all()
    user, migrating = connect(), connect()
    for session in (user, migrating):
        session.execute("SET deadlock_timeout = '200ms'")
        session.commit()
    for change in CHANGES:
        if holding == "a message that was sent":
            Outbox().send(user, "shipping", None, key="k")
            migrated = other.submit(schema.migrate, migrating, revision=NEXT)
            wait_until_blocked(node.connection, migrating.info.backend_pid)
        else:  # for a batch a try waits for longer than deadlock_timeout, and is not looked at any more
            assert len(Inbox("shipping").reap(user, "k")) == 1
            migrated = other.submit(schema.migrate, migrating, revision=NEXT)
            eventually(lambda: node.rows(WAITS_LONG, migrating.info.backend_pid))
        change(user)
        user.rollback()
        migrated.result(WITHIN_S)
        migrating.rollback()


def test_others_go_on_while_a_migration_waits(
    node: Node, connect: Connect, other: ThreadPoolExecutor, next_release: None
) -> None:
    writing, migrating = connect(), connect()
    Outbox().send(writing, "shipping", None, key="slow")
    migrated = other.submit(schema.migrate, migrating, revision=NEXT)
    wait_until_blocked(node.connection, migrating.info.backend_pid)
    for key in ("a", "b", "c"):
        node.send("shipping", key=key)
    assert node.deliver_all().delivered == 3
    assert not migrated.done()
    writing.commit()
    migrated.result(WITHIN_S)
    migrating.commit()
    assert schema.current_revision(node.connection) == NEXT


def test_who_is_in_the_way_is_named_and_nothing_has_changed(node: Node, connect: Connect, next_release: None) -> None:
    node.send("shipping", key="k")
    node.deliver_all()
    batch, preparing, migrating = connect(application_name="shipping.py"), connect(), connect()
    Inbox("shipping").reap(batch, "k")
    preparing.tpc_begin(preparing.xid(1, "mailroom-migrate", "b"))
    preparing.execute("LOCK TABLE mailroom.inbox_registry IN ROW SHARE MODE")
    preparing.tpc_prepare()
    with pytest.raises(SchemaError) as refused:
        schema.migrate(migrating, revision=NEXT, lock_timeout_s=0)
    preparing.tpc_rollback()
    text = str(refused.value)
    assert text.startswith("Nothing was changed: after 0 s inbox_registry is still in use by a prepared transaction")
    assert f"pid {batch.info.backend_pid} (shipping.py, role {batch.info.user}, idle in transaction, has " in text
    assert "mailroom migrate --lock-timeout" in text
    for name, before in (("search_path", '"$user", public'), ("lock_timeout", "0"), ("statement_timeout", "0")):
        assert migrating.execute(f"SHOW {name}".encode()).fetchone() == (before,)
    assert schema.current_revision(migrating) == HEAD
    node.send("shipping", key="other")  # no lock is left


def test_second_migration_is_told_of_the_first(node: Node, connect: Connect, next_release: None) -> None:
    first, second = connect(), connect()
    schema.migrate(first, revision=NEXT)
    with pytest.raises(SchemaError, match=r"another migration, or .* in use by pid .*has ExclusiveLock\)"):
        schema.migrate(second, revision=NEXT, lock_timeout_s=0)
    first.commit()
    schema.migrate(second, revision=NEXT)


def test_two_migrations_that_wait_for_the_same_table_are_one(
    node: Node, connect: Connect, other: ThreadPoolExecutor, next_release: None
) -> None:
    """Both have read the revision before, and hold nothing meanwhile: who comes second looks again."""

    def committing(session: psycopg.Connection[Any]) -> None:
        schema.migrate(session, revision=NEXT)
        session.commit()

    writing, first, second = connect(), connect(), connect()
    Outbox().send(writing, "shipping", None)
    waits = "SELECT FROM pg_locks WHERE pid = %s AND locktype = 'relation' AND NOT granted"
    with ThreadPoolExecutor(1) as another:
        migrated = []
        for thread, session in ((other, first), (another, second)):
            migrated.append(thread.submit(committing, session))
            eventually(partial(node.rows, waits, session.info.backend_pid))
        writing.commit()
        for each in migrated:
            each.result(WITHIN_S)
    assert schema.current_revision(node.connection) == NEXT


# What a session has locked in a mode in which a writer would wait, of the tables and views that were there before.
LOCKED = """
SELECT DISTINCT relation FROM pg_locks JOIN unnest(%s::oid[]) AS there (oid) ON oid = relation
WHERE pid = pg_backend_pid() AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
THERE = """
SELECT coalesce(array_agg(c.oid ORDER BY c.oid), '{}')
FROM pg_class AS c WHERE relkind IN ('r', 'p', 'v') AND relname <> 'alembic_version'
  AND relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'mailroom')
"""
NAMED = "SELECT to_regclass('mailroom.' || name)::oid FROM unnest(%s::text[]) AS n (name)"
OF_INDEXES = "SELECT indrelid FROM pg_index WHERE indexrelid = ANY (%s)"


@pytest.mark.slow
def test_each_migration_locks_nothing_but_what_it_has_locked_before(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the server says: a statement that the search for locks does not understand shows here."""
    monkeypatch.setattr(migration, "_script", cache(migration._script))  # printing takes most of the time
    steps = schema.revisions()
    with psycopg.connect(empty_dsn) as connection:
        current = None
        for revision in (*steps, *reversed(steps[:-1]), "base"):
            statements = migration._script("mailroom", current, revision, True, migration.LOCK_TIMEOUT_S)
            names = locked_by(each for each in statements if "LOCK TABLE ONLY %s" not in each)
            [(there,)] = connection.execute(THERE).fetchall()
            named = {oid for (oid,) in connection.execute(NAMED, [names])}
            named |= {oid for (oid,) in connection.execute(OF_INDEXES, [list(named)])}
            schema.migrate(connection, revision=revision, discard=True)
            locked = {oid for (oid,) in connection.execute(LOCKED, [there])}
            assert locked <= named, (revision, names)
            current = revision
            connection.commit()


LOCKS: list[tuple[str, list[str]]] = [
    ('ALTER TABLE "mailroom".lease ADD COLUMN site text', ["lease"]),
    ("DROP TABLE IF EXISTS mailroom.lease, mailroom.node", ["lease", "node"]),
    ("CREATE UNIQUE INDEX i ON ONLY mailroom.lease (role)", ["lease"]),
    ("CREATE TRIGGER t BEFORE INSERT ON mailroom.outbox EXECUTE FUNCTION f()", ["inbox_registry", "outbox"]),
    ("UPDATE mailroom.my_parked SET seq = 1", ["inbox_registry", "my_parked", "parked"]),
    ("CREATE FUNCTION f() RETURNS void LANGUAGE sql BEGIN ATOMIC DELETE FROM mailroom.lease; END", []),
    ("SELECT 1", []),
]


def test_what_a_statement_locks_is_found_in_its_text() -> None:
    found = [(statement, sorted(locked_by([statement]))) for statement, _ in LOCKS]
    turns = ["dispatch_turn", "execute_turn"]
    assert found == [(statement, sorted([*turns, *names]) if names else []) for statement, names in LOCKS]
    assert [locked_by([statement])[:1] for statement, names in LOCKS if names] == [turns[:1]] * (len(LOCKS) - 2)


VIEWED = """
SELECT DISTINCT v.relname::text, t.relname::text
FROM pg_class AS v JOIN pg_rewrite AS r ON r.ev_class = v.oid
JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
JOIN pg_class AS t ON t.oid = d.refobjid AND t.oid <> v.oid AND t.relkind IN ('r', 'p')
WHERE v.relkind = 'v' AND v.relnamespace = 'mailroom'::regnamespace
"""


def test_tables_of_each_view_are_known(node: Node) -> None:
    assert {(view, table) for view, tables in VIEWS.items() for table in tables} == set(node.rows(VIEWED))


def test_lock_timeout_is_a_number_of_seconds(node: Node) -> None:
    nonsense: list[Any] = [-1, float("nan"), "5", True]
    for timeout in nonsense:
        with pytest.raises(ConfigurationError, match="lock_timeout_s must be"):
            schema.migrate(node.dsn, lock_timeout_s=timeout)


MIGRATIONS = 6
AHEAD = 500  # messages that writers may be ahead of the workers, so that a slow machine is not left with a backlog
# A slow machine may take its time for the migration, and then it is told who waits for it.
EXPECTED = re.compile(r"on purpose| waits for |working without in-flight entries|held up by a lock .*LockNotAvailable")


@pytest.mark.slow
async def test_programs_of_the_release_before_go_on_under_load_while_the_next_one_migrates(
    node: Node, connect: Connect, next_release: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Up and down under old dispatchers, executors, workers and writers: no error for anybody, and nothing is lost."""
    node.connection.execute("CREATE TABLE handled (nth bigserial, key text, value int)")
    done = threading.Event()
    failed: set[str] = set()
    room = threading.Semaphore(AHEAD)

    async def handle(message: Message, connection: Any) -> None:
        room.release()
        await connection.execute("INSERT INTO handled (key, value) VALUES (%s, %s)", [message.key, message.value])
        if message.key not in failed:
            failed.add(message.key)
            raise LookupError("on purpose")  # so that failures are recorded too

    def is_above(count: int) -> bool:
        return bool(node.value("SELECT count(*) > %s FROM handled", count))

    def is_empty(table: str) -> bool:
        return not node.rows(f"SELECT FROM mailroom.{table} LIMIT 1")

    def write(name: str) -> int:
        with psycopg.connect(node.dsn) as connection:
            sent = 0
            while not done.is_set():
                if not room.acquire(timeout=0.1):
                    continue
                Outbox().send(connection, "shipping", sent, key=f"{name}{sent % 7}")
                Store().increment(connection, "sent", 1)
                connection.commit()
                sent += 1
        return sent

    programs: list[Any] = [Dispatcher(node.dsn), Executor(node.dsn)]
    programs += [AsyncWorker(node.dsn, "shipping", handle, parallel=2, batch=50) for _ in range(2)]
    tasks = [asyncio.create_task(program.run()) for program in programs]
    writers = [asyncio.create_task(asyncio.to_thread(write, name)) for name in "ab"]
    try:
        for nth in range(MIGRATIONS):
            await schema.migrate_async(node.dsn, revision=NEXT if nth % 2 == 0 else HEAD)
            handled = node.value("SELECT count(*) FROM handled")
            await eventually_async(partial(is_above, handled))
    finally:
        done.set()
        sent = [await writer for writer in writers]
    try:
        for table in ("outbox", "inbox", "outbox_executable"):
            await eventually_async(partial(is_empty, table))
    finally:
        for program in programs:
            program.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), WITHIN_S)
    assert node.rows("SELECT count(*), count(DISTINCT (key, value)) FROM handled") == [(sum(sent), sum(sent))]
    in_order = "SELECT key, value, lag(value) OVER (PARTITION BY key ORDER BY nth) AS before FROM handled"
    assert node.rows(f"SELECT FROM ({in_order}) AS o WHERE before > value") == []
    assert node.rows("SELECT number FROM mailroom.store") == [(sum(sent),)]
    told = [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]
    assert [text for text in told if not EXPECTED.search(text)] == []


HELD = """
SELECT DISTINCT relation::regclass::text FROM pg_locks JOIN pg_class AS c ON c.oid = relation
WHERE pid = %s AND granted AND relkind IN ('r', 'p') AND relnamespace = 'mailroom'::regnamespace
"""


@pytest.mark.parametrize("claim", ["a key", "any", "due", "total"])
def test_claim_locks_the_registry_before_anything_else(
    node: Node, connect: Connect, other: ThreadPoolExecutor, claim: str
) -> None:
    """Planned anew or not: a migration that has the registry finds no claim that has another table."""
    node.inbox("total", order="total")
    claiming = connect()

    def take() -> None:
        if claim == "a key":
            Inbox("shipping").reap(claiming, "k", 1)
        elif claim == "due":
            run(claiming, reaping_due(SCHEMA, "shipping"))
        else:
            Inbox("total" if claim == "total" else "shipping").reap_any(claiming, 1)

    for _ in range(2):  # the second one's statements are prepared
        with connect() as locking:
            locking.execute("LOCK TABLE mailroom.inbox_registry")
            taken = other.submit(take)
            wait_until_blocked(node.connection, claiming.info.backend_pid)
            assert node.rows(HELD, claiming.info.backend_pid) == []
        taken.result(WITHIN_S)
        claiming.commit()


@pytest.mark.slow
def test_waiting_is_told_and_given_up_by_the_command_and_alembic(node: Node, connect: Connect) -> None:
    writing = connect(application_name="import.py")
    Outbox().send(writing, "shipping", None)  # its trigger also reads the node, for the first messages that there are
    who = rf"in use by pid {writing.info.backend_pid} \(import.py, role "
    down = ["migrate", "--dsn", node.dsn, "--revision", "base", "--lock-timeout", "3.5"]
    done = CliRunner().invoke(root, down)
    assert done.exit_code == 1
    assert re.search(f"(?m)^The migration waits for (?:node|outbox), {who}", done.stderr)
    assert re.search(f"Nothing was changed: after 3.5 s (?:node|outbox) is still {who}", done.stderr)
    with pytest.raises(DatabaseError, match=f"Nothing was changed: after 0 s (?:node|outbox) is still {who}"):
        alembic("-x", f"dsn={node.dsn}", "-x", "lock_timeout=0", "downgrade", "base")


def test_batch_does_not_fail_because_the_table_of_entries_is_locked(
    node: Node, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a migration changes it; what goes without then is said."""
    calls: list[str] = []
    with connect() as locking:
        locking.execute("LOCK TABLE mailroom.worker")
        deliver(node, "a", "b", "c", "d")  # before: a claim that finds nothing waits for the table
        with working(Worker(node.dsn, "shipping", lambda message, _: calls.append(message.key), batch=1)):
            eventually(lambda: not node.rows("SELECT FROM mailroom.inbox"))
            locking.rollback()
    assert sorted(calls) == ["a", "b", "c", "d"]
    assert "their table is locked" in caplog.text
    assert "retrying the batch" not in caplog.text


SLOW_VACUUM = """
ALTER TABLE mailroom.attempt SET (autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0,
                                  autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)
"""


@pytest.mark.slow
def test_autovacuum_gives_way_to_a_migration(private_server: Server, next_release: None) -> None:
    """It does so for a session that has waited for deadlock_timeout, which is longer than a try of the migration."""
    with psycopg.connect(private_server.dsn(), autocommit=True) as connection:
        with connection.transaction():
            schema.migrate(connection, revision=HEAD)
        connection.execute(SLOW_VACUUM)
        connection.execute(
            "INSERT INTO mailroom.attempt (inbox, key, clock, message_id, attempt, outcome, error) "
            "SELECT 'shipping', 'k', n, gen_random_uuid(), 1, 'retry', repeat('x', 500) FROM generate_series(1, 9999) n"
        )
        connection.execute("DELETE FROM mailroom.attempt")
        connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
        connection.execute("SELECT pg_reload_conf()")
        vacuumed = "SELECT FROM pg_stat_progress_vacuum WHERE relid = 'mailroom.attempt'::regclass"
        eventually(lambda: connection.execute(vacuumed).fetchall())
        connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1h'")  # once it has given way it does not come back
        connection.execute("SELECT pg_reload_conf()")
        with psycopg.connect(private_server.dsn()) as migrating:
            schema.migrate(migrating, revision=NEXT, lock_timeout_s=WITHIN_S)
            migrating.commit()
        assert schema.current_revision(connection) == NEXT
    assert "canceling autovacuum task" in (private_server.directory / "server.log").read_text()
