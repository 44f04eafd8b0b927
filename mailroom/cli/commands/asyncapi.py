"""`mailroom asyncapi`: what a service sends and takes in, as an AsyncAPI document."""

import json

import click

from mailroom.asyncapi.describing import document
from mailroom.asyncapi.reading import reading_node
from mailroom.bridges.states import BridgeStates
from mailroom.cli.call import Call, pass_call
from mailroom.cli.modules import imported
from mailroom.cli.output import note, say_whole
from mailroom.message.topic import Topic
from mailroom.sql.runner import run


@click.command()
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@click.option("--no-database", is_flag=True, help="Leave out the node's bridges, also if a database is named.")
@click.option("--title", default="Mailroom", show_default=True, help="The title of the document.")
@click.option("--version", default="0.0.0", show_default=True, help="The version of the document.")
@pass_call
def asyncapi(call: Call, modules: tuple[str, ...], no_database: bool, title: str, version: str) -> None:
    """Print an AsyncAPI 3.0 document of typed topics and of this node's bridges, as JSON.

    MODULE is imported from the current directory or from the installed packages; each `Topic` in it is described, with
    a JSON schema of its values. With a database also the bridges are: the servers, the topics there, and the headers
    of records.

    \b
    Examples:
      mailroom asyncapi shipping.topics --title Shipping --version 1.4.0 > asyncapi.json
      mailroom asyncapi shipping.topics --no-database
      mailroom asyncapi --dsn postgresql://localhost/shop
    """
    topics = []
    for name in modules:
        found = [each for each in vars(imported(name)).values() if isinstance(each, Topic)]
        if not found:
            note(f"{name} has no Topic of its own: name the module in which they are declared.")
        topics += found
    node, bridges = (None, None) if no_database or not call.has_database else _read(call)
    made = document(topics, bridges, node=node, title=title, version=version)
    say_whole(json.dumps(made, indent=None if call.json else 2))


def _read(call: Call) -> tuple[str, BridgeStates]:
    with call.looking("asyncapi") as connection:
        return run(connection, reading_node(call.schema))
