"""What every feature rests on, on connections of every kind and driver: operations, savepoints, commits, held batches.

All else is tested on one sync and one async kind.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row

from inbox.by_key.claim import Share
from inbox.claims import Claims
from inbox.sessions.hold import ABORTED, ENDED, Hold, releasing
from mailroom.errors import ConfigurationError, NotAtomic, NotInTransaction
from mailroom.session import commit
from mailroom.sql.encoding import checking
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Together
from mailroom.sql.runner import driver_of
from mailroom.sql.savepoint import SavepointGone
from mailroom.sql.sqlstate import primary_message, sqlstate
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.committing import Client, client
from tests.support.drivers import KINDS, Caller, calling
from tests.support.node import SCHEMA, Node
from tests.support.proxy import CommitFault, proxied

USUAL = ("psycopg", "Session psycopg2", "async psycopg", "async AsyncConnection asyncpg")  # which make test has

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in USUAL)) for kind in KINDS]
    ),
    # Rows that fail when they are written, or when they are committed.
    pytest.mark.node_sql(
        "CREATE TABLE ledger (what text)",
        "CREATE TABLE now (code text)",
        "CREATE TABLE later (code text)",
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION USING ERRCODE = NEW.code, MESSAGE = 'trouble'; END $$",
        "CREATE TRIGGER now AFTER INSERT ON now FOR EACH ROW EXECUTE FUNCTION fail()",
        "CREATE CONSTRAINT TRIGGER later AFTER INSERT ON later "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()",
    ),
]

NOTE = Sql("INSERT INTO public.ledger VALUES (%(what)s::text)")
TAKE = Sql("DELETE FROM public.ledger RETURNING what, pg_current_xact_id()::text", columns=("text", "text"))
FAIL = Sql("INSERT INTO public.{when} VALUES (%(code)s::text)")
SHOW = Sql("SELECT current_setting(%(name)s::text)", columns=("text",))
XACT = Sql("SELECT pg_current_xact_id()::text", columns=("text",))


# D-tests-2: What every kind of connection must do is one suite.
def noting(*what: str) -> Operation[None]:
    yield IN_TRANSACTION
    for each in what:
        yield NOTE.at()(what=each)


def asking(sql: Sql, **values: object) -> Operation[Any]:
    [row] = yield sql.at()(**values)
    return row if len(row) > 1 else row[0]


def failing(code: str, when: str = "now") -> Operation[None]:
    yield FAIL.at(when=when)(code=code)


def ledger(node: Node) -> list[str]:
    return [what for (what,) in node.rows("SELECT what FROM ledger")]


def is_psycopg(kind: str) -> bool:
    """Tell whether SQLAlchemy is not between."""
    return kind.removeprefix("async ") == "psycopg"


def of_all_sessions(node: Node, setting: str, value: str) -> None:
    """Have every session that begins from now on begin with the setting."""
    node.connection.execute(f"ALTER DATABASE \"{node.connection.info.dbname}\" SET {setting} = '{value}'")


def code_of(call: Callable[[], object]) -> str:
    """Return the SQLSTATE of the error that a call raises, whichever class its driver has for it."""
    with pytest.raises(Exception) as raised:
        call()
    return sqlstate(raised.value)


@pytest.fixture
def caller(node: Node, kind: str) -> Iterator[Caller]:
    with calling(node.dsn, kind) as made:
        yield made


# -- Steps ------------------------------------------------------------------------------------------------------------


def test_operation_is_part_of_the_callers_transaction(node: Node, caller: Caller) -> None:
    def together() -> Operation[tuple[list[Any], str]]:
        last = yield Together((NOTE.at()(what="a"), NOTE.at()(what="50 % :of %(b)s"), TAKE.at()()))
        return last, (yield from asking(XACT))

    rows, xact = caller.run(together())
    assert rows == [("a", xact), ("50 % :of %(b)s", xact)]
    caller.rollback()
    caller.run(noting("b"))
    caller.execute("INSERT INTO ledger VALUES ('c')")
    assert ledger(node) == []
    caller.commit()
    assert ledger(node) == ["b", "c"]


def test_operation_is_given_the_error_of_a_step(caller: Caller) -> None:
    def recovering() -> Operation[str]:
        try:
            yield from failing("23505")
        except Exception as error:
            return f"{sqlstate(error)}: {primary_message(error)}"
        return "nothing raised"

    assert caller.run(recovering()) == "23505: trouble"
    assert code_of(lambda: caller.run(noting("b"))) == "25P02"
    caller.rollback()


def test_connection_that_commits_each_statement_by_itself_is_refused(node: Node, kind: str) -> None:
    options: dict[str, Any] = {"autocommit": True} if is_psycopg(kind) else {"isolation_level": "AUTOCOMMIT"}
    with calling(node.dsn, kind, **options) as caller, pytest.raises(NotInTransaction, match="autocommit"):
        caller.run(noting("a"))
    assert ledger(node) == []


# -- Values -----------------------------------------------------------------------------------------------------------

LATER = datetime(2126, 7, 1, 12, 30, 15, 123456, UTC)
TEXTS = ["", "NULL", 'a"b\\c{},', "{x,y}", " ", "ü€\U0001f600", "%s %% :name", "'", "\n"]
TYPES: dict[str, list[Any]] = {
    "bigint": [0, -(2**63), 2**63 - 1],
    "boolean": [True, False],
    "bytea": [b"", b"\0\\'\xff"],
    "float8": [0.5, -1e300],
    "integer": [0, -(2**31)],
    "text": TEXTS,
    "timestamp": [LATER.replace(year=1, tzinfo=None), LATER.replace(tzinfo=None)],
    "timestamptz": [LATER, datetime(1970, 1, 1, tzinfo=UTC)],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1)],
}
ARRAYS = ("bigint", "text", "timestamptz", "uuid")  # those that users' sessions send, but for `Fill`
# In which a driver that sends or reads text may go wrong.
ODD = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "default_transaction_isolation": "serializable",
    "IntervalStyle": "sql_standard",
    "standard_conforming_strings": "off",
    "TimeZone": "America/New_York",
}


@pytest.fixture
def odd(node: Node, kind: str) -> Iterator[Caller]:
    """A caller in a session with odd settings, which has them afterwards too."""
    for name, value in ODD.items():
        if (name, kind.split()[-1]) != ("bytea_output", "pg8000"):  # which itself reads nothing but hex
            of_all_sessions(node, name, value)
    with calling(node.dsn, kind) as caller:
        before = [caller.run(asking(SHOW, name=name)) for name in ODD]
        yield caller
        assert [caller.run(asking(SHOW, name=name)) for name in ODD] == before


def test_value_of_each_type_comes_back_as_it_was_sent(odd: Caller) -> None:
    for name, values in TYPES.items():
        one = Sql(f"SELECT %(one)s::{name}, %(none)s::{name}", columns=(name, name))
        for value in values:
            assert odd.run(asking(one, one=value, none=None)) == (value, None)
    for name in ARRAYS:
        array = Sql(f"SELECT %(all)s::{name}[], %(no)s::{name}[]", columns=(f"{name}[]", f"{name}[]"))
        for items in (TYPES[name], [*TYPES[name], None]):
            assert odd.run(asking(array, all=items, no=[])) == (items, [])


# What a driver that writes arrays as text gets wrong if it can.
VALUES: list[Any] = [None, "", 'a"b\\c{},NULL', "€", b"\x00\\'\xff", [1, {"a": None}], Decimal("1.5"), UUID(int=1), "é"]
MANY = [
    Outgoing("shipping", value, key=key, headers={"h": key, key: "v"} if nth % 2 else None,
             event_type="C" if nth % 3 else None, expires_at=LATER if nth == 4 else None,
             after_clock=nth if nth == 5 else None)
    for nth, (key, value) in enumerate(zip(["x", *TEXTS[1:]], VALUES, strict=True))
]  # fmt: skip
SENT = (
    "SELECT topic, key, kind, message_type, event_type, value, headers, deliver_at, expires_at, after_clock "
    "FROM mailroom.outbox ORDER BY position"
)


def test_many_rows_are_those_that_one_by_one_are_written(node: Node, odd: Caller) -> None:
    # The first statement of its transaction: commit() must know of it.
    odd.rollback()
    assert odd.call(Outbox().send_many, AsyncOutbox().send_many, iter(MANY)) == len(MANY)
    odd.commit()
    found = node.rows(SENT)
    node.connection.execute("DELETE FROM mailroom.outbox")
    for each in MANY:
        fields = {name: getattr(each, name) for name in ("key", "headers", "event_type", "expires_at", "after_clock")}
        node.send(each.topic, each.value, **fields)
    assert node.rows(SENT) == found


# -- What the user has set --------------------------------------------------------------------------------------------

OF_PSYCOPG: list[dict[str, Any]] = [{"row_factory": dict_row}, {"prepare_threshold": None}, {"prepare_threshold": 0}]
OF_SQLALCHEMY: list[dict[str, Any]] = [
    {"execution_options": {"stream_results": True}},  # by a cursor on the server, which reads no rows of a DELETE
    {"execution_options": {"yield_per": 2}},
    {"isolation_level": "SERIALIZABLE"},
]


def test_options_of_the_connection_change_nothing(node: Node, kind: str) -> None:
    for options in OF_PSYCOPG if is_psycopg(kind) else OF_SQLALCHEMY:
        with calling(node.dsn, kind, **options) as caller:
            for _ in range(2):
                caller.run(noting(*TEXTS))
                [xact] = {xact for _, xact in caller.run(_taking())}
                assert caller.run(asking(XACT)) == xact
                caller.commit()
            level = options.get("isolation_level", "read committed").lower()
            assert caller.run(asking(SHOW, name="transaction_isolation")) == level
            caller.rollback()


def _taking() -> Operation[list[Any]]:
    rows: list[Any] = yield TAKE.at()()
    assert [what for what, _ in rows] == TEXTS
    return rows


def test_text_is_carried_in_any_encoding_of_the_client_or_the_connection_is_refused(node: Node, kind: str) -> None:
    """psycopg follows the session's encoding, so it can be set for a statement; others say it when they connect."""
    driver = kind.split()[-1]
    of_all_sessions(node, "client_encoding", "LATIN1")
    with calling(node.dsn, kind) as caller:
        if driver in ("psycopg2", "pg8000"):
            with pytest.raises(ConfigurationError, match="client_encoding='utf8'"):
                caller.run(checking())
            return
        for end in (caller.rollback, caller.commit):
            caller.run(noting("鍵 é"))
            assert code_of(lambda: caller.run(failing("23505"))) == "23505"
            caller.rollback()
            caller.run(noting("鍵 é"))
            assert caller.run(asking(Sql("SELECT what FROM ledger", columns=("text",)))) == "鍵 é"
            if driver == "psycopg":
                info = driver_of(caller.connection).info  # type: ignore[attr-defined]
                assert info.parameter_status("client_encoding") == "LATIN1"
            end()
    assert ledger(node) == ["鍵 é"]


# -- Savepoints -------------------------------------------------------------------------------------------------------


def test_savepoint_is_kept_or_undone_and_the_transaction_goes_on(node: Node, caller: Caller) -> None:
    caller.run(noting("before"))
    kept = caller.savepoint("outer")
    caller.run(noting("kept"))
    undone = caller.savepoint("inner")
    caller.call(Outbox().send_many, AsyncOutbox().send_many, MANY)
    assert code_of(lambda: caller.run(failing("23505"))) == "23505"
    caller.done(undone.undo())
    caller.done(kept.release())
    caller.run(noting("after"))
    caller.commit()
    assert ledger(node) == ["before", "kept", "after"]
    assert node.waiting() == []
    failed = caller.savepoint("failed")
    assert code_of(lambda: caller.run(failing("23505"))) == "23505"
    assert code_of(lambda: caller.done(failed.release())) == "25P02"
    caller.rollback()


def test_savepoint_of_a_transaction_that_has_ended_is_gone(caller: Caller) -> None:
    for end in (caller.commit, caller.rollback):
        for way in ("release", "undo"):
            left = caller.savepoint("handler")
            end()
            caller.run(noting("of the next transaction"))
            with pytest.raises(SavepointGone):
                caller.done(getattr(left, way)())
            caller.rollback()


# -- Commits ----------------------------------------------------------------------------------------------------------


class Work:
    """Work that notes each of its runs; `within` is what it does besides, given the number of the run from 1."""

    def __init__(self, within: Callable[[int], Operation[None]] | None = None) -> None:
        self.runs = 0
        self._within = within

    def __call__(self) -> Operation[str]:
        self.runs += 1
        yield from noting(f"run {self.runs}")
        if self._within is not None:
            yield from self._within(self.runs)
        return f"result {self.runs}"


@pytest.fixture
def committer(node: Node, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(commit, "pause_s", lambda failures, longest_s: 0.0)
    with client(kind, node.dsn) as made:
        yield made


def test_commit_whose_answer_is_lost_is_asked_about(node: Node, kind: str) -> None:
    with proxied(node.dsn) as (proxy, dsn), client(kind, dsn) as committer:
        lost, never_arrived = Work(), Work()
        proxy.at_next_commits(CommitFault.SWALLOW)
        assert committer.atomically(lost) == "result 1"
        assert proxy.commits == [CommitFault.SWALLOW, CommitFault.NONE]  # the second is the resolver's
        proxy.at_next_commits(CommitFault.CUT)
        assert committer.atomically(never_arrived) == "result 2"
        assert (lost.runs, never_arrived.runs, ledger(node)) == (1, 2, ["run 1", "run 2"])
        tokens = node.rows("SELECT token, committed FROM mailroom.commit_token")
        assert sorted(committed for _, committed in tokens) == [False, True, True]
        for token, committed in tokens:
            assert committer.resolve(token) == ("committed" if committed else "rolled back")


def test_work_is_run_again_after_what_passes(node: Node, committer: Client) -> None:
    """A conflict in the work, one at its COMMIT, and a session that is lost."""

    def within(nth: int) -> Operation[None]:
        if nth < 3:
            yield from failing("40001", "now" if nth == 1 else "later")
        if nth == 3:
            pid = yield from asking(Sql("SELECT pg_backend_pid()", columns=("integer",)))
            node.rows("SELECT pg_terminate_backend(%s, 60000)", pid)
        yield from noting("after")

    assert committer.atomically(Work(within)) == "result 4"
    assert ledger(node) == ["run 4", "after"]
    assert node.value("SELECT count(*) FROM mailroom.commit_token") == 1  # nobody had to ask


def test_nothing_is_committed_of_work_that_fails_ends_its_transaction_or_swallows_an_error(
    node: Node, committer: Client
) -> None:
    def wrong(_: int) -> Operation[None]:
        yield from noting("more")
        raise ValueError("mine")

    def refused(_: int) -> Operation[None]:
        yield from failing("23505", "later")

    def swallowing(_: int) -> Operation[None]:
        with suppress(psycopg.Error, sa.exc.DBAPIError):
            yield from failing("23505")

    def ending(_: int) -> Operation[None]:
        yield Sql("ROLLBACK").at()()

    work = Work(wrong)
    with pytest.raises(ValueError, match="mine"):
        committer.atomically(work)
    assert work.runs == 1
    assert code_of(lambda: committer.atomically(Work(refused))) == "23505"
    with pytest.raises(NotAtomic, match="savepoint"):
        committer.atomically(Work(swallowing))
    with pytest.raises(NotAtomic, match="neither commit nor roll back"):
        committer.atomically(Work(ending))
    assert (ledger(node), node.rows("SELECT FROM mailroom.commit_token")) == ([], [])


def test_commit_is_resolved_at_any_level_of_isolation(node: Node, kind: str) -> None:
    for level in ("read committed", "repeatable read", "serializable"):
        of_all_sessions(node, "default_transaction_isolation", level)
        with client(kind, node.dsn) as committer:
            committer.atomically(Work())
            token = node.value("SELECT max(token::text) FROM mailroom.commit_token WHERE committed")
            assert committer.resolve(token) == "committed"


# -- Batches that are held --------------------------------------------------------------------------------------------

ENDERS: dict[str, Callable[[Caller], object]] = {
    "COMMIT": lambda caller: caller.execute("COMMIT"),
    "ROLLBACK": lambda caller: caller.execute("ROLLBACK"),
    "commit()": Caller.commit,
    "rollback()": Caller.rollback,
    "ROLLBACK AND CHAIN": lambda caller: caller.execute("ROLLBACK AND CHAIN"),
}


@pytest.mark.inbox("shipping")
def test_only_the_worker_ends_the_transaction_of_its_batch(node: Node, caller: Caller) -> None:
    node.send("shipping", key="k")
    node.deliver_all()

    def held() -> Hold:
        claimed = caller.run(Claims(SCHEMA, "shipping").claiming(Share(1, 1, 1, due_too=False, hold=True)))
        assert [message.key for message in claimed.messages] == ["k"]
        hold = Hold(caller.connection)
        assert hold.why_over() == ""
        return hold

    for name, ends in ENDERS.items():
        hold = held()
        if name.lower().startswith("commit"):
            with pytest.raises((psycopg.Error, sa.exc.DBAPIError), match="only its worker may end the transaction"):
                ends(caller)
        else:
            ends(caller)
        assert hold.why_over() in (ENDED, ABORTED), name
        caller.rollback()
        assert node.delivered("key") == [("k",)]
    hold = held()
    with suppress(psycopg.Error, sa.exc.DBAPIError):
        caller.run(failing("23505"))
    assert hold.why_over() in (ENDED, ABORTED)
    caller.rollback()
    hold = held()
    caller.done(caller.savepoint("handler").undo())
    caller.execute("SET LOCAL jit = on")
    assert hold.why_over() == ""
    caller.run(releasing())
    caller.commit()
    assert node.delivered() == []
