"""Drop an inbox with everything that belongs to it."""

from mailroom.errors import SchemaError
from mailroom.logs.readers import removing
from mailroom.message.answer import ASKS, Undone, answering_undone
from mailroom.order.traits import reading_traits
from mailroom.registry.exclusive import COUNT, HAVE_ROWS, having_alone
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, inbox_name, schema_name


def dropping(
    name: str, *, actor: str, discard: bool = False, why: str | None = None, schema: str = DEFAULT_SCHEMA
) -> Operation[int]:
    """Drop an inbox, its subscriptions and all other records about it; return how many messages were deleted.

    Refuses while messages are in it or parked, unless `discard` says to delete them for good; commands among them that
    ask for a reply get one of status 500. What still waits in the outbox is routed by the remaining subscriptions, and
    goes to `dead_letter` if no inbox gets it. Its dead letters stay. `actor` says who acts and `why` gives the reason;
    both are written to the table `audit`.

    In the caller's transaction, which has the node's dispatch lock until it ends: nothing is delivered meanwhile, so
    commit soon. Stop the inbox's workers first: it waits 3 s for their batches. Workers that still run end with
    `UnknownInbox` once it is committed.

    Raises `UnknownInbox`; `SchemaError` while messages are there; `MailroomError` if the inbox is in use;
    `ConfigurationError` unless the transaction is READ COMMITTED, which alone sees what was delivered last; and
    `InvalidMessage` for a wrong `actor` or `why`.
    """
    check_actor(actor, why)
    return _dropping(schema_name(schema), inbox_name(name), actor, discard, why)


drop_inbox, drop_inbox_async = on_connections("drop_inbox", dropping)


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
FORGET = Sql("DELETE FROM {schema}.{table} WHERE inbox = '{inbox}'")
UNLIST = Sql("DELETE FROM {schema}.inbox_registry WHERE name = '{inbox}'")
DROP = Sql("DROP TABLE {schema}.inbox_{inbox}")


def _dropping(schema: str, inbox: str, actor: str, discard: bool, why: str | None) -> Operation[int]:
    names = {"schema": schema, "inbox": inbox}
    yield from having_alone(schema, inbox)
    [(waiting, parked)] = yield COUNT.at(**names)()
    if waiting + parked and not discard:
        raise SchemaError(
            f"Inbox {inbox!r} holds {waiting + parked:,} messages, {parked:,} of them parked. Have them handled first, "
            "or delete them for good: discard=True (--discard).",
            code="MR-inbox-holds-messages",
        )
    yield from answering_undone(schema, [Undone.of(*row) for row in (yield COMMANDS.at(**names)())])
    # Its dead letters stay, and so does `spark_drain`: the files of its drains are still there, and an inbox of that
    # name goes on after their numbers.
    for table in HAVE_ROWS:
        yield FORGET.at(table=table, **names)()
    if (yield from reading_traits(schema, inbox)).reads_log:
        yield from removing(schema, inbox)
    yield UNLIST.at(**names)()
    yield DROP.at(**names)()
    yield from auditing(schema, acts.INBOX_DROP, [(inbox, None, waiting + parked)], actor, why)
    return int(waiting + parked)
