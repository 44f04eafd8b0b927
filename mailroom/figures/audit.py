"""What was done by hand, as the audit has it."""

from dataclasses import dataclass
from datetime import datetime

from mailroom.sql.operation import Operation, Sql


@dataclass(frozen=True, slots=True)
class Audited:
    """An act: by whom, as which database role, to what, and why; `action` has the words of its command.

    `key` is a key of the inbox, or the name of what is none. `messages` is how many it was about; `change` says what is
    different now.
    """

    id: int
    at: datetime
    actor: str
    role: str
    action: str
    inbox: str | None
    key: str | None
    messages: int
    change: str | None
    reason: str | None


# The newest are what people look for, and the primary key is in their order.
AUDIT = Sql(
    """
SELECT id, at, actor, role, action, inbox, key, messages, change, reason FROM {schema}.audit
WHERE id < coalesce(%(before)s::bigint, 9223372036854775807)
  AND (%(inbox)s::text IS NULL OR inbox = %(inbox)s::text) AND (%(key)s::text IS NULL OR key = %(key)s::text)
ORDER BY id DESC LIMIT %(limit)s::bigint
""",
    into=Audited,
)


def reading_audit(
    schema: str, *, limit: int, before: int | None = None, inbox: str | None = None, key: str | None = None
) -> Operation[list[Audited]]:
    """Return what was done by hand, the newest first, at most `limit` acts; of an inbox, or about a key or name."""
    rows = yield AUDIT.at(schema=schema)(before=before, inbox=inbox, key=key, limit=limit)
    found: list[Audited] = AUDIT.named(rows)
    return found
