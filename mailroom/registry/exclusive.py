"""Have an inbox to oneself until the transaction ends, while a dispatcher runs: to drop it, or to rename it."""

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.registry.breakers import NOTIFY
from mailroom.registry.inboxes import SCHEMA_LOCK
from mailroom.schema.checks import checking, finding
from mailroom.sql import locks
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.sight import seeing
from mailroom.sql.sqlstate import AGAIN, sqlstate

# Tables with rows of an inbox, beside its partition. Not those that only record its past: dead letters, and the audit.
HAVE_ROWS = (
    "subscription",
    "log_topic",
    "key_state",
    "parked",
    "attempt",
    "worker",
    "stable",
    "limits",
    "slot",
    "breaker",
    "spark_stream",
    "stat_minute",
)

ISOLATION = Sql("SELECT current_setting('transaction_isolation')", columns=("text",))
# In the order of a delivery, so that the two cannot deadlock. A session that reads or handles the inbox has a lock on
# its table; the lock on the parent, which dropping a partition takes, comes last, so that it is held for the shortest
# time. The slots come before the inbox's table, as for a worker: it has its slot when it claims. So do the lanes of an
# inbox that reads a log. A migration may have
# the turn while it waits for a batch, and the caller's transaction may be that batch. The migration gives up after 2 s,
# and the server ends who has waited for deadlock_timeout: so the turn is waited for in tries that are shorter.
EXCLUDE = Sql(
    """
DO $$
DECLARE
    lock_timeout text := pg_catalog.current_setting('lock_timeout');
    began CONSTANT timestamptz := pg_catalog.clock_timestamp();
    detected CONSTANT interval := pg_catalog.current_setting('deadlock_timeout')::interval;
    longest CONSTANT float8 := least(1000::float8, 800::float8 * pg_catalog.date_part('epoch', detected));
BEGIN
    LOOP
        BEGIN
            PERFORM pg_catalog.set_config('lock_timeout', greatest(1::bigint, longest::bigint)::text, true);
            PERFORM {schema}.take_dispatch_turn();
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF pg_catalog.clock_timestamp() >= began + '4 s'::interval THEN RAISE; END IF;
        END;
    END LOOP;
    PERFORM pg_catalog.set_config('lock_timeout', '3s', true);
    PERFORM FROM {schema}.slot WHERE inbox = '{inbox}' ORDER BY slot FOR UPDATE;
    IF pg_catalog.to_regclass('{schema}.lanes_{inbox}') IS NOT NULL THEN
        LOCK TABLE {schema}.lanes_{inbox} IN ACCESS EXCLUSIVE MODE;
    END IF;
    LOCK TABLE {schema}.inbox_{inbox} IN ACCESS EXCLUSIVE MODE;
    LOCK TABLE ONLY {schema}.inbox IN ACCESS EXCLUSIVE MODE;
    PERFORM pg_catalog.set_config('lock_timeout', lock_timeout, true);
END $$
"""
)
IS_AWAITED = Sql("SELECT EXISTS (SELECT FROM {schema}.fan_out_way WHERE inbox = '{inbox}')", columns=("boolean",))
# Its messages: those that wait, and the parked ones.
COUNT = Sql(
    """
SELECT (SELECT count(*) FROM {schema}.inbox_{inbox}),
       (SELECT count(*) FROM {schema}.parked WHERE inbox = '{inbox}')
""",
    columns=("bigint", "bigint"),
)


def having_alone(schema: str, inbox: str) -> Operation[None]:
    """Take the dispatch lock and the inbox; its workers wake up once the transaction is committed.

    Raises `UnknownInbox`; `SchemaError` if the schema cannot be worked on; `ConfigurationError` unless the transaction
    is READ COMMITTED, which alone sees what was delivered last; and `MailroomError` if the inbox is in use.
    """
    yield IN_TRANSACTION
    yield from checking(schema)
    [(isolation,)] = yield ISOLATION.at()()
    if isolation != "read committed":
        raise ConfigurationError(
            f"This transaction is {isolation}, and may not see what was delivered last. Drop and rename inboxes in a "
            "transaction of READ COMMITTED.",
            code="MR-wrong-isolation",
        )
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
    yield from finding(schema, inbox)
    yield from seeing(schema, "inbox_registry", "fan_out_way", *HAVE_ROWS)
    try:
        yield EXCLUDE.at(schema=schema, inbox=inbox)()
    except Exception as error:
        if sqlstate(error) not in AGAIN:
            raise
        raise MailroomError(
            f"Inbox {inbox!r} is in use. Roll back, stop its workers and other readers, and try again. "
            "pg_locks shows who has a lock on its table.",
            code="MR-inbox-in-use",
        ) from error
    [(is_awaited,)] = yield IS_AWAITED.at(schema=schema, inbox=inbox)()
    if is_awaited:
        raise MailroomError(
            f"Messages are being delivered to many inboxes, and {inbox!r} has yet to get them. Try again in a moment, "
            "while a dispatcher runs (mailroom dispatcher run).",
            code="MR-delivery-unfinished",
        )
    yield NOTIFY.at(schema=schema, inbox=inbox)()  # and find that it is gone
