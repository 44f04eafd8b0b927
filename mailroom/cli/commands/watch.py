"""`mailroom watch` and `mailroom unwatch`."""

from collections.abc import Sequence

import click

from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, print_listing, say, working
from mailroom.cli.parameters import TEXT, TOPIC
from mailroom.errors import MailroomError
from mailroom.schema import watching


@click.command()
@click.argument("table_name", metavar="[SCHEMA.TABLE]", type=TEXT, required=False)
@click.option("--topic", type=TOPIC, help="Send to TOPIC.created, .updated, .deleted and .truncated.")
@click.option("--key-prefix", metavar="TEXT", type=TEXT, default="", help="Text before the primary key in keys.")
@click.option("--without", metavar="COLUMN", type=TEXT, multiple=True, help="Leave this column out; may be repeated.")
@click.option("--list", "is_list", is_flag=True, help="List the watched tables.")
@answering
@pass_call
def watch(
    call: Call, table_name: str | None, topic: str | None, key_prefix: str, without: Sequence[str], is_list: bool,
    actor: str, why: str | None,
) -> None:  # fmt: skip
    """Send a message for each row of a table that is inserted, updated or deleted.

    Triggers send it, in the transaction that changes the row. If the table is watched already, these settings replace
    the earlier ones. Names of tables and columns are case-sensitive.

    \b
    Examples:
      mailroom watch public.customers --topic customer --without password
      mailroom watch public.lines --topic order.line --key-prefix line-
      mailroom watch --list
      mailroom unwatch public.customers
    """
    if is_list:
        if table_name or topic or key_prefix or without:
            raise click.UsageError("--list takes no table and no other option.")
        _list(call)
        return
    if table_name is None or topic is None:
        raise click.UsageError("Give a table and --topic, or --list.")
    with working("waiting for the table"), call.connection("watch") as connection:
        watching.watch(
            connection, table_name, topic, key_prefix=key_prefix, without=without, schema=call.schema, actor=actor,
            why=why,
        )  # fmt: skip
    if call.json:
        document({"table": table_name, "topic": topic, "key_prefix": key_prefix, "without": without})
    else:
        say(f"Table {table_name} is watched: its messages go to {topic}.created, .updated, .deleted and .truncated.")


def _list(call: Call) -> None:
    with call.looking("watch list") as connection:
        found = watching.watched(connection, schema=call.schema)
    print_listing(
        found,
        ("table", "topic", "key prefix", "without"),
        lambda each: (each.table, each.topic, each.key_prefix or None, ", ".join(each.without) or None),
        none="No table is watched: mailroom watch SCHEMA.TABLE --topic TOPIC",
        json=call.json,
    )
    for each in found:
        if each.fault is not None and not call.json:
            note(f"Not all changes of {each.table} are told. {each.fault}")


@click.command()
@click.argument("table_name", metavar="SCHEMA.TABLE", type=TEXT)
@answering
@pass_call
def unwatch(call: Call, table_name: str, actor: str, why: str | None) -> None:
    """Stop sending messages about a table. What was sent stays.

    \b
    Examples:
      mailroom unwatch public.customers
      mailroom unwatch public.customers --json
    """
    with working("waiting for the table"), call.connection("unwatch") as connection:
        if not watching.unwatch(connection, table_name, schema=call.schema, actor=actor, why=why):
            raise MailroomError(
                f"Table {table_name} is not watched. See: mailroom watch --list", code="MR-table-not-watched"
            )
    if call.json:
        document({"table": table_name})
    else:
        say(f"Table {table_name} is no longer watched.")
