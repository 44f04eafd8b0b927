"""Total order's statements decide as the pure rules of `tests.models.total_order` do, whatever the tables hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailroom.links.marks import asking_mark, marking, wanting_marks
from mailroom.order.total import joining, raising_stable, waiting
from mailroom.sql.runner import run
from tests.models import total_order as order
from tests.models.total_order import Mark, Route
from tests.support.links import Linked, linked, wanted_topics
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node

INBOXES = ("first", "second")
pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.node_sql(CLOCKS_ALLOWED),
    *(pytest.mark.inbox(name, order="total") for name in INBOXES),
]

EACH = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
clocks = st.integers(0, 12)


@dataclass(frozen=True)
class Origin:
    """A node that is read: what was received of it, if anything, and the `since` of subscriptions, by inbox."""

    received: int | None
    started: int
    state: str
    since: dict[str, list[int]]

    @property
    def last(self) -> int:
        return self.received or 0

    def wants(self, inbox: str) -> list[int]:
        """The `since` that count for an inbox: none is earlier than the link."""
        return [max(each, self.started) for each in self.since[inbox]]


@dataclass(frozen=True)
class State:
    """A node with total inboxes: how far each is stable, and the sent_clocks of the messages in it."""

    clock: int
    origins: list[Origin]
    stable: dict[str, int]
    messages: dict[str, list[int]]
    has_lost: bool

    def readable(self, inbox: str) -> list[Origin]:
        """The origins that an inbox waits for."""
        return [each for each in self.origins if each.since[inbox] and each.state != "excluded"]

    def bound(self, inbox: str) -> int:
        return order.bound(self.clock, (order.shown(each.last, each.wants(inbox)) for each in self.readable(inbox)))


def by_inbox(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(dict.fromkeys(INBOXES, strategy))


origins = st.builds(
    Origin,
    received=st.none() | clocks,
    started=st.just(0) | clocks,
    state=st.sampled_from(["open", "open", "stopped", "excluded"]),
    since=by_inbox(st.lists(clocks, max_size=2)),
)
states = st.builds(
    State,
    clock=st.integers(1, 12),
    origins=st.lists(origins, max_size=3),
    stable=by_inbox(clocks),
    messages=by_inbox(st.lists(clocks, max_size=3)),
    has_lost=st.booleans(),
)


@contextmanager
def written(node: Node, state: State) -> Iterator[list[int]]:
    """Write a state into the tables, and undo it; gives the numbers of its origins."""
    with node.connection.transaction(force_rollback=True):
        node.connection.execute("SELECT setval('mailroom.clock', %s)", [state.clock])
        node.connection.execute("UPDATE mailroom.node SET resumed = incarnation - %s", [int(state.has_lost)])
        for inbox in INBOXES:
            if state.stable[inbox]:
                node.connection.execute("INSERT INTO mailroom.stable VALUES (%s, %s)", [inbox, state.stable[inbox]])
            for nth, sent_clock in enumerate(state.messages[inbox]):
                node.connection.execute(
                    "INSERT INTO mailroom.inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, "
                    "message_type, value, sent_at) VALUES (%s, %s, %s, gen_random_uuid(), gen_random_uuid(), 't', 'k', "
                    "'M', 'U', '\\xf6', now())",
                    [inbox, nth + 1, sent_clock],
                )
        yield [_write_origin(node, nth, each) for nth, each in enumerate(state.origins)]


def _write_origin(node: Node, nth: int, origin: Origin) -> int:
    number = int(
        node.value(
            "INSERT INTO mailroom.origin (name, id, shown, state) VALUES (%s, %s, %s, %s) RETURNING number",
            *(f"n{nth}", uuid4(), origin.started, origin.state),
        )
    )
    if origin.received is not None:
        for last, sent_clock in ((1, 0), (2, origin.received)):
            node.connection.execute(
                "INSERT INTO mailroom.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids) "
                "VALUES (%s, %s, %s, %s, now(), %s, '{}')",
                [number, last, last, uuid4(), sent_clock],
            )
    for inbox in INBOXES:
        for topic, since in enumerate(origin.since[inbox]):
            node.connection.execute(
                "INSERT INTO mailroom.subscription (topic, inbox, origin, since) VALUES (%s, %s, %s, %s)",
                [f"{inbox}{topic}", inbox, f"n{nth}", since],
            )
    return number


# -- The bound --------------------------------------------------------------------------------------------------------


@given(states)
@EACH
def test_stable_is_raised_as_the_rules_say(node: Node, state: State) -> None:
    expected = {}
    for inbox in INBOXES:
        raised = None if state.has_lost else order.raised(state.stable[inbox], state.bound(inbox))
        expected[inbox] = state.stable[inbox] if raised is None else raised
    with written(node, state):
        run(node.connection, raising_stable(SCHEMA))
        rows = "SELECT coalesce(max(clock), 0) FROM mailroom.stable WHERE inbox = %s"
        assert {inbox: node.value(rows, inbox) for inbox in INBOXES} == expected
        assert not run(node.connection, raising_stable(SCHEMA)), "it was raised already"


@given(states)
@EACH
def test_what_is_waited_for_is_the_node_that_has_shown_least(node: Node, state: State) -> None:
    with written(node, state):
        for found in run(node.connection, waiting(SCHEMA)):
            held = sum(clock > state.stable[found.inbox] for clock in state.messages[found.inbox])
            waited = bool(held and state.readable(found.inbox))
            assert (found.stable, found.held_back) == (state.stable[found.inbox], held)
            assert found.is_stopped == state.has_lost
            assert found.shown == (state.bound(found.inbox) if waited else None)
            shows = {
                f"n{nth}": order.shown(each.last, each.wants(found.inbox))
                for nth, each in enumerate(state.origins)
                if each in state.readable(found.inbox)
            }
            assert found.waits_for is None if not waited else shows[found.waits_for or ""] == found.shown


# -- Marks ------------------------------------------------------------------------------------------------------------


@given(states)
@EACH
def test_marks_are_wanted_as_the_rules_say(node: Node, state: State) -> None:
    with written(node, state) as numbers:
        expected: dict[int, int] = {}
        for number, origin in zip(numbers, state.origins, strict=True):
            for inbox in INBOXES:
                if origin.state != "open" or not origin.since[inbox]:
                    continue
                held = max(state.messages[inbox], default=0)
                clock = order.wanted(origin.last, origin.wants(inbox), held, state.stable[inbox])
                if clock is not None:
                    expected[number] = max(clock, expected.get(number, 0))
        assert dict(run(node.connection, wanting_marks(SCHEMA))) == expected


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    for each in (source, target):
        each.allow_clocks()
    return linked(source, target, ["sale"])


@given(clock=st.integers(1, 12), wanted=clocks, last=st.none() | st.integers(1, 12))
@EACH
def test_marks_are_answered_as_the_rules_say(pair: Linked, clock: int, wanted: int, last: int | None) -> None:
    source = pair.source
    with source.connection.transaction(force_rollback=True):
        source.connection.execute("SELECT setval('mailroom.clock', %s)", [clock])
        if last is not None:
            pair.put({"sent_clock": last})
        run(source.connection, asking_mark(SCHEMA, pair.link, pair.run, wanted))
        source.connection.execute("SET LOCAL synchronous_commit = off")
        run(source.connection, marking(SCHEMA))
        expected = order.answered(clock, wanted, last or 0)
        durable = source.value("SHOW synchronous_commit") == "on"
        found = [Mark(each, durable) for (each,) in source.rows("SELECT sent_clock FROM mailroom.transit "
                                                                "WHERE kind = 'H'")]  # fmt: skip
        assert found == ([] if expected is None else [expected])
        assert source.value("SELECT last_value FROM mailroom.clock") == (expected.sent_clock if expected else clock)


# -- Who takes part ---------------------------------------------------------------------------------------------------


@given(states)
@EACH
def test_topics_are_asked_for_once_the_rules_let_an_inbox_join(node: Node, state: State) -> None:
    with written(node, state):
        for nth, origin in enumerate(state.origins):
            expected = {
                f"{inbox}{topic}"
                for inbox in INBOXES
                for topic, since in enumerate(origin.wants(inbox))
                if order.has_joined(origin.last, since)
            }
            assert set(run(node.connection, wanted_topics(SCHEMA, f"n{nth}"))) == expected


@given(states)
@EACH
def test_who_joins_wants_what_the_rules_say(node: Node, state: State) -> None:
    """A crash may have set the clock back below what was given out; until the dispatcher starts, that counts."""
    with written(node, state):
        for inbox in INBOXES:
            clock = max(state.clock, state.stable[inbox])
            assert run(node.connection, joining(SCHEMA, inbox, "paris")) == order.joining(clock)


@pytest.mark.slow
@given(sent_clock=st.integers(1, 12), since=clocks, stable=clocks)
@EACH
def test_messages_go_where_the_rules_say(pair: Linked, sent_clock: int, since: int, stable: int) -> None:
    target = pair.target
    with target.connection.transaction(force_rollback=True), pair.source.connection.transaction(force_rollback=True):
        pair.inbox("ledger", "sale", since=since, order="total")
        if stable:
            target.connection.execute("INSERT INTO mailroom.stable VALUES ('ledger', %s)", [stable])
        [sent] = pair.put({"sent_clock": sent_clock, "topic": "sale"})
        assert pair.take().outcome == "taken"
        found: dict[Route, list[tuple[UUID]]] = {
            Route.INBOX: target.rows("SELECT message_id FROM mailroom.inbox"),
            Route.DEAD_LETTER: target.rows("SELECT message_id FROM mailroom.dead_letter WHERE stage = 'order'"),
            Route.UNWANTED: target.rows("SELECT message_id FROM mailroom.dead_letter WHERE stage = 'receive'"),
        }
        expected = order.routed(sent_clock, since, stable)
        assert found == {route: [(sent,)] if route is expected else [] for route in Route}


def test_stopped_is_a_node_whose_incarnation_was_not_resumed(node: Node) -> None:
    for incarnation, resumed in ((1, 1), (2, 1), (2, 2)):
        node.connection.execute("UPDATE mailroom.node SET incarnation = %s, resumed = %s", [incarnation, resumed])
        found = {each.is_stopped for each in run(node.connection, waiting(SCHEMA))}
        assert found == {order.is_stopped(incarnation, resumed)}
