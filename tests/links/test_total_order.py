"""A total inbox: one queue by (sent_clock, origin), that one transaction at a time works on, on one node."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.housekeeping.janitor import Janitor
from dispatcher.housekeeping.total_floor import STEP
from inbox import AsyncInbox, AsyncWorker, Inbox, Message, Skip, Worker
from inbox.by_key.claim import PINNED, Share
from inbox.by_key.failure import failed
from inbox.keeping import keeping
from inbox.order import finding_in_parts
from inbox.parked import Parked
from inbox.total_order.total_claim import REAP, reaping_total, reaping_total_due
from inbox.total_order.total_order import TotalOrder
from inbox.worker.in_flight import Entry, InFlight
from mailroom import create_inbox
from mailroom.errors import ConfigurationError
from mailroom.node.dead_letter import DeadLetters
from mailroom.node.status import status
from mailroom.node.trace import trace
from mailroom.sql.runner import run
from mailroom.testing import work
from outbox import Outbox, Outgoing
from tests.interleavings.sessions import sessions
from tests.support.command import done
from tests.support.databases import Connect
from tests.support.explain import nodes
from tests.support.node import SCHEMA, Node
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import eventually, eventually_async
from tests.support.working import LEDGER, NEVER_S, is_asleep, working, working_async, write_ledger

INBOX = Inbox("ledger")
ORDER = TotalOrder(SCHEMA, "ledger")


@pytest.fixture
def ledger(source: Node) -> Node:
    """A node with the total inbox `ledger`."""
    source.inbox("ledger", order="total", backoff_s=0, max_attempts=3)
    source.allow_clocks()
    return source


def fill(node: Node, messages: int = 9) -> None:
    """Deliver the values 0, 1, ... to `ledger`, of three keys in turns."""
    with node.connection.transaction():
        Outbox().send_many(node.connection, [Outgoing("ledger", nth, key=f"k{nth % 3}") for nth in range(messages)])
    node.deliver()


def place(node: Node, *rows: tuple[int, int, UUID], stable: int | None = None) -> None:
    """Put messages into `ledger` as received ones: clock, sent_clock and origin of each; the value is the clock."""
    for clock, sent_clock, origin in rows:
        node.connection.execute(
            "INSERT INTO mailroom.inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, "
            "value_json, sent_at) VALUES ('ledger', %s, %s, %s, gen_random_uuid(), 'ledger', %s, 'M', 'U', %s, now())",
            [clock, sent_clock, origin, f"k{clock % 3}", str(clock)],
        )
    if stable is not None:
        node.connection.execute("INSERT INTO mailroom.stable VALUES ('ledger', %s)", [stable])


def values(messages: Iterable[Message]) -> list[Any]:
    return [message.value for message in messages]


def reaped(node: Node, most: int = 100) -> list[Any]:
    with node.connection.transaction():
        return values(INBOX.reap_any(node.connection, most, 1))


def due(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.key_state SET retry_at = now() - interval '1 hour' WHERE key = ''")


def fail_first(node: Node, error: Exception | None = None) -> str:
    """Record a failure of the first message; the inbox then waits for a long time, unless it ends."""
    with node.connection.transaction():
        [message] = INBOX.peek(node.connection, limit=1)
        outcome: str = run(node.connection, failing_total(message, error or ValueError("no")))
        node.connection.execute(
            "UPDATE mailroom.key_state SET retry_at = now() + interval '1 hour' WHERE retry_at < 'infinity'"
        )
    return outcome


def failing_total(message: Message, error: Exception) -> Any:
    """Record a failure as a worker does; what has used up its attempts ends at the next claim."""
    recorded = yield from ORDER.recording(failed(message, error))
    if recorded.outcome in ("park", "skip"):
        assert (yield from reaping_total_due(SCHEMA, "ledger")).ended is not None
    return recorded.outcome


# -- Order ------------------------------------------------------------------------------------------------------------


def test_messages_come_in_one_order_whatever_their_keys(ledger: Node) -> None:
    fill(ledger)
    with ledger.connection.transaction():
        assert values(INBOX.reap_any(ledger.connection, 1, 4)) == [0, 1, 2, 3]
        assert values(INBOX.reap_any(ledger.connection, 2, 1)) == [4, 5]
    assert reaped(ledger) == [6, 7, 8]
    assert reaped(ledger) == []


def test_order_is_by_sent_clock_and_origin_and_not_by_clock(ledger: Node) -> None:
    low, high = sorted([uuid4(), uuid4()])
    place(ledger, (1, 30, low), (2, 10, high), (3, 20, high), (4, 20, low), (5, 10, low), stable=30)
    assert values(INBOX.peek(ledger.connection)) == [5, 2, 4, 3, 1]
    assert values(INBOX.peek(ledger.connection, "k1")) == [4, 1]
    assert reaped(ledger, 2) == [5, 2]
    assert reaped(ledger) == [4, 3, 1]


def test_nothing_above_what_is_stable_is_given_out(ledger: Node) -> None:
    place(ledger, (1, 10, uuid4()), (2, 20, uuid4()))
    assert reaped(ledger) == []
    place(ledger, stable=19)
    assert reaped(ledger) == [1]
    place(ledger, stable=20)
    assert reaped(ledger) == [2]


def test_claim_is_bounded_by_the_size_of_values_in_this_order(ledger: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = uuid4()
    place(ledger, (1, 30, origin), (2, 20, origin), (3, 10, origin), stable=30)
    ledger.connection.execute(
        "UPDATE mailroom.inbox SET value_json = NULL, value = convert_to(repeat('x', 16777216), 'UTF8')"
    )
    clocks = []
    while True:
        with ledger.connection.transaction():
            claimed = run(ledger.connection, reaping_total(SCHEMA, "ledger", Share(1, 10, 10)))
        if not claimed.messages:
            break
        clocks.append([message.clock for message in claimed.messages])
    assert clocks == [[3, 2], [1]]


# -- One at a time ----------------------------------------------------------------------------------------------------


def test_one_transaction_at_a_time_has_the_inbox_and_nobody_waits(ledger: Node) -> None:
    fill(ledger)
    with sessions(ledger.dsn, ledger.connection, "first", "second") as opened:
        first, second = opened["first"].connection, opened["second"].connection
        assert values(INBOX.reap_any(first, 2, 1)) == [0, 1]
        assert opened["second"].start(lambda connection: INBOX.reap_any(connection))
        assert INBOX.reap_any(second) == []
        first.rollback()
        assert values(INBOX.reap_any(second, 3, 1)) == [0, 1, 2]
        assert INBOX.reap_any(first) == []
        second.commit()
        assert values(INBOX.reap_any(first, 1, 1)) == [3]
        first.commit()


@pytest.mark.parametrize("is_held", [True, False], ids=["held by another", "nothing there"])
def test_claim_that_gets_nothing_leaves_the_caller_s_settings(ledger: Node, connect: Connect, is_held: bool) -> None:
    if is_held:
        fill(ledger)
        assert INBOX.reap_any(connect())
    connection = connect()
    connection.execute("SET LOCAL enable_bitmapscan = off")
    for _ in range(2):
        assert INBOX.reap_any(connection) == []
        names = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "jit")
        shown = [connection.execute(f"SHOW {name}".encode()).fetchall() for name in names]
        assert shown == [[("on",)], [("off",)], [("on",)], [("on",)]]


def test_rolled_back_savepoint_gives_the_inbox_back(ledger: Node) -> None:
    fill(ledger)
    with sessions(ledger.dsn, ledger.connection, "first", "second") as opened:
        first, second = opened["first"].connection, opened["second"].connection
        first.execute("SELECT 1")
        with first.transaction(force_rollback=True):
            INBOX.reap_any(first)
        assert values(INBOX.reap_any(second, 1, 1)) == [0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_older_snapshot_gets_40001_and_nothing_out_of_order(
    ledger: Node, connect: Connect, level: psycopg.IsolationLevel
) -> None:
    fill(ledger)
    old = connect()
    old.set_isolation_level(level)
    old.execute("SELECT count(*) FROM mailroom.inbox")
    assert reaped(ledger, 2) == [0, 1]
    with pytest.raises(psycopg.errors.SerializationFailure):
        INBOX.reap_any(old)
    old.rollback()
    assert values(INBOX.reap_any(old, 1, 1)) == [2]


def test_one_at_a_time_also_behind_a_transaction_pooler(ledger: Node, server_home: Path) -> None:
    fill(ledger)
    with pgbouncer(ledger.dsn, server_home) as url, sessions(url, ledger.connection, "first", "second") as opened:
        first, second = opened["first"].connection, opened["second"].connection
        first.prepare_threshold = second.prepare_threshold = None
        assert values(INBOX.reap_any(first, 2, 1)) == [0, 1]
        assert INBOX.reap_any(second) == []
        first.commit()
        assert values(INBOX.reap_any(second, 1, 1)) == [2]
        second.rollback()
        assert values(INBOX.reap_any(first, 1, 1)) == [2]


def test_claim_is_in_the_way_of_no_delivery_and_no_janitor(ledger: Node) -> None:
    fill(ledger, 2 * STEP)
    assert len(reaped(ledger, STEP + 10)) == STEP + 10
    with sessions(ledger.dsn, ledger.connection, "first") as opened:
        INBOX.reap_any(opened["first"].connection, 1, 1)
        janitor(ledger)
        assert ledger.value("SELECT sent_floor >= %s AND floor >= %s FROM mailroom.inbox_registry", STEP, STEP)
        fill(ledger, 1)
    assert ledger.value("SELECT count(*) FROM mailroom.inbox") == STEP - 10 + 1


def test_key_cannot_be_reaped_by_itself(ledger: Node) -> None:
    fill(ledger)
    with ledger.connection.transaction(), pytest.raises(ConfigurationError, match="reap_any"):
        INBOX.reap(ledger.connection, "k1")
    assert INBOX.backlog(ledger.connection) == 9
    assert INBOX.backlog(ledger.connection, "k1") == 3


async def test_async_inbox_has_the_same_order(ledger: Node) -> None:
    fill(ledger)
    inbox = AsyncInbox("ledger")
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as connection:
        assert values(await inbox.reap_any(connection, 4, 1)) == [0, 1, 2, 3]
        with pytest.raises(ConfigurationError):
            await inbox.reap(connection, "k1")


# -- Failure ----------------------------------------------------------------------------------------------------------


def test_failing_message_holds_up_the_whole_inbox_until_it_is_due(ledger: Node) -> None:
    fill(ledger)
    assert fail_first(ledger) == "retry"
    assert ledger.rows("SELECT key, attempts, suspect_to = 1 FROM mailroom.key_state") == [("", 1, True)]
    with ledger.connection.transaction():
        claimed = run(ledger.connection, reaping_total(SCHEMA, "ledger", Share(9, 9, 9)))
        assert claimed.messages == []
        assert 3_500 < (claimed.due_in_s or 0) <= 3_600
        assert run(ledger.connection, reaping_total_due(SCHEMA, "ledger")).messages == []
    due(ledger)
    assert reaped(ledger, 3) == [0, 1, 2]
    assert ledger.rows("SELECT FROM mailroom.key_state") == []


def test_failing_inbox_is_tried_one_message_at_a_time_up_to_the_failed_one(ledger: Node) -> None:
    fill(ledger)
    tried: list[int] = []
    failed: list[int] = []

    def handler(message: Message, _: object) -> None:
        tried.append(message.value)
        if message.value == 4 and len(failed) < 2:
            failed.append(message.value)
            raise ValueError("no")

    with working(Worker(ledger.dsn, "ledger", handler, poll_interval_s=0.05)):
        eventually(lambda: 8 in tried)
    # A batch that fails at 4; then 0 to 3 one by one, and 4, which fails again.
    assert tried == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_attempts_count_to_the_end_and_park_the_inbox(ledger: Node) -> None:
    fill(ledger)
    assert [fail_first(ledger) for _ in range(3)] == ["retry", "retry", "park"]
    assert reaped(ledger) == []
    fill(ledger, 1)
    assert reaped(ledger) == []
    [found] = Parked("ledger").keys(ledger.connection)
    assert (found.key, found.messages, found.clock, found.attempts, found.reason) == ("", 10, 1, 3, "ValueError: no")
    assert values(Parked("ledger").messages(ledger.connection, limit=3)) == [0, 1, 2]
    assert [each.outcome for each in Parked("ledger").attempts(ledger.connection)] == ["park", "retry", "retry"]
    janitor(ledger)
    assert ledger.value("SELECT count(*) FROM mailroom.inbox_ledger") == 10, "they stay where they are"
    [message] = INBOX.peek(ledger.connection, limit=1)
    [found_there] = trace(ledger.connection, message.id)
    assert (found_there.where, found_there.reason) == ("parked", "ValueError: no")
    assert (status(ledger.connection).inboxes[0].parked_keys, status(ledger.connection).inboxes[0].backlog) == (1, 10)


def test_trace_counts_all_that_stand_before_a_message_whatever_their_keys(ledger: Node) -> None:
    low, high = sorted([uuid4(), uuid4()])
    place(ledger, (1, 30, low), (2, 20, high), (3, 20, low), (4, 10, high), stable=30)
    ids = [message.id for message in INBOX.peek(ledger.connection)]
    found = [each for id in ids for each in trace(ledger.connection, id)]
    assert [(each.clock, each.ahead, each.is_one_queue) for each in found] == [
        (4, 0, True), (3, 1, True), (2, 2, True), (1, 3, True)
    ]  # fmt: skip
    assert ", 3 before it (topic" in done("trace", str(ids[3]), dsn=ledger.dsn)
    assert fail_first(ledger) == "retry"
    assert "; the inbox failed 1 times" in done("trace", str(ids[0]), dsn=ledger.dsn)
    for _ in range(2):
        fail_first(ledger)
    text = done("trace", str(ids[3]), dsn=ledger.dsn)
    assert ", 3 before it (topic" in text
    assert "; the inbox is parked" in text


def test_parked_inbox_is_replayed_in_its_order_and_attempts_count_anew(ledger: Node) -> None:
    fill(ledger)
    for _ in range(3):
        fail_first(ledger)
    with ledger.connection.transaction():
        changed = Parked("ledger").replay(ledger.connection, None, actor="ada", why="mended")
    assert (changed.keys, changed.messages, changed.freed) == (1, 9, 1)
    assert ledger.rows("SELECT inbox, key, messages, reason FROM mailroom.audit") == [("ledger", "", 9, "mended")]
    assert fail_first(ledger) == "retry"
    due(ledger)
    assert reaped(ledger) == list(range(9))


def test_first_messages_of_a_parked_inbox_are_discarded_in_its_order(ledger: Node) -> None:
    origin = uuid4()
    place(ledger, (1, 30, origin), (2, 20, origin), (3, 10, origin), stable=30)
    for _ in range(3):
        fail_first(ledger)
    with ledger.connection.transaction():
        changed = Parked("ledger").discard(ledger.connection, None, actor="ada", per_key=1)
        assert (changed.keys, changed.messages, changed.freed) == (1, 1, 0)
        assert reaped(ledger) == []
        Parked("ledger").replay(ledger.connection, None, actor="ada")
    assert reaped(ledger, 1) == [2]
    for _ in range(3):
        fail_first(ledger)
    with ledger.connection.transaction():
        assert Parked("ledger").discard(ledger.connection, None, actor="ada").freed == 1
    assert ledger.rows("SELECT FROM mailroom.key_state UNION ALL SELECT FROM mailroom.inbox") == []


def test_parked_inbox_takes_no_keys(ledger: Node) -> None:
    with ledger.connection.transaction():
        with pytest.raises(ConfigurationError, match="as a whole"):
            Parked("ledger").replay(ledger.connection, "k1", actor="ada")
        with pytest.raises(ConfigurationError, match="as a whole"):
            Parked("ledger").messages(ledger.connection, "k1")


def test_claim_with_a_snapshot_from_before_the_parking_gets_40001(ledger: Node, connect: Connect) -> None:
    fill(ledger)
    old = connect()
    old.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    old.execute("SELECT count(*) FROM mailroom.inbox")
    assert [fail_first(ledger) for _ in range(3)][-1] == "park"
    with pytest.raises(psycopg.errors.SerializationFailure):
        INBOX.reap_any(old)


def test_skipped_message_goes_alone_and_the_others_go_on(ledger: Node) -> None:
    fill(ledger)
    assert fail_first(ledger, Skip("bad one")) == "skip"
    assert ledger.rows("SELECT stage, reason, inbox, clock, sent_clock FROM mailroom.dead_letter") == [
        ("reap", "bad one", "ledger", 1, 1)
    ]
    assert reaped(ledger) == list(range(1, 9))


def test_dead_letter_does_not_go_back_into_a_total_inbox(ledger: Node) -> None:
    fill(ledger)
    fail_first(ledger, Skip("bad one"))
    with ledger.connection.transaction(), pytest.raises(ConfigurationError, match="anew"):
        DeadLetters().requeue(ledger.connection, None, actor="ada")
    with ledger.connection.transaction():
        assert DeadLetters().discard(ledger.connection, None, actor="ada") == 1


def test_batch_of_which_nobody_knows_what_failed_is_tried_one_by_one(ledger: Node) -> None:
    origin = uuid4()
    place(ledger, (1, 30, origin), (2, 20, origin), (3, 10, origin), (4, 40, origin), stable=40)
    with ledger.connection.transaction():
        run(ledger.connection, ORDER.suspecting(["k0", "k2", "k1"], [3, 2, 1], "died"))
    assert ledger.rows("SELECT key, clock, suspect_to FROM mailroom.key_state") == [("", 1, 30)]
    tried: list[Any] = []
    with working(Worker(ledger.dsn, "ledger", lambda message, _: tried.append(message.value), poll_interval_s=0.05)):
        eventually(lambda: 4 in tried)
    assert tried == [3, 2, 1, 4]
    assert ledger.rows("SELECT FROM mailroom.key_state") == []


def test_dead_worker_counts_against_the_inbox_as_a_whole(ledger: Node) -> None:
    fill(ledger, 3)
    [first] = INBOX.peek(ledger.connection, limit=1)
    watching = InFlight(ledger.dsn, SCHEMA, "ledger")
    with ledger.connection.transaction():
        run(ledger.connection, watching._blaming("worker 1", [first.key], [first.clock], 1, first.id))
    assert ledger.rows("SELECT key, attempts, clock FROM mailroom.key_state") == [("", 1, 1)]
    with ledger.connection.transaction():
        run(ledger.connection, watching._blaming("worker 1", ["k0", "k1", "k2"], [1, 2, 3], 3, first.id))
    assert ledger.rows("SELECT key, suspect_to FROM mailroom.key_state") == [("", 3)]
    watching.close()


def test_no_worker_works_on_the_inbox_of_a_dead_one_until_its_death_is_counted(ledger: Node, connect: Connect) -> None:
    fill(ledger, 2)
    worker, entry, batch = InFlight(ledger.dsn, SCHEMA, "ledger"), Entry(), connect()

    def die(due: bool = False) -> None:
        claiming = reaping_total_due(SCHEMA, "ledger") if due else reaping_total(SCHEMA, "ledger", Share(9, 9, 9))
        worker.add(entry, run(batch, claiming).messages)
        worker._sender.settle()
        batch.rollback()

    def claimed(*mine: UUID, due: bool = False) -> list[Any]:
        share = Share(9, 9, 9, due_too=False, hold=True, mine=mine)
        claiming = reaping_total(SCHEMA, "ledger", share)
        with ledger.connection.transaction(force_rollback=True):
            if due:
                claiming = reaping_total_due(SCHEMA, "ledger", hold=True, mine=mine)
            taken = values(run(ledger.connection, claiming).messages)
            ledger.connection.execute("CLOSE ALL")
        return taken

    die()
    assert claimed() == []
    assert claimed(entry.id) == [0, 1]
    with ledger.connection.transaction():
        run(ledger.connection, worker._blaming("worker 1", ["k0", "k1"], [1, 2], 2, uuid4()))
    die(due=True)
    assert claimed(due=True) == []
    worker.remove(entry)
    worker.close()
    assert claimed(due=True) == [0]


def test_failure_of_a_message_that_is_gone_holds_nobody_up(ledger: Node) -> None:
    fill(ledger, 2)
    [message] = INBOX.peek(ledger.connection, limit=1)
    with sessions(ledger.dsn, ledger.connection, "holder") as opened:
        assert values(INBOX.reap_any(opened["holder"].connection, 1, 1)) == [0]
        with ledger.connection.transaction():
            run(ledger.connection, failing_total(message, ValueError("late")))
        opened["holder"].connection.commit()
    due(ledger)
    handled: list[Any] = []
    with working(Worker(ledger.dsn, "ledger", lambda message, _: handled.append(message.value), poll_interval_s=0.05)):
        eventually(lambda: handled == [1] and not ledger.rows("SELECT FROM mailroom.key_state"))


def test_stale_failure_of_an_empty_inbox_is_forgotten(ledger: Node) -> None:
    ledger.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, alone_to, suspect_to) "
        "VALUES ('ledger', '', 5, 1, now(), 5, 5)"
    )
    janitor(ledger)
    assert ledger.value("SELECT count(*) FROM mailroom.key_state") == 1, "the janitor leaves it to the claims"
    with ledger.connection.transaction():
        assert run(ledger.connection, reaping_total_due(SCHEMA, "ledger")).messages == []
    assert ledger.value("SELECT count(*) FROM mailroom.key_state") == 0


# -- Workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_workers_handle_all_in_one_order_though_batches_roll_back(ledger: Node) -> None:
    ledger.connection.execute(LEDGER)
    fill(ledger, 400)
    failed: set[int] = set()

    def handler(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.clock % 37 == 0 and message.clock not in failed:
            failed.add(message.clock)
            raise ValueError("once")

    done = "SELECT count(*) FROM ledger"
    workers = [Worker(ledger.dsn, "ledger", handler, parallel=2, batch=20, poll_interval_s=0.05) for _ in range(5)]
    with working(workers[0]), working(workers[1]), working(workers[2]), working(workers[3]), working(workers[4]):
        fill(ledger, 100)
        eventually(lambda: ledger.value(done) == 500)
    assert len(failed) == 13
    rows = ledger.rows("SELECT clock, xact::text::bigint FROM ledger ORDER BY nth")
    assert [clock for clock, _ in rows] == list(range(1, 501)), "in order, also with what was rolled back"


async def test_async_worker_wakes_when_something_is_delivered(ledger: Node) -> None:
    handled: list[Any] = []

    async def handler(message: Message, _: object) -> None:
        handled.append(message.value)

    async with working_async(AsyncWorker(ledger.dsn, "ledger", handler, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(ledger))
        fill(ledger)
        await eventually_async(lambda: handled == list(range(9)))


def test_testing_handles_a_total_inbox_as_a_worker_would(ledger: Node) -> None:
    fill(ledger, 4)
    handled: list[Any] = []

    def handler(message: Message, _: object) -> None:
        if message.value == 1:
            raise Skip("not this one")
        handled.append(message.value)

    with ledger.connection.transaction():
        work(ledger.connection, "ledger", handler)
    assert handled == [0, 2, 3]


# -- What keeps it fast -----------------------------------------------------------------------------------------------


def janitor(node: Node) -> None:
    async def once() -> None:
        async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
            worked = Janitor(SCHEMA)
            worked.watch(["ledger"])
            await worked.run_once(connection)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(once())).result()


def test_plan_of_a_claim_is_an_index_scan_in_order_whatever_the_inbox_holds(ledger: Node, connect: Connect) -> None:
    ledger.connection.execute("ANALYZE")
    connection = connect()
    for setting, value in PINNED.items():
        connection.execute("SELECT set_config(%s, %s, true)", [setting, value])
    names = {"but_orphaned": "", "rows": "100", "held": "false", "due": "0", "schema": SCHEMA, "inbox": "ledger"}
    names |= keeping(False)
    [(plan,)] = connection.execute(b"EXPLAIN (FORMAT json) " + REAP.at(**names).sql.encode()).fetchall()
    found = [node for node in nodes(plan[0]["Plan"]) if node.get("Relation Name") == "inbox_ledger"]
    kinds = {(node["Node Type"], node.get("Index Name")) for node in found}
    assert ("Index Scan", "order_of_ledger") in kinds
    assert "Seq Scan" not in {kind for kind, _ in kinds}


@pytest.mark.slow
def test_claims_beside_a_hundred_thousand_waiting_and_a_held_snapshot_stay_fast(ledger: Node, connect: Connect) -> None:
    held = connect()
    held.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    held.execute("SELECT count(*) FROM mailroom.inbox")
    ledger.connection.execute(
        "INSERT INTO mailroom.inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, "
        "value_json, sent_at) SELECT 'ledger', n, n, gen_random_uuid(), gen_random_uuid(), 'ledger', 'k' || n % 100, "
        "'M', 'U', '1', now() FROM generate_series(1, 100000) AS n"
    )
    ledger.connection.execute("SELECT setval('mailroom.clock', 100000)")
    place(ledger, stable=100_000)
    read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'order_of_ledger'"
    for _ in range(3):
        assert len(reaped(ledger, 10_000)) == 10_000
        janitor(ledger)
    assert ledger.value("SELECT sent_floor FROM mailroom.inbox_registry") == 30_000
    # A session hands in what it has read before it is gone.
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid NOT IN (%s, %s)"
    ours = (held.info.backend_pid, ledger.connection.info.backend_pid)
    eventually(lambda: ledger.value(others, *ours) == 0)
    ledger.connection.execute("SELECT pg_stat_force_next_flush()")
    before = ledger.value(read)
    for _ in range(10):
        assert len(reaped(ledger, 1)) == 1
    ledger.connection.execute("SELECT pg_stat_force_next_flush()")
    assert ledger.value(read) - before < 1_000
    held.rollback()


def test_floor_passes_no_message_that_is_being_reaped(ledger: Node) -> None:
    fill(ledger, 3 * STEP)
    assert len(reaped(ledger, STEP + 10)) == STEP + 10
    with sessions(ledger.dsn, ledger.connection, "first") as opened:
        assert len(INBOX.reap_any(opened["first"].connection, STEP, 1)) == STEP
        janitor(ledger)
        assert ledger.value("SELECT sent_floor FROM mailroom.inbox_registry") == STEP + 10
        opened["first"].connection.rollback()
    assert reaped(ledger, 1) == [STEP + 10]


def test_only_the_newest_of_stable_is_kept_and_always_kept(ledger: Node) -> None:
    for _ in range(5):
        fill(ledger, 1)
    assert ledger.rows("SELECT clock FROM mailroom.stable ORDER BY clock") == [(1,), (2,), (3,), (4,), (5,)]
    janitor(ledger)
    assert ledger.rows("SELECT clock FROM mailroom.stable") == [(5,)]
    janitor(ledger)
    assert ledger.rows("SELECT clock FROM mailroom.stable") == [(5,)]


def test_delivery_that_brings_it_nothing_writes_nothing_for_a_total_inbox(ledger: Node) -> None:
    ledger.inbox("other")
    ledger.send("other")
    ledger.deliver()
    assert ledger.rows("SELECT FROM mailroom.stable") == []


def test_node_without_total_inboxes_is_not_asked_for_more(source: Node) -> None:
    source.inbox("other")
    source.allow_clocks()
    source.send("other")
    delivery = source.deliver()
    assert (delivery.taken, delivery.has_bounds, delivery.is_mark_wanted) == (1, False, False)


# -- Settings ---------------------------------------------------------------------------------------------------------


def test_order_is_chosen_when_the_inbox_is_created(ledger: Node) -> None:
    ledger.inbox("plain")
    for name, order in (("ledger", "key"), ("plain", "total")):
        with pytest.raises(ConfigurationError, match="exists"), ledger.connection.transaction():
            create_inbox(ledger.connection, name, order=order)  # type: ignore[arg-type]
    ledger.inbox("ledger", max_attempts=5)
    with pytest.raises(ConfigurationError, match="expire_s"):
        ledger.inbox("ledger", expire_s=60)
    with pytest.raises(ConfigurationError, match="order"):
        ledger.inbox("third", order="none")
    assert ledger.rows('SELECT name, "order" FROM mailroom.inbox_registry ORDER BY name') == [
        ("ledger", "total"), ("plain", "key")
    ]  # fmt: skip
    assert not ledger.rows("SELECT FROM pg_class WHERE relname = 'order_of_plain'")


def test_spark_refuses_a_total_inbox(ledger: Node) -> None:
    with pytest.raises(ConfigurationError, match="total order"):
        run(ledger.connection, finding_in_parts(SCHEMA, "ledger"))
