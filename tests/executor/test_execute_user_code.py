"""Execute: what users' functions and triggers leave in the session affects nothing after them."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

from dispatcher.daemon import Executor
from dispatcher.delivery.floor import FIRST
from dispatcher.executor.applying import apply as applies
from dispatcher.executor.batch.take import OLDEST
from dispatcher.executor.batch_executor import BatchExecutor
from dispatcher.executor.execution import Execution
from mailroom.sql.operation import Operation, Sql
from mailroom.testing import execute as execute_in_test
from outbox import Executable
from tests.executor.test_executor import EXECUTOR, waits
from tests.support.databases import Connect
from tests.support.executing import (
    SCHEMA,
    STORE,
    THINGS,
    dead_of,
    execute,
    execute_all,
    function,
    make_things,
    sent,
    store_of,
    things_of,
    told_of,
    trigger,
    waiting,
)
from tests.support.lanes import running
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, end, eventually_async, wait_until_blocked

pytestmark = pytest.mark.both_versions


@pytest.fixture(autouse=True)
def _calls_are_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long on this machine: a call that is cut off is the first of the next batch."""
    monkeypatch.setattr(applies, "LATER_WAIT_S", WITHIN_S)


@pytest.fixture
async def executor(dsn: str) -> AsyncIterator[BatchExecutor]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield BatchExecutor(connection, SCHEMA, monotonic=lambda: 0)


# -- Settings ---------------------------------------------------------------------------------------------------------

# What a function may do to the session, and what tells of it.
LEFT = {
    "role": ("SET LOCAL ROLE guest", "current_setting('role')"),
    "role of the session": ("SET ROLE guest", "current_user"),
    "authorization": ("SET LOCAL SESSION AUTHORIZATION guest", "session_user"),
    "authorization of the session": ("SET SESSION AUTHORIZATION guest", "session_user"),
    "triggers": ("SET LOCAL session_replication_role = replica", "current_setting('session_replication_role')"),
    "triggers of the session": (
        "SET session_replication_role = replica",
        "current_setting('session_replication_role')",
    ),
    "search_path": ("SET LOCAL search_path = app", "current_setting('search_path')"),
    "row security": ("SET LOCAL row_security = off", "current_setting('row_security')"),
    "timeout": ("SET LOCAL statement_timeout = '3h'", "current_setting('statement_timeout')"),
    "timeout of the session": ("SET statement_timeout = '3h'", "current_setting('statement_timeout')"),
    "lock_timeout": ("SET lock_timeout = '1ms'", "current_setting('lock_timeout')"),
    "zone": ("SET LOCAL TimeZone = 'Asia/Tokyo'", "current_setting('TimeZone')"),
    "reset": ("RESET ALL", "current_setting('TimeZone')"),
    "own": ("PERFORM set_config('app.tenant', 'theirs', true)", "coalesce(current_setting('app.tenant', true), '')"),
    "own of the session": (
        "PERFORM set_config('app.tenant', 'theirs', false)",
        "coalesce(current_setting('app.tenant', true), '')",
    ),
    "bell": (
        "PERFORM set_config('mailroom.notify', 'off', false)",
        "coalesce(current_setting('mailroom.notify', true), '')",
    ),
    "read only": ("SET TRANSACTION READ ONLY", "current_setting('transaction_read_only')"),
    "temporary table": ("CREATE TEMP TABLE left_behind ()", "(to_regclass('pg_temp.left_behind') IS NULL)::text"),
    "table until the commit": (
        "CREATE TEMP TABLE left_behind () ON COMMIT DROP",
        "(to_regclass('pg_temp.left_behind') IS NULL)::text",
    ),
    "cursor": (
        "EXECUTE 'DECLARE left_behind CURSOR WITH HOLD FOR SELECT 1'",
        "(SELECT count(*) FROM pg_cursors WHERE name = 'left_behind')::text",
    ),
    "listen": ("LISTEN left_behind", "(SELECT count(*) FROM pg_listening_channels())::text"),
    "locks": (
        (
            "PERFORM pg_advisory_lock(n), pg_advisory_lock(n), pg_advisory_lock_shared(-7, 2147483647), "
            "pg_advisory_lock(7, 5) FROM (SELECT -7) AS l (n)"
        ),
        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())::text",
    ),
}


def guest(node: Node) -> None:
    node.connection.execute(
        "DO $$ BEGIN CREATE ROLE guest; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
    )


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["called", "asked"])
async def test_call_leaves_the_session_as_it_found_it(node: Node, executor: BatchExecutor, asks: str) -> None:
    guest(node)
    wrong = []
    for nth, (left, (leaves, looks)) in enumerate(LEFT.items()):
        function(node, f"looks_{nth}", f"BEGIN RETURN {looks}; END", "text")
        function(node, f"leaves_{nth}", f"BEGIN {leaves}; RETURN 'left'; END", "text")
        for name in ("looks", "leaves", "looks"):
            sent(node, STORE.increment, "n")  # the first of a batch has other timeouts
            sent(node, STORE.call, f"{name}_{nth}", notify="outcomes")
            if asks == "asked":
                await executor.drain()
        await executor.drain()
        before, done, after = [told.get("result") for *_, told in told_of(node.connection)[-3:]]
        wrong += [] if (done, after) == ("left", before) else [(left, before, done, after)]
    assert wrong == []
    assert store_of(node.connection) == {"n": 3 * len(LEFT)}
    assert dead_of(node.connection) == []


async def test_call_without_the_right_to_set_it_back_leaves_nothing_either(node: Node, connect: Connect) -> None:
    guest(node)
    node.connection.execute("CREATE SCHEMA app")
    function(node, "leaves", "BEGIN SET session_replication_role = replica; RETURN 'left'; END", "text")
    function(node, "looks", "BEGIN RETURN current_setting('session_replication_role'); END", "text")
    node.connection.execute("ALTER FUNCTION app.leaves SECURITY DEFINER")
    node.connection.execute("GRANT USAGE ON SCHEMA mailroom, app TO guest")
    node.connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO guest")
    node.connection.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA mailroom TO guest")
    for name in ("leaves", "looks"):
        sent(node, STORE.call, name, notify="outcomes")
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True, options="-c role=guest") as connection:
        await BatchExecutor(connection, SCHEMA).drain()
    assert [told.get("result") for *_, told in told_of(node.connection)] == ["left", "origin"]


def test_settings_of_a_test_s_own_connection_are_what_they_were(node: Node, connect: Connect) -> None:
    function(node, "leaves", "BEGIN SET search_path = app; SET LOCAL work_mem = '5MB'; END", "void")
    sent(node, STORE.call, "leaves")
    connection = connect()
    connection.execute("SET search_path = public; SET app.tenant = 'mine'; SET LOCAL statement_timeout = '17s'")
    assert execute_in_test(connection) == 1
    names = ("search_path", "app.tenant", "statement_timeout", "work_mem")
    shown = [connection.execute(f"SHOW {name}".encode()).fetchone() for name in names]
    assert shown == [("public",), ("mine",), ("17s",), node.connection.execute("SHOW work_mem").fetchone()]
    connection.commit()
    assert connection.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_trigger_of_a_table_leaves_nothing_to_the_next_operation(node: Node) -> None:
    guest(node)
    make_things(node.connection)
    node.connection.execute("CREATE TABLE app.seen (what text)")
    for left in ("role", "authorization", "triggers", "row security", "timeout of the session", "zone"):
        leaves, looks = LEFT[left]
        body = f"INSERT INTO app.seen VALUES ({looks}); {leaves}; RETURN coalesce(new, old);"
        trigger(node, "BEFORE INSERT OR UPDATE OR DELETE", body)
        before = node.value(f"SELECT {looks}")
        for key in ("1", "2", "1"):
            sent(node, THINGS.increment, key, notify="outcomes")
        sent(node, THINGS.delete_range, "1", "2")
        sent(node, THINGS.increment, "3", notify="outcomes")
        execute(node)
        expected = "UTC" if left == "zone" else before
        assert node.rows("SELECT DISTINCT what FROM app.seen") == [(expected,)], left
        assert dead_of(node.connection) == []
        assert len(told_of(node.connection)) == 4
        node.connection.execute(
            "DROP FUNCTION app.on_thing CASCADE; TRUNCATE app.thing, app.seen; DELETE FROM mailroom.outbox"
        )


async def test_session_is_cleared_after_triggers_too(node: Node, executor: BatchExecutor) -> None:
    make_things(node.connection)
    trigger(node, "BEFORE INSERT", f"{LEFT['own of the session'][0]}; {LEFT['locks'][0]}; RETURN new;")
    sent(node, THINGS.increment, "1")
    await executor.drain()
    session = executor._connection
    for _, looks in (LEFT["own of the session"], LEFT["locks"]):
        cursor = await session.execute(f"SELECT {looks}".encode())
        assert await cursor.fetchone() in [("",), ("0",)]


# -- Prepared statements ----------------------------------------------------------------------------------------------

DEALLOCATES = [
    "EXECUTE 'DEALLOCATE ALL'",
    "EXECUTE (SELECT concat('SELECT 1', string_agg('; DEALLOCATE ' || name, '')) FROM pg_prepared_statements)",
    "EXECUTE 'DISCARD PLANS'; EXECUTE 'DISCARD TEMP'; EXECUTE 'DISCARD SEQUENCES'",
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("deallocates", DEALLOCATES, ids=["all", "by name", "discard"])
@pytest.mark.parametrize("where", ["function", "failing function", "trigger"])
async def test_user_code_that_deallocates_statements_is_applied_and_blamed_for_nothing(
    node: Node, executor: BatchExecutor, deallocates: str, where: str
) -> None:
    make_things(node.connection)
    if where == "trigger":
        trigger(node, "BEFORE INSERT OR UPDATE", f"{deallocates}; RETURN new;")
    fails = "PERFORM 1 / 0;" if where == "failing function" else ""
    function(node, "deallocates", f"BEGIN {deallocates}; {fails} END", "void")
    for _ in range(4):
        sent(node, STORE.increment, "n")
        if where == "trigger":
            sent(node, THINGS.increment, "1")
        else:
            sent(node, STORE.call, "deallocates")
        sent(node, STORE.increment, "n")
        await executor.drain()
    assert not executor._connection.closed
    assert store_of(node.connection) == {"n": 8}
    assert list(waiting(node.connection)) == []
    assert len(dead_of(node.connection)) == (4 if fails else 0)
    assert "26000" not in " ".join(reason for _, reason in dead_of(node.connection))


async def test_user_code_that_misses_a_statement_of_its_own_is_refused(node: Node, executor: BatchExecutor) -> None:
    function(node, "misses", "BEGIN EXECUTE 'EXECUTE nothing'; END", "void")
    sent(node, STORE.call, "misses")
    sent(node, STORE.increment, "n")
    await executor.drain()
    assert "26000" in str(dead_of(node.connection))
    assert store_of(node.connection) == {"n": 1}


async def test_session_that_could_not_be_cleared_is_closed(
    node: Node, executor: BatchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> Operation[None]:
        yield Sql("SELECT 1 / 0").at()()

    function(node, "leaves", f"BEGIN {LEFT['own of the session'][0]}; END", "void")
    sent(node, STORE.call, "leaves")
    monkeypatch.setattr("dispatcher.executor.batch_executor.clearing_session", failing)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await executor.execute()
    assert executor._connection.closed
    assert list(waiting(node.connection)) == []


async def executions_of(executor: BatchExecutor) -> list[int]:
    """Execute all there is, and return how many executables each transaction took."""
    executions: list[Execution] = []
    while not executions or executions[-1].more:
        executions.append(await executor.execute())
    return [each.taken for each in executions if each.taken]


async def test_calls_share_a_transaction_of_a_session_of_ours(node: Node, executor: BatchExecutor) -> None:
    function(node, "nothing", "BEGIN END", "void")
    for _ in range(3):
        sent(node, STORE.increment, "n")
        sent(node, STORE.call, "nothing")
        sent(node, STORE.call, "nothing")
    assert await executions_of(executor) == [9]
    assert store_of(node.connection) == {"n": 3}


async def test_call_is_the_last_of_its_transaction_in_a_session_that_may_not_be_reset(node: Node) -> None:
    function(node, "nothing", "BEGIN END", "void")
    for _ in range(2):
        sent(node, STORE.increment, "n")
        sent(node, STORE.call, "nothing")
        sent(node, STORE.call, "nothing")
    assert [each.taken for each in execute(node) if each.taken] == [2, 1, 2, 1]


@pytest.mark.parametrize("ends", ["pg_advisory_lock(-7)", "pg_advisory_xact_lock(-7)", "1 / 0"])
async def test_call_is_the_last_of_its_transaction_if_it_leaves_a_lock_or_fails(
    node: Node, executor: BatchExecutor, ends: str
) -> None:
    function(node, "nothing", "BEGIN END", "void")
    function(node, "ends", f"BEGIN PERFORM pg_advisory_lock(-8), {ends}; END", "void")
    for name in ("nothing", "ends", "nothing", "nothing"):
        sent(node, STORE.call, name)
    assert await executions_of(executor) == [2, 2]
    [(pid,)] = await (await executor._connection.execute("SELECT pg_backend_pid()")).fetchall()
    assert node.rows("SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", pid) == []


def test_taking_does_not_read_what_stands_behind_a_barrier(node: Node) -> None:
    with node.connection.transaction():
        STORE.send_many(node.connection, [Executable("delete_range") for _ in range(200)])
    node.connection.execute("VACUUM ANALYZE mailroom.outbox_executable")
    oldest = OLDEST.at(schema=SCHEMA)
    with node.connection.transaction(force_rollback=True):
        node.connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        explained = "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + oldest.sql
        [(plan,)] = node.connection.execute(explained, {**FIRST.values(), "rows": 10_000, "bytes": 2**25}).fetchall()
    assert max(rows_of(plan[0]["Plan"])) <= 2


def rows_of(plan: dict[str, Any]) -> list[int]:
    """Return how many rows each node of a plan gave."""
    return [int(plan["Actual Rows"]), *(rows for child in plan.get("Plans", ()) for rows in rows_of(child))]


# -- Cancelled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
@pytest.mark.parametrize("what", ["increment", "delete_range", "call"])
def test_executable_that_was_cancelled_is_not_to_blame(node: Node, connect: Connect, how: str, what: str) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, null, 1)")
    function(node, "adds", "BEGIN UPDATE app.thing SET total = total + 5; END", "void", timeout_s=300)
    match what:
        case "increment":
            sent(node, THINGS.increment, "1", 5)
        case "delete_range":
            sent(node, THINGS.delete_range, "1")
        case _:
            sent(node, STORE.call, "adds")
    sent(node, STORE.increment, "n")
    other, session = connect(), connect(autocommit=True)
    other.execute("SELECT FROM app.thing FOR UPDATE")
    if how == "timeout" and what != "call":  # which has its own
        session.execute("SET statement_timeout = '50ms'")
    with ThreadPoolExecutor(1) as thread:
        executed = thread.submit(execute_all, session)
        if how == "cancelled" or what == "call":
            wait_until_blocked(node.connection, session.info.backend_pid)
            node.connection.execute("SELECT pg_cancel_backend(%s)", [session.info.backend_pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            executed.result()
    end(session, node.connection)
    assert dead_of(node.connection) == []
    assert [operation for _, operation in waiting(node.connection)] == [what, "increment"]
    other.rollback()
    execute(node)
    assert things_of(node.connection) == ({} if what == "delete_range" else {1: [None, 6]})
    assert (dead_of(node.connection), store_of(node.connection)) == ([], {"n": 1})


async def test_cancelled_executor_goes_on_in_its_session(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Executor, "_session", {**Executor._session, "lock_timeout": "0"})  # so it waits when cancelled
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, null, 1)")
    async with running(Executor(node.dsn, poll_interval_s=0.05)):
        await eventually_async(lambda: len(node.sessions(EXECUTOR)) == 2)
        before = set(node.sessions(EXECUTOR))
        other = connect()
        other.execute("SELECT FROM app.thing FOR UPDATE")
        sent(node, THINGS.increment, "1", 5)
        for nth in (1, 2):
            await eventually_async(lambda: waits(node))
            node.rows(
                "SELECT pg_cancel_backend(pid) FROM unnest(%s) AS s (pid) WHERE cardinality(pg_blocking_pids(pid)) > 0",
                [*before],
            )
            await eventually_async(partial(lambda nth: caplog.text.count("a batch was held up") >= nth, nth))
        other.rollback()
        await eventually_async(lambda: things_of(node.connection) == {1: [None, 6]})
        assert set(node.sessions(EXECUTOR)) == before
    assert dead_of(node.connection) == []
