"""The deliver statement of the only message that waits: most deliveries of a node that is not late have one.

There starting a plan is nearly all that a delivery costs, and this one has the fewest parts.
"""

from dispatcher.delivery.plain import PLAIN_RESULT
from mailroom.message.columns import MESSAGE
from mailroom.order.total import IS_BOUNDED, RINGING
from mailroom.registry.routing import FITS, OF_THIS_NODE
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.operation import Sql

# The steps are those of `dispatcher.delivery.plain`, and so is what they do with one message, or with none. If a second
# one waits, or if the message is not plain, nothing is taken. `way` has the inboxes that get a message of this kind, by
# the rule of `mailroom.registry.routing`: a subscription to the topic, the inbox of its name, a pattern. So nothing is
# grouped or numbered. UNION leaves out an inbox that is reached twice.
#
# What makes a node more than plain is looked for in one scan: a look at each table by itself would cost a tenth more.
# D-deliver-12: The only message has a statement of its own.
DELIVER_ONE = Sql(
    """
WITH oldest AS MATERIALIZED (
    SELECT position, topic, kind, after_clock, deliver_at IS NULL AND expires_at IS NULL AS is_due
    FROM {schema}.outbox WHERE position > %(start)s::bigint ORDER BY position LIMIT 2),
way AS MATERIALIZED (
    SELECT inbox FROM {schema}.subscription WHERE topic = (SELECT topic FROM oldest LIMIT 1) AND {of_this_node}
    UNION SELECT name FROM {schema}.inbox_registry
          WHERE name = (SELECT topic FROM oldest WHERE kind <> 'E' LIMIT 1)
    UNION SELECT p.inbox FROM {schema}.subscription AS p, (
              SELECT topic || '.' AS ended,
                     pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
              FROM oldest WHERE kind IN ('M', 'E')) AS t
          WHERE p.fits IS NOT NULL AND {of_this_node} AND {fits}),
stamp AS MATERIALIZED (
    SELECT o.position, base + (o.position IS NOT NULL)::integer AS clock, n.clock_ceiling AS ceiling, n.id AS origin,
           (o.position IS NULL OR (
               is_due AND CASE kind WHEN 'C' THEN ways = 1 ELSE ways > 0 END AND ways <= {partitions}
               AND NOT EXISTS (SELECT FROM oldest OFFSET 1)))
           AND NOT EXISTS (
               SELECT FROM {schema}.link UNION ALL SELECT FROM {schema}.fan_out
               UNION ALL SELECT FROM {schema}.log_registry
               UNION ALL SELECT FROM {schema}.inbox_registry WHERE {is_bounded}) AS is_plain
    FROM {schema}.node AS n, (SELECT count(*) AS ways FROM way) AS w
         LEFT JOIN (SELECT * FROM oldest LIMIT 1) AS o ON true,
         LATERAL (SELECT greatest(last_value, after_clock) FROM {schema}.clock) AS c (base)),
taken AS (
    DELETE FROM {schema}.outbox
    WHERE position = (SELECT position FROM stamp WHERE is_plain AND clock <= ceiling)
    RETURNING {message}),
delivered AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT inbox, clock, clock, origin, {message} FROM taken, stamp, way
    RETURNING inbox)
SELECT least(rows, 1), rows, CASE WHEN rows > 0 THEN position END,
       CASE WHEN rows > 0 THEN setval('{schema}.clock'::regclass, clock) END,
       CASE WHEN is_plain AND clock > ceiling THEN clock END, woken, false, inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.outbox_position_seq),
       '{}'::text[], false, is_plain
FROM stamp, (SELECT count(*), coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), {ringing}
             FROM (SELECT inbox, to_regclass('{schema}.inbox_' || inbox) AS partition FROM delivered) AS touched)
            AS d (rows, inboxes, woken)
""",
    PLAIN_RESULT | {"is_plain": "boolean"},
    of_this_node=OF_THIS_NODE,
    fits=FITS,
    partitions=PARTITIONS,
    is_bounded=IS_BOUNDED,
    message=MESSAGE,
    ringing=RINGING,
)
