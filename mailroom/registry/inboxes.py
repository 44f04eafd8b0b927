"""Inboxes: each is a partition, an entry in the registry, and subscriptions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias, Unpack

from mailroom.errors import ConfigurationError, SchemaError
from mailroom.logs.readers import NOW, beginning, checked_since
from mailroom.order.expressions import BY_CLOCK, BY_SENT
from mailroom.order.total import joining
from mailroom.order.traits import TRAITS, OrderName, Traits, traits_of
from mailroom.registry.archive_days import making_days
from mailroom.registry.limits import limiting
from mailroom.registry.listing import listing
from mailroom.registry.log_topics import held_topics, setting_topics
from mailroom.registry.settings import (
    DEFAULTS,
    SETTINGS,
    InboxSettings,
    changed_settings,
    given_settings,
    held,
    with_backoff,
)
from mailroom.registry.subscriptions import SUBSCRIBE, Topics, subscriptions_text, topic_texts
from mailroom.schema.acts import INBOX_CREATE, INBOX_SET, INBOX_SUBSCRIBE
from mailroom.schema.audit import auditing, checked_actor, differences
from mailroom.schema.checks import checking, finding
from mailroom.schema.otherwise import check_same
from mailroom.sql import locks
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, filled
from mailroom.sql.sqlstate import NO_ROOM, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA, OWN, inbox_name, origin_name, schema_name

Order: TypeAlias = OrderName


@dataclass(frozen=True, slots=True)
class ReadsLog:
    """Which log an inbox is to read, from where on, and which topics of it: None if that is not said, none for all."""

    log: str
    since: str | datetime
    topics: list[str] | None


def creation(
    name: str | Iterable[str],
    subscribe: Topics = (),
    *,
    schema: str = DEFAULT_SCHEMA,
    origin: str = OWN,
    order: Order | None = None,
    log: str | None = None,
    since: str | datetime = NOW,
    topics: Topics = (),
    actor: str | None = None,
    why: str | None = None,
    **settings: Unpack[InboxSettings],
) -> Operation[None]:
    """Create an inbox with its subscriptions. One that exists stays as it is, and gets the subscriptions that it lacks.

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
    waits for any more (`Requests`). By default, and with 0, it drops none.

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

    With `log` it reads the log of that name (`create_log`) instead of getting messages of its own: all that the log
    gets after the commit, or from `since` on, which is `now`, `start` (the oldest message that the log has) or a
    datetime with a time zone, compared with the time of delivery. Keys are in order, and fail and are parked one by
    one, as by key. Such an inbox has no subscriptions, no `expire_s` and no `keep_reaped_days`. With
    `topics`, topics and patterns as a subscription has them, it reads those only, and passes over all others.

    Users' own migrations may call it, and programs that start: what changes something is written to the table `audit`,
    with `actor` (user@host of this process) and `why`. Everything happens in the caller's transaction. A concurrent
    delivery goes on; if it was planned before the partition existed, it fails once and is tried again.

    Raises `InvalidName`; `ConfigurationError` for a setting outside its bounds, for other settings than an inbox has
    that exists, which `set_inbox` changes, and for another `order`; `InvalidMessage` for a topic, `actor` or `why`; and
    `SchemaError` if something else in the schema has the name of a partition, `inbox_<name>`, or if the server has no
    room for the locks. Then nothing has changed.
    """
    subscribed = topic_texts(subscribe)
    wanted = held_topics(topic_texts(topics)) if topics else None
    given = given_settings(settings)
    if order not in (None, "log" if log else None, "key", "total") or (log and order in ("key", "total")):
        raise ConfigurationError(
            f"order is {order!r}; give 'key' or 'total', or a log to read, which has an order of its own.",
            code="MR-invalid-argument",
        )
    read = None if log is None else ReadsLog(inbox_name(log), checked_since(since), wanted)
    if read is None and (since != NOW or topics):
        raise ConfigurationError("since and topics go with a log: give it too.", code="MR-invalid-argument")
    if read is not None and subscribed:
        raise ConfigurationError(
            f"An inbox of a log gets what the log gets: subscribe the log (mailroom log set {log} --subscribe TOPIC).",
            code="MR-log-inbox-subscribes",
        )
    by = checked_actor(actor, why)
    # A text is a name: taken as an iterable, it would be a name per letter.
    several = [name] if isinstance(name, str) or not isinstance(name, Iterable) else name
    names = list(dict.fromkeys(inbox_name(each) for each in several))
    return _creating(
        schema_name(schema), names, subscribed, origin_name(origin), "log" if log else order, read, given, by, why
    )


def setting(
    name: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    topics: Topics = (),
    actor: str | None = None,
    why: str | None = None,
    **settings: Unpack[InboxSettings],
) -> Operation[str]:
    """Change settings of an inbox; return what is different now, such as `rate 5 -> 10`, or an empty text.

    They are those of `create_inbox`. Those that are not given stay, but a `burst` goes with its `rate`; 0 ends an
    expiry, an archive, a rate, a concurrency and a breaker, and `""` ends `breaker_by`. They hold for batches that are
    claimed after the commit. What has changed is written to the table `audit`, with `actor` (user@host of this process)
    and `why`. In the caller's transaction.

    `topics` are those that an inbox of a log reads from then on, in place of those that it had; `"#"` means all. What
    it has passed over does not come back, unless it is set back (`Inbox.rewind`).

    Raises `UnknownInbox`, `ConfigurationError` for a setting outside its bounds or one that an inbox in total order
    cannot have, and `InvalidMessage` for a wrong `actor` or `why`.
    """
    wanted = held_topics(topic_texts(topics)) if topics else None
    given = given_settings(settings)
    return _setting(schema_name(schema), inbox_name(name), given, wanted, checked_actor(actor, why), why)


create_inbox, create_inbox_async = on_connections("create_inbox", creation)
set_inbox, set_inbox_async = on_connections("set_inbox", setting)


# Find what has the partitions' names: tables, and types, since each table has a type of its name; and logs of the
# names. In a statement of its own after the lock, so that it sees what another session has just created.
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
UNION ALL
SELECT name, NULL FROM {schema}.log_registry WHERE name = ANY (%(names)s::text[])
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
REGISTERED = {name: each for name, each in SETTINGS.items() if each.column.startswith("r.")}
REGISTER = Sql(
    """
INSERT INTO {schema}.inbox_registry (name, "order", log, {fields})
SELECT pg_catalog.unnest(%(names)s::text[]), %(order)s::text, %(log)s::text, {values}
""",
    fields=", ".join(REGISTERED),
    values=", ".join(f"%({name})s::{each.type}" for name, each in REGISTERED.items()),
)
CHANGE = Sql(
    "UPDATE {schema}.inbox_registry SET {values} WHERE name = '{inbox}'",
    values=", ".join(f"{name} = %({name})s::{each.type}" for name, each in REGISTERED.items()),
)
HOLD = Sql("SELECT FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE")
# Also migrations take it.
SCHEMA_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))


def _creating(
    schema: str, names: list[str], topics: list[str], origin: str, order: Order | None,
    read: ReadsLog | None, given: dict[str, Any], actor: str, why: str | None,
) -> Operation[None]:  # fmt: skip
    yield IN_TRANSACTION
    yield from checking(schema)
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
    partitions = yield from _finding_partitions(schema, names)
    there = {each["name"]: each for each in (yield from listing(schema, names))}
    new = [name for name in names if name not in there]
    orders = {name: traits_of(there[name]["order"] if name in there else order) for name in names}
    for name, traits in orders.items():
        _check_allowed(name, traits, given)
    for inbox in there.values():
        _check_same(inbox, order, read, given)
    for traits in TRAITS.values():
        of_it = [name for name in names if orders[name] is traits and name not in partitions]
        yield from _making_partitions(schema, of_it, traits)
    settings = DEFAULTS | held(with_backoff(given))
    yield REGISTER.at(schema=schema)(
        names=new, order=traits_of(order).name, log=read and read.log, **{name: settings[name] for name in REGISTERED}
    )
    if read is not None and new:
        yield from beginning(schema, new, read.log, read.since)
        for name in new if read.topics else ():
            yield from setting_topics(schema, name, read.topics or [])
    if given.get("keep_reaped_days"):
        yield from making_days(schema)
    yield from limiting(schema, new, given)
    since = []
    for name in names:
        since.append(0 if origin == OWN else (yield from joining(schema, name, origin)))
    added = {
        name
        for name, _ in (yield SUBSCRIBE.at(schema=schema)(inboxes=names, since=since, topics=topics, origin=origin))
    }
    told = subscriptions_text(topics, origin)
    made = [
        f"order {traits_of(order).name}",
        *([f"reads log {read.log} since {read.since}"] if read else []),
        *([f"topics {' '.join(read.topics)}"] if read and read.topics else []),
        changed_settings(DEFAULTS, settings),
        *([f"subscribed to {told}"] if topics else []),
    ]
    change = ", ".join(filter(None, made))
    yield from auditing(schema, INBOX_CREATE, [(name, None, 0) for name in new], actor, why, change)
    known = [(name, None, 0) for name in names if name in added and name in there]
    yield from auditing(schema, INBOX_SUBSCRIBE, known, actor, why, told)


def _setting(
    schema: str, name: str, given: dict[str, Any], topics: list[str] | None, actor: str, why: str | None
) -> Operation[str]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from finding(schema, name)
    yield HOLD.at(schema=schema, inbox=name)()
    [before] = yield from listing(schema, [name])
    _check_allowed(name, traits_of(before["order"]), given)
    if topics is not None:
        if not traits_of(before["order"]).reads_log:
            raise ConfigurationError(
                f"Inbox {name!r} reads no log. It gets the topics that it subscribes to (mailroom inbox subscribe).",
                code="MR-inbox-reads-no-log",
            )
        yield from setting_topics(schema, name, topics)
    settings = before | held(with_backoff(given, before))
    yield CHANGE.at(schema=schema, inbox=name)(**{each: settings[each] for each in REGISTERED})
    if given.get("keep_reaped_days"):
        yield from making_days(schema)
    yield from limiting(schema, [name], given)
    [after] = yield from listing(schema, [name])
    of_topics = {} if topics is None else {"topics": after["topics"]}
    told = ", ".join(filter(None, (changed_settings(before, after), differences(before, of_topics))))
    if told:
        yield from auditing(schema, INBOX_SET, [(name, None, 0)], actor, why, told)
    return told


def _finding_partitions(schema: str, names: list[str]) -> Operation[set[str]]:
    """Return which of these inboxes have a table; raise `SchemaError` if something else has the name of one."""
    found = yield FIND.at(schema=schema)(names=names)
    for name, is_inbox in found:
        if is_inbox is None:
            raise SchemaError(
                f"There is a log {name!r}: give the inbox another name, such as the name of what reads it "
                f"(mailroom inbox create NAME --log {name}).",
                code="MR-inbox-name-is-a-log",
            )
        if not is_inbox:
            raise SchemaError(
                f"Inbox {name!r} cannot be created: its table would be {schema}.inbox_{name}, and something else has "
                "that name. Choose another name for the inbox, or rename what is there.",
                code="MR-inbox-table-taken",
            )
    return {name for name, _ in found}


def _check_same(inbox: Mapping[str, Any], order: Order | None, read: ReadsLog | None, given: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if an inbox that exists has another order, log or setting than is given."""
    name = inbox["name"]
    if read is not None and inbox["log"] not in (None, read.log):
        raise ConfigurationError(
            f"Inbox {name!r} exists, and reads log {inbox['log']!r}. An inbox reads the log it was created with.",
            code="MR-inbox-order-fixed",
        )
    if order not in (None, inbox["order"]):
        raise ConfigurationError(
            f"Inbox {name!r} exists, and its order is {inbox['order']}. An inbox has the order it was created with: "
            "create another one, and have consumers empty this one first.",
            code="MR-inbox-order-fixed",
        )
    asked = held(given)
    same = {each: asked[each] for each in SETTINGS if each in asked}
    if read is not None and read.topics is not None:
        same["topics"] = read.topics
    check_same(
        f"Inbox {name!r}", inbox, same,
        f"mailroom inbox set {name}, or set_inbox", "MR-inbox-set-otherwise",
    )  # fmt: skip


def _check_allowed(name: str, traits: Traits, given: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for what an inbox of this order cannot have."""
    if traits.reads_log:
        _check_allowed_of_log(name, given)
    elif given.get("expire_s") and not traits.drops:
        raise ConfigurationError(
            f"Inbox {name!r} has {traits.name} order, and expire_s would drop messages that other nodes give out. "
            "Leave it out.",
            code="MR-total-order-keeps-all",
        )
    elif given.get("breaker_by") and not traits.parks_one:
        raise ConfigurationError(
            f"Inbox {name!r} has {traits.name} order, so keys cannot wait by their prefix. Leave breaker_by out, for a "
            "breaker of the whole inbox.",
            code="MR-total-order-has-no-keys",
        )


REFUSED_OF_LOG = {
    "expire_s": "the log keeps its messages for its own time (mailroom log set --keep-days)",
    "keep_reaped_days": "the log is an archive: what was read stands there until its time",
}


def _check_allowed_of_log(name: str, given: Mapping[str, Any]) -> None:
    for setting, why in REFUSED_OF_LOG.items():
        if given.get(setting):
            raise ConfigurationError(
                f"Inbox {name!r} reads a log, so it cannot have {setting}: {why}.", code="MR-log-inbox-setting"
            )


def _making_partitions(schema: str, names: list[str], traits: Traits) -> Operation[None]:
    by_order = filled(BY_ORDER, schema=f'"{schema}"') if traits.is_bounded else ""
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
