"""After a failed attempt in a total inbox: it fails as a whole, under the key '', and all its messages wait.

Where other inboxes have clocks up to which a key is suspected, this has sent_clocks.
"""

from inbox.by_key.failure import DECIDED, RECORDER
from mailroom.order.expressions import BY_SENT
from mailroom.sql.operation import Sql

# As `inbox.by_key.failure.RECORD`. History and key_state name the message by its clock, which no other message here
# has.
RECORD = Sql(
    """
WITH tried AS MATERIALIZED (
    SELECT r.*, i.sent_clock, %(clock)s::bigint = (
               SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_sent} > r.sent_floor
               ORDER BY {by_sent}, origin LIMIT 1) AS is_head,
           1 + greatest(0, (SELECT attempt FROM {schema}.my_attempt
                            WHERE inbox = '{inbox}' AND key = '' AND clock = %(clock)s::bigint
                            ORDER BY id DESC LIMIT 1),
                        (SELECT attempts FROM {schema}.my_key_state
                         WHERE inbox = '{inbox}' AND key = '' AND clock = %(clock)s::bigint)) AS attempt
    FROM {schema}.inbox_registry AS r, LATERAL (
        SELECT sent_clock FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock = %(clock)s::bigint) AS i
    WHERE r.name = '{inbox}' AND NOT EXISTS (
        SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}' AND key = '' AND retry_at = 'infinity')),
{decided},
changed AS (
    INSERT INTO {schema}.my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
    SELECT name, '', %(clock)s::bigint, attempt,
           CASE WHEN is_head AND outcome = 'retry' THEN retry_at ELSE clock_timestamp() END, %(error)s::text,
           sent_clock, sent_clock
    FROM decided
    ON CONFLICT (inbox, key) DO UPDATE SET
        clock = excluded.clock, attempts = excluded.attempts, retry_at = excluded.retry_at,
        last_error = excluded.last_error, alone_to = greatest(s.alone_to, excluded.alone_to),
        suspect_to = greatest(s.suspect_to, excluded.suspect_to)
        WHERE s.retry_at < 'infinity'
    RETURNING extract(epoch FROM retry_at - clock_timestamp())::float8 AS due_in_s),
history AS (
    INSERT INTO {schema}.my_attempt (inbox, key, clock, message_id, attempt, outcome, retry_at, error, error_class,
                                     worker)
    SELECT name, '', %(clock)s::bigint, %(id)s::uuid, attempt, outcome,
           CASE outcome WHEN 'retry' THEN retry_at END, %(error)s::text, %(error_class)s::text,
           {recorder}
    FROM decided CROSS JOIN pg_catalog.current_setting('application_name'::text) AS s (application))
SELECT outcome, attempt::bigint, (SELECT due_in_s FROM changed), max_attempts::bigint FROM decided
""",
    columns=("text", "bigint", "float8", "bigint"),
    decided=DECIDED,
    recorder=RECORDER,
    by_sent=BY_SENT,
)

# The last message of the batch is among the last ones of its keys.
SUSPECT = Sql(
    """
INSERT INTO {schema}.my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
SELECT '{inbox}', '', clock, 0, clock_timestamp(), %(error)s::text, sent_clock, sent_clock
FROM (SELECT i.clock, i.sent_clock
      FROM unnest(%(keys)s::text[], %(clocks)s::bigint[]) AS u (key, clock), LATERAL (
          SELECT clock, sent_clock, origin FROM {schema}.inbox_{inbox} AS i
          WHERE i.key = u.key AND i.clock = u.clock) AS i
      ORDER BY i.sent_clock DESC, i.origin DESC LIMIT 1) AS last
ON CONFLICT (inbox, key) DO UPDATE SET
    alone_to = greatest(s.alone_to, excluded.alone_to), suspect_to = excluded.suspect_to,
    last_error = excluded.last_error
    WHERE s.suspect_to < excluded.suspect_to
"""
)
