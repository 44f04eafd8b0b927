"""The floor: it never passes a position that may still appear, whatever writers do."""

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from dispatcher.delivery import floor as floors
from dispatcher.delivery.deliver import DELIVERY_SESSION, OLDEST_FITTING, Delivery
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.delivery.floor import FULL_SCAN_S, START, Floor, ScanStart
from dispatcher.delivery.writers import reading_writers, remaining
from dispatcher.executor import batch_executor as batch_executors
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from outbox import Store
from tests.support.databases import Connect
from tests.support.explain import nodes
from tests.support.explain import pages as pages_of
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, send

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]


class Lane:
    """Deliveries and raises of one dispatcher, one at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.floor = Floor("outbox")

    def deliver(self, rows: int = 10_000) -> Delivery:
        return self.node.deliver(start=self.floor.start(), rows=rows)

    def raise_floor(self, delivery: Delivery, between: Callable[[], None] = lambda: None) -> int:
        run(self.node.connection, _interleaved(self.floor.raising(SCHEMA, delivery), between))
        return self.floor.value

    def turn(self, rows: int = 10_000) -> int:
        """Deliver, take one step at the floor, and return it."""
        return self.raise_floor(self.deliver(rows))


def _interleaved(operation: Operation[None], between: Callable[[], None]) -> Operation[None]:
    """Call `between` before and after each statement of the operation."""
    rows = None
    while True:
        try:
            step = operation.send(rows)
        except StopIteration:
            return
        between()
        rows = yield step
        between()


@pytest.fixture(autouse=True)
def _steps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "STEP", 1)


def test_floor_rises_to_the_last_position_once_everything_was_taken(node: Node) -> None:
    lane = Lane(node)
    for _ in range(3):
        node.send("shipping")
    assert lane.turn() == 0  # the goal is read
    assert lane.turn() == 3


def test_floor_stays_at_zero_in_an_outbox_that_was_never_used(node: Node) -> None:
    lane = Lane(node)
    assert [lane.turn() for _ in range(3)] == [0, 0, 0]


def test_floor_waits_for_a_writer_with_a_lower_position(node: Node, connect: Connect) -> None:
    lane, slow = Lane(node), connect()
    send(slow, "shipping", key="slow")
    node.send("shipping", key="fast")
    assert [lane.turn() for _ in range(4)] == [0, 0, 0, 0]
    slow.commit()
    assert [lane.turn() for _ in range(3)][-1] == 2
    assert node.delivered("key") == [("fast",), ("slow",)]


def test_floor_waits_for_a_prepared_transaction(node: Node, connect: Connect) -> None:
    lane, writer = Lane(node), connect(autocommit=True)
    writer.execute("BEGIN; SET LOCAL mailroom.notify = off")
    send(writer, "shipping", key="prepared")
    node.send("shipping", key="other")
    assert lane.turn() == 0
    writer.execute("PREPARE TRANSACTION 'between'")
    assert [lane.turn() for _ in range(3)] == [0, 0, 0]
    writer.execute("COMMIT PREPARED 'between'")
    assert [lane.turn() for _ in range(3)][-1] == 2
    assert node.delivered("key") == [("other",), ("prepared",)]


def test_rows_of_a_long_transaction_are_not_scanned_again_before_it_ends(node: Node, connect: Connect) -> None:
    lane, bulk, short = Lane(node), connect(), connect()
    bulk.execute("SET LOCAL mailroom.notify = off")
    for nth in range(10):
        send(bulk, "shipping", key=f"bulk {nth}")
        node.send("shipping", key=f"{nth}")
    short.execute("SET LOCAL mailroom.notify = off")
    send(short, "shipping", key="short")
    lane.turn()
    assert lane.turn() == 0
    assert lane.floor.start().position == 21
    # The end of the short one is met, and the long one's rows above the short one's are all that is scanned again.
    short.commit()
    node.send("shipping", key="last")
    assert lane.deliver().taken == 2
    # Its own end too, before what was sent after it.
    bulk.commit()
    node.send("shipping", key="after")
    assert lane.deliver().taken == 11
    assert [key for (key,) in node.delivered("key")][-12:] == ["last", *(f"bulk {nth}" for nth in range(10)), "after"]


SCAN = Sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) WITH {START} SELECT max(position) FROM ({OLDEST_FITTING}) AS o")


def test_what_a_scan_reads_does_not_depend_on_the_rows_of_a_long_transaction(node: Node, connect: Connect) -> None:
    lane, bulk = Lane(node), connect()
    bulk.execute("SET LOCAL mailroom.notify = off")
    bulk.execute(
        "INSERT INTO mailroom.outbox (topic, value_json) SELECT 'shipping', '1' FROM generate_series(1, 20000)"
    )
    node.send("shipping")
    lane.turn()
    lane.turn()

    for name, value in DELIVERY_SESSION.items():
        node.connection.execute("SELECT set_config(%s, %s, false)", [name, value])

    def pages(start: ScanStart) -> int:
        statement = SCAN.at(schema=SCHEMA)
        [(plan,)] = node.connection.execute(
            statement.sql, {**start.values(), "rows": 10_000, "bytes": 2**25}
        ).fetchall()
        return pages_of(list(nodes(plan[0]["Plan"])), "outbox")

    assert pages(ScanStart()) > 200
    assert pages(lane.floor.start()) < 20


async def test_executor_passes_over_a_long_transaction_and_comes_back_for_it(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Floor] = []

    def noted(*arguments: Any) -> Floor:
        made.append(Floor(*arguments))
        return made[-1]

    monkeypatch.setattr(batch_executors, "Floor", noted)
    bulk, store = connect(), Store()
    for _ in range(5):
        store.increment(bulk, "a")
    with node.connection.transaction():
        store.increment(node.connection, "b")
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        executor = batch_executors.BatchExecutor(connection, SCHEMA)
        assert [(await executor.execute()).taken for _ in range(2)] == [1, 0]
        assert made[0].start().position == 6
        bulk.commit()
        assert (await executor.execute()).taken == 5


def test_gaps_that_wait_for_the_same_are_one(node: Node, connect: Connect) -> None:
    lane, bulk = Lane(node), connect()
    send(bulk, "shipping")
    for _ in range(20):
        node.send("shipping")
        lane.turn()
    start = lane.floor.start()
    assert (len(start.gaps), start.position) == (1, 20)
    assert start.gaps[0][0] == lane.floor.value == 0
    bulk.rollback()
    node.send("shipping")
    lane.turn()
    lane.turn()
    assert lane.floor.start().gaps == ()
    assert lane.floor.value >= 21


def test_gap_is_not_made_before_every_writer_has_its_id(node: Node, connect: Connect) -> None:
    lane, slow = Lane(node), connect()
    node.send("shipping")
    assert [lane.turn() for _ in range(2)][-1] == 1
    # As between drawing a position and its first row. Drawn elsewhere: after a checkpoint drawing one takes an id.
    slow.execute("LOCK TABLE mailroom.outbox IN ROW EXCLUSIVE MODE")
    node.connection.execute("SELECT nextval('mailroom.outbox_position_seq')")
    node.send("shipping", key="fast")
    assert [lane.turn() for _ in range(4)][-1] == 1
    assert lane.floor.start() == ScanStart(1)
    slow.execute(
        "INSERT INTO mailroom.outbox (position, topic, key, value_json) OVERRIDING SYSTEM VALUE "
        "VALUES (2, 'shipping', 'slow', '1')"
    )
    assert [lane.turn() for _ in range(2)][-1] == 1
    assert lane.floor.start().position == 3
    slow.commit()
    assert lane.deliver().taken == 1


def test_floor_rises_past_a_writer_that_rolled_back(node: Node, connect: Connect) -> None:
    lane, writer = Lane(node), connect()
    send(writer, "shipping")
    node.send("shipping")
    assert lane.turn() == 0
    writer.rollback()
    assert [lane.turn() for _ in range(3)][-1] == 2


def test_floor_is_not_raised_by_a_delivery_that_began_before_the_last_writer_left(node: Node, connect: Connect) -> None:
    lane, slow = Lane(node), connect()
    send(slow, "shipping", key="slow")
    node.send("shipping", key="fast")
    lane.turn()
    too_early = lane.deliver()
    slow.commit()
    assert lane.raise_floor(too_early) == 0
    assert lane.turn() == 2
    assert node.waiting() == []
    assert node.delivered("key") == [("fast",), ("slow",)]


def test_floor_is_not_raised_by_a_full_batch_that_ends_below_the_goal(node: Node) -> None:
    lane = Lane(node)
    for _ in range(4):
        node.send("shipping")
    assert [lane.turn(rows=1) for _ in range(3)] == [0, 0, 0]
    assert lane.turn(rows=1) == 4


def test_writer_is_known_by_the_same_id_before_and_after_it_is_prepared(node: Node, connect: Connect) -> None:
    writer = connect(autocommit=True)
    writer.execute("BEGIN; SET LOCAL mailroom.notify = off")
    send(writer, "shipping")
    [(open_one, id)] = run(node.connection, reading_writers(SCHEMA, "outbox")).items()
    writer.execute("PREPARE TRANSACTION 'named'")
    prepared = run(node.connection, reading_writers(SCHEMA, "outbox"))
    assert list(prepared.values()) == [id]
    assert remaining({open_one: id}, prepared) == prepared
    assert remaining({open_one: None}, prepared) == prepared
    assert remaining({"9/9": 7}, prepared) == {}
    writer.execute("ROLLBACK PREPARED 'named'")
    assert run(node.connection, reading_writers(SCHEMA, "outbox")) == {}


def test_writers_of_other_tables_and_nodes_and_readers_are_none(node: Node, connect: Connect) -> None:
    reader, other = connect(), connect()
    reader.execute("SELECT FROM mailroom.outbox")
    other.execute("CREATE TABLE own (id int)")
    other.execute("INSERT INTO own VALUES (1)")
    assert run(node.connection, reading_writers(SCHEMA, "outbox")) == {}


async def test_row_written_below_the_floor_is_found_by_the_scan_of_every_minute(node: Node) -> None:
    seconds = 0.0
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        deliverer = Deliverer(connection, SCHEMA, monotonic=lambda: seconds)
        for _ in range(3):
            node.send("shipping")
            await deliverer.deliver()
        node.connection.execute(
            "INSERT INTO mailroom.outbox (position, topic, value_json) OVERRIDING SYSTEM VALUE "
            "VALUES (1, 'shipping', '1')"
        )
        assert await deliverer.drain() == 0
        seconds = FULL_SCAN_S + 1
        assert await deliverer.drain() == 1


async def test_deliverer_that_met_an_error_scans_from_the_start(node: Node) -> None:
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        deliverer = Deliverer(connection, SCHEMA)
        for _ in range(3):
            node.send("shipping")
            await deliverer.deliver()
        node.connection.execute(
            "INSERT INTO mailroom.outbox (position, topic, value_json) OVERRIDING SYSTEM VALUE "
            "VALUES (1, 'shipping', '1')"
        )
        await connection.execute("SET lock_timeout = '1ms'")
        with node.connection.transaction():
            node.connection.execute("LOCK mailroom.outbox")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await deliverer.deliver()
        await connection.execute("RESET lock_timeout")
        assert await deliverer.drain() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_stuck_below_the_floor_whatever_fourteen_writers_do(node: Node, connect: Connect, seed: int) -> None:
    """Every statement of writers and dispatcher is one step; a seeded choice says whose comes next."""
    chosen = random.Random(seed)
    lane = Lane(node)
    writers = [connect(autocommit=True) for _ in range(14)]
    sent: dict[int, list[str]] = {}  # of each open writer
    prepared: dict[str, list[str]] = {}
    committed: list[list[str]] = []
    count = 0
    floor_seen: set[int] = set()

    def begin_or_send(nth: int) -> None:
        nonlocal count
        if nth not in sent:
            writers[nth].execute("BEGIN; SET LOCAL mailroom.notify = off")
            sent[nth] = []
        count += 1
        send(writers[nth], "shipping", key=f"{count}")
        sent[nth].append(f"{count}")

    def savepoint(nth: int) -> None:
        if nth in sent:
            writers[nth].execute("SAVEPOINT s")
            send(writers[nth], "shipping", key="never")
            writers[nth].execute("ROLLBACK TO s")

    def commit(nth: int) -> None:
        if nth in sent:
            writers[nth].execute("COMMIT")
            committed.append(sent.pop(nth))

    def roll_back(nth: int) -> None:
        if nth in sent:
            writers[nth].execute("ROLLBACK")
            del sent[nth]

    def prepare(nth: int) -> None:
        nonlocal count
        if nth in sent and len(prepared) < 3:
            count += 1
            writers[nth].execute(f"PREPARE TRANSACTION 'seed{seed}-{count}'".encode())
            prepared[f"seed{seed}-{count}"] = sent.pop(nth)

    def end_prepared(nth: int) -> None:
        if prepared and nth not in sent:
            gid = chosen.choice(sorted(prepared))
            writers[nth].execute(f"COMMIT PREPARED '{gid}'".encode())
            committed.append(prepared.pop(gid))

    actions = [begin_or_send, begin_or_send, begin_or_send, commit, commit, savepoint, roll_back, prepare, end_prepared]
    hurried = range(4, 14)  # the first four stay open for long

    def writers_act() -> None:
        for _ in range(chosen.randrange(4)):
            action = chosen.choice(actions)
            nth = chosen.choice(hurried if action is commit and chosen.random() < 0.9 else range(14))
            action(nth)

    for _ in range(150):
        writers_act()
        delivery = lane.deliver(rows=chosen.choice([1, 3, 10_000]))
        assert delivery.more or node.waiting() == [], "a delivery left something that it could see"
        writers_act()
        floor_seen.add(lane.raise_floor(delivery, writers_act))
    for nth in list(sent):
        commit(nth)
    while prepared:
        end_prepared(0)
    while lane.deliver().taken:
        pass
    assert node.waiting() == [], f"stuck below the floor {lane.floor.value}"
    delivered = [key for (key,) in node.delivered("key")]
    assert sorted(delivered) == sorted(key for keys in committed for key in keys)
    place = {key: nth for nth, key in enumerate(delivered)}
    assert all([place[key] for key in keys] == sorted(place[key] for key in keys) for keys in committed)
    assert len(floor_seen) > 3, "the floor hardly ever rose, so this run says little"


# -- The look on the way to sleep -------------------------------------------------------------------------------------


@pytest.fixture
async def dispatcher(node: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        yield connection


async def test_drain_of_the_rest_does_not_deliver_if_nothing_is_left(
    node: Node, dispatcher: psycopg.AsyncConnection
) -> None:
    deliveries: list[Delivery] = []
    deliverer = Deliverer(dispatcher, SCHEMA, progress=deliveries.append)
    assert await deliverer.drain_rest() == 0
    assert len(deliveries) == 1, "the first one recovers the clock"
    assert await deliverer.drain_rest() == 0
    assert len(deliveries) == 1
    node.send("shipping")
    assert await deliverer.drain_rest() == 1


async def test_look_finds_what_a_long_transaction_has_left_below_the_floor(
    node: Node, dispatcher: psycopg.AsyncConnection, connect: Connect
) -> None:
    bulk, deliverer = connect(), Deliverer(dispatcher, SCHEMA)
    send(bulk, "shipping")
    for _ in range(4):
        node.send("shipping")
        await deliverer.deliver()
    assert await deliverer.drain_rest() == 0
    bulk.commit()
    assert await deliverer.drain_rest() == 1


async def test_look_leaves_the_full_scan_to_the_next_delivery(node: Node, dispatcher: psycopg.AsyncConnection) -> None:
    now = 0.0
    deliverer = Deliverer(dispatcher, SCHEMA, monotonic=lambda: now)
    for _ in range(4):
        node.send("shipping")
        await deliverer.deliver()
    node.connection.execute(
        "INSERT INTO mailroom.outbox (position, topic, value_json) OVERRIDING SYSTEM VALUE VALUES (1, 'shipping', '1')"
    )
    now += FULL_SCAN_S
    await deliverer.drain_rest()
    assert node.waiting() != []
    assert (await deliverer.deliver()).taken == 1


async def test_look_does_not_pass_over_a_reader_that_asks_for_a_mark(
    node: Node, dispatcher: psycopg.AsyncConnection
) -> None:
    deliveries: list[Delivery] = []
    deliverer = Deliverer(dispatcher, SCHEMA, progress=deliveries.append)
    node.allow_clocks()
    await deliverer.deliver()
    node.connection.execute("INSERT INTO mailroom.link (name, wanted_clock) VALUES ('lyon', 700)")
    await deliverer.drain_rest()
    assert [delivery.is_mark_wanted for delivery in deliveries] == [False, True]
    assert node.value("SELECT kind::text FROM mailroom.transit") == "H"
