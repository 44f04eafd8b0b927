"""The doorbell: it rings only while the dispatcher sleeps, and leaves no message to the poll."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from types import GeneratorType
from typing import Any, cast

import psycopg
import pytest

from dispatcher.delivery.deliver import releasing
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.executor.execution import Execution
from dispatcher.lanes import doorbell as doorbells
from dispatcher.lanes.doorbell import UNSURE_POLL_S, Doorbell
from dispatcher.lanes.lane import to_do
from mailroom.session.listener import Listener, heard
from mailroom.sql import locks
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run, run_async
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node, send
from tests.support.waiting import WITHIN_S, eventually_async

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping")]

NEVER_S = math.inf  # a poll that no test lives to see, and that no pause reaches by doubling
OUTBOX = "'mailroom.outbox'::regclass"
HOLD_AWAKE = f"SELECT pg_try_advisory_lock({locks.AWAKE}, {locks.key(OUTBOX)})"
RELEASE = HOLD_AWAKE.replace("pg_try_advisory_lock", "pg_advisory_unlock")


# -- The trigger ------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(node: Node, connect: Connect) -> psycopg.Connection[Any]:
    connection = connect(autocommit=True)
    channel = node.value(f"SELECT {locks.channel(OUTBOX)}")
    connection.execute(f'LISTEN "{channel}"'.encode())
    return connection


def rings(listener: psycopg.Connection[Any]) -> int:
    # A notification of a commit that was answered is in the server's queue: this statement's answer comes after it.
    listener.execute("SELECT 1")
    return len(list(listener.notifies(timeout=0)))


def test_commit_rings_while_nobody_is_awake(node: Node, listener: psycopg.Connection[Any]) -> None:
    node.send("shipping")
    assert rings(listener) == 1


def test_bell_says_nothing_of_the_message(node: Node, listener: psycopg.Connection[Any]) -> None:
    node.send("shipping", "secret")
    assert [notify.payload for notify in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [""]


def test_commit_does_not_ring_while_a_dispatcher_is_awake(
    node: Node, listener: psycopg.Connection[Any], connect: Connect
) -> None:
    awake = connect(autocommit=True)
    awake.execute(HOLD_AWAKE)
    node.send("shipping")
    assert rings(listener) == 0
    awake.execute(RELEASE)
    node.send("shipping")
    assert rings(listener) == 1


def test_bell_can_be_turned_off_for_a_transaction(node: Node, listener: psycopg.Connection[Any]) -> None:
    with node.connection.transaction():
        node.connection.execute("SET LOCAL mailroom.notify = off")
        send(node.connection, "shipping")
    assert rings(listener) == 0
    node.send("shipping")
    assert rings(listener) == 1


def test_transaction_with_the_bell_off_can_be_prepared(node: Node, connect: Connect) -> None:
    writer = connect(autocommit=True)
    writer.execute("BEGIN; SET LOCAL mailroom.notify = off")
    send(writer, "shipping", key="k")
    writer.execute("PREPARE TRANSACTION 'quiet'")
    writer.execute("COMMIT PREPARED 'quiet'")
    assert node.waiting() == ["k"]


def test_open_writer_does_not_keep_a_dispatcher_from_being_awake(node: Node, connect: Connect) -> None:
    writer, awake = connect(), connect(autocommit=True)
    send(writer, "shipping")
    assert awake.execute(HOLD_AWAKE).fetchone() == (True,)


def test_rolled_back_send_does_not_ring(node: Node, listener: psycopg.Connection[Any], connect: Connect) -> None:
    writer = connect()
    send(writer, "shipping")
    writer.rollback()
    assert rings(listener) == 0


def test_look_for_scheduled_messages_does_not_ring_when_none_is_due(
    node: Node, listener: psycopg.Connection[Any]
) -> None:
    """The daemon looks several times a second: it must not wake itself."""
    assert run(node.connection, releasing(SCHEMA)) == 0
    assert rings(listener) == 0


# -- Falling asleep ---------------------------------------------------------------------------------------------------


class Steps:
    """What one turn of the doorbell does, step by step; a test acts between any two of them.

    What rings is looked for at each point and while it sleeps: a notification is there once its commit is answered.
    """

    def __init__(self, node: Node, connection: psycopg.AsyncConnection, listens: psycopg.Connection[Any]) -> None:
        self._deliverer = Deliverer(connection, SCHEMA)
        self._listens = listens
        self._listener = Listener(node.dsn, SCHEMA, "outbox", "bell")  # which does not run
        self.doorbell = Doorbell(connection, SCHEMA, "outbox", self._listener, NEVER_S)
        self.names: list[str] = []
        self.pauses: list[float] = []
        self.asleep = asyncio.Event()
        self.poll = asyncio.Event()
        self.act: Callable[[int], None] = lambda nth: None
        self._going_on = True

    def ring(self) -> None:
        """Ring as a notification does."""
        self._listener.ring()

    def _listen(self) -> None:
        if rings(self._listens):
            self.ring()

    def passed(self, name: str) -> None:
        """Note a point between two steps, and let the test act at it."""
        self.names.append(name)
        self.act(len(self.names) - 1)
        self._listen()

    async def run_async(self, connection: psycopg.AsyncConnection, operation: Operation[T]) -> T:
        name = cast("GeneratorType[Any, Any, Any]", operation).gi_code.co_name
        self.passed(f"before {name}")
        result = await run_async(connection, operation)
        self.passed(f"after {name}")
        return result

    async def heard(self, ring: asyncio.Event, timeout_s: float) -> bool:
        self.pauses.append(timeout_s)
        if timeout_s == NEVER_S:
            self.passed("asleep")
            self.asleep.set()
            while not (ring.is_set() or self.poll.is_set()):
                await asyncio.sleep(0.001)
                self._listen()
            self.poll.clear()
        else:
            await asyncio.sleep(0)
        return ring.is_set()

    async def drain(self) -> int:
        self.passed("before drain")
        taken = await self._deliverer.drain()
        self.passed("after drain")
        return taken

    async def rest(self) -> int:
        self.passed("before drain")
        taken = await self._deliverer.drain_rest()
        self.passed("after drain")
        return taken

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def serve() -> None:
            while self._going_on:
                await self.doorbell.serve(self.drain, lambda: self._going_on, rest=self.rest)

        task = asyncio.create_task(serve())
        try:
            yield
        finally:
            self._going_on = False
            self.ring()
            await task


@pytest.fixture
async def served(
    node: Node, listener: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Steps]]:
    """Make doorbells on one connection."""
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:

        def make() -> Steps:
            rings(listener)  # what came before it
            steps = Steps(node, connection, listener)
            monkeypatch.setattr(doorbells, "run_async", steps.run_async)
            monkeypatch.setattr(doorbells, "heard", steps.heard)
            return steps

        yield make


TURN = [
    "before drain",
    "after drain",
    "before _taking",
    "after _taking",
    "before _releasing",
    "after _releasing",
    "before reading_writers",
    "after reading_writers",
    "before drain",
    "after drain",
    "asleep",
]


async def test_idle_turn_lets_go_before_it_reads_the_writers_and_drains_before_it_sleeps(
    served: Callable[[], Steps],
) -> None:
    steps = served()
    async with steps.serving():
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert steps.names == TURN


# First of all where the writer sees it awake no more, and its row is not seen by the next drain.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "sends_at",
    sorted(range(len(TURN)), key=lambda nth: nth != TURN.index("after _releasing")),
    ids=lambda nth: f"{nth} {TURN[nth]}",
)
async def test_message_is_delivered_without_the_poll_wherever_its_writer_sends_and_commits(
    node: Node, served: Callable[[], Steps], connect: Connect, sends_at: int
) -> None:
    writer = connect()
    for commits_at in range(sends_at, len(TURN) + 8):
        steps = served()

        def act(nth: int, commits_at: int = commits_at) -> None:
            if nth == sends_at:
                send(writer, "shipping")
            if nth == commits_at:
                writer.commit()

        steps.act = act
        async with steps.serving():
            await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
            for nth in range(len(steps.names), commits_at + 1):  # what is left to do while the dispatcher sleeps
                act(nth)
            message = f"sent at {sends_at}, committed at {commits_at}, passed {steps.names}"
            with contextlib.suppress(AssertionError):
                await eventually_async(lambda: not node.waiting())
            assert node.waiting() == [], message


RUNG = ["before drain", "after drain", "asleep"]  # the turn of one that has slept until a writer rang


def sent_quietly(node: Node) -> None:
    with node.connection.transaction():
        node.connection.execute("SET LOCAL mailroom.notify = off")
        send(node.connection, "shipping")


async def rung(node: Node, steps: Steps) -> int:
    """Have it deliver a message that woke it, and sleep again; return how many steps it has done."""
    await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
    begun = len(steps.names)
    steps.asleep.clear()
    node.send("shipping")
    await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
    assert steps.names[begun:] == RUNG
    return len(steps.names)


async def test_one_that_was_rung_for_a_few_messages_sleeps_on_once_they_are_delivered(
    node: Node, served: Callable[[], Steps]
) -> None:
    steps = served()
    async with steps.serving():
        done = await rung(node, steps)
        for nth in range(3):
            steps.asleep.clear()
            node.send("shipping", key=str(nth))
            await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert steps.names[done:] == 3 * RUNG
        assert node.waiting() == []


async def test_one_that_was_rung_for_many_messages_is_awake_as_before(node: Node, served: Callable[[], Steps]) -> None:
    steps = served()
    async with steps.serving():
        done = await rung(node, steps)
        steps.asleep.clear()
        with node.connection.transaction():
            for _ in range(doorbells.BUSY):
                send(node.connection, "shipping")
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert "after _taking" in steps.names[done:]
        assert node.waiting() == []


@pytest.mark.parametrize("sends_at", range(len(RUNG)), ids=[f"{nth} {name}" for nth, name in enumerate(RUNG)])
async def test_message_is_delivered_without_the_poll_wherever_its_writer_commits_while_it_sleeps_on(
    node: Node, served: Callable[[], Steps], connect: Connect, sends_at: int
) -> None:
    writer = connect()
    for commits_at in range(sends_at, 2 * len(RUNG) + 1):
        steps = served()
        async with steps.serving():
            done = await rung(node, steps)

            def act(nth: int, commits_at: int = commits_at, done: int = done) -> None:
                if nth == done + sends_at:
                    send(writer, "shipping", key="theirs")
                if nth == done + commits_at:
                    writer.commit()

            steps.act = act
            steps.asleep.clear()
            node.send("shipping")  # begins the turn
            await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
            for nth in range(len(steps.names), done + commits_at + 1):  # what is left to do while it sleeps
                act(nth)
            message = f"sent at {sends_at}, committed at {commits_at}, passed {steps.names[done:]}"
            with contextlib.suppress(AssertionError):
                await eventually_async(lambda: not node.waiting())
            assert node.waiting() == [], message


async def test_one_that_the_poll_has_woken_goes_through_the_whole_turn(node: Node, served: Callable[[], Steps]) -> None:
    """Even if another session held "awake" in its place, the next poll finds it."""
    steps = served()

    async def poll() -> None:
        steps.asleep.clear()
        sent_quietly(node)
        steps.poll.set()
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)

    async with steps.serving():
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        await poll()
        done = await rung(node, steps)
        await poll()
        await rung(node, steps)
        assert steps.names == [*TURN, *TURN, *RUNG, *TURN, *RUNG]
        assert steps.names[:done] == [*TURN, *TURN, *RUNG]


async def test_one_that_was_rung_for_nothing_goes_through_the_whole_turn(
    node: Node, served: Callable[[], Steps]
) -> None:
    """So it tries again what was held up."""
    steps = served()
    async with steps.serving():
        done = await rung(node, steps)
        steps.asleep.clear()
        steps.ring()
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert steps.names[done:] == TURN


async def test_ring_while_the_last_few_are_delivered_is_heard(node: Node, served: Callable[[], Steps]) -> None:
    """That delivery did not see the message, and nobody will ring for it again."""
    steps = served()
    async with steps.serving():
        done = await rung(node, steps)

        def act(nth: int) -> None:
            if nth == done + RUNG.index("after drain"):
                sent_quietly(node)
                steps.ring()

        steps.act = act
        node.send("shipping")
        await eventually_async(lambda: not node.waiting() and len(steps.names) >= done + 2 * len(RUNG))


async def test_rung_where_others_hold_awake_it_still_sleeps_only_for_a_short_poll(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    connect(autocommit=True).execute(HOLD_AWAKE)
    steps = served()
    drains = 0

    def act(nth: int) -> None:
        nonlocal drains
        drains += steps.names[nth] == "before drain"
        if steps.names[nth] == "before drain" and drains <= 3:
            sent_quietly(node)
            steps.ring()

    steps.act = act
    async with steps.serving():
        await eventually_async(lambda: drains > 10)
    assert node.waiting() == []
    assert set(steps.pauses) == {UNSURE_POLL_S}


async def test_writer_that_saw_it_awake_is_waited_for_though_others_ring_meanwhile(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    """It does not count as one that sleeps until each writer rings."""
    slow, steps = connect(), served()
    begun, sent_at = 0, 0

    def act(nth: int) -> None:
        nonlocal sent_at
        if steps.names[nth] == "after _taking" and not sent_at:
            sent_at = nth
            send(slow, "shipping", key="slow")
        if nth == sent_at + 20:  # at the end of a look for whether the slow one has ended
            assert steps.names[nth] == "after drain"
            sent_quietly(node)
            steps.ring()

    async with steps.serving():
        begun = await rung(node, steps)
        steps.act = act
        with node.connection.transaction():
            for _ in range(doorbells.BUSY):
                send(node.connection, "shipping")
        await eventually_async(lambda: len(steps.names) > begun + 30)
        slow.commit()
        await eventually_async(lambda: ("slow",) in node.delivered("key"))


def test_messages_that_are_about_to_come_are_to_do_as_well() -> None:
    for taken, last, drawn, more, expected in (
        (2, 7, 7, False, 2), (2, 7, 9, False, 4), (1, None, 9, False, 1), (1, 7, 7, True, doorbells.BUSY),
    ):  # fmt: skip
        assert to_do(Execution(taken, last=last, drawn=drawn, more=more)) == expected


async def test_writer_that_saw_it_awake_is_waited_for_until_it_has_committed(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    writer, steps = connect(), served()

    def act(nth: int) -> None:
        if nth == TURN.index("after _taking"):
            send(writer, "shipping")

    steps.act = act
    async with steps.serving():
        await eventually_async(lambda: len(steps.names) > 40)
        assert not steps.asleep.is_set()
        writer.commit()
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert node.waiting() == []


async def test_writer_that_saw_it_awake_and_prepared_is_waited_for_too(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    writer, steps = connect(autocommit=True), served()

    def act(nth: int) -> None:
        if nth == TURN.index("after _taking"):
            writer.execute("BEGIN; SET LOCAL mailroom.notify = off")
            send(writer, "shipping")
        if nth == len(TURN) + 8:
            writer.execute("PREPARE TRANSACTION 'awake'")

    steps.act = act
    async with steps.serving():
        await eventually_async(lambda: len(steps.names) > 60)
        assert not steps.asleep.is_set()
        writer.execute("COMMIT PREPARED 'awake'")
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert node.waiting() == []


async def test_writer_that_rings_ends_the_wait_for_a_slow_one(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    slow, steps = connect(), served()

    def act(nth: int) -> None:
        if nth == TURN.index("after _taking"):
            send(slow, "shipping", key="slow")

    steps.act = act
    async with steps.serving():
        await eventually_async(lambda: len(steps.names) > 20)
        node.send("shipping", key="fast")
        await eventually_async(lambda: node.waiting() == [])
        assert node.delivered("key") == [("fast",)]
        slow.commit()
        await eventually_async(lambda: len(node.delivered()) == 2)


async def test_dispatcher_that_could_not_be_awake_sleeps_only_for_a_short_poll(
    node: Node, served: Callable[[], Steps], connect: Connect
) -> None:
    """Somebody else holds "awake", so writers do not ring: nobody would wake us."""
    other = connect(autocommit=True)
    other.execute(HOLD_AWAKE)
    steps = served()
    async with steps.serving():
        await eventually_async(lambda: len(steps.pauses) > 3)
        pauses = set(steps.pauses)  # before the message: its writer may still end when writers are read
        node.send("shipping")
        await eventually_async(lambda: not node.waiting())
    assert pauses == {UNSURE_POLL_S}


async def test_dispatcher_stays_awake_while_messages_keep_coming(node: Node, served: Callable[[], Steps]) -> None:
    steps = served()
    sent = 0

    def act(nth: int) -> None:
        nonlocal sent
        if steps.names[nth] == "before drain" and sent < 30:
            with node.connection.transaction():
                for _ in range(5):
                    send(node.connection, "shipping")
            sent += 5

    steps.act = act
    async with steps.serving():
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert steps.names.count("before _releasing") == 1
        assert node.waiting() == []


async def test_nothing_of_awake_is_left_when_it_sleeps(node: Node, served: Callable[[], Steps]) -> None:
    steps = served()
    async with steps.serving():
        await asyncio.wait_for(steps.asleep.wait(), WITHIN_S)
        assert not steps.doorbell.awake
        assert node.value(HOLD_AWAKE) is True
        node.connection.execute(RELEASE.encode())


# -- Listening --------------------------------------------------------------------------------------------------------


async def test_bell_rings_its_owner_for_a_scan_once_it_listens(node: Node) -> None:
    """What came before LISTEN is found by that scan, and what comes after it rings."""
    listener = Listener(node.dsn, SCHEMA, "outbox", "bell")
    listening = listener.next_ring()
    task = asyncio.create_task(listener.run())
    await asyncio.wait_for(listening.wait(), WITHIN_S)
    rung = listener.next_ring()
    node.send("shipping")
    try:
        await asyncio.wait_for(rung.wait(), WITHIN_S)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_whoever_is_cancelled_as_it_rings_is_cancelled() -> None:
    async def listening(ring: asyncio.Event) -> None:
        await heard(ring, NEVER_S)
        await heard(asyncio.Event(), NEVER_S)

    for steps in range(5):
        ring = asyncio.Event()
        task = asyncio.create_task(listening(ring))
        await asyncio.sleep(0)
        ring.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=WITHIN_S)
        assert task.cancelled(), steps
