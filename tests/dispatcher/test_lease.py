"""Who leads: real processes that are killed, paused and woken. Another takes over, and what comes back does no harm."""

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dispatcher import Dispatcher
from dispatcher.lanes.lease import Lease, reading_backend
from mailroom.node.status import status
from mailroom.sql import locks
from mailroom.sql.runner import run
from tests.support.command import done
from tests.support.databases import Connect
from tests.support.lanes import EXPIRE, PATIENT, daemon, is_replaced, leaders, running
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually, eventually_async

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping")]

# Stops once, between the statements of its first delivery and their COMMIT.
STOPS = """
import os, signal
from dispatcher.delivery import deliverer
from mailroom.sql.operation import Together
from mailroom.sql.runner import run_in_transaction

def one_by_one(operation):
    rows = None
    try:
        while True:
            step = operation.send(rows)
            for each in step.steps if isinstance(step, Together) else (step,):
                rows = yield each
    except StopIteration as end:
        return end.value

def stopping(operation):
    result = yield from one_by_one(operation)
    if operation.__name__ == "delivering" and result.taken:
        deliverer.run_in_transaction = run_in_transaction
        os.kill(os.getpid(), signal.SIGSTOP)
    return result

deliverer.run_in_transaction = lambda connection, operation: run_in_transaction(connection, stopping(operation))
"""


@pytest.fixture
def plain(node: Node) -> Iterator[str]:
    """The DSN of a role that may dispatch, and see all sessions, but end none of anybody else's."""
    name, password = f"mailroom_test_{secrets.token_hex(8)}", secrets.token_hex(8)
    grants = "; ".join(
        f"GRANT ALL ON {what} {SCHEMA} TO {name}"
        for what in ("SCHEMA", "ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA")
    )
    node.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' IN ROLE pg_monitor; {grants}".encode())
    try:
        yield make_conninfo(node.dsn, user=name, password=password)
    finally:
        eventually(lambda: not node.value("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", name))
        node.connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


@pytest.fixture
def app(node: Node) -> Iterator[str]:
    """The DSN of a role whose sessions all act as another one, which owns the rights and not the login's."""
    app, owner = (f"mailroom_test_{secrets.token_hex(8)}" for _ in range(2))
    password = secrets.token_hex(8)
    grants = "; ".join(
        f"GRANT ALL ON {what} {SCHEMA} TO {owner}"
        for what in ("SCHEMA", "ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA")
    )
    node.connection.execute(
        f"CREATE ROLE {owner} NOLOGIN; CREATE ROLE {app} LOGIN NOINHERIT PASSWORD '{password}' IN ROLE {owner}; "
        f"ALTER ROLE {app} SET role = {owner}; {grants}".encode()
    )
    try:
        yield make_conninfo(node.dsn, user=app, password=password)
    finally:
        eventually(lambda: not node.value("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", app))
        node.connection.execute(f"DROP ROLE {app}; DROP OWNED BY {owner}; DROP ROLE {owner}".encode())


def is_stopped(paused: "subprocess.Popen[bytes]") -> bool:
    return Path(f"/proc/{paused.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def leader(node: Node) -> int | None:
    """Return the process id of the leader, if any leads."""
    return leaders(node).get("dispatcher")


def sessions(node: Node) -> int:
    return len(node.sessions("mailroom dispatcher"))


def delivered(node: Node) -> list[str]:
    return [key for (key,) in node.delivered("key")]


def send(node: Node, *keys: str) -> None:
    for key in keys:
        node.send("shipping", key=key)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("may_end_it", [False, True], ids=["not permitted", "ended"])
@pytest.mark.parametrize("where", ["within a delivery", "asleep"])
def test_paused_leader_is_replaced_and_does_no_harm_when_it_wakes(
    node: Node, request: pytest.FixtureRequest, where: str, may_end_it: bool
) -> None:
    keys = [f"k{nth:02}" for nth in range(20)]
    with daemon(node.dsn, PATIENT + STOPS * (where == "within a delivery")) as first:
        eventually(lambda: leader(node) == first.pid and sessions(node) == 4)
        send(node, *keys[:5])
        if where == "within a delivery":
            eventually(lambda: is_stopped(first))
        else:
            eventually(lambda: delivered(node) == keys[:5])
            first.send_signal(signal.SIGSTOP)
        with daemon(node.dsn if may_end_it else request.getfixturevalue("plain"), PATIENT) as second:
            eventually(lambda: is_replaced(node, first.pid, second.pid))
            send(node, *keys[5:10])
            eventually(lambda: delivered(node) == keys[:10])
            first.send_signal(signal.SIGCONT)
            send(node, *keys[10:])
            eventually(lambda: len(delivered(node)) >= len(keys))
            eventually(lambda: sessions(node) == 7)
            assert node.rows("SELECT pid, epoch FROM mailroom.lease WHERE role = 'dispatcher'") == [(second.pid, 2)]
            # In clock order: nothing twice, nothing out of the order in which it was sent.
            assert delivered(node) == keys
            assert node.waiting() == []


def test_lease_from_before_the_clock_was_set_back_is_one_from_now_on(node: Node) -> None:
    with node.connection.transaction():
        backend = run(node.connection, reading_backend())
        leader, standby = Lease(SCHEMA), Lease(SCHEMA)
        assert run(node.connection, leader.taking(backend, "awake", {}))
    for seconds, is_replaced_now, noted_s in ((3.5, False, None), (40, False, 36), (-0.001, True, 36)):
        ahead = f"UPDATE mailroom.lease SET until = clock_timestamp() + interval '{seconds} s'"
        node.connection.execute(ahead.encode())
        with node.connection.transaction():
            assert run(node.connection, standby.taking(backend, "awake", {})) == is_replaced_now
        assert node.value("SELECT until <= clock_timestamp() + interval '3 s' FROM mailroom.lease")
        told = status(node.connection).set_back
        assert (told and told.by_s // 1) == noted_s
        assert ("mailroom explain M052" in done("status", dsn=node.dsn)) == (noted_s is not None)


def test_session_that_acts_as_another_role_knows_itself_and_ends_its_predecessor(node: Node, app: str) -> None:
    first, second = Lease(SCHEMA), Lease(SCHEMA)
    with psycopg.connect(app, autocommit=True) as one, psycopg.connect(app, autocommit=True) as other:
        backend = run(one, reading_backend())
        assert backend.pid == one.info.backend_pid
        assert backend.since == node.value("SELECT backend_start FROM pg_stat_activity WHERE pid = %s", backend.pid)
        run(one, first.taking(backend, "awake", {}))
        node.connection.execute(EXPIRE)
        assert run(other, second.taking(run(other, reading_backend()), "awake", {}))
        eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE pid = %s", backend.pid))
        assert other.execute("SELECT current_user <> session_user").fetchone() == (True,)


def test_predecessor_that_only_the_current_role_may_end_is_ended(node: Node, app: str) -> None:
    """As where the dispatcher before logged in as the owner itself."""
    owner = node.value("SELECT pg_get_userbyid(roleid) FROM pg_auth_members WHERE member = %s::regrole", _user(app))
    first, second = Lease(SCHEMA), Lease(SCHEMA)
    node.connection.execute(f"ALTER ROLE {owner} LOGIN PASSWORD 'weak'".encode())
    with psycopg.connect(make_conninfo(app, user=owner, password="weak"), autocommit=True) as one:
        backend = run(one, reading_backend())
        run(one, first.taking(backend, "awake", {}))
        node.connection.execute(EXPIRE)
        with psycopg.connect(app, autocommit=True) as other:
            assert run(other, second.taking(run(other, reading_backend()), "awake", {}))
        eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE pid = %s", backend.pid))


async def test_dispatcher_whose_login_acts_as_another_role_delivers(node: Node, app: str) -> None:
    async with running(Dispatcher(app)) as [task]:
        send(node, *"abc")
        await eventually_async(lambda: delivered(node) == ["a", "b", "c"] or task.done())
        assert not task.done()


def _user(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


def test_take_over_from_a_session_that_may_not_be_ended_is_no_error(node: Node, plain: str) -> None:
    first, second = Lease(SCHEMA), Lease(SCHEMA)
    backend = run(node.connection, reading_backend())
    run(node.connection, first.taking(backend, "awake", {}))
    node.connection.execute(EXPIRE)
    with psycopg.connect(plain, autocommit=True) as other:
        assert run(other, second.taking(run(other, reading_backend()), "awake", {}))
    assert node.value("SELECT pg_backend_pid()") == backend.pid


async def test_message_arrives_though_a_stranger_stays_awake_for_ever(node: Node, connect: Connect) -> None:
    """Writers believe that somebody is awake, so nobody rings: the lock is a matter of speed only."""
    outbox = locks.key("'mailroom.outbox'::regclass")
    async with running(Dispatcher(node.dsn, poll_interval_s=0.2)):
        await eventually_async(lambda: leader(node) == os.getpid())
        stranger = connect(autocommit=True)
        await eventually_async(
            lambda: (
                stranger.execute(f"SELECT pg_try_advisory_lock({locks.AWAKE}, {outbox})".encode()).fetchone() == (True,)
            )
        )
        for key in "abc":
            node.send("shipping", key=key)
            await eventually_async(lambda key=key: key in delivered(node))  # type: ignore[misc]
