"""What a guest leaves behind, a registered function or a trigger: the session is put back as it was found.

A session of our own is reset, after each call. Of a session that is not ours (a test's, a pooler's) nothing may be
reset that others have set: there settings are compared and set back, and a call is the last of its transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispatcher.executor.fold import Taken
from dispatcher.executor.take import OWN
from mailroom import locks
from mailroom.sql.operation import Operation, Row, Sql


@dataclass(frozen=True, slots=True)
class Host:
    """What the session has set, and who acts in it, before a guest comes; `glance` is the part that matters most.

    `settings` is None for a session of our own.
    """

    settings: dict[str, str] | None
    glance: Row


NOTE = Sql("SELECT name, setting FROM pg_catalog.pg_settings WHERE source = 'session'", columns=("text", "text"))
# Who acts is no row of pg_settings; and what changes the meaning of our own statements, or of a trigger beside them.
SEEN = (
    *("session_authorization", "role", "session_replication_role", "row_security", "search_path", "TimeZone"),
    *("statement_timeout", "lock_timeout"),
)
GLANCED = [f"current_setting('{name}')" for name in SEEN]
GLANCE = Sql("SELECT " + ", ".join(GLANCED), columns=("text",) * len(SEEN))
# Who acts comes first: the settings that others may have changed are looked at with our own rights. Not put back are
# those of the transaction, which the end of the savepoint puts back, and those that we may not set, which end with the
# transaction. Of the session and not of the transaction, in which one that was set for the session would come again.
PUT_BACK = Sql(
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
# What a call can leave that only the end of the transaction takes back: advisory locks. Those of the transaction look
# the same, and are let go of as early as the others. Not "awake", which a lane has between its transactions.
HELD = f"""
    SELECT * FROM pg_catalog.pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND NOT (objsubid = 2 AND classid::bigint = {locks.AWAKE})
"""
# Our own settings of the transaction went with the others. And a call may have removed what is to be executed after it.
LOOK = Sql(
    """
SELECT set_config('lock_timeout', %(lock_timeout)s::text, true), {own},
       EXISTS ({held} AND NOT (objsubid = 2 AND classid::bigint = {dispatch_lock}))
       OR pg_catalog.cardinality(%(next)s::bigint[])
           > (SELECT count(*) FROM {schema}.outbox_executable WHERE position = ANY(%(next)s::bigint[]))
""",
    columns=(*("text",) * 4, "boolean"),
    own=OWN,
    held=HELD,
    dispatch_lock=locks.DISPATCH,
)


def noting_settings(*, ours: bool) -> Operation[Host]:
    """Return how the session is, for what puts it back; `ours`: it may be reset."""
    settings = None if ours else dict((yield NOTE.at()()))
    [glance] = yield GLANCE.at()()
    return Host(settings, glance)


def putting_back(schema: str, host: Host, following: Sequence[Taken] = ()) -> Operation[bool]:
    """Put back what a guest has made of the session, and check constraints; return whether the transaction has to end.

    It has if something is left, or if one of the executables that are `following` is gone. Within the guest's
    savepoint: what cannot be put back fails the guest.
    """
    session, role, *_, lock_timeout = host.glance
    if host.settings is None:
        yield CLEAR.at(actor=_acting("session_authorization", session) + _acting("role", role))()
        [(*_, has_to_end)] = yield LOOK.at(schema=schema)(
            lock_timeout=lock_timeout, next=[each.position for each in following]
        )
        return bool(has_to_end)
    yield IMMEDIATE.at()()
    names = list(host.settings)
    yield PUT_BACK.at()(session=session, role=role, names=names, settings=[host.settings[name] for name in names])
    return True


def _acting(name: str, value: str) -> str:
    """Return what sets, within `CLEAR`, who acts; unless it is so: not everybody may set even that."""
    literal = "'" + value.replace("'", "''").replace("%", "%%") + "'"
    return f"IF current_setting('{name}') <> {literal} THEN PERFORM set_config('{name}', {literal}, false); END IF;"


def checking(schema: str, host: Host | None) -> Operation[None]:
    """Check constraints; and put back what triggers left, if a glance tells of it: they may run often."""
    yield IMMEDIATE.at()()
    if host is not None and (yield GLANCE.at()()) != [host.glance]:
        yield from putting_back(schema, host)


HURRY = Sql(
    "SELECT set_config('lock_timeout', %(timeout)s::text, true), current_setting('lock_timeout')",
    columns=("text", "text"),
)


def hurrying(host: Host | None, seconds: float) -> Operation[Host | None]:
    """Wait no longer than so for locks until the transaction ends; returns the host as it is then."""
    [(_, timeout)] = yield HURRY.at()(timeout=f"{round(1000 * seconds)}ms")
    return None if host is None else replace(host, glance=(*host.glance[:-1], timeout))


# Constraints that are deferred would fail the COMMIT, and with it all the others of the batch. At its beginning, so
# that each executable finds them alike; and after each, which may have deferred them again.
IMMEDIATE = Sql("SET CONSTRAINTS ALL IMMEDIATE")
# One trip for what a session has of its own, in a transaction or outside of one. RESET ALL also reaches settings that
# an extension or nobody has defined, which are not among those of pg_settings.
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
# One that was taken twice is one row here.
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


def clearing_session() -> Operation[None]:
    """Leave of a session of ours what it began with, between transactions: what a guest made of it is gone."""
    yield CLEAR.at(actor="")()
    unlocked = True
    while unlocked:
        [(unlocked,)] = yield UNLOCK.at()()
