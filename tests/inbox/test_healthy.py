"""The healthy floor: claims start above the messages of failing keys, and none below is overtaken or forgotten."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping import healthy_floor as healthy
from dispatcher.housekeeping.janitor import Janitor, sweeping_key_state
from inbox import Inbox, Parked
from inbox.by_key import claim, due
from inbox.by_key.claim import Share
from inbox.by_key.due import healing, reaping_due
from inbox.by_key.failure import failed, recording, suspecting
from inbox.claims import Claims
from inbox.exceptions import Park, Retry
from inbox.keeping import keeping
from mailroom.message.message import Message
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.explain import nodes
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]


def deliver(node: Node, *keys: str) -> None:
    for key in keys:
        node.send("shipping", key=key)
    node.deliver()


def fail(node: Node, key: str, after_s: float = 0) -> None:
    """Record a failure of the key's first message."""
    message = Inbox("shipping").peek(node.connection, key, 1)[0]
    run(node.connection, recording(SCHEMA, "shipping", failed(message, Retry(after_s=after_s))))


def suspect(node: Node, key: str, to: int) -> None:
    run(node.connection, suspecting(SCHEMA, "shipping", [key], [to], "died"))


def raise_floor(node: Node, rows: int = 1_000) -> int:
    with node.connection.transaction():
        run(node.connection, healthy.raising(SCHEMA, "shipping", rows))
    return int(node.value("SELECT healthy_floor FROM mailroom.inbox_registry"))


def claimed(node: Node, *, due_too: bool = False, most: int = 100) -> list[tuple[str, int]]:
    """Reap as a worker does, or by hand."""
    with node.connection.transaction():
        messages = run(
            node.connection, Claims("mailroom", "shipping").claiming(Share(100, 100, most, due_too))
        ).messages
    return [(each.key, each.clock) for each in messages]


def tried(node: Node, limit: int = 1) -> list[tuple[str, int]]:
    """Try a failing key, as a worker does, and succeed."""
    with node.connection.transaction():
        messages = run(node.connection, reaping_due(SCHEMA, "shipping", limit)).messages
        if messages:
            run(node.connection, healing(SCHEMA, "shipping", messages[-1]))
    return [(each.key, each.clock) for each in messages]


# -- What a claim costs -----------------------------------------------------------------------------------------------


CLAIM = claim.REAP_ANY.at(schema=SCHEMA, inbox="shipping", **Share(100, 100, 100, due_too=False).names()).sql
CLAIM_OF_ONE = claim.REAP_ANY.at(schema=SCHEMA, inbox="shipping", **Share(1, 1, 1).names()).sql
PLAIN_CLAIM = claim.REAP_PLAIN.at(schema=SCHEMA, inbox="shipping", **Share(1, 1, 1).names()).sql
OF_WORKER = {"but_orphaned": due.BUT_ORPHANED, "held": due.HELD, "schema": SCHEMA, "inbox": "shipping"}
LOCK_HEAD = due.LOCK_HEAD.at(**OF_WORKER).sql
TAKE_HEAD = due.TAKE_HEAD.at(**keeping(False), **OF_WORKER).sql
VALUES = {"cursor": "''", "depth": "1", "key": "'k1'", "clock": "1", "limit": "100", "mine": "'{}'", "but": "'{}'"}


def rows_read(connection: psycopg.Connection[Any], statement: str) -> int:
    """Return how many rows of the tables a statement of a claim reads."""
    for name, value in VALUES.items():
        statement = statement.replace(f"%({name})s", value)
    with connection.transaction(force_rollback=True):
        connection.execute(claim.PIN.at().sql.encode())
        row = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {statement.replace('%%', '%')}".encode()).fetchone()
    assert row is not None
    tables = ("inbox_shipping", "key_state", "inbox_registry")
    scans = [node for node in nodes(row[0][0]["Plan"]) if node.get("Relation Name") in tables]
    return int(
        sum((scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)) * scan["Actual Loops"] for scan in scans)
    )


@pytest.fixture(params=["now() + interval '1 h'", "'infinity'", "now() - interval '1 s'"])
def many_failing(request: pytest.FixtureRequest, node: Node) -> Node:
    """50,000 keys wait, are parked, or are due, each with a message; of the latest one, and of a healthy key, one more.

    Nothing is analyzed, so plans made while the tables are empty are kept.
    """
    message = "gen_random_uuid(), 'shipping', 'M', 'U', 'null'::jsonb, now()"
    columns = "inbox, key, clock, sent_clock, origin, message_id, topic, kind, message_type, value_json, sent_at"
    node.connection.execute(
        f"INSERT INTO mailroom.inbox ({columns}) SELECT 'shipping', 'k' || nth, nth, nth, gen_random_uuid(), {message} "
        "FROM generate_series(1, 50000) AS nth"
    )
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, alone_to) "
        f"SELECT inbox, key, clock, 1, {request.param}, clock FROM mailroom.inbox"
    )
    node.connection.execute("SELECT setval('mailroom.clock', 50000)")
    deliver(node, "k50000", "healthy")
    return node


@pytest.mark.slow
@pytest.mark.sample(1)
def test_claim_reads_no_rows_of_failing_keys(many_failing: Node) -> None:
    node = many_failing
    while raise_floor(node, 10_000) < 50_001:
        pass
    statements = (CLAIM, CLAIM_OF_ONE, PLAIN_CLAIM, LOCK_HEAD, TAKE_HEAD)
    assert max(rows_read(node.connection, statement) for statement in statements) < 20
    assert claimed(node) == [("healthy", 50_002)]
    assert max(rows_read(node.connection, statement) for statement in statements) < 20


@pytest.mark.sample(1)
def test_claim_reads_each_failing_key_once_without_housekeeping(many_failing: Node) -> None:
    node = many_failing
    assert rows_read(node.connection, CLAIM) < 2 * claim.MAX_STEPS + 2_000
    assert claimed(node, most=1) == [("healthy", 50_002)]


def test_housekeeping_raises_the_floor(node: Node) -> None:
    deliver(node, "bad", "bad", "good")
    fail(node, "bad", after_s=3_600)

    async def keep() -> None:
        async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
            await Janitor(SCHEMA).run_once(connection)

    asyncio.run(keep())
    assert node.value("SELECT healthy_floor FROM mailroom.inbox_registry") == 2


# -- Nothing is overtaken ---------------------------------------------------------------------------------------------


def test_floor_stops_below_the_first_healthy_key(node: Node) -> None:
    deliver(node, "bad", "bad", "good", "worse")
    fail(node, "bad")
    fail(node, "worse")
    assert raise_floor(node) == 2
    assert claimed(node) == [("good", 3)]
    assert raise_floor(node) == 4


def test_key_stays_failing_while_it_has_messages_below_the_floor(node: Node) -> None:
    deliver(node, "bad", "bad", "bad")
    fail(node, "bad")
    assert raise_floor(node) == 3
    deliver(node, "bad")
    assert tried(node) == [("bad", 1)]
    assert claimed(node) == []  # 4 is above the floor, 2 and 3 are below it
    assert tried(node) == [("bad", 2)]
    assert tried(node) == [("bad", 3)]
    assert node.rows("SELECT FROM mailroom.key_state") == []
    assert claimed(node) == [("bad", 4)]


def test_unsuspected_messages_are_claimed_in_batches(node: Node) -> None:
    deliver(node, *["bad"] * 6)
    suspect(node, "bad", 2)
    assert raise_floor(node) == 6
    assert [tried(node, limit=3) for _ in range(4)] == [
        [("bad", 1)],
        [("bad", 2)],
        [("bad", 3), ("bad", 4), ("bad", 5)],
        [("bad", 6)],
    ]


def test_batch_whose_worker_died_is_tried_one_message_at_a_time(node: Node) -> None:
    deliver(node, *["bad"] * 4)
    suspect(node, "bad", 1)
    raise_floor(node)
    assert tried(node, limit=3) == [("bad", 1)]
    suspect(node, "bad", 4)  # by the entry of a batch of three
    assert [tried(node, limit=3) for _ in range(3)] == [[("bad", 2)], [("bad", 3)], [("bad", 4)]]


def test_failing_keys_with_more_messages_take_turns(node: Node) -> None:
    deliver(node, "a", "a", "b", "b")
    suspect(node, "a", 2)
    suspect(node, "b", 4)
    assert [tried(node) for _ in range(4)] == [[("a", 1)], [("b", 3)], [("a", 2)], [("b", 4)]]


def test_reap_any_takes_due_keys_below_the_floor_and_healthy_ones(node: Node) -> None:
    deliver(node, "bad", "later", "bad")
    fail(node, "bad")
    fail(node, "later", after_s=3_600)
    assert raise_floor(node) == 3
    deliver(node, "good", "bad")
    assert claimed(node, due_too=True) == [("bad", 1), ("bad", 3), ("good", 4), ("bad", 5)]
    assert node.rows("SELECT key FROM mailroom.key_state") == [("later",)]


def test_floor_stops_at_a_key_whose_key_state_row_is_being_deleted(node: Node, connect: Connect) -> None:
    """The claim that deletes it may not see messages delivered since, which the floor must not pass."""
    deliver(node, "bad")
    fail(node, "bad")
    trying = connect()
    [message] = run(trying, reaping_due(SCHEMA, "shipping")).messages
    run(trying, healing(SCHEMA, "shipping", message))
    deliver(node, "bad")
    assert raise_floor(node) == 0
    trying.commit()
    assert raise_floor(node) == 1
    assert claimed(node) == [("bad", 2)]


def test_key_state_row_that_is_marked_while_a_delete_waits_for_it_stays(node: Node, connect: Connect) -> None:
    deliver(node, "bad")
    fail(node, "bad")
    trying, raising, observer = connect(), connect(), connect(autocommit=True)
    [message] = run(trying, reaping_due(SCHEMA, "shipping")).messages
    deliver(node, "bad")
    run(raising, healthy.raising(SCHEMA, "shipping"))
    with ThreadPoolExecutor(1) as thread:
        healed = thread.submit(run, trying, healing(SCHEMA, "shipping", message))
        wait_until_blocked(observer, trying.info.backend_pid)
        raising.commit()
        healed.result(WITHIN_S)
    trying.commit()
    assert claimed(node) == []
    assert tried(node) == [("bad", 2)]


def test_replay_lowers_the_floor_to_what_the_key_has(node: Node) -> None:
    deliver(node, "bad", "bad", "other")
    [first, _] = Inbox("shipping").peek(node.connection, "bad")
    run(node.connection, recording(SCHEMA, "shipping", failed(first, Park("no"))))
    fail(node, "other", after_s=3_600)
    with node.connection.transaction():
        assert run(node.connection, reaping_due(SCHEMA, "shipping")).ended is not None
    assert raise_floor(node) == 3
    with node.connection.transaction():
        Parked("shipping").discard(node.connection, "bad", actor="ada", per_key=1)
        Parked("shipping").replay(node.connection, "bad", actor="ada")
    assert claimed(node) == [("bad", 2)]


def test_floor_stays_where_it_is_while_a_replay_is_under_way(node: Node, connect: Connect) -> None:
    deliver(node, "bad", "other")
    [first] = Inbox("shipping").peek(node.connection, "bad")
    run(node.connection, recording(SCHEMA, "shipping", failed(first, Park("no"))))
    with node.connection.transaction():
        assert run(node.connection, reaping_due(SCHEMA, "shipping")).ended is not None
    fail(node, "other")
    replaying = connect()
    Parked("shipping").replay(replaying, "bad", actor="ada")
    assert raise_floor(node) == 0
    replaying.commit()
    assert claimed(node) == [("bad", 1)]


def test_key_state_row_below_the_floor_is_not_swept(node: Node) -> None:
    deliver(node, "bad", "bad")
    fail(node, "bad")
    raise_floor(node)
    node.connection.execute("DELETE FROM mailroom.inbox WHERE clock = 1")  # as by a claim with an old snapshot
    run(node.connection, sweeping_key_state(SCHEMA, "shipping"))
    assert claimed(node) == []
    assert tried(node) == [("bad", 2)]
    run(node.connection, sweeping_key_state(SCHEMA, "shipping"))
    assert node.rows("SELECT FROM mailroom.key_state") == []


# -- Any order --------------------------------------------------------------------------------------------------------


class Consumer:
    """A session that claims, and later commits or rolls back: `taken` is what its transaction holds."""

    def __init__(self, node: Node, connection: psycopg.Connection[Any], dice: random.Random) -> None:
        self._node, self._connection, self._dice = node, connection, dice
        self.taken: list[Message] = []
        self._by_worker = self._due = False

    def step(self, consumed: list[tuple[str, int]]) -> None:
        if self.taken:
            self._end(consumed)
            return
        self._due = self._dice.random() < 0.5
        self._by_worker = self._due or self._dice.random() < 0.7
        inbox = Claims("mailroom", "shipping")
        share = Share(3, 2, 4, due_too=not self._by_worker)
        operation = inbox.claiming_due(2) if self._due else inbox.claiming(share)
        self.taken = run(self._connection, operation).messages
        if not self.taken:
            self._connection.commit()

    def _end(self, consumed: list[tuple[str, int]]) -> None:
        way = self._dice.random()
        if way < 0.4 and not self._by_worker:
            pass
        elif way < 0.3:
            bad = self._dice.choice(self.taken)
            error = self._dice.choice([Retry(after_s=0), Retry(after_s=0), Park("no")])
            run(self._node.connection, recording(SCHEMA, "shipping", failed(bad, error)))
        elif way < 0.4:
            keys = {each.key: each.clock for each in self.taken}
            operation = suspecting(SCHEMA, "shipping", list(keys), list(keys.values()), "died")
            run(self._node.connection, operation)
        else:
            if self._due:
                run(self._connection, healing(SCHEMA, "shipping", self.taken[-1]))
            self._connection.commit()
            consumed += [(each.key, each.clock) for each in self.taken]
        self._connection.rollback()
        self.taken = []


def replay_all(node: Node) -> None:
    with node.connection.transaction():
        Parked("shipping").replay(node.connection, None, actor="ada")


@pytest.mark.sample(1)
@pytest.mark.parametrize("nth", range(6))
def test_whatever_happens_in_whatever_order_nothing_is_lost_or_overtaken(
    node: Node, connect: Connect, nth: int, record_property: Any
) -> None:
    seed = random.randrange(2**32)
    record_property("seed", seed)
    dice = random.Random(seed)
    consumers = [Consumer(node, connect(), dice) for _ in range(3)]
    consumed: list[tuple[str, int]] = []
    sent = 0

    def step() -> None:
        nonlocal sent
        way = dice.random()
        if way < 0.15 and sent < 60:
            keys = [f"k{dice.randrange(6)}" for _ in range(dice.randrange(1, 6))]
            sent += len(keys)
            deliver(node, *keys)
        elif way < 0.4:
            raise_floor(node, dice.choice([1, 2, 5, 100]))
        elif way < 0.45 and not any(each.taken for each in consumers):
            replay_all(node)
        else:
            dice.choice(consumers).step(consumed)
        below = """
            SELECT key, clock FROM mailroom.inbox AS i, mailroom.inbox_registry AS r
            WHERE clock <= healthy_floor
              AND NOT EXISTS (SELECT FROM mailroom.key_state AS s WHERE s.key = i.key AND s.alone_to >= i.clock)"""
        assert node.rows(below) == []

    for _ in range(150):
        step()
    for each in consumers:
        if each.taken:
            each.step(consumed)
    for _ in range(300):
        if not node.rows("SELECT FROM mailroom.inbox UNION ALL SELECT FROM mailroom.parked"):
            break
        replay_all(node)
        consumed += claimed(node)
        consumed += tried(node, limit=2)
    assert len(consumed) == len(set(consumed)) == sent, seed
    for key in {key for key, _ in consumed}:
        clocks = [clock for other, clock in consumed if other == key]
        assert clocks == sorted(clocks), (seed, consumed)
