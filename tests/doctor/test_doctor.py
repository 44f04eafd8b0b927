"""The doctor: a node is broken in each way, and exactly that is found, with a command that mends it."""

import asyncio
import contextlib
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import pq
from psycopg.conninfo import make_conninfo

from dispatcher import Dispatcher
from inbox import Worker
from inbox.worker import in_flight
from mailroom.doctor import Finding, Limits, examine, examine_async, examining
from mailroom.doctor import locks as doctor_locks
from mailroom.doctor import settings as doctor_settings
from mailroom.doctor.examining import CHECKS
from mailroom.doctor.finding import Examination, asking
from mailroom.embedded import Server
from mailroom.errors import ConfigurationError, NotInTransaction, SchemaError
from mailroom.roles import grant
from mailroom.schema import migrate
from mailroom.sql import locks
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S, eventually, wait_until_blocked
from tests.support.working import working

# Servers of tests are fast and not durable, and the doctor says so.
OF_THE_SERVER = {"M028", "M029"}
# Nothing counts because of how long this machine takes for it.
AT_ANY_PACE = {each.name: 3_600 for each in fields(Limits) if each.name.endswith("_s")}

pytestmark = [
    pytest.mark.inbox("shipping", "orders"),
    *(pytest.mark.inbox(name) for name in ("spare", "left", "lone", "keyless")),
    pytest.mark.inbox("ledger", order="total"),
]


@pytest.fixture(autouse=True)
def _batches_are_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)


def examined(node: Node, **limits: Any) -> dict[str, Finding]:
    """What is found by id, but for what is wrong with each server of tests."""
    with node.connection.transaction():
        found = {each.id: each for each in examine(node.connection, limits=Limits(**limits))}
    return {id: each for id, each in found.items() if id not in OF_THE_SERVER}


def test_new_node_is_well_but_for_the_server_of_tests(node: Node) -> None:
    assert examined(node) == {}
    with node.connection.transaction():
        found = examine(node.connection)
    assert [each.id for each in found] == sorted(OF_THE_SERVER)
    assert found[0].evidence == ("fsync is off", "full_page_writes is off")


LEASE = """
INSERT INTO mailroom.lease (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts)
SELECT '{role}', gen_random_uuid(), 1, clock_timestamp() + '{until}'::interval, 'mill', 17, a.pid, a.backend_start,
       'awake', '{{}}' FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid()"""
OLD = "now() - interval '1 h'"
OF_DATABASE = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I {} synchronous_commit{}', current_database()); END $$"
BY_COMMAND = None  # what the finding says mends it
# What breaks a node, what is found, what its evidence names, and what mends it.
BROKEN = [
    ("ALTER TABLE mailroom.outbox SET (autovacuum_enabled = off)", "M008", "mailroom.outbox", BY_COMMAND),
    (
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'mailroom.audit_at'::regclass",
        "M011", "mailroom.audit_at on mailroom.audit", BY_COMMAND,
    ),
    ("DROP INDEX mailroom.attempt_at", "M012", "attempt_at", BY_COMMAND),
    ("ALTER TABLE mailroom.outbox DROP CONSTRAINT outbox_pkey", "M012", "outbox_pkey", BY_COMMAND),
    ("ALTER TABLE mailroom.inbox_keyless DROP CONSTRAINT key_of_keyless", "M012", "key_of_keyless", BY_COMMAND),
    ("DROP INDEX mailroom.clock_of_shipping", "M012", "clock_of_shipping", BY_COMMAND),
    ("DROP INDEX mailroom.order_of_ledger", "M012", "order_of_ledger", BY_COMMAND),
    ("ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_spare", "M013", "is detached", BY_COMMAND),
    (
        ("ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_left; "
        "DELETE FROM mailroom.inbox_registry WHERE name = 'left'"),
        "M013", "mailroom.inbox_left is not a partition", "INSERT INTO mailroom.inbox_registry (name) VALUES ('left')",
    ),
    (
        "DELETE FROM mailroom.inbox_registry WHERE name = 'lone'",
        "M014", "mailroom.inbox_lone", "INSERT INTO mailroom.inbox_registry (name) VALUES ('lone')",
    ),
    (
        "INSERT INTO mailroom.subscription (topic, inbox) VALUES ('orders', 'nowhere')",
        "M015", "nowhere has subscribed to orders", BY_COMMAND,
    ),
    ("ALTER TABLE mailroom.outbox ENABLE TRIGGER zz_checked", "M016", "zz_checked of outbox fires at", BY_COMMAND),
    (
        "ALTER TABLE mailroom.outbox_executable DISABLE TRIGGER checked",
        "M016", "checked of outbox_executable is disabled", BY_COMMAND,
    ),
    ("DROP TRIGGER doorbell ON mailroom.outbox", "M016", "doorbell of outbox does not exist", BY_COMMAND),
    ("DROP TRIGGER copied ON mailroom.audit", "M016", "copied of audit does not exist", BY_COMMAND),
    (
        ("INSERT INTO mailroom.audit (actor, action, messages) VALUES ('me', 'test', 0), ('me', 'test', 0); "
        "SELECT setval('mailroom.audit_id_seq', 1, false)"),
        "M017", "audit.id: a row has ", "SELECT mailroom.raise_sequences()",
    ),
    ("ALTER SEQUENCE mailroom.outbox_position_seq CACHE 20", "M018", "CACHE 20", BY_COMMAND),
    (
        "SELECT setval('mailroom.attempt_id_seq', 9000000000000000000)",
        "M019", "attempt_id_seq", "SELECT setval('mailroom.attempt_id_seq', 1, false)",
    ),
    (
        "SELECT setval('mailroom.clock', 4611686018427387905)",
        "M020", "clock 4611686018427387905, ceiling 0", "SELECT setval('mailroom.clock', 0)",
    ),
    ("SELECT", "M021", "clock 4611686018427387905", "SELECT"),  # by the same clock
    (
        f"INSERT INTO mailroom.origin (name, created_at) VALUES ('north', {OLD})",
        "M022", "another node or a broker is to be served since 01:00:0", "DELETE FROM mailroom.origin",
    ),
    (
        f"INSERT INTO mailroom.outbox_executable (operation, key, sent_at) VALUES ('delete', 'k', {OLD})",
        "M022", "something waits for the executor since", "DELETE FROM mailroom.outbox_executable",
    ),
    (
        f"INSERT INTO mailroom.outbox (topic, value_json, sent_at) VALUES ('orders', '1', {OLD}); "
        + LEASE.format(role="dispatcher", until="1 h"),
        "M023", "something waits for the dispatcher since 01:00:0", "DELETE FROM mailroom.outbox",
    ),
    (LEASE.format(role="executor", until="-2 min"), "M024", "executor on mill pid 17", "DELETE FROM mailroom.lease"),
    (
        ("UPDATE mailroom.lease SET set_back_at = clock_timestamp() - interval '50 min', set_back_by = '40.5 s', "
        "brought_back = 7 WHERE role = 'executor'"),
        "M052", "7 keys that would have waited as long go on", "SELECT",
    ),
    (
        ("INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number) "
        f"VALUES (gen_random_uuid(), 'shipping', 'mill', 17, {OLD}, 1, '{{k}}', '{{1}}', -7)"),
        "M026", "worker mill pid 17: 1 messages", "DELETE FROM mailroom.worker",
    ),
    (OF_DATABASE.format("SET", " = off"), "M029", "of DATABASE", OF_DATABASE.format("RESET", "")),
    (
        "ALTER TABLE mailroom.inbox_ledger OWNER TO pg_monitor",
        "M049", "mailroom.inbox_ledger belongs to role pg_monitor, and the node to role", BY_COMMAND,
    ),
    (
        ("INSERT INTO mailroom.spark_bulk (name, batch, source, constants, messages, moved, at) "
        f"SELECT b.*, 's', '{{}}', 50000, 10000, {OLD} FROM (VALUES ('orders', 7), ('day''s', -1)) AS b; "
        "INSERT INTO mailroom.spark_staging (token, name, batch, part, messages) "
        "VALUES ('00000000-0000-0000-0000-0000000000aa', 'day''s', -1, 0, 40000)"),
        "M051", "batch 7 of 'orders': 40,000 of 50,000 messages are left, and none was moved for 01:00:0",
        "DELETE FROM mailroom.spark_bulk",
    ),
    ("GRANT SELECT, DELETE ON mailroom.outbox TO PUBLIC", "M035", "mailroom.outbox: SELECT, DELETE", BY_COMMAND),
    ("GRANT CREATE ON SCHEMA mailroom TO PUBLIC", "M036", "mailroom", BY_COMMAND),
    (
        "UPDATE mailroom.node SET system_id = 1; INSERT INTO mailroom.link (name) VALUES ('south')",
        "M039", "the node was at server 1,", "DELETE FROM mailroom.link",
    ),
    (
        ("INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, paused_at) "
        f"VALUES ('shipping', 'k', 1, 16, 'infinity', {OLD}, NULL), ('shipping', 'p', 1, 0, 'infinity', NULL, {OLD})"),
        "M040", "inbox shipping: 1 parked key, the first since 01:00:0", "DELETE FROM mailroom.key_state",
    ),
    (
        ("INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, sent_at, value) "
        "VALUES ('deliver', 'test', gen_random_uuid(), 'orders', 'k', 'M', 'U', now(), '')"),
        "M041", "stage deliver: 1, the last", "DELETE FROM mailroom.dead_letter",
    ),
    (
        "UPDATE mailroom.inbox_registry SET keep_reaped_days = 3 WHERE name = 'shipping'",
        "M042", "inbox shipping keeps what is reaped for 3 days, and the last day is missing",
        "UPDATE mailroom.inbox_registry SET keep_reaped_days = NULL",
    ),
    (
        ("INSERT INTO mailroom.limits (inbox, breaker_percent, opened_at, opened_why, try_at, tries) "
        f"VALUES ('shipping', 50, {OLD}, 'all failed', now(), 3)"),
        "M043", "inbox shipping: open for 01:00:0", "DELETE FROM mailroom.limits",
    ),
    (
        ("INSERT INTO mailroom.breaker (inbox, prefix, separator, opened_at, opened_why, try_at, tries) "
        f"VALUES ('shipping', 'tenant-7', '/', {OLD}, 'all failed', now(), 3)"),
        "M043", "prefix tenant-7: all failed; tries so far: 3", "DELETE FROM mailroom.breaker",
    ),
    (
        ("WITH l AS (INSERT INTO mailroom.link (name) VALUES ('to-kafka') RETURNING number) "
        "INSERT INTO mailroom.bridge_out (link, settings, state, why, since) "
        f"SELECT number, '{{}}', 'stopped', 'row 7 is too large', {OLD} FROM l"),
        "M044", "bridge to-kafka: for 01:00:0", "DELETE FROM mailroom.bridge_out",
    ),
    (
        ("WITH l AS (INSERT INTO mailroom.link (name) VALUES ('to-rabbit') RETURNING number) "
        "INSERT INTO mailroom.bridge_out (link, settings, trouble, why, since) "
        f"SELECT number, '{{}}', 'unreachable', 'no server answers', {OLD} FROM l"),
        "M044", "bridge to-rabbit: unreachable for 01:00:0", "DELETE FROM mailroom.bridge_out",
    ),
    (
        ("WITH l AS (INSERT INTO mailroom.link (name, state) VALUES ('to-nats', 'cut') RETURNING number) "
        "INSERT INTO mailroom.bridge_out (link, settings) SELECT number, '{}' FROM l"),
        "M044", "bridge to-nats is cut: it gets nothing any more", "DELETE FROM mailroom.bridge_out",
    ),
    (
        ("WITH k AS (INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at) "
        "SELECT 'spare', n::text, n, 2, 'tomorrow' FROM generate_series(1, 3) AS n RETURNING *) "
        "INSERT INTO mailroom.attempt (at, inbox, key, clock, message_id, attempt, outcome, error, error_class) "
        f"SELECT {OLD}, inbox, key, clock, gen_random_uuid(), nth, 'retry', 'no', "
        "CASE key WHEN '1' THEN 'KeyError' ELSE 'TimeoutError' END FROM k, generate_series(1, 2) AS nth"),
        "M045", "inbox spare: 3 failing keys, the first for 01:00:0",
        "WITH gone AS (DELETE FROM mailroom.key_state) DELETE FROM mailroom.attempt",
    ),
    (
        ("WITH o AS (INSERT INTO mailroom.origin (name, id) VALUES ('mail', gen_random_uuid()) RETURNING number) "
        "INSERT INTO mailroom.bridge_in (origin, settings, lacks_to) SELECT number, '{}', now() FROM o"),
        "M046", "bridge mail: what it took between its beginning and", "DELETE FROM mailroom.bridge_in",
    ),
]  # fmt: skip


@pytest.mark.slow
def test_what_is_broken_is_found_and_nothing_else_and_its_command_mends_it(node: Node) -> None:
    """All at once, since each look takes a while; the commands mend one thing of each kind at a time."""
    for broken, *_ in BROKEN:
        node.connection.execute(broken.encode())
    findings = examined(node)
    with node.connection.transaction():
        findings |= {each.id: each for each in examine(node.connection) if each.id == "M029"}
    assert sorted(findings) == sorted({found for _, found, _, _ in BROKEN})
    assert findings["M045"].evidence[0].endswith(", mostly by TimeoutError")
    assert findings["M051"].evidence[0].endswith(": table staging_000000000000000000000000000000aa is gone")
    assert findings["M051"].command == """python -m spark_jobs.sweep --give-up 'day'"'"'s' --schema mailroom"""
    for _, found, evidence, _ in BROKEN:
        assert any(evidence in line for line in findings[found].evidence), findings[found]
    for *_, mended in BROKEN:
        if mended is not BY_COMMAND:
            node.connection.execute(mended.encode())
    by_command = {found for _, found, _, mended in BROKEN if mended is BY_COMMAND}
    for _ in range(5):
        findings = examined(node)
        assert set(findings) <= by_command
        for each in findings.values():
            node.connection.execute(each.command.encode())
    assert examined(node) == {}


def test_schema_of_another_release_is_found_and_its_tables_are_not_read(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.alembic_version SET version_num = '0100'")
    node.connection.execute("ALTER TABLE mailroom.lease RENAME TO leases")
    found = examined(node)
    assert set(found) == {"M034"}
    assert found["M034"].command == "mailroom migrate"
    node.connection.execute("UPDATE mailroom.alembic_version SET version_num = '0901'")
    assert examined(node)["M034"].command == "pip install -U pg-mailroom"


def test_database_without_the_schema_and_autocommit_are_refused(node: Node) -> None:
    with node.connection.transaction(), pytest.raises(SchemaError, match="mailroom migrate --schema nowhere"):
        examine(node.connection, schema="nowhere")
    with pytest.raises(NotInTransaction):
        examine(node.connection)
    with pytest.raises(ConfigurationError, match="lock_s"):
        Limits(lock_s=-1)


def send_feedback(node: Node, xmin: int) -> psycopg.Connection[Any]:
    """Be a standby that says its oldest query has this xmin."""
    connection = psycopg.connect(make_conninfo(node.dsn, replication="true"), autocommit=True)
    # Ahead of what is flushed, it would be refused after the answer, and the session would end.
    start = node.value("SELECT pg_current_wal_flush_lsn()::text")
    result = connection.pgconn.exec_(f"START_REPLICATION PHYSICAL {start}".encode())
    assert result.status == pq.ExecStatus.COPY_BOTH
    connection.pgconn.put_copy_data(b"h" + struct.pack("!qIIII", 0, xmin, 0, 0, 0))
    connection.pgconn.flush()
    return connection


def test_what_keeps_vacuum_from_its_work_is_found(node: Node, connect: Connect) -> None:
    """Other tests use the server, too: so each is looked for by its own name."""
    snapshot, writer, prepared = connect(), connect(application_name="report"), connect()
    snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    snapshot.execute("SELECT")
    writer.execute("INSERT INTO mailroom.audit (actor, action, messages) VALUES ($$me$$, $$test$$, 0)")
    xmin = node.value("SELECT pg_current_xact_id()::text::bigint & 4294967295")
    prepared.execute("INSERT INTO mailroom.audit (actor, action, messages) VALUES ('me', 'test', 0)")
    name = node.value("SELECT 'doctor_' || oid FROM pg_database WHERE datname = current_database()")
    prepared.execute(f"PREPARE TRANSACTION '{name}'")
    node.connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [name])
    standby = send_feedback(node, xmin)
    standby_pid = standby.info.backend_pid
    try:
        of_standby = "SELECT FROM pg_stat_replication WHERE pid = %s AND backend_xmin IS NOT NULL"
        eventually(lambda: node.rows(of_standby, standby_pid))
        node.send("orders")
        node.connection.execute("DELETE FROM mailroom.outbox")
        node.connection.execute("SELECT pg_stat_force_next_flush()")
        calm = examined(node, **AT_ANY_PACE)
        found = examined(node, snapshot_s=0, behind_xids=0, wal_bytes=0, dead_times=1e-6, frozen_xids=0)
    finally:
        standby.close()
        node.connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
        node.connection.execute(f"ROLLBACK PREPARED '{name}'")
    assert calm == {}
    assert set(found) == {"M001", "M002", "M003", "M004", "M009", "M010"}
    lines = {id: "; ".join(each.evidence) for id, each in found.items()}
    assert f"pid {snapshot.info.backend_pid} (" in lines["M001"]
    assert f"pid {writer.info.backend_pid} (report, role " in lines["M001"]
    assert str(writer.info.backend_pid) in found["M001"].command
    assert name in lines["M002"]
    assert f"physical slot {name}, used by nobody, keeps " in lines["M003"]
    assert f"pid {standby_pid}" in lines["M004"]
    assert "mailroom.outbox: 1 dead rows, threshold 20000, last vacuumed never" in lines["M009"]
    assert "database " in lines["M010"]
    with node.connection.transaction():
        node.connection.execute("SET LOCAL track_counts = off")
        assert [each.evidence for each in examine(node.connection) if each.id == "M007"] == [("track_counts is off",)]


@pytest.mark.slow
def test_lock_is_found_with_who_waits_while_the_doctor_waits_for_nothing(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, writer = connect(application_name="nightly"), connect(application_name="shop")
    user.execute("LOCK TABLE mailroom.outbox, mailroom.worker")
    with monkeypatch.context() as patch:  # each check of a locked table takes a while
        patch.setattr(examining, "CHECKS", doctor_locks.CHECKS)
        assert examined(node, **AT_ANY_PACE) == {}
    waiting = threading.Thread(target=_insert, args=[writer])
    waiting.start()
    wait_until_blocked(node.connection, writer.info.backend_pid)
    found = examined(node, lock_s=0)
    user.rollback()
    waiting.join()
    assert set(found) == {"M000", "M005", "M006"}
    [wait] = found["M005"].evidence
    assert "shop (pid" in wait
    assert "blocked by pid" in wait
    assert found["M005"].command.endswith(f"IN ({user.info.backend_pid});")
    [lock] = found["M006"].evidence
    assert lock.startswith("AccessExclusiveLock on outbox and 1 more, held by pid")
    assert all("lock timeout" in line for line in found["M000"].evidence)
    assert examined(node, lock_s=0) == {}


def test_who_is_named_to_be_ended_is_the_one_that_waits_for_nobody(node: Node, connect: Connect) -> None:
    """Not the worker that waits, and not who waits ahead of it, though their transactions are as old."""
    node.connection.execute("CREATE TABLE stock (item text)")
    user, ahead, worker = connect(), connect(), connect(application_name="mailroom worker")
    user.execute("LOCK TABLE stock IN SHARE MODE")
    [[xact]] = worker.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, xact) "
        "VALUES (gen_random_uuid(), 'shipping', 'mill', 17, now(), 1, '{k}', '{1}', %s)",
        [xact],
    )
    with ThreadPoolExecutor(2) as threads:
        for session, statement in ((ahead, "LOCK TABLE stock"), (worker, "SELECT FROM stock")):
            threads.submit(session.execute, statement.encode())
            wait_until_blocked(node.connection, session.info.backend_pid)
        found = examined(node, lock_s=0, batch_s=0, snapshot_s=0)
        calm = examined(node, lock_s=3_600, batch_s=0)
        user.rollback()
        wait_until_idle = "SELECT FROM pg_stat_activity WHERE pid = %s AND state = 'idle in transaction'"
        eventually(lambda: node.rows(wait_until_idle, ahead.info.backend_pid))
        ahead.rollback()
    ends = {id: set(map(int, re.findall(r"\d+", each.command))) for id, each in found.items()}
    pids = {each.info.backend_pid for each in (user, ahead, worker)}
    assert [ends[id] & pids for id in ("M001", "M005", "M025")] == [{user.info.backend_pid}] * 3
    assert f"; it waits for pid {user.info.backend_pid} (" in found["M025"].evidence[0]
    # A wait of a moment is nobody's fault: then it is the worker that takes long.
    assert calm["M025"].command == f"SELECT pg_terminate_backend({worker.info.backend_pid});"


@pytest.mark.slow
def test_standby_that_does_not_answer_is_named_and_not_those_who_wait_for_it(private_server: Server) -> None:
    with psycopg.connect(private_server.dsn(), autocommit=True) as connection:
        migrate(private_server.dsn())
        node = Node(private_server.dsn(), connection)
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
        connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: node.value("SHOW synchronous_standby_names") == "gone")
        with psycopg.connect(private_server.dsn()) as writer, psycopg.connect(private_server.dsn()) as other:
            writer.execute("LOCK TABLE mailroom.audit")
            writer.execute("INSERT INTO mailroom.audit (actor, action, messages) VALUES ('me', 'test', 0)")
            with ThreadPoolExecutor(2) as threads:
                committed = threads.submit(writer.commit)
                waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
                eventually(lambda: node.rows(waits, writer.info.backend_pid))
                blocked = threads.submit(other.execute, b"LOCK TABLE mailroom.audit")
                wait_until_blocked(connection, other.info.backend_pid)
                assert "M050" not in examined(node, lock_s=3_600)
                found = examined(node, lock_s=0, snapshot_s=0)
                connection.execute(found["M050"].command.partition(";")[0].encode())
                connection.execute("SELECT pg_reload_conf()")
                committed.result(WITHIN_S)
                blocked.result(WITHIN_S)
        assert {id for id, each in found.items() if "pg_terminate" in each.command} == set()
        assert {"M001", "M005", "M006", "M050"} <= set(found)
        assert all("; it waits for a synchronous standby" in line for line in found["M001"].evidence)
        [line] = found["M050"].evidence
        assert line.startswith("1 sessions wait in COMMIT, the first for 00:00:")
        assert line.endswith("synchronous_standby_names is 'gone'; no standby is connected")


def _insert(writer: psycopg.Connection[Any]) -> None:
    writer.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('orders', '1')")
    writer.rollback()


@pytest.mark.slow
def test_batch_that_does_not_end_and_inbox_that_nobody_reaps_are_found(node: Node, connect: Connect) -> None:
    node.send("orders", key="k")
    node.deliver_all()
    found = eventually(lambda: examined(node, unread_s=0))  # statistics come when the deliverer has ended
    assert set(found) == {"M027"}
    assert found["M027"].evidence[0].startswith("inbox shipping: the oldest message was delivered ")
    assert examined(node, **AT_ANY_PACE) == {}
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = now() WHERE name = 'shipping'")
    assert examined(node, unread_s=0) == {}
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = NULL")
    in_hand, go_on = threading.Event(), threading.Event()

    def handle(message: object, connection: object) -> None:
        in_hand.set()
        assert go_on.wait(WITHIN_S)

    with working(Worker(node.dsn, "shipping", handle)):
        assert in_hand.wait(WITHIN_S)
        number = eventually(lambda: node.rows("SELECT process_number FROM mailroom.worker"))
        try:
            found = examined(node, batch_s=0, unread_s=0, silent_s=0, late_s=0)
            held = node.rows(
                "SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = %s "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                locks.ALIVE,
            )
        finally:
            go_on.set()
    assert held
    assert number[0][0] is not None
    assert set(found) == {"M025", "M053"}
    assert found["M053"].evidence[0].startswith("inbox shipping: the oldest message was delivered 0:0")
    assert "its transaction is open, backend" in found["M025"].evidence[0]
    # One that is paused: silent, and its transaction is open.
    paused = connect()
    [[xact]] = paused.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number, xact) "
        "VALUES (gen_random_uuid(), 'shipping', 'mill', 17, now(), 1, '{k}', '{1}', -7, %s)",
        [xact],
    )
    found = examined(node, silent_s=0)
    assert set(found) == {"M026"}
    assert found["M026"].command == f"SELECT pg_terminate_backend({paused.info.backend_pid});"


def test_role_at_work_without_rights_and_one_that_policies_bind_are_found(node: Node) -> None:
    rights = (
        "GRANT USAGE ON SCHEMA mailroom TO {role}",
        "GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {role}",
        "REVOKE DELETE ON mailroom.outbox FROM {role}",
    )
    with role(node.dsn, *rights) as (name, dsn), psycopg.connect(dsn, autocommit=True) as session:
        node.connection.execute(
            LEASE.format(role="dispatcher", until="1 h").replace("pg_backend_pid()", str(session.info.backend_pid))
        )
        node.connection.execute("ALTER TABLE mailroom.outbox ENABLE ROW LEVEL SECURITY")
        found = examined(node)
        assert set(found) == {"M037", "M038"}
        assert found["M037"].evidence == (f"role {name}, dispatcher, lacks DELETE on mailroom.outbox",)
        assert found["M038"].evidence == (f"mailroom.outbox from {name}",)
        for each in found.values():
            node.connection.execute(each.command.encode())
        assert examined(node) == {}
        with session.transaction():
            of_role = {each.id: each for each in examine(session)}
        assert "GRANT" in of_role["M000"].command
        assert any("sessions of other roles" in line for line in of_role["M000"].evidence)


@pytest.mark.slow
def test_roles_at_work_with_exactly_what_is_granted_lack_nothing(node: Node) -> None:
    """And one lacks what it needs that may change another column of the node, or has not got an inbox made since."""
    inboxes = [name for (name,) in node.rows("SELECT name FROM mailroom.inbox_registry")]
    with contextlib.ExitStack() as stack:
        for does in ("dispatcher", "executor"):
            name, dsn = stack.enter_context(role(node.dsn, *rights(does, *inboxes, bounded=["ledger"])))
            session = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            node.connection.execute(
                LEASE.format(role=does, until="1 h").replace("pg_backend_pid()", str(session.info.backend_pid))
            )
            if does == "dispatcher":
                node.connection.execute(f"GRANT UPDATE (single) ON mailroom.node TO {name}")
                dispatcher = name
        _, dsn = stack.enter_context(role(node.dsn, *rights("reaper", "shipping")))
        node.send("shipping", key="k")
        node.deliver_all()
        in_hand, over = threading.Event(), threading.Event()

        def handler(message: object, connection: object) -> None:
            in_hand.set()
            over.wait(WITHIN_S)

        with working(Worker(dsn, "shipping", handler)):
            try:
                assert in_hand.wait(WITHIN_S)
                eventually(lambda: node.rows("SELECT FROM mailroom.worker"))
                assert examined(node, **AT_ANY_PACE) == {}
            finally:
                over.set()
        node.inbox("since")
        lacks = f"role {dispatcher}, housekeeping, lacks {{}} on mailroom.inbox_since"
        assert examined(node)["M037"].evidence == (lacks.format("DELETE"), lacks.format("SELECT"))
        with node.connection.transaction():
            grant(node.connection, "dispatcher", dispatcher, actor="ada")
        node.connection.execute(f"REVOKE UPDATE (clock_ceiling) ON mailroom.node FROM {dispatcher}")
        found = examined(node)
        assert set(found) == {"M037"}
        assert found["M037"].command == f'GRANT UPDATE (clock_ceiling) ON "mailroom".node TO {dispatcher};'


def test_role_that_may_see_nothing_of_the_schema_is_told_what_to_grant(node: Node) -> None:
    with role(node.dsn) as (_, dsn), psycopg.connect(dsn) as session:
        found = {each.id: each for each in examine(session)}
    assert len(found["M000"].evidence) > 5
    assert any("permission denied for schema mailroom" in line for line in found["M000"].evidence)
    assert set(found) - OF_THE_SERVER == {"M000"}


def test_shares_and_versions_are_found(node: Node) -> None:
    usage = ("GRANT USAGE ON SCHEMA mailroom TO {role}", "ALTER ROLE {role} CONNECTION LIMIT 1")
    with role(node.dsn, *usage) as (name, dsn):
        of_role = f"1 of 1 connections of ROLE {name} are used"
        assert examined(node) == {}
        with psycopg.connect(dsn):
            found = examined(node)
            assert (set(found), found["M030"].evidence) == ({"M030"}, (of_role,))
            node.connection.execute(found["M030"].command.encode())
            assert examined(node) == {}
            of_database = (
                "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I CONNECTION LIMIT 2', current_database()); END $$"
            )
            node.connection.execute(of_database.encode())
            [line] = examined(node)["M030"].evidence
            assert "of 2 connections of DATABASE " in line
    assert set(examined(node, connections_share=0, queue_share=0)) == {"M030", "M031"}
    with node.connection.transaction():
        ask = asking(doctor_settings.SERVER, lowest=98, highest=99)
        [(_, line)] = run(node.connection, ask(Examination("mailroom", Limits())))
    assert line.startswith("PostgreSQL 1")


async def test_each_form_finds_the_same_and_writes_nothing(node: Node) -> None:
    node.connection.execute("ALTER TABLE mailroom.outbox DISABLE TRIGGER doorbell")
    with node.connection.transaction():
        wanted = examine(node.connection)
        assert node.value("SELECT pg_current_xact_id_if_assigned()") is None
        assert node.value("SHOW transaction_read_only") == "off"
        assert not node.rows(
            "SELECT FROM pg_locks JOIN pg_class AS c ON c.oid = relation "
            "WHERE pid = pg_backend_pid() AND relnamespace = 'mailroom'::regnamespace AND relkind <> 'S'"
        )
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(node.dsn).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        assert examine(connection) == wanted
    engine.dispose()
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        assert await examine_async(connection) == wanted
    assert "M016" in {each.id for each in wanted}


@pytest.mark.slow
def test_nothing_is_found_while_a_node_works(node: Node) -> None:
    """A writer, a dispatcher and a worker work while the doctor looks."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute("INSERT INTO mailroom.outbox (topic, key, value_json) VALUES ('orders', 'k', '1')")

    def handle(message: object, connection: object) -> None: ...

    dispatcher = Dispatcher(node.dsn, poll_interval_s=0.05)
    threads = [threading.Thread(target=write), threading.Thread(target=_run, args=[dispatcher])]
    with working(Worker(node.dsn, "shipping", handle)):
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: node.rows("SELECT FROM mailroom.lease"))
            found = [examined(node, **AT_ANY_PACE) for _ in range(2)]
        finally:
            stop.set()
            dispatcher.stop()
            for thread in threads:
                thread.join(WITHIN_S)
    assert found == [{}] * 2


def _run(dispatcher: Dispatcher) -> None:
    asyncio.run(dispatcher.run())


def test_each_check_has_an_id_of_its_own() -> None:
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids)


def test_auditor_who_may_see_other_sessions_may_look_at_everything(node: Node) -> None:
    with (
        role(node.dsn, *rights("auditor"), "GRANT pg_monitor TO {role}") as (_, dsn),
        psycopg.connect(dsn) as connection,
    ):
        found = {each.id: each for each in examine(connection)}
    assert set(found) <= OF_THE_SERVER, found
