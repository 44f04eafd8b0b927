"""Pause and resume an inbox or a key of it: claims give nothing meanwhile, and deliveries go on.

The pause is a mark in a row that each claim reads anyway: of the inbox in `inbox_registry`, of a key in `key_state`. So
a claim whose snapshot is older than the pause may still take one batch. `waiting_for_batches` waits for those too.
"""

import time

from inbox.by_key.parked_keys import NOTIFY
from inbox.by_key.paused_keys import PausedKey, listing_paused, pausing_key, resuming_key
from inbox.limits import closing
from inbox.order import finding_order
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.registry.breakers import closing_prefixes
from mailroom.schema import acts, finding
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import Key, key_text
from mailroom.values.numbers import TEN_YEARS_S, count_or_all, seconds

PAUSE = Sql(
    """
UPDATE {schema}.inbox_registry SET paused_at = clock_timestamp(), paused_by = %(by)s::text
WHERE name = '{inbox}' AND paused_at IS NULL RETURNING true
""",
    columns=("boolean",),
)
RESUME = Sql(
    """
UPDATE {schema}.inbox_registry SET paused_at = NULL, paused_by = NULL
WHERE name = '{inbox}' AND paused_at IS NOT NULL RETURNING true
""",
    columns=("boolean",),
)


def pausing(schema: str, inbox: str, key: Key | None, actor: str, why: str | None) -> Operation[bool]:
    """`Inbox.pause` as an operation."""
    check_actor(actor, why)
    return _pausing(schema, inbox, None if key is None else key_text(key), actor, why)


def _pausing(schema: str, inbox: str, key: str | None, actor: str, why: str | None) -> Operation[bool]:
    yield IN_TRANSACTION
    yield from _finding(schema, inbox, key)
    by = actor if why is None else f"{actor}: {why}"
    if key is None:
        is_new = bool((yield PAUSE.at(schema=schema, inbox=inbox)(by=by)))
    else:
        is_new = yield from pausing_key(schema, inbox, key, by)
    if is_new:
        yield from auditing(schema, acts.INBOX_PAUSE, [(inbox, key, 0)], actor, why)
    return is_new


def resuming(schema: str, inbox: str, key: Key | None, actor: str, why: str | None) -> Operation[bool]:
    """`Inbox.resume` as an operation."""
    check_actor(actor, why)
    return _resuming(schema, inbox, None if key is None else key_text(key), actor, why)


def _resuming(schema: str, inbox: str, key: str | None, actor: str, why: str | None) -> Operation[bool]:
    yield IN_TRANSACTION
    yield from _finding(schema, inbox, key)
    if key is None:
        was_paused = bool((yield RESUME.at(schema=schema, inbox=inbox)()))
        was_paused = (yield from closing(schema, inbox, by_hand=True)) or was_paused
        was_paused = bool((yield from closing_prefixes(schema, inbox, by_hand=True))) or was_paused
    else:
        was_paused = yield from resuming_key(schema, inbox, key)
    if was_paused:
        yield from auditing(schema, acts.INBOX_RESUME, [(inbox, key, 0)], actor, why)
        yield NOTIFY.at(schema=schema, inbox=inbox)()  # at the commit: sleeping workers claim at once
    return was_paused


def _finding(schema: str, inbox: str, key: str | None) -> Operation[None]:
    order = yield from finding_order(schema, inbox)
    if key is not None and not order.traits.parks_one:
        raise ConfigurationError(
            f"Inbox {inbox!r} has {order.traits.name} order, so no key can be paused by itself: leave the key out, "
            "which pauses the inbox.",
            code="MR-total-order-has-no-keys",
        )


def listing(schema: str, inbox: str, limit: int | None) -> Operation[list[PausedKey]]:
    """`Inbox.paused_keys` as an operation."""
    return _listing(schema, inbox, count_or_all(limit, "limit"))


def _listing(schema: str, inbox: str, limit: int | None) -> Operation[list[PausedKey]]:
    yield from finding(schema, inbox)
    return (yield from listing_paused(schema, inbox, limit))


# -- What is in hand --------------------------------------------------------------------------------------------------

# A session that takes messages has one of these locks on the inbox's table until its transaction ends. A statement
# takes it before its snapshot, one that reads a log on its lanes: so a session without it when the pause is committed
# sees the pause. That holds at READ COMMITTED, where workers and Spark work. In-flight entries would not do: they are
# written after the claim, and only by workers. A delivery has such a lock as well, for as long as it takes; one that
# begins later is not waited for. Locks are seen as they are now, whatever the transaction's snapshot.
# D-reap-11: Waiting for a pause to be complete means looking at `pg_locks`.
HOLDERS = Sql(
    """
SELECT DISTINCT virtualtransaction, pid::bigint
FROM pg_catalog.pg_locks
WHERE locktype = 'relation'
  AND relation IN ('{schema}.inbox_{inbox}'::regclass::oid, to_regclass('{schema}.lanes_{inbox}')::oid)
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND mode IN ('RowShareLock', 'RowExclusiveLock') AND granted
""",
    columns=("text", "bigint"),
)
IN_CHANGE = Sql("SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL", columns=("boolean",))
A_MOMENT = Sql("SELECT pg_catalog.pg_sleep(0.05) IS NULL", columns=("boolean",))


def waiting_for_batches(schema: str, inbox: str, timeout_s: float) -> Operation[None]:
    """`Inbox.wait_for_batches` as an operation."""
    seconds(timeout_s, "timeout_s", TEN_YEARS_S, zero=True)
    return _waiting_for_batches(schema, inbox, timeout_s)


def _waiting_for_batches(schema: str, inbox: str, timeout_s: float) -> Operation[None]:
    yield from finding(schema, inbox)
    [(is_in_change,)] = yield IN_CHANGE.at()()
    if is_in_change:
        raise ConfigurationError(
            "This transaction has changed something, and no worker sees a pause before it is committed. Commit it, "
            "then wait.",
            code="MR-pause-not-committed",
        )
    until = time.monotonic() + timeout_s
    holders = yield from _finding_holders(schema, inbox)
    before = set(holders)
    while left := before & set(holders):
        if time.monotonic() >= until:
            who = sorted(f"pid {holders[each]}" if holders[each] else "a prepared transaction" for each in left)
            raise MailroomError(
                f"After {timeout_s:g} s a worker may still have messages of inbox {inbox!r} in hand: "
                f"{', '.join(who)}. The pause holds; wait again, or end that transaction.",
                code="MR-batches-unfinished",
            )
        yield A_MOMENT.at()()
        holders = yield from _finding_holders(schema, inbox)


def _finding_holders(schema: str, inbox: str) -> Operation[dict[str, int | None]]:
    rows = yield HOLDERS.at(schema=schema, inbox=inbox)()
    return dict(rows)
