"""Transactions that commit exactly once: lost answers, lost connections, retries, and who is told how it ended.

What holds on every kind of connection is in `test_conformance`. What was done is counted in a ledger without unique
constraints, so that nothing but `atomically` keeps it right.
"""

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import errors

import mailroom
from inbox import AsyncInbox, Inbox
from mailroom import CommitUnknown, NotAtomic, TokenExpired, atomically, atomically_async, resolve
from mailroom.errors import NotInTransaction, UnsupportedConnection
from mailroom.session import commit
from mailroom.session.commit import CommitAttempt, Next, Phase, following, sweeping_tokens
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from outbox import AsyncOutbox, Outbox
from tests.support.committing import WAYS, Client, client
from tests.support.databases import Connect
from tests.support.drivers import url
from tests.support.node import SCHEMA, Node
from tests.support.proxy import CommitFault, Proxy, proxied
from tests.support.roles import named, rights
from tests.support.unknown_commits import run_unknown_commits
from tests.support.waiting import WITHIN_S, eventually, eventually_async, wait_until_blocked

NOTE = Sql("INSERT INTO ledger VALUES (%(what)s::text)")
FAIL = Sql("INSERT INTO troubled VALUES (%(code)s::text)")
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
PID = Sql("SELECT pg_backend_pid()", columns=("integer",))

# Rows that fail when they are written.
TROUBLE = """
CREATE TABLE ledger (what text);
CREATE TABLE troubled (code text);
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION USING ERRCODE = NEW.code, MESSAGE = 'trouble'; END $$;
CREATE TRIGGER now AFTER INSERT ON troubled FOR EACH ROW EXECUTE FUNCTION fail();
"""
pytestmark = [pytest.mark.both_versions, pytest.mark.node_sql(TROUBLE)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "pause_s", lambda failures, longest_s: 0.0)


@pytest.fixture
def through(node: Node) -> Iterator[tuple[Proxy, str]]:
    with proxied(node.dsn) as (proxy, dsn):
        yield proxy, dsn


@pytest.fixture(params=["psycopg", "async psycopg"])
def caller(request: pytest.FixtureRequest, through: tuple[Proxy, str]) -> Iterator[Client]:
    """A client, sync or async, through the proxy."""
    with client(request.param, through[1]) as made:
        yield made


class Work:
    """Work that notes each of its runs; `within` is what it does besides, given the number of the run from 1."""

    def __init__(self, within: Callable[[int], Operation[None]] | None = None) -> None:
        self.runs = 0
        self._within = within

    def __call__(self) -> Operation[str]:
        self.runs += 1
        yield NOTE.at()(what=f"run {self.runs}")
        if self._within is not None:
            yield from self._within(self.runs)
        return f"result {self.runs}"


def ledger(node: Node) -> list[str]:
    return [what for (what,) in node.rows("SELECT what FROM ledger")]


def tokens(node: Node) -> list[tuple[UUID, bool]]:
    return [(token, committed) for token, committed in node.rows("SELECT * FROM mailroom.commit_token ORDER BY token")]


def end_backend(node: Node, pid: int) -> None:
    node.rows("SELECT pg_terminate_backend(%s, 60000)", pid)


# -- One commit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_commit_whose_answer_is_lost_is_asked_about_whatever_gives_the_connection(
    node: Node, through: tuple[Proxy, str], way: str
) -> None:
    proxy, dsn = through
    proxy.at_next_commits(CommitFault.SWALLOW)
    with client(way, dsn) as caller:
        assert caller.atomically(Work()) == "result 1"
    assert ledger(node) == ["run 1"]
    assert proxy.commits == [CommitFault.SWALLOW, CommitFault.NONE]


@pytest.mark.parametrize("command", [b"BEGIN", b"COMMIT"])
def test_work_whose_session_ended_right_behind_a_command_commits_once(
    node: Node, caller: Client, through: tuple[Proxy, str], command: bytes
) -> None:
    through[0].end_behind(command)
    work = Work()
    assert caller.atomically(work) == "result 1"
    assert ledger(node) == ["run 1"]
    assert not through[0].endings


def test_resolver_that_loses_its_own_answer_asks_again(node: Node, caller: Client, through: tuple[Proxy, str]) -> None:
    through[0].at_next_commits(CommitFault.CUT, CommitFault.SWALLOW, CommitFault.CUT)
    work = Work()
    assert caller.atomically(work) == "result 2"
    assert (work.runs, ledger(node)) == (2, ["run 2"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_session_that_psycopg_gives_up_within_the_work_is_made_anew(node: Node, caller: Client, wrapped: bool) -> None:
    """As it does when the socket hangs up while it waits: the connection does not count as broken then."""

    def within(nth: int) -> Operation[None]:
        if nth == 1:
            hung_up = psycopg.OperationalError("connection socket closed")
            raise sa.exc.OperationalError("SELECT", {}, hung_up) if wrapped else hung_up
        yield NOTE.at()(what="after")

    work = Work(within)
    assert caller.atomically(work) == "result 2"
    assert ledger(node) == ["run 2", "after"]


def test_connection_that_the_work_fails_to_make_elsewhere_is_its_own_failure(node: Node, caller: Client) -> None:
    def within(_: int) -> Operation[None]:
        psycopg.connect("host=127.0.0.1 port=1")
        yield NOTE.at()(what="after")

    work = Work(within)
    with pytest.raises(psycopg.OperationalError, match="port 1 failed"):
        caller.atomically(work)
    assert (work.runs, ledger(node)) == (1, [])


def test_backend_that_dies_before_the_commit_reaches_it_has_the_work_run_again(
    node: Node, caller: Client, through: tuple[Proxy, str]
) -> None:
    """A driver or a pool that sent COMMIT once more, on a new connection, would report success."""
    pids: list[int] = []

    def within(_: int) -> Operation[None]:
        [(pid,)] = yield PID.at()()
        pids.append(pid)

    def at_commit() -> CommitFault:
        if len(through[0].commits) == 0:
            end_backend(node, pids[0])
        return CommitFault.NONE

    through[0].at_commits(at_commit)
    work = Work(within)
    assert caller.atomically(work) == "result 2"
    assert ledger(node) == ["run 2"]


def test_consumer_reaps_and_sends_once_though_the_answer_is_lost(node: Node, through: tuple[Proxy, str]) -> None:
    node.inbox("shipping")
    for key in ("a", "b"):
        node.send("shipping", key, key=key)
    node.deliver_all()
    proxy, dsn = through

    def work(connection: psycopg.Connection[Any]) -> str:
        [message] = Inbox("shipping").reap_any(connection, max_keys=1, per_key=1)
        Outbox().send(connection, "billing", message.value)
        return message.key

    async def work_async(connection: psycopg.AsyncConnection[Any]) -> str:
        [message] = await AsyncInbox("shipping").reap_any(connection, max_keys=1, per_key=1)
        await AsyncOutbox().send(connection, "billing", message.value)
        return message.key

    proxy.at_next_commits(CommitFault.SWALLOW)
    assert atomically(partial(psycopg.connect, dsn), work) == "a"
    proxy.at_next_commits(CommitFault.CUT)
    assert asyncio.run(atomically_async(partial(psycopg.AsyncConnection.connect, dsn), work_async)) == "b"
    assert node.delivered() == []
    assert node.value("SELECT count(*) FROM mailroom.outbox") == 2


# -- Tried again, or not ----------------------------------------------------------------------------------------------


def test_failure_that_does_not_pass_comes_out_itself(node: Node, caller: Client) -> None:
    def within(_: int) -> Operation[None]:
        yield FAIL.at()(code="40001")

    work = Work(within)
    with pytest.raises(errors.SerializationFailure):
        caller.atomically(work, attempts=3)
    assert (work.runs, ledger(node)) == (3, [])


def test_pauses_between_attempts_grow_up_to_a_cap(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def pause_s(failures: int, longest_s: float) -> float:
        asked.append((failures, longest_s))
        return 0.0

    monkeypatch.setattr(commit, "pause_s", pause_s)

    def work(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO troubled VALUES ('40001')")

    with pytest.raises(errors.SerializationFailure):
        atomically(partial(psycopg.connect, node.dsn), work)
    assert asked == [(failures, commit.LONGEST_PAUSE_S) for failures in range(1, commit.ATTEMPTS)]


def test_first_connection_that_fails_comes_out_and_later_ones_are_tried_again(node: Node) -> None:
    opened: list[bool] = []

    def connect(fails: tuple[int, ...]) -> psycopg.Connection[Any]:
        opened.append(True)
        if len(opened) in fails:
            raise psycopg.OperationalError("no database today")
        return psycopg.connect(node.dsn)

    def work(connection: psycopg.Connection[Any]) -> int:
        if len(opened) == 1:
            end_backend(node, connection.info.backend_pid)
        connection.execute("INSERT INTO ledger VALUES ('x')")
        return len(opened)

    with pytest.raises(psycopg.OperationalError, match="today"):
        atomically(partial(connect, (1,)), work)
    assert len(opened) == 1
    opened.clear()
    assert atomically(partial(connect, (2, 3)), work) == 4
    assert ledger(node) == ["x"]


def test_real_serialization_failures_lose_and_double_nothing(node: Node) -> None:
    node.connection.execute("CREATE TABLE counter AS SELECT 0 AS n")
    dsn = f"{node.dsn}{'&' if '?' in node.dsn else '?'}options=-c%20default_transaction_isolation%3Dserializable"
    barrier = threading.Barrier(4)

    def work(connection: psycopg.Connection[Any]) -> None:
        row = connection.execute("SELECT n FROM counter").fetchone()
        assert row is not None
        connection.execute("UPDATE counter SET n = %s", [row[0] + 1])

    def count(_: int) -> None:
        barrier.wait()
        for _ in range(5):
            atomically(partial(psycopg.connect, dsn), work, attempts=100)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    assert node.value("SELECT n FROM counter") == 20


def test_what_follows_from_an_error() -> None:
    found = {(phase, code, lost): following(phase, code, lost=lost) for phase, code, lost in FOLLOWING}
    assert found == FOLLOWING


FOLLOWING = {
    (Phase.CONNECTING, "", False): Next.RAISE,
    (Phase.CONNECTING, "", True): Next.RETRY,
    (Phase.WORKING, "", False): Next.RAISE,
    (Phase.WORKING, "23505", False): Next.RAISE,
    (Phase.WORKING, "40001", False): Next.RETRY,
    (Phase.WORKING, "57P01", True): Next.RETRY,
    (Phase.CHECKING, "", True): Next.RETRY,
    (Phase.COMMITTING, "23503", False): Next.RAISE,
    (Phase.COMMITTING, "40P01", False): Next.RETRY,
    (Phase.COMMITTING, "57P01", True): Next.ASK,
    (Phase.COMMITTING, "", True): Next.ASK,
    (Phase.COMMITTING, "", False): Next.ASK,
    (Phase.COMMITTED, "", True): Next.RETURN,
    (Phase.COMMITTED, "40001", False): Next.RAISE,
}


# -- Not one whole ----------------------------------------------------------------------------------------------------


def test_error_within_a_savepoint_spoils_nothing(node: Node) -> None:
    def work(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO ledger VALUES ('x')")
        with pytest.raises(errors.DivisionByZero), connection.transaction():
            connection.execute("SELECT 1 / 0")

    atomically(partial(psycopg.connect, node.dsn), work)
    assert ledger(node) == ["x"]


@pytest.mark.parametrize("statements", [["COMMIT"], ["COMMIT", "BEGIN", "INSERT INTO ledger VALUES ('y')"]])
def test_work_that_commits_by_itself_is_told_so(node: Node, statements: list[str]) -> None:
    def work(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO ledger VALUES ('x')")
        for statement in statements:
            connection.execute(statement)

    with pytest.raises(NotAtomic, match="neither commit nor roll back"):
        atomically(partial(psycopg.connect, node.dsn), work)
    assert ledger(node) == ["x"]


def test_work_that_rolls_back_by_exception_has_no_result(node: Node) -> None:
    def work(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO ledger VALUES ('x')")
        raise psycopg.Rollback

    with pytest.raises(NotAtomic, match="Rollback"):
        atomically(partial(psycopg.connect, node.dsn), work)
    assert ledger(node) == []


def test_transaction_that_is_open_already_is_not_joined(node: Node, connect: Connect) -> None:
    connection = connect()
    connection.execute("INSERT INTO ledger VALUES ('before')")
    with pytest.raises(NotAtomic, match="in a transaction"):
        atomically(lambda: connection, lambda _: None)
    assert ledger(node) == []


def test_connection_without_transactions_is_refused(node: Node) -> None:
    engine = sa.create_engine(url(node.dsn, "psycopg"), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with pytest.raises(NotInTransaction):
        atomically(engine.connect, lambda _: None)
    with pytest.raises(UnsupportedConnection):
        atomically(lambda: memoryview(b""), lambda _: None)
    assert tokens(node) == []


@pytest.mark.parametrize("error", [psycopg.OperationalError, errors.SerializationFailure, errors.AdminShutdown])
def test_what_fails_after_the_commit_never_has_the_work_run_again(node: Node, error: type[psycopg.Error]) -> None:
    @contextmanager
    def connect() -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(node.dsn) as connection:
            yield connection
        raise error("too late")

    def work(connection: psycopg.Connection[Any]) -> str:
        connection.execute("INSERT INTO ledger VALUES ('x')")
        return "done"

    if error is errors.AdminShutdown:
        assert atomically(connect, work) == "done"
    else:
        with pytest.raises(error, match="too late"):
            atomically(connect, work)
    assert ledger(node) == ["x"]


async def test_cancellation_of_a_commit_names_the_token(node: Node, connect: Connect) -> None:
    node.connection.execute(
        """
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN LOCK TABLE troubled; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON ledger
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
        """
    )
    holder = connect()
    holder.execute("LOCK TABLE troubled")
    pids: list[int] = []

    async def work(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("INSERT INTO ledger VALUES ('x')")
        pids.append(connection.info.backend_pid)

    task = asyncio.create_task(atomically_async(partial(psycopg.AsyncConnection.connect, node.dsn), work))
    await eventually_async(lambda: pids)
    await asyncio.to_thread(wait_until_blocked, node.connection, pids[0])
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    holder.rollback()
    outcome = resolve(partial(psycopg.connect, node.dsn), token_named(caught.value))
    assert outcome == ("committed" if ledger(node) else "rolled back")


async def test_cancellation_while_it_is_asked_names_the_token(node: Node, through: tuple[Proxy, str]) -> None:
    proxy, dsn = through
    proxy.at_next_commits(CommitFault.HOLD)

    async def work(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("INSERT INTO ledger VALUES ('x')")

    task = asyncio.create_task(atomically_async(partial(psycopg.AsyncConnection.connect, dsn), work))
    await eventually_async(lambda: node.value(BLOCKED) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    proxy.release()
    assert resolve(partial(psycopg.connect, node.dsn), token_named(caught.value)) == "committed"


def token_named(error: BaseException) -> str:
    [note] = error.__notes__
    return note.partition("resolve(connect, '")[2].partition("'")[0]


def test_importing_mailroom_loads_no_driver() -> None:
    program = "import sys, mailroom; sys.exit('psycopg' in sys.modules or 'sqlalchemy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="atomicly"):
        _ = mailroom.atomicly


# -- Asked later ------------------------------------------------------------------------------------------------------


def test_commit_that_is_still_on_its_way_is_unknown_until_it_arrives(
    node: Node, caller: Client, through: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "RESOLVE_WITHIN_S", 0.2)
    through[0].at_next_commits(CommitFault.HOLD)
    work = Work()
    with pytest.raises(CommitUnknown) as caught:
        caller.atomically(work)
    assert (work.runs, ledger(node)) == (1, [])
    through[0].release()
    assert caller.resolve(caught.value.token) == "committed"
    assert ledger(node) == ["run 1"]


def test_unknown_commit_says_what_to_do_also_to_another_process(
    node: Node, through: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "RESOLVE_WITHIN_S", 0.2)
    proxy, dsn = through

    def cut_all() -> CommitFault:
        threading.Thread(target=proxy.cut).start()
        return CommitFault.CUT

    proxy.at_commits(cut_all)
    with pytest.raises(CommitUnknown) as caught:
        atomically(partial(psycopg.connect, dsn), lambda connection: connection.execute("TABLE ledger").fetchall())
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, CommitUnknown)
    assert str(error) == str(caught.value)
    assert f"mailroom.resolve(connect, '{error.token}')" in str(error)
    assert resolve(partial(psycopg.connect, node.dsn), str(error.token)) == "rolled back"


def test_resolver_waits_for_a_commit_that_is_on_its_way(node: Node, through: tuple[Proxy, str]) -> None:
    """A look that found no row would have taken it for rolled back."""
    proxy, dsn = through
    proxy.at_next_commits(CommitFault.HOLD)
    work = Work()
    waiting = "SELECT FROM pg_stat_activity WHERE query ~ 'ON CONFLICT' AND wait_event_type = 'Lock'"
    with client("psycopg", dsn) as caller, ThreadPoolExecutor(1) as thread:
        result = thread.submit(caller.atomically, work)
        eventually(lambda: node.rows(waiting) or result.done())
        proxy.release()
        assert result.result() == "result 1"
    assert (work.runs, ledger(node)) == (1, ["run 1"])


def test_what_was_ruled_out_can_never_commit(node: Node, connect: Connect) -> None:
    token, late = uuid_of_now(node), connect()
    assert resolve(connect, token) == "rolled back"
    with pytest.raises(errors.UniqueViolation):
        late.execute("INSERT INTO mailroom.commit_token VALUES (%s, true)", [token])
    assert resolve(connect, str(token)) == "rolled back"
    assert tokens(node) == [(token, False)]


LEVELS = ["read committed", "repeatable read", "serializable"]


def at_level(level: str) -> str:
    return "-c default_transaction_isolation=" + level.replace(" ", "\\ ")


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("end", "expected"), [("commit", "committed"), ("rollback", "rolled back")])
def test_all_who_ask_while_it_is_under_way_get_the_one_answer(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, level: str, end: str, expected: str
) -> None:
    monkeypatch.setattr(commit, "PATIENCE_S", WITHIN_S)  # so that all four wait at once
    original = connect()
    token = uuid_of_now(node)
    original.execute("INSERT INTO mailroom.commit_token VALUES (%s, true)", [token])
    asking = partial(connect, options=at_level(level))
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(resolve, asking, token, within_s=WITHIN_S) for _ in range(4)]
        eventually(lambda: node.value(BLOCKED) == 4 or any(answer.done() for answer in answers))
        getattr(original, end)()
        assert {answer.result() for answer in answers} == {expected}
    assert resolve(asking, token) == expected


def test_unreachable_database_leaves_it_unknown(node: Node) -> None:
    token = uuid_of_now(node)
    with pytest.raises(CommitUnknown) as caught:
        resolve(partial(psycopg.connect, "postgresql://127.0.0.1:1/none"), token, within_s=0.2)
    assert caught.value.token == token
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)


def test_database_that_refuses_the_question_leaves_it_unknown_at_once(node: Node) -> None:
    connect = partial(psycopg.connect, node.dsn)
    with pytest.raises(CommitUnknown, match="UndefinedTable"):
        resolve(connect, uuid4(), schema="elsewhere")


@pytest.mark.parametrize("purpose", ["writer", "reaper"])
def test_rights_of_writers_and_reapers_are_enough(connect: Connect, purpose: str) -> None:
    connection = connect()
    # All of it is rolled back, the role too: it is the whole server's.
    connection.execute("CREATE ROLE shop_writer")
    connection.execute(named(rights(purpose), "shop_writer").encode())
    connection.execute("SET LOCAL ROLE shop_writer")
    attempt = CommitAttempt(SCHEMA, reconnecting=False)
    run(connection, attempt.beginning())
    run(connection, attempt.ending())

    def ask() -> Operation[bool]:
        yield commit.RULE_OUT.at(schema=SCHEMA)(token=attempt.token)
        [(committed, expired)] = yield commit.READ.at(schema=SCHEMA)(token=attempt.token, born_s=4e9)
        return bool(committed and not expired)

    assert run(connection, ask())
    connection.rollback()


# -- Kept, and for how long -------------------------------------------------------------------------------------------


def uuid_of_now(node: Node, age: str = "0 s") -> UUID:
    token = node.value(f"SELECT {commit.NEW.replace('clock_timestamp()', '(clock_timestamp() - %s::interval)')}", age)
    assert isinstance(token, UUID)
    return token


def test_token_is_a_uuid_of_version_7_that_tells_its_time(node: Node, connect: Connect) -> None:
    before = node.value("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    atomically(connect, lambda _: None)
    after = node.value("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    [(token, _)] = tokens(node)
    assert (token.version, token.variant) == (7, "specified in RFC 4122")
    assert before <= token.int >> 80 <= after


@pytest.mark.parametrize("stands", [True, False])
def test_token_older_than_the_retention_is_expired_and_no_guess_is_left_behind(
    node: Node, connect: Connect, stands: bool
) -> None:
    token = uuid_of_now(node, "7 days 1 s")
    if stands:
        node.connection.execute("INSERT INTO mailroom.commit_token VALUES (%s, true)", [token])
    with pytest.raises(TokenExpired, match="7 days") as caught:
        resolve(connect, token)
    assert caught.value.token == token
    assert tokens(node) == [(token, True)] * stands
    assert resolve(connect, uuid_of_now(node, "6 days 23 h")) == "rolled back"


def test_tokens_are_deleted_a_day_after_they_have_expired(node: Node) -> None:
    ages = ["9 days", "8 days 1 min", "7 days 23 h", "0 s"]
    made = [uuid_of_now(node, age) for age in ages]
    for token in made:
        node.connection.execute("INSERT INTO mailroom.commit_token VALUES (%s, true)", [token])
    assert run(node.connection, sweeping_tokens(SCHEMA)) == 2
    assert [token for token, _ in tokens(node)] == made[2:]
    assert run(node.connection, sweeping_tokens(SCHEMA)) == 0


def test_sweep_deletes_the_oldest_first_and_so_many_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "SWEPT_AT_ONCE", 2)
    made = [uuid_of_now(node, f"{days} days") for days in (11, 12, 10)]
    for token in made:
        node.connection.execute("INSERT INTO mailroom.commit_token VALUES (%s, true)", [token])
    assert run(node.connection, sweeping_tokens(SCHEMA)) == 2
    assert [token for token, _ in tokens(node)] == [made[2]]
    assert node.value("SELECT tokens_swept FROM mailroom.node") == made[0]


SWEEP_AHEAD = commit.SWEEP.template.replace("clock_timestamp()", "(clock_timestamp() + interval '10 years')")


def test_token_swept_by_a_clock_that_had_jumped_ahead_is_expired_when_the_clock_is_back(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a transaction that committed would be said to have rolled back."""
    atomically(connect, lambda _: None)
    [(token, _)] = tokens(node)
    monkeypatch.setattr(commit, "SWEEP", Sql(SWEEP_AHEAD, columns=("bigint",)))
    assert run(node.connection, sweeping_tokens(SCHEMA)) == 1
    with pytest.raises(TokenExpired):
        resolve(connect, token)
    atomically(connect, lambda _: None)
    [(later, _)] = tokens(node)
    assert resolve(connect, later) == "committed"


@pytest.mark.parametrize("level", LEVELS)
def test_token_that_is_swept_while_somebody_asks_is_expired(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Whatever the resolver's snapshot was, when it is let in it sees how far the sweep went."""
    atomically(connect, lambda _: None)
    [(token, _)] = tokens(node)
    monkeypatch.setattr(commit, "SWEEP", Sql(SWEEP_AHEAD, columns=("bigint",)))
    sweeper = connect()
    run(sweeper, sweeping_tokens(SCHEMA))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(resolve, partial(connect, options=at_level(level)), token)
        eventually(lambda: node.value(BLOCKED) == 1 or answer.done())
        sweeper.commit()
        with pytest.raises(TokenExpired):
            answer.result()


# -- Many -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # make faults has 300 of them
@pytest.mark.timeout(600)
def test_many_unknown_commits_are_all_resolved_as_the_ledger_says(node: Node) -> None:
    """`make faults` does it with 300, on a server that is durable."""
    counts = run_unknown_commits(node.dsn, unknown=100, seed=20261121)
    assert counts.violations == []
    assert counts.unknown >= 100
    assert 0.2 <= counts.committed / counts.unknown <= 0.8
