"""Execute, by a model: random programs, killed between any two statements, have the result of one after another."""

from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from dispatcher.delivery.deliver import DELIVERY_SESSION
from dispatcher.executor.applying import delete_range as ranges
from outbox import Executable
from tests.support.databases import Connect
from tests.support.executing import (
    LARGEST,
    SMALLEST,
    STORE,
    UNREGISTERED,
    Failed,
    Model,
    Things,
    books_of,
    check_equal,
    execute_all,
    make_things,
)
from tests.support.waiting import eventually

BEGAN = datetime(2026, 7, 1, 12, 0, 30, tzinfo=UTC)
NAMES = ("store", "accounting", "outbox", "outbox_executable", "dead_letter", "executable_cursor")
TABLES = ("app.thing", *(f"mailroom.{name}" for name in NAMES))
TWICE = """
CREATE FUNCTION app.twice(given jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE found bigint;
BEGIN
    UPDATE app.thing SET total = total * 2 WHERE id = (given->>'id')::integer RETURNING total INTO found;
    IF found > 1000 THEN RAISE 'too many of %', given->>'id'; END IF;
    RETURN found;
END $$
"""


@pytest.fixture(params=["folded", "guarded"])
def node(connect: Connect, request: pytest.FixtureRequest) -> Callable[[], Model]:
    """Return what empties the node and returns the model of it, with a table of a user's and a function."""
    guarded = request.param == "guarded"
    connection = connect(autocommit=True)
    make_things(connection, "total <> 13" if guarded else "true")
    connection.execute(TWICE)
    connection.execute("INSERT INTO mailroom.executable_function VALUES ('twice', 'app', 'twice')")

    def emptied() -> Model:
        # Not by TRUNCATE, which makes new files.
        for table in TABLES:
            connection.execute(f"DELETE FROM {table}".encode())

        def check(entry: list[Any]) -> str | None:
            return "CheckViolation (23514) thing_check thing" if guarded and entry[1] == 13 else None

        things = Things(check=check)
        model = Model(things)

        def twice(arguments: Any) -> int | None:
            entry = things.rows.get(int(arguments["id"]))
            if entry is None:
                return None
            total = entry[1] * 2
            if total > 2**15 - 1 or total < -(2**15):
                raise Failed("NumericValueOutOfRange (22003)")
            if reason := check([entry[0], total]):
                raise Failed(reason)
            if total > 1000:
                raise Failed(f"RaiseException (P0001) too many of {arguments['id']}")
            entry[1] = total
            return int(total)

        model.functions["twice"] = twice
        return model

    return emptied


# -- Random programs --------------------------------------------------------------------------------------------------

KEYS = ("1", "2", "3", "7", "10", "30")
VALUES = (b"v", b"w", b"x", b"", b"\xff")
AMOUNTS = (1, 1, 2, 5, 6, 7, -3, 40, 2**14, LARGEST, SMALLEST)


def program(random: Random, size: int) -> list[Executable]:
    """Return operations of all kinds over few keys, most of which can be applied."""
    return [_operation(random, nth) for nth in range(size)]


def _operation(random: Random, nth: int) -> Executable:
    told: dict[str, Any] = {"id": UUID(int=nth + 1), "notify": random.choice([None, None, "outcomes"])}
    key, target = random.choice(KEYS), random.choice(["store", "things"])
    act = random.choices(
        ["put", "increment", "delete", "delete_range", "account", "call", "unknown"], [25, 35, 8, 4, 22, 4, 2]
    )[0]
    match act:
        case "put":
            expected = random.choice([None, None, None, b"", *VALUES])
            return Executable("put", key, target, value=random.choice(VALUES), expected=expected, **told)
        case "increment":
            return Executable("increment", key, target, amount=random.choice(AMOUNTS), **told)
        case "delete":
            return Executable("delete", random.choice([key, "none"]), target, **told)
        case "delete_range":
            start, end = random.choice([None, *KEYS]), random.choice([None, *KEYS])
            limit = random.choice([None, None, 1, 2, 3])
            return Executable("delete_range", start, target, end_key=end, row_limit=limit, **told)
        case "account":
            path = "/".join(random.choices("abc", k=random.randint(1, 4)))
            amount, size = random.choice([1, 1, 1, 2, LARGEST, SMALLEST]), random.choice([0, 10, 100, LARGEST])
            at = BEGAN + timedelta(seconds=random.choice([0, 29, 30, 61]))
            return Executable("account", path, "accounting", amount=amount, bytes=size, at=at, **told)
        case "call":
            return Executable("call", None, "twice", arguments={"id": key}, **told)
        case _:
            return Executable("increment", key, "nowhere", amount=1, **told)


class Killer:
    """Has the server end a session before a statement: after each number of statements in `gaps`."""

    def __init__(self, observer: psycopg.Connection[TupleRow], gaps: Iterable[int] = ()) -> None:
        self.kills = 0
        self.connection = observer
        self._observer = observer
        self._gaps = iter(gaps)
        self._left = next(self._gaps, -1)

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = next(self._gaps, -1)
            self.kill()

    def kill(self) -> None:
        self.kills += 1
        self._observer.execute("SELECT pg_terminate_backend(%s)", [self.connection.info.backend_pid])
        eventually(self._is_gone)

    def _is_gone(self) -> bool:
        rows = self._observer.execute(
            "SELECT FROM pg_stat_get_activity(%s)", [self.connection.info.backend_pid]
        ).fetchall()
        return not rows


class KillerOfEach(Killer):
    """Has the server end the session of each transaction before its first statement, its second and so on."""

    def __init__(self, observer: psycopg.Connection[TupleRow]) -> None:
        super().__init__(observer)
        self._passed = self._allowed = 0
        self._killed = False

    def __call__(self) -> None:
        if self.connection.info.transaction_status is TransactionStatus.IDLE:  # it is about to begin
            self._allowed = self._allowed + 1 if self._killed else 0
            self._killed, self._passed = False, 0
        if self._passed == self._allowed:
            self._killed = True
            self.kill()
        self._passed += 1


def execute_killed(dsn: str, killer: Killer, rows: int) -> None:
    """Execute all there is, on a new connection whenever the one before was killed."""
    while True:
        kills = killer.kills
        # Closed only: psycopg's own `with` commits first, which fails where the loss broke off a statement on its way.
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            killer.connection = connection
            try:
                execute_all(connection, before=killer, rows=rows)
            except psycopg.OperationalError:
                assert killer.kills > kills  # two with a gap of 1: before the ROLLBACK of what was killed
                continue
            return


def send(connection: psycopg.Connection[TupleRow], executables: list[Executable]) -> None:
    with connection.transaction():
        STORE.send_many(connection, executables)


def test_model_is_not_trivial(node: Callable[[], Model]) -> None:
    model = node()
    model.functions["twice"] = lambda arguments: None
    model.apply(program(Random(1), 600))
    reasons = {reason for _, reason in model.dead}
    assert UNREGISTERED in reasons
    assert len(reasons) >= 8
    assert {(status, event) for _, status, event, _ in model.replies} == {
        *((200, event) for event in ("C", "U", "D", None)),
        (409, None),
        (500, None),
    }
    assert model.store
    assert model.books
    assert model.things is not None
    assert model.things.rows


# Not shrunk: a program is made of a seed, and a smaller one is another program.
@pytest.mark.slow
@pytest.mark.sample(1)
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_random_programs_that_are_killed_equal_the_model(
    dsn: str, connect: Connect, node: Callable[[], Model], data: st.DataObject
) -> None:
    executables = program(Random(data.draw(st.integers(0, 2**32))), data.draw(st.integers(1, 400)))
    rows = data.draw(st.sampled_from([1, 2, 7, 50, 1_000]))
    gaps = data.draw(st.lists(st.integers(1, 60), max_size=15))
    model = node()
    model.apply(executables)
    with connect(autocommit=True) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "RANGE_ROWS", 2)
        send(connection, executables)
        execute_killed(dsn, Killer(connection, gaps), rows=rows)
        check_equal(connection, model)


def small_program() -> list[Executable]:
    """All operations: several batches of 4, with calls and a range of several steps between them."""
    parts: list[dict[str, Any]] = [
        {"operation": "put", "key": "1", "value": b"v", "notify": "outcomes"},
        {"operation": "increment", "key": "2", "amount": 1},
        {"operation": "increment", "key": "2", "amount": LARGEST, "notify": "outcomes"},
        {"operation": "put", "key": "3", "value": b"v", "expected": b"w"},
        {"operation": "put", "key": "3", "value": b"v", "expected": b""},
        *({"operation": "increment", "key": key, "target": "things", "amount": 5} for key in ("1", "2", "3")),
        {"operation": "call", "target": "twice", "arguments": {"id": "1"}, "notify": "outcomes"},
        {"operation": "account", "key": "a/b", "target": "accounting", "amount": 1, "bytes": 2, "at": BEGAN},
        {"operation": "delete_range", "target": "things", "key": "1", "notify": "outcomes"},
        {"operation": "increment", "key": "2", "target": "things", "amount": 13, "notify": "outcomes"},
        {"operation": "call", "target": "twice", "arguments": {"id": "30000000000"}},
        {"operation": "delete", "key": "1"},
    ]
    return [Executable(**each, id=UUID(int=nth)) for nth, each in enumerate(parts, start=1)]


@pytest.mark.slow
@pytest.mark.sample(1)
def test_killed_before_each_statement_in_turn_it_equals_the_model(
    dsn: str, connect: Connect, node: Callable[[], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "RANGE_ROWS", 1)
    model = node()
    # What is not an integer to PostgreSQL is none to the model.
    model.functions["twice"] = partial(_fails_or, model.functions["twice"])
    model.apply(small_program())
    with connect(autocommit=True) as connection:
        send(connection, small_program())
        killer = KillerOfEach(connection)
        execute_killed(dsn, killer, rows=4)
        check_equal(connection, model)
    assert killer.kills > 60


def _fails_or(twice: Callable[[Any], Any], arguments: Any) -> Any:
    if int(arguments["id"]) >= 2**31:
        raise Failed("NumericValueOutOfRange (22003)")
    return twice(arguments)


# -- Many -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # as the random programs that are killed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_50_000_mixed_operations_equal_the_model_and_the_books_sum_up(connect: Connect) -> None:
    random = Random(5)
    connection = connect(autocommit=True)
    make_things(connection)
    model = Model(Things())
    executables = [_one_of_many(random, nth) for nth in range(50_000)]
    model.apply(executables)
    send(connection, executables)
    # The settings of a lane, under which no plan that was made for an empty table reads a full one.
    lane = connect(autocommit=True, options=" ".join(f"-c {name}={value}" for name, value in DELIVERY_SESSION.items()))
    execute_all(lane)
    check_equal(connection, model)
    assert model.dead
    _check_that_books_sum_up(books_of(connection))


def _one_of_many(random: Random, nth: int) -> Executable:
    id, lot = UUID(int=nth + 1), random.random()
    if lot < 0.5:
        return Executable("increment", f"counter-{random.randrange(1_000)}", amount=random.randrange(-5, 10), id=id)
    if lot < 0.7:
        # Only leaves, so that a book comes to what those below it come to.
        path = "/".join(random.choice("abcde") for _ in range(4))
        at = BEGAN + timedelta(minutes=random.randrange(5))
        amount, size = random.randrange(3), random.randrange(1_000)
        return Executable("account", path, "accounting", amount=amount, bytes=size, at=at, id=id)
    if lot < 0.85:
        expected = random.choice([None, None, b"", b"3"])
        value = str(random.randrange(5)).encode()
        return Executable("put", f"value-{random.randrange(2_000)}", value=value, expected=expected, id=id)
    if lot < 0.9:
        return Executable("delete", f"value-{random.randrange(2_000)}", id=id)
    if lot < 0.9998:
        amount, key = random.choice([1, 2, 40_000]), str(random.randrange(500))
        return Executable("increment", key, "things", amount=amount, id=id)
    start = random.randrange(1_900)
    return Executable("delete_range", f"value-{start}", end_key=f"value-{start + 99}", row_limit=50, id=id)


def _check_that_books_sum_up(books: dict[tuple[str, datetime], tuple[int, int]]) -> None:
    below: dict[tuple[str, datetime], tuple[int, int]] = {}
    for (key, minute), (entries, size) in books.items():
        if "/" in key:
            book = key.rpartition("/")[0], minute
            before = below.get(book, (0, 0))
            below[book] = before[0] + entries, before[1] + size
    assert below == {book: sums for book, sums in books.items() if book[0].count("/") < 3}
