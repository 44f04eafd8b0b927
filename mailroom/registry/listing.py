"""What inboxes there are, with their subscriptions and settings."""

import json
from collections.abc import Collection
from typing import Any

from mailroom.registry.settings import SETTINGS
from mailroom.session.backoff import spread_s
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import OWN

LIST = Sql(
    """
SELECT name,
       (SELECT pg_catalog.json_object_agg(origin, topics)::text
        FROM (SELECT origin, pg_catalog.json_agg(topic ORDER BY topic) AS topics
              FROM (SELECT inbox, origin, topic FROM {schema}.subscription
                    UNION ALL SELECT inbox, '', topic FROM {schema}.log_topic) AS t
              WHERE inbox = r.name GROUP BY origin) AS s),
       "order", log, created_at, paused_at, paused_by,
       {settings}
FROM {schema}.inbox_registry AS r LEFT JOIN {schema}.limits AS l ON l.inbox = r.name
WHERE %(inboxes)s::text[] IS NULL OR name = ANY (%(inboxes)s::text[]) ORDER BY name
""",
    columns=(
        "text",
        "text",
        "text",
        "text",
        "timestamptz",
        "timestamptz",
        "text",
        *(each.type for each in SETTINGS.values()),
    ),
    settings=", ".join(each.column for each in SETTINGS.values()),
)


def listing(schema: str, inboxes: Collection[str] | None = None) -> Operation[list[dict[str, Any]]]:
    """Return the inboxes by name, or those of `inboxes` that there are: subscriptions, order and settings.

    The topics of one that reads a log are those that it reads of it; none if it reads all.
    """
    rows = yield LIST.at(schema=schema)(inboxes=None if inboxes is None else list(inboxes))
    return [_listed(*row) for row in rows]


def _listed(
    name: str, subscribed: str | None, order: str, log: str | None, created_at: Any, paused_at: Any,
    paused_by: str | None, *values: Any,
) -> dict[str, Any]:  # fmt: skip
    topics = json.loads(subscribed or "{}")
    settings = dict(zip(SETTINGS, values, strict=True))
    spread = spread_s(settings["backoff_s"], settings["backoff_max_s"], settings["max_attempts"])
    return {
        "name": name,
        "topics": topics.pop(OWN, []),
        "topics_of": topics,
        "order": order,
        "log": log,
        **settings,
        "attempts_spread_s": spread,
        "created_at": created_at,
        "paused_at": paused_at,
        "paused_by": paused_by,
    }
