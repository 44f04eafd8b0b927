"""Claim: the statements that reap, and how their plans are kept.

A key is worked on by one transaction at a time, because a claim locks the key's head row (its lowest clock) before it
takes anything of the key. Rows are never updated, so a concurrent delete only makes a head disappear.
"""

from dataclasses import dataclass
from typing import cast

from mailroom.errors import UnknownInbox
from mailroom.message import COLUMNS, SELECTED, Message, messages
from mailroom.names import DEFAULT_SCHEMA
from mailroom.operation import IN_TRANSACTION, Execute, Operation, Row, Sql, Together
from mailroom.schema import BY_CLOCK

NULLS = ", ".join(f"NULL::{kind}" for kind in COLUMNS)

# A plan made while the inbox was small would be kept for when it is large and read it from end to end; so the planner
# is told, for this one statement and in the caller's transaction, to go by the indexes only. jit costs ten times the
# statement. What the caller had set comes back afterwards.
PINNED = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
PINNED |= {"jit": "off"}
WERE = ", ".join(f"current_setting('{name}')" for name in PINNED)
PIN = Sql(
    f"SELECT set_config('mailroom.pinned', concat_ws(',', {WERE}), true), "
    + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in PINNED.items()),
    columns=("text",) * (1 + len(PINNED)),
)
UNPIN = Sql(
    "SELECT "
    + ", ".join(
        f"set_config('{name}', split_part(current_setting('mailroom.pinned'), ',', {nth}), true)"
        for nth, name in enumerate(PINNED, start=1)
    ),
    columns=("text",) * len(PINNED),
)


def _pinned(claim: Execute) -> Operation[list[Row]]:
    _, rows, _ = yield Together((PIN.at()(), claim, UNPIN.at()()))
    return cast(list[Row], rows)


# A key that failed waits until retry_at. A claim that takes the message that failed takes the note of it along: rolled
# back, both are there again; committed, the key is well.
WAITING = "EXISTS (SELECT FROM {schema}.key_state s WHERE s.inbox = '{inbox}' AND s.key = %s AND s.retry_at > now())"
HEALED = """
healed AS (
    DELETE FROM {schema}.key_state s
    USING (SELECT key, max(clock) AS clock FROM gone GROUP BY key) AS g
    WHERE s.inbox = '{inbox}' AND s.key = g.key AND s.clock <= g.clock)"""

# The head is asked for by its clock, never by LIMIT 1 FOR UPDATE, which walks past a head that moved away. A head that
# another transaction holds is waited for; deleted by it, no row comes back and the caller looks again.
# RETURNING has no order: sorted once more outside.
REAP_KEY = Sql(
    f"""
WITH bound AS MATERIALIZED (SELECT floor FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}'),
head AS MATERIALIZED (
    SELECT clock FROM {{schema}}.inbox_{{inbox}}
    WHERE key = %(key)s::text
      AND clock = (SELECT min(clock) FROM {{schema}}.inbox_{{inbox}}
                   WHERE key = %(key)s::text AND clock > (SELECT floor FROM bound))
      AND NOT {WAITING.replace("%s", "%(key)s::text")}
    FOR UPDATE),
picked AS MATERIALIZED (
    SELECT i.ctid AS place FROM head, LATERAL (
        SELECT ctid, clock FROM {{schema}}.inbox_{{inbox}}
        WHERE key = %(key)s::text AND clock >= head.clock ORDER BY clock LIMIT %(limit)s::bigint) AS i),
gone AS (
    DELETE FROM {{schema}}.inbox_{{inbox}} AS i USING picked WHERE i.ctid = picked.place RETURNING i.*),
{HEALED}
SELECT {SELECTED} FROM gone ORDER BY clock
""",
    columns=COLUMNS,
)
HAS_MORE = Sql(
    f"""
SELECT EXISTS (SELECT FROM {{schema}}.inbox_{{inbox}} WHERE key = %(key)s::text AND clock > (
                   SELECT floor FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}'))
       AND NOT {WAITING.replace("%s", "%(key)s::text")}
""",
    columns=("boolean",),
)


def reaping_key(schema: str, inbox: str, key: str, limit: int) -> Operation[list[Message]]:
    """Take up to `limit` of the key's oldest messages, waiting for whoever works on the key."""
    names = {"schema": schema, "inbox": inbox}
    yield IN_TRANSACTION
    while True:
        rows = yield from _pinned(REAP_KEY.at(**names)(key=key, limit=limit))
        if rows:
            return messages(rows)
        # Empty, waiting, or its head was reaped while this transaction stood in line: a new statement tells.
        [(more,)] = yield from _pinned(HAS_MORE.at(**names)(key=key))
        if not more:
            return []


# From the oldest rows (`oldest`) come the keys that have waited longest (`head`); as many of them are locked (`near`)
# as make a full batch. Where that window is full of keys that cannot be had, a loose scan walks on over distinct keys
# (`walk`, `far`) from a cursor that goes round, so what a claim costs does not depend on the rows of keys that others
# hold. A key's share shrinks with the number of keys had, so one deep key leaves room for the others.
# FOR UPDATE stands inside LATERAL so that heads are looked up one by one and no more are locked than are wanted.
REAP_ANY = Sql(
    f"""
WITH RECURSIVE bound AS MATERIALIZED (SELECT floor FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}'),
oldest AS MATERIALIZED (
    SELECT key, clock FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} > (SELECT floor FROM bound)
    ORDER BY {BY_CLOCK} LIMIT {{window}}),
head AS MATERIALIZED (SELECT key, min(clock) AS clock, count(*) AS rows FROM oldest GROUP BY key),
wanted AS MATERIALIZED (
    SELECT least({{keys}}, ceil({{total}} / avg(least(rows, {{share}}))))::bigint AS keys,
           (SELECT count(*) FROM oldest) = {{window}} AS is_full FROM head),
near AS MATERIALIZED (
    SELECT l.key, l.clock FROM (SELECT * FROM head WHERE NOT {WAITING % "head.key"} ORDER BY clock) AS h, LATERAL (
        SELECT key, clock FROM {{schema}}.inbox_{{inbox}} AS i WHERE i.key = h.key AND i.clock = h.clock
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT (SELECT keys FROM wanted)),
missing AS MATERIALIZED (
    SELECT CASE WHEN is_full THEN keys - (SELECT count(*) FROM near) ELSE 0 END AS keys FROM wanted),
walk (key, clock, step) AS (
    (SELECT n.key, n.clock, 1 FROM missing AS m, LATERAL (
        SELECT key, clock FROM {{schema}}.inbox_{{inbox}}
        WHERE key >= %(cursor)s::text AND clock > (SELECT floor FROM bound) ORDER BY key, clock LIMIT 1) AS n
     WHERE m.keys > 0)
    UNION ALL
    SELECT n.key, n.clock, w.step + 1 FROM walk AS w, LATERAL (
        SELECT key, clock FROM {{schema}}.inbox_{{inbox}}
        WHERE key > w.key AND clock > (SELECT floor FROM bound) ORDER BY key, clock LIMIT 1) AS n
    WHERE w.step < (SELECT keys FROM missing)),
far AS MATERIALIZED (
    SELECT l.key, l.clock FROM (
        SELECT * FROM walk WHERE key NOT IN (SELECT key FROM near) AND NOT {WAITING % "walk.key"}) AS h, LATERAL (
        SELECT key, clock FROM {{schema}}.inbox_{{inbox}} AS i WHERE i.key = h.key AND i.clock = h.clock
        FOR UPDATE SKIP LOCKED) AS l),
locked AS MATERIALIZED (SELECT key, clock FROM near UNION ALL SELECT key, clock FROM far),
picked AS MATERIALIZED (
    SELECT i.place FROM locked AS l, LATERAL (
        SELECT ctid AS place, clock FROM {{schema}}.inbox_{{inbox}} WHERE key = l.key AND clock >= l.clock
        ORDER BY clock
        LIMIT (SELECT least({{per_key}}, ceil({{total}} / count(*)::float8))::bigint FROM locked)) AS i
    ORDER BY i.clock LIMIT {{total}}),
gone AS (
    DELETE FROM {{schema}}.inbox_{{inbox}} AS i USING picked WHERE i.ctid = picked.place RETURNING i.*),
{HEALED}
SELECT {SELECTED}, NULL::text AS cursor FROM gone
UNION ALL
SELECT {NULLS}, (SELECT CASE WHEN m.keys <= 0 THEN %(cursor)s::text WHEN count(walk.key) < m.keys THEN ''
                             ELSE max(walk.key) || chr(1) END
                 FROM missing AS m LEFT JOIN walk ON true GROUP BY m.keys)
ORDER BY clock
""",
    columns=(*COLUMNS, "text"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """How much one claim takes: up to `keys` keys, `per_key` messages of each and `total` in all."""

    keys: int
    per_key: int
    total: int

    def names(self) -> dict[str, str]:
        """Return the literals of the statement. As literals, the planner knows how few rows there are."""
        return {
            "keys": str(self.keys),
            "per_key": str(self.per_key),
            "total": str(self.total),
            "share": str(min(self.per_key, 10)),
            "window": str(min(4_000, max(400, 2 * self.total))),
        }


def reaping_any(schema: str, inbox: str, share: Share, cursor: str) -> Operation[tuple[list[Message], str]]:
    """Take messages of keys that nobody works on, the longest waiting first; returns them and the next cursor.

    Comes back empty only when nothing could be had: a walk that met none goes on until it has been round.
    """
    yield IN_TRANSACTION
    first, turned = cursor, False
    while True:
        rows = yield from _pinned(REAP_ANY.at(schema=schema, inbox=inbox, **share.names())(cursor=cursor))
        *taken, (*_, reached) = rows
        if taken or reached == cursor or (turned and not "" < reached < first):
            return [Message(*row[:-1]) for row in taken], reached
        cursor, turned = reached, turned or not reached


PEEK_KEY = Sql(
    f"SELECT {SELECTED} FROM {{schema}}.inbox_{{inbox}} WHERE key = %(key)s::text "
    "ORDER BY clock LIMIT %(limit)s::bigint",
    columns=COLUMNS,
)
PEEK_ANY = Sql(
    f"SELECT {SELECTED} FROM {{schema}}.inbox_{{inbox}} ORDER BY {BY_CLOCK} LIMIT %(limit)s::bigint", columns=COLUMNS
)


def peeking(schema: str, inbox: str, key: str | None, limit: int) -> Operation[list[Message]]:
    """Read the oldest messages, of one key or of all, and leave them where they are; waits for nobody."""
    names = {"schema": schema, "inbox": inbox}
    if key is None:
        return messages((yield PEEK_ANY.at(**names)(limit=limit)))
    return messages((yield PEEK_KEY.at(**names)(key=key, limit=limit)))


BACKLOG = Sql("SELECT count(*) FROM {schema}.inbox_{inbox}", columns=("bigint",))
BACKLOG_KEY = Sql("SELECT count(*) FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text", columns=("bigint",))


def counting(schema: str, inbox: str, key: str | None) -> Operation[int]:
    """Count the messages that wait, of one key or of all."""
    names = {"schema": schema, "inbox": inbox}
    [(count,)] = yield BACKLOG.at(**names)() if key is None else BACKLOG_KEY.at(**names)(key=key)
    return int(count)


KNOWN = Sql("SELECT to_regclass('{schema}.inbox_{inbox}') IS NOT NULL", columns=("boolean",))


def finding(schema: str, inbox: str) -> Operation[None]:
    """Raise `UnknownInbox` unless there is such an inbox."""
    [(found,)] = yield KNOWN.at(schema=schema, inbox=inbox)()
    if not found:
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise UnknownInbox(
            f"There is no inbox {inbox!r} in schema {schema!r}. Create it: mailroom inbox create {inbox}{option}; "
            f"see those there are: mailroom inbox list{option}"
        )
