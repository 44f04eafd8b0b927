"""outbox_jdbc: of each message id the first row becomes a message, however often and by how many it is written."""

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from dispatcher.housekeeping import janitor
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.leading import KEEPER
from inbox import Inbox
from mailroom import create_inbox, schema
from mailroom.session import settings
from mailroom.testing import deliver
from tests.support.databases import Connect
from tests.support.roles import named, rights
from tests.support.waiting import WITHIN_S, wait_until_blocked

Session = psycopg.Connection[Any]
ID = UUID("018f6f0a-0000-7000-8000-000000000001")
WRITE = "INSERT INTO mailroom.outbox_jdbc (message_id, topic, key, value_json) VALUES (%s, 'shipping', %s, %s)"
ALL = ["outbox_jdbc", "outbox_jdbc_copy", "outbox_jdbc_id", "outbox_jdbc_take"]
MANY = """
INSERT INTO mailroom.outbox_jdbc (message_id, topic, key, value_json)
SELECT md5(n::text), 'shipping', 'k' || n %% 10, n::text FROM generate_series(1, %s) AS g (n) ORDER BY g.n
"""


@pytest.fixture
def session(connect: Connect) -> Session:
    """A session in autocommit."""
    return connect(autocommit=True)


def write(session: Session, *values: object, message_id: object = ID, key: str = "k") -> int:
    """Write rows of one id in one statement each; returns how many were taken."""
    return sum(session.execute(WRITE, [message_id, key, str(value)]).rowcount for value in values)


def sent(session: Session) -> list[object]:
    return [value for (value,) in session.execute("SELECT value_json FROM mailroom.outbox ORDER BY position")]


# -- Once -------------------------------------------------------------------------------------------------------------


def test_id_that_stands_twice_in_a_statement_is_taken_once_and_the_first_wins(session: Session) -> None:
    statement = WRITE + ", (%s, 'shipping', 'k', '2'), (%s, 'shipping', 'k', '3')"
    assert session.execute(statement, [ID, "k", "1", ID, uuid4()]).rowcount == 2
    assert sent(session) == [1, 3]


def test_id_of_an_earlier_transaction_is_passed_over_whatever_else_the_row_says(session: Session) -> None:
    assert [write(session, 1), write(session, 2, key="other"), write(session, 1)] == [1, 0, 0]
    assert sent(session) == [1]


def test_id_is_known_after_its_message_was_delivered_and_reaped(session: Session) -> None:
    write(session, 1)
    with session.transaction():
        create_inbox(session, "shipping")
        deliver(session)
        assert [(message.id, message.value) for message in Inbox("shipping").reap(session, "k")] == [(ID, 1)]
    assert write(session, 1) == 0


def test_rolled_back_row_leaves_neither_message_nor_id(session: Session) -> None:
    with session.transaction(force_rollback=True):
        write(session, 1)
    with session.transaction(), pytest.raises(errors.CheckViolation, match="outbox_key"), session.transaction():
        write(session, 2, key="")
    assert session.execute("SELECT FROM mailroom.outbox_jdbc_id").fetchall() == []
    assert write(session, 3) == 1
    assert sent(session) == [3]


@pytest.mark.parametrize(("commits", "taken"), [(True, 0), (False, 1)])
def test_row_waits_for_another_of_its_id_and_takes_its_place_if_that_rolls_back(
    session: Session, connect: Connect, commits: bool, taken: int
) -> None:
    first, second = connect(), connect(autocommit=True)
    write(first, "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write, second, "2")
        assert wait_until_blocked(session, second.info.backend_pid) == [first.info.backend_pid]
        first.commit() if commits else first.rollback()
        assert waiting.result() == taken
    assert sent(session) == [1 if commits else 2]


def test_of_two_with_other_orders_one_is_rolled_back_and_can_begin_anew(session: Session, connect: Connect) -> None:
    ids = uuid4(), uuid4()
    first, second = connect(), connect()
    first.execute("SET deadlock_timeout = '1h'")  # so that the second is the one that finds out
    second.execute("SET deadlock_timeout = '10ms'")
    write(first, 1, message_id=ids[0])
    write(second, 2, message_id=ids[1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write, first, 2, message_id=ids[1])
        wait_until_blocked(session, first.info.backend_pid)
        with pytest.raises(errors.DeadlockDetected):
            write(second, 1, message_id=ids[0])
        second.rollback()
        assert waiting.result() == 1
    first.commit()
    assert [write(second, 2, message_id=ids[1]), write(second, 1, message_id=ids[0])] == [0, 0]
    assert sent(session) == [1, 2]


def test_id_made_in_the_statement_is_the_one_that_is_remembered(session: Session) -> None:
    session.execute(
        "INSERT INTO mailroom.outbox_jdbc (message_id, topic, value_json) VALUES (gen_random_uuid(), 'shipping', '1')"
    )
    both = session.execute("SELECT o.message_id = i.id FROM mailroom.outbox AS o, mailroom.outbox_jdbc_id AS i")
    assert both.fetchall() == [(True,)]


CONDITIONS = [
    "FROM given JOIN wanted USING (n)",
    "FROM given JOIN often USING (n)",
    "FROM given WHERE EXISTS (SELECT FROM wanted WHERE wanted.n = given.n)",
    "FROM given WHERE slowly(n) IN (3, 5)",
    "FROM given ORDER BY n DESC OFFSET 0 LIMIT 2",
]


def test_only_ids_of_rows_that_the_statement_gives_are_remembered(session: Session) -> None:
    # Asked of a row that a join drops later on, an id would be remembered without its message, which would be lost; of
    # one that a join doubles later on, the message would be sent twice.
    session.execute(
        """
        CREATE TABLE given AS SELECT n FROM generate_series(1, 1000) AS g (n);
        CREATE TABLE wanted AS SELECT n FROM generate_series(3, 3000, 998) AS g (n);
        CREATE TABLE often AS SELECT 2 * n AS n FROM generate_series(1, 500) AS g (n), generate_series(1, 20);
        CREATE FUNCTION slowly(integer) RETURNS integer LANGUAGE plpgsql COST 100000 AS 'BEGIN RETURN $1; END';
        ANALYZE given; ANALYZE wanted; ANALYZE often
        """
    )
    for condition in CONDITIONS:
        session.execute("DELETE FROM mailroom.outbox_jdbc_id; DELETE FROM mailroom.outbox")
        taken = session.execute(
            "INSERT INTO mailroom.outbox_jdbc (message_id, topic, value_json) "
            f"SELECT md5(given.n::text), 'shipping', '1' {condition}".encode()
        ).rowcount
        ids = session.execute("SELECT id FROM mailroom.outbox_jdbc_id ORDER BY id").fetchall()
        sent = session.execute("SELECT message_id FROM mailroom.outbox ORDER BY message_id").fetchall()
        assert ids == sent, condition
        assert len(ids) == taken > 0


# -- What becomes of a row --------------------------------------------------------------------------------------------


def test_columns_that_are_absent_or_null_get_the_outboxes_defaults(session: Session) -> None:
    session.execute("SET application_name = 'a job'")
    session.execute(
        """
        INSERT INTO mailroom.outbox_jdbc VALUES
            (gen_random_uuid(), 'shipping', NULL, NULL, NULL, NULL, '\\x01', NULL, NULL, NULL, NULL, NULL)
        """
    )
    session.execute(
        "INSERT INTO mailroom.outbox_jdbc (message_id, topic, value) VALUES (gen_random_uuid(), 'shipping', '\\x01')"
    )
    session.execute("INSERT INTO mailroom.outbox (topic, value) VALUES ('shipping', '\\x01')")
    rows = session.execute(
        """
        SELECT topic, key ~ '^[0-9a-f-]{36}$', kind, message_type, event_type, value, value_json, headers, deliver_at,
               expires_at, after_clock, source, sent_at <= clock_timestamp(), xact::text::bigint > 0
        FROM mailroom.outbox
        """
    ).fetchall()
    assert len(rows) == 3
    assert len({str(row) for row in rows}) == 1


def test_every_column_reaches_the_message(session: Session) -> None:
    times = "2030-01-02 03:04:05.678901+00", "2031-01-02 03:04:05.678901+00"
    session.execute(
        "INSERT INTO mailroom.outbox_jdbc VALUES (%s, 'a.b', 'k', 'E', 'O', 'U', NULL, %s, %s, %s, %s, 7)",
        [ID, '{"a": [1, "x"]}', '{"user": "ada"}', *times],
    )
    row = session.execute(
        """
        SELECT message_id, topic, key, kind, message_type, event_type, value, value_json, headers,
               (deliver_at AT TIME ZONE 'UTC')::text || '+00', (expires_at AT TIME ZONE 'UTC')::text || '+00',
               after_clock
        FROM mailroom.outbox
        """
    ).fetchone()
    assert row == (ID, "a.b", "k", "E", "O", "U", None, {"a": [1, "x"]}, {"user": "ada"}, *times, 7)


def test_id_may_be_the_digits_of_an_md5(session: Session) -> None:
    assert [write(session, 1, message_id=ID.hex), write(session, 2, message_id=ID)] == [1, 0]


def test_row_without_id_is_refused_and_told_what_to_do(session: Session) -> None:
    with pytest.raises(errors.NotNullViolation, match="outbox_jdbc has no message_id") as caught:
        write(session, 1, message_id=None)
    diagnostic = caught.value.diag
    assert (diagnostic.table_name, diagnostic.column_name) == ("outbox_jdbc", "message_id")
    assert "a UUID that is the same whenever its row is computed again" in str(diagnostic.message_hint)


def test_row_that_the_outbox_would_refuse_is_refused_by_the_same_constraint(session: Session) -> None:
    for column, value, constraint in (
        ("topic", "no topic", "outbox_topic"),
        ("key", "", "outbox_key"),
        ("kind", "X", "outbox_kind"),
        ("kind", "", "outbox_kind"),
        ("kind", "Refund", "outbox_kind"),
        ("message_type", "Order", "outbox_message_type"),
        ("event_type", "Cancelled", "outbox_event_type"),
        ("value", "\\x01", "outbox_one_value"),
        ("headers", '{"n": 1}', "outbox_headers"),
        ("deliver_at", "infinity", "outbox_deliver_at"),
        ("after_clock", "-1", "outbox_after_clock"),
    ):
        row = {"message_id": str(ID), "topic": "shipping", "value_json": "1", column: value}
        columns, values = ", ".join(row), ", ".join(f"'{each}'" for each in row.values())
        with pytest.raises(errors.CheckViolation) as caught:
            session.execute(f"INSERT INTO mailroom.outbox_jdbc ({columns}) VALUES ({values})".encode())
        assert caught.value.diag.constraint_name == constraint
    assert session.execute("SELECT FROM mailroom.outbox_jdbc_id").fetchall() == []


def test_many_rows_of_a_statement_keep_their_order_and_are_taken_once(session: Session) -> None:
    assert [session.execute(MANY, [2_000]).rowcount for _ in range(2)] == [2_000, 0]
    assert sent(session) == list(range(1, 2_001))


def test_what_stands_before_the_position_is_assigned_before_it(session: Session) -> None:
    # A writer that shows no transaction id while it holds a position would be passed over by the floor.
    session.execute(
        """
        CREATE FUNCTION pg_temp.seen() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            ASSERT NEW.xact = pg_current_xact_id_if_assigned() AND NEW.position > 0;
            RETURN NEW;
        END $$;
        CREATE TRIGGER seen BEFORE INSERT ON mailroom.outbox FOR EACH ROW EXECUTE FUNCTION pg_temp.seen()
        """
    )
    assert write(session, 1) == 1


def test_copy_takes_every_id_once_and_in_order(session: Session) -> None:
    for _ in range(2):
        with session.cursor().copy("COPY mailroom.outbox_jdbc (message_id, topic, key, value_json) FROM STDIN") as copy:
            for n in (*range(1_000), 5):
                copy.write_row((str(UUID(int=n)), "shipping", f"k{n % 10}", str(n)))
    assert sent(session) == list(range(1_000))


def test_row_rings_the_bell_and_is_told_to_be_silent(session: Session, connect: Connect) -> None:
    listener = connect(autocommit=True)
    [(channel,)] = session.execute("SELECT concat('mailroom:', 'mailroom.outbox'::regclass::oid)").fetchall()
    listener.execute(f'LISTEN "{channel}"'.encode())
    write(session, 1)
    assert [notify.channel for notify in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [channel]
    session.execute("SET mailroom.notify = off")
    write(session, 2, message_id=uuid4())
    assert list(listener.notifies(timeout=0)) == []


def test_it_shows_no_rows(session: Session) -> None:
    write(session, 1)
    assert session.execute("SELECT * FROM mailroom.outbox_jdbc").fetchall() == []


def test_nothing_in_the_callers_search_path_gets_in_between(session: Session) -> None:
    session.execute(
        """
        CREATE SCHEMA trap; SET search_path = trap, pg_catalog;
        CREATE TABLE trap.outbox_jdbc_id (id uuid); CREATE TABLE trap.outbox (LIKE mailroom.outbox);
        CREATE FUNCTION trap.gen_random_uuid() RETURNS uuid LANGUAGE sql AS 'SELECT NULL::uuid';
        CREATE FUNCTION trap.octet_length(text) RETURNS integer LANGUAGE sql AS 'SELECT 9';
        CREATE FUNCTION trap.outbox_jdbc_take(uuid) RETURNS boolean LANGUAGE sql AS 'SELECT false';
        """
    )
    assert write(session, 1) == 1
    assert session.execute("SELECT FROM trap.outbox_jdbc_id UNION ALL SELECT FROM trap.outbox").fetchall() == []


# "order" is a word of SQL's own.
@pytest.mark.slow
def test_nodes_of_one_database_do_not_share_their_ids(session: Session, dsn: str) -> None:
    engine = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as connection:
        schema.migrate(connection, schema="order")
    engine.dispose()
    for statement in (WRITE, WRITE.replace("mailroom", '"order"')):
        assert session.execute(statement, [ID, "k", "1"]).rowcount == 1


# -- Who may ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_writer(session: Session, connect: Connect, dsn: str) -> Iterator[Callable[[], Session]]:
    """Return what opens a session of a role for this view, with what `mailroom grant` gives and nothing else."""
    role = f"{conninfo_to_dict(dsn)['dbname']}_shop_spark"[-63:]
    session.execute(f"CREATE ROLE {role}; {named(rights('jdbc-writer'), role)}".encode())

    def open_session() -> Session:
        writer = connect(autocommit=True)
        writer.execute(f"SET SESSION AUTHORIZATION {role}".encode())
        return writer

    yield open_session
    session.execute(f"DROP OWNED BY {role}".encode())
    session.execute(f"DROP ROLE {role}".encode())


def test_role_writes_by_insert_and_by_copy(session: Session, as_writer: Callable[[], Session]) -> None:
    writer = as_writer()
    assert [write(writer, 1), write(writer, 1)] == [1, 0]
    with writer.cursor().copy("COPY mailroom.outbox_jdbc (message_id, topic, value_json) FROM STDIN") as copy:
        copy.write_row((str(uuid4()), "shipping", "2"))
    assert writer.execute("SELECT * FROM mailroom.outbox_jdbc WHERE 1 = 0").fetchall() == []  # what Spark asks first
    assert sent(session) == [1, 2]


def test_role_can_do_nothing_else(as_writer: Callable[[], Session]) -> None:
    writer = as_writer()
    for statement in (
        "INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '1')",
        "SELECT FROM mailroom.outbox",
        "SELECT id FROM mailroom.outbox_jdbc_id",
        "INSERT INTO mailroom.outbox_jdbc_id (id, at) VALUES (gen_random_uuid(), '1970-01-01')",
        "DELETE FROM mailroom.outbox_jdbc_id",
        "UPDATE mailroom.outbox_jdbc_id SET at = now()",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            writer.execute(statement.encode())


def test_who_may_not_write_cannot_use_up_ids(
    session: Session, connect: Connect, as_writer: Callable[[], Session]
) -> None:
    writer = as_writer()
    [(role,)] = writer.execute("SELECT current_user").fetchall()
    session.execute(f"REVOKE ALL ON mailroom.outbox_jdbc, mailroom.outbox_jdbc_id FROM {role}".encode())
    session.execute(f"REVOKE INSERT (id) ON mailroom.outbox_jdbc_id FROM {role}".encode())
    for statement in (f"SELECT mailroom.outbox_jdbc_take('{ID}')", WRITE.replace("%s", "NULL")):
        with pytest.raises(errors.InsufficientPrivilege):
            writer.execute(statement.encode())


# -- How long ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def keeper(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """The session of the dispatcher that does the housekeeping."""
    connection = await settings.connect_async(dsn, "keeper", KEEPER)
    async with connection:
        yield connection


def age(session: Session, hours: int) -> None:
    session.execute("UPDATE mailroom.outbox_jdbc_id SET at = now() - %s * interval '1 hour'", [hours])


@pytest.mark.parametrize(("hours", "taken"), [(7 * 24 - 1, 0), (7 * 24 + 1, 1)])
async def test_id_is_remembered_for_seven_days(
    session: Session, keeper: psycopg.AsyncConnection, hours: int, taken: int
) -> None:
    write(session, 1)
    age(session, hours)
    await Janitor("mailroom").run_once(keeper)
    assert write(session, 2) == taken


async def test_old_ids_are_swept_in_steps_one_soon_after_the_other(
    session: Session, keeper: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "SWEPT_ROWS", 4)
    session.execute(MANY, [10])
    age(session, 8 * 24)
    sweeper = Janitor("mailroom", lambda: 1_000.0)
    left = []
    for _ in range(4):
        soon = await sweeper.run_once(keeper)
        left.append((soon, session.execute("SELECT count(*) FROM mailroom.outbox_jdbc_id").fetchall()[0][0]))
    assert left == [(1, 6), (1, 2), (0, 0), (0, 0)]
