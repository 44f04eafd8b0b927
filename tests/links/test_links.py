"""The class `Links`: who may read a node, what it reads, and how that goes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from mailroom import AsyncLinks, Bridges, Links
from mailroom.bridges import OutSettings
from mailroom.errors import (
    ConfigurationError,
    InvalidMessage,
    InvalidName,
    LinkRefused,
    MailroomError,
    NotInTransaction,
    SchemaError,
    UnknownLink,
)
from mailroom.links.handshake.hello import asking_topics, greeting, matching
from mailroom.links.handshake.target import forgetting, introducing, pinning, reading_origins
from mailroom.links.resume import reporting
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.sql.runner import run
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import SCHEMA, Node
from tests.support.waiting import wait_until_blocked

LINKS = Links()
ME: dict[str, Any] = {"actor": "ada"}


def do(node: Node, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of `Links` in a transaction of its own."""
    with node.connection.transaction():
        return getattr(LINKS, method)(node.connection, *arguments, **({} if method == "status" else ME), **named)


def audited(node: Node) -> list[Any]:
    return node.rows("SELECT action, key, messages, actor, reason FROM mailroom.audit ORDER BY id")


def stamp(node: Node, link: int, first: int, last: int) -> None:
    """Put rows into transit, as a delivery does."""
    node.connection.execute(
        "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, "
        "value, sent_at) SELECT %s, n, 10 * n, now() - interval '1 min', gen_random_uuid(), 't', 'k', 'M', 'U', "
        "'\\xf6', now() FROM generate_series(%s::int, %s) AS n",
        [link, first, last],
    )


def receive(node: Node, origin: int, last: int) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, ids) "
        "VALUES (%s, %s, 1, gen_random_uuid(), now(), %s, '{}')",
        [origin, last, 10 * last],
    )


# -- Allow and add ----------------------------------------------------------------------------------------------------


def test_reader_is_allowed_once(source: Node) -> None:
    assert do(source, "allow", "south")
    assert not do(source, "allow", "south", why="again")
    [reader] = do(source, "status").readers
    assert (reader.name, reader.state, reader.keep_s, reader.max_rows) == ("south", "open", 172_800, None)
    assert audited(source) == [("link allow", "south", 0, "ada", None)]


def test_settings_that_are_given_replace_those_of_a_reader(source: Node) -> None:
    do(source, "allow", "south", keep_s=60, max_rows=1_000)
    assert not do(source, "allow", "south", keep_s=60)
    with pytest.raises(ConfigurationError, match=r"stays as it is: keep_s 60 -> 0\. To .* mailroom link set south"):
        do(source, "allow", "south", keep_s=0, max_rows=1_000)
    assert do(source, "set", "south", keep_s=0) == "keep_s 60 -> 0"
    assert do(source, "set", "south", max_rows=0, keep_s=0) == "max_rows 1000 -> none"
    assert do(source, "set", "south", max_rows=0) == ""
    [reader] = do(source, "status").readers
    assert (reader.keep_s, reader.max_rows) == (0, None)
    assert [row[0] for row in audited(source)] == ["link allow", "link set", "link set"]
    for wrong in ({}, {"keep_s": 1, "service": "hq"}):
        with pytest.raises(ConfigurationError, match="Give settings of one link"):
            do(source, "set", "south", **wrong)
    with pytest.raises(UnknownLink, match="This node reads no node south"):
        do(source, "set", "south", service="hq")


def test_settings_that_make_no_sense_are_refused(source: Node) -> None:
    wrong: list[dict[str, Any]] = [
        {"keep_s": -1}, {"keep_s": float("nan")}, {"keep_s": float("inf")}, {"max_rows": -1},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises(ConfigurationError):
            do(source, "allow", "south", **settings)
    assert do(source, "status").readers == ()


def test_names_are_checked_before_anything_else(source: Node) -> None:
    for name in ("", "1", "a b", "ä", "a" * 64, "a;b"):
        for method in ("allow", "add", "remove", "exclude", "include"):
            with pytest.raises(InvalidName):
                do(source, method, name)
        with pytest.raises(InvalidName):
            do(source, "add", "north", reader=name)


def test_source_is_added_once(target: Node) -> None:
    assert do(target, "add", "north", service="hq", reader="south")
    assert not do(target, "add", "north")
    with pytest.raises(ConfigurationError, match=r"stays as it is: service hq -> hq2, .* mailroom link set north"):
        do(target, "add", "north", service="hq2", source_schema="shop")
    assert do(target, "set", "north", service="hq2") == "service hq -> hq2"
    [found] = do(target, "status").sources
    assert (found.name, found.state, found.service, found.reader) == ("north", "open", "hq2", "south")
    assert do(target, "set", "north", service="", reader="me") == "service hq2 -> none, reader south -> me"
    assert [row[:2] for row in audited(target)] == [("link add", "north"), *[("link set", "north")] * 2]
    with pytest.raises(UnknownLink, match="No node north may read this one"):
        do(target, "set", "north", keep_s=1)


def test_what_another_session_is_making_stays_as_that_one_makes_it(source: Node) -> None:
    hooks = [OutSettings("webhook", f"https://{host}.example/") for host in "ab"]
    calls: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (LINKS.allow, {"reader": "south", "keep_s": 60}, {"reader": "south", "keep_s": 0}),
        (LINKS.add, {"source": "south", "service": "a"}, {"source": "south", "service": "b"}),
        (Bridges().out, {"name": "hooks", "settings": hooks[0]}, {"name": "hooks", "settings": hooks[1]}),
    ]
    with psycopg.connect(source.dsn) as one, psycopg.connect(source.dsn) as other, ThreadPoolExecutor(1) as thread:
        for make, first, second in calls:
            assert make(one, **first, **ME)
            waiting = thread.submit(make, other, **second, **ME)
            wait_until_blocked(source.connection, other.info.backend_pid)
            one.commit()
            with pytest.raises(ConfigurationError, match="stays as it is"):
                waiting.result()
            other.rollback()


def test_reader_keeps_the_name_that_its_node_had(target: Node) -> None:
    own = target.value("SELECT name FROM mailroom.node")
    do(target, "add", "north")
    target.connection.execute("UPDATE mailroom.node SET name = 'lyon'")
    do(target, "add", "north")
    [found] = do(target, "status").sources
    assert found.reader == own


def test_source_that_was_reached_keeps_its_link(source: Node, target: Node) -> None:
    meet(source, target)
    for changed in ({"reader": "lyon"}, {"source_schema": "shop"}):
        for method in ("add", "set"):
            with pytest.raises(ConfigurationError, match="mailroom link remove north --source"):
                do(target, method, "north", **changed)
    do(target, "set", "north", service="elsewhere", reader="south")


def test_what_is_no_service_is_refused_and_not_shown(target: Node) -> None:
    for service in ("", " hq", "postgresql://me:secret@host/db", "password=secret", "a]b", "a\nb"):
        with pytest.raises(ConfigurationError) as raised:
            do(target, "add", "north", service=service)
        assert "secret" not in str(raised.value)


def test_first_link_notes_where_the_node_is(source: Node, target: Node) -> None:
    do(source, "allow", "south")
    do(target, "add", "north")
    for node in (source, target):
        assert node.value(
            "SELECT database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())::bigint "
            "AND started_at = pg_postmaster_start_time() FROM mailroom.node"
        )


# -- Status -----------------------------------------------------------------------------------------------------------


def meet(source: Node, target: Node) -> int:
    """Link two nodes, as commands and hello do; return the link's number."""
    source.connection.execute("UPDATE mailroom.node SET name = 'north'")
    if not source.rows("SELECT FROM mailroom.link"):
        do(source, "allow", "south")
    if not target.rows("SELECT FROM mailroom.origin"):
        do(target, "add", "north", reader="south")
    [origin] = run(target.connection, reading_origins(SCHEMA))
    party, run_id = run(target.connection, introducing(SCHEMA, origin)), uuid4()
    with source.connection.transaction():
        greeted = run(source.connection, greeting(SCHEMA, "north", party, origin.pinned, run_id))
    with target.connection.transaction():
        run(target.connection, pinning(SCHEMA, origin, greeted))
    run(source.connection, asking_topics(SCHEMA, greeted.link, run_id, ["order"]))
    run(source.connection, matching(SCHEMA, greeted.link, run_id))
    return greeted.link


def test_status_of_a_reader(source: Node, target: Node) -> None:
    link = meet(source, target)
    [reader] = do(source, "status").readers
    assert (reader.in_doubt, reader.backlog, reader.lag_s, reader.acked, reader.last) == (False, 0, 0, 0, 0)
    assert reader.topics == ("order",)
    assert reader.seen_at is not None
    stamp(source, link, 1, 9)
    source.connection.execute("UPDATE mailroom.link SET acked = 4")
    source.connection.execute("UPDATE mailroom.transit SET stamped_at = now() - interval '1 h' WHERE seq <= 4")
    [reader] = do(source, "status").readers
    assert (reader.backlog, reader.acked, reader.last) == (5, 4, 9)
    assert 60 <= reader.lag_s < 600
    source.connection.execute("UPDATE mailroom.node SET life = gen_random_uuid()")
    [reader] = do(source, "status").readers
    assert reader.in_doubt


def test_reader_that_has_all_is_not_behind_whatever_was_trimmed(source: Node, target: Node) -> None:
    link = meet(source, target)
    stamp(source, link, 9, 9)
    source.connection.execute("UPDATE mailroom.link SET acked = 9")
    [reader] = do(source, "status").readers
    assert (reader.backlog, reader.lag_s) == (0, 0)


def test_status_of_a_source(source: Node, target: Node) -> None:
    meet(source, target)
    target.inbox("shipping")
    target.connection.execute(
        "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('order', 'shipping', '*')"
    )
    [found] = do(target, "status").sources
    assert (found.position, found.shown, found.received_at, found.topics) == (0, 0, None, ("order",))
    assert (found.incarnation, found.link) == (1, source.value("SELECT number FROM mailroom.link"))
    number = target.value("SELECT number FROM mailroom.origin")
    receive(target, number, 3)
    receive(target, number, 7)
    target.connection.execute("UPDATE mailroom.origin SET state = 'stopped', why = 'because'")
    [found] = do(target, "status").sources
    assert (found.state, found.why, found.position, found.shown) == ("stopped", "because", 7, 70)
    assert found.received_at is not None


# -- Remove -----------------------------------------------------------------------------------------------------------


def test_removed_reader_leaves_nothing_behind(source: Node, target: Node) -> None:
    link = meet(source, target)
    stamp(source, link, 3, 9)
    stamp(source, link + 1, 1, 1)
    source.connection.execute("INSERT INTO mailroom.link_topic (topic, link) VALUES ('order', %s)", [link + 1])
    source.connection.execute("UPDATE mailroom.link SET acked = 4")
    removed = do(source, "remove", "south", dry_run=True)
    assert (removed.side, removed.given_up) == ("reader", 5)
    assert len(do(source, "status").readers) == 1
    assert do(source, "remove", "south", why="closed") == removed
    assert do(source, "status").readers == ()
    assert source.rows("SELECT DISTINCT link FROM mailroom.transit") == [(link + 1,)]
    assert source.rows("SELECT link FROM mailroom.link_topic") == [(link + 1,)]
    assert audited(source)[1:] == [("link remove", "south", 5, "ada", "closed")]


def test_removed_reader_leaves_nothing_of_a_delivery_that_knew_it(source: Node, target: Node) -> None:
    link = meet(source, target)
    stamp(source, link, 1, 2)
    with psycopg.connect(source.dsn) as delivery, psycopg.connect(source.dsn) as other:
        delivery.execute(DISPATCH_LOCK.at(schema=SCHEMA).sql)
        with ThreadPoolExecutor(1) as thread:
            removing = thread.submit(LINKS.remove, other, "south", actor="ada")
            wait_until_blocked(source.connection, other.info.backend_pid)
            delivery.execute(
                "INSERT INTO mailroom.transit SELECT link, 3, 30, stamped_at, message_id, topic, key, kind, "
                "message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at "
                "FROM mailroom.transit WHERE seq = 2"
            )
            delivery.commit()
            removing.result()
        other.commit()
    assert source.rows("SELECT seq FROM mailroom.transit") == []


def test_reader_that_is_allowed_again_has_another_link_and_nothing_old_comes_twice(source: Node, target: Node) -> None:
    first = meet(source, target)
    receive(target, target.value("SELECT number FROM mailroom.origin"), 7)
    do(source, "remove", "south")
    with pytest.raises(LinkRefused, match="mailroom link allow south"):
        meet_only(source, target)
    do(source, "allow", "south")
    assert meet(source, target) > first
    [found] = do(target, "status").sources
    assert (found.position, found.shown) == (0, 70)


def test_what_came_by_a_link_of_another_number_is_known(source: Node, target: Node) -> None:
    """The source was put back to before it allowed its readers, and then allowed another one first."""
    meet(source, target)
    [origin] = run(target.connection, reading_origins(SCHEMA))
    for first in (1, 3, 5):
        target.connection.execute(
            "INSERT INTO mailroom.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids) "
            "SELECT %s, %s, %s, u[2], now(), %s, u FROM (SELECT ARRAY[gen_random_uuid(), gen_random_uuid()]) AS a (u)",
            [origin.number, first, first + 1, 10 * first],
        )
    ids = target.rows("SELECT unnest(ids) FROM mailroom.receipt")
    source.connection.execute("DELETE FROM mailroom.link")
    do(source, "allow", "west")
    do(source, "allow", "south")
    # What a daemon does before it takes the lock, so that this is not for long.
    link = source.value("SELECT number FROM mailroom.link WHERE name = 'south'")
    assert run(target.connection, forgetting(SCHEMA, origin, link, receipts=2))
    assert target.rows("SELECT first FROM mailroom.receipt") == [(5,)]
    meet(source, target)
    assert target.rows("SELECT count(*) FROM mailroom.receipt") == [(0,)]
    known = target.rows("SELECT message_id FROM mailroom.known WHERE origin = %s", origin.number)
    assert sorted(known) == sorted(ids)
    assert not run(target.connection, forgetting(SCHEMA, origin, link))
    assert audited(target)[-1][:4] == ("dispatcher new-link", "north", 6, "dispatcher")
    [found] = do(target, "status").sources
    assert (found.position, found.shown) == (0, 50)
    report = run(target.connection, reporting(SCHEMA, "north"))
    assert (report.lost, report.earlier) == ((), 6)


def meet_only(source: Node, target: Node) -> None:
    [origin] = run(target.connection, reading_origins(SCHEMA))
    party = run(target.connection, introducing(SCHEMA, origin))
    with source.connection.transaction():
        run(source.connection, greeting(SCHEMA, "north", party, origin.pinned, uuid4()))


def test_removed_source_is_forgotten_and_reads_nothing_twice_when_it_is_added_again(source: Node, target: Node) -> None:
    meet(source, target)
    number = target.value("SELECT number FROM mailroom.origin")
    receive(target, number, 7)
    target.connection.execute("INSERT INTO mailroom.known VALUES (%s, gen_random_uuid())", [number])
    assert do(target, "remove", "north", dry_run=True).side == "source"
    assert len(do(target, "status").sources) == 1
    do(target, "remove", "north")
    for table in ("origin", "receipt", "known"):
        assert target.rows(f"SELECT FROM mailroom.{table}") == []
    with pytest.raises(LinkRefused, match="has forgotten what it received"):
        meet(source, target)


def test_node_that_reads_and_is_read_is_removed_on_the_side_that_is_meant(source: Node) -> None:
    do(source, "allow", "south")
    do(source, "add", "south")
    with pytest.raises(MailroomError, match="--reader"):
        do(source, "remove", "south")
    assert do(source, "remove", "south", side="source").side == "source"
    assert do(source, "remove", "south").side == "reader"
    with pytest.raises(UnknownLink):
        do(source, "remove", "south")
    for side in ("reader", "source"):
        with pytest.raises(UnknownLink):
            do(source, "remove", "south", side=side)


# -- Exclude and include ----------------------------------------------------------------------------------------------


def test_excluded_source_is_told_and_included_again(target: Node) -> None:
    do(target, "add", "north")
    assert do(target, "exclude", "north", dry_run=True)
    assert do(target, "status").sources[0].state == "open"
    assert do(target, "exclude", "north", why="no power")
    assert not do(target, "exclude", "north")
    [found] = do(target, "status").sources
    assert (found.state, found.why) == ("excluded", "excluded by ada: no power")
    assert do(target, "include", "north")
    assert not do(target, "include", "north")
    [found] = do(target, "status").sources
    assert (found.state, found.why) == ("open", None)
    assert [row[:2] for row in audited(target)] == [
        ("link add", "north"), ("link exclude", "north"), ("link include", "north"),
    ]  # fmt: skip


def test_stopped_source_is_not_opened_by_include(target: Node) -> None:
    do(target, "add", "north")
    target.connection.execute("UPDATE mailroom.origin SET state = 'stopped', why = 'because'")
    assert not do(target, "include", "north")
    assert do(target, "status").sources[0].why == "because"


def test_link_that_is_not_there_is_told(target: Node) -> None:
    for method in ("exclude", "include", "remove"):
        with pytest.raises(UnknownLink, match="mailroom link status"):
            do(target, method, "north")


# -- All of them ------------------------------------------------------------------------------------------------------


def test_calls_are_part_of_a_transaction(source: Node) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("allow", {}), ("add", {}), ("set", {"keep_s": 0}), ("remove", {}), ("exclude", {}), ("include", {}),
    ]  # fmt: skip
    for method, named in calls:
        with pytest.raises(NotInTransaction):
            getattr(LINKS, method)(source.connection, "south", **ME, **named)
    with psycopg.connect(source.dsn) as connection:
        LINKS.allow(connection, "south", **ME)
        connection.rollback()
    assert do(source, "status").readers == ()


def test_calls_name_who_acts(source: Node) -> None:
    for method in ("allow", "add", "remove", "exclude", "include"):
        with pytest.raises(InvalidMessage, match="say who acts"):
            getattr(LINKS, method)(source.connection, "south", actor=" ")


def test_schema_that_is_not_there_is_told(source: Node) -> None:
    with pytest.raises(SchemaError), source.connection.transaction():
        Links(schema="nowhere").allow(source.connection, "south", actor="ada")
    with pytest.raises(SchemaError):
        Links(schema="nowhere").status(source.connection)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_every_call_on_every_kind_of_connection(source: Node, kind: str) -> None:
    with opened(source.dsn, kind) as connection:
        assert LINKS.allow(connection, "south", keep_s=60, max_rows=10, **ME)
        assert LINKS.add(connection, "north", service="hq", reader="me", **ME)
        assert LINKS.set(connection, "south", keep_s=0, **ME) == "keep_s 60 -> 0"
        assert LINKS.exclude(connection, "north", **ME)
        found = LINKS.status(connection)
        assert [each.name for each in found.readers] == ["south"]
        assert [each.state for each in found.sources] == ["excluded"]
        assert found.readers[0].topics == ()
        assert LINKS.include(connection, "north", **ME)
        assert LINKS.remove(connection, "south", **ME).side == "reader"
        assert LINKS.remove(connection, "north", **ME).side == "source"
        connection.rollback()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_every_call_on_every_kind_of_async_connection(source: Node, kind: str) -> None:
    links = AsyncLinks()
    async with opened_async(source.dsn, kind) as connection:
        assert await links.allow(connection, "south", keep_s=60, max_rows=10, **ME)
        assert await links.add(connection, "north", service="hq", reader="me", **ME)
        assert await links.set(connection, "north", service="", **ME) == "service hq -> none"
        assert await links.exclude(connection, "north", **ME)
        assert [each.state for each in (await links.status(connection)).sources] == ["excluded"]
        assert await links.include(connection, "north", **ME)
        assert (await links.remove(connection, "south", **ME)).side == "reader"
        assert (await links.remove(connection, "north", **ME)).side == "source"
        await connection.rollback()
