"""What a guest leaves behind, a registered function or a trigger: the session is put back as it was found.

Within the transaction by comparing settings before and after; what only ends with a session, after the COMMIT.
"""

from dataclasses import dataclass

from mailroom import locks
from mailroom.operation import Operation, Row, Sql


@dataclass(frozen=True, slots=True)
class Host:
    """What the session has set, and who acts in it, before a guest comes; `glance` is the part that matters most."""

    settings: dict[str, str]
    glance: Row


NOTE = Sql("SELECT name, setting FROM pg_catalog.pg_settings WHERE source = 'session'", columns=("text", "text"))
# Who acts is no row of pg_settings; and what changes the meaning of our own statements, or of a trigger beside them.
SEEN = (
    *("session_authorization", "role", "session_replication_role", "row_security", "search_path", "TimeZone"),
    *("statement_timeout", "lock_timeout"),
)
GLANCE = Sql("SELECT " + ", ".join(f"current_setting('{name}')" for name in SEEN), columns=("text",) * len(SEEN))
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


def noting_settings() -> Operation[Host]:
    """Return how the session is, for `putting_back_settings`."""
    settings = dict((yield NOTE.at()()))
    [glance] = yield GLANCE.at()()
    return Host(settings, glance)


def putting_back_settings(host: Host, *, after_call: bool) -> Operation[None]:
    """Set what is something else by now; after triggers, which may run often, only if a glance tells of it."""
    if not after_call and (yield GLANCE.at()()) == [host.glance]:
        return
    session, role, *_ = host.glance
    names = list(host.settings)
    yield PUT_BACK.at()(session=session, role=role, names=names, settings=[host.settings[name] for name in names])


# Settings that an extension or nobody has defined are not among those of pg_settings; the session has none of them.
CLEAR = (
    Sql("RESET ALL"),
    Sql("CLOSE ALL"),
    Sql("UNLISTEN *"),
    Sql("DISCARD TEMP"),
    Sql("DISCARD SEQUENCES"),
)
# All advisory locks but "awake", which a lane has between its transactions. One that was taken twice is one row here.
UNLOCK = Sql(
    f"""
SELECT coalesce(bool_or(CASE WHEN is_pair AND is_shared THEN pg_advisory_unlock_shared(high, low)
                             WHEN is_pair THEN pg_advisory_unlock(high, low)
                             WHEN is_shared THEN pg_advisory_unlock_shared(whole)
                             ELSE pg_advisory_unlock(whole) END), false)
FROM (SELECT objsubid = 2 AS is_pair, mode = 'ShareLock' AS is_shared,
             (classid::bigint << 32) | objid::bigint AS whole,
             ((classid::bigint # 2147483648) - 2147483648)::integer AS high,
             ((objid::bigint # 2147483648) - 2147483648)::integer AS low
      FROM pg_catalog.pg_locks
      WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND NOT (objsubid = 2 AND classid::bigint = {locks.AWAKE})
      OFFSET 0) AS held
""",
    columns=("boolean",),
)


def clearing_session() -> Operation[None]:
    """Leave of a session of ours what it began with, between transactions: what a guest made of it is gone."""
    for statement in CLEAR:
        yield statement.at()()
    unlocked = True
    while unlocked:
        [(unlocked,)] = yield UNLOCK.at()()
