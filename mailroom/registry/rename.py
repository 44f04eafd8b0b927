"""Give an inbox another name, with all that it holds."""

from mailroom.errors import SchemaError
from mailroom.logs.readers import renaming_reader
from mailroom.order.traits import reading_traits
from mailroom.registry.exclusive import COUNT, HAVE_ROWS, having_alone
from mailroom.registry.inboxes import FIND
from mailroom.registry.subscriptions import SUBSCRIBE
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, OWN, inbox_name, schema_name


def renaming(
    name: str, new: str, *, actor: str, why: str | None = None, schema: str = DEFAULT_SCHEMA
) -> Operation[int]:
    """Give an inbox another name, and return how many messages it holds.

    It keeps its messages, subscriptions and settings, and its failures, parked keys and dead letters. Nothing is lost
    on the way: the inbox subscribes to its old name as a topic. So it still gets what was or is sent to that name, and
    replies to commands that name it in `reply_to`. `unsubscribe` ends that, once nothing is sent there and before
    another inbox gets the name. One that reads a log goes on there, and gets nothing by its name. `actor` says who acts
    and `why` gives the reason; both are written to the table `audit`, whose earlier entries keep the old name.

    In the caller's transaction, which has the node's dispatch lock until it ends: nothing is delivered meanwhile, so
    commit soon. It rewrites each message: ten seconds or more for a million. Stop the inbox's workers first: it waits 3
    s for their batches. Workers that still run end with `UnknownInbox` once it is committed; start them with the new
    name. Roles keep their privileges on the inbox.

    Raises `UnknownInbox`; `SchemaError` if there is something of the new name, or if Spark has drained or streamed the
    inbox, whose files and checkpoints name it; `MailroomError` if the inbox is in use; `ConfigurationError` unless the
    transaction is READ COMMITTED, which alone sees what was delivered last; and `InvalidMessage` for a wrong `actor` or
    `why`.
    """
    check_actor(actor, why)
    return _renaming(schema_name(schema), inbox_name(name), inbox_name(new), actor, why)


rename_inbox, rename_inbox_async = on_connections("rename_inbox", renaming)


# An inbox that was removed step by step may have left rows too, which would become those of the renamed one.
LEFT = Sql(
    " UNION ALL ".join(
        f"SELECT '{table}' WHERE EXISTS (SELECT FROM {{schema}}.{table} WHERE {name} = '{{inbox}}')"
        for table, name in (("inbox_registry", "name"), *((table, "inbox") for table in (*HAVE_ROWS, "spark_drain")))
    ),
    columns=("text",),
)
OF_SPARK = Sql(
    "SELECT EXISTS (SELECT FROM {schema}.spark_drain WHERE inbox = '{inbox}') "
    "OR EXISTS (SELECT FROM {schema}.spark_stream WHERE inbox = '{inbox}')",
    columns=("boolean",),
)
# A partition's rows name their inbox, so they are rewritten while it is detached. Its index by order is there in total
# inboxes only.
PARTITION = Sql(
    """
DO $$
BEGIN
    ALTER TABLE {schema}.inbox DETACH PARTITION {schema}.inbox_{inbox};
    UPDATE {schema}.inbox_{inbox} SET inbox = '{new}';
    ALTER TABLE {schema}.inbox_{inbox} RENAME TO inbox_{new};
    ALTER INDEX {schema}.key_of_{inbox} RENAME TO key_of_{new};
    ALTER INDEX {schema}.clock_of_{inbox} RENAME TO clock_of_{new};
    IF pg_catalog.to_regclass('{schema}.order_of_{inbox}') IS NOT NULL THEN
        ALTER INDEX {schema}.order_of_{inbox} RENAME TO order_of_{new};
    END IF;
    ALTER TABLE {schema}.inbox ATTACH PARTITION {schema}.inbox_{new} FOR VALUES IN ('{new}');
END $$
"""
)
LIST = Sql("UPDATE {schema}.inbox_registry SET name = '{new}' WHERE name = '{inbox}'")
TAKE_ALONG = Sql("UPDATE {schema}.{table} SET inbox = '{new}' WHERE inbox = '{inbox}'")


def _renaming(schema: str, inbox: str, new: str, actor: str, why: str | None) -> Operation[int]:
    names = {"schema": schema, "inbox": inbox, "new": new}
    yield from having_alone(schema, inbox)
    if (yield FIND.at(schema=schema)(names=[new])):
        raise SchemaError(
            f"There is something of the name {schema}.inbox_{new}. Choose another name for the inbox.",
            code="MR-inbox-table-taken",
        )
    if left := [table for (table,) in (yield LEFT.at(schema=schema, inbox=new)())]:
        raise SchemaError(
            f"Something is left of another inbox {new!r}, in {', '.join(left)}. Choose another name, or create that "
            "inbox and drop it (mailroom inbox create, mailroom inbox drop).",
            code="MR-inbox-left-behind",
        )
    [(is_of_spark,)] = yield OF_SPARK.at(schema=schema, inbox=inbox)()
    if is_of_spark:
        raise SchemaError(
            f"Spark has read inbox {inbox!r}, and its files or checkpoints name it. Create another inbox with the same "
            "subscriptions, and drop this one once it is empty (mailroom inbox create, mailroom inbox drop).",
            code="MR-inbox-read-by-spark",
        )
    [(waiting, parked)] = yield COUNT.at(schema=schema, inbox=inbox)()
    reads_log = (yield from reading_traits(schema, inbox)).reads_log
    yield PARTITION.at(**names)()
    if reads_log:
        yield from renaming_reader(schema, inbox, new)
    yield LIST.at(**names)()
    for table in (*HAVE_ROWS, "dead_letter", "reaped"):
        yield TAKE_ALONG.at(table=table, **names)()
    if not reads_log:
        yield SUBSCRIBE.at(schema=schema)(inboxes=[new], since=[0], topics=[inbox], origin=OWN)
    yield from auditing(schema, acts.INBOX_RENAME, [(inbox, None, waiting + parked)], actor, why, f"{inbox} -> {new}")
    return int(waiting + parked)
