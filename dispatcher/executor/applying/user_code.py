"""Restore the session after user code, a registered function or a trigger, has run in it.

A session of our own is reset after each call. In another's session (a test's, a pooler's) nothing may be reset that
others have set: settings are compared and restored one by one, and a call is the last of its transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.batch.take import OWN
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Row, Sql


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state of the session before user code runs: its settings and roles.

    `watched` are the values of `WATCHED_NAMES`. `settings` is None for a session of our own.
    """

    settings: dict[str, str] | None
    watched: Row


SETTINGS = Sql("SELECT name, setting FROM pg_catalog.pg_settings WHERE source = 'session'", columns=("text", "text"))
# The current roles, which pg_settings lacks, and settings that change the meaning of our statements or of triggers.
WATCHED_NAMES = (
    *("session_authorization", "role", "session_replication_role", "row_security", "search_path", "TimeZone"),
    *("statement_timeout", "lock_timeout"),
)
WATCHED_SETTINGS = [f"current_setting('{name}')" for name in WATCHED_NAMES]
WATCHED = Sql("SELECT " + ", ".join(WATCHED_SETTINGS), columns=("text",) * len(WATCHED_NAMES))
# The roles come first, so that the settings are read with our own rights. Left out are those of the transaction, which
# end with the savepoint, and those that we may not set, which end with the transaction. `false`: a setting that was
# made for the session would come back at the end of the transaction if it were restored for the transaction only.
RESTORE = Sql(
    """
SELECT set_config(s.name, s.wanted, false)
FROM (SELECT CASE WHEN current_setting('session_authorization') <> %(session)s::text
                  THEN set_config('session_authorization', %(session)s::text, false) END AS session,
             CASE WHEN current_setting('role') <> %(role)s::text
                  THEN set_config('role', %(role)s::text, false) END AS role OFFSET 0) AS actor,
     LATERAL (SELECT n.name, coalesce(b.setting, n.reset_val) AS wanted
              FROM pg_catalog.pg_settings AS n
              LEFT JOIN unnest(%(names)s::text[], %(settings)s::text[]) AS b (name, setting) ON b.name = n.name
              WHERE pg_catalog.concat(actor.session, actor.role) IS NOT NULL
                AND (n.source = 'session' OR b.name IS NOT NULL)
                AND n.name !~ '^transaction_' AND n.setting IS DISTINCT FROM coalesce(b.setting, n.reset_val)
                AND (n.context = 'user'
                     OR n.context = 'superuser' AND has_parameter_privilege(n.name, 'SET'))) AS s
""",
    columns=("text",),
)
# Advisory locks are the one thing a call can leave that only the end of the transaction releases. In pg_locks those of
# the session and of the transaction look the same. Not "awake": a lane holds that between its transactions.
HELD = f"""
    SELECT * FROM pg_catalog.pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND NOT (objsubid = 2 AND classid::bigint = {locks.AWAKE})
"""
# The reset undid our own settings of the transaction too. And a call may have removed the executables after it.
LEFTOVERS = Sql(
    """
SELECT set_config('lock_timeout', %(lock_timeout)s::text, true), {own},
       EXISTS ({held})
       OR pg_catalog.cardinality(%(next)s::bigint[])
           > (SELECT count(*) FROM {schema}.outbox_executable WHERE position = ANY(%(next)s::bigint[]))
""",
    columns=(*("text",) * 4, "boolean"),
    own=OWN,
    held=HELD,
)


def reading_session(*, own_session: bool) -> Operation[SessionState]:
    """Return the state to which `restoring` brings the session back; `own_session`: it may be reset."""
    settings = None if own_session else dict((yield SETTINGS.at()()))
    [watched] = yield WATCHED.at()()
    return SessionState(settings, watched)


def restoring(schema: str, session: SessionState, following: Sequence[Taken] = ()) -> Operation[bool]:
    """Restore the session after user code, and check constraints; return whether the transaction must end.

    It must if something is left, or if one of the `following` executables is gone. Use within the savepoint of the user
    code: a session that cannot be restored fails that code.
    """
    authorization, role, *_, lock_timeout = session.watched
    if session.settings is None:
        yield CLEAR.at(actor=_acting("session_authorization", authorization) + _acting("role", role))()
        [(*_, has_to_end)] = yield LEFTOVERS.at(schema=schema)(
            lock_timeout=lock_timeout, next=[each.position for each in following]
        )
        return bool(has_to_end)
    yield IMMEDIATE.at()()
    names = list(session.settings)
    yield RESTORE.at()(
        session=authorization, role=role, names=names, settings=[session.settings[name] for name in names]
    )
    return True


def _acting(name: str, value: str) -> str:
    """Return the part of `CLEAR` that restores a role. Not if it is right already: setting it may need privileges."""
    literal = "'" + value.replace("'", "''").replace("%", "%%") + "'"
    return f"IF current_setting('{name}') <> {literal} THEN PERFORM set_config('{name}', {literal}, false); END IF;"


def checking(schema: str, session: SessionState | None) -> Operation[None]:
    """Check constraints; restore the session only if a watched setting changed, since triggers may run often."""
    yield IMMEDIATE.at()()
    if session is not None and (yield WATCHED.at()()) != [session.watched]:
        yield from restoring(schema, session)


LIMIT_LOCK_WAIT = Sql(
    "SELECT set_config('lock_timeout', %(timeout)s::text, true), current_setting('lock_timeout')",
    columns=("text", "text"),
)


def limiting_lock_wait(session: SessionState | None, seconds: float) -> Operation[SessionState | None]:
    """Limit lock waits to that many seconds until the transaction ends; return the session state with that limit."""
    [(_, timeout)] = yield LIMIT_LOCK_WAIT.at()(timeout=f"{round(1000 * seconds)}ms")
    return None if session is None else replace(session, watched=(*session.watched[:-1], timeout))


# A deferred constraint would fail at COMMIT, and the whole batch with it. Set at the beginning, so that each executable
# runs under the same rule, and after each one, since it may have deferred them again.
IMMEDIATE = Sql("SET CONSTRAINTS ALL IMMEDIATE")
# Resets a session in one trip, inside a transaction or outside. RESET ALL also reaches settings that an
# extension or no code has defined, which pg_settings does not list.
# D-execute-4: After user code the session is reset.
CLEAR = Sql(
    """
DO $clear$
BEGIN
    SET CONSTRAINTS ALL IMMEDIATE;
    RESET ALL;
    {actor}
    EXECUTE 'CLOSE ALL';
    UNLISTEN *;
    DISCARD TEMP;
    DISCARD SEQUENCES;
END $clear$
"""
)
# A lock that was taken twice is one row here, so this is repeated until nothing is left.
UNLOCK = Sql(
    """
SELECT coalesce(bool_or(CASE WHEN is_pair AND is_shared THEN pg_advisory_unlock_shared(high, low)
                             WHEN is_pair THEN pg_advisory_unlock(high, low)
                             WHEN is_shared THEN pg_advisory_unlock_shared(whole)
                             ELSE pg_advisory_unlock(whole) END), false)
FROM (SELECT objsubid = 2 AS is_pair, mode = 'ShareLock' AS is_shared,
             (classid::bigint << 32) | objid::bigint AS whole,
             ((classid::bigint # 2147483648) - 2147483648)::integer AS high,
             ((objid::bigint # 2147483648) - 2147483648)::integer AS low
      FROM ({held}) AS l
      OFFSET 0) AS held
""",
    columns=("boolean",),
    held=HELD,
)


# User code may also have deallocated what psycopg has prepared in the session. It notices only a DEALLOCATE ALL that it
# sends itself. So a statement that is not used tells whether there was one.
KEPT = Sql(
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_prepared_statements WHERE name = 'mailroom_kept')", columns=("boolean",)
)
FORGET = Sql("DEALLOCATE ALL")
KEEP = Sql("PREPARE mailroom_kept AS SELECT")


def clearing_session() -> Operation[None]:
    """Reset a session of our own between transactions: all that user code left in it is gone.

    Run it without prepared statements.
    """
    yield CLEAR.at(actor="")()
    unlocked = True
    while unlocked:
        [(unlocked,)] = yield UNLOCK.at()()
    [(kept,)] = yield KEPT.at()()
    if not kept:
        yield FORGET.at()()
        yield KEEP.at()()
