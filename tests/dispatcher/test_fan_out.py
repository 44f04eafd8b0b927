"""Fan out: what is for more inboxes than one transaction may meet gets into all of them, in order and exactly once."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dispatcher import deliver_all
from dispatcher.delivery.deliver import delivering
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.delivery.fan_out import fanning_out, finding_refused_copies
from dispatcher.housekeeping.janitor import raising_floor
from inbox import Inbox
from mailroom import create_inbox
from mailroom.embedded import Binaries, Server
from mailroom.errors import MailroomError
from mailroom.node.status import status
from mailroom.node.trace import trace
from mailroom.order.placing import making_room
from mailroom.order.total import raising_stable
from mailroom.schema import migrate
from mailroom.sql.runner import run
from mailroom.testing import deliver
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.postgres import FAST_SETTINGS

FEW = 3
NAMES = [f"i{nth:02}" for nth in range(10)]

# Ten inboxes on `news`, of which three fit into a transaction; the last of them is in total order.
pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.node_sql(CLOCKS_ALLOWED),
    *(pytest.mark.inbox(name, "news", order="total" if name == NAMES[-1] else "key") for name in NAMES),
    pytest.mark.inbox("alone"),
]


def take(node: Node, rows: int = 10_000, *, has_bounds: bool = False) -> Any:
    """Deliver once, and fan out nothing."""
    with node.connection.transaction():
        delivering_now = delivering(SCHEMA, rows=rows, max_bytes=2**25, partitions=FEW, has_bounds=has_bounds)
        return run(node.connection, delivering_now)


def step(node: Node) -> Any:
    with node.connection.transaction():
        return run(node.connection, fanning_out(SCHEMA, partitions=FEW))


async def drain_few(node: Node) -> Deliverer:
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        deliverer = Deliverer(connection, SCHEMA, partitions=FEW)
        await deliverer.drain()
        return deliverer


def has(node: Node, name: str) -> list[int]:
    return [value for (value,) in node.rows(f"SELECT clock FROM mailroom.inbox_{name} ORDER BY clock")]


def waits(node: Node) -> tuple[int, int]:
    [row] = node.rows("SELECT (SELECT count(*) FROM mailroom.fan_out), (SELECT count(*) FROM mailroom.fan_out_way)")
    return row[0], row[1]


def test_delivery_to_many_inboxes_stamps_and_the_next_transactions_fan_out(node: Node) -> None:
    for nth in range(4):
        node.send("news", nth, key="k")
    delivery = take(node)
    assert (delivery.taken, delivery.delivered, delivery.waits, delivery.has_many) == (4, 0, True, True)
    assert waits(node) == (4, 10)
    assert node.rows("SELECT FROM mailroom.outbox") == []
    done = [step(node) for _ in range(4)]
    assert [(each.more, each.copies, each.inboxes) for each in done] == [
        (True, 12, done[0].inboxes), (True, 12, done[1].inboxes), (True, 12, done[2].inboxes), (False, 4, [NAMES[-1]]),
    ]  # fmt: skip
    assert sorted(name for each in done for name in each.inboxes) == NAMES
    assert waits(node) == (0, 0)
    clocks = has(node, NAMES[0])
    assert len(clocks) == 4
    assert {name: has(node, name) for name in NAMES} == dict.fromkeys(NAMES, clocks)


HINTS: list[dict[str, Any]] = [
    {}, {"has_bounds": True}, {"is_plain": False}, {"is_plain": False, "has_many": True},
    {"is_plain": False, "has_links": True},
]  # fmt: skip


def test_nothing_else_is_delivered_before(node: Node) -> None:
    node.send("news", key="k")
    take(node)
    step(node)
    node.send("alone", key="k")
    node.send("news", key="k")
    for hints in HINTS:
        for partitions in (FEW, None):  # also where there is room for all of them now
            with node.connection.transaction():
                delivering_now = delivering(SCHEMA, rows=1, max_bytes=2**25, partitions=partitions, **hints)
                delivery = run(node.connection, delivering_now)
            assert (delivery.taken, delivery.waits) == (0, True)
    assert [has(node, name) != [] for name in NAMES] == [True] * 3 + [False] * 7
    asyncio.run(drain_few(node))
    assert {len(has(node, name)) for name in NAMES} == {2}
    assert len(has(node, "alone")) == 1
    assert has(node, NAMES[0]) == has(node, NAMES[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [1, 0, 2, 3, 4])
def test_whoever_goes_on_after_a_crash_does_the_rest_once(node: Node, steps: int) -> None:
    """A crash between two transactions leaves what this leaves."""
    for _ in range(3):
        node.send("news", key="k")
    take(node)
    for _ in range(steps):
        step(node)
    assert node.deliver_all().delivered == 3 * max(0, 10 - FEW * steps)
    assert waits(node) == (0, 0)
    clocks = has(node, NAMES[0])
    assert len(clocks) == 3
    assert {name: has(node, name) for name in NAMES} == dict.fromkeys(NAMES, clocks)


@pytest.mark.parametrize("what", ["stamping", "first step", "last step"])
def test_transaction_that_is_cut_off_leaves_everything_as_it_was(node: Node, connect: Connect, what: str) -> None:
    node.send("news", key="k")
    operation: Callable[[], Any] = lambda: fanning_out(SCHEMA, partitions=FEW)  # noqa: E731
    if what == "stamping":
        operation = lambda: delivering(SCHEMA, rows=10, max_bytes=2**20, partitions=FEW)  # noqa: E731
    else:
        take(node)
        for _ in range(3 if what == "last step" else 0):
            step(node)
    before = (waits(node), len(node.rows("SELECT FROM mailroom.inbox")), len(node.rows("SELECT FROM mailroom.outbox")))
    cut_off = connect()
    run(cut_off, operation())
    node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [cut_off.info.backend_pid])
    after = (waits(node), len(node.rows("SELECT FROM mailroom.inbox")), len(node.rows("SELECT FROM mailroom.outbox")))
    assert after == before
    node.deliver_all()
    assert {len(has(node, name)) for name in NAMES} == {1}


def test_kinds_go_where_they_go_otherwise(node: Node) -> None:
    with node.connection.transaction():
        create_inbox(node.connection, "pattern", "*")
    # A pattern gets no commands, an inbox of the topic's own name no events.
    node.inbox("news")
    for kind in "ME":
        node.send("news", kind, key=kind, kind=kind)
    asyncio.run(drain_few(node))
    found = {name: [key for (key,) in node.rows(f"SELECT key FROM mailroom.inbox_{name} ORDER BY clock")]
             for name in ("pattern", "news", NAMES[0])}  # fmt: skip
    assert found == {"pattern": ["M", "E"], "news": ["M"], NAMES[0]: ["M", "E"]}


def test_message_for_few_inboxes_is_delivered_at_once_beside_many(node: Node) -> None:
    node.send("alone", key="k")
    delivery = take(node)
    assert (delivery.taken, delivery.delivered, delivery.waits) == (1, 1, False)


@pytest.mark.parametrize("has_bounds", [False, True], ids=["", "known to have a total inbox"])
def test_batch_of_messages_for_one_inbox_each_is_fanned_out_too(node: Node, has_bounds: bool) -> None:
    """Where there is a total inbox, the plain statement delivers only if that is known."""
    for name in NAMES:
        node.send(name, key="k")
    assert take(node, has_bounds=has_bounds).waits
    node.deliver_all()
    assert {len(has(node, name)) for name in NAMES} == {1}


def test_total_inbox_gives_nothing_out_before_the_last_step(node: Node, connect: Connect) -> None:
    node.send("news", key="k")
    take(node)
    for _ in range(3):
        step(node)
        with node.connection.transaction():
            run(node.connection, raising_stable(SCHEMA, [NAMES[-1]]))  # whoever else would raise it
        assert Inbox(NAMES[-1]).reap_any(connect()) == []
        assert node.rows("SELECT FROM mailroom.stable") == []
    step(node)
    assert len(Inbox(NAMES[-1]).reap_any(connect())) == 1


def test_floor_of_an_empty_inbox_stays_below_what_is_to_come(node: Node, connect: Connect) -> None:
    node.send("news", key="k")
    take(node)
    with node.connection.transaction():
        run(node.connection, raising_floor(SCHEMA, NAMES[5]))
    node.deliver_all()
    assert len(Inbox(NAMES[5]).reap_any(connect())) == 1


def test_requeue_waits_for_its_turn(node: Node) -> None:
    node.send("nobody", key="k")
    node.deliver_all()
    node.send("news", key="k")
    take(node)
    with node.connection.transaction(), pytest.raises(MailroomError, match="Try again"):
        run(node.connection, making_room(SCHEMA, 1))  # what places a message in an inbox
    node.deliver_all()
    with node.connection.transaction():
        run(node.connection, making_room(SCHEMA, 1))


def test_inbox_that_is_gone_meanwhile_leaves_a_dead_letter(node: Node) -> None:
    node.send("news", key="k")
    take(node)
    node.connection.execute(
        f"DELETE FROM mailroom.inbox_registry WHERE name = '{NAMES[4]}'; DROP TABLE mailroom.inbox_{NAMES[4]}".encode()
    )
    node.deliver_all()
    assert {len(has(node, name)) for name in NAMES if name != NAMES[4]} == {1}
    assert waits(node) == (0, 0)
    [(stage, inbox, reason)] = node.rows("SELECT stage, inbox, reason FROM mailroom.dead_letter")
    assert (stage, inbox) == ("deliver", NAMES[4])
    assert reason.startswith("CheckViolation (23514)")


def test_copy_that_an_inbox_refuses_is_a_dead_letter_and_the_others_go_on(node: Node) -> None:
    refusing = NAMES[1]
    node.connection.execute(f"ALTER TABLE mailroom.inbox_{refusing} ADD CONSTRAINT odd CHECK (key <> 'odd')".encode())
    for key in ("a", "odd", "b"):
        node.send("news", key=key)
    take(node)
    with node.connection.transaction():
        [refused] = run(node.connection, finding_refused_copies(SCHEMA, partitions=FEW))
    assert (refused.inbox, refused.reason) == (refusing, f"CheckViolation (23514) odd inbox_{refusing}")
    node.deliver_all()
    assert {name: len(has(node, name)) for name in NAMES} == {name: 2 if name == refusing else 3 for name in NAMES}
    assert node.rows("SELECT stage, inbox, key FROM mailroom.dead_letter") == [("deliver", refusing, "odd")]


def test_message_that_waits_is_traced(node: Node) -> None:
    id = node.send("news", key="k")
    take(node)
    assert [each.where for each in trace(node.connection, id)] == ["outbox"]
    step(node)
    assert [each.where for each in trace(node.connection, id)] == ["outbox", *["inbox"] * FEW]


def test_test_kit_fans_out(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.send("news", key="k")
    take(node)
    node.send("alone", key="k")
    with node.connection.transaction():
        deliver(node.connection)
    assert {len(has(node, name)) for name in [*NAMES, "alone"]} == {1}


# -- On a server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_locks(server_home: Path, binaries: Binaries, _initialised: Callable[[Binaries], Path]) -> Iterator[Server]:
    """A started server of the test's own that has room for about a thousand locks."""
    directory = server_home / "locks"
    subprocess.run(["cp", "-a", _initialised(binaries), directory], check=True)
    settings = {"max_connections": "20", "max_prepared_transactions": "0", "max_locks_per_transaction": "10"}
    with Server(directory, binaries=binaries, settings=FAST_SETTINGS | settings) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_event_reaches_all_its_subscribers(few_locks: Server) -> None:
    """They have several times as many locks as the server has, of which a step takes a share."""
    inboxes = 1_000
    dsn = few_locks.dsn("postgres")
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            migrate(connection)
        for first in range(0, inboxes, 20):
            with connection.transaction():
                create_inbox(connection, [f"n{nth}" for nth in range(first, first + 20)], ["news"])
        node = Node(dsn, connection)
        for key in "abab":
            node.send("news", key=key, kind="E")
        totals = deliver_all(dsn)
        assert (totals.taken, totals.delivered) == (4, 4 * inboxes)
        assert waits(node) == (0, 0)
        for nth in (0, inboxes // 2, inboxes - 1):
            rows = node.rows(f"SELECT key FROM mailroom.inbox_n{nth} ORDER BY clock")
            assert [key for (key,) in rows] == list("abab")
        found = status(connection)
        assert (len(found.inboxes), {each.backlog for each in found.inboxes}) == (inboxes, {4})
