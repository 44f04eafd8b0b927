"""Publishing: in order, acknowledged when the broker has it, and nothing is passed over in silence."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.rows import TupleRow

from dispatcher.bridges import tending
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.out import noting_trouble
from mailroom.bridges.record import Record
from mailroom.errors import ConfigurationError, UnknownBridge
from mailroom.links.links import Links
from mailroom.links.restored import saying_moved
from mailroom.links.start import jumping
from mailroom.node.dead_letter import DeadLetters
from mailroom.node.status import status
from mailroom.sql.runner import run
from mailroom.testing import publish
from outbox import Outbox
from tests.bridges.tended import NUMBERED, Lane, beside, bridge_in, bridge_out, out_state, set_bridge, tended
from tests.support.command import mailroom
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually_async

pytestmark = pytest.mark.usefixtures("quick")


def acked(node: Node) -> int:
    """Return up to which row the broker has everything."""
    return int(node.value("SELECT acked FROM mailroom.link"))


async def rest(node: Node, rows: int) -> None:
    """Wait until this many rows are acknowledged."""
    await eventually_async(lambda: acked(node) == rows)


async def test_what_is_stamped_is_published_in_order_and_acknowledged(node: Node) -> None:
    log = bridge_out(node, topics=("order.#",))
    ids = [node.send("order.paid", {"n": n}, key="k") for n in range(5)]
    node.send("stock", key="k")
    node.deliver_all()
    async with tended(node):
        await rest(node, 5)
        ids += [node.send("order.sent", key="k")]
        node.deliver_all()  # it rings
        await rest(node, 6)
    assert log.ids() == ids
    assert [record.clock for record in log.records] == sorted(record.clock for record in log.records)
    state = out_state(node)
    assert (state.state, state.backlog, state.acked, state.why) == ("open", 0, 6, None)


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_what_a_crash_leaves_unacknowledged_is_published_again_unless_the_broker_has_a_mark(
    node: Node, exactly_once: bool
) -> None:
    log = bridge_out(node, exactly_once=exactly_once)
    ids = [node.send("orders", key="k") for _ in range(3)]
    node.deliver_all()
    log.held = True
    async with tended(node):
        await eventually_async(lambda: len(log.records) == 3)
        assert acked(node) == 0
    log.held = False
    ids += [node.send("orders", key="k")]
    node.deliver_all()
    async with tended(node):
        await rest(node, 4)
    assert log.ids() == (ids if exactly_once else [*ids[:3], *ids])


async def test_broker_that_has_lost_what_it_acknowledged_stops_the_bridge_until_somebody_acts(node: Node) -> None:
    log = bridge_out(node, exactly_once=True)
    ids = [node.send("orders", key="k") for _ in range(3)]
    node.deliver_all()
    async with tended(node):
        await rest(node, 3)
    last, log.mark = log.mark, log.records[0].clock
    ids += [node.send("orders", key="k")]
    node.deliver_all()
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        why = out_state(node).why or ""
        assert f"up to clock {log.mark} by its mark, and had acknowledged them up to clock {last}" in why
        assert log.ids() == ids[:3]
        assert await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
        await lane.follow()
        await rest(node, 4)
    assert log.ids() == ids


async def test_log_that_lacks_what_it_acknowledged_stops_the_bridge_until_somebody_acts(node: Node) -> None:
    log = bridge_out(node, publisher=NUMBERED)
    ids = [node.send("orders", key="k") for _ in range(3)]
    node.deliver_all()

    async def stopped(told: str) -> None:
        await eventually_async(lambda: out_state(node).state == "stopped")
        why = out_state(node).why or ""
        assert f"partition 0 of log: the broker had acknowledged record {told}: the log was cut back" in why
        assert "mailroom bridge resume out" in why

    async def resumed(lane: Lane) -> None:
        assert await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
        await lane.follow()

    async with tended(node):
        await rest(node, 3)
        del log.records[1:]
        ids += [node.send("orders", key="k")]
        node.deliver_all()
        await stopped("2, and has given number 1 to a later one")
        assert acked(node) == 4  # it was published, and is not published again
    log.records += log.records[:1] * 9  # the log grows, and the database forgets nothing
    node.connection.execute("UPDATE mailroom.bridge_out SET state = 'open', why = NULL, since = NULL")
    ids += [node.send("orders", key="k")]
    node.deliver_all()
    async with tended(node) as lane:
        await stopped("2, and has given number 1 to a later one")
        assert acked(node) == 4
        await resumed(lane)
        await rest(node, 5)
    del log.records[5:]
    async with tended(node) as lane:
        await stopped("11, and its log ends before record 5")
        await resumed(lane)
        await eventually_async(lambda: out_state(node).state == "open")
    assert log.records[1].id == ids[3]


async def test_bridge_stops_at_what_the_broker_refuses_and_goes_on_once_somebody_has_acted(node: Node) -> None:
    log = bridge_out(node)
    ids = [node.send("orders", {"n": n}, key="k") for n in range(4)]
    node.deliver_all()
    log.refuse = lambda record: "too large." if record.id == ids[2] else None
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        state = out_state(node)
        assert state.why is not None
        assert "row 3 cannot be published: too large." in state.why
        assert "--on-failure skip" in state.why
        assert (state.acked, state.backlog) == (2, 2)
        assert node.dead() == []
        log.refuse = lambda record: None
        log.records.clear()
        assert await beside(node, lambda it: Bridges().resume(it, "out", actor="me", why="the limit is raised"))
        await lane.follow()
        await rest(node, 4)
        await eventually_async(lambda: out_state(node).state == "open")
        assert not await beside(node, lambda it: Bridges().resume(it, "out", actor="me"))
    assert log.ids() == ids[2:]


async def test_bridge_that_skips_keeps_the_message_and_the_order_of_the_rest(node: Node) -> None:
    log = bridge_out(node, on_failure="skip")
    ids = [node.send("orders", {"n": n}, key="k") for n in range(40)]
    node.deliver_all()
    refused = {ids[0], ids[17], ids[18], ids[39]}
    log.refuse = lambda record: "policy." if record.id in refused else None
    async with tended(node):
        await rest(node, 40)
        seen = list(dict.fromkeys(log.ids()))  # at least once: what came before a refused one may come twice
        assert seen == [id for id in ids if id not in refused]
        dead = node.rows("SELECT message_id, stage, bridge, reason FROM mailroom.dead_letter ORDER BY id")
        assert [(id, stage, bridge) for id, stage, bridge, _ in dead] == [
            (id, "publish", "out") for id in ids if id in refused
        ]
        assert "policy. [MR-bridge-record-refused]" in dead[0][3]
        log.refuse = lambda record: None
        log.records.clear()
        with node.connection.transaction():
            assert DeadLetters().requeue(node.connection, None, stage="publish", actor="me") == 4
        await rest(node, 44)
    assert log.ids() == [id for id in ids if id in refused]
    clocks = node.rows("SELECT seq, sent_clock FROM mailroom.transit ORDER BY seq")
    assert [clock for _, clock in clocks] == sorted(clock for _, clock in clocks)


async def test_row_that_holds_a_bridge_up_is_skipped_by_hand_and_comes_after_a_requeue(node: Node) -> None:
    log, bridges = bridge_out(node), Bridges()
    ids = [node.send("orders", {"n": n}, key="k") for n in range(3)]
    node.deliver_all()
    log.refuse = lambda record: "policy." if record.id == ids[1] else None
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert "To leave it out: mailroom bridge skip out --row 2." in (out_state(node).why or "")
        with node.connection.transaction():
            assert bridges.skip(node.connection, "out", 2, actor="me", why="an old customer") == ids[1]
        assert out_state(node).state == "open"
        await lane.follow_until(lambda: acked(node) == 3)
        assert list(dict.fromkeys(log.ids())) == [ids[0], ids[2]]
        with node.connection.transaction():
            for row in (1, 2, 4):  # published, skipped, none
                with pytest.raises(ConfigurationError, match=f"Row {row} does not wait for bridge out"):
                    bridges.skip(node.connection, "out", row, actor="me")
        reason = node.value("SELECT reason FROM mailroom.dead_letter")
        assert reason == "bridge out: row 2 was skipped by me: an old customer"
        log.refuse = lambda record: None
        with node.connection.transaction():
            assert DeadLetters().requeue(node.connection, None, stage="publish", actor="me") == 1
        await rest(node, 4)
    assert list(dict.fromkeys(log.ids())) == [ids[0], ids[2], ids[1]]


async def test_message_without_a_record_holds_up_or_is_skipped_but_never_lost(node: Node) -> None:
    log = bridge_out(node)
    first = node.send("orders", key="k")
    twice = node.send("orders", {b"a": 1, "YQ==": 2}, key="k")  # both keys are the same text in JSON
    last = node.send("orders", key="k")
    node.deliver_all()
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert acked(node) == 1
        set_bridge(node, "out", on_failure="skip")
        await lane.follow_until(lambda: acked(node) == 3)
    assert log.ids() == [first, last]
    assert node.value("SELECT message_id FROM mailroom.dead_letter WHERE stage = 'publish'") == twice


@pytest.mark.usefixtures("impatient")
async def test_broker_away_is_told_and_everything_is_published_when_it_is_back(node: Node) -> None:
    log = bridge_out(node)
    log.away = "nobody listens there"
    node.send("orders", key="k")
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "unreachable")
        state = out_state(node)
        assert (state.why, state.backlog) == ("nobody listens there", 1)
        assert state.since is not None
        idle = "state ^@ 'idle in transaction'"  # but for the moment in which trouble is noted
        await eventually_async(
            lambda: not (node.sessions("mailroom bridges", idle) + node.sessions("mailroom links", idle))
        )
        log.away = None
        await rest(node, 1)
        await eventually_async(lambda: out_state(node).state == "open")
    assert out_state(node).since is None
    assert len(log.records) == 1


@pytest.mark.usefixtures("impatient")
async def test_slow_broker_is_told_while_it_is_waited_for(node: Node) -> None:
    log = bridge_out(node)
    log.held = log.answers = True
    node.send("orders", key="k")
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: len(log.records) == 1)
        asked = log.asked
        await eventually_async(lambda: log.asked > asked + 5)
        assert out_state(node).state == "open"  # it takes long, and records flow
        log.answers = False
        await eventually_async(lambda: out_state(node).state == "unreachable")
        assert out_state(node).why == "the broker has not answered"
        log.answers = True
        await eventually_async(lambda: out_state(node).state == "open")
        log.held = False
        await rest(node, 1)
    assert len(log.records) == 1


async def test_expired_message_is_not_published_any_more(node: Node) -> None:
    log = bridge_out(node)
    node.send("orders", key="k", expires_at=datetime.now(UTC) + timedelta(hours=1))
    kept = node.send("orders", key="k")
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.transit SET expires_at = now() WHERE expires_at IS NOT NULL")
    async with tended(node):
        await rest(node, 2)
    assert log.ids() == [kept]


async def test_dispatcher_that_was_overtaken_acknowledges_nothing(node: Node) -> None:
    log = bridge_out(node)
    log.held = True
    node.send("orders", key="k")
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: len(log.records) == 1)
        node.connection.execute("UPDATE mailroom.link SET run = gen_random_uuid()")  # another one has the link
        opened = log.opened
        log.held = False
        await eventually_async(lambda: log.opened > opened)
        await rest(node, 1)  # it took the link back, and has published it again
    assert len(log.records) == 2


async def test_bridge_that_is_cut_ends_and_another_can_be_made(node: Node) -> None:
    log = bridge_out(node)
    log.away = "gone"
    node.send("orders", key="k")
    node.deliver_all()
    async with tended(node) as lane:
        with node.connection.transaction():
            assert Bridges().cut(node.connection, "out", actor="me", dry_run=True) == 1
            assert Bridges().cut(node.connection, "out", actor="me") == 1
        assert out_state(node).state == "cut"
        await lane.follow()
        node.send("orders", key="k")
        node.deliver_all()
        assert node.value("SELECT count(*) FROM mailroom.transit") == 1
        assert await beside(node, lambda it: Bridges().remove(it, "out", actor="me")) == 1
        log.away = None
        assert bridge_out(node) is log
        id = node.send("orders", key="k")
        node.deliver_all()
        await lane.follow_until(lambda: acked(node) == 1)
    assert log.ids() == [id]
    actions = [action for (action,) in node.rows("SELECT action FROM mailroom.audit ORDER BY id")]
    assert actions == ["bridge out", "bridge cut", "bridge remove", "bridge out"]


def test_names_are_not_shared_with_nodes_and_the_mark_stays_where_it_is(node: Node) -> None:
    bridge_out(node)
    links, bridges = Links(), Bridges()
    with node.connection.transaction():
        with pytest.raises(ConfigurationError, match="needs another name"):
            links.allow(node.connection, "out", actor="me")
        links.allow(node.connection, "lyon", actor="me")
    bridge_in(node)
    for name in ("lyon", "in"):
        with pytest.raises(ConfigurationError, match="needs another name"):
            bridge_out(node, name=name)
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        bridge_out(node, exactly_once=True)
    with node.connection.transaction():
        assert [each.name for each in links.status(node.connection).readers] == ["lyon"]
        assert [each.name for each in bridges.status(node.connection).out] == ["out"]
        with pytest.raises(UnknownBridge):
            bridges.cut(node.connection, "lyon", actor="me")
    assert node.value("SELECT reader_id IS NOT NULL FROM mailroom.link WHERE name = 'out'")


def test_testing_publish_gives_records_without_a_broker(node: Node) -> None:
    bridge_out(node, topics=("order.#",))
    with psycopg.connect(node.dsn) as conn:
        id = Outbox().send(conn, "order.paid", {"order": 42}, key="order-42")
        Outbox().send(conn, "stock", {"tea": 1})
        [record] = publish(conn, "out")
        assert isinstance(record, Record)
        assert (record.topic, record.key, record.value, record.id) == ("log", b"order-42", b'{"order":42}', id)
        assert publish(conn, "out") == []
        conn.rollback()
    assert node.value("SELECT count(*) FROM mailroom.transit") == 0


def put_back(node: Node, waiting: Sequence[TupleRow]) -> None:
    """Put the node back to where it had stamped one row, and these messages waited."""
    node.connection.execute("DELETE FROM mailroom.transit WHERE seq > 1")
    node.connection.execute("UPDATE mailroom.link SET acked = 1")
    for row in waiting:
        node.connection.execute(
            "INSERT INTO mailroom.outbox (message_id, topic, key, value) VALUES (%s, %s, %s, %s)", row
        )


WAITING = "SELECT message_id, topic, key, value FROM mailroom.outbox ORDER BY position"


async def test_what_a_lost_history_has_published_is_not_published_again(node: Node) -> None:
    """The node is put back to where one of three messages was delivered; the others are stamped anew."""
    log = bridge_out(node)
    ids = [node.send("orders", {"n": n}, key="k") for n in range(3)]
    backup = node.rows(WAITING)
    node.deliver_all()
    async with tended(node):
        await rest(node, 3)
    lost = node.send("orders", {"n": 3}, key="k")  # sent after the backup: nobody sends it again
    node.deliver_all()
    async with tended(node):
        await rest(node, 4)
    with node.connection.transaction():
        put_back(node, backup[1:])
        run(node.connection, jumping(SCHEMA, is_here=True))
    new = node.send("orders", {"n": 4}, key="k")
    node.deliver_all()
    async with tended(node):
        await rest(node, 4)
    assert log.ids() == [*ids, lost, new]
    assert node.value("SELECT count(*) FROM mailroom.bridge_known") == 3
    assert node.value("SELECT matched = (SELECT life FROM mailroom.node) FROM mailroom.link")
    before = log.opened
    async with tended(node):
        await eventually_async(lambda: log.opened > before)
    assert log.ids() == [*ids, lost, new]


async def test_what_waited_at_the_time_of_a_dump_and_was_published_since_is_not_published_again(node: Node) -> None:
    log = bridge_out(node)
    ids = [node.send("orders", {"n": n}, key="k") for n in range(3)]
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
    async with tended(node):
        await rest(node, 3)
    with node.connection.transaction():
        node.connection.execute("UPDATE mailroom.link SET acked = 1")
        node.connection.execute("UPDATE mailroom.node SET database_oid = database_oid + 1")
        assert run(node.connection, saying_moved(SCHEMA, actor="me"))
    ids += [node.send("orders", {"n": 3}, key="k")]
    node.deliver_all()
    async with tended(node):
        await rest(node, 4)
    assert log.ids() == ids


def test_status_of_the_node_tells_that_nothing_is_published(node: Node) -> None:
    bridge_out(node)
    with node.connection.transaction():
        [open_one] = status(node.connection).links
        run(node.connection, noting_trouble(SCHEMA, 1, "unreachable", "no server answers", 3.0))
        [away] = status(node.connection).links
        assert (open_one.state, away.state) == ("open", "unreachable")
    assert "unreachable: mailroom bridge status" in mailroom("status", dsn=node.dsn).output


@pytest.mark.usefixtures("impatient")
async def test_bridge_that_is_there_before_the_dispatcher_has_started_waits_for_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the start finds out that history was lost: who took the link before would publish all of it again."""
    monkeypatch.setattr(tending, "STARTED_WITHIN_S", 0.05)
    log = bridge_out(node)
    ids = [node.send("orders", {"n": n}, key="k") for n in range(3)]
    backup = node.rows(WAITING)
    node.deliver_all()
    async with tended(node):
        await rest(node, 3)
    before = log.opened
    with node.connection.transaction():
        put_back(node, backup[1:])
        node.connection.execute("UPDATE mailroom.node SET started_at = started_at - interval '1 hour'")
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "failing")
        assert out_state(node).why == tending.NOT_STARTED
        assert log.opened == before
        ids += [node.send("orders", {"n": 3}, key="k")]
        node.deliver_all()
        await rest(node, 4)
        await eventually_async(lambda: out_state(node).state == "open")
    assert log.ids() == ids


async def test_bridge_that_runs_while_somebody_says_that_history_was_lost_begins_anew(node: Node) -> None:
    log = bridge_out(node)
    ids = [node.send("orders", {"n": n}, key="k") for n in range(3)]
    backup = node.rows(WAITING)
    node.deliver_all()
    async with tended(node):
        await rest(node, 3)
        before = log.opened
        with node.connection.transaction():
            put_back(node, backup[1:])
            run(node.connection, jumping(SCHEMA, is_here=True))
        ids += [node.send("orders", {"n": 3}, key="k")]
        node.deliver_all()
        await rest(node, 4)
        assert log.opened > before
    assert log.ids() == ids


async def test_copy_of_a_node_publishes_nothing_before_somebody_says_that_it_is_the_node(node: Node) -> None:
    log = bridge_out(node)
    node.send("orders", key="k")
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.node SET database_oid = database_oid + 1")
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert "mailroom node moved" in (out_state(node).why or "")
        assert log.opened == 0
        with node.connection.transaction():
            assert run(node.connection, saying_moved(SCHEMA, actor="me"))
            Bridges().resume(node.connection, "out", actor="me")
        await lane.follow()
        await rest(node, 1)


async def test_broker_with_later_clocks_than_this_node_s_stops_the_bridge_before_anything_looks_like_a_repeat(
    node: Node,
) -> None:
    log = bridge_out(node, exactly_once=True)
    log.mark = 10**15
    node.send("orders", key="k")
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert f"mailroom node advance {10**15}" in (out_state(node).why or "")
    assert log.records == []
    assert acked(node) == 0
