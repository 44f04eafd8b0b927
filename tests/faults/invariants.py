"""The checker: the guarantees as queries over the ledgers and the node's tables, each linear or n log n.

Every query gives the rows that break its invariant. They hold whenever nobody is inside a transaction; what is not
reaped yet has its place too, so the node need not be empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from dispatcher.housekeeping.janitor import sweeping_key_state
from mailroom.sql.runner import run

ROWS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Invariant:
    """One promise; `sql` gives the rows that break it."""

    name: str
    promise: str
    sql: str


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, with some of the rows concerned."""

    invariant: str
    promise: str
    rows: tuple[tuple[Any, ...], ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.invariant} {self.promise}", *(f"    {row}" for row in self.rows)])


@dataclass(frozen=True, slots=True)
class Sent:
    """A writer's transaction that was acknowledged: its id, and when it called send and had the answer (monotonic)."""

    wtx: int
    invoked: float
    acknowledged: float


READS_LOG = "IN (SELECT inbox FROM faults.log_route)"
# Where a copy for an inbox can be: consumed, waiting, parked, skipped. And where a message is that has none yet.
PLACED = f"""
    SELECT inbox, mid, key, clock, 'reaped' AS place FROM faults.r_ledger
    UNION ALL SELECT inbox, message_id, key, clock, 'waiting' FROM mailroom.inbox WHERE inbox NOT {READS_LOG}
    UNION ALL SELECT inbox, message_id, key, clock, 'parked' FROM mailroom.parked WHERE inbox NOT {READS_LOG}
    UNION ALL SELECT inbox, message_id, key, clock, 'dead' FROM mailroom.dead_letter WHERE inbox NOT {READS_LOG}"""
# Where a message can be for an inbox that reads a log, beside what its ledger says. Guests have none.
UNREAD = f"""
    SELECT r.name AS inbox, o.message_id AS mid, o.key, o.clock, 'unread' AS place
    FROM mailroom.inbox_registry AS r, LATERAL (
        SELECT DISTINCT ON (lane) lane, clock FROM mailroom.log_receipt AS p
        WHERE p.inbox = r.name ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
        SELECT o.message_id, o.key, o.clock FROM mailroom.log AS o
        WHERE o.log = r.log AND o.lane = at.lane AND o.clock > at.clock) AS o
    WHERE r.name {READS_LOG}"""
AHEAD = f"""{UNREAD}
    UNION ALL SELECT inbox, message_id, key, clock, 'waiting' FROM mailroom.inbox WHERE inbox {READS_LOG}
    UNION ALL SELECT inbox, message_id, key, clock, 'parked' FROM mailroom.parked WHERE inbox {READS_LOG}"""
# What each inbox of a log has read last, and whether it was set back before that since.
LAST_READ = """
    SELECT l.inbox, l.mid, l.key, l.clock, l.epoch, coalesce(s.least < l.clock, false) AS is_again
    FROM (SELECT DISTINCT ON (inbox, mid) inbox, mid, key, clock, epoch FROM faults.l_ledger
          ORDER BY inbox, mid, epoch DESC) AS l
    LEFT JOIN (SELECT inbox, epoch, min(clock) OVER (PARTITION BY inbox ORDER BY epoch
                                                     ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS least
               FROM faults.rewound) AS s USING (inbox, epoch)"""
CLOCKED = f"SELECT mid, clock FROM ({PLACED}) AS p UNION ALL SELECT mid, clock FROM faults.l_ledger"
UNPLACED = """
    SELECT message_id AS mid, key, 'outbox' AS place FROM mailroom.outbox
    UNION ALL SELECT message_id, key, 'scheduled' FROM mailroom.scheduled
    UNION ALL SELECT message_id, key, 'dead' FROM mailroom.dead_letter WHERE inbox IS NULL AND stage <> 'execute'"""

COMMITTED_AT = "pg_xact_commit_timestamp(({0} % 4294967296)::text::xid)"

# Rows in key_state of keys without messages. A batch of a dead worker is suspected as a whole, while another worker may
# have claimed all of it already: then each of its keys keeps a row, which the janitor's next sweep deletes.
IDLE = """
    SELECT s.inbox, s.key, s.clock, s.attempts, s.retry_at <= clock_timestamp() AS is_due FROM mailroom.key_state s
    WHERE NOT EXISTS (SELECT FROM mailroom.inbox i WHERE i.inbox = s.inbox AND i.key = s.key)
      AND NOT EXISTS (SELECT FROM mailroom.parked p WHERE p.inbox = s.inbox AND p.key = s.key)"""
RACES = 20
LISTED = """
SELECT r.name, l.lanes::bigint FROM mailroom.inbox_registry AS r LEFT JOIN mailroom.log_registry AS l ON l.name = r.log
ORDER BY r.name"""
SWEPT = "no key is failing without a message once the janitor has swept"

INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "I1",
        "no loss: a committed message is reaped, waiting, parked or dead, in every inbox it goes to",
        f"""
SELECT w.mid, r.inbox, w.key, w.wtx, w.pos
FROM faults.w_ledger w JOIN faults.route r USING (topic)
LEFT JOIN (SELECT DISTINCT inbox, mid FROM ({PLACED}) AS p) AS p ON p.inbox = r.inbox AND p.mid = w.mid
LEFT JOIN (SELECT DISTINCT mid FROM ({UNPLACED}) AS u) AS u ON u.mid = w.mid
WHERE p.mid IS NULL AND u.mid IS NULL""",
    ),
    Invariant(
        "I2",
        "no phantom: nothing is delivered that was not committed, nor where it does not go",
        f"""
SELECT p.place, p.inbox, p.mid, p.key, p.clock FROM ({PLACED}) AS p
LEFT JOIN faults.w_ledger w ON w.mid = p.mid LEFT JOIN faults.route r ON r.topic = w.topic AND r.inbox = p.inbox
WHERE r.inbox IS NULL
UNION ALL
SELECT u.place, NULL, u.mid, u.key, NULL FROM ({UNPLACED}) AS u
LEFT JOIN faults.w_ledger w ON w.mid = u.mid WHERE w.mid IS NULL""",
    ),
    Invariant(
        "I3",
        "no duplicate: each message is in one place per inbox, once",
        f"""
SELECT inbox, mid, count(*), array_agg(place) FROM ({PLACED}) AS p GROUP BY inbox, mid HAVING count(*) > 1
UNION ALL
SELECT NULL, u.mid, NULL, array_agg(u.place) FROM ({UNPLACED}) AS u GROUP BY u.mid HAVING count(*) > 1
UNION ALL
SELECT p.inbox, p.mid, NULL, ARRAY[p.place, u.place] FROM ({PLACED}) AS p JOIN ({UNPLACED}) AS u ON u.mid = p.mid""",
    ),
    Invariant(
        "I4",
        "per key, clocks rise in the order the reaps held the key",
        """
SELECT * FROM (
    SELECT inbox, key, turn, clock, lag(clock) OVER in_turn AS before, mid, rtx FROM faults.r_ledger
    WINDOW in_turn AS (PARTITION BY inbox, key ORDER BY turn)) AS o
WHERE clock <= before""",
    ),
    Invariant(
        "I4b",
        "per key, clocks rise in the commit order of the reaps",
        f"""
SELECT * FROM (
    SELECT inbox, key, rtx, low, max(high) OVER (PARTITION BY inbox, key ORDER BY at, rtx
                                                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before, at
    FROM (SELECT inbox, key, rtx, min(clock) AS low, max(clock) AS high, {COMMITTED_AT.format("rtx")} AS at
          FROM faults.r_ledger GROUP BY inbox, key, rtx) AS t) AS o
WHERE low <= before AND at IS NOT NULL""",
    ),
    Invariant(
        "I4c",
        "nothing waits that a later message of its key has overtaken",
        """
SELECT i.inbox, i.key, i.clock, r.clock, i.mid
FROM (SELECT inbox, key, clock, message_id AS mid FROM mailroom.inbox
      UNION ALL SELECT inbox, key, clock, message_id FROM mailroom.parked) AS i
JOIN (SELECT inbox, key, max(clock) AS clock FROM faults.r_ledger GROUP BY inbox, key) AS r USING (inbox, key)
WHERE i.clock < r.clock""",
    ),
    Invariant(
        "I5",
        "a clock belongs to one message, and a message has one clock",
        f"""
SELECT 'clock', clock::text, array_agg(DISTINCT mid::text) FROM ({CLOCKED}) AS p
GROUP BY clock HAVING min(mid::text) <> max(mid::text)
UNION ALL
SELECT 'message', mid::text, array_agg(DISTINCT clock::text) FROM ({CLOCKED}) AS p
GROUP BY mid HAVING min(clock) <> max(clock)""",
    ),
    Invariant(
        "I7",
        "messages of one transaction keep their order",
        f"""
SELECT * FROM (
    SELECT wtx, pos, clock, lag(clock) OVER (PARTITION BY wtx ORDER BY pos) AS before, mid
    FROM faults.w_ledger JOIN (SELECT DISTINCT mid, clock FROM ({CLOCKED}) AS p) AS c USING (mid)
    WHERE pos IS NOT NULL) AS o
WHERE clock <= before""",
    ),
    Invariant(
        "I14",
        "executables are applied exactly once: the counters are what was sent, but for what waits",
        """
SELECT key, sum(number) FROM (
    SELECT topic AS key, count(*) AS number FROM faults.w_ledger GROUP BY topic
    UNION ALL SELECT 'all', count(*) FROM faults.w_ledger
    UNION ALL SELECT key, -number FROM mailroom.store
    UNION ALL SELECT key, -amount FROM mailroom.outbox_executable) AS c
GROUP BY key HAVING sum(number) <> 0""",
    ),
    Invariant(
        "I15",
        "executables that cannot be applied end as dead letters, once, and no others do",
        """
SELECT mid, sum(number), max(reason) FROM (
    SELECT mid, 1 AS number, NULL AS reason FROM faults.smuggled
    UNION ALL SELECT message_id, -1, reason FROM mailroom.dead_letter WHERE stage = 'execute'
    UNION ALL SELECT mid, -1, NULL FROM mailroom.outbox_executable JOIN faults.smuggled ON mid = message_id) AS d
GROUP BY mid HAVING sum(number) <> 0""",
    ),
    Invariant(
        "I12",
        "no key that failed is failing without a message (but for a race, now and then)",
        f"""
SELECT * FROM (SELECT k.*, count(*) OVER () AS "all" FROM ({IDLE}) AS k WHERE attempts > 0) AS k
WHERE "all" > {RACES}""",
    ),
    Invariant(
        "I9",
        "deliveries to an inbox are one after the other: each begins above the last clock of the one before",
        """
SELECT * FROM (
    SELECT inbox, turn, dtx, first, last,
           max(last) OVER (PARTITION BY inbox ORDER BY turn ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
               AS before FROM faults.d_ledger) AS o
WHERE first <= before""",
    ),
    Invariant(
        "I9b",
        "deliveries to an inbox commit in the order of their clocks",
        f"""
SELECT * FROM (
    SELECT inbox, dtx, first, last,
           max(last) OVER (PARTITION BY inbox ORDER BY at, dtx ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
               AS before, at
    FROM (SELECT *, {COMMITTED_AT.format("dtx")} AS at FROM faults.d_ledger) AS d) AS o
WHERE first <= before AND at IS NOT NULL""",
    ),
)

# Of logs: between two rewinds each is an inbox like any other.
INVARIANTS += (
    Invariant(
        "L1",
        "no loss: each inbox of a log has read what was committed, or it stands before it, also where it was set back",
        f"""
SELECT w.mid, r.inbox, w.key, w.wtx, l.clock, l.epoch, l.is_again
FROM faults.w_ledger w JOIN faults.log_route r USING (topic)
LEFT JOIN ({LAST_READ}) AS l ON l.inbox = r.inbox AND l.mid = w.mid
LEFT JOIN (SELECT DISTINCT inbox, mid FROM ({AHEAD}) AS a) AS a ON a.inbox = r.inbox AND a.mid = w.mid
LEFT JOIN (SELECT DISTINCT mid FROM ({UNPLACED}) AS u) AS u ON u.mid = w.mid
WHERE l.is_again IS NOT FALSE AND a.mid IS NULL AND u.mid IS NULL""",
    ),
    Invariant(
        "L2",
        "no phantom: an inbox of a log has nothing that was not committed, nor what does not go there",
        f"""
SELECT p.inbox, p.mid, p.key, p.clock FROM (
    SELECT inbox, mid, key, clock FROM faults.l_ledger
    UNION ALL SELECT inbox, mid, key, clock FROM ({AHEAD}) AS a) AS p
LEFT JOIN faults.w_ledger w ON w.mid = p.mid
LEFT JOIN faults.log_route r ON r.topic = w.topic AND r.inbox = p.inbox
WHERE r.inbox IS NULL""",
    ),
    Invariant(
        "L3",
        "no duplicate: an inbox of a log has each message once, but where it was set back before it",
        f"""
SELECT l.inbox, l.mid, l.key, l.clock, ARRAY[l.before, l.epoch], l.place FROM (
    SELECT inbox, mid, key, clock, epoch, place,
           lag(epoch) OVER (PARTITION BY inbox, mid ORDER BY epoch, turn) AS before
    FROM faults.l_ledger) AS l
WHERE before IS NOT NULL AND (
    SELECT min(r.clock) FROM faults.rewound r
    WHERE r.inbox = l.inbox AND r.epoch > l.before AND r.epoch <= l.epoch) < l.clock IS NOT TRUE
UNION ALL
SELECT inbox, mid, max(key), max(clock), NULL, string_agg(place, ', ') FROM (
    SELECT inbox, mid, key, clock, place FROM ({AHEAD}) AS a
    UNION ALL SELECT inbox, mid, key, clock, 'read' FROM ({LAST_READ}) AS l WHERE NOT is_again) AS p
GROUP BY inbox, mid HAVING count(*) > 1
UNION ALL
SELECT l.inbox, l.mid, l.key, l.clock, NULL, u.place FROM faults.l_ledger l JOIN ({UNPLACED}) AS u USING (mid)""",
    ),
    Invariant(
        "L4",
        "per key, clocks rise in the order in which an inbox of a log had the key, between two rewinds",
        """
SELECT * FROM (
    SELECT inbox, epoch, key, turn, clock, lag(clock) OVER in_turn AS before, mid, rtx FROM faults.l_ledger
    WINDOW in_turn AS (PARTITION BY inbox, epoch, key ORDER BY turn)) AS o
WHERE clock <= before""",
    ),
    Invariant(
        "L4b",
        "per key, clocks rise in the commit order of what an inbox of a log read, between two rewinds",
        f"""
SELECT * FROM (
    SELECT inbox, epoch, key, rtx, low, max(high) OVER (PARTITION BY inbox, epoch, key ORDER BY at, rtx
                                                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before, at
    FROM (SELECT inbox, epoch, key, rtx, min(clock) AS low, max(clock) AS high, {COMMITTED_AT.format("rtx")} AS at
          FROM faults.l_ledger GROUP BY inbox, epoch, key, rtx) AS t) AS o
WHERE low <= before AND at IS NOT NULL""",
    ),
    Invariant(
        "L4c",
        "nothing is ahead of an inbox of a log that a later message of its key has overtaken since the last rewind",
        f"""
SELECT a.inbox, a.key, a.clock, l.clock, a.mid, a.place FROM ({AHEAD}) AS a
JOIN (SELECT inbox, key, max(clock) AS clock FROM faults.l_ledger
      WHERE (inbox, epoch) IN (SELECT name, epoch FROM mailroom.inbox_registry) GROUP BY inbox, key) AS l
USING (inbox, key)
WHERE a.clock < l.clock""",
    ),
)

# What consumers were given and rolled back counts too: a clock that somebody has seen stays with its message.
OBSERVED = "CREATE TEMP TABLE observed (mid uuid, clock bigint) ON COMMIT DROP"
SEEN_AGAIN = f"""
SELECT 'clock', clock, array_agg(DISTINCT mid::text) FROM (
    SELECT mid, clock FROM observed UNION SELECT mid, clock FROM ({CLOCKED}) AS p) AS u
GROUP BY clock HAVING min(mid::text) <> max(mid::text)"""
SAME_CLOCK = "a clock that a consumer was given belongs to that message for ever"
DURABLE = "durability: what was acknowledged is there"

# I6 needs the clients' own times, which are not in the database.
CLOCKS = f"""
SELECT wtx, min(clock), max(clock) FROM faults.w_ledger
JOIN (SELECT DISTINCT mid, clock FROM ({CLOCKED}) AS p) AS c USING (mid) WHERE pos IS NOT NULL GROUP BY wtx"""
REAL_TIME = "real time: acknowledged before the other's send was called means the smaller clock"


def check(
    connection: psycopg.Connection[Any],
    history: Iterable[Sent] = (),
    observed: Iterable[bytes] = (),
    *,
    timed: bool = True,
) -> list[Violation]:
    """Return what is violated; `observed` are lines of message id and clock, as COPY reads them.

    Without `timed` the server's clock may have jumped, so commit times tell nothing.
    """
    found = []
    history = list(history)
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL work_mem = '256MB'")
        connection.execute("SET LOCAL enable_nestloop = off")
        connection.execute("SET LOCAL statement_timeout = 0")
        dated = connection.execute("SELECT current_setting('track_commit_timestamp')").fetchone() == ("on",)
        for invariant in INVARIANTS:
            if "pg_xact_commit_timestamp" in invariant.sql and not (timed and dated):
                continue
            rows = connection.execute(f"{invariant.sql}\nLIMIT {ROWS_SHOWN}".encode()).fetchall()
            if rows:
                found.append(Violation(invariant.name, invariant.promise, tuple(map(tuple, rows))))
        for inbox, lanes in connection.execute(LISTED).fetchall():
            run(connection, sweeping_key_state("mailroom", inbox, lanes))
        if idle := connection.execute(
            f"SELECT * FROM ({IDLE}) AS k WHERE is_due LIMIT {ROWS_SHOWN}".encode()
        ).fetchall():
            found.append(Violation("I12", SWEPT, tuple(map(tuple, idle))))
        connection.execute(OBSERVED)
        with connection.cursor().copy("COPY observed FROM STDIN") as copy:
            for lines in observed:
                copy.write(lines)
        if seen := connection.execute(f"{SEEN_AGAIN}\nLIMIT {ROWS_SHOWN}".encode()).fetchall():
            found.append(Violation("I5b", SAME_CLOCK, tuple(map(tuple, seen))))
        written = {row[0] for row in connection.execute("SELECT DISTINCT wtx FROM faults.w_ledger")}
        clocks = {row[0]: (row[1], row[2]) for row in connection.execute(CLOCKS.encode())}
    if gone := [
        ("transaction", sent.wtx, "acknowledged at", sent.acknowledged) for sent in history if sent.wtx not in written
    ]:
        found.append(Violation("I1b", DURABLE, tuple(gone[:ROWS_SHOWN])))
    early = _out_of_real_time(clocks, history)
    if early:
        found.append(Violation("I6", REAL_TIME, tuple(early[:ROWS_SHOWN])))
    return found


def _out_of_real_time(clocks: dict[int, tuple[int, int]], history: Iterable[Sent]) -> Sequence[tuple[Any, ...]]:
    """Sweep over time: the largest clock acknowledged so far lies below all that is sent from now on."""
    known = [sent for sent in history if sent.wtx in clocks]
    calls = sorted(known, key=lambda sent: sent.invoked)
    answers = sorted(known, key=lambda sent: sent.acknowledged)
    rows, nth, highest, holder = [], 0, 0, 0
    for call in calls:
        while nth < len(answers) and answers[nth].acknowledged < call.invoked:
            top = clocks[answers[nth].wtx][1]
            if top > highest:
                highest, holder = top, answers[nth].wtx
            nth += 1
        low = clocks[call.wtx][0]
        if low <= highest:
            rows.append(("earlier transaction", holder, "clock", highest, "later transaction", call.wtx, "clock", low))
    return rows
