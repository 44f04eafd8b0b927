"""Whatever makes a link not flow is told at the reader: which trouble it is, since when, why, and by an exit code."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dispatcher.links import lane, reading, visit
from dispatcher.links.lane import LinksLane
from mailroom.roles.statements import fixed_atoms, grants, schema_atoms
from tests.links.test_links import do
from tests.project.test_docs import blocks
from tests.support.command import mailroom
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.waiting import eventually_async

SECRET = "s3cret"
[POLICIES] = [block.text for block in blocks(page_named("links.md")) if block.language == "sql"]
ATOMS = {*schema_atoms("mailroom", "link-reader", None), *fixed_atoms("link-reader")}
RIGHTS = "; ".join(grants("mailroom", "lyon_reader", ATOMS))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (lane, "FOLLOW_S", 0.05), (lane, "ACKNOWLEDGE_S", 0.05), (reading, "PATIENCE_S", 0.0), (visit, "MATCH_S", 0.0),
        (reading, "LONGEST_PAUSE_S", 0.1), (reading, "LONGEST_STOP_S", 0.1), (visit, "AGAIN_PAUSE_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


class Reader:
    """`lyon` reads `paris` as a role of its own, which has what docs/guides/links.md gives it."""

    def __init__(self, source: Node, target: Node) -> None:
        self.source = source
        self.target = target
        known = conninfo_to_dict(source.dsn)
        self.role = "reads_" + str(known["dbname"])[-20:]
        self.execute(f"CREATE ROLE {self.role} LOGIN PASSWORD '{known.get('password', '')}'")
        self.execute(RIGHTS)
        self.dsn = make_conninfo(source.dsn, user=self.role)

    def execute(self, statement: str) -> None:
        self.source.connection.execute(statement.replace("lyon_reader", self.role).encode())

    async def comes(self, key: str) -> None:
        """Send a message at the source, which arrives."""
        await asyncio.to_thread(self.source.send, "order", key=key)
        await asyncio.to_thread(self.source.deliver_all)
        await eventually_async(lambda: ("invoices", key) in self.target.delivered("inbox, key"))

    def status(self) -> tuple[dict[str, Any], int]:
        """Return what the command tells of the source, and its exit code."""
        said = mailroom("link", "status", "--json", dsn=self.target.dsn)
        [found] = json.loads(said.stdout)["sources"]
        return found, said.exit_code

    async def is_told(self, state: str, *why: str) -> None:
        """Wait until the commands tell this trouble. It is told anew at each try, so all of it is asked until it is."""

        def told() -> bool:
            found, code = self.status()
            shown = mailroom("link", "status", dsn=self.target.dsn)
            wholes = [mailroom("status", *json, dsn=self.target.dsn).output for json in ([], ["--json"])]
            assert SECRET not in "".join((json.dumps(found), shown.output, *wholes))
            return (
                (found["state"], code, shown.exit_code) == (state, 1, 1)
                and all(each in str(found["why"]) for each in why)
                and datetime.fromisoformat(found["since"]) <= datetime.now(UTC)
                and f"{state} since " in shown.stdout
                and state in wholes[0]
            )

        try:
            await eventually_async(told)
        except AssertionError:
            raise AssertionError(self.status()) from None

    async def flows(self) -> None:
        """Wait until nothing is told any more."""

        def is_well() -> bool:
            found, code = self.status()
            return (found["state"], found["why"], found["since"], code) == ("open", None, None, 0)

        await eventually_async(is_well)


@pytest.fixture
def reader(source: Node, target: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    source.allow_clocks()
    do(source, "allow", "lyon")
    do(target, "add", "paris", reader="lyon")
    target.inbox("invoices")
    target.connection.execute(
        "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('order', 'invoices', 'paris')"
    )
    found = Reader(source, target)
    monkeypatch.setenv("MAILROOM_DSN_PARIS", found.dsn)
    yield found
    found.execute("DROP OWNED BY lyon_reader")
    found.execute("DROP ROLE lyon_reader")


@contextlib.asynccontextmanager
async def running(reader: Reader) -> AsyncIterator[None]:
    links = LinksLane(reader.target.dsn, poll_interval_s=0.05)
    task = asyncio.create_task(links.run())
    try:
        await eventually_async(lambda: reader.target.rows("SELECT FROM mailroom.lease WHERE role = 'links'"))
        yield
    finally:
        links.stop()
        await task


async def flowing(reader: Reader) -> None:
    await eventually_async(lambda: reader.source.rows("SELECT FROM mailroom.link_topic"))
    await reader.comes("first")
    await reader.flows()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": "nobody", "password": SECRET}, "authentication failed"),
        ({"port": "1", "password": SECRET}, "refused"),
        ({"dbname": "nowhere", "password": None}, "does not exist"),
        ({"host": "no-such-host.invalid", "password": SECRET}, "no-such-host.invalid"),
    ],
    ids=["password", "host away", "database", "name"],
)
async def test_source_that_is_not_reached(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], said: str
) -> None:
    given = {name: value for name, value in changes.items() if value is not None}
    way = make_conninfo(reader.source.dsn if "dbname" in changes else reader.dsn, **given)
    monkeypatch.setenv("MAILROOM_DSN_PARIS", way)
    async with running(reader):
        await reader.is_told("unreachable", said)
        monkeypatch.setenv("MAILROOM_DSN_PARIS", reader.dsn)
        await flowing(reader)


REFUSED = {
    "schema": ("REVOKE USAGE ON SCHEMA mailroom FROM lyon_reader", RIGHTS, "permission denied for schema"),
    "transit": ("REVOKE SELECT ON mailroom.transit FROM lyon_reader", RIGHTS, "permission denied for table transit"),
    "topics": (
        "REVOKE EXECUTE ON FUNCTION mailroom.link_ask FROM lyon_reader", RIGHTS,
        "permission denied for function link_ask",
    ),
    "acked": (
        "REVOKE EXECUTE ON FUNCTION mailroom.link_acknowledge FROM lyon_reader", RIGHTS,
        "permission denied for function link_acknowledge",
    ),
    "read only": (
        "ALTER ROLE lyon_reader SET default_transaction_read_only = on",
        "ALTER ROLE lyon_reader RESET default_transaction_read_only", "read-only",
    ),
    "gone": (
        "ALTER TABLE mailroom.transit RENAME TO elsewhere", "ALTER TABLE mailroom.elsewhere RENAME TO transit",
        "does not exist",
    ),
    "wire": ("UPDATE mailroom.node SET wire = 2", "UPDATE mailroom.node SET wire = 1", "version"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("breaking", REFUSED)
async def test_what_a_person_must_end_stops_the_link_and_it_goes_on_when_he_has(reader: Reader, breaking: str) -> None:
    await stops_and_goes_on(reader, *REFUSED[breaking])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("table", ["transit", "node", "link"])
async def test_what_a_policy_hides_stops_the_link_until_it_is_seen(reader: Reader, table: str) -> None:
    hide, show = (f"ALTER TABLE mailroom.{table} {what} ROW LEVEL SECURITY" for what in ("ENABLE", "DISABLE"))
    await stops_and_goes_on(reader, hide, show, "hides from role")


async def stops_and_goes_on(reader: Reader, breaking: str, mending: str, said: str) -> None:
    async with running(reader):
        await flowing(reader)
        reader.execute(breaking)
        reader.source.end_sessions("mailroom links")
        # What is to be acknowledged, and what is wanted anew, meets the missing rights.
        if "elsewhere" not in breaking:
            await asyncio.to_thread(reader.source.send, "order", key="second")
            await asyncio.to_thread(reader.source.deliver_all)
        reader.target.connection.execute("UPDATE mailroom.subscription SET topic = 'order.#'")
        await reader.is_told("unreachable" if said == "read-only" else "stopped", said)
        reader.execute(mending)
        await reader.flows()
        assert reader.target.value("SELECT count(*) FROM mailroom.known") == 0
        await reader.comes("third")


@pytest.mark.slow
async def test_since_is_when_it_was_read_last_whatever_goes_wrong_afterwards(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(reader):
        await flowing(reader)
        monkeypatch.setenv("MAILROOM_DSN_PARIS", make_conninfo(reader.dsn, port="1"))
        reader.source.end_sessions("mailroom links")
        await reader.is_told("unreachable", "refused")
        before = reader.status()[0]["since"]
        do(reader.source, "remove", "lyon", side="reader")
        monkeypatch.setenv("MAILROOM_DSN_PARIS", reader.dsn)
        await reader.is_told("stopped", "allows no reader")
        assert reader.status()[0]["since"] == before


@pytest.mark.slow
async def test_source_that_is_locked_is_told_while_it_is(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(reader):
        await flowing(reader)
        with psycopg.connect(reader.source.dsn) as locking:
            locking.execute("LOCK mailroom.transit")
            await reader.is_told("failing", "lock")
            locking.rollback()
        await reader.flows()


async def test_excluded_source_is_no_trouble(reader: Reader) -> None:
    do(reader.target, "exclude", "paris", why="no power")
    found, code = reader.status()
    assert (found["state"], code) == ("excluded", 0)
    assert found["since"] is not None
    do(reader.target, "include", "paris")
    assert reader.status()[0]["since"] is None
