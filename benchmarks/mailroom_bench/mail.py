"""Mail: how long a user's test takes with the fixture `mail`.

A test is what the fixture does around it, a command, its handling and its answer, all on one connection. It is compared
with a transaction of the same connection that inserts the command by hand and is rolled back: the least that a test on
a database can do. The connection is opened once, as by the fixture; the first test prepares the statements.
"""

import time
from collections.abc import Callable

import psycopg

from inbox import Handlers, Message
from mailroom import create_inbox
from mailroom.testing.mail import Mail, mailing
from outbox import Outbox

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

TESTS = 50
TOPIC, INBOX, ANSWERS = "stock.reserve", "warehouse", "shop"


def _handlers(schema: str) -> Handlers:
    stock = Handlers(schema=schema)

    @stock.on(TOPIC)
    def take(message: Message, _connection: object) -> dict[str, int]:
        return {"shelf": message.value["amount"]}

    return stock


def _test(node: Node, connection: psycopg.Connection, outbox: Outbox, stock: Handlers) -> None:
    with mailing(connection, node.schema) as mail:
        if not isinstance(mail, Mail):
            raise AssertionError("the connection is not async")
        outbox.command(mail.connection, TOPIC, {"item": "teapot", "amount": 1}, reply_to=ANSWERS)
        mail.handle_all(**{INBOX: stock})
        [answer] = mail.sent(ANSWERS)
        if answer.headers["status"] != "200":
            raise AssertionError(f"the answer has status {answer.headers['status']}")


def _by_hand(node: Node, connection: psycopg.Connection) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute(
            f"INSERT INTO {node.outbox} (topic, key, kind, value_json) VALUES ('{TOPIC}', 'k', 'C', '1')".encode()
        )


def _ms(once: Callable[[], None]) -> float:
    once()
    start = time.perf_counter()
    for _ in range(TESTS):
        once()
    return (time.perf_counter() - start) / TESTS * 1_000


def _run(setup: Setup) -> Values:
    with fresh_node(setup.dsn) as node, psycopg.connect(setup.dsn) as connection:
        create_inbox(connection, INBOX, subscribe=[TOPIC], schema=node.schema)
        connection.commit()
        outbox, stock = Outbox(schema=node.schema), _handlers(node.schema)
        start = time.perf_counter()
        _test(node, connection, outbox, stock)
        first = (time.perf_counter() - start) * 1_000
        return {
            "by hand": _ms(lambda: _by_hand(node, connection)),
            "first test": first,
            "test": _ms(lambda: _test(node, connection, outbox, stock)),
        }


MEASUREMENT = Measurement(
    "mail",
    "a user's test with the fixture mail",
    (
        Line("by hand", unit="ms"),
        Line("first test", unit="ms"),
        Line("test", unit="ms", baseline="by hand", bar=Bar(at_most=20)),
    ),
    _run,
)
