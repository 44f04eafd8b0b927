"""Inboxes: each is a partition, an entry in the registry, and subscriptions."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from mailroom import locks
from mailroom.errors import ConfigurationError, SchemaError
from mailroom.names import DEFAULT_SCHEMA, OWN, inbox_name, origin_name, schema_name
from mailroom.numbers import TEN_YEARS_S, count, seconds
from mailroom.order.total import joining
from mailroom.registry.archive_days import checked_days, making_days
from mailroom.registry.limits import InboxLimits, limiting
from mailroom.registry.subscriptions import SUBSCRIBE, Topics, topic_texts
from mailroom.schema.checks import checking
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, filled
from mailroom.sql.sqlstate import NO_ROOM, sqlstate

Order: TypeAlias = Literal["key", "total"]


def creation(
    name: str | Iterable[str],
    subscribe: Topics = (),
    *,
    schema: str = DEFAULT_SCHEMA,
    backoff_s: float | None = None,
    backoff_max_s: float | None = None,
    max_attempts: int | None = None,
    on_failure: Literal["park", "skip"] | None = None,
    expire_s: float | None = None,
    keep_reaped_days: int | None = None,
    rate: float | None = None,
    burst: int | None = None,
    concurrency: int | None = None,
    breaker: int | None = None,
    breaker_by: str | None = None,
    origin: str = OWN,
    order: Order | None = None,
) -> Operation[None]:
    """Create an inbox with its subscriptions. An existing inbox stays; settings that are given replace its own.

    `name` may be several names: each of these inboxes gets the subscriptions and settings. One call for all takes less
    time than one for each, and until the transaction ends an inbox takes about six of the server's locks: where there
    are more than a few hundred, create some per transaction.

    A failing key waits `backoff_s` seconds (1), and twice as long after each further failure, up to `backoff_max_s`
    (3600). If only one of the two is given, the other is adjusted to it. After `max_attempts` failed attempts (16, at
    least 1) `on_failure` (park) decides: `park` parks the key, which holds its later messages too; `skip` moves only
    that message to `dead_letter`. By default the attempts are spread over about three hours, long enough for most
    outages of a service that the handler calls. `subscribe` holds topics and patterns, and `origin` says whose
    messages, as for `subscribe`. With `expire_s` the janitor drops messages that wait there for more seconds than that,
    but none that a transaction holds, and none of parked keys, which count anew from a replay: for replies that nobody
    waits for any more (`Requests`). By default it drops none.

    With `keep_reaped_days` (1 to 366) what is reaped is kept in an archive for that many whole days, to be found and
    replayed (`inbox.Archive`); 0 ends that, and what is kept stays until its day. By default nothing is kept.
    Limits hold for all workers of the inbox together, and not for claims by hand (`reap`, `reap_any`, Spark). By
    default there are none, and 0 ends one. `rate` is how many messages per second they may claim (up to 1,000,000), and
    `burst` how many at once after a quiet time (`rate`, but at least 1); it is given with a rate. `concurrency` is how
    many batches they may have in hand (up to 10,000), which is how many handlers run at once. `breaker` is a
    percentage: once that share of a worker's attempts has failed, of at least 20 within a minute, no worker claims
    anything, except one message at a time to see whether it succeeds. With `breaker_by`, one character such as "/", the
    breaker is one for each prefix of a key, which is what stands before the first such character, or the whole key:
    only the keys of a prefix whose attempts fail wait. It is given with a breaker, and "" ends it.

    `order` (key) is chosen when the inbox is created. With `total` there is one queue instead of one per key: all
    messages are reaped by their sent_clock, one transaction at a time, and a failing one holds up the whole inbox. Such
    an inbox takes no `expire_s` and no `breaker_by`.

    Users' own migrations may call it: everything happens in the caller's transaction. A concurrent delivery goes on; if
    it was planned before the partition existed, it fails once and is tried again. Raises `InvalidName`,
    `InvalidMessage` for a `max_attempts` below 1 and a `keep_reaped_days` above 366, `ConfigurationError` for another
    `on_failure`, a `expire_s` that is not above 0, a wrong limit and another `order` than the inbox has, and
    `SchemaError` if something else in the schema has the name of a partition, `inbox_<name>`; then nothing has changed.
    It also raises `SchemaError` if the server has no room for the locks.
    """
    topics = topic_texts(subscribe)
    if max_attempts is not None:
        count(max_attempts, "max_attempts")
    if on_failure not in (None, "park", "skip"):
        raise ConfigurationError(f"on_failure is {on_failure!r}; give 'park' or 'skip'.", code="MR-invalid-argument")
    if expire_s is not None:
        seconds(expire_s, "expire_s", TEN_YEARS_S)
    limits = InboxLimits(rate, burst, concurrency, breaker, breaker_by)
    if order not in (None, "key", "total"):
        raise ConfigurationError(f"order is {order!r}; give 'key' or 'total'.", code="MR-invalid-argument")
    days = checked_days(keep_reaped_days)
    # A text is a name: taken as an iterable, it would be a name per letter.
    several = [name] if isinstance(name, str) or not isinstance(name, Iterable) else name
    names = [inbox_name(each) for each in several]
    return _creating(
        schema_name(schema), list(dict.fromkeys(names)), topics, backoff_s, backoff_max_s, max_attempts, on_failure,
        expire_s, days, limits, origin_name(origin), order,
    )  # fmt: skip


create_inbox, create_inbox_async = on_connections("create_inbox", creation)


# The index on this expression finds the oldest messages of an inbox; the primary key (key, clock) finds those of a key.
# An index on the plain column could be used for both. While an inbox is small, the planner would choose it to find a
# key, and that cached plan would later scan the whole inbox. Seen on PostgreSQL 15 and 18.
# D-reap-6: Each claim pins its plan.
BY_CLOCK = "(clock + 0)"
# Total inboxes have a second index, on this and the origin: the order in which they are reaped. Clocks rise with it for
# the messages of one origin only.
BY_SENT = "(sent_clock + 0)"

# Find what has the partitions' names: tables, and types, since each table has a type of its name. In a statement of its
# own after the lock, so that it sees what another session has just created.
FIND = Sql(
    """
WITH parent AS (SELECT oid, relnamespace FROM pg_catalog.pg_class WHERE oid = '{schema}.inbox'::regclass::oid),
given AS (SELECT name, 'inbox_' || name AS partition FROM pg_catalog.unnest(%(names)s::text[]) AS name)
SELECT g.name, EXISTS (SELECT FROM pg_catalog.pg_inherits AS i
                       WHERE i.inhrelid = c.oid AND i.inhparent = p.oid AND NOT i.inhdetachpending
                         AND pg_catalog.pg_get_expr(c.relpartbound, c.oid) = 'FOR VALUES IN (''' || g.name || ''')')
FROM parent AS p CROSS JOIN given AS g
JOIN pg_catalog.pg_class AS c ON c.relnamespace = p.relnamespace AND c.relname = g.partition::name
UNION ALL
SELECT g.name, false
FROM parent AS p CROSS JOIN given AS g
JOIN pg_catalog.pg_type AS t ON t.typnamespace = p.relnamespace AND t.typname = g.partition::name
WHERE t.typrelid = 0::oid
""",
    columns=("text", "boolean"),
)
# All statements in one trip, since the server does each in about a millisecond. Not PARTITION OF, which waits for
# every open delivery; ATTACH does not. The names of the indexes do not begin with inbox_, since they could be names of
# partitions: an inbox may be called wall_pkey. The names are quoted in the array, since one may be null. A
# partition always belongs to the owner of the others: of one that belonged to a member of that role, or to a
# superuser, the owner could neither grant nor rename nor migrate anything.
PARTITIONS = Sql(
    """
DO $$
DECLARE
    inbox text;
    owner CONSTANT pg_catalog.name := (SELECT pg_catalog.pg_get_userbyid(relowner) FROM pg_catalog.pg_class
                                       WHERE oid = '{schema}.inbox'::regclass::oid);
    lock_timeout text := pg_catalog.current_setting('lock_timeout');
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '3s', true);
    FOREACH inbox IN ARRAY '{{inboxes}}'::text[] LOOP
        EXECUTE pg_catalog.format(
            'CREATE TABLE {schema}.inbox_%%s (LIKE {schema}.inbox INCLUDING DEFAULTS INCLUDING COMMENTS)', inbox);
        EXECUTE pg_catalog.format(
            'ALTER TABLE {schema}.inbox_%%1$s ADD CONSTRAINT key_of_%%1$s PRIMARY KEY (key, clock), SET ('
            'autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, '
            'autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, '
            'autovacuum_vacuum_insert_threshold = 100000, autovacuum_analyze_scale_factor = 0, '
            'autovacuum_analyze_threshold = 50000)', inbox);
        EXECUTE pg_catalog.format(
            'CREATE INDEX clock_of_%%1$s ON {schema}.inbox_%%1$s ({by_clock})', inbox);{by_order}
        IF owner <> current_user THEN
            EXECUTE pg_catalog.format('ALTER TABLE {schema}.inbox_%%s OWNER TO %%I', inbox, owner);
        END IF;
        EXECUTE pg_catalog.format(
            'ALTER TABLE {schema}.inbox ATTACH PARTITION {schema}.inbox_%%1$s FOR VALUES IN (%%1$L)', inbox);
    END LOOP;
    PERFORM pg_catalog.set_config('lock_timeout', lock_timeout, true);
END $$
""",
    by_clock=BY_CLOCK,
)
BY_ORDER = f"""
        EXECUTE pg_catalog.format(
            'CREATE INDEX order_of_%%1$s ON {{schema}}.inbox_%%1$s ({BY_SENT}, origin)', inbox);"""
# Attaching takes as much longer as there are inboxes, 0.1 s with 10,000: the caller may have a statement_timeout.
AT_ONCE = 20
REGISTER = Sql(
    """
INSERT INTO {schema}.inbox_registry AS r (name, backoff_s, backoff_max_s, max_attempts, on_failure, expire_s,
                                          keep_reaped_days, "order")
SELECT pg_catalog.unnest(%(names)s::text[]),
       coalesce(%(backoff_s)s::float8, least(1, %(backoff_max_s)s::float8)),
       coalesce(%(backoff_max_s)s::float8, greatest(3600, %(backoff_s)s::float8)),
       coalesce(%(max_attempts)s::bigint, 16), coalesce(%(on_failure)s::text, 'park'), %(expire_s)s::float8,
       nullif(%(keep_reaped_days)s::bigint, 0), coalesce(%(order)s::text, 'key')
ON CONFLICT (name) DO UPDATE SET
    backoff_s = coalesce(%(backoff_s)s::float8, least(r.backoff_s, %(backoff_max_s)s::float8)),
    backoff_max_s = coalesce(%(backoff_max_s)s::float8, greatest(r.backoff_max_s, %(backoff_s)s::float8)),
    max_attempts = coalesce(%(max_attempts)s::bigint, r.max_attempts),
    on_failure = coalesce(%(on_failure)s::text, r.on_failure),
    expire_s = coalesce(%(expire_s)s::float8, r.expire_s),
    keep_reaped_days = nullif(coalesce(%(keep_reaped_days)s::bigint, r.keep_reaped_days), 0)
"""
)
# Also migrations take it.
SCHEMA_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
ORDERS = Sql(
    """
SELECT g.name, coalesce(r."order", 'key')
FROM pg_catalog.unnest(%(names)s::text[]) AS g (name) LEFT JOIN {schema}.inbox_registry AS r ON r.name = g.name
""",
    columns=("text", "text"),
)


def _creating(
    schema: str, names: list[str], topics: list[str], backoff_s: float | None, backoff_max_s: float | None,
    max_attempts: int | None, on_failure: str | None, expire_s: float | None, keep_reaped_days: int | None,
    limits: InboxLimits, origin: str,
    order: str | None,
) -> Operation[None]:  # fmt: skip
    yield IN_TRANSACTION
    yield from checking(schema)
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
    found = {}
    for name, is_inbox in (yield FIND.at(schema=schema)(names=names)):
        if not is_inbox:
            raise SchemaError(
                f"Inbox {name!r} cannot be created: its table would be {schema}.inbox_{name}, and something else has "
                "that name. Choose another name for the inbox, or rename what is there.",
                code="MR-inbox-table-taken",
            )
        found[name] = order
    if found:
        for name, existing in (yield ORDERS.at(schema=schema)(names=list(found))):
            if order not in (None, existing):
                raise ConfigurationError(
                    f"Inbox {name!r} exists, and its order is {existing}. An inbox has the order it was created with: "
                    "create another one, and have consumers empty this one first.",
                    code="MR-inbox-order-fixed",
                )
            found[name] = existing
    if expire_s is not None:
        for name in names:
            if found.get(name, order) == "total":
                raise ConfigurationError(
                    f"Inbox {name!r} has total order, and expire_s would drop messages that other nodes give out. "
                    "Leave it out.",
                    code="MR-total-order-keeps-all",
                )
    if limits.breaker_by:
        for name in names:
            if found.get(name, order) == "total":
                raise ConfigurationError(
                    f"Inbox {name!r} has total order, so keys cannot wait by their prefix. Leave breaker_by out, for a "
                    "breaker of the whole inbox.",
                    code="MR-total-order-has-no-keys",
                )
    yield from _making_partitions(schema, [name for name in names if name not in found], order)
    yield REGISTER.at(schema=schema)(
        names=names,
        backoff_s=backoff_s,
        backoff_max_s=backoff_max_s,
        max_attempts=max_attempts,
        on_failure=on_failure,
        expire_s=expire_s,
        keep_reaped_days=keep_reaped_days,
        order=order,
    )
    if keep_reaped_days:
        yield from making_days(schema)
    yield from limiting(schema, names, limits)
    since = []
    for name in names:
        since.append(0 if origin == OWN else (yield from joining(schema, name, origin)))
    yield SUBSCRIBE.at(schema=schema)(inboxes=names, since=since, topics=topics, origin=origin)


def _making_partitions(schema: str, names: list[str], order: str | None) -> Operation[None]:
    by_order = filled(BY_ORDER, schema=f'"{schema}"') if order == "total" else ""
    for first in range(0, len(names), AT_ONCE):
        inboxes = ",".join(f'"{name}"' for name in names[first : first + AT_ONCE])
        try:
            yield PARTITIONS.at(schema=schema, inboxes=inboxes, by_order=by_order)()
        except Exception as error:
            if sqlstate(error) != NO_ROOM:
                raise
            raise SchemaError(
                f"The server has no room for the locks of {len(names)} new inboxes in one transaction. Roll back, and "
                "create fewer per transaction, or raise max_locks_per_transaction.",
                code="MR-too-many-locks",
            ) from error
