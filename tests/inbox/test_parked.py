"""Parked keys: held in order, not slowing others down, and replayed in order whatever runs beside the replay."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy

from dispatcher.delivery.deliver import delivering
from dispatcher.housekeeping.janitor import raising_floor
from dispatcher.lanes.leading import KEEPER
from inbox import AsyncParked, Inbox, Park, Parked, Retry
from inbox.by_key.failure import Recorded
from inbox.by_key.parked_keys import MOVE, Changed, MovedParked, moving_parked
from mailroom.errors import InvalidMessage, InvalidName, NotInTransaction, UnknownInbox
from mailroom.sql import locks
from mailroom.sql.runner import run
from tests.interleavings.sessions import Step, interleave, orders, sessions
from tests.sql.test_plans import generic_plan
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, opened_async
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing, send
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = [pytest.mark.sample(2), pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]

Session = psycopg.Connection[Any]
INBOX = Inbox("shipping")
PARKED = Parked("shipping")
HELD = """
SELECT (SELECT count(*) FROM mailroom.parked), (SELECT count(*) FROM mailroom.inbox),
       (SELECT count(*) FROM mailroom.key_state), (SELECT count(*) FROM mailroom.audit),
       (SELECT floor FROM mailroom.inbox_registry)
"""


def deliver(node: Node, *keys: str) -> None:
    """Send messages to `shipping`, whose values count from 0, and deliver them."""
    for nth, key in enumerate(keys):
        node.send("shipping", nth, key=key)
    node.deliver()


def fail(connection: Session, key: str, nth: int = 1, error: Exception | None = None) -> Recorded:
    """Record a failure of the key's nth message; by default it parks the key."""
    message = INBOX.peek(connection, key, limit=nth)[-1]
    return run(connection, failing("shipping", message, error or Park("no such street")))


def park(node: Node, *keys: str) -> None:
    for key in keys:
        with node.connection.transaction():
            assert fail(node.connection, key).outcome == "park"


def move(connection: Session, cursor: str = "", **bounds: int) -> MovedParked:
    return run(connection, moving_parked(SCHEMA, "shipping", cursor, **bounds))


def replay(connection: Session, *keys: str) -> Changed:
    return PARKED.replay(connection, keys or None, actor="ada")


def reaped(connection: Session, key: str = "k") -> list[object]:
    """Reap all messages of a key, by both calls in turn, in a transaction that is committed."""
    values = []
    while messages := INBOX.reap(connection, key, limit=2) + INBOX.reap_any(connection, per_key=2):
        values += [message.value for message in messages if message.key == key]
    connection.commit()
    return values


def raise_floor(connection: Session) -> None:
    run(connection, raising_floor(SCHEMA, "shipping"))


# -- Out of the way ---------------------------------------------------------------------------------------------------


def test_parked_key_leaves_nothing_in_the_inbox_once_its_messages_are_moved(node: Node) -> None:
    deliver(node, *["k", "free"] * 50)
    park(node, "k")
    assert move(node.connection) == MovedParked(49, "", more=False)
    deliver(node, "k", "k")
    assert move(node.connection).messages == 2
    assert node.rows("SELECT key, count(*) FROM mailroom.inbox GROUP BY key") == [("free", 50)]
    assert node.value("SELECT count(*) FROM mailroom.parked") == 52


@pytest.mark.slow
def test_claim_touches_as_much_beside_a_parked_key_of_many_messages_as_without(node: Node, connect: Connect) -> None:
    def touched() -> int:
        node.connection.execute("VACUUM mailroom.inbox_shipping")
        with connect() as connection:
            INBOX.reap_any(connection)  # what a session reads only once
            before = connection.execute("SELECT pg_stat_get_xact_blocks_fetched(%s::regclass::oid)", [PKEY]).fetchone()
            INBOX.reap_any(connection)
            after = connection.execute("SELECT pg_stat_get_xact_blocks_fetched(%s::regclass::oid)", [PKEY]).fetchone()
            connection.rollback()
        assert before is not None
        assert after is not None
        return int(after[0] - before[0])

    deliver(node, "bad", "free")
    park(node, "bad")
    alone = touched()
    deliver(node, *["bad"] * 3_000)
    while move(node.connection, rows=500).more:
        pass
    assert touched() <= alone + 1


PKEY = "mailroom.key_of_shipping"


def test_mover_moves_a_bounded_number_of_messages_oldest_first(node: Node) -> None:
    deliver(node, *["k"] * 8)
    park(node, "k")
    assert move(node.connection, rows=3) == MovedParked(3, "", more=True)
    assert [clock for (clock,) in node.rows("SELECT clock FROM mailroom.parked ORDER BY clock")] == [1, 2, 3, 4]
    assert [move(node.connection, rows=3) for _ in range(2)] == [
        MovedParked(3, "", more=True),
        MovedParked(1, "", more=False),
    ]


def test_mover_moves_a_bounded_number_of_bytes(node: Node) -> None:
    deliver(node, *["k"] * 4)
    park(node, "k")
    zeros = f"decode(repeat('00', {12 * 2**20}), 'hex')"  # no more than two of these are moved at once
    node.connection.execute(f"UPDATE mailroom.inbox SET value = {zeros}, value_json = NULL")
    moved = [move(node.connection) for _ in range(3)]
    assert [(each.messages, each.more) for each in moved] == [(2, True), (1, False), (0, False)]


def test_mover_checks_a_bounded_number_of_keys_and_goes_round(node: Node) -> None:
    deliver(node, *"aabbccddee")
    park(node, *"abcde")
    cursors, moved = [""], []
    for _ in range(3):
        step = move(node.connection, cursors[-1], keys=2)
        cursors.append(step.cursor)
        moved.append(step.messages)
    assert (cursors, moved) == (["", "b", "d", ""], [2, 2, 1])


def test_mover_stays_at_keys_it_has_not_finished(node: Node) -> None:
    deliver(node, *"aaaabbbb")
    park(node, *"ab")
    assert [move(node.connection, "", keys=1, rows=2).cursor for _ in range(2)] == ["", "a"]


def test_mover_that_finds_nothing_writes_nothing(node: Node) -> None:
    deliver(node, "k", "waits", "waits")
    park(node, "k")
    with node.connection.transaction():
        fail(node.connection, "waits", error=Retry(3_600))
    with node.connection.transaction():
        assert move(node.connection).messages == 0
        assert node.value("SELECT pg_current_xact_id_if_assigned() IS NULL")
    assert node.value("SELECT count(*) FROM mailroom.inbox WHERE key = 'waits'") == 2


def test_mover_reads_by_indexes_only_even_in_a_plan_of_empty_tables(node: Node, connect: Connect) -> None:
    node.connection.execute("ANALYZE")
    connection = connect()
    for name, value in KEEPER.items():
        connection.execute("SELECT set_config(%s, %s, true)", [name, value])
    plan = generic_plan(connection, MOVE, {})
    tables = [each for each in plan if each.get("Relation Name") in ("inbox_shipping", "key_state", "parked")]
    scans = {each["Node Type"] for each in tables}
    assert scans <= {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}
    used = {each["Index Name"] for each in plan if str(each.get("Index Name")).endswith("_of_shipping")}
    assert used == {PKEY.removeprefix("mailroom.")}
    assert "key_state_due" in {each.get("Index Name") for each in plan}
    assert not {each["Node Type"] for each in plan} & {"Hash Join", "Merge Join"}


# -- Replay -----------------------------------------------------------------------------------------------------------


def test_replayed_key_gives_all_its_messages_in_order(node: Node, connect: Connect) -> None:
    deliver(node, *["k"] * 10)
    park(node, "k")
    move(node.connection, rows=4)
    with node.connection.transaction():
        assert replay(node.connection, "k") == Changed(keys=1, messages=10, freed=1)
    assert reaped(connect()) == list(range(10))
    assert node.rows(HELD) == [(0, 0, 0, 1, 0)]


def test_order_is_kept_over_a_second_failure_and_what_was_delivered_meanwhile(node: Node, connect: Connect) -> None:
    connection = connect()
    deliver(node, *["k"] * 5)
    park(node, "k")
    move(node.connection)
    with node.connection.transaction():
        replay(node.connection, "k")
    assert [message.value for message in INBOX.reap(connection, "k", limit=2)] == [0, 1]
    connection.commit()
    park(node, "k")
    assert node.rows("SELECT clock, attempts FROM mailroom.key_state") == [(3, 1)]
    move(node.connection, rows=1)
    for value in (5, 6):
        node.send("shipping", value, key="k")
    node.deliver()
    assert reaped(connection) == []
    with node.connection.transaction():
        assert replay(node.connection, "k").messages == 5
    assert reaped(connection) == [2, 3, 4, 5, 6]


def test_replay_below_a_risen_floor_lowers_it(node: Node, connect: Connect) -> None:
    deliver(node, "k", "k", "free")
    park(node, "k")
    move(node.connection)
    with node.connection.transaction():
        raise_floor(node.connection)
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == 2
    with node.connection.transaction():
        replay(node.connection, "k")
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == 0
    assert reaped(connect()) == [0, 1]


def test_replay_takes_the_longest_parked_keys_first_up_to_its_limit(node: Node) -> None:
    deliver(node, *"abc")
    park(node, *"cab")
    with node.connection.transaction():
        assert PARKED.replay(node.connection, None, actor="ada", limit=2).keys == 2
    assert [each.key for each in PARKED.keys(node.connection)] == ["b"]


def test_replay_by_reason_leaves_other_keys_parked(node: Node) -> None:
    deliver(node, *"abc")
    park(node, *"ab")
    with node.connection.transaction():
        fail(node.connection, "c", error=Park("100% of the tax is missing"))
        assert PARKED.replay(node.connection, None, actor="ada", matching="0% of").keys == 1
        assert PARKED.replay(node.connection, "a", actor="ada", matching="tax").keys == 0
    assert [each.key for each in PARKED.keys(node.connection)] == ["a", "b"]


def test_replay_leaves_keys_that_only_wait(node: Node) -> None:
    deliver(node, "k")
    with node.connection.transaction():
        fail(node.connection, "k", error=Retry(3_600))
        assert replay(node.connection) == replay(node.connection, "k") == Changed(0, 0, 0)
    assert node.value("SELECT count(*) FROM mailroom.key_state") == 1


def test_replay_rolled_back_leaves_all_as_it_was(node: Node, connect: Connect) -> None:
    deliver(node, *["k"] * 3)
    park(node, "k")
    move(node.connection)
    with node.connection.transaction():
        raise_floor(node.connection)
    before = node.rows(HELD)
    with node.connection.transaction(force_rollback=True):
        assert replay(node.connection, "k").messages == 3
    assert node.rows(HELD) == before
    assert reaped(connect()) == []


def test_replay_wakes_the_listeners_of_the_inbox(node: Node, connect: Connect) -> None:
    listener = connect(autocommit=True)
    bell = node.value("SELECT " + locks.channel("'mailroom.inbox_shipping'::regclass"))
    listener.execute(f'LISTEN "{bell}"')
    deliver(node, "k")
    park(node, "k")
    with node.connection.transaction():
        replay(node.connection, "k")
    assert [each.channel for each in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [bell]


# -- Replay beside others, step by step -------------------------------------------------------------------------------


def held_key(node: Node) -> None:
    """Leave the key k parked with the values 0 to 2 in `parked` and 3 and 4 in the inbox, and the floor raised."""
    deliver(node, *["k"] * 3)
    park(node, "k")
    move(node.connection)
    for value in (3, 4):
        node.send("shipping", value, key="k")
    node.deliver()
    with node.connection.transaction():
        raise_floor(node.connection)


def test_claim_before_the_replay_commits_gets_nothing_and_after_it_everything(node: Node, connect: Connect) -> None:
    held_key(node)
    replaying, claiming = connect(), connect()
    assert reaped(claiming) == []
    replay(replaying, "k")
    assert reaped(claiming) == []
    replaying.commit()
    assert reaped(claiming) == [0, 1, 2, 3, 4]


def test_delivery_during_a_replay_stays_behind_what_is_replayed(node: Node, connect: Connect) -> None:
    held_key(node)
    replaying = connect()
    replay(replaying, "k")
    node.send("shipping", 5, key="k")
    node.deliver()
    assert reaped(connect()) == []
    replaying.commit()
    assert reaped(connect()) == [0, 1, 2, 3, 4, 5]


def test_claim_that_waited_through_parking_and_replay_begins_at_the_head(node: Node, connect: Connect) -> None:
    """The head that it waited for is deleted; the one that came back is another row."""
    deliver(node, *["k"] * 3)
    other, waiting = connect(), connect()
    with ThreadPoolExecutor(1) as thread:
        fail(other, "k")
        claimed = thread.submit(INBOX.reap, waiting, "k")
        wait_until_blocked(node.connection, waiting.info.backend_pid)
        move(other)
        replay(other, "k")
        other.commit()
        assert [message.value for message in claimed.result()] == [0, 1, 2]


def test_claim_on_an_old_snapshot_takes_nothing_out_of_order(node: Node, connect: Connect) -> None:
    deliver(node, *["k"] * 3)
    old = connect()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("SELECT count(*) FROM mailroom.inbox")
    park(node, "k")
    move(node.connection)
    with node.connection.transaction():
        replay(node.connection, "k")
    with pytest.raises(psycopg.errors.SerializationFailure):
        INBOX.reap(old, "k")
    old.rollback()
    assert reaped(old) == [0, 1, 2]


def test_replay_waits_for_the_mover_and_then_takes_what_it_moved(node: Node, connect: Connect) -> None:
    held_key(node)
    moving, replaying = connect(), connect()
    assert move(moving).messages == 2
    with ThreadPoolExecutor(1) as thread:
        replayed = thread.submit(replay, replaying, "k")
        assert wait_until_blocked(node.connection, replaying.info.backend_pid) == [moving.info.backend_pid]
        moving.commit()
        assert replayed.result().messages == 5
    replaying.commit()
    assert node.value("SELECT count(*) FROM mailroom.parked") == 0
    assert reaped(connect()) == [0, 1, 2, 3, 4]


def test_replay_on_a_snapshot_older_than_the_mover_is_refused(node: Node, connect: Connect) -> None:
    held_key(node)
    old = connect()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert len(PARKED.keys(old)) == 1
    move(node.connection)
    with pytest.raises(psycopg.errors.SerializationFailure):
        replay(old, "k")
    old.rollback()
    assert replay(old, "k").messages == 5
    old.commit()
    assert reaped(connect()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("act", [replay, lambda connection, key: PARKED.discard(connection, key, actor="a", per_key=1)])
def test_mover_skips_a_key_that_is_being_replayed_or_discarded(
    node: Node, connect: Connect, act: Callable[[Session, str], Changed]
) -> None:
    held_key(node)
    acting, moving = connect(), connect()
    assert act(acting, "k").keys == 1
    moving.execute("SET lock_timeout = '1s'")
    assert move(moving).messages == 0
    moving.rollback()
    acting.rollback()
    assert move(moving).messages == 2


def test_mover_skips_a_message_whose_late_failure_is_being_recorded(node: Node, connect: Connect) -> None:
    held_key(node)
    recording_it, moving = connect(), connect()
    recording_it.execute("SELECT FROM mailroom.inbox_shipping ORDER BY clock LIMIT 1 FOR UPDATE")
    moving.execute("SET lock_timeout = '1s'")
    assert move(moving).messages == 1


def test_floor_is_not_raised_past_a_replay_that_is_under_way(node: Node, connect: Connect) -> None:
    held_key(node)
    replaying, janitor = connect(), connect()
    janitor.execute("SET lock_timeout = '1s'")
    replay(replaying, "k")
    raise_floor(janitor)
    janitor.commit()
    replaying.commit()
    assert reaped(connect()) == [0, 1, 2, 3, 4]


def test_replay_locks_a_floor_that_is_low_enough_already(node: Node, connect: Connect) -> None:
    """The janitor does not see the messages being replayed, and would raise a floor that is not locked."""
    deliver(node, "k", "free")
    park(node, "k")
    replaying, janitor = connect(), connect()
    replay(replaying, "k")
    assert node.value("SELECT floor FROM mailroom.inbox_registry") == 0
    raise_floor(janitor)
    janitor.commit()
    replaying.commit()
    assert reaped(connect()) == [0]


def test_replay_waits_for_a_janitor_and_lowers_the_floor_it_raised(node: Node, connect: Connect) -> None:
    deliver(node, "k", "free")
    park(node, "k")
    replaying, janitor = connect(), connect()
    raise_floor(janitor)
    with ThreadPoolExecutor(1) as thread:
        replayed = thread.submit(replay, replaying, "k")
        assert wait_until_blocked(node.connection, replaying.info.backend_pid) == [janitor.info.backend_pid]
        janitor.commit()
        assert replayed.result().keys == 1
    replaying.commit()
    assert reaped(connect()) == [0]


def test_second_of_two_replays_waits_and_changes_nothing(node: Node, connect: Connect) -> None:
    held_key(node)
    first, second = connect(), connect()
    replay(first, "k")
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(replay, second, "k")
        wait_until_blocked(node.connection, second.info.backend_pid)
        first.commit()
        assert again.result() == Changed(0, 0, 0)
    second.commit()
    assert node.value("SELECT count(*) FROM mailroom.audit") == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("error", [ValueError("no"), Park("too"), Retry(60)], ids=["fail", "park", "retry"])
def test_failure_recorded_late_leaves_the_key_parked(node: Node, error: Exception) -> None:
    """The batch that failed held the first messages too; after its rollback another worker parked the key."""
    deliver(node, *["k"] * 3)
    park(node, "k")
    for nth in (2, 1):
        with node.connection.transaction():
            assert fail(node.connection, "k", nth, error).outcome == "gone"
    assert [(each.clock, each.messages) for each in PARKED.keys(node.connection)] == [(1, 3)]
    assert node.value("SELECT count(*) FROM mailroom.attempt") == 1


def test_failure_recorded_beside_the_parking_leaves_the_key_parked(node: Node, connect: Connect) -> None:
    deliver(node, *["k"] * 3)
    parking, late = connect(), connect()
    fail(parking, "k")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(fail, late, "k", 2, ValueError("no"))
        wait_until_blocked(node.connection, late.info.backend_pid)
        parking.commit()
        waiting.result()
    late.commit()
    assert [each.clock for each in PARKED.keys(node.connection)] == [1]


class Actor:
    """What a session does to a parked key, in two steps; reaped messages are logged in the order of the commits."""

    def __init__(self, log: list[object]) -> None:
        self._log = log
        self._taken: list[object] = []

    def replay(self, connection: Session) -> None:
        replay(connection, "k")

    def move(self, connection: Session) -> None:
        move(connection, rows=1)

    def floor(self, connection: Session) -> None:
        raise_floor(connection)

    def deliver(self, connection: Session) -> None:
        send(connection, "shipping", 5, key="k")
        run(connection, delivering(SCHEMA, rows=100, max_bytes=2**20))

    def reap(self, connection: Session) -> None:
        self._taken = [message.value for message in INBOX.reap(connection, "k", limit=2)]

    def reap_any(self, connection: Session) -> None:
        self._taken = [message.value for message in INBOX.reap_any(connection, per_key=2)]

    def park(self, connection: Session) -> None:
        if INBOX.peek(connection, "k"):
            fail(connection, "k")

    def commit(self, connection: Session) -> None:
        # Logged before the commit, since a session that waits for this one continues right after it.
        self._log += self._taken
        connection.commit()
        self._taken = []

    def rollback(self, connection: Session) -> None:
        connection.rollback()
        self._taken = []

    def steps(self, *names: str) -> list[Step]:
        return [getattr(self, name) for name in names]


BESIDE = ("move", "floor", "deliver", "reap", "reap_any", "park", "replay")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("beside", "end"), list(product(BESIDE, ("commit", "rollback"))))
def test_nothing_is_lost_doubled_or_overtaken_whatever_runs_beside_a_replay(
    node: Node, connect: Connect, beside: str, end: str
) -> None:
    for order in orders("replayer", 2, "other", 4):
        node.connection.execute("TRUNCATE mailroom.inbox, mailroom.parked, mailroom.key_state")
        held_key(node)
        log: list[object] = []
        replayer, other = Actor(log), Actor(log)
        with sessions(node.dsn, node.connection, "replayer", "other") as opened:
            steps = {
                "replayer": replayer.steps("replay", end),
                "other": other.steps(beside, "commit", beside, end),
            }
            interleave(opened, steps, order)
        with node.connection.transaction():
            replay(node.connection)
        log += reaped(connect())
        sent = [0, 1, 2, 3, 4, *([5] * (log.count(5)))]
        assert log == sent, order
        assert node.rows(HELD)[0][:3] == (0, 0, 0), order


# -- Discard ----------------------------------------------------------------------------------------------------------


def discard(connection: Session, key: str | None = "k", **options: Any) -> Changed:
    return PARKED.discard(connection, key, actor="ada", **options)


@pytest.mark.parametrize("moved", [True, False])
def test_discarding_the_first_message_and_replaying_goes_on_with_the_next(
    node: Node, connect: Connect, moved: bool
) -> None:
    held_key(node)
    if moved:
        move(node.connection)
    with node.connection.transaction():
        assert discard(node.connection, per_key=1) == Changed(keys=1, messages=1, freed=0)
    assert reaped(connect()) == []
    with node.connection.transaction():
        replay(node.connection, "k")
    assert reaped(connect()) == [1, 2, 3, 4]


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_key", [4, 5, None])
def test_discard_also_counts_messages_that_are_still_in_the_inbox(
    node: Node, connect: Connect, per_key: int | None
) -> None:
    held_key(node)
    thrown = 5 if per_key is None else per_key
    with node.connection.transaction():
        assert discard(node.connection, per_key=per_key) == Changed(1, thrown, thrown == 5)
    node.send("shipping", 5, key="k")
    node.deliver()
    assert reaped(connect()) == ([5] if thrown == 5 else [])
    with node.connection.transaction():
        assert replay(node.connection).keys == (0 if thrown == 5 else 1)
    assert reaped(connect()) == ([] if thrown == 5 else [4, 5])


def test_discard_by_reason_takes_the_first_of_each_key(node: Node) -> None:
    deliver(node, *"aabbcc")
    park(node, *"ab")
    with node.connection.transaction():
        fail(node.connection, "c", error=Park("else"))
        assert discard(node.connection, None, matching="street", per_key=1) == Changed(2, 2, 0)
    assert [(each.key, each.messages, each.clock) for each in PARKED.keys(node.connection)] == [
        ("a", 1, 2), ("b", 1, 4), ("c", 2, 5),
    ]  # fmt: skip


def test_discard_takes_at_most_so_many_keys_the_longest_parked_first(node: Node) -> None:
    deliver(node, *"aabbcc")
    park(node, *"bca")
    with node.connection.transaction():
        assert discard(node.connection, None, limit=2) == Changed(2, 4, 2)
    assert [each.key for each in PARKED.keys(node.connection)] == ["a"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("call", [PARKED.replay, PARKED.discard])
def test_choice_of_nothing_is_told(
    node: Node, call: Callable[..., Changed], dry_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with node.connection.transaction():
        for keys, matching, is_told in ((None, None, False), ("typo", None, True), (None, "cleanup", True)):
            caplog.clear()
            nothing = call(node.connection, keys, actor="ada", matching=matching, dry_run=dry_run)
            assert (nothing, bool(caplog.records)) == (Changed(0, 0, 0), is_told)
            assert "typo" not in caplog.text
            assert "cleanup" not in caplog.text


def test_discard_rolled_back_leaves_all_as_it_was(node: Node) -> None:
    held_key(node)
    before = node.rows(HELD)
    with node.connection.transaction(force_rollback=True):
        discard(node.connection)
    assert node.rows(HELD) == before


def test_discard_leaves_other_keys_alone(node: Node) -> None:
    held_key(node)
    deliver(node, "other", "other", "free")
    park(node, "other")
    with node.connection.transaction():
        discard(node.connection)
    assert [(each.key, each.messages) for each in PARKED.keys(node.connection)] == [("other", 2)]
    assert [message.key for message in INBOX.peek(node.connection)] == ["other", "free"]


# -- Looking ----------------------------------------------------------------------------------------------------------


def test_keys_show_what_each_holds_and_why(node: Node) -> None:
    held_key(node)
    [found] = PARKED.keys(node.connection)
    assert (found.key, found.messages, found.clock, found.attempts, found.reason) == ("k", 5, 1, 1, "no such street")
    assert found.parked_at.tzinfo is not None
    assert PARKED.keys(node.connection, "other") == PARKED.keys(node.connection, matching="tax") == []


def test_messages_of_a_parked_key_are_shown_in_order_from_both_tables(node: Node) -> None:
    held_key(node)
    deliver(node, "free")
    assert [message.value for message in PARKED.messages(node.connection, "k", limit=4)] == [0, 1, 2, 3]
    assert PARKED.messages(node.connection, "free") == []


def test_attempts_are_listed_newest_first(node: Node) -> None:
    deliver(node, "k", "other")
    with node.connection.transaction():
        fail(node.connection, "k", error=ValueError("no"))
        fail(node.connection, "other", error=Retry(1))
        fail(node.connection, "k")
    found = [
        (each.key, each.clock, each.attempt, each.outcome, each.error) for each in PARKED.attempts(node.connection)
    ]
    assert found == [
        ("k", 1, 2, "park", "no such street"),
        ("other", 2, 1, "retry", "the handler asked for another attempt"),
        ("k", 1, 1, "retry", "ValueError: no"),
    ]
    assert [each.attempt for each in PARKED.attempts(node.connection, "k", limit=1)] == [2]
    assert isinstance(PARKED.attempts(node.connection)[0].message_id, UUID)


# -- Audit, dry runs, bad input ---------------------------------------------------------------------------------------


def test_every_key_that_is_changed_is_in_the_audit(node: Node) -> None:
    deliver(node, *"aabc")
    park(node, *"abc")
    with node.connection.transaction():
        PARKED.replay(node.connection, ["a", "b"], actor="ada@mill", why="mended")
        PARKED.discard(node.connection, "c", actor="bob@mill")
    columns = "actor, role = session_user, action, inbox, key, messages, reason"
    assert node.rows(f"SELECT {columns} FROM mailroom.audit ORDER BY id") == [
        ("ada@mill", True, "parked replay", "shipping", "a", 2, "mended"),
        ("ada@mill", True, "parked replay", "shipping", "b", 1, "mended"),
        ("bob@mill", True, "parked discard", "shipping", "c", 1, None),
    ]


@pytest.mark.parametrize("per_key", [None, 1, 5])
@pytest.mark.parametrize("limit", [None, 1])
def test_dry_run_returns_what_the_real_one_does_and_changes_nothing(
    node: Node, limit: int | None, per_key: int | None
) -> None:
    held_key(node)
    deliver(node, "other", "other")
    park(node, "other")
    before = node.rows(HELD)
    with node.connection.transaction():
        replayed = PARKED.replay(node.connection, None, actor="ada", limit=limit, dry_run=True)
        discarded = discard(node.connection, None, limit=limit, per_key=per_key, dry_run=True)
        assert node.value("SELECT pg_current_xact_id_if_assigned() IS NULL")
    assert node.rows(HELD) == before
    with node.connection.transaction(force_rollback=True):
        assert PARKED.replay(node.connection, None, actor="ada", limit=limit) == replayed
    with node.connection.transaction():
        assert discard(node.connection, None, limit=limit, per_key=per_key) == discarded


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("call", [PARKED.replay, PARKED.discard])
def test_autocommit_outside_a_transaction_is_refused(node: Node, call: Callable[..., Changed], dry_run: bool) -> None:
    with pytest.raises(NotInTransaction):
        call(node.connection, "k", actor="ada", dry_run=dry_run)


@pytest.mark.parametrize("call", [PARKED.replay, PARKED.discard])
def test_bad_input_is_refused_before_anything_is_changed(node: Node, call: Callable[..., Changed]) -> None:
    held_key(node)
    before = node.rows(HELD)
    refused: list[dict[str, Any]] = [
        {"actor": ""}, {"actor": " "}, {"actor": None}, {"actor": "x" * 201}, {"actor": "a\0"}, {"why": "x" * 1_001},
        {"why": "\ud800"}, {"keys": ""}, {"keys": ["k", 1.5]}, {"keys": "k\0"}, {"matching": "\0"}, {"limit": 0},
        {"limit": -1}, {"limit": True}, {"limit": "1"}, {"limit": 1_000_001},
    ]  # fmt: skip
    for bad in refused:
        with node.connection.transaction(), pytest.raises(InvalidMessage):
            call(node.connection, **({"keys": None, "actor": "ada"} | bad))
    assert node.rows(HELD) == before


def test_discard_of_a_wrong_number_per_key_is_refused(node: Node) -> None:
    for per_key in (0, True, "1"):
        with node.connection.transaction(), pytest.raises(InvalidMessage, match="per_key must be"):
            discard(node.connection, per_key=per_key)


def test_key_is_taken_as_one_and_not_as_its_letters(node: Node) -> None:
    deliver(node, "ab", "a", "b")
    park(node, "ab", "a", "b")
    with node.connection.transaction():
        assert PARKED.replay(node.connection, "ab", actor="ada").keys == 1
    assert [each.key for each in PARKED.keys(node.connection)] == ["a", "b"]


def test_no_keys_means_none_of_them(node: Node) -> None:
    held_key(node)
    with node.connection.transaction():
        assert discard(node.connection, []) == replay_of_none(node) == Changed(0, 0, 0)  # type: ignore[arg-type]


def replay_of_none(node: Node) -> Changed:
    return PARKED.replay(node.connection, set(), actor="ada")


def test_keys_may_be_ints_and_uuids(node: Node) -> None:
    id = UUID(int=7)
    deliver(node, "7", str(id))
    park(node, "7", str(id))
    with node.connection.transaction():
        assert PARKED.replay(node.connection, [7, id], actor="ada").keys == 2


def test_unknown_inbox_is_refused(node: Node) -> None:
    for look in (Parked("nowhere").keys, Parked("nowhere").attempts):
        with pytest.raises(UnknownInbox):
            look(node.connection)
    with pytest.raises(InvalidName):
        Parked("No Where")


@pytest.fixture
def engine(node: Node) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(
        node.dsn.replace("postgresql:", "postgresql+psycopg2:", 1), poolclass=sqlalchemy.NullPool
    )
    yield engine
    engine.dispose()


def test_everything_runs_on_sqlalchemy_with_another_driver(
    node: Node, engine: sqlalchemy.Engine, connect: Connect
) -> None:
    held_key(node)
    with engine.begin() as connection:
        assert [each.key for each in PARKED.keys(connection)] == ["k"]
        assert len(PARKED.messages(connection, "k")) == 5
        assert len(PARKED.attempts(connection)) == 1
        assert PARKED.discard(connection, "k", actor="ada", per_key=1).messages == 1
        assert PARKED.replay(connection, ["k"], actor="ada").messages == 4
    assert reaped(connect()) == [1, 2, 3, 4]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_async_class_does_the_same(node: Node, connect: Connect, kind: str) -> None:
    held_key(node)
    held = AsyncParked("shipping")
    async with opened_async(node.dsn, kind) as connection:
        assert await held.keys(connection) == PARKED.keys(node.connection)
        assert [message.value for message in await held.messages(connection, "k", limit=2)] == [0, 1]
        assert await held.attempts(connection, "k") == PARKED.attempts(node.connection)
        assert await held.discard(connection, "k", actor="ada", per_key=1, dry_run=True) == Changed(1, 1, 0)
        assert await held.discard(connection, "k", actor="ada", per_key=1) == Changed(1, 1, 0)
        assert await held.replay(connection, None, actor="ada", matching="street", why="mended") == Changed(1, 4, 1)
        assert await held.keys(connection) == []
        with pytest.raises(InvalidMessage, match="who acts"):
            await held.replay(connection, None, actor="")
        with pytest.raises(UnknownInbox):
            await AsyncParked("nowhere").keys(connection)
        assert reaped(connect()) == []
        await connection.commit()
    assert reaped(connect()) == [1, 2, 3, 4]
    assert node.rows("SELECT actor, action, key, messages, reason FROM mailroom.audit ORDER BY id") == [
        ("ada", "parked discard", "k", 1, None), ("ada", "parked replay", "k", 4, "mended")
    ]  # fmt: skip


@pytest.mark.parametrize("dry_run", [False, True])
async def test_async_autocommit_outside_a_transaction_is_refused(node: Node, dry_run: bool) -> None:
    held_key(node)
    before = node.rows(HELD)
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        for call in (AsyncParked("shipping").replay, AsyncParked("shipping").discard):
            with pytest.raises(NotInTransaction):
                await call(connection, "k", actor="ada", dry_run=dry_run)
    assert node.rows(HELD) == before
