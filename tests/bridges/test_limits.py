"""What a bridge out keeps, and for how long: while its broker is away, and after it has acknowledged."""

import logging

import pytest

from dispatcher.bridges import publishing
from dispatcher.housekeeping.trim import Trim
from dispatcher.links.at_source.bounds import bounding_ahead
from mailroom.bridges.bridges import Bridges
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from tests.bridges.tended import beside, bridge_out, out_state, set_bridge, tended
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually_async

pytestmark = pytest.mark.usefixtures("quick")


def put(node: Node, count: int) -> list[object]:
    """Send this many messages of one key, and stamp them; return their ids."""
    ids: list[object] = [node.send("orders", {"n": n}, key="k") for n in range(count)]
    node.deliver_all()
    return ids


def keep_house(node: Node) -> None:
    """Do what the dispatcher does for links once a minute."""
    trim = Trim(SCHEMA)
    for each in run(node.connection, trim.listing_links()):
        if each.is_full:
            with node.connection.transaction():
                run(node.connection, trim.cutting_full(each))
    for each in run(node.connection, trim.listing_links()):
        run(node.connection, trim.trimming_rows(each))


def seqs(node: Node) -> list[int]:
    """Return the rows that are kept."""
    return [seq for (seq,) in node.rows("SELECT seq FROM mailroom.transit ORDER BY seq")]


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_bridge_with_more_waiting_than_it_may_have_is_cut_and_says_so_wherever_somebody_looks(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    log = bridge_out(node, max_rows=3)
    before = put(node, 2)
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).acked == 2)
        log.away = "nobody listens there"
        waiting = put(node, 3)
        await eventually_async(lambda: out_state(node).state == "unreachable")
        keep_house(node)
        assert (out_state(node).state, out_state(node).backlog, out_state(node).why) == (
            "unreachable", 3, "nobody listens there",
        )  # fmt: skip
        waiting += put(node, 1)
        with caplog.at_level(logging.ERROR, "mailroom.dispatcher"):
            keep_house(node)
            keep_house(node)
        assert caplog.text.count("the bridge to out is cut: more than 3 rows waited for it") == 1
        state = out_state(node)
        assert (state.state, state.backlog, state.since, state.acked) == ("cut", 4, None, 2)
        assert "more than 3 messages waited for it, or somebody has cut it" in (state.why or "")
        assert "mailroom bridge remove out, then mailroom bridge out out" in (state.why or "")
        assert node.rows(
            "SELECT actor, action, key, messages, reason FROM mailroom.audit WHERE actor = 'dispatcher'"
        ) == [("dispatcher", "bridge cut", "out", 4, "more than 3 rows waited for it")]
        log.away = None
        assert put(node, 2)
        assert seqs(node) == [6]  # of what waited only the last row is left, and nothing was stamped since
        await lane.follow_until(lambda: not lane.beside._tended)
    async with tended(node):  # as the next dispatcher does
        assert log.ids() == before
        with node.connection.transaction():
            with pytest.raises(ConfigurationError, match="Bridge out is cut: more than 3") as refused:
                Bridges().resume(node.connection, "out", actor="me")
            assert refused.value.code == "MR-bridge-cut"
        set_bridge(node, "out", max_rows=100)  # other settings do not let it go on
        assert out_state(node).state == "cut"
        assert await beside(node, lambda it: Bridges().remove(it, "out", actor="me")) == 4
        bridge_out(node, max_rows=3)
    after = put(node, 3)
    async with tended(node):
        await eventually_async(lambda: (out_state(node).state, out_state(node).backlog) == ("open", 0))
    assert log.ids() == [*before, *after]
    assert not {*waiting} & {*log.ids()}


async def test_bridge_that_is_cut_while_it_publishes_publishes_nothing_behind_the_gap(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest row stays, as the link's last seq: it must not come without those before it."""
    monkeypatch.setattr(publishing, "ROWS", 2)
    looks: list[int] = []

    def looking(schema: str, link: int, after: int, *, rows: int, max_bytes: int) -> object:
        looks.append(after)
        return bounding_ahead(schema, link, after, rows=rows, max_bytes=max_bytes)

    monkeypatch.setattr(publishing, "bounding_ahead", looking)
    log = bridge_out(node, max_rows=4)
    ids = put(node, 6)
    log.held = True
    async with tended(node) as lane:
        await eventually_async(lambda: len(log.records) == 2)
        keep_house(node)
        assert seqs(node) == [6]
        log.held = False
        await eventually_async(lambda: looks.count(2) >= 2 or 6 in looks)  # it looks again before it sleeps
        assert out_state(node).acked == 2
        await lane.follow_until(lambda: not lane.beside._tended)
    assert log.ids() == ids[:2]


@pytest.mark.usefixtures("impatient")
async def test_what_is_kept_after_it_was_published_is_not_waiting(node: Node) -> None:
    log = bridge_out(node, max_rows=3)
    node.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
    ids = put(node, 5)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 5)
        keep_house(node)
        assert seqs(node) == [1, 2, 3, 4, 5]
        log.away = "nobody listens there"
        ids += put(node, 3)
        await eventually_async(lambda: out_state(node).state == "unreachable")
        keep_house(node)
        state = out_state(node)
        assert (state.state, state.backlog, state.keep_s, state.max_rows) == ("unreachable", 3, 3_600, 3)
        log.away = None
        await eventually_async(lambda: (out_state(node).state, out_state(node).acked) == ("open", 8))
        keep_house(node)
        assert seqs(node) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert log.ids() == ids
    for left in ([5, 6, 7, 8], [8]):  # the second acknowledgement is noted in the round after it
        node.connection.execute(
            "UPDATE mailroom.link SET acked_at = ARRAY(SELECT at - interval '1 hour' FROM unnest(acked_at) AS a (at))"
        )
        keep_house(node)
        assert seqs(node) == left


@pytest.mark.usefixtures("impatient")
async def test_what_waits_for_a_broker_stays_however_long_that_is_away(node: Node) -> None:
    log = bridge_out(node)
    log.away = "nobody listens there"
    ids = put(node, 4)
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "unreachable")
        node.connection.execute("UPDATE mailroom.transit SET stamped_at = stamped_at - interval '400 days'")
        keep_house(node)
        state = out_state(node)
        assert (state.backlog, state.lag_s > 399 * 86_400, state.keep_s, state.max_rows) == (4, True, 0, None)
        log.away = None
        await eventually_async(lambda: (out_state(node).state, out_state(node).acked) == ("open", 4))
    keep_house(node)
    assert log.ids() == ids
    assert seqs(node) == [4]  # the position


def test_commands_tell_that_a_bridge_is_cut(node: Node) -> None:
    out = ("bridge", "out", "orders", "--kafka", "localhost:9092", "--topic", "t")
    done(*out, dsn=node.dsn)
    put(node, 2)
    node.connection.execute("UPDATE mailroom.bridge_out SET trouble = 'unreachable', why = 'away', since = now()")
    done("bridge", "cut", "orders", dsn=node.dsn)
    status = done("bridge", "status", dsn=node.dsn, exit_code=1)
    assert "cut: somebody has cut it. What waited is given up" in " ".join(status.split())
    assert "[MR-bridge-cut]" in status
    assert "away" not in status
    assert "it is cut, and publishes nothing" in done(*out, dsn=node.dsn)
    assert "it is cut, and publishes nothing" in done("bridge", "set", "orders", "--max-rows", "9", dsn=node.dsn)
    assert "Bridge orders is cut: more than 9" in error_of(mailroom("bridge", "resume", "orders", dsn=node.dsn))
    assert json_of("bridge", "remove", "orders", dsn=node.dsn)["given_up"] == 2


def test_command_skips_a_row_and_what_is_published_ahead_counts_neither_as_waiting_nor_against_the_limit(
    node: Node,
) -> None:
    bridge_out(node, max_rows=3)
    put(node, 4)
    node.connection.execute("INSERT INTO mailroom.bridge_done (link, seq) SELECT link, 2 FROM mailroom.bridge_out")
    keep_house(node)
    assert (out_state(node).state, out_state(node).backlog) == ("open", 3)
    node.connection.execute(
        "UPDATE mailroom.bridge_out SET trouble = 'refused', why = 'the receiver answers 400', since = now()"
    )
    assert "bridge out: refused for 00:00:0" in done("doctor", dsn=node.dsn, exit_code=1)
    assert json_of("bridge", "skip", "out", "--row", "1", dsn=node.dsn)["row"] == 1
    assert "is a dead letter" in done("bridge", "skip", "out", "--row", "3", "--why", "old", dsn=node.dsn)
    assert "Row 2 does not wait" in error_of(mailroom("bridge", "skip", "out", "--row", "2", dsn=node.dsn))
    assert out_state(node).backlog == 1
    assert [row for (row,) in node.rows("SELECT seq FROM mailroom.bridge_done ORDER BY seq")] == [1, 2, 3]
    audited = "SELECT messages, reason FROM mailroom.audit WHERE action = 'bridge skip' ORDER BY id"
    assert node.rows(audited) == [(1, None), (1, "old")]
