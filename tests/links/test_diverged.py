"""Histories that have parted: dumps restored into the source, the target or both, and what follows without a loss."""

import asyncio
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.delivery.deliver import Delivery, releasing
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.housekeeping.trim import Trim
from dispatcher.lanes.leading import KEEPER
from dispatcher.links import reconcile as reconciling
from dispatcher.links.at_source.acknowledge import acknowledging, making_durable
from dispatcher.links.at_source.bounds import bounding, reading_position
from dispatcher.links.at_source.fetch import fetching
from dispatcher.links.receive import RECEIVING_SESSION
from dispatcher.links.receiver import Receiver
from dispatcher.links.reconcile import reconcile
from mailroom import Links, create_inbox
from mailroom.embedded import Binaries, Server
from mailroom.errors import LinkRefused, UnknownLink
from mailroom.links.handshake.diverged import BY_HAND, claiming, holding, reading_newest, renewing, rewinding
from mailroom.links.handshake.hello import LinkTaken, asking_topics, greeting, matching
from mailroom.links.handshake.target import introducing, opening, pinning, reading_origins
from mailroom.links.readers import allowing, removing_reader
from mailroom.links.restored import saying_moved, saying_restored, taking_new_id
from mailroom.links.resume import LinkReport, moving, reporting, resuming
from mailroom.links.start import noting_place
from mailroom.schema import migrate
from mailroom.session import settings
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run, run_async, run_in_transaction
from outbox import Outbox
from tests.models.link_history import Witness, anchor, reconciled
from tests.support.databases import Databases
from tests.support.links import wanted_topics
from tests.support.node import SCHEMA, Node
from tests.support.standby import Standby, standby_of
from tests.support.waiting import eventually

ANEW = "UPDATE mailroom.node SET started_at = started_at - interval '1 minute'"


def transacted(node: Node, operation: Operation[T]) -> T:
    with node.connection.transaction():
        return run(node.connection, operation)


class Pair:
    """`target` reads `source` as its daemon does: each `turn` is one hello and what follows from it."""

    def __init__(
        self, source: Node, target: Node, binaries: Binaries, name: str = "north", reader: str = "south"
    ) -> None:
        self.source = source
        self.target = target
        self.programs = binaries.path
        self.run = uuid4()
        self.name = name
        self.reader = reader

    def link(self) -> None:
        for node, insert, names in (
            (self.source, "INSERT INTO mailroom.link (name) VALUES (%s)", [self.reader]),
            (self.target, "INSERT INTO mailroom.origin (name, reader) VALUES (%s, %s)", [self.name, self.reader]),
        ):
            with node.connection.transaction():
                run(node.connection, noting_place(SCHEMA))
                node.connection.execute(insert.encode(), names)
        self.target.inbox("billing")
        self.target.connection.execute(
            "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('order.paid', 'billing', %s)", [self.name]
        )

    def stamp(self, *keys: str, **fields: Any) -> list[UUID]:
        """Send messages at the source, and stamp them."""
        ids = [self.source.send("order.paid", key=key, **fields) for key in keys]
        self.source.deliver_all()
        return ids

    async def turn(self) -> str:
        """Do one turn; return what came of it."""
        async with (
            await psycopg.AsyncConnection.connect(self.target.dsn, autocommit=True) as target,
            await psycopg.AsyncConnection.connect(self.source.dsn, autocommit=True) as source,
        ):
            for name, value in RECEIVING_SESSION.items():
                await target.execute(f"SET {name} = '{value}'".encode())
            return await self._turn(target, source)

    async def _turn(self, target: psycopg.AsyncConnection, source: psycopg.AsyncConnection) -> str:
        [origin] = [each for each in await run_async(target, reading_origins(SCHEMA)) if each.name == self.name]
        party = await run_async(target, introducing(SCHEMA, origin))
        try:
            async with source.transaction():
                greeted = await run_async(source, greeting(SCHEMA, self.name, party, origin.pinned, self.run))
        except LinkRefused as error:
            return str(error)
        async with target.transaction():
            origin = await run_async(target, pinning(SCHEMA, origin, greeted))
        wanted = await run_async(target, wanted_topics(SCHEMA, self.name))
        async with source.transaction():
            await run_async(source, asking_topics(SCHEMA, greeted.link, self.run, wanted))
        position = await run_async(target, reading_position(SCHEMA, origin.number))
        is_new = origin.incarnation is not None and greeted.incarnation > origin.incarnation
        bounds = await run_async(source, bounding(SCHEMA, greeted.link, position))
        if is_new:
            found = await reconcile(target, SCHEMA, origin.number, source, SCHEMA, greeted.link, greeted.incarnation)
            assert found is not None
            return found.why or "reconciled"
        if bounds.verdict == "diverged":
            await run_async(source, claiming(SCHEMA, greeted.link, self.run, position.seq, position.sent_clock))
            return "claimed" if greeted.in_doubt else "not in doubt"
        if bounds.verdict == "gap":
            return f"gap of {bounds.missing}"
        await run_async(source, matching(SCHEMA, greeted.link, self.run))
        await run_async(target, opening(SCHEMA, origin.number))
        while bounds.last is not None:
            batch = await run_async(source, fetching(SCHEMA, greeted.link, after=position.seq, to=bounds.last))
            reception = await Receiver(target, SCHEMA).receive(origin.number, batch, position)
            assert reception.outcome == "taken"
            assert reception.position is not None
            position = reception.position
            bounds = await run_async(source, bounding(SCHEMA, greeted.link, position))
        await run_in_transaction(target, making_durable())
        await run_async(source, acknowledging(SCHEMA, greeted.link, self.run, position.seq))
        return "read"

    async def turns(self) -> list[str]:
        """Do turns until one reads or stands, the source's dispatcher working in between."""
        came = [await self.turn()]
        while came[-1] in ("claimed", "reconciled") and len(came) < 5:
            await self.housekeep()
            came.append(await self.turn())
        return came

    async def housekeep(self) -> None:
        """Do what the source's dispatcher does beside its deliveries."""
        async with await settings.connect_async(self.source.dsn, "keeper", KEEPER) as connection:
            await Janitor(SCHEMA).run_once(connection)

    def received(self) -> list[str]:
        """Return the keys that the target has received, in order."""
        return [key for (key,) in self.target.delivered("key")]

    def seqs(self) -> list[tuple[int, str]]:
        return [(seq, key) for seq, key in self.source.rows("SELECT seq, key FROM mailroom.transit ORDER BY seq")]

    def backup(self, node: Node) -> bytes:
        """Return a dump of the node."""
        return subprocess.run(
            [self.programs / "pg_dump", "-n", SCHEMA, node.dsn], check=True, capture_output=True
        ).stdout  # fmt: skip

    def restore(self, node: Node, dump: bytes, *, anew: bool = True) -> None:
        """Put the node back to a dump, as if the server had been started since it was made, or not."""
        node.connection.execute("DROP SCHEMA mailroom CASCADE")
        psql = [str(self.programs / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", node.dsn]
        subprocess.run(psql, input=dump, check=True, capture_output=True)
        node.connection.execute("DISCARD ALL")
        if anew:
            node.connection.execute(ANEW)

    def report(self) -> LinkReport:
        return run(self.target.connection, reporting(SCHEMA, "north"))

    def incarnation(self) -> int:
        return int(self.source.value("SELECT incarnation FROM mailroom.node"))


@pytest.fixture
def pair(source: Node, target: Node, binaries: Binaries) -> Pair:
    if not (binaries.path / "pg_dump").exists():
        pytest.skip("this PostgreSQL has no pg_dump")
    made = Pair(source, target, binaries)
    made.link()
    return made


# -- The source back in time ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_source_put_back_in_time_loses_what_it_lost_and_nothing_comes_twice(pair: Pair) -> None:
    """With messages in its outbox and scheduled when it was dumped, which it stamps again."""
    assert await pair.turns() == ["read"]
    pair.stamp("a", "b")
    await pair.turns()
    pair.source.send("order.paid", key="waiting")
    later = datetime.now(UTC) + timedelta(hours=1)
    pair.source.send("order.paid", key="scheduled", deliver_at=later)
    dump = pair.backup(pair.source)
    pair.source.deliver_all()
    [lost, also] = pair.stamp("lost", "also lost")
    release(pair)
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "waiting", "lost", "also lost", "scheduled"]
    sent = pair.target.value("SELECT max(sent_clock) FROM mailroom.inbox")

    pair.restore(pair.source, dump)
    pair.stamp("new")
    assert pair.seqs() == [(1, "a"), (2, "b"), (3, "waiting"), (4, "new")]
    release(pair)
    assert await pair.turns() == ["claimed", "reconciled", "read"]
    assert pair.received() == ["a", "b", "waiting", "lost", "also lost", "scheduled", "new"]
    assert pair.target.value("SELECT sent_clock FROM mailroom.inbox WHERE key = 'new'") > sent
    assert pair.incarnation() == pair.target.value("SELECT incarnation FROM mailroom.origin") == 2
    # "waiting" has the same seq in both histories, and "scheduled" came again and was left out.
    assert set(pair.report().lost) == {lost, also}
    assert pair.report().skipped == ()
    assert pair.source.rows("SELECT actor, action, key FROM mailroom.audit") == [
        ("dispatcher", "dispatcher new-incarnation", "south")
    ]
    assert pair.target.rows("SELECT actor, action, key, messages FROM mailroom.audit") == [
        ("dispatcher", "dispatcher source-lost", "north", 3)
    ]
    pair.stamp("next")
    assert await pair.turns() == ["read"]
    assert pair.received()[-1] == "next"


def release(pair: Pair) -> None:
    """Deliver what is scheduled."""
    pair.source.connection.execute("UPDATE mailroom.scheduled SET deliver_at = now()")
    with pair.source.connection.transaction():
        run(pair.source.connection, releasing(SCHEMA))
    pair.source.deliver_all()


@pytest.mark.slow
async def test_source_put_back_to_before_its_first_row(pair: Pair) -> None:
    await pair.turns()
    dump = pair.backup(pair.source)
    ids = pair.stamp("a", "b")
    await pair.turns()
    pair.restore(pair.source, dump)
    pair.source.deliver_all()
    assert await pair.turns() == ["claimed", "reconciled", "read"]
    assert set(pair.report().lost) == set(ids)
    pair.stamp("c")
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "number", ["same", pytest.param("higher", marks=pytest.mark.slow), pytest.param("lower", marks=pytest.mark.nightly)]
)
async def test_source_put_back_to_before_it_allowed_its_reader(
    source: Node, target: Node, binaries: Binaries, number: str
) -> None:
    """Whatever number the link gets then: what was received is known, and no clock is given to two messages."""
    if not (binaries.path / "pg_dump").exists():
        pytest.skip("this PostgreSQL has no pg_dump")
    pair = Pair(source, target, binaries)
    source.inbox("shipping", "order.paid")
    source.deliver_all()
    for nth in range(3):
        source.send("order.paid", key=f"waiting-{nth}")
    dump = pair.backup(source)
    if number == "lower":
        others(source, 2)
    pair.link()
    assert await pair.turns() == ["read"]
    sent = pair.stamp("lost")
    assert await pair.turns() == ["read"]
    assert pair.received() == ["waiting-0", "waiting-1", "waiting-2", "lost"]
    last = target.value("SELECT max(sent_clock) FROM mailroom.inbox")

    pair.restore(source, dump)
    if number == "higher":
        others(source, 2)
    transacted(source, allowing(SCHEMA, "south", {}, actor="ada", why=None))
    came = await pair.turns()
    while "mailroom link remove south" in came[-1]:
        for act in ("remove", "allow"):
            with source.connection.transaction():
                getattr(Links(), act)(source.connection, "south", actor="ada")
        came = await pair.turns()
    pair.stamp("new")
    assert (await pair.turns())[-1] == "read"
    assert pair.received() == ["waiting-0", "waiting-1", "waiting-2", "lost", "new"]
    assert target.value("SELECT sent_clock FROM mailroom.inbox WHERE key = 'new'") > last
    clocks = [clock for (clock,) in source.rows("SELECT clock FROM mailroom.inbox")]
    assert min(clocks) > last
    report = pair.report()
    assert set(sent) <= set(report.lost) or report.earlier == 4


def others(node: Node, readers: int) -> None:
    """Let other readers in first."""
    for nth in range(readers):
        with node.connection.transaction():
            Links().allow(node.connection, f"other-{nth}", actor="ada")


async def test_source_that_lost_nothing_matches_and_takes_no_new_incarnation(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    pair.source.connection.execute(ANEW)
    pair.stamp("b")
    assert pair.source.value("SELECT matched <> life FROM mailroom.link, mailroom.node")
    assert await pair.turns() == ["read"]
    assert pair.source.value("SELECT matched = life FROM mailroom.link, mailroom.node")
    assert pair.received() == ["a", "b"]
    assert pair.incarnation() == 1


@pytest.mark.slow
async def test_source_put_back_without_another_start_does_nothing_before_somebody_says_so(pair: Pair) -> None:
    """A snapshot of a running machine, or a dump restored into the same database; so it is with an old primary."""
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    dump = pair.backup(pair.source)
    [lost] = pair.stamp("lost")
    await pair.turns()
    pair.restore(pair.source, dump, anew=False)
    pair.stamp("new")
    assert await pair.turns() == ["not in doubt"]
    await pair.housekeep()
    assert await pair.turns() == ["not in doubt"]
    assert pair.incarnation() == 1

    assert transacted(pair.source, saying_restored(SCHEMA, actor="ada", why="snapshot")) == 2
    [(*acted, change)] = pair.source.rows("SELECT action, actor, key, reason, change FROM mailroom.audit")
    assert acted == ["node restored", "ada", "south", "snapshot"]
    assert change.startswith("incarnation 2: south had received rows up to 2")
    assert await pair.turns() == ["reconciled", "read"]
    assert pair.received() == ["a", "lost", "new"]
    assert pair.report().lost == (lost,)
    assert pair.source.rows("SELECT claim_seq, claim_clock FROM mailroom.link") == [(None, None)]


@pytest.mark.slow
async def test_source_put_back_twice_to_before_its_incarnation_is_refused_until_it_is_beyond_it(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    dump = pair.backup(pair.source)
    pair.stamp("b")
    await pair.turns()
    pair.restore(pair.source, dump)
    pair.stamp("c")
    await pair.turns()
    assert pair.incarnation() == 2
    pair.restore(pair.source, dump)
    pair.stamp("d")
    [told] = await pair.turns()
    assert told.endswith("at north: mailroom node restored --above 2")
    transacted(pair.source, saying_restored(SCHEMA, above=2, actor="ada"))
    assert await pair.turns() == ["reconciled", "read"]
    assert pair.received() == ["a", "b", "c", "d"]
    assert len(pair.report().lost) == 2


@pytest.mark.slow
async def test_source_restored_into_another_database_waits_until_it_is_said_to_have_moved(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    dump = pair.backup(pair.source)
    pair.stamp("lost")
    await pair.turns()
    pair.restore(pair.source, dump, anew=False)
    pair.source.connection.execute("UPDATE mailroom.node SET database_oid = database_oid - 1")
    pair.stamp("new")
    [told] = await pair.turns()
    assert "mailroom node moved" in told
    assert transacted(pair.source, saying_moved(SCHEMA, actor="ada"))
    assert await pair.turns() == ["claimed", "reconciled", "read"]
    assert pair.received() == ["a", "lost", "new"]


@pytest.mark.slow
async def test_what_both_have_is_found_in_small_portions(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciling, "ENDS", 2)
    monkeypatch.setattr(reconciling, "COMPARED_ROWS", 2)
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    for nth in range(5):
        pair.source.send("order.paid", key=f"waiting {nth}")
    dump = pair.backup(pair.source)
    pair.source.deliver_all()
    await pair.turns()
    for nth in range(5):
        pair.stamp(f"lost {nth}")
        await pair.turns()
    pair.restore(pair.source, dump)
    pair.stamp("new")
    assert await pair.turns() == ["claimed", "reconciled", "read"]
    assert pair.received() == ["a", *(f"waiting {n}" for n in range(5)), *(f"lost {n}" for n in range(5)), "new"]
    assert len(pair.report().lost) == 5


@pytest.mark.slow
async def test_same_message_at_the_same_seq_behind_a_difference_is_no_common_row(pair: Pair) -> None:
    """The rows in between are others, and would never be read."""
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    later = datetime.now(UTC) + timedelta(hours=1)
    pair.source.send("order.paid", key="twin", deliver_at=later)
    dump = pair.backup(pair.source)
    pair.stamp("lost")
    release(pair)
    await pair.turns()
    pair.restore(pair.source, dump)
    pair.stamp("new")
    release(pair)
    assert pair.seqs() == [(1, "a"), (2, "new"), (3, "twin")]
    await pair.turns()
    assert pair.received() == ["a", "lost", "twin", "new"]


# -- The target back in time ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_target_put_back_in_time_reads_again_what_the_source_still_has(pair: Pair) -> None:
    """T-50, while the source keeps it."""
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    dump = pair.backup(pair.target)
    pair.stamp("b")
    await pair.turns()
    pair.restore(pair.target, dump)
    pair.target.deliver_all()
    pair.stamp("c")
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "c"]
    assert pair.incarnation() == 1


@pytest.mark.slow
async def test_target_put_back_behind_what_the_source_keeps_stops_and_can_be_resumed(pair: Pair) -> None:
    """T-50, when the source keeps it no more: a gap is told and never skipped."""
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    dump = pair.backup(pair.target)
    pair.stamp("b", "c", "d")
    await pair.turns()
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq < 4")
    pair.restore(pair.target, dump)
    pair.target.deliver_all()
    pair.stamp("e")
    assert await pair.turns() == ["gap of 2"]
    tried = transacted(pair.target, resuming(SCHEMA, "north", 3, actor="ada", dry_run=True))
    done = transacted(pair.target, resuming(SCHEMA, "north", 3, actor="ada", why="they are gone"))
    assert tried == done
    assert (done.known, done.unknown, done.skipped) == (0, range(0), range(2, 4))
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "d", "e"]
    assert pair.report().skipped == ((2, 3),)
    assert pair.target.rows("SELECT action, key, change, reason FROM mailroom.audit") == [
        ("link resume", "north", "at 3, never read: rows 2 to 3", "they are gone")
    ]


@pytest.mark.slow
async def test_both_put_back_and_the_source_behind_the_target(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    source = pair.backup(pair.source)
    [lost] = pair.stamp("lost")
    await pair.turns()
    target = pair.backup(pair.target)
    pair.stamp("forgotten by both")
    await pair.turns()
    pair.restore(pair.source, source)
    pair.restore(pair.target, target)
    pair.target.deliver_all()
    pair.stamp("new")
    assert await pair.turns() == ["claimed", "reconciled", "read"]
    assert pair.received() == ["a", "lost", "new"]
    assert pair.report().lost == (lost,)


@pytest.mark.slow
async def test_both_put_back_and_the_target_behind_the_source(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    target = pair.backup(pair.target)
    pair.stamp("b")
    await pair.turns()
    source = pair.backup(pair.source)
    pair.stamp("forgotten by both")
    await pair.turns()
    pair.restore(pair.source, source)
    pair.restore(pair.target, target)
    pair.target.deliver_all()
    pair.stamp("new")
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "new"]
    assert pair.incarnation() == 1


# -- What cannot be known ---------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_without_a_common_row_nothing_is_read_before_somebody_says_where_to_go_on(pair: Pair) -> None:
    await pair.turns()
    dump = pair.backup(pair.source)
    pair.stamp("a", "b", "c")
    await pair.turns()
    pair.target.connection.execute("UPDATE mailroom.receipt SET received_at = received_at - interval '5 days'")
    [held] = run(pair.target.connection, Trim(SCHEMA).listing_origins())
    run(pair.target.connection, Trim(SCHEMA).trimming_receipts(held))
    pair.restore(pair.source, dump)
    pair.stamp("d", "e")
    *_, told = await pair.turns()
    assert told.endswith("mailroom link resume north --at ROW")
    assert "rows 1 to 3" in told
    assert "rows 1 to 2" in told
    assert pair.received() == ["a", "b", "c"]

    done = transacted(pair.target, resuming(SCHEMA, "north", 1, actor="ada"))
    assert (done.was, done.at, done.known, done.unknown) == (told, 1, 0, range(2, 4))
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "c", "e"]
    assert pair.target.value("SELECT incarnation FROM mailroom.origin") == 2


@pytest.mark.slow
async def test_resume_at_zero_takes_all_that_the_source_has_and_not_what_is_known(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    pair.stamp("b")
    assert transacted(pair.target, resuming(SCHEMA, "north", 0, actor="ada")).known == 1
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b"]
    assert pair.report().lost == ()  # it came again


@pytest.mark.slow
async def test_resume_at_the_end_of_a_receipt_and_within_one_vouches_for_the_source_s_row(pair: Pair) -> None:
    await pair.turns()
    for keys in (["a"], ["b", "c"], ["d"]):
        pair.stamp(*keys)
        await pair.turns()
    pair.source.connection.execute("UPDATE mailroom.transit SET message_id = gen_random_uuid()")
    for at, known in ((3, 1), (2, 1)):
        assert transacted(pair.target, resuming(SCHEMA, "north", at, actor="ada")).known == known
        assert pair.target.rows("SELECT last, last_id FROM mailroom.receipt ORDER BY last DESC LIMIT 1") == [
            (at, BY_HAND)
        ]
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "c", "d", "c", "d"]  # other messages now, by their ids
    assert pair.report().skipped == ()


def test_resume_of_what_is_unknown_or_excluded_says_so(pair: Pair) -> None:
    with pytest.raises(UnknownLink):
        transacted(pair.target, resuming(SCHEMA, "west", actor="ada"))
    pair.target.connection.execute("UPDATE mailroom.origin SET state = 'excluded'")
    with pytest.raises(Exception, match="mailroom link include north"):
        transacted(pair.target, resuming(SCHEMA, "north", actor="ada"))
    with pytest.raises(UnknownLink):
        run(pair.target.connection, reporting(SCHEMA, "west"))
    with pytest.raises(UnknownLink):
        transacted(pair.target, moving(SCHEMA, "west", actor="ada"))


async def test_reader_that_was_moved_is_let_in_once_the_source_says_so(pair: Pair) -> None:
    await pair.turns()
    pair.source.connection.execute("UPDATE mailroom.link SET reader_database_oid = 1")
    [told] = await pair.turns()
    assert "mailroom link moved south" in told
    moved = transacted(pair.source, moving(SCHEMA, "south", actor="ada", why="new server"))
    assert (moved.reader, moved.source) == (True, False)
    assert await pair.turns() == ["read"]
    assert pair.source.rows("SELECT actor, action, key FROM mailroom.audit") == [("ada", "link moved", "south")]


async def test_old_primary_is_refused_by_its_timeline_until_it_is_said_to_be_the_source(pair: Pair) -> None:
    """T-51."""
    await pair.turns()
    pair.target.connection.execute("UPDATE mailroom.origin SET timeline = timeline + 1")
    [told] = await pair.turns()
    assert "mailroom link moved north" in told
    moved = transacted(pair.target, moving(SCHEMA, "north", actor="ada"))
    assert (moved.reader, moved.source) == (False, True)
    assert await pair.turns() == ["read"]


@pytest.mark.slow
async def test_link_that_was_removed_and_allowed_again_brings_nothing_old(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a", "b")
    await pair.turns()
    pair.stamp("never read")
    transacted(pair.source, removing_reader(SCHEMA, "south", actor="ada", why=None, dry_run=False))
    assert "mailroom link allow south" in (await pair.turns())[0]
    transacted(pair.source, allowing(SCHEMA, "south", {}, actor="ada", why=None))
    pair.stamp("before the hello")
    assert await pair.turns() == ["read"]
    pair.stamp("c")
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "b", "c"]
    assert pair.seqs() == [(1, "c")]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
async def test_reconciling_does_what_the_pure_rule_says(pair: Pair, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of random histories, with the same messages at the same and at other seqs, and rows that were trimmed."""
    monkeypatch.setattr(reconciling, "ENDS", 2)
    monkeypatch.setattr(reconciling, "COMPARED_ROWS", 3)
    draw = random.Random(seed)
    await pair.turns()
    link = pair.source.value("SELECT number FROM mailroom.link")
    origin = pair.target.value("SELECT number FROM mailroom.origin")
    for _ in range(12):
        both = [(uuid4(), stamped(draw)) for _ in range(draw.randrange(6))]
        mine = both + [(uuid4(), stamped(draw)) for _ in range(draw.randrange(6))]
        again = [(id, stamped(draw)) for id, _ in mine[len(both) :]]
        kept, dropped = again[: draw.randrange(3)], again[3:]
        theirs = [*both, *kept, *((uuid4(), stamped(draw)) for _ in range(draw.randrange(4))), *dropped]
        trimmed = draw.randrange(len(both)) if both and draw.random() < 0.5 else 0
        ends = sorted({*draw.sample(range(1, len(mine) + 1), draw.randrange(len(mine) + 1)), len(mine)} - {0})
        write(pair, link, origin, dict(enumerate(theirs, 1)), trimmed, mine, ends)

        rows = {seq: Witness(*row) for seq, row in enumerate(theirs, 1) if seq > trimmed}
        receipts = [(end, Witness(*mine[end - 1])) for end in ends]
        anchored = anchor(receipts, rows, from_first=trimmed == 0)
        async with (
            await psycopg.AsyncConnection.connect(pair.target.dsn, autocommit=True) as target,
            await psycopg.AsyncConnection.connect(pair.source.dsn, autocommit=True) as source,
        ):
            found = await reconcile(target, SCHEMA, origin, source, SCHEMA, link, 2)
        assert found is not None
        if anchored is None:
            assert found.why is not None
            continue
        expected = reconciled(
            anchored,
            [(seq, row.id) for seq, row in rows.items()],
            [(seq, id) for seq, (id, _) in enumerate(mine, 1)],
            len(mine),
        )
        known = {id for (id,) in pair.target.rows("SELECT message_id FROM mailroom.known")}
        assert (found.last, known, found.why) == (expected.last, set(expected.known), None)
        newest = pair.target.rows("SELECT last, last_id, stamped_at FROM mailroom.receipt ORDER BY last DESC LIMIT 1")
        assert newest == ([(expected.last, *theirs[expected.last - 1])] if expected.last else [])


def stamped(draw: random.Random) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=draw.randrange(10**12))


def write(
    pair: Pair, link: int, origin: int, theirs: dict[int, Any], trimmed: int, mine: list[Any], ends: list[int]
) -> None:
    """Let the source have these rows but for the first, and the target these messages in receipts that end so."""
    for node, table in ((pair.source, "transit"), (pair.target, "receipt"), (pair.target, "known")):
        node.connection.execute(f"DELETE FROM mailroom.{table}".encode())
    pair.target.connection.execute("UPDATE mailroom.origin SET state = 'open', incarnation = 1")
    for seq, (id, at) in theirs.items():
        if seq > trimmed:
            pair.source.connection.execute(
                "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, "
                "message_type, value, sent_at) "
                "VALUES (%s, %s, %s, %s, %s, 'order.paid', 'k', 'M', 'U', '\\xf6', now())",
                [link, seq, seq, at, id],
            )
    first = 1
    for end in ends:
        pair.target.connection.execute(
            "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, ids) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s)",
            [origin, end, first, *mine[end - 1], end, [id for id, _ in mine[first - 1 : end]]],
        )
        first = end + 1


@pytest.mark.slow
async def test_copy_of_the_target_is_refused_and_the_target_goes_on(pair: Pair, databases: Databases) -> None:
    await pair.turns()
    pair.stamp("a")
    await pair.turns()
    url = databases.create(migrated=False)
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            copied = Pair(pair.source, Node(url, connection), Binaries(pair.programs, 0))
            psql = [str(pair.programs / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", url]
            dumped = pair.backup(pair.target)
            await asyncio.to_thread(subprocess.run, psql, input=dumped, check=True, capture_output=True)
            pair.stamp("b")
            [told] = await copied.turns()
            assert "mailroom link moved south" in told
            transacted(copied.target, taking_new_id(SCHEMA))
            assert copied.target.rows("SELECT FROM mailroom.origin") == []
            assert copied.received() == ["a"]
        assert await pair.turns() == ["read"]
        assert pair.received() == ["a", "b"]
    finally:
        databases.drop(url)


# -- Claims, one by one -----------------------------------------------------------------------------------------------


@pytest.fixture
async def greeted(pair: Pair) -> Pair:
    await pair.turns()
    return pair


def claim(pair: Pair, seq: int = 5, clock: int = 2**30, by: UUID | None = None) -> bool:
    number = pair.source.value("SELECT number FROM mailroom.link")
    return transacted(pair.source, claiming(SCHEMA, number, by or pair.run, seq, clock))


def test_claim_is_written_once_and_only_by_the_daemon_that_has_the_link(greeted: Pair) -> None:
    assert claim(greeted)
    assert not claim(greeted)
    with pytest.raises(LinkTaken):
        claim(greeted, by=uuid4())


def test_claim_of_a_link_that_is_not_in_doubt_is_not_answered(greeted: Pair) -> None:
    claim(greeted)
    assert transacted(greeted.source, renewing(SCHEMA)) is None
    assert greeted.incarnation() == 1


def test_new_incarnation_answers_all_claims_and_its_clock_is_beyond_them(greeted: Pair) -> None:
    claim(greeted)
    beyond = int(greeted.source.value("SELECT mailroom.clock_reach()"))
    greeted.source.connection.execute(
        "INSERT INTO mailroom.link (name, matched, claim_seq, claim_clock) SELECT 'west', life, 7, %s "
        "FROM mailroom.node",
        [beyond],
    )
    greeted.source.connection.execute("UPDATE mailroom.link SET matched = NULL WHERE name = 'south'")
    greeted.source.connection.execute("SET synchronous_commit = off")
    with greeted.source.connection.transaction():
        renewed = run(greeted.source.connection, renewing(SCHEMA))
        assert greeted.source.value("SELECT current_setting('synchronous_commit')") == "on"
    assert renewed is not None
    assert (renewed.incarnation, renewed.clock) == (2, beyond + 1)
    assert greeted.source.value("SELECT last_value FROM mailroom.clock") == beyond + 1
    assert greeted.source.value("SELECT clock_ceiling FROM mailroom.node") == beyond + 1
    assert greeted.source.rows("SELECT FROM mailroom.link WHERE claim_seq IS NOT NULL") == []
    assert transacted(greeted.source, renewing(SCHEMA)) is None


async def test_nothing_is_cut_if_something_was_received_meanwhile(pair: Pair) -> None:
    await pair.turns()
    pair.stamp("a", "b")
    await pair.turns()
    number = pair.target.value("SELECT number FROM mailroom.origin")
    seen = run(pair.target.connection, reading_newest(SCHEMA, number))
    assert seen is not None
    pair.stamp("c")
    await pair.turns()
    assert transacted(pair.target, rewinding(SCHEMA, number, seen, 2, None)) is None
    assert pair.target.rows("SELECT last FROM mailroom.receipt ORDER BY last") == [(2,), (3,)]
    assert pair.target.rows("SELECT FROM mailroom.known") == []
    held = transacted(pair.target, holding(SCHEMA, number))
    assert held is not None
    assert held.last == 3


# -- Real servers -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def served(private_server: Server, target: Node, binaries: Binaries) -> AsyncIterator[Pair]:
    """A pair whose source is on a server of the test's own, and has a message there."""
    with psycopg.connect(private_server.dsn()) as connection:
        migrate(connection)
        create_inbox(connection, "shipping", ["order.paid"])
    made = Pair(Node(private_server.dsn(), psycopg.connect(private_server.dsn(), autocommit=True)), target, binaries)
    made.link()
    await made.turns()
    made.stamp("a")
    await made.turns()
    yield made
    made.source.connection.close()


def move(pair: Pair, dsn: str) -> None:
    """Let the source be on that server."""
    pair.source.connection.close()
    pair.source = Node(dsn, psycopg.connect(dsn, autocommit=True))


def copy(directory: Path, to: Path) -> None:
    """Copy a directory with its owner."""
    subprocess.run(["cp", "-a", directory, to], check=True)


@pytest.mark.slow
async def test_directory_of_the_source_s_server_is_put_back(
    served: Pair, private_server: Server, server_home: Path
) -> None:
    """T-49. Its place is the same but for the start, as after any copy of a disk."""
    data = private_server.directory / "data"
    served.source.send("order.paid", key="waiting")
    private_server.stop()
    copy(data, server_home / "backup")
    private_server.start()
    move(served, private_server.dsn())
    assert "mailroom dispatcher run" in (await served.turns())[0]  # nobody knows yet what was lost
    [lost] = served.stamp("lost")
    assert await served.turns() == ["read"]
    assert served.received() == ["a", "waiting", "lost"]
    before = served.target.value("SELECT max(sent_clock) FROM mailroom.inbox")
    private_server.stop()
    shutil.rmtree(data)
    copy(server_home / "backup", data)
    private_server.start()
    move(served, private_server.dsn())
    served.stamp("new")
    # Also before it knows of the claim, it gives out no clock of the lost time again.
    assert served.source.value("SELECT max(clock) FROM mailroom.inbox") > before
    assert await served.turns() == ["claimed", "reconciled", "read"]
    assert served.received() == ["a", "waiting", "lost", "new"]
    assert served.report().lost == (lost,)


@pytest.mark.slow
async def test_standby_that_lagged_is_promoted_and_the_old_primary_comes_back(
    served: Pair, private_server: Server, server_home: Path, binaries: Binaries
) -> None:
    """T-46 without a standby that the source waits for, T-48, T-51."""
    with standby_of(private_server, server_home / "standby", binaries) as standby:
        served.stamp("b")
        await served.turns()
        standby.await_replay(served.source.connection)
        standby.stop()
        lost = served.stamp("lost", "lost too")
        await served.turns()
        private_server.stop()
        standby.start()
        standby.promote()
        move(served, standby.dsn)
        before = clock_received(served)
        served.stamp("new")
        assert await served.turns() == ["claimed", "reconciled", "read"]
        assert served.received() == ["a", "b", "lost", "lost too", "new"]
        assert clock_received(served) > before
        assert set(served.report().lost) == set(lost)
        private_server.start()
        move(served, private_server.dsn())
        served.stamp("of the old primary")
        [told] = await served.turns()
        assert "old primary" in told
        assert served.received()[-1] == "new"
        served.source.connection.close()


@dataclass
class Followed:
    """A pair whose source waits for its standby, which has had all messages, and is away now.

    Sessions at the source do not wait for it by themselves, and so the reader's does not.
    """

    pair: Pair
    primary: Server
    standby: Standby

    def send(self, key: str) -> UUID:
        """Send a message; its transaction does not wait for the standby."""
        with self.pair.source.connection.transaction():
            self.pair.source.connection.execute("SET LOCAL synchronous_commit = local")
            return Outbox().send(self.pair.source.connection, "order.paid", None, key=key)

    @contextmanager
    def stamping(self) -> Iterator[Future[Delivery]]:
        """Stamp what there is, in a session that waits for the standby while the block begins."""
        dsn = self.pair.source.dsn

        def stamp() -> Delivery:
            with psycopg.connect(dsn, autocommit=True, application_name="stamping") as connection:
                return Node(dsn, connection).deliver()

        with ThreadPoolExecutor(1) as thread:
            delivery = thread.submit(stamp)
            waits = "SELECT pid FROM pg_stat_activity WHERE application_name = 'stamping' AND wait_event = 'SyncRep'"
            eventually(lambda: self.pair.source.rows(waits))
            yield delivery

    async def fail_over(self) -> list[str]:
        """Give up the primary, stamp a message at the standby, and do turns."""
        self.pair.source.connection.close()
        self.primary.stop()
        self.standby.start()
        self.standby.promote()
        move(self.pair, self.standby.dsn)
        self.pair.stamp("new")
        return await self.pair.turns()


@pytest.fixture
async def followed(
    served: Pair, private_server: Server, server_home: Path, binaries: Binaries
) -> AsyncIterator[Followed]:
    with standby_of(private_server, server_home / "standby", binaries) as standby:
        connection = served.source.connection
        served.source.allow_clocks(2**50)
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: served.source.rows("SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"))
        connection.execute("ALTER DATABASE mailroom SET synchronous_commit = local")
        served.source.send("order.paid", key="waiting")
        standby.stop()
        yield Followed(served, private_server, standby)
        served.source.connection.close()


@pytest.mark.slow
async def test_nobody_reads_what_the_standby_that_the_source_waits_for_has_not(followed: Followed) -> None:
    """T-46 with it: nothing that was read is lost."""
    pair = followed.pair
    with followed.stamping() as delivery:
        assert await pair.turns() == ["read"]
        assert pair.received() == ["a"]
        assert await followed.fail_over() == ["read"]
        with pytest.raises(psycopg.OperationalError):
            delivery.result()
    assert pair.received() == ["a", "waiting", "new"]
    assert (pair.incarnation(), pair.report().lost) == (1, ())


@pytest.mark.slow
async def test_wait_for_the_standby_is_cancelled_and_what_was_read_then_is_reported(followed: Followed) -> None:
    """T-47. The cancelled commit counts at the old primary only; one of its messages is stamped again at the new."""
    pair = followed.pair
    lost = followed.send("lost")
    with followed.stamping() as delivery:
        pair.source.rows("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'stamping'")
        assert delivery.result().taken == 2
    assert await pair.turns() == ["read"]
    assert pair.received() == ["a", "waiting", "lost"]
    before = clock_received(pair)
    assert await followed.fail_over() == ["claimed", "reconciled", "read"]
    assert pair.received() == ["a", "waiting", "lost", "new"]
    assert clock_received(pair) > before
    assert pair.report().lost == (lost,)


def clock_received(pair: Pair) -> int:
    """Return the highest clock of the source that came with a message."""
    return int(pair.target.value("SELECT max(sent_clock) FROM mailroom.inbox"))


@pytest.mark.slow
async def test_standby_that_had_everything_is_promoted(
    served: Pair, private_server: Server, server_home: Path, binaries: Binaries
) -> None:
    with standby_of(private_server, server_home / "standby", binaries) as standby:
        served.stamp("b")
        standby.await_replay(served.source.connection)
        private_server.stop()
        standby.promote()
        move(served, standby.dsn)
        served.stamp("c")
        assert await served.turns() == ["read"]
        assert served.received() == ["a", "b", "c"]
        assert (served.incarnation(), served.report().lost) == (1, ())
        served.source.connection.close()


@pytest.mark.slow
async def test_dump_of_the_source_becomes_another_server_while_messages_come(served: Pair, empty_dsn: str) -> None:
    """T-53, T-48. The dump was made before the last ones."""
    served.source.send("order.paid", key="waiting")
    dump = served.backup(served.source)
    [lost] = served.stamp("lost")
    assert await served.turns() == ["read"]
    before = clock_received(served)
    move(served, empty_dsn)
    served.source.connection.execute("CREATE SCHEMA mailroom")  # of what is put back nothing is here
    served.restore(served.source, dump, anew=False)
    served.stamp("new")
    [told] = await served.turns()
    assert "mailroom node moved" in told
    assert served.received() == ["a", "waiting", "lost"]
    assert transacted(served.source, saying_moved(SCHEMA, actor="ada"))
    assert await served.turns() == ["claimed", "reconciled", "read"]
    assert served.received() == ["a", "waiting", "lost", "new"]
    assert clock_received(served) > before
    assert served.report().lost == (lost,)
    served.source.connection.close()


@pytest.mark.slow
async def test_source_is_recovered_to_a_point_in_time(
    served: Pair, private_server: Server, server_home: Path, binaries: Binaries
) -> None:
    """T-48."""
    recovered = Standby(private_server, server_home / "recovered", binaries)
    served.stamp("b")
    served.source.send("order.paid", key="waiting")
    served.source.connection.execute("SELECT pg_create_restore_point('here')")
    [lost] = served.stamp("lost")
    assert await served.turns() == ["read"]
    before = clock_received(served)
    private_server.stop()
    recovered.recover_to("here", private_server.directory / "data" / "pg_wal")
    try:
        move(served, recovered.dsn)
        eventually(lambda: not served.source.value("SELECT pg_is_in_recovery()"))
        served.stamp("new")
        assert await served.turns() == ["claimed", "reconciled", "read"]
        assert served.received() == ["a", "b", "waiting", "lost", "new"]
        assert clock_received(served) > before
        assert served.report().lost == (lost,)
        served.source.connection.close()
    finally:
        recovered.stop()
