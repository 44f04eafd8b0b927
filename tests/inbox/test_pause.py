"""Pause: claims give nothing and lose nothing, whatever happens meanwhile; only a resume ends it."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping import healthy_floor
from dispatcher.housekeeping.expiry import expiring
from dispatcher.housekeeping.janitor import raising_floor, sweeping_key_state
from inbox import AsyncInbox, Inbox, Message, Park, Parked, PausedKey, Retry, Skip, Worker
from inbox.asking.replies import taking
from inbox.by_key.claim import Share
from inbox.by_key.due import healing, reaping_due
from inbox.by_key.failure import failed, recording, suspecting
from inbox.by_key.parked_keys import moving_parked
from inbox.claims import Claims
from inbox.handling.batch import Batch
from inbox.order import reading_order
from inbox.worker.in_flight import Entry
from mailroom import rename_inbox, testing
from mailroom.errors import ConfigurationError, InvalidMessage, MailroomError, NotInTransaction, UnknownInbox
from mailroom.node.status import InboxStatus, status
from mailroom.node.trace import trace
from mailroom.sql.runner import run
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing
from tests.support.waiting import eventually, wait_until_blocked
from tests.support.working import LEDGER, NEVER_S, is_asleep, ledger_keys, working, write_ledger

pytestmark = [pytest.mark.sample(1), pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]

Session = psycopg.Connection[Any]
INBOX = Inbox("shipping")
PARKED = Parked("shipping")


@pytest.fixture
def session(connect: Connect) -> Iterator[Session]:
    with connect() as connection:
        yield connection


def deliver(node: Node, *keys: str) -> None:
    for nth, key in enumerate(keys):
        node.send("shipping", nth, key=key)
    node.deliver()


def pause(node: Node, key: str | None = None) -> bool:
    with node.connection.transaction():
        return INBOX.pause(node.connection, key, actor="ada", why="the carrier is down")


def resume(node: Node, key: str | None = None) -> bool:
    with node.connection.transaction():
        return INBOX.resume(node.connection, key, actor="bob")


def fail(node: Node, key: str, error: Exception | None = None) -> None:
    """Record a failure of the key's first message; by default the key is due again at once."""
    with node.connection.transaction():
        [message] = INBOX.peek(node.connection, key, 1)
        run(node.connection, failing("shipping", message, error or Retry(0)))


def taken(node: Node, inbox: Inbox = INBOX) -> list[object]:
    """Reap all that can be had, as programs do."""
    values: list[object] = []
    with node.connection.transaction():
        while messages := inbox.reap_any(node.connection):
            values += [message.value for message in messages]
    return values


def state(node: Node, key: str) -> tuple[Any, ...]:
    """Return of a key's row: whether it is paused and parked, its attempts, and whether it is failing too."""
    [row] = node.rows(
        "SELECT paused_at IS NOT NULL, parked_at IS NOT NULL, attempts, resume_at IS NOT NULL FROM mailroom.key_state "
        "WHERE key = %s",
        key,
    )
    return tuple(row)


def shown(node: Node) -> InboxStatus:
    [found] = status(node.connection).inboxes
    return found


# -- An inbox ---------------------------------------------------------------------------------------------------------


def claims(connection: Session, inbox: str) -> dict[str, list[Any]]:
    """Take messages in every way, each for itself: what it gives is put back."""
    claiming = Claims(SCHEMA, inbox)
    bounds = Share(10, 10, 100)
    ways: dict[str, Callable[[], Any]] = {
        "reap_any": lambda: Inbox(inbox).reap_any(connection),
        "as a worker": lambda: run(connection, claiming.claiming(Share(10, 10, 100, due_too=False))).messages,
        "by another plan": lambda: run(connection, claiming.claiming(bounds)).messages,
        "due": lambda: run(connection, claiming.claiming_due()).messages,
        "due in": lambda: [run(connection, claiming.claiming(bounds)).due_in_s],
        "due in, of what is due": lambda: [run(connection, claiming.claiming_due()).due_in_s],
        "testing": lambda: testing.work(connection, inbox, lambda message, _: None).handled,
    }
    found = {}
    for name, way in ways.items():
        found[name] = way()
        connection.rollback()
    return found


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("order", ["key", "total"])
def test_nobody_gets_anything_of_a_paused_inbox(node: Node, session: Session, order: Any) -> None:
    node.inbox("ledger", order=order)
    for nth, key in enumerate("aabb"):
        node.send("ledger", nth, key=key)
    node.deliver_all()
    [first] = Inbox("ledger").peek(node.connection, limit=1)
    run(node.connection, run(node.connection, reading_order(SCHEMA, "ledger")).recording(failed(first, Retry(0))))
    of = Inbox("ledger")
    assert all(messages for name, messages in claims(session, "ledger").items() if name in ("due", "testing"))

    with node.connection.transaction():
        assert of.pause(node.connection, actor="ada")
    nothing = claims(session, "ledger")
    assert nothing.pop("due in") == nothing.pop("due in, of what is due") == [None]
    assert not any(nothing.values())
    if order == "key":
        assert of.reap(session, "b") == of.reap(session, "a") == []
        session.rollback()
    node.send("ledger", 4, key="a")
    node.deliver_all()
    assert (of.backlog(node.connection), taken(node, of)) == (5, [])

    with node.connection.transaction():
        assert of.resume(node.connection, actor="ada")
    session.rollback()
    assert sorted(message.value for message in testing.work(session, "ledger", lambda message, _: None).handled) == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip


def test_replies_of_a_paused_inbox_wait_too(node: Node) -> None:
    node.send("shipping", 1, kind="R", key="request")
    node.deliver_all()
    pause(node)
    with node.connection.transaction():
        assert run(node.connection, taking(SCHEMA, "shipping", ["request"])) == []
    resume(node)
    with node.connection.transaction():
        assert [each.value for each in run(node.connection, taking(SCHEMA, "shipping", ["request"]))] == [1]


def test_second_pause_and_second_resume_change_nothing(node: Node) -> None:
    assert (shown(node).paused_at, shown(node).paused_by) == (None, None)
    assert pause(node)
    before = shown(node)
    assert before.paused_by == "ada: the carrier is down"
    with node.connection.transaction():
        assert not INBOX.pause(node.connection, actor="eve")
    assert shown(node) == before
    assert (resume(node), resume(node)) == (True, False)
    assert (shown(node).paused_at, shown(node).paused_by) == (None, None)
    assert node.rows("SELECT actor, action, inbox, key, reason FROM mailroom.audit ORDER BY id") == [
        ("ada", "inbox pause", "shipping", None, "the carrier is down"),
        ("bob", "inbox resume", "shipping", None, None),
    ]


@pytest.mark.parametrize("kind", SYNC)
def test_each_driver(node: Node, dsn: str, kind: str) -> None:
    deliver(node, "k")
    with opened(dsn, kind) as connection:
        for key in (None, "k"):
            assert INBOX.pause(connection, key, actor="ada")
            with pytest.raises(ConfigurationError, match="Commit"):
                INBOX.wait_for_batches(connection)
            connection.commit()
            INBOX.wait_for_batches(connection)
            assert INBOX.reap_any(connection) == []
        assert [each.key for each in INBOX.paused_keys(connection)] == ["k"]
        assert INBOX.resume(connection, actor="ada")
        assert INBOX.reap_any(connection) == []
        assert INBOX.resume(connection, "k", actor="ada")
        assert len(INBOX.reap_any(connection)) == 1


@pytest.mark.parametrize("kind", ASYNC)
async def test_each_async_driver(node: Node, dsn: str, kind: str) -> None:
    deliver(node, "k")
    of = AsyncInbox("shipping")
    async with opened_async(dsn, kind) as connection:
        assert await of.pause(connection, "k", actor="ada")
        await connection.commit()
        await of.wait_for_batches(connection)
        assert (await of.reap_any(connection), len(await of.paused_keys(connection))) == ([], 1)
        assert await of.resume(connection, "k", actor="ada")
        assert len(await of.reap_any(connection)) == 1


def test_wrong_arguments(node: Node, connect: Connect) -> None:
    for change in (INBOX.pause, INBOX.resume):
        with pytest.raises(InvalidMessage):
            change(node.connection, actor=" ")
        with pytest.raises(InvalidMessage):
            change(node.connection, "", actor="ada")
        with pytest.raises(NotInTransaction):
            change(node.connection, actor="ada")
    for change in (Inbox("nobody").pause, Inbox("nobody").resume):
        with pytest.raises(UnknownInbox), node.connection.transaction():
            change(node.connection, actor="ada")
    with pytest.raises(ConfigurationError):
        INBOX.wait_for_batches(node.connection, -1)


def test_pause_goes_along_when_the_inbox_is_renamed(node: Node) -> None:
    deliver(node, "k", "l")
    pause(node)
    pause(node, "k")
    with node.connection.transaction():
        rename_inbox(node.connection, "shipping", "dispatch", actor="ada")
    renamed = Inbox("dispatch")
    assert taken(node, renamed) == []
    with node.connection.transaction():
        renamed.resume(node.connection, actor="ada")
    assert taken(node, renamed) == [1]
    with node.connection.transaction():
        renamed.drop(node.connection, actor="ada", discard=True)
    assert node.value("SELECT count(*) FROM mailroom.key_state") == 0


# -- What is in hand --------------------------------------------------------------------------------------------------


def test_wait_ends_with_the_transactions_that_had_messages_in_hand(node: Node, connect: Connect) -> None:
    deliver(node, "k", "l", "m")
    early, looking, late = connect(), connect(), connect()
    assert len(INBOX.reap(early, "k")) == 1
    assert len(INBOX.peek(looking)) == 3
    pause(node)
    with pytest.raises(MailroomError, match=f"in hand: pid {early.info.backend_pid}") as raised:
        INBOX.wait_for_batches(node.connection, 0)
    assert raised.value.code == "MR-batches-unfinished"
    assert INBOX.reap_any(late) == []  # has the lock too, but not before the wait
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(INBOX.wait_for_batches, node.connection)
        early.commit()
        late.commit()
        waiting.result()
    assert INBOX.backlog(node.connection) == 2


def test_claim_that_began_before_the_pause_is_waited_for(node: Node, connect: Connect) -> None:
    """Its snapshot does not see the pause, so it gets a message; but it has its lock on the inbox."""
    deliver(node, "k")
    holder, claimer = connect(), connect()
    assert len(INBOX.reap(holder, "k")) == 1
    with ThreadPoolExecutor(1) as thread:
        reaping = thread.submit(INBOX.reap, claimer, "k")
        wait_until_blocked(node.connection, claimer.info.backend_pid)
        pause(node)
        with pytest.raises(MailroomError, match=str(claimer.info.backend_pid)):
            INBOX.wait_for_batches(node.connection, 0)
        holder.rollback()
        assert len(reaping.result()) == 1
    with pytest.raises(MailroomError, match=str(claimer.info.backend_pid)):
        INBOX.wait_for_batches(node.connection, 0)
    claimer.rollback()
    INBOX.wait_for_batches(node.connection, 0)
    assert taken(node) == []


# -- Workers ----------------------------------------------------------------------------------------------------------


class Counting(Worker):
    """A worker that counts its claims."""

    claims = 0

    async def _work(self, batch: Batch, entry: Entry) -> None:
        self.claims += 1
        await super()._work(batch, entry)


def test_workers_idle_and_go_on_at_once_without_a_poll(node: Node) -> None:
    """Also if a failing key is due: nothing wakes them again and again."""
    node.connection.execute(LEDGER)
    deliver(node, "f")
    fail(node, "f")
    pause(node)
    workers = [Counting(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S) for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        eventually(lambda: is_asleep(node))
        deliver(node, "a", "b", "a")
        eventually(lambda: len(node.sessions("mailroom worker listener", "state = 'idle'")) == 2)
        INBOX.wait_for_batches(node.connection)
        assert ledger_keys(node) == []
        assert sum(each.claims for each in workers) < 40
        resume(node)
        eventually(lambda: len(ledger_keys(node)) == 4)
    assert [key for key in ledger_keys(node) if key == "a"] == ["a", "a"]


def test_batch_in_hand_is_finished_and_nothing_follows(node: Node) -> None:
    """Two workers have one message each; the pause comes while their handlers run."""
    node.connection.execute("CREATE TABLE began (key text)")
    deliver(node, "a", "b", "a", "b")
    gate = psycopg.connect(node.dsn)
    gate.execute("SELECT pg_advisory_lock(7)")

    def handler(message: Message, connection: Session) -> None:
        connection.execute("SELECT pg_advisory_xact_lock_shared(7)")
        connection.execute("INSERT INTO began VALUES (%s)", [message.key])

    workers = [Worker(node.dsn, "shipping", handler, batch=1, poll_interval_s=NEVER_S) for _ in range(2)]
    with gate, working(workers[0]), working(workers[1]):
        eventually(
            lambda: node.value(
                "SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )
        assert pause(node)
        with pytest.raises(MailroomError, match="in hand"):
            INBOX.wait_for_batches(node.connection, 0)
        gate.execute("SELECT pg_advisory_unlock(7)")
        INBOX.wait_for_batches(node.connection)
        assert sorted(node.rows("SELECT key FROM began")) == [("a",), ("b",)]
        resume(node)
        eventually(lambda: node.value("SELECT count(*) = 4 FROM began"))


# -- A key ------------------------------------------------------------------------------------------------------------


def test_other_keys_go_on(node: Node, session: Session) -> None:
    deliver(node, "k", "l", "k")
    assert (pause(node, "k"), pause(node, "k")) == (True, False)
    assert taken(node) == [1]
    deliver(node, "l", "k")
    assert INBOX.reap(session, "k") == []
    assert [message.value for message in INBOX.reap(session, "l")] == [0]
    session.commit()
    [of] = INBOX.paused_keys(node.connection)
    assert of == PausedKey("k", 3, of.paused_at, "ada: the carrier is down", is_parked=False)
    assert (shown(node).paused_keys, shown(node).parked_keys, shown(node).waiting_keys) == (1, 0, 0)
    assert (resume(node, "k"), resume(node, "k")) == (True, False)
    assert taken(node) == [0, 2, 1]
    assert node.rows("SELECT action, key FROM mailroom.audit ORDER BY id") == [
        ("inbox pause", "k"),
        ("inbox resume", "k"),
    ]


def test_key_is_paused_before_it_has_messages(node: Node) -> None:
    pause(node, "k")
    run(node.connection, sweeping_key_state(SCHEMA, "shipping"))
    deliver(node, "k", "l")
    assert taken(node) == [1]
    resume(node, "k")
    assert taken(node) == [0]
    assert node.value("SELECT count(*) FROM mailroom.key_state") == 0


def test_both_pauses_are_apart(node: Node) -> None:
    deliver(node, "k", "l")
    pause(node)
    pause(node, "k")
    resume(node)
    assert taken(node) == [1]
    pause(node)
    resume(node, "k")
    assert taken(node) == []
    resume(node)
    assert taken(node) == [0]


def test_key_of_a_total_inbox_is_refused(node: Node) -> None:
    node.inbox("ledger", order="total")
    for change in (Inbox("ledger").pause, Inbox("ledger").resume):
        with pytest.raises(ConfigurationError, match="which pauses the inbox") as raised, node.connection.transaction():
            change(node.connection, "k", actor="ada")
        assert raised.value.code == "MR-total-order-has-no-keys"


def test_pause_outlasts_the_handling_of_what_was_in_hand(node: Node, session: Session) -> None:
    deliver(node, "k", "k")
    fail(node, "k")
    [message] = run(session, reaping_due(SCHEMA, "shipping")).messages
    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(pause, node, "k")
        assert pausing.result()
    run(session, healing(SCHEMA, "shipping", message))
    session.commit()
    assert (state(node, "k")[0], taken(node)) == (True, [])
    resume(node, "k")
    assert taken(node) == [1]


def test_pause_outlasts_a_claim_that_does_not_see_it(node: Node, connect: Connect) -> None:
    """The claim takes the message that failed, which makes the key healthy if it is not paused."""
    deliver(node, "k", "k")
    fail(node, "k")
    holder, claimer = connect(), connect()
    holder.execute("SELECT FROM mailroom.inbox_shipping FOR UPDATE")
    with ThreadPoolExecutor(1) as thread:
        reaping = thread.submit(INBOX.reap, claimer, "k", 1)
        wait_until_blocked(node.connection, claimer.info.backend_pid)
        assert pause(node, "k")
        holder.rollback()
        assert len(reaping.result()) == 1
    claimer.commit()
    assert (state(node, "k")[0], taken(node)) == (True, [])


def test_pause_waits_for_the_claim_of_a_failing_key(node: Node, session: Session) -> None:
    deliver(node, "k", "k")
    fail(node, "k")
    assert len(INBOX.reap(session, "k", 1)) == 1  # deletes the key's row
    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(pause, node, "k")
        wait_until_blocked(session, node.connection.info.backend_pid)
        session.commit()
        assert pausing.result()
    assert (state(node, "k"), taken(node)) == ((True, False, 0, False), [])


@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [True, False])
def test_failing_key_keeps_its_attempts_and_its_time(node: Node, before: bool) -> None:
    deliver(node, "k")
    if not before:
        pause(node, "k")  # and then a handler fails that had the message in hand
    fail(node, "k", Retry(1_000))
    if before:
        pause(node, "k")
    assert state(node, "k") == (True, False, 1, True)
    assert node.value("SELECT retry_at = 'infinity' FROM mailroom.key_state")
    resume(node, "k")
    left = node.value("SELECT extract(epoch FROM retry_at - now())::float8 FROM mailroom.key_state")
    assert 900 < left <= 1_000
    assert state(node, "k") == (False, False, 1, False)


def test_message_that_used_up_its_attempts_ends_after_the_resume(node: Node) -> None:
    deliver(node, "k", "k")
    pause(node, "k")
    with node.connection.transaction():
        [message] = INBOX.peek(node.connection, "k", 1)
        run(node.connection, recording(SCHEMA, "shipping", failed(message, Skip("no such street"))))
        assert run(node.connection, reaping_due(SCHEMA, "shipping")).ended is None
    resume(node, "k")
    with node.connection.transaction():
        assert run(node.connection, reaping_due(SCHEMA, "shipping")).ended is not None
    assert taken(node) == [1]


def test_suspects_are_tried_alone_after_the_resume(node: Node) -> None:
    deliver(node, "k", "k")
    pause(node, "k")
    last = INBOX.peek(node.connection, "k")[-1].clock
    run(node.connection, suspecting(SCHEMA, "shipping", ["k"], [last], "its worker died"))
    assert taken(node) == []
    resume(node, "k")
    with node.connection.transaction():
        assert len(run(node.connection, reaping_due(SCHEMA, "shipping", 10)).messages) == 1


def test_parked_key_is_paused_too(node: Node) -> None:
    """To act on what is parked ends no pause, and a resume does not replay."""
    deliver(node, "k", "k", "l")
    fail(node, "k", Park("no such street"))
    pause(node, "k")
    assert state(node, "k")[:2] == (True, True)
    assert run(node.connection, moving_parked(SCHEMA, "shipping", "")).messages == 1
    assert [each.is_parked for each in INBOX.paused_keys(node.connection)] == [True]
    resume(node, "k")
    assert (state(node, "k")[:2], taken(node)) == ((False, True), [2])
    pause(node, "k")
    with node.connection.transaction():
        assert PARKED.replay(node.connection, "k", actor="ada").messages == 2
    assert (state(node, "k"), taken(node)) == ((True, False, 0, False), [])
    resume(node, "k")
    assert taken(node) == [0, 1]


def test_pause_outlasts_a_discard(node: Node) -> None:
    deliver(node, "k")
    fail(node, "k", Park("no such street"))
    pause(node, "k")
    with node.connection.transaction():
        changed = PARKED.discard(node.connection, "k", actor="ada")
    assert (changed.messages, changed.freed) == (1, 1)
    deliver(node, "k")
    assert (state(node, "k"), taken(node)) == ((True, False, 0, False), [])


def test_paused_is_not_parked(node: Node) -> None:
    deliver(node, "k", "k")
    [message, _] = INBOX.peek(node.connection, "k")
    pause(node, "k")
    assert (PARKED.keys(node.connection), PARKED.messages(node.connection, "k")) == ([], [])
    assert run(node.connection, moving_parked(SCHEMA, "shipping", "")).messages == 0
    with node.connection.transaction():
        assert PARKED.replay(node.connection, None, actor="ada").keys == 0
    assert [place.where for place in trace(node.connection, message.id)] == ["inbox"]
    assert taken(node) == []


def test_messages_of_a_paused_key_outstay_as_if_its_consumers_were_down(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.inbox_registry SET expire_s = 1")
    deliver(node, "k", "l")
    pause(node, "k")
    pause(node)
    node.connection.execute("UPDATE mailroom.inbox SET delivered_at = now() - interval '1 h'")
    assert run(node.connection, expiring(SCHEMA, "shipping", 10)) == 2


def test_healthy_floor_passes_a_paused_key_and_nothing_is_overtaken(node: Node) -> None:
    deliver(node, *"kkkl")
    pause(node, "k")
    with node.connection.transaction():
        run(node.connection, healthy_floor.raising(SCHEMA, "shipping"))
    floor = node.value("SELECT healthy_floor FROM mailroom.inbox_registry")
    assert [message.key for message in INBOX.peek(node.connection) if message.clock > floor] == ["l"]
    resume(node, "k")
    for nth in (3, 4):
        node.send("shipping", nth, key="k")
    node.deliver()
    values: list[object] = []
    while True:
        with node.connection.transaction():
            messages = INBOX.reap_any(node.connection, per_key=2)
        if not messages:
            break
        values += [message.value for message in messages if message.key == "k"]
    assert values == [0, 1, 2, 3, 4]
    assert node.value("SELECT count(*) FROM mailroom.key_state") == 0


def test_resume_waits_for_a_floor_that_passes_the_key(node: Node, connect: Connect) -> None:
    """And then sees that the key has to stay a failing one up to there."""
    deliver(node, *"kkl")
    pause(node, "k")
    janitor = connect()
    run(janitor, healthy_floor.raising(SCHEMA, "shipping"))
    with ThreadPoolExecutor(1) as thread:
        resuming = thread.submit(resume, node, "k")
        wait_until_blocked(janitor, node.connection.info.backend_pid)
        janitor.commit()
        assert resuming.result()
    assert sorted(map(str, taken(node))) == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_schedule(node: Node, session: Session, seed: int) -> None:
    """Against a model: keys are lists, and what is paused gives nothing. Failures, floors and sweeps come between."""
    chance = random.Random(seed)
    waiting: dict[str, list[int]] = {key: [] for key in "abcd"}
    paused: set[str | None] = set()
    sent = 0

    def take(key: str | None) -> None:
        messages = INBOX.reap_any(session, 3, 2) if key is None else INBOX.reap(session, key, 2)
        allowed = {key for key in waiting if key not in paused and None not in paused}
        got: dict[str, list[object]] = {}
        for message in messages:
            got.setdefault(message.key, []).append(message.value)
        assert set(got) <= allowed
        for each, values in got.items():
            assert values == waiting[each][: len(values)]
        if chance.random() < 0.7:
            session.commit()
            for each, values in got.items():
                del waiting[each][: len(values)]
        else:
            session.rollback()

    for _ in range(120):
        key = chance.choice("abcd")
        match chance.randrange(9):
            case 0 | 1:
                node.send("shipping", sent, key=key)
                node.deliver()
                waiting[key].append(sent)
                sent += 1
            case 2 | 3:
                take(None)
            case 4:
                take(key)
            case 5:
                of = chance.choice([key, key, None])
                assert pause(node, of) == (of not in paused)
                paused.add(of)
            case 6:
                of = chance.choice([key, *sorted(paused, key=str)])
                assert resume(node, of) == (of in paused)
                paused.discard(of)
            case 7 if waiting[key]:
                fail(node, key)
            case _:
                with node.connection.transaction():
                    run(node.connection, healthy_floor.raising(SCHEMA, "shipping"))
                with node.connection.transaction():
                    run(node.connection, raising_floor(SCHEMA, "shipping"))
                run(node.connection, sweeping_key_state(SCHEMA, "shipping"))
                run(node.connection, moving_parked(SCHEMA, "shipping", ""))
    for of in paused:
        resume(node, of)
    paused.clear()
    for _ in range(sent):
        take(None)
    while any(waiting.values()):
        take(None)


# -- From a shell -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands(node: Node, dsn: str) -> None:
    deliver(node, "k")
    assert done("inbox", "pause", "shipping", "--wait", "--why", "the carrier is down", dsn=dsn) == (
        "Inbox shipping is paused.\n"
    )
    assert "was paused before" in done("inbox", "pause", "shipping", dsn=dsn)
    assert json_of("inbox", "pause", "shipping", "--key", "k", dsn=dsn) == {
        "inbox": "shipping", "schema": "mailroom", "key": "k", "changed": True,
    }  # fmt: skip
    text = done("status", dsn=dsn)
    assert "paused by" in text
    assert "the carrier is down" in text
    [listed] = json_of("inbox", "list", dsn=dsn)
    assert listed["paused_by"].endswith(": the carrier is down")
    assert "paused" in done("inbox", "list", dsn=dsn)
    [of] = json_of("inbox", "paused", "shipping", dsn=dsn)
    assert (of["key"], of["messages"], of["is_parked"]) == ("k", 1, False)
    assert "parked too" in done("inbox", "paused", "shipping", dsn=dsn)
    assert done("inbox", "resume", "shipping", "--key", "k", dsn=dsn) == "Key k of inbox shipping goes on.\n"
    assert done("inbox", "resume", "shipping", dsn=dsn) == "Inbox shipping goes on.\n"
    assert done("inbox", "resume", "shipping", dsn=dsn) == "Inbox shipping is not paused.\n"
    assert done("inbox", "paused", "shipping", dsn=dsn) == "Inbox shipping has no paused keys.\n"
    assert taken(node) == [0]


def test_command_that_waits_in_vain_says_for_whom(node: Node, dsn: str, session: Session) -> None:
    deliver(node, "k")
    assert INBOX.reap_any(session)
    why = error_of(mailroom("inbox", "pause", "shipping", "--wait", "--timeout-s", "0", dsn=dsn))
    assert f"pid {session.info.backend_pid}" in why
    assert shown(node).paused_at is not None
