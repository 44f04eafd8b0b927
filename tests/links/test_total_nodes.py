"""Total order between nodes: what bounds it, marks, joins, exclusions, and three nodes that all have one order."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from inbox import Inbox
from mailroom import subscribe, unsubscribe
from mailroom.links.links import Links
from mailroom.links.marks import asking_mark, marking, wanting_marks
from mailroom.node.status import status
from mailroom.order.total import LATE, Waiting, raising_stable, waiting
from mailroom.sql import locks
from mailroom.sql.runner import run
from tests.support.databases import Databases
from tests.support.links import Linked, linked, wanted_topics
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S

LEDGER = Inbox("ledger")


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    """`target` reads `source`, which it calls north, and has a total inbox with both nodes' messages of `sale`."""
    for node in (source, target):
        node.allow_clocks()
    pair = linked(source, target, ["sale"])
    target.inbox("ledger", "sale", order="total", origin="*")
    return pair


def values(node: Node) -> list[Any]:
    with node.connection.transaction():
        return [message.value for message in LEDGER.reap_any(node.connection)]


def stable(node: Node) -> int:
    return int(node.value("SELECT coalesce(max(clock), 0) FROM mailroom.stable"))


def clock(node: Node, to: int | None = None) -> int:
    if to is not None:
        node.connection.execute("SELECT setval('mailroom.clock', %s)", [to])
    return int(node.value("SELECT last_value FROM mailroom.clock"))


def wanted(node: Node) -> list[tuple[int, int]]:
    return run(node.connection, wanting_marks(SCHEMA))


def dispatch(node: Node) -> None:
    """Deliver all, and append the marks that are wanted, as a dispatcher does when it is rung."""
    while True:
        delivery = node.deliver()
        if delivery.is_mark_wanted:
            mark(node)
        if not delivery.more:
            return


def mark(node: Node) -> int:
    with node.connection.transaction():
        return run(node.connection, marking(SCHEMA))


def read(pair: Linked) -> None:
    """Receive what is there."""
    last = pair.source.value("SELECT max(seq) FROM mailroom.transit WHERE link = %s", pair.link) or 0
    while pair.position().seq < last:
        assert pair.take().outcome == "taken"


def turn(pair: Linked) -> None:
    """Do what the target's links lane does in a turn: ask for topics, read, and ask for the marks that are wanted."""
    topics = run(pair.target.connection, wanted_topics(SCHEMA, pair.name))
    with pair.source.connection.transaction():
        pair.source.connection.execute("DELETE FROM mailroom.link_topic WHERE link = %s", [pair.link])
        for topic in topics:
            pair.source.connection.execute("INSERT INTO mailroom.link_topic VALUES (%s, %s)", [topic, pair.link])
    read(pair)
    for origin, at_least in wanted(pair.target):
        if origin == pair.origin:
            run(pair.source.connection, asking_mark(SCHEMA, pair.link, pair.run, at_least))


# -- The bound --------------------------------------------------------------------------------------------------------


def test_own_message_is_held_until_the_other_node_has_shown_as_much(pair: Linked) -> None:
    pair.target.send("sale", "mine")
    pair.target.deliver()
    assert values(pair.target) == []
    [found] = status(pair.target.connection).inboxes
    assert (found.order, found.held_back, found.waits_for) == ("total", 1, "north")
    pair.put({"sent_clock": 1, "topic": "sale", "value": b"\x01"})
    read(pair)
    assert sorted(map(str, values(pair.target))) == ["1", "mine"]
    assert status(pair.target.connection).inboxes[0].waits_for is None


def test_bound_is_the_lowest_clock_that_an_origin_has_shown(target: Node) -> None:
    target.allow_clocks()
    target.inbox("ledger", "sale", order="total", origin="*")
    for name, shown in (("north", 30), ("east", 10), ("west", 20)):
        number = target.value("INSERT INTO mailroom.origin (name, id) VALUES (%s, %s) RETURNING number", name, uuid4())
        receipt(target, number, 1, shown)
    run(target.connection, raising_stable(SCHEMA))
    assert stable(target) == 10
    assert run(target.connection, waiting(SCHEMA)) == [Waiting("ledger", 10, 0, None, None, False)]


def receipt(node: Node, origin: int, seq: int, shown: int) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids) "
        "VALUES (%s, %s, %s, %s, now(), %s, '{}')",
        [origin, seq, seq, uuid4(), shown],
    )


def test_what_is_stable_never_falls(pair: Linked) -> None:
    rows = "SELECT clock FROM mailroom.stable ORDER BY clock"
    receipt(pair.target, pair.origin, 1, 50)
    run(pair.target.connection, raising_stable(SCHEMA))
    receipt(pair.target, pair.origin, 2, 40)
    run(pair.target.connection, raising_stable(SCHEMA))
    assert pair.target.rows(rows) == [(50,)]


def test_own_stamps_are_later_than_what_was_shown(pair: Linked) -> None:
    pair.put({"kind": "H", "sent_clock": 500, "topic": "", "key": ""})
    read(pair)
    pair.target.send("sale", "mine")
    assert pair.target.deliver().clock == 501
    assert stable(pair.target) == 500


@pytest.mark.slow
def test_receiving_wakes_the_workers_of_an_inbox_that_only_gets_further(pair: Linked) -> None:
    pair.target.send("sale", "mine")
    pair.target.deliver()
    with psycopg.connect(pair.target.dsn, autocommit=True) as sleeper:
        partition = "'mailroom.inbox_ledger'::regclass"
        sleeper.execute(f"SELECT pg_advisory_lock_shared({locks.ASLEEP}, {locks.key(partition)})".encode())
        sleeper.execute(f'LISTEN "mailroom:{pair.target.value("SELECT " + partition + "::oid")}"'.encode())
        pair.put({"kind": "H", "sent_clock": 500, "topic": "", "key": ""})
        read(pair)
        assert len(list(sleeper.notifies(timeout=WITHIN_S, stop_after=1))) == 1


# -- Marks ------------------------------------------------------------------------------------------------------------


def test_mark_is_asked_for_only_while_something_is_held(pair: Linked) -> None:
    assert wanted(pair.target) == []
    pair.target.send("sale", "mine")
    pair.target.deliver()
    assert wanted(pair.target) == [(pair.origin, 1)]
    turn(pair)
    dispatch(pair.source)
    turn(pair)
    assert values(pair.target) == ["mine"]
    assert wanted(pair.target) == []


def test_question_for_a_mark_is_written_once_and_rings_the_dispatcher(pair: Linked) -> None:
    source = pair.source
    with psycopg.connect(source.dsn, autocommit=True) as dispatcher:
        outbox = source.value("SELECT 'mailroom.outbox'::regclass::oid")
        dispatcher.execute(f'LISTEN "mailroom:{outbox}"'.encode())
        assert run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
        assert len(list(dispatcher.notifies(timeout=WITHIN_S, stop_after=1))) == 1
    before = source.value("SELECT xmin::text FROM mailroom.link")
    assert run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
    assert run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, 600))
    assert source.value("SELECT xmin::text FROM mailroom.link") == before
    assert not run(source.connection, asking_mark(SCHEMA, pair.link, uuid4(), 900)), "another daemon has the link"
    assert mark(source) == 1
    assert not run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700)), "it is there to be fetched"


def test_mark_raises_the_clock_and_is_a_row_behind_the_last(pair: Linked) -> None:
    source = pair.source
    source.send("sale", 1)
    source.deliver()
    run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
    assert source.deliver().is_mark_wanted
    assert mark(source) == 1
    assert clock(source) == 700
    assert source.rows("SELECT seq, kind::text, sent_clock FROM mailroom.transit ORDER BY seq") == [
        (1, "M", 1), (2, "H", 700)
    ]  # fmt: skip
    assert mark(source) == 0
    assert not source.deliver().is_mark_wanted
    source.send("sale", 2)
    assert source.deliver().clock == 701


def test_mark_of_a_node_that_is_further_has_its_own_clock(pair: Linked) -> None:
    clock(pair.source, 900)
    run(pair.source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
    assert mark(pair.source) == 1
    assert pair.source.value("SELECT sent_clock FROM mailroom.transit") == 900


def test_mark_above_the_ceiling_raises_it_first(pair: Linked) -> None:
    run(pair.source.connection, asking_mark(SCHEMA, pair.link, pair.run, 5_000_000))
    assert mark(pair.source) == 1
    assert pair.source.value("SELECT clock_ceiling FROM mailroom.node") > 5_000_000


def test_mark_commits_synchronously(pair: Linked) -> None:
    run(pair.source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
    pair.source.connection.execute("SET synchronous_commit = off")
    with pair.source.connection.transaction():
        run(pair.source.connection, marking(SCHEMA))
        assert pair.source.value("SHOW synchronous_commit") == "on"


def test_dispatcher_that_finds_a_question_appends_the_mark(pair: Linked) -> None:
    run(pair.source.connection, asking_mark(SCHEMA, pair.link, pair.run, 700))
    pair.source.deliver_all()
    assert pair.source.value("SELECT kind::text FROM mailroom.transit") == "H"


def test_idle_nodes_write_nothing(pair: Linked) -> None:
    pair.target.send("sale", "mine")
    pair.target.deliver()
    for _ in range(3):
        turn(pair)
        dispatch(pair.source)
        dispatch(pair.target)
    rows = "SELECT (SELECT count(*) FROM mailroom.transit), (SELECT count(*) FROM mailroom.stable), "
    rows += "(SELECT count(*) FROM mailroom.receipt), (SELECT max(xmin::text::bigint) FROM mailroom.link)"
    before = [node.rows(rows) for node in (pair.source, pair.target)]
    for _ in range(3):
        assert wanted(pair.target) == []
        turn(pair)
        dispatch(pair.source)
        dispatch(pair.target)
    assert [node.rows(rows) for node in (pair.source, pair.target)] == before


# -- Joining and leaving ----------------------------------------------------------------------------------------------


def test_who_joins_wants_what_is_sent_from_now_on_and_asks_only_then(pair: Linked) -> None:
    target = pair.target
    clock(target, 800)
    with target.connection.transaction():
        unsubscribe(target.connection, "ledger", "sale", origin="*")
        subscribe(target.connection, "ledger", "sale", origin="north")
    assert target.value("SELECT since FROM mailroom.subscription") == 800
    assert run(target.connection, wanted_topics(SCHEMA, "north")) == []
    assert wanted(target) == [(pair.origin, 800)]
    turn(pair)
    assert pair.source.rows("SELECT FROM mailroom.link_topic") == []
    dispatch(pair.source)
    turn(pair)
    assert run(target.connection, wanted_topics(SCHEMA, "north")) == ["sale"]
    turn(pair)
    pair.source.send("sale", "theirs")
    dispatch(pair.source)
    assert pair.source.value("SELECT max(sent_clock) FROM mailroom.transit WHERE kind = 'M'") > 800
    turn(pair)
    assert target.value("SELECT count(*) FROM mailroom.inbox WHERE origin = %s", pair.source_id) == 1


def test_inbox_that_joins_does_not_let_another_one_pass_older_messages(pair: Linked) -> None:
    target = pair.target
    pair.put({"sent_clock": 10, "topic": "sale"})
    read(pair)
    clock(target, 800)
    target.inbox("second", "sale", order="total", origin="north")
    run(target.connection, raising_stable(SCHEMA))
    assert target.rows("SELECT inbox, max(clock) FROM mailroom.stable GROUP BY inbox ORDER BY inbox") == [
        ("ledger", 10), ("second", 800)
    ]  # fmt: skip
    pair.put({"sent_clock": 20, "topic": "sale"})
    read(pair)
    assert target.rows("SELECT inbox, sent_clock FROM mailroom.inbox ORDER BY sent_clock") == [
        ("ledger", 10), ("ledger", 20)
    ]  # fmt: skip
    assert target.dead() == []


def test_subscribing_waits_for_a_delivery_under_way_and_holds_the_next_one_up(pair: Linked) -> None:
    with psycopg.connect(pair.target.dsn) as joining:
        subscribe(joining, "ledger", "other", origin="north")
        found = pair.target.value(
            "SELECT count(*) FROM pg_locks WHERE relation = 'mailroom.dispatch_turn'::regclass AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
        assert found == 1


def test_origin_that_is_added_later_starts_at_the_clock_of_then(pair: Linked) -> None:
    target = pair.target
    clock(target, 800)
    with target.connection.transaction():
        Links().add(target.connection, "east", actor="ada")
    assert target.value("SELECT shown FROM mailroom.origin WHERE name = 'east'") == 800
    assert run(target.connection, wanted_topics(SCHEMA, "east")) == []
    receipt(target, target.value("SELECT number FROM mailroom.origin WHERE name = 'east'"), 1, 800)
    assert run(target.connection, wanted_topics(SCHEMA, "east")) == ["sale"]


def test_excluded_origin_is_not_waited_for_and_too_late_when_included(pair: Linked) -> None:
    target = pair.target
    pair.put({"sent_clock": 10, "topic": "sale"})
    read(pair)
    clock(target, 100)
    target.send("sale", "mine")
    target.deliver()
    target.connection.execute("DELETE FROM mailroom.inbox WHERE origin = %s", [pair.source_id])
    assert values(target) == []
    with target.connection.transaction():
        assert Links().exclude(target.connection, "north", actor="ada")
    assert values(target) == ["mine"]
    with target.connection.transaction():
        assert Links().include(target.connection, "north", actor="ada")
    late, timely = pair.put({"sent_clock": 50, "topic": "sale"}, {"sent_clock": 102, "topic": "sale"})
    assert pair.take().dead == 1
    assert target.rows("SELECT message_id FROM mailroom.inbox") == [(timely,)]
    assert target.rows("SELECT message_id, stage, reason, inbox, sent_clock FROM mailroom.dead_letter") == [
        (late, "order", LATE, "ledger", 50)
    ]


def test_late_message_still_comes_to_inboxes_by_key(pair: Linked) -> None:
    pair.inbox("plain", "sale")
    pair.target.connection.execute("INSERT INTO mailroom.stable VALUES ('ledger', 50)")
    pair.put({"sent_clock": 50, "topic": "sale"}, {"sent_clock": 51, "topic": "sale"})
    read(pair)
    assert pair.target.rows("SELECT inbox, sent_clock FROM mailroom.inbox ORDER BY inbox, sent_clock") == [
        ("ledger", 51), ("plain", 50), ("plain", 51)
    ]  # fmt: skip


def test_unsubscribing_from_the_node_that_is_waited_for_lets_the_others_go_on(pair: Linked) -> None:
    target = pair.target
    with target.connection.transaction():
        subscribe(target.connection, "ledger", "sale")
    target.send("sale", "mine")
    target.deliver()
    assert values(target) == []
    with target.connection.transaction():
        unsubscribe(target.connection, "ledger", "sale", origin="*")
    assert values(target) == ["mine"]


def test_removed_origin_is_not_waited_for(pair: Linked) -> None:
    pair.target.send("sale", "mine")
    pair.target.deliver()
    with pair.target.connection.transaction():
        Links().remove(pair.target.connection, "north", actor="ada")
    assert values(pair.target) == ["mine"]


def test_node_that_lost_history_stands_until_somebody_says_so(pair: Linked) -> None:
    target = pair.target
    target.connection.execute("UPDATE mailroom.node SET incarnation = 2")
    pair.put({"sent_clock": 10, "topic": "sale"})
    read(pair)
    assert values(target) == []
    [found] = status(target.connection).inboxes
    assert (found.held_back, found.is_stopped) == (1, True)
    with target.connection.transaction():
        assert Links().resume_order(target.connection, actor="ada")
        assert not Links().resume_order(target.connection, actor="ada")
    assert len(values(target)) == 1


# -- Three nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(databases: Databases) -> Iterator[list[Node]]:
    with ExitStack() as closing:
        nodes = []
        for _ in range(3):
            dsn = databases.create(migrated=True)
            closing.callback(databases.drop, dsn)
            node = Node(dsn, closing.enter_context(psycopg.connect(dsn, autocommit=True)))
            node.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
            node.allow_clocks()
            nodes.append(node)
        yield nodes


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_three_nodes_have_one_order_whatever_the_turns(ring: list[Node], seed: int) -> None:
    chance = random.Random(seed)
    names = ["a", "b", "c"]
    pairs = [
        linked(source, target, [], name=names[s], reader=names[t])
        for s, source in enumerate(ring) for t, target in enumerate(ring) if s != t
    ]  # fmt: skip
    for node in ring:
        node.inbox("ledger", "sale", order="total", origin="*")
    for pair in pairs:
        turn(pair)
    given: list[list[Any]] = [[], [], []]
    sent: list[str] = []

    def reap(nth: int, *, rolls_back: bool) -> None:
        with ring[nth].connection.transaction(force_rollback=rolls_back):
            found = [(each.sent_clock, each.origin, each.value) for each in LEDGER.reap_any(ring[nth].connection, 3, 1)]
        given[nth] += [] if rolls_back else found

    for step in range(150):
        nth = chance.randrange(3)
        match chance.choice("sdtttr"):
            case "s":
                sent.append(f"{names[nth]}{step}")
                ring[nth].send("sale", sent[-1], key=chance.choice("xyz"))
            case "d":
                dispatch(ring[nth])
            case "t":
                turn(chance.choice(pairs))
            case _:
                reap(nth, rolls_back=chance.random() < 0.3)
    for _ in range(12):
        for node in ring:
            dispatch(node)
        for pair in pairs:
            turn(pair)
    for nth in range(3):
        while len(given[nth]) < len(sent):
            before = len(given[nth])
            reap(nth, rolls_back=False)
            assert before < len(given[nth]), "nothing is stuck"
    assert given[0] == given[1] == given[2] == sorted(given[0])
    assert sorted(value for _, _, value in given[0]) == sorted(sent)
    assert [node.dead() for node in ring] == [[], [], []]
