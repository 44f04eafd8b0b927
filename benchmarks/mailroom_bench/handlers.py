"""Handlers: what it costs that they find the handler, read typed values, and answer by what the handler returns.

The plain handler looks a value up in the dict that it gets, the typed one in a dataclass, through the whole path as in
`flow`. Commands wait in a full inbox, and one Worker process with its usual batches answers them: by hand with
`Outbox.reply`, by returning a value, and by returning it for nine in ten and rejecting the tenth.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from inbox import Handlers, Message, Reject
from mailroom import Topic
from outbox import Outbox

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Count, Handler, Pipeline, reap_rate
from .workload import INBOX, KEYS, VALUE
from .workload import KEY as KEY_OF

ANSWERS = "answers"  # nobody gets them: no dispatcher runs
REJECTED = 10  # of so many, one
BATCH = 100  # a worker's default
COMMANDS = (
    "INSERT INTO {outbox} (topic, key, kind, headers, value) "
    "SELECT '{inbox}', {key}, 'C', '{{\"reply_to\": \"{answers}\"}}', %(value)s::bytea "
    "FROM generate_series(0, %(messages)s - 1) AS nth"
)


@dataclass
class Record:
    """The value of `workload.value`."""

    nth: int
    state: str
    amount: float
    items: list[int]
    note: str


record = Topic(INBOX, Record)


def plain(count: Count, _schema: str) -> Handler:
    """Return a handler that reads its message's value."""

    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        count.add(message.value["state"] == "paid")

    return handle


def typed(count: Count, schema: str) -> Handler:
    """Return one that reads it as a dataclass."""
    handlers = Handlers(schema=schema)

    @handlers.on(record)
    def handle(message: Message[Record], _connection: psycopg.Connection[Any]) -> None:
        count.add(message.value.state == "paid")

    return handlers


def replying(count: Count, schema: str) -> Handler:
    """Return a handler that answers by hand."""
    outbox = Outbox(schema=schema)

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        outbox.reply(connection, message, {"shelf": 7})
        count.add(1)

    return handle


def returning(count: Count, schema: str, rejected: int | None) -> Handler:
    """Return one that answers by what it returns, and rejects every `rejected`-th command."""
    handlers = Handlers(schema=schema)

    @handlers.on(INBOX)
    def handle(message: Message, _connection: psycopg.Connection[Any]) -> dict[str, int]:
        count.add(1)
        if rejected is not None and message.clock % rejected == 0:
            raise Reject({"shelf": 0})
        return {"shelf": 7}

    return handlers


def _flow(setup: Setup, handling: Callable[[Count, str], Handler]) -> float:
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.work(2, handling, node.schema)
        pipeline.publish(setup.messages)
        start = time.monotonic()
        return setup.messages / (pipeline.wait_drained(setup.messages) - start)


def _answered(setup: Setup, handling: Callable[..., Handler], *arguments: object) -> float:
    commands = setup.messages // 10  # one by one, each is a few round trips
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        _command(node, commands)
        node.deliver()
        pipeline.work(1, handling, node.schema, *arguments, batch=BATCH)
        return reap_rate(pipeline, commands)


def _command(node: Node, messages: int) -> None:
    statement = COMMANDS.format(outbox=node.outbox, inbox=INBOX, key=KEY_OF, answers=ANSWERS)
    with node.connect() as connection:
        connection.execute("SET LOCAL mailroom.notify = off")
        connection.execute(statement.encode(), {"keys": KEYS, "value": VALUE, "messages": messages})


def _run(setup: Setup) -> Values:
    return {
        "plain handler": _flow(setup, plain),
        "dataclass": _flow(setup, typed),
        "Outbox.reply": _answered(setup, replying),
        "returned": _answered(setup, returning, None),
        "one in ten rejected": _answered(setup, returning, REJECTED),
    }


MEASUREMENT = Measurement(
    "handlers",
    "typed values, and commands that are answered",
    (
        Line("plain handler"),
        Line("dataclass", baseline="plain handler", bar=Bar(ratio_at_least=0.8)),
        Line("Outbox.reply"),
        Line("returned", baseline="Outbox.reply", bar=Bar(ratio_at_least=0.55)),
        Line("one in ten rejected", baseline="returned", bar=Bar(ratio_at_least=0.7)),
    ),
    _run,
)
