"""The locks of a migration: all of them in one short phase, before it changes anything, beside programs that run.

A migration that took a lock with each of its statements would wait for one table while it holds others, and so deadlock
with transactions that use them in another order. So it first locks all that its statements will lock, in the order of
the programs, and in short tries. A try that fails releases all its locks, so that sessions queued after it go on.

PostgreSQL looks for a deadlock when a session has waited for `deadlock_timeout`, and may end it. A try that has more
than the turns is shorter than that, so no session that meets its locks is ended, in whatever order it uses the tables.
That includes the lock of those who change the schema: a transaction that has sent may still create an inbox.

Everything is one statement of the server, so that a script for `psql` can have it too.
"""

import re
from collections.abc import Iterable

from mailroom.sql import locks
from mailroom.sql.operation import filled

# SQLSTATE of our own.
IN_USE = "MR003"

# In the order in which programs lock them: deliveries and executions take their turn first, and a handler's batch has
# locks on its inbox when it sends. Each claim reads the registry before anything else, and its batch keeps the lock
# until it ends. So it is the gate to all that a batch has locked: a lock on it waits for the batches of all inboxes.
# D-schema-3: A migration has all its locks before it changes anything.
GATE = "inbox_registry"
ALWAYS_FIRST = ("dispatch_turn", GATE, "execute_turn")
TURNS = {"dispatch_turn", "execute_turn"}
BEHIND_THE_GATE = {"inbox", "key_state", "stable", "attempt", "parked", "reaped", "dead_letter", "outbox"}
# To lock a view is to lock its tables.
VIEWS = {
    "my_worker": ("worker",), "my_key_state": ("key_state",), "my_due": ("key_state",), "my_attempt": ("attempt",),
    "my_parked": ("parked",), "my_reaped": ("reaped",), "my_limit": ("limits",), "my_slot": ("slot",),
    "my_breaker": ("breaker",), "my_spark_stream": ("spark_stream",), "my_stat_minute": ("stat_minute",),
    "statistics": ("node", "stat_minute"), "outbox_jdbc": ("outbox",),
}  # fmt: skip
WRITERS_LAST = ("outbox_jdbc", "outbox_jdbc_id", "outbox", "outbox_executable")

NAMES = r"((?:IF EXISTS |ONLY )*[\w.\"]+(?:,\s+[\w.\"]+)*)"
# What locks or changes a table that is there, in migrations' own SQL. The test of the phase holds it against the locks
# that each migration has.
LOCKING = re.compile(
    r"\b(?:(?:ALTER|DROP|LOCK) TABLE|DROP (?:INDEX|VIEW)|UPDATE|DELETE FROM|INSERT INTO|REFERENCES"
    rf"|(?:CREATE (?:UNIQUE )?INDEX|(?:CREATE|DROP) (?:CONSTRAINT )?TRIGGER|CREATE RULE)\s[^;]*?\b(?:ON|TO)) {NAMES}"
)
# What a function does happens when it is called. Alembic's own table is no program's.
ELSEWHERE = re.compile(r"\s*(?:CREATE (?:OR REPLACE )?FUNCTION|COMMENT ON)\b")
IGNORED = frozenset({"alembic_version"})


def locked_by(statements: Iterable[str]) -> list[str]:
    """Return what the statements of a migration lock, in the order to lock it: names of tables, views and indexes.

    Some may be names of what the migration itself creates. If there are any, the turns come first.
    """
    found: set[str] = set()
    for statement in statements:
        if not ELSEWHERE.match(statement):
            for names in LOCKING.findall(statement):
                bare = re.sub(r"IF EXISTS |ONLY ", "", names)
                found.update(name.strip('"').rpartition(".")[2].strip('"') for name in re.split(r",\s+", bare))
    found -= IGNORED
    if not found:
        return []
    found |= TURNS.union(*(VIEWS[name] for name in found & VIEWS.keys()))
    if found & BEHIND_THE_GATE:
        found.add(GATE)
    between = sorted(found.difference(ALWAYS_FIRST, WRITERS_LAST))
    return [name for name in (*ALWAYS_FIRST, *between, *WRITERS_LAST) if name in found]


# No session waits for a try for longer than an executor does, which gives up after 2 s. An autovacuum gives way to a
# session that has waited for deadlock_timeout, and not earlier: so its table is waited for alone, and released again.
# Every role can recognize an autovacuum: it is a session without a user. Writers use their tables in any order, so what
# was in use is locked before the others next time. 0 stands for the advisory lock, which a try takes after the gate: it
# may wait for the gate for longer than deadlock_timeout, and a batch that holds it up may want to create an inbox.
# Behind that lock partitions neither come nor go: so they are looked up there, and in pg_inherits, since
# pg_partition_tree would lock them for readers, and keep that lock between tries. A short transaction that was just
# seen has not been in the way for the whole try.
PHASE = """
DO $$
DECLARE
    began CONSTANT timestamptz := clock_timestamp();
    detected CONSTANT interval := current_setting('deadlock_timeout')::interval;
    longest CONSTANT interval := least(interval '1500 ms', 0.8 * detected);
    allowed interval := least(interval '300 ms', longest);
    names CONSTANT text[] := '{names}';
    gate CONSTANT oid := CASE WHEN '{gate}' = ANY (names) THEN to_regclass('"{schema}".{gate}') END;
    first CONSTANT oid[] := ARRAY(
        SELECT r.relation
        FROM unnest('{always_first}'::text[]) WITH ORDINALITY AS n (name, place),
             to_regclass('"{schema}".' || n.name) AS r (relation)
        WHERE n.name = ANY (names) AND r.relation IS NOT NULL ORDER BY n.place) || 0::oid;
    used oid[] := ARRAY[]::oid[];
    nth integer;
    tried oid[];
    until timestamptz;
    target oid;
    what text;
    tried_at timestamptz;
    is_vacuumed boolean := false;
    is_seen boolean := false;
    holders text;
    tell_at timestamptz := began + interval '2 s';
BEGIN
    LOOP
        tried_at := clock_timestamp();
        is_vacuumed := is_vacuumed AND EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target);
        tried := CASE WHEN is_vacuumed THEN ARRAY[target] ELSE first END;
        nth := 1;
        until := tried_at + CASE WHEN is_vacuumed THEN detected + interval '500 ms'
                                 WHEN gate IS NULL THEN least(allowed, longest) ELSE allowed END;
        BEGIN
            WHILE nth <= cardinality(tried) LOOP
                target := tried[nth];
                nth := nth + 1;
                PERFORM set_config('lock_timeout', greatest(1, ceil(
                    1000 * extract(epoch FROM until - clock_timestamp())))::text, true);
                IF target = 0 THEN
                    PERFORM pg_advisory_xact_lock({lock}, hashtext('{schema}'));
                    tried := tried || ARRAY(
                        WITH RECURSIVE wanted (relation, place) AS (
                            SELECT coalesce(i.indrelid, c.oid), n.place
                            FROM unnest(names) WITH ORDINALITY AS n (name, place)
                            JOIN pg_class AS c ON c.oid = to_regclass('"{schema}".' || quote_ident(n.name))
                                 AND c.relkind IN ('r', 'p', 'v', 'i', 'I')
                            LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
                            UNION SELECT h.inhrelid, w.place
                                  FROM wanted AS w JOIN pg_inherits AS h ON h.inhparent = w.relation)
                        SELECT w.relation FROM wanted AS w WHERE w.relation <> ALL (first) GROUP BY w.relation
                        ORDER BY array_position(used, w.relation), min(w.place), w.relation);
                ELSE
                    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', target::regclass);
                END IF;
                IF target = gate THEN
                    until := clock_timestamp() + longest;
                END IF;
            END LOOP;
            EXIT WHEN {keeps} AND NOT is_vacuumed;
            is_seen := NOT {keeps};
            RAISE lock_not_available;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            NULL;
        END;
        EXIT WHEN is_seen;
        IF target <> ALL (first) THEN
            used := target || array_remove(used, target);
        END IF;
        what := CASE target WHEN 0 THEN 'another migration, or an inbox that is created' ELSE target::regclass::text
                END;
        SELECT string_agg(holder, '; ' ORDER BY holder), coalesce(bool_or(is_autovacuum), false)
        INTO holders, is_vacuumed
        FROM (SELECT l.pid IS NOT NULL AND a.usesysid IS NULL AS is_autovacuum,
                     CASE WHEN l.pid IS NULL THEN 'a prepared transaction (see pg_prepared_xacts)' ELSE concat(
                         'pid ', l.pid, ' (', coalesce(nullif(a.application_name, ''), 'no application name'),
                         ', role ' || a.usename, ', ' || a.state,
                         ', has ', string_agg(DISTINCT l.mode, ' and ' ORDER BY l.mode), ')') END AS holder
              FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
              WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid() AND (l.pid IS NULL OR a.pid IS NOT NULL)
                AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
                AND CASE WHEN target > 0 THEN l.locktype = 'relation' AND l.relation = target
                         ELSE l.locktype = 'advisory' AND l.classid = {lock}::oid AND l.objsubid = 2
                              AND l.objid::bigint = hashtext('{schema}')::bigint & 4294967295 END
                AND coalesce(a.xact_start <= tried_at, true)
              GROUP BY l.pid, a.usesysid, a.application_name, a.usename, a.state) AS h;
        IF clock_timestamp() >= began + interval '{patience_s} s' THEN
            RAISE EXCEPTION USING ERRCODE = '{in_use}', MESSAGE = concat('Nothing was changed: after {patience_s} s ',
                what, ' is still in use by ', coalesce(holders, 'transactions that have ended by now'),
                '. Let them end, or end them with pg_terminate_backend, and try again; or wait for longer: mailroom '
                'migrate --lock-timeout SECONDS (alembic -x lock_timeout=SECONDS).');
        END IF;
        IF clock_timestamp() >= tell_at THEN
            RAISE INFO USING MESSAGE = concat('The migration waits for ', what, ', in use by ',
                                              coalesce(holders, 'one short transaction after the other'));
            tell_at := began + 2 * (clock_timestamp() - began);
        END IF;
        allowed := least(2 * allowed, interval '2 s');
        PERFORM pg_sleep_for(allowed / 4);
    END LOOP;
    PERFORM set_config('lock_timeout', '5s', true);
END $$"""


def lock_phase(schema: str, names: Iterable[str], patience_s: float) -> str:
    """Return the statement that locks the node against other migrations, then what `locked_by` has found.

    It fails with `IN_USE`, and names who is in the way, once it has tried for `patience_s` seconds.
    """
    return _phase(schema, names, patience_s, keeps=True)


def alone_phase(schema: str, patience_s: float) -> str:
    """Return the statement that waits until no other migration runs; it keeps no lock, and fails as `lock_phase`."""
    return _phase(schema, (), patience_s, keeps=False)


def _phase(schema: str, names: Iterable[str], patience_s: float, *, keeps: bool) -> str:
    return filled(
        PHASE,
        names="{" + ",".join(names) + "}",
        schema=schema,
        lock=locks.DDL,
        patience_s=f"{patience_s:g}",
        always_first="{" + ",".join(ALWAYS_FIRST) + "}",
        gate=GATE,
        in_use=IN_USE,
        keeps=str(keeps).lower(),
    )
