"""Drop an inbox with all that belongs to it, beside a running dispatcher."""

from mailroom import locks
from mailroom.answer import ASKS, Undone, answering_undone
from mailroom.audit import auditing, check_actor
from mailroom.errors import ConfigurationError, MailroomError, SchemaError
from mailroom.names import DEFAULT_SCHEMA, inbox_name, schema_name
from mailroom.schema.checks import checking, finding
from mailroom.schema.inboxes import LOCK
from mailroom.sight import seeing
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.sqlstate import AGAIN, sqlstate

# What has rows of an inbox. Its dead letters stay, and so does `spark_drain`: the files of its drains are still there,
# and an inbox of that name goes on behind their numbers.
HAVE_ROWS = ("subscription", "key_state", "parked", "attempt", "worker", "stable", "spark_stream")


def _drop(
    name: str, *, actor: str, discard: bool = False, why: str | None = None, schema: str = DEFAULT_SCHEMA
) -> Operation[int]:
    """Drop an inbox, its subscriptions and all else that is kept of it; return how many messages were deleted.

    Refuses while messages are in it or parked, unless `discard` says to delete them for good; commands among them that
    ask for a reply get one of status 500. What still waits in the outbox goes by the subscriptions that are left, and
    into `dead_letter` if nobody gets it. Its dead letters stay. `actor` says who acts and `why` gives the reason; both
    are written to the table `audit`.

    In the caller's transaction, which has the node's dispatch lock until it ends: nothing is delivered meanwhile, so
    commit soon. Stop the inbox's workers first: it waits 3 s for their batches. Workers that still run end with
    `UnknownInbox` once it is committed.

    Raises `UnknownInbox`; `SchemaError` while messages are there; `MailroomError` if the inbox is in use;
    `ConfigurationError` unless the transaction is READ COMMITTED, which alone sees what was delivered last; and
    `InvalidMessage` for a wrong `actor` or `why`.
    """
    return _dropping(schema_name(schema), inbox_name(name), actor, discard, why)


drop_inbox, drop_inbox_async = on_connections("drop_inbox", _drop)


ISOLATION = Sql("SELECT current_setting('transaction_isolation')", columns=("text",))
# In the order of a delivery, so that the two cannot deadlock. Who reads or handles the inbox has a lock on its table;
# the lock on the parent, which dropping a partition takes, comes last, so that it is held for the shortest time.
EXCLUDE = Sql(
    """
DO $$
DECLARE
    lock_timeout text := pg_catalog.current_setting('lock_timeout');
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '3s', true);
    PERFORM {schema}.take_dispatch_turn();
    LOCK TABLE {schema}.inbox_{inbox} IN ACCESS EXCLUSIVE MODE;
    LOCK TABLE ONLY {schema}.inbox IN ACCESS EXCLUSIVE MODE;
    PERFORM pg_catalog.set_config('lock_timeout', lock_timeout, true);
END $$
"""
)
COUNT = Sql(
    """
SELECT (SELECT count(*) FROM {schema}.inbox_{inbox}),
       (SELECT count(*) FROM {schema}.parked WHERE inbox = '{inbox}'),
       EXISTS (SELECT FROM {schema}.fan_out_way WHERE inbox = '{inbox}')
""",
    columns=("bigint", "bigint", "boolean"),
)
COMMANDS = Sql(
    """
SELECT message_id, key, headers::text
FROM (SELECT message_id, key, clock, kind, headers FROM {schema}.inbox_{inbox}
      UNION ALL
      SELECT message_id, key, clock, kind, headers FROM {schema}.parked WHERE inbox = '{inbox}') AS held
WHERE {asks} ORDER BY clock
""",
    columns=("uuid", "text", "text"),
    asks=ASKS,
)
# Whoever sleeps over it wakes up, and finds that it is gone.
NOTIFY = Sql(
    "SELECT pg_notify({partition_channel}, '') IS NULL",
    columns=("boolean",),
    partition_channel=locks.channel("'{schema}.inbox_{inbox}'::regclass"),
)
FORGET = Sql("DELETE FROM {schema}.{table} WHERE inbox = '{inbox}'")
UNLIST = Sql("DELETE FROM {schema}.inbox_registry WHERE name = '{inbox}'")
DROP = Sql("DROP TABLE {schema}.inbox_{inbox}")


def _dropping(schema: str, inbox: str, actor: str, discard: bool, why: str | None) -> Operation[int]:
    check_actor(actor, why)
    yield IN_TRANSACTION
    yield from checking(schema)
    [(isolation,)] = yield ISOLATION.at()()
    if isolation != "read committed":
        raise ConfigurationError(
            f"This transaction is {isolation}, and may not see what was delivered last. Drop inboxes in a transaction "
            "of READ COMMITTED.",
            code="MR-wrong-isolation",
        )
    names = {"schema": schema, "inbox": inbox}
    yield LOCK.at(lock=str(locks.DDL), node=schema)()
    yield from finding(schema, inbox)
    yield from seeing(schema, "inbox_registry", "fan_out_way", *HAVE_ROWS)
    try:
        yield EXCLUDE.at(**names)()
    except Exception as error:
        if sqlstate(error) not in AGAIN:
            raise
        raise MailroomError(
            f"Inbox {inbox!r} is in use. Roll back, stop its workers and whoever else reads it, and drop it again: "
            "pg_locks shows who has a lock on its table.",
            code="MR-inbox-in-use",
        ) from error
    [(waiting, parked, is_awaited)] = yield COUNT.at(**names)()
    if is_awaited:
        raise MailroomError(
            f"Messages are being delivered to many inboxes, and {inbox!r} has yet to get them. Try again in a moment, "
            "while a dispatcher runs (mailroom dispatcher run).",
            code="MR-delivery-unfinished",
        )
    if waiting + parked and not discard:
        raise SchemaError(
            f"Inbox {inbox!r} holds {waiting + parked:,} messages, {parked:,} of them parked. Have them handled first, "
            "or delete them for good: discard=True (--discard).",
            code="MR-inbox-holds-messages",
        )
    yield from answering_undone(schema, [Undone.of(*row) for row in (yield COMMANDS.at(**names)())])
    yield NOTIFY.at(**names)()
    for table in HAVE_ROWS:
        yield FORGET.at(table=table, **names)()
    yield UNLIST.at(**names)()
    yield DROP.at(**names)()
    yield from auditing(schema, "drop inbox", [(inbox, None, waiting + parked)], actor, why)
    return int(waiting + parked)
