"""Routing: who gets a topic, by exact subscriptions, patterns and the inbox's own name, as a model in Python says."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dispatcher.delivery.deliver import delivering
from dispatcher.delivery.deliverer import Deliverer
from mailroom import Topic, create_inbox, subscribe, subscribe_async, unsubscribe, unsubscribe_async
from mailroom.errors import InvalidMessage, InvalidName, UnknownInbox
from mailroom.node.status import status
from mailroom.sql.runner import run
from mailroom.values.names import MAX_TOPIC_LENGTH, topic_pattern
from tests.interleavings.sessions import Step, orders, sessions
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.explain import below, explained
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_versions

KINDS = "MECR"


# -- What a pattern fits ----------------------------------------------------------------------------------------------


def fits(pattern: list[str], topic: list[str]) -> bool:
    """The rule itself, word by word."""
    match pattern, topic:
        case ["#"], _:
            return True
        case [], []:
            return True
        case [first, *others], [word, *words]:
            return first in ("*", word) and fits(others, words)
    return False


# Of each pattern: topics that it fits, and others.
PATTERNS = {
    "order.*": (
        ["order.paid", "order."], ["order", "order.paid.twice", "orders.paid", "Order.paid", "reorder.a"]
    ),
    "order.#": (["order", "order.paid", "order.paid.twice"], ["orders", "orders.paid", "reorder.paid"]),
    "*.paid": (["order.paid"], ["order.repaid", "paid", "a.order.paid", "order.paid.twice"]),
    "a.*.c.*": (["a.b.c.d"], ["a.b.x.c.d", "a.c.d", "a.b.c"]),
    "*": (["order"], ["order.paid"]),
    "#": (["order", "order.paid", "a.b.c.d.e"], []),
    "a_b.*": (["a_b.c"], ["axb.c"]),
    "a_b.#": (["a_b", "a_b.c"], ["axb", "axb.c"]),
}  # fmt: skip


@pytest.mark.inbox("audit")
@pytest.mark.node_sql(CLOCKS_ALLOWED)
def test_pattern_gets_the_events_whose_topics_it_fits(node: Node) -> None:
    for pattern, (fitting, others) in PATTERNS.items():
        with node.connection.transaction(force_rollback=True):
            subscribe(node.connection, "audit", pattern)
            for topic in (*fitting, *others):
                node.send(topic, key=topic, kind="E")
            assert node.deliver().unrouted == len(others), pattern
            assert node.delivered("key") == [(topic,) for topic in fitting], pattern
        assert [topic for topic in (*fitting, *others) if fits(pattern.split("."), topic.split("."))] == fitting


words = st.sampled_from(["a", "b", "A", "a_b", "axb", "a-b", "a1", "ab", ""])
topics = st.lists(words, min_size=1, max_size=4).filter(lambda found: found[0] != "").map(".".join)
patterns = st.one_of(
    topics,
    st.lists(words | st.just("*"), min_size=1, max_size=4).filter(lambda found: found[0] != "").map(".".join),
    topics.map(lambda topic: f"{topic}.#"),
    st.just("#"),
)
INBOXES = ("a", "ab", "other")


def expected(inbox: str, subscribed: set[str], topic: str, kind: str) -> bool:
    """Whether an inbox gets a message."""
    by_pattern = any(fits(each.split("."), topic.split(".")) for each in subscribed)
    by_name = topic == inbox or topic in subscribed
    return {"M": by_pattern or by_name, "E": by_pattern, "C": by_name, "R": by_name}[kind]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    subscribed=st.tuples(*[st.sets(patterns, max_size=5)] * len(INBOXES)),
    sent=st.lists(st.tuples(topics, st.sampled_from(KINDS)), min_size=1, max_size=20),
)
@example(subscribed=({"#", "a.#", "*", "a"}, {"#"}, set()), sent=[("a", kind) for kind in KINDS])
@example(subscribed=({"a_b.*"}, {"a_b.#"}, {"*.*"}), sent=[("axb.a", "E"), ("a_b.a", "E"), ("a_b", "M"), ("axb", "M")])
def test_deliveries_follow_the_model(node: Node, subscribed: tuple[set[str], ...], sent: list[tuple[str, str]]) -> None:
    if not node.rows("SELECT FROM mailroom.inbox_registry"):
        node.allow_clocks()
        for inbox in INBOXES:
            node.inbox(inbox)
    by_inbox = dict(zip(INBOXES, subscribed, strict=True))
    node.connection.execute("DELETE FROM mailroom.subscription")
    with node.connection.transaction():
        for inbox, its_topics in by_inbox.items():
            subscribe(node.connection, inbox, its_topics)
        for nth, (topic, kind) in enumerate(sent):
            node.connection.execute(
                "INSERT INTO mailroom.outbox (topic, key, kind, value_json) VALUES (%s, %s, %s, '1')",
                [topic, str(nth), kind],
            )
    getting = {
        str(nth): sorted(inbox for inbox in INBOXES if expected(inbox, by_inbox[inbox], topic, kind))
        for nth, (topic, kind) in enumerate(sent)
    }
    refused = [str(nth) for nth, (_, kind) in enumerate(sent) if kind == "C" and len(getting[str(nth)]) > 1]
    lost = [str(nth) for nth, (_, kind) in enumerate(sent) if kind != "E" and not getting[str(nth)]]
    unrouted = [str(nth) for nth, (_, kind) in enumerate(sent) if kind == "E" and not getting[str(nth)]]
    on_the_way = {each.name: each.on_the_way for each in status(node.connection).inboxes}
    assert on_the_way == {inbox: sum(inbox in of for of in getting.values()) for inbox in INBOXES}
    delivery = node.deliver()
    found: dict[str, list[str]] = {key: [] for key in getting}
    for inbox, key in node.rows("DELETE FROM mailroom.inbox RETURNING inbox, key"):
        found[key].append(inbox)
    assert {key: sorted(of) for key, of in found.items()} == {
        key: [] if key in refused else of for key, of in getting.items()
    }
    assert delivery.unrouted == len(unrouted)
    dead = node.rows("DELETE FROM mailroom.dead_letter RETURNING key, reason")
    assert sorted(key for key, _ in dead) == sorted(refused + lost)
    assert sorted(key for key, reason in dead if "exactly one inbox" in reason) == sorted(refused)


def test_command_beside_an_inbox_on_everything_has_its_one_receiver(node: Node) -> None:
    node.inbox("warehouse", "stock.reserve")
    node.inbox("audit", "#", "stock.*")
    node.send("stock.reserve", key="k", kind="C")
    assert node.deliver_all().dead == 0
    assert node.delivered("inbox") == [("warehouse",)]


def test_command_that_only_patterns_fit_is_a_dead_letter(node: Node) -> None:
    node.inbox("audit", "#")
    node.send("stock.reserve", key="k", kind="C")
    node.send("stock.reserved", key="k", kind="R")
    node.send("stock.reserve", key="k", kind="M")
    assert node.deliver_all().dead == 2
    assert node.delivered("kind::text") == [("M",)]
    reason = "no inbox gets this topic: patterns get no commands and no replies"
    assert [each for _, _, each in node.dead()] == [reason] * 2


def test_command_goes_by_the_exact_subscription_of_an_inbox_that_has_a_pattern_too(node: Node) -> None:
    node.inbox("warehouse", "stock.#", "stock.reserve")
    for kind in KINDS:
        node.send("stock.reserve", key=kind, kind=kind)
    node.deliver_all()
    assert node.delivered("inbox, key") == [("warehouse", kind) for kind in KINDS]


@pytest.mark.inbox("audit", "order.*")
@pytest.mark.node_sql(CLOCKS_ALLOWED)
def test_inbox_that_several_subscriptions_fit_gets_one_copy(node: Node) -> None:
    for also in (["order.#"], ["order.paid"], ["*.paid", "#", "order.paid"]):
        with node.connection.transaction(force_rollback=True):
            subscribe(node.connection, "audit", also)
            node.send("order.paid", kind="E")
            node.send("order.paid")
            assert node.deliver().delivered == 2, also
            assert len(node.delivered()) == 2


async def test_message_that_an_inbox_of_a_pattern_refuses_goes_alone_to_dead_letter(node: Node, dsn: str) -> None:
    node.inbox("audit", "order.*")
    node.connection.execute("ALTER TABLE mailroom.inbox_audit ADD CONSTRAINT no_such_key CHECK (key <> 'bad')")
    for key in ("a", "bad", "b"):
        node.send("order.paid", key=key)
    node.send("audit", key="bad", kind="C")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as lane:
        await Deliverer(lane, SCHEMA).drain()
    assert node.delivered("key") == [("a",), ("b",)]
    assert [(key, reason) for key, _, reason in node.dead()] == [
        ("bad", "CheckViolation (23514) no_such_key inbox_audit")
    ] * 2


# -- What a pattern costs ---------------------------------------------------------------------------------------------


def test_delivery_without_patterns_looks_at_no_topic(node: Node) -> None:
    node.inbox("billing", "order.paid")
    node.allow_clocks()
    for nth in range(30):
        node.send("order.paid", key=str(nth))
    node.connection.execute("ANALYZE")
    plan = explained(node.connection)
    [scan] = [each for each in below(plan, "sent_topic") if each.get("CTE Name") == "taken"]
    assert scan["Actual Loops"] == 0
    [patterns] = [each for each in below(plan, "pattern") if each.get("Relation Name") == "subscription"]
    assert (patterns["Index Name"], patterns["Actual Rows"]) == ("subscription_pattern", 0)
    [matching] = [each for each in below(plan, "route") if each.get("CTE Name") == "sent_topic"]
    assert (matching["Actual Loops"] <= 1, matching["Actual Rows"]) == (True, 0)


def test_delivery_compares_patterns_with_topics_and_not_with_messages(node: Node) -> None:
    node.inbox("billing", "order.*", "invoice.#", "*.paid")
    node.allow_clocks()
    for nth in range(30):
        node.send(f"order.{nth % 3}", key=str(nth))
    node.connection.execute("ANALYZE")
    plan = explained(node.connection)
    [scan] = [each for each in below(plan, "sent_topic") if each.get("CTE Name") == "taken"]
    assert (scan["Actual Loops"], scan["Actual Rows"]) == (1, 30)
    assert below(plan, "sent_topic")[0]["Actual Rows"] == 3
    [join] = [each for each in below(plan, "route") if each["Node Type"] == "Nested Loop"]
    assert join["Actual Rows"] + join["Rows Removed by Join Filter"] == 3 * 3
    filters = [str(each.get(what, "")) for each in plan for what in ("Filter", "Join Filter")]
    assert [each.count("~~") for each in filters if "~~" in each] == [1]
    assert " ~ " not in " ".join(filters)


# -- Subscriptions change ---------------------------------------------------------------------------------------------


def test_subscriptions_count_for_each_delivery_that_begins_after_their_commit(
    dsn: str, connect: Connect, node: Node
) -> None:
    """In every order of two deliveries and a subscription that begins and ends; none waits for another."""
    node.inbox("audit")
    node.inbox("billing", "order.paid")
    node.allow_clocks()
    kept: list[str] = []
    holds = False
    expected: list[str] = []

    def deliver(connection: psycopg.Connection[Any]) -> None:
        key = str(len(kept))
        kept.append(key)
        node.send("order.paid", key=key, kind="E")
        run(connection, delivering(SCHEMA, rows=100, max_bytes=2**20))
        expected.extend([key] * holds)

    def commit(connection: psycopg.Connection[Any]) -> None:
        connection.commit()

    def begun(connection: psycopg.Connection[Any]) -> None:
        assert subscribe(connection, "audit", ["order.*", "#"]) == ["#", "order.*"]

    def ended(connection: psycopg.Connection[Any]) -> None:
        assert unsubscribe(connection, "audit", ["order.*", "#"]) == ["#", "order.*"]

    def committed(now: bool) -> Step:
        def step(connection: psycopg.Connection[Any]) -> None:
            nonlocal holds
            connection.commit()
            holds = now

        return step

    steps: dict[str, list[Step]] = {
        "dispatcher": [deliver, commit, deliver, commit],
        "operator": [begun, committed(now=True), ended, committed(now=False)],
    }
    seen = set()
    with sessions(dsn, connect(autocommit=True), *steps) as opened:
        for order in orders("dispatcher", 4, "operator", 4):
            left = {name: list(todo) for name, todo in steps.items()}
            kept.clear()
            expected.clear()
            for name in order:
                assert opened[name].start(left[name].pop(0)), f"{name} waits in {order}"
            found = node.rows("DELETE FROM mailroom.inbox RETURNING inbox, key")
            assert sorted(key for inbox, key in found if inbox == "audit") == expected, order
            assert sorted(key for inbox, key in found if inbox == "billing") == kept, order
            seen.add(tuple(expected))
    assert seen == {(), ("0",), ("1",), ("0", "1")}


def test_subscription_that_commits_while_a_delivery_waits_for_its_turn_counts_for_it(
    dsn: str, connect: Connect, node: Node
) -> None:
    node.inbox("audit")
    node.allow_clocks()

    def deliver(connection: psycopg.Connection[Any]) -> None:
        run(connection, delivering(SCHEMA, rows=100, max_bytes=2**20))

    with sessions(dsn, connect(autocommit=True), "first", "second") as opened:
        assert opened["first"].start(deliver)
        assert not opened["second"].start(deliver)
        with node.connection.transaction():
            subscribe(node.connection, "audit", "order.*")
        node.send("order.paid", key="k", kind="E")
        assert opened["first"].start(psycopg.Connection.commit)
        eventually(opened["second"].settled)
        assert opened["second"].start(psycopg.Connection.commit)
    assert node.delivered("inbox, key") == [("audit", "k")]


def test_what_waits_goes_by_the_new_subscriptions_and_what_was_delivered_stays(node: Node) -> None:
    node.inbox("audit", "order.#")
    node.send("order.paid", key="delivered")
    node.deliver_all()
    node.send("order.paid", key="waiting", kind="E")
    with node.connection.transaction():
        assert unsubscribe(node.connection, "audit", "order.#") == ["order.#"]
    assert node.deliver_all().unrouted == 1
    assert node.delivered("key") == [("delivered",)]


def test_what_is_scheduled_goes_by_the_subscriptions_of_when_it_is_due(node: Node) -> None:
    now = datetime.now(UTC)
    node.inbox("audit")
    node.send("order.paid", key="k", kind="E", deliver_at=now + timedelta(hours=1))
    assert node.deliver_all(now=now).scheduled == 1
    with node.connection.transaction():
        subscribe(node.connection, "audit", "order.*")
    assert node.deliver_all(now=now + timedelta(hours=1)).delivered == 1


def test_subscription_that_is_rolled_back_never_was(node: Node) -> None:
    node.inbox("audit")
    with node.connection.transaction(force_rollback=True):
        subscribe(node.connection, "audit", "#")
    node.send("order.paid", kind="E")
    assert node.deliver_all().unrouted == 1


def test_subscribing_twice_or_ending_what_never_was_changes_nothing(node: Node) -> None:
    node.inbox("audit", "order.*")
    node.inbox("billing", "order.*")
    with node.connection.transaction():
        assert subscribe(node.connection, "audit", ["order.*", "order.*", "b", "a"]) == ["a", "b"]
        assert unsubscribe(node.connection, "audit", ["order.paid", "order.#", "a"]) == ["a"]
        assert unsubscribe(node.connection, "audit", "a") == []
        assert subscribe(node.connection, "audit", []) == []
    rows = node.rows("SELECT inbox, topic FROM mailroom.subscription ORDER BY inbox, topic")
    assert rows == [("audit", "b"), ("audit", "order.*"), ("billing", "order.*")]


def test_text_is_one_topic_and_not_one_per_letter(node: Node) -> None:
    with node.connection.transaction():
        create_inbox(node.connection, "audit", "abc")
        assert subscribe(node.connection, "audit", "def") == ["def"]
    assert node.rows("SELECT topic FROM mailroom.subscription ORDER BY topic") == [("abc",), ("def",)]


def test_topic_is_subscribed_to_by_its_name(node: Node) -> None:
    paid, sent = Topic("order.paid", int), Topic("order.sent", int)
    with node.connection.transaction():
        create_inbox(node.connection, "audit", paid)
        create_inbox(node.connection, "billing", [paid, "order.#"])
        assert subscribe(node.connection, "audit", sent) == ["order.sent"]
        assert subscribe(node.connection, "billing", iter((sent, "order.#", paid))) == ["order.sent"]
        assert unsubscribe(node.connection, "audit", [sent, "order.#"]) == ["order.sent"]
        assert unsubscribe(node.connection, "billing", paid) == ["order.paid"]
    rows = node.rows("SELECT inbox, topic FROM mailroom.subscription ORDER BY inbox, topic")
    assert rows == [("audit", "order.paid"), ("billing", "order.#"), ("billing", "order.sent")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_subscriptions_change_over_every_connection(dsn: str, kind: str) -> None:
    with opened(dsn, kind) as connection:
        create_inbox(connection, "audit", ["a_b.*"])
        assert subscribe(connection, "audit", ["a_b.*", "#", "order.#"]) == ["#", "order.#"]
        assert unsubscribe(connection, "audit", ["#", "never"]) == ["#"]
        assert unsubscribe(connection, "audit", ["a_b.*", "order.#"]) == ["a_b.*", "order.#"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_subscriptions_change_over_every_async_connection(dsn: str, connect: Connect, kind: str) -> None:
    with connect() as setup:
        create_inbox(setup, "audit", ["a_b.*"])
    async with opened_async(dsn, kind) as connection:
        assert await subscribe_async(connection, "audit", ["a_b.*", "#"]) == ["#"]
        assert await unsubscribe_async(connection, "audit", ["#", "never"]) == ["#"]


def test_inbox_that_there_is_not_is_refused(node: Node) -> None:
    for call in (subscribe, unsubscribe):
        with node.connection.transaction(), pytest.raises(UnknownInbox, match="mailroom inbox create audit"):
            call(node.connection, "audit", "order.*")
        with node.connection.transaction(), pytest.raises(InvalidName, match="Inbox name"):
            call(node.connection, "Audit", "order.*")


# -- Which patterns there are -----------------------------------------------------------------------------------------

NOT_VALID = [
    "order*", "order.p*d", "*.#", "order.*.#", "#.paid", "order.#.paid", "order.##", "order#", "**", ".", "",
    ".paid", "1.*", "-.#", "order.%", "order.\\*", "order.é", "order.* ", "order.*\n", "*.é", "order.#\n",
]  # fmt: skip


@pytest.mark.inbox("audit")
def test_pattern_that_is_not_valid_is_refused_with_the_rule(node: Node) -> None:
    rule = r"^Topic pattern .* is not valid: use a t"
    for pattern in (*NOT_VALID, "x." * 100 + "#"):
        with node.connection.transaction(), pytest.raises(InvalidMessage, match=rule):
            subscribe(node.connection, "audit", pattern)
        with pytest.raises(psycopg.errors.CheckViolation, match="subscription_topic"):
            node.connection.execute("INSERT INTO mailroom.subscription VALUES (%s, 'audit')", [pattern])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=st.text(st.sampled_from("aB1_-.*#%\\ \n"), max_size=8) | patterns)
@example("x." * 98 + "abc#")
@example("a" * MAX_TOPIC_LENGTH)
@example("x." * 99 + "*")
def test_table_takes_what_the_library_takes(node: Node, pattern: str) -> None:
    try:
        topic_pattern(pattern)
        valid = True
    except InvalidMessage:
        valid = False
    with node.connection.transaction(force_rollback=True):
        try:
            with node.connection.transaction():
                node.connection.execute("INSERT INTO mailroom.subscription VALUES (%s, 'audit')", [pattern])
            taken = True
        except psycopg.errors.CheckViolation:
            taken = False
        stored = node.rows("SELECT fits IS NOT NULL, words FROM mailroom.subscription")
    assert taken == valid
    counted = len(pattern.split(".")) if "*" in pattern else None
    assert stored == [("*" in pattern or "#" in pattern, counted)] * valid


def test_pattern_that_is_inserted_by_hand_counts_as_any_other(node: Node) -> None:
    node.inbox("audit")
    node.connection.execute("INSERT INTO mailroom.subscription (topic, inbox) VALUES ('order.*', 'audit')")
    node.send("order.paid", kind="E")
    assert node.deliver_all().delivered == 1
