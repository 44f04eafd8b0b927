"""What inboxes there are, with their subscriptions and settings."""

import json
from typing import Any

from mailroom.names import OWN
from mailroom.session.backoff import spread_s
from mailroom.sql.operation import Operation, Sql

LIST = Sql(
    """
SELECT name,
       (SELECT pg_catalog.json_object_agg(origin, topics)::text
        FROM (SELECT origin, pg_catalog.json_agg(topic ORDER BY topic) AS topics FROM {schema}.subscription
              WHERE inbox = r.name GROUP BY origin) AS s),
       "order", backoff_s, backoff_max_s, max_attempts::bigint, on_failure, expire_s, keep_reaped_days::bigint,
       created_at, paused_at, paused_by, l.rate_per_s, CASE WHEN l.rate_per_s IS NOT NULL THEN l.burst END::bigint,
       l.concurrency::bigint, l.breaker_percent::bigint, l.breaker_by
FROM {schema}.inbox_registry AS r LEFT JOIN {schema}.limits AS l ON l.inbox = r.name
WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text ORDER BY name
""",
    columns=(
        "text", "text", "text", "float8", "float8", "bigint", "text", "float8", "bigint", "timestamptz", "timestamptz",
        "text", "float8", "bigint", "bigint", "bigint", "text",
    ),
)  # fmt: skip


def listing(schema: str, inbox: str | None = None) -> Operation[list[dict[str, Any]]]:
    """Return the inboxes by name, or one of them: subscriptions, settings and limits; nothing if it is not there."""
    rows = yield LIST.at(schema=schema)(inbox=inbox)
    return [
        {
            "name": name,
            "topics": topics.pop(OWN, []),
            "topics_of": topics,
            "order": order,
            "backoff_s": backoff_s,
            "backoff_max_s": backoff_max_s,
            "max_attempts": max_attempts,
            "attempts_spread_s": spread_s(backoff_s, backoff_max_s, max_attempts),
            "on_failure": on_failure,
            "expire_s": expire_s,
            "keep_reaped_days": keep_reaped_days,
            "created_at": created_at,
            "paused_at": paused_at,
            "paused_by": paused_by,
            "rate": rate,
            "burst": burst,
            "concurrency": concurrency,
            "breaker": breaker,
            "breaker_by": breaker_by,
        }
        for (
            name, topics, order, backoff_s, backoff_max_s, max_attempts, on_failure, expire_s, keep_reaped_days,
            created_at, paused_at, paused_by, rate, burst, concurrency, breaker, breaker_by,
        ) in (
            (name, json.loads(topics or "{}"), *settings) for name, topics, *settings in rows
        )
    ]  # fmt: skip
