"""The statements that reap messages, and the planner settings that keep their plans stable.

One transaction at a time works on a key, because a claim locks the key's head row (its lowest clock) before it takes
anything of the key. Rows are never updated, so a concurrent delete only makes a head disappear.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

from inbox.keeping import FITS, keeping
from mailroom.errors import SchemaError
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.expressions import BY_CLOCK
from mailroom.sql.operation import IN_TRANSACTION, Execute, Operation, Row, Sql
from mailroom.sql.sight import unseen

MAX_BYTES = 32 * 1024 * 1024  # of values in one claim
MAX_STEPS = 10_000  # distinct keys that one statement walks over at most

NULLS = ", ".join(f"NULL::{kind}" for kind in COLUMNS.values())

# PostgreSQL would keep a plan made while the inbox was small, and then scan a large inbox from end to end. So these
# settings restrict the planner to index scans, for this one statement in the caller's transaction. jit costs ten times
# the statement itself. Without force_generic_plan it would be planned anew several times, which costs four times the
# statement, and again after every rollback, since psycopg then forgets its prepared statements. The claim's last row
# restores the caller's settings: by then the statement is planned. Nobody reads what PIN returns, so it declares no
# columns, and goes with the BEGIN before it (`mailroom.sql.runner`).
# D-reap-6: Each claim pins its plan.
PINNED = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
PINNED |= {"jit": "off", "plan_cache_mode": "force_generic_plan"}
# A policy that hides some rows would make a claim overtake them, or find nothing for ever: the server refuses instead.
PINNED |= {"row_security": "off"}
CURRENT = ", ".join(f"current_setting('{name}')" for name in PINNED)
PIN = Sql(
    f"SELECT set_config('mailroom.pinned', pg_catalog.concat_ws(',', {CURRENT}), true), "
    + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in PINNED.items())
)
UNPINNED = " IS NULL OR ".join(
    f"set_config('{name}', split_part(current_setting('mailroom.pinned'), ',', {nth}), true)"
    for nth, name in enumerate(PINNED, start=1)
)
UNPINNED = f"({UNPINNED} IS NULL)"


def _pinned(claim: Execute) -> Operation[tuple[list[Row], Row]]:
    """Run a claim under `PINNED`; return its rows without the last one, and the last one."""
    yield PIN.at()()
    *rows, last = yield claim
    return cast(list[Row], rows), cast(Row, last)


# A failing key has a row in key_state. It waits until retry_at, which is infinity while it is parked. A worker then
# tries it one message at a time (`inbox.by_key.due`), so that one bad message does not roll back the batches of others.
# A claim that takes the message that failed also deletes the key_state row: a rollback restores both, a commit makes
# the key healthy. It keeps the row while the key has messages below the healthy floor (alone_to), where claims do not
# search for healthy keys. And it keeps the row of a key that was paused after its snapshot: nothing but a resume ends a
# pause.
# (SELECT ...) IS NULL stays an index probe; NOT EXISTS may be planned as a join that reads all of key_state.
KEY_STATE = "(SELECT s.clock FROM {schema}.my_key_state s WHERE s.inbox = '{inbox}' AND s.key = %s"
HEALTHY = f"{KEY_STATE}) IS NULL"
NOT_WAITING = f"{KEY_STATE} AND s.retry_at > now()) IS NULL"
HEALED = """
healed AS (
    UPDATE {schema}.my_key_state s SET deleted = true
    FROM (SELECT key, max(clock) AS clock FROM gone GROUP BY key) AS g
    WHERE s.inbox = '{inbox}' AND s.key = g.key AND s.clock <= g.clock AND s.alone_to <= g.clock
      AND s.paused_at IS NULL)"""

# A paused inbox gives nothing: each claim reads the registry's row anyway, and takes a floor from it that no clock is
# above. So nothing is scanned, a claim costs no more where nothing is paused, and a row that is missing is told apart.
# A paused key has a row in key_state with `retry_at = 'infinity'`, as a parked one (`inbox.by_key.paused_keys`).
# D-reap-10: A paused inbox has a floor that no clock is above.
NO_CLOCK = str(2**63 - 1)
OPEN = f"CASE WHEN paused_at IS NULL THEN %s ELSE {NO_CLOCK} END"
FLOOR = OPEN % "floor" + " AS floor"
# A claim whose text is not that for the setting of the inbox takes nothing either (`inbox.keeping`).
IS_OPEN = f"paused_at IS NULL AND {FITS}"
TAKEN = OPEN.replace("paused_at IS NULL", IS_OPEN)

# The head is selected by its clock, never by LIMIT 1 FOR UPDATE, which would skip a head deleted while we waited for
# its lock and return the next message. If the transaction that held the head deletes it, no row comes back and the
# caller runs a new statement.
# RETURNING has no order, so the result is sorted again outside. `fitting` bounds a claim by the size of its values: the
# oldest message always, then as many of the next oldest as fit. JSON counts as text: it is stored compressed, and
# 1e9999 takes a few bytes. `fitting` measures in order and stops at the first message that does not fit, so SIZE is
# here and not in `picked`, which is materialized as a whole before.
# D-reap-2: A key's head is selected by its clock, and then locked.
SIZE = "coalesce(bytes, octet_length(value_json::text))"
LIGHT = f"""CASE WHEN value_json IS NULL THEN octet_length(value)
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE {2 * MAX_BYTES} END"""
PICKED = "ctid AS place, clock, octet_length(value) AS bytes, value_json"
FITTING = f"""fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(%s) OVER oldest > {MAX_BYTES} AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), {2**63 - 1}))"""
REAP_KEY = Sql(
    """
WITH bound AS MATERIALIZED (SELECT {floor}, {fits} AS fits FROM {schema}.inbox_registry WHERE name = '{inbox}'),
head AS MATERIALIZED (
    SELECT clock FROM {schema}.inbox_{inbox}
    WHERE key = %(key)s::text
      AND clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                   WHERE key = %(key)s::text AND clock > (SELECT floor FROM bound))
      AND {not_waiting}
    FOR UPDATE),
picked AS MATERIALIZED (
    SELECT i.* FROM head, LATERAL (
        SELECT {picked} FROM {schema}.inbox_{inbox}
        WHERE key = %(key)s::text AND clock >= head.clock ORDER BY clock LIMIT %(limit)s::bigint) AS i),
{fitting},
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM fitting)) RETURNING i.*){archived},
{healed}
SELECT {selected}, NULL::boolean, NULL::boolean FROM gone
UNION ALL
SELECT {nulls}, {unpinned}, (SELECT fits FROM bound)
ORDER BY clock
""",
    columns=COLUMNS | {"is_unpinned": "boolean", "fits": "boolean"},
    floor=TAKEN % "floor" + " AS floor",
    fits=FITS,
    not_waiting=NOT_WAITING % "%(key)s::text",
    picked=PICKED,
    fitting=FITTING % SIZE,
    healed=HEALED,
    selected=SELECTED,
    nulls=NULLS,
    unpinned=UNPINNED,
)
HAS_MORE = Sql(
    """
WITH bound AS MATERIALIZED (SELECT {floor} FROM {schema}.inbox_registry WHERE name = '{inbox}')
SELECT CASE WHEN EXISTS (SELECT FROM bound) THEN
           EXISTS (SELECT FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock > (SELECT floor FROM bound))
           AND {not_waiting} END, {unpinned}
""",
    columns=("boolean", "boolean"),
    floor=FLOOR,
    not_waiting=NOT_WAITING % "%(key)s::text",
    unpinned=UNPINNED,
)


def reaping_key(
    schema: str, inbox: str, key: str, limit: int, course: "Course"
) -> Operation[tuple[list[Message], "Course"]]:
    """Take up to `limit` of the key's oldest messages; wait while another transaction works on the key.

    Returns the next course too, which says whether the inbox keeps what is reaped.
    """
    names = {"schema": schema, "inbox": inbox}
    yield IN_TRANSACTION
    while True:
        reap = REAP_KEY.at(**keeping(course.keeps), **names)
        rows, last = yield from _pinned(reap(key=key, limit=limit))
        if rows:
            return messages(rows), course
        if REAP_KEY.named([last])[0].fits is False:
            course = replace(course, keeps=not course.keeps)
            continue
        # The key is empty or waiting, or its head was reaped while this transaction waited: only a new snapshot tells.
        _, (more, _) = yield from _pinned(HAS_MORE.at(**names)(key=key))
        if more is None:
            raise unregistered(schema, inbox)
        if not more:
            return [], course


def unregistered(schema: str, inbox: str) -> SchemaError:
    """Return the error of a claim that does not see the inbox's row in `inbox_registry`, and so finds no message."""
    return unseen(f"row of inbox {inbox!r} in inbox_registry", schema)


# Each claim returns when the next failing key is due, so that a worker neither polls for it nor tries it late.
DUE_IN_S = (
    "(SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_due "
    "WHERE inbox = '{inbox}' AND retry_at < 'infinity' LIMIT 1)"
)

# The oldest rows (`oldest`) give the keys that have waited longest: of each, the first one is its head (`nth`). The
# claim locks as many of these heads (`near`) as make a full batch. Where that window is full of keys that cannot be
# claimed, and has less than half a batch of others, a loose scan goes on over distinct keys (`walk`, `far`) from a
# rotating cursor, so the cost of a claim does not depend on the rows of keys that others hold. A key's share (`most`)
# shrinks as more keys are locked, so one deep key leaves room for the others. Rows are never updated, so a row of the
# window is found by its place as long as the statement runs. The place is read there also so that no index has all that
# is wanted: an inbox that was small would be read by its keys as a whole, and sorted.
# Window and walk start at the healthy floor: everything that waits below it belongs to failing keys
# (`dispatcher.housekeeping.healthy_floor`), so the cost does not depend on those either. Where nobody maintains that
# floor, the walk skips them, many at a time. Failing keys that are due are looked up by their own index (`due`) and get
# at most half of the room. Where more waits than the window has, keys may have more than their rows in it: see
# `Course`. OFFSET 0 keeps the sort below the look for a failure, which is then made for no more heads than are wanted,
# and for none if the inbox has no failing key at all.
# FOR UPDATE is inside LATERAL so that heads are looked up one by one and no more of them are locked than are wanted.
# A worker records a failure before it rolls back, so the next holder of the key's lock must find that record. The
# statement's own snapshot may be older than the record; the key would then be tried at once instead of after its
# backoff. So `failing` asks `failing_keys` after the locks are taken: a volatile function has a snapshot of its own.
# A worker that died has recorded nothing, but its in-flight entry is there. So a worker's claim asks for those too, if
# another transaction has locked one of its heads before (xmax), and leaves out the keys in them until the death is
# counted.
# A migration locks the registry before key_state, and so does a claim: a statement locks its tables in the order of its
# CTEs, after those that stand in none of them. So `bound` comes first, and `due_next` is a CTE.
# D-reap-3: What a claim takes stands in its window.
WALK = f"""
        SELECT key, clock, ({HEALTHY % "i.key"})::integer AS found FROM (
            SELECT key, clock FROM {{schema}}.inbox_{{inbox}}
            WHERE key %s AND clock > (SELECT healthy FROM bound) ORDER BY key, clock LIMIT 1) AS i OFFSET 0"""
TEXT = """
WITH RECURSIVE bound AS MATERIALIZED (
    SELECT {floor}, {healthy_floor} AS healthy, {is_open} AS is_open, {fits} AS fits,
           EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}') AS has_failing
    FROM {schema}.inbox_registry WHERE name = '{inbox}'),
due_next AS MATERIALIZED (SELECT {due_in_s} AS in_s FROM bound WHERE is_open AND has_failing),
{due_heads}oldest AS MATERIALIZED (
    SELECT *, row_number() OVER (PARTITION BY key ORDER BY clock) AS nth FROM (
        SELECT key, clock, ctid AS place, octet_length(value) AS bytes FROM {schema}.inbox_{inbox}
        WHERE {by_clock} > (SELECT healthy FROM bound) ORDER BY {by_clock} LIMIT {window}) AS o),
wanted AS MATERIALIZED (
    SELECT least({keys}, ceil({total}::float8 / CASE WHEN is_full THEN greatest(rows, %(depth)s::float8)
                                                     ELSE rows END))::bigint{but_due} AS keys,
           rows, heads, is_full
    FROM (SELECT sum(CASE WHEN nth <= {share} THEN 1 END)::float8 / sum(CASE WHEN nth = 1 THEN 1 END)::float8 AS rows,
                 sum(CASE WHEN nth = 1 THEN 1 END) AS heads, count(*) = {window} AS is_full
          FROM oldest) AS h),
near AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax, false AS is_due
    FROM (SELECT * FROM (SELECT key, place FROM oldest WHERE nth = 1 ORDER BY clock OFFSET 0) AS head
          WHERE key <> ALL (%(but)s::text[])
            AND CASE WHEN (SELECT has_failing FROM bound) THEN {healthy} ELSE true END) AS h, LATERAL (
        SELECT key, clock, xmax FROM {schema}.inbox_{inbox} AS i WHERE i.ctid = h.place FOR UPDATE SKIP LOCKED) AS l
    LIMIT (SELECT greatest(keys, 0) FROM wanted)),
seen AS MATERIALIZED (
    SELECT count(*) AS messages FROM oldest WHERE CASE WHEN key IN (SELECT key FROM near) THEN true END),
missing AS MATERIALIZED (
    SELECT CASE WHEN is_full AND keys > 2 * found AND {total} > 2 * (SELECT messages FROM seen) THEN keys - found
                ELSE 0 END AS keys
    FROM wanted, (SELECT count(*) AS found FROM near) AS n),{far_heads}
failing AS MATERIALIZED (
    SELECT key, retry_at FROM {schema}.failing_keys(
        '{inbox}', ARRAY(SELECT key FROM {locked}), ARRAY(SELECT key FROM {locked} WHERE {tried}), %(mine)s::uuid[])),
granted AS MATERIALIZED (
    SELECT key, clock FROM {locked} AS l
    WHERE NOT EXISTS (SELECT FROM failing AS s
                      WHERE s.key = l.key AND (NOT l.is_due OR s.retry_at > clock_timestamp()))),
asked AS MATERIALIZED (
    SELECT least({per_key}, ceil({total}::float8 / given))::bigint AS most, given, {by_key} AS by_key,
           keys, heads, is_full
    FROM (SELECT nullif(count(*), 0)::float8 AS given FROM granted) AS g, wanted),
picked AS MATERIALIZED (
    {from_window}SELECT i.* FROM granted AS h, LATERAL (
        SELECT {picked} FROM {schema}.inbox_{inbox}
        WHERE key = h.key AND clock >= h.clock ORDER BY clock LIMIT (SELECT most FROM asked)) AS i
    WHERE (SELECT by_key FROM asked)
    ORDER BY clock LIMIT {total}),
plain AS MATERIALIZED (
    SELECT keys <= 0
           AND ({due} = 0 OR NOT EXISTS (SELECT FROM {schema}.my_due
                                         WHERE inbox = '{inbox}' AND retry_at <= (SELECT clock_timestamp())))
           AND (SELECT coalesce(sum({light}), 0) <= {max_bytes} FROM picked) AS is_plain
    FROM missing),
{fitting}gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i
    WHERE ctid = ANY (ARRAY({places})) RETURNING i.*){archived}{healed}
SELECT {selected}, NULL::boolean, NULL::boolean, NULL::text AS cursor, NULL::bigint, NULL::boolean,
       NULL::float8 AS due_in_s, NULL::boolean, NULL::boolean
FROM gone
UNION ALL
SELECT {nulls}, CASE WHEN EXISTS (SELECT FROM bound) THEN is_plain END,
       is_full OR keys = (SELECT count(*) FROM near) AND keys < heads
       OR (SELECT count(*) FROM gone) < (SELECT messages FROM seen){or_due},
       {reached}, CASE WHEN is_full THEN given::bigint END, by_key,
       (SELECT in_s FROM due_next), {unpinned} OR ({held} AND {schema}.hold_batch()), (SELECT fits FROM bound)
FROM asked, plain
ORDER BY clock
"""
# They have values in the last row only.
ENDING = {
    "is_plain": "boolean", "left": "boolean", "reached": "text", "keys": "bigint", "by_key": "boolean",
    "due_in_s": "float8", "is_unpinned": "boolean", "fits": "boolean",
}  # fmt: skip
PARTS: dict[str, Any] = {
    "floor": TAKEN % "floor" + " AS floor",
    "healthy_floor": TAKEN % "greatest(floor, healthy_floor)",
    "is_open": IS_OPEN,
    "fits": FITS,
    "by_clock": BY_CLOCK,
    "healthy": HEALTHY % "head.key",
    "max_bytes": MAX_BYTES,
    "selected": SELECTED,
    "nulls": NULLS,
    "due_in_s": DUE_IN_S,
    "unpinned": UNPINNED,
}
# A plain claim needs no keys beyond the window, none that is due, and cannot be too large. It goes by a plan that is
# half as large, and starting the plan is most of what a small claim costs. If it turns out not to be plain, it takes
# nothing, and `REAP_ANY` follows. A key that it takes has no row of `key_state`, so none has to be healed. Its messages
# are those of the window, unless these make so few of a batch that it pays to search for more of each key (`by_key`).
# D-reap-7: A plain claim has a statement of its own.
REAP_PLAIN = Sql(
    TEXT,
    COLUMNS | ENDING,
    due_heads="",
    but_due="",
    far_heads="",
    locked="near",
    by_key="is_full AND least({per_key}, {total}::float8 / keys::float8) >= 1.2::float8 * rows",
    from_window=f"""SELECT place, clock, coalesce(bytes, (
        SELECT {LIGHT} FROM {{schema}}.inbox_{{inbox}} AS i WHERE i.ctid = o.place)) AS light
    FROM oldest AS o
    WHERE nth <= (SELECT most FROM asked WHERE NOT by_key) AND CASE WHEN key IN (SELECT key FROM granted) THEN true END
    UNION ALL
    """,
    picked=f"ctid AS place, clock, {LIGHT} AS light",
    light="light",
    fitting="",
    places="SELECT place FROM picked WHERE (SELECT is_plain FROM plain)",
    healed="",
    or_due="",
    reached="%(cursor)s::text",
    **PARTS,
)
REAP_ANY = Sql(
    TEXT,
    COLUMNS | ENDING,
    due_heads="""due AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax FROM (
        SELECT key FROM {schema}.my_due
        WHERE inbox = '{inbox}' AND retry_at <= (SELECT clock_timestamp() FROM bound WHERE is_open)
        ORDER BY retry_at, key) AS d, LATERAL (
        SELECT key, clock, xmax FROM {schema}.inbox_{inbox} AS i
        WHERE i.key = d.key AND i.clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                                           WHERE key = d.key AND clock > (SELECT floor FROM bound))
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT {due}),
""",
    but_due=" - (SELECT count(*) FROM due)",
    far_heads="""
walk (key, clock, is_healthy, found, step) AS (
    (SELECT n.key, n.clock, n.found = 1, n.found, 1 FROM missing AS m, LATERAL ({walk_from}) AS n
     WHERE m.keys > 0)
    UNION ALL
    SELECT n.key, n.clock, n.found = 1, w.found + n.found, w.step + 1 FROM walk AS w, LATERAL ({walk_on}) AS n
    WHERE w.found < (SELECT keys FROM missing) AND w.step < {max_steps}),
far AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax FROM (
        SELECT * FROM walk
        WHERE is_healthy AND key NOT IN (SELECT key FROM near) AND key <> ALL (%(but)s::text[])) AS h, LATERAL (
        SELECT key, clock, xmax FROM {schema}.inbox_{inbox} AS i WHERE i.key = h.key AND i.clock = h.clock
        FOR UPDATE SKIP LOCKED) AS l),
locked AS MATERIALIZED (
    SELECT * FROM near UNION ALL SELECT key, clock, xmax, true FROM due
    UNION ALL SELECT key, clock, xmax, false FROM far),""",
    walk_from=WALK % ">= %(cursor)s::text",
    walk_on=WALK % "> w.key",
    locked="locked",
    by_key="true",
    from_window="",
    picked=PICKED,
    light=LIGHT.replace("octet_length(value)\n", "bytes\n"),
    fitting=f"{FITTING % SIZE},\n",
    places="SELECT place FROM fitting",
    healed=f",{HEALED}",
    or_due=" OR EXISTS (SELECT FROM due)",
    reached="""
       (SELECT CASE WHEN m.keys <= 0 THEN %(cursor)s::text
                    WHEN coalesce(max(walk.found), 0) < m.keys AND coalesce(max(walk.step), 0) < {max_steps} THEN ''
                    ELSE max(walk.key) || chr(1) END
        FROM missing AS m LEFT JOIN walk ON true GROUP BY m.keys)""",
    max_steps=MAX_STEPS,
    **PARTS,
)

# Most claims of an inbox that is not late find one message or none, and there starting the plan is all they cost. So a
# claim after such a one goes by a plan of a few nodes. It takes the only message above the healthy floor, if no key
# fails at all; of anything else it takes nothing, `is_plain` is false, and `REAP_PLAIN` follows.
# D-reap-19: A claim of the only message has a statement of its own.
REAP_ONE = Sql(
    """
WITH bound AS MATERIALIZED (
    SELECT {healthy_floor} AS healthy, {fits} AS fits,
           NOT EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}') AS is_well
    FROM {schema}.inbox_registry WHERE name = '{inbox}'),
oldest AS MATERIALIZED (
    SELECT ctid AS place FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > (SELECT healthy FROM bound) ORDER BY {by_clock} LIMIT 2),
head AS MATERIALIZED (
    SELECT l.place, l.key, l.xmax FROM oldest AS o, LATERAL (
        SELECT ctid AS place, key, xmax FROM {schema}.inbox_{inbox} AS i
        WHERE i.ctid = o.place AND {light} <= {max_bytes} FOR UPDATE SKIP LOCKED) AS l
    WHERE (SELECT is_well FROM bound) AND (SELECT count(*) FROM oldest) = 1),
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM head WHERE NOT EXISTS (
        SELECT FROM {schema}.failing_keys(
            '{inbox}', ARRAY(SELECT key FROM head), ARRAY(SELECT key FROM head WHERE {tried}), %(mine)s::uuid[]))))
    RETURNING i.*){archived}
SELECT {selected}, NULL::boolean, NULL::boolean, NULL::boolean FROM gone
UNION ALL
SELECT {nulls},
       CASE WHEN EXISTS (SELECT FROM bound)
            THEN (SELECT is_well FROM bound) AND (SELECT count(*) FROM oldest) = (SELECT count(*) FROM gone) END,
       {unpinned} OR ({held} AND {schema}.hold_batch()), (SELECT fits FROM bound)
ORDER BY clock
""",
    COLUMNS | {"is_plain": "boolean", "is_unpinned": "boolean", "fits": "boolean"},
    light=LIGHT,
    **{
        name: PARTS[name]
        for name in ("healthy_floor", "fits", "by_clock", "max_bytes", "selected", "nulls", "unpinned")
    },
)

ORPHANED = Sql("SELECT key FROM {schema}.orphaned_keys('{inbox}', %(mine)s::uuid[]) AS o (key)", columns=("text",))

DEEP_ENOUGH = 2  # messages of one key, for a smaller window
# D-reap-5: Keys are not shared out among workers beforehand.
DEEP = 10  # messages of one key; with more of them in one claim a message costs hardly less


@dataclass(frozen=True, slots=True)
class Share:
    """The bounds of one claim: up to `keys` keys, `per_key` messages of each and `most` in all."""

    keys: int
    per_key: int
    most: int
    due_too: bool = True  # also take failing keys that are due; a worker takes those in transactions of their own
    # A worker's: have the server refuse a COMMIT by anybody else (`inbox.sessions.hold`), and leave out the keys in the
    # in-flight entries of others whose batches have ended.
    hold: bool = False
    mine: Sequence[UUID] = ()  # the entries of this worker
    # Prefixes of keys whose breakers are open, and what ends one: of an inbox that reads a log their keys leave it.
    prefixes: Sequence[str] = ()
    separator: str = ""

    @property
    def deep(self) -> int:
        """How many messages of one key are as good as more of them."""
        return min(self.per_key, DEEP)

    def names(self, depth: float = 1.0, keeps: bool = False, is_crowded: bool = False) -> dict[str, str]:
        """Return the statement's literals: from parameters the planner would not know how few rows to expect.

        `depth`, `keeps` and `is_crowded` are those of the `Course`: the window is smaller where few keys are wanted.
        """
        most = 4 if depth < DEEP_ENOUGH else 2
        fullest = (2 if is_crowded else 1) * self.most
        return {
            "keys": str(self.keys),
            "per_key": str(self.per_key),
            "total": str(self.most),
            "share": str(self.deep),
            # The window is read for each claim, so that of a small one is small. A larger one has more keys that nobody
            # else has locked: where others work too, it is that many of them.
            "window": str(min(4_000, max(100 if is_crowded else 10, min(400, most * self.most), fullest))),
            "due": str((self.keys + 1) // 2 if self.due_too else 0),
            "held": "EXISTS (SELECT FROM gone)" if self.hold else "false",
            "tried": "xmax <> '0'" if self.hold else "false",
        } | keeping(keeps)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The messages that a claim took, in clock order; those of a total inbox by (sent_clock, origin).

    `due_in_s` is the number of seconds until the next failing key is due, None if there is none. `is_all` is true if no
    other message could be claimed, apart from failing keys and keys that others have locked. `ended` is a message that
    had used up its attempts and that this claim has moved to `parked` or `dead_letter` (`inbox.by_key.due`).
    `has_diverted`: it has moved messages of failing keys from a log to where claims of what is due find them.
    """

    messages: list[Message]
    due_in_s: float | None
    is_all: bool
    ended: Message | None = None
    has_diverted: bool = False


# D-reap-4: The window of a large batch has its rows, and twice as many beside others.
CROWDED = 32  # claims with a larger window, after one that found keys of its window locked
# D-reap-8: From a backlog a claim takes more messages of fewer keys.
STEEP, GENTLE = 0.25, 0.005  # steps of `Course`: a batch that asks for too much of each key lacks as large a part


@dataclass(frozen=True, slots=True)
class Course:
    """What a claim leaves for the next one of the same inbox; only speed and fairness depend on it.

    `cursor` is where the next walk over keys starts. `depth` is how many messages each of the oldest keys seems to
    have, if more wait than a claim looks at: then as many of fewer keys are taken, so that keys are left for others. No
    claim sees whether keys have more, so each one asks for more of each (by `step`), until one that searched for them
    was not full: it has found how many they have. `is_plain`: `REAP_PLAIN` will probably do. `keeps`: the inbox
    probably keeps what is reaped. `is_single`: no more than one message seems to wait.
    """

    cursor: str = ""
    depth: float = 1.0
    step: float = STEEP
    is_plain: bool = True
    keeps: bool = False
    crowded: int = 0
    is_single: bool = False

    def after(self, cursor: str, is_plain: bool, share: Share, taken: int, keys: int | None, by_key: bool) -> "Course":
        """Return the course after a claim within `share` that took that many messages from that many keys.

        `keys` is None if no more messages waited than it looked at. `by_key`: it searched for the messages of each key.
        """
        is_short = taken < share.most
        crowded = max(0, self.crowded - 1) if is_plain else CROWDED
        course = replace(self, cursor=cursor, is_plain=is_plain, crowded=crowded)
        if keys and by_key and is_short:
            return replace(course, depth=max(1.0, taken / keys), step=GENTLE)
        if keys:
            depth = min(share.deep, self.depth * (1 + self.step))
            crowded = CROWDED if is_short else course.crowded
            return replace(course, depth=depth, step=min(STEEP, 2 * self.step), crowded=crowded)
        return course


def reaping_any(schema: str, inbox: str, share: Share, course: Course) -> Operation[tuple[Claimed, Course]]:
    """Take messages of keys that nobody works on, the longest waiting first; return them and the next course.

    The result is empty only if no message could be claimed: a walk that found none continues until it has been round.
    """
    taken, left, due_in_s, course = yield from reaping_rows(schema, inbox, share, course)
    return Claimed(messages(taken), due_in_s, not left), course


def reaping_rows(
    schema: str, inbox: str, share: Share, course: Course
) -> Operation[tuple[list[Row], bool, float | None, Course]]:
    """Like `reaping_any`, but return raw rows, each of the columns of `SELECTED` and of empty ones (`ENDING`).

    Behind them: whether more messages could be claimed, in how many seconds the next failing key is due, and the next
    course.
    """
    yield IN_TRANSACTION
    if course.is_single and (single := (yield from _reaping_one(schema, inbox, share, course.keeps))) is not None:
        return single, False, None, course
    first, turned, but = course.cursor, False, list[str]()
    while True:
        statement = REAP_PLAIN if course.is_plain else REAP_ANY
        names = share.names(course.depth, course.keeps, bool(course.crowded))
        claim = statement.at(**names, schema=schema, inbox=inbox)
        taken, last = yield from _pinned(
            claim(cursor=course.cursor, depth=min(course.depth, share.deep), mine=list(share.mine), but=but)
        )
        [end] = statement.named([last])
        if end.is_plain is None:
            raise unregistered(schema, inbox)
        if not end.fits:
            course = replace(course, keeps=not course.keeps)
            continue
        if course.is_plain and not end.is_plain:
            course = replace(course, is_plain=False, crowded=CROWDED)
            continue
        if not taken and share.hold and not but:
            # A claim locks no more heads than it wants: those of orphaned keys would stand in the way of the others.
            but = [key for (key,) in (yield ORPHANED.at(schema=schema, inbox=inbox)(mine=list(share.mine)))]
            if but:
                continue
        before = course.cursor
        course = course.after(end.reached, end.is_plain, share, len(taken), end.keys, bool(end.by_key))
        if taken or end.reached == before or (turned and not "" < end.reached < first):
            left = bool(taken and end.left)
            return taken, left, end.due_in_s, replace(course, is_single=len(taken) <= 1 and not left)
        course, turned = replace(course, is_plain=False), turned or not end.reached


def _reaping_one(schema: str, inbox: str, share: Share, keeps: bool) -> Operation[list[Row] | None]:
    """Take the only message that waits, or none if there is none; None if that is not how things are."""
    names = share.names(keeps=keeps)
    names = {each: names[each] for each in ("held", "tried", "archived", "keeps")}
    taken, last = yield from _pinned(REAP_ONE.at(**names, schema=schema, inbox=inbox)(mine=list(share.mine)))
    [end] = REAP_ONE.named([last])
    if end.is_plain is None:
        raise unregistered(schema, inbox)
    return taken if end.is_plain and end.fits else None
