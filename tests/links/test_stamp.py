"""The stamp: what a delivery writes into `transit` for the links, in which order, and how it commits."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dispatcher.delivery import deliverer
from dispatcher.delivery.deliver import DELIVER_FULL, DELIVERY_SESSION, Delivery, delivering
from dispatcher.delivery.deliverer import Deliverer
from mailroom import Links, testing
from mailroom.links.readers import settling
from mailroom.message.columns import MESSAGE
from mailroom.sql import locks
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.explain import below, explained
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, send

pytestmark = [pytest.mark.both_versions, pytest.mark.node_sql(CLOCKS_ALLOWED)]

KINDS = "MECR"
NOW = datetime.now(UTC)
SOON = NOW + timedelta(hours=1)
LATER = NOW + timedelta(hours=2)
TRANSIT = "'mailroom.transit'::regclass"


def link(node: Node, name: str, *topics: str, allowed: Sequence[str] | None = None) -> int:
    """Allow a reader that wants these topics, and may have these; return the number of its link."""
    number: int = node.value("INSERT INTO mailroom.link (name) VALUES (%s) RETURNING number", name)
    for topic in allowed or ():
        node.connection.execute("INSERT INTO mailroom.link_allowed (link, topic) VALUES (%s, %s)", [number, topic])
    run(node.connection, settling(SCHEMA))
    for topic in topics:
        node.connection.execute("INSERT INTO mailroom.link_topic (topic, link) VALUES (%s, %s)", [topic, number])
    return number


def transit(node: Node, columns: str = "seq, key") -> list[Any]:
    return node.rows(f"SELECT {columns} FROM mailroom.transit ORDER BY link, seq")


# -- What a link carries ----------------------------------------------------------------------------------------------


def test_link_that_is_allowed_the_exact_topic_carries_every_kind(node: Node) -> None:
    lyon = link(node, "lyon", "order.paid", allowed=["#", "order.paid"])
    for kind in KINDS:
        node.send("order.paid", key="k", kind=kind)
    node.send("order.Paid", key="other", kind="E")
    totals = node.deliver_all()
    assert (totals.taken, totals.carried, totals.delivered, totals.dead, totals.unrouted) == (5, 4, 0, 0, 1)
    assert transit(node, "link, seq, key, kind::text") == [(lyon, nth, "k", kind) for nth, kind in enumerate(KINDS, 1)]
    assert node.waiting() == []


def test_link_that_wants_a_pattern_carries_messages_and_events_only(node: Node) -> None:
    patterns = ("order.*", "order.#", "#", "*.paid")
    links = [link(node, f"link_{nth}", pattern, "invoice.*") for nth, pattern in enumerate(patterns)]
    for kind in KINDS:
        node.send("order.paid", key=kind, kind=kind)
    totals = node.deliver_all()
    assert (totals.carried, totals.dead) == (2 * len(links), 2)
    assert transit(node, "link, seq, key") == [(each, *row) for each in links for row in ((1, "M"), (2, "E"))]
    [reason] = {reason for _, _, reason in node.dead()}
    assert reason == (
        "no inbox gets this topic: patterns get no commands and no replies, nor do readers and bridges without the "
        "topic by its name (mailroom link allow, mailroom bridge out)"
    )


def test_pattern_of_a_link_fits_as_one_of_an_inbox_does(node: Node) -> None:
    patterns = ["a.*", "a.#", "*.b", "a_b.*", "a.*.c", "#"]
    for nth, pattern in enumerate(patterns):
        node.inbox(f"inbox_{nth}", pattern)
        link(node, f"link_{nth}", pattern)
    for topic in ("a", "a.b", "a.b.c", "aXb.c", "a_b.c", "b.b", "a.", "a..c"):
        node.send(topic, key=topic, kind="E")
    node.deliver_all()
    got = node.rows("SELECT replace(inbox, 'inbox_', ''), key FROM mailroom.inbox ORDER BY 1, 2")
    carried = node.rows(
        "SELECT replace(name, 'link_', ''), key FROM mailroom.transit JOIN mailroom.link ON number = link ORDER BY 1, 2"
    )
    assert carried == got
    assert len({pattern for pattern, _ in got}) == len(patterns)


def test_link_that_wants_a_topic_twice_carries_it_once(node: Node) -> None:
    link(node, "lyon", "order.paid", "order.*", "#", allowed=["#", "order.paid"])
    for kind in "MC":
        node.send("order.paid", key=kind, kind=kind)
    assert node.deliver_all().carried == 2
    assert transit(node) == [(1, "M"), (2, "C")]


def test_message_goes_to_inboxes_and_links_with_one_clock(node: Node) -> None:
    node.inbox("billing", "order.paid")
    links = [link(node, "lyon", "order.paid"), link(node, "oslo", "order.*")]
    node.send("order.paid", key="k", kind="E")
    totals = node.deliver_all()
    assert (totals.taken, totals.delivered, totals.carried) == (1, 1, 2)
    [(_, _, clock)] = node.delivered()
    assert transit(node, "link, seq, sent_clock") == [(number, 1, clock) for number in links]


def test_message_is_carried_as_it_was_sent(node: Node) -> None:
    link(node, "lyon", "order.paid")
    node.send("order.paid", {"a": [1, None]}, key="k", headers={"user": "u"}, expires_at=LATER, after_clock=7)
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json, event_type) VALUES ('order.paid', '{\"a\": 1}', 'D')"
    )
    sent = node.rows(f"SELECT {MESSAGE} FROM mailroom.outbox ORDER BY position")
    node.deliver_all()
    assert transit(node, MESSAGE) == sent
    assert len(sent) == 2


def test_cut_link_gets_nothing_and_counts_for_nothing(node: Node) -> None:
    lyon, oslo = link(node, "lyon", "order.pay", "order.*"), link(node, "oslo", "order.pay")
    node.connection.execute("UPDATE mailroom.link SET state = 'cut' WHERE number = %s", [lyon])
    node.send("order.pay")
    node.send("order.paid", kind="E")
    totals = node.deliver_all()
    assert (totals.carried, totals.unrouted, totals.dead) == (1, 1, 0)
    assert transit(node, "link") == [(oslo,)]


def test_topic_of_a_link_that_is_gone_counts_for_nothing(node: Node) -> None:
    lyon = link(node, "lyon", "order.paid", "order.*")
    node.connection.execute("DELETE FROM mailroom.link WHERE number = %s", [lyon])
    node.send("order.paid")
    assert (node.deliver_all().dead, transit(node)) == (1, [])


def test_readers_do_not_change_who_gets_commands(node: Node) -> None:
    """Not the one that asks for their topic, nor the one that may have them too, nor the one that had them and ends."""

    def to(key: str, found: str) -> list[str]:
        """Return who got the command and the reply of this key: both go the same way."""
        got = [[name for (name,) in node.rows(found, f"{key} {kind}")] for kind in "CR"]
        assert got[0] == got[1]
        return got[0]

    def send(key: str) -> tuple[list[str], list[str], list[str]]:
        for kind in "CR":
            node.send("order.pay", key=f"{key} {kind}", kind=kind)
        node.deliver_all()
        return (
            to(key, "SELECT inbox FROM mailroom.inbox WHERE key = %s"),
            to(key, "SELECT name FROM mailroom.transit JOIN mailroom.link ON number = link WHERE key = %s"),
            to(key, "SELECT reason FROM mailroom.dead_letter WHERE key = %s"),
        )

    node.inbox("billing", "order.pay")
    rome = link(node, "rome", "order.pay")
    lyon, oslo = (link(node, name, allowed=["order.pay"]) for name in ("lyon", "oslo"))
    asked = "INSERT INTO mailroom.link_topic (topic, link) VALUES ('order.pay', %s)"
    node.connection.execute(asked, [oslo])
    node.connection.execute(asked, [lyon])
    assert send("here") == (["billing"], [], [])
    node.connection.execute("DELETE FROM mailroom.subscription")
    assert send("there") == ([], ["lyon"], [])
    node.connection.execute("DELETE FROM mailroom.link_topic WHERE link = %s", [lyon])
    assert send("nobody")[:2] == ([], [])
    node.connection.execute(asked, [lyon])
    assert send("again") == ([], ["lyon"], [])
    with node.connection.transaction():
        Links().remove(node.connection, "lyon", actor="tests")  # by the node itself
    assert send("theirs") == ([], ["oslo"], [])
    assert node.value("SELECT count(*) FROM mailroom.transit WHERE link = %s", rome) == 0


def test_command_needs_exactly_one_inbox(node: Node) -> None:
    for name in ("one", "two"):
        node.inbox(name, "order.pay")
    link(node, "lyon", "order.pay", allowed=["order.pay"])
    node.send("order.pay", key="k", kind="C")
    totals = node.deliver_all()
    assert (totals.dead, totals.delivered, totals.carried) == (1, 0, 0)
    [(_, _, reason)] = node.dead()
    assert reason == "a command needs exactly one inbox, its topic has 2"


def test_pattern_of_a_link_is_no_second_receiver_of_a_command(node: Node) -> None:
    node.inbox("billing")
    link(node, "lyon", "#")
    node.send("billing", kind="C")
    totals = node.deliver_all()
    assert (totals.delivered, totals.carried, totals.dead) == (1, 0, 0)


def test_expired_and_scheduled_messages_are_not_carried(node: Node) -> None:
    link(node, "lyon", "order.paid")
    node.send("order.paid", key="late", expires_at=SOON)
    node.send("order.paid", key="scheduled", deliver_at=LATER)
    node.send("order.paid", key="in time", expires_at=LATER)
    totals = node.deliver_all(now=SOON)
    assert (totals.expired, totals.scheduled, totals.carried) == (1, 1, 1)
    assert node.deliver_all(now=LATER).carried == 1
    assert transit(node) == [(1, "in time"), (2, "scheduled")]


def test_message_that_one_inbox_refuses_is_not_carried_either(node: Node) -> None:
    node.inbox("billing", "order.paid")
    link(node, "lyon", "order.*")
    node.connection.execute("ALTER TABLE mailroom.inbox_billing ADD CONSTRAINT no_x CHECK (key <> 'x')")
    for key in ("a", "x", "b", "x", "c"):
        node.send("order.paid", key=key)
    totals = node.deliver_all()
    assert (totals.taken, totals.dead, totals.delivered, totals.carried) == (5, 2, 3, 3)
    assert [key for key, *_ in node.dead()] == ["x", "x"]
    assert transit(node) == [(1, "a"), (2, "b"), (3, "c")]


# -- Its number and its order -----------------------------------------------------------------------------------------


def test_seq_has_no_gaps_over_batches_and_deliveries_that_are_undone(node: Node) -> None:
    link(node, "lyon", "a", "b")
    link(node, "oslo", "b")
    for nth in range(12):
        node.send("ab"[nth % 2], key=str(nth))
        node.send("c", key="dead")
        if nth % 3 == 2:
            with node.connection.transaction(force_rollback=True):
                assert node.deliver(rows=2).carried > 0
            assert node.deliver(rows=5).carried > 0
    node.deliver_all()
    assert transit(node, "link, seq, key") == [
        *((1, nth + 1, str(nth)) for nth in range(12)),
        *((2, nth + 1, str(2 * nth + 1)) for nth in range(6)),
    ]


def test_seq_goes_on_from_the_newest_row_when_the_others_are_trimmed(node: Node) -> None:
    link(node, "lyon", "a")
    for nth in range(3):
        node.send("a", key=str(nth))
        node.deliver()
    node.connection.execute("DELETE FROM mailroom.transit WHERE seq < 3")
    node.send("a", key="next")
    node.deliver()
    assert transit(node) == [(3, "2"), (4, "next")]


def test_seq_follows_the_clock_which_follows_the_order_of_sending(node: Node) -> None:
    link(node, "lyon", "#")
    node.inbox("billing", "a")
    with node.connection.transaction():
        for nth in range(50):
            send(node.connection, "abc"[nth * 7 % 3], key=str(nth), after_clock=900 if nth == 20 else None)
    node.deliver(rows=20)
    node.deliver()
    rows = transit(node, "seq, key, sent_clock")
    assert [(seq, key) for seq, key, _ in rows] == [(nth + 1, str(nth)) for nth in range(50)]
    clocks = [clock for *_, clock in rows]
    assert clocks == sorted(set(clocks))
    assert clocks[20] > 900


def test_batch_has_one_time_of_its_stamp_and_no_two_have_the_same(node: Node) -> None:
    link(node, "lyon", "a")
    link(node, "oslo", "a")
    for _ in range(3):
        for _ in range(4):
            node.send("a")
        node.deliver_all(now=NOW)  # what a caller takes for now is not the time of the stamp
    batches = node.rows(
        "SELECT count(*), max(seq), stamped_at = %s FROM mailroom.transit GROUP BY stamped_at ORDER BY stamped_at", NOW
    )
    assert batches == [(8, 4, False), (8, 8, False), (8, 12, False)]


def test_nothing_is_carried_above_the_ceiling(node: Node) -> None:
    link(node, "lyon", "a")
    node.allow_clocks(2)
    for _ in range(3):
        node.send("a")
    delivery = node.deliver()
    assert (delivery.ceiling, delivery.carried, transit(node)) == (3, 0, [])
    assert node.deliver_all().carried == 3


# -- How it commits ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lane(connect: Connect, dsn: str) -> Node:
    """The node, over a session as the dispatcher's is."""
    made = Node(dsn, connect(autocommit=True))
    for name, value in DELIVERY_SESSION.items():
        made.connection.execute(f"SET {name} = '{value}'".encode())
    return made


def test_delivery_commits_synchronously_if_something_leaves_and_only_then(node: Node, lane: Node) -> None:
    node.inbox("billing", "order.paid", "order.sent")
    link(node, "lyon", "order.paid")

    def delivered_with(*topics: str) -> str:
        with lane.connection.transaction():
            for topic in topics:
                send(lane.connection, topic)
            lane.deliver()
            commits: str = lane.value("SHOW synchronous_commit")
        assert lane.value("SHOW synchronous_commit") == "off"
        return commits

    assert delivered_with("order.sent") == "off"
    assert delivered_with("order.sent", "order.paid") == "on"
    assert delivered_with() == "off"
    assert delivered_with("nowhere") == "off"
    node.connection.execute("UPDATE mailroom.link SET state = 'cut'")
    assert delivered_with("order.paid") == "off"


def test_what_left_is_durable_when_it_can_be_seen(node: Node, lane: Node) -> None:
    link(node, "lyon", "order.paid")
    for _ in range(5):
        node.send("order.paid")
        with lane.connection.transaction():
            lane.deliver()
            written = lane.value("SELECT pg_current_wal_insert_lsn()::text")
        assert lane.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", written)


@pytest.mark.parametrize("sleeps", [True, False])
def test_bell_rings_for_the_links_that_carry_and_only_if_a_reader_sleeps(
    node: Node, connect: Connect, sleeps: bool
) -> None:
    lyon, oslo, rome = link(node, "lyon", "a"), link(node, "oslo", "a", "b"), link(node, "rome", "c")
    reader = connect(autocommit=True)
    for number in (lyon, oslo, rome):
        channel = node.value(f"SELECT {locks.link_channel(TRANSIT, str(number))}")
        assert channel == f"mailroom:{node.value(f'SELECT {TRANSIT}::oid')}:{number}"
        reader.execute(f'LISTEN "{channel}"'.encode())
    if sleeps:
        reader.execute(f"SELECT pg_advisory_lock_shared({locks.ASLEEP}, {locks.key(TRANSIT)})".encode())

    def rung(*topics: str) -> list[int]:
        for topic in topics:
            node.send(topic)
        delivery = node.deliver()
        reader.execute("SELECT 1")
        heard = sorted(int(each.channel.rpartition(":")[2]) for each in reader.notifies(timeout=0))
        assert delivery.woken == len(heard)
        return heard

    assert rung("a") == ([lyon, oslo] if sleeps else [])
    assert rung("b", "b") == ([oslo] if sleeps else [])
    assert rung("d") == []
    assert rung() == []


def test_delivery_that_saw_no_reader_asleep_holds_them_up_until_it_has_committed(node: Node, connect: Connect) -> None:
    link(node, "lyon", "a")
    node.send("a")
    reader = connect(autocommit=True)
    falling_asleep = f"SELECT pg_try_advisory_lock_shared({locks.ASLEEP}, {locks.key(TRANSIT)})".encode()
    with node.connection.transaction():
        assert node.deliver().woken == 0
        assert reader.execute(falling_asleep).fetchone() == (False,)
    assert reader.execute(falling_asleep).fetchone() == (True,)


# -- What it costs ----------------------------------------------------------------------------------------------------


def scans(plan: list[dict[str, Any]], cte: str, of: str) -> list[int]:
    """Return how often a CTE reads another one."""
    return [each["Actual Loops"] for each in below(plan, cte) if each.get("CTE Name") == of]


def test_delivery_of_a_node_without_links_does_nothing_for_them_but_probe_once(node: Node) -> None:
    node.inbox("billing", "order.paid", "order.*")
    for nth in range(30):
        node.send("order.paid", key=str(nth))
    node.connection.execute("ANALYZE")
    plan = explained(node.connection)
    [probe] = [each for each in plan if each.get("Relation Name") in ("link", "link_topic", "transit")]
    assert (probe["Node Type"], probe["Actual Rows"], probe["Actual Loops"]) == ("Index Only Scan", 0, 1)


def test_delivery_beside_a_link_that_wants_nothing_reads_no_message_for_it(node: Node) -> None:
    node.inbox("billing", "order.paid", "order.*")
    link(node, "lyon")
    for nth in range(30):
        node.send("order.paid", key=str(nth))
    node.connection.execute("ANALYZE")
    plan = explained(node.connection, DELIVER_FULL)
    assert scans(plan, "linked_topic", "taken") == [0]
    assert scans(plan, "ends", "stamped") == [0]
    assert scans(plan, "carried", "stamped") == [0]
    [probe] = [each for each in below(plan, "ends") if each.get("Relation Name") == "transit"]
    assert probe["Actual Loops"] == 0


def test_delivery_joins_topics_with_links_and_not_messages_with_links(node: Node) -> None:
    """Also by a plan of a time without links, which a dispatcher may keep for long."""
    node.inbox("billing", "order.paid")
    node.connection.execute("ANALYZE")
    for nth in range(20):
        link(node, f"link_{nth}", "order.paid", f"order.{nth}", "invoice.#")
    for nth in range(30):
        node.send("order.paid", key=str(nth))
    plan = explained(node.connection, DELIVER_FULL)
    [unnested] = [each for each in below(plan, "carried") if each["Node Type"] == "ProjectSet"]
    assert unnested["Actual Rows"] == 30 * 20
    joins = [each for cte in ("ends", "carried") for each in below(plan, cte) if "Join" in each["Node Type"]]
    assert all("topic" not in str(each) for join in joins for each in (join.get("Hash Cond"), join.get("Join Filter")))


@pytest.mark.nightly
def test_last_seq_is_found_by_an_index_beside_100_000_dead_rows(node: Node, connect: Connect) -> None:
    """Trimmed rows stay in the index while a snapshot is held: they are all below, and not met."""
    lyon, oslo = link(node, "lyon", "order.paid"), link(node, "oslo", "order.paid")
    node.connection.execute("ANALYZE")
    node.connection.execute(
        "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, "
        "value, sent_at) SELECT l, n, n, now(), gen_random_uuid(), 'order.paid', 'k', 'M', 'U', '\\xf6', now() "
        "FROM unnest(%s::bigint[]) AS l, generate_series(1, 100000) AS n",
        [[lyon, oslo]],
    )
    held = connect()
    held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    held.execute("SELECT FROM mailroom.node")
    node.connection.execute("DELETE FROM mailroom.transit WHERE seq < 100000")
    node.connection.execute("UPDATE mailroom.node SET clock_ceiling = 1000000")
    node.connection.execute("SELECT setval('mailroom.clock', 100000)")
    for _ in range(2):
        node.send("order.paid")
    plan = explained(node.connection, DELIVER_FULL)
    [probe] = [each for each in below(plan, "ends") if each.get("Relation Name") == "transit"]
    assert (probe["Index Name"], probe["Scan Direction"]) == ("transit_pkey", "Backward")
    assert (probe["Actual Loops"], probe["Actual Rows"]) == (2, 1)
    assert probe["Shared Hit Blocks"] + probe["Shared Read Blocks"] <= 20
    node.deliver()
    assert transit(node, "link, seq") == [(number, seq) for number in (lyon, oslo) for seq in range(100_000, 100_003)]


# -- The first link, and the last one ---------------------------------------------------------------------------------


def test_first_link_is_seen_by_the_delivery_that_follows_and_the_last_one_is_forgotten(
    node: Node, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def noted(schema: str, *, has_links: bool, **bounds: Any) -> Operation[Delivery]:
        told.append(has_links)
        return delivering(schema, has_links=has_links, **bounds)

    monkeypatch.setattr(deliverer, "delivering", noted)
    node.inbox("billing", "b")
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: link(node, "lyon", "a"),
        lambda: None,
        lambda: unlink(node),
        lambda: None,
    ]

    async def deliver_all() -> list[tuple[int, int, int, bool]]:
        found = []
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            dispatcher = Deliverer(connection, SCHEMA)
            for change in changes:
                change()
                node.send("a", kind="E")
                node.send("b")
                delivery = await dispatcher.deliver()
                found.append((delivery.carried, delivery.delivered, delivery.unrouted, delivery.has_links))
        return found

    assert asyncio.run(deliver_all()) == [
        (0, 1, 1, False), (1, 1, 0, True), (1, 1, 0, True), (0, 1, 1, False), (0, 1, 1, False)
    ]  # fmt: skip
    assert told[-4:] == [False, True, True, False]  # the first delivery comes twice, for the ceiling
    assert transit(node, "seq, topic") == [(1, "a"), (2, "a")]


def unlink(node: Node) -> None:
    for table in ("link_topic", "link"):
        node.connection.execute(f"DELETE FROM mailroom.{table}")


def test_link_that_is_committed_while_a_delivery_begins_misses_nothing(node: Node, connect: Connect) -> None:
    """After the lock, whose snapshot is older, and before the statement that delivers."""
    node.inbox("billing", "a")
    node.send("a", key="1")
    dispatcher = connect(autocommit=True)

    def after_lock() -> Operation[Delivery]:
        steps = delivering(SCHEMA, rows=10, max_bytes=1_000, is_plain=False)
        yield next(steps)
        link(node, "lyon", "a")
        node.send("a", key="2")
        return (yield from steps)

    with dispatcher.transaction():
        delivery = run(dispatcher, after_lock())
    assert (delivery.taken, delivery.carried, delivery.delivered, delivery.clock) == (2, 2, 2, 2)
    assert delivery.has_links
    assert transit(node) == [(1, "1"), (2, "2")]
    assert node.delivered("key, clock") == [("1", 1), ("2", 2)]


def test_link_that_is_not_committed_yet_holds_up_no_delivery(node: Node, connect: Connect) -> None:
    node.inbox("billing", "a")
    node.send("a")
    with connect() as allowing:
        allowing.execute("INSERT INTO mailroom.link (name) VALUES ('lyon')")
        assert not node.deliver().has_links
    node.send("a")
    delivery = node.deliver()
    assert (delivery.delivered, delivery.carried, delivery.has_links) == (1, 0, True)


def test_deliveries_of_tests_stamp_for_a_link(node: Node) -> None:
    link(node, "lyon", "a")
    with node.connection.transaction():
        send(node.connection, "a", key="1")
        assert testing.deliver(node.connection) == 1
    assert transit(node) == [(1, "1")]


# -- Beside others ----------------------------------------------------------------------------------------------------


def test_two_deliveries_at_once_give_out_no_seq_twice(node: Node, dsn: str, connect: Connect) -> None:
    """The second waits for the first one's commit before it reads the ends."""
    link(node, "lyon", "a")
    first, second = Node(dsn, connect(autocommit=True)), Node(dsn, connect(autocommit=True))
    with first.connection.transaction():
        node.send("a", key="1")
        assert first.deliver().carried == 1
        node.send("a", key="2")
        second.connection.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.deliver()
    second.connection.execute("RESET lock_timeout")
    assert second.deliver().carried == 1
    assert transit(node) == [(1, "1"), (2, "2")]


def test_ids_in_transit_are_those_that_the_sends_gave(node: Node) -> None:
    link(node, "lyon", "a")
    ids: list[UUID] = [node.send("a") for _ in range(3)]
    node.deliver_all()
    assert [id for (id,) in transit(node, "message_id")] == ids
