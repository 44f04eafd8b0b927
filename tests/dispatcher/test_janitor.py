"""The janitor: what it moves and sweeps, how often, and that it waits for no transaction of users."""

from collections.abc import AsyncIterator
from functools import partial
from inspect import getgeneratorlocals
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping import janitor
from dispatcher.housekeeping.expiry import expiring
from dispatcher.housekeeping.janitor import SWEEP_INTERVAL_S, Janitor, sweeping_key_state
from dispatcher.housekeeping.set_back import bringing_back_attempted, bringing_back_suspected
from dispatcher.lanes.leading import KEEPER
from inbox import Inbox, Park, Parked, Retry
from inbox.by_key.failure import suspecting
from inbox.by_key.parked_keys import moving_parked
from mailroom import events
from mailroom.metrics.catalog import INBOX_EXPIRED, reading_catalog
from mailroom.node.status import status
from mailroom.session import settings
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run, run_async
from outbox import Outbox, Outgoing
from tests.sql.test_plans import generic_plan
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing

INBOX = Inbox("shipping")
STATE = "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at) VALUES ('shipping', %s, %s, 0, %s)"


pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]


@pytest.fixture
async def keeper(node: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    """The keeper's session, which gives up where it would wait for a lock."""
    connection = await settings.connect_async(node.dsn, "keeper", KEEPER | {"lock_timeout": "100ms"})
    async with connection:
        yield connection


class Clocked:
    """A janitor whose clock the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.janitor = Janitor(SCHEMA, lambda: self.now_s)


def deliver(node: Node, *keys: str) -> None:
    for key in keys:
        node.send("shipping", key=key)
    node.deliver()


def park(node: Node, key: str) -> None:
    with node.connection.transaction():
        [message] = INBOX.peek(node.connection, key, limit=1)
        run(node.connection, failing("shipping", message, Park("no")))


def suspect(node: Node, key: str, clock: int) -> None:
    with node.connection.transaction():
        run(node.connection, suspecting(SCHEMA, "shipping", [key], [clock], "in a batch that failed"))


def keys_failing(node: Node) -> list[str]:
    return [key for (key,) in node.rows("SELECT key FROM mailroom.key_state ORDER BY key")]


# -- Looking ----------------------------------------------------------------------------------------------------------


def floors(node: Node) -> dict[str, int]:
    return dict(node.rows("SELECT name, floor FROM mailroom.inbox_registry WHERE floor > 0"))


def fill(node: Node, *inboxes: str, steps: int = 1) -> None:
    """Deliver messages to each of them, this many steps of a floor and one more, and reap the first step."""
    for inbox in inboxes:
        with node.connection.transaction():
            Outbox().send_many(node.connection, [Outgoing(inbox, None, key="k")] * (steps * janitor.STEP + 1))
        node.deliver()
        reap_step(node, inbox)


def reap_step(node: Node, inbox: str) -> None:
    with node.connection.transaction():
        Inbox(inbox).reap(node.connection, "k", limit=janitor.STEP)


async def test_round_over_many_idle_inboxes_takes_as_many_statements_as_over_some(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    inboxes = {f"inbox{nth}" for nth in range(25)}
    for name in inboxes:
        node.inbox(name)
    done: list[Any] = []

    async def counted(connection: psycopg.AsyncConnection, operation: Operation[Any]) -> Any:
        done.append(getgeneratorlocals(operation).get("inbox"))
        return await run_async(connection, operation)

    clocked = Clocked()
    await clocked.janitor.run_once(keeper)  # sweeps
    monkeypatch.setattr(janitor, "run_async", counted)
    costs = []
    for _ in range(3):
        before = len(done)
        await clocked.janitor.run_once(keeper)
        costs.append(len(done) - before)
    assert max(costs) <= janitor.IN_TURN + 5
    assert set(done) - {None} == inboxes | {"shipping"}


async def test_floor_of_an_inbox_that_got_something_is_raised_before_its_turn(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "IN_TURN", 1)
    for name in ("zoo", "zulu"):
        node.inbox(name)
    own_janitor = Clocked().janitor
    fill(node, "zoo")
    fill(node, "zulu", steps=3)
    own_janitor.watch(["zulu"])
    await own_janitor.run_once(keeper)
    assert set(floors(node)) == {"shipping", "zulu"}
    # And as long as somebody reaps there, with nothing delivered.
    for _ in range(2):
        reap_step(node, "zulu")
        before = floors(node)["zulu"]
        await own_janitor.run_once(keeper)
        assert floors(node)["zulu"] == before + janitor.STEP


@pytest.mark.parametrize("removed", ["dropped", "unlisted and dropped", "detached"])
async def test_inbox_that_is_being_removed_is_passed_over(
    node: Node, keeper: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture, removed: str
) -> None:
    for name in ("a_gone", "b_there"):
        node.inbox(name)
    own_janitor = Clocked().janitor
    fill(node, "a_gone", "b_there")
    deliver(node, "k")
    park(node, "k")
    own_janitor.watch(["a_gone", "b_there"])
    node.connection.execute(STATE.replace("shipping", "a_gone"), ["k", 1, "infinity"])
    if removed == "unlisted and dropped":
        node.connection.execute("DELETE FROM mailroom.inbox_registry WHERE name = 'a_gone'")
    if removed == "detached":
        node.connection.execute("ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_a_gone")
    else:
        node.connection.execute("DROP TABLE mailroom.inbox_a_gone")
    deliver(node, "k")
    for _ in range(2):
        await own_janitor.run_once(keeper)
    assert "b_there" in floors(node)
    assert ("shipping", "k") not in node.rows("SELECT 'shipping', key FROM mailroom.inbox_shipping")
    told = [record.getMessage() for record in caplog.records if "a_gone" in record.getMessage()]
    assert len(told) == len(set(told))  # once, not with each turn
    assert bool(told) is (removed == "dropped")


async def test_inbox_that_is_locked_stops_no_other(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    for name in ("a_locked", "b_free"):
        node.inbox(name)
    own_janitor = Clocked().janitor
    fill(node, "a_locked", "b_free")
    holder = connect()
    holder.execute("LOCK mailroom.inbox_a_locked")
    await own_janitor.run_once(keeper)
    assert set(floors(node)) == {"b_free", "shipping"}
    holder.rollback()
    await own_janitor.run_once(keeper)
    assert set(floors(node)) == {"a_locked", "b_free", "shipping"}


# -- Dropping what waits for longer than the inbox keeps it ------------------------------------------------------------


AGED = "UPDATE mailroom.inbox SET delivered_at = delivered_at - interval '1 hour' WHERE inbox = %s AND key = ANY (%s)"


def expired(node: Node) -> dict[str, int]:
    return dict(node.rows("SELECT name, expired FROM mailroom.inbox_registry"))


async def test_what_waits_for_longer_than_the_inbox_allows_expires_and_is_told(
    node: Node, keeper: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []
    end = events.subscribe(heard.append, events.MessagesExpired)
    node.inbox("replies", expire_s=600)
    for inbox, key in (("replies", "old"), ("replies", "old"), ("replies", "new"), ("shipping", "old")):
        node.send(inbox, key=key)
    node.deliver()
    for inbox in ("replies", "shipping"):
        node.connection.execute(AGED, [inbox, ["old"]])
    with caplog.at_level("INFO", "mailroom.dispatcher"):
        await Clocked().janitor.run_once(keeper)
    end()
    assert node.delivered("inbox, key") == [("replies", "new"), ("shipping", "old")]
    assert expired(node) == {"replies": 2, "shipping": 0}
    assert heard == [events.MessagesExpired(SCHEMA, "replies", 2)]
    assert "inbox replies: 2 messages expired (expire_s) and were removed" in caplog.text
    assert dict(run(node.connection, reading_catalog(SCHEMA))[INBOX_EXPIRED]) == {("replies",): 2, ("shipping",): 0}


async def test_oldest_expire_first_and_a_full_step_calls_for_coming_back_soon(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "SWEPT_ROWS", 2)
    node.inbox("replies", expire_s=600)
    for key in ("c", "b", "a"):
        node.send("replies", key=key)
    node.deliver()
    node.connection.execute(AGED, ["replies", ["a", "b", "c"]])
    own_janitor = Clocked().janitor
    assert await own_janitor.run_once(keeper) == 1
    assert node.delivered("key") == [("a",)]
    assert await own_janitor.run_once(keeper) == 0
    assert (node.delivered("key"), expired(node)["replies"]) == ([], 3)


async def test_nothing_expires_of_a_key_that_a_transaction_holds_or_that_is_parked(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("replies", expire_s=600)
    for key in ("held", "held", "parked", "free"):
        node.send("replies", key=key)
    node.deliver()
    node.connection.execute(STATE.replace("shipping", "replies"), ["parked", 1, "infinity"])
    node.connection.execute("UPDATE mailroom.key_state SET parked_at = now()")
    node.connection.execute(AGED, ["replies", ["held", "parked", "free"]])
    holder = connect()
    assert [message.key for message in Inbox("replies").reap(holder, "held", limit=1)] == ["held"]
    clocked = Clocked()
    await clocked.janitor.run_once(keeper)
    holder.rollback()
    assert ("free",) not in node.delivered("key")
    assert expired(node)["replies"] == 1
    assert node.value("SELECT count(*) FROM mailroom.inbox_replies WHERE key = 'held'") == 2
    assert node.value("SELECT count(*) FROM mailroom.parked WHERE key = 'parked'") == 1
    clocked.now_s += SWEEP_INTERVAL_S
    await clocked.janitor.run_once(keeper)
    assert (node.delivered("key"), expired(node)["replies"]) == ([], 3)


def test_parked_messages_that_are_still_to_be_moved_aside_do_not_expire(node: Node) -> None:
    node.inbox("replies", expire_s=600)
    for key in ("parked", "free"):
        node.send("replies", key=key)
    node.deliver()
    node.connection.execute(STATE.replace("shipping", "replies"), ["parked", 1, "infinity"])
    node.connection.execute("UPDATE mailroom.key_state SET parked_at = now()")
    node.connection.execute(AGED, ["replies", ["parked", "free"]])
    assert run(node.connection, expiring(SCHEMA, "replies", 100)) == 1
    assert node.delivered("key") == [("parked",)]


def test_what_a_stream_of_spark_has_given_out_does_not_expire(node: Node) -> None:
    """Its next start finds the batch as it was planned; what it had not planned expires."""
    node.inbox("replies", expire_s=600)
    for key in ("given out", "new"):
        node.send("replies", key=key)
        node.deliver()
    node.connection.execute(AGED, ["replies", ["given out", "new"]])
    node.connection.execute(
        "INSERT INTO mailroom.spark_stream (inbox, checkpoint, batch, above, upto, message_id, messages, digest) "
        "SELECT 'replies', 'c', 1, 0, min(clock), '', 1, 0 FROM mailroom.inbox_replies"
    )
    assert run(node.connection, expiring(SCHEMA, "replies", 1)) == 1
    assert node.delivered("key") == [("given out",)]


def test_time_of_what_is_replayed_begins_anew(node: Node) -> None:
    """It has the time of its first delivery."""
    node.inbox("replies", expire_s=600)
    node.send("replies", key="k")
    node.deliver()
    node.connection.execute(AGED, ["replies", ["k"]])
    [message] = Inbox("replies").peek(node.connection)
    with node.connection.transaction():
        run(node.connection, failing("replies", message, Park("no")))
        assert Parked("replies").replay(node.connection, "k", actor="ada").messages == 1
    assert run(node.connection, expiring(SCHEMA, "replies", 100)) == 0
    node.connection.execute("UPDATE mailroom.attempt SET at = at - interval '1 hour'")
    assert run(node.connection, expiring(SCHEMA, "replies", 100)) == 1


# -- Moving messages of parked keys -----------------------------------------------------------------------------------


async def test_what_is_delivered_for_parked_keys_is_moved_aside_again_and_again(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    node.inbox("billing")
    own_janitor = Clocked().janitor
    deliver(node, "k", "free", "k")
    park(node, "k")
    for _ in range(2):
        assert await own_janitor.run_once(keeper) == 0
        assert node.delivered("key") == [("free",)]
        deliver(node, "k")


async def test_full_move_calls_for_coming_back_soon(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "moving_parked", partial(moving_parked, rows=2))
    own_janitor = Clocked().janitor
    deliver(node, *["k"] * 4)
    park(node, "k")
    assert [await own_janitor.run_once(keeper) for _ in range(2)] == [1, 0]


def test_drain_moves_all_aside_that_stands_behind_parked_messages(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "moving_parked", partial(moving_parked, rows=2, keys=1))
    node.inbox("billing")
    deliver(node, *["a", "held", "free", "b"] * 3)
    park(node, "a")
    park(node, "b")
    park(node, "held")
    node.send("shipping", key="a")
    node.send("billing", key="a")
    other = connect()
    other.execute("SELECT FROM mailroom.key_state WHERE key = 'held' FOR UPDATE")
    assert node.deliver_all().delivered == 2
    assert node.rows("SELECT key, count(*) FROM mailroom.parked GROUP BY key ORDER BY key") == [
        ("a", 4), ("b", 3), ("held", 1)
    ]  # fmt: skip
    left = ["shipping free", "shipping held", "shipping free", "shipping held", "shipping free", "billing a"]
    assert node.delivered("concat(inbox, ' ', key)") == [(each,) for each in left]


async def test_round_over_parked_keys_with_nothing_new_writes_nothing(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    own_janitor = Clocked().janitor
    deliver(node, "k")
    park(node, "k")
    await own_janitor.run_once(keeper)
    async with keeper.transaction():
        await own_janitor.run_once(keeper)
        [(clean,)] = await (await keeper.execute("SELECT pg_current_xact_id_if_assigned() IS NULL")).fetchall()
    assert clean


@pytest.mark.slow
async def test_housekeeping_goes_on_beside_an_open_replay_and_an_open_claim(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    replaying, claiming = connect(), connect()
    clocked = Clocked()
    deliver(node, *["free"] * janitor.STEP, "k", "k", "free")
    park(node, "k")
    INBOX.reap(claiming, "free", limit=janitor.STEP)
    claiming.commit()
    suspect(node, "free", janitor.STEP + 3)
    INBOX.reap(claiming, "free")
    Parked("shipping").replay(replaying, "k", actor="ada")
    await clocked.janitor.run_once(keeper)
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == 0
    replaying.commit()
    claiming.rollback()
    await clocked.janitor.run_once(keeper)
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == janitor.STEP
    assert [message.key for message in INBOX.peek(node.connection)] == ["k", "k", "free"]


# -- Sweeping ---------------------------------------------------------------------------------------------------------


async def test_node_is_swept_at_first_and_then_once_a_minute(node: Node, keeper: psycopg.AsyncConnection) -> None:
    clocked = Clocked()
    swept = []
    for wait_s in (0, SWEEP_INTERVAL_S - 1, 1):
        clocked.now_s += wait_s
        node.connection.execute(STATE, ["gone", 1, "2020-01-01"])
        await clocked.janitor.run_once(keeper)
        swept.append(not keys_failing(node))
        node.connection.execute("DELETE FROM mailroom.key_state")
    assert swept == [True, False, True]


async def test_notes_of_messages_that_are_gone_are_swept_and_no_others(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    deliver(node, "alive", "later", "parked", "waits", "gone", "later")
    with node.connection.transaction():
        INBOX.reap(node.connection, "gone")
        INBOX.reap(node.connection, "later", limit=1)
    park(node, "parked")
    for key, clock in (("alive", 1), ("later", 2), ("gone", 5)):
        node.connection.execute(STATE, [key, clock, "2020-01-01"])
    node.connection.execute(STATE, ["waits", 3, "2999-01-01"])
    await run_async(keeper, sweeping_key_state(SCHEMA, "shipping"))
    assert keys_failing(node) == ["alive", "parked", "waits"]


async def test_notes_of_a_batch_that_was_suspected_while_another_worker_had_it_are_swept(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    deliver(node, "a", "b")
    claiming = connect()
    for key in ("a", "b"):
        INBOX.reap(claiming, key)
    suspect(node, "a", 1)
    suspect(node, "b", 2)
    claiming.commit()
    assert keys_failing(node) == ["a", "b"]
    await run_async(keeper, sweeping_key_state(SCHEMA, "shipping"))
    assert keys_failing(node) == []


async def test_keys_that_failed_before_the_clock_was_set_back_wait_for_their_backoff(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    deliver(node, "failed", "suspected", "since")
    for key in ("failed", "since"):
        [message] = INBOX.peek(node.connection, key)
        with node.connection.transaction():
            run(node.connection, failing("shipping", message, Retry(100)))
    suspect(node, "suspected", 2)
    node.connection.execute(
        "UPDATE mailroom.key_state SET retry_at = retry_at + interval '1 day' WHERE key <> 'since'; "
        "UPDATE mailroom.attempt SET at = at + interval '1 day', retry_at = retry_at + interval '1 day' "
        "WHERE key <> 'since'"
    )
    node.connection.execute(
        "INSERT INTO mailroom.lease (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts) "
        "VALUES ('dispatcher', gen_random_uuid(), 1, now(), 'mill', 17, 1, now(), 'awake', '{}')"
    )
    for _ in range(2):
        await run_async(keeper, bringing_back_attempted(SCHEMA, 10))
        await run_async(keeper, bringing_back_suspected(SCHEMA, "shipping", 10))
        waiting = node.rows(
            "SELECT key, retry_at < now() + interval '101 s', retry_at > now() + interval '40 s' "
            "FROM mailroom.key_state ORDER BY key"
        )
        assert waiting == [("failed", True, True), ("since", True, True), ("suspected", True, False)]
    assert node.value("SELECT max(at) <= clock_timestamp() FROM mailroom.attempt")
    told = status(node.connection).set_back
    assert told is not None
    assert (told.keys, round(told.by_s / 3600)) == (2, 24)


async def test_note_of_a_message_that_is_being_reaped_is_left(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    deliver(node, "k")
    suspect(node, "k", 1)
    claiming = connect()
    INBOX.reap(claiming, "k")
    await run_async(keeper, sweeping_key_state(SCHEMA, "shipping"))
    claiming.rollback()
    assert keys_failing(node) == ["k"]


async def test_idle_note_that_an_open_claim_takes_along_is_passed_over(
    node: Node, keeper: psycopg.AsyncConnection, connect: Connect
) -> None:
    deliver(node, "k")
    node.connection.execute(STATE, ["k", 0, "2020-01-01"])
    claiming = connect()
    INBOX.reap(claiming, "k")
    await run_async(keeper, sweeping_key_state(SCHEMA, "shipping"))
    claiming.rollback()
    assert keys_failing(node) == ["k"]


HISTORY = [
    ("attempt", "inbox, key, clock, message_id, attempt, outcome, error",
     "'shipping', 'k', 1, gen_random_uuid(), 1, 'retry', 'no'", 14),
    ("audit", "actor, action, messages", "'ada', 'replay', 1", 400),
]  # fmt: skip


async def test_history_is_kept_so_long_and_then_swept(node: Node, keeper: psycopg.AsyncConnection) -> None:
    for table, columns, values, days in HISTORY:
        for age_h in (days * 24 + 1, days * 24 - 1, 0):
            node.connection.execute(
                f"INSERT INTO mailroom.{table} (at, {columns}) VALUES (now() - interval '{age_h} h', {values})"
            )
    await Clocked().janitor.run_once(keeper)
    kept = {table: node.value(f"SELECT count(*) FROM mailroom.{table}") for table, *_ in HISTORY}
    assert kept == {"attempt": 2, "audit": 2}


async def test_history_is_swept_in_bounded_steps_the_oldest_first(
    node: Node, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "SWEPT_ROWS", 2)
    for days in (500, 700, 600):
        node.connection.execute(
            "INSERT INTO mailroom.audit (at, actor, action, messages) "
            f"VALUES (now() - interval '{days} days', 'ada', '{days}', 1)"
        )
    await Clocked().janitor.run_once(keeper)
    assert node.value("SELECT action FROM mailroom.audit") == "500"


async def test_old_batches_of_spark_are_swept_but_the_last_of_a_stream(
    node: Node, keeper: psycopg.AsyncConnection
) -> None:
    rows = [
        ("job", -1, 401),
        ("young job", -1, 399),
        ("dead", 0, 500),
        ("dead", 1, 450),
        ("live", 7, 401),
        ("live", 8, 1),
    ]
    for name, batch, days in rows:
        node.connection.execute(
            "INSERT INTO mailroom.spark_batch (name, batch, messages, at) "
            "VALUES (%s, %s, 1, now() - %s * interval '1 day')",
            [name, batch, days],
        )
    await Clocked().janitor.run_once(keeper)
    kept = node.rows("SELECT name, batch FROM mailroom.spark_batch ORDER BY name")
    assert kept == [("dead", 1), ("live", 8), ("young job", -1)]


async def test_old_tokens_of_commits_are_swept(node: Node, keeper: psycopg.AsyncConnection) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.commit_token VALUES ('00000000-0000-7000-8000-000000000000', true)"  # of 1970
    )
    await Clocked().janitor.run_once(keeper)
    assert node.value("SELECT count(*) FROM mailroom.commit_token") == 0


def test_notes_are_looked_at_by_indexes_only_even_in_a_plan_of_empty_tables(node: Node, connect: Connect) -> None:
    node.connection.execute("ANALYZE")
    connection = connect()
    for name, value in KEEPER.items():
        connection.execute("SELECT set_config(%s, %s, true)", [name, value])
    plan = generic_plan(connection, janitor.IDLE_KEYS, {"is_read": ""})
    tables = [each for each in plan if each.get("Relation Name") in ("inbox_shipping", "key_state")]
    assert {each["Node Type"] for each in tables} <= {"Index Scan", "Index Only Scan", "ModifyTable"}
    used = {each["Index Name"] for each in plan if str(each.get("Index Name")).endswith("_of_shipping")}
    assert used == {"key_of_shipping"}
    assert not {each["Node Type"] for each in plan} & {"Hash Join", "Merge Join"}
