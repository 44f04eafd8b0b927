-- Tells from the tables alone whether a run of `mailroom demo` was right: one row per check (check, ok, detail).
-- By hand: PGOPTIONS='-c search_path=mailroom_demo_flights,mailroom_demo' psql -f verify.sql

WITH
handled AS (
    SELECT f.number, count(l.flight) AS times FROM flight f LEFT JOIN ledger l ON l.flight = f.number GROUP BY f.number
),
exact AS (
    SELECT count(*) AS sent, max(number) AS last, count(*) FILTER (WHERE times = 0) AS never,
           count(*) FILTER (WHERE times > 1) AS repeated
    FROM handled
),
strangers AS (
    SELECT count(*) AS strangers FROM ledger l WHERE NOT EXISTS (SELECT FROM flight f WHERE f.number = l.flight)
),
step AS (
    SELECT flight - lag(flight) OVER handling AS flights, clock - lag(clock) OVER handling AS clocks
    FROM ledger WINDOW handling AS (PARTITION BY key ORDER BY nth)
),
steps AS (
    SELECT count(flights) AS steps, count(*) FILTER (WHERE flights <= 0) AS overtaken,
           count(*) FILTER (WHERE clocks <= 0) AS fallen
    FROM step
),
stamps AS (
    SELECT count(*) - count(DISTINCT clock) AS reused FROM ledger
),
keys AS (
    SELECT count(*) FILTER (WHERE f.tail_number IS NOT NULL AND l.key <> f.tail_number) AS wrong,
           count(*) FILTER (WHERE f.tail_number IS NULL) AS unordered,
           count(DISTINCT l.key) FILTER (WHERE f.tail_number IS NULL) AS own
    FROM ledger l JOIN flight f ON f.number = l.flight
),
without AS (
    SELECT count(*) AS without FROM flight WHERE tail_number IS NULL
),
flown AS (
    SELECT tail_number, count(*) AS flights, (array_agg(destination ORDER BY number DESC))[1] AS airport
    FROM flight WHERE tail_number IS NOT NULL GROUP BY tail_number
),
fleet AS (
    SELECT count(*) AS aircraft, count(*) FILTER (WHERE a.flights IS DISTINCT FROM f.flights) AS miscounted,
           count(*) FILTER (WHERE a.airport IS DISTINCT FROM f.airport) AS misplaced
    FROM flown f FULL JOIN aircraft a USING (tail_number)
),
left_over AS (
    SELECT (SELECT count(*) FROM outbox) AS outbox, (SELECT count(*) FROM inbox) AS inbox,
           (SELECT count(*) FROM scheduled) AS scheduled, (SELECT count(*) FROM dead_letter) AS dead
)
SELECT 'every flight exactly once' AS "check", sent > 0 AND sent = last AND never + repeated + strangers = 0 AS ok,
       format('%s flights: %s never handled, %s more than once, %s never sent', sent, never, repeated, strangers)
       AS detail
FROM exact, strangers
UNION ALL
SELECT 'each aircraft in the order sent', overtaken = 0, format('%s successions: %s overtaken', steps, overtaken)
FROM steps
UNION ALL
SELECT 'clocks rise along each key', fallen + reused = 0,
       format('%s successions: %s without a rise; %s clocks used again', steps, fallen, reused)
FROM steps, stamps
UNION ALL
SELECT 'keyed by aircraft, or unordered', wrong = 0 AND unordered = without AND own = without,
       format('%s under a wrong key; %s of %s unordered ones handled, with %s keys', wrong, unordered, without, own)
FROM keys, without
UNION ALL
SELECT 'aircraft counted and placed', miscounted + misplaced = 0,
       format('%s aircraft: %s miscounted, %s misplaced', aircraft, miscounted, misplaced)
FROM fleet
UNION ALL
SELECT 'nothing left', outbox + inbox + scheduled + dead = 0,
       format('outbox %s, inbox %s, scheduled %s, dead letters %s', outbox, inbox, scheduled, dead)
FROM left_over;
