"""Large batches, without Spark: decided at once and moved in chunks, each message once and in order after a crash."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock
from uuid import UUID

import psycopg
import pytest
import sqlalchemy

from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.leading import KEEPER
from mailroom.embedded import Server
from mailroom.errors import SchemaError
from mailroom.node.status import status
from mailroom.schema import migrate
from mailroom.session import settings
from mailroom.sql import runner
from mailroom.sql.operation import Step
from mailroom.sql.runner import run
from mailroom.values.codec import decode
from outbox.bulk import (
    BY_NUMBER,
    CHUNK,
    CHUNK_ROWS,
    MOVE,
    STAGED,
    BulkLost,
    MovedRows,
    advancing,
    oldest,
    table,
    table_in,
)
from spark_jobs.node import Node
from spark_jobs.proof.tables import SNAPSHOT
from spark_jobs.write.columns import WRITTEN_COLUMNS
from spark_jobs.write.commit import SendFailed, SentBatch, StagingLost, commit
from spark_jobs.write.finishing import BulkUnfinished, ChunkPace, Queue, finish, give_up
from spark_jobs.write.ledger import BatchDiffers, SparkBatch
from spark_jobs.write.staging import Staged, abandon, drop, stage, sweep
from spark_jobs.write.user_sql import UserSql
from tests.spark.frames import SHAPE, batches, ledger, sent, staging_tables
from tests.spark.test_staging import is_up, waiting
from tests.sql.test_plans import generic_plan
from tests.support.databases import Connect
from tests.support.node import SCHEMA
from tests.support.node import Node as Mailroom
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import WITHIN_S, eventually

ROWS = 25
PACE = ChunkPace(rows=4, patience_s=0)  # nobody dispatches, and nobody is waited for
FEWER = ChunkPace(rows=8, patience_s=0)  # a first, a middle and a last chunk have all statements that there are
JOB = SparkBatch("job")


def staged(node: Node, batch: SparkBatch = JOB, first: int = 0, last: int = ROWS) -> list[Staged]:
    """Stage the rows in two tasks, neither of which ends with a chunk."""
    middle = (first + last) // 2 + 1
    return [stage(node, batch, SHAPE, batches(*some)) for some in ((first, middle), (middle, last))]


def send(node: Node, batch: SparkBatch = JOB, last: int = ROWS, user_sql: UserSql | None = None) -> SentBatch:
    return commit(node, batch, SHAPE, staged(node, batch, 0, last), user_sql, pace=PACE)


class Death(BaseException):
    """The driver dies: it does nothing more, and its sessions end."""


@contextmanager
def at_statement(nth: int, happens: Callable[[psycopg.Connection[Any]], None]) -> Iterator[list[int]]:
    """Have something happen before our nth statement; gives the number of those that were run."""
    number = [0]
    perform = runner._psycopg_step

    def step(connection: psycopg.Connection[Any], step: Step, **options: Any) -> list[Any]:
        number[0] += 1
        if number[0] == nth:
            happens(connection)
        return perform(connection, step, **options)

    with mock.patch.object(runner, "_psycopg_step", step):
        yield number


def dies(_: psycopg.Connection[Any]) -> None:
    raise Death


def decided_and_left(node: Node, batch: SparkBatch = JOB, chunks: int = 2) -> list[Staged]:
    """Decide a batch and move some of it, as a driver that dies then."""
    attempts = staged(node, batch)
    moved = [0]

    def move(*arguments: Any) -> Any:
        moved[0] += 1
        if moved[0] > chunks:
            raise Death
        return advancing(*arguments)

    with mock.patch("spark_jobs.write.finishing.advancing", move), pytest.raises(Death):
        commit(node, batch, SHAPE, attempts, pace=PACE)
    return attempts


def id_of(value: bytes) -> int:
    found: Any = decode(value)
    return int(found["id"])


def unfinished(connect: Connect) -> list[tuple[Any, ...]]:
    with connect() as connection:
        return connection.execute("SELECT name, batch, moved, messages FROM mailroom.spark_bulk").fetchall()


def per_transaction(connect: Connect) -> list[int]:
    with connect() as connection:
        rows = connection.execute("SELECT count(*) FROM mailroom.outbox GROUP BY xact ORDER BY min(position)")
        return [number for (number,) in rows.fetchall()]


# -- Chunks -----------------------------------------------------------------------------------------------------------


def test_large_batch_moves_in_chunks_and_in_order(dsn: str, connect: Connect) -> None:
    assert send(Node(dsn=dsn)) == SentBatch(ROWS)
    assert sent(connect) == list(range(ROWS))
    assert per_transaction(connect) == [4] * 6 + [1]
    assert ledger(connect) == [("job", -1, ROWS)]
    assert (unfinished(connect), staging_tables(connect)) == ([], 0)


def test_small_batch_moves_with_its_row_in_the_ledger(dsn: str, connect: Connect) -> None:
    send(Node(dsn=dsn), last=PACE.rows)
    assert per_transaction(connect) == [PACE.rows]


def test_chunk_is_bounded_by_bytes_and_has_one_message_at_least(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    [(size,)] = connect().execute("SELECT octet_length(%b::bytea)", [b"\xa1\x62id\x00"]).fetchall()
    commit(node, JOB, SHAPE, staged(node), pace=ChunkPace(rows=6, max_bytes=3 * size, patience_s=0))
    assert per_transaction(connect)[:2] == [3, 3]
    tiny = SparkBatch("tiny")
    commit(node, tiny, SHAPE, staged(node, tiny), pace=ChunkPace(rows=6, max_bytes=1, patience_s=0))
    assert per_transaction(connect)[-ROWS:] == [1] * ROWS
    assert sent(connect) == [*range(ROWS), *range(ROWS)]


def test_batch_of_few_rows_is_large_by_its_bytes(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    commit(node, JOB, SHAPE, staged(node), pace=ChunkPace(max_bytes=50, patience_s=0))
    assert len(per_transaction(connect)) > 1
    assert sent(connect) == list(range(ROWS))


def test_chunks_are_durable_with_the_transaction_that_finishes_the_batch(dsn: str, connect: Connect) -> None:
    """A chunk that a crash takes back would move after what was sent after the batch was said to be done."""
    decided_and_left(Node(dsn=dsn))
    connection = connect()
    settings: dict[int, str] = {}
    for _ in count():
        connection.execute("SET LOCAL synchronous_commit = local")
        moved = run(connection, advancing(SCHEMA, JOB.name, 100))
        if moved is None:
            break
        [(setting,)] = connection.execute("SHOW synchronous_commit").fetchall()
        settings[moved.messages] = setting
        connection.commit()
    assert settings == {ROWS - 8: "off", 0: "on"}


def laid_out_anew(connect: Connect, token: UUID) -> None:
    """Have the rows of a table stand elsewhere, as in a dump that was restored, or after a rewrite."""
    name = table_in(SCHEMA, token)
    connect(autocommit=True).execute(
        f"CREATE TABLE public.before AS SELECT * FROM {name}; TRUNCATE {name}; "
        f"INSERT INTO {name} SELECT * FROM public.before ORDER BY mailroom_nth % 3, mailroom_nth DESC; "
        "DROP TABLE public.before".encode()
    )


@pytest.mark.parametrize("chunks", [0, 2])
def test_rows_of_a_batch_may_be_laid_out_anew_before_it_goes_on(dsn: str, connect: Connect, chunks: int) -> None:
    node = Node(dsn=dsn)
    for one in decided_and_left(node, chunks=chunks):
        assert one.token
        laid_out_anew(connect, one.token)
    finish(node, JOB.name, PACE)
    assert sent(connect) == list(range(ROWS))


def test_rows_of_a_small_batch_may_be_laid_out_anew_before_it_is_moved(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    attempts = staged(node)
    assert attempts[0].token
    laid_out_anew(connect, attempts[0].token)
    commit(node, JOB, SHAPE, attempts)
    assert sent(connect) == list(range(ROWS))


@pytest.mark.parametrize(("rows", "persistence"), [(CHUNK_ROWS, "u"), (CHUNK_ROWS + 1, "p")])
def test_table_of_more_than_a_chunk_is_logged_from_the_first(
    dsn: str, connect: Connect, rows: int, persistence: str
) -> None:
    attempt = stage(Node(dsn=dsn), JOB, SHAPE, batches(0, rows, 1_000))
    assert attempt.token
    with connect() as connection:
        found = connection.execute("SELECT relpersistence FROM pg_class WHERE relname = %s", [table(attempt.token)])
        assert found.fetchone() == (persistence,)
        held = connection.execute(f"SELECT count(*) FROM mailroom.{table(attempt.token)}".encode())
        assert held.fetchone() == (rows,)


@pytest.mark.parametrize("statement", [CHUNK, MOVE], ids=["CHUNK", "MOVE"])
def test_chunk_reads_nothing_but_its_own_rows(dsn: str, connect: Connect, statement: Any) -> None:
    [attempt, _] = decided_and_left(Node(dsn=dsn), chunks=0)
    assert attempt.token
    connection = connect()
    run(connection, _set_up())
    names = {"table": table_in(SCHEMA, attempt.token), "names": "message_id", "expressions": "message_id"}
    plan = generic_plan(connection, statement, names)
    [scan] = [node for node in plan if node.get("Relation Name") == table(attempt.token)]
    assert scan["Node Type"] == "Index Scan"
    assert not {node["Node Type"] for node in plan} & {"Sort", "Gather", "Hash Join"}


def _set_up() -> Any:
    yield BY_NUMBER.at()()


def test_columns_of_messages_are_staged_as_they_are_moved() -> None:
    names = {"int8": "bigint"}
    assert {name: names.get(kind, kind) for name, kind in STAGED.items()} == {
        name: column.staged for name, column in WRITTEN_COLUMNS.items()
    }


def test_users_sql_runs_once_with_the_whole_of_a_large_batch(dsn: str, connect: Connect) -> None:
    with connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE public.seen (key text)")
    insert = UserSql.of("INSERT INTO public.seen SELECT key FROM {staging}", None)
    for _ in range(2):
        send(Node(dsn=dsn), user_sql=insert)
    with connect() as connection:
        assert connection.execute("SELECT count(*) FROM public.seen").fetchone() == (ROWS,)
    assert sent(connect) == list(range(ROWS))


# -- Deaths -----------------------------------------------------------------------------------------------------------


def test_driver_that_dies_at_any_statement_is_run_again(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    expected: list[int] = []
    for nth in count(1):
        batch = SparkBatch(f"job {nth}")
        attempts = staged(node, batch)
        expected += range(ROWS)
        try:
            with at_statement(nth, dies) as number:
                commit(node, batch, SHAPE, attempts, pace=FEWER)
        except Death:
            drop(node, attempts)  # Spark's abort
        else:
            assert number[0] < nth
            break
        send(node, batch)
        assert sent(connect) == expected, f"it died at statement {nth}"
        assert (unfinished(connect), staging_tables(connect)) == ([], 0)
    assert nth > 40


def test_session_that_ends_at_any_statement_is_made_anew(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    watcher = connect(autocommit=True)

    def ends(connection: psycopg.Connection[Any]) -> None:
        watcher.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])

    expected: list[int] = []
    for nth in count(1):
        batch = SparkBatch(f"job {nth}")
        attempts = staged(node, batch)
        with at_statement(nth, ends) as number, mock.patch("spark_jobs.write.finishing.pause_s", return_value=0.0):
            try:
                assert commit(node, batch, SHAPE, attempts, pace=FEWER) == SentBatch(ROWS)
            except SendFailed:  # before it was decided
                assert send(node, batch) == SentBatch(ROWS)
        expected += range(ROWS)
        assert sent(connect) == expected, f"it ended at statement {nth}"
        assert unfinished(connect) == []
        if number[0] < nth:
            break
    assert nth > 40


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [CommitFault.CUT, CommitFault.SWALLOW])
def test_answer_to_the_commit_of_a_chunk_is_lost(dsn: str, connect: Connect, fault: CommitFault) -> None:
    node = Node(dsn=dsn)
    decided_and_left(node)
    with proxied(dsn) as (proxy, through), mock.patch("spark_jobs.write.finishing.pause_s", return_value=0.0):
        proxy.at_next_commits(fault)
        finish(Node(dsn=through), JOB.name, PACE)
        assert proxy.commits[0] is fault
    assert sent(connect) == list(range(ROWS))


async def test_what_a_driver_leaves_at_any_statement_is_finished_by_housekeeping(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    mailroom = Mailroom(dsn, connect(autocommit=True))
    mailroom.inbox("numbers")
    mailroom.allow_clocks()
    janitor = Janitor(SCHEMA, abandoned_after_s=0)
    expected: list[int] = []
    async with await settings.connect_async(dsn, "keeper", KEEPER) as keeper:
        for nth in count(1):
            batch = SparkBatch(f"job {nth}")
            attempts = staged(node, batch)
            try:
                with at_statement(nth, dies) as number:
                    commit(node, batch, SHAPE, attempts, pace=FEWER)
            except Death:
                drop(node, attempts)
            known = (batch.name, -1, ROWS) in ledger(connect)
            while unfinished(connect):
                await janitor.run_once(keeper)
                mailroom.deliver()
            mailroom.deliver()
            expected += range(ROWS) if known else ()
            found = [id_of(value) for (value,) in mailroom.delivered("value")]
            assert found == expected, f"it died at statement {nth}"
            if number[0] < nth:
                break
    assert nth > 40
    sweep(node, abandoned_after_h=0)
    assert staging_tables(connect) == 0


async def test_housekeeping_moves_the_next_chunk_when_the_last_one_was_taken(dsn: str, connect: Connect) -> None:
    decided_and_left(Node(dsn=dsn), chunks=1)
    mailroom = Mailroom(dsn, connect(autocommit=True))
    janitor = Janitor(SCHEMA, abandoned_after_s=0)
    async with await settings.connect_async(dsn, "keeper", KEEPER) as keeper:
        for _ in range(2):
            assert await janitor.run_once(keeper) == 1
        assert len(mailroom.waiting()) == 4
        mailroom.allow_clocks()
        mailroom.deliver()
        assert await janitor.run_once(keeper) == 1
        assert len(mailroom.waiting()) == ROWS - 4  # a chunk of the usual size
        assert await Janitor(SCHEMA).run_once(keeper) == 0  # to whom it is too young


async def test_housekeeping_goes_on_with_others_where_one_batch_cannot(
    dsn: str, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(dsn=dsn)
    [one, _] = decided_and_left(node, SparkBatch("a"), chunks=0)
    assert one.token
    decided_and_left(node, SparkBatch("b"), chunks=0)
    janitor = Janitor(SCHEMA, abandoned_after_s=0)
    with connect(autocommit=True) as connection:
        connection.execute(f"TRUNCATE mailroom.{table(one.token)}".encode())
    async with await settings.connect_async(dsn, "keeper", KEEPER) as keeper:
        for _ in range(3):
            await janitor.run_once(keeper)
    assert sent(connect) == list(range(ROWS))
    assert unfinished(connect) == [("a", -1, 0, ROWS)]
    told = [record.message for record in caplog.records if "cannot go on" in record.message]
    assert len(told) == 1
    with pytest.raises(BulkLost, match="'a' cannot go on"):
        finish(node, "a", PACE)


def test_crash_of_the_server_loses_nothing_that_was_decided(private_server: Server) -> None:
    dsn = migrated(private_server)
    node = Node(dsn=dsn)
    decided_and_left(node)
    with closing(psycopg.connect(dsn)) as victim:  # there is nothing to commit
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            victim.execute("SELECT 1")
    eventually(lambda: is_up(dsn))
    finish(node, JOB.name, PACE)
    with psycopg.connect(dsn) as after:
        found = after.execute("SELECT value FROM mailroom.outbox ORDER BY position").fetchall()
    assert [id_of(value) for (value,) in found] == list(range(ROWS))


def migrated(server: Server) -> str:
    engine = sqlalchemy.create_engine(
        server.dsn().replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        migrate(connection)
    return server.dsn()


# -- Several at once --------------------------------------------------------------------------------------------------


def test_two_drivers_move_one_batch(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    decided_and_left(node)
    with connect() as holder, connect(autocommit=True) as watcher:
        holder.execute("LOCK TABLE mailroom.outbox IN SHARE MODE")
        movers = [threading.Thread(target=finish, args=(node, JOB.name, PACE)) for _ in range(2)]
        for mover in movers:
            mover.start()
        eventually(partial(waiting, watcher, 2))  # one for the outbox, one for it
        holder.rollback()
        for mover in movers:
            mover.join(WITHIN_S)
    assert sent(connect) == list(range(ROWS))
    assert unfinished(connect) == []


def test_driver_that_waited_for_the_decision_of_another_says_done_when_all_is_moved(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    attempts = [staged(node) for _ in range(2)]
    found: list[int] = []

    def drive(of: list[Staged]) -> None:
        commit(node, JOB, SHAPE, of, pace=PACE)
        found.append(len(sent(connect)))

    with connect() as holder, connect(autocommit=True) as watcher:
        holder.execute("LOCK TABLE mailroom.spark_bulk IN SHARE MODE")  # which the decision writes last
        drivers = [threading.Thread(target=drive, args=(one,)) for one in attempts]
        for nth, driver in enumerate(drivers, start=1):
            driver.start()
            eventually(partial(waiting, watcher, nth))
        holder.rollback()
        for driver in drivers:
            driver.join(WITHIN_S)
    assert found == [ROWS, ROWS]
    assert sent(connect) == list(range(ROWS))


def test_next_batch_of_a_stream_goes_behind_one_that_was_left(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    first, second = (SparkBatch("stream", number, "query") for number in range(2))
    decided_and_left(node, first)
    attempts = staged(node, second, ROWS, ROWS + 2)
    assert commit(node, second, SHAPE, attempts, pace=PACE) == SentBatch(2)
    assert sent(connect) == list(range(ROWS + 2))


def test_batch_without_rows_finishes_what_was_left_of_its_stream(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    decided_and_left(node, SparkBatch("stream", 0, "query"))
    commit(node, SparkBatch("stream", 1, "query"), SHAPE, [], pace=PACE)
    assert sent(connect) == list(range(ROWS))


def test_batch_that_was_left_is_known_by_its_content(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    decided_and_left(node)
    with pytest.raises(BatchDiffers, match=f"with {ROWS} messages, and now it has {ROWS - 1}"):
        send(node, last=ROWS - 1)
    assert send(node) == SentBatch(0, passed_over=ROWS)
    assert sent(connect) == list(range(ROWS))
    assert staging_tables(connect) == 0


def test_nobody_drops_what_is_still_to_be_moved(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    attempts = decided_and_left(node)  # of the first table
    with connect(autocommit=True) as connection:
        connection.execute("UPDATE mailroom.spark_staging SET at = at - interval '25 hours'")
    assert sweep(node) == 0
    drop(node, attempts)
    abandon(node, JOB)
    assert staging_tables(connect) == 2
    finish(node, JOB.name, PACE)
    assert sweep(node) == 2
    assert sent(connect) == list(range(ROWS))


def test_decision_waits_for_a_sweeper_and_finds_the_table_gone(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    attempts = staged(node)
    errors: list[BaseException] = []

    def drive() -> None:
        try:
            commit(node, JOB, SHAPE, attempts, pace=PACE)
        except StagingLost as error:
            errors.append(error)

    with connect() as sweeper, connect(autocommit=True) as watcher:
        sweeper.execute("DELETE FROM mailroom.spark_staging WHERE token = %s", [attempts[0].token])
        driver = threading.Thread(target=drive)
        driver.start()
        eventually(partial(waiting, watcher, 1))
        sweeper.commit()
        driver.join(WITHIN_S)
    assert errors
    assert (sent(connect), ledger(connect)) == ([], [])


# -- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["emptied", "gone", "some rows gone"])
def test_staging_that_is_lost_before_the_decision_is_not_sent_in_part(dsn: str, connect: Connect, what: str) -> None:
    node = Node(dsn=dsn)
    attempts = staged(node)
    assert attempts[1].token
    name = f"mailroom.{table(attempts[1].token)}"
    change = {
        "emptied": f"TRUNCATE {name}",
        "gone": f"DROP TABLE {name}",
        "some rows gone": f"DELETE FROM {name} WHERE key = 'key-5'",
    }
    with connect(autocommit=True) as connection:
        connection.execute(change[what].encode())
    with pytest.raises(StagingLost, match="run it again"):
        commit(node, JOB, SHAPE, attempts, pace=PACE)
    assert (sent(connect), ledger(connect), unfinished(connect)) == ([], [], [])


def test_row_that_the_outbox_refuses_stops_the_batch_where_it_is_until_that_is_mended(
    dsn: str, connect: Connect
) -> None:
    node = Node(dsn=dsn)
    owner = connect(autocommit=True)
    owner.execute("ALTER TABLE mailroom.outbox ADD CONSTRAINT no_key_9 CHECK (key <> 'key-9')")
    with pytest.raises(BulkUnfinished, match=r"CheckViolation \(23514, no_key_9\)\. Nothing of it is lost") as failure:
        send(node)
    assert "key-9" not in str(failure.value)
    assert sent(connect) == list(range(8))
    owner.execute("ALTER TABLE mailroom.outbox DROP CONSTRAINT no_key_9")
    assert send(node) == SentBatch(0, passed_over=ROWS)
    assert sent(connect) == list(range(ROWS))


def test_what_is_lost_of_a_batch_is_given_up_and_the_rest_moves(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    [one, _] = decided_and_left(node)
    assert one.token
    connect(autocommit=True).execute(f"DROP TABLE {table_in(SCHEMA, one.token)}".encode())
    with pytest.raises(BulkLost, match=r"is gone, with 5 messages.* python -m spark_jobs\.sweep --give-up job\."):
        finish(node, JOB.name, PACE)
    assert give_up(node, JOB.name, PACE) == one.content.messages - 8 == 5
    assert sent(connect) == [*range(8), *range(one.content.messages, ROWS)]
    assert (unfinished(connect), sweep(node), ledger(connect)) == ([], 2, [("job", -1, ROWS)])


def test_nothing_is_given_up_of_a_batch_that_is_well(dsn: str, connect: Connect) -> None:
    decided_and_left(Node(dsn=dsn))
    assert give_up(Node(dsn=dsn), JOB.name, PACE) == 0
    assert sent(connect) == list(range(ROWS))


@pytest.mark.parametrize("guise", ["view", "policy", "type", "child", "index", "statistics"])
def test_nothing_of_a_table_s_owner_runs_as_who_moves_it(dsn: str, connect: Connect, guise: str) -> None:
    """The role that stages may do less than the daemon that goes on."""
    node = Node(dsn=dsn)
    attempts = decided_and_left(node, chunks=0)
    assert attempts[0].token
    name = f"mailroom.{table(attempts[0].token)}"
    owner = connect(autocommit=True)
    owner.execute(
        "CREATE FUNCTION public.evil(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS "
        "$$ BEGIN IF current_setting('evil.wakes', true) THEN RAISE EXCEPTION 'evil' USING ERRCODE = 'ZZ000'; END IF; "
        "RETURN $1; END $$"
    )
    change = {
        "view": f"ALTER TABLE {name} RENAME TO other; "
        f"CREATE VIEW {name} AS SELECT public.evil(key) AS key, message_id, value FROM mailroom.other",
        "policy": f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY; ALTER TABLE {name} FORCE ROW LEVEL SECURITY; "
        f"CREATE POLICY evil ON {name} USING (public.evil(key) IS NULL)",
        "type": "CREATE DOMAIN public.evil AS text; "
        f"ALTER TABLE {name} ALTER key TYPE public.evil, ALTER value TYPE public.evil USING ''",
        "child": f"CREATE TABLE public.child () INHERITS ({name})",
        # The planner computes what is constant in these, with the rights of the role that plans.
        "index": f"CREATE INDEX ON {name} (key) WHERE key = public.evil('')",
        "statistics": f"CREATE STATISTICS ON (key || public.evil('')), value FROM {name}",
    }
    owner.execute(change[guise].encode())
    mover = connect()
    mover.execute("SET evil.wakes = true")
    with mover as connection, pytest.raises((BulkLost, psycopg.errors.FeatureNotSupported)) as refused:
        run(connection, advancing(SCHEMA, JOB.name, PACE.rows))
    assert "evil" not in str(refused.value)


# -- Pace -------------------------------------------------------------------------------------------------------------


class Time:
    """A clock that moves by sleeping, while which something may happen."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda _: None) -> None:
        self.now_s = 0.0
        self._meanwhile = meanwhile

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._meanwhile(self.now_s)


def chunk(connection: psycopg.Connection[Any], messages: int = 10) -> MovedRows:
    rows = connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json) SELECT 'numbers', '1' FROM generate_series(1, %s) "
        "RETURNING position",
        [messages],
    ).fetchall()
    return MovedRows(messages, rows[0][0], rows[-1][0], more=True)


def lead(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "INSERT INTO mailroom.lease VALUES "
        "('dispatcher', gen_random_uuid(), 1, now() + interval '1 hour', 'h', 1, 1, now(), 'awake', '{}')"
    )


def take(connection: psycopg.Connection[Any], messages: int) -> None:
    connection.execute(
        "DELETE FROM mailroom.outbox WHERE position = ANY (ARRAY("
        "SELECT position FROM mailroom.outbox ORDER BY position LIMIT %s))",
        [messages],
    )


def test_next_chunk_waits_until_others_messages_and_half_of_the_last_chunk_are_taken(connect: Connect) -> None:
    connection = connect(autocommit=True)
    lead(connection)
    chunk(connection, 20)  # of others
    time = Time(lambda _: take(connection, 1))
    queue = Queue(SCHEMA, ChunkPace(patience_s=5, poll_interval_s=1), time.monotonic, time.sleep)
    queue.wait(connection, chunk(connection, 10))
    assert time.now_s == 20 + 5
    queue.wait(connection, chunk(connection, 10))
    assert time.now_s == 20 + 5 + 10


def test_nobody_is_waited_for_where_nothing_is_taken_until_something_is(connect: Connect) -> None:
    connection = connect(autocommit=True)
    lead(connection)
    taken = [0]
    time = Time(lambda _: take(connection, taken[0]))
    queue = Queue(SCHEMA, ChunkPace(patience_s=5, poll_interval_s=1), time.monotonic, time.sleep)
    queue.wait(connection, chunk(connection))
    assert time.now_s == 5
    for _ in range(3):
        queue.wait(connection, chunk(connection))
    assert time.now_s == 5
    take(connection, 1)
    taken[0] = 4
    queue.wait(connection, chunk(connection))
    assert run(connection, oldest(SCHEMA, 0, 45)) is None
    assert time.now_s == 5 + 11


def test_next_chunk_of_a_driver_waits_for_a_dispatcher(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    mailroom = Mailroom(dsn, connect(autocommit=True))
    mailroom.allow_clocks()
    lead(mailroom.connection)
    attempts = staged(node)
    looks = [0]

    def look(*arguments: Any) -> Any:
        looks[0] += 1
        return oldest(*arguments)

    with mock.patch("spark_jobs.write.finishing.oldest", look):
        patient = ChunkPace(rows=4, patience_s=600, poll_interval_s=0.001)
        driver = threading.Thread(target=commit, args=(node, JOB, SHAPE, attempts), kwargs={"pace": patient})
        driver.start()
        eventually(lambda: looks[0] > 3)
        assert len(mailroom.waiting()) == 4
        while driver.is_alive():
            mailroom.deliver()
            assert len(mailroom.waiting()) <= 2 * 4
    driver.join()
    assert unfinished(connect) == []


def test_nobody_is_waited_for_where_nobody_leads(connect: Connect) -> None:
    connection = connect(autocommit=True)
    time = Time()
    queue = Queue(SCHEMA, ChunkPace(patience_s=5, poll_interval_s=1), time.monotonic, time.sleep)
    queue.wait(connection, chunk(connection))
    assert time.now_s == 0
    take(connection, 1)  # by somebody who does not lead
    queue.wait(connection, chunk(connection))
    assert time.now_s == 5


def test_batch_ends_though_a_dispatcher_takes_nothing(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    lead(connect(autocommit=True))
    commit(node, JOB, SHAPE, staged(node), pace=ChunkPace(rows=4, patience_s=0.05, poll_interval_s=0.01))
    assert sent(connect) == list(range(ROWS))


def test_batch_is_done_when_all_of_it_stands_before_what_is_sent_next(dsn: str, connect: Connect) -> None:
    """Order by acknowledged commits: a dispatcher at work meanwhile has taken some of it."""
    node = Node(dsn=dsn)
    mailroom = Mailroom(dsn, connect(autocommit=True))
    mailroom.inbox("numbers")
    mailroom.allow_clocks()
    decided_and_left(node)
    mailroom.deliver()
    send(node)
    mailroom.send("numbers", {"id": ROWS})
    mailroom.deliver()
    assert [id_of(value) for (value,) in mailroom.delivered("value")] == list(range(ROWS + 1))


# -- What others see --------------------------------------------------------------------------------------------------


def test_status_and_audit_know_what_is_still_to_come(dsn: str, connect: Connect) -> None:
    decided_and_left(Node(dsn=dsn))
    with connect() as connection:
        assert status(connection).bulk_backlog == ROWS - 8
        rows: Sequence[tuple[Any, ...]] = connection.execute(SNAPSHOT.at(schema=SCHEMA).sql).fetchall()
    assert [(row[5], row[6]) for row in rows if row[0] == "batch"] == [("mailroom spark job -1", 8)]


async def test_ledger_keeps_a_batch_that_is_not_finished(dsn: str, connect: Connect) -> None:
    decided_and_left(Node(dsn=dsn))
    with connect(autocommit=True) as connection:
        connection.execute("UPDATE mailroom.spark_batch SET at = at - interval '500 days'")
    async with await settings.connect_async(dsn, "keeper", KEEPER) as keeper:
        await Janitor(SCHEMA).run_once(keeper)
    assert ledger(connect) == [("job", -1, ROWS)]


def test_schema_is_not_taken_back_beside_a_batch_that_is_not_finished(dsn: str, connect: Connect) -> None:
    decided_and_left(Node(dsn=dsn), chunks=0)
    with connect() as connection, pytest.raises(SchemaError, match="Not removed: spark_bulk still hold messages"):
        migrate(connection, revision="base")
