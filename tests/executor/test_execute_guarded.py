"""Execute: guarded tables have short batches of few trips, with the same result as one by one."""

from collections.abc import AsyncIterator
from functools import partial
from importlib import import_module
from random import Random
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.errors import LockNotAvailable, SerializationFailure

from dispatcher.delivery.floor import FIRST, ScanStart
from dispatcher.executor.applying import apply as applies
from dispatcher.executor.applying import guarded
from dispatcher.executor.batch.take import reading_oldest_executables
from dispatcher.executor.batch_executor import BatchExecutor
from dispatcher.executor.execution import Execution
from dispatcher.executor.targets.target import reading_targets
from mailroom.sql import runner
from mailroom.testing import execute as execute_in_test
from outbox import Executable, Store
from tests.support.databases import Connect
from tests.support.drivers import SYNC, opened
from tests.support.executing import (
    SCHEMA,
    STORE,
    THINGS,
    dead_of,
    execute,
    execute_all,
    function,
    make_things,
    register,
    sent,
    store_of,
    things_of,
    told_of,
    trigger,
    waiting,
)
from tests.support.node import Node
from tests.support.waiting import WITHIN_S
from tests.support.working import NEVER_S

pytestmark = pytest.mark.both_versions

WRITTEN = "BEFORE INSERT OR UPDATE OR DELETE"


@pytest.fixture(autouse=True)
def _calls_are_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long on this machine: a call that is cut off is the first of the next batch."""
    monkeypatch.setattr(applies, "LATER_WAIT_S", WITHIN_S)


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


async def taken_by(executor: BatchExecutor) -> list[int]:
    """Execute all there is, and return how many executables each transaction took."""
    executions: list[Execution] = []
    while not executions or executions[-1].more:
        executions.append(await executor.execute())
    return [each.taken for each in executions if each.taken]


def guard(node: Node, body: str = "", when: str = WRITTEN) -> None:
    """Make the table, with a trigger that does nothing but `body`."""
    make_things(node.connection)
    trigger(node, when, f"{body} RETURN coalesce(new, old);")


def send(node: Node, executables: list[Executable]) -> None:
    with node.connection.transaction():
        STORE.send_many(node.connection, executables)


def increments(count: int, keys: int = 10) -> list[Executable]:
    return [Executable("increment", nth % keys, target="things", amount=1, id=UUID(int=nth)) for nth in range(count)]


# -- Short ------------------------------------------------------------------------------------------------------------


async def test_batch_ends_when_its_time_is_over_and_what_is_done_stays_done(
    node: Node, session: psycopg.AsyncConnection, connect: Connect
) -> None:
    guard(node)
    send(node, increments(5, keys=5))
    executor = BatchExecutor(session, SCHEMA, bound_s=0)
    user = connect()
    for nth in range(5):
        assert things_of(node.connection) == {key: [None, 1] for key in range(nth)}
        assert len(list(waiting(node.connection))) == 5 - nth
        execution = await executor.execute()
        assert (execution.taken, execution.more) == (1, True)
        user.execute("SELECT FROM app.thing FOR UPDATE NOWAIT")  # it holds nothing
        user.rollback()
    assert things_of(node.connection) == {key: [None, 1] for key in range(5)}


@pytest.mark.parametrize("bound_s", [10, 20, 50])
async def test_time_of_a_batch_is_asked_before_whatever_it_begins(
    node: Node, session: psycopg.AsyncConnection, bound_s: float
) -> None:
    function(node, "nothing", "BEGIN END", "void")
    for _ in range(8):
        sent(node, STORE.call, "nothing")
    seconds = 0.0

    def ten_later() -> float:
        nonlocal seconds
        seconds += 10
        return seconds

    executor = BatchExecutor(session, SCHEMA, bound_s=bound_s, monotonic=ten_later)
    calls = int(bound_s // 10)
    assert (await executor.execute()).taken == calls
    assert len(list(waiting(node.connection))) == 8 - calls


async def test_batch_after_one_that_was_cut_looks_at_no_more_than_it_will_do(
    node: Node, session: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    function(node, "nothing", "BEGIN END", "void")
    send(node, [Executable("call", target="nothing") for _ in range(20)])
    found = []

    def noted(schema: str, *, start: ScanStart, rows: int, max_bytes: int) -> Any:
        found.append(rows)
        return reading_oldest_executables(schema, start=start, rows=rows, max_bytes=max_bytes)

    # The package has a function of the module's name.
    monkeypatch.setattr(import_module("dispatcher.executor.execute"), "reading_oldest_executables", noted)
    assert await taken_by(BatchExecutor(session, SCHEMA, rows=20, bound_s=0)) == [1] * 20
    assert set(found[1:19]) == {2}
    assert found[0] == 20


async def test_executable_before_what_is_not_known_is_not_taken_for_done(
    node: Node, session: psycopg.AsyncConnection
) -> None:
    guard(node)
    unknown = Store(target="nowhere")
    ids = []
    for key in (1, 2):
        ids.append(sent(node, unknown.increment, "a"))
        sent(node, THINGS.increment, key)
        ids.append(sent(node, unknown.increment, "b"))
    assert await taken_by(BatchExecutor(session, SCHEMA, bound_s=0)) == [4, 2]
    assert [id for id, _ in dead_of(node.connection)] == ids
    assert things_of(node.connection) == {1: [None, 1], 2: [None, 1]}


@pytest.mark.parametrize(("left_s", "count"), [(0, 1), (-1, 1), (NEVER_S, 10)])
def test_trip_does_nothing_more_once_the_time_is_over(node: Node, left_s: float, count: int) -> None:
    guard(node)
    send(node, increments(10))
    with node.connection.transaction():
        target = runner.run(node.connection, reading_targets(SCHEMA, {"things"}))["things"]
        oldest = runner.run(node.connection, reading_oldest_executables(SCHEMA, start=FIRST, rows=10, max_bytes=2**20))
        done = runner.run(node.connection, guarded.applying_in_turn(SCHEMA, target, oldest.taken, left_s))
    assert done.count == count
    assert things_of(node.connection) == {key: [None, 1] for key in range(count)}


# -- Waiting for others -----------------------------------------------------------------------------------------------


async def test_row_that_somebody_holds_ends_the_batch_before_it(
    node: Node, session: psycopg.AsyncConnection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applies, "LATER_WAIT_S", 0.05)
    guard(node)
    node.connection.execute("INSERT INTO app.thing SELECT n, null, 0 FROM generate_series(0, 9) AS n")
    other, third = connect(), connect(autocommit=True)
    other.execute("SELECT FROM app.thing WHERE id = 7 FOR UPDATE")
    send(node, increments(20))
    executor = BatchExecutor(session, SCHEMA, bound_s=NEVER_S)
    assert (await executor.execute()).taken == 7
    assert [total for _, (_, total) in sorted(things_of(node.connection).items())] == [1] * 7 + [0] * 3
    third.execute("SELECT FROM app.thing WHERE id <> 7 FOR UPDATE NOWAIT")
    # The first of its batch is waited for, as long as the session says.
    await session.execute("SET lock_timeout = '50ms'")
    with pytest.raises(LockNotAvailable):
        await BatchExecutor(session, SCHEMA, bound_s=NEVER_S).execute()
    other.rollback()
    assert await taken_by(executor) == [13]
    assert {total for _, total in things_of(node.connection).values()} == {2}
    assert dead_of(node.connection) == []


@pytest.mark.parametrize("state", ["40001", "40P01"])
@pytest.mark.parametrize("kind", ["guarded", "call"])
async def test_conflict_repeats_nothing_that_was_done_before_it(
    node: Node, session: psycopg.AsyncConnection, state: str, kind: str
) -> None:
    # A sequence counts tries, since no roll-back takes it back.
    node.connection.execute("CREATE SEQUENCE public.tries; CREATE SEQUENCE public.others")
    fails = f"IF nextval('public.tries') <= 2 THEN RAISE 'conflict' USING ERRCODE = '{state}'; END IF;"
    counts = "PERFORM nextval('public.others');"
    if kind == "guarded":
        guard(node, f"IF new.id = 5 THEN {fails} ELSE {counts} END IF;", "BEFORE INSERT")
        send(node, increments(8))
        failures = 0
    else:
        function(node, "conflicts", f"BEGIN {fails} END", "void")
        function(node, "counts", f"BEGIN {counts} END", "void")
        names = ["counts"] * 5 + ["conflicts"] + ["counts"] * 2
        send(node, [Executable("call", target=name) for name in names])
        failures = 1
    executor = BatchExecutor(session, SCHEMA, bound_s=NEVER_S)
    assert (await executor.execute()).taken == 5
    for _ in range(failures):  # the first of its batch: then nothing is done that could stay
        with pytest.raises(psycopg.OperationalError):
            await executor.execute()
    assert await taken_by(executor) == [3]
    assert node.value("SELECT last_value FROM public.others") == 7
    assert dead_of(node.connection) == []


async def test_call_that_is_not_the_first_is_stopped_sooner_and_called_again_with_all_its_time(
    node: Node, session: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applies, "LATER_WAIT_S", 0.05)
    waits = "LOOP EXIT WHEN EXISTS (SELECT FROM app.told); PERFORM pg_sleep(0.001); END LOOP;"
    function(node, "waits", f"BEGIN {waits} RETURN current_setting('statement_timeout'); END", "text", timeout_s=60)
    node.connection.execute("CREATE TABLE app.told ()")
    sent(node, STORE.increment, "n")
    sent(node, STORE.call, "waits", notify="outcomes")
    executor = BatchExecutor(session, SCHEMA, bound_s=NEVER_S)
    assert (await executor.execute()).taken == 1
    assert store_of(node.connection) == {"n": 1}
    node.connection.execute("INSERT INTO app.told DEFAULT VALUES")
    assert await taken_by(executor) == [1]
    assert [told["result"] for *_, told in told_of(node.connection)] == ["1min"]
    assert dead_of(node.connection) == []


def test_executable_that_somebody_removes_meanwhile_is_not_executed(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    send(node, increments(3))
    connection = connect(autocommit=True)

    def remove() -> None:
        if connection.execute("SELECT count(*) FROM app.thing").fetchone() == (3,):
            node.connection.execute("DELETE FROM mailroom.outbox_executable WHERE position = 2")

    with pytest.raises(SerializationFailure):
        execute_all(connection, before=remove)
    assert things_of(node.connection) == {}
    execute(node)
    assert things_of(node.connection) == {0: [None, 1], 2: [None, 1]}


@pytest.mark.parametrize("kind", ["all", "later", "itself"])
async def test_call_may_remove_executables(node: Node, session: psycopg.AsyncConnection, kind: str) -> None:
    which = {"all": "true", "later": "key LIKE 'b%'", "itself": "operation = 'call'"}[kind]
    function(node, "removes", f"BEGIN DELETE FROM mailroom.outbox_executable WHERE {which}; END", "void")
    function(node, "nothing", "BEGIN END", "void")
    sent(node, STORE.increment, "a")
    sent(node, STORE.call, "removes")
    sent(node, STORE.call, "nothing")
    for key in ("a1", "b1", "b2", "a2"):
        sent(node, STORE.increment, key)
    await taken_by(BatchExecutor(session, SCHEMA, bound_s=NEVER_S))
    left = {"all": "", "later": "a1 a2", "itself": "a1 b1 b2 a2"}[kind]
    assert store_of(node.connection) == dict.fromkeys(["a", *left.split()], 1)
    assert list(waiting(node.connection)) == []


# -- Few trips --------------------------------------------------------------------------------------------------------


def trips(node: Node) -> int:
    """Execute, and return how many statements that took."""
    count = 0

    def before() -> None:
        nonlocal count
        count += 1

    execute_all(node.connection, before=before)
    return count


@pytest.mark.parametrize("bad", ["", "IF new.id = 50 THEN RAISE 'not 50'; END IF;"])
def test_guarded_operations_take_few_trips_one_bad_among_them_or_not(node: Node, bad: str) -> None:
    guard(node, bad, "BEFORE INSERT")
    few = trips_of(node, 13)  # one, ten, and the rest
    node.connection.execute("DELETE FROM app.thing")
    assert trips_of(node, guarded.OPERATIONS) <= few + (20 if bad else 0)


def trips_of(node: Node, count: int) -> int:
    send(node, increments(count, keys=count))
    return trips(node)


def test_names_with_quotes_and_dollars_take_few_trips_too(node: Node) -> None:
    node.connection.execute('CREATE SCHEMA "it\'s"')
    table = '"it\'s"."$clear$ g$1 t"'
    node.connection.execute(
        f'CREATE TABLE {table} ("g\'s" text PRIMARY KEY, touched bytea, watched bigint CHECK (watched < 3))'.encode()
    )
    register(node.connection, "odd", "it's.$clear$ g$1 t", "g's", "touched", "watched")
    odd = Store(target="odd")

    def round_of(count: int) -> int:
        for nth in range(count):
            sent(node, odd.put, f"k'{nth}", b"v'\\", expected=b"")
            sent(node, odd.increment, f"k'{nth}")
        return trips(node)

    few = round_of(7)
    node.connection.execute(f"DELETE FROM {table}".encode())
    assert round_of(20) <= few
    assert node.value(f"SELECT count(*) FROM {table} WHERE touched = 'v''\\\\' AND watched = 1") == 20


# -- As one by one ----------------------------------------------------------------------------------------------------

WATCHED_NAMES = "INSERT INTO app.seen (id, body, total) VALUES (new.id, new.body, new.total);"
TRIGGERS = {
    "nothing": (WRITTEN, "RETURN coalesce(new, old);"),
    "raises": ("BEFORE INSERT OR UPDATE", "IF new.total % 3 = 2 THEN RAISE 'no %', new.total; END IF; RETURN new;"),
    "skips": ("BEFORE INSERT OR UPDATE", "IF new.total % 3 = 2 THEN RETURN null; END IF; RETURN new;"),
    "keeps": ("BEFORE DELETE", "IF old.id % 2 = 0 THEN RETURN null; END IF; RETURN old;"),
    "changes": ("BEFORE INSERT OR UPDATE", "new.total := least(new.total, 3); new.body := 'theirs'; RETURN new;"),
    "notes": ("AFTER INSERT OR UPDATE", f"{WATCHED_NAMES} RETURN null;"),
    "sums": (
        "BEFORE INSERT OR UPDATE",
        "INSERT INTO app.seen (id, total) SELECT new.id, sum(total) FROM app.thing; RETURN new;",
    ),
    "writes another": (
        "AFTER INSERT OR UPDATE",
        (
            "IF pg_trigger_depth() = 1 THEN UPDATE app.thing SET total = total + 1 WHERE id = new.id % 4 + 1; END IF;"
            " RETURN null;"
        ),
    ),
    "deletes another": (
        "AFTER UPDATE",
        "IF pg_trigger_depth() = 1 THEN DELETE FROM app.thing WHERE id = new.id % 4 + 1; END IF; RETURN null;",
    ),
    "leaves a setting": (
        "BEFORE INSERT OR UPDATE",
        f"{WATCHED_NAMES} IF new.total % 3 = 2 THEN SET session_replication_role = replica; END IF; RETURN new;",
    ),
    "defers": (
        "BEFORE INSERT OR UPDATE",
        "SET CONSTRAINTS ALL DEFERRED; INSERT INTO app.part VALUES (new.total); RETURN new;",
    ),
}


@pytest.mark.parametrize("name", ["changes", "notes", "leaves a setting", "defers"])
def test_batch_comes_to_what_one_by_one_comes_to(node: Node, name: str) -> None:
    check_batch(node, name, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRIGGERS)
@pytest.mark.parametrize("seed", range(3))
def test_any_batch_comes_to_what_one_by_one_comes_to(
    node: Node, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed == 2:
        monkeypatch.setattr(guarded, "MAX_BYTES", 20)
    check_batch(node, name, seed)


def check_batch(node: Node, name: str, seed: int) -> None:
    """Execute a program on a table with this trigger, one by one and in one batch."""
    make_things(node.connection)
    node.connection.execute(
        "CREATE TABLE app.seen (nth bigserial, id integer, body text, total bigint);"
        "CREATE TABLE app.part (thing integer REFERENCES app.thing DEFERRABLE INITIALLY DEFERRED)"
    )
    trigger(node, *TRIGGERS[name])
    executables = program(Random(seed))
    found = []
    for rows in (1, 1_000):
        node.connection.execute("TRUNCATE app.thing, app.part, app.seen RESTART IDENTITY")
        node.connection.execute("TRUNCATE mailroom.dead_letter, mailroom.outbox")
        send(node, executables)
        execute(node, rows=rows)
        assert list(waiting(node.connection)) == []
        seen = node.rows("SELECT id, body, total FROM app.seen ORDER BY nth")
        parts = node.rows("SELECT thing FROM app.part ORDER BY thing")
        found.append((things_of(node.connection), dead_of(node.connection), told_of(node.connection), seen, parts))
    assert found[0] == found[1]


def program(random: Random) -> list[Executable]:
    """Return operations on few keys, some of which cannot be applied."""
    made: list[Any] = [
        partial(Executable, "increment", amount=1),
        partial(Executable, "increment", amount=2),
        partial(Executable, "increment", amount=40_000),
        partial(Executable, "put", value=b"v"),
        partial(Executable, "put", value=b"w", expected=b"v"),
        partial(Executable, "put", value=b"x", expected=b""),
        partial(Executable, "put", value=b"\xff"),
        partial(Executable, "delete"),
    ]
    weights = [8, 4, 1, 3, 2, 1, 1, 2]
    return [
        make(key=random.choice(["1", "2", "3", "4", "4", "x"]), target="things", id=UUID(int=nth), notify="outcomes")
        for nth, make in enumerate(random.choices(made, weights, k=60))
    ]


def test_trigger_of_statements_sees_each_operation(node: Node) -> None:
    guard(node)
    node.connection.execute(
        "CREATE TABLE app.seen (what text);"
        "CREATE FUNCTION app.saw() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO app.seen VALUES (tg_op); RETURN null; END $$;"
        "CREATE TRIGGER saw AFTER INSERT OR UPDATE OR DELETE ON app.thing EXECUTE FUNCTION app.saw()"
    )
    for key in ("1", "2", "1"):
        sent(node, THINGS.increment, key)
    sent(node, THINGS.delete, "1")
    sent(node, THINGS.delete, "1")
    execute(node)
    assert [what for (what,) in node.rows("SELECT what FROM app.seen")] == [
        "INSERT", "INSERT", "UPDATE", "DELETE", "DELETE"
    ]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_guarded_operations_are_applied_on_a_connection_of_any_driver(node: Node, kind: str) -> None:
    guard(node)
    send(node, [*increments(20), Executable("put", "1", target="things", value=b"v:w'\\")])
    with opened(node.dsn, kind) as connection:
        assert execute_in_test(connection) == 21
        connection.commit()
    assert things_of(node.connection) == {key: ["v:w'\\" if key == 1 else None, 2] for key in range(10)}
