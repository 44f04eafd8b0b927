"""What `mailroom grant link-reader` gives: a reader's login has what it needs at the source, and no more."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dispatcher.links.at_source.acknowledge import acknowledging
from dispatcher.links.at_source.bounds import START, bounding
from dispatcher.links.at_source.fetch import fetching
from dispatcher.links.lane import LinksLane
from mailroom.errors import LinkRefused
from mailroom.links.handshake.diverged import claiming, finding_anchor, reading_ending, reading_extent, reading_sent
from mailroom.links.handshake.hello import LinkTaken, asking_topics, checking_sight, greeting, matching
from mailroom.links.handshake.target import introducing, reading_origins
from mailroom.links.marks import asking_mark
from mailroom.links.resume import moving
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.links.test_links import do, stamp
from tests.project.test_docs import blocks
from tests.support.node import SCHEMA, Node
from tests.support.pages import page_named
from tests.support.roles import named, rights, role, take_over
from tests.support.waiting import eventually_async

PAGE: Path = page_named("links.md")


class Login:
    """A reader's login, in a transaction that is rolled back at the end, and the role with it: it is the server's."""

    def __init__(self, connection: psycopg.Connection[Any], greet: Callable[[UUID], Operation[Any]]) -> None:
        self.connection = connection
        self._greet = greet
        self.run_id = uuid4()
        self.link = 0

    def hello(self) -> None:
        self.link = run(self.connection, self._greet(self.run_id)).link

    def refused(self, statement: str) -> None:
        with pytest.raises(psycopg.errors.InsufficientPrivilege), self.connection.transaction():
            self.connection.execute(statement.encode())


@pytest.fixture
def login(source: Node, target: Node) -> Iterator[Login]:
    """Login `lyon_reader` at the source, beside the reader `dijon`, for which a message waits too."""
    do(source, "allow", "lyon")
    do(source, "allow", "dijon")
    do(target, "add", "paris", reader="lyon")
    for (number,) in source.rows("SELECT number FROM mailroom.link"):
        stamp(source, number, 1, 3)
    source.connection.execute(
        "INSERT INTO mailroom.link_topic (topic, link) SELECT 'theirs', number FROM mailroom.link WHERE name = 'dijon'"
    )
    [origin] = run(target.connection, reading_origins(SCHEMA))
    party = run(target.connection, introducing(SCHEMA, origin))
    with psycopg.connect(source.dsn) as connection:
        connection.execute("CREATE ROLE lyon_reader")
        yield Login(connection, lambda run_id: greeting(SCHEMA, "paris", party, origin.pinned, run_id))
        connection.rollback()


def grant(login: Login, *, apart: bool) -> None:
    """Grant what a reader needs, with the policies of the page or without, and become the login."""
    [policies] = [block.text for block in blocks(PAGE) if block.language == "sql"]
    login.connection.execute(named(rights("link-reader"), "lyon_reader").encode())
    if apart:
        login.connection.execute(policies.encode())
    login.connection.execute("SET LOCAL ROLE lyon_reader")


@pytest.mark.sample(1)
@pytest.mark.parametrize("apart", [True, False])
def test_login_reads_its_link(login: Login, apart: bool) -> None:
    grant(login, apart=apart)
    login.hello()
    connection, link, run_id = login.connection, login.link, login.run_id
    assert run(connection, asking_topics(SCHEMA, link, run_id, ["order.#", "paid"]))
    assert run(connection, asking_topics(SCHEMA, link, run_id, ["paid"])) == {"paid"}
    bounds = run(connection, bounding(SCHEMA, link, START, rows=10, max_bytes=1_000))
    assert (bounds.verdict, bounds.last) == ("agrees", 3)
    assert run(connection, fetching(SCHEMA, link, after=0, to=3)).size > 0
    assert run(connection, matching(SCHEMA, link, run_id))
    assert run(connection, acknowledging(SCHEMA, link, run_id, 3))
    assert run(connection, claiming(SCHEMA, link, run_id, 3, 30))
    assert run(connection, reading_extent(SCHEMA, link)) == (1, 3)
    assert len(run(connection, reading_sent(SCHEMA, link, 0, 10))) == 3
    ending = run(connection, reading_ending(SCHEMA, link, 2))
    assert ending is not None
    assert run(connection, finding_anchor(SCHEMA, link, [(2, ending.id, ending.stamped_at)])) == 2
    assert run(connection, finding_anchor(SCHEMA, link, [(2, uuid4(), datetime.now(UTC))])) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("apart", [False, True])
def test_login_changes_nothing_but_what_readers_write(login: Login, apart: bool) -> None:
    grant(login, apart=apart)
    for statement in (
        "SELECT FROM mailroom.outbox",
        "SELECT FROM mailroom.inbox",
        "UPDATE mailroom.node SET name = 'x'",
        "UPDATE mailroom.link SET name = 'x'",
        "UPDATE mailroom.link SET state = 'open'",
        "UPDATE mailroom.link SET keep_s = 0",
        "UPDATE mailroom.link SET wanted_clock = 1",
        "UPDATE mailroom.link SET claim_clock = 1",
        "UPDATE mailroom.link SET matched = gen_random_uuid()",
        "UPDATE mailroom.link SET by_role = 'x'",
        "UPDATE mailroom.link SET reader_id = gen_random_uuid()",
        "UPDATE mailroom.link SET acked = 1",
        "INSERT INTO mailroom.link (name) VALUES ('x')",
        "DELETE FROM mailroom.link",
        "DELETE FROM mailroom.transit",
        "UPDATE mailroom.transit SET seq = 0",
        "INSERT INTO mailroom.transit (link) VALUES (1)",
        "SELECT nextval('mailroom.clock')",
        "SELECT FROM mailroom.link_allowed",
        "UPDATE mailroom.link_topic SET commands = true",
        "INSERT INTO mailroom.link_topic (topic, link) VALUES ('order', 1)",
        "DELETE FROM mailroom.link_topic",
    ):
        login.refused(statement)


@pytest.mark.sample(1)
@pytest.mark.parametrize("apart", [False, True])
def test_login_gets_no_topic_that_its_reader_is_not_allowed(source: Node, login: Login, apart: bool) -> None:
    do(source, "set", "lyon", topics=["order.#", "print"])
    grant(login, apart=apart)
    login.hello()
    asking = asking_topics(SCHEMA, login.link, login.run_id, ["order.paid", "print", "secret", "#"])
    assert run(login.connection, asking) == {"order.paid", "print"}
    asked = login.connection.execute("SELECT topic, commands FROM mailroom.link_topic WHERE link = %s", [login.link])
    assert set(asked.fetchall()) == {("order.paid", False), ("print", True)}


def test_policies_hold_readers_apart(login: Login) -> None:
    grant(login, apart=True)
    login.hello()
    connection, link = login.connection, login.link
    assert connection.execute("SELECT DISTINCT link FROM mailroom.transit").fetchall() == [(link,)]
    assert connection.execute("SELECT FROM mailroom.link_topic").fetchall() == []


def test_acts_on_a_link_are_those_of_the_login_that_said_hello(login: Login) -> None:
    """Though the functions are bound by no policy."""
    grant(login, apart=True)
    login.hello()
    connection, link, run_id = login.connection, login.link, login.run_id
    connection.execute("RESET ROLE")
    connection.execute("UPDATE mailroom.link SET by_role = 'somebody_else' WHERE number = %s", [link])
    connection.execute("SET LOCAL ROLE lyon_reader")
    for act in (
        matching(SCHEMA, link, run_id), claiming(SCHEMA, link, run_id, 3, 30),
        asking_topics(SCHEMA, link, run_id, ["theirs"]),
    ):  # fmt: skip
        with pytest.raises(LinkTaken):
            run(connection, act)
    assert not run(connection, acknowledging(SCHEMA, link, run_id, 3))
    with pytest.raises(LinkRefused, match="another login"):
        login.hello()
    hello = "SELECT mailroom.link_hello(%s, gen_random_uuid(), 1, 1, 1, gen_random_uuid())"
    assert connection.execute(hello, [link]).fetchall() == [(False,)]
    run(connection, asking_mark(SCHEMA, link, run_id, 100))
    row = connection.execute(
        "SELECT matched, claim_seq, wanted_clock, acked FROM mailroom.link WHERE number = %s", [link]
    )
    assert row.fetchone() == (None, None, 0, 0)
    [(theirs,)] = connection.execute("SELECT number FROM mailroom.link WHERE name = 'dijon'").fetchall()
    with pytest.raises(LinkTaken):
        run(connection, matching(SCHEMA, theirs, run_id))
    connection.execute("RESET ROLE")
    run(connection, moving(SCHEMA, "lyon", actor="ada"))
    connection.execute("SET LOCAL ROLE lyon_reader")
    login.hello()
    assert connection.execute(hello, [link]).fetchall() == [(False,)], "the id of another reader stays"


def test_batches_are_found_by_the_index_under_the_policies(login: Login) -> None:
    grant(login, apart=True)
    plan = login.connection.execute(
        "EXPLAIN SELECT count(*) FROM mailroom.transit WHERE link = 1 AND seq > 2 AND seq <= 100"
    ).fetchall()
    conditions = [line for (line,) in plan if "Index Cond:" in line]
    assert any("link = 1" in line and "seq > 2" in line for line in conditions), plan


@pytest.mark.slow
def test_rows_that_are_hidden_from_the_owner_too_are_not_taken_for_none(login: Login) -> None:
    grant(login, apart=True)
    login.hello()
    run(login.connection, checking_sight(SCHEMA, "paris", login.link, 0))
    login.connection.execute("RESET ROLE")
    login.connection.execute("CREATE ROLE lyon_owner")
    take_over(login.connection, SCHEMA, "lyon_owner")
    login.connection.execute("ALTER TABLE mailroom.transit FORCE ROW LEVEL SECURITY")
    login.connection.execute("DROP POLICY lyon ON mailroom.transit")
    login.connection.execute("SET LOCAL ROLE lyon_reader")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security policy for table"):
        run(login.connection, checking_sight(SCHEMA, "paris", login.link, 0))


def test_limits_that_are_hidden_from_the_owner_too_are_not_taken_for_none(source: Node, login: Login) -> None:
    do(source, "set", "lyon", topics="order.#")
    grant(login, apart=False)
    login.hello()
    login.connection.execute("RESET ROLE")
    login.connection.execute("CREATE ROLE lyon_owner")
    take_over(login.connection, SCHEMA, "lyon_owner")
    for change in ("ENABLE", "FORCE"):
        login.connection.execute(f"ALTER TABLE mailroom.link_allowed {change} ROW LEVEL SECURITY")
    login.connection.execute("SET LOCAL ROLE lyon_reader")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security policy for table"):
        run(login.connection, asking_topics(SCHEMA, login.link, login.run_id, ["secret"]))


@pytest.fixture
def login_dsn(source: Node) -> Iterator[str]:
    """The source's database, as a login of its own that has what the page says, and is held apart from others."""
    known = conninfo_to_dict(source.dsn)
    name = "lyon_reader_" + str(known["dbname"])[-20:]
    source.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{known.get('password', '')}'".encode())
    source.connection.execute(named(rights("link-reader"), name).encode())
    for block in blocks(PAGE):
        if block.language == "sql":
            source.connection.execute(block.text.replace("lyon_reader", name).encode())
    yield make_conninfo(source.dsn, user=name)
    source.connection.execute(f"DROP OWNED BY {name}".encode())
    source.connection.execute(f"DROP ROLE {name}".encode())


@pytest.mark.slow
async def test_dispatcher_reads_with_this_login(
    source: Node, target: Node, login_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(source, "allow", "lyon")
    do(target, "add", "paris", reader="lyon")
    target.inbox("invoices")
    target.connection.execute(
        "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('order', 'invoices', 'paris')"
    )
    monkeypatch.setenv("MAILROOM_DSN_PARIS", login_dsn)
    with role(target.dsn, *rights("dispatcher", "invoices")) as (_, dsn):
        await reads_over_link(source, target, LinksLane(dsn, poll_interval_s=0.1))


async def reads_over_link(source: Node, target: Node, lane: LinksLane) -> None:
    """Run the lane until it has received a message and acknowledged it."""
    running = asyncio.create_task(lane.run())
    try:
        await eventually_async(lambda: source.rows("SELECT FROM mailroom.link_topic"))
        source.send("order", {"order": 42}, key="k")
        source.deliver_all()
        await eventually_async(lambda: target.delivered("inbox, key") == [("invoices", "k")])
        await eventually_async(lambda: source.value("SELECT acked FROM mailroom.link") == 1)
        [found] = do(target, "status").sources
        assert (found.state, found.why, found.position) == ("open", None, 1)
    finally:
        lane.stop()
        await running
