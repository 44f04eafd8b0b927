"""Which topics of its log an inbox reads: all, or those that it was told; patterns fit as those of subscriptions do.

What an inbox does not want is passed over where it reads the log, and nowhere else: what stands in its own table, since
its key failed, was wanted when it came there.
"""

from collections.abc import Sequence

from mailroom.registry.routing import FITS
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.values.names import MANY

# Whether an inbox wants the message `o`. Without topics it wants all: so a claim that knows from the statement before
# that there are topics loses nothing if they were ended since.
_WANTED = filled(
    """({all} OR EXISTS (
        SELECT FROM {wanted} AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ({fits})))""",
    fits=FITS,
)
WANTED_TOPICS = "SELECT topic, fits, words FROM {schema}.log_topic WHERE inbox = '{inbox}'"
# With the topics in a step `wanted_topic` of the statement, and without.
_ALL = "NOT EXISTS (SELECT FROM {wanted} AS p)"
IS_WANTED_ONE = filled(_WANTED, all=_ALL, wanted="wanted_topic")
IS_WANTED = filled(_WANTED, all=_ALL, wanted=f"({WANTED_TOPICS})")
# The same of any inbox, whose name is a parameter.
_OF_ONE = "(SELECT topic, fits, words FROM {schema}.log_topic WHERE inbox = %s)"
IS_WANTED_BY = filled(_WANTED, all=_ALL, wanted=_OF_ONE % "%(inbox)s::text")
# The same of many inboxes, each a row `i` of which it is known whether it has topics.
IS_WANTED_OF_EACH = filled(_WANTED, all="NOT i.has_topics", wanted=_OF_ONE % "i.inbox")
HAS_TOPICS = f"EXISTS ({WANTED_TOPICS})"

SET = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.log_topic WHERE inbox = '{inbox}' AND topic <> ALL (%(topics)s::text[]))
INSERT INTO {schema}.log_topic (inbox, topic)
SELECT '{inbox}', topic FROM pg_catalog.unnest(%(topics)s::text[]) AS topic
ON CONFLICT DO NOTHING
"""
)


def held_topics(topics: Sequence[str]) -> list[str]:
    """Return topics as they are kept and listed: none for all."""
    return [] if MANY in topics else sorted(set(topics))


def setting_topics(schema: str, inbox: str, topics: Sequence[str]) -> Operation[None]:
    """Have an inbox read these topics of its log from now on, in place of those that it read; without any, all."""
    yield SET.at(schema=schema, inbox=inbox)(topics=list(topics))
