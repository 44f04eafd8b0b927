"""Row security on Mailroom's tables: a role that does not see all rows is told so by an error, and works on none."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from dispatcher import Dispatcher, deliver_all, execute_all
from dispatcher.daemon import DRAIN
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.delivery.floor import FIRST
from dispatcher.executor.execute import executing
from dispatcher.executor.targets.registration import Registrations
from dispatcher.lanes.leading import open_session
from inbox import AsyncInbox, Inbox, Message, NoReply, Parked, Requests, Worker
from mailroom import create_inbox
from mailroom.errors import SchemaError
from mailroom.node.dead_letter import DeadLetters
from mailroom.node.status import outbox_backlog, status
from mailroom.schema import check, current_revision, migrate
from mailroom.session.commit import resolve
from mailroom.session.settings import refusal
from mailroom.sql.runner import run
from outbox import AsyncOutbox, Outbox, Outgoing, Store
from outbox.executable import Executable
from tests.support.command import mailroom
from tests.support.drivers import opened
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import NEVER_S, working

pytestmark = pytest.mark.both_versions

HIDDEN = r"Row security hides rows of schema 'mailroom' from role '.*': .*\b{}\b.*BYPASSRLS"
REFUSED = 'query would be affected by row-level security policy for table "{}"'
# Hides the key k and lets everything else be seen: a claim would overtake it.
SOME = "CREATE POLICY part ON mailroom.{0} USING (key <> 'k') WITH CHECK (true)"
OF_AN_INBOX = ("inbox_registry", "inbox_shipping", "key_state")


class Owner:
    """The node's owner, who is no superuser."""

    def __init__(self, node: Node, name: str, dsn: str) -> None:
        self.node, self.name, self.dsn = node, name, dsn

    def force(self, table: str) -> None:
        self.node.connection.execute(f"ALTER TABLE mailroom.{table} ENABLE ROW LEVEL SECURITY")
        self.node.connection.execute(f"ALTER TABLE mailroom.{table} FORCE ROW LEVEL SECURITY")

    @contextmanager
    def forced(self, table: str) -> Iterator[None]:
        self.force(table)
        yield
        self.node.connection.execute(f"ALTER TABLE mailroom.{table} DISABLE ROW LEVEL SECURITY")

    def on(self, work: Callable[[psycopg.Connection[Any]], object]) -> object:
        with psycopg.connect(self.dsn) as connection:
            return work(connection)


@pytest.fixture
def owner(node: Node) -> Iterator[Owner]:
    """The owner of a node with the inbox `shipping`, in which a message of the key k waits, and after it one of l."""
    node.inbox("shipping", "order.paid")
    node.send("order.paid", 1, key="k")
    node.send("order.paid", 2, key="l")
    node.deliver_all()
    with role(node.dsn, owns="mailroom") as (name, dsn):
        yield Owner(node, name, dsn)


# -- Consumers --------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[psycopg.Connection[Any]], object]] = {
    "reap_any": lambda connection: Inbox("shipping").reap_any(connection),
    "reap": lambda connection: Inbox("shipping").reap(connection, "k"),
    "peek": lambda connection: Inbox("shipping").peek(connection),
    "backlog": lambda connection: Inbox("shipping").backlog(connection),
    "parked": lambda connection: Parked("shipping").keys(connection),
}


def test_reader_of_an_inbox_is_told_what_is_hidden(owner: Owner) -> None:
    for read in READERS.values():
        for table in OF_AN_INBOX:
            with owner.forced(table), pytest.raises(SchemaError, match=HIDDEN.format(table)):
                owner.on(read)
    for read in READERS.values():
        owner.on(read)


async def test_async_reader_is_told_too(owner: Owner) -> None:
    owner.force("inbox_registry")
    async with await psycopg.AsyncConnection.connect(owner.dsn) as connection:
        with pytest.raises(SchemaError, match=HIDDEN.format("inbox_registry")):
            await AsyncInbox("shipping").reap_any(connection)


@pytest.mark.parametrize("policy", ["none", "some"])
def test_claim_after_row_security_came_is_refused_by_the_server(owner: Owner, policy: str) -> None:
    """As in a worker that runs: its inbox was looked up before. With a policy that shows some it would overtake."""
    inbox = Inbox("shipping")
    owner.on(inbox.peek)
    for table in OF_AN_INBOX:
        with owner.forced(table):
            if policy == "some" and table != "inbox_registry":
                owner.node.connection.execute(SOME.format(table).encode())
            for claim in (inbox.reap_any, lambda connection: inbox.reap(connection, "k")):
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match=REFUSED.format(table)) as refused:
                    owner.on(claim)
                assert "BYPASSRLS" in str(refusal(refused.value))
            for look in (inbox.peek, inbox.backlog):
                with pytest.raises(SchemaError, match=HIDDEN.format(table)):
                    owner.on(look)


def test_callers_own_row_security_is_as_before_after_a_claim(owner: Owner) -> None:
    with psycopg.connect(owner.dsn) as connection:
        assert len(Inbox("shipping").reap_any(connection)) == 2
        assert connection.execute("SHOW row_security").fetchone() == ("on",)


@pytest.mark.parametrize("claim", ["reap_any", "reap", "total"])
def test_claim_that_does_not_see_its_inbox_says_so_whatever_the_reason(node: Node, claim: str) -> None:
    node.inbox("shipping", order="total" if claim == "total" else "key")
    inbox = Inbox("shipping")
    inbox.peek(node.connection)
    node.connection.execute("DELETE FROM mailroom.inbox_registry")
    refused = pytest.raises(SchemaError, match="sees no row of inbox 'shipping' in inbox_registry")
    with node.connection.transaction(force_rollback=True), refused:
        inbox.reap(node.connection, "k") if claim == "reap" else inbox.reap_any(node.connection)


def test_worker_that_runs_ends_and_says_what_to_do(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    with role(owner.node.dsn, *rights("reaper", "shipping")) as (_, dsn):
        worker = Worker(dsn, "shipping", lambda message, connection: None, poll_interval_s=0.1, handle_signals=False)
        with working(worker, raises=SchemaError) as thread:
            eventually(lambda: not owner.node.delivered())
            owner.node.connection.execute(b"ALTER TABLE mailroom.inbox_registry ENABLE ROW LEVEL SECURITY")
            thread.join(WITHIN_S)
    [line] = [each.message for each in caplog.records if "the worker has ended" in each.message]
    assert re.search(HIDDEN.format("inbox_registry"), line)


def test_policies_of_users_tables_count_in_handlers(owner: Owner) -> None:
    with owner.node.connection.transaction():
        owner.node.connection.execute(b"CREATE TABLE mine (a int); INSERT INTO mine VALUES (1), (2)")
        owner.node.connection.execute(b"ALTER TABLE mine ENABLE ROW LEVEL SECURITY")
        owner.node.connection.execute(b"CREATE POLICY one ON mine USING (a = 1)")
        owner.node.connection.execute(f"GRANT SELECT ON mine TO {owner.name}".encode())
    seen = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        seen.append(connection.execute("SELECT a FROM mine").fetchall())
        if len(seen) == 2:
            worker.stop()

    worker = Worker(owner.dsn, "shipping", handle, poll_interval_s=NEVER_S, handle_signals=False)
    worker.run()
    assert seen == [[(1,)], [(1,)]]


# -- Programs, and calls about a whole node ---------------------------------------------------------------------------


def test_check_names_each_table(owner: Owner) -> None:
    rows = owner.node.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace AND relkind IN ('r', 'p')"
    )
    assert len(rows) > 20
    with psycopg.connect(owner.dsn, autocommit=True) as connection:
        for (table,) in rows:
            with owner.forced(table), pytest.raises(SchemaError, match=HIDDEN.format(table)):
                check(connection)
        check(connection)


PROGRAMS: dict[str, Callable[[Owner], object]] = {
    "status": lambda owner: owner.on(status),
    "migrate": lambda owner: migrate(owner.dsn),
    "migrate down": lambda owner: migrate(owner.dsn, revision="base", discard=True),
    "revision": lambda owner: owner.on(current_revision),
    "create_inbox": lambda owner: owner.on(lambda connection: create_inbox(connection, "other")),
    "deliver_all": lambda owner: deliver_all(owner.dsn),
    "execute_all": lambda owner: execute_all(owner.dsn),
    "dispatcher": lambda owner: asyncio.run(Dispatcher(owner.dsn).run()),
    "worker": lambda owner: Worker(owner.dsn, "shipping", print, poll_interval_s=NEVER_S, handle_signals=False).run(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_who_works_on_a_node_is_told_what_is_hidden(owner: Owner, program: str) -> None:
    """And not that there were no schema, where its revision is hidden."""
    for table in ("alembic_version", "node", "inbox_registry", "outbox"):
        with owner.forced(table), pytest.raises(SchemaError, match=HIDDEN.format(table)):
            PROGRAMS[program](owner)


CALLS: list[tuple[str, Callable[[psycopg.Connection[Any]], object]]] = [
    ("dead_letter", lambda connection: DeadLetters().find(connection)),
    ("dead_letter", lambda connection: DeadLetters().get(connection, 1)),
    ("dead_letter", lambda connection: DeadLetters().discard(connection, None, actor="me")),
    ("node", lambda connection: DeadLetters().requeue(connection, None, actor="me")),
    ("outbox", outbox_backlog),
    ("store", lambda connection: Store().get(connection, "k")),
    ("accounting", lambda connection: Store().books(connection, "k")),
]


def test_call_that_reads_one_table_is_told_too(owner: Owner) -> None:
    for table, work in CALLS:
        owner.on(work)
        with owner.forced(table), pytest.raises(SchemaError, match=HIDDEN.format(table)):
            owner.on(work)


def test_hidden_token_is_not_taken_for_one_that_is_too_old(owner: Owner) -> None:
    """Its transaction has committed: to say that it was rolled back, or lost, would have it run again."""
    [(token,)] = owner.node.rows("INSERT INTO mailroom.commit_token SELECT gen_random_uuid(), true RETURNING token")
    owner.force("commit_token")
    owner.node.connection.execute(b"CREATE POLICY adds ON mailroom.commit_token FOR INSERT WITH CHECK (true)")
    owner.node.connection.execute(b"CREATE POLICY sees ON mailroom.commit_token FOR SELECT USING (NOT committed)")
    with pytest.raises(SchemaError, match=HIDDEN.format("commit_token")):
        resolve(partial(psycopg.connect, owner.dsn), token)


def test_commands_say_it_in_one_line(owner: Owner) -> None:
    owner.force("node")
    for command in (("status",), ("dispatcher", "deliver-all"), ("migrate",), ("dead-letter", "list")):
        result = mailroom(*command, dsn=owner.dsn)
        assert result.exit_code == 1, command
        assert "mailroom: error: Row security hides rows of schema 'mailroom'" in result.stderr, command
        assert "Traceback" not in result.output, command


def test_role_that_does_not_own_the_tables_is_told_too(node: Node) -> None:
    node.inbox("shipping")
    grants = ("GRANT USAGE ON SCHEMA mailroom TO {role}", "GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {role}")
    with role(node.dsn, *grants) as (name, dsn):
        other = Owner(node, name, dsn)
        assert other.on(READERS["reap_any"]) == []
        node.connection.execute(b"ALTER TABLE mailroom.inbox_registry ENABLE ROW LEVEL SECURITY")
        with pytest.raises(SchemaError, match=HIDDEN.format("inbox_registry")):
            other.on(READERS["reap_any"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("table", ["node", "alembic_version"])
def test_row_that_must_exist_and_was_deleted_is_told(owner: Owner, table: str) -> None:
    owner.node.connection.execute(f"DELETE FROM mailroom.{table}".encode())
    for program in ("status", "deliver_all", "dispatcher"):
        with pytest.raises(SchemaError, match=f"this role sees no row in the table {table}"):
            PROGRAMS[program](owner)


def test_daemon_notices_row_security_that_comes_while_it_works(owner: Owner) -> None:
    """Its delivery is refused by the server, and takes nothing."""

    async def work() -> None:
        async with open_session(owner.dsn, "dispatcher", DRAIN) as session:
            deliverer = Deliverer(session, "mailroom")
            await deliverer.drain()
            owner.force("inbox_registry")
            owner.node.send("order.paid", 3, key="m")
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=REFUSED.format("inbox_registry")):
                await deliverer.drain()

    asyncio.run(work())
    assert owner.node.waiting() == ["m"]


async def test_daemon_says_what_to_do_and_goes_on_when_it_is_done(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Dispatcher(owner.dsn)
    running = asyncio.create_task(daemon.run())
    try:
        owner.node.send("order.paid", 0, key="a")
        await eventually_async(lambda: not owner.node.waiting())
        with owner.forced("inbox_registry"):
            owner.node.send("order.paid", 3, key="m")
            await eventually_async(lambda: "BYPASSRLS" in caplog.text)
            assert owner.node.waiting() == ["m"]
        await eventually_async(lambda: not owner.node.waiting())
    finally:
        daemon.stop()
        await running
    assert [key for (key,) in owner.node.delivered("key")] == ["k", "l", "a", "m"]


def test_executor_notices_row_security_that_comes_while_it_works(owner: Owner) -> None:
    with owner.node.connection.transaction():
        Store().increment(owner.node.connection, "n")
    assert execute_all(owner.dsn).taken == 1
    for table in ("outbox_executable", "store", "dead_letter"):
        with owner.forced(table), pytest.raises(SchemaError, match=HIDDEN.format(table)):
            owner.on(lambda connection: run(connection, executing("mailroom", start=FIRST, rows=10, max_bytes=1000)))


def test_policies_of_users_tables_count_in_what_the_executor_runs(owner: Owner) -> None:
    with owner.node.connection.transaction():
        for statement in (
            "CREATE SCHEMA app; CREATE TABLE app.mine (a int); INSERT INTO app.mine VALUES (1), (2)",
            f"GRANT ALL ON SCHEMA app TO {owner.name}; GRANT ALL ON app.mine TO {owner.name}",
            "ALTER TABLE app.mine ENABLE ROW LEVEL SECURITY; CREATE POLICY one ON app.mine USING (a = 1)",
            "CREATE FUNCTION app.spend(jsonb) RETURNS jsonb LANGUAGE sql AS 'DELETE FROM app.mine; SELECT to_jsonb(1)'",
            f"ALTER FUNCTION app.spend(jsonb) OWNER TO {owner.name}",
        ):
            owner.node.connection.execute(statement.encode())
    owner.on(lambda connection: Registrations().register_function(connection, "spend", "app.spend", actor="me"))
    owner.on(lambda connection: Store().call(connection, "spend", {}))
    assert execute_all(owner.dsn).taken == 1
    assert owner.node.dead() == []
    assert owner.node.rows("SELECT a FROM app.mine") == [(2,)]


# -- Writers ----------------------------------------------------------------------------------------------------------

WRITER = (
    "GRANT USAGE ON SCHEMA mailroom TO {role}",
    "GRANT SELECT ON mailroom.alembic_version TO {role}",
    "GRANT INSERT, SELECT (message_id) ON mailroom.outbox TO {role}",
    "GRANT INSERT ON mailroom.outbox_executable TO {role}",
    "CREATE POLICY mine ON mailroom.outbox FOR INSERT TO {role} WITH CHECK (topic = 'mine')",
    "CREATE POLICY mine ON mailroom.outbox_executable FOR INSERT TO {role} WITH CHECK (key = 'mine')",
)


def bind(node: Node) -> None:
    for table in ("outbox", "outbox_executable"):
        node.connection.execute(f"ALTER TABLE mailroom.{table} ENABLE ROW LEVEL SECURITY".encode())


@pytest.fixture
def writer(node: Node) -> Iterator[str]:
    """The connection string of a role that may only insert, and only what its policies let in."""
    with role(node.dsn, *WRITER) as (_, dsn):
        yield dsn


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["psycopg", "Session psycopg", "Connection psycopg2"])
def test_many_are_sent_where_one_is(node: Node, writer: str, kind: str) -> None:
    bind(node)
    with opened(writer, kind) as connection:
        Outbox().send(connection, "mine", 1, key="k")
        for values in ((2, 3), (4, 5)):
            assert Outbox().send_many(connection, [Outgoing("mine", n, key="k") for n in values]) == 2
        assert Store().send_many(connection, [Executable("increment", "mine", amount=1)]) == 1
        connection.commit()
        with pytest.raises(Exception, match="row-level security policy for table"):
            Outbox().send_many(connection, [Outgoing("theirs", 6)])
        connection.rollback()
    assert node.waiting() == ["k"] * 5
    assert node.value("SELECT count(*) FROM mailroom.outbox_executable") == 1


async def test_many_are_sent_where_one_is_async(node: Node, writer: str) -> None:
    bind(node)
    async with await psycopg.AsyncConnection.connect(writer) as connection:
        assert await AsyncOutbox().send_many(connection, [Outgoing("mine", n, key="k") for n in (2, 3)]) == 2
    assert node.waiting() == ["k"] * 2


def test_session_that_changes_its_role_sends_many_as_each(node: Node, writer: str) -> None:
    bind(node)
    name = make_url(writer).username
    with node.connection.transaction():
        for current in ("postgres", str(name), "postgres", str(name)):
            node.connection.execute(f"SET ROLE {current}".encode())
            Outbox().send_many(node.connection, [Outgoing("mine", 1, key=current)])
    node.connection.execute("RESET ROLE")
    assert len(node.waiting()) == 4


def test_row_security_that_comes_later_costs_one_transaction_of_a_session(node: Node, writer: str) -> None:
    """Whether a table has any is asked once per session; what is refused then is asked again."""
    many = [Outgoing("mine", 1, key="k")]
    with psycopg.connect(writer) as connection:
        Outbox().send_many(connection, many)
        connection.commit()
        bind(node)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="row-level security"):
            Outbox().send_many(connection, many)
        connection.rollback()
        Outbox().send_many(connection, many)
        connection.commit()
    assert node.waiting() == ["k"] * 2


def test_free_table_is_asked_about_once_per_session(node: Node) -> None:
    many = [Outgoing("mine", 1)]
    with psycopg.connect(node.dsn) as connection:
        for _ in range(3):
            Outbox().send_many(connection, many)
        [(asked,)] = connection.execute(
            "SELECT custom_plans + generic_plans FROM pg_prepared_statements "
            "WHERE statement LIKE '%row_security_active%'"
        )
    assert asked == 1


def test_command_sends_under_policies(node: Node, writer: str) -> None:
    bind(node)
    sent = mailroom("outbox", "send", "mine", "--json", "1", dsn=writer)
    assert (sent.exit_code, sent.stderr) == (0, "")


def test_request_is_sent_under_policies(node: Node) -> None:
    node.inbox("replies", expire_s=60)
    reads = "GRANT SELECT, DELETE, UPDATE ON mailroom.inbox_replies, mailroom.inbox_registry TO {role}"
    with role(node.dsn, *WRITER, reads) as (_, dsn):
        bind(node)
        with Requests(dsn, "replies") as requests, pytest.raises(NoReply):
            requests.ask("mine", 1, timeout_s=0.5)
