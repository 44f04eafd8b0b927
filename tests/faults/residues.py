"""What a campaign must not leave: sessions, notifications, broken indexes (I12), secrets in logs (I13)."""

from urllib.parse import urlsplit

import psycopg

from tests.faults.invariants import Violation
from tests.faults.load import CANARY
from tests.faults.stage import Stage

SESSIONS = 12  # of one process, at the most
XACT_AGE_S = 60.0


def found(stage: Stage) -> list[Violation]:
    """Look at the server and the logs while the load rests."""
    return [*_of_server(stage), *_in_logs(stage)]


def _of_server(stage: Stage) -> list[Violation]:
    violations = []
    with stage.host.session() as session:
        usage = session.execute("SELECT pg_notification_queue_usage()").fetchone()
        if usage is None or usage[0] > 0.01:
            violations.append(Violation("I12", "the queue of notifications is empty at rest", ((usage,),)))
        crowded = session.execute(
            "SELECT application_name, count(*) FROM pg_stat_activity WHERE application_name LIKE 'mailroom %%' "
            "GROUP BY application_name HAVING count(*) > %s",
            [SESSIONS],
        ).fetchall()
        if crowded:
            violations.append(Violation("I12", "no more sessions than the processes need", tuple(crowded)))
        old = session.execute(
            "SELECT application_name, state, query, xact_start::text FROM pg_stat_activity "
            "WHERE application_name LIKE 'mailroom %%' AND xact_start < clock_timestamp() - %s * interval '1 s'",
            [XACT_AGE_S],
        ).fetchall()
        if old and stage.timed:
            violations.append(Violation("I12", "no session of ours keeps a snapshot for long", tuple(old)))
        violations += _broken_indexes(session)
    return violations


def _broken_indexes(session: psycopg.Connection[tuple[object, ...]]) -> list[Violation]:
    try:
        session.execute("CREATE EXTENSION IF NOT EXISTS amcheck")
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile):
        return []  # this server has no amcheck
    indexes = session.execute(
        "SELECT c.oid, c.oid::regclass::text, i.indrelid::regclass::text "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_index i ON i.indexrelid = c.oid JOIN pg_am a ON a.oid = c.relam "
        "WHERE n.nspname = 'mailroom' AND c.relkind = 'i' AND a.amname = 'btree' AND i.indisvalid"
    ).fetchall()
    broken = []
    for oid, name, table in indexes:
        try:
            with session.transaction():  # the leader drops segments of logs meanwhile, and others make and drop inboxes
                session.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE".encode())
                session.execute("SELECT bt_index_check(oid, true) FROM pg_class WHERE oid = %s", [oid])
        except psycopg.errors.UndefinedTable:
            continue
        except (psycopg.errors.IndexCorrupted, psycopg.errors.DataCorrupted) as error:
            broken.append((name, str(error)))
    return [Violation("I13", "every index agrees with its table", tuple(broken))] if broken else []


def _in_logs(stage: Stage) -> list[Violation]:
    password = urlsplit(stage.host.dsn).password or CANARY
    secrets = {"a value": CANARY, "a value in hex": CANARY.encode().hex(), "the password": password}
    leaks = []
    for path in sorted(stage.home.glob("*.log")):
        text = path.read_text(errors="replace")
        leaks += [(path.name, what) for what, secret in secrets.items() if secret in text]
    return [Violation("I13", "no value and no password stands in a log", tuple(leaks))] if leaks else []
