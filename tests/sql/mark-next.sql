-- NEXT in mailroom/links/marks.py
SELECT greatest(c.last_value, (SELECT max(wanted_clock) FROM (
    SELECT l.number, l.wanted_clock, coalesce(n.seq, 0) AS seq FROM "mailroom".link AS l LEFT JOIN LATERAL (
        SELECT t.seq, t.sent_clock FROM "mailroom".transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n
        ON true
    WHERE l.state = 'open' AND l.wanted_clock > coalesce(n.sent_clock, 0)) AS w)), n.clock_ceiling
FROM "mailroom".clock AS c, "mailroom".node AS n WHERE EXISTS (
    SELECT l.number, l.wanted_clock, coalesce(n.seq, 0) AS seq FROM "mailroom".link AS l LEFT JOIN LATERAL (
        SELECT t.seq, t.sent_clock FROM "mailroom".transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n
        ON true
    WHERE l.state = 'open' AND l.wanted_clock > coalesce(n.sent_clock, 0))
