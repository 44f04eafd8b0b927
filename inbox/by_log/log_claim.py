"""Claims of an inbox that reads a log: the next messages of lanes, by locks on the rows of the lanes.

A claim locks lanes first, and reads in a later statement, which sees all that the last holder of a lane has done: its
position, and which keys fail. In that one statement each message passes the position of its lane once: it is handed
out, or, if its key fails, waits or has messages in the inbox's own table, diverted there. From then on the inbox is one
by key for this message (`inbox.by_key`), and the key returns to the log when its messages there are used up. The new
position is a row of `receipts_<inbox>`, which is part of the caller's transaction.
"""

from dataclasses import replace
from typing import Any

from inbox.by_key.claim import KEY_STATE, LIGHT, MAX_BYTES, NULLS, PIN, SIZE, UNPINNED, Claimed, Share, unregistered
from inbox.by_log.lanes import LOCK, Lanes, covering, telling_lost
from mailroom.errors import ConfigurationError, UnknownInbox
from mailroom.message.columns import DELIVERED, MESSAGE
from mailroom.message.message import COLUMNS, SELECTED, messages
from mailroom.registry.breakers import WHY
from mailroom.registry.log_topics import IS_WANTED_ONE, WANTED_TOPICS
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, filled

AT = """at AS MATERIALIZED (
    SELECT r.* FROM pg_catalog.unnest(%(lanes)s::bigint[]) AS l (lane), LATERAL (
        SELECT lane, epoch, clock FROM {schema}.receipts_{inbox} AS r
        WHERE r.lane = l.lane::smallint ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r),
due AS MATERIALIZED (
    SELECT lane, epoch, clock FROM at WHERE clock >= %(first)s::bigint - 1)"""
IN_LANE = """FROM {schema}.log_{log} AS o
        WHERE o.segment IN ({segments}) AND o.lane = {lane}"""
NEXT = filled(f"{IN_LANE} AND o.clock > due.clock ORDER BY o.clock LIMIT %(per_lane)s::bigint", lane="due.lane")
# An inbox that wants some topics only looks through more messages of a lane than it may take of it, and passes all up
# to the last that it takes. What is looked through is bounded: where nothing is wanted, the position moves on too.
THROUGH = """(
        SELECT {outer} FROM (
            SELECT *, count(*) FILTER (WHERE is_wanted) OVER (ORDER BY clock ROWS UNBOUNDED PRECEDING) AS so_many
            FROM (SELECT o.clock, {inner}, {is_wanted} AS is_wanted {next}) AS o) AS o
        WHERE so_many - is_wanted::integer < %(per_lane)s::bigint) AS o"""
# A receipt goes on from the one that was read, in its epoch: the inbox may have been set back since the lock was asked
# for. Where all of a lane was read and newer segments follow, its position moves to where those begin.
MOVED = """moved AS MATERIALIZED (
    SELECT lane, epoch, CASE WHEN {is_not_full}{is_whole} THEN greatest(last, %(end)s::bigint - 1)
                      ELSE last END AS clock
    FROM sums{where}
    UNION ALL SELECT lane, epoch, %(end)s::bigint - 1 FROM due
    WHERE clock < %(end)s::bigint - 1 AND lane NOT IN (SELECT lane FROM sums){is_whole}),
received AS (
    INSERT INTO {schema}.receipts_{inbox} (inbox, lane, epoch, clock)
    SELECT '{inbox}', lane, epoch, clock FROM moved)"""
LEFT = "ARRAY(SELECT lane::bigint FROM sums WHERE {is_full})"
# The smallest position of a lane that these segments do not have the next message of.
ELSEWHERE = """(SELECT min(clock) FROM at
        WHERE clock < %(first)s::bigint - 1 OR clock >= %(end)s::bigint - 1)"""
# Up to where all lanes were read, if the claim read several segments: older ones need not be read again.
LOWEST = """least((SELECT min(clock) FROM moved), (
        SELECT min(clock) FROM at WHERE lane NOT IN (SELECT lane FROM moved)))"""
# What a claim returns in its last row.
ENDING = {
    "is_plain": "boolean", "rows": "bigint", "left": "bigint[]", "taken": "bigint[]", "elsewhere": "bigint",
    "lowest": "bigint", "has_apart": "boolean", "diverted": "bigint", "is_unpinned": "boolean",
}  # fmt: skip
NO_ENDING = ", ".join(f"NULL::{kind}" for kind in ENDING.values())
PARTS: dict[str, Any] = {
    "at": AT,
    "elsewhere": ELSEWHERE,
    "selected": SELECTED,
    "nulls": NULLS,
    "unpinned": UNPINNED,
    "message": MESSAGE,
}
# Where an inbox wants some topics only: it has texts of its own, and no other inbox pays for them.
OF_ALL: dict[str, Any] = {
    "wanted_topics": "",
    "is_full": "rows >= %(per_lane)s::bigint",
    "is_not_full": "rows < %(per_lane)s::bigint",
    "counted": "",
    "ending": NO_ENDING,
}
OF_TOPICS: dict[str, Any] = {
    "wanted_topics": f"wanted_topic AS MATERIALIZED ({WANTED_TOPICS}),\n",
    "is_full": "(rows >= %(through)s::bigint OR wanted >= %(per_lane)s::bigint)",
    "is_not_full": "NOT (rows >= %(through)s::bigint OR wanted >= %(per_lane)s::bigint)",
    "counted": ", count(*) FILTER (WHERE is_wanted) AS wanted",
    "ending": f"{NO_ENDING}, NULL::bigint",
}
ENDING_OF_TOPICS = ENDING | {"wanted": "bigint"}
# D-logs-5: A plain read has a statement of its own.
PLAIN = """
WITH {wanted_topics}{at},
has AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}')
           OR EXISTS (SELECT FROM {schema}.inbox_{inbox}) AS apart),
sums AS MATERIALIZED (
    SELECT due.lane, due.epoch, due.clock AS begun, o.last, o.rows, o.bytes{of_lane} FROM due, LATERAL (
        SELECT max(clock) AS last, count(*) AS rows, sum(light) AS bytes{counted}
        FROM {ahead}) AS o
    WHERE o.rows > 0 AND NOT (SELECT apart FROM has)),
plain AS MATERIALIZED (
    SELECT coalesce(sum(bytes), 0::numeric)::bigint <= {max_bytes}::bigint AND NOT (SELECT apart FROM has) AS is_plain,
           coalesce(sum(rows), 0)::bigint AS rows{in_all}
    FROM sums),
{moved}
SELECT {selected}, {ending}
FROM (SELECT * FROM sums WHERE (SELECT is_plain FROM plain)) AS s, LATERAL (
    SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, {message} {in_lane}
    AND o.clock > s.begun AND o.clock <= s.last{is_wanted} ORDER BY o.clock LIMIT %(per_lane)s::bigint) AS o
UNION ALL
SELECT {nulls}, is_plain, rows, {left}, ARRAY(SELECT lane::bigint FROM sums), {elsewhere}, {lowest},
       (SELECT apart FROM has), 0::bigint, {unpinned} OR (is_plain AND {held} AND {schema}.hold_batch()){wanted}
FROM plain
ORDER BY clock
"""


def _read_plain(of: dict[str, Any], ending: dict[str, str], **parts: Any) -> Sql:
    return Sql(
        PLAIN,
        COLUMNS | ending,
        in_lane=filled(IN_LANE, lane="s.lane"),
        moved=filled(MOVED, is_whole=" AND (SELECT is_plain FROM plain)", where=" WHERE (SELECT is_plain FROM plain)"),
        left=LEFT,
        max_bytes=MAX_BYTES,
        **PARTS,
        **of,
        **parts,
    )


def _through(inner: str, outer: str) -> str:
    """Return the step that looks through messages: of each `inner`, and `outer` of those up to the last to be taken."""
    return filled(THROUGH, inner=inner, outer=outer, is_wanted=IS_WANTED_ONE, next=NEXT.replace("per_lane", "through"))


READ_PLAIN = _read_plain(
    OF_ALL, ENDING, ahead=filled("(SELECT o.clock, {light} AS light {next}) AS o", light=LIGHT, next=NEXT),
    of_lane="", in_all="", is_wanted="", wanted="",
)  # fmt: skip
READ_PLAIN_TOPICS = _read_plain(
    OF_TOPICS, ENDING_OF_TOPICS,
    ahead=_through(f"{LIGHT} AS light", "clock, CASE WHEN is_wanted THEN light END AS light, is_wanted"),
    of_lane=", o.wanted", in_all=", coalesce(sum(wanted), 0)::bigint AS wanted", is_wanted=f" AND {IS_WANTED_ONE}",
    wanted=", wanted",
)  # fmt: skip
APART = f"""(SELECT min(i.clock) FROM {{schema}}.inbox_{{inbox}} AS i WHERE i.key = k.key) IS NOT NULL
       OR {KEY_STATE % "k.key"}) IS NOT NULL"""
# D-logs-4: What fails leaves the log.
FULL = """
WITH {wanted_topics}{at},
ahead AS MATERIALIZED (
    SELECT due.lane, due.epoch, o.*, row_number() OVER (ORDER BY due.lane, o.clock) AS nth FROM due, LATERAL {ahead}),
picked AS MATERIALIZED (
    SELECT lane, epoch, clock, key{is_wanted} FROM ahead WHERE nth < coalesce((
        SELECT nth FROM (SELECT nth, nth > 1 AND sum({size}) OVER so_far > {max_bytes} AS is_over
                         FROM ahead WINDOW so_far AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY nth LIMIT 1), 9223372036854775807)),
sums AS MATERIALIZED (
    SELECT lane, epoch, max(clock) AS last, count(*) AS rows{counted} FROM picked GROUP BY lane, epoch),
{moved},
apart AS MATERIALIZED (
    SELECT key FROM (SELECT DISTINCT key FROM picked{of_wanted} OFFSET 0) AS k WHERE {apart}),
diverted AS (
    INSERT INTO {schema}.inbox_{inbox} ({delivered})
    SELECT {delivered} FROM {of_apart} AS p, LATERAL (
        SELECT '{inbox}'::text AS inbox, o.clock, o.sent_clock, o.origin, o.delivered_at, {message} {in_lane}
        AND o.clock = p.at) AS o
    ORDER BY key, clock RETURNING 1),{made}
given AS MATERIALIZED (SELECT lane, clock AS at FROM picked WHERE key NOT IN (SELECT key FROM apart){and_wanted})
SELECT {selected}, {ending}
FROM given AS p, LATERAL (
    SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, {message} {in_lane} AND o.clock = p.at) AS o
UNION ALL
SELECT {nulls}, true, (SELECT count(*) FROM picked), CASE WHEN {is_cut} THEN %(lanes)s::bigint[] ELSE {left} END,
       ARRAY(SELECT lane::bigint FROM sums), {elsewhere}, {lowest},
       EXISTS (SELECT FROM diverted) OR EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}')
       OR EXISTS (SELECT FROM {schema}.inbox_{inbox}), (SELECT count(*) FROM diverted),
       {unpinned} OR ({held} AND {schema}.hold_batch()){wanted}
ORDER BY clock
"""


# While breakers of prefixes are open, their keys leave the log too, and wait there as failing keys do. Who claims has
# them put off before each claim (`inbox.breakers`). So they may be due soon, and are, if the breaker was closed while
# this transaction was open.
# D-logs-12: Keys of open prefixes leave the log as failing keys do.
IS_OPEN = "split_part(k.key, %(separator)s::text, 1) = ANY (%(prefixes)s::text[])"
SOON_S = 60
MADE = f"""
made AS (
    INSERT INTO {{schema}}.my_key_state (inbox, key, clock, attempts, retry_at, last_error)
    SELECT '{{inbox}}', k.key, 0, 0, clock_timestamp() + interval '{SOON_S} s', %(why)s::text FROM apart AS k
    WHERE {IS_OPEN}
      AND (SELECT s.clock FROM {{schema}}.my_key_state AS s WHERE s.inbox = '{{inbox}}' AND s.key = k.key) IS NULL
    ORDER BY k.key
    ON CONFLICT (inbox, key) DO NOTHING),"""


CLOSED = {"apart": APART, "made": ""}
WHILE_OPEN = {"apart": f"{APART} OR {IS_OPEN}", "made": MADE}


def _read(of: dict[str, Any], ending: dict[str, str], and_wanted: str = "", **parts: Any) -> Sql:
    return Sql(
        FULL,
        COLUMNS | ending,
        size=SIZE,
        in_lane=filled(IN_LANE, lane="p.lane"),
        moved=filled(MOVED, is_whole=" AND NOT {is_cut}", where=""),
        is_cut="(SELECT count(*) FROM ahead) > (SELECT count(*) FROM picked)",
        left=LEFT,
        of_apart=f"(SELECT lane, clock AS at FROM picked WHERE key IN (SELECT key FROM apart){and_wanted})",
        and_wanted=and_wanted,
        delivered=DELIVERED,
        max_bytes=MAX_BYTES,
        **PARTS,
        **of,
        **parts,
    )


AHEAD = {
    "ahead": f"(\n        SELECT o.clock, o.key, octet_length(o.value) AS bytes, o.value_json {NEXT}) AS o",
    "is_wanted": "", "of_wanted": "", "wanted": "",
}  # fmt: skip
# What is not wanted is never diverted: it is passed over, whatever becomes of its key.
AHEAD_OF_TOPICS = {
    "ahead": _through(
        "o.key, octet_length(o.value) AS bytes, o.value_json",
        "clock, key, CASE WHEN is_wanted THEN bytes ELSE 0 END AS bytes, "
        "CASE WHEN is_wanted THEN value_json END AS value_json, is_wanted",
    ),
    "is_wanted": ", is_wanted", "of_wanted": " WHERE is_wanted", "and_wanted": " AND is_wanted",
    "wanted": ", (SELECT count(*) FROM picked WHERE is_wanted)",
}  # fmt: skip
READ = _read(OF_ALL, ENDING, **AHEAD, **CLOSED)
READ_OPEN = _read(OF_ALL, ENDING, **AHEAD, **WHILE_OPEN)
READ_TOPICS = _read(OF_TOPICS, ENDING_OF_TOPICS, **AHEAD_OF_TOPICS, **CLOSED)
READ_TOPICS_OPEN = _read(OF_TOPICS, ENDING_OF_TOPICS, **AHEAD_OF_TOPICS, **WHILE_OPEN)


# D-logs-9: The lanes of a dead worker wait until its death is counted.
UNPIN = Sql("SELECT {unpinned}", columns=("boolean",), unpinned=UNPINNED)
ORPHANED = Sql(
    """
SELECT DISTINCT {schema}.lane_of(o.key, {lanes})::bigint
FROM {schema}.orphaned_keys('{inbox}', %(mine)s::uuid[]) AS o (key)
""",
    columns=("bigint",),
)


def reaping_log(
    schema: str, inbox: str, log: str, lanes: int, share: Share, known: Lanes
) -> Operation[tuple[Claimed, Lanes]]:
    """Take the next messages of lanes that nobody reads; return them, and what is known of the lanes then.

    Run this in a READ COMMITTED transaction. Raises `ConfigurationError` in one of another level.
    """
    yield IN_TRANSACTION
    names = {"schema": schema, "inbox": inbox, "log": log}
    if known.avoided:
        known = replace(known, avoided=(yield from _orphaned(schema, inbox, lanes, share)))
    yield PIN.at()()
    rows = yield LOCK.at(**names)(
        seen=known.seen, lanes=known.wanted(), first=known.first, most=known.most(lanes, share.most),
        but=sorted(known.avoided),
    )  # fmt: skip
    if not rows:
        raise unregistered(schema, inbox)
    [lock] = LOCK.named(rows)
    if not lock.is_same:
        raise UnknownInbox(f"Inbox {inbox!r} was made anew, and reads another log. Start this program again.")
    if lock.level != "read committed":
        raise ConfigurationError(
            f"This transaction is {lock.level}, and would not see how far others have read. Take messages of an inbox "
            "that reads a log in a transaction of READ COMMITTED.",
            code="MR-wrong-isolation",
        )
    if is_anew := known.epoch != lock.epoch or lock.is_full:
        known = replace(known.told(range(lanes), lock.last if lock.is_full else lock.seen), epoch=lock.epoch)
    else:
        known = known.told(lock.news, lock.seen)
    if not lock.mine:
        is_all = not (is_anew or known.aside)
        return Claimed([], lock.due_in_s, is_all=is_all), replace(known, aside=frozenset())
    if share.hold and lock.was_lost:
        avoided = yield from _orphaned(schema, inbox, lanes, share)
        if avoided.intersection(lock.mine):
            # Not in this transaction: to count the death takes the lock of the lane.
            yield UNPIN.at()()
            return Claimed([], lock.due_in_s, is_all=False), replace(known, avoided=avoided)
    if known.newest != lock.newest:
        newest = yield from covering(schema, log, lock.newest_first - 1)
        known = replace(known.within(newest), newest=lock.newest)
        if not newest.first:
            known = yield from telling_lost(names, -1, known)
    return (yield from _reading(names, share, known, lock))


def _orphaned(schema: str, inbox: str, lanes: int, share: Share) -> Operation[frozenset[int]]:
    """Return the lanes of keys that a worker had when it died, until that is counted."""
    rows = yield ORPHANED.at(schema=schema, inbox=inbox, lanes=str(lanes))(mine=list(share.mine))
    return frozenset(int(lane) for (lane,) in rows)


def _reading(names: dict[str, str], share: Share, known: Lanes, lock: Any) -> Operation[tuple[Claimed, Lanes]]:
    """Read the lanes that `LOCK` has locked, from the segments that have their next messages."""
    per_lane = share.most // len(lock.mine)
    of_topics = {"through": round(per_lane * known.sparse)} if lock.has_topics else {}
    plain, full, full_open = (
        (READ_PLAIN_TOPICS, READ_TOPICS, READ_TOPICS_OPEN) if lock.has_topics else (READ_PLAIN, READ, READ_OPEN)
    )
    while True:
        within, statement = known.range, full if known.has_apart else plain
        values: dict[str, Any] = {}
        if share.prefixes:
            statement = full_open
            values = {"prefixes": list(share.prefixes), "separator": share.separator, "why": WHY}
        count = "wanted" if lock.has_topics else "rows"
        held = f"{count} > 0" if statement is plain else "EXISTS (SELECT FROM given)"
        parts = {
            "lowest": LOWEST if len(within.segments) > 1 else "NULL::bigint",
            "segments": ", ".join(map(str, within.segments)),
            "held": held if share.hold else "false",
        }
        *taken, last = yield statement.at(**parts, **names)(
            lanes=lock.mine, first=within.first, end=within.end, per_lane=per_lane, **of_topics, **values
        )
        [end] = statement.named([last])
        if not end.is_plain:
            known = replace(known, has_apart=True)
            yield PIN.at()()
            continue
        wanted = end.wanted if lock.has_topics else end.rows
        known = known.read(lock, end, per_lane, wanted)
        if end.elsewhere is not None:
            # Older segments come first, and newer ones once nothing is left in these.
            if end.elsewhere < within.first - 1 or not end.left:
                known = known.within((yield from covering(names["schema"], names["log"], end.elsewhere)))
                if not known.range.first:
                    known = yield from telling_lost(names, end.elsewhere, known)
            if not end.rows and known.range != within:
                yield PIN.at()()
                continue
        elif end.lowest is not None and end.lowest >= lock.newest_first - 1:
            newest = yield from covering(names["schema"], names["log"], lock.newest_first - 1)
            known = known.within(newest)
        is_all = not (known.dirty or end.diverted)
        return Claimed(messages(taken), lock.due_in_s, is_all, has_diverted=end.diverted > 0), known
