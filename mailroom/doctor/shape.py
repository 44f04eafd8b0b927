"""The shape of the schema: indexes, partitions and triggers that are not as a migration has made them."""

from mailroom.doctor.expected import INDEXES, TRIGGERS
from mailroom.doctor.finding import FOUND, DoctorCheck, Examination, Found, asking
from mailroom.order.total import R_IS_BOUNDED
from mailroom.sql.operation import Operation, Sql

INVALID = Sql(
    """
SELECT i.indexrelid::regclass::text, pg_catalog.format('%%s on %%s', i.indexrelid::regclass, i.indrelid::regclass)
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
WHERE c.relnamespace = '{schema}'::regnamespace AND NOT (i.indisvalid AND i.indisready)
  AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = i.indexrelid)
ORDER BY 1
""",
    columns=FOUND,
)
# Of a partition the indexes are found by what they are on. The first column is none: it is an expression, of which
# each is the only one with that many columns. All indexes are read once, and names are looked up only where one is
# missing: with 1,000 inboxes that takes 3/5 of what a look at each partition does.
MISSING = Sql(
    """
WITH expected (name, made) AS (SELECT * FROM unnest(%(names)s::text[], %(made)s::text[])),
indexed AS MATERIALIZED (
    SELECT x.indrelid, bool_or(x.indisprimary) AS has_key,
           bool_or(x.indkey[0] = 0 AND x.indnkeyatts = 1) AS has_clock,
           bool_or(x.indkey[0] = 0 AND x.indnkeyatts = 2) AS has_order
    FROM pg_index AS x GROUP BY x.indrelid),
part AS MATERIALIZED (
    SELECT i.inhrelid AS oid, x.has_key, x.has_clock, x.has_order
    FROM pg_inherits AS i LEFT JOIN indexed AS x ON x.indrelid = i.inhrelid
    WHERE i.inhparent = '{schema}.inbox'::regclass::oid),
lacking AS MATERIALIZED (
    SELECT p.oid, substr(c.relname::text, 7) AS name, p.has_key, p.has_clock
    FROM part AS p JOIN pg_class AS c ON c.oid = p.oid
    WHERE p.has_key IS NOT TRUE OR p.has_clock IS NOT TRUE),
missing AS (
    SELECT e.name, e.made FROM expected AS e
    WHERE NOT EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = '{schema}'::regnamespace
                                                  AND c.relname = e.name::name)
    UNION ALL
    SELECT 'key_of_' || l.name,
           pg_catalog.format('ALTER TABLE %%s ADD CONSTRAINT key_of_%%s PRIMARY KEY (key, clock);', l.oid::regclass,
               l.name)
    FROM lacking AS l WHERE l.has_key IS NOT TRUE
    UNION ALL
    SELECT 'clock_of_' || l.name,
           pg_catalog.format('CREATE INDEX CONCURRENTLY clock_of_%%s ON %%s ((clock + 0));', l.name, l.oid::regclass)
    FROM lacking AS l WHERE l.has_clock IS NOT TRUE
    UNION ALL
    SELECT 'order_of_' || r.name,
           pg_catalog.format('CREATE INDEX CONCURRENTLY order_of_%%s ON %%s ((sent_clock + 0), origin);', r.name,
               p.oid::regclass)
    FROM {schema}.inbox_registry AS r
    JOIN pg_class AS c ON c.relnamespace = '{schema}'::regnamespace AND c.relname = ('inbox_' || r.name)::name
    JOIN part AS p ON p.oid = c.oid
    WHERE {is_bounded} AND p.has_order IS NOT TRUE)
SELECT m.made, m.name FROM missing AS m ORDER BY m.name
""",
    columns=FOUND,
    is_bounded=R_IS_BOUNDED,
)
DETACHED = Sql(
    """
SELECT CASE WHEN c.oid IS NULL THEN pg_catalog.format('mailroom inbox create %%s --schema %%s', r.name, '{node}')
            ELSE pg_catalog.format('ALTER TABLE {schema}.inbox ATTACH PARTITION %%s FOR VALUES IN (%%L);',
                c.oid::regclass, r.name)
            END,
       pg_catalog.format('inbox %%s: its table inbox_%%s %%s', r.name, r.name,
              CASE WHEN c.oid IS NULL THEN 'does not exist' ELSE 'is detached' END)
FROM {schema}.inbox_registry AS r
LEFT JOIN pg_class AS c ON c.relnamespace = '{schema}'::regnamespace AND c.relname = ('inbox_' || r.name)::name
WHERE NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = c.oid
    AND i.inhparent = '{schema}.inbox'::regclass::oid
                                                 AND NOT i.inhdetachpending)
UNION ALL
SELECT pg_catalog.format('ALTER TABLE {schema}.inbox ATTACH PARTITION %%s FOR VALUES IN (%%L);', c.oid::regclass,
              substr(c.relname::text, 7)),
       pg_catalog.format('%%s is not a partition, and no inbox is registered for it', c.oid::regclass)
FROM pg_class AS c
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r' AND NOT c.relispartition
  AND c.relname LIKE 'inbox\\_%%'
  AND 2 = (SELECT count(*) FROM pg_attribute AS a
           WHERE a.attrelid = c.oid AND a.attname IN ('sent_clock', 'delivered_at'))
  AND NOT EXISTS (SELECT FROM {schema}.inbox_registry AS r WHERE c.relname = ('inbox_' || r.name)::name)
ORDER BY 2
""",
    columns=FOUND,
)
UNREGISTERED = Sql(
    """
SELECT substr(c.relname::text, 7), pg_catalog.format('%%s has no row in inbox_registry', c.oid::regclass)
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.inbox'::regclass::oid AND NOT i.inhdetachpending
  AND NOT EXISTS (SELECT FROM {schema}.inbox_registry AS r WHERE c.relname = ('inbox_' || r.name)::name)
ORDER BY 1
""",
    columns=FOUND,
)
ASTRAY = Sql(
    """
SELECT s.inbox, pg_catalog.format('%%s has subscribed to %%s', s.inbox, string_agg(s.topic,
    ', '::text ORDER BY s.topic))
FROM {schema}.subscription AS s
WHERE NOT EXISTS (SELECT FROM {schema}.inbox_registry AS r WHERE r.name = s.inbox)
  AND NOT EXISTS (SELECT FROM {schema}.log_registry AS l WHERE l.name = s.inbox)
GROUP BY s.inbox ORDER BY s.inbox
""",
    columns=FOUND,
)
DISABLED = Sql(
    """
WITH expected AS (
    SELECT * FROM unnest(%(tables)s::text[], %(names)s::text[], %(enabled)s::text[], %(made)s::text[])
                  AS e (relation, name, enabled, made)),
triggers AS MATERIALIZED (
    SELECT c.relname, t.tgname, t.tgenabled::text FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
    WHERE c.relnamespace = '{schema}'::regnamespace)
SELECT CASE WHEN t.tgname IS NULL THEN e.made
            ELSE pg_catalog.format('ALTER TABLE {schema}.%%I ENABLE %%sTRIGGER %%I;', e.relation,
            CASE e.enabled WHEN 'A' THEN 'ALWAYS ' WHEN 'R' THEN 'REPLICA ' END, e.name) END,
       pg_catalog.format('trigger %%s of %%s %%s', e.name, e.relation, CASE
           WHEN t.tgname IS NULL THEN 'does not exist' WHEN t.tgenabled = 'D' THEN 'is disabled'
           ELSE 'fires at other times than it should' END)
FROM expected AS e LEFT JOIN triggers AS t ON t.relname = e.relation::name AND t.tgname = e.name::name
WHERE t.tgenabled IS DISTINCT FROM e.enabled
ORDER BY 2
""",
    columns=FOUND,
)


def indexes(look: Examination) -> Operation[Found]:
    """Return the indexes that are missing."""
    made = [each.replace("{schema}", f'"{look.schema}"') for each in INDEXES.values()]
    rows = yield MISSING.at(schema=look.schema)(names=list(INDEXES), made=made)
    return [(part, line) for part, line in rows]


def partitions(look: Examination) -> Operation[Found]:
    """Return the tables of inboxes that are not partitions."""
    rows = yield DETACHED.at(schema=look.schema, node=look.schema)()
    return [(part, line) for part, line in rows]


def triggers(look: Examination) -> Operation[Found]:
    """Return the triggers that are missing, or fire at other times than they should."""
    tables, names = zip(*TRIGGERS, strict=True)
    enabled, made = zip(*TRIGGERS.values(), strict=True)
    rows = yield DISABLED.at(schema=look.schema)(
        tables=list(tables),
        names=list(names),
        enabled=list(enabled),
        made=[each.replace("{schema}", f'"{look.schema}"') for each in made],
    )
    return [(part, line) for part, line in rows]


CHECKS = (
    DoctorCheck("M011", asking(INVALID), "REINDEX INDEX CONCURRENTLY {first};"),
    DoctorCheck("M012", indexes, "{first}", of_tables=True),
    DoctorCheck("M013", partitions, "{first}", of_tables=True),
    DoctorCheck("M014", asking(UNREGISTERED), "mailroom inbox create {first} --schema {schema}", of_tables=True),
    DoctorCheck(
        "M015",
        asking(ASTRAY),
        "DELETE FROM {schema}.subscription AS s WHERE NOT EXISTS "
        "(SELECT FROM {schema}.inbox_registry AS r WHERE r.name = s.inbox) AND NOT EXISTS "
        "(SELECT FROM {schema}.log_registry AS l WHERE l.name = s.inbox);",
        of_tables=True,
    ),
    DoctorCheck("M016", triggers, "{first}"),
)
