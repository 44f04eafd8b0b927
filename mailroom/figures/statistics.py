"""What the server's catalogs and a few rows say of a node: cheap enough for each scrape, whatever waits in its tables.

No large table is counted here. How many rows it has is an estimate from statistics: `pg_stat_get_live_tuples`, which
follows each commit within a second. `pg_class.reltuples` is only set by VACUUM and ANALYZE, so for a table that is
filled and emptied it is an accident, and -1 before the first time. After a crash the server has no statistics until the
next VACUUM, so what is small is counted all the same.
"""

from collections.abc import Iterable
from typing import NamedTuple

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


class NodeNow(NamedTuple):
    """A node: its clock, the server's queue of notifications and oldest snapshot, and parked messages, if few."""

    clock: int
    clock_ceiling: int
    notify_queue: float
    snapshot_s: float | None
    parked: int


# An autovacuum worker has a snapshot that VACUUM does not wait for.
NOW = Sql(
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
    into=NodeNow,
    most=EXACT + 1,
)


def reading_now(schema: str) -> Operation[NodeNow]:
    """Return what a few rows say of the node."""
    row = the_one((yield NOW.at(schema=schema)()), NODE_ROW, schema)
    now: NodeNow = NOW.named([row])[0]
    return now._replace(snapshot_s=now.snapshot_s or 0.0)


class TableStatistics(NamedTuple):
    """A table: how many rows it has, and how many dead ones. What only an inbox has is None of another one."""

    name: str
    is_paused: bool | None
    expired: int | None
    live: int
    dead: int


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
    into=TableStatistics,
)


def reading_tables(schema: str) -> Operation[tuple[list[TableStatistics], list[TableStatistics]]]:
    """Return what the statistics say of the inboxes, and of the tables beside them."""
    found: list[TableStatistics] = TABLES.named((yield TABLES.at(schema=schema)(tables=list(CHANGING))))
    return [each for each in found if each.is_paused is not None], [each for each in found if each.is_paused is None]


# A crash takes the counts of VACUUM and ANALYZE along, and leaves in the catalog that one of them has been there. Of a
# table that none has reached yet nothing at all is counted. Its size would tell more, and waits for who has locked it.
UNKNOWN = Sql(
    """
SELECT r.name FROM {schema}.inbox_registry AS r
JOIN pg_catalog.pg_class AS c ON c.oid = pg_catalog.to_regclass(pg_catalog.concat('{schema}.inbox_', r.name))::oid
WHERE pg_catalog.pg_stat_get_vacuum_count(c.oid) + pg_catalog.pg_stat_get_autovacuum_count(c.oid)
      + pg_catalog.pg_stat_get_analyze_count(c.oid) + pg_catalog.pg_stat_get_autoanalyze_count(c.oid) = 0
  AND (c.reltuples >= 0::float4 OR pg_catalog.pg_stat_get_tuples_inserted(c.oid) = 0)
""",
    columns=("text",),
)


def reading_unknown(schema: str) -> Operation[set[str]]:
    """Return the inboxes of which the server has no statistics: those that it lost in a crash, and those of no rows."""
    return {name for (name,) in (yield UNKNOWN.at(schema=schema)())}


class SequenceMargin(NamedTuple):
    """Which share of a sequence's numbers is left."""

    sequence: str
    left: float


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
    into=SequenceMargin,
)


def reading_margins(schema: str) -> Operation[list[SequenceMargin]]:
    """Return how much of each sequence is left."""
    return SEQUENCES.named((yield SEQUENCES.at(schema=schema)()))


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


def estimated(counted: int, live: int) -> int:
    """Return how many rows a table has, of which at most `EXACT` + 1 were counted; `live` is from its statistics."""
    return counted if counted <= EXACT else max(counted, live)


class StageLetters(NamedTuple):
    """How many dead letters failed at a stage."""

    stage: str
    number: int


def counting_dead_letters(schema: str, known: Iterable[str], live: int) -> Operation[list[StageLetters]]:
    """Return how many dead letters each stage has, those that are `known` too if none; the table has `live` rows."""
    found: dict[str, int] = dict.fromkeys(known, 0)
    for stage, number in (yield STAGES.at(schema=schema)()):
        found[stage] = number
    counted = sum(found.values())
    if counted > EXACT:
        # Before the first ANALYZE, the shares of those that were counted stand for all.
        shares = dict((yield SHARES.at(schema=schema)()))
        shares = shares or {stage: number / counted for stage, number in found.items()}
        found = {stage: max(number, round(shares.get(stage, 0.0) * live)) for stage, number in found.items()}
    return [StageLetters(*each) for each in found.items()]
