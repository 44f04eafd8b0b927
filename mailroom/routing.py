"""Routing: who gets a topic. The one place of that rule, for deliveries and for whoever tells of them."""

# Subscribers get all of a topic; the inbox of the topic's name gets all but events. So of a message's topic, `route`
# has the inboxes that get it if they are `subscribed` or its kind is not 'E'.
ROUTE = """route AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed
    FROM (SELECT topic, inbox, true FROM {schema}.subscription
          UNION ALL SELECT name, name, false FROM {schema}.inbox_registry) AS r (topic, inbox, subscribed)
    GROUP BY topic, inbox)"""
