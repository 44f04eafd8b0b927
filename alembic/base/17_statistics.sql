-- Statistics by minute, of processes that keep them: charts without anything beside the database.

CREATE TABLE stat_minute (  -- What happened in each minute, of all processes that keep statistics; 48 hours of it.
    minute    timestamptz      NOT NULL,              -- The minute, by the database's clock.
    inbox     text             COLLATE "C" NOT NULL,  -- The inbox; '' for what the dispatcher delivered in the whole node.
    delivered bigint           NOT NULL,              -- Messages that were delivered, copies counted each; 0 for an inbox.
    reaped    bigint           NOT NULL,              -- Messages of committed batches.
    failed    bigint           NOT NULL,              -- Failed attempts of messages.
    parked    bigint           NOT NULL,              -- Those of them that parked their key.
    skipped   bigint           NOT NULL,              -- Those of them that skipped their message.
    batches   bigint           NOT NULL,              -- Committed batches.
    handle_s  double precision NOT NULL,              -- How long handlers took together, in seconds.
    ages      integer[]        NOT NULL,              -- How many of the reaped messages fell below each bound of age_percentile, from send to commit; one more has no bound.
    PRIMARY KEY (minute, inbox)
) WITH ({hot});

-- As histogram_quantile of Prometheus does it: evenly within a bucket. What lies above the last bound counts as it. The
-- bounds are those of the metric message_age_at_reap_seconds; rows of several minutes and processes add up.
CREATE FUNCTION age_percentile(ages bigint[], share double precision)  -- The age that this share of the messages does not exceed, in seconds; null of none.
RETURNS double precision LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    SELECT CASE WHEN b.upper IS NULL THEN b.lower
                ELSE b.lower + (b.upper - b.lower) * (1 - (b.so_far - share * b.total) / b.count) END
    FROM (SELECT t.n, t.count, t.bound AS upper, coalesce(lag(t.bound) OVER (ORDER BY t.n), 0) AS lower,
                 (sum(t.count) OVER (ORDER BY t.n))::double precision AS so_far,
                 (sum(t.count) OVER ())::double precision AS total
          FROM unnest(ages, ARRAY[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800,
                                  7200]::double precision[]) WITH ORDINALITY AS t (count, bound, n)) AS b
    WHERE b.count > 0 AND b.so_far >= share * b.total ORDER BY b.n LIMIT 1);

CREATE VIEW statistics AS
SELECT n.name AS node, s.inbox, s.minute, s.delivered, s.reaped, s.failed, s.parked, s.skipped, s.batches, s.handle_s,
       age_percentile(s.ages, 0.5) AS age_p50_s, age_percentile(s.ages, 0.99) AS age_p99_s
FROM stat_minute AS s CROSS JOIN node AS n;
COMMENT ON VIEW statistics IS 'The rows of stat_minute with the ages below which half and 99 % of the messages are.';

-- Written through a view, as what else is recorded of an inbox (16_rights.sql).
CREATE VIEW my_stat_minute WITH (security_barrier) AS SELECT * FROM stat_minute WHERE is_mine(inbox);
COMMENT ON VIEW my_stat_minute IS
    'The rows of stat_minute about inboxes that the current role may take messages out of.';
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON stat_minute FOR EACH ROW EXECUTE FUNCTION refuse_others();
