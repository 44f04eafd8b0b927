"""Staging and moving, without Spark: what a task left is sent once, whole, in order, or not at all."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy

from mailroom.embedded import Server
from mailroom.errors import CommitUnknown, ConnectionFailed
from mailroom.schema import migrate
from mailroom.sql.runner import run
from outbox.bulk import table
from spark_jobs.node import Node
from spark_jobs.write import staging
from spark_jobs.write.commit import SendFailed, SentBatch, StagingLost, commit
from spark_jobs.write.ledger import BatchDiffers, SparkBatch, StreamTaken
from spark_jobs.write.staging import Staged, drop, finding_orphans, stage, sweep
from spark_jobs.write.user_sql import UserSql
from tests.spark.frames import SHAPE, batches, ledger, sent, staging_tables, values
from tests.support.databases import Connect
from tests.support.pgbouncer import pgbouncer
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import WITHIN_S, eventually

JOB = SparkBatch("job")


def staged(node: Node, first: int, last: int, batch: SparkBatch = JOB) -> Staged:
    return stage(node, batch, SHAPE, batches(first, last))


def table_of(staged: Staged) -> str:
    assert staged.token
    return table(staged.token)


def waiting(watcher: psycopg.Connection[Any], number: int) -> bool:
    """Tell whether this many sessions wait for a lock."""
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()"
    return watcher.execute(query).fetchone() == (number,)


def test_tasks_are_sent_in_their_order_whichever_was_staged_first(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    second = staged(node, 250, 500)
    first = staged(node, 0, 250)
    assert sent(connect) == []
    commit(node, JOB, SHAPE, [first, second])
    assert sent(connect) == list(range(500))
    assert ledger(connect) == [("job", -1, 500)]
    assert staging_tables(connect) == 0


def test_attempt_that_spark_does_not_list_is_not_sent(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    staged(node, 0, 100)
    again = staged(node, 0, 100)
    commit(node, JOB, SHAPE, [again])
    assert sent(connect) == list(range(100))
    assert staging_tables(connect) == 0


def test_task_without_rows_makes_no_table(dsn: str, connect: Connect) -> None:
    tasks = [stage(Node(dsn=dsn), JOB, SHAPE, some) for some in ([], batches(0, 0))]
    assert [one.token for one in tasks] == [None, None]
    assert commit(Node(dsn=dsn), JOB, SHAPE, tasks) == SentBatch(0)
    assert staging_tables(connect) == 0
    assert ledger(connect) == []


def test_task_that_fails_leaves_no_table(dsn: str, connect: Connect) -> None:
    def failing() -> Iterator[Any]:
        yield from batches(0, 100)
        raise RuntimeError("the task dies here")

    with pytest.raises(RuntimeError):
        stage(Node(dsn=dsn), JOB, SHAPE, failing())
    assert staging_tables(connect) == 0


def test_batch_that_comes_again_is_sent_once(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    for _ in range(2):
        commit(node, JOB, SHAPE, [staged(node, 0, 60), staged(node, 60, 100)])
    commit(node, JOB, SHAPE, [staged(node, 0, 100)])
    assert sent(connect) == list(range(100))
    assert staging_tables(connect) == 0


def test_batch_is_known_by_its_rows_whatever_tasks_have_them_in_what_order(
    dsn: str, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(dsn=dsn)
    assert commit(node, JOB, SHAPE, [staged(node, 0, 60), staged(node, 60, 100)]) == SentBatch(100)
    # Other sizes of Arrow's batches, other tasks, another order of rows; and other ids, which each run makes anew.
    with caplog.at_level("WARNING", "mailroom.spark"):
        again = stage(node, JOB, SHAPE, [*batches(33, 100, 7), *batches(0, 33, 5)])
        assert commit(node, JOB, SHAPE, [again]) == SentBatch(0, passed_over=100)
    assert "the batch 'job' was sent before: 100 messages are passed over" in caplog.text
    assert sent(connect) == list(range(100))


@pytest.mark.parametrize(
    ("first", "last", "topic", "now"),
    [
        (0, 101, "numbers", "101"),
        (1, 101, "numbers", "as many, but others"),
        (0, 100, "figures", "as many, but others"),
        (0, 0, "numbers", "0"),
    ],
)
@pytest.mark.parametrize("batch", [JOB, SparkBatch("stream", 0, "query")])
def test_known_batch_of_another_content_is_refused(
    dsn: str, connect: Connect, batch: SparkBatch, first: int, last: int, topic: str, now: str
) -> None:
    """A key used again, and a query whose checkpoint was set back: what comes now is not what was sent."""
    node = Node(dsn=dsn)
    commit(node, batch, SHAPE, [staged(node, 0, 100, batch)])
    other = replace(SHAPE, constants=(("topic", topic),))
    told = rf"was sent at .* with 100 messages, and now it has {now}\. Nothing was sent\. .* onKnownBatch=pass"
    with pytest.raises(BatchDiffers, match=told):
        commit(node, batch, other, [staged(node, first, last, batch)])
    passing = replace(batch, compared=False)
    assert commit(node, passing, other, [staged(node, first, last, passing)]) == SentBatch(0, passed_over=last - first)
    assert sent(connect) == list(range(100))


def test_batch_of_before_digests_is_known_by_its_number_of_messages(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    with connect() as connection:
        connection.execute("INSERT INTO mailroom.spark_batch (name, batch, messages) VALUES ('job', -1, 100)")
    with pytest.raises(BatchDiffers, match="now it has 99"):
        commit(node, JOB, SHAPE, [staged(node, 0, 99)])
    assert commit(node, JOB, SHAPE, [staged(node, 0, 100)]) == SentBatch(0, passed_over=100)
    assert sent(connect) == []


def test_new_checkpoint_repeats_nothing_and_leaves_nothing_out(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    for number in range(2):
        old = SparkBatch("stream", number, "old")
        commit(node, old, SHAPE, [staged(node, number * 100, number * 100 + 100, old)])
    new = [SparkBatch("stream", number, "new", "old") for number in range(3)]
    commit(node, new[0], SHAPE, [staged(node, 0, 100, new[0])])
    with pytest.raises(BatchDiffers):
        commit(node, new[1], SHAPE, [staged(node, 101, 201, new[1])])
    commit(node, new[1], SHAPE, [staged(node, 100, 200, new[1])])
    commit(node, new[2], SHAPE, [staged(node, 200, 300, new[2])])
    # From then on it is the new one's, whatever is said of the old one.
    for batch in (
        SparkBatch("stream", 2, "old"),
        SparkBatch("stream", 3, "old"),
        SparkBatch("stream", 3, "another", "old"),
    ):
        with pytest.raises(StreamTaken, match=f"belongs to the query new, and this is the query {batch.query}"):
            commit(node, batch, SHAPE, [staged(node, 300, 400, batch)])
    own = SparkBatch("stream", 3, "new")
    commit(node, own, SHAPE, [staged(node, 300, 400, own)])
    assert sent(connect) == list(range(400))


def test_two_queries_that_begin_at_once_do_not_share_a_name(dsn: str, connect: Connect) -> None:
    """Each with batches of its own: the first batch of the second query had no rows."""
    node, first, second = Node(dsn=dsn), SparkBatch("stream", 0, "first"), SparkBatch("stream", 1, "second")
    attempts = {batch: staged(node, 0, 10, batch) for batch in (first, second)}
    ends: dict[SparkBatch, str] = {}

    def drive(batch: SparkBatch) -> None:
        try:
            commit(node, batch, SHAPE, [attempts[batch]])
            ends[batch] = "sent"
        except StreamTaken as error:
            ends[batch] = str(error)

    with connect() as holder, connect(autocommit=True) as watcher:
        holder.execute("LOCK TABLE mailroom.outbox IN SHARE MODE")
        drivers = [threading.Thread(target=drive, args=(batch,)) for batch in (first, second)]
        for nth, driver in enumerate(drivers, start=1):
            driver.start()
            eventually(partial(waiting, watcher, nth))
        holder.rollback()
        for driver in drivers:
            driver.join(WITHIN_S)
    assert ends[first] == "sent"
    assert "belongs to the query first" in ends[second]
    assert sent(connect) == list(range(10))


def test_batch_behind_those_in_the_ledger_is_refused(dsn: str, connect: Connect) -> None:
    node, later, earlier = Node(dsn=dsn), SparkBatch("stream", 7, "old"), SparkBatch("stream", 3, "new")
    commit(node, later, SHAPE, [staged(node, 0, 10, later)])
    with pytest.raises(StreamTaken):
        commit(node, earlier, SHAPE, [staged(node, 0, 10, earlier)])
    earlier = SparkBatch("stream", 3, "new", "old")
    with pytest.raises(BatchDiffers, match="has gone past batch 3: the ledger has batch 7"):
        commit(node, earlier, SHAPE, [staged(node, 0, 10, earlier)])
    job = SparkBatch("stream")
    commit(node, job, SHAPE, [staged(node, 10, 20, job)])
    assert sent(connect) == list(range(20))


def test_two_drivers_with_one_key_send_once(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    attempts = [staged(node, 0, 100), staged(node, 0, 100)]
    # The first is held before its COMMIT by a lock on what it writes to last: the second has to wait for it.
    with connect() as holder:
        holder.execute("LOCK TABLE mailroom.outbox IN SHARE MODE")
        drivers = [threading.Thread(target=commit, args=(node, JOB, SHAPE, [one])) for one in attempts]
        for driver in drivers:
            driver.start()
        with connect(autocommit=True) as watcher:
            eventually(partial(waiting, watcher, 2))
        holder.rollback()
    for driver in drivers:
        driver.join()
    assert sent(connect) == list(range(100))
    assert ledger(connect) == [("job", -1, 100)]


def test_lost_answer_to_commit_is_looked_up(dsn: str, connect: Connect) -> None:
    with proxied(dsn) as (proxy, through):
        one = staged(Node(dsn=dsn), 0, 100)
        proxy.at_next_commits(CommitFault.SWALLOW)
        commit(Node(dsn=through), JOB, SHAPE, [one])
        proxy.at_next_commits(CommitFault.CUT)
        other = SparkBatch("other")
        commit(Node(dsn=through), other, SHAPE, [staged(Node(dsn=dsn), 100, 200, other)])
        assert proxy.commits[0] is CommitFault.SWALLOW
    assert sent(connect) == list(range(200))


def test_lost_answer_to_a_tasks_commit_leaves_an_orphan_and_sends_nothing(dsn: str, connect: Connect) -> None:
    with proxied(dsn) as (proxy, through):
        proxy.at_next_commits(CommitFault.SWALLOW)
        with pytest.raises(psycopg.OperationalError):
            staged(Node(dsn=through), 0, 100)
    assert staging_tables(connect) == 1
    commit(Node(dsn=dsn), JOB, SHAPE, [staged(Node(dsn=dsn), 0, 100)])
    assert sent(connect) == list(range(100))
    assert staging_tables(connect) == 0


@pytest.mark.parametrize("what", ["emptied", "gone", "some rows gone"])
def test_staging_that_is_lost_is_not_sent_in_part(dsn: str, connect: Connect, what: str) -> None:
    node = Node(dsn=dsn)
    whole, hurt = staged(node, 0, 100), staged(node, 100, 200)
    name = f"mailroom.{table_of(hurt)}"
    change = {
        "emptied": f"TRUNCATE {name}",
        "gone": f"DROP TABLE {name}",
        "some rows gone": f"DELETE FROM {name} WHERE key = 'key-1'",
    }
    with connect(autocommit=True) as connection:
        connection.execute(change[what].encode())
    with pytest.raises(StagingLost, match="run it again"):
        commit(node, JOB, SHAPE, [whole, hurt])
    assert sent(connect) == []
    assert ledger(connect) == []
    commit(node, JOB, SHAPE, [staged(node, 0, 100), staged(node, 100, 200)])
    assert sent(connect) == list(range(200))


def is_up(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


def test_crash_of_the_server_between_task_and_driver(private_server: Server) -> None:
    dsn = private_server.dsn()
    engine = sqlalchemy.create_engine(
        dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        migrate(connection)
    node = Node(dsn=dsn)
    one = staged(node, 0, 100)
    with closing(psycopg.connect(dsn)) as victim:  # there is nothing to commit
        # One of its processes killed, the server ends all others and recovers as after a crash of its own.
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            victim.execute("SELECT 1")
    eventually(lambda: is_up(dsn))
    with pytest.raises(StagingLost):
        commit(node, JOB, SHAPE, [one])
    with psycopg.connect(dsn) as after:
        assert after.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (0,)


def test_row_that_the_outbox_refuses_fails_the_batch_without_showing_it(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    one = staged(node, 0, 100)
    with connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE mailroom.outbox ADD CONSTRAINT no_key_7 CHECK (key <> 'key-7')")
    with pytest.raises(SendFailed, match=r"CheckViolation \(23514, no_key_7\)") as failure:
        commit(node, JOB, SHAPE, [one])
    assert "key-7" not in str(failure.value)
    assert sent(connect) == []
    assert ledger(connect) == []


def test_unreachable_server_is_told(dsn: str) -> None:
    with proxied(dsn) as (proxy, through):
        one = staged(Node(dsn=dsn), 0, 10)
        proxy.cut()
        with pytest.raises((ConnectionFailed, CommitUnknown)):
            commit(Node(dsn=through), JOB, SHAPE, [one])


LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")


def test_no_limit_of_the_role_or_the_database_ends_a_session(
    dsn: str, connect: Connect, server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a staging COPY nor a move, in which SQL of the user's finds the same; nor through a pooler."""
    node = Node(dsn=dsn)
    with connect(autocommit=True) as connection:
        limits = [*LIMITS, *(["transaction_timeout"] if connection.info.server_version >= 170_000 else [])]
        for name in limits:
            connection.execute(f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {name} = 7777', "
                               "current_database()); END $$".encode())  # fmt: skip
    ours = dict.fromkeys(limits, "0") | {"lock_timeout": "1min", "idle_in_transaction_session_timeout": "10min"}
    found: list[dict[str, str]] = []

    def shown(connection: psycopg.Connection) -> dict[str, str]:
        rows = connection.execute("SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (%s)", [limits])
        return dict(rows.fetchall())

    def tell(connection: psycopg.Connection, _: object) -> None:
        found.append(shown(connection))

    with psycopg.connect(dsn) as another:
        assert shown(another) == dict.fromkeys(limits, "7777ms")

    @contextmanager
    def of_copy(connection: psycopg.Connection) -> Iterator[None]:
        found.append(shown(connection))
        yield

    monkeypatch.setattr(staging, "end_of_copy", of_copy)
    commit(node, JOB, SHAPE, [staged(node, 0, 10)], UserSql(tell, ""))
    with (
        pgbouncer(dsn, server_home) as pooled,
        Node(dsn=pooled).connect("test", autocommit=True) as connection,
        connection.transaction(),
    ):
        found.append(shown(connection))
    assert found == [ours, ours, ours]


# -- The sweeper ------------------------------------------------------------------------------------------------------


def test_sweeper_removes_orphans_only(dsn: str, connect: Connect) -> None:
    node, waiting = Node(dsn=dsn), SparkBatch("still to be committed")
    live = staged(node, 0, 100, waiting)
    commit(node, JOB, SHAPE, [staged(node, 100, 200)])
    late = staged(node, 100, 200)  # a second copy of a task that was at work when the job was committed
    assert staging_tables(connect) == 2
    assert sweep(node) == 1
    with connect() as connection:
        assert connection.execute(f"SELECT to_regclass('mailroom.{table_of(late)}')".encode()).fetchone() == (None,)
    commit(node, waiting, SHAPE, [live])
    assert sorted(sent(connect)) == list(range(200))


def test_commit_is_a_success_whatever_becomes_of_the_sweep(
    dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(dsn=dsn)
    one = staged(node, 0, 10)
    open_session = Node.connect

    def full(self: Node, role: str, **options: Any) -> psycopg.Connection:
        if role == "sweep":
            raise ConnectionFailed("too many clients")
        return open_session(self, role, **options)

    monkeypatch.setattr(Node, "connect", full)
    commit(node, JOB, SHAPE, [one])
    assert sent(connect) == list(range(10))


def test_sweeper_removes_what_was_abandoned(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    old, young = staged(node, 0, 10), staged(node, 10, 20)
    with connect(autocommit=True) as connection:
        connection.execute(
            "UPDATE mailroom.spark_staging SET at = at - interval '25 hours' WHERE token = %s", [old.token]
        )
    assert sweep(node) == 1
    with pytest.raises(StagingLost):
        commit(node, JOB, SHAPE, [old, young])
    assert sent(connect) == []


def test_sweeper_leaves_what_is_being_moved(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    one, _ = staged(node, 0, 10), staged(node, 10, 20)
    with connect(autocommit=True) as connection:
        connection.execute("UPDATE mailroom.spark_staging SET at = at - interval '25 hours'")
    with connect() as mover:
        mover.execute(f"SELECT count(*) FROM mailroom.{table_of(one)}".encode())
        assert sweep(node) == 1  # the other one, although the first is locked
    assert staging_tables(connect) == 1


def test_commit_succeeds_although_an_orphan_cannot_be_dropped_yet(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    orphan = staged(node, 0, 10)
    with connect() as reader:
        reader.execute(f"SELECT count(*) FROM mailroom.{table_of(orphan)}".encode())
        commit(node, JOB, SHAPE, [staged(node, 0, 10)])
    assert sent(connect) == list(range(10))
    sweep(node)
    assert staging_tables(connect) == 0


def test_sweeper_leaves_tables_of_other_roles(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    staged(node, 0, 10)
    with connect(autocommit=True) as connection:
        connection.execute("UPDATE mailroom.spark_staging SET at = at - interval '25 hours'")
        connection.execute("CREATE ROLE sweeper_of_others")
        try:
            connection.execute("GRANT ALL ON SCHEMA mailroom TO sweeper_of_others")
            connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO sweeper_of_others")
            connection.execute("SET ROLE sweeper_of_others")
            assert run(connection, finding_orphans("mailroom", 24.0)) == []
            connection.execute("RESET ROLE")
        finally:
            connection.execute("DROP OWNED BY sweeper_of_others")
            connection.execute("DROP ROLE sweeper_of_others")
    assert staging_tables(connect) == 1


def test_abort_drops_what_it_is_told_and_nothing_that_was_sent(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    one, other = staged(node, 0, 10), staged(node, 10, 20)
    drop(node, [one])
    assert staging_tables(connect) == 1
    again = staged(node, 0, 10)
    commit(node, JOB, SHAPE, [again, other])
    drop(node, [again, other])  # as Spark does after a commit that failed after the database's
    assert sent(connect) == list(range(20))


def test_values_read_back(dsn: str, connect: Connect) -> None:
    node = Node(dsn=dsn)
    commit(node, JOB, SHAPE, [staged(node, 0, 3)])
    assert values(connect) == [{"id": 0}, {"id": 1}, {"id": 2}]
