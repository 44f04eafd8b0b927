"""The lane `links`: messages of other nodes arrive, whatever becomes of a source, of the target, or of the daemon."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import GeneratorType
from typing import Any, cast

import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import make_conninfo

from dispatcher import Dispatcher
from dispatcher.daemon import all_lanes
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes import leading
from dispatcher.lanes.lease import Backend, Lease
from dispatcher.links import lane, reading, visit
from dispatcher.links.at_source import source as at_source
from dispatcher.links.at_source.source import Source
from dispatcher.links.lane import LinksLane
from dispatcher.links.receiving import Room
from mailroom import create_inbox
from mailroom.cli.output import as_json
from mailroom.embedded import Server
from mailroom.links.start import noting_place
from mailroom.links.states import SourceState, reading_sources
from mailroom.node.status import links_status
from mailroom.schema import migrate
from mailroom.sql import locks
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run, run_in_transaction
from tests.support.command import done
from tests.support.databases import Databases
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node
from tests.support.proxy import Proxy, proxied
from tests.support.waiting import WITHIN_S, eventually_async
from tests.support.working import NEVER_S, is_asleep

TOPIC = "order.paid"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and note a refusal at once."""
    for module, name, seconds in (
        (lane, "FOLLOW_S", 0.05), (lane, "ACKNOWLEDGE_S", 0.05), (reading, "PATIENCE_S", 0.0),
        (reading, "LONGEST_PAUSE_S", 0.2), (reading, "LONGEST_STOP_S", 0.2), (visit, "CLAIM_PAUSE_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


def link(source: Node, target: Node, name: str = "north") -> Linked:
    """Link two nodes as the commands do: each has noted where it is, and the reader has asked for nothing yet."""
    for node in (source, target):
        run(node.connection, noting_place(SCHEMA))
    return linked(source, target, [], name=name)


@pytest.fixture
def pair(source: Node, target: Node, monkeypatch: pytest.MonkeyPatch) -> Linked:
    """`south` reads `north`: its inbox `shipping` gets `order.paid` from there."""
    monkeypatch.setenv("MAILROOM_DSN_NORTH", source.dsn)
    pair = link(source, target)
    pair.inbox("shipping", TOPIC)
    target.allow_clocks()
    return pair


@pytest.fixture
def proxy(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The network on the way to the source."""
    with proxied(pair.source.dsn) as (proxy, dsn):
        monkeypatch.setenv("MAILROOM_DSN_NORTH", dsn)
        yield proxy


@contextlib.asynccontextmanager
async def running(links: LinksLane) -> AsyncIterator[LinksLane]:
    task = asyncio.create_task(links.run())
    try:
        yield links
    finally:
        links.stop()
        await asyncio.wait_for(task, WITHIN_S)


def wanted(node: Node) -> list[str]:
    """Return the topics that readers of the node want."""
    return [topic for (topic,) in node.rows("SELECT topic FROM mailroom.link_topic ORDER BY topic")]


def send(node: Node, *keys: str, topic: str = TOPIC) -> None:
    """Send messages and have the node's dispatcher stamp them."""
    for key in keys:
        node.send(topic, key=key)
    node.deliver_all()


def keys(node: Node) -> list[str]:
    """Return the keys of what has arrived, in order."""
    return [key for (key,) in node.delivered("key")]


def state(node: Node, name: str = "north") -> tuple[str, str | None]:
    """Return state and reason of an origin."""
    [(found, why)] = node.rows("SELECT state, why FROM mailroom.origin WHERE name = %s", name)
    return found, why


async def asks(source: Node, *topics: str) -> None:
    """Wait until the reader has asked for the topics, and sleeps."""
    await eventually_async(lambda: wanted(source) == list(topics) and is_asleep(source))


async def arrive(target: Node, *expected: str) -> None:
    """Wait until exactly these keys are there, in this order."""
    await eventually_async(lambda: len(keys(target)) >= len(expected))
    assert keys(target) == list(expected)


# -- Messages flow ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_message_arrives_when_the_source_rings(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)) as links:
        await asks(pair.source, TOPIC)
        for nth in range(1, 4):
            await asyncio.to_thread(send, pair.source, f"{nth}")
            await arrive(pair.target, *(f"{each}" for each in range(1, nth + 1)))
        await eventually_async(lambda: (links.totals.received, links.totals.delivered) == (3, 3))


@pytest.mark.slow
async def test_what_was_stamped_before_it_started_arrives(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)
    await asyncio.to_thread(send, pair.source, "a", "b", "c")
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await arrive(pair.target, "a", "b", "c")


@pytest.mark.slow
async def test_message_for_which_nobody_rings_is_found_by_the_poll(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.05)):
        await asks(pair.source, TOPIC)
        for nth in "abc":
            pair.put({"key": nth})
            await eventually_async(partial(lambda key: key in keys(pair.target), nth))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
async def test_messages_arrive_though_a_stranger_at_the_source_holds_the_lock_of_the_sleepers(
    pair: Linked, shared: bool
) -> None:
    transit = f"'{SCHEMA}.transit'::regclass"
    pair.source.connection.execute(
        f"SELECT pg_advisory_lock{'_shared' * shared}({locks.ASLEEP}, {locks.key(transit)})".encode()
    )
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.1)):
        await eventually_async(lambda: wanted(pair.source) == [TOPIC], WITHIN_S)
        for nth in range(1, 4):
            await asyncio.to_thread(send, pair.source, f"{nth}")
            await arrive(pair.target, *(f"{each}" for each in range(1, nth + 1)))


@pytest.mark.slow
async def test_large_backlog_comes_in_portions_in_order(pair: Linked) -> None:
    pair.put(*({"key": f"{nth}", "value": bytes(1_000)} for nth in range(200)))
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S, room=Room(20_000, 10_000))):
        await arrive(pair.target, *(f"{nth}" for nth in range(200)))
    assert 20 <= len(pair.receipts()) <= 40
    sums = pair.target.rows("SELECT sum(last - first + 1), max(last) FROM mailroom.receipt")
    assert sums == [(200, 200)]


@pytest.mark.slow
async def test_what_was_received_is_acknowledged_once_it_is_durable(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)
        await asyncio.to_thread(send, pair.source, "a", "b")
        await arrive(pair.target, "a", "b")
        await eventually_async(lambda: pair.source.value("SELECT acked FROM mailroom.link") == 2)


@pytest.mark.slow
async def test_nothing_is_acknowledged_before_it_is_durable(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, allowed = asyncio.Event(), asyncio.Event()

    async def held_up(connection: psycopg.AsyncConnection, operation: Operation[None]) -> None:
        begun.set()
        await allowed.wait()
        await run_in_transaction(connection, operation)

    monkeypatch.setattr(lane, "run_in_transaction", held_up)
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.05)) as links:
        await asks(pair.source, TOPIC)
        pair.put({"key": "a"})
        await arrive(pair.target, "a")
        await asyncio.wait_for(begun.wait(), WITHIN_S)
        pair.put({"key": "b"})
        links.look()
        await arrive(pair.target, "a", "b")  # it has been at the source again since
        assert pair.source.value("SELECT acked FROM mailroom.link") == 0
        allowed.set()
        await eventually_async(lambda: pair.source.value("SELECT acked FROM mailroom.link") == 2)


@pytest.mark.slow
async def test_what_an_earlier_visit_received_is_not_acknowledged_by_a_later_one(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "ACKNOWLEDGE_S", NEVER_S)
    monkeypatch.setattr(reading, "LEASE_S", 0.05)
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.05)) as links:
        await asks(pair.source, TOPIC)
        pair.put({"key": "a"}, {"key": "b"})
        await arrive(pair.target, "a", "b")
        [each] = links._running.values()
        notes = each.reading.notes
        await eventually_async(lambda: notes.received is not None)
        durable = notes.received
        pair.source.end_sessions("mailroom links")
        await eventually_async(lambda: notes.received is not None and notes.received != durable)
        notes.durable = durable  # made durable only now
        pair.put({"key": "c"})
        await arrive(pair.target, "a", "b", "c")
        pair.put({"key": "d"})
        await arrive(pair.target, "a", "b", "c", "d")
        assert pair.source.value("SELECT acked FROM mailroom.link") == 0


@pytest.mark.slow
async def test_position_that_the_source_does_not_know_is_acknowledged_after_hello(pair: Linked) -> None:
    pair.put({"key": "a"})
    pair.take()
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: pair.source.value("SELECT acked FROM mailroom.link") == 1)


async def test_source_finds_its_reader_matched(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        matches = "SELECT l.matched = n.life FROM mailroom.link AS l, mailroom.node AS n"
        await eventually_async(lambda: pair.source.value(matches))


@pytest.mark.slow
async def test_new_subscription_reaches_the_source_and_its_messages_come(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)
        pair.inbox("audit", "order.#")
        await asks(pair.source, "order.#", TOPIC)
        await asyncio.to_thread(send, pair.source, "k", topic="order.shipped")
        await eventually_async(lambda: pair.target.delivered("inbox, key") == [("audit", "k")])
        pair.target.connection.execute("DELETE FROM mailroom.subscription WHERE inbox = 'audit'")
        await asks(pair.source, TOPIC)


@pytest.mark.slow
async def test_lease_tells_totals_and_what_each_origin_does(pair: Linked) -> None:
    counts = "SELECT counts FROM mailroom.lease WHERE role = 'links' AND until > clock_timestamp()"
    pair.put({"key": "a"}, {"kind": "H", "topic": "", "key": ""}, {"topic": "nowhere"}, {"topic": "no", "kind": "E"})
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await arrive(pair.target, "a")
        expected = {
            "received": 4, "delivered": 1, "expired": 0, "unrouted": 1, "dead": 1, "known": 0, "marks": 1,
            "origins": {"north": "reading"},
        }  # fmt: skip
        await eventually_async(lambda: pair.target.rows(counts) == [(expected,)])


@pytest.mark.slow
async def test_status_shows_what_the_lane_does_with_each_origin(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)

        def shown() -> bool:
            found = links_status(pair.target.connection)
            return found is not None and (found.leads, found.origins) == (True, {"north": "reading"})

        await eventually_async(shown)
        text = await asyncio.to_thread(done, "dispatcher", "status", dsn=pair.target.dsn, exit_code=1)
        assert "links: " in text
        assert "  north: reading\n" in text


@pytest.mark.slow
async def test_janitor_learns_which_inboxes_are_filled_from_elsewhere(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many inboxes their turn for a floor comes late."""
    watched: set[str] = set()
    monkeypatch.setattr(Janitor, "watch", lambda _, inboxes: watched.update(inboxes))
    [links] = [lane for lane in all_lanes(pair.target.dsn, poll_interval_s=NEVER_S) if isinstance(lane, LinksLane)]
    pair.inbox("idle", "order.shipped")
    pair.put({"key": "a"})
    async with running(links):
        await eventually_async(lambda: watched == {"shipping"})


@pytest.mark.slow
async def test_total_inbox_is_given_a_mark_of_an_idle_source(source: Node, target: Node, pair_of_total: Linked) -> None:
    async with running(LinksLane(target.dsn, poll_interval_s=NEVER_S)), dispatching(source), dispatching(target):
        await eventually_async(lambda: wanted(source) == [TOPIC])  # it joins by a mark, and asks then
        await asyncio.to_thread(target.send, TOPIC, key="own")
        stable = (
            "SELECT s.clock >= i.sent_clock FROM mailroom.inbox_ledger AS i, LATERAL ("
            "SELECT max(clock) AS clock FROM mailroom.stable WHERE inbox = 'ledger') AS s"
        )
        await eventually_async(lambda: target.rows(stable) == [(True,)])
        assert source.value("SELECT count(*) FROM mailroom.transit WHERE kind = 'H'") > 0


@pytest.fixture
def pair_of_total(source: Node, target: Node, monkeypatch: pytest.MonkeyPatch) -> Linked:
    """`south` has an inbox in total order over its own messages and those of `north`."""
    monkeypatch.setenv("MAILROOM_DSN_NORTH", source.dsn)
    pair = link(source, target)
    target.allow_clocks()
    with target.connection.transaction():
        create_inbox(target.connection, "ledger", [TOPIC], order="total", origin="*")
    return pair


@contextlib.asynccontextmanager
async def dispatching(node: Node) -> AsyncIterator[None]:
    """Run the node's dispatcher."""
    dispatcher = Dispatcher(node.dsn, poll_interval_s=0.05)
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        dispatcher.stop()
        await asyncio.wait_for(task, WITHIN_S)


# -- Origins come and go ----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_node_without_origins_holds_its_lease_and_two_sessions(target: Node) -> None:
    async with running(LinksLane(target.dsn)):
        leads = "SELECT count(*) FROM mailroom.lease WHERE role = 'links' AND until > clock_timestamp()"
        await eventually_async(lambda: target.value(leads) == 1)
        assert len(target.sessions()) == 2
        written = (
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables WHERE relname <> 'lease'"
        )
        before = target.value(written)
        renewed = "SELECT until > %s FROM mailroom.lease WHERE role = 'links'"
        until = target.value("SELECT until FROM mailroom.lease WHERE role = 'links'")
        await eventually_async(lambda: target.value(renewed, until))  # it has looked for origins many times meanwhile
        assert target.value(written) == before


@pytest.mark.slow
async def test_origin_is_followed_as_it_is_added_excluded_included_and_removed(
    source: Node, target: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAILROOM_DSN_NORTH", source.dsn)
    async with running(LinksLane(target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: target.rows("SELECT FROM mailroom.lease WHERE role = 'links'"))
        pair = link(source, target)
        pair.inbox("shipping", TOPIC)
        await asks(source, TOPIC)
        await asyncio.to_thread(send, source, "a")
        await arrive(target, "a")
        target.connection.execute("UPDATE mailroom.origin SET state = 'excluded'")
        await eventually_async(lambda: not source.sessions("mailroom links"))
        await asyncio.to_thread(send, source, "b")
        target.connection.execute("UPDATE mailroom.origin SET state = 'open'")
        await arrive(target, "a", "b")
        target.connection.execute("DELETE FROM mailroom.origin")
        await eventually_async(lambda: not source.sessions("mailroom links"))
        await asyncio.to_thread(send, source, "c")
    assert keys(target) == ["a", "b"]


@pytest.mark.slow
async def test_origin_that_leads_elsewhere_now_is_read_there(
    pair: Linked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAILROOM_DSN_NORTH", "postgresql://127.0.0.1:1/nothing")
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await is_told(pair.target, "unreachable")
        service = tmp_path / "services"
        values = psycopg.conninfo.conninfo_to_dict(pair.source.dsn)
        service.write_text("[there]\n" + "".join(f"{name}={value}\n" for name, value in values.items()))
        monkeypatch.setenv("PGSERVICEFILE", str(service))
        pair.target.connection.execute("UPDATE mailroom.origin SET service = 'there'")
        await asks(pair.source, TOPIC)


def status(node: Node) -> SourceState:
    """Return what `mailroom link status` tells of the only origin."""
    [found] = run(node.connection, reading_sources(SCHEMA))
    return found


async def is_told(node: Node, state: str) -> None:
    """Wait until `mailroom link status` tells this of the only origin."""
    await eventually_async(lambda: status(node).state == state)


def told(node: Node, name: str = "north") -> str:
    """Return what the lease tells of an origin."""
    found: str = node.value("SELECT coalesce(max(counts->'origins'->>%s), '') FROM mailroom.lease", name)
    return found


# -- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_reader_that_is_refused_says_what_to_do_and_goes_on_when_it_was_done(
    pair: Linked, caplog: pytest.LogCaptureFixture
) -> None:
    pair.source.connection.execute("UPDATE mailroom.link SET name = 'east'")
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: state(pair.target)[0] == "stopped")
        assert state(pair.target) == (
            "stopped",
            "north allows no reader south; at north: mailroom link allow south [MR-link-not-allowed]",
        )
        pair.source.connection.execute("UPDATE mailroom.link SET name = 'south'")
        await asks(pair.source, TOPIC)
        await eventually_async(lambda: state(pair.target) == ("open", None))
    assert len([each for each in caplog.records if "is not read" in each.message]) == 1


@pytest.mark.slow
async def test_refusal_that_passes_by_itself_is_not_noted(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", NEVER_S)
    pair.source.connection.execute("UPDATE mailroom.node SET started_at = started_at - interval '1 hour'")
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: "refused" in told(pair.target))
        await asyncio.to_thread(pair.source.deliver_all)  # a dispatcher of the source has started
        await asks(pair.source, TOPIC)
        assert state(pair.target) == ("open", None)


async def test_nothing_that_leads_to_a_source_stops_it_without_telling_secrets(
    pair: Linked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAILROOM_DSN_NORTH", "postgresql://south:s3cret@[half/north")
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: state(pair.target)[0] == "stopped")
        assert "MAILROOM_DSN_NORTH" in str(state(pair.target)[1])
        assert "s3cret" not in f"{state(pair.target)}{told(pair.target)}{caplog.text}"


@pytest.mark.slow
async def test_login_that_fails_is_tried_again_and_keeps_its_password(
    pair: Linked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAILROOM_DSN_NORTH", make_conninfo(pair.source.dsn, user="nobody", password="s3cret"))
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await is_told(pair.target, "unreachable")
        assert "nobody" in str(status(pair.target).why)
        assert "s3cret" not in json.dumps(as_json(status(pair.target)))
    assert "s3cret" not in f"{told(pair.target)}{caplog.text}"
    assert len([each for each in caplog.records if "is not reached" in each.message]) == 1


async def test_history_that_has_parted_without_a_restart_stops_the_link(pair: Linked) -> None:
    pair.source.connection.execute("UPDATE mailroom.link SET matched = (SELECT life FROM mailroom.node)")
    pair.put({"key": "a"}, {"key": "b"})
    pair.take()
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 2")
    pair.put({"key": "other"})
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: state(pair.target)[0] == "stopped")
        assert str(state(pair.target)[1]).endswith("; at north: mailroom node restored [MR-link-source-unaware]")
        assert pair.source.rows("SELECT claim_seq, claim_clock FROM mailroom.link") == [(2, 2)]
    assert keys(pair.target) == ["a", "b"]


@pytest.mark.slow
async def test_refusal_that_is_noted_is_opened_by_no_hello_alone(pair: Linked) -> None:
    pair.source.connection.execute("UPDATE mailroom.link SET matched = (SELECT life FROM mailroom.node)")
    pair.put({"key": "a"}, {"key": "b"})
    pair.take()
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 2")
    for statement in NOTE_HELLOS:
        pair.source.connection.execute(statement)
    for statement in NOTE_STATES:
        pair.target.connection.execute(statement)
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: state(pair.target)[0] == "stopped")
        before = pair.source.value("SELECT count(*) FROM hello")
        await eventually_async(lambda: pair.source.value("SELECT count(*) FROM hello") >= before + 3)
    assert pair.target.rows("SELECT DISTINCT state FROM noted") == [("stopped",)]


# Every hello that the source has accepted, and every state that was ever noted of it.
NOTING = """
CREATE FUNCTION noting() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.{table}; RETURN NULL; END'
"""
NOTE_HELLOS = (
    "CREATE TABLE hello ()",
    NOTING.format(table="hello DEFAULT VALUES"),
    "CREATE TRIGGER noting AFTER UPDATE OF run ON mailroom.link FOR EACH ROW EXECUTE FUNCTION noting()",
)
NOTE_STATES = (
    "CREATE TABLE noted (state text)",
    NOTING.format(table="noted VALUES (new.state)"),
    "CREATE TRIGGER noting AFTER UPDATE OF state ON mailroom.origin FOR EACH ROW EXECUTE FUNCTION noting()",
)


@pytest.mark.slow
async def test_source_that_is_in_doubt_and_has_lost_rows_is_claimed_reconciled_and_read_on(pair: Linked) -> None:
    pair.put({"key": "a"}, {"key": "b"})
    pair.take()
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 2")
    pair.put({"key": "other"})
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: pair.source.value("SELECT claim_seq FROM mailroom.link") == 2)
        pair.source.connection.execute("UPDATE mailroom.node SET incarnation = incarnation + 1")
        await arrive(pair.target, "a", "b", "other")
    assert pair.target.value("SELECT incarnation FROM mailroom.origin") == 2
    assert pair.target.value("SELECT count(*) FROM mailroom.known") == 1


@pytest.mark.slow
async def test_gap_stops_the_link_and_names_the_row_to_go_on_at(pair: Linked) -> None:
    pair.put({"key": "a"})
    pair.take()
    pair.put({"key": "b"}, {"key": "c"}, {"key": "d"})
    pair.trim(4)
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: state(pair.target)[0] == "stopped")
        assert str(state(pair.target)[1]).endswith("mailroom link resume north --at 3 [MR-link-rows-missing]")


@pytest.mark.slow
async def test_row_that_stops_a_link_is_tried_again_until_it_can_be_received(pair: Linked) -> None:
    pair.put({"key": "a"}, {"key": "b", "sent_clock": 2**62 + 1})
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: "clock above" in str(state(pair.target)[1]))
        assert keys(pair.target) == ["a"]
        pair.source.connection.execute("UPDATE mailroom.transit SET sent_clock = 2 WHERE seq = 2")
        await arrive(pair.target, "a", "b")
        await eventually_async(lambda: state(pair.target) == ("open", None))


# -- A source that is gone, or hangs ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_source_that_was_cut_off_is_read_again(pair: Linked, proxy: Proxy) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.05)):
        await asks(pair.source, TOPIC)
        for nth in range(1, 3):
            proxy.cut()
            await is_told(pair.target, "unreachable")
            await asyncio.to_thread(send, pair.source, f"{nth}")
            proxy.restore()
            await arrive(pair.target, *(f"{each}" for each in range(1, nth + 1)))


@pytest.mark.slow
async def test_source_that_hangs_is_given_up_and_read_again(
    pair: Linked, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=0.05)):
        await asks(pair.source, TOPIC)
        with monkeypatch.context() as impatient:
            impatient.setattr(at_source, "ANSWER_S", 0.3)
            proxy.black_hole()
            await is_told(pair.target, "unreachable")
        await asyncio.to_thread(send, pair.source, "a")
        proxy.forward()
        proxy.cut()  # what was opened into the black hole stays dead
        proxy.restore()
        await arrive(pair.target, "a")


@pytest.mark.slow
async def test_stopping_ends_while_the_source_hangs(
    pair: Linked, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FINISH_WITHIN_S", "DISCONNECT_AFTER_S"):  # so that the lease is given up however slow the target is
        monkeypatch.setattr(leading, name, WITHIN_S)
    links = LinksLane(pair.target.dsn, poll_interval_s=0.05)
    async with running(links):
        await asks(pair.source, TOPIC)
        proxy.black_hole()
        await eventually_async(lambda: proxy.swallowed)  # it asks, and there is no answer
        links.stop()
        await eventually_async(lambda: not pair.target.sessions())
    assert pair.target.value("SELECT until < clock_timestamp() FROM mailroom.lease WHERE role = 'links'")


@pytest.mark.slow
async def test_source_lost_while_the_lane_stops_is_not_said_to_be_tried_again(
    pair: Linked, proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_source, "ANSWER_S", WITHIN_S)
    links = LinksLane(pair.target.dsn, poll_interval_s=0.05)
    async with running(links):
        await asks(pair.source, TOPIC)
        [reading] = [each.reading for each in links._running.values()]
        proxy.black_hole()
        await eventually_async(lambda: proxy.swallowed)
        links.stop()
        await eventually_async(lambda: reading.notes.stopping)
        proxy.cut()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.slow
async def test_stopping_ends_while_the_target_hangs(pair: Linked) -> None:
    with proxied(pair.target.dsn) as (network, dsn):
        async with running(LinksLane(dsn, poll_interval_s=0.05)):
            await asks(pair.source, TOPIC)
            network.black_hole()
            pair.put({"key": "a"})
            await eventually_async(lambda: network.swallowed)


@pytest.mark.slow
async def test_one_source_that_is_dead_and_one_that_hangs_hold_up_none_of_the_others(
    pair: Linked, proxy: Proxy, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsns = [databases.create(migrated=True) for _ in range(4)]
    try:
        with contextlib.ExitStack() as stack:
            others = [Node(dsn, stack.enter_context(psycopg.connect(dsn, autocommit=True))) for dsn in dsns]
            for nth, other in enumerate(others):
                other.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
                monkeypatch.setenv(f"MAILROOM_DSN_N{nth}", other.dsn)
                each = link(other, pair.target, f"n{nth}")
                each.inbox("shipping", TOPIC)
            monkeypatch.setenv("MAILROOM_DSN_N0", "postgresql://127.0.0.1:1/nothing")
            async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)) as links:
                for node in (pair.source, *others[1:]):
                    await asks(node, TOPIC)
                proxy.black_hole()
                links.look()
                await eventually_async(lambda: proxy.swallowed)
                for nth, other in enumerate(others[1:], start=1):
                    await asyncio.to_thread(send, other, f"{nth}")
                    await eventually_async(partial(lambda key: key in keys(pair.target), f"{nth}"))
                await eventually_async(lambda: told(pair.target, "n0").startswith("unreachable"))
    finally:
        for dsn in dsns:
            databases.drop(dsn)


@pytest.mark.slow
async def test_source_that_freezes_in_a_fetch_holds_up_none_of_the_others(
    pair: Linked, proxy: Proxy, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the others waits for its batch: neither the session that receives for all, nor its turns."""
    ask, frozen = Source.ask, asyncio.Event()

    async def freezing(source: Source, operation: Operation[T], within_s: float | None = None) -> T:
        if not frozen.is_set() and cast("GeneratorType[Any, Any, Any]", operation).gi_code.co_name == "fetching":
            proxy.black_hole()
            frozen.set()
        return await ask(source, operation, within_s)

    monkeypatch.setattr(Source, "ask", freezing)
    dsn = databases.create(migrated=True)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            east = Node(dsn, connection)
            connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
            monkeypatch.setenv("MAILROOM_DSN_EAST", dsn)
            link(east, pair.target, "east").inbox("shipping", TOPIC)
            async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
                await asks(pair.source, TOPIC)
                await asks(east, TOPIC)
                await asyncio.to_thread(send, pair.source, "frozen")
                await asyncio.wait_for(frozen.wait(), WITHIN_S)
                for nth in range(1, 4):
                    await asyncio.to_thread(send, east, f"{nth}")
                    await arrive(pair.target, *(f"{each}" for each in range(1, nth + 1)))
    finally:
        databases.drop(dsn)


def migrated(server: Server) -> str:
    """Return the URL of a node on a server of the test's own."""
    engine = sqlalchemy.create_engine(server.dsn().replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        migrate(connection)
        connection.execute(sqlalchemy.text("UPDATE mailroom.node SET id = gen_random_uuid()"))
    engine.dispose()
    return server.dsn()


@pytest.mark.slow
async def test_source_whose_server_restarts_is_read_again_within_seconds(
    private_server: Server, target: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", NEVER_S)
    dsn = migrated(private_server)
    with psycopg.connect(dsn, autocommit=True) as connection:
        pair = link(Node(dsn, connection), target)
        pair.inbox("shipping", TOPIC)
        monkeypatch.setenv("MAILROOM_DSN_NORTH", dsn)
        async with running(LinksLane(target.dsn, poll_interval_s=0.05)):
            await asks(pair.source, TOPIC)
            await asyncio.to_thread(send, pair.source, "a")
            await arrive(target, "a")
            await asyncio.to_thread(private_server.stop)
            await asyncio.to_thread(private_server.start)
            with psycopg.connect(dsn, autocommit=True) as again:
                node = Node(dsn, again)
                await asyncio.to_thread(send, node, "b")
                await arrive(target, "a", "b")


@pytest.mark.slow
async def test_target_whose_server_restarts_goes_on(
    private_server: Server, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = migrated(private_server)
    monkeypatch.setenv("MAILROOM_DSN_NORTH", source.dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        pair = link(source, Node(dsn, connection))
        pair.inbox("shipping", TOPIC)
        async with running(LinksLane(dsn, poll_interval_s=0.05)):
            await asks(source, TOPIC)
            await asyncio.to_thread(send, source, "a")
            await arrive(pair.target, "a")
            await asyncio.to_thread(private_server.stop)
            await asyncio.to_thread(send, source, "b")
            await asyncio.to_thread(private_server.start)
            with psycopg.connect(dsn, autocommit=True) as again:
                await arrive(Node(dsn, again), "a", "b")


# -- Leading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_standby_says_no_hello_and_takes_over_when_the_lease_has_ended(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "KEEP_INTERVAL_S", 0.02)
    tried: list[Backend] = []
    taking = Lease.taking

    def counted(lease: Lease, backend: Backend, state: str, counts: Mapping[str, object]) -> Operation[bool]:
        tried.append(backend)
        return taking(lease, backend, state, counts)

    monkeypatch.setattr(Lease, "taking", counted)
    pair.target.connection.execute(
        "INSERT INTO mailroom.lease (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts) "
        "VALUES ('links', gen_random_uuid(), 1, now() + interval '1 hour', 'elsewhere', 1, 0, now(), 'awake', '{}')"
    )
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: len(tried) > 20)
        assert pair.source.value("SELECT run FROM mailroom.link") == pair.run
        pair.target.connection.execute("UPDATE mailroom.lease SET until = clock_timestamp() WHERE role = 'links'")
        await asks(pair.source, TOPIC)
        assert pair.source.value("SELECT run FROM mailroom.link") != pair.run


@pytest.mark.slow
async def test_daemon_that_has_lost_its_lease_leaves_the_source(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)
        pair.target.connection.execute(
            "UPDATE mailroom.lease SET holder = gen_random_uuid(), until = clock_timestamp() + interval '1 hour' "
            "WHERE role = 'links'"
        )
        await eventually_async(lambda: not pair.source.sessions("mailroom links"))


@pytest.mark.slow
async def test_zombie_with_an_old_position_takes_nothing_twice(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)) as zombie:
        await asks(pair.source, TOPIC)
        with pair.source.connection.transaction():  # which it does not see before
            pair.put({"key": "a"}, {"key": "b"})
            pair.take(rows=1)  # as another daemon does
        zombie.look()
        await arrive(pair.target, "a", "b")
        await eventually_async(lambda: zombie.totals.received == 1)
    assert pair.receipts("first, last") == [(1, 1), (2, 2)]


@pytest.mark.slow
async def test_zombie_whose_old_position_is_trimmed_stops_nothing(pair: Linked) -> None:
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)) as zombie:
        await asks(pair.source, TOPIC)
        for statement in NOTE_STATES:
            pair.target.connection.execute(statement)
        with pair.source.connection.transaction():  # which it does not see before
            pair.put({"key": "a"}, {"key": "b"})
            pair.take()  # as another daemon does, which acknowledges both
            pair.trim(2)
            pair.put({"key": "c"})
        zombie.look()
        await arrive(pair.target, "a", "b", "c")
    assert pair.target.rows("SELECT state FROM noted") == []


@pytest.mark.slow
async def test_daemon_whose_link_another_has_taken_tells_nothing_there_and_greets_again(
    pair: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LEASE_S", 0.1)
    async with running(LinksLane(pair.target.dsn, poll_interval_s=NEVER_S)):
        await asks(pair.source, TOPIC)
        mine = pair.source.value("SELECT run FROM mailroom.link")
        pair.source.connection.execute("UPDATE mailroom.link SET run = gen_random_uuid()")
        await asyncio.to_thread(send, pair.source, "a")
        await eventually_async(lambda: pair.source.value("SELECT run FROM mailroom.link") == mine)
        await arrive(pair.target, "a")


# -- Room -------------------------------------------------------------------------------------------------------------


def test_share_of_each_origin_is_half_its_part_of_the_whole_and_never_more_than_a_batch() -> None:
    room = Room(100, 40)
    shares = []
    for origins in (0, 1, 2, 3, 10, 1000):
        room.origins = origins
        shares.append(room.share)
    assert shares == [40, 40, 25, 16, 5, 1]


async def test_only_batches_larger_than_their_share_wait_for_each_other() -> None:
    room = Room(100, 40)
    async with room.taken(41):
        async with room.taken(40):
            pass
        waiting = asyncio.create_task(_take(room, 41))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
    await waiting


async def _take(room: Room, size: int) -> None:
    async with room.taken(size):
        pass
