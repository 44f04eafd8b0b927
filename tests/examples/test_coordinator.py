"""The example of coordinators does what PuzzleDB's do, and what theirs only promise."""

import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from examples.coordinator import states
from examples.coordinator.coordinator import Coordinator
from examples.coordinator.node import Node, Status
from examples.coordinator.states import Connection
from inbox import Inbox
from mailroom.errors import InvalidMessage
from mailroom.puzzledb import MessageObject, encode
from mailroom.testing import deliver, handle_all, sent, work
from mailroom.values.codec import decode
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.waiting import eventually
from tests.support.working import working

NOW = datetime(2026, 8, 2, 12, tzinfo=UTC)


class Observing:
    """An observer that keeps what it is called with."""

    def __init__(self) -> None:
        self.messages: list[MessageObject] = []

    def __call__(self, message: MessageObject, connection: Connection) -> None:
        self.messages.append(message)

    @property
    def values(self) -> list[Any]:
        return [decode(message.object) for message in self.messages]


def joined(connection: Connection, *nodes: Node, **options: Any) -> list[Coordinator]:
    coordinators = [Coordinator(node, **options) for node in nodes]
    states.create(connection)
    for each in coordinators:
        each.join(connection)
    connection.commit()
    return coordinators


def observed(*coordinators: Coordinator) -> list[Observing]:
    observers = [Observing() for _ in coordinators]
    for each, observer in zip(coordinators, observers, strict=True):
        each.add_observer(observer)
    return observers


def post(coordinator: Coordinator, connection: Connection, value: object = None) -> None:
    coordinator.post(connection, "U", "C", encode(value))


def receive(connection: Connection, *coordinators: Coordinator) -> None:
    for each in coordinators:
        handle_all(connection, each.inbox, each.receive)


# As go-cbor writes testMessage{Value: n}: cbor/encoder.go has an int that is not negative as a uint64, in eight bytes.
def written_by_go(value: int) -> bytes:
    return bytes.fromhex("a1 65 56616c7565 1b") + value.to_bytes(8)


# cybergarage/puzzledb-go: puzzledbtest/plugins/coordinator/message_helper.go, CoordinatorMessageTest. Its two
# coordinators have one observer, and messages are equal if they are of the same type and event.
def test_conformance_of_messages(dsn: str, connect: Connect) -> None:
    connection = connect()
    coordinators = joined(connection, Node(host="coodinator00"), Node(host="coodinator01"))
    observer = Observing()
    for each in coordinators:
        each.add_observer(observer)
    with ExitStack() as stack:
        for each in coordinators:
            stack.enter_context(working(each.worker(dsn)))
        for value in range(10):
            coordinators[value % 2].post(connection, "U", "C", written_by_go(value))
            connection.commit()
        eventually(lambda: len(observer.messages) >= 10)
    assert len(observer.messages) == 10
    assert {(message.type, message.event) for message in observer.messages} == {("U", "C")}
    assert sum(value["Value"] for value in observer.values) == sum(range(10))
    posted_in_turn = sorted(observer.messages, key=lambda message: decode(message.object)["Value"])  # type: ignore[index]
    assert all(before.clock < after.clock for before, after in pairwise(posted_in_turn))
    for each in coordinators:
        heard = [message.clock for message in observer.messages if message.from_id != each.node.id]
        assert len(heard) == 5
        assert heard == sorted(heard)


# The same file's sibling state_helper.go, CoordinatorClusterTest.
def test_conformance_of_the_cluster(connect: Connect) -> None:
    connection = connect()
    nodes = [Node("test_cluster", f"coord{nth}") for nth in range(2)]
    coordinators = joined(connection, *nodes, now=lambda: NOW)
    joined(connection, Node("another_cluster"))
    for each in coordinators:
        each.set_status(connection, Status.UP)
    for each in coordinators:
        found = each.cluster_state(connection)
        assert {state.node for state in found} == set(nodes)
        assert {(state.status, state.clock, state.at) for state in found} == {(Status.UP, 0, NOW)}


# puzzledb/cluster/node_state.go.
def test_statuses_are_those_of_puzzledb() -> None:
    known = "unknown idle joining up down leaving exiting removed aborted unreachable"
    assert [*Status] == known.split()
    assert Status("hibernating") is Status.UNKNOWN


def test_node_that_has_left_may_join_again(connect: Connect) -> None:
    connection = connect()
    sender, listener = joined(connection, Node(), Node())
    [observer] = observed(listener)
    for value, change in (("before", listener.leave), ("without it", listener.join), ("after", listener.leave)):
        post(sender, connection, value)
        deliver(connection)
        change(connection)
    receive(connection, listener)
    assert observer.values == ["before", "after"]
    assert {state.status for state in sender.cluster_state(connection)} == {Status.JOINING, Status.REMOVED}


def test_message_reaches_every_node_but_its_sender_though_all_are_on_one_host(connect: Connect) -> None:
    connection = connect()
    coordinators = joined(connection, *(Node(host="one") for _ in range(3)))
    observers = observed(*coordinators)
    for number, each in enumerate(coordinators):
        post(each, connection, number)
    receive(connection, *coordinators)
    assert [observer.values for observer in observers] == [[1, 2], [0, 2], [0, 1]]
    assert [message.from_host for message in observers[0].messages] == ["one", "one"]
    assert {each.backlog(connection) for each in (Inbox(each.inbox) for each in coordinators)} == {0}


def test_node_alone_may_post_and_another_cluster_hears_nothing(connect: Connect) -> None:
    connection = connect()
    alone, other = joined(connection, Node("alone"), Node("other"))
    hears_alone, hears_other = observed(alone, other)
    post(alone, connection)
    alone.leave(connection)
    post(alone, connection)
    receive(connection, alone, other)
    assert hears_alone.messages == hears_other.messages == []
    assert connection.execute("SELECT count(*) FROM mailroom.dead_letter").fetchone() == (0,)


def test_cluster_has_a_name_that_can_be_part_of_a_topic() -> None:
    for cluster in ("*", "a/b", "x" * 200):
        with pytest.raises(InvalidMessage, match="is not valid"):
            Coordinator(Node(cluster))


def test_observers_are_called_in_clock_order(connect: Connect) -> None:
    connection = connect()
    first, second, listener = joined(connection, *(Node() for _ in range(3)))
    [observer] = observed(listener)
    for number in range(20):
        post((first, second)[number % 3 % 2], connection, number)
        if number % 4 == 0:
            deliver(connection)
    receive(connection, listener)
    assert observer.values == list(range(20))
    clocks = [message.clock for message in observer.messages]
    assert clocks == sorted(set(clocks))


def test_observer_is_called_before_the_commit_and_again_if_that_fails(connect: Connect) -> None:
    connection = connect()
    sender, listener = joined(connection, Node(), Node())
    connection.execute("CREATE TABLE heard (value int)")

    def write(message: MessageObject, conn: Connection) -> None:
        conn.execute("INSERT INTO heard VALUES (%s)", [decode(message.object)])

    def fail_once(message: MessageObject, conn: Connection) -> None:
        if not failures:
            failures.append(message.clock)
            raise RuntimeError("the observer failed")

    failures: list[int] = []
    listener.add_observer(write)
    listener.add_observer(fail_once)
    for number in range(3):
        post(sender, connection, number)
    [failure] = work(connection, listener.inbox, listener.receive).failures
    assert str(failure.error) == "the observer failed"
    assert connection.execute("SELECT count(*) FROM heard").fetchone() == (0,)
    [state] = [each for each in listener.cluster_state(connection) if each.node == listener.node]
    assert state.clock == 0
    work(connection, listener.inbox, listener.receive, now=datetime.now(UTC) + timedelta(hours=1))
    assert connection.execute("SELECT value FROM heard").fetchall() == [(0,), (1,), (2,)]


def test_observer_that_is_added_again_is_called_once(connect: Connect) -> None:
    connection = connect()
    sender, listener = joined(connection, Node(), Node())
    [observer] = observed(listener)
    listener.add_observer(observer)
    post(sender, connection)
    receive(connection, listener)
    assert len(observer.messages) == 1


@pytest.mark.parametrize("delivered_in_time", [True, False])
def test_message_that_is_too_old_is_dropped(connect: Connect, delivered_in_time: bool) -> None:
    connection = connect()
    clock = {"now": datetime.now(UTC)}
    sender, listener = joined(connection, Node(), Node(), max_age_s=60, now=lambda: clock["now"])
    [observer] = observed(listener)
    post(sender, connection, "old")
    clock["now"] += timedelta(seconds=50)
    post(sender, connection, "newer")
    deliver(connection) if delivered_in_time else None
    clock["now"] += timedelta(seconds=10)
    handle_all(connection, listener.inbox, listener.receive, now=clock["now"])
    assert observer.values == ["newer"]
    assert Inbox(listener.inbox).backlog(connection) == 0


def test_node_hears_what_was_posted_while_it_was_down(dsn: str, connect: Connect) -> None:
    connection = connect()
    sender, _ = joined(connection, Node(id=UUID(int=1)), Node(id=UUID(int=2)))
    post(sender, connection, "while you were down")
    connection.commit()
    [again] = joined(connection, Node(id=UUID(int=2)))  # after a restart
    [observer] = observed(again)
    with working(again.worker(dsn)):
        eventually(lambda: observer.messages)
    assert observer.values == ["while you were down"]


def test_node_s_clock_is_that_of_the_newest_message_that_it_has_received(connect: Connect) -> None:
    connection = connect()
    sender, listener = joined(connection, Node(), Node())
    clocks: list[list[int]] = []
    for _ in range(3):
        post(sender, connection)
        receive(connection, sender, listener)
        clocks.append([state.clock for state in listener.cluster_state(connection)])
    assert all(mine == other for mine, other in clocks)  # the sender's own message counts, too
    assert sorted(clocks) == clocks
    assert clocks[0] < clocks[1] < clocks[2]


def test_state_objects_are_found_by_type_and_key(connect: Connect) -> None:
    connection = connect()
    states.create(connection)
    for kind, key, content in (("table", "a/1", {"rows": 1}), ("table", "b/1", [1]), ("index", "a/1", None)):
        states.put(connection, kind, key, content, NOW)
    states.put(connection, "table", "a/1", {"rows": 2}, NOW)
    assert states.get(connection, "table", "a/1") == ("a/1", {"rows": 2}, 0, NOW)
    assert states.get(connection, "table", "a") is None
    assert [state.key for state in states.find(connection, "table")] == ["a/1", "b/1"]
    assert [state.key for state in states.find(connection, "table", "b/")] == ["b/1"]
    assert states.remove(connection, "table", "a/1")
    assert not states.remove(connection, "table", "a/1")
    assert states.get(connection, "index", "a/1") == ("a/1", None, 0, NOW)


def test_state_objects_tell_what_happens_to_them(connect: Connect) -> None:
    connection = connect()
    listener, deaf = joined(connection, Node(host="one"), Node())
    observer, hears_nothing = observed(listener, deaf)
    deliver(connection)  # what happened before
    listener.follow_states(connection)
    for status in (Status.UP, Status.UP):
        listener.set_status(connection, status)
    states.put(connection, "table", "a", {"rows": 1}, NOW)
    states.remove(connection, "table", "a")
    receive(connection, listener, deaf)
    told = sorted(zip(observer.messages, observer.values, strict=True), key=lambda each: each[0].clock)
    node = {"type": "node", "key": f"puzzledb/{listener.node.id}"}
    joining, up = ({**node, "object": {"host": "one", "status": status}} for status in ("joining", "up"))
    table = {"type": "table", "key": "a", "object": {"rows": 1}}
    assert [(message.type, message.event, value) for message, value in told] == [
        ("O", "U", {"old": joining, "new": up, "changed": ["object"]}),
        ("O", "C", {"old": None, "new": table, "changed": []}),
        ("O", "D", {"old": table, "new": None, "changed": []}),
    ]
    listener.leave(connection)
    receive(connection, listener)
    assert len(observer.messages) == 3
    assert hears_nothing.messages == []


def test_clocks_of_nodes_tell_nobody_or_their_messages_would_never_end(connect: Connect) -> None:
    connection = connect()
    sender, listener = joined(connection, Node(), Node())
    listener.follow_states(connection)
    sender.set_status(connection, Status.UP)
    post(sender, connection)
    deliver(connection)
    for message in Inbox(listener.inbox).reap_any(connection):
        listener.receive(message, connection)
    [state] = [each for each in sender.cluster_state(connection) if each.node == listener.node]
    assert state.clock > 0
    assert sent(connection, "state.updated") == []


def test_messages_of_a_program_of_puzzledb_s_are_heard(connect: Connect) -> None:
    connection = connect()
    listener, other = joined(connection, Node(), Node())
    hears, _ = observed(listener, other)
    raw = MessageObject("D", "D", b"\xa0", UUID(int=9), "puzzledb", "go", 5_000).dumps(deleted="O")
    outgoing = MessageObject.loads(raw).outgoing(listener.topic, key=listener.node.cluster, kind="E")
    Outbox().send_many(connection, [outgoing])
    post(other, connection, "an answer")
    receive(connection, listener, other)
    [foreign, answer] = hears.messages
    assert (foreign.type, foreign.event, foreign.from_id, foreign.from_host) == ("D", "D", UUID(int=9), "go")
    assert 5_000 < foreign.clock < answer.clock


@pytest.mark.slow
def test_program_of_the_coordinators_runs(dsn: str) -> None:
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-m", "examples.coordinator", dsn],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.splitlines()[-1] == "Each node heard what the others posted, in order."
        assert len(ran.stdout.splitlines()) == 4
