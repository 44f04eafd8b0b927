"""What is seen of messages for other nodes: status, trace, the dispatcher's totals."""

from datetime import UTC, datetime, timedelta

import pytest

from mailroom.node.status import LinkStatus, status
from mailroom.node.trace import causes, effects, trace
from tests.links.test_stamp import link
from tests.support.command import done, json_of
from tests.support.node import Node

pytestmark = pytest.mark.both_versions


def of_links(node: Node) -> dict[str, LinkStatus]:
    return {each.name: each for each in status(node.connection).links}


def age(node: Node, table: str, seconds: int) -> None:
    node.connection.execute(f"UPDATE mailroom.{table} SET sent_at = clock_timestamp() - interval '{seconds} s'")


def test_status_counts_what_is_on_the_way_to_each_link_and_what_it_has_not_acknowledged(node: Node) -> None:
    node.inbox("billing", "order.paid")
    lyon = link(node, "lyon", "order.paid")
    link(node, "oslo", "order.*")
    for kind in "MEC":
        node.send("order.paid", kind=kind)
    found = of_links(node)
    # The command goes to this node's own inbox.
    assert (found["lyon"].on_the_way, found["oslo"].on_the_way) == (2, 2)
    assert status(node.connection).inboxes[0].on_the_way == 3
    node.deliver_all()
    node.send("order.sent")
    node.connection.execute("UPDATE mailroom.link SET acked = 1 WHERE number = %s", [lyon])
    found = of_links(node)
    assert [(each.on_the_way, each.backlog) for each in found.values()] == [(0, 1), (1, 2)]
    assert {each.state for each in found.values()} == {"open"}


def test_lag_of_a_link_is_the_age_of_what_it_has_not_acknowledged(node: Node) -> None:
    lyon = link(node, "lyon", "a")
    assert of_links(node)["lyon"].lag_s == 0
    for _ in range(2):
        node.send("a")
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.transit SET sent_at = now() - seq * interval '1000 s'")
    assert of_links(node)["lyon"].lag_s == pytest.approx(1_000, abs=500)
    node.connection.execute("UPDATE mailroom.link SET acked = 2 WHERE number = %s", [lyon])
    assert (of_links(node)["lyon"].lag_s, of_links(node)["lyon"].backlog) == (0, 0)
    node.send("a")
    age(node, "outbox", 5_000)
    assert of_links(node)["lyon"].lag_s == pytest.approx(5_000, abs=500)


def test_reader_that_has_acknowledged_more_than_this_node_still_has_lacks_nothing(node: Node) -> None:
    """So it is after this node was put back in time."""
    link(node, "lyon", "a")
    node.connection.execute("UPDATE mailroom.link SET acked = 70")
    assert of_links(node)["lyon"].backlog == 0


def test_cut_link_is_shown_as_cut_and_gets_nothing(node: Node) -> None:
    link(node, "lyon", "a")
    node.connection.execute("UPDATE mailroom.link SET state = 'cut'")
    node.send("a")
    assert of_links(node) == {"lyon": LinkStatus("lyon", "cut", 0, 0, 0.0)}


def test_status_for_people_shows_links_with_and_without_inboxes(node: Node) -> None:
    assert "link to" not in done("status", dsn=node.dsn)
    link(node, "lyon", "a")
    assert "lyon" in done("status", dsn=node.dsn)
    node.inbox("billing")
    text = done("status", dsn=node.dsn)
    assert "billing" in text
    assert "lyon" in text
    assert [each["name"] for each in json_of("status", dsn=node.dsn)["links"]] == ["lyon"]


def test_trace_finds_a_message_on_its_way_until_it_is_acknowledged(node: Node) -> None:
    node.inbox("billing", "order.paid")
    lyon, oslo = link(node, "lyon", "order.paid"), link(node, "oslo", "order.*")
    node.send("order.sent", kind="E")
    first, second = [node.send("order.paid", key="k") for _ in range(2)]
    node.deliver_all()
    places = {each.link or each.inbox: each for each in trace(node.connection, second)}
    assert places.keys() == {"billing", "lyon", "oslo"}
    assert [(places[name].where, places[name].ahead) for name in ("lyon", "oslo")] == [("transit", 1), ("transit", 2)]
    assert places["lyon"].clock == places["billing"].clock
    assert (places["lyon"].inbox, places["lyon"].topic, places["lyon"].key) == (None, "order.paid", "k")
    assert f"{second} is on its way to lyon with clock" in done("trace", str(second), dsn=node.dsn)
    node.connection.execute("UPDATE mailroom.link SET acked = 1 WHERE number = %s", [lyon])
    assert [each.link for each in trace(node.connection, first) if each.where == "transit"] == ["oslo"]
    assert [each.ahead for each in trace(node.connection, second) if each.link == "lyon"] == [0]
    node.connection.execute("UPDATE mailroom.link SET acked = 3 WHERE number IN (%s, %s)", [lyon, oslo])
    assert [each.where for each in trace(node.connection, second)] == ["inbox"]


def test_trace_follows_causes_and_effects_that_are_on_their_way(node: Node) -> None:
    link(node, "lyon", "a", "b")
    cause = node.send("a")
    effect = node.send("b", headers={"causation": str(cause)})
    node.deliver_all()
    assert [(each.where, each.id) for each in causes(node.connection, effect)] == [("transit", cause)]
    assert [(each.where, each.id) for each in effects(node.connection, cause)] == [("transit", effect)]


def test_totals_and_the_command_tell_what_was_carried(node: Node) -> None:
    node.inbox("billing", "a")
    link(node, "lyon", "a")
    node.send("a")
    assert done("dispatcher", "deliver-all", dsn=node.dsn) == "1 messages taken, 1 delivered, 1 carried.\n"
    node.send("a", deliver_at=datetime.now(UTC) + timedelta(days=1))
    assert json_of("dispatcher", "deliver-all", dsn=node.dsn)["carried"] == 0
