"""`mailroom bridge`."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import click

from dispatcher.bridges.brokers import publisher_of, source_of
from dispatcher.cli.bridge_options import in_options, on_failure_option, out_options
from dispatcher.cli.brokers import (
    broker_options,
    chosen,
    in_transactions,
    is_asked,
    list_brokers,
    own_commands,
    own_options,
    settled,
)
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.environment import variables
from mailroom.bridges.into import InRow, bridging_in, reading_ins
from mailroom.bridges.out import OutRow, bridging_out, finding_out, reading_outs
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble
from mailroom.bridges.record import Record
from mailroom.bridges.source import BrokerPosition
from mailroom.bridges.states import BridgeStates, InState, OutState
from mailroom.bridges.waiting import LIMIT
from mailroom.cli.acting import acting, answering, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, duration, facts, one_line, say, shown, table, working
from mailroom.cli.parameters import NODE, WholeNumber, checked
from mailroom.errors import ConfigurationError, ConnectionFailed, MailroomError
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run

TEST_S = 10.0
CUT = "But it is cut, and publishes nothing: mailroom bridge status"


def place(text: str) -> BrokerPosition:
    """Return the place that a text names: TOPIC/PART=OFFSET."""
    found = re.fullmatch(r"(.+)/(\d{1,9})=(\d{1,18})", text, re.ASCII)
    if found is None:
        raise ConfigurationError(f"{text!r} is not a place: give TOPIC/PART=OFFSET.", code="MR-invalid-argument")
    return BrokerPosition(found[1], int(found[2]), int(found[3]))


PLACE = checked(place)


@click.group(cls=Group)
def bridge() -> None:
    """Publish messages to other brokers, and take in messages from them.

    A bridge out of a node is a link whose reader is a broker: what it subscribes to is stamped for it, waits in the
    database however long the broker is away, and is published in order by the dispatcher. A bridge into a node is an
    origin whose source is a broker: inboxes subscribe to its topics with --origin NAME. Passwords and other options of
    the broker's client come from the dispatcher's environment (MAILROOM_BRIDGE_<NAME>_...); none is stored here.

    \b
    Example:
      mailroom bridge out orders --kafka localhost:9092 --topic shop.orders --subscribe 'order.#'
      mailroom bridge in stock --kafka localhost:9092 --from stock.levels
      mailroom bridge status
    """


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@broker_options("out")
@out_options
@click.option(
    "--exactly-once",
    is_flag=True,
    default=None,
    help="Publish in transactions, so that readers of what is committed get each message once. "
    f"[only {in_transactions()}]",
)
@click.option(
    "--mark-topic",
    metavar="TOPIC",
    help="The topic under which the broker keeps the mark of --exactly-once. [--topic, if it has no {topic}]",
)
@on_failure_option(
    "What to do about a message that the broker refuses: stop until an operator acts, or move it to dead_letter. [stop]"
)
@answering
@pass_call
def out(
    call: Call, /, name: str, by_name: tuple[str, str] | None, topics: tuple[str, ...], actor: str, why: str | None,
    **given: Any,
) -> None:  # fmt: skip
    """Publish messages to a broker, by the bridge NAME.

    What is sent after this is published by `mailroom dispatcher run`. Commands and replies of a topic are published
    only if no inbox of this node gets them and the bridge subscribes to the topic by its exact name. Repeating the
    command is harmless. With other settings than the bridge has it fails, and mailroom bridge set changes them; the
    broker, --exactly-once and --mark-topic cannot be changed.

    \b
    Examples:
      mailroom bridge out orders --kafka localhost:9092 --topic shop.orders --subscribe 'order.#'
      mailroom bridge out ledger --kafka k1:9092,k2:9092 --topic ledger --exactly-once --encode cbor
      mailroom bridge out cdc --kafka localhost:9092 --format debezium --tombstones --on-failure skip
      mailroom bridge out shop --nats nats://localhost:4222 --topic 'shop.{topic}'
      mailroom bridge out mail --rabbitmq localhost:5672 --exchange shop --subscribe 'order.#'
      mailroom bridge out hooks --webhook https://shop.example/hooks --subscribe order.paid
    """
    settings = chosen("out", by_name, {**given, "topics": topics})
    with call.connection("bridge out") as connection:
        is_new = run(connection, bridging_out(call.schema, name, settings, actor=actor, why=why))
        is_cut = not run(connection, reading_outs(call.schema, name))
    if call.json:
        document({"bridge": name, "is_new": is_new})
        return
    if is_cut:
        say(f"The bridge {name} exists. {CUT}")
        return
    say(f"The bridge {name} publishes to {settings['broker']} at {settings['address']}.")
    _tell_options(name)


@bridge.command("in")
@click.argument("name", metavar="NAME", type=NODE)
@broker_options("in")
@in_options(is_new=True)
@on_failure_option(
    "What to do about a record that is not a message: move it to dead_letter, or stop until an operator acts. [skip]"
)
@answering
@pass_call
def into(
    call: Call, /, name: str, by_name: tuple[str, str] | None, sources: list[str], actor: str, why: str | None,
    **given: Any,
) -> None:  # fmt: skip
    """Take in messages from a broker, by the bridge NAME.

    `mailroom dispatcher run` reads the topics from where this node's database says. Each message enters each inbox that
    subscribes to its topic with --origin NAME once, in the order of its partition.

    Repeating the command is harmless. With other settings than the bridge has it fails, and mailroom bridge set changes
    them; the broker cannot be changed.

    \b
    Examples:
      mailroom bridge in stock --kafka localhost:9092 --from stock.levels
      mailroom inbox subscribe reorder stock.levels --origin stock
      mailroom bridge in cdc --kafka localhost:9092 --from outbox.event.order --as-topic 'cdc.{topic}' --key path:id
      mailroom bridge in shop --nats nats://localhost:4222 --from SHOP
      mailroom bridge in mail --rabbitmq localhost:5672 --from mail.orders
    """
    settings = chosen("in", by_name, given) | {"topics": sources}
    with call.connection("bridge in") as connection:
        is_new = run(connection, bridging_in(call.schema, name, settings, actor=actor, why=why))
    if call.json:
        document({"bridge": name, "is_new": is_new})
        return
    say(f"The bridge {name} takes in from {settings['broker']} at {settings['address']}.")
    say(f"Inboxes get its messages with: mailroom inbox subscribe INBOX TOPIC --origin {name}")
    _tell_options(name)


@bridge.command("set")
@click.argument("name", metavar="NAME", type=NODE)
@click.option("--address", metavar="ADDRESS", help="Where the broker is now, in the form that it was given at first.")
@own_options("out", "in")
@out_options
@in_options(is_new=False)
@on_failure_option("What to do about a message that the broker refuses, or a record that is not a message.")
@answering
@pass_call
def set_(
    call: Call, /, name: str, topics: tuple[str, ...], sources: list[str] | None, actor: str, why: str | None,
    **given: Any,
) -> None:  # fmt: skip
    """Change settings of a bridge, and print what is different now.

    Settings that are not given stay. The broker, --exactly-once and --mark-topic cannot be changed. A dispatcher begins
    anew with other settings, from where the bridge is, and says again if something is wrong. What has stopped since the
    broker lost records goes on by mailroom bridge resume.

    \b
    Examples:
      mailroom bridge set orders --address k1:9092,k2:9092 --why "the cluster has moved"
      mailroom bridge set orders --on-failure skip
      mailroom bridge set orders --subscribe 'order.#' --subscribe invoice.paid --max-rows 1000000
      mailroom bridge set stock --from stock.levels,stock.moves
      mailroom bridge set cdc --as-topic ''
    """
    settings = settled(("out", "in"), {**given, "topics": topics or sources})
    if not settings:
        raise click.UsageError("Give a setting to change. See: mailroom bridge status")
    with call.connection("bridge set") as connection:
        is_in = bool(run(connection, reading_ins(call.schema, name)))
        if topics if is_in else sources:
            raise click.UsageError(
                f"{name} is a bridge into this node: its topics are those of --from." if is_in
                else f"{name} is not a bridge into this node: its topics are those of --subscribe."
            )  # fmt: skip
        change = Bridges(schema=call.schema).set(connection, name, actor=actor, why=why, **settings)
        is_cut = not is_in and not run(connection, reading_outs(call.schema, name))
    if call.json:
        document({"bridge": name, "schema": call.schema, "change": change or None})
        return
    say(f"Bridge {name}: {change or 'nothing to change'}.{f' {CUT}' if is_cut else ''}")


def _tell_options(name: str) -> None:
    say(f"Its options and passwords: {variables(name)}... where the dispatcher runs.")
    say(f"To try it: mailroom bridge test {name}")


@bridge.command()
@pass_call
def status(call: Call) -> None:
    """Show the bridges of this node: what waits for each, and if nothing is published, why and what to do.

    A bridge is open, or something is not published: it is unreachable or failing, or a message is refused, which is
    tried again and again; it is stopped until an operator acts, or cut. Then the command exits with 1.

    \b
    Examples:
      mailroom bridge status
      mailroom bridge status --json | jq '.out[] | {name, state, backlog, lag_s}'
    """
    with working("counting what waits for brokers"), call.looking("bridge status") as connection:
        found = Bridges(schema=call.schema).status(connection)
    if call.json:
        document(found)
    else:
        show_states(found)
    well = all(each.state == "open" for each in found.out) and all(each.flows for each in found.into)
    click.get_current_context().exit(0 if well else 1)


def show_states(found: BridgeStates) -> None:
    """Print the bridges of a node."""
    if found.out:
        columns: tuple[str, ...] = ("bridge out", "broker", "state", "backlog", "lag", "row", "topics")
        table(columns, map(_out_row, found.out), numbers=("backlog", "lag", "row"))
    else:
        say("This node publishes to no broker: mailroom bridge out --help")
    say("")
    if found.into:
        columns = ("bridge in", "broker", "state", "received", "at", "topics")
        table(columns, map(_in_row, found.into), numbers=("received",))
    else:
        say("This node takes in from no broker: mailroom bridge in --help")
    each_way: list[OutState | InState] = [*found.out, *found.into]
    troubles = [(each.name, _trouble(each)) for each in each_way if each.why is not None]
    if troubles := troubles + [(each.name, _lack(each)) for each in found.into if each.lacks is not None]:
        say("")
        facts(troubles)


def _out_row(each: OutState) -> tuple[object, ...]:
    exactly_once = ", exactly once" if each.settings.exactly_once else ""
    return (
        each.name, f"{each.settings.broker} {each.settings.address}{exactly_once}", each.state, each.backlog,
        duration(each.lag_s), str(each.acked), "\n".join(each.topics),
    )  # fmt: skip


def _in_row(each: InState) -> tuple[object, ...]:
    at = "\n".join(f"{place.topic}/{place.part}={place.next}" for place in each.positions) or "nowhere yet"
    return (
        each.name, f"{each.settings.broker} {each.settings.address}", each.state, each.received, at,
        "\n".join(each.topics) or "none",
    )  # fmt: skip


def _lack(each: InState) -> str:
    since, until = each.lacks or (None, None)
    return (
        f"this node was put back in time, or moved. What was taken from the queue between {shown(since)} and "
        f"{shown(until)} is deleted there, and may be missing here. If you have seen to that: mailroom bridge resume "
        f"{each.name}"
    )


def _trouble(each: OutState | InState) -> str:
    since = "" if each.since is None else f" since {shown(each.since)}"
    return f"{each.state}{since}: {each.why}"


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@pass_call
def test(call: Call, name: str) -> None:
    """Connect to the broker of the bridge NAME, with this environment's options, and publish nothing.

    Do not use it while a dispatcher publishes a bridge with --exactly-once: it would be fenced, and begin anew.

    \b
    Example:
      mailroom bridge test orders
    """
    with call.looking("bridge test") as connection:
        row = run(connection, _finding(call.schema, name))
        names = [each.name for each in run(connection, reading_outs(call.schema))]
        names += [each.name for each in run(connection, reading_ins(call.schema))]
    asyncio.run(_try(row, names))
    was_asked = is_asked(row.settings.broker, "in" if isinstance(row, InRow) else "out")
    if call.json:
        document({"bridge": name, "reached": was_asked})
    elif was_asked:
        say(f"{row.settings.broker} at {row.settings.address} is reached.")
    else:
        say("Its address and its options can be used. Nothing was sent, so whether it answers is not known.")


def _finding(schema: str, name: str) -> Operation[OutRow | InRow]:
    if rows := (yield from reading_ins(schema, name)):
        return rows[0]
    others = [each.name for each in (yield from reading_ins(schema))]
    return (yield from finding_out(schema, name, others))


async def _try(row: OutRow | InRow, names: list[str]) -> None:
    client = source_of(row, names)() if isinstance(row, InRow) else publisher_of(row, names)()
    try:
        await asyncio.wait_for(client.open(), TEST_S)
    except (TimeoutError, BrokerTrouble) as error:
        why = client.trouble or str(error) or f"no answer within {TEST_S:.0f} s"
        raise ConnectionFailed(f"{row.settings.address} is not reached: {why}") from None
    except BrokerRefused as error:
        raise MailroomError(str(error), code=error.code) from None
    finally:
        await client.close()


@bridge.command("show")
@click.argument("name", metavar="NAME", type=NODE)
@click.option("--limit", metavar="N", type=WholeNumber(1), default=LIMIT, show_default=True, help="At most this many.")
@click.option("--values", "whole", is_flag=True, help="Show headers and values, too.")
@pass_call
def show(call: Call, name: str, limit: int, whole: bool) -> None:
    """Show what waits for the bridge NAME, as the records that it would publish.

    \b
    Examples:
      mailroom bridge show orders
      mailroom bridge show orders --limit 1 --values
    """
    with call.looking("bridge show") as connection:
        records = Bridges(schema=call.schema).waiting(connection, name, limit=limit)
    if call.json:
        document([_as_document(each, whole=whole) for each in records])
    elif not records:
        say(f"Nothing waits for {name}.")
    elif whole:
        for each in records:
            facts(list(_facts(each)))
            say("")
    else:
        columns = ("row", "id", "topic", "key", "bytes")
        table(columns, map(_line, records), numbers=("row", "bytes"))


def _line(each: Record) -> tuple[object, ...]:
    return str(each.seq), str(each.id), each.topic, _text(each.key), len(each.value or b"")


def _facts(each: Record) -> Iterator[tuple[str, str]]:
    yield from (("row", str(each.seq)), ("topic", each.topic), ("key", _text(each.key)))
    yield from ((name, _text(value)) for name, value in each.headers)
    yield "value", _text(each.value)


def _text(raw: bytes | None) -> str:
    if raw is None:
        return "none"
    return one_line(raw.decode(errors="backslashreplace"))


def _as_document(each: Record, *, whole: bool) -> dict[str, object]:
    found: dict[str, object] = {"row": each.seq, "id": each.id, "topic": each.topic, "key": _text(each.key)}
    if whole:
        found |= {"headers": {name: _text(value) for name, value in each.headers}, "value": each.value}
    return found


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@acting
@pass_call
def cut(call: Call, name: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Stamp nothing more for the bridge NAME, and give up what waits for it; it says how many messages.

    A cut bridge cannot go on: remove it, and make it again.

    \b
    Examples:
      mailroom bridge cut orders --dry-run
      mailroom bridge cut orders --why "that cluster is gone"
    """
    with working("cutting the bridge"), call.connection("bridge cut") as connection:
        given_up = Bridges(schema=call.schema).cut(connection, name, actor=actor, why=why, dry_run=dry_run)
    _tell(call, name, "cut", given_up, dry_run=dry_run)


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@click.option(
    "--at",
    metavar="TOPIC/PART=OFFSET",
    type=PLACE,
    help="Let a bridge into this node go on there in that partition, whatever was read.",
)
@answering
@pass_call
def resume(call: Call, name: str, at: str | None, actor: str, why: str | None) -> None:
    """Try the stopped bridge NAME again at once; it is tried by itself too, at least every 30 s.

    But not one that has lost records: it goes on only by this command.

    With --at, what lies between is never taken in, or is taken in again with the same message ids.

    \b
    Examples:
      mailroom bridge resume orders --why "the topic is there now"
      mailroom bridge resume stock --at stock.levels/0=150 --why "the broker has lost what was before"
    """
    to = None if at is None else place(at)
    with call.connection("bridge resume") as connection:
        was = Bridges(schema=call.schema).resume(connection, name, at=to, actor=actor, why=why)
    if call.json:
        document({"bridge": name, "resumed": was})
    else:
        say(f"The bridge {name} is tried again." if was or at else f"Nothing was wrong with the bridge {name}.")


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@click.option("--row", type=click.IntRange(1), required=True, help="The row, as `mailroom bridge status` names it.")
@answering
@pass_call
def skip(call: Call, name: str, row: int, actor: str, why: str | None) -> None:
    """Move one row that waits for the bridge NAME to dead_letter, so that the rows after it go on.

    `mailroom bridge show NAME` shows what waits; `mailroom dead-letter requeue` gives it to the bridge again.

    \b
    Example:
      mailroom bridge skip hooks --row 17 --why "the receiver does not know that customer any more"
    """
    with call.connection("bridge skip") as connection:
        message_id = Bridges(schema=call.schema).skip(connection, name, row, actor=actor, why=why)
    if call.json:
        document({"bridge": name, "row": row, "message_id": message_id})
    else:
        say(f"Row {row} of the bridge {name}, message {message_id}, is a dead letter.")


@bridge.command()
@click.argument("name", metavar="NAME", type=NODE)
@acting
@pass_call
def remove(call: Call, name: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Remove the bridge NAME, and give up what waits for it; it says how many messages. What is published stays.

    \b
    Examples:
      mailroom bridge remove orders --dry-run
      mailroom bridge remove orders --why "the shop has moved"
    """
    with working("removing the bridge"), call.connection("bridge remove") as connection:
        given_up = Bridges(schema=call.schema).remove(connection, name, actor=actor, why=why, dry_run=dry_run)
    _tell(call, name, "removed", given_up, dry_run=dry_run)


def _tell(call: Call, name: str, done: str, given_up: int, *, dry_run: bool) -> None:
    if call.json:
        document({"bridge": name, "given_up": given_up, "dry_run": dry_run})
        return
    would_be = "would be" if dry_run else "is"
    say(f"The bridge {name} {would_be} {done}; {counted(given_up, 'message')} that waited {would_be} given up.")


for _command in (list_brokers, *own_commands({*bridge.commands, str(list_brokers.name)})):
    bridge.add_command(_command)
