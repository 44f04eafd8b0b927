"""What waits for an operator: parked keys, dead letters, open breakers, stopped links, days that are not made."""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.figures import breakers, keys
from mailroom.sql.operation import Sql, filled

# As far as 100 of an inbox: what there is to do is the same, and counting all may take seconds.
PARKED = Sql(
    """
SELECT r.name, pg_catalog.format('inbox %%s: %%s parked key%%s, the first since %%s', r.name, k.keys,
       CASE k.keys WHEN 1 THEN NULL WHEN 100 THEN 's or more' ELSE 's' END,
       date_trunc('second'::text, clock_timestamp() - k.since))
FROM {schema}.inbox_registry AS r CROSS JOIN LATERAL (
    SELECT count(*) AS keys, min(s.parked_at) AS since FROM (
        SELECT s.parked_at FROM {schema}.key_state AS s WHERE s.inbox = r.name AND {parked} LIMIT 100
    ) AS s) AS k
WHERE k.keys > 0 ORDER BY k.since
""",
    columns=FOUND,
    parked=filled(keys.PARKED, row="s"),
)
# As far as 100 keys of an inbox. By its attempts it is known since when a message fails, and with what.
FAILING = Sql(
    """
WITH failing AS MATERIALIZED (
    SELECT r.name, k.key, k.clock FROM {schema}.inbox_registry AS r CROSS JOIN LATERAL (
        SELECT s.key, s.clock FROM {schema}.key_state AS s
        WHERE s.inbox = r.name AND {tried} LIMIT 100) AS k),
tried AS MATERIALIZED (
    SELECT f.name, f.key, a.at, a.error_class FROM failing AS f CROSS JOIN LATERAL (
        SELECT t.at, t.error_class FROM {schema}.attempt AS t
        WHERE t.inbox = f.name AND t.key = f.key AND t.clock = f.clock AND t.outcome <> 'replay') AS a)
SELECT t.name, pg_catalog.format('inbox %%s: %%s failing key%%s, the first for %%s, mostly by %%s', t.name,
       pg_catalog.count(DISTINCT t.key),
       CASE pg_catalog.count(DISTINCT t.key) WHEN 1 THEN NULL WHEN 100 THEN 's or more' ELSE 's' END,
       date_trunc('second'::text, clock_timestamp() - min(t.at)),
       pg_catalog.mode() WITHIN GROUP (ORDER BY coalesce(t.error_class, 'an unknown error')))
FROM tried AS t GROUP BY t.name
HAVING min(t.at) <= clock_timestamp() - %(failing_s)s::float8 * interval '1 s' ORDER BY min(t.at)
""",
    columns=FOUND,
    tried=filled(keys.TRIED, row="s"),
)
DEAD = Sql(
    """
SELECT d.stage, pg_catalog.format('stage %%s: %%s%%s, the last %%s ago', d.stage, count(*),
       CASE WHEN count(*) = 1000 THEN ' or more' END, date_trunc('second'::text, clock_timestamp() - max(d.failed_at)))
FROM (SELECT l.stage, l.failed_at FROM {schema}.dead_letter AS l ORDER BY l.id DESC LIMIT 1000) AS d
GROUP BY d.stage ORDER BY d.stage
""",
    columns=FOUND,
)
# An operator who has set a breaker wants to know; it closes by itself once a message is handled.
OPEN = Sql(
    """
SELECT l.inbox, pg_catalog.format('inbox %%s: open for %%s, %%s; tries so far: %%s, the next in %%s', l.inbox,
       date_trunc('second'::text, greatest(clock_timestamp() - l.opened_at, interval '0')), l.opened_why, l.tries,
       date_trunc('second'::text, greatest(l.try_at - clock_timestamp(), interval '0')))
FROM {open} AS l
ORDER BY l.opened_at
""",
    columns=FOUND,
    open=breakers.OPEN,
)

# A dispatcher makes them two weeks ahead; half of that may pass while none runs.
DAYS = Sql(
    """
SELECT r.name, pg_catalog.format('inbox %%s keeps what is reaped for %%s days, and the last day is %%s', r.name,
                                 r.keep_reaped_days, coalesce(d.last::text, 'missing'))
FROM {schema}.inbox_registry AS r, (SELECT max(day) AS last FROM {schema}.reaped_day WHERE emptied_at IS NULL) AS d
WHERE (d.last >= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 8) IS NOT TRUE
  AND r.keep_reaped_days IS NOT NULL
ORDER BY r.name
""",
    columns=FOUND,
)

# Both are tried again by themselves too, unless they are cut; what stopped them, or has failed for a minute, an
# operator has to repair. A reader that is a node finds out itself that its link was cut; a broker finds out nothing.
STOPPED = Sql(
    """
SELECT s.command, CASE WHEN s.is_cut
    THEN pg_catalog.format('%%s %%s is cut: it gets nothing any more, and what waited is given up', s.what, s.name)
    ELSE pg_catalog.format('%%s %%s: %%sfor %%s, %%s', s.what, s.name, s.trouble || ' ',
                           date_trunc('second'::text, greatest(clock_timestamp() - s.since, interval '0')), s.why) END
FROM (SELECT CASE WHEN b.origin IS NULL THEN 'link' ELSE 'bridge' END AS command,
             CASE WHEN b.origin IS NULL THEN 'source' ELSE 'bridge' END AS what, o.name, o.since, o.why, o.trouble,
             false AS is_cut
      FROM {schema}.origin AS o LEFT JOIN {schema}.bridge_in AS b ON b.origin = o.number
      WHERE o.state = 'stopped' OR o.state = 'open' AND {lasts}
      UNION ALL
      SELECT 'bridge', 'bridge', l.name, o.since, o.why, o.trouble, l.state = 'cut'
      FROM {schema}.bridge_out AS o JOIN {schema}.link AS l ON l.number = o.link
      WHERE o.state = 'stopped' OR o.trouble = 'refused' OR l.state = 'cut' OR {lasts}) AS s
ORDER BY s.command, s.since
""",
    columns=FOUND,
    lasts="o.trouble IS NOT NULL AND o.since < clock_timestamp() - interval '1 minute'",
)

LACKING = Sql(
    """
SELECT o.name, pg_catalog.format('bridge %%s: what it took between %%s and %%s is not at the broker any more', o.name,
       coalesce(date_trunc('second'::text, b.lacks_from)::text, 'its beginning'),
       date_trunc('second'::text, b.lacks_to))
FROM {schema}.bridge_in AS b JOIN {schema}.origin AS o ON o.number = b.origin
WHERE b.lacks_to IS NOT NULL ORDER BY o.name
""",
    columns=FOUND,
)

CHECKS = (
    DoctorCheck("M040", asking(PARKED), "mailroom parked list {first} --schema {schema}", of_tables=True),
    DoctorCheck("M041", asking(DEAD), "mailroom dead-letter list --schema {schema}", of_tables=True),
    DoctorCheck("M042", asking(DAYS), "mailroom dispatcher run --schema {schema}", of_tables=True),
    DoctorCheck("M043", asking(OPEN), "mailroom inbox resume {first} --schema {schema}", of_tables=True),
    DoctorCheck("M044", asking(STOPPED), "mailroom {first} status --schema {schema}", of_tables=True),
    DoctorCheck("M045", asking(FAILING), "mailroom inbox failing {first} --by-error --schema {schema}", of_tables=True),
    DoctorCheck("M046", asking(LACKING), "mailroom bridge resume {first} --schema {schema}", of_tables=True),
)
