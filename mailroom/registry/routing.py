"""Routing: which inboxes get a topic, and which links carry it. Deliveries, status and Spark's audit share the rule."""

from mailroom.order.total import IS_BOUNDED
from mailroom.sql.operation import filled

# Whether a pattern `p` fits a topic `t`. Spark reads it as PostgreSQL does.
# D-messages-1: Patterns are compared with each topic of a batch once, by LIKE.
FITS = "(p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits"

# Whether a subscription is to this node's messages.
OF_THIS_NODE = "(origin IN ('', '*')) IS TRUE"

# An exact subscription gets all of a topic, the inbox of the topic's name all but events, and a pattern messages and
# events only: an inbox on # would give every command a second receiver. So of a topic, `route` has once each inbox that
# gets anything; if it is `subscribed` it gets events, and if it is `named` commands and replies.
#
# A subscription to other nodes' messages only (`origin`) has no part in it. IS TRUE keeps the condition out of the
# index's: PostgreSQL 18 would prepare to skip through the index by it, which costs more than it saves.
#
# Patterns are compared with each topic of {sent} once, not with each message; and by LIKE, since PostgreSQL keeps no
# more than 32 regular expressions compiled. A % of LIKE runs over dots, but where both have as many words, each % has
# one word. Without patterns {sent} is not read. `route` lists patterns among the topics, too: no message has such a
# topic, and leaving them out would cost a filter.
_ROUTE = """pattern AS MATERIALIZED (SELECT fits, words, inbox FROM {schema}.subscription
            WHERE fits IS NOT NULL AND {of_this_node}),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM {sent} WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
{route} AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed, bool_or(named) AS named
    FROM (SELECT topic, inbox, true, true FROM {schema}.subscription WHERE {of_this_node}
          UNION ALL SELECT name, name, false, true FROM {schema}.inbox_registry{named}
          UNION ALL SELECT t.topic, p.inbox, true, false FROM sent_topic AS t JOIN pattern AS p
                    ON {fits})
         AS r (topic, inbox, subscribed, named)
    GROUP BY topic, inbox)"""
ROUTE = filled(_ROUTE, fits=FITS, of_this_node=OF_THIS_NODE, route="route", named="")
# The same on a node with logs. A log gets messages and events only: two of its readers would do a command twice.
# `lanes` and `segment`, the newest one, are those of a log, null for an inbox. What is sent to the name of an inbox
# that reads a log does not get there: it could overtake what stands in the log.
LOG_ROUTE = filled(
    """{receivers},
route AS MATERIALIZED (
    SELECT topic, inbox, subscribed, named AND l.name IS NULL AS named, l.lanes,
           (SELECT s.segment FROM {schema}.log_segment AS s WHERE s.log = l.name ORDER BY s.segment DESC LIMIT 1)
           AS segment
    FROM receiver AS r LEFT JOIN {schema}.log_registry AS l ON l.name = r.inbox)""",
    receivers=filled(_ROUTE, fits=FITS, of_this_node=OF_THIS_NODE, route="receiver", named=" WHERE log IS NULL"),
)

# Whether an inbox in `route` gets a message of this kind.
GETS = "CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END"

# Which open links carry a topic, by the rule of subscriptions; no topic names a link. Commands and replies leave only
# if no inbox gets them, and by the one link that may have them (`link_allowed`): no reader changes who gets them. It
# reads ROUTE. Without links nothing of {sent} is read.
LINK_ROUTE = filled(
    """link_pattern AS MATERIALIZED (
    SELECT fits, words, link FROM {schema}.link_topic JOIN {schema}.link ON number = link
    WHERE fits IS NOT NULL AND state = 'open'),
linked_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM {sent} WHERE EXISTS (SELECT FROM link_pattern) GROUP BY topic),
link_route AS MATERIALIZED (
    SELECT topic, link, bool_or(named) AND topic NOT IN (SELECT topic FROM route WHERE named) AS named
    FROM (SELECT topic, link, commands FROM {schema}.link_topic JOIN {schema}.link ON number = link
          WHERE fits IS NULL AND state = 'open'
          UNION ALL SELECT t.topic, p.link, false FROM linked_topic AS t JOIN link_pattern AS p
                    ON {fits})
         AS r (topic, link, named)
    GROUP BY topic, link)""",
    fits=FITS,
)

# Whether a link in `link_route` carries a message of this kind.
CARRIES = "(kind IN ('M', 'E') OR named)"

# The ways to each inbox, for the audit, which knows topics from files. What is not a pattern is the way of one topic.
# D-messages-9: Spark's audit uses the text of the route.
WAYS = """SELECT topic, inbox, true, fits IS NULL, fits, words::bigint FROM {schema}.subscription
    WHERE origin IN ('', '*')
    UNION ALL SELECT name, name, false, true, NULL, NULL FROM {schema}.inbox_registry"""

# Which inboxes get a topic of another node, of whose row {source} has the name: those that subscribe to it by that name
# or by *. An inbox's own name is no subscription here. Of each inbox: the clock after which it gets messages and events
# (`since`), the one after which it gets commands and replies (`named`), and whether it is given out up to a bound.
# Several subscriptions of one inbox to a topic give one copy: the one that begins first counts.
_ORIGIN_ROUTE = filled(
    """pattern AS MATERIALIZED (
    SELECT fits, words, inbox, since FROM {schema}.subscription
    WHERE fits IS NOT NULL AND origin IN ('*', (SELECT name FROM {source}))),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM {sent} WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
route AS MATERIALIZED (
    SELECT topic, inbox, min(since) AS since, min(since) FILTER (WHERE is_exact{named}) AS named, is_bounded{of_log}
    FROM (SELECT topic, inbox, since, true FROM {schema}.subscription
          WHERE origin IN ('*', (SELECT name FROM {source}))
          UNION ALL SELECT t.topic, p.inbox, p.since, false FROM sent_topic AS t JOIN pattern AS p
                    ON {fits})
         AS w (topic, inbox, since, is_exact)
         JOIN {receivers} USING (inbox)
    GROUP BY topic, inbox, is_bounded{of_log})""",
    fits=FITS,
)
ORIGIN_ROUTE = filled(
    _ORIGIN_ROUTE,
    named="",
    of_log="",
    receivers="(SELECT name, {order_is_bounded} FROM {schema}.inbox_registry) AS r (inbox, is_bounded)",
).replace("{order_is_bounded}", IS_BOUNDED)
# The same on a node with logs, which get messages and events only; `lanes` and `segment` as in `LOG_ROUTE`.
ORIGIN_LOG_ROUTE = filled(
    _ORIGIN_ROUTE,
    named=" AND lanes IS NULL",
    of_log=", lanes, segment",
    receivers="""(
             SELECT name, {order_is_bounded}, NULL::integer, NULL::bigint FROM {schema}.inbox_registry
             UNION ALL
             SELECT l.name, false, l.lanes, (
                 SELECT s.segment FROM {schema}.log_segment AS s WHERE s.log = l.name ORDER BY s.segment DESC LIMIT 1)
             FROM {schema}.log_registry AS l) AS r (inbox, is_bounded, lanes, segment)""",
).replace("{order_is_bounded}", IS_BOUNDED)

# The clock after which an inbox in such a `route` gets messages of this kind; null for never.
SINCE = "CASE WHEN kind IN ('M', 'E') THEN {since} ELSE {named} END"
ORIGIN_SINCE = filled(SINCE, since="since", named="named")
