"""Routing: which inboxes get a topic. Deliveries and `mailroom.status` share this rule."""

# Subscribers get every message of a topic. The inbox of the topic's own name gets every message but events. So an event
# goes to those inboxes in `route` that are `subscribed`, and any other message to all of them.
ROUTE = """route AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed
    FROM (SELECT topic, inbox, true FROM {schema}.subscription
          UNION ALL SELECT name, name, false FROM {schema}.inbox_registry) AS r (topic, inbox, subscribed)
    GROUP BY topic, inbox)"""
