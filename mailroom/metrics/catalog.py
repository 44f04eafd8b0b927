"""What the server's catalogs and a few rows say of a node: cheap enough for each scrape, whatever waits in its tables.

No large table is counted here. How many rows it has is an estimate from statistics: `pg_stat_get_live_tuples`, which
follows each commit within a second. `pg_class.reltuples` is only set by VACUUM and ANALYZE, so for a table that is
filled and emptied it is an accident, and -1 before the first time. After a crash the server has no statistics until the
next VACUUM, so what is small is counted all the same.
"""

from collections.abc import Iterable, Mapping
from typing import get_args

from mailroom.dead_letter import Stage
from mailroom.figures.leaders import reading_held
from mailroom.metrics.family import Family, Samples
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

EXACT = 1_000  # rows that are counted; of more, the statistics tell
# The tables beside the inboxes whose rows come and go. Staging tables of Spark do so themselves: each would be a label.
CHANGING = (
    *("outbox", "outbox_executable", "scheduled", "periodic", "fan_out", "fan_out_way", "transit", "link", "origin"),
    *(
        "receipt",
        "known",
        "inbox_registry",
        "key_state",
        "parked",
        "dead_letter",
        "attempt",
        "audit",
        "worker",
        "stable",
        "limits",
        "slot",
        "breaker",
        "lease",
        "stat_minute",
    ),
    *("store", "accounting", "commit_token", "node", "subscription", "spark_bulk", "spark_staging", "spark_stream"),
)

INBOX_MESSAGES = Family(
    "inbox_messages",
    "gauge",
    "Delivered messages that were not reaped yet, parked ones left out: an estimate from statistics.",
    ("inbox",),
)
INBOX_DEAD_ROWS = Family(
    "inbox_dead_rows", "gauge", "Rows of an inbox that were reaped and are not vacuumed: an estimate.", ("inbox",)
)
TABLE_DEAD_ROWS = Family("table_dead_rows", "gauge", "The same of the tables beside the inboxes.", ("table",))
INBOX_PAUSED = Family(
    "inbox_paused",
    "gauge",
    "Whether an inbox is paused: 1 or 0. Paused keys of an inbox that is not do not count.",
    ("inbox",),
)
INBOX_BREAKER_OPEN = Family(
    "inbox_breaker_open",
    "gauge",
    "How many breakers of an inbox are open: 1 or 0, or how many prefixes of keys.",
    ("inbox",),
)
INBOX_EXPIRED = Family(
    "inbox_expired_total",
    "counter",
    "Messages that waited in an inbox for longer than its `expire_s` allows, and were removed.",
    ("inbox",),
)
LEASE_HELD = Family("lease_held", "gauge", "Whether a process leads: 1 or 0.", ("role",))
LEASE_REMAINING = Family(
    "lease_remaining_seconds", "gauge", "How long the lease is still valid; negative once it has expired.", ("role",)
)
OLDEST_SNAPSHOT = Family(
    "oldest_snapshot_seconds",
    "gauge",
    "How long the oldest transaction of this database is open that keeps dead rows from being removed, prepared ones "
    "included. Sessions of other roles count only if this role may see them (pg_read_all_stats).",
)
NOTIFY_QUEUE = Family(
    "notify_queue_usage_ratio", "gauge", "How full the server's queue of notifications is, from 0 to 1."
)
SEQUENCE_MARGIN = Family(
    "sequence_margin_ratio", "gauge", "How much of a sequence's numbers is left, from 1 to 0.", ("sequence",)
)
CLOCK = Family("clock", "gauge", "The last logical clock that the node has given out.")
CLOCK_CEILING = Family("clock_ceiling", "gauge", "The clock above which none is given out before this is raised.")
PARKED_MESSAGES = Family(
    "parked_messages", "gauge", f"Messages of parked keys: above {EXACT:,} an estimate from statistics."
)
DEAD_LETTERS = Family(
    "dead_letters",
    "gauge",
    f"Dead letters, by where the message failed: above {EXACT:,} in all an estimate from statistics.",
    ("stage",),
)

# An autovacuum worker has a snapshot that VACUUM does not wait for.
NODE = Sql(
    """
SELECT c.last_value, n.clock_ceiling, pg_catalog.pg_notification_queue_usage(),
       (SELECT greatest(extract(epoch FROM clock_timestamp() - min(since))::float8, 0::float8) FROM (
           SELECT xact_start FROM pg_catalog.pg_stat_activity
           WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type <> 'autovacuum worker'
             AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
           UNION ALL
           SELECT prepared FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()) AS t (since)),
       (SELECT count(*) FROM (SELECT FROM {schema}.parked LIMIT {most}) AS few)
FROM {schema}.node AS n, {schema}.clock AS c
""",
    columns=("bigint", "bigint", "float8", "float8", "bigint"),
    most=EXACT + 1,
)
# By name, through the session's cache: a way through pg_class took twice as long, and longer with tables of users. An
# inbox that is just being made has no partition yet. Other tables are neither paused nor not.
TABLES = Sql(
    """
SELECT t.name, t.is_paused, t.expired,
       pg_catalog.pg_stat_get_live_tuples(t.oid), pg_catalog.pg_stat_get_dead_tuples(t.oid)
FROM (SELECT name, paused_at IS NOT NULL, expired,
             pg_catalog.to_regclass(pg_catalog.concat('{schema}.inbox_', name))::oid
      FROM {schema}.inbox_registry
      UNION ALL
      SELECT name, NULL, NULL, pg_catalog.to_regclass(pg_catalog.concat('{schema}.', name))::oid
      FROM pg_catalog.unnest(%(tables)s::text[]) AS given (name)) AS t (name, is_paused, expired, oid)
WHERE t.oid IS NOT NULL
""",
    columns=("text", "boolean", "bigint", "bigint", "bigint"),
)
BREAKERS = Sql(
    """
SELECT inbox, CASE WHEN opened_at IS NULL THEN 0 ELSE 1 END
              + (SELECT count(*) FROM {schema}.breaker AS b WHERE b.inbox = l.inbox)
FROM {schema}.limits AS l WHERE breaker_percent IS NOT NULL
""",
    columns=("text", "bigint"),
)
# Those that this role may not read are left out, since asking for their values is an error. OFFSET 0: from the few
# sequences to their names, and not through all of pg_class.
SEQUENCES = Sql(
    """
SELECT c.relname::text,
       (s.seqmax - coalesce(pg_catalog.pg_sequence_last_value(s.seqrelid), s.seqmin))::float8
       / (s.seqmax - s.seqmin)::float8
FROM pg_catalog.pg_sequence AS s CROSS JOIN LATERAL (
    SELECT relname, relnamespace FROM pg_catalog.pg_class WHERE oid = s.seqrelid OFFSET 0) AS c
WHERE c.relnamespace = '{schema}'::regnamespace AND pg_catalog.has_sequence_privilege(s.seqrelid, 'SELECT, USAGE')
""",
    columns=("text", "float8"),
)
STAGES = Sql(
    """
SELECT stage, count(*) FROM (SELECT stage FROM {schema}.dead_letter LIMIT {most}) AS few GROUP BY stage
""",
    columns=("text", "bigint"),
    most=EXACT + 1,
)
# There are so few stages that ANALYZE keeps how frequent each one is.
SHARES = Sql(
    """
SELECT v.stage, v.share::float8
FROM pg_catalog.pg_stats AS s CROSS JOIN LATERAL ROWS FROM (
    pg_catalog.unnest(s.most_common_vals::text::text[]), pg_catalog.unnest(s.most_common_freqs)) AS v (stage, share)
WHERE s.schemaname = (SELECT nspname FROM pg_catalog.pg_namespace WHERE oid = '{schema}'::regnamespace)
  AND s.tablename = 'dead_letter' AND s.attname = 'stage'
""",
    columns=("text", "float8"),
)


def reading_catalog(schema: str) -> Operation[dict[Family, Samples]]:
    """Return what the catalogs say of the node `schema`, by its database's clock.

    It takes no lock that anybody waits for. The node has to exist (`mailroom.schema.check`).
    """
    [*singles, parked] = the_one((yield NODE.at(schema=schema)()), NODE_ROW, schema)
    clock, ceiling, queue, snapshot = singles
    inboxes: dict[str, tuple[int, int]] = {}
    tables: dict[str, tuple[int, int]] = {}
    paused: dict[str, int] = {}
    expired: dict[str, int] = {}
    for name, is_paused, gone, live, dead in (yield TABLES.at(schema=schema)(tables=list(CHANGING))):
        if is_paused is None:
            tables[name] = live, dead
        else:
            inboxes[name], paused[name] = (live, dead), int(is_paused)
            expired[name] = gone
    breakers = dict((yield BREAKERS.at(schema=schema)()))
    leases = yield from reading_held(schema)
    stages = yield from _counting_stages(schema, tables["dead_letter"][0])
    return {
        INBOX_MESSAGES: [((name,), live) for name, (live, _) in inboxes.items()],
        INBOX_DEAD_ROWS: [((name,), dead) for name, (_, dead) in inboxes.items()],
        INBOX_PAUSED: _by_label(paused),
        INBOX_BREAKER_OPEN: _by_label(breakers),
        INBOX_EXPIRED: _by_label(expired),
        TABLE_DEAD_ROWS: [((name,), dead) for name, (_, dead) in tables.items()],
        # A node whose dispatcher was never started has no lease of one.
        LEASE_HELD: _by_label({"dispatcher": 0} | {each.role: int(each.leads) for each in leases}),
        LEASE_REMAINING: [((each.role,), each.left_s) for each in leases],
        OLDEST_SNAPSHOT: [((), snapshot or 0.0)],
        NOTIFY_QUEUE: [((), queue)],
        SEQUENCE_MARGIN: [((name,), margin) for name, margin in (yield SEQUENCES.at(schema=schema)())],
        CLOCK: [((), clock)],
        CLOCK_CEILING: [((), ceiling)],
        PARKED_MESSAGES: [((), estimated(parked, tables["parked"][0]))],
        DEAD_LETTERS: _by_label(stages),
    }


def estimated(counted: int, live: int) -> int:
    """Return how many rows a table has, of which at most `EXACT` + 1 were counted; `live` is from its statistics."""
    return counted if counted <= EXACT else max(counted, live)


def _counting_stages(schema: str, live: int) -> Operation[dict[str, int]]:
    found: dict[str, int] = dict.fromkeys(get_args(Stage), 0)
    for stage, number in (yield STAGES.at(schema=schema)()):
        found[stage] = number
    counted = sum(found.values())
    if counted <= EXACT:
        return found
    # Before the first ANALYZE, the shares of those that were counted stand for all.
    shares = dict((yield SHARES.at(schema=schema)())) or {stage: number / counted for stage, number in found.items()}
    return {stage: max(number, round(shares.get(stage, 0.0) * live)) for stage, number in found.items()}


def _by_label(values: Mapping[str, int]) -> Iterable[tuple[tuple[str, ...], int]]:
    return [((label,), value) for label, value in values.items()]
