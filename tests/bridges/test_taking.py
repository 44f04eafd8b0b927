"""Taking in: once, in the order of a partition, from where the database says, also if the broker repeats itself."""

import asyncio
from uuid import UUID, uuid4

import pytest

from mailroom import create_inbox, subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.source import BrokerPosition
from mailroom.doctor import examine
from mailroom.errors import ConfigurationError, NotSubscribed
from mailroom.links.links import Links
from mailroom.links.restored import saying_moved, saying_restored
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from mailroom.testing import publish
from mailroom.values import codec
from outbox import Outbox
from tests.bridges.log import Log
from tests.bridges.tended import beside, bridge_in, bridge_out, in_state, set_bridge, tended, why_stopped
from tests.support.command import mailroom
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually_async

OURS = UUID("11111111-1111-4111-8111-111111111111")


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def log(node: Node) -> Log:
    """The log of a bridge whose messages the inbox "orders" gets."""
    log = bridge_in(node)
    node.inbox("orders")
    with node.connection.transaction():
        subscribe(node.connection, "orders", "#", origin="in")
    return log


def taken(node: Node) -> list[object]:
    """Return the values that came in, in order."""
    return [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]


def positions(node: Node) -> list[tuple[object, ...]]:
    """Return where it goes on."""
    return node.rows("SELECT topic, part, next FROM mailroom.bridge_position ORDER BY topic, part")


def ours(log: Log, clock: int, *, link: int = 1, part: int = 0, value: int | None = None, sender: UUID = OURS) -> None:
    """Put a record into the log as a bridge writes it."""
    log.add(
        "log", str(clock if value is None else value).encode(), part, mailroom_origin=str(sender),
        mailroom_link=str(link), mailroom_clock=str(clock), mailroom_id=str(UUID(int=clock)),
    )  # fmt: skip


async def test_copy_of_a_node_takes_nothing_in_before_somebody_says_that_it_is_the_node(node: Node, log: Log) -> None:
    """From a queue it would take away what the node then lacks."""
    log.add("log", b"1")
    node.connection.execute("UPDATE mailroom.node SET database_oid = database_oid + 1")
    async with tended(node) as lane:
        await eventually_async(lambda: "mailroom node moved" in why_stopped(node))
        assert log.opened == 0
        with node.connection.transaction():
            assert run(node.connection, saying_moved(SCHEMA, actor="me"))
            Bridges().resume(node.connection, "in", actor="me")
        await lane.follow()
        await eventually_async(lambda: taken(node) == [1])


def put_back(node: Node) -> None:
    """Say that the node was."""
    with node.connection.transaction():
        run(node.connection, saying_restored(SCHEMA, actor="me"))


async def test_node_that_was_put_back_says_what_it_may_lack_of_a_queue_until_somebody_has_seen_it(
    node: Node, log: Log
) -> None:
    log.add("log", b"1")
    put_back(node)
    async with tended(node) as lane:
        await eventually_async(lambda: taken(node) == [1])
        log.is_queued = True  # and not before: a log has its records still
        log.add("log", b"2")
        await eventually_async(lambda: taken(node) == [1, 2])
        assert in_state(node).lacks is None
    put_back(node)
    async with tended(node) as lane:
        await eventually_async(lambda: in_state(node).lacks)
        shown = (await asyncio.to_thread(mailroom, "bridge", "status", dsn=node.dsn)).output
        assert "mailroom bridge resume in" in shown
        assert "M046" in await beside(node, lambda it: {each.id for each in examine(it)})
        assert await beside(node, lambda it: Bridges().resume(it, "in", actor="me"))
        await lane.follow()
        assert in_state(node).lacks is None


async def test_what_a_queue_gave_is_durable_before_the_queue_deletes_it(node: Node, log: Log) -> None:
    """A crash of the server would take back a commit that is not, and nobody has those messages any more."""
    node.connection.execute("CREATE TABLE public.seen (setting text)")
    node.connection.execute(
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$"
    )
    node.connection.execute("CREATE TRIGGER see AFTER UPDATE ON mailroom.bridge_position EXECUTE FUNCTION see()")
    for is_queued in (False, True):
        log.is_queued = is_queued
        log.add("log", b"1")
        async with tended(node):
            await eventually_async(lambda: len(taken(node)) == 1 + is_queued)  # noqa: B023 - awaited at once
    assert node.rows("SELECT setting FROM public.seen") == [("off",), ("on",)]


async def test_records_become_messages_once_and_the_position_moves_with_them(node: Node, log: Log) -> None:
    log.add("log", b'{"n": 1}', id="no uuid", own="yes")
    log.add("log", b'{"n": 2}')
    async with tended(node) as lane:
        await eventually_async(lambda: taken(node) == [{"n": 1}, {"n": 2}])
        log.add("log", b'{"n": 3}')
        await eventually_async(lambda: len(taken(node)) == 3)
        await eventually_async(lambda: log.told == {("log", 0): 3})
        assert sum(each.delivered for each in lane.received) == 3
    assert positions(node) == [("log", 0, 3)]
    [(key, topic, kind, headers, sent_clock, here)] = node.rows(
        "SELECT key, topic, kind::text, headers, sent_clock, origin = (SELECT id FROM mailroom.origin) "
        "FROM mailroom.inbox ORDER BY clock LIMIT 1"
    )
    assert (key, topic, kind, sent_clock, here) == ("k", "log", "M", 1, True)
    assert headers == {"id": "no uuid", "own": "yes"}
    async with tended(node):
        log.add("log", b"4")
        await eventually_async(lambda: taken(node)[3:] == [4])
    state = in_state(node)
    assert (state.state, state.received, state.positions) == ("open", 4, (BrokerPosition("log", 0, 4),))


async def test_who_repeats_itself_is_heard_once_per_link_and_partition(node: Node, log: Log) -> None:
    for clock in (10, 11, 12, 11, 12, 13):
        ours(log, clock)
    ours(log, 11, link=2, value=211)  # another link of the same node
    ours(log, 12, sender=uuid4(), value=312)  # and another node
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 8)])
        assert taken(node) == [10, 11, 12, 13, 211, 312]
        for clock in (12, 13):
            ours(log, clock)
        await eventually_async(lambda: positions(node) == [("log", 0, 10)])  # nothing but repeats
        log.parts["log", 1] = []
        ours(log, 5, part=1)
        ours(log, 14)
        await eventually_async(lambda: sorted(positions(node)) == [("log", 0, 11), ("log", 1, 1)])
    assert sorted(map(str, taken(node)[6:])) == ["14", "5"]
    rows = node.rows("SELECT DISTINCT origin, sent_clock FROM mailroom.inbox WHERE origin = %s ORDER BY 2", OURS)
    assert [clock for _, clock in rows] == [5, 10, 11, 12, 13, 14]
    # Lamport's rule: what comes in is later than its send.
    assert node.value("SELECT bool_and(clock > sent_clock) FROM mailroom.inbox WHERE origin = %s", OURS)


async def test_position_says_in_which_log_it_is_until_another_one_is_told_or_somebody_sets_it(
    node: Node, log: Log
) -> None:
    log.add("log", b"1")
    [first] = log.parts["log", 0]
    assert first is not None
    first.log = "first"
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 1)])
        assert in_log(node) == "first"
        log.add("log", b"2")
        await eventually_async(lambda: positions(node) == [("log", 0, 2)])
        assert in_log(node) == "first"
    await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("log", 0, 1), actor="me"))
    assert in_log(node) is None


def in_log(node: Node) -> object:
    """Return in which log the position is."""
    return node.value("SELECT log FROM mailroom.bridge_position")


async def test_dispatcher_that_was_overtaken_takes_nothing_in_twice(node: Node, log: Log) -> None:
    log.add("log", b"1")
    async with tended(node):
        await eventually_async(lambda: taken(node) == [1])
        async with tended(node):  # as the next leader does
            log.add("log", b"2")
            log.add("log", b"3")
            await eventually_async(lambda: positions(node) == [("log", 0, 3)])
        await eventually_async(lambda: len(taken(node)) >= 3)
        log.add("log", b"4")
        await eventually_async(lambda: positions(node) == [("log", 0, 4)])
    assert taken(node) == [1, 2, 3, 4]


async def test_record_that_is_no_message_becomes_a_dead_letter_that_says_where_it_lies(node: Node, log: Log) -> None:
    log.add("log", b"1")
    log.add("log", b"\xff", content_type="application/json")
    log.add("log", b"3")
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 3)])
    assert taken(node) == [1, 3]
    [(stage, bridge, reason, value)] = node.rows("SELECT stage, bridge, reason, value FROM mailroom.dead_letter")
    assert (stage, bridge, codec.decode(value)) == ("take in", "in", b"\xff")
    assert "log[0]@1" in reason
    with node.connection.transaction():
        [letter] = DeadLetters().find(node.connection, stage="take in")
        assert letter.bridge == "in"


async def test_bridge_may_stop_at_such_a_record(node: Node, log: Log) -> None:
    set_bridge(node, "in", on_failure="stop")
    log.add("log", b"1")
    log.add("log", b"\xff", content_type="application/json")
    log.add("log", b"3")
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert taken(node) == [1]
        assert "log[0]@1" in why
        assert "--on-failure skip" in why
        seen, opened = set(), log.opened
        while log.opened < opened + 3:  # it is tried again and again, and nothing of that is taken in
            seen.add(in_state(node).state)
            await asyncio.sleep(0)
        assert seen == {"stopped"}
        set_bridge(node, "in", on_failure="skip")
        await lane.follow_until(lambda: taken(node) == [1, 3])
        await eventually_async(lambda: in_state(node).state == "open")


async def test_clock_that_no_node_has_holds_up_nobody(node: Node, log: Log) -> None:
    log.add("log", b"1")
    ours(log, 2**63 - 1)
    log.add("log", b"3")
    async with tended(node):
        await eventually_async(lambda: taken(node) == [1, 3])
    [(_, stage, reason)] = node.dead()
    assert (stage, "beyond what a node may have" in reason) == ("take in", True)
    assert node.value("SELECT last_value FROM mailroom.clock") < 2**62


async def test_origins_that_are_made_up_take_no_room_without_end_and_no_mark_of_another_one(
    node: Node, log: Log
) -> None:
    set_bridge(node, "in", max_origins=2)
    other = uuid4()
    ours(log, 11)
    for clock, sender in ((12, other), (13, uuid4()), (14, OURS), (12, other), (15, uuid4())):
        ours(log, clock, sender=sender)
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 6)])
    assert taken(node) == [11, 12, 14]
    assert node.value("SELECT count(*) FROM mailroom.bridge_mark") == 2
    reasons = [reason for _, _, reason in node.dead()]
    assert len(reasons) == 2
    assert all("one more origin than the 2 that the bridge may know" in reason for reason in reasons)
    set_bridge(node, "in", max_origins=3)
    ours(log, 16, sender=uuid4())
    async with tended(node):
        await eventually_async(lambda: taken(node) == [11, 12, 14, 16])


async def test_records_that_the_broker_lost_stop_the_bridge_until_somebody_says_where_to_go_on(
    node: Node, log: Log
) -> None:
    for n in range(5):
        log.add("log", str(n).encode())
    log.parts["log", 0][:3] = [None, None, None]
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert "mailroom bridge resume in --at log/0=3" in why
        assert taken(node) == []
        with node.connection.transaction():
            with pytest.raises(ConfigurationError, match="no position in partition 7"):
                Bridges().resume(node.connection, "in", at=BrokerPosition("log", 7, 3), actor="me")
            assert Bridges().resume(node.connection, "in", at=BrokerPosition("log", 0, 3), actor="me")
        await lane.follow_until(lambda: taken(node) == [3, 4])
        await eventually_async(lambda: in_state(node).state == "open")
        with node.connection.transaction():  # also back, while nothing comes
            assert not Bridges().resume(node.connection, "in", at=BrokerPosition("log", 0, 4), actor="me")
        await lane.follow_until(lambda: taken(node) == [3, 4, 4])
    changes = [change for (change,) in node.rows("SELECT change FROM mailroom.audit ORDER BY id DESC LIMIT 2")]
    assert changes == ["at log/0=4", "at log/0=3"]


async def test_log_that_was_cut_back_and_written_anew_is_not_read_on(node: Node, log: Log) -> None:
    for n in range(3):
        log.add("log", str(n).encode())
    async with tended(node):
        await eventually_async(lambda: taken(node) == [0, 1, 2])
    del log.parts["log", 0][1:]
    for n in range(11, 16):
        log.add("log", str(n).encode())
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert "the record at 2 is not the one that was taken in: the log was cut back, or made anew" in why
        assert taken(node) == [0, 1, 2]
        assert await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("log", 0, 1), actor="me"))
        await lane.follow_until(lambda: taken(node) == [0, 1, 2, 11, 12, 13, 14, 15])


async def test_record_where_there_was_none_is_of_a_log_that_was_cut_back(node: Node, log: Log) -> None:
    """The position stands after a transaction that was given up, which is cut off by a crash and written over."""
    for n in range(3):
        log.add("log", str(n).encode())
    async with tended(node):
        await eventually_async(lambda: taken(node) == [0, 1, 2])
    node.connection.execute("UPDATE mailroom.bridge_position SET next = 5")
    for n in range(3, 7):
        log.add("log", str(n).encode())
    async with tended(node) as lane:
        why = await eventually_async(lambda: why_stopped(node))
        assert "a record at 3 now, where none was: the log was cut back" in why
        assert "mailroom bridge resume in --at log/0=3" in why
        assert await beside(node, lambda it: Bridges().resume(it, "in", at=BrokerPosition("log", 0, 3), actor="me"))
        await lane.follow_until(lambda: taken(node) == [*range(7)])


async def test_log_of_which_only_what_was_taken_in_is_deleted_is_read_on(node: Node, log: Log) -> None:
    for n in range(3):
        log.add("log", str(n).encode())
    async with tended(node):
        await eventually_async(lambda: taken(node) == [0, 1, 2])
    log.parts["log", 0][:] = [None, None, None]
    log.add("log", b"3")
    async with tended(node):
        await eventually_async(lambda: taken(node) == [0, 1, 2, 3])
        assert in_state(node).state == "open"


async def test_nothing_but_a_person_forgets_that_records_are_lost(node: Node, log: Log) -> None:
    """Neither a retry, nor the next dispatcher, nor other trouble, though the log looks well by then."""
    log.add("log", b"0")
    log.add("log", b"1")
    [first, _] = log.parts["log", 0]
    log.parts["log", 0][0] = None
    async with tended(node):
        await eventually_async(lambda: why_stopped(node))
    log.parts["log", 0][0] = first
    bridge_in(node)  # anew, with the same settings
    assert "records are deleted there" in why_stopped(node)
    async with tended(node) as lane:
        [each] = lane.beside._tended.values()
        await eventually_async(lambda: each.tending._failures > 1)
        assert (taken(node), positions(node)) == ([], [("log", 0, 0)])
        node.connection.execute("UPDATE mailroom.origin SET trouble = 'failing', why = 'the disk is full'")
        assert "records are deleted there" in why_stopped(node)
        assert await beside(node, lambda it: Bridges().resume(it, "in", actor="me"))
        await lane.follow_until(lambda: taken(node) == [0, 1])


async def test_what_no_inbox_wants_is_kept_and_goes_to_who_subscribes_later(node: Node) -> None:
    log = bridge_in(node)
    node.inbox("orders", "log")  # to this node's own messages: not to the bridge's
    ours(log, 7)
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 1)])
        [(_, stage, reason)] = node.dead()
        assert (stage, reason) == ("take in", "no inbox subscribes to this topic of in")
        with node.connection.transaction():
            subscribe(node.connection, "orders", "log", origin="in")
            assert DeadLetters().requeue(node.connection, None, stage="take in", actor="me") == 1
    assert node.rows("SELECT origin, sent_clock FROM mailroom.inbox") == [(OURS, 7)]


@pytest.mark.usefixtures("impatient")
async def test_broker_away_is_told_and_read_again_when_it_is_back(node: Node, log: Log) -> None:
    log.away = "nobody listens there"
    log.add("log", b"1")
    async with tended(node):
        await eventually_async(lambda: in_state(node).state == "unreachable")
        assert in_state(node).why == "nobody listens there"
        log.away = None
        await eventually_async(lambda: taken(node) == [1])
        await eventually_async(lambda: in_state(node).state == "open")


async def test_excluded_bridge_takes_nothing_in_until_it_is_included(node: Node, log: Log) -> None:
    async with tended(node) as lane:
        await eventually_async(lambda: in_state(node).state == "open")
        with node.connection.transaction():
            Links().exclude(node.connection, "in", actor="me")
        log.add("log", b"1")
        await lane.follow()
        await lane.follow_until(lambda: not lane.beside._tended)
        assert taken(node) == []
        with node.connection.transaction():
            Links().include(node.connection, "in", actor="me")
        await lane.follow_until(lambda: taken(node) == [1])


def test_inbox_in_total_order_and_a_bridge_exclude_each_other(node: Node) -> None:
    bridge_in(node)
    with node.connection.transaction():
        create_inbox(node.connection, "ledger", order="total")
        for origin in ("in", "*"):
            with pytest.raises(NotSubscribed, match="broker shows no clocks"):
                subscribe(node.connection, "ledger", "#", origin=origin)
        Bridges().remove(node.connection, "in", actor="me")
        subscribe(node.connection, "ledger", "#", origin="*")
    with pytest.raises(ConfigurationError, match="would wait for ever"):
        bridge_in(node)
    assert node.rows("SELECT FROM mailroom.bridge_in") == []


def test_names_are_not_shared_with_nodes_and_nothing_is_left_of_a_bridge(node: Node, log: Log) -> None:
    links = Links()
    with node.connection.transaction():
        with pytest.raises(ConfigurationError, match="needs another name"):
            links.add(node.connection, "in", service="paris", actor="me")
        links.add(node.connection, "paris", service="paris", actor="me")
        assert [each.name for each in links.status(node.connection).sources] == ["paris"]
        with pytest.raises(ConfigurationError, match="nothing is stamped"):
            Bridges().cut(node.connection, "in", actor="me")
        Bridges().remove(node.connection, "in", actor="me")
    bridge_out(node)
    for name in ("paris", "out"):
        with pytest.raises(ConfigurationError, match="needs another name"):
            bridge_in(node, name=name)
    for table in ("bridge_in", "bridge_position", "bridge_mark"):
        assert node.rows(f"SELECT FROM mailroom.{table}") == []


async def test_message_comes_through_a_broker_as_it_was(node: Node, log: Log) -> None:
    """From one node into another: kind, headers, times and clocks, and once though it was published twice."""
    bridge_out(node, topics=("order.#",))
    with node.connection.transaction():
        Outbox().send(node.connection, "order.paid", {"n": 1}, key="k", headers={"by": "me"})
        Outbox().send(node.connection, "order.paid", {"n": 2}, key="k")
        records = publish(node.connection, "out")
    log.copy(records)
    log.copy(records)
    async with tended(node):
        await eventually_async(lambda: positions(node) == [("log", 0, 4)])
    rows = node.rows(
        "SELECT message_id, topic, key, headers, sent_clock, origin = (SELECT id FROM mailroom.node) "
        "FROM mailroom.inbox ORDER BY clock"
    )
    assert [(id, topic, key, clock, own) for id, topic, key, _, clock, own in rows] == [
        (record.id, "order.paid", "k", record.clock, True) for record in records
    ]
    assert rows[0][3] == {"by": "me"}
