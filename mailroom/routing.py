"""Routing: which inboxes get a topic. Deliveries, `mailroom.status` and Spark's audit share this rule."""

# Whether a pattern `p` fits a topic `t`. Spark reads it as PostgreSQL does.
FITS = "(p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits"

# An exact subscription gets all of a topic, the inbox of the topic's name all but events, and a pattern messages and
# events only: an inbox on # would give every command a second receiver. So of a topic, `route` has once each inbox that
# gets anything; if it is `subscribed` it gets events, and if it is `named` commands and replies.
#
# Patterns are compared with each topic of {sent} once, not with each message; and by LIKE, since PostgreSQL keeps no
# more than 32 regular expressions compiled. A % of LIKE runs over dots, but where both have as many words, each % has
# one word. Without patterns {sent} is not read. `route` lists patterns among the topics, too: no message has such a
# topic, and leaving them out would cost a filter.
ROUTE = """pattern AS MATERIALIZED (SELECT fits, words, inbox FROM {schema}.subscription WHERE fits IS NOT NULL),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM {sent} WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
route AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed, bool_or(named) AS named
    FROM (SELECT topic, inbox, true, true FROM {schema}.subscription
          UNION ALL SELECT name, name, false, true FROM {schema}.inbox_registry
          UNION ALL SELECT t.topic, p.inbox, true, false FROM sent_topic AS t JOIN pattern AS p
                    ON {fits})
         AS r (topic, inbox, subscribed, named)
    GROUP BY topic, inbox)""".replace("{fits}", FITS)

# Whether an inbox in `route` gets a message of this kind.
GETS = "CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END"

# The ways to each inbox, for the audit, which knows topics from files. What is no pattern is the way of one topic.
WAYS = """SELECT topic, inbox, true, fits IS NULL, fits, words::bigint FROM {schema}.subscription
    UNION ALL SELECT name, name, false, true, NULL, NULL FROM {schema}.inbox_registry"""
