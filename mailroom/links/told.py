"""Waiting until the sources have a subscription: from then on, what is sent there comes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mailroom.errors import ConfigurationError, NotSubscribed, UnknownLink
from mailroom.figures.leaders import LEADS
from mailroom.links.unknown import not_read
from mailroom.schema.checks import checking, finding
from mailroom.sql.operation import Operation, Sql, filled


@dataclass(frozen=True, slots=True)
class _Untold:
    topic: str
    origin: str
    source: str | None
    state: str | None
    why: str | None
    is_refused: bool
    is_own: bool
    is_read: bool

    @property
    def reason(self) -> str:
        if not self.is_read:
            return "no dispatcher of this node runs: mailroom dispatcher run"
        if self.why is not None:
            return f"it is {self.state}: {self.why}"
        return "the dispatcher has not told it yet"


# By the id of the subscription: if one was ended and made again, the source is told again. A `*` without sources is a
# subscription to this node alone. `is_own`: no other session sees it before this transaction commits. A broker is told
# nothing: a bridge reads its topics without being asked.
# D-links-15: What a source was told is noted by id.
PENDING = Sql(
    """
SELECT s.topic, s.origin, o.name, coalesce(o.trouble, o.state), o.why, coalesce(s.id = ANY (o.refused), false),
       coalesce(s.xmin = pg_catalog.pg_current_xact_id_if_assigned()::xid, false),
       {leads}
FROM {schema}.subscription AS s LEFT JOIN {schema}.origin AS o ON s.origin IN (o.name, '*')
WHERE s.inbox = '{inbox}' AND s.origin <> '' AND (o.name IS NOT NULL OR s.origin <> '*')
  AND (%(origin)s::text IS NULL OR s.origin = %(origin)s::text)
  AND (%(topics)s::text[] IS NULL OR s.topic = ANY (%(topics)s::text[]))
  AND o.state IS DISTINCT FROM 'excluded' AND (s.id = ANY (o.told)) IS NOT TRUE
  AND NOT EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number)
ORDER BY o.name, s.topic
""",
    into=_Untold,
    leads=filled(LEADS, role="links"),
)
IS_LOG = Sql("SELECT EXISTS (SELECT FROM {schema}.log_registry WHERE name = %(name)s::text)", columns=("boolean",))
PAUSE = Sql(
    """
SELECT now(), current_setting('transaction_isolation') <> 'read committed' FROM pg_catalog.pg_sleep(0.05)
""",
    columns=("timestamptz", "boolean"),
)


def waiting_told(
    schema: str, inbox: str, origin: str | None, topics: Sequence[str] | None, timeout_s: float
) -> Operation[None]:
    """`Links.wait` as an operation."""
    yield from checking(schema)
    if not (yield IS_LOG.at(schema=schema)(name=inbox))[0][0]:
        yield from finding(schema, inbox)
    until = time.monotonic() + timeout_s
    began_before = None
    while pending := PENDING.named((yield PENDING.at(schema=schema, inbox=inbox)(origin=origin, topics=topics))):
        for each in pending:
            yield from _checking(schema, inbox, each)
        if time.monotonic() >= until:
            first = pending[0]
            raise NotSubscribed(
                f"Inbox {inbox} subscribes to {first.topic} of {first.source}, which does not know it yet: "
                f"{first.reason}. What is sent there until it knows does not come.",
                code="MR-subscription-not-told",
            )
        [(began, has_one_snapshot)] = yield PAUSE.at()()
        if has_one_snapshot and began == began_before:
            raise ConfigurationError(
                "This transaction sees nothing that happens after its first statement, so it would wait in vain. Wait "
                "outside of it, or in READ COMMITTED.",
                code="MR-wrong-isolation",
            )
        began_before = began


def _checking(schema: str, inbox: str, each: _Untold) -> Operation[None]:
    """Raise what no waiting mends."""
    if each.source is None:
        raise UnknownLink((yield from not_read(schema, each.origin)))
    if each.is_own:
        raise NotSubscribed(
            f"This transaction has subscribed inbox {inbox} to {each.topic}. Commit it before you wait: no other "
            "session sees it before.",
            code="MR-subscription-not-committed",
        )
    if each.is_refused:
        raise NotSubscribed(
            f"{each.source} does not allow {each.topic} to this node. See: mailroom link status",
            code="MR-subscription-not-allowed",
        )
