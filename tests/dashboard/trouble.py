"""A node with trouble of every kind, for the dashboard's tests."""

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow

from dispatcher import Registrations
from inbox import Inbox, Park
from mailroom import Links, create_inbox, create_log
from mailroom.sql.runner import run
from outbox import Periodic, PeriodicMessage, Store
from tests.support.node import Node, failing

SCRIPT = "<script>alert(1)</script>"
SECRET = "card-4711-0815"
KEY = f'order/42 "{SCRIPT}'


class Trouble(NamedTuple):
    """The node, and the ids of some of its messages."""

    node: Node
    parked: UUID
    waiting: UUID
    scheduled: UUID
    sent: UUID
    reaped: UUID
    dead: UUID


def make_trouble(dsn: str, connection: psycopg.Connection[TupleRow]) -> Trouble:
    """Make a parked, a failing and a paused key, a paused inbox, dead letters, and some of all that waits."""
    node = Node(dsn, connection)
    node.allow_clocks()
    node.inbox("shipping", "order.paid", "order.*", max_attempts=1, keep_reaped_days=3)
    node.inbox("billing", "order.paid", backoff_s=3600, on_failure="skip", rate=10, breaker=50)
    node.inbox("quiet")
    with connection.transaction():
        create_log(connection, "events", ["event.#"], keep_days=2)
        create_inbox(connection, "search", log="events")
    node.send("event.made", key="made")
    secret = {"card": SECRET, "note": SCRIPT}
    parked = node.send("order.paid", secret, key=KEY, headers={"user": SECRET})
    node.send("order.paid", secret, key=KEY)
    reaped = node.send("order.paid", secret, key="done")
    dead = node.send("nobody.wants", secret, key="lost")
    node.send("nobody.wants", secret, key=SCRIPT)
    node.deliver_all()
    shipping, billing = Inbox("shipping"), Inbox("billing")
    with connection.transaction():
        [first, *_] = shipping.peek(connection, KEY)
        run(connection, failing("shipping", first, Park(f"ConnectionError: carrier said {SCRIPT}")))
        assert len(shipping.reap(connection, "done")) == 1
        [skipped, *_] = billing.peek(connection, KEY)
        run(connection, failing("billing", skipped, ValueError("no such street")))
        billing.pause(connection, "done", actor="ada", why="the address is being checked")
        Inbox("quiet").pause(connection, actor="ada", why="moving house")
    due = datetime.now(UTC) + timedelta(hours=5)
    scheduled = node.send("order.paid", secret, key="later", deliver_at=due)
    node.deliver_all()
    waiting = node.send("order.paid", secret, key="tomorrow")
    node.deliver_all()
    sent = node.send("order.paid", secret, key="outgoing")
    with connection.transaction():
        Store().put(connection, "stock/1", b"12")
        Periodic().add(connection, PeriodicMessage("nightly", "30 2 * * *", "report.due"), actor="ada")
        connection.execute("CREATE TABLE public.stats (day text PRIMARY KEY, seen bigint)")
        Registrations().register_target(
            connection, "stats", "public.stats", key="day", number="seen", actor="ada", why="to count"
        )
        Links().allow(connection, "lyon", actor="ada", why="the shop in Lyon")
    _statistics(connection)
    connection.execute(OF_LOG)
    return Trouble(node, parked, waiting, scheduled, sent, reaped, dead)


# An inbox that has not read the lane of a message, though another lane, and what is older than its log keeps.
OF_LOG = """
UPDATE mailroom.inbox_registry SET lost = 20, lost_at = now(), lost_since = now() WHERE name = 'search';
UPDATE mailroom.log_segment SET opened_at = now() - interval '9 days';
SELECT mailroom.make_log_segment('events', now() - interval '4 days');
UPDATE mailroom.log SET delivered_at = now() - interval '5 days';
INSERT INTO mailroom.receipts_search
SELECT 'search', (o.lane + 1) % 64, (SELECT max(epoch) FROM mailroom.receipts_search), t.clock
FROM mailroom.log AS o, mailroom.log_tick AS t
"""

# Of one moment: by a clock that goes on, two rows would be of one minute.
STATISTICS = """
INSERT INTO mailroom.stat_minute
SELECT date_trunc('minute', now()) - n * interval '1 min', inbox, 40 + n * 7 % 90, 30 + n * 5 % 70, n % 4,
       0, 0, 3, 0.5, array_fill(0, ARRAY[16])
FROM generate_series(1, 50) AS n, unnest(ARRAY['', 'shipping']) AS inbox
"""


def _statistics(connection: psycopg.Connection[Any]) -> None:
    connection.execute(STATISTICS)
    connection.execute("SELECT pg_stat_force_next_flush()")


# Parked keys whose messages are gone, for tests that do without any.
TICKS = """
INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, parked_at, last_error)
SELECT 'quiet', 'tick/' || n, 1, 1, 'infinity', now(), 'TimeoutError: no answer for 30 s' || repeat('!', 90)
FROM generate_series(1, 9) AS n
"""
