"""Faults from outside: what processes, sessions, server, network and neighbours do to a campaign.

Each kind is a function that does its fault, mends it, and returns whom it struck; the campaign then sends messages and
wants them handled. What this machine cannot do raises `Skipped` with the reason.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from mailroom.schema import migrate
from mailroom.sql import locks
from tests.faults.guests import come_to_logs
from tests.faults.misuse import (
    Violated,
    cancel_executors,
    come_and_go,
    end_batches,
    odd_executables,
    poison_corpus,
    replay_parked,
    rude_handlers,
    send,
)
from tests.faults.network import QUIET, Trouble
from tests.faults.role_worker import has_pool
from tests.faults.stage import Stage
from tests.support.next_release import HEAD, NEXT, known_to_migrate

Fault = Callable[[Stage, random.Random], str]
OURS = "faults campaign%"


class Skipped(Exception):
    """This machine cannot do that."""


def kill_process(stage: Stage, dice: random.Random) -> str:
    """F1: one process, of any role; the leader as often as the others together."""
    if dice.random() < 0.3 and (leader := stage.leader_or_none()) is not None:
        pid, before = leader.pid, time.monotonic()
        leader.signal(signal.SIGKILL)
        stage.await_other_leader(pid, before, "take-over after a crash")
        return "dispatcher"
    actor = dice.choice(list(stage.actors.values()))
    actor.signal(signal.SIGKILL)
    return actor.task.role


def pause_process(stage: Stage, dice: random.Random) -> str:
    """F2: a process that stands still, so long that another has to take over, or just a moment."""
    leader = stage.leader_or_none() if dice.random() < 0.4 else None
    actor = leader or dice.choice(list(stage.actors.values()))
    with stage.standing_still(actor.task.role):
        before = time.monotonic()
        actor.signal(signal.SIGSTOP)
        try:
            if leader is not None and dice.random() < 0.7:
                stage.await_other_leader(leader.pid, before, "take-over after a pause")
                stage.probe(what="while the old leader stands still")
            else:
                time.sleep(dice.uniform(0.1, 2))
        finally:
            actor.signal(signal.SIGCONT)
        return actor.task.role


def terminate(stage: Stage, dice: random.Random) -> str:
    """F3: one session, or all there are, several times."""
    return _on_sessions(stage, dice, "pg_terminate_backend")


def cancel(stage: Stage, dice: random.Random) -> str:
    """F4: what one session is doing, or all, several times."""
    return _on_sessions(stage, dice, "pg_cancel_backend")


def _on_sessions(stage: Stage, dice: random.Random, function: str) -> str:
    storm = dice.random() < 0.5
    limit = "" if storm else "ORDER BY random() LIMIT 1"
    with stage.host.session() as session:
        for _ in range(dice.randint(2, 10) if storm else 1):
            session.execute(
                f"SELECT {function}(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                f"AND backend_type = 'client backend' AND application_name NOT LIKE '{OURS}' {limit}) AS s".encode()
            )
            time.sleep(dice.uniform(0, 0.05))
    return "all sessions" if storm else "one session"


def kill_backend(stage: Stage, dice: random.Random) -> str:
    """F5: PostgreSQL takes all its sessions down and recovers."""
    with stage.host.session() as session:
        row = session.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            f"AND application_name NOT LIKE '{OURS}' ORDER BY random() LIMIT 1".encode()
        ).fetchone()
    if row is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(row[0], signal.SIGKILL)
    stage.host.await_sessions()
    return "server"


def kill_server(stage: Stage, dice: random.Random) -> str:
    """F6: all of it, and it is down for a while."""
    stage.host.kill()
    time.sleep(dice.uniform(0, 1))
    stage.host.start()
    return "server"


def stop_server(stage: Stage, dice: random.Random) -> str:
    """F7: immediate or fast."""
    stage.host.stop(dice.choice((signal.SIGQUIT, signal.SIGINT)))
    time.sleep(dice.uniform(0, 1))
    stage.host.start()
    return "server"


def _trouble(kind: str, share: float, delay_s: float, longest_s: float) -> Fault:
    def trouble(stage: Stage, dice: random.Random) -> str:
        before = stage.network.done[kind]
        stage.network.be(Trouble(kind, share, delay_s))
        deadline = time.monotonic() + dice.uniform(0.3, longest_s)
        try:
            while time.monotonic() < deadline or (
                stage.network.done[kind] == before and time.monotonic() < deadline + 3
            ):
                time.sleep(0.02)
        finally:
            stage.network.be(QUIET)
        if kind == "black hole" and dice.random() < 0.5:
            stage.network.cut()
        return "network" if stage.network.done[kind] > before else ""

    return trouble


def hit_pooler(stage: Stage, dice: random.Random) -> str:
    """F14: killed, or told to read its configuration again."""
    if stage.pooler is None:
        raise Skipped("pgbouncer is not installed")
    if dice.random() < 0.5:
        stage.pooler.reload()
    else:
        stage.pooler.kill()
        time.sleep(dice.uniform(0, 0.5))
        stage.pooler.start()
    return "pooler"


def too_many_connections(stage: Stage, dice: random.Random) -> str:
    """F16: all slots are taken, and then all our sessions are ended, so that they want new ones."""
    with contextlib.ExitStack() as held, stage.host.session() as session:
        _take_all(stage, held)
        session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            f"AND application_name NOT LIKE '{OURS}' ORDER BY random() LIMIT 6".encode()
        )
        _take_all(stage, held)
        time.sleep(dice.uniform(0.2, 1.5))
    return "server"


def _take_all(stage: Stage, held: contextlib.ExitStack) -> None:
    """Take connections until the server gives no more."""
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            held.enter_context(psycopg.connect(stage.host.dsn, application_name="faults campaign crowd"))


TABLES = ("outbox", "inbox_alpha", "inbox_gamma", "key_state", "inbox_registry", "lease", "worker", "scheduled",
          "log_journal", "log_tick", "log_segment", "lanes_delta", "receipts_delta")  # fmt: skip


def lock_tables(stage: Stage, dice: random.Random) -> str:
    """F18: what an administrator does in the middle of the day."""
    table = sql.Identifier("mailroom", dice.choice(TABLES))
    with stage.host.session() as session:
        match dice.randrange(3):
            case 0:
                with session.transaction(), contextlib.suppress(psycopg.errors.LockNotAvailable):
                    session.execute("SET LOCAL lock_timeout = '5s'")
                    session.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table))
                    time.sleep(dice.uniform(0.1, 1))
            case 1:
                with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                    session.execute("SET lock_timeout = '5s'")
                    session.execute(sql.SQL("VACUUM FULL {}").format(table))
            case _:
                with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                    session.execute("SET lock_timeout = '5s'")
                    session.execute(sql.SQL("REINDEX TABLE CONCURRENTLY {}").format(table))
        _drop_invalid_indexes(session)
    return "administrator"


def _drop_invalid_indexes(session: psycopg.Connection[Any]) -> None:
    # What an interrupted REINDEX CONCURRENTLY leaves.
    for (name,) in session.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid "
        "AND indexrelid::regclass::text LIKE 'mailroom.%\\_ccnew%'"
    ).fetchall():
        with contextlib.suppress(psycopg.Error):
            session.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}".encode())


def long_transaction(stage: Stage, dice: random.Random) -> str:
    """F19: one that reads, writes, is prepared, or lives in another database."""
    length_s = dice.uniform(0.5, 3)
    match dice.randrange(4):
        case 0:
            with stage.host.session() as session:
                session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                session.execute("SELECT count(*) FROM mailroom.outbox")
                time.sleep(length_s)
                session.execute("COMMIT")
        case 1:
            with stage.host.session() as session, session.transaction():
                send(session, "gamma", "key-1")
                time.sleep(length_s)
        case 2:
            with stage.host.session() as session:
                gid = f"faults-long-{uuid4()}"
                session.execute("BEGIN; SET LOCAL mailroom.notify = off")
                send(session, "gamma", "key-2")
                session.execute(f"PREPARE TRANSACTION '{gid}'".encode())
                time.sleep(min(length_s, 1.5))
                with contextlib.suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                    session.execute(f"COMMIT PREPARED '{gid}'".encode())
        case _:
            other = stage.host.dsn.rpartition("/")[0] + "/postgres"
            with psycopg.connect(other, application_name="faults campaign other") as session:
                session.execute("CREATE TABLE IF NOT EXISTS other (n int)")
                session.execute("INSERT INTO other VALUES (1)")
                time.sleep(length_s)
    return "neighbour"


END_LISTENERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^mailroom .* listener'"
)


def kill_listeners(stage: Stage, dice: random.Random) -> str:
    """F29: nobody listens for a moment, and that is when messages come."""
    for _ in range(4):
        with stage.host.session() as session:
            session.execute(END_LISTENERS)
        time.sleep(dice.uniform(0.005, 0.1))
        stage.probe(what="while nobody listens")
    return "doorbell"


def lose_doorbells(stage: Stage, dice: random.Random) -> str:
    """F29: the trigger is off, the listeners are killed: polling has to find what comes."""
    if dice.random() < 0.3:
        return kill_listeners(stage, dice)
    with stage.host.session() as session, _silenced(session):
        session.execute(END_LISTENERS)
        for _ in range(3):
            stage.probe(what="while doorbells are lost")
            time.sleep(dice.uniform(0, 0.7))
    return "doorbell"


@contextlib.contextmanager
def _silenced(session: psycopg.Connection[Any]) -> Iterator[None]:
    session.execute("SET lock_timeout = '5s'")
    with contextlib.suppress(psycopg.errors.LockNotAvailable):  # the listeners are killed all the same
        session.execute("ALTER TABLE mailroom.outbox DISABLE TRIGGER doorbell")
    try:
        yield
    finally:
        session.execute("SET lock_timeout = '30s'")
        session.execute("ALTER TABLE mailroom.outbox ENABLE TRIGGER doorbell")


def rolling_restart(stage: Stage, dice: random.Random) -> str:
    """F32: a process is told to finish, and ends by itself."""
    actor = dice.choice([*stage.of_role("worker"), *stage.of_role("dispatcher")])
    actor.signal(signal.SIGTERM)
    return actor.task.role


SLOW_S = (1, 4)
FLUSH_S = (0.05, 0.2, 0.5)
# What a batch deletes takes its time, row by row.
SLOW_ROWS = """
CREATE OR REPLACE FUNCTION faults.slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.pg_sleep(0.002 * count(*)) FROM taken;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER slow AFTER DELETE ON mailroom.outbox REFERENCING OLD TABLE AS taken
FOR EACH STATEMENT EXECUTE FUNCTION faults.slow()
"""


def slow_disk(stage: Stage, dice: random.Random) -> str:
    """F37: each flush takes long, or every row."""
    if dice.random() < 0.5:
        return slow_rows(stage, dice)
    if stage.host.disk is None:
        raise Skipped("there is no C compiler")
    with stage.scarcity(dice.choice(FLUSH_S), busy=False):
        time.sleep(dice.uniform(*SLOW_S))
        stage.probe(what="while the disk is slow")
    return "server"


def slow_rows(stage: Stage, dice: random.Random) -> str:
    """F37: a batch takes as long as it has rows."""
    with stage.host.session(options="-c lock_timeout=5s") as session, contextlib.ExitStack() as ending:
        ending.callback(_ended, stage, "DROP TRIGGER IF EXISTS slow ON mailroom.outbox")
        session.execute(SLOW_ROWS)
        time.sleep(dice.uniform(*SLOW_S))
        stage.probe(what="while rows are slow")
    return "server"


def _ended(stage: Stage, statement: str) -> None:
    stage.host.await_sessions()
    with stage.host.session() as session:
        session.execute(statement.encode())


def busy_cores(stage: Stage, dice: random.Random) -> str:
    """F38: everything takes many times as long, the server's processes and ours."""
    with stage.scarcity(0, busy=True):
        time.sleep(dice.uniform(*SLOW_S))
        stage.probe(what="while the cores are busy")
    return "machine"


STRANGER = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'faults_stranger') THEN
        CREATE ROLE faults_stranger LOGIN PASSWORD 'weak';
    END IF;
END $$
"""
KEYS_OF_TABLES = """
SELECT oid::bigint - 2147483648 FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace AND relkind IN ('r', 'p')
"""


def hoard_advisory_locks(stage: Stage, dice: random.Random) -> str:
    """F43: a role that may connect, and no more, takes every advisory lock that it can name."""
    with stage.host.session() as session:
        session.execute(STRANGER)
        keys = [key for (key,) in session.execute(KEYS_OF_TABLES).fetchall()]
    dsn = make_conninfo(stage.host.dsn, user="faults_stranger", password="weak", application_name="faults campaign")
    with psycopg.connect(dsn, autocommit=True) as stranger:
        shared = dice.choice(("", "_shared"))
        for number in range(locks.AWAKE, locks.AWAKE + 8):
            for key in keys:
                stranger.execute(f"SELECT pg_try_advisory_lock{shared}({number}, {key})".encode())
        stage.probe(what="while a stranger has the advisory locks")
    return "stranger"


def fill_lock_table(stage: Stage, dice: random.Random) -> str:
    """F44: the server has no room for another lock."""
    with stage.host.session() as session:
        with contextlib.suppress(psycopg.errors.OutOfMemory):
            session.execute("SELECT pg_advisory_lock(nth) FROM generate_series(1, 1000000) AS nth")
        time.sleep(dice.uniform(0.1, 1))
    return "server"


NUMBERED = """
SELECT t.relname, s.oid::regclass::text FROM pg_class AS s
JOIN pg_depend AS d ON d.objid = s.oid AND d.deptype IN ('a', 'i') JOIN pg_class AS t ON t.oid = d.refobjid
WHERE s.relnamespace = 'mailroom'::regnamespace AND s.relkind = 'S' ORDER BY t.relname
"""


def copy_rows(stage: Stage, dice: random.Random) -> str:
    """F45: all rows that have numbers are copied to where the sequences begin anew, and nobody leads any more."""
    with stage.host.session(options="-c lock_timeout=2s") as session:
        numbered = session.execute(NUMBERED).fetchall()
        try:
            with session.transaction():
                for table, _ in numbered:
                    session.execute(f"LOCK TABLE mailroom.{table} IN ACCESS EXCLUSIVE MODE".encode())
                session.execute("SET LOCAL session_replication_role = replica")
                for table, sequence in numbered:
                    session.execute(f"CREATE TEMP TABLE copied ON COMMIT DROP AS TABLE mailroom.{table}".encode())
                    session.execute(f"DELETE FROM mailroom.{table}".encode())
                    session.execute(f"ALTER SEQUENCE {sequence} RESTART".encode())
                    session.execute(
                        f"INSERT INTO mailroom.{table} OVERRIDING SYSTEM VALUE TABLE copied ORDER BY random()".encode()
                    )
                    session.execute("DROP TABLE copied")
                # Who has led until now knows of numbers that were never drawn here.
                session.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                    f"AND pid <> pg_backend_pid() AND application_name NOT LIKE '{OURS}'".encode()
                )
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            return ""
    stage.probe(what="after its rows were copied")
    return "administrator"


def migrate_beside(stage: Stage, dice: random.Random) -> str:
    """F46: the next release's migration goes up and down again beside the programs of this one."""
    with known_to_migrate():
        for revision in (NEXT, HEAD):
            try:
                migrate(stage.host.dsn, revision=revision)
            except (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable) as error:
                raise Violated("upgrade", f"a migration beside programs was ended: {type(error).__name__}") from error
            stage.probe(what=f"after a migration to {revision}")
    return "administrator"


def use_up_pool(stage: Stage, dice: random.Random) -> str:
    """F47: the rest of a program takes all connections of the pool that its worker works on."""
    actor = dice.choice([one for one in stage.of_role("worker") if has_pool(one.task)])
    return "worker" if actor.alive.wait(10) and actor.use_up(dice.uniform(1, 4)) else ""


# Own sessions of workers: each has one that listens, one for its entries, and those of its batches.
END_SESSIONS = """
SELECT count(pg_terminate_backend(pid)) FROM (
    SELECT pid FROM pg_stat_activity WHERE application_name ~ '^mailroom worker' ORDER BY random() LIMIT %s) AS s
"""


def short_of_sessions(stage: Stage, dice: random.Random) -> str:
    """F48: one or two sessions fewer than the programs want; they go on with what they have."""
    with contextlib.ExitStack() as held, stage.host.session() as session:
        _take_all(stage, held)
        [(ended,)] = session.execute(END_SESSIONS, [dice.randint(1, 2)]).fetchall()
        _take_all(stage, held)
        stage.probe(what="while sessions are short", through=session)
    return "server" if ended else ""


FAULTS: dict[str, Fault] = {
    "F1": kill_process, "F2": pause_process, "F3": terminate, "F4": cancel, "F5": kill_backend, "F6": kill_server,
    "F7": stop_server, "F8": _trouble("cut before COMMIT", 0.3, 0, 1.5),
    "F9": _trouble("COMMIT answer lost", 0.3, 0, 1.5),
    "F10": _trouble("COMMIT delayed", 0.5, 0.3, 2), "F11": _trouble("black hole", 1, 0, 3),
    "F12": _trouble("latency", 1, 0.02, 2), "F13": _trouble("half of COMMIT", 0.3, 0, 1.5), "F14": hit_pooler,
    "F16": too_many_connections, "F18": lock_tables, "F19": long_transaction, "F27": poison_corpus,
    "F29": lose_doorbells, "F32": rolling_restart, "F34": replay_parked,
    "F36": odd_executables, "F37": slow_disk, "F38": busy_cores,
    "F39": rude_handlers, "F40": cancel_executors, "F41": come_and_go,
    "F42": end_batches, "F43": hoard_advisory_locks, "F44": fill_lock_table, "F45": copy_rows, "F46": migrate_beside,
    "F47": use_up_pool, "F48": short_of_sessions, "F49": come_to_logs,
}  # fmt: skip
