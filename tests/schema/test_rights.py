"""Rights: what a consumer with the rights of a reaper can do to the inboxes of others. Nothing."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import InsufficientPrivilege, WithCheckOptionViolation

from inbox import Inbox, Message, Park, Worker
from inbox.sessions.alive import DEAD_S, PAUSED_S
from inbox.worker import in_flight
from inbox.worker.in_flight import InFlight
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import eventually
from tests.support.working import working

# They get the topic of their name.
INBOXES = [pytest.mark.inbox(name, backoff_s=0) for name in ("mine", "others")]
pytestmark = [pytest.mark.both_versions, *INBOXES]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def consumer(node: Node) -> Iterator[str]:
    """The DSN of a consumer of `mine`."""
    with role(node.dsn, *rights("reaper", "mine")) as (_, dsn):
        yield dsn


@pytest.fixture
def session(consumer: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of the consumer of `mine`."""
    with psycopg.connect(consumer) as session:
        yield session
        session.rollback()


def deliver(node: Node, inbox: str, *keys: str) -> list[Message]:
    for key in keys:
        node.send(inbox, key=key)
    node.deliver_all()
    return Inbox(inbox).peek(node.connection)


def check_for(checking: InFlight, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds)):
        checking.take_over()
        clock.now += 1
    checking.take_over()


# -- In-flight entries ------------------------------------------------------------------------------------------------

ENTRY = """
INSERT INTO mailroom.my_worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number, xact)
VALUES (%s, %s, 'h', 1, now() - interval '1 h', 1, ARRAY['k'], ARRAY[%s::bigint], 42, %s)
"""


def test_no_entry_of_another_inbox_is_made(session: psycopg.Connection[Any]) -> None:
    with pytest.raises(WithCheckOptionViolation):
        session.execute(ENTRY, [uuid4(), "others", 1, None])


def test_no_entry_becomes_one_of_another_inbox(node: Node, session: psycopg.Connection[Any]) -> None:
    """Also of a role that got more than it needs."""
    node.connection.execute(f"GRANT UPDATE ON mailroom.my_worker TO {session.info.user}".encode())
    session.execute(ENTRY, [uuid4(), "mine", 1, None])
    with pytest.raises(WithCheckOptionViolation):
        session.execute("UPDATE mailroom.my_worker SET inbox = 'others'")


def test_entries_of_another_inbox_are_neither_seen_nor_changed(node: Node, session: psycopg.Connection[Any]) -> None:
    node.connection.execute(ENTRY, [uuid4(), "others", 1, None])
    session.execute(ENTRY, [uuid4(), "mine", 1, None])
    # Cheaper than any condition of ours, so it would be asked first.
    session.execute(
        "CREATE FUNCTION pg_temp.saw(text) RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS "
        "$$ BEGIN PERFORM set_config('test.saw', concat(current_setting('test.saw', true), $1), false); RETURN true; "
        "END $$"
    )
    seen = session.execute("SELECT inbox FROM mailroom.my_worker WHERE pg_temp.saw(inbox)").fetchall()
    assert seen == [("mine",)]
    assert session.execute("SELECT current_setting('test.saw')").fetchall() == [("mine",)]
    assert session.execute("UPDATE mailroom.my_worker SET messages = 2").rowcount == 1
    assert session.execute("SELECT FROM mailroom.my_worker FOR UPDATE").rowcount == 1
    assert session.execute("UPDATE mailroom.my_worker SET deleted = true").rowcount == 1
    with pytest.raises(InsufficientPrivilege):
        session.execute("SELECT FROM mailroom.worker")
    session.rollback()
    assert node.value("SELECT count(*) FROM mailroom.worker") == 1


def test_entry_ends_no_session_but_one_that_holds_its_message(
    node: Node, session: psycopg.Connection[Any], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all roles that may write entries of an inbox have the same rights to end sessions."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    [message] = deliver(node, "mine", "k")
    stranger = connect()
    xact = stranger.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert xact is not None
    session.execute(ENTRY, [uuid4(), "mine", message.clock, *xact])
    session.commit()
    assert Inbox("mine").reap_any(session)  # so that the entry stays
    clock = Clock()
    checking = InFlight(node.dsn, "mailroom", "mine", clock)
    check_for(checking, clock, DEAD_S + PAUSED_S)
    checking.close()
    assert stranger.execute("SELECT 1").fetchall() == [(1,)]


# -- Failures ---------------------------------------------------------------------------------------------------------

STATE = """
INSERT INTO mailroom.{} (inbox, key, clock, attempts, retry_at, last_error) VALUES (%s, 'k', 1, 1, 'infinity', 'secret')
"""
ATTEMPT = """
INSERT INTO mailroom.{} (inbox, key, clock, message_id, attempt, outcome, error)
VALUES (%s, 'k', 1, gen_random_uuid(), 99, 'skip', 'secret')
"""
MESSAGE = "gen_random_uuid(), 'topic', 'k', 'M', 'U', 'x', now(), '{{}}'"
PARKED = f"""
INSERT INTO mailroom.{{}} (inbox, clock, sent_clock, origin,
                           message_id, topic, key, kind, message_type, source, sent_at, value_json)
VALUES (%s, 1, 1, gen_random_uuid(), {MESSAGE})
"""
DEAD = f"""
INSERT INTO mailroom.{{}} (inbox, stage, reason,
                           message_id, topic, key, kind, message_type, source, sent_at, value_json)
VALUES (%s, 'reap', 'r', {MESSAGE})
"""


INSERTS = [
    STATE.format("my_key_state"),
    STATE.format("my_key_state") + " ON CONFLICT (inbox, key) DO UPDATE SET clock = 0 WHERE false",
    STATE.format("my_key_state") + " ON CONFLICT (inbox, key) DO UPDATE SET clock = excluded.clock",
    ATTEMPT.format("my_attempt"),
    PARKED.format("parked"),
    DEAD.format("dead_letter"),
]


def test_nothing_is_recorded_for_another_inbox(node: Node, session: psycopg.Connection[Any]) -> None:
    node.connection.execute(STATE.format("key_state").encode(), ["others"])  # for those of a conflict
    for insert in INSERTS:
        with session.transaction(force_rollback=True):
            session.execute(insert.encode(), ["mine"])
        with (
            pytest.raises(InsufficientPrivilege, match=r"may not write into \w+ for the inbox 'others'"),
            session.transaction(),
        ):
            session.execute(insert.encode(), ["others"])


def test_dead_letter_of_a_consumer_is_neither_sent_nor_executed_when_requeued(
    node: Node, session: psycopg.Connection[Any]
) -> None:
    # An operator of its own that finds everything equal.
    node.connection.execute("CREATE SCHEMA trap")
    node.connection.execute("CREATE FUNCTION trap.same(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true'")
    node.connection.execute("CREATE OPERATOR trap.= (FUNCTION = trap.same, LEFTARG = text, RIGHTARG = text)")
    node.connection.execute(f"GRANT USAGE ON SCHEMA trap TO {session.info.user}".encode())
    session.execute("SET search_path = trap, pg_catalog")
    for stage in ("deliver", "execute", "receive"):
        with pytest.raises(InsufficientPrivilege, match="may not write into dead_letter"), session.transaction():
            session.execute(DEAD.format("dead_letter").replace("'reap'", f"'{stage}'").encode(), ["mine"])


def test_failing_keys_do_not_become_those_of_another_inbox(node: Node, session: psycopg.Connection[Any]) -> None:
    """Also of a role that got more than it needs."""
    node.connection.execute(f"GRANT UPDATE ON mailroom.my_key_state TO {session.info.user}".encode())
    session.execute(STATE.format("my_key_state").encode(), ["mine"])
    with pytest.raises(InsufficientPrivilege, match="may not write into key_state"):
        session.execute("UPDATE mailroom.my_key_state SET inbox = 'others'")


def test_failures_of_another_inbox_are_neither_seen_nor_changed(node: Node, session: psycopg.Connection[Any]) -> None:
    for insert, table in ((STATE, "key_state"), (ATTEMPT, "attempt"), (PARKED, "parked")):
        for inbox in ("mine", "others"):
            node.connection.execute(insert.format(table).encode(), [inbox])
    for view in ("my_key_state", "my_due", "my_attempt"):
        assert session.execute(f"SELECT inbox FROM mailroom.{view}".encode()).fetchall() == [("mine",)]
    assert session.execute("SELECT key FROM mailroom.failing_keys('others', '{k}')").fetchall() == []
    assert session.execute("SELECT key FROM mailroom.failing_keys('mine', '{k}')").fetchall() == [("k",)]
    assert session.execute("SELECT FROM mailroom.my_key_state FOR UPDATE").rowcount == 1
    assert session.execute("UPDATE mailroom.my_key_state SET retry_at = now()").rowcount == 1
    assert session.execute("UPDATE mailroom.my_key_state SET deleted = true").rowcount == 1
    for table in ("key_state", "attempt", "parked", "dead_letter", "my_parked"):
        with pytest.raises(InsufficientPrivilege), session.transaction():
            session.execute(f"SELECT FROM mailroom.{table}".encode())
    session.rollback()
    node.connection.execute(f"GRANT SELECT ON mailroom.my_parked TO {session.info.user}".encode())
    assert session.execute("SELECT inbox FROM mailroom.my_parked").fetchall() == [("mine",)]


# -- All of it --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["logs in", "is acted as"])
def worker_dsn(request: pytest.FixtureRequest, node: Node, consumer: str) -> Iterator[str]:
    """The DSN of a consumer of `mine`, which logs in itself or is what another login acts as."""
    if request.param == "logs in":
        yield consumer
        return
    acted = conninfo_to_dict(consumer)["user"]
    grants = ("ALTER ROLE {role} NOINHERIT", f"GRANT {acted} TO {{role}}", f"ALTER ROLE {{role}} SET role = {acted}")
    with role(node.dsn, *grants) as (_, dsn):
        yield dsn


def test_worker_needs_no_more_than_its_grants(node: Node, worker_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It handles, fails, ends what has failed for good, and accounts for a worker that has died."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    node.connection.execute("UPDATE mailroom.inbox_registry SET max_attempts = 2, on_failure = 'skip'")
    messages = deliver(node, "mine", "k", "fails", "parks", "killed")
    node.connection.execute(ENTRY.replace("'k'", "'killed'"), [uuid4(), "mine", messages[3].clock, None])
    # Not earlier: an entry from before the server's start blames nobody, and the tests' server may just have started.
    node.connection.execute("UPDATE mailroom.worker SET process_number = NULL, claimed_at = clock_timestamp()")
    handled: list[str] = []
    entries: list[int] = []

    def handle(message: Message, connection: Any) -> None:
        entries.append(node.value("SELECT count(*) FROM mailroom.worker WHERE messages > 0"))
        if message.key == "fails":
            raise ValueError
        if message.key == "parks":
            raise Park("no")
        handled.append(message.key)

    with working(Worker(worker_dsn, "mine", handle, poll_interval_s=0.05)):
        eventually(lambda: set(handled) == {"k", "killed"})
        eventually(lambda: node.dead() and node.rows("SELECT FROM mailroom.parked"))
    assert node.dead() == [("fails", "reap", "ValueError: ")]
    assert node.rows("SELECT key FROM mailroom.parked") == [("parks",)]
    assert max(entries) >= 1
    assert node.rows("SELECT FROM mailroom.worker") == []
    assert node.rows("SELECT error FROM mailroom.attempt WHERE key = 'killed'") == [(in_flight.DIED,)]
